"""The program's own lines: where in it something happens, and warnings that point there."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from . import compat

_PACKAGE = Path(str(sys.modules[__name__.partition(".")[0]].__file__)).parent
_RUNTIME = Path(compat.__file__).parents[1]
PACKAGE_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (_PACKAGE, _RUNTIME, _RUNTIME.parent / "passes"))
"""Folders of this package's frames. A source checkout has passes and runtime next to the package."""
TORCH_FOLDER = f"{compat.TORCH_FOLDER}{os.sep}"
_OTHERS = (*PACKAGE_FOLDERS, TORCH_FOLDER, "<")
"""Paths of frames that are not the program's own."""
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
"""Folder of Python's own modules: context managers run in frames of one, and so do waits for locks and queues."""
_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), f"{_PYTHON}site-packages")
"""Folders of libraries, which may be inside of that of Python."""


def warn(message: str, category: type[Warning] = UserWarning, by: int | None = 0) -> None:
    """Give a warning at the innermost line of the program itself, once per line.

    Args:
        by: Rank that gives it, where all ranks come here alike. None: every rank that comes here, because what it says
            is about this rank.
    """
    if by is not None and dist.is_available() and dist.is_initialized() and dist.get_rank() != by:
        return
    frame = next(filter(_is_of_program, compat.frames()), None) or _of_main_thread()
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _of_main_thread() -> FrameType:
    thread = threading.main_thread().ident or 0
    # The outermost is that of python -c. Frames are in no variable: in the main thread, one of them would hold it.
    return next(filter(_is_of_program, compat.frames_of(thread)), None) or compat.frames_of(thread)[-1]


def _is_of_program(frame: FrameType) -> bool:
    return _is_own(frame.f_code.co_filename)


def _is_own(file: str) -> bool:
    """Whether a file is the program's own, or of a library that it uses."""
    is_of_python = file.startswith(_PYTHON) and not file.startswith(_INSTALLED)
    return not (is_of_python or file.startswith(_OTHERS) or compat.is_generated(file))


def is_in_package(thread: int) -> bool:
    """Whether a thread runs code of this package, or code that such code calls."""
    return any(_is_of_package(frame) for frame in compat.frames_of(thread))


def line_outside(thread: int) -> str | None:
    """Return the innermost line of the program itself in a thread; None if this package has called what runs now."""
    for frame in compat.frames_of(thread):
        if _is_of_program(frame):
            return _line([frame])
        if _is_of_package(frame):
            return None
    return None


def program_line(thread: int | None = None) -> str | None:
    """Return the innermost line of the program itself in a thread. None: in the main thread."""
    return _line(compat.frames_of(thread or threading.main_thread().ident or 0))


def program_line_here() -> str | None:
    """Return the innermost line of the program itself in this thread."""
    return _line(compat.frames())


def _is_of_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE_FOLDERS)


def _line(frames: Iterable[FrameType]) -> str | None:
    found = next(filter(_is_of_program, frames), None)
    return place(traceback.StackSummary.extract([(found, found.f_lineno)])) if found is not None else None


def program_line_of(error: BaseException) -> str | None:
    """Return the innermost line of the program itself that ``error`` came through."""
    return place(traceback.extract_tb(error.__traceback__))


def place(stack: Sequence[traceback.FrameSummary]) -> str | None:
    """Return the innermost line of the program itself in a stack."""
    own = [each for each in stack if _is_own(each.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else None
