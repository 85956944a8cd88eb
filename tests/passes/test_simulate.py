"""Simulated steps: programs made by hand, with times and bytes that are easy to compute."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outlines import COSTS, MACHINE, RANKS, bucket, context

from mfsdp_compile.passes.context import Context
from mfsdp_compile.passes.guests.solver.costs import CostModel, Ring, collective_seconds
from mfsdp_compile.passes.guests.solver.flow import Category, Collective, SavedCopy, gather_of
from mfsdp_compile.passes.guests.solver.simulate import (
    Allocate,
    Compute,
    Enter,
    Event,
    Exposure,
    Free,
    OptimizerCost,
    Stage,
    Start,
    StartCopy,
    StepBucket,
    Timeline,
    Wait,
    WaitCopy,
    resting_memory,
    simulate,
)
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.guests.offload.stages import HostMemory
from mfsdp_compile.runtime.lanes.plain import AllGather

AB = context([bucket("a"), bucket("b")])
FORWARD, BACKWARD = Stage.FORWARD, Stage.BACKWARD
RESTING = {Category.SHARDS: 100}


def gather(seconds: float, number: int = 0, group: str = "g", before: float = 0.0) -> Collective:
    return Collective("gather", number, 0, before, seconds, group)


def run(
    *events: Event,
    of: Context = AB,
    slowdown: float = 0.0,
    optimizer: OptimizerCost | None = None,
    resting: dict[Category, int] = RESTING,
    **stages: list[Event],
) -> Timeline:
    costs = CostModel(replace(MACHINE, compute_slowdown=slowdown), fused=True)
    given = {Stage(stage): events for stage, events in stages.items()} or {FORWARD: list(events)}
    return simulate(given, of, costs, resting, optimizer)


def seconds_of(exposure: Exposure) -> tuple[float, float, float, float]:
    """Return exposed, hidden and queued seconds, and the computation that could hide the collective."""
    return exposure.exposed, exposure.hidden, exposure.queued, exposure.ahead


OFFLOADED = context([bucket("a", rest=HostMemory()), bucket("b")])


def test_copies_of_saved_values_queue_by_direction() -> None:
    first, second = SavedCopy(True, 0, 0, 8, 2.0), SavedCopy(True, 0, 0, 8, 3.0)
    back = SavedCopy(False, 0, 0, 8, 4.0)
    starts = [StartCopy(first), StartCopy(second), StartCopy(back)]
    found = run(*starts, Compute(1.0, 0.0), WaitCopy(first), WaitCopy(back), WaitCopy(second), Compute(1.0, 0.0))
    assert (found.seconds, found.compute_seconds) == (6.0, 2.0)  # 2 + 3 to the host, beside 4 from it
    assert run(*starts, Compute(9.0, 0.0), WaitCopy(second)).seconds == 9.0


def test_computation_waits_for_what_is_fetched() -> None:
    """A shard of 1000 bytes takes 10 us and 1 us over the link; one on the device takes nothing."""
    fetched, there = (gather_of(info, i, COSTS) for i, info in enumerate(OFFLOADED.buckets))
    assert fetched.before - there.before == pytest.approx(11e-6)
    assert fetched.seconds == there.seconds


def test_the_cpu_steps_when_the_last_gradient_has_arrived() -> None:
    """It moves 250 elements x 8 bytes in 0.2 us; the gradient takes 11 us; the device needs 20 ns for its part."""
    last = len(OFFLOADED.buckets[0].exchange.lane.reduction) - 1
    reduce = Collective("reduce", 0, last, 0.0, 1e-6, "g")
    optimizer = OptimizerCost("a", 8, 8, 4)
    found = run(Start(reduce), Wait(reduce), of=OFFLOADED, optimizer=optimizer)
    assert found.seconds == pytest.approx(1e-6 + 11e-6 + 0.2e-6)
    assert found.peak_bytes == 100 + 250 * 4  # nothing on the device for what is stepped over on the host
    on_device = run(Start(reduce), Wait(reduce), of=AB, optimizer=optimizer)
    assert on_device.seconds == pytest.approx(1e-6 + 2 * 250 * 8 / 1e11)


def test_the_cpu_steps_while_the_device_computes() -> None:
    """In backward, it steps (0.2 us) when the gradient has arrived (12 us), whatever the device has queued meanwhile.

    What is queued after the step waits for it. Steps over two buckets follow each other.
    """
    both = context([bucket("a", rest=HostMemory()), bucket("b", rest=HostMemory())])
    last, optimizer = len(both.buckets[0].exchange.lane.reduction) - 1, OptimizerCost("a", 8, 8, 4)
    first, second = (Collective("reduce", number, last, 0.0, 1e-6, "g") for number in range(2))
    begun = [Start(first), Wait(first)]
    hidden = run(*begun, Compute(30e-6, 0.0), StepBucket(0), Compute(1e-6, 0.0), of=both, optimizer=optimizer)
    left = run(*begun, Compute(30e-6, 0.0), Compute(1e-6, 0.0), of=both, optimizer=optimizer)
    assert hidden.seconds == pytest.approx(32e-6 + 0.2e-6)  # b is left
    assert left.seconds == pytest.approx(32e-6 + 0.4e-6)
    shown = run(*begun, Compute(2e-6, 0.0), StepBucket(0), Compute(1e-6, 0.0), of=both, optimizer=optimizer)
    assert shown.seconds == pytest.approx(12e-6 + 0.2e-6 + 1e-6 + 0.2e-6)
    queued = run(*begun, Start(second), Wait(second), StepBucket(0), StepBucket(1), of=both, optimizer=optimizer)
    assert queued.seconds == pytest.approx(1e-6 + 22e-6 + 0.2e-6), "the second gradient arrives after the first step"


def test_a_copy_on_the_device_is_written_once_a_step() -> None:
    """If only the optimizer is offloaded, gathers fetch nothing; the shard (11 us) is back after the CPU's step."""
    kept = context([bucket("a", rest=HostMemory(optimizer_only=True)), bucket("b")])
    copy, there = (gather_of(info, i, COSTS) for i, info in enumerate(kept.buckets))
    assert copy.before == there.before
    optimizer = OptimizerCost("a", 8, 8, 4)
    difference = run(of=kept, optimizer=optimizer).seconds - run(of=OFFLOADED, optimizer=optimizer).seconds
    assert difference == pytest.approx(11e-6)


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_gather_is_hidden_by_computation_between_start_and_wait() -> None:
    a = gather(2.0)
    found = run(Compute(1.0, 5.0), Start(a), Compute(3.0, 7.0), Wait(a), Compute(1.0, 0.0))
    assert (found.seconds, found.compute_seconds, found.exposed_seconds, found.flops) == (5.0, 5.0, 0.0, 12.0)
    (exposure,) = found.exposures
    assert seconds_of(exposure) == (0.0, 2.0, 0.0, 3.0)
    assert (exposure.issued, exposure.begin, exposure.what, exposure.name) == (1.0, 1.0, "gather", "a")


