"""Allocation of communication buffers: by torch, or by a function of the user."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import compat

Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""A function ``(numel, dtype, device)`` that returns a contiguous tensor ``[numel]`` with a storage of its own."""

ALIGNMENT = 16
"""Bytes. Triton's kernels assume that memory which torch allocates begins at a multiple."""


def fresh_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory ``[numel]`` of torch's allocator."""
    return torch.empty(numel, dtype=dtype, device=device)


class Allocator:
    """Checks the memory that a user's function allocates. Copies of a model share it.

    Args:
        allocate: The function.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._given: list[tuple[compat.StorageWeakRef, range]] = []
        """Storages that were returned, and their addresses."""

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the function's memory.

        Raises:
            ValueError, TypeError: It is not what was asked for, or something else uses it too.
        """
        memory = self._allocate(numel, dtype, device)
        asked = f"buffer_allocator was asked for {numel:,} elements in {dtype} on {device}, and returned "
        if type(memory) is not Tensor:
            raise TypeError(f"{asked}a {type(memory).__name__}. Return a torch.Tensor.")
        storage = memory.untyped_storage()
        addresses = range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
        self._given = [(given, place) for given, place in self._given if not given.expired()]
        wrong = _difference(memory, numel, dtype, device)
        if wrong is None and compat.references_to(storage) != compat.references_of_one_tensor():
            wrong = "a view of memory that other tensors refer to"
        if wrong is None and any(max(p.start, addresses.start) < min(p.stop, addresses.stop) for _, p in self._given):
            wrong = "memory that overlaps with a buffer it has returned before, which is in use"
        if wrong is not None:
            raise ValueError(
                f"{asked}{wrong}. Return a contiguous tensor of one dimension, of memory that nothing else uses."
            )
        self._given.append((compat.StorageWeakRef(storage), addresses))
        return memory


def _difference(memory: Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return how memory differs from what was asked for."""
    if memory.dtype != dtype:
        return f"{memory.dtype}"
    if memory.device != device:
        return f"memory on {memory.device}"
    if memory.shape != (numel,):
        return f"a tensor of shape {tuple(memory.shape)}"
    if not memory.is_contiguous():
        return f"a tensor of stride {memory.stride()}"
    if memory.requires_grad:
        return "a tensor that requires gradients"
    if memory.storage_offset() != 0:
        return f"a tensor that begins at element {memory.storage_offset():,} of its storage"
    if memory.data_ptr() % ALIGNMENT:
        return f"memory at an address that is not a multiple of {ALIGNMENT} bytes"
    return None
