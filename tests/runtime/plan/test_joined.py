"""Small units that are joined: the numbers of separate units, with fewer collectives."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, MODELS
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import explain, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.diagnostics.measure import allocated, collectives

BLOCK = 4 * sum(param.numel() for param in zoo.Block().parameters())
"""Bytes of a block of a ``zoo.Plain``. To join k blocks, ask for half a block less than k."""


def joined(blocks: int) -> dict[str, int]:
    return {"unit_bytes": blocks * BLOCK - BLOCK // 2}


def units_of(model: Any) -> list[str]:
    return [unit.name for unit in model.sharded.eager.units]


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_feature(name: str) -> None:
    """Joining two of three blocks, or all, gives the same bits.

    Sums over two ranks do not depend on where a shard ends.
    """
    factory = MODELS[name]
    data = parity.batches(steps=2)
    apart = parity.train_sharded(factory, EAGER, data, parity.sgd)
    for unit_bytes in (BLOCK + BLOCK // 2, 10**6):
        eager = parity.train_both_ways(factory, data, unit_bytes=unit_bytes)
        parity.assert_same_by_name(eager, apart)
    assert f"blocks.0-{len(eager.model.module.blocks) - 1}" in units_of(eager.model)


@pytest.mark.long
@on_ranks(4)
def test_four_ranks() -> None:
    factory = partial(zoo.Plain, layers=4)
    data = parity.batches(steps=3)
    alone = parity.train_alone(factory, data, parity.sgd)
    for blocks, names in ((2, ["blocks.0-1", "blocks.2-3"]), (3, ["blocks.0-2", "blocks.3"]), (4, ["blocks.0-3"])):
        options = {"units": [zoo.Block], **joined(blocks)}
        eager = parity.train_both_ways(factory, data, **options)
        assert units_of(eager.model) == ["root:before", *names, "root:after"]
        parity.assert_close(eager, alone)


class Whole(nn.Module):
    """Whole numbers, few enough that no sum is rounded.

    Gloo sums over four ranks in an order that depends on where a shard ends. Only without rounding can separate and
    joined units be equal bit for bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape))

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul(2).round()
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.sum()


@pytest.mark.long
@on_ranks(4)
def test_four_ranks_without_rounding() -> None:
    data = parity.batches(steps=1)
    block = 4 * (8 * 8 + 8)
    apart = parity.train_sharded(Whole, EAGER, data, parity.sgd, units=[nn.Linear])
    assert any(gradient.abs().max() > 100 for gradient in apart.gradients[0].values())
    for blocks in (2, 4):
        for mode in (EAGER, AOT_EAGER):
            options = {"units": [nn.Linear], "unit_bytes": blocks * block}
            run = parity.train_sharded(Whole, mode, data, parity.sgd, **options)
            assert len(units_of(run.model)) == 4 // blocks
            parity.assert_same_by_name(run, apart)


# -- collectives ------------------------------------------------------------------------------------------------------


def step_of(mode: str, layers: int, blocks: int) -> Counter[str]:
    """Count the collectives of a step after the first."""
    _, call = parity.shard(parity.build(partial(zoo.Plain, layers=layers)), mode, [zoo.Block], **joined(blocks))
    x = parity.batches(1)[0, dist.get_rank()]
    call(x).backward()
    return collectives(lambda: call(x).backward())


