"""Backward graph: start each bucket's reduction when its last gradient is ready, and await it soon after.

Inductor keeps the input of a reduction alive until its wait, and autograd puts all waits at the end. Without this pass
every gradient of the model would be in memory at once. A reduction is awaited when the reduction of the next unit has
started, so the computation between the two starts hides it. The policy may allow more reductions in flight.

Needs: roles. Leaves: the order of nodes.
"""

from __future__ import annotations

from torch import fx

from mfsdp_compile.runtime.schedule.decisions import Behind, reductions_by_policy
from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, Report


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    found = roles.reductions(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    ready = {r: max(r.pack.all_input_nodes, key=order.__getitem__) for r in found}
    found.sort(key=lambda r: order[ready[r]])
    for reduction in reversed(found):  # reversed, so that reductions that are ready at the same node keep their order
        anchor = ready[reduction]
        if anchor.op == "placeholder":
            anchor = [node for node in graph.nodes if node.op == "placeholder"][-1]
        for node in (reduction.pack, *reduction.scale, reduction.start):
            anchor.append(node)
            anchor = node

    lines = []
    # Nodes inserted after the same anchor keep the order of the reductions.
    ends: dict[fx.Node, fx.Node] = {}
    output = graph.output_node()
    infos = [context.buckets[reduction.bucket] for reduction in found]
    by_policy = reductions_by_policy(context.policy, infos, context.overlap.reductions)
    for i, (reduction, policy) in enumerate(zip(found, by_policy, strict=True)):
        behind, when = context.decisions.reductions.get(reduction.bucket, policy), ""
        for stage in range(len(reduction.stages)):
            await_at, when = _await_at(found, i, stage, behind, context)
            nodes = [reduction.stages[stage][1]]
            if stage + 1 < len(reduction.stages):
                nodes += [*reduction.between[stage], reduction.stages[stage + 1][0]]
            else:
                nodes += reduction.after
            for node in nodes:
                if await_at is None:
                    output.prepend(node)
                else:
                    ends.get(await_at, await_at).append(node)
                    ends[await_at] = node
        lines.append(f"{context.buckets[reduction.bucket].name}: awaited {when}")
    return Report("reduce", lines)


def _await_at(
    found: list[roles.Reduction], i: int, stage: int, behind: Behind, context: Context
) -> tuple[fx.Node | None, str]:
    """Return where a stage of reduction ``i`` is awaited.

    Returns:
        The node after which it is awaited, None for the end of the graph; and a description of the place.
    """
    if behind.later == 0:
        return found[i].stages[stage][0], "at once"
    following = i + behind.later * (stage + 1)
    if following >= len(found):
        return None, "at the end"
    later = found[following]
    name = context.buckets[later.bucket].name
    if behind.packed:
        detail = f": {behind.why.detail}" if behind.why.detail else ""
        return later.pack.prev, f"before {name} is packed{detail}"
    return later.start, f"after {name} has started"
