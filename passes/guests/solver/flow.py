"""Time and memory of a graph, in order: kernels, starts and ends of collectives, lifetimes of storages.

Lifetimes match the code that runs. A storage lives from the operator that computes it to the last operator that reads
it or a view of it. The inputs and outputs of a collective live until it has been awaited, because torch keeps both. A
fused kernel never stores values that only it reads, and overwrites an input of the same size that has no later reader.
It computes gradients directly in the packed bucket, which therefore lives from its first gradient on.

A backward graph begins with the values that its forward graph saved. Both graphs use the same names for them.

A call of a region is one kernel. It takes the time of the region's kernels, and needs memory for what they compute and
release in between. The compiled code of a region releases operands after their last use inside.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat

from ... import roles
from ...context import BucketInfo, Context, NodeKind, region_of, role_of
from ...kernels import Kernel, inlined, is_alias, kernels, origin, readers, value_bytes
from .costs import CostModel

_PACK = torch.ops.mfsdp.pack_gradients.default
_CONVOLUTIONS: dict[Any, int] = {
    torch.ops.aten.convolution.default: 0,
    torch.ops.aten.convolution_backward.default: 1,
}
"""Position of the image argument. The weight is the argument after it."""


class Category(str, Enum):
    """Purpose of memory."""

    SHARDS = "parameter shards"
    OPTIMIZER = "optimizer state"
    GATHERED = "gathered parameters"
    GRADIENTS = "gradients"
    SAVED = "saved for backward"
    TEMPORARY = "temporary"


@dataclass(eq=False)
class Storage:
    """Memory that a graph allocates or receives.

    Args:
        bytes: Size in bytes.
        category: Purpose of the memory.
        begin: Place in the graph where it is allocated; -1: it existed before.
        end: Place of its last use; None: it outlives the graph.
        bucket: Bucket that it is gathered or reduced for; None for other memory.
        handed_on: Whether a value computed at the place of its last use takes over its memory.
        name: Name of the graph input, for memory that a graph receives.
        in_buffer: Whether it is in a communication buffer, which exists all the time: it has 0 bytes of its own.
    """

    bytes: int
    category: Category
    begin: float
    end: float | None
    bucket: int | None = None
    handed_on: bool = False
    name: str = ""
    in_buffer: bool = False


@dataclass(frozen=True, eq=False)
class Collective:
    """A gather, or a stage of a reduction.

    Args:
        what: ``"gather"`` or ``"reduce"``.
        bucket, stage: Index of the bucket, and stage of its reduction.
        before: Seconds of computation right before the start: a cast, or copying gradients into the bucket. Also of a
            fetch from host memory, for which computation waits.
        seconds: Time of the collective alone on the network.
        group: Process group. Collectives of one group run one after another.
        after: Seconds of computation right after the wait: dequantizing what was gathered, or summing slices.
    """

    what: str
    bucket: int
    stage: int
    before: float
    seconds: float
    group: str
    after: float = 0.0


@dataclass(frozen=True, eq=False)
class Placed:
    """A collective in a graph.

    Args:
        collective: The collective.
        start, wait: Places of its start and wait in the graph.
        first_use, last_use: Places of the first and last use of the gathered values.
        ready: Place where the last of the reduced gradients is computed.
        copied: Gradients that are computed outside the bucket, copied into it, and then released.
    """

    collective: Collective
    start: float
    wait: float
    first_use: float = 0.0
    last_use: float = 0.0
    ready: float = 0.0
    copied: tuple[Storage, ...] = ()


@dataclass(frozen=True, eq=False)
class SavedCopy:
    """A copy of a saved value to host memory (``outward``) or back.

    Args:
        start, wait: Places of its start and wait in the graph.
        bytes: Its size.
        seconds: Time of the copy alone on the link.
    """

    outward: bool
    start: float
    wait: float
    bytes: int
    seconds: float


Saved = Mapping[str, Storage | None]
"""Values that a forward graph saves for its backward graph, by name.

