"""Parameters whose class gathers itself: FSDP2's protocol ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

Such a class wraps one ordinary tensor, which is the main weight: a part of the bucket's flat shard, as for every other
parameter. A gather of its bucket, which holds no other parameter, goes ::

    rows in the main dtype   a view of the shard
    class(rows)              the class around them
    fsdp_pre_all_gather      tensors to send, and metadata, which stay on this rank
    bytes                    these tensors one after the other, each from a multiple of 16 bytes; one collective
    fsdp_post_all_gather     what modules get, made of the tensors of all ranks, [ranks * rows, ...]

Rows are cut as FSDP2 cuts them, ``ceil(rows / ranks)`` per rank, because these methods may count on it. Gradients are
ordinary tensors, and are reduced as those of other parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import compat
from ..geometry.bucket_plan import BucketPlan

_ALIGNMENT = 16  # bytes: the largest item of a tensor


@dataclass(frozen=True, eq=False)
class ExtensionInput:
    """What this rank sends: bytes, and how to read those of each rank."""

    packed: Tensor
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    metadata: Any


@dataclass(frozen=True, eq=False)
class ExtensionOutput:
    """A gathered parameter.

    Args:
        tensor: What ``fsdp_post_all_gather`` has returned.
        leaves: The ordinary tensors that hold its memory, and what else was gathered or returned, in an order that is
            the same after each gather.
    """

    tensor: Tensor
    leaves: tuple[Tensor, ...]

    def leaf_of(self, tensor: Tensor) -> int | None:
        """Return the number of a leaf with the memory and the dtype of ``tensor``; None if there is none."""
        address = compat.storage_address(tensor)
        alike = (
            i
            for i, leaf in enumerate(self.leaves)
            if compat.storage_address(leaf) == address and leaf.dtype == tensor.dtype
        )
        return next(alike, None)


class Extension:
    """The class around this rank's rows of a bucket's only parameter.

    Args:
        original: A parameter of the class, to be imitated.
        rows: This rank's rows in the main dtype.
    """

    def __init__(self, original: Tensor, rows: Tensor) -> None:
        # Of all ways to make another tensor of the class, FSDP2 relies on this one.
        wrapped = original.detach().new_zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        (self._attribute,) = compat.inner_tensors(wrapped)
        setattr(wrapped, self._attribute, rows)
        self._wrapped = wrapped

    @property
    def own_attributes(self) -> set[str]:
        """Attributes that belong to the class, and not to the parameter."""
        return set(vars(self._wrapped))

    def around(self, rows: Tensor) -> Extension:
        """Return the same around other rows."""
        return Extension(self._wrapped, rows)

    def prepare(
        self, plan: BucketPlan, module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> ExtensionInput:
        """Call ``fsdp_pre_all_gather``.

        Args:
            plan: Plan of the bucket.
            module: Module that holds the parameter.
            mesh: Mesh of the data-parallel ranks.
            policy: FSDP2's policy of the parameter.

        Raises:
            RuntimeError: It has returned something else than tensors, or tensors without this rank's rows where ranks
                have different numbers of rows.
        """
        (slot,), ranks, size = plan.layout.slots, plan.layout.world_size, torch.Size(plan.layout.slots[0].shape)
        if mesh.ndim > 1:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[-1]]
        pre: Any = self._wrapped.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arguments: tuple[Any, ...] = (mesh,)
        if len(inspect.signature(pre).parameters) > 1:
            arguments = (mesh, size, torch.empty(size, device="meta").stride(), module, policy)
        inputs, metadata = pre(*arguments)
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        rows, most = self._wrapped.shape[0], -(-size[0] // ranks)
        shapes, parts = [], []
        for tensor in inputs:
            if size[0] % ranks:
                tensor = _padded(tensor, rows, most, slot.name)
            shapes.append(tensor.shape)
            parts += _bytes_of(tensor)
        dtypes = tuple(tensor.dtype for tensor in inputs)
        return ExtensionInput(torch.cat(parts), tuple(shapes), dtypes, metadata)

    def finish(self, plan: BucketPlan, sent: ExtensionInput, gathered: Tensor) -> ExtensionOutput:
        """Call ``fsdp_post_all_gather``.

        Args:
            gathered: What each rank has sent, one after the other, in bytes.
        """
        ranks, outputs, start = gathered.numel() // sent.packed.numel(), [], 0
        by_rank = gathered.view(ranks, -1)
        for shape, dtype in zip(sent.shapes, sent.dtypes, strict=True):
            size = math.prod(shape) * dtype.itemsize
            whole = by_rank[:, start : start + size].reshape(-1).view(dtype)
            outputs.append(whole.view(-1, *shape[1:]))
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        post: Any = self._wrapped.fsdp_post_all_gather  # type: ignore[attr-defined]
        tensor, more = post(tuple(outputs), sent.metadata, plan.compute_dtype)
        return ExtensionOutput(tensor, (*outputs, *_ordinary(more), *_ordinary([tensor])))

    def present(self, plan: BucketPlan, made: ExtensionOutput) -> Tensor:
        """Return what modules get, without the rows that ranks were padded with."""
        (slot,) = plan.layout.slots
        size = torch.Size(slot.shape)
        if made.tensor.shape == size:
            return made.tensor.detach()
        return made.tensor.as_strided(size, torch.empty(size, device="meta").stride(), 0)


def _padded(tensor: Tensor, rows: int, most: int, name: str) -> Tensor:
    if not tensor.ndim or tensor.shape[0] not in (rows, most):
        raise RuntimeError(
            f"fsdp_pre_all_gather of {name!r} has returned a tensor of shape {tuple(tensor.shape)} for {rows} rows. "
            f"Ranks have different numbers of rows, so it must have {rows} rows, or {most}, the most that a rank has."
        )
    if tensor.shape[0] == most:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(most - tensor.shape[0], *tensor.shape[1:])])


def _bytes_of(tensor: Tensor) -> list[Tensor]:
    sent = tensor.contiguous().view(-1).view(torch.uint8)
    return [sent, sent.new_zeros(-sent.numel() % _ALIGNMENT)]


def _ordinary(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the ordinary tensors that these wrap, at any depth."""
    found: list[Tensor] = []
    for tensor in tensors:
        inside = compat.inner_tensors(tensor)
        found += _ordinary(list(inside.values())) if inside else [tensor]
    return found
