"""The program's own lines: where in it something happens, and warnings that point there."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

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
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_own(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None:
        file, line, module = frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__")
    else:  # in a thread beside the program
        stack = compat.stack_of(None)
        at = next((each for each in reversed(stack) if _is_own(each.filename)), stack[0])  # the first: of python -c
        file, line, module = at.filename, at.lineno or 0, "__main__"
    warnings.warn_explicit(message, category, file, line, module, _warned.setdefault(file, {}))


_warned: dict[str, dict[Any, Any]] = {}
"""Registries of warnings that were given, by file."""


def _is_own(file: str) -> bool:
    """Whether a file is the program's own, or of a library that it uses."""
    is_of_python = file.startswith(_PYTHON) and not file.startswith(_INSTALLED)
    return not (is_of_python or file.startswith(_OTHERS) or compat.is_generated(file))


def is_in_package(thread: int) -> bool:
    """Whether a thread runs code of this package, or code that such code calls."""
    return any(each.filename.startswith(PACKAGE_FOLDERS) for each in compat.stack_of(thread))


def line_outside(thread: int) -> str | None:
    """Return the innermost line of the program itself in a thread; None if this package has called what runs now."""
    stack = compat.stack_of(thread)
    for each in reversed(stack):
        if _is_own(each.filename):
            return place(stack)
        if each.filename.startswith(PACKAGE_FOLDERS):
            return None
    return None


def program_line(thread: int | None = None) -> str | None:
    """Return the innermost line of the program itself in a thread. None: the main thread."""
    return place(compat.stack_of(thread))


def program_line_of(error: BaseException) -> str | None:
    """Return the innermost line of the program itself that ``error`` came through."""
    return place(traceback.extract_tb(error.__traceback__))


def place(stack: Sequence[traceback.FrameSummary]) -> str | None:
    """Return the innermost line of the program itself in a stack."""
    own = [each for each in stack if _is_own(each.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else None
