"""The order of passes, and what is kept of what they said."""

from __future__ import annotations

import functools
import hashlib
import math
import pkgutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

import torch
from torch import fx

from . import announce, float32_gradients, reduce, reshard, roles, schedule, unshard, verify
from .analysis import Analysis
from .changes import changes, events, points
from .context import Context, Phase, Report
from .contract import Contract, set_contract

__all__ = [
    "Observer",
    "Record",
    "UserPass",
    "collectives",
    "describe",
    "finish_graph",
    "name_of",
    "prepare_joint",
    "rewrite_dynamo_graph",
    "source_digest",
]

UserPass = Callable[[fx.Graph, Context, Phase], "Report | None"]
"""A pass from outside this package: changes the graph that it is given, and may say what it did."""

Observer = Callable[["Phase | None", fx.Graph, "Report | None"], None]
"""Shown every graph as it comes to the passes (without a report), and after each pass."""


@dataclass
class Record:
    """What happened to one Dynamo graph and the graphs that came of it.

    A graph that came out of a compile cache went through ``unshard`` in this process, and through the other passes in
    the process that filled the cache.

    Args:
        context: of the graphs.
        user_passes: to run after ours.
        verify_each: check the graphs after every pass of ours too, not only at the end.
        observer: shown every graph, before the first pass and after each.
        user_outputs: of the forward graph: the others are saved for backward.
        reports: of passes, by graph; None for Dynamo's.
        schedules: of the finished graphs.
    """

    context: Context
    user_passes: tuple[UserPass, ...] = ()
    verify_each: bool = False
    observer: Observer | None = None
    user_outputs: int = 0
    reports: dict[Phase | None, list[Report]] = field(default_factory=dict)
    schedules: dict[Phase, list[str]] = field(default_factory=dict)

    def run(self, phase: Phase | None, apply: Callable[..., Report], *args: Any) -> Report:
        """Apply a pass, and keep what it says."""
        begun = time.perf_counter()
        report = replace(apply(*args), seconds=time.perf_counter() - begun)
        self.reports.setdefault(phase, []).append(report)
        return report

    def transform(
        self, phase: Phase, graph: fx.Graph, apply: Callable[..., Report], *args: Any, verified_as: str | None
    ) -> None:
        """The same for a pass that changes ``graph``: with what became of its schedule.

        Args:
            verified_as: name of the pass, if the graph is to be verified afterwards.
        """
        before = events(graph, self.context)
        report = self.run(phase, apply, *args)
        if verified_as is not None:
            check = functools.partial(verify.verify, after=verified_as)
            self.run(phase, check, graph, self.context, phase)
        roles.assign(graph)  # of nodes that are new
        told = replace(report, changes=changes(before, events(graph, self.context)))
        reports = self.reports[phase]
        reports[reports.index(report)] = told
        self.show(phase, graph, told)

    def show(self, phase: Phase | None, graph: fx.Graph, report: Report | None = None) -> None:
        if self.observer is not None:
            self.observer(phase, graph, report)


def rewrite_dynamo_graph(gm: fx.GraphModule, record: Record) -> None:
    record.show(None, gm.graph)
    report = record.run(None, unshard.apply, gm, record.context)
    record.show(None, gm.graph, report)


def prepare_joint(graph: fx.Graph, record: Record, user_outputs: int) -> None:
    """Before the partition into forward and backward."""
    record.user_outputs = user_outputs
    record.reports[Phase.JOINT] = []
    roles.assign(graph)
    record.show(Phase.JOINT, graph)
    if record.verify_each:
        _note_contract(graph, Phase.JOINT, record)
    _apply(graph, Phase.JOINT, record, reshard)


def finish_graph(graph: fx.Graph, phase: Phase, record: Record) -> None:
    """After the partition: a forward, backward or inference graph."""
    context = record.context
    record.reports[phase] = []
    roles.assign(graph)
    record.show(phase, graph)
    _note_contract(graph, phase, record)
    if phase is Phase.BACKWARD:
        if context.float32_gradients:
            _apply(graph, phase, record, float32_gradients)
        _apply(graph, phase, record, reduce)
    _apply(graph, phase, record, schedule)
    graph.lint()
    if not record.verify_each:
        record.run(phase, verify.verify, graph, context, phase)
    for user_pass in record.user_passes:
        name = name_of(user_pass)
        record.transform(phase, graph, _apply_user_pass, user_pass, name, graph, context, phase, verified_as=name)
    record.schedules[phase] = describe(graph, context)
    announce.apply(graph, phase, collectives(graph, context))


def _note_contract(graph: fx.Graph, phase: Phase, record: Record) -> None:
    set_contract(graph, Contract.of(Analysis(graph, record.context, phase), record.user_outputs))


def _apply(graph: fx.Graph, phase: Phase, record: Record, step: Any) -> None:
    """One of our passes, a module."""
    name = step.__name__.rpartition(".")[2]
    verified_as = name if record.verify_each else None
    record.transform(phase, graph, step.apply, graph, record.context, verified_as=verified_as)


def name_of(user_pass: UserPass) -> str:
    name = getattr(user_pass, "__qualname__", None) or type(user_pass).__qualname__
    return name.rpartition("<locals>.")[2]


def _apply_user_pass(user_pass: UserPass, name: str, graph: fx.Graph, context: Context, phase: Phase) -> Report:
    report = user_pass(graph, context, phase)
    graph.lint()
    if report is None:
        return Report(name, [])
    if not isinstance(report, Report):
        raise TypeError(f"options['passes']: {name} returned {report!r}; a pass returns a Report, or None")
    return report


def describe(graph: fx.Graph, context: Context) -> list[str]:
    """The schedule of a graph: one line per start and end of a collective, with the computation between them."""
    found = _events(graph, context, [info.name for info in context.buckets])
    lines: list[str] = []
    computed = 0
    for node in graph.nodes:
        line = found.get(node)
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
    found = _events(graph, context, [f"#{number}" for number in range(len(context.buckets))])
    return [found[node] for node in graph.nodes if node in found]


def _events(graph: fx.Graph, context: Context, names: Sequence[str]) -> dict[fx.Node, str]:
    """What starts and ends at nodes of a graph."""
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "call_function" and roles.is_collective(node):
            found[node] = f"{node.target._opname}  of the model itself"  # our own are named below
    for node, what, bucket, stage, which in points(graph, context):
        info, detail = context.buckets[bucket], which
        exchange = info.exchange
        if what == "gather":
            detail = f"  {info.gathered_bytes:,} B in {_short(exchange.dtype)} of {exchange.gather_size} ranks"
        elif what == "reduce":
            scattered = (exchange.group_sizes[i] for i in range(stage) if exchange.collectives[i] == "reduce_scatter")
            size = info.layout.numel // math.prod(scattered) * exchange.comm_dtype.itemsize
            sent = f"{size:,} B in {_short(exchange.comm_dtype)}"
            due = ", if due" if exchange.may_wait(stage) else ""
            detail = f"  {sent}, {exchange.reduce_op} over {exchange.group_sizes[stage]} ranks{which}{due}"
        found[node] = f"{what:6}  {names[bucket]}{detail}"
    return found


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
