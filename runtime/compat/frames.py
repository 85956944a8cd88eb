"""The calls that this thread is in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

__all__: list[str] = []


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, innermost first, beginning with the one that iterates."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
