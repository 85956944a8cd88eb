"""The schedule of a graph as text that is the same on all ranks, and its digest.

One line per start and end of a collective, in order. It has names of buckets, operators, places in a bucket's exchange
and bytes; it has no names of process groups, which differ between ranks, none of nodes, which depend on what else was
compiled, and no shapes of batches: ranks with other batches run together as long as their collectives are the same.
"""

from __future__ import annotations

import hashlib

from torch import fx

from .analysis import WAIT, Analysis, Launch
from .context import Context, Phase
from .roles import GATHERS, REDUCES

__all__ = ["digest", "schedule_lines"]


def schedule_lines(graph: fx.Graph, context: Context, phase: Phase) -> list[str]:
    """For people to compare. The model's own collectives are in it too, without sizes."""
    found = Analysis(graph, context, phase)
    stages = {launch.node: i for r in found.reductions for i, launch in enumerate(r.stages)}
    starts = {launch.node: _start(launch, stages.get(launch.node, 0), context) for launch in found.launches}
    lines = [f"{phase.value} of {len(context.buckets)} buckets"]
    for node in graph.nodes:
        if node in starts:
            lines.append(f"start {starts[node]}")
        elif node.target is WAIT and node.args and node.args[0] in starts:
            lines.append(f"wait  {starts[node.args[0]].split('  ')[0]}")
        elif node.op == "call_function" and node.target in (*GATHERS, *REDUCES):
            lines.append(f"start {node.target} of the model")
    return lines


def _start(launch: Launch, stage: int, context: Context) -> str:
    info = context.buckets[launch.bucket]
    exchange = info.exchange
    if launch.gathers:
        size = f"{info.gathered_bytes:,} B in {exchange.dtype}"
        return f"unshard {info.name}  all_gather over {exchange.gather_size} ranks of its gathers  {size}"
    numel = info.layout.numel
    for earlier in range(min(stage, len(exchange.groups))):
        numel //= exchange.group_sizes[earlier] if exchange.collectives[earlier] == "reduce_scatter" else 1
    name = f"reduce {info.name} stage {stage + 1} of {len(exchange.groups)}"
    if stage >= len(exchange.groups):
        return f"{name}  one too many"
    size = f"{numel * exchange.comm_dtype.itemsize:,} B in {exchange.comm_dtype}"
    ranks = f"{exchange.group_sizes[stage]} ranks of its stage"
    return f"{name}  {exchange.collectives[stage]} {exchange.reduce_op} over {ranks}, {exchange.when[stage]}  {size}"


def digest(lines: list[str]) -> str:
    """sha256, as 64 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
