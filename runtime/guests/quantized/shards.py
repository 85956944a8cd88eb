"""Quantized shards of the buckets that are gathered in float8 or float4, and their scales.

Each such bucket keeps a copy of its shard beside the shard in the main dtype, as gathers send it: one byte per element
in float8, 9/16 in float4. The scales of all buckets are in one tensor, whole on every rank ::

    scales    | layers.0: q k v o ... | layers.1: q k v o ... | ...     one float32 per row, matrix, or block
                 ^ bucket.scales is a view

so that an optimizer step costs one collective, whatever the number of buckets and microbatches: each rank enters the
largest absolute values of its rows, and a maximum over ranks makes them whole. Rows are never cut, so with a scale per
row this amounts to a gather; a matrix, or a block of 128 rows, may be cut, and then it is a maximum of what the ranks
have of it. Experts, which live on other ranks, have a collective of their own. Scales that are gathered with the data
(``"mxfp8"``) need none: a bucket's ``scales`` are empty. With ``"nvfp4"``, which has both, they are those of the
matrices.

Shards are quantized again when they have changed, like residents are gathered again: the version of the shard tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import compat
from ...formats import quantize
from ...formats.forms import FORMS
from ...formats.quantize import (
    MX,
    NVFP4,
    SENT_DTYPE,
    amax,
    matrix_scales_of,
    quantize_mx,
    quantize_nvfp4,
    quantize_rows,
    sent_numel,
)
from .planes import PlaneShards
from .views import Views

if TYPE_CHECKING:
    from ...geometry.bucket_plan import BucketPlan
    from ...geometry.topology import Topology
    from ...memory.bucket import Bucket
    from ...observers import StartsCollectives


class QuantizedShards:
    """Quantized shards of one model.

    Args:
        buckets: Buckets of the model.
    """

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        alike: dict[tuple[bool, bool], list[Bucket]] = {}
        for bucket in buckets:
            alike.setdefault((bucket.plan.is_expert, bucket.plan.has_planes), []).append(bucket)
        self._groups = [PlaneShards(group) if has_planes else _Group(group) for (_, has_planes), group in alike.items()]

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for group in self._groups for bucket in group.buckets]

    def refresh(self, coordinator: StartsCollectives) -> None:
        """Quantize all shards again if any has changed. A collective then: every rank must call it."""
        for group in self._groups:
            if any(bucket.is_made_stale for bucket in group.buckets):
                group.refresh(coordinator)

    def forget(self) -> None:
        """Quantize again at the next use: after a failure, ranks may not agree on what is stale."""
        for bucket in self.buckets:
            bucket.mark_made(stale=True)


class _Group(Views):
    """Buckets over the same ranks, with one tensor of scales."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = buckets
        self._counts = [_scale_count(bucket.plan) for bucket in buckets]
        flat = buckets[0].flat
        self._scales = torch.ones(sum(self._counts), dtype=torch.float32, device=flat.device)
        for bucket, scales in zip(buckets, self._scales.split(self._counts), strict=True):
            numel = sent_numel(bucket.flat.numel(), bucket.plan.scaling)
            bucket.maker, bucket.made = self, torch.zeros(numel, dtype=SENT_DTYPE, device=flat.device)
            bucket.operands = bucket.operands._replace(scales=scales)
            bucket.mark_made(stale=True)

    @property
    def _topology(self) -> Topology:
        return self.buckets[0].topology

    @torch.no_grad()
    def refresh(self, coordinator: StartsCollectives) -> None:
        largest = torch.zeros_like(self._scales)
        for bucket, its in zip(self.buckets, largest.split(self._counts), strict=True):
            if bucket.plan.scaling == MX:
                continue
            views = bucket.views(bucket.flat.detach())
            for values, (entries, before) in zip(views, _entries_of_rows(bucket, its), strict=True):
                if values.numel():
                    entries.copy_(amax(_rounded(values, bucket.plan), bucket.plan.scaling, before))
        group = self._topology.inner_gathers or self._topology.inner
        if group.size > 1 and largest.numel():
            coordinator.start("reduce the scales of quantized parameters", group=group)
            largest = compat.wait_tensor(compat.all_reduce(largest, "max", group.name))
        for bucket, its in zip(self.buckets, largest.split(self._counts), strict=True):
            assert bucket.made is not None
            scales = bucket.scales
            assert scales is not None
            bucket.mark_made(stale=False)
            if bucket.plan.scaling == MX:
                bucket.made.copy_(quantize_mx(bucket.flat.detach()))
                continue
            if bucket.plan.scaling == NVFP4:
                scales.copy_(matrix_scales_of(its))
                bucket.made.copy_(quantize_nvfp4(bucket.flat.detach(), _scaled_parts(bucket)))
                continue
            form = FORMS[bucket.plan.form]
            scales.copy_(form.scales_of(its))
            views, data_views = bucket.views(bucket.flat.detach()), bucket.views(bucket.made)
            for values, data, rows in zip(views, data_views, _scales_per_row(bucket), strict=True):
                if values.numel():
                    rounded = _rounded(values, bucket.plan)
                    quantize_rows(rounded, rows, bucket.plan.scaling, form.quantize, out=data)

    def own_part(self, bucket: Bucket, columns: bool) -> Tensor:
        plan, made = bucket.plan, bucket.made
        assert made is not None
        if plan.stays_quantized:
            return made
        if plan.scaling == MX:
            return quantize.dequantize_mx(made, plan.compute_dtype)
        return quantize.dequantize(made, _scaled_parts(bucket), plan.compute_dtype, plan.scaling)


def _scale_count(plan: BucketPlan) -> int:
    """Return the number of scales of a bucket, without those that are gathered with the data."""
    return sum(quantize.scale_count(slot.shape, plan.scaling) for slot in plan.layout.slots)


def _entries_of_rows(bucket: Bucket, scales: Tensor) -> list[tuple[Tensor, int]]:
    """Return what :func:`.quantize.entries_of_rows` does for this rank's rows of each parameter.

    Args:
        scales: Scales of the whole bucket, or what they are made from.
    """
    slots, scaling = bucket.plan.layout.slots, bucket.plan.scaling
    wholes = quantize.split_scales(scales, [slot.shape for slot in slots], scaling)
    return [
        quantize.entries_of_rows(whole, slot.row_dims, split.rows(bucket.topology.shard), scaling)
        for whole, slot, split in zip(wholes, slots, bucket.splits, strict=True)
    ]


def _scales_per_row(bucket: Bucket) -> list[Tensor]:
    """Return the scales of this rank's rows of each parameter, see :func:`.quantize.per_row`."""
    assert bucket.scales is not None
    return [
        quantize.per_row(entries, place.shape[-2], bucket.plan.scaling, before) if math.prod(place.shape) else entries
        for (entries, before), place in zip(_entries_of_rows(bucket, bucket.scales), bucket.places, strict=True)
    ]


def _scaled_parts(bucket: Bucket) -> list[tuple[int, tuple[int, ...], Tensor]]:
    """Return offset in the shard, shape, and scales of this rank's rows of each parameter."""
    scales = _scales_per_row(bucket)
    return [(place.start, place.shape, its) for place, its in zip(bucket.places, scales, strict=True)]


def _rounded(values: Tensor, plan: BucketPlan) -> Tensor:
    """Return values as the bucket's form quantizes them."""
    return values.to(plan.compute_dtype) if FORMS[plan.form].casts else values