@pytest.mark.long_unless("2-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, 4)
def test_collectives_are_divided(mode: str) -> None:
    """Joining divides the collectives of eight blocks by the number of joined blocks.

    The units before and after the blocks add two gathers in forward, none in backward, and two reductions. In backward
    the last one stays, and the gradient of the first one's input is not needed. Hooks gather it all the same, because
    they do not know that.
    """
    for blocks in (1, 2, 4, 8):
        units = 8 // blocks
        counts = step_of(mode, 8, blocks)
        assert counts["all_gather_into_tensor"] == 2 + (mode == EAGER) + 2 * units
        assert counts["reduce_scatter_tensor"] == 2 + units


class Around(nn.Module):
    """The root's parameters are first used between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.first = zoo.Block()
        self.between = nn.Linear(16, 16)
        self.second = zoo.Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(self.enter(x)))).pow(2).mean()


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_the_root_may_be_used_between_joined_modules(mode: str) -> None:
    model, call = parity.shard(parity.build(Around), mode, [zoo.Block], **joined(2))
    assert units_of(model) == ["root:before", "first-second", "root:among"]
    x = parity.batches(1)[0, dist.get_rank()]
    with torch.no_grad():
        call(x)
        assert collectives(lambda: call(x))["all_gather_into_tensor"] == 3


# -- modules that a batch skips, memory -------------------------------------------------------------------------------


class Drops(zoo.Plain):
    """Stochastic depth: some blocks do not run. Records what is gathered when each of the others does."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.skipped: Sequence[int] = ()
        self.gathered: list[set[str]] = []

    def trunk(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return x


@pytest.mark.long
@on_ranks(2)
def test_skipped_modules() -> None:
    x = parity.batches(1)[0, dist.get_rank()]
    apart, _ = parity.shard(parity.build(Drops), EAGER, [zoo.Block])
    eager, _ = parity.shard(parity.build(Drops), EAGER, [zoo.Block], **joined(2))
    compiled, call = parity.shard(parity.build(Drops), AOT_EAGER, [zoo.Block], **joined(2))
    for skipped in ((1,), (0, 3), (), (0, 1), (2,), (3,)):
        for model in (apart, eager, compiled):
            model.module.skipped = skipped
        losses = [called(x) for called in (apart, eager, call)]
        for loss in losses:
            loss.backward()
        assert torch.equal(losses[0], losses[1])
        assert torch.equal(losses[0], losses[2])
        for a, b, c in zip(apart.parameters(), eager.parameters(), compiled.parameters(), strict=True):
            if a.grad is None or b.grad is None or c.grad is None:
                assert a.grad is b.grad is c.grad, "of a skipped block"
                continue
            assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())
            assert torch.equal(b.grad.to_local(), c.grad.to_local())
        assert not eager.sharded.eager.gathering.gathered
        for model in (apart, eager, compiled):
            model.zero_grad()


@on_ranks(2)
def test_a_unit_of_which_a_module_is_skipped_is_let_go_of() -> None:
    model, _ = parity.shard(parity.build(Drops), EAGER, [zoo.Block], **joined(2))
    x = parity.batches(1)[0, dist.get_rank()]
    runtime = model.sharded.eager
    gathered: list[list[str]] = []
    for block in model.module.blocks:
        block.down.register_forward_hook(lambda *_: gathered.append([b.plan.unit for b in runtime.gathering.gathered]))
    for skipped, expected in (
        ((), [["blocks.0-1"], ["blocks.0-1"], ["blocks.2-3"], ["blocks.2-3"]]),
        ((1,), [["blocks.0-1"], ["blocks.2-3"], ["blocks.2-3"]]),
        ((0, 3), [["blocks.0-1"], ["blocks.2-3"]]),
    ):
        model.module.skipped = skipped
        for _ in range(2):  # the first step learns the order of units
            gathered.clear()
            with torch.no_grad():
                model(x)
        # The next unit is in flight, and the previous one is released.
        blocks = [[unit for unit in units if unit.startswith("blocks")] for units in gathered]
        assert [units[:1] for units in blocks] == expected


class Wide(nn.Module):
    """Two matrices: parameters are all of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(192, 192, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


@pytest.mark.long_unless("eager")
@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
def test_memory_is_that_of_larger_units(mode: str) -> None:
    """Two joined units are gathered and three are in reduction, as for single units of that size (test_memory.py)."""
    peaks = {}
    for blocks in (1, 2, 3):
        unit = 2 * 192 * 192 * 4
        model = fully_shard_model(
            nn.Sequential(*(Wide() for _ in range(12))), fsdp_unit_modules=[Wide], unit_bytes=blocks * unit - 1
        )
        assert len(model.sharded.buckets) == 12 // blocks
        options: Any = {"inner": mode}
        call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options=options)
        x = torch.randn(1, 192)
        for _ in range(2):
            call(x).sum().backward()
            model.zero_grad()
        shards = sum(bucket.plan.shard_bytes for bucket in model.sharded.buckets)
        peaks[blocks] = (allocated(lambda call=call, x=x: call(x).sum().backward())[0] - shards) / unit
        assert peaks[blocks] <= 5 * blocks + 0.25  # activations: a row of 192 per operator
        torch.compiler.reset()
    assert peaks[1] < peaks[2] < peaks[3]


# -- everything around joined units -----------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(2)
def test_checkpoints_know_nothing_of_it() -> None:
    x = parity.batches(3)[:, dist.get_rank()]
    trained = []
    for saved, loaded in ((1, 2), (2, 1), (2, 3)):
        made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(made)
        models = []
        for seed, blocks in enumerate((saved, loaded)):
            model, _ = parity.shard(parity.build(zoo.Plain, seed), EAGER, **joined(blocks))
            models.append((model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))))
        (model, optimizer), (restored, its_optimizer) = models
        model(x[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        Checkpoints(made[0]).save(1, model, optimizer)
        Checkpoints(made[0]).load(restored, its_optimizer)
        for one, its in models:
            one(x[1]).backward()
            its.step()
        assert model.state_dict().keys() == restored.state_dict().keys()
        for a, b in zip(model.parameters(), restored.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())
        trained.append([param.full_tensor() for param in model.parameters()])
    for others in trained[1:]:
        assert all(torch.equal(a, b) for a, b in zip(trained[0], others, strict=True))


@pytest.mark.long
@on_ranks(2)
def test_explain_names_joined_units_and_says_what_is_gathered_again_and_again() -> None:
    model, _ = parity.shard(parity.build(zoo.Plain), EAGER, **joined(2))
    x = torch.randn(4, 8)
    whole = explain(model, x)
    assert [graph.units for graph in whole.graphs] == [("root:before", "blocks.0-1", "blocks.2", "root:after")]
    assert whole.several == ()
    assert "gather  blocks.0-1" in str(whole)
    parted, _ = parity.shard(parity.build(Parted), EAGER, [zoo.Block], **joined(2))
    told = explain(parted, x)
    assert told.several == ("blocks.0-1",)
    assert "gathered by several graphs, by each as a whole:\n  blocks.0-1" in str(told)


class Parted(zoo.Plain):
    """Python that Dynamo cannot trace, between two blocks."""

    def trunk(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.usefixtures("fake_world")
def test_wrong_sizes() -> None:
    with pytest.raises(ValueError, match="unit_bytes must be at least 1"):
        fully_shard_model(zoo.Plain(), fsdp_unit_modules=[zoo.Block], unit_bytes=0)
    with pytest.raises(ValueError, match="unit_bytes=100 joins small units, but with fsdp_unit_modules=None"):
        fully_shard_model(zoo.Plain(), unit_bytes=100)
