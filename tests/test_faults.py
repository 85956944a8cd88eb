"""Faults of one rank: an error on all ranks within seconds, with a process group that would wait for half an hour; and whose it is."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from test_stalls import SECONDS, Training
from torch import Tensor

from mfsdp_compile import fully_shard_optimizer

CULPRIT = 1


@contextlib.contextmanager
def expected(*fragments: str) -> Iterator[None]:
    """All ranks have an error, soon; that of those that are not to blame has ``fragments``."""
    begun, message = time.monotonic(), ""
    try:
        yield
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (took, message))
    for rank, (its, text) in enumerate(everyone):
        assert its < SECONDS, everyone
        assert text, everyone
        for fragment in fragments if rank != CULPRIT else ():
            assert fragment in text, f"{fragment!r} is not in {everyone}"


def only_on_culprit(error: BaseException) -> None:
    if dist.get_rank() == CULPRIT:
        raise error


def finds_steps_that_differ(model: Any) -> None:
    """A reset says that rows are of different weights."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.reset()
    assert any("rows are of different weights" in str(w.message) for w in found), [str(w.message) for w in found]


def goes_on(training: Training) -> None:
    training.model.reset()
    training.step(2)


@pytest.mark.parametrize("error", [ValueError("no such node"), KeyboardInterrupt("ctrl-c"), MemoryError("no memory")])
@on_ranks(2, timeout=90)
def test_compiling_fails(error: BaseException) -> None:
    """In a pass of the user's, or by an interrupt."""
    fails = [True]

    def a_pass(*_: Any) -> None:
        if fails[0]:
            only_on_culprit(error)

    training = Training()
    call: Any = torch.compile(training.model, backend="mfsdp", options={"inner": AOT_EAGER, "passes": [a_pass]})
    with expected("Rank 1 had failed with", type(error).__name__):
        call(training.x).backward()
    fails[0] = False
    training.model.reset()
    torch._dynamo.reset()
    call(training.x).backward()
    training.optimizer.step()


class FailsInStep(torch.optim.SGD):
    """After the first half of its parameters."""

    fails = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for number, param in enumerate(params := self.param_groups[0]["params"]):
            if self.fails and number == len(params) // 2:
                only_on_culprit(MemoryError("no memory for state"))
            param.add_(param.grad, alpha=-0.1)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("extended", [True, False])
@on_ranks(2, timeout=90)
def test_a_step_fails(mode: str, extended: bool) -> None:
    training = Training(mode)
    optimizer: Any = FailsInStep(training.model.parameters(), lr=0.1)
    training.optimizer = fully_shard_optimizer(optimizer) if extended else optimizer
    with expected("Rank 1 had failed with", "MemoryError" if extended else "was not finished"):
        for _ in range(2):
            try:
                training.step()
            except MemoryError:  # a program that tries to go on
                if extended:
                    raise
    finds_steps_that_differ(training.model)
    optimizer.fails = False
    training.step(2)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("known", [0, 3])
@on_ranks(2, timeout=90)
def test_a_step_is_skipped(mode: str, known: int) -> None:
    """``if loss is bad: continue``, after the backward: no collective is missed, and rows would be of different weights."""
    training = Training(mode)
    training.step(known)
    with expected(*(["Rank 1", "different weights now"] if known else ["before the first step"])):
        training.call(training.x).backward()
        if dist.get_rank() != CULPRIT:
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(2)
    if known:  # before the first step ranks meet: none has made it
        finds_steps_that_differ(training.model)
    training.model.reset()
    training.step(2)


@on_ranks(2, timeout=90)
def test_steps_that_all_ranks_make_are_free() -> None:
    """Closures, several optimizers, every second microbatch, a step in a hook: nothing of it is an error."""
    training = Training()
    params = list(training.model.parameters())
    plain = [torch.optim.SGD(params[:3], lr=0.1), torch.optim.Adam(params[3:], lr=0.1)]

    def closure() -> Tensor:
        loss: Tensor = training.call(training.x)
        loss.backward()
        return loss

    for number in range(6):
        for optimizer in plain:
            optimizer.step(closure)
        if number % 2:
            training.optimizer.step()
        training.optimizer.zero_grad()
    for param in params:
        alone = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda p, alone=alone: alone.step())
    training.call(training.x).backward()
