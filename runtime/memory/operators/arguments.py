"""Arguments of operators: by name, what is written to, and what cannot be computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ... import compat
from .. import computed
from ..tensor import RowShardedTensor, before_write, hooks_of_parameters, keep

aten = torch.ops.aten


def by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator, by the names that its schema gives them."""
    named = {}
    for i, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        named[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name, default)
    return named


def leaves_of(*values: Any) -> list[Tensor]:
    """Return the tensors in nested arguments."""
    return [leaf for leaf in compat.tree_leaves(values) if isinstance(leaf, Tensor)]


def rows_among(*values: Any) -> list[RowShardedTensor]:
    """Return the sharded tensors in nested arguments."""
    return [leaf for leaf in compat.tree_leaves(values) if isinstance(leaf, RowShardedTensor)]


def written_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    if func._schema.is_mutable:
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from leaves_of(args[i] if i < len(args) else kwargs.get(argument.name))


def about_to_write(tensors: Sequence[Tensor], overwrites: bool = False) -> None:
    """Tell autograd, gathers and copies on the host that rows change; see :func:`.before_write`.

    Args:
        overwrites: Whether all values are replaced; then their digests need not be compared.
    """
    sharded = [tensor for tensor in tensors if isinstance(tensor, RowShardedTensor)]
    for tensor in sharded:
        keep(tensor)
        if overwrites:
            tensor.backing.noted.pop(tensor.row_split.name, None)
    before_write(*sharded)


_OF_NO_VALUES = ("_like", "::new_zeros", "::new_ones", "::new_full", "::new_empty", "::new_empty_strided")
"""Ends of the names of operators that make tensors of a shape."""


def is_of_shape(func: Any) -> bool:
    """Whether an operator reads shapes, and no values."""
    return func._schema.name.endswith(_OF_NO_VALUES)  # type: ignore[no-any-return]


def note_origin(func: Any, sources: Sequence[Tensor], result: Any) -> None:
    """Note of results that they are values of parameters, and neither gradients nor an optimizer's state.

    What is computed from parameters and from others is not: an update that decays weights.
    """
    rows = [tensor for tensor in sources if isinstance(tensor, RowShardedTensor)]
    if all(tensor.is_of_parameter for tensor in rows) and not is_of_shape(func):
        for made in rows_among(result):
            made.computed_from(rows[0])


def how_computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Tensor]) -> str:
    """Return how an operator computes from parameters, for ranks to compare; "" if they need not.

    They compare functions of parameters and, while autograd records, of these and others, but no writes to parameters,
    gradients or an optimizer's state.
    """
    are_known = [bool(computed.text_of(t)) or getattr(t, "is_of_parameter", False) for t in leaves]
    if not torch.is_grad_enabled():
        rows = [t for t in leaves if isinstance(t, RowShardedTensor)]
        if compat.in_backward() or not all(t.is_of_parameter for t in rows):
            return ""
    if not any(are_known):
        return ""
    if any(isinstance(t, DTensor) and getattr(t, "backing", ()) for t in written_to(func, args, kwargs)):
        return ""
    return computed.describe(func._schema.name.removeprefix("aten::"), args, kwargs)


def dims_of(dim: Any, ndim: int) -> tuple[int, ...] | None:
    """Return dimensions, counted from the first one; None: all of them."""
    if dim is None or dim == []:
        return None
    return tuple(d % max(ndim, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim]))


def refuse(func: Any, args: Any, kwargs: Any, why: str = "") -> NoReturn:
    tensors = leaves_of(args, kwargs)
    sharded = next((t for t in tensors if isinstance(t, RowShardedTensor)), None)
    name = repr(sharded.row_split.name) if sharded is not None else "a parameter"
    plain = [t for t in tensors if not isinstance(t, DTensor)]
    if not why and plain:
        what = f"{func} mixes the sharded parameter {name} with an ordinary tensor of shape {tuple(plain[0].shape)}"
    else:
        what = f"{func} on the sharded parameter {name} {why}"
    raise RuntimeError(
        f"{what}. Between steps a parameter is this rank's shard. Ordinary tensors can be combined with it element by "
        "element. Anything else is computed with distribute_tensor(tensor, parameter.device_mesh, [Replicate()]), or "
        "with parameter.full_tensor() (collectives: call them on all ranks). Inside the forward of the module that "
        "owns it, and in backward, module.parameter is the whole tensor; code under torch.compiler.disable sees it "
        "there too if it runs in a module's forward."
    )


_OF_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}


