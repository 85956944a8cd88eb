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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .. import compat

if TYPE_CHECKING:
    from .bucket import Bucket

__all__ = ["FORM", "Extension", "Made", "Sent", "check", "is_extended", "plain"]

FORM = "extension"
"""The form of a bucket whose parameter gathers itself."""

_ALIGNMENT = 16  # bytes: the largest item of a tensor


def is_extended(tensor: Tensor) -> bool:
    """Whether a tensor, or the local part of a DTensor, is of a class that gathers itself."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return hasattr(type(local), "fsdp_pre_all_gather")


def plain(tensor: Tensor) -> Tensor:
    """Return the ordinary tensor that such a tensor wraps; others as they are."""
    inside = list(compat.inner_tensors(tensor).values()) if is_extended(tensor) else []
    return inside[0] if len(inside) == 1 else tensor  # several: it is refused, or ignored


def check(name: str, param: Tensor, hint: str) -> None:
    """Raise unless a parameter whose class gathers itself can be sharded.

    Args:
        hint: What to use instead of its class, if that is known; else "".

    Raises:
        NotImplementedError: It wraps anything but one ordinary tensor, is divided by tensor parallelism, or its class has
            only one of the two methods.
    """
    local = param._local_tensor if isinstance(param, DTensor) else param
    kind = type(local)
    if not hasattr(kind, "fsdp_post_all_gather"):
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind.__name__}, which has fsdp_pre_all_gather but no fsdp_post_all_gather. Define both."
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind.__name__} inside a DTensor: parameters that gather themselves "
            "(fsdp_pre_all_gather) cannot be divided over other ranks as well. Leave its layer out of tensor parallelism."
        )
    inner = list(compat.inner_tensors(param).values())
    like = [(each.shape, each.dtype) for each in inner if type(each) in (Tensor, torch.nn.Parameter)]
    if like != [(param.shape, param.dtype)]:
        held = (
            ", ".join(f"{type(each).__name__} {tuple(each.shape)} of {each.dtype}" for each in inner)
            or "nothing to be seen"
        )
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind.__name__} of shape {tuple(param.shape)} and {param.dtype} around {held}. A class "
            "that gathers itself (fsdp_pre_all_gather) must wrap one ordinary tensor of its own shape and dtype, which is "
            f"the main weight; weights that are quantized at rest are not supported.{hint}"
        )


@dataclass(frozen=True, eq=False)
class Sent:
    """What this rank sends: bytes, and how to read those of each rank."""

    packed: Tensor
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    metadata: Any


@dataclass(frozen=True, eq=False)
class Made:
    """A gathered parameter.

    Args:
        tensor: What ``fsdp_post_all_gather`` has returned.
        leaves: The ordinary tensors that hold its memory, and what else was gathered or returned, in an order that is the
            same after each gather.
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

    def prepare(self, bucket: Bucket) -> Sent:
        """Call ``fsdp_pre_all_gather``.

        Raises:
            RuntimeError: It has returned something else than tensors, or tensors without this rank's rows where ranks
                have different numbers of rows.
        """
        (slot,), ranks = bucket.plan.layout.slots, bucket.plan.layout.world_size
        size, module, mesh = torch.Size(slot.shape), bucket.sites[0][0].module, bucket.topology.mesh
        if mesh.ndim > 1:
            assert mesh.mesh_dim_names is not None
            mesh = mesh[mesh.mesh_dim_names[-1]]
        pre: Any = self._wrapped.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arguments: tuple[Any, ...] = (mesh,)
        if len(inspect.signature(pre).parameters) > 1:
            policy = MixedPrecisionPolicy(param_dtype=bucket.plan.compute_dtype, reduce_dtype=bucket.plan.comm_dtype)
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
        return Sent(torch.cat(parts), tuple(shapes), dtypes, metadata)

    def finish(self, bucket: Bucket, sent: Sent, gathered: Tensor) -> Made:
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
        tensor, more = post(tuple(outputs), sent.metadata, bucket.plan.compute_dtype)
        return Made(tensor, (*outputs, *_ordinary(more), *_ordinary([tensor])))

    def present(self, bucket: Bucket, made: Made) -> Tensor:
        """Return what modules get, without the rows that ranks were padded with."""
        (slot,) = bucket.plan.layout.slots
        size = torch.Size(slot.shape)
        if made.tensor.shape == size:
            return made.tensor.detach()
        return made.tensor.as_strided(size, torch.empty(size, device="meta").stride(), 0)


def _padded(tensor: Tensor, rows: int, most: int, name: str) -> Tensor:
    if not tensor.ndim or tensor.shape[0] not in (rows, most):
        raise RuntimeError(
            f"fsdp_pre_all_gather of {name!r} has returned a tensor of shape {tuple(tensor.shape)} for {rows} rows. Ranks have "
            f"different numbers of rows, so it must have {rows} rows, or {most}, the most that a rank has."
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
