"""Folded lines say the same as the lines they stand for."""

from __future__ import annotations

import doctest
import re

from hypothesis import given
from hypothesis import strategies as st

from mfsdp_compile.passes import folding
from mfsdp_compile.passes.folding import folded


def unfolded(lines: list[str]) -> list[str]:
    """Write every repetition again."""
    found: list[str] = []
    at = 0
    while at < len(lines):
        match = re.fullmatch(r"(\d+) times:", lines[at])
        at += 1
        if match is None:
            found.append(lines[at - 1])
            continue
        times, block = int(match[1]), []
        while at < len(lines) and lines[at].startswith("    "):
            block.append(lines[at][4:])
            at += 1
        for number in range(times):
            for line in block:
                found.append(re.sub(r"\[(\d+)\.\.(\d+)\]", lambda m, n=number: _between(m, n, times), line))
    return found


def _between(match: re.Match[str], number: int, times: int) -> str:
    first, last = int(match[1]), int(match[2])
    return str(first + (last - first) // (times - 1) * number)


@given(
    st.lists(
        st.one_of(
            st.builds(lambda n: [f"wait layers.{n}"], st.integers(0, 3)),
            st.builds(
                lambda first, times, down: [
                    line
                    for i in range(times)
                    for n in [first + (times - i if down else i)]
                    for line in (
                        f"gather layers.{n + 1}  2,902,016 B in float32 of 2 ranks",
                        f"run layers.{n}  region_0",
                    )
                ],
                st.integers(0, 5),
                st.integers(1, 9),
                st.booleans(),
            ),
        ),
        max_size=6,
    )
)
def test_nothing_is_lost(parts: list[list[str]]) -> None:
    lines = [line for part in parts for line in part]
    assert unfolded(folded(lines)) == lines


def test_eighty_layers_are_three_lines() -> None:
    lines = [line for n in range(80) for line in (f"gather  layers.{n + 1}  1,064,960 B", f"wait    layers.{n}")]
    assert folded(lines) == ["80 times:", "    gather  layers.[1..80]  1,064,960 B", "    wait    layers.[0..79]"]


def test_example() -> None:
    assert doctest.testmod(folding).failed == 0
