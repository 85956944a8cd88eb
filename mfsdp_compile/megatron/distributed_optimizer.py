"""A replacement for ``DistributedOptimizer``, as documented on Megatron-Core's FSDP page."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint

from mfsdp_compile.api import fully_shard_optimizer
from mfsdp_compile.convert.param_groups import param_to_param_group_map
from mfsdp_compile.sharded_module import unwrapped


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    model_chunks: Sequence[nn.Module],
    per_model_buffers: Sequence[Any] | None = None,
    *,
    dump_param_to_param_group_map: str | os.PathLike[str] | None = None,
) -> torch.optim.Optimizer:
    """Extend a torch optimizer for sharded parameters, in place.

    Does the same as :func:`~mfsdp_compile.fully_shard_optimizer`, and adds ``optimizer.sharded_state_dict()``.

    Args:
        optimizer: Built from the models' parameters after they were sharded.
        model_chunks: The sharded models, compiled or not.
        per_model_buffers: Their ``param_and_grad_buffer``, in the same order. None: taken from the models.
        dump_param_to_param_group_map: Folder for the map from parameters to groups, of Megatron-LM's flag of this name;
            see :func:`dump_param_to_param_group_map`. For one model. None: none is written.

    Returns:
        The same optimizer. Learning-rate schedulers and ``torch.distributed.checkpoint`` accept it as before.

    Raises:
        TypeError: If ``optimizer`` is not a torch optimizer (Megatron's own class takes a configuration first), or a
            model is not sharded.
        ValueError: If the optimizer holds parameters of other models, or the buffers do not belong to the models.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes a torch.optim.Optimizer first, got a {type(optimizer).__name__}: "
            "DistributedOptimizer(optimizer, [model])."
        )
    if isinstance(model_chunks, nn.Module):
        raise TypeError("DistributedOptimizer takes a list of models: DistributedOptimizer(optimizer, [model]).")
    owners = [unwrapped(model, "DistributedOptimizer").sharded for model in model_chunks]
    if per_model_buffers is not None and [id(each) for each in per_model_buffers] != [id(owner) for owner in owners]:
        raise ValueError(
            "per_model_buffers must be the buffers of model_chunks in order: pass [model.param_and_grad_buffer for "
            "model in model_chunks], or omit the argument."
        )
    for group in optimizer.param_groups:
        for param in group["params"]:
            handle = getattr(param, "mfsdp_handle", None)  # fully_shard_optimizer reports what is not sharded
            if handle is not None and not any(handle.bucket.owner is owner for owner in owners):
                raise ValueError(
                    f"The {type(optimizer).__name__} holds a parameter of shape {tuple(param.shape)} that belongs to "
                    f"none of the {len(owners)} models in model_chunks. Pass all models that it optimizes."
                )
    if dump_param_to_param_group_map is not None and len(model_chunks) != 1:
        raise ValueError(
            f"dump_param_to_param_group_map: {len(model_chunks)} models may have parameters of the same names. Call "
            "mfsdp_compile.megatron.dump_param_to_param_group_map for each, with folders of their own."
        )
    fully_shard_optimizer(optimizer)
    if dump_param_to_param_group_map is not None:
        _dump(dump_param_to_param_group_map, model_chunks[0], optimizer)
    optimizer.sharded_state_dict = types.MethodType(_sharded_state_dict, optimizer)  # type: ignore[attr-defined]
    return optimizer


def dump_param_to_param_group_map(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> None:
    """Write the number of each parameter's optimizer group, as ``--dump-param-to-param-group-map`` of Megatron-LM does.

    ``mfsdp print-torch-dcp-in-json`` makes the JSON file of it that conversion takes. The first rank writes.

    Args:
        folder: Becomes a folder in the format of ``torch.distributed.checkpoint``.
        model: The model, sharded or not.
        optimizer: Its optimizer, or several.

    Raises:
        ValueError: If a parameter that requires a gradient is in no group.
    """
    mapped = param_to_param_group_map(model, optimizer, prefix="module.module")
    if not dist.is_initialized() or dist.get_rank() == 0:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank writes, as intended
            checkpoint.save(dict(mapped), checkpoint_id=folder, no_dist=True)


_dump = dump_param_to_param_group_map  # DistributedOptimizer has an argument of this name


def _sharded_state_dict(
    optimizer: torch.optim.Optimizer, model_sharded_state_dict: Any = None, is_loading: bool = False
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()``, for ``torch.distributed.checkpoint``.

    The result can be loaded into, even before the first step. Megatron's arguments are ignored: state is keyed by
    parameter name, and always complete.
    """
    return optimizer.state_dict()
