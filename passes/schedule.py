"""Forward, backward and inference graphs: start gathers a unit ahead, and await them at their first use.

    gather(0)  gather(1)  wait(0)  compute(0)  gather(2)  wait(1)  compute(1)  gather(3)  wait(2) ...

While unit i computes, the gather of unit i + 1 is in flight, so at most two units are gathered at any time (for
``prefetch`` 1). How far ahead each gather starts is decided before this pass (:mod:`.decisions`), or else by the
policy.

The start of a gather is tied to the use of an earlier unit, not to a time. The order of collectives then depends only
on the order of units, and is the same on ranks whose batches have different shapes.

Needs: roles. Leaves: the order of nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import fx

from mfsdp_compile.runtime.schedule.decisions import Ahead
from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, Report


@dataclass(frozen=True)
class _GatherGroup:
    """Gathers of one unit whose first uses follow one another. They start together."""

    gathers: tuple[roles.Gather, ...]
    bytes: int
    name: str

    @property
    def nodes(self) -> list[fx.Node]:
        """Nodes that start the gathers, in order."""
        return [node for gather in self.gathers for node in (*gather.before, gather.collective[0])]

    @property
    def first_wait(self) -> fx.Node:
        return self.gathers[0].collective[1]


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    for gather in roles.gathers(graph):
        if gather.uses:
            _sink(gather)
    groups = _groups(graph, context)
    packs = {reduction.bucket: reduction.pack for reduction in roles.reductions(graph)}
    moved = {node for group in groups for node in group.nodes}
    top = next(node for node in graph.nodes if node.op != "placeholder" and node not in moved)
    lines = []
    for i, group in enumerate(groups):
        buckets = [gather.bucket for gather in group.gathers]
        ahead = context.decisions.gather(phase, buckets, group.bytes, context.policy, context.overlap.gathers)
        if ahead.reduction in packs:
            anchor, when = packs[ahead.reduction], f"before {context.buckets[ahead.reduction].name} is reduced"
        else:
            anchor, when = _start_before(groups, i, ahead, top)
        for node in group.nodes:
            anchor.prepend(node)
        lines.append(f"{group.name}: {group.bytes:,} B, started {when}")
    return Report("schedule", lines)


def _groups(graph: fx.Graph, context: Context) -> list[_GatherGroup]:
    order = {node: position for position, node in enumerate(graph.nodes)}
    found = sorted(
        (g for g in roles.gathers(graph) if g.uses and g.start is not None),
        key=lambda g: min(order[use] for use in g.uses),
    )
    groups = (tuple(group) for _, group in itertools.groupby(found, key=lambda g: context.buckets[g.bucket].unit))
    return [
        _GatherGroup(
            group,
            sum(context.buckets[gather.bucket].gathered_bytes for gather in group),
            context.buckets[group[0].bucket].unit,
        )
        for group in groups
    ]


def _sink(gather: roles.Gather) -> None:
    """Move the wait and the views right before the first use. A gather without a start moves as a whole.

    Views that come later stay: their sizes may be computed there.
    """
    first_use = min(gather.uses)
    for node in [node for node in gather.nodes if node < first_use]:
        if gather.start is None or (node is not gather.start and node not in gather.before):
            first_use.prepend(node)


def _start_before(groups: list[_GatherGroup], i: int, ahead: Ahead, top: fx.Node) -> tuple[fx.Node, str]:
    """Return the node before which group ``i`` starts, and a description of the place."""
    if ahead.units == 0:
        detail = f": {ahead.why.detail}" if ahead.why.detail else ""
        return groups[i].first_wait, f"at its use{detail}"
    if i < ahead.units:
        return top, "at once"
    earlier = groups[i - ahead.units]
    return earlier.first_wait, f"before {earlier.name} is used"
