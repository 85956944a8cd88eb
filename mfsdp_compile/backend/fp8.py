"""The option ``fp8_matmul``: which weights are multiplied in float8, and on which devices that works."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.bucket import Bucket
from mfsdp_compile.runtime.model.sharded_model import models_of

from .options import CompileOptions


def fp8_products(chosen: CompileOptions, buckets: Sequence[Bucket]) -> tuple[frozenset[int], ...]:
    """Return the indices of the weights that may be multiplied in float8, by bucket.

    Raises:
        ValueError: The device has no such products.
    """
    assert chosen.fp8_matmul is not None
    check_multiplies_fp8(buckets[0].device, chosen.fp8_matmul)
    return tuple(fp8_candidates(chosen, bucket) for bucket in buckets)


def check_multiplies_fp8(device: torch.device, scaling: str) -> None:
    """Raise ValueError if the device has no products in float8 with such scales."""
    if scaling != "tensorwise" and not compat.multiplies_by_rows(device):
        raise ValueError(
            f"options['fp8_matmul'] is {scaling!r}, but torch {torch.__version__} has no products with scales of rows "
            "on CPUs. Use 'tensorwise', or torch 2.13 or newer."
        )
    if device.type != "cuda" or torch.version.hip is not None:
        return
    if (has := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ValueError(
            f"options['fp8_matmul'] needs a GPU that multiplies in float8 (compute capability 8.9 or newer), but "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}. Leave the option out."
        )


def fp8_candidates(chosen: CompileOptions, bucket: Bucket) -> frozenset[int]:
    """Return the indices of a bucket's weights that may be multiplied in float8."""
    slots = [(i, slot) for i, slot in enumerate(bucket.plan.layout.slots) if len(slot.shape) == 2]
    if chosen.fp8_filter is not None:
        return frozenset(i for i, slot in slots if chosen.fp8_filter(slot.name, torch.Size(slot.shape)))
    (owner,) = models_of([bucket])
    in_unit = not any(unit.is_root for unit in owner.eager.units if bucket in unit.buckets)
    return frozenset(i for i, _ in slots) if in_unit else frozenset()
