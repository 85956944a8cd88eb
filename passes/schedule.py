"""Forward, backward and inference graphs: gathers start a unit ahead and are awaited at their first use.

    gather(0)  gather(1)  wait(0)  compute(0)  gather(2)  wait(1)  compute(1)  gather(3)  wait(2) ...

While unit i computes, unit i + 1 is under way: at any time at most two units are gathered (for ``prefetch_units`` 1).
A gather is bound to the use of an earlier unit, not to a time: the order of collectives depends on the order of units
alone, so that it is the same on ranks whose batches have other shapes.

Needs: roles. Leaves: order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from . import roles
from .context import Context, Report

__all__ = ["apply"]


@dataclass(frozen=True)
class _Group:
    """Gathers of one unit that are first used one after the other: they start together."""

    gathers: tuple[roles.Gather, ...]
    bytes: int
    name: str

    @property
    def nodes(self) -> list[fx.Node]:
        """What starts the gathers, in order."""
        return [node for gather in self.gathers for node in (*gather.before, gather.collective[0])]

    @property
    def first_wait(self) -> fx.Node:
        return self.gathers[0].collective[1]


def apply(graph: fx.Graph, context: Context) -> Report:
    for gather in roles.gathers(graph):
        if gather.uses:
            _sink(gather)
    groups = _groups(graph, context)
    lines = []
    for i, group in enumerate(groups):
        anchor, when = _start_before(graph, groups, i, context)
        for node in group.nodes:
            anchor.prepend(node)
        lines.append(f"{group.name}: {group.bytes:,} B, started {when}")
    return Report("schedule", lines)


def _groups(graph: fx.Graph, context: Context) -> list[_Group]:
    order = {node: position for position, node in enumerate(graph.nodes)}
    found = sorted(
        (g for g in roles.gathers(graph) if g.uses and g.start is not None),
        key=lambda g: min(order[use] for use in g.uses),
    )
    groups: list[list[roles.Gather]] = []
    for gather in found:
        unit = context.buckets[gather.bucket].unit
        if groups and context.buckets[groups[-1][-1].bucket].unit == unit:
            groups[-1].append(gather)
        else:
            groups.append([gather])
    return [
        _Group(
            tuple(group),
            sum(context.buckets[g.bucket].gathered_bytes for g in group),
            context.buckets[group[0].bucket].unit,
        )
        for group in groups
    ]


def _sink(gather: roles.Gather) -> None:
    """Wait, and its views, right before the first use; all of it where there is nothing to start."""
    first_use = min(gather.uses)
    for node in gather.nodes:
        if gather.start is None or (node is not gather.start and node not in gather.before):
            first_use.prepend(node)


def _start_before(graph: fx.Graph, groups: list[_Group], i: int, context: Context) -> tuple[fx.Node, str]:
    """The node before which group ``i`` starts."""
    policy, group = context.policy, groups[i]
    if policy.prefetch_units == 0:
        return group.first_wait, "at its use"
    if group.bytes > policy.prefetch_bytes:
        return group.first_wait, f"at its use: larger than prefetch_bytes ({policy.prefetch_bytes:,} B)"
    if i < policy.prefetch_units:
        if i > 0:
            return groups[i - 1].gathers[-1].collective[0].next, "at once"
        own = set(group.nodes)
        return next(node for node in graph.nodes if node.op != "placeholder" and node not in own), "at once"
    earlier = groups[i - policy.prefetch_units]
    return earlier.first_wait, f"before {earlier.name} is used"
