"""Input of the verifier's rules: a graph's collectives and the data flow around them.

Unlike :mod:`.roles`, which assumes that graphs are correct, this module also handles broken graphs: collectives that
are never awaited, that read the wrong input, or that a pass added without a role. The bucket of a node is taken from
its role or mark, or else from its input. The rules check whether that bucket is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import BucketInfo, Context, NodeKind, role_of

_aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
RELEASE = torch.ops.inductor.resize_storage_bytes_.default
_COPIES = (*roles.CASTS, _aten.clone.default, _aten.contiguous.default)


Findings = Iterator[tuple[Any, ...]]
"""Findings of a rule: what is wrong, the node, and the index of the bucket and the name of the parameter if known."""


class StorageRange(NamedTuple):
    """Elements ``[start, stop)`` of the memory that ``root`` allocates or receives."""

    root: fx.Node
    start: float = 0
    stop: float = math.inf

    def overlaps(self, other: StorageRange) -> bool:
        return self.root is other.root and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, eq=False)
class CollectiveNode:
    """One of our own collectives.

    Args:
        node: Node that starts it.
        bucket: Index of its bucket.
        gathers: Whether it gathers; otherwise it reduces.
        waits: Nodes that wait for it.
        readers: Nodes that read its result without a wait.
    """

    node: fx.Node
    bucket: int
    gathers: bool
    waits: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]

    @property
    def input(self) -> fx.Node | None:
        return self.node.all_input_nodes[0] if self.node.all_input_nodes else None

    @property
    def before(self) -> list[fx.Node]:
        """Casts, fetches and local stages between a shard and its gather, the last one first."""
        found: list[fx.Node] = []
        node = self.input
        while node is not None and node.op == "call_function" and _is_in_front(node):
            found.append(node)
            node = node.all_input_nodes[0]
        return found

    @property
    def casts(self) -> list[fx.Node]:
        """Casts between a shard and its gather, the last one first."""
        return [node for node in self.before if node.target in roles.CASTS]

    @property
    def source(self) -> fx.Node:
        """The node that a gather fetches, casts and sends."""
        *_, first = self.node, *self.before
        return first.all_input_nodes[0] if first.all_input_nodes else first


@dataclass(frozen=True, eq=False)
class Whole:
    """A whole bucket, gathered or never sharded.

    Args:
        bucket: Index of the bucket.
        node: Node of the whole bucket.
        launch: Gather that makes it whole; None if nothing is communicated.
        aliases: The node, unless it is a graph input, and its views, including views of views.
        casts: Casts of the aliases, the aliases quantized for products in float8, and views of both.
        copies: Clones, and casts and views of the clones.
        uses: Nodes that read any of these.
    """

    bucket: int
    node: fx.Node
    launch: CollectiveNode | None
    aliases: tuple[fx.Node, ...]
    casts: tuple[fx.Node, ...]
    copies: tuple[fx.Node, ...]
    uses: tuple[fx.Node, ...]

    @property
    def reads(self) -> list[fx.Node]:
        """Nodes that read its memory, without those that read only casts or copies."""
        own = {self.node, *self.aliases}
        return [n for n in (*self.aliases, *self.casts, *self.copies, *self.uses) if own & set(n.all_input_nodes)]


@dataclass(frozen=True, eq=False)
class Portion:
    """A copy of this rank's portion of a bucket, in a forward graph.

    Args:
        bucket: Index of its bucket.
        node: Node that copies it.
        whole: Whole bucket that it is copied from; None if it is copied from something else.
    """

    bucket: int
    node: fx.Node
    whole: Whole | None


@dataclass(frozen=True, eq=False)
class ReductionFlow:
    """The reduction of a bucket's gradients.

    Args:
        bucket: Bucket of its last stage.
        pack: Packed gradients that its first stage reads; None if it reads something else.
        stages: Collectives of the stages. Empty if the graph only packs, and the eager path reduces.
        before: For each stage, the single-input nodes before it. Without stages: those between ``pack`` and the output.
        returned: Positions among the graph's outputs, and for each the single-input nodes before it.
    """

    bucket: int
    pack: fx.Node | None
    stages: tuple[CollectiveNode, ...]
    before: tuple[tuple[fx.Node, ...], ...]
    returned: tuple[tuple[int, tuple[fx.Node, ...]], ...]

    @property
    def first(self) -> fx.Node:
        """The first collective, or the packed gradients if there is none."""
        node = self.stages[0].node if self.stages else self.pack
        assert node is not None
        return node

    @property
    def last(self) -> fx.Node:
        """The last collective, or the packed gradients if there is none."""
        return self.stages[-1].node if self.stages else self.first


class Analysis:
    """Collectives and data flow of one graph."""

    def __init__(self, graph: fx.Graph, context: Context, phase: Phase) -> None:
        self.graph, self.context, self.phase = graph, context, phase
        self.order = {node: position for position, node in enumerate(graph.nodes)}
        (values,) = graph.output_node().args
        self.outputs: list[Any] = list(values) if isinstance(values, (list, tuple)) else [values]
        """Outputs in order, including None and constants, so that indices are output positions."""
        self.launches = list(self._launches())
        self._launch_of = {launch.node: launch for launch in self.launches}
        self.wholes = list(self._wholes())
        self.reductions = list(self._reductions())

    def info(self, bucket: int) -> BucketInfo:
        return self.context.buckets[bucket]

    @cached_property
    def whole_of(self) -> dict[fx.Node, Whole]:
        """Whole bucket of each node that is one, or a view, cast or copy of one; or an input that is viewed as one."""
        return {n: whole for whole in self.wholes for n in (whole.node, *whole.aliases, *whole.casts, *whole.copies)}

    @cached_property
    def portion_of(self) -> dict[fx.Node, Portion]:
        """Portion of each node that copies one."""
        found = {}
        for node in self.graph.find_nodes(op="call_function", target=roles.PORTION):
            if (bucket := _bucket_of(node)) is not None:
                whole = self.whole_of.get(node.all_input_nodes[0])
                is_whole = whole is not None and whole.node is node.all_input_nodes[0]
                found[node] = Portion(bucket, node, whole if is_whole else None)
        return found

    @cached_property
    def packed(self) -> list[fx.Node]:
        """Nodes that pack gradients, and packed gradients that regions return."""
        return [node for node in self.graph.nodes if node.op == "call_function" and roles.is_packed(node)]

    def scaled_parameter(self, node: fx.Node) -> str | None:
        """Return the name of the parameter whose scales a view of a bucket's scales is; None if it is of none."""
        parts = {node: (bucket, part) for bucket, node, part in self.scale_slices}
        while node not in parts and node.op == "call_function" and node.all_input_nodes:
            node = node.all_input_nodes[0]
        if node not in parts:
            return None
        bucket, part = parts[node]
        return self.scale_parts(bucket).get(part)

    def scale_parts(self, bucket: int) -> dict[tuple[int, int], str]:
        """Return the range ``(start, stop)`` of each parameter's scales among a bucket's, with the parameter's name."""
        found: dict[tuple[int, int], str] = {}
        stop = 0
        for slot in self.info(bucket).layout.slots:
            start, stop = stop, stop + quantize.scale_count(slot.shape, self.info(bucket).exchange.scaling)
            found.setdefault((start, stop), slot.name)
        return found

    @property
    def gather_launches(self) -> list[CollectiveNode]:
        return [launch for launch in self.launches if launch.gathers]

    @property
    def portions(self) -> list[Portion]:
        return list(self.portion_of.values())

    def needed_until(self, portion: fx.Node) -> int:
        """Return the position up to which a portion must not change. The portion is a copy or a placeholder."""
        if portion.op != "placeholder":
            return len(self.order)
        return max((self.in_flight(self._launch_of[n])[1] for n in portion.users if n in self._launch_of), default=0)

    @cached_property
    def writes(self) -> list[tuple[fx.Node, StorageRange]]:
        """Writing nodes and the memory that they write to, without our own collectives, which may write to outputs."""
        return [
            (node, self.memory(target))
            for node in self.graph.nodes
            if node not in self._launch_of
            for target in _written(node)
        ]

    def memory(self, node: fx.Node) -> StorageRange:
        """Return the memory of a node's value."""
        start, stop = 0.0, math.inf  # range within the current node
        while node.op == "call_function":
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            if (part := _part(node)) is not None:
                start, stop = part[0] + start, min(part[0] + stop, part[1])
            elif roles.is_view(node):
                start, stop = 0, math.inf  # the view may reorder elements
            elif written := _written(node):
                source = written[0]
            elif node.target is not WAIT:
                break
            if source is None:
                break
            node = source
        return StorageRange(node, start, stop)

    def in_flight(self, launch: CollectiveNode) -> tuple[int, int]:
        """Return the positions of a collective's start and of its last wait."""
        start = self.order[launch.node]
        return start, max((self.order[wait] for wait in launch.waits), default=len(self.order))

    def live(self, whole: Whole) -> tuple[int, int]:
        """Return the positions between which a gathered bucket must not change."""
        start = self.order[whole.launch.node if whole.launch else whole.node]
        return start, max((self.order[read] for read in whole.reads), default=start)

    def parameter(self, bucket: int, node: fx.Node) -> str | None:
        """Return the name of the parameter that a view of a bucket belongs to, or None."""
        slots = self.info(bucket).layout.slots
        while node.op == "call_function" and node.all_input_nodes:
            source = node.all_input_nodes[0]
            part = _part(node)
            whole = self.whole_of.get(source)
            if part is not None and (source in self._launch_of or (whole is not None and whole.node is source)):
                return next((s.name for s in slots if s.numel and s.offset == part[0]), None)
            node = source
        return slots[0].name if len(slots) == 1 else None

    def slices(self, whole: Whole) -> list[tuple[fx.Node, tuple[int, int]]]:
        """Return the nodes that slice a gathered bucket, with their ranges ``(start, stop)``."""
        found = ((user, _part(user)) for user in whole.node.users)
        return [(user, part) for user, part in found if part is not None]

    @cached_property
    def scale_slices(self) -> list[tuple[int, fx.Node, tuple[int, int]]]:
        """The nodes that slice the scales of a bucket: the bucket, the node, and its range ``(start, stop)``.

        A bucket of one parameter may have its scales read whole.
        """
        found = []
        for node in self.graph.nodes:
            role = role_of(node)
            if node.op != "call_function" or role is None or role.kind is not NodeKind.SCALES:
                continue
            if (source := node.all_input_nodes[0]).op == "placeholder":
                value = tensor_of(source)
                whole = (0, value.numel() if value is not None else 0)
                found.append((role.bucket, node, _part(node) or whole))
        return found

    # -- how it is found ----------------------------------------------------------------------------------------------

    def _launches(self) -> Iterator[CollectiveNode]:
        for node in self.graph.nodes:
            if node.op != "call_function" or not (roles.starts_gather(node) or roles.starts_reduction(node)):
                continue
            bucket = _bucket_of(node)
            if bucket is None or bucket >= len(self.context.buckets):
                continue
            waits = tuple(user for user in node.users if user.target in roles.WAITS and user.args[0] is node)
            readers = tuple(user for user in node.users if user not in waits)
            gathers = roles.starts_gather(node) and not roles.has_kind(node, NodeKind.START_REDUCE)
            yield CollectiveNode(node, bucket, gathers, waits, readers)

    def _wholes(self) -> Iterator[Whole]:
        for node in self.graph.nodes:
            role = role_of(node)
            launch = self._launch_of.get(node.args[0]) if node.target in roles.WAITS else None  # type: ignore[arg-type]
            if role is not None and role.kind is NodeKind.LANDED:
                continue
            if roles.is_local_stage(node):
                launch = self._landed_from(node)
            if node.op == "placeholder":
                is_scales = role is not None and role.kind is NodeKind.SCALES
                if role is not None and not is_scales and any(roles.reads_whole(user) for user in node.users):
                    yield self._whole(role.bucket, node, None)
            elif role is not None and role.kind is NodeKind.GATHERED:
                yield self._whole(role.bucket, node, launch)
            elif launch is not None and launch.gathers:
                yield self._whole(launch.bucket, node, launch)

    def _landed_from(self, node: fx.Node) -> CollectiveNode | None:
        """Return the gather behind whose wait a local stage stands; None if it stands behind none."""
        while roles.is_local_stage(node):
            node = node.all_input_nodes[0]
        return self._launch_of.get(node.args[0]) if node.target in roles.WAITS else None  # type: ignore[arg-type]

    def _whole(self, bucket: int, root: fx.Node, launch: CollectiveNode | None) -> Whole:
        aliases: dict[fx.Node, None] = {} if root.op == "placeholder" else {root: None}
        casts: dict[fx.Node, None] = {}
        copies: dict[fx.Node, None] = {}
        uses: dict[fx.Node, None] = {}
        pending = [root]
        while pending:
            node = pending.pop()
            for user in node.users:
                quantizes = user.target is roles.QUANTIZE or roles.is_of_quantized(user)
                if quantizes:  # unlike a copy that the model makes, it comes from a pass
                    found = casts
                elif user.target in _COPIES or node in copies:
                    found = casts if user.target in roles.CASTS and node not in copies else copies
                else:
                    found = casts if node in casts else aliases
                if not (roles.is_view(user) or user.target in _COPIES or quantizes):
                    if node.op != "placeholder" or roles.is_region_call(user):
                        uses[user] = None
                elif user not in found:
                    found[user] = None
                    pending.append(user)
        return Whole(bucket, root, launch, tuple(aliases), tuple(casts), tuple(copies), tuple(uses))

    def _reductions(self) -> Iterator[ReductionFlow]:
        """Yield one reduction for each reducing collective that no further stage follows."""
        yield from self._packed_only()
        launches = {launch.node: launch for launch in self.launches if not launch.gathers}
        if not launches:
            return
        sources = {launch: _climb(launch.input) for launch in launches.values()}
        previous = {launch: launches.get(_awaited(root)) for launch, (root, _) in sources.items()}
        continued = set(previous.values())
        returned: dict[CollectiveNode | None, list[tuple[int, tuple[fx.Node, ...]]]] = {}
        for position, value in enumerate(self.outputs):
            if isinstance(value, fx.Node):
                root, passed = _climb(value)
                returned.setdefault(launches.get(_awaited(root)), []).append((position, passed))
        for launch in launches.values():
            if launch in continued:
                continue
            stages = [launch]
            while (before := previous[stages[0]]) is not None and before not in stages:
                stages.insert(0, before)
            root = sources[stages[0]][0]
            pack = root if root is not None and roles.is_packed(root) else None
            passed = tuple(sources[stage][1] for stage in stages)
            yield ReductionFlow(launch.bucket, pack, tuple(stages), passed, tuple(returned.get(launch, ())))

    def _packed_only(self) -> Iterator[ReductionFlow]:
        """Yield the gradients that a graph packs for the eager path to reduce."""
        for pack in self.packed:
            role = role_of(pack)
            if role is None or self.info(role.bucket).exchange.lane.reduction:
                continue
            climbs = [(i, *_climb(value)) for i, value in enumerate(self.outputs) if isinstance(value, fx.Node)]
            found = [(position, passed) for position, root, passed in climbs if root is pack]
            before = found[0][1] if found else ()
            yield ReductionFlow(role.bucket, pack, (), (before,), tuple((position, ()) for position, _ in found))


