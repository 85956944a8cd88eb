"""Reductions: gradients are packed into buckets, and each stage of a reduction is started and awaited."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from ..geometry.exchange import Buffers, Exchange, When, exchanges_slices, format_of, pieces_of
from ..geometry.rows import contiguous_strides
from ..memory.comm_buffers import take
from . import fakes as fakes
from .library import library


def pack(gradients: Sequence[Tensor | None], exchange: Exchange, is_traced: bool = True) -> Tensor:
    """Pack gradients into a bucket, ``[numel]`` in the communication dtype.

    Args:
        gradients: One per parameter of the bucket; None means zeros. At least one is a tensor.
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
    return packed * exchange.scale if exchange.scales_first else packed


def start_stage(gradient: Tensor, stage: int, exchange: Exchange, token: Tensor | None) -> Tensor:
    """Start one stage of a reduction. Return its result, which must be awaited.

    Args:
        gradient: The packed bucket, or the result of the previous stage.
        token: Token of the bucket's :class:`~mfsdp_compile.runtime.memory.deferred_gradients.DeferredGradient`, if it
            has one.
    """
    inspected = exchange.inspected and stage == 0
    collective, op, when = exchange.collectives[stage], exchange.reduce_op, exchange.when[stage]
    size, group = exchange.group_sizes[stage], exchange.groups[stage]
    if when == When.ALWAYS.value and not inspected:
        return start_by_name(gradient, collective, op, size, group)
    assert token is not None
    return torch.ops.mfsdp.reduce_if_due(gradient, token, collective, when, op, size, group, inspected)


def start_collective(gradient: Tensor, stage: int, exchange: Exchange) -> Tensor:
    """Start the collective of a stage, whether or not it is due."""
    size, group = exchange.group_sizes[stage], exchange.groups[stage]
    return start_by_name(gradient, exchange.collectives[stage], exchange.reduce_op, size, group)


def start_by_name(gradient: Tensor, collective: str, op: str, size: int, group: str) -> Tensor:
    """Start a collective by its name in an :class:`~mfsdp_compile.runtime.geometry.exchange.Exchange`."""
    if collective == "reduce_scatter":
        return compat.reduce_scatter(gradient, op, size, group)
    if collective == "all_reduce":
        return compat.all_reduce(gradient, op, group)
    if collective == "all_gather":
        return compat.all_gather(gradient, size, group)
    return torch.ops.mfsdp.exchange_slices(gradient, size, group, format_of(collective), pieces_of(collective))


def await_stage(started: Tensor, stage: int, exchange: Exchange) -> Tensor:
    """Return the result of a stage of a reduction."""
    if exchanges_slices(exchange.collectives[stage]):
        return torch.ops.mfsdp.wait_summed(started, *exchange.sum_arguments(stage))
    return compat.wait_tensor(started)


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
