"""A report as one self-contained HTML file: no network, no server, no other files.

Tables are plain HTML. The page's script (``page.js``) draws the timeline from data in the page, so that it can be
zoomed. The page's content security policy lets it load nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.simulate import Exposure, Span, Timeline

from ..quantities import BYTES, SECONDS, bytes_text, seconds_text
from .exposures import called, exposure_text, overlap_text
from .step_report import StepReport, Table, later, peak_text, tables
from .timeline import exposure_of, extent, lanes, peak_of, points, stages

_FOLDED_ROWS = 12
_KINDS = {
    "compute": "computation",
    "wait": "computation waits",
    "gather": "gather",
    "reduce": "reduce",
    "optimizer": "optimizer",
}
_CATEGORIES = {
    Category.SHARDS: "shards",
    Category.OPTIMIZER: "optimizer",
    Category.GATHERED: "gather",
    Category.GRADIENTS: "reduce",
    Category.SAVED: "compute",
    Category.TEMPORARY: "temporary",
}
"""Color of each category, as a CSS class: where possible, that of the kind of work that creates it."""


def to_html(report: StepReport) -> str:
    """Return a report as the text of an HTML file."""
    summary, *others = tables(report)
    drawn = report.timeline.spans or report.timeline.memory is not None
    body = [
        f"<h1>{escape(report.title)}</h1>",
        _about("One training step of one rank. Numbers are simulated, unless they are said to be measured."),
        _cards(summary),
        *(_curves(report) if report.steps else ()),
        *(_figure(report) if drawn else ()),
        *(_section(table) for table in others),
    ]
    script = f"<script>\n{_asset('page.js')}</script>\n" if drawn else ""
    return _PAGE.format(title=escape(report.title), style=_asset("page.css"), body="\n".join(body), script=script)


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
<script>window.onerror = (message) => {{ document.documentElement.dataset.error = message; }};</script>
</head>
<body>
<main>
{body}
</main>
{script}</body>
</html>
"""


def _asset(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


# -- tables -----------------------------------------------------------------------------------------------------------


def _cards(table: Table) -> str:
    cards = []
    for label, value in table.rows:
        first, rest = re.fullmatch(r"(.*?)(, .*| \(.*)?", value, re.DOTALL).groups()  # type: ignore[union-attr]
        small = f"<small>{escape(rest)}</small>" if rest else ""
        cards.append(f"<div><dt>{escape(label)}</dt><dd>{escape(first)}{small}</dd></div>")
    return f'<dl class="cards">{"".join(cards)}</dl>'


def _section(table: Table) -> str:
    about = _about(table.about) if table.about else ""
    content = _list(table) if len(table.header) == 1 else _table(table)
    if table.detail and len(table.rows) > _FOLDED_ROWS:
        content = f"<details><summary>Show {len(table.rows):,} lines</summary>{content}</details>"
    return f"<section><h2>{escape(table.title.capitalize())}</h2>{about}{content}</section>"


def _about(text: str) -> str:
    return f'<p class="about">{escape(text)}</p>'


def _list(table: Table) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for (line,) in table.rows)
    return f'<ul class="{"lines code" if table.detail else "lines"}">{lines}</ul>'


def _table(table: Table) -> str:
    classes = [' class="number"' if numeric else "" for numeric in table.numeric]
    head = ""
    if any(table.header):
        cells = "".join(f"<th{c}>{escape(name)}</th>" for c, name in zip(classes, table.header, strict=True))
        head = f"<thead><tr>{cells}</tr></thead>"
    rows = []
    for number, row in enumerate(table.rows, start=1):
        cells = "".join(f"<td{c}>{escape(cell)}</td>" for c, cell in zip(classes, row, strict=True))
        is_total = table.total and number == len(table.rows)
        css = ' class="total"' if is_total else "" if row[0] else ' class="more"'
        rows.append(f"<tr{css}>{cells}</tr>\n")
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


# -- curves of training -----------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 580, 190, 74, 8, 14, 24
_MOST_POINTS = 1000


def _curves(report: StepReport) -> Iterator[str]:
    """Draw loss and step time over steps, with the predicted step time."""
    losses = [(record.step, record.loss) for record in report.steps if record.loss is not None]
    times = [(record.step, record.seconds) for record in later(report.steps)]
    predicted = (report.timeline.seconds, f"predicted {seconds_text(report.timeline.seconds)}")
    yield "<section><h2>Loss and step time (measured)</h2>"
    yield _about("The time of the first step, which compiles, is left out.")
    yield '<div class="curves">'
    yield _curve("loss", losses, "{:.3f}".format)
    yield _curve("step time", times, seconds_text, predicted)
    yield "</div></section>"


