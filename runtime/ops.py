"""The operators of mfsdp-compile, ``torch.ops.mfsdp.*``.

``unshard(shell, layout)``
    A marker. While a model is traced, reading ``module.weight`` gives ``unshard(shell)``; ``passes.unshard`` takes it
    out again. Running it means that another backend compiled the model, which would read freed memory: it raises.
``gather(shard, ...)``
    A bucket's parameters, from this rank's shard. Composite and differentiable: it is traced as cast, all-gather, wait
    and views, and its backward as ``pack_gradients``, reduce-scatter, wait and cast.
``pack_gradients(gradients, offsets, numel, dtype)``
    Gradients at their offsets of one flat bucket; zeros elsewhere. Inductor gets a lowering for it that lets a matmul
    write its result straight into the bucket (``mfsdp_compile.inductor``).

``gather`` and ``pack_gradients`` take numbers and strings instead of layout and group objects, so that a graph that
holds them prints as valid Python and its cache key says everything that matters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import compat
from .layout import BucketLayout

__all__ = ["gather_arguments", "pack_and_reduce"]

_library = torch.library.Library("mfsdp", "DEF")

_library.define("unshard(Tensor shell, str layout) -> Tensor")
_library.define(
    "gather(Tensor shard, int[] sizes, int[] ndims, int[] offsets, int world_size, str group, ScalarType dtype, "
    "str reduce_op) -> Tensor[]"
)
_library.define("pack_gradients(Tensor[] gradients, int[] offsets, int numel, ScalarType dtype) -> Tensor")


def gather_arguments(
    layout: BucketLayout, group: str, dtype: torch.dtype, reduce_op: str
) -> tuple[list[int], list[int], list[int], int, str, torch.dtype, str]:
    """What ``gather`` takes after the shard.

    Args:
        layout: of the bucket.
        group: name of the process group to gather over.
        dtype: of the gathered parameters (the compute dtype); the shard is cast to it before it is sent.
        reduce_op: ``"avg"`` or ``"sum"``, over the group, for the gradients.
    """
    sizes = [size for slot in layout.slots for size in slot.shape]
    ndims = [len(slot.shape) for slot in layout.slots]
    return sizes, ndims, [slot.offset for slot in layout.slots], layout.world_size, group, dtype, reduce_op


# -- unshard ----------------------------------------------------------------------------------------------------------


@torch.library.impl(_library, "unshard", "CompositeExplicitAutograd")
def _unshard(shell: Tensor, layout: str) -> Tensor:
    raise RuntimeError(
        "A model that mfsdp-compile has sharded was compiled with another backend, which does not know how to gather "
        f"parameters (here one of shape {tuple(shell.shape)}). Use torch.compile(model, backend='mfsdp'); for another "
        "compiler behind it, torch.compile(model, backend='mfsdp', options={'inner': 'aot_eager'})."
    )


@torch.library.register_fake("mfsdp::unshard", lib=_library)
def _unshard_fake(shell: Tensor, layout: str) -> Tensor:
    return torch.empty_like(shell)


def _unshard_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient, None


torch.library.register_autograd("mfsdp::unshard", _unshard_backward, lib=_library)


# -- gather -----------------------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shard: Tensor,
        shapes: tuple[tuple[int, ...], ...],
        offsets: tuple[int, ...],
        world_size: int,
        group: str,
        dtype: torch.dtype,
        reduce_op: str,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an unused parameter costs no zeros: packing fills its place
        ctx.bucket = (offsets, shard.numel() * world_size, world_size, group, dtype, reduce_op, shard.dtype)
        full = compat.wait_tensor(compat.all_gather(shard.to(dtype), world_size, group))
        return tuple(
            full.narrow(0, offset, math.prod(shape)).view(shape) for shape, offset in zip(shapes, offsets, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        offsets, numel, world_size, group, dtype, reduce_op, main_dtype = ctx.bucket
        reduced = pack_and_reduce(gradients, offsets, numel, dtype, reduce_op, world_size, group)
        return compat.wait_tensor(reduced).to(main_dtype), None, None, None, None, None, None


@torch.library.impl(_library, "gather", "CompositeImplicitAutograd")
def _gather(
    shard: Tensor,
    sizes: Sequence[int],
    ndims: Sequence[int],
    offsets: Sequence[int],
    world_size: int,
    group: str,
    dtype: torch.dtype,
    reduce_op: str,
) -> list[Tensor]:
    remaining = iter(sizes)
    shapes = tuple(tuple(next(remaining) for _ in range(ndim)) for ndim in ndims)
    return list(_Gather.apply(shard, shapes, tuple(offsets), world_size, group, dtype, reduce_op))


# -- gradients --------------------------------------------------------------------------------------------------------


def pack_and_reduce(
    gradients: Sequence[Tensor | None],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    reduce_op: str,
    world_size: int,
    group: str,
) -> Tensor:
    """Start the reduction of a bucket of gradients.

    Args:
        gradients: one per parameter of the bucket; None means zeros. At least one is a tensor.
        offsets: of the parameters in the bucket, in elements.
        numel: elements of the bucket.
        dtype: to reduce in.

    Returns:
        This rank's slice of the reduced bucket, ``[numel / world_size]``, to be waited for.
    """
    present = [(g, o) for g, o in zip(gradients, offsets, strict=True) if g is not None]
    flat = torch.ops.mfsdp.pack_gradients([g for g, _ in present], [o for _, o in present], numel, dtype)
    return compat.reduce_scatter(flat, reduce_op, world_size, group)


@torch.library.impl(_library, "pack_gradients", "CompositeExplicitAutograd")
def _pack_gradients(gradients: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> Tensor:
    flat = gradients[0].new_empty(numel, dtype=dtype)
    end = 0
    for gradient, offset in zip(gradients, offsets, strict=True):
        flat[end:offset].zero_()
        end = offset + gradient.numel()
        flat[offset:end].view(gradient.shape).copy_(gradient)
    flat[end:].zero_()
    return flat


@torch.library.register_fake("mfsdp::pack_gradients", lib=_library)
def _pack_gradients_fake(gradients: Sequence[Tensor], offsets: Sequence[int], numel: int, dtype: torch.dtype) -> Tensor:
    return gradients[0].new_empty(numel, dtype=dtype)
