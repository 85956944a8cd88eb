"""Planning: evaluates strategies, meshes and numbers of ranks without running them.

A model is traced once (:mod:`.trace_model`). Everything else is closed-form arithmetic: layouts, collectives, a schedule
within the memory budget, and its simulation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import nn

from mfsdp_compile.backend.compile import bucket_info
from mfsdp_compile.backend.options import OPTIMIZERS
from mfsdp_compile.passes.context import BucketInfo, Context, SchedulePolicy
from mfsdp_compile.passes.decisions import Decisions
from mfsdp_compile.passes.phase import Phase
from mfsdp_compile.passes.solver.costs import CostModel, Ring, collective_seconds
from mfsdp_compile.passes.solver.hardware import Hardware
from mfsdp_compile.passes.solver.outline import Gradients, Outline, grouped
from mfsdp_compile.passes.solver.simulate import OptimizerCost, Timeline, simulate
from mfsdp_compile.passes.solver.solve import BudgetError, Solution, explained, gib, solve
from mfsdp_compile.passes.solver.step_events import PHASES, StepOutlines
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.bucket_plan import Site
from mfsdp_compile.runtime.geometry.exchange import Overlap, buffer_bytes
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.geometry.topology import Accumulation, Group, Topology
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy, assign_all
from mfsdp_compile.runtime.memory.comm_buffers import Sizes as SizesOf
from mfsdp_compile.runtime.plan.buckets import BucketPlanner
from mfsdp_compile.runtime.plan.experts import ExpertPlacement, is_expert
from mfsdp_compile.runtime.plan.precision import GradientPolicy, MixedPrecisionPolicy, Policies
from mfsdp_compile.runtime.plan.precision_plan import PrecisionPlan
from mfsdp_compile.runtime.plan.units import Unit, group_by_size, joined_name

from . import offloading, one_f_one_b, published
from .offloading import EVERY, NOTHING, OffloadedUnits
from .trace_model import Trace, trace
from .workloads import UNDIVIDED, Degrees, Workload

__all__ = [
    "Candidate",
    "Forecast",
    "Job",
    "Planned",
    "Sizes",
    "best_size",
    "candidates",
    "knee_bytes",
    "plan",
    "planned",
    "problem_of",
    "sizes",
    "traced_stages",
]


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

    Raises:
        ValueError: If the degrees do not divide the inner ranks, or the strategy does not support an argument.
    """

    strategy: ShardingStrategy
    inner: int
    outer: int = 1
    outer_shards: bool = False
    degrees: Degrees = UNDIVIDED
    keep_gathered: bool = False

    def __post_init__(self) -> None:
        if self.inner % self.degrees.context:
            raise ValueError(f"{self.degrees.context} context-parallel ranks do not divide {self.inner} inner ranks")
        if self.inner * self.degrees.tensor % self.degrees.experts_apart:
            raise ValueError(
                f"{self.degrees.experts_apart} ranks with different experts do not divide {self.inner * self.degrees.tensor} "
                "inner and tensor-parallel ranks"
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
        if self.degrees.pipeline > 1:
            return topology.accumulating(Accumulation(True, self.keep_gathered, forwards_overlap=True))
        return topology

    def __str__(self) -> str:
        names = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
        name = names[int(self.strategy)]
        divided = f", {self.degrees}" if str(self.degrees) else ""
        divided += " kept" if self.keep_gathered else ""
        if self.outer == 1:
            return f"{name}{divided}"
        kind = "HFSDP" if self.outer_shards else "HSDP"
        return f"{kind} {self.outer} x {self.inner}{'' if self.strategy == 3 else f', {name}'}{divided}"


@dataclass(frozen=True)
class Job:
    """What to plan for.

    Args:
        work: The model and one rank's batch.
        hardware: Hardware of the machines.
        budget: Bytes that a rank's tensors may take. None: the device's memory, except for ``reserve``.
        optimizer: The optimizer whose state and step are counted.
        precision: Dtypes of shards and gradients. ``param_dtype`` is the workload's.
        prefetch, reshard: Fixed values for the options ``prefetch`` and ``reshard_after_forward``. None: the planner
            chooses. A number of ranks to reshard over means True for candidates whose ranks it does not divide.
        fused: Whether the inner compiler fuses kernels. False: every operator by itself, without regions. (With
            ``"aot_eager"``, these hold one more gathered bucket: the graph keeps their operands until they return.)
        overlap: Kinds of collectives that may overlap with computation.
        solved: Use the solver. False: the schedule of a model without a budget, with each gather one unit ahead.
        bucket_bytes: Split larger units into several buckets; see :func:`~mfsdp_compile.fully_shard_model`. None: one
            bucket per unit.
        unit_bytes: Join smaller neighboring units up to this size; see :func:`~mfsdp_compile.fully_shard_model`. None:
            units are not joined.
        by_module: Gather the modules of a unit one by one: ``enable_fine_grained_param_gather``.
        by_parameter: One bucket per parameter: ``disable_bucketing``.
        buffers: Which buckets use communication buffers: ``fsdp_double_buffer``, ``maxpool_double_buffer``.
        microbatches: Microbatches per step of a pipeline, each with the workload's batch. None: four times the number
            of stages. Without a pipeline, a step has one.
        offload: Units in host memory. ``"auto"``: as many as a way to shard needs to fit, or more if that is faster.
        reserve: Fraction of the device's memory that schedules leave free if there is no ``budget``. What does not fit
            so is planned again with the least reserve that was enough in a published run, and then *may not fit*; see
            :mod:`.published`.

    Raises:
        ValueError: If units are offloaded that are gathered quantized.
    """

    work: Workload
    hardware: Hardware
    budget: int | None = None
    optimizer: OptimizerCost = OPTIMIZERS["adamw"]
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    prefetch: int | None = None
    reshard: bool | int | None = None
    fused: bool = True
    overlap: Overlap = field(default_factory=Overlap)
    solved: bool = True
    bucket_bytes: int | None = None
    unit_bytes: int | None = None
    by_module: bool = False
    by_parameter: bool = False
    buffers: BufferPolicy = field(default_factory=BufferPolicy)
    microbatches: int | None = None
    offload: OffloadedUnits | Literal["auto"] = NOTHING
    reserve: float = published.MOST_RESERVED

    def __post_init__(self) -> None:
        if self.offload != NOTHING and self.precision.param_comm_dtype is not None:
            raise ValueError(
                "units in host memory cannot be gathered in float8 or float4, from a shard on the device: leave out --offload "
                "or --gather-fp8 (--gather-fp4)"
            )

    def microbatches_of(self, candidate: Candidate) -> int:
        """Return the number of microbatches in a step.

        Raises:
            ValueError: If there are fewer microbatches than stages.
        """
        stages = candidate.degrees.pipeline
        if stages == 1:
            return 1
        count = self.microbatches if self.microbatches is not None else 4 * stages
        if count < stages:
            raise ValueError(f"a pipeline of {stages} stages takes at least {stages} microbatches, got {count}")
        return count

    @property
    def usable(self) -> int:
        """Bytes that schedules may use."""
        reserve = SchedulePolicy().budget_reserve if self.budget is not None else self.reserve
        return int((self.budget or self.hardware.memory_bytes) * (1 - reserve))

    @property
    def tightest(self) -> Job | None:
        """The same job with all memory that a published run could use. None if this one has it, or a ``budget``."""
        if self.budget is not None or self.reserve <= published.LEAST_RESERVED:
            return None
        return replace(self, reserve=published.LEAST_RESERVED)


@dataclass(frozen=True)
class Planned:
    """The plan for one candidate.

    Args:
        candidate: The way to shard.
        context: Buckets on these ranks.
        timeline: Timeline of one rank's step. None if it does not fit.
        decisions: Decisions about the schedule. None if it does not fit.
        needed: Bytes at the peak. If it does not fit, those of the smallest schedule.
        refusal: Why it does not fit.
        stage: Stage of a pipeline that these results describe, except for the step time; the one that needs most
            memory.
        idle: Seconds that this stage waits for other stages.
        offload: Units in host memory.
        is_close: Whether it needs more than the job's ``reserve`` leaves, and less than published runs could use.
    """

    candidate: Candidate
    context: Context
    timeline: Timeline | None
    decisions: Decisions | None
    needed: int
    refusal: str = ""
    stage: int = 0
    idle: float = 0.0
    offload: OffloadedUnits = NOTHING
    is_close: bool = False

    @property
    def fits(self) -> bool:
        return self.timeline is not None and not self.is_close

    @property
    def verdict(self) -> Literal["fits", "may not fit", "does not fit"]:
        if self.timeline is None:
            return "does not fit"
        return "may not fit" if self.is_close else "fits"

    @property
    def portion_size(self) -> int:
        """Number of ranks that the backward gathers portions over. 0: it gathers none."""
        return max(info.portion_size for info in self.context.buckets)


@dataclass(frozen=True)
class Forecast:
    """A plan for all candidates.

    Args:
        job: What was planned for.
        rows: The plan for each candidate.
        best: The fastest one that fits, by tokens per second and rank. If none does, the fastest that may not fit; None
            if there is none either.
        smallest_world: Number of ranks of the smallest job that fits, a power of two times the smallest possible
            number. None if not even the largest fits.
        traces: Traces of the model, or of the stages of a pipeline, by the degrees that divide it.
    """

    job: Job
    rows: Sequence[Planned]
    best: Planned | None
    smallest_world: int | None
    traces: Mapping[Degrees, Sequence[Trace]]

    @property
    def stages(self) -> Sequence[Trace]:
        """The model, or the stages of a pipeline, as the best plan divides it."""
        return self.traces[self.best.candidate.degrees] if self.best is not None else next(iter(self.traces.values()))

    def job_of(self, row: Planned) -> Job:
        """Return the job with the units that this plan offloads, and the memory that it was planned with."""
        job = self.job.tightest if row.is_close else None
        return replace(job or self.job, offload=row.offload)

    def trace_of(self, row: Planned) -> Trace:
        """Return the trace that a plan uses for one rank."""
        return self.traces[row.candidate.degrees][row.stage]

    def tokens_per_second(self, row: Planned) -> float:
        """Return tokens per second of one rank. Ranks that compute a batch together share its tokens."""
        if row.timeline is None:
            return 0.0
        return self.stages[0].tokens / row.timeline.seconds * _batches_per_rank(self.job, row.candidate)

    def mfu(self, row: Planned) -> float:
        """Return the model FLOPs utilization.

        Counts three times the forward's matrix products and attention. Masked parts of attention and recomputation do
        not count.
        """
        if row.timeline is None:
            return 0.0
        dtype = str(self.job.work.compute_dtype).removeprefix("torch.")
        stages, microbatches = self.traces[row.candidate.degrees], self.job.microbatches_of(row.candidate)
        flops = 3 * microbatches * sum(stage.forward_flops for stage in stages) / len(stages)
        return flops / row.timeline.seconds / self.job.hardware.flops_of(dtype)


def _batches_per_rank(job: Job, candidate: Candidate) -> float:
    """Return batches per rank in a step."""
    return job.microbatches_of(candidate) / candidate.degrees.together


@dataclass(frozen=True)
class Sizes:
    """The plan for given sizes of units and buckets.

    Args:
        unit_bytes, bucket_bytes: As in :class:`Job`.
        planned: The plan.
    """

    unit_bytes: int | None
    bucket_bytes: int | None
    planned: Planned


def sizes(job: Job, traced: Trace | Sequence[Trace], candidate: Candidate) -> list[Sizes]:
    """Plan with small units joined, and with large units split.

    If units are below the knee of the network (:func:`knee_bytes`), two, four and so on are joined, until they are
    above it. Units are split into buckets of a half, a quarter and so on of the largest one, as long as these are above
    the knee.

    Args:
        traced: Traced with ``parts``.

    Returns:
        First the plan without either, then with growing units, then with shrinking buckets.
    """
    job = replace(job, unit_bytes=None, bucket_bytes=None)
    knee = knee_bytes(candidate, job.hardware)
    rows = [Sizes(None, None, planned(job, traced, candidate))]
    runs = [run for stage in _stages(traced) for run in stage.neighbors]
    small = max((size for run in runs for size in run.values() if size < knee), default=0)
    longest = max((sum(run.values()) for run in runs), default=0)
    together = small
    for _ in range(_DOUBLINGS if small else 0):
        if together >= min(knee, longest):
            break
        together *= 2
        least = together - small // 2  # one neighbor fewer does not reach it
        rows.append(Sizes(least, None, planned(replace(job, unit_bytes=least), traced, candidate)))
    most = max(info.gathered_bytes for info in rows[0].planned.context.buckets) // 2
    for _ in range(_HALVINGS):
        if most < knee:
            break
        rows.append(Sizes(None, most, planned(replace(job, bucket_bytes=most), traced, candidate)))
        most //= 2
    return rows


_DOUBLINGS = _HALVINGS = 4


def best_size(rows: Sequence[Sizes]) -> Sizes | None:
    """Return the sizes with the fastest step, of those that fit if any do. Ties go to the least communication, then to
    the least memory."""
    possible = (row for row in rows if row.planned.timeline is not None)
    return min(possible, key=lambda row: _preference(row.planned, 1.0), default=None)


def knee_bytes(candidate: Candidate, hardware: Hardware) -> int:
    """Return the bytes from which on a gather reaches nine tenths of the network's bandwidth.

    Units below this knee are better joined. Far above it, splitting them costs little.
    """
    ring = Ring(candidate.inner)
    fixed = collective_seconds("all_gather", 0, ring, hardware)
    by_byte = (collective_seconds("all_gather", 1 << 30, ring, hardware) - fixed) / (1 << 30)
    return int(9 * fixed / by_byte)


MAX_WORLD = 65_536


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


def plan(
    job: Job,
    worlds: Sequence[int],
    chosen: Sequence[Candidate] | None = None,
    *,
    parts: bool = False,
    degrees: Sequence[Degrees] = (UNDIVIDED,),
) -> Forecast:
    """Plan a job.

    Args:
        job: What to plan for.
        worlds: Numbers of ranks to try.
        chosen: Ways to shard. None: see :func:`candidates`.
        parts: Trace in the way that :func:`sizes` needs.
        degrees: Numbers of ranks that divide the model in other ways; each is tried. ``chosen`` candidates have their
            own.

    Raises:
        ValueError: If a number of ranks is below 1, none can be divided like that, or the model cannot.
        RuntimeError: If the model cannot be traced; see :func:`.trace_model.trace`.
    """
    if not worlds or min(worlds) < 1:
        raise ValueError(f"world sizes must be at least 1, got {list(worlds)}")
    for each in degrees:
        if min(each) < 1:
            raise ValueError(f"parallel sizes must be at least 1, got {each!r}")
    tried = chosen or [
        candidate for world in worlds for each in degrees for candidate in candidates(world, job.hardware, each)
    ]
    if not tried:
        raise ValueError(f"{' or '.join(map(str, degrees))} do not divide {list(worlds)} ranks")
    if job.offload != "auto" and job.offload.whole:
        tried = [candidate for candidate in tried if candidate.topology().gathers_shards]
        if not tried:
            raise ValueError("shards in host memory need ZeRO-3 or HSDP: offload the optimizer only")
    parts = parts or job.bucket_bytes is not None or job.by_module or job.by_parameter
    traces = {
        of: traced_stages(job.work, job.hardware, job.fused, parts=parts, degrees=of)
        for of in dict.fromkeys(candidate.degrees for candidate in tried)
    }
    rows = [planned(job, traces[candidate.degrees], candidate) for candidate in tried]
    possible = [row for row in rows if row.timeline is not None]
    best = min(possible, key=lambda row: _preference(row, _batches_per_rank(job, row.candidate)), default=None)
    smallest = [found for of, stages in traces.items() if (found := _smallest_world(job, stages, of)) is not None]
    return Forecast(job, rows, best, min(smallest, default=None), traces)


def traced_stages(
    work: Workload, hardware: Hardware, fused: bool, *, parts: bool = False, degrees: Degrees = UNDIVIDED
) -> list[Trace]:
    """Return the traces of a pipeline's stages, tracing each kind of stage once. Without a pipeline, of the model.

    Raises:
        ValueError, RuntimeError: See :func:`.trace_model.trace`.
    """
    alike: Sequence[int] = [0]
    if degrees.pipeline > 1 and work.divided is not None and work.divided.alike is not None:
        alike = work.divided.alike(degrees.pipeline)
    found = {stage: trace(work, hardware, fused, parts=parts, degrees=degrees, stage=stage) for stage in {*alike}}
    return [found[stage] for stage in alike]


def _preference(row: Planned, batches: float) -> tuple[bool, float, float, int]:
    """Return a sort key: those that fit, time per batch to three digits, communication per batch, peak memory."""
    assert row.timeline is not None
    sent = sum(exposure.seconds for exposure in row.timeline.exposures)
    seconds = float(f"{row.timeline.seconds / batches:.3g}")
    return row.is_close, seconds, sent / batches, row.timeline.peak_bytes


def _stages(traced: Trace | Sequence[Trace]) -> Sequence[Trace]:
    return [traced] if isinstance(traced, Trace) else traced


def planned(
    job: Job,
    traced: Trace | Sequence[Trace],
    candidate: Candidate,
    *,
    details: bool = False,
    stage: int | None = None,
) -> Planned:
    """Plan one way to shard. What does not fit is planned again with all memory that published runs could use.

    Args:
        traced: The model, or each stage of a pipeline.
        details: Also record spans and memory over time.
        stage: Stage of a pipeline to return memory and timeline of. None: the one that needs most memory.
    """
    found = _planned(job, traced, candidate, details, stage)
    if not found.fits and (tightest := job.tightest) is not None:
        found = _planned(tightest, traced, candidate, details, stage)
        return replace(found, is_close=found.fits)
    return found


def _planned(
    job: Job, traced: Trace | Sequence[Trace], candidate: Candidate, details: bool, stage: int | None
) -> Planned:
    """Plan one way to shard with the memory that the job's schedules may use."""
    if job.offload == "auto":
        return _with_offload(job, traced, candidate, details, stage)
    if candidate.degrees.pipeline > 1:
        found = _Pipelined(job, _stages(traced), candidate).planned(stage, details)
        return replace(found, offload=job.offload)
    (traced,) = _stages(traced)
    return replace(_planned_alone(job, traced, candidate, details), offload=job.offload)


def _with_offload(
    job: Job, traced: Trace | Sequence[Trace], candidate: Candidate, details: bool, stage: int | None
) -> Planned:
    """Plan with as few units in host memory as fit, or with all if that is faster. If it fits without, nothing is offloaded."""

    def after(step: int) -> Planned:
        if step not in found:
            units = offloading.step_of(step, buckets)
            found[step] = _planned(replace(job, offload=units), traced, candidate, details, stage)
        return found[step]

    found = {0: _planned(replace(job, offload=NOTHING), traced, candidate, details, stage)}
    buckets = found[0].context.buckets
    most = offloading.steps(buckets, candidate.topology())
    if found[0].fits or not after(most).fits:
        return found[0] if found[0].fits else after(most)
    low, high = 0, most  # the first does not fit, and the second does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if after(middle).fits else (middle, high)
    units = len(offloading.modules_of(buckets))
    enough = [step for step in sorted({high, max(high, units), most}) if after(step).fits]
    return after(min(enough, key=lambda step: _preference(after(step), 1.0)[1]))  # ties go to the fewest units


def _planned_alone(job: Job, traced: Trace, candidate: Candidate, details: bool) -> Planned:
    """Plan without a pipeline."""
    problem = problem_of(job, traced, candidate)
    if job.solved:
        try:
            solution = _solved(job, problem, job.usable, job.reshard)
        except BudgetError as error:
            return Planned(candidate, problem.context, None, None, error.needed, str(error))
        decisions, timeline = solution.decisions, solution.timeline
    else:
        decisions = problem.decisions_by_policy()
        timeline = problem.timeline(decisions, job.optimizer)
        if timeline.peak_bytes > job.usable:
            return Planned(candidate, problem.context, None, None, timeline.peak_bytes, "its peak is above the budget")
    if details:
        timeline = explained(problem.timeline(decisions, job.optimizer, details=True), decisions, PHASES)
    return Planned(candidate, problem.context, timeline, decisions, timeline.peak_bytes)


def _solved(job: Job, problem: StepOutlines, usable: int, reshard: bool | int | None) -> Solution:
    """Return the best schedule within ``usable`` bytes.

    Raises:
        BudgetError: If there is none.
    """
    return solve(
        problem,
        job.optimizer,
        usable,
        prefetch=job.prefetch,
        reshard=reshard,
        bounds=0,
        up_to_budget=True,
        refusal="" if job.budget is not None else _too_small(job),
    )


def _too_small(job: Job) -> str:
    machine = job.hardware
    share = f"{1 - job.reserve:.0%} of what {machine.name} has ({gib(machine.memory_bytes)})"
    return f"{gib(job.usable)}, {share}, are not enough"


def _smallest_world(job: Job, stages: Sequence[Trace], degrees: Degrees) -> int | None:
    """Return the smallest number of ranks that fits, by memory alone, with parameters sharded over all ranks."""
    # Experts need inner * tensor ranks.
    of_experts = degrees.experts_apart // math.gcd(degrees.experts_apart, degrees.tensor)
    inner = math.lcm(of_experts, degrees.context)
    while inner * degrees.tensor * degrees.pipeline <= MAX_WORLD:
        candidate = Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, inner, degrees=degrees)
        if _fits(job, stages, candidate):
            return candidate.world
        inner *= 2
    return None


