"""``deterministic()``: two runs are equal to the bit, and what is added over ranks is added in their order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import (
    MixedPrecisionPolicy,
    deterministic,
    fully_shard_model,
    fully_shard_optimizer,
    seed_step,
)
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.parallel import pipeline_parallel
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.groups import Group


@contextlib.contextmanager
def determinism() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        deterministic()
        try:
            yield
        finally:
            deterministic(False)


class Noisy(nn.Module):
    """Blocks with dropout, and a gather whose gradient CUDA adds in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            hidden = nn.functional.dropout(block(hidden), 0.3, self.training)
        return hidden.square().mean()


def train(strategy: str, mode: str, steps: Sequence[int], buffers: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """Return the losses, and the parameters after the last step."""
    model = fully_shard_model(
        parity.build(Noisy), fsdp_unit_modules=[zoo.Block], fsdp_double_buffer=buffers, **mesh_arguments(strategy)
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    losses = []
    for step in steps:
        words = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        seed_step(7, step)
        loss = call(words)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [param.full_tensor() for param in model.parameters()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.long_unless("*-HSDP optim_grads_params-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params", "HSDP optim_grads_params", "HFSDP"])
@on_ranks(4)
def test_two_runs_are_equal(strategy: str, mode: str) -> None:
    """With communication buffers, too: torch fills fresh memory, which must not happen while a collective writes."""
    with determinism():
        losses, params = train(strategy, mode, range(3), buffers=True)
        torch._dynamo.reset()
        again = train(strategy, mode, range(3), buffers=True)
        assert same(losses, again[0])
        assert same(params, again[1])
        if mode == AOT_EAGER:
            eager = train(strategy, EAGER, range(3))
            assert same(losses, eager[0])
            assert same(params, eager[1])
    assert all(loss.isfinite() for loss in losses)


@on_ranks(4)
def test_the_backend_adds_no_floats() -> None:
    def reduced(strategy: str) -> set[str]:
        with mock.patch.object(compat, "all_reduce", wraps=compat.all_reduce) as reduce:
            seen = collectives(lambda: train(strategy, EAGER, [0]))
        ops = {call.args[1] for call in reduce.call_args_list if call.args[0].is_floating_point()}
        return ops | ({"scattered sums"} if seen["reduce_scatter_tensor"] else set())

    strategies = ("no_shard", "HSDP optim_grads_params", "HFSDP")
    assert all(map(reduced, strategies))
    with determinism():
        assert not any(map(reduced, strategies))


@on_ranks(4)
def test_norms_are_added_in_the_order_of_ranks() -> None:
    values = [1e8, 1.0, -1e8, 1.0]
    value = torch.tensor(values[dist.get_rank()])
    group = dist.group.WORLD
    assert group is not None
    found = Group.of(group).all_reduce(value, "sum", in_order=True)
    assert found.item() == 1.0  # 1e8 + 1 is 1e8 in float32
    assert Group.of(group).all_reduce(value, "max", in_order=True).item() == values[0]


@on_ranks(4)
def test_norms_of_a_pipeline_are_added_in_the_order_of_stages() -> None:
    parts = [2.0, 1e-4, 2.0, 1e-4]
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "dp"))
    with determinism():
        layer = fully_shard_model(
            nn.Linear(1, 1, bias=False), device_mesh=alone, dp_shard_dim="dp", zero_dp_strategy="no_shard"
        )
    (param,) = layer.parameters()
    param.grad = torch.full_like(param, parts[dist.get_rank()])
    norm = pipeline_parallel.clip_grad_norm_([layer], 1e9, alone.get_group("pp"))
    right = torch.zeros(())
    for part in parts:
        right = right + torch.tensor(part) ** 2.0
    assert norm.item() == (right**0.5).item()


def test_what_is_set_and_put_back() -> None:
    import torch._inductor.config as inductor

    def settings() -> tuple[bool, bool, bool, bool]:
        algorithms = torch.are_deterministic_algorithms_enabled()
        return algorithms, torch.backends.cudnn.benchmark, inductor.deterministic, fills()

    def fills() -> bool:
        return torch.utils.deterministic.fill_uninitialized_memory

    before = settings()
    torch.backends.cudnn.benchmark = True
    with determinism():
        deterministic()
        assert settings() == (True, False, True, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before[1]
    assert settings() == before


@on_ranks(2)
def test_a_resumed_step_draws_the_same() -> None:
    def drawn(step: int, rank: int | None = None) -> Tensor:
        seed_step(3, step, rank)
        return torch.rand(5)

    first, second = drawn(1), drawn(2)
    assert torch.equal(drawn(1), first)
    assert not torch.equal(first, second)
    assert torch.equal(drawn(1, 0), first) == (dist.get_rank() == 0)


@on_ranks(2)
def test_ranks_that_disagree_are_refused() -> None:
    mine = determinism if dist.get_rank() else contextlib.nullcontext
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(grad_sum_dtype=torch.float32)):
        with mine(), parity.raises_everywhere(RuntimeError, "in the order of ranks"):
            fully_shard_model(parity.build(Noisy), fsdp_unit_modules=[zoo.Block], mixed_precision_policy=policy)