def _curve(
    name: str,
    points: Sequence[tuple[int, float]],
    text: Callable[[float], str],
    level: tuple[float, str] | None = None,
) -> str:
    """Return a line over steps as SVG, which needs no script. ``level`` is a value to compare it with, and its name."""
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return ""
    values = [value for _, value in points] + ([level[0]] if level else [])
    low, high = min(values), max(values)
    begin, end = points[0][0], points[-1][0]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(step: int) -> str:
        return f"{_LEFT + (step - begin) / (end - begin or 1) * (right - _LEFT):.1f}"

    def y(value: float) -> str:
        return f"{bottom - (value - low) / (high - low or 1) * (bottom - _TOP):.1f}"

    drawn = points[:: math.ceil(len(points) / _MOST_POINTS)]
    parts = [f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name} over steps">']
    for value in dict.fromkeys((high, low)):
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y(value)}" y2="{y(value)}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value)}" dy="4" text-anchor="end">{text(value)}</text>')
    if level:
        parts.append(f'<line class="level" x1="{_LEFT}" x2="{right}" y1="{y(level[0])}" y2="{y(level[0])}"/>')
        parts.append(f'<text x="{right}" y="{y(level[0])}" dy="-4" text-anchor="end">{escape(level[1])}</text>')
    parts.append(f'<polyline points="{" ".join(f"{x(step)},{y(value)}" for step, value in drawn)}"/>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {begin:,}</text>')
    parts.append(f'<text class="name" x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">step {end:,}</text></svg>')
    return "".join(parts)


# -- the drawing ------------------------------------------------------------------------------------------------------


def _figure(report: StepReport) -> Iterator[str]:
    timeline = report.timeline
    kinds = {span.kind for span in timeline.spans}
    buttons = ['<button data-view="-1">whole step</button>']
    buttons += [f'<button data-view="{i}">{s.value}</button>' for i, (s, *_) in enumerate(stages(timeline))]
    buttons += [
        '<button data-zoom="0.5" title="zoom in">+</button>',
        '<button data-zoom="2" title="zoom out">-</button>',
    ]
    legend = [_key(kind, text) for kind, text in _KINDS.items() if kind in kinds]
    yield "<section><h2>Timeline (simulated)</h2>"
    yield _about(
        "What runs when, unit by unit, and below it what is in memory meanwhile. Units are told apart by shades. Drag "
        "to move, Ctrl or Shift and the wheel to zoom, double-click to zoom in."
    )
    yield f'<div class="bar"><div>{"".join(buttons)}</div><div class="legend">{"".join(legend)}</div></div>'
    yield '<div id="figure"><svg id="drawing" tabindex="0" role="img" aria-label="timeline and memory"></svg></div>'
    yield '<p id="error">The timeline could not be drawn by this browser; the tables below are complete.</p>'
    without_scripts = "The timeline is drawn by a script, which this browser does not run; the tables are complete."
    yield f"<noscript><p>{without_scripts}</p></noscript>"
    if timeline.memory is not None:
        legend = [_key(_CATEGORIES[category], category.value) for category in Category]
        yield f'<div class="bar"><p>{escape(peak_text(timeline))}</p><div class="legend">{"".join(legend)}</div></div>'
    data = f'<script type="application/json" id="data">{_json(_data(report))}</script>'
    yield f'<div id="tip" hidden></div>{data}</section>'


def _key(css: str, text: str) -> str:
    return f'<span><i class="{css}"></i>{escape(text)}</span>'


def _json(data: Mapping[str, Any]) -> str:
    """Serialize data without characters that would end the script element."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _data(report: StepReport) -> dict[str, Any]:
    """Return the data that the script draws."""
    timeline = report.timeline
    unit_of = {info.name: info.unit for info in report.buckets}
    numbers: dict[str, int] = {}
    exposures = exposure_of(timeline)
    rows = []
    for lane in lanes(timeline):
        spans = []
        for span in lane.spans:
            unit = called(unit_of.get(span.name, span.name) if span.kind in ("gather", "reduce") else span.name)
            number = numbers.setdefault(unit, len(numbers))
            spans.append([span.begin, span.end, number, span.kind, _hover(span, exposures.get(span))])
        rows.append({"stream": lane.stream, "name": lane.name, "spans": spans})
    return {
        "seconds": extent(timeline),
        "scales": {"seconds": SECONDS, "bytes": BYTES},
        "units": list(numbers),
        "lanes": rows,
        "stages": [[stage.value, begin, end] for stage, begin, end in stages(timeline)],
        "memory": _memory(timeline),
        "budget": report.budget_bytes,
    }


def _hover(span: Span, exposure: Exposure | None) -> str:
    if span.kind == "wait":
        lines = [f"{called(span.name)} waits {seconds_text(span.end - span.begin)}"]
    else:
        what = f" {span.kind}" if span.kind in ("gather", "reduce") else ""
        lines = [f"{called(span.name)}{what} {seconds_text(span.end - span.begin)}"]
    lines.append(f"{span.stage.value}, {seconds_text(span.begin)} to {seconds_text(span.end)} (simulated)")
    if exposure is not None:
        lines.append(f"for {exposure_text(exposure)}" if span.kind == "wait" else overlap_text(exposure))
    return "\n".join(lines)


def _memory(timeline: Timeline) -> dict[str, Any] | None:
    if timeline.memory is None:
        return None
    found = points(timeline.memory)
    return {
        "categories": [[category.value, _CATEGORIES[category]] for category in Category],
        "seconds": [point.seconds for point in found],
        "parts": [list(column) for column in zip(*(point.parts for point in found), strict=True)],
        "peak": [peak_of(timeline.memory), timeline.peak_bytes, f"peak {bytes_text(timeline.peak_bytes)}"],
    }
