"""Ranks that would wait for each other until the timeout of half an hour get an error within seconds."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from test_order import Branches
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile import fsdp2, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.passes.context import Context
from mfsdp_compile.runtime.ranks import watchdog
from mfsdp_compile.runtime.schedule.phase import Phase

SECONDS = 30.0
"""Time within which every rank must have its error. It takes about three seconds."""


def mesh() -> DeviceMesh:
    """Return a mesh of all ranks, with a timeout that no test can wait for."""
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=30)), "cpu", mesh_dim_names=("dp",))


@contextlib.contextmanager
def looking_often() -> Iterator[None]:
    """Context in which the watchdog looks twenty times a second, so that a test which expects nothing is short."""
    before = watchdog.TICK, watchdog.LONGEST
    watchdog.TICK, watchdog.LONGEST = 0.05, 0.1
    try:
        yield
    finally:
        watchdog.TICK, watchdog.LONGEST = before


class Training:
    """A model, and steps that are the same on all ranks."""

    def __init__(self, mode: str = EAGER, **arguments: Any) -> None:
        self.mode, self.arguments = mode, arguments
        self.mesh = mesh()
        self.model: Any = fully_shard_model(
            parity.build(lambda: Branches(2)), self.mesh, fsdp_unit_modules=[zoo.Block], **arguments
        )
        self.call: Any = self.model
        if mode != EAGER:
            self.call = torch.compile(self.model, backend="mfsdp", options={"inner": mode})
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.x = torch.ones(2, 8)

    def step(self, count: int = 1, **way: Any) -> None:
        for _ in range(count):
            self.call(self.x, **way).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.call(self.x)

    def values(self) -> list[torch.Tensor]:
        return [param.to_local().clone() for param in self.model.parameters()]

    def stalls(self, program: Callable[[], None], *fragments: str, unexplained: tuple[int, ...] = ()) -> None:
        """Assert that ``program`` raises on all ranks soon, and that a reset makes the model usable again.

        Args:
            unexplained: Ranks whose error is torch's own, raised by a collective of the program.
        """
        before, begun, message = self.values(), time.monotonic(), "nothing"
        try:
            program()
        except RuntimeError as error:
            message = str(error)
        took = time.monotonic() - begun
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (took, message))
        for rank, (its, text) in enumerate(everyone):
            assert its < SECONDS, everyone
            assert text != "nothing", everyone
            for fragment in (*fragments, "test_stalls.py:", "model.reset()") if rank not in unexplained else ():
                assert fragment in text, f"{fragment!r} is not in {everyone}"
        assert all(torch.equal(a, b) for a, b in zip(before, self.values(), strict=True))
        self.model.reset()
        works(self.mesh.get_group())
        self.step()
        after = self.values()
        fresh = Training(**self.arguments)  # eager, with the same numbers
        with torch.no_grad():
            for param, value in zip(fresh.model.parameters(), before, strict=True):
                param.to_local().copy_(value)
        fresh.step()
        for mine, expected in zip(after, fresh.values(), strict=True):
            if self.mode == INDUCTOR:  # which rounds at other places
                torch.testing.assert_close(mine, expected)
            else:
                assert torch.equal(mine, expected)


def works(group: dist.ProcessGroup) -> None:
    """Assert that a process group of the program can be used."""
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == dist.get_world_size(group)
    dist.barrier(group)


RANK = "Rank 0"


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_one_rank_evaluates(mode: str) -> None:
    training = Training(mode)
    training.step(3)

    def program() -> None:
        if dist.get_rank() == 0:
            training.evaluate()
        training.step()

    training.stalls(
        program, RANK, "forward without gradients", "(Branches)", "after 3 optimizer steps", "in its 4th optimizer step"
    )
    training = Training(mode)
    training.step(2)
    training.evaluate()
    training.step(3)
    training.stalls(program, RANK, "forward without gradients")


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@on_ranks(2, timeout=120)
def test_one_rank_leaves_out_its_backward(mode: str) -> None:
    """If one rank skips its backward (``if loss.isnan(): continue``), the other gets an error in its own backward."""
    training = Training(mode)
    training.step(3)

    def program() -> None:
        for step in range(2):
            loss = training.call(training.x)
            if (dist.get_rank(), step) == (1, 0):
                continue
            loss.backward()

    training.stalls(program, "Rank 1 has reached a forward with gradients", "rank 0", "of Branches,")


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@on_ranks(2, timeout=120)
def test_one_rank_takes_another_branch(mode: str) -> None:
    training = Training(mode)
    training.step(3)
    skipped = "blocks." if mode == EAGER else "compiled code"

    def program() -> None:
        training.step(without=(0,) if dist.get_rank() == 1 else ())

    training.stalls(program, "Rank 1 has reached", "rank 0", skipped)


@on_ranks(2, timeout=120)
def test_one_rank_uses_parameters_at_rest() -> None:
    training = Training()
    param = next(training.model.parameters())
    training.step(3)

    def norm() -> None:
        if dist.get_rank() == 0:
            param.norm()
        training.step()

    training.stalls(norm, "Rank 0 has reached a norm", "enter.weight")
    for known in range(2):
        training = Training()
        param = next(training.model.parameters())
        training.step(2)
        for _ in range(known):
            param.full_tensor()
        training.step(2)

        def whole(param: Any = param, training: Training = training) -> None:
            if dist.get_rank() == 1:
                param.full_tensor()
            training.step()

        training.stalls(whole, "Rank 1 has reached full_tensor() of", "enter.weight")


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_one_rank_falls_back_from_the_compiler() -> None:
    """If one rank runs a compiled model eagerly, all ranks raise."""
    training = Training(AOT_EAGER)
    training.step(3)

    def program() -> None:
        (training.model if dist.get_rank() == 1 else training.call)(training.x).backward()

    training.stalls(program, "Rank 1 has reached a forward with gradients of the model", "rank 0")


@on_ranks(2, timeout=120)
def test_one_rank_runs_another_batch() -> None:
    training = Training()
    training.evaluate()
    training.step(3)

    def program() -> None:
        if dist.get_rank() == 1:
            training.step()
        training.evaluate()

    training.stalls(program, "Rank 0 has reached a forward without gradients", "rank 1")


@on_ranks(2, timeout=120)
def test_the_others_wait_for_one_that_evaluates() -> None:
    """If one rank evaluates (``if rank == 0: evaluate()``) while others wait in a barrier, all ranks raise.

    The barrier is in the default process group or in that of the model.
    """
    for group in (None, "model"):
        training = Training()
        training.step(2)
        over = training.model.sharded.group if group else dist.new_group(timeout=timedelta(minutes=30))

        def program(over: Any = over, training: Training = training) -> None:
            if dist.get_rank() == 0:
                training.evaluate()
            dist.barrier(over)

        training.stalls(program, "Rank 0 has reached a forward without gradients", unexplained=(1,))
        works(over)


@on_ranks(2, timeout=120)
def test_the_default_group_works_after_a_reset() -> None:
    """So do everything that communicates over it, and a second model; and so they do after another failure."""
    both = [fully_shard_model(parity.build(lambda: Branches(2)), fsdp_unit_modules=[zoo.Block]) for _ in range(2)]
    model, x, own = both[0], torch.ones(2, 8), dist.new_group(timeout=timedelta(minutes=30))

    def diverge() -> None:
        if dist.get_rank() == 0:
            model(x, without=(0,)).backward()
        for _ in range(2):
            model(x).backward()

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"model\.reset\(\)"):
            diverge()
        for each in both:
            each.reset()
        for group in (dist.group.WORLD, own, model.dist_index.get_dp_group()):
            works(group)
        names = [None, None]
        dist.all_gather_object(names, dist.group.WORLD.group_name)
        assert names == [dist.group.WORLD.group_name] * 2
        third = fully_shard_model(parity.build(lambda: Branches(2)), fsdp_unit_modules=[zoo.Block])
        for each in (*both, third):
            each(x).backward()
            assert next(each.parameters()).full_tensor().shape == (8, 8)
            each.zero_grad()
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        Checkpoints(folder[0]).save(1, model)


@pytest.mark.long
@on_ranks(4, timeout=120)
def test_two_of_four_ranks() -> None:
    for ways in ({1: (0,), 3: (0,)}, {1: (0,), 3: (1,)}):
        training = Training()
        training.step(3)

        def program(ways: Any = ways, training: Training = training) -> None:
            training.step(without=ways.get(dist.get_rank(), ()))

        training.stalls(program, "Rank ", "blocks.")


@on_ranks(2, timeout=120)
def test_one_rank_fails() -> None:
    """If one rank fails, the others get its error without waiting for a timeout."""
    training = Training()
    training.step(2)

    def program() -> None:
        handle = None
        if dist.get_rank() == 1:

            def fail(*_: Any) -> None:
                raise RuntimeError("a bad batch (test_stalls.py: model.reset())")

            handle = training.model.module.blocks[1].register_forward_pre_hook(fail)
        try:
            training.step()
        finally:
            if handle is not None:
                handle.remove()

    training.stalls(program, "a bad batch")


@on_ranks(2, timeout=60)
def test_a_program_that_handles_a_failure() -> None:
    """Its own collectives over the model's process group are not mistaken for waits for the rank that has failed.

    Nor are its agreements with a rank that failed alike, and is late.
    """
    training = Training()
    training.step(2)
    group = training.mesh.get_group()

    def fail(ranks: set[int]) -> None:
        def hook(*_: Any) -> None:
            if dist.get_rank() in ranks:
                raise ValueError("after the last gather")

        handle = training.model.module.head.register_forward_hook(hook)
        with pytest.raises(ValueError, match="last gather") if dist.get_rank() in ranks else contextlib.nullcontext():
            training.evaluate()
        handle.remove()

    with looking_often():
        fail({1})
        for _ in range(20):  # two seconds: it took less to close the group
            works(group)
            time.sleep(0.1)
        training.model.reset()
        training.step()
        fail({0, 1})
        works(group)
        if dist.get_rank() == 1:
            time.sleep(1.5)
        training.step()


@on_ranks(2, timeout=60)
def test_a_restart_of_dynamos_is_no_failure() -> None:
    """Others wait for a rank whose compilation Dynamo begins again, which a pass has asked for."""
    restarts: list[Phase] = []

    def restart(graph: fx.Graph, context: Context, phase: Phase) -> None:
        if dist.get_rank() == 1 and not restarts:
            restarts.append(phase)
            raise TensorifyScalarRestartAnalysis(restart_reason="once")
        if dist.get_rank() == 1:
            time.sleep(1)

    training = Training()
    training.call = torch.compile(training.model, backend="mfsdp", options={"inner": AOT_EAGER, "passes": [restart]})
    with looking_often():
        training.step(2)
    assert len(restarts) == dist.get_rank()
    assert len(training.model.sharded.compiled_graphs) == 1


@on_ranks(2, timeout=60)
def test_a_rank_rests_without_its_model() -> None:
    """It waits in a collective of the program after its model was deleted, and another one takes a step more."""
    training = Training()
    training.step(3)
    begun = time.monotonic()
    if dist.get_rank() == 1:
        group = training.mesh.get_group()
        del training
        gc.collect()
        with pytest.raises(RuntimeError):
            dist.barrier(group)
    else:
        with pytest.raises(RuntimeError, match="Rank 1 waits after 3 optimizer steps in a collective of the program"):
            training.step()
    assert time.monotonic() < begun + SECONDS


@on_ranks(2, timeout=60)
def test_nobody_waits_after_an_error_that_calls_for_a_reset() -> None:
    """A program that goes on without it gets the same error again at once; FSDP2's face has a reset, too."""
    model = parity.build(lambda: Branches(2))
    ranks = mesh()
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=ranks)
    fsdp2.fully_shard(model, mesh=ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    model(x).backward()
    begun = time.monotonic()

    def diverge() -> None:
        if dist.get_rank() == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
        step()

    with pytest.raises(RuntimeError, match=r"reset_iter_state\(\)"):
        diverge()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"reset_iter_state\(\)"):
            step()
    assert time.monotonic() < begun + SECONDS
    model.reset_iter_state()
    optimizer.zero_grad()
    step()
    works(dist.group.WORLD)
