"""Numbers as text. All forms of a report use these functions, so that they show the same values.

The script of a report's HTML form rounds with the same tables: it receives :data:`SECONDS` and :data:`BYTES`.
"""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import NamedTuple


class Step(NamedTuple):
    """A unit, and the numbers that use it.

    Args:
        start: Smallest number that uses this unit. Slightly less than one unit, so that nothing is rounded up to
            "1000.0 ms".
        size: Size of the unit.
        digits: Number of decimal places.
        name: Name of the unit.
    """

    start: float
    size: float
    digits: int
    name: str


class Scale(NamedTuple):
    """Text format of a quantity.

    Args:
        least: Smaller numbers are written as ``nothing``.
        nothing: Text for such numbers.
        steps: Units, largest first. The last one starts at 0.
    """

    least: float
    nothing: str
    steps: tuple[Step, ...]

    def text(self, value: float) -> str:
        if value < self.least:
            return self.nothing
        step = next(step for step in self.steps if value >= step.start)
        return f"{_rounded(value / step.size, step.digits)} {step.name}"


SECONDS = Scale(
    5e-8,
    "0 s",
    (
        Step(0.99995, 1.0, 3, "s"),
        Step(0.099995, 1e-3, 1, "ms"),
        Step(0.99995e-4, 1e-3, 2, "ms"),
        Step(0.0, 1e-6, 1, "us"),
    ),
)
BYTES = Scale(
    0.5,
    "0 B",
    (
        Step(0.999995 * 2**30, 2.0**30, 2, "GiB"),
        Step(0.999995 * 2**20, 2.0**20, 2, "MiB"),
        Step(0.999995 * 2**10, 2.0**10, 2, "KiB"),
        Step(0.0, 1.0, 0, "B"),
    ),
)
_FLOPS = Scale(
    0.5,
    "0 FLOP",
    (
        *(Step(0.999995 * size, size, 2, name) for size, name in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"))),
        Step(0.0, 1e6, 2, "MFLOP"),
    ),
)


def seconds_text(seconds: float) -> str:
    """Return text such as ``"412.3 ms"``, ``"1.90 ms"`` or ``"12.0 us"``."""
    return SECONDS.text(seconds)


def bytes_text(size: float) -> str:
    """Return text such as ``"14.81 GiB"`` or ``"512 B"``."""
    return BYTES.text(size)


def flops_text(flops: float) -> str:
    """Return text for floating-point operations, such as ``"38.20 TFLOP"``."""
    return _FLOPS.text(flops)


def percent_text(part: float, whole: float) -> str:
    """Return text such as ``"12.3%"``, with two decimal places below 1%."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.005:
        return "<0.01%"
    return f"{_rounded(percent, 1 if percent >= 0.995 or not percent else 2)}%"


def change_text(value: float, reference: float) -> str:
    """Return the relative difference from a reference, such as ``"+4.2%"`` or ``"-0.3%"``."""
    if not reference:
        return "-"
    percent = 100 * (value - reference) / reference
    rounded = _rounded(abs(percent), 1)
    sign = "" if not rounded.strip("0.") else "+" if percent > 0 else "-"
    return f"{sign}{rounded}%"


def _rounded(value: float, digits: int) -> str:
    """Round like JavaScript's ``toFixed``: halves up, where Python rounds them to even."""
    if not math.isfinite(value):
        return str(value)
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, Context(prec=400)))
