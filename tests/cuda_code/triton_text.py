"""Read the source of a Triton kernel that Inductor generated: what it loads, what it stores, whether it computes."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Kernel", "read_kernel"]


@dataclass(frozen=True)
class Kernel:
    """A kernel, without its name.

    Args:
        source: The module that defines it, with the kernel's name replaced: equal kernels have equal sources.
        parameters: Its parameters, in order.
        loads, stores: Number of loads and stores by pointer.
        moves: Whether all that it stores is a constant, or was loaded and at most cast. Looking values up by an index
            that is in memory, as an embedding does, is not moving.
    """

    source: str
    parameters: tuple[str, ...]
    loads: Mapping[str, int]
    stores: Mapping[str, int]
    moves: bool

    @property
    def fills(self) -> bool:
        """Whether it stores constants."""
        return self.moves and not self.loads


@functools.cache
def read_kernel(name: str, source: str) -> Kernel:
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    stored: list[ast.Call] = []
    values: dict[str, list[ast.expr | None]] = {}
    computes = False
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        values.setdefault(part.id, []).append(node.value if part is target else None)
        elif isinstance(node, (ast.AugAssign, ast.For)):
            for part in ast.walk(node.target):
                if isinstance(part, ast.Name):
                    values.setdefault(part.id, []).append(None)
        elif isinstance(node, ast.Call):
            operation = ast.unparse(node.func)
            if operation == "tl.load":
                loads[_pointer(node)] += 1
            elif operation == "tl.store":
                stores[_pointer(node)] += 1
                stored.append(node)
            elif operation.startswith("tl.atomic"):
                loads[_pointer(node)] += 1
                stores[_pointer(node)] += 1
                computes = True
    moves = not computes and all(
        _is_moved(store.args[1], values, ()) and not _is_loaded(store.args[0], values, ()) for store in stored
    )
    parameters = tuple(argument.arg for argument in function.args.args)
    loads, stores = _of_parameters(loads, values), _of_parameters(stores, values)
    assert stores, f"{name} stores nothing:\n{source}"
    assert {*loads, *stores} <= {*parameters}, f"{name} uses pointers that are no parameters"
    return Kernel(source.replace(name, "kernel"), parameters, loads, stores, moves)


def _of_parameters(pointers: Counter[str], values: Mapping[str, list[ast.expr | None]]) -> Counter[str]:
    """Count by parameter. In kernels of several parts, torch 2.15 gives each part's pointers the same names."""
    found: Counter[str] = Counter()
    for name, count in pointers.items():
        named = [value.id for value in values.get(name, ()) if isinstance(value, ast.Name)]
        for parameter in named or [name]:
            found[parameter] += count
    return found


def _pointer(call: ast.Call) -> str:
    """Return the pointer in the address of a load or a store: ``in_ptr0 + (x0)``, ``tl.broadcast_to(in_ptr0, ...)``."""
    parts = (part.id for part in ast.walk(call.args[0]) if isinstance(part, ast.Name))
    names = [part for part in parts if "ptr" in part or part.startswith("foreach_arg")]
    assert len(names) == 1, f"the address of {ast.unparse(call)} has pointers {names}"
    return names[0]


def _is_moved(value: ast.expr | None, values: Mapping[str, list[ast.expr | None]], above: tuple[str, ...]) -> bool:
    """Whether a stored value is a constant or was loaded, and at most cast, selected or given another shape."""
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.operand, ast.Constant)
    if isinstance(value, ast.Subscript):
        return _is_moved(value.value, values, above)
    if isinstance(value, ast.Name):
        found = values.get(value.id)
        if found is None or value.id in above:
            return False
        return all(_is_moved(each, values, (*above, value.id)) for each in found)
    if not isinstance(value, ast.Call):
        return False
    operation = ast.unparse(value.func)
    if operation == "tl.load":
        return not _is_loaded(value.args[0], values, ())
    if operation == "tl.full":
        return True
    if operation == "tl.where":  # a choice by position, as for cat; a choice by value computes
        condition, *given = value.args
        return not _is_loaded(condition, values, ()) and all(_is_moved(each, values, above) for each in given)
    if operation == "tl.broadcast_to":
        return _is_moved(value.args[0], values, above)
    if isinstance(value.func, ast.Attribute) and value.func.attr == "to":
        return _is_moved(value.func.value, values, above)
    return False


def _is_loaded(value: ast.expr, values: Mapping[str, list[ast.expr | None]], above: tuple[str, ...]) -> bool:
    """Whether a value depends on what is in memory."""
    if any(isinstance(part, ast.Call) and ast.unparse(part.func) == "tl.load" for part in ast.walk(value)):
        return True
    names = {part.id for part in ast.walk(value) if isinstance(part, ast.Name)} - {*above}
    return any(
        each is None or _is_loaded(each, values, (*above, *names)) for name in names for each in values.get(name, ())
    )
