"""torchao's weights of 4 bits, and everything in them that sharding has to know.

Tested with torchao 0.18. Nothing here imports it: a model with such weights has imported it.

``NF4Tensor``
    Wraps packed values, ``quantized_data``, their statistics in two levels, ``quantized_scalers`` (one int8 per block)
    and ``quantization_factor`` (one number per 256 blocks), and two tensors that all blocks share: ``scaler_mean`` and
    the table ``nf4`` of the 16 values that there are. ``linear_nf4`` and ``F.linear`` multiply by it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["Weight", "check_weight", "is_weight", "parts_of", "prepare_layer"]

_MODULE = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"


def _class() -> type:
    return getattr(sys.modules.get(_MODULE), "NF4Tensor", _Nothing)


class _Nothing:
    pass


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor, or the local part of a DTensor, is a weight of 4 bits."""
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, _class())


def check_weight(name: str, param: Tensor) -> None:
    """Raise unless a weight can be sharded.

    Raises:
        NotImplementedError: It is divided over other ranks, or is no dense matrix.
    """
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"Parameter {name!r} is an NF4Tensor inside a DTensor: weights of 4 bits cannot be divided over other "
            "ranks as well. Leave its layer out of tensor parallelism."
        )
    if not param.is_contiguous() or param.storage_offset():
        raise NotImplementedError(
            f"Parameter {name!r} is an NF4Tensor with strides {param.stride()}: it is a view, such as a transposed "
            "weight. Quantize a contiguous weight."
        )


@dataclass(frozen=True)
class Weight:
    """A weight without its memory.

    Tensors of a weight are ``quantized_data``, ``quantized_scalers``, ``quantization_factor``; then, on every rank,
    ``nf4`` and ``scaler_mean``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block_size: int
    n_blocks: int
    scaler_block_size: int

    def wrap(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return an ``NF4Tensor``."""
        data, scalers, factor, table, mean = tensors
        blocks = self.block_size, self.n_blocks, self.scaler_block_size
        return _nf4_tensor(data, scalers, factor, table, mean, self.shape, self.dtype, *blocks)

    connect = wrap


def _nf4_tensor(
    data: Tensor,
    scalers: Tensor,
    factor: Tensor,
    table: Tensor,
    mean: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    block_size: int,
    n_blocks: int,
    scaler_block_size: int,
) -> Tensor:
    nf4: Any = sys.modules[_MODULE]
    stride = torch.empty(shape, device="meta").stride()
    about = nf4.SubclassTensorArgs(torch.Size(shape), stride, 0, dtype, data.device, False)
    tensor = nf4.NF4Tensor(about, block_size, n_blocks, scaler_block_size, scalers, factor, mean, data, table)
    tensor._is_param = True  # isinstance(module.weight, nn.Parameter) holds for ordinary weights too
    return tensor  # type: ignore[no-any-return]


def parts_of(param: Any) -> tuple[Weight, dict[str, Tensor], dict[str, Tensor], int]:
    """Take a weight apart; see :func:`.bitsandbytes.parts_of`."""
    torch.compiler.allow_in_graph(_nf4_tensor)  # here, because it imports Dynamo, which torchao has imported
    weight = Weight(tuple(param.shape), param.dtype, param.block_size, param.n_blocks, param.scaler_block_size)
    parts = {
        "": param.quantized_data,
        "quantized_scalers": param.quantized_scalers,
        "quantization_factor": param.quantization_factor,
    }
    return weight, parts, {"nf4": param.nf4, "scaler_mean": param.scaler_mean}, param.block_size // 2


def prepare_layer(module: nn.Module) -> dict[str, Any]:
    """Return {}: layers keep nothing of their weights."""
    return {}
