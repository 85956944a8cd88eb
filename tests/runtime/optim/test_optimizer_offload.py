"""Main weights, gradients and optimizer state in host memory, what is gathered on the device: bitwise as without."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, assert_bitwise, batches, build, shard, train_both_ways, train_sharded
from pool import on_ranks
from test_offload import assert_refused, copies
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import (
    MixedPrecisionPolicy,
    OptimizerOffloadPolicy,
    explain,
    fsdp2,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_compile.backend.bucket_infos import bucket_info
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost, host_memory, resting_memory
from mfsdp_compile.planning import forecast
from mfsdp_compile.quantities import bytes_text
from mfsdp_compile.report.step_report import host_text

OFFLOADED = {"offload_policy": OptimizerOffloadPolicy()}
BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("model", [zoo.Plain, zoo.Uneven, zoo.Tied, zoo.FrozenParameters, zoo.Unused, zoo.Checkpointed])
@on_ranks(2)
def test_same_numbers(model: type[nn.Module]) -> None:
    data = batches(3)
    plain = train_sharded(model, EAGER, data)
    assert_bitwise(plain, train_both_ways(model, data, None, sharding=OFFLOADED))


def trained(
    mode: str, sharding: dict[str, Any], mesh: str | None = None, make: Any = torch.optim.AdamW, **how: Any
) -> list[Tensor]:
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


@on_ranks(2)
def test_copies_are_freed_while_parameters_stay_gathered() -> None:
    """They are no tensors of inference mode afterwards."""
    data = batches(1)[0, dist.get_rank()]
    model, _ = shard(build(zoo.Plain), EAGER, sharding=OFFLOADED)
    model(data).backward()
    copies = [weakref.ref(bucket.resident) for bucket in model.sharded.buckets]
    with torch.inference_mode():
        model.set_accumulation(keep_gathered=True)
        assert not any(copy() is not None for copy in copies)
        model.set_accumulation()
        model.sharded.refresh()
    assert not any(bucket.resident.is_inference() for bucket in model.sharded.buckets)
    model.zero_grad()
    model(data).backward()


@pytest.mark.parametrize("strategy", [0, *(pytest.param(strategy, marks=pytest.mark.long) for strategy in (1, 2, 3))])
@on_ranks(2)
def test_strategies(strategy: int) -> None:
    """Accumulation without synchronization, clipping, a GradScaler and bfloat16, for everything that can be sharded."""
    plain, *offloaded = (
        trained(mode, sharding | {"zero_dp_strategy": strategy})
        for mode, sharding in ((EAGER, {}), (EAGER, OFFLOADED), (AOT_EAGER, OFFLOADED))
    )
    for run in offloaded:
        assert all(map(torch.equal, plain, run))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["HSDP optim_grads_params", "HFSDP", "HFSDP optim"])
@on_ranks(4)
def test_two_dimensions(kind: str) -> None:
    data = batches(2)
    plain = train_sharded(zoo.Plain, EAGER, data, sharding=mesh_arguments(kind))
    assert_bitwise(plain, train_both_ways(zoo.Plain, data, None, sharding=mesh_arguments(kind) | OFFLOADED))


@pytest.mark.long
@on_ranks(2)
def test_copies() -> None:
    """One copy back per step, of the weights; one to the host per reduced gradient. Gathers need none."""
    data = batches(3)[:, dist.get_rank()].bfloat16()
    for mode in (EAGER, AOT_EAGER):
        model, call = shard(build(lambda: zoo.Plain().bfloat16()), mode, sharding=OFFLOADED, precision=BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        buckets = model.sharded.buckets
        for microbatches in (data[:2], data[2:]):
            with copies() as found:
                for batch in microbatches:
                    call(batch).backward()
            assert found.order.count("fetch") == len(buckets)
            assert found.order.count("offload") == len(buckets) * len(microbatches)
            assert found.bytes["fetch"] == sum(bucket.flat.nbytes for bucket in buckets)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad(), copies() as found:
            call(data[0])
            call(data[0])
        assert found.order.count("fetch") == len(buckets), "once after the step"
        for bucket in buckets:
            copy = bucket.source()
            assert torch.equal(copy, bucket.flat.detach().bfloat16())
            assert copy.untyped_storage().data_ptr() != bucket.flat.untyped_storage().data_ptr()
        if mode == AOT_EAGER:
            schedule = "\n".join(itertools.chain(*model.sharded.compiled_graphs[0].schedules.values()))
            assert "from host memory" not in schedule
            assert schedule.count("B to host memory") == len(buckets)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_inference_mode(mode: str) -> None:
    """What is first copied in inference mode is copied again after a step."""
    model, call = shard(build(zoo.Plain), mode, sharding=OFFLOADED)
    plain, _ = shard(build(zoo.Plain), EAGER)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    batch = batches(1)[0, dist.get_rank()]
    with torch.inference_mode():
        model.sharded.refresh()
        assert not any(bucket.source().is_inference() for bucket in model.sharded.buckets)
    for each, optimizer in zip((call, plain), optimizers, strict=True):
        each(batch).backward()
        optimizer.step()
    with torch.inference_mode():
        assert torch.equal(call(batch), plain(batch))


@pytest.mark.long
@on_ranks(2)
def test_by_unit() -> None:
    """Each unit has a policy of its own; what rests on the device is counted."""
    first = build(zoo.Plain)
    policy = {zoo.Block: OptimizerOffloadPolicy(), first.blocks[1]: CPUOffloadPolicy()}
    model, call = shard(first, AOT_EAGER, sharding={"offload_policy": policy}, report=True)
    plain, _ = shard(build(zoo.Plain), EAGER)
    data = batches(1)[0, dist.get_rank()]
    for each in (call, plain):
        each(data).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())
    infos = [bucket_info(bucket.plan, bucket.topology) for bucket in model.sharded.buckets]
    held = resting_memory(infos, OptimizerCost(state_bytes=8))
    on_device = sum(b.flat.nbytes for b in model.sharded.buckets if not b.lane.shard.in_host_memory)
    copied = sum(b.source().nbytes for b in model.sharded.buckets if b.lane.has_local_copy)
    assert (held[Category.SHARDS], held[Category.OPTIMIZER]) == (on_device, 2 * on_device)
    assert held[Category.GATHERED] == copied
    assert on_device
    assert copied
    offloaded = [b for b in model.sharded.buckets if b.lane.shard.in_host_memory]
    on_host = host_memory(infos, OptimizerCost(state_bytes=8))
    assert on_host[Category.SHARDS] == on_host[Category.GRADIENTS] == sum(b.flat.nbytes for b in offloaded)
    assert on_host[Category.OPTIMIZER] == 2 * on_host[Category.SHARDS]
    explained = str(explain(call, data))
    assert f"host memory: {host_text(on_host | {Category.OPTIMIZER: 0})} per rank" in explained
    assert f"the device keeps copies of shards, {bytes_text(copied)}" in explained
    report = forecast.report(call)
    assert dict(report.headline)["host memory"].endswith(f"{host_text(on_host)} (predicted)")


@on_ranks(2)
def test_fsdp2() -> None:
    """fsdp2's ``fully_shard`` takes the policy, by unit."""
    data = batches(2)[:, dist.get_rank()]

    def trained(policy: Any) -> list[Tensor]:
        model: Any = build(zoo.Plain)
        for module in (*model.blocks, model):
            fsdp2.fully_shard(module, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().to_local().clone() for param in model.parameters()]

    assert all(map(torch.equal, trained(fsdp2.OffloadPolicy()), trained(OptimizerOffloadPolicy(pin_memory=False))))


@on_ranks(2)
def test_refusals() -> None:
    """What is made from main weights on the device is refused, and so are ranks with different policies."""
    quantized = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
    for sharding, words in (
        ({"mixed_precision_policy": quantized}, "gathered quantized"),
        ({"cuda_graph_mode": True}, "CUDA graph"),
    ):
        assert_refused(words, **OFFLOADED, **sharding)
    mine = OptimizerOffloadPolicy() if dist.get_rank() else CPUOffloadPolicy()
    with pytest.raises(RuntimeError, match="gathered from the device"):
        fully_shard_model(build(zoo.Plain), fsdp_unit_modules=[zoo.Block], offload_policy=mine)
    with pytest.raises(TypeError, match=r"fully_shard\(offload_policy\) takes CPUOffloadPolicy"):
        fsdp2.fully_shard(nn.Linear(2, 2), offload_policy="optimizer")
