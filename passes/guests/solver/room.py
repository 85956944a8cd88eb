"""The memory that decisions take in each segment of a graph, and what is left of it below a bound."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np

from mfsdp_compile.runtime.schedule.decisions import Ahead, Behind
from mfsdp_compile.runtime.schedule.phase import Phase

from .step_events import StepOutlines


class SegmentMemory:
    """Bytes in memory in each segment of a graph.

    Args:
        plan: Outlines of the graphs.
        resting: Bytes that a rank holds between steps.
    """

    def __init__(self, plan: StepOutlines, resting: int) -> None:
        self._plan, self._resting = plan, resting
        self._known: dict[object, np.ndarray] = {}

    def used(
        self, phase: Phase, kept: frozenset[int], reductions: Mapping[int, Behind], gathers: Mapping[int, Ahead]
    ) -> np.ndarray:
        """Return the bytes in memory in each segment of a graph, as an array that the caller may change.

        Gathers without an entry in ``gathers`` start at their use.
        """
        laters = tuple(behind.later for behind in reductions.values())
        key = (phase, kept, laters, tuple((bucket, ahead.units) for bucket, ahead in gathers.items()))
        if key not in self._known:
            self._known[key] = self._used(phase, kept, reductions, gathers)
        return self._known[key].copy()

    def _used(
        self, phase: Phase, kept: frozenset[int], reductions: Mapping[int, Behind], gathers: Mapping[int, Ahead]
    ) -> np.ndarray:
        outlines, infos = self._plan.outlines, self._plan.context.buckets
        outline = outlines[phase]
        count = len(outline.segments)
        change = [0] * (count + 1)  # change in bytes at the beginning of each segment

        def take(size: int, begin: int, end: int) -> None:
            if begin < end:
                change[begin] += size
                change[end] -= size

        level = self._resting
        if phase is Phase.BACKWARD and Phase.FORWARD in outlines:
            level += sum(s.saved + s.temporary for s in outlines[Phase.FORWARD].segments)
        rises = []
        for segment in outline.segments:
            rises.append(level + segment.rise)
            level += segment.saved + segment.temporary
        portions = self._plan.portions(kept)
        for i, use in enumerate(outline.uses):
            ahead = gathers[use.buckets[0]].units if use.buckets[0] in gathers else 0
            for bucket, last in zip(use.buckets, use.last, strict=True):
                begin, end = outline.uses[i - ahead].first if i >= ahead else 0, last + 1
                if bucket in kept:
                    begin, end = (0, end) if phase is Phase.BACKWARD else (begin, count)
                take(infos[bucket].gathered_bytes if bucket in kept else infos[bucket].fresh_bytes, begin, end)
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
            # The result of the reduction is allocated when the reduction starts.
            begin = g.begin if g.begin is not None else g.ready
            take(info.fresh_gradient_bytes, begin, end)
            is_stepped = self._plan.context.steps_early and not info.rests_in_host_memory
            take(info.shard_bytes, g.ready, end if is_stepped else count)
        return np.cumsum(np.array(change[:-1], dtype=np.int64)) + np.array(rises, dtype=np.int64)


class Room:
    """Memory left below a bound, by segment of a graph.

    Args:
        used: Bytes in memory in each segment; the room changes them.
        bound: The bound in bytes; None: there is none.
    """

    def __init__(self, used: np.ndarray, bound: int | None) -> None:
        self.used, self.bound = used, bound

    def take(self, size: int, begin: int, end: int) -> None:
        self.used[begin:end] += size

    def missing(self, size: int, begin: int, end: int) -> int:
        """Return the bytes missing for ``size`` more bytes in the segments ``[begin, end)``; 0 or less: they fit."""
        if self.bound is None or begin >= end:
            return 0
        return int(self.used[begin:end].max()) + size - self.bound

    def earliest(self, firsts: Sequence[int], i: int, wish: int, size: int) -> tuple[int, int]:
        """Take memory for gather ``i``, from the earliest possible use on.

        Args:
            firsts: Segment of each use of the graph.
            i: Index of the gather.
            wish: Index of the use from which on memory is wanted; -1: the beginning of the graph.
            size: Bytes of the gather.

        Returns:
            Index of the use from which on there is memory, not before ``wish``; and the bytes missing to start one use
            earlier, 0 if the wish is met.
        """
        begin, end = firsts[wish] if wish >= 0 else 0, firsts[i]
        start, missing = wish, 0
        if self.bound is not None:
            (full,) = (self.used[begin:end] > self.bound - size).nonzero()
            if full.size:
                start = bisect_right(firsts, begin + int(full[-1]))
                begin, before = firsts[start], firsts[start - 1] if start else 0
                missing = self.missing(size, before, begin)
        self.take(size, begin, end)
        return start, missing
