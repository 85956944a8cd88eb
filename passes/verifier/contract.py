"""Contract of a graph: properties that passes must preserve. The verifier checks them.

Some mistakes are invisible in a graph alone. A dropped gradient looks like a parameter without one, and swapped outputs
look like any other outputs. Therefore a contract is recorded before the first pass: inputs and outputs by position, the
place of each gradient, and what each gradient is computed from.

The contract refers to nodes by name. Names are unique in a graph and stay with their node, even if a pass replaces
other nodes. The contract is plain data in the output node's meta, so it travels with the graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from mfsdp_compile.runtime.geometry.layout import BucketLayout
from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import NodeKind, role_of
from .analysis import Analysis, CollectiveNode, tensor_of

_aten = torch.ops.aten
# Operators that sum the contributions of several uses of a parameter, and the arguments that are terms of the sum.
_SUMS = {_aten.add.Tensor: (0, 1), _aten.addmm.default: (0,), _aten.baddbmm.default: (0,)}


class GraphOutput(NamedTuple):
    """An output of a graph.

    Args:
        name: Name of the node; None if the output is not a node.
        value: Dtype and shape; empty if the output is not a tensor.
    """

    name: str | None
    value: str

    @staticmethod
    def of(node: Any) -> GraphOutput:
        value = tensor_of(node)
        described = f"{value.dtype} {list(value.shape)}" if value is not None else ""
        return GraphOutput(node.name if isinstance(node, fx.Node) else None, described)


@dataclass(frozen=True)
class Gradient:
    """A packed gradient.

    Args:
        name: Name of its node.
        inputs: Bit mask of the graph inputs that it depends on; the lowest bit is the first input.
        terms: Number of terms that it is the sum of, one per use of the parameter.
        made_of: Names of the single-input chain of nodes that it is computed from, nearest first.
    """

    name: str
    inputs: int
    terms: int
    made_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contract:
    """Properties of a graph that passes must preserve.

    Args:
        user_outputs: Number of outputs, at the beginning, that a forward graph returns for the model itself.
        inputs: Names of placeholders.
        outputs: Outputs by position.
        returned: Output position of the shard's gradient, by bucket.
        gradients: Gradients by bucket, then by index of the parameter in the bucket.
        reads: How often each slice ``(start, stop)`` of a bucket is read, by bucket.
        kept: Buckets that were chosen to stay gathered from forward to backward.
        calls: The graph that each call of a region runs, by name of the call.
        portions: Buckets of which ranks keep portions, for the backward to gather.
        scales: How often each slice ``(start, stop)`` of a bucket's scales is read, by bucket.
    """

    user_outputs: int
    inputs: tuple[str, ...]
    outputs: tuple[GraphOutput, ...]
    returned: Mapping[int, int] = field(default_factory=dict)
    gradients: Mapping[int, Mapping[int, Gradient]] = field(default_factory=dict)
    reads: Mapping[int, Counter[tuple[int, int]]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    portions: frozenset[int] = frozenset()
    calls: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[int, Counter[tuple[int, int]]] = field(default_factory=dict)

    @staticmethod
    def of(
        found: Analysis,
        user_outputs: int,
        kept: frozenset[int] = frozenset(),
        portions: frozenset[int] = frozenset(),
    ) -> Contract:
        return Contract(
            user_outputs,
            tuple(node.name for node in found.graph.nodes if node.op == "placeholder"),
            tuple(GraphOutput.of(node) for node in found.outputs),
            {reduction.bucket: reduction.returned[0][0] for reduction in found.reductions if reduction.returned},
            gradients_of(found),
            reads_of(found),
            kept,
            portions,
            calls_of(found.graph),
            scales_of(found),
        )


def contract_of(graph: fx.Graph) -> Contract | None:
    return graph.output_node().meta.get("mfsdp_contract")


def set_contract(graph: fx.Graph, contract: Contract) -> None:
    graph.output_node().meta["mfsdp_contract"] = contract


def is_of_portions(found: Analysis, contract: Contract | None, launch: CollectiveNode) -> bool:
    """Whether a bucket must be gathered from portions; for graphs without a contract, whether it is."""
    if contract is not None:
        return found.phase is Phase.BACKWARD and launch.bucket in contract.portions
    return launch.input is not None and roles.has_kind(launch.input, NodeKind.PORTION)


def calls_of(graph: fx.Graph) -> dict[str, str]:
    """Return the name of the graph that each call of a region runs, by name of the call."""
    return {call.name: roles.body_of(call).meta["mfsdp_region_name"] for call in roles.region_calls(graph)}


def reads_of(found: Analysis) -> dict[int, Counter[tuple[int, int]]]:
    reads: dict[int, Counter[tuple[int, int]]] = {}
    for whole in found.wholes:
        reads.setdefault(whole.bucket, Counter()).update(part for _, part in found.slices(whole))
    return reads


def scales_of(found: Analysis) -> dict[int, Counter[tuple[int, int]]]:
    scales: dict[int, Counter[tuple[int, int]]] = {}
    for bucket, _, part in found.scale_slices:
        scales.setdefault(bucket, Counter()).update([part])
    return scales


def packed(pack: fx.Node, layout: BucketLayout) -> list[tuple[fx.Node, int | None]]:
    """Return the packed gradients, and the index of the parameter that each belongs to by its offset.

    The index is None if there is no parameter at the offset, or if the parameter already has a gradient. Empty
    parameters share an offset with the parameter after them. Nothing is returned for gradients that a region packs.
    """
    if pack.target is operator.getitem:
        return []
    free: dict[int, list[int]] = {}
    for number, slot in enumerate(layout.slots):
        free.setdefault(slot.offset, []).append(number)
    found: list[tuple[fx.Node, int | None]] = []
    gradients: Any
    gradients, offsets, *_ = pack.args
    for gradient, offset in zip(gradients, offsets, strict=False):  # type: ignore[arg-type]
        candidates, value = free.get(offset, []), tensor_of(gradient)
        fitting = [i for i in candidates if value is not None and layout.slots[i].numel == value.numel()]
        index: int | None = next(iter(fitting or candidates), None)
        if index is not None:
            candidates.remove(index)
        found.append((gradient, index))
    return found


def gradients_of(found: Analysis) -> dict[int, dict[int, Gradient]]:
    packs = [node for node in found.packed if role_of(node) is not None]
    if not packs:
        return {}
    inputs = found.graph.find_nodes(op="placeholder")
    depends = roles.dependencies(found.graph, {node: 1 << position for position, node in enumerate(inputs)})
    gradients: dict[int, dict[int, Gradient]] = {}
    for pack in packs:
        role = role_of(pack)
        assert role is not None
        of_bucket, layout = gradients.setdefault(role.bucket, {}), found.info(role.bucket).layout
        if pack.target is operator.getitem:  # a region packs
            inside = (index for _, index in packed(roles.pack_inside(pack), layout) if index is not None)
            of_bucket |= dict.fromkeys(inside, Gradient(pack.name, depends[pack], 1)) | of_bucket
        for gradient, index in packed(pack, layout):
            if index is not None and index not in of_bucket:
                made_of = tuple(_chain(gradient))
                of_bucket[index] = Gradient(gradient.name, depends[gradient], _terms(gradient), made_of)
    return gradients


def _chain(node: fx.Node) -> Iterator[str]:
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        yield node.name


def _terms(gradient: fx.Node) -> int:
    """Return the number of distinct terms that a gradient is the sum of."""
    terms, pending, seen = 0, [gradient], set()
    while pending:
        node = pending.pop()
        while roles.is_view(node) or node.target in roles.CASTS:
            node = node.all_input_nodes[0]
        if node in seen:
            continue
        seen.add(node)
        summed = _SUMS.get(node.target)  # type: ignore[arg-type]
        inputs = [node.args[i] for i in summed or () if isinstance(node.args[i], fx.Node)]
        if summed is None or not inputs:
            terms += 1
            continue
        terms += node.target is not _aten.add.Tensor  # addmm and baddbmm also add a matrix product
        pending += inputs  # type: ignore[arg-type]
    return terms
