"""Errors that end a program, without the frames of torch's compiler and of this package.

torch prints forty to ninety lines around an error that a backend raises, and asks to report a bug to PyTorch. If an error
passes through this package and nobody catches it, only the program's own lines are printed, and the message.
``MFSDP_TRACEBACK=full`` shows everything, as does ``TORCHDYNAMO_VERBOSE=1``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ._package_paths import CHECKOUT, PACKAGE
from .runtime import compat

__all__ = ["shorten_uncaught", "shortened"]

_OWN = (str(PACKAGE), *(str(CHECKOUT / folder) for folder in ("passes", "runtime")))
_TORCH = (compat.TORCH_FOLDER, "<frozen ")


def shorten_uncaught() -> None:
    """Shorten what Python prints for an error that nobody catches, from now on."""
    if not getattr(sys.excepthook, "shortens", False):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """An ``excepthook`` in front of another one, such as torch's, which names the rank in each line."""

    shortens = True

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            error = shortened(error)
        except Exception:  # whatever happens, the error is printed
            self._before(kind, error, traceback)
        else:
            self._before(type(error), error, error.__traceback__)


def shortened(error: BaseException) -> BaseException:
    """Return an error without the frames between the program's last line and its cause.

    An error of the backend is returned in place of the one that Dynamo makes of it. Errors that passed neither through
    this package nor through Dynamo are returned unchanged.
    """
    if os.environ.get("MFSDP_TRACEBACK") == "full" or compat.wants_full_tracebacks():
        return error
    frames = list(_frames(error.__traceback__))
    if not (any(_is_in(frame, _OWN) for frame in frames) or isinstance(error, compat.not_traceable())):
        return error
    told = compat.inner_exception(error) if isinstance(error, compat.backend_failed()) else error
    kept = [frame for frame in frames if not _is_in(frame, _OWN + _TORCH)]
    traceback = None
    for frame in reversed(kept):
        traceback = TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    if told is not error:
        told.__suppress_context__ = True
        if _is_in(frames[-1], _OWN) and len(told.args) == 1:  # torch.fx adds which node it was executing
            told.args = (str(told).partition("\n\nWhile executing %")[0],)
    if told.__cause__ is not None:
        told.__cause__ = shortened(told.__cause__)
    return told.with_traceback(traceback)


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_in(frame: TracebackType, folders: tuple[str, ...]) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(folders)
