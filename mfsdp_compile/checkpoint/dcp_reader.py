"""Reading checkpoint directories of torch.distributed.checkpoint (DCP) in one process, one tensor at a time.

Nothing here needs a process group, and nothing in a checkpoint can run code (:mod:`.dcp_metadata`, :mod:`.archives`).

A DCP directory ::

    .metadata       pickle: shape, dtype and chunks of every tensor, and the location of each chunk and other value
    __0_0.distcp    torch.save archives, one after the other: chunks of tensors, and values that are not tensors
    __1_0.distcp    written by another rank
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mfsdp_compile.runtime.untrusted_files import FileRefused, inside, open_regular

from .archives import StoredTensor, check_archive, check_sums, load_object, stored_tensor
from .dcp_metadata import load_metadata
from .errors import CheckpointError


class SafeReader(FileSystemReader):
    """A storage reader for ``torch.distributed.checkpoint.load`` that runs no code from a checkpoint.

    Its errors name the file. Use it together with :class:`SafeLoadPlanner`, which does the same for values that are not
    tensors.

    Args:
        path: Directory of the checkpoint.
        reader: Reader of the same directory. None: a new one.
        only_checks: Check that everything can be read, and read no values.
        sums: Compare tensors with the checksums of their archives first, which torch does not.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        reader: CheckpointReader | None = None,
        only_checks: bool = False,
        sums: bool = False,
    ) -> None:
        super().__init__(path)
        self._reader = reader
        self._only_checks = only_checks
        self._sums = sums

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        rank = kwargs.get("rank")
        if self._reader is None:
            self._reader = CheckpointReader(self.path, ".metadata" if rank is None else f"__{rank}.metadata")
        metadata = self._reader.metadata
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._reader is not None
        for name, group in itertools.groupby(sorted(plan.items, key=self._file_of), key=self._file_of):
            try:
                items = list(group)
                for item in items:
                    if not self.storage_data[item.storage_index].transform_descriptors:
                        self._reader.check_stored(item.storage_index, self._sums)
                if not self._only_checks:
                    super().read_data(dataclasses.replace(plan, items=items), planner)
            except (CheckpointError, FileRefused) as error:
                raise CheckpointError(f"{Path(self.path) / name}: {error}") from error
            except Exception as error:  # torch does not document what damaged archives raise
                raise CheckpointError(
                    f"{Path(self.path) / name} could not be read ({type(error).__name__}: {error}). It is damaged, cut "
                    "short or missing: copy the checkpoint again, or use an earlier one."
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file_of(self, item: ReadItem) -> str:
        name: str = self.storage_data[item.storage_index].relative_path
        return name


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors with ``weights_only=True``; torch's own planner runs the code in them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_object(value, f"entry {read_item.storage_index.fqn!r}")
        if not self.flatten_state_dict:
            self.state_dict[name] = loaded
            return
        *path, last = self.mappings[name]
        target: Any = self.original_state_dict
        for step in path:
            target = target[step]
        target[last] = loaded


class CheckpointReader:
    """Reads parts of a DCP directory. Opens files on demand, and holds at most one chunk of a tensor.

    Args:
        directory: Directory with a ``.metadata`` file.
        metadata: Name of that file.

    Raises:
        CheckpointError: See :func:`.load_metadata`.
    """

    def __init__(self, directory: str | os.PathLike[str], metadata: str = ".metadata") -> None:
        self.directory = Path(directory)
        self.metadata = load_metadata(self.directory / metadata)
        self._where = {(index.fqn, index.offset): info for index, info in self.metadata.storage_data.items()}
        self._recent: tuple[tuple[str, torch.Size], Tensor] | None = None
        self._rows: tuple[str, dict[int, list[ChunkStorageMetadata]]] | None = None
        self._files: dict[str, tuple[Path, int]] = {}
        self._sizes: dict[str, dict[torch.Size, torch.Size]] = {}

    def keys(self) -> list[str]:
        """Return the keys of all entries, sorted."""
        return sorted(self.metadata.state_dict_metadata)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: str) -> bool:
        return key in self.metadata.state_dict_metadata

    def is_tensor(self, key: str) -> bool:
        """Return whether an entry is a tensor."""
        return isinstance(self._entry(key), TensorStorageMetadata)

    def shape(self, key: str) -> torch.Size:
        return self._tensor_entry(key).size

    def dtype(self, key: str) -> torch.dtype:
        return self._tensor_entry(key).properties.dtype

    def numel(self, key: str) -> int:
        return math.prod(self.shape(key))

    def mcore_data(self, key: str) -> dict[str, Any]:
        """Return Megatron's facts about a tensor; empty if there are none."""
        noted: dict[str, Any] = self.metadata.mcore_data.get(key) or {}  # type: ignore[attr-defined]
        return noted

    def stored_as(self, key: str) -> tuple[tuple[str, int], ...]:
        """Return file and offset of every chunk. Two keys with the same result share their data."""
        return tuple((info.relative_path, info.offset) for info in map(self._location, self._indices(key)))

    def path(self, key: str) -> tuple[Any, ...]:
        """Return the path of an entry in the dictionaries and lists that were saved."""
        return self.recorded_path(key) or tuple(key.split("."))

    def recorded_path(self, key: str) -> tuple[Any, ...]:
        """Return the path that the checkpoint records; empty if it records none.

        Raises:
            CheckpointError: It leads elsewhere than the key says.
        """
        path: tuple[Any, ...] = (self.metadata.planner_data or {}).get(key, ())
        if path and ".".join(map(str, path)) != key:
            raise CheckpointError(
                f"{self.directory / '.metadata'} is damaged: it says that {key} is at {path}. Copy the checkpoint "
                "again, or use an earlier one."
            )
        return path

    def tensor(self, key: str, index: Sequence[int] = ()) -> Tensor:
        """Assemble a tensor from its chunks, whichever files they are in and whatever their sizes.

        Args:
            key: Key of the tensor.
            index: Indices into the first dimensions of the tensor, one for each. Only chunks that contain this part are
                read.

        Returns:
            A CPU tensor of shape ``self.shape(key)[len(index):]``.

        Raises:
            KeyError: If there is no such entry.
            CheckpointError: If the entry is not a tensor, its chunks do not cover it, or a file is damaged.
        """
        entry = self._tensor_entry(key)
        index = tuple(index)
        whole = [*index, *([0] * (len(entry.size) - len(index)))]
        start = torch.Size(whole)
        stop = torch.Size([i + 1 for i in index] + list(entry.size[len(index) :]))
        if any(not 0 <= i < n for i, n in zip(index, entry.size, strict=False)):
            raise IndexError(f"{key} has shape {tuple(entry.size)}: there is no part {index}")
        wanted = [b - a for a, b in zip(start, stop, strict=True)]
        chunks = self._at_row(key, entry, index[0]) if index else self._covering(key, entry)
        result = torch.empty(wanted, dtype=entry.properties.dtype)
        for chunk in chunks:
            low = [max(a, o) for a, o in zip(start, chunk.offsets, strict=True)]
            high = [min(b, o + n) for b, o, n in zip(stop, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            if low == list(chunk.offsets) == list(start) and wanted == list(chunk.sizes):  # nothing to assemble
                return self._load(key, chunk, entry.properties.dtype).reshape(entry.size[len(index) :])
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, start, strict=True))
            there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            result[here] = self._chunk(key, chunk, entry.properties.dtype)[there]
        return result.reshape(entry.size[len(index) :])

    def chunks(self, key: str) -> Iterator[tuple[torch.Size, Tensor]]:
        """Yield offsets and tensor of each chunk of a tensor, as stored."""
        entry = self._tensor_entry(key)
        for chunk in self._covering(key, entry):
            yield chunk.offsets, self._load(key, chunk, entry.properties.dtype)

    def value(self, key: str) -> Any:
        """Return an entry that is not a tensor.

        Raises:
            KeyError: If there is no such entry.
            CheckpointError: If the entry is damaged, or holds objects of a class that is not known to be harmless.
        """
        if self.is_tensor(key):
            raise CheckpointError(f"{self.directory}: {key} is a tensor")
        info = self._location(MetadataIndex(key))
        with self._open(info, key) as file:
            return load_object(file, self._named(info, key))

    def read(self, key: str) -> Any:
        """Return an entry, which may be a tensor or not. Raises what :meth:`tensor` and :meth:`value` raise."""
        return self.tensor(key) if self.is_tensor(key) else self.value(key)

    def raw(self, key: str) -> bytes:
        """Return the serialized bytes of an entry that is not a tensor, checked but not unpickled."""
        info = self._location(MetadataIndex(key))
        with self._open(info, key) as file:
            check_sums(file, self._named(info, key))
            return file.read()

    def check(self, key: str) -> None:
        """Check that an entry is complete: its chunks cover it exactly once, and its files are long enough.

        Reads no file, and allocates nothing of the entry's size.

        Raises:
            KeyError: If there is no such entry.
            CheckpointError: If it is not.
        """
        entry = self._entry(key)
        if isinstance(entry, TensorStorageMetadata):
            self._covering(key, entry)
        else:
            self._check_length(self._location(MetadataIndex(key)), key)

    def check_stored(self, index: MetadataIndex, sums: bool = False) -> None:
        """Check that an entry, or a chunk of a tensor, can be read, and is what the metadata says. Reads few values.

        Args:
            sums: Read all of them, and compare them with the archive's checksums.

        Raises:
            CheckpointError: If it cannot, or is something else.
        """
        key, entry = index.fqn, self._entry(index.fqn)
        info = self._location(index)
        with self._open(info, key) as file:
            if not isinstance(entry, TensorStorageMetadata):
                check_archive(file, self._named(info, key))
                return
            if sums:
                check_sums(file, self._named(info, key))
            found = stored_tensor(file, self._named(info, key))
        if key not in self._sizes:
            self._sizes[key] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
        sizes = self._sizes[key][index.offset]
        if found is None:  # not as torch.save writes a tensor, but perhaps torch.load can read it
            self._load(key, ChunkStorageMetadata(index.offset, sizes), entry.properties.dtype)
        elif found != StoredTensor(entry.properties.dtype, tuple(sizes)):
            raise self._unlike(info, key, sizes, entry.properties.dtype, f"{found.shape} {found.dtype}")

    def release(self) -> None:
        """Drop the chunk that was read last. It is kept because neighboring parts are often in the same chunk."""
        self._recent = None

    def _chunk(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        if self._recent is not None and self._recent[0] == (key, chunk.offsets):
            return self._recent[1]
        self.release()
        loaded = self._load(key, chunk, dtype)
        self._recent = ((key, chunk.offsets), loaded)
        return loaded

    def _load(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        info = self._location(MetadataIndex(key, chunk.offsets))
        with self._open(info, key) as file:
            loaded = load_object(file, self._named(info, key))
        if not isinstance(loaded, Tensor) or loaded.shape != chunk.sizes or loaded.dtype != dtype:
            found = f"{tuple(loaded.shape)} {loaded.dtype}" if isinstance(loaded, Tensor) else type(loaded).__name__
            raise self._unlike(info, key, chunk.sizes, dtype, found)
        return loaded

    def _unlike(self, info: Any, key: str, sizes: Sequence[int], dtype: torch.dtype, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self._named(info, key)}: .metadata describes {tuple(sizes)} {dtype}, but the file has {found}. They are "
            "not of the same checkpoint: copy it again."
        )

    def _at_row(self, key: str, entry: TensorStorageMetadata, row: int) -> list[ChunkStorageMetadata]:
        """Return the chunks that contain part of ``tensor[row]``.

        A tensor can have tens of thousands of other chunks, of other layers.
        """
        if self._rows is None or self._rows[0] != key:
            rows: dict[int, list[ChunkStorageMetadata]] = {}
            for chunk in filter(lambda chunk: math.prod(chunk.sizes), self._covering(key, entry)):
                for at in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    rows.setdefault(at, []).append(chunk)
            self._rows = (key, rows)
        return self._rows[1].get(row, [])

    def _covering(self, key: str, entry: TensorStorageMetadata) -> list[ChunkStorageMetadata]:
        """Return the chunks of a tensor, after checking that they cover it exactly once and have enough bytes."""
        chunks = list({(chunk.offsets, chunk.sizes): chunk for chunk in entry.chunks}.values())
        filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
        if not _covers_once(entry.size, filled):
            raise CheckpointError(
                f"{self.directory / '.metadata'}: the chunks of {key} have "
                f"{sum(math.prod(chunk.sizes) for chunk in filled):,} elements, its shape {tuple(entry.size)} "
                f"{math.prod(entry.size):,}, and they do not cover it exactly once. A rank did not save its part: use "
                "another checkpoint."
            )
        places = []
        for chunk in filled:  # checked before memory is allocated for them
            info = self._location(MetadataIndex(key, chunk.offsets))
            self._check_length(info, key)
            places.append((info.relative_path, info.offset, info.length))
            if info.length < (needed := math.prod(chunk.sizes) * entry.properties.dtype.itemsize):
                raise CheckpointError(
                    f"{self._named(info, key)}: .metadata describes {needed:,} bytes of values in a file of "
                    f"{info.length:,} bytes. Use another checkpoint."
                )
        for (name, start, length), (following, its_start, _) in itertools.pairwise(sorted(places)):
            if name == following and start + length > its_start:
                raise CheckpointError(
                    f"{self.directory / name}: two chunks of {key} share the bytes at {its_start:,}. Use another "
                    "checkpoint."
                )
        return filled or chunks[:1]

    def _entry(self, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
        try:
            return self.metadata.state_dict_metadata[key]
        except KeyError:
            raise KeyError(f"{self.directory} has no entry {key!r}") from None

    def _tensor_entry(self, key: str) -> TensorStorageMetadata:
        entry = self._entry(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"{self.directory}: {key} is not a tensor")
        return entry

    def _indices(self, key: str) -> list[MetadataIndex]:
        entry = self._entry(key)
        if isinstance(entry, TensorStorageMetadata):
            return [MetadataIndex(key, chunk.offsets) for chunk in entry.chunks]
        return [MetadataIndex(key)]

    def _location(self, index: MetadataIndex) -> Any:
        info = self._where.get((index.fqn, index.offset))
        if info is None:
            raise CheckpointError(
                f"{self.directory / '.metadata'} does not say where {index.fqn} {index.offset} is stored."
            )
        if info.transform_descriptors:
            raise CheckpointError(
                f"{self.directory / info.relative_path}: {index.fqn} was written with {info.transform_descriptors}, "
                "which cannot be read here. Load the checkpoint with torch and save it without extensions."
            )
        return info

    def _named(self, info: Any, key: str) -> str:
        return f"{self.directory / info.relative_path} ({key})"

    @contextlib.contextmanager
    def _open(self, info: Any, key: str) -> Iterator[IO[bytes]]:
        with open_regular(self._check_length(info, key)) as file:
            yield io.BufferedReader(_FileRange(file, info.offset, info.length))

    def _check_length(self, info: Any, key: str) -> Path:
        """Return the file that contains an entry, after checking that it is long enough."""
        try:
            if info.relative_path not in self._files:  # a file can have a hundred thousand entries
                path = inside(self.directory, info.relative_path)
                self._files[info.relative_path] = path, path.stat().st_size
            path, size = self._files[info.relative_path]
        except FileRefused as error:
            raise CheckpointError(f"{self.directory}: {key} cannot be read: {error}.") from None
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{self.directory / info.relative_path} is missing; it contains {key}. Copy the checkpoint again."
            ) from None
        if info.offset + info.length > size:
            raise CheckpointError(
                f"{path} is truncated: it has {size:,} bytes, and {key} is at {info.offset:,} to "
                f"{info.offset + info.length:,}. Copy the checkpoint again."
            )
        return path


MOST_CUT = 8
"""Dimensions in which a tensor may be cut into chunks."""


def _covers_once(shape: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether non-empty chunks cover a tensor of ``shape`` exactly once.

    They do if, at every point, the chunks' corners have the same signs in sum as those of the whole: a box is the sum
    of its corners, one added and the next one subtracted, over everything that lies behind them. Takes a step for each
    corner, however the chunks lie.
    """
    whole = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    if not math.prod(shape):
        return not chunks
    cut = [d for d, n in enumerate(shape) if any(c.offsets[d] or c.sizes[d] != n for c in chunks)]
    if len(cut) > MOST_CUT:
        return False
    signs: dict[tuple[int, ...], int] = {}
    for chunk, sign in [(whole, -1), *((chunk, 1) for chunk in chunks)]:
        corners: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for d in cut:
            low, high = chunk.offsets[d], chunk.offsets[d] + chunk.sizes[d]
            corners = [each for at, s in corners for each in (((*at, low), s), ((*at, high), -s))]
        for at, s in corners:
            signs[at] = signs.get(at, 0) + s
    return not any(signs.values())


class _FileRange(io.RawIOBase):
    """A part of a file, as a file object."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        wanted = memoryview(buffer)[: max(self._length - self._at, 0)]
        count: int = self._file.readinto(wanted) or 0  # type: ignore[attr-defined]
        self._at += count
        return count
