"""The benefit of scheduling: one step without overlap, with gathers one unit ahead, and with the solver. Simulated.

    python benchmarks/ablation.py --out benchmarks/results/ablation.txt

Four schedules are simulated for each model, number of ranks and network:

1. Every collective is awaited at once.
2. Each gather starts one unit ahead of its use, and each reduction is awaited when the next one has started. A model
   gets this schedule if it is compiled without a memory budget.
3. The solver, with 92 % of the device's memory as its budget, as with ``options={"memory_budget": ...}``.
4. The solver on a network that takes no time. This is the time of computation alone.

The criterion: the solver leaves at most half as much communication exposed as one unit ahead does, wherever memory
allows. Where the criterion does not hold, the table gives the reason:

memory          it would hold without a memory budget; the table says how much memory that takes
no order can    more than half is exposed in every order of the same collectives, whether buckets are kept or not. The
                first gather has nothing before it, and the last reduction nothing after it. The gathers of a forward or
                the reductions of a backward may also take longer than their computation (:func:`least_exposed`)
missed          a better schedule may exist; it certainly does where one unit ahead fits and is faster

A second table shows what host memory is worth: the solver's schedule with the same budget, if optimizer state, shards
or saved activations are in host memory, beside activation checkpointing, which takes time instead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from published import GIB, run

from mfsdp_compile.passes.guests.solver.hardware import Hardware, Link, hardware
from mfsdp_compile.passes.guests.solver.reasons import BudgetError
from mfsdp_compile.passes.guests.solver.simulate import Stage, Start, Timeline, host_memory
from mfsdp_compile.passes.guests.solver.solve import solve
from mfsdp_compile.passes.guests.solver.step_events import StepOutlines
from mfsdp_compile.planning import Candidate, Job, Workload, workload
from mfsdp_compile.planning.offloading import EVERY, NOTHING, OffloadedUnits
from mfsdp_compile.planning.on_ranks import problem_of
from mfsdp_compile.planning.planner import planned
from mfsdp_compile.planning.trace_model import Trace, trace
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

NETWORKS = ("h100-ib", "h100-eth")
"""Machines that compute equally fast, with 400 and 100 Gb/s per GPU between nodes. One node uses neither network."""


@dataclass(frozen=True)
class Setting:
    """A job.

    Args:
        ranks: Number of ranks that all parameters are sharded over.
        batch, length: Batch size and sequence length of one rank.
        why: Why the setting is in the table.
    """

    model: str
    ranks: int
    batch: int
    length: int
    checkpoint: str
    why: str

    @property
    def work(self) -> Workload:
        return workload(self.model, batch=self.batch, length=self.length, checkpoint=self.checkpoint)

    def __str__(self) -> str:
        return f"{self.model}, {self.ranks} ranks, {self.batch} x {self.length:,}, checkpointing {self.checkpoint}"


COMPARED = ("one ahead", "solved")

SETTINGS = (
    Setting("llama3-8b", 8, 2, 8192, "selective", "one node"),
    Setting("llama3-8b", 64, 1, 8192, "selective", "usual"),
    Setting("llama3-8b", 64, 1, 2048, "none", "much communication"),
    Setting("llama3-8b", 64, 1, 2048, "selective", "much communication"),
    Setting("llama3-70b", 256, 1, 8192, "full", "usual"),
    Setting("llama3-70b", 512, 1, 8192, "full", "usual; a layer has two buckets at 512 ranks"),
    Setting("llama3-70b", 256, 1, 2048, "full", "much communication"),
    Setting("deepseek-moe-16b", 64, 2, 4096, "selective", "usual"),
    Setting("deepseek-moe-16b", 64, 1, 4096, "full", "usual"),
    Setting("deepseek-moe-16b", 64, 1, 2048, "selective", "much communication"),
    Setting("mixtral-8x7b", 16, 4, 4096, "full", "usual"),
    Setting("mixtral-8x7b", 16, 1, 2048, "full", "much communication"),
    Setting("mixtral-8x7b", 64, 1, 4096, "full", "usual"),
)
"""Every setting that was tried."""

HOST_SETTINGS = (
    Setting("llama3-8b", 2, 1, 8192, "full", "few ranks"),
    Setting("llama3-8b", 8, 1, 8192, "none", "activations"),
    Setting("llama3-8b", 8, 2, 8192, "none", "activations"),
    Setting("llama3-8b", 8, 2, 8192, "selective", "activations"),
    Setting("llama3-8b", 8, 2, 8192, "full", "activations"),
    Setting("llama3-70b", 8, 1, 8192, "full", "few ranks"),
    Setting("llama3-70b", 16, 1, 8192, "full", "few ranks"),
    Setting("llama3-70b", 64, 1, 8192, "none", "activations"),
    Setting("llama3-70b", 64, 1, 8192, "selective", "activations"),
    Setting("llama3-70b", 64, 1, 8192, "full", "activations"),
)
"""Every setting that was tried with host memory, on the first of :data:`NETWORKS`."""
HOST_WAYS: Mapping[str, tuple[OffloadedUnits | Literal["auto"], bool | Literal["auto"]]] = {
    "nothing": (NOTHING, False),
    "optimizer": (OffloadedUnits(optimizer=EVERY), False),
    "all parameters": (OffloadedUnits(whole=EVERY), False),
    "as many units as it takes": ("auto", False),
    "activations": (NOTHING, True),
    "activations with time": (NOTHING, "auto"),
    "optimizer, activations with time": (OffloadedUnits(optimizer=EVERY), "auto"),
}
"""What is in host memory, as in ``mfsdp plan``'s ``--offload`` and ``--activation-offload``."""


