"""Gradients in 8 or 4 bits on the wire: blocks of values that share a scale.

A packed gradient is sent in slices, one to each rank, with the scales of its blocks behind the data::

    values of a slice, in blocks of 128  ->  a byte per value             | four bytes per block: its scale, in float32
                       in blocks of 32   ->  a byte per pair of neighbors | two bytes per block: its scale, in bfloat16

A value is sent as ``round(value / scale)``, where the scale maps the largest absolute value of the block to the largest
value of the format. Zeros fill a slice's last block.

Rounding is to the nearest, ties to even, or stochastic: up with the probability that is the distance to the number
below, so that errors cancel on average. The random numbers are a hash of the block's bits, and of the value's place. So
they need no state, and a resumed run, another process and compiled code draw the same.

Values that are not finite stay visible: they make their block NaN. Blocks of values below 1e-33 may count as zeros,
because their scale would not be a normal number. Blocks follow the bucket's layout, so what shares a scale depends on
the layout, and not on how many microbatches or collectives there are.

A slice may also be sent in 16 bits, without scales, where it would be in float32: sums of other ranks.

There is one implementation, in operators without side effects. The eager path runs it over a part of a slice at a time,
because intermediate values are in 32 and 64 bits. Inductor traces it over all slices, and fuses it.

After the blockwise quantization of DeepSeek-V3 and of ZeRO++'s qgZ, which sends gradients in blocks of integers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        scale_bytes: Bytes of a scale: 4 for float32, 2 for bfloat16.
        largest: The largest value.
        mantissa, exponent: Bits of a number's mantissa, and the exponent of the smallest normal number; None: integers.
        is_stochastic: Whether rounding is.
    """

    dtype: torch.dtype
    bits: int = 16
    block: int = 0
    scale_bytes: int = 4
    largest: float = 0.0
    mantissa: int | None = None
    exponent: int = 0
    is_stochastic: bool = False

    @property
    def sent_dtype(self) -> torch.dtype:
        """Dtype of what collectives get."""
        return torch.uint8 if self.block else self.dtype

    def padded(self, numel: int) -> int:
        """Return the values of whole blocks."""
        return math.ceil(numel / self.block) * self.block if self.block else numel

    def sizes(self, numel: int) -> tuple[int, int]:
        """Return the bytes of a slice's values, and of its scales."""
        padded = self.padded(numel)
        return padded * self.bits // 8, padded // self.block * self.scale_bytes

    def sent_numel(self, numel: int) -> int:
        """Return the elements, of ``sent_dtype``, in which a slice of ``numel`` values is sent."""
        return sum(self.sizes(numel)) if self.block else numel


_FORMATS = (
    Format(torch.bfloat16),
    Format(torch.float8_e4m3fn, 8, 128, 4, 448.0, 3, -6),
    Format(torch.float8_e5m2, 8, 128, 4, 57344.0, 2, -14),
    Format(torch.int8, 8, 128, 4, 127.0),
    Format(torch.float4_e2m1fn_x2, 4, 32, 2, 6.0, 1, 0),
    Format(torch.int4, 4, 32, 2, 7.0),
)
DTYPES = tuple(each.dtype for each in _FORMATS if each.block)
"""The formats with scales, as the dtypes of their values."""
OUTER_DTYPES = tuple(each.dtype for each in _FORMATS)
"""Those that sums may be sent in."""


def name_of(dtype: object, is_stochastic: bool = False) -> str:
    """Return the name of a format."""
    return ("stochastic " if is_stochastic else "") + str(dtype).removeprefix("torch.")


FORMATS = {name_of(each.dtype): each for each in _FORMATS} | {
    name_of(each.dtype, True): replace(each, is_stochastic=True) for each in _FORMATS if each.block
}
"""The formats by the names by which graphs know them."""


def sent_numel(numel: int, ranks: int, name: str) -> int:
    """Return the elements in which ``numel`` values are sent to ``ranks`` ranks, this one included."""
    return ranks * FORMATS[name].sent_numel(math.ceil(numel / ranks))


def sent(numel: int, dtype: torch.dtype, ranks: int, name: str) -> tuple[int, torch.dtype]:
    """Return the elements, and their dtype, in which ``numel`` values are sent; "": as they are, filled up."""
    if name:
        return sent_numel(numel, ranks, name), FORMATS[name].sent_dtype
    return math.ceil(numel / ranks) * ranks, dtype


def slices_of(values: Tensor, ranks: int, pieces: int = 1) -> Tensor:
    """Return what each rank gets of ``values``, ``[numel]``: ``[ranks, n]``, filled up with zeros.

    Args:
        pieces: Number of pieces that a slice consists of: of every ``ranks`` neighboring pieces, each rank gets one.
            They divide the values.
    """
    if pieces > 1:
        return values.view(pieces, ranks, -1).transpose(0, 1).reshape(ranks, -1)
    padding = -values.numel() % ranks
    return (F.pad(values, (0, padding)) if padding else values).view(ranks, -1)


