"""The manifest of a checkpoint. It is written last, so a checkpoint that has one is complete.

``manifest.json`` lists every file with its length and a digest, identifies the model, run, ranks and versions that
wrote the checkpoint, and contains a hash of itself. It is plain JSON: reading it runs no code.

A digest is the SHA-256 of the SHA-256 digests of each 4 MiB of the file, in order. Several threads hash blocks, because
hashlib releases the GIL. Any changed byte and any change of order changes the digest; it does not prove who wrote a
file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import mfsdp_compile
from mfsdp_compile.runtime.untrusted_files import (
    FileRefused,
    child,
    inside,
    open_regular,
    read_json,
    safe_name,
    typed,
    whole,
    write_text,
)

from .errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2

BLOCK_BYTES = 4 << 20
"""Bytes that one thread hashes at a time. Part of the format."""

MOST_THREADS = 4
"""Maximum number of threads for one file. The ranks of a machine hash their files at the same time."""


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and hexadecimal digest of a file."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint.

    Args:
        step: Training step, as counted by the program. None: unknown to the program that converted it.
        serial: Serial number among the checkpoints of its folder. The last one has the highest.
        created: Date and time, UTC, ISO 8601.
        world_size: Number of ranks that wrote it.
        sharding: Readable description of strategy and ranks.
        layout: Fingerprint of the bucket layouts. A different one means different ranks or strategies, and is not an
            error.
        versions: Versions of torch, this package and Python.
        rng: Whether it contains the state of the random number generators of each rank.
        run: The run that wrote it (:class:`~mfsdp_compile.runtime.model.run_lineage.Lineage`). Empty: a process that
            converted it.
        continues: Runs that this run continued, by loading their checkpoints.
        refused: What was wrong with checkpoints of other runs that these runs could not load, by run.
        optimizer: Class of the optimizer whose state it contains. None: no optimizer, or unknown.
        files: Files, by name relative to the checkpoint.
    """

    step: int | None
    serial: int
    created: str
    world_size: int
    sharding: str
    layout: str
    versions: Mapping[str, str]
    rng: bool
    run: str = ""
    continues: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def write(self, directory: Path) -> None:
        body = {"format": FORMAT, **asdict(self)}
        write_durably(directory / MANIFEST, json.dumps({**body, "sha256": _digest(body)}, indent=1))


def seal(directory: Path, source: Manifest | None = None) -> None:
    """Write the manifest of a checkpoint that one process made from another one.

    Args:
        directory: The checkpoint, with all its files.
        source: Manifest of the original, if it had one.
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
    """Return the versions of the software that writes the checkpoint."""
    return {
        "torch": torch.__version__,
        "mfsdp-compile": mfsdp_compile.__version__,
        "python": platform.python_version(),
    }


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest of a checkpoint.

    Returns:
        The manifest, or None if there is none: the checkpoint was written by another program, or is incomplete.

    Raises:
        CheckpointError: If it is damaged, or was written by a later version of this package.
    """
    path = directory / MANIFEST
    try:
        found = typed(read_json(inside(directory, MANIFEST)), dict, "the manifest")
        digest = found.pop("sha256", None)
        if digest != _digest(found):
            raise FileRefused("its hash differs")
        if (version := whole(found.pop("format", None), "format")) != FORMAT:
            raise CheckpointError(
                f"{path} has format {version}, and this version of mfsdp-compile reads format {FORMAT}. Load the "
                f"checkpoint with a{' later' if version > FORMAT else 'n earlier'} version, or without its manifest: "
                "verify=False."
            )
        return _checked(directory, found)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileRefused as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). Copy the checkpoint again, or use an earlier one; verify=False loads it "
            "without checking the manifest."
        ) from None


