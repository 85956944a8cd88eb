"""The error of everything about checkpoints, and others' errors in its words: of full disks, of torch, of archives."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, not what was asked for, or holds something that is not safe to load."""


def raise_damaged(where: Path | str, error: Exception | str) -> NoReturn:
    """Raise the error that a file is damaged, as ``error`` says."""
    what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    raise CheckpointError(
        f"{where} is damaged or cut short ({what}). Copy the checkpoint again, or use an earlier one."
    ) from (error if isinstance(error, Exception) else None)


def as_checkpoint_error(error: CheckpointException, what: str) -> CheckpointError:
    """Turn torch's exception into a CheckpointError with the errors of the failed ranks.

    ``except Exception`` does not catch torch's own exception.
    """
    ranks = ", ".join(map(str, sorted(error.failures)[:8]))
    return CheckpointError(f"{what}. On rank {ranks}: {'; '.join(as_causes(error))}")


def as_causes(error: CheckpointException) -> list[str]:
    """Return what failed, on whichever rank. Without communication, torch calls every rank 0."""
    return list(dict.fromkeys(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()))[:4]


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "a quota is used up",
    errno.EFBIG: "a file may not be as large",
}


@contextlib.contextmanager
def explaining_full_disks(directory: Path, needed: int) -> Iterator[None]:
    """Replace an error inside that a full disk has caused, directly or indirectly, with one that says so.

    Torch reports a failed write as an unexpected position in an archive.

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
