"""What a save leaves on the disk, and which run owns it: shared folders, full disks, copies, the order of files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import raises_everywhere
from pool import on_ranks, shared_folder
from torch import nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, load
from mfsdp_compile.checkpoint.manifest import read_manifest
from mfsdp_compile.checkpoint.saving import PublishingWriter


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    model = fully_shard_model(
        parity.build(lambda: zoo.Plain(layers=1), seed),
        fsdp_unit_modules=[zoo.Block],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=dtype),
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))


def names(root: Path) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in root.iterdir() if path.name.startswith("step-"))
    dist.barrier()
    return found


def save(checkpoints: Checkpoints, step: int, model: nn.Module) -> list[str]:
    """Save a checkpoint. Returns the warnings of the first rank, on all ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoints.save(step, model)
    said = [[str(warning.message) for warning in caught if "another run" in str(warning.message)]]
    dist.broadcast_object_list(said)
    return said[0]


# -- runs -------------------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=90)
def test_two_jobs_in_one_folder_lose_nothing() -> None:
    root = shared_folder()
    (first, _), (second, _) = make(), make(1)
    mine, its = Checkpoints(root, keep=1), Checkpoints(root, keep=1)
    assert save(mine, 1, first) == []
    (said,) = save(its, 1, second)
    runs = [dist.get_rank() or model.sharded.lineage.run for model in (first, second)]
    told = [runs]
    dist.broadcast_object_list(told)
    assert all(run in said for run in told[0])
    assert "step-00000001" in said
    assert "give each a folder of its own" in said
    assert names(root) == ["step-00000001", "step-00000001.1"]
    assert save(its, 2, second) == []  # it has already been warned
    (said,) = save(mine, 2, first)
    assert told[0][1] in said
    assert names(root) == ["step-00000002", "step-00000002.1"]  # each run has its own last checkpoint
    assert read_manifest(root / "step-00000002").run == told[0][1]  # type: ignore[union-attr]
    assert read_manifest(root / "step-00000002.1").run == told[0][0]  # type: ignore[union-attr]


@on_ranks(2, timeout=90)
def test_a_run_that_loads_takes_the_folder_over() -> None:
    root = shared_folder()
    first, _ = make()
    save(Checkpoints(root, keep=1), 1, first)
    for step in (2, 3):  # each is a new process in practice
        model, _ = make(step)
        checkpoints = Checkpoints(root, keep=1)
        restored = checkpoints.load(model)
        assert restored is not None and restored.step == step - 1
        assert save(checkpoints, step, model) == []
        assert names(root) == [f"step-{step:08}"]
    # The job whose folder was taken over still runs. It loses nothing, and neither do the others.
    (said,) = save(Checkpoints(root, keep=1), 2, first)
    assert "step-00000003" in said
    assert names(root) == ["step-00000002", "step-00000003"]


@on_ranks(2, timeout=90)
def test_a_damaged_checkpoint_that_was_passed_over_is_named() -> None:
    """Later starts say what was wrong with it, also those that have not tried to load it."""
    root = shared_folder()
    first, _ = make()
    save(Checkpoints(root), 1, first)
    second, _ = make(1)
    Checkpoints(root).load(second)
    save(Checkpoints(root), 2, second)
    (file,) = (path for path in (root / "step-00000002").glob("*.distcp") if path.name.startswith("__1"))
    if dist.get_rank() == 0:
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    third, _ = make(2)
    with pytest.raises(RuntimeError, match="damaged"):
        Checkpoints(root).load(third)
    load(root / "step-00000001", third)
    (said,) = save(Checkpoints(root), 3, third)
    fourth, _ = make(3)
    assert Checkpoints(root).load(fourth).step == 3
    (again,) = save(Checkpoints(root), 4, fourth)
    for warning in (said, again):
        assert "step-00000002: " in warning
        assert f"{file.name} has other contents than were written" in warning
    # A damaged manifest names no run.
    if dist.get_rank() == 0:
        (root / "step-00000002" / "manifest.json").write_text("{}")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Checkpoints(root).save(5, fourth)
    assert dist.get_rank() or any("skipped" in str(w.message) and "step-00000002" in str(w.message) for w in caught)


