"""What happens after a failure: training goes on if all ranks have failed alike; otherwise ``model.reset()``.

After a failure on some ranks only, these ranks have not started collectives that others have. The next collectives
would be matched with those: wrong values if sizes happen to be equal, a hang if not.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist

from .. import compat
from ..eager.engine import EagerRuntime
from ..lanes.stage import Joint
from ..memory import devices
from ..memory.bucket import Bucket
from ..memory.comm_buffers import BufferPool
from ..memory.registration import Registration
from ..optim.step_tracker import StepTracker
from ..program_lines import warn
from ..ranks.agreement import has_others
from ..ranks.collective_order import LOST, RESET, RESET_METHOD
from ..ranks.coordinator import Coordinator
from ..ranks.watchdog import watchdog
from ..step.grad_sync import GradSync
from .membership import Membership


class Recoverable(Protocol):
    """What recovery needs of a :class:`~.sharded_model.ShardedModel`."""

    buckets: tuple[Bucket, ...]
    captured_steps: weakref.WeakSet[Any]
    comm_buffers: BufferPool
    coordinator: Coordinator
    eager: EagerRuntime
    grad_sync: GradSync
    members: Membership
    joint: Sequence[Joint]
    registration: Registration | None
    step_tracker: StepTracker

    @property
    def parameter_names(self) -> list[str]: ...

    def label_modules(self) -> None:
        """Make changes of all buckets visible to Dynamo's guards."""


def recover(model: Recoverable) -> None:
    """Check, before the next collective after a failure, that all ranks have failed in the same place.

    Raises:
        RuntimeError: They have not, or a process group does not work any more.
    """
    coordinator, members = model.coordinator, model.members
    stopped = f"stopped after {coordinator.started} collectives with {coordinator.failure}"
    model.eager.abandon()
    try:
        coordinator.order.check()
        # Ranks that are waiting for this one arrive here once they have timed out.
        coordinator.agree("The step before failed", [stopped])
        _settle(model)
        groups = [*(group for topology in members.topologies for group in topology.groups), *members.partition_groups]
        for group in groups if has_others(members.agreeing) else ():
            group.probe(members.topology.mesh.device_type)  # the failure on all ranks may have been a collective's
    except RuntimeError as error:
        coordinator.order.stalled = coordinator.order.stalled or str(error)
        if coordinator.order.was_aborted:  # the error says that weights are lost
            raise
        raise RuntimeError(
            f"{error} This rank has {stopped}. Call {RESET}. Training can then continue from the current weights."
        ) from None
    coordinator.forget_failure()
    for each in model.joint:
        each.forget()
    for bucket in model.buckets:
        bucket.set_plan(bucket.plan)


def _settle(model: Recoverable) -> None:
    """Wait for what the step that failed has started: collectives, and copies to and from the host."""
    model.eager.settle()
    for device in {bucket.device for bucket in model.buckets}:
        for settle in devices.settlers:
            settle(device)


def reset(model: Recoverable) -> None:
    """Start over after a failure: new process groups of the same ranks, no gradients, nothing running.

    Process groups of the program that cannot be used any more since the failure are connected again.

    Raises:
        RuntimeError: Not all ranks called this within four process group timeouts, the longest time until each of them
            has its error.
    """
    closed, was_aborted = _agree_on_closed_groups(model), model.coordinator.order.was_aborted
    watchdog.leave(model.coordinator)
    for step in model.captured_steps:
        step.reset()  # graphs hold on to the communicators of the process groups
    model.eager.abandon()
    _settle(model)
    for bucket in model.buckets:
        bucket.forget_resident()
    for each in model.joint:
        each.forget()
    registered = model.registration is not None and model.registration.is_active
    if model.registration is not None:
        model.registration.end()
    model.comm_buffers.drop()
    for name, ranks in closed:
        _reconnect(name, ranks, model.members.agreeing)
    model.members.renew()
    model.eager.step.forget_announcements()
    model.coordinator.failure = None
    model.step_tracker.reset()
    model.coordinator.rejoin(model.parameter_names)
    model.grad_sync.reset()
    for bucket in model.buckets:
        bucket.set_plan(bucket.plan)
    if registered:
        model.registration.register(model.buckets)  # type: ignore[union-attr]
    model.label_modules()
    if was_aborted:
        warn(f"{model.coordinator.name} was reset after a wait on GPUs was aborted. {LOST}.", RuntimeWarning)


def _agree_on_closed_groups(model: Recoverable) -> list[tuple[str, list[int]]]:
    """Wait for all ranks. Return the process groups, except the model's own, that cannot be used since the failure.

    Each comes with its ranks. They were closed to end waits, or failed collectives have used them.
    """
    coordinator, agreeing = model.coordinator, model.members.agreeing
    if not has_others(agreeing):
        return []
    closed = set(compat.broken_groups())
    if coordinator.failure is not None or coordinator.order.stalled is not None:
        closed.update(map(compat.process_group, coordinator.communicators))
    renewed = {group for group in map(compat.process_group, coordinator.communicators) if compat.is_own(group)}
    mine = [(group.group_name, dist.get_process_group_ranks(group)) for group in closed - renewed]
    found = coordinator.conclude(RESET_METHOD, [], mine, _union, patience=4, is_last_resort=True)
    return [(name, ranks) for name, ranks in found if compat.known_groups().get(name) == ranks]


def _union(offers: Sequence[Sequence[Any]]) -> list[Any]:
    return sorted({(name, tuple(ranks)) for groups in offers for name, ranks in groups})


def _reconnect(name: str, ranks: Sequence[int], agreeing: dist.ProcessGroup) -> None:
    """Connect a process group of the program again. The model itself gets new groups: this one is the program's."""
    group = compat.process_group(name)
    if set(dist.get_process_group_ranks(agreeing)).issuperset(ranks) and watchdog.reconnect(group):
        return
    if compat.is_own(group):
        return  # of another model: its own reset replaces it
    warn(
        f"Process group {name!r} of ranks {list(ranks)[:8]} was closed to end the wait of a rank, and {RESET_METHOD} "
        "cannot connect it again: it has other ranks than the model, another backend than gloo, or was closed too "
        "often. Replace it where the program uses it (torch.distributed.new_group).",
        RuntimeWarning,
        by=ranks[0],
    )
