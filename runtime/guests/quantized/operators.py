"""The operator that dequantizes a gathered bucket.

``dequantize(gathered, scales, ...)``
    A bucket in the compute dtype, ``[numel]``, from its bytes and the scales of its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...collectives.library import library
from ...formats import quantize
from ...geometry.exchange import split_sizes
from ...lanes.stage import local_operators

library.define(
    "dequantize(Tensor gathered, Tensor scales, int[] sizes, int[] ndims, int[] offsets, ScalarType dtype, str scaling)"
    " -> Tensor"
)
DEQUANTIZE = torch.ops.mfsdp.dequantize.default
local_operators[DEQUANTIZE] = None


@torch.library.impl(library, "dequantize", "CompositeExplicitAutograd")
def _dequantize(
    gathered: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    ndims: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
    scaling: str,
) -> Tensor:
    places = zip(offsets, split_sizes(sizes, ndims), strict=True)
    return quantize.dequantize_bucket(gathered, scales, places, dtype, scaling)


@torch.library.register_fake("mfsdp::dequantize", lib=library)
def _dequantized(
    gathered: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    ndims: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
    scaling: str,
) -> Tensor:
    return gathered.new_empty(quantize.numel_of_sent(gathered.numel(), scaling), dtype=dtype)
