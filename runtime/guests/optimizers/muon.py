"""torch.optim.Muon over sharded parameters, with the same results as over whole ones.

Muon's update of a matrix is its orthogonalized momentum: five products of the whole matrix with itself. Momentum and
weights stay sharded. For each matrix, one rank, its owner, receives the momentum in bfloat16 (the dtype of the products
anyway), orthogonalizes it, and sends each rank its rows of the result. Matrices that are whole on one rank are owned
there and do not travel. The layout arranges that if it costs little padding, see ``whole`` in
:class:`~mfsdp_compile.runtime.geometry.layout.ParamSpec`. The others are distributed so that ranks have equal work.

Every matrix of a stack ``[E, H, F]`` has an owner of its own, so that the result is that of Muon over E parameters.
Matrices that are divided over tensor-parallel ranks are owned by one of all ranks that hold a part, and travel over
data-parallel ranks first, then over tensor-parallel ones. Expert-parallel ranks orthogonalize their own experts.

Traffic per step and rank: two all-to-alls of ``2 bytes * elements / ranks``, a quarter of what gathering float32
momentum on every rank would send. Work per rank: ``1 / ranks`` of one process's. The idea of owners is from "Muon is
Scalable for LLM Training" (https://arxiv.org/abs/2502.16982), which gathers over the data-parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import compat
from ...geometry.groups import Group
from ...geometry.rows import RowSplit
from ...geometry.topology import Topology
from ...memory import devices
from ...memory.redistribute import announce_at_rest, as_real
from ...memory.tensor import RowShardedTensor

CHUNK_BYTES = 256 << 20
"""Bytes of whole matrices that a rank holds at a time while it orthogonalizes."""


class ShardedMuon(torch.optim.Muon):
    """A ``torch.optim.Muon`` after ``fully_shard_optimizer``. Groups, state and hooks are the same."""

    mfsdp_sharded_step = True

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
            for (topology, _), alike in together(params, cut_of).items():
                self._update(alike, topology, group)
        return loss

    def _update(self, params: Sequence[RowShardedTensor], topology: Topology, group: dict[str, Any]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]

        def rows(param: RowShardedTensor) -> Tensor:
            gradient, buffer = param.grad, self.state[param]["momentum_buffer"]
            assert gradient is not None
            buffer.lerp_(gradient, 1 - momentum)
            update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
            return devices.on_device(update.to_local().to(torch.bfloat16, copy=True), topology.mesh.device_type)

        def orthogonalize(whole: Tensor) -> Tensor:
            return compat.orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])

        announce_at_rest(topology, f"Muon's step, from {params[0].row_split.name!r} on", params[0].row_split.name)
        chunks = _chunks(params, topology.shards)
        # The next matrices travel to their owners while the current ones are processed.
        following: Journey | None = None
        for number, chunk in enumerate(chunks):
            journey = following or self._journey(chunk, topology, rows)
            following = self._journey(chunks[number + 1], topology, rows) if number + 1 < len(chunks) else None
            parts = iter(journey.there_and_back(orthogonalize))
            for param in chunk:
                local = param.rows()
                matrices = [next(parts) for _ in range(_count(param.row_split))]
                update = (torch.cat(matrices) if len(matrices) > 1 else matrices[0]).view(local.shape)
                param.mul_(1 - lr * group["weight_decay"])
                rate = compat.muon_learning_rate(lr, group["adjust_lr_fn"], param.shape[-2:])
                param.add_(RowShardedTensor.wrap(update.to(param.device), param.row_split, topology), alpha=-rate)

    def _journey(
        self, params: Sequence[RowShardedTensor], topology: Topology, rows: Callable[[RowShardedTensor], Tensor]
    ) -> Journey:
        # Cached: computing it involves every shard of every matrix.
        routes: dict[tuple[Any, ...], tuple[list[Item], list[Leg]]] = self.__dict__.setdefault("_mfsdp_routes", {})
        cut = cut_of(params[0].row_split)
        key = (cut and cut.group.name, *map(id, params))
        if key not in routes:
            items = [item for param in params for item in _matrices(param.row_split)]
            routes[key] = items, legs_of(items, topology)
        items, legs = routes[key]
        flat = iter(rows(param).reshape(-1) for param in params)
        parts: list[Tensor] = []
        for param in params:
            numels = [
                len(item.held(topology.shard)) for item in items[len(parts) : len(parts) + _count(param.row_split)]
            ]
            parts.extend(next(flat).split(numels))
        return Journey(items, legs, parts).start()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "_mfsdp_routes"}


def check_matrices(optimizer: torch.optim.Optimizer) -> None:
    """Check that a Muon's parameters are matrices or stacks of them, and that whole matrices can be assembled.

    Raises:
        ValueError: A parameter has less than 2 dimensions or more than 3.
        NotImplementedError: A matrix is divided over two mesh dimensions that are not data-parallel ones.
    """
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if param.ndim not in (2, 3):
            raise ValueError(
                f"Muon works on matrices [H, F] and stacks of matrices [E, H, F], and {param.row_split.name!r} has the "
                f"shape {tuple(param.shape)}. Give it to another optimizer."
            )
        cut_of(param.row_split)
        check_is_one_parameter(param)


def check_is_one_parameter(param: RowShardedTensor) -> None:
    """Check that parts on expert-parallel ranks are one parameter to an optimizer that looks at all of it.

    Raises:
        NotImplementedError: They may be separate experts, which have the same names on all ranks.
    """
    if param.topology.skips_itself and param.row_split.groups and param.ndim < 3:
        raise NotImplementedError(
            f"The optimizer looks at whole parameters, and {param.row_split.name!r}, {list(param.shape)}, is divided "
            "over expert-parallel ranks: it may be one parameter or several. Make it a stack of the rank's experts, "
            "[E, H, F], or give it to another optimizer."
        )


def _chunks(params: Sequence[RowShardedTensor], pieces: int) -> list[list[RowShardedTensor]]:
    """Split matrices into lists of limited size: each rank owns about ``CHUNK_BYTES`` of a list, in bfloat16."""
    chunks: list[list[RowShardedTensor]] = []
    held = 0
    for param in params:
        size = 2 * math.prod(param.row_split.part_shape)
        if not chunks or held + size > CHUNK_BYTES * pieces:
            chunks.append([])
            held = 0
        chunks[-1].append(param)
        held += size
    return chunks


# -- what travels, and to whom ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How what travels is divided over ranks that are not data-parallel.

    Args:
        group: Ranks that hold the parts.
        dim: Dimension that is divided.
        sizes: Size of each rank's part along it.
    """

    group: Group
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """What travels to one owner: a parameter, or a matrix of a stack.

    Args:
        split: How the parameter is spread over data-parallel ranks.
        elements: Which elements of the bucket's part it is.
        shape: Its shape, with the parts of all ranks.
        cut: How it is divided over other ranks; None: every data-parallel group holds all of it.
    """

    split: RowSplit
    elements: range
    shape: tuple[int, ...]
    cut: Cut | None = None

    def held(self, piece: int) -> range:
        """Return the elements of the part that shard ``piece`` holds."""
        elements = self.split.elements(piece)
        start = min(max(elements.start, self.elements.start), self.elements.stop)
        return range(start, max(start, min(elements.stop, self.elements.stop)))

    @property
    def work(self) -> int:
        return math.prod(self.shape) * (min(self.shape) if len(self.shape) > 1 else 1)

    def numels(self) -> list[int]:
        """Return the number of elements on each rank of the cut."""
        assert self.cut is not None
        rest = math.prod(size for dim, size in enumerate(self.shape) if dim != self.cut.dim)
        return [size * rest for size in self.cut.sizes]

    def assemble(self, flat: Tensor) -> Tensor:
        """Return the whole from the parts of all ranks, one after the other."""
        if self.cut is None:
            return flat.view(self.shape)
        shapes = [(*self.shape[: self.cut.dim], size, *self.shape[self.cut.dim + 1 :]) for size in self.cut.sizes]
        parts = [part.view(shape) for part, shape in zip(flat.split(self.numels()), shapes, strict=True)]
        return torch.cat(parts, self.cut.dim)

    def divide(self, whole: Tensor) -> Tensor:
        """Reverse :meth:`assemble`."""
        if self.cut is None:
            return whole.reshape(-1)
        return torch.cat([part.reshape(-1) for part in whole.split(self.cut.sizes, self.cut.dim)])


