"""What is in host memory meets what is on the device only in copies; and how much of each a step takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from arenas import DEVICE, HOST, arenas, on_host, peaks
from parity import EAGER, INDUCTOR, batches, build, shard
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig

POLICIES = pytest.mark.parametrize(
    "policy", [CPUOffloadPolicy(), OptimizerOffloadPolicy()], ids=["everything", "optimizer"]
)


@pytest.mark.long_if("*-optimizer")
@POLICIES
@on_ranks(2)
def test_arenas_meet_in_copies(policy: Any) -> None:
    """On a GPU, an operator over both is an error, and so is a collective of NCCL in host memory."""
    data = batches(2)[:, dist.get_rank()]
    for flat in (False, True):
        with arenas() as found:
            precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model, call = shard(build(zoo.Plain), EAGER, sharding={"offload_policy": policy}, precision=precision)
            optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), flat=flat)
            for batch in data:
                with model.no_sync():
                    call(found.mark(batch.clone(), DEVICE)).backward()
                call(found.mark(batch.clone(), DEVICE)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                for param in model.parameters():
                    assert {found.of(param._local_tensor), found.of(param.grad.to_local())} == {HOST}
                optimizer.zero_grad()
            assert all(found.of(value) == DEVICE for _, value in model.full_parameters())
            with model.summon_full_params():
                for param in model.module.parameters():
                    param.data.mul_(0.5)
            model.broadcast_params()
            model.load_state_dict(model.state_dict())
            with model.gathered(), torch.no_grad():
                call(found.mark(data[0].clone(), DEVICE))


@pytest.mark.long_if("*-2")
@pytest.mark.parametrize("strategy", [1, 2])
@on_ranks(2)
def test_residents(strategy: int) -> None:
    """Gathered parameters that stay are on the device, and no shard is a slice of them."""
    sharding = {"zero_dp_strategy": strategy, "offload_policy": OptimizerOffloadPolicy()}
    data = batches(1)[0, dist.get_rank()]
    with arenas() as found:
        model, call = shard(build(zoo.Plain), EAGER, sharding=sharding)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for _ in range(2):
            call(found.mark(data.clone(), DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for bucket in model.sharded.buckets:
            assert found.of(bucket.flat) == HOST
            assert found.of(bucket.await_resident()) != HOST
            assert bucket.flat.untyped_storage().data_ptr() != bucket.resident.untyped_storage().data_ptr()


class _Demo:
    """The demo's model. If ``checkpointed``, each of its layers keeps its input alone for backward."""

    def __init__(self, policy: Any, mode: str, checkpointed: bool = True, batch: int = 1, **options: Any) -> None:
        torch.manual_seed(0)
        model = Llama(LlamaConfig())
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            if checkpointed:
                forward = block.forward
                block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
        self.model = fully_shard_model(model, fsdp_unit_modules=[Block], offload_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        options |= {"inner": mode}
        self.call = self.model if mode == EAGER else torch.compile(self.model, backend="mfsdp", options=options)
        self.tokens = torch.randint(0, 256, (batch, 128))
        self.update = on_host(self._update) if policy is not None else self._update

    def step(self) -> None:
        self.call(self.tokens, self.tokens).backward()
        self.update()
        self.optimizer.zero_grad()

    def _update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def device_bytes(self) -> int:
        """Return the most bytes on the device at one time in a step: shards, their copies, state and the step's."""
        for _ in range(2):  # state, and the order of units
            self.step()
        rest = 0
        for bucket in self.model.sharded.buckets:
            if not bucket.lane.shard.in_host_memory:
                rest += 3 * bucket.flat.nbytes  # with AdamW's two moments
            elif bucket.lane.has_local_copy:
                rest += bucket.source().nbytes
        return rest + peaks(self.step, self.update != self._update)[DEVICE]


@pytest.mark.long
@pytest.mark.parametrize("fake_world", [2], indirect=True)
@pytest.mark.parametrize("mode", [EAGER, INDUCTOR])
def test_half_of_the_device_memory(fake_world: int, mode: str) -> None:
    """On two ranks, with short sequences and checkpointing, the demo's model takes at most half of ZeRO-3's."""
    plain, everything, optimizer = (
        _Demo(policy, mode).device_bytes() for policy in (None, CPUOffloadPolicy(), OptimizerOffloadPolicy())
    )
    assert everything <= plain / 2
    assert optimizer <= 2 * plain / 3


@pytest.mark.long
@pytest.mark.parametrize("fake_world", [2], indirect=True)
@pytest.mark.parametrize("mode", ["aot_eager", INDUCTOR])
def test_half_of_the_device_memory_for_the_demo(fake_world: int, mode: str) -> None:
    """With saved activations in host memory too, half of ZeRO-3's peak is enough for the demo's model and batch."""
    plain = _Demo(None, mode, checkpointed=False, batch=8)
    peak = plain.device_bytes()
    torch.compiler.reset()
    options = {"activation_offload": True, "memory_budget": peak // 2}
    half = _Demo(CPUOffloadPolicy(), mode, checkpointed=False, batch=8, **options)
    assert half.device_bytes() <= peak // 2


@pytest.mark.long
@on_ranks(2)
def test_saved_values_and_parameters_in_host_memory() -> None:
    """Both together, under a budget, do not change a bit."""
    data = batches(3)[:, dist.get_rank()]
    found = []
    for sharding, options in (
        ({}, {}),
        ({"offload_policy": CPUOffloadPolicy()}, {"activation_offload": True, "activation_offload_least": 1}),
        ({"offload_policy": OptimizerOffloadPolicy()}, {"activation_offload": "auto", "memory_budget": "1GiB"}),
    ):
        model, _ = shard(build(zoo.Plain), EAGER, sharding=sharding)
        call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager", **options})
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for batch in data:
            losses.append(call(batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([*losses, *(param.full_tensor() for param in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
