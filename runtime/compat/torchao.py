"""torchao's float8 training, and everything in it that sharding has to know.

Tested with torchao 0.18. Nothing here imports it: a model with its modules has imported it.

``WeightWithDynamicFloat8CastTensor``
    What ``convert_to_float8_training`` makes of the weights if the config has ``enable_fsdp_float8_all_gather=True``: a
    tensor around the ordinary one, ``_tensor``, with what FSDP2 needs to gather it in float8: ``_dtype``, and
    ``_linear_mm_config`` for the result. Main weights are the ordinary tensors.
``Float8Linear.config.round_scales_to_power_of_2``
    Whether it quantizes the weights that it gets with powers of two as scales.
``Float8TrainingTensor(data, scale, orig_dtype, linear_mm_config, gemm_input_role)``
    What ``Float8Linear`` multiplies with as it is. Values are ``data / scale``: torchao's scales are the reciprocals of
    ours.
``precompute_float8_dynamic_scale_for_fsdp``
    Looks for DTensors whose local tensors are ``WeightWithDynamicFloat8CastTensor``, and finds none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "FORM",
    "OWN_ATTRIBUTES",
    "check_weight",
    "is_weight",
    "plain",
    "refusal",
    "rounds_scales",
    "scales_of",
    "wrapper_of",
]

FORM = "torchao"
"""The form of parameters that ``enable_fsdp_float8_all_gather=True`` asks for; see :mod:`..formats.forms`."""

OWN_ATTRIBUTES = frozenset({"_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale"})
"""Attributes of a ``WeightWithDynamicFloat8CastTensor`` that belong to it, and not to the parameter."""

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max
_SMALLEST_AMAX = 1e-12  # torchao.float8.float8_utils.EPS


class _Nothing:
    pass


def _class(module: str, name: str) -> type:
    """Return a class of torchao; a class that nothing is an instance of if that was not imported."""
    return getattr(sys.modules.get(f"torchao.float8.{module}"), name, _Nothing)


def _weight_class() -> type:
    return _class("fsdp_utils", "WeightWithDynamicFloat8CastTensor")


def rounds_scales(module: nn.Module) -> bool:
    """Whether a module quantizes its weight with powers of two as scales."""
    config: Any = getattr(module, "config", None)
    return isinstance(module, _class("float8_linear", "Float8Linear")) and config.round_scales_to_power_of_2


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor, or the local part of a DTensor, is to be gathered in float8 because torchao was asked to."""
    return isinstance(getattr(tensor, "_local_tensor", tensor), _weight_class())


def plain(tensor: Tensor) -> Tensor:
    """Return the ordinary tensor in one that torchao has wrapped; others as they are."""
    return tensor._tensor if isinstance(tensor, _weight_class()) else tensor  # type: ignore[attr-defined]


def check_weight(name: str, tensor: Tensor) -> None:
    """Raise unless a wrapped weight can be gathered as torchao would.

    Raises:
        NotImplementedError: Its float8 dtype is another one, or this version of torchao keeps other attributes.
    """
    weight: Any = getattr(tensor, "_local_tensor", tensor)
    if missing := sorted(OWN_ATTRIBUTES - vars(weight).keys()):
        raise NotImplementedError(
            f"Parameter {name!r} is a {type(weight).__name__} without {', '.join(missing)}: this version of torchao is "
            "not supported. Use torchao 0.18, or Float8LinearConfig(enable_fsdp_float8_all_gather=False)."
        )
    if weight._dtype != _DTYPE:
        raise NotImplementedError(
            f"Parameter {name!r} is to be gathered in {weight._dtype}, by enable_fsdp_float8_all_gather=True and "
            f"cast_config_weight; only {_DTYPE} is implemented. Take one of them out."
        )


def refusal(kind: type) -> str:
    """Return what to do instead of sharding a parameter of this class of torchao; "" for other classes."""
    if not kind.__module__.startswith("torchao."):
        return ""
    instead = _INSTEAD.get(kind.__name__, "Use ordinary parameters, which its layers quantize as they compute")
    return f" torchao has put it there. {instead}."


_INSTEAD = {
    "MXFP8TrainingWeightWrapperTensor": "Use torchao.prototype.moe_training.mxfp8_linear.MXFP8Linear",
    "Int8QuantizedTrainingLinearWeight": (
        "It has no main weights, only int8, which are rounded at random. Use "
        "int8_mixed_precision_training(module_swap=True)"
    ),
}


def scales_of(largest: Tensor) -> Tensor:
    """Return torchao's scales for these largest absolute values, to the bit. Values are multiplied by them."""
    return (_LARGEST / largest.double().clamp(min=_SMALLEST_AMAX)).float()


@dataclass(frozen=True)
class _Wrapper:
    """Makes a ``Float8TrainingTensor`` of a gathered weight.

    Args:
        config: The ``LinearMMConfig`` of its linear layer.
    """

    config: Any

    def wrap(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return _training_tensor(data, scale, dtype, self.config)

    def connect(self, anchor: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        return _Connect.apply(anchor, data, scale, self.config)

    def retire(self, wrapped: Tensor, outdated: Tensor) -> None:
        wrapped._data = outdated  # type: ignore[attr-defined]


def wrapper_of(original: nn.Parameter, modules: Sequence[nn.Module]) -> _Wrapper:
    """Return what makes the tensors that ``modules`` get for a weight."""
    weight: Any = getattr(original, "_local_tensor", original)
    torch.compiler.allow_in_graph(_Connect)  # here, because it imports Dynamo, which torchao has imported
    return _Wrapper(weight._linear_mm_config)


def _training_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype, config: Any) -> Tensor:
    from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

    tensor = Float8TrainingTensor(data, scale.reshape(()), dtype, config, GemmInputRole.WEIGHT)
    tensor._is_param = True  # isinstance(module.weight, nn.Parameter) holds for ordinary weights too
    return tensor


class _Connect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, data: Tensor, scale: Tensor, config: Any) -> Tensor:
        return _training_tensor(data, scale, anchor.dtype, config)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return gradient, None, None, None
