"""Write repeated lines once: schedules of models with many equal layers become short enough to read.

>>> print("\\n".join(folded(["a 0", "b 1", "a 1", "b 2", "a 2", "b 3", "end"])))
3 times:
    a [0..2]
    b [1..3]
end
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![\w.,])\d+(?![\w,])|(?<=\.)\d+(?![\w,])|(?<=#)\d+")
"""A number that counts layers: a part of a name, such as 3 in ``layers.3`` or ``#3``, or a word of its own."""

_LONGEST = 32
"""Longest sequence of lines whose repetition is looked for."""
_LEAST = 3
"""Number of repetitions from which on a sequence is folded."""


def folded(lines: Sequence[str]) -> list[str]:
    """Fold sequences of lines that repeat, with numbers that stay the same or grow by the same step each time.

    Returns:
        Lines in which a repeated sequence stands once, indented, below its number of repetitions. Numbers that change
        are written as ``[first..last]``.
    """
    parsed = [(_NUMBER.sub("#", line), tuple(map(int, _NUMBER.findall(line)))) for line in lines]
    found: list[str] = []
    at = 0
    while at < len(lines):
        period, times = max(
            (
                (period, _times(parsed, at, period))
                for period in range(1, min(_LONGEST, (len(lines) - at) // _LEAST) + 1)
            ),
            key=lambda candidate: (candidate[0] * candidate[1] if candidate[1] >= _LEAST else 0, -candidate[0]),
            default=(1, 1),
        )
        if times < _LEAST:
            found.append(lines[at])
            at += 1
            continue
        last = at + (times - 1) * period
        found.append(f"{times} times:")
        found += [f"    {_ranged(lines[at + i], parsed[last + i][1])}" for i in range(period)]
        at += times * period
    return found


def _times(parsed: Sequence[tuple[str, tuple[int, ...]]], at: int, period: int) -> int:
    """Return how often the ``period`` lines at ``at`` follow on one another."""
    steps = [
        _step(parsed[at + i], parsed[at + period + i]) if at + 2 * period <= len(parsed) else None
        for i in range(period)
    ]
    if None in steps:
        return 1
    times = 2
    while at + (times + 1) * period <= len(parsed) and all(
        _step(parsed[at + (times - 1) * period + i], parsed[at + times * period + i]) == step
        for i, step in enumerate(steps)
    ):
        times += 1
    return times


def _step(one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return by how much the numbers of equal lines differ; None for other lines."""
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return None
    return tuple(b - a for a, b in zip(one[1], other[1], strict=True))


def _ranged(line: str, last: Sequence[int]) -> str:
    values = iter(last)

    def ranged(match: re.Match[str]) -> str:
        end = next(values)
        return match[0] if int(match[0]) == end else f"[{match[0]}..{end}]"

    return _NUMBER.sub(ranged, line)
