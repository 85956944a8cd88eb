"""Strategies, meshes and numbers of ranks, tried on paper.

A model is traced once (:mod:`.tracing`); everything else is arithmetic in closed form: layouts, collectives, a schedule within
the memory budget, and its simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mfsdp_compile.backend import bucket_info
from mfsdp_compile.options import OPTIMIZERS
from mfsdp_compile.passes.arrange import PHASES, Plan
from mfsdp_compile.passes.context import BucketInfo, Context, SchedulePolicy
from mfsdp_compile.passes.costs import CostModel, Ring, collective_seconds
from mfsdp_compile.passes.decisions import Decisions
from mfsdp_compile.passes.hardware import Hardware
from mfsdp_compile.passes.outline import Gradients, Outline, Use
from mfsdp_compile.passes.simulate import OptimizerCost, Timeline, resting_memory, simulate
from mfsdp_compile.passes.solve import BudgetError, explained, solve
from mfsdp_compile.policy import MixedPrecisionPolicy, ShardingStrategy
from mfsdp_compile.runtime.experts import Experts, is_expert
from mfsdp_compile.runtime.layout import LayoutPolicy
from mfsdp_compile.runtime.model import BucketPlanner, GradientPolicy, Precision
from mfsdp_compile.runtime.topology import Group, Topology

from .shapes import Workload
from .tracing import Trace, trace

__all__ = [
    "Candidate",
    "Forecast",
    "Job",
    "Planned",
    "bucket_sizes",
    "candidates",
    "knee_bytes",
    "plan",
    "planned",
    "problem_of",
]


@dataclass(frozen=True)
class Candidate:
    """A way to shard over some ranks.

    Args:
        strategy: over the inner ranks.
        inner, outer: numbers of ranks; ``outer`` > 1 is HSDP.
        outer_shards: whether outer ranks divide the optimizer's state further: HFSDP.
        expert_parallel: neighbours among the inner ranks that divide experts; experts are sharded over the inner ranks that
            hold the same.

    Raises:
        ValueError: so many ranks do not divide the inner ones.
    """

    strategy: ShardingStrategy
    inner: int
    outer: int = 1
    outer_shards: bool = False
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        if self.inner % self.expert_parallel:
            raise ValueError(f"{self.expert_parallel} expert-parallel ranks do not divide {self.inner} inner ranks")

    @property
    def world(self) -> int:
        return self.inner * self.outer

    def topology(self) -> Topology:
        """The ranks as passes know them: inner ranks are neighbours."""
        return self._topology(1)

    def experts(self) -> Experts | None:
        """The ranks that share experts; None: all of them do."""
        if self.expert_parallel == 1:
            return None
        mesh: Any = None
        return Experts(mesh, self._topology(self.expert_parallel), is_expert, True, None)

    def _topology(self, apart: int) -> Topology:
        """Over every ``apart``-th of the ranks."""
        inner = Group("inner", self.inner // apart, 0, apart)
        outer = Group("outer", self.outer, 0, self.inner) if self.outer > 1 else None
        every = Group("every", self.world // apart, 0, apart) if outer is not None else inner
        outer_strategy = ShardingStrategy.OPTIM if self.outer_shards else ShardingStrategy.NO_SHARD
        mesh: Any = None
        return Topology(mesh, self.strategy, outer_strategy, inner, outer, every)

    def __str__(self) -> str:
        names = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
        name = names[int(self.strategy)]
        experts = f", EP {self.expert_parallel}" if self.expert_parallel > 1 else ""
        if self.outer == 1:
            return f"{name}{experts}"
        kind = "HFSDP" if self.outer_shards else "HSDP"
        return f"{kind} {self.outer} x {self.inner}{'' if self.strategy == 3 else f', {name}'}{experts}"


@dataclass(frozen=True)
class Job:
    """What is planned for.

    Args:
        work: the model and one rank's batch.
        hardware: of the machines.
        budget: bytes of a rank's memory; None: the device's, but for a reserve.
        optimizer: whose state is in memory.
        precision: dtypes of shards and gradients.
        prefetch, reshard: fixed parts of the schedule; None: as is best.
        fused: whether the inner compiler fuses kernels.
        overlap: whether gathers, and reductions, may run while the model computes.
        solved: False: the schedule that a model has without a budget, each gather one unit ahead.
        bucket_bytes: units that are larger are parted into several buckets; see
            :func:`~mfsdp_compile.fully_shard_model`. None: a unit is one bucket.
    """

    work: Workload
    hardware: Hardware
    budget: int | None = None
    optimizer: OptimizerCost = OPTIMIZERS["adamw"]
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    prefetch: int | None = None
    reshard: bool | None = None
    fused: bool = True
    overlap: tuple[bool, bool] = (True, True)
    solved: bool = True
    bucket_bytes: int | None = None

    @property
    def usable(self) -> int:
        """Bytes that schedules are made for."""
        reserve = SchedulePolicy().budget_reserve if self.budget is not None else DEVICE_RESERVE
        return int((self.budget or self.hardware.memory_bytes) * (1 - reserve))


DEVICE_RESERVE = 0.08
"""Of a device's memory: the CUDA context, NCCL's buffers, fragmentation. 6 GiB of an H100."""


@dataclass(frozen=True)
class Planned:
    """What comes of a candidate.

    Args:
        candidate: the way to shard.
        context: buckets on these ranks.
        timeline: of a step of one rank; None if it does not fit.
        decisions: about the schedule; None if it does not fit.
        needed: bytes at the peak; of the smallest schedule if it does not fit.
        refusal: why it does not fit.
    """

    candidate: Candidate
    context: Context
    timeline: Timeline | None
    decisions: Decisions | None
    needed: int
    refusal: str = ""

    @property
    def fits(self) -> bool:
        return self.timeline is not None


@dataclass(frozen=True)
class Forecast:
    """A plan.

    Args:
        job: what was planned for.
        rows: of the candidates.
        best: the fastest that fits, by tokens per second and rank; None if none does.
        smallest_world: ranks of the smallest job that fits, a power of two times a node; None if not even the largest does.
        traces: of the model, by numbers of expert-parallel ranks.
    """

    job: Job
    rows: Sequence[Planned]
    best: Planned | None
    smallest_world: int | None
    traces: Mapping[int, Trace]

    @property
    def traced(self) -> Trace:
        """The model, as the best plan has it on a rank."""
        return self.trace_of(self.best) if self.best is not None else next(iter(self.traces.values()))

    def trace_of(self, row: Planned) -> Trace:
        """The model, as a plan has it on a rank."""
        return self.traces[row.candidate.expert_parallel]

    def tokens_per_second(self, row: Planned) -> float:
        """Of one rank."""
        return self.traced.tokens / row.timeline.seconds if row.timeline is not None else 0.0

    def mfu(self, row: Planned) -> float:
        """Model floating-point operations utilisation: of three times the forward's matrix products and attention, masked
        parts of attention not counted, and nothing that is computed again."""
        if row.timeline is None:
            return 0.0
        dtype = str(self.job.work.dtype).removeprefix("torch.")
        return 3 * self.trace_of(row).forward_flops / row.timeline.seconds / self.job.hardware.flops_of(dtype)


def bucket_sizes(job: Job, traced: Trace, candidate: Candidate) -> list[tuple[int | None, Planned]]:
    """What comes of parting units into smaller buckets: of halves, quarters and so on of the largest one, as long as they are
    above the knee of the network (:func:`knee_bytes`).

    Args:
        traced: with ``parts``.

    Returns:
        bytes that a bucket has at most, and the plan; the first one is without.
    """
    whole = planned(replace(job, bucket_bytes=None), traced, candidate)
    rows: list[tuple[int | None, Planned]] = [(None, whole)]
    most = max(info.gathered_bytes for info in whole.context.buckets) // 2
    while most >= knee_bytes(candidate, job.hardware) and len(rows) <= _HALVINGS:
        rows.append((most, planned(replace(job, bucket_bytes=most), traced, candidate)))
        most //= 2
    return rows


_HALVINGS = 4


def knee_bytes(candidate: Candidate, hardware: Hardware) -> int:
    """Bytes that a gather must have to reach nine tenths of the network's bandwidth: below the knee, merge units; far above
    it, parting them costs little."""
    ring = Ring(candidate.inner)
    fixed = collective_seconds("all_gather", 0, ring, hardware)
    by_byte = (collective_seconds("all_gather", 1 << 30, ring, hardware) - fixed) / (1 << 30)
    return int(9 * fixed / by_byte)


MAX_WORLD = 65_536


def candidates(world: int, hardware: Hardware, expert_parallel: int = 1) -> Iterator[Candidate]:
    """Ways to shard over ``world`` ranks: each strategy over all of them, and HSDP and HFSDP with inner groups from one node
    upwards; those that so many expert-parallel ranks divide."""
    if world % expert_parallel == 0:
        for strategy in (ShardingStrategy.OPTIM, ShardingStrategy.OPTIM_GRADS, ShardingStrategy.OPTIM_GRADS_PARAMS):
            yield Candidate(strategy, world, expert_parallel=expert_parallel)
    inner = hardware.ranks_per_node
    while inner < world:
        if world % inner == 0 and inner % expert_parallel == 0:
            for outer_shards in (False, True):
                sharding = ShardingStrategy.OPTIM_GRADS_PARAMS
                yield Candidate(sharding, inner, world // inner, outer_shards, expert_parallel)
        inner *= 8


def plan(
    job: Job,
    worlds: Sequence[int],
    chosen: Sequence[Candidate] | None = None,
    *,
    parts: bool = False,
    expert_parallel: Sequence[int] = (1,),
) -> Forecast:
    """Plan a job.

    Args:
        job: what is planned for.
        worlds: numbers of ranks to try.
        chosen: ways to shard; None: see :func:`candidates`.
        parts: trace so that :func:`bucket_sizes` can be asked afterwards.
        expert_parallel: numbers of ranks that divide the model's experts, to try each; of ``chosen`` that is known.

    Raises:
        ValueError: a number of ranks is below 1, none of them can be divided by the expert-parallel ones, or the model's
            experts cannot.
        RuntimeError: the model cannot be traced; see :func:`.tracing.trace`.
    """
    if not worlds or min(worlds) < 1:
        raise ValueError(f"world sizes must be at least 1, got {list(worlds)}")
    if min(expert_parallel) < 1:
        raise ValueError(f"expert-parallel ranks must be at least 1, got {list(expert_parallel)}")
    tried = chosen or [
        candidate for world in worlds for size in expert_parallel for candidate in candidates(world, job.hardware, size)
    ]
    if not tried:
        raise ValueError(f"{list(expert_parallel)} expert-parallel ranks do not divide {list(worlds)} ranks")
    sizes = dict.fromkeys(candidate.expert_parallel for candidate in tried)
    parts = parts or job.bucket_bytes is not None
    traces = {size: trace(job.work, job.hardware, job.fused, parts=parts, expert_parallel=size) for size in sizes}
    rows = [planned(job, traces[candidate.expert_parallel], candidate) for candidate in tried]
    fitting = [row for row in rows if row.timeline is not None]
    best = min(fitting, key=_preference, default=None)
    smallest = [found for size, traced in traces.items() if (found := _smallest_world(job, traced, size)) is not None]
    return Forecast(job, rows, best, min(smallest, default=None), traces)


def _preference(row: Planned) -> tuple[float, float, int]:
    """Fast; of those within a thousandth of the same time, the one that communicates least, then that takes least memory."""
    assert row.timeline is not None
    sent = sum(exposure.seconds for exposure in row.timeline.exposures)
    return float(f"{row.timeline.seconds:.3g}"), sent, row.timeline.peak_bytes


def planned(job: Job, traced: Trace, candidate: Candidate, *, details: bool = False) -> Planned:
    """What comes of one way to shard.

    Args:
        details: spans and memory over time too.
    """
    problem = problem_of(job, traced, candidate)
    if job.solved:
        try:
            solution = solve(
                problem, job.optimizer, job.usable, prefetch=job.prefetch, reshard=job.reshard, bounds=_BOUNDS
            )
        except BudgetError as error:
            return Planned(candidate, problem.context, None, None, error.needed, str(error))
        decisions, timeline = solution.decisions, solution.timeline
    else:
        decisions = problem.decisions_by_policy()
        timeline = simulated(job, problem, decisions, details=False)
        if timeline.peak_bytes > job.usable:
            return Planned(candidate, problem.context, None, None, timeline.peak_bytes, "its peak is above the budget")
    if details:
        timeline = explained(simulated(job, problem, decisions, details=True), decisions, PHASES)
    return Planned(candidate, problem.context, timeline, decisions, timeline.peak_bytes)


def simulated(job: Job, problem: Plan, decisions: Decisions, details: bool) -> Timeline:
    """A step of one rank, scheduled as was decided."""
    resting = resting_memory(problem.context.buckets, job.optimizer, problem.context.other_bytes)
    return simulate(problem.events(decisions), problem.context, problem.costs, resting, job.optimizer, details=details)


_BOUNDS = 3
"""Memory bounds that are tried for a row of the table: fewer than when a model is compiled, as there are many rows."""


def _smallest_world(job: Job, traced: Trace, expert_parallel: int) -> int | None:
    """By memory alone, with parameters sharded over all ranks."""
    world = expert_parallel
    while world <= MAX_WORLD:
        candidate = Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, world, expert_parallel=expert_parallel)
        problem = problem_of(job, traced, candidate)
        try:
            solve(problem, job.optimizer, job.usable, prefetch=0, reshard=True, bounds=0)
        except BudgetError:
            world *= 2
            continue
        return world
    return None


# -- a model on other ranks -------------------------------------------------------------------------------------------


def problem_of(job: Job, traced: Trace, candidate: Candidate) -> Plan:
    """The traced model, its buckets laid out for a candidate's ranks."""
    topology = candidate.topology()
    precision = Precision(
        job.precision.main_params_dtype, job.precision.main_grads_dtype, job.precision.grad_comm_dtype
    )
    layout = LayoutPolicy(bucket_bytes=job.bucket_bytes)
    planner = BucketPlanner(topology, precision, GradientPolicy(), layout, frozenset(), candidate.experts())
    infos_like = {
        name: [bucket_info(found, planner.topology_of(found.is_expert)) for found in planner.unit(unit)]
        for name, unit in traced.units.items()
    }
    infos: list[BucketInfo] = []
    sources: list[list[int]] = []  # of each bucket: which buckets were traced in its place
    unit_buckets: dict[str, list[int]] = {}
    like: dict[str, str] = {}
    for number, bucket in enumerate(traced.buckets):
        unit_buckets.setdefault(bucket.unit, []).append(number)
        like[bucket.unit] = bucket.like
    for unit in sorted(unit_buckets, key=traced.order.index):
        own = infos_like[like[unit]]
        for position, info in enumerate(own):
            names = {slot.name for slot in info.layout.slots}
            name = unit if len(own) == 1 else f"{unit}#{position}"
            infos.append(replace(info, name=name, unit=unit))
            sources.append([n for n in unit_buckets[unit] if traced.buckets[n].parameters & names])
    policy = SchedulePolicy(memory_budget=job.usable, prefetch="auto", reshard_after_forward="auto")
    context = Context(tuple(infos), policy, True, overlap=job.overlap, other_bytes=traced.buffer_bytes)
    outlines = {phase: _on_ranks(outline, infos, sources) for phase, outline in traced.outlines.items()}
    return Plan(outlines, context, CostModel(job.hardware, job.fused))


