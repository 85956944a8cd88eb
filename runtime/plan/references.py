"""Other references to a model's parameters when it is sharded.

Sharding replaces the parameters that the user built by new ones. Anything that still holds an old one (an optimizer, a
closure, a list) would read values that no longer train, and get no gradient. Three measures prevent that:

    before sharding    references that are visible from the model are refused by name: an attribute that holds a
                       parameter, a buffer, attribute or second parameter over its memory, a gradient that would be lost
    while sharding     hooks of the old parameter move to the new one
    after sharding     the old parameter becomes a :class:`ReplacedParameter`: any use raises an error with its name
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.spectral_norm import SpectralNorm

from .. import compat
from ..geometry.partition import local_part
from ..memory.bucket import is_homeless
from ..memory.tensor import RowShardedTensor


def tie_again(model: nn.Module) -> None:
    """Put sharded parameters in the places of those that they have replaced when a part of the model was sharded
    alone."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if isinstance(param, ReplacedParameter) and is_homeless(successor := vars(param)[_SUCCESSOR]()):
                module._parameters[name] = successor


# -- before sharding --------------------------------------------------------------------------------------------------


def check_not_replaced(model: nn.Module) -> None:
    """Raise ValueError if a parameter now belongs to another sharded model. Call this before parameters are read."""
    for name, param in model.named_parameters():
        if isinstance(param, ReplacedParameter):
            raise ValueError(
                f"Parameter {name!r} is parameter {vars(param)[_NAME]!r} of another model, which fully_shard_model has "
                "sharded: two sharded models cannot share a parameter. Shard them as one model, or give each its own."
            )


def check_references(model: nn.Module) -> None:
    """Raise ValueError if the model itself refers to a parameter in a way that sharding would break."""
    _check_attributes(model)
    _check_memory(model)
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise ValueError(
                f"Parameter {name!r} has a gradient from this rank only, which sharding would lose. Use it, and call "
                "model.zero_grad(), before fully_shard_model."
            )
        for hook in (param._backward_hooks or {}).values():  # type: ignore[attr-defined]
            if getattr(hook, "__module__", None) == "torch.autograd.graph":
                raise ValueError(
                    f"Parameter {name!r} has a hook of torch.autograd.graph.register_multi_grad_hook, which waits for "
                    "the unsharded parameter. Register it after fully_shard_model, with the parameters of then."
                )


def _check_attributes(model: nn.Module) -> None:
    ids = {id(param) for param in model.parameters()}
    for name, module, attribute, value in _attributes(model):
        if id(value) in ids:
            raise ValueError(
                f"Module {name or 'model'!r} ({type(module).__name__}) holds a parameter in its attribute "
                f"{attribute!r}, outside its registered parameters. After sharding, that reference would be the old, "
                "unsharded tensor. Make it a property that reads the registered parameter."
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield tensors in plain attributes of modules, or in containers in such attributes."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_modules", "_buffers"):
                continue
            if attribute == "_flat_weights" and isinstance(module, nn.RNNBase):
                continue
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            )
            for each in values:
                if isinstance(each, Tensor):
                    yield name, module, attribute, each


@dataclass(frozen=True, eq=False)
class _MemoryRange:
    """Memory ``[start, end)`` of a tensor, and the tensor's role in the model."""

    start: int
    end: int
    what: str
    tensor: Tensor
    is_param: bool

    @classmethod
    def of(cls, tensor: Tensor, what: str, is_param: bool = False) -> _MemoryRange | None:
        part = local_part(tensor)
        if type(part) not in (Tensor, nn.Parameter) or part.is_meta or part.layout is not torch.strided:
            return None  # no memory of its own, or hidden
        if not part.numel() or not (start := part.data_ptr()):
            return None
        return cls(start, start + compat.span(part), what, part, is_param)

    @property
    def is_dense(self) -> bool:
        return self.tensor.nbytes == self.end - self.start

    def shares(self, other: _MemoryRange) -> bool:
        """Whether any byte belongs to an element of both. The spans must overlap."""
        if self.is_dense and other.is_dense:
            return True
        first = min(self.start, other.start)
        bytes_of = [span._bytes(first, max(self.end, other.end) - first) for span in (self, other)]
        return bool((bytes_of[0] & bytes_of[1]).any())

    def _bytes(self, first: int, count: int) -> Tensor:
        """Return which of ``count`` bytes from ``first`` belong to elements."""
        size = self.tensor.element_size()
        used = torch.zeros(count, dtype=torch.bool)
        strides = [stride * size for stride in self.tensor.stride()]
        used.as_strided((*self.tensor.shape, size), (*strides, 1), self.start - first).fill_(True)
        return used


