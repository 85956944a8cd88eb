"""Reading ``.metadata`` of a checkpoint, a plain pickle, without running code that it may contain.

torch's own safe unpickler (``weights_only=True``) reads protocol 2 only, and DCP writes protocol 4: so the pickle
becomes inert records first, of which torch's metadata is made here.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.untrusted_files import FileRefused, child, inside, read_bytes, safe_name, typed, whole

from .errors import CheckpointError, raise_damaged
from .inert_pickles import InertObject, InertUnpickler, checked_size, dict_of, record_of, set_of

MOST_METADATA_BYTES = 4 << 30

_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    # Tensor properties in checkpoints of torch 2.0.
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    # What every rank has written: Megatron 0.19 appends it, for the next save. Nothing here reads it.
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
}


def _path_of(*parts: Any) -> str:
    """Stand for a path. Its length is limited: joined with itself again and again, it would double each time."""
    return "/".join(map(safe_name, parts))


class _MetadataUnpickler(InertUnpickler):
    """Builds records of the classes that metadata has.

    Raises:
        CheckpointError: If another class is named.
    """

    known: ClassVar[dict[tuple[str, str], Any]] = {
        **{(module, name): record_of(name) for module, names in _RECORDS.items() for name in names},
        **{
            (module, name): _path_of
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
        },
        ("torch", "Size"): tuple,
        ("builtins", "tuple"): tuple,
        ("builtins", "list"): list,
        ("builtins", "set"): set_of,
        ("collections", "OrderedDict"): dict_of,
        ("torch.serialization", "_get_layout"): lambda name: _LAYOUTS[safe_name(name)],
    }

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except KeyError:
            raise CheckpointError(
                f"{self._path} asks for the class {module}.{name}, which no checkpoint's metadata needs. Unpickling it "
                "could run arbitrary code, so it was not loaded. Do not use this checkpoint unless you know who wrote "
                "it."
            ) from None


def load_metadata(path: Path) -> Metadata:
    """Read a ``.metadata`` file without importing or calling anything that it names.

    Reads what torch 2.0 to 2.15 write. The result always has Megatron's ``mcore_data`` (facts, by tensor name).

    Raises:
        CheckpointError: If the file is missing, damaged, not metadata of a checkpoint, or names another class. The
            message names the file.
    """
    try:
        top = _MetadataUnpickler(
            io.BytesIO(read_bytes(inside(path.parent, path.name), MOST_METADATA_BYTES)), path
        ).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: it is not a checkpoint of torch.distributed.checkpoint, or its save "
            "was interrupted."
        ) from None
    except (CheckpointError, OSError):
        raise
    except FileRefused as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise_damaged(path, error)
    try:
        return _metadata(top)
    except Exception as error:
        raise_damaged(path, error)


def _metadata(top: Any) -> Metadata:
    state = _state(top, "Metadata")
    entries = typed(state["state_dict_metadata"], dict, "state_dict_metadata")
    metadata = Metadata(
        state_dict_metadata={safe_name(key): _entry(value) for key, value in entries.items()},
        planner_data=_paths(state.get("planner_data")),
        storage_data=dict(_location(*item) for item in (state["storage_data"] or {}).items()),
        storage_meta=StorageMeta(),
    )
    if state.get("version") is not None:
        metadata.version = safe_name(state["version"])
    noted = typed(state.get("mcore_data") or {}, dict, "mcore_data")
    metadata.mcore_data = {  # type: ignore[attr-defined]
        safe_name(key): _plain(typed(facts, dict, "a note of Megatron")) for key, facts in noted.items()
    }
    return metadata


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, InertObject) and record.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    # The length of this tuple depends on the version of torch: 2.15 appends strides, which older versions cannot read.
    dtype, _, requires_grad, *_ = _state(state["properties"], "TensorProperties", tuple)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is {dtype!r:.80}")
    size = checked_size(state["size"])
    whole(math.prod(max(n, 1) for n in size) * dtype.itemsize, "the bytes of a tensor")  # torch computes with these
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in typed(state["chunks"], list, "chunks")]
    found = [ChunkStorageMetadata(checked_size(chunk["offsets"]), checked_size(chunk["sizes"])) for chunk in chunks]
    if odd := [chunk for chunk in found if not len(chunk.offsets) == len(chunk.sizes) == len(size)]:
        raise ValueError(
            f"a tensor with {len(size)} dimensions has a chunk {tuple(odd[0].sizes)} at {tuple(odd[0].offsets)}"
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype, requires_grad=bool(requires_grad)), size=size, chunks=found
    )


def _location(index: Any, info: Any) -> tuple[MetadataIndex, Any]:
    at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    path = safe_name(where["relative_path"])
    child(Path(), path)
    offset, length = whole(where["offset"], "an offset"), whole(where["length"], "a length")
    offsets = None if at.get("offset") is None else checked_size(at["offset"])
    number = None if at.get("index") is None else whole(at["index"], "the number of a chunk")
    descriptors = where.get("transform_descriptors")
    if descriptors is not None:
        descriptors = tuple(safe_name(name) for name in typed(descriptors, (list, tuple), "transform_descriptors"))
    return MetadataIndex(safe_name(at["fqn"]), offsets, number), compat.storage_info(path, offset, length, descriptors)


def _paths(data: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Return the paths of entries in nested dictionaries and lists, or None: planners may store anything here.

    Raises:
        FileRefused: If a list would have more elements than there are entries.
    """
    if not isinstance(data, dict) or not all(type(path) is tuple for path in data.values()):
        return None
    known = all(type(step) in (str, int) for path in data.values() for step in path)
    if not known or not all(isinstance(key, str) for key in data):
        return None
    for path in data.values():
        for step in path:
            if type(step) is int:
                whole(step, "the place of an entry in a list", 0, len(data) - 1)
    return data


def _plain(value: Any, depth: int = 0) -> Any:
    """Check that one of Megatron's facts consists of numbers, strings, dtypes and nested collections of them."""
    if depth > 8:
        raise ValueError("notes are nested too deep")
    if type(value) in (tuple, list):
        return type(value)(_plain(held, depth + 1) for held in value)
    if type(value) is dict:
        return {safe_name(key): _plain(held, depth + 1) for key, held in value.items()}
    if value is not None and type(value) not in (bool, int, float, str, torch.dtype):
        raise ValueError(f"a note is of type {type(value).__name__}")
    return value


def _state(record: Any, kind: str, of: type = dict) -> Any:
    if not isinstance(record, InertObject) or record.kind != kind or type(record.state) is not of:
        raise ValueError(f"expected a {kind}, found {getattr(record, 'kind', '') or type(record).__name__}")
    return record.state
