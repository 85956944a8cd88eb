"""Gathers in float8 and float4, as stages.

    step                                    use
    quantize                                all_gather, dequantize
    quantize, all_gather, dequantize                                  while parameters stay gathered (keep_gathered)

Modules that take bytes as they were gathered (:mod:`...formats.forms`) need no dequantize.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ...formats import quantize
from ...geometry.topology import Topology
from ...lanes.lane import Lane
from ...lanes.plain import Cast
from ...lanes.stage import Call, Cost, Joint, Local, Spec
from .operators import DEQUANTIZE

if TYPE_CHECKING:
    from ...geometry.bucket_plan import BucketPlan


@dataclass(frozen=True)
class Quantize(Local):
    """Quantize a shard, with scales that ranks agree on in one collective for all buckets; see :mod:`.shards`.

    Args:
        scaling: One of ``quantize.SCALINGS``.
        form: How modules get it; see :mod:`...formats.forms`.
        parameters: Number of the bucket's parameters.
        scales: Number of their scales, without those that are gathered with the data.
    """

    scaling: str
    form: str
    parameters: int
    scales: int
    joint = True
    error = 1.0

    @classmethod
    def joint_of(cls, buckets: Sequence[Any]) -> Joint:
        from .shards import QuantizedShards

        return QuantizedShards(buckets)

    @property
    def text(self) -> str:
        return f"in {quantize.kind_of(self.scaling)}, {self.scaling}, {self.form}"

    def out(self, spec: Spec) -> Spec:
        return Spec(quantize.sent_numel(spec.numel, self.scaling), quantize.SENT_DTYPE)

    def cost(self, spec: Spec) -> Cost:
        moved = 2 * spec.bytes + self.out(spec).bytes
        # For each parameter, or with mxfp8 for the shard: absolute values, maxima, scaling, cast.
        kernels = 4 * (1 if self.scaling == quantize.MX else self.parameters)
        if self.scaling == quantize.NVFP4:
            # For each parameter maxima of matrices, and two kernels with their scales. For the shard absolute values,
            # maxima of blocks, scaling, seven comparisons of floats and sums of bytes, bytes for signs and pairs.
            moved += 4 * spec.bytes + spec.numel * (7 * (4 + 4) + 10)
            kernels += 30
        return Cost(kernels=(moved, *[0] * (kernels - 1)), jointly=torch.float32.itemsize * self.scales)


@dataclass(frozen=True)
class Dequantize(Local):
    """Dequantize a gathered bucket.

    Args:
        sizes, ndims, offsets: Those of its :class:`~...geometry.exchange.Exchange`.
        dtype: Dtype of the result.
        scaling: One of ``quantize.SCALINGS``.
    """

    sizes: tuple[int, ...]
    ndims: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    scaling: str
    takes_scales = True

    @property
    def text(self) -> str:
        return f"dequantized to {str(self.dtype).removeprefix('torch.')}"

    def out(self, spec: Spec) -> Spec:
        return Spec(quantize.numel_of_sent(spec.numel, self.scaling), self.dtype)

    def call(self, spec: Spec) -> Call:
        return DEQUANTIZE, (list(self.sizes), list(self.ndims), list(self.offsets), self.dtype, self.scaling)

    def cost(self, spec: Spec) -> Cost:
        # A cast of the bucket, and a product per parameter, or of the bucket.
        moved, products = spec.bytes + 3 * self.out(spec).bytes, 1 if self.scaling == quantize.MX else len(self.ndims)
        if self.scaling == quantize.NVFP4:  # a table of what bytes hold, and an index in int32 for each byte
            moved, products = moved + self.out(spec).numel * 4, products + 15
        return Cost(kernels=(moved, *[0] * products))


@dataclass(frozen=True)
class Quantized:
    """Gathers a bucket quantized.

    What is whole is then in bytes: what plug-ins find that change how it is gathered.

    Args:
        scaling: One of ``quantize.SCALINGS``.
        form: How modules get it; see :mod:`...formats.forms`.
        shapes, offsets: Those of the bucket's parameters.
        dtype: Dtype of the gathered parameters.
    """

    scaling: str
    form: str
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, bucket: BucketPlan) -> Quantized:
        slots = bucket.layout.slots
        shapes, offsets = tuple(slot.shape for slot in slots), tuple(slot.offset for slot in slots)
        return cls(bucket.scaling, bucket.form, shapes, offsets, bucket.compute_dtype)

    def __call__(self, lane: Lane, ranks: Topology) -> Lane:
        step, use = (tuple(stage for stage in part if not isinstance(stage, Cast)) for part in (lane.step, lane.use))
        stays = self.form not in quantize.DEQUANTIZING
        if not (step or use or stays):
            return lane  # nothing is sent
        sizes = tuple(size for shape in self.shapes for size in shape)
        ndims = tuple(map(len, self.shapes))
        decode = () if stays else (Dequantize(sizes, ndims, self.offsets, self.dtype, self.scaling),)
        count = sum(quantize.scale_count(shape, self.scaling) for shape in self.shapes)
        step = (Quantize(self.scaling, self.form, len(self.shapes), count), *step)
        step, use = (step, (*use, *decode)) if use else ((*step, *decode), ())
        whole = Spec(quantize.sent_numel(lane.whole.numel, self.scaling), quantize.SENT_DTYPE)
        return replace(lane, whole=whole, step=step, use=use)
