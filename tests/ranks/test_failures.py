"""One rank fails: others learn of it within the timeout, none computes with wrong values, and training continues."""

from __future__ import annotations

import signal
import time
import warnings
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import PATIENCE, SECONDS, Failing, short_mesh, values
from parity import AOT_EAGER, EAGER, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks.watchdog import watchdog


def everywhere(mine: float) -> list[float]:
    """Return the values of all ranks. Monotonic clocks are the same for all processes of a machine."""
    all_of_them = [0.0] * dist.get_world_size()
    dist.all_gather_object(all_of_them, mine)
    return all_of_them


def make(mode: str, **arguments: Any) -> tuple[Any, Any, Any]:
    Failing.where = -1
    model = fully_shard_model(parity.build(Failing), short_mesh(), fsdp_unit_modules=[zoo.Block], **arguments)
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    return model, call, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def step(call: Any, optimizer: Any, batch: Tensor) -> None:
    call(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_trained_by(model: nn.Module, batches: list[Tensor], mode: str, **arguments: Any) -> None:
    """Assert that a model trained on these batches, without a failure, has the same weights bit for bit."""
    untouched, call, optimizer = make(mode, **arguments)
    for batch in batches:
        step(call, optimizer, batch)
    assert all(torch.equal(a, b) for a, b in zip(values(untouched), values(model), strict=True))


@pytest.mark.long_unless("*-0")
@pytest.mark.parametrize(
    ("mode", "strategy", "where"),
    [
        (EAGER, "optim_grads_params", 0),
        (EAGER, "optim_grads_params", 3),
        (EAGER, "optim", 1),
        (AOT_EAGER, "optim_grads_params", 1),
        (AOT_EAGER, "optim", 3),
    ],
)
@on_ranks(2, timeout=90)
def test_one_ranks_forward_raises(mode: str, strategy: str, where: int) -> None:
    data = parity.batches(4)[:, dist.get_rank()]
    model, call, optimizer = make(mode, zero_dp_strategy=strategy)
    step(call, optimizer, data[0])
    before = values(model)
    Failing.where = where if dist.get_rank() == 1 else -1
    begun = time.monotonic()
    try:
        step(call, optimizer, data[1])
    except (RuntimeError, ValueError) as error:
        assert isinstance(error, ValueError) == (dist.get_rank() == 1)
    else:
        raise AssertionError("no error")
    ended = everywhere(time.monotonic())
    if mode == EAGER:
        assert ended[1] < ended[0]  # it does not wait for other ranks
    assert ended[dist.get_rank()] - begun < PATIENCE
    Failing.where = -1
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    model.reset()
    step(call, optimizer, data[2])
    step(call, optimizer, data[3])

    assert_trained_by(model, [data[i] for i in (0, 2, 3)], mode, zero_dp_strategy=strategy)


@on_ranks(2, timeout=60)
def test_ranks_abort_communicators_of_nccl_together() -> None:
    """As far as it can be seen on gloo: the first waits for the second. An error of NCCL's is explained.

    On GPUs, tests/gpu/across_ranks.py aborts them.
    """
    data = parity.batches(1)[:, dist.get_rank()]
    model, call, optimizer = make(EAGER)
    step(call, optimizer, data[0])
    sharded = model.sharded
    order = sharded.coordinator.order
    dist.barrier()
    begun = time.monotonic()
    nccl = mock.patch.object(compat, "nccl_options", return_value=object())
    with nccl, mock.patch.object(order, "device_type", "cuda"):
        if dist.get_rank() == 1:
            time.sleep(1.0)
        watchdog._meet_before_abort(order)
        assert 0.9 < time.monotonic() - begun < 5
        order.stall("Rank 1 did something else.")
    with raises_everywhere(RuntimeError, "wait forever", "Rank 1 did something else.", "from a checkpoint"):
        sharded.failed(RuntimeError("NCCL communicator was aborted on rank 0."))
    sharded.failed(RuntimeError("something else"))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        model.reset()
    assert any("load weights" in str(each.message) for each in given) == (dist.get_rank() == 0)
    assert "last optimizer step" in str(sharded.coordinator.order.standstill())  # of the new group
    step(call, optimizer, data[0])


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_the_step_after_is_refused_without_a_reset(mode: str) -> None:
    data = parity.batches(2)[:, dist.get_rank()]
    model, call, optimizer = make(mode)
    step(call, optimizer, data[0])
    Failing.where = 1 if dist.get_rank() == 1 else -1
    with raises_everywhere((RuntimeError, ValueError)):  # type: ignore[arg-type]
        step(call, optimizer, data[1])
    Failing.where = -1
    with raises_everywhere(RuntimeError, "model.reset()", "stopped after", "ValueError"):
        step(call, optimizer, data[1])
    model.reset()
    step(call, optimizer, data[1])


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_what_fails_alike_on_all_ranks_needs_no_reset(mode: str) -> None:
    data = parity.batches(3)[:, dist.get_rank()]
    model, call, optimizer = make(mode)
    step(call, optimizer, data[0])
    for where in (0, 2, 3):
        Failing.where = where
        with raises_everywhere(ValueError, "a bad batch"):
            step(call, optimizer, data[1])
        Failing.where = -1
        step(call, optimizer, data[1])
    if mode == EAGER:
        hook = model.module.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
        with raises_everywhere(ZeroDivisionError):
            step(call, optimizer, data[2])
        hook.remove()
        optimizer.zero_grad()
        step(call, optimizer, data[2])


@on_ranks(2, timeout=60)
def test_gradients_of_a_backward_that_failed_do_not_wait() -> None:
    """A backward of nothing but the input counts as no microbatch, also after one that failed halfway."""
    data = parity.batches(2)[:, dist.get_rank()]
    model, call, _ = make(EAGER)
    hook = model.module.blocks[1].register_full_backward_hook(lambda *_: 1 / 0)
    with raises_everywhere(ZeroDivisionError):
        call(data[0]).backward()
    hook.remove()
    model.zero_grad()
    batch = data[1].clone().requires_grad_()
    with model.no_sync():
        torch.autograd.grad(call(batch), batch)
    assert model.sharded.grad_sync.microbatches == 0


@on_ranks(2, timeout=60)
def test_the_others_are_told_why() -> None:
    data = parity.batches(2)[:, dist.get_rank()]
    model, call, optimizer = make(EAGER)
    step(call, optimizer, data[0])
    Failing.where = 0 if dist.get_rank() == 1 else -1
    try:
        step(call, optimizer, data[1])
    except ValueError:
        assert dist.get_rank() == 1
    except RuntimeError as error:
        assert "rank 1 had failed with ValueError: a bad batch" in "".join(getattr(error, "__notes__", []))
    model.reset()


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4, timeout=90)
def test_reset_with_two_dimensions(mode: str) -> None:
    """A reset in the middle of accumulation drops deferred gradients, and the next step is complete."""
    data = parity.batches(3)[:, dist.get_rank()]
    for strategy in ("HSDP optim_grads", "HFSDP"):
        trained = []
        for resets in (True, False):
            model = fully_shard_model(parity.build(Failing), fsdp_unit_modules=[zoo.Block], **mesh_arguments(strategy))
            call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
            step(call, optimizer, data[0])
            if resets:
                with model.no_sync():
                    call(data[1]).backward()
                model.reset()
            step(call, optimizer, data[2])
            sums = [param.sum() for param in model.parameters()]  # over new groups
            trained.append([*values(model), *sums])
        assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@pytest.mark.long
