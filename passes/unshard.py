"""Dynamo's graph: replace full-shape parameters by one differentiable ``gather`` per bucket.

Before                                              After
    L_weight [6, 8]   placeholder, SHELL                shard_0 [32]      placeholder, SHARD
    unshard = mfsdp.unshard(L_weight, "...")            gather = mfsdp.gather(shard_0, None, None, ...)
    linear = linear(x, unshard)                         getitem = gather[0]
                                                        linear = linear(x, getitem)

A frozen parameter in a trainable bucket is detached, so that its gradient is not computed.

``torch.cond`` and other operators with bodies refuse operands that share memory, so they get copies.

A parameter that modules get as it was gathered in float8 (:mod:`mfsdp_compile.runtime.formats.forms`) is three values:
an anchor, data and a scale.

    parts = mfsdp.unshard_quantized(L_weight, ...)      gather = mfsdp.gather(shard_0, resident_0, None, scales_0, ...)
    anchor, data, scale = parts[0], parts[1], parts[2]  anchor, data = gather[0], gather[1]
                                                        split = mfsdp.split_scales(scales_0, ...)
                                                        scale = split[0]

Needs: shell placeholders with their roles. Every use of a shell is a marker, or passes the shell into a region (for
example a checkpointed one) whose body has the marker. Leaves: no shells and no markers; the first placeholders are the
shards, one per bucket in the context's order, each followed by the bucket's resident, token and scales, if it
has them. The new graph is runnable as it is, and is the reference for what later passes do to it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

from .context import BucketInfo, Context, NodeKind, Report, Role, role_of, set_role
from .roles import MARK, REGION, SCALES_MARK, nested_graph, region_calls

PLAIN_MARKERS: Any = (torch.ops.mfsdp.unshard, torch.ops.mfsdp.unshard.default)
_UNSHARD_QUANTIZED: Any = (torch.ops.mfsdp.unshard_quantized, torch.ops.mfsdp.unshard_quantized.default)
MARKERS = (*PLAIN_MARKERS, *_UNSHARD_QUANTIZED)
"""What stands for a parameter in Dynamo's graph."""


def apply(graph: fx.Graph, context: Context, phase: Phase | None) -> Report:
    gm = graph.owning_module
    assert gm is not None
    shells = {node: role for node in graph.nodes if (role := role_of(node)) and role.kind is NodeKind.SHELL}
    first_of: dict[int, fx.Node] = {}
    for node, role in shells.items():
        first_of.setdefault(role.bucket, node)

    first = next(iter(graph.nodes))
    sources: list[list[fx.Node | None]] = []
    with graph.inserting_before(first):
        for bucket, info in enumerate(context.buckets):
            shard = compat.add_parameter_placeholder(graph, f"shard_{bucket}", first_of[bucket])
            set_role(shard, Role(NodeKind.SHARD, bucket))
            beside = {
                "resident": info.has_resident,
                "token": info.has_token,
                "scales": info.exchange.takes_scales,
            }
            placeholders = [
                compat.add_parameter_placeholder(graph, f"{name}_{bucket}", None) if exists else None
                for name, exists in beside.items()
            ]
            sources.append([shard, *placeholders])

    calls = {bucket: call for call in region_calls(graph) for bucket in call.meta["custom"][REGION]}
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1]
    gathered: list[fx.Node] = []
    scales: dict[int, fx.Node] = {}
    at = last_placeholder
    for bucket, info in enumerate(context.buckets):
        with graph.inserting_after(at):
            operators = torch.ops.mfsdp
            gather = operators.gather_whole.default if bucket in calls else operators.gather.default
            call = graph.call_function(gather, (*sources[bucket], *info.exchange))
        call.meta["custom"] = {MARK: bucket}
        gathered.append(call)
        at = call
        if info.exchange.stays_quantized and bucket not in calls:
            with graph.inserting_after(at):
                scales[bucket] = at = split_scales(graph, sources[bucket][-1], bucket, info)
    of_calls = {b: source[-1] for b, source in enumerate(sources) if context.buckets[b].exchange.stays_quantized}
    for call in dict.fromkeys(calls.values()):
        _pass_buckets(call, gathered, of_calls)

    for shell, role in shells.items():
        if role.bucket in calls:
            graph.erase_node(shell)
            continue
        call, info = gathered[role.bucket], context.buckets[role.bucket]
        with graph.inserting_after(call):
            parameter = graph.call_function(operator.getitem, (call, role.index))
        parameter.meta["custom"] = {MARK: role.bucket}
        if info.trainable and not compat.requires_grad(shell):
            with graph.inserting_after(parameter):  # frozen since the model was sharded
                parameter = graph.call_method("detach", (parameter,))
            parameter.meta["custom"] = {MARK: role.bucket}
        if info.exchange.stays_quantized:
            assert role.index is not None
            hand_out(shell, parts_of(parameter, call, scales[role.bucket], role.index, info))
        else:
            shell.replace_all_uses_with(parameter)
        graph.erase_node(shell)
        _copy_for_branches(parameter)

    markers = erase_markers(gm)
    graph.lint()
    gm.recompile()
    return Report(
        "unshard",
        [
            f"{info.name}: {sum(role.bucket == b for role in shells.values())} of {len(info.layout.slots)} parameters, "
            f"{info.sent_bytes:,} B gathered{_in(info)}"
            for b, info in enumerate(context.buckets)
        ]
        + [f"{markers} markers taken out"],
    )


