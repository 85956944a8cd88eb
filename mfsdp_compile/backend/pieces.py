"""Pieces: the stretches of a finished graph between collectives, which Inductor compiles one by one.

A graph that has been through all passes, the verifier and the announcement is cut at what communicates. What runs is a
straight-line function of the same nodes in the same order (:mod:`.straight_line`)::

    def call(args):
        p1, p2, tokens = args
        args.clear()
        g0 = all_gather(p1, 2, "0")
        w0 = wait_tensor(g0)
        del g0
        a = [w0, tokens]
        del w0
        (x,) = piece_0(a)

Inductor sees no collective, so it reorders none: the graph that was verified is the graph that runs. A piece depends on
its operators, shapes, strides, dtypes and devices only, not on a rank, a group, the schedule or the layer that it
belongs to. Equal pieces are compiled once per process; Inductor's cache on disk has them once per machine.

Whatever costs nothing is computed wherever it is read: views, constants and arithmetic of sizes. So a piece takes whole
buckets and not parameters, and takes them out of a list: a bucket is freed where its last reader in the piece is done.
A piece that packs gradients into a communication buffer takes the buffer, too.

The body of a region is a piece, or a graph of pieces if it communicates itself (tensor and context parallelism,
experts).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.passes import roles
from mfsdp_compile.passes.context import NodeKind
from mfsdp_compile.passes.stretches import PACK, CannotCut, Stretch, communicates_inside, divide, graphs_of
from mfsdp_compile.runtime import compat

from .straight_line import Call, Program, Step


@dataclass(eq=False)
class Piece:
    """A graph without collectives.

    Args:
        module: The graph. It takes a list and returns a tuple.
        inputs: Fake tensors and sizes like its arguments.
        memory: For each of the last arguments, the arguments of the operator that returns the communication buffer.
    """

    module: fx.GraphModule
    inputs: list[Any]
    memory: tuple[tuple[Any, ...], ...] = ()


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A piece that can be called.

    Args:
        piece: The piece.
        sizes: What it takes after its arguments: the numbers of symbols in their sizes.
        memory: As :attr:`Piece.memory`.
    """

    piece: compat.CompiledPiece
    sizes: Sequence[fx.Node]
    memory: tuple[tuple[Any, ...], ...]


def cut(module: fx.GraphModule, prepared: Callable[[Piece], compat.CompiledPiece]) -> Program:
    """Cut a finished graph into pieces.

    Args:
        prepared: Prepares a piece. Afterwards, ``meta["val"]`` of the graph's nodes has the strides of what runs.

    Raises:
        CannotCut: A collective is where the graph cannot be cut.
    """
    return _Cutter(module, prepared, {}).program()


