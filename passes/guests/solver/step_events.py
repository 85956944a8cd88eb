"""Turn outlines and decisions into the events of a step, for the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property

from mfsdp_compile.runtime.schedule.decisions import (
    Behind,
    Decisions,
    gather_by_policy,
    kept_by_policy,
    reductions_by_policy,
)
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.text import ScheduleLine

from ...context import BucketInfo, Context
from .costs import CostModel
from .flow import Category, gather_of, reduction_of
from .outline import Gradients, Outline, Use, grouped
from .simulate import (
    Allocate,
    Compute,
    Enter,
    Event,
    Free,
    OptimizerCost,
    Stage,
    Start,
    StartCopy,
    StepBucket,
    Timeline,
    Turn,
    Wait,
    WaitCopy,
    resting_memory,
    simulate,
)

STAGES = {Phase.FORWARD: Stage.FORWARD, Phase.BACKWARD: Stage.BACKWARD, Phase.INFERENCE: Stage.FORWARD}
PHASES = {Stage.FORWARD: Phase.FORWARD, Stage.BACKWARD: Phase.BACKWARD}
"""Graph of each stage of a training step that runs one."""


_Reductions = tuple[Sequence[tuple[int, Event]], Sequence[tuple[int, list[Event]]], list[Event]]
"""Events of reductions before a segment, after a segment, and at the end of the graph."""


def gathered_bytes(use: Use, context: Context) -> int:
    """Return the gathered bytes of the buckets of a use."""
    return sum(context.buckets[bucket].gathered_bytes for bucket in use.buckets)


class StepOutlines:
    """Outlines of the graphs of a step, with the costs of their collectives.

    Args:
        outlines: Outlines of forward and backward, or of an inference graph.
        context: Context of the graphs.
        costs: Cost model of this machine.
    """

    def __init__(self, outlines: Mapping[Phase, Outline], context: Context, costs: CostModel) -> None:
        self.outlines = {phase: outlines[phase] for phase in Phase if phase in outlines}  # in the order of a step
        self.context, self.costs = context, costs
        buckets = context.buckets
        self._gathers = {
            (number, portions): gather_of(info, number, costs, portions)
            for number, info in enumerate(buckets)
            for portions in ((False, True) if info.portion_size else (False,))
            if info.exchange.gather_group
        }
        self._stages = {
            (number, copied): [
                reduction_of(info, number, stage, costs, copied) for stage in range(len(info.exchange.lane.reduction))
            ]
            for number, info in enumerate(buckets)
            if info.trainable
            for copied in (False, True)
        }
        backward = self.outlines.get(Phase.BACKWARD)
        reduced = [g.bucket for g in backward.gradients] if backward is not None else []
        behinds = reductions_by_policy(
            context.policy, [buckets[bucket] for bucket in reduced], context.overlap.reductions
        )
        self._reductions_by_policy = dict(zip(reduced, behinds, strict=True))
        self._placed: dict[object, _Reductions] = {}
        self._uses: dict[frozenset[int], Sequence[Use]] = {}  # of the backward, by what it keeps
        self._resting: dict[OptimizerCost, Mapping[Category, int]] = {}
        self._segments = {phase: self._of_segments(outline) for phase, outline in outlines.items()}
        self._starts: dict[tuple[int, bool], list[Event]] = {}
        self._waits: dict[tuple[int, bool], list[Event]] = {}
        for (number, portions), gather in self._gathers.items():
            info = buckets[number]
            # If a cast or a copy of the shard is sent, it is allocated here. A portion exists since the forward.
            is_made = gather.before
            sent = info.layout.shard_numel * info.exchange.sent.dtype.itemsize if is_made else 0
            cast: list[Event] = [Allocate(Category.GATHERED, sent)] if sent else []
            if portions:
                sent = info.portion_bytes
            gone: list[Event] = [Free(Category.GATHERED, sent)] if sent else []
            whole = Allocate(Category.GATHERED, info.fresh_bytes)
            at_start, at_wait = ([], gone) if costs.holds_inputs else (gone, [])
            if (received := info.in_flight_bytes) and not portions:
                self._starts[number, portions] = [Allocate(Category.GATHERED, received), Start(gather)]
                self._waits[number, portions] = [whole, Wait(gather), Free(Category.GATHERED, received)]
                continue
            self._starts[number, portions] = [*cast, whole, Start(gather), *at_start]
            self._waits[number, portions] = [Wait(gather), *at_wait]

    def uses(self, phase: Phase, kept: Set[int] = frozenset()) -> Sequence[Use]:
        """Return the gathers of a graph if the ``kept`` buckets stay gathered from forward to backward."""
        uses = self.outlines[phase].uses
        if phase is not Phase.BACKWARD or not kept:
            return uses
        kept = frozenset(kept)
        if kept not in self._uses:  # many of the tried schedules keep the same
            lives = (life for use in uses for life in use.lives if life[0] not in kept)
            self._uses[kept] = grouped(lives, self.context)
        return self._uses[kept]

    def gather_seconds(self, use: Use, portions: Set[int] = frozenset()) -> float:
        """Return the seconds to gather a unit's buckets, of which those in ``portions`` are gathered from portions."""
        return sum(self._gathers[bucket, bucket in portions].seconds for bucket in use.buckets)

    @cached_property
    def in_both(self) -> frozenset[int]:
        """Buckets that forward gathers and backward gathers again."""
        if Phase.FORWARD not in self.outlines or Phase.BACKWARD not in self.outlines:
            return frozenset()
        both = ({b for use in self.outlines[p].uses for b in use.buckets} for p in (Phase.FORWARD, Phase.BACKWARD))
        return frozenset(set.intersection(*both))

    def portions(self, kept: Set[int]) -> frozenset[int]:
        """Return the buckets of which a portion stays for the backward, if the ``kept`` buckets stay whole."""
        return frozenset(bucket for bucket in self.in_both - kept if self.context.buckets[bucket].portion_size)

    def decisions_by_policy(self) -> Decisions:
        """Return the decisions of the policy, without a solver."""
        context, kept = self.context, self._kept_by_policy()
        gathers = {
            phase: {
                bucket: gather_by_policy(context.policy, gathered_bytes(use, context), context.overlap.gathers)
                for use in self.uses(phase, kept)
                for bucket in use.buckets
            }
            for phase in self.outlines
        }
        return Decisions(kept, gathers, self._reductions_by_policy, portions=self.portions(kept))

    def _kept_by_policy(self) -> frozenset[int]:
        forward, backward = self.outlines.get(Phase.FORWARD), self.outlines.get(Phase.BACKWARD)
        if forward is None or backward is None:
            return frozenset()
        last_used = {bucket: last for use in forward.uses for bucket, _, last in use.lives}
        needed = {bucket: first for use in backward.uses for bucket, first, _ in use.lives}
        return kept_by_policy(self.context.policy, self.context.whole_model, last_used, needed, self.context.buckets)

    def resting(self, optimizer: OptimizerCost) -> Mapping[Category, int]:
        """Return the bytes that a rank holds between steps, without gradients, by category."""
        if optimizer not in self._resting:
            self._resting[optimizer] = resting_memory(self.context.buckets, optimizer, self.context.other_bytes)
        return self._resting[optimizer]

    def timeline(self, decisions: Decisions, optimizer: OptimizerCost, *, details: bool = False) -> Timeline:
        """Simulate a step with these decisions.

        Args:
            details: Whether to record spans and memory over time, not only sums.
        """
        events, resting = self.events(decisions), self.resting(optimizer)
        return simulate(events, self.context, self.costs, resting, optimizer, details=details)

    # -- events -------------------------------------------------------------------------------------------------------

    def events(self, decisions: Decisions) -> dict[Stage, list[Event]]:
        """Return the events of all graphs, in order."""
        return {STAGES[phase]: self._events(phase, decisions) for phase in self.outlines}

    def turns(
        self, decisions: Decisions, order: Iterable[Phase], received: int = 0, sent: int = 0, held: bool = True
    ) -> list[Turn]:
        """Return the forwards and backwards of several microbatches of one step.

        Gradients are accumulated unsharded and reduced in the last backward.

        Args:
            order: Forwards and backwards, one of each for every microbatch.
            received: Bytes of the input of a forward, which its backward needs.
            sent: Bytes of the output of a forward. The output's gradient has the same size.
            held: True: the output stays in memory until its backward has finished, and memory for all inputs and
                gradients of outputs is preallocated. False: the output is released when it has been sent, and inputs
                and gradients of outputs are allocated when they arrive. Only the gradient of the input stays to the
                end.
        """
        order = list(order)
        last = len(order) - 1 - order[::-1].index(Phase.BACKWARD)
        found: list[Turn] = []
        made: dict[object, list[Event]] = {}
        into, out = Allocate(Category.TEMPORARY, received), Free(Category.TEMPORARY, sent)
        arrives: dict[Phase, list[Event]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
        goes: dict[Phase, list[Event]] = {Phase.FORWARD: [], Phase.BACKWARD: [out]}
        if not held:
            arrives = {Phase.FORWARD: [into], Phase.BACKWARD: [Allocate(Category.TEMPORARY, sent)]}
            # The backward releases the input, but the input's gradient of the same size stays.
            goes = {Phase.FORWARD: [out], Phase.BACKWARD: [out]}
        begins = True
        for place, phase in enumerate(order):
            key = phase, phase is Phase.BACKWARD and (begins, place == last)
            if key not in made:
                events = self._events(phase, decisions, begins, place == last)
                made[key] = [*arrives[phase], *events, *goes[phase]]
            begins = begins and phase is Phase.FORWARD
            found.append(Turn(STAGES[phase], made[key]))
        return found

    def _events(self, phase: Phase, decisions: Decisions, begins: bool = True, ends: bool = True) -> list[Event]:
        """Return the events of one graph.

        Args:
            begins: Whether no gradients of earlier microbatches have been accumulated.
            ends: Whether accumulated gradients are reduced.
        """
        outline = self.outlines[phase]
        count = len(outline.segments)
        before: list[list[Event]] = [[] for _ in range(count + 1)]  # by segment; the last entry: at the end
        after: list[list[Event]] = [[] for _ in range(count + 1)]
        kept = decisions.kept if phase in (Phase.FORWARD, Phase.BACKWARD) else frozenset()
        self._place_gathers(phase, self.uses(phase, kept), kept, decisions, before, after)
        if phase is Phase.BACKWARD:
            for use in outline.uses:
                for bucket, last in zip(use.buckets, use.last, strict=True):
                    if bucket in kept:
                        after[last].append(Free(Category.GATHERED, self.context.buckets[bucket].gathered_bytes))
        for bucket, (first, last) in outline.wholes.items():
            size = self.context.buckets[bucket].gathered_bytes
            before[first].append(Allocate(Category.GATHERED, size))
            after[last].append(Free(Category.GATHERED, size))
        for copies in outline.copies:
            before[copies.start].append(StartCopy(copies))
            before[copies.wait].append(WaitCopy(copies))
        self._place_reductions(outline.gradients, decisions, (begins, ends), before, after)
        events: list[Event] = []
        for earlier, segment, later in zip(before, self._segments[phase], after, strict=False):
            events += [*earlier, *segment, *later]
        return events + before[-1]

    def _of_segments(self, outline: Outline) -> list[list[Event]]:
        """Return the events of each segment, without those of collectives."""
        units: dict[str, list[Event]] = {}
        for number, info in enumerate(self.context.buckets):
            units.setdefault(info.unit, []).append(Enter(number))
        found: list[list[Event]] = []
        current = None
        for unit, segment in zip(outline.units, outline.segments, strict=True):
            events: list[Event] = list(units.get(unit, ())) if unit != current else []
            current = unit
            if segment.rise:
                events.append(Allocate(Category.TEMPORARY, segment.rise))
            events.append(Compute(segment.seconds, segment.flops))
            if segment.rise:
                events.append(Free(Category.TEMPORARY, segment.rise))
            net = [(segment.saved, Category.SAVED), (segment.temporary, Category.TEMPORARY)]
            events += [Free(category, -size) for size, category in net if size < 0]  # first, as the rise includes both
            events += [Allocate(category, size) for size, category in net if size > 0]
            found.append(events)
        return found

    def _place_gathers(
        self,
        phase: Phase,
        uses: Sequence[Use],
        kept: Set[int],
        decisions: Decisions,
        before: list[list[Event]],
        after: list[list[Event]],
    ) -> None:
        context = self.context
        portions = decisions.portions or frozenset()
        again = portions if phase is Phase.BACKWARD else frozenset()
        leaves = portions if phase is Phase.FORWARD else frozenset()
        starts: list[list[Use]] = [[] for _ in range(len(uses) + 1)]  # by use before whose wait; last entry: at once
        decided = decisions.gathers.get(phase, {})
        for i, use in enumerate(uses):
            ahead = decided.get(use.buckets[0])
            if ahead is None:
                size = gathered_bytes(use, context)
                ahead = decisions.gather(phase, use.buckets, size, context.policy, context.overlap.gathers)
            starts[max(i - ahead.units, -1)].append(use)
        for i, started in [(-1, starts[-1]), *enumerate(starts[:-1])]:
            place = uses[i].first if i >= 0 else 0
            for use in started:
                for bucket in use.buckets:
                    before[place] += self._starts[bucket, bucket in again]
            for bucket, first, last in uses[i].lives if i >= 0 else ():
                before[first] += self._waits[bucket, bucket in again]
                info = context.buckets[bucket]
                if bucket in leaves:
                    copied = Compute(self.costs.moved(2 * info.portion_bytes), 0.0)
                    after[last] += [Allocate(Category.GATHERED, info.portion_bytes), copied]
                if bucket not in kept:
                    after[last].append(Free(Category.GATHERED, info.fresh_bytes))
                elif info.fresh_bytes < info.gathered_bytes:  # what outlives the graph gets memory of its own
                    before[first].append(Allocate(Category.GATHERED, info.gathered_bytes))

    def _place_reductions(
        self,
        gradients: Sequence[Gradients],
        decisions: Decisions,
        sums: tuple[bool, bool],
        before: list[list[Event]],
        after: list[list[Event]],
    ) -> None:
        hows = [decisions.reductions.get(g.bucket) or self._reductions_by_policy[g.bucket] for g in gradients]
        key = sums, tuple((how.later, how.packed) for how in hows)
        if key not in self._placed:  # many of the tried schedules differ only in their gathers
            self._placed[key] = self._reductions(gradients, hows, *sums)
        packed, others, at_end = self._placed[key]
        for segment, allocated in packed:
            before[segment].append(allocated)
        for segment, events in others:
            after[segment] += events
        before[-1] += at_end

    def _reductions(
        self, gradients: Sequence[Gradients], hows: Sequence[Behind], begins: bool, ends: bool
    ) -> _Reductions:
        context = self.context
        # starts: events at the start of each reduction. ahead: events right before it is packed; the last entry: at the
        # end. behind: events right after it has started.
        starts: list[list[Event]] = [[] for _ in gradients]
        ahead: list[list[Event]] = [[] for _ in range(len(gradients) + 1)]
        behind: list[list[Event]] = [[] for _ in gradients]
        on_host: list[Event] = []  # steps over the last bucket in host memory, before the next gradient is copied there
        for i, (g, how) in enumerate(zip(gradients, hows, strict=True)):
            info = context.buckets[g.bucket]
            stages = self._stages[g.bucket, g.begin is None or g.elsewhere > 0]
            lane, held = info.exchange.lane, info.layout.numel * info.exchange.comm_dtype.itemsize
            fresh = info.fresh_gradient_bytes
            place = starts[i]
            if lane.waits_whole:
                place += self._waiting(info, begins, ends)
                if not ends:
                    continue
            for stage, collective in enumerate(stages):
                flight = lane.reduction[stage]
                copied = lane.spec(flight.part, flight.index).bytes if flight.before else 0
                result = lane.flight_spec(flight.part, flight.index).bytes
                place += [Allocate(Category.GRADIENTS, result + copied), Start(collective)]
                if not self.costs.holds_inputs:
                    place.append(Free(Category.GRADIENTS, fresh))
                following = i + how.later * (stage + 1)
                if following >= len(gradients):
                    place = ahead[-1]
                else:
                    place = ahead[following] if how.packed and following > i else behind[following]
                place += [Wait(collective), Free(Category.GRADIENTS, copied)]
                for part, index in flight.after:  # such as sums of slices
                    if not lane[part][index].inlined:
                        flown, result = result, lane.spec(part, index + 1).bytes
                        place += [Allocate(Category.GRADIENTS, result), Free(Category.GRADIENTS, flown)]
                if self.costs.holds_inputs:
                    place.append(Free(Category.GRADIENTS, fresh))
                held = fresh = result
            steps = ends and context.steps_early
            if steps and info.rests_in_host_memory:
                place += on_host
                on_host = [StepBucket(g.bucket)]
            final = Allocate(Category.GRADIENTS, info.device_gradient_bytes)
            if seconds := self.costs.finish(info):
                place += [final, Compute(seconds, 0.0), Free(Category.GRADIENTS, held)]
            else:
                place += [Free(Category.GRADIENTS, held), final]
            if not begins and not lane.waits_whole:  # added to the existing gradient
                place.append(Free(Category.GRADIENTS, final.bytes))
            if steps and not info.rests_in_host_memory:
                place += [StepBucket(g.bucket), Free(Category.GRADIENTS, final.bytes)]
        ahead[-1] += on_host
        packed: list[tuple[int, Event]] = []
        others: list[tuple[int, list[Event]]] = []
        for i, g in enumerate(gradients):
            info = context.buckets[g.bucket]
            bucket = Allocate(Category.GRADIENTS, info.fresh_gradient_bytes)
            if g.begin is not None:
                packed.append((g.begin, bucket))
            pack: list[Event] = [bucket] if g.begin is None else []
            if g.elsewhere:
                pack.append(Free(Category.TEMPORARY, g.elsewhere))
            others.append((g.ready, [*ahead[i], *pack, *starts[i], *behind[i]]))
        return packed, others, ahead[-1]

    def _waiting(self, info: BucketInfo, begins: bool, ends: bool) -> list[Event]:
        """Return the events that accumulate packed gradients. If ``ends``, they leave the sum ready for reduction."""
        packed = info.layout.numel * info.exchange.comm_dtype.itemsize
        total = info.layout.numel * info.grad_dtype.itemsize
        if begins and ends:
            return []
        if begins:
            copied = Compute(self.costs.moved(packed + total), 0.0)
            return [Allocate(Category.GRADIENTS, total), copied, Free(Category.GRADIENTS, packed)]
        events: list[Event] = [Compute(self.costs.moved(packed + 2 * total), 0.0), Free(Category.GRADIENTS, packed)]
        if ends and info.grad_dtype != info.exchange.comm_dtype:
            cast = Compute(self.costs.moved(packed + total), 0.0)
            events += [Allocate(Category.GRADIENTS, packed), cast, Free(Category.GRADIENTS, total)]
        return events

    def lines(self, decisions: Decisions) -> dict[Phase, list[str]]:
        """Return the starts and waits in order, one line each, by graph."""
        names = [info.name for info in self.context.buckets]
        found: dict[Phase, list[str]] = {}
        for phase in self.outlines:
            lines = found.setdefault(phase, [])
            portions = (decisions.portions or frozenset()) if phase is Phase.BACKWARD else frozenset()
            for event in self._events(phase, decisions):
                if isinstance(event, (Start, Wait)):
                    collective = event.collective
                    what, number = collective.what, collective.stage + 1
                    if isinstance(event, Wait):
                        what = "wait" if what == "gather" else "await"
                    if what == "gather" and collective.bucket in portions:
                        number = self.context.buckets[collective.bucket].portion_size
                    lines.append(str(ScheduleLine(what, names[collective.bucket], number)))
        return found
