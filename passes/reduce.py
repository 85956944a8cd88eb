"""Backward graph: each bucket's reduction starts as soon as its last gradient is there, and is awaited soon after.

Inductor keeps the input of a reduction alive until its wait, and autograd puts all waits at the end: without this pass
every gradient of the model would be in memory at once. A reduction is awaited when that of the next unit has started (more
may be in flight if the policy says so), so that it has that much computation to hide behind.

Needs: roles. Leaves: order.
"""

from __future__ import annotations

from torch import fx

from . import roles
from .context import Context, Report
from .decisions import Behind, decisions_of, reductions_by_policy

__all__ = ["apply"]


def apply(graph: fx.Graph, context: Context) -> Report:
    found = roles.reductions(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    ready = {r: max(r.pack.all_input_nodes, key=order.__getitem__) for r in found}
    found.sort(key=lambda r: order[ready[r]])
    for reduction in reversed(found):  # of reductions that are ready at the same node, the first stays first
        anchor = ready[reduction]
        if anchor.op == "placeholder":
            anchor = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for node in (reduction.pack, *reduction.scale, reduction.start):
            anchor.append(node)
            anchor = node

    lines = []
    # What is put at the same place stays in the order of the reductions.
    ends: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    decisions = decisions_of(graph)
    by_policy = reductions_by_policy(
        context.policy, [context.buckets[r.bucket] for r in found], context.overlap.reductions
    )
    for i, reduction in enumerate(found):
        when = ""
        decided = decisions.reductions.get(reduction.bucket) if decisions is not None else None
        how = decided or by_policy[i]
        for stage in range(len(reduction.stages)):
            await_at, when = _await_at(found, i, stage, how, context)
            nodes = [reduction.stages[stage][1]]
            nodes += reduction.stages[stage + 1][:1] if stage + 1 < len(reduction.stages) else reduction.after
            for node in nodes:
                if await_at is None:
                    output.prepend(node)
                else:
                    ends.get(await_at, await_at).append(node)
                    ends[await_at] = node
        lines.append(f"{context.buckets[reduction.bucket].name}: awaited {when}")
    return Report("reduce", lines)


def _await_at(
    found: list[roles.Reduction], i: int, stage: int, how: Behind, context: Context
) -> tuple[fx.Node | None, str]:
    """The node after which a stage of reduction ``i`` is awaited; None for the end of the graph."""
    if how.later == 0:
        return found[i].stages[stage][0], "at once"
    following = i + how.later * (stage + 1)
    if following >= len(found):
        return None, "at the end"
    later = found[following]
    name = context.buckets[later.bucket].name
    if how.packed:
        detail = f": {how.why.detail}" if how.why.detail else ""
        return later.pack.prev, f"before {name} is packed{detail}"
    return later.start, f"after {name} has started"