def test_computation_stands_still_for_the_rest_of_a_gather() -> None:
    a = gather(5.0)
    found = run(Start(a), Compute(3.0, 0.0), Wait(a), Compute(1.0, 0.0))
    assert (found.seconds, found.compute_seconds) == (6.0, 4.0)
    assert seconds_of(found.exposures[0]) == (2.0, 3.0, 0.0, 3.0)
    wait = next(span for span in found.spans if span.kind == "wait")
    assert (wait.stream, wait.begin, wait.end) == ("compute", 3.0, 5.0)


def test_nothing_hides_a_gather_that_is_awaited_at_once() -> None:
    a = gather(5.0)
    assert seconds_of(run(Start(a), Wait(a), Compute(9.0, 0.0)).exposures[0]) == (5.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(("group", "expected"), [("g", (2.0, 1.0, 4.0, 5.0)), ("h", (0.0, 3.0, 0.0, 5.0))])
def test_collectives_queue_behind_those_of_their_group(group: str, expected: tuple[float, ...]) -> None:
    a, b = gather(4.0), gather(3.0, 1, group)
    found = run(Start(a), Start(b), Compute(5.0, 0.0), Wait(a), Wait(b))
    assert seconds_of(found.exposures[0]) == (0.0, 4.0, 0.0, 5.0)
    assert seconds_of(found.exposures[1]) == expected
    assert found.exposures[1].begin == expected[2]


def test_groups_are_busy_across_graphs() -> None:
    """A collective that forward has not awaited delays the backward's gathers."""
    a, b = gather(4.0), gather(3.0, 1)
    found = run(forward=[Start(a), Wait(a)], backward=[Start(b), Compute(1.0, 0.0), Wait(b)])
    assert [exposure.stage for exposure in found.exposures] == [FORWARD, BACKWARD]
    assert found.exposures[1].queued == 0.0
    assert found.seconds == 7.0


def test_what_is_computed_before_a_start_delays_it() -> None:
    a = gather(2.0, before=0.5)
    found = run(Compute(1.0, 0.0), Start(a), Wait(a))
    assert (found.seconds, found.compute_seconds) == (3.5, 1.5)
    assert found.exposures[0].issued == 1.5


@pytest.mark.parametrize(
    ("starts", "computed", "seconds"),
    [
        ([3.0], 4.0, 5.0),  # 3 s beside the collective do the work of 2 s, and 2 s are left
        ([3.0], 2.0, 3.0),
        ([3.0], 1.0, 1.5),
        ([2.0, 1.0], 4.0, 5.0),  # one after the other: 3 s beside collectives
        ([], 4.0, 4.0),
    ],
)
def test_computation_is_slower_beside_collectives(starts: list[float], computed: float, seconds: float) -> None:
    started = [gather(each, i) for i, each in enumerate(starts)]
    found = run(*map(Start, started), Compute(computed, 0.0), slowdown=0.5)
    assert found.seconds == pytest.approx(seconds)
    assert found.compute_seconds == computed


def test_two_collectives_at_a_time_slow_computation_once() -> None:
    a, b = gather(3.0), gather(3.0, 1, "h")
    assert run(Start(a), Start(b), Compute(4.0, 0.0), slowdown=0.5).seconds == pytest.approx(5.0)


def test_a_short_collective_beside_a_long_one() -> None:
    a, b = gather(10.0), gather(1.0, 1, "h")
    found = run(Start(a), Start(b), Compute(1.0, 0.0), Compute(1.0, 0.0), slowdown=0.5)
    assert found.seconds == pytest.approx(3.0)


def test_a_collective_that_is_over_slows_nothing() -> None:
    a, b = gather(3.0), gather(3.0, 1)
    found = run(Start(a), Wait(a), Compute(2.0, 0.0), Start(b), Compute(1.0, 0.0), slowdown=0.5)
    assert found.seconds == pytest.approx(3.0 + 2.0 + 1.5)


# -- units and spans --------------------------------------------------------------------------------------------------


def test_time_belongs_to_the_unit_that_computes() -> None:
    a, b = gather(2.0), gather(3.0, 1)
    found = run(Start(a), Wait(a), Enter(0), Start(b), Compute(1.0, 0.0), Wait(b), Enter(1), Compute(4.0, 0.0))
    assert found.units == {(FORWARD, ""): 2.0, (FORWARD, "a"): 1.0 + 2.0, (FORWARD, "b"): 4.0}
    assert sum(found.units.values()) == found.seconds
    assert [exposure.during for exposure in found.exposures] == ["", "a"]


def test_spans_join_where_one_unit_computes_on() -> None:
    found = run(Enter(0), Compute(1.0, 0.0), Compute(2.0, 0.0), Enter(1), Compute(1.0, 0.0))
    assert [(span.name, span.begin, span.end) for span in found.spans] == [("a", 0.0, 3.0), ("b", 3.0, 4.0)]


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_peak_its_parts_and_its_place() -> None:
    found = run(
        forward=[Enter(0), Allocate(Category.SAVED, 50), Compute(1.0, 0.0), Free(Category.SAVED, 20)],
        backward=[
            *(Enter(1), Allocate(Category.TEMPORARY, 30), Allocate(Category.GATHERED, 5)),
            *(Free(Category.TEMPORARY, 30), Allocate(Category.TEMPORARY, 29), Free(Category.SAVED, 30)),
        ],
    )
    assert found.peak_bytes == 100 + 30 + 30 + 5
    parts = {category: size for category, size in found.peak_parts.items() if size}
    assert parts == {Category.SHARDS: 100, Category.SAVED: 30, Category.TEMPORARY: 30, Category.GATHERED: 5}
    assert (found.peak_stage, found.peak_at) == (BACKWARD, "b")
    assert found.memory is not None
    assert found.memory.totals == [100, 150, 130, 160, 165, 135, 164, 134]
    assert max(found.memory.totals) == found.peak_bytes
    assert found.memory.seconds == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_memory_at_rest_is_the_least() -> None:
    found = run(Compute(1.0, 0.0))
    assert (found.peak_bytes, found.peak_at) == (100, "")


def test_details_cost_nothing_but_themselves() -> None:
    a = gather(5.0)
    events = [Allocate(Category.SAVED, 50), Start(a), Compute(3.0, 0.0), Wait(a), Free(Category.SAVED, 50)]
    full, short = (simulate({FORWARD: events}, AB, COSTS, RESTING, None, details=d) for d in (True, False))
    assert (short.spans, short.memory) == ([], None)
    assert replace(full, spans=[], memory=None) == short


# -- residents and the optimizer --------------------------------------------------------------------------------------


def test_residents_are_gathered_as_the_step_begins() -> None:
    """Residents of ZeRO-1 and 2 are gathered at the beginning of a step and awaited at their first use.

    They are gathered one after the other.
    """
    whole: dict[str, Any] = {
        "step": (AllGather(Group("residents", RANKS, 0)),),
        "use": (),
        "has_resident": True,
    }
    infos = [bucket(name, 10**6, **whole) for name in "ab"]
    each = collective_seconds("all_gather", 4 * 10**6, Ring(RANKS), MACHINE)
    computed = each / 4
    found = run(Enter(0), Compute(computed, 0.0), Enter(1), Compute(1.0, 0.0), of=context(infos))
    first, second = found.exposures
    assert seconds_of(first) == pytest.approx((each, 0.0, 0.0, 0.0))
    assert seconds_of(second) == pytest.approx((each - computed, computed, each, computed))
    assert found.seconds == pytest.approx(2 * each + 1.0)
    resting = resting_memory(infos, OptimizerCost())
    assert resting == {Category.SHARDS: 0, Category.OPTIMIZER: 2 * 250_000 * 8, Category.GATHERED: 8 * 10**6}


def test_quantized_gathers() -> None:
    """A quarter of float32's bytes is sent; the shard is quantized before the step and the bucket after its wait."""
    plain = bucket("a", sizes=[10, 100], ndims=[2])
    info = bucket("a", sizes=[10, 100], ndims=[2], scaling="rowwise")
    assert (info.sent_bytes, plain.sent_bytes, info.gathered_bytes) == (1000, 4000, 4000)
    assert (info.in_flight_bytes, info.fresh_bytes, plain.in_flight_bytes) == (1000, 4000, 0)
    fp4 = bucket("a", 1600, sizes=[10, 160], ndims=[2], scaling="nvfp4")
    assert (fp4.sent_bytes, fp4.gathered_bytes, fp4.in_flight_bytes) == (900, 6400, 900)
    assert fp4.resident_bytes == 900 // RANKS
    assert COSTS.reduce_scales([fp4]) == collective_seconds("all_reduce", 4, Ring(RANKS, 1), MACHINE)
    tensorwise = bucket("a", 1600, sizes=[10, 160], ndims=[2], scaling="tensorwise")
    assert gather_of(fp4, 0, COSTS).after > gather_of(tensorwise, 0, COSTS).after
    in_buffer = bucket("a", sizes=[10, 100], ndims=[2], scaling="rowwise", buffers=(1000, 2, 0, 0))
    assert (in_buffer.in_flight_bytes, in_buffer.fresh_bytes) == (0, 4000)
    ring = Ring(RANKS, 1)
    assert COSTS.gather(info) == collective_seconds("all_gather", 1000, ring, MACHINE)
    assert COSTS.reduce_scales([plain, info]) == collective_seconds("all_reduce", 4 * 10, ring, MACHINE)
    assert COSTS.reduce_scales([plain]) == COSTS.joint(plain) == COSTS.cast(info) == 0
    collective = gather_of(info, 0, COSTS)
    assert collective.after > 0
    timeline = simulate({Stage.FORWARD: [Start(collective), Wait(collective)]}, context([info]), COSTS, {}, None)
    parts = COSTS.joint(info), COSTS.reduce_scales([info]), COSTS.gather(info), collective.after
    assert timeline.seconds == pytest.approx(sum(parts))
    at_rest = [sum(resting_memory([each], OptimizerCost()).values()) for each in (info, plain)]
    assert at_rest[0] - at_rest[1] == 1000 // RANKS


def test_memory_at_rest() -> None:
    infos = [bucket("a", 1000), bucket("b", 400, trainable=False)]
    resting = resting_memory(infos, OptimizerCost(state_bytes=2), other=7)
    assert resting == {Category.SHARDS: 250 * 4 + 100 * 4 + 7, Category.OPTIMIZER: 500, Category.GATHERED: 0}


def test_the_optimizers_step_ends_the_timeline() -> None:
    cost = OptimizerCost("some", state_bytes=8, moved_bytes=20, extra_bytes=4)
    infos = [bucket("a", 10**6), bucket("b", 10**6, trainable=False)]
    found = run(Allocate(Category.GRADIENTS, 10), Compute(1.0, 0.0), of=context(infos), optimizer=cost)
    step = 250_000 * 20 / 1e11
    assert found.seconds == pytest.approx(1.0 + step)
    assert found.compute_seconds == pytest.approx(1.0 + step)
    assert found.units[Stage.OPTIMIZER, "optimizer"] == pytest.approx(step)
    assert (found.peak_bytes, found.peak_stage) == (100 + 10 + 10**6, Stage.OPTIMIZER)
    assert found.spans[-1].kind == "optimizer"


# -- any program ------------------------------------------------------------------------------------------------------

TIMES = st.sampled_from([0.0, 0.125, 0.5, 1.0, 3.0, 10.0])
COLLECTIVES = st.lists(st.tuples(st.sampled_from("gh"), TIMES, TIMES, st.integers(0, 9), st.integers(0, 9)), max_size=8)


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Draw ten slots of computation, before which collectives start and are awaited."""
    places: list[list[Event]] = [[Enter(i % 2)] for i in range(10)]
    for i, (group, seconds, before, begin, later) in enumerate(draw(COLLECTIVES)):
        collective = Collective("gather" if group == "g" else "reduce", i % 2, 0, before, seconds, group)
        places[begin].append(Start(collective))
        places[min(9, begin + later)].append(Wait(collective))
    return [event for place in places for event in [*place, Compute(draw(TIMES), 1.0)]]


@given(programs(), st.sampled_from([0.0, 0.5, 1.0]))
def test_time_is_accounted_for(events: list[Event], slowdown: float) -> None:
    found = run(*events, slowdown=slowdown)
    assert sum(found.units.values()) == pytest.approx(found.seconds)
    if not slowdown:
        assert found.seconds == pytest.approx(found.compute_seconds + found.exposed_seconds)
    assert found.seconds >= found.compute_seconds + found.exposed_seconds - 1e-9
    assert found.seconds <= (1 + slowdown) * found.compute_seconds + found.exposed_seconds + 1e-9
    for exposure in found.exposures:
        assert 0 <= exposure.exposed <= exposure.queued + exposure.seconds + 1e-9
        assert exposure.begin == pytest.approx(exposure.issued + exposure.queued)
    computing = [span for span in found.spans if span.stream == "compute"]
    for before, after in pairwise(computing):
        assert before.end <= after.begin
    assert sum(span.end - span.begin for span in computing) == pytest.approx(found.seconds)
    for group in ("gather", "reduce"):
        spans = sorted((s.begin, s.end) for s in found.spans if s.stream == group)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))


@given(programs())
def test_faster_collectives_never_cost_time(events: list[Event]) -> None:
    half = {
        e.collective: replace(e.collective, seconds=e.collective.seconds / 2) for e in events if isinstance(e, Start)
    }
    faster = [type(e)(half[e.collective]) if isinstance(e, (Start, Wait)) else e for e in events]
    assert run(*faster).seconds <= run(*events).seconds + 1e-9