def _checked(directory: Path, found: dict[str, Any]) -> Manifest:
    """Return the manifest in a JSON object, after checking its values.

    Raises:
        FileRefused: If something is missing or unexpected, or a value is out of range.
    """
    if odd := sorted(set(found) ^ {each.name for each in fields(Manifest)}):
        raise FileRefused(f"it lacks, or has in excess, {odd[0]!r:.80}")

    def text(name: str) -> str:
        return safe_name(found[name], name)

    files = {}
    for name, record in typed(found["files"], dict, "files").items():
        child(directory, name)
        if set(typed(record, dict, f"the record of {name}")) != {"bytes", "digest"}:
            raise FileRefused(f"the record of {name} is {record!r:.80}")
        digest = safe_name(record["digest"], f"the digest of {name}")
        files[name] = FileRecord(whole(record["bytes"], f"the length of {name}"), digest)
    return Manifest(
        step=None if found["step"] is None else whole(found["step"], "step"),
        serial=whole(found["serial"], "serial"),
        created=text("created"),
        world_size=whole(found["world_size"], "world_size", 1),
        sharding=text("sharding"),
        layout=text("layout"),
        versions={safe_name(k): safe_name(v) for k, v in typed(found["versions"], dict, "versions").items()},
        rng=typed(found["rng"], bool, "rng"),
        run=text("run"),
        continues=tuple(safe_name(run, "a run") for run in typed(found["continues"], list, "continues")),
        refused={safe_name(k): safe_name(v) for k, v in typed(found["refused"], dict, "refused").items()},
        optimizer=None if found["optimizer"] is None else text("optimizer"),
        files=files,
    )


def damaged_files(directory: Path, files: Mapping[str, FileRecord], names: Sequence[str]) -> list[str]:
    """Check the files ``names``. Reads every byte of those with the right length.

    Returns:
        A description of the damage for each damaged file.
    """
    found = []
    for name in names:
        try:
            path = inside(directory, name)
            size = path.stat().st_size
            right = size == files[name].bytes and hash_file(path) == files[name]
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
        except FileRefused as error:
            found.append(f"{name} is not read: {error}")
        else:
            if size != files[name].bytes:
                found.append(f"{name} has {size:,} bytes instead of {files[name].bytes:,}")
            elif not right:
                found.append(f"{name} has other contents than were written")
    return found


def hash_file(path: Path) -> FileRecord:
    """Return length and digest of a file. Each thread holds :data:`BLOCK_BYTES` in memory.

    Raises:
        FileRefused: If it is a pipe or device.
    """
    with open_regular(path) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size

        def block(start: int) -> tuple[int, bytes]:
            data = os.pread(descriptor, BLOCK_BYTES, start)
            while 0 < len(data) < min(BLOCK_BYTES, size - start):  # a read may return fewer bytes than requested
                more = os.pread(descriptor, BLOCK_BYTES - len(data), start + len(data))
                if not more:
                    break
                data += more
            return len(data), hashlib.sha256(data).digest()

        blocks = _map_in_threads(block, range(0, size, BLOCK_BYTES))
    whole_file = hashlib.sha256()
    for _, digest in blocks:
        whole_file.update(digest)
    return FileRecord(sum(count for count, _ in blocks), whole_file.hexdigest())


def _map_in_threads(function: Callable[[int], Any], items: Sequence[int]) -> list[Any]:
    """Return the results of all items. An executor would refuse work while the program ends, when a save may go on."""
    count = min(MOST_THREADS, os.cpu_count() or 1, len(items))
    results: list[Any] = [None] * len(items)
    errors: list[Exception] = []

    def work(first: int) -> None:
        try:
            for index in range(first, len(items), count):
                results[index] = function(items[index])
        except Exception as error:
            errors.append(error)

    others = [threading.Thread(target=work, args=(number,)) for number in range(1, count)]
    for thread in others:
        thread.start()
    if items:
        work(0)
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
    return results


def write_durably(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if the power fails.

    The text is written to a temporary file beside it, flushed to disk, and renamed.
    """
    write_text(path, text, durable=True)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
