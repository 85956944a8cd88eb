"""A report as text for terminals."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from mfsdp_compile.passes.guests.solver.simulate import MemoryCurve, Span, Stage, Timeline

from ..quantities import bytes_text, seconds_text
from .step_report import StepReport, Table, peak_text, tables
from .timeline import MemorySample, extent, peak_of, points, stages, streams

LEAST_WIDTH = 60
LEAST_CELL = 24
_MARKS = {"gather": "g", "reduce": "r", "wait": "!", "optimizer": "O"}
_STAGES = {Stage.FORWARD: "F", Stage.BACKWARD: "B", Stage.OPTIMIZER: "O"}
_LEVELS = " ▁▂▃▄▅▆▇█"
_CURVE_ROWS = 4


def to_text(report: StepReport, width: int = 100) -> str:
    """Return a report as plain text.

    Args:
        width: Columns. Tables are wider if names are long.

    Raises:
        ValueError: If ``width`` is less than 60.
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"a report needs at least {LEAST_WIDTH} columns, got {width}")
    summary, *others = tables(report)
    parts = [[report.title, "=" * min(len(report.title), width)], [*_table(summary, width)]]
    if report.timeline.spans or report.timeline.memory is not None:
        parts.append([*_title("timeline (simulated)"), *_drawing(report.timeline, width)])
    parts += [[*_title(table.title), *_about(table, width), *_table(table, width)] for table in others]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts) + "\n"


def _title(title: str) -> list[str]:
    return [title, "-" * len(title)]


def _about(table: Table, width: int) -> list[str]:
    return textwrap.wrap(table.about, width)


# -- tables -----------------------------------------------------------------------------------------------------------


_BELOW = 6
"""Columns to indent a text that does not fit into its row."""


def _table(table: Table, width: int) -> Iterator[str]:
    if len(table.header) == 1:
        for (line,) in table.rows:
            yield f"  {line}"
        return
    numeric = table.numeric
    rows = [table.header, *table.rows] if any(table.header) else list(table.rows)
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    before = sum(sizes[:-1]) + 2 * len(sizes)
    last = max(width - before, LEAST_CELL)
    for number, row in enumerate(rows):
        if number and table.total and number == len(rows) - 1:
            yield "  " + "-" * min(width - 2, before + min(sizes[-1], last) - 2)
        cells = [c.rjust(n) if right else c.ljust(n) for c, n, right in zip(row, sizes, numeric, strict=True)]
        longest = max(map(len, row[-1].split()), default=0)
        if numeric[-1] or longest <= last:
            indent, room, lines = before, last, [cells[-1]] if numeric[-1] else []
        else:  # a word does not fit: put it below the row
            indent, room, lines = _BELOW, max(width - _BELOW, longest), [""]
        lines += textwrap.wrap(row[-1], room, break_on_hyphens=False) if not numeric[-1] else []
        first, *more = lines or [""]
        yield "  ".join(["  " + cells[0], *cells[1:-1], first]).rstrip()
        for line in more:
            yield " " * indent + line


# -- the drawing ------------------------------------------------------------------------------------------------------


def _drawing(timeline: Timeline, width: int) -> Iterator[str]:
    seconds = extent(timeline)
    top = bytes_text(timeline.peak_bytes)
    label = max(len(name) for name in (*streams(timeline), top, "compute"))
    columns = width - label - 4
    for stream in streams(timeline):
        spans = [span for span in timeline.spans if span.stream == stream]
        yield f"  {stream.ljust(label)}  {_row(spans, seconds, columns)}"
    if timeline.memory is not None:
        yield ""
        yield from _memory(timeline, timeline.memory, seconds, columns, label)
    yield f"  {''.ljust(label)}  0 s{seconds_text(seconds).rjust(columns - 3)}"
    yield ""
    if timeline.spans:
        names = [f"{_STAGES[stage]} {stage.value}" for stage, _, _ in stages(timeline)]
        yield f"  {', '.join(names)}, ! computation waits, g gather, r reduce, . nothing; as simulated."
    if timeline.memory is not None:
        yield from textwrap.wrap(f"^ {peak_text(timeline)}", width, initial_indent="  ", subsequent_indent="    ")


def _row(spans: Sequence[Span], seconds: float, columns: int) -> str:
    """Draw a row of marks, one per column.

    A column in which something runs for at least a quarter of the time gets the mark of what runs longest.
    """
    step = seconds / columns
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        mark = _MARKS.get(span.kind) or _STAGES[span.stage]
        for column in range(int(span.begin / step), min(int(span.end / step), columns - 1) + 1):
            overlap = min(span.end, (column + 1) * step) - max(span.begin, column * step)
            filled[column][mark] = filled[column].get(mark, 0.0) + overlap
    return "".join(max(marks, key=marks.__getitem__) if sum(marks.values()) >= step / 4 else "." for marks in filled)


def _memory(timeline: Timeline, memory: MemoryCurve, seconds: float, columns: int, label: int) -> Iterator[str]:
    """Draw the maximum memory in each column's time, as blocks from 0 to the peak."""
    levels = _levels(points(memory), seconds, columns)
    eighths = [round(8 * _CURVE_ROWS * level / max(timeline.peak_bytes, 1)) for level in levels]
    for row in reversed(range(_CURVE_ROWS)):
        name = bytes_text(timeline.peak_bytes) if row == _CURVE_ROWS - 1 else "memory" if row == 1 else ""
        name = "0 B" if row == 0 else name
        yield f"  {name.ljust(label)}  " + "".join(_LEVELS[min(max(n - 8 * row, 0), 8)] for n in eighths)
    column = min(int(peak_of(memory) / seconds * columns), columns - 1) if seconds else 0
    yield f"  {''.ljust(label)}  " + " " * column + "^"


def _levels(found: Sequence[MemorySample], seconds: float, columns: int) -> list[int]:
    levels = [0] * columns
    for number, point in enumerate(found):
        until = found[number + 1].seconds if number + 1 < len(found) else seconds
        first = min(int(point.seconds / seconds * columns), columns - 1) if seconds else 0
        last = min(int(until / seconds * columns), columns - 1) if seconds else columns - 1
        for column in range(first, last + 1):
            levels[column] = max(levels[column], point.total)
    return levels
