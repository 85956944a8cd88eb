"""Run the passes in order, and record their reports."""

from __future__ import annotations

import functools
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.decisions import Decisions
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from . import (
    announce,
    borders,
    comm_buffers,
    deliver,
    drop_unread,
    float32_gradients,
    loss_chunks,
    portions,
    reduce,
    reshard,
    roles,
    schedule,
    unshard,
)
from .changes import changes, events
from .context import Context, Report, phase_of
from .listing import describe
from .regions import RegionBody
from .solver.across_ranks import Meeting, Problem, Settled, effect, plain, settle
from .solver.costs import CostModel
from .solver.flow import Saved, flow_of
from .solver.outline import Outline, outline_of
from .solver.reasons import gib
from .solver.simulate import Event, OptimizerCost, events_of
from .solver.solve import Solution
from .solver.step_events import StepOutlines
from .verifier import verify
from .verifier.analysis import Analysis
from .verifier.contract import Contract, set_contract

if TYPE_CHECKING:
    from .fp8_matmul import Fp8Matmul

Pass = Callable[[fx.Graph, Context, Phase], Report]
"""A function that changes a graph and reports what it did."""

UserPass = Callable[[fx.Graph, Context, Phase], "Report | None"]
"""A pass from outside this package. The report is optional."""

Observer = Callable[["Phase | None", fx.Graph, "Report | None"], None]
"""A callback that gets every graph before the passes (without a report) and after each pass."""


@dataclass(frozen=True)
class Prediction:
    """Inputs for predicting times and memory.

    Args:
        costs: Costs on the machine, with the inner compiler.
        optimizer: Cost of the optimizer. Its state is in memory, and its step ends a training step.
        text: Schedule from a file, to be followed.
    """

    costs: CostModel
    optimizer: OptimizerCost
    text: ScheduleText | None = None


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
        prediction: Inputs for predictions; None: nothing is predicted.
        meeting: Meeting in which ranks agree on decisions; None: there are no other ranks.
        absent: Units of the model that the graph does not use.
        explores: Whether :attr:`plan` is to be made.
        plan: Outlines of the training graphs before they are scheduled, if a schedule was looked for.
        regions: Regions of the graph.
        inlined: Units that are in no region, each with the reason.
        user_outputs: Number of the forward graph's user outputs. Its other outputs are saved for backward.
        solution: Schedule that the solver found here or that the ranks agreed on; None if the solver was not asked.
        settled: Schedule that ranks agreed on, and the rank that found it.
        reports: Reports of passes, by graph; None for Dynamo's graph.
        schedules: Schedules of the finished graphs.
        events: Events of the finished graphs, for the simulator.
        unpredicted: Why a graph has no events.
        pieces: Pieces of the finished graphs.
    """

    context: Context
    user_passes: tuple[UserPass, ...] = ()
    verify_each: bool = False
    observer: Observer | None = None
    prediction: Prediction | None = None
    meeting: Meeting | None = None
    absent: tuple[str, ...] = ()
    explores: bool = False
    plan: StepOutlines | None = None
    regions: list[RegionBody] = field(default_factory=list)
    inlined: dict[str, str] = field(default_factory=dict)
    user_outputs: int = 0
    solution: Solution | None = None
    settled: Settled | None = None
    reports: dict[Phase | None, list[Report]] = field(default_factory=dict)
    schedules: dict[Phase, list[str]] = field(default_factory=dict)
    events: dict[Phase, list[Event]] = field(default_factory=dict)
    unpredicted: dict[Phase, str] = field(default_factory=dict)
    pieces: list[compat.CompiledPiece] = field(default_factory=list, repr=False)
    _chunked: tuple[Report, ...] = field(default=(), repr=False)
    _saved: Saved = field(default_factory=dict, repr=False)
    _agreed: tuple[Report, ...] = field(default=(), repr=False)

    @property
    def decisions(self) -> Decisions:
        """Decisions about the schedule so far."""
        return self.context.decisions

    @property
    def costs(self) -> CostModel | None:
        return self.prediction.costs if self.prediction is not None else None

    def set_decisions(self, decisions: Decisions) -> None:
        self.context = replace(self.context, decisions=decisions)

    def units_of(self, region: str) -> tuple[str, ...]:
        """Return the units that a region stands for."""
        return next(body.units for body in self.regions if body.name == region)

    def run(self, phase: Phase | None, apply: Callable[[fx.Graph, Context, Any], Report], graph: fx.Graph) -> Report:
        """Apply a pass and keep its report."""
        begun = time.perf_counter()
        report = replace(apply(graph, self.context, phase), seconds=time.perf_counter() - begun)
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
    reads. Between the joint graph and its two parts run :mod:`.portions` and :mod:`.activations`. After them follow
    user passes, the verifier, and :mod:`.announce`.
    """
    widen = [float32_gradients.apply] if context.float32_gradients else []
    early, behind = ([deliver.apply], [deliver.place]) if context.delivers_early else ([], [])
    own = [comm_buffers.apply] if any(any(info.exchange.buffers) for info in context.buckets) else []
    copies = [_activations().place] if context.policy.activation_offload else []
    last = [borders.apply] if context.in_pieces else []
    table: dict[Phase, list[Pass]] = {
        Phase.JOINT: [reshard.apply],
        Phase.FORWARD: [schedule.apply, *own, *copies, *last],
        Phase.BACKWARD: [*widen, *early, reduce.apply, schedule.apply, *own, *copies, *behind, *last],
        Phase.INFERENCE: [schedule.apply, *own, *last],
    }
    return table[phase]


