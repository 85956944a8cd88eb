"""Transformer Engine's layers, and everything in them that sharding has to know.

Tested with Transformer Engine 2.20, and once with 2.8, 2.10, 2.14 and 2.19; the attributes below have the same meaning
in all. Nothing here imports it: a model that has one of its layers has imported it.

``tp_size``, ``tp_group``
    Layers mark their parameters ``tensor_model_parallel`` even if they are not divided.
``set_activation_dtype(input)``
    Compares the input's dtype with that of ``named_parameters()``, which are shards here, in the main dtype.
``is_fsdp2``
    Whether backward quantizes the weight again instead of keeping the quantized weight since forward (since 2.15). Also
    switches off the cache of quantized weights between microbatches.
``__fsdp_param__``, ``get_main_grad()``
    A weight with the first has the second, which backward calls for memory to add the weight's gradient to, if the
    layer was built with ``fuse_wgrad_accumulation=True``. It then returns None in place of the gradient. Until then, it
    holds a weak reference to the weight, which must be alive.
``wgrad_store``
    Postpones weight gradients to ``backward_dw()``, with ``delay_wgrad_compute=True``.
``parameters()``, ``op_backward``
    An operation (``transformer_engine.pytorch.ops``, which norms are) passes ``parameters()`` to autograd in forward,
    and reads them again from the module in backward. ``te.ops.Sequential`` keeps those of its first forward.
``primary_weights_in_fp8``, ``param_init_meta``, ``quantizers``
    Whether a layer was built under ``quantized_model_init``, and which quantizer a parameter is then quantized with: by
    ``reset_parameters``, which replaces it by a ``QuantizedTensor``. A layer that finds one multiplies with it as it
    is.
``get_high_precision_init_val()``
    A quantized parameter's value before, on the CPU, if ``preserve_high_precision_init_val=True``.
``Float8Tensor(shape=, dtype=, data=, fp8_scale_inv=, fp8_dtype=, quantizer=)``
    A matrix with one scale, of any memory. Since 2.19, it says what is inside (``__tensor_flatten__``), without which
    it cannot be kept out of what autograd saves.
``MXFP8Tensor(shape=, dtype=, rowwise_data=, rowwise_scale_inv=, columnwise_data=, columnwise_scale_inv=, ...)``
    A matrix in two planes, of which one may be None: forward multiplies with the first, backward with the second.
    Scales are padded to multiples of 128 rows and 4 columns, and of 4 rows and 128 columns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "FORMS",
    "MXFP8",
    "backward_takes_rows",
    "check_layer",
    "check_weight",
    "discard_weight",
    "drop_memory",
    "form_of",
    "is_layer",
    "is_operation",
    "is_weight",
    "is_whole",
    "offer_gradient",
    "overrides",
    "own_attributes",
    "packs_saved_tensors",
    "plain",
    "prepare_layer",
    "scales_of",
    "scales_of_powers_of_2",
    "scaling_of",
    "unquantized",
    "withdraw_gradient",
    "writes_gradients",
]

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


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


def prepare_layer(module: nn.Module, forms: Iterable[str]) -> bool:
    """Change the settings of a layer that do not work together when it is sharded.

    Args:
        forms: Forms in which it will get its parameters; see :mod:`..formats.forms`.

    Returns:
        Whether ``fuse_wgrad_accumulation`` was switched off.
    """
    if is_layer(type(module)) and not FORMS.keys() & set(forms):
        module.primary_weights_in_fp8 = False  # type: ignore[assignment]
    of_norm = issubclass(type(module), _base("module.layernorm_linear", "LayerNormLinear"))
    if of_norm and writes_gradients(module) and hasattr(type(module), "is_fsdp2"):
        # It looks for the memory of the gradient only if it has kept a quantized weight, which costs more than a copy.
        module.fuse_wgrad_accumulation = False  # type: ignore[assignment]
        return True
    return False


def check_layer(module: nn.Module, name: str) -> None:
    """Raise if sharding ``module`` would give wrong gradients, or drop something that it was built with.

    Raises:
        NotImplementedError, ValueError: The message says what and why.
    """
    kind = type(module)
    what = f"Module {name!r}, a {kind.__name__} of Transformer Engine,"
    if is_operation(kind) and getattr(module, "_accumulate_into_main_grad", False):
        raise NotImplementedError(
            f"{what} was built with accumulate_into_main_grad=True, which is not implemented for operations. Leave it "
            "out, or use transformer_engine.pytorch.Linear with fuse_wgrad_accumulation=True."
        )
    if issubclass(kind, _base("ops.sequential", "Sequential")) and any(True for _ in module.parameters()):
        raise NotImplementedError(
            f"{what} keeps the parameters of its first forward, which are gathered for that forward only. Use "
            "torch.nn.Sequential, whose operations run one by one."
        )
    if not (is_layer(kind) or is_operation(kind)):
        return
    if getattr(module, "_with_quantized_weight", False):
        raise NotImplementedError(
            f"{what} was built under quantized_model_init (fp8_model_init), which is implemented for layers, not for "
            "operations. Build it without, or use transformer_engine.pytorch.Linear."
        )
    if getattr(module, "primary_weights_in_fp8", False) and getattr(module, "single_grouped_weight", False):
        raise NotImplementedError(
            f"{what} was built under quantized_model_init (fp8_model_init) with single_grouped_weight=True: quantized "
            "weights in one parameter are not implemented. Leave one of the two out."
        )
    if getattr(module, "fsdp_group", None) is not None:
        raise ValueError(
            f"{what} is prepared for torch's FullyShardedDataParallel (prepare_te_modules_for_fsdp), so it would "
            "scatter what it saves for backward over other ranks. Leave that call out."
        )
    if is_delayed(module):
        raise NotImplementedError(
            f"{what} was built with delay_wgrad_compute=True: its weight gradients are computed after backward, when "
            "the unit's gradients have been reduced. Build it without; reductions overlap with backward anyway."
        )
    weights = getattr(module, "weight_names", ())
    if writes_gradients(module) and len(weights) > 1:
        raise NotImplementedError(
            f"{what} was built with fuse_wgrad_accumulation=True, and has its weight in {len(weights)} parameters "
            f"({', '.join(weights)}), which it concatenates. Build it with one parameter (in attention: "
            "fuse_qkv_params=True), or without fuse_wgrad_accumulation."
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
                f"{type(self).__name__} of Transformer Engine: the input is {input.dtype}, the parameters are {names}. "
                "Both must have one dtype outside of torch.autocast."
            )
        set_activation_dtype(self, input)

    def backward_dw(self: Any) -> None:
        if is_delayed(self):
            raise RuntimeError(
                f"{type(self).__name__} of Transformer Engine: delay_wgrad_compute was enabled after "
                "fully_shard_model. Weight gradients that are computed after backward would not be reduced."
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
    """Release the memory of tensors that something still refers to. They keep their shape, with undefined values."""
    for param in params:
        if is_weight(param):
            discard_weight(param)
            continue
        nothing = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)
        torch._C.TensorBase.data.__set__(param, nothing)  # type: ignore[attr-defined]


# -- quantized parameters ----------------------------------------------------------------------------------------------


def _tensor_class(name: str) -> Any:
    """Return a class of tensors; a class that nothing is an instance of if that was not imported."""
    for module in ("quantized_tensor", "tensor.quantized_tensor", "tensor.float8_tensor"):  # the second before 2.9
        if (found := _base(module, name)) is not _Nothing:
            return found
    return _Nothing


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a quantized one of Transformer Engine."""
    return isinstance(tensor, _tensor_class("QuantizedTensor"))


