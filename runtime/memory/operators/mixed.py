"""Functions of parameters at rest and ordinary tensors: a loss that uses parameters outside of the model's forward.

An ordinary tensor is this rank's own: features, targets or losses of its batch. So is what is computed from it and a
parameter, each rank needs the parameter's values in all places, and the parameter's gradient is the mean over ranks, as
for what the forward computes. Therefore the parameter is gathered, and the function computes with ordinary tensors.

Writes are no such functions: every rank writes its rows, with values that are the same on every rank. Neither is what
is computed from gradients and optimizers' states, and not from parameters only.

This is decided for functions, above autograd: the gather has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ... import compat
from ..dispatched import Dispatched, dispatching, run_operators
from ..replicated import ReplicatedTensor, RowView, is_own, own_of_rank
from ..tensor import RowShardedTensor
from .arguments import leaves_of, refuse_collective, refuse_packed, refuse_write_of_own, tensors_are_own
from .elementwise import is_list_of_tensors
from .whole import NeedsWhole, makes_ordinary, repeated_on_whole

_READ_NO_VALUES = {
    "__get__",
    "__set__",
    "__delete__",
    "backward",
    "grad",
    "view_as",
    "expand_as",
    "reshape_as",
    "type_as",
    "to",
    "is_same_size",
    "is_set_to",
    "result_type",
}
"""Functions that read shapes, dtypes or graphs of tensors, and no values."""
_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imatmul__"}


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    refuse_collective(func, args, kwargs)
    name = getattr(func, "__name__", "")
    writes = None
    if name not in _READ_NO_VALUES and (len(args) != 1 or kwargs or not isinstance(args[0], RowShardedTensor)):
        writes = kwargs.get("out")
        if writes is None and _is_write(name):
            writes = args[0] if args else next(iter(kwargs.values()))
        if not _are_rows(writes):
            if _mixes(name, args, kwargs):
                return _on_whole(func, name, args, kwargs)
        elif torch.is_grad_enabled():
            _check_write(func, leaves_of(writes), leaves_of(args, kwargs))
    if name == "fill_diagonal_" and not (torch.is_grad_enabled() and args[0].requires_grad):
        # Torch composes it of a view that begins where the local rows begin in the bucket.
        with dispatching():
            return Dispatched.dispatch(torch.ops.aten.fill_diagonal_.default, args, kwargs)
    # Autograd sets attributes of views that were written to while it holds a lock that a new node would need.
    if torch.is_grad_enabled() and name != "__set__":
        args, kwargs = compat.tree_map_only(ReplicatedTensor, lambda t: t.averaged, (args, kwargs))
        if writes is None:
            try:
                with repeated_on_whole():
                    return run_operators(func, args, kwargs)
            except NeedsWhole as needed:
                return _on_whole(func, name, args, kwargs, needed.view_of)
    return run_operators(func, args, kwargs)


def _is_write(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _are_rows(value: Any) -> bool:
    """Whether a value that a function writes to is a sharded tensor, or a view or list of these."""
    return any(isinstance(t, (RowShardedTensor, RowView)) for t in leaves_of(value))


def _mixes(name: str, args: Any, kwargs: Any) -> bool:
    tensors = leaves_of(args, kwargs)
    return (
        any(map(is_own, tensors))
        and any(map(_is_of_parameter, tensors))
        and not (name.endswith("_like") or name.startswith("new_"))
        and not tensors_are_own()
    )


def _is_of_parameter(tensor: Tensor) -> bool:
    if not isinstance(tensor, (RowShardedTensor, RowView)):
        return False
    rows = tensor.base if isinstance(tensor, RowView) else tensor
    return rows.is_of_parameter or (torch.is_grad_enabled() and tensor.requires_grad)


def _on_whole(func: Any, name: str, args: Any, kwargs: Any, view_of: str = "") -> Any:
    """Call a function with whole parameters. The result is this rank's own.

    It is an ordinary tensor; for numbers, indices and masks, which torch's DTensors can be combined with, a DTensor.

    Args:
        view_of: The parameter that the result holds values of a view of; "": it is none.
    """
    lists = [a for a in args if is_list_of_tensors(a)]
    if name.startswith("_foreach_") and lists and (count := len(lists[0])) > 1:  # others of a list may be no parameters
        each = [
            func(*(a[i : i + 1] if isinstance(a, (list, tuple)) else a for a in args), **kwargs) for i in range(count)
        ]
        return None if each[0] is None else type(each[0])(one for result in each for one in result)
    tensors = leaves_of(args, kwargs)
    refuse_packed(name, tensors, {})
    wholes = {id(t): t.unsharded(name) for t in tensors if isinstance(t, Dispatched)}
    args, kwargs = compat.tree_map_only(Dispatched, lambda t: wholes[id(t)], (args, kwargs))
    result = func(*args, **kwargs)
    if compat.in_function_transform() or any(
        makes_ordinary(t, beside_rows=True) for t in tensors if not isinstance(t, DTensor)
    ):
        return result
    mesh = next(t.device_mesh for t in tensors if isinstance(t, Dispatched))
    written = {id(t) for t in tensors}
    return compat.tree_map_only(Tensor, lambda t: t if id(t) in written else own_of_rank(t, mesh, view_of), result)


def argument_of(function: type, value: Any) -> Any:
    """Return what an autograd function gets for an argument: the whole of what was computed from a parameter.

    Its forward and backward run below autograd, and may combine rows with tensors of this rank: gradients of the whole
    are averaged. Functions of torch and of this package that are passed through know what they get.
    """
    if (
        isinstance(value, Dispatched)
        and not function.__module__.startswith(_PASS_THROUGH)
        and (isinstance(value, ReplicatedTensor) or _is_of_parameter(value))
    ):
        return value.unsharded(f"{function.__name__}.apply")
    return value


_PASS_THROUGH = (__package__.partition(".")[0], "torch._", "torch.distributed.tensor", "torch.utils.checkpoint")


def _check_write(func: Any, writes: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Raise if autograd records a write of this rank's own values to rows."""
    own = next((t for t in tensors if is_own(t) and (t.is_floating_point() or t.is_complex())), None)
    if own is not None and not tensors_are_own() and any(t.requires_grad for t in (own, *writes)):
        refuse_write_of_own(func, next(t for t in writes if isinstance(t, (RowShardedTensor, RowView))), own)
