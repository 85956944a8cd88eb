"""Where a bucket rests: its shard, the gradient of the shard and the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..geometry.topology import Topology
from .lane import Lane


@dataclass(frozen=True)
class Rest:
    """On the device that uses it. Guests derive other places."""

    def __str__(self) -> str:
        return ""

    def check(self, bucket: Any, topology: Topology) -> None:
        """Raise NotImplementedError if a bucket, a :class:`~..geometry.bucket_plan.BucketPlan`, cannot rest here."""

    def lane(self, lane: Lane, topology: Topology) -> Lane:
        """Return the lane of a bucket that rests here, for that of one that rests on the device."""
        return lane

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory, ``[numel]``."""
        return torch.empty(numel, dtype=dtype, device=device)

    def fetch(self, shard: Tensor, device: torch.device) -> Tensor:
        """Return a shard on the device: itself, or a copy."""
        return shard

    def settle(self, device: torch.device) -> None:
        """Wait until the CPU may read and write what rests here."""

    def settler(self, shard: Tensor) -> Callable[[], None] | None:
        """Return what waits until the CPU may read and write this shard; None if nothing need wait."""
        return None


ON_DEVICE = Rest()
