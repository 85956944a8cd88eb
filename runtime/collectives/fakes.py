"""Shapes and dtypes of what the operators of :mod:`.library` return. Passes load these, and no kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import quantize, wire
from ..geometry.exchange import exchange_of, exchanges_slices, format_of
from .library import library


@torch.library.register_fake("mfsdp::wait_quantized", lib=library)
def _wait_quantized(
    gathered: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    ndims: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
    scaling: str,
) -> Tensor:
    return gathered.new_empty(quantize.numel_of_sent(gathered.numel(), scaling), dtype=dtype)


@torch.library.register_fake("mfsdp::fetch", lib=library)
def _fetch(shard: Tensor, device: str) -> Tensor:
    return shard.new_empty(shard.shape, device=device)  # needs no GPU


@torch.library.register_fake("mfsdp::offload", lib=library)
def _offload(gradient: Tensor, pins: bool) -> Tensor:
    return gradient.new_empty(gradient.shape, device="cpu")


@torch.library.register_fake("mfsdp::offload_saved", lib=library)
def _offload_saved(saved: Tensor) -> Tensor:
    return saved.new_empty_strided(saved.shape, saved.stride(), device="cpu")


@torch.library.register_fake("mfsdp::fetch_saved", lib=library)
def _fetch_saved(copy: Tensor, device: str) -> Tensor:
    return copy.new_empty_strided(copy.shape, copy.stride(), device=device)


@torch.library.register_fake("mfsdp::wait_saved", lib=library)
def _wait_saved(copy: Tensor, source: Tensor) -> None:
    return


@torch.library.register_fake("mfsdp::portion", lib=library)
def _portion(whole: Tensor, size: int, group: str) -> Tensor:
    return whole.new_empty(whole.numel() // size)


@torch.library.register_fake("mfsdp::gather_into_buffer", lib=library)
def _gather_into_buffer(
    shard: Tensor, capacity: int, count: int, dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    return shard.new_empty(shard.numel() * group_size, dtype=dtype)


@torch.library.register_fake("mfsdp::gradient_buffer", lib=library)
def _gradient_buffer(capacity: int, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


@torch.library.register_fake("mfsdp::begin", lib=library)
def _begin(phase: str, digest: str, schedule: str, used: str) -> None:
    """A compiler traces the graph, perhaps while the backward that it is for waits: nothing begins."""


@torch.library.register_fake("mfsdp::deliver", lib=library)
def _deliver(gradient: Tensor, at_rest: Sequence[Tensor], bucket: int) -> Tensor:
    return gradient.new_empty(()).expand(gradient.shape)


@torch.library.register_fake("mfsdp::exchange_slices", lib=library)
def _exchange_slices(gradient: Tensor, group_size: int, group: str, format: str = "", pieces: int = 1) -> Tensor:
    return new_result(gradient, exchange_of(format, pieces), group_size)


@torch.library.register_fake("mfsdp::encode_slices", lib=library)
def _encode_slices(gradient: Tensor, group_size: int, format: str, pieces: int = 1) -> Tensor:
    return new_result(gradient, exchange_of(format, pieces), group_size)


@torch.library.register_fake("mfsdp::wait_summed", lib=library)
@torch.library.register_fake("mfsdp::sum_slices", lib=library)
def _sum_slices(slices: Tensor, group_size: int, format: str, numel: int) -> Tensor:
    return slices.new_empty(numel, dtype=torch.float32 if format else wire.sum_dtype(slices.dtype))


@torch.library.register_fake("mfsdp::reduce_if_due", lib=library)
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
    return new_result(gradient, collective, group_size)


@torch.library.register_fake("mfsdp::pack_into", lib=library)
def _pack_into(
    memory: Tensor, gradients: Sequence[Tensor], offsets: Sequence[int], gaps: Sequence[int] | None = None
) -> Tensor:
    return torch.empty_like(memory)


@torch.library.register_fake("mfsdp::pack_gradients", lib=library)
def _pack_gradients(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    capacity: int = 0,
    count: int = 0,
) -> Tensor:
    return gradients[0].new_empty(numel, dtype=dtype)


def new_result(gradient: Tensor, collective: str, group_size: int) -> Tensor:
    """Return a tensor like what a collective returns."""
    numel = gradient.numel()
    if collective == "reduce_scatter":
        return gradient.new_empty(numel // group_size)
    if format := format_of(collective):
        return gradient.new_empty(wire.sent_numel(numel, group_size, format), dtype=wire.FORMATS[format].sent_dtype)
    if exchanges_slices(collective):
        return gradient.new_empty(math.ceil(numel / group_size) * group_size)
    return gradient.new_empty(numel * (group_size if collective == "all_gather" else 1))
