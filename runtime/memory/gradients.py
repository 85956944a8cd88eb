"""The contract between the flat gradient of a bucket and the ``.grad`` of its parameters.

Parameters are the leaves of the autograd graph. A backward computes one flat gradient per bucket, whose reduction may
still be running when autograd reaches the parameters. Autograd therefore passes no gradient to them (except for
``torch.autograd.grad``), and the gradient is added here once it has arrived. Users and optimizers see
``parameter.grad``, a DTensor view of the flat gradient. Every rank has one, even a rank that owns no rows, so that
loops over gradients behave the same on all ranks. Only these views keep the flat gradient alive: setting them to None
frees it, as in plain torch.

    before accumulating     ``collect``   returns the flat gradient behind the parameters' ``.grad``; slices whose
                                          ``.grad`` was set to None start from zero, foreign tensors are copied in
    after accumulating      ``install``   makes every parameter's ``.grad`` a view of the flat gradient
    at the end of backward  ``settle``    sets ``.grad`` back to None for parameters that no rank used

    instead of ``install``  ``bucket.consumer`` may use the sum up, so that parameters have no gradient

Variations
    * Gradients are accumulated in another dtype than the parameters' (``main_grads_dtype``): ``.grad`` shows the sum in
      the parameter's dtype, and the sum itself is attached to it.
    * ``use_decoupled_grad``: the sum is the parameter's ``.decoupled_grad``, in its own dtype, and ``.grad`` is None.
    * The reduction of the gradient is deferred (:mod:`mfsdp_compile.runtime.memory.deferred_gradients`): ``.grad`` is
      an :class:`~mfsdp_compile.runtime.memory.tensor.UnreducedGradient`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import compat
from ..owner import refuse_dropped
from .bucket import Bucket, InstalledGradient
from .deferred_gradients import RequestedGradients, bucket_of
from .operators import like_rows
from .redistribute import take_rows
from .tensor import (
    ACCUMULATE_HOOKS,
    TENSOR_HOOKS,
    RowShardedTensor,
    UnreducedGradient,
    hooks_of_parameters,
    is_provisional,
    keep,
    mark_provisional,
)


@dataclass(eq=False)
class Backward:
    """One bucket's share of a backward through compiled code.

    Args:
        bucket: Weak reference to the bucket. Autograd holds this object where Python's garbage collector does not look.
        name: Name of the bucket.

    Attributes:
        leaves: The autograd nodes of the bucket's parameters, None for frozen ones. Empty if the eager path reduces the
            gradients.
        used: Indices of parameters that get a gradient in this backward; known when its graph begins.
        requested: What the running backward wants; known when its graph begins, if that says so.
        delivered: Whether the graph itself has delivered the gradient; see :func:`deliver_to`.
        kept: A gradient for ``torch.autograd.grad`` that the graph has delivered.
    """

    bucket: weakref.ref[Bucket]
    name: str
    leaves: Sequence[Any] = ()
    used: frozenset[int] = frozenset()
    requested: RequestedGradients | None = None
    delivered: bool = False
    kept: Tensor | None = None

    @staticmethod
    def through(bucket: Bucket) -> Backward:
        return Backward(weakref.ref(bucket), bucket.plan.name)


def shards_of(buckets: Sequence[Bucket], backwards: Sequence[Backward]) -> Sequence[Tensor]:
    """Return the buckets' shards, each ``[shard_numel]``, as differentiable functions of their parameters.

    They are the input of compiled code, whose backward returns the gradients of all shards, already reduced, together.
    Each becomes the gradient of its bucket's parameters.
    """
    shards: Sequence[Tensor] = _Shards.apply(buckets, backwards, *(param for b in buckets for param in b.params))
    node = next((shard.grad_fn for shard in shards if shard.grad_fn is not None), None)
    if node is not None:
        for bucket in buckets:
            bucket.contributions += bucket.plan.requires_grad
        leaves = iter(node.next_functions)
        for bucket, backward in zip(buckets, backwards, strict=True):
            backward.leaves = [leaf for leaf, _ in itertools.islice(leaves, len(bucket.params))]
    return shards


class _Shards(compat.Uncaptured):
    """Maps parameters, which are autograd leaves, to the flat shards of their buckets.

    There is one node for all buckets of a graph: a node of its own for each takes longer than everything else here.
    """

    @staticmethod
    @compat.python_only
    def forward(
        ctx: Any, buckets: Sequence[Bucket], backwards: Sequence[Backward], *params: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.backwards = backwards
        shards = tuple(bucket.flat.detach() for bucket in buckets)
        frozen = (shard for bucket, shard in zip(buckets, shards, strict=True) if not bucket.plan.requires_grad)
        ctx.mark_non_differentiable(*frozen)
        return shards

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        returned: list[Tensor | None] = []
        for backward, gradient in zip(ctx.backwards, gradients, strict=True):
            returned += _receive(backward, gradient)
        return None, None, *returned


def deliver_to(backward: Backward, gradient: Tensor) -> None:
    """Accumulate the gradient of a shard while the graph that has computed it still runs.

    A gradient for ``torch.autograd.grad`` is only kept, for when the graph returns.
    """
    requested = backward.requested or RequestedGradients.of(backward.leaves)
    backward.delivered, backward.kept = False, None  # an earlier backward may have failed
    if requested.returned:
        bucket = backward.bucket()
        if bucket is not None:
            bucket.plan.rest.settle(bucket.device)
        backward.kept = gradient.clone()
        return
    _receive(backward, gradient, in_graph=True)
    backward.requested, backward.delivered = requested, True


def _receive(backward: Backward, gradient: Tensor | None, in_graph: bool = False) -> Sequence[Tensor | None]:
    """Accumulate the gradient of a shard. Return what autograd passes to the parameters.

    Args:
        in_graph: Whether a compiled graph has called, which reuses the gradient's memory.
    """
    bucket, requested = backward.bucket(), backward.requested or RequestedGradients.of(backward.leaves)
    backward.requested = None
    if backward.delivered:
        backward.delivered = False
        return requested.nothing
    if backward.kept is not None:
        gradient, backward.kept = backward.kept, None
    if gradient is None or not (requested.added or requested.returned):
        return requested.nothing
    if bucket is None:
        refuse_dropped()
    used = backward.used
    tell_counting_hooks(bucket, requested.added - used)
    if requested.returned:
        return select(requested, bucket, gradient, used)
    if not bucket.gradient_waits:  # a deferred gradient is zeros here
        bucket.plan.rest.settle(bucket.device)
        if not bucket.lane.is_deferred and (
            unrequested := used & requested.left_out
        ):  # ``defer_unless_due`` drops them from sums
            gradient, in_graph = gradient.clone(), False
            views = bucket.views(gradient)
            for index in unrequested:
                views[index].zero_()
        accumulate(bucket, gradient, used - requested.left_out, in_graph)
    bucket.owner.grad_sync.touched(bucket)
    return requested.nothing


def select(
    requested: RequestedGradients, bucket: Bucket, gradient: Tensor, used: Collection[int]
) -> list[Tensor | None]:
    """Select what ``torch.autograd.grad`` returns from a reduced gradient, ``[shard_numel]``, as DTensors."""
    bucket.plan.rest.settle(bucket.device)
    gradient = _run_tensor_hooks(bucket, gradient, requested.returned & set(used))
    views = bucket.local_views(gradient, backing=(gradient,))
    return [view if index in requested.returned and index in used else None for index, view in enumerate(views)]


@torch.no_grad()
def defer_unless_due(token: Tensor, gradient: Tensor) -> Tensor | None:
    """Add a gradient to the deferred sum of its bucket.

    Args:
        token: The token of the bucket's :class:`~.deferred_gradients.DeferredGradient`.

    Returns:
        The tensor to reduce, in the gradient's dtype; None if no reduction is due.
    """
    bucket: Bucket = bucket_of(token)
    pending = bucket.pending
    assert pending is not None
    requested, pending.requested = pending.requested, None
    if requested is not None and requested.returned:  # for torch.autograd.grad, not part of the sum
        pending.kept = False
        return gradient
    wanted = requested is None or bool(requested.added)
    pending.kept = not (wanted and bucket.owner.grad_sync.is_due())
    if not wanted:
        return None
    if requested is not None and requested.left_out:
        gradient = gradient.clone()
        bucket.zero_slices(gradient, requested.left_out)
    if pending.total is not None:
        bucket.forget_abandoned(pending.total)
        pending.total.add_(gradient)
    if pending.kept:
        if pending.total is None:
            # A copy: the gradient's memory may belong to a compiled graph, which reuses it.
            copied = gradient.to(pending.dtype, copy=not bucket.plan.keeps_memory)
            pending.total = bucket.keep("deferred", copied)
        bucket.show_unreduced()
        return None
    return gradient if pending.total is None else pending.take(gradient.dtype)


def refuse_double_backward() -> NoReturn:
    raise RuntimeError(
        "backward(create_graph=True) through sharded parameters is not supported: reductions are not differentiated "
        "again. Gradients of inputs (torch.autograd.grad(loss, x, create_graph=True)) are."
    )


def note_use(bucket: Bucket, used: Collection[int]) -> None:
    """Record that a backward computes gradients of the parameters ``used``, by index, before they are accumulated.

    The gradients of the other parameters are zeros. Whether these parameters get a gradient depends on what other ranks
    used; see :func:`settle`.
    """
    if len(used) == len(bucket.params):
        bucket.provisional.clear()
    else:
        for index, attached in enumerate(bucket.gradients):
            if index in used:
                bucket.provisional.discard(index)
            elif attached is None:
                bucket.provisional.add(index)
    bucket.used_now.update(used)


def levels_of_use(bucket: Bucket) -> list[int]:
    """Return for each parameter 2 if used since gradients were last settled, 1 if it has an older gradient, else 0."""
    known = used_so_far(bucket)
    return [2 if index in bucket.used_now else int(index in known) for index in range(len(bucket.params))]


def used_so_far(bucket: Bucket) -> set[int]:
    """Return indices of all parameters except those whose visible gradient is a placeholder of zeros."""
    for index in list(bucket.provisional):
        attached = getattr(bucket.params[index], bucket.plan.grad_attribute, None)
        if attached is not None and not is_provisional(attached):
            bucket.provisional.discard(index)  # autograd has added another gradient, such as a penalty on the parameter
    return set(range(len(bucket.params))) - bucket.provisional


@torch.no_grad()
def accumulate(bucket: Bucket, gradient: Tensor, used: Collection[int], in_graph: bool = False) -> None:
    """Add a reduced gradient, ``[shard_numel]`` in the main dtype. The tensor itself may be kept as the sum.

    Args:
        used: Indices of parameters that this rank has used. Their hooks run.
        in_graph: Whether a compiled graph has called, which reuses the tensor's memory: it must not be kept.
    """
    if bucket.lane.rest:
        bucket.plan.rest.settle(bucket.device)
    given, gradient = gradient, _run_tensor_hooks(bucket, gradient, used).to(bucket.plan.grad_dtype)
    total = _collect(bucket)
    total = gradient if total is None else total.add_(gradient)
    if bucket.consumer is not None and bucket.consumer(total, used, in_graph):
        clear(bucket, keeps_use=True)
        return
    install(bucket, total.clone() if in_graph and total is given else total, used)


@torch.no_grad()
def settle(bucket: Bucket, levels: Sequence[int] | None) -> None:
    """Set the gradients of parameters that no rank has used to None, as without sharding, so that optimizers skip them.

    Parameters that only other ranks have used run their hooks here.

    Args:
        levels: For each parameter, the maximum of :func:`levels_of_use` over all ranks. None: it is the same on all.
    """
    if not bucket.provisional and len(bucket.used_now) == len(bucket.params):  # usually
        bucket.used_now.clear()
        return
    levels, known = levels or levels_of_use(bucket), used_so_far(bucket)
    for index, (param, level) in enumerate(zip(bucket.params, levels, strict=True)):
        if index not in known and level == 0:
            _attach(bucket, param, None)
            bucket.clean.add(index)
        elif level == 2 and index not in bucket.used_now:
            if index not in known:
                keep(getattr(param, bucket.plan.grad_attribute))
            _run_accumulate_hooks(param)
    bucket.provisional.clear()
    bucket.used_now.clear()


def clear(bucket: Bucket, kept: Collection[int] | None = None, keeps_use: bool = False) -> None:
    """Drop gradients.

    Args:
        keeps_use: Keep what is known of the use of parameters: the gradients have been used up, and settled gradients
            of other ranks depend on it.
        kept: ``id`` of the parameters that keep their gradients. Deferred gradients of the other parameters are dropped
            parameter by parameter, before more is added or reduced. The deferred sum itself stays, so that ranks that
            keep different parameters still start the same reductions. None: drop all gradients.
    """
    if bucket.pending is not None and kept is None:
        bucket.pending.total = None
        bucket.pending.earlier.clear()
    for param in bucket.params:
        if kept is None or id(param) not in kept:
            _attach(bucket, param, None)
    if keeps_use:
        return
    kept_indices = {i for i, param in enumerate(bucket.params) if kept is not None and id(param) in kept}
    bucket.provisional &= kept_indices
    bucket.used_now &= kept_indices


@dataclass(frozen=True)
class Stashed:
    """Gradients of one bucket that were detached from its parameters.

    Args:
        bucket: Their bucket.
        total: The flat gradient, ``[shard_numel]``.
        without: Indices of parameters that had no gradient.
    """

    bucket: Bucket
    total: Tensor
    without: frozenset[int]


@torch.no_grad()
def stash(buckets: Iterable[Bucket]) -> list[Stashed]:
    """Detach the gradients from the parameters, for :func:`unstash`. No gradient may be waiting for its reduction."""
    stashed = [
        Stashed(bucket, total.clone() if bucket.plan.keeps_memory else total, _without_gradient(bucket))
        for bucket in buckets
        if (total := collect(bucket)) is not None
    ]
    for each in stashed:
        clear(each.bucket)
    return stashed


@torch.no_grad()
def unstash(stashed: Iterable[Stashed]) -> None:
    """Add stashed gradients to the current ones. A parameter with neither gradient still has None."""
    for each in stashed:
        bucket, total = each.bucket, collect(each.bucket)
        without = each.without & _without_gradient(bucket)
        install(bucket, each.total if total is None else total.add_(each.total))
        for index in without:
            _attach(bucket, bucket.params[index], None)
        bucket.clean |= without


def _without_gradient(bucket: Bucket) -> frozenset[int]:
    return frozenset(index for index, gradient in enumerate(bucket.gradients) if gradient is None)


@torch.no_grad()
def collect(bucket: Bucket) -> Tensor | None:
    """Return the flat gradient that the parameters' ``.grad`` view, or build one from them; None if all are None."""
    return _collect(bucket)


