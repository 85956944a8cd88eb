"""Planning: evaluates strategies, meshes and numbers of ranks without running them.

A model is traced once (:mod:`.trace_model`). Everything else is closed-form arithmetic: layouts, collectives, a
schedule within the memory budget, and its simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mfsdp_compile.passes.guests.solver.hardware import Hardware
from mfsdp_compile.passes.guests.solver.reasons import BudgetError, explained
from mfsdp_compile.passes.guests.solver.solve import solve
from mfsdp_compile.passes.guests.solver.step_events import PHASES
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy

from . import offloading
from .candidates import Candidate, candidates, in_levels
from .jobs import Job, Planned
from .offloading import EVERY, NOTHING, OffloadedUnits
from .on_ranks import problem_of
from .pipelines import Pipelined
from .trace_model import Trace, trace
from .workloads import UNDIVIDED, Degrees, Workload


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
    if job.precision.grad_sum_dtype is not None and not chosen:
        tried = [form for candidate in tried for form in in_levels(candidate, job.hardware)]
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

    def preference(row: Planned) -> tuple[bool, int, float, float, int]:
        assert row.timeline is not None
        # As tables show them: no row beside the best one looks faster. Of equal ones, the one that communicates least.
        batches, seconds = _batches_per_rank(job, row.candidate), row.timeline.seconds
        speed = round(job.work.batch * job.work.length * batches / seconds)
        step, sent = float(f"{seconds / batches:.3g}"), communication(row) / batches
        return row.is_close, -speed, step, sent, row.timeline.peak_bytes

    best = min(possible, key=preference, default=None)
    smallest = [found for of, stages in traces.items() if (found := _smallest_world(job, stages, of)) is not None]
    return Forecast(job, rows, best, min(smallest, default=None), traces)


MAX_WORLD = 65_536


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


def communication(row: Planned) -> float:
    """Return the seconds that the collectives of a plan's step take, hidden or exposed."""
    assert row.timeline is not None
    return sum(exposure.seconds for exposure in row.timeline.exposures)


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
    stages = [traced] if isinstance(traced, Trace) else traced
    found = _planned(job, stages, candidate, details, stage)
    if not found.fits and (tightest := job.tightest) is not None:
        found = _planned(tightest, stages, candidate, details, stage)
        return replace(found, is_close=found.fits)
    return found


def _planned(
    job: Job, stages: Sequence[Trace], candidate: Candidate, details: bool = False, stage: int | None = None
) -> Planned:
    """Plan one way to shard with the memory that the job's schedules may use."""
    if job.offload == "auto":
        return _with_offload(job, stages, candidate, details, stage)
    if candidate.degrees.pipeline > 1:
        found = Pipelined(job, stages, candidate).planned(stage, details)
    else:
        found = _planned_alone(job, stages[0], candidate, details)
    return replace(found, offload=job.offload)


def _with_offload(job: Job, stages: Sequence[Trace], candidate: Candidate, details: bool, stage: int | None) -> Planned:
    """Plan with as few units in host memory as fit, or with all if that is faster. With none, if it fits so."""

    def after(step: int) -> Planned:
        if step not in found:
            units = offloading.step_of(step, buckets)
            found[step] = _planned(replace(job, offload=units), stages, candidate, details, stage)
        return found[step]

    def seconds(step: int) -> float:
        timeline = after(step).timeline
        assert timeline is not None
        return float(f"{timeline.seconds:.3g}")

    found = {0: _planned(replace(job, offload=NOTHING), stages, candidate, details, stage)}
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
    return after(min(enough, key=seconds))  # ties go to the fewest units


def _planned_alone(job: Job, traced: Trace, candidate: Candidate, details: bool) -> Planned:
    """Plan without a pipeline."""
    problem = problem_of(job, traced, candidate)
    if job.solved:
        try:
            solution = job.solve(problem, job.usable, job.reshard)
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
        return _planned(replace(job, prefetch=0, reshard=True), stages, candidate).fits
    if job.offload == "auto":
        job = replace(job, offload=OffloadedUnits(whole=EVERY))
    problem = problem_of(job, stages[0], candidate)
    try:
        solve(problem, job.optimizer, job.usable, prefetch=0, reshard=True, bounds=0)
    except BudgetError:
        return False
    return True
