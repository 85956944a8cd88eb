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
        anchor.append(reduction.pack)
        reduction.pack.append(reduction.start)

    output = graph.output_node()
    lines = []
    for i, reduction in enumerate(found):
        await_at, when = _await_at(found, i, context)
        for node in (reduction.wait, *reduction.after):
            if await_at is None:
                output.prepend(node)
            else:
                await_at.append(node)
                await_at = node
        lines.append(f"{context.buckets[reduction.bucket].name}: awaited {when}")
    return Report("reduce", lines)


def _await_at(found: list[roles.Reduction], i: int, context: Context) -> tuple[fx.Node | None, str]:
    """The node after which reduction ``i`` is awaited; None for the end of the graph."""
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
        return found[i].start, "at once"
    if i + policy.reductions_in_flight < len(found):
        later = found[i + policy.reductions_in_flight]
        return later.start, f"after {context.buckets[later.bucket].name} has started"
    return None, "at the end"
