"""Casts at the borders of modules: of the tensors that a forward gets, and of those that it returns.

They are FSDP2's, for the same structures. Dynamo traces this code.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Casts:
    """What the forward of a module casts.

    Args:
        inputs: Dtype of floating-point tensors among its arguments. None: they stay as they are.
        outputs: Dtype of floating-point tensors that it returns. None: they stay as they are.
    """

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def __bool__(self) -> bool:
        return self.inputs is not None or self.outputs is not None

    def __str__(self) -> str:
        said = [f"{name} to {dtype}" for name, dtype in (("inputs", self.inputs), ("outputs", self.outputs)) if dtype]
        return ", ".join(said) or "nothing"

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function ``forward`` of a class with its casts."""
        if not self:
            return forward
        casts = self

        @functools.wraps(forward)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _call(casts, functools.partial(forward, self), *args, **kwargs)

        return run

    def around_own(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``forward`` that is set on a module itself with its casts. A copy of the module gets a copy of
        it."""
        return functools.update_wrapper(functools.partial(_call, self, forward), forward)


def _call(casts: Casts, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if casts.inputs is not None:
        args, kwargs = cast_tensors(args, casts.inputs), cast_tensors(kwargs, casts.inputs)
    result = forward(*args, **kwargs)
    return result if casts.outputs is None else cast_tensors(result, casts.outputs)


def cast_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested tuples, lists, dicts, sets and dataclasses to ``dtype``.

    Containers without such tensors are returned as they are, so that a module can write to a list that it was given.
    Others are copied. As in FSDP2, a ``PackedSequence`` and objects of other classes stay as they are.
    """
    if not _is_to_be_cast(value, dtype):
        return value
    if isinstance(value, Tensor):
        return value.to(dtype)
    if dataclasses.is_dataclass(value):
        changes = {each.name: cast_tensors(getattr(value, each.name), dtype) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **changes)  # type: ignore[type-var]
    if isinstance(value, OrderedDict):
        copied = value.__class__()
        for key, item in value.items():
            copied[key] = cast_tensors(item, dtype)
        return copied
    if isinstance(value, dict):
        return {key: cast_tensors(item, dtype) for key, item in value.items()}
    items = [cast_tensors(item, dtype) for item in value]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _is_to_be_cast(value: Any, dtype: torch.dtype) -> bool:
    """Whether a value is a tensor that is cast to ``dtype``, or a container of such tensors."""
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.dtype != dtype
    if isinstance(value, (PackedSequence, type)):
        return False
    if dataclasses.is_dataclass(value):
        return any(_is_to_be_cast(getattr(value, each.name), dtype) for each in dataclasses.fields(value))
    if isinstance(value, dict):
        return any(_is_to_be_cast(item, dtype) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_is_to_be_cast(item, dtype) for item in value)
    return False
