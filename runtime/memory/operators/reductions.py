"""Reductions over all rows: one all-reduce, to a replicated tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..averaging import Averaging, Reduction
from ..redistribute import take_rows
from ..replicated import ReplicatedTensor, replicate
from ..tensor import RowShardedTensor
from .arguments import about_to_write, by_name, dims_of, leaves_of, refuse_own_values, written_to
from .elementwise import like_rows, run
from .gather import whole_of

aten = torch.ops.aten


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (reduction := _REDUCTIONS.get(func)) is None:
        return NotImplemented
    if func in _OF_ONE_TENSOR and not isinstance(args[0], RowShardedTensor):
        return NotImplemented
    result = reduction(func, args, kwargs)
    if _is_sharded(result):
        return result
    result = replicate(result, leaves_of(args, kwargs))
    # A loss takes parameters' norms as they are: only gradients are clipped.
    if (
        isinstance(result, ReplicatedTensor)
        and not args[0].is_of_parameter
        and (order := _order(func, args, kwargs)) is not None
    ):
        result.reduction = Reduction(order, Averaging.over(args[0].topology, args[0].row_split))
    return result


def _order(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the order of the norm that a reduction is; 1 for sums, inf for maxima; None: it is something else."""
    kind = _REDUCTIONS[func]
    if kind is _vector_norm:
        named = by_name(func, args, kwargs)
        order = named["ord"] if "ord" in named else named["p"]
        return 2.0 if order is None else float(order)
    return 1.0 if kind is _sum else math.inf if func in (aten.max.default, aten.amax.default) else None


def _is_sharded(result: Any) -> bool:
    return result is NotImplemented or isinstance(result, (DTensor, bool))


@dataclass(frozen=True)
class _Reduced:
    """What is reduced.

    Args:
        tensor: The whole tensor.
        local: This rank's rows.
        dims: Dimensions of ``local`` that are reduced.
        kept: Shape of the local result with reduced dimensions of size 1.
        shape: Shape of the result.
        count: Number of elements that become one.
    """

    tensor: RowShardedTensor
    local: Tensor
    dims: list[int]
    kept: tuple[int, ...]
    shape: tuple[int, ...]
    count: int

    def total(self, values: Tensor, op: str) -> Tensor:
        """Return what ranks' partial results, in any shape, are together."""
        return self.tensor.over_pieces(values, op).reshape(self.shape)

    def sum(
        self,
        values: Tensor,
        dtype: torch.dtype | None = None,
        add: Callable[..., Tensor] = torch.sum,
        count: int | None = None,
    ) -> Tensor:
        """Return the sum of what this rank and others have computed from their rows.

        Args:
            values: This rank's values, in the shape of :attr:`local`.
            dtype: Dtype of the result, unless it is the one that torch chooses.
            add: Sums the values of this rank.
            count: What to divide the sum by.
        """
        partial = add(values, self.dims, dtype=_wide(dtype or values.dtype) if values.is_floating_point() else dtype)
        total = self.total(partial, "sum")
        total = total if count is None else total / count
        return total.to(dtype or values.dtype) if values.is_floating_point() else total


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that ranks' sums are added in: sums of many squares exceed float16 though their norm does
    not."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _reduced(tensor: RowShardedTensor, named: dict[str, Any]) -> _Reduced | None:
    """Return what a reduction covers; None if it does not cover all rows, or only parts of them on this rank."""
    dims, split = dims_of(named.get("dim"), tensor.ndim), tensor.row_split
    ones = named.get("keepdim") or False
    if dims is None or len(set(dims)) >= tensor.ndim:
        count = tensor.numel() * split.count
        return _Reduced(tensor, tensor._local_tensor.reshape(-1), [0], (1,), (1,) * tensor.ndim * ones, count)
    rows = range(split.row_dims)
    if split.partition is not None or not rows or not set(rows) <= set(dims):
        return None
    local, skipped = tensor._local_tensor, split.row_dims - 1
    reduced = sorted({max(dim - skipped, 0) for dim in dims})
    sizes = [1 if dim in dims else size for dim, size in enumerate(tensor.shape) if ones or dim not in dims]
    kept = tuple(1 if dim in reduced else size for dim, size in enumerate(local.shape))
    count = math.prod(tensor.shape[dim] for dim in set(dims))
    return _Reduced(tensor, local, reduced, kept, tuple(sizes), count)


