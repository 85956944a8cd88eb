"""The form of a mutant, and the location of the checkout that it applies to."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Mutant(NamedTuple):
    """One change of one file that breaks the product.

    Args:
        file: Path relative to the checkout.
        breaks: What goes wrong.
        old: Text that occurs exactly once in the file.
        new: Text that replaces it.
        tests: Tests that must fail, as arguments of pytest relative to ``tests/``. A ``-k`` expression follows after a
            space.
        equivalent: Why no test can fail. Such a mutant is neither run nor counted.
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
        """Return the text of the file with the change.

        Raises:
            ValueError: ``old`` does not occur in the file, or occurs more than once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self}: the text to change occurs {found} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)
