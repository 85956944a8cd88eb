"""Reductions: gradients are packed into buckets, and each stage of a reduction is started and awaited."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from ..formats import wire
from ..geometry.exchange import Buffers, Exchange, When, exchange_of, exchanges_slices, format_of, pieces_of
from ..geometry.rows import contiguous_strides
from ..memory.comm_buffers import take
from ..memory.deferred_gradients import bucket_of
from ..memory.gradients import defer_unless_due
from ..ranks import profiling
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
        return _start(gradient, collective, op, size, group)
    assert token is not None
    return torch.ops.mfsdp.reduce_if_due(gradient, token, collective, when, op, size, group, inspected)


def start_collective(gradient: Tensor, stage: int, exchange: Exchange) -> Tensor:
    """Start the collective of a stage, whether or not it is due."""
    size, group = exchange.group_sizes[stage], exchange.groups[stage]
    return _start(gradient, exchange.collectives[stage], exchange.reduce_op, size, group)


def _start(gradient: Tensor, collective: str, op: str, size: int, group: str) -> Tensor:
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


@torch.library.impl(library, "exchange_slices", "CompositeExplicitAutograd")
def _exchange_slices(gradient: Tensor, group_size: int, group: str, format: str = "", pieces: int = 1) -> Tensor:
    if format:
        sent = _encode_slices(gradient, group_size, format, pieces)
    else:
        sent = wire.slices_of(gradient, group_size, pieces).view(-1)
    slices = [sent.numel() // group_size] * group_size
    with profiling.exchanging_slices():
        return compat.all_to_all(sent, slices, slices, group)


@torch.library.register_fake("mfsdp::exchange_slices", lib=library)
def _exchange_slices_fake(gradient: Tensor, group_size: int, group: str, format: str = "", pieces: int = 1) -> Tensor:
    return _new_result(gradient, exchange_of(format, pieces), group_size)


@torch.library.impl(library, "wait_summed", "CompositeExplicitAutograd")
def _wait_summed(slices: Tensor, group_size: int, format: str, numel: int) -> Tensor:
    return _sum_slices(compat.wait_tensor(slices), group_size, format, numel)


@torch.library.impl(library, "encode_slices", "CompositeExplicitAutograd")
def _encode_slices(gradient: Tensor, group_size: int, format: str, pieces: int = 1) -> Tensor:
    return wire.encode_each(gradient, group_size, format, pieces)


@torch.library.register_fake("mfsdp::encode_slices", lib=library)
def _encode_slices_fake(gradient: Tensor, group_size: int, format: str, pieces: int = 1) -> Tensor:
    return _new_result(gradient, exchange_of(format, pieces), group_size)


@torch.library.impl(library, "sum_slices", "CompositeExplicitAutograd")
def _sum_slices(slices: Tensor, group_size: int, format: str, numel: int) -> Tensor:
    return wire.sum_each(slices, group_size, numel, format)


@torch.library.register_fake("mfsdp::wait_summed", lib=library)
@torch.library.register_fake("mfsdp::sum_slices", lib=library)
def _sum_slices_fake(slices: Tensor, group_size: int, format: str, numel: int) -> Tensor:
    return slices.new_empty(numel, dtype=torch.float32 if format else wire.sum_dtype(slices.dtype))


@torch.library.impl(library, "reduce_if_due", "CompositeExplicitAutograd")
def _reduce_if_due(
    gradient: Tensor,
    token: Tensor,
    collective: str,
    when: str,
    reduce_op: str,
    group_size: int,
    group: str,
    inspected: bool,
) -> Tensor:
    to_reduce: Tensor | None = gradient
    if inspected:
        bucket_of(token).inspect(gradient)
    if when == When.IF_DUE.value:
        to_reduce = defer_unless_due(token, gradient)
    elif when == When.FOLLOWS.value and bucket_of(token).gradient_waits:
        to_reduce = None
    if to_reduce is None:
        return _new_result(gradient, collective, group_size).zero_()
    if group_size == 1:
        return to_reduce.clone()
    return _start(to_reduce, collective, reduce_op, group_size, group)


@torch.library.register_fake("mfsdp::reduce_if_due", lib=library)
def _reduce_if_due_fake(
    gradient: Tensor,
    token: Tensor,
    collective: str,
    when: str,
    reduce_op: str,
    group_size: int,
    group: str,
    inspected: bool,
) -> Tensor:
    return _new_result(gradient, collective, group_size)


def _new_result(gradient: Tensor, collective: str, group_size: int) -> Tensor:
    """Return a tensor like what a collective returns."""
    numel = gradient.numel()
    if collective == "reduce_scatter":
        return gradient.new_empty(numel // group_size)
    if format := format_of(collective):
        return gradient.new_empty(wire.sent_numel(numel, group_size, format), dtype=wire.FORMATS[format].sent_dtype)
    if exchanges_slices(collective):
        return gradient.new_empty(math.ceil(numel / group_size) * group_size)
    return gradient.new_empty(numel * (group_size if collective == "all_gather" else 1))


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


@torch.library.register_fake("mfsdp::pack_into", lib=library)
def _pack_into_fake(
    memory: Tensor, gradients: Sequence[Tensor], offsets: Sequence[int], gaps: Sequence[int] | None = None
) -> Tensor:
    return torch.empty_like(memory)


@torch.library.register_fake("mfsdp::pack_gradients", lib=library)
def _pack_gradients_fake(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    capacity: int = 0,
    count: int = 0,
) -> Tensor:
    return gradients[0].new_empty(numel, dtype=dtype)
