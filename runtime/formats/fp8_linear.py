"""Linear layers whose matrix products are computed in float8: ``torch.ops.mfsdp.fp8_linear`` and ``fp8_quantize``.

:mod:`mfsdp_compile.passes.guests.fp8_matmul` puts the first into Dynamo's graph. It is composite and differentiable:
graphs show quantizations and products, ``y = x W^T`` with ``x`` ``[tokens, in]`` and ``W`` ``[out, in]``::

    product   operands             sums over   dtypes, "rowwise"    dtypes, "tensorwise"
    forward   x @ W^T              in          e4m3 @ e4m3          e4m3 @ e4m3
    dgrad     dx = g @ W           out         e4m3 @ e4m3          e5m2 @ e4m3
    wgrad     dW = g^T @ x         tokens      e4m3 @ e4m3          e5m2 @ e4m3

An operand has a scale per row of what is not summed over (``"rowwise"``), or one for the matrix (``"tensorwise"``).

For dgrad, rows of ``W`` are what is summed over, so their scales cannot be factored out of the product. With
``W = diag(s) Q``, ``dx = (g diag(s)) Q``: the scales are folded into the gradient before it is quantized, and ``Q`` is
the same as in forward. Quantizing ``W`` a second time by columns costs more, and is no more exact (relative error of dx
0.037 for both).

The products of GPUs read a row-major first operand and a column-major second one, with rows of a multiple of
16 bytes. CPUs read any layout; the verifier checks this (rule V11), so that graphs made on a CPU are right on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import compat
from .quantize import scales_of

SCALINGS = ("rowwise", "tensorwise")
ALIGNMENT = 16
"""Sizes of matrices in float8 must be multiples of this, in elements: rows of a multiple of 16 bytes."""

_VALUES = torch.float8_e4m3fn
_GRADIENTS = {"rowwise": torch.float8_e4m3fn, "tensorwise": torch.float8_e5m2}
"""Dtype of gradients. With one scale for a whole matrix of gradients, exponents need the wider range."""

_library = torch.library.Library("mfsdp", "FRAGMENT")
_library.define("fp8_quantize(Tensor values, int[] dims, ScalarType dtype) -> (Tensor, Tensor)")
_library.define("fp8_linear(Tensor input, Tensor weight, Tensor? bias, str scaling, bool wgrad) -> Tensor")
_library.define(
    "fp8_linear_quantized(Tensor input, Tensor anchor, Tensor data, Tensor scales, Tensor? bias, str scaling, bool "
    "wgrad) -> Tensor"
)


@torch.library.impl(_library, "fp8_quantize", "CompositeExplicitAutograd")
def quantize_over(values: Tensor, dims: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize a matrix. Returns its values in ``dtype``, and the scales, float32, of size 1 in ``dims``."""
    largest = torch.finfo(dtype).max
    scales = scales_of(values.abs().amax(dims, keepdim=True).float(), largest)
    return (values.float() / scales).clamp_(-largest, largest).to(dtype), scales


@torch.library.register_fake("mfsdp::fp8_quantize", lib=_library)
def _quantize_fake(values: Tensor, dims: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reduced = {dim % values.dim() for dim in dims}
    sizes = [1 if dim in reduced else size for dim, size in enumerate(values.shape)]
    return torch.empty_like(values, dtype=dtype), values.new_empty(sizes, dtype=torch.float32)


class _LinearFunction(torch.autograd.Function):
    """A linear layer. Its weight is a matrix in the dtype of the input, or data in float8 and their scales.

    Gradients of the weight go to ``weight``, which then is its anchor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scaling: str,
        wgrad: bool,
        *quantized: Tensor,
    ) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        ctx.save_for_backward(rows, *(quantized or (weight,)))
        ctx.scaling, ctx.wgrad, ctx.shape, ctx.has_bias = scaling, wgrad, input.shape, bias is not None
        data, scales = _quantize(rows, 1, scaling, _VALUES)
        its_data, its_scales = quantized or _quantize(weight, 1, scaling, _VALUES)
        product = compat.scaled_mm(
            data, its_data.t(), scales, its_scales.view(1, -1), bias=bias, out_dtype=input.dtype, use_fast_accum=True
        )
        return product.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, *saved = ctx.saved_tensors
        gradients = gradient.reshape(-1, gradient.shape[-1])
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            data, scales = saved if len(saved) == 2 else _quantize(saved[0], 1, ctx.scaling, _VALUES)
            folded = gradients
            if ctx.scaling == "rowwise":
                folded = gradients.float() * scales.view(1, -1)
                scales = torch.ones(1, data.shape[1], dtype=torch.float32, device=data.device)
            of_input = _product(*_quantize(folded, 1, ctx.scaling, _GRADIENTS[ctx.scaling]), data, scales, rows.dtype)
            of_input = of_input.view(ctx.shape)
        if ctx.needs_input_grad[1] and ctx.wgrad and compat.is_multiple(rows.shape[0], ALIGNMENT):
            data, scales = _quantize(gradients, 0, ctx.scaling, _GRADIENTS[ctx.scaling])
            of_weight = _product(
                data.t().contiguous(), scales.view(-1, 1), *_quantize(rows, 0, ctx.scaling, _VALUES), rows.dtype
            )
        elif ctx.needs_input_grad[1]:
            of_weight = gradients.t() @ rows
        if ctx.has_bias and ctx.needs_input_grad[2]:
            of_bias = gradients.sum(0)
        return of_input, of_weight, of_bias, None, None, *((None, None) if len(saved) == 2 else ())


def _quantize(matrix: Tensor, dim: int, scaling: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize an operand of a product that sums over ``dim``."""
    return torch.ops.mfsdp.fp8_quantize(matrix, [dim] if scaling == "rowwise" else [0, 1], dtype)


def _product(left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left @ right``, both row-major."""
    columns = right.t().contiguous().t()
    return compat.scaled_mm(left, columns, left_scales, right_scales, out_dtype=dtype)


@torch.library.impl(_library, "fp8_linear", "CompositeImplicitAutograd")
def _fp8_linear(input: Tensor, weight: Tensor, bias: Tensor | None, scaling: str, wgrad: bool) -> Tensor:
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, weight, bias = input.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None
    if 0 in input.shape:  # a matrix without rows has no largest value
        return F.linear(input, weight, bias)
    return _LinearFunction.apply(input, weight, bias, scaling, wgrad)  # type: ignore[no-any-return]


@torch.library.impl(_library, "fp8_linear_quantized", "CompositeImplicitAutograd")
def _fp8_linear_quantized(
    input: Tensor, anchor: Tensor, data: Tensor, scales: Tensor, bias: Tensor | None, scaling: str, wgrad: bool
) -> Tensor:
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        input, bias = input.to(dtype), bias.to(dtype) if bias is not None else None
        anchor = anchor.to(dtype)
    if 0 in input.shape:
        return F.linear(input, anchor, bias)  # whatever the weight is: the result is empty
    return _LinearFunction.apply(input, anchor, bias, scaling, wgrad, data, scales)  # type: ignore[no-any-return]
