"""Schedules within a budget: outlines made by hand and at random, and the effect on real graphs."""

from __future__ import annotations

import doctest
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from outlines import COSTS, MACHINE, RANKS, bucket, chain
from torch import nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.passes import pipeline
from mfsdp_compile.passes.guests.solver import across_ranks
from mfsdp_compile.passes.guests.solver import solve as solving
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.forecast import Forecast
from mfsdp_compile.passes.guests.solver.outline import grouped
from mfsdp_compile.passes.guests.solver.reasons import BudgetError, explained
from mfsdp_compile.passes.guests.solver.room import SegmentMemory
from mfsdp_compile.passes.guests.solver.simulate import (
    Compute,
    OptimizerCost,
    Stage,
    Start,
    Timeline,
    Wait,
    resting_memory,
    simulate,
)
from mfsdp_compile.passes.guests.solver.solve import Solution, solve
from mfsdp_compile.passes.guests.solver.step_events import STAGES, StepOutlines
from mfsdp_compile.passes.producer import Producer
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.lanes.plain import AllGather
from mfsdp_compile.runtime.schedule import decisions as deciding
from mfsdp_compile.runtime.schedule.decisions import Ahead, Decisions, Limit, Why
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.runtime.schedule.text import ScheduleLine

ADAMW = OptimizerCost()
MB = 10**6
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


