"""Real processes for tests: started once per run, given test functions, stopped when one of them hangs or dies."""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

MANY = 8
"""Ranks that make a test one of the long set."""
TIMEOUT = 240.0
"""Seconds for one test on all ranks. Compiling is the slow part; a hang is what this is for."""


class RankError(AssertionError):
    """A test function failed on some ranks; the message has their tracebacks."""


def on_ranks(*world_sizes: int, timeout: float = TIMEOUT) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test function on every rank of a world, once for each size.

    The function runs in worker processes, with a gloo process group as the default one; its parameters come from
    ``pytest.mark.parametrize`` and must be picklable. Eight ranks on a machine of two cores take minutes: such tests are in
    the long set.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def test(world_size: int, pools: Pools, **params: Any) -> None:
            pools.of(world_size).run(function, timeout=timeout, **params)

        parameters = list(inspect.signature(function).parameters.values())
        kinds = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("world_size", "pools")]
        test.__signature__ = inspect.Signature(parameters + kinds)  # type: ignore[attr-defined]
        sizes = [pytest.param(size, marks=[pytest.mark.long] if size >= MANY else []) for size in world_sizes]
        return pytest.mark.processes(pytest.mark.parametrize("world_size", sizes)(test))

    return decorate


class Pools:
    """One pool of processes per world size, made when first asked for."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._pools: dict[int, Pool] = {}

    def of(self, world_size: int) -> Pool:
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size, self._environment)
        return self._pools[world_size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stop()


class Pool:
    def __init__(self, world_size: int, environment: dict[str, str]) -> None:
        self.world_size = world_size
        self._environment = environment
        self._workers: list[tuple[Any, Connection]] = []

    def start(self) -> None:
        context = mp.get_context("spawn")
        port = _free_port()
        for rank in range(self.world_size):
            mine, its = context.Pipe()
            process = context.Process(
                target=_work, args=(its, rank, self.world_size, port, self._environment), daemon=True
            )
            process.start()
            its.close()
            self._workers.append((process, mine))

    def stop(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join(10)
        self._workers.clear()

    def run(self, function: Callable[..., Any], *, timeout: float = TIMEOUT, **params: Any) -> list[Any]:
        """Call ``function(**params)`` on every rank; return what each returned."""
        if not self._workers:
            self.start()
        name = (function.__module__, function.__qualname__)
        for _, connection in self._workers:
            connection.send((name, params))
        deadline = time.monotonic() + timeout
        results: dict[int, tuple[bool, Any]] = {}
        while len(results) < self.world_size and time.monotonic() < deadline:
            for rank, (process, connection) in enumerate(self._workers):
                if rank in results:
                    continue
                try:
                    if connection.poll(0.02):
                        results[rank] = connection.recv()
                    elif not process.is_alive():
                        results[rank] = (False, f"the process died with exit code {process.exitcode}")
                except (EOFError, ConnectionResetError):
                    process.join(5)
                    results[rank] = (False, f"the process died with exit code {process.exitcode}")
            if any(not good for good, _ in results.values()):
                # The others may wait for the one that failed; what they have to say comes soon or not at all.
                deadline = min(deadline, time.monotonic() + 5)
        failures = {rank: what for rank, (good, what) in results.items() if not good}
        missing = [rank for rank in range(self.world_size) if rank not in results]
        if failures or missing:
            for rank in missing:  # where they are: on stderr
                os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
            time.sleep(1 if missing else 0)
            self.stop()
            parts = [f"rank {rank}:\n{what}" for rank, what in failures.items()]
            if missing:
                late = "were still running when others failed" if failures else f"did not finish in {timeout} s"
                parts.append(f"ranks {missing} {late}")
            raise RankError("\n".join(parts))
        return [results[rank][1] for rank in range(self.world_size)]


def _destroy_groups() -> None:
    """All that a test has made: each has threads that wake up a hundred times a second."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # DTensor's cache takes meshes of the same ranks for one, and would give the next test those of this one.
    _clear_sharding_prop_cache()
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _work(connection: Connection, rank: int, world_size: int, port: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size))
    import faulthandler
    import gc
    import warnings
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    warnings.filterwarnings("ignore", message=".*cpu_offload.*")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    # Compile caches would skip the passes that tests look at. Compiled C++ is still shared, by its source.
    functorch_config.enable_autograd_cache = False
    inductor_config.fx_graph_cache = False
    inductor_config.compile_threads = 1
    while True:
        try:
            (module, qualname), params = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            target: Any = importlib.import_module(module)
            for part in qualname.split("."):
                target = getattr(target, part)
            outcome = (True, getattr(target, "__wrapped__", target)(**params))
        except BaseException:
            outcome = (False, traceback.format_exc())
        finally:
            torch._dynamo.reset()
            gc.collect()
            _destroy_groups()
        try:
            connection.send(outcome)
        except Exception:  # a result that cannot be pickled
            connection.send((False, traceback.format_exc()))
        sys.stdout.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