@on_ranks(2, timeout=60)
def test_a_reset_that_a_rank_does_not_take_part_in() -> None:
    model, _, _ = make(EAGER)
    if dist.get_rank() == 0:
        with raises_everywhere(RuntimeError, "model.reset()", "rank 1 did not arrive"):
            model.reset()
    else:
        time.sleep(SECONDS * 4 + 1)
    dist.barrier()


@pytest.mark.long_unless("*-eager-*")
@pytest.mark.parametrize("where", [0.5, *(pytest.param(i / 20, marks=pytest.mark.long) for i in range(20))])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=90)
def test_a_keyboard_interrupt_anywhere_in_a_step(mode: str, where: float) -> None:
    """After a keyboard interrupt on one rank, at any fraction of forward and backward, training continues correctly."""
    data = parity.batches(4)[:, dist.get_rank()]
    model, call, optimizer = make(mode)
    step(call, optimizer, data[0])
    begun = time.monotonic()
    call(data[1]).backward()
    duration = time.monotonic() - begun
    optimizer.step()
    optimizer.zero_grad()
    before = [*values(model), *(t.clone() for state in optimizer.state.values() for t in state.values())]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    begun = time.monotonic()
    try:
        if dist.get_rank() == 1:
            signal.setitimer(signal.ITIMER_REAL, max(where * duration, 1e-4))
        call(data[2]).backward()
        if dist.get_rank() == 1:
            time.sleep(SECONDS)  # this step was faster than the measured one
    except (RuntimeError, KeyboardInterrupt) as error:
        assert dist.get_rank() == 1 or isinstance(error, RuntimeError)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert time.monotonic() - begun < PATIENCE
    model.reset()
    after = [*values(model), *(t for state in optimizer.state.values() for t in state.values())]
    for a, b in zip(before, after, strict=True):
        a, b = (t.to_local() if hasattr(t, "to_local") else t for t in (a, b))
        assert torch.equal(a, b)
    step(call, optimizer, data[3])

    assert_trained_by(model, [data[i] for i in (0, 1, 3)], mode)


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=90)
def test_a_rank_that_sleeps_and_a_reset(mode: str) -> None:
    """If a rank sleeps longer than the timeout in forward, both ranks raise, and both continue after a reset."""
    data = parity.batches(3)[:, dist.get_rank()]
    model, call, optimizer = make(mode)
    step(call, optimizer, data[0])
    before = values(model)
    hook = None
    if dist.get_rank() == 1:
        if mode == EAGER:
            hook = model.module.blocks[1].register_forward_pre_hook(lambda *_: time.sleep(1.7 * SECONDS))
        else:
            time.sleep(1.7 * SECONDS)
    with raises_everywhere(RuntimeError):
        step(call, optimizer, data[1])
    if hook is not None:
        hook.remove()
    model.reset()
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    step(call, optimizer, data[2])
    assert_trained_by(model, [data[i] for i in (0, 2)], mode)


@on_ranks(2, timeout=120)
def test_what_is_announced_after_a_reset_names_the_new_groups() -> None:
    """The journal and traces count collectives by the names of process groups."""
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    for _ in range(2):
        model(parity.batches(1)[0, dist.get_rank()]).backward()
        model.zero_grad()
        names = model.sharded.topology.group_names
        announced = model.sharded.eager.step._announced.values()
        assert {name for each in announced for _, name in each.launches()} <= {*names}
        model.reset()
