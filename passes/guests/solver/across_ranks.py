"""Make all ranks agree on the decisions about a schedule.

The solver's result depends on the shapes of this rank's batch and on this rank's machine, and the order of collectives
depends on the result. Ranks therefore decide together, once for all graphs of one structure: the same buckets, used in
the same order, with the same options. Decisions refer to buckets, so they hold for batches of all shapes.

1. When a rank compiles a structure for the first time, so do all others, before any of its collectives starts. This is
   where they meet. Every rank offers the schedule that is best for its own batch, and reports the memory that its
   smallest schedule needs.
2. Every rank simulates some of these schedules for its own batch (those of the ranks that need the most memory first),
   and the smallest schedule.
3. Of the schedules that fit on every rank, the ranks take the one whose slowest rank is fastest. There is always one,
   unless a rank cannot keep its budget at all. In that case all ranks raise that rank's error.

Later graphs of the structure take the agreed schedule, so a rank that gets a batch of another length compiles alone. If
that batch does not fit, the rank asks for another schedule. This takes all ranks, and afterwards all of them recompile.
If the other ranks do not need another schedule, they do not join, and the step ends with an error on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import types
import typing
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Protocol, Union

from mfsdp_compile.runtime.schedule.decisions import Decisions

from .reasons import BudgetError, excess
from .simulate import OptimizerCost, Timeline
from .solve import Solution, smallest, solve
from .step_events import StepOutlines

_CANDIDATES = 4
"""Number of schedules that every rank tries, in addition to the smallest."""


@dataclass(frozen=True)
class Problem:
    """The scheduling problem of a rank.

    Args:
        plan: Outlines of its graphs.
        optimizer: Cost of the optimizer. Its state is in memory, and its step ends a training step.
        budget: Memory budget in bytes.
        prefetch, reshard, refusal: See :func:`.solve.solve`.
    """

    plan: StepOutlines
    optimizer: OptimizerCost
    budget: int
    prefetch: int | None = None
    reshard: bool | int | None = None
    refusal: str = ""

    def solve(self) -> Solution:
        return solve(
            self.plan,
            self.optimizer,
            self.budget,
            prefetch=self.prefetch,
            reshard=self.reshard,
            refusal=self.refusal,
        )

    def smallest(self) -> Solution:
        return smallest(self.plan, self.optimizer, prefetch=self.prefetch, reshard=self.reshard)

    def timeline(self, decisions: Decisions) -> Timeline:
        """Simulate decisions on this rank, without spans."""
        return self.plan.timeline(decisions, self.optimizer)

    @property
    def communicates(self) -> bool:
        """Whether the step depends on other ranks. Evaluation with unsharded parameters does not."""
        return any(outline.uses or outline.gradients for outline in self.plan.outlines.values())

    def uses(self, names: Sequence[str]) -> list[str]:
        """Return lines about the structure: which buckets each graph gathers and reduces.

        The order of use is left out, because it is the order of the buckets' indices or follows from it.
        """
        lines = []
        for phase, outline in self.plan.outlines.items():
            gathered = sorted(bucket for use in outline.uses for bucket in use.buckets)
            reduced = sorted(g.bucket for g in outline.gradients)
            for what, buckets in (("gathers", gathered), ("reduces", reduced)):
                if buckets:
                    lines.append(f"the {phase.value} graph {what} {', '.join(names[bucket] for bucket in buckets)}")
        return lines


@dataclass(frozen=True)
class Settled:
    """Schedule that ranks have agreed on.

    Args:
        decisions: Decisions about the schedule.
        rank, batch, machine: Rank that found them, its batch, and the machine whose times it used.
        ranks: Number of ranks that agreed.
        activation_memory_budget: Which part of the bytes that forward would save it saves.
        is_smallest: Whether this is the smallest schedule, because no rank's best schedule fits on all ranks.
    """

    decisions: Decisions
    rank: int
    batch: str
    machine: str
    ranks: int
    activation_memory_budget: float = 1.0
    is_smallest: bool = False

    def __str__(self) -> str:
        why = "the schedule that takes the least memory, since no faster one fits on all: " if self.is_smallest else ""
        return (
            f"{self.ranks} ranks agreed on it: {why}decided by rank {self.rank} for {self.batch}, with times of "
            f"{self.machine}"
        )


class AgreedOtherwise(Exception):
    """Ranks have agreed on a schedule for graphs that save another part of what forward would save.

    Args:
        budget: That ``activation_memory_budget``.
    """

    def __init__(self, budget: float) -> None:
        super().__init__(budget)
        self.budget = budget


class Meeting(Protocol):
    """Channel through which ranks agree on schedules, and the schedules agreed on so far.

    Args:
        rank: Global rank of this process.
        ranks: Number of ranks that meet.
        batch: Description of the batch that this rank compiles for.
        options: Description of the backend's options.
    """

    rank: int
    ranks: int
    batch: str
    options: str

    @property
    def known(self) -> MutableMapping[str, Settled]:
        """Agreed schedules by structure; the same on all ranks."""

    def meet(
        self, topic: str, lines: Sequence[str], offer: Any, combine: Callable[[Sequence[Any]], Any], again: bool
    ) -> Any:
        """Combine every rank's ``offer`` with ``combine``, and return the result: plain data, the same on all ranks.

        Args:
            topic: What the ranks agree on.
            lines: Description of the graphs, which must be equal on all ranks.
            offer: Plain data of this rank.
            combine: Function of all offers.
            again: Whether other ranks may well not join. Then the wait for them is no longer than for a collective.

        Raises:
            RuntimeError: ``lines`` differ between ranks, or a rank did not arrive.
        """

    def warn(self, error: Exception) -> None:
        """Tell other ranks that this rank is about to ask for another schedule, so that their errors can mention it."""

    def all_came(self) -> None:
        """Withdraw the warning, because all ranks arrived."""

    def replaced(self) -> None:
        """Discard code that follows the old schedule, because all ranks agreed on another one."""

    def failed(self, error: Exception) -> None:
        """Tell other ranks that this rank leaves the step with an error."""


def settle(problem: Problem, meeting: Meeting) -> tuple[Settled, Timeline]:
    """Return the agreed schedule for graphs of this structure, and its simulation on this rank.

    Raises:
        BudgetError: A rank cannot keep to its memory budget. The message names the rank.
        AgreedOtherwise: The graphs do not save what was agreed on.
        RuntimeError: Other ranks have different graphs, or do not arrive.
    """
    context = problem.plan.context
    names = [info.name for info in context.buckets]
    numbers = [f"#{number}" for number in range(len(names))]
    # The structure has no names, and no number that differs between instances that share code.
    budget = context.policy.activation_budgets[0]
    plain_context = replace(context, other_bytes=0, policy=replace(context.policy, activation_memory_budget=1.0))
    structure = [meeting.options, plain_context.signature, *problem.uses(numbers)]
    key = hashlib.sha256("\n".join(structure).encode()).hexdigest()
    saved = f"activation_memory_budget {budget}"
    lines = [meeting.options, saved, *(f"bucket {name}" for name in names), *problem.uses(names)]
    known = meeting.known.get(key)
    if known is not None and known.activation_memory_budget != budget:
        raise AgreedOtherwise(known.activation_memory_budget)
    if known is None:
        try:
            meeting.known[key] = _agree(problem, meeting, "Schedule", lines, again=False)
        except RuntimeError as error:  # a BudgetError is no RuntimeError, and is raised on all ranks
            meeting.failed(error)
            raise
    else:
        timeline = problem.timeline(known.decisions)
        if timeline.peak_bytes <= problem.budget:
            return known, timeline
        outgrown = BudgetError(
            _outgrown(known, timeline, problem.budget, meeting), timeline.peak_bytes, is_outgrown=True
        )
        meeting.warn(outgrown)
        try:
            meeting.known[key] = _agree(problem, meeting, "Another schedule", [*lines, str(known)], again=True)
        except RuntimeError as error:
            meeting.failed(outgrown)
            message = f"{outgrown} Not all ranks need another schedule now: {error}"
            raise BudgetError(message, outgrown.needed, is_outgrown=True) from None
        except BudgetError as error:
            meeting.all_came()
            error.is_outgrown = True
            raise
        meeting.all_came()
        meeting.replaced()
    return meeting.known[key], problem.timeline(meeting.known[key].decisions)


def _agree(problem: Problem, meeting: Meeting, topic: str, lines: Sequence[str], again: bool) -> Settled:
    least = problem.smallest()
    mine: dict[str, Any] = {
        "rank": meeting.rank,
        "batch": meeting.batch,
        "machine": problem.plan.costs.hardware.name,
        "needed": least.timeline.peak_bytes,
    }
    try:
        mine["decisions"] = plain(problem.solve().decisions)
    except BudgetError as error:
        mine["refused"] = str(error)

    def choose(offers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        refused = next((offer for offer in offers if "refused" in offer), None)
        return [refused] if refused else [*_candidates(offers), mine | {"decisions": plain(least.decisions)}]

    candidates = meeting.meet(topic, lines, mine, choose, again)
    if "refused" in candidates[0]:
        refused = candidates[0]
        raise BudgetError(f"Rank {refused['rank']}, with {refused['batch']}: {refused['refused']}", refused["needed"])
    found = [from_plain(Decisions, candidate["decisions"]) for candidate in candidates]
    timelines = [problem.timeline(decisions) for decisions in found]
    here = [timeline.seconds if timeline.peak_bytes <= problem.budget else None for timeline in timelines]
    number: int = meeting.meet(f"{topic}, for batches of all ranks", lines, here, _fastest, again)
    taken = candidates[number]
    is_smallest = number == len(candidates) - 1
    return Settled(
        found[number],
        taken["rank"],
        taken["batch"],
        taken["machine"],
        meeting.ranks,
        problem.plan.context.policy.activation_budgets[0],
        is_smallest and number > 0,
    )


def _candidates(offers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return distinct schedules, those of the ranks that need the most memory first."""
    found: dict[str, Mapping[str, Any]] = {}
    for offer in sorted(offers, key=lambda offer: (-offer["needed"], offer["rank"])):
        found.setdefault(effect(offer["decisions"]), offer)
    return list(found.values())[:_CANDIDATES]


