"""Megatron-FSDP's allocators of temporary buffers, by name, as arguments of ``fully_shard_model``."""

from __future__ import annotations

_ARGUMENTS: dict[str, dict[str, bool]] = {
    "TemporaryBucketAllocator": {},
    "StorageResizeBasedBucketAllocator": {},
    "RotaryBucketAllocator": {"fsdp_double_buffer": True},
    "FixedPoolAllocator": {"fsdp_double_buffer": True},
    "MaxPoolAllocator": {"maxpool_double_buffer": True},
}


def allocator_arguments(name: str) -> dict[str, bool]:
    """Return the arguments of ``fully_shard_model`` that stand for one of Megatron-FSDP's allocators.

    ``fully_shard_model(model, **allocator_arguments("RotaryBucketAllocator"), ...)``. In Megatron-FSDP, a program swaps
    the allocator of ``AllGatherPipeline`` and ``GradReducePipeline``. Here both use the same buffers; for an allocator
    of your own, pass ``buffer_allocator`` beside these arguments.

    Args:
        name: ``"TemporaryBucketAllocator"`` or ``"StorageResizeBasedBucketAllocator"``: memory is allocated for each
            gather and reduction, and its storage freed at once after the last use. ``"RotaryBucketAllocator"`` or
            ``"FixedPoolAllocator"``: buffers that stay, for buckets of the same size and dtype. ``"MaxPoolAllocator"``:
            buffers of the size of the largest bucket of each dtype.

    Raises:
        ValueError: If there is no such allocator.
    """
    if name not in _ARGUMENTS:
        raise ValueError(
            f"allocator_arguments takes {', '.join(map(repr, _ARGUMENTS))}; got {name!r}. For an allocator of your "
            "own, pass fully_shard_model's buffer_allocator."
        )
    return dict(_ARGUMENTS[name])
