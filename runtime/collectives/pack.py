"""Gradients are packed into buckets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from ..geometry.exchange import Buffers, Exchange
from ..geometry.rows import contiguous_strides
from ..lanes.lane import Lane
from ..memory.comm_buffers import take
from . import fakes as fakes
from .library import library


def pack(gradients: Sequence[Tensor | None], exchange: Exchange, lane: Lane, is_traced: bool = True) -> Tensor:
    """Pack gradients into a bucket, ``[numel]`` in the communication dtype.

    Args:
        gradients: One per parameter of the bucket; None means zeros. At least one is a tensor.
        exchange, lane: Those of the bucket.
        is_traced: Whether this may be traced. If not, the kernel is called without torch's dispatcher.
    """
    # An embedding with sparse=True has sparse gradients; a bucket is dense.
    present = [
        (g.to_dense() if g.is_sparse else g, o)
        for g, o in zip(gradients, exchange.offsets, strict=True)
        if g is not None
    ]
    packed = (torch.ops.mfsdp.pack_gradients if is_traced else _pack_gradients)(
        [g for g, _ in present],
        [o for _, o in present],
        exchange.numel,
        exchange.comm_dtype,
        *exchange.gradient_buffers,
    )
    return lane.travel("pack", packed) if lane.pack else packed


@torch.library.impl(library, "pack_gradients", "CompositeExplicitAutograd")
def _pack_gradients(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    capacity: int = 0,
    count: int = 0,
) -> Tensor:
    device = gradients[0].device
    if capacity:
        flat = take("gradients", Buffers(capacity, count), numel, dtype, device)
    else:
        flat = torch.empty(numel, dtype=dtype, device=device)
    return _pack_into(flat, gradients, offsets)


@torch.library.impl(library, "pack_into", "CompositeExplicitAutograd")
def _pack_into(
    memory: Tensor, gradients: Sequence[Tensor], offsets: Sequence[int], gaps: Sequence[int] | None = None
) -> Tensor:
    places, zeros, end = [], list(gaps or ()), 0
    for gradient, offset in zip(gradients, offsets, strict=True):
        if gaps is None and offset > end:
            zeros += [end, offset]
        end = offset + gradient.numel()
        places.append(memory.as_strided(gradient.shape, contiguous_strides(gradient.shape), offset))
    if gaps is None and end < memory.numel():
        zeros += [end, memory.numel()]
    for start, stop in zip(zeros[::2], zeros[1::2], strict=True):
        memory[start:stop].zero_()
    compat.copy_each(places, list(gradients))
    return memory