@on_ranks(2)
def test_a_lower_step_may_come_later() -> None:
    root = shared_folder()
    model, _ = make()
    checkpoints = Checkpoints(root, keep=1)
    for step in (9, 10, 5):
        checkpoints.save(step, model)
        assert names(root) == [f"step-{step:08}"]
    assert checkpoints.load(model).step == 5
    assert [read_manifest(path).serial for path in checkpoints.all()] == [2]  # type: ignore[union-attr]


@on_ranks(2)
def test_links_do_not_block_saves_and_are_not_followed() -> None:
    root, elsewhere = shared_folder(), shared_folder()
    model, _ = make()
    checkpoints = Checkpoints(root)
    checkpoints.save(0, model)
    dist.barrier()
    if dist.get_rank() == 0:
        (elsewhere / "precious").write_text("dear")
        (root / ".saving-1").symlink_to(elsewhere)
        (root / ".removing-x").symlink_to(elsewhere / "precious")
        (root / "latest").unlink()
        (root / "latest").symlink_to(elsewhere / "precious")
        (root / ".lock").unlink()
        (root / ".lock").symlink_to(elsewhere / "precious")
    dist.barrier()
    with raises_everywhere(CheckpointError, "The first rank cannot write"):
        checkpoints.save(1, model)
    dist.barrier()
    if dist.get_rank() == 0:
        (root / ".lock").unlink()
    dist.barrier()
    with raises_everywhere(CheckpointError, "is a link to"):
        checkpoints.load(model)
    assert checkpoints.save(0, model).name == "step-00000000.1"
    assert (root / "latest").read_text() == "step-00000000.1"
    assert (elsewhere / "precious").read_text() == "dear"
    dist.barrier()


# -- full disks -------------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=90)
def test_a_disk_that_is_full() -> None:
    """A save to a full disk raises and leaves earlier checkpoints intact.

    This test mounts a real disk, where this process may do so. test_checkpoint limits file sizes instead, which needs
    no privileges.
    """
    root = shared_folder() / "small"
    if dist.get_rank() == 0:
        root.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
        done = [subprocess.run(command, capture_output=True, check=False).returncode == 0]
    else:
        done = [False]
    dist.broadcast_object_list(done)
    if not done[0]:
        return
    try:
        small, _ = make()
        checkpoints = Checkpoints(root)
        checkpoints.save(0, small)
        large = fully_shard_model(nn.Linear(300, 300), fsdp_unit_modules=[nn.Linear])
        for attempt in (checkpoints.save, lambda *a: checkpoints.save_async(*a).result()):
            with raises_everywhere(
                CheckpointError, "the disk is full: ", "cannot be written to any more (ENOSPC)", " bytes were to be"
            ):
                attempt(1, large)
            with contextlib.suppress(CheckpointError):
                checkpoints.wait()
            assert names(root) == ["step-00000000"]
            assert not list(root.glob(".saving-*"))
        checkpoints.save(1, small)  # there is space again
        assert names(root) == ["step-00000000", "step-00000001"]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["umount", str(root)], check=True)


# -- contents and order of files --------------------------------------------------------------------------------------


