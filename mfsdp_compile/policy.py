"""Frozen dataclasses that say how a model is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_compile.runtime.topology import ShardingStrategy

__all__ = ["MixedPrecisionPolicy", "ShardingStrategy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of shards and gradients. The model itself computes in the dtype that it was built with.

    Args:
        main_params_dtype: Dtype of the sharded parameters and the optimizer state. The default, float32, trains a
            bfloat16 model with float32 weights: each gather casts to bfloat16 first. If the dtypes are the same,
            nothing is stored twice. None: the model's own dtypes.
        main_grads_dtype: Dtype in which gradients are summed over microbatches. ``parameter.grad`` shows the sum in the
            parameter's dtype. None: ``main_params_dtype``.
        grad_comm_dtype: Dtype in which gradients are reduced over ranks. None: ``main_grads_dtype`` if that is given,
            otherwise the dtype that the model computes in.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} takes a floating-point torch.dtype or None, got {dtype!r}")

    @staticmethod
    def of(value: object, argument: str) -> MixedPrecisionPolicy:
        """Return ``value`` if it is a policy.

        Raises:
            TypeError: If it is anything else. The policies of torch's FSDP and FSDP2 have other fields.
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
        raise TypeError(f"{argument} takes a mfsdp_compile.MixedPrecisionPolicy, got a {kind}. {hint}")
