"""Gradients whose reduction is deferred. [Note: Deferred reductions]

Some reductions run once per optimizer step, however many microbatches it has: with ``no_shard`` and ``optim`` the whole
reduction, with HSDP and HFSDP the one over outer ranks. Until the reduction is due, each bucket's gradients are
accumulated here, in memory that no collective writes to: a reduction reads the sum and writes its result elsewhere.
(Megatron-FSDP reduces in place into its accumulator. With automatic synchronization it reduces values that were already
reduced.)

Whether a reduction is due is decided in backward, when the gradients are there. In compiled graphs the operator
``mfsdp::reduce_if_due`` does this. It finds the bucket's sum by a number that is an argument of the graph, so that one
graph serves every way of accumulating and every instance of a module.

The ``.grad`` of a parameter whose gradient is deferred is an :class:`.tensor.UnreducedGradient`. It is not None, so
that setting it to None means what it always does. Computing with it raises an error that says what to do. A gradient
that was there before is hidden behind it, and part of the result: by itself it would be read as the whole.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat

_numbers = itertools.count(1)
_buckets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class RequestedGradients:
    """The gradients that the running backward wants for a bucket's parameters.

    Args:
        added: Indices of parameters whose gradients are added to ``.grad``: all trainable ones, or those that
            ``backward(inputs=...)`` names.
        returned: Indices of parameters whose gradients ``torch.autograd.grad`` returns.
        left_out: Indices of trainable parameters that are in neither set.
        count: Number of the bucket's parameters.
    """

    added: frozenset[int]
    returned: frozenset[int]
    left_out: frozenset[int]
    count: int

    @staticmethod
    def of(leaves: Sequence[Any]) -> RequestedGradients:
        """Find out what the running backward wants.

        Args:
            leaves: The autograd nodes of the parameters, None for frozen ones.
        """
        wanted = [compat.wanted(leaf) if leaf is not None else None for leaf in leaves]
        added, returned, left_out = (
            frozenset([index for index, found in enumerate(wanted) if found is kind])
            for kind in (compat.GradientRequest.ADDED, compat.GradientRequest.RETURNED, compat.GradientRequest.NOT)
        )
        return RequestedGradients(added, returned, left_out, len(leaves))

    @property
    def nothing(self) -> tuple[None, ...]:
        return (None,) * self.count


class DeferredGradient:
    """The sum of one bucket's gradients since the last reduction; :func:`.gradients.defer_unless_due` adds to it.

    Args:
        bucket: The bucket, which owns this object.
        dtype: Dtype of the sum.
    """

    def __init__(self, bucket: object, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.total: Tensor | None = None
        self.kept = False
        """Whether the last gradient was kept instead of reduced."""
        self.requested: RequestedGradients | None = None
        """What the running backward wants of the next gradient. None: all of it. Compiled code computes all gradients,
        no matter which were requested."""
        self.earlier: dict[int, Tensor] = {}
        """Gradients that parameters had, reduced, before the first of the sum: by index, hidden until it is reduced."""
        number = next(_numbers)
        _buckets[number] = bucket
        weakref.finalize(self, _buckets.pop, number, None).atexit = False  # a token means this sum, and no later one
        self.token = torch.tensor([number])
        """Tensor that stands for this object in a graph: int64, ``[1]``, on the CPU."""

    def take(self, dtype: torch.dtype) -> Tensor:
        """Return the sum and start a new one."""
        assert self.total is not None
        total, self.total = self.total, None
        return total.to(dtype)


def bucket_of(token: Tensor) -> Any:
    """Return the bucket whose deferred gradient a token stands for."""
    return _buckets[int(token)]
