"""Backward graph: give parameters each reduced gradient as soon as it has arrived, instead of when the graph returns.

Before      ... -> wait -> [scale] -> output

After       ... -> wait -> [scale] -> deliver(gradient, [shard], bucket) -> output

What gets the gradient there may use it up, such as an optimizer's step over the bucket
(:mod:`mfsdp_compile.runtime.guests.optimizers.in_backward`): its memory is then free while the rest of the backward
runs. In its place, the graph returns zeros without memory.

``deliver`` is declared to write to the shard and to the resident, which may share memory, if the graph has them:
compilers keep it behind everything that reads them. It says nothing about the optimizer. What happens is decided when
the graph runs.

:func:`apply` runs before :mod:`.reduce`, which moves the new nodes right behind the waits of their buckets, and
:func:`place` after all others: what reads a bucket at rest may come later than its gradients, as the product that gives
the gradient of a layer's input does. A gradient in host memory is delivered right before the next one is copied there:
the host waits for the copy, and the CPU steps, while the device runs the backward of the next unit. Needs: roles.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, NodeKind, Report, role_of


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    output, lines = graph.output_node(), []
    returned = list(output.args[0])  # type: ignore[arg-type]
    at_rest: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if (bucket := bucket_at_rest(node)) is not None:
            at_rest.setdefault(bucket, []).append(node)
    for gradient, bucket in _gradients(graph):
        if gradient not in returned:
            continue
        with graph.inserting_after(gradient):
            delivered = graph.call_function(roles.DELIVER, (gradient, at_rest.get(bucket, []), bucket))
        value = gradient.meta["val"]
        delivered.meta["val"] = value.new_empty(()).expand(value.shape)
        position = returned.index(gradient)
        returned[position] = delivered
        compat.set_output_strides(output, position, delivered.meta["val"].stride())
        lines.append(f"{context.buckets[bucket].name}: when its gradient has arrived")
    output.args = (type(output.args[0])(returned),)  # type: ignore[call-arg]
    return Report("deliver", lines)


def place(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    nodes = list(graph.nodes)
    order = {node: position for position, node in enumerate(nodes)}
    lines = []
    delivered = list(graph.find_nodes(op="call_function", target=roles.DELIVER))
    copies = [node.args[0] for node in delivered if context.buckets[node.args[2]].exchange.lane.rest]
    for node in delivered:
        readers = [reader for rest in node.args[1] for reader in readers_at_rest(rest) if reader is not node]
        last, why = max(readers, key=order.__getitem__, default=node), "which reads it at rest"
        if node.args[0] in copies:  # the thread waits for it, after it has queued what the device does meanwhile
            following = copies.index(node.args[0]) + 1
            before = nodes[order[copies[following] if following < len(copies) else nodes[-1]] - 1]
            if order[before] > order[last]:
                last, why = before, "while its copy arrives"
        if order[last] > order[node]:
            last.append(node)
            lines.append(f"{context.buckets[node.args[2]].name}: after {last.name}, {why}")
    return Report("deliver", lines)


def bucket_at_rest(node: fx.Node) -> int | None:
    """Return the bucket of which a graph's input is the shard or the resident; None for others.

    A gathered bucket that forward has kept for its backward is neither.
    """
    role = role_of(node)
    is_shard = role is not None and role.kind is NodeKind.SHARD and compat.is_forward_input(node)
    return role.bucket if role is not None and is_shard else None


def readers_at_rest(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what reads the memory of a graph's input, through views and waits, and the waits of what it is sent by."""
    for user in node.users:
        yield user
        if roles.is_view(user) or user.target in roles.WAITS:
            yield from readers_at_rest(user)
        elif roles.is_collective(user):
            yield from (wait for wait in user.users if wait.target in roles.WAITS)


def _gradients(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield the gradients of shards that a graph computes, with their buckets: reduced, or of a bucket that no other
    rank shares."""
    reductions = roles.reductions(graph)
    for reduction in reductions:
        yield (reduction.wait, *reduction.after)[-1], reduction.bucket
    reduced = {reduction.bucket for reduction in reductions}
    for node, bucket in roles.packs(graph):
        while bucket not in reduced and len(node.users) == 1 and (user := next(iter(node.users))).op != "output":
            node = user  # scales or casts it
        if bucket not in reduced:
            yield node, bucket
