"""Every other operator: on whole tensors, with views that are gathered when they are read.

Writes to a sharded tensor, or to a view of it, go to a whole copy, of which each rank takes its rows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ... import compat
from ..averaging import Reduction
from ..dispatched import Dispatched
from ..replicated import ReplicatedTensor, RowView, Step, averaging_of, is_own, replicate
from ..tensor import RowShardedTensor
from .arguments import (
    leaves_of,
    refuse,
    refuse_collective,
    refuse_own_values,
    refuse_transform,
    tensors_are_own,
    written_to,
)
from .elementwise import is_elementwise, is_foreach, is_list_of_tensors
from .gather import whole_of

aten = torch.ops.aten


class NeedsWhole(Exception):
    """A function whose gradient autograd records needs whole parameters.

    Args:
        view_of: The parameter, if the result is a view of it; "": it is none.
    """

    def __init__(self, view_of: str) -> None:
        super().__init__()
        self.view_of = view_of


class _Functions(threading.local):
    are_repeated = False


_functions = _Functions()


@contextlib.contextmanager
def repeated_on_whole() -> Iterator[None]:
    """Context of a function that is called again, with whole parameters, if it raises :class:`NeedsWhole`."""
    before, _functions.are_repeated = _functions.are_repeated, True
    try:
        yield
    finally:
        _functions.are_repeated = before


def _check_repeated(tensors: Sequence[Any], is_view: bool) -> None:
    """Raise :class:`NeedsWhole` if autograd records what an operator computes from tensors that are sharded.

    Each rank then takes its gradient of the whole parameter: what is taken of it (``p[label]``, ``p[:n]``) may differ
    between ranks, and the mean over ranks of gradients of results would not be that of the parameter.
    """
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if isinstance(tensor, (RowShardedTensor, RowView)) and tensor.requires_grad:
            base: Any = _base(tensor)
            if _functions.are_repeated:
                raise NeedsWhole(base.row_split.name if is_view else "")
            if compat.is_called_by_transform():
                refuse_transform(base, "takes something of all of it")


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.is_view and isinstance(args[0], (RowShardedTensor, RowView)):
        return _view(func, *args, **kwargs)
    if func in _JOINING:
        args = (_beside_reductions(args[0]), *args[1:])
    elif func in _ADDING:
        args = (*_beside_reductions(args[:2], order=1.0), *args[2:])
    if is_foreach(func) and any(is_list_of_tensors(a) and len(a) > 1 for a in args):
        return _each_alone(func, args, kwargs)
    tensors, writes = leaves_of(args, kwargs), list(written_to(func, args, kwargs))
    spread = [t for t in tensors if isinstance(t, (RowShardedTensor, RowView))]
    refuse_collective(func, args, kwargs)
    _check_repeated(spread, func.is_view)
    _check(func, args, kwargs, spread, writes)
    if not spread and _has_dtensors(tensors) and not any(isinstance(t, ReplicatedTensor) for t in writes):
        return _by_torch(func, args, kwargs, tensors)
    read = [t for t in spread if not any(t is w for w in writes)]
    in_place = _same_place(func)
    needed = {id(_base(t)) for t in (read if in_place else spread)}
    over = next((_base(t).topology for t in spread), None)  # type: ignore[attr-defined]
    wholes = {id(t): whole_of(t, func, over, id(t) in needed) for t in map(_base, tensors)}

    def local(tensor: Tensor) -> Tensor:
        values = wholes[id(_base(tensor))].values
        return tensor.of(values) if isinstance(tensor, RowView) else values

    locals_ = {id(tensor): local(tensor) for tensor in tensors}
    swapped_args, swapped_kwargs = compat.tree_map_only(Tensor, lambda t: locals_[id(t)], (args, kwargs))
    result = func(*swapped_args, **swapped_kwargs)
    for base in {id(_base(t)): _base(t) for t in writes}.values():
        wholes[id(base)].write_to(base)
        if isinstance(base, ReplicatedTensor):
            base.own |= any(map(is_own, tensors))
    if torch.Tag.inplace_view in func.tags:
        return args[0].reshaped_in_place(func, args, kwargs)
    originals = {id(locals_[id(t)]): t for t in writes}
    ordinary = [t for t in tensors if not isinstance(t, DTensor)]
    beside_rows = any(isinstance(t, RowShardedTensor) for t in tensors)
    is_ordinary = any(makes_ordinary(t, beside_rows) for t in ordinary) or (bool(ordinary) and tensors_are_own())

    def wrap(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)([wrap(each) for each in value])
        return originals[id(value)] if id(value) in originals else value if is_ordinary else replicate(value, tensors)

    made = wrap(result)
    if func.is_view and isinstance(args[0], ReplicatedTensor) and args[0].view_of:
        for each in leaves_of(made):
            each.view_of = args[0].view_of  # type: ignore[attr-defined]
    _keep_reduction(func, args, made)
    return made


_JOINING = {aten.stack.default, aten.cat.default}
_ADDING = {aten.add.Tensor, aten.add_.Tensor}
_KEEPING = {aten._to_copy.default, aten.clone.default}


def _beside_reductions(tensors: Sequence[Any], order: float | None = None) -> Sequence[Any]:
    """Average numbers of ordinary tensors over ranks if they are joined with norms or sums of sharded ones.

    Whoever clips gradients joins the norms of all of them. Ranks that scaled their rows of one gradient by the norms of
    their own, unsharded ones would train with a mixture.

    Args:
        order: Of the norms; None: any.
    """
    reduced = next((t for t in tensors if _reduction_of(t, order) is not None), None)
    own = [i for i, t in enumerate(tensors) if isinstance(t, Tensor) and not isinstance(t, DTensor) and t.numel() == 1]
    own = [i for i in own if tensors[i].is_floating_point()]
    if reduced is None or not own or any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        return tensors
    wide = torch.stack([tensors[i].reshape(()).to(torch.promote_types(tensors[i].dtype, torch.float32)) for i in own])
    means = reduced.reduction.of_own(wide)  # type: ignore[union-attr]
    joined = list(tensors)
    for i, mean in zip(own, means.unbind(), strict=True):
        joined[i] = replicate(mean.to(tensors[i].dtype).reshape(tensors[i].shape), [reduced])
    return joined


def _reduction_of(tensor: Any, order: float | None = None) -> Reduction | None:
    reduction = tensor.reduction if isinstance(tensor, ReplicatedTensor) else None
    return reduction if reduction is not None and order in (None, reduction.order) else None


def _keep_reduction(func: Any, args: tuple[Any, ...], made: Any) -> None:
    """Note that a view or copy of a norm or sum of a sharded tensor, or a sum of such sums, is one."""
    if not isinstance(made, ReplicatedTensor) or isinstance(made, RowView):
        return
    if func.is_view or func in _KEEPING:
        made.reduction = _reduction_of(args[0])
    elif func in _ADDING:  # to a number, with which Python's sum begins, too
        made.reduction = _reduction_of(args[0], 1.0) or _reduction_of(args[1], 1.0)


def _base(tensor: Tensor) -> Tensor:
    return tensor.base if isinstance(tensor, RowView) else tensor


def _same_place(func: Any) -> bool:
    """Whether each written element depends on elements at its place only, so that others' rows need not be known."""
    return is_elementwise(func) and func._schema.is_mutable


