"""Summary of an unscheduled graph: computation in segments, and the places where each bucket is needed.

A flow (:mod:`.flow`) has thousands of kernels and storages. A schedule depends on only a few places among them: the
first and last use of each bucket, and the point where its gradients are complete. An outline has one segment between
each two such places, with its time and its effect on memory. Trying a schedule on an outline takes about a millisecond.
The outline of a model with 126 equal layers can be made from four of them (:mod:`mfsdp_compile.planning`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ...context import Context
from .flow import Category, Flow, Placed, SavedCopy


@dataclass(frozen=True)
class Segment:
    """Computation between two places where something may start or end.

    Args:
        seconds: Time of the segment.
        flops: Floating-point operations of its matrix products.
        rise: Peak bytes in memory, relative to the beginning of the segment.
        saved: Net change in bytes of values saved for backward, over the segment.
        temporary: Net change in bytes of all other memory, without gathered buckets and buckets of gradients.
    """

    seconds: float
    flops: float
    rise: int
    saved: int
    temporary: int


@dataclass(frozen=True)
class Use:
    """Gathers of one unit: those of its buckets that are used before the buckets of another unit.

    Args:
        buckets: Indices of the buckets in the context.
        first: Segment before which the first bucket is needed.
        last: For each bucket, the segment after which it may be released.
        waits: For each bucket, the segment before which it is awaited; empty: ``first`` for all.
    """

    buckets: tuple[int, ...]
    first: int
    last: tuple[int, ...]
    waits: tuple[int, ...] = ()

    @property
    def lives(self) -> list[tuple[int, int, int]]:
        """Each bucket, the segment before which it is awaited, and the segment after which it may be released."""
        return list(zip(self.buckets, self.waits or (self.first,) * len(self.buckets), self.last, strict=True))


@dataclass(frozen=True)
class Gradients:
    """A bucket of gradients.

    Args:
        bucket: Index of the bucket in the context.
        begin: Segment that computes the first gradient directly in the bucket; None if all gradients are computed
            elsewhere and copied.
        ready: Segment that computes the last gradient.
        elsewhere: Bytes of gradients outside the bucket, which are released once they have been copied.
    """

    bucket: int
    begin: int | None
    ready: int
    elsewhere: int


@dataclass(frozen=True)
class Copies:
    """Copies of saved values to host memory or back that start and end together.

    Args:
        outward: Whether they go to host memory.
        start, wait: Segments before which they are started and awaited. The number of segments: at the end.
        bytes: Their size.
        seconds: Their time alone on the link.
    """

    outward: bool
    start: int
    wait: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Outline:
    """Outline of one graph.

    Args:
        segments: Segments in order.
        units: For each segment, the unit whose parameters it uses.
        uses: Gathers that communicate, in order of first use.
        wholes: First and last segment of buckets that are whole without a gather and only cast, by bucket.
        gradients: Buckets of gradients, in order of the segments that complete them.
        copies: Copies of saved values.
    """

    segments: tuple[Segment, ...]
    units: tuple[str, ...]
    uses: tuple[Use, ...] = ()
    wholes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    gradients: tuple[Gradients, ...] = ()
    copies: tuple[Copies, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes of the values that go to host memory."""
        return sum(copies.bytes for copies in self.copies if copies.outward)


def outline_of(flow: Flow, context: Context) -> Outline:
    """Return the outline of a flow. It records when collectives are needed, not where the graph has them now."""
    return _Outliner(flow, context).outline()


def grouped(lives: Iterable[tuple[int, int, int]], context: Context) -> list[Use]:
    """Group buckets by unit.

    Args:
        lives: Index, segment of the first use and segment of the last use of each bucket, in order of first use.
        context: Context of the graph.
    """
    of_units = itertools.groupby(lives, key=lambda life: context.buckets[life[0]].unit)
    found = []
    for _, together in of_units:
        buckets, waits, last = zip(*together, strict=True)
        found.append(Use(buckets, waits[0], last, waits))
    return found


_AFTER = 0.125
"""Offset to a place right after another one. Places are multiples of one half."""


