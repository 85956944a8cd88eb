"""Regions: a graph that is traced and compiled once, and called from several places of another graph.

In Dynamo's graph a call is ``region_call(body, *operands)``. AOTAutograd does not look into the body: it records one
``invoke_subgraph`` in the forward and one in the backward, of graphs that :class:`Region` has traced and partitioned
beforehand. ``invoke_subgraph`` is torch's operator for such calls; Inductor compiles each graph once and calls it.

Why this does not use ``torch.compiler.nested_compile_region``: Dynamo evaluates the guards of calls that it does not
trace, but does not install them (torch 2.13), so changing an attribute of the third layer would change nothing. And the
partition of its graphs returns saved inputs as outputs, which would keep gathered parameters for the backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import DispatchKey, Tensor, fx
from torch._guards import TracingContext, tracing
from torch._higher_order_ops import invoke_subgraph
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree
from torch.utils._python_dispatch import _disable_current_modes

from .aot import is_tangent, trace_with_aot

__all__ = [
    "Gradient",
    "NotARegion",
    "Region",
    "RegionGraphs",
    "Source",
    "invoke_subgraph",
    "region_call",
    "trace_joint",
]


class NotARegion(Exception):
    """Why a part of a graph cannot be a region.

    Args:
        region: Name of the region.
        reason: The reason, as a clause.
    """

    def __init__(self, region: str, reason: str) -> None:
        super().__init__(f"{region}: {reason}")
        self.region, self.reason = region, reason


class Source(NamedTuple):
    """Where a value that a backward graph takes comes from.

    Args:
        kind: ``"operand"`` of the call, ``"output"`` of the forward graph, or ``"tangent"``.
        number: Index among the operands, or among the outputs of the forward graph. For a tangent, the index of the
            output that it is the gradient of.
    """

    kind: str
    number: int


class Gradient(NamedTuple):
    """Where the gradient of an operand comes from.

    Args:
        operand: Index of the operand.
        output: Index among the outputs of the backward graph; None if ``tangent`` is given.
        tangent: Index among what the backward graph takes: the gradient of an output is that of the operand.
    """

    operand: int
    output: int | None = None
    tangent: int | None = None


@dataclass(frozen=True, eq=False)
class RegionGraphs:
    """Graphs of a region, for operands of the same shapes, strides, dtypes and needs of gradients.

    Args:
        forward: Forward graph.
        takes: Operands that it takes.
        outputs: Number of its outputs that the body has too. Values for the backward follow.
        backward: Backward graph; None if no operand needs a gradient.
        needs: Where the values come from that the backward graph takes.
        gradients: The gradients of operands.
        constant_outputs: Outputs of the body that need no gradient.
    """

    forward: fx.GraphModule
    takes: tuple[int, ...]
    outputs: int
    backward: fx.GraphModule | None = None
    needs: tuple[Source, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    constant_outputs: tuple[int, ...] = ()


class Region:
    """A region, and the graphs of it that have been traced.

    Args:
        name: Name, unique in its graph.
        trace: Function that makes the graphs for operands.
        is_exact: Whether the numbers must be those of the units traced one by one. Then a gradient that comes in other
            strides than its output is not copied: sums over the copy could differ in the last place.
    """

    def __init__(self, name: str, trace: Callable[[str, Sequence[Any]], RegionGraphs], is_exact: bool) -> None:
        self.name = name
        self.is_exact = is_exact
        self._trace = trace
        self.variants: dict[tuple[Any, ...], RegionGraphs] = {}

    def graphs(self, operands: Sequence[Any]) -> RegionGraphs:
        """Return the graphs for operands. Trace them if these are the first of their kind."""
        needs_gradients = torch.is_grad_enabled()
        key = (needs_gradients, *(_kind(operand, needs_gradients) for operand in operands))
        if key not in self.variants:
            number = len(self.variants)
            name = f"{self.name}_{number}" if number else self.name
            with _disable_current_modes(), torch.set_grad_enabled(needs_gradients):
                self.variants[key] = self._trace(name, operands)
        return self.variants[key]

    def __reduce__(self) -> Any:
        """Cache keys pickle graph modules. A region follows from the body that it belongs to."""
        return str, (self.name,)


def _kind(operand: Any, needs_gradients: bool) -> tuple[Any, ...]:
    if not isinstance(operand, Tensor):
        return (operand,)
    requires_grad = needs_gradients and operand.requires_grad
    return tuple(operand.shape), operand.stride(), operand.dtype, operand.device, requires_grad


class _RegionCall(HigherOrderOperator):
    """Calls a graph: the body of a region, which has an attribute ``region``, or one of the graphs made from it."""

    def __init__(self) -> None:
        super().__init__("mfsdp_region", cacheable=True)

    def __call__(self, module: fx.GraphModule, *operands: Any) -> Any:
        return super().__call__(module, *operands)  # type: ignore[safe-super]


region_call = _RegionCall()


@region_call.py_impl(DispatchKey.Autograd)
def _(module: fx.GraphModule, *operands: Any) -> Any:
    region: Region | None = getattr(module, "region", None)
    if not isinstance(module, fx.GraphModule):  # a graph that was written as Python
        return module(*operands)
    if region is None:
        with torch._C._AutoDispatchBelowAutograd():
            return region_call(module, *operands)
    graphs = region.graphs(operands)
    if graphs.backward is None:
        with torch._C._AutoDispatchBelowAutograd():
            return _call_forward(graphs, operands)
    return _RegionFunction.apply(region, graphs, *operands)


@region_call.py_functionalize_impl
def _(ctx: Any, module: fx.GraphModule, *operands: Any) -> Any:
    unwrapped = ctx.unwrap_tensors(operands)
    region: Region | None = getattr(module, "region", None)
    with ctx.redispatch_to_next():
        if region is not None:  # in inference mode, tensors do not pass autograd
            out = _call_forward(region.graphs(unwrapped), unwrapped)
        else:
            out = region_call(module, *unwrapped)
    return ctx.wrap_tensors(out)


@region_call.py_impl(ProxyTorchDispatchMode)
def _(mode: ProxyTorchDispatchMode, module: fx.GraphModule, *operands: Any) -> Any:
    name = module.meta["mfsdp_region_name"]
    root: Any = mode.tracer.root
    if getattr(root, name, None) is not module:
        root.register_module(name, module)
    unwrap: Any = mode.tracer.unwrap_proxy  # type: ignore[attr-defined]
    proxy = mode.tracer.create_proxy(
        "call_function", invoke_subgraph, (unwrap(module), name, *(unwrap(operand) for operand in operands)), {}
    )
    return track_tensor_tree(region_call(module, *operands), proxy, constant=None, tracer=mode.tracer)


@region_call.py_impl(FakeTensorMode)
def _(mode: FakeTensorMode, module: fx.GraphModule, *operands: Any) -> Any:
    with mode:
        return tuple(_like(value) for value in module.graph.output_node().args[0])


def _like(node: Any) -> Any:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _call_forward(graphs: RegionGraphs, operands: Sequence[Any]) -> tuple[Any, ...]:
    return region_call(graphs.forward, *(operands[i] for i in graphs.takes))


class _RegionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, graphs: RegionGraphs, *operands: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            values = _call_forward(graphs, operands)
        kept = [s for s in graphs.needs if s.kind != "tangent"]
        ctx.region, ctx.graphs, ctx.number = region, graphs, len(operands)
        ctx.save_for_backward(*(operands[s.number] if s.kind == "operand" else values[s.number] for s in kept))
        ctx.set_materialize_grads(False)
        outputs = values[: graphs.outputs]
        ctx.mark_non_differentiable(*(outputs[i] for i in graphs.constant_outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:  # type: ignore[override]
        graphs: RegionGraphs = ctx.graphs
        saved = iter(ctx.saved_tensors)
        taken: list[Any] = []
        for node, source in zip(_placeholders(graphs.backward), graphs.needs, strict=True):
            if source.kind != "tangent":
                taken.append(next(saved))
                continue
            tangent = tangents[source.number]
            if tangent is None:
                what = f"nothing differentiable reads output {source.number} of one of its units"
                raise NotARegion(ctx.region.name, what)
            traced = node.meta["val"]
            if ctx.region.is_exact and not _is_laid_out_like(tangent, traced):
                what = f"the gradient of output {source.number} of one of its units has other strides than the output"
                raise NotARegion(ctx.region.name, what)
            taken.append(_laid_out_like(tangent, traced))
        returned = region_call(graphs.backward, *taken)
        gradients: list[Tensor | None] = [None] * ctx.number
        for operand, output, tangent in graphs.gradients:
            gradients[operand] = returned[output] if output is not None else taken[tangent]  # type: ignore[index]
        return None, None, *gradients


def _is_laid_out_like(tensor: Tensor, like: Tensor) -> bool:
    return all(
        stride == wanted or size == 1
        for stride, wanted, size in zip(tensor.stride(), like.stride(), like.shape, strict=True)
    )


def _laid_out_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the strides of ``like``, a copy if it has others."""
    if tensor.stride() == like.stride():
        return tensor
    order = sorted(range(like.dim()), key=lambda dim: (like.stride(dim), like.size(dim)), reverse=True)
    back = [order.index(dim) for dim in range(like.dim())]
    return tensor.permute(order).contiguous().permute(back)


