"""Operators that draw random numbers: the values that one process would draw."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..redistribute import take_rows
from ..tensor import RowShardedTensor
from .arguments import about_to_write


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor from this rank's generator, and keep the local rows.

    With the same seed on every rank (as set by torch.manual_seed), these are the values that one process would draw.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return NotImplemented
    target: RowShardedTensor = args[0]
    fills = func._schema.is_mutable or func._schema.name.endswith("_like")  # else the tensor's values matter
    if not fills or not isinstance(target, RowShardedTensor) or any(isinstance(a, Tensor) for a in args[1:]):
        return NotImplemented
    for peer in range(target.row_split.count):  # all ranks draw for all counterparts, so that later draws are equal
        whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
        result = func(whole, *args[1:], **kwargs)
        if peer == target.row_split.number:
            drawn = result
    local = take_rows(drawn, target.row_split, target.topology.shard)
    if func._schema.is_mutable:
        about_to_write([target], overwrites=True)
        target._local_tensor.copy_(local)
        return target
    return target.with_local(local.clone())
