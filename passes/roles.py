"""Find gathers and reductions in the graphs that AOTAutograd makes.

    shard -> [cast] -> all_gather -> wait -> view -> view ...         one :class:`Gather`
                                         \\-> view -> compute

    shard -> gather_into_buffer -> wait -> view -> view ...           the same, into a communication buffer

    resident -> all_gather -> wait -> dequantize -> view ...          the same, in float8
                           scales ---/

    resident -> all_gather -> wait -> view -> view ...                the same, if modules take the bytes as they are
    scales -> view ...

    gradients -> pack_gradients -> reduce_scatter -> wait -> [cast] -> output         one :class:`Reduction`
                                          (a second stage with outer ranks; then a copy to where the shard rests)

    ... -> wait -> [cast] -> deliver -> output        the gradient is delivered when it has arrived (:mod:`.deliver`)

    ... -> local stages -> start -> wait -> local stages -> ...       either, through stages of plug-ins and guests

If a backward gathers portions that its forward kept (:mod:`.portions`):

    portion -> all_gather -> wait -> view -> view ...

Other strategies have gathers without an all-gather: ``resident -> wait -> view ...``, ``shard -> [cast] -> view ...``.

``passes.unshard`` marks the ``gather`` call in Dynamo's graph with the number of its bucket, in ``meta["custom"]``.
AOTAutograd copies the mark to all nodes derived from the call, in forward and backward. This module turns marks into
roles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.collectives import fakes as fakes  # defines the operators that are read below
from mfsdp_compile.runtime.formats import fp8_linear as fp8_linear  # defines others
from mfsdp_compile.runtime.lanes.stage import local_operators

from .context import NodeKind, Role, role_of, set_role

MARK = "mfsdp_bucket"
SCALES_MARK = "mfsdp_scales"
"""Key in ``meta["custom"]``, like :data:`MARK`, of views of a bucket's scales."""
REGION = "mfsdp_region_buckets"
"""Key in ``meta["custom"]`` of a region's calls: the indices of the buckets that it is called with."""

FP8 = "mfsdp_fp8"
"""Key in ``meta["custom"]`` of what computes a linear layer in float8."""