def _placeholders(module: fx.GraphModule | None) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder")) if module is not None else []


# -- tracing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _tracing_apart(mode: FakeTensorMode) -> Iterator[None]:
    """Trace with a context of its own: the current one belongs to the graph that calls the region."""
    current, context = TracingContext.get(), TracingContext(mode)
    context.module_context = current.module_context
    with tracing(context):
        yield


def _fake(operand: Any) -> Any:
    """Return a fake tensor like an operand, which may be a wrapper of one."""
    if not isinstance(operand, Tensor):
        return operand
    made = torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device=operand.device)
    return made.requires_grad_(operand.requires_grad)


class _Traced(Exception):
    def __init__(self, graph: fx.GraphModule, outputs: int) -> None:
        super().__init__()
        self.graph, self.outputs = graph, outputs


def trace_joint(body: fx.GraphModule, operands: Sequence[Any], decomposed: bool) -> tuple[fx.GraphModule, bool]:
    """Trace a body's forward and backward into one graph.

    Args:
        operands: Operands of the kind that the graph is for.
        decomposed: Whether to apply Inductor's decompositions.

    Returns:
        The graph, and whether it has a backward. Its inputs are the operands and, for each output that needs a
        gradient, a tangent. Its outputs are those of the body and, for each operand, a gradient or None.

    Raises:
        ValueError: The graph would not stand for the body: the message says why, as a clause.
    """
    mode = TracingContext.get().fake_mode
    assert mode is not None
    with mode:
        fakes = tuple(map(_fake, operands))

    def stop(graph: fx.GraphModule, inputs: Any, num_fwd_outputs: int | None = None, **kwargs: Any) -> Any:
        raise _Traced(graph, num_fwd_outputs or len(graph.graph.output_node().args[0]))  # type: ignore[arg-type]

    try:
        with _tracing_apart(mode):
            trace_with_aot(body, fakes, stop, decomposed, compiler=stop)
    except _Traced as traced:
        module, outputs = traced.graph, traced.outputs
    graph = module.graph
    inputs = set(graph.find_nodes(op="placeholder"))
    if any(node.target is torch.ops.aten.copy_.default and node.args[0] in inputs for node in graph.nodes):
        raise ValueError("it writes to a tensor from outside, such as a buffer")
    if outputs != len(body.graph.output_node().args[0]):  # type: ignore[arg-type]
        raise ValueError("it writes to a tensor from outside, or returns several views of one tensor")
    return module, any(map(is_tangent, inputs))
