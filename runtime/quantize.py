"""Arithmetic of parameters that are gathered in float8.

A parameter is quantized as ``round(values / scale)`` in ``float8_e4m3fn``, where ``scale`` maps the largest absolute
value of a row (``"rowwise"``) or of a matrix (``"tensorwise"``) to 448, the largest finite value of that dtype. A
parameter of three dimensions is a stack of matrices, such as the experts of a layer: it has a scale per row or matrix
of each. ::

    shape           [6, 8]      [4, 6, 8]
    rowwise         [6, 1]      [4, 6, 1]
    tensorwise      [1, 1]      [4, 1, 1]

Values that are not finite stay visible: a NaN is sent as NaN, and the scale of an infinity makes its row or matrix NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = [
    "DEQUANTIZED",
    "DEQUANTIZING",
    "DTYPE",
    "LARGEST",
    "MULTIPLIED",
    "ROUNDED",
    "SENT_DTYPE",
    "amax",
    "dequantize",
    "quantize",
    "rounded_scales_of",
    "scale_count",
    "scale_shape",
    "scales_of",
    "split_scales",
]

DEQUANTIZED = "dequantized"
ROUNDED = "dequantized, with powers of two as scales"
DEQUANTIZING = (DEQUANTIZED, ROUNDED)
"""The forms of parameters that modules get as ordinary tensors; see :mod:`.forms`."""

MULTIPLIED = "multiplied"
"""The form of parameters that are only multiplied in float8: their data and their scales. Compiled code decides."""

DTYPE = torch.float8_e4m3fn
SENT_DTYPE = torch.uint8
"""Dtype of the same bytes in collectives: gloo, and NCCL before 2.24, know no float8."""

LARGEST = torch.finfo(DTYPE).max
"""The largest finite value of the dtype."""


def scale_shape(shape: Sequence[int], scaling: str) -> tuple[int, ...]:
    """Return the shape of a parameter's scales, which broadcasts to ``shape``, of two or three dimensions."""
    return (*shape[:-1], 1) if scaling == "rowwise" else (*shape[:-2], 1, 1)


def scale_count(shape: Sequence[int], scaling: str) -> int:
    """Return the number of a parameter's scales."""
    return math.prod(scale_shape(shape, scaling))


def amax(values: Tensor, scaling: str) -> Tensor:
    """Return the largest absolute values that scales are made from, ``[scale_shape(values.shape)]`` in float32."""
    return values.abs().amax(-1 if scaling == "rowwise" else (-2, -1), keepdim=True).float()


def scales_of(largest: Tensor, limit: float = LARGEST) -> Tensor:
    """Return the scales that map these largest absolute values to ``limit``. Rows of zeros have scale 1."""
    scales = largest / limit
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def rounded_scales_of(largest: Tensor) -> Tensor:
    """Return the smallest powers of two that are no smaller than :func:`scales_of`."""
    scales = scales_of(largest)
    mantissa, exponent = torch.frexp(scales)
    rounded = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(scales.isfinite(), rounded, scales)


def quantize(values: Tensor, scales: Tensor) -> Tensor:
    """Quantize ``values``; returns their bytes, in the same shape."""
    return (values.float() / scales).clamp_(-LARGEST, LARGEST).to(DTYPE).view(SENT_DTYPE)


def dequantize(data: Tensor, parts: Iterable[tuple[int, Sequence[int], Tensor]], dtype: torch.dtype) -> Tensor:
    """Dequantize a bucket, or this rank's shard of one.

    Args:
        data: Bytes, ``[n]``.
        parts: Offset, shape and scales of each parameter in it, or of this rank's rows of each.
        dtype: Dtype of the result.

    Returns:
        ``[n]``. Each element is the float32 product of value and scale, rounded once: ``float8`` values are exact in
        all of torch's wider dtypes.
    """
    values = data.view(DTYPE).to(dtype)
    for offset, shape, scales in parts:
        values.narrow(0, offset, math.prod(shape)).view(shape).mul_(scales)
    return values


def split_scales(scales: Tensor, shapes: Sequence[Sequence[int]], scaling: str) -> list[Tensor]:
    """Return the scales of each parameter, views of those of a bucket, ``[sum of scale_count]``."""
    counts = [scale_count(shape, scaling) for shape in shapes]
    starts = itertools.accumulate(counts, initial=0)
    return [
        scales.narrow(0, start, count).view(scale_shape(shape, scaling))
        for start, count, shape in zip(starts, counts, shapes, strict=False)
    ]
