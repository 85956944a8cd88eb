"""Items and metadata of torch.distributed.checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import _patched_state_dict

__all__ = [
    "ChunkStorageMetadata",
    "StorageInfo",
    "keep_from_state_dict_helpers",
    "set_element",
    "shard_write_item",
    "storage_info",
]


def shard_write_item(name: str, offsets: Sequence[int], part: Tensor, shape: torch.Size) -> WriteItem:
    """Return the item that torch.distributed.checkpoint writes for the part of a tensor that begins at ``offsets``."""
    chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(part), size=shape)
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


def storage_info(path: str, offset: int, length: int, transforms: Sequence[str] | None) -> StorageInfo:
    """Return the location of a checkpoint's entry: ``length`` bytes at ``offset`` of the file ``path``."""
    return StorageInfo(path, offset, length, transforms)


def keep_from_state_dict_helpers(owner: Any, *methods: Callable[..., Any]) -> None:
    """Make ``torch.distributed.checkpoint.state_dict`` call the class of ``owner`` instead of its replaced ``methods``.

    Torch's own ``_patch_optimizer_state_dict`` works the same way. The methods must not hold a reference to ``owner``,
    because they are unregistered when it is garbage collected.
    """
    _patched_state_dict.update(methods)
    weakref.finalize(owner, _patched_state_dict.difference_update, methods)