@on_ranks(2, timeout=60)
def test_what_is_saved_is_what_was_there_when_the_save_began() -> None:
    root = shared_folder()
    model, optimizer = make()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    changed, real = threading.Event(), PublishingWriter.write_data

    def after_the_change(writer: PublishingWriter, *arguments: Any) -> Any:
        assert changed.wait(30)
        return real(writer, *arguments)

    before = [param.full_tensor().clone() for param in model.parameters()]
    states = [state["exp_avg"].full_tensor().clone() for state in optimizer.state.values()]
    PublishingWriter.write_data = after_the_change  # type: ignore[method-assign]
    try:
        done = Checkpoints(root).save_async(1, model, optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
            for state in optimizer.state.values():
                state["exp_avg"].fill_(7)
        changed.set()
        path = done.result()
    finally:
        PublishingWriter.write_data = real  # type: ignore[method-assign]
    load(path, model, optimizer)
    assert all(torch.equal(p.full_tensor(), b) for p, b in zip(model.parameters(), before, strict=True))
    now = [state["exp_avg"].full_tensor() for state in optimizer.state.values()]
    assert all(map(torch.equal, now, states))


@on_ranks(2)
def test_files_are_on_the_disk_before_they_have_their_names() -> None:
    root = shared_folder()
    model, _ = make()
    events: list[tuple[str, str]] = []
    written: dict[str, str] = {}  # what a file was called before it got its name
    sync, rename, replace = os.fsync, os.rename, os.replace

    def name(path: Any) -> str:
        return os.path.relpath(path, root)

    def watched_sync(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        events.append(("sync", name(os.readlink(f"/proc/self/fd/{number}"))))
        sync(descriptor)

    def watched_rename(source: Any, target: Any, **options: Any) -> None:
        events.append(("name", name(target)))
        rename(source, target, **options)

    def watched_replace(source: Any, target: Any, **folders: Any) -> None:
        folder = os.readlink(f"/proc/self/fd/{folders['dst_dir_fd']}") if folders else ""
        written[name(os.path.join(folder, target))] = name(os.path.join(folder, source))
        events.append(("name", name(os.path.join(folder, target))))
        replace(source, target, **folders)

    os.fsync, os.rename, os.replace = watched_sync, watched_rename, watched_replace
    try:
        Checkpoints(root).save(1, model)
    finally:
        os.fsync, os.rename, os.replace = sync, rename, replace
    rank = dist.get_rank()
    assert ("sync", f".saving-step-00000001/__{rank}_0.distcp") in events
    if rank == 0:
        at = {event: number for number, event in reversed([*enumerate(events)])}
        manifest, published = at["name", ".saving-step-00000001/manifest.json"], at["name", "step-00000001"]
        assert at["sync", ".saving-step-00000001/__0_0.distcp"] < manifest
        assert any(
            held.startswith(".saving-step-00000001/.metadata") for kind, held in events[:manifest] if kind == "sync"
        )
        assert (
            at["sync", written[".saving-step-00000001/manifest.json"]]
            < manifest
            < at["sync", ".saving-step-00000001"]
            < published
        )
        assert published < at["sync", "."] < at["name", "latest"]
        assert at["sync", written["latest"]] < at["name", "latest"]


@on_ranks(2)
def test_a_state_in_another_dtype_is_told() -> None:
    root = shared_folder()
    model, optimizer = make()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = Checkpoints(root).save(1, model, optimizer)
    other, its = make(1, torch.bfloat16)
    names_of = {f"optimizer.{name}.exp_avg" for name, _ in other.module.named_parameters()}
    said = "optimizer.enter.weight.exp_avg (torch.float32 there, torch.bfloat16 here)"
    with raises_everywhere(CheckpointError, "of another dtype (allow_cast)", said):
        load(path, other, its, allow_cast="model.*")
    restored = load(path, other, its, allow_cast="*")
    assert names_of <= set(restored.cast)


@on_ranks(2)
def test_microbatches_that_wait_are_forgotten_by_a_load() -> None:
    root = shared_folder()
    model, _ = make()
    path = Checkpoints(root).save(0, model)
    with model.no_sync():
        model(torch.randn(2, 8)).backward()
    assert model.sharded.grad_sync.microbatches == 1
    load(path, model)
    assert model.sharded.grad_sync.microbatches == 0
    Checkpoints(root).save(1, model)  # would raise if gradients were still deferred


@on_ranks(2)
def test_a_load_that_fails_names_no_other_rank() -> None:
    """A load that fails names no other rank. torch calls every rank 0 when it loads without communication."""
    root = shared_folder()
    model, _ = make()
    path = Checkpoints(root).save(0, model)
    dist.barrier()
    file = path / "__1_0.distcp"
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[:30] = bytes(30)
        file.write_bytes(content)
    dist.barrier()
    try:
        load(path, model, verify=False)
    except RuntimeError as error:
        said = str(error)
    else:
        said = ""
    assert "__1_0.distcp" in said
    assert "On rank 0" not in said
