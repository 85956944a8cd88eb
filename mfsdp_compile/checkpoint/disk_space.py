"""Clear errors for full disks. Torch reports a failed write as an unexpected position in an archive."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

from .pickles import CheckpointError

__all__ = ["explaining_full_disks"]

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "a quota is used up",
    errno.EFBIG: "a file may not be as large",
}


@contextlib.contextmanager
def explaining_full_disks(directory: Path, needed: int) -> Iterator[None]:
    """Replace an error inside that a full disk has caused, directly or indirectly, with one that says so.

    Args:
        directory: Directory that is written to.
        needed: Bytes that the block wants to write.

    Raises:
        CheckpointError: In place of the original error.
    """
    try:
        yield
    except Exception as error:
        if (number := _cause(error)) is None:
            raise
        while not directory.is_dir() and directory != directory.parent:
            directory = directory.parent
        raise CheckpointError(
            f"{_FULL[number]}: {directory} cannot be written to any more ({errno.errorcode[number]}). {needed:,} "
            f"bytes were to be written; {shutil.disk_usage(directory).free:,} are free. Make room, or write to "
            "another disk; what was written of this checkpoint is removed"
        ) from error


def _cause(error: BaseException | None) -> int | None:
    """Return the errno of the first error in a chain that is about disk space, or None."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error.errno
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