def _fits(job: Job, stages: Sequence[Trace], candidate: Candidate) -> bool:
    """Return whether the schedule that takes least memory fits."""
    if candidate.degrees.pipeline > 1:
        return _planned(replace(job, prefetch=0, reshard=True), stages, candidate, False, None).fits
    if job.offload == "auto":
        job = replace(job, offload=OffloadedUnits(whole=EVERY))
    problem = problem_of(job, stages[0], candidate)
    try:
        solve(problem, job.optimizer, job.usable, prefetch=0, reshard=True, bounds=0)
    except BudgetError:
        return False
    return True


# -- pipelines --------------------------------------------------------------------------------------------------------


class _Pipelined:
    """A pipeline whose stages are all sharded in the same way.

    Each kind of stage is simulated separately, with all its microbatches. Then the waits of stages for each other are
    added.
    """

    def __init__(self, job: Job, stages: Sequence[Trace], candidate: Candidate) -> None:
        self.job, self.stages, self.candidate = job, stages, candidate
        microbatches = job.microbatches_of(candidate)
        self.orders = [one_f_one_b.order(stage, len(stages), microbatches) for stage in range(len(stages))]
        self.kinds = [next(i for i, other in enumerate(stages) if other is stage) for stage in stages]
        """For each stage, the first stage of the same kind, which has the most microbatches in memory."""

    def planned(self, wanted: int | None, details: bool) -> Planned:
        found: dict[int, tuple[StepOutlines, Decisions, Timeline]] = {}
        for stage in dict.fromkeys(self.kinds):
            problem = problem_of(self.job, self.stages[stage], self.candidate)
            by_policy = problem.decisions_by_policy()
            # The schedule does not control the memory of other microbatches.
            alone = problem.timeline(by_policy, self.job.optimizer).peak_bytes
            timeline = self.simulated(stage, problem, by_policy)
            others = timeline.peak_bytes - alone
            decisions = by_policy
            if self.job.solved:
                try:
                    decisions = _solved(self.job, problem, self.job.usable - others, reshard=True).decisions
                except BudgetError as error:
                    why = f"{error} The step's other microbatches have {gib(others)} besides."
                    return Planned(self.candidate, problem.context, None, None, error.needed + others, why, stage)
                timeline = self.simulated(stage, problem, decisions)
            if timeline.peak_bytes > self.job.usable:
                why = "its peak is above the budget"
                return Planned(self.candidate, problem.context, None, None, timeline.peak_bytes, why, stage)
            found[stage] = problem, decisions, timeline
        shown = max(found, key=lambda stage: found[stage][2].peak_bytes) if wanted is None else wanted
        begins = self.begins({kind: timeline for kind, (_, _, timeline) in found.items()})
        ends = [
            start[-1] + timeline.seconds - timeline.turns[-1][0]  # the last backward, and the optimizer step
            for start, kind in zip(begins, self.kinds, strict=True)
            for timeline in [found[kind][2]]
        ]
        problem, decisions, by_itself = found[self.kinds[shown]]
        timeline = self.simulated(shown, problem, decisions, begins[shown], details)
        if details:
            timeline = explained(timeline, decisions, PHASES)
        timeline = replace(timeline, seconds=max(ends))
        idle = max(0.0, timeline.seconds - by_itself.seconds)
        return Planned(self.candidate, problem.context, timeline, decisions, timeline.peak_bytes, "", shown, idle)

    def simulated(
        self,
        stage: int,
        problem: StepOutlines,
        decisions: Decisions,
        begins: Sequence[float] | None = None,
        details: bool = False,
    ) -> Timeline:
        """Simulate all microbatches of a step on a stage."""
        traced, optimizer = self.stages[stage], self.job.optimizer
        messages = traced.received_bytes, traced.sent_bytes, compat.PIPELINES_HOLD_MESSAGES
        turns = problem.turns(decisions, self.orders[stage], *messages)
        if begins is not None:
            turns = [turn._replace(begin=begin) for turn, begin in zip(turns, begins, strict=True)]
        resting = problem.resting(optimizer)
        return simulate(turns, problem.context, problem.costs, resting, optimizer, details=details)

    def begins(self, timelines: Mapping[int, Timeline]) -> list[list[float]]:
        """Return when each stage's forwards and backwards begin, from separate timelines of each kind of stage."""
        seconds: dict[int, dict[Phase, list[float]]] = {}
        for kind, timeline in timelines.items():
            seconds[kind] = {Phase.FORWARD: [], Phase.BACKWARD: []}
            for phase, (begin, end) in zip(self.orders[kind], timeline.turns, strict=True):
                seconds[kind][phase].append(end - begin)
            seconds[kind][Phase.FORWARD][0] += timeline.turns[0][0]  # time before the first forward
        sent = max(stage.sent_bytes for stage in self.stages)
        apart = Ring(2, self.candidate.inner * self.candidate.outer * self.candidate.degrees.tensor)
        hop = collective_seconds("all_gather", 2 * sent, apart, self.job.hardware)
        return one_f_one_b.begins(self.orders, [seconds[kind] for kind in self.kinds], hop)


