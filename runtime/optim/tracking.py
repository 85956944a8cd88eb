"""Which optimizers hold which parameters of a model, and when they step.

``zero_grad`` of one optimizer leaves the gradients of other optimizers alone, because their step may come later
(``first.step(); first.zero_grad(); second.step()``).

A step that one rank skips, or does not finish, leaves rows of different weights. Models are therefore notified of every
step, no matter which code created the optimizer.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .. import compat
from ..memory.bucket import Bucket, handle_of
from ..owner import owners_of
from ..program_lines import warn
from ..ranks.coordinator import Coordinator
from ..step.grad_sync import GradSync
from .own_steps import has_sharded_step
from .state import cut_distributed_state
from .step_tracker import StepTracker

_CUTS = "_mfsdp_cuts_state"
"""Attribute of optimizers that cut what they load; see :func:`.cut_distributed_state`."""


class OptimizedModel(Protocol):
    """What optimizers need of a sharded model."""

    @property
    def buckets(self) -> tuple[Bucket, ...]: ...

    @property
    def coordinator(self) -> Coordinator: ...

    @property
    def grad_sync(self) -> GradSync: ...

    @property
    def step_tracker(self) -> StepTracker: ...

    @property
    def optimizers(self) -> Optimizers: ...

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are zeroed where they would be dropped."""

    def shared_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that all ranks have, by name."""

    def refresh(self, ahead: bool = False) -> None:
        """Start gathering stale residents, possibly ahead of the forward that uses them."""

    def await_gathers(self) -> None:
        """Wait for the gathers that :meth:`refresh` has started."""

    def zero_gradients(self, set_to_none: bool, kept: Collection[int] | None) -> None:
        """Zero or drop gradients of parameters whose ``id`` is not in ``kept``."""


class Optimizers:
    """The optimizers over the parameters of one model, as long as they live.

    Extended optimizers register themselves. Torch keeps no list of the others. They are searched for among all objects,
    which takes a tenth of a second. This happens only for parameters that no known optimizer holds and that have more
    references than at the last search, so that training a part of a model does not pay for it in each step.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_new = False
        self._references: dict[int, int] = {}
        """Reference counts of parameters that no optimizer held, by ``id``."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer that was extended. It may replace one that is no longer used."""
        self._known.add(optimizer)
        self._has_new = True

    def others_hold(self, params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> set[int]:
        """Return the ``id`` of each of ``params`` that another optimizer holds, and ``optimizer`` does not."""
        if self._has_new:
            gc.collect()  # an extended optimizer is in a reference cycle, so an unused one may still exist
            self._has_new = False
        free = self._free(params)
        if any(count > self._references.get(key, 0) for key, count in free.items()):
            for found in gc.get_objects():
                if issubclass(type(found), torch.optim.Optimizer) and not free.keys().isdisjoint(_held(found)):
                    self._known.add(found)
            self._references = self._free(params)
        others = {key for other in self._known if other is not optimizer for key in _held(other)}
        return others - _held(optimizer)

    def _free(self, params: Sequence[nn.Parameter]) -> dict[int, int]:
        """Return the reference count of each trainable parameter that no known optimizer holds, by ``id``."""
        held = {key for known in self._known for key in _held(known)}
        return {id(param): sys.getrefcount(param) for param in params if param.requires_grad and id(param) not in held}


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


@functools.cache
def watch_steps() -> None:
    """Notify models of the steps of all optimizers over their parameters. Once per process."""
    register_optimizer_step_pre_hook(_begin)
    register_optimizer_step_post_hook(_end)


@compat.python_only
def _begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    owners = _models(optimizer)
    if owners and _CUTS not in vars(optimizer):
        cut_distributed_state(optimizer)
        compat.complete_hooks(optimizer)
        optimizer.register_load_state_dict_post_hook(cut_distributed_state)
        vars(optimizer)[_CUTS] = True
        if isinstance(optimizer, torch.optim.Muon):
            _warn_of_gathers(optimizer, owners)
    for owner in owners:
        owner.step_tracker.begin(optimizer)


def _warn_of_gathers(muon: torch.optim.Muon, owners: Sequence[OptimizedModel]) -> None:
    """Tell that Muon gathers matrices, if it is torch's own."""
    if has_sharded_step(muon) or all(bucket.topology.shards == 1 for owner in owners for bucket in owner.buckets):
        return
    warn(
        "Muon's step gathers every matrix on every rank, and each rank orthogonalizes all of them. After optimizer = "
        "fully_shard_optimizer(optimizer), each matrix travels to one rank, which orthogonalizes it for all.",
    )


@compat.python_only
def _end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for owner in _models(optimizer):
        owner.step_tracker.end()


def _models(optimizer: torch.optim.Optimizer) -> list[OptimizedModel]:
    """Return the models whose parameters an optimizer holds."""
    handles = (handle_of(param) for group in optimizer.param_groups for param in group["params"])
    return owners_of(handle.bucket for handle in handles if handle is not None)
