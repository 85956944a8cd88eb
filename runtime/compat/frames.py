"""The calls that threads are in, and files that are no files of a program."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["PIECES_FILE", "collector_off", "frames", "frames_of", "is_generated", "is_graph"]

_lock = threading.RLock()


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, innermost first, beginning with that of the caller."""
    return _outward(sys._getframe(1))


def frames_of(thread: int) -> list[FrameType]:
    """Return the frames of a thread, innermost first; none if it has ended.

    They hold what is in their variables. Of this thread, a frame that keeps them in a variable would hold itself.
    """
    with no_collections():
        return list(_outward(sys._current_frames().get(thread)))


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Context for looking at the frames of another thread.

    Before Python 3.12, the creation of a frame object, or of a dictionary of locals, may start a garbage collection.
    While its finalizers run, the other thread goes on and the frame may end, which crashes. Therefore none starts here,
    as in ``sys._current_frames`` since python/cpython#106883.
    """
    with _lock, collector_off() if sys.version_info < (3, 12) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Context in which no garbage collection of Python's starts by itself."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
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


def is_generated(file: str) -> bool:
    """Whether a file contains code that Inductor has generated."""
    cache = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return cache is not None and file.startswith(cache.cache_dir())


PIECES_FILE = "<mfsdp pieces "
"""How the names begin of what is no file: the code that calls the pieces of a graph."""


def is_graph(file: str) -> bool:
    """Whether a file contains the code of a graph: torch.fx's, what Inductor has generated, or that of pieces."""
    return file.startswith(("<eval_with_key>", PIECES_FILE)) or is_generated(file)
