"""Backward graph: let matmuls that compute only gradients write them in float32.

A matmul of bfloat16 or float16 matrices sums in float32 and rounds the sum to the dtype of its inputs. If gradients are
reduced in float32, packing casts the result back, which costs a rounding and a kernel for nothing. CUDA matmuls accept
an out dtype.

Before                                              After
    mm = aten.mm(a, b)             bfloat16             mm = aten.mm.dtype(a, b, float32)     float32
    permute = aten.permute(mm)     bfloat16             permute = aten.permute(mm)            float32
    cast = _to_copy(permute)       float32
    pack_gradients([cast, norm])   float32              pack_gradients([permute, norm])       float32

Between the matmul and packing there may be views, and casts to float32 (from autocast), which the pass removes. Every
reader of the matmul must lead to packing in float32. All other gradients, including those of batched matmuls, stay as
they are and are cast when they are packed.

The pass changes numerics: results no longer match the eager path. That is why it is an option of the backend.

Needs: roles; ``meta["val"]`` of the nodes it inspects. It changes nothing where that is missing. Leaves: the order of
nodes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import Context, Feature, NodeKind, Report, role_of

_aten = torch.ops.aten
_PACK = torch.ops.mfsdp.pack_gradients.default
_HALVES = (torch.bfloat16, torch.float16)  # input dtypes for which CUDA matmuls support an out dtype of float32


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    lines = []
    left: Counter[str] = Counter()
    for pack in graph.find_nodes(op="call_function", target=_PACK):
        if (role := role_of(pack)) is None or role.kind is not NodeKind.PACK:
            continue
        info = context.buckets[role.bucket]
        names = {slot.offset: slot.name for slot in info.layout.slots if slot.numel}
        for i, offset in enumerate(pack.args[1]):
            source = _source(pack.args[0][i])
            reason = _widen(source)
            if reason:
                left[reason] += 1
            else:
                lines.append(f"{info.name}: {names.get(offset, 'an empty parameter')} in float32 from {source}")
    if not lines:
        lines.append("no gradient is computed by a matmul that this applies to")
    if left:
        lines.append(f"as they were: {', '.join(f'{count} {reason}' for reason, count in sorted(left.items()))}")
    return Report("float32_gradients", lines)


def _source(gradient: fx.Node) -> fx.Node:
    """Return the node that computes a packed gradient, or the tensor that the gradient is a part of."""
    while _is_rearranged(gradient) or _is_widened(gradient):
        gradient = gradient.all_input_nodes[0]
    return gradient


def _widen(source: fx.Node) -> str:
    """Make a matmul write float32. Return the reason if that is not possible, else an empty string."""
    if source.target is _aten.mm.dtype and source.args[2] is torch.float32:
        return ""  # already widened for another parameter, or by the user
    value = source.meta.get("val")
    if not isinstance(value, Tensor) or source.target is not _aten.mm.default:
        return f"from {source.target if source.op == 'call_function' else source.op}"
    if value.device.type != "cuda" or value.dtype not in _HALVES:
        return f"from {source.target} in {value.dtype} on {value.device.type}"
    between = _between(source)
    if between is None:
        return f"from {source.target} that is not for packing in float32 alone"

    source.target, source.args = _aten.mm.dtype, (*source.args, torch.float32)
    _revalue(source)
    for node in between:
        if _is_widened(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            node.graph.erase_node(node)
        else:
            _revalue(node)
    return ""


def _between(matmul: fx.Node) -> list[fx.Node] | None:
    """Return the nodes between a matmul and packing, in graph order; None if any is not a view or a cast to float32."""
    between: set[fx.Node] = set()
    pending = [matmul]
    while pending:
        for user in pending.pop().users:
            if user.target is _PACK and role_of(user) is not None and user.args[3] is torch.float32:
                continue
            if not (_is_rearranged(user) or _is_widened(user)):
                return None
            between.add(user)
            pending.append(user)
    return sorted(between)


def _is_rearranged(node: fx.Node) -> bool:
    """Whether a node's value consists of elements of its only input, unchanged."""
    # Batch sizes are inputs too. A node that depends on them is not the gradient of a parameter.
    if len(node.all_input_nodes) != 1:
        return False
    if not roles.is_view(node) and node.target not in (_aten._unsafe_view.default, _aten.clone.default):
        return False
    value, before = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    return isinstance(value, Tensor) and isinstance(before, Tensor) and value.dtype == before.dtype  # not view.dtype


def _is_widened(node: fx.Node) -> bool:
    """Whether a node casts its input to float32 and does nothing else."""
    if node.target not in roles.CASTS or node.kwargs.get("memory_format") is not None:
        return False
    value, before = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    return (
        isinstance(value, Tensor)
        and isinstance(before, Tensor)
        and value.dtype == torch.float32
        and value.device == before.device
    )


def _revalue(node: fx.Node) -> None:
    """Recompute a node's metadata about its value."""

    def value_of(argument: fx.Node) -> Any:
        return argument.meta["val"]

    args, kwargs = fx.node.map_arg(node.args, value_of), fx.node.map_arg(node.kwargs, value_of)
    node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
    if "tensor_meta" in node.meta:
        node.meta["tensor_meta"] = node.meta["tensor_meta"]._replace(dtype=torch.float32)


@dataclass(frozen=True)
class Float32Gradients(Feature):
    """Lets matmuls write gradients in float32."""

    runs_early: ClassVar = {Phase.BACKWARD: (apply,)}
    in_regions = True
