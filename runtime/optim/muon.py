"""torch.optim.Muon over sharded parameters, with the same results as over whole ones.

Muon's update of a matrix is its orthogonalized momentum: five products of the whole matrix with itself. Momentum and
weights stay sharded. For each matrix, one rank, its owner, receives the momentum in bfloat16 (the dtype of the products
anyway), orthogonalizes it, and sends each rank its rows of the result. Matrices that are whole on one rank are owned
there and do not travel. The layout arranges that if it costs little padding, see ``whole`` in
:class:`~mfsdp_compile.runtime.layout.ParamSpec`. The others are distributed so that ranks have equal work.

Traffic per step and rank: two all-to-alls of ``2 bytes * elements / ranks``, a quarter of what gathering float32
momentum on every rank would send. Work per rank: ``1 / ranks`` of one process's. The idea of owners is from "Muon is
Scalable for LLM Training" (https://arxiv.org/abs/2502.16982), which gathers over the data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..memory.tensor import RowShardedTensor, RowSplit
from ..topology import Group, Topology

__all__ = ["Journey", "Leg", "ShardedMuon", "legs_of"]

CHUNK_BYTES = 256 << 20
"""Bytes of whole matrices that a rank holds at a time while it orthogonalizes."""


class ShardedMuon(torch.optim.Muon):
    """A ``torch.optim.Muon`` after ``fully_shard_optimizer``. Groups, state and hooks are the same."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if "momentum_buffer" not in self.state[param]:
                    self.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
            for topology in dict.fromkeys(param.topology for param in params):
                self._update([param for param in params if param.topology == topology], topology, group)
        return loss

    def _update(self, params: Sequence[RowShardedTensor], topology: Topology, group: dict[str, Any]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]

        def rows(param: RowShardedTensor) -> Tensor:
            gradient, buffer = param.grad, self.state[param]["momentum_buffer"]
            assert gradient is not None
            buffer.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            return topology.on_device(update.to_local().to(torch.bfloat16, copy=True))

        def orthogonalize(whole: Tensor) -> Tensor:
            return compat.orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])

        topology.announce(f"Muon's step, from {params[0].split.name!r} on", params[0].split.name)
        chunks = _chunks(params, topology.shards)
        # The next matrices travel to their owners while the current ones are processed.
        following: Journey | None = None
        for number, chunk in enumerate(chunks):
            journey = following or self._journey(chunk, topology, rows)
            following = self._journey(chunks[number + 1], topology, rows) if number + 1 < len(chunks) else None
            for param, update in zip(chunk, journey.there_and_back(orthogonalize), strict=True):
                param.mul_(1 - lr * group["weight_decay"])
                rate = compat.muon_learning_rate(lr, group["adjust_lr_fn"], param.shape)
                param.add_(RowShardedTensor.wrap(update.to(param.device), param.split, topology), alpha=-rate)

    def _journey(
        self, params: Sequence[RowShardedTensor], topology: Topology, rows: Callable[[RowShardedTensor], Tensor]
    ) -> Journey:
        # Cached: computing it involves every shard of every matrix.
        routes: dict[tuple[int, ...], list[Leg]] = self.__dict__.setdefault("_mfsdp_routes", {})
        key = tuple(id(param) for param in params)
        if key not in routes:
            routes[key] = legs_of([param.split for param in params], topology)
        return Journey([param.split.shape for param in params], routes[key], [rows(param) for param in params])

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_mfsdp_routes"}


def _chunks(params: Sequence[RowShardedTensor], pieces: int) -> list[list[RowShardedTensor]]:
    """Split matrices into lists of limited size: each rank owns about ``CHUNK_BYTES`` of a list, in bfloat16."""
    chunks: list[list[RowShardedTensor]] = []
    held = 0
    for param in params:
        size = 2 * param.numel()
        if not chunks or held + size > CHUNK_BYTES * pieces:
            chunks.append([])
            held = 0
        chunks[-1].append(param)
        held += size
    return chunks


def owners(splits: Sequence[RowSplit], pieces: int) -> list[int]:
    """Return the shard (see :attr:`Topology.shard`) that owns each matrix: equal loads, largest matrices first.

    A pure function of layouts, so that every rank computes the same owners.
    """
    load = [0] * pieces
    found = [-1] * len(splits)
    work = [math.prod(split.shape) * (min(split.shape) if len(split.shape) > 1 else 1) for split in splits]
    for i, split in enumerate(splits):
        home = next(
            (piece for piece in range(pieces) if len(split.elements(piece)) == math.prod(split.part_shape)), None
        )
        if home is not None:
            found[i] = home
            load[home] += work[i]
    for i in sorted(range(len(splits)), key=lambda i: (-work[i], i)):
        if found[i] < 0:
            found[i] = min(range(pieces), key=lambda piece: (load[piece], piece))
            load[found[i]] += work[i]
    return found


