"""``mfsdp_compile.explain``: what becomes of a model under ``torch.compile(backend="mfsdp")``, for people.

Which graphs there are and what they gather and reduce, what each pass did to the schedule, where Dynamo broke the model
into parts and why, which units therefore run as they are, and what has been compiled more than once, and why.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mfsdp_compile.passes.context import Phase, Report
from mfsdp_compile.passes.pipeline import Record
from mfsdp_compile.runtime import compat

from .comparing import unchanged
from .wrapper import unwrapped

__all__ = ["Explanation", "GraphExplanation", "explain", "reason_and_place"]


@dataclass(frozen=True)
class GraphExplanation:
    """One of Dynamo's graphs.

    Args:
        units: that it computes with, in order of first use.
        reports: of passes, by phase; None is Dynamo's graph itself.
        schedules: of the finished graphs. Without those that came out of a compile cache.
    """

    units: tuple[str, ...]
    reports: Mapping[Phase | None, Sequence[Report]]
    schedules: Mapping[Phase, Sequence[str]]


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; ``print`` it.

    Args:
        graphs: in the order in which they were compiled.
        breaks: why Dynamo ended a graph before the model's end, each with the line of the model.
        eager: units that no graph computes with: hooks gather their parameters.
        several: units that several graphs compute with: each of them gathers the whole unit, and reduces all its gradients.
        recompilations: what was compiled again, and the guard that had failed, since torch.compile was last reset.
    """

    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[str, ...]
    eager: tuple[str, ...]
    several: tuple[str, ...] = ()
    recompilations: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} {_plural('graph', len(self.graphs))}, {len(self.breaks)} graph breaks"]
        for number, graph in enumerate(self.graphs):
            lines += ["", f"graph {number}: {_listed(graph.units)}"]
            for phase, reports in graph.reports.items():
                lines.append(f"  {phase.value if phase is not None else 'dynamo'}")
                for report in reports:
                    lines.append(f"    {report.name}, {report.seconds * 1e3:.1f} ms")
                    lines += [f"      {line}" for line in report.lines]
                    lines += [f"      schedule: {line}" for line in report.changes]
                if phase is not None and phase in graph.schedules:
                    lines.append("    schedule")
                    lines += [f"      {line}" for line in graph.schedules[phase]]
        for title, found in (
            ("graph breaks", self.breaks),
            ("run as they are, parameters gathered by hooks", self.eager),
            ("gathered by several graphs, by each as a whole", self.several),
            ("compiled again", self.recompilations),
        ):
            if found:
                lines += ["", f"{title}:", *(f"  {line}" for line in found)]
        return "\n".join(lines)


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    """What ``torch.compile(backend="mfsdp")`` makes of a sharded model, for these inputs.

    Runs one forward of ``model(*args, **kwargs)``, with gradients if they are enabled, so that backward graphs are made
    too; buffers and random numbers are as before when it returns. torch.compile's caches are reset first
    (:func:`torch.compiler.reset`): everything in this process is compiled once more when it is next called. Collective: all
    ranks call it.

    Args:
        model: from ``fully_shard_model``. If it is compiled, with its options; else with ``inner="aot_eager"``, which takes
            the least time to compile.

    Raises:
        TypeError: ``model`` is not sharded.
    """
    sharded = unwrapped(model, "explain")
    recompilations = tuple(_recompilations())
    compiled = model
    if model is sharded:
        compiled = torch.compile(sharded, backend="mfsdp", options={"inner": "aot_eager"})  # type: ignore[assignment]
    torch.compiler.reset()
    before = len(sharded.sharded.compiled_graphs)
    with unchanged(sharded), _collected_breaks() as breaks:
        compiled(*args, **kwargs)
    records: list[Record] = sharded.sharded.compiled_graphs[before:]
    graphs = tuple(
        GraphExplanation(
            tuple(dict.fromkeys(bucket.unit for bucket in record.context.buckets)),
            dict(record.reports),
            dict(record.schedules),
        )
        for record in records
    )
    covered = Counter(unit for graph in graphs for unit in graph.units)
    eager = tuple(unit.name for unit in sharded.sharded.eager.units if unit.buckets and unit.name not in covered)
    several = tuple(unit for unit, count in covered.items() if count > 1)
    return Explanation(graphs, tuple(dict.fromkeys(breaks)), eager, several, recompilations)


@contextlib.contextmanager
def _collected_breaks() -> Iterator[list[str]]:
    known = compat.graph_break_reasons()
    before = len(known)
    found: list[str] = []
    yield found
    for reason in known[before:]:
        if reason.graph_break:
            found.append(reason_and_place(str(reason.reason), reason.user_stack))


def reason_and_place(reason: str, stack: Sequence[traceback.FrameSummary]) -> str:
    """In a line: why Dynamo ended a graph, and the line of the model."""
    line = next((line.strip() for line in reason.split("\n") if line.strip()), "no reason given")
    if not stack:
        return line
    frame = stack[-1]
    return f"{line} -- {frame.filename}:{frame.lineno} in {frame.name}{f': {frame.line}' if frame.line else ''}"


def _recompilations() -> Iterator[str]:
    for metrics in compat.compilation_metrics():
        if metrics.recompile_reason:
            where = f"{metrics.co_filename}:{metrics.co_firstlineno} {metrics.co_name}"
            yield f"{where}: {' '.join(str(metrics.recompile_reason).split())}"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _listed(units: Sequence[str]) -> str:
    shown = [unit or "(root)" for unit in units]
    return ", ".join(shown) if len(shown) <= 6 else f"{len(shown)} units, {shown[0]} to {shown[-1]}"
