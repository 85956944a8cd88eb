"""A bucket in host memory: the stages of its lane, and what else its memory needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...lanes.lane import Lane
from ...lanes.plain import Cast
from ...lanes.rest import Rest
from ...lanes.stage import Call, Cost, Local, Spec
from . import host, operators

if TYPE_CHECKING:
    from ...geometry.bucket_plan import BucketPlan
    from ...geometry.topology import Topology


@dataclass(frozen=True)
class Fetch(Local):
    """Copy from host memory to this rank's device of a type."""

    device: str

    @property
    def text(self) -> str:
        return "from host memory"

    def out(self, spec: Spec) -> Spec:
        return spec._replace(in_host_memory=False)

    def call(self, spec: Spec) -> Call:
        return operators.FETCH, (self.device,)

    def cost(self, spec: Spec) -> Cost:
        return Cost(copied=spec.bytes)


@dataclass(frozen=True)
class Store(Local):
    """Copy to host memory.

    Args:
        pins: Whether the memory is pinned.
    """

    pins: bool

    @property
    def text(self) -> str:
        return "to host memory"

    def out(self, spec: Spec) -> Spec:
        return spec._replace(in_host_memory=True)

    def call(self, spec: Spec) -> Call:
        return operators.OFFLOAD, (self.pins,)

    def cost(self, spec: Spec) -> Cost:
        return Cost(copied=spec.bytes)


@dataclass(frozen=True)
class HostMemory(Rest):
    """In host memory.

    Args:
        pins: Whether the memory is pinned, if the device is a GPU. Copies from and to other memory are slower, and the
            thread waits for them. Pinned memory cannot be swapped out.
        optimizer_only: Whether gathers need no copy from the host: the device keeps what is gathered, and gets it from
            the host after each change of the shard.
    """

    pins: bool = True
    optimizer_only: bool = False

    def __str__(self) -> str:
        memory = "pinned host memory" if self.pins else "host memory"
        return f"{memory}, gathered from the device" if self.optimizer_only else memory

    def check(self, bucket: BucketPlan, topology: Topology) -> None:
        if topology.is_alone and not self.optimizer_only:
            raise NotImplementedError(
                f"offload_policy: unit {bucket.unit!r} has experts that no other rank shares, which are used from "
                "their shard without a gather. Use OptimizerOffloadPolicy for the unit, which keeps them on the "
                "device, or share its experts between ranks (expt_device_mesh)."
            )
        if not topology.gathers_shards and not self.optimizer_only:
            raise NotImplementedError(
                "CPUOffloadPolicy is for shards that are gathered at each use, but the model is sharded as "
                f"{topology}, where gathered parameters stay on the device. Use OptimizerOffloadPolicy, which leaves "
                "them there, or zero_dp_strategy='optim_grads_params', with outer_dp_sharding_strategy='no_shard' if "
                "there are outer ranks."
            )
        if bucket.scaling:
            raise NotImplementedError(
                f"offload_policy: unit {bucket.unit!r} is gathered quantized ({bucket.scaling}) from a quantized shard "
                "on the device, which is made from the main weights there. Leave the unit out of offload_policy, or "
                "gather it in the compute dtype (no param_comm_dtype, enable_fsdp_float8_all_gather or "
                "quantized_model_init)."
            )
        if bucket.is_extension:
            raise NotImplementedError(
                f"offload_policy: unit {bucket.unit!r} has a parameter of a class with fsdp_pre_all_gather, which "
                "makes what is sent from the shard on the device. Leave the unit out of offload_policy."
            )
        if bucket.keeps_memory:
            raise NotImplementedError(
                f"offload_policy: unit {bucket.unit!r} would be in host memory, whose copies and optimizer step a CUDA "
                "graph cannot hold (cuda_graph_mode). Use only one of them."
            )

    def lane(self, lane: Lane, topology: Topology) -> Lane:
        return self.around(lane, topology.mesh.device_type)

    def around(self, lane: Lane, device: str) -> Lane:
        """Return a lane with copies to a type of device, and back."""
        fetch, step, use = Fetch(device), lane.step, lane.use
        if step:
            step = (fetch, *step)
        elif self.optimizer_only:
            casts = tuple(itertools.takewhile(lambda stage: isinstance(stage, Cast), use))
            step, use = (fetch, *casts), use[len(casts) :]
        else:
            use = (fetch, *use)
        shard = lane.shard._replace(in_host_memory=True)
        return replace(lane, shard=shard, step=step, use=use, rest=(*lane.rest, Store(self.pins)))

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host.empty(numel, dtype, device, self.pins)

    def fetch(self, shard: Tensor, device: torch.device) -> Tensor:
        return host.fetch(shard, device)

    def settle(self, device: torch.device) -> None:
        host.settle(device)

    def settler(self, shard: Tensor) -> Callable[[], None]:
        return functools.partial(host.settle_pinned, shard)
