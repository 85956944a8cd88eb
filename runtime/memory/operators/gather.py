"""Whole tensors on every rank, for operators that need all rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from ... import compat
from ...geometry.groups import Group
from ...geometry.partition import whole_tensor
from ...geometry.topology import Topology
from ..computed import computing, text_of
from ..redistribute import all_gather_rows, note_received, take_rows
from ..replicated import ReplicatedTensor, RowView
from ..tensor import RowShardedTensor
from .arguments import about_to_write


class Whole(NamedTuple):
    """All values of a tensor, and the box of them that this rank holds, if it holds one."""

    values: Tensor
    box: tuple[slice, ...] = ()

    def write_to(self, tensor: Tensor) -> None:
        """Write this rank's part of changed values to the tensor that they were gathered from."""
        if isinstance(tensor, RowShardedTensor):
            about_to_write([tensor])
            tensor._local_tensor.copy_(take_rows(self.values, tensor.row_split, tensor.topology.shard))
        elif isinstance(tensor, DTensor) and not isinstance(tensor, ReplicatedTensor):
            tensor._local_tensor.copy_(self.values[self.box])


def whole_of(tensor: Tensor, what: Any, over: Topology | None = None, other_rows_count: bool = True) -> Whole:
    """Return the values of a tensor on every rank. A collective, unless every rank holds them.

    Args:
        what: What needs them, for messages.
        over: Where the bytes of a DTensor of torch's are counted.
        other_rows_count: Whether rows of other ranks are needed; else the values in their places are zeros, and nothing
            is communicated.
    """
    if isinstance(tensor, RowShardedTensor):
        with computing(text_of(tensor)):  # what follows is computed from all rows on each rank
            values = (
                all_gather_rows(tensor._local_tensor, tensor.row_split, tensor.topology, str(what))
                if other_rows_count
                else _own_rows(tensor)
            )
        if values.stride() != tensor.stride() and 0 not in tensor.stride():
            values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=values.dtype, device=values.device).copy_(
                values
            )
        return Whole(values)
    if isinstance(tensor, RowView):
        return Whole(tensor.of(whole_of(tensor.base, what).values))
    if isinstance(tensor, ReplicatedTensor):
        return Whole(tensor._local_tensor)
    if isinstance(tensor, DTensor):
        whole = _dtensor(tensor, what)
        if over is not None and (missing := tensor.numel() - tensor._local_tensor.numel()):
            note_received(over, str(what), "a DTensor", tensor.shape, missing * tensor.dtype.itemsize)
        return whole
    return Whole(tensor)


def _own_rows(tensor: RowShardedTensor) -> Tensor:
    values = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    for box in tensor.row_split.boxes(tensor.topology.shard):
        values[box.slices] = box.of(tensor._local_tensor)
    return values


def _dtensor(tensor: DTensor, what: Any) -> Whole:
    """Gather a DTensor of torch's. It may have the placements of a parameter at rest, and rows where torch puts
    them."""
    placements, mesh = tensor.placements, tensor.device_mesh
    uneven = [dim for dim, p in enumerate(placements) if isinstance(p, compat.RowShard) and mesh.size(dim) > 1]
    if not uneven:
        if all(placement.is_replicate() for placement in placements):
            return Whole(tensor._local_tensor, (slice(None),) * tensor.ndim)
        values = whole_tensor(tensor)
        if any(isinstance(placement, Partial) for placement in placements):
            return Whole(values)
        plain = [torch.distributed.tensor.Shard(0) if isinstance(p, compat.RowShard) else p for p in placements]
        sizes, offsets = compat.local_shape_and_offset(tuple(tensor.shape), mesh, plain)
        return Whole(values, tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)))
    local = tensor._local_tensor
    others = any(not p.is_replicate() for dim, p in enumerate(placements) if dim not in uneven and mesh.size(dim) > 1)
    if len(uneven) > 1 or others or local.shape[1:] != tensor.shape[1:] or local.ndim != tensor.ndim:
        raise RuntimeError(
            f"{what} was given a DTensor of shape {tuple(tensor.shape)} with placements {tuple(placements)} and local "
            f"shape {tuple(local.shape)}: which rows it holds cannot be told. Make it with distribute_tensor(values, "
            "mesh, [Shard(0)]) over one mesh dimension, or compute it from the parameter."
        )
    group = Group.of(mesh.get_group(uneven[0]))
    counts = compat.wait_tensor(
        compat.all_gather(torch.tensor([len(local)], device=local.device), group.size, group.name)
    ).tolist()
    if sum(counts) != tensor.shape[0]:
        raise RuntimeError(
            f"{what} was given a DTensor of shape {tuple(tensor.shape)} of which ranks hold {counts} rows."
        )
    padded = local.new_zeros(max(counts), *local.shape[1:])
    padded[: len(local)] = local
    pieces = compat.wait_tensor(compat.all_gather(padded, group.size, group.name)).chunk(group.size)
    start = sum(counts[: group.rank])
    values = torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)])
    return Whole(values, (slice(start, start + len(local)), *(slice(None) for _ in local.shape[1:])))
