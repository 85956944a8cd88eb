"""What CONTRIBUTING.md says of the code is so: files, numbers, and where behavior is decided."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mfsdp_compile.passes.verifier.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FOLDERS = ("mfsdp_compile", "passes", "runtime", "tests", "benchmarks", "docs", ".github")


def test_files_exist() -> None:
    """A path may leave out the folders in front, as those of passes do in a section about passes."""
    outside_of_blocks = re.sub(r"^```.*?^```", "", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`([\w./]+/|[\w./]+\.(?:py|md|toml|txt|yml))`", outside_of_blocks))
    paths = [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    there = {f"/{path.relative_to(ROOT).as_posix()}{'/' if path.is_dir() else ''}" for path in paths}
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in there)}
    assert not missing - {"dist/"}  # made by `make wheel`


def test_numbers() -> None:
    assert set(re.findall(r"V1 to (V\d+)", CONTRIBUTING)) == {RULES[-1].number}
    (mutants,) = re.findall(r"^\| all \| (\d+) ", (ROOT / "docs" / "mutants.md").read_text("utf-8"), re.MULTILINE)
    (said,) = re.findall(r"in some (\d+) ways", CONTRIBUTING)
    assert abs(int(mutants) - int(said)) <= 50


@pytest.mark.parametrize(
    "behavior",
    [
        "frozen",
        "eager prefetch",
        "HSDP's all-reduce",
        "division of gradients by the number of ranks",
        "release after forward",
        "accumulation over microbatches",
        "what `optimizer.step()` sees",
        "order of collectives between ranks",
    ],
)
def test_a_reader_finds_what_decides_in_two_files(behavior: str) -> None:
    rows = re.findall(r"^\| (.+) \| `(\S+)` \| `\w+` \|$", CONTRIBUTING, re.MULTILINE)
    files = [file for what, file in rows if behavior in what]
    assert 1 <= len(files) <= 2


def test_nothing_names_machines_or_their_folders() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.*"), *(ROOT / "docs" / "design").glob("*.md")]
    wrong = [path for path in pages if re.search(r"(?<![\w.])/(?:work|home|root)/", path.read_text(encoding="utf-8"))]
    assert not wrong