@pytest.mark.parametrize("module", [deciding, solving])
def test_documented_examples(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0


def buckets(*numels: int, **changes: Any) -> list[Any]:
    return [bucket(f"u{i}", numel, **changes) for i, numel in enumerate(numels)]


def even(units: int = 5, numel: int = MB, seconds: float = 1e-3, **changes: Any) -> StepOutlines:
    """Return equal units. Gathers and reductions take 43 us, so a unit's computation hides many of them."""
    return chain(buckets(*[numel] * units), [seconds] * units, **changes)


def smallest_peak(plan: StepOutlines, **options: Any) -> int:
    """Return the least memory that a schedule needs."""
    with pytest.raises(BudgetError) as caught:
        solve(plan, ADAMW, 0, **options)
    return caught.value.needed


def units_of(decisions: Decisions, phase: Phase) -> list[int]:
    """Return how many units ahead gathers start, by bucket."""
    return [ahead.units for _, ahead in sorted(decisions.gathers[phase].items())]


def simulated(plan: StepOutlines, decisions: Decisions) -> Timeline:
    resting = resting_memory(plan.context.buckets, ADAMW, plan.context.other_bytes)
    return simulate(plan.events(decisions), plan.context, plan.costs, resting, ADAMW)


# -- unlimited memory -------------------------------------------------------------------------------------------------


def test_unlimited_memory_keeps_every_bucket_and_hides_what_can_be_hidden() -> None:
    plan = even()
    found = solve(plan, ADAMW)
    assert found.decisions.kept == frozenset(range(5))
    assert found.decisions.gathers[BACKWARD] == {}
    assert units_of(found.decisions, FORWARD) == [1, 1, 1, 1, 1]  # as late as possible while still hidden
    exposed = {(e.what, e.name) for e in found.timeline.exposures if e.exposed}
    assert exposed == {("gather", "u0"), ("reduce", "u0")}  # nothing is computed before the first or after the last


def test_gathers_that_take_longer_start_earlier() -> None:
    """Gathers that take longer than the computation of their units start earlier.

    Four gathers of 43 us are hidden by 200 us of computation of the unit before them. Their own units compute 1 us
    each.
    """
    plan = chain(buckets(*[MB] * 5), [200e-6, *[1e-6] * 4])
    found = solve(plan, ADAMW)
    assert units_of(found.decisions, FORWARD) == [1, 1, 2, 3, 4]
    exposed = {(e.what, e.name) for e in found.timeline.exposures if e.exposed and e.stage is Stage.FORWARD}
    assert exposed == {("gather", "u0")}


def test_what_only_backward_gathers_is_not_kept() -> None:
    plan = even()
    forward = replace(plan.outlines[FORWARD], uses=plan.outlines[FORWARD].uses[1:])
    found = solve(StepOutlines({**plan.outlines, FORWARD: forward}, plan.context, COSTS), ADAMW)
    assert found.decisions.kept == {1, 2, 3, 4}
    assert set(found.decisions.gathers[BACKWARD]) == {0}


def test_parts_of_models_keep_nothing() -> None:
    assert solve(even(whole_model=False), ADAMW).decisions.kept == frozenset()


# -- within a budget --------------------------------------------------------------------------------------------------


def test_the_tightest_budget_is_the_smallest_schedule() -> None:
    plan = even()
    least = smallest_peak(plan)
    found = solve(plan, ADAMW, least)
    assert found.timeline.peak_bytes == least
    assert found.decisions.kept <= {4}
    with pytest.raises(BudgetError):
        solve(plan, ADAMW, least - 1)


@pytest.mark.long
def test_reductions_are_awaited_at_once_where_that_leaves_room_for_more() -> None:
    """Reductions are awaited at once if that leaves room for another kept bucket.

    Here gathers take much longer than reductions, which are within a node.
    """
    plan = chain([bucket(f"u{i}", MB, stride=4) for i in range(6)], [100e-6] * 6)
    least, most = smallest_peak(plan), solve(plan, ADAMW).timeline.peak_bytes
    seconds = {}
    for later in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if later:  # as if the solver did not try it
                patch.setattr(solving._Solver, "_least_seconds_at_once", math.inf)
            seconds[later] = [solve(plan, ADAMW, least + (most - least) * step // 16).timeline for step in range(16)]
    pairs = list(zip(seconds[True], seconds[False], strict=True))
    assert all(at_once.seconds <= one.seconds * (1 + 1e-5) for one, at_once in pairs)
    assert any(at_once.seconds < 0.95 * one.seconds for one, at_once in pairs)


def test_budgets_between_buy_time() -> None:
    """A larger budget saves time.

    Communication takes as long as computation, and every kept bucket saves its gather.
    """
    plan = chain(buckets(*[MB] * 6), [20e-6] * 6)
    least, most = smallest_peak(plan), solve(plan, ADAMW).timeline.peak_bytes
    seconds, kept = [], []
    for step in range(9):
        budget = least + (most - least) * step // 8
        found = solve(plan, ADAMW, budget)
        assert found.timeline.peak_bytes <= budget
        seconds.append(found.timeline.seconds)
        kept.append(len(found.decisions.kept))
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.8 * seconds[0]
    assert kept[-1] == 6
    assert len(set(kept)) >= 4


@pytest.mark.parametrize("slow", [0, 1])
def test_what_saves_most_time_per_byte_stays(slow: int) -> None:
    """The bucket that saves the most time per byte is kept first.

    Here it is the one of two equally large buckets that is gathered between nodes, ten times as slowly.
    """
    plan = chain([bucket(f"u{i}", MB, stride=4 if i == slow else 1) for i in range(5)], [100e-6] * 5)
    least, most = smallest_peak(plan), solve(plan, ADAMW).timeline.peak_bytes
    found = [solve(plan, ADAMW, budget).decisions.kept for budget in range(least, most, MB)]
    assert found[0] <= {4}  # the last one, which backward begins with
    one_of_both = [kept & {0, 1} for kept in found if len(kept & {0, 1}) == 1]
    assert one_of_both
    assert set(one_of_both) == {frozenset({slow})}


def test_starts_stay_where_they_are_when_units_in_between_stay() -> None:
    """Starts keep their places if units in between are kept. Distances count gathered units only."""
    plan = even(6)
    gathers = {BACKWARD: {5: ahead(1), 4: ahead(2), 3: ahead(3), 2: ahead(0), 1: ahead(2), 0: ahead(3)}}
    solver = solving._Solver(plan, ADAMW, None, None)
    left = solver._without(frozenset({3, 5}), gathers)[BACKWARD]
    assert {bucket: ahead.units for bucket, ahead in left.items()} == {4: 1, 2: 0, 1: 1, 0: 2}
    fixed = solving._Solver(plan, ADAMW, 1, None)._without(
        frozenset({3}), {BACKWARD: dict.fromkeys(range(6), ahead(1))}
    )
    assert fixed[BACKWARD] == dict.fromkeys([5, 4, 2, 1, 0], ahead(1))


@pytest.mark.parametrize(
    ("sizes", "microseconds", "step", "kept", "starts"),
    [
        # The gather of the third unit was late, and starts one unit earlier than what it waits for required.
        ([1, 1, 1, 1], [20, 20, 20, 20], 0, {3}, [1, 1, 0, 1]),
        # All gathers are hidden: the units that forward uses last are kept.
        ([2, 1, 1, 1], [1, 200, 40, 200], 0, {2, 3}, [1, 2, 1, 2]),
        # The first unit's gather is not hidden.
        ([1, 1, 1, 2, 1, 1], [200, 10, 40, 10, 10, 10], 3, {0, 3, 4, 5}, [1, 1, 2, 3, 4, 3]),
    ],
)
def test_what_is_decided_of_small_models(
    sizes: list[int], microseconds: list[int], step: int, kept: set[int], starts: list[int]
) -> None:
    """Decisions for small models are the expected ones. Budgets are ``step`` quarters of the way from least to most."""
    plan = chain(buckets(*[size * MB for size in sizes]), [1e-6 * time for time in microseconds])
    least, most = smallest_peak(plan), solve(plan, ADAMW).timeline.peak_bytes
    found = solve(plan, ADAMW, least + (most - least) * step // 4).decisions
    assert (found.kept, units_of(found, FORWARD)) == (kept, starts)


@pytest.mark.parametrize("changes", [{}, {"saved": 3 * MB}, {"saved": 3 * MB, "rise": MB}])
def test_memory_of_segments_is_a_close_bound(changes: dict[str, int]) -> None:
    """The solver takes no less memory for needed than its schedules need, and not much more."""
    plan = even(**changes)
    for budget in (None, smallest_peak(plan)):
        found = solve(plan, ADAMW, budget)
        decided, memory = found.decisions, SegmentMemory(plan, sum(plan.resting(ADAMW).values()))
        most = max(
            memory.used(phase, decided.kept, decided.reductions, decided.gathers[phase]).max()
            for phase in plan.outlines
        )
        assert found.timeline.peak_bytes <= most <= found.timeline.peak_bytes + MB


# -- budgets that cannot be kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"saved": 100 * MB}, "activation checkpointing, or a smaller batch"),
        ({"rise": 100 * MB}, "a smaller batch"),
        ({}, "more ranks to shard over"),
    ],
)
def test_a_refusal_says_what_is_missing_and_what_would_help(changes: dict[str, int], advice: str) -> None:
    plan = even(**changes)
    least = smallest_peak(plan)
    missing = 3 << 20
    with pytest.raises(BudgetError) as caught:
        solve(plan, ADAMW, least - missing)
    message = str(caught.value)
    assert caught.value.needed == least
    assert "3.00 MiB too much" in message
    assert advice in message
    assert "without prefetch and with every bucket gathered again" in message
    with pytest.raises(BudgetError, match="with prefetch 2 and with what backward needs kept"):
        solve(plan, ADAMW, 0, prefetch=2, reshard=False)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [None, 10**9])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_is_honoured(prefetch: int, budget: int | None) -> None:
    found = solve(even(), ADAMW, budget, prefetch=prefetch)
    for phase in (FORWARD, BACKWARD):
        assert set(units_of(found.decisions, phase)) <= {prefetch}
        assert {ahead.why.limit for ahead in found.decisions.gathers[phase].values()} <= {Limit.POLICY}


@pytest.mark.parametrize(("reshard", "kept"), [(True, {4}), (False, {0, 1, 2, 3, 4}), (None, {0, 1, 2, 3, 4})])
def test_reshard_is_honoured(reshard: bool | None, kept: set[int]) -> None:
    assert solve(even(), ADAMW, reshard=reshard).decisions.kept == kept


def test_without_overlap_nothing_starts_early() -> None:
    plan = even(overlap=Overlap(False, False))
    least = smallest_peak(plan, prefetch=2)
    assert least == smallest_peak(plan)
    for found in (solve(plan, ADAMW), solve(plan, ADAMW, least), solve(plan, ADAMW, least, prefetch=2)):
        assert set(units_of(found.decisions, FORWARD)) == {0}
        assert {behind.later for behind in found.decisions.reductions.values()} == {0}
    found = solve(plan, ADAMW)
    assert {behind.why.limit for behind in found.decisions.reductions.values()} == {Limit.OVERLAP}
    shown = explained(found.timeline, found.decisions, {Stage.FORWARD: FORWARD, Stage.BACKWARD: BACKWARD})
    assert {e.reason for e in shown.exposures if e.exposed} == {Limit.OVERLAP.value}


# -- reasons ----------------------------------------------------------------------------------------------------------


def test_reasons_of_a_tight_budget() -> None:
    plan = even()
    least = smallest_peak(plan)
    found = solve(plan, ADAMW, least + 1 * MB)
    whys = [ahead.why for phase in (FORWARD, BACKWARD) for ahead in found.decisions.gathers[phase].values()]
    short = [why for why in whys if why.limit is Limit.BUDGET]
    assert short
    assert all(0 < why.bytes <= 4 * MB for why in short)
    phases = {Stage.FORWARD: FORWARD, Stage.BACKWARD: BACKWARD}
    reasons = {e.reason for e in explained(found.timeline, found.decisions, phases).exposures if e.exposed}
    assert any(reason.startswith("limited by memory budget (needs ") for reason in reasons), reasons


def test_reasons_of_plenty() -> None:
    found = solve(even(), ADAMW, 10**9)
    aheads = found.decisions.gathers[FORWARD]
    assert aheads[0] == Ahead(1, Why(Limit.BEGIN))
    assert {aheads[bucket].why.limit for bucket in range(2, 5)} == {Limit.NONE}
    assert found.decisions.why_not_kept == {}


def reasons(plan: StepOutlines, decisions: Decisions) -> dict[str, str]:
    phases = {Stage.FORWARD: FORWARD, Stage.BACKWARD: BACKWARD}
    shown = explained(simulated(plan, decisions), decisions, phases)
    return {e.name: e.reason for e in shown.exposures if e.what == "reduce" and e.exposed}


def test_reasons_of_reductions_name_their_own_options() -> None:
    # Each reduction takes 43 us, and 20 us are computed meanwhile. All buckets are kept, so nothing else is awaited.
    policy = SchedulePolicy(reshard_after_forward=False)
    slow = chain(buckets(*[MB] * 4), [10e-6] * 4, policy=policy)
    one = reasons(slow, slow.decisions_by_policy())
    assert any("the option reductions_in_flight" in reason for reason in one.values()), one
    policy = replace(policy, reduction_bytes=1)
    tight = reasons(
        slow, StepOutlines(slow.outlines, replace(slow.context, policy=policy), COSTS).decisions_by_policy()
    )
    assert any("limited by reduction_bytes" in reason for reason in tight.values()), tight
    assert not any("prefetch" in reason for reason in (*one.values(), *tight.values()))
    solved = solve(slow, ADAMW, smallest_peak(slow))
    assert any(reason == "limited by memory budget" for reason in reasons(slow, solved.decisions).values())
    free = reasons(slow, solve(slow, ADAMW).decisions)
    assert free
    assert not any("option" in reason or "budget" in reason for reason in free.values()), free


def test_what_is_not_kept_says_how_much_is_missing() -> None:
    """For each bucket that is not kept, the decision says how much memory is missing.

    Two buckets fit in the rest, one is larger.
    """
    plan = chain(buckets(MB, 4 * MB, MB), [20e-6] * 3)
    least = smallest_peak(plan)
    missing = [
        (bucket, why.bytes)
        for budget in range(least, least + 20 * MB, MB)
        for bucket, why in solve(plan, ADAMW, budget).decisions.why_not_kept.items()
    ]
    assert missing
    assert all(0 < size <= 16 * MB for _, size in missing)


# -- any model --------------------------------------------------------------------------------------------------------

NUMELS = st.sampled_from([400, 40_000, 400_000, MB, 4 * MB])
SECONDS = st.sampled_from([0.0, 1e-6, 20e-6, 100e-6, 1e-3])


@st.composite
def plans(draw: st.DrawFn) -> StepOutlines:
    """Draw one to eight units of one or two buckets, some of them frozen, on one or two networks."""
    infos = []
    count = draw(st.integers(1, 8))
    gathers = draw(st.sampled_from(["gathers", "reductions"]))
    use = (AllGather(Group(gathers, RANKS, 0)),)
    for i in range(count):
        for name in draw(st.sampled_from([[f"u{i}"], [f"u{i}"], [f"u{i}#0", f"u{i}#1"]])):
            trainable = draw(st.booleans()) or draw(st.booleans())
            infos.append(bucket(name, draw(NUMELS), f"u{i}", trainable=trainable, use=use))
    return chain(
        infos,
        [draw(SECONDS) for _ in range(count)],
        saved=draw(st.sampled_from([0, MB, 20 * MB])),
        rise=draw(st.sampled_from([0, MB, 20 * MB])),
        overlap=draw(st.sampled_from([Overlap(), Overlap(), Overlap(gathers=False), Overlap(reductions=False)])),
        costs=CostModel(replace(MACHINE, compute_slowdown=draw(st.sampled_from([0.0, 0.3]))), fused=True),
    )


def in_order(plan: StepOutlines, decisions: Decisions) -> Iterator[tuple[list[int], list[int]]]:
    """Yield by graph the buckets whose gathers start, and those whose gathers are awaited, in order."""
    for events in plan.events(decisions).values():
        started, awaited = (
            [e.collective.bucket for e in events if isinstance(e, kind) and e.collective.what == "gather"]
            for kind in (Start, Wait)
        )
        yield started, awaited


def check(plan: StepOutlines, found: Solution, budget: int | None) -> None:
    """Check what must hold for every schedule of the solver."""
    assert budget is None or found.timeline.peak_bytes <= budget
    again = simulated(plan, found.decisions)
    assert (again.seconds, again.peak_bytes) == (found.timeline.seconds, found.timeline.peak_bytes)
    for started, awaited in in_order(plan, found.decisions):
        assert started == awaited
    for phase, outline in plan.outlines.items():
        gathered = {bucket for use in outline.uses for bucket in use.buckets}
        expected = gathered - found.decisions.kept if phase is BACKWARD else gathered
        assert set(found.decisions.gathers[phase]) == expected
    reduced = {g.bucket for g in plan.outlines[BACKWARD].gradients}
    assert set(found.decisions.reductions) == reduced


@settings(max_examples=12)
@given(plans())
def test_budgets_are_kept_and_more_memory_never_costs_time(plan: StepOutlines) -> None:
    least = smallest_peak(plan)
    largest = solve(plan, ADAMW)
    check(plan, largest, None)
    most = max(largest.timeline.peak_bytes, least)
    before = float("inf")
    for step in (0, 1, 3, 6, 8, 9):
        budget = least + (most - least) * step // 8
        found = solve(plan, ADAMW, budget)
        check(plan, found, budget)
        assert found.timeline.seconds <= before * (1 + 1e-5)  # six digits of times are compared
        before = found.timeline.seconds


@pytest.mark.long
@settings(max_examples=25)
@given(plans(), st.sampled_from([1, 3]))
def test_nothing_is_faster_than_where_memory_is_no_matter(plan: StepOutlines, bounds: int) -> None:
    """No schedule within a budget is faster than the one with unlimited memory."""
    free = solve(plan, ADAMW, bounds=bounds)
    least = smallest_peak(plan)
    most = max(free.timeline.peak_bytes, least)
    for budget in (least, (least + most) // 2, most - 1, most, 2 * most):
        if budget >= least:
            found = solve(plan, ADAMW, budget, bounds=bounds)
            assert free.timeline.seconds <= found.timeline.seconds * (1 + 1e-5)  # six digits of times are compared
            assert budget < 2 * most or found.timeline.seconds == free.timeline.seconds


@settings(max_examples=25)
@given(plans())
def test_memory_returns_to_rest(plan: StepOutlines) -> None:
    """A step frees everything that it allocates, except for gradients."""
    for found in (solve(plan, ADAMW), solve(plan, ADAMW, smallest_peak(plan))):
        memory = simulated(plan, found.decisions).memory
        assert memory is not None
        gradients = sum(info.layout.shard_numel * 4 for info in plan.context.buckets if info.trainable)
        assert memory.totals[-1] == memory.totals[0] + gradients
        assert all(min(sizes) >= 0 for sizes in memory.parts.values())


@settings(max_examples=25)
@given(plans(), st.sampled_from([0, 1, 2, 7]), st.sampled_from([None, True, False]))
def test_options_bound_what_is_chosen(plan: StepOutlines, prefetch: int, reshard: bool | None) -> None:
    least = smallest_peak(plan, prefetch=prefetch, reshard=reshard)
    free = smallest_peak(plan)
    assert least >= free or reshard is not None
    found = solve(plan, ADAMW, least, prefetch=prefetch, reshard=reshard)
    check(plan, found, least)
    for phase in (FORWARD, BACKWARD):
        assert set(units_of(found.decisions, phase)) <= {prefetch if plan.context.overlap.gathers else 0}
    if reshard is True:
        assert len(found.decisions.kept) <= 1


@pytest.mark.long
@settings(max_examples=25)
@given(plans(), st.integers(0, 10))
def test_decisions_do_not_depend_on_the_order_of_what_they_are_made_of(plan: StepOutlines, step: int) -> None:
    budget = smallest_peak(plan) + step * MB
    found = solve(plan, ADAMW, budget)
    turned = {phase: plan.outlines[phase] for phase in reversed(list(plan.outlines))}
    other = solve(StepOutlines(turned, plan.context, plan.costs), ADAMW, budget)
    assert repr(other.decisions) == repr(found.decisions)
    assert other.timeline.seconds == found.timeline.seconds


@settings(max_examples=25)
@given(plans())
def test_text_says_what_was_decided(plan: StepOutlines) -> None:
    """A saved and reloaded schedule has the same starts and waits in the same order."""
    found = solve(plan, ADAMW, smallest_peak(plan) + 3 * MB).decisions
    text = ScheduleText.of(plan.lines(found))
    infos = plan.context.buckets
    loaded = text.decisions([info.name for info in infos], [info.unit for info in infos], keepable=True)
    assert loaded.kept >= found.kept  # and buckets that backward does not need
    gathers = [[line for line in plan.lines(d)[FORWARD] if "gather" in line or "wait" in line] for d in (found, loaded)]
    assert gathers[0] == gathers[1]


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from outlines import bucket, chain
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost
from mfsdp_compile.passes.guests.solver.reasons import BudgetError
from mfsdp_compile.passes.guests.solver.solve import solve
sizes = [400_000, 1_000_000, 400_000, 400_000, 4_000_000, 400_000]
buckets = [bucket(f"u{{i}}#{{j}}", size, f"u{{i}}") for i, size in enumerate(sizes) for j in range(2)]
plan = chain(buckets, [20e-6] * 6, saved=10**6)
try:
    solve(plan, OptimizerCost(), 0)
except BudgetError as error:
    least = error.needed
for more in range(0, 30_000_000, 5_000_000):
    found = solve(plan, OptimizerCost(), least + more)
    decided = found.decisions
    print(sorted(decided.kept), decided.gathers, decided.reductions, decided.why_not_kept)
    print(found.timeline.seconds.hex(), found.timeline.peak_bytes)
"""


@pytest.mark.long
def test_decisions_do_not_depend_on_hashes(capsys: pytest.CaptureFixture[str]) -> None:
    """Decisions do not depend on Python's hash seed, because every rank must start the same collectives."""
    script = SCRIPT.format(folder=str(Path(__file__).parents[1]))
    environment = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    other = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    exec(script, {})
    text = capsys.readouterr().out
    assert text == other.stdout
    assert text.count("\n") == 12


# -- units of several buckets -----------------------------------------------------------------------------------------


def two_in_a_unit() -> StepOutlines:
    infos = [bucket(name, MB, name[:2]) for name in ("u0", "u1#0", "u1#1", "u2")]
    return chain(infos, [100e-6] * 3)


def test_a_unit_of_which_a_part_stays() -> None:
    """If a part of a unit is kept, the rest is gathered where the unit was.

    The same holds for a kept unit between two parts of another.
    """
    plan = two_in_a_unit()
    (first, *_) = plan.uses(BACKWARD, {1})
    assert first.buckets == (3,)
    assert [use.buckets for use in plan.uses(BACKWARD, {1})] == [(3,), (2,), (0,)]
    assert [use.buckets for use in plan.uses(FORWARD, {1})] == [(0,), (1, 2), (3,)]
    decisions = Decisions(frozenset({1}), {BACKWARD: {3: ahead(0), 2: ahead(1), 0: ahead(0)}})
    lines = [line for line in plan.lines(decisions)[BACKWARD] if "gather" in line]
    assert [line.split()[1] for line in lines] == ["u2", "u1#1", "u0"]
    timeline = simulated(plan, decisions)
    gathers = [e.name for e in timeline.exposures if e.what == "gather" and e.stage is Stage.BACKWARD]
    assert gathers == ["u2", "u1#1", "u0"]


def test_buckets_of_a_unit_start_together_and_are_awaited_where_they_are_used() -> None:
    plan = two_in_a_unit()
    uses = grouped([(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 2, 2)], plan.context)
    assert [(use.first, use.lives) for use in uses] == [
        (0, [(0, 0, 0)]),
        (1, [(1, 1, 1), (2, 2, 2)]),
        (2, [(3, 2, 2)]),
    ]
    forward = replace(plan.outlines[FORWARD], uses=tuple(uses))
    events = StepOutlines({FORWARD: forward}, plan.context, COSTS).events(Decisions())[Stage.FORWARD]
    order = [(type(e), e.collective.bucket) if isinstance(e, (Start, Wait)) else type(e) for e in events]
    expected = [(Start, 0), (Start, 1), (Start, 2), (Wait, 0), Compute]
    expected += [(Start, 3), (Wait, 1), Compute, (Wait, 2), (Wait, 3), Compute]
    assert [what for what in order if what is Compute or isinstance(what, tuple)] == expected


def later(plan: StepOutlines, in_flight: int) -> list[tuple[str, int]]:
    """Return for each bucket, in the order in which reductions start, after how many later ones it is awaited."""
    decisions = StepOutlines(
        plan.outlines, replace(plan.context, policy=SchedulePolicy(reductions_in_flight=in_flight)), COSTS
    ).decisions_by_policy()
    return [(plan.context.buckets[b].name, behind.later) for b, behind in decisions.reductions.items()]


def test_reductions_are_counted_by_unit() -> None:
    """Reductions are counted by unit. In backward u2 is first, then both buckets of u1, then u0."""
    plan = two_in_a_unit()
    assert later(plan, 0) == [("u2", 0), ("u1#0", 0), ("u1#1", 0), ("u0", 0)]
    assert later(plan, 1) == [("u2", 2), ("u1#0", 2), ("u1#1", 1), ("u0", 1)]
    assert later(plan, 2) == [("u2", 3), ("u1#0", 3), ("u1#1", 2), ("u0", 1)]
    assert later(plan, 9) == [("u2", 4), ("u1#0", 3), ("u1#1", 2), ("u0", 1)]  # until the end of the graph


def ahead(units: int) -> Ahead:
    return Ahead(units, Why(Limit.NONE))


# -- schedules as text ------------------------------------------------------------------------------------------------


def test_text_knows_parts_of_units_stages_and_the_models_own_collectives() -> None:
    text = ScheduleText.of(
        {
            BACKWARD: [
                "        3 operators",
                "gather  u1#1  1,024 B in float32 of 4 ranks",
                "wait    u1#1",
                "all_reduce  of the model itself",
                "reduce  u1#1, stage 2  256 B in float32, sum over 2 ranks, if due",
                "await   u1#1, stage 2",
            ]
        }
    )
    expected = [("gather", 1), ("wait", 1), ("reduce", 2), ("await", 2)]
    assert text.lines[BACKWARD] == [ScheduleLine(what, "u1#1", number) for what, number in expected]
    assert ScheduleText.parse(f"{text}   # a remark\n# another", "here").lines == text.lines


# -- real graphs ------------------------------------------------------------------------------------------------------

SAME = 1e-3
"""Tolerance for seconds and bytes.

An outline does not record where in a segment memory rises. Times are equal up to rounding.
"""


def compiled(factory: Any, strategy: str, **options: Any) -> pipeline.CompileRecord:
    torch._dynamo.reset()
    arguments = {"zero_dp_strategy": int(strategy)} if strategy.isdigit() else mesh_arguments(strategy)
    model: nn.Module = fully_shard_model(parity.build(factory), fsdp_unit_modules=[factory.block], **arguments)
    call = torch.compile(
        model, backend="mfsdp", options={"inner": "aot_eager", "report": True, "hardware": "h100-ib", **options}
    )
    call(torch.randn(64, 8)).backward()
    (record,) = model.sharded.compiled_graphs  # type: ignore[attr-defined]
    assert isinstance(record.forecast, Forecast) and not record.forecast.unpredicted
    return record


def of_graphs(record: pipeline.CompileRecord) -> Timeline:
    """Simulate the finished graphs."""
    assert isinstance(record.forecast, Forecast)
    events = {STAGES[phase]: found for phase, found in record.forecast.events.items()}
    resting = resting_memory(record.context.buckets, ADAMW, record.context.other_bytes)
    return simulate(events, record.context, record.forecast.prediction.costs, resting, ADAMW)


def assert_same(outlined: Timeline, finished: Timeline) -> None:
    for timeline in (outlined, finished):
        assert timeline.exposures
    started = [[(e.stage, e.what, e.name) for e in timeline.exposures] for timeline in (outlined, finished)]
    assert started[0] == started[1]
    assert outlined.peak_bytes == pytest.approx(finished.peak_bytes, rel=SAME)
    assert outlined.seconds == pytest.approx(finished.seconds, rel=SAME)


def test_what_was_decided_comes_before_the_policy() -> None:
    plan = chain([bucket("a"), bucket("b")], [5e-6] * 2)
    ahead = Ahead(3, Why(Limit.NONE))
    decided = Decisions(gathers={Phase.FORWARD: {0: ahead}})
    assert decided.gather(Phase.FORWARD, [0], 1, plan.context.policy) is ahead
    assert (
        decided.gather(Phase.FORWARD, [1], 1, plan.context.policy).units == plan.context.policy.prefetch != ahead.units
    )


@pytest.mark.long_unless("Tied-3-*")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("factory", "strategy", "options"),
    [
        (zoo.FrozenParameters, "3", {}),
        (zoo.Plain, "2", {}),
        (zoo.Tied, "1", {}),
        (zoo.Checkpointed, "0", {}),
        (zoo.FrozenUnit, "HFSDP", {}),
        (zoo.Uneven, "HSDP optim_grads_params", {}),
        (zoo.Autocast, "3", {}),
        (zoo.Tied, "3", {"reshard_after_forward": 2}),
        (zoo.Checkpointed, "3", {"reshard_after_forward": 2}),
    ],
    ids=lambda value: (
        getattr(value, "__name__", None) or (",".join(value) or "default" if isinstance(value, dict) else value)
    ),
)
def test_graphs_do_what_their_outlines_say(
    factory: Any, strategy: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation of an outline with decisions equals that of the finished graph.

    This holds with a tight budget, without one, and for a policy without a solver.
    """
    plans: list[StepOutlines] = []

    def spy(plan: StepOutlines, *args: Any, **kwargs: Any) -> Solution:
        plans.append(plan)
        return solve(plan, *args, **kwargs)

    monkeypatch.setattr(across_ranks, "solve", spy)
    free = compiled(factory, strategy, memory_budget="1GiB", **options)
    (plan,) = plans
    assert free.producer.solution is not None
    assert_same(free.producer.solution.timeline, of_graphs(free))

    least = smallest_peak(plan, reshard=options.get("reshard_after_forward"))
    budget = int((least + free.producer.solution.timeline.peak_bytes) / 2 / (1 - SchedulePolicy().budget_reserve)) + 2
    tight = compiled(factory, strategy, memory_budget=budget, **options)
    assert tight.producer.solution is not None
    assert_same(tight.producer.solution.timeline, of_graphs(tight))
    assert tight.producer.solution.timeline.peak_bytes <= budget

    text = ScheduleText.of(tight.schedules)
    followed = compiled(factory, strategy, schedule=text)
    assert ScheduleText.of(followed.schedules).lines == text.lines

    plain = compiled(factory, strategy, **options)
    assert type(plain.producer) is Producer
    by_policy = StepOutlines(plan.outlines, plain.context, plan.costs)
    decisions = by_policy.decisions_by_policy()
    assert decisions.kept == plain.decisions.kept
    assert decisions.portions == (plain.decisions.portions or frozenset())
    assert bool(decisions.portions) == bool(options)
    assert_same(simulated(by_policy, decisions), of_graphs(plain))
