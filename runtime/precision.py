"""Options that decide dtypes, and how gradients are combined."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["GradientPolicy", "Precision", "Scaling"]


@dataclass(frozen=True)
class Precision:
    """Dtypes besides the one that the model computes in.

    Args:
        main_params_dtype: Dtype of shards and optimizer state. None: each parameter's own dtype.
        main_grads_dtype: Dtype in which gradients are accumulated. None: dtype of the shards.
        grad_comm_dtype: Dtype in which gradients are reduced. None: ``main_grads_dtype`` if given, else the parameter's
            own dtype.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def main_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if self.main_params_dtype is None or not compute_dtype.is_floating_point:
            return compute_dtype
        return self.main_params_dtype

    def grad_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        return self.main_grads_dtype or self.main_dtype(compute_dtype)

    def comm_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        return self.grad_comm_dtype or self.main_grads_dtype or compute_dtype


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
    """

    scaling: Scaling = Scaling.SUM_THEN_SCALE
    decoupled: bool = False
    report_nan: bool = False
