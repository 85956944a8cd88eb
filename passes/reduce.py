"""Backward graph: each bucket's reduction starts as soon as its last gradient is there, and is awaited soon after.

Inductor keeps the input of a reduction alive until its wait, and autograd puts all waits at the end: without this pass
every gradient of the model would be in memory at once. A reduction is awaited when the next has started (more may be in
flight if the policy says so), so that it has that much computation to hide behind.

Needs: roles. Leaves: order.
"""

from __future__ import annotations

from torch import fx

from . import roles
from .context import Context, Report

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
    for i, reduction in enumerate(found):
        when = ""
        for stage in range(len(reduction.stages)):
            await_at, when = _await_at(found, i, stage, context)
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


def _await_at(found: list[roles.Reduction], i: int, stage: int, context: Context) -> tuple[fx.Node | None, str]:
    """The node after which a stage of reduction ``i`` is awaited; None for the end of the graph."""
    policy = context.policy

    def gradient_bytes(r: roles.Reduction) -> int:
        return context.buckets[r.bucket].gathered_bytes

    in_flight = gradient_bytes(found[i])
    for later in found[i + 1 : i + 1 + policy.reductions_in_flight]:
        in_flight += gradient_bytes(later)
        if in_flight > policy.reduction_bytes:
            before = later.pack.prev
            return before, f"before {context.buckets[later.bucket].name} is packed: {in_flight:,} B would be in flight"
    if policy.reductions_in_flight == 0:
        return found[i].stages[stage][0], "at once"
    following = i + policy.reductions_in_flight * (stage + 1)
    if following < len(found):
        later = found[following]
        return later.start, f"after {context.buckets[later.bucket].name} has started"
    return None, "at the end"
