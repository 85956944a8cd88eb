"""Stages of plug-ins: the same bits as the strategy's lane, in every mode; refused if they lie, or mean something else."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from strangers import STRANGERS
from torch import Tensor

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.doctor import mesh_arguments

STRATEGIES = (
    *("no_shard", "optim", "optim_grads", "optim_grads_params"),
    *("HSDP optim", "HSDP optim_grads_params", "HFSDP"),
)
MICROBATCHES = 2


def make(strategy: str, mode: str, *plugins: Any, **options: Any) -> tuple[Any, Any]:
    model = fully_shard_model(
        parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block], plugins=plugins, **mesh_arguments(strategy), **options
    )
    if mode == EAGER:
        return model, model
    return model, torch.compile(model, backend="mfsdp", options={"inner": mode})


def trained(model: Any, call: Any, steps: int = 3) -> list[Tensor]:
    """Return losses, gradients and parameters of steps of microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for data in parity.batches(steps * MICROBATCHES).chunk(steps):
        for number, micro in enumerate(data):
            model.is_last_microbatch = number == len(data) - 1
            loss = call(micro[dist.get_rank()])
            loss.backward()
            found.append(loss.detach())
        found += [param.grad._local_tensor.clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [param._local_tensor.detach().clone() for param in model.parameters()]
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", STRANGERS)
@on_ranks(4)
def test_the_same_bits(kind: str, strategy: str) -> None:
    """Eager and compiled, and, where a stage is exact, as without it."""
    eager = trained(*make(strategy, EAGER, STRANGERS[kind]))
    compiled = trained(*make(strategy, AOT_EAGER, STRANGERS[kind]))
    assert all(torch.equal(ours, its) for ours, its in zip(eager, compiled, strict=True))
    plain = trained(*make(strategy, EAGER))
    if kind != "in pairs":
        assert all(torch.equal(ours, its) for ours, its in zip(eager, plain, strict=True))
    fused = trained(*make(strategy, INDUCTOR, STRANGERS[kind]))
    for ours, its in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-5)  # float32 sums in another order, three steps
