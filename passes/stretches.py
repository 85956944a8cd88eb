"""Stretches: maximal runs of a graph's nodes that compute, between nodes that communicate.

Each becomes a piece, which Inductor compiles by itself (:mod:`mfsdp_compile.backend.pieces`). What costs nothing
belongs to none, and is computed wherever it is read: views, constants, arithmetic of sizes.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.lanes.stage import local_operators

from . import roles

PACK = torch.ops.mfsdp.pack_gradients.default
_COMPUTES = (PACK, torch.ops.mfsdp.pack_into.default, roles.QUANTIZE)
"""Operators of ours that are computation."""
_COMMUNICATE = {"mfsdp", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor"}
_MAKE_CONSTANTS = (
    torch.ops.aten.full.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.empty.memory_format,
    torch.ops.prims.iota.default,
)


class CannotCut(NotImplementedError):
    """A graph has a collective where it cannot be cut."""


@dataclass(eq=False)
class Stretch:
    """Consecutive nodes that compute."""

    nodes: list[fx.Node] = field(default_factory=list)


def communicates(node: fx.Node) -> bool:
    """Whether a node runs outside of pieces: it communicates, announces or moves memory, or calls such a graph."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and communicates(source)
    if roles.is_region_call(node):
        return True
    if node.op == "call_function" and any(map(communicates_inside, graphs_of(node))):
        if node.target is not compat.invoke_subgraph:
            raise CannotCut(
                f"a collective runs inside of an operator that takes graphs ({node.target}), where the graph around it "
                "cannot be cut. Compile it with options={'inner': 'inductor_whole'}."
            )
        return True
    target = node.target
    computes = target in _COMPUTES or local_operators.get(target) is not None
    return (
        (isinstance(target, torch._ops.OpOverload) and target.namespace in _COMMUNICATE and not computes)
        or target is torch.ops.aten._local_scalar_dense.default  # the host waits for a value
    )


def graphs_of(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that a node's operator takes."""
    return [graph for argument in node.all_input_nodes if (graph := roles.nested_graph(argument)) is not None]


def communicates_inside(module: fx.GraphModule) -> bool:
    return any(node.op == "call_function" and communicates(node) for node in module.graph.nodes)


def is_free(node: fx.Node) -> bool:
    """Whether a node that does not communicate costs nothing, and is computed wherever it is read."""
    if isinstance(node.meta.get("val"), roles.NUMBERS):
        return True
    return roles.is_view(node) or (node.target in _MAKE_CONSTANTS and not roles.tensor_inputs(node))


@dataclass(eq=False)
class Divided:
    """A graph in stretches.

    Attributes:
        plan: Nodes that communicate, and stretches, in the order of the graph.
        stretch_of: The stretch of each node that computes.
        free: Nodes that cost nothing.
    """

    plan: list[fx.Node | Stretch] = field(default_factory=list)
    stretch_of: dict[fx.Node, Stretch] = field(default_factory=dict)
    free: set[fx.Node] = field(default_factory=set)

    @property
    def stretches(self) -> list[Stretch]:
        """The stretches, in the order of the graph."""
        return [item for item in self.plan if isinstance(item, Stretch)]

    def leaves(self, node: fx.Node) -> list[fx.Node]:
        """Return what a node is computed from for free: itself if it is not free."""
        found: dict[fx.Node, None] = {}
        seen, pending = {node}, [node]
        while pending:
            each = pending.pop()
            if each in self.stretch_of or each not in self.free:
                found[each] = None
                continue
            pending += [source for source in each.all_input_nodes if source not in seen]
            seen.update(each.all_input_nodes)
        return list(found)


def divide(graph: fx.Graph) -> Divided:
    """Divide a graph into stretches."""
    found = Divided()
    current: Stretch | None = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if communicates(node):
            found.plan.append(node)
            current = None
            continue
        if is_free(node):
            found.free.add(node)
            continue
        if node.target is operator.getitem:
            stretch = found.stretch_of[node.args[0]]  # type: ignore[index]
        else:
            if current is None:
                current = Stretch()
                found.plan.append(current)
            stretch = current
        stretch.nodes.append(node)
        found.stretch_of[node] = stretch
    return found
