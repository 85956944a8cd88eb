"""Joint graph: what the partitioner must compute again in backward instead of saving.

Every gather, with its cast, its wait, the views of what it gathered and casts of those, is tagged MUST_RECOMPUTE: the
backward gathers again, and no gathered weight nor a copy of one is saved. Saving them is what partitioners do by default
(pytorch#136433). One constant, very large ``ac_graph_id`` for all: at the border between two ids torch saves what the
smaller one computes, so that a user's own activation checkpointing, whose ids count from 1, wins where it should.

In the graph of a whole model buckets may stay for the backward: those that were decided (:mod:`.decisions`), or else the one
that forward uses last, if backward needs it first.

Needs: roles. Leaves: tags, and the decision which buckets stay.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from mfsdp_compile.runtime import compat

from . import roles
from .context import Context, Phase, Report
from .decisions import kept_by_policy

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
    """Casts of parameters (autocast's) and views of those."""
    casts = [use for use in gather.uses if use.target in roles.CASTS]
    pending = list(casts)
    while pending:
        for user in pending.pop().users:
            if roles.is_view(user) and user not in casts:
                casts.append(user)
                pending.append(user)
    return casts


def kept_buckets(graph: fx.Graph, context: Context) -> frozenset[int]:
    """What the policy keeps, by the uses of what is gathered in the graph."""
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
