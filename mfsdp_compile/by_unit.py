"""Arguments that may differ by unit: one value, or a mapping from modules or their classes to values."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from mfsdp_compile.runtime.plan.units import Unit


def by_module(name: str, given: Any, module: nn.Module) -> dict[type[nn.Module] | nn.Module, Any]:
    """Return the values of an argument that may be a mapping from modules or their classes, with its keys checked."""
    values = dict(given) if isinstance(given, Mapping) else {nn.Module: given}
    inside = set(module.modules())
    for key in values:
        if not (isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))):
            raise TypeError(f"{name} has the key {reprlib.repr(key)}, which is no module or class of modules")
        if isinstance(key, nn.Module) and key not in inside:
            raise ValueError(f"{name} has a {type(key).__name__} as a key that is not part of the model")
    return values


def of_unit(values: Mapping[type[nn.Module] | nn.Module, Any]) -> Callable[[Unit], Any]:
    """Return the function that finds a unit's value: of its module, its class, or a base of that."""

    def of_unit(unit: Unit) -> Any:
        found = [values[key] for key in (*unit.modules, *map(type, unit.modules)) if key in values]
        found += [value for key, value in values.items() if isinstance(key, type) and isinstance(unit.modules[0], key)]
        return found[0] if found else None

    return of_unit
