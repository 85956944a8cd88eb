"""Options that decide dtypes, and how gradients are combined."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

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

    Raises:
        ValueError: A field is neither None nor a floating-point dtype.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} takes a floating-point torch.dtype or None, got {dtype!r}")

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
        hint = "It has main_params_dtype (of shards), main_grads_dtype (of sums over microbatches) and grad_comm_dtype."
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
