"""Transformer Engine on a CPU: its own Python layers, on a reference for its C++ extension.

``transformer_engine_torch``, which the layers call for all arithmetic, is built for CUDA. Here it is a module in plain
PyTorch: quantizing rounds as torch's float8 dtypes round, and a matmul multiplies dequantized values and sums in
float32. Call :func:`install` before the first ``import transformer_engine.pytorch``.

Not here: fused attention, userbuffers, permutation of tokens, NVFP4 with stochastic rounding. A layer that needs them
raises NotImplementedError with the name of the function.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HAS_EXTENSION = importlib.util.find_spec("transformer_engine_torch") is not None
"""Whether the real extension is there. If so, it is used."""
FOLDER = os.environ.get("MFSDP_TRANSFORMER_ENGINE", os.path.join(sys.prefix, "transformer_engine"))
"""Where ``make`` puts the wheel without its extension.

Among other packages, peft would find it, and fail to import it.
"""
IS_THERE = HAS_EXTENSION or os.path.isdir(os.path.join(FOLDER, "transformer_engine"))

tex = types.ModuleType("transformer_engine_torch")
tex.__spec__ = importlib.machinery.ModuleSpec("transformer_engine_torch", None)


def _missing(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"tests/te/reference_tex.py has no {name}")

    return missing


tex.__getattr__ = _missing  # type: ignore[method-assign]


def op(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(tex, function.__name__, function)
    return function


def _in_source(file: str, text: str) -> bool:
    """Whether a file of this version of Transformer Engine contains a text."""
    path = os.path.join(FOLDER, "transformer_engine", file)
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as source:
        return text in source.read()


HAS_NVFP4 = HAS_EXTENSION or _in_source("pytorch/custom_recipes/reference_nvfp4.py", "class NVFP4QuantizerRef")
"""Whether NVFP4 can be computed."""


def _define_enum(name: str, members: str, prefix: str = "") -> None:
    # Placeholders keep the numbers of the members that follow.
    numbered = {prefix + each: number for number, each in enumerate(members.split())}
    setattr(tex, name, enum.IntEnum(name, {key: value for key, value in numbered.items() if not key.startswith("_")}))


_define_enum(
    "DType",
    "kByte _kInt16 kInt32 _kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 _kFloat8E8M0 kFloat4E2M1",
)
_define_enum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
_define_enum("FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3")
_define_enum("CommOverlapType", "RS AG")
_define_enum("NVTEScalingMode", "DELAYED_TENSOR_SCALING MXFP8_1D_SCALING", "NVTE_")
_define_enum("NVTE_Bias_Type", "NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI", "NVTE_")
_define_enum(
    "NVTE_Mask_Type",
    "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    "NVTE_",
)
_define_enum("NVTE_Softmax_Type", "VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX", "NVTE_")
_define_enum(
    "NVTE_QKV_Format",
    "BSHD SBHD THD SBHD_2BSHD BSHD_2SBHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET",
    "NVTE_",
)
_define_enum(
    "NVTE_QKV_Layout",
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD T3HD TH3D "
    "THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET",
    "NVTE_",
)
_define_enum(
    "NVTE_Fused_Attn_Backend",
    "F16_arbitrary_seqlen FP8 F16_max512_seqlen No_Backend"
    if _in_source("pytorch/cpp_extensions/fused_attn.py", "F16_max512_seqlen")
    else "F16_arbitrary_seqlen FP8 No_Backend",
    "NVTE_",
)
_define_enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
_define_enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
_define_enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID")
for _name in ("CommOverlap", "CommOverlapP2P", "CommOverlapCore", "CommOverlapHelper"):
    setattr(tex, _name, type(_name, (), {}))

_TORCH_DTYPES = {
    tex.DType.kByte: torch.uint8,
    tex.DType.kInt32: torch.int32,
    tex.DType.kFloat32: torch.float32,
    tex.DType.kFloat16: torch.float16,
    tex.DType.kBFloat16: torch.bfloat16,
    tex.DType.kFloat8E4M3: torch.float8_e4m3fn,
    tex.DType.kFloat8E5M2: torch.float8_e5m2,
}


def e4m3() -> Any:
    """Return the extension's name of ``torch.float8_e4m3fn``."""
    return sys.modules["transformer_engine_torch"].DType.kFloat8E4M3


