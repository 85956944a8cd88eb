"""Digests of what ranks hold: lines of text, and values of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from . import compat


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


PIECE_ROWS = {"cpu": 512}
"""Number of rows, of 8 KiB, to process at once. On the CPU, products stay in its cache. Elsewhere :data:`MANY_ROWS`."""

MANY_ROWS = 1 << 13


@torch.no_grad()
def value_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bits and their order, in one pass over its memory and with one copy to the CPU.

    ::

        row 1       | word | word | ... |      2,048 words of 4 bytes, times a weight of the row's own
        row 2       | word | word | ... |
        ...
        sums        | 64 bits | ...     |      hashed with SHA-256, together with what does not fill a row

    No weight is 0, and no two rows have the same weight (up to 2**31 rows, 16 TiB). A product stays below 2**63.
    Therefore any single changed word, and any exchange of two rows or words, changes a sum. Other changes do so except
    for coincidences modulo 2**64. The digest of a tensor that wraps others is one of their digests.
    """
    if tensor.is_meta:
        return "meta"
    if inner := compat.inner_tensors(tensor):
        return digest([f"{name} {value_digest(each)}" for name, each in inner.items()])[:16]
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    height = data.numel() // 8192
    if data.storage_offset() % 4:
        data = data.clone()
    body = data[: height * 8192].view(torch.int32).view(height, 2048)
    step = PIECE_ROWS.get(data.device.type, MANY_ROWS)
    sums = torch.zeros(2048, dtype=torch.int64, device=data.device)
    products = torch.empty(min(step, height), 2048, dtype=torch.int64, device=data.device)
    for first in range(0, height, step):
        piece = body[first : first + step]
        held = products[: len(piece)]
        torch.mul(piece, _weights(first, len(piece), data.device), out=held)
        sums += held.sum(0)
    tail = data[height * 8192 :]
    return hashlib.sha256(torch.cat([sums.view(torch.uint8), tail]).cpu().numpy().tobytes()).hexdigest()[:16]


def _weights(first: int, count: int, device: torch.device) -> Tensor:
    """Return the weights of rows, [count, 1]: their mixed numbers, a permutation of 1 to 2**31 - 1."""
    low = (1 << 31) - 1
    number = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device).bitwise_and_(low)
    for factor in (0x2C1B3C6D, 0x297A2D39):
        number ^= number >> 15
        number = (number * factor) & low
    return (number ^ (number >> 16)).view(-1, 1)
