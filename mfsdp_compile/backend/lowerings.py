"""Inductor lowerings of this package's operators.

``mfsdp::reduce_if_due``, ``mfsdp::exchange_slices`` and ``mfsdp::gather_into_buffer`` are collectives: their inputs and
outputs must not be touched until their waits.

``mfsdp::wait_summed`` is Inductor's own wait, and one kernel that reads the slices, decodes them if they are in a
format, adds them in the order of ranks, and computes what follows; for more ranks than a kernel should read, several,
one after the other. What ``mfsdp::exchange_slices`` sends in a format is encoded by kernels in front of the collective.
In pieces, ``mfsdp::sum_slices`` and ``mfsdp::encode_slices`` are these kernels (:mod:`.slices`).

``mfsdp::deliver`` is an operator, before which everything is computed that reads what it may write to.

``mfsdp::fp8_quantize`` becomes a reduction and pointwise operations, which Inductor fuses with what computes the
matrix.

``mfsdp::wait_quantized`` is Inductor's own wait, and the operator behind it, which finds nothing left to wait for.
Inductor keeps its waits in order, and does not know the operator as one.

``mfsdp::pack_gradients`` computes gradients in place in the bucket. Without a lowering, Inductor would run the operator
as it is: compute every gradient into its own memory, then copy it into the bucket. With this lowering, the bucket is
one buffer (Inductor's :class:`ConcatKernel`), and each gradient is realized into its slice of it: a matmul gets the
slice as its ``out=``, and a fused reduction stores into it. The buffer is Inductor's own, or a communication buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import wire

from .slices import has_kernels


@functools.cache
def register_lowerings() -> None:
    """Register the lowerings with Inductor. Runs once per process."""
    compat.register_lowering(torch.ops.mfsdp.pack_gradients.default, _pack_gradients)
    compat.register_lowering(torch.ops.mfsdp.pack_into.default, _pack_into)
    if_due = torch.ops.mfsdp.reduce_if_due.default
    compat.register_lowering(if_due, functools.partial(compat.inductor_collective, if_due))
    compat.register_lowering(torch.ops.mfsdp.exchange_slices.default, _exchange_slices)
    into_buffer = torch.ops.mfsdp.gather_into_buffer.default
    compat.register_lowering(
        into_buffer, functools.partial(compat.inductor_collective, into_buffer, memory_of_others=True)
    )
    compat.register_lowering(torch.ops.mfsdp.fp8_quantize.default, compat.inductor_quantize)
    compat.register_lowering(torch.ops.mfsdp.wait_summed.default, _wait_summed)
    compat.register_lowering(torch.ops.mfsdp.encode_slices.default, _encode_slices)
    compat.register_lowering(torch.ops.mfsdp.sum_slices.default, _sum_slices)
    deliver = torch.ops.mfsdp.deliver.default
    compat.register_lowering(deliver, functools.partial(compat.inductor_writing, deliver))
    dequantizes = torch.ops.mfsdp.wait_quantized.default
    compat.register_lowering(dequantizes, functools.partial(compat.inductor_wait_then, dequantizes))


def _exchange_slices(gradient: Any, ranks: int, group: str, format: str = "", pieces: int = 1) -> Any:
    operator = torch.ops.mfsdp.exchange_slices.default
    if format and has_kernels(format, gradient.get_device()):
        gradient, format, pieces = _encode_slices(gradient, ranks, format, pieces), "", 1
    return compat.inductor_collective(operator, gradient, ranks, group, format, pieces)


def _wait_summed(slices: Any, ranks: int, format: str, numel: int) -> Any:
    if not has_kernels(format, slices.get_device()):
        return compat.inductor_wait_then(torch.ops.mfsdp.wait_summed.default, slices, ranks, format, numel)
    return _sum_slices(compat.inductor_wait(slices), ranks, format, numel)


def _encode_slices(gradient: Any, ranks: int, format: str, pieces: int = 1) -> Any:
    return compat.inductor_inlined(wire.encode, gradient, ranks, format, pieces)


def _sum_slices(received: Any, ranks: int, format: str, numel: int) -> Any:
    total = None
    for first in range(0, ranks, wire.SLICES_AT_ONCE):
        some, count = compat.inductor_part(received, ranks, first, first + wire.SLICES_AT_ONCE)
        total = compat.inductor_inlined(wire.sum_decoded, some, count, numel, format, total)
        if first + count < ranks:
            total.realize()
    return total


def _pack_gradients(
    gradients: Sequence[Any],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    capacity: int = 0,
    count: int = 0,
) -> Any:
    device, memory = gradients[0].get_device(), None
    if capacity:
        operator = torch.ops.mfsdp.gradient_buffer.default
        memory = compat.inductor_memory(operator, capacity, count, numel, dtype, device)
    return _fill(compat.InductorBucket(device, dtype, numel, memory), gradients, offsets, numel)


def _pack_into(memory: Any, gradients: Sequence[Any], offsets: Sequence[int], gaps: Sequence[int] | None = None) -> Any:
    (numel,) = memory.get_size()
    bucket = compat.InductorBucket(memory.get_device(), memory.get_dtype(), int(numel), memory)
    return _fill(bucket, gradients, offsets, int(numel), gaps)


def _fill(
    bucket: Any, gradients: Sequence[Any], offsets: Sequence[int], numel: int, gaps: Sequence[int] | None = None
) -> Any:
    zeros, end = list(gaps or ()), 0
    for gradient, offset in zip(gradients, offsets, strict=True):
        bucket.store(gradient, offset)
        zeros += [end, offset] if gaps is None else []
        end = offset + bucket.numel(gradient)
    zeros += [end, numel] if gaps is None else []
    for start, stop in zip(zeros[::2], zeros[1::2], strict=True):
        bucket.fill(0, start, stop)
    return bucket.finish()
