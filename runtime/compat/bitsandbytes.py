"""bitsandbytes' weights of 4 bits, and everything in it that sharding has to know.

Tested with bitsandbytes 0.50. Nothing here imports it: a model with its modules has imported it.

``Params4bit``
    A parameter ``[bytes, 1]`` of packed values, which may pose as one of a float dtype (``bnb_4bit_quant_storage``),
    and its ``quant_state``. ``module`` is the layer that holds it, which keeps the state too.
``QuantState``
    ``absmax``, one number per block of ``blocksize`` values, and ``code``, the 16 values that there are. With nested
    statistics (``bnb_4bit_use_double_quant``), ``absmax`` is uint8, and ``state2`` and ``offset`` say what it stands
    for: ``state2.absmax`` has one number per 256 blocks.
``Linear4bit``
    Multiplies by ``bitsandbytes::gemm_4bit``, and by ``dequantize_4bit`` in backward, which keeps the weight in its
    ``ctx``, where autograd's hooks for saved tensors do not see it. Outside of training, on CPUs with instructions for
    bfloat16, it packs its weight in another way, with ``absmax`` in bfloat16, for good.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dispatch import no_torch_function

__all__ = ["Weight", "check_weight", "forward_of", "is_of_8_bits", "is_weight", "parts_of", "prepare_layer"]


class _Nothing:
    pass


def _class(module: str, name: str) -> Any:
    """Return a class of bitsandbytes; a class that nothing is an instance of if that was not imported."""
    return getattr(sys.modules.get(f"bitsandbytes.{module}"), name, _Nothing)


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of 4 bits, quantized or still to be."""
    return isinstance(tensor, _class("nn.modules", "Params4bit"))


def is_of_8_bits(tensor: Tensor) -> bool:
    """Whether a tensor is a weight of ``Linear8bitLt``, which keeps statistics in attributes."""
    return isinstance(tensor, _class("nn.modules", "Int8Params"))


