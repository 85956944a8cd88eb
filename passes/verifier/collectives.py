"""Rules for collectives: those of the buckets' exchanges, and left alone while they are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mfsdp_compile.runtime.lanes.lane import Lane, is_opaque
from mfsdp_compile.runtime.lanes.stage import Call

from .. import roles
from ..context import region_of, role_of
from .analysis import RELEASE, Analysis, CollectiveNode, Findings, StorageRange, arguments
from .contract import Contract, is_of_portions


def one_order(found: Analysis, contract: Contract | None) -> Findings:
    """Every rank starts the same collectives on the same process groups, in the same order.

    The collectives are those of each bucket's lane, stage by stage, with its operators, groups and sizes. None is
    in the body of a branch. Portions are shared by fewer ranks, and gathered over those. The digest of the schedule
    checks at run time that the order is the same on all ranks.
    """
    for launch in found.gather_launches:
        info, given = found.info(launch.bucket), arguments(launch.node)
        right = (info.portion_size, info.portion_group) if is_of_portions(found, contract, launch) else None
        if right is None and info.exchange.lane.gather is not None:
            yield from _flight(launch, info.exchange.lane)
            if launch.node.target is roles.START_STAGE:
                continue
        right = right or (info.exchange.gather_size, info.exchange.gather_group)
        if (got := (given.get("group_size"), given.get("group_name"))) != right:
            yield f"it is gathered over {_group(*got)}, not {_group(*right)}", launch.node, launch.bucket
    for portion in found.portions:
        info, (_, *ranks) = found.info(portion.bucket), portion.node.args
        if tuple(ranks) != (right := (info.portion_size, info.portion_group)):
            yield f"its portion is one of {_group(*ranks)}, not {_group(*right)}", portion.node, portion.bucket
    for reduction in found.reductions:
        lane = found.info(reduction.bucket).exchange.lane
        if len(reduction.stages) != len(lane.reduction):
            what = f"{len(reduction.stages)} collectives reduce it, not {len(lane.reduction)}"
            yield what, reduction.first, reduction.bucket
        for i, (launch, flight) in enumerate(zip(reduction.stages, lane.reduction, strict=False)):
            if (call := started(launch.node)) != (expected := lane.operator(flight)):
                yield f"stage {i + 1} is {_call(*call)}, not {_call(*expected)}", launch.node, reduction.bucket
    for node in found.graph.find_nodes(op="get_attr"):
        for inner in _inner_nodes(node):
            if region_of(inner.graph) is not None:
                break  # a region is verified on its own
            role, bucket = role_of(inner), (inner.meta.get("custom") or {}).get(roles.MARK)
            if role is not None or bucket is not None:
                yield f"{inner} is in the body of a branch, {node}", node, role.bucket if role is not None else bucket
                break


def _flight(launch: CollectiveNode, lane: Lane) -> Findings:
    """Check that a gather starts and awaits the stage of the lane that flies."""
    assert lane.gather is not None
    place = (lane.key, "use", lane.gather) if is_opaque(lane.use[lane.gather]) else None
    if (got := roles.place_of(launch.node)) != place:
        yield f"it is gathered by stage {got}, not {place}", launch.node, launch.bucket
    yield from other_waits("its gather", launch, lane, "use", lane.gather)


def other_waits(what: str, launch: CollectiveNode, lane: Lane, part: str, index: int) -> Findings:
    """Check that a collective is awaited as the stage of the lane that it is."""
    place = (lane.key, part, index) if lane.has_wait((part, index)) else None
    for wait in launch.waits:
        if (got := roles.place_of(wait)) != place:
            yield f"{what} is awaited as {got}, not {place}", wait, launch.bucket


def started(node: fx.Node) -> Call:
    """Return the operator with which a node starts a stage, and its arguments behind the tensor and the token."""
    with_token = node.target in (roles.START_STAGE, roles.REDUCE_IF_DUE)
    return node.target, tuple(node.args[2 if with_token else 1 :])


def _call(operator: Any, arguments: tuple[Any, ...]) -> str:
    return f"{str(operator).removesuffix('.default')}({', '.join(map(repr, arguments))})"


def _group(size: Any, name: Any) -> str:
    return f"{size} ranks (group {name!r})"


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graph that an attribute holds, if it holds one, and of the graphs inside it."""
    if (body := roles.nested_graph(node)) is not None:
        for inner in body.graph.nodes:
            yield inner
            if inner.op == "get_attr":
                yield from _inner_nodes(inner)


def untouched_in_flight(found: Analysis, _: Contract | None) -> Findings:
    """Nothing touches the memory of a collective in flight, and every collective is awaited before the graph ends.

    Collectives run on their own streams. Only their waits order them relative to computation and to each other. A
    reduction does not read the unawaited result of another reduction.
    """
    flights: dict[fx.Node, list[tuple[StorageRange, CollectiveNode, tuple[int, int]]]] = {}
    for launch in found.launches:
        flight = found.in_flight(launch)
        for node in (launch.input, launch.node):
            if node is not None:
                memory = found.memory(node)
                flights.setdefault(memory.root, []).append((memory, launch, flight))
        if launch.gathers:
            continue  # rule V1 covers the rest
        for reader in launch.readers:
            yield f"{reader} reads the reduction unawaited", reader, launch.bucket
        if not launch.waits:
            yield "nothing awaits the reduction", launch.node, launch.bucket
        if flight[1] < flight[0]:
            yield "the reduction is awaited before it starts", launch.waits[0], launch.bucket
    releases = found.graph.find_nodes(op="call_function", target=RELEASE)
    for node, memory in (*found.writes, *((node, found.memory(node.all_input_nodes[0])) for node in releases)):
        for place, launch, (start, end) in flights.get(memory.root, ()):
            if place.overlaps(memory) and start < found.order[node] < end:
                yield f"{node} changes memory that {launch.node} works on", node, launch.bucket
