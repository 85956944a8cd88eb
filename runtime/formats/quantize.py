"""Arithmetic of parameters that are gathered in float8 or float4.

A parameter is quantized as ``round(values / scale)`` in ``float8_e4m3fn``, where ``scale`` maps the largest absolute
value of a block to 448, the largest finite value of that dtype. A block is a row (``"rowwise"``), a matrix
(``"tensorwise"``), or 128 rows of 128 columns (``"blockwise"``, as in DeepSeek-V3; blocks at the edges are smaller). A
parameter of three dimensions is a stack of matrices, such as the experts of a layer: each has blocks of its own. ::

    shape           [6, 8]      [4, 6, 8]       [300, 200]      scales of a parameter of this shape
    rowwise         [6, 1]      [4, 6, 1]       [300, 1]
    tensorwise      [1, 1]      [4, 1, 1]       [1, 1]
    blockwise       [1, 1]      [4, 1, 1]       [3, 2]

``"mxfp8"`` is the format of the OCP's Microscaling Formats (MX) specification: a block is 32 neighboring values of a
row, and its scale a power of two, one byte (E8M0, the exponent plus 127). That is 1/32 of the data, too much to be
whole on every rank, so it is gathered with them: a bucket, or a shard of one, is a sequence of records ::

    32 bytes of data | 1 byte: their scale | 32 bytes of data | 1 byte | ...

Rows are multiples of 32, and so are parameters' offsets and shards, so that ranks never share a block. The
specification leaves rounding open; scales are rounded up, as in Transformer Engine and cuBLAS (torchao's ``RCEIL``), so
that no value exceeds 448: the least power of two that is at least ``largest / 448``.

``"nvfp4"`` is NVIDIA's format with two levels of scales. Values are E2M1 (2 bits of exponent, 1 of mantissa: 0, 0.5, 1,
1.5, 2, 3, 4, 6 and their negatives), two per byte, the first in the lower half. 16 neighbors in a row share a scale in
E4M3, which is gathered with them, and a matrix has a scale in float32, for the range that E4M3 does not have. A bucket
is a sequence of records ::

    8 bytes: 16 values | 1 byte: their scale | 8 bytes: 16 values | 1 byte | ...

    scale of a matrix   largest of the matrix / (6 * 448)
    scale of a block    largest of the block / 6 / scale of the matrix, rounded to E4M3; at most 448
    value               round(value / (scale of the block * scale of the matrix)), ties to even mantissas, at most 6

Values that are not finite stay visible: a NaN is sent as NaN, and the scale of an infinity makes its block NaN or
infinite. With ``"nvfp4"``, whose values are all finite, both make a scale NaN: that of their block at least, or of
their matrix.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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


class _Block(NamedTuple):
    """Rows and columns that share a scale. 0: all of the matrix."""

    rows: int
    columns: int

    def entries(self, shape: Sequence[int]) -> tuple[int, ...]:
        rows, columns = shape[-2:]
        return math.ceil(rows / (self.rows or rows or 1)), math.ceil(columns / (self.columns or columns or 1))


MX = "mxfp8"
MX_BLOCK = 32
"""Values that share a scale with ``"mxfp8"``."""
_MX_RECORD = MX_BLOCK + 1

NVFP4 = "nvfp4"
_FP4_BLOCK = 16
_FP4_RECORD = _FP4_BLOCK // 2 + 1
_FP4_LARGEST = 6.0
_FP4_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""What lies halfway between the magnitudes of E2M1, which are numbered from 0 as they are encoded."""

_BLOCKS = {
    "rowwise": _Block(1, 0),
    "tensorwise": _Block(0, 0),
    "blockwise": _Block(128, 128),
    MX: _Block(1, MX_BLOCK),
    NVFP4: _Block(0, 0),  # of the scales that are not gathered with the data
}

SCALINGS = tuple(_BLOCKS)
"""Names of the ways to share scales."""


