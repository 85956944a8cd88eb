"""Classes of modules whose model is not sharded yet: the first use of a parameter shards it."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from mfsdp_compile.runtime.eager.modules import is_sharded

from .request import REQUEST

pending: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = weakref.WeakKeyDictionary()
"""Modules that ``fully_shard`` was called on and that are not sharded yet, each with the function that shards it."""


class Generated:
    """Base of what is mixed into the classes of modules."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make ``type(module)(...)`` return a module of the class that the user wrote."""
        return _written(cls)(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep generated classes from subclass hooks of the user's classes, such as registries."""


class Pending(Generated):
    """A module of a model that is not sharded yet. Any use of its parameters shards the model."""

    @property
    def __call__(self) -> Callable[..., Any]:
        return sharded(self).__call__

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        """What all walks of parameters read, also those of a module around that ``fully_shard`` was not called on."""
        return vars(sharded(self))["_parameters"]

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_parameters"]:
            return getattr(sharded(self), name)
        return super().__getattr__(name)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return sharded(self)._load_from_state_dict(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        sharded(self).register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        sharded(self).__delattr__(name)

    def apply(self, fn: Callable[[nn.Module], None]) -> nn.Module:
        return sharded(self).apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Change dtypes while parameters are whole; then shard, and do the rest to shards."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        for module in self.modules() if recurse else [self]:  # type: ignore[attr-defined]
            params = [param for param in vars(module)["_parameters"].values() if param is not None]
            if not is_sharded(module) and any(
                cast(torch.empty(0, dtype=param.dtype)).dtype != param.dtype for param in params
            ):
                with _as_written(module):
                    nn.Module._apply(module, cast, recurse=False)
        return sharded(self)._apply(fn, recurse)

    def __repr__(self) -> str:
        """Describe the module without sharding the model: one rank alone may print it."""
        with _as_written(cast(nn.Module, self)):
            return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(sharded(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return sharded(self).__reduce_ex__(protocol)


@functools.cache
def _class_of(cls: type[nn.Module], is_pending: bool, mixin: type | None) -> type[nn.Module]:
    bases: list[type] = [*([Pending] if is_pending else []), *([mixin] if mixin is not None else []), cls]
    name, where = (each if mixin is None else f"FSDP{each}" for each in (cls.__name__, cls.__qualname__))
    return type(name, tuple(bases), {"__module__": cls.__module__, "__qualname__": where, "__doc__": cls.__doc__})


def _written(cls: type) -> type[nn.Module]:
    """Return the class that the user wrote, of one that :func:`_class_of` has made."""
    return cls.__mro__[cls.__mro__.index(Generated) + 1]


def set_class(module: nn.Module, is_pending: bool) -> None:
    """Give a module the class of a unit, if it is one, and of a module that waits for its first use."""
    cls, request = type(module), vars(module).get(REQUEST)
    written: Any = _written(cls) if issubclass(cls, Generated) else cls
    mixin = request.mixin if request is not None else None
    module.__class__ = _class_of(written, is_pending, mixin) if is_pending or mixin is not None else written


@contextlib.contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    is_pending = isinstance(module, Pending)
    set_class(module, is_pending=False)
    try:
        yield
    finally:
        set_class(module, is_pending)


def wait(module: nn.Module, shard: Callable[[nn.Module], None]) -> None:
    """Let the first use of a module, or of one inside, shard the model that it belongs to."""
    pending[module] = shard
    for inner in module.modules():
        if inner is module or (vars(inner).get("_parameters") and not is_sharded(inner)):
            set_class(inner, is_pending=True)


def sharded(module: Any) -> Any:
    """Shard the model that a module belongs to, if it is not sharded yet. Return the module."""
    if holders := [holder for holder in pending if any(module is inner for inner in holder.modules())]:
        holder = max(holders, key=lambda holder: sum(1 for _ in holder.modules()))
        pending[holder](holder)
    elif isinstance(module, Pending):  # the model that it belonged to is gone
        set_class(module, is_pending=False)
    return module
