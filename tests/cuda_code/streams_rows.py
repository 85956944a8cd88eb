"""Small trainings for the checker of stream order, which run on fake GPUs and as they are."""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import parity
import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_optimizer
from mfsdp_compile.checkpoint import full_optimizer_state_dict, full_state_dict, host_copies, saving
from mfsdp_compile.runtime.guests.offload import host

EAGER, AOT_EAGER = parity.EAGER, parity.AOT_EAGER
STEPS = 2


@dataclass(frozen=True)
class Row:
    """One training.

    Args:
        sharding: Arguments of ``fully_shard_model``.
        compiling: Options of the backend.
        mesh: Sizes of the outer and the inner data-parallel dimension.
        model: Class of the model.
    """

    sharding: dict[str, Any] = field(default_factory=dict)
    compiling: dict[str, Any] = field(default_factory=dict)
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    model: Callable[[], nn.Module] = zoo.Plain
    ranks: int = 2
    mesh: tuple[int, int] | None = None
    microbatches: int = 1
    modes: tuple[str, ...] = (EAGER, AOT_EAGER)
    captures: bool = False
    registers: bool = False
    then: Callable[[Any, Any], list[Tensor]] | None = None
    waits: bool = False
    """Whether the host waits for the GPU in later steps."""
    is_long: bool = False


def state_dicts(model: Any, optimizer: Any) -> list[Tensor]:
    """What :class:`.HostCopies` makes: whole tensors on rank 0."""
    state = full_optimizer_state_dict(optimizer)
    return [*full_state_dict(model).values(), *(held["momentum_buffer"] for held in state.get("state", {}).values())]


def batches(model: Any, optimizer: Any) -> list[Tensor]:
    """Copies to the host in batches of 32 bytes: it waits once for each, while the GPU copies the next."""
    copies, given = host_copies.HostCopies[int](), [torch.full((4,), float(i)) for i in range(5)]
    with mock.patch.object(host_copies, "BATCH_BYTES", 32):
        found = [copies.add(i, values) for i, values in enumerate(given)]
        found.append(copies.rest())
    if is_fake():
        assert [[i for i, _ in done] for done in found] == [[], [], [], [0, 1], [], [2, 3, 4]]
    return [copy for done in found for _, copy in done]


def staged(model: Any, optimizer: Any) -> list[Tensor]:
    """What a checkpoint writes."""
    with saving._host_copies() as copied:
        state = saving._staged(model.state_dict(), copied)
    return [value.to_local() for value in state.values()]


def written(model: Any, optimizer: Any) -> list[Tensor]:
    """Write to parameters while forward has copies of them under way."""
    with torch.no_grad():
        loss = model(torch.ones(6, 8))
        for param in model.parameters():
            param.mul_(0.5)
    return [loss]


def loaded(model: Any, optimizer: Any) -> list[Tensor]:
    """Load values while forward has copies of the old ones under way."""
    state = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    with torch.no_grad():
        loss = model(torch.ones(6, 8))
    model.load_state_dict(state)
    return [loss]


