"""Pickles in checkpoints, read without running what a stranger may have put into them.

A checkpoint has pickles in two places. ``.metadata`` is a plain one: :func:`load_metadata` unpickles it into inert
records, of classes made for the occasion, and builds torch's metadata from what they hold. Everything else (tensors, bytes
entries, ``common.pt``) was written by ``torch.save``: :func:`load_object` reads it with ``weights_only=True`` and a short
list of further classes. Classes of Megatron and Transformer Engine, as in the training arguments of ``common.pt``, are
neither imported nor refused: a :class:`Foreign` object keeps their place, and is written again under the old name.
"""

from __future__ import annotations

import argparse
import copyreg
import io
import pathlib
import pickle
import signal
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
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

__all__ = ["CheckpointError", "Foreign", "check_sums", "dump_object", "load_metadata", "load_object"]


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, not what was asked for, or holds what is not safe to load."""


# -- .metadata --------------------------------------------------------------------------------------------------------

_METADATA_MODULES = frozenset(
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
    | {"torch.distributed._shard.sharded_tensor.metadata"}  # tensor properties, in checkpoints of torch 2.0
)
_METADATA_NAMES = frozenset(
    {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"}
    | {"MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}
)
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})


class _Record:
    """What an object of a pickle becomes: the name of its class, and its state."""

    kind = ""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path
        self._kinds: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module in _METADATA_MODULES and name in _METADATA_NAMES:
            return self._kinds.setdefault(name, type(name, (_Record,), {"kind": name}))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in {("torch", "Size"), ("builtins", "tuple"), ("builtins", "list"), ("builtins", "set")}:
            return {"Size": tuple}.get(name) or {"tuple": tuple, "list": list, "set": set}[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}.__getitem__
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath
        raise CheckpointError(
            f"{self._path} asks for the class {module}.{name}, which no checkpoint's metadata needs. Unpickling it could "
            "run any code, so it was not loaded. Do not use this checkpoint unless you know who wrote it."
        )


def load_metadata(path: Path) -> Metadata:
    """What a ``.metadata`` file says, without importing or calling anything that it names.

    Reads what torch 2.0 to 2.15 write, with Megatron's ``mcore_data`` (tensor name to its facts), which is always there.

    Raises:
        CheckpointError: missing, damaged, not a checkpoint's metadata, or naming another class; with the file's name.
    """
    try:
        with path.open("rb") as file:
            top = _MetadataUnpickler(file, path).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}: it is not a checkpoint of torch.distributed.checkpoint, or one whose "
            "saving was cut off before its end."
        ) from None
    except (CheckpointError, OSError):
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise _damaged(path, error) from error
    try:
        return _metadata(top)
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(where: Path | str, error: BaseException | str) -> CheckpointError:
    what = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"{where} is damaged or cut short ({what}). Copy the checkpoint again, or use an earlier one."
    )


def _metadata(top: Any) -> Metadata:
    state = _state(top, "Metadata")
    metadata = Metadata(
        state_dict_metadata={_text(key): _entry(value) for key, value in state["state_dict_metadata"].items()},
        planner_data=_paths(state.get("planner_data")),
        storage_data=dict(_location(*item) for item in (state["storage_data"] or {}).items()),
        storage_meta=StorageMeta(),
    )
    if "version" in state:
        metadata.version = state["version"]
    metadata.mcore_data = dict(state.get("mcore_data") or {})  # type: ignore[attr-defined]
    return metadata


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _Record) and record.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    # A tuple whose length depends on the version of torch: 2.15 added strides at its end, at which older ones fail.
    dtype, _, requires_grad, *_ = _state(state["properties"], "TensorProperties", tuple)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is {dtype!r}")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype, requires_grad=bool(requires_grad)),
        size=_size(state["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _location(index: Any, info: Any) -> tuple[MetadataIndex, Any]:
    at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    path, offset, length = _text(where["relative_path"]), int(where["offset"]), int(where["length"])
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or pathlib.PureWindowsPath(path).drive:
        raise ValueError(f"a part lies outside of the checkpoint, at {path!r}")
    if offset < 0 or length < 0:
        raise ValueError(f"a part lies at bytes {offset} to {offset + length} of {path!r}")
    offsets = None if at.get("offset") is None else _size(at["offset"])
    found = MetadataIndex(_text(at["fqn"]), offsets, at.get("index"))
    return found, compat.storage_info(path, offset, length, where.get("transform_descriptors"))


def _paths(data: Any) -> dict[str, tuple[str | int, ...]] | None:
    """Where in nested dictionaries the entries were, if that is what it says; planners may note anything there."""
    if not isinstance(data, dict) or not all(isinstance(path, tuple) for path in data.values()):
        return None
    known = all(isinstance(step, str | int) for path in data.values() for step in path)
    return data if known and all(isinstance(key, str) for key in data) else None


def _state(record: Any, kind: str, of: type = dict) -> Any:
    if not isinstance(record, _Record) or record.kind != kind or not isinstance(record.state, of):
        raise ValueError(f"expected a {kind}, found {getattr(record, 'kind', '') or type(record).__name__}")
    return record.state


def _size(numbers: Any) -> torch.Size:
    return torch.Size([int(n) for n in numbers])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a name, found {type(value).__name__}")
    return value


# -- what torch.save wrote --------------------------------------------------------------------------------------------

FOREIGN_PACKAGES = ("megatron", "transformer_engine", "nemo")
"""Packages whose objects training arguments hold. They need not be installed, and are not imported if they are."""


class Foreign:
    """Stands for an object whose class was not imported: the class's name, the arguments it was made with, its state.

    Two are equal if all three are. :func:`dump_object` writes it as what it stands for.
    """

    called = False
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Foreign:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __init__(self, *arguments: Any) -> None:
        self.called = True  # and not only made, as unpickling does with ordinary objects

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        made = (type(self), self.arguments) if self.called else (copyreg.__newobj__, (type(self), *self.arguments))  # type: ignore[attr-defined]
        return made if self.state is None else (*made, self.state)

    def _identity(self) -> tuple[Any, ...]:
        return type(self).__module__, type(self).__qualname__, self.arguments, self.state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Foreign) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity()[:2])

    def __repr__(self) -> str:
        held = ", ".join(map(repr, self.arguments)) + ("" if self.state is None else f", state={self.state!r}")
        return f"{type(self).__module__}.{type(self).__qualname__}({held})"


_Pickler: Any = pickle._Pickler  # type: ignore[attr-defined]


class _NamedPickler(_Pickler):  # type: ignore[misc]
    """Writes the class of a foreign object by its name; the pickler in C would import it first."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, Foreign) and obj is not Foreign:
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def dump_object(value: Any) -> bytes:
    """``torch.save`` into memory; :class:`Foreign` objects go under their own names."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=_NamedPickler))
    return buffer.getvalue()


def load_object(file: IO[bytes], where: Path | str) -> Any:
    """What ``torch.save`` wrote into ``file``, on the CPU.

    Args:
        file: seekable, at its start.
        where: names the file, and the entry in it, in messages.

    Raises:
        CheckpointError: damaged, or it holds objects of a class that is not known to be harmless, which is named.
    """
    check_sums(file, where)
    try:
        with torch.serialization.safe_globals([*_ADMITTED]):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        refused = sorted(name for name in unknown if name.partition(".")[0] not in FOREIGN_PACKAGES)
        if refused:
            raise CheckpointError(
                f"{where} holds objects of {', '.join(refused)}. Loading them could run any code, so they were not "
                "loaded. If you trust whoever wrote the file, load it with torch.load(weights_only=False) and save it "
                "again without them."
            )
        foreign = [(_foreign_class(name), name) for name in unknown]
        file.seek(0)
        with torch.serialization.safe_globals([*_ADMITTED, *foreign]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise _damaged(where, error) from error


def _foreign_class(name: str) -> type[Foreign]:
    module, _, qualified = name.rpartition(".")
    return type(qualified, (Foreign,), {"__module__": module, "__qualname__": qualified})


def check_sums(file: IO[bytes], where: Path | str) -> None:
    """Compare a ``torch.save`` archive's contents with its checksums, which torch itself does not look at.

    Raises:
        CheckpointError: a byte has changed, or the file is cut short. Nothing is known of files that were written
            under ``torch.serialization.set_crc32_options(False)``, whose checksums are all 0.
    """
    try:
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            wrong = archive.testzip() if any(item.CRC for item in archive.infolist()) else None
    except OSError:
        raise
    except Exception as error:
        raise _damaged(where, error) from error
    if wrong is not None:
        raise _damaged(where, f"the checksum of {wrong} differs")
    file.seek(0)


def _admitted() -> Iterator[Any]:
    yield from (argparse.Namespace, types.SimpleNamespace, signal.Signals)
    yield from ((type(Path()), f"{module}.{name}") for module in ("pathlib", "pathlib._local") for name in _PATHS)
    # Arrays and numbers of numpy: states of its random number generators, and what argument parsers make.
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]  # type: ignore[index]
    for package in ("numpy._core", "numpy.core"):
        yield from ((reconstruct, f"{package}.multiarray._reconstruct"), (scalar, f"{package}.multiarray.scalar"))
    yield from (np.ndarray, np.dtype)
    yield from {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}


_ADMITTED = tuple(_admitted())
