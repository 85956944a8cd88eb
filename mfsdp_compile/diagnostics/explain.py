"""``mfsdp_compile.explain``: a readable account of what ``torch.compile(backend="mfsdp")`` does with a model.

It lists the graphs and what they gather and reduce, what each pass did to the schedule, where Dynamo broke the graph
and why, which units therefore run eagerly, and what has been compiled more than once and why.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mfsdp_compile.passes.context import Report
from mfsdp_compile.passes.folding import folded
from mfsdp_compile.passes.pipeline import CompileRecord
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.precision import Policies
from mfsdp_compile.runtime.schedule.phase import Phase

from ..backend.bucket_infos import bucket_info
from ..backend.verify_step import unchanged
from ..quantities import bytes_text
from ..sharded_module import unwrapped


@dataclass(frozen=True)
class GraphExplanation:
    """One of Dynamo's graphs.

    Args:
        units: Units that it computes with, in order of first use.
        regions: The units that each region stands for. They are compiled once.
        inlined: Units that are in no region, each with the reason. Empty if regions are switched off.
        reports: Reports of the passes, by phase. None is Dynamo's graph itself.
        schedules: Schedules of the finished graphs, except those that were read from a compile cache.
    """

    units: tuple[str, ...]
    regions: Mapping[str, tuple[str, ...]]
    inlined: Mapping[str, str]
    reports: Mapping[Phase | None, Sequence[Report]]
    schedules: Mapping[Phase, Sequence[str]]


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`; ``print`` it.

    Args:
        graphs: The graphs, in the order in which they were compiled.
        breaks: Why Dynamo ended a graph before the end of the model, each with the line of the model.
        eager: Units that no graph computes with. Hooks gather their parameters.
        several: Units that several graphs compute with. Each of these graphs gathers the whole unit and reduces all its
            gradients.
        recompilations: What was recompiled since torch.compile was last reset, and the guard that failed.
        precision: The mixed-precision policies, by their fields that are not the default's. Empty if there are none.
        host: What this rank holds in host memory, beside the optimizer's state. Empty if that is nothing.
    """

    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[str, ...]
    eager: tuple[str, ...]
    several: tuple[str, ...] = ()
    recompilations: tuple[str, ...] = field(default=())
    precision: str = ""
    host: str = ""

    def __str__(self) -> str:
        lines = [f"{len(self.graphs)} {_plural('graph', len(self.graphs))}, {len(self.breaks)} graph breaks"]
        if self.precision:
            lines.append(f"precision: {self.precision}")
        if self.host:
            lines.append(f"host memory: {self.host}")
        for number, graph in enumerate(self.graphs):
            lines += ["", f"graph {number}: {_listed(graph.units)}"]
            lines += [
                f"  {name}: {len(units)} units, {units[0]} to {units[-1]}" for name, units in graph.regions.items()
            ]
            lines += [f"  no region: {_listed(units)}: {reason}" for reason, units in _by_reason(graph.inlined).items()]
            for phase, reports in graph.reports.items():
                lines.append(f"  {phase.value if phase is not None else 'dynamo'}")
                for report in reports:
                    lines.append(f"    {report.name}, {report.seconds * 1e3:.1f} ms")
                    lines += [f"      {line}" for line in folded(report.lines)]
                    lines += [f"      schedule: {line}" for line in folded(report.changes)]
                if phase is not None and phase in graph.schedules:
                    lines.append("    schedule")
                    lines += [f"      {line}" for line in folded(graph.schedules[phase])]
        for title, found in (
            ("graph breaks", self.breaks),
            ("run as they are, parameters gathered by hooks", self.eager),
            ("gathered by several graphs, by each as a whole", self.several),
            ("compiled again", self.recompilations),
        ):
            if found:
                lines += ["", f"{title}:", *(f"  {line}" for line in found)]
        return "\n".join(lines)


def explain(model: nn.Module | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain what ``torch.compile(backend="mfsdp")`` makes of a sharded model for these inputs.

    Runs one forward of ``model(*args, **kwargs)``. If gradients are enabled, backward graphs are compiled too. Buffers
    and random state are restored before it returns. It first resets torch.compile's caches
    (:func:`torch.compiler.reset`), so everything in this process is recompiled at its next call. Collective: all ranks
    call it.

    Args:
        model: The model that ``fully_shard_model`` returned. If it is compiled, its options are used; otherwise
            ``inner="aot_eager"``, which compiles fastest. Or a compiled function that calls such a model, which is then
            passed too: ``explain(function, *inputs, sharded=model)``.

    Raises:
        TypeError: If ``model`` is not sharded, or is a function and ``sharded`` is missing.
    """
    if not isinstance(model, nn.Module) and "sharded" not in kwargs:
        raise TypeError(
            f"explain takes the model that fully_shard_model returned, got a {type(model).__name__}. Of a compiled "
            "function, pass the model that it calls too: explain(function, *inputs, sharded=model)."
        )
    sharded = unwrapped(model if isinstance(model, nn.Module) else kwargs.pop("sharded"), "explain")
    recompilations = tuple(_recompilations())
    compiled: Callable[..., Any] = model
    if model is sharded:
        compiled = torch.compile(sharded, backend="mfsdp", options={"inner": "aot_eager"})
    torch.compiler.reset()
    before = len(sharded.sharded.compiled_graphs)
    with unchanged(sharded), _collected_breaks() as breaks:
        compiled(*args, **kwargs)
    records: list[CompileRecord] = sharded.sharded.compiled_graphs[before:]
    graphs = tuple(
        GraphExplanation(
            tuple(dict.fromkeys(bucket.unit for bucket in record.context.buckets)),
            {body.name: body.units for body in record.regions},
            dict(record.inlined),
            dict(record.reports),
            dict(record.schedules),
        )
        for record in records
    )
    covered = Counter(unit for graph in graphs for unit in graph.units)
    eager = tuple(unit.name for unit in sharded.sharded.eager.units if unit.buckets and unit.name not in covered)
    several = tuple(unit for unit, count in covered.items() if count > 1)
    policies = sharded.sharded.precision
    precision = str(policies) if policies != Policies() else ""
    return Explanation(
        graphs, tuple(dict.fromkeys(breaks)), eager, several, recompilations, precision, _host(sharded.sharded)
    )


def _host(sharded: ShardedModel) -> str:
    infos = [bucket_info(bucket.plan, bucket.topology) for bucket in sharded.buckets]
    if not (offloaded := [info for info in infos if info.rests_in_host_memory]):
        return ""
    shards = sum(info.shard_bytes for info in offloaded)
    gradients = sum(info.sum_bytes for info in offloaded)
    held = f"parameter shards {bytes_text(shards)}" + (f", gradients {bytes_text(gradients)}" if gradients else "")
    copies = sum(info.resident_bytes for info in offloaded if not info.resident_groups)
    more = f"; the device keeps copies of shards, {bytes_text(copies)}" if copies else ""
    return f"{held} per rank, and the optimizer's state{more}"


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
    """Return, in one line, why Dynamo ended a graph and the line of the model where it did."""
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


def _by_reason(inlined: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for unit, reason in inlined.items():
        found.setdefault(reason, []).append(unit)
    return found


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _listed(units: Sequence[str]) -> str:
    shown = [unit or "(root)" for unit in units]
    return ", ".join(shown) if len(shown) <= 6 else f"{len(shown)} units, {shown[0]} to {shown[-1]}"