class _Record(NamedTuple):
    """Elements that are sent together with their scale, and the bytes of both."""

    numel: int
    nbytes: int


_RECORDS = {MX: _Record(MX_BLOCK, _MX_RECORD), NVFP4: _Record(_FP4_BLOCK, _FP4_RECORD)}
_ELEMENT = _Record(1, 1)


def dtype_of(scaling: str) -> torch.dtype:
    """Return the dtype of quantized values."""
    return torch.float4_e2m1fn_x2 if scaling == NVFP4 else DTYPE


def kind_of(scaling: str) -> str:
    """Return what reports call quantized values: ``"float8"`` or ``"float4"``."""
    return "float4" if scaling == NVFP4 else "float8"


def block_numel(scaling: str) -> int:
    """Return the elements that a shard, and what comes before a parameter in its bucket, are multiples of."""
    return _RECORDS.get(scaling, _ELEMENT).numel


def sent_numel(numel: int, scaling: str) -> int:
    """Return the elements in which ``numel`` elements of a bucket are sent: bytes, or for ``""`` the elements
    themselves."""
    record = _RECORDS.get(scaling, _ELEMENT)
    return numel // record.numel * record.nbytes


def numel_of_sent(numel: int, scaling: str) -> int:
    """Return the elements of a bucket that are sent in ``numel``: the inverse of :func:`sent_numel`."""
    record = _RECORDS.get(scaling, _ELEMENT)
    return numel // record.nbytes * record.numel


def scale_shape(shape: Sequence[int], scaling: str) -> tuple[int, ...]:
    """Return the shape of the scales of a parameter of two or three dimensions: one entry per block."""
    return (*shape[:-2], *_BLOCKS[scaling].entries(shape))


def scale_count(shape: Sequence[int], scaling: str) -> int:
    """Return the number of a parameter's scales, without those that are gathered with the data."""
    return 0 if scaling == MX else math.prod(scale_shape(shape, scaling))


def cuts_matrices(scaling: str) -> bool:
    """Whether shards may begin and end inside a matrix of a stack: no scale is shared by its rows. ``""``: not
    quantized."""
    return not scaling or _BLOCKS[scaling].rows == 1


