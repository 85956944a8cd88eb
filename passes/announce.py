"""Make a graph announce its schedule before it runs.

A graph with collectives or gradients first calls ``mfsdp::begin(phase, digest, schedule, used)``. The call is part of
the graph, so code loaded from a compile cache announces its schedule too, whichever process compiled it.
:mod:`mfsdp_compile.runtime.step.graph_runs` consumes the call at run time: it compares schedules between ranks and
records them for hang reports.

``used`` lists the parameters for which a backward computes gradients. The other parameters have no gradient on any
rank. AOTAutograd computes a gradient for every parameter that some output depends on; the gradient is zero if the loss
depends only on other outputs. Therefore ``used`` also says on which outputs each gradient depends.

Runs last. Does not change what is computed.
"""

from __future__ import annotations

import hashlib
import operator

import torch
from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.layout import BucketLayout
from mfsdp_compile.runtime.schedule.phase import Phase

from .context import Context, Report
from .listing import collectives
from .roles import dependencies, pack_inside, packs


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    lines = collectives(graph, context)
    if not lines and not packs(graph):
        return Report("announce", [])
    schedule = "\n".join(lines)
    digest = hashlib.sha256(schedule.encode()).hexdigest()[:16]
    used = _used(graph, context) if phase is Phase.BACKWARD else ""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(torch.ops.mfsdp.begin.default, (phase.value, digest, schedule, used))
    return Report("announce", [f"{len(lines)} starts and ends of collectives, digest {digest}"])


def _used(graph: fx.Graph, context: Context) -> str:
    """Return the parameters that a backward graph has gradients for.

    :func:`mfsdp_compile.runtime.step.graph_runs.parse_used` parses the result.
    """
    tangents = [node for node in graph.find_nodes(op="placeholder") if compat.is_tangent(node)]
    # A gradient that needs no tangent is a constant: Inductor's decompositions make zeros for a batch of no rows.
    always = 0, (1 << len(tangents)) - 1
    needs = dependencies(graph, {node: 1 << position for position, node in enumerate(tangents)})
    found: list[dict[int, int]] = [{} for _ in context.buckets]
    for pack, bucket in packs(graph):
        layout = context.buckets[bucket].layout
        is_inside = pack.target is operator.getitem  # a region packs
        found[bucket] |= _used_inside(pack, needs, layout) if is_inside else _indices(pack, needs, layout)
    buckets = [
        ",".join(f"{index}" if mask in always else f"{index}/{mask:x}" for index, mask in sorted(params.items()))
        for params in found
    ]
    return f"{len(tangents)}|{';'.join(buckets)}"


def _indices(pack: fx.Node, needs: dict[fx.Node, int], layout: BucketLayout) -> dict[int, int]:
    """Return what each packed gradient needs, by index of its parameter."""
    gradients, offsets = pack.args[:2]
    found: dict[int, int] = {}
    for gradient, offset in zip(gradients, offsets, strict=True):  # type: ignore[arg-type]
        # An empty parameter has the same offset as the parameter after it, so compare shapes too.
        place = (offset, tuple(gradient.meta["val"].shape))
        found |= {i: needs[gradient] for i, s in enumerate(layout.slots) if (s.offset, s.shape) == place}
    return found


def _used_inside(packed: fx.Node, needs: dict[fx.Node, int], layout: BucketLayout) -> dict[int, int]:
    """Return what each gradient needs that a region packs, by index of its parameter."""
    call, pack = packed.all_input_nodes[0], pack_inside(packed)
    operands = zip(pack.graph.find_nodes(op="placeholder"), call.args[2:], strict=True)
    needed = dependencies(pack.graph, {node: needs[operand] for node, operand in operands})  # type: ignore[index]
    return _indices(pack, needed, layout)
