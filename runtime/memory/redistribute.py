"""Moving rows of parameters between ranks.

Parameters of one shape may have their rows on different ranks: their buckets contain other parameters too (a trainable
and a frozen copy of a module), or are sharded over other ranks. The rows of one parameter move to the ranks of the
other's rows, with one all-to-all for all parameters over the same ranks. Otherwise each part is gathered on every rank,
one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import compat

if TYPE_CHECKING:
    from ..topology import Topology
    from .tensor import RowSplit

__all__ = ["RowMove", "all_gather_rows", "move_rows", "same_ranks", "take_rows"]


def take_rows(whole: Tensor, split: RowSplit, rank: int) -> Tensor:
    """Return the rows that ``rank`` owns of an ordinary tensor of the global shape; a view."""
    if not split.shape:
        return whole if split.rows(rank) else whole.reshape(1)[:0]
    rows = split.rows(rank)
    return split.part_of(whole)[rows.start : rows.stop]


def all_gather_rows(local: Tensor, split: RowSplit, topology: Topology) -> Tensor:
    """Return the whole tensor on every rank. A collective."""
    topology.announce(f"full_tensor() of {split.name!r}", split.name)
    return split.assemble(_gather_part(local, split, topology)).to(local.device)


def _gather_part(local: Tensor, split: RowSplit, topology: Topology) -> Tensor:
    pieces = split.layout.world_size
    longest = max(len(split.rows(piece)) for piece in range(pieces))
    row_numel = _row_numel(split)
    gathered = local.new_empty(longest * row_numel)
    gathered[: local.numel()].copy_(local.reshape(-1))
    gathered = topology.on_device(gathered)
    for group in topology.shard_groups:
        gathered = compat.wait_tensor(compat.all_gather(gathered, group.size, group.name))
    gathered = gathered.view(pieces, -1)
    parts = [gathered[piece, : len(split.rows(piece)) * row_numel] for piece in range(pieces)]
    return torch.cat(parts).view(split.part_shape)


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

    def sent(self, sender: int, receiver: int) -> range:
        """Return the rows that a shard of the source and a shard of the target have in common."""
        mine, its = self.source.rows(sender), self.target.rows(receiver)
        start = max(mine.start, its.start)
        return range(start, max(start, min(mine.stop, its.stop)))

    def finish(self, rows: Tensor) -> Tensor:
        return rows.view(self.target.local_shape(self.target_over.shard))

    def alone(self) -> Tensor:
        """Move rows by gathering the part. A collective, unless the source holds all of it on every rank."""
        part = self.local
        if self.over.shard_groups:
            self.over.announce(f"a gather of the rows of {self.source.name!r}", self.source.name)
            part = _gather_part(self.local, self.source, self.over).to(self.local.device)
        rows, row_numel = self.target.rows(self.target_over.shard), _row_numel(self.target)
        return self.finish(part.reshape(-1)[rows.start * row_numel : rows.stop * row_numel].clone())


def move_rows(moves: Sequence[RowMove]) -> list[Tensor]:
    """Return this rank's rows of each target, as contiguous copies. A collective: every rank passes the same moves."""
    found: dict[int, Tensor] = {}
    together: dict[Any, list[int]] = {}
    for number, move in enumerate(moves):
        if (group := move.group) is None:
            found[number] = move.alone()
        else:
            together.setdefault((group.name, move.local.dtype, move.local.device), []).append(number)
    for numbers in together.values():
        chosen = [moves[number] for number in numbers]
        found |= zip(numbers, _exchange(chosen), strict=True)
    return [found[number] for number in range(len(moves))]


def _exchange(moves: Sequence[RowMove]) -> list[Tensor]:
    group = moves[0].group
    more = f" and {len(moves) - 1} more" if len(moves) > 1 else ""
    moves[0].over.announce(f"an exchange of rows of {moves[0].source.name!r}{more}", moves[0].source.name)
    me, others = group.rank, range(group.size)
    parts, outgoing = [], []
    for receiver in others:
        count = 0
        for move in moves:
            rows, row_numel, first = move.sent(me, receiver), _row_numel(move.source), move.source.rows(me).start
            parts.append(move.local.reshape(-1)[(rows.start - first) * row_numel : (rows.stop - first) * row_numel])
            count += len(rows) * row_numel
        outgoing.append(count)
    sizes = [[len(move.sent(sender, me)) * _row_numel(move.source) for move in moves] for sender in others]
    incoming = [sum(each) for each in sizes]
    home, parts = moves[0].local.device, [moves[0].over.on_device(part) for part in parts]
    received = compat.wait_tensor(compat.all_to_all(torch.cat(parts), incoming, outgoing, group.name))
    pieces = received.to(home).split([size for each in sizes for size in each])
    return [move.finish(torch.cat(pieces[number :: len(moves)])) for number, move in enumerate(moves)]


def _row_numel(split: RowSplit) -> int:
    return split.layout.slots[split.index].row_numel
