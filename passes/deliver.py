"""Backward graph: give parameters each reduced gradient as soon as it has arrived, instead of when the graph returns.

Before      ... -> wait -> [scale] -> output

After       ... -> wait -> [scale] -> deliver(gradient, [shard], bucket) -> output

What gets the gradient there may use it up, such as an optimizer's step over the bucket
(:mod:`mfsdp_compile.runtime.optim.in_backward`): its memory is then free while the rest of the backward runs. In its
place, the graph returns zeros without memory.

``deliver`` is declared to write to the shard and to the resident, which may share memory, if the graph has them:
compilers keep it behind everything that reads them. It says nothing about the optimizer. What happens is decided when
the graph runs.

Runs before :mod:`.reduce`, which moves the new nodes right behind the waits of their buckets. Needs: roles.
"""

from __future__ import annotations

from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, NodeKind, Report, role_of


def bucket_at_rest(node: fx.Node) -> int | None:
    """Return the bucket of which a graph's input is the shard or the resident; None for others.

    A gathered bucket that forward has kept for its backward is neither.
    """
    role = role_of(node)
    is_shard = role is not None and role.kind is NodeKind.SHARD and compat.is_forward_input(node)
    return role.bucket if role is not None and is_shard else None


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    output, lines = graph.output_node(), []
    returned = list(output.args[0])  # type: ignore[arg-type]
    at_rest: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if (bucket := bucket_at_rest(node)) is not None:
            at_rest.setdefault(bucket, []).append(node)
    for reduction in roles.reductions(graph):
        gradient = (reduction.wait, *reduction.after)[-1]
        if gradient not in returned or context.buckets[reduction.bucket].exchange.offload:
            continue  # a gradient on its way to host memory is awaited when the graph has returned
        with graph.inserting_before(output):
            given = gradient, at_rest.get(reduction.bucket, []), reduction.bucket
            delivered = graph.call_function(roles.DELIVER, given)
        delivered.meta["val"] = gradient.meta["val"]
        returned[returned.index(gradient)] = delivered
        lines.append(f"{context.buckets[reduction.bucket].name}: when its reduction has arrived")
    output.args = (type(output.args[0])(returned),)  # type: ignore[call-arg]
    return Report("deliver", lines)