def _fastest(seconds: Sequence[Sequence[float | None]]) -> int:
    """Return the index of the schedule whose slowest rank is fastest, among those that fit on all ranks.

    Of equally fast schedules it is the first.

    Args:
        seconds: Seconds by rank, then by schedule; None: the schedule does not fit.
    """
    slowest = {
        number: max(float(f"{one:.6g}") for one in of if one is not None)
        for number, of in enumerate(zip(*seconds, strict=True))
        if None not in of
    }
    if not slowest:
        raise ValueError("no schedule fits on all ranks, although each rank has one: their graphs differ")
    return min(slowest, key=lambda number: slowest[number])


def _outgrown(known: Settled, timeline: Timeline, budget: int, meeting: Meeting) -> str:
    return (
        f"The memory budget cannot be kept with the schedule that ranks agreed on, decided by rank {known.rank} for "
        f"{known.batch}: with {meeting.batch}, rank {meeting.rank} has {excess(timeline, budget)}. What would help: a "
        "first step with the longest batch on every rank, since that is when they agree; a larger memory_budget, or "
        "more of it in reserve (budget_reserve); a schedule file for all ranks. After model.reset() on every rank "
        "(which FSDP2's face lacks: start the job again) they agree again, so that this step can be repeated."
    )


# -- as plain data ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Convert decisions to JSON data: dataclasses to dicts by field, mappings to sorted pairs, sets to sorted lists."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return sorted([plain(key), plain(of)] for key, of in value.items()) if value else []
    if isinstance(value, (set, frozenset)):
        return sorted(plain(one) for one in value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def from_plain(kind: Any, value: Any) -> Any:
    """Convert JSON data back to a value of the annotated type ``kind``.

    Raises:
        TypeError: Decisions do not use this type.
    """
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType) and len(of) == 2 and of[1] is type(None):
        return None if value is None else from_plain(of[0], value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {from_plain(of[0], key): from_plain(of[1], one) for key, one in value}
    if origin is frozenset:
        return frozenset(from_plain(of[0], one) for one in value)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], one) for name, one in value.items()})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, (Enum, bool, int, str, float)):
        return kind(value)
    raise TypeError(f"decisions hold a {kind}, which cannot be sent to other ranks")


def effect(decisions: Any) -> str:
    """Return the parts of plain decisions that change a graph: everything except the reasons."""
    return json.dumps(_without_reasons(decisions))


def _without_reasons(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_reasons(of) for name, of in value.items() if not name.startswith("why")}
    if isinstance(value, list):
        return [_without_reasons(one) for one in value]
    return value