def whole_item(split: RowSplit) -> Item:
    """Return a parameter as one item."""
    return Item(split, range(math.prod(split.part_shape)), split.shape, whole_cut(split))


def whole_cut(split: RowSplit) -> Cut | None:
    """Return how a parameter, with all of its dimensions, is divided over ranks that are not data-parallel."""
    return cut_of(split, len(split.shape))


def _count(split: RowSplit) -> int:
    return math.prod(split.part_shape[:-2])


def _matrices(split: RowSplit) -> list[Item]:
    """Return the matrices of the bucket's part of a matrix or stack."""
    numel, shape, cut = math.prod(split.part_shape[-2:]), split.shape[-2:], cut_of(split)
    return [Item(split, range(i * numel, (i + 1) * numel), shape, cut) for i in range(_count(split))]


def cut_of(split: RowSplit, inner: int = 2) -> Cut | None:
    """Return how the last ``inner`` dimensions of a parameter are divided over ranks that are not data-parallel.

    Raises:
        NotImplementedError: Over two mesh dimensions.
    """
    ndim = len(split.shape)
    if split.partition is None or split.part_shape[ndim - inner :] == split.shape[ndim - inner :]:
        return None
    over = split.partition.placements_over_groups
    divided = [placement for placement in over if placement.dim % ndim >= ndim - inner]
    if len(divided) > 1:
        raise NotImplementedError(
            f"The optimizer needs whole matrices, and {split.name!r} is divided over two mesh dimensions besides the "
            f"data-parallel ones, {split.partition.placements} over {split.partition.mesh.mesh_dim_names}. Give such "
            "parameters to another optimizer."
        )
    (placement,) = divided
    group = split.groups[over.index(placement)]
    dim = placement.dim % ndim
    size = split.shape[dim]
    most = -(-size // group.size)  # as torch.chunk, and DTensor, divide
    sizes = tuple(min(most, max(size - rank * most, 0)) for rank in range(group.size))
    return Cut(group, dim - (ndim - inner), sizes)


def together(
    params: Iterable[RowShardedTensor], cut: Callable[[RowSplit], Cut | None]
) -> dict[tuple[Topology, str | None], list[RowShardedTensor]]:
    """Group parameters by the ranks that they travel over: topology, and name of the group of other ranks."""
    found: dict[tuple[Topology, str | None], list[RowShardedTensor]] = {}
    for param in params:
        cut_of_param = cut(param.row_split)
        found.setdefault((param.topology, cut_of_param.group.name if cut_of_param is not None else None), []).append(
            param
        )
    return found


@dataclass(frozen=True)
class Owner:
    """Args:
    shard: Which shard's rank (see :attr:`Topology.shard`) owns an item.
    part: Which rank of the item's cut.
    """

    shard: int
    part: int = 0


def owners(items: Sequence[Item], pieces: int) -> list[Owner]:
    """Return the owner of each item: equal loads, largest items first.

    A pure function of layouts, so that every rank computes the same owners. Owners of items that are cut depend on
    their whole shapes only: ranks of a cut may have other layouts.
    """
    load = [0] * pieces
    found: list[Owner | None] = [None] * len(items)
    work = [item.work for item in items]
    in_order = sorted(range(len(items)), key=lambda i: (-work[i], i))
    loads: dict[Owner, int] = {}
    for i in in_order:
        cut = items[i].cut
        if cut is not None:
            places = [Owner(piece, part) for piece in range(pieces) for part in range(cut.group.size)]
            found[i] = least = min(places, key=lambda place: loads.get(place, 0))
            loads[least] = loads.get(least, 0) + work[i]
            load[least.shard] += work[i] if least.part == cut.group.rank else 0
    for i, item in enumerate(items):
        home = next((piece for piece in range(pieces) if len(item.held(piece)) == len(item.elements)), None)
        if found[i] is None and home is not None:
            found[i] = Owner(home)
            load[home] += work[i]
    for i in in_order:
        if found[i] is None:
            piece = min(range(pieces), key=lambda piece: (load[piece], piece))
            found[i] = Owner(piece)
            load[piece] += work[i]
    return [owner for owner in found if owner is not None]


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
    if like.is_complex():
        outgoing = [[as_real(part).reshape(-1) for part in parts] for parts in outgoing]
        pairs = _all_to_all(outgoing, [2 * count for count in incoming], group, as_real(like))
        return torch.view_as_complex(pairs.view(-1, 2))
    parts = [part for parts in outgoing for part in parts]
    sent = torch.cat(parts) if parts else like.new_empty(0)
    sizes = [sum(part.numel() for part in parts) for parts in outgoing]
    return compat.all_to_all(sent, incoming, sizes, group.name)


def legs_of(items: Sequence[Item], topology: Topology, found: Sequence[Owner] | None = None) -> list[Leg]:
    """Return each item's route to its owner.

    With HFSDP, first over the outer ranks, then over the inner ones; the parts of a cut last. The items that are cut
    are cut over the same group.

    Args:
        found: What :func:`owners` has returned for these items, if they were among others.
    """
    found = owners(items, topology.shards) if found is None else found
    owner = {k: place.shard for k, place in enumerate(found)}
    numel = {k: [len(item.held(piece)) for piece in range(topology.shards)] for k, item in enumerate(items)}
    return [*_legs_over_shards(owner, numel, topology), *_legs_over_cut(items, found, topology.shard)]


def _legs_over_shards(owner: dict[int, int], numel: dict[int, list[int]], topology: Topology) -> list[Leg]:
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


def _legs_over_cut(items: Sequence[Item], found: Sequence[Owner], shard: int) -> list[Leg]:
    cut = {k: item.cut for k, item in enumerate(items) if item.cut is not None}
    here = {k: found[k].part for k in cut if found[k].shard == shard}
    groups = {each.group.name: each.group for each in cut.values()}
    return [Leg(group, here, {k: items[k].numels() for k in here}) for group in groups.values()]


class Journey:
    """Items on their way to their owners.

    Args:
        items: What travels.
        legs: All-to-alls from :func:`legs_of`.
        parts: This rank's elements of each item, flat.
    """

    def __init__(self, items: Sequence[Item], legs: Sequence[Leg], parts: Sequence[Tensor]) -> None:
        self._items = items
        self._legs = legs
        self._parts = parts
        self._held = dict(enumerate(parts))
        self._started: Tensor | None = None

    def start(self) -> Journey:
        """Start the first all-to-all, to wait for it in :meth:`there`."""
        if self._legs:
            self._started = self._legs[0].start(self._held, self._parts[0])
        return self

    def there_and_back(self, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return this rank's elements of ``function(item)`` for each item, flat."""
        return self.back({k: function(whole) for k, whole in self.there().items()})

    def there(self) -> dict[int, Tensor]:
        """Return the whole items that this rank owns, by number."""
        held, started = self._held, self._started
        for leg in self._legs:
            held = leg.finish(started if started is not None else leg.start(held, self._parts[0]))
            started = None
        return {k: self._items[k].assemble(part) for k, part in held.items()}

    def back(self, owned: dict[int, Tensor]) -> list[Tensor]:
        """Return this rank's elements of each item, flat, given the whole items that this rank owns."""
        held = {k: self._items[k].divide(whole) for k, whole in owned.items()}
        for leg in reversed(self._legs):
            held = leg.back(held, self._parts[0])
        return [held[k] for k in range(len(self._parts))]
