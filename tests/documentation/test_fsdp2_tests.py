"""The page about FSDP2's own tests names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from doc_tables import DOCS, rows_of

TESTS = Path(__file__).resolve().parents[1]
PAGE = DOCS / "moving" / "fsdp2_tests.md"
LEAST = 0.9
"""Share of rows with a counterpart."""

FILES = {
    "training", "frozen", "ignore_params", "mixed_precision", "extensions", "state", "state_dict", "clip_grad_norm_",
    "autograd", "comm", "memory", "overlap", "init", "grad_scaler", "compile",
}  # fmt: skip
"""Files of FSDP2's tests, without ``test_fully_shard_``."""


def counterparts(cell: str) -> list[str]:
    return re.findall(r"`([^`]*::[^`]*)`", cell)


def functions(file: Path) -> set[str]:
    """Return the names of a file's test functions, without importing it."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_counterpart_is_there() -> None:
    absent = []
    for name, _, cell in rows_of(PAGE, "tests of FSDP2"):
        for counterpart in counterparts(cell):
            file, _, function = counterpart.partition("::")
            if not (TESTS / file).is_file() or function not in functions(TESTS / file):
                absent.append(f"{name}: {counterpart}")
    assert not absent


def test_every_row_says_something() -> None:
    rows = rows_of(PAGE, "tests of FSDP2")
    names = [name for name, _, _ in rows]
    assert len(set(names)) == len(names)
    assert {re.fullmatch(r"`(\w+)::test_\w+`", name)[1] for name in names} == FILES  # type: ignore[index]
    for name, what, cell in rows:
        assert what, name
        assert bool(counterparts(cell)) != cell.startswith("not meant: "), name
    told = sum(bool(counterparts(cell)) for _, _, cell in rows)
    assert told >= LEAST * len(rows), f"{told} of {len(rows)} rows have a counterpart"


def test_every_test_beside_fsdp2_is_named() -> None:
    """A test that was written for a row and is in none has lost it."""
    named = {counterpart for _, _, cell in rows_of(PAGE, "tests of FSDP2") for counterpart in counterparts(cell)}
    file = "integrations/test_fsdp2_list.py"
    mine = {f"{file}::{function}" for function in functions(TESTS / file)}
    assert mine - named == {
        f"{file}::test_named_dimensions",
        f"{file}::test_models_without_parameters",
        f"{file}::test_units_in_a_module_that_is_not_sharded",
        f"{file}::test_modules_leave_the_meta_device_one_by_one",
        f"{file}::test_released_between_microbatches_of_compiled_code",
    }
