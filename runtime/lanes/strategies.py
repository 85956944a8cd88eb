"""The strategies' lanes, one row each.

    strategy   step                use                 each                  due
    no_shard                                                                 all_reduce
    optim      all_gather                                                    reduce_scatter
    optim_grads  all_gather                            reduce_scatter
    optim_grads_params             all_gather          reduce_scatter
    HSDP       as the inner strategy                   + all_reduce over outer ranks, when due
    HFSDP      + all_gather over outer ranks, per step + reduce_scatter over outer ranks, when due

With ``whole_gradients``, what is in ``each`` is in ``due``. With ``keeps_gathered``, what is in ``use`` is in ``step``.
Around them, shards are cast to the compute dtype before they travel, and gradients to the main dtype, and scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from ..geometry.groups import Group
from ..geometry.layout import BucketLayout
from ..geometry.topology import Topology
from .lane import GATHERING, Lane, Plugin, Stages, is_own
from .plain import AllGather, AllReduce, Cast, ReduceScatter, Scale
from .rest import Rest
from .stage import Spec


class BucketFacts(Protocol):
    """What a lane depends on, of a bucket: :class:`~..geometry.bucket_plan.BucketPlan`."""

    @property
    def layout(self) -> BucketLayout: ...
    @property
    def compute_dtype(self) -> torch.dtype: ...
    @property
    def main_dtype(self) -> torch.dtype: ...
    @property
    def comm_dtype(self) -> torch.dtype: ...
    @property
    def reduce_op(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def inspected(self) -> bool: ...
    @property
    def name(self) -> str: ...
    @property
    def travels_plainly(self) -> bool: ...
    @property
    def plugins(self) -> tuple[Plugin, ...]: ...
    @property
    def uses_shard(self) -> bool: ...
    @property
    def rest(self) -> Rest: ...


def lane_of(bucket: BucketFacts, topology: Topology) -> Lane:
    """Return the lane of a bucket.

    Raises:
        ValueError: A plug-in has made something else of it; see :func:`.check.check`.
        NotImplementedError: A plug-in changes how a bucket is gathered that is not gathered by stages.
    """
    lane = plain = plain_lane(bucket, topology)
    whole = lane.whole
    for plugin in bucket.plugins:
        lane = plugin(lane, topology)
        if is_own(plugin):
            plain = lane
            continue
        from .check import check

        check(lane, plain, bucket.name, plugin)
    if not (bucket.travels_plainly or lane.own_parts.issuperset(GATHERING)):
        raise NotImplementedError(
            f"Bucket {bucket.name!r} gathers itself, or one of two planes, which is not made of stages: "
            f"{bucket.plugins[-1]!r} cannot change how it is gathered. Leave it out of the plug-in, or gather the "
            "bucket in its compute dtype."
        )
    return bucket.rest.lane(replace(lane, whole=whole), topology)


def plain_lane(bucket: BucketFacts, topology: Topology) -> Lane:
    """Return the lane of a bucket without plug-ins."""
    step, use = gathers(topology)
    if bucket.uses_shard:
        use = tuple(group for group in use if group.size > 1)
    each, due = reductions(topology, bucket.reduce_op)
    shard = Spec(bucket.layout.shard_numel, bucket.main_dtype)
    packed = Spec(bucket.layout.numel, bucket.comm_dtype)
    lane = Lane(shard, Spec(bucket.layout.numel, bucket.compute_dtype), packed, bucket.scale, bucket.inspected)
    narrow = (Cast(bucket.compute_dtype),) if bucket.compute_dtype != bucket.main_dtype else ()
    lane = replace(lane, step=tuple(map(AllGather, step)), use=tuple(map(AllGather, use)))
    lane = replace(lane, step=(*narrow, *lane.step)) if step else replace(lane, use=(*narrow, *lane.use))
    widen: Stages = (Cast(bucket.main_dtype),) if bucket.main_dtype != bucket.comm_dtype else ()
    scale: Stages = (Scale(bucket.scale),) if bucket.scale != 1 else ()
    if bucket.comm_dtype == torch.float16:  # in which the sum might overflow
        lane, scale = replace(lane, pack=scale), ()
    finish = (*widen, *scale)
    return replace(lane, each=each if due else (*each, *finish), due=(*due, *finish) if due else ())


def gathers(topology: Topology) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
    """Return the groups to gather over once per step, and at each use."""
    group = topology.gather_group
    return topology.resident_groups, (group,) if group is not None else ()


def reductions(topology: Topology, op: str) -> tuple[Stages, Stages]:
    """Return the collectives of each backward, and those that run once a reduction is due."""
    if not topology.over_inner.shards:  # all ranks hold the same, so one reduction covers both dimensions
        return (), (AllReduce(topology.reductions or topology.every, op),)
    first = ReduceScatter(topology.reductions or topology.inner, op)
    waits = topology.over_inner.reduces_once or topology.accumulation.whole_gradients
    outer: Stages = ()
    if topology.outer is not None and (topology.outer.size > 1 or topology.inspects):
        outer = (ReduceScatter(topology.outer, op) if topology.is_hfsdp else AllReduce(topology.outer, op),)
    if waits:  # it sums over microbatches, also on one rank
        return (), (first, *outer)
    return (first,) if first.group.size > 1 or topology.inspects else (), outer
