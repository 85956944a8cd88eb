"""Gradients that kernels write into the packed gradient of a bucket, instead of returning them to autograd."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import compat
from .bucket import Bucket
from .comm_buffers import enter_pool, take


class WrittenGradients:
    """What kernels have written for one bucket and one outermost forward. Autograd's node of the bucket packs the rest
    beside it.

    Kernels may write or add. A parameter that is used twice gets memory of its own for the second use, so that both
    come to the same.

    Attributes:
        indices: Indices of the parameters that have been written.
    """

    def __init__(self, bucket: Bucket) -> None:
        # Autograd holds this object where Python's garbage collector does not look.
        self._bucket = weakref.ref(bucket)
        self._params: list[weakref.ref[Tensor]] = []
        self._clear()

    def _clear(self) -> None:
        self.indices: set[int] = set()
        self._packed: Tensor | None = None
        self._more: list[tuple[int, Tensor]] = []

    def offer(self, param: Tensor, index: int) -> None:
        """Let kernels write the gradient of a gathered parameter."""
        compat.transformer_engine.offer_gradient(param, lambda: self._place(index))
        self._params.append(weakref.ref(param))

    def _place(self, index: int) -> Tensor:
        """Return zeros for one use of a parameter, in its shape and the communication dtype."""
        bucket = self._bucket()
        if bucket is None:
            raise RuntimeError("A backward runs through a sharded model that is gone: keep the model while it runs.")
        plan, buffers = bucket.plan, bucket.exchange.gradient_buffers
        if self._packed is None:
            enter_pool(bucket.owner.comm_buffers)
            self._packed = take("gradients", buffers, plan.layout.numel, plan.comm_dtype, bucket.device).zero_()
        place = bucket.whole_view(self._packed, index)
        if index not in self.indices:
            self.indices.add(index)
            return place
        self._more.append((index, torch.zeros_like(place)))
        return self._more[-1][1]

    @torch.no_grad()
    def pack(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """Return the packed gradient, ``[numel]`` in the communication dtype, and forget it.

        Args:
            gradients: What autograd has computed, one per parameter of the bucket.
        """
        bucket, packed = self._bucket(), self._packed
        assert bucket is not None
        assert packed is not None
        for param in self._params:
            if (lent := param()) is not None:
                compat.transformer_engine.withdraw_gradient(lent)
        for index, gradient in [*self._more, *enumerate(gradients)]:
            if gradient is not None:
                place = bucket.whole_view(packed, index)
                place.add_(gradient.to_dense() if gradient.is_sparse else gradient)
        self._clear()
        return bucket.lane.travel("pack", packed)
