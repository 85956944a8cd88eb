"""Frozen weights that libraries keep in 4 bits: bitsandbytes' ``Params4bit`` and torchao's ``NF4Tensor``.

Such a weight is packed values and statistics of blocks of them. Before a model is planned, each is taken apart ::

    layer.weight   Params4bit [96, 1]          layer.weight           parameter, uint8 [3, 32]   a row per block
      .quant_state.absmax  float32 [3]         layer.weight_absmax    parameter, uint8 [3, 4]
      .quant_state.code    float32 [16]        layer.weight_nf4       buffer, float32 [16]

What grows with the weight is a frozen parameter of bytes: a part of buckets, sharded and gathered as others are.
Nothing casts bytes, whatever the policy, nothing can train them, and they have no main weights. The rest are buffers,
whole on each rank. All of it is in state dicts. Modules with such weights put them together again when code reads them
(:mod:`..eager.modules`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import compat

PACKED = "_mfsdp_packed"
"""Attribute of modules: their packed weights, by attribute."""

PART_OF = "mfsdp_part_of"
"""Attribute of parameters of bytes: the class of the packed weight that they are a part of."""

_LIBRARIES: tuple[Any, ...] = (compat.bitsandbytes, compat.torchao_nf4)


class Weight(Protocol):
    """A library's weight without its memory. Dynamo reads it: it is plain data."""

    def wrap(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the library's tensor around these."""

    def connect(self, tensors: Sequence[Tensor]) -> Tensor:
        """The same. Dynamo traces it."""


@dataclass(frozen=True)
class Part:
    """A tensor of a weight that grows with it.

    Args:
        attribute: Name of the parameter that holds it, as bytes.
        dtype, shape: Those that the library knows.
    """

    attribute: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, held: Tensor) -> Tensor:
        """Return the tensor that the library knows, in the same memory."""
        return held.view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class PackedWeight:
    """How to put a weight together.

    Args:
        weight: The library's weight without its memory.
        parts: Its tensors that are sharded.
        constants: Names of the buffers with its other tensors.
    """

    weight: Weight
    parts: tuple[Part, ...]
    constants: tuple[str, ...]

    def tensors(self, module: nn.Module, held: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors of the weight.

        Args:
            held: Parameters of bytes, whole, in the order of :attr:`parts`.
        """
        parts = [part.of(each) for part, each in zip(self.parts, held, strict=True)]
        return *parts, *(module._buffers[name] for name in self.constants)  # type: ignore[misc]

    def lies_in(self, held: Sequence[Tensor], param: Tensor | None) -> bool:
        """Whether ``param`` is this weight, in the memory of ``held``."""
        library = next((each for each in _LIBRARIES if param is not None and each.is_weight(param)), None)
        if library is None:
            return False
        weight, tensors, _, _ = library.parts_of(param)
        return weight == self.weight and [t.data_ptr() for t in tensors.values()] == [t.data_ptr() for t in held]


def is_packed(param: Tensor) -> bool:
    """Whether a parameter is a weight of 4 bits that a library has packed, so that a cast would destroy it."""
    return any(library.is_weight(param) for library in _LIBRARIES)


def take_apart(model: nn.Module, ignored: Collection[nn.Parameter]) -> Callable[[], None]:
    """Take the packed weights of a model apart, in place.

    Returns:
        A function that undoes it.

    Raises:
        NotImplementedError: A weight cannot be sharded. The model is unchanged.
    """
    found: dict[nn.Parameter, tuple[str, nn.Module, str, Any]] = {}
    for prefix, module in model.named_modules():
        for attribute, param in module._parameters.items():
            library = next((each for each in _LIBRARIES if param is not None and each.is_weight(param)), None)
            if param is None or library is None or param in ignored:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            _check(name, param, found.get(param))
            library.check_weight(name, param)
            found[param] = name, module, attribute, library
    before: dict[nn.Module, tuple[dict[str, Any], ...]] = {}
    forgotten: list[tuple[nn.Module, dict[str, Any]]] = []

    def undo() -> None:
        for module, (params, buffers) in before.items():
            vars(module).pop(PACKED, None)
            for current, earlier in ((module._parameters, params), (module._buffers, buffers)):
                current.clear()
                current.update(earlier)
        for module, had in reversed(forgotten):
            vars(module).update(had)

    try:
        for param, (_, module, attribute, library) in found.items():
            before.setdefault(module, (dict(module._parameters), dict(module._buffers)))
            _take_apart(module, attribute, _kind_of(param), library.parts_of(param))
            forgotten.append((module, library.prepare_layer(module)))
    except BaseException:
        undo()
        raise
    return undo


def _check(name: str, param: nn.Parameter, other: tuple[str, nn.Module, str, Any] | None) -> None:
    kind = _kind_of(param)
    if other is not None:
        raise NotImplementedError(
            f"Parameter {name!r} is also {other[0]!r}: a {kind} that is tied cannot be sharded. Give each module a "
            "weight of its own."
        )
    if param.requires_grad:
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind} that requires grad: weights of 4 bits cannot be trained. Freeze it "
            "(requires_grad_(False)) and train adapters, or use an ordinary parameter."
        )
    if param.is_meta:
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind} on the meta device, and has no initial value that could be computed. "
            "Quantize the weights on a real device before fully_shard_model."
        )


def _kind_of(param: nn.Parameter) -> str:
    return type(param.data if type(param) is nn.Parameter else param).__name__


def _take_apart(
    module: nn.Module, attribute: str, kind: str, taken: tuple[Weight, dict[str, Tensor], dict[str, Tensor], int]
) -> None:
    weight, tensors, constants, block = taken
    names = {part: f"{attribute}_{part}" if part else attribute for part in (*tensors, *constants)}
    for name in names.values():
        if name != attribute and hasattr(module, name):
            raise NotImplementedError(
                f"A {type(module).__name__} has an attribute {name!r}, which is the name that a part of its weight of "
                f"4 bits, {attribute!r}, gets when it is sharded. Rename the attribute."
            )
    parts = []
    for part, tensor in tensors.items():
        name = names[part]
        held = _rows(tensor.detach(), tensor.element_size() if part else block)
        module.register_parameter(name, nn.Parameter(held, requires_grad=False))
        setattr(module._parameters[name], PART_OF, kind)
        parts.append(Part(name, tensor.dtype, tuple(tensor.shape)))
    # Copies: libraries share tables between weights, and loading a checkpoint writes to buffers.
    buffers = {names[part]: tensor.detach().clone() for part, tensor in constants.items()}
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    vars(module).setdefault(PACKED, {})[attribute] = PackedWeight(weight, tuple(parts), tuple(buffers))


def _rows(tensor: Tensor, size: int) -> Tensor:
    """Return the bytes of a tensor in rows of ``size`` bytes, or of single elements if they have no such rows."""
    held = tensor.contiguous().view(-1).view(torch.uint8)
    return held.view(-1, size if held.numel() % size == 0 else tensor.element_size())
