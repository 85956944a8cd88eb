"""Plans for pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mfsdp_compile.passes.guests.solver.costs import Ring, collective_seconds
from mfsdp_compile.passes.guests.solver.reasons import BudgetError, explained, gib
from mfsdp_compile.passes.guests.solver.simulate import Timeline, simulate
from mfsdp_compile.passes.guests.solver.step_events import PHASES, StepOutlines
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.decisions import Decisions
from mfsdp_compile.runtime.schedule.phase import Phase

from . import one_f_one_b
from .candidates import Candidate
from .jobs import Job, Planned
from .on_ranks import problem_of
from .trace_model import Trace


class Pipelined:
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
                    decisions = self.job.solve(problem, self.job.usable - others, reshard=True).decisions
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