# -- a model on other ranks -------------------------------------------------------------------------------------------


def problem_of(job: Job, traced: Trace, candidate: Candidate) -> StepOutlines:
    """Return the scheduling problem of the traced model, with its buckets laid out for a candidate's ranks."""
    portions = 0 if job.reshard is None or isinstance(job.reshard, bool) else job.reshard
    topology = candidate.topology(portions)
    layout = LayoutPolicy(bucket_bytes=job.bucket_bytes, by_parameter=job.by_parameter)
    precision = PrecisionPlan(Policies(replace(job.precision, param_dtype=job.work.param_dtype)))
    has_experts = job.work.divided is not None and "expert" in job.work.divided.by
    experts = candidate.experts(portions) if has_experts else None
    planner = BucketPlanner(topology, precision, GradientPolicy(), layout, frozenset(), experts)
    numbers: dict[str, list[int]] = {}  # numbers of traced buckets, by unit
    for number, bucket in enumerate(traced.buckets):
        numbers.setdefault(bucket.unit, []).append(number)
    infos: list[BucketInfo] = []
    sources: list[list[_Source]] = []
    names: dict[str, str] = {}  # name of the joined unit, by the name of each unit in it
    known: dict[tuple[str, ...], list[_LaidOut]] = {}  # by traced units
    for name, members in _members(traced, job.unit_bytes).items():
        names |= dict.fromkeys(members, name)
        own = [numbers[member] for member in members]
        alike = tuple(traced.buckets[of[0]].like for of in own)
        if alike not in known:
            parameters = [[traced.buckets[number].parameters for number in of] for of in own]
            known[alike] = _lay_out(
                [traced.units[unit] for unit in alike], parameters, planner, portions, job.by_module
            )
        for laid_out in known[alike]:
            unit = f"{name}.{laid_out.module}" if laid_out.module else name
            of_unit = [other for other in known[alike] if other.module == laid_out.module]
            which = unit if len(of_unit) == 1 else f"{unit}#{of_unit.index(laid_out)}"
            infos.append(replace(laid_out.info, name=which, unit=unit))
            sources.append([_Source(own[i][j], part, whole) for i, j, part, whole in laid_out.sources])
    policy = SchedulePolicy(memory_budget=job.usable, prefetch="auto", reshard_after_forward="auto")
    if candidate.degrees.pipeline > 1:  # as in the backend
        policy = replace(policy, keep_last=False, reshard_after_forward=True)
    messages = 0
    if compat.PIPELINES_HOLD_MESSAGES:
        messages = job.microbatches_of(candidate) * (traced.received_bytes + traced.sent_bytes)
    infos = _with_buffers(infos, job.buffers)
    if job.offload != "auto":
        infos = offloading.offload(infos, job.offload)
    other_bytes = traced.buffer_bytes + messages + buffer_bytes(info.exchange for info in infos)
    context = Context(tuple(infos), policy, True, overlap=job.overlap, other_bytes=other_bytes)
    outlines = {phase: _on_ranks(outline, context, sources, names) for phase, outline in traced.outlines.items()}
    return StepOutlines(outlines, context, CostModel(job.hardware, job.fused))


