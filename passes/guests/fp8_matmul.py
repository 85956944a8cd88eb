"""Dynamo's graph: let linear layers compute their matrix products in float8, without converting the model.

Before                                              After
    q = mfsdp.unshard(L_q_weight)                       q = mfsdp.unshard(L_q_weight)
    linear = F.linear(x, q, bias)                       fp8_linear = mfsdp.fp8_linear(x, q, bias, "rowwise", False)

The operator is composite; see :mod:`mfsdp_compile.runtime.formats.fp8_linear`. In the joint graph it is quantizations
and products, like any other computation of the model: values are quantized by kernels that Inductor fuses with what
computes them, weights are quantized after their gather, again in backward, and :mod:`.reshard` lets none of that be
saved.

A bucket that is gathered in float8 with the same scaling, and whose parameters are only such weights, is not
dequantized:

    parts = mfsdp.unshard_quantized(L_q_weight, ...)
    fp8_linear = mfsdp.fp8_linear_quantized(x, parts[0], parts[1], parts[2], bias, "rowwise", False)

The products read the gathered bytes where they arrived, and no weight is ever whole in another dtype. Other quantized
buckets are dequantized, and their weights quantized again: to the values that were sent.

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

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats.fp8_linear import ALIGNMENT
from mfsdp_compile.runtime.formats.quantize import MULTIPLIED
from mfsdp_compile.runtime.geometry.exchange import Exchange
from mfsdp_compile.runtime.guests.quantized.stages import Dequantize

from ..context import Context, Feature, NodeKind, Report, role_of
from ..roles import FP8, nested_graph
from ..unshard import PLAIN_MARKERS
from .solver.costs import CostModel

_LINEAR = torch.nn.functional.linear
_SHOWN = 3


@dataclass(frozen=True)
class Fp8Matmul(Feature):
    """What to compute in float8.

    Args:
        scaling: ``"rowwise"``, ``"tensorwise"``, or ``"auto"``: rowwise, where that is expected to be faster.
        wgrad: Whether gradients of weights are computed in float8 too.
        candidates: Indices of the weights in their buckets, by bucket.
        costs: Costs on the machine, for ``"auto"``.
    """

    scaling: str
    wgrad: bool
    candidates: tuple[frozenset[int], ...]
    costs: CostModel | None = field(default=None, repr=False)

    @property
    def used(self) -> str:
        """The scaling of layers that are rewritten."""
        return "rowwise" if self.scaling == "auto" else self.scaling

    def rewrite(self, graph: fx.Graph, context: Context) -> tuple[Report, Context]:
        return apply(graph, context, self)


def apply(graph: fx.Graph, context: Context, fp8: Fp8Matmul) -> tuple[Report, Context]:
    """Rewrite the linear layers of a graph and of the bodies of its checkpoints.

    Returns:
        The report, and the context with buckets that stay in float8.
    """
    shells = {
        node: (role.bucket, role.index)
        for node in graph.find_nodes(op="placeholder")
        if (role := role_of(node)) is not None and role.kind is NodeKind.SHELL and role.index is not None
    }
    rewritten: dict[fx.Node, tuple[int, int]] = {}
    left: dict[str, list[str]] = {}
    for linear, of in list(_linears(graph, shells)):
        if of is None:
            left.setdefault("its weight is not a parameter as it is", []).append(linear.name)
            continue
        bucket, index = of
        reason = _reason(linear, index in fp8.candidates[bucket], fp8)
        if reason:
            left.setdefault(reason, []).append(context.buckets[bucket].layout.slots[index].name)
        else:
            rewritten[_rewrite(linear, fp8)] = of
    names = [context.buckets[bucket].layout.slots[index].name for bucket, index in rewritten.values()]
    products = "forward, dgrad and wgrad" if fp8.wgrad else "forward and dgrad"
    lines = [f"{_count(names)} in float8, {fp8.used}: {products}"] if names else ["no linear layer in float8"]
    lines += [f"{_count(names)} left: {reason}" for reason, names in left.items()]
    stay = _stay_quantized(graph, context, shells, rewritten, fp8)
    for linear, (bucket, _) in rewritten.items():
        if bucket in stay:
            _take_quantized(linear, fp8)
    if stay:
        lines.append(f"{len(stay)} of {len(context.buckets)} buckets stay in float8")
    buckets = tuple(
        replace(info, exchange=_as_gathered(info.exchange, fp8), gathered_bytes=info.sent_bytes)
        if bucket in stay
        else info
        for bucket, info in enumerate(context.buckets)
    )
    return Report("fp8_matmul", lines), replace(context, buckets=buckets)


def _as_gathered(exchange: Exchange, fp8: Fp8Matmul) -> Exchange:
    """Return the exchange of a bucket whose bytes are multiplied where they arrived."""
    return exchange._replace(form=MULTIPLIED, scaling=fp8.used, lane_key=exchange.lane.as_gathered.key)


def _stay_quantized(
    graph: fx.Graph,
    context: Context,
    shells: Mapping[fx.Node, tuple[int, int]],
    rewritten: Mapping[fx.Node, tuple[int, int]],
    fp8: Fp8Matmul,
) -> set[int]:
    """Return the buckets that are gathered in float8 as the products need it, and read by nothing else."""
    exchanges = [info.exchange for info in context.buckets]
    stay = {
        bucket
        for bucket in {bucket for bucket, _ in rewritten.values()}
        if any(isinstance(stage, Dequantize) and stage.scaling == fp8.used for stage in exchanges[bucket].lane.use)
    }
    for reader, bucket in _readers(graph, shells):
        if reader not in rewritten:
            stay.discard(bucket)
    return stay


def _readers(graph: fx.Graph, shells: Mapping[fx.Node, tuple[int, int]]) -> Iterator[tuple[fx.Node, int]]:
    """Yield what reads parameters, here and in nested graphs, each with the bucket."""
    for shell, (bucket, _) in shells.items():
        for user in shell.users:
            bodies = [(i, body) for i, argument in enumerate(user.args) if (body := nested_graph(argument)) is not None]
            if user.target in PLAIN_MARKERS:
                yield from ((reader, bucket) for reader in user.users)
            elif len(bodies) != 1:
                yield user, bucket
            for position, body in bodies if len(bodies) == 1 else ():
                yield from _readers(body.graph, _inputs(body, user.args[position + 1 :], shells))


def _inputs(
    body: fx.GraphModule, operands: Sequence[Any], shells: Mapping[fx.Node, tuple[int, int]]
) -> dict[fx.Node, tuple[int, int]]:
    """Return the placeholders of a nested graph that are shells."""
    pairs = zip(body.graph.find_nodes(op="placeholder"), operands, strict=False)
    return {placeholder: shells[value] for placeholder, value in pairs if value in shells}


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
            is_marker = isinstance(weight, fx.Node) and weight.target in PLAIN_MARKERS
            yield node, shells.get(weight.args[0]) if is_marker else None  # type: ignore[union-attr, arg-type]
        for position, argument in enumerate(node.args):
            body = nested_graph(argument)
            if body is not None:
                yield from _linears(body.graph, _inputs(body, node.args[position + 1 :], shells))
                body.recompile()


def _operands(linear: fx.Node) -> tuple[Any, Any, Any]:
    """Return input, weight and bias of a linear layer."""
    given = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | dict(linear.kwargs)
    return given["input"], given["weight"], given.get("bias")


def _reason(linear: fx.Node, is_candidate: bool, fp8: Fp8Matmul) -> str:
    """Return why a linear layer is left as it is; an empty string if it is not."""
    if not is_candidate:
        return "outside of FSDP units, or left out by fp8_filter"
    input, weight = (operand.meta["example_value"] for operand in _operands(linear)[:2])
    result = linear.meta["example_value"]
    if result.dtype != torch.bfloat16:
        return f"it computes in {result.dtype}"
    if any(size % ALIGNMENT for size in weight.shape):
        return f"a size of its weight is not a multiple of {ALIGNMENT}"
    if fp8.scaling == "auto":
        assert fp8.costs is not None
        if not _gains(input, weight, fp8.wgrad, fp8.costs):
            return f"no gain expected on {fp8.costs.hardware.name}"
    return ""


def _gains(input: Tensor, weight: Tensor, wgrad: bool, costs: CostModel) -> bool:
    """Whether float8 is expected to be faster, quantization included."""
    width, out = weight.shape[1], weight.shape[0]
    tokens = math.prod(map(compat.concrete, input.shape[:-1]))
    products = 3 if wgrad else 2
    flops = 2.0 * tokens * width * out
    values, weights, gradients = tokens * width, width * out, tokens * out
    moved = values + weights + gradients
    before = costs.compute(flops, 2 * moved, torch.bfloat16, attention=False)
    after = costs.compute(flops, moved, torch.float8_e4m3fn, attention=False)
    # Read in bfloat16 and written in float8: the input and the gradient, by rows and for wgrad by columns; the weight,
    # in forward and in backward, where it is also transposed.
    quantized = [values, gradients] * (2 if wgrad else 1) + [weights, weights]
    quantizing = sum(costs.moved(3 * numel) for numel in quantized) + costs.moved(2 * weights)
    return products * (before - after) > quantizing


def _rewrite(linear: fx.Node, fp8: Fp8Matmul) -> fx.Node:
    graph = linear.graph
    with graph.inserting_before(linear):
        new = graph.call_function(torch.ops.mfsdp.fp8_linear.default, (*_operands(linear), fp8.used, fp8.wgrad))
    new.meta = dict(linear.meta)
    new.meta["custom"] = {**(linear.meta.get("custom") or {}), FP8: True}
    linear.replace_all_uses_with(new)
    graph.erase_node(linear)
    return new


def _take_quantized(linear: fx.Node, fp8: Fp8Matmul) -> None:
    """Let a rewritten layer take its weight as it was gathered."""
    input, marker, bias, *settings = linear.args
    assert isinstance(marker, fx.Node)
    graph = linear.graph
    with graph.inserting_before(linear):
        parts = graph.call_function(torch.ops.mfsdp.unshard_quantized.default, (*marker.args, fp8.used))
        anchor, data, scales = elements = [graph.call_function(operator.getitem, (parts, i)) for i in range(3)]
    values = torch.ops.mfsdp.unshard_quantized(marker.meta["example_value"], *parts.args[1:])
    for node, value in zip((parts, *elements), (values, *values), strict=True):
        node.meta = {**marker.meta, "example_value": value}
    linear.target = torch.ops.mfsdp.fp8_linear_quantized.default
    linear.args = (input, anchor, data, scales, bias, *settings)
    if not marker.users:
        graph.erase_node(marker)
