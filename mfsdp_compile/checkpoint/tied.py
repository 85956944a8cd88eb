"""Two entries of a checkpoint that go to one tensor: of a parameter that is tied here and was not when it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime.geometry.partition import own_rows
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor

from .errors import CheckpointError


def check_equal(directory: Path, twins: Sequence[tuple[str, str, str, str]], read: Mapping[str, Any]) -> None:
    """Compare entries that go to one tensor.

    Args:
        directory: The checkpoint, for messages.
        twins: Name and name, stored key and stored key of two entries.
        read: What was read of them, by stored key.

    Raises:
        CheckpointError: They differ, to the bit.
    """
    for first, second, first_key, key in twins:
        if not _same(read[first_key], read[key]):
            raise CheckpointError(
                f"{first!r} and {second!r} are of one parameter here, but {directory} has different values for them. "
                "Nothing was loaded. Load into a model that does not tie them, or leave the second out, with its "
                f"optimizer state: allow_unexpected={second!r}."
            )


def memory_beside(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for this rank's part of a tensor."""
    if not isinstance(tensor, RowShardedTensor):
        return torch.empty_like(tensor.detach(), dtype=dtype)
    local = torch.empty_like(tensor.rows().detach(), dtype=dtype)
    return RowShardedTensor.wrap(local, tensor.row_split, tensor.topology)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    mine, its = (own_rows(value) if isinstance(value, DTensor) else value for value in (one, other))
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    return torch.equal(*(value.detach().contiguous().view(-1).view(torch.uint8) for value in (mine, its)))