def _torch_dtype(dtype: Any) -> Any:
    return dtype if isinstance(dtype, torch.dtype) or dtype is None else _TORCH_DTYPES[int(dtype)]


# -- quantizing -------------------------------------------------------------------------------------------------------


def _to_bytes(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return scaled.clamp(-limit, limit).to(dtype).view(torch.uint8)


def _scale_of(amax: Tensor, dtype: torch.dtype, epsilon: float, power_of_2: bool) -> Tensor:
    amax = amax.float().clamp(min=epsilon) if epsilon else amax.float()
    scale = torch.finfo(dtype).max / amax
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(scale), scale)
    return (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32) if power_of_2 else scale  # without mantissa


def _quantize_mx(blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize ``[..., 32]``. Return the biased exponents of the scales, ``[...]``, and the bytes."""
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(amax / torch.finfo(dtype).max)).clamp(-127, 127)
    exponent = torch.where(amax == 0, torch.full_like(exponent, -127), exponent)
    scaled = torch.where(
        exponent == -127, blocks, blocks / torch.exp2(exponent)
    )  # the least is for zeros, in kernels too
    return (exponent + 127).to(torch.uint8).squeeze(-1), _to_bytes(scaled, dtype)


def _padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(scales, (0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows))


def _fill(out: Any, x: Tensor, quantizer: Any) -> Any:
    """Quantize ``x`` into the memory that ``out`` has: row-wise, column-wise or both."""
    kind, x = type(quantizer).__name__, x.detach()
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        _fill_per_tensor(out, x, quantizer, is_delayed=kind == "Float8Quantizer")
    elif kind == "MXFP8Quantizer":
        dtype, flat = _torch_dtype(quantizer.dtype), x.reshape(-1, x.shape[-1]).float()
        if out._rowwise_data is not None:
            scales, data = _quantize_mx(flat.view(flat.shape[0], -1, 32), dtype)
            out._rowwise_data.copy_(data.view(out._rowwise_data.shape))
            out._rowwise_scale_inv.copy_(_padded(scales, 128, 4))
        if out._columnwise_data is not None:
            scales, data = _quantize_mx(flat.t().reshape(flat.shape[1], -1, 32), dtype)
            out._columnwise_data.copy_(data.view(flat.shape[1], -1).t().view(out._columnwise_data.shape))
            out._columnwise_scale_inv.copy_(_padded(scales.t(), 4, 128))
    elif kind == "Float8BlockQuantizer":
        flat = x.reshape(-1, x.shape[-1]).float()
        if out._rowwise_data is not None:
            _fill_blocks(out._rowwise_data, out._rowwise_scale_inv, flat, quantizer)
        if out._columnwise_data is not None:
            _fill_blocks(out._columnwise_data, out._columnwise_scale_inv, flat.t(), quantizer)
    elif kind == "NVFP4Quantizer":
        _fill_nvfp4(out, x.reshape(-1, x.shape[-1]), quantizer)
    else:
        raise NotImplementedError(f"tests/te/reference_tex.py does not quantize with {kind}")
    return out


def _of_blocks(scales: Tensor, rows: int, columns: int, is_square: bool) -> Tensor:
    """Return the scale of each element of ``[rows, columns]``, from those of 128x128 or 1x128 blocks."""
    if is_square:
        return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return scales.t()[:rows].repeat_interleave(128, 1)[:, :columns]


def _fill_blocks(data: Tensor, scale_inv: Tensor, x: Tensor, quantizer: Any) -> None:
    """Quantize ``x``, ``[rows, columns]``, in blocks of 128x128, or of 1x128, whose scales are stored by columns."""
    (rows, columns), is_square = x.shape, quantizer.block_scaling_dim == 2
    padded = F.pad(x.abs(), (0, -columns % 128, 0, -rows % 128 if is_square else 0))
    height = 128 if is_square else 1
    amax = padded.reshape(padded.shape[0] // height, height, -1, 128).amax((1, 3))
    scales = _scale_of(amax, _torch_dtype(quantizer.dtype), quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    scales = scales if is_square else scales.t()
    data.copy_(
        _to_bytes(x * _of_blocks(scales, rows, columns, is_square), _torch_dtype(quantizer.dtype)).view(data.shape)
    )
    scale_inv.zero_()[: scales.shape[0], : scales.shape[1]].copy_(scales.reciprocal())


def _fill_nvfp4(out: Any, x: Tensor, quantizer: Any) -> None:
    """Quantize ``x``, ``[rows, columns]``, with Transformer Engine's own reference. Data by columns is transposed."""
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    if quantizer.stochastic_rounding:
        raise NotImplementedError("tests/te/reference_tex.py rounds to nearest: pass disable_stochastic_rounding=True")
    found = reference_nvfp4.NVFP4QuantizerRef(
        reference_utils.Fp4Formats.E2M1,
        rowwise=out._rowwise_data is not None,
        columnwise=out._columnwise_data is not None,
        quant_tile_shape=(16, 16) if quantizer.with_2d_quantization else (1, 16),
        with_rht=quantizer.with_rht,
    )._quantize(x)
    *parts, amax_of_rows, amax_of_columns = found
    names = ("_rowwise_data", "_rowwise_scale_inv", "_columnwise_data", "_columnwise_scale_inv")
    for name, part in zip(names, parts, strict=True):
        if part is not None and name.endswith("data"):
            getattr(out, name).copy_(part.view(getattr(out, name).shape))
        elif part is not None:
            getattr(out, name).copy_(_padded(part.view(torch.uint8), 128, 4))
    for name, amax in (("_amax_rowwise", amax_of_rows), ("_amax_columnwise", amax_of_columns)):
        if getattr(out, name) is not None:
            getattr(out, name).copy_(amax)


def _values_of_nvfp4(tensor: Any, is_rowwise: bool) -> Tensor:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    direction = "row" if is_rowwise else "column"
    data, scales, amax = (
        getattr(tensor, name.format(direction)) for name in ("_{}wise_data", "_{}wise_scale_inv", "_amax_{}wise")
    )
    assert data is not None, "this tensor was not quantized in the direction that the product needs"
    values = cast_from_fp4x2(
        data.reshape(-1, data.shape[-1]) if is_rowwise else data.reshape(data.shape[0], -1), torch.float32
    )
    rows, columns = values.shape
    scales = scales[:rows, : columns // 16].contiguous().view(torch.float8_e4m3fn).float() * (amax / (6 * 448))
    values = values * scales.repeat_interleave(16, 1)
    return values if is_rowwise else values.t()


def _fill_per_tensor(out: Any, x: Tensor, quantizer: Any, is_delayed: bool) -> None:
    dtype = _torch_dtype(quantizer.dtype)
    amax = x.abs().amax().float() if x.numel() else torch.zeros(())
    if is_delayed:
        scale = quantizer.scale
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.to(quantizer.amax).reshape(quantizer.amax.shape)))
    else:
        scale = _scale_of(amax.reshape(1), dtype, quantizer.amax_epsilon, quantizer.force_pow_2_scales)
    data = _to_bytes(x.float() * scale, dtype)
    if out._data is not None:
        out._data.copy_(data.view(out._data.shape))
    if out._transpose is not None:
        out._transpose.copy_(data.reshape(-1, x.shape[-1]).t().reshape(out._transpose.shape))
        out._transpose_invalid = False
    out._scale_inv.copy_(scale.reciprocal().reshape(out._scale_inv.shape))


