"""Traces regions: partitions the body of a region into a forward and a backward that save no parameter.

A region's graphs go through the passes on their own, with buckets that are whole at all times. What the backward needs
of the operands, it takes as operands again: for gathered parameters, the graph around it decides whether they are kept
or gathered again.

[Note: Regions and aliasing]

Outputs of a call share memory neither with its inputs nor with one another: Inductor's planner of memory would reuse it
too early. A unit that returns a tensor that it was given, or several views of one, is no region, and :func:`explain`
says so. What forward saves for backward would be further outputs: of a view, the call saves what it is a view of, and
backward takes the view again; an operand is not saved, as the graph around the call has it. The gathered bucket that
goes in is only read, and its gradient leaves through the anchor, which has no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.passes import drop_unread, pipeline, reshard, roles
from mfsdp_compile.passes.context import Context, Feature, phase_of, set_phase
from mfsdp_compile.passes.kernels import base, is_alias
from mfsdp_compile.passes.regions import RegionBody
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.compat import Gradient, NotARegion, RegionGraphs, Source
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def trace(
    body: RegionBody,
    policy: SchedulePolicy,
    features: tuple[Feature, ...],
    fused: bool,
    name: str,
    operands: Sequence[Any],
) -> RegionGraphs:
    """Make the graphs of a region.

    Args:
        policy: Says what forward may save.
        features: Features that change graphs of regions.
        fused: Whether Inductor compiles them.
        name: Name of the graphs.
        operands: Tensors like those that it will be called with.

    Raises:
        NotARegion: The body cannot be traced apart.
    """
    context = Context(body.buckets, SchedulePolicy(), whole_model=False, features=features)
    outputs = len(body.differentiable)
    try:
        joint, differentiates = compat.trace_joint(body.module, operands, fused)
    except ValueError as error:
        raise NotARegion(body.name, str(error)) from None
    for node in list(joint.graph.nodes):
        if node.target is _WAIT and node.args[0].op == "placeholder":  # buckets are awaited outside
            node.replace_all_uses_with(node.args[0])
            joint.graph.erase_node(node)
    if any(base(value).op == "placeholder" for value in list(joint.graph.output_node().args[0])[:outputs]):
        raise NotARegion(body.name, "it returns a tensor that it was given, or a view of one")
    if not differentiates:
        forward = _finished(joint, f"{name}_inference", Phase.INFERENCE, context)
        takes = _drop_unused(forward)
        _note_wholes(forward, body, takes)
        _note_contract(forward, context, outputs)
        return RegionGraphs(forward, takes, outputs)
    joint.graph.output_node().meta["mfsdp_region"] = context
    if fused:
        joint = compat.inductor_joint_passes(joint)
    roles.assign(joint.graph)
    drop_unread.apply(joint.graph, context, Phase.JOINT)
    reshard.apply(joint.graph, context, Phase.JOINT)
    anchors = list(joint.graph.find_nodes(op="placeholder"))[: 2 * len(body.buckets) : 2]
    forward, backward = compat.min_cut_partition(
        joint,
        (),
        distinct=roles.DISTINCT,
        activation_memory_budget=policy.activation_budgets[0],
        without_memory=anchors,
        num_fwd_outputs=outputs,
    )
    if len(forward.graph.find_nodes(op="placeholder")) != len(operands):
        raise NotARegion(body.name, "torch passes the state of random numbers to it")  # CUDA, with checkpoints
    needs, gradients = _connect(forward.graph, backward.graph, body)
    forward = _finished(forward, f"{name}_forward", Phase.FORWARD, context)
    backward = _finished(backward, f"{name}_backward", Phase.BACKWARD, context)
    takes = _drop_unused(forward)
    _note_wholes(forward, body, takes)
    _note_wholes(backward, body, [s.number if s.kind == "operand" else None for s in needs])
    backward.meta["mfsdp_packs"] = {g.output: g.operand // 2 for g in gradients if g.operand < 2 * len(body.buckets)}
    _note_contract(forward, context, outputs)
    _note_contract(backward, context, 0)
    constant = tuple(i for i, differentiable in enumerate(body.differentiable) if not differentiable)
    return RegionGraphs(forward, takes, outputs, backward, needs, gradients, constant)


def _finished(gm: fx.GraphModule, name: str, phase: Phase, context: Context) -> fx.GraphModule:
    gm.graph.set_codegen(fx.graph.CodeGen())
    output = gm.graph.output_node()
    (values,) = output.args
    output.args = (tuple(values),)  # type: ignore[arg-type]
    output.meta["mfsdp_region"] = context
    set_phase(gm.graph, phase)
    gm.meta["mfsdp_region_name"] = name
    gm.recompile()
    return gm


def _note_contract(gm: fx.GraphModule, context: Context, outputs: int) -> None:
    roles.assign(gm.graph)
    pipeline.note_contract(gm.graph, context, phase_of(gm.graph), outputs)


def _drop_unused(gm: fx.GraphModule) -> tuple[int, ...]:
    """Remove inputs that nothing reads. Return the positions of the others."""
    takes = []
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if node.users:
            takes.append(position)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return tuple(takes)


def _note_wholes(gm: fx.GraphModule, body: RegionBody, takes: Sequence[int | None]) -> None:
    """Note which arguments of a call are whole buckets and scales. The first two are the graph and its name."""
    wholes = {2 * number + 1: number for number in range(len(body.buckets))}
    gm.meta["mfsdp_wholes"] = {wholes[t]: i for i, t in enumerate(takes, 2) if t in wholes}
    quantized = [number for number, info in enumerate(body.buckets) if info.exchange.stays_quantized]
    scales = {2 * len(body.buckets) + place: number for place, number in enumerate(quantized)}
    gm.meta["mfsdp_scales"] = {scales[t]: i for i, t in enumerate(takes, 2) if t in scales}


def _connect(
    forward: fx.Graph, backward: fx.Graph, body: RegionBody
) -> tuple[tuple[Source, ...], tuple[Gradient, ...]]:
    """Bring the border between forward and backward into a form that calls can use.

    Outputs of a call must not share memory, or Inductor would reuse it too early. A saved view is therefore saved as
    what it is a view of, and taken again in the backward. A saved operand is not an output.

    Returns:
        Where the backward's inputs come from, and the gradients of the operands.
    """
    output = forward.output_node()
    number = len(body.differentiable)
    returned: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    results, saved = returned[:number], returned[number:]
    for i, result in enumerate(results):
        value: Tensor = result.meta["val"]
        shares = any(base(result) is base(other) for other in [*results[:i], *saved] if other is not result)
        if result in results[:i] or shares or value.storage_offset():
            results[i] = _copied(result, output)
    operands = list(forward.find_nodes(op="placeholder"))
    tangents = iter([i for i, differentiable in enumerate(body.differentiable) if differentiable])
    outputs = dict(zip(results, range(number), strict=True))  # in order; values are positions
    needs: list[Source] = []
    again: dict[fx.Node, fx.Node] = {}  # forward's node -> backward's
    waiting = iter(saved)  # in the order of the backward's inputs, which may have other names
    for placeholder in list(backward.find_nodes(op="placeholder")):
        if compat.is_tangent(placeholder):
            index = next(tangents, None)
            if index is None:
                raise NotARegion(body.name, "its outputs and their gradients do not match")
            needs.append(Source("tangent", index))
            continue
        node = next(waiting, None)
        if node is None or node.meta["val"].shape != placeholder.meta["val"].shape:
            raise NotARegion(body.name, f"torch adds an input to its backward ({placeholder.name})")
        chain, root = _views(node), base(node)
        if root not in again:
            if chain:
                with backward.inserting_before(placeholder):
                    again[root] = backward.placeholder(root.name)
                again[root].meta = dict(root.meta)
            else:
                again[root] = placeholder
            if root in operands:
                needs.append(Source("operand", operands.index(root)))
            else:
                needs.append(Source("output", outputs.setdefault(root, len(outputs))))
        elif not chain:
            placeholder.replace_all_uses_with(again[root])
            backward.erase_node(placeholder)
        if chain:
            _take_views(chain, again, placeholder)
    if next(tangents, None) is not None or next(waiting, None) is not None:
        raise NotARegion(body.name, "its outputs and their gradients do not match")
    output.args = (tuple(outputs),)
    return tuple(needs), _connect_gradients(backward, needs)


def _connect_gradients(backward: fx.Graph, needs: Sequence[Source]) -> tuple[Gradient, ...]:
    """Let a backward return each gradient in memory of its own, and no gradient that it was given.

    An addition, for example, has the same gradient for both terms, and it may be that of the region's own output.
    """
    output = backward.output_node()
    inputs = {node: i for i, node in enumerate(backward.find_nodes(op="placeholder"))}
    returned: dict[fx.Node, int] = {}
    roots: set[fx.Node] = set()
    gradients: list[Gradient] = []
    for operand, gradient in enumerate(output.args[0]):  # type: ignore[arg-type]
        if gradient is None:
            continue
        if gradient in inputs and needs[inputs[gradient]].kind == "tangent":
            gradients.append(Gradient(operand, tangent=inputs[gradient]))
            continue
        if gradient not in returned:
            root = base(gradient)
            if root in roots or root in inputs or gradient.meta["val"].storage_offset():
                gradient = _copied(gradient, output)
                root = gradient
            roots.add(root)
        gradients.append(Gradient(operand, output=returned.setdefault(gradient, len(returned))))
    output.args = (tuple(returned),)
    return tuple(gradients)


def _copied(node: fx.Node, before: fx.Node) -> fx.Node:
    with node.graph.inserting_before(before):
        copied = node.graph.call_function(torch.ops.aten.clone.default, (node,))
    copied.meta |= {"val": node.meta["val"].clone(), "partitioner_tag": node.meta.get("partitioner_tag")}
    return copied


def _views(node: fx.Node) -> list[fx.Node]:
    """Return the chain of views that a value is, beginning with the view of what is no view."""
    chain: list[fx.Node] = []
    while is_alias(node):
        chain.insert(0, node)
        node = node.args[0]  # type: ignore[assignment]
    return chain


def _take_views(chain: Sequence[fx.Node], again: dict[fx.Node, fx.Node], placeholder: fx.Node) -> None:
    """Compute a saved view in the backward from what it is a view of."""
    graph = placeholder.graph
    first = next(node for node in graph.nodes if node.op != "placeholder" and node not in again.values())
    for view in chain:
        if view not in again:
            with graph.inserting_before(first):
                again[view] = graph.node_copy(view, lambda source: again[source])
    placeholder.replace_all_uses_with(again[chain[-1]])
    graph.erase_node(placeholder)
