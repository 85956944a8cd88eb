"""An optimizer's step over each bucket as soon as the bucket's gradient has arrived, in backward.

    gradients -> reduce-scatter -> wait -> the optimizer's own step over this bucket -> gradient's memory is free

Of a bucket in host memory, the CPU steps over the shard while the device runs the backward of the next units.

A bucket's gradient is then in memory for a moment only, and parameters have no ``.grad``. Each bucket is stepped by the
optimizer itself, over flat shards (:mod:`.flat_step`), so that numbers, state, groups and state dicts are those of
``optimizer.step()``. ``optimizer.step()`` still follows, and steps what is left.

What is left (:meth:`StepInBackward.later`, and what :meth:`BucketStep.__call__` refuses)
    * All buckets in the first step: its checks compare gradients between ranks before anything changes, and it shows
      which gradients have other sources than the model's forward.
    * A bucket whose step needs more than the gradient, or whose gradient the program may read after the backward.
    * A bucket with a parameter that this backward has not used. Whether such a parameter has a gradient is known after
      the backward, when all ranks have said what they used.
    * A bucket with gradients from a forward that this backward does not reach, or from a backward inside of the
      backward (reentrant checkpointing).
    * In eager mode, a bucket whose shards are the parameters that modules compute with, as with ``no_shard``: autograd
      may still need their values.

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

from ... import compat
from ...memory import gradients
from ...memory.bucket import Bucket
from ...memory.tensor import ACCUMULATE_HOOKS
from ...optim.kinds import may_count_calls, why_not_flat
from ...optim.tracking import OptimizedModel
from ...ranks.collective_order import RESET
from .flat_step import FlatStep, Run
from .update_kernel import UpdateKernel, UpdateKernels

_HALF_DONE = (
    f"Some buckets have been stepped in this backward, and others have not: call {RESET}, and load a checkpoint."
)
_OTHER_SOURCES = "something else than the model's forward adds to its gradient, such as a penalty in the loss"


@dataclass(eq=False)
class BucketStep:
    """Steps one bucket when its gradient is complete. Implements :class:`~..memory.bucket.GradientConsumer`.

    Args:
        flat: Steps the optimizer over runs.
        bucket: The bucket.
        runs: Its runs.
        step: The optimizer's own step, without hooks.
        kernels: The compiled steps of the runs; empty: ``step`` runs.

    Attributes:
        backward: Id of the backward that the program has called; None: it has not begun.
    """

    flat: FlatStep
    bucket: Bucket
    runs: Sequence[Run]
    step: Callable[[torch.optim.Optimizer], Any]
    kernels: Sequence[UpdateKernel] = ()
    backward: int | None = None

    def __call__(self, total: Tensor, used: Collection[int], in_graph: bool) -> bool:
        bucket = self.bucket
        if bucket in self.flat.stepped:
            raise RuntimeError(
                f"{bucket.plan.name} got another gradient in the backward in which the optimizer has stepped over it. "
                f"Write the step out instead of compile_step. {_HALF_DONE}"
            )
        if len(used) != len(bucket.params) or bucket.contributions != 1 or not bucket.owner.grad_sync.is_due():
            return False
        if (bucket.is_used_at_rest and not in_graph) or compat.backward_id() != self.backward:
            return False
        return self.flat.step_bucket(self.runs, gradients.shown(bucket, total), self.step, self.kernels)


class StepInBackward:
    """Lets an optimizer step buckets in backward.

    Args:
        optimizer: The optimizer, extended with ``flat=True``.
        flat: What steps it over flat shards.
        owners: The models whose parameters it holds.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: FlatStep, owners: Sequence[OptimizedModel]) -> None:
        self._optimizer, self._flat, self._owners = optimizer, flat, owners
        self._steps: list[BucketStep] = []
        self._other_sources: set[Bucket] = set()
        self._has_begun = False

    @property
    def is_first(self) -> bool:
        """Whether the coming step is the first one, which steps over no bucket in backward."""
        return not self._has_begun or any(owner.coordinator.steps == 0 for owner in self._owners)

    @property
    def _buckets(self) -> list[Bucket]:
        return [bucket for owner in self._owners for bucket in owner.buckets]

    def later(self) -> dict[str, str]:
        """Return the buckets that the optimizer's step is left to, each with the reason."""
        return {bucket.plan.name: why for bucket, _, why in self._trained() if why}

    def _trained(self) -> Iterator[tuple[Bucket, Sequence[Run], str]]:
        """Yield the trained buckets with their runs, and why each is left to the optimizer's step; "": it is not."""
        runs, why_all = self._flat.runs_by_bucket(), self._why_all_later()
        for bucket in self._buckets:
            if bucket.plan.requires_grad:
                its = runs.get(bucket, [])
                yield bucket, its, why_all or self._why_later(bucket, its)

    def _why_all_later(self) -> str:
        if why := why_not_flat(self._optimizer):
            return why
        if self._flat.counts_calls:
            return "the optimizer counts steps by itself, and each bucket would count as one"
        if self._flat.has_hooks:
            return "code of the program runs before and after a step (a hook, or its own step or zero_grad)"
        return may_count_calls(self._optimizer)

    def _why_later(self, bucket: Bucket, runs: Sequence[Run]) -> str:
        if bucket.plan.inspected:
            return "gradients are checked for NaN first (report_nan_in_param_grad)"
        if sum(len(run.params) for run in runs) != len(bucket.params) or not all(bucket.trains):
            return "the optimizer does not hold all of its parameters, or some are frozen"
        if any(vars(param).get(ACCUMULATE_HOOKS) for param in bucket.params):
            return "hooks of its parameters look at .grad"
        return _OTHER_SOURCES if bucket in self._other_sources else ""

    def note_sources(self) -> None:
        """Find the buckets whose gradients have other sources, after a backward that has stepped over none."""
        self._has_begun = True
        self._other_sources |= {bucket for bucket in self._buckets if not gradients.is_as_installed(bucket)}

    def release_gradients(self) -> None:
        """Free the memory of gradients that keep it from step to step (``cuda_graph_mode``), after the first step."""
        for bucket, _, why in self._trained():
            if not why:
                gradients.clear(bucket)
                bucket.free_kept("gradient", "shown")

    @contextlib.contextmanager
    def stepping(self, kernels: UpdateKernels | None) -> Iterator[StepInBackward]:
        """Context of the last backward before the optimizer's step, and of the step.

        If it raises, some buckets may have been stepped. The models then refuse to go on.

        Args:
            kernels: Do the steps, where they can. None: the optimizer does.
        """
        if kernels is not None:
            kernels.begin_step()
        step = compat.step_without_hooks(type(self._optimizer))
        self._steps = [
            BucketStep(self._flat, bucket, runs, step, self._flat.kernels_of(runs, kernels))
            for bucket, runs, why in self._trained()
            if not why
        ]
        try:
            for owner in self._owners:
                owner.step_tracker.begin_backward()
            for each in self._steps:
                each.bucket.consumer = each
            yield self
        except BaseException as error:
            for owner in self._owners:
                owner.step_tracker.fail(error, in_backward=bool(self._flat.stepped))
            raise
        finally:
            self._disarm()
            self.end_step()

    def begin_backward(self) -> None:
        """The backward that the program has called begins; others may run inside of it."""
        for each in self._steps:
            each.backward = compat.backward_id()

    def end_backward(self) -> None:
        """The backward has ended. What is left is the optimizer's.

        Raises:
            RuntimeError: A bucket that was stepped has got a further gradient.
        """
        self._disarm()
        for bucket in self._flat.stepped:
            if bucket.has_gradients:
                raise RuntimeError(
                    f"{bucket.plan.name} has a gradient after the optimizer has stepped over it in backward: "
                    f"{_OTHER_SOURCES}, which the first step did not have. Write such steps out instead of "
                    f"compile_step. {_HALF_DONE}"
                )

    def _disarm(self) -> None:
        for each in self._steps:
            each.bucket.consumer = None
        self._steps = []

    def end_step(self) -> None:
        """Forget a step, and forwards without a backward."""
        self._flat.stepped.clear()
        for bucket in self._buckets:
            bucket.contributions = 0
