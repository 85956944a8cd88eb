"""What a timeline looks like, apart from any form of it: streams and their lanes, stages, memory in few enough points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mfsdp_compile.passes.flow import Category
from mfsdp_compile.passes.simulate import Exposure, Memory, Span, Stage, Timeline

from .words import is_exposed

__all__ = ["Lane", "Point", "exposure_of", "extent", "lanes", "peak_of", "points", "stages", "streams"]

STREAMS = ("compute", "gather", "reduce")
"""From top to bottom; others follow."""


@dataclass(frozen=True)
class Lane:
    """Spans that run one after the other.

    Args:
        stream: that they are of. It has several lanes where its collectives run over several groups at a time.
        number: of the lane in its stream.
        spans: by their beginnings.
    """

    stream: str
    number: int
    spans: tuple[Span, ...]

    @property
    def name(self) -> str:
        return f"{self.stream} {self.number + 1}" if self.number else self.stream


@dataclass(frozen=True)
class Point:
    """What is in memory from a moment on.

    Args:
        seconds: of the moment.
        parts: bytes of each category, in their order.
    """

    seconds: float
    parts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.parts)


def extent(timeline: Timeline) -> float:
    """Seconds that a drawing shows: the step, and what runs on after it."""
    return max([timeline.seconds, *(span.end for span in timeline.spans)])


def streams(timeline: Timeline) -> list[str]:
    """Those on which something runs, in the order in which they are drawn."""
    found = {span.stream for span in timeline.spans}
    return [s for s in STREAMS if s in found] + sorted(found.difference(STREAMS))


def lanes(timeline: Timeline) -> list[Lane]:
    """Streams, cut into as few lanes as hold spans that do not overlap."""
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
    """When computation enters and leaves each stage, in seconds."""
    found: dict[Stage, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.stream == "compute":
            begin, end = found.get(span.stage, (span.begin, span.end))
            found[span.stage] = min(begin, span.begin), max(end, span.end)
    return [(stage, begin, end) for stage, (begin, end) in found.items()]


def exposure_of(timeline: Timeline) -> Mapping[Span, Exposure]:
    """The collective behind a span: the one that it is, or the one that computation waits for."""
    started = {(e.what, e.name, e.stage, e.begin): e for e in timeline.exposures}
    awaited = {e.begin + e.seconds: e for e in timeline.exposures if is_exposed(e)}
    found = {}
    for span in timeline.spans:
        is_wait = span.kind == "wait"
        exposure = awaited.get(span.end) if is_wait else started.get((span.kind, span.name, span.stage, span.begin))
        if exposure is not None:
            found[span] = exposure
    return found


def points(memory: Memory, most: int = 20_000) -> list[Point]:
    """Memory over time: of each moment the highest level and the last one.

    Args:
        most: points. Where there are more, moments that are close together become one.
    """
    found = list(_moments(memory, 0.0))
    if len(found) > most:
        found = list(_moments(memory, 2 * memory.seconds[-1] / most))
    return found


def _moments(memory: Memory, width: float) -> Iterator[Point]:
    """Points of moments that are ``width`` seconds wide."""
    highest: Point | None = None
    last: Point | None = None
    for seconds, *parts in zip(memory.seconds, *_parts(memory), strict=True):
        point = Point(seconds, tuple(parts))
        if highest is not None and last is not None and _moment(seconds, width) != _moment(highest.seconds, width):
            yield from (highest, last) if highest is not last else (last,)
            highest = None
        highest = point if highest is None or point.total > highest.total else highest
        last = point
    if highest is not None and last is not None:
        yield from (highest, last) if highest is not last else (last,)


def _moment(seconds: float, width: float) -> float:
    return seconds // width if width else seconds


def _parts(memory: Memory) -> list[Sequence[int]]:
    nothing = [0] * len(memory.seconds)
    return [memory.parts.get(category, nothing) for category in Category]


def peak_of(memory: Memory) -> float:
    """When most is in memory, for the first time; in seconds."""
    totals = memory.totals
    return memory.seconds[totals.index(max(totals))]