def rewrite_dynamo_graph(
    gm: fx.GraphModule,
    record: CompileRecord,
    outline: Callable[[fx.Graph], None] | None = None,
    fp8: Fp8Matmul | None = None,
) -> None:
    """Run the passes over Dynamo's graph.

    Args:
        outline: Function that moves units into regions first.
        fp8: What to compute in float8.
    """
    record.show(None, gm.graph)
    if fp8 is not None:
        from . import fp8_matmul

        def multiply_in_fp8(graph: fx.Graph, context: Context, _: None) -> Report:
            report, record.context = fp8_matmul.apply(graph, context, fp8, record.costs)
            return report

        report = record.run(None, multiply_in_fp8, gm.graph)
        record.show(None, gm.graph, report)
    if outline is not None:
        outline(gm.graph)
    report = record.run(None, unshard.apply, gm.graph)
    record.show(None, gm.graph, report)


def chunk_loss(joint: fx.GraphModule, record: CompileRecord, chunks: int) -> fx.GraphModule:
    """Compute the loss of a joint graph in chunks, and run Inductor's passes over joint graphs.

    A graph without a backward stays as it is, and so does a part of the model that computes no loss.

    Raises:
        ValueError: The loss cannot be computed in chunks.
    """
    if not loss_chunks.tangents(joint.graph):
        return joint
    begun = time.perf_counter()
    try:
        joint, report = loss_chunks.apply(joint, chunks)
    except loss_chunks.NotInChunks as why:
        if record.context.whole_model or loss_chunks.computes_loss(joint.graph):
            raise ValueError(
                f"options['loss_chunks'] is {chunks}, but the loss cannot be computed in chunks: {why}. The model (or "
                "the compiled function that calls it) must compute the loss and return only it, of one element, such "
                "as F.cross_entropy of the logits. Computation between the product that gives the logits and the loss "
                "must be of operators that torch's auto_chunker knows, in float32 or bfloat16, and the batch of static "
                "shape (mark_static, dynamic=False). Change the model, or take the option out."
            ) from None
        report = Report("loss_chunks", [f"no loss in chunks here: {why}"])
    record._chunked = (replace(report, seconds=time.perf_counter() - begun),)
    return joint


def _prepare_joint(graph: fx.Graph, record: CompileRecord, user_outputs: int) -> None:
    """Run the passes over a joint graph, before it is partitioned into forward and backward."""
    record.user_outputs = user_outputs
    record.reports[Phase.JOINT] = [*record._chunked, *record._agreed]
    roles.assign(graph)
    _drop_unread(graph, Phase.JOINT, record)
    if record.prediction is not None and record.prediction.text is not None:
        record.set_decisions(_from_text(record, record.prediction.text))
    if not needs_decisions(record) and record.decisions == Decisions():
        record.set_decisions(Decisions(kept=reshard.kept_buckets(graph, record.context)))
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
    if needs_decisions(record) or (record.explores and record.plan is None):
        # What stays gathered must be decided before the partition, but depends on the graphs that the partition makes.
        graphs = trial(compat.copy_graph_module(joint), record, user_outputs, partition)
        record.plan = _plan(graphs, record, user_outputs)
    if needs_decisions(record):
        assert record.plan is not None
        decide(record.plan, record)
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
    if record.context.policy.activation_offload:

        def offload_saved(graph: fx.Graph, context: Context, _: Phase) -> Report:
            return _activations().apply(forward.graph, graph, context, user_outputs, record.costs)

        record.run(Phase.JOINT, offload_saved, backward.graph)
    return forward, backward


