"""A schedule as the eager path follows it: by unit and bucket of one model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ..geometry.exchange import Overlap
from ..memory.bucket import Bucket
from ..schedule.decisions import Decisions
from ..schedule.phase import Phase
from ..schedule.schedule import Schedule
from .units import EagerUnit

if TYPE_CHECKING:
    from ..schedule.file import ScheduleText


class FollowedSchedule:
    """What the eager path does early and late. In each step, in the order in which that step uses units.

    Args:
        schedule: The schedule.
        units: Units in registration order.
        overlap: Kinds of collectives that may overlap with computation.

    Attributes:
        ahead, ahead_in_backward: How many units before its use each unit's gather starts.
        furthest: The largest of these numbers.
        kept: Whether buckets of a text stay gathered from forward to backward. Of others, their plans and ``keep_last``
            say so.
        keep_last: Whether the unit that forward uses last stays.
        before_reduction: Units whose gathers start right before a bucket's reduction.
        reductions_in_flight: How many units' reductions may run.
        behind: For buckets of a text: how many later reductions start before theirs is awaited, and whether it is
            awaited right before the last of them starts instead of after it.
        largest_ahead: Largest unit, in gathered bytes, that is gathered ahead.
        largest_in_flight: Most bytes of reductions in flight.

    Raises:
        ValueError: The schedule has a text that the model cannot follow.
    """

    def __init__(self, schedule: Schedule, units: Sequence[EagerUnit], overlap: Overlap) -> None:
        self.schedule = schedule
        buckets = [bucket for unit in units for bucket in unit.buckets]
        decided = schedule.decisions([bucket.plan.name for bucket in buckets], [bucket.plan.unit for bucket in buckets])
        if schedule.text is not None:
            _check_portions(schedule.text, [buckets[index] for index in decided.portions or ()])
        policy, has_text = schedule.policy, schedule.text is not None

        number = {bucket: index for index, bucket in enumerate(buckets)}

        def ahead(unit: EagerUnit, phase: Phase) -> int:
            indices = [number[bucket] for bucket in unit.buckets]
            if phase in decided.gathers and decided.gathers[phase].keys().isdisjoint(indices):
                return 0
            found = decided.gather(phase, indices, unit.gathered_bytes, policy, overlap.gathers)
            return found.units if found.reduction is None else 0

        self.ahead = {unit: ahead(unit, Phase.FORWARD) for unit in units}
        self.ahead_in_backward = {unit: ahead(unit, Phase.BACKWARD) for unit in units}
        self.ahead_in_backward |= dict.fromkeys(filter(_is_of_embeddings, units), 0)
        self.furthest = max([*self.ahead.values(), *self.ahead_in_backward.values()], default=0)
        self.before_reduction = _before_reduction(decided, units) if overlap.gathers else {}
        both_ways = {Phase.FORWARD, Phase.BACKWARD} <= decided.gathers.keys()
        listed = decided.gathers[Phase.FORWARD] if both_ways else ()
        self.kept = {buckets[index]: index in decided.kept for index in listed}
        self.keep_last = policy.keep_last
        self.reductions_in_flight = policy.reductions_in_flight if overlap.reductions else 0
        self.behind = {buckets[index]: (each.later, each.packed) for index, each in decided.reductions.items()}
        self.largest_in_flight = sys.maxsize if has_text else policy.reduction_bytes
        self.largest_ahead = -1 if not overlap.gathers else sys.maxsize if has_text else policy.prefetch_bytes


def _is_of_embeddings(unit: EagerUnit) -> bool:
    """Whether no backward needs the unit's values. If one does, such as a recomputation, it gathers them."""
    locations = [location for bucket in unit.buckets for locations in bucket.locations for location in locations]
    return all(isinstance(location.holder(), nn.Embedding) for location in locations)


def _before_reduction(decided: Decisions, units: Sequence[EagerUnit]) -> dict[Bucket, list[EagerUnit]]:
    holders = [(bucket, unit) for unit in units for bucket in unit.buckets]
    found: dict[Bucket, list[EagerUnit]] = {}
    for index, ahead in decided.gathers.get(Phase.BACKWARD, {}).items():  # in the order of the text
        if ahead.reduction is not None:
            due, unit = found.setdefault(holders[ahead.reduction][0], []), holders[index][1]
            due += [unit] if unit not in due else []
    return found


def _check_portions(text: ScheduleText, buckets: Sequence[Bucket]) -> None:
    few = text.portions
    for bucket in buckets:
        if bucket.plan.portions != few:
            raise ValueError(
                f"{text.where}: [backward] gathers portions of {few} for {bucket.plan.name!r}, of which "
                f"forward keeps none. Shard the model with reshard_after_forward={few}, or take the portions out."
            )
