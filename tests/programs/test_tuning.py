"""Schedules are tuned by measuring them in the first steps of training."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import AOT_EAGER, INDUCTOR
from pool import on_ranks

import mfsdp_compile
from mfsdp_compile import fully_shard_model
from mfsdp_compile.backend import compile as compile_module
from mfsdp_compile.backend import tuning
from mfsdp_compile.backend.tuning import RETRIES, ROUNDS, Race, Tuning
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase

STEPS = 1 + sum(most * steps for most, steps in ROUNDS) + RETRIES


@given(
    st.lists(st.floats(0.5, 2), min_size=2, max_size=tuning.MOST),
    st.lists(st.floats(0, 0.5), min_size=2 * STEPS, max_size=2 * STEPS),
)
@settings(max_examples=200, deadline=None)
def test_a_race(true: list[float], noise: list[float]) -> None:
    """It is over in 30 steps, alike on all ranks. What wins was never slower than what else ran last."""
    races, late = [Race(len(true)), Race(len(true))], iter(noise)
    steps, is_over = 1, False
    while not is_over:
        assert races[0].queue == races[1].queue
        offers: list[list[float]] = [[], []]
        while races[0].queue:
            for race, offer in zip(races, offers, strict=True):
                offer.append(true[race.queue[0]] + next(late))
                race.note(offer[-1])
            steps += 1
        slowest = [max(each) for each in zip(*offers, strict=True)]
        (is_over, other) = [race.end_round(lambda _: list(slowest)) for race in races]
        assert is_over == other
    assert steps <= STEPS <= 30
    assert races[0].ranking() == races[1].ranking()
    times = races[0].times
    finalists = [each for each in times if len(each) == max(map(len, times))]
    assert times[0] in finalists
    assert min(times[races[0].ranking()[0]]) == min(map(min, finalists))


def test_a_race_without_noise_finds_the_fastest() -> None:
    race, true = Race(8), [8, 7, 3, 5, 1, 6, 4, 2]
    while True:
        while race.queue:
            race.note(true[race.queue[0]])
        if race.end_round(list):
            break
    assert race.ranking()[:3] == [4, 7, 0]  # the first candidate stays to be compared with


def test_few_steps_are_measured_again() -> None:
    race, steps, is_over = Race(8), 0, False
    while not is_over:
        while race.queue:
            race.note(1.0 if steps % 3 else 100.0)
            steps += 1
        is_over = race.end_round(list)
    assert steps == STEPS - 1


def test_a_step_that_took_very_long_is_measured_again() -> None:
    race = Race(8)
    while len(race.queue) > 1:
        race.note(1.0)
    race.note(100.0)
    assert not race.end_round(list)
    assert race.queue == [7]
    race.note(0.5)
    assert not race.end_round(list)
    assert race.ranking()[0] == 7


class Trained:
    """A training of a model of several equal units.

    Args:
        slow: Seconds that this rank sleeps in each step.
    """

    def __init__(self, mode: str, slow: float = 0.0, **options: Any) -> None:
        torch._dynamo.reset()
        self.model: Any = fully_shard_model(parity.build(lambda: zoo.Plain(layers=4)), fsdp_unit_modules=[zoo.Block])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.call: Any = torch.compile(self.model, backend="mfsdp", options={"inner": mode, **options})
        self.slow, self.losses = slow, list[float]()

    def step(self, count: int = 1, rows: int = 3) -> None:
        for _ in range(count):
            x = torch.linspace(-1, 1, rows * 8).view(rows, 8) + dist.get_rank() + len(self.losses) / 10
            for half in (x, -x):  # microbatches
                loss = self.call(half)
                loss.backward()
            time.sleep(self.slow)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    @property
    def graphs(self) -> list[Any]:
        return self.model.sharded.compiled_graphs

    @property
    def told(self) -> Sequence[str]:
        """Lines of the report of tuning; none: it has not ended."""
        (record, *_) = self.graphs
        found = [report for report in record.reports.get(None, []) if report.name == "tune"]
        return found[0].lines if found else []


@pytest.mark.parametrize("mode", [AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.long)])
@on_ranks(2, timeout=300)
def test_bits_of_losses_stay(mode: str) -> None:
    """The file has the schedule that was found, and what was tried."""
    usual = Trained(mode)
    usual.step(STEPS + 2)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "found.txt"
    tuned = Trained(mode, slow=0.01 * dist.get_rank(), tune=str(path))
    tuned.step(STEPS - RETRIES - 1)
    assert not tuned.told
    assert not path.exists()
    tuned.step(RETRIES + 3)
    assert tuned.losses == usual.losses
    assert re.match(r"tuned the schedule in 2[89] steps|tuned the schedule in 30 steps", tuned.told[0])
    tried = [line for line in tuned.told if "shortest of" in line]
    assert 4 <= len(tried) <= tuning.MOST
    assert any("all stays" in line for line in tried)
    assert any("gathered again" in line for line in tried)
    dist.barrier()
    for line in tuned.told if dist.get_rank() == 0 else ():
        assert f"# {line}\n" in path.read_text()
    dist.barrier()
    followed = Trained(mode, schedule=str(path))
    followed.step(STEPS + 2)
    assert followed.losses == usual.losses
    (found,), (again,) = (run.model.sharded.compiled_graphs for run in (tuned, followed))
    assert ScheduleText.of(again.schedules) == ScheduleText.of(found.schedules)


@pytest.mark.long
@on_ranks(2, timeout=240)
def test_batches_of_other_shapes() -> None:
    """One rank compiles again while schedules are measured. All graphs of a model follow the same schedule."""
    runs = {}
    for options in ({}, {"tune": os.devnull}):
        with mock.patch.object(tuning.Tuning, "write"):
            run = runs[bool(options)] = Trained(AOT_EAGER, **options)
            run.step(4)
            for _ in range(STEPS):
                run.step(rows=5 if dist.get_rank() and len(run.losses) % 3 else 3)
            run.step(rows=7)  # compiled when the schedule is known
            run.step()
    found = Tuning.of(runs[True].model.sharded)
    assert found is not None
    assert found.chosen is not None
    assert runs[True].losses == runs[False].losses
    forwards = [graph._chosen.record.schedules[Phase.FORWARD] for graph in found.graphs]
    first, *others = (ScheduleText.of({Phase.FORWARD: lines}) for lines in forwards)
    assert all(other == first for other in others)


@pytest.mark.long
@on_ranks(2, timeout=240)
def test_schedules_that_one_rank_cannot_try() -> None:
    """No rank tries what does not fit in memory on one of them, or consists of other pieces there."""
    offers, compiles = tuning._offers, compile_module._compile_inner

    def offered(plan: Any, prediction: Any, grid: Sequence[Any]) -> list[Any]:
        found = offers(plan, prediction, grid)
        return [None if policy.prefetch == 3 else each for policy, each in zip(grid, found, strict=True)]

    def compiled(*given: Any) -> Any:
        if given[2].schedule.prefetch == 2:
            raise tuning.NeedsOtherPieces
        return compiles(*given)

    with mock.patch.object(tuning.Tuning, "write"), contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(tuning, "_offers", offered))
            stack.enter_context(mock.patch.object(compile_module, "_compile_inner", compiled))
        run = Trained(AOT_EAGER, tune=True)
        run.step(STEPS + 1)
    tried = [line for line in run.told if "shortest of" in line]
    assert len(tried) > 2
    assert not [line for line in tried if "prefetch 3" in line or "prefetch 2" in line]
    assert "more were not tried: they need other pieces" in run.told[-1]


@on_ranks(2, timeout=120)
def test_a_schedule_that_cannot_be_written() -> None:
    """Training goes on with it."""
    with (
        mock.patch.object(tuning, "write_text", side_effect=OSError("no space left")) as write,
        parity.first_rank_warns(UserWarning, "cannot be written to mfsdp_schedule.txt"),
    ):
        run = Trained(AOT_EAGER, tune=True)
        run.step(STEPS + 1)
    assert write.called == (dist.get_rank() == 0)
    assert run.told


@on_ranks(1, timeout=120)
def test_a_model_is_freed() -> None:
    with mock.patch.object(tuning.Tuning, "write"):
        run = Trained(AOT_EAGER, tune=True)
        run.step(3)
        alive = weakref.ref(run.model.sharded)
        del run
        torch._dynamo.reset()
        gc.collect()
        assert alive() is None


@pytest.mark.long
@on_ranks(2, timeout=240)
def test_what_is_tuned() -> None:
    """Evaluation, deterministic runs, and numbers that are given, are not."""

    def tried(**options: Any) -> set[str]:
        with mock.patch.object(tuning.Tuning, "write"):
            run = Trained(AOT_EAGER, tune=True, **options)
            with torch.no_grad():
                run.call(torch.ones(3, 8))
            assert len(run.model.sharded.compiled_graphs) == 1
            run.model.sharded.compiled_graphs.clear()
            run.step(STEPS + 1)
        return {line.partition(" s: ")[2] for line in run.told if "shortest of" in line}

    assert all("prefetch 3" in each for each in tried(prefetch=3))
    assert all("all stays" in each for each in tried(reshard_after_forward=False))
    assert "the solver's" in tried()
    assert "the solver's" in tried(memory_budget="1GiB")
    mfsdp_compile.deterministic()
    try:
        assert tried() == set()
    finally:
        mfsdp_compile.deterministic(False)


@on_ranks(2, timeout=120)
def test_what_cannot_be_tuned_is_refused() -> None:
    class Broken(zoo.Plain):
        def trunk(self, x: Any) -> Any:
            torch._dynamo.graph_break()
            return super().trunk(x)

    with pytest.raises(Exception, match="compiled again for each"):
        Trained("inductor_whole", tune=True).step()
    with pytest.raises(Exception, match="pass only one"):
        Trained(AOT_EAGER, tune=True, schedule=ScheduleText({})).step()
    with pytest.raises(Exception, match="the path of a file"):
        Trained(AOT_EAGER, tune=3).step()
    model: Any = fully_shard_model(parity.build(Broken), fsdp_unit_modules=[zoo.Block])
    call: Any = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, "tune": True})
    with parity.raises_everywhere(Exception, "this graph holds a part of the model"):
        call(torch.ones(3, 8))
    with pytest.raises(Exception, match="is a folder"):
        Trained(AOT_EAGER, tune="/").step()
    run = Trained(AOT_EAGER, tune=True)
    run.step(2)
    run.model.sharded.coordinator.captures = True
    with pytest.raises(RuntimeError, match=r"a step is being captured.*mfsdp_schedule\.txt"):
        run.step()
    run.model.sharded.coordinator.captures = False
    run.step()


@on_ranks(2, timeout=120)
def test_a_rank_that_stops_while_schedules_are_measured() -> None:
    """Others end with an error that names it."""
    run = Trained(AOT_EAGER, tune=True)
    run.step(3)
    if dist.get_rank() == 1:
        run.model.sharded.failed(ValueError("no more data"))
    else:
        with pytest.raises(Exception, match="no more data"):
            run.step(STEPS)
    run.model.reset()
