"""Shards, gradients and optimizer state in host memory.

On CPU both arenas are there, and copies between them are counted.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, assert_bitwise, batches, build, shard, train_both_ways, train_sharded
from pool import on_ranks
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from mfsdp_compile import MixedPrecisionPolicy, fsdp2, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.backend.bucket_infos import bucket_info
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost, resting_memory
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.offload import host
from mfsdp_compile.runtime.guests.offload import operators as operators  # defines mfsdp::fetch

OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


@dataclass
class Copies:
    """Copies between the arenas, and gathers, in the order in which they started."""

    order: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=lambda: {"fetch": 0, "offload": 0})


@contextlib.contextmanager
def copies() -> Iterator[Copies]:
    """Record the copies that start inside, each of which must be to memory of its own."""
    found = Copies()
    kinds = {"fetch": host.fetch, "offload": host.offload}

    def counting(kind: str) -> Callable[..., Tensor]:
        def copied(source: Tensor, *args: Any) -> Tensor:
            target = kinds[kind](source, *args)
            assert target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
            assert torch.equal(target, source)
            found.order.append(kind)
            found.bytes[kind] += source.numel() * source.element_size()
            return target

        return copied

    plain = compat.all_gather

    def gather(*args: Any) -> Tensor:
        found.order.append("gather")
        return plain(*args)

    with (
        mock.patch.object(host, "fetch", counting("fetch")),
        mock.patch.object(host, "offload", counting("offload")),
        mock.patch.object(compat, "all_gather", gather),
    ):
        yield found


MODELS = [zoo.Plain, zoo.Uneven, zoo.Tied, zoo.FrozenParameters, zoo.Unused, zoo.Checkpointed]


@pytest.mark.long_unless("*-Plain")
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_same_numbers(model: type[nn.Module]) -> None:
    """Bitwise as without offload, eager and compiled."""
    data = batches(3)
    plain = train_sharded(model, EAGER, data)
    assert_bitwise(plain, train_both_ways(model, data, None, sharding=OFFLOADED))


@pytest.mark.long
@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_accumulation_in_lower_precision(sync: bool) -> None:
    """Microbatches are summed on the host; what is gathered is cast on the device."""
    data = batches(2).bfloat16()
    options = {"precision": BF16, "microbatches": 2}
    sharding = {"sync_model_each_microbatch": sync}

    def model() -> nn.Module:
        return zoo.Plain().bfloat16()

    plain = train_sharded(model, EAGER, data, sharding=sharding, **options)
    assert_bitwise(plain, train_both_ways(model, data, None, sharding=sharding | OFFLOADED, **options))


@pytest.mark.long
@on_ranks(4)
def test_hybrid() -> None:
    """With outer ranks, the second stage runs on the device, and its result is copied."""
    data = batches(2)
    plain = train_sharded(zoo.Plain, EAGER, data, sharding=mesh_arguments("HSDP optim_grads_params"))
    offloaded = mesh_arguments("HSDP optim_grads_params") | OFFLOADED
    assert_bitwise(plain, train_both_ways(zoo.Plain, data, None, sharding=offloaded))


@pytest.mark.long
@on_ranks(2)
def test_inductor() -> None:
    """Inductor rounds as for the model without offload."""
    data = batches(2)
    plain, offloaded = (train_sharded(zoo.Plain, INDUCTOR, data, sharding=each) for each in ({}, OFFLOADED))
    assert_bitwise(plain, offloaded)


@on_ranks(2)
def test_same_as_fsdp2() -> None:
    """Bitwise as torch's own ``CPUOffloadPolicy``, for the blocks and for all of the model.

    Norms are summed in other orders.
    """
    data = batches(3)

    def trained(api: Any, everything: bool) -> tuple[list[Tensor], Tensor]:
        model: Any = build(zoo.Plain)
        for module in (*model.blocks, model):
            offloads = everything or module is not model
            api.fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in data:
            optimizer.zero_grad()
            model(batch[dist.get_rank()]).backward()
            optimizer.step()
        values = [param.full_tensor() for param in model.parameters()]
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return values, norm.full_tensor() if isinstance(norm, DTensor) else norm

    for everything in (True, False):
        (theirs, their_norm), (mine, norm) = (trained(api, everything) for api in (fsdp, fsdp2))
        assert all(map(torch.equal, mine, theirs))
        torch.testing.assert_close(norm, their_norm)


@on_ranks(2)
def test_copies() -> None:
    """One copy to the device before each gather, that of the next unit included, and one back per reduced gradient."""
    data = batches(2)[:, dist.get_rank()]
    for mode in (EAGER, AOT_EAGER):
        model, call = shard(build(zoo.Plain).bfloat16(), mode, sharding=OFFLOADED, precision=BF16)
        buckets = model.sharded.buckets
        for batch in data:
            with copies() as found:
                call(batch.bfloat16()).backward()
        order = [kind for kind in found.order if kind != "offload"]
        if mode == EAGER:  # a graph calls the collective itself
            assert order == ["fetch", "gather"] * (len(order) // 2)
        # Backward gathers neither the last one again nor, compiled, the first, whose values it does not need.
        again = len(buckets) - 1 - (mode == AOT_EAGER)
        assert order.count("fetch") == len(buckets) + again
        assert found.order.count("offload") == len(buckets)
        assert found.bytes["offload"] == sum(bucket.flat.nbytes for bucket in buckets), "in the main dtype"
        assert found.bytes["fetch"] > found.bytes["offload"]
        assert all(bucket.flat.dtype == torch.float32 for bucket in buckets)
        if mode == EAGER:
            last = len(found.order) - 1 - found.order[::-1].index("gather")
            assert found.order.index("offload") < last, "gradients leave while the backward runs"
        else:
            (record,) = model.sharded.compiled_graphs
            schedule = "\n".join(itertools.chain(*record.schedules.values()))
            for phrase, count in (
                ("B from host memory", 2 * len(buckets) - 2),
                ("B to host memory", len(buckets)),
            ):
                assert schedule.count(phrase) == count


@on_ranks(2)
def test_some_units() -> None:
    """A mapping chooses units, by class, module or the model; code of units in different places is not shared."""
    first = build(zoo.Plain)
    policy = {zoo.Block: CPUOffloadPolicy(), first.blocks[1]: None, first: OffloadPolicy()}
    sharded, call = shard(first, AOT_EAGER, sharding={"offload_policy": policy})
    offloaded = {b.plan.unit for b in sharded.sharded.buckets if b.lane.shard.in_host_memory}
    assert offloaded == {"blocks.0", "blocks.2"}
    plain, _ = shard(build(zoo.Plain), EAGER)
    data = batches(1)[0, dist.get_rank()]
    for model in (call, plain):
        model(data).backward()
    for a, b in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad.to_local(), b.grad.to_local())


@on_ranks(2)
def test_blocks_compiled_one_by_one() -> None:
    """Served code: the eager path fetches and copies back."""
    data = batches(1)[0, dist.get_rank()]
    found = []
    for sharding in ({}, OFFLOADED):
        model = build(zoo.Plain)
        sharded, call = shard(model, EAGER, sharding=sharding)
        for block in model.blocks:
            block.compile(backend="mfsdp", options={"inner": "aot_eager"})
        with copies() as counted:
            call(data).backward()
        assert counted.order.count("offload") == (len(sharded.sharded.buckets) if sharding else 0)
        found.append([param.grad.to_local() for param in sharded.parameters()])
    assert all(map(torch.equal, *found))


@on_ranks(2)
def test_at_rest() -> None:
    """State dicts, whole parameters, copies, meta devices and optimizers by parameter or flat."""
    data = batches(2)[:, dist.get_rank()]

    def trained(model: Any, flat: bool) -> Any:
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), flat=flat)
        for batch in data:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(value.device.type == "cpu" for value in optimizer.state[next(model.parameters())].values())
        return model

    plain = trained(shard(build(zoo.Plain), EAGER)[0], flat=False)
    for flat in (False, True):
        model = trained(shard(build(zoo.Plain), EAGER, sharding=OFFLOADED)[0], flat)
        twin = copy.deepcopy(model)
        for bucket, its in zip(model.sharded.buckets, twin.sharded.buckets, strict=True):
            assert its.plan.rest == bucket.plan.rest
            assert torch.equal(its.flat, bucket.flat)
            assert its.flat.data_ptr() != bucket.flat.data_ptr()
        for name, param in plain.state_dict().items():
            for each in (model, twin):
                assert torch.equal(param.full_tensor(), each.state_dict()[name].full_tensor())
        assert torch.equal(plain(data[0]), twin(data[0]))


@on_ranks(2)
def test_meta_device() -> None:
    """Parameters on the meta device are drawn where modules are, and kept on the host."""
    runs = []
    for sharding in ({}, OFFLOADED):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = zoo.Plain()
        torch.manual_seed(1)
        sharded, _ = shard(model, EAGER, sharding=sharding | {"init_model_with_meta_device": True})
        runs.append([param.to_local() for param in sharded.parameters()])
    assert all(map(torch.equal, *runs))


@on_ranks(2)
def test_moving_a_model() -> None:
    """A model with shards in host memory may be moved there, as ``to_empty(device="cpu")`` does, or to its device."""
    model, _ = shard(build(zoo.Plain), EAGER, sharding=OFFLOADED)
    values = [param.to_local().clone() for param in model.parameters()]
    with contextlib.ExitStack() as patches:
        for bucket in model.sharded.buckets:
            patches.enter_context(mock.patch.object(bucket, "device", torch.device("meta")))  # stands for a GPU
        model.to("meta")
        model.to_empty(device="cpu")
        with pytest.raises(RuntimeError, match="cannot be moved"):
            model.to(torch.bfloat16)
    assert all(map(torch.equal, values, (param.to_local() for param in model.parameters())))


@on_ranks(2)
def test_a_later_write_is_seen() -> None:
    """A unit that was fetched is fetched again after the CPU has written to its shard."""
    model, call = shard(build(zoo.Plain), EAGER, sharding=OFFLOADED)
    data = batches(1)[0, dist.get_rank()]
    before = call(data).detach()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    assert not torch.equal(before, call(data))


def assert_refused(words: str, **sharding: Any) -> None:
    """Assert that a way to shard is refused by name, and that the model stays as it was."""
    model = build(zoo.Plain)
    with pytest.raises(NotImplementedError, match=words):
        fully_shard_model(model, fsdp_unit_modules=[zoo.Block], **sharding)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks(2)
def test_refusals() -> None:
    """What cannot be offloaded is refused by name, and the model stays as it was."""
    quantized = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
    for sharding, words in (
        ({"zero_dp_strategy": 1}, "zero_dp_strategy='optim_grads_params'"),
        ({"mixed_precision_policy": quantized}, "gathered quantized"),
        ({"cuda_graph_mode": True}, "CUDA graph"),
    ):
        assert_refused(words, **OFFLOADED, **sharding)
    for policy, error, words in (
        (True, TypeError, "CPUOffloadPolicy"),
        ({"blocks": CPUOffloadPolicy()}, TypeError, "no module or class"),
        ({nn.Linear(2, 2): CPUOffloadPolicy()}, ValueError, "not part of the model"),
    ):
        with pytest.raises(error, match=words):
            fully_shard_model(build(zoo.Plain), fsdp_unit_modules=[zoo.Block], offload_policy=policy)
    mine = CPUOffloadPolicy() if dist.get_rank() else None
    with pytest.raises(RuntimeError, match="host memory"):
        fully_shard_model(build(zoo.Plain), fsdp_unit_modules=[zoo.Block], offload_policy=mine)


@on_ranks(2)
def test_memory_by_arena() -> None:
    """Shards and optimizer state of units in host memory are not counted as the device's."""
    found = []
    for policy in (None, {zoo.Block: CPUOffloadPolicy()}, CPUOffloadPolicy()):
        model, _ = shard(build(zoo.Plain), EAGER, sharding={"offload_policy": policy})
        infos = [bucket_info(bucket.plan, bucket.topology) for bucket in model.sharded.buckets]
        held = resting_memory(infos, OptimizerCost(state_bytes=8))
        shards = sum(b.flat.nbytes for b in model.sharded.buckets if not b.lane.shard.in_host_memory)
        assert (held[Category.SHARDS], held[Category.OPTIMIZER]) == (shards, 2 * shards)
        found.append(shards)
    assert found[0] > found[1] > found[2] == 0


def test_arenas_of_a_gpu() -> None:
    """Traced for a GPU: shards and their gradients are on the host; what is gathered and reduced is on the device."""
    with FakeTensorMode():
        shard = torch.empty(8)
        fetched = torch.ops.mfsdp.fetch(shard, "cuda")
        gradient = torch.ops.mfsdp.offload(fetched.bfloat16(), True)
    assert (fetched.device.type, fetched.shape, fetched.dtype) == ("cuda", shard.shape, shard.dtype)
    assert (gradient.device.type, gradient.shape, gradient.dtype) == ("cpu", shard.shape, torch.bfloat16)
