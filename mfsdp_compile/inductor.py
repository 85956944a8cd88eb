"""Inductor's lowerings of our operators.

``mfsdp::reduce_if_due`` is a collective: what it reads and writes is left alone until its wait.

``mfsdp::pack_gradients``: gradients are computed in their place.

Inductor would run the operator as it stands: every gradient is computed into memory of its own and copied into the
bucket. With this lowering the bucket is one buffer, a :class:`ConcatKernel` in Inductor's words, and each gradient is
realised into its slice of it: a matmul gets the slice as its ``out=``, a fused reduction stores into it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mfsdp_compile.runtime import compat

__all__ = ["register_lowerings"]


@functools.cache
def register_lowerings() -> None:
    """Tell Inductor about our operators. Once per process."""
    compat.register_lowering(torch.ops.mfsdp.pack_gradients.default, _pack_gradients)
    compat.register_lowering(
        torch.ops.mfsdp.reduce_if_due.default,
        functools.partial(compat.inductor_collective, torch.ops.mfsdp.reduce_if_due.default),
    )


def _pack_gradients(gradients: Sequence[Any], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> Any:
    bucket = compat.InductorBucket(gradients[0].get_device(), dtype, numel)
    end = 0
    for gradient, offset in zip(gradients, offsets, strict=True):
        bucket.fill(0, end, offset)
        bucket.store(gradient, offset)
        end = offset + bucket.numel(gradient)
    bucket.fill(0, end, numel)
    return bucket.finish()
