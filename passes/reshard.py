"""Joint graph: tag the values that the partitioner must recompute in backward instead of saving.

The pass tags every gather MUST_RECOMPUTE, together with its cast, its wait, the views of the gathered bucket and what
is computed from these elementwise. The backward then gathers again, and no gathered weight or copy of one is saved. By
default partitioners save them (pytorch#136433). All nodes get the same, very large ``ac_graph_id``: at the border
between two ids torch saves the values of the smaller id, so a user's own activation checkpointing, whose ids count from
1, takes precedence.

If the graph holds a whole model, buckets may stay gathered for the backward: those chosen in :mod:`.decisions`, or else
the bucket that forward uses last, if the backward needs it first.

Needs: roles. Leaves: tags.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.decisions import kept_by_policy
from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, NodeKind, Report

_REGION = 1_000_000_000
_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten.contiguous.default, _aten._unsafe_view.default)
_MAXIMA = (_aten.max.default, _aten.amax.default)  # of absolute values: layers make scales from them
_JOINS = (_aten.cat.default, _aten.stack.default)
_SHIFTS = (_aten.__rshift__.Scalar, _aten.__lshift__.Scalar)  # which have no tag


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    lines = []
    for gather in roles.gathers(graph):
        chain = [node for node in gather.nodes if node not in gather.views]
        derived = [*gather.views, *_derived(gather)]
        if gather.start is not None and gather.whole is not None and gather.bucket in context.decisions.kept:
            gather.whole.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            chain = []
            what = "kept for backward"
        else:
            what = "gathered again in backward, if needed there" if gather.start else "whole at all times"
        for node in chain + derived:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _REGION
        lines.append(f"{context.buckets[gather.bucket].name}: {what}")
    return Report("reshard", lines)


def _derived(gather: roles.Gather) -> list[fx.Node]:
    """Return what is computed from the gathered parameters alone, elementwise, without maxima and scales.

    These are casts (from autocast), weights that a layer quantizes or dequantizes, and transposed copies, with their
    views. A backward that saved them would hold whole parameters. Inputs that say how to read the parameters may be
    used too, such as the table of the values that a weight of 4 bits can have.
    """
    pending = [*([gather.whole] if gather.whole is not None else []), *gather.views]
    large, small = set(pending), set[fx.Node]()  # what is computed from them alone
    derived: list[fx.Node] = []
    while pending:
        for user in pending.pop().users:
            sources = roles.tensor_inputs(user)
            if user in large or user in small or not _is_elementwise(user):
                continue
            if all(s in large or s in small or _is_constant(s, user) for s in sources):
                pending.append(user)
                if large.isdisjoint(sources) or _is_small(user):
                    small.add(user)
                else:
                    large.add(user)
                    derived.append(user)
    return derived


def _is_constant(node: fx.Node, user: fx.Node) -> bool:
    """Whether a node is an input that says how to read a gathered parameter: scales, one number, or a table."""
    if roles.has_kind(node, NodeKind.SCALES):
        return True
    if node.op != "placeholder":
        return False
    value = node.meta.get("val")
    is_number = isinstance(value, torch.Tensor) and all(type(size) is int and size == 1 for size in value.shape)
    return is_number or user.target is _aten.index.Tensor


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a node is a view, a cast, a copy, an elementwise operator, a maximum, a look-up in a table that is an
    input, joins tensors, or quantizes.

    Random numbers are not: recomputed, they would be others.
    """
    if roles.is_view(node) or roles.is_of_quantized(node):
        return True
    if node.target in (*roles.CASTS, *_COPIES, *_MAXIMA, *_JOINS, *_SHIFTS, roles.QUANTIZE):
        return True
    if node.target is _aten.index.Tensor:
        return node.all_input_nodes[0].op == "placeholder"
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def _is_small(node: fx.Node) -> bool:
    """Whether a node is a maximum of parameters, or the scales of a quantized one.

    Its size does not count: lengths that ranks draw on their own would decide what they gather again.
    """
    is_element = node.target is operator.getitem and node.args[0].target is roles.QUANTIZE  # type: ignore[union-attr]
    return node.target in _MAXIMA or (is_element and node.args[1] == 1)


def kept_buckets(graph: fx.Graph, context: Context) -> frozenset[int]:
    """Return the buckets that the policy keeps, given where the graph uses the gathered buckets."""
    backward = {node for node in graph.nodes if compat.is_backward_node(node)}
    uses = {
        gather.bucket: [use for use in _final_uses(gather) if use.op != "output"]
        for gather in roles.gathers(graph)
        if gather.start is not None
    }
    in_forward = {bucket: [use for use in found if use not in backward] for bucket, found in uses.items()}
    in_backward = {bucket: [use for use in found if use in backward] for bucket, found in uses.items()}
    last_used = {bucket: max(found) for bucket, found in in_forward.items() if found}
    needed = {bucket: min(found) for bucket, found in in_backward.items() if found}
    return kept_by_policy(context.policy, context.whole_model, last_used, needed, context.buckets)


def _final_uses(gather: roles.Gather) -> list[fx.Node]:
    derived = _derived(gather)
    return [u for u in gather.uses if u not in derived] + [u for d in derived for u in d.users if u not in derived]
