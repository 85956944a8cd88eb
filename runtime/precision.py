"""Options that decide dtypes, and how gradients are combined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

from . import quantize

__all__ = ["GradientPolicy", "MixedPrecisionPolicy", "Scaling"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of parameters and gradients, besides the dtype that the model computes in.

    Args:
        main_params_dtype: Dtype of shards and optimizer state. The default, float32, trains a bfloat16 model with
            float32 weights: each gather casts to bfloat16 first. If the dtypes agree, nothing is stored twice. None:
            each parameter's own dtype.
        main_grads_dtype: Dtype in which gradients are accumulated over microbatches; ``parameter.grad`` shows the sum
            in the parameter's dtype. None: ``main_params_dtype``.
        grad_comm_dtype: Dtype in which gradients are reduced over ranks. None: ``main_grads_dtype`` if given, else the
            dtype that the model computes in.
        param_comm_dtype: ``torch.float8_e4m3fn``: gather weights in float8, which is half of the bytes of bfloat16.
            ``torch.float4_e2m1fn_x2``: in float4, 28 % of its bytes, with ``param_comm_scaling="nvfp4"``. It costs accuracy.
            Modules get them dequantized, in the dtype that the model computes in, so it works with every module. Each
            rank keeps what it sends beside its shards: one byte per element, or 9/16. Only with
            ``zero_dp_strategy="optim_grads_params"``. None: gather in the dtype that the model computes in.
        param_comm_scaling: What shares a scale in quantized parameters: ``"rowwise"`` a row, ``"tensorwise"`` a matrix,
            ``"blockwise"`` a block of 128 x 128, ``"mxfp8"`` 32 neighbors in a row, ``"nvfp4"`` 16 neighbors in a row, with
            one more scale per matrix.
        param_comm_filter: ``(name, parameter) -> bool``, asked for each parameter of two or three dimensions: whether
            to quantize it. One of three dimensions is a stack of matrices, each with scales of its own. None: quantize
            matrices of units and stacked matrices of experts, but neither embeddings nor parameters outside of units,
            such as the output layer. A tied parameter is asked for once, with its first name.

    Raises:
        ValueError: A dtype is none of those allowed, ``param_comm_scaling`` is unknown or of another dtype, or a scaling or
            filter is given without ``param_comm_dtype``.
        TypeError: ``param_comm_filter`` is no function.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    param_comm_dtype: torch.dtype | None = None
    param_comm_scaling: Literal["rowwise", "tensorwise", "blockwise", "mxfp8", "nvfp4"] = "rowwise"
    param_comm_filter: Callable[[str, Any], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} takes a floating-point torch.dtype or None, got {dtype!r}")
        fp4 = quantize.dtype_of(quantize.NVFP4)
        if self.param_comm_dtype not in (None, quantize.DTYPE, fp4):
            raise ValueError(
                f"param_comm_dtype takes {quantize.DTYPE}, {fp4} or None, got {self.param_comm_dtype!r}. To gather in "
                "another dtype, change the model's: model.to(dtype) before sharding."
            )
        if self.param_comm_scaling not in quantize.SCALINGS:
            raise ValueError(
                f"param_comm_scaling takes one of {', '.join(quantize.SCALINGS)}, got {self.param_comm_scaling!r}"
            )
        if self.param_comm_filter is not None and not callable(self.param_comm_filter):
            raise TypeError(f"param_comm_filter takes a function or None, got {self.param_comm_filter!r}")
        if self.param_comm_dtype is None and (
            self.param_comm_filter is not None or self.param_comm_scaling != "rowwise"
        ):
            raise ValueError(
                "param_comm_scaling and param_comm_filter say how parameters are quantized, but param_comm_dtype is None, "
                f"so none is. Give param_comm_dtype={quantize.dtype_of(self.param_comm_scaling)}."
            )
        if self.param_comm_dtype not in (None, quantize.dtype_of(self.param_comm_scaling)):
            raise ValueError(
                f"param_comm_scaling={self.param_comm_scaling!r} is for {quantize.dtype_of(self.param_comm_scaling)}, but "
                f"param_comm_dtype is {self.param_comm_dtype}. Of the scalings, 'nvfp4' is for {fp4}, and the others are for "
                f"{quantize.DTYPE}."
            )

    def main_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Dtype of shards and optimizer state."""
        if self.main_params_dtype is None or not compute_dtype.is_floating_point:
            return compute_dtype
        return self.main_params_dtype

    def grad_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients are accumulated."""
        return self.main_grads_dtype or self.main_dtype(compute_dtype)

    def comm_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients are reduced."""
        return self.grad_comm_dtype or self.main_grads_dtype or compute_dtype

    @staticmethod
    def of(value: object, argument: str) -> MixedPrecisionPolicy:
        """Check the type of an argument and return it.

        Raises:
            TypeError: The value is something else. Policies of torch's FSDP and FSDP2 have other fields.
        """
        if isinstance(value, MixedPrecisionPolicy):
            return value
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        hint = (
            "It has main_params_dtype (of shards), main_grads_dtype (of sums over microbatches), grad_comm_dtype and "
            "param_comm_dtype (of gathers)."
        )
        if kind.startswith("torch.distributed.fsdp."):
            hint = (
                "Its param_dtype is the dtype that the model has: call model.to(param_dtype) before sharding, shards are "
                "float32 all the same (main_params_dtype). Its reduce_dtype is grad_comm_dtype. Casts of inputs, outputs and "
                "buffers belong into the model's forward."
            )
        raise TypeError(f"{argument} takes an mfsdp_compile.MixedPrecisionPolicy, got a {kind}. {hint}")


class Scaling(str, Enum):
    """How gradients are combined over data-parallel ranks."""

    SUM_THEN_SCALE = "sum, then scale"
    AVERAGE_IN_COLLECTIVE = "average in the collective"
    SUM = "sum"


@dataclass(frozen=True)
class GradientPolicy:
    """Options for gradients.

    Args:
        scaling: How gradients are combined over data-parallel ranks: one of two ways to compute their mean, or their
            sum.
        decoupled: Whether gradients go to ``parameter.decoupled_grad``.
        report_nan: Whether to look for NaN in gradients before they are reduced.
        keeps_memory: Whether gradients stay at one address; see :class:`~.bucket.BucketPlan`.
    """

    scaling: Scaling = Scaling.SUM_THEN_SCALE
    decoupled: bool = False
    report_nan: bool = False
    keeps_memory: bool = False
