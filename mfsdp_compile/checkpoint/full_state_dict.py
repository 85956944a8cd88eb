"""Full state dicts on one rank. Peak memory exceeds the result by one bucket, and pinned memory of two batches.

On gloo, the other ranks, which have no result, need two buckets: gloo makes a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.bucket import Bucket, ParamHandle
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.optim.own_steps import whole_step_of
from mfsdp_compile.runtime.optim.state import parameter_names
from mfsdp_compile.runtime.owner import owner_of
from mfsdp_compile.runtime.ranks.agreement import errors_for_all

from .host_copies import Copies, HostCopies
from .weights import ShardedWeights

__all__ = ["full_optimizer_state_dict", "full_state_dict"]


def full_state_dict(model: nn.Module, rank: int | None = 0) -> dict[str, Any]:
    """Return the state dict of the unsharded model, in CPU memory. Collective.

    Parameters are gathered bucket by bucket: no rank ever holds two copies of the model, and the other ranks hold none.

    Args:
        model: The sharded model, of ``fully_shard_model`` or :mod:`mfsdp_compile.fsdp2`. Names are those of its
            module, dtypes those of the shards.
        rank: The rank that gets the state dict, in the process group of the model's ranks. None: all ranks.

    Returns:
        Plain tensors by name, including buffers; tied parameters share one tensor. Empty on other ranks.
    """
    weights = ShardedWeights.of(model, "full_state_dict")
    weights.check("full_state_dict")
    mine = rank is None or dist.get_rank(weights.everyone) == rank
    state: dict[str, Any] = {}
    with errors_for_all(weights.everyone, "full_state_dict") as deferred, weights.in_step():
        first_name = {id(param): name for name, param in weights.module.named_parameters()}
        wholes: dict[str, Tensor] = {}
        copies: HostCopies[str] = HostCopies()
        for param, whole in weights.wholes():
            if mine and deferred.error is None:
                with deferred.errors():
                    wholes.update(copies.add(first_name[id(param)], whole))
            del whole
        if mine and deferred.error is None:
            with deferred.errors():
                wholes.update(copies.rest())
                state = _with_values(weights.module, wholes, first_name)
    return state


def _with_values(module: nn.Module, wholes: dict[str, Tensor], first_name: Mapping[int, str]) -> dict[str, Any]:
    """Return the module's state dict with these parameters, and copies of everything else."""
    params = dict(module.named_parameters(remove_duplicate=False))
    copies: HostCopies[str] = HostCopies()
    state: dict[str, Any] = dict(module.state_dict())
    for name, value in list(state.items()):
        if name in params:
            state[name] = wholes[first_name[id(params[name])]]
        elif isinstance(value, Tensor):
            state.update(copies.add(name, value))
    state.update(copies.rest())
    return state


@torch.no_grad()
def full_optimizer_state_dict(optimizer: torch.optim.Optimizer, rank: int | None = 0) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with full tensors in CPU memory, gathered bucket by bucket. Collective.

    Args:
        optimizer: Extended by ``fully_shard_optimizer``.
        rank: The rank that gets the state dict, in the default process group. None: all ranks.

    Returns:
        A state dict for ``optimizer.load_state_dict``, sharded or not. Empty on other ranks.
    """
    mine = rank is None or dist.get_rank() == rank
    sharded = optimizer.state_dict()
    if whole_step_of(optimizer) is not None:
        return _from_owners(sharded, rank)
    state: dict[Any, dict[str, Any]] = {name: dict(held) for name, held in sharded["state"].items()}
    copies: HostCopies[tuple[Any, str]] = HostCopies()

    def put(done: Copies[tuple[Any, str]]) -> None:
        for (name, key), copy in done:
            state[name][key] = copy

    model = _model_of(optimizer)
    with errors_for_all(model.everyone, "full_optimizer_state_dict") as deferred, model.coordinator.in_step():
        for place, whole in _wholes(optimizer, sharded["state"]):
            if mine and deferred.error is None:
                with deferred.errors():
                    put(copies.add(place, whole))
            del whole
        if deferred.error is None:
            with deferred.errors():
                put(copies.rest())
    return {**sharded, "state": state} if mine else {}


def _model_of(optimizer: torch.optim.Optimizer) -> ShardedModel:
    """Return the model that the optimizer steps."""
    owners = (owner_of(param) for group in optimizer.param_groups for param in group["params"])
    return next(owner for owner in owners if isinstance(owner, ShardedModel))


def _wholes(
    optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, Any]]
) -> Iterator[tuple[tuple[Any, str], Tensor]]:
    """Yield name of parameter and of state, and the full tensor, for each tensor of the state. A collective.

    What is split like parameters is gathered by bucket, like them.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    handles: dict[Any, ParamHandle | None] = {
        name: getattr(param, "mfsdp_handle", None)
        for name, param in zip(parameter_names(optimizer), params, strict=True)
    }
    together: dict[tuple[Bucket, str, torch.dtype], dict[int, tuple[Any, RowShardedTensor]]] = {}
    for name, held in state.items():
        for key, value in held.items():
            handle = handles.get(name)
            if (
                isinstance(value, RowShardedTensor)
                and handle is not None
                and value.row_split is handle.bucket.splits[handle.index]
                and value.is_complex() == handle.bucket.plan.is_complex
            ):
                together.setdefault((handle.bucket, key, value.dtype), {})[handle.index] = (name, value)
            elif isinstance(value, Tensor):
                yield (name, key), value.full_tensor() if isinstance(value, DTensor) else value
    for (bucket, key, _), values in together.items():
        parts = bucket.gather_shards({index: value.to_local() for index, (_, value) in values.items()}, f"all {key}")
        for index, (name, _) in values.items():
            yield (name, key), bucket.splits[index].assemble(parts[index])
        del parts


def _from_owners(state_dict: dict[str, Any], rank: int | None) -> dict[str, Any]:
    """Return a state dict of all parameters, each of whose state is in the state dict of its owner only."""
    own = compat.tree_map_only(Tensor, lambda tensor: tensor.cpu(), state_dict["state"])
    ranks = dist.get_world_size()
    found: list[Any] | None = [None] * ranks if rank is None or dist.get_rank() == rank else None
    if rank is None:
        dist.all_gather_object(found, own)
    else:
        dist.gather_object(own, found, dst=rank)
    if found is None:
        return {}
    state = {name: held for of_rank in reversed(found) for name, held in of_rank.items() if held}
    return {**state_dict, "state": state}
