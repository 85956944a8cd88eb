"""Writing checkpoint directories of torch.distributed.checkpoint (DCP) atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.untrusted_files import remove

from .archives import dump_object
from .errors import CheckpointError, explaining_full_disks

MAX_FILE_BYTES = 5 << 30
"""Bytes after which a writer starts another file. 5 GiB is what object stores accept in one upload."""

FORMAT_VERSION = "1.0.0"
"""DCP's name for this file layout. DCP does not reject other versions."""


class CheckpointWriter:
    """Writes a DCP directory that ``torch.distributed.checkpoint.load`` reads, one tensor or chunk at a time.

    Args:
        directory: Directory to create. The checkpoint is complete once :meth:`close` has returned; see also
            :func:`new_output`.
        max_file_bytes: Bytes after which another file is started.
    """

    def __init__(self, directory: str | os.PathLike[str], max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.mcore_data: dict[str, dict[str, Any]] = {}
        """Megatron's facts about tensors, to be written along with them: by key, then by name of the fact."""
        self.paths: dict[str, tuple[str | int, ...]] = {}
        """Path of an entry in nested dictionaries, by key. By default, the path is the key itself."""
        self._max_file_bytes = max_file_bytes
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._written: list[WriteResult] = []
        self._files = 0
        self._file: IO[bytes] | None = None

    def add(self, key: str, tensor: Tensor) -> None:
        """Write a tensor as one chunk."""
        self.add_chunks(key, tensor.shape, tensor.dtype, [((0,) * tensor.dim(), tensor)])

    def add_chunks(
        self, key: str, shape: Sequence[int], dtype: torch.dtype, chunks: Iterable[tuple[Sequence[int], Tensor]]
    ) -> None:
        """Write a tensor of ``shape`` as chunks: pairs of offsets and tensor, taken from the iterable one by one."""
        properties = TensorProperties(dtype=dtype)
        entry = TensorStorageMetadata(properties, torch.Size(shape), [])
        self._new(key, entry)
        for offsets, tensor in chunks:
            if tensor.dtype != dtype:
                raise ValueError(f"{key} has dtype {dtype}, a chunk of it {tensor.dtype}")
            tensor = tensor.detach().cpu().contiguous()
            if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
                tensor = tensor.clone()  # torch.save writes whole storages
            index = MetadataIndex(key, offsets, len(entry.chunks))
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), tensor.shape))
            self._write(index, tensor)

    def add_value(self, key: str, value: Any) -> None:
        """Write any object that ``torch.save`` can write. A tensor is written as a tensor entry."""
        if isinstance(value, Tensor):
            self.add(key, value)
        else:
            self.add_bytes(key, dump_object(value))

    def add_bytes(self, key: str, raw: bytes) -> None:
        """Write an object that ``torch.save`` has already serialized."""
        self._new(key, BytesStorageMetadata())
        self._write(MetadataIndex(key), raw)

    def add_alias(self, key: str, of: str) -> None:
        """Make ``key`` another name for the entry ``of``. Tied parameters are thus stored only once."""
        self._new(key, self._entries[of])
        self._written += [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=key))
            for result in self._written
            if result.index.fqn == of
        ]

    def close(self) -> None:
        """Write the metadata, and flush everything to disk."""
        self._close_file()
        metadata = Metadata(
            self._entries,
            planner_data={key: self.paths.get(key, (key,)) for key in self._entries},
            storage_data={result.index: result.storage_data for result in self._written},
            storage_meta=StorageMeta(),
            version=FORMAT_VERSION,
        )
        if self.mcore_data:
            metadata.mcore_data = self.mcore_data  # type: ignore[attr-defined]
        with (self.directory / ".metadata").open("wb") as file:
            pickle.dump(metadata, file, protocol=4)
            file.flush()
            os.fsync(file.fileno())

    def _new(self, key: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> None:
        if key in self._entries:
            raise CheckpointError(f"{self.directory}: two entries would be named {key!r}")
        self._entries[key] = entry

    def _write(self, index: MetadataIndex, content: Tensor | bytes) -> None:
        if self._file is not None and self._file.tell() >= self._max_file_bytes:
            self._close_file()
        name = f"__0_{self._files}.distcp"
        if self._file is None:
            self._file = (self.directory / name).open("wb")
        offset = self._file.tell()
        if isinstance(content, bytes):
            self._file.write(content)
        else:
            torch.save(content, self._file)
        length = self._file.tell() - offset
        info = compat.storage_info(name, offset, length, None)
        self._written.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._files += 1


@contextlib.contextmanager
def new_output(out: Path, overwrite: bool = False, needed: int = 0) -> Iterator[Path]:
    """Yield a path to write a file or directory at. It is renamed to ``out`` if the block ends without an error.

    Until then, everything is in a folder beside ``out`` in which only this user can write. It is removed after an
    error.

    Args:
        out: Final path.
        overwrite: Replace ``out`` if it is a checkpoint.
        needed: Bytes that will be written, for the error message if the disk is full.

    Raises:
        CheckpointError: If ``out`` exists and may not be overwritten, or is not a checkpoint.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        if not overwrite:
            raise CheckpointError(f"{out} already exists. Choose another name, or pass --overwrite to replace it.")
        if out.is_dir() and any(out.iterdir()) and not (any(out.glob(".metadata")) or any(out.glob("*.safetensors"))):
            raise CheckpointError(
                f"{out} is not a checkpoint, so it was not overwritten. Remove it, or choose another name."
            )
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    out.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{out.name[:200]}.partial-", dir=out.parent))
    partial = private / out.name
    try:
        with explaining_full_disks(partial, needed):
            yield partial
        replaced = out.is_dir() and not out.is_symlink()
        if replaced:
            out.rename(old)  # a directory cannot be renamed over another one
        try:
            partial.replace(out)
        except OSError:
            if replaced:
                old.rename(out)
            raise
    finally:
        remove(private)
    if replaced:
        remove(old)
