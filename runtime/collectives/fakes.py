"""Shapes and dtypes of what the operators of :mod:`.library` return. Passes load these, and no kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..lanes.lane import lane_at
from ..lanes.stage import Spec
from .library import library


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
def _exchange_slices(slices: Tensor, group_size: int, group: str) -> Tensor:
    return torch.empty_like(slices)


@torch.library.register_fake("mfsdp::run_stage", lib=library)
@torch.library.register_fake("mfsdp::wait_stage", lib=library)
def _landed(x: Tensor, token: Tensor | None, lane: str, part: str, index: int) -> Tensor:
    return like(x, lane_at(lane).spec(part, index + 1))


@torch.library.register_fake("mfsdp::start_stage", lib=library)
@torch.library.register_fake("mfsdp::reduce_if_due", lib=library)
def _flying(x: Tensor, token: Tensor | None, lane: str, part: str, index: int) -> Tensor:
    return like(x, lane_at(lane).flight_spec(part, index))


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


def like(x: Tensor, spec: Spec) -> Tensor:
    """Return a new tensor on the device of another one."""
    return x.new_empty(spec.numel, dtype=spec.dtype)