class _Cutter:
    """Cuts one graph.

    [Note: Strides]

    Passes of torch's over joint graphs leave values in ``meta`` whose strides are not those of what runs (an addition
    of zero is replaced by its operand, and the operand gets the sum's value). Pieces are compiled for the strides of
    their arguments. Therefore those of what pieces return are corrected, and what is computed from them, in the order
    of the graph.

    Args:
        programs: The bodies of regions that communicate and were cut so far, by ``id`` of the body.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        prepared: Callable[[Piece], compat.CompiledPiece],
        programs: dict[int, Program],
    ) -> None:
        _pack_where_computed(module.graph)
        self.graph, self._prepared, self._programs = module.graph, prepared, programs
        self._bodies: dict[tuple[Any, ...], _Prepared] = {}  # by id, and layouts of arguments
        self._corrected: set[fx.Node] = set()
        self._divided = divide(module.graph)
        self._plan, self._stretch_of, self._free = self._divided.plan, self._divided.stretch_of, self._divided.free
        self._steps: list[Step] = []
        self._placed: set[fx.Node] = set()
        self._exposed: set[fx.Node] = set()

    def program(self) -> Program:
        self._expose()
        for item in self._plan:
            if isinstance(item, Stretch):
                self._place_stretch(item)
            elif _is_called(item):
                self._place_call(item)
            elif not (item.target is operator.getitem and _is_called(item.args[0])):
                self._place_operator(item)
        self._place_free(self.graph.output_node().all_input_nodes)
        return Program(self.graph, self._steps)

    def _expose(self) -> None:
        """Find what is read outside of the stretch that computes it.

        A view is returned by the stretch that computes what it views, unless its sizes are read from tensors. Sizes are
        computed outside, of what the stretch returns.
        """
        read = [node for node in self._plan if isinstance(node, fx.Node)]
        for node in [*read, self.graph.output_node()]:
            for source in node.all_input_nodes:
                root = self._viewed(source)
                if root in self._stretch_of and source not in self._stretch_of and self._has_known_sizes(source):
                    self._stretch_of[root].nodes.append(source)
                    self._stretch_of[source] = self._stretch_of[root]
                self._exposed.update(self._divided.leaves(source))
        for stretch in self._divided.stretches:
            for node in stretch.nodes:
                sources = (leaf for source in node.all_input_nodes for leaf in self._divided.leaves(source))
                self._exposed.update(leaf for leaf in sources if self._stretch_of.get(leaf, stretch) is not stretch)

    def _has_known_sizes(self, view: fx.Node) -> bool:
        """Whether the numbers that views of a computed value take depend on arguments of the graph only."""
        while view not in self._stretch_of and roles.is_view(view):
            numbers = [each for each in view.all_input_nodes if isinstance(each.meta.get("val"), roles.NUMBERS)]
            if any(leaf.op != "placeholder" for number in numbers for leaf in self._divided.leaves(number)):
                return False
            view = roles.tensor_inputs(view)[0]
        return True

    def _viewed(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a view is in."""
        while node in self._free and roles.is_view(node):
            node = roles.tensor_inputs(node)[0]
        return node

    def _place_stretch(self, stretch: Stretch) -> None:
        (first, *others) = stretch.nodes
        if not others and _runs_as_operator(first):
            self._place_operator(first)
            return
        returns = [node for node in stretch.nodes if node in self._exposed]
        module, takes = _extract(stretch.nodes, returns, self._is_computed_inside(stretch))
        self._place_free(takes)
        self._place_piece(self._prepare(Piece(module, [_value(node) for node in takes])), takes, returns)

    def _is_computed_inside(self, stretch: Stretch) -> Callable[[fx.Node], bool]:
        return lambda node: (
            self._stretch_of.get(node) is stretch or (node not in self._stretch_of and node in self._free)
        )

    def _place_call(self, call: fx.Node) -> None:
        """Call a region, or another graph that communicates."""
        body = roles.body_of(call)
        placeholders, (results,) = body.graph.find_nodes(op="placeholder"), body.graph.output_node().args
        takes = [*call.args[2 if call.target is compat.invoke_subgraph else 1 :]]
        returns: list[fx.Node | None] = [None] * len(results)  # type: ignore[arg-type]
        for user in call.users:
            returns[user.args[1]] = user  # type: ignore[index]
        self._place_free(node for node in takes if isinstance(node, fx.Node))
        inputs = [_value(each) if isinstance(each, fx.Node) else each for each in takes]
        key = (id(body), *map(_layout, inputs))
        if key not in self._bodies and id(body) not in self._programs and not communicates_inside(body):
            self._bodies[key] = self._prepare(Piece(_copy_of_body(body), inputs))
        if key in self._bodies:
            self._place_piece(self._bodies[key], takes, returns)
            return
        if id(body) not in self._programs:
            for placeholder, value in zip(placeholders, inputs, strict=True):
                placeholder.meta["val"] = value
            self._programs[id(body)] = _Cutter(body, self._prepared, self._programs).program()
        if [_layout(value) for value in inputs] != [_layout(_value(placeholder)) for placeholder in placeholders]:
            raise CannotCut(
                "a region that communicates is called with arguments of other strides than before. Compile it with "
                "options={'inner': 'inductor_whole'} or options={'regions': False}."
            )
        self._correct(returns, compat.returned_strides(body.graph))
        self._steps.append(Call(self._programs[id(body)], takes, returns, ()))

    def _prepare(self, piece: Piece) -> _Prepared:
        sizes = self._take_sizes(piece)
        _take_buffers(piece)
        return _Prepared(self._prepared(piece), sizes, piece.memory)

    def _take_sizes(self, piece: Piece) -> list[fx.Node]:
        """Let a piece take the numbers that sizes of its arguments are computed from: Inductor binds no others.

        Returns:
            Nodes of this graph that are those numbers. They follow the piece's other arguments.
        """
        bound = {symbol for value in piece.inputs for symbol in compat.symbols_of(value, alone=True)}
        used = dict.fromkeys(symbol for value in piece.inputs for symbol in compat.symbols_of(value))
        sizes: list[fx.Node] = []
        for symbol in [each for each in used if each not in bound]:
            if symbol not in self._numbers:
                raise CannotCut(
                    f"no number in the graph is the size {symbol} that a piece would take. Compile it with "
                    "options={'inner': 'inductor_whole'}."
                )
            sizes.append(self._numbers[symbol])
            _add_input(piece, f"size_{len(sizes)}", _value(sizes[-1]))
        self._place_free(sizes)
        return sizes

    @functools.cached_property
    def _numbers(self) -> dict[Any, fx.Node]:
        """The first node that is a symbol's number, by symbol."""
        found: dict[Any, fx.Node] = {}
        for node in self.graph.nodes:
            if isinstance(value := node.meta.get("val"), torch.SymInt):
                for symbol in compat.symbols_of(value, alone=True):
                    found.setdefault(symbol, node)
        return found

    def _place_piece(self, prepared: _Prepared, takes: Sequence[Any], returns: Sequence[fx.Node | None]) -> None:
        self._correct(returns, prepared.piece.strides)
        self._steps.append(Call(prepared.piece, [*takes, *prepared.sizes], returns, prepared.memory))

    def _place_operator(self, node: fx.Node) -> None:
        self._place_free(node.all_input_nodes)
        if not self._corrected.isdisjoint(node.all_input_nodes) and isinstance(node.meta.get("val"), Tensor):
            args, kwargs = fx.map_arg((node.args, node.kwargs), _value)
            with compat.fake_mode_of(self.graph):
                self._correct([node], [node.target(*args, **kwargs).stride()])  # type: ignore[operator]
        self._steps.append(node)

    def _correct(self, nodes: Sequence[fx.Node | None], strides: Sequence[Any]) -> None:
        """Correct the values of nodes that have other strides; see [Note: Strides]."""
        for node, its in zip(nodes, strides, strict=True):
            value = node.meta.get("val") if node is not None else None
            if node is not None and isinstance(value, Tensor) and str(value.stride()) != str(its):
                with compat.fake_mode_of(self.graph):
                    node.meta["val"] = torch.empty_strided(value.shape, its, dtype=value.dtype, device=value.device)
                self._corrected.add(node)

    def _place_free(self, sources: Iterable[fx.Node]) -> None:
        """Compute views, constants and sizes that are read next, and that no piece returns."""
        for source in sources:
            if source in self._free and source not in self._placed and source not in self._stretch_of:
                self._placed.add(source)
                self._place_operator(source)


