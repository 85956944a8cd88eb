"""Where the threads of this rank's program are, and for how long."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection

from ..program_lines import line_outside


class Places:
    """Instructions that threads were at when they were looked at, and when they came there."""

    def __init__(self) -> None:
        self._at: dict[int, tuple[int, int, float]] = {}  # frame, instruction and time, by thread

    def note(self, threads: Collection[int]) -> None:
        """Note which of these threads have moved since the last look."""
        now, before = time.monotonic(), self._at
        self._at = {
            thread: (*here, before[thread][2] if before.get(thread, ())[:2] == here else now)
            for thread in threads
            if (here := _instruction(thread)) is not None
        }

    def stood(self, thread: int) -> float:
        """Return for how many seconds a thread is known to have been at one instruction: it waits."""
        return time.monotonic() - self._at[thread][2] if thread in self._at else 0.0

    def said(self, thread: int) -> str:
        """Say where a thread is, unless it waits for other ranks: perhaps for a lock, for ever."""
        line = line_outside(thread)
        runs = line is not None and thread in self._at
        return f"runs, and has been at {line} for {self.stood(thread):.0f} s" if runs else ""


def _instruction(thread: int) -> tuple[int, int] | None:
    """Return the innermost frame of a thread, by its ``id``, and its instruction; None if the thread has ended."""
    frame = sys._current_frames().get(thread)  # all frames in a variable would hold this one, and so one another
    return (id(frame), frame.f_lasti) if frame is not None else None
