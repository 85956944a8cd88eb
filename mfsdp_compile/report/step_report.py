"""Contents of a report as plain data, and the tables that all its forms are made from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

from mfsdp_compile.passes.context import BucketInfo
from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.simulate import Exposure, Stage, Timeline

from ..quantities import bytes_text, change_text, flops_text, percent_text, seconds_text
from .exposures import called, is_exposed, reason_text

if TYPE_CHECKING:
    from ..metrics import StepRecord


@dataclass(frozen=True)
class PassRow:
    """What a pass did to a graph.

    Args:
        graph: Graph, such as ``"forward"``.
        name: Name of the pass.
        seconds: Duration of the pass.
        lines: What it reported, one decision per line.
        changes: How it changed the schedule.
    """

    graph: str
    name: str
    seconds: float
    lines: Sequence[str]
    changes: Sequence[str]


@dataclass(frozen=True)
class UnitTime:
    """Predicted and measured seconds of a unit in a stage of the step, including waits."""

    stage: Stage
    unit: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class StepReport:
    """A training step, and how its schedule was decided.

    Args:
        title: Title of the report.
        headline: The most important results: pairs of label and text. :func:`headline` makes the usual ones.
        timeline: Timeline of the simulated step.
        buckets: Buckets of the model, in order of first use.
        schedule: Lines of the schedule, by graph.
        passes: Passes, in the order in which they ran.
        verdicts: Results of the verifier.
        measured: Measurements to compare with the prediction. Empty if there are none.
        steps: Records of training. Empty: nothing was trained, or not measured.
        environment: What the numbers depend on: versions, hardware, options.
        notes: Other remarks.
        budget_bytes: Memory budget of the step. None: no budget.
    """

    title: str
    headline: Sequence[tuple[str, str]]
    timeline: Timeline
    buckets: Sequence[BucketInfo] = ()
    schedule: Mapping[str, Sequence[str]] = field(default_factory=dict)
    passes: Sequence[PassRow] = ()
    verdicts: Sequence[str] = ()
    measured: Sequence[UnitTime] = ()
    steps: Sequence[StepRecord] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.budget_bytes is not None and self.budget_bytes <= 0:
            raise ValueError(f"a budget must be a positive number of bytes, got {self.budget_bytes}")


_MANY = 40
"""Maximum number of exposed collectives that are shown without expanding the table."""
_NUMBER = re.compile(r"(<|[+-])?[\d,]*\.?\d+( ?(%|s|ms|us|B|[KMG]iB))?")


@dataclass(frozen=True)
class Table:
    """A part of a report, as text.

    Args:
        title: Title of the table.
        header: Names of the columns. A single empty name: lines without a header.
        rows: Rows, with as many cells as the header. Only the last cell may be long.
        about: A sentence that says what is shown.
        total: Whether the last row is the sum of the others.
        detail: Whether to collapse the table if it is long.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    about: str = ""
    total: bool = False
    detail: bool = False

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"table {self.title!r} has {len(self.header)} columns, and a row of {len(row)}: {row}")

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold only numbers."""
        columns = ([cell for cell in column if cell not in ("", "-")] for column in zip(*self.rows, strict=True))
        return tuple(bool(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in columns)


def headline(
    timeline: Timeline,
    budget_bytes: int | None = None,
    host: Mapping[Category, int] | None = None,
    steps: Sequence[StepRecord] = (),
) -> list[tuple[str, str]]:
    """Return the usual headline of a simulated step.

    Args:
        host: Bytes of a rank in host memory, by category; see :func:`.simulate.host_memory`.
        steps: Records of training, whose step time is shown beside the predicted one.
    """
    sent = sum(e.seconds for e in timeline.exposures)
    exposed = timeline.exposed_seconds
    found = [("step time", f"{seconds_text(timeline.seconds)} (predicted)")]
    if steps:
        measured = step_seconds(steps)
        found = [("step time", f"{seconds_text(measured)} (measured; {seconds_text(timeline.seconds)} predicted)")]
        if tokens := _tokens(steps):
            speeds = [f"{tokens / seconds:,.0f}" for seconds in (measured, timeline.seconds)]
            found.append(("tokens/s", f"{speeds[0]} (measured; {speeds[1]} predicted)"))
    found += [
        ("computation", f"{seconds_text(timeline.compute_seconds)} (predicted)"),
        ("communication", f"{seconds_text(sent)}, {len(timeline.exposures):,} collectives (predicted)"),
        (
            "exposed communication",
            f"{seconds_text(exposed)}, {percent_text(exposed, timeline.seconds)} of the step (predicted)",
        ),
        ("peak memory", f"{bytes_text(timeline.peak_bytes)} (predicted)"),
    ]
    if budget_bytes is not None:
        found.append(("memory budget", f"{bytes_text(budget_bytes)}, {_left(timeline.peak_bytes, budget_bytes)}"))
    if host:
        found.append(("host memory", f"{bytes_text(sum(host.values()))} per rank: {host_text(host)} (predicted)"))
    if timeline.flops:
        rate = f"{flops_text(timeline.flops / timeline.seconds)}/s" if timeline.seconds else "-"
        found.append(("matrix products", f"{flops_text(timeline.flops)}, {rate} (predicted)"))
    return found


def later(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """Return records without that of the first step, which compiles, unless it is the only one."""
    return steps[1:] or steps


def step_seconds(steps: Sequence[StepRecord]) -> float:
    """Return the step time of a training: the median over steps, without the first."""
    return _median(steps, "seconds")


def _median(steps: Sequence[StepRecord], field: str) -> float:
    return median(getattr(record, field) for record in later(steps) for _ in range(record.steps))


def _tokens(steps: Sequence[StepRecord]) -> float:
    """Return the tokens of a step, of all ranks; 0 if they are unknown."""
    return steps[-1].tokens / steps[-1].steps


def host_text(host: Mapping[Category, int]) -> str:
    """Return text such as ``shards 4.0 MiB, gradients 4.0 MiB``."""
    return ", ".join(f"{category.value} {bytes_text(size)}" for category, size in host.items() if size)


def peak_text(timeline: Timeline) -> str:
    """Describe the peak in a sentence: how high it is, where, and its parts."""
    parts = sorted(timeline.peak_parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{category.value} {bytes_text(size)}" for category, size in parts if size)
    return f"The peak is {bytes_text(timeline.peak_bytes)}, {_peak_place(timeline)}: {listed or 'nothing'}."


def _peak_place(timeline: Timeline) -> str:
    place = f"in the {timeline.peak_stage.value}"
    return f"{place}, at {timeline.peak_at}" if timeline.peak_at else place


def tables(report: StepReport) -> list[Table]:
    """Return all tables of a report. The first one is the headline. Empty tables are left out."""
    found = [
        _training(report),
        _peak(report.timeline, report.budget_bytes),
        _exposures(report.timeline.exposures),
        _units(report),
        _buckets(report.buckets),
        _passes(report.passes),
        _lines("verifier", report.verdicts, "What the verifier found in the finished graphs."),
    ]
    for graph, lines in report.schedule.items():
        about = "Starts and ends of collectives, in order, and the number of operators between them."
        found.append(_lines(f"schedule of the {graph}", lines, about, detail=True))
    environment = tuple(report.environment.items())
    found.append(Table("environment", ("", ""), environment, "What the numbers above depend on."))
    found.append(_lines("notes", report.notes, ""))
    summary = Table("summary", ("", ""), tuple(report.headline))
    return [summary, *(table for table in found if table.rows)]


# -- tables -----------------------------------------------------------------------------------------------------------


def _lines(title: str, lines: Iterable[str], about: str, detail: bool = False) -> Table:
    return Table(title, ("",), tuple((line,) for line in lines), about, detail=detail)


def _training(report: StepReport) -> Table:
    """Compare training with the prediction. Empty if there was none."""
    header = ("", "measured", "predicted", "error")
    if not report.steps:
        return Table("training (measured)", header, ())
    first, last = report.steps[0], report.steps[-1]
    measured, predicted = step_seconds(report.steps), report.timeline.seconds
    times = (seconds_text(measured), seconds_text(predicted), change_text(predicted, measured))
    rows: list[tuple[str, ...]] = [("step time", *times)]
    if tokens := _tokens(report.steps):
        speeds = [f"{tokens / seconds:,.0f}" for seconds in (measured, predicted)]
        rows.append(("tokens/s", *speeds, change_text(1 / predicted, 1 / measured)))
    rows.append(("first step", seconds_text(first.seconds), "", ""))
    rows.append(("waiting for data", seconds_text(_median(report.steps, "data_seconds")), "", ""))
    rows += [(f"loss of step {r.step}", f"{r.loss:.3f}", "", "") for r in (first, last) if r.loss is not None]
    about = (
        f"{last.step - first.step + first.steps} steps. The step time is the median of all but the first, on the first "
        "rank, with everything that a step does; tokens are those of all ranks."
    )
    return Table("training (measured)", header, tuple(rows), about)


def _peak(timeline: Timeline, budget: int | None) -> Table:
    peak = timeline.peak_bytes
    rows = []
    for category in Category:
        size = timeline.peak_parts.get(category, 0)
        rows.append((category.value, bytes_text(size), percent_text(size, peak)))
    rows.append(("peak", bytes_text(peak), percent_text(peak, peak)))
    about = f"What is in memory when most is, {_peak_place(timeline)} (predicted)."
    if budget is not None:
        about += f" The budget is {bytes_text(budget)}: {_left(peak, budget)}."
    return Table("peak memory", ("category", "bytes", "share"), tuple(rows), about, total=True)


def _left(peak: int, budget: int) -> str:
    return f"{bytes_text(budget - peak)} left" if peak <= budget else f"exceeded by {bytes_text(peak - budget)}"


def _exposures(exposures: Sequence[Exposure]) -> Table:
    rows: list[tuple[str, ...]] = []
    for e in sorted(filter(is_exposed, exposures), key=lambda e: -e.exposed):
        times = (seconds_text(e.seconds), seconds_text(e.hidden), seconds_text(e.exposed))
        rows.append((f"{called(e.name)} {e.what}", e.stage.value, *times, reason_text(e)))
    hidden: dict[tuple[str, Stage], list[Exposure]] = {}
    for e in exposures:
        if not is_exposed(e):
            hidden.setdefault((e.what, e.stage), []).append(e)
    for (what, stage), some in hidden.items():
        seconds = seconds_text(sum(e.seconds for e in some))
        name = f"{len(some):,} {what}{'s' if len(some) > 1 else ''}"
        rows.append((name, stage.value, seconds, seconds, seconds_text(0.0), "hidden behind computation"))
    if exposures:
        sums = (sum(e.seconds for e in exposures), sum(e.hidden for e in exposures), sum(e.exposed for e in exposures))
        rows.append((f"all {len(exposures):,}", "", *map(seconds_text, sums), ""))
    about = (
        "Collectives that computation waits for, the longest wait first, and those that it hides, together (predicted)."
    )
    header = ("collective", "stage", "takes", "hidden", "exposed", "because")
    return Table("exposed communication", header, tuple(rows), about, total=True, detail=len(rows) > _MANY)


def _units(report: StepReport) -> Table:
    rows: dict[tuple[Stage, str], tuple[float, float | None]] = {
        key: (seconds, None)
        for key, seconds in report.timeline.units.items()
        if not report.measured or key[0] is Stage.OPTIMIZER  # measured boundaries may divide units differently
    }
    rows = {(time.stage, time.unit): (time.predicted, time.measured) for time in report.measured} | rows
    lines = list(_alike((called(unit), stage.value, *_times(*times)) for (stage, unit), times in rows.items()))
    about = "Seconds of each unit in each stage of the step, waits included. Neighbors that are alike share a line."
    compared = [(predicted, measured) for predicted, measured in rows.values() if measured is not None]
    if not compared:
        lines = [row[:3] for row in [*lines, ("total", "", *_times(sum(p for p, _ in rows.values()), None))]]
        return Table("time by unit", ("unit", "stage", "predicted"), tuple(lines), about, total=True, detail=True)
    predicted, measured, error = _times(sum(p for p, _ in compared), sum(m for _, m in compared))
    lines.append(
        ("total" if len(compared) == len(rows) else "total of what was measured", "", predicted, measured, error)
    )
    about += f" Of what was measured, together: {predicted} predicted, {measured} measured"
    about += f", so that the prediction is off by {error}."
    header = ("unit", "stage", "predicted", "measured", "error")
    return Table("time by unit", header, tuple(lines), about, total=True, detail=True)


def _times(predicted: float, measured: float | None) -> tuple[str, str, str]:
    if measured is None:
        return seconds_text(predicted), "", ""
    return seconds_text(predicted), seconds_text(measured), change_text(predicted, measured)


def _buckets(buckets: Sequence[BucketInfo]) -> Table:
    def row(name: str, infos: Sequence[BucketInfo], which: str) -> tuple[str, ...]:
        padding = sum(info.layout.padding for info in infos)
        content = sum(info.layout.numel for info in infos) - padding
        shard = bytes_text(sum(info.shard_bytes for info in infos))
        if on_host := sum(info.shard_bytes for info in infos if info.rests_in_host_memory):
            shard += ", host" if len(infos) == 1 else f", {bytes_text(on_host)} host"
        counts = (sum(len(info.layout.slots) for info in infos), content, padding)
        share, gathered = percent_text(padding, content), bytes_text(sum(info.sent_bytes for info in infos))
        return (name, *(f"{count:,}" for count in counts), share, shard, gathered, which)

    names = [", ".join(slot.name.removeprefix(f"{info.unit}.") for slot in info.layout.slots) for info in buckets]
    lines = list(_alike(row(called(info.name), [info], which) for info, which in zip(buckets, names, strict=True)))
    if len(buckets) > 1:
        lines.append(row(f"all {len(buckets):,}", buckets, ""))
    about = (
        "Flat tensors that are gathered and reduced as one: elements of their parameters, padding, bytes of a rank's "
        "shard (host: in host memory) and of the whole as it is gathered. Neighbors that are alike share a line."
    )
    header = ("bucket", "parameters", "elements", "padding", "share", "shard", "gathered", "which")
    return Table("buckets", header, tuple(lines), about, total=len(buckets) > 1, detail=True)


def _passes(passes: Sequence[PassRow]) -> Table:
    rows = []
    for row in passes:
        lines = [*row.lines, *(f"schedule: {change}" for change in row.changes)] or ["nothing"]
        rows.append((row.graph, row.name, seconds_text(row.seconds), lines[0]))
        rows += [("", "", "", line) for line in lines[1:]]
    about = "What each pass decided, how it changed the order of collectives, and how long it took (measured)."
    return Table("passes", ("graph", "pass", "took", "what it did"), tuple(rows), about, detail=True)


def _alike(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Merge consecutive rows that differ only in their first cell."""
    for rest, group in groupby(rows, key=lambda row: row[1:]):
        names = [name for name, *_ in group]
        if len(names) < 3:
            yield from ((name, *rest) for name in names)
        else:
            yield (f"{names[0]} to {names[-1]}, {len(names):,} alike", *rest)
