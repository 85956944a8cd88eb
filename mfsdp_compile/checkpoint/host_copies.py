"""Copies of many tensors in CPU memory."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key")
Copies = list[tuple[Key, Tensor]]
"""Copies with their keys."""

BATCH_BYTES = 64 << 20
"""Bytes that are copied from a GPU between two waits. Two batches of pinned memory are in use at a time."""


class HostCopies(Generic[Key]):
    """Copies tensors to CPU memory. A tensor may be dropped as soon as it has been added.

    A GPU's tensors are queued in batches for a copy to pinned memory, and the host waits once for each batch. Results
    are in ordinary memory: pinned memory of the size of a model would be missed elsewhere, and torch would keep it.
    While the host copies one batch there, the GPU goes on with the next.

    Copies of a GPU's tensors are complete in the order in which they were added, those of the CPU's at once.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[torch.cuda.Event, Copies[Key]]] = deque()
        self._next: Copies[Key] = []
        self._bytes = 0
        self._device = torch.device("cpu")

    def add(self, key: Key, tensor: Tensor) -> Copies[Key]:
        """Start to copy a tensor. Returns copies that are complete, with their keys."""
        if tensor.device.type != "cuda":
            return [(key, tensor.to("cpu", copy=True))]
        if self._next and tensor.device != self._device:
            self._close()
        self._device = tensor.device
        pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._next.append((key, pinned.copy_(tensor, non_blocking=True)))
        self._bytes += tensor.nbytes
        if self._bytes < BATCH_BYTES:
            return []
        self._close()
        return self._finish() if len(self._started) > 1 else []

    def rest(self) -> Copies[Key]:
        """Wait for all copies that were not returned yet, and return them."""
        if self._next:
            self._close()
        return [copy for _ in range(len(self._started)) for copy in self._finish()]

    def _close(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._started.append((event, self._next))
        self._next, self._bytes = [], 0

    def _finish(self) -> Copies[Key]:
        event, copies = self._started.popleft()
        event.synchronize()
        return [(key, pinned.clone()) for key, pinned in copies]
