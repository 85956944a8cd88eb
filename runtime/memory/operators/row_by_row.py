"""Operators that compute each row from that row, over dimensions other than the rows': on the local rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..redistribute import same_ranks
from ..replicated import ReplicatedTensor
from ..tensor import RowShardedTensor
from .arguments import by_name, dims_of
from .gather import whole_of

aten = torch.ops.aten

_OVER_DIMS = {
    f"aten::{name}"
    for name in [
        "sum",
        "mean",
        "nansum",
        "prod",
        "amax",
        "amin",
        "any",
        "all",
        "max",
        "min",
        "argmax",
        "argmin",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "logsumexp",
        "median",
        "nanmedian",
        "mode",
        "kthvalue",
        "norm",
        "linalg_vector_norm",
        "count_nonzero",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "_softmax",
        "_log_softmax",
        "sort",
        "topk",
        "flip",
        "select",
        "slice",
        "unsqueeze",
        "squeeze",
        "unbind",
        "split",
        "split_with_sizes",
        "transpose",
        "diagonal",
        "unfold",
        "cat",
        "stack",
        "select_backward",
        "slice_backward",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
    ]
}
"""Operators that treat indices of every dimension but those of their argument ``dim`` (or ``dims``) alike."""

_DIMS = ("dim", "dims", "dim0", "dim1", "dim2", "dimension")
_PARTS = {aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
"""Operators whose results are parts; of parameters, each rank may take another one."""
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.expand.default}


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func in (aten.mm.default, aten.mv.default):
        return _product(func, *args)
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if not isinstance(first, RowShardedTensor) or not first.row_split.holds_whole_rows or func._schema.is_mutable:
        return NotImplemented
    if not first.row_split.row_dims:  # a scalar: ranks without it have nothing of its shape
        return NotImplemented
    if func in _RESHAPES:
        return _reshaped(func, first, *args[1:])
    if func._schema.name not in _OVER_DIMS or (func in _PARTS and first.is_of_parameter):
        return NotImplemented
    named = by_name(func, args, kwargs)
    skipped = first.ndim - first._local_tensor.ndim
    ndim = first.ndim + (func._schema.name in ("aten::unsqueeze", "aten::stack"))
    if "input_sizes" in named:  # of a view's backward
        ndim = len(named["input_sizes"])
        named["input_sizes"] = _local_sizes(named["input_sizes"], first)
        if named["input_sizes"] is None:
            return NotImplemented
    found = False
    for name in _DIMS:
        if name in named:
            dims = dims_of(named[name], ndim)
            if not dims or min(dims) < first.row_split.row_dims:
                return NotImplemented
            dims = tuple(dim - skipped for dim in dims)
            named[name], found = list(dims) if isinstance(named[name], (list, tuple)) else dims[0], True
    if not found or not _all_alike([*args, *kwargs.values()], first):
        return NotImplemented
    return _wrapped(func, first, func(**{name: _local(value) for name, value in named.items()}))


def _local_sizes(sizes: Sequence[int], reference: RowShardedTensor) -> list[int] | None:
    """Return the sizes of the local rows of a tensor of ``sizes``; None if it has other rows than ``reference``."""
    dims = reference.row_split.row_dims
    if tuple(sizes[:dims]) != reference.row_split.leading:
        return None
    local, inner = reference._local_tensor.shape, reference.row_split.row_shape
    return [*local[: len(local) - len(inner)], *sizes[dims:]]


def _all_alike(values: Sequence[Any], reference: RowShardedTensor) -> bool:
    tensors = [t for value in values for t in (value if isinstance(value, (list, tuple)) else [value])]
    return all(
        isinstance(tensor, RowShardedTensor)
        and tensor.row_split.has_rows_of(reference.row_split)
        and same_ranks(tensor.topology, reference.topology)
        and tensor.ndim == reference.ndim
        for tensor in tensors
        if isinstance(tensor, Tensor)
    )


def _local(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_local(each) for each in value]
    return value._local_tensor if isinstance(value, RowShardedTensor) else value


def _wrapped(func: Any, reference: RowShardedTensor, result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)([_wrapped(func, reference, each) for each in result])
    return reference.with_local(result, is_view=func.is_view)


def _reshaped(func: Any, tensor: RowShardedTensor, sizes: Sequence[int], **_: Any) -> Any:
    shape = tuple(func(tensor.outline, sizes).shape)
    if func is aten.expand.default and len(shape) != tensor.ndim:
        return NotImplemented
    if (local := _local_sizes(shape, tensor)) is None:
        return NotImplemented
    return _wrapped(func, tensor, func(tensor._local_tensor, local))


def _product(func: Any, rows: Any, other: Any) -> Any:
    """Multiply rows by a matrix or vector that every rank holds or gathers."""
    if (
        not isinstance(rows, RowShardedTensor)
        or not rows.row_split.holds_whole_rows
        or not isinstance(other, (RowShardedTensor, ReplicatedTensor))
    ):
        return NotImplemented
    return rows.with_local(func(rows._local_tensor, whole_of(other, func, rows.topology).values))
