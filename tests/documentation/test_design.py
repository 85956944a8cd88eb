"""Pages of docs/design name functions: they are where the pages say, and those of a step run in the order of its
page."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import step_trace

ROOT = Path(__file__).resolve().parents[2]
DESIGN = ROOT / "docs" / "design"
PAGE = DESIGN / "step.md"


class Line(NamedTuple):
    """A line of one of the page's tables."""

    number: int
    name: str
    file: str


def lines_of(table: str) -> list[Line]:
    found = re.search(rf"<!-- steps: {table} -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{PAGE.name} has no table {table!r}"
    rows = found[1].splitlines()[2:]
    cells = [re.fullmatch(r"\| (\d+) \| [^|]+ \| `([\w.]+)` \| \[(\S+)\]\(\.\./\.\./(\S+)\) \|", row) for row in rows]
    assert all(cells), [row for row, cell in zip(rows, cells, strict=True) if cell is None]
    assert all(cell[3] == cell[4] for cell in cells if cell), "a link does not lead to the file that it names"
    return [Line(int(cell[1]), cell[2], cell[3]) for cell in cells if cell]


def defined_in(path: Path) -> Iterator[str]:
    """Yield the qualified names of a file's functions and classes, and of those in its classes."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
            inside = node.body if isinstance(node, ast.ClassDef) else []
            yield from (f"{node.name}.{each.name}" for each in inside if isinstance(each, ast.FunctionDef))


def is_defined(name: str, file: str) -> bool:
    return (ROOT / file).is_file() and name in defined_in(ROOT / file)


def places_of(name: str) -> list[str]:
    """Return where the product defines something of this name, for whoever has moved it."""
    last = name.rpartition(".")[2]
    files = [path for folder in ("mfsdp_compile", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")]
    return [
        f"{path.relative_to(ROOT)}: {each}"
        for path in files
        for each in defined_in(path)
        if each.rpartition(".")[2] == last
    ]


@pytest.mark.parametrize("table", ["eager", "compiled"])
def test_functions_are_where_the_page_says(table: str) -> None:
    lines = lines_of(table)
    assert [line.number for line in lines] == list(range(1, 13))
    moved = [line for line in lines if not is_defined(line.name, line.file)]
    assert not moved, "\n".join(f"{line}; now in {places_of(line.name)}" for line in moved)


@pytest.mark.parametrize("page", sorted(DESIGN.glob("*.md")), ids=lambda page: page.stem)
def test_names_that_are_links_are_in_their_files(page: Path) -> None:
    named = re.findall(r"\[`(\w+)`\]\(\.\./\.\./(\S+\.py)\)", page.read_text(encoding="utf-8"))
    moved = [(name, file) for name, file in named if not is_defined(name, file)]
    assert not moved, "\n".join(f"{file} has no {name}; now in {places_of(name)}" for name, file in moved)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name before Python 3.11")
@pytest.mark.usefixtures("fake_world")
def test_an_eager_step_calls_them_in_this_order() -> None:
    called = step_trace.trace_ours().functions
    position = 0
    for line in lines_of("eager"):
        is_it = [
            call.file == line.file and f"{call.function}.".startswith(f"{line.name}.") for call in called[position:]
        ]
        assert any(is_it), f"line {line.number}: {line.name} is not called after line {line.number - 1}"
        position += is_it.index(True) + 1
