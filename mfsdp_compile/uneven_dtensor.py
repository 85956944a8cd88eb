"""Megatron-FSDP's helpers for DTensors whose rows are spread unevenly over ranks.

Parameters, gradients and optimizer states of this package know their rows: ``torch.distributed.checkpoint`` saves and
loads them as they are, ``full_tensor()`` is right for them, and these functions ask them without communicating. For
other DTensors, such as those that a program builds with ``DTensor.from_local``, ranks exchange the sizes of their
parts. Functions that say so are collective over the DTensor's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.rows import contiguous_strides
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor

__all__ = [
    "filter_unflattened_state_dict",
    "gather_and_compute_chunk_metadata",
    "gather_uneven_dtensor_to_full_tensor",
    "get_unflattened_state_dict",
    "preprocess_state_dict_for_uneven_dtensor",
    "redistribute_uneven_dtensor_to_replicated",
    "split_dtensor",
    "uneven_dtensor_to_full_tensor",
    "update_uneven_dtensor_chunk_metadata",
    "validate_uneven_dtensor",
]


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Return offsets and sizes of this rank's part. Collective for DTensors that do not know their rows.

    Raises:
        TypeError: If ``dtensor`` is not a DTensor.
        ValueError: If a placement is neither ``Shard`` nor ``Replicate``, or a rank's part is no box of the tensor.
    """
    _check(dtensor)
    if isinstance(dtensor, RowShardedTensor):
        chunks = dtensor.__create_chunk_list__()
        if len(chunks) > 1:
            raise ValueError(
                f"{dtensor.row_split.name!r} is a stack of matrices that is cut inside of matrices, so that this rank "
                f"holds {len(chunks)} chunks of it. torch.distributed.checkpoint gets all of them from the tensor."
            )
        if chunks:
            return chunks[0]  # type: ignore[no-any-return]
        return ChunkStorageMetadata(torch.Size([0] * dtensor.ndim), torch.Size([0, *dtensor.shape[1:]]))
    local = _local(dtensor)
    offsets, reached = [0] * local.ndim, list(local.shape)
    for mesh_dim, dim in _sharded_dims(dtensor):
        group = dtensor.device_mesh.get_group(mesh_dim)
        sizes: list[Any] = [None] * group.size()
        dist.all_gather_object(sizes, reached[dim], group=group)
        offsets[dim] += sum(sizes[: group.rank()])
        reached[dim] = sum(sizes)
    return ChunkStorageMetadata(torch.Size(offsets), local.shape)


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Let ``torch.distributed.checkpoint`` save and load this rank's part of an uneven DTensor, in place. Collective.

    Nothing is to be done for DTensors that know their rows.
    """
    _check(dtensor)
    if not isinstance(dtensor, RowShardedTensor):
        _attach(dtensor, gather_and_compute_chunk_metadata(dtensor))


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that the ranks' parts lie in the tensor, and reach both ends of each dimension. Collective.

    Raises:
        AssertionError: If they do not.
    """
    chunk = gather_and_compute_chunk_metadata(dtensor)
    ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    about = (
        f"chunk of offsets {tuple(chunk.offsets)} and sizes {tuple(chunk.sizes)}, DTensor of shape "
        f"{tuple(dtensor.shape)} over {dtensor.device_mesh}"
    )
    if any(end > size for end, size in zip(ends, dtensor.shape, strict=True)):
        raise AssertionError(f"A rank's part of the DTensor lies outside of it: {about}.")
    if isinstance(dtensor, RowShardedTensor):
        return
    for mesh_dim, dim in _sharded_dims(dtensor):
        group = dtensor.device_mesh.get_group(mesh_dim)
        everyones: list[Any] = [None] * group.size()
        dist.all_gather_object(everyones, ends[dim], group=group)
        ends[dim] = max(everyones)
    if tuple(ends) != tuple(dtensor.shape):
        raise AssertionError(f"The ranks' parts of the DTensor end at {tuple(ends)}: {about}.")


def filter_unflattened_state_dict(
    state_dict: Mapping[str, Any],
    key_chain: Sequence[str] = (),
    visit_condition: Callable[[Any], bool] = lambda _: False,
) -> list[list[str]]:
    """Return the paths of the values in nested dictionaries for which ``visit_condition`` is true."""
    found: list[list[str]] = []
    for key, value in state_dict.items():
        if isinstance(value, dict):
            found += filter_unflattened_state_dict(value, [*key_chain, key], visit_condition)
        elif visit_condition(value):
            found.append([*key_chain, key])
    return found


def get_unflattened_state_dict(state_dict: Mapping[str, Any], key_chain: Sequence[str] = ()) -> Any:
    """Return the value at a path in nested dictionaries.

    Raises:
        KeyError: If there is none.
    """
    value: Any = state_dict
    for key in key_chain:
        if not isinstance(value, dict) or key not in value:
            raise KeyError(f"The state dict has no entry {'.'.join(map(str, key_chain))}.")
        value = value[key]
    return value


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Call :func:`update_uneven_dtensor_chunk_metadata` for all DTensors in nested dictionaries. Return them."""
    for path in sorted(filter_unflattened_state_dict(state_dict, (), lambda value: isinstance(value, DTensor))):
        update_uneven_dtensor_chunk_metadata(get_unflattened_state_dict(state_dict, path))
    return state_dict


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> Tensor:
    """Return the whole tensor on every rank. Collective.

    Raises:
        TypeError, ValueError: See :func:`gather_and_compute_chunk_metadata`.
    """
    _check(dtensor)
    if isinstance(dtensor, RowShardedTensor):
        return dtensor.full_tensor()
    chunk = gather_and_compute_chunk_metadata(dtensor)
    parts = [(tuple(chunk.offsets), _local(dtensor).detach())]
    for mesh_dim, _ in _sharded_dims(dtensor):
        parts = _gather_parts(parts, dtensor.device_mesh.get_group(mesh_dim))
    full = torch.zeros(dtensor.shape, dtype=dtensor.dtype, device=_local(dtensor).device)
    for offsets, part in parts:
        full[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return full


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Return the whole tensor as a DTensor that every rank holds. Collective."""
    full, mesh = uneven_dtensor_to_full_tensor(dtensor), dtensor.device_mesh
    return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)


