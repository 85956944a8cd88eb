"""Communication buffers: memory that gathers and reductions use again and again, owned by the runtime.

Without them, each gather and each packed bucket of gradients gets fresh memory from the caching allocator. Buffers that
stay have the same addresses in every step, which NCCL's registration and CUDA graphs need, and do not fragment memory.

A buffer is handed out only while nobody else refers to its memory: no view, no tensor that autograd saved, and no
collective, because torch keeps the tensors of a collective until it has been awaited. Therefore a value in a buffer
cannot be overwritten while anything can still read it, whatever the schedule and whichever program. On a GPU, what
reads the buffer was queued on the current stream before its last reference was dropped, and a collective's stream waits
for the current stream. If all buffers of a kind are in use, the caller gets fresh memory, or an error if memory of any
other address would be wrong (:attr:`BufferPool.is_strict`).

(Megatron-FSDP's ``FixedPoolAllocator`` and ``MaxPoolAllocator`` assign buffers to units when the model is built, and
fail if one is in use.)
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .. import compat
from ..geometry.exchange import NO_BUFFERS, Buffers
from .allocation import Allocate, fresh_memory


class BufferKind(NamedTuple):
    """Buffers that can take each other's place.

    Args:
        use: ``"gather"`` or ``"gradients"``.
        capacity: Elements of each buffer.
        dtype, device: Dtype and device of each buffer.
    """

    use: str
    capacity: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.use}, {self.capacity:,} elements in {dtype} on {self.device}"


@dataclass(frozen=True)
class BufferPolicy:
    """Which buckets use communication buffers.

    Args:
        double: Two buffers for gathers and two for gradients, for each group of buckets of one size and dtype with at
            least two buckets: ``fsdp_double_buffer``.
        largest: All buckets of a dtype share buffers of the size of the largest one: ``maxpool_double_buffer``.
        singles: A bucket that has its size to itself gets a buffer of its own:
            ``fsdp_db_use_persist_buf_on_alloc_fail``.
    """

    double: bool = False
    largest: bool = False
    singles: bool = False


BUFFERS = 2
"""Number of buffers of a kind: one unit computes while the next one is gathered, or the previous one is reduced."""


class Sizes(NamedTuple):
    """What the communication buffers of a bucket depend on: elements and dtypes of gathers and of reductions."""

    numel: int
    sent_numel: int
    sent_dtype: torch.dtype
    comm_dtype: torch.dtype
    has_gradients: bool


def assign_all(buckets: Sequence[Sizes], policy: BufferPolicy) -> list[tuple[Buffers, Buffers]]:
    """Return the communication buffers of each of a model's buckets: for gathers, and for gradients."""
    gathers = assign_buffers([(bucket.sent_numel, bucket.sent_dtype) for bucket in buckets], policy)
    trained = [(bucket.numel, bucket.comm_dtype) for bucket in buckets if bucket.has_gradients]
    gradients = iter(assign_buffers(trained, policy))
    return [
        (gather, next(gradients) if bucket.has_gradients else NO_BUFFERS)
        for bucket, gather in zip(buckets, gathers, strict=True)
    ]


def assign_buffers(sizes: Sequence[tuple[int, torch.dtype]], policy: BufferPolicy) -> list[Buffers]:
    """Return the communication buffers of each bucket for one use.

    Args:
        sizes: Elements and dtype of each bucket.
    """
    if policy.largest:
        largest: dict[torch.dtype, int] = {}
        for numel, dtype in sizes:
            largest[dtype] = max(largest.get(dtype, 0), numel)
        return [Buffers(largest[dtype], BUFFERS) for _, dtype in sizes]
    if not policy.double:
        return [NO_BUFFERS] * len(sizes)
    alike = Counter(sizes)
    single = [Buffers(numel, 1) if policy.singles else NO_BUFFERS for numel, _ in sizes]
    return [Buffers(size[0], BUFFERS) if alike[size] > 1 else alone for size, alone in zip(sizes, single, strict=True)]


@dataclass(eq=False)
class _Buffer:
    """One buffer.

    Args:
        memory: ``[capacity]``.
        unused: Number of references to its storage while nobody uses it.
    """

    memory: Tensor
    storage: torch.UntypedStorage
    unused: int

    @classmethod
    def of(cls, memory: Tensor) -> _Buffer:
        storage = memory.untyped_storage()
        return cls(memory, storage, compat.references_to(storage))

    @property
    def is_free(self) -> bool:
        return compat.references_to(self.storage) == self.unused


