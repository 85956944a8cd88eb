"""Read the source of a Triton kernel that Inductor generated: what it loads, what it stores, whether it computes."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel, without its name.

    Args:
        source: The module that defines it, with the kernel's name replaced: equal kernels have equal sources.
        parameters: Its parameters, in order.
        loads, stores: Elements that loads and stores touch, by pointer, and :data:`ALL` where the code does not say.
            An element counts once for each load.
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


ALL = 1 << 62
_INDEX = re.compile(r"(x|y|z|r\d_)index")


@functools.cache
def read_kernel(name: str, source: str) -> Kernel:
    function = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    loads: list[ast.Call] = []
    stores: list[ast.Call] = []
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
                loads.append(node)
            elif operation == "tl.store":
                stores.append(node)
                stored.append(node)
            elif operation.startswith("tl.atomic"):
                loads.append(node)
                stores.append(node)
                computes = True
    moves = not computes and all(
        _is_moved(store.args[1], values, ()) and not _is_loaded(store.args[0], values, ()) for store in stored
    )
    parameters = tuple(argument.arg for argument in function.args.args)
    loaded, written = _by_parameter(loads, values), _by_parameter(stores, values)
    assert written, f"{name} stores nothing:\n{source}"
    assert {*loaded, *written} <= {*parameters}, f"{name} uses pointers that are no parameters"
    return Kernel(source.replace(name, "kernel"), parameters, loaded, written, moves)


def _by_parameter(accesses: list[ast.Call], values: Mapping[str, list[ast.expr | None]]) -> Counter[str]:
    """Count elements by parameter. In kernels of several parts, torch 2.15 repeats the names of pointers."""
    found: Counter[str] = Counter()
    for access in accesses:
        pointer = _pointer(access)
        named = [value.id for value in values.get(pointer, ()) if isinstance(value, ast.Name)]
        for parameter in named or [pointer]:
            found[parameter] += _elements(access.args[0], values)
    return found


def _elements(address: ast.expr, values: Mapping[str, list[ast.expr | None]]) -> int:
    """Return how many elements an address has over all programs: a bias that all rows add is as long as a row."""
    count = 1
    for name in {part.id for part in ast.walk(address) if isinstance(part, ast.Name)} - {"tl"}:
        if "ptr" in name or name.startswith("foreach_arg") or name.isupper():  # the pointer, and sizes of blocks
            continue
        lengths = {_length(value, values) for value in values.get(name, [None])}
        count *= lengths.pop() if len(lengths) == 1 else ALL
    return min(count, ALL)


def _length(value: ast.expr | None, values: Mapping[str, list[ast.expr | None]]) -> int:
    """Return how many values an index has, such as ``xindex``, ``xindex // 32``, ``((xindex // 32) % 8)``."""
    if isinstance(value, ast.Name) and (found := _INDEX.fullmatch(value.id)):
        (size,) = values.get(f"{found[1]}numel", [None])[:1]
        return size.value if isinstance(size, ast.Constant) and isinstance(size.value, int) else ALL
    if isinstance(value, ast.BinOp) and isinstance(value.right, ast.Constant) and isinstance(value.right.value, int):
        if isinstance(value.op, ast.Mod):
            return value.right.value
        if isinstance(value.op, ast.FloorDiv):
            whole = _length(value.left, values)
            return whole if whole == ALL else -(-whole // value.right.value)
    return ALL


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
