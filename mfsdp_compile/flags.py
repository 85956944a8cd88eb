"""Checks of arguments that are True or False: anything else could count as true."""

from __future__ import annotations

import reprlib


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} takes True or False, got {reprlib.repr(value)}, a {type(value).__name__}")