@dataclass(frozen=True)
class Way:
    """Result of scheduling a setting in one way.

    Args:
        needed: Bytes at the peak.
        usable: Bytes available.
    """

    name: str
    timeline: Timeline
    needed: int
    usable: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.usable

    @property
    def exposed(self) -> float:
        return self.timeline.exposed_seconds


def job_of(work: Workload, machine: Hardware) -> Job:
    """Return a job whose schedules may use 92 % of the device's memory (72.8 GiB of an H100)."""
    return Job(work, machine, budget=int(0.92 * machine.memory_bytes / (1 - SchedulePolicy().budget_reserve)))


# -- schedules --------------------------------------------------------------------------------------------------------


def ways(setting: Setting, traced: Trace, machine: Hardware) -> Iterator[Way]:
    candidate = Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, setting.ranks)
    job = job_of(setting.work, machine)
    free = Link(sys.float_info.max, 0.0)
    infinite = replace(machine, collective_seconds=0.0, intra_node=free, inter_node=free)
    for name, overlap in (("no overlap", Overlap(False, False)), ("one ahead", Overlap())):
        problem = problem_of(replace(job, overlap=overlap), traced, candidate)
        timeline = problem.timeline(problem.decisions_by_policy(), job.optimizer)
        yield Way(name, timeline, timeline.peak_bytes, job.usable)
    for name, on in (("solved", machine), ("infinite", infinite)):
        problem = problem_of(replace(job, hardware=on), traced, candidate)
        yield solved(name, job, problem, job.usable)
    yield solved("unbounded", job, problem_of(job, traced, candidate), None)


def solved(name: str, job: Job, problem: StepOutlines, budget: int | None) -> Way:
    try:
        timeline = solve(problem, job.optimizer, budget, up_to_budget=True).timeline
    except BudgetError as error:
        timeline = problem.timeline(problem.decisions_by_policy(), job.optimizer)
        return Way(name, timeline, error.needed, job.usable)
    return Way(name, timeline, timeline.peak_bytes, job.usable)


def least_exposed(problem: StepOutlines) -> float:
    """Return the seconds exposed in any order of collectives, if buckets may stay for the backward and memory is free.

    Gathers run one after the other. All gathers up to a use are finished at that use. At least the part of their time
    is exposed that is longer than the computation before that use, slowed down by the network. The same holds for
    reductions, from the gradients of each bucket to the end of the backward. A gather that the backward repeats can be
    avoided. The gathers of the forward and the reductions cannot.
    """
    costs, buckets = problem.costs, problem.context.buckets
    slow = 1 + costs.hardware.compute_slowdown
    copies = {
        stage: sum(event.collective.before for event in events if isinstance(event, Start))
        for stage, events in problem.events(problem.decisions_by_policy()).items()
    }  # casts of shards, and of gradients that are computed elsewhere
    forward, backward = problem.outlines[Phase.FORWARD], problem.outlines[Phase.BACKWARD]
    computed = copies[Stage.FORWARD] - sum(costs.cast(buckets[bucket]) for bucket in forward.uses[0].buckets)
    before = [computed]
    for segment in forward.segments:
        before.append(before[-1] + segment.seconds)
    gathered = early = 0.0
    for use in forward.uses:
        gathered += problem.gather_seconds(use)
        early = max(early, gathered - slow * before[use.first])
    finishing = [costs.finish(buckets[gradients.bucket]) for gradients in backward.gradients]
    hiding = sum(finishing) - min(finishing, default=0.0)  # the finish of the last gradient hides nothing
    after = [copies[Stage.BACKWARD] + hiding]
    for segment in reversed(backward.segments):
        after.append(after[-1] + segment.seconds)
    after.reverse()
    reduced = late = 0.0
    for gradients in reversed(backward.gradients):
        info = buckets[gradients.bucket]
        reduced += sum(costs.reduction(info, stage) for stage in range(len(info.exchange.lane.reduction)))
        late = max(late, reduced - slow * after[gradients.ready + 1])
    return early + late


