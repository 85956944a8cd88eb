"""Forward, backward and inference graphs: gather into communication buffers, where the model has some.

    cast = convert(shard)                               gather = gather_into_buffer(shard, ...)
    gather = all_gather(cast)                           wait = wait_tensor(gather)
    wait = wait_tensor(gather)

The operator casts the shard straight into its place in the buffer. The runtime picks the buffer when the graph runs:
one that nothing refers to (:mod:`mfsdp_compile.runtime.memory.comm_buffers`). No schedule, and no later pass, can
therefore make a gather overwrite a value that is still read. If more buckets are gathered at a time than there are
buffers, the others get fresh memory.

Buckets that outlive the graph also get fresh memory, since they would keep a buffer from all others. This pass does not
change where gradients go: ``mfsdp::pack_gradients`` takes a buffer itself, in regions too.

Needs: roles, the final order of nodes. Leaves: everything but the operators.
"""

from __future__ import annotations

import operator

from torch import fx

from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from . import roles
from .context import Context, Report


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    outputs = set(graph.output_node().all_input_nodes)
    lines = []
    for gather in roles.gathers(graph):
        info = context.buckets[gather.bucket]
        capacity, count = info.exchange.gather_buffers
        if gather.start is None or not capacity:
            continue
        if outputs & {gather.whole, *gather.views}:
            lines.append(f"{info.name}: fresh memory, because it outlives the graph")
            continue
        count = _enough(count, context.policy)
        _replace(graph, gather, capacity, count)
        lines.append(f"{info.name}: gathered into {_described(capacity * info.exchange.sent.dtype.itemsize, count)}")
    for pack, bucket in roles.packs(graph):
        info = context.buckets[bucket]
        capacity, count = info.exchange.gradient_buffers
        if not capacity:
            continue
        where = _described(capacity * info.exchange.comm_dtype.itemsize, count)
        by_a_region = ", by a region" if pack.target is operator.getitem else ""
        lines.append(f"{info.name}: gradients packed in {where}{by_a_region}")
    return Report("comm_buffers", lines)


def _described(size: int, count: int) -> str:
    return f"{'the buffer' if count == 1 else f'one of {count} buffers'} of {size:,} B"


def _enough(count: int, policy: SchedulePolicy) -> int:
    """Return the number of buffers for gathers: more than two if the policy gathers more than one unit ahead."""
    ahead = policy.prefetch if isinstance(policy.prefetch, int) else 1
    return max(count, ahead + 1) if count > 1 else count


def _replace(graph: fx.Graph, gather: roles.Gather, capacity: int, count: int) -> None:
    start, _ = gather.collective
    source = cast = start.all_input_nodes[0]
    if cast in gather.before and cast.target in roles.CASTS:
        source = cast.all_input_nodes[0]
    size, group = start.args[1:3]
    dtype = start.meta["val"].dtype
    with graph.inserting_before(start):
        into = graph.call_function(roles.GATHER_INTO_BUFFER, (source, capacity, count, dtype, size, group))
    into.meta = dict(start.meta)
    start.replace_all_uses_with(into)
    graph.erase_node(start)
    if cast is not source and not cast.users:
        graph.erase_node(cast)
