"""Solved schedules on ranks whose batches or machines differ: one schedule, found together, or one error on all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import values
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_compile
from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.passes.guests.solver import across_ranks
from mfsdp_compile.passes.guests.solver.reasons import BudgetError
from mfsdp_compile.planning import forecast
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.decisions import Decisions, gather_by_policy
from mfsdp_compile.runtime.schedule.phase import Phase

WIDTH = 64
SECONDS = 15.0
"""Timeout of process groups in which a rank misses others.

Longer than the difference between ranks' compilation times.
"""
AUTO = {"prefetch": "auto", "reshard_after_forward": "auto"}


class Wide(nn.Module):
    """Gathers of a unit take longer than the computation of a short batch, and not as long as that of a long one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block(WIDTH, 2 * WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean()


def own_group(seconds: float = 120.0) -> DeviceMesh:
    """Return a mesh over a new group, for which nothing has been agreed on by other tests."""
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=seconds)), "cpu", mesh_dim_names=("dp",))


def build(mesh: DeviceMesh | None = None, **arguments: Any) -> Any:
    if "device_mesh" not in arguments:
        arguments["device_mesh"] = mesh or own_group()
    return fully_shard_model(parity.build(Wide), fsdp_unit_modules=[zoo.Block], **arguments)


def compiled(model: Any, inner: str = AOT_EAGER, dynamic: bool | None = None, **options: Any) -> Any:
    if "memory_budget" in options:  # schedules alone keep it
        options = {"activation_memory_budget": 1.0, **options}
    return torch.compile(model, backend="mfsdp", dynamic=dynamic, options={"inner": inner, **options})


def batch(length: int, step: int = 0) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def mine(lengths: Sequence[int]) -> int:
    """Return this rank's entry of a table by rank. A shorter table repeats."""
    return lengths[dist.get_rank() % len(lengths)]


