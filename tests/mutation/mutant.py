"""What a mutant is, and where it is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Mutant(NamedTuple):
    """One change of one file that breaks the product.

    Args:
        file: relative to the checkout.
        breaks: what goes wrong.
        old: occurs exactly once in the file.
        new: takes its place.
        tests: what must fail: arguments of pytest, relative to ``tests/``; ``-k`` expressions follow after a space.
        equivalent: why no test can fail. Such a mutant is neither run nor counted.
    """

    file: str
    breaks: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def room(self) -> str:
        return self.file.rpartition("/")[0]

    def __str__(self) -> str:
        return f"{self.file}: {self.breaks}"

    def source(self) -> str:
        """The file with the change.

        Raises:
            ValueError: the place is not there, or not the only one.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self}: the text to change occurs {found} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)