def _copy_for_branches(parameter: fx.Node) -> None:
    """Give operators with bodies that refuse operands in the same memory, a bucket's, a copy of a parameter."""
    for user in [user for user in parameter.users if compat.refuses_shared_memory(user.target)]:
        with parameter.graph.inserting_before(user):
            copied = parameter.graph.call_function(torch.ops.aten.clone.default, (parameter,))
        copied.meta["custom"] = dict(parameter.meta["custom"])
        user.replace_input_with(parameter, copied)


def _in(info: BucketInfo) -> str:
    lane = info.exchange.lane
    return f" {lane.step[0].text}" if lane.is_joint else ""


def split_scales(graph: fx.Graph, scales: fx.Node, bucket: int, info: BucketInfo) -> fx.Node:
    """Insert the scales of each parameter of a bucket."""
    exchange = info.exchange
    given = scales, exchange.sizes, exchange.ndims, exchange.scaling
    split = graph.call_function(torch.ops.mfsdp.split_scales.default, given)
    split.meta["custom"] = {SCALES_MARK: bucket}
    return split


def parts_of(
    anchor: fx.Node, gather: fx.Node, split: fx.Node, index: int | None, info: BucketInfo
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return anchor, data and scale of a parameter that modules get as it was gathered in float8."""
    assert index is not None
    with gather.graph.inserting_after(gather):
        data = gather.graph.call_function(operator.getitem, (gather, len(info.layout.slots) + index))
    with split.graph.inserting_after(split):
        scale = split.graph.call_function(operator.getitem, (split, index))
    data.meta["custom"], scale.meta["custom"] = dict(gather.meta["custom"]), dict(split.meta["custom"])
    return anchor, data, scale


def _pass_buckets(call: fx.Node, gathered: list[fx.Node], scales: Mapping[int, fx.Node | None]) -> None:
    """Give a call of a region an anchor and a whole bucket for each bucket, and scales of those that stay in float8."""
    operands: list[fx.Node] = []
    for bucket in call.meta["custom"][REGION]:
        with call.graph.inserting_before(call):
            pair = [call.graph.call_function(operator.getitem, (gathered[bucket], index)) for index in (1, 0)]
        for node in pair:
            node.meta["custom"] = {MARK: bucket}
        operands += pair
    operands += [of for bucket in call.meta["custom"][REGION] if (of := scales.get(bucket)) is not None]
    call.args = (call.args[0], *operands, *call.args[1 + len(operands) :])


def hand_out(shell: fx.Node, parts: tuple[fx.Node, fx.Node, fx.Node]) -> None:
    """Put the three values of a parameter in place of its markers, in the graph and in the bodies that take the shell.

    Raises:
        NotImplementedError: An operator takes the shell whose bodies' arguments are not known here.
    """
    for user in list(shell.users):
        if user.target in _UNSHARD_QUANTIZED:
            for item in list(user.users):
                item.replace_all_uses_with(parts[item.args[1]])  # type: ignore[index]
                user.graph.erase_node(item)
            user.graph.erase_node(user)
            continue
        bodies = [body for argument in user.args if (body := nested_graph(argument)) is not None]
        inputs = list(bodies[0].graph.find_nodes(op="placeholder")) if len(bodies) == 1 else []
        if not inputs or shell not in (operands := user.args[-len(inputs) :]):
            raise NotImplementedError(
                f"{user.format_node()}: a parameter that is used as it is gathered in float8 is read inside of "
                f"{user.target}, for which this is not implemented. Gather it in the model's dtype, or leave this part "
                "of the model uncompiled."
            )
        for place in [place for place, operand in zip(inputs, operands, strict=True) if operand is shell]:
            with place.graph.inserting_before(place):
                anchor, data, scale = (
                    place.graph.placeholder(f"{place.name}_{part}") for part in ("anchor", "data", "scale")
                )
            hand_out(place, (anchor, data, scale))
            place.graph.erase_node(place)
        bodies[0].recompile()
        expanded = [part for operand in operands for part in (parts if operand is shell else (operand,))]
        user.args = (*user.args[: -len(inputs)], *expanded)


def erase_markers(gm: fx.GraphModule) -> int:
    """Replace every marker in the graph, and in the bodies of its regions, by its argument.

    Markers of parameters that are used as they are gathered in float8 have gone before.

    Returns:
        The number of markers.
    """
    count = 0
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            count += erase_markers(child)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in PLAIN_MARKERS:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            count += 1
    if count:
        gm.recompile()
    return count
