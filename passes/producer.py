"""What decides about a schedule: a policy of given numbers, a schedule file, or a guest such as the solver.

A producer serves one Dynamo graph and the graphs derived from it. It returns
:class:`~mfsdp_compile.runtime.schedule.decisions.Decisions`, which the passes carry out, or None: those so far stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from mfsdp_compile.runtime.schedule.decisions import Decisions
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase

from . import reshard
from .context import Context, Report

Budgets = tuple[float, ...]
"""Values of ``activation_memory_budget`` to try, in order. Graphs are made with the first one."""


class Producer:
    """Decides by the policy which buckets stay gathered. The passes read the policy's other numbers themselves."""

    looks_ahead = False
    """Whether it must see forward and backward before the partition: :meth:`consider` is then called."""
    meets = False
    """Whether ranks agree on what it decides: :meth:`decide_early` and :attr:`digest` then matter."""
    is_cacheable = True
    """Whether compile caches may supply the graphs, which then run no passes."""

    plan: Any = None
    """What a producer of another schedule for the same graphs may start from."""
    reports: tuple[Report, ...] = ()
    """What it tells about its decisions."""

    @property
    def digest(self) -> str | None:
        """Digest of decisions that do not follow from the graph, for keys of compile caches; None: not made yet."""
        return ""

    def consider(self, graphs: Mapping[Phase, fx.Graph], context: Context, user_outputs: int) -> Decisions | None:
        """Look at unscheduled graphs, which only serve this call; see :func:`.pipeline.trial`."""
        return None

    def decide(self, graph: fx.Graph, phase: Phase, context: Context) -> Decisions | None:
        """Decide about a joint graph, before it is partitioned, or about an inference graph."""
        if phase is Phase.JOINT and context.decisions == Decisions():
            return Decisions(kept=reshard.kept_buckets(graph, context))
        return None

    def decide_early(self, graph: fx.Graph, context: Context) -> Decisions | None:
        """Decide about an inference graph before compile caches are asked for its code. Ignore other graphs."""
        return None

    def check(self, phase: Phase, made: Sequence[str]) -> None:
        """Check the lines of a finished graph's schedule against what was decided."""

    def budgets_after(self, error: Exception, budgets: Budgets, has_regions: bool) -> Budgets | None:
        """Return the budgets to compile with after an error; None: raise it.

        Args:
            budgets: Those before.
            has_regions: Whether the graph has regions, whose bodies save less with another value.
        """
        return None


class FromFile(Producer):
    """Takes decisions from a schedule file, and refuses graphs that cannot follow it.

    Args:
        text: The schedule.
    """

    def __init__(self, text: ScheduleText) -> None:
        self._text = text

    def decide(self, graph: fx.Graph, phase: Phase, context: Context) -> Decisions:
        names, units = [info.name for info in context.buckets], [info.unit for info in context.buckets]
        return self._text.decisions(names, units, context.whole_model)

    def check(self, phase: Phase, made: Sequence[str]) -> None:
        """Raise ValueError if the schedule of a graph differs from the one in the file."""
        text = self._text
        if phase not in text.lines:
            return
        expected = [line for line in text.lines[phase] if line.what != "cast"]
        found = [line for line in ScheduleText.of({phase: made}).lines[phase] if line.what != "cast"]
        for number, pair in enumerate(itertools.zip_longest(expected, found), 1):
            if pair[0] != pair[1]:
                labels = [line.label if line else "nothing" for line in pair]
                raise ValueError(
                    f"{text.where}: [{phase.value}] cannot be followed: entry {number} is {labels[0]!r}, but the graph "
                    f"only allows {labels[1]!r}. Gathers of a unit start together and in the order of their waits; "
                    "waits stand where parameters are first used, and reductions start where gradients are complete."
                )
