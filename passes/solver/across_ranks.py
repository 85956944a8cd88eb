"""Ranks agree on what was decided about a schedule.

What the solver finds depends on the shapes of this rank's batch and on this rank's machine, and the order of collectives on
what it finds. So where there are other ranks, decisions are made together, once for graphs of one structure: the same buckets,
used in the same order, with the same options. Decisions are bound to buckets, so that they hold for batches of all shapes.

1. When a rank compiles a structure for the first time, so do all others, before any of its collectives starts: that is the
   moment to meet. Every rank offers the schedule that is best for its own batch, and what the smallest one takes.
2. Some of these, of the ranks that need most memory first, and the smallest schedule of all, are simulated by every rank for its
   own batch.
3. Of those that fit on every rank the one is taken whose slowest rank is fastest. There is one, unless a rank cannot keep the
   budget at all: then that is the error, on every rank.

Later graphs of the structure take what was agreed on: a rank that meets a batch of another length compiles alone. If that batch
does not fit, the rank asks for another schedule, which takes all ranks; the old code of all of them is compiled anew then. If
the others have no need of one, they do not come, and the step ends with an error on all ranks.
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

from ..decisions import Decisions
from .simulate import OptimizerCost, Timeline
from .solve import BudgetError, Solution, excess, smallest, solve
from .step_events import StepOutlines

__all__ = ["Meeting", "Problem", "Settled", "effect", "from_plain", "plain", "settle"]

_CANDIDATES = 4
"""Schedules that every rank tries, besides the smallest."""


@dataclass(frozen=True)
class Problem:
    """What a rank has to schedule.

    Args:
        plan: of its graphs.
        optimizer: whose state is in memory, and whose step ends a training step.
        budget: bytes.
        prefetch, reshard, refusal: as in :func:`.solve.solve`.
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
        """What decisions lead to, here; without spans."""
        return self.plan.timeline(decisions, self.optimizer)

    @property
    def communicates(self) -> bool:
        """Whether anything depends on other ranks: evaluation with parameters that are whole does not."""
        return any(outline.uses or outline.gradients for outline in self.plan.outlines.values())

    def uses(self, names: Sequence[str]) -> list[str]:
        """The structure: which buckets each graph gathers and reduces. Without their order in it, which is that of their
        numbers, or follows from it."""
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
    """What ranks have agreed on.

    Args:
        decisions: about the schedule.
        rank, batch, machine: the rank that found them, for which batch, with times of which machine.
        ranks: how many have agreed.
        is_smallest: whether none of the schedules that are best for a rank fits on all.
    """

    decisions: Decisions
    rank: int
    batch: str
    machine: str
    ranks: int
    is_smallest: bool = False

    def __str__(self) -> str:
        why = "the schedule that takes the least memory, since no faster one fits on all: " if self.is_smallest else ""
        return (
            f"{self.ranks} ranks agreed on it: {why}decided by rank {self.rank} for {self.batch}, with times of "
            f"{self.machine}"
        )


class Meeting(Protocol):
    """Where this rank meets the others, and what they know.

    Args:
        rank: this one, in the job.
        ranks: how many meet.
        batch: that this rank compiles for, in words.
        options: of the backend, in words.
    """

    rank: int
    ranks: int
    batch: str
    options: str

    @property
    def known(self) -> MutableMapping[str, Settled]:
        """What has been settled, by structure; the same on all ranks."""

    def meet(
        self, topic: str, lines: Sequence[str], offer: Any, combine: Callable[[Sequence[Any]], Any], again: bool
    ) -> Any:
        """What ``combine`` makes of every rank's ``offer``: plain data, the same on all ranks.

        Args:
            again: others may well not come; nobody waits longer for them than for a collective.

        Raises:
            RuntimeError: ``lines`` differ between ranks, or a rank did not come.
        """

    def warn(self, error: Exception) -> None:
        """This rank is about to ask for something that others may not agree to: their errors are to say so."""

    def all_came(self) -> None:
        """Nobody needs to be warned any more."""

    def replaced(self) -> None:
        """All ranks agreed on another schedule: code that follows the old one must not run again."""

    def failed(self, error: Exception) -> None:
        """This rank leaves the step, and the others do not know."""