class _Outliner:
    def __init__(self, flow: Flow, context: Context) -> None:
        self.flow, self.context = flow, context
        self.gathers = sorted((p for p in flow.collectives if p.collective.what == "gather"), key=lambda p: p.first_use)
        self.reductions = [p for p in flow.collectives if p.collective.what == "reduce" and p.collective.stage == 0]
        gathered = {placed.collective.bucket for placed in self.gathers}
        self.begins: dict[int, float] = {}  # where buckets begin whose gradients are computed in place
        self.casts: dict[int, tuple[float, float]] = {}  # lifetimes of buckets that are whole without a gather
        packs = {placed.collective.bucket: placed for placed in self.reductions}
        for storage in flow.storages:
            bucket = storage.bucket
            if bucket is None or storage.end is None:
                continue
            if storage.category is Category.GRADIENTS and bucket in packs and storage.begin <= packs[bucket].ready:
                self.begins[bucket] = min(self.begins.get(bucket, storage.begin), storage.begin)
            elif storage.category is Category.GATHERED and bucket not in gathered:
                self.casts[bucket] = (storage.begin, storage.end)
        computed = [
            (kernel, s) for kernel, s in zip(flow.kernels, flow.seconds, strict=True) if kernel.finishes is None
        ]
        self.kernels, self.seconds = [kernel for kernel, _ in computed], [seconds for _, seconds in computed]
        self.places = [kernel.place for kernel in self.kernels]

    def outline(self) -> Outline:
        if not self.places:
            return Outline((), ())
        borders = {p.first_use for p in self.gathers} | {p.last_use + _AFTER for p in self.gathers}
        borders |= {p.ready + _AFTER for p in self.reductions} | set(self.begins.values())
        borders |= {begin for begin, _ in self.casts.values()} | {end + _AFTER for _, end in self.casts.values()}
        borders |= {place for place, _ in self.flow.uses}
        borders |= {place for copy in self.flow.copies for place in (copy.start, copy.wait)}
        self.starts = sorted({bisect_left(self.places, border) for border in borders} - {len(self.places)} | {0})
        gradients = sorted((self._gradients(placed) for placed in self.reductions), key=lambda g: g.ready)
        wholes = {bucket: (self._at(begin), self._before(end)) for bucket, (begin, end) in self.casts.items()}
        return Outline(
            tuple(self._segments()), self._units(), tuple(self._uses()), wholes, tuple(gradients), tuple(self._copies())
        )

    def _at(self, place: float) -> int:
        """Return the segment of the first kernel at or after this place."""
        return bisect_right(self.starts, min(bisect_left(self.places, place), len(self.places) - 1)) - 1

    def _before(self, place: float) -> int:
        """Return the segment of the last kernel at or before this place."""
        return bisect_right(self.starts, max(bisect_right(self.places, place) - 1, 0)) - 1

    def _units(self) -> tuple[str, ...]:
        first = [(self._at(place), self.context.buckets[bucket].unit) for place, bucket in self.flow.uses]
        units, current = [], first[0][1] if first else ""
        for number in range(len(self.starts)):
            while first and first[0][0] <= number:
                current = first.pop(0)[1]
            units.append(current)
        return tuple(units)

    def _uses(self) -> list[Use]:
        lives = [(p.collective.bucket, self._at(p.first_use), self._before(p.last_use)) for p in self.gathers]
        return grouped(lives, self.context)

    def _copies(self) -> Iterator[Copies]:
        together: dict[tuple[bool, int, int], list[SavedCopy]] = {}
        for copy in self.flow.copies:
            start, wait = (
                bisect_right(self.starts, first) - 1
                if (first := bisect_left(self.places, place)) < len(self.places)
                else len(self.starts)
                for place in (copy.start, copy.wait)
            )
            together.setdefault((copy.outward, start, wait), []).append(copy)
        for (outward, start, wait), copies in sorted(together.items(), key=lambda item: item[0][1:]):
            size, seconds = sum(copy.bytes for copy in copies), sum(copy.seconds for copy in copies)
            yield Copies(outward, start, wait, size, seconds)

    def _gradients(self, placed: Placed) -> Gradients:
        bucket = placed.collective.bucket
        begin = self._at(self.begins[bucket]) if bucket in self.begins else None
        return Gradients(bucket, begin, self._before(placed.ready), sum(s.bytes for s in placed.copied))

    def _segments(self) -> Iterator[Segment]:
        copied = {storage for placed in self.reductions for storage in placed.copied}
        changes: list[tuple[int, int, Category, int]] = []  # kernel, order within the kernel, category, bytes
        count = len(self.places)
        for storage in self.flow.storages:
            if storage.bucket is not None or storage.category is Category.GRADIENTS:
                continue
            saved = storage.category is Category.SAVED
            category = Category.SAVED if saved else Category.TEMPORARY
            if storage.begin >= 0:
                changes.append((min(bisect_left(self.places, storage.begin), count - 1), 0, category, storage.bytes))
            if storage.end is not None and storage not in copied:
                at = max(bisect_right(self.places, storage.end) - 1, 0)
                changes.append((at, -1 if storage.handed_on else 1, category, -storage.bytes))
        changes.sort(key=lambda change: change[:2])
        position = 0
        for start, stop in itertools.pairwise([*self.starts, count]):
            level = rise = 0
            net: dict[Category, int] = {Category.SAVED: 0, Category.TEMPORARY: 0}
            while position < len(changes) and changes[position][0] < stop:
                _, _, of, size = changes[position]
                level += size
                rise = max(rise, level)
                net[of] += size
                position += 1
            yield Segment(
                sum(self.seconds[start:stop]),
                sum(kernel.flops for kernel in self.kernels[start:stop]),
                rise,
                net[Category.SAVED],
                net[Category.TEMPORARY],
            )