def gather_uneven_dtensor_to_full_tensor(dtensor: DTensor) -> DTensor:
    """Megatron-FSDP's older name of :func:`redistribute_uneven_dtensor_to_replicated`."""
    return redistribute_uneven_dtensor_to_replicated(dtensor)


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Yield the pieces of an uneven DTensor along ``dim``, as views. A rank may have nothing of a piece.

    Collective for DTensors that do not know their rows.

    Args:
        split_size_or_sections: Size of each piece but the last, or the sizes of all.
        update_uneven_dtensor_chunk_meta: Let ``torch.distributed.checkpoint`` save and load the pieces.

    Raises:
        TypeError, ValueError: See :func:`gather_and_compute_chunk_metadata`; or if sizes do not add up.
    """
    _check(dtensor)
    dim, total = dim % dtensor.ndim, dtensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        size = split_size_or_sections
        if size < 1:
            raise ValueError(f"split_dtensor takes sizes of at least 1, got {size}.")
        sizes = [min(size, total - start) for start in range(0, total, size)]
    else:
        sizes = list(split_size_or_sections)
        if sum(sizes) != total:
            raise ValueError(
                f"split_dtensor: sections {sizes} add up to {sum(sizes)}, and dimension {dim} has {total}."
            )
    chunk, local = gather_and_compute_chunk_metadata(dtensor), _local(dtensor)
    if local.ndim != dtensor.ndim:
        _refuse_stack(dtensor)
    placements = [Shard(p.dim) if isinstance(p, Shard) else p for p in dtensor.placements]
    first, last, start = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim], 0
    for size in sizes:
        begin, end = max(start, first), min(start + size, last)
        held = max(end - begin, 0)
        part = local.narrow(dim, begin - first if held else 0, held)
        shape = torch.Size([*dtensor.shape[:dim], size, *dtensor.shape[dim + 1 :]])
        piece = DTensor.from_local(
            part, dtensor.device_mesh, placements, run_check=False, shape=shape, stride=contiguous_strides(shape)
        )
        if update_uneven_dtensor_chunk_meta:
            offsets = [*chunk.offsets[:dim], begin - start if held else 0, *chunk.offsets[dim + 1 :]]
            _attach(piece, ChunkStorageMetadata(torch.Size(offsets), part.shape))
        yield piece
        start += size


def _check(dtensor: object) -> None:
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"Expected a DTensor, got a {type(dtensor).__name__}.")


def _refuse_stack(dtensor: DTensor) -> NoReturn:
    raise ValueError(
        f"The DTensor of shape {tuple(dtensor.shape)} is a stack of matrices that is cut inside of matrices. Split the "
        "whole tensor: uneven_dtensor_to_full_tensor(dtensor)."
    )


def _local(dtensor: DTensor) -> Tensor:
    """Return the local tensor itself, which attributes for checkpoints are on."""
    with torch.no_grad():
        return dtensor.to_local()


def _sharded_dims(dtensor: DTensor) -> list[tuple[int, int]]:
    """Return mesh dimensions that shard the tensor, with the tensor's dimension, from the finest to the coarsest."""
    found, strided = [], []
    for mesh_dim, placement in enumerate(dtensor.placements):
        if hasattr(
            placement, "split_factor"
        ):  # of torch's FSDP over tensor parallelism: finer than the other dimension
            strided.append((mesh_dim, placement.dim))  # type: ignore[attr-defined]
        elif isinstance(placement, Shard):
            found.append((mesh_dim, placement.dim))
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"The DTensor is {placement} over mesh dimension {mesh_dim}. Redistribute it first: Shard and "
                "Replicate are supported."
            )
    return [*reversed(strided), *reversed(found)]


def _gather_parts(
    parts: list[tuple[tuple[int, ...], Tensor]], group: dist.ProcessGroup
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the parts of all ranks of a group, each with its offsets."""
    boxes: list[Any] = [None] * group.size()
    dist.all_gather_object(boxes, [(offsets, tuple(part.shape)) for offsets, part in parts], group=group)
    counts = [sum(torch.Size(shape).numel() for _, shape in box) for box in boxes]
    own = torch.cat([part.flatten() for _, part in parts])
    padded = own.new_zeros(max(counts))
    padded[: own.numel()] = own
    flat = [torch.empty_like(padded) for _ in boxes]
    dist.all_gather(flat, padded, group=group)
    found = []
    for box, values, count in zip(boxes, flat, counts, strict=True):
        pieces = values[:count].split([torch.Size(shape).numel() for _, shape in box])
        found += [(offsets, piece.view(shape)) for (offsets, shape), piece in zip(box, pieces, strict=True)]
    return found


def _attach(dtensor: DTensor, chunk: ChunkStorageMetadata) -> None:
    """Set the hooks of ``torch.distributed.checkpoint`` on the local tensor, where DTensor looks for them."""
    local: Any = _local(dtensor)

    def write_items(name: str, tensor: DTensor) -> list[Any]:
        part = _local(tensor)
        return [compat.shard_write_item(name, tuple(chunk.offsets), part, tensor.shape)] if part.numel() else []

    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items
