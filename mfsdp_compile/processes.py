"""Starts processes of a program, receives their messages, and stops them."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .runtime import compat


def open_store() -> dist.TCPStore:
    """Open a store for ranks on this machine, at a port that the system chooses, so that no other program can take it.

    It serves as long as the caller keeps it, and no other machine. Ranks connect to its ``port`` with :func:`join`.
    """
    return compat.serve_store("127.0.0.1", dist.default_pg_timeout)


def join(backend: str, rank: int, ranks: int, port: int) -> None:
    """Create the default process group of this process, through a store of :func:`open_store`."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    store = dist.TCPStore("127.0.0.1", port, ranks, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def run_ranks(
    work: Callable[..., Any], ranks: int, *arguments: Any, backend: str, threads: int
) -> Generator[Any, None, Any]:
    """Run ``work(rank, say, *arguments)`` on every rank, in a process group.

    Args:
        work: A module-level function. What it passes to ``say`` is yielded here.
        backend: Backend of the process group.
        threads: Threads per process.

    Returns:
        The result of rank 0.

    Raises:
        RuntimeError: If a rank raised (the message contains its traceback) or died. The others are stopped.
    """
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    store = open_store()
    processes = [
        context.Process(
            target=_process, args=(work, rank, ranks, store.port, backend, threads, arguments, queue), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    result: Any = None
    finished = 0
    try:
        while finished < ranks:
            if queue.empty():
                dead = [p for p in processes if p.exitcode not in (None, 0)]
                if dead and queue.empty():
                    raise RuntimeError(f"a rank died with exit code {dead[0].exitcode}")
                time.sleep(0.02)
                continue
            kind, value = queue.get()
            if kind == "said":
                yield value
            elif kind == "failed":
                raise RuntimeError(f"a rank failed:\n{value}")
            else:
                finished += 1
                result = value if value is not None else result
    finally:
        for process in processes:
            process.join(0.5 if process.exitcode is None else None)
            process.kill()
    return result


def _process(
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    port: int,
    backend: str,
    threads: int,
    arguments: tuple[Any, ...],
    queue: Any,
) -> None:
    torch.set_num_threads(threads)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        join(backend, rank, ranks, port)
        result = work(rank, lambda value: queue.put(("said", value)), *arguments)
        queue.put(("done", result if rank == 0 else None))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        queue.put(("failed", f"rank {rank}:\n{traceback.format_exc()}"))
        raise SystemExit(1) from None
