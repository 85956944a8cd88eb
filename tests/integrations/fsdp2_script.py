"""A training script written for FSDP2, in the shape of torchtitan's: only what ``api`` stands for changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mfsdp_compile.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocabulary=64, width=32, layers=3, heads=4, kv_heads=2, hidden=48)


def apply_ac(model: Llama) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))


def apply_compile(model: Llama, backend: str) -> None:
    for block in model.layers:
        block.compile(backend=backend, fullgraph=True)


def apply_fsdp(api: Any, model: Llama, mesh: DeviceMesh) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    api.fully_shard(model.embedding, reshard_after_forward=True, **config)
    for block in model.layers:
        api.fully_shard(block, reshard_after_forward=True, **config)
    api.fully_shard([model.norm, model.head], reshard_after_forward=False, **config)
    api.fully_shard(model, **config)


def initial() -> dict[str, Tensor]:
    """Return whole weights on rank 0, which has read them from a file, say."""
    torch.manual_seed(0)
    return Llama(CONFIG).state_dict() if dist.get_rank() == 0 else {}


def train(
    api: Any, folder: Path, backend: str | None, replicas: int, steps: int = 4
) -> tuple[list[float], dict[str, Tensor]]:
    """Train, save after two steps, start again from the checkpoint, and go on.

    Args:
        api: ``torch.distributed.fsdp``, or ``mfsdp_compile.fsdp2``.
        backend: Backend to compile each block with; None: eager.
        replicas: Ranks that hold the same shards.

    Returns:
        The loss of each step on this rank, and all weights.
    """
    ranks = dist.get_world_size()
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    losses: list[float] = []
    for first in (0, 2):
        with torch.device("meta"):
            model = Llama(CONFIG)
        apply_ac(model)
        if backend is not None:
            apply_compile(model, backend)
        apply_fsdp(api, model, mesh)
        model.to_empty(device="cpu")
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        if first == 0:
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, initial(), options=options)
        else:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(states, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        for step in range(first, first + steps // 2):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            tokens = torch.randint(0, 64, (4, 17), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm)
            optimizer.step()
            losses.append(loss.item())
        if first == 0:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, checkpoint_id=folder)
    return losses, {
        name: param.full_tensor() for name, param in model.state_dict().items() if isinstance(param, DTensor)
    }