def check_weight(name: str, param: Any) -> None:
    """Raise unless a quantized parameter has a value to make main weights from.

    Raises:
        ValueError: It was not kept, or is not what the parameter was last set to.
    """
    kind = type(param).__name__
    value = getattr(param, "get_high_precision_init_val", lambda: None)()
    if value is None:
        raise ValueError(
            f"Parameter {name!r} is a {kind} of Transformer Engine without its value in high precision: main weights "
            "would begin with the rounding errors of fp8. Build the model under quantized_model_init(..., "
            "preserve_high_precision_init_val=True) (fp8_model_init), and do not call clear_high_precision_init_val()."
        )
    with torch.no_grad():
        now, before = param.dequantize(), value.to(param.device)
        if isinstance(param._quantizer, _base("tensor.float8_tensor", "Float8Quantizer")) or "NVFP4" in kind:
            # The scale may have changed, or rounding be random. Other values differ by more than the coarsest format
            # rounds.
            same = bool((now.float() - before.float()).abs().max() <= before.abs().max().float() / 4)
        else:
            same = torch.equal(param._quantizer.copy()(before).dequantize(), now)
    if not same:
        raise ValueError(
            f"Parameter {name!r}, a {kind} of Transformer Engine, has been changed since its value in high precision "
            "was kept (preserve_high_precision_init_val=True), from which main weights are made: the change would be "
            "lost. Load checkpoints after fully_shard_model, which keeps main weights in float32."
        )


def plain(tensor: Tensor) -> Tensor:
    """Return the value in high precision of a quantized parameter; other tensors as they are."""
    return tensor.get_high_precision_init_val() if is_weight(tensor) else tensor  # type: ignore[attr-defined]


