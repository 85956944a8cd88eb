"""The passes' descriptions of buckets, made from their plans and topologies."""

from __future__ import annotations

from dataclasses import replace

from mfsdp_compile.passes.context import BucketInfo
from mfsdp_compile.runtime.geometry.bucket_plan import BucketPlan
from mfsdp_compile.runtime.geometry.topology import Topology


def bucket_info(plan: BucketPlan, topology: Topology, portions: int = 0) -> BucketInfo:
    """Return the passes' description of a bucket.

    Args:
        portions: Number of ranks that backwards gather over, for all buckets; 0: as the plan says. If there is no group
            of that size: the ranks that forwards gather over.
    """
    portion, reshard = topology.portions.get(portions or plan.portions), plan.reshard_after_forward
    exchange = plan.exchange(topology)
    return BucketInfo(
        name=plan.name,
        unit=plan.unit,
        layout=plan.layout,
        exchange=exchange,
        gathered_bytes=plan.gathered_bytes,
        trainable=plan.requires_grad,
        has_resident=bool(exchange.lane.step),
        portion_size=portion.size if portion is not None else 0,
        portion_group=portion.name if portion is not None else "",
        releases_resident=topology.releases_resident,
        grad_dtype=plan.grad_dtype,
        stays=None if reshard is None or topology.accumulation.forwards_overlap else reshard is False,
    )


def served_info(plan: BucketPlan, topology: Topology) -> BucketInfo:
    """Return the passes' description of a bucket that the eager path gathers and reduces.

    To the passes it is whole at all times and on one rank. What stands for its shard is a tensor without memory that
    takes the packed gradient.
    """
    exchange = plan.exchange(topology)
    alone = exchange._replace(lane_key=exchange.lane.packing.key)
    return BucketInfo(
        name=plan.name,
        unit=plan.unit,
        layout=replace(plan.layout, world_size=1, shard_numel=plan.layout.numel),
        exchange=alone,
        gathered_bytes=plan.gathered_bytes,
        trainable=plan.requires_grad,
        has_resident=True,
        grad_dtype=plan.grad_dtype,
    )


def region_info(plan: BucketPlan, topology: Topology, info: BucketInfo) -> BucketInfo:
    """Return the description of a bucket that a region reads: it stays in float8 if the graph around it decided so.

    Args:
        info: Description of the bucket in the graph around the region.
    """
    served = replace(served_info(plan, topology), has_resident=False)
    if not info.exchange.stays_quantized:
        return served
    exchange = served.exchange._replace(scaling=info.exchange.scaling, form=info.exchange.form)
    return replace(served, exchange=exchange, gathered_bytes=info.gathered_bytes)
