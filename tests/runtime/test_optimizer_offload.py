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

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy
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


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@on_ranks(2)
def test_strategies(strategy: int) -> None:
    data = batches(2)
    options = {"precision": BF16, "microbatches": 2}

    def model() -> nn.Module:
        return zoo.Plain().bfloat16()

    for sync in (True, False):
        given = {"zero_dp_strategy": strategy, "sync_model_each_microbatch": sync}
        plain, *offloaded = (
            train_sharded(model, mode, data.bfloat16(), **options, sharding=sharding | given)
            for mode, sharding in ((EAGER, {}), (EAGER, OFFLOADED), (AOT_EAGER, OFFLOADED))
        )
        for run in offloaded:
            assert_bitwise(plain, run)
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