def _collect(bucket: Bucket) -> Tensor | None:
    gradients = _attached(bucket)
    if all(gradient is None for gradient in gradients):
        return None
    total = _shared_total(bucket, gradients)
    if total is not None:
        dropped = [i for i, gradient in enumerate(gradients) if gradient is None and i not in bucket.clean]
        if dropped:
            total = total.clone()  # the user may still hold a gradient that was taken off its parameter
            views = bucket.views(total)
            for index in dropped:
                views[index].zero_()
            bucket.clean |= set(dropped)
        return total
    total = torch.zeros_like(bucket.flat, dtype=bucket.plan.grad_dtype, requires_grad=False)
    parts = zip(bucket.views(total), gradients, bucket.params, bucket.locations, bucket.splits, strict=True)
    for view, gradient, param, locations, split in parts:
        if gradient is None:
            continue
        if not isinstance(gradient, DTensor) and gradient.shape == split.shape:
            gradient = RowShardedTensor.wrap(take_rows(gradient, split, bucket.topology.shard), split, bucket.topology)
        if isinstance(gradient, RowShardedTensor) and gradient.shape == split.shape:
            # A penalty on this parameter and another one, whose rows are on other ranks, leaves such a gradient.
            gradient = like_rows(gradient, param)
        if not isinstance(gradient, DTensor) or gradient._local_tensor.shape != view.shape:
            raise RuntimeError(
                f"The gradient of {locations[0].name!r} is {_describe(gradient)}; it must be a DTensor with the "
                "parameter's sharding. Set it to None or to a tensor computed from parameter.grad."
            )
        view.copy_(gradient._local_tensor)
    return total