None stands for inputs of the forward, which stay in memory anyway.
"""


@dataclass(frozen=True, eq=False)
class Flow:
    """Flow of one graph.

    Args:
        kernels: Kernels, ordered by place.
        seconds: Time of each kernel.
        collectives: Collectives, in order of their starts.
        storages: All storages, including those from the forward graph.
        uses: Place of the first use of each bucket and the bucket, in order, whether it is communicated or not.
        saved: Values saved for the backward graph.
        copies: Copies of saved values to host memory and back.
        delivered: Places where gradients are delivered, and the index of the bucket.
    """

    kernels: tuple[Kernel, ...]
    seconds: tuple[float, ...]
    collectives: tuple[Placed, ...]
    storages: tuple[Storage, ...]
    uses: tuple[tuple[float, int], ...]
    saved: Saved = field(default_factory=dict)
    copies: tuple[SavedCopy, ...] = ()
    delivered: tuple[tuple[float, int], ...] = ()


def flow_of(
    graph: fx.Graph, context: Context, costs: CostModel, *, user_outputs: int = 0, saved: Saved | None = None
) -> Flow:
    """Return the flow of a graph with roles.

    Args:
        user_outputs: Number of user outputs of a forward graph. The outputs after these are saved for backward.
        saved: Saved values of the forward graph, if this graph is its backward.
    """
    return _Reader(graph, context, costs, user_outputs, saved).read()


class _Reader:
    def __init__(
        self, graph: fx.Graph, context: Context, costs: CostModel, user_outputs: int, saved: Saved | None
    ) -> None:
        self.graph, self.context, self.costs = graph, context, costs
        self.user_outputs, self.before = user_outputs, saved
        self.place = {node: float(i) for i, node in enumerate(graph.nodes)}
        self.kernels = kernels(graph, costs.fused)
        self.unstored = inlined(graph) if costs.fused else set()
        self.regions: dict[fx.Graph, Flow] = {}
        self.kernels = [self._with_flops(kernel) for kernel in self.kernels]
        self.kernel_of: dict[fx.Node, Kernel] = {}
        for kernel in self.kernels:
            for node in kernel.nodes:
                self.kernel_of[node] = kernel
                self.place[node] = kernel.place
        self.roots: dict[fx.Node, list[Storage]] = {}
        self.storages: list[Storage] = []
        self.given: dict[Storage, Storage] = {}  # the forward graph's storage -> this graph's; names may share one

    def read(self) -> Flow:
        for node in self.graph.nodes:
            self.roots[node] = self._roots(node)
            if self.costs.fused and node.target in _CONVOLUTIONS:
                self._copy_to_channels_last(node)
        self._end_lives()
        self._work_in_regions()
        if self.costs.fused:
            self._reuse()
        collectives = tuple(sorted(self._collectives(), key=lambda c: c.start))
        seconds = tuple(map(self._seconds, self.kernels))
        storages = tuple(s for s in self.storages if s.bytes or s.in_buffer)
        uses = sorted(
            (min(self.place[use] for use in gather.uses), gather.bucket)
            for gather in roles.gathers(self.graph)
            if gather.uses
        )
        delivers = self.graph.find_nodes(op="call_function", target=roles.DELIVER)
        return Flow(
            tuple(self.kernels),
            seconds,
            collectives,
            storages,
            tuple(uses),
            self._saved(),
            tuple(self._copies()),
            tuple((self.place[node], node.args[2]) for node in delivers),  # type: ignore[misc]
        )

    # -- regions ------------------------------------------------------------------------------------------------------

    def _region(self, graph: fx.Graph) -> Flow:
        """Return the flow of a region, with all its operands in memory until their last use in it."""
        if graph not in self.regions:
            context = region_of(graph)
            assert context is not None
            roles.assign(graph)
            operands = {
                n.name: Storage(value_bytes(n), Category.SAVED, -1, None) for n in graph.find_nodes(op="placeholder")
            }
            self.regions[graph] = flow_of(graph, context, self.costs, saved=operands)
        return self.regions[graph]

    def _with_flops(self, kernel: Kernel) -> Kernel:
        if kernel.region is None:
            return kernel
        return replace(kernel, flops=sum(inner.flops for inner in self._region(kernel.region).kernels))

    def _seconds(self, kernel: Kernel) -> float:
        return sum(self._region(kernel.region).seconds) if kernel.region is not None else self.costs.kernel(kernel)

    def _allocate_results(self, call: fx.Node) -> list[Storage]:
        packs: dict[int, int] = roles.body_of(call).meta.get("mfsdp_packs", {})
        found = []
        for number, value in enumerate(call.meta["val"]):
            found.append(self._allocate(call, value))
            if number in packs:
                found[-1].category = Category.GRADIENTS
                found[-1].bucket = bucket = call.meta["custom"][roles.REGION][packs[number]]
                if self.context.buckets[bucket].exchange.gradient_buffers.capacity:
                    found[-1].bytes, found[-1].in_buffer = 0, True
        return found

    def _work_in_regions(self) -> None:
        """Account for the memory that a region needs beyond its operands and results."""
        for call in roles.region_calls(self.graph):
            place, graph = self.place[call], roles.body_of(call).graph
            names = [node.name for node in graph.find_nodes(op="placeholder")]
            operands = {
                name: sum(storage.bytes for storage in self.roots[operand] if storage.end == place)
                for name, operand in zip(names, call.args[2:], strict=True)
                if isinstance(operand, fx.Node)
            }
            results = sum(storage.bytes for storage in self.roots[call])
            # Without Inductor, the graph around the region refers to all operands until the call returns.
            kept = {name for name in names if not (operands.get(name) and self.costs.fused)}
            peak = _peak(self._region(graph), kept)
            if (more := peak - results) > 0:
                self.storages.append(Storage(more, Category.TEMPORARY, place, place))

    # -- storages -----------------------------------------------------------------------------------------------------

    def _roots(self, node: fx.Node) -> list[Storage]:
        """Return the storages behind a node's value, in order."""
        if node.op == "placeholder":
            return self._given(node)
        if node.op != "call_function":
            return []
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target is operator.getitem and source is not None:
            return self._item(source, node.args[1])
        if source is not None and (is_alias(node) or self._passes_on(node)):
            return self.roots[source]
        if roles.is_region_call(node):
            return self._allocate_results(node)
        return [self._allocate(node, value) for value in compat.tree_leaves(node.meta.get("val"))]

    def _item(self, source: fx.Node, index: Any) -> list[Storage]:
        """Return the storages of one element of a tuple. The element may be a tuple too."""
        values, whole = self.roots[source], source.meta.get("val")
        if not isinstance(whole, (list, tuple)) or not isinstance(index, int):
            return values
        index %= len(whole)
        begin, end = (len(compat.tree_leaves(list(whole[:stop]))) for stop in (index, index + 1))
        return values[begin:end]

    def _passes_on(self, node: fx.Node) -> bool:
        """Whether a node's value is its first input's storage: a wait, or an operator that writes to its input."""
        target = node.target
        if target is torch.ops._c10d_functional.wait_tensor.default:
            return True
        if target is roles.DELIVER:
            return False
        return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable

    def _given(self, node: fx.Node) -> list[Storage]:
        if self.before is None or node.name not in self.before:
            return []
        storage = self.before[node.name]
        if storage is None:
            return []
        if storage not in self.given:
            self.given[storage] = Storage(storage.bytes, storage.category, -1, -1, storage.bucket, name=node.name)
            self.storages.append(self.given[storage])
        return [self.given[storage]]

    def _allocate(self, node: fx.Node, value: Any) -> Storage:
        """Allocate storage for one of a node's values. Values that are not tensors get 0 bytes, to keep their place."""
        size = 0
        if isinstance(value, Tensor):
            size = math.prod(compat.concrete(length) for length in value.shape) * value.dtype.itemsize
        role = role_of(node)
        kind = role.kind if role is not None else None
        category = _CATEGORIES.get(kind, Category.TEMPORARY)  # type: ignore[arg-type]
        bucket = role.bucket if role is not None and category is not Category.TEMPORARY else None
        if (kernel := self.kernel_of.get(node)) is not None and kernel.finishes is not None:
            category, bucket = Category.GRADIENTS, kernel.finishes
        if (in_buffer := self._is_in_buffer(node)) or (self.costs.fused and self._is_unstored(node)):
            size = 0
        copied = roles.saved_copies.get(node.target)
        if copied == "out" or node.target is roles.DELIVER:  # in host memory, or without memory
            size = 0
        if copied == "back":
            category = Category.SAVED
        begin = self.place[node]
        if node.target is _PACK and self.costs.fused:
            begin = min([begin, *(self.place[g] for g in self._packed_in_place(node))])
        storage = Storage(size, category, begin, begin, bucket, in_buffer=in_buffer)
        self.storages.append(storage)
        return storage

    def _is_in_buffer(self, node: fx.Node) -> bool:
        """Whether a value is in a communication buffer, which exists all the time."""
        return node.target is roles.GATHER_INTO_BUFFER or (node.target is _PACK and any(node.args[4:5]))

    def _copy_to_channels_last(self, node: fx.Node) -> None:
        """Account for the copies that Inductor makes for channels-last convolutions.

        The model's inputs and the gathered weights have another layout. Weights are copied at each use. An input is
        copied once, and the copy is saved for backward.
        """
        at = _CONVOLUTIONS[node.target]
        image, weight = node.args[at : at + 2]
        assert isinstance(image, fx.Node)
        assert isinstance(weight, fx.Node)
        if not _wants_channels_last(weight.meta["val"]):
            return
        self._allocate(node, weight.meta["val"])
        source = origin(image)
        if source.op == "placeholder" and not self.roots[source] and _wants_channels_last(image.meta["val"]):
            self.roots[source] = [self._allocate(node, image.meta["val"])]

    def _is_unstored(self, node: fx.Node) -> bool:
        """Whether a value needs no storage of its own.

        That holds for values inside a fused kernel, for constants that fused kernels recompute, and for gradients
        computed in the packed bucket.
        """
        kernel = self.kernel_of.get(node)
        if (kernel is not None and node in kernel.inner) or node in self.unstored:
            return True
        return any(self._is_packed_in_place(node, user) for user in readers(node))

    def _is_packed_in_place(self, node: fx.Node, pack: fx.Node) -> bool:
        """Whether a gradient is computed in its slot of the bucket: it has the bucket's dtype and no other reader."""
        if pack.target is not _PACK or len(readers(node)) > 1 or node not in self.kernel_of:
            return False
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.dtype == pack.meta["val"].dtype

    def _packed_in_place(self, pack: fx.Node) -> list[fx.Node]:
        found = []
        for gradient in map(origin, pack.all_input_nodes):
            if self._is_packed_in_place(gradient, pack):
                found.append(gradient)
        return found

    def _end_lives(self) -> None:
        kept: set[int] = set()
        for value in compat.tree_leaves(self.graph.output_node().args):
            if isinstance(value, fx.Node):
                kept.update(id(storage) for storage in self.roots[value])
        for node in self.graph.nodes:
            if node.op != "call_function" or is_alias(node) or node.target is operator.getitem:
                continue
            at = self.place[node]
            launches = roles.is_collective(node) or node.target in roles.REDUCES
            if launches and self.costs.holds_inputs:
                at = max([at, *(self.place[user] for user in node.users)])
            for source in node.all_input_nodes:
                for storage in self.roots[source]:
                    storage.end = max(storage.end or 0.0, at)
            for storage in self.roots[node]:
                storage.end = max(storage.end or 0.0, at)
        for storage in self.storages:
            if id(storage) in kept:
                storage.end = None
                if self.before is not None:
                    storage.category = Category.GRADIENTS

    def _reuse(self) -> None:
        """Let fused kernels overwrite inputs of the same size whose last use they are."""
        dying: dict[float, list[Storage]] = {}
        for storage in self.storages:
            if storage.end is not None and storage.bucket is None and storage.bytes:
                dying.setdefault(storage.end, []).append(storage)
        for kernel in self.kernels:
            if kernel.flops or kernel.collective is not None:
                continue
            free = [s for s in dying.get(kernel.place, []) if s.begin < kernel.place]
            for storage in [s for n in kernel.nodes for s in self.roots[n] if s.begin == kernel.place and s.bytes]:
                for old in free:
                    if old.bytes == storage.bytes:
                        old.handed_on = True
                        free.remove(old)
                        break

    def _saved(self) -> dict[str, Storage | None]:
        values = compat.tree_leaves(self.graph.output_node().args)[self.user_outputs :]
        found: dict[str, Storage | None] = {}
        for value in values:
            if isinstance(value, fx.Node):
                storages = self.roots[value]
                found[value.name] = storages[0] if storages else None
                for storage in storages:
                    if storage.category is Category.TEMPORARY:
                        storage.category = Category.SAVED
        return found

    # -- collectives --------------------------------------------------------------------------------------------------

    def _copies(self) -> Iterator[SavedCopy]:
        for wait in [node for node in self.graph.nodes if roles.saved_copies.get(node.target) == "wait"]:
            start = wait.all_input_nodes[0]
            size = value_bytes(start)
            outward = roles.saved_copies[start.target] == "out"
            yield SavedCopy(outward, self.place[start], self.place[wait], size, self.costs.host_copy(size))

    def _collectives(self) -> Iterator[Placed]:
        place, context, costs = self.place, self.context, self.costs
        for gather in roles.gathers(self.graph):
            info = context.buckets[gather.bucket]
            if gather.start is None:
                continue
            start, wait = gather.collective
            uses = [place[use] for use in gather.uses if use.op != "output"] or [place[wait]]
            collective = gather_of(info, gather.bucket, costs, gather.is_of_portions)
            yield Placed(collective, place[start], place[wait], min(uses), max(uses))
        for reduction in roles.reductions(self.graph):
            info = context.buckets[reduction.bucket]
            inside = reduction.pack.target is operator.getitem  # a region packs
            in_place = self._packed_in_place(reduction.pack) if costs.fused else []
            gradients = [origin(node) for node in reduction.pack.all_input_nodes if not inside]
            elsewhere = (storage for node in gradients if node not in in_place for storage in self.roots[node])
            copied = tuple(dict.fromkeys(s for s in elsewhere if s.end == place[reduction.pack]))
            for stage, (start, wait) in enumerate(reduction.stages):
                collective = reduction_of(info, reduction.bucket, stage, costs, len(in_place) < len(gradients))
                # Includes views, because the reduction starts after them.
                ready = max(place[node] for node in reduction.pack.all_input_nodes)
                yield Placed(collective, place[start], place[wait], ready=ready, copied=copied if stage == 0 else ())


