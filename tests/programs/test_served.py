"""Blocks that are compiled one by one are served by the eager path: same bits, same collectives, and they overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import mesh_arguments

STEPS = 3
MICROBATCHES = 2


def by_block(model: nn.Module, inner: str, kind: type[nn.Module] = zoo.Block) -> None:
    for module in model.modules():
        if isinstance(module, kind):
            module.compile(backend="mfsdp", options={"inner": inner}, fullgraph=True)


def train(factory: Callable[[], nn.Module], inner: str, strategy: str, **arguments: Any) -> list[Tensor]:
    """Return losses, local gradients and local parameters of three steps of two microbatches."""
    torch.compiler.reset()
    model = fully_shard_model(
        parity.build(factory), fsdp_unit_modules=[zoo.Block], **mesh_arguments(strategy), **arguments
    )
    if inner != EAGER:
        by_block(model.module, inner)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    for batch in parity.batches(STEPS * MICROBATCHES).view(STEPS, MICROBATCHES, -1, 6, 8):
        for i, micro in enumerate(batch):
            model.is_last_microbatch = i == MICROBATCHES - 1
            torch.manual_seed(i)
            loss = model(micro[dist.get_rank()])
            loss.backward()
            found.append(loss.detach())
        found += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    served = [record for record in model.sharded.compiled_graphs if all(b.has_resident for b in record.context.buckets)]
    assert bool(served) == (inner != EAGER)
    assert not model.sharded.eager.gathering.gathered
    return [*found, *(param.to_local().detach().clone() for param in model.parameters())]


@pytest.mark.long_unless("*-Checkpointed")
@pytest.mark.parametrize("name", ["Plain", "Uneven", "Tied", "FrozenParameters", "FrozenUnit", "Checkpointed"])
@on_ranks(2)
def test_bitwise_as_eager(name: str) -> None:
    factory = getattr(zoo, name)
    eager = train(factory, EAGER, "optim_grads_params")
    served = train(factory, AOT_EAGER, "optim_grads_params")
    assert len(eager) == len(served)
    assert all(torch.equal(a, b) for a, b in zip(eager, served, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["no_shard", "optim", "optim_grads", "HSDP optim_grads_params", "HFSDP", "HFSDP optim"]
)
@on_ranks(4)
def test_strategies(strategy: str) -> None:
    for precision in (MixedPrecisionPolicy(), MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)):
        eager = train(zoo.Plain, EAGER, strategy, mixed_precision_policy=precision)
        served = train(zoo.Plain, AOT_EAGER, strategy, mixed_precision_policy=precision)
        assert all(torch.equal(a, b) for a, b in zip(eager, served, strict=True))


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}], ids=["served", "not served"])
@on_ranks(2)
def test_hooks_of_parameters_run_if_blocks_are_recomputed(options: dict[str, Any]) -> None:
    """The forward that recomputes begins when the backward has been announced and has not begun."""
    model = fully_shard_model(parity.build(zoo.Checkpointed), fsdp_unit_modules=[zoo.Block])
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": AOT_EAGER, **options})
    seen: list[str] = []
    for name, param in model.module.named_parameters():
        param.register_hook(lambda gradient, name=name: seen.append(name))
    model(parity.batches(1)[0, dist.get_rank()]).backward()
    assert sorted(seen) == sorted(name for name, _ in model.module.named_parameters())


@on_ranks(2)
def test_without_gradients() -> None:
    x = parity.batches(1)[0, dist.get_rank()]
    losses = []
    for inner in (EAGER, AOT_EAGER):
        model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
        if inner != EAGER:
            by_block(model.module, inner)
        with torch.no_grad():
            losses.append(model(x))
        losses.append(model(x).detach())
    assert all(torch.equal(loss, losses[0]) for loss in losses)


class Told(zoo.Plain):
    """Tells when it is about to call each block."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.tell: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            self.tell(f"call blocks.{number}")
            x = block(x)
        return self.head(x).pow(2).mean()


@on_ranks(2)
def test_collectives_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block's gather starts before this block runs; a reduction is awaited after the next has started."""
    model = fully_shard_model(parity.build(Told), fsdp_unit_modules=[zoo.Block])
    by_block(model.module, AOT_EAGER)
    x = parity.batches(1)[0, dist.get_rank()]
    model(x).backward()  # compiles, and learns the order
    eager, happened = model.sharded.eager, []
    model.module.tell = happened.append
    start, take_in = eager.step.announce, eager.reducing._take_in

    def announce(what: str, bucket: Any, *arguments: Any) -> None:
        happened.append(f"{what} {bucket.plan.name}")
        start(what, bucket, *arguments)

    def taken_in(reduction: Any) -> None:
        happened.append(f"await {reduction.bucket.plan.name}")
        take_in(reduction)

    eager.step.announce, eager.reducing._take_in = announce, taken_in  # type: ignore[method-assign]
    loss = model(x)
    for number in range(3):
        assert happened.index(f"gather blocks.{number + 1}") < happened.index(f"call blocks.{number + 1}")
    assert happened.index("gather blocks.3") > happened.index("call blocks.1"), "no more than one ahead"
    happened.clear()
    loss.backward()
    for number in (2, 1):
        assert happened.index(f"gather blocks.{number - 1}") < happened.index(f"reduce blocks.{number}")
        assert happened.index(f"reduce blocks.{number - 1}") < happened.index(f"await blocks.{number}")