def _with_buffers(infos: list[BucketInfo], policy: BufferPolicy) -> list[BucketInfo]:
    if not policy.double:
        return infos
    sizes = [
        SizesOf(i.layout.numel, i.exchange.sent_numel, i.exchange.sent_dtype, i.exchange.comm_dtype, i.trainable)
        for i in infos
    ]
    return [
        replace(info, exchange=info.exchange.with_buffers(*buffers))
        for info, buffers in zip(infos, assign_all(sizes, policy), strict=True)
    ]


def _members(traced: Trace, unit_bytes: int | None) -> dict[str, list[str]]:
    """Return the names of units after joining, each with the names of the units in it, in order."""
    joined: dict[str, list[str]] = {}
    for run in traced.neighbors if unit_bytes is not None else ():
        of_run = list(run)
        for group in group_by_size(list(run.values()), unit_bytes or 0):
            joined |= {of_run[i]: [of_run[j] for j in group] for i in group}
    members = [joined.get(name, [name]) for name in traced.order]
    return {joined_name(of): of for of in members}


class _Source(NamedTuple):
    """A traced bucket that the outline of a bucket comes from.

    Args:
        bucket: The traced bucket.
        part, whole: Number of its elements that are in the new bucket, and of all its elements.
    """

    bucket: int
    part: int
    whole: int


