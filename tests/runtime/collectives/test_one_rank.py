"""Groups of one rank start no collective: models of one rank, and meshes with a dimension of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import fsdp2, fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.lanes import running
from mfsdp_compile.runtime.lanes.lane import Lane
from mfsdp_compile.runtime.lanes.plain import AllReduce, ReduceScatter
from mfsdp_compile.runtime.lanes.stage import NO_STATE, Spec


def started() -> dict[str, int]:
    """Return how many collectives this rank has started over groups of one rank, by group."""
    alone = [name for name, ranks in compat.known_groups().items() if len(ranks) == 1]
    return {name: count for name in alone if (count := compat.collectives_started(compat.process_group(name)))}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def model(api: Any, mesh: Any) -> Net:
    torch.manual_seed(0)
    net = Net()
    for layer in net.layers:
        api(layer, mesh=mesh)
    return api(net, mesh=mesh)


def train(net: nn.Module, compiled: bool, micro: bool = False) -> list[Tensor]:
    """Train two steps, with everything that communicates. Return values that all ranks have."""
    call = torch.compile(net, backend="mfsdp", options={"inner": "aot_eager"}) if compiled else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    results: list[Tensor] = []
    for step in range(2):
        for number in range(2 if micro else 1):
            if micro:
                net.set_requires_gradient_sync(number == 1)  # type: ignore[operator]
            torch.manual_seed(10 * step + number + 100 * dist.get_rank())
            call(torch.randn(4, 6)).square().sum().backward()
        results.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).clone())
        optimizer.step()
        optimizer.zero_grad()
    results += [param.full_tensor().detach() for param in net.state_dict().values()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in results]


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(1)
def test_one_rank(strategy: int, compiled: bool) -> None:
    """No strategy, eager or compiled, communicates on one rank. The numbers are those of the model without sharding."""
    torch.manual_seed(0)
    net = Net()
    expected = Net()
    expected.load_state_dict(net.state_dict())
    sharded = fully_shard_model(net, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
    batch = torch.randn(4, 6)
    before = started()
    call = torch.compile(sharded, backend="mfsdp", options={"inner": "aot_eager"}) if compiled else sharded
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for _ in range(2):
        call(batch).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        expected(batch).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(sharded.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    assert started() == before


@pytest.mark.long_if("*-True")
@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_a_dimension_of_one_rank(compiled: bool) -> None:
    """HSDP with one replica is full sharding; with shards of one rank it is replication, without more collectives."""
    flat = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    one_replica = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    one_shard = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for micro in (False, True):
        expected = train(model(fsdp2.fully_shard, flat), compiled=False, micro=micro)
        for mesh in (one_replica, one_shard):
            net = model(fsdp2.fully_shard, mesh)
            list(net.parameters())
            before = started()
            results = train(net, compiled, micro)
            assert started() == before
            for ours, theirs in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_sum_over_one_rank_is_no_alias() -> None:
    """Compiled code reuses the memory of the argument while the result is the gradient."""
    spec, alone = Spec(8, torch.float32), Group("none", 1, 0)
    for stage in (ReduceScatter(alone, "sum"), AllReduce(alone, "sum")):
        lane = Lane(spec, spec, spec, each=(stage,))
        given = torch.ones(8)
        found = running.start(lane, "each", 0, given, NO_STATE)
        assert torch.equal(found, given)
        assert found.data_ptr() != given.data_ptr()