def settle(problem: Problem, meeting: Meeting) -> tuple[Settled, Timeline]:
    """What is decided for graphs of this structure, and what that leads to on this rank.

    Raises:
        BudgetError: a rank cannot keep to its memory budget, this one or another, which the message names.
        RuntimeError: ranks come with other graphs, or do not come.
    """
    context = problem.plan.context
    names = [info.name for info in context.buckets]
    numbers = [f"#{number}" for number in range(len(names))]
    # Without names and with no number that differs between instances that run each other's code.
    structure = [meeting.options, replace(context, other_bytes=0).signature, *problem.uses(numbers)]
    key = hashlib.sha256("\n".join(structure).encode()).hexdigest()
    lines = [meeting.options, *(f"bucket {name}" for name in names), *problem.uses(names)]
    known = meeting.known.get(key)
    if known is None:
        try:
            meeting.known[key] = _agree(problem, meeting, "Schedule", lines, again=False)
        except RuntimeError as error:  # a BudgetError is none, and all ranks have it
            meeting.failed(error)
            raise
    else:
        timeline = problem.timeline(known.decisions)
        if timeline.peak_bytes <= problem.budget:
            return known, timeline
        outgrown = BudgetError(_outgrown(known, timeline, problem.budget, meeting), timeline.peak_bytes)
        meeting.warn(outgrown)
        try:
            meeting.known[key] = _agree(problem, meeting, "Another schedule", [*lines, str(known)], again=True)
        except RuntimeError as error:
            meeting.failed(outgrown)
            raise BudgetError(f"{outgrown} Not all ranks need another one now: {error}", outgrown.needed) from None
        except BudgetError:
            meeting.all_came()
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
        found[number], taken["rank"], taken["batch"], taken["machine"], meeting.ranks, is_smallest and number > 0
    )


def _candidates(offers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Different schedules, those of ranks that need most memory first."""
    found: dict[str, Mapping[str, Any]] = {}
    for offer in sorted(offers, key=lambda offer: (-offer["needed"], offer["rank"])):
        found.setdefault(effect(offer["decisions"]), offer)
    return list(found.values())[:_CANDIDATES]


def _fastest(seconds: Sequence[Sequence[float | None]]) -> int:
    """Of schedules that fit on all ranks the one whose slowest rank is fastest; of equally fast ones the first.

    Args:
        seconds: by rank, then by schedule; None: it does not fit.
    """
    slowest = {
        number: max(float(f"{one:.6g}") for one in of if one is not None)
        for number, of in enumerate(zip(*seconds, strict=True))
        if None not in of
    }
    if not slowest:
        raise ValueError("no schedule fits on all ranks, though each has one: their graphs are not alike")
    return min(slowest, key=lambda number: slowest[number])


def _outgrown(known: Settled, timeline: Timeline, budget: int, meeting: Meeting) -> str:
    return (
        f"The memory budget cannot be kept with the schedule that ranks have agreed on, decided by rank {known.rank} for "
        f"{known.batch}: with {meeting.batch}, rank {meeting.rank} has {excess(timeline, budget)}. What would help: a first "
        "step with the longest batch on every rank, since that is when they agree; a larger memory_budget, or more of it in "
        "reserve (budget_reserve); a schedule file for all ranks. After model.reset() on every rank they agree anew, so that "
        "this step can be repeated."
    )


# -- as plain data ----------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Decisions as JSON has them: dataclasses by name of their fields, mappings as sorted pairs, sets as sorted lists."""
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
    """The reverse, for a type as it is annotated.

    Raises:
        TypeError: a type that decisions do not have.
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
    raise TypeError(f"decisions hold a {kind}, which has no plain form")


def effect(decisions: Any) -> str:
    """What of decisions, in their plain form, changes a graph: all but the reasons."""
    return json.dumps(_without_reasons(decisions))


def _without_reasons(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_reasons(of) for name, of in value.items() if not name.startswith("why")}
    if isinstance(value, list):
        return [_without_reasons(one) for one in value]
    return value
