"""Predictions for a compiled model, and measurements to compare them with."""

from __future__ import annotations

import contextlib
import itertools
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mfsdp_compile.passes.context import Context
from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.forecast import Forecast
from mfsdp_compile.passes.guests.solver.producer import Solver
from mfsdp_compile.passes.guests.solver.reasons import explained
from mfsdp_compile.passes.guests.solver.simulate import (
    Exposure,
    Stage,
    StartCopy,
    Timeline,
    host_memory,
    resting_memory,
    simulate,
)
from mfsdp_compile.passes.guests.solver.step_events import PHASES
from mfsdp_compile.passes.pipeline import CompileRecord
from mfsdp_compile.runtime.ranks import profiling
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase

from ..report import PassRow, StepReport, UnitTime, headline, write
from ..sharded_module import unwrapped

__all__ = ["Measurement", "measure", "measuring", "predicted", "report", "schedule_of"]

if TYPE_CHECKING:
    from ..metrics import StepRecord

# -- predicted --------------------------------------------------------------------------------------------------------


def predicted(model: nn.Module) -> Timeline:
    """Simulate a training step of a compiled model, from the graphs that run and their schedule.

    Args:
        model: Sharded, compiled with ``options={"report": True}``, and run once.

    Raises:
        RuntimeError: If nothing has been compiled, or the graphs came out of a compile cache, which does not store
            them.
    """
    return _Compiled(model).timeline