def _peak(flow: Flow, kept: set[str]) -> int:
    """Return the peak bytes of a region beyond its operands.

    Args:
        kept: Names of operands that stay in memory.
    """
    changes: list[tuple[float, int, int]] = []
    for storage in flow.storages:
        if storage.begin >= 0:
            changes.append((storage.begin, 0, storage.bytes))
        if storage.end is not None and (storage.begin >= 0 or storage.name not in kept):
            changes.append((storage.end, -1 if storage.handed_on else 1, -storage.bytes))
    return max(itertools.accumulate((size for _, _, size in sorted(changes)), initial=0))


def _wants_channels_last(value: Tensor) -> bool:
    return value.dim() == 4 and not value.is_contiguous(memory_format=torch.channels_last)


def gather_of(info: BucketInfo, bucket: int, costs: CostModel, portions: bool = False) -> Collective:
    """Return the gather of a bucket, from shards or from portions."""
    if portions:
        return Collective("gather", bucket, 0, 0.0, costs.portions(info), info.portion_group)
    # A resident already has the dtype that is sent.
    before = 0.0 if info.has_resident else costs.cast(info)
    after, lane = 0.0, info.exchange.lane
    if lane.gather is not None:
        places = lane.places("use")
        before += costs.local(info, places[: lane.gather])
        after += costs.local(info, places[lane.gather + 1 :])
    seconds = costs.gather(info)
    return Collective("gather", bucket, 0, before, seconds, info.exchange.gather_group, after)


def reduction_of(info: BucketInfo, bucket: int, stage: int, costs: CostModel, copied: bool) -> Collective:
    """Return a stage of the reduction of a bucket.

    Args:
        copied: Whether any gradients are copied into the bucket instead of computed there.
    """
    moved = 2 * info.layout.numel * info.exchange.comm_dtype.itemsize
    before = costs.moved(moved) if copied and stage == 0 else 0.0
    flight = info.exchange.lane.reduction[stage]
    before += costs.local(info, flight.before)
    seconds, after = costs.reduction(info, stage), costs.local(info, flight.after)
    group = flight.stage.group.name if flight.stage.group is not None else ""
    return Collective("reduce", bucket, stage, before, seconds, group, after)


_CATEGORIES = dict.fromkeys(
    (NodeKind.CAST, NodeKind.START_GATHER, NodeKind.GATHERED, NodeKind.PORTION), Category.GATHERED
) | dict.fromkeys((NodeKind.PACK, NodeKind.START_REDUCE, NodeKind.REDUCED), Category.GRADIENTS)
