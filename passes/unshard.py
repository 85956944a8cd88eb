"""Dynamo's graph: replace full-shape parameters by one differentiable ``gather`` per bucket.

Before                                              After
    L_weight [6, 8]   placeholder, SHELL                shard_0 [32]      placeholder, SHARD
    unshard = mfsdp.unshard(L_weight, "...")            gather = mfsdp.gather(shard_0, None, None, ...)
    linear = linear(x, unshard)                         getitem = gather[0]
                                                        linear = linear(x, getitem)

A frozen parameter in a trainable bucket is detached, so that its gradient is not computed.

Needs: shell placeholders with their roles. Every use of a shell is a marker, or passes the shell into a region (for
example a checkpointed one) whose body has the marker. Leaves: no shells and no markers; the first placeholders are the
shards, one per bucket in the context's order, each followed by the bucket's resident, token, quantized shard and scales
if it has them. The new graph is runnable as it is, and is the reference for what later passes do to it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mfsdp_compile.runtime import compat

from .context import Context, NodeKind, Report, Role, role_of, set_role
from .phase import Phase
from .roles import MARK, REGION, region_calls

__all__ = ["apply", "erase_markers"]


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
                "quantized": info.exchange.is_quantized,
                "scales": info.exchange.is_quantized,
            }
            placeholders = [
                compat.add_parameter_placeholder(graph, f"{name}_{bucket}", None) if exists else None
                for name, exists in beside.items()
            ]
            sources.append([shard, *placeholders])

    calls = {bucket: call for call in region_calls(graph) for bucket in call.meta["custom"][REGION]}
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1]
    gathered: list[fx.Node] = []
    at = last_placeholder
    for bucket, info in enumerate(context.buckets):
        with graph.inserting_after(at):
            operators = torch.ops.mfsdp
            gather = operators.gather_whole.default if bucket in calls else operators.gather.default
            call = graph.call_function(gather, (*sources[bucket], *info.exchange))
        call.meta["custom"] = {MARK: bucket}
        gathered.append(call)
        at = call
    for call in dict.fromkeys(calls.values()):
        _pass_buckets(call, gathered)

    for shell, role in shells.items():
        if role.bucket in calls:
            graph.erase_node(shell)
            continue
        call = gathered[role.bucket]
        with graph.inserting_after(call):
            parameter = graph.call_function(operator.getitem, (call, role.index))
        parameter.meta["custom"] = {MARK: role.bucket}
        if context.buckets[role.bucket].trainable and not compat.requires_grad(shell):
            with graph.inserting_after(parameter):  # frozen since the model was sharded
                parameter = graph.call_method("detach", (parameter,))
            parameter.meta["custom"] = {MARK: role.bucket}
        shell.replace_all_uses_with(parameter)
        graph.erase_node(shell)

    markers = erase_markers(gm)
    graph.lint()
    gm.recompile()
    return Report(
        "unshard",
        [
            f"{info.name}: {sum(role.bucket == b for role in shells.values())} of {len(info.layout.slots)} parameters, "
            f"{info.sent_bytes:,} B gathered{' in float8' if info.exchange.is_quantized else ''}"
            for b, info in enumerate(context.buckets)
        ]
        + [f"{markers} markers taken out"],
    )


def _pass_buckets(call: fx.Node, gathered: list[fx.Node]) -> None:
    """Give a call of a region its buckets: an anchor and a whole bucket each."""
    operands: list[fx.Node] = []
    for bucket in call.meta["custom"][REGION]:
        with call.graph.inserting_before(call):
            pair = [call.graph.call_function(operator.getitem, (gathered[bucket], index)) for index in (1, 0)]
        for node in pair:
            node.meta["custom"] = {MARK: bucket}
        operands += pair
    call.args = (call.args[0], *operands, *call.args[1 + len(operands) :])


def erase_markers(gm: fx.GraphModule) -> int:
    """Replace every marker in the graph, and in the bodies of its regions, by its argument.

    Returns:
        The number of markers.
    """
    count = 0
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            count += erase_markers(child)
    markers: Any = (torch.ops.mfsdp.unshard, torch.ops.mfsdp.unshard.default)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in markers:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            count += 1
    if count:
        gm.recompile()
    return count
