"""Moving rows of parameters between ranks.

Parameters of one shape may have their rows on different ranks: their buckets contain other parameters too (a trainable
and a frozen copy of a module), or are sharded over other ranks. The rows of one parameter move to the ranks of the
other's rows, with one all-to-all for all parameters over the same ranks. Otherwise each part is gathered on every rank,
one after the other.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..geometry.rows import RowSplit
from ..geometry.topology import Topology
from ..observers import operation_begins
from . import computed, devices

_log = logging.getLogger("mfsdp_compile.operators")


def announce_at_rest(topology: Topology, what: str, parameter: str | None = None) -> None:
    """Tell observers that an operation on parameters at rest is about to communicate, if it does."""
    if topology.shard_groups:  # otherwise every rank holds everything
        operation_begins(what, topology.every.name, parameter, computed.running())


def reduce_over_shards(topology: Topology, value: Tensor, op: str) -> Tensor:
    """Reduce results for each shard to the result for the whole tensor; the same on every rank."""
    for group in topology.shard_groups:
        value = group.all_reduce(value, op, topology.in_order)
    return value


def note_received(topology: Topology, what: str, name: str, shape: Sequence[int], received: int) -> None:
    """Count and log the bytes that this rank receives of a tensor at rest.

    Args:
        what: What needs them.
        name: Name of the tensor, ``[*shape]``.
    """
    if received:
        topology.gathered[what] += received
    _log.debug("%s gathers %r %s: %d B received", what, name, tuple(shape), received)


def as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, ``[*shape, 2]``, which collectives take; return others as they
    are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def take_rows(whole: Tensor, split: RowSplit, rank: int) -> Tensor:
    """Return the rows that ``rank`` owns of an ordinary tensor of the global shape; a view if its layout allows."""
    return take_rows_of_part(split.part_of(whole), split, rank)


def take_rows_of_part(part: Tensor, split: RowSplit, rank: int) -> Tensor:
    """Return the same of an ordinary tensor of the shape of the part that the bucket holds."""
    rows = split.rows(rank)
    if not split.row_dims:
        return part if rows else part[None][:0]
    return part.flatten(0, split.row_dims - 1)[rows.start : rows.stop]


def take_broadcast_rows(value: Tensor, split: RowSplit, rank: int) -> Tensor:
    """Return what broadcasts with the rows that ``rank`` owns, from what broadcasts with the whole parameter."""
    value, shape, dims = split.part_of(value), split.part_shape, split.row_dims
    if value.ndim <= len(split.row_shape):
        return value
    value = value[(None,) * (len(shape) - value.ndim)]
    if all(size == 1 for size in value.shape[:dims]):  # equal for all rows
        return value.flatten(0, dims - 1)
    return take_rows_of_part(value.expand(*shape[:dims], *value.shape[dims:]), split, rank)


def all_gather_rows(local: Tensor, split: RowSplit, topology: Topology, what: str = "full_tensor()") -> Tensor:
    """Return the whole tensor on every rank. A collective.

    Args:
        what: What it is for, for error messages on ranks that do something else.
    """
    announce_at_rest(topology, f"{what} of {split.name!r}", split.name)
    if topology.shard_groups or split.groups:
        note_received(
            topology, what, split.name, split.shape, (math.prod(split.shape) - local.numel()) * local.itemsize
        )
    return split.assemble(_gather_part(local, split, topology)).to(local.device)


def _gather_part(local: Tensor, split: RowSplit, topology: Topology) -> Tensor:
    if local.is_complex():
        return torch.view_as_complex(_gather_part(as_real(local), split.as_pairs, topology))
    counts = [len(split.elements(piece)) for piece in range(split.layout.world_size)]
    gathered = local.new_empty(max(counts))
    gathered[: local.numel()].copy_(local.reshape(-1))
    gathered = devices.on_device(gathered, topology.mesh.device_type)
    if not gathered.is_floating_point():
        gathered = gathered.view(torch.uint8)  # not every backend sends every dtype
    for group in topology.shard_groups:
        gathered = compat.wait_tensor(compat.all_gather(gathered, group.size, group.name))
    pieces = gathered.view(local.dtype).view(len(counts), -1)
    return torch.cat([piece[:count] for piece, count in zip(pieces, counts, strict=True)]).view(split.part_shape)


def same_ranks(mine: Topology, its: Topology) -> bool:
    """Whether shards with the same number are on the same ranks. Groups of the same ranks may have several names."""
    return mine is its or [(g.size, g.rank, g.stride) for g in mine.shard_groups] == [
        (g.size, g.rank, g.stride) for g in its.shard_groups
    ]


@dataclass(frozen=True)
class RowMove:
    """Rows of one tensor that are to be placed like those of another tensor of the same shape and partition.

    Args:
        local: This rank's rows.
        source, over: How the rows are split, and over which ranks.
        target, target_over: How the rows are to be split, and over which ranks.
    """

    local: Tensor
    source: RowSplit
    over: Topology
    target: RowSplit
    target_over: Topology

    @property
    def group(self) -> Any:
        """Group to exchange rows over in one collective; None: there is no such group, or no need for it."""
        groups = self.over.shard_groups
        return groups[0] if len(groups) == 1 and same_ranks(self.over, self.target_over) else None

    @property
    def is_nothing(self) -> bool:
        """Whether each rank has the rows already."""
        shards = range(self.source.layout.world_size)
        return same_ranks(self.over, self.target_over) and all(
            self.source.elements(shard) == self.target.elements(shard) for shard in shards
        )

    def sent(self, sender: int, receiver: int) -> range:
        """Return the elements that a shard of the source and a shard of the target have in common."""
        mine, its = self.source.elements(sender), self.target.elements(receiver)
        start = max(mine.start, its.start)
        return range(start, max(start, min(mine.stop, its.stop)))

    @property
    def as_pairs(self) -> RowMove:
        """The same of the pairs of real numbers that complex rows consist of."""
        return replace(self, local=as_real(self.local), source=self.source.as_pairs, target=self.target.as_pairs)

    def finish(self, rows: Tensor) -> Tensor:
        return rows.view(self.target.local_shape(self.target_over.shard))

    def alone(self) -> Tensor:
        """Move rows by gathering the part. A collective, unless the source holds all of it on every rank."""
        part = self.local
        if self.over.shard_groups:
            announce_at_rest(self.over, f"a gather of the rows of {self.source.name!r}", self.source.name)
            part = _gather_part(self.local, self.source, self.over).to(self.local.device)
            received = (part.numel() - self.local.numel()) * part.itemsize
            note_received(self.over, "a gather of rows", self.source.name, self.source.shape, received)
        wanted = self.target.elements(self.target_over.shard)
        return self.finish(part.reshape(-1)[wanted.start : wanted.stop].clone())


def move_rows(moves: Sequence[RowMove]) -> list[Tensor]:
    """Return this rank's rows of each target, as contiguous copies. A collective: every rank passes the same moves."""
    found: dict[int, Tensor] = {}
    together: dict[Any, list[int]] = {}
    are_complex = [move.local.is_complex() for move in moves]
    moves = [move.as_pairs if pairs else move for move, pairs in zip(moves, are_complex, strict=True)]
    for number, move in enumerate(moves):
        if (group := move.group) is None:
            found[number] = move.alone()
        else:
            together.setdefault((group.name, move.local.dtype, move.local.device), []).append(number)
    for numbers in together.values():
        chosen = [moves[number] for number in numbers]
        found |= zip(numbers, _exchange(chosen), strict=True)
    return [torch.view_as_complex(found[n]) if pairs else found[n] for n, pairs in enumerate(are_complex)]


