"""Every code block in README.md, CONTRIBUTING.md and docs/ does what the page says; see :mod:`documents` for how."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from documents import NOT_RUN, PAGES, ROOT, WORLDS, Block, Cell
from pool import Pools

from mfsdp_compile.passes.context import Report
from mfsdp_compile.passes.phase import Phase
from mfsdp_compile.passes.schedule_file import ScheduleText

BLOCKS = {page: documents.blocks_of(page) for page in PAGES}
CELLS = [cell for blocks in BLOCKS.values() for cell in documents.cells_of(blocks)]
PYTHON = [cell for cell in CELLS if cell.first.kind == "run" and cell.first.language == "python"]
COMMANDS = [cell for cell in CELLS if cell.first.kind == "run" and cell.first.how.startswith("shell ")]
PROGRAMS = [cell for cell in PYTHON if cell.world == "program" and cell.ranks]
LONG_PROGRAMS = [cell for cell in PROGRAMS if cell.is_long]
"""Programs that only :func:`test_programs_as_they_are` runs."""


def named(cells: list[Cell], *more: Callable[[Cell], Any]) -> list[Any]:
    """Return cells as parameters of a test, each with the results of ``more``."""
    marks = {True: [pytest.mark.long], False: []}
    return [
        pytest.param(cell, *(of(cell) for of in more), id=cell.first.place, marks=marks[cell.is_long]) for cell in cells
    ]


def test_every_block_is_run_or_says_why_not() -> None:
    wrong = []
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        if problem := _problem(block):
            wrong.append(f"{block.place}: {problem}")
    assert not wrong, "\n".join(wrong) + f"\n{documents.__doc__}"


def _problem(block: Block) -> str:
    is_shell = block.language in ("", "bash", "sh", "console")
    if not block.kind:
        return "no comment in front of it says how it is run"
    if block.kind == "not run":
        if block.how not in NOT_RUN:
            return f"{block.how!r} is no reason; there are {', '.join(map(repr, NOT_RUN))}"
        return "this is no Python" if block.language == "python" and not documents.is_python(block.text) else ""
    if block.kind == "check":
        return "" if block.how in ("commands", "schedule") and is_shell else "there are 'commands' and 'schedule'"
    if block.kind in ("goes on", "prints"):
        return (
            ""
            if any(cell.first is not block and block in cell.blocks + cell.prints for cell in CELLS)
            else "after what?"
        )
    how = re.fullmatch(
        r"(?:shell (?P<folder>\w+)|(?P<world>\w+)(?: on \d+ ranks| in a world of \d+| without a process group)?)",
        block.how,
    )
    if how is None or (how["folder"] is None) == is_shell:
        return f"this cannot be run as {block.how!r}"
    if how["folder"] is not None:
        return "" if how["folder"] in documents.FOLDERS else f"there is no folder {how['folder']!r}"
    return "" if how["world"] in WORLDS else f"there is no world {how['world']!r}"


def check_in_this_process(cell: Cell, folder: Path) -> None:
    wrong = documents.run_python(cell.first.page, cell.world, cell.parts(), str(folder))
    assert not wrong, wrong


IN_THIS_PROCESS = [cell for cell in PYTHON if not cell.ranks]


@pytest.mark.parametrize(
    ("cell", "fake_world"),
    named([cell for cell in IN_THIS_PROCESS if cell.world_size], lambda cell: cell.world_size),
    indirect=["fake_world"],
)
@pytest.mark.slow
def test_python(cell: Cell, fake_world: int, tmp_path: Path) -> None:
    check_in_this_process(cell, tmp_path)


@pytest.mark.parametrize("cell", named([cell for cell in IN_THIS_PROCESS if not cell.world_size]))
@pytest.mark.slow
def test_python_without_ranks(cell: Cell, tmp_path: Path) -> None:
    check_in_this_process(cell, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
def test_the_pass_in_contributing() -> None:
    """The pass in CONTRIBUTING.md runs over every graph, with a bound that all buckets but one exceed."""
    (cell,) = (cell for cell in PYTHON if cell.first.page == "CONTRIBUTING.md")
    names = WORLDS[cell.world]()
    exec(cell.first.text, names)
    said: list[Any] = []

    def every_graph(graph: Any, context: Any, phase: Phase) -> Report:
        policy = replace(context.policy, prefetch_bytes=10_000)
        said.append(names["apply"](graph, replace(context, policy=policy), phase))
        return said[-1]

    options = {"inner": "aot_eager", "passes": [every_graph]}
    torch.compile(names["model"], backend="mfsdp", options=options)(names["tokens"], names["targets"]).backward()
    forward, backward = said
    assert [line.partition(":")[0] for line in forward.lines] == ["layers.0", "layers.1"]
    assert backward.lines


@pytest.mark.processes
@pytest.mark.parametrize("cell", named([cell for cell in PYTHON if cell.ranks and cell not in LONG_PROGRAMS]))
def test_python_on_ranks(cell: Cell, pools: Pools, tmp_path: Path) -> None:
    pages = {"page": cell.first.page, "world": cell.world, "parts": cell.parts(), "folder": str(tmp_path)}
    for wrong in pools.of(cell.ranks).run(documents.run_python, **pages):
        assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("cell", named(PROGRAMS))
def test_programs_as_they_are(cell: Cell, tmp_path: Path) -> None:
    """Programs run unchanged, started by torchrun and compiled by Inductor. This takes minutes on two cores."""
    source = "".join(block.text for block in cell.blocks)
    program = tmp_path / "train.py"
    program.write_text(source)
    found = re.search(r"torchrun --nproc-per-node=(\d+) train\.py", source)
    assert found is not None, "its first line says how to start it"
    assert int(found[1]) == cell.ranks
    documents.torchrun(cell.ranks, program, seconds=900)


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for c in CELLS for b in c.blocks if b.kind == "check"])
def test_checked(block: Block) -> None:
    if block.how == "schedule":
        assert ScheduleText.parse(block.text, block.place).lines
        return
    commands = documents.commands_of(block.text)
    assert commands
    for words, _ in commands:
        documents.check_command(words)


@pytest.mark.parametrize("cell", named(COMMANDS))
def test_commands(cell: Cell, tmp_path: Path) -> None:
    documents.FOLDERS[cell.first.how.removeprefix("shell ")](tmp_path)
    for block in cell.blocks:
        commands = documents.commands_of(block.text)
        assert commands
        for words, wanted in commands:
            got = documents.run_command(words, tmp_path)
            assert not wanted or documents.prints_as(wanted, got), f"{block.place}: {words} prints\n{got}"


@pytest.mark.parametrize("block", [pytest.param(b, id=b.place) for c in COMMANDS for b in c.blocks])
def test_commands_exist(block: Block) -> None:
    """Commands on the pages exist, including those that only ``make long`` runs."""
    for words, _ in documents.commands_of(block.text):
        documents.check_command(words)


def test_what_is_printed_is_compared() -> None:
    assert documents.prints_as("a\n...\nd", "a\nb\nc\nd\n")
    assert documents.prints_as("took ... ms", "took 1.3 ms")
    assert not documents.prints_as("a\n...\nd", "a\nb\n")
    assert not documents.prints_as("took ... ms", "took 1.3 s")
    assert not documents.prints_as("a", "a\nb")
    assert documents.prints_as("51 operators", "52 operators", torch_version="2.15.0")
    assert not documents.prints_as("51 operators", "52 operators", torch_version="2.13.0")


def test_blocks_that_are_wrong_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="--bukket"):
        documents.check_command(["mfsdp", "plan", "--model", "demo", "--bukket", "1"])
    with pytest.raises(AssertionError, match="tset"):
        documents.check_command(["make", "tset"])
    with pytest.raises(AssertionError, match="MODLE"):
        documents.check_command(["make", "demo", "MODLE=1"])
    with pytest.raises(AssertionError, match="nprocs"):
        documents.check_command(["torchrun", "--nprocs=2", "train.py"])
    page = ROOT / "docs" / "page.md"
    indented = Block(str(page), 1, "python", "", "", "", False)
    assert "no comment" in _problem(indented)
    assert "no reason" in _problem(Block(str(page), 1, "", "", "not run", "too lazy", False))


@pytest.mark.usefixtures("fake_world")
def test_a_block_that_prints_something_else_is_noticed(tmp_path: Path) -> None:
    assert torch.distributed.get_rank() == 0
    assert "it is\nheads" in documents.run_python(
        "README.md", "nothing", [("print('heads')", "tails\n")], str(tmp_path)
    )
    assert not documents.run_python("README.md", "nothing", [("print('heads')", "heads\n")], str(tmp_path))


def test_contributing_says_where_things_are() -> None:
    """Each name in the table "Which code decides it" is defined in the file beside it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, table = text.partition("Which code decides it:")
    rows = re.findall(r"^\| .+ \| `(\S+)` \| `(\w+)` \|$", table.partition("\n- ")[0], re.MULTILINE)
    assert len(rows) >= 20
    for file, name in rows:
        assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", (ROOT / file).read_text(), re.MULTILINE), (file, name)
