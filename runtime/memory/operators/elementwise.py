"""Operators that compute each element from the elements at its place: on the local rows."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..redistribute import RowMove, move_rows, same_ranks, take_broadcast_rows
from ..replicated import replicate
from ..tensor import RowShardedTensor
from .arguments import about_to_write, refuse_own_values, rows_among, written_to
from .gather import whole_of

aten = torch.ops.aten

_ALSO = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.lift_fresh.default,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adagrad_.default,
}
"""Elementwise operators that torch does not tag as such."""
_OVERWRITES = {
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten._foreach_copy_.default,
    aten._foreach_zero_.default,
}
_ALIASES = {aten.detach.default, aten.alias.default}
_FACTORIES = {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
_OF_NUMBERS = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}
"""Operators whose last argument has no dimensions. Of a sharded one, ranks without it hold an empty vector."""
_MASKED = {aten.index_put_.default, aten.index_put.default}
_PAIRS = {aten.view_as_real.default, aten.view_as_complex.default}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def is_foreach(func: Any) -> bool:
    return func._schema.name.startswith("aten::_foreach_")


def is_elementwise(func: Any) -> bool:
    if is_foreach(func):
        return func._schema.name.removeprefix("aten::") not in _FOREACH_REDUCTIONS
    return torch.Tag.pointwise in func.tags or func in _ALSO


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.is_same_size.default:
        return args[0].shape == args[1].shape
    if func is aten.new_empty_strided.default and tuple(args[1]) == tuple(args[0].shape):
        # Autograd, for gradients whose local rows have other strides than the parameter's, as on some ranks only.
        return args[0].with_local(args[0]._local_tensor.new_empty(args[0]._local_tensor.shape, **kwargs))
    if func in _FACTORIES:
        if tuple(args[1]) != tuple(args[0].shape):
            return replicate(func(args[0]._local_tensor, *args[1:], **kwargs), args[:1])
        return args[0].with_local(func(args[0]._local_tensor, args[0]._local_tensor.shape, *args[2:], **kwargs))
    if func in _PAIRS and args[0].row_split.holds_whole_rows:
        split = args[0].row_split
        split = split.as_pairs if func is aten.view_as_real.default else split.with_inner(split.row_shape[:-1])
        return RowShardedTensor.wrap(func(args[0]._local_tensor), split, args[0].topology, backing=args[0].backing)
    if func in _OF_NUMBERS and isinstance(args[-1], RowShardedTensor):
        return NotImplemented
    if (is_elementwise(func) and torch.Tag.nondeterministic_seeded not in func.tags) or (
        func in _MASKED and _is_masked(*args[:3])
    ):
        return run(func, args, kwargs)
    return NotImplemented


def _is_masked(tensor: Any, indices: Sequence[Any], values: Tensor) -> bool:
    """Whether ``tensor[indices] = values`` sets what a sharded boolean mask selects, or whole rows of it, to one
    value."""
    return (
        isinstance(tensor, RowShardedTensor)
        and len(indices) == 1
        and isinstance(mask := indices[0], RowShardedTensor)
        and mask.dtype == torch.bool
        and mask.shape == tensor.shape[: max(mask.ndim, tensor.row_split.row_dims)]
        and _lie_alike(tensor, mask)
        and values.numel() == 1
        and not isinstance(values, RowShardedTensor)
    )


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the local rows; NotImplemented if its tensors do not fit together by rows.

    Results are sharded like the tensors that they are computed from; for operators on lists, those of the same number.
    """
    leaves = rows_among(args, kwargs)
    if func in _ALIASES:  # with the version counter of the memory: a detached one would hide writes
        return leaves[0].with_local(leaves[0]._local_tensor, is_view=True)
    lists = [a for a in args if is_list_of_tensors(a)] if is_list_of_tensors(args[0]) else []
    writes = {id(tensor): tensor for tensor in written_to(func, args, kwargs)}
    references = _references(leaves, lists, writes)
    if any(not isinstance(tensor, RowShardedTensor) for tensor in writes.values()):
        return NotImplemented
    pairs: list[tuple[Tensor, RowShardedTensor]] = []

    def each(value: Any, do: Callable[[Any, Any], Any]) -> Any:
        """Call ``do`` for every tensor of an argument, with the tensor that it is combined with."""
        if is_list_of_tensors(value):
            return [do(t, references[i % len(references)]) for i, t in enumerate(value)]
        if lists and not isinstance(value, DTensor):
            return value  # scalars of a foreach operator, one per tensor
        return do(value, references[0])

    def note(value: Any, reference: Any) -> None:
        if isinstance(value, Tensor) and reference is not None:
            pairs.append((value, reference))

    for value in (*args, *kwargs.values()):
        if func not in _MASKED or value is not args[1]:
            each(value, note)
    if not all(_fits(value, reference) for value, reference in pairs):
        return NotImplemented
    if any(not (_lie_alike(w, r) and w.shape == r.shape) for w, r in pairs if id(w) in writes):
        return NotImplemented  # writes to moved rows would be lost
    for value, reference in pairs:
        refuse_own_values(func, value, reference)
    for value in (*args, *kwargs.values()):
        if lists and isinstance(value, Tensor):  # for all tensors of the lists
            refuse_own_values(func, value, leaves[0])
    moved = _move_all(pairs)
    about_to_write(list(writes.values()), overwrites=func in _OVERWRITES)
    originals = {id(t._local_tensor): t for t in (*leaves, *writes.values()) if isinstance(t, RowShardedTensor)}

    def unwrap(value: Any, reference: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if reference is None:
            return value._local_tensor if isinstance(value, DTensor) else value
        key = id(value), id(reference)
        local = moved[key] if key in moved else _local_rows(value, reference)
        return local.clone() if id(reference) in writes and _overlaps(value, reference) else local

    def wrap(value: Any, reference: Any) -> Any:
        if not isinstance(value, Tensor) or reference is None:
            return value
        if (original := originals.get(id(value))) is not None:
            return original  # an in-place operator returns its argument
        return reference.with_local(value)

    out = func(*[each(a, unwrap) for a in args], **{k: each(v, unwrap) for k, v in kwargs.items()})
    if isinstance(out, (list, tuple)):
        return type(out)(wrap(o, references[i % len(references)]) for i, o in enumerate(out))
    return wrap(out, references[0])


def _overlaps(value: Tensor, written: RowShardedTensor) -> bool:
    """Whether ``value`` is another view of the memory that is written to.

    Torch refuses some of these, depending on the number of rows: other ranks would not notice.
    """
    return (
        isinstance(value, RowShardedTensor)
        and value.backing is written.backing
        and not value._local_tensor.is_set_to(written._local_tensor)
    )


def is_list_of_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(t, Tensor) for t in value)


