"""What a checkpoint is made of: written last, so that a checkpoint that has one is complete.

``manifest.json`` lists every file with its length and SHA-256, says from what model, ranks and versions it comes, and carries
a hash of itself. It is plain JSON: reading it runs nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .files import CheckpointError

__all__ = ["MANIFEST", "FileRecord", "Manifest", "damaged_files", "hash_file", "read_manifest", "write_durably"]

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and SHA-256, in hexadecimal, of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint.

    Args:
        step: of the training, as the program counts.
        serial: of the checkpoint among those of its folder; the last has the highest.
        created: date and time, UTC, ISO 8601.
        world_size: ranks that wrote it.
        sharding: strategy and ranks, in words.
        layout: fingerprint of the bucket layouts. Another one means other ranks or strategies, and no error.
        versions: of torch, this package and Python.
        rng: whether the state of random number generators is in it, for each rank.
        files: by name relative to the checkpoint.
    """

    step: int
    serial: int
    created: str
    world_size: int
    sharding: str
    layout: str
    versions: Mapping[str, str]
    rng: bool
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        body = {"format": FORMAT, **asdict(self)}
        write_durably(directory / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1))


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
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(4 << 20)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
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
