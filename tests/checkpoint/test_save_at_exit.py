"""A program that ends while a save is in progress, without ``wait()``: the save is finished first."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import server
from torch import nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.checkpoint.manifest import BLOCK_BYTES, damaged_files, read_manifest
from mfsdp_compile.checkpoint.saving import PublishingWriter

SECONDS = 30.0


def fails(rank: int) -> None:
    raise ValueError("the program's own")


def only_the_first_fails(rank: int) -> None:
    if rank == 0:
        fails(rank)


ENDS: dict[str, Callable[[int], Any]] = {
    "returns": lambda rank: None,
    "destroys its groups": lambda rank: dist.destroy_process_group(),
    "raises": fails,
    "raises on one rank": only_the_first_fails,
    "exits": lambda rank: sys.exit(3),
}


def program(rank: int, port: int, folder: str, end: str, said: Connection) -> None:
    """Save, and end as an interpreter ends: a forked process of multiprocessing would not."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of the process it was forked from
    store = dist.TCPStore("127.0.0.1", port, 2, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
    handler = logging.Handler()
    handler.emit = lambda record: said.send(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mfsdp_compile").addHandler(handler)
    torch.manual_seed(0)
    model: Any = fully_shard_model(nn.Linear(1024, 3 * BLOCK_BYTES // 2048))  # a file has blocks for two threads
    write = PublishingWriter.write_data

    def write_slowly(*args: Any) -> Any:
        time.sleep(0.5 + 0.5 * rank)
        return write(*args)

    PublishingWriter.write_data = write_slowly  # type: ignore[method-assign]
    Checkpoints(folder).save_async(1, model)
    status = 0
    try:
        ENDS[end](rank)
    except ValueError as error:
        sys.excepthook(type(error), error, None)
        status = 1
    except SystemExit as exit:
        status = int(str(exit.code))
    del model, store
    ctypes.pythonapi.Py_Exit(status)


@pytest.mark.long_if("exits", "raises")
@pytest.mark.processes
@pytest.mark.parametrize("end", ENDS)
def test_a_save_is_finished_before_the_program_ends(end: str, tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = server()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=program, args=(rank, store.port, str(tmp_path), end, pipes[rank][1]))
        for rank in range(2)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        said = [pipe.recv() if pipe.poll() else "" for pipe, _ in pipes]
        status = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join(10)
    print(end, status, said)
    assert said == ["", ""]
    expected = {"raises": [1, 1], "raises on one rank": [1, 0], "exits": [3, 3]}.get(end, [0, 0])
    assert status == expected
    assert_complete(tmp_path)


def assert_complete(root: Path) -> None:
    assert sorted(path.name for path in root.iterdir()) == [".lock", "latest", "step-00000001"]
    (path,) = Checkpoints(root).all()
    manifest = read_manifest(path)
    assert manifest is not None
    assert not damaged_files(path, manifest.files, sorted(manifest.files))
