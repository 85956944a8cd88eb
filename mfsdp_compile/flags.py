"""Checks of flags and numbers: anything else could count as true, or mean something else."""

from __future__ import annotations

import enum
import reprlib
import typing
from typing import Any


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} takes True or False, got {reprlib.repr(value)}, a {type(value).__name__}")


def check_whole(name: str, value: object, optional: bool) -> None:
    if isinstance(value, bool) or not (isinstance(value, int) or (optional and value is None)):
        raise TypeError(f"{name} takes a whole number, got {reprlib.repr(value)}, a {type(value).__name__}")


def check_group(name: str, value: Any, kind: type) -> None:
    """Check a group of flags and numbers: a dataclass or a named tuple.

    Raises:
        TypeError: It is something else, or a field has a value of another type than it is annotated with.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} takes a {kind.__name__} (mfsdp_compile.plugins), got {reprlib.repr(value)}")
    for field, annotation in typing.get_type_hints(kind).items():
        given, called = getattr(value, field), f"{name}: {field}"
        allowed = typing.get_args(annotation) or (annotation,)
        if bool in allowed:
            check_flag(called, given)
        elif int in allowed:
            check_whole(called, given, type(None) in allowed)
        elif issubclass(allowed[0], enum.Enum) and not isinstance(given, allowed[0]):
            names = ", ".join(str(each) for each in allowed[0])
            raise TypeError(f"{called} takes one of {names}, got {reprlib.repr(given)}")