def _on_ranks(outline: Outline, infos: Sequence[BucketInfo], sources: Sequence[Sequence[int]]) -> Outline:
    """The outline with other buckets: each is used from the first use of what was traced in its place to the last."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for use in outline.uses:
        for bucket, end in zip(use.buckets, use.last, strict=True):
            first[bucket], last[bucket] = use.first, end
    gradients = {g.bucket: g for g in outline.gradients}
    uses: list[Use] = []
    wholes: dict[int, tuple[int, int]] = {}
    reduced: list[Gradients] = []
    for number, (info, traced) in enumerate(zip(infos, sources, strict=True)):
        if used := [bucket for bucket in traced if bucket in first]:
            begin, end = min(first[b] for b in used), max(last[b] for b in used)
            if info.exchange.gather_group:
                previous = uses[-1] if uses else None
                if previous is not None and infos[previous.buckets[0]].unit == info.unit and previous.first == begin:
                    uses[-1] = Use((*previous.buckets, number), begin, (*previous.last, end))
                else:
                    uses.append(Use((number,), begin, (end,)))
            elif info.main_dtype != info.exchange.dtype and not info.has_resident:
                wholes[number] = (begin, end)
        if computed := [gradients[bucket] for bucket in traced if bucket in gradients]:
            begins = [g.begin for g in computed if g.begin is not None]
            reduced.append(
                Gradients(
                    number,
                    min(begins) if begins else None,
                    max(g.ready for g in computed),
                    0 if begins else info.layout.numel * info.exchange.dtype.itemsize,
                )
            )
    return replace(
        outline,
        uses=tuple(sorted(uses, key=lambda use: use.first)),
        wholes=wholes,
        gradients=tuple(sorted(reduced, key=lambda g: g.ready)),
    )
