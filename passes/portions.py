"""Forward and backward graph: keep portions of gathered buckets, and gather them over fewer ranks in backward.

    forward     shard -> all_gather (all ranks) -> wait -> views -> ... last use
                                                    \\-> portion -> saved in the place of the shard

    backward    shard -> [cast] -> all_gather (all ranks) -> wait -> views         before
                          portion -> all_gather (some ranks) -> wait -> views      after

This implements ``reshard_after_forward`` as a number, with its FSDP2 meaning. The idea is the secondary partition of
ZeRO++ (https://arxiv.org/abs/2306.10209). It costs memory: each rank holds one of that many portions of each such
bucket, in the compute dtype, from the bucket's last use in forward to its gather in backward. In return, gathers in
backward stay among neighboring ranks.

The pass runs after the partition into forward and backward. Only then do recomputed operators (from a user's activation
checkpointing) read the same views as the backward's own operators.

Needs: the forward and backward graph of one joint graph, with roles; a backward that gathers from shards. Leaves: a
copy of the portion after forward's last use of a bucket, and a placeholder of the same name in the backward graph.
Gathers are scheduled later.
"""

from __future__ import annotations

from torch import fx

from . import roles
from .context import BucketInfo, Context, NodeKind, Report, Role, set_role


def apply(forward: fx.Graph, backward: fx.Graph, context: Context, user_outputs: int) -> tuple[Report, frozenset[int]]:
    """Keep portions of buckets for the backward. This is the only pass that changes two graphs at once.

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
                f"{info.name}: {info.portion_bytes:,} B stay, one of {info.portion_size} portions; gathered from these "
                "in backward"
            )
            continue
        lines.append(f"{info.name}: gathered from shards again: {why_not}")
    return Report("portions", lines), frozenset(done)


def _keep(gathered: roles.Gather, again: roles.Gather, info: BucketInfo, user_outputs: int) -> None:
    """Save a portion of the bucket that forward ``gathered``; the backward gathers ``again`` from portions."""
    whole, (start, wait) = gathered.whole, again.collective
    assert whole is not None
    forward, backward = whole.graph, start.graph
    shard = (again.before or (start,))[0].all_input_nodes[0]
    ranks = info.portion_size, info.portion_group
    name = f"mfsdp_portion_{again.bucket}"  # a saved value has the same name in both graphs
    last = max(gathered.uses)
    with forward.inserting_before(last if last.op == "output" else last.next):
        portion = forward.create_node("call_function", roles.PORTION, (whole, *ranks), name=name)
    with backward.inserting_before(shard):
        placeholder = backward.placeholder(name)
    value = whole.meta["val"].new_empty(info.layout.numel // info.portion_size)
    for node in (portion, placeholder):
        node.meta |= {"val": value, "custom": {roles.MARK: again.bucket}}
        set_role(node, Role(NodeKind.PORTION, again.bucket))
    start.target, start.args = roles.GATHERS[0], (placeholder, *ranks)
    if again.whole is not None and (wait is not again.whole or wait.target is not roles.WAITS[0]):
        _await_portions(start, again)
    for node in reversed(again.before):
        backward.erase_node(node)
    backward.erase_node(shard)  # nothing else reads it; the portion takes its place among the saved values
    output = forward.output_node()
    (values,) = output.args
    saved = (portion if i >= user_outputs and v.name == shard.name else v for i, v in enumerate(values))
    output.args = (tuple(saved),)


def _await_portions(start: fx.Node, again: roles.Gather) -> None:
    """Let a gather of portions be awaited without what follows: portions are parts of the bucket as it is held."""
    whole = again.whole
    assert whole is not None
    start.meta["val"] = whole.meta["val"]
    with whole.graph.inserting_before(whole):
        plain = whole.graph.call_function(roles.WAITS[0], (start,))
    plain.meta = dict(whole.meta)
    whole.replace_all_uses_with(plain)
    for node in reversed((*again.landing, whole)):
        node.graph.erase_node(node)
