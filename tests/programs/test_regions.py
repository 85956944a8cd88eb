"""Regions: the same bits as eager, one trace for all equal units, and no region where there cannot be one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from families import FAMILIES
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fully_shard_model
from mfsdp_compile.passes.pipeline import CompileRecord


class Many(zoo.Plain):
    layers = 6

    def __init__(self) -> None:
        super().__init__(layers=self.layers)


class Shared(Many):
    """All blocks read one differentiable value, each of them twice, as decoders read what the encoder returns."""

    class block(zoo.Block):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x + memory)))) * torch.tanh(memory)

    def trunk(self, x: Tensor) -> Tensor:
        memory = torch.sigmoid(x)
        for block in self.blocks:
            x = block(x, memory)
        return x + memory


class AllStates(Many):
    """The loss reads the output of each block, which the next block reads twice."""

    def trunk(self, x: Tensor) -> Tensor:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return torch.stack(states).square().sum(0)


class TwoKinds(Many):
    """Blocks that differ in a constant, in turn, as layers with and without sliding windows do."""

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.scale = 1.0 + i % 2

    class block(zoo.Block):
        scale: float

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Numbered(Many):
    """Blocks that compute with their number: no two are equal."""

    class block(zoo.Block):
        number: int

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x)))) / (self.number + 1)

    def __init__(self) -> None:
        super().__init__()
        for i, block in enumerate(self.blocks):
            block.number = i


class Metric(Many):
    """A second output of each block, which is differentiable, but only read without gradient."""

    class block(zoo.Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.down(F.gelu(self.up(self.norm(x))))
            return x + y, y.square().mean(0)

    def trunk(self, x: Tensor) -> Tensor:
        largest = torch.zeros(())
        for block in self.blocks:
            x, metric = block(x)
            largest = torch.maximum(largest, metric.detach().max())
        return x + largest


class ManyDropout(Many):
    class block(zoo.Dropout.block):
        pass


class Inside(Many):
    """Autocast and checkpoints inside of blocks, and autocast around them."""

    class block(zoo.Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.norm(x)
            return x + checkpoint(lambda y: self.down(F.gelu(self.up(y))), y, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class Views(Many):
    """Blocks that return a view of what they compute."""

    class block(zoo.Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x + self.down(F.gelu(self.up(self.norm(x))))
            return y.t().contiguous().t()


class NoGradient(Many):
    """The first blocks run without gradients, as a frozen backbone does."""

    layers = 8

    def trunk(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:4]:
                x = block(x)
        for block in self.blocks[4:]:
            x = block(x)
        return x


class Hooked(Many):
    """Forward hooks on blocks: Dynamo traces them as part of the block's call."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: output * 1.5)


REGIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, int], str]] = {
    "Many": (Many, {"region_0": 6}, ""),
    "Shared": (Shared, {"region_0": 5}, ""),  # the first block reads the shared value as x too
    "AllStates": (AllStates, {"region_0": 5}, "no other unit is equal to it"),
    "TwoKinds": (TwoKinds, {"region_0": 3, "region_1": 3}, ""),
    "Numbered": (Numbered, {}, "no other unit is equal to it"),
    "Metric": (Metric, {}, "nothing differentiable reads output 1"),
    "ManyDropout": (ManyDropout, {"region_0": 6}, ""),
    "Inside": (Inside, {"region_0": 6}, ""),
    "Views": (Views, {"region_0": 5}, "")
    if torch.__version__.startswith("2.11.")  # its gradients have the strides of the outputs
    else (Views, {}, "the gradient of output 0 of one of its units has other strides"),
    "NoGradient": (NoGradient, {"region_0": 3, "region_1": 3}, "no other unit is equal to it"),
    "Hooked": (Hooked, {"region_0": 6}, ""),
    "Norms": (zoo.Norms, {}, "it writes to a tensor from outside"),
    "CalledTwice": (zoo.CalledTwice, {}, "in another call of it"),
    "Tied": (zoo.Tied, {}, "it reads parameters of root:among"),
    "FrozenUnit": (zoo.FrozenUnit, {}, "no other unit is equal to it"),
    "Checkpointed": (zoo.Checkpointed, {"region_0": 3}, ""),
    "SelectivelyCheckpointed": (zoo.SelectivelyCheckpointed, {"region_0": 3}, ""),
    "MixedTypes": (zoo.MixedTypes, {"region_0": 3}, ""),
    "Scalars": (zoo.Scalars, {"region_0": 3}, ""),
}


def records(model: Any) -> list[CompileRecord]:
    return model.sharded.compiled_graphs


@pytest.mark.long_unless("*-FrozenUnit", "*-Checkpointed")
@pytest.mark.parametrize("name", REGIONS)
@on_ranks(2)
def test_which_units_are_regions_and_bits(name: str) -> None:
    factory, expected, reason = REGIONS[name]
    data = parity.batches(steps=3)
    eager = parity.train_sharded(factory, EAGER, data, parity.sgd)
    compiled = parity.train_sharded(factory, AOT_EAGER, data, parity.sgd)
    parity.assert_bitwise(eager, compiled)
    (record,) = records(compiled.model)
    assert {body.name: len(body.units) for body in record.regions} == expected
    if reason:
        assert reason in " ".join(record.inlined.values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["Shared", "ManyDropout", "TwoKinds", "Views"])