def check_weight(name: str, param: Any) -> None:
    """Raise unless a weight can be sharded.

    Raises:
        NotImplementedError: It is not quantized yet, is packed for inference, or has statistics of an unknown kind.
    """
    state = param.quant_state
    if state is None or not param.bnb_quantized:
        raise NotImplementedError(
            f"Parameter {name!r} is a Params4bit that is not quantized yet. Move its layer to its device before "
            "fully_shard_model (layer.to(device)), or load the model with "
            "BitsAndBytesConfig(load_in_4bit=True)."
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise NotImplementedError(
            f"Parameter {name!r} was packed for inference on this CPU by a forward of bitsandbytes outside of "
            "training, which has rounded its statistics to bfloat16. Load the model again, and shard it before any "
            "forward, or call model.train() before that."
        )
    nested = state.state2
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit") or (nested is not None and nested.blocksize != 256):
        raise NotImplementedError(
            f"Parameter {name!r} was quantized by another version of bitsandbytes than 0.50, which is supported."
        )
    layer = param.module
    size = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    if None not in size and tuple(state.shape) != size:
        raise NotImplementedError(
            f"Parameter {name!r} was quantized from a weight of shape {tuple(state.shape)}, but its layer multiplies "
            f"by one of {size}. Quantize the weight of the layer itself."
        )


@dataclass(frozen=True)
class Weight:
    """A weight without its memory.

    Tensors of a weight are: packed values, ``absmax``, with nested statistics also those of ``absmax``; then, on every
    rank, ``code``, with nested statistics also their code and the offset.

    Args:
        shape: Shape of what was quantized.
        dtype: Dtype of it.
        blocksize: Number of values that share an ``absmax``.
        quant_type: ``"nf4"`` or ``"fp4"``.
        nested: Whether statistics are quantized too.
        storage: Dtype that packed values pose as.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int
    quant_type: str
    nested: bool
    storage: torch.dtype

    def wrap(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a ``Params4bit``, for code that reads the weight of a layer in eager mode."""
        from bitsandbytes.functional import QuantState  # type: ignore[import-not-found]

        if self.nested:
            packed, absmax, of_absmax, code, code_of_absmax, offset = tensors
            state2 = QuantState(of_absmax, code=code_of_absmax, blocksize=256, dtype=torch.float32)
        else:
            (packed, absmax, code), offset, state2 = tensors, None, None
        about = {"blocksize": self.blocksize, "quant_type": self.quant_type}
        state = QuantState(
            absmax, torch.Size(self.shape), code, dtype=self.dtype, offset=offset, state2=state2, **about
        )
        also = {"compress_statistics": self.nested, "quant_storage": self.storage, "bnb_quantized": True}
        return _params4bit()(packed, quant_state=state, **about, **also)  # type: ignore[no-any-return]

    def connect(self, tensors: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError(
            "Compiled code reads a Params4bit outside of the forward of a bitsandbytes Linear4bit, as DoRA and layers "
            "with a forward of their own do. Apply torch.compiler.disable to the function that reads it."
        )

    def multiply(self, x: Tensor, bias: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
        """Return ``x @ weight.T + bias`` as bitsandbytes computes it."""
        packed, absmax, of_absmax, _, code_of_absmax, offset = self._named(tensors)
        first = absmax if of_absmax is None else of_absmax
        also = {} if of_absmax is None else dict(absmax_8bit=absmax, absmax_code=code_of_absmax, absmax_offset=offset)
        return torch.ops.bitsandbytes.gemm_4bit.default(  # type: ignore[no-any-return]
            x, packed, self.shape, first, self.blocksize, self.quant_type, bias=bias, **also
        )

    def dequantized(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the weight in the dtype that it had when it was quantized, as bitsandbytes' backward takes it."""
        packed, absmax, of_absmax, _, code_of_absmax, offset = self._named(tensors)
        if of_absmax is not None:
            of_block = torch.ops.bitsandbytes.dequantize_blockwise.default
            absmax = of_block(absmax, of_absmax, code_of_absmax, 256, torch.float32) + offset
        dequantize = torch.ops.bitsandbytes.dequantize_4bit.default
        return dequantize(packed, absmax, self.blocksize, self.quant_type, self.shape, self.dtype)  # type: ignore[no-any-return]

    def _named(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        if self.nested:
            return tensors
        packed, absmax, code = tensors
        return packed, absmax, None, code, None, None


@functools.cache
def _params4bit() -> Any:
    """Return a class of gathered weights, which peft recognizes by its name.

    Dynamo would compile the ``__torch_function__`` of ``Params4bit``, which calls itself in what results.
    """
    kind = _class("nn.modules", "Params4bit")
    return type("Params4bit", (kind,), {"__torch_function__": no_torch_function})


def parts_of(param: Any) -> tuple[Weight, dict[str, Tensor], dict[str, Tensor], int]:
    """Take a weight apart.

    Returns:
        The weight without its memory; the tensors that grow with it, by name, packed values first; those that do not;
        and the bytes of packed values that share an ``absmax``.
    """
    state = param.quant_state
    nested = state.state2
    about = tuple(state.shape), state.dtype, state.blocksize, state.quant_type
    weight = Weight(*about, nested=nested is not None, storage=param.dtype)
    parts, constants = {"": param.data, "absmax": state.absmax}, {state.quant_type: state.code}
    if nested is not None:
        parts["nested_absmax"] = nested.absmax
        constants |= {"nested_quant_map": nested.code, "nested_offset": state.offset}
    return weight, parts, constants, state.blocksize // 2


def prepare_layer(module: nn.Module) -> dict[str, Any]:
    """Let a layer forget the statistics of its weight, and not pack this for inference. Return what it had."""
    if not isinstance(module, _class("nn.modules", "Linear4bit")):
        return {}
    state: dict[str, Any] = vars(module)
    changed = {"quant_state": None, "support_avx512bf16_for_cpu": False}
    had = {name: state[name] for name in changed if name in state}
    state.update({name: changed[name] for name in had})
    return had


def forward_of(
    cls: type[nn.Module], read: Callable[[nn.Module], tuple[Any, Sequence[Tensor]]]
) -> Callable[..., Tensor] | None:
    """Return the forward of sharded layers of a class; None for one that has a forward of its own.

    It is that of ``Linear4bit``, except that autograd saves the tensors of the weight, so that they can be gathered
    again for backward, and that Dynamo can trace it.

    Args:
        read: Returns the weight of a layer without its memory, and the tensors of it.
    """
    layer = _class("nn.modules", "Linear4bit")
    if not issubclass(cls, layer) or cls.forward is not layer.forward:
        return None

    def forward(self: Any, x: Tensor) -> Tensor:
        weight, tensors = read(self)
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        dtype = x.dtype
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if not x.numel():
            return F.linear(x, weight.dequantized(tensors).to(x.dtype), bias).to(dtype)
        return _Multiply.apply(x, bias, weight, *tensors).to(dtype)

    return forward


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: Weight, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.weight = weight
        ctx.bias_like = None if bias is None else (bias.dtype, bias.shape)
        return weight.multiply(x, bias, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        of_x = of_bias = None
        tensors = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            of_x = torch.matmul(gradient, ctx.weight.dequantized(tensors).to(gradient.dtype))
        if ctx.needs_input_grad[1]:
            dtype, shape = ctx.bias_like
            of_bias = gradient.sum(0, dtype=dtype).sum_to_size(shape)
        return of_x, of_bias, None, *(None for _ in tensors)