def own_attributes(tensor: Tensor) -> set[str]:
    """Return the attributes of a quantized parameter that belong to the tensor; none for others."""
    if not is_weight(tensor):
        return set()
    kept = {"get_high_precision_init_val", "clear_high_precision_init_val"}
    return {name for name in vars(tensor) if name.startswith("_") or name in kept}


def discard_weight(tensor: Any) -> None:
    """Release the memory of a quantized tensor. ``Float8Tensor`` and ``MXFP8Tensor`` keep their shape."""
    vars(tensor).pop("_high_precision_init_val", None)
    nothing = torch.empty((), dtype=torch.uint8, device=tensor.device).expand(tensor.shape)
    mxfp8: Any = _base("tensor.mxfp8_tensor", "MXFP8Tensor")
    if isinstance(tensor, mxfp8):
        tensor._rowwise_data, tensor._columnwise_data = nothing, None
        tensor._rowwise_scale_inv, tensor._columnwise_scale_inv = nothing, None
        return
    if not isinstance(tensor, _tensor_class("Float8Tensor")):
        tensor.clear()
        return
    tensor._data = nothing
    tensor._transpose, tensor._transpose_invalid = None, True


@contextlib.contextmanager
def unquantized(module: nn.Module) -> Iterator[None]:
    """Context in which ``reset_parameters`` of a layer does not quantize."""
    quantizes = vars(module).get("primary_weights_in_fp8", False)
    if quantizes:
        vars(module)["primary_weights_in_fp8"] = False
    try:
        yield
    finally:
        if quantizes:
            vars(module)["primary_weights_in_fp8"] = True


def form_of(modules: Sequence[nn.Module], attributes: Sequence[str], keeps_transposes: bool) -> str:
    """Return the form in which layers get a parameter, an attribute of each; "" if they get it as an ordinary tensor.

    Scales can be sent with it only if they depend on nothing but the matrix.
    """
    forms = {_form(module, attribute, keeps_transposes) for module, attribute in zip(modules, attributes, strict=True)}
    return forms.pop() if len(forms) == 1 else ""


def _form(module: Any, attribute: str, keeps_transposes: bool) -> str:
    if not is_layer(type(module)) or not getattr(module, "primary_weights_in_fp8", False):
        return ""
    index = module.param_init_meta[attribute].fp8_meta_index
    quantizer: Any = module.quantizers["scaling_fwd"][index] if index is not None else None
    if getattr(getattr(quantizer, "dtype", None), "name", "") != "kFloat8E4M3":
        return ""
    if not hasattr(_tensor_class("Float8Tensor"), "__tensor_flatten__"):
        return ""
    if issubclass(type(quantizer), _base("tensor.mxfp8_tensor", "MXFP8Quantizer")):
        return MXFP8 if all(size % 32 == 0 for size in module._parameters[attribute].shape) else ""
    if not issubclass(type(quantizer), _base("tensor.float8_tensor", "Float8CurrentScalingQuantizer")):
        return ""
    if quantizer.amax_epsilon:
        return ""
    asked = _Wrapper(bool(quantizer.force_pow_2_scales), keeps_transposes)
    return next(form for form, wrapper in FORMS.items() if wrapper == asked)


def scales_of(largest: Tensor) -> Tensor:
    """Return Transformer Engine's scales for these largest absolute values. Values are multiplied by them."""
    scales = (_LARGEST / largest).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((largest == 0) | ~torch.isfinite(largest), torch.ones_like(scales), scales)


def scales_of_powers_of_2(largest: Tensor) -> Tensor:
    """Like :func:`scales_of`, rounded down to powers of 2."""
    mantissa, exponent = torch.frexp(scales_of(largest))
    return torch.ldexp(torch.full_like(mantissa, 0.5), exponent)