def _references(leaves: Sequence[RowShardedTensor], lists: Sequence[Any], writes: Container[int]) -> list[Any]:
    """Return the tensor whose rows decide: of several, one that is written to or else the largest; one per list
    item."""
    if not lists:
        written = [leaf for leaf in leaves if id(leaf) in writes]
        return [max(written or leaves, key=Tensor.numel)]
    return [
        next((t for each in lists if isinstance(t := each[i % len(each)], RowShardedTensor)), None)
        for i in range(max(map(len, lists)))
    ]


def _fits(value: Tensor, reference: RowShardedTensor) -> bool:
    """Whether a tensor can be combined with ``reference`` row by row."""
    mine, dims = reference.row_split, reference.row_split.row_dims
    if isinstance(value, RowShardedTensor):
        alike = value.row_split.partition == mine.partition and value.row_split.leading == mine.leading
        if not alike or value.row_split.row_dims > value.ndim > 0 or value.ndim != reference.ndim:
            return False
        sizes = zip(value.row_split.part_shape, mine.part_shape, strict=True)
    else:
        if value.ndim > reference.ndim:
            return False
        shape = (1,) * (reference.ndim - value.ndim) + tuple(value.shape)
        if any(size not in (1, its) for size, its in zip(shape[:dims], reference.shape[:dims], strict=True)):
            return False
        sizes = zip(shape, reference.shape, strict=True)
    if mine.holds_whole_rows:
        return all(size == its or 1 in (size, its) for size, its in sizes)
    return all(size in (1, its) for size, its in sizes)


def _move_all(pairs: Sequence[tuple[Tensor, RowShardedTensor]]) -> dict[tuple[int, int], Tensor]:
    """Move the rows of tensors that are split differently than the ones they are combined with, in one collective.

    Returns:
        The moved local rows, by ``id`` of both tensors.
    """
    apart = {
        (id(value), id(reference)): _move(value, reference)
        for value, reference in pairs
        if isinstance(value, RowShardedTensor) and not _lie_alike(value, reference)
    }
    return dict(zip(apart, move_rows(list(apart.values())), strict=True)) if apart else {}


def _lie_alike(mine: RowShardedTensor, its: RowShardedTensor) -> bool:
    return mine.row_split.has_rows_of(its.row_split) and same_ranks(mine.topology, its.topology)


def _move(value: RowShardedTensor, reference: RowShardedTensor) -> RowMove:
    target = reference.row_split.with_inner(value.row_split.row_shape)
    return RowMove(value._local_tensor, value.row_split, value.topology, target, reference.topology)


def like_rows(value: RowShardedTensor, reference: RowShardedTensor) -> RowShardedTensor:
    """Return the same tensor, with its rows where those of ``reference`` are. A collective if they are elsewhere."""
    if _lie_alike(value, reference):
        return value
    (local,) = move_rows([_move(value, reference)])
    return reference.with_local(local)


def _local_rows(value: Tensor, reference: RowShardedTensor) -> Tensor:
    """Return this rank's part of an argument, to combine it with the local rows of ``reference``.

    Ordinary tensors and replicated ones hold the same values on every rank. Rows are taken from a whole tensor;
    everything else broadcasts over rows.
    """
    if isinstance(value, RowShardedTensor):
        return value._local_tensor
    if isinstance(value, DTensor):
        value = whole_of(value, f"an operand of {reference.row_split.name!r}", reference.topology).values
    return take_broadcast_rows(value, reference.row_split, reference.topology.shard)
