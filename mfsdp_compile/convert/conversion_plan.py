"""What a conversion will do, so that it can be printed before it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class OutputEntry:
    """An entry of the output, and where it comes from.

    Args:
        target: Key in the output.
        sources: Keys in the input, each with the part that is taken: ``decoder.layers.norm.weight[3]``.
        shape: Shape in the output. None if the entry is not a tensor.
        dtype: Dtype in the output. None if the entry is not a tensor.
    """

    target: str
    sources: tuple[str, ...]
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.shape is None or self.dtype is None else math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        kind = "" if self.shape is None else f"  {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        sources = self.sources if len(self.sources) < 5 else (*self.sources[:2], "...", self.sources[-1])
        return f"{', '.join(sources)} -> {self.target}{kind}"


@dataclass
class ConversionPlan:
    """A conversion, planned from names and shapes alone.

    Args:
        moves: Every entry of the output.
        left_out: Entries of the input that have no place in the output, with the reason.
        notes: Caveats about the result, for the user.
        write: Runs the conversion: creates the given directory (or file), and reports bytes of tensors as they are
            written.
    """

    moves: list[OutputEntry] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    write: Callable[[Path, Callable[[int], None]], None] = lambda out, advance: None

    @property
    def nbytes(self) -> int:
        """Total bytes of the tensors that will be written."""
        return sum(move.nbytes for move in self.moves)

    def lines(self) -> Sequence[str]:
        """Return a readable summary: a line for each entry, what is left out, and the notes."""
        out = [str(move) for move in self.moves]
        out += [f"{key} -> left out: {why}" for key, why in self.left_out]
        out += [f"note: {note}" for note in self.notes]
        tensors = sum(move.shape is not None for move in self.moves)
        out.append(f"{tensors} tensors, {self.nbytes:,} bytes; {len(self.moves) - tensors} other values")
        return out
