"""Ranks that wait for one another in different operations all get an error within seconds, which names both."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from pool import on_ranks
from test_stalls import Training, looking_often, mesh
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile import fully_shard_model, save_pretrained
from mfsdp_compile.checkpoint import Checkpoints, full_state_dict
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks import notices
from mfsdp_compile.runtime.ranks.agreement import agree
from mfsdp_compile.runtime.ranks.watchdog import watchdog

SECONDS = 20.0
"""Time within which every rank must have its error. It takes about two seconds on a machine that does nothing else."""


def shared() -> str:
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return folder[0]


def cross(
    training: Training,
    one: Callable[[], Any],
    other: Callable[[], Any],
    *names: str,
    late: float = 0,
    never: str = "rows of different weights",
) -> float:
    """Let rank 1 do something else than rank 0. Assert that both raise soon, and name both operations.

    Args:
        late: Seconds after which rank 1 begins.
        never: What no message says.

    Returns:
        The seconds until the last rank had its error.
    """
    dist.barrier()
    begun, message = time.monotonic(), "nothing"
    try:
        if dist.get_rank() == 0:
            one()
        else:
            time.sleep(late)
            other()
    except RuntimeError as error:
        message = str(error)
    took = time.monotonic() - begun - late
    training.model.reset()  # connects the group again, whose connections a rank may have broken to free another
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (took, message))
    for took, text in everyone:
        assert took < SECONDS, everyone
        assert all(name in text for name in ("test_crossings.py:", *names)) and never not in text, everyone
    return max(took for took, _ in everyone)


@pytest.mark.long_unless("*-some")
@pytest.mark.parametrize("which", ["some", "others"])
@on_ranks(2, timeout=240)
def test_operations_cross_a_step(which: str) -> None:
    training, folder = Training(), shared()
    training.step(2)
    model, optimizer, checkpoints = training.model, training.optimizer, Checkpoints(folder)
    checkpoints.save(0, model, optimizer)
    operations: dict[str, Callable[[], Any]] = {
        "Saving a checkpoint": lambda: checkpoints.save(1, model, optimizer),
        "save_pretrained": lambda: save_pretrained(model, f"{folder}/out"),
    }
    if which == "others":
        operations = {
            "a gather of all parameters": lambda: full_state_dict(model),
            "A save before a load": lambda: checkpoints.load(model, optimizer),
            "Saving a checkpoint": lambda: checkpoints.save_async(1, model),
        }
    for late, (name, run) in enumerate(operations.items()):
        cross(training, run, training.step, name, "ank 0", "ank 1", late=late)
        training.step(2)
    if which == "others":
        cross(training, lambda: checkpoints.save(1, model), lambda: checkpoints.load(model), "Saving", "before a load")
        training.step()
    checkpoints.save(1, model, optimizer)


@on_ranks(2, timeout=60)
def test_a_model_with_more_steps_is_not_meant() -> None:
    """A model over another process group that has taken more steps, and is not in use, stays usable."""
    other = fully_shard_model(zoo.Plain(), fsdp_unit_modules="auto")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def step() -> None:
        other(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(8):
        step()
    training, folder = Training(), shared()
    training.step(4)  # another step asks for nothing: its first gather waits
    with looking_often():
        time.sleep(0.6)  # so that the watchdog has seen which model moves
    training.step()
    save = lambda: Checkpoints(folder).save(1, training.model)  # noqa: E731
    cross(training, save, training.step, "Saving a checkpoint", "Branches")
    step()
    training.step()


@on_ranks(2, timeout=120)
def test_a_save_crosses_a_collective() -> None:
    """The other rank is blocked in a gather, or in a collective of the program itself."""
    training, folder = Training(), shared()
    training.step(4)  # another step asks for nothing: its first gather waits
    save = lambda: Checkpoints(folder).save(1, training.model)  # noqa: E731
    cross(training, lambda: training.step(2), save, "Saving a checkpoint", "gather", late=4.0)
    over = dist.new_group(timeout=timedelta(minutes=30))
    training.step(2)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Saving a checkpoint|closed"):
        save() if dist.get_rank() == 0 else dist.barrier(over)
    assert time.monotonic() < begun + SECONDS
    training.model.reset()
    training.step()


@on_ranks(2, timeout=120)
def test_groups_that_no_model_has() -> None:
    """Agreements over different process groups cross, too, before there is a model."""
    groups = [dist.new_group(timeout=timedelta(minutes=30)) for _ in range(2)]
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)this one.*the other|the other.*this one"):
        agree(groups[dist.get_rank()], ("this one", "the other")[dist.get_rank()], list)
    assert time.monotonic() < begun + SECONDS
    fully_shard_model(zoo.Plain(), fsdp_unit_modules="auto").reset()  # models of earlier tests have ended, too


@on_ranks(3, timeout=120)
def test_a_third_rank_learns_of_it() -> None:
    training, folder = Training(), shared()
    training.step(2)
    message = ""
    begun = time.monotonic()
    try:
        if dist.get_rank() == 1:
            Checkpoints(folder).save(1, training.model)
        training.step()
    except RuntimeError as error:
        message = str(error)
    assert "Saving a checkpoint" in message
    assert time.monotonic() < begun + SECONDS
    dist.barrier()
    training.model.reset()
    training.step()


@on_ranks(2, timeout=120)
def test_ranks_that_are_slow_do_not_cross() -> None:
    """A rank that computes between two operations, while another waits in either of them, is no error."""
    training, folder = Training(), shared()
    training.step(2)
    checkpoints = Checkpoints(folder)
    with looking_often():
        for slow in range(2):
            for run in (lambda: checkpoints.save(1, training.model), training.evaluate):
                if dist.get_rank() == slow:
                    time.sleep(0.8)
                run()
    training.step()


def release(key: str) -> None:
    compat.default_store().set(key, "")


def released(key: str) -> None:
    compat.default_store().wait([key], timedelta(seconds=60))


@on_ranks(2, timeout=120)
def test_a_rank_that_is_gone_does_not_come() -> None:
    """A rank that has left its process group is not waited for in an agreement, though its process lives.

    Connections of a group that this agreement is not about stay open.
    """
    other: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])  # over the default group
    ranks = DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=30)), "cpu", mesh_dim_names=("dp",))
    model: Any = fully_shard_model(parity.build(zoo.Plain), ranks, fsdp_unit_modules=[zoo.Block])
    for each in (other, model):
        each(torch.ones(2, 8)).sum().backward()
    folder, orders_of = shared(), {each.sharded.coordinator.order for each in (other, model)}
    dist.barrier()
    if dist.get_rank() == 1:
        for each in orders_of:  # not all: models that other tests have left would end waits of later ones
            notices.tell_end(compat.default_store(), each, "had destroyed its process group", is_over=True)
        released(folder)
    else:
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="Rank 1 had destroyed its process group"):
            Checkpoints(folder).save(1, model)
        assert time.monotonic() < begun + SECONDS
        time.sleep(0.5)  # connections are closed after the error
        release(folder)
    dist.barrier()
    for each in orders_of:  # the rank comes back
        watchdog.forget_failure(compat.default_store(), each.group)
    dist.barrier()
    other.reset()  # later tests use the default group


@on_ranks(2, timeout=120)
def test_new_connections_outlive_a_finding() -> None:
    """What the watchdog has found before a group is connected again does not close the new connections."""
    training, group = Training(), dist.group.WORLD
    other: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])  # over the default group
    training.step()
    order, connect = other.sharded.coordinator.order, compat.reconnect
    watchdog.look()
    late = threading.Thread(target=lambda: watchdog._end(order, "a finding", {group.group_name}))

    def reconnect(closed: dist.ProcessGroup) -> bool:
        was_possible = connect(closed)
        late.start()
        late.join(0.5)  # it may wait for this thread
        return was_possible

    compat.break_connections(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "reconnect", reconnect)
        other.reset()
    late.join(60)
    assert order.stalled is None
    dist.barrier()
    training.step()


@on_ranks(2, timeout=120)
def test_a_deadlocked_thread_is_named() -> None:
    """A time-out names the line where the program of a rank waits for a lock, in a gather and in an agreement."""
    gone = dist.new_group()
    other = fully_shard_model(nn.Linear(4, 4), DeviceMesh.from_group(gone, "cpu", mesh_dim_names=("dp",)))
    dist.destroy_process_group(gone)  # of a model that still exists
    short = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=3)), "cpu", mesh_dim_names=("dp",))
    model: Any = fully_shard_model(parity.build(zoo.Plain), short, fsdp_unit_modules=[zoo.Block])
    folder, x, lock = shared(), torch.ones(2, 8), threading.Condition()
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()

    def end_deadlock(key: str) -> None:
        released(key)
        with lock:
            lock.notify()

    for number, run in enumerate((lambda: model(x).sum().backward(), lambda: Checkpoints(folder).save(1, model))):
        dist.barrier()
        if dist.get_rank() == 1:
            with lock:
                threading.Thread(target=end_deadlock, args=(f"{folder}/{number}",)).start()
                lock.wait(60)  # the deadlock
        else:
            with pytest.raises(RuntimeError) as found:
                run()
            release(f"{folder}/{number}")
            assert "ank 1 runs, and has been at" in str(found.value), found.value
            assert "lock.wait(60)  # the deadlock" in str(found.value), found.value
        dist.barrier()
        model.reset()
    del other


PROGRAM = """
import sys, torch, torch.distributed as dist
from torch import nn
from mfsdp_compile import fully_shard_model
rank, way, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
torch.manual_seed(0)
model = fully_shard_model(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), fsdp_unit_modules=[nn.Linear])
call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"}) if way == "compiled" else model
for step in range(4 - rank):
    call(torch.ones(2, 8)).sum().backward()
    model.zero_grad()
