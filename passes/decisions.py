"""Decisions about a schedule: plain data, made from the policy, by the solver, or read from a file.

Four things can be chosen without changing what is computed: which buckets stay gathered between forward and backward, of
which others a portion stays, how early each gather starts, and how late each reduction is awaited. Starts and waits are
bound to other units, never to a time or an operator, so that a decision means the same for batches of other shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context import BucketInfo, Context, Phase, SchedulePolicy

__all__ = [
    "Ahead",
    "Behind",
    "Decisions",
    "Limit",
    "Why",
    "gather_by_policy",
    "kept_by_policy",
    "reductions_by_policy",
    "reductions_later",
]


class Limit(str, Enum):
    """What keeps a gather from starting earlier, or a reduction from being awaited later."""

    NONE = "nothing: it is early enough"
    POLICY = "the option prefetch"
    SIZE = "prefetch_bytes"
    IN_FLIGHT = "the option reductions_in_flight"
    IN_FLIGHT_SIZE = "reduction_bytes"
    BUDGET = "memory budget"
    BEGIN = "the beginning of the graph"
    OVERLAP = "overlap is switched off"
    FILE = "the schedule file"


@dataclass(frozen=True)
class Why:
    """Why something stands where it does.

    Args:
        limit: what keeps it from a better place.
        bytes: that are missing, if it is the memory budget.
        detail: more, in words.
    """

    limit: Limit
    bytes: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Ahead:
    """How early a gather starts.

    Args:
        units: before the wait of the gather that is this many units earlier; 0: right at its use.
        why: not earlier.
        reduction: number of a bucket: right before its gradients are packed, and not where ``units`` says.
    """

    units: int
    why: Why
    reduction: int | None = None


@dataclass(frozen=True)
class Behind:
    """How late the reduction of a bucket is awaited: when ``later`` later ones have started (0: at once), or, with
    ``packed``, right before the last of these is packed. The end of the graph, where there are not so many."""

    later: int
    why: Why
    packed: bool = False


@dataclass(frozen=True)
class Decisions:
    """Decisions about the graphs of one Dynamo graph, by number of the bucket in the context.

    The policy decides where gathers start and reductions are awaited that are missing here.

    Args:
        kept: Buckets that stay gathered from forward to backward.
        gathers: How early gathers start, by phase and bucket. Buckets of a unit start together, and each has an entry.
        reductions: How late reductions are awaited, by bucket.
        why_not_kept: Why other buckets are gathered again.
        portions: Buckets of which each rank keeps a portion, for the backward to gather. None: not decided.
    """

    kept: frozenset[int] = frozenset()
    gathers: Mapping[Phase, Mapping[int, Ahead]] = field(default_factory=dict)
    reductions: Mapping[int, Behind] = field(default_factory=dict)
    why_not_kept: Mapping[int, Why] = field(default_factory=dict)
    portions: frozenset[int] | None = None

    def gather(self, phase: Phase, buckets: Sequence[int], size: int, context: Context) -> Ahead:
        """Return how early the gathers of ``buckets`` start, which start together and are ``size`` bytes when gathered."""
        decided = self.gathers.get(phase, {})
        first = next((decided[bucket] for bucket in buckets if bucket in decided), None)
        return first or gather_by_policy(context.policy, size, context.overlap.gathers)

    def reductions_of(self, buckets: Sequence[int], context: Context) -> list[Behind]:
        """Return how late the reductions of ``buckets``, in the order in which they start, are awaited."""
        infos = [context.buckets[bucket] for bucket in buckets]
        by_policy = reductions_by_policy(context.policy, infos, context.overlap.reductions)
        return [self.reductions.get(bucket, policy) for bucket, policy in zip(buckets, by_policy, strict=True)]


def gather_by_policy(policy: SchedulePolicy, size: int, overlap: bool = True) -> Ahead:
    """Of a unit that is ``size`` bytes when it is gathered."""
    if not overlap:
        return Ahead(0, Why(Limit.OVERLAP))
    prefetch = 1 if policy.prefetch == "auto" else policy.prefetch
    if prefetch and size > policy.prefetch_bytes:
        return Ahead(0, Why(Limit.SIZE, detail=f"larger than prefetch_bytes ({policy.prefetch_bytes:,} B)"))
    return Ahead(prefetch, Why(Limit.POLICY))


def kept_by_policy(
    policy: SchedulePolicy, whole_model: bool, last_used: Mapping[int, Any], needed: Mapping[int, Any]
) -> frozenset[int]:
    """Buckets that stay gathered from forward to backward: with ``reshard_after_forward`` False whatever both use; else the
    one that forward uses last, if no other is used between that and its first use in backward.

    Args:
        last_used: where forward uses each bucket for the last time. Places can be compared.
        needed: where backward uses each for the first time.
    """
    if not whole_model or not last_used or not needed:
        return frozenset()
    if policy.reshard_after_forward is False:
        return frozenset(last_used.keys() & needed.keys())
    last, first = max(last_used, key=last_used.__getitem__), min(needed, key=needed.__getitem__)
    alone = len(last_used.keys() | needed.keys()) == 1
    return frozenset({last}) if policy.keep_last and last == first and not alone else frozenset()


def reductions_by_policy(policy: SchedulePolicy, buckets: Sequence[BucketInfo], overlap: bool = True) -> list[Behind]:
    """Of reductions of these buckets, in the order in which they start."""
    if not overlap:
        return [Behind(0, Why(Limit.OVERLAP)) for _ in buckets]
    laters = reductions_later([info.unit for info in buckets], policy.reductions_in_flight)
    sizes = [info.gathered_bytes for info in buckets]
    return [_bounded(policy.reduction_bytes, sizes[i : i + later + 1], later) for i, later in enumerate(laters)]


def _bounded(most: int, sizes: Sequence[int], later: int) -> Behind:
    """For a reduction of ``sizes[0]`` bytes, which those of the other sizes follow."""
    for count, size in enumerate(itertools.accumulate(sizes)):
        if count and size > most:
            why = Why(Limit.IN_FLIGHT_SIZE, detail=f"{size:,} B would be in flight")
            return Behind(count, why, packed=True)
    return Behind(later, Why(Limit.IN_FLIGHT))


def reductions_later(units: Sequence[str], in_flight: int) -> list[int]:
    """After how many later reductions each is awaited, so that those of ``in_flight`` units are under way: of a unit's buckets
    the last waits for the last one of the unit that is so many further on, the one before it for the one before, and so on.

    Args:
        units: of reductions, in the order in which they start.

    >>> reductions_later(["c", "b", "b", "a", "a", "a"], in_flight=1)
    [2, 3, 3, 3, 2, 1]
    """
    groups = list(_groups(units))
    found = []
    for number, group in enumerate(groups):
        target = groups[number + in_flight] if number + in_flight < len(groups) else None
        for i in group:
            # Where there is none, the end of the graph: beyond the last one.
            following = max(target.start, target.stop - (group.stop - i)) if target is not None else len(units)
            found.append(following - i if in_flight else 0)
    return found


def _groups(units: Sequence[str]) -> Iterator[range]:
    start = 0
    for _, same in itertools.groupby(units):
        stop = start + len(list(same))
        yield range(start, stop)
        start = stop
