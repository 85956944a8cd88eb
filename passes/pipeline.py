"""The order of passes, and what is kept of what they said."""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule_text import ScheduleLine

from . import announce, drop_unread, float32_gradients, portions, reduce, reshard, roles, schedule, unshard
from .changes import changes, events, points
from .context import Context, Phase, Report, SchedulePolicy, phase_of
from .decisions import Decisions, ScheduleText, decisions_of, set_decisions
from .solver.across_ranks import Meeting, Problem, Settled, effect, plain, settle
from .solver.costs import CostModel, reduced_bytes
from .solver.flow import Saved, flow_of
from .solver.outline import Outline, outline_of
from .solver.simulate import Event, OptimizerCost, events_of
from .solver.solve import Solution, gib
from .solver.step_events import Plan
from .verifier import verify
from .verifier.analysis import Analysis
from .verifier.contract import Contract, set_contract

__all__ = [
    "Observer",
    "Prediction",
    "Record",
    "UserPass",
    "collectives",
    "decide",
    "decide_inference",
    "decision_digest",
    "describe",
    "finish_graph",
    "keep_portions",
    "name_of",
    "needs_decisions",
    "outlines_of",
    "prepare_joint",
    "rewrite_dynamo_graph",
    "source_digest",
    "tag_for_trial",
    "usable_budget",
]

UserPass = Callable[[fx.Graph, Context, Phase], "Report | None"]
"""A pass from outside this package: changes the graph that it is given, and may say what it did."""

Observer = Callable[["Phase | None", fx.Graph, "Report | None"], None]
"""Shown every graph as it comes to the passes (without a report), and after each pass."""


