"""Units that are gathered module by module, and parameters with buckets of their own: the numbers of whole units."""

from __future__ import annotations

from functools import partial
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, MODELS
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.measure import allocated, collectives
from mfsdp_compile.runtime.schedule.phase import Phase

MODULE = {"enable_fine_grained_param_gather": True}
PARAMETER = {"disable_bucketing": True}
GATHER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor"


def buckets_of(model: Any) -> list[str]:
    return [bucket.plan.name for bucket in model.sharded.buckets]


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_feature(name: str) -> None:
    """Sums over two ranks do not depend on where a shard ends."""
    data = parity.batches(steps=2)
    whole = parity.train_sharded(MODELS[name], EAGER, data, parity.sgd)
    for sharding in (MODULE, PARAMETER, MODULE | PARAMETER):
        eager = parity.train_both_ways(MODELS[name], data, sharding=sharding)
        assert buckets_of(eager.model) != buckets_of(whole.model)
        parity.assert_same_by_name(eager, whole)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [1, 2, 3])
@on_ranks(4)
def test_strategies(strategy: int) -> None:
    data = parity.batches(steps=3)
    alone = parity.train_alone(zoo.Plain, data, parity.sgd, microbatches=2)
    for more in ({}, {"fsdp_double_buffer": True}):
        sharding = {"zero_dp_strategy": strategy, **MODULE, **more}
        eager = parity.train_both_ways(zoo.Plain, data, microbatches=2, sharding=sharding)
        parity.assert_close(eager, alone)


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2)
def test_inductor() -> None:
    data = parity.batches(steps=2)
    alone = parity.train_alone(zoo.Plain, data, parity.sgd)
    for sharding in (MODULE, PARAMETER):
        parity.assert_close(parity.train_sharded(zoo.Plain, INDUCTOR, data, parity.sgd, sharding=sharding), alone)


class Shared(nn.Module):
    """Two blocks whose projections share one matrix inside each block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))
            self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))
            self.third.weight = self.second.weight

        def forward(self, x: Tensor) -> Tensor:
            return x + self.scale * self.third(torch.relu(self.second(torch.relu(self.first(x)))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shared.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


@pytest.mark.usefixtures("fake_world")
def test_what_is_in_which_bucket() -> None:
    """What several modules hold belongs to their unit, and so does what the unit itself holds."""

    def names(**options: Any) -> dict[str, list[str]]:
        model = fully_shard_model(parity.build(Shared), fsdp_unit_modules=[Shared.Block], **options)
        first = [bucket for bucket in model.sharded.buckets if "blocks.0" in bucket.plan.name]
        prefix = "blocks.0."
        return {
            bucket.plan.name: [slot.name.removeprefix(prefix) for slot in bucket.plan.layout.slots] for bucket in first
        }

    assert names(**MODULE) == {
        "blocks.0": ["second.weight", "scale"],  # larger rows first
        "blocks.0.first": ["first.weight", "first.bias"],
        "blocks.0.second": ["second.bias"],
        "blocks.0.third": ["third.bias"],
    }
    parameters = ["scale", "first.weight", "first.bias", "second.weight", "second.bias", "third.bias"]
    assert sorted(names(**PARAMETER).values()) == sorted([name] for name in parameters)
    assert all(len(own) == 1 for own in names(**MODULE, **PARAMETER).values())


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_collectives(mode: str) -> None:
    """Two blocks of three modules and six parameters. Outside of units nothing changes."""
    expected = {"whole": 2, "module": 2 * 3, "parameter": 2 * 6}
    for kind, sharding in (("whole", {}), ("module", MODULE), ("parameter", PARAMETER)):
        model, call = parity.shard(parity.build(partial(zoo.Plain, layers=2)), mode, [zoo.Block], sharding=sharding)
        x = parity.batches(1)[0, dist.get_rank()]
        call(x).backward()
        counted = collectives(lambda call=call, x=x: call(x).backward())
        outside = len([bucket for bucket in model.sharded.buckets if bucket.plan.name.startswith("root")])
        if kind == "parameter":
            assert outside == 2 + 4  # the root's parameters have buckets of their own, too
        # The backward gathers again, except for the last unit, and what it does not read.
        assert expected[kind] + outside <= counted[GATHER] <= 2 * (expected[kind] + outside)
        assert counted[REDUCE] == expected[kind] + outside, counted


WIDTH = 192


class Wide(nn.Module):
    """A unit of four equal matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.relu(part(x))
        return x


class Wides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.usefixtures("fake_world")
def test_memory(mode: str) -> None:
    """Two modules are gathered at a time, instead of two units."""
    module_bytes = 4 * WIDTH * WIDTH
    peaks = {}
    for kind, sharding in (("whole", {}), ("module", MODULE)):
        _, call = parity.shard(parity.build(Wides), mode, [Wide], sharding=sharding)
        x = torch.randn(1, WIDTH)

        def forward(call: Any = call, x: Tensor = x) -> None:
            with torch.no_grad():
                call(x)

        forward()
        peaks[kind] = allocated(forward)[0] / module_bytes
    assert 4 < peaks["whole"] <= 8.2
    assert peaks["module"] <= 2.2


@pytest.mark.usefixtures("fake_world")
def test_compiled_code_awaits_each_module_at_its_use() -> None:
    """Each is gathered while the module before it computes. No region, which takes whole buckets, comes in between."""
    model, call = parity.shard(parity.build(Wides), AOT_EAGER, [Wide], sharding=MODULE)
    call(torch.randn(1, WIDTH)).backward()
    (record,) = model.sharded.compiled_graphs
    assert set(record.inlined.values()) == {"its unit is gathered module by module"}
    names = [f"blocks.{block}.parts.{part}" for block in range(3) for part in range(4)]
    lines = record.schedules[Phase.FORWARD]
    gathers = [line.split()[1] for line in lines if line.startswith("gather ")]
    assert gathers == names
    ahead = 0
    for line in lines:
        ahead += line.startswith("gather ") - line.startswith("wait ")
        assert ahead <= 2


@pytest.mark.usefixtures("fake_world")
def test_contradictions_are_refused() -> None:
    for options, fragment in (
        ({**MODULE, "unit_bytes": 1 << 20, "fsdp_unit_modules": [zoo.Block]}, "divides units into modules"),
        ({**MODULE}, "fsdp_unit_modules=None"),
        ({**PARAMETER, "bucket_bytes": 1 << 20}, "nothing that bucket_bytes could split"),
    ):
        model = parity.build(zoo.Plain)
        with pytest.raises(ValueError, match=fragment):
            fully_shard_model(model, **options)
        model(torch.randn(2, 8)).backward()
