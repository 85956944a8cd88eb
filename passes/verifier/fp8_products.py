"""The rule for products in float8 that a pass has made."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from mfsdp_compile.runtime.formats.fp8_linear import ALIGNMENT

from .. import roles
from ..context import NodeKind, role_of
from .analysis import Analysis, Findings, arguments, tensor_of
from .contract import Contract

_aten = torch.ops.aten
_TRANSPOSES = (_aten.t.default, _aten.permute.default, _aten.transpose.int)


class _Sent(NamedTuple):
    """A parameter whose bytes and scales were gathered."""

    bucket: int
    name: str | None


def products_in_float8(found: Analysis, _: Contract | None) -> Findings:
    """A product in float8 that a pass has made runs on a GPU too, and each operand is divided by its own scales.

    The first operand is row-major and the second column-major, and their rows are multiples of 16 bytes. Data and
    scales of an operand come from one quantization, over the dimension that is summed over or over the whole matrix.
    Scales over the other dimension are folded into the other operand, and ones in the product. What forward has
    quantized and saved is not followed.
    """
    for node in found.graph.find_nodes(op="call_function", target=_aten._scaled_mm.default):
        if not (node.meta.get("custom") or {}).get(roles.FP8):
            continue  # the model's own
        given = arguments(node)
        left, right = given["self"], given["mat2"]
        at = (node, *_weight_of(found, left, right))
        for side, operand, scales, summed in (
            ("left", left, given["scale_a"], 1),
            ("right", right, given["scale_b"], 0),
        ):
            value, sizes = tensor_of(operand), tensor_of(scales)
            if value is None or sizes is None:
                continue
            if isinstance(value.shape[summed], int) and value.shape[summed] % ALIGNMENT:
                yield f"the {side} operand of {node} is {list(value.shape)}, no multiple of {ALIGNMENT} bytes", *at
            if value.stride(summed) != 1:
                yield f"the {side} operand of {node}, {operand}, is not {('column', 'row')[summed]}-major", *at
            (quantized, transposed), of = _quantization(found, operand), _quantization(found, scales)[0]
            if quantized is None:
                if not _is_saved(operand):
                    yield f"the {side} operand of {node}, {operand}, is not quantized", *at
                continue
            over, dims = [summed ^ transposed], _dims(found, quantized)
            if of == quantized:
                if dims not in (over, [0, 1]):
                    what = f"the {side} operand of {node} is quantized over {dims}, and the product sums over {over}"
                    yield what, *at
            elif not (side == "right" and _is_folded(found, left, scales, quantized)):
                yield f"the scales of {node}'s {side} operand are {scales}, not its own", *at
            expected = [value.shape[0], 1] if summed else [1, value.shape[1]]
            if list(sizes.shape) not in (expected, [1, 1]) or not sizes.is_contiguous():
                got = f"{list(sizes.shape)}, strides {list(sizes.stride())}"
                yield f"the scales of {node}'s {side} operand are {got}, not a contiguous {expected}", *at


def _quantization(found: Analysis, node: Any) -> tuple[fx.Node | _Sent | None, int]:
    """Return what data or scales come from, through views and copies in another layout: a quantization, or a gather.

    Returns:
        It, and 1 if the value is its transpose, else 0. None and 0 if there is none.
    """
    transposed = 0
    while isinstance(node, fx.Node) and node.target is not roles.QUANTIZE:
        whole = found.whole_of.get(node)
        if whole is not None and node in (whole.node, *whole.aliases) and node.target not in _TRANSPOSES:
            sent = found.info(whole.bucket).exchange.stays_quantized
            return (_Sent(whole.bucket, found.parameter(whole.bucket, node)), transposed) if sent else (None, 0)
        if (role := role_of(node)) is not None and role.kind is NodeKind.SCALES:
            return _Sent(role.bucket, found.scaled_parameter(node)), transposed
        if not (roles.is_view(node) or node.target is _aten.clone.default or roles.is_of_quantized(node)):
            return None, 0
        transposed ^= node.target in _TRANSPOSES
        node = node.args[0]
    return (node, transposed) if isinstance(node, fx.Node) else (None, 0)


def _dims(found: Analysis, quantized: fx.Node | _Sent) -> Any:
    """Return the dimensions that scales are made over."""
    if isinstance(quantized, fx.Node):
        return quantized.args[1]
    return [1] if found.info(quantized.bucket).exchange.scaling == "rowwise" else [0, 1]


def _is_saved(node: Any) -> bool:
    """Whether a value is an input of the graph, or a view or a copy of one."""
    while isinstance(node, fx.Node) and (roles.is_view(node) or node.target is _aten.clone.default):
        node = node.all_input_nodes[0]
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _is_folded(found: Analysis, left: Any, scales: Any, weight: fx.Node | _Sent) -> bool:
    """Whether a weight's scales are a factor of the left operand before it was quantized, and ones in the product."""
    if not isinstance(scales, fx.Node) or not (
        scales.target is _aten.ones.default or (scales.target is _aten.full.default and scales.args[1] == 1)
    ):
        return False
    quantized, _ = _quantization(found, left)
    product = quantized.args[0] if isinstance(quantized, fx.Node) else None
    if not isinstance(product, fx.Node) or product.target is not _aten.mul.Tensor:
        return False
    return any(_quantization(found, factor)[0] == weight for factor in product.all_input_nodes)


def _weight_of(found: Analysis, *operands: Any) -> tuple[int | None, str | None]:
    """Return the bucket and the name of the parameter that is an operand of a product."""
    for operand in operands:
        quantized, _ = _quantization(found, operand)
        if isinstance(quantized, _Sent):
            return quantized
        source = quantized.args[0] if quantized is not None else None
        whole = found.whole_of.get(source) if isinstance(source, fx.Node) else None
        if whole is not None:
            return whole.bucket, found.parameter(whole.bucket, source)  # type: ignore[arg-type]
    return None, None
