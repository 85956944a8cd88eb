"""What happens to one rank in the middle of a save, a load or a gather: every rank has its error within seconds.

The time limit of the process group is half an hour. The table in docs/debugging.md has the times.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from doc_tables import DOCS, check_rows, rows_of
from pool import server

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_optimizer_state_dict, full_state_dict
from mfsdp_compile.checkpoint.loading import _Load
from mfsdp_compile.checkpoint.saving import PublishingWriter
from mfsdp_compile.convert import conversion_plan
from mfsdp_compile.runtime import compat

SECONDS = 30.0
LIMIT = timedelta(minutes=30)
STOPPED = 4.0
"""Seconds for which a rank is stopped."""
VICTIM = 1


@dataclass
class Job:
    """What a phase works with."""

    model: Any
    optimizer: Any
    checkpoints: Checkpoints


def gathers(job: Job) -> tuple[Any, str]:
    return compat, "all_gather"


PHASES: dict[str, tuple[Callable[[Job], Any], Any, str]] = {
    "save": (lambda job: job.checkpoints.save(2, job.model, job.optimizer), PublishingWriter, "write_data"),
    "save_async": (
        lambda job: job.checkpoints.save_async(2, job.model, job.optimizer).result(),
        PublishingWriter,
        "write_data",
    ),
    "save_async, copying": (
        lambda job: job.checkpoints.save_async(2, job.model, job.optimizer).result(),
        PublishingWriter,
        "stage",
    ),
    "load, reading": (lambda job: job.checkpoints.load(job.model, job.optimizer), _Load, "prepare"),
    "load, optimizer": (lambda job: job.checkpoints.load(job.model, job.optimizer), _Load, "fill_optimizer"),
    "load, weights": (lambda job: job.checkpoints.load(job.model, job.optimizer), _Load, "install"),
    "full_parameters": (lambda job: list(job.model.full_parameters()), compat, "all_gather"),
    "full_state_dict": (lambda job: full_state_dict(job.model), compat, "all_gather"),
    "full_optimizer_state_dict": (lambda job: full_optimizer_state_dict(job.optimizer), compat, "all_gather"),
    "forward": (lambda job: job.model(parity.batches(1)[0, 0]), compat, "all_gather"),
}
"""By name: what runs, and the function in which the fault occurs."""


def raises(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


FAULTS: dict[str, Callable[[], None]] = {
    "an error": raises(ValueError("a bad value")),
    "no file": raises(FileNotFoundError(2, "No such file or directory")),
    "full disk": raises(OSError(28, "No space left on device")),
    "no memory": raises(MemoryError("cannot allocate")),
    "no GPU memory": raises(torch.OutOfMemoryError("CUDA out of memory")),
    "Ctrl-C": raises(KeyboardInterrupt()),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def meet(rank: int, port: int, folder: str, phase: str, fault: str, said: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, timeout=LIMIT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    job = Job(model, optimizer, Checkpoints(folder))
    model(parity.batches(1)[0, rank]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    job.checkpoints.save(1, model, optimizer)
    run, owner, name = PHASES[phase]
    calls, own = 0, getattr(owner, name)

    def strike(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (2 if name == "all_gather" else 1):
            said.send(("struck", time.monotonic(), ""))
            FAULTS[fault]()
        return own(*args, **kwargs)

    time.sleep(1.5)  # the ring has closed: the watchdog looks every second
    with mock.patch.object(owner, name, strike if rank == VICTIM else own):
        try:
            run(job)
        except BaseException as error:
            said.send(("error", time.monotonic(), f"{type(error).__name__}: {error}"))
        else:
            said.send(("no error", time.monotonic(), ""))
    said.recv()  # stay: this process's end must not be what tells the other rank


def strike(folder: Path, phase: str, fault: str) -> tuple[float, list[str]]:
    """Return the time from the fault to the last rank's error, and all errors. A rank that has ended has none."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=LIMIT, wait_for_workers=False)
    context = server()
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=meet, args=(rank, store.port, str(folder), phase, fault, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]

    def hear(rank: int) -> tuple[str, float, str]:
        assert pipes[rank][0].poll(SECONDS + 30), f"{phase}, {fault}: rank {rank} still waits"
        heard: tuple[str, float, str] = pipes[rank][0].recv()
        return heard

    try:
        for process in processes:
            process.start()
        kind, begun, text = hear(VICTIM)
        assert kind == "struck", f"{kind} {text}"
        ends = fault in ("SIGTERM", "SIGKILL")
        if fault == "SIGSTOP":
            time.sleep(STOPPED)
            os.kill(processes[VICTIM].pid or 0, signal.SIGCONT)
        heard = [("ended", begun, "") if ends and rank == VICTIM else hear(rank) for rank in range(2)]
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return max(at for _, at, _ in heard) - begun, [text for _, _, text in heard]


def told(phase: str, fault: str) -> str:
    """Return what the other rank's error says."""
    if fault == "SIGSTOP":
        return ""
    if fault in ("SIGTERM", "SIGKILL"):
        return "process of rank 1"
    return {"an error": "ValueError", "no file": "No such file", "full disk": "space", "Ctrl-C": "KeyboardInterrupt"}.get(
        fault, "MemoryError" if fault == "no memory" else "OutOfMemoryError"
    )


SHORT = {("full_state_dict", "no memory"), ("save_async, copying", "no memory"), ("load, optimizer", "Ctrl-C")}
"""Cases of ``make test``; ``make long`` has all."""
CASES = [
    pytest.param(phase, fault, marks=[] if (phase, fault) in SHORT else [pytest.mark.long])
    for phase in PHASES
    for fault in FAULTS
]


@pytest.mark.processes
@pytest.mark.parametrize(("phase", "fault"), CASES)
def test_every_rank_has_its_error(phase: str, fault: str, tmp_path: Path) -> None:
    took, errors = strike(tmp_path, phase, fault)
    print(f"{phase}, {fault}: {took:.1f} s, {errors}")
    assert took < SECONDS
    if fault == "SIGSTOP":
        assert errors == ["", ""]
        assert took >= STOPPED
    else:
        assert told(phase, fault) in errors[0]
