"""Transformer Engine's layers, and everything in them that sharding has to know.

Tested with Transformer Engine 2.20, and once with 2.8, 2.10 and 2.14; the attributes below have the same meaning in all. Nothing here imports it: a
model that has one of its layers has imported it.

``tp_size``, ``tp_group``
    Layers mark their parameters ``tensor_model_parallel`` even if they are not divided.
``set_activation_dtype(input)``
    Compares the input's dtype with that of ``named_parameters()``, which are shards here, in the main dtype.
``is_fsdp2``
    Whether backward quantizes the weight again instead of keeping the quantized weight since forward (since 2.15). Also
    switches off the cache of quantized weights between microbatches.
``__fsdp_param__``, ``get_main_grad()``
    A weight with the first has the second, which backward calls for memory to add the weight's gradient to, if the layer
    was built with ``fuse_wgrad_accumulation=True``. It then returns None in place of the gradient. Until then, it holds
    a weak reference to the weight, which must be alive.
``wgrad_store``
    Postpones weight gradients to ``backward_dw()``, with ``delay_wgrad_compute=True``.
``parameters()``, ``op_backward``
    An operation (``transformer_engine.pytorch.ops``, which norms are) passes ``parameters()`` to autograd in forward, and
    reads them again from the module in backward. ``te.ops.Sequential`` keeps those of its first forward.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "check_layer",
    "drop_memory",
    "is_layer",
    "is_operation",
    "is_whole",
    "offer_gradient",
    "overrides",
    "packs_saved_tensors",
    "prepare_layer",
    "withdraw_gradient",
    "writes_gradients",
]


def _base(module: str, name: str) -> type:
    """Return a class of Transformer Engine; a class that nothing is an instance of if that was not imported."""
    return getattr(sys.modules.get(f"transformer_engine.pytorch.{module}"), name, _Nothing)


class _Nothing:
    pass


def is_layer(cls: type) -> bool:
    """Whether a class is a layer: Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, DotProductAttention."""
    return issubclass(cls, _base("module.base", "TransformerEngineBaseModule"))


def is_operation(cls: type) -> bool:
    """Whether modules of a class read their parameters in backward: LayerNorm, RMSNorm, all of ``te.ops``."""
    return issubclass(cls, _base("ops.op", "FusibleOperation"))


def is_whole(module: nn.Module) -> bool:
    """Whether a layer's parameters are whole, whatever they are marked as."""
    return is_layer(type(module)) and getattr(module, "tp_size", None) == 1


def writes_gradients(module: nn.Module) -> bool:
    """Whether a layer writes gradients of its weights to memory that it asks the weights for."""
    return is_layer(type(module)) and getattr(module, "fuse_wgrad_accumulation", False) is True


def prepare_layer(module: nn.Module) -> None:
    """Change the settings of a layer that do not work together when it is sharded."""
    of_norm = issubclass(type(module), _base("module.layernorm_linear", "LayerNormLinear"))
    if of_norm and writes_gradients(module) and hasattr(type(module), "is_fsdp2"):
        # It looks for the memory of the gradient only if it has kept a quantized weight, which costs more than a copy.
        module.fuse_wgrad_accumulation = False  # type: ignore[assignment]
        warnings.warn(
            "fuse_wgrad_accumulation is switched off in LayerNormLinear: with it, Transformer Engine would keep the quantized "
            "weights of all layers from forward to backward. Their gradients are copied into the bucket instead.",
            stacklevel=2,
        )


