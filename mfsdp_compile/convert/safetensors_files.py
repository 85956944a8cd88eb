"""Reading and writing safetensors files one tensor at a time, and folders of them as Hugging Face writes them.

The library, and DCP's HuggingFaceStorageWriter with it, can only write a file from tensors that are all in memory. The
format is simple enough to write without it:
the length of a header (8 bytes, little endian), the header (JSON, from name to dtype, shape and position), and the
bytes of the tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.runtime.untrusted_files import (
    FileRefused,
    inside,
    new_file,
    open_regular,
    parse_json,
    read_json,
    safe_name,
    typed,
    write_text,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The format's names for the dtypes that it supports."""

MOST_HEADER_BYTES = 100_000_000
"""The library's limit."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsReader:
    """The tensors of a ``.safetensors`` file, or of a folder with one or several.

    Raises:
        CheckpointError: If safetensors is not installed, there is no such file, or a file is damaged or missing.
    """

    def __init__(self, path: Path) -> None:
        self._open = _library()
        self.layouts: dict[str, Layout] = {}
        self._file_of: dict[str, Path] = {}
        files, listed = _files(path)
        for file in files:
            for name, layout in self._layouts_of(file).items():
                if listed is None or listed.get(name) == file:
                    self.layouts[name], self._file_of[name] = layout, file
        for name, file in (listed or {}).items():
            if name not in self.layouts:
                raise CheckpointError(f"{file} has no {name}, which {INDEX} lists. Copy the folder again.")

    def tensor(self, name: str) -> Tensor:
        with self._opened(self._file_of[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor

    def part(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return ``tensor[index]``. The rest of the tensor is not read."""
        with self._opened(self._file_of[name]) as opened:
            part: Tensor = opened.get_slice(name)[index] if index else opened.get_tensor(name)
            return part

    def _layouts_of(self, file: Path) -> dict[str, Layout]:
        header = _header(file)
        with self._opened(file):  # the library checks entries and positions
            header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{file}: {name} has dtype {entry['dtype']}, which is not supported.")
        return {name: Layout(tuple(entry["shape"]), DTYPES[entry["dtype"]]) for name, entry in header.items()}

    def _opened(self, file: Path) -> Any:
        try:
            return self._open(file, framework="pt")
        except Exception as error:  # SafetensorError, which cannot be imported without the library
            raise CheckpointError(f"{file} is damaged or cut short ({error}). Copy it again.") from error


def _library() -> Callable[..., Any]:
    try:
        from safetensors import safe_open
    except ImportError:
        raise CheckpointError(
            "Reading .safetensors needs the package safetensors: pip install 'mfsdp-compile[models]'"
        ) from None
    return safe_open  # type: ignore[no-any-return]


def _files(path: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Return the files to read, and the file of each tensor, if an index says so."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.")
    if path.is_file():
        return [path], None
    if (path / INDEX).exists():
        try:
            index = typed(read_json(inside(path, INDEX)), dict, "it")
            found = typed(index.get("weight_map"), dict, "weight_map").items()
            listed = {safe_name(name, "the name of a tensor"): inside(path, file) for name, file in found}
        except FileRefused as error:
            raise CheckpointError(f"{path / INDEX} is damaged ({error}). Copy it again.") from error
        return sorted(set(listed.values())), listed
    files = [file for file in sorted(path.iterdir()) if file.name.endswith(".safetensors")]
    if len(files) != 1:
        raise CheckpointError(
            f"{path} has {len(files)} .safetensors files and no {INDEX}. A folder saved by Hugging Face's "
            "save_pretrained has one file or an index. Folders with .bin files must be saved again as .safetensors."
        )
    try:
        return [inside(path, files[0].name)], None
    except FileRefused as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None


def _header(file: Path) -> dict[str, Any]:
    """Read a file's header, and check what the library does not: that names occur once, and suit a terminal.

    Raises:
        CheckpointError: If they do not, or the file is cut short or not a file.
    """
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
                raise FileRefused(f"its header has {length:,} bytes, all of it {size:,}")
            header = typed(parse_json(opened.read(length).decode("utf-8")), dict, "the header")
        for name in header:
            safe_name(name, "the name of a tensor")
        return header
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing. Copy the folder again.") from None
    except (FileRefused, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error}). Copy it again.") from None


def split_into_files(layouts: Mapping[str, Layout], max_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors over files, in order. A file exceeds ``max_bytes`` only if a single tensor does.

    Returns:
        Names of tensors by file name.
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, layout in layouts.items():
        if shards[-1] and used + layout.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += layout.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards)}


def write_file(path: Path, layouts: Mapping[str, Layout], names: Sequence[str], read: Callable[[str], Tensor]) -> None:
    """Write the tensors ``names``, which ``read`` returns one after the other.

    Raises:
        CheckpointError: If the format does not support a dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        layout = layouts[name]
        if layout.dtype not in _CODES:
            raise CheckpointError(f"{name} has dtype {layout.dtype}, which .safetensors does not have. Use --dtype.")
        end = offset + layout.nbytes
        header[name] = {"dtype": _CODES[layout.dtype], "shape": list(layout.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with new_file(path.parent, path.name) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            # No reference keeps a tensor alive while the next one is read.
            file.write(memoryview(read(name).contiguous().reshape(-1).view(torch.uint8).numpy()))


def write_index(folder: Path, layouts: Mapping[str, Layout], files: Mapping[str, Sequence[str]]) -> None:
    """Write the index that says which file contains which tensor, if there are several files."""
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        total = sum(layouts[name].nbytes for name in weight_map)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