@dataclass(frozen=True)
class Prediction:
    """What times and memory are predicted with.

    Args:
        costs: of the machine and the inner compiler.
        optimizer: whose state is in memory, and whose step ends a training step.
        text: a schedule from a file, to be followed.
    """

    costs: CostModel
    optimizer: OptimizerCost
    text: ScheduleText | None = None


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
        prediction: what a prediction needs; None: nothing is predicted.
        meeting: where decisions are agreed on with other ranks; None: there are none.
        absent: units of the model that the graph does not use.
        user_outputs: of the forward graph: the others are saved for backward.
        decisions: about the schedule.
        solution: what the solver found, or other ranks have, if it was asked.
        settled: what ranks have agreed on, and whose decisions these are.
        reports: of passes, by graph; None for Dynamo's.
        schedules: of the finished graphs.
        events: of the finished graphs, for the simulator.
        unpredicted: why there are none of a graph.
    """

    context: Context
    user_passes: tuple[UserPass, ...] = ()
    verify_each: bool = False
    observer: Observer | None = None
    prediction: Prediction | None = None
    meeting: Meeting | None = None
    absent: tuple[str, ...] = ()
    user_outputs: int = 0
    decisions: Decisions = field(default_factory=Decisions)
    solution: Solution | None = None
    settled: Settled | None = None
    reports: dict[Phase | None, list[Report]] = field(default_factory=dict)
    schedules: dict[Phase, list[str]] = field(default_factory=dict)
    events: dict[Phase, list[Event]] = field(default_factory=dict)
    unpredicted: dict[Phase, str] = field(default_factory=dict)
    _saved: Saved = field(default_factory=dict, repr=False)
    _agreed: tuple[Report, ...] = field(default=(), repr=False)

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
    record.reports[Phase.JOINT] = [*record._agreed]
    roles.assign(graph)
    _take_out_unread(graph, Phase.JOINT, record)
    if record.prediction is not None and record.prediction.text is not None:
        record.decisions = _from_text(record, record.prediction.text)
    if needs_decisions(record) or record.decisions != Decisions():
        set_decisions(graph, record.decisions)
    record.show(Phase.JOINT, graph)
    if record.verify_each:
        _note_contract(graph, Phase.JOINT, record)
    _apply(graph, Phase.JOINT, record, reshard)
    decided = decisions_of(graph)
    assert decided is not None
    record.decisions = decided


def keep_portions(forward: fx.Graph, backward: fx.Graph, record: Record) -> None:
    """After the partition, where portions of what forward gathers are to stay for the backward."""
    if not any(info.portion_size for info in record.context.buckets):
        return
    set_decisions(forward, record.decisions)
    record.run(Phase.JOINT, portions.apply, forward, backward, record.context, record.user_outputs)
    decided = decisions_of(forward)
    assert decided is not None
    record.decisions = decided


def needs_decisions(record: Record) -> bool:
    """Whether the schedule is for the solver to find; then :func:`decide` comes before :func:`prepare_joint`."""
    prediction = record.prediction
    return prediction is not None and prediction.text is None and record.context.policy.is_solved


def tag_for_trial(joint: fx.Graph, record: Record) -> None:
    """For a partition whose graphs are for :func:`decide` alone: nothing is kept."""
    roles.assign(joint)
    drop_unread.apply(joint, record.context)
    set_decisions(joint, Decisions())
    reshard.apply(joint, record.context)


def decide(graphs: Mapping[Phase, fx.Graph], record: Record, user_outputs: int) -> None:
    """Find a schedule for graphs that are not scheduled yet.

    Raises:
        BudgetError: there is none that keeps to the memory budget.
        ValueError: there is a budget, and the graphs do not hold the whole model.
    """
    prediction, context, policy = record.prediction, record.context, record.context.policy
    assert prediction is not None
    if policy.memory_budget is not None and not context.whole_model:
        units = ", ".join(record.absent[:4]) + (f" and {len(record.absent) - 4} more" if len(record.absent) > 4 else "")
        raise ValueError(
            f"memory_budget needs the whole model in one graph, but this one does not use {units}: what these have in memory "
            "is not known here. If other graphs use them, compile with fullgraph=True to see what breaks the graph (or use "
            "mfsdp_compile.explain). If forward does not use them at all, take them out of the model before "
            "fully_shard_model. Or leave memory_budget out."
        )
    machine = prediction.costs.hardware
    budget, refusal = usable_budget(policy, machine.memory_bytes), ""
    if policy.memory_budget is None:
        refusal = (
            f"'auto' keeps a step within the device's memory, and cannot: {gib(budget)} are to be used, of "
            f"{gib(machine.memory_bytes)} that the hardware file {machine.name!r} says (options={{'hardware': ...}} names "
            "another one, 'memory_budget' another bound)"
        )
    problem = Problem(
        Plan(outlines_of(graphs, context, prediction.costs, user_outputs), context, prediction.costs),
        prediction.optimizer,
        budget,
        prefetch=None if policy.prefetch == "auto" else policy.prefetch,
        reshard=None if policy.reshard_after_forward == "auto" else policy.reshard_after_forward,
        refusal=refusal,
    )
    if record.meeting is None or not problem.communicates:
        record.solution = problem.solve()
    else:
        begun = time.perf_counter()
        record.settled, timeline = settle(problem, record.meeting)
        record._agreed = (Report("agree", [str(record.settled)], time.perf_counter() - begun),)
        record.solution = Solution(record.settled.decisions, timeline)
    record.decisions = record.solution.decisions


def decide_inference(graph: fx.Graph, record: Record) -> None:
    """:func:`decide` for an inference graph, before compile caches are asked for its code; for others, nothing."""
    if needs_decisions(record) and record.solution is None and phase_of(graph) is Phase.INFERENCE:
        if any(compat.is_backward_node(node) for node in graph.nodes):  # a joint graph
            return
        roles.assign(graph)
        drop_unread.apply(graph, record.context)
        if roles.gathers(graph):  # else the body of a region
            decide({Phase.INFERENCE: graph}, record, user_outputs=0)


def decision_digest(record: Record) -> str | None:
    """What compile caches must know of decisions that do not follow from the graph, since ranks have agreed on them. None: there
    are none yet."""
    if record.meeting is None or not needs_decisions(record):
        return ""
    if record.solution is None:
        return None
    return hashlib.sha256(effect(plain(record.decisions)).encode()).hexdigest()


def outlines_of(
    graphs: Mapping[Phase, fx.Graph], context: Context, costs: CostModel, user_outputs: int
) -> dict[Phase, Outline]:
    """Of graphs that are not scheduled yet, the forward before its backward."""
    outlines: dict[Phase, Outline] = {}
    saved: Saved | None = None
    for phase, graph in graphs.items():
        roles.assign(graph)
        flow = flow_of(graph, context, costs, user_outputs=user_outputs, saved=saved)
        saved = flow.saved
        outlines[phase] = outline_of(flow, context)
    return outlines


def usable_budget(policy: SchedulePolicy, memory_bytes: int) -> int:
    """Bytes that schedules are made for: of the budget, or else of the device, what is not held in reserve."""
    return int((policy.memory_budget or memory_bytes) * (1 - policy.budget_reserve))


def _from_text(record: Record, text: ScheduleText) -> Decisions:
    buckets = record.context.buckets
    names, units = [info.name for info in buckets], [info.unit for info in buckets]
    return text.decisions(names, units, record.context.whole_model)


def finish_graph(graph: fx.Graph, phase: Phase, record: Record) -> None:
    """After the partition: a forward, backward or inference graph."""
    context = record.context
    record.reports[phase] = []
    roles.assign(graph)
    _take_out_unread(graph, phase, record)
    if phase is Phase.INFERENCE:
        if record.prediction is not None and record.prediction.text is not None:
            record.decisions = _from_text(record, record.prediction.text)
        elif needs_decisions(record) and record.solution is None:
            decide({phase: graph}, record, user_outputs=0)
        record.reports[phase] += record._agreed
    set_decisions(graph, record.decisions)
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
    if record.prediction is not None:
        if record.prediction.text is not None:
            _check_followed(phase, record, record.prediction.text)
        _predict(graph, phase, record, record.prediction)
    announce.apply(graph, phase, collectives(graph, context), context)


def _check_followed(phase: Phase, record: Record, text: ScheduleText) -> None:
    """Raise ValueError if a schedule is not the one that a file asks for."""
    if phase not in text.lines:
        return
    made = ScheduleText.of({phase: record.schedules[phase]}).lines[phase]
    wanted = [line for line in text.lines[phase] if line.what != "cast"]
    made = [line for line in made if line.what != "cast"]
    for number, (asked, got) in enumerate(itertools.zip_longest(wanted, made), 1):
        if asked != got:
            labels = [line.label if line else "nothing" for line in (asked, got)]
            raise ValueError(
                f"{text.where}: [{phase.value}] cannot be followed: entry {number} is {labels[0]!r}, where the graph "
                f"can only have {labels[1]!r}. Gathers of a unit start together and in the order of their waits; "
                "waits stand where parameters are first used, and reductions start where gradients are complete."
            )


def _predict(graph: fx.Graph, phase: Phase, record: Record, prediction: Prediction) -> None:
    """Note what the simulator needs of a graph. What is predicted changes nothing, so that it may fail."""
    try:
        saved = record._saved if phase is Phase.BACKWARD else None
        flow = flow_of(graph, record.context, prediction.costs, user_outputs=record.user_outputs, saved=saved)
        record.events[phase] = events_of(flow)
        record._saved = flow.saved
    except Exception as error:
        record.unpredicted[phase] = f"{type(error).__name__}: {error}"


def _note_contract(graph: fx.Graph, phase: Phase, record: Record) -> None:
    found = Analysis(graph, record.context, phase)
    decisions = record.decisions
    set_contract(graph, Contract.of(found, record.user_outputs, decisions.kept, decisions.portions or frozenset()))


def _take_out_unread(graph: fx.Graph, phase: Phase, record: Record) -> None:
    """Before anything is decided about gathers, or noted. Said only where there are such."""
    report = drop_unread.apply(graph, record.context)
    if report.lines:
        record.reports[phase].append(report)


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
    for node, what, bucket, number in points(graph, context):
        info = context.buckets[bucket]
        exchange, detail, is_deferrable = info.exchange, "", False
        if what == "gather":
            ranks = number if number > 1 else exchange.gather_size
            detail = f"{info.gathered_bytes:,} B in {_short(exchange.dtype)} of {ranks} ranks"
        elif what == "reduce":
            stage = number - 1
            sent = f"{reduced_bytes(info, stage):,} B in {_short(exchange.comm_dtype)}"
            detail = f"{sent}, {exchange.reduce_op} over {exchange.group_sizes[stage]} ranks"
            is_deferrable = exchange.may_wait(stage)
        found[node] = str(ScheduleLine(what, names[bucket], number, detail, is_deferrable))
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def source_digest() -> str:
    """A digest of the passes' source: part of every compile cache key, so that a changed pass never meets graphs of an
    older one."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
