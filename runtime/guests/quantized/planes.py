"""Quantized shards of weights that modules multiply with in two quantizations: by rows in forward, by columns in
backward.

A product sums over columns of a weight in forward and over its rows in backward, and MXFP8 scales 32 neighbors of those
that are summed. So there are two planes of one weight, each with all of its elements ::

    rows        32 neighbors in a row share a scale         gathered in forward
    columns     32 neighbors in a column share a scale      gathered in backward

A bucket keeps a shard of each plane, one byte per element and 1/32 byte of scales each, and a gather sends one: the
bytes are those of ``"mxfp8"``, with the same layout; see :mod:`...formats.quantize`. In the plane of columns, the
scales of 32 rows take the places of the records that hold these rows, so that scales are whole and in order when a
bucket has been gathered.

Shard borders may cut 32 rows. Their scales depend on values of several ranks: each rank enters the scales of its own
values, and a maximum over ranks, one collective for all buckets, makes them whole. Only what is cut is sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import compat
from ...formats import quantize
from ...formats.quantize import MX_BLOCK, SENT_DTYPE
from ...geometry.layout import Slot
from .views import Views

if TYPE_CHECKING:
    from ...memory.bucket import Bucket
    from ...observers import StartsCollectives


def cut_blocks(slot: Slot, shard_numel: int) -> list[int]:
    """Return the blocks of 32 rows of a matrix that shard borders cut, by number."""
    inside = range(slot.offset // shard_numel + 1, (slot.end - 1) // shard_numel + 1)
    rows = ((rank * shard_numel - slot.offset) // slot.row_numel for rank in inside)
    return sorted({row // MX_BLOCK for row in rows if row % MX_BLOCK})


class _Rows(NamedTuple):
    """This rank's rows of a matrix."""

    values: Tensor
    """``[rows, columns]`` in the compute dtype."""
    data: Tensor
    """Where they are quantized to, of the same shape."""
    before: int
    """Rows of the first block that other ranks have."""
    exponents: Tensor
    """Scales of the blocks that they belong to, ``[blocks, columns]`` in E8M0."""
    first: int
    """Place of the first of these scales among those of the bucket."""
    cut: list[tuple[int, int]]
    """Which of these blocks shard borders cut, and the places of their scales in the collective."""


class PlaneShards(Views):
    """Quantized shards of buckets over the same ranks.

    Args:
        buckets: Buckets in a form with planes.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._cut: list[dict[int, dict[int, int]]] = []  # of each bucket: places of scales, by parameter and block
        self._count = 0
        for bucket in buckets:
            numel = quantize.sent_numel(bucket.flat.numel(), quantize.MX)
            device = bucket.flat.device
            bucket.maker, bucket.made = self, torch.zeros(numel, dtype=SENT_DTYPE, device=device)
            bucket.made_columns = torch.zeros_like(bucket.made)
            bucket.operands = bucket.operands._replace(scales=torch.ones(0, device=device))
            bucket.mark_made(stale=True)
            of_bucket: dict[int, dict[int, int]] = {}
            for index, slot in enumerate(bucket.plan.layout.slots):
                cut = cut_blocks(slot, bucket.plan.layout.shard_numel)
                places = itertools.count(self._count, slot.row_numel)
                of_bucket[index] = dict(zip(cut, places, strict=False))
                self._count += len(cut) * slot.row_numel
            self._cut.append(of_bucket)

    @torch.no_grad()
    def refresh(self, coordinator: StartsCollectives) -> None:
        """Quantize all shards again. A collective."""
        topology, device = self.buckets[0].topology, self.buckets[0].flat.device
        work: list[tuple[Bucket, Tensor, list[_Rows]]] = []
        for bucket, cut in zip(self.buckets, self._cut, strict=True):
            values = bucket.flat.detach().to(bucket.plan.compute_dtype)
            assert bucket.made is not None
            bucket.made.copy_(quantize.quantize_mx(values))
            data = torch.zeros(values.numel(), dtype=SENT_DTYPE, device=device)
            work.append((bucket, data, list(_rows(bucket, values, data, cut))))
        group = topology.inner_gathers or topology.inner
        if self._count and group.size > 1:
            shared = torch.zeros(self._count, dtype=torch.uint8, device=device)
            for rows, (block, place) in _all_cut(work):
                shared.narrow(0, place, rows.exponents.shape[1]).copy_(rows.exponents[block])
            coordinator.start("reduce the scales of quantized parameters", group=group)
            shared = compat.wait_tensor(compat.all_reduce(shared, "max", group.name))
            for rows, (block, place) in _all_cut(work):
                rows.exponents[block].copy_(shared.narrow(0, place, rows.exponents.shape[1]))
        for bucket, data, parts in work:
            scales = torch.zeros(data.numel() // MX_BLOCK, dtype=SENT_DTYPE, device=device)
            first = bucket.topology.shard * scales.numel()
            for rows in parts:
                per_row = rows.exponents.repeat_interleave(MX_BLOCK, 0).narrow(0, rows.before, len(rows.values))
                rows.data.copy_(quantize.quantize_with_exponents(rows.values, per_row))
                start, its = rows.first - first, rows.exponents.flatten()
                begin, end = max(start, 0), min(start + its.numel(), scales.numel())
                scales[begin:end] = its[begin - start : end - start]
            assert bucket.made_columns is not None
            bucket.made_columns.copy_(quantize.records(data, scales))
            bucket.mark_made(stale=False)

    def scale_of(self, bucket: Bucket, full: Tensor, index: int) -> Tensor:
        slot = bucket.plan.layout.slots[index]
        return full.narrow(0, bucket.plan.layout.numel + slot.offset // MX_BLOCK, slot.numel // MX_BLOCK)

    def own_part(self, bucket: Bucket, columns: bool) -> Tensor:
        sent = bucket.made_columns if columns else bucket.made
        assert sent is not None
        return quantize.from_records(sent)[: bucket.flat.numel()]


def _rows(bucket: Bucket, values: Tensor, data: Tensor, cut: dict[int, dict[int, int]]) -> Iterator[_Rows]:
    """Yield this rank's rows of each matrix of which it has some."""
    views = zip(bucket.views(values), bucket.views(data), strict=True)
    for index, (rows, to) in enumerate(views):
        if not rows.numel():
            continue
        own, slot = bucket.splits[index].rows(bucket.topology.shard), bucket.plan.layout.slots[index]
        first, before, after = own.start // MX_BLOCK, own.start % MX_BLOCK, -own.stop % MX_BLOCK
        largest = F.pad(rows.abs().float(), (0, 0, before, after)).unflatten(0, (-1, MX_BLOCK)).amax(1)
        touched = range(first, math.ceil(own.stop / MX_BLOCK))
        places = [(block - first, place) for block, place in cut[index].items() if block in touched]
        at = slot.offset // MX_BLOCK + first * slot.row_numel
        yield _Rows(rows, to, before, quantize.exponents_of(largest), at, places)


def _all_cut(work: Sequence[tuple[Bucket, Tensor, list[_Rows]]]) -> Iterator[tuple[_Rows, tuple[int, int]]]:
    return ((rows, place) for _, _, parts in work for rows in parts for place in rows.cut)