def check_layer(module: nn.Module, name: str) -> None:
    """Raise if sharding ``module`` would give wrong gradients, or drop something that it was built with.

    Raises:
        NotImplementedError, ValueError: The message says what and why.
    """
    kind = type(module)
    what = f"Module {name!r}, a {kind.__name__} of Transformer Engine,"
    if is_operation(kind) and getattr(module, "_accumulate_into_main_grad", False):
        raise NotImplementedError(
            f"{what} was built with accumulate_into_main_grad=True, which is not implemented for operations. Leave it out, or "
            "use transformer_engine.pytorch.Linear with fuse_wgrad_accumulation=True."
        )
    if issubclass(kind, _base("ops.sequential", "Sequential")) and any(True for _ in module.parameters()):
        raise NotImplementedError(
            f"{what} keeps the parameters of its first forward, which are gathered for that forward only. Use "
            "torch.nn.Sequential, whose operations run one by one."
        )
    if not (is_layer(kind) or is_operation(kind)):
        return
    if getattr(module, "primary_weights_in_fp8", False) or getattr(module, "_with_quantized_weight", False):
        raise NotImplementedError(
            f"{what} was built under quantized_model_init (fp8_model_init): parameters that are only stored in fp8 are not "
            "implemented. Build it without: shards are then float32, and layers quantize the gathered weights."
        )
    if getattr(module, "fsdp_group", None) is not None:
        raise ValueError(
            f"{what} is prepared for torch's FullyShardedDataParallel (prepare_te_modules_for_fsdp), so it would scatter what it "
            "saves for backward over other ranks. Leave that call out."
        )
    if is_delayed(module):
        raise NotImplementedError(
            f"{what} was built with delay_wgrad_compute=True: its weight gradients are computed after backward, when the unit's "
            "gradients have been reduced. Build it without; reductions overlap with backward anyway."
        )
    weights = getattr(module, "weight_names", ())
    if writes_gradients(module) and len(weights) > 1:
        raise NotImplementedError(
            f"{what} was built with fuse_wgrad_accumulation=True, and has its weight in {len(weights)} parameters "
            f"({', '.join(weights)}), which it concatenates. Build it with one parameter (in attention: fuse_qkv_params=True), or "
            "without fuse_wgrad_accumulation."
        )


def is_delayed(module: nn.Module) -> bool:
    """Whether a layer postpones its weight gradients."""
    store: Any = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def overrides(cls: type[nn.Module]) -> dict[str, Any]:
    """Return what the sharded subclass of a layer's or an operation's class overrides."""
    if is_operation(cls):
        return {"parameters": _operands}
    if not is_layer(cls):
        return {}
    set_activation_dtype: Callable[..., None] = cls.set_activation_dtype  # type: ignore[attr-defined]

    def set_dtype(self: Any, input: Tensor) -> None:
        dtypes = {shell.dtype for shell in self._mfsdp_shells.values()}
        if self.allow_different_data_and_param_types or dtypes <= {input.dtype}:
            self.activation_dtype = input.dtype  # the layer's own method compares no further
        elif not torch.is_autocast_enabled():
            names = ", ".join(sorted(str(dtype) for dtype in dtypes))
            raise TypeError(
                f"{type(self).__name__} of Transformer Engine: the input is {input.dtype}, the parameters are {names}. Both must "
                "have one dtype outside of torch.autocast."
            )
        set_activation_dtype(self, input)

    def backward_dw(self: Any) -> None:
        if is_delayed(self):
            raise RuntimeError(
                f"{type(self).__name__} of Transformer Engine: delay_wgrad_compute was enabled after fully_shard_model. Weight "
                "gradients that are computed after backward would not be reduced."
            )

    return {"set_activation_dtype": set_dtype, "backward_dw": backward_dw, "is_fsdp2": True}


def _operands(self: Any, recurse: bool = True) -> Iterator[nn.Parameter]:
    """In forward, yield gathered parameters: autograd would give the shards gradients that nobody reduces."""
    names = self._mfsdp_homes
    if torch.compiler.is_dynamo_compiling() or self._mfsdp_window.runtime.in_forward():
        return iter([getattr(self, name) for name in names])
    return nn.Module.parameters(self, recurse)


# -- gradients that layers write ---------------------------------------------------------------------------------------


def offer_gradient(param: Tensor, place: Callable[[], Tensor]) -> None:
    """Let a layer add the gradient of a gathered weight to what ``place()`` returns."""
    vars(param).update(__fsdp_param__=True, get_main_grad=place)


def withdraw_gradient(param: Tensor) -> None:
    """Drop the layer's reference to the memory that the gradient was added to."""
    vars(param).pop("main_grad", None)


def packs_saved_tensors() -> bool:
    """Whether hooks decide what autograd saves. They are given other tensors with the same memory."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def drop_memory(params: Iterable[Tensor]) -> None:
    """Release the memory of tensors that something still refers to. They keep their shape; their values are undefined."""
    for param in params:
        nothing = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
        torch._C.TensorBase.data.__set__(param, nothing)  # type: ignore[attr-defined]