def _is_called(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target in (compat.region_call, compat.invoke_subgraph)


def _runs_as_operator(node: fx.Node) -> bool:
    """Whether a stretch of one node is run as the operator that it is: an embedding, a cast of a shard."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" and not graphs_of(node)


def _extract(
    nodes: Sequence[fx.Node],
    returns: Sequence[Any],
    is_inside: Callable[[fx.Node], bool],
    takes: Sequence[fx.Node] = (),
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a graph of some nodes and of what they are computed from for free, and what it takes.

    Names are those of places in the graph, so that equal graphs have equal code, by which caches know them.

    Args:
        takes: What it takes first.
    """
    order: dict[fx.Node, None] = {}
    taken: dict[fx.Node, None] = dict.fromkeys(takes)

    def visit(node: fx.Node) -> None:
        if node in order or node in taken:
            return
        if roles.nested_graph(node) is not None:
            order[node] = None
        elif is_inside(node):
            for source in node.all_input_nodes:
                visit(source)
            order[node] = None
        else:
            taken[node] = None

    for node in nodes:
        visit(node)
    graph, root = fx.Graph(), torch.nn.Module()
    values: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate(taken):
        values[node] = graph.placeholder(f"in_{number}")
        values[node].meta["val"] = _value(node)
    for number, node in enumerate(order):
        target = node.target
        if node.op == "get_attr":
            target = f"graph_{number}"
            root.add_module(target, roles.attribute_of(node))
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = graph.create_node(node.op, target, args, kwargs, f"v_{number}")
        values[node].meta = dict(node.meta)
    graph.output(tuple(fx.map_arg(list(returns), values.__getitem__)))
    return fx.GraphModule(root, graph), list(taken)


def _value(node: fx.Node) -> Any:
    """Return the fake value of a node; for a constant of the graph, make it."""
    if "val" in node.meta:
        return node.meta["val"]
    constant = roles.attribute_of(node)
    if not isinstance(constant, Tensor):
        raise CannotCut(
            f"{node.name} is a constant of the graph, a {type(constant).__name__}, which no piece can take. Compile it "
            "with options={'inner': 'inductor_whole'}."
        )
    node.meta["val"] = compat.fake_mode_of(node.graph).from_tensor(constant)
    return node.meta["val"]


def _layout(value: Any) -> str:
    return f"{value.shape}, {value.stride()}, {value.dtype}" if isinstance(value, Tensor) else str(value)


def _copy_of_body(body: fx.GraphModule) -> fx.GraphModule:
    placeholders, (returns,) = body.graph.find_nodes(op="placeholder"), body.graph.output_node().args
    computed = [node for node in body.graph.nodes if node.op == "call_function"]
    is_inside: Callable[[fx.Node], bool] = lambda node: node.op == "call_function"  # noqa: E731
    module, _ = _extract(computed, returns, is_inside, list(placeholders))  # type: ignore[arg-type]
    return module


def _add_input(piece: Piece, name: str, value: Any) -> fx.Node:
    graph = piece.module.graph
    with graph.inserting_after([*graph.find_nodes(op="placeholder")][-1]):
        node = graph.placeholder(name)
    node.meta["val"] = value
    piece.inputs.append(value)
    return node


def _take_buffers(piece: Piece) -> None:
    """Let a piece take the communication buffers that it packs gradients into."""
    graph = piece.module.graph
    memory: list[tuple[Any, ...]] = []
    for node in graph.find_nodes(op="call_function", target=PACK):
        gradients, offsets, numel, dtype, capacity, count = [*node.args, 0, 0][:6]
        if not capacity:
            continue
        value: Tensor = node.meta["val"]
        buffer = _add_input(piece, f"memory_{len(memory)}", value)
        node.target, node.args = _PACK_INTO, (buffer, gradients, offsets)
        memory.append((capacity, count, numel, dtype, value.device))
    piece.memory = tuple(memory)
    piece.module.recompile()


def _pack_where_computed(graph: fx.Graph) -> None:
    """Let each stretch write the gradients that it computes to the bucket, if several compute those of a bucket.

    Otherwise the last one would copy what others have computed. The bucket then exists from its first gradient on. It
    is in a communication buffer only if other buckets are gathered and nothing else happens until it is packed:
    otherwise it is not known that the buffer is free so early.
    """
    divided, done = divide(graph), list[fx.Node]()
    for pack in graph.find_nodes(op="call_function", target=PACK):
        gradients, offsets, numel, dtype, capacity, count = [*pack.args, 0, 0][:6]
        parts: dict[Stretch, list[int]] = {}
        for number, gradient in enumerate(gradients):
            computed = gradient
            while computed in divided.free and len(computed.users) == 1 and roles.is_view(computed):
                (computed,) = roles.tensor_inputs(computed)
            stretch = divided.stretch_of.get(computed)
            if stretch is not None and stretch is not divided.stretch_of[pack] and len(computed.users) == 1:
                parts.setdefault(stretch, []).append(number)
        if not parts:
            continue
        first = min(parts, key=divided.plan.index)
        between = divided.plan[divided.plan.index(first) : divided.plan.index(divided.stretch_of[pack])]
        if capacity and not all(isinstance(item, Stretch) or _gathers(item) for item in between):
            continue
        value: Tensor = pack.meta["val"]
        with graph.inserting_before(first.nodes[0]):
            memory = graph.call_function(_GRADIENT_BUFFER, (capacity, count, numel, dtype, value.device))
        memory.meta["val"] = value
        for stretch in sorted(parts, key=divided.plan.index):
            last, copies = stretch.nodes[-1], dict[fx.Node, fx.Node]()
            for number in parts[stretch]:
                last = _copy_views(gradients[number], last, copies)
            theirs = [copies.get(gradients[number], gradients[number]) for number in parts[stretch]]
            with graph.inserting_after(last):
                memory = graph.call_function(
                    _PACK_INTO, (memory, theirs, [offsets[number] for number in parts[stretch]], [])
                )
            memory.meta["val"] = value
        left = [number for number in range(len(gradients)) if not any(number in part for part in parts.values())]
        gaps = _gaps(gradients, offsets, numel)
        if left or gaps:
            pack.target = _PACK_INTO
            pack.args = (memory, [gradients[number] for number in left], [offsets[number] for number in left], gaps)
        else:
            pack.replace_all_uses_with(memory)
            done.append(pack)
    for pack in done:
        graph.erase_node(pack)
    graph.lint()


def _gathers(node: fx.Node) -> bool:
    return any(roles.has_kind(node, kind) for kind in (NodeKind.START_GATHER, NodeKind.GATHERED))


def _gaps(gradients: Sequence[fx.Node], offsets: Sequence[int], numel: int) -> list[int]:
    """Return where a bucket has no gradients: the start and the end of each gap, in a row."""
    ends = [0, *(offset + _value(gradient).numel() for gradient, offset in zip(gradients, offsets, strict=True))]
    between = zip(ends, [*offsets, numel], strict=True)
    return [place for start, stop in between if start < stop for place in (start, stop)]


def _copy_views(node: fx.Node, after: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Copy a view, of a node whose views have no other reader, behind ``after``. Return the last copy."""
    if not roles.is_view(node):
        return after
    (source,) = roles.tensor_inputs(node)
    after = _copy_views(source, after, copies)
    with node.graph.inserting_after(after):
        copies[node] = node.graph.node_copy(node, lambda given: copies.get(given, given))
    return copies[node]


_PACK_INTO = torch.ops.mfsdp.pack_into.default
_GRADIENT_BUFFER = torch.ops.mfsdp.gradient_buffer.default
