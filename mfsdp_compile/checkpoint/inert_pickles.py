"""Unpickling into inert records: nothing that a pickle names is imported, called or changed.

It is the Python implementation of pickle, in which each operation can be replaced. The C implementation lets a pickle
set attributes of objects that it names, and allocates memory for the highest index that it mentions.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mfsdp_compile.runtime.untrusted_files import typed, whole

MOST_DIMENSIONS = 64


class InertObject:
    """Stands for an object of a pickle: the name of its class, its constructor arguments, and its state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = {}


def record_of(kind: str) -> Callable[..., InertObject]:
    """Return what stands for a class of this name."""
    return functools.partial(InertObject, kind)


def set_of(items: Any = ()) -> set[Any]:
    return {_as_key(item) for item in items}


def dict_of(items: Any = ()) -> dict[Any, Any]:
    return {_as_key(key): value for key, value in items}


def _as_key(key: Any) -> Any:
    """Check a key of a dictionary or an element of a set. Hashing a million nested tuples would crash the process."""
    if type(key) is tuple and all(type(item) in (int, str) for item in key):
        return key
    if type(key) not in (str, int, bool, float, bytes, InertObject, type(None)):
        raise ValueError(f"a {type(key).__name__} is a dictionary key or in a set")
    return key


def checked_size(numbers: Any) -> torch.Size:
    """Return a shape or an offset, after checking that it is one."""
    if len(typed(numbers, (tuple, list), "a shape")) > MOST_DIMENSIONS:
        raise ValueError(f"a shape has {len(numbers):,} dimensions")
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            whole(number, "a size or an offset")
    return torch.Size(numbers)


_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class InertUnpickler(_Unpickler):  # type: ignore[misc]
    """Builds only records, dictionaries, lists, tuples, sets, numbers and strings.

    ``known`` are the classes and functions that a pickle may name, by module and name, with what stands for each: a
    function that makes it of its arguments, or a dtype of torch. Other dtypes of torch need no entry.
    """

    known: ClassVar[dict[tuple[str, str], Any]] = {}
    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        return self.known[module, name]

    def _of(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"the pickle changes a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _build(self) -> None:
        state = self.stack.pop()
        self._of(InertObject).state = state

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._of(dict)[_as_key(key)] = value

    def _setitems(self) -> None:
        items = self.pop_mark()
        self._of(dict).update(zip(map(_as_key, items[::2]), items[1::2], strict=True))

    def _additems(self) -> None:
        items = self.pop_mark()
        self._of(set).update(map(_as_key, items))

    def _frozenset(self) -> None:
        self.append(set_of(self.pop_mark()))

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append(dict(zip(map(_as_key, items[::2]), items[1::2], strict=True)))

    def _never(self) -> None:
        raise ValueError("it has an opcode that metadata never has")

    dispatch |= {
        pickle.NEWOBJ[0]: _Unpickler.load_reduce,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.ADDITEMS[0]: _additems,
        pickle.FROZENSET[0]: _frozenset,
        pickle.DICT[0]: _dict,
    }
    dispatch |= dict.fromkeys(
        (
            code[0]
            for code in (
                *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4),
                *(pickle.PERSID, pickle.BINPERSID, pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
            )
        ),
        _never,
    )