def _check_memory(model: nn.Module) -> None:
    spans: list[_MemoryRange | None] = []  # parameters first
    for name, param in model.named_parameters():
        spans.append(_MemoryRange.of(param, f"parameter {name!r}", is_param=True))
    for name, buffer in model.named_buffers():
        spans.append(_MemoryRange.of(buffer, f"buffer {name!r}"))
    for name, module, attribute, value in _attributes(model):
        if not _is_recomputed(module, attribute):
            spans.append(_MemoryRange.of(value, f"attribute {attribute!r} of module {name or 'model'!r}"))
    open_spans: list[_MemoryRange] = []
    for span in sorted(filter(None, spans), key=lambda span: span.start):
        open_spans = [other for other in open_spans if other.end > span.start]
        for other in open_spans:
            if (span.is_param or other.is_param) and span.tensor.device == other.tensor.device and span.shares(other):
                raise ValueError(_shared_memory(*sorted((span, other), key=spans.index)))
        open_spans.append(span)


def _shared_memory(param: _MemoryRange, other: _MemoryRange) -> str:
    if other.is_param:
        return (
            f"The model's {param.what} and {other.what} share memory without being the same nn.Parameter: sharding "
            "would untie them. Assign the same nn.Parameter in both places, or compute one from the other in forward."
        )
    return (
        f"The model's {other.what} is a view of {param.what}: after sharding it would keep today's values. Make it a "
        "property that computes it from the parameter, or clone() it if it is to keep them."
    )


def _is_recomputed(module: nn.Module, attribute: str) -> bool:
    """Whether the attribute is a view that ``torch.nn.utils.spectral_norm`` keeps until the first forward."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, SpectralNorm) and hook.name == attribute for hook in hooks)


# -- while sharding ---------------------------------------------------------------------------------------------------


def move_hooks(original: Tensor, param: RowShardedTensor) -> None:
    """Move hooks on gradients to ``param``. Handles that remove them keep working."""
    param.take_hooks(original._backward_hooks, original._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


# -- after sharding ---------------------------------------------------------------------------------------------------

_NAME = "mfsdp_replaced"
_SUCCESSOR = "mfsdp_successor"

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize"),
    *("requires_grad", "is_leaf", "is_meta", "is_cuda", "is_sparse"),
)
_METHODS = ("size", "dim", "numel", "stride", "element_size", "is_floating_point", "__dir__")
_METADATA = frozenset(
    [getattr(Tensor, name).__get__ for name in _ATTRIBUTES] + [getattr(Tensor, name) for name in _METHODS]
)
"""Functions that may be called on a replaced parameter, because tools that list all tensors call them."""


class ReplacedParameter:
    """A parameter that was sharded and no longer belongs to the model. Any use except reading metadata raises an error.

    :func:`retire` generates subclasses of this class and the parameter's own class.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with compat.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return next(each for each in _tensors([args, kwargs]) if isinstance(each, ReplacedParameter))._refuse()

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"Parameter {vars(self)[_NAME]!r} was sharded: fully_shard_model has replaced it, and this one, from "
            "before, is not trained. Something still holds it: an optimizer, a list or a closure that was made before "
            "sharding. Make it afterwards, from model.parameters(), or read module.<name> at each use; "
            "mfsdp_compile.fully_shard(model, optimizer) takes an optimizer along."
        )

    # Methods of DTensors that do not call __torch_function__.
    to_local = full_tensor = redistribute = _refuse

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep generated classes from subclass hooks of the user's classes."""

    def __repr__(self, **kwargs: Any) -> str:
        return f"ReplacedParameter({vars(self)[_NAME]!r}, shape={tuple(self.shape)})"  # type: ignore[attr-defined]

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        yield from itertools.chain.from_iterable(map(_tensors, tree))
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


@functools.cache
def _replaced_class(cls: type[Tensor]) -> type[Tensor]:
    return type(ReplacedParameter.__name__, (ReplacedParameter, cls), {"__module__": __name__})


def retire(original: Tensor, name: str, successor: Tensor) -> None:
    """Turn ``original``, which ``successor`` has replaced, into a :class:`ReplacedParameter`.

    Its memory is freed, unless something else is a view of it. Reads by C++ code, which no error can stop, return NaN.
    """
    if not compat.transformer_engine.is_weight(original) and compat.is_fake(
        local_part(original)
    ):  # the model is only planned, and planning still asks for shapes
        return
    if compat.transformer_engine.is_weight(original):
        compat.transformer_engine.discard_weight(original)
    elif isinstance(original, DTensor):
        original._local_tensor = _nothing_like(original._local_tensor)
    elif not original.is_meta:
        original.data = _nothing_like(original)
    vars(original)[_NAME] = name
    vars(original)[_SUCCESSOR] = weakref.ref(successor)
    cls: Any = type(original)
    original.__class__ = _replaced_class(cls)


def _nothing_like(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
