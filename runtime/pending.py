"""Gradients that wait for their reduction.

Some reductions run once per optimizer step, however many microbatches it has: with ``no_shard`` and ``optim`` the whole
reduction, with HSDP and HFSDP the one over outer ranks. Until it is due, each bucket's gradients are summed up here, in
memory that no collective writes to: a reduction reads the sum, and its result goes elsewhere. (Megatron-FSDP reduces
in place into its accumulator, and with automatic synchronisation reduces what was reduced before.)

Whether a reduction is due is asked in backward, when the gradients are there. In compiled graphs that is done by an
operator, ``mfsdp::reduce_if_due``, which finds the bucket's sum by a number that is an argument of the graph: one graph
serves every way of accumulating and every instance of a module.

The ``.grad`` of a parameter whose gradient waits is an :class:`UnreducedGradient`: it is not None, so that setting it to
None means what it always does, and it says what to do when it is computed with.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .gradients import Asked

__all__ = ["Holder", "Pending", "pending_of"]

_numbers = itertools.count(1)
_all: weakref.WeakValueDictionary[int, Pending] = weakref.WeakValueDictionary()


class Holder(Protocol):
    """The bucket whose gradients wait."""

    def reductions_are_due(self) -> bool:
        """Whether this backward reduces."""

    def forget_abandoned(self, total: Tensor) -> None:
        """Start from zero where the user has dropped the gradient of a parameter."""

    def zero_slices(self, packed: Tensor, params: Iterable[int]) -> None:
        """Zeros for these parameters, by index, in a gradient before its reduction, or in a sum of such."""

    def show_unreduced(self) -> None:
        """Gradients wait now."""

    def inspect(self, gradient: Tensor) -> None:
        """Look at a gradient before it is reduced."""


class Pending:
    """The sum of one bucket's gradients since the last reduction.

    Args:
        holder: the bucket, which holds this object.
        dtype: of the sum.
    """

    def __init__(self, holder: Holder, dtype: torch.dtype) -> None:
        self._holder = weakref.ref(holder)
        self._dtype = dtype
        self.total: Tensor | None = None
        self.kept = False
        """Whether the last gradient was kept, instead of reduced."""
        self.asked: Asked | None = None
        """What the backward under way wants of the next gradient; None: all of it. Compiled code computes all gradients,
        whatever was asked for."""
        number = next(_numbers)
        _all[number] = self
        self.token = torch.tensor([number])
        """What stands for this object in a graph: int64, ``[1]``, on the CPU."""

    @property
    def holder(self) -> Holder:
        holder = self._holder()
        assert holder is not None
        return holder

    @torch.no_grad()
    def exchange(self, gradient: Tensor) -> Tensor | None:
        """Take in a gradient. Returns what is to be reduced, in the gradient's dtype, or None if that is not due."""
        asked, self.asked = self.asked, None
        if asked is not None and asked.returned:  # by torch.autograd.grad: not a part of the sum
            self.kept = False
            return gradient
        wanted = asked is None or bool(asked.added)
        self.kept = not (wanted and self.holder.reductions_are_due())
        if not wanted:
            return None
        if asked is not None and asked.left_out:
            gradient = gradient.clone()
            self.holder.zero_slices(gradient, asked.left_out)
        if self.total is not None:
            self.holder.forget_abandoned(self.total)
            self.total.add_(gradient)
        if self.kept:
            if self.total is None:
                # A copy: the gradient's memory may belong to a compiled graph, which uses it again.
                self.total = gradient.to(self._dtype, copy=True)
            self.holder.show_unreduced()
            return None
        return gradient if self.total is None else self.take(gradient.dtype)

    def take(self, dtype: torch.dtype) -> Tensor:
        """The sum, which starts from nothing again."""
        assert self.total is not None
        total, self.total = self.total, None
        return total.to(dtype)


def pending_of(token: Tensor) -> Pending:
    return _all[int(token)]
