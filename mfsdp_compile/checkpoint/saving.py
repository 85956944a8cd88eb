"""Writing a checkpoint: first the files, then the manifest, and last the name.

``.saving-step-00000100``                torch.distributed.checkpoint writes here; every rank hashes its own files
``.saving-step-00000100/.lock``          locked while the save is in progress
``.saving-step-00000100/manifest.json``  written by the first rank when all ranks are done
``step-00000100``                        the same folder, renamed; from here on there is a checkpoint of this name

A process that dies before the rename leaves a folder that nothing takes for a checkpoint, and leaves all other
checkpoints unchanged.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from mfsdp_compile.runtime.memory.tensor import RowShardedTensor

from .errors import explaining_full_disks
from .manifest import FileRecord, Manifest, hash_file

PATIENCE = 10.0
"""Seconds until a file that another rank has flushed must be visible here through a network file system."""


BYTES_PER_ENTRY = 200
"""Approximate bytes that a chunk of a tensor takes in ``.metadata`` and the manifest."""


@dataclass(frozen=True)
class _HashedResult(WriteResult):
    """Result for the first item of a file, with the file's record for the manifest.

    Results are sent to the first rank anyway.
    """

    file: FileRecord


class PublishingWriter(FileSystemWriter):
    """Writes files like torch's own writer, hashes them, and publishes the folder when all ranks are done.

    Args:
        directory: Directory to write to; exists and is empty.
        manifest: The manifest, except for its files. The first rank's is used.
        publish: Called on the first rank, at the end.
    """

    def __init__(self, directory: Path, manifest: Manifest, publish: Callable[[], None]) -> None:
        super().__init__(directory)
        self._directory = directory
        self._manifest = manifest
        self._publish = publish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        needed = sum(map(_bytes_of, plan.items))
        with explaining_full_disks(self._directory, needed):
            # Torch's own writer creates a file even for a rank that has nothing to write.
            results = super().write_data(plan, planner).wait() if plan.items else []
        firsts: set[str] = set()
        hashed: list[WriteResult] = []
        for result in results:
            name = result.storage_data.relative_path
            if name not in firsts:
                firsts.add(name)
                result = _HashedResult(**vars(result), file=hash_file(self._directory / name))
            hashed.append(result)
        done: Future[list[WriteResult]] = Future()
        done.set_result(hashed)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write metadata and manifest, and publish the folder. Runs on the first rank when all have written."""
        files = {r.storage_data.relative_path: r.file for each in results for r in each if isinstance(r, _HashedResult)}
        plain = [
            [WriteResult(r.index, r.size_in_bytes, r.storage_data) if isinstance(r, _HashedResult) else r for r in each]
            for each in results
        ]
        self._check_arrived(files)
        with explaining_full_disks(self._directory, BYTES_PER_ENTRY * sum(map(len, results))):
            super().finish(metadata, plain)
            files[".metadata"] = hash_file(self._directory / ".metadata")
            replace(self._manifest, files=files).write(self._directory)
        sync_directory(self._directory)
        self._publish()

    def _check_arrived(self, files: Mapping[str, FileRecord]) -> None:
        """Check that files of other ranks are visible here. They are not if each machine has its own disk.

        Raises:
            RuntimeError: If some are not visible after :data:`PATIENCE`.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            sizes = {name: _size(self._directory / name) for name in files}
            absent = sorted(name for name, size in sizes.items() if size != files[name].bytes)
            if not absent:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self._directory} on the first rank lacks "
                    f"{', '.join(absent[:4])}{f' and {len(absent) - 4} more files' if len(absent) > 4 else ''} that "
                    "other ranks have written to a folder of this name. All ranks must see the same folder: is it on "
                    "a local disk?"
                )
            os.listdir(self._directory)  # makes NFS refresh its view
            time.sleep(0.1)

    def stage(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        """Copy the state to CPU memory, so that training can go on while it is written."""
        with _host_copies() as copied:
            return _staged(state_dict, copied)


def _bytes_of(item: WriteItem) -> int:
    """Return the bytes of a tensor's values. Everything else is small."""
    held = item.tensor_data
    return math.prod(held.chunk.sizes) * held.properties.dtype.itemsize if held is not None else 0


@contextlib.contextmanager
def _host_copies() -> Iterator[Callable[[Tensor], Tensor]]:
    """Context with a function that copies tensors to CPU memory. The copies are complete when the context ends.

    Copies from a GPU go to pinned memory: they are queued one behind the other, and waited for once.
    """
    devices: set[torch.device] = set()

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cuda":
            return tensor.to("cpu", copy=True)
        devices.add(tensor.device)
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    try:
        yield copied
    finally:
        for device in devices:
            torch.cuda.current_stream(device).synchronize()


def _staged(value: Any, copied: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Mapping):
        return {key: _staged(held, copied) for key, held in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_staged(held, copied) for held in value)
    if isinstance(value, RowShardedTensor):
        return RowShardedTensor.wrap(_staged(value.rows().detach(), copied), value.row_split, value.topology)
    if isinstance(value, Tensor):
        return copied(value.detach())
    return value


def sharded_part(value: Any) -> Any:
    """Return the sharded tensors in nested dictionaries, without anything else."""
    if isinstance(value, Mapping):
        parts = {key: sharded_part(held) for key, held in value.items()}
        return {key: part for key, part in parts.items() if isinstance(part, RowShardedTensor) or part}
    return value if isinstance(value, RowShardedTensor) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1


def sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
