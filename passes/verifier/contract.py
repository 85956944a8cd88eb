"""What a graph has to keep to, whatever passes do to it: taken when it comes to them, looked at by the verifier.

Some mistakes cannot be seen in a graph alone: a gradient that is left out looks like a parameter that has none, outputs
that have changed places look like outputs. So the graph is noted down before the first pass touches it: inputs and
outputs by position, which gradients go where, and what each was made of.

It goes by names of nodes, which are unique in a graph and stay with a node; a pass may put new nodes in the place of
old ones. It is plain data, and lies in the output node's meta, where whoever has the graph finds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from mfsdp_compile.runtime.layout import BucketLayout

from .. import roles
from ..context import role_of
from .analysis import PACK, Analysis, tensor_of

__all__ = ["Contract", "Gradient", "GraphOutput", "contract_of", "gradients_of", "packed", "reads_of", "set_contract"]

_aten = torch.ops.aten
# Where contributions of several uses of a parameter are summed, and which arguments are terms.
_SUMS = {_aten.add.Tensor: (0, 1), _aten.addmm.default: (0,), _aten.baddbmm.default: (0,)}


class GraphOutput(NamedTuple):
    """What a graph returns at some position: a node's name, None for what is no node, and its dtype and shape."""

    name: str | None
    value: str

    @staticmethod
    def of(node: Any) -> GraphOutput:
        value = tensor_of(node)
        described = f"{value.dtype} {list(value.shape)}" if value is not None else ""
        return GraphOutput(node.name if isinstance(node, fx.Node) else None, described)


@dataclass(frozen=True)
class Gradient:
    """A gradient that is packed.

    Args:
        name: of its node.
        inputs: of the graph that it depends on, as bits: the lowest is the first input. Sets would take quadratic memory.
        terms: that it is the sum of, one per use of a parameter.
        made_of: names of what it is computed of alone, one after the other.
    """

    name: str
    inputs: int
    terms: int
    made_of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contract:
    """What passes must keep.

    Args:
        user_outputs: of a forward graph, how many of the first outputs the model itself returns.
        inputs: names of placeholders.
        outputs: by position.
        returned: by bucket, the position of its shard's gradient.
        gradients: by bucket, then by number of the parameter in it.
        reads: by bucket, how often each part ``(start, stop)`` of it is read.
        kept: buckets that were decided to stay gathered from forward to backward.
        portions: buckets of which ranks keep portions, for the backward to gather.
    """

    user_outputs: int
    inputs: tuple[str, ...]
    outputs: tuple[GraphOutput, ...]
    returned: Mapping[int, int] = field(default_factory=dict)
    gradients: Mapping[int, Mapping[int, Gradient]] = field(default_factory=dict)
    reads: Mapping[int, Counter[tuple[int, int]]] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    portions: frozenset[int] = frozenset()

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
        )


def contract_of(graph: fx.Graph) -> Contract | None:
    return graph.output_node().meta.get("mfsdp_contract")


def set_contract(graph: fx.Graph, contract: Contract) -> None:
    graph.output_node().meta["mfsdp_contract"] = contract


def reads_of(found: Analysis) -> dict[int, Counter[tuple[int, int]]]:
    reads: dict[int, Counter[tuple[int, int]]] = {}
    for whole in found.wholes:
        reads.setdefault(whole.bucket, Counter()).update(part for _, part in found.slices(whole))
    return reads


def packed(pack: fx.Node, layout: BucketLayout) -> list[tuple[fx.Node, int | None]]:
    """Gradients, and which parameter of the bucket each is for, by its offset; None for none, or for one that has its
    gradient already. Parameters without elements share an offset with the one after them."""
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
    packs = [node for node in found.graph.find_nodes(op="call_function", target=PACK) if role_of(node) is not None]
    if not packs:
        return {}
    inputs = 0
    depends: dict[fx.Node, int] = {}
    for node in found.graph.nodes:
        if node.op == "placeholder":
            depends[node] = 1 << inputs
            inputs += 1
        else:
            bits = 0
            for source in node.all_input_nodes:
                bits |= depends.get(source, 0)
            depends[node] = bits
    gradients: dict[int, dict[int, Gradient]] = {}
    for pack in packs:
        role = role_of(pack)
        assert role is not None
        of_bucket = gradients.setdefault(role.bucket, {})
        for gradient, index in packed(pack, found.info(role.bucket).layout):
            if index is not None and index not in of_bucket:
                bits, made_of = depends.get(gradient, 0), tuple(_chain(gradient))
                of_bucket[index] = Gradient(gradient.name, bits, _terms(gradient), made_of)
    return gradients


def _chain(node: fx.Node) -> Iterator[str]:
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
        yield node.name


def _terms(gradient: fx.Node) -> int:
    """How many different things a gradient is the sum of."""
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
        terms += node.target is not _aten.add.Tensor  # the product that the sum is fused with
        pending += inputs  # type: ignore[arg-type]
    return terms
