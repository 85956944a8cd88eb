"""An optimizer's step over each bucket as soon as the bucket's gradient has arrived, in backward.

    gradients -> reduce-scatter -> wait -> the optimizer's own step over this bucket -> gradient's memory is free

A bucket's gradient is then in memory for a moment only, and parameters have no ``.grad``. Each bucket is stepped by the
optimizer itself, over flat shards (:mod:`.flat_step`), so that numbers, state, groups and state dicts are those of
``optimizer.step()``. ``optimizer.step()`` still follows, and steps what is left.

What is left (:meth:`StepInBackward.later`, and what :meth:`BucketStep.__call__` refuses)
    * A bucket that a step needs more than the gradient for, or of whose gradient a program may want to see more.
    * A bucket of which this backward has not used every parameter. Whether an unused parameter has a gradient is known
      after the backward, when all ranks have said what they used.
    * A bucket to which another forward has still to contribute, as to one that two graphs use.
    * In eager mode, a bucket whose parameters are used where they rest, as with ``no_shard``: autograd may still need
      their values.

The idea is LOMO's (https://arxiv.org/abs/2306.09782) and that of torch's tutorial on optimizer steps in backward.
There, a hook of each parameter steps it. Here gradients have been reduced, and arrive by bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..memory import gradients
from ..memory.bucket import Bucket
from ..memory.tensor import ACCUMULATE_HOOKS
from .flat_step import FlatStep
from .tracking import OptimizedModel
from .trial import counts_calls


@dataclass(frozen=True, eq=False)
class BucketStep:
    """Steps one bucket when its gradient is complete. Implements :class:`~..memory.bucket.GradientConsumer`.

    Args:
        flat: Steps the optimizer over runs.
        bucket: The bucket.
        runs: Its runs, with their parameter groups.
        step: The optimizer's own step, without hooks.
    """

    flat: FlatStep
    bucket: Bucket
    runs: Sequence[tuple[dict[str, Any], Any]]
    step: Callable[[torch.optim.Optimizer], Any]

    def __call__(self, total: Tensor, used: Collection[int], in_graph: bool) -> bool:
        if len(used) != len(self.bucket.params) or not self.bucket.owner.grad_sync.is_due():
            return False
        if self.bucket.is_used_at_rest and not in_graph:
            return False
        return self.flat.step_bucket(self.runs, gradients.shown(self.bucket, total), self.step)


class StepInBackward:
    """Lets an optimizer step buckets in backward.

    Args:
        optimizer: The optimizer, extended with ``flat=True``.
        flat: What steps it over flat shards.
        owners: The models whose parameters it holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatStep, owners: Sequence[OptimizedModel]) -> None:
        self._optimizer, self._flat, self._owners = optimizer, flat, owners
        self._step = compat.step_without_hooks(type(optimizer))
        self._counts_calls = counts_calls(optimizer)

    def later(self) -> dict[str, str]:
        """Return the buckets that the optimizer's step is left to, each with the reason."""
        runs = self._flat.runs_by_bucket()
        found = {}
        for owner in self._owners:
            for bucket in owner.buckets:
                if bucket.plan.requires_grad and (why := self._why_later(bucket, runs.get(bucket, []))):
                    found[bucket.plan.name] = why
        return found

    def _why_later(self, bucket: Bucket, runs: Sequence[tuple[dict[str, Any], Any]]) -> str:
        if self._counts_calls:
            return "the optimizer counts steps by itself, and each bucket would count as one"
        if compat.has_step_hooks(self._optimizer):
            return "the optimizer has hooks, which run before a step and after it"
        if bucket.plan.offload is not None:
            return "its gradient is copied to host memory"
        if bucket.plan.keeps_memory:
            return "its gradient keeps its memory (cuda_graph_mode)"
        if bucket.plan.inspected:
            return "gradients are checked for NaN first (report_nan_in_param_grad)"
        if sum(len(run.params) for _, run in runs) != len(bucket.params) or not all(bucket.trains):
            return "the optimizer does not hold all of its parameters, or some are frozen"
        if any(vars(param).get(ACCUMULATE_HOOKS) for param in bucket.params):
            return "hooks of its parameters look at .grad"
        return ""

    def begin(self) -> None:
        """Prepare for the first forward of a step. What earlier forwards owe their backwards is not waited for."""
        for owner in self._owners:
            for bucket in owner.buckets:
                bucket.contributions = 0

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """Context of the last backward before the optimizer's step. If it raises, some buckets may have been stepped,
        and the models say so."""
        self._flat.stepped.clear()
        runs = self._flat.runs_by_bucket()
        buckets = [bucket for owner in self._owners for bucket in owner.buckets]
        eligible = [bucket for bucket in buckets if not self._why_later(bucket, runs.get(bucket, []))]
        for owner in self._owners:
            owner.step_tracker.begin_backward()
        try:
            for bucket in eligible:
                bucket.consumer = BucketStep(self._flat, bucket, runs[bucket], self._step)
            yield
        except BaseException as error:
            for owner in self._owners:
                owner.step_tracker.fail(error)
            raise
        finally:
            for bucket in eligible:
                bucket.consumer = None

    def end(self) -> None:
        """The optimizer's step, which has stepped the other buckets, is over."""
        for bucket in self._flat.stepped:
            bucket.used_now.clear()
        self._flat.stepped.clear()
