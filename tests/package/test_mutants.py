"""The lists of ``make mutants``: every mutant applies to the current source, in one place."""

from __future__ import annotations

import ast

import pytest
from doc_tables import DOCS, rows_of
from mutation import MUTANTS, mutant
from mutation.mutant import ROOT, Change, Mutant


@pytest.mark.parametrize("mutant", [pytest.param(m, id=f"{m.change.file}-{i}") for i, m in enumerate(MUTANTS)])
def test_a_mutant_can_be_made(mutant: Mutant) -> None:
    file, changed = mutant.change.apply()
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    for tests in mutant.tests:
        assert (ROOT / "tests" / tests.split()[0]).is_file()
    assert mutant.tests or mutant.equivalent


def test_no_two_are_the_same() -> None:
    assert len({m.change for m in MUTANTS}) == len(MUTANTS)


FORMATTED = """
class Other:
    def f(self):
        total = self.g(  # a comment
            'first',
            {"second": 2},
        )
        return total
"""


def test_code_is_found_however_it_is_formatted_and_wherever_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"new.py": FORMATTED, "else.py": "def f():\n    total = 0\n"}
    monkeypatch.setattr(mutant, "_text", lambda file: files.get(file, ""))
    monkeypatch.setattr(mutant, "_product", lambda: list(files))
    old = "total = self.g(\"first\", {'second': 2})\nreturn total"
    file, changed = Change("old.py", old, "if True:\n    return None").apply()
    assert (file, changed) == ("new.py", FORMATTED[: FORMATTED.index("total")] + "if True:\n            return None\n")
    assert Change("old.py", "{'second': 2}", "{}").apply()[1] == FORMATTED.replace('{"second": 2}', "{}")
    assert Change("else.py", "total =", "other =").apply() == ("else.py", "def f():\n    other = 0\n")  # not new.py's
    for several in (Change("old.py", "total =", ""), Change("new.py", "total", ""), Change("new.py", "tot", "")):
        with pytest.raises(ValueError, match="must be in one place"):
            several.apply()


def test_the_docs_have_the_score_of_these_mutants() -> None:
    *_, (_, counted, killed, equivalent) = rows_of(DOCS / "mutants.md", "mutants")
    assert int(counted) + int(equivalent) == len(MUTANTS) >= 150
    assert int(killed) >= 0.95 * int(counted)
