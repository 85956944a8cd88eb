"""A rank ends its program before the others: their messages say how many steps each rank took."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import server
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile import fsdp2, fully_shard_model, fully_shard_optimizer

SECONDS = 30.0
FACE = "fsdp2"
SHORT = 3
"""Steps of rank 1."""


def train(way: str, mode: str, rank: int, port: int, said: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
    torch.set_num_threads(1)
    model: Any = parity.build(zoo.Plain)
    if mode == FACE:
        for module in model.modules():
            if isinstance(module, zoo.Block):
                fsdp2.fully_shard(module)
        call: Any = fsdp2.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        ranks = None
        if way == "waits elsewhere":
            own = dist.new_group(timeout=timedelta(minutes=30))
            ranks = DeviceMesh.from_group(own, "cpu", mesh_dim_names=("dp",))
        call = model = fully_shard_model(model, ranks, fsdp_unit_modules=[zoo.Block])
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if mode != EAGER:
            call = torch.compile(model, backend="mfsdp", options={"inner": mode})

    def step() -> None:
        call(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(SHORT):
        step()
    if rank == 1:
        if way == "error":
            sys.last_value = ValueError("no more data")  # as Python does with errors that end a program
        if way == "destroy":
            dist.destroy_process_group()
        if "waits" in way:
            with contextlib.suppress(RuntimeError):
                dist.barrier()
        atexit._run_exitfuncs()  # as at the end of a program
        os._exit(0)
    begun = time.monotonic()
    try:
        if way == "barrier":
            dist.barrier()
        step()
    except RuntimeError as error:
        text = str(error)
        if way == "barrier":  # an uncaught error
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                sys.excepthook(type(error), error, None)
            text = printed.getvalue()
        said.send((text, time.monotonic() - begun))
    os._exit(0)


SHORT_CASES = [("end", EAGER), ("error", AOT_EAGER), ("destroy", EAGER), ("waits", EAGER)]
"""Cases of ``make test``; ``make long`` has all."""

CASES = [
    *SHORT_CASES,
    *(
        pytest.param(way, mode, marks=pytest.mark.long)
        for way, mode in (
            *((way, mode) for way in ("end", "error", "destroy") for mode in (EAGER, AOT_EAGER, FACE)),
            ("barrier", EAGER),
            ("waits elsewhere", AOT_EAGER),
        )
        if (way, mode) not in SHORT_CASES
    ),
]


@pytest.mark.processes
@pytest.mark.parametrize(("way", "mode"), CASES)
def test_a_rank_takes_fewer_steps(way: str, mode: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = server()
    mine, its = context.Pipe(duplex=False)
    processes = [context.Process(target=train, args=(way, mode, rank, store.port, its)) for rank in range(2)]
    try:
        for process in processes:
            process.start()
        assert mine.poll(SECONDS + 60), "rank 0 still waits"
        text, took = mine.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert took < SECONDS
    assert ("gather " in text) == (way != "barrier"), text
    assert ("rank 0, after 3 optimizer steps: Rank 1" if way == "barrier" else "in its 4th optimizer step") in text, (
        text
    )
    if "waits" in way:
        assert f"Rank 1 waits after {SHORT} optimizer steps in a collective of the program itself" in text, text
        return
    how = {
        "error": "had ended its program with ValueError: no more data",
        "destroy": "had destroyed its process group",
    }.get(way, "had ended its program")
    assert f"Rank 1 {how} (after {SHORT} optimizer steps; its last: a step of SGD" in text, text
