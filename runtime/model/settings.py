"""Settings of a sharded model that can change between steps. All ranks change them alike."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ..geometry.topology import Accumulation, Topology
from ..memory.bucket import Bucket
from ..plan.precision import Policies
from ..schedule.schedule import Schedule
from .sharded_model import ShardedModel


def set_schedule(model: ShardedModel, schedule: Schedule) -> None:
    """Change how early units are gathered and how late reductions are awaited, eagerly and in compiled code.

    A collective. Compiled graphs are compiled again.

    Raises:
        RuntimeError: A step is in progress, or ranks ask for different schedules. Nothing has changed.
        ValueError: The schedule has a text that the model cannot follow. Nothing has changed.
    """
    model.refuse_in_step("The schedule was changed")
    model.coordinator.agree("set_schedule", [str(schedule)])
    model.eager.follow(schedule)
    model.schedule = schedule
    model.label_modules()


def set_reshard_after_forward(model: ShardedModel, buckets: Collection[Bucket], value: bool) -> None:
    """Change what happens to buckets between forward and backward. Compiled graphs are compiled again.

    Raises:
        RuntimeError: A step is in progress.
    """
    model.refuse_in_step("reshard_after_forward was changed")
    for bucket in buckets:
        bucket.set_plan(replace(bucket.plan, reshard_after_forward=value))
    model.label_modules_of(*buckets)


def set_reshard_after_backward(model: ShardedModel, buckets: Collection[Bucket], value: bool) -> None:
    """Set whether buckets are released after backward, or stay gathered until the step's gradients are reduced.

    May be called between microbatches: sums of gradients do not depend on it.

    Raises:
        RuntimeError: A forward is running.
        ValueError: The strategy does not support it. Nothing has changed.
    """
    if model.eager.is_in_window:
        raise RuntimeError(
            "reshard_after_backward was changed while a forward is running. Do it before or after the forward."
        )
    _set_topologies(
        model,
        {
            bucket: bucket.accumulating(replace(bucket.topology.accumulation, keeps_gathered=not value))
            for bucket in buckets
            if bucket.topology.accumulation.keeps_gathered == value
        },
    )


def set_gradient_divide_factor(model: ShardedModel, buckets: Collection[Bucket], factor: float) -> None:
    """Divide the sum of gradients over ranks by ``factor`` instead of the number of ranks."""
    for bucket in buckets:
        bucket.set_plan(replace(bucket.plan, reduce_op="sum", scale=1 / factor))
    model.label_modules_of(*buckets)


def set_precision(model: ShardedModel, precision: Policies) -> None:
    """Change the dtype in which gradients are reduced. Compiled graphs of other dtypes are kept for later use."""
    model.precision = precision
    policies = list(precision)
    for bucket in model.buckets:
        plan = bucket.plan
        policy = policies[plan.policy]
        plugins = policy.formatted(plan.plugins)
        reduced_in = policy.comm_dtype(plan.model_dtype, plan.compute_dtype)
        bucket.set_plan(replace(plan, comm_dtype=reduced_in, plugins=plugins))
    model.label_modules()


def set_accumulation(model: ShardedModel, accumulation: Accumulation) -> None:
    """Change what is kept between microbatches. Compiled graphs are compiled again.

    Raises:
        RuntimeError: A step is in progress.
        ValueError: The strategy does not support it. Nothing has changed.
    """
    model.refuse_in_step("What stays between microbatches was changed")
    topologies = [bucket.accumulating(accumulation) for bucket in model.buckets]
    model.members.set_accumulation(accumulation)
    _set_topologies(model, dict(zip(model.buckets, topologies, strict=True)))


@contextlib.contextmanager
def gathered(model: ShardedModel, most: int | None) -> Iterator[None]:
    """Context in which buckets stay gathered between uses: the first ones, up to ``most`` bytes; None: all of them.

    A collective.

    Raises:
        RuntimeError, ValueError: See :meth:`set_accumulation`.
    """
    model.refuse_in_step("Parameters were to be kept gathered")
    before, kept, room = model.topology, {}, most
    for bucket in model.buckets:
        if bucket.topology.gather_group is None or bucket.plan.is_extension:
            continue
        if room is not None and bucket.plan.gathered_bytes > room:
            break
        room = None if room is None else room - bucket.plan.gathered_bytes
        kept[bucket] = bucket.accumulating(replace(bucket.topology.accumulation, keeps_gathered=True))
    released = {bucket: bucket.topology for bucket in kept}
    if kept and not any(bucket.topology.gather_group for bucket in model.buckets if bucket not in kept):
        # No forward has collectives of its own then, so ranks need not run the same forwards.
        model.members.topology = before.accumulating(replace(before.accumulation, keeps_gathered=True))
    try:
        _set_topologies(model, kept)
        model.refresh()
        yield
    finally:
        model.members.topology = before
        _set_topologies(model, released)


def _set_topologies(model: ShardedModel, topologies: Mapping[Bucket, Topology]) -> None:
    for bucket, topology in topologies.items():
        bucket.set_plan(bucket.plan, topology)
    model.label_modules()
