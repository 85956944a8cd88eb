"""Describe how a pass changed a schedule: ``moved  gather layers.3 before wait layers.2 (12 operators earlier)``.

The comparison covers the starts and ends of collectives, and the casts that make a bucket whole without a collective,
in order, with the number of operators that run before each. It reports as few moves as possible: events on a longest
common subsequence of both orders count as unmoved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from mfsdp_compile.runtime.schedule.text import ScheduleLine

from . import roles
from .context import Context


@dataclass(frozen=True)
class Event:
    """A start or an end of a collective.

    Args:
        name: Name such as ``gather layers.3``, unique in its graph.
        operators: Number of operators that run before it, without views.
    """

    name: str
    operators: int


class SchedulePoint(NamedTuple):
    """A node where a collective starts or ends, or a bucket becomes whole without one.

    Args:
        what, bucket, number: See :class:`~mfsdp_compile.runtime.schedule.text.ScheduleLine`; ``bucket`` is the index of
            the bucket in the context.
    """

    node: fx.Node
    what: str
    bucket: int
    number: int = 1


def events(graph: fx.Graph, context: Context) -> list[Event]:
    """Return the events of a graph with roles, in graph order."""
    names = {
        node: ScheduleLine(what, context.buckets[bucket].name, number).label
        for node, what, bucket, number in points(graph, context)
    }
    seen: Counter[str] = Counter()
    found = []
    operators = 0
    for node in graph.nodes:
        if (name := names.get(node)) is None:
            operators += roles.is_operator(node)
            continue
        seen[name] += 1
        found.append(Event(f"{name} ({seen[name]})" if seen[name] > 1 else name, operators))
    return found


def points(graph: fx.Graph, context: Context) -> Iterator[SchedulePoint]:
    """Yield the schedule points of a graph with roles: first those of gathers, then those of reductions."""
    for gather in roles.gathers(graph):
        if gather.start is not None:
            number = context.buckets[gather.bucket].portion_size if gather.is_of_portions else 1
            yield SchedulePoint(gather.start, "gather", gather.bucket, number)
        if gather.whole is not None:
            waits = gather.start or context.buckets[gather.bucket].has_resident
            yield SchedulePoint(gather.whole, "wait" if waits else "cast", gather.bucket)
    for reduction in roles.reductions(graph):
        for stage, (start, wait) in enumerate(reduction.stages, 1):
            yield SchedulePoint(start, "reduce", reduction.bucket, stage)
            yield SchedulePoint(wait, "await", reduction.bucket, stage)


def changes(before: Sequence[Event], after: Sequence[Event]) -> list[str]:
    """Return one line per event that was removed, added, moved or shifted; empty if nothing changed."""
    old = {event.name: event for event in before}
    new = {event.name: event for event in after}
    lines = [f"removed  {name}" for name in old if name not in new]
    stay = _longest_common([e.name for e in before if e.name in new], [e.name for e in after if e.name in old])
    following = ""
    changed = []
    for event in reversed(after):
        place = f"before {following}" if following else "to the end"
        following = event.name
        if event.name not in old:
            changed.append(f"added    {event.name} {place}")
            continue
        by = event.operators - old[event.name].operators
        distance = f"{abs(by)} operator{'s' if abs(by) != 1 else ''} {'later' if by > 0 else 'earlier'}" if by else ""
        if event.name not in stay:
            changed.append(f"moved    {event.name} {place}{f' ({distance})' if distance else ''}")
        elif distance:
            changed.append(f"shifted  {event.name}: {distance}")
    return lines + changed[::-1]


def _longest_common(first: Sequence[str], second: Sequence[str]) -> set[str]:
    """Return a longest common subsequence of two orders of the same names.

    It is a longest increasing subsequence of the positions in ``first``, read in the order of ``second``.
    """
    place = {name: i for i, name in enumerate(first)}
    best: list[tuple[str, ...]] = []  # best[n - 1]: the subsequence of length n whose last name is earliest in first
    for name in second:
        longer = next((i for i, names in enumerate(best) if place[names[-1]] > place[name]), len(best))
        best[longer : longer + 1] = [(*(best[longer - 1] if longer else ()), name)]
    return set(best[-1]) if best else set()
