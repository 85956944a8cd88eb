"""Starts processes of a program, receives their messages, and stops them."""

from __future__ import annotations

import os
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
    queue = mp.get_context("spawn").SimpleQueue()
    store = open_store()
    given = (work, ranks, store.port, backend, threads, arguments, queue)
    running = mp.start_processes(_process, given, ranks, join=False, daemon=True, start_method="spawn")
    assert running is not None  # with join=False
    result: Any = None
    try:
        is_over = False
        while not is_over:
            is_over = running.join(timeout=0.02)
            while not queue.empty():
                is_said, value = queue.get()
                if is_said:
                    yield value
                else:
                    result = value
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        raise RuntimeError(f"a rank failed:\n{error}") from None
    finally:
        for process in running.processes:
            process.kill()
    return result


def _process(
    rank: int,
    work: Callable[..., Any],
    ranks: int,
    port: int,
    backend: str,
    threads: int,
    arguments: tuple[Any, ...],
    queue: Any,
) -> None:
    torch.set_num_threads(threads)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    join(backend, rank, ranks, port)
    result = work(rank, lambda value: queue.put((True, value)), *arguments)
    if rank == 0:
        queue.put((False, result))
    dist.barrier()
    dist.destroy_process_group()
