"""What the parts of the eager path share while a step runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import compat
from ..geometry.bucket_plan import BucketPlan
from ..geometry.groups import Group
from ..memory.bucket import Bucket
from ..memory.comm_buffers import BufferPool
from ..owner import Owned
from ..ranks.coordinator import Announcement, Coordinator
from ..ranks.outstanding import Outstanding
from ..step.grad_sync import GradSync


class EagerOwner(Protocol):
    """What the eager path needs of its model."""

    @property
    def coordinator(self) -> Coordinator: ...

    @property
    def grad_sync(self) -> GradSync: ...

    @property
    def comm_buffers(self) -> BufferPool: ...

    def fsdp2s_policy(self, plan: BucketPlan) -> MixedPrecisionPolicy:
        """Return a bucket's policy as FSDP2's class."""

    def leave_backward(self) -> None:
        """Outside of backward, clean up after a backward that was entered and not finished: it has raised.

        After a failure, raises unless all ranks have failed in the same place.
        """

    def failed(self, error: BaseException) -> None:
        """A forward, or a collective in backward, has raised."""

    def check_complete(self) -> None:
        """Raise if the model has parameters that are in no bucket."""

    def notice_writes(self) -> None:
        """Find writes to shards that left no trace."""

    def refresh(self, ahead: bool = False) -> None:
        """Quantize changed shards, and start gathering stale residents, possibly ahead of the forward that uses
        them."""


class StepContext(Owned[EagerOwner]):
    """The state of the running step, if one runs, for all parts of the eager path; how collectives start and are
    awaited.

    Args:
        buckets: The buckets, in the order of their units.

    Attributes:
        depth: Number of windows that are open.
        complete: Buckets whose gradients the running backward has computed.
        outstanding: Collectives of failed steps.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.depth = 0
        self.complete: set[Bucket] = set()
        self.outstanding = Outstanding()
        self._numbers = {bucket: number for number, bucket in enumerate(buckets)}
        self._announced: dict[tuple[str, str, Bucket], Announcement] = {}

    @property
    def is_capturing(self) -> bool:
        """Whether what runs is captured in a CUDA graph, perhaps by the program, and only a part of a forward."""
        return self.owner.coordinator.is_capturing

    def announce(self, what: str, bucket: Bucket, group: Group | None, more: str = "") -> None:
        """Announce a collective of a bucket over ``group``; None: it is skipped this time.

        Args:
            more: What tells it apart from other collectives of the bucket.
        """
        coordinator = self.owner.coordinator
        announced = self._announced.get((what, more, bucket))
        if announced is None or announced.group is not group or announced.model != coordinator.name:
            series = f"{what}{more}", self._numbers[bucket]
            announced = coordinator.announcement(f"{what} {bucket.plan.name}{more}", group, series)
            self._announced[what, more, bucket] = announced
        try:
            coordinator.announce(announced)
        except RuntimeError as error:
            self.owner.failed(error)
            raise

    def forget_announcements(self) -> None:
        """Forget the names of process groups, because these were created again."""
        self._announced.clear()

    def wait(self, started: Tensor, how: Callable[..., Tensor] = compat.wait_tensor, *arguments: Any) -> Tensor:
        """Return the result of a collective."""
        try:
            with compat.below_autograd():
                return how(started, *arguments)
        except RuntimeError as error:
            self.owner.failed(error)  # in a backward, nothing else catches it
            raise


def as_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Create gathered parameters as ordinary tensors without history, wherever they are gathered.

    This includes inference mode and the inside of ``torch.func.grad``, ``vmap`` and similar transforms.
    """

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with compat.below_function_transforms():
            if not torch.is_inference_mode_enabled():
                return function(*args)
            with torch.inference_mode(False), torch.no_grad():
                return function(*args)

    return wrapped


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide gathers from a user's selective checkpointing, which saves and counts operators.

    Which gathers run in a block depends on what is gathered already.
    """

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with compat.outside_selective_checkpoint():
            return function(*args)

    return wrapped