@torch.no_grad()
def flat_gradient(bucket: Bucket) -> Tensor | None:
    """Return the tensor that the ``.grad`` of all parameters view, ``[shard_numel]``; None if a ``.grad`` is missing.

    If a ``.grad`` was replaced, the result is a copy.
    """
    attached = _attached(bucket)
    if any(gradient is None for gradient in attached):
        return None
    flat = _shared_flat(bucket, attached)
    if flat is not None:
        return flat
    total = collect(bucket)
    assert total is not None
    return shown(bucket, total)


def is_as_installed(bucket: Bucket) -> bool:
    """Whether the parameters' gradients are what backwards through the bucket have computed, and nothing else.

    Otherwise something has added to them or replaced them since, such as a penalty on parameters in the loss.
    """
    attached = _attached(bucket)
    if all(gradient is None for gradient in attached):
        return True
    if (installed := bucket.installed) is None:
        return False
    flat = installed.flat()
    return flat is not None and flat._version == installed.version and _shared_flat(bucket, attached) is flat


def shown(bucket: Bucket, total: Tensor) -> Tensor:
    """Return the flat gradient as the parameters' ``.grad`` shows it, in the parameters' dtype if it must be cast."""
    return total.to(bucket.plan.main_dtype) if _shows_cast(bucket) else total


