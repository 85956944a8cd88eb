"""What a trace of an optimizer's step holds as constants: settings, attributes, and what its code reads by name."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ...optim.kinds import is_constant, is_of_torch, is_plain

CHANGING = frozenset({"params", "param_names", "lr"})
"""What a parameter group has besides the settings that a trace holds as constants."""
OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr"})
"""What schedulers keep in a parameter group: tensors if the learning rate is one. torch's optimizers do not read it."""
OF_ALL = frozenset({"defaults", "state", "param_groups", "_opt_called"})
"""Attributes of all optimizers, which are looked at elsewhere, or by schedulers only."""
_KNOWN = sys.stdlib_module_names | {"torch", "typing_extensions"}
"""Libraries whose functions and modules do not change."""


class CannotCompile(Exception):
    """A step cannot be compiled; says why."""


def settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings of a group that a trace holds as constants, sorted by name."""
    return sorted(
        (name, value)
        for name, value in group.items()
        if name not in CHANGING and not (name in OF_SCHEDULERS and isinstance(value, Tensor))
    )


def plain_settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the same.

    Raises:
        CannotCompile: One of them is an object, which may change unseen.
    """
    found = settings(group)
    for name, value in found:
        if not is_plain(value):
            raise CannotCompile(f"its setting {name!r} is a {type(value).__name__}")
    return found


def plain_attributes(optimizer: Any) -> list[tuple[str, Any]]:
    """Return what an optimizer's step may read besides groups and state: attributes of the optimizer and its classes,
    functions, and variables that these read by name.

    Raises:
        CannotCompile: Something of this is an object, which may change unseen.
    """
    if is_of_torch(optimizer):
        return []
    found: list[tuple[str, Any]] = [("defaults", plain_settings(optimizer.defaults))]
    methods: dict[str, list[FunctionType]] = {}
    kinds = [kind for kind in type(optimizer).__mro__ if kind not in (torch.optim.Optimizer, object)]
    for kind in kinds:
        for name, value in vars(kind).items():
            function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            what = f"{kind.__name__}.{name}"
            if name in ("__getattr__", "__getattribute__"):
                raise CannotCompile(f"its class computes attributes ({what})")
            if isinstance(function, FunctionType):
                found.append((what, repr(function)))  # which one it is
                methods.setdefault(name, []).append(function)
            elif is_constant(value):
                found.append((what, value))
            elif not (name.startswith("__") and name.endswith("__")):
                raise CannotCompile(f"its attribute {what!r} is a {type(value).__name__}")
    for name, value in vars(optimizer).items():
        replaces_method = hasattr(torch.optim.Optimizer, name)
        if name in OF_ALL or replaces_method or name.endswith("_hooks") or "mfsdp" in name:
            continue
        if not is_plain(value):
            raise CannotCompile(f"its attribute {name!r} is a {type(value).__name__}")
        found.append((name, value))
    return found + _variables(methods)


def _variables(methods: Mapping[str, Sequence[FunctionType]]) -> list[tuple[str, Any]]:
    """Return what ``step``, and what it calls, read of their modules and of enclosing functions."""
    found: list[tuple[str, Any]] = []
    todo = [*methods.get("step", ())]
    seen = set(todo)
    while todo:
        function = todo.pop()
        called = [method for name in _names(function.__code__)[0] for method in methods.get(name, ())]
        called += filter(None, [getattr(function, "__wrapped__", None)])  # torch puts hooks around step
        todo += [method for method in called if method not in seen]
        seen |= set(called)
        if str(function.__globals__.get("__name__")).split(".")[0] in _KNOWN:
            continue
        for name, value in _read_by(function):
            if isinstance(value, FunctionType):
                found.append((f"{function.__name__}.{name}", repr(value)))
                if value not in seen:
                    seen.add(value)
                    todo.append(value)
            elif is_constant(value):
                found.append((f"{function.__name__}.{name}", value))
            elif not _is_of_library(value):
                raise CannotCompile(
                    f"{function.__name__}() reads an object by name, {name!r}, a {type(value).__name__}"
                )
    return found


def _read_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names, changed = _names(function.__code__)
    if changed:
        raise CannotCompile(f"{function.__name__}() changes the variable {changed!r}")
    for name in names:
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__":  # of super(), one of the optimizer's classes
            yield name, cell.cell_contents
    yield from ((f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()


@functools.cache
def _names(code: CodeType) -> tuple[tuple[str, ...], str]:
    """Return the names that code may read of its module, and a variable outside of it that it changes; "": none."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    stores = [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
        or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars)
    ]
    names = [*code.co_names, *(name for found, _ in inner for name in found)]
    return tuple(names), next(iter([*stores, *filter(None, (changed for _, changed in inner))]), "")


def _is_of_library(value: Any) -> bool:
    kind = value if isinstance(value, (type, ModuleType)) else type(value)
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    return name.split(".")[0] in _KNOWN and not isinstance(value, (list, dict, set, Tensor))
