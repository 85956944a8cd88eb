"""What the host knows about a model and its optimizers between two calls of a step.

A captured graph is a transition from one such state to another: which operators run depends on the first one, and a
replay, which runs no Python, must leave the second one behind.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable
from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ...memory import gradients
from ...memory.bucket import Bucket
from ...memory.tensor import UnreducedGradient
from ...model.sharded_model import ShardedModel
from ...step.grad_sync import SyncSettings
from ..optimizers.flat_step import FlatStep, flat_step_of


@dataclass(frozen=True)
class _BucketState:
    """State of one bucket.

    Args:
        gradients: The gradient attached to each parameter, with its Python attributes; None: there is none.
        total: The deferred sum.
        kept: Whether the last gradient was deferred.
        provisional, used_now, clean: See :class:`.Bucket`.
        stale: Whether the resident must be made again before it is used.
        made_stale: Whether joint stages must run again before the bucket is used.
        shows_total: Whether gradients still show the sum in another dtype, which more is added to. Otherwise something
            has written to them, and the sum is what they show.
    """

    gradients: tuple[tuple[Tensor, dict[str, Any]] | None, ...]
    total: Tensor | None
    kept: bool
    provisional: frozenset[int]
    used_now: frozenset[int]
    clean: frozenset[int]
    stale: bool
    made_stale: bool
    shows_total: bool

    @staticmethod
    def of(bucket: Bucket) -> _BucketState:
        pending = bucket.pending
        return _BucketState(
            tuple(None if gradient is None else (gradient, dict(vars(gradient))) for gradient in bucket.gradients),
            pending.total if pending is not None else None,
            pending is not None and pending.kept,
            frozenset(bucket.provisional),
            frozenset(bucket.used_now),
            frozenset(bucket.clean),
            bucket.is_stale,
            bucket.is_made_stale,
            gradients.shows_total(bucket),
        )

    @property
    def key(self) -> Hashable:
        return (
            tuple(None if given is None else _kind(given[0]) for given in self.gradients),
            self.total is None,
            self.kept,
            self.provisional,
            self.used_now,
            self.clean,
            self.stale,
            self.made_stale,
            self.shows_total,
        )

    def restore(self, bucket: Bucket) -> None:
        for param, given in zip(bucket.params, self.gradients, strict=True):
            setattr(param, bucket.plan.grad_attribute, None if given is None else given[0])
            if given is not None:
                vars(given[0]).clear()
                vars(given[0]).update(given[1])
        gradients.mark_shown(bucket, self.shows_total)  # a replay writes, and no version counts that
        if bucket.pending is not None:
            bucket.pending.total, bucket.pending.kept = self.total, self.kept
        bucket.provisional, bucket.used_now, bucket.clean = (
            set(self.provisional),
            set(self.used_now),
            set(self.clean),
        )
        bucket.mark_resident(self.stale)
        bucket.mark_made(self.made_stale)


def _kind(gradient: Tensor) -> Hashable:
    return type(gradient), isinstance(gradient, UnreducedGradient) and gradient.zeroed


@dataclass(frozen=True)
class HostState:
    """State of one model.

    Args:
        buckets: State of each bucket.
        progress: See :attr:`.GradSync.progress`.
        settings: When reductions are due; see :class:`.SyncSettings`.
        steps: Number of optimizer steps so far.
        started: Number of collectives so far.
    """

    buckets: tuple[_BucketState, ...]
    progress: Any
    settings: tuple[Any, ...]
    steps: int
    started: int

    @staticmethod
    def of(model: ShardedModel) -> HostState:
        """Return the state between two steps, when nothing is running."""
        coordinator = model.coordinator
        return HostState(
            tuple(map(_BucketState.of, model.buckets)),
            model.grad_sync.progress,
            astuple(model.grad_sync.settings),
            coordinator.steps,
            coordinator.started,
        )

    @property
    def key(self) -> Hashable:
        """What decides which operators a step runs."""
        microbatches, _, use_varies = self.progress
        return bool(microbatches), use_varies, self.settings, tuple(bucket.key for bucket in self.buckets)

    def restore(self, model: ShardedModel, since: HostState | None = None) -> None:
        """Make this the state of the model.

        Args:
            since: State from which a graph leads to this one: counters advance by the difference. None: this is an
                earlier state of the model.
        """
        coordinator = model.coordinator
        if since is None:
            coordinator.steps, coordinator.started = self.steps, self.started
        else:
            coordinator.steps += self.steps - since.steps
            coordinator.started += self.started - since.started
            if self.steps != since.steps:  # what was gathered, or saved for a backward, is from before
                torch.autograd.graph.increment_version([bucket.flat for bucket in model.buckets])
        model.grad_sync.progress = self.progress
        for setting, value in zip(fields(SyncSettings), self.settings, strict=True):
            setattr(model.grad_sync.settings, setting.name, value)  # sync() and no_sync() hold the object
        for state, bucket in zip(self.buckets, model.buckets, strict=True):
            state.restore(bucket)


class OptimizerHostState:
    """State of one optimizer, without the values of its tensors.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = {name: _copy(value) for name, value in vars(optimizer).items()}
        self._state = {param: _copy(state) for param, state in optimizer.state.items()}
        self._groups = [_copy(group) for group in optimizer.param_groups]
        flat: FlatStep | None = flat_step_of(optimizer)
        self._runs = (
            [] if flat is None else [(run, *run.held()) for runs in flat.runs_by_bucket().values() for run in runs]
        )

    def restore(self) -> None:
        """Make this the optimizer's state."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        vars(optimizer).clear()
        vars(optimizer).update(self._attributes, param_groups=groups, state=state)
        state.clear()
        state.update(self._state)
        for group, saved in zip(groups, self._groups, strict=True):
            group.clear()
            group.update(saved)
        for run, *held in self._runs:
            run.hold(*held)


def _copy(value: Any) -> Any:
    """Return a copy of containers, with the same tensors."""
    if type(value) is dict:
        return {key: _copy(each) for key, each in value.items()}
    if type(value) is list:
        return list(map(_copy, value))
    is_container = isinstance(value, (set, deque)) or hasattr(value, "tobytes")
    return copy.copy(value) if is_container else value