def _climb(node: fx.Node | None) -> tuple[fx.Node | None, tuple[fx.Node, ...]]:
    """Follow single-input nodes, and what delivers gradients, up to a collective, a wait or packed gradients.

    Returns:
        The node at the end, and the nodes on the way in graph order.
    """
    passed: list[fx.Node] = []
    while (
        node is not None
        and node.op == "call_function"
        and node.target not in roles.WAITS
        and not (roles.starts_gather(node) or roles.starts_reduction(node))
        and not roles.is_packed(node)
        and (len(node.all_input_nodes) == 1 or node.target in (roles.DELIVER, roles.RUN_STAGE))
    ):
        passed.insert(0, node)
        node = node.all_input_nodes[0]
    return node, tuple(passed)


def _awaited(node: fx.Node | None) -> Any:
    """Return the node that a wait waits for; a node that is no wait is returned itself."""
    return node.args[0] if node is not None and node.target in roles.WAITS else node


def _bucket_of(node: fx.Node) -> int | None:
    """Return the bucket of a collective; None for the model's own collectives."""
    if (role := role_of(node)) is not None:
        return role.bucket
    if (mark := (node.meta.get("custom") or {}).get(roles.MARK)) is not None:
        return mark
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    while source is not None and source.op == "call_function" and (source.target is WAIT or _is_in_front(source)):
        source = source.all_input_nodes[0]
    role = role_of(source) if source is not None else None
    return (
        role.bucket
        if role is not None and role.kind in (NodeKind.SHARD, NodeKind.PACK, NodeKind.START_REDUCE)
        else None
    )


