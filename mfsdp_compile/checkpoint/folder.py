"""A folder of checkpoints, in which the last complete one can always be found."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from mfsdp_compile.runtime.model.run_lineage import Lineage
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.untrusted_files import FileRefused, inside, read_text, remove

from .errors import CheckpointError
from .manifest import MANIFEST, Manifest, read_manifest, write_durably
from .saving import sync_directory

LOCK_PATIENCE = 60.0
"""Seconds to wait for a process that starts or publishes a save in the same folder.

That takes milliseconds, and as long as it takes to remove an old checkpoint.
"""

LOCK = ".lock"
_LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(\.\d+)?")


class Folder:
    """A folder of checkpoints, for one process; :class:`Checkpoints` is for all ranks together.

    A save writes into ``.saving-step-00000100``, which gets the name ``step-00000100`` when it is complete and on disk.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root = root
        self.keep = keep
        self._left: set[str] = set()  # checkpoints that are later than the one that was loaded last
        self._warned_of: set[str] = set()  # runs, and checkpoints with a damaged manifest, that a warning has named

    def all(self) -> list[Path]:
        """Return the complete checkpoints, in the order in which they were written. A warning names the others."""
        complete, damaged = self._find()
        for _, error in damaged:
            warn(f"A checkpoint is skipped: {error}", by=None)
        return [path for _, path in complete]

    def latest(self) -> Path | None:
        """Return the checkpoint that was written last; see :meth:`Checkpoints.latest`."""
        written, name = self._last_name()
        complete, damaged = self._find()
        if name is not None and not any(path.name == name for _, path in complete):
            # Published since the folder was listed, or not there.
            path, manifest = self.root / name, None
            with contextlib.suppress(CheckpointError):
                manifest = read_manifest(path)
            if manifest is None:
                whys = [str(error) for damaged_path, error in damaged if damaged_path.name == name]
                raise CheckpointError(
                    f"{self.root / _LATEST} names {name}, "
                    + (f"which cannot be loaded: {whys[0]}" if whys else "which is gone.")
                    + self._how_to_choose(complete)
                )
            return path
        if name is None and damaged:
            raise CheckpointError(
                f"{self.root} has no file {_LATEST!r}, and nothing else says which checkpoint is the last: "
                f"{damaged[0][1]}{self._how_to_choose(complete)}"
            )
        for _, error in damaged:
            warn(f"A checkpoint is skipped: {error}", by=None)
        if not complete:
            return None
        newest = complete[-1][1]
        if name in (None, newest.name) or not self._is_later(written, *complete[-1]):
            return newest
        warn(
            f"{self.root / _LATEST} names {name} and was written after {newest.name}: loading goes back to {name}. The "
            f"next save is the last one then. To go on from {newest.name}, write its name into {_LATEST!r}.",
            by=None,
        )
        return self.root / str(name)

    @staticmethod
    def _is_later(written: float, manifest: Manifest, path: Path) -> bool:
        """Whether ``latest`` was written after a checkpoint, by a person who goes back, and not before it.

        A save that dies between publishing a checkpoint and naming it leaves the earlier file. Files of a copied folder
        may have the time of the copy, so the manifest's own time, in whole seconds, counts as well.
        """
        with contextlib.suppress(OSError):
            if written > (path / MANIFEST).stat().st_mtime:
                return True
        with contextlib.suppress(ValueError):
            return written > datetime.fromisoformat(manifest.created).timestamp() + 1
        return False

    def loaded(self, path: Path) -> None:
        """Note which checkpoint was loaded. Later ones are abandoned, and removed before those it goes on from."""
        complete, _ = self._find()
        serial = next((manifest.serial for manifest, each in complete if each == path), None)
        self._left = {each.name for manifest, each in complete if serial is not None and manifest.serial > serial}

    def prepare(self, step: int, lineage: Lineage, lock: contextlib.ExitStack) -> tuple[Path, Path, int]:
        """Create the folder to write a checkpoint to. The caller holds the lock of the root.

        Args:
            lock: Gets the folder's lock, which shows that its save is in progress.

        Returns:
            The folder, its final path, and the serial number.
        """
        for left in self.root.glob(".removing-*"):  # by a process that died: removing takes the lock of the root
            remove(left)
        for left in self.root.glob(".saving-*"):
            if left.is_symlink() or not left.is_dir() or not _is_locked(left):
                remove(left)
        complete, damaged = self._find()
        self._warn_of_others(complete, lineage)
        for path, error in damaged:
            if path.name not in self._warned_of:
                self._warned_of.add(path.name)
                warn(f"A checkpoint is skipped: {error}", by=None)
        serial = complete[-1][0].serial + 1 if complete else 0
        names = itertools.chain([f"step-{step:08}"], (f"step-{step:08}.{number}" for number in itertools.count(1)))
        # A name is taken by an earlier checkpoint, which stays, or by a save of another job that is in progress.
        name = next(n for n in names if not (self.root / n).exists() and not (self.root / f".saving-{n}").exists())
        directory = self.root / f".saving-{name}"
        directory.mkdir()
        lock.enter_context(locked(directory))
        return directory, self.root / name, serial

    def publish(self, written: Path, final: Path, lineage: Lineage) -> None:
        """Give a complete checkpoint its name, and remove the oldest ones of its run."""
        with locked(self.root):
            (written / LOCK).unlink()
            os.rename(written, final)
            sync_directory(self.root)
            try:
                write_durably(self.root / _LATEST, final.name)
                self._remove_old(lineage)
            except (OSError, FileRefused) as error:  # the checkpoint itself is complete
                warn(f"{final} is complete, but cleaning up around it failed: {error}", by=None)

    def _remove_old(self, lineage: Lineage) -> None:
        if self.keep is None:
            return
        own = [path for manifest, path in self._find()[0] if lineage.has(manifest.run)]
        own.sort(key=lambda path: path.name not in self._left)
        for path in own[: -self.keep]:
            doomed = self.root / f".removing-{path.name}"
            os.rename(path, doomed)  # one rename, so that nobody sees a half-removed checkpoint
            remove(doomed)

    def _last_name(self) -> tuple[float, str | None]:
        """Return when the file ``latest`` was written, and the name in it; None: there is no such file.

        Raises:
            CheckpointError: It is not a file with the name of a checkpoint.
        """
        try:
            path = inside(self.root, _LATEST)
            written = path.stat().st_mtime  # before it is read: a save in progress replaces it
            name = read_text(path).strip()
            if not _NAME.fullmatch(name):
                raise FileRefused(f"it has {name!r:.80}, which is not the name of a checkpoint")
        except (FileNotFoundError, NotADirectoryError):
            return 0.0, None
        except (OSError, FileRefused) as error:
            raise CheckpointError(
                f"{self.root / _LATEST} does not name a checkpoint: {error}.{self._how_to_choose(self._find()[0])}"
            ) from None
        return written, name

    def _how_to_choose(self, complete: Sequence[tuple[Manifest, Path]]) -> str:
        if not complete:
            return " There is no complete checkpoint. To start over, use another folder."
        *_, (_, last) = complete
        there = [f"{path.name} (saved {manifest.created})" for manifest, path in complete[-4:]]
        more = " and earlier ones" if len(complete) > len(there) else ""
        return (
            f" Complete are {', '.join(there)}{more}. To go on from "
            f"one of them, load it by name: mfsdp_compile.checkpoint.load({os.fspath(last)!r}, model, optimizer). The "
            f"next save writes {_LATEST!r} anew. Nothing was loaded."
        )

    def _find(self) -> tuple[list[tuple[Manifest, Path]], list[tuple[Path, CheckpointError]]]:
        """Find the checkpoints in the folder.

        Returns:
            The complete ones with their manifests, by serial number, and the others with their errors.
        """
        complete: list[tuple[Manifest, Path]] = []
        damaged: list[tuple[Path, CheckpointError]] = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if not _NAME.fullmatch(path.name):
                continue
            try:
                if (manifest := read_manifest(path)) is not None:
                    complete.append((manifest, path))
                elif path.exists():  # not removed in the meantime
                    damaged.append((path, CheckpointError(f"{path} has no manifest: it is incomplete.")))
            except CheckpointError as error:
                damaged.append((path, error))
            except OSError as error:
                damaged.append((path, CheckpointError(f"{path} cannot be read ({error}).")))
        return sorted(complete, key=lambda held: (held[0].serial, held[1])), damaged

    def _warn_of_others(self, complete: Sequence[tuple[Manifest, Path]], lineage: Lineage) -> None:
        others = {manifest.run: (manifest, path) for manifest, path in complete if not lineage.has(manifest.run)}
        for run, (manifest, path) in others.items():
            if run in self._warned_of:
                continue
            self._warned_of.add(run)
            if run in lineage.refused:
                warn(
                    f"{self.root} holds checkpoints of another run, {run}, which could not be loaded: "
                    f"{lineage.refused[run]} This run, {lineage.run}, goes on from an earlier one, and does not "
                    "remove them. Remove what is damaged, or move it elsewhere.",
                    by=None,
                )
                continue
            warn(
                f"{self.root} holds checkpoints of another run, {run or 'of a conversion'}: the newest is "
                f"{path.name}, saved {manifest.created}. This run, {lineage.run}, did not load it, saves beside it, "
                "and does not remove it. If another job is at work, give each a folder of its own: loading takes the "
                "last checkpoint of all. If this training was started over, remove the old checkpoints; if it should "
                "go on from them, load first.",
                by=None,
            )


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. The operating system releases the lock of a process that dies.

    Raises:
        TimeoutError: Another process has held it for :data:`LOCK_PATIENCE`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + LOCK_PATIENCE
    with _lock_file(folder, os.O_CREAT) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{folder / LOCK} has been locked by another process for {LOCK_PATIENCE:.0f} s. Is a process "
                        "that saves into this folder stopped?"
                    ) from None
            time.sleep(0.05)
        try:
            yield
        finally:  # closing is not enough: a process forked in the meantime also has the file open
            fcntl.flock(file, fcntl.LOCK_UN)


def _is_locked(folder: Path) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        with _lock_file(folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it is a link
        pass
    return False


def _lock_file(folder: Path, flags: int = 0) -> IO[str]:
    flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(folder / LOCK, flags, 0o666), "r+")
