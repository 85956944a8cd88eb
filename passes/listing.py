"""Print the schedule of a graph as lines of text, for people and for comparison between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from mfsdp_compile.runtime.lanes.lane import Lane
from mfsdp_compile.runtime.lanes.plain import is_plain
from mfsdp_compile.runtime.lanes.stage import Spec, Stage
from mfsdp_compile.runtime.schedule.text import ScheduleLine

from . import roles
from .changes import points
from .context import Context


def describe(graph: fx.Graph, context: Context) -> list[str]:
    """Return the schedule of a graph: a line per start or end of a collective and per call of a region.

    Between them stand the numbers of operators.
    """
    found = _events(graph, context, [info.name for info in context.buckets])
    lines: list[str] = []
    computed = 0
    for node in graph.nodes:
        events = [_called(node, context)] if roles.is_region_call(node) else found.get(node)
        if events is None:
            computed += roles.is_operator(node)
            continue
        if computed:
            lines.append(f"        {computed} operators")
        computed = 0
        lines += events
    if computed:
        lines.append(f"        {computed} operators")
    return lines


def collectives(graph: fx.Graph, context: Context) -> list[str]:
    """Return the schedule of a graph as it must be on every rank.

    Buckets are numbered instead of named, because instances of a module share a graph. Nothing depends on the shapes of
    a batch: ranks with batches of different lengths run different graphs with the same collectives. Regions do not
    count either, except for the model's own collectives in them.
    """
    found = _events(graph, context, [f"#{number}" for number in range(len(context.buckets))])
    return [line for node in graph.nodes for line in found.get(node, ())]


def _called(call: fx.Node, context: Context) -> str:
    """Return the line of a region's call."""
    body = roles.body_of(call)
    unit = next((context.buckets[bucket].unit for bucket in call.meta["custom"][roles.REGION]), "loss")
    operators = sum(map(roles.is_operator, body.graph.nodes))
    return f"{'run':7} {unit}  {body.meta['mfsdp_region_name']}, {operators} operators"


def _events(graph: fx.Graph, context: Context, names: Sequence[str]) -> dict[fx.Node, list[str]]:
    """Return the lines of each node where a collective starts or ends."""
    found: dict[fx.Node, list[str]] = {}
    for node in graph.nodes:
        inside = roles.body_of(node).graph.nodes if roles.is_region_call(node) else [node]
        own = [inner for inner in inside if inner.op == "call_function" and roles.is_collective(inner)]
        if own:  # replaced below for our own collectives
            found[node] = [f"{inner.target._opname}  of the model itself" for inner in own]
    for node, what, bucket, number in points(graph, context):
        info = context.buckets[bucket]
        exchange, detail, is_deferrable = info.exchange, "", False
        if what == "gather":
            ranks = number if number > 1 else exchange.gather_size
            size, dtype = info.sent_bytes, exchange.sent.dtype
            if number > 1:  # portions are of the bucket as it is held
                size, dtype = info.gathered_bytes, exchange.held_dtype
            detail = f"{size:,} B in {_short(dtype)} of {ranks} ranks"
            lane = exchange.lane
            if number == 1 and lane.gather is not None and not all(is_plain(stage) for stage in lane.use):
                detail = ", ".join([detail, *_shown(lane, lane.places("use"))])
        elif what == "reduce":
            lane = exchange.lane
            flight = lane.reduction[number - 1]
            entering = lane.spec(flight.part, flight.index)
            detail = f"{entering.bytes:,} B in {_short(entering.dtype)}, {flight.stage.text}"
            rest = lane.places("rest") if number == len(lane.reduction) else ()
            detail = ", ".join([*_shown(lane, flight.before), detail, *_shown(lane, (*flight.after, *rest))])
            is_deferrable = flight.may_wait
        found[node] = [str(ScheduleLine(what, names[bucket], number, detail, is_deferrable))]
    return found


def _shown(lane: Lane, places: Sequence[tuple[str, int]]) -> list[str]:
    """Return the texts of local stages of plug-ins and guests."""
    stages = [(lane[part][index], lane.spec(part, index)) for part, index in places]
    return [_text(stage, spec) for stage, spec in stages if not stage.inlined]


def _text(stage: Stage, spec: Spec) -> str:
    copied = stage.cost(spec).copied
    return f"{copied:,} B {stage.text}" if copied else stage.text


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
