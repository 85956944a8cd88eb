"""Faults of one rank: all ranks get an error within seconds, and it names the rank.

The timeout of the process group is half an hour. The table in docs/debugging.md shows the results of these tests.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from doc_tables import DOCS, check_rows
from failing import SECONDS as SHORT
from failing import short_mesh
from parity import AOT_EAGER, EAGER
from pool import on_ranks, server
from test_stalls import SECONDS, Training
from torch import Tensor

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.checkpoint.saving import PublishingWriter
from mfsdp_compile.runtime import compat

CULPRIT = 1
HEADER = ("on one rank", "other ranks have, within 30 s", "afterwards")
RESET = "`model.reset()` on every rank, and on"
RESTART = "start again, from the last checkpoint"
LOAD = "`model.reset()` on every rank, and load a checkpoint: it warns of that"


def has_row(fault: str, told: str, afterwards: str) -> None:
    """Check the row of the table in the documentation."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        check_rows(DOCS / "debugging.md", "faults", HEADER, [(fault, f"`{told}`", afterwards)], keys=1)


_expected = itertools.count()


@contextlib.contextmanager
def expected(*fragments: str) -> Iterator[None]:
    """Assert that all ranks get an error soon, and that the messages of the innocent ranks contain ``fragments``."""
    begun, message = time.monotonic(), ""
    try:
        yield
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    # Through the store: connections of the group may have been closed to end a wait, until model.reset().
    store, number = compat.default_store(), next(_expected)
    store.set(f"expected/{number}/{dist.get_rank()}", json.dumps([took, message]))
    everyone = [json.loads(store.get(f"expected/{number}/{rank}")) for rank in range(dist.get_world_size())]
    for rank, (its, text) in enumerate(everyone):
        assert its < SECONDS, everyone
        assert text, everyone
        for fragment in fragments if rank != CULPRIT else ():
            assert fragment in text, f"{fragment!r} is not in {everyone}"


def only_on_culprit(error: BaseException) -> None:
    if dist.get_rank() == CULPRIT:
        raise error


def finds_steps_that_differ(model: Any) -> None:
    """Assert that a reset warns about rows of different weights."""
    with parity.first_rank_warns(RuntimeWarning, "rows come from different steps"):
        model.reset()


def goes_on(training: Training) -> None:
    training.model.reset()
    training.step(2)


@pytest.mark.long_unless("*-error0")
@pytest.mark.parametrize("error", [ValueError("no such node"), KeyboardInterrupt("ctrl-c"), MemoryError("no memory")])
@on_ranks(2, timeout=90)
def test_compiling_fails(error: BaseException) -> None:
    """If compilation fails on one rank, in a user's pass or by an interrupt, all ranks raise."""
    fails = [True]

    def a_pass(*_: Any) -> None:
        if fails[0]:
            only_on_culprit(error)

    training = Training()
    call: Any = torch.compile(training.model, backend="mfsdp", options={"inner": AOT_EAGER, "passes": [a_pass]})
    with expected("Rank 1 had failed with", type(error).__name__):
        call(training.x).backward()
    has_row(f"{type(error).__name__} while the model is compiled", "Rank 1 had failed with", RESET)
    fails[0] = False
    training.model.reset()
    torch._dynamo.reset()
    call(training.x).backward()
    training.optimizer.step()


class FailsInStep(torch.optim.SGD):
    """An optimizer that fails after the first half of its parameters."""

    fails = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for number, param in enumerate(params := self.param_groups[0]["params"]):
            if self.fails and number == len(params) // 2:
                only_on_culprit(MemoryError("no memory for state"))
            param.add_(param.grad, alpha=-0.1)


@pytest.mark.long_unless("*-eager")
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
            except MemoryError:  # a program that tries to continue
                if extended:
                    raise
    has_row("an error inside `optimizer.step()`", "Rank 1 had failed with", LOAD)
    finds_steps_that_differ(training.model)
    optimizer.fails = False
    training.step(2)


@on_ranks(2, timeout=60)
def test_a_step_fails_halfway_on_all_ranks() -> None:
    """Ranks have made equally many steps, but their rows are from before and after a part of one."""

    class FailsEverywhere(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            self.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError("no memory for state")

    training = Training()
    training.optimizer = fully_shard_optimizer(FailsEverywhere(training.model.parameters(), lr=0.1))
    training.call(training.x).backward()
    with pytest.raises(MemoryError):
        training.optimizer.step()
    finds_steps_that_differ(training.model)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("known", [0, 3])
@on_ranks(2, timeout=90)
def test_a_step_is_skipped(mode: str, known: int) -> None:
    """If one rank skips an optimizer step (``if loss is bad: continue``) after the backward, all ranks raise.

    No collective is missed, but ranks would hold rows of different weights.
    """
    training = Training(mode)
    training.step(known)
    with expected(*(["Rank 1", "they hold rows of different weights now"] if known else ["before the first step"])):
        training.call(training.x).backward()
        if dist.get_rank() != CULPRIT:
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(2)
    if known:  # ranks meet before the first step, so none has made it
        has_row("`optimizer.step()` is skipped", "they hold rows of different weights now", LOAD)
        finds_steps_that_differ(training.model)
    training.model.reset()
    training.step(2)


@on_ranks(2, timeout=90)
def test_steps_that_all_ranks_make_are_free() -> None:
    """Closures, several optimizers, steps at every second microbatch and steps in a hook are not errors."""
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


@pytest.mark.long
@on_ranks(2, timeout=60)
def test_a_rank_that_does_not_come_to_a_save() -> None:
    """If one rank does not arrive at a save, all ranks raise.

    The late rank is in the program's own code. The others wait one and a half timeouts of the model in any case.
    """
    model: Any = fully_shard_model(parity.build(zoo.Plain), short_mesh())
    with tempfile.TemporaryDirectory() as folder:
        root = [folder]
        dist.broadcast_object_list(root)
        checkpoints = Checkpoints(root[0])
        if dist.get_rank() == CULPRIT:
            time.sleep(2.5 * SHORT)
        with expected("Saving a checkpoint: rank 1 did not arrive within"):
            checkpoints.save(1, model)
        has_row(
            "it does not come to `Checkpoints.save`", "Saving a checkpoint: rank 1 did not arrive within", "save again"
        )
        checkpoints.save(1, model)
        dist.barrier()


def dies_or_stops(mode: str, how: int, rank: int, port: int, said: Connection) -> None:
    """Die or stop in the backward of the third step."""
    short, store = timedelta(seconds=5), dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=short)
    torch.set_num_threads(1)
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(fails: bool) -> None:
        loss = call(torch.ones(2, 8))
        if fails and rank == CULPRIT:
            said.send(("here", 0.0))
            loss.register_hook(lambda _: os.kill(os.getpid(), how))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(False)
    step(False)
    begun = time.monotonic()
    try:
        step(True)
    except RuntimeError as error:
        said.send((str(error), time.monotonic() - begun))
    if how == signal.SIGSTOP:
        model.reset()
        step(False)
        said.send(("goes on", 0.0))


