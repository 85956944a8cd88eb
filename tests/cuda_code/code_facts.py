"""Compare what generated code does with what the passes decided."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recording import Event, Recording, Span
from torch import fx

from mfsdp_compile.passes import changes, roles
from mfsdp_compile.passes.context import Context

GATHERS = {"all_gather_into_tensor", "gather_into_buffer"}
REDUCTIONS = {"reduce_scatter_tensor", "all_reduce", "all_reduce_", "reduce_if_due", "exchange_slices"}
ELEMENTWISE = {"", "mul"}
"""What scales and casts results of reductions: kernels, and the operator that stays alone between two collectives."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm"}


@dataclass(frozen=True)
class Slot:
    """Where a parameter's gradient is in its bucket, in bytes.

    Args:
        cast: Bytes that a cast of the gradient to the bucket's dtype reads and writes; 0 if they have the same.
    """

    name: str
    start: int
    stop: int
    is_matrix: bool
    cast: int


@dataclass(frozen=True)
class Wanted:
    """What the passes decided about a graph.

    Args:
        points: Starts and ends of collectives in order, such as ``gather 3`` with the position of the input that is
            gathered, or ``reduce 2`` with the position of the output that is reduced.
        buckets: Names of the buckets, by the same positions.
        slots: Slots of the bucket whose gradient is the output at a position.
        padding: Bytes of gradient buckets that belong to no parameter.
        casts: Bytes that are read and written by casting each shard once before each gather of it, or copying it to its
            place in a communication buffer.
    """

    points: list[tuple[str, int]]
    buckets: dict[str, str]
    slots: dict[int, list[Slot]]
    padding: int
    casts: int


def wanted_of(graph: fx.Graph, context: Context) -> Wanted:
    """Read a finished graph."""
    inputs = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    order = {node: place for place, node in enumerate(graph.nodes)}
    gathered = {gather.bucket: gather for gather in roles.gathers(graph)}
    reduced = {reduction.bucket: reduction for reduction in roles.reductions(graph)}
    points, buckets, slots = [], {}, {}
    padding = casts = 0
    for node, what, bucket, _ in sorted(changes.points(graph, context), key=lambda point: order[point.node]):
        info = context.buckets[bucket]
        if what == "cast":
            continue
        if what in ("gather", "wait"):
            first = gathered[bucket].start or node
            while first not in inputs:
                (first,) = first.all_input_nodes
            position = inputs[first]
        else:
            reduction = reduced[bucket]
            last = reduction.after[-1] if reduction.after else reduction.stages[-1][1]
            position = outputs.index(last)
            reduced_in, computed_in = info.exchange.comm_dtype, info.exchange.dtype
            size = reduced_in.itemsize
            both = size + computed_in.itemsize if reduced_in != computed_in else 0
            slots[position] = [
                Slot(s.name, s.offset * size, (s.offset + s.numel) * size, len(s.shape) > 1, s.numel * both)
                for s in info.layout.slots
            ]
            if what == "reduce":
                padding += (info.layout.numel - sum(s.numel for s in info.layout.slots)) * size
        is_copied = info.main_dtype != info.exchange.dtype or node.target is roles.GATHER_INTO_BUFFER
        is_copied &= not info.exchange.lane.is_joint  # the runtime quantizes shards
        if what == "gather" and not gathered[bucket].is_of_portions and is_copied:
            casts += info.layout.shard_numel * (info.main_dtype.itemsize + info.exchange.dtype.itemsize)
        points.append((what, position))
        buckets[f"{what} {position}"] = f"{what} {info.name}"
    return Wanted(points, buckets, slots, padding, casts)


def facts(recordings: Sequence[Recording], wanted: dict[str, Wanted]) -> dict[str, Any]:
    """Return what a row's code does, ready for JSON."""
    found: dict[str, Any] = {"phases": {}}
    copies: Counter[str] = Counter()
    gradients: dict[str, str] = {}
    sizes: dict[str, int] = {}
    gradient_casts = 0
    kernels: set[str] = set()
    for recording in recordings:
        theirs = wanted[recording.phase]
        points, packed = _points(recording)
        named = [theirs.buckets.get(point, point) for point in (f"{what} {where}" for what, where in points)]
        found["phases"][recording.phase] = {
            "wanted": [theirs.buckets[f"{what} {position}"] for what, position in theirs.points],
            "found": named,
            "races": _races(recording),
            "syncs": [*recording.syncs, *_syncs_in(recording.source)],
            "calls": recording.calls,
        }
        for position, (storage, end) in packed.items():
            if position in theirs.slots:
                writers = _writers(recording.events[:end], storage, theirs.slots[position])
                gradients |= writers
                sizes |= {slot.name: slot.stop - slot.start for slot in theirs.slots[position]}
                gradient_casts += sum(
                    s.cast for s in theirs.slots[position] if writers.get(s.name, "product") != "product"
                )
        copies += _copies(recording)
        kernels |= {event.kernel.source for event in recording.events if event.kernel is not None}
    return found | {
        "copies": dict(copies),
        "shard_casts": sum(wanted[recording.phase].casts for recording in recordings),
        "gradients": gradients,
        "sizes": sizes,
        "gradient_casts": gradient_casts,
        "padding": sum(wanted[recording.phase].padding for recording in recordings),
        "kernels": len(kernels),
        "foreach": sum("triton_for_" in event.name for recording in recordings for event in recording.events),
    }