class _Compiled:
    """The last training graphs of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrapped(model, "report")
        records: list[CompileRecord] = self.model.sharded.compiled_graphs
        wanted = set(PHASES.values())
        forecasts = [(r, r.forecast) for r in records if isinstance(r.forecast, Forecast)]
        whole = [(r, f) for r, f in forecasts if r.context.whole_model and wanted <= f.events.keys()]
        if not whole:
            raise RuntimeError(_why_nothing(records))
        self.record, self.forecast = whole[-1]
        prediction = self.prediction = self.forecast.prediction
        self.context: Context = self.record.context
        events = {stage: self.forecast.events[phase] for stage, phase in PHASES.items()}
        resting = resting_memory(self.context.buckets, prediction.optimizer, self.context.other_bytes)
        found = simulate(events, self.context, prediction.costs, resting, prediction.optimizer)
        self.timeline = explained(found, self.record.decisions, PHASES)

    @property
    def host_memory(self) -> Mapping[Category, int]:
        copies = (event.copy for event in self.forecast.events[Phase.FORWARD] if isinstance(event, StartCopy))
        saved = sum(copy.bytes for copy in copies if copy.outward)
        return host_memory(self.context.buckets, self.prediction.optimizer, saved)


def _why_nothing(records: Sequence[CompileRecord]) -> str:
    start = "There is nothing to report: "
    if not records:
        return (
            f"{start}the model has not been compiled. Call torch.compile(model, backend='mfsdp'), and run a training "
            "step."
        )
    forecasts = [record.forecast for record in records if isinstance(record.forecast, Forecast)]
    if not forecasts:
        return f"{start}the model was not compiled for a report. Compile with options={{'report': True}}."
    failed = [f"{phase.value}: {why}" for forecast in forecasts for phase, why in forecast.unpredicted.items()]
    if failed:
        return f"{start}the graphs could not be followed ({'; '.join(failed)}). Please report this."
    if not any(r.context.whole_model for r in records):
        return (
            f"{start}no graph holds the whole model; mfsdp_compile.explain(model, *inputs) says where it breaks. "
            "Compile with fullgraph=True."
        )
    return f"{start}no backward has been compiled: run a training step."


def schedule_of(model: nn.Module) -> ScheduleText:
    """Return the schedule of a compiled model, to save, edit and pass as ``options={"schedule": path}``.

    Args:
        model: Sharded, compiled, and run once. Code from a compile cache works too.

    Raises:
        RuntimeError: If nothing has been compiled.
    """
    sharded = unwrapped(model, "schedule_of").sharded
    lines: dict[Phase, Sequence[str]] = {}
    for phase, found in sharded.coordinator.begun_graphs:
        lines[Phase(phase)] = found
    if not lines:
        raise RuntimeError("There is no schedule yet: compile the model and run it first.")
    return ScheduleText.of(lines)


# -- measured ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """Times at which collectives start, which mark the boundaries between units.

    On CUDA they are measured with events on the compute stream, otherwise with a clock.

    Args:
        starts: For each collective: where it was started, what it is, and seconds since the beginning of the step.
        seconds: Duration of the step.
    """

    starts: Sequence[tuple[str, str, float]]
    seconds: float


def measure(model: nn.Module, step: Callable[[], Any], repeats: int = 5) -> list[Measurement]:
    """Run ``step`` several times, and record when collectives start. Collective: every rank calls it.

    Args:
        step: Computes a loss with the model and calls ``backward()``.
        repeats: Number of measured runs. One more run precedes them, unmeasured.
    """
    step()
    found: list[Measurement] = []
    for _ in range(repeats):
        with measuring(model, found):
            step()
    return found


@contextlib.contextmanager
def measuring(model: nn.Module, found: list[Measurement]) -> Iterator[None]:
    """Context of a forward and backward of a training, in which it is recorded when collectives start.

    Costs one clock reading, or one event, per collective, and a wait for the device at the end.

    Args:
        found: List that the measurement is appended to.
    """
    marks: list[tuple[profiling.Launch, Any]] = []
    mark, since = _clock(next(iter(unwrapped(model, "measuring").sharded.buckets)).device)
    with profiling.listening(lambda launch: marks.append((launch, mark()))):
        begin = mark()
        yield
        end = mark()
    starts = [(launch.where, launch.what, since(begin, at)) for launch, at in marks]
    found.append(Measurement(starts, since(begin, end)))


def _clock(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any, Any], float]]:
    """Return a function that marks a point of the computation, and one for the seconds between two marks."""
    if device.type != "cuda":
        return time.perf_counter, lambda first, second: second - first

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def since(first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        second.synchronize()
        return first.elapsed_time(second) / 1e3

    return mark, since


def _by_unit(timeline: Timeline, context: Context, measured: Sequence[Measurement]) -> list[UnitTime]:
    """Return predicted and median measured times between starts of collectives, by the unit that computes there.

    Raises:
        RuntimeError: If the measured collectives are not the predicted ones.
    """
    residents = sum(bool(info.resident_groups) for info in context.buckets)  # started by the runtime, before the graphs
    starts = timeline.exposures[residents:]
    expected = [(f"{e.stage.value} graph", e.what, e.name) for e in starts]
    end = timeline.seconds - sum(s for (stage, _), s in timeline.units.items() if stage is Stage.OPTIMIZER)
    times: dict[tuple[Stage, str], tuple[float, list[float]]] = {}
    for one in measured:
        found = [(where, *_split(what)) for where, what, _ in one.starts]
        if found != expected:
            pairs = itertools.zip_longest(found, expected, fillvalue=("nothing",))
            other, wanted = next((" ".join(a), " ".join(b)) for a, b in pairs if a != b)
            raise RuntimeError(f"the measured step has {other}, but {wanted} was predicted")
    before = 0.0
    last: Exposure | None = None
    for position in range(len(starts) + 1):
        e = starts[position] if position < len(starts) else None
        at = e.issued if e is not None else end
        stage = e.stage if e is not None else Stage.BACKWARD
        unit = (e.during or e.unit) if e is not None else (last.during if last is not None else "")
        if last is not None and e is not None and last.stage is not e.stage:
            stage, unit = last.stage, f"after {last.during}"  # nothing starts there until the backward begins
        found_times = [_interval(one, position) for one in measured]
        so_far, all_measured = times.get((stage, unit), (0.0, [0.0] * len(measured)))
        times[stage, unit] = so_far + at - before, [a + b for a, b in zip(all_measured, found_times, strict=True)]
        before, last = at, e
    return [UnitTime(stage, unit, seconds, median(each)) for (stage, unit), (seconds, each) in times.items()]


def _interval(one: Measurement, position: int) -> float:
    """Return the seconds from the previous start to this one, or from the last start to the end."""
    begin = one.starts[position - 1][2] if position else 0.0
    return (one.starts[position][2] if position < len(one.starts) else one.seconds) - begin


def _split(what: str) -> tuple[str, str]:
    """Return ``("reduce", "layers.0")`` for ``"reduce layers.0, stage 2"``."""
    kind, _, name = what.partition(" ")
    return kind, name.partition(",")[0]


# -- the report -------------------------------------------------------------------------------------------------------


def report(
    model: nn.Module,
    folder: Path | str | None = None,
    *,
    measured: Sequence[Measurement] = (),
    steps: Sequence[StepRecord] = (),
    title: str = "Training step",
    name: str = "report",
) -> StepReport:
    """Report what a compiled model's training step is predicted to do, why, and how that compares with measurements.

    Args:
        model: Sharded, compiled with ``options={"report": True}``, and run once.
        folder: Folder for ``report.html``, ``report.txt`` and ``report.trace.json``. None: nothing is written.
        measured: Results of :func:`measure` or :func:`measuring`.
        steps: Records of training, of steps of one microbatch; see :class:`.StepMetrics`.
        title: Title of the report.
        name: Base name of the files.

    Returns:
        The report. ``mfsdp_compile.report.to_text`` prints it.

    Raises:
        RuntimeError: If there is nothing to report on. The message says why.
        OSError: If the files cannot be written.
    """
    compiled = _Compiled(model)
    record, context, timeline = compiled.record, compiled.context, compiled.timeline
    notes = ["Predicted figures come from the cost model of the hardware named below, not from this machine."]
    times: list[UnitTime] = []
    if measured:
        try:
            times = _by_unit(timeline, context, measured)
        except RuntimeError as error:
            notes.append(f"What was measured is not compared: {error}.")
    rows = [
        PassRow(phase.value if phase is not None else "dynamo", r.name, r.seconds, r.lines, r.changes)
        for phase, reports in record.reports.items()
        for r in reports
    ]
    verdicts = [line for row in rows if row.name == "verify" for line in row.lines]
    made = StepReport(
        title,
        headline(timeline, context.policy.memory_budget, compiled.host_memory, steps),
        timeline,
        context.buckets,
        {phase.value: lines for phase, lines in record.schedules.items()},
        rows,
        list(dict.fromkeys(verdicts)),
        times,
        steps,
        _environment(compiled),
        notes,
        context.policy.memory_budget,
    )
    if folder is not None:
        write(made, folder, name)
    return made


def _environment(compiled: _Compiled) -> Mapping[str, str]:
    sharded, prediction, producer = compiled.model.sharded, compiled.prediction, compiled.record.producer
    settled = producer.settled if isinstance(producer, Solver) else None
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(sharded.buckets[0].device),
        "sharding": str(sharded.topology),
        "precision": str(sharded.precision),
        "hardware of the prediction": prediction.costs.hardware.name,
        "inner compiler": "inductor" if prediction.costs.fused else "aot_eager",
        "optimizer of the prediction": prediction.optimizer.name,
        "policy": str(compiled.context.policy),
        **({"schedule": str(settled)} if settled is not None else {}),
    }
