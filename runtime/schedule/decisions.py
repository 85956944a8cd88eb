"""Decisions about a schedule, as plain data: derived from the policy, found by the solver, or read from a file.

Four things can be chosen without changing what is computed: which buckets stay gathered between forward and backward,
which other buckets leave a portion, how early each gather starts, and how late each reduction is awaited. The places of
starts and waits are given relative to other units, never as a time or an operator. A decision therefore means the same
for batches of other shapes. Nothing here knows a graph or a tensor: the policy decides from the order and the sizes of
buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from .phase import Phase
from .policy import SchedulePolicy


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
    """Why a start or a wait has its place.

    Args:
        limit: Limit that rules out a better place.
        bytes: Missing bytes, if the limit is the memory budget.
        detail: Further explanation in words.
    """

    limit: Limit
    bytes: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Ahead:
    """How early a gather starts.

    Args:
        units: The gather starts before the wait of the unit that is used this many units earlier; 0: right at its own
            use.
        why: Why it does not start earlier.
        reduction: Index of a bucket. If given, and the graph reduces that bucket, the gather starts right before the
            bucket's gradients are packed, and ``units`` is ignored.
    """

    units: int
    why: Why
    reduction: int | None = None


@dataclass(frozen=True)
class Behind:
    """How late the reduction of a bucket is awaited.

    If fewer than ``later`` reductions follow, it is awaited at the end of the graph.

    Args:
        later: Number of later reductions that start before the wait; 0: awaited at once.
        why: Why it is not awaited later.
        packed: Whether the wait comes before the gradients of the last of these reductions are packed, instead of after
            that reduction has started.
    """

    later: int
    why: Why
    packed: bool = False


@dataclass(frozen=True)
class Decisions:
    """Decisions about the graphs of one Dynamo graph, by index of the bucket in the context.

    For gathers and reductions without an entry, the policy decides.

    Args:
        kept: Buckets that stay gathered from forward to backward.
        gathers: How early gathers start, by phase and bucket. The gathers of a unit's buckets start together; each
            bucket has an entry.
        reductions: How late reductions are awaited, by bucket.
        why_not_kept: Why other buckets are gathered again.
        portions: Buckets of which each rank keeps a portion, for the backward to gather. None: not decided.
    """

    kept: frozenset[int] = frozenset()
    gathers: Mapping[Phase, Mapping[int, Ahead]] = field(default_factory=dict)
    reductions: Mapping[int, Behind] = field(default_factory=dict)
    why_not_kept: Mapping[int, Why] = field(default_factory=dict)
    portions: frozenset[int] | None = None

    def gather(
        self, phase: Phase, buckets: Sequence[int], size: int, policy: SchedulePolicy, overlap: bool = True
    ) -> Ahead:
        """Return how early the gathers of ``buckets`` start.

        Args:
            buckets: Buckets whose gathers start together.
            size: Total gathered bytes of the buckets.
            overlap: Whether gathers may overlap with computation.
        """
        decided = self.gathers.get(phase, {})
        first = next((decided[bucket] for bucket in buckets if bucket in decided), None)
        return first or gather_by_policy(policy, size, overlap)


class ScheduledBucket(Protocol):
    """What a policy reads of a bucket.

    Args:
        unit: Name of the unit. Units are gathered and reduced together.
        gathered_bytes: Bytes of the gathered bucket in memory.
        stays: Whether the model says that the bucket stays gathered from forward to backward; None: it says nothing.
    """

    @property
    def unit(self) -> str: ...

    @property
    def gathered_bytes(self) -> int: ...

    @property
    def stays(self) -> bool | None: ...


def gather_by_policy(policy: SchedulePolicy, size: int, overlap: bool = True) -> Ahead:
    """Return how early the policy starts the gather of a unit of ``size`` gathered bytes."""
    if not overlap:
        return Ahead(0, Why(Limit.OVERLAP))
    prefetch = 1 if policy.prefetch == "auto" else policy.prefetch
    if prefetch and size > policy.prefetch_bytes:
        return Ahead(0, Why(Limit.SIZE, detail=f"larger than prefetch_bytes ({policy.prefetch_bytes:,} B)"))
    return Ahead(prefetch, Why(Limit.POLICY))


def kept_by_policy(
    policy: SchedulePolicy,
    whole_model: bool,
    last_used: Mapping[int, Any],
    needed: Mapping[int, Any],
    buckets: Sequence[ScheduledBucket],
) -> frozenset[int]:
    """Return the buckets that stay gathered from forward to backward.

    With ``reshard_after_forward=False`` these are all buckets that both graphs use. Otherwise, with ``keep_last``, it
    is the bucket that forward uses last, if the backward uses it before all others. A graph's only bucket is not kept.
    What the model says of a bucket goes before ``keep_last``.

    Args:
        last_used: Place of each bucket's last use in forward. Places are comparable.
        needed: Place of each bucket's first use in backward.
        buckets: All buckets of the graph.
    """
    if not whole_model or not last_used or not needed:
        return frozenset()
    if policy.reshard_after_forward is False:
        return frozenset(last_used.keys() & needed.keys())
    last, first = max(last_used, key=last_used.__getitem__), min(needed, key=needed.__getitem__)
    alone = len(last_used.keys() | needed.keys()) == 1
    kept = {last} if policy.keep_last and last == first and not alone else set()
    if policy.reshard_after_forward is True:
        kept = {bucket for bucket in kept if buckets[bucket].stays is None}
        kept |= {bucket for bucket in last_used.keys() & needed.keys() if buckets[bucket].stays}
    return frozenset(kept)


def reductions_by_policy(
    policy: SchedulePolicy, buckets: Sequence[ScheduledBucket], overlap: bool = True
) -> list[Behind]:
    """Return how late the policy awaits the reductions of ``buckets``, given in the order in which they start."""
    if not overlap:
        return [Behind(0, Why(Limit.OVERLAP)) for _ in buckets]
    laters = reductions_later([info.unit for info in buckets], policy.reductions_in_flight)
    sizes = [info.gathered_bytes for info in buckets]
    return [_bounded(policy.reduction_bytes, sizes[i : i + later + 1], later) for i, later in enumerate(laters)]


def _bounded(most: int, sizes: Sequence[int], later: int) -> Behind:
    """Return how late a reduction is awaited so that at most ``most`` bytes are in flight.

    Args:
        most: Largest total bytes in flight.
        sizes: Bytes of the reduction, followed by those of the reductions after it.
        later: Number of later reductions to wait for if the bytes allow it.
    """
    for count, size in enumerate(itertools.accumulate(sizes)):
        if count and size > most:
            why = Why(Limit.IN_FLIGHT_SIZE, detail=f"{size:,} B would be in flight")
            return Behind(count, why, packed=True)
    return Behind(later, Why(Limit.IN_FLIGHT))


def reductions_later(units: Sequence[str], in_flight: int) -> list[int]:
    """Return, for each reduction, the number of later reductions after whose start it is awaited.

    The reductions of ``in_flight`` units are then in flight. The buckets of a unit are matched from the end with those
    of the unit ``in_flight`` units later: the last bucket waits for the last, the second-to-last for the
    second-to-last, and so on.

    Args:
        units: Units of the reductions, in the order in which they start.
        in_flight: Number of units whose reductions may be in flight.

    >>> reductions_later(["c", "b", "b", "a", "a", "a"], in_flight=1)
    [2, 3, 3, 3, 2, 1]
    """
    groups = [list(group) for _, group in itertools.groupby(range(len(units)), key=units.__getitem__)]
    found = []
    for number, group in enumerate(groups):
        target = groups[number + in_flight] if number + in_flight < len(groups) else None
        for i in group:
            # Without a target unit, an index beyond the last reduction means the end of the graph.
            following = max(target[0], target[-1] - (group[-1] - i)) if target is not None else len(units)
            found.append(following - i if in_flight else 0)
    return found
