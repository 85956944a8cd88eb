"""Buckets, outlines and a machine with round numbers, for tests of predictions and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mfsdp_compile.passes.context import BucketInfo, Context
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.hardware import Hardware, Link
from mfsdp_compile.passes.guests.solver.outline import Gradients, Outline, Segment, Use
from mfsdp_compile.passes.guests.solver.step_events import StepOutlines
from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.geometry.exchange import Exchange
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.geometry.layout import BucketLayout, Slot
from mfsdp_compile.runtime.guests.quantized.stages import Dequantize, Quantize
from mfsdp_compile.runtime.lanes.lane import Lane
from mfsdp_compile.runtime.lanes.plain import AllGather, ReduceScatter
from mfsdp_compile.runtime.lanes.stage import Spec
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

RANKS = 4
MACHINE = Hardware(
    "round",
    {"float32": 1e12, "bfloat16": 2e12},
    matmul_efficiency=1.0,
    attention_efficiency=0.5,
    memory_bandwidth=1e11,
    memory_efficiency=1.0,
    memory_bytes=10**9,
    kernel_seconds=0.0,
    collective_seconds=10e-6,
    ranks_per_node=4,
    intra_node=Link(100e9, 1e-6),
    inter_node=Link(10e9, 20e-6),
    host_link=Link(1e9, 10e-6),
    host_memory_bandwidth=10e9,
)
COSTS = CostModel(MACHINE, fused=True)


def bucket(name: str, numel: int = 1000, unit: str | None = None, **changes: Any) -> BucketInfo:
    """Return a bucket of one float32 parameter over four ranks of a node.

    ``changes`` are fields of the bucket, of its exchange, or parts of its lane, and where it rests.
    """
    ranks = changes.pop("ranks", RANKS)
    layout = BucketLayout(4, ranks, numel // ranks, (Slot("w", (numel,), 0),), alignment_bytes=4)

    def spec(dtype: torch.dtype) -> Spec:
        return Spec(numel, dtype)

    lane = Lane(
        Spec(numel // ranks, torch.float32),
        spec(changes.pop("dtype", torch.float32)),
        spec(changes.pop("comm_dtype", torch.float32)),
        step=changes.pop("step", ()),
        use=changes.pop("use", (AllGather(Group("gathers", ranks, 0, changes.pop("stride", 1))),)),
        pack=changes.pop("pack", ()),
        each=changes.pop("each", (ReduceScatter(Group("reductions", ranks, 0), "avg"),)),
        due=changes.pop("due", ()),
    )
    if scaling := changes.pop("scaling", ""):
        sizes, ndims = tuple(changes["sizes"]), tuple(changes["ndims"])
        quantize_, decode = (
            Quantize(scaling, quantize.DEQUANTIZED, 1, quantize.scale_count(sizes, scaling)),
            Dequantize(sizes, ndims, (0,), torch.float32, scaling),
        )
        lane = replace(lane, step=(quantize_,), use=(*lane.use, decode))
        changes["has_resident"] = True
    if (rest := changes.pop("rest", None)) is not None:
        lane = rest.around(lane, "cuda")
        changes["has_resident"] = bool(lane.step)
    exchange = Exchange([numel], [1], [0], lane.key)
    of_exchange = {field: changes.pop(field) for field in Exchange._fields if field in changes}
    info = BucketInfo(name, unit or name, layout, exchange._replace(**of_exchange), numel * 4, trainable=True)
    return replace(info, **changes)


def context(buckets: Sequence[BucketInfo], policy: SchedulePolicy | None = None, **changes: Any) -> Context:
    return Context(tuple(buckets), policy or SchedulePolicy(), **{"whole_model": True, **changes})


def chain(
    buckets: Sequence[BucketInfo],
    seconds: Sequence[float],
    *,
    saved: int = 0,
    rise: int = 0,
    policy: SchedulePolicy | None = None,
    costs: CostModel = COSTS,
    **changes: Any,
) -> StepOutlines:
    """Return a model of units that run one after the other, each with the given time, and twice that time in backward.

    Args:
        buckets: Buckets of the units, in order. Neighbors of one unit are used together.
        seconds: Time of each unit.
        saved: Bytes that each unit saves for backward.
        rise: Bytes that each unit needs while it computes.
    """
    numbers: dict[str, list[int]] = {}
    for number, info in enumerate(buckets):
        numbers.setdefault(info.unit, []).append(number)
    units, last = list(numbers), len(numbers) - 1

    def use(position: int, segment: int) -> Use:
        own = tuple(numbers[units[position]])
        return Use(own, segment, (segment,) * len(own))

    sent = [i for i, unit in enumerate(units) if buckets[numbers[unit][0]].exchange.gather_group]
    forward = Outline(
        tuple(Segment(s, 0.0, saved + rise, saved, 0) for s in seconds),
        tuple(units),
        tuple(use(i, i) for i in sent),
    )
    backward = Outline(
        tuple(Segment(2 * s, 0.0, rise, -saved, 0) for s in reversed(seconds)),
        tuple(reversed(units)),
        tuple(use(i, last - i) for i in reversed(sent)),
        gradients=tuple(
            Gradients(number, last - i, last - i, 0)
            for i in range(last, -1, -1)
            for number in numbers[units[i]]
            if buckets[number].trainable
        ),
    )
    return StepOutlines({Phase.FORWARD: forward, Phase.BACKWARD: backward}, context(buckets, policy, **changes), costs)