@op
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool = False
) -> Any:
    shape = tuple(shape)
    if not hasattr(quantizer, "storage_metadata"):  # in earlier versions
        return quantizer.make_empty(shape, dtype=dtype, device=device)
    if type(quantizer).__name__ == "Float8Quantizer":
        return _empty_delayed(quantizer, shape, dtype, device)
    meta, specs = quantizer.storage_metadata(dtype), quantizer.inner_tensor_specs(shape)
    cls, arguments = meta["cls"], dict(meta["nontensor_kwargs"])
    for attribute, argument in cls._INNER_TENSORS:
        spec = specs.get(attribute)
        arguments[argument] = torch.zeros(spec[0], dtype=spec[1], device=device) if spec is not None else None
    if "with_gemm_swizzled_scales" in arguments:
        arguments["with_gemm_swizzled_scales"] = False
    if not quantizer.internal:
        arguments.update(shape=shape, dtype=dtype, device=device)
    return cls(**arguments)


def _empty_delayed(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Any:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    def make(shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=torch.uint8, device=device)

    parts = {
        "data": make(shape) if quantizer.rowwise_usage else None,
        "data_transpose": make((shape[-1], *shape[:-1])) if quantizer.columnwise_usage else None,
        "fp8_scale_inv": torch.empty(1, dtype=torch.float32, device=device),
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return Float8TensorStorage(fake_dtype=dtype, **parts)
    return Float8Tensor(shape=shape, dtype=dtype, device=device, **parts)


@op
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    if noop is not None and noop.item():
        return output
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype, tensor.device)
    return _fill(output, tensor, quantizer)


@op
def split_quantize(tensor: Tensor, split_sections: Sequence[int], quantizers: Sequence[Any], **options: Any) -> Any:
    parts = torch.split(tensor, list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def _values(tensor: Any, is_rowwise: bool = True) -> Tensor:
    """Return the values of a plain or quantized tensor as ``[rows, columns]`` in float32."""
    if isinstance(tensor, Tensor) and not hasattr(tensor, "_quantizer"):
        return tensor.detach().reshape(-1, tensor.shape[-1]).float()
    if hasattr(tensor, "_fp4_dtype"):
        return _values_of_nvfp4(tensor, is_rowwise)
    dtype = _torch_dtype(tensor._fp8_dtype)
    if hasattr(tensor, "_scale_inv"):  # one scale per tensor
        if tensor._data is not None and (is_rowwise or tensor._transpose is None):
            data = tensor._data.view(dtype).float().reshape(-1, tensor._data.shape[-1])
        else:
            data = tensor._transpose.view(dtype).float().reshape(tensor._transpose.shape[0], -1).t()
        return data * tensor._scale_inv
    if is_rowwise:
        data, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
    else:
        data, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    assert data is not None, "this tensor was not quantized in the direction that the product needs"
    if hasattr(tensor, "_is_2D_scaled"):  # data by columns is transposed
        values = data.view(dtype).float()
        values = values.reshape(-1, data.shape[-1]) if is_rowwise else values.reshape(data.shape[0], -1)
        values = values * _of_blocks(scales, *values.shape, tensor._is_2D_scaled)
        return values if is_rowwise else values.t()
    values = data.view(dtype).float().reshape(-1, data.shape[-1])
    rows, columns = values.shape if is_rowwise else (values.shape[0] // 32, values.shape[1])
    if is_rowwise:
        return values * torch.exp2(scales[:rows, : columns // 32].float() - 127).repeat_interleave(32, 1)
    return values * torch.exp2(scales[:rows, :columns].float() - 127).repeat_interleave(32, 0)


@op
def dequantize(input: Any, otype: Any) -> Tensor:
    names = ("_data", "_rowwise_data", "_columnwise_data", "_transpose")
    name, data = next((n, d) for n in names if (d := getattr(input, n, None)) is not None)
    return _values(input, name in ("_data", "_rowwise_data")).to(_torch_dtype(otype)).reshape(*data.shape[:-1], -1)


@op
def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    transposed = input.reshape(-1, input.shape[-1]).t().contiguous().reshape(input.shape[-1], *input.shape[:-1])
    return transposed if out is None else out.copy_(transposed)


@op
def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return input.reshape(-1, input.shape[-1]).sum(0), quantize(input, quantizer)


@op
def compute_amax(tensor: Tensor, amax: Tensor) -> None:
    amax.copy_(tensor.detach().abs().amax().float().reshape(amax.shape))


@op
def fused_amax_and_scale_update_after_reduction(
    reduced: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: Any, margin: int
) -> None:
    limit, start = torch.finfo(_torch_dtype(dtype)).max, 0
    for history, scale in zip(histories, scales, strict=True):
        count = history.shape[1]
        history[0].copy_(reduced[start : start + count])
        start += count
        amax = history.amax(0) if algorithm == "max" else history[0].clone()
        new = limit / amax / 2**margin
        scale.copy_(torch.where((amax > 0) & torch.isfinite(amax) & torch.isfinite(new), new, scale))
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()


# -- products ---------------------------------------------------------------------------------------------------------


@op
def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    alpha: float = 1.0,
    **overlap: Any,
) -> tuple[Any, ...]:
    a, b = _values(A, is_rowwise=transA), _values(B, is_rowwise=not transB)
    out = alpha * (b.t() if transB else b) @ (a.t() if transA else a)
    dtypes = [tensor.dtype for tensor in (D, A, B) if isinstance(tensor, Tensor)]
    dtype = _torch_dtype(output_dtype) or next(iter(dtypes), torch.bfloat16)
    shape = out.shape if transB else (*B.size()[:-1], out.shape[-1])
    bias_grad = gelu_input = None
    if bias is not None and grad:
        bias_grad = b.sum(0).to(bias.dtype)
    elif bias is not None:
        out = out + bias.float()
    if gelu and grad:
        assert gelu_in is not None
        out = _gradient_of(_ACTIVATIONS["gelu"], gelu_in.float(), out)
    elif gelu:
        gelu_input = out.to(dtype).reshape(shape)
        out = _ACTIVATIONS["gelu"](out)
    result: Any = out.reshape(shape).to(dtype)
    if quantizer is not None:
        result = quantize(result, quantizer)
    elif D is not None:
        D.add_(result.to(D.dtype)) if accumulate else D.copy_(result)
        result = D
    return result, bias_grad, gelu_input, None


@op
def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[Tensor],
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    places = D[0].split(list(m_splits)) if single_output else D
    for a, b, place, its_bias in zip(A, B, places, bias, strict=True):
        has_bias = its_bias.numel() > 0
        rest = (None, 0, accumulate, use_split_accumulator)
        its = its_bias if has_bias else None
        _, bias_grad, *_ = generic_gemm(a, transa, b, transb, place, None, None, its, None, False, None, grad, *rest)
        if has_bias and grad:
            its_bias.copy_(bias_grad)
    return bias


# -- norms ------------------------------------------------------------------------------------------------------------


def _finish(value: Tensor, dtype: Any, out: Any, quantizer: Any) -> Any:
    value = value.to(_torch_dtype(dtype))
    if quantizer is not None:
        return quantize(value, quantizer, out)
    return value if out is None else out.copy_(value)


def _gamma(weight: Tensor, is_zero_centered: bool) -> Tensor:
    return weight.detach().float() + 1 if is_zero_centered else weight.detach().float()


@op
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor, Tensor]:
    x = input.detach().float()
    mean = x.mean(-1)
    inverse = torch.rsqrt(x.var(-1, unbiased=False) + eps)
    value = (x - mean[:, None]) * inverse[:, None] * _gamma(weight, zero_centered_gamma)
    value = value if bias is None else value + bias.detach().float()
    return _finish(value, otype, ln_out, quantizer), mean, inverse


@op
def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normal, gradient = (x.float() - mu[:, None]) * rsigma[:, None], dz.float().reshape(x.shape)
    weighted = gradient * _gamma(gamma, zero_centered_gamma)
    along = weighted.mean(-1, keepdim=True) + normal * (weighted * normal).mean(-1, keepdim=True)
    dx = (weighted - along) * rsigma[:, None]
    return dx.to(x.dtype), (gradient * normal).sum(0).to(gamma.dtype), gradient.sum(0).to(gamma.dtype)


@op
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, Tensor]:
    x = input.detach().float()
    inverse = torch.rsqrt(x.square().mean(-1) + eps)
    value = x * inverse[:, None] * _gamma(weight, zero_centered_gamma)
    return _finish(value, otype, ln_out, quantizer), None, inverse


@op
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    normal, gradient = x.float() * rsigma[:, None], dz.float().reshape(x.shape)
    weighted = gradient * _gamma(gamma, zero_centered_gamma)
    dx = (weighted - normal * (weighted * normal).mean(-1, keepdim=True)) * rsigma[:, None]
    return dx.to(x.dtype), (gradient * normal).sum(0).to(gamma.dtype)


# -- activations ------------------------------------------------------------------------------------------------------


def _gradient_of(function: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        value = function(x)
    return torch.autograd.grad(value, x, gradient.reshape(value.shape))[0]


def _gated(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, -1)
    return function(gate) * linear


def _define_activation(name: str, function: Callable[[Tensor], Tensor]) -> None:
    def forward(input: Tensor, quantizer: Any = None, *limits: Any) -> Any:
        value = function(input.detach().float()).to(input.dtype)
        return value if quantizer is None else quantize(value, quantizer)

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any = None, *limits: Any) -> Any:
        gradient = _gradient_of(function, fwd_input.float(), grad.detach().float()).to(fwd_input.dtype)
        return gradient if quantizer is None else quantize(gradient, quantizer)

    def backward_with_bias(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        gradient = backward(grad, fwd_input)
        return gradient.reshape(-1, gradient.shape[-1]).sum(0), quantize(gradient, quantizer)

    setattr(tex, name, forward)
    setattr(tex, f"d{name}", backward)
    setattr(tex, f"dbias_d{name}", backward_with_bias)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
for _name, _function in _ACTIVATIONS.items():
    _define_activation(_name, _function)
for _name, _function in {"geglu": _ACTIVATIONS["gelu"], "reglu": F.relu, "swiglu": F.silu}.items():
    _define_activation(_name, functools.partial(_gated, _function))


@op
def get_cublasLt_version() -> int:
    return 120000  # before grouped products on the device, which need more of the extension


@op
def get_num_cublas_streams() -> int:
    return 4


# -- installing -------------------------------------------------------------------------------------------------------

_ON_CPU = (
    ('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cpu")'),
    ('"cuda"', '"cpu"'),
    (".is_cuda", ".is_cpu"),
    ("torch.cuda.current_device()", 'torch.device("cpu")'),
    ("torch.cuda.is_available()", "True"),
    ("torch.cuda.is_current_stream_capturing()", "False"),
    ("torch.cuda.synchronize()", "None"),
    ("torch.cuda.nvtx.range(", "__import__('contextlib').nullcontext("),
    ("torch.cuda.device(", "__import__('contextlib').nullcontext("),
    ("torch.Tensor().cuda()", "torch.Tensor()"),
)
"""Replacements in the source of Transformer Engine's Python files."""


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:  # neither from a .pyc, nor to one
        return compile(self.get_data(self.path), self.path, "exec", dont_inherit=True)

    def get_data(self, path: str) -> bytes:
        text = super().get_data(path).decode()
        for cuda, cpu in _ON_CPU:
            text = text.replace(cuda, cpu)
        return text.encode()


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("transformer_engine."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Anything(types.ModuleType):
    """A module that has any name, for what is imported and not called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__


@contextlib.contextmanager
def _without(*packages: str) -> Iterator[None]:
    """Context in which packages that are not installed can be imported."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    stand_ins = {name: _Anything(name) for name in absent}
    for package in [name for name in absent if name == "triton"]:
        for inner in ("language", "language.core", "language.standard", "language.extra", "language.extra.libdevice"):
            stand_ins[f"{package}.{inner}"] = _Anything(f"{package}.{inner}")
    for name, module in stand_ins.items():
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            sys.modules.pop(name, None)


def _replace(name: str, value: Any) -> None:
    """Replace a function in every module of Transformer Engine that has imported it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformer_engine") and name in vars(module):
            setattr(module, name, value)


def _workspace(device: Any, userbuffers: bool, is_grouped: bool) -> Any:
    empty = torch.empty(1, dtype=torch.uint8)
    return [empty] if is_grouped else empty


@functools.cache
def install() -> Any:
    """Return ``transformer_engine.pytorch``, made for a CPU that claims to be a Hopper GPU."""
    import torch._inductor.compile_fx  # looks for triton once
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # CUDA's libraries are not loaded then
    os.environ["NVTE_FLASH_ATTN"] = os.environ["NVTE_FUSED_ATTN"] = "0"
    sys.modules["transformer_engine_torch"] = tex
    sys.meta_path.insert(0, _Finder())
    sys.path.insert(0, FOLDER)
    with warnings.catch_warnings(), _without("triton", "onnx", "onnxscript", "einops"):
        warnings.simplefilter("ignore")
        import transformer_engine.common as common

        common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch as te
    sys.path.remove(FOLDER)
    if not hasattr(te, "autocast"):  # before 2.9
        te.autocast = lambda enabled, recipe: te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)
        te.quantized_model_init = te.fp8_model_init
    _replace("get_device_compute_capability", lambda: (9, 0))
    _replace("get_sm_count", lambda: 132)
    _replace("get_cudnn_version", lambda: (9, 10, 2))
    _replace("_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace("_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
    _replace("get_cublas_workspace", _workspace)
    _replace("get_cublas_workspace_size_bytes", lambda: 0)
    _replace("is_non_tn_fp8_gemm_supported", lambda: False)
    for kind in ("fp8", "mxfp8", "fp8_block_scaling", "nvfp4"):
        _replace(f"check_{kind}_support", lambda *args, **kwargs: (True, ""))
    return te
