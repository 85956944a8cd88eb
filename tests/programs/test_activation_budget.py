"""``activation_memory_budget``: what forward does not save, backward computes again, with the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mfsdp_compile import MegatronFSDP, fully_shard_model
from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.planning import forecast

BUDGETS = (0.5, 0.0)


class DropoutBlock(zoo.Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(super().forward(x), 0.3, training=True)


class Dropout(zoo.Plain):
    block = DropoutBlock


class SummingBlock(zoo.Block):
    """Sums over ranks in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + all_reduce(x.detach(), "sum", dist.group.WORLD).sin()


class Summing(zoo.Plain):
    block = SummingBlock


@torch.library.custom_op("mfsdp_tests::drop", mutates_args=())
def drop(x: Tensor) -> tuple[Tensor, Tensor]:
    """Dropout that does not say that it draws random numbers."""
    mask = torch.rand_like(x) < 0.7
    return x * mask, mask


@drop.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


drop.register_autograd(
    lambda ctx, of_result, _: of_result * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class CustomBlock(zoo.Block):
    def forward(self, x: Tensor) -> Tensor:
        return drop(super().forward(x).sin())[0]


class Custom(zoo.Plain):
    block = CustomBlock


def _prefers_to_save(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    dropout = torch.ops.aten.native_dropout.default
    return CheckpointPolicy.PREFER_SAVE if operator == dropout else CheckpointPolicy.PREFER_RECOMPUTE


class PreferringBlock(DropoutBlock):
    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, _prefers_to_save)
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)


class Preferring(zoo.Plain):
    block = PreferringBlock


class NoProductsBlock(nn.Module):
    """Nothing that torch bans from recomputation, but random numbers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(x).sin().exp(), 0.3, training=True)


class NoProducts(zoo.Plain):
    block = NoProductsBlock


def deep() -> zoo.Plain:
    return zoo.Plain(width=32, layers=4)


def trained(
    factory: Callable[[], nn.Module], inner: str = AOT_EAGER, rows: int = 512, **options: Any
) -> tuple[MegatronFSDP, list[Tensor]]:
    """Return a model, compiled, and its gradients."""
    torch.compiler.reset()
    units = [NoProductsBlock if factory is NoProducts else zoo.Block]
    model = fully_shard_model(parity.build(factory), fsdp_unit_modules=units)
    call = torch.compile(model, backend="mfsdp", options={"inner": inner, "report": True, **options})
    torch.manual_seed(7 + dist.get_rank())
    call(torch.randn(rows, 8)).backward()
    return model, [param.grad.full_tensor() for param in model.parameters()]


def peak(model: MegatronFSDP) -> int:
    """Return the predicted peak bytes. Most of them are what forward saves for backward."""
    return forecast.predicted(model).peak_bytes


@pytest.mark.long_unless("2-deep-regions")
@pytest.mark.parametrize("regions", [True, False], ids=["regions", "one graph"])
@pytest.mark.parametrize(
    "factory", [deep, Dropout, Summing, Custom, Preferring, NoProducts], ids=lambda factory: factory.__name__
)
@on_ranks(2)
def test_gradients_are_the_same(factory: Callable[[], nn.Module], regions: bool) -> None:
    """Random numbers and sums over ranks are not computed again."""
    model, expected = trained(factory, regions=regions)
    before = peak(model)
    for budget in BUDGETS:
        model, gradients = trained(factory, regions=regions, activation_memory_budget=budget)
        assert all(map(torch.equal, gradients, expected)), budget
        if factory is deep and (regions or budget):  # at 0, one graph computes everything again at once
            assert peak(model) < before


@on_ranks(2)
def test_weights_may_be_larger_than_what_is_saved() -> None:
    """Torch takes a graph's inputs for the least that can be saved, and a region's hold its weights twice."""

    def heavy() -> zoo.Plain:
        return zoo.Plain(width=128, layers=4)

    model, expected = trained(heavy, rows=8)
    less, gradients = trained(heavy, rows=8, activation_memory_budget=0.0)
    assert all(map(torch.equal, gradients, expected))
    assert peak(less) < peak(model)


@pytest.mark.long
@on_ranks(2)
def test_inductor() -> None:
    model, expected = trained(deep, INDUCTOR)
    less, gradients = trained(deep, INDUCTOR, activation_memory_budget=0.0)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)  # kernels are fused in other places
    assert peak(less) < peak(model)


@on_ranks(2)
def test_a_memory_budget_saves_what_there_is_room_for() -> None:
    """As much as fits, the same on all ranks; with a fraction that is given, there is no other."""
    model, expected = trained(deep, memory_budget="1GiB")
    (record,) = model.sharded.compiled_graphs
    assert record.context.policy.activation_memory_budget == 1
    whole = trained(deep, prefetch=0, keep_last=False)[0]
    tight = peak(whole) - 1
    with pytest.raises(Exception, match=r"cannot be kept"):
        trained(deep, memory_budget=tight, activation_memory_budget=1.0)
    dist.barrier()
    model, gradients = trained(deep, memory_budget=tight)
    (record,) = model.sharded.compiled_graphs
    assert record.context.policy.activation_memory_budget < 1
    assert peak(model) <= tight
    assert all(map(torch.equal, gradients, expected))
    with pytest.raises(Exception, match=r"cannot be kept"):
        trained(deep, memory_budget=1000)


@pytest.mark.long
@on_ranks(2, timeout=100)
def test_one_rank_compiles_again() -> None:
    """For a batch of its own, it takes what all have agreed on, and asks nobody."""
    tight = peak(trained(deep, prefetch=0, keep_last=False)[0]) - 1
    torch.compiler.reset()
    model = fully_shard_model(parity.build(deep), fsdp_unit_modules=[zoo.Block])
    call = torch.compile(
        model, backend="mfsdp", dynamic=False, options={"inner": AOT_EAGER, "memory_budget": tight, "report": True}
    )
    call(torch.randn(512, 8)).backward()
    model.zero_grad()
    call(torch.randn(512 if dist.get_rank() else 256, 8)).backward()
    records = model.sharded.compiled_graphs
    assert len(records) == (1 if dist.get_rank() else 2)
    assert len({record.context.policy.activation_memory_budget for record in records}) == 1
    assert records[0].context.policy.activation_memory_budget < 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"activation_memory_budget": 1.5}, ValueError, "a fraction from 0 to 1"),
        ({"activation_memory_budget": True}, ValueError, "a fraction from 0 to 1"),
        ({"activation_memory_budget": "much"}, ValueError, "a fraction from 0 to 1"),
        ({"activation_memory_budget": "auto"}, ValueError, "there is none"),
    ],
)
def test_what_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CompileOptions.of(options, None)
