"""Forward and backward graph: a portion of what forward gathered stays, and backward gathers portions over fewer ranks.

    forward     shard -> all_gather (all ranks) -> wait -> views -> ... last use
                                                    \\-> portion -> saved in the place of the shard

    backward    shard -> [cast] -> all_gather (all ranks) -> wait -> views         before
                          portion -> all_gather (few ranks) -> wait -> views       after

What ``reshard_after_forward`` as a number asks for: FSDP2's meaning of it, and the secondary partition of ZeRO++
(https://arxiv.org/abs/2306.10209). Memory: one of so many parts of each such bucket, in the compute dtype, from its last
use in forward to its gather in backward. For that, backward's gathers stay among neighbours.

It comes after the partition and not before it: what backward computes again (a user's activation checkpointing) reads the
same views as its own operators only there.

Needs: the graphs of one partition, with roles; a backward that gathers from shards. Leaves: a copy where forward last uses
a bucket, and in the backward graph a placeholder of its name. Schedules of gathers come later.
"""

from __future__ import annotations

from torch import fx

from . import roles
from .context import BucketInfo, Context, NodeKind, Report, Role, set_role

__all__ = ["apply"]


def apply(forward: fx.Graph, backward: fx.Graph, context: Context, user_outputs: int) -> tuple[Report, frozenset[int]]:
    """Keep portions. The only pass that changes two graphs at once.

    Args:
        user_outputs: Number of outputs of the forward graph before those that are saved for backward.

    Returns:
        The report, and the buckets of which portions are kept.
    """
    for graph in (forward, backward):
        roles.assign(graph)
    decided = context.decisions.portions
    gathered = {gather.bucket: gather for gather in roles.gathers(forward) if gather.start is not None}
    done: set[int] = set()
    lines = []
    for gather in roles.gathers(backward):
        info = context.buckets[gather.bucket]
        if gather.start is None or not info.portion_size:
            continue
        if decided is not None and gather.bucket not in decided:
            why_not = "as was decided"
        elif gather.bucket not in gathered:
            why_not = "forward does not gather it"
        else:
            _keep(gathered[gather.bucket], gather, info, user_outputs)
            done.add(gather.bucket)
            lines.append(
                f"{info.name}: {info.portion_bytes:,} B stay, one of {info.portion_size} portions; gathered from these in "
                "backward"
            )
            continue
        lines.append(f"{info.name}: gathered from shards again: {why_not}")
    return Report("portions", lines), frozenset(done)


def _keep(gathered: roles.Gather, again: roles.Gather, info: BucketInfo, user_outputs: int) -> None:
    """Save a portion of what forward ``gathered`` for what backward gathers ``again``."""
    (_, whole), (start, _) = gathered.collective, again.collective
    forward, backward = whole.graph, start.graph
    shard = (again.before or (start,))[0].all_input_nodes[0]
    ranks = info.portion_size, info.portion_group
    name = f"mfsdp_portion_{again.bucket}"  # the same in both graphs, as of everything that is saved
    last = max(gathered.uses)
    with forward.inserting_before(last if last.op == "output" else last.next):
        portion = forward.create_node("call_function", roles.PORTION, (whole, *ranks), name=name)
    with backward.inserting_before(shard):
        placeholder = backward.placeholder(name)
    value = whole.meta["val"].new_empty(info.layout.numel // info.portion_size)
    for node in (portion, placeholder):
        node.meta |= {"val": value, "custom": {roles.MARK: again.bucket}}
        set_role(node, Role(NodeKind.PORTION, again.bucket))
    start.args = (placeholder, *ranks)
    for node in reversed(again.before):
        backward.erase_node(node)
    backward.erase_node(shard)  # it was read for nothing else: the portion takes its place among what is saved
    output = forward.output_node()
    (values,) = output.args
    saved = (portion if i >= user_outputs and v.name == shard.name else v for i, v in enumerate(values))
    output.args = (tuple(saved),)
