"""Run the passes in order, and record their reports."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.decisions import Decisions
from mfsdp_compile.runtime.schedule.phase import Phase

from . import announce, borders, comm_buffers, deliver, drop_unread, portions, reduce, reshard, roles, schedule, unshard
from .changes import changes, events
from .context import Context, Pass, Report
from .listing import describe
from .producer import Producer
from .regions import RegionBody
from .verifier import verify
from .verifier.analysis import Analysis
from .verifier.contract import Contract, set_contract

UserPass = Callable[[fx.Graph, Context, Phase], "Report | None"]
"""A pass from outside this package. The report is optional."""

Observer = Callable[["Phase | None", fx.Graph, "Report | None"], None]
"""A callback that gets every graph before the passes (without a report) and after each pass."""


class Forecast(Protocol):
    """Looks at finished graphs, to predict how long they run and what memory they need."""

    def finished(self, graph: fx.Graph, phase: Phase, context: Context, user_outputs: int) -> None:
        """Look at a graph after all passes."""

    def seconds(self, graph: fx.Graph) -> float:
        """Return the predicted seconds of a graph's kernels."""


@dataclass
class CompileRecord:
    """Record of what the passes did to one Dynamo graph and the graphs derived from it.

    A graph from a compile cache went through ``unshard`` in this process, and through the other passes in the process
    that filled the cache.

    Args:
        context: Context of the graphs, with the decisions so far.
        user_passes: User passes, which run after ours.
        verify_each: Whether to verify the graphs after each of our passes too, not only at the end.
        observer: Callback that gets every graph, before the first pass and after each pass.
        producer: What decides about the schedule.
        forecast: What predictions are made from; None: nothing is predicted.
        regions: Regions of the graph.
        inlined: Units that are in no region, each with the reason.
        user_outputs: Number of the forward graph's user outputs. Its other outputs are saved for backward.
        reports: Reports of passes, by graph; None for Dynamo's graph.
        schedules: Schedules of the finished graphs.
        pieces: Pieces of the finished graphs.
    """

    context: Context
    user_passes: tuple[UserPass, ...] = ()
    verify_each: bool = False
    observer: Observer | None = None
    producer: Producer = field(default_factory=Producer)
    forecast: Forecast | None = None
    regions: list[RegionBody] = field(default_factory=list)
    inlined: dict[str, str] = field(default_factory=dict)
    user_outputs: int = 0
    reports: dict[Phase | None, list[Report]] = field(default_factory=dict)
    schedules: dict[Phase, list[str]] = field(default_factory=dict)
    pieces: list[compat.CompiledPiece] = field(default_factory=list, repr=False)
    _before_passes: list[Report] = field(default_factory=list, repr=False)

    @property
    def decisions(self) -> Decisions:
        """Decisions about the schedule so far."""
        return self.context.decisions

    @property
    def distinct(self) -> tuple[Any, ...]:
        """Operators whose calls the partitioner must not merge."""
        return (*roles.DISTINCT, *(each for feature in self.context.features for each in feature.distinct))

    def set_decisions(self, decisions: Decisions | None) -> None:
        """Follow other decisions from now on; None: those so far."""
        if decisions is not None:
            self.context = replace(self.context, decisions=decisions)

    def units_of(self, region: str) -> tuple[str, ...]:
        """Return the units that a region stands for."""
        return next(body.units for body in self.regions if body.name == region)

    def run(self, phase: Phase | None, apply: Callable[[fx.Graph, Context, Any], Report], graph: fx.Graph) -> Report:
        """Apply a pass and keep its report."""
        begun = time.perf_counter()
        return self.tell(phase, apply(graph, self.context, phase), begun)

    def tell(self, phase: Phase | None, report: Report, begun: float) -> Report:
        """Keep a report of what began at a time of ``time.perf_counter``."""
        report = replace(report, seconds=time.perf_counter() - begun)
        self.reports.setdefault(phase, []).append(report)
        return report

    def transform(self, phase: Phase, apply: Pass, graph: fx.Graph, verified_as: str | None) -> None:
        """Apply a pass that changes a schedule, and report the changes.

        Args:
            verified_as: Name of the pass, if the graph is to be verified afterwards.
        """
        before = events(graph, self.context)
        report = self.run(phase, apply, graph)
        if verified_as is not None:
            self.run(phase, functools.partial(verify.verify, after=verified_as), graph)
        roles.assign(graph)  # for new nodes
        told = replace(report, changes=changes(before, events(graph, self.context)))
        reports = self.reports[phase]
        reports[reports.index(report)] = told
        self.show(phase, graph, told)

    def show(self, phase: Phase | None, graph: fx.Graph, report: Report | None = None) -> None:
        if self.observer is not None:
            self.observer(phase, graph, report)


