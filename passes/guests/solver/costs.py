"""Cost model: a roofline for computation, latency and bandwidth for collectives.

The model is deterministic, takes and returns plain data, and measures nothing. Ranks with the same graph and the same
hardware file compute the same numbers.

Computation. A matrix product takes the time of its floating-point operations or of its bytes, whichever is longer (the
roofline of https://doi.org/10.1145/1498765.1498785). On GPUs its efficiency depends on its shape
(:func:`tile_efficiency`), and on the clock under sustained load. All other kernels take the time of their bytes. Times
are those of large kernels; a kernel takes at least ``kernel_seconds``. :mod:`.kernels` finds the kernels of a graph.

Collectives. A ring over ``n`` ranks, ``l`` of them in each of ``m`` nodes::

    seconds = launch + (n - m) latency_in_node + (m - 1) latency_between + (n - 1) / n  bytes / bandwidth

This is the formula of NCCL's own tuning model. A ring that spans nodes leaves each node through as many network cards
as it has ranks there. Therefore ``bandwidth`` is the smaller of the intra-node bandwidth and ``l`` times the
inter-node bandwidth of one rank. An all-reduce moves the data twice, over a ring or a tree, whichever is faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mfsdp_compile.runtime.geometry.groups import stride_of
from mfsdp_compile.runtime.lanes.plain import Cast, Scale
from mfsdp_compile.runtime.lanes.stage import Spec, Stage

from ...context import BucketInfo
from ...kernels import Kernel
from .hardware import Hardware


@dataclass(frozen=True)
class Ring:
    """Ranks that communicate.

    Args:
        size: Number of ranks.
        stride: Distance between adjacent ranks, in global ranks: 1 for neighbors, the size of the inner group for an
            outer group. Ranks are numbered node by node.
    """

    size: int
    stride: int = 1

    @staticmethod
    def of(ranks: Sequence[int]) -> Ring:
        """Make a ring from global ranks."""
        return Ring(len(ranks), stride_of(ranks))

    def in_node(self, ranks_per_node: int) -> int:
        """Return the number of the ring's ranks that share a node."""
        return min(self.size, max(1, ranks_per_node // self.stride))


def collective_seconds(kind: str, payload: int, ring: Ring, hardware: Hardware) -> float:
    """Return the seconds that a collective takes, alone on the network.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"all_to_all"``.
        payload: Bytes of the whole tensor: the gathered or the reduced one; for an all-to-all, the bytes that one rank
            sends to all ranks including itself.
        ring: Ranks that take part.
        hardware: Machine that they run on.
    """
    if ring.size == 1:
        return payload / (hardware.memory_bandwidth * hardware.memory_efficiency / 2)  # a copy
    local = ring.in_node(hardware.ranks_per_node)
    nodes = math.ceil(ring.size / local)
    inside, between = hardware.intra_node, hardware.inter_node
    bandwidth = inside.bandwidth
    if nodes > 1:
        bandwidth = between.bandwidth * local if local == 1 else min(inside.bandwidth, between.bandwidth * local)
    latency = (ring.size - nodes) * inside.latency + (nodes - 1) * between.latency
    moved = (ring.size - 1) / ring.size * payload / bandwidth
    if kind == "all_to_all":  # links inside and between nodes work in parallel
        apart = payload / ring.size
        moved = max((local - 1) * apart / inside.bandwidth, (ring.size - local) * apart / between.bandwidth)
    if kind == "all_reduce":
        tree = 2 * ((local - 1) * inside.latency + math.log2(nodes) * between.latency)
        return hardware.collective_seconds + min(2 * latency, tree) + 2 * moved
    return hardware.collective_seconds + latency + moved


def _kind(stage: Stage) -> str:
    if stage.gathers:
        return "all_gather"
    if stage.sums:
        return "reduce_scatter" if stage.scatters else "all_reduce"
    return "all_to_all"


@dataclass(frozen=True)
class CostModel:
    """Costs on one kind of machine.

    Args:
        hardware: Hardware of the machine.
        fused: Whether the inner compiler fuses kernels, and computes gradients directly in the packed bucket.
        holds_inputs: Whether the inputs of a collective stay alive until it has been awaited. Inductor's code and the
            work objects of gloo and NCCL keep them; fake process groups do not.
        groups: Rings of the process groups that the model's own collectives run over, by name.
    """

    hardware: Hardware
    fused: bool
    holds_inputs: bool = True
    groups: Mapping[str, Ring] = field(default_factory=dict)

    # -- collectives --------------------------------------------------------------------------------------------------

    def gather(self, info: BucketInfo) -> float:
        """Return the seconds to gather a bucket from shards; 0.0 if nothing is sent."""
        lane = info.exchange.lane
        return self.flying(lane.use[lane.gather], lane.spec("use", lane.gather)) if lane.gather is not None else 0.0

    def portions(self, info: BucketInfo) -> float:
        """Return the seconds to gather a bucket from portions."""
        ring = Ring(info.portion_size, info.gather_stride)
        return collective_seconds("all_gather", info.gathered_bytes, ring, self.hardware)

    def joint(self, info: BucketInfo) -> float:
        """Return the seconds of the stage that is run for all buckets together, once per optimizer step; 0.0 if there
        is none."""
        return self.local(info, [("step", 0)]) if info.exchange.lane.is_joint else 0.0

    def reduce_scales(self, buckets: Sequence[BucketInfo]) -> float:
        """Return the seconds of the collective for the scales of all buckets, once per optimizer step."""
        joint = [info for info in buckets if info.exchange.lane.is_joint]
        payload = sum(lane.step[0].cost(lane.shard).jointly for lane in (info.exchange.lane for info in joint))
        if not payload:  # they are gathered with the data
            return 0.0
        ring = Ring(joint[0].exchange.gather_size, joint[0].gather_stride)
        return collective_seconds("all_reduce", payload, ring, self.hardware)

    def reduction(self, info: BucketInfo, stage: int) -> float:
        """Return the seconds of one stage of the reduction of a bucket's gradients."""
        lane = info.exchange.lane
        flight = lane.reduction[stage]
        return self.flying(flight.stage, lane.spec(flight.part, flight.index))

    def flying(self, stage: Stage, spec: Spec) -> float:
        """Return the seconds of a stage that communicates."""
        if (group := stage.group) is None:
            return self.kernels(stage, spec)
        sent = stage.cost(spec).sent
        kind, payload = _kind(stage), spec.bytes
        if group.size > 1:
            payload = sent * group.size // (group.size - 1) // (2 if kind == "all_reduce" else 1)
        return collective_seconds(kind, payload, Ring(group.size, group.stride), self.hardware)

    def kernels(self, stage: Stage, spec: Spec) -> float:
        """Return the seconds of the kernels of a local stage."""
        cost = stage.cost(spec)
        kernels = cost.fused if self.fused and cost.fused is not None else cost.kernels
        return sum(map(self.moved, kernels)) + (self.host_copy(cost.copied) if cost.copied else 0.0)

    def local(self, info: BucketInfo, places: Sequence[tuple[str, int]]) -> float:
        """Return the seconds of local stages of plug-ins and guests."""
        lane = info.exchange.lane
        stages = [(lane[part][index], lane.spec(part, index)) for part, index in places]
        return sum(self.kernels(stage, spec) for stage, spec in stages if not stage.inlined)

    def cast(self, info: BucketInfo) -> float:
        """Return the seconds to cast the shard to the dtype in which it is sent; 0.0 if nothing is cast."""
        shard = info.layout.shard_numel
        if info.main_dtype == info.exchange.dtype or info.exchange.lane.is_joint:
            return 0.0
        return self.moved(shard * (info.main_dtype.itemsize + info.exchange.dtype.itemsize))

    def finish(self, info: BucketInfo) -> float:
        """Return the seconds to cast a reduced gradient to the shard's dtype and scale it; 0.0 if not needed."""
        lane, main, shard = info.exchange.lane, info.main_dtype.itemsize, info.layout.shard_numel
        after = lane.reduction[-1].after if lane.reduction else lane.unreduced
        finishing = {place: lane[place[0]][place[1]] for place in after if lane[place[0]][place[1]].inlined}
        for part, index in after:
            stage = lane[part][index]
            if self.fused and not stage.inlined and stage.cost(lane.spec(part, index)).fused is not None:
                return 0.0  # its kernel does it
        casts, scales = (any(isinstance(stage, kind) for stage in finishing.values()) for kind in (Cast, Scale))
        if not (casts or scales):
            return 0.0
        itemsize = lane.spec(*next(iter(finishing))).dtype.itemsize
        if casts and scales and not self.fused:
            return self.moved(shard * (itemsize + main)) + self.moved(shard * 2 * main)
        return self.moved(shard * (itemsize + main))

    # -- computation --------------------------------------------------------------------------------------------------

    def moved(self, size: int) -> float:
        """Return the seconds of a kernel that reads and writes ``size`` bytes in total."""
        hardware = self.hardware
        return hardware.kernel_seconds + size / (hardware.memory_bandwidth * hardware.memory_efficiency)

    def host_copy(self, size: int) -> float:
        """Return the seconds of a copy of ``size`` bytes between the device and host memory."""
        link = self.hardware.host_link
        return link.latency + size / link.bandwidth

    def host_moved(self, size: int) -> float:
        """Return the seconds in which the CPU reads and writes ``size`` bytes of host memory in total."""
        return size / self.hardware.host_memory_bandwidth

    def compute(
        self,
        flops: float,
        size: int,
        dtype: torch.dtype,
        attention: bool,
        product: tuple[int, int, int] | None = None,
    ) -> float:
        """Return the seconds of a matrix product or of fused attention."""
        hardware = self.hardware
        efficiency = hardware.attention_efficiency if attention else hardware.matmul_efficiency
        efficiency *= hardware.sustained_clock
        if product is not None:
            efficiency *= tile_efficiency(*product, hardware.multiprocessors)
        rate = hardware.flops_of(str(dtype).removeprefix("torch.")) * efficiency
        return hardware.kernel_seconds + max(
            flops / rate, size / (hardware.memory_bandwidth * hardware.memory_efficiency)
        )

    def kernel(self, kernel: Kernel) -> float:
        if kernel.collective is not None:
            kind, payload, group = kernel.collective
            return collective_seconds(kind, payload, self.groups.get(group, Ring(1)), self.hardware)
        if kernel.flops:
            return self.compute(kernel.flops, kernel.bytes, kernel.dtype, kernel.attention, kernel.product)
        return self.moved(kernel.bytes) if kernel.bytes else 0.0


_TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64))
"""Rows and columns of the output that a multiprocessor computes at a time: tiles of cuBLAS at full speed."""


def tile_efficiency(batch: int, rows: int, columns: int, multiprocessors: int) -> float:
    """Return the fraction of a GPU's multiprocessors that a matrix product keeps busy, with the best usual tiles.

    Tiles at the edges compute elements that do not exist (tile quantization), and the last wave of tiles leaves
    multiprocessors idle (wave quantization), as in NVIDIA's Matrix Multiplication Background User's Guide. Products
    with fewer tiles than multiprocessors are split along the inner dimension.

    Args:
        batch, rows, columns: Shape of the product.
        multiprocessors: Number of multiprocessors; 0 if the device has none, and all shapes are alike.
    """
    if not multiprocessors:
        return 1.0
    best = 0.0
    for height, width in _TILES:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        occupied = max(tiles, math.ceil(tiles / multiprocessors) * multiprocessors if tiles > multiprocessors else 0)
        best = max(best, batch * rows * columns / (occupied * height * width))
    return best