def shows_total(bucket: Bucket) -> bool:
    """Whether gradients show a sum in another dtype, and nothing has written to them since."""
    attached = _attached(bucket)
    return _shows_cast(bucket) and any(g is not None for g in attached) and _shared_total(bucket, attached) is not None


def mark_shown(bucket: Bucket, as_total: bool) -> None:
    """Set whether something has written to gradients that show a sum in another dtype; see :func:`shows_total`."""
    for gradient in bucket.gradients:
        if gradient is not None and (known := vars(gradient).get("mfsdp_total")) is not None:
            (flat,) = gradient.backing
            gradient.__dict__["mfsdp_total"] = (known[0], flat._version if as_total else -1)


def install(bucket: Bucket, total: Tensor, used: Collection[int] = ()) -> None:
    """Make the parameters' gradients views of the flat gradient. A frozen parameter without a gradient gets none."""
    keeps = bucket.plan.keeps_memory
    total = bucket.keep("gradient", total) if keeps else total
    visible = shown(bucket, total)
    if visible is not total and keeps:
        visible = bucket.keep("shown", visible)
    if bucket.pending is not None:
        bucket.pending.earlier.clear()
    used_so_far(bucket)
    bucket.installed = InstalledGradient(weakref.ref(visible), visible._version)
    attribute = bucket.plan.grad_attribute
    for index, view in enumerate(bucket.local_views(visible, backing=(visible,))):
        param = bucket.params[index]
        if not bucket.trains[index] and getattr(param, attribute, None) is None:
            continue
        if visible is not total:
            view.__dict__["mfsdp_total"] = (total, visible._version)
        if index in bucket.provisional:
            mark_provisional(view)
        with compat.DisableTorchFunctionSubclass():
            setattr(param, attribute, view)
        bucket.clean.discard(index)
        if index in used and vars(param).get(ACCUMULATE_HOOKS):
            _run_accumulate_hooks(param)