def passes_of(phase: Phase, context: Context) -> list[Pass]:
    """Return the passes that run over a graph, in order.

    Before them, :mod:`.unshard` has rewritten Dynamo's graph, and :mod:`.drop_unread` has removed gathers that nobody
    reads. Between the joint graph and its two parts runs :mod:`.portions`. After them follow user passes, the verifier,
    and :mod:`.announce`. Features add theirs.
    """
    features = context.features
    widen = [each for feature in features for each in feature.runs_early.get(phase, ())]
    early, behind = ([deliver.apply], [deliver.place]) if context.delivers_early else ([], [])
    own = [comm_buffers.apply] if any(any(info.exchange.buffers) for info in context.buckets) else []
    late = [each for feature in features for each in feature.runs_late.get(phase, ())]
    last = [borders.apply] if context.in_pieces else []
    table: dict[Phase, list[Pass]] = {
        Phase.JOINT: [reshard.apply],
        Phase.FORWARD: [*widen, schedule.apply, *own, *late, *last],
        Phase.BACKWARD: [*widen, *early, reduce.apply, schedule.apply, *own, *late, *behind, *last],
        Phase.INFERENCE: [*widen, schedule.apply, *own, *late, *last],
    }
    return table[phase]


def rewrite_dynamo_graph(
    gm: fx.GraphModule, record: CompileRecord, outline: Callable[[fx.Graph], None] | None = None
) -> None:
    """Run the passes over Dynamo's graph.

    Args:
        outline: Function that moves units into regions first.
    """
    record.show(None, gm.graph)
    for feature in record.context.features:
        begun = time.perf_counter()
        if (changed := feature.rewrite(gm.graph, record.context)) is not None:
            report, record.context = changed
            record.show(None, gm.graph, record.tell(None, report, begun))
    if outline is not None:
        outline(gm.graph)
    report = record.run(None, unshard.apply, gm.graph)
    record.show(None, gm.graph, report)


def rewrite_joint(joint: fx.GraphModule, record: CompileRecord) -> fx.GraphModule:
    """Let features rewrite a joint graph, before the passes. Return the graph in its place."""
    record._before_passes.clear()
    for feature in record.context.features:
        begun = time.perf_counter()
        joint, report = feature.rewrite_joint(joint, record.context)
        if report is not None:
            record._before_passes.append(replace(report, seconds=time.perf_counter() - begun))
    return joint


def _prepare_joint(graph: fx.Graph, record: CompileRecord, user_outputs: int) -> None:
    """Run the passes over a joint graph, before it is partitioned into forward and backward."""
    record.user_outputs = user_outputs
    record.reports[Phase.JOINT] = [*record._before_passes, *record.producer.reports]
    roles.assign(graph)
    _drop_unread(graph, Phase.JOINT, record)
    record.set_decisions(record.producer.decide(graph, Phase.JOINT, record.context))
    record.show(Phase.JOINT, graph)
    if record.verify_each:
        note_contract(graph, record.context, Phase.JOINT, record.user_outputs)
    _apply_passes(graph, Phase.JOINT, record)


Partition = Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]]
"""A function that partitions a joint graph into forward and backward."""


