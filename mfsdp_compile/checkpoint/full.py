"""Whole state dicts, on one rank, in the memory of one bucket more than they need."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfsdp_compile.wrapper import unwrapped

__all__ = ["full_optimizer_state_dict", "full_state_dict"]


def full_state_dict(model: nn.Module, rank: int | None = 0) -> dict[str, Any]:
    """The state dict that the model would have if it were not sharded, in the CPU's memory. Collective.

    Gathered bucket by bucket: no rank ever holds two copies, and the other ranks none.

    Args:
        model: names are those of ``model.module``; dtypes those of the shards.
        rank: in the process group of the model's ranks, that gets it; None: all do.

    Returns:
        Ordinary tensors by name, tied parameters sharing one, buffers included; on other ranks nothing.
    """
    model = unwrapped(model, "full_state_dict")
    mine = rank is None or dist.get_rank(model.sharded.everyone) == rank
    wholes: dict[str, Tensor] = {}
    for name, whole in model.full_parameters():
        if mine:
            wholes[name] = whole.to("cpu", copy=True)
        del whole
    if not mine:
        return {}
    first_name: dict[int, str] = {}
    for name, param in model.module.named_parameters(remove_duplicate=False):
        first_name.setdefault(id(param), name)
    params = dict(model.module.named_parameters(remove_duplicate=False))
    state: dict[str, Any] = {}
    for name, value in model.module.state_dict().items():
        if name in params:
            state[name] = wholes[first_name[id(params[name])]]
        else:
            state[name] = value.to("cpu", copy=True) if isinstance(value, Tensor) else value
    return state


@torch.no_grad()
def full_optimizer_state_dict(optimizer: torch.optim.Optimizer, rank: int | None = 0) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors in the CPU's memory, gathered one by one. Collective.

    Args:
        optimizer: extended by ``fully_shard_optimizer``.
        rank: in the default process group, that gets it; None: all do.

    Returns:
        As ``optimizer.load_state_dict`` takes it, sharded or not; on other ranks nothing.
    """
    mine = rank is None or dist.get_rank() == rank
    sharded = optimizer.state_dict()
    state: dict[Any, dict[str, Any]] = {}
    for name, held in sharded["state"].items():
        state[name] = {}
        for key, value in held.items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if mine:
                state[name][key] = whole.to("cpu", copy=True) if isinstance(whole, Tensor) else whole
            del whole
    return {**sharded, "state": state} if mine else {}
