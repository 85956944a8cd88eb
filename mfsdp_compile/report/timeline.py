"""Data for drawings of a timeline, independent of the output format.

Streams and their lanes, stages, and memory reduced to a bounded number of points.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.simulate import Exposure, MemoryCurve, Span, Stage, Timeline

from .exposures import is_exposed

STREAMS = ("compute", "gather", "reduce")
"""Streams from top to bottom. Others follow."""


@dataclass(frozen=True)
class Lane:
    """Spans of one stream that do not overlap.

    Args:
        stream: The stream. It has several lanes if its collectives run over several groups at a time.
        number: Number of the lane within its stream.
        spans: Spans, by start time.
    """

    stream: str
    number: int
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        return f"{self.stream} {self.number + 1}" if self.number else self.stream


@dataclass(frozen=True)
class MemorySample:
    """Memory in use from a point in time on.

    Args:
        seconds: The point in time.
        parts: Bytes of each category, in their order.
    """

    seconds: float
    parts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.parts)


def extent(timeline: Timeline) -> float:
    """Return the seconds that a drawing shows: the step, and whatever runs on after it."""
    return max([timeline.seconds, *(span.end for span in timeline.spans)])


def streams(timeline: Timeline) -> list[str]:
    """Return the streams on which something runs, in drawing order."""
    found = {span.stream for span in timeline.spans}
    return [s for s in STREAMS if s in found] + sorted(found.difference(STREAMS))


def lanes(timeline: Timeline) -> list[Lane]:
    """Divide streams into the smallest number of lanes in which spans do not overlap."""
    found = []
    for stream in streams(timeline):
        rows: list[list[Span]] = []
        for span in sorted((s for s in timeline.spans if s.stream == stream), key=lambda s: s.begin):
            row = next((row for row in rows if row[-1].end <= span.begin), None)
            if row is None:
                rows.append([span])
            else:
                row.append(span)
        found += [Lane(stream, number, tuple(row)) for number, row in enumerate(rows)]
    return found


def stages(timeline: Timeline) -> list[tuple[Stage, float, float]]:
    """Return when computation enters and leaves each stage, in seconds."""
    found: dict[Stage, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.stream == "compute":
            begin, end = found.get(span.stage, (span.begin, span.end))
            found[span.stage] = min(begin, span.begin), max(end, span.end)
    return [(stage, begin, end) for stage, (begin, end) in found.items()]


def exposure_of(timeline: Timeline) -> Mapping[Span, Exposure]:
    """Return the collective for each span: the one that the span is, or the one that computation waits for."""
    started = {(e.what, e.name, e.stage, e.begin): e for e in timeline.exposures}
    awaited = {e.begin + e.seconds: e for e in timeline.exposures if is_exposed(e)}
    found = {}
    for span in timeline.spans:
        is_wait = span.kind == "wait"
        exposure = awaited.get(span.end) if is_wait else started.get((span.kind, span.name, span.stage, span.begin))
        if exposure is not None:
            found[span] = exposure
    return found


def points(memory: MemoryCurve, most: int = 20_000) -> list[MemorySample]:
    """Return memory over time: for each interval, its highest and its last level.

    Args:
        most: Maximum number of points. If there are more, points that are close together are merged.
    """
    found = list(_moments(memory, 0.0))
    if len(found) > most:
        found = list(_moments(memory, 2 * memory.seconds[-1] / most))
    return found


def _moments(memory: MemoryCurve, width: float) -> Iterator[MemorySample]:
    """Yield points for intervals of ``width`` seconds."""
    highest: MemorySample | None = None
    last: MemorySample | None = None
    for seconds, *parts in zip(memory.seconds, *_parts(memory), strict=True):
        point = MemorySample(seconds, tuple(parts))
        if highest is not None and last is not None and _moment(seconds, width) != _moment(highest.seconds, width):
            yield from (highest, last) if highest is not last else (last,)
            highest = None
        highest = point if highest is None or point.total > highest.total else highest
        last = point
    if highest is not None and last is not None:
        yield from (highest, last) if highest is not last else (last,)


def _moment(seconds: float, width: float) -> float:
    return seconds // width if width else seconds


def _parts(memory: MemoryCurve) -> list[Sequence[int]]:
    nothing = [0] * len(memory.seconds)
    return [memory.parts.get(category, nothing) for category in Category]


def peak_of(memory: MemoryCurve) -> float:
    """Return the first time at which memory is at its peak, in seconds."""
    totals = memory.totals
    return memory.seconds[totals.index(max(totals))]