def verdict(found: Mapping[str, Way], least: float) -> str:
    """Say whether the criterion holds, and if not, why."""
    if not found["solved"].fits:
        return "does not fit in any schedule"
    if not found["one ahead"].fits:
        return "one ahead does not fit: nothing to compare with"
    other, ours, unbounded = found["one ahead"], found["solved"], found["unbounded"]
    half = other.exposed / 2
    if ours.exposed <= half:
        return "holds"
    if ours.timeline.seconds > other.timeline.seconds:
        return "missed: one ahead fits, and is faster"
    if unbounded.exposed <= half:
        return f"memory: would hold with {unbounded.needed / GIB:.1f} GiB"
    return "no order can" if least > half else "missed"


# -- the table --------------------------------------------------------------------------------------------------------


def rows(setting: Setting) -> Iterator[tuple[str, str]]:
    """Yield lines, each with its verdict; the verdict is empty for lines that have none."""
    yield f"{setting} ({setting.why})", ""
    traced = trace(setting.work, hardware(NETWORKS[0]), True)
    for name in NETWORKS if setting.ranks > hardware(NETWORKS[0]).ranks_per_node else NETWORKS[:1]:
        machine = hardware(name)
        found = {way.name: way for way in ways(setting, traced, machine)}
        candidate = Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, setting.ranks)
        least = least_exposed(problem_of(job_of(setting.work, machine), traced, candidate))
        said = verdict(found, least)
        for way in found.values():
            if way.name == "unbounded":
                continue
            timeline = way.timeline
            start = f"  {name:9} {way.name:11}"
            if not way.fits:
                yield f"{start} needs {way.needed / GIB:.1f} GiB of {way.usable / GIB:.1f}", ""
                continue
            sent = sum(exposure.seconds for exposure in timeline.exposures)
            mfu = 3 * traced.forward_flops / timeline.seconds / machine.flops_of("bfloat16")
            yield (
                (
                    f"{start} {timeline.seconds:8.3f} {timeline.compute_seconds:8.3f} {sent:8.3f} "
                    f"{way.exposed * 1e3:9.1f} "
                    f"{way.exposed / timeline.seconds:7.2%} {way.needed / GIB:6.1f} {mfu:6.1%}"
                ),
                "",
            )
        yield f"  {name:9} criterion   {said}", said
        if all(found[way].fits for way in COMPARED):
            more = (f"{way} {max(0.0, found[way].exposed - least) * 1e3:.1f}" for way in COMPARED)
            yield f"  {name:9} exposed in any order {least * 1e3:.1f} ms; above that {', '.join(more)}", ""
    yield "", ""


def host_rows(setting: Setting) -> Iterator[str]:
    yield f"{setting} ({setting.why})"
    machine = hardware(NETWORKS[0])
    candidate = Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, setting.ranks)
    works = {of: replace(setting.work, activation_offload=of) for _, of in HOST_WAYS.values()}
    traces = {of: trace(work, machine, True) for of, work in works.items()}
    for name, (units, activations) in HOST_WAYS.items():
        job, traced = replace(job_of(works[activations], machine), offload=units), traces[activations]
        row = planned(job, traced, candidate)
        if row.timeline is None:
            yield f"  {name:33} needs {row.needed / GIB:.1f} GiB of {job.usable / GIB:.1f}"
            continue
        saved = traced.outlines[Phase.FORWARD].host_bytes
        held = sum(host_memory(row.context.buckets, job.optimizer, saved).values())
        mfu = 3 * traced.forward_flops / row.timeline.seconds / machine.flops_of("bfloat16")
        yield f"  {name:33} {row.timeline.seconds:8.3f} {row.needed / GIB:7.1f} {held / GIB:7.1f} {mfu:6.1%}"
    yield ""


def lines() -> Iterator[str]:
    yield (
        f"  {'network':9} {'schedule':11} {'step, s':>8} {'compute':>8} {'sent, s':>8} {'exposed':>9} {'':7} "
        f"{'GiB':>6} "
        f"{'MFU':>6}"
    )
    yield "  exposed in milliseconds and in percent of the step; sent is how long all collectives take"
    yield ""
    counts: dict[str, int] = {}
    for setting in SETTINGS:
        for line, said in rows(setting):
            if said:
                kind = said.partition(":")[0]
                counts[kind] = counts.get(kind, 0) + 1
            yield line
    yield f"criterion, by cells: {', '.join(f'{kind} {count}' for kind, count in counts.items())}"
    yield ""
    yield f"  {'in host memory':33} {'step, s':>8} {'GiB':>7} {'host':>7} {'MFU':>6}"
    yield f"  on {NETWORKS[0]}; GiB of a rank's device at the peak, and of a rank's host memory"
    yield ""
    for setting in HOST_SETTINGS:
        yield from host_rows(setting)


if __name__ == "__main__":
    run(__doc__, lines())