def encode_each(values: Tensor, ranks: int, name: str, pieces: int = 1) -> Tensor:
    """Do the same as :func:`encode` with a part of a slice at a time."""
    if not name or not FORMATS[name].block:
        return encode(values, ranks, name, pieces)
    format = FORMATS[name]
    numel = math.ceil(values.numel() / ranks)
    sent = values.new_empty(ranks, format.sent_numel(numel), dtype=format.sent_dtype)
    for rank, message in enumerate(sent):
        mine = values.view(pieces, ranks, -1)[:, rank].reshape(-1) if pieces > 1 else values[rank * numel :][:numel]
        sent_codes, sent_scales = message.split(format.sizes(numel))
        for first, end in _parts(numel):
            part = mine[first:end]
            codes, scales = _encoded(F.pad(part, (0, format.padded(end - first) - part.numel()))[None], format, first)
            at_codes, at_scales = format.sizes(first)
            sent_codes[at_codes:][: codes.numel()].copy_(codes[0])
            sent_scales[at_scales:][: scales.numel()].copy_(scales[0])
    return sent.view(-1)


_AT_A_TIME = 1 << 20
"""Values, a multiple of every block."""


def _parts(numel: int) -> Iterator[tuple[int, int]]:
    """Yield where parts of a slice begin and end."""
    for first in range(0, numel, _AT_A_TIME):
        yield first, min(first + _AT_A_TIME, numel)


def encode(values: Tensor, ranks: int, name: str, pieces: int = 1) -> Tensor:
    """Return what is sent for ``values``, ``[numel]``, as :func:`sent` says; see :func:`slices_of`."""
    slices = slices_of(values, ranks, pieces)
    if not name:
        return slices.reshape(-1)
    format = FORMATS[name]
    if not format.block:
        return slices.to(format.dtype).view(-1)
    padding = format.padded(slices.shape[1]) - slices.shape[1]
    slices = F.pad(slices, (0, padding)) if padding else slices
    return torch.cat(_encoded(slices, format, 0), 1).view(-1)


def _encoded(slices: Tensor, format: Format, first: int) -> tuple[Tensor, Tensor]:
    """Return the bytes of values and of scales, for whole blocks of each rank, ``[ranks, numel]``.

    Args:
        first: Where they begin in their slices.
    """
    ranks = len(slices)
    blocks = slices.to(torch.float32).view(ranks, -1, format.block)
    largest = blocks.abs().amax(-1, keepdim=True)
    # True divisions: CUDA turns one by a number into a product with its reciprocal.
    scales = torch.div(largest, torch.full_like(largest, format.largest))
    is_tiny = scales < _LEAST_SCALE
    scales = torch.where(is_tiny, 1.0, scales)
    if format.scale_bytes == 2:
        scales = _as_bfloat16(scales)
    scaled = torch.where(is_tiny, 0.0, blocks / scales)
    if format.is_stochastic or format.bits == 4 or format.mantissa is None:  # a cast rounds the others
        scaled = _rounded(scaled, format, _random(blocks, first) if format.is_stochastic else None)
    bits = scales.view(torch.int32)
    scale_bytes = torch.cat([bits >> shift & 0xFF for shift in _shifts(format)], -1).to(torch.uint8)
    return _codes(scaled, format).view(ranks, -1), scale_bytes.view(ranks, -1)


def _as_bfloat16(scales: Tensor) -> Tensor:
    """Round to bfloat16, and return float32. Compilers leave out a cast there and back."""
    bits = scales.view(torch.int32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & -0x10000).view(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales)


def _shifts(format: Format) -> range:
    """Return where the bytes of a scale are among a float32's bits. Those of bfloat16 are the upper half."""
    return range(32 - 8 * format.scale_bytes, 32, 8)


def _rounded(scaled: Tensor, format: Format, random: Tensor | None) -> Tensor:
    """Round to numbers of the format."""
    distance: Tensor | float = 1.0
    if format.mantissa is not None:
        # Numbers of one exponent are at equal distances, a power of 2. The bits of an exponent alone are its power.
        power = (scaled.view(torch.int32) & 0x7F800000).view(torch.float32)
        distance = power.clamp(min=2.0**format.exponent) * 2.0**-format.mantissa
    steps = scaled / distance
    steps = steps.round() if random is None else (steps + random).floor()
    # A scale in bfloat16 may be rounded down.
    return (steps * distance).clamp(-format.largest, format.largest)