dist.barrier() if way != "ends" else None
"""


@pytest.mark.processes
@pytest.mark.long_unless("barrier")
@pytest.mark.parametrize("way", ["barrier", "ends", "compiled"])
def test_what_ranks_print_when_batches_run_out(way: str, tmp_path: Path) -> None:
    """Our message comes first, gloo's text at its end; torch does not warn of collectives that nobody waited for."""
    store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), way, str(store.port)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == 1
    for text in texts:
        assert "unwaited" not in text, text
        if "/gloo/" in text:
            error = text.partition("Traceback")[2]
            assert error.index("optimizer step") < error.index("/gloo/"), text
            assert "The backend's error: [" in error
            assert "direct cause" not in text
    assert "/gloo/" in texts[0]


@on_ranks(2, timeout=120)
def test_a_file_of_rows() -> None:
    """Torch warns when rows are pickled, and their file says what it is where nothing has the rows."""
    model: Any = fully_shard_model(parity.build(zoo.Plain), mesh(), fsdp_unit_modules=[zoo.Block])
    file = io.BytesIO()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        torch.save(model.state_dict(), file)
    assert sum("full_state_dict(model) on every rank" in str(each.message) for each in given) >= 1
    file.seek(0)
    held = torch.load(file)
    assert all(torch.equal(held[name].to_local(), rows.to_local()) for name, rows in model.state_dict().items())
    file.seek(0)
    if dist.get_rank() == 0:
        (path := Path(tempfile.mkdtemp()) / "rows.pt").write_bytes(file.getvalue())
        ended = subprocess.run([sys.executable, "-c", READ, str(path)], stdout=subprocess.PIPE, text=True, check=True)
        bare, trusted, imported = ended.stdout.split("----")
        assert "pickled.rows_of_one_rank was not an allowed global" in bare
        for text in (trusted, imported):
            assert "full_state_dict(model) on every rank" in text, ended.stdout


READ = """
import sys, torch
for trusts in (False, True, False):
    try:
        torch.load(sys.argv[1], weights_only=not trusts)
    except Exception as error:
        print(error)
    if trusts or "mfsdp_compile" not in sys.modules:
        print("----")
"""
