"""How a model is sharded: small frozen dataclasses that the flat signature of the public functions is grouped into."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

__all__ = ["MixedPrecisionPolicy", "ShardingStrategy"]


class ShardingStrategy(IntEnum):
    """What is sharded over data-parallel ranks, in the words of ZeRO (https://arxiv.org/abs/1910.02054).

    Each one shards what the one before does, and costs more communication.
    """

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3

    @staticmethod
    def of(value: object, argument: str) -> ShardingStrategy:
        """From a strategy, its number, or its name (``"optim_grads_params"``).

        Raises:
            TypeError: a bool or a float, which compare equal to numbers and are mistakes.
            ValueError: no such strategy.
        """
        if isinstance(value, ShardingStrategy):
            return value
        choices = ", ".join(f"{s.value} or {s.name.lower()!r}" for s in ShardingStrategy)
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"{argument} takes {choices}; got {value!r}, a {type(value).__name__}")
        for strategy in ShardingStrategy:
            if value == strategy.value or value == strategy.name.lower():
                return strategy
        raise ValueError(f"{argument} takes {choices}; got {value!r}")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes parameters and gradients have, besides the dtype that the model computes in.

    Args:
        main_params_dtype: of the sharded parameters, their gradients and the optimizer's state. The default, float32,
            trains a bfloat16 model with float32 weights: each gather casts to bfloat16 first, so that nothing is stored
            twice. None: the model's own dtypes.
        main_grads_dtype: that gradients are accumulated in; None: the parameter's own.
        grad_comm_dtype: that gradients are reduced in; None: the parameter's own.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} takes a floating-point torch.dtype or None, got {dtype!r}")
