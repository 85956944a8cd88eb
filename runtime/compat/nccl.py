"""NCCL: memory of its communicators, their abort, and its errors."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .distributed import nccl_class, process_group

__all__ = [
    "abort",
    "allocates",
    "allocator_settings",
    "cuda_driver_version",
    "deregister_memory",
    "is_of_nccl",
    "memory_pool",
    "nccl_backend",
    "register_memory",
    "supports_symmetric_memory",
    "warm_up",
]


def allocator_settings() -> str:
    """Return the settings of torch's allocator of CUDA memory: the newer environment variable, or the older."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def cuda_driver_version() -> int:
    """Return the newest version of CUDA that the driver supports: 1000 x major + 10 x minor."""
    return int(torch._C._cuda_getDriverVersion())


def nccl_backend(group: str, device: torch.device) -> Any:
    """Return the ``ProcessGroupNCCL`` that runs a group's collectives on a device; None if NCCL does not."""
    kind, found = nccl_class(), process_group(group)
    if kind is None or device.type not in {own.type for own in found._device_types}:
        return None
    backend: Any = found._get_backend(device)
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends.
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, kind) else None


def supports_symmetric_memory() -> bool:
    """Whether NCCL has symmetric windows: version 2.27 and later."""
    return torch.cuda.nccl.version() >= (2, 27)


def allocates(backend: Any) -> bool:
    """Whether torch allocates memory with NCCL: only where the driver supports multicast (NVLink switches)."""
    try:
        backend.mem_allocator  # noqa: B018  # raises where torch does not
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def memory_pool(backend: Any) -> Iterator[Any]:
    """Context in which CUDA memory is allocated by NCCL, in a new pool, which it returns."""
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        yield pool


def register_memory(backend: Any, pool: Any, symmetric: bool) -> None:
    """Register the memory of a pool with a communicator. Collective if ``symmetric``."""
    backend.register_mem_pool(pool, symm=symmetric)


def deregister_memory(backend: Any, pool: Any) -> None:
    backend.deregister_mem_pool(pool)


def abort(backends: Sequence[Any]) -> None:
    """Abort communicators, all at once.

    While NCCL aborts one, it frees memory, and CUDA then waits for the kernels of all others: one after the other, they
    would wait for each other until torch gives up.
    """
    threads = [threading.Thread(target=_abort, args=(backend,), daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the group's timeout has passed
        backend.abort()


def is_of_nccl(error: RuntimeError) -> bool:
    """Whether NCCL has raised an error, or its communicator was aborted."""
    return "NCCL" in str(error).partition("\n")[0]


def warm_up(group: str, device: torch.device) -> None:
    """Create the communicator of a group, which torch does at the first collective. A collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=process_group(group))
