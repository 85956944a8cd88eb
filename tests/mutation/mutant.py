"""Mutants: how they are written, and the place in the product that each applies to."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("mfsdp_compile", "passes", "runtime")

_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<comment>#.*)"
    r"|(?P<prefix>[rRbBuUfF]{0,2})(?P<quote>\"\"\"|'''|\"|')(?P<body>(?:\\[\s\S]|(?!(?P=quote))[\s\S])*)(?P=quote)"
    r"|\w+|."
)
_SPACE = r"(?:\s|\\\n|#.*?$)*?"


class Change(NamedTuple):
    """A piece of code and what replaces it.

    Code is found as syntax: white space, line breaks, kinds of quotes and trailing commas do not matter, nor do
    comments that ``old`` does not have.

    Args:
        file: Where the code is, relative to the checkout. If it is not there, it is looked for in the whole product.
        old: Code that is found once: lines, or a part of one.
        new: Code that replaces it, indented in relation to ``old``.
    """

    file: str
    old: str
    new: str

    def apply(self) -> tuple[str, str]:
        """Return the path of the file that has the code, and its text with the change.

        Raises:
            ValueError: The code does not occur, or occurs more than once.
        """
        found: list[tuple[str, re.Match[str]]] = []
        for files in ([self.file], _product()):
            found = found or [(file, match) for file in files for match in _pattern(self.old).finditer(_text(file))]
        if len(found) != 1:
            where = ", ".join(file for file, _ in found) or "nowhere"
            raise ValueError(f"{self.file}: the code to change must be in one place. It is in: {where}\n{self.old}")
        ((file, match),) = found
        return file, self._replaced(_text(file), match)

    def _replaced(self, text: str, match: re.Match[str]) -> str:
        start, end = text.rfind("\n", 0, match.start()) + 1, match.end()
        before = text[start : match.start()]
        shift = _indent(text[start:end]) - _indent(self.old)
        lines = [" " * (_indent(line) + shift) + line.lstrip() for line in self.new.splitlines()]
        if before.strip():  # a part of a line
            start, lines[:1] = match.start(), [line.lstrip() for line in lines[:1]]
        return text[:start] + "\n".join(lines) + text[end:]


@dataclass(frozen=True)
class Mutant:
    """One change that breaks the product.

    Args:
        breaks: What goes wrong.
        tests: Tests that must fail, as arguments of pytest relative to ``tests/``. A ``-k`` expression follows after a
            space.
        equivalent: Why no test can fail. Such a mutant is neither run nor counted.
    """

    change: Change
    breaks: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def file(self) -> str:
        return self.change.apply()[0]

    @property
    def room(self) -> str:
        return self.file.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.file}: {self.breaks}"

    def source(self) -> str:
        """Return the text of the file with the change."""
        return self.change.apply()[1]


def read(path: Path) -> Iterator[Mutant]:
    """Read a list of mutants: paragraphs whose lines begin with a mark.

    A paragraph is a mutant: what it breaks, the lines that it removes (-), adds (+) and leaves (space), its tests (>)
    or why it is equivalent (=). One that begins with == is the file of those that follow, and the tests of those that
    have none.
    """
    file, usual = "", ()
    for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
        first, *lines = paragraph.splitlines()
        old, new, tests, why = ([line[2:] for line in lines if line[0] in marks] for marks in ("- ", "+ ", ">", "="))
        if first.startswith("== "):
            file, usual = first[3:], tuple(tests)
        else:
            yield Mutant(Change(file, "\n".join(old), "\n".join(new)), first, tuple(tests) or usual, " ".join(why))


def _pattern(code: str) -> re.Pattern[str]:
    """Return what matches the tokens of ``code``, however they are laid out."""
    parts: list[str] = []
    for token in _TOKEN.finditer(code):
        if token["space"]:
            continue
        if token["comment"]:  # only where it tells two places apart
            part = re.escape(token["comment"].rstrip())
        elif token["quote"]:
            body = r"\\?['\"]".join(re.escape(part) for part in re.split(r"\\?['\"]", token["body"]))
            part = rf"(?<!\w)(?i:{token['prefix']})['\"]{{1,3}}{body}['\"]{{1,3}}"
        else:
            word = token[0].isidentifier() or token[0].isalnum()
            part = rf"\b{token[0]}\b" if word else re.escape(token[0])
            if token[0] in ")]}":
                part = f"(?:,{_SPACE})?{part}"
                if parts[-1:] == [","]:
                    parts.pop()
        parts.append(part)
    if parts[-1] == ",":
        parts[-1] = ",?"
    return re.compile(_SPACE.join(parts), re.MULTILINE)


def _indent(code: str) -> int:
    return len(code) - len(code.lstrip(" "))


@functools.cache
def _text(file: str) -> str:
    path = ROOT / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@functools.cache
def _product() -> list[str]:
    return [str(path.relative_to(ROOT)) for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