def _is_in_front(node: fx.Node) -> bool:
    """Whether a node may stand between a shard and its gather."""
    return node.target in roles.CASTS or roles.is_local_stage(node)


def landing(whole: Whole) -> list[fx.Node]:
    """Return the local stages between the wait of a gather and the whole bucket, the last one first."""
    found, node = [], whole.node
    while roles.is_local_stage(node):
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def whole_operands(call: fx.Node) -> Iterator[tuple[int, Any]]:
    """Yield the buckets that a region reads, each with the operand that must be it."""
    for number, position in roles.body_of(call).meta["mfsdp_wholes"].items():
        yield call.meta["custom"][roles.REGION][number], call.args[position]


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator call, by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def tensor_of(node: Any) -> Tensor | None:
    """Return the tensor in a node's ``meta["val"]``; None if there is none."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _part(node: fx.Node) -> tuple[int, int] | None:
    """Return the elements ``(start, stop)`` that a slice takes of a flat tensor; None for other nodes."""
    if node.op != "call_function" or node.target is not _aten.slice.Tensor:
        return None
    given = arguments(node)
    start, stop = given.get("start") or 0, given.get("end")
    value = tensor_of(given["self"])
    flat = value is None or value.dim() == 1
    if not flat or given.get("step", 1) != 1 or not isinstance(start, int) or not isinstance(stop, int):
        return None
    return start, stop


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that an operator writes to."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    if not node.target._schema.is_mutable:
        return []
    given = arguments(node)
    found: list[fx.Node] = []
    for argument in node.target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = given.get(argument.name)
            found += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return found