@dataclass(eq=False)
class BufferPool:
    """The communication buffers of one model. They are allocated at their first use.

    Args:
        allocate: Function that allocates a buffer. The default is ``torch.empty``. Memory that is used if all buffers
            are in use is ``torch.empty``'s in any case.
        is_strict: Whether buffers are used in turn, without exception: on all ranks, the same gather then uses the same
            buffer. Collectives on symmetric memory are wrong otherwise.
    """

    allocate: Allocate = fresh_memory
    is_strict: bool = False
    is_complete: bool = False
    """Whether all buffers have been allocated."""
    before_use: Callable[[], object] | None = None
    """Called once, before the first buffer is taken."""
    fresh: int = 0
    """How often all buffers of a kind were in use, and fresh memory was used."""
    _buffers: dict[BufferKind, list[_Buffer]] = field(default_factory=dict)
    _turn: dict[BufferKind, int] = field(default_factory=dict)

    def references_if_alone(self, memory: Tensor) -> int:
        """Return the references to the storage of what :meth:`take` has returned, if nothing else refers to it."""
        address = memory.untyped_storage().data_ptr()
        buffers = itertools.chain.from_iterable(self._buffers.values())
        unused = (buffer.unused for buffer in buffers if buffer.memory.data_ptr() == address)
        return next((count + 1 for count in unused), compat.references_of_one_tensor())

    def take(self, kind: BufferKind, count: int, numel: int) -> Tensor:
        """Return memory ``[numel]`` that nobody uses. Its content is undefined.

        Args:
            count: Largest number of buffers of this kind.

        Raises:
            RuntimeError: The pool is strict, and the buffer whose turn it is is in use.
        """
        if self.before_use is not None:
            before_use, self.before_use = self.before_use, None
            before_use()
        buffers = self._buffers.setdefault(kind, [])
        count = len(buffers) if self.is_complete else count
        turn = self._turn.get(kind, 0) if self.is_strict else 0
        for index in range(turn, count):
            if index == len(buffers):
                buffers.append(self._new(kind))
            if buffers[index].is_free or (self.is_strict and self._is_free_now(buffers[index])):
                self._turn[kind] = (index + 1) % count
                return _poisoned(buffers[index].memory[:numel])
            if self.is_strict:
                raise RuntimeError(
                    f"A communication buffer ({kind}) is to be used again, but its content is still referred to: by a "
                    "tensor that the program keeps, for example a parameter that forward has read, or by a schedule "
                    f"that has more than {count} units in memory. Registered buffers are used in turn. Drop the "
                    "reference, or train without nccl_ub."
                )
        self.fresh += 1
        return _poisoned(torch.empty(numel, dtype=kind.dtype, device=kind.device))

    @staticmethod
    def _is_free_now(buffer: _Buffer) -> bool:
        """Whether a buffer is free once reference cycles have been collected: an exception may be part of one."""
        gc.collect()
        return buffer.is_free

    def allocate_all(self, kinds: Mapping[BufferKind, int]) -> None:
        """Allocate all buffers now, with the number of each kind. Afterwards there are never more.

        Torch's allocator allocates them in the memory pool that is in use.
        """
        for kind, count in kinds.items():
            self._buffers[kind] = [self._new(kind) for _ in range(count)]
        self.is_complete = True

    def _new(self, kind: BufferKind) -> _Buffer:
        with torch.inference_mode(False):  # what is allocated in inference also serves training
            return _Buffer.of(self.allocate(kind.capacity, kind.dtype, kind.device))

    @property
    def memory(self) -> list[Tensor]:
        """All buffers, each ``[capacity]``."""
        return [buffer.memory for buffers in self._buffers.values() for buffer in buffers]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.storage.nbytes() for buffers in self._buffers.values() for buffer in buffers)

    @property
    def addresses(self) -> dict[BufferKind, list[int]]:
        """Address of each buffer."""
        return {kind: [b.memory.data_ptr() for b in buffers] for kind, buffers in self._buffers.items()}

    def drop(self) -> None:
        """Forget all buffers. Their memory is freed when no collective uses it any more."""
        self._buffers.clear()
        self._turn.clear()
        self.is_complete = False

    def __deepcopy__(self, memo: dict[int, object]) -> BufferPool:
        return replace(self, is_strict=False, is_complete=False, before_use=None, fresh=0, _buffers={}, _turn={})


def _poisoned(memory: Tensor) -> Tensor:
    """Fill memory with NaN if ``MFSDP_POISON`` is set, so that a read before the data arrives is seen."""
    if os.environ.get("MFSDP_POISON") == "1":
        memory.fill_(float("nan") if memory.is_floating_point() else 0xFF)  # the byte is a NaN in float8 too
    return memory


class _Current(threading.local):
    pool: BufferPool | None = None


_thread = _Current()


def enter_pool(pool: BufferPool) -> None:
    """Let the code that this thread runs from here on use a model's pool."""
    _thread.pool = pool


def take(use: str, buffers: Buffers, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory ``[numel]`` from the pool of the model whose code this thread runs, with undefined content."""
    if buffers.capacity < numel or (pool := _thread.pool) is None:
        return torch.empty(numel, dtype=dtype, device=device)
    return pool.take(BufferKind(use, buffers.capacity, dtype, device), buffers.number, numel)