def trial(
    joint: fx.GraphModule, record: CompileRecord, user_outputs: int, partition: Partition
) -> dict[Phase, fx.Graph]:
    """Return graphs that only serve :func:`decide`: no bucket is kept, copies of saved values are in their places."""
    context = record.context
    roles.assign(joint.graph)
    drop_unread.apply(joint.graph, context, Phase.JOINT)
    reshard.apply(joint.graph, replace(context, decisions=Decisions()), Phase.JOINT)
    forward, backward = (gm.graph for gm in partition(joint))
    if context.policy.activation_offload:
        activations = _activations()
        activations.apply(forward, backward, context, user_outputs, record.costs)
        activations.place(forward, context, Phase.FORWARD)
        activations.place(backward, context, Phase.BACKWARD)
    return {Phase.FORWARD: forward, Phase.BACKWARD: backward}


def needs_decisions(record: CompileRecord) -> bool:
    """Whether the solver must find the schedule."""
    prediction = record.prediction
    return prediction is not None and prediction.text is None and record.context.policy.is_solved


def _plan(graphs: Mapping[Phase, fx.Graph], record: CompileRecord, user_outputs: int) -> StepOutlines:
    assert record.prediction is not None
    costs = record.prediction.costs
    return StepOutlines(outlines_of(graphs, record.context, costs, user_outputs), record.context, costs)