def makes_ordinary(tensor: Tensor, beside_rows: bool) -> bool:
    """Whether the result of an operator with this ordinary tensor is one, too; not for numbers, as in torch's DTensors.

    Torch's numbers are tensors of one element. Beside results that every rank holds, they have no dimensions: the
    losses of a batch of one are not to be something else than those of a batch of two.
    """
    has_values = tensor.is_floating_point() or tensor.is_complex()  # and is no index or mask
    is_number = tensor.numel() == 1 if beside_rows else tensor.ndim == 0
    return has_values and (not is_number or tensor.requires_grad)


def _has_dtensors(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(t, DTensor) and not isinstance(t, Dispatched) for t in tensors)


def _check(func: Any, args: Any, kwargs: Any, spread: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
    if torch.Tag.inplace_view in func.tags and any(isinstance(t, (RowShardedTensor, RowView)) for t in writes):
        refuse(func, args, kwargs, "would change its shape or memory in place")
    for tensor in writes:
        if isinstance(tensor, ReplicatedTensor) and not isinstance(tensor, RowView) and tensor.view_of:
            raise RuntimeError(
                f"{func} would write to values of a view of the sharded parameter {tensor.view_of!r}, and not reach "
                "it, because autograd records. Write to views of parameters under torch.no_grad()."
            )
    ordinary = [tensor for tensor in leaves_of(args, kwargs) if not isinstance(tensor, DTensor)]
    if ordinary and (spread or writes) and all(isinstance(tensor, DTensor) for tensor in writes):
        if spread:
            refuse_own_values(func, ordinary[0], _base(spread[0]))  # type: ignore[arg-type]
        elif tensors_are_own():
            raise RuntimeError(
                f"{func} in backward writes values of an ordinary tensor of shape {tuple(ordinary[0].shape)}, which is "
                "this rank's own, to a result that is the same on every rank, such as a norm of a parameter. Write to "
                "a copy of it (result.full_tensor().clone()), or compute another result."
            )
    if spread and not is_elementwise(func) and func not in _TAKE_VALUES:
        for tensor in ordinary:
            if tensor.numel() > 1 and tensor.is_floating_point() and not any(tensor is w for w in writes):
                refuse(func, (_base(spread[0]), tensor), {})


_TAKE_VALUES = {aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
"""Operators that put values in places, as elementwise operators do."""


def _view(func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    _check_repeated([tensor], is_view=True)
    base, steps = (tensor.base, tensor.steps) if isinstance(tensor, RowView) else (tensor, ())
    made = func(tensor.outline if isinstance(tensor, RowShardedTensor) else tensor.of(base.outline), *args, **kwargs)
    averaging = averaging_of(tensor, [tensor])
    if isinstance(made, Tensor):
        return RowView.make(base, (*steps, Step(func, args, kwargs)), averaging)
    return [RowView.make(base, (*steps, Step(func, args, kwargs, index)), averaging) for index in range(len(made))]


def _each_alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach operator for one number of its lists after the other: few whole tensors exist at a time."""
    count = max(len(a) for a in args if is_list_of_tensors(a))
    results = [
        Dispatched.dispatch(
            func, tuple(a[i : i + 1] if isinstance(a, (list, tuple)) and len(a) == count else a for a in args), kwargs
        )
        for i in range(count)
    ]
    return None if results[0] is None else [each for result in results for each in result]


def _by_torch(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """Let torch compute with its DTensors and replicated tensors."""
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor) and not isinstance(t, Dispatched))

    def ordinary(tensor: ReplicatedTensor) -> Tensor:
        local = tensor._local_tensor
        meta = compat.TensorMeta(local.shape, local.stride(), local.dtype)
        return compat.dtensor_of(local, compat.DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta))

    args, kwargs = compat.tree_map_only(ReplicatedTensor, ordinary, (args, kwargs))
    return func(*args, **kwargs)
