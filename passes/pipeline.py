"""The order of passes, and what is kept of what they said."""

from __future__ import annotations

import functools
import hashlib
import pkgutil
from dataclasses import dataclass, field
from importlib import resources

from torch import fx

from . import float32_gradients, reduce, reshard, roles, schedule, unshard, verify
from .context import Context, Phase, Report

__all__ = ["Record", "finish_graph", "prepare_joint", "rewrite_dynamo_graph", "source_digest"]


@dataclass
class Record:
    """What happened to one Dynamo graph and the graphs that came of it.

    A graph that came out of a compile cache went through ``unshard`` in this process, and through the other passes in
    the process that filled the cache.
    """

    context: Context
    user_outputs: int = 0  # of the forward graph: the others are saved for backward
    reports: dict[Phase | None, list[Report]] = field(default_factory=dict)
    schedules: dict[Phase, list[str]] = field(default_factory=dict)

    def add(self, phase: Phase | None, report: Report) -> None:
        self.reports.setdefault(phase, []).append(report)


def rewrite_dynamo_graph(gm: fx.GraphModule, context: Context) -> Record:
    record = Record(context)
    record.add(None, unshard.apply(gm, context))
    return record


def prepare_joint(graph: fx.Graph, record: Record, user_outputs: int) -> None:
    """Before the partition into forward and backward."""
    roles.assign(graph)
    record.user_outputs = user_outputs
    record.add(Phase.JOINT, reshard.apply(graph, record.context))


def finish_graph(graph: fx.Graph, phase: Phase, record: Record) -> None:
    """After the partition: a forward, backward or inference graph."""
    roles.assign(graph)
    context = record.context
    record.reports[phase] = []
    if phase is Phase.BACKWARD:
        if context.float32_gradients:
            record.add(phase, float32_gradients.apply(graph, context))
        record.add(phase, reduce.apply(graph, context))
    record.add(phase, schedule.apply(graph, context))
    graph.lint()
    record.add(phase, verify.apply(graph, context, phase, record.user_outputs))
    record.schedules[phase] = describe(graph, context)


def describe(graph: fx.Graph, context: Context) -> list[str]:
    """The schedule of a graph: one line per start and end of a collective, with the computation between them."""
    begun: dict[fx.Node, str] = {}
    ended: dict[fx.Node, str] = {}
    for gather in roles.gathers(graph):
        info = context.buckets[gather.bucket]
        if gather.start is not None:
            begun[gather.start] = f"gather  {info.name}  {info.gathered_bytes:,} B"
        if gather.whole is not None:
            ended[gather.whole] = (
                f"wait    {info.name}" if gather.start or info.has_resident else f"cast    {info.name}"
            )
    for reduction in roles.reductions(graph):
        info = context.buckets[reduction.bucket]
        size = info.gathered_bytes
        for stage, (start, wait) in enumerate(reduction.stages):
            which = f", stage {stage + 1}" if len(reduction.stages) > 1 else ""
            due = ", if due" if info.exchange.may_wait(stage) else ""
            begun[start] = f"reduce  {info.name}  {size:,} B{which}{due}"
            ended[wait] = f"await   {info.name}{which}"
            size //= info.exchange.group_sizes[stage] if info.exchange.collectives[stage] == "reduce_scatter" else 1
    lines: list[str] = []
    computed = 0
    for node in graph.nodes:
        line = begun.get(node) or ended.get(node)
        if line is None:
            computed += node.op == "call_function" and not roles.is_view(node)
            continue
        if computed:
            lines.append(f"        {computed} operators")
        computed = 0
        lines.append(line)
    if computed:
        lines.append(f"        {computed} operators")
    return lines


@functools.cache
def source_digest() -> str:
    """A digest of the passes' source: part of every compile cache key, so that a changed pass never meets graphs of an
    older one."""
    digest = hashlib.sha256()
    package = resources.files(__package__)
    for name in sorted(info.name for info in pkgutil.iter_modules([str(package)])):
        digest.update((package / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]
