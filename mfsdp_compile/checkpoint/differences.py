"""Differences between a model with its optimizer and a checkpoint, and which of them a load may ignore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from .errors import CheckpointError

KINDS = {
    "missing": "missing",
    "unexpected": "unexpected",
    "reshaped": "of another shape",
    "cast": "of another dtype",
}
"""Kinds of differences, as in the arguments ``allow_...`` of a load, and in words."""


class Differences:
    """Names that differ, by kind.

    Args:
        directory: The checkpoint, for messages.
        allowed: Patterns of names that may differ, by kind.
    """

    def __init__(self, directory: Path, allowed: Mapping[str, Sequence[str]]) -> None:
        self._directory = directory
        self._allowed = allowed
        self._found: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}  # names, and how they differ

    def add(self, kind: str, name: str, how: str = "") -> None:
        self._found[kind].setdefault(name, how)

    def names(self, kind: str) -> list[str]:
        return list(self._found[kind])

    def is_allowed(self, kind: str, name: str) -> bool:
        """Whether ``name`` may differ."""
        return any(fnmatchcase(name, pattern) for pattern in self._allowed[kind])

    def refuse(self) -> None:
        """Raise CheckpointError if a difference is not allowed. The message lists all of them."""
        lines = []
        for kind, in_words in KINDS.items():
            refused = [
                f"{name} ({how})" if how else name
                for name, how in self._found[kind].items()
                if not self.is_allowed(kind, name)
            ]
            if refused:
                lines.append(f"  {in_words} (allow_{kind}): {listed(refused)}")
        if lines:
            raise CheckpointError(
                f"{self._directory} does not fit the model. Nothing was loaded.\n"
                + "\n".join(lines)
                + "\nName what is meant to be different in the argument in parentheses; patterns such as "
                "'model.head.*' do."
            )


def listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")
