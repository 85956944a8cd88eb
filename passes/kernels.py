"""The kernels of a graph: which nodes run as one, what they compute, and which bytes they move.

If the inner compiler fuses kernels, consecutive fusible operators count as one kernel. It reads inputs from outside and
writes outputs that are read outside; values in between are not counted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat

from . import roles
from .context import NodeKind, role_of

_aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """Nodes that run as one kernel.

    Args:
        nodes: Nodes in graph order.
        flops: Floating-point operations of matrix products; 0 for kernels that only move data.
        bytes: Bytes that the kernel reads and writes.
        dtype: Dtype in which matrix products are computed.
        attention: Whether the kernel is fused attention.
        product: Batch, rows and columns of what a matrix product computes; None for other kernels.
        place: Position in the order of the graph.
        finishes: Bucket whose reduced gradient the kernel casts or scales; None for computation of the model.
        region: Graph of the region that is called; None for other kernels.
        collective: Kind, bytes of the whole tensor and process group name of one of the model's own collectives, which
            the model waits for (tensor or expert parallelism); None for computation.
    """

    nodes: tuple[fx.Node, ...]
    flops: float
    bytes: int
    dtype: torch.dtype
    attention: bool = False
    product: tuple[int, int, int] | None = None
    place: float = 0.0
    finishes: int | None = None
    collective: tuple[str, int, str] | None = None
    region: fx.Graph | None = None

    @property
    def inner(self) -> tuple[fx.Node, ...]:
        """Nodes whose values only the kernel itself reads. In a fused kernel these are never in memory."""
        own = set(self.nodes)
        return tuple(node for node in self.nodes if own.issuperset(readers(node)))


def kernels(graph: fx.Graph, fused: bool) -> list[Kernel]:
    """Return the kernels of a graph with roles, in order, including the model's own collectives.

    Gathers, reductions and the nodes that belong to them are left out.
    """
    found: list[Kernel] = []
    region_of: dict[fx.Node, int] = {}
    barrier: dict[fx.Node, int] = {}  # by node: count of unfusible kernels up to the last one that it depends on
    regions: list[list[fx.Node]] = []
    sums: list[str | None] = []  # axis that each region's reductions sum over
    count = 0
    unstored = inlined(graph) if fused else set()
    for node in graph.nodes:
        before = max((barrier[source] for source in node.all_input_nodes if source in barrier), default=0)
        barrier[node] = before
        if (not is_compute(node) and not _is_of_model(node)) or node in unstored:
            continue
        if fused and _is_fusible(node):
            following = [region_of[s] for s in map(origin, node.all_input_nodes) if s in region_of]
            # A node joins the kernel of its input if that kernel runs after everything else that the node needs, and if
            # both loop over the same axis. A bias gradient, a sum over rows, does not join a norm's backward, which
            # sums within rows.
            joined, axis = max(following, default=-1), _reduced(node)
            if (
                joined >= 0
                and before <= min(barrier[n] for n in regions[joined])
                and (axis is None or sums[joined] in (None, axis))
            ):
                regions[joined].append(node)
                sums[joined] = sums[joined] or axis
                region_of[node] = joined
            else:
                regions.append([node])
                sums.append(axis)
                region_of[node] = len(regions) - 1
            continue
        count += 1
        barrier[node] = count
        found.append(_kernel([node], unstored))
    found += [_kernel(region, unstored) for region in regions]
    order = {node: float(position) for position, node in enumerate(graph.nodes)}
    finishing = {node: reduction.bucket for reduction in roles.reductions(graph) for node in reduction.after}
    placed = (replace(k, place=_place(k, order), finishes=finishing.get(k.nodes[0])) for k in found)
    return sorted(placed, key=lambda kernel: kernel.place)


def _reduced(node: fx.Node) -> str | None:
    """Return the axis that a reduction sums over.

    Returns:
        ``"within rows"`` if the last dimension is among the reduced ones, else ``"rows"``. None if the node is no
        reduction, or reduces all dimensions.
    """
    packet = getattr(node.target, "overloadpacket", None)
    value = node.all_input_nodes[0].meta.get("val") if packet in _REDUCTIONS and node.all_input_nodes else None
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(value, Tensor) or not isinstance(dims, (list, tuple)) or not dims:
        return None
    reduced = {dim % value.dim() for dim in dims}
    if len(reduced) == value.dim():
        return None
    return "within rows" if value.dim() - 1 in reduced else "rows"


def _place(kernel: Kernel, order: dict[fx.Node, float]) -> float:
    """Return where a kernel runs: at its last node, but before other kernels read its results."""
    own = set(kernel.nodes)
    readers = (order[user] - 0.5 for node in kernel.nodes for user in node.users if user not in own)
    return min(order[kernel.nodes[-1]], min(readers, default=math.inf))


def origin(node: fx.Node) -> fx.Node:
    """Return the node that computes a node's value, looking through views and elements of tuples."""
    while (is_alias(node) or node.target is operator.getitem) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def base(node: fx.Node) -> fx.Node:
    """Return the node that allocates or receives the memory of a node's value."""
    while is_alias(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def readers(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a node's value, looking through views and elements of tuples."""
    found: dict[fx.Node, None] = {}
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if is_alias(user) or user.target is operator.getitem:
                pending.append(user)
            else:
                found[user] = None
    return list(found)


def is_alias(node: fx.Node) -> bool:
    """Whether a node's value shares storage with its first input: a view, or an ``_unsafe_view``."""
    return roles.is_view(node) or node.target is _aten._unsafe_view.default


def is_compute(node: fx.Node) -> bool:
    """Whether a node is computation of the model: not a collective, not part of one, and not a view."""
    if node.op != "call_function" or is_alias(node) or roles.is_collective(node):
        return False
    role = role_of(node)
    if role is not None and role.kind is not NodeKind.PORTION:
        return False
    if node.target in roles.saved_copies:
        return False
    return node.target not in _NOTHING and not isinstance(node.target, type(len))


_NOTHING = (
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.mfsdp.begin.default,
    roles.DELIVER,
)


def inlined(graph: fx.Graph) -> set[fx.Node]:
    """Return constants, and values computed from constants alone, that only fused kernels read.

    The kernels compute such values where they need them, so they are never in memory.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if not is_compute(node):
            continue
        if node.all_input_nodes:
            constant = torch.Tag.pointwise in getattr(node.target, "tags", ()) and found.issuperset(
                map(origin, node.all_input_nodes)
            )
        else:
            constant = getattr(node.target, "overloadpacket", None) in _CONSTANTS
        if constant and all(is_compute(reader) and _is_fusible(reader) for reader in readers(node)):
            found.add(node)
    return found


def _is_of_model(node: fx.Node) -> bool:
    """Whether a node starts one of the model's own collectives."""
    return node.op == "call_function" and roles.is_collective(node) and role_of(node) is None


def _collective(node: fx.Node) -> tuple[str, int, str]:
    """Return the kind of a collective, the bytes of the whole tensor, and the name of its process group."""
    name = node.target._opname  # type: ignore[union-attr]
    kind = next((kind for kind in _KINDS if name.startswith(kind)), "all_to_all")
    payload = sum(map(value_bytes, node.all_input_nodes)) if kind != "all_gather" else value_bytes(node)
    group = node.args[-1]
    return kind, payload, getattr(group, "group_name", group)  # type: ignore[return-value, arg-type]


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _kernel(nodes: Sequence[fx.Node], unstored: set[fx.Node]) -> Kernel:
    if _is_of_model(nodes[0]):
        return Kernel(tuple(nodes), 0.0, 0, torch.float32, collective=_collective(nodes[0]))
    if roles.is_region_call(nodes[0]):
        return Kernel(tuple(nodes), 0.0, 0, torch.float32, region=roles.body_of(nodes[0]).graph)
    if nodes[0].target is roles.PORTION:  # reads only the part of its input that it copies
        return Kernel(tuple(nodes), 0.0, 2 * value_bytes(nodes[0]), nodes[0].meta["val"].dtype, False)
    own = set(nodes)
    read: dict[fx.Node, int] = {}
    for source in dict.fromkeys(source for node in nodes for source in node.all_input_nodes):
        if (whole := origin(source)) not in own and whole not in unstored:
            # A value is read once even through two views.
            read[whole] = min(read.get(whole, 0) + value_bytes(source), value_bytes(whole))
    size = sum(read.values())
    size += sum(value_bytes(node) for node in nodes if not own.issuperset(readers(node)))
    (first, *more) = nodes
    flops, attention = (0.0, False) if more else _flops(first)
    values = (value for node in first.all_input_nodes for value in compat.tree_leaves(node.meta.get("val")))
    tensors = (value for value in values if isinstance(value, Tensor))
    # States of random numbers are bytes.
    dtype = next((value.dtype for value in tensors if value.is_floating_point()), torch.float32)
    return Kernel(tuple(nodes), flops, size, dtype, attention, _product(first) if flops and not attention else None)


def _flops(node: fx.Node) -> tuple[float, bool]:
    """Return the floating-point operations of a matrix product or of attention, and whether it is attention."""
    target, args = _operator(node)
    if not isinstance(target, torch._ops.OpOverload):
        return 0.0, False
    name = target._opname
    if "attention" in name and "scaled_dot_product" in name:
        names = [argument.name for argument in target._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(node.kwargs)
        return _attention_flops(given, backward="backward" in name), True
    formula = compat.flop_formula(target)
    if formula is None:
        return 0.0, False
    values, kwargs = fx.node.map_arg((args, dict(node.kwargs)), lambda n: _concrete(n.meta.get("val")))
    return float(formula(*values, **kwargs, out_val=_concrete(node.meta.get("val")))), False


def _product(node: fx.Node) -> tuple[int, int, int] | None:
    """Return batch, rows and columns of a matrix product's result; None for convolutions."""
    value = node.meta.get("val")
    target, _ = _operator(node)
    if target in _CONVOLUTIONS or not isinstance(value, Tensor) or value.dim() < 2:
        return None
    *batch, rows, columns = map(compat.concrete, value.shape)
    return math.prod(batch), rows, columns


def _operator(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator that a node runs, and its arguments.

    Recomputed operators that use random numbers, as attention may, are wrapped in an operator for the random number
    state.
    """
    before = {"run_and_save_rng_state": 0, "run_with_rng_state": 1}.get(str(node.target))
    if before is None:
        return node.target, node.args
    return node.args[before], node.args[before + 1 :]


def _attention_flops(given: Mapping[str, Any], backward: bool) -> float:
    """Return the floating-point operations of attention.

    Attention has two matrix products in forward and five in backward, one of them recomputed. With a causal mask it is
    half as much, because kernels skip what is masked (https://arxiv.org/abs/2205.14135).
    """
    query, key, value = (_concrete(given[name].meta["val"]) for name in ("query", "key", "value"))
    batch, heads, length, width = query.shape
    keys, value_width = key.shape[-2], value.shape[-1]
    products = 2.0 * batch * heads * length * keys * (width + value_width)
    causal = 0.5 if given.get("is_causal") else 1.0
    return products * causal * (2.5 if backward else 1.0)


def _concrete(value: Any) -> Any:
    """Replace symbolic sizes by numbers."""
    if isinstance(value, torch.SymInt):
        return compat.concrete(value)
    if isinstance(value, Tensor) and any(not isinstance(size, int) for size in value.shape):
        return torch.empty([compat.concrete(size) for size in value.shape], dtype=value.dtype, device="meta")
    return value


def value_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's value, or of all its values if it has several."""
    return sum(_tensor_bytes(v) for v in compat.tree_leaves(node.meta.get("val")) if isinstance(v, Tensor))


def _tensor_bytes(value: Tensor) -> int:
    """Return the bytes that are read or written. Expanded elements count once."""
    numel = 1
    for size, stride in zip(value.shape, value.stride(), strict=True):
        if compat.concrete(stride) != 0:
            numel *= compat.concrete(size)
    return numel * value.dtype.itemsize


_FUSIBLE_NAMES = """
sum mean amax amin var var_mean prod any all argmax argmin logsumexp cumsum _softmax _log_softmax
_softmax_backward_data _log_softmax_backward_data native_layer_norm native_layer_norm_backward
native_dropout native_dropout_backward rms_norm _fused_rms_norm _fused_rms_norm_backward
embedding index gather slice_scatter select_scatter cat constant_pad_nd clone copy
full full_like zeros zeros_like ones ones_like empty empty_like arange scalar_tensor iota where
new_zeros new_full new_empty lift_fresh_copy _to_copy masked_fill
"""


_FUSIBLE = {packet for name in _FUSIBLE_NAMES.split() if (packet := getattr(_aten, name, None)) is not None}


_CONVOLUTIONS = (_aten.convolution.default, _aten.convolution_backward.default)


_CONSTANTS = {_aten.full, _aten.arange, _aten.scalar_tensor, torch.ops.prims.iota}


_REDUCTIONS = {
    *(_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var, _aten.var_mean, _aten.prod, _aten.any, _aten.all),
    *(_aten.logsumexp, torch.ops.mfsdp.fp8_quantize),
}


def _is_fusible(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._opname == "inductor_seeds":
        return False  # one kernel draws the seeds of all dropouts; readers of a seed run where they are needed
    return (
        torch.Tag.pointwise in target.tags
        or target.overloadpacket in _FUSIBLE
        or target is roles.QUANTIZE
        or target.namespace == "prims"
        or target.namespace == "inductor_prims"
    )
