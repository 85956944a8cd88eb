"""The list of ``make mutants``: every mutant applies to the current source."""

from __future__ import annotations

import ast

import pytest
from doc_tables import DOCS, rows_of
from mutation import MUTANTS
from mutation.mutant import ROOT, Mutant


@pytest.mark.parametrize("mutant", [pytest.param(m, id=f"{m.file}-{i}") for i, m in enumerate(MUTANTS)])
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    changed = ast.dump(ast.parse(mutant.source()))
    assert changed != ast.dump(ast.parse((ROOT / mutant.file).read_text(encoding="utf-8")))
    for tests in mutant.tests:
        assert (ROOT / "tests" / tests.split()[0]).is_file()
    assert mutant.tests or mutant.equivalent


def test_no_two_are_the_same() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS)


def test_the_docs_have_the_score_of_these_mutants() -> None:
    *_, (_, counted, killed, equivalent) = rows_of(DOCS / "mutants.md", "mutants")
    assert int(counted) + int(equivalent) == len(MUTANTS) >= 150
    assert int(killed) >= 0.95 * int(counted)
