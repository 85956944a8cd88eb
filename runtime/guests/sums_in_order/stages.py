"""Sums in the order of ranks, as stages. [Note: Sums in the order of ranks]

A reduce-scatter of the backend sums in the dtype that it sends, in an order that depends on the number of ranks, NCCL's
algorithm and the network. Ranks that exchange slices send as many bytes, and add in float32. The sum of one stage stays
in float32: the next sends that.

    reduce_scatter    encode, all_to_all, sum
    all_reduce        encode, all_to_all, sum, all_gather, trim
    with neighbors    encode, all_to_all, sum over neighbors; then over their peers in other such groups
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ...geometry.groups import Group
from ...geometry.topology import Topology
from ...lanes.lane import Lane
from ...lanes.plain import AllGather, AllToAll, Cast, Scale, Trim
from ...lanes.stage import Call, Cost, Local, Spec, Stage
from . import operators as operators
from . import wire


@dataclass(frozen=True)
class EncodeSlices(Local):
    """Arrange a gradient in a slice for each rank, and encode them.

    Args:
        size: Number of ranks.
        format: Name of a :class:`.wire.Format`. "": values are sent as they are.
        pieces: Number of pieces that a slice consists of; see :func:`.wire.slices_of`.
    """

    size: int
    format: str = ""
    pieces: int = 1

    @property
    def error(self) -> float:  # type: ignore[override]
        return 1.0 if self.format else 0.0  # of cancelled sums, anything

    @property
    def text(self) -> str:
        return f"encoded in {self.format}" if self.format else f"in {self.size} slices"

    def out(self, spec: Spec) -> Spec:
        return Spec(*wire.sent(spec.numel, spec.dtype, self.size, self.format))

    def call(self, spec: Spec) -> Call:
        return torch.ops.mfsdp.encode_slices.default, (self.size, self.format, self.pieces)

    def cost(self, spec: Spec) -> Cost:
        values, sent = spec.bytes, self.out(spec).bytes
        if not self.format:
            return Cost(kernels=(2 * values,), fused=(values + sent,))
        wide = 8 * spec.numel  # rounded in several operators, in 64 bits
        return Cost(kernels=(values + wide, 2 * wide, 2 * wide), fused=(2 * values + sent,))  # read again for scales


@dataclass(frozen=True)
class SumSlices(Local):
    """Decode the slices that ranks have sent, and add them in the order of ranks.

    Args:
        size: Number of ranks.
        format: Name of a :class:`.wire.Format`. "": values arrive as they are.
        numel: Elements of a slice.
    """

    size: int
    format: str
    numel: int
    sums = scatters = True

    @property
    def text(self) -> str:
        return f"{f'decoded from {self.format} and ' if self.format else ''}summed in order"

    @property
    def ranks(self) -> int:
        return self.size

    def out(self, spec: Spec) -> Spec:
        return Spec(self.numel, torch.float32 if self.format else wire.sum_dtype(spec.dtype))

    def call(self, spec: Spec) -> Call:
        return torch.ops.mfsdp.sum_slices.default, (self.size, self.format, self.numel)

    def cost(self, spec: Spec) -> Cost:
        part, ranks = self.numel, self.size
        kernels = math.ceil(ranks / wire.SLICES_AT_ONCE)
        fused = (spec.bytes + part * 4 * (2 * kernels - 1), *(0,) * (kernels - 1))
        if self.format:  # decoded, scaled and added, one after the other
            return Cost(kernels=(5 * part, 8 * part, 12 * part) * ranks, fused=fused)
        itemsize = spec.dtype.itemsize
        return Cost(kernels=(part * (itemsize + 4), *(part * (itemsize + 8),) * (ranks - 1)), fused=fused)


@dataclass(frozen=True)
class SumsInOrder:
    """Let ranks add gradients in float32 (float64 ones in that), in the order of ranks.

    Args:
        wire: Format in which slices of gradients are sent. "": the dtype in which they are packed.
        outer_wire: Format in which slices of sums are sent, in later stages. "": float32.
        within: Neighbors that sum first, so that each sends its peers a part of the bytes; 0: there is one level.
    """

    wire: str = ""
    outer_wire: str = ""
    within: int = 0

    def __call__(self, lane: Lane, ranks: Topology) -> Lane:
        found: dict[str, list[Stage]] = {"each": [], "due": []}
        spec, format, levels = lane.packed, self.wire, self.within
        for part, stages in found.items():
            for stage in lane[part]:
                if isinstance(stage, (Cast, Scale)):
                    continue
                added: list[Stage] = []
                if stage.sums:
                    assert stage.group is not None
                    hops: tuple[tuple[Group, int], ...] = ((stage.group, 1),)
                    if levels:
                        # Neighbor j gets what belongs to the j-th rank of every group of neighbors.
                        neighbors, peers = ranks.levels[levels]
                        hops, levels = ((neighbors, peers.size), (peers, 1)), 0
                    before = spec
                    for group, pieces in hops:
                        hop = _hop(spec, group, format if group.size > 1 else "", pieces)
                        added += hop
                        spec, format = _after(hop, spec), self.outer_wire if group.size > 1 else format
                    if not stage.scatters and stage.group.size > 1:
                        added += [AllGather(stage.group), Trim(before.numel)]
                        spec = spec._replace(numel=before.numel)
                else:
                    added, spec = [stage], stage.out(spec)
                stages += added
        # The mean may fit where the sum would overflow, and is rounded once.
        finish: list[Stage] = [Scale(lane.scale)] if lane.scale != 1 else []
        finish += [Cast(lane.shard.dtype)] if spec.dtype != lane.shard.dtype else []
        found["due" if found["due"] else "each"] += finish
        return replace(lane, pack=(), each=tuple(found["each"]), due=tuple(found["due"]))

    def __str__(self) -> str:
        return (
            " in the order of ranks"
            + (f", first of {self.within} neighbors" if self.within else "")
            + (f", sent in {self.wire}" if self.wire else "")
            + (f", sums in {self.outer_wire}" if self.outer_wire else "")
        )


def _hop(spec: Spec, group: Group, format: str, pieces: int) -> list[Stage]:
    stages: list[Stage] = []
    if format or pieces > 1 or spec.numel % group.size:
        stages.append(EncodeSlices(group.size, format, pieces))
    return [*stages, AllToAll(group), SumSlices(group.size, format, math.ceil(spec.numel / group.size))]


def _after(stages: Iterable[Stage], spec: Spec) -> Spec:
    for stage in stages:
        spec = stage.out(spec)
    return spec
