"""A rank's process is killed or ends: the ranks that wait for it learn so within seconds, whatever the time limit."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from pool import server

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_state_dict
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks.lifeline import Lifeline

SECONDS = 30.0
"""Time within which every rank must have its error. It takes about three seconds."""
LIMIT = timedelta(minutes=30)
"""Time limit of the process group, for which no test can wait."""


def sharded() -> tuple[Any, Any]:
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def compiled(model: Any) -> None:
    torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})(parity.batches(1)[0, 0])


PHASES: dict[str, Callable[[Any, Any, Checkpoints], Any]] = {
    "save": lambda model, optimizer, checkpoints: checkpoints.save(2, model, optimizer),
    "save_async": lambda model, optimizer, checkpoints: checkpoints.save_async(2, model, optimizer).result(),
    "load": lambda model, optimizer, checkpoints: checkpoints.load(model, optimizer),
    "full_parameters": lambda model, optimizer, checkpoints: list(model.full_parameters()),
    "full_state_dict": lambda model, optimizer, checkpoints: full_state_dict(model),
    "shard": lambda model, optimizer, checkpoints: sharded(),
    "first compiled call": lambda model, optimizer, checkpoints: compiled(model),
    "forward": lambda model, optimizer, checkpoints: model(parity.batches(1)[0, 0]),
    "clip": lambda model, optimizer, checkpoints: torch.nn.utils.get_total_norm(model.parameters()),
    "reset": lambda model, optimizer, checkpoints: model.reset(),
}


def meet(rank: int, port: int, folder: str, phase: str, victim: int, way: str, said: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, timeout=LIMIT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=LIMIT)
    model, optimizer = sharded()
    model(parity.batches(1)[0, rank]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, model, optimizer)
    time.sleep(2)  # the ring has closed: the watchdog looks every second
    if rank == victim:
        if way == "exit":
            atexit._run_exitfuncs()  # as at the end of a program
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        PHASES[phase](model, optimizer, checkpoints)
    except Exception as error:
        said.send((time.monotonic() - begun, f"{type(error).__name__}: {error}"))
    else:
        said.send((time.monotonic() - begun, "no error"))
    os._exit(0)


def lose(folder: Path, phase: str, victim: int, way: str) -> tuple[float, str]:
    """Return how long the other rank took to raise an error in ``phase``, and the error."""
    # The store is this process's, as it is the launcher's under torchrun: it survives rank 0.
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=LIMIT, wait_for_workers=False)
    context = server()
    mine, its = context.Pipe()
    processes = [
        context.Process(target=meet, args=(rank, store.port, str(folder), phase, victim, way, its), daemon=True)
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        assert mine.poll(SECONDS + 30), f"{phase}: rank {1 - victim} still waits"
        took, error = mine.recv()
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    return took, error


SHORT = {("save", 0, "kill"), ("save", 1, "exit"), ("full_parameters", 1, "kill"), ("shard", 0, "exit")}
"""Cases of ``make test``; ``make long`` has all."""

CASES = [
    pytest.param(*case, marks=[] if case in SHORT else [pytest.mark.long])
    for case in itertools.product(PHASES, (0, 1), ("kill", "exit"))
]


@pytest.mark.long_if("*-exit")
@pytest.mark.processes
@pytest.mark.parametrize(("phase", "victim", "way"), CASES)
def test_a_lost_rank_is_noticed(phase: str, victim: int, way: str, tmp_path: Path) -> None:
    took, error = lose(tmp_path, phase, victim, way)
    print(f"{phase}, rank {victim}, {way}: {took:.1f} s, {error}")
    assert took < SECONDS
    how = "was killed or has crashed" if way == "kill" else "has ended"
    assert f"the process of rank {victim} {how}" in error


def test_a_connection_of_an_earlier_ring_says_nothing_about_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group ends and another begins in the same processes, while a neighbor's connection is on its way."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    line = Lifeline()
    earlier, now = (compat.serve_store("127.0.0.1", timedelta(seconds=20)) for _ in range(2))
    monkeypatch.setattr(compat, "default_store", lambda: now)
    line.join(earlier)
    host, port, token = json.loads(earlier.get("mfsdp/lifeline/0"))
    line.join(now)
    with socket.create_connection((host, port), timeout=5) as late:
        late.sendall(f"{token} 1\n".encode())
        late.settimeout(5)
        assert late.recv(1) == b"", "the connection was taken for one of the new ring"
    line.look(now)
    assert line.lost(now, [1]) == []
    line.leave()


def a_ring_of_two(monkeypatch: pytest.MonkeyPatch, store: dist.Store) -> list[Lifeline]:
    """Return the lifelines of two ranks, as if each were in a process of its own, connected to each other."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(compat, "default_store", lambda: store)
    lines = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        lines.append(Lifeline())
        lines[-1].join(store)
    look_at_all(lines, store, lambda: all(len(line._neighbors) == 2 for line in lines))
    return lines


def look_at_all(lines: list[Lifeline], store: dist.Store, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline
        for line in lines:
            line.look(store)
        time.sleep(0.01)


def test_neighbors_that_go_to_a_new_group_first_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default group is initialized a second time. The other rank has sharded its model; this one has not."""
    earlier, now = (compat.serve_store("127.0.0.1", timedelta(seconds=20)) for _ in range(2))
    mine, its = a_ring_of_two(monkeypatch, earlier)
    monkeypatch.setattr(compat, "default_store", lambda: now)
    its.leave()
    for _ in range(3):
        mine.look(now)
        time.sleep(0.05)
    assert mine.lost(now, [1]) == []
    its.join(now)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    mine.join(now)
    look_at_all([mine, its], now, lambda: len(mine._neighbors) == len(its._neighbors) == 2)
    assert mine.lost(now, [1]) == its.lost(now, [0]) == []
    its.leave()
    look_at_all([mine], now, lambda: bool(mine.lost(now, [1])))
    mine.leave()


def test_a_connection_that_is_let_go_is_no_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greeting may come later than a busy rank waits for it."""
    store = compat.serve_store("127.0.0.1", timedelta(seconds=20))
    mine, its = a_ring_of_two(monkeypatch, store)
    while its._neighbors:
        its._neighbors.pop().connection.close()
    for _ in range(5):
        mine.look(store)
        time.sleep(0.05)
    assert mine.lost(store, [1]) == []
    host, _, token = json.loads(store.get("mfsdp/lifeline/1"))
    with socket.create_server((host, 0)) as closed:
        address = [*closed.getsockname()[:2], token]
    store.set("mfsdp/lifeline/1", json.dumps(address))  # nobody listens there: as if its process were killed

    def is_lost() -> bool:
        its._close()
        return bool(mine.lost(store, [1]))

    look_at_all([mine], store, is_lost)
    for line in (mine, its):
        line.leave()


def test_a_rank_that_comes_back_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default group is initialized a second time, over the same store: each rank publishes a new address."""
    store = compat.serve_store("127.0.0.1", timedelta(seconds=20))
    mine, its = a_ring_of_two(monkeypatch, store)
    its.leave()
    look_at_all([mine], store, lambda: bool(mine.lost(store, [1])))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    its.join(store)
    assert mine.lost(store, [1]) == []
    for line in (mine, its):
        line.leave()