class _LaidOut(NamedTuple):
    """A bucket on a candidate's ranks.

    Args:
        info: Description of the bucket.
        sources: Unit, number of the traced bucket within that unit, and ``part`` and ``whole`` of :class:`_Source`.
        module: Name in its unit of the module that is gathered by itself; empty if the unit is gathered as a whole.
    """

    info: BucketInfo
    sources: Sequence[tuple[int, int, int, int]]
    module: str = ""


def _lay_out(
    units: Sequence[Unit],
    traced: Sequence[Sequence[Set[str]]],
    planner: BucketPlanner,
    portions: int,
    by_module: bool = False,
) -> list[_LaidOut]:
    """Lay out the buckets of units that are joined into one.

    Args:
        traced: For each unit, the parameters in each traced bucket.
        portions: Number of ranks that backwards gather over. 0: that of forwards.
        by_module: Whether each module of a unit has buckets of its own.
    """
    params: list[tuple[nn.Parameter, tuple[Site, ...]]] = []
    origin: dict[str, tuple[int, int]] = {}  # unit and bucket, by parameter
    places = {param: {site.module_name for site in sites} for unit in units for param, sites in unit.params}
    for i, unit in enumerate(units):
        for param, (site, *_) in unit.params:
            # Several units may share one trace, in which case their names are the same.
            renamed = replace(site, module_name=f"{i}.{site.module_name}")
            params.append((param, (renamed,)))
            origin[renamed.name] = i, next(j for j, names in enumerate(traced[i]) if site.name in names)
    whole = Counter[tuple[int, int]]()
    for param, (site,) in params:
        whole[origin[site.name]] += param.numel()
    modules: dict[str, list[tuple[nn.Parameter, tuple[Site, ...]]]] = {}
    for param, (site,) in params:
        # A parameter of several modules belongs to their unit, as in find_units.
        alone = by_module and not units[0].is_root and len(places[param]) == 1
        inner = site.module_name.removeprefix(f"0.{units[0].name}").removeprefix(".") if alone else ""
        modules.setdefault(inner, []).append((param, (site,)))
    planned = [
        (module, plan)
        for module, own in modules.items()
        for plan in planner.unit(Unit(units[0].name, (), tuple(own), is_root=units[0].is_root))
    ]
    found = []
    for module, plan in planned:
        part = Counter[tuple[int, int]]()
        for slot in plan.layout.slots:
            part[origin[slot.name]] += slot.numel
        laid_out = [(*where, count, whole[where]) for where, count in part.items()]
        topology = planner.topology_of(plan.is_expert)
        found.append(_LaidOut(bucket_info(plan, topology, portions), laid_out, module))
    return found


