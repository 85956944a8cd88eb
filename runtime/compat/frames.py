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


def compiling() -> Iterator[FrameType]:
    """Yield the frames of Dynamo's function that compiles a frame, innermost first.

    Those of the program are not looked into: before Python 3.13, f_locals of a running function keeps its variables
    alive.
    """
    for frame in frames():
        if frame.f_code.co_name == "_compile" and frame.f_globals["__name__"] == "torch._dynamo.convert_frame":
            yield frame
