"""The contract between the flat gradient of a bucket and the ``.grad`` of its parameters.

Autograd, or the eager path, adds to one flat gradient per bucket. Users and optimizers see ``parameter.grad``, a DTensor
view of it on every rank, also where the rank holds no row, so that loops over gradients take the same turns on every
rank. Nothing but these views keeps the flat gradient alive: setting them to None frees it, as in plain torch.

    before more is added    ``collect``   the flat gradient behind the parameters' ``.grad`` again; slices whose
                                          ``.grad`` was set to None start from zero, foreign tensors are copied in
    after                   ``install``   every parameter's ``.grad`` is a view of the flat gradient

Variations
    * gradients are summed in another dtype than the parameters have (``main_grads_dtype``): ``.grad`` shows the sum in
      the parameter's dtype; the sum itself hangs on it.
    * ``use_decoupled_grad``: the sum is the parameter's ``.decoupled_grad``, in its own dtype, and ``.grad`` is None.
    * the gradient waits for its reduction (:mod:`mfsdp_compile.runtime.pending`): ``.grad`` is an
      :class:`~mfsdp_compile.runtime.tensor.UnreducedGradient`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import compat
from .bucket import Bucket
from .rows import take_rows
from .tensor import RowShardedTensor, UnreducedGradient, like_rows

__all__ = ["accumulate", "add_back", "clear", "fill_missing", "flat_gradient", "put_aside", "watch"]


def watch(bucket: Bucket, touched: Callable[[Bucket], None]) -> None:
    """Keep the contract whenever autograd itself accumulates into ``bucket.flat``, which compiled graphs make it do.

    ``touched`` is called after each accumulation, in backward.
    """
    if not bucket.plan.requires_grad:
        return
    # Autograd holds the hooks where Python's garbage collector does not look.
    the_bucket = weakref.ref(bucket)
    the_touched = weakref.WeakMethod(touched)

    @compat.python_only
    def before(gradient: Tensor | None) -> Tensor | None:
        bucket = the_bucket()
        if gradient is None or bucket is None:
            return None  # the eager path passes no gradient through autograd, but hooks run
        if not _autograd_adds(bucket):
            bucket.flat.grad = None
            return None
        bucket.flat.grad = collect(bucket)
        return _run_tensor_hooks(bucket, gradient)

    @compat.python_only
    def after(flat: Tensor) -> None:
        bucket, touched = the_bucket(), the_touched()
        gradient, flat.grad = flat.grad, None
        if gradient is None or bucket is None or touched is None:
            return
        if _autograd_adds(bucket):
            install(bucket, gradient)
        elif not bucket.gradient_waits:  # if it does, this is zeros
            accumulate(bucket, gradient)
        touched(bucket)

    bucket.flat.register_hook(before)
    bucket.flat.register_post_accumulate_grad_hook(after)


@torch.no_grad()
def accumulate(bucket: Bucket, gradient: Tensor) -> None:
    """Add a reduced gradient, ``[shard_numel]`` in the main dtype, which may be kept."""
    gradient = _run_tensor_hooks(bucket, gradient).to(bucket.plan.grad_dtype)
    total = collect(bucket)
    install(bucket, gradient if total is None else total.add_(gradient))


@torch.no_grad()
def fill_missing(bucket: Bucket) -> None:
    """Zeros for parameters without gradient: on every rank, every trainable parameter has one after backward."""
    if any(gradient is None for gradient in _attached(bucket)):
        total = collect(bucket)
        if total is None:
            total = torch.zeros_like(bucket.flat, dtype=bucket.plan.grad_dtype, requires_grad=False)
        install(bucket, total)


def clear(bucket: Bucket, kept: Collection[int] | None = None) -> None:
    """Forget gradients.

    Args:
        kept: ``id`` of parameters that keep theirs. What the others wait with is dropped before more is added, or reduced,
            parameter by parameter; the sum stays, so that ranks that differ in this still start the same reductions. None:
            forget all.
    """
    if bucket.pending is not None and kept is None:
        bucket.pending.total = None
    for param in bucket.params:
        if kept is None or id(param) not in kept:
            _attach(bucket, param, None)


@torch.no_grad()
def put_aside(buckets: Iterable[Bucket]) -> list[tuple[Bucket, Tensor]]:
    """Take the gradients off the parameters, which then have none, for :func:`add_back`. None waits to be reduced."""
    aside = [(bucket, total) for bucket in buckets if (total := collect(bucket)) is not None]
    for bucket, _ in aside:
        clear(bucket)
    return aside


@torch.no_grad()
def add_back(aside: Iterable[tuple[Bucket, Tensor]]) -> None:
    """Add what was put aside to the gradients of today."""
    for bucket, earlier in aside:
        total = collect(bucket)
        install(bucket, earlier if total is None else total.add_(earlier))


@torch.no_grad()
def collect(bucket: Bucket) -> Tensor | None:
    """The flat gradient that the parameters' ``.grad`` are views of, or one made from them; None if all are None."""
    gradients = _attached(bucket)
    if all(gradient is None for gradient in gradients):
        return None
    total = _shared_total(bucket, gradients)
    if total is not None:
        if any(gradient is None for gradient in gradients):
            total = total.clone()  # somebody may keep a gradient that was taken off its parameter
            for view, gradient in zip(bucket.views(total), gradients, strict=True):
                if gradient is None:
                    view.zero_()
        return total
    total = torch.zeros_like(bucket.flat, dtype=bucket.plan.grad_dtype, requires_grad=False)
    parts = zip(bucket.views(total), gradients, bucket.params, bucket.sites, bucket.splits, strict=True)
    for view, gradient, param, sites, split in parts:
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor) and gradient.shape == split.shape:
            gradient = RowShardedTensor.wrap(take_rows(gradient, split, bucket.topology.shard), split, bucket.topology)
        if isinstance(gradient, RowShardedTensor) and gradient.shape == split.shape:
            # Of a penalty on this parameter and another one, whose rows lie elsewhere.
            gradient = like_rows(gradient, param)
        if not isinstance(gradient, DTensor) or gradient._local_tensor.shape != view.shape:
            raise RuntimeError(
                f"The gradient of {sites[0].name!r} is {_describe(gradient)}; it must be a DTensor sharded like the "
                "parameter. Set it to None or to a tensor computed from parameter.grad."
            )
        view.copy_(gradient._local_tensor)
    return total