def _on_ranks(
    outline: Outline, context: Context, sources: Sequence[Sequence[_Source]], names: Mapping[str, str]
) -> Outline:
    """Replace the buckets of an outline.

    Each bucket is used from the first to the last use of the traced buckets that it comes from.
    """
    lives = {bucket: (wait, last) for use in outline.uses for bucket, wait, last in use.lives}
    gradients = {g.bucket: g for g in outline.gradients}
    gathered: list[tuple[int, int, int]] = []
    wholes: dict[int, tuple[int, int]] = {}
    reduced: list[Gradients] = []
    for number, (info, traced) in enumerate(zip(context.buckets, sources, strict=True)):
        if used := [lives[source.bucket] for source in traced if source.bucket in lives]:
            begin, end = min(wait for wait, _ in used), max(last for _, last in used)
            if info.exchange.gather_group:
                gathered.append((number, begin, end))
            elif info.main_dtype != info.exchange.dtype and not info.has_resident:
                wholes[number] = (begin, end)
        if computed := [(gradients[source.bucket], source) for source in traced if source.bucket in gradients]:
            begins = [g.begin for g, _ in computed if g.begin is not None]
            elsewhere = sum(g.elsewhere * source.part // source.whole for g, source in computed if g.elsewhere)
            ready = max(g.ready for g, _ in computed)
            reduced.append(Gradients(number, min(begins, default=None), ready, elsewhere))
    return replace(
        outline,
        units=tuple(names.get(unit, unit) for unit in outline.units),
        uses=tuple(grouped(sorted(gathered, key=lambda life: life[1]), context)),
        wholes=wholes,
        gradients=tuple(sorted(reduced, key=lambda g: g.ready)),
    )
