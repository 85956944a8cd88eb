"""What a unit keeps in host memory, and which buckets can be there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ..geometry.bucket_plan import BucketPlan, Offload
from ..geometry.topology import Topology


@dataclass(frozen=True)
class OptimizerOffloadPolicy:
    """Keeps main weights, their reduced gradients and the optimizer's state in host memory, and what is gathered on the
    device.

    As DeepSpeed's ``offload_optimizer``. Only reduced gradients are copied to the host, and changed weights back, once
    per optimizer step. Beside FSDP2's ``CPUOffloadPolicy``, which copies the shard to the device before each gather,
    this takes the memory of a shard in the dtype that is gathered.

    Args:
        pin_memory: Whether the memory is pinned, if the device is a GPU.
    """

    pin_memory: bool = True


AnyOffloadPolicy: TypeAlias = OffloadPolicy | OptimizerOffloadPolicy


def offload_of(policy: Any, argument: str) -> Offload | None:
    """Return how a policy keeps buckets in host memory; None: it does not.

    Args:
        policy: An ``OffloadPolicy`` of FSDP2, an :class:`OptimizerOffloadPolicy`, or None.
        argument: What it was given as, for messages.

    Raises:
        TypeError: It is something else.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if type(policy) not in (CPUOffloadPolicy, OptimizerOffloadPolicy):
        raise TypeError(
            f"{argument} takes CPUOffloadPolicy or OffloadPolicy of torch.distributed.fsdp, OptimizerOffloadPolicy of "
            f"mfsdp_compile, or None, got {policy!r:.200}"
        )
    return Offload(policy.pin_memory, optimizer_only=isinstance(policy, OptimizerOffloadPolicy))


def check_offload(bucket: BucketPlan, topology: Topology) -> None:
    """Raise NotImplementedError if a bucket, or the way in which the model is sharded, cannot be offloaded."""
    assert bucket.offload is not None
    if topology.is_alone and not bucket.offload.optimizer_only:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} has experts that no other rank shares, which are used from their "
            "shard without a gather. Use OptimizerOffloadPolicy for the unit, which keeps them on the device, or share "
            "its experts between ranks (expt_device_mesh)."
        )
    if not topology.gathers_shards and not bucket.offload.optimizer_only:
        raise NotImplementedError(
            f"CPUOffloadPolicy is for shards that are gathered at each use, but the model is sharded as {topology}, "
            "where gathered parameters stay on the device. Use OptimizerOffloadPolicy, which leaves them there, or "
            "zero_dp_strategy='optim_grads_params', with outer_dp_sharding_strategy='no_shard' if there are outer "
            "ranks."
        )
    if bucket.scaling:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} is gathered quantized ({bucket.scaling}) from a quantized shard on "
            "the device, which is made from the main weights there. Leave the unit out of offload_policy, or gather it "
            "in the compute dtype (no param_comm_dtype, enable_fsdp_float8_all_gather or quantized_model_init)."
        )
    if bucket.is_extension:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} has a parameter of a class with fsdp_pre_all_gather, which makes "
            "what is sent from the shard on the device. Leave the unit out of offload_policy."
        )
    if bucket.keeps_memory:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} would be in host memory, whose copies and optimizer step a CUDA "
            "graph cannot hold (cuda_graph_mode). Use only one of them."
        )