@torch.no_grad()
def flat_gradient(bucket: Bucket) -> Tensor | None:
    """What the ``.grad`` of all parameters are views of, ``[shard_numel]``; a copy if somebody has replaced one, None if
    one is missing."""
    attached = _attached(bucket)
    if any(gradient is None for gradient in attached):
        return None
    flat = _shared_flat(bucket, attached)
    if flat is not None:
        return flat
    total = collect(bucket)
    assert total is not None
    return total.to(bucket.plan.main_dtype) if _shows_cast(bucket) else total


def install(bucket: Bucket, total: Tensor) -> None:
    shown = total.to(bucket.plan.main_dtype) if _shows_cast(bucket) else total
    for param, view in zip(bucket.params, bucket.local_views(shown, backing=(shown,)), strict=True):
        if shown is not total:
            view.__dict__["mfsdp_total"] = (total, shown._version)
        _attach(bucket, param, view)
        # The parameter is no leaf of the autograd graph (the flat shard is), so nobody else runs these.
        for hook in (param._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
            hook(param)


# -- details ----------------------------------------------------------------------------------------------------------


def _autograd_adds(bucket: Bucket) -> bool:
    """Autograd adds in place to what is there, in the parameter's dtype; where that will not do, we add."""
    plan = bucket.plan
    return bucket.pending is None and plan.grad_dtype == plan.main_dtype and not plan.decoupled


def _attached(bucket: Bucket) -> list[Tensor | None]:
    """What is attached and has values."""
    return [None if isinstance(gradient, UnreducedGradient) else gradient for gradient in bucket.gradients]


def _attach(bucket: Bucket, param: Tensor, gradient: Tensor | None) -> None:
    setattr(param, bucket.plan.grad_attribute, gradient)


def _shows_cast(bucket: Bucket) -> bool:
    return bucket.plan.grad_dtype != bucket.plan.main_dtype and not bucket.plan.decoupled


def _shared_total(bucket: Bucket, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum that all gradients show, if they still do."""
    flat = _shared_flat(bucket, gradients)
    if flat is None or not _shows_cast(bucket):
        return flat
    # The sum in its own dtype, unless somebody changed what is shown of it.
    total, version = next(vars(gradient)["mfsdp_total"] for gradient in gradients if gradient is not None)
    return total if flat._version == version else None


def _shared_flat(bucket: Bucket, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The flat tensor that all gradients are the right views of, if there is one."""
    dtype = bucket.plan.main_dtype if _shows_cast(bucket) else bucket.plan.grad_dtype
    present = next(gradient for gradient in gradients if gradient is not None)
    if not isinstance(present, RowShardedTensor) or len(present.backing) != 1:
        return None
    (flat,) = present.backing
    if flat.dtype != dtype or flat.shape != bucket.flat.shape:
        return None
    for view, gradient in zip(bucket.views(flat), gradients, strict=True):
        if gradient is None:
            continue
        if not isinstance(gradient, RowShardedTensor) or not any(t is flat for t in gradient.backing):
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