@on_ranks(2)
def test_inductor(name: str) -> None:
    """With and without regions: the same sums, which kernels may round differently.

    Dropout draws its numbers from other seeds, so only losses of the first step's scale are comparable for it.
    """
    factory = REGIONS[name][0]
    data = parity.batches(steps=2)
    alone = parity.train_sharded(factory, INDUCTOR, data, parity.sgd, regions=False)
    regions = parity.train_sharded(factory, INDUCTOR, data, parity.sgd)
    (record,) = records(regions.model)
    assert record.regions
    for a, b in zip(alone.losses, regions.losses, strict=True):
        torch.testing.assert_close(a, b, rtol=1.0 if name == "ManyDropout" else 1e-5, atol=0.0)
    if name != "ManyDropout":
        for key, value in alone.params.items():
            parity.close(key, regions.params[key], value)


@pytest.mark.long
@on_ranks(2)
def test_dropout_that_draws_what_eager_code_draws() -> None:
    """With Inductor's ``fallback_random``, regions call torch's generator as often and in the same order as hooks."""
    data = parity.batches(steps=2)
    eager = parity.train_sharded(ManyDropout, EAGER, data, parity.sgd)
    compiled = parity.train_sharded(ManyDropout, INDUCTOR, data, parity.sgd, inductor={"fallback_random": True})
    (record,) = records(compiled.model)
    assert record.regions
    parity.assert_close(compiled, eager)


@pytest.mark.long
@on_ranks(2)
def test_an_attribute_of_one_unit_is_guarded() -> None:
    """A program that changes one layer after compiling gets what it asks for (torch's own regions do not see it)."""
    outputs = []
    x = parity.batches(1)[0, 0]
    for mode in (EAGER, AOT_EAGER):
        model, call = parity.shard(parity.build(TwoKinds), mode)
        found = [call(x).detach()]
        model.module.blocks[4].scale = 3.0
        found.append(call(x).detach())
        outputs.append(found)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert not torch.equal(*outputs[1])


@pytest.mark.long
@on_ranks(2)
def test_sizes_that_become_dynamic() -> None:
    """A batch of another size makes Dynamo use dynamic sizes: no regions then, and the same bits."""
    modes = {}
    for mode in (EAGER, AOT_EAGER):
        model, call = parity.shard(parity.build(Many), mode)
        losses = []
        for rows in (6, 4, 7, 5):
            loss = call(parity.batches(1, (rows, 8))[0, 0])
            loss.backward()
            losses.append(loss.detach())
        modes[mode] = losses, [p.grad.to_local().clone() for p in model.parameters()], model
    for a, b in zip(*(list(itertools.chain(*modes[mode][:2])) for mode in modes), strict=True):
        assert torch.equal(a, b)
    first, second = records(modes[AOT_EAGER][2])
    assert first.regions
    assert not second.regions
    assert "is dynamic" in " ".join(second.inlined.values())


@pytest.mark.long
@on_ranks(2)
def test_inference_and_training_share_a_model() -> None:
    x = parity.batches(1)[0, 0]
    outputs = []
    for mode in (EAGER, AOT_EAGER):
        _, call = parity.shard(parity.build(Many), mode)
        with torch.no_grad():
            found = [call(x)]
        with torch.inference_mode():
            found.append(call(x).clone())
        loss = call(x)
        loss.backward()
        outputs.append([*found, loss.detach()])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": 2},
        {"prefetch": 0, "reductions_in_flight": 0},
        {"reshard_after_forward": False},
        {"keep_last": False, "verify": "each"},
        {"reshard_after_forward": 2},
        {"memory_budget": "1GiB"},
    ],
    ids=str,
)
@on_ranks(4)
def test_schedules(options: dict[str, Any]) -> None:
    data = parity.batches(steps=2)
    eager = parity.train_sharded(Many, EAGER, data, parity.sgd)
    compiled = parity.train_sharded(Many, AOT_EAGER, data, parity.sgd, **options)
    parity.assert_bitwise(eager, compiled)
    assert records(compiled.model)[0].regions


NOT_BITWISE = {"mamba", "jamba", "segformer", "qwen3-moe-loop"}
"""Families whose compiled gradients differ from eager ones by rounding, with regions and without."""


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
@on_ranks(2, timeout=480)
def test_families(name: str) -> None:
    """Six layers of each kind, so that there are regions: the bits of the graph without them, and of eager."""
    family = FAMILIES[name]
    rank = dist.get_rank()

    def train(mode: str, **options: Any) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = fully_shard_model(family.make(layers=6), fsdp_unit_modules="auto")
        with torch.no_grad():
            model(**family.batch_of(rank))  # the first forward of transformers models cannot be traced
        call: Any = model
        if mode != EAGER:
            options |= {"inner": mode}
            call = torch.compile(model, backend="mfsdp", fullgraph=family.fullgraph, options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        values = []
        for step in range(2):
            loss = family.loss(call(**family.batch_of(10 * step + rank)))
            loss.backward()
            values.append(loss.detach())
            values += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return values

    regions, without = train(AOT_EAGER), train(AOT_EAGER, regions=False)
    assert len(regions) == len(without)
    assert all(torch.equal(a, b) for a, b in zip(regions, without, strict=True))
    if name not in NOT_BITWISE:
        assert all(torch.equal(a, b) for a, b in zip(regions, train(EAGER), strict=True))