def _whole_or_rows(
    compute: Callable[[Any, _Reduced, dict[str, Any]], Any],
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    def reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = by_name(func, args, kwargs)
        reduced = _reduced(args[0], named)
        return NotImplemented if reduced is None else compute(func, reduced, named)

    return reduce


@_whole_or_rows
def _sum(func: Any, over: _Reduced, named: dict[str, Any]) -> Tensor:
    add = torch.nansum if func._schema.name == "aten::nansum" else torch.sum
    return over.sum(over.local, named["dtype"], add)


@_whole_or_rows
def _mean(func: Any, over: _Reduced, named: dict[str, Any]) -> Tensor:
    return over.sum(over.local, named["dtype"], count=over.count)


@_whole_or_rows
def _count_nonzero(func: Any, over: _Reduced, named: dict[str, Any]) -> Tensor:
    return over.total(torch.count_nonzero(over.local, over.dims), "sum")


@_whole_or_rows
def _variance(func: Any, over: _Reduced, named: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the mean first, then the variance: the difference of two large sums would have no digits left."""
    local, name = over.local, func._schema.name
    wide = local if local.dtype.itemsize >= 4 else local.float()
    mean = over.total(wide.sum(over.dims), "sum") / over.count
    deviation = wide - mean.view(over.kept)
    squares = over.total((deviation.abs() if deviation.is_complex() else deviation).square().sum(over.dims), "sum")
    correction = 1 if named["correction"] is None else named["correction"]
    value = squares / max(over.count - correction, 0)
    value = (value.sqrt() if "std" in name else value).to(local.dtype.to_real())
    return (value, mean.to(local.dtype)) if "mean" in name else value


@_whole_or_rows
def _extreme(func: Any, over: _Reduced, named: dict[str, Any]) -> Any:
    if not over.count:
        return NotImplemented  # torch says why there is none
    largest, local = "max" in func._schema.name, over.local
    if local.dtype == torch.bool:
        local = local.to(torch.uint8)
    if local.numel():
        value = local.amax(over.dims) if largest else local.amin(over.dims)
    else:
        value = local.new_full(over.kept, _lowest(local.dtype) if largest else _highest(local.dtype))
    found = _extreme_of_all(value, "max" if largest else "min", over.tensor)
    return found.reshape(over.shape).to(over.local.dtype)


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _extreme_of_all(value: Tensor, op: str, of: RowShardedTensor) -> Tensor:
    """Reduce extremes so that NaN wins, as in torch. Collectives may prefer the number."""
    if not value.is_floating_point():
        return of.over_pieces(value, op)
    nan = value.isnan()
    largest = "max" in op
    clean = torch.where(nan, torch.full_like(value, float("-inf") if largest else float("inf")), value)
    clean = clean if largest else -clean
    found = of.over_pieces(torch.cat([clean.reshape(-1), nan.to(value.dtype).reshape(-1)]), "max")
    extremes, nans = found.chunk(2)
    extremes = extremes if largest else -extremes
    return torch.where(nans > 0, torch.full_like(extremes, float("nan")), extremes).view(value.shape)


@_whole_or_rows
def _truth(func: Any, over: _Reduced, named: dict[str, Any]) -> Tensor:
    is_any = func._schema.name == "aten::any"
    local = (torch.any if is_any else torch.all)(over.local, over.dims).to(torch.int32)
    return over.total(local, "max" if is_any else "min").bool()


@_whole_or_rows
def _vector_norm(func: Any, over: _Reduced, named: dict[str, Any]) -> Any:
    order = named["ord"] if "ord" in named else named["p"]
    norms = _norms([over], 2 if order is None else order, named.get("dtype"))
    return norms if norms is NotImplemented else norms[0]


def _norms(parts: Sequence[_Reduced], order: Any, dtype: torch.dtype | None) -> Any:
    """Return the vector norm of each, with one all-reduce for all tensors over the same ranks."""
    order = float(order)
    if order <= 0:
        return NotImplemented
    alike: dict[Any, list[int]] = {}
    for position, part in enumerate(parts):
        alike.setdefault((part.tensor.topology, part.tensor.row_split.groups), []).append(position)
    if len(alike) > 1:  # of several models, or already divided over other ranks
        found: dict[int, Tensor] = {}
        for positions in alike.values():
            found |= zip(positions, _norms([parts[i] for i in positions], order, dtype), strict=True)
        return [found[position] for position in range(len(parts))]
    locals_ = []
    for part in parts:
        local, wide = part.local, _wide(dtype or part.local.dtype)
        if not local.numel():  # vector_norm raises for empty tensors and some orders; zeros contribute nothing to any
            locals_.append(local.new_zeros(part.kept, dtype=wide.to_real()).reshape(-1))
            continue
        norm = torch.linalg.vector_norm(local, order, part.dims, dtype=wide).reshape(-1)
        locals_.append(norm if order == math.inf else norm**order)
    first = parts[0].tensor
    if order == math.inf:
        totals = _extreme_of_all(torch.cat(locals_), "max", first)
    else:
        others = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
        totals = first.over_pieces(torch.cat(locals_), "sum", f"a norm of {first.row_split.name!r}{others}") ** (
            1.0 / order
        )
    return [
        total.reshape(part.shape).to((dtype or part.local.dtype).to_real())
        for total, part in zip(totals.split([len(local) for local in locals_]), parts, strict=True)
    ]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the norms of a list, of which some tensors may not be sharded."""
    named, tensors = by_name(func, args, kwargs), args[0]
    sharded = [position for position, tensor in enumerate(tensors) if isinstance(tensor, RowShardedTensor)]
    parts = [_reduced(tensors[position], {}) for position in sharded]
    norms = _norms([part for part in parts if part is not None], named["ord"], named["dtype"])
    if norms is NotImplemented:
        return NotImplemented
    others = [position for position in range(len(tensors)) if position not in sharded]
    norms += _own_norms([tensors[position] for position in others], tensors[sharded[0]], named)
    found = dict(zip([*sharded, *others], norms, strict=True))
    return [replicate(found[position], [tensors[sharded[0]]]) for position in range(len(tensors))]


def _own_norms(tensors: Sequence[Tensor], beside: RowShardedTensor, named: dict[str, Any]) -> list[Tensor]:
    """Return the norms of tensors that are not sharded, the same on every rank: see :meth:`.Reduction.of_own`."""
    if not tensors:
        return []
    order, dtype = float(named["ord"]), named["dtype"]
    norms = [torch.linalg.vector_norm(whole_of(tensor, "a norm").values, order, dtype=dtype) for tensor in tensors]
    wide = torch.stack([norm.to(_wide(norm.dtype)) for norm in norms])
    means = Reduction(order, Averaging.over(beside.topology, beside.row_split)).of_own(wide)
    return [mean.to(norm.dtype) for mean, norm in zip(means.unbind(), norms, strict=True)]


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    product = run(aten.mul.Tensor, args, {})
    return product if product is NotImplemented else _sum_of(product)


def _distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    difference = run(aten.sub.Tensor, args[:2], {})
    if difference is NotImplemented:
        return NotImplemented
    return _vector_norm(aten.norm.Scalar, (difference, by_name(func, args, kwargs)["p"]), {})


_NONE, _MEAN = 0, 1
"""Values of a loss's argument ``reduction``."""


def _sum_of(tensor: RowShardedTensor, count: int | None = None) -> Tensor:
    """Return the sum of all elements, divided by ``count``."""
    over = _reduced(tensor, {})
    assert over is not None
    return over.sum(over.local, count=count)


def _count(tensor: RowShardedTensor) -> int:
    """Return the number of elements that a reduction covers."""
    return tensor.numel() * tensor.row_split.count


def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].shape != args[1].shape:
        return NotImplemented
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", _MEAN)
    each = run(func, (*args[:2], _NONE, *args[3:]), {k: v for k, v in kwargs.items() if k != "reduction"})
    if each is NotImplemented or reduction == _NONE:
        return each
    return _sum_of(each, _count(each) if reduction == _MEAN else None)


def _loss_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, mine, its, reduction = args[:4]
    if reduction == _MEAN:  # divide by the elements of all ranks
        gradient = gradient / _count(next(t for t in (mine, its) if isinstance(t, RowShardedTensor)))
    return run(func, (gradient, mine, its, _NONE, *args[4:]), kwargs)


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement ``equal`` and ``allclose``."""
    if args[0].shape != args[1].shape:
        return False if func is aten.equal.default else NotImplemented
    reference = next(a for a in args if isinstance(a, RowShardedTensor))
    if any(
        isinstance(a, RowShardedTensor) and a.row_split.partition != reference.row_split.partition for a in args[:2]
    ):
        return NotImplemented
    for a in args[:2]:
        refuse_own_values(func, a, reference)
    mine = [
        like_rows(a, reference)._local_tensor
        if isinstance(a, RowShardedTensor)
        else take_rows(whole_of(a, func, reference.topology).values, reference.row_split, reference.topology.shard)
        for a in args[:2]
    ]
    same = func(*mine, *args[2:], **kwargs)
    device = reference._local_tensor.device
    return bool(reference.over_pieces(torch.tensor(int(same), device=device), "min").item())


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Implement GradScaler's unscale. An inf on one rank counts on all ranks, so that all skip the same steps."""
    gradients, found_inf, inv_scale = args
    about_to_write(list(written_to(func, args, kwargs)))
    func([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], found_inf, inv_scale)
    spread = {(g.topology, g.row_split.groups): g for g in gradients if isinstance(g, RowShardedTensor)}
    for gradient in spread.values():
        found_inf.copy_(gradient.over_pieces(found_inf, "max"))
    return None


_OF_ONE_TENSOR: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.nansum.default: _sum,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.var_mean.correction: _variance,
    aten.std_mean.correction: _variance,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.any.dims: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.all.dims: _truth,
    aten.norm.Scalar: _vector_norm,
    aten.norm.ScalarOpt_dim: _vector_norm,
    aten.norm.ScalarOpt_dtype: _vector_norm,
    aten.norm.ScalarOpt_dim_dtype: _vector_norm,
    aten.linalg_vector_norm.default: _vector_norm,
}
_REDUCTIONS = _OF_ONE_TENSOR | {
    aten.dot.default: _dot,
    aten.dist.default: _distance,
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.huber_loss.default: _loss,
    aten.mse_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten.huber_loss_backward.default: _loss_backward,
    aten.equal.default: _equal,
    aten.allclose.default: _equal,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
