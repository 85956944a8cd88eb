"""Gradients in 8 or 4 bits on the wire: blocks of values that share a scale.

A packed gradient is sent in slices, one to each rank, with the scales of its blocks behind the data::

    values of a slice, in blocks of 128  ->  a byte per value             | four bytes per block: its scale, in float32
                       in blocks of 32   ->  a byte per pair of neighbors | two bytes per block: its scale, in bfloat16

A value is sent as ``round(value / scale)``, where the scale maps the largest absolute value of the block to the largest
value of the format. Zeros fill a slice's last block.

Rounding is to the nearest, ties to even, or stochastic: up with the probability that is the distance to the number
below, so that errors cancel on average. The random numbers are a hash of the block's bits, and of the value's place. So
they need no state, and a resumed run, another process and compiled code draw the same.

Values that are not finite stay visible: they make their block NaN. Blocks of values below 1e-35 count as zeros, because
their scale would not be a normal number. Blocks follow the bucket's layout, so what shares a scale depends on the
layout, and not on how many microbatches or collectives there are.

A slice may also be sent in 16 bits, without scales, where it would be in float32: sums of other ranks.

After the blockwise quantization of DeepSeek-V3 and of ZeRO++'s qgZ, which sends gradients in blocks of integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smaller numbers have few digits, or are zero on devices that flush them. Values of such blocks count as zeros."""


@dataclass(frozen=True)
class Format:
    """How values are sent.

    Args:
        dtype: What users call it. Torch has no numbers of 4 bits, but dtypes for them.
        bits: Bits of a value.
        block: Values that share a scale; 0: there are no scales.
        scale: Dtype of scales.
        largest: The largest value.
        mantissa, exponent: Bits of a number's mantissa, and the exponent of the smallest normal number; 0 and 64:
            integers.
        is_stochastic: Whether rounding is.
    """

    dtype: torch.dtype
    bits: int = 16
    block: int = 0
    scale: torch.dtype = torch.float32
    largest: float = 0.0
    mantissa: int = 0
    exponent: int = 64
    is_stochastic: bool = False

    def padded(self, numel: int) -> int:
        """Return the values of whole blocks."""
        return math.ceil(numel / self.block) * self.block if self.block else numel

    def data_bytes(self, numel: int) -> int:
        """Return the bytes of a slice's values."""
        return self.padded(numel) * self.bits // 8

    def nbytes(self, numel: int) -> int:
        """Return the bytes in which a slice of ``numel`` values is sent."""
        scales = self.padded(numel) // self.block * self.scale.itemsize if self.block else 0
        return self.data_bytes(numel) + scales


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NAMED = {str(each.dtype).removeprefix("torch."): each for each in (
    Format(torch.bfloat16),
    Format(torch.float16),
    Format(torch.float8_e4m3fn, 8, 128, torch.float32, 448.0, 3, -6),
    Format(torch.float8_e5m2, 8, 128, torch.float32, 57344.0, 2, -14),
    Format(torch.int8, 8, 128, torch.float32, 127.0),
    Format(torch.float4_e2m1fn_x2, 4, 32, torch.bfloat16, 6.0, 1, 0),
    Format(torch.int4, 4, 32, torch.bfloat16, 7.0),
)}  # fmt: skip
DTYPES = tuple(each.dtype for each in _NAMED.values() if each.block)
"""The formats with scales, as the dtypes of their values."""
OUTER_DTYPES = tuple(each.dtype for each in _NAMED.values())
"""Those that sums may be sent in."""
_STOCHASTIC = "stochastic "
FORMATS = _NAMED | {
    _STOCHASTIC + name: replace(each, is_stochastic=True) for name, each in _NAMED.items() if each.block
}
"""The formats by the names by which graphs know them."""


def name_of(dtype: object, is_stochastic: bool = False) -> str:
    """Return the name of a format."""
    return (_STOCHASTIC if is_stochastic else "") + str(dtype).removeprefix("torch.")


def sent_numel(numel: int, ranks: int, name: str) -> int:
    """Return the bytes in which ``numel`` values are sent to ``ranks`` ranks, this one included."""
    return ranks * FORMATS[name].nbytes(math.ceil(numel / ranks))


