"""Joint graph: tag the values that the partitioner must recompute in backward instead of saving.

The pass tags every gather MUST_RECOMPUTE, together with its cast, its wait, the views of the gathered bucket and the
casts of those views. The backward then gathers again, and no gathered weight or copy of one is saved. By default
partitioners save them (pytorch#136433). All nodes get the same, very large ``ac_graph_id``: at the border between two
ids torch saves the values of the smaller id, so a user's own activation checkpointing, whose ids count from 1, takes
precedence.

If the graph holds a whole model, buckets may stay gathered for the backward: those chosen in :mod:`.decisions`, or else
the bucket that forward uses last, if the backward needs it first.

Needs: roles. Leaves: tags.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mfsdp_compile.runtime import compat

from . import roles
from .context import Context, Report
from .decisions import kept_by_policy
from .phase import Phase

__all__ = ["apply", "kept_buckets"]

_REGION = 1_000_000_000


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    lines = []
    for gather in roles.gathers(graph):
        chain = [node for node in gather.nodes if node not in gather.views]
        derived = [*gather.views, *_casts(gather)]
        if gather.start is not None and gather.bucket in context.decisions.kept:
            gather.collective[1].meta["recompute"] = CheckpointPolicy.MUST_SAVE
            chain = []
            what = "kept for backward"
        else:
            what = "gathered again in backward, if needed there" if gather.start else "whole at all times"
        for node in chain + derived:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _REGION
        lines.append(f"{context.buckets[gather.bucket].name}: {what}")
    return Report("reshard", lines)


def _casts(gather: roles.Gather) -> list[fx.Node]:
    """Return casts of parameters (from autocast) and quantized parameters, with their views and transposed copies."""
    casts = [use for use in gather.uses if use.target in (*roles.CASTS, roles.QUANTIZE)]
    pending = list(casts)
    while pending:
        node = pending.pop()
        for user in node.users:
            follows = roles.is_view(user) or user.target is roles.QUANTIZE or roles.is_of_quantized(user)
            if follows and user not in casts:
                casts.append(user)
                pending.append(user)
    return casts


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
    return kept_by_policy(context.policy, context.whole_model, last_used, needed)


def _final_uses(gather: roles.Gather) -> list[fx.Node]:
    casts = _casts(gather)
    return [u for u in gather.uses if u not in casts] + [u for c in casts for u in c.users if u not in casts]
