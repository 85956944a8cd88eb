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
from documents import NOT_RUN, PAGES, PLACES, ROOT, Block, Cell
from pool import Pools

from mfsdp_compile import fully_shard_model
from mfsdp_compile.models.llama import Block as LlamaBlock
from mfsdp_compile.models.llama import Llama, LlamaConfig
from mfsdp_compile.passes.context import Report
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase

BLOCKS = {page: documents.blocks_of(page) for page in PAGES}
CELLS = [cell for blocks in BLOCKS.values() for cell in documents.cells_of(blocks)]
PYTHON = [cell for cell in CELLS if cell.first.kind == "run" and cell.first.language == "python"]
COMMANDS = [cell for cell in CELLS if cell.first.kind == "run" and cell.first.how.startswith("shell ")]
PROGRAMS = [cell for cell in PYTHON if cell.is_program]
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
    if block.kind == "setup":
        return "" if any(cell.setup is block for cell in CELLS) else "no block is run after this set-up"
    if is_shell and block.how.startswith("shell "):
        folder = block.how.removeprefix("shell ")
        return "" if folder in documents.FOLDERS else f"there is no folder {folder!r}"
    how = PLACES.fullmatch(block.how)
    if how is None or is_shell:
        return f"this cannot be run as {block.how!r}"
    (cell,) = (cell for cell in CELLS if cell.first is block)
    if how["after"] and cell.setup is None:
        return "no set-up is above it"
    ranks = cell.ranks or cell.world_size
    if cell.visible_ranks != ranks:
        return f"it is run on {ranks or 'no'} ranks, and readers see torchrun with {cell.visible_ranks or 'no'}"
    return ""


WHOLE = ("a GPU is needed", "here, but by ")
"""Reasons why blocks are not run that are whole programs all the same."""
SEEN = [*PYTHON, *(c for c in CELLS if c.first.kind == "not run" and c.first.how.startswith(WHOLE))]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.first.place) for cell in SEEN])
def test_a_block_uses_only_names_that_readers_see(cell: Cell) -> None:
    names = documents.undefined_names(cell.source)
    assert not names, f"{cell.first.place} uses {', '.join(names)}, which neither it nor its set-up defines"


def check_in_this_process(cell: Cell, folder: Path) -> None:
    wrong = documents.run_python(cell.first.page, cell.parts(), str(folder))
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
def test_the_pass_in_contributing() -> None:
    """The pass in CONTRIBUTING.md runs over every graph, with a bound that all buckets but one exceed."""
    (cell,) = (cell for cell in PYTHON if cell.first.page == "CONTRIBUTING.md")
    names: dict[str, Any] = {}
    exec(cell.first.text, names)
    config = LlamaConfig(vocabulary=64, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
    model = fully_shard_model(Llama(config), fsdp_unit_modules=[LlamaBlock])
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    said: list[Any] = []

    def every_graph(graph: Any, context: Any, phase: Phase) -> Report:
        policy = replace(context.policy, prefetch_bytes=10_000)
        said.append(names["apply"](graph, replace(context, policy=policy), phase))
        return said[-1]

    options = {"inner": "aot_eager", "passes": [every_graph]}
    torch.compile(model, backend="mfsdp", options=options)(tokens, tokens).backward()
    forward, backward = said
    assert [line.partition(":")[0] for line in forward.lines] == ["layers.0", "layers.1"]
    assert backward.lines


@pytest.mark.processes
@pytest.mark.parametrize("cell", named([cell for cell in PYTHON if cell.ranks and cell not in LONG_PROGRAMS]))
def test_python_on_ranks(cell: Cell, pools: Pools, tmp_path: Path) -> None:
    if "(torch 2.13 and newer)" in cell.source and not compat.DTENSOR_SUBCLASSES_DISPATCH:
        pytest.skip("needs torch 2.13")
    pages = {"page": cell.first.page, "parts": cell.parts(), "folder": str(tmp_path)}
    for wrong in pools.of(cell.ranks).run(documents.run_python, **pages):
        assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("cell", named(PROGRAMS))
def test_programs_as_they_are(cell: Cell, tmp_path: Path) -> None:
    """Programs run unchanged, started by torchrun and compiled by Inductor. This takes minutes on two cores."""
    program = tmp_path / "train.py"
    program.write_text(cell.source)
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
    assert "no block is run after" in _problem(Block(str(page), 1, "python", "", "setup", "", False))
    assert documents.undefined_names("import a.b\nc = a\ndef f(x):\n    return [y + x + c + z for y in len(w)]") == [
        "w",
        "z",
    ]


@pytest.mark.usefixtures("fake_world")
def test_a_block_that_prints_something_else_is_noticed(tmp_path: Path) -> None:
    assert torch.distributed.get_rank() == 0
    assert "it is\nheads" in documents.run_python("README.md", [("print('heads')", "tails\n")], str(tmp_path))
    assert not documents.run_python("README.md", [("print('heads')", "heads\n")], str(tmp_path))


def test_contributing_says_where_things_are() -> None:
    """Each name in the table "Which code decides it" is defined in the file beside it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, table = text.partition("Which code decides it:")
    rows = re.findall(r"^\| .+ \| `(\S+)` \| `(\w+)` \|$", table.partition("\n- ")[0], re.MULTILINE)
    assert len(rows) >= 20
    for file, name in rows:
        assert re.search(rf"^ *(def|class) {name}\b|^{name} = ", (ROOT / file).read_text(), re.MULTILINE), (file, name)
