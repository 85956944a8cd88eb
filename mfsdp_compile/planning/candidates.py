"""Ways to shard a model over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mfsdp_compile.passes.guests.solver.hardware import Hardware
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.geometry.topology import Accumulation, Group, Topology
from mfsdp_compile.runtime.plan.experts import ExpertPlacement, is_expert

from .workloads import UNDIVIDED, Degrees


@dataclass(frozen=True)
class Candidate:
    """A way to shard a model over a number of ranks.

    Args:
        strategy: Strategy over the inner ranks.
        inner, outer: Numbers of ranks. ``outer`` > 1 is HSDP.
        outer_shards: Whether outer ranks shard the optimizer state further (HFSDP).
        degrees: Other parallelism. Context-parallel ranks are neighbors among the inner ranks. Tensor-parallel ranks
            are neighbors, and the stages of a pipeline are far apart; both multiply the number of ranks. Of a stage's
            ranks with the same outer number, ``inner * tensor``, neighbors hold different parts of the experts, which
            are sharded over those that hold the same ones.
        keep_gathered: Whether a pipeline gathers parameters once per step, and keeps them gathered.
        sums_within: Inner ranks that sum gradients first, if they are summed in the order of ranks, in two levels.

    Raises:
        ValueError: If the degrees do not divide the inner ranks, or the strategy does not support an argument.
    """

    strategy: ShardingStrategy
    inner: int
    outer: int = 1
    outer_shards: bool = False
    degrees: Degrees = UNDIVIDED
    keep_gathered: bool = False
    sums_within: int = 0

    def __post_init__(self) -> None:
        if self.inner % self.degrees.context:
            raise ValueError(f"{self.degrees.context} context-parallel ranks do not divide {self.inner} inner ranks")
        if self.inner * self.degrees.tensor % self.degrees.experts_apart:
            raise ValueError(
                f"{self.degrees.experts_apart} ranks with different experts do not divide "
                f"{self.inner * self.degrees.tensor} inner and tensor-parallel ranks"
            )
        if self.keep_gathered and (self.degrees.pipeline == 1 or self.outer_shards or self.strategy != 3):
            raise ValueError("keep_gathered is only for pipelines with sharded parameters, without HFSDP")

    @property
    def world(self) -> int:
        return self.inner * self.outer * self.degrees.tensor * self.degrees.pipeline

    def topology(self, portions: int = 0) -> Topology:
        """Return the ranks as passes see them. Inner ranks are neighbors.

        Args:
            portions: Number of ranks that backwards gather over, if this way to shard supports it.
        """
        return self._topology(self.inner, self.degrees.tensor, portions)

    def experts(self, portions: int = 0) -> ExpertPlacement | None:
        """Return the ranks that share experts; None if they are those that share everything else."""
        apart = self.degrees.experts_apart
        if apart == self.degrees.tensor == 1:
            return None
        mesh: Any = None
        topology = self._topology(self.inner * self.degrees.tensor // apart, apart, portions)
        return ExpertPlacement(mesh, replace(topology, skips_itself=True), is_expert, True)

    def _topology(self, size: int, step: int, portions: int) -> Topology:
        """Return the topology of every ``step``-th rank, of which ``size`` are inner ones."""
        inner = Group("inner", size, 0, step)
        outer = Group("outer", self.outer, 0, self.inner * self.degrees.tensor) if self.outer > 1 else None
        every = Group("every", size * self.outer, 0, step) if outer is not None else inner
        outer_strategy = ShardingStrategy.OPTIM if self.outer_shards else ShardingStrategy.NO_SHARD
        mesh: Any = None
        topology = Topology(mesh, self.strategy, outer_strategy, inner, outer, every)
        if topology.gather_group is not None and 1 < portions < size and size % portions == 0:
            topology.portions[portions] = Group("portions", portions, 0, step)
        if (near := self.sums_within) and size == self.inner:
            topology.levels[near] = Group("neighbors", near, 0, step), Group("peers", size // near, 0, step * near)
        if self.degrees.pipeline > 1:
            return topology.accumulating(Accumulation(True, self.keep_gathered, forwards_overlap=True))
        return topology

    def __str__(self) -> str:
        names = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
        name = names[int(self.strategy)]
        divided = f", {self.degrees}" if str(self.degrees) else ""
        divided += " kept" if self.keep_gathered else ""
        divided += f", sums within {self.sums_within}" if self.sums_within else ""
        if self.outer == 1:
            return f"{name}{divided}"
        kind = "HFSDP" if self.outer_shards else "HSDP"
        return f"{kind} {self.outer} x {self.inner}{'' if self.strategy == 3 else f', {name}'}{divided}"


def candidates(world: int, hardware: Hardware, degrees: Degrees = UNDIVIDED) -> Iterator[Candidate]:
    """Yield ways to shard over ``world`` ranks whose numbers divide the model.

    These are each strategy over all ranks, and HSDP and HFSDP with inner groups from one node upwards.
    """
    ranks, left = divmod(world, degrees.tensor * degrees.pipeline)
    if left or not ranks:
        return
    for strategy in (ShardingStrategy.OPTIM, ShardingStrategy.OPTIM_GRADS, ShardingStrategy.OPTIM_GRADS_PARAMS):
        yield from _possible(strategy, ranks, 1, False, degrees)
    inner = max(1, hardware.ranks_per_node // degrees.tensor)
    while inner < ranks:
        if inner > 1 and ranks % inner == 0:
            for outer_shards in (False, True):
                sharding = ShardingStrategy.OPTIM_GRADS_PARAMS
                yield from _possible(sharding, inner, ranks // inner, outer_shards, degrees)
        inner *= 8


def in_levels(candidate: Candidate, hardware: Hardware) -> Iterator[Candidate]:
    """Yield a candidate, and the same with sums first over the inner ranks of a node, if these are on several nodes."""
    yield candidate
    near = hardware.ranks_per_node // candidate.degrees.tensor
    if candidate.topology().has_levels_of(near):
        yield replace(candidate, sums_within=near)


def _possible(
    strategy: ShardingStrategy, inner: int, outer: int, outer_shards: bool, degrees: Degrees
) -> Iterator[Candidate]:
    if inner * degrees.tensor % degrees.experts_apart or inner % degrees.context:
        return
    if degrees.pipeline > 1 and strategy is ShardingStrategy.OPTIM_GRADS:
        return  # gradients stay unsharded until a step's last microbatch, as in ZeRO-1
    yield Candidate(strategy, inner, outer, outer_shards, degrees)
    if degrees.pipeline > 1 and strategy is ShardingStrategy.OPTIM_GRADS_PARAMS and not outer_shards:
        yield Candidate(strategy, inner, outer, outer_shards, degrees, keep_gathered=True)
