"""What a checkpoint is made of: written last, so that a checkpoint that has one is complete.

``manifest.json`` lists every file with its length and a digest, says from what model, ranks and versions it comes, and
carries a hash of itself. It is plain JSON: reading it runs nothing.

Digests find damage at the speed of memory, several times that of SHA-256, so that they can always be looked at:

    file      | 4 MiB | 4 MiB | ... | rest |
    4 MiB     4 x 128 rows of 1,024 words of 8 bytes; each 128 rows are summed to one, modulo 2**64
    digest    SHA-256 of these sums, and of the rest as it is

A changed word changes its sum; changes of several would have to cancel out. They do not show who wrote a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import mfsdp_compile

from .files import CheckpointError

__all__ = [
    "MANIFEST",
    "FileRecord",
    "Manifest",
    "damaged_files",
    "hash_file",
    "read_manifest",
    "seal",
    "write_durably",
]

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes, and digest in hexadecimal, of one file."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint.

    Args:
        step: of the training, as the program counts; None: not known to the program that converted it.
        serial: of the checkpoint among those of its folder; the last has the highest.
        created: date and time, UTC, ISO 8601.
        world_size: ranks that wrote it.
        sharding: strategy and ranks, in words.
        layout: fingerprint of the bucket layouts. Another one means other ranks or strategies, and no error.
        versions: of torch, this package and Python.
        rng: whether the state of random number generators is in it, for each rank.
        optimizer: class of the optimizer whose state is in it; None: there is none, or it is not known.
        files: by name relative to the checkpoint.
    """

    step: int | None
    serial: int
    created: str
    world_size: int
    sharding: str
    layout: str
    versions: Mapping[str, str]
    rng: bool
    optimizer: str | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        body = {"format": FORMAT, **asdict(self)}
        write_durably(directory / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1))


def seal(directory: Path, source: Manifest | None = None) -> None:
    """Write the manifest of a checkpoint that one process has made of another one.

    Args:
        directory: with all its files.
        source: of the other one, if it had any.
    """
    if source is None:
        source = Manifest(None, 0, now(), 1, "by one process", "", versions(), rng=False)
    files = {
        path.relative_to(directory).as_posix(): hash_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / MANIFEST
    }
    replace(source, created=now(), versions=versions(), files=files).write(directory)


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of what writes the checkpoint."""
    return {
        "torch": torch.__version__,
        "mfsdp-compile": mfsdp_compile.__version__,
        "python": platform.python_version(),
    }


def read_manifest(directory: Path) -> Manifest | None:
    """None: there is none; the checkpoint was written by another program, or is incomplete.

    Raises:
        CheckpointError: it is damaged, or of a later version of this package.
    """
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        body = json.loads(text)
        digest = body.pop("sha256")
        if digest != _digest(body):
            raise ValueError("its hash is another")
        if body.pop("format") > FORMAT:
            raise CheckpointError(f"{path} was written by a later version of mfsdp-compile. Update the package.")
        files = {name: FileRecord(**record) for name, record in body.pop("files").items()}
        return Manifest(**body, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). Copy the checkpoint again, or use an earlier one; verify=False loads it "
            "without looking at the manifest."
        ) from None


def damaged_files(directory: Path, files: Mapping[str, FileRecord], names: Sequence[str]) -> list[str]:
    """What is wrong with each of ``names``, one line per file; reads every byte of them."""
    found = []
    for name in names:
        try:
            record = hash_file(directory / name)
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
            continue
        if record.bytes != files[name].bytes:
            found.append(f"{name} has {record.bytes:,} bytes instead of {files[name].bytes:,}")
        elif record != files[name]:
            found.append(f"{name} has other contents than were written")
    return found


def hash_file(path: Path) -> FileRecord:
    digest, length = hashlib.sha256(), 0
    buffer = bytearray(4 << 20)
    rows = torch.frombuffer(buffer, dtype=torch.int64).view(4, 128, 1024)
    with open(path, "rb") as file:
        while count := file.readinto(buffer):
            digest.update(rows.sum(1).numpy() if count == len(buffer) else memoryview(buffer)[:count])
            length += count
    return FileRecord(length, digest.hexdigest())


def write_durably(path: Path, text: str) -> None:
    """All of it or nothing, also when the power fails: written beside, flushed to the disk, renamed."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
