"""Agreement of ranks on a schedule, and its failures. Ranks are threads here, with plans made by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outlines import COSTS, bucket, chain

from mfsdp_compile.passes.guests.solver.across_ranks import Problem, Settled, effect, from_plain, plain, settle
from mfsdp_compile.passes.guests.solver.reasons import BudgetError
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost, Timeline
from mfsdp_compile.passes.guests.solver.solve import Solution
from mfsdp_compile.passes.guests.solver.step_events import StepOutlines
from mfsdp_compile.runtime.schedule.decisions import Ahead, Behind, Decisions, Limit, Why
from mfsdp_compile.runtime.schedule.phase import Phase

MB = 10**6
PATIENCE = 10.0
"""Seconds that a rank waits for others. Ranks arrive at once if they arrive; tests of missing ranks wait less."""


class Hall:
    """A place for ranks to meet."""

    def __init__(self, ranks: int, patience: float = PATIENCE) -> None:
        self.ranks, self.patience = ranks, patience
        self.known: list[dict[str, Settled]] = [{} for _ in range(ranks)]
        self.meetings = 0
        self.told: list[tuple[int, str]] = []
        self._barrier = threading.Barrier(ranks)
        self._offers: dict[int, Any] = {}
        self._lines: set[tuple[str, ...]] = set()
        self._result = ""

    def run(self, problems: Mapping[int, Problem], options: Sequence[str] = ("options",)) -> dict[int, Any]:
        """Return what each rank settles for, or the error that it gets."""
        self._barrier.reset()

        def one(rank: int) -> Any:
            guest = Guest(self, rank, options[rank % len(options)])
            try:
                return settle(problems[rank], guest)
            except (RuntimeError, ValueError) as error:
                return error

        with ThreadPoolExecutor(self.ranks) as pool:
            return dict(zip(problems, pool.map(one, problems), strict=True))


class Guest:
    def __init__(self, hall: Hall, rank: int, options: str) -> None:
        self.hall, self.rank, self.ranks, self.options = hall, rank, hall.ranks, options
        self.batch = f"batch {rank}"
        self.known = hall.known[rank]

    def meet(
        self, topic: str, lines: Sequence[str], offer: Any, combine: Callable[[Sequence[Any]], Any], again: bool
    ) -> Any:
        hall = self.hall
        hall._offers[self.rank] = json.loads(json.dumps(offer))
        hall._lines.add((topic, *lines))
        try:
            if hall._barrier.wait(hall.patience) == 0:
                hall.meetings += 1
            hall._barrier.wait(hall.patience)
            if len(hall._lines) > 1:
                raise RuntimeError("ranks differ")
            if self.rank == 0:
                hall._result = json.dumps(combine([hall._offers[rank] for rank in range(hall.ranks)]))
            hall._barrier.wait(hall.patience)
            if self.rank == 0:
                hall._lines.clear()
            result = json.loads(hall._result)
            hall._barrier.wait(hall.patience)
        except threading.BrokenBarrierError:
            raise RuntimeError("a rank did not arrive") from None
        return result

    def warn(self, error: Exception) -> None:
        self.hall.told.append((self.rank, f"warning: {error}"))

    def all_came(self) -> None:
        self.hall.told.append((self.rank, "all came"))

    def replaced(self) -> None:
        self.hall.told.append((self.rank, "replaced"))

    def failed(self, error: Exception) -> None:
        self.hall.told.append((self.rank, f"failed: {error}"))


def problem(length: int = 1, budget: int = 10**9, units: int = 5, **changes: Any) -> Problem:
    """Return the problem of a batch of a length. Saved bytes and computation are proportional to the length."""
    infos = [bucket(f"u{i}", MB) for i in range(units)]
    plan = chain(infos, [5e-6 * length] * units, saved=length * MB, rise=length * MB, **changes)
    return Problem(plan, OptimizerCost(), budget)


def peak(one: Problem, decisions: Decisions) -> int:
    return one.timeline(decisions).peak_bytes


def middle(one: Problem) -> int:
    """Return a budget that lets some buckets stay, but not all."""
    return (one.smallest().timeline.peak_bytes + replace(one, budget=10**12).solve().timeline.peak_bytes) // 2


def effects(found: Mapping[int, Any]) -> set[str]:
    assert all(isinstance(one, tuple) for one in found.values()), found
    return {effect(plain(settled.decisions)) for settled, _ in found.values()}


# -- first agreement --------------------------------------------------------------------------------------------------


def test_ranks_with_other_batches_take_one_schedule_that_fits_on_all() -> None:
    budget = middle(problem(8))
    problems = {rank: problem(length, budget) for rank, length in enumerate((1, 8, 3, 5))}
    alone = {effect(plain(one.solve().decisions)) for one in problems.values()}
    assert len(alone) > 1, "nothing would have to be agreed on"
    assert peak(problems[1], problems[0].solve().decisions) > budget, "what the first rank finds fits everywhere"
    found = Hall(4).run(problems)
    assert len(effects(found)) == 1
    for rank, (settled, timeline) in found.items():
        assert timeline.peak_bytes == peak(problems[rank], settled.decisions) <= budget
        assert (settled.rank, settled.batch, settled.ranks, settled.machine) == (1, "batch 1", 4, "round")
        assert str(settled) == "4 ranks agreed on it: decided by rank 1 for batch 1, with times of round"


def test_the_slowest_rank_counts() -> None:
    """Without a bound on memory, every rank's schedule fits, and ranks choose the one whose slowest rank is fastest."""
    problems = {rank: problem(length) for rank, length in enumerate((1, 40))}
    found = Hall(2).run(problems)
    (settled, _), _ = found.values()
    candidates = [one.solve().decisions for one in problems.values()]
    slowest = [max(one.timeline(decisions).seconds for one in problems.values()) for decisions in candidates]
    taken = max(one.timeline(settled.decisions).seconds for one in problems.values())
    assert taken == pytest.approx(min(slowest), rel=1e-5)  # six digits of times are compared


