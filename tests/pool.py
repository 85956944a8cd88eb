"""Real processes that run test functions one after the other, and are stopped when one of them hangs or dies.

They are forked from a server that has imported everything (``preload.py``), so a pool starts in less than a second.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing as mp
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

_HERE = Path(__file__).parent
FOLDERS = [str(_HERE), *sorted({str(path.parent) for path in _HERE.glob("**/test_*.py")})]
"""Folders that test modules and their helpers are imported from."""

MANY = 8
"""Number of ranks from which a test belongs to the long set."""
TIMEOUT = 240.0
"""Seconds for one test on all ranks. Compilation is the slow part; the limit ends tests that hang."""


class RankError(AssertionError):
    """A test function failed on some ranks; the message has their tracebacks."""


def on_ranks(*world_sizes: int, timeout: float = TIMEOUT) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test function on every rank of a world, once for each size.

    The function runs in worker processes whose default process group is gloo. Its parameters come from
    ``pytest.mark.parametrize`` and must be picklable. Eight ranks on a machine of two cores take minutes, so such tests
    are in the long set.
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
    """One pool of processes per world size, created on first use.

    Processes that wait for a test cost a few percent of a core each, for the threads of their process groups. A pool is
    therefore stopped when a pool of another size is needed. Forking it again is quick.
    """

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds that tests have used so far, on all ranks."""
        return sum(pool.cpu_seconds for pool in self._pools.values())

    def of(self, world_size: int) -> Pool:
        if world_size not in self._pools:
            self._pools[world_size] = Pool(world_size)
        for size, pool in self._pools.items():
            if size != world_size:
                pool.stop()
        return self._pools[world_size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.stop()


class Pool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.cpu_seconds = 0.0
        self._workers: list[tuple[Any, Connection]] = []

    def start(self) -> None:
        context = server()
        environment = dict(os.environ)
        for rank in range(self.world_size):
            mine, its = context.Pipe()
            process = context.Process(target=_work, args=(its, rank, self.world_size, environment), daemon=True)
            process.start()
            its.close()
            self._workers.append((process, mine))
        _, first = self._workers[0]
        port = first.recv()
        for _, connection in self._workers:
            connection.send(port)

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
        deadline, is_worn = time.monotonic() + timeout, False
        results: dict[int, Sequence[Any]] = {}
        while len(results) < self.world_size and time.monotonic() < deadline:
            for rank, (process, connection) in enumerate(self._workers):
                if rank in results:
                    continue
                try:
                    if connection.poll(0.02):
                        *results[rank], seconds, its_is_worn = connection.recv()
                        self.cpu_seconds += seconds
                        is_worn |= its_is_worn
                    elif not process.is_alive():
                        results[rank] = (False, f"the process died with exit code {process.exitcode}")
                except (EOFError, ConnectionResetError):
                    process.join(5)
                    results[rank] = (False, f"the process died with exit code {process.exitcode}")
            if any(not good for good, _ in results.values()):
                # Other ranks may wait for the one that failed. If they have anything to report, they report it soon.
                deadline = min(deadline, time.monotonic() + 5)
        failures = {rank: what for rank, (good, what) in results.items() if not good}
        missing = [rank for rank in range(self.world_size) if rank not in results]
        if failures or missing:
            for rank in missing:  # they print their stacks to stderr
                os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
            time.sleep(1 if missing else 0)
            self.stop()
            parts = [f"rank {rank}:\n{what}" for rank, what in failures.items()]
            if missing:
                late = "were still running when others failed" if failures else f"did not finish in {timeout} s"
                parts.append(f"ranks {missing} {late}")
            raise RankError("\n".join(parts))
        if is_worn:
            self.stop()
        return [results[rank][1] for rank in range(self.world_size)]


def _destroy_groups() -> None:
    """Destroy all process groups that a test has created. Each has threads that wake up a hundred times a second."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # DTensor's cache does not distinguish meshes of the same ranks. The next test would get the meshes of this one.
    _clear_sharding_prop_cache()
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _is_worn() -> bool:
    """Whether the default group cannot be connected again often enough for another test: four times in all."""
    import torch.distributed as dist

    from mfsdp_compile.runtime.compat import gloo

    return gloo._reconnected.get(dist.group.WORLD, 0) > 2


def _changed_settings() -> str:
    """Return which of torch's settings are not its defaults. The next test on these ranks would run with them."""
    import torch

    found = {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        f"default dtype {torch.get_default_dtype()}": torch.get_default_dtype() is not torch.float32,
        f"default device {torch.get_default_device()}": torch.get_default_device().type != "cpu",
        "no gradients": not torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
    }
    return ", ".join(name for name, is_changed in found.items() if is_changed)


def shared_folder() -> Path:
    """Create a temporary folder, on rank 0, for all ranks."""
    import tempfile

    import torch.distributed as dist

    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    return Path(made[0])


def server() -> Any:
    """Return the fork server of this process. It has imported everything and done nothing else."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["preload"])
    before = os.environ.get("PYTHONPATH")
    paths = [*FOLDERS, *([] if before is None else [before])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # older Pythons use this
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the child processes that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def join(connection: Connection, rank: int, world_size: int, timeout: timedelta) -> int:
    """Initialize the default process group, over gloo. Return the port of its store.

    Rank 0 serves the store, at a port that no other process can take in between. It sends the port to the parent, which
    sends it to every rank.
    """
    import torch.distributed as dist

    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        connection.send(store.port)
    port: int = connection.recv()
    store = store or dist.TCPStore("127.0.0.1", port, world_size, timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    return port


def _work(connection: Connection, rank: int, world_size: int, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size))
    import faulthandler
    import gc
    import warnings

    import preload
    import torch

    preload.check_fork()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    warnings.filterwarnings("ignore", message=".*cpu_offload.*")
    port = join(connection, rank, world_size, timedelta(seconds=120))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    # Compile caches would skip the passes that tests check. Compiled C++ is still shared, because its cache key is the
    # source.
    functorch_config.enable_autograd_cache = False
    functorch_config.error_on_custom_op_aliasing = True  # elsewhere a warning
    inductor_config.fx_graph_cache = False
    used = 0.0  # the startup time counts for the first test
    while True:
        try:
            (module, qualname), params = connection.recv()
        except EOFError:
            return
        _destroy_groups()  # no rank is still connecting one by now
        try:
            torch.manual_seed(0)
            target: Any = importlib.import_module(module)
            for part in qualname.split("."):
                target = getattr(target, part)
            outcome = (True, getattr(target, "__wrapped__", target)(**params))
            if settings := _changed_settings():
                outcome = (False, f"the test leaves settings of torch to the next one: {settings}")
        except BaseException:
            outcome = (False, traceback.format_exc())
        finally:
            torch._dynamo.reset()
            gc.collect()
            gc.freeze()  # scanning caches and modules again took a third of a second per test and rank
        before, used = used, cpu_seconds()
        try:
            connection.send((*outcome, used - before, _is_worn()))
        except Exception:  # a result that cannot be pickled
            connection.send((False, traceback.format_exc(), used - before, True))
        sys.stdout.flush()