def clipped(model: Any, optimizer: Any) -> list[Tensor]:
    """Look at gradients, change them and step, between a backward and the next."""
    model(torch.ones(6, 8)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False).full_tensor()
    grads = [param.grad.to_local().clone() for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return [norm, *grads]


def asked(model: Any, optimizer: Any) -> list[Tensor]:
    """Gradients that autograd returns."""
    found = torch.autograd.grad(model(torch.ones(6, 8)), list(model.parameters()))
    return [gradient.to_local().clone() for gradient in found]


def summoned(model: Any, optimizer: Any) -> list[Tensor]:
    """Write to whole parameters, which become shards again."""
    with model.summon_full_params(), torch.no_grad():
        for param in model.module.parameters():
            param.mul_(0.5)
        return [param.detach().clone() for param in model.module.parameters()]


def dropped(model: Any, optimizer: Any) -> list[Tensor]:
    """Drop values whose copies nothing waits for, as a backward that fails does."""
    copy = host.offload_saved(torch.ones(64))
    found = [torch.full((64,), 2.0)]
    host.await_copy(copy)
    host.fetch_saved(copy, copy.device)
    found.append(torch.full((64,), 3.0))
    host.settle(copy.device)
    return found


ROWS = {
    "full": Row(),
    "no_shard": Row({"zero_dp_strategy": 0}, is_long=True),
    "optim": Row({"zero_dp_strategy": 1}),
    "optim_grads": Row({"zero_dp_strategy": 2}, is_long=True),
    "double_buffer": Row({"fsdp_double_buffer": True}, is_long=True),
    "largest_buffer": Row({"maxpool_double_buffer": True}, is_long=True),
    "accumulation": Row({"sync_model_each_microbatch": False, "zero_dp_strategy": 1}, microbatches=2),
    "offload": Row({"offload_policy": CPUOffloadPolicy()}, waits=True),
    "offload, accumulation": Row({"offload_policy": CPUOffloadPolicy()}, waits=True, microbatches=2, is_long=True),
    "offload, written": Row({"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), then=written),
    "offload, loaded": Row(
        {"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), is_long=True, then=loaded
    ),
    "offload, clipped": Row(
        {"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), then=clipped, is_long=True
    ),
    "offload, asked": Row({"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), is_long=True, then=asked),
    "optimizer offload, loaded": Row(
        {"offload_policy": OptimizerOffloadPolicy()}, waits=True, modes=(EAGER,), is_long=True, then=loaded
    ),
    "optimizer offload, clipped": Row(
        {"offload_policy": OptimizerOffloadPolicy()}, waits=True, modes=(EAGER,), is_long=True, then=clipped
    ),
    "optim, loaded": Row({"zero_dp_strategy": 1}, modes=(EAGER,), then=loaded, is_long=True),
    "offload, not pinned": Row({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, waits=True, is_long=True),
    "optimizer offload": Row({"offload_policy": OptimizerOffloadPolicy()}, waits=True),
    "activation offload": Row(
        compiling={"activation_offload": True, "activation_offload_least": 1}, modes=(AOT_EAGER,)
    ),
    "dropped": Row(modes=(EAGER,), then=dropped),
    "nccl_ub": Row({"nccl_ub": True}, registers=True),
    "fp8": Row(precision=MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn, param_dtype=torch.bfloat16)),
    "state dict": Row(modes=(EAGER,), then=state_dicts),
    "state dict, offloaded": Row(
        {"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), then=state_dicts, is_long=True
    ),
    "batches": Row(modes=(EAGER,), then=batches, is_long=True),
    "staged": Row(modes=(EAGER,), then=staged),
    "staged, offloaded": Row(
        {"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), is_long=True, then=staged
    ),
    "captured": Row({"cuda_graph_mode": True}, captures=True, waits=True, modes=(EAGER, AOT_EAGER)),
    "offload, summoned": Row(
        {"offload_policy": CPUOffloadPolicy()}, waits=True, modes=(EAGER,), then=summoned, is_long=True
    ),
    "summoned": Row(modes=(EAGER,), then=summoned, is_long=True),
    "optim, summoned": Row({"zero_dp_strategy": 1}, modes=(EAGER,), then=summoned, is_long=True),
    "NaN looked for": Row({"report_nan_in_param_grad": True}, waits=True, is_long=True),
    "fine-grained": Row({"enable_fine_grained_param_gather": True}, is_long=True),
    "buffers, offload": Row(
        {"offload_policy": CPUOffloadPolicy(), "fsdp_double_buffer": True}, waits=True, is_long=True
    ),
    "called twice": Row({"offload_policy": CPUOffloadPolicy()}, waits=True, model=zoo.CalledTwice, is_long=True),
    "checkpointed": Row(
        {"offload_policy": CPUOffloadPolicy()},
        waits=True,
        model=zoo.CheckpointedReentrant,
        modes=(EAGER,),
        is_long=True,
    ),
    "offload, hsdp": Row({"offload_policy": CPUOffloadPolicy()}, waits=True, ranks=4, mesh=(2, 2)),
    "offload, portions": Row({"offload_policy": CPUOffloadPolicy(), "reshard_after_forward": 2}, waits=True, ranks=4),
    "hsdp": Row(ranks=4, mesh=(2, 2)),
    "hfsdp": Row({"outer_dp_sharding_strategy": 1}, ranks=4, mesh=(2, 2)),
    "portions": Row({"reshard_after_forward": 2}, ranks=4),
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False)


def plain(names: list[str]) -> dict[str, list[str]]:
    """Run rows as they are, in the eager path."""
    return {name: train(ROWS[name], EAGER) for name in names}


def train(row: Row, mode: str, after_first_step: Callable[[], object] = lambda: None) -> list[str]:
    """Train, and return digests of losses and of this rank's shards."""
    sharding = {"device": "cpu", **row.sharding}
    if row.mesh is not None:
        mesh = init_device_mesh("cpu", row.mesh, mesh_dim_names=("outer", "inner"))
        sharding |= {
            "device_mesh": mesh,
            "dp_shard_dim": "inner",
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": mesh._flatten("both").get_group(),
        }
    compiling = {} if mode == EAGER else row.compiling
    model, call = parity.shard(parity.build(row.model), mode, sharding=sharding, precision=row.precision, **compiling)
    optimizer = fully_shard_optimizer(sgd(model.parameters()))
    model.set_model_auto_sync(row.microbatches == 1 or sharding.get("sync_model_each_microbatch", True))

    def step(x: Tensor, last: bool) -> Tensor:
        model.is_last_microbatch = last
        loss = call(x)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run: Callable[..., Tensor] = step
    if row.captures:
        run = capturing(call, step)
    losses = []
    for number, batch in enumerate(parity.batches(steps=STEPS + 2 * row.captures)[:, dist.get_rank()]):
        for micro in range(row.microbatches):
            loss = run(batch.chunk(row.microbatches)[micro], micro == row.microbatches - 1)
            losses.append(loss.detach().clone())
        if number == 0:
            after_first_step()
    after = []
    if row.then is not None:
        after = [digest(tensor) for tensor in row.then(model, optimizer)]
        losses.append(step(torch.ones(6, 8), True).detach())
    shards = [param._local_tensor.detach() for param in model.parameters()]
    return [*after, *(digest(tensor) for tensor in (*losses, *shards))]


def is_fake() -> bool:
    return hasattr(builtins, "_fake_gpu")


def capturing(call: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step as a captured one, on fake GPUs."""
    if not is_fake():
        return step
    from mfsdp_compile import capture_step

    return capture_step(call, step)


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().clone().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()[:16]
