"""Reading untrusted files, and writing into folders that others may write to.

Every name, size and JSON document in untrusted files is checked here, and nowhere else.

Readers of checkpoints, safetensors, Hugging Face folders, dumps of hung jobs, hardware descriptions and job
configurations all call these functions. Input that they refuse raises :class:`FileRefused`. An ``OSError`` (no such
file, no permission) passes through.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, TypeVar

MOST_BYTES = 64 << 20
"""Maximum size of a text file. A manifest of 65,536 ranks has 10 MiB."""

MOST_DEPTH = 64
"""Maximum nesting depth of lists and objects."""

MOST_LETTERS = 4096
"""Maximum length of a name."""

T = TypeVar("T")


class FileRefused(ValueError):
    """A file, or a name or value in it, is not something that a well-behaved program writes."""


# -- names ------------------------------------------------------------------------------------------------------------


def safe_name(name: Any, what: str = "a name") -> str:
    """Return a string that is safe to show in a terminal: no control characters, limited length.

    Raises:
        FileRefused: ``name`` is not such a string.
    """
    if not isinstance(name, str):
        raise FileRefused(f"{what} is of type {type(name).__name__} instead of a string")
    if len(name) > MOST_LETTERS:
        raise FileRefused(f"{what} has {len(name):,} characters, more than the {MOST_LETTERS:,} allowed")
    if not name.isprintable():
        raise FileRefused(f"{what} has control characters: {name!r:.200}")
    return name


def child(folder: Path, name: Any) -> Path:
    """Return ``folder / name`` for a relative ``name`` without ``..``. Does not access the file system.

    Raises:
        FileRefused: The name is absolute, contains ``..``, is empty, or is not a printable string.
    """
    name = safe_name(name, "the name of a file")
    path = PurePosixPath(name)
    climbs = ".." in path.parts or ".." in PureWindowsPath(name).parts
    if not path.parts or path.is_absolute() or climbs or PureWindowsPath(name).anchor:
        raise FileRefused(f"a file is outside the folder, at {name!r}")
    return folder / name


def inside(folder: Path, name: Any) -> Path:
    """Return the file that ``name``, as written in a file of ``folder``, refers to. It may be missing.

    Symbolic links are followed, and must end in ``folder``. Folders in the cache of the Hugging Face Hub, which consist
    of links (``snapshots/REVISION/config.json`` to ``blobs/HASH``), may also lead to the ``blobs`` next to them.

    Raises:
        FileRefused: The name leads out of the folder, or to a pipe, device, socket or folder.
    """
    path = child(folder, name)
    if not _is_within(path, folder):
        raise FileRefused(
            f"{path} is a link to {os.path.realpath(path)!r}, outside of the folder. If you trust it, replace the "
            "link with a copy of the file"
        )
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # A reader of a pipe waits forever; a device is endless.
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileRefused(f"{path} is not a regular file")
    return path


def subfolder(folder: Path, name: str) -> Path:
    """Return a folder in ``folder``. It may be missing.

    Raises:
        FileRefused: It is a link that leads outside.
    """
    path = child(folder, name)
    if not _is_within(path, folder):
        raise FileRefused(f"{path} is a link to a folder outside, {os.path.realpath(path)!r}")
    return path


def _is_within(path: Path, folder: Path) -> bool:
    root, end = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return end.is_relative_to(root) or (end.is_relative_to(blobs) and Path(os.path.realpath(blobs)) == blobs)


def links_inside(folder: Path) -> Iterator[Path]:
    """Yield the regular files in ``folder`` and its subfolders, sorted.

    Raises:
        FileRefused: A file is a link that leads outside, or a pipe or device; or a subfolder is a link.
    """
    for path in members(folder):
        if path.is_dir():
            if not _is_within(path, folder) or path.is_symlink():
                raise FileRefused(f"{path} is a link to another folder, which is not followed")
            for held in links_inside(path):
                yield inside(folder, held.relative_to(folder).as_posix())
        else:
            yield inside(folder, path.name)


def members(folder: Path) -> list[Path]:
    """Return the paths in ``folder``, sorted; none if there is no such folder.

    Raises:
        FileRefused: A name has control characters.
    """
    if not folder.is_dir():
        return []
    return sorted(folder / safe_name(name, f"a name in {folder}") for name in os.listdir(folder))


def copy_inside(folder: Path, names: Mapping[str, Path], to: Path) -> None:
    """Copy files of ``folder``, given by their names under ``to``."""
    for name, path in names.items():
        target = child(to, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_regular(inside(folder, path.relative_to(folder).as_posix())) as source, target.open("xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


# -- opening ----------------------------------------------------------------------------------------------------------


def open_regular(path: Path) -> IO[bytes]:
    """Open a file for reading. Returns at once even if the path is a pipe.

    Raises:
        FileRefused: The path is a pipe, device or socket.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise (
                IsADirectoryError(21, "Is a directory", str(path))
                if stat.S_ISDIR(mode)
                else FileRefused(f"{path} is not a regular file")
            )
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file, or a link (not its target), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        FileRefused: It is longer than ``most`` bytes, or not a regular file.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise FileRefused(f"{path} has {size:,} bytes, more than the {most:,} allowed")
        return file.read(most)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a whole file as UTF-8; see :func:`read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileRefused(f"{path} is not UTF-8: {error}") from None


# -- writing ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def new_file(folder: Path, name: str, durable: bool = False) -> Iterator[IO[bytes]]:
    """Write a file completely or not at all, also where others may write to the same folder.

    The content goes to a new file with a random name, which then replaces the regular file or the link at ``name``. No
    link in ``name`` is followed, so nobody can redirect the content to another file.

    Args:
        folder: Chosen by the user, and created if necessary. It may be a link.
        name: The file, perhaps in subfolders, which are created.
        durable: Flush the content to the disk before it replaces anything.

    Yields:
        The new file, open for writing.

    Raises:
        FileRefused: A subfolder is a link; or ``name`` is, or links to, a folder, pipe or device.
    """
    *between, last = child(folder, name).relative_to(folder).parts
    folder.mkdir(parents=True, exist_ok=True)
    at = os.open(folder, _FOLDER)
    try:
        for part in between:
            at = _entered(at, part, folder / name)
        with contextlib.suppress(OSError):  # nothing is there, or a link to nothing
            if not stat.S_ISREG(os.stat(last, dir_fd=at).st_mode):
                raise FileRefused(f"{folder / name} is not a regular file, and is not replaced")
        beside = f".{last[:200]}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(beside, flags, 0o666, dir_fd=at)
        except OSError as error:
            error.filename = str(folder / name)
            raise
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(beside, last, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=at)
            raise
    finally:
        os.close(at)


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def _entered(at: int, part: str, path: Path) -> int:
    """Return a descriptor of a subfolder, which is created if necessary, in place of that of its parent."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(part, dir_fd=at)
    try:
        inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise FileRefused(f"{path} is not written, because {part!r} is a link or a file instead of a folder") from None
    os.close(at)
    return inner


def write_text(path: Path, text: str, durable: bool = False) -> None:
    """Write a text file; see :func:`new_file`."""
    with new_file(path.parent, path.name, durable) as file:
        file.write(text.encode())


# -- JSON -------------------------------------------------------------------------------------------------------------


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a JSON file.

    Raises:
        FileRefused: It is too long, or see :func:`parse_json`.
    """
    return parse_json(read_text(path, most))


def parse_json(text: str) -> Any:
    """Parse standard JSON: no NaN or infinity, no duplicate names in an object, no numbers beyond a double's range.

    Raises:
        FileRefused: The text is something else, or nested deeper than :data:`MOST_DEPTH`.
    """
    if (depth := _depth(text)) > MOST_DEPTH:
        raise FileRefused(f"the JSON is nested {depth:,} deep, more than the {MOST_DEPTH} allowed")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except FileRefused:
        raise
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"it is not JSON: {error}") from None


def _depth(text: str) -> int:
    """Return the nesting depth of brackets outside of strings, without a slow loop over all characters."""
    bare = text.replace("\\\\", "").replace('\\"', "")
    brackets = "".join(bare.split('"')[::2])
    steps = (1 if letter in "[{" else -1 for letter in brackets if letter in "[]{}")
    return max(accumulate(steps), default=0)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise FileRefused(f"the name {twice!r:.200} occurs twice")
    return found


def _no_constant(text: str) -> Any:
    raise FileRefused(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FileRefused(f"{text:.50} does not fit in a double")
    return value


def typed(value: Any, kind: type[T] | tuple[type[T], ...], what: str) -> T:
    """Return ``value`` if it has a given type. A bool does not count as an int.

    Raises:
        FileRefused: It has another type; the message names ``what``.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise FileRefused(f"{what} is {value!r:.80} instead of {names}")
    return value


def whole(value: Any, what: str, low: int = 0, high: int = (1 << 63) - 1) -> int:
    """Return an integer within bounds, both inclusive.

    Raises:
        FileRefused: ``value`` is something else.
    """
    number = typed(value, int, what)
    if not low <= number <= high:
        shown = f"{number:,}" if number.bit_length() < 128 else f"a number of {number.bit_length():,} bits"
        raise FileRefused(f"{what} is {shown}, and {low:,} to {high:,} makes sense")
    return number


def printable(value: Any, most: int = 1000) -> Any:
    """Make strings in nested lists and dictionaries safe for a terminal: control characters escaped, length limited."""
    if isinstance(value, str):
        cut = value if len(value) <= most else f"{value[:most]}... ({len(value):,} characters)"
        return cut if cut.isprintable() else "".join(map(_escaped, cut))
    if isinstance(value, Mapping):
        return {printable(key, most): printable(held, most) for key, held in value.items()}
    if isinstance(value, list):
        return [printable(held, most) for held in value]
    return value


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()