# -- to the owners and back -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """One all-to-all.

    Args:
        group: The ranks that take part.
        goes_to: For each matrix that this rank holds a part of, the rank of ``group`` that it goes to.
        numel: For each of these matrices, the number of elements that each rank of ``group`` holds before.
    """

    group: Group
    goes_to: dict[int, int]
    numel: dict[int, list[int]]

    def _to(self, rank: int) -> list[int]:
        return [k for k, to in self.goes_to.items() if to == rank]

    def start(self, held: dict[int, Tensor], like: Tensor) -> Tensor:
        ranks, mine = range(self.group.size), self._to(self.group.rank)
        return _all_to_all(
            [[held[k] for k in self._to(rank)] for rank in ranks],
            [sum(self.numel[k][rank] for k in mine) for rank in ranks],
            self.group,
            like,
        )

    def finish(self, started: Tensor) -> dict[int, Tensor]:
        """Return what has arrived here, by matrix."""
        mine = self._to(self.group.rank)
        numels = [self.numel[k][rank] for rank in range(self.group.size) for k in mine]
        parts = compat.wait_tensor(started).split(numels)
        return {k: torch.cat(parts[i :: len(mine)]) for i, k in enumerate(mine)}

    def back(self, arrived: dict[int, Tensor], like: Tensor) -> dict[int, Tensor]:
        """Reverse the all-to-all: return what ``start`` was given, in place of what ``finish`` has returned."""
        ranks = range(self.group.size)
        cut = {k: arrived[k].split(self.numel[k]) for k in self._to(self.group.rank)}
        order = [k for rank in ranks for k in self._to(rank)]
        mine = self.group.rank
        started = _all_to_all(
            [[parts[rank] for parts in cut.values()] for rank in ranks],
            [sum(self.numel[k][mine] for k in self._to(rank)) for rank in ranks],
            self.group,
            like,
        )
        parts = compat.wait_tensor(started).split([self.numel[k][mine] for k in order])
        return dict(zip(order, parts, strict=True))


def _all_to_all(outgoing: list[list[Tensor]], incoming: list[int], group: Group, like: Tensor) -> Tensor:
    """Start an all-to-all of parts for each rank.

    ``incoming`` is the number of elements from each rank. ``like`` determines the dtype if nothing is sent.
    """
    parts = [part for parts in outgoing for part in parts]
    sent = torch.cat(parts) if parts else like.new_empty(0)
    sizes = [sum(part.numel() for part in parts) for parts in outgoing]
    return compat.all_to_all(sent, incoming, sizes, group.name)


def legs_of(splits: Sequence[RowSplit], topology: Topology) -> list[Leg]:
    """Return each matrix's route to its owner. With HFSDP, first over the outer ranks, then over the inner ones."""
    owner = dict(enumerate(owners(splits, topology.shards)))
    numel = {k: [len(split.elements(piece)) for piece in range(topology.shards)] for k, split in enumerate(splits)}
    if len(topology.shard_groups) < 2:
        return [Leg(group, owner, numel) for group in topology.shard_groups]
    outer, inner = topology.shard_groups
    # Shard ``i * outer.size + o`` belongs to inner rank ``i`` and outer rank ``o``.
    mine = inner.rank * outer.size
    first = Leg(
        outer,
        {k: piece % outer.size for k, piece in owner.items()},
        {k: pieces[mine : mine + outer.size] for k, pieces in numel.items()},
    )
    here = [k for k, to in first.goes_to.items() if to == outer.rank]
    second = Leg(
        inner,
        {k: owner[k] // outer.size for k in here},
        {k: [sum(numel[k][i : i + outer.size]) for i in range(0, topology.shards, outer.size)] for k in here},
    )
    return [first, second]


class Journey:
    """Matrices on their way to their owners.

    Args:
        shapes: Shapes of the whole matrices.
        legs: All-to-alls from :func:`_legs`.
        rows: This rank's rows of each matrix, ``[n, columns]``.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], legs: Sequence[Leg], rows: Sequence[Tensor]) -> None:
        self._shapes = shapes
        self._legs = legs
        self._rows = rows
        self._held = {k: part.reshape(-1) for k, part in enumerate(rows)}
        self._started = legs[0].start(self._held, rows[0]) if legs else None

    def there_and_back(self, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return this rank's rows of ``function(matrix)`` for each matrix."""
        return self.back({k: function(whole) for k, whole in self.there().items()})

    def there(self) -> dict[int, Tensor]:
        """Return the whole matrices that this rank owns, by number."""
        held, started = self._held, self._started
        for leg in self._legs:
            held = leg.finish(started if started is not None else leg.start(held, self._rows[0]))
            started = None
        return {k: part.view(self._shapes[k]) for k, part in held.items()}

    def back(self, owned: dict[int, Tensor]) -> list[Tensor]:
        """Return this rank's rows of each matrix, in place of what :meth:`there` has returned to the owners."""
        held = {k: whole.reshape(-1) for k, whole in owned.items()}
        for leg in reversed(self._legs):
            held = leg.back(held, self._rows[0])
        return [held[k].view(part.shape) for k, part in enumerate(self._rows)]