_c10d = torch.ops._c10d_functional
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True)
class Gather:
    """The nodes that make one bucket whole.

    Args:
        bucket: Index of the bucket in the context.
        before: Nodes that compute the input of the all-gather from this rank's shard: local stages, casts and waits.
        start: The all-gather; None if the bucket is already whole.
        landing: The wait and the local stages behind it, if there are any, but for the last one.
        whole: The wait of the all-gather, the last local stage behind it, or another node that produces the whole
            bucket; None if that is a placeholder.
        views: Views of the whole bucket, including views of views, in graph order.
        uses: Nodes that read the gathered values, in graph order.
    """

    bucket: int
    before: tuple[fx.Node, ...]
    start: fx.Node | None
    whole: fx.Node | None
    views: tuple[fx.Node, ...]
    uses: tuple[fx.Node, ...]
    landing: tuple[fx.Node, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes of the gather except the uses."""
        return tuple(n for n in (*self.before, self.start, *self.landing, self.whole, *self.views) if n is not None)

    @property
    def collective(self) -> tuple[fx.Node, fx.Node]:
        """Start and wait of the all-gather. Only for gathers that communicate."""
        assert self.start is not None
        assert self.whole is not None
        return self.start, self.landing[0] if self.landing else self.whole

    @property
    def is_of_portions(self) -> bool:
        """Whether ranks send their portions of the bucket instead of their shards."""
        return self.start is not None and has_kind(self.start.all_input_nodes[0], NodeKind.PORTION)


@dataclass(frozen=True)
class Reduction:
    """The nodes that reduce one bucket's gradients.

    Args:
        bucket: Index of the bucket in the context.
        pack: Node that packs the gradients into the bucket.
        scale: Nodes between ``pack`` and the first stage.
        stages: Start and wait of each stage.
        between: For each stage but the last, nodes between its wait and the start of the next.
        after: Nodes that turn the last wait into the graph's output.
    """

    bucket: int
    pack: fx.Node
    scale: tuple[fx.Node, ...]
    stages: tuple[tuple[fx.Node, fx.Node], ...]
    between: tuple[tuple[fx.Node, ...], ...]
    after: tuple[fx.Node, ...]

    @property
    def start(self) -> fx.Node:
        return self.stages[0][0]

    @property
    def wait(self) -> fx.Node:
        return self.stages[-1][1]


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective, ours or the model's own."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        (target.namespace == "_c10d_functional" and target is not _c10d.wait_tensor.default)
        or target in (GATHER_INTO_BUFFER, EXCHANGE_SLICES, START_STAGE)
    )


def is_region_call(node: fx.Node) -> bool:
    """Whether a node calls a region, in any kind of graph."""
    if node.op != "call_function" or node.target not in (compat.region_call, compat.invoke_subgraph):
        return False
    return REGION in (node.meta.get("custom") or {})


def region_calls(graph: fx.Graph) -> list[fx.Node]:
    """All calls of regions, in graph order."""
    return [node for node in graph.nodes if is_region_call(node)]


def body_of(call: fx.Node) -> fx.GraphModule:
    """Return the graph that a region's call runs."""
    attribute: Any = call.args[0]
    body = attribute_of(attribute)
    return body if body is not None else call.meta["mfsdp_body"]  # a copy of a graph may lack what belongs to it


def attribute_of(node: fx.Node) -> Any:
    """Return what a ``get_attr`` node stands for; None if its graph is a copy that lacks it."""
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def nested_graph(argument: Any) -> fx.GraphModule | None:
    """Return the graph that an argument of an operator is, such as a checkpoint's body; None for other arguments."""
    value = attribute_of(argument) if isinstance(argument, fx.Node) and argument.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def dependencies(graph: fx.Graph, known: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Return, for each node, which of the ``known`` nodes it depends on: the union of their bits.

    Sets would take quadratic memory.
    """
    found = dict(known)
    for node in graph.nodes:
        if node not in found:
            bits = 0
            for source in node.all_input_nodes:
                bits |= found.get(source, 0)  # a broken graph may read a node that comes later
            found[node] = bits
    return found


def pack_inside(packed: fx.Node) -> fx.Node:
    """Return the node that packs, in a region's body, the bucket of gradients that an element of its result is."""
    call, position = packed.args
    assert isinstance(call, fx.Node)
    result = body_of(call).graph.output_node().args[0][position]  # type: ignore[index]
    while not is_packed(result):
        result = result.all_input_nodes[0]
    return result


def is_packed(node: fx.Node) -> bool:
    """Whether a node packs gradients, or is a bucket of gradients that a region returns."""
    if node.target is _PACKING:
        return True
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _packed_of(node) is not None


def _packed_of(node: fx.Node) -> int | None:
    """Return the bucket whose packed gradient an element of what a region returns is."""
    call, index = node.args[:2]
    if not isinstance(call, fx.Node) or not is_region_call(call):
        return None
    number = body_of(call).meta.get("mfsdp_packs", {}).get(index)
    return call.meta["custom"][REGION][number] if number is not None else None


def reads_whole(user: fx.Node) -> bool:
    """Whether a reader of a graph input takes it for a whole bucket: a view, or a region."""
    return has_kind(user, NodeKind.VIEW) or is_region_call(user)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node reads, without symbolic numbers: a view of a parameter may have sizes of a batch."""
    return [source for source in node.all_input_nodes if not isinstance(source.meta.get("val"), NUMBERS)]


def is_view(node: fx.Node) -> bool:
    """Whether a node aliases its first input without changing it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    if not (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view):
        return False
    return bool(tensor_inputs(node))  # the conjugate of a number is a view of nothing


def is_of_quantized(node: fx.Node) -> bool:
    """Whether a node is data or scales of a quantized matrix, or a copy of its data in another layout."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return False
    if node.target is operator.getitem:
        return source.target is QUANTIZE
    if not is_view(node) and node.target is not torch.ops.aten.clone.default:
        return False
    return is_of_quantized(source)


def is_operator(node: fx.Node) -> bool:
    """Whether a node does something: neither views, nor elements of what a region returns."""
    if node.op != "call_function" or is_view(node):
        return False
    return node.target is not operator.getitem or not is_region_call(node.args[0])  # type: ignore[arg-type]


GATHER_INTO_BUFFER = torch.ops.mfsdp.gather_into_buffer.default
GATHERS = (_c10d.all_gather_into_tensor.default, _c10d.all_gather_into_tensor_out.default, GATHER_INTO_BUFFER)
DELIVER = torch.ops.mfsdp.deliver.default
EXCHANGE_SLICES = torch.ops.mfsdp.exchange_slices.default
REDUCE_IF_DUE = torch.ops.mfsdp.reduce_if_due.default
RUN_STAGE, START_STAGE, WAIT_STAGE = (
    getattr(torch.ops.mfsdp, name).default for name in ("run_stage", "start_stage", "wait_stage")
)
REDUCES = (
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_reduce.default,
    REDUCE_IF_DUE,
    EXCHANGE_SLICES,
)
_PACKING = torch.ops.mfsdp.pack_gradients.default
DISTINCT = (torch.ops.mfsdp.pack_gradients, compat.region_call, compat.invoke_subgraph)
"""Operators whose calls the partitioner must not merge: two buckets with the same gradients have two reductions."""
PORTION = torch.ops.mfsdp.portion.default
WAITS = (_c10d.wait_tensor.default, WAIT_STAGE)
"""Operators that await a collective."""
QUANTIZE = torch.ops.mfsdp.fp8_quantize.default
_KINDS: dict[Any, NodeKind] = {
    _PACKING: NodeKind.PACK,
    PORTION: NodeKind.PORTION,
}
"""Kinds of marked nodes that follow from their operators alone."""
saved_copies: dict[Any, str] = {}
"""Operators of copies of saved values, as their pass registers them: ``"out"``, ``"back"`` or ``"wait"``."""
CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)


def place_of(node: fx.Node) -> tuple[str, str, int] | None:
    """Return the place of the stage that a node runs, starts or awaits, if it says so: key of the lane, part, index."""
    if node.target not in (RUN_STAGE, START_STAGE, WAIT_STAGE):
        return None
    lane, part, index = node.args[-3:]
    return lane, part, index  # type: ignore[return-value]


def token_of(node: fx.Node) -> fx.Node | None:
    """Return the graph input that tells a stage's operator which bucket it is; None if there is none."""
    if node.target not in (RUN_STAGE, START_STAGE, WAIT_STAGE, REDUCE_IF_DUE):
        return None
    token = node.args[1]
    return token if isinstance(token, fx.Node) and token.op == "placeholder" else None


def starts_gather(node: fx.Node) -> bool:
    """Whether a node starts a collective that gathers."""
    if node.target is START_STAGE:
        return node.args[-2] == "use"
    return node.target in GATHERS


def starts_reduction(node: fx.Node) -> bool:
    """Whether a node starts a stage of a reduction, or may: it reduces, or gathers sums."""
    return node.target in REDUCES or (node.target is START_STAGE and node.args[-2] != "use")


def is_local_stage(node: fx.Node) -> bool:
    """Whether a node is a local stage's operator."""
    return node.target is RUN_STAGE or node.target in local_operators


def takes_scales(node: fx.Node) -> bool:
    """Whether a node is a local stage that takes the scales of its bucket."""
    return node.target is not RUN_STAGE and is_local_stage(node) and len(node.all_input_nodes) > 1


def assign(graph: fx.Graph) -> None:
    """Give every node that gathers or reduces a bucket its role."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_region_call(node):
            _assign_inputs(node)
            continue
        if node.target is operator.getitem and (packed := _packed_of(node)) is not None:
            set_role(node, Role(NodeKind.PACK, packed))
            continue
        kind = _kind(node)
        if kind is None:
            continue
        bucket = _mark(node, SCALES_MARK if kind is NodeKind.SCALES else MARK)
        if bucket is None:
            source = role_of(node.all_input_nodes[0])
            assert source is not None
            bucket = source.bucket
        set_role(node, Role(kind, bucket))
        token = token_of(node)
        if token is not None:
            set_role(token, Role(NodeKind.TOKEN, bucket))
        for source in tensor_inputs(node) if kind is not NodeKind.PACK else ():
            if source is not token and source.op == "placeholder" and not has_kind(source, NodeKind.PORTION):
                set_role(source, Role(_kind_of_input(node, kind), bucket))


def _kind_of_input(node: fx.Node, kind: NodeKind) -> NodeKind:
    """Return the kind of a placeholder that a node with a role reads."""
    return NodeKind.SCALES if kind is NodeKind.SCALES or takes_scales(node) else NodeKind.SHARD


def _assign_inputs(call: fx.Node) -> None:
    """Give roles to whole buckets and scales that a region reads from the graph's inputs."""
    buckets, body = call.meta["custom"][REGION], body_of(call)
    call.meta["mfsdp_body"] = body
    for key, kind in (("mfsdp_wholes", NodeKind.SHARD), ("mfsdp_scales", NodeKind.SCALES)):
        for number, operand in body.meta[key].items():
            source = call.args[operand]
            if isinstance(source, fx.Node) and source.op == "placeholder":
                set_role(source, Role(kind, buckets[number]))


def _mark(node: fx.Node, key: str = MARK) -> int | None:
    return (node.meta.get("custom") or {}).get(key)


def _kind(node: fx.Node) -> NodeKind | None:
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    role = role_of(source) if source is not None else None
    of = role.kind if role is not None else None
    target = node.target
    if target in _KINDS and _mark(node) is not None:
        return _KINDS[target]
    if starts_reduction(node) and of in (NodeKind.PACK, NodeKind.REDUCED):
        return NodeKind.START_REDUCE
    if target in GATHERS and of is NodeKind.REDUCED:  # of sums of slices
        return NodeKind.START_REDUCE
    if target in WAITS and of is NodeKind.START_REDUCE:
        return NodeKind.REDUCED
    if of is NodeKind.REDUCED and _leads_on(node):
        return NodeKind.REDUCED
    if (target in WAITS and of is NodeKind.START_GATHER) or (of is NodeKind.LANDED and is_local_stage(node)):
        return NodeKind.LANDED if any(map(is_local_stage, node.users)) else NodeKind.GATHERED
    if is_view(node) and (of is NodeKind.SCALES or (_mark(node, SCALES_MARK) is not None and _is_input(source))):
        return NodeKind.SCALES
    if is_view(node) and (of in (NodeKind.GATHERED, NodeKind.VIEW) or (_mark(node) is not None and _is_input(source))):
        return NodeKind.VIEW
    if _mark(node) is None:
        return None
    if starts_gather(node):
        return NodeKind.START_GATHER
    if is_local_stage(node) and (_is_input(source) or of is NodeKind.CAST):
        return NodeKind.CAST if any(map(_is_before_gather, node.users)) else NodeKind.GATHERED
    if (target is _c10d.wait_tensor.default or target in CASTS) and (_is_input(source) or of is NodeKind.CAST):
        feeds = any(map(_is_before_gather, node.users))
        return NodeKind.CAST if feeds else NodeKind.GATHERED
    if of is NodeKind.PACK:  # scaled before it is reduced
        return NodeKind.PACK
    return NodeKind.REDUCED if is_local_stage(node) else None  # behind a cast of what was reduced


def _is_before_gather(user: fx.Node) -> bool:
    """Whether what reads a cast of a shard is its gather, or leads to it."""
    return starts_gather(user) or user.target in CASTS or is_local_stage(user)


def _leads_on(node: fx.Node) -> bool:
    """Whether a node stands between two stages of a reduction: it is a local stage, or leads to the next start."""
    if is_local_stage(node):
        return True
    while node.op == "call_function" and len(tensor_inputs(node)) == 1 and len(node.users) == 1:
        if is_view(node) and node.target is operator.getitem:
            return False
        (node,) = node.users
        if starts_reduction(node) or starts_gather(node):
            return node.all_input_nodes[0].op != "placeholder"
    return False


def _is_input(node: fx.Node | None) -> bool:
    return node is not None and node.op == "placeholder"


def _of_kind(graph: fx.Graph, *kinds: NodeKind) -> Iterator[tuple[fx.Node, Role]]:
    for node in graph.nodes:
        role = role_of(node)
        if role is not None and role.kind in kinds:
            yield node, role


def gathers(graph: fx.Graph) -> list[Gather]:
    """All gathers of a graph with roles, in graph order."""
    found = []
    for node, role in _of_kind(graph, NodeKind.START_GATHER, NodeKind.GATHERED, NodeKind.SHARD):
        if role.kind is NodeKind.START_GATHER:
            (whole,), landing = node.users, []
            while has_kind(whole, NodeKind.LANDED):
                landing.append(whole)
                (whole,) = whole.users
            found.append(_gather(role.bucket, _casts_before(node), node, whole, whole, tuple(landing)))
        elif role.kind is NodeKind.GATHERED:
            if not (has_kind(node.all_input_nodes[0], NodeKind.START_GATHER) or _has_landed(node)):
                found.append(_gather(role.bucket, _casts_before(node), None, node, node))
        elif any(reads_whole(user) for user in node.users):
            found.append(_gather(role.bucket, (), None, None, node))
    return found


def _has_landed(node: fx.Node) -> bool:
    return has_kind(node.all_input_nodes[0], NodeKind.LANDED)


def _casts_before(node: fx.Node) -> tuple[fx.Node, ...]:
    before: list[fx.Node] = []
    while (role := role_of(node := node.all_input_nodes[0])) and role.kind is NodeKind.CAST:
        before.insert(0, node)
    return tuple(before)


def _gather(
    bucket: int,
    before: tuple[fx.Node, ...],
    start: fx.Node | None,
    whole: fx.Node | None,
    root: fx.Node,
    landing: tuple[fx.Node, ...] = (),
) -> Gather:
    views: list[fx.Node] = []
    uses: dict[fx.Node, None] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        for user in node.users:
            if has_kind(user, NodeKind.VIEW):
                if user not in views:
                    views.append(user)
                    pending.append(user)
            elif whole is not None or node is not root or is_region_call(user):
                # other readers of a placeholder itself do not read the bucket
                uses[user] = None
    return Gather(bucket, before, start, whole, tuple(sorted(views)), tuple(sorted(uses)), landing)


def packs(graph: fx.Graph) -> list[tuple[fx.Node, int]]:
    """The nodes of a graph with roles that pack gradients, each with the index of its bucket, in graph order."""
    return [(node, role.bucket) for node, role in _of_kind(graph, NodeKind.PACK) if is_packed(node)]


def reductions(graph: fx.Graph) -> list[Reduction]:
    """All reductions of a graph with roles, in graph order."""
    found = []
    for pack, bucket in packs(graph):
        scale: list[fx.Node] = []
        node = pack
        while scaled := [user for user in node.users if has_kind(user, NodeKind.PACK)]:
            node = scaled[0]
            scale.append(node)
        for start in [user for user in node.users if has_kind(user, NodeKind.START_REDUCE)]:
            found.append(_reduction(bucket, pack, tuple(scale), start))
    return found


def _reduction(bucket: int, pack: fx.Node, scale: tuple[fx.Node, ...], start: fx.Node) -> Reduction:
    stages: list[tuple[fx.Node, fx.Node]] = []
    locals_of: list[list[fx.Node]] = []
    following: fx.Node | None = start
    node = wait = start
    while following is not None:
        (wait,) = (user for user in following.users if has_kind(user, NodeKind.REDUCED))
        stages.append((following, wait))
        locals_of.append([])
        node = wait
        while (local := next((user for user in node.users if has_kind(user, NodeKind.REDUCED)), None)) is not None:
            locals_of[-1].append(local)
            node = local
        following = next((user for user in node.users if has_kind(user, NodeKind.START_REDUCE)), None)
    after: list[fx.Node] = []
    pending = [wait]
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and user not in after:
                after.append(user)
                pending.append(user)
    return Reduction(bucket, pack, scale, tuple(stages), tuple(map(tuple, locals_of[:-1])), tuple(sorted(after)))


def has_kind(node: fx.Node, kind: NodeKind) -> bool:
    role = role_of(node)
    return role is not None and role.kind is kind