@dataclass(frozen=True)
class _Wrapper:
    """Makes a ``Float8Tensor`` of a gathered weight.

    Args:
        powers_of_2: Whether scales are powers of 2.
        transposed: Whether the transposed plane, if the device needs one, is kept from forward to backward.
    """

    powers_of_2: bool
    transposed: bool

    def wrap(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return _float8_tensor(data, scale, dtype, self)

    def connect(self, anchor: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        raise NotImplementedError(
            "Compiled code reads a weight that a layer of Transformer Engine gets in fp8 (quantized_model_init), "
            "outside of that layer. Run that part of the model eagerly (torch.compiler.disable), or build the model "
            "without."
        )

    def retire(self, wrapped: Tensor, outdated: Tensor) -> None:
        wrapped._data = outdated  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _PlaneWrapper:
    """Makes an ``MXFP8Tensor`` of one plane of a gathered weight."""

    def wrap(
        self,
        data: Tensor | None,
        scale: Tensor | None,
        dtype: torch.dtype,
        of_columns: Tensor | None = None,
        scale_of_columns: Tensor | None = None,
    ) -> Tensor:
        inside: dict[str, Tensor | None] = dict.fromkeys(_PLANES)
        if data is not None and scale is not None:
            rows, columns = data.shape
            scales = _padded(scale.view(rows, columns // 32), 128, 4)
            inside |= {"rowwise_data": data.view(torch.uint8), "rowwise_scale_inv": scales}
        if of_columns is not None and scale_of_columns is not None:
            rows, columns = of_columns.shape
            scales = _padded(scale_of_columns.view(rows // 32, columns), 4, 128)
            inside |= {"columnwise_data": of_columns.view(torch.uint8), "columnwise_scale_inv": scales}
        return _mxfp8_tensor(dtype, inside)

    def connect(self, anchor: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        return _Wrapper(False, False).connect(anchor, data, scale)

    def retire(self, wrapped: Tensor, outdated: Tensor) -> None:
        wrapped._rowwise_data = outdated  # type: ignore[attr-defined]
        wrapped._columnwise_data = None  # type: ignore[attr-defined]


_PLANES = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
MXFP8 = "te, mxfp8"
FORMS: Mapping[str, _Wrapper | _PlaneWrapper] = {
    "te": _Wrapper(False, False),
    "te, powers of 2": _Wrapper(True, False),
    "te, transposed": _Wrapper(False, True),
    "te, powers of 2, transposed": _Wrapper(True, True),
    MXFP8: _PlaneWrapper(),
}
"""Forms of parameters that layers have quantized; see :mod:`..formats.forms`."""


def scaling_of(form: str) -> str:
    """Return what shares scales in a form of :data:`FORMS`; see :mod:`..formats.quantize`."""
    return "mxfp8" if form == MXFP8 else "tensorwise"


def backward_takes_rows() -> bool:
    """Whether layers that run now will dequantize the plane of rows in backward, with ``backward_override``."""
    for module in ("quantization", "fp8"):  # since 2.9, and before
        manager: Any = _base(module, "FP8GlobalStateManager")
        if manager is not _Nothing:
            recipe = manager.get_fp8_recipe() if manager.is_fp8_enabled() else None
            return recipe is None or getattr(recipe, "backward_override", None) is not None
    return True


def _padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Pad scales to multiples of these numbers, as kernels read them."""
    below, beside = -scales.shape[0] % rows, -scales.shape[1] % columns
    return torch.nn.functional.pad(scales, (0, beside, 0, below)) if below or beside else scales


def _mxfp8_tensor(dtype: torch.dtype, inside: Mapping[str, Tensor | None]) -> Tensor:
    quantizer: Any = _mxfp8_quantizer()
    data = next(tensor for tensor in inside.values() if tensor is not None)
    tensor = _base("tensor.mxfp8_tensor", "MXFP8Tensor")(
        shape=data.shape,
        dtype=dtype,
        **inside,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
        device=data.device,
    )
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor  # type: ignore[no-any-return]


@functools.cache
def _mxfp8_quantizer() -> Any:
    """Return the quantizer of gathered weights. Layers ask it which planes they have; it quantizes nothing."""
    kind: Any = _base("tensor.mxfp8_tensor", "MXFP8Quantizer")
    return kind(sys.modules["transformer_engine_torch"].DType.kFloat8E4M3, rowwise=True, columnwise=False)


def _float8_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype, wrapper: _Wrapper) -> Tensor:
    quantizer = _quantizer(wrapper)
    tensor = _tensor_class("Float8Tensor")(
        shape=data.shape,
        dtype=dtype,
        data=data.view(torch.uint8),
        fp8_scale_inv=scale.reciprocal().reshape(1),
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
        device=data.device,
    )
    tensor._is_param = True  # isinstance(module.weight, nn.Parameter) holds for ordinary weights too
    return tensor


@functools.cache
def _quantizer(wrapper: _Wrapper) -> Any:
    """Return the quantizer of gathered weights. Layers ask it which planes to make in forward; it quantizes nothing.

    In backward, they make the transposed plane if it is not there and the device needs one, and then drop it.
    """
    kind: Any = _base("tensor.float8_tensor", "Float8CurrentScalingQuantizer")
    dtype = sys.modules["transformer_engine_torch"].DType.kFloat8E4M3
    return kind(dtype, None, rowwise=True, columnwise=wrapper.transposed, force_pow_2_scales=wrapper.powers_of_2)
