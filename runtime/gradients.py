"""The contract between the flat gradient of a bucket and the ``.grad`` of its parameters.

Autograd, or the eager path, adds to one flat gradient per bucket. Users and optimizers see ``parameter.grad``, a DTensor
view of it on every rank, also where the rank holds no row, so that loops over gradients take the same turns on every
rank. Nothing but these views keeps the flat gradient alive: setting them to None frees it, as in plain torch.

    before more is added    ``collect``   the flat gradient behind the parameters' ``.grad`` again; slices whose
                                          ``.grad`` was set to None start from zero, foreign tensors are copied in
    after                   ``install``   every parameter's ``.grad`` is a view of the flat gradient
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .bucket import Bucket
from .tensor import RowShardedTensor

__all__ = ["accumulate", "fill_missing", "watch"]


def watch(bucket: Bucket, touched: Callable[[Bucket], None]) -> None:
    """Keep the contract whenever autograd itself accumulates into ``bucket.flat``, which compiled graphs make it do.

    ``touched`` is called after each accumulation, in backward.
    """
    if not bucket.plan.requires_grad:
        return
    # Autograd holds the hooks where Python's garbage collector does not look.
    the_bucket = weakref.ref(bucket)
    the_touched = weakref.WeakMethod(touched)

    def before(gradient: Tensor | None) -> Tensor | None:
        bucket = the_bucket()
        if gradient is None or bucket is None:
            return None  # the eager path passes no gradient through autograd, but hooks run
        bucket.flat.grad = collect(bucket)
        return _run_tensor_hooks(bucket, gradient)

    def after(flat: Tensor) -> None:
        bucket, touched = the_bucket(), the_touched()
        total, flat.grad = flat.grad, None
        if total is not None and bucket is not None and touched is not None:
            install(bucket, total)
            touched(bucket)

    bucket.flat.register_hook(before)
    bucket.flat.register_post_accumulate_grad_hook(after)


@torch.no_grad()
def accumulate(bucket: Bucket, gradient: Tensor) -> None:
    """Add a reduced gradient, ``[shard_numel]`` in the main dtype, which may be kept."""
    gradient = _run_tensor_hooks(bucket, gradient)
    total = collect(bucket)
    install(bucket, gradient if total is None else total.add_(gradient))


@torch.no_grad()
def fill_missing(bucket: Bucket) -> None:
    """Zeros for parameters without gradient: on every rank, every trainable parameter has one after backward."""
    if any(param.grad is None for param in bucket.params):
        total = collect(bucket)
        install(bucket, torch.zeros_like(bucket.flat, requires_grad=False) if total is None else total)


@torch.no_grad()
def collect(bucket: Bucket) -> Tensor | None:
    """The flat gradient that the parameters' ``.grad`` are views of, or one made from them; None if all are None."""
    gradients = [param.grad for param in bucket.params]
    if all(gradient is None for gradient in gradients):
        return None
    flat = _shared_flat(bucket, gradients)
    if flat is not None:
        for view, gradient in zip(bucket.views(flat), gradients, strict=True):
            if gradient is None:
                view.zero_()
        return flat
    flat = torch.zeros_like(bucket.flat, requires_grad=False)
    for view, gradient, sites in zip(bucket.views(flat), gradients, bucket.sites, strict=True):
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor) or gradient._local_tensor.shape != view.shape:
            raise RuntimeError(
                f"The gradient of {sites[0].name!r} is {_describe(gradient)}; it must be a DTensor sharded like the "
                "parameter. Set it to None or to a tensor computed from parameter.grad."
            )
        view.copy_(gradient._local_tensor)
    return flat


def install(bucket: Bucket, flat: Tensor) -> None:
    for param, view in zip(bucket.params, bucket.local_views(flat), strict=True):
        param.grad = view
        # The parameter is no leaf of the autograd graph (the flat shard is), so nobody else runs these.
        for hook in (param._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
            hook(param)


def _shared_flat(bucket: Bucket, gradients: list[Tensor | None]) -> Tensor | None:
    """The flat tensor that all gradients are the right views of, if there is one."""
    index, present = next((i, g) for i, g in enumerate(gradients) if g is not None)
    if not isinstance(present, RowShardedTensor) or present.dtype != bucket.flat.dtype:
        return None
    local = present._local_tensor
    base = local.storage_offset() - bucket.places[index].start
    storage = local.untyped_storage()
    if base < 0 or (base + bucket.flat.numel()) * local.element_size() > storage.nbytes():
        return None
    flat = torch.empty(0, dtype=local.dtype, device=local.device).set_(storage, base, bucket.flat.shape)
    for view, gradient in zip(bucket.views(flat), gradients, strict=True):
        if gradient is None:
            continue
        if not isinstance(gradient, RowShardedTensor):
            return None
        local = gradient._local_tensor
        if (local.data_ptr(), local.shape, local.stride()) != (view.data_ptr(), view.shape, view.stride()):
            return None
    return flat


def _run_tensor_hooks(bucket: Bucket, gradient: Tensor) -> Tensor:
    """``parameter.register_hook`` hooks, on what this backward adds."""
    if not any(param._backward_hooks for param in bucket.params):
        return gradient
    gradient = gradient.clone()
    for param, view in zip(bucket.params, bucket.local_views(gradient), strict=True):
        for hook in (param._backward_hooks or {}).values():
            changed = hook(view.clone())
            if changed is not None:
                view.copy_(changed)
    return gradient


def _describe(gradient: Tensor) -> str:
    if isinstance(gradient, DTensor):
        return f"a DTensor of shape {tuple(gradient.shape)} with local rows {tuple(gradient._local_tensor.shape)}"
    return f"an ordinary tensor of shape {tuple(gradient.shape)}"
