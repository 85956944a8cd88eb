"""torchao, if it is installed, and models that it has converted to float8."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile.models.llama import Block, Llama, LlamaConfig

FOLDER = os.environ.get("MFSDP_TORCHAO", os.path.join(sys.prefix, "torchao"))
"""Where ``make`` puts it: transformers and peft, which look for it, are tested without."""
IS_THERE = importlib.util.find_spec("torchao") is not None or os.path.isdir(os.path.join(FOLDER, "torchao"))


def torchao() -> Any:
    """Import ``torchao.float8``."""
    if importlib.util.find_spec("torchao") is None:
        sys.path.append(FOLDER)
    logging.getLogger("torchao").setLevel(logging.ERROR)  # of kernels for GPUs that cannot be loaded
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torchao.float8 as float8
    return float8


def config(hidden: int = 48, layers: int = 2) -> LlamaConfig:
    return LlamaConfig(vocabulary=50, width=32, layers=layers, heads=4, kv_heads=2, hidden=hidden)


def convert(model: nn.Module, recipe: str = "tensorwise", where: str = "", **options: Any) -> nn.Module:
    """Convert linear layers whose names contain ``where``.

    The tensorwise recipe gathers in float8, unless told not to.
    """
    float8 = torchao()
    if recipe == "tensorwise":
        given = float8.Float8LinearConfig(**{"enable_fsdp_float8_all_gather": True, **options})
    else:
        given = float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(model, config=given, module_filter_fn=lambda module, name: where in name)


def swap(model: nn.Module, kind: str) -> None:
    """Replace the linear layers of MLPs by those of torchao's prototypes: ``"int8"`` or ``"mx"``, emulated."""
    torchao()
    if kind == "int8":
        from torchao.prototype.quantized_training import int8_mixed_precision_training
        from torchao.quantization import quantize_

        chosen = int8_mixed_precision_training(module_swap=True)
        quantize_(model, chosen, lambda module, name: isinstance(module, nn.Linear) and "feed_forward" in name)
        return
    from torchao.prototype.moe_training.config import KernelPreference
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear

    for module in [layer.feed_forward for layer in model.layers]:
        for name, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear):
                new = MXFP8Linear(
                    linear.in_features, linear.out_features, False, kernel_preference=KernelPreference.EMULATED
                )
                new.weight = linear.weight
                setattr(module, name, new)


def llama(dtype: torch.dtype = torch.bfloat16, hidden: int = 48, layers: int = 2, **options: Any) -> nn.Module:
    """A model of equal values, rounded to bfloat16, whose blocks are converted. 51 tokens occur nowhere as a size."""
    torch.manual_seed(0)
    return convert(Llama(config(hidden, layers)).bfloat16().to(dtype), where="layers", **options)


def loss_of(call: Callable[..., Tensor], number: int, rank: int = 0, shape: tuple[int, int] = (3, 18)) -> Tensor:
    tokens = torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(100 * number + rank))
    return F.cross_entropy(call(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: Any,
    call: Callable[..., Tensor],
    optimizer: Any,
    rank: int | None = None,
    steps: int = 4,
    microbatches: int = 1,
    precomputes: bool = True,
    **batch: Any,
) -> list[Tensor]:
    """Train as torchao's documentation says, with its scales computed after each step. Return losses.

    Args:
        rank: Which data to take. None: that of this rank.
        precomputes: False for models of which only some weights are tensor-parallel, for which FSDP2 cannot.
    """
    rank, losses = dist.get_rank() if rank is None else rank, []
    for step in range(steps):
        for micro in range(microbatches):
            loss = loss_of(call, microbatches * step + micro, rank, **batch)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if precomputes:
            torchao().precompute_float8_dynamic_scale_for_fsdp(model)
    return losses


def fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard a float32 model with FSDP2, which gathers in bfloat16 and float8, and reduces in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)