def _exchange(moves: Sequence[RowMove]) -> list[Tensor]:
    group = moves[0].group
    more = f" and {len(moves) - 1} more" if len(moves) > 1 else ""
    announce_at_rest(moves[0].over, f"an exchange of rows of {moves[0].source.name!r}{more}", moves[0].source.name)
    me, others = group.rank, range(group.size)
    parts, outgoing = [], []
    for receiver in others:
        count = 0
        for move in moves:
            sent, first = move.sent(me, receiver), move.source.elements(me).start
            parts.append(move.local.reshape(-1)[sent.start - first : sent.stop - first])
            count += len(sent)
        outgoing.append(count)
    sizes = [[len(move.sent(sender, me)) for move in moves] for sender in others]
    incoming = [sum(each) for each in sizes]
    received_bytes = (sum(incoming) - incoming[me]) * moves[0].local.itemsize
    note_received(
        moves[0].over, f"an exchange of rows{more}", moves[0].source.name, moves[0].source.shape, received_bytes
    )
    home, parts = moves[0].local.device, [devices.on_device(part, moves[0].over.mesh.device_type) for part in parts]
    received = compat.wait_tensor(compat.all_to_all(torch.cat(parts), incoming, outgoing, group.name))
    pieces = received.to(home).split([size for each in sizes for size in each])
    return [move.finish(torch.cat(pieces[number :: len(moves)])) for number, move in enumerate(moves)]
