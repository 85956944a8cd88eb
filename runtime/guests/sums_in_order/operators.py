"""Operators that encode slices, and that decode and add them. Inductor compiles them with what is around them.

They are one operator each, and not those of :mod:`.wire`: of these, Inductor would write values of all slices to
memory. Their lowering is one kernel that reads slices, decodes and adds them, and computes what follows; for more ranks
than a kernel should read, several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import compat
from ...collectives.library import library
from ...lanes.stage import local_operators
from . import wire

library.define("encode_slices(Tensor gradient, int group_size, str format, int pieces) -> Tensor")
library.define("sum_slices(Tensor slices, int group_size, str format, int numel) -> Tensor")


@torch.library.impl(library, "encode_slices", "CompositeExplicitAutograd")
def _encode_slices(gradient: Tensor, group_size: int, format: str, pieces: int = 1) -> Tensor:
    return wire.encode_each(gradient, group_size, format, pieces)


@torch.library.impl(library, "sum_slices", "CompositeExplicitAutograd")
def _sum_slices(slices: Tensor, group_size: int, format: str, numel: int) -> Tensor:
    return wire.sum_each(slices, group_size, numel, format)


@torch.library.register_fake("mfsdp::encode_slices", lib=library)
def _fake_encode(gradient: Tensor, group_size: int, format: str, pieces: int = 1) -> Tensor:
    numel, dtype = wire.sent(gradient.numel(), gradient.dtype, group_size, format)
    return gradient.new_empty(numel, dtype=dtype)


@torch.library.register_fake("mfsdp::sum_slices", lib=library)
def _fake_sum(slices: Tensor, group_size: int, format: str, numel: int) -> Tensor:
    return slices.new_empty(numel, dtype=torch.float32 if format else wire.sum_dtype(slices.dtype))


def _has_kernels(format: str, device: torch.device) -> bool:
    """Whether Triton can compute with a format on the device. Before Ada, it has no float8_e4m3fn."""
    is_float8 = bool(format) and wire.FORMATS[format].dtype is torch.float8_e4m3fn
    return not (is_float8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9))


def _lower_encode(gradient: Any, ranks: int, format: str, pieces: int = 1) -> Any:
    if not _has_kernels(format, gradient.get_device()):
        return compat.inductor_called(torch.ops.mfsdp.encode_slices.default, gradient, ranks, format, pieces)
    return compat.inductor_inlined(wire.encode, gradient, ranks, format, pieces)


def _lower_sum(received: Any, ranks: int, format: str, numel: int) -> Any:
    if not _has_kernels(format, received.get_device()):
        return compat.inductor_called(torch.ops.mfsdp.sum_slices.default, received, ranks, format, numel)
    total = None
    for first in range(0, ranks, wire.SLICES_AT_ONCE):
        some, count = compat.inductor_part(received, ranks, first, first + wire.SLICES_AT_ONCE)
        total = compat.inductor_inlined(wire.sum_decoded, some, count, numel, format, total)
        if first + count < ranks:
            total.realize()
    return total


local_operators[torch.ops.mfsdp.encode_slices.default] = _lower_encode
local_operators[torch.ops.mfsdp.sum_slices.default] = _lower_sum
