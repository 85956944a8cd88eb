"""Offload together with what else changes weights, keeps them whole, steps, copies or saves them: bitwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from parity import AOT_EAGER, EAGER, batches, build, shard
from pool import on_ranks, shared_folder
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_state_dict
from mfsdp_compile.diagnostics.doctor import mesh_arguments

POLICIES = [CPUOffloadPolicy(), OptimizerOffloadPolicy()]
policies = pytest.mark.parametrize("policy", POLICIES, ids=["everything", "optimizer"])
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class Trained:
    """A model of the zoo that computes in bfloat16 from float32 shards, and its optimizer."""

    def __init__(
        self,
        policy: Any = None,
        mode: str = EAGER,
        seed: int = 0,
        optimizer: Callable[..., Any] = adamw,
        **sharding: Any,
    ) -> None:
        options = sharding | {"offload_policy": policy}
        self.model, self.call = shard(build(zoo.Plain, seed), mode, precision=BF16, sharding=options)
        self.optimizer = optimizer(self.model.parameters())
        self.losses: list[Tensor] = []

    def train(self, steps: int = 2) -> Trained:
        for batch in batches(steps)[:, dist.get_rank()]:
            self.losses.append(self.call(batch).detach())
            self.call(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def values(self) -> list[Tensor]:
        return [*self.losses, *(param.detach().to_local().clone() for param in self.model.parameters())]


def assert_same(mine: Trained, its: Trained) -> None:
    assert all(map(torch.equal, mine.values(), its.values()))


@policies
@on_ranks(2)
def test_whole_parameters(policy: Any) -> None:
    """What is written to whole parameters is gathered by the next forward."""

    def run(policy: Any) -> tuple[Trained, list[Tensor]]:
        job = Trained(policy).train()
        whole = [value.clone() for _, value in job.model.full_parameters()]
        with job.model.summon_full_params():
            for param in job.model.module.parameters():
                param.data.mul_(0.5)
        with job.model.gathered(), torch.no_grad():
            whole.append(job.call(batches(1)[0, dist.get_rank()]))
        return job.train(1), whole

    (plain, wholes), (offloaded, its) = run(None), run(policy)
    assert all(map(torch.equal, wholes, its))
    assert_same(plain, offloaded)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "one by one": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "flat": lambda params: fully_shard_optimizer(adamw(params), flat=True),
    "whole": lambda params: fully_shard_optimizer(torch.optim.Adafactor(params, lr=0.01), whole=True),
    "Muon": lambda params: fully_shard_optimizer(torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.01)),
}


@pytest.mark.long_unless("*-optimizer")
@policies
@on_ranks(2)
def test_optimizers(policy: Any) -> None:
    for optimizer in OPTIMIZERS.values():
        assert_same(Trained(optimizer=optimizer).train(), Trained(policy, optimizer=optimizer).train())


def _two_forwards(job: Trained) -> Trained:
    """Both forwards of a step before its backwards."""
    for batch in batches(2)[:, dist.get_rank()]:
        losses = [job.call(part) for part in batch.chunk(2)]
        for loss in losses:
            loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job


def _kept(job: Trained) -> Trained:
    job.model.set_accumulation(whole_gradients=True, keep_gathered=True)
    for batch in batches(2)[:, dist.get_rank()]:
        for number, part in enumerate(batch.chunk(2)):
            job.model.is_last_microbatch = number == 1
            job.call(part).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
    return job


@pytest.mark.long_unless("*-eager-*")
@policies
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_what_stays_gathered(policy: Any, mode: str) -> None:
    """From forward to backward, over microbatches, and between two forwards."""
    for steps, sharding in (
        (Trained.train, {"reshard_after_forward": False}),
        (_two_forwards, {}),
        (_kept, {}),
    ):
        assert_same(steps(Trained(mode=EAGER, **sharding)), steps(Trained(policy, mode, **sharding)))


@pytest.mark.long
@policies
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_portions(policy: Any, mode: str) -> None:
    """Backward gathers portions over two of four ranks, which are on the device."""
    sharding = {"reshard_after_forward": 2}
    assert_same(Trained(mode=EAGER, **sharding).train(), Trained(policy, mode, **sharding).train())


@policies
@on_ranks(2)
def test_loaded_weights(policy: Any) -> None:
    """Weights of another model are gathered after they are loaded, broadcast or copied."""
    plain = Trained(seed=5).train(1)
    batch = batches(1)[0, dist.get_rank()]
    with torch.no_grad():
        expected = plain.call(batch)
    whole = full_state_dict(plain.model, rank=None)
    on_the_first = whole if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    folder = shared_folder()
    dcp.save({"model": plain.model.state_dict()}, checkpoint_id=folder)

    def from_a_checkpoint(job: Trained) -> None:
        state = {"model": job.model.state_dict()}
        dcp.load(state_dict=state, checkpoint_id=folder)
        job.model.load_state_dict(state["model"], strict=False)

    def copied(job: Trained) -> None:
        with torch.no_grad():
            for mine, its in zip(job.model.parameters(), plain.model.parameters(), strict=True):
                mine.copy_(its)

    for load in (
        lambda job: job.model.load_state_dict(plain.model.state_dict()),
        lambda job: job.model.module.load_state_dict(whole),
        lambda job: set_model_state_dict(job.model.module, copy.copy(on_the_first), options=options),
        from_a_checkpoint,
        copied,
    ):
        job = Trained(policy).train(1)
        load(job)
        with torch.no_grad():
            assert torch.equal(job.call(batch), expected)


@pytest.mark.long_unless("*-optimizer")
@policies
@on_ranks(4)
def test_broadcast(policy: Any) -> None:
    """Over the ranks with the same shard: what one of them has changed."""
    expected = Trained(**mesh_arguments("HSDP optim_grads_params"))
    job = Trained(policy, **mesh_arguments("HSDP optim_grads_params"))
    batch = batches(1)[0, dist.get_rank()]
    with torch.no_grad():
        before = job.call(batch)
        for each, factors in ((expected, (2, 2)), (job, (2, 3))):
            for param in each.model.parameters():
                param.mul_(factors[each.model.sharded.topology.outer.rank])
        job.model.broadcast_params()
        assert torch.equal(job.call(batch), expected.call(batch))
        assert not torch.equal(job.call(batch), before)


@policies
@on_ranks(2)
def test_copies_of_a_model(policy: Any) -> None:
    job = Trained(policy).train(1)
    twin = copy.copy(job)
    twin.model = twin.call = copy.deepcopy(job.model)
    twin.optimizer = adamw(twin.model.parameters())
    twin.optimizer.load_state_dict(job.optimizer.state_dict())
    with torch.no_grad():
        for param in job.model.parameters():
            param.zero_()  # the copy has memory of its own, on both sides
    plain = Trained().train(1)
    twin.losses = plain.losses = []
    assert_same(twin.train(1), plain.train(1))


def save(root: str, policy: Any) -> None:
    job = Trained(policy).train(1)
    Checkpoints(root).save(1, job.model, fully_shard_optimizer(job.optimizer))


def resume(root: str, policy: Any) -> list[list[float]]:
    job = Trained(policy, seed=3)
    assert Checkpoints(root).load(job.model, fully_shard_optimizer(job.optimizer)) is not None
    return [value.flatten().tolist() for value in full_state_dict(job.train(1).model, rank=None).values()]


@pytest.mark.long
@pytest.mark.processes
def test_restarted_on_other_ranks(pools: Any, tmp_path: Any) -> None:
    """A run without offload goes on with it on half of the ranks, and the other way round."""
    for number, (before, after) in enumerate(((None, OptimizerOffloadPolicy()), (CPUOffloadPolicy(), None))):
        root = str(tmp_path / str(number))
        pools.of(4).run(save, root=root, policy=before)
        continued = [pools.of(2).run(resume, root=root, policy=policy)[0] for policy in (after, before)]
        assert continued[0] == continued[1]
