"""What predictions of a step are made from: a machine's costs, an optimizer's, and the events of finished graphs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from mfsdp_compile.runtime.schedule.phase import Phase

from ...context import Context
from ...kernels import kernels
from .costs import CostModel
from .flow import Saved, flow_of
from .simulate import Event, OptimizerCost, events_of


@dataclass(frozen=True)
class Prediction:
    """Inputs for predicting times and memory.

    Args:
        costs: Costs on the machine, with the inner compiler.
        optimizer: Cost of the optimizer. Its state is in memory, and its step ends a training step.
    """

    costs: CostModel
    optimizer: OptimizerCost


@dataclass
class Forecast:
    """Records what the simulator needs of finished graphs.

    Args:
        prediction: Inputs for predictions.
        events: Events of the graphs.
        unpredicted: Why a graph has no events.
    """

    prediction: Prediction
    events: dict[Phase, list[Event]] = field(default_factory=dict)
    unpredicted: dict[Phase, str] = field(default_factory=dict)
    _saved: Saved = field(default_factory=dict, repr=False)

    def finished(self, graph: fx.Graph, phase: Phase, context: Context, user_outputs: int) -> None:
        """Record a graph's events. A failure is only recorded, because predictions change nothing."""
        try:
            saved = self._saved if phase is Phase.BACKWARD else None
            flow = flow_of(graph, context, self.prediction.costs, user_outputs=user_outputs, saved=saved)
            self.events[phase] = events_of(flow)
            self._saved = flow.saved
        except Exception as error:
            self.unpredicted[phase] = f"{type(error).__name__}: {error}"

    def seconds(self, graph: fx.Graph) -> float:
        """Return the predicted seconds of a graph's kernels."""
        return sum(map(self.prediction.costs.kernel, kernels(graph, True)))
