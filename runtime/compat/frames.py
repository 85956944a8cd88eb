"""The calls that threads are in."""

from __future__ import annotations

import faulthandler
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from traceback import FrameSummary
from types import FrameType

__all__ = ["stack_of", "stacks"]

_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, innermost first, beginning with the one that iterates."""
    frame = sys._getframe().f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def stacks() -> dict[int, list[FrameSummary]]:
    """Return the stacks of all threads, by their identifiers, innermost call last, of at most 100 calls.

    ``f_back`` of another thread's frame is not safe while that thread runs: Dynamo's frames are freed although somebody
    refers to them (seen with Python 3.11, where it returned a list, and crashed). This reads all stacks in one piece.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.readlines()
    found: dict[int, list[FrameSummary]] = {}
    calls: list[FrameSummary] = []
    for line in lines:
        if thread := _THREAD.match(line):
            calls = found.setdefault(int(thread[1], 16), [])
        elif call := _CALL.match(line):
            calls.insert(0, FrameSummary(call[1], int(call[2]), call[3], lookup_line=False))
    return found


def stack_of(thread: int | None) -> list[FrameSummary]:
    """Return the stack of a thread, innermost call last; see :func:`stacks`. None: of the main thread."""
    return stacks().get(thread or threading.main_thread().ident or 0, [])


def compiling() -> Iterator[FrameType]:
    """Yield the frames of Dynamo's function that compiles a frame, innermost first.

    Those of the program are not looked into: before Python 3.13, f_locals of a running function keeps its variables
    alive.
    """
    for frame in frames():
        if frame.f_code.co_name == "_compile" and frame.f_globals["__name__"] == "torch._dynamo.convert_frame":
            yield frame
