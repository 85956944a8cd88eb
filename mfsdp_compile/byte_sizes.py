"""Sizes that users give as text."""

from __future__ import annotations

import re
from typing import Any

_UNITS = {
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}


def parse_bytes(value: Any, where: str) -> int:
    """Return a number of bytes, given as a number or as text such as ``"70GiB"`` or ``"1.5 GB"``. Text has a unit.

    Raises:
        TypeError, ValueError: If ``value`` is neither; the message begins with ``where``.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise TypeError(f"{where} takes bytes, as a number or as text such as '70GiB', got {value!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match is not None and not match[2]:
        raise ValueError(f"{where} needs a unit: is {match[1]}GiB meant, {match[1]}MiB, or {match[1]}B?")
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{where} takes bytes, as a number or as text such as '70GiB', got {value!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])
