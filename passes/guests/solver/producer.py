"""The solver as a producer of decisions, and a producer that outlines graphs for those that try other schedules."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.decisions import Decisions
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from ... import drop_unread, roles
from ...context import Context, Report, phase_of
from ...producer import Budgets, Producer
from .across_ranks import AgreedOtherwise, Meeting, Problem, Settled, effect, plain, settle
from .costs import CostModel
from .flow import Saved, flow_of
from .forecast import Prediction
from .outline import Outline, outline_of
from .reasons import BudgetError, gib
from .solve import Solution
from .step_events import StepOutlines


class Predicting(Producer):
    """Outlines graphs before they are scheduled, so that schedules can be predicted for them.

    Args:
        prediction: Inputs for predictions.
        meeting: Meeting in which ranks agree on decisions; None: there are no other ranks.
        plan: Outlines of the training graphs, once they were made.
    """

    looks_ahead = True

    def __init__(self, prediction: Prediction, meeting: Meeting | None, plan: StepOutlines | None = None) -> None:
        self.prediction, self.meeting, self.plan = prediction, meeting, plan

    def consider(self, graphs: Mapping[Phase, fx.Graph], context: Context, user_outputs: int) -> Decisions | None:
        self.plan = self._outlined(graphs, context, user_outputs)
        return None

    def _outlined(self, graphs: Mapping[Phase, fx.Graph], context: Context, user_outputs: int) -> StepOutlines:
        costs = self.prediction.costs
        return StepOutlines(outlines_of(graphs, context, costs, user_outputs), context, costs)


class Outliner(Predicting):
    """Leaves decisions to another producer.

    Args:
        decides: The other producer.
        plan: Outlines that were made with another schedule; None: they are to be made.
    """

    is_cacheable = False

    def __init__(
        self, prediction: Prediction, meeting: Meeting | None, decides: Producer, plan: StepOutlines | None
    ) -> None:
        super().__init__(prediction, meeting, plan)
        self.looks_ahead = plan is None
        self._decides = decides

    def decide(self, graph: fx.Graph, phase: Phase, context: Context) -> Decisions | None:
        return self._decides.decide(graph, phase, context)

    def check(self, phase: Phase, made: Sequence[str]) -> None:
        self._decides.check(phase, made)


class Solver(Predicting):
    """Finds the fastest schedule within a memory budget.

    Args:
        explores: Whether other schedules are looked for, too, so that graphs must not come from compile caches.
        solution: Schedule that was found here or that ranks agreed on; None: none yet.
        settled: Schedule that ranks agreed on, and the rank that found it.
    """

    def __init__(self, prediction: Prediction, meeting: Meeting | None, explores: bool = False) -> None:
        super().__init__(prediction, meeting)
        self.is_cacheable, self.meets = not explores, meeting is not None
        self.settled: Settled | None = None
        self.solution: Solution | None = None

    @property
    def digest(self) -> str | None:
        if self.meeting is None:
            return ""
        if self.solution is None:
            return None
        return hashlib.sha256(effect(plain(self.solution.decisions)).encode()).hexdigest()

    def consider(self, graphs: Mapping[Phase, fx.Graph], context: Context, user_outputs: int) -> Decisions:
        self.plan = self._outlined(graphs, context, user_outputs)
        return self._solve(self.plan)

    def decide(self, graph: fx.Graph, phase: Phase, context: Context) -> Decisions | None:
        if phase is not Phase.INFERENCE or self.solution is not None:
            return None
        return self._solve(self._outlined({phase: graph}, context, user_outputs=0))

    def decide_early(self, graph: fx.Graph, context: Context) -> Decisions | None:
        if self.solution is not None or phase_of(graph) is not Phase.INFERENCE:
            return None
        if any(compat.is_backward_node(node) for node in graph.nodes):  # a joint graph
            return None
        roles.assign(graph)
        drop_unread.apply(graph, context, Phase.INFERENCE)
        # The body of a region gathers nothing: its buckets are whole.
        gathered = any(info.exchange.gather_group for info in context.buckets)
        if not any(gather.start is not None or not gathered for gather in roles.gathers(graph)):
            return None
        return self._solve(self._outlined({Phase.INFERENCE: graph}, context, user_outputs=0))

    def _solve(self, plan: StepOutlines) -> Decisions:
        """Find a schedule for graphs that are not scheduled yet.

        Raises:
            BudgetError: No schedule keeps to the memory budget.
            ValueError: There is a budget, and the graphs do not hold the whole model.
        """
        prediction, context, policy = self.prediction, plan.context, plan.context.policy
        if policy.memory_budget is not None and not context.whole_model:
            absent = context.absent
            units = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
            raise ValueError(
                "memory_budget needs the whole model in one graph, but this graph does not use "
                f"{units}: what these have in memory is not known here. If other graphs use them, compile with "
                "fullgraph=True to see what breaks the graph (or use mfsdp_compile.explain). If forward does not use "
                "them at all, take them out of the model before fully_shard_model. Or leave memory_budget out."
            )
        machine = prediction.costs.hardware
        budget, refusal = usable_budget(policy, machine.memory_bytes), ""
        if policy.memory_budget is None:
            refusal = (
                f"'auto' keeps a step within the device's memory, and cannot: {gib(budget)} are to be used, of "
                f"{gib(machine.memory_bytes)} that the hardware file {machine.name!r} says (options={{'hardware': "
                "...} names another one, 'memory_budget' another bound)"
            )
        problem = Problem(
            plan,
            prediction.optimizer,
            budget,
            prefetch=None if policy.prefetch == "auto" else policy.prefetch,
            reshard=None if policy.reshard_after_forward == "auto" else policy.reshard_after_forward,
            refusal=refusal,
        )
        if self.meeting is None or not problem.communicates:
            self.solution = problem.solve()
        else:
            begun = time.perf_counter()
            self.settled, timeline = settle(problem, self.meeting)
            self.reports = (Report("agree", [str(self.settled)], time.perf_counter() - begun),)
            self.solution = Solution(self.settled.decisions, timeline)
        return self.solution.decisions

    def budgets_after(self, error: Exception, budgets: Budgets, has_regions: bool) -> Budgets | None:
        if isinstance(error, AgreedOtherwise):
            return (error.budget,)
        if isinstance(error, BudgetError) and len(budgets) > 1 and not error.is_outgrown and has_regions:
            return budgets[1:]  # on all ranks alike
        return None


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
