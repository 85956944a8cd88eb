"""Gradients in 8 bits on the wire: blocks of 128 values that share a scale.

A packed gradient is sent in slices, one to each rank, with the scales of its blocks behind the data::

    values of a slice, in blocks of 128  ->  a byte per value | four bytes per block: its scale, in float32

A value is sent as ``round(value / scale)``, where the scale maps the largest absolute value of the block to the largest
finite value of the format. Rounding is to the nearest, ties to even. Zeros fill a slice's last block.

Values that are not finite stay visible: they make their block NaN. Blocks of values below 1e-35 count as zeros, because
their scale would not be a normal number. Blocks follow the bucket's layout, so what shares a scale depends on the
layout, and not on how many microbatches or collectives there are.

After the blockwise quantization of DeepSeek-V3 and of ZeRO++'s qgZ, which sends gradients in blocks of integers.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
"""Values that share a scale."""
_RECORD = BLOCK + 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smaller numbers have few digits, or are zero on devices that flush them. Values of such blocks count as zeros."""
_LARGEST = {
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
    torch.float8_e5m2: torch.finfo(torch.float8_e5m2).max,
    torch.int8: 127.0,
}
DTYPES = tuple(_LARGEST)
"""The formats, as the dtypes of their values."""


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a format, by which graphs know it."""
    return str(dtype).removeprefix("torch.")


_BY_NAME = {name_of(dtype): dtype for dtype in DTYPES}


def sent_numel(numel: int, ranks: int) -> int:
    """Return the bytes in which ``numel`` values are sent to ``ranks`` ranks, this one included."""
    return ranks * math.ceil(math.ceil(numel / ranks) / BLOCK) * _RECORD


def encode(values: Tensor, ranks: int, name: str) -> Tensor:
    """Return what is sent for ``values``, ``[numel]``: bytes, ``[sent_numel(numel, ranks)]``.

    Slices are encoded one after the other: in float32, one slice at a time is in memory.
    """
    numel = math.ceil(values.numel() / ranks)
    data = math.ceil(numel / BLOCK) * BLOCK
    sent = values.new_empty(ranks, sent_numel(numel, 1), dtype=torch.uint8)
    for rank, message in enumerate(sent):
        mine = values[rank * numel : (rank + 1) * numel]
        _encode(F.pad(mine, (0, data - mine.numel())), _BY_NAME[name], message[:data], message[data:])
    return sent.view(-1)


def _encode(values: Tensor, dtype: torch.dtype, data: Tensor, scale_bytes: Tensor) -> None:
    blocks = values.view(-1, BLOCK).to(torch.float32)
    largest = blocks.abs().amax(1, keepdim=True)
    # True divisions: CUDA turns one by a number into a product with its reciprocal.
    scales = torch.div(largest, torch.full_like(largest, _LARGEST[dtype]))
    scales = torch.where(scales < _LEAST_SCALE, 1.0, scales)
    scaled = blocks.div(scales)
    if dtype is torch.int8:
        scaled.round_().nan_to_num_(0.0)  # the scale of such a block is no number
    data.copy_(scaled.to(dtype).view(torch.uint8).view(-1))
    scale_bytes.copy_(scales.view(torch.uint8).view(-1))


def sum_decoded(sent: Tensor, ranks: int, numel: int, name: str) -> Tensor:
    """Return the sum of what ranks have sent, in float32 and in the order of ranks.

    Args:
        sent: The slices of all ranks for this one, one after the other.
        numel: Values of a slice.
    """
    dtype, slices = _BY_NAME[name], sent.view(ranks, -1)
    blocks = math.ceil(numel / BLOCK)
    total: Tensor | None = None
    for received in slices:
        scales = received[blocks * BLOCK :].clone().view(torch.float32)
        values = received[: blocks * BLOCK].view(dtype).view(blocks, BLOCK).to(torch.float32)
        decoded = (values * scales.unsqueeze(1)).view(-1)[:numel]
        total = decoded if total is None else total.add_(decoded)
    assert total is not None
    return total
