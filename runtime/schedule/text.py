"""Lines of a schedule: how the starts and the ends of collectives are written, and how they are read back.

Graphs carry these lines as text (``mfsdp::begin``), ranks compare them, schedule files consist of them, and reports of
hangs and traces name collectives by them::

    gather  layers.0  32,768 B in bfloat16 of 8 ranks
    wait    layers.0
    reduce  layers.0  65,536 B in float32, sum over 8 ranks
    reduce  layers.0, stage 2  8,192 B in float32, sum over 2 ranks, if due
    await   layers.0, stage 2
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_LINE = re.compile(
    r"(?P<what>gather|wait|cast|reduce|await)\s+(?P<bucket>\S+?)"
    r"(?:,?\s+(?:stage|portions of) (?P<number>\d{1,9}))?(?:\s{2,}(?P<detail>.*))?"
)
_IF_DUE = ", if due"


@dataclass(frozen=True)
class ScheduleLine:
    """The start or the end of a collective.

    Args:
        what: ``gather`` and ``wait``, ``reduce`` and ``await``; ``cast`` for a bucket that is held whole and only cast.
        bucket: Name of the bucket, or ``#`` and its number in the graph.
        number: Stage of a reduction, from 1. For a gather of portions, the number of ranks that share a bucket; 1 for a
            gather of shards.
        detail: Bytes, dtype, operation and ranks, for people. Compared between ranks, ignored in files.
        is_deferrable: Whether the reduction runs only in a backward that completes gradients.
    """

    what: str
    bucket: str
    number: int = 1
    detail: str = ""
    is_deferrable: bool = False

    @staticmethod
    def parse(text: str) -> ScheduleLine | None:
        """Read a line; None if it is not the start or the end of one of our collectives."""
        if (match := _LINE.fullmatch(text.strip())) is None:
            return None
        detail = match["detail"] or ""
        return ScheduleLine(
            what=match["what"],
            bucket=match["bucket"],
            number=int(match["number"] or 1),
            detail=detail.removesuffix(_IF_DUE),
            is_deferrable=detail.endswith(_IF_DUE),
        )

    @property
    def is_gather_of_portions(self) -> bool:
        return self.what == "gather" and self.number > 1

    @property
    def decision(self) -> ScheduleLine:
        """The line without what is not decided by a schedule, as schedule files have it."""
        return replace(self, detail="", is_deferrable=False)

    @property
    def label(self) -> str:
        """The line without details and alignment, for traces and messages."""
        return f"{self.what} {self._numbered}"

    def __str__(self) -> str:
        detail = f"  {self.detail}" if self.detail else ""
        return f"{self.what:7} {self._numbered}{detail}{_IF_DUE if self.is_deferrable else ''}"

    @property
    def _numbered(self) -> str:
        called = "portions of" if self.what == "gather" else "stage"
        return f"{self.bucket}{f', {called} {self.number}' if self.number > 1 else ''}"
