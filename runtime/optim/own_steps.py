"""What steps an optimizer in place of its own ``step()``, for those who need not load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..memory.tensor import RowShardedTensor

FLAT_STEP, WHOLE_STEP, SHARDED_STEP = "mfsdp_flat_step", "mfsdp_whole_step", "mfsdp_sharded_step"
"""Attributes of optimizers; the last one, of their class."""


class StepsWhole(Protocol):
    """Steps an optimizer over whole parameters: a :class:`..guests.optimizers.whole_step.WholeStep`."""

    def owns(self, param: RowShardedTensor) -> bool: ...

    def take_owners(self, other: Any, copy_of: Mapping[RowShardedTensor, RowShardedTensor]) -> None: ...


def has_flat_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` is stepped over flat shards."""
    return FLAT_STEP in vars(optimizer)


def has_sharded_step(optimizer: torch.optim.Muon) -> bool:
    """Whether each matrix is orthogonalized on one rank; see :class:`..guests.optimizers.muon.ShardedMuon`."""
    return getattr(type(optimizer), SHARDED_STEP, False)


def whole_step_of(optimizer: torch.optim.Optimizer) -> StepsWhole | None:
    """Return what steps ``optimizer`` over whole parameters; None: it steps over shards."""
    found: StepsWhole | None = vars(optimizer).get(WHOLE_STEP)
    return found
