"""Joint graph: compute the logits and the loss in chunks of tokens, so that no tensor holds all logits.

Before                                      After
    logits = mm(hidden, head)                   loss_0, grad_0, d_hidden_0 = chunk(hidden_0, head, 0, 0, ...)
    loss = nll(log_softmax(logits))             loss, grad_1, d_hidden_1 = chunk(hidden_1, head, loss_0, grad_0, ...)
    d_logits = (softmax - onehot) * tangent
    grad = mm(d_logits.T, hidden)               grad = grad_1 * tangent
    d_hidden = mm(d_logits, head.T)             d_hidden = cat(d_hidden_0, d_hidden_1) * tangent

The rewrite is torch's: Inductor's ``auto_chunker``. Each chunk computes gradients together with its part of the loss,
as if the gradient of the loss was 1, and backward scales them: the loss must be linear in what comes after it.

[Note: What torch's pass gets wrong]

- It takes the product with the largest result in proportion to its operands, which may be one of a LoRA adapter. Here
  it is the product with the largest result.
- It replaces the gradient of the loss by 1 everywhere, also where an auxiliary loss reads it. Here such readers get an
  input of their own while it runs.
- It does so even if the gradient has several elements, as that of a loss per token has. That is refused.
- It does so in float16, where gradients of a loss that is not scaled are 0. That is refused too.
- It fails if logits of shape ``[batch, length, vocabulary]`` are cast, scaled or capped before they are flattened, as
  in transformers. Here they are flattened first.
- It fails if tokens do not divide into the number of chunks. Here the number is what ``torch.chunk`` makes of it.
- It takes other tensors with as many elements for logits, and fails. The message says so.

Needs: a joint graph with Inductor's decompositions. Leaves: calls of graphs that the passes know as regions without
buckets.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from .. import roles
from ..context import Context, Feature, Report
from ..kernels import value_bytes
from ..roles import REGION, attribute_of

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_LIKE_POINTWISE = (*roles.CASTS, _aten.alias.default)


class NotInChunks(Exception):
    """Why the loss of a graph cannot be computed in chunks, as a clause."""


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint graph that are gradients of its outputs. An inference graph has none."""
    return [node for node in graph.find_nodes(op="placeholder") if compat.is_tangent(node)]


def computes_loss(graph: fx.Graph) -> bool:
    """Whether a joint graph returns a differentiable value of one element."""
    return any(node.meta["val"].numel() == 1 for node in tangents(graph))