def refuse_collective(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if a function or an operator is a collective of torch.distributed, and is called with shards.

    It would change a copy, which is dropped: schemas of c10d do not say what they write to.
    """
    if hasattr(func, "namespace"):
        is_collective = func.namespace in _OF_COLLECTIVES
    else:
        is_collective = getattr(func, "__module__", "") == "torch.distributed.distributed_c10d"
    tensors = leaves_of(args, kwargs) if is_collective else ()
    rows = next((base for t in tensors if isinstance(base := getattr(t, "base", t), RowShardedTensor)), None)
    if rows is not None:
        raise RuntimeError(
            f"A collective of torch.distributed, {getattr(func, '__name__', func)}, was called with "
            f"{rows.row_split.name!r} (parameter, gradient or optimizer state), of which this is one rank's shard. "
            "Nothing was sent. Backward reduces gradients, and parameters are shards of one tensor: leave the "
            "collective out. Otherwise pass tensor.to_local(), this rank's rows, or tensor.full_tensor(), a copy of "
            "the whole; tensor.copy_(whole) writes this rank's rows."
        )


_OF_BYTES = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.eq.Tensor,
    aten.equal.default,
    aten.is_same_size.default,
    aten.ne.Tensor,
    aten._to_copy.default,
}
"""Operators that move or compare values, whatever they mean."""


def refuse_packed(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> None:
    """Raise if a function computes with the bytes of a packed weight as if they were its values."""
    if func in _OF_BYTES and kwargs.get("dtype") in (None, torch.uint8):
        return
    for tensor in tensors:
        rows = getattr(tensor, "base", tensor)
        if rows.dtype == torch.uint8 and isinstance(rows, RowShardedTensor) and (kind := rows.part_of):
            raise RuntimeError(
                f"{func} computes with {rows.row_split.name!r}, a part of a {kind}: between steps it is bytes, which "
                "are not the values of the weight. Leave out what is frozen (if parameter.requires_grad), or "
                "read the weight where it is whole: in the forward of its module, or from the module inside "
                f"model.summon_full_params(), as the {kind} that dequantizes itself."
            )


def refuse_write_of_own(func: Any, rows: Tensor, value: Tensor) -> NoReturn:
    base: Any = getattr(rows, "base", rows)
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} writes an ordinary tensor of shape {tuple(value.shape)} to what was "
        f"computed from {base.row_split.name!r}, of which this is one rank's shard, while autograd records. An "
        "ordinary tensor is this rank's own, and other rows would get other ranks' values. Use the operator that makes "
        "a new tensor (a * b instead of a.mul_(b) or a *= b): it takes the whole parameter on each rank, and averages "
        "its gradient."
    )


def refuse_transform(rows: RowShardedTensor, why: str) -> NoReturn:
    raise RuntimeError(
        f"A transform of torch.func (grad, vjp, jacrev, vmap) over {rows.row_split.name!r}, of which this is one "
        f"rank's shard, {why}: that may be this rank's own. Pass parameter.full_tensor() to the transform, which is "
        "the whole tensor; its gradient is averaged over ranks."
    )


def tensors_are_own() -> bool:
    """Whether ordinary tensors may have other values on other ranks: in hooks and functions that a backward calls.

    They hold gradients and activations. Operators of derivatives are not concerned: the gradient of a sum over all rows
    is the same on every rank. Neither are hooks of parameters, which see reduced gradients.
    """
    return compat.in_backward() and not hooks_of_parameters.run and compat.is_called_by_backward()


def refuse_own_values(func: Any, value: Tensor, rows: RowShardedTensor) -> None:
    """Raise if a hook or a function in backward, or what a transform runs, combines rows with an ordinary tensor.

    It is this rank's own.
    """
    if isinstance(value, DTensor):
        return
    if compat.is_called_by_transform():
        refuse_transform(rows, f"combines it with an ordinary tensor of shape {tuple(value.shape)}")
    # Of what is sharded, autograd's own gradients are sharded or replicated; others were passed to backward().
    is_passed = rows.is_of_parameter and value.numel() > 1 and value.is_floating_point()
    if (is_passed and compat.in_backward() and compat.is_called_by_autograd()) or tensors_are_own():
        raise RuntimeError(
            f"{func} in backward combines {rows.row_split.name!r}, of which this is one rank's shard, with an ordinary "
            f"tensor of shape {tuple(value.shape)}: rows of different ranks would be combined with values of different "
            "ranks. Read module.parameter instead, which is the whole tensor in backward, or pass "
            "parameter.full_tensor() to the function. What is the same on every rank can be a Python number, or "
            "distribute_tensor(tensor, parameter.device_mesh, [Replicate()]); masks can also be applied in a hook "
            "of the parameter (parameter.register_hook), or between steps."
        )