def entries_of_rows(scales: Tensor, row_dims: int, rows: range, scaling: str) -> tuple[Tensor, int]:
    """Return the entries of the blocks that a rank has rows of, and how many rows of the first block come before its
    own.

    Args:
        scales: Scales of a parameter, or what they are made from, ``[scale_shape]``.
        row_dims: Number of leading dimensions whose indices, taken together, are rows.
        rows: The rank's rows, which are matrices if the parameter has three dimensions and ``row_dims`` is 1.
    """
    if row_dims > 1:
        return scales.flatten(0, row_dims - 1)[rows.start : rows.stop], 0
    if scales.ndim > 2:
        return scales[rows.start : rows.stop], 0
    size = _BLOCKS[scaling].rows
    if not size:
        return scales, 0
    return scales[rows.start // size : math.ceil(rows.stop / size)], rows.start % size


def amax(values: Tensor, scaling: str, before: int = 0) -> Tensor:
    """Return the largest absolute values that scales are made from, in float32: one for each block, or part of one.

    Args:
        values: A parameter, or a rank's rows of it.
        scaling: One of :data:`SCALINGS`.
        before: Rows of the first block that come before them.
    """
    block = _BLOCKS[scaling]
    if block.columns:
        largest = torch.cat([part.abs().amax(-1) for part in _by_columns(values, block.columns)], -1)
    else:
        largest = values.abs().amax(-1, keepdim=True)
    if block.rows > 1:
        after = -(before + values.shape[-2]) % block.rows
        largest = F.pad(largest, (0, 0, before, after)).unflatten(-2, (-1, block.rows)).amax(-2)
    elif not block.rows:
        largest = largest.amax(-2, keepdim=True)
    return largest.float()


def per_row(scales: Tensor, rows: int, scaling: str, before: int = 0) -> Tensor:
    """Return scales of blocks as those of each row, ``[..., rows, columns of blocks]`` or one that broadcasts to it."""
    size = _BLOCKS[scaling].rows
    return scales.repeat_interleave(size, -2).narrow(-2, before, rows) if size > 1 else scales


def divided(values: Tensor, scales: Tensor, scaling: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Divide a matrix, or a stack of them, into views with scales that broadcast to their shapes.

    Args:
        values: ``[..., rows, columns]``.
        scales: See :func:`per_row`.
        scaling: One of :data:`SCALINGS`.
    """
    size, first = _BLOCKS[scaling].columns, 0
    if not size:
        yield values, scales
        return
    for part in _by_columns(values, size):
        yield part, scales.narrow(-1, first, part.shape[-2]).unsqueeze(-1)
        first += part.shape[-2]


def _by_columns(values: Tensor, size: int) -> Iterator[Tensor]:
    """Yield views ``[..., rows, blocks, columns of a block]``: of the whole blocks, and of what remains of each row."""
    whole = values.shape[-1] // size * size
    if whole:
        yield values[..., :whole].unflatten(-1, (-1, size))
    if whole < values.shape[-1]:
        yield values[..., whole:].unsqueeze(-2)


def scales_of(largest: Tensor, limit: float = LARGEST) -> Tensor:
    """Return the scales that map these largest absolute values to ``limit``. Blocks of zeros have scale 1."""
    # Not `largest / limit`: CUDA's kernel multiplies by the reciprocal of a number, which rounds otherwise.
    scales = largest / largest.new_full((), limit)
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def matrix_scales_of(largest: Tensor) -> Tensor:
    """Return the scales of matrices with ``"nvfp4"``, those of :func:`scales_of`."""
    return scales_of(largest, _FP4_LARGEST * LARGEST)


def rounded_scales_of(largest: Tensor) -> Tensor:
    """Return the smallest powers of two that are no smaller than :func:`scales_of`."""
    scales = scales_of(largest)
    mantissa, exponent = torch.frexp(scales)
    rounded = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return torch.where(scales.isfinite(), rounded, scales)


def quantize(values: Tensor, scales: Tensor) -> Tensor:
    """Quantize ``values`` with scales that broadcast to their shape; returns their bytes, in the same shape."""
    return (values.float() / scales).clamp_(-LARGEST, LARGEST).to(DTYPE).view(SENT_DTYPE)


def quantize_rows(
    values: Tensor, scales: Tensor, scaling: str, kernel: Callable[[Tensor, Tensor], Tensor], out: Tensor
) -> None:
    """Quantize rows of matrices.

    Args:
        values: ``[..., rows, columns]``.
        scales: See :func:`per_row`.
        scaling: One of :data:`SCALINGS`.
        kernel: :func:`quantize`, or another form's.
        out: Bytes, of the shape of ``values``, which are written.
    """
    for (part, its), (to, _) in zip(divided(values, scales, scaling), divided(out, scales, scaling), strict=True):
        to.copy_(kernel(part, its))


def quantize_by_factors(values: Tensor, factors: Tensor) -> Tensor:
    """Quantize ``values`` as libraries do that multiply by reciprocal scales, torchao and Transformer Engine, to the
    bit."""
    return (values.float() * factors).clamp_(-LARGEST, LARGEST).to(DTYPE).view(SENT_DTYPE)


def dequantize(
    data: Tensor, parts: Iterable[tuple[int, Sequence[int], Tensor]], dtype: torch.dtype, scaling: str
) -> Tensor:
    """Dequantize a bucket, or this rank's shard of one.

    Args:
        data: Bytes, ``[n]``.
        parts: Offset, shape and scales (see :func:`per_row`) of each parameter in it, or of this rank's rows of each.
        dtype: Dtype of the result.
        scaling: One of :data:`SCALINGS`.

    Returns:
        ``[n]``. Each element is the float32 product of value and scale, rounded once: ``float8`` values are exact in
        all of torch's wider dtypes.
    """
    if scaling == NVFP4:
        return dequantize_nvfp4(data, parts, dtype)
    values = data.view(DTYPE).to(dtype)
    for offset, shape, scales in parts:
        for part, its in divided(values.narrow(0, offset, math.prod(shape)).view(shape), scales, scaling):
            part.mul_(its)
    return values


def split_scales(scales: Tensor, shapes: Sequence[Sequence[int]], scaling: str) -> list[Tensor]:
    """Return the scales of each parameter, views of those of a bucket, ``[sum of scale_count]``."""
    counts = [scale_count(shape, scaling) for shape in shapes]
    starts = itertools.accumulate(counts, initial=0)
    return [
        scales.narrow(0, start, count).view(scale_shape(shape, scaling))
        for start, count, shape in zip(starts, counts, shapes, strict=False)
    ]


def dequantize_bucket(
    data: Tensor, scales: Tensor, places: Iterable[tuple[int, Sequence[int]]], dtype: torch.dtype, scaling: str
) -> Tensor:
    """Dequantize a gathered bucket, ``[numel]``.

    Args:
        data: Its bytes.
        scales: Its scales.
        places: Offset and shape of each parameter.
        dtype: Dtype of the result.
        scaling: One of :data:`SCALINGS`.
    """
    if scaling == MX:
        return dequantize_mx(data, dtype)
    offsets, shapes = zip(*places, strict=True)
    rows = [
        per_row(its, shape[-2], scaling)
        for its, shape in zip(split_scales(scales, shapes, scaling), shapes, strict=True)
    ]
    return dequantize(data, zip(offsets, shapes, rows, strict=True), dtype, scaling)


# -- mxfp8 ------------------------------------------------------------------------------------------------------------


def quantize_mx(values: Tensor) -> Tensor:
    """Quantize a shard, ``[n]``; returns its records, ``[n / 32 * 33]`` bytes."""
    blocks = values.view(-1, MX_BLOCK).float()
    exponents = exponents_of(blocks.abs().amax(-1, keepdim=True))
    return records(quantize_with_exponents(blocks, exponents), exponents)


def records(data: Tensor, scales: Tensor) -> Tensor:
    """Return the records of ``n`` bytes of data and ``n / 32`` scales."""
    return torch.cat([data.view(-1, MX_BLOCK), scales.view(-1, 1)], -1).flatten()


def from_records(sent: Tensor) -> Tensor:
    """Return the data of records, followed by the scales: ``[n + n / 32]`` bytes."""
    both = sent.view(-1, _MX_RECORD)
    return torch.cat([both[:, :MX_BLOCK].flatten(), both[:, MX_BLOCK]])


def exponents_of(largest: Tensor) -> Tensor:
    """Return the scales, in E8M0, for these largest absolute values, in float32. 254 stands for infinity, 255 for
    NaN."""
    # As Transformer Engine does it, which multiplies.
    bits = (largest * (1 / LARGEST)).view(torch.int32)
    exponents, mantissa = bits >> 23, bits & 0x7FFFFF
    # The least scale is 2^-127, below float32's normal numbers: half of what mantissa 0 and exponent 1 stand for.
    above = torch.where(exponents == 0, mantissa > 0x400000, mantissa > 0)
    exponents = torch.where(exponents < 254, exponents + above.int(), exponents)
    return torch.where(largest.isinf(), 254, exponents).to(torch.uint8)


def quantize_with_exponents(values: Tensor, exponents: Tensor) -> Tensor:
    """Quantize ``values`` with scales in E8M0 that broadcast to their shape; returns their bytes, in the same shape."""
    scales = torch.where(exponents == 0, 1.0, _powers_of_2(exponents))  # blocks of zeros
    return (values.float() / scales).clamp_(-LARGEST, LARGEST).to(DTYPE).view(SENT_DTYPE)


def dequantize_mx(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize records, ``[n / 32 * 33]`` bytes; returns ``[n]``. Products are rounded as in :func:`dequantize`."""
    records = data.view(-1, _MX_RECORD)
    values = records[:, :MX_BLOCK].contiguous().view(DTYPE).to(dtype)
    return values.mul_(_powers_of_2(records[:, MX_BLOCK:])).flatten()


def _powers_of_2(exponents: Tensor) -> Tensor:
    """Return what E8M0 stands for, in float32: 255 for NaN."""
    return exponents.contiguous().view(torch.float8_e8m0fnu).float()


# -- nvfp4 ------------------------------------------------------------------------------------------------------------


def quantize_nvfp4(values: Tensor, parts: Iterable[tuple[int, Sequence[int], Tensor]]) -> Tensor:
    """Quantize a shard, ``[n]``; returns its records, ``[n / 16 * 9]`` bytes.

    Args:
        values: The shard.
        parts: Offset and shape of this rank's rows of each parameter, and the scales of its matrices (see
            :func:`per_row`).
    """
    blocks = values.view(-1, _FP4_BLOCK).float()
    largest = blocks.abs().amax(-1)
    of_matrices = torch.ones_like(largest)
    for its, scales in _of_blocks(of_matrices, parts):
        its.copy_(scales.expand_as(its))
    scales = (largest / largest.new_full((), _FP4_LARGEST) / of_matrices).to(DTYPE)
    # In blocks with scale 0, these are NaN and infinite. Both are sent, and are 0 once they are multiplied by the
    # scale.
    magnitudes = blocks.abs() / (scales.float() * of_matrices).unsqueeze(-1)
    codes = torch.signbit(blocks).to(SENT_DTYPE) << 3
    for number, midpoint in enumerate(_FP4_MIDPOINTS):  # ties go to even numbers, whose mantissas are even
        codes += magnitudes >= midpoint if number % 2 else magnitudes > midpoint
    data = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.cat([data, scales.view(SENT_DTYPE).unsqueeze(-1)], -1).flatten()


def dequantize_nvfp4(data: Tensor, parts: Iterable[tuple[int, Sequence[int], Tensor]], dtype: torch.dtype) -> Tensor:
    """Dequantize records, ``[n / 16 * 9]`` bytes; returns ``[n]``.

    Each element is the float32 product of value and scale, rounded once. The scale is the float32 product of the scales
    of block and matrix. For ``parts`` see :func:`dequantize`.
    """
    records = data.view(-1, _FP4_RECORD)
    scales = records[:, -1].contiguous().view(DTYPE).float()
    for its, of_matrices in _of_blocks(scales, parts):
        its.mul_(of_matrices)
    values = F.embedding(records[:, :-1].int(), _values_of_bytes(dtype, data.device)).flatten(1)
    return values.mul_(scales.unsqueeze(-1)).flatten()


def _values_of_bytes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the two values of each byte, ``[256, 2]``. Made on the device: CUDA graphs cannot capture a copy to it."""
    both = torch.arange(256, dtype=torch.int16, device=device)
    codes = torch.stack([both & 15, both >> 4], -1)
    # E2M1's bits where float16 has its sign, the lowest bits of its exponent, and the highest of its mantissa. The
    # exponent's bias is 15 instead of 1.
    return ((codes & 8) << 12 | (codes & 7) << 9).view(torch.float16).to(dtype).mul_(2.0**14)


def _of_blocks(blocks: Tensor, parts: Iterable[tuple[int, Sequence[int], Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the entries of ``blocks``, ``[n / 16]``, of each part, ``[..., rows, columns / 16]``, and the part's
    scales."""
    for offset, shape, scales in parts:
        its = blocks.narrow(0, offset // _FP4_BLOCK, math.prod(shape) // _FP4_BLOCK)
        yield its.view(*shape[:-1], shape[-1] // _FP4_BLOCK), scales
