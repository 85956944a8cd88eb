"""How a model is sharded: small frozen dataclasses that the flat signature of the public functions is grouped into."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mfsdp_compile.runtime.topology import ShardingStrategy

__all__ = ["MixedPrecisionPolicy", "ShardingStrategy"]


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes parameters and gradients have, besides the dtype that the model computes in.

    Args:
        main_params_dtype: of the sharded parameters and the optimizer's state. The default, float32, trains a bfloat16
            model with float32 weights: each gather casts to bfloat16 first, and where the dtypes agree nothing is stored
            twice. None: the model's own dtypes.
        main_grads_dtype: that gradients are summed in over microbatches; ``parameter.grad`` shows the sum in the
            parameter's dtype. None: ``main_params_dtype``.
        grad_comm_dtype: that gradients are reduced in over ranks; None: ``main_grads_dtype`` if that is given, else the
            dtype that the model computes in.
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
        """The value itself.

        Raises:
            TypeError: it is something else. Policies of torch's FSDP and FSDP2 have other fields.
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
