"""A process is killed while a checkpoint is written: the last complete checkpoint is found, and never a mixture.

A rank dies at a chosen event of a save. Events are Python's audit events of file operations (:func:`sys.addaudithook`).
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.manifest import damaged_files, read_manifest

FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
EVENTS = {0: range(1, 37), 1: range(1, 4)}
"""Events of a save, by rank. Python versions differ by a few."""


def train_and_save(root: str, rank: int, store: str, event: int, said: Connection) -> None:
    """Save checkpoints 1 and 2, of which one is kept. Die at ``event`` of the second save, or never if it is 0."""
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    torch.manual_seed(0)
    model = fully_shard_model(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)), fsdp_unit_modules=[nn.Linear])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    checkpoints = Checkpoints(root, keep=1)
    seen = []

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        if name not in FILE_EVENTS or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        if Path(arguments[0]).is_relative_to(root):
            seen.append(name)
            if len(seen) == event and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    for step in (1, 2):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        with torch.no_grad():  # the values show what belongs together
            for param in model.parameters():
                param.fill_(step)
            for state in optimizer.state.values():
                state["exp_avg"].fill_(step)
        if step == 2:
            sys.addaudithook(watch)
        checkpoints.save(step, model, optimizer, extra=step)
    said.send(seen)
    dist.destroy_process_group()


def run(root: Path, who: int = 0, event: int = 0) -> list[list[str] | None]:
    """Run two ranks. Returns the file events of each; None for a rank that died."""
    store = root.with_name("store")
    store.unlink(missing_ok=True)
    fork = mp.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        fork.Process(
            target=train_and_save, args=(str(root), rank, str(store), event if rank == who else 0, pipes[rank][1])
        )
        for rank in range(2)
    ]
    try:
        for process, (_, said) in zip(ranks, pipes, strict=True):
            process.start()
            said.close()
        ranks[who].join(60)
        if ranks[who].exitcode == -signal.SIGKILL:
            ranks[1 - who].kill()  # as a launcher does when a process dies
        ranks[1 - who].join(60)
        return [
            heard.recv() if process.exitcode == 0 else None for process, (heard, _) in zip(ranks, pipes, strict=True)
        ]
    finally:
        for process in ranks:
            process.kill()


def look(root: Path) -> int:
    """Read everything in the last complete checkpoint. Returns its step."""
    path = Checkpoints(root).latest()
    assert path is not None
    manifest = read_manifest(path)
    assert manifest is not None
    assert not damaged_files(path, manifest.files, sorted(manifest.files))
    reader = CheckpointReader(path)
    looked_at = 0
    for key in reader.keys():  # noqa: SIM118
        if key.startswith("model.") or key.endswith(".exp_avg"):
            assert reader.tensor(key).eq(manifest.step).all(), key
            looked_at += 1
    assert looked_at == 8
    weight = torch.empty(9, 7)
    dcp.load({"model.module.0.weight": weight}, checkpoint_id=path)
    assert weight.eq(manifest.step).all()
    return manifest.step


@pytest.mark.long_unless("1-0", "0-10", "0-11")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("who", "events"),
    [
        pytest.param(who, events[first :: len(events) // 3], id=f"{who}-{first}")
        for who, events in EVENTS.items()
        for first in range(len(events) // 3)
    ],
)
def test_killed_while_saving(who: int, events: range, tmp_path: Path) -> None:
    """A program killed at any event of a save, again and again, finds what the last complete save left."""
    root = tmp_path / "root"
    for event in events:
        killed(root, who, event)
    # Then it is not killed, and saves as if nothing had happened.
    assert None not in run(root)
    assert look(root) == 2
    assert not [path for path in root.iterdir() if path.name.startswith((".saving-", ".removing-"))]


def killed(root: Path, who: int, event: int) -> None:
    done = run(root, who, event)
    if done[who] is not None:
        assert event > max(EVENTS[who]) - 6, f"only {len(done[who])} events"  # type: ignore[arg-type]
    step = look(root)
    assert step in ((1, 2) if done[who] is None else (2,))
    # The file that other programs read names a complete checkpoint: it is written before the previous one is removed.
    assert read_manifest(root / (root / "latest").read_text()) is not None


@pytest.mark.processes
def test_what_is_done_to_files(tmp_path: Path) -> None:
    """The events above cover a whole save."""
    first, second = run(tmp_path / "root")
    assert first is not None
    assert second is not None
    assert max(EVENTS[0]) - 6 < len(first) <= max(EVENTS[0])
    assert len(second) <= max(EVENTS[1])
    assert {"open", "os.rename", "os.mkdir", "os.rmdir"} <= set(first)