def baseline(recordings: Sequence[Recording]) -> dict[str, int]:
    """Return the bytes that the code of a model that is not sharded copies."""
    copies: Counter[str] = Counter()
    for recording in recordings:
        copies += _copies(recording)
    return dict(copies)


def _points(recording: Recording) -> tuple[list[tuple[str, int]], dict[int, tuple[int, int]]]:
    """Return the starts and ends of collectives in the order of the code, in the words of :class:`Wanted`.

    Returns:
        The points, and for each reduction the storage of the packed gradients and the number of the event that starts
        it, by the position of its output.
    """
    origin: dict[int, int] = {s: position for position, s in enumerate(recording.inputs) if s is not None}
    results = {s: position for position, s in enumerate(recording.outputs) if s is not None}
    gathers: dict[int, int] = {}  # storage of a result -> position of the input
    reductions: dict[int, int] = {}
    packed: dict[int, tuple[int, int]] = {}
    points: list[tuple[str, int]] = []
    for number, event in enumerate(recording.events):
        if event.operator in GATHERS:
            (source,), (result,) = event.reads, event.writes
            gathers[result.storage] = origin.get(source.storage, -1)
            points.append(("gather", gathers[result.storage]))
        elif event.operator in REDUCTIONS:
            source, result = (*event.reads, *event.writes)[0], event.writes[0]
            position = _leads_to(recording.events[number + 1 :], result.storage, results)
            reductions[result.storage] = position
            packed.setdefault(position, (source.storage, number))
            points.append(("reduce", position))
        elif event.operator == "wait_tensor":
            storage = event.reads[0].storage
            if storage in reductions:
                points.append(("await", reductions[storage]))
            else:
                points.append(("wait", gathers.get(storage, origin.get(storage, -1))))
        elif len(event.reads) == 1 and event.moves:  # a cast of a shard
            for span in event.writes:
                if (source_of := origin.get(event.reads[0].storage)) is not None:
                    origin.setdefault(span.storage, source_of)
    return points, packed


def _leads_to(events: Sequence[Event], storage: int, results: dict[int, int]) -> int:
    """Return the position of the output that a reduction leads to, through casts, scaling and further stages."""
    reached = {storage}
    for event in events:
        read, written = ({span.storage for span in spans} for spans in (event.reads, event.writes))
        is_elementwise = event.operator in ELEMENTWISE and len(event.reads) == len(event.writes)
        if read & reached and (is_elementwise or event.operator in REDUCTIONS):
            reached |= written
        elif event.operator != "wait_tensor":
            reached -= written  # the memory is used again
    positions = [results[each] for each in sorted(reached) if each in results]
    return positions[0] if len(positions) == 1 else -1


def _races(recording: Recording) -> list[str]:
    """Return what touches memory that a collective is using, and collectives that nobody awaits."""
    found = []
    under_way: dict[int, tuple[str, tuple[Span, ...]]] = {}  # by the storage of the result
    for event in recording.events:
        if event.operator == "wait_tensor":
            under_way.pop(event.reads[0].storage, None)
            continue
        for result, (name, sources) in under_way.items():
            if any(span.storage == result for span in (*event.reads, *event.writes)):
                found.append(f"{event.name} uses the result of {name} before it is awaited")
            if any(span.overlaps(source) for span in event.writes for source in sources):
                found.append(f"{event.name} writes to what {name} sends")
        if event.operator in GATHERS | REDUCTIONS:
            for span in event.writes:
                under_way[span.storage] = event.name, event.reads
    return found + [f"{name} is not awaited" for name, _ in under_way.values()]


_SYNCS = re.compile(r"\.item\(|\.cpu\(|\.tolist\(|synchronize\(|cudaStreamSynchronize|empty_strided_cpu\(|\.numpy\(")


def _syncs_in(source: str) -> Iterator[str]:
    """Yield lines of generated code that wait for the device."""
    for line in source.splitlines():
        if _SYNCS.search(line) and not line.lstrip().startswith("#"):
            yield line.strip()


def _writers(events: Sequence[Event], storage: int, slots: Sequence[Slot]) -> dict[str, str]:
    """Return what writes each matrix's gradient into its bucket: ``product``, ``copy``, another kernel or operator."""
    found = {}
    for slot in slots:
        place = Span(storage, slot.start, slot.stop)
        last = [event for event in events if any(span.overlaps(place) for span in event.writes)][-1]
        if slot.is_matrix:
            is_product = last.operator in PRODUCTS and place in last.writes
            found[slot.name] = (
                "product" if is_product else "copy" if last.moves else last.name if last.operator else "kernel"
            )
    return found


def _copies(recording: Recording) -> Counter[str]:
    """Return the bytes that kernels move without computing, by purpose."""
    sent = {span.storage for event in recording.events if event.operator in GATHERS for span in event.reads}
    inputs = {storage for storage in recording.inputs if storage is not None}
    found: Counter[str] = Counter()
    for event in recording.events:
        if not event.moves:
            continue
        reads_input = bool(event.reads) and all(span.storage in inputs for span in event.reads)
        if reads_input and all(span.storage in sent for span in event.writes):
            found["shards"] += event.bytes
        elif event.operator == "portion":
            found["portions"] += event.bytes
        else:
            found["others"] += event.bytes
    return found