def apply(joint: fx.GraphModule, chunks: int) -> tuple[fx.GraphModule, Report]:
    """Return the graph with its loss in chunks, after Inductor's passes over joint graphs.

    Args:
        joint: A joint graph with tangents. It is changed, but means the same, if the loss cannot be in chunks.
        chunks: Number of chunks. There are fewer if the tokens cannot be divided into as many.

    Raises:
        NotInChunks: The loss cannot be computed in chunks.
    """
    product = _largest_product(joint.graph)
    rows = product.meta["val"].shape[0]
    chunks = -(-rows // -(-rows // chunks))
    if chunks < 2:
        raise NotInChunks(f"the product with the largest result has {rows} rows")
    _flatten(joint.graph, product)
    before = {name for name, _ in joint.named_children()}
    apart = _set_apart(joint.graph, product)
    least = value_bytes(product)
    chunked, reason = compat.inductor_in_chunks(joint, chunks, least)
    for graph in {joint.graph, chunked.graph}:
        inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
        for name, tangent in apart.items():
            inputs[name].replace_all_uses_with(inputs[tangent])
            graph.erase_node(inputs[name])
    calls = [
        node
        for node in chunked.graph.find_nodes(op="call_function", target=compat.invoke_subgraph)
        if node.args[0].target not in before  # type: ignore[union-attr]
    ]
    if not calls:
        raise NotInChunks((reason or "torch's auto_chunker left the graph as it is") + _mistaken(joint.graph, product))
    _check(calls)
    bodies = dict.fromkeys(attribute_of(call.args[0]) for call in calls)  # type: ignore[arg-type]
    for number, body in enumerate(bodies):
        body.meta |= {"mfsdp_region_name": f"loss_chunk_{number}", "mfsdp_wholes": {}, "mfsdp_scales": {}}
        body.graph.output_node().meta["mfsdp_region"] = Context((), SchedulePolicy(), whole_model=False)
    for call in calls:
        results = attribute_of(call.args[0]).graph.output_node().args[0]  # type: ignore[arg-type]
        call.meta |= {"custom": {REGION: []}, "val": tuple(result.meta["val"] for result in results)}
    chunked.recompile()
    size = least // len(calls)
    told = f"the loss is computed in {len(calls)} chunks of {-(-rows // chunks)} tokens, with {size:,} B of logits each"
    return chunked, Report("loss_chunks", [told])


def _largest_product(graph: fx.Graph) -> fx.Node:
    given = set(tangents(graph))
    found: list[fx.Node] = []
    for node in graph.nodes:
        if not given.isdisjoint(node.all_input_nodes):
            break
        if node.target in _PRODUCTS:
            found.append(node)
    if not found:
        raise NotInChunks("it has no matrix product in front of the loss")
    if any(isinstance(size, torch.SymInt) for node in found for size in node.meta["val"].shape):
        raise NotInChunks("its batch has symbolic sizes (dynamic shapes)")
    return max(found, key=value_bytes)


def _flatten(graph: fx.Graph, product: fx.Node) -> None:
    """Let pointwise operators on views of tensors of the product's shape compute on these tensors: views come after.

    Inductor removes what is then a view of a view.
    """
    shape = product.meta["val"].shape
    for node in list(graph.nodes):
        sources = node.all_input_nodes
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _LIKE_POINTWISE
        if not is_pointwise or not sources or not all(_is_view_of(source, shape) for source in sources):
            continue
        value = node.meta["val"]
        if any(source.meta["val"].shape != value.shape for source in sources):
            continue  # they are broadcast
        with graph.inserting_before(node):
            flat = graph.node_copy(node, lambda source: source.args[0])  # type: ignore[arg-type, return-value]
            view = graph.call_function(_aten.view.default, (flat, list(value.shape)))
        flat.meta = node.meta | {"val": value.view(shape)}
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
        graph.erase_node(node)
        for source in sources:
            if not source.users:
                graph.erase_node(source)


def _is_view_of(node: fx.Node, shape: torch.Size) -> bool:
    if node.target not in (_aten.view.default, _aten._unsafe_view.default):
        return False
    return node.args[0].meta["val"].shape == shape != node.meta["val"].shape  # type: ignore[union-attr]


def _set_apart(graph: fx.Graph, product: fx.Node) -> dict[str, str]:
    """Give readers of a tangent that lead to no tensor of the product's size an input of their own.

    Returns:
        Names of the tangents, by name of the input.

    Raises:
        NotInChunks: A tangent that leads to one has several elements.
    """
    size = product.meta["val"].numel()
    leads: dict[fx.Node, bool] = {}
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        leads[node] = (isinstance(value, Tensor) and value.numel() == size) or any(leads[user] for user in node.users)
    found = {}
    for number, tangent in enumerate(tangents(graph)):
        others = [user for user in tangent.users if not leads[user]]
        if leads[tangent] and tangent.meta["val"].numel() > 1:
            raise NotInChunks("the loss, or another output that depends on the logits, has several elements")
        if others and len(others) < len(tangent.users):
            with graph.inserting_after(tangent):
                apart = graph.placeholder(f"mfsdp_apart_{number}")
            apart.meta = dict(tangent.meta)
            for user in others:
                user.replace_input_with(tangent, apart)
            found[apart.name] = tangent.name
    return found


def _mistaken(graph: fx.Graph, product: fx.Node) -> str:
    """Return a note if another tensor has as many elements as the logits, by which torch's pass tells them.

    A usual case: a batch has as many tokens as the model is wide, and the logits as many elements as the head's weight.
    """
    logits = product.meta["val"]
    for node in itertools.takewhile(lambda node: node is not product, graph.nodes):
        if isinstance(value := node.meta.get("val"), Tensor) and value.numel() == logits.numel():
            other = f"a tensor of shape {list(value.shape)} has as many elements as the logits, {list(logits.shape)}"
            return f" ({other}, so torch's auto_chunker takes it for them: change the number of tokens)"
    return ""


def _check(calls: list[fx.Node]) -> None:
    """Raise NotInChunks if the chunks would not compute the same."""
    for call in calls:
        body: Any = attribute_of(call.args[0])  # type: ignore[arg-type]
        taken = [node.meta["val"] for node in body.graph.find_nodes(op="placeholder")]
        given: list[Any] = [operand.meta["val"] for operand in call.args[2:]]  # type: ignore[union-attr]
        if [each.shape for each in taken] != [each.shape for each in given]:
            raise NotInChunks("torch's auto_chunker divided its inputs along different dimensions")
        values = (value for node in body.graph.nodes for value in compat.tree_leaves(node.meta.get("val")))
        if any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in values):
            raise NotInChunks(
                "it is in float16, in which chunks would compute gradients of a loss that is not scaled yet"
            )


@dataclass(frozen=True)
class LossChunks(Feature):
    """Computes the loss in chunks of tokens.

    Args:
        chunks: Number of chunks.
    """

    chunks: int

    rewrites_joint = True
    distinct = (_aten.full,)
    # Otherwise the zeros that the first chunk adds its gradient to could be those that the gradient of an embedding
    # begins with, and be kept for backward.

    def rewrite_joint(self, joint: fx.GraphModule, context: Context) -> tuple[fx.GraphModule, Report | None]:
        """Compute the loss in chunks, and run Inductor's passes over joint graphs.

        A graph without a backward stays as it is, and so does a part of the model that computes no loss.

        Raises:
            ValueError: The loss cannot be computed in chunks.
        """
        if not tangents(joint.graph):
            return joint, None
        try:
            return apply(joint, self.chunks)
        except NotInChunks as why:
            if context.whole_model or computes_loss(joint.graph):
                raise ValueError(
                    f"options['loss_chunks'] is {self.chunks}, but the loss cannot be computed in chunks: {why}. The "
                    "model (or the compiled function that calls it) must compute the loss and return only it, of one "
                    "element, such as F.cross_entropy of the logits. Computation between the product that gives the "
                    "logits and the loss must be of operators that torch's auto_chunker knows, in float32 or bfloat16, "
                    "and the batch of static shape (mark_static, dynamic=False). Change the model, or take the option "
                    "out."
                ) from None
            return joint, Report("loss_chunks", [f"no loss in chunks here: {why}"])
