"""A rank sleeps, dies or diverges: every rank ends in time, and ``mfsdp hang`` names the rank and the collective."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mfsdp_compile.cli import main
from mfsdp_compile.diagnostics import hang

SECONDS = 8
"""Timeout of the process group: short, but longer than the difference between ranks' compilation times."""

PROGRAM = f"""
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
how, mode = sys.argv[1:]
rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # until everybody is there
from torch.distributed.device_mesh import DeviceMesh
from mfsdp_compile import fully_shard_model, fully_shard_optimizer
group = dist.new_group(timeout=timedelta(seconds={SECONDS}))
mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
    def forward(self, x):
        return torch.tanh(self.linear(x))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x, skip=-1):
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = block(x)
        return x.pow(2).mean()
def misbehave():
    if how == "dies":
        os.kill(os.getpid(), 9)
    if how == "sleeps":
        time.sleep({SECONDS * 2})
    if how == "signalled":
        signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
        print("asleep", flush=True)
        time.sleep(60)
torch.manual_seed(0)
model = fully_shard_model(Net(), mesh, fsdp_unit_modules=[Block])
optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={{"inner": mode}})
for step in range(6):
    astray = step == 3 and rank == last
    if astray:
        misbehave()
    call(torch.randn(4, 16), skip=1 if astray and how == "skips" else -1).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@contextlib.contextmanager
def started(folder: Path, how: str, mode: str, world: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start ranks that meet at a store of this process, as torchrun's do.

    No other process can take its port in between.
    """
    store = dist.TCPStore("localhost", 0, world, is_master=True, wait_for_workers=False)
    program = folder / "program.py"
    program.write_text(PROGRAM)
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), how, mode],
            env=os.environ | common | {"RANK": str(rank), "MFSDP_DEBUG_DIR": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def end(processes: list[subprocess.Popen[str]], seconds: float = 90) -> None:
    for process in processes:
        process.communicate(timeout=seconds)
    assert all(process.returncode != 0 for process in processes), "a rank noticed nothing"


CASES = [
    pytest.param(how, mode, world, marks=[] if (mode, world) in short else [pytest.mark.long])
    for how, short in {
        "sleeps": {("aot_eager", 2)},
        "dies": {("eager", 2)},
        "skips": set(),
    }.items()
    for mode in ("eager", "aot_eager")
    for world in (2, 4)
]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("how", "mode", "world"), CASES)
def test_the_culprit_is_named(tmp_path: Path, how: str, mode: str, world: int, capsys: Any) -> None:
    with started(tmp_path, how, mode, world) as processes:
        end(processes)
    first = hang.analyze(hang.read(tmp_path))[0]
    assert first.ranks == (world - 1,)
    assert "gather" in first.text
    assert "step 3" in first.text
    assert main(["hang", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert first.text in printed
    if how == "sleeps":
        assert "time.sleep" in printed


@pytest.mark.long
@pytest.mark.processes
def test_a_signal_makes_every_rank_write(tmp_path: Path) -> None:
    """A signal makes every rank write its record.

    This includes a rank that waits in a collective, where Python runs no handlers. SIGTERM then ends it, but not a rank
    whose program has a handler of its own by now.
    """
    with started(tmp_path, "signalled", "eager", 2) as processes:
        assert processes[1].stdout is not None
        assert processes[1].stdout.readline() == "asleep\n"
        time.sleep(1)
        for process in processes:
            process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + 20  # their timeout would also make them write, with that reason
        files = [tmp_path / "hang" / f"rank-{rank}.json" for rank in range(2)]
        while not all(file.exists() for file in files) and time.monotonic() < deadline:
            time.sleep(0.05)
        states = [json.loads(file.read_text())[0] for file in files]
        for process in reversed(processes):  # the last one first, before it notices that the other has ended
            process.send_signal(signal.SIGTERM)
        assert processes[1].stdout.readline() == "handled\n"
        assert processes[0].wait(20) == 128 + signal.SIGTERM
        time.sleep(0.2)  # the journal would have ended it at once
        assert processes[1].poll() is None
    assert [state["why"] for state in states] == ["SIGUSR1", "SIGUSR1"]
    assert "time.sleep(60)" in states[1]["place"]
    assert hang.analyze(dict(enumerate(states)))[0].ranks == (1,)


# -- records of ranks --------------------------------------------------------------------------------------------------


def state(rank: int, started: int, names: dict[int, str], world: int = 3) -> dict[str, Any]:
    launches = [{"what": what, "group": "g", "number": number, "started": True} for number, what in names.items()]
    entry = {"at": 0.0, "step": 7, "model": "Net #1", "what": "forward graph", "launches": launches}
    group = {"ranks": list(range(world)), "started": started}
    return {"rank": rank, "world_size": world, "groups": {"g": group}, "entries": [entry]}


def test_a_rank_behind() -> None:
    names = {1: "gather a", 2: "gather b"}
    (finding,) = hang.analyze({0: state(0, 2, names), 1: state(1, 1, {1: "gather a"}), 2: state(2, 2, names)})
    assert finding.ranks == (1,)
    assert "rank 1 has not started collective 2 of group g, 'gather b'" in finding.text
    assert "ranks 0, 2 have, and wait" in finding.text


def test_collectives_that_are_not_the_same() -> None:
    states = {rank: state(rank, 2, {1: "gather a", 2: "gather c" if rank == 2 else "gather b"}) for rank in range(3)}
    (finding,) = hang.analyze(states)
    assert finding.ranks == (2,)
    assert "'gather b' of Net #1, forward graph, step 7 on ranks 0, 1" in finding.text


def test_a_file_that_is_missing() -> None:
    names = {1: "gather a"}
    (finding,) = hang.analyze({0: state(0, 1, names), 2: state(2, 1, names)})
    assert finding.ranks == (1,)
    assert "rank 1 left no file" in finding.text
    assert "'gather a'" in finding.text


def test_nothing_to_see() -> None:
    names = {1: "gather a"}
    (finding,) = hang.analyze({rank: state(rank, 1, names) for rank in range(3)})
    assert finding.ranks == ()


def test_folders_that_hold_something_else(tmp_path: Path, capsys: Any) -> None:
    assert main(["hang", str(tmp_path)]) == 2
    assert "MFSDP_DEBUG_DIR" in capsys.readouterr().out
    (tmp_path / "rank-0.json").write_text("{")
    with pytest.raises(ValueError, match=r"rank-0\.json"):
        hang.read(tmp_path)
