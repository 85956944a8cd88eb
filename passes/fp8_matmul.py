"""Dynamo's graph: let linear layers compute their matrix products in float8, without converting the model.

Before                                              After
    q = mfsdp.unshard(L_q_weight)                       q = mfsdp.unshard(L_q_weight)
    linear = torch._C._nn.linear(x, q, bias)            fp8_linear = mfsdp.fp8_linear(x, q, bias, "rowwise", False)

The operator is composite; see :mod:`mfsdp_compile.runtime.fp8_linear`. In the joint graph it is quantizations and
products, like any other computation of the model: values are quantized by kernels that Inductor fuses with what computes
them, weights are quantized after their gather, again in backward, and :mod:`.reshard` lets none of that be saved.

A layer is left as it is if

- its weight is not among the candidates: by default, the weights of FSDP units. The embedding and the output layer of a
  model, which are sensitive, are outside of units in most models
- it does not compute in bfloat16, which is what GPUs accumulate products of rowwise scaled matrices to
- a size of its weight is not a multiple of 16, which the products need
- its weight is not a parameter as it is, but computed from one
- with ``"auto"``: the cost model expects no gain, because quantizing costs more than the products save

Needs: shell placeholders with their roles. Leaves: the same graph with other operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.fp8_linear import ALIGNMENT

from .context import Context, NodeKind, Report, role_of
from .roles import FP8
from .solver.costs import CostModel

__all__ = ["Fp8Matmul", "apply"]

_LINEAR = torch._C._nn.linear
_MARKERS = (torch.ops.mfsdp.unshard, torch.ops.mfsdp.unshard.default)
_SHOWN = 3


@dataclass(frozen=True)
class Fp8Matmul:
    """What to compute in float8.

    Args:
        scaling: ``"rowwise"``, ``"tensorwise"``, or ``"auto"``: rowwise, where that is expected to be faster.
        wgrad: Whether gradients of weights are computed in float8 too.
        candidates: Indices of the weights in their buckets, by bucket.
    """

    scaling: str
    wgrad: bool
    candidates: tuple[frozenset[int], ...]


def apply(graph: fx.Graph, context: Context, asked: Fp8Matmul, costs: CostModel | None) -> Report:
    """Rewrite the linear layers of a graph and of the bodies of its checkpoints.

    Args:
        costs: Costs on the machine, for ``"auto"``.
    """
    shells = {
        node: (role.bucket, role.index)
        for node in graph.find_nodes(op="placeholder")
        if (role := role_of(node)) is not None and role.kind is NodeKind.SHELL and role.index is not None
    }
    rewritten: list[str] = []
    left: dict[str, list[str]] = {}
    for linear, of in _linears(graph, shells):
        if of is None:
            left.setdefault("its weight is not a parameter as it is", []).append(linear.name)
            continue
        bucket, index = of
        name = context.buckets[bucket].layout.slots[index].name
        reason = _reason(linear, index in asked.candidates[bucket], asked, costs)
        if reason:
            left.setdefault(reason, []).append(name)
        else:
            _rewrite(linear, asked)
            rewritten.append(name)
    products = "forward, dgrad and wgrad" if asked.wgrad else "forward and dgrad"
    scaling = "rowwise" if asked.scaling == "auto" else asked.scaling
    lines = [f"{_count(rewritten)} in float8, {scaling}: {products}"] if rewritten else ["no linear layer in float8"]
    lines += [f"{_count(names)} left: {reason}" for reason, names in left.items()]
    return Report("fp8_matmul", lines)


def _count(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} linear layer{'s' if len(names) > 1 else ''} ({', '.join(names[:_SHOWN])}{more})"


def _linears(
    graph: fx.Graph, shells: Mapping[fx.Node, tuple[int, int]]
) -> Iterator[tuple[fx.Node, tuple[int, int] | None]]:
    """Yield linear layers, here and in nested graphs, each with the bucket and the index of its weight.

    Args:
        shells: The graph's placeholders that are shells.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _LINEAR:
            weight = node.args[1] if len(node.args) > 1 else node.kwargs["weight"]
            is_marker = isinstance(weight, fx.Node) and weight.target in _MARKERS
            yield node, shells.get(weight.args[0]) if is_marker else None  # type: ignore[union-attr, arg-type]
        for position, argument in enumerate(node.args):
            body = _graph_of(argument)
            if body is not None:
                inputs = zip(body.graph.find_nodes(op="placeholder"), node.args[position + 1 :], strict=False)
                inner = {placeholder: shells[value] for placeholder, value in inputs if value in shells}  # type: ignore[index]
                yield from _linears(body.graph, inner)
                body.recompile()


def _graph_of(argument: Any) -> fx.GraphModule | None:
    """Return the graph that an argument is, such as the body of a checkpoint."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    value: Any = argument.graph.owning_module
    for part in str(argument.target).split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, fx.GraphModule) else None


def _operands(linear: fx.Node) -> tuple[Any, Any, Any]:
    """Return input, weight and bias of a linear layer."""
    given = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | dict(linear.kwargs)
    return given["input"], given["weight"], given.get("bias")


def _reason(linear: fx.Node, is_candidate: bool, asked: Fp8Matmul, costs: CostModel | None) -> str:
    """Return why a linear layer is left as it is; an empty string if it is not."""
    if not is_candidate:
        return "outside of FSDP units, or left out by fp8_filter"
    input, weight = (operand.meta["example_value"] for operand in _operands(linear)[:2])
    result = linear.meta["example_value"]
    if result.dtype != torch.bfloat16:
        return f"it computes in {result.dtype}"
    if any(size % ALIGNMENT for size in weight.shape):
        return f"a size of its weight is not a multiple of {ALIGNMENT}"
    if asked.scaling == "auto":
        assert costs is not None
        if not _gains(input, weight, asked.wgrad, costs):
            return f"no gain expected on {costs.hardware.name}"
    return ""


def _gains(input: Tensor, weight: Tensor, wgrad: bool, costs: CostModel) -> bool:
    """Whether float8 is expected to be faster, quantization included."""
    width, out = weight.shape[1], weight.shape[0]
    tokens = 1
    for size in input.shape[:-1]:
        tokens *= compat.concrete(size)
    products = 3 if wgrad else 2
    flops = 2.0 * tokens * width * out
    values, weights, gradients = tokens * width, width * out, tokens * out
    moved = values + weights + gradients
    before = costs.compute(flops, 2 * moved, torch.bfloat16, attention=False)
    after = costs.compute(flops, moved, torch.float8_e4m3fn, attention=False)
    # Read in bfloat16 and written in float8: the input and the gradient, by rows and for wgrad by columns; the weight, in
    # forward and in backward, where it is also transposed.
    quantized = [values, gradients] * (2 if wgrad else 1) + [weights, weights]
    quantizing = sum(costs.moved(3 * numel) for numel in quantized) + costs.moved(2 * weights)
    return products * (before - after) > quantizing


def _rewrite(linear: fx.Node, asked: Fp8Matmul) -> None:
    graph = linear.graph
    scaling = "rowwise" if asked.scaling == "auto" else asked.scaling
    with graph.inserting_before(linear):
        new = graph.call_function(torch.ops.mfsdp.fp8_linear.default, (*_operands(linear), scaling, asked.wgrad))
    new.meta = dict(linear.meta)
    new.meta["custom"] = {**(linear.meta.get("custom") or {}), FP8: True}
    linear.replace_all_uses_with(new)
    graph.erase_node(linear)
