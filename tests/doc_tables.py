"""Tables in documentation contain what tests assert or measure. ``MFSDP_WRITE_TABLES=1`` rewrites them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"

_WRITES = os.environ.get("MFSDP_WRITE_TABLES") == "1"


def check_table(docs: Path, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Assert that the region ``<!-- table: name -->`` of a file is this table."""
    rows_of(docs, name)  # it is there
    text = docs.read_text(encoding="utf-8")
    wanted = _with_table(text, name, header, rows)
    if _WRITES:
        docs.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        table = "\n".join(map(_line, (header, *rows)))
        raise AssertionError(f"{docs} has another table {name!r} than tests assert, which is\n{table}")


def check_rows(
    docs: Path,
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    keys: int,
    bounds: Mapping[str, float] = {},
) -> None:
    """Assert that the table has these rows, among others.

    Args:
        keys: Number of columns at the left that identify a row. Rows with other keys stay.
        bounds: Upper bounds by column. The measured number and the document's must both be at most the bound, and may
            differ from each other.
    """
    there = rows_of(docs, name)
    if _WRITES:
        kept = {tuple(row[:keys]): row for row in there}
        kept |= {tuple(map(str, row[:keys])): [str(cell) for cell in row] for row in rows}
        text = _with_table(docs.read_text(encoding="utf-8"), name, header, list(kept.values()))
        docs.write_text(text, encoding="utf-8")
        return
    for row in rows:
        mine = [str(cell) for cell in row]
        its = next((found for found in there if found[:keys] == mine[:keys]), None)
        assert its is not None, f"{docs} has no row {mine[:keys]} in table {name!r}; it is\n{_line(mine)}"
        for column, measured, told in zip(header, mine, its, strict=True):
            if column in bounds:
                for number in (measured, told):
                    assert float(number) <= bounds[column], f"{_line(mine)}: {column} is above {bounds[column]}"
            else:
                assert measured == told, (
                    f"{docs} says {told!r} for {column!r}, in table {name!r}; the row is\n{_line(mine)}"
                )


def rows_of(docs: Path, name: str) -> list[list[str]]:
    """Return the cells of a table, without its header."""
    found = re.findall(_region(name), docs.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(found) == 1, f"{docs} has {len(found)} tables {name!r}, from <!-- table: {name} --> to <!-- end -->"
    assert "<!--" not in found[0][1], f"{docs}: table {name!r} does not end before another one begins"
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in found[0][1].splitlines()[2:]]


def _with_table(text: str, name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    table = "\n".join(map(_line, (header, ["---"] * len(header), *rows)))
    return re.sub(_region(name), lambda found: f"{found[1]}{table}\n{found[3]}", text, flags=re.DOTALL)


def _region(name: str) -> str:
    return rf"(<!-- table: {name} -->\n)(.*?)(<!-- end -->)"


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
