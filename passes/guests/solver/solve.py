"""Find the fastest schedule within a memory budget.

The solver chooses how early each gather starts, which buckets stay gathered for the backward, and how late reductions
are awaited. For a given memory bound it makes a schedule in three steps:

1. Place the starts of gathers, from the last to the first. Each starts as late as possible while still hidden, but not
   earlier than memory allows all the way to its use. If a simulation shows it exposed nevertheless, because reductions
   delayed it, it moves earlier.
2. Keep buckets that fit in memory. Those whose gathers in backward cost the most time per byte come first. The solver
   tries this step both before and after step 1.
3. Await reductions later if that saves time.

The solver tries several bounds between the needs of the smallest and the largest schedule, closer together where memory
is tight. Among the schedules within the budget it chooses the fastest; among equally fast ones, the one that
communicates least.

More memory never makes a step slower. A schedule for a bound does not depend on the budget, and a larger budget allows
every schedule that a smaller one does. For that reason the budget itself is not a bound: a schedule made for 40 GiB
would not be tried with 41 GiB.

Ranking buckets by time saved per byte is an idea of DeepCompile (https://arxiv.org/abs/2504.09983), which stops at the
first bucket that does not fit.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mfsdp_compile.runtime.schedule.decisions import Ahead, Behind, Decisions, Limit, Why, reductions_later
from mfsdp_compile.runtime.schedule.phase import Phase

from .outline import Outline, Use
from .reasons import refuse_budget
from .room import Room, SegmentMemory
from .simulate import OptimizerCost, Stage, Timeline
from .step_events import STAGES, StepOutlines, gathered_bytes

_BOUNDS = 12
"""Number of memory bounds to try between the smallest schedule and the largest."""
_ROUNDS = 4
"""Maximum number of rounds that move gathers earlier which a simulation shows exposed."""


@dataclass(frozen=True)
class Solution:
    """A schedule and its simulation.

    Args:
        decisions: Decisions of the schedule.
        timeline: Simulated timeline, without spans.
    """

    decisions: Decisions
    timeline: Timeline


def solve(
    plan: StepOutlines,
    optimizer: OptimizerCost,
    budget: int | None = None,
    *,
    prefetch: int | None = None,
    reshard: bool | int | None = None,
    bounds: int = _BOUNDS,
    up_to_budget: bool = False,
    refusal: str = "",
) -> Solution:
    """Return the fastest schedule within a budget.

    Args:
        plan: Outlines of the graphs to schedule.
        optimizer: Cost of the optimizer. Its state is in memory, and its step ends the timeline.
        budget: Total bytes on a rank; None: no bound.
        prefetch: Number of units ahead at which gathers start; None: the solver chooses.
        reshard: Whether buckets are gathered again in backward; a number of ranks: from that many portions; None: the
            solver chooses.
        bounds: Number of memory bounds to try. They do not depend on the budget, so that more memory is never slower.
        up_to_budget: Whether to try the budget as a bound too. This finds with few bounds what otherwise takes many,
            but a larger budget may then be slightly slower.
        refusal: Beginning of the error message; by default it mentions ``memory_budget``.

    Raises:
        BudgetError: No schedule fits. The message says what is missing and what would help.
    """
    return _Solver(plan, optimizer, prefetch, reshard).solve(budget, bounds, up_to_budget, refusal)


def smallest(
    plan: StepOutlines, optimizer: OptimizerCost, *, prefetch: int | None = None, reshard: bool | int | None = None
) -> Solution:
    """Return the schedule that takes the least memory.

    It does not depend on times, so it is the same for every batch.
    """
    return _Solver(plan, optimizer, prefetch, reshard)._smallest()


class _Solver:
    def __init__(
        self, plan: StepOutlines, optimizer: OptimizerCost, prefetch: int | None, reshard: bool | int | None
    ) -> None:
        self.plan, self.optimizer, self.prefetch, self.reshard = plan, optimizer, prefetch, reshard
        self.context = plan.context
        self.policy = plan.decisions_by_policy()
        self.memory = SegmentMemory(plan, sum(plan.resting(optimizer).values()))
        self._tried: dict[object, Timeline] = {}

    def solve(self, budget: int | None, bounds: int, up_to_budget: bool, beginning: str) -> Solution:
        limit = budget if budget is not None else math.inf
        smallest = self._smallest()
        low = smallest.timeline.peak_bytes
        if low > limit:
            assert budget is not None
            refuse_budget(smallest.timeline, budget, self.prefetch, self.reshard, beginning)
        unbounded = [*self._schedules(None), *self._usual()]
        largest = min(unbounded, key=_rank)
        span = max(0, largest.timeline.peak_bytes - low)
        best = min((s for s in (smallest, *unbounded) if s.timeline.peak_bytes <= limit), key=_rank)
        tried = [bound for bound in _between(low, low + span, bounds) if bound <= limit]
        if up_to_budget and budget is not None and low < budget < low + span:
            tried.append(budget)
        for bound in tried:
            for solution in self._schedules(bound, best.timeline.seconds):
                if solution.timeline.peak_bytes <= limit and _rank(solution) < _rank(best):
                    best = solution
        if budget is not None and best is smallest:
            best = self._with_reasons(smallest, budget)
        return _with_reasons_of_reductions(best, largest)

    def _usual(self) -> list[Solution]:
        """Return the policy's schedule if everything is left to the solver, because the rule of thumb may be better."""
        if self.prefetch is not None or self.reshard is not None:
            return []
        return [Solution(self.policy, self.timeline(self.policy))]

    def timeline(self, decisions: Decisions) -> Timeline:
        key = _key(decisions)
        if key not in self._tried:
            self._tried[key] = self.plan.timeline(decisions, self.optimizer)
        return self._tried[key]

    def _smallest(self) -> Solution:
        """Return the schedule that takes the least memory."""
        kept = frozenset() if self.reshard is None else self._kept_by_option()
        distance = (self.prefetch or 0) if self.context.overlap.gathers else 0
        gathers = {
            phase: {
                bucket: Ahead(distance, Why(Limit.BUDGET, gathered_bytes(use, self.context)))
                for use in self.plan.uses(phase, kept)
                for bucket in use.buckets
            }
            for phase in self.plan.outlines
        }
        decisions = Decisions(kept, gathers, self._reductions(0), portions=self.plan.portions(kept))
        return Solution(decisions, self.timeline(decisions))

    def _with_reasons(self, smallest: Solution, budget: int) -> Solution:
        """Add to each gather the bytes that are missing for it to start a unit earlier."""
        decisions = smallest.decisions
        earliest = self._gathers(budget, decisions.kept, decisions.reductions, {})
        gathers = {
            phase: {
                bucket: replace(ahead, why=earliest[phase][bucket].why)
                if bucket in earliest[phase] and earliest[phase][bucket].units == ahead.units
                else ahead
                for bucket, ahead in of.items()
            }
            for phase, of in decisions.gathers.items()
        }
        return replace(smallest, decisions=replace(decisions, gathers=gathers))

    def _kept_by_option(self) -> frozenset[int]:
        if self.reshard is False:
            return self._keepable()
        return self.policy.kept

    def _keepable(self) -> frozenset[int]:
        return self.plan.in_both if self.context.whole_model else frozenset()

    @functools.cached_property
    def _gather_costs(self) -> dict[int, tuple[int, float]]:
        """Bytes and seconds of the gather of each bucket that may be kept."""
        infos = {bucket: self.context.buckets[bucket] for bucket in self._keepable()}
        return {bucket: (max(1, info.gathered_bytes), self.plan.costs.gather(info)) for bucket, info in infos.items()}

    def _reductions(self, in_flight: int, by_bucket: bool = False) -> dict[int, Behind]:
        """Return how late each reduction is awaited.

        Args:
            in_flight: Number of units whose reductions are in flight.
            by_bucket: Whether to count buckets instead of units.
        """
        backward = self.plan.outlines.get(Phase.BACKWARD)
        reduced = [g.bucket for g in backward.gradients] if backward is not None else []
        overlap = self.context.overlap.reductions
        units = [str(bucket) if by_bucket else self.context.buckets[bucket].unit for bucket in reduced]
        why = Why(Limit.NONE if overlap else Limit.OVERLAP)
        laters = reductions_later(units, in_flight if overlap else 0)
        return {bucket: Behind(later, why) for bucket, later in zip(reduced, laters, strict=True)}

    @functools.cached_property
    def _least_seconds_at_once(self) -> float:
        """Least seconds of a step in which each reduction blocks computation."""
        computed = sum(segment.seconds for outline in self.plan.outlines.values() for segment in outline.segments)
        return computed + sum(e.seconds for e in self._smallest().timeline.exposures if e.what == "reduce")

    # -- schedules for one bound --------------------------------------------------------------------------------------

    def _schedules(self, bound: int | None, fastest: float = math.inf) -> Iterator[Solution]:
        """Yield candidate schedules for a bound. A simulation may show peaks somewhat above the bound.

        Args:
            bound: Bound on memory in bytes; None: no bound.
            fastest: Seconds of the fastest known step. Schedules that cannot be faster are left out.
        """
        overlap = self.context.overlap.reductions
        later = [self._reductions(units) for units in ((1, 2, 4) if overlap else (0,))]
        sooner: list[dict[int, Behind]] = []
        if overlap and bound is not None:  # fewer reductions in flight leave memory for other uses
            sooner = [by_bucket] if (by_bucket := self._reductions(1, by_bucket=True)) != later[0] else []
            sooner += [self._reductions(0)] if self._least_seconds_at_once < fastest else []
        for first in (False, True) if self.reshard is None and bound is not None else (True,):
            best = None
            for reductions in later:
                solution = self._schedule(bound, first, reductions)
                yield solution
                exposed = any(e.exposed > 0 for e in solution.timeline.exposures if e.what == "reduce")
                if not exposed or (best is not None and solution.timeline.seconds >= best.timeline.seconds):
                    break
                best = solution
            for reductions in sooner:
                yield self._schedule(bound, first, reductions)

    def _schedule(self, bound: int | None, keep_first: bool, reductions: Mapping[int, Behind]) -> Solution:
        kept: frozenset[int] = frozenset()
        why_not: dict[int, Why] = {}
        if keep_first:
            kept, why_not = self._keep(bound, {}, reductions)
        gathers = self._gathers(bound, kept, reductions, {})
        decisions = Decisions(kept, gathers, reductions, why_not, self.plan.portions(kept))
        for _ in range(_ROUNDS):
            late: dict[Stage, set[int]] = {}
            for e in self.timeline(decisions).exposures:
                if e.what == "gather" and e.exposed > 0:
                    late.setdefault(e.stage, set()).add(e.bucket)
            earlier = self._gathers(bound, kept, reductions, gathers, late)
            moved = replace(decisions, gathers=earlier)
            if _key(moved) == _key(decisions) or self.timeline(moved).seconds >= self.timeline(decisions).seconds:
                break
            decisions, gathers = moved, earlier
        if not keep_first:
            kept, why_not = self._keep(bound, gathers, reductions)
            left = self._without(kept, gathers)
            decisions = Decisions(kept, left, reductions, why_not, self.plan.portions(kept))
        return Solution(decisions, self.timeline(decisions))

    def _gathers(
        self,
        bound: int | None,
        kept: frozenset[int],
        reductions: Mapping[int, Behind],
        before: Mapping[Phase, Mapping[int, Ahead]],
        late: Mapping[Stage, set[int]] | None = None,
    ) -> dict[Phase, dict[int, Ahead]]:
        """Return how early gathers start; those in ``late`` start one unit earlier than in ``before``."""
        found: dict[Phase, dict[int, Ahead]] = {}
        begin, wished = Why(Limit.BEGIN), Why(Limit.NONE)
        for phase, outline in self.plan.outlines.items():
            uses = self.plan.uses(phase, kept)
            if self.prefetch is not None or not self.context.overlap.gathers:
                limit = Limit.POLICY if self.context.overlap.gathers else Limit.OVERLAP
                units = self.prefetch or 0 if self.context.overlap.gathers else 0
                found[phase] = {bucket: Ahead(units, Why(limit)) for use in uses for bucket in use.buckets}
                continue
            room = Room(self.memory.used(phase, kept, reductions, {}), bound)
            if phase in before:
                came_late = late.get(STAGES[phase], set()) if late is not None else set()
                known = (before[phase][use.buckets[0]] for use in uses)
                latest_starts = [
                    i - ahead.units - (not came_late.isdisjoint(use.buckets))
                    for i, (use, ahead) in enumerate(zip(uses, known, strict=True))
                ]
            else:
                again = self.plan.portions(kept) if phase is Phase.BACKWARD else frozenset()
                latest_starts = self._latest_starts(outline, uses, again)
            starts: list[tuple[int, Why]] = []  # from the last use to the first
            firsts, latest = [use.first for use in uses], len(uses)
            for i in range(len(uses) - 1, -1, -1):  # a gather starts no later than the one after it
                size = gathered_bytes(uses[i], self.context)
                latest, missing = room.earliest(firsts, i, max(-1, min(latest_starts[i], latest, i)), size)
                starts.append((latest, Why(Limit.BUDGET, missing) if missing else begin if latest < 0 else wished))
            aheads = found[phase] = {}
            place, why = -1, begin
            for i, use in enumerate(uses):
                if starts[-1 - i][0] >= place:  # else the gather before this one had less room, and it must start first
                    place, why = starts[-1 - i]
                aheads |= dict.fromkeys(use.buckets, Ahead(i - place, why))
        return found

    def _without(
        self, kept: frozenset[int], gathers: Mapping[Phase, Mapping[int, Ahead]]
    ) -> dict[Phase, Mapping[int, Ahead]]:
        """Return the same starts, counted in the units that backward still gathers."""
        if not kept:
            return dict(gathers)
        number = {bucket: i for i, use in enumerate(self.plan.uses(Phase.BACKWARD)) for bucket in use.buckets}
        left = self.plan.uses(Phase.BACKWARD, kept)
        numbers = [number[use.buckets[0]] for use in left]
        found: dict[int, Ahead] = {}
        for i, use in enumerate(left):
            ahead = gathers[Phase.BACKWARD][use.buckets[0]]
            if self.prefetch is None:  # a given prefetch already counts only gathered units
                start = numbers[i] - ahead.units
                units = i + 1 if start < 0 else i - bisect_left(numbers, start, hi=i)
                ahead = replace(ahead, units=units)
            found.update((bucket, ahead) for bucket in use.buckets)
        return {**gathers, Phase.BACKWARD: found}

    def _latest_starts(self, outline: Outline, uses: Sequence[Use], portions: frozenset[int]) -> list[int]:
        """Return for each gather the latest use before whose wait it must start to finish in time.

        Args:
            outline: Outline of the graph.
            uses: Gathers of the graph.
            portions: Buckets that are gathered from portions.

        Returns:
            Indices into ``uses``; -1: the beginning of the graph.
        """
        at = [0.0]
        for segment in outline.segments:
            at.append(at[-1] + segment.seconds)
        times = [at[use.first] for use in uses]
        latest_starts = [0] * len(uses)
        free = math.inf
        for i in range(len(uses) - 1, -1, -1):
            begin = min(times[i], free) - self.plan.gather_seconds(uses[i], portions)
            free = begin
            latest_starts[i] = bisect_right(times, begin, hi=i + 1) - 1
        return latest_starts

    def _keep(
        self, bound: int | None, gathers: Mapping[Phase, Mapping[int, Ahead]], reductions: Mapping[int, Behind]
    ) -> tuple[frozenset[int], dict[int, Why]]:
        """Return the buckets that stay gathered, and why other buckets do not."""
        if self.reshard is not None:
            return self._kept_by_option(), {}
        candidates = self._keepable()
        if not candidates:
            return frozenset(), {}
        forward, backward = self.plan.outlines[Phase.FORWARD], self.plan.outlines[Phase.BACKWARD]
        room = {
            phase: Room(self.memory.used(phase, frozenset(), reductions, gathers.get(phase, {})), bound)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        decisions = Decisions(frozenset(), gathers, reductions)
        exposed = {e.bucket: e.exposed for e in self.timeline(decisions).exposures if e.stage is Stage.BACKWARD}
        last = {b: last for use in forward.uses for b, last in zip(use.buckets, use.last, strict=True)}
        first = {b: use.first for use in backward.uses for b in use.buckets}

        def value(bucket: int) -> tuple[float, float, int]:
            size, seconds = self._gather_costs[bucket]
            return exposed.get(bucket, 0.0) / size, seconds / size, last[bucket]

        kept: set[int] = set()
        why_not: dict[int, Why] = {}
        for bucket in sorted(sorted(candidates), key=value, reverse=True):
            size = self.context.buckets[bucket].gathered_bytes
            windows = {
                Phase.FORWARD: (last[bucket] + 1, len(forward.segments)),
                Phase.BACKWARD: (0, first[bucket]),
            }
            missing = max(room[phase].missing(size, *window) for phase, window in windows.items())
            if missing > 0:
                why_not[bucket] = Why(Limit.BUDGET, missing)
                continue
            for phase, window in windows.items():
                room[phase].take(size, *window)
            kept.add(bucket)
        return frozenset(kept), why_not


def _between(low: int, high: int, count: int) -> list[int]:
    """Return the bounds to try: equal steps, and one more within the first step, where a little memory gains most.

    >>> _between(100, 190, 3)
    [100, 110, 130, 160]
    """
    steps = [low + (high - low) * step // count for step in range(count)]
    return sorted({*steps, low + (high - low) // count**2}) if count else []


def _with_reasons_of_reductions(solution: Solution, largest: Solution) -> Solution:
    """Name the budget as the reason for reductions that are awaited earlier than without a bound on memory."""
    later = largest.decisions.reductions
    reductions = {
        bucket: replace(behind, why=Why(Limit.BUDGET)) if behind.later < later[bucket].later else behind
        for bucket, behind in solution.decisions.reductions.items()
    }
    return replace(solution, decisions=replace(solution.decisions, reductions=reductions))


def _rank(solution: Solution) -> tuple[float, float, int]:
    """Return a sort key: time, then communication, then memory. Times are rounded to ignore tiny differences."""
    timeline = solution.timeline
    sent = sum(exposure.seconds for exposure in timeline.exposures)
    return float(f"{timeline.seconds:.6g}"), float(f"{sent:.6g}"), timeline.peak_bytes


def _key(decisions: Decisions) -> object:
    """Return the parts of decisions that have an effect."""
    gathers = tuple((phase, tuple((b, a.units) for b, a in of.items())) for phase, of in decisions.gathers.items())
    reductions = tuple((bucket, behind.later, behind.packed) for bucket, behind in decisions.reductions.items())
    return decisions.kept, decisions.portions, gathers, reductions