@pytest.mark.long_unless("9-eager")
@pytest.mark.processes
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_is_killed_or_stopped(mode: str, how: signal.Signals) -> None:
    context = server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=dies_or_stops, args=(mode, how, rank, store.port, pipes[rank][1])) for rank in range(2)
    ]

    def hear(rank: int) -> tuple[str, float]:
        assert pipes[rank][0].poll(60), f"rank {rank} says nothing"
        said: tuple[str, float] = pipes[rank][0].recv()
        return said

    try:
        for process in ranks:
            process.start()
        assert hear(CULPRIT)[0] == "here"
        text, took = hear(1 - CULPRIT)
        assert "A collective failed on rank 0, in " in text, text
        said = (
            "does not answer: it is stopped"
            if how == signal.SIGSTOP
            else "has ended and could not say why: it was killed"
        )
        assert f"The process of rank 1 {said}" in text
        assert text.index("The process of rank 1") < text.index("The backend's error")
        assert took < SECONDS
        if how == signal.SIGSTOP:
            os.kill(ranks[CULPRIT].pid or 0, signal.SIGCONT)
            text, _ = hear(CULPRIT)
            assert "A collective failed on rank 1, in " in text, text
            assert [hear(rank)[0] for rank in range(2)] == ["goes on"] * 2
    finally:
        for process in ranks:
            process.kill()
            process.join()
    fault, afterwards = ("it is stopped", RESET) if how == signal.SIGSTOP else ("it is killed", RESTART)
    has_row(f"{fault}, in backward", "A collective failed on rank 0, in", afterwards)


def ends_elsewhere(where: str, rank: int, port: int, root: str, said: Connection) -> None:
    """Die or stop where others wait, but in no collective of the model."""
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    limit = timedelta(seconds=3) if "stopped" in where else timedelta(minutes=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    torch.set_num_threads(1)
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    model(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
    write = PublishingWriter.write_data

    def end(*args: Any) -> Any:
        if rank == CULPRIT:
            said.send(("here", 0.0))
            os.kill(os.getpid(), signal.SIGSTOP if "stopped" in where else signal.SIGKILL)
        return write(*args) if args else None

    begun = time.monotonic()
    try:
        if where.startswith("before"):
            end()
        if "a save" in where:
            with mock.patch.object(PublishingWriter, "write_data", end):
                Checkpoints(root).save(1, model)
        elif "a reset" in where:
            model.reset()
        else:
            dist.barrier()
    except RuntimeError as error:
        text = str(error)
        if "barrier" in where:  # an uncaught error
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                sys.excepthook(type(error), error, None)
            text = printed.getvalue()
        said.send((text, time.monotonic() - begun))


@pytest.mark.long_unless("before a save, killed", "before a barrier, killed")
@pytest.mark.processes
@pytest.mark.parametrize(
    "where",
    [
        "before a barrier, killed",
        "before a save, killed",
        "before a reset, killed",
        "in a save, killed",
        "in a save, stopped",
    ],
)
def test_a_rank_ends_elsewhere(where: str, tmp_path: Path) -> None:
    """The other rank learns within seconds which rank has ended or does not answer, whatever the timeout of a group."""
    context = server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        context.Process(target=ends_elsewhere, args=(where, rank, store.port, str(tmp_path), pipes[rank][1]))
        for rank in range(2)
    ]
    try:
        for process in ranks:
            process.start()
        assert pipes[CULPRIT][0].poll(60)
        assert pipes[1 - CULPRIT][0].poll(60), "the other rank says nothing"
        text, took = pipes[1 - CULPRIT][0].recv()
        assert took < SECONDS
        said = "The process of rank 1 has ended and could not say why: it was killed"
        if "stopped" in where:
            said = "The process of rank 1 has not answered for 3 s"
        elif where in ("before a save, killed", "before a reset, killed"):  # where ranks wait in an agreement
            said = "the process of rank 1 was killed or has crashed"
        assert said in text, text
    finally:
        for process in ranks:
            process.kill()
            process.join()
