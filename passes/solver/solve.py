"""Finding a schedule: as fast as the memory budget allows.

What can be chosen: how early each gather starts, which buckets stay gathered for the backward, how late reductions are
awaited. For a bound on memory a schedule is made in one go:

1. Gathers, from the last to the first: each starts as late as still hides it, and not earlier than there is room for it all
   the way to its use. Where a simulation shows it exposed nevertheless (reductions were in its way), earlier.
2. Buckets stay for which there is room, those first whose gathers in backward cost most time per byte. Whether this comes
   before or after 1 is tried.
3. Reductions are awaited later where that saves time.

Bounds are tried between what the smallest schedule needs and what the largest one would take, closer together where memory is
tight; of the schedules that fit into the budget the fastest is chosen, of equally fast ones the one that communicates least.

More memory never makes a step slower: what is made for a bound does not depend on the budget, and a larger budget chooses
among all that a smaller one does. (The budget itself is no bound for that reason: a schedule that is made for 40 GiB would not
be looked at with 41.)

The idea of ranking what stays gathered by time saved per byte is DeepCompile's (https://arxiv.org/abs/2504.09983), which stops
at the first bucket that does not fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..context import Phase
from ..decisions import Ahead, Behind, Decisions, Limit, Why, reductions_later
from .flow import Category
from .outline import Outline, Use
from .simulate import Exposure, OptimizerCost, Stage, Timeline
from .step_events import STAGES, StepOutlines, gathered_bytes

__all__ = ["BudgetError", "Solution", "excess", "explained", "gib", "smallest", "solve"]

_BOUNDS = 12
"""Memory bounds that are tried between the smallest schedule and the largest."""
_ROUNDS = 4
"""Times that gathers which a simulation shows exposed are moved earlier."""


class BudgetError(ValueError):
    """No schedule keeps to the memory budget.

    Args:
        needed: bytes that the smallest schedule has in memory.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Solution:
    """A schedule and what it leads to.

    Args:
        decisions: of it.
        timeline: simulated; without spans.
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
    """The fastest schedule within a budget.

    Args:
        plan: what there is to schedule.
        optimizer: whose state is in memory, and whose step ends the timeline.
        budget: bytes of a rank in all; None: no bound.
        prefetch: how many units ahead gathers start; None: as is best.
        reshard: whether buckets are gathered again in backward, a number of ranks: from portions; None: as is best.
        bounds: memory bounds to try, the same whatever the budget is: more memory is never slower then.
        up_to_budget: try the budget as a bound too: finds with few bounds what is found with many, but a larger budget may be
            slower by a little.
        refusal: how the message begins where there is none; by default it speaks of ``memory_budget``.

    Raises:
        BudgetError: there is none; the message says what is missing and what would help.
    """
    return _Solver(plan, optimizer, prefetch, reshard).solve(budget, bounds, up_to_budget, refusal)


def smallest(
    plan: StepOutlines, optimizer: OptimizerCost, *, prefetch: int | None = None, reshard: bool | int | None = None
) -> Solution:
    """The schedule that takes the least memory; of any batch the same, since nothing of it depends on times."""
    return _Solver(plan, optimizer, prefetch, reshard)._smallest()


def excess(timeline: Timeline, budget: int) -> str:
    """``"71.20 GiB in memory in the backward of layers.3 (...), 1.20 GiB too much"``."""
    made_of = ", ".join(f"{category.value} {gib(size)}" for size, category in _peak_parts(timeline))
    where = f"in the {timeline.peak_stage.value}" + (f" of {timeline.peak_at}" if timeline.peak_at else "")
    return f"{gib(timeline.peak_bytes)} in memory {where} ({made_of}), {gib(timeline.peak_bytes - budget)} too much"


def _peak_parts(timeline: Timeline) -> list[tuple[int, Category]]:
    """What the peak is made of, the most first."""
    return sorted(((size, category) for category, size in timeline.peak_parts.items() if size), reverse=True)


class _Solver:
    def __init__(
        self, plan: StepOutlines, optimizer: OptimizerCost, prefetch: int | None, reshard: bool | int | None
    ) -> None:
        self.plan, self.optimizer, self.prefetch, self.reshard = plan, optimizer, prefetch, reshard
        self.context = plan.context
        self.resting = sum(plan.resting(optimizer).values())
        self.policy = plan.decisions_by_policy()
        self._tried: dict[object, Timeline] = {}
        self._rooms: dict[object, np.ndarray] = {}

    def solve(self, budget: int | None, bounds: int, up_to_budget: bool, refusal: str) -> Solution:
        limit = budget if budget is not None else math.inf
        smallest = self._smallest()
        low = smallest.timeline.peak_bytes
        if low > limit:
            assert budget is not None
            raise BudgetError(self._refusal(smallest.timeline, budget, refusal), low)
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
        """What there would be without a solver, where everything is left to it: the rule of thumb may be better."""
        if self.prefetch is not None or self.reshard is not None:
            return []
        return [Solution(self.policy, self.timeline(self.policy))]

    def timeline(self, decisions: Decisions) -> Timeline:
        key = _key(decisions)
        if key not in self._tried:
            self._tried[key] = self.plan.timeline(decisions, self.optimizer)
        return self._tried[key]

    def _smallest(self) -> Solution:
        """The schedule that takes the least memory."""
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
        """With what is missing for each gather to start a unit earlier."""
        decisions = smallest.decisions
        wanted = self._gathers(budget, decisions.kept, decisions.reductions, {})
        gathers = {
            phase: {
                bucket: replace(ahead, why=wanted[phase][bucket].why)
                if bucket in wanted[phase] and wanted[phase][bucket].units == ahead.units
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

    def _reductions(self, in_flight: int, by_bucket: bool = False) -> dict[int, Behind]:
        """With those of so many units, or of so many buckets, under way."""
        backward = self.plan.outlines.get(Phase.BACKWARD)
        reduced = [g.bucket for g in backward.gradients] if backward is not None else []
        overlap = self.context.overlap.reductions
        units = [str(bucket) if by_bucket else self.context.buckets[bucket].unit for bucket in reduced]
        why = Why(Limit.NONE if overlap else Limit.OVERLAP)
        laters = reductions_later(units, in_flight if overlap else 0)
        return {bucket: Behind(later, why) for bucket, later in zip(reduced, laters, strict=True)}

    @functools.cached_property
    def _least_seconds_at_once(self) -> float:
        """Of a step in which computation stands still during each reduction."""
        computed = sum(segment.seconds for outline in self.plan.outlines.values() for segment in outline.segments)
        return computed + sum(e.seconds for e in self._smallest().timeline.exposures if e.what == "reduce")

    # -- schedules for one bound --------------------------------------------------------------------------------------

    def _schedules(self, bound: int | None, fastest: float = math.inf) -> Iterator[Solution]:
        """Those that come into question; their peaks may be above the bound by what a simulation adds.

        Args:
            fastest: seconds of a step that is known already. What cannot be faster is left out.
        """
        overlap = self.context.overlap.reductions
        later = [self._reductions(units) for units in ((1, 2, 4) if overlap else (0,))]
        sooner: list[dict[int, Behind]] = []
        if overlap and bound is not None:  # what is not in flight leaves room for other things
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
        """How early gathers start, one unit earlier than ``before`` for those that came ``late``."""
        found: dict[Phase, dict[int, Ahead]] = {}
        for phase, outline in self.plan.outlines.items():
            uses = self.plan.uses(phase, kept)
            if self.prefetch is not None or not self.context.overlap.gathers:
                limit = Limit.POLICY if self.context.overlap.gathers else Limit.OVERLAP
                units = self.prefetch or 0 if self.context.overlap.gathers else 0
                found[phase] = {bucket: Ahead(units, Why(limit)) for use in uses for bucket in use.buckets}
                continue
            memory = _Room(self, phase, kept, reductions, bound)
            if phase in before:
                came_late = late.get(STAGES[phase], set()) if late is not None else set()
                known = (before[phase][use.buckets[0]] for use in uses)
                wanted = [
                    i - ahead.units - (not came_late.isdisjoint(use.buckets))
                    for i, (use, ahead) in enumerate(zip(uses, known, strict=True))
                ]
            else:
                again = self.plan.portions(kept) if phase is Phase.BACKWARD else frozenset()
                wanted = self._wanted(outline, uses, again)
            starts: list[tuple[int, Why]] = []  # from the last one on
            latest = len(uses)
            for i in range(len(uses) - 1, -1, -1):  # later ones start later
                latest, missing = memory.earliest(uses, i, max(-1, min(wanted[i], latest, i)))
                limit = Limit.BUDGET if missing else Limit.BEGIN if latest < 0 else Limit.NONE
                starts.append((latest, Why(limit, missing)))
            found[phase] = {}
            place, why = -1, Why(Limit.BEGIN)
            for i, use in enumerate(uses):
                if starts[-1 - i][0] >= place:  # else there was less room for the one before it, which starts first
                    place, why = starts[-1 - i]
                found[phase].update((bucket, Ahead(i - place, why)) for bucket in use.buckets)
        return found

    def _without(
        self, kept: frozenset[int], gathers: Mapping[Phase, Mapping[int, Ahead]]
    ) -> dict[Phase, Mapping[int, Ahead]]:
        """The same starts, counted in the units that are left in backward."""
        if not kept:
            return dict(gathers)
        number = {bucket: i for i, use in enumerate(self.plan.uses(Phase.BACKWARD)) for bucket in use.buckets}
        left = self.plan.uses(Phase.BACKWARD, kept)
        found: dict[int, Ahead] = {}
        for i, use in enumerate(left):
            ahead = gathers[Phase.BACKWARD][use.buckets[0]]
            if self.prefetch is None:  # else it is counted in what is gathered
                start = number[use.buckets[0]] - ahead.units
                units = i + 1 if start < 0 else sum(number[other.buckets[0]] >= start for other in left[:i])
                ahead = replace(ahead, units=units)
            found.update((bucket, ahead) for bucket in use.buckets)
        return {**gathers, Phase.BACKWARD: found}

    def _wanted(self, outline: Outline, uses: Sequence[Use], portions: frozenset[int]) -> list[int]:
        """For each gather, from ``portions`` of these buckets, the latest earlier one before whose wait it must start to be
        there in time; -1: as the graph begins."""
        at = [0.0]
        for segment in outline.segments:
            at.append(at[-1] + segment.seconds)
        times = [at[use.first] for use in uses]
        wanted = [0] * len(uses)
        free = math.inf
        for i in range(len(uses) - 1, -1, -1):
            begin = min(times[i], free) - self.plan.gather_seconds(uses[i], portions)
            free = begin
            wanted[i] = max((j for j in range(i + 1) if times[j] <= begin), default=-1)
        return wanted

    def _keep(
        self, bound: int | None, gathers: Mapping[Phase, Mapping[int, Ahead]], reductions: Mapping[int, Behind]
    ) -> tuple[frozenset[int], dict[int, Why]]:
        """Buckets that stay, and why others do not."""
        if self.reshard is not None:
            return self._kept_by_option(), {}
        candidates = self._keepable()
        if not candidates:
            return frozenset(), {}
        forward, backward = self.plan.outlines[Phase.FORWARD], self.plan.outlines[Phase.BACKWARD]
        room = {
            phase: _Room(self, phase, frozenset(), reductions, bound, gathers.get(phase, {}))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
        }
        decisions = Decisions(frozenset(), gathers, reductions)
        exposed = {e.bucket: e.exposed for e in self.timeline(decisions).exposures if e.stage is Stage.BACKWARD}
        last = {b: last for use in forward.uses for b, last in zip(use.buckets, use.last, strict=True)}
        first = {b: use.first for use in backward.uses for b in use.buckets}

        def value(bucket: int) -> tuple[float, float, int]:
            size = max(1, self.context.buckets[bucket].gathered_bytes)
            seconds = self.plan.costs.gather(self.context.buckets[bucket])
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

    def used(
        self, phase: Phase, kept: frozenset[int], reductions: Mapping[int, Behind], gathers: Mapping[int, Ahead]
    ) -> np.ndarray:
        """Bytes that are in memory in each segment of a graph, for the caller to change; gathers that are not among
        ``gathers`` start at their use."""
        laters = tuple(behind.later for behind in reductions.values())
        key = (phase, kept, laters, tuple((bucket, ahead.units) for bucket, ahead in gathers.items()))
        if key not in self._rooms:
            self._rooms[key] = self._used(phase, kept, reductions, gathers)
        return self._rooms[key].copy()

    def _used(
        self, phase: Phase, kept: frozenset[int], reductions: Mapping[int, Behind], gathers: Mapping[int, Ahead]
    ) -> np.ndarray:
        outlines, infos = self.plan.outlines, self.context.buckets
        outline = outlines[phase]
        count = len(outline.segments)
        change = [0] * (count + 1)  # from one segment to the next

        def take(size: int, begin: int, end: int) -> None:
            if begin < end:
                change[begin] += size
                change[end] -= size

        level = self.resting
        if phase is Phase.BACKWARD and Phase.FORWARD in outlines:
            level += sum(s.saved + s.temporary for s in outlines[Phase.FORWARD].segments)
        rises = []
        for segment in outline.segments:
            rises.append(level + segment.rise)
            level += segment.saved + segment.temporary
        portions = self.plan.portions(kept)
        for i, use in enumerate(outline.uses):
            ahead = gathers[use.buckets[0]].units if use.buckets[0] in gathers else 0
            for bucket, last in zip(use.buckets, use.last, strict=True):
                begin, end = outline.uses[i - ahead].first if i >= ahead else 0, last + 1
                if bucket in kept:
                    begin, end = (0, end) if phase is Phase.BACKWARD else (begin, count)
                take(infos[bucket].gathered_bytes, begin, end)
                if bucket in portions:
                    stays = (last + 1, count) if phase is Phase.FORWARD else (0, use.first)
                    take(infos[bucket].portion_bytes, *stays)
        for bucket, (first, last) in outline.wholes.items():
            take(infos[bucket].gathered_bytes, first, last + 1)
        ready = [g.ready for g in outline.gradients]
        for i, g in enumerate(outline.gradients):
            info = infos[g.bucket]
            following = i + reductions[g.bucket].later
            end = ready[following] + 1 if following < len(ready) else count
            # From the start on its result is there too.
            begin = g.begin if g.begin is not None else g.ready
            take(info.layout.numel * info.exchange.comm_dtype.itemsize, begin, end)
            take(info.layout.shard_numel * info.main_dtype.itemsize, g.ready, count)
        return np.cumsum(np.array(change[:-1], dtype=np.int64)) + np.array(rises, dtype=np.int64)

    # -- refusal ------------------------------------------------------------------------------------------------------

    def _refusal(self, smallest: Timeline, budget: int, refusal: str) -> str:
        parts = _peak_parts(smallest)
        help_for = {
            Category.SAVED: "activation checkpointing, or a smaller batch",
            Category.TEMPORARY: "a smaller batch",
            Category.GATHERED: "smaller units (fsdp_unit_modules)",
            Category.GRADIENTS: "smaller units (fsdp_unit_modules)",
            Category.SHARDS: "more ranks to shard over",
            Category.OPTIMIZER: "more ranks to shard over",
        }
        helps = dict.fromkeys(help_for[category] for size, category in parts if size * 10 > smallest.peak_bytes)
        prefetch = f"with prefetch {self.prefetch}" if self.prefetch else "without prefetch"
        again = "what backward needs kept" if self.reshard is False else "every bucket gathered again"
        if not isinstance(self.reshard, bool) and self.reshard is not None:
            again = f"one of {self.reshard} portions of what backward needs kept"
        return (
            f"{refusal or f'memory_budget of {gib(budget)} cannot be kept'}: the smallest schedule, {prefetch} and with {again}, has "
            f"{excess(smallest, budget)}. What would help: {'; '.join(helps)}."
        )


def _between(low: int, high: int, count: int) -> list[int]:
    """Bounds that are tried: equal steps, and one more in the first of them, where a little memory gains most.

    >>> _between(100, 190, 3)
    [100, 110, 130, 160]
    """
    steps = [low + (high - low) * step // count for step in range(count)]
    return sorted({*steps, low + (high - low) // count**2}) if count else []


class _Room:
    """Memory that is left in a graph, by segment, below a bound.

    Args:
        gathers: what has been decided about gathers; they take their room.
    """

    def __init__(
        self,
        solver: _Solver,
        phase: Phase,
        kept: frozenset[int],
        reductions: Mapping[int, Behind],
        bound: int | None,
        gathers: Mapping[int, Ahead] | None = None,
    ) -> None:
        self.bound, self.context = bound, solver.context
        self.used = solver.used(phase, kept, reductions, gathers or {})

    def take(self, size: int, begin: int, end: int) -> None:
        self.used[begin:end] += size

    def missing(self, size: int, begin: int, end: int) -> int:
        """Bytes that are missing for ``size`` more in the segments ``[begin, end)``; negative, or 0: none."""
        if self.bound is None or begin >= end:
            return 0
        return int(self.used[begin:end].max()) + size - self.bound

    def earliest(self, uses: Sequence[Use], i: int, wish: int) -> tuple[int, int]:
        """From which earlier use on there is room for gather ``i``, not before ``wish`` (-1: the beginning); and what is
        missing for one earlier. Takes the room."""
        size = gathered_bytes(uses[i], self.context)
        start, missing = i, 0
        while start > wish:
            missing = self.missing(size, uses[start - 1].first if start else 0, uses[i].first)
            if missing > 0:
                break
            start, missing = start - 1, 0
        self.take(size, uses[start].first if start >= 0 else 0, uses[i].first)
        return start, max(missing, 0)


def _with_reasons_of_reductions(solution: Solution, largest: Solution) -> Solution:
    """With what keeps reductions from being awaited as late as they are where memory is no matter."""
    later = largest.decisions.reductions
    reductions = {
        bucket: replace(behind, why=Why(Limit.BUDGET)) if behind.later < later[bucket].later else behind
        for bucket, behind in solution.decisions.reductions.items()
    }
    return replace(solution, decisions=replace(solution.decisions, reductions=reductions))


def _rank(solution: Solution) -> tuple[float, float, int]:
    """Fast, then little communication, then little memory. Times are rounded: what differs by less is equal."""
    timeline = solution.timeline
    sent = sum(exposure.seconds for exposure in timeline.exposures)
    return float(f"{timeline.seconds:.6g}"), float(f"{sent:.6g}"), timeline.peak_bytes


def _key(decisions: Decisions) -> object:
    """What of decisions has an effect."""
    gathers = tuple((phase, tuple((b, a.units) for b, a in of.items())) for phase, of in decisions.gathers.items())
    reductions = tuple((bucket, behind.later, behind.packed) for bucket, behind in decisions.reductions.items())
    return decisions.kept, decisions.portions, gathers, reductions


def gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):.2f} MiB"


# -- why is it exposed ------------------------------------------------------------------------------------------------


def explained(timeline: Timeline, decisions: Decisions, phases: Mapping[Stage, Phase]) -> Timeline:
    """The timeline with a reason for everything that is exposed, from what was recorded when it was decided.

    Args:
        phases: the graphs that ran, by stage.
    """
    return replace(
        timeline,
        exposures=[replace(e, reason=_reason(e, decisions, phases)) if e.exposed else e for e in timeline.exposures],
    )


def _reason(exposure: Exposure, decisions: Decisions, phases: Mapping[Stage, Phase]) -> str:
    if exposure.what == "reduce":
        behind = decisions.reductions.get(exposure.bucket)
        why = behind.why if behind is not None else None
    else:
        aheads = decisions.gathers.get(phases[exposure.stage], {})
        ahead = aheads.get(exposure.bucket)
        why = ahead.why if ahead is not None else None
        not_kept = decisions.why_not_kept.get(exposure.bucket)
        if exposure.stage is Stage.BACKWARD and not_kept is not None and (why is None or why.limit is not Limit.BUDGET):
            why = not_kept
    if why is not None and why.limit is Limit.BUDGET:
        return f"limited by memory budget (needs {gib(why.bytes)})" if why.bytes else "limited by memory budget"
    if why is not None and why.limit is Limit.OVERLAP:
        return why.limit.value
    if exposure.queued > exposure.exposed / 2:
        return f"the network is busy: it waited {_ms(exposure.queued)} for others"
    what = "before" if exposure.what == "gather" else "after"
    if exposure.ahead < exposure.seconds / 20:
        return f"nothing is computed {what} it"
    if why is not None and why.limit in _CHOSEN:
        return f"limited by {why.limit.value}: {_ms(exposure.ahead)} of computation for {_ms(exposure.seconds)}"
    return f"bandwidth: {_ms(exposure.ahead)} of computation {what} it for {_ms(exposure.seconds)} of communication"


_CHOSEN = (Limit.POLICY, Limit.SIZE, Limit.IN_FLIGHT, Limit.IN_FLIGHT_SIZE, Limit.FILE)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
