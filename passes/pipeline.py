"""The order of passes, and what is kept of what they said."""

from __future__ import annotations

import functools
import hashlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

import torch
from torch import fx

from . import announce, float32_gradients, reduce, reshard, roles, schedule, unshard, verify
from .context import Context, Phase, Report

__all__ = [
    "Record",
    "collectives",
    "describe",
    "finish_graph",
    "prepare_joint",
    "rewrite_dynamo_graph",
    "source_digest",
]


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
    announce.apply(graph, phase, collectives(graph, context))


def describe(graph: fx.Graph, context: Context) -> list[str]:
    """The schedule of a graph: one line per start and end of a collective, with the computation between them."""
    events = _events(graph, context, [info.name for info in context.buckets])
    lines: list[str] = []
    computed = 0
    for node in graph.nodes:
        line = events.get(node)
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


def collectives(graph: fx.Graph, context: Context) -> list[str]:
    """The schedule of a graph as it has to be on every rank.

    Buckets are numbered, as instances of a module share a graph, and nothing depends on the shapes of a batch: ranks with
    batches of different lengths run graphs of their own with the same collectives.
    """
    events = _events(graph, context, [f"#{number}" for number in range(len(context.buckets))])
    return [events[node] for node in graph.nodes if node in events]


def _events(graph: fx.Graph, context: Context, names: Sequence[str]) -> dict[fx.Node, str]:
    """What starts and ends at nodes of a graph."""
    events: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and roles.is_collective(node):
            events[node] = f"{node.target._opname}  of the model itself"  # our own are named below
    for gather in roles.gathers(graph):
        info, name = context.buckets[gather.bucket], names[gather.bucket]
        if gather.start is not None:
            size = f"{info.gathered_bytes:,} B in {_short(info.exchange.dtype)} of {info.exchange.gather_size} ranks"
            events[gather.start] = f"gather  {name}  {size}"
        if gather.whole is not None:
            events[gather.whole] = f"wait    {name}" if gather.start or info.has_resident else f"cast    {name}"
    for reduction in roles.reductions(graph):
        info, name = context.buckets[reduction.bucket], names[reduction.bucket]
        exchange, numel = info.exchange, info.layout.numel
        for stage, (start, wait) in enumerate(reduction.stages):
            which = f", stage {stage + 1}" if len(reduction.stages) > 1 else ""
            due = ", if due" if exchange.may_wait(stage) else ""
            size = f"{numel * exchange.comm_dtype.itemsize:,} B in {_short(exchange.comm_dtype)}"
            ranks = exchange.group_sizes[stage]
            events[start] = f"reduce  {name}  {size}, {exchange.reduce_op} over {ranks} ranks{which}{due}"
            events[wait] = f"await   {name}{which}"
            numel //= ranks if exchange.collectives[stage] == "reduce_scatter" else 1
    return events


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def source_digest() -> str:
    """A digest of the passes' source: part of every compile cache key, so that a changed pass never meets graphs of an
    older one."""
    digest = hashlib.sha256()
    package = resources.files(__package__)
    for name in sorted(info.name for info in pkgutil.iter_modules([str(package)])):
        digest.update((package / f"{name}.py").read_bytes())
    return digest.hexdigest()[:16]