def encode(values: Tensor, ranks: int, name: str, pieces: int = 1) -> Tensor:
    """Return what is sent for ``values``, ``[numel]``: bytes, ``[sent_numel(numel, ranks, name)]``.

    Slices are encoded one after the other: in float32, one slice at a time is in memory.

    Args:
        pieces: Number of pieces of a slice; see :func:`slices_of`.
    """
    format = FORMATS[name]
    numel = math.ceil(values.numel() / ranks)
    sent = values.new_empty(ranks, format.nbytes(numel), dtype=torch.uint8)
    for rank, message in enumerate(sent):
        if pieces == 1:
            mine = values[rank * numel : (rank + 1) * numel]
        else:
            mine = slices_of(values, ranks, pieces)[rank].reshape(-1)
        padded = F.pad(mine, (0, format.padded(numel) - mine.numel()))
        if format.block:
            _encode(padded, format, *message.tensor_split([format.data_bytes(numel)]))
        else:
            message.copy_(padded.to(format.dtype).view(torch.uint8))
    return sent.view(-1)


def slices_of(values: Tensor, ranks: int, pieces: int) -> Tensor:
    """Return a view of what each rank gets, ``[ranks, pieces, n]``: of every ``ranks`` neighboring pieces, one each."""
    return values.view(pieces, ranks, -1).transpose(0, 1)


def _encode(values: Tensor, format: Format, data: Tensor, scale_bytes: Tensor) -> None:
    blocks = values.view(-1, format.block).to(torch.float32)
    largest = blocks.abs().amax(1, keepdim=True)
    # True divisions: CUDA turns one by a number into a product with its reciprocal.
    scales = torch.div(largest, torch.full_like(largest, format.largest))
    scales = torch.where(scales < _LEAST_SCALE, 1.0, scales).to(format.scale)
    scaled = blocks.div(scales.float())
    if format.is_stochastic or format.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        scaled = _rounded(scaled, format, _random(blocks) if format.is_stochastic else None)
    data.copy_(_as_bytes(scaled, format).view(-1))
    scale_bytes.copy_(scales.view(torch.uint8).view(-1))


def _rounded(scaled: Tensor, format: Format, random: Tensor | None) -> Tensor:
    """Round to numbers of the format."""
    # The distance of two numbers is a power of 2, by which a division is exact.
    exponents = torch.frexp(scaled)[1].clamp_(min=format.exponent + 1) if format.exponent < 64 else None
    distance = torch.ldexp(torch.ones_like(scaled), exponents - 1 - format.mantissa) if exponents is not None else 1.0
    steps = scaled / distance
    steps = steps.round_() if random is None else steps.add_(random).floor_()
    # A scale in bfloat16 may be rounded down. The scale of a block with a NaN is none: what is sent does not matter.
    return (steps * distance).clamp_(-format.largest, format.largest)


def _random(blocks: Tensor) -> Tensor:
    """Return numbers in ``[0, 1)`` for the values of blocks: a hash (of splitmix64's kind) of their bits."""
    place = torch.arange(blocks.numel(), device=blocks.device).view(blocks.shape)
    found = blocks.view(torch.int32).sum(1, keepdim=True, dtype=torch.int64) * 0x5851F42D4C957F2D
    found = found + place * 0x1E3779B97F4A7C15
    for factor in (0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        found = (found ^ (found >> 30)) * factor
    return ((found >> 31) & 0xFFFFFF).to(torch.float32) / 2.0**24


def _as_bytes(values: Tensor, format: Format) -> Tensor:
    if format.bits == 8:
        if format.dtype is torch.int8:
            values = values.nan_to_num_(0.0)
        return values.to(format.dtype).view(torch.uint8)
    values = values.nan_to_num_(0.0)
    if format.dtype is torch.int4:
        codes = (values + 8).to(torch.uint8)
    else:
        size = values.abs()
        codes = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
        codes += (values < 0).to(torch.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4


def _values(data: Tensor, format: Format) -> Tensor:
    """Return what bytes stand for, in float32, before it is scaled."""
    if format.bits != 4:
        return data.view(format.dtype).to(torch.float32)
    integers = torch.arange(-8.0, 8.0, device=data.device)
    e2m1 = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=data.device)
    table = integers if format.dtype is torch.int4 else e2m1
    return F.embedding(torch.stack([data & 15, data >> 4], -1).int().view(-1), table[:, None]).view(-1)


def sum_decoded(sent: Tensor, ranks: int, numel: int, name: str) -> Tensor:
    """Return the sum of what ranks have sent, in float32 and in the order of ranks.

    Args:
        sent: The slices of all ranks for this one, one after the other.
        numel: Values of a slice.
    """
    format = FORMATS[name]
    total: Tensor | None = None
    for received in sent.view(ranks, -1):
        data, scale_bytes = received.tensor_split([format.data_bytes(numel)])
        decoded = _values(data, format)
        if format.block:
            scales = scale_bytes.clone().view(format.scale).float()
            decoded = (decoded.view(-1, format.block) * scales.unsqueeze(1)).view(-1)[:numel]
        total = decoded if total is None else total.add_(decoded)
    assert total is not None
    return total
