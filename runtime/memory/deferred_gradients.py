"""Gradients whose reduction is deferred.

Some reductions run once per optimizer step, however many microbatches it has: with ``no_shard`` and ``optim`` the whole
reduction, with HSDP and HFSDP the one over outer ranks. Until the reduction is due, each bucket's gradients are
accumulated here, in memory that no collective writes to: a reduction reads the sum and writes its result elsewhere.
(Megatron-FSDP reduces in place into its accumulator. With automatic synchronization it reduces values that were already
reduced.)

Whether a reduction is due is decided in backward, when the gradients are there. In compiled graphs the operator
``mfsdp::reduce_if_due`` does this. It finds the bucket's sum by a number that is an argument of the graph, so that one
graph serves every way of accumulating and every instance of a module.

The ``.grad`` of a parameter whose gradient is deferred is an :class:`UnreducedGradient`. It is not None, so that
setting it to None means what it always does. Computing with it raises an error that says what to do. A gradient that
was there before is hidden behind it, and part of the result: by itself it would be read as the whole.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .bucket import Bucket
    from .gradients import Asked

__all__ = ["DeferredGradient", "pending_of"]

_numbers = itertools.count(1)
_all: weakref.WeakValueDictionary[int, DeferredGradient] = weakref.WeakValueDictionary()


class DeferredGradient:
    """The sum of one bucket's gradients since the last reduction.

    Args:
        bucket: The bucket, which owns this object.
        dtype: Dtype of the sum.
    """

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self._bucket = weakref.ref(bucket)
        self._dtype = dtype
        self.total: Tensor | None = None
        self.kept = False
        """Whether the last gradient was kept instead of reduced."""
        self.asked: Asked | None = None
        """What the running backward wants of the next gradient. None: all of it. Compiled code computes all gradients,
        no matter which were requested."""
        self.earlier: dict[int, Tensor] = {}
        """Gradients that parameters had, reduced, before the first of the sum: by index, hidden until it is reduced."""
        number = next(_numbers)
        _all[number] = self
        self.token = torch.tensor([number])
        """Tensor that stands for this object in a graph: int64, ``[1]``, on the CPU."""

    @property
    def bucket(self) -> Bucket:
        bucket = self._bucket()
        assert bucket is not None
        return bucket

    @torch.no_grad()
    def exchange(self, gradient: Tensor) -> Tensor | None:
        """Add a gradient to the sum.

        Returns:
            The tensor to reduce, in the gradient's dtype; None if no reduction is due.
        """
        asked, self.asked = self.asked, None
        if asked is not None and asked.returned:  # for torch.autograd.grad, not part of the sum
            self.kept = False
            return gradient
        wanted = asked is None or bool(asked.added)
        self.kept = not (wanted and self.bucket.owner.grad_sync.is_due())
        if not wanted:
            return None
        if asked is not None and asked.left_out:
            gradient = gradient.clone()
            self.bucket.zero_slices(gradient, asked.left_out)
        if self.total is not None:
            self.bucket.forget_abandoned(self.total)
            self.total.add_(gradient)
        if self.kept:
            if self.total is None:
                # A copy: the gradient's memory may belong to a compiled graph, which reuses it.
                copied = gradient.to(self._dtype, copy=not self.bucket.plan.keeps_memory)
                self.total = self.bucket.keep("deferred", copied)
            self.bucket.show_unreduced()
            return None
        return gradient if self.total is None else self.take(gradient.dtype)

    def take(self, dtype: torch.dtype) -> Tensor:
        """Return the sum and start a new one."""
        assert self.total is not None
        total, self.total = self.total, None
        return total.to(dtype)


def pending_of(token: Tensor) -> DeferredGradient:
    return _all[int(token)]
