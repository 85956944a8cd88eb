"""Main weights, gradients and optimizer state in host memory, and what is gathered on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, assert_bitwise, batches, build, shard, train_sharded
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import mesh_arguments

OFFLOADED = {"offload_policy": OptimizerOffloadPolicy()}
BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


@pytest.mark.parametrize("model", [zoo.Plain, zoo.Uneven, zoo.Tied, zoo.FrozenParameters, zoo.Unused, zoo.Checkpointed])
@on_ranks(2)
def test_same_numbers(model: type[nn.Module]) -> None:
    data = batches(3)
    plain = train_sharded(model, EAGER, data)
    for mode in (EAGER, AOT_EAGER):
        assert_bitwise(plain, train_sharded(model, mode, data, sharding=OFFLOADED))
    torch.compiler.reset()


def trained(mode: str, sharding: dict[str, Any], mesh: str | None = None, make: Any = torch.optim.AdamW, **how: Any) -> list[Tensor]:
    """Train with accumulation, clipping and a GradScaler. Return norms, and this rank's gradients and parameters."""
    optimizer_options = how.pop("optimizer", {})
    sharded, call = shard(build(lambda: zoo.Plain().bfloat16()), mode, precision=BF16, sharding=sharding)
    optimizer = fully_shard_optimizer(make(sharded.parameters(), lr=0.01), **optimizer_options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found: list[Tensor] = []
    for step in batches(2).bfloat16():
        first, last = step[dist.get_rank()].chunk(2)
        with sharded.no_sync():
            scaler.scale(call(first)).backward()
        scaler.scale(call(last)).backward()
        sharded.finish_grad_sync()
        scaler.unscale_(optimizer)
        found.append(nn.utils.clip_grad_norm_(sharded.parameters(), 0.1))
        found += [param.grad.to_local().clone() for param in sharded.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found + [param.detach().to_local().clone() for param in sharded.parameters()]


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@on_ranks(2)
def test_strategies(strategy: int) -> None:
    """Accumulation without synchronization, clipping, a GradScaler and bfloat16, for everything that can be sharded."""
    plain, *offloaded = (
        trained(mode, sharding | {"zero_dp_strategy": strategy})
        for mode, sharding in ((EAGER, {}), (EAGER, OFFLOADED), (AOT_EAGER, OFFLOADED))
    )
    for run in offloaded:
        assert all(map(torch.equal, plain, run))
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["HSDP optim_grads_params", "HFSDP"])
@on_ranks(4)
def test_two_dimensions(kind: str) -> None:
    data = batches(2)
    meshes = [mesh_arguments(kind) | each for each in ({}, OFFLOADED, OFFLOADED)]
    plain, *offloaded = (
        train_sharded(zoo.Plain, mode, data, sharding=mesh)
        for mode, mesh in zip((EAGER, EAGER, AOT_EAGER), meshes, strict=True)
    )
    for run in offloaded:
        assert_bitwise(plain, run)
    torch.compiler.reset()