def _random(blocks: Tensor, first: int = 0) -> Tensor:
    """Return numbers in ``[0, 1)`` for the values of blocks: a hash of their bits and places in a slice."""
    places = torch.arange(first, first + blocks[0].numel(), device=blocks.device).view(blocks[0].shape)
    found = blocks.view(torch.int32).to(torch.int64).sum(-1, keepdim=True)
    # Not a sum: Inductor would take products of places for indices, and compute them in 32 bits.
    found = (found & 0x7FFFFFFF) * 0x27D4EB2F ^ places
    for factor in (0x7FEB352D, 0x6C078965, 0x5BD1E995):  # of 31 bits: no product overflows
        found = ((found ^ found >> 16) & 0x7FFFFFFF) * factor
    return (found >> 7 & 0xFFFFFF).to(torch.float32) / 2.0**24


def _codes(values: Tensor, format: Format) -> Tensor:
    """Return the bytes of rounded values, ``[..., block]``. What stands for a NaN does not matter: its scale is one."""
    if format.mantissa is None:
        values = torch.where(values.isnan(), 0.0, values)
    if format.bits == 8:
        return values.to(format.dtype).view(torch.uint8)
    if format.mantissa is None:
        codes = values.to(torch.int32) + 8
    else:
        size = torch.where(values.isnan(), 0.0, values.abs())
        codes = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.int32)
        codes = torch.where(values < 0, codes + 8, codes)
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)


def _values(codes: Tensor, format: Format) -> Tensor:
    """Return what bytes stand for, in float32, before it is scaled: the inverse of :func:`_codes`."""
    if format.bits == 8:
        return codes.view(format.dtype).to(torch.float32)
    both = codes.to(torch.int32)
    nibbles = torch.stack([both & 15, both >> 4], -1).flatten(-2)
    if format.mantissa is None:
        return (nibbles - 8).to(torch.float32)
    size = (nibbles & 7).to(torch.float32)
    size = torch.where(size < 4, size / 2, torch.where(size < 6, size - 2, size * 2 - 8))
    return torch.where(nibbles < 8, size, -size)


SLICES_AT_ONCE = 64
"""Slices that one generated kernel reads and adds."""


def sum_dtype(sent: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks add slices that are sent in ``sent``: float32, and for float64 that."""
    return torch.promote_types(sent, torch.float32)


def sum_each(sent: Tensor, ranks: int, numel: int, name: str) -> Tensor:
    """Do the same as :func:`sum_decoded` with a part of a slice at a time."""
    messages, format = sent.view(ranks, -1), FORMATS[name] if name else None
    if format is None or not format.block:
        total, *others = messages[:, :numel]
        total = total.to(sum_dtype(total.dtype), copy=True)
        for other in others:
            total.add_(other)
        return total
    total = torch.empty(numel, device=sent.device)
    every_code, every_scale = messages.split(format.sizes(numel), 1)
    for first, end in _parts(numel):
        (code, scale), (last_code, last_scale) = format.sizes(first), format.sizes(end)
        part, codes, scales = total[first:end], every_code[:, code:last_code], every_scale[:, scale:last_scale]
        for rank in range(ranks):
            decoded = _decoded(codes[rank : rank + 1], scales[rank : rank + 1], format)[0, : end - first]
            part.copy_(decoded) if rank == 0 else part.add_(decoded)
    return total


def sum_decoded(sent: Tensor, ranks: int, numel: int, name: str, onto: Tensor | None = None) -> Tensor:
    """Return the sum of what ranks have sent, in the order of ranks: in float32, and of float64 in that.

    Args:
        sent: The slices of ranks for this one, one after the other.
        numel: Values of a slice.
        name: Format. "": slices are sent as they are.
        onto: Sum of earlier ranks.
    """
    messages, format, total = sent.view(ranks, -1), FORMATS[name] if name else None, onto
    if format is None or not format.block:
        slices = messages.to(sum_dtype(messages.dtype))
    else:
        codes, scale_bytes = messages.split(format.sizes(numel), 1)
        slices = _decoded(codes, scale_bytes, format)
    for each in slices[:, :numel]:
        total = each if total is None else total + each
    assert total is not None
    return total


def _decoded(codes: Tensor, scale_bytes: Tensor, format: Format) -> Tensor:
    """Return the values of whole blocks, ``[ranks, numel]`` in float32: the inverse of :func:`_encoded`."""
    parts = scale_bytes.unflatten(1, (-1, format.scale_bytes)).to(torch.int32).unbind(-1)
    bits = sum(part << shift for part, shift in zip(parts, _shifts(format), strict=True))
    assert isinstance(bits, Tensor)
    values = _values(codes, format).unflatten(1, (-1, format.block)) * bits.view(torch.float32).unsqueeze(-1)
    return values.flatten(1)
