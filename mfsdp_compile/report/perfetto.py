"""A simulated step in the trace event format, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from typing import Any

from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.simulate import Span, Timeline

from .exposures import called, exposure_text
from .timeline import exposure_of, lanes, points

_PROCESS = 1


def to_chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return a trace for ``json.dump``. Times are in microseconds; memory is a counter in bytes, by category.

    Each stream is a thread, or several if its collectives overlap, as those of different groups can.
    """
    events: list[dict[str, Any]] = [_named("process_name", 0, "training step (simulated)")]
    exposures = exposure_of(timeline)
    for thread, lane in enumerate(lanes(timeline), start=1):
        events.append(_named("thread_name", thread, lane.name))
        events.append(_about("thread_sort_index", thread, {"sort_index": thread}))
        for span in lane.spans:
            event = {"ph": "X", "name": _name(span), "cat": span.kind, "pid": _PROCESS, "tid": thread}
            args = {"stage": span.stage.value}
            if span in exposures:
                args["collective"] = exposure_text(exposures[span])
            events.append({**event, "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6, "args": args})
    if timeline.memory is not None:
        for point in points(timeline.memory):
            parts = {category.value: size for category, size in zip(Category, point.parts, strict=True)}
            events.append(
                {"ph": "C", "name": "memory (bytes)", "pid": _PROCESS, "ts": point.seconds * 1e6, "args": parts}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"simulated": "true"}}


def _name(span: Span) -> str:
    if span.kind in ("compute", "optimizer"):
        return called(span.name)
    return f"{span.kind} {called(span.name)}"


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return _about(what, thread, {"name": name})


def _about(what: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": args}