def decide(plan: StepOutlines, record: CompileRecord) -> None:
    """Find a schedule for graphs that are not scheduled yet.

    Raises:
        BudgetError: No schedule keeps to the memory budget.
        ValueError: There is a budget, and the graphs do not hold the whole model.
    """
    prediction, context, policy = record.prediction, record.context, record.context.policy
    assert prediction is not None
    if policy.memory_budget is not None and not context.whole_model:
        units = ", ".join(record.absent[:4]) + (f" and {len(record.absent) - 4} more" if len(record.absent) > 4 else "")
        raise ValueError(
            f"memory_budget needs the whole model in one graph, but this graph does not use {units}: what these have "
            "in memory is not known here. If other graphs use them, compile with fullgraph=True to see what breaks "
            "the graph (or use mfsdp_compile.explain). If forward does not use them at all, take them out of the "
            "model before fully_shard_model. Or leave memory_budget out."
        )
    machine = prediction.costs.hardware
    budget, refusal = usable_budget(policy, machine.memory_bytes), ""
    if policy.memory_budget is None:
        refusal = (
            f"'auto' keeps a step within the device's memory, and cannot: {gib(budget)} are to be used, of "
            f"{gib(machine.memory_bytes)} that the hardware file {machine.name!r} says (options={{'hardware': ...}} "
            "names another one, 'memory_budget' another bound)"
        )
    problem = Problem(
        plan,
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
    record.set_decisions(record.solution.decisions)


def decide_inference(graph: fx.Graph, record: CompileRecord) -> None:
    """Call :func:`decide` for an inference graph, before the compile caches are asked for its code.

    Do nothing for other graphs.
    """
    if needs_decisions(record) and record.solution is None and phase_of(graph) is Phase.INFERENCE:
        if any(compat.is_backward_node(node) for node in graph.nodes):  # a joint graph
            return
        roles.assign(graph)
        drop_unread.apply(graph, record.context, Phase.INFERENCE)
        # The body of a region gathers nothing: its buckets are whole.
        gathered = any(info.exchange.gather_group for info in record.context.buckets)
        if any(gather.start is not None or not gathered for gather in roles.gathers(graph)):
            decide(_plan({Phase.INFERENCE: graph}, record, user_outputs=0), record)


def decision_digest(record: CompileRecord) -> str | None:
    """Return a digest of the decisions for compile cache keys, if they do not follow from the graph.

    That is so if ranks agreed on the decisions. The digest is empty if the graph determines them, and None if they have
    not been made yet.
    """
    if record.meeting is None or not needs_decisions(record):
        return ""
    if record.solution is None:
        return None
    return hashlib.sha256(effect(plain(record.decisions)).encode()).hexdigest()


def outlines_of(
    graphs: Mapping[Phase, fx.Graph], context: Context, costs: CostModel, user_outputs: int
) -> dict[Phase, Outline]:
    """Return outlines of graphs that are not scheduled yet. In ``graphs``, a forward must precede its backward."""
    outlines: dict[Phase, Outline] = {}
    saved: Saved | None = None
    for phase, graph in graphs.items():
        roles.assign(graph)
        flow = flow_of(graph, context, costs, user_outputs=user_outputs, saved=saved)
        saved = flow.saved
        outlines[phase] = outline_of(flow, context)
    return outlines


def usable_budget(policy: SchedulePolicy, memory_bytes: int) -> int:
    """Return the bytes that a schedule may use: the budget, or else the device's memory, less the reserve."""
    return int((policy.memory_budget or memory_bytes) * (1 - policy.budget_reserve))


def _from_text(record: CompileRecord, text: ScheduleText) -> Decisions:
    buckets = record.context.buckets
    names, units = [info.name for info in buckets], [info.unit for info in buckets]
    return text.decisions(names, units, record.context.whole_model)


def finish_graph(graph: fx.Graph, phase: Phase, record: CompileRecord) -> None:
    """Run the passes over a forward, backward or inference graph, after the partition."""
    record.reports[phase] = []
    roles.assign(graph)
    _drop_unread(graph, phase, record)
    if phase is Phase.INFERENCE:
        if record.prediction is not None and record.prediction.text is not None:
            record.set_decisions(_from_text(record, record.prediction.text))
        elif needs_decisions(record) and record.solution is None:
            decide(_plan({phase: graph}, record, user_outputs=0), record)
        record.reports[phase] += record._agreed
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
    if record.prediction is not None:
        if record.prediction.text is not None:
            _check_followed(phase, record, record.prediction.text)
        _predict(graph, phase, record, record.prediction)
    announce.apply(graph, record.context, phase)


def finish_region(graph: fx.Graph, context: Context, phase: Phase) -> None:
    """Run the passes over a forward, backward or inference graph of a region.

    Args:
        context: Context of the region, whose buckets are whole.
    """
    roles.assign(graph)
    if context.float32_gradients and phase is Phase.BACKWARD:
        float32_gradients.apply(graph, context, phase)
    graph.lint()
    verify.verify(graph, context, phase)


def _check_followed(phase: Phase, record: CompileRecord, text: ScheduleText) -> None:
    """Raise ValueError if the schedule of a graph differs from the one in a file."""
    if phase not in text.lines:
        return
    made = ScheduleText.of({phase: record.schedules[phase]}).lines[phase]
    expected = [line for line in text.lines[phase] if line.what != "cast"]
    made = [line for line in made if line.what != "cast"]
    for number, pair in enumerate(itertools.zip_longest(expected, made), 1):
        if pair[0] != pair[1]:
            labels = [line.label if line else "nothing" for line in pair]
            raise ValueError(
                f"{text.where}: [{phase.value}] cannot be followed: entry {number} is {labels[0]!r}, but the graph "
                f"only allows {labels[1]!r}. Gathers of a unit start together and in the order of their waits; waits "
                "stand where parameters are first used, and reductions start where gradients are complete."
            )


def _predict(graph: fx.Graph, phase: Phase, record: CompileRecord, prediction: Prediction) -> None:
    """Record what the simulator needs of a graph. A failure is only recorded, because predictions change nothing."""
    try:
        saved = record._saved if phase is Phase.BACKWARD else None
        flow = flow_of(graph, record.context, prediction.costs, user_outputs=record.user_outputs, saved=saved)
        record.events[phase] = events_of(flow)
        record._saved = flow.saved
    except Exception as error:
        record.unpredicted[phase] = f"{type(error).__name__}: {error}"


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


def _activations() -> ModuleType:
    """Return the passes that copy saved values to host memory and back, which is a guest."""
    from . import activations

    return activations
