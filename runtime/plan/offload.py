"""Which buckets can be kept in host memory."""

from __future__ import annotations

from ..memory.bucket import BucketPlan
from ..topology import Topology

__all__ = ["check_offload"]


def check_offload(bucket: BucketPlan, topology: Topology) -> None:
    """Raise NotImplementedError if a bucket, or the way in which the model is sharded, cannot be offloaded."""
    if topology.is_alone:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} has experts that no other rank shares, which are used from their shard "
            "without a gather. Leave the unit out of offload_policy, or share its experts between ranks (expt_device_mesh)."
        )
    if not topology.gathers_shards:
        raise NotImplementedError(
            f"offload_policy is for shards that are gathered at each use, but the model is sharded as {topology}, where "
            "gathered parameters stay on the device. Use zero_dp_strategy='optim_grads_params', with "
            "outer_dp_sharding_strategy='no_shard' if there are outer ranks, or leave offload_policy out."
        )
    if bucket.scaling:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} is gathered quantized ({bucket.scaling}) from a quantized shard on the "
            "device, which is made from the main weights there. Leave the unit out of offload_policy, or gather it in the "
            "compute dtype (no param_comm_dtype, enable_fsdp_float8_all_gather or quantized_model_init)."
        )
    if bucket.is_extension:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} has a parameter of a class with fsdp_pre_all_gather, which makes what is "
            "sent from the shard on the device. Leave the unit out of offload_policy."
        )
    if bucket.keeps_memory:
        raise NotImplementedError(
            f"offload_policy: unit {bucket.unit!r} would be in host memory, whose copies and optimizer step a CUDA graph "
            "cannot hold (cuda_graph_mode). Use only one of them."
        )