def partitioned(
    joint: fx.GraphModule, record: CompileRecord, user_outputs: int, partition: Partition
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Run the passes over a joint graph, partition it into forward and backward, and run those that change both."""
    if record.producer.looks_ahead:
        # What stays gathered must be decided before the partition, but depends on the graphs that the partition makes.
        graphs = trial(compat.copy_graph_module(joint), record, user_outputs, partition)
        record.set_decisions(record.producer.consider(graphs, record.context, user_outputs))
    _prepare_joint(joint.graph, record, user_outputs)
    if (part := record.context.policy.activation_budgets[0]) < 1:
        where = "each region" if record.regions else "the graph"
        told = f"of what {where} would save for backward, {part:.0%} is saved (activation_memory_budget)"
        record.reports[Phase.JOINT].append(Report("partition", [told]))
    forward, backward = partition(joint)
    if any(info.portion_size for info in record.context.buckets):

        def keep_portions(graph: fx.Graph, context: Context, _: Phase) -> Report:
            report, kept = portions.apply(forward.graph, graph, context, user_outputs)
            record.set_decisions(replace(context.decisions, portions=kept))
            return report

        record.run(Phase.JOINT, keep_portions, backward.graph)
    for feature in record.context.features:
        begun = time.perf_counter()
        report = feature.rewrite_both(forward.graph, backward.graph, record.context, user_outputs)
        if report is not None:
            record.tell(Phase.JOINT, report, begun)
    return forward, backward


def trial(
    joint: fx.GraphModule, record: CompileRecord, user_outputs: int, partition: Partition
) -> dict[Phase, fx.Graph]:
    """Return graphs that only serve decisions: no bucket is kept, and what features copy is in its place."""
    context = record.context
    roles.assign(joint.graph)
    drop_unread.apply(joint.graph, context, Phase.JOINT)
    reshard.apply(joint.graph, replace(context, decisions=Decisions()), Phase.JOINT)
    forward, backward = (gm.graph for gm in partition(joint))
    for feature in context.features:
        if feature.rewrite_both(forward, backward, context, user_outputs) is not None:
            for phase, graph in ((Phase.FORWARD, forward), (Phase.BACKWARD, backward)):
                for apply in feature.runs_late.get(phase, ()):
                    apply(graph, context, phase)
    return {Phase.FORWARD: forward, Phase.BACKWARD: backward}


def decide_early(graph: fx.Graph, record: CompileRecord) -> None:
    """Decide about an inference graph before compile caches are asked for its code. Ignore other graphs."""
    record.set_decisions(record.producer.decide_early(graph, record.context))


def finish_graph(graph: fx.Graph, phase: Phase, record: CompileRecord) -> None:
    """Run the passes over a forward, backward or inference graph, after the partition."""
    record.reports[phase] = []
    roles.assign(graph)
    _drop_unread(graph, phase, record)
    if phase is Phase.INFERENCE:
        record.set_decisions(record.producer.decide(graph, phase, record.context))
        record.reports[phase] += record.producer.reports
    record.show(phase, graph)
    note_contract(graph, record.context, phase, record.user_outputs)
    _apply_passes(graph, phase, record)
    graph.lint()
    if not record.verify_each:
        record.run(phase, verify.verify, graph)
    for user_pass in record.user_passes:
        name = name_of(user_pass)
        record.transform(phase, functools.partial(_apply_user_pass, user_pass, name), graph, verified_as=name)
    record.schedules[phase] = describe(graph, record.context)
    record.producer.check(phase, record.schedules[phase])
    if record.forecast is not None:
        record.forecast.finished(graph, phase, record.context, record.user_outputs)
    announce.apply(graph, record.context, phase)


def finish_region(graph: fx.Graph, context: Context, phase: Phase) -> None:
    """Run the passes over a forward, backward or inference graph of a region.

    Args:
        context: Context of the region, whose buckets are whole.
    """
    roles.assign(graph)
    for feature in context.features:
        for apply in feature.runs_early.get(phase, ()):
            apply(graph, context, phase)
    graph.lint()
    verify.verify(graph, context, phase)


def note_contract(graph: fx.Graph, context: Context, phase: Phase, user_outputs: int) -> None:
    """Record what passes must preserve of a graph with roles."""
    found, decisions = Analysis(graph, context, phase), context.decisions
    set_contract(graph, Contract.of(found, user_outputs, decisions.kept, decisions.portions or frozenset()))


def _drop_unread(graph: fx.Graph, phase: Phase, record: CompileRecord) -> None:
    """Remove unread gathers before any decision about gathers. A report is kept only if there were any."""
    report = drop_unread.apply(graph, record.context, phase)
    if report.lines:
        record.reports[phase].append(report)


def _apply_passes(graph: fx.Graph, phase: Phase, record: CompileRecord) -> None:
    for apply in passes_of(phase, record.context):
        name = apply.__module__.rpartition(".")[2]
        record.transform(phase, apply, graph, verified_as=name if record.verify_each else None)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a user's function, or of the class of a callable."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return name.rpartition("<locals>.")[2]


def _apply_user_pass(user_pass: UserPass, name: str, graph: fx.Graph, context: Context, phase: Phase) -> Report:
    report = user_pass(graph, context, phase)
    graph.lint()
    if report is None:
        return Report(name, [])
    if not isinstance(report, Report):
        raise TypeError(f"options['passes']: {name} returned {report!r}; a pass returns a Report, or None")
    return report
