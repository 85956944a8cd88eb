"""Inductor lowerings of this package's operators.

``mfsdp::reduce_if_due``, ``mfsdp::exchange_slices`` and ``mfsdp::gather_into_buffer`` are collectives: their inputs and
outputs must not be touched until their waits.

Operators of local stages bring their own lowerings (:data:`~mfsdp_compile.runtime.lanes.stage.local_operators`).

``mfsdp::deliver`` is an operator, before which everything is computed that reads what it may write to.

``mfsdp::fp8_quantize`` becomes a reduction and pointwise operations, which Inductor fuses with what computes the
matrix.

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
from mfsdp_compile.runtime.lanes.stage import local_operators


@functools.cache
def register_lowerings() -> None:
    """Register the lowerings with Inductor. Runs once per process."""
    compat.register_lowering(torch.ops.mfsdp.pack_gradients.default, _pack_gradients)
    compat.register_lowering(torch.ops.mfsdp.pack_into.default, _pack_into)
    if_due = torch.ops.mfsdp.reduce_if_due.default
    compat.register_lowering(if_due, functools.partial(compat.inductor_collective, if_due))
    exchange = torch.ops.mfsdp.exchange_slices.default
    compat.register_lowering(exchange, functools.partial(compat.inductor_collective, exchange))
    into_buffer = torch.ops.mfsdp.gather_into_buffer.default
    compat.register_lowering(
        into_buffer, functools.partial(compat.inductor_collective, into_buffer, memory_of_others=True)
    )
    compat.register_lowering(torch.ops.mfsdp.fp8_quantize.default, compat.inductor_quantize)
    for operator, lowering in local_operators.items():
        if lowering is None:
            continue
        compat.register_lowering(operator, lowering)
    deliver = torch.ops.mfsdp.deliver.default
    compat.register_lowering(deliver, functools.partial(compat.inductor_writing, deliver))


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
