"""Tests of what surrounds a step on a GPU: groups, scalers, streams, pinned memory, device indices and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_models import FAKE, MODES, same_bits, sharded, tokens, whole
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import OptimizerOffloadPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.models.llama import Block

COMPILED = MODES[-1]


def test_group_of_its_own_beside_a_bound_device() -> None:
    """With ``device_id``, NCCL splits the default communicator to make other groups."""
    torch.cuda.set_device(0)
    device = None if FAKE else torch.device("cuda", 0)  # torch takes no device_id on CPUs
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        losses = []
        for mesh in (None, DeviceMesh.from_group(dist.new_group([0]), "cuda", mesh_dim_names=("dp",))):
            model = fully_shard_model(whole(), mesh, fsdp_unit_modules=[Block])
            with same_bits():
                loss = model(*tokens())
                loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["eager", COMPILED])
def test_scaler_skips_steps_with_infinite_gradients(mode: str) -> None:
    model, call = sharded(mode, torch.float16)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**4, growth_interval=1000)
    for infinite in (False, True, False):
        before = [param.to_local().clone() for param in model.parameters()]
        scaler.scale(call(*tokens()) * (float("inf") if infinite else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))
        assert same is infinite
    assert scaler.get_scale() == 2.0**3


@pytest.mark.usefixtures("one_rank")
def test_fused_adamw_on_sharded_parameters() -> None:
    """Torch's fused kernel takes the package's DTensors as they are, and gives the bits of plain tensors."""
    model = fully_shard_model(whole(), fsdp_unit_modules=[Block])
    alone = [param.to_local().detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plain = torch.optim.AdamW(alone, lr=1e-3, fused=True)
    for _ in range(3):
        model(*tokens()).backward()
        for mine, its in zip(alone, model.parameters(), strict=True):
            mine.grad = its.grad.to_local().clone()
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
    for mine, its in zip(alone, model.parameters(), strict=True):
        assert torch.equal(mine, its.to_local())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["eager", COMPILED])
def test_other_stream_and_pinned_batch(mode: str) -> None:
    """A batch that is copied from pinned memory and a step on another stream give the bits of a plain step."""
    _, call = sharded(mode)
    x, y = tokens()
    with same_bits():
        expected = [call(x, y).detach() for _ in range(2)][-1].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            pinned = [each.cpu().pin_memory() for each in (x, y)]
            batch = [each.to("cuda", non_blocking=True) for each in pinned]
            loss = call(*batch)
            loss.backward()
            for each in batch:
                each.record_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert torch.equal(loss.detach(), expected)


@pytest.mark.skipif(FAKE, reason="FAKE GPU: there is one device, whatever its index")
@pytest.mark.usefixtures("one_rank")
def test_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        fully_shard_model(whole(), fsdp_unit_modules=[Block], device=f"cuda:{torch.cuda.device_count()}")


@pytest.mark.usefixtures("one_rank")
def test_device_given_by_index() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    model = fully_shard_model(whole(), fsdp_unit_modules=[Block], device=last)
    assert {param.to_local().device for param in model.parameters()} == {last}


@pytest.mark.usefixtures("one_rank")
def test_checkpoint_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """A model and an optimizer that are loaded onto a GPU take the same next step as those that were saved."""
    found = []
    for saves in (True, False):
        model, call = sharded("eager")
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        checkpoints = Checkpoints(tmp_path)

        def step(call: object = call, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            with same_bits():
                loss = call(*tokens())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        if saves:
            step()
            checkpoints.save(1, model, optimizer)
            random = torch.rand(4, device="cuda")
        else:
            assert checkpoints.load(model, optimizer) is not None
            assert torch.equal(torch.rand(4, device="cuda"), random)
        found.append([step(), step(), *(param.to_local().clone() for param in model.parameters())])
    assert found[0][-1].device.type == "cuda"
    for saved, loaded in zip(*found, strict=True):
        assert torch.equal(saved, loaded)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
def test_host_memory(mode: str) -> None:
    """Shards and the optimizer in host memory, and the optimizer alone, step to the same bits."""
    found = []
    for policy in (CPUOffloadPolicy(), OptimizerOffloadPolicy(), OptimizerOffloadPolicy(pin_memory=False)):
        model, call = sharded(mode, torch.bfloat16, offload_policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        losses = []
        for step in range(3):
            with same_bits():
                losses.append(call(*tokens(step)))
                losses[-1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for bucket in model.sharded.buckets:
            assert bucket.flat.device.type == "cpu"
            assert bucket.flat.is_pinned() is (policy.pin_memory and not FAKE)
            assert bucket.source().device.type == ("cuda" if bucket.lane.step else "cpu")
        found.append([*(loss.detach().cpu() for loss in losses), *(param.to_local() for param in model.parameters())])
    for other in found[1:]:
        if mode == "inductor":  # which fuses otherwise where shards are elsewhere, and so rounds to bfloat16 elsewhere
            assert [loss.item() for loss in other[:3]] == pytest.approx(
                [loss.item() for loss in found[0][:3]], rel=2**-8
            )
        else:
            assert all(map(torch.equal, found[0], other))