def test_reasons_come_along() -> None:
    budget = problem(2).smallest().timeline.peak_bytes + 6 * MB  # a bucket takes 4 MB
    problems = {0: problem(1, budget), 1: problem(2, budget)}
    for settled, _ in Hall(2).run(problems).values():
        assert settled.decisions == problems[settled.rank].solve().decisions
        assert settled.decisions.why_not_kept, "the budget was to keep some from staying"


def test_the_smallest_schedule_is_there_when_no_other_fits_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each rank's own schedule breaks the other's budget, ranks agree on the smallest schedule.

    The two batches take memory in different places.
    """
    early, late = (_lopsided(place) for place in (0, 4))
    budget = max(one.smallest().timeline.peak_bytes for one in (early, late)) + 100_000
    problems = {0: replace(early, budget=budget), 1: replace(late, budget=budget)}
    everything = replace(early, budget=10**12).solve()

    def greedy(*args: Any, **kwargs: Any) -> Solution:
        return everything

    monkeypatch.setattr("mfsdp_compile.passes.guests.solver.across_ranks.solve", greedy)
    found = Hall(2).run(problems)
    assert effects(found) == {effect(plain(early.smallest().decisions))}
    settled, _ = found[1]
    assert settled.is_smallest
    assert "the schedule that takes the least memory, since no faster one fits on all" in str(settled)


def _lopsided(place: int) -> Problem:
    one = problem()
    outlines = {}
    for phase, outline in one.plan.outlines.items():
        segments = list(outline.segments)
        segments[place] = replace(segments[place], rise=30 * MB)
        outlines[phase] = replace(outline, segments=tuple(segments))
    return replace(one, plan=StepOutlines(outlines, one.plan.context, COSTS))


def test_a_rank_that_cannot_keep_the_budget_is_named_on_all() -> None:
    budget = problem(8).smallest().timeline.peak_bytes - 1
    hall = Hall(3)
    found = hall.run({0: problem(1, budget), 1: problem(8, budget), 2: problem(2, budget)})
    assert len({str(error) for error in found.values()}) == 1
    for error in found.values():
        assert isinstance(error, BudgetError)
        assert error.needed == budget + 1
        assert "Rank 1, with batch 1: memory_budget of" in str(error)
    assert hall.known == [{}, {}, {}], "they may try again"


def test_ranks_with_other_options_are_told() -> None:
    found = Hall(2).run({0: problem(), 1: problem()}, options=["one", "two"])
    assert all(isinstance(error, RuntimeError) for error in found.values())


def test_a_rank_that_does_not_come() -> None:
    hall = Hall(2, patience=0.2)
    found = hall.run({0: problem()})
    assert "did not arrive" in str(found[0])
    assert hall.told == [(0, "failed: a rank did not arrive")], "the others learn why they miss this one"


# -- afterwards -------------------------------------------------------------------------------------------------------


def settled_hall(budget: int, *lengths: int, patience: float = PATIENCE) -> Hall:
    hall = Hall(len(lengths), patience)
    hall.run({rank: problem(length, budget) for rank, length in enumerate(lengths)})
    assert hall.meetings == 2
    return hall


def test_other_lengths_take_what_was_settled_without_a_meeting() -> None:
    budget = middle(problem(8))
    hall = settled_hall(budget, 8, 1)
    before = hall.known[1].copy()
    found = hall.run({1: problem(5, budget)})  # alone
    settled, timeline = found[1]
    assert [settled] == list(before.values())
    assert timeline.peak_bytes == peak(problem(5, budget), settled.decisions)
    assert hall.meetings == 2


def test_another_structure_is_another_matter() -> None:
    hall = settled_hall(10**9, 2, 1)
    hall.run({rank: problem(units=4) for rank in range(2)})
    assert hall.meetings == 4
    hall.run({rank: problem(whole_model=False) for rank in range(2)})
    assert hall.meetings == 6
    assert [len(known) for known in hall.known] == [3, 3]


def test_names_and_buffers_make_no_structure() -> None:
    """Instances of a module share a schedule, whatever their names and the other contents of their models."""
    hall = settled_hall(10**9, 2, 1)
    infos = [replace(bucket(f"other{i}", MB), unit=f"other{i}") for i in range(5)]
    plan = chain(infos, [5e-6] * 5, saved=MB, rise=MB, other_bytes=MB)
    found = hall.run({1: Problem(plan, OptimizerCost(), 10**9)})
    assert isinstance(found[1], tuple), found
    assert hall.meetings == 2


def test_batches_that_have_outgrown_a_schedule_on_all_ranks() -> None:
    """If all ranks need another schedule at the same time, they agree on one that fits on all."""
    budget = middle(problem(8))
    hall = settled_hall(budget, 3, 2)
    old = next(iter(hall.known[0].values())).decisions
    assert peak(problem(8, budget), old) > budget
    assert peak(problem(9, budget), old) > budget
    found = hall.run({0: problem(8, budget), 1: problem(9, budget)})
    assert len(effects(found)) == 1
    for rank, length in ((0, 8), (1, 9)):
        assert found[rank][1].peak_bytes <= budget
        assert peak(problem(length, budget), found[rank][0].decisions) <= budget
    assert sorted(rank for rank, what in hall.told if what == "replaced") == [0, 1]
    assert len({str(known) for known in hall.known}) == 1
    assert isinstance(hall.run({1: problem(2, budget)})[1], tuple), "shorter ones fit as well"


def test_batches_that_have_outgrown_every_schedule() -> None:
    """If a batch fits with no schedule, all ranks that arrived learn of it, and none waits."""
    budget = middle(problem(8))
    hall = settled_hall(budget, 3, 2)
    found = hall.run({0: problem(8, budget), 1: problem(40, budget)})
    for error in found.values():
        assert isinstance(error, BudgetError)
        assert "Rank 1, with batch 1: memory_budget of" in str(error)
    assert sorted(what.partition(":")[0] for _, what in hall.told) == ["all came", "all came", "warning", "warning"]


def test_a_batch_that_has_outgrown_a_schedule_on_one_rank() -> None:
    budget = middle(problem(8))
    hall = settled_hall(budget, 3, 2, patience=0.5)
    error = hall.run({1: problem(8, budget)})[1]
    assert isinstance(error, BudgetError)
    for fragment in (
        "the schedule that ranks agreed on, decided by rank 0 for batch 0",
        "with batch 1, rank 1 has",
        "in memory in the",
        "too much",
        "the longest batch",
        "budget_reserve",
        "a schedule file",
        "model.reset()",
        "a rank did not arrive",
    ):
        assert fragment in str(error)
    assert [what.partition(":")[0] for _, what in hall.told] == ["warning", "failed"]


# -- as plain data ----------------------------------------------------------------------------------------------------

WHYS = st.builds(Why, st.sampled_from(Limit), st.integers(0, 1 << 40), st.text(max_size=5))
NUMBERS = st.integers(0, 200)
AHEADS = st.builds(Ahead, NUMBERS, WHYS, st.none() | NUMBERS)
BEHINDS = st.builds(Behind, NUMBERS, WHYS, st.booleans())
DECISIONS = st.builds(
    Decisions,
    st.frozensets(NUMBERS),
    st.dictionaries(st.sampled_from(Phase), st.dictionaries(NUMBERS, AHEADS)),
    st.dictionaries(NUMBERS, BEHINDS),
    st.dictionaries(NUMBERS, WHYS),
)


@settings(max_examples=100)
@given(DECISIONS)
def test_decisions_survive_being_sent(decisions: Decisions) -> None:
    sent = json.loads(json.dumps(plain(decisions)))
    assert from_plain(Decisions, sent) == decisions
    assert effect(sent) == effect(plain(decisions))


def test_reasons_have_no_effect_and_the_rest_has() -> None:
    why = Why(Limit.NONE)
    one = Decisions(frozenset({1}), {Phase.FORWARD: {0: Ahead(1, why)}}, {0: Behind(1, why)})
    text = effect(plain(one))
    other_why = Why(Limit.BUDGET, 5, "x")
    assert text == effect(
        plain(Decisions(one.kept, {Phase.FORWARD: {0: Ahead(1, other_why)}}, {0: Behind(1, other_why)}, {2: other_why}))
    )
    for changed in (
        replace(one, kept=frozenset()),
        replace(one, gathers={Phase.FORWARD: {0: Ahead(2, why)}}),
        replace(one, gathers={Phase.FORWARD: {0: Ahead(1, why, 0)}}),
        replace(one, gathers={Phase.BACKWARD: one.gathers[Phase.FORWARD]}),
        replace(one, reductions={0: Behind(1, why, packed=True)}),
    ):
        assert effect(plain(changed)) != text


def test_types_without_a_plain_form_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        from_plain(Timeline | bytes, b"")


# -- any number of ranks ----------------------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=15)
@given(st.lists(st.integers(1, 12), min_size=2, max_size=6), st.floats(0, 1.2))
def test_any_lengths(lengths: list[int], room: float) -> None:
    """All ranks choose one schedule, which fits on all, or all get the error of one that cannot keep the budget."""
    longest = problem(max(lengths))
    least = longest.smallest().timeline.peak_bytes
    most = replace(longest, budget=10**12).solve().timeline.peak_bytes
    budget = int(least + (most - least) * (room - 0.1))
    problems = {rank: problem(length, budget) for rank, length in enumerate(lengths)}
    found = Hall(len(lengths)).run(problems)
    if budget < least:
        assert {type(error) for error in found.values()} == {BudgetError}
        assert len({str(error) for error in found.values()}) == 1
        return
    assert len(effects(found)) == 1
    for rank, (settled, timeline) in found.items():
        assert timeline.peak_bytes == peak(problems[rank], settled.decisions) <= budget
