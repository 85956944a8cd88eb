"""Optimizer steps over one model, as ranks must take them: all of them, and completely."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from .. import compat
from ..memory.bucket import Bucket
from ..memory.tensor import refuse_unreduced
from ..program_lines import warn
from ..ranks.agreement import everyones
from ..ranks.collective_order import RESET
from ..ranks.coordinator import Coordinator


class StepTracker:
    """Notices steps that a rank skips, or does not finish: its rows would belong to other weights.

    Args:
        buckets: The model's buckets.
        coordinator: Compares steps with other ranks, and counts them.
    """

    def __init__(self, buckets: Sequence[Bucket], coordinator: Coordinator) -> None:
        self._buckets = buckets
        self._coordinator = coordinator
        self._running: torch.optim.Optimizer | None = None
        self._version = 0  # of the weights, when the running step began
        self._ahead: int | None = None  # the version before a backward that steps buckets ahead of the step
        self._is_half_done = False  # a step has changed some weights and not others
        self._failed_in_backward = False  # ... in a backward, after which a program may well go on

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer that is about to change weights.

        All ranks must take the step, or their rows would belong to different weights. Inside a backward (one step per
        parameter, in a hook) nothing is compared, because ranks may take these steps in different orders.
        """
        if optimizer is self._running or compat.in_backward():
            return
        self._refuse_unreduced({id(param) for group in optimizer.param_groups for param in group["params"]})
        ahead, self._ahead = self._ahead, None
        self.check()
        # What a backward has stepped over has no gradient any more, and that may differ between ranks.
        self._coordinator.enter_step(
            type(optimizer).__name__,
            lambda: [*_settings(optimizer), *(self._without_gradient if ahead is None else ())],
        )
        self._running = optimizer
        self._version = self._weights_version if ahead is None else ahead

    def begin_backward(self) -> None:
        """Handle a backward that steps buckets ahead of the optimizer's step, which must follow."""
        self.check()
        self._ahead = self._weights_version

    def _refuse_unreduced(self, params: Set[int]) -> None:
        """Raise RuntimeError, before weight decay changes anything, if a gradient is incomplete.

        Not every deferred gradient shows: a parameter may have an older gradient, or zeros.

        Args:
            params: ``id`` of the parameters that are about to change.
        """
        for bucket in self._buckets:
            if bucket.deferred_total is None:
                continue
            for param, gradient, split in zip(bucket.params, bucket.gradients, bucket.splits, strict=True):
                if id(param) in params and gradient is not None:
                    refuse_unreduced(split.name)

    @property
    def _without_gradient(self) -> list[str]:
        """Lines about trainable parameters that the step leaves alone, except experts, which each rank has of its own.

        Ranks compare them where they agree on the step, as they do on the first.
        """
        everyones = self._coordinator.members.topology
        return [
            f"no gradient of {split.name!r}"
            for bucket in self._buckets
            if bucket.plan.requires_grad and bucket.topology is everyones
            for gradient, split in zip(bucket.gradients, bucket.splits, strict=True)
            if gradient is None
        ]

    def end(self) -> None:
        """Mark the step that began last as complete."""
        if self._running is not None:
            self._running = None
            self._coordinator.steps += 1

    def fail(self, error: BaseException, in_backward: bool = False) -> None:
        """Handle an error from the step that began last, if one has begun.

        If the step has changed no weight, it may be repeated. Ranks compare that before the next forward.

        Args:
            in_backward: Whether a backward has stepped over some buckets.
        """
        version = self._ahead if self._ahead is not None else self._version if self._running is not None else None
        has_changed = version is not None and self._weights_version != version
        self._is_half_done |= has_changed
        self._failed_in_backward |= in_backward or (has_changed and self._ahead is not None)
        self._running = self._ahead = None
        self._coordinator.fail(error, is_certain=has_changed)

    def check(self) -> None:
        """Raise RuntimeError if an optimizer's step was interrupted in the middle of its changes."""
        if self._ahead is not None and self._ahead != self._weights_version:  # interrupted where nothing could tell
            self.fail(RuntimeError("a step in backward that was interrupted"))
        if self._failed_in_backward:
            raise RuntimeError(
                f"A backward failed on this rank after {self._coordinator.name} had been stepped in part: some weights "
                f"are from after the step, others from before. Call {RESET}, and load a checkpoint."
            )
        if self._running is None or compat.is_running(self._running):  # a running step may call a closure
            return
        if self._weights_version == self._version:
            self.fail(RuntimeError(f"a step of {type(self._running).__name__} that was not made"))
            return
        try:
            raise RuntimeError(
                f"The last step of {type(self._running).__name__} over {self._coordinator.name} was not finished on "
                f"this rank: some weights are from after it, others from before. Call {RESET}, and load a checkpoint."
            )
        except RuntimeError as error:
            self.fail(error)
            raise

    @property
    def progress(self) -> tuple[Any, ...]:
        """What is known of steps. A step that was captured has changed nothing: set it to what was known before."""
        return self._running, self._version, self._ahead, self._is_half_done, self._failed_in_backward

    @progress.setter
    def progress(self, known: tuple[Any, ...]) -> None:
        self._running, self._version, self._ahead, self._is_half_done, self._failed_in_backward = known

    def reset(self) -> None:
        """Start over. Warn if ranks hold rows of different weights, after different numbers of steps. A collective."""
        half = self._is_half_done or self._running is not None or self._ahead is not None
        self._is_half_done = self._failed_in_backward = False
        self._running = self._ahead = None
        group = self._coordinator.members.group
        everyone = everyones((self._coordinator.steps, half), group, "optimizer steps")
        if len(set(everyone)) == 1 and not half:
            return
        ranks = dist.get_process_group_ranks(group)
        each = [
            f"rank {r} {count}{' and a part of one' if half else ''}"
            for r, (count, half) in zip(ranks, everyone, strict=True)
        ]
        warn(
            f"{self._coordinator.name} was reset after {', '.join(each[:8])}{', ...' if len(each) > 8 else ''} "
            "optimizer steps: its rows come from different steps. Load a checkpoint before you continue training.",
            RuntimeWarning,
            by=ranks[0],
        )
        self._coordinator.steps = max(count for count, _ in everyone)

    @property
    def _weights_version(self) -> int:
        return sum(bucket.flat._version for bucket in self._buckets)


def _settings(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return lines about the numbers, words and pairs of numbers in an optimizer's groups."""
    return [
        f"{name} of group {number} is {value!r}"
        for number, group in enumerate(optimizer.param_groups)
        for name, value in sorted(group.items())
        if isinstance(value, (bool, int, float, str, tuple))
    ]