# -- details ----------------------------------------------------------------------------------------------------------


def _attached(bucket: Bucket) -> list[Tensor | None]:
    """Attached gradients that have values; None for the others."""
    gradients = bucket.gradients
    if (pending := bucket.pending) is None:  # only deferred gradients have no values
        return gradients
    return [pending.earlier.get(index) if isinstance(g, UnreducedGradient) else g for index, g in enumerate(gradients)]


def _attach(bucket: Bucket, param: Tensor, gradient: Tensor | None) -> None:
    with compat.DisableTorchFunctionSubclass():
        setattr(param, bucket.plan.grad_attribute, gradient)


def _shows_cast(bucket: Bucket) -> bool:
    return bucket.plan.grad_dtype != bucket.plan.main_dtype and not bucket.plan.decoupled


def _shared_total(bucket: Bucket, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum that all gradients show, or None if one of them was replaced or changed."""
    flat = _shared_flat(bucket, gradients)
    if flat is None or not _shows_cast(bucket):
        return flat
    # Return the sum in its own dtype, unless the cast copy that users see was modified.
    total, version = next(vars(gradient)["mfsdp_total"] for gradient in gradients if gradient is not None)
    return total if flat._version == version else None


def _shared_flat(bucket: Bucket, gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The flat tensor of which all gradients are the right views, or None."""
    dtype = bucket.plan.main_dtype if _shows_cast(bucket) else bucket.plan.grad_dtype
    present = next(gradient for gradient in gradients if gradient is not None)
    if not isinstance(present, RowShardedTensor) or len(present.backing) != 1:
        return None
    (flat,) = present.backing
    if flat.dtype != dtype or flat.shape != bucket.flat.shape:
        return None
    for view, gradient, split in zip(bucket.views(flat), gradients, bucket.splits, strict=True):
        if gradient is None:
            continue
        if not isinstance(gradient, RowShardedTensor) or not any(t is flat for t in gradient.backing):
            return None
        if gradient.row_split != split:  # another parameter's: compare splits, because views without rows look alike
            return None
        local = gradient._local_tensor
        if (local.data_ptr(), local.shape, local.stride()) != (view.data_ptr(), view.shape, view.stride()):
            return None
    return flat


def _run_tensor_hooks(bucket: Bucket, gradient: Tensor, used: Collection[int]) -> Tensor:
    """Run ``parameter.register_hook`` hooks on what this backward adds to the parameters that it uses."""
    hooked = [index for index in used if vars(bucket.params[index]).get(TENSOR_HOOKS)]
    if not hooked:
        return gradient
    gradient = gradient.clone()
    views = bucket.local_views(gradient)
    for index in sorted(hooked):
        for hook in list(bucket.params[index].tensor_hooks.values()):
            changed = hooks_of_parameters.call(hook, views[index].clone())
            if changed is not None:
                views[index].copy_(changed)
    return gradient


def tell_counting_hooks(bucket: Bucket, unused: Collection[int]) -> None:
    """Call the hooks of ``register_multi_grad_hook`` with None for parameters without a gradient.

    Such a hook waits for one call per tensor that the backward reaches, and a backward reaches all parameters of a
    bucket.
    """
    for index in sorted(unused):
        for hook in list(bucket.params[index].tensor_hooks.values()):
            if compat.counts_tensors(hook):
                hooks_of_parameters.call(hook, None)


def _run_accumulate_hooks(param: RowShardedTensor) -> None:
    """Run ``parameter.register_post_accumulate_grad_hook`` hooks."""
    for hook in list(vars(param).get(ACCUMULATE_HOOKS, {}).values()):
        hooks_of_parameters.call(hook, param)


def _describe(gradient: Tensor) -> str:
    if isinstance(gradient, DTensor):
        return f"a DTensor of shape {tuple(gradient.shape)} with local rows {tuple(gradient._local_tensor.shape)}"
    return f"an ordinary tensor of shape {tuple(gradient.shape)}"
