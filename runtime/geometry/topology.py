"""Which ranks share what: the ZeRO strategies over one or two dimensions of data-parallel ranks.

                            at rest on a rank
    no_shard                everything
    optim                   1/n of optimizer state
    optim_grads             1/n of gradients too
    optim_grads_params      1/n of everything
    HSDP  (outer no_shard)  the same on each outer rank
    HFSDP (outer optim)     1/(n m) of optimizer state and gradients

n: inner ranks, m: outer ranks. What travels between them is in :mod:`..lanes.strategies`. Everything else reads the
properties of :class:`Topology`, which come from the :class:`~.placements.Placements` of each dimension.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from .. import compat
from .groups import Group
from .placements import Placements, ShardingStrategy


@dataclass(frozen=True)
class Accumulation:
    """What a rank keeps from one microbatch of a step to the next, beyond what the strategy requires.

    Args:
        whole_gradients: Gradients are accumulated unsharded, and reduced once per step. If False, strategies that shard
            gradients reduce those of every microbatch.
        keeps_gathered: Gathered parameters stay until the step's gradients are reduced.
        forwards_overlap: Several forwards run before the first one's backward. What one forward keeps, each of them
            keeps.
    """

    whole_gradients: bool = False
    keeps_gathered: bool = False
    forwards_overlap: bool = False


@dataclass(frozen=True)
class Topology:
    """The data-parallel ranks of a model and what they share.

    Args:
        mesh: Mesh of the parameters' DTensors: (inner,) or (outer, inner).
        strategy: Strategy over the inner ranks.
        outer_strategy: Strategy over the outer ranks: no_shard (HSDP) or optim (HFSDP).
        inner: Ranks that the strategy shards over.
        outer: Ranks along the outer dimension; None if there is only one dimension.
        every: All data-parallel ranks.
        inner_gathers: The ranks of ``inner`` with a separate communicator for gathers, so that gathers do not queue
            behind reductions; None: :attr:`inner`.
        reductions: The ranks that gradients are reduced over first, :attr:`inner` or with ``no_shard`` :attr:`every`,
            with a separate communicator; None: these.
        portions: Parts of :attr:`gather_group` that backwards gather over with ``reshard_after_forward``, by their
            size. Each consists of neighboring ranks, including this one, and is created when a graph first needs it.
        levels: For sums in two levels, by the number of neighbors: the neighbors that add first, and this rank's peers
            in other such groups, which add their sums.
        accumulation: What is kept between microbatches.
        skips_itself: Whether a rank that shares its parameters with no other one uses them from the shard, as for
            experts.
        inspects: Whether gradients are inspected when their reduction starts, so that there must be one on one rank
            too.
        in_order: Whether whatever is summed over ranks is added in their order; see :mod:`..determinism`.
        gathered: Bytes that this rank has received for operators on parameters at rest that need whole ones, by
            operator.
    """

    mesh: DeviceMesh
    strategy: ShardingStrategy
    outer_strategy: ShardingStrategy
    inner: Group
    outer: Group | None
    every: Group
    inner_gathers: Group | None = None
    reductions: Group | None = None
    portions: dict[int, Group] = field(default_factory=dict, compare=False)
    levels: dict[int, tuple[Group, Group]] = field(default_factory=dict, compare=False)
    accumulation: Accumulation = Accumulation()
    skips_itself: bool = False
    inspects: bool = False
    in_order: bool = False
    gathered: Counter[str] = field(default_factory=Counter, compare=False, repr=False)

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        return self  # copies communicate over the same groups

    def accumulating(self, accumulation: Accumulation) -> Topology:
        """Return a topology of the same ranks and strategy with another way to accumulate.

        Raises:
            ValueError: Parameters are to stay gathered with HFSDP.
        """
        if accumulation.keeps_gathered and self.is_hfsdp and self.over_inner.gathers_each_use:
            raise ValueError(
                "keep_gathered=True is not supported with outer_dp_sharding_strategy='optim' (HFSDP), whose parameters "
                "are gathered over outer and inner ranks one after the other. Use 'no_shard' for outer ranks (HSDP), "
                "or leave keep_gathered out."
            )
        return replace(self, accumulation=accumulation)

    @functools.cached_property
    def over_inner(self) -> Placements:
        """What inner ranks share."""
        return self.strategy.placements

    @functools.cached_property
    def over_outer(self) -> Placements:
        """What outer ranks share. Without any, it does not matter."""
        return self.outer_strategy.placements

    @functools.cached_property
    def is_hfsdp(self) -> bool:
        """Whether main weights are sharded over outer ranks, too."""
        return self.outer is not None and self.over_outer.shards

    # -- parameters, gradients and optimizer state at rest ------------------------------------------------------------

    @functools.cached_property
    def shards(self) -> int:
        """Number of shards that a bucket is cut into, at rest."""
        if not self.over_inner.shards:
            return 1
        return self.every.size if self.is_hfsdp else self.inner.size

    @functools.cached_property
    def shard(self) -> int:
        """Number of the shard that this rank holds.

        With HFSDP, inner ranks come first, so that the shards of the outer ranks are adjacent in the inner shard that
        is gathered.
        """
        if not self.over_inner.shards:
            return 0
        if self.is_hfsdp:
            assert self.outer is not None
            return self.inner.rank * self.outer.size + self.outer.rank
        return self.inner.rank

    def placements(self, rows: compat.RowShard) -> tuple[Placement, ...]:
        """Return the placements of a DTensor over :attr:`mesh` of which this rank holds ``rows``."""
        inner: Placement = rows if self.over_inner.shards else Replicate()
        if self.outer is None:
            return (inner,)
        return (compat.EVERY_ROW if self.is_hfsdp else Replicate(), inner)

    @functools.cached_property
    def shard_groups(self) -> tuple[Group, ...]:
        """Groups to gather over, one after the other, to assemble the shards."""
        if not self.over_inner.shards:
            return ()
        groups = (self.outer, self.inner) if self.is_hfsdp else (self.inner,)
        return tuple(group for group in groups if group is not None and group.size > 1)

    @functools.cached_property
    def replicas(self) -> Group | None:
        """Ranks that hold the same shard; None if no two do."""
        if not self.over_inner.shards:
            return self.every
        return None if self.is_hfsdp or self.outer is None or self.outer.size == 1 else self.outer

    @functools.cached_property
    def is_alone(self) -> bool:
        """Whether this rank shares its parameters with no other one, and leaves out collectives.

        With full sharding, they are used from the shard, and their gradients accumulate in it, without collectives.
        """
        return self.skips_itself and self.every.size == 1

    # -- parameters in use --------------------------------------------------------------------------------------------

    @functools.cached_property
    def resident_groups(self) -> tuple[Group, ...]:
        """Groups to gather over, one after the other, once after each change of the shards. Empty: only shards stay
        between uses."""
        outer = (self.outer,) if self.outer is not None and self.is_hfsdp else ()
        if self.over_inner.gathers_once or self.releases_resident:
            return (*outer, self.inner_gathers or self.inner)
        return outer

    @functools.cached_property
    def releases_resident(self) -> bool:
        """Whether tensors that stay gathered between uses are released at the end of each step."""
        return self.over_inner.gathers_each_use and self.accumulation.keeps_gathered

    @functools.cached_property
    def gather_group(self) -> Group | None:
        """Group to gather over at each use."""
        if not self.over_inner.gathers_each_use or self.releases_resident or self.is_alone:
            return None
        return self.inner_gathers or self.inner

    @functools.cached_property
    def gathers_shards(self) -> bool:
        """Whether what is gathered at each use are shards, and not residents: full sharding without HFSDP."""
        return self.over_inner.gathers_each_use and not self.is_hfsdp and not self.is_alone

    def portions_of(self, reshard: bool | int | None, asked: str) -> bool | int | None:
        """Return what ``reshard_after_forward`` means for these ranks: a number of all ranks is True, and 1 is False.

        Args:
            asked: Who asked for it, for messages.

        Raises:
            ValueError: A number means nothing here, or does not divide the ranks.
        """
        if reshard is None or isinstance(reshard, bool):
            return reshard
        group = self.gather_group
        if group is None:
            raise ValueError(
                f"{asked} is {reshard}, but with {self} parameters are not gathered at each use, so the backward "
                "gathers nothing. Take it out, or shard parameters too (zero_dp_strategy='optim_grads_params')."
            )
        if group.size % reshard:
            divisors = [n for n in range(1, group.size + 1) if group.size % n == 0]
            raise ValueError(
                f"{asked} is {reshard}, but parameters are sharded over {group.size} ranks, which cannot be divided "
                f"into groups of {reshard}. Numbers that divide them: {', '.join(map(str, divisors))}."
            )
        return {1: False, group.size: True}.get(reshard, reshard)

    def make_portions(self, size: int) -> None:
        """Create the process group of ``size`` neighbors; ``size`` divides :attr:`gather_group`'s.

        Every rank must call this.
        """
        gathers = self.gather_group
        assert gathers is not None
        start = gathers.rank // size * size
        ranks = dist.get_process_group_ranks(compat.process_group(gathers.name))[start : start + size]
        self.portions[size] = Group.of(compat.new_group_like(gathers.name, ranks))

    # -- gradients ----------------------------------------------------------------------------------------------------

    def has_levels_of(self, size: int) -> bool:
        """Whether groups of ``size`` neighbors part the ranks that gradients are scattered over."""
        return self.over_inner.shards and 1 < size < self.inner.size and self.inner.size % size == 0

    def make_levels(self, size: int) -> None:
        """Create the process groups in which ``size`` neighbors, and their peers, sum gradients; ``size`` divides the
        ranks.

        Every rank must call this.
        """
        base = self.reductions or self.inner
        ranks, first = dist.get_process_group_ranks(compat.process_group(base.name)), base.rank // size * size
        groups = ranks[first : first + size], ranks[base.rank % size :: size]
        neighbors, peers = (Group.of(compat.new_group_like(base.name, each)) for each in groups)
        self.levels[size] = neighbors, peers

    # -- process groups -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[Group]:
        """Each group once, :attr:`every` last. With one dimension, :attr:`every` is :attr:`inner`."""
        levels = (group for pair in self.levels.values() for group in pair)
        others = (self.inner, self.inner_gathers, self.reductions, self.outer, *self.portions.values(), *levels)
        return [group for group in others if group is not None and group != self.every] + [self.every]

    @property
    def mesh_groups(self) -> list[Group]:
        """Groups of the dimensions of :attr:`mesh`."""
        return [self.inner] if self.outer is None else [self.outer, self.inner]

    @property
    def group_names(self) -> list[str]:
        return [group.name for group in self.groups]

    def renew(self) -> dist.ProcessGroup:
        """Create new process groups of the same ranks. Every rank must call this.

        They replace groups that cannot be used any more, because a collective timed out or ranks disagree on which is
        next. The old groups belong to the user and are left alone.

        Returns:
            The new process group of :attr:`every`.
        """
        self.portions.clear()  # some ranks may not have created one yet; recompiled graphs request it again
        for group in self.groups:
            made = compat.new_group_like(group.name)
            group.name = made.group_name
        return made  # ``every`` is the last

    def __str__(self) -> str:
        name = self.strategy.name.lower()
        if self.outer is None:
            return f"{name} over {self.inner.size} ranks"
        return f"{'HFSDP' if self.is_hfsdp else 'HSDP'}, {name} over {self.outer.size} x {self.inner.size} ranks"
