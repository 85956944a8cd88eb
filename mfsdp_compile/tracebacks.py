"""Errors that end a program, without the frames of torch's compiler and of this package.

torch prints forty to ninety lines around an error that a backend raises, and asks to report a bug to PyTorch. If an
error passes through this package and nobody catches it, only the program's own lines are printed, and the message.
``MFSDP_TRACEBACK=full`` shows everything, as does ``TORCHDYNAMO_VERBOSE=1``.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import TracebackType

from .runtime import compat
from .runtime.program_lines import PACKAGE_FOLDERS, TORCH_FOLDER
from .runtime.ranks.journal import on_uncaught_exceptions


@functools.cache
def shorten_uncaught() -> None:
    """Shorten what Python prints for an error that nobody catches, from now on."""
    on_uncaught_exceptions(_shorten)


def _shorten(error: BaseException, _: TracebackType | None) -> BaseException | None:
    try:
        return shortened(error)
    except Exception:  # whatever happens, the error is printed
        return None


def shortened(error: BaseException) -> BaseException:
    """Return an error without the frames between the program's last line and its cause.

    An error of the backend is returned in place of the one that Dynamo makes of it. Errors that passed neither through
    this package nor through Dynamo are returned unchanged.
    """
    if os.environ.get("MFSDP_TRACEBACK") == "full" or compat.wants_full_tracebacks():
        return error
    frames = list(_frames(error.__traceback__))
    if not (any(_is_in(frame, PACKAGE_FOLDERS) for frame in frames) or isinstance(error, compat.TorchDynamoException)):
        return error
    shown = error.inner_exception if isinstance(error, compat.BackendCompilerFailed) else error
    kept = [
        frame
        for frame in frames
        if not _is_in(frame, (*PACKAGE_FOLDERS, TORCH_FOLDER, contextlib.__file__, "<frozen "))
    ]
    traceback = None
    for frame in reversed(kept):
        traceback = TracebackType(traceback, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    if shown is not error:
        shown.__suppress_context__ = True
        if _is_in(frames[-1], PACKAGE_FOLDERS) and len(shown.args) == 1:  # torch.fx adds which node it was executing
            shown.args = (str(shown).partition("\n\nWhile executing %")[0],)
    if shown.__cause__ is not None:
        shown.__cause__ = shortened(shown.__cause__)
    return shown.with_traceback(traceback)


def _frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_in(frame: TracebackType, folders: tuple[str, ...]) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(folders)
