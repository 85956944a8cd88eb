"""What happens to one rank in the middle of a save, a load or a gather: every rank has its error within seconds.

The time limit of the process group is half an hour. The table in docs/debugging.md has the times.
"""

from __future__ import annotations

import contextlib
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
from doc_tables import DOCS, check_rows
from pool import server

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, full_optimizer_state_dict, full_state_dict
from mfsdp_compile.checkpoint.loading import _Load
from mfsdp_compile.checkpoint.saving import PublishingWriter
from mfsdp_compile.cli import main
from mfsdp_compile.convert import commands
from mfsdp_compile.runtime import compat

SECONDS = 30.0
LIMIT = timedelta(minutes=30)
STOPPED = 4.0
"""Seconds for which a rank is stopped."""
VICTIM = 1
OUT = "converted"


@dataclass
class Job:
    """What a phase works with."""

    model: Any
    optimizer: Any
    checkpoints: Checkpoints


def convert(job: Job) -> None:
    """Rename keys of the checkpoint. One process converts."""
    if dist.get_rank() == VICTIM:
        (source,) = job.checkpoints.all()
        out = str(source.parent / OUT)
        if code := main(["checkpoint", "rename", "--overwrite", str(source), out, "^model.", "other."]):
            raise RuntimeError(f"exit code {code}")


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
    "conversion": (convert, commands, "seal"),
}
"""By name: what runs, and the function in which the fault occurs."""


def raises(error: BaseException) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


ENDING = ("SIGTERM", "SIGKILL")
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
    if fault in ENDING:
        return
    if name == "all_gather":
        model.reset()
    with contextlib.suppress(CheckpointError):  # the same error again
        job.checkpoints.wait()
    run(job)
    model(parity.batches(1)[0, rank]).sum().backward()
    optimizer.step()
    said.send(("again", time.monotonic(), ""))


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
        if fault == "SIGSTOP":
            time.sleep(STOPPED)
            os.kill(processes[VICTIM].pid or 0, signal.SIGCONT)
        heard = [("ended", begun, "") if fault in ENDING and rank == VICTIM else hear(rank) for rank in range(2)]
        if fault not in ENDING:
            for mine, _ in pipes:
                mine.send("go on")
            assert [hear(rank)[0] for rank in range(2)] == ["again", "again"]
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return max(at for _, at, _ in heard) - begun, [text for _, _, text in heard]


def check(folder: Path, phase: str, fault: str) -> float:
    """Let a fault occur in a phase, and return the seconds until every rank had its error."""
    folder.mkdir()
    took, errors = strike(folder, phase, fault)
    print(f"{phase}, {fault}: {took:.1f} s, {errors}")
    assert took < SECONDS
    if fault == "SIGSTOP":
        assert errors == ["", ""]
        assert took >= STOPPED
    elif phase != "conversion":
        assert SAYS.get(fault, fault) in errors[0]
        assert fault != "Ctrl-C" or errors[1].startswith("KeyboardInterrupt") or phase == "save_async"  # in its thread
    assert phase != "conversion" or fault not in ENDING or not (folder / OUT).exists()
    return took


SAYS = {
    "an error": "ValueError: a bad value",
    "no file": "No such file",
    "full disk": "space",
    "no memory": "MemoryError",
    "no GPU memory": "OutOfMemoryError",
    "Ctrl-C": "KeyboardInterrupt",
    "SIGTERM": "process of rank 1",
    "SIGKILL": "process of rank 1",
}
"""What the error of the other rank contains."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        ("save", "Ctrl-C"),
        ("full_state_dict", "no memory"),
        ("save_async, copying", "no memory"),
        ("load, optimizer", "Ctrl-C"),
    ],
)
def test_some_of_the_table(phase: str, fault: str, tmp_path: Path) -> None:
    check(tmp_path / "job", phase, fault)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("phase", PHASES)
def test_every_rank_has_its_error(phase: str, tmp_path: Path) -> None:
    took = [check(tmp_path / fault, phase, fault) for fault in FAULTS]
    row = [f"`{phase}`" if phase.isidentifier() else phase, *(f"{seconds:.1f}" for seconds in took)]
    check_rows(DOCS / "debugging.md", "fault times", HEADER, [row], keys=1, bounds=dict.fromkeys(FAULTS, SECONDS))


HEADER = ("in", *FAULTS)
