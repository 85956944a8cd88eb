"""Registration of a model's communication buffers with NCCL: ``nccl_ub``.

NCCL copies what it sends and receives through buffers of its own, unless the memory was registered with the
communicator. With registered buffers it needs fewer of the GPU's multiprocessors, and with symmetric ones (the same
offset on all ranks, NCCL 2.27) it has faster algorithms.

All buffers are allocated at once, in one pool, and the pool is registered once with each communicator, in the same
order on all ranks: registering a window is a collective, and a pool that grew on one rank only would hang
(pytorch#191955). Afterwards, the pool is strict about symmetric memory: the same gather uses the same buffer on all
ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import compat
from .bucket import Bucket
from .comm_buffers import BufferKind, BufferPool


def kinds_of(buckets: Iterable[Bucket]) -> dict[BufferKind, int]:
    """Return the kinds of communication buffers that buckets use, and the number of each, in a fixed order."""
    found: dict[BufferKind, int] = {}
    for bucket in buckets:
        exchange, device = bucket.exchange, bucket.device
        for use, (capacity, number), dtype in (
            ("gather", exchange.gather_buffers, exchange.sent.dtype),
            ("gradients", exchange.gradient_buffers, exchange.comm_dtype),
        ):
            if capacity:
                found[BufferKind(use, capacity, dtype, device)] = number
    return found


def check_allocator(groups: Iterable[str], device: torch.device) -> None:
    """Raise if NCCL runs one of these groups, and torch does not allocate memory with it.

    Raises:
        RuntimeError: Buffers that NCCL allocates are then impossible on this machine.
    """
    backends = (compat.nccl_backend(group, device) for group in groups)
    if any(backend is not None and not compat.allocates(backend) for backend in backends):
        raise RuntimeError(
            "nccl_ub=True needs memory that NCCL allocates. Torch offers it only where the driver supports multicast, "
            f"which NVLink switches do, and {torch.cuda.get_device_name(device)} on this machine has none. Leave "
            "nccl_ub out; fsdp_double_buffer=True has the same buffers in torch's memory."
        )


class Registration:
    """The registration of one model's buffers.

    Args:
        pool: The model's communication buffers.
        symmetric: Whether to register symmetric windows, if NCCL has them.
    """

    def __init__(self, pool: BufferPool, symmetric: bool) -> None:
        self._pool = pool
        self._symmetric = symmetric
        self._end: weakref.finalize | None = None

    def of_copy(self, pool: BufferPool) -> Registration:
        """Return the registration of a copy of the model, whose buffers are in ``pool``.

        It is not active yet: registering is a collective, and one rank may copy a model alone.
        """
        return Registration(pool, self._symmetric)

    @property
    def is_expected(self) -> bool:
        """Whether buffers are registered, or will be when the first one is used."""
        return self.is_active or self._pool.before_use is not None

    @property
    def is_active(self) -> bool:
        return self._end is not None and self._end.alive

    def register(self, buckets: Sequence[Bucket]) -> bool:
        """Allocate and register all buffers. A collective of all ranks of the buckets' groups.

        Returns:
            Whether NCCL runs the groups. Otherwise the buffers stay as they are: nothing else needs registration.
        """
        self.end()
        self._pool.before_use = None
        kinds = kinds_of(buckets)
        if not kinds:
            return False
        device = buckets[0].device
        groups = dict.fromkeys(
            group for bucket in buckets for group in (bucket.exchange.gather_group, *bucket.lane.group_names) if group
        )
        backends = [(group, compat.nccl_backend(group, device)) for group in groups]
        backends = [(group, backend) for group, backend in backends if backend is not None]
        if not backends:
            return False
        symmetric = self._symmetric and compat.supports_symmetric_memory()
        self._pool.drop()
        with compat.memory_pool(backends[0][1]) as memory:
            self._pool.allocate_all(kinds)
        for group, backend in backends:
            compat.warm_up(group, device)
            compat.register_memory(backend, memory, symmetric)
        self._pool.is_strict = symmetric
        self._end = weakref.finalize(self, _deregister, [backend for _, backend in backends], memory)
        return True

    def end(self) -> None:
        """Deregister the buffers. Their memory is freed when no collective uses it any more."""
        if self._end is not None:
            self._end()
            self._end = None
            self._pool.is_strict = False
            self._pool.drop()


def _deregister(backends: Sequence[Any], memory: torch.cuda.MemPool) -> None:
    for backend in reversed(backends):
        with contextlib.suppress(RuntimeError):  # its process group was destroyed, and its registrations with it
            compat.deregister_memory(backend, memory)