def train(model: Any, call: Any, lengths: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return losses, and this rank's shards after the last step."""
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step, of_ranks in enumerate(lengths):
        loss = call(batch(mine(of_ranks), step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *values(model)]


def watch(model: Any) -> list[tuple[str, Any]]:
    """Return a list that collects the topics of meetings from now on, each with this rank's offer."""
    met: list[tuple[str, Any]] = []
    real = model.sharded.coordinator.conclude

    def watched(topic: str, lines: Any, offer: Any, *args: Any, **kwargs: Any) -> Any:
        met.append((topic, offer))
        return real(topic, lines, offer, *args, **kwargs)

    model.sharded.coordinator.conclude = watched
    return met


def offers_differ(met: Sequence[tuple[str, Any]]) -> bool:
    """Whether ranks would have diverged. Collective."""
    own = across_ranks.effect(met[0][1]["decisions"])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return len(set(everyone)) > 1


def refused(step: Callable[[], Any]) -> BaseException:
    """Return the error that a step raises on this rank. Dynamo wraps errors of compilation."""
    try:
        step()
    except compat.BackendCompilerFailed as error:
        return error.inner_exception
    except (RuntimeError, ValueError) as error:
        return error
    raise AssertionError("no error")


def least(length: int) -> int:
    """Return the bytes that the smallest schedule takes for batches of a length. Collective."""
    model = build()
    error = refused(lambda: compiled(model, memory_budget=1)(batch(length)))
    assert isinstance(error, BudgetError), error
    torch._dynamo.reset()  # otherwise Dynamo would know that lengths change
    return error.needed


def budget_for(length: int, more: int = 150_000) -> int:
    """Return a budget that batches of a length can keep, but that cannot keep all buckets; ``more`` is in bytes.

    A bucket takes 67 KB.
    """
    return int((least(length) + more) / 0.99) + 1  # budget_reserve


LENGTHS = [(3, 2000, 900, 40), (500, 7), (2000, 2, 17), (4, 5), (1999, 2000)]
"""Lengths by step and rank. One of the longest is in the first step."""


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("inner", "bounded"),
    [
        (AOT_EAGER, True),
        (AOT_EAGER, False),
        pytest.param(INDUCTOR, True, marks=pytest.mark.slow),
        pytest.param(INDUCTOR, False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2, 4, timeout=400)
def test_lengths_of_every_rank_change_from_step_to_step(inner: str, bounded: bool) -> None:
    options = {"memory_budget": budget_for(2000)} if bounded else AUTO
    model = build()
    met = watch(model)
    found = train(model, compiled(model, inner, **options), LENGTHS)
    assert offers_differ(met), "ranks would agree by themselves"
    assert [topic for topic, _ in met] == ["Schedule", "Schedule, for batches of all ranks"]
    records = model.sharded.compiled_graphs
    assert len({str(record.producer.settled) for record in records}) == 1
    assert len(records) > 1
    eager = build()
    expected = train(eager, eager, LENGTHS)
    for mine_, its in zip(found, expected, strict=True):
        if inner == AOT_EAGER:
            assert torch.equal(mine_, its)
        else:  # fused kernels sum in a different order
            torch.testing.assert_close(mine_, its, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@on_ranks(4, timeout=400)
def test_hybrid_sharding_and_evaluation_in_between() -> None:
    def run(mode: str) -> list[Tensor]:
        model = build(**mesh_arguments("HSDP optim_grads_params"))
        call = model if mode == EAGER else compiled(model, **AUTO)
        met = watch(model)
        found = []
        for step, lengths in enumerate([(3, 900), (700, 4), (5, 6)]):
            with torch.no_grad():
                found.append(call(batch(mine(lengths[::-1]), step)))
            loss = call(batch(mine(lengths), step))
            loss.backward()
            found.append(loss.detach())
        found += [param.grad.to_local() for param in model.parameters()]
        if mode != EAGER:
            assert offers_differ(met[2:])
            graphs = [set(record.schedules) for record in model.sharded.compiled_graphs]
            assert {Phase.INFERENCE} in graphs
            assert {Phase.FORWARD, Phase.BACKWARD} in graphs
            assert len(met) == 4, "one meeting for training, one for evaluation, of two rounds each"
        return found

    assert all(torch.equal(a, b) for a, b in zip(run(AOT_EAGER), run(EAGER), strict=True))


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_two_models_that_share_code() -> None:
    """If one rank compiles for the second model and the other finds code of the first, neither waits for the other."""
    mesh = own_group()
    first, second = build(mesh), build(mesh)
    met = [watch(first), watch(second)]
    found = [
        train(first, compiled(first, **AUTO), [(3, 1000)]),
        train(second, compiled(second, **AUTO), [(3, 5), (800, 3)]),
        train(first, compiled(first, **AUTO), [(3, 7)]),
    ]
    assert offers_differ(met[0])
    assert (len(met[0]), len(met[1])) == (2, 0)
    eager = [build(mesh), build(mesh)]
    expected = [
        train(eager[0], eager[0], [(3, 1000)]),
        train(eager[1], eager[1], [(3, 5), (800, 3)]),
        train(eager[0], eager[0], [(3, 7)]),
    ]
    for a, b in zip(found, expected, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_one_rank_forgets_its_code() -> None:
    model = build()
    met = watch(model)
    call = compiled(model, **AUTO)
    train(model, call, [(3, 1000)])
    if dist.get_rank() == 1:
        torch.compiler.reset()
    train(model, call, [(3, 1000), (20, 1000)])
    assert len(met) == 2


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_parameters_that_are_whole_are_no_reason_to_meet() -> None:
    """A rank can evaluate alone if parameters are whole, because nothing in it depends on other ranks."""
    model = build(zero_dp_strategy="no_shard")
    call = compiled(model, **AUTO)
    met = watch(model)
    train(model, call, [(3, 1000)])
    assert len(met) == 2, "there are reductions"
    if dist.get_rank() == 1:
        with torch.no_grad():
            call(batch(50))
    train(model, call, [(3, 1000)])
    assert len(met) == 2


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_machines_of_two_kinds() -> None:
    """If predictions differ by device, ranks agree on one schedule, and every report says whose figures were used."""
    from mfsdp_compile.backend import predictions

    real = predictions.default_hardware
    if dist.get_rank() == 1:
        predictions.default_hardware = lambda device: "h100-ib"
    try:
        model = build()
        call = compiled(model, report=True, **AUTO)
        train(model, call, [(3, 1000)])
        record = model.sharded.compiled_graphs[0]
        settled = record.producer.settled
        told = str(settled)
        assert told in str(mfsdp_compile.explain(call, batch(mine((3, 1000)))))
        train(model, call, [(3, 1000)])
        assert told in mfsdp_compile.report.to_text(forecast.report(model), width=400)
    finally:
        predictions.default_hardware = real
    assert f"decided by rank {settled.rank} for a batch of float32[" in told
    assert told.endswith(f"with times of {('cpu', 'h100-ib')[settled.rank]}")


# -- budgets that cannot be kept --------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(2, 4, timeout=300)
def test_a_batch_that_no_schedule_fits() -> None:
    """All ranks raise as soon as the last one has compiled, and continue with shorter batches."""
    budget = budget_for(500)
    model = build()
    call = compiled(model, memory_budget=budget)
    last = dist.get_world_size() - 1
    before = values(model)
    begun = time.monotonic()
    error = refused(lambda: call(batch(2000 if dist.get_rank() == last else 3)))
    assert isinstance(error, BudgetError)
    assert f"Rank {last}, with a batch of float32[2000, 64]: memory_budget of" in str(error)
    assert "What would help: " in str(error)
    assert time.monotonic() - begun < 110, "nobody waits for a timeout, which is 120 s"
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    train(model, call, [(3, 500), (500, 3)])


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_one_rank_outgrows_what_was_agreed_on() -> None:
    """If one rank needs another schedule and the others do not compile, all ranks raise."""
    budget = budget_for(1000)
    model = build(own_group(SECONDS))
    call = compiled(model, dynamic=False, memory_budget=budget)  # symbolic sizes are saved differently
    train(model, call, [(100, 120)])
    before = values(model)
    begun = time.monotonic()
    error = refused(lambda: call(batch(mine((100, 1000)), 1)).backward())
    assert time.monotonic() - begun < 3 * SECONDS
    if dist.get_rank() == 1:
        assert isinstance(error, BudgetError), error
        assert "with a batch of float32[1000, 64], rank 1 has" in str(error)
        assert "decided by rank" in str(error)
    else:
        told = " ".join([str(error), *getattr(error, "__notes__", [])])
        assert "ank 1 had failed with BudgetError: The memory budget cannot be kept" in told
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    model.reset()
    found = train(model, call, [(100, 1000)])
    eager = build()
    train(eager, eager, [(100, 120)])
    assert all(torch.equal(a, b) for a, b in zip(found, train(eager, eager, [(100, 1000)]), strict=True))


@pytest.mark.long
@on_ranks(2, timeout=400)
def test_all_ranks_outgrow_what_was_agreed_on() -> None:
    """If all ranks need another schedule, they agree on one and none runs code of the old one.

    Old code would still work for the lengths that it was compiled for, but not while others run the new code.
    """
    budget = budget_for(1000)
    model = build()
    met = watch(model)
    call = compiled(model, dynamic=False, memory_budget=budget)
    lengths = [(100, 120), (999, 1000), (100, 1000), (999, 120), (100, 120)]
    found = train(model, call, lengths)
    topics = ["Schedule", "Another schedule"]
    assert [topic for topic, _ in met] == [t for topic in topics for t in (topic, f"{topic}, for batches of all ranks")]
    assert across_ranks.effect(met[0][1]["decisions"]) != across_ranks.effect(met[2][1]["decisions"])
    eager = build()
    assert all(torch.equal(a, b) for a, b in zip(found, train(eager, eager, lengths), strict=True))


@on_ranks(2, timeout=120)
def test_a_store_that_is_gone() -> None:
    """If the process that serves the store has ended, a step raises an error that says so."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    model = build()
    del server
    real, compat.default_store = compat.default_store, lambda: client
    try:
        error = refused(lambda: compiled(model, **AUTO)(batch(3)))
    finally:
        compat.default_store = real
    assert "Schedule: the store through which ranks agree cannot be reached" in str(error)
    assert "rank 0 or its launcher" in str(error)


# -- compile caches ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2, timeout=500)
def test_caches_know_what_was_agreed_on(tmp_path: Path) -> None:
    """A second start finds its code if ranks agree on the same schedule, and compiles again if not."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._dynamo.utils import counters

    mesh = own_group()  # graphs contain the names of groups
    keys: list[str] = []

    def start(decisions: Decisions | None = None) -> tuple[int, int, dict[str, list[str]]]:
        """Start a process that knows only ``decisions``.

        Returns graphs found in the cache, graphs compiled, and schedules.
        """
        torch._dynamo.reset()
        counters.clear()
        model = build(mesh)
        known = model.sharded.schedules
        for key in keys:
            settled = known.pop(key)
            if decisions is not None:
                known[key] = replace(settled, decisions=decisions)
        call = compiled(model, "inductor_whole", **AUTO)  # pieces do not depend on the schedule
        call(batch(mine((3, 1000)))).backward()
        with torch.no_grad():
            call(batch(mine((3, 1000))))
        keys[:] = list(known)
        assert counters["aot_autograd"]["autograd_cache_hit"] == 0
        schedules = dict(model.sharded.coordinator.begun_graphs)
        return counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"], schedules

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / f"rank{dist.get_rank()}")
    try:
        with functorch_config.patch(enable_autograd_cache=True), inductor_config.patch(fx_graph_cache=True):
            hits, misses, first = start()
            assert (hits, misses) == (0, 3), "forward, backward, evaluation"
            hits, misses, again = start()
            assert (hits, misses) == (3, 0)
            assert again == first
            policy = mfsdp_compile.runtime.schedule.policy.SchedulePolicy(prefetch=0)
            late = {number: gather_by_policy(policy, 1) for number in range(5)}
            other = Decisions(gathers=dict.fromkeys((Phase.FORWARD, Phase.BACKWARD, Phase.INFERENCE), late))
            hits, misses, others = start(other)
            assert (hits, misses) == (0, 3)
            assert all(others[phase] != first[phase] for phase in first)
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
