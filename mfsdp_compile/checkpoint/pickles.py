"""Reading the pickles in checkpoints without running code that they may contain.

A checkpoint contains pickles in two places. ``.metadata`` is a plain pickle: :func:`load_metadata` unpickles it into
inert records, and builds torch's metadata from them. Everything else (tensors, bytes entries, ``common.pt``) was
written by ``torch.save``: :func:`load_object` reads it with ``weights_only=True`` and a short list of additional
classes. Classes of Megatron and Transformer Engine, as in the training arguments of ``common.pt``, are neither imported
nor refused: a :class:`Foreign` object stands in for them, and is written back under the original name.
"""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import io
import math
import pickle
import signal
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

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
from mfsdp_compile.runtime.untrusted_files import FileRefused, child, inside, read_bytes, safe_name, typed, whole

__all__ = [
    "CheckpointError",
    "Foreign",
    "StoredTensor",
    "check_archive",
    "check_sums",
    "dump_object",
    "load_metadata",
    "load_object",
    "stored_tensor",
]


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, not what was asked for, or holds something that is not safe to load."""


# -- .metadata --------------------------------------------------------------------------------------------------------

_METADATA_MODULES = frozenset(
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
    | {"torch.distributed._shard.sharded_tensor.metadata"}  # tensor properties in checkpoints of torch 2.0
)
_METADATA_NAMES = frozenset(
    {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"}
    | {"MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"}
)
_PLAN_MODULE = "torch.distributed.checkpoint.planner"
_PLAN_NAMES = frozenset({"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"})
"""What every rank has written: Megatron 0.19 appends it, for the next save. Nothing here reads it."""
_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})
_LAYOUTS = {str(layout): layout for layout in (torch.strided, torch.sparse_coo, torch.sparse_csr)}

MOST_METADATA_BYTES = 4 << 30
MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class _NamedClass:
    """Stands for a class that a pickle names."""

    name: str


class _InertObject:
    """Stands for an object of a pickle: the name of its class, its constructor arguments, and its state."""

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: str, arguments: tuple[Any, ...]) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = {}


def _make(kind: Any, arguments: Any) -> Any:
    """Return the result of calling a class in a pickle.

    Raises:
        ValueError: If it is not a class, or metadata never calls it with such arguments.
    """
    if not isinstance(kind, _NamedClass) or type(arguments) is not tuple:
        raise ValueError("the pickle calls something that is not a class")
    if kind.name == "Size":
        (numbers,) = arguments
        return tuple(numbers) if type(numbers) in (tuple, list) else _refuse(kind)
    if kind.name in ("tuple", "list", "set", "OrderedDict"):
        if kind.name == "OrderedDict" and not arguments:
            return {}
        (items,) = arguments or ((),)
        if type(items) not in (tuple, list):
            return _refuse(kind)
        made: dict[str, Any] = {"tuple": tuple, "list": list, "set": _as_set, "OrderedDict": _as_dict}
        return made[kind.name](items)
    if kind.name == "_get_layout":
        (name,) = arguments
        return _LAYOUTS[_text(name)]
    if kind.name in _PATHS:
        return "/".join(map(_text, arguments))
    return _InertObject(kind.name, arguments)


def _refuse(kind: _NamedClass) -> Any:
    raise ValueError(f"{kind.name} is called with arguments that metadata never has")


def _as_key(key: Any) -> Any:
    """Check a key of a dictionary or an element of a set. Hashing a million nested tuples would crash the process."""
    if type(key) is tuple and all(type(item) in (int, str) for item in key):
        return key
    if type(key) not in (str, int, bool, float, bytes, _InertObject, type(None)):
        raise ValueError(f"a {type(key).__name__} is a dictionary key or in a set")
    return key


def _as_set(items: Any) -> set[Any]:
    return {_as_key(item) for item in items}


def _as_dict(items: Any) -> dict[Any, Any]:
    return {_as_key(key): value for key, value in items}


_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _MetadataUnpickler(_Unpickler):  # type: ignore[misc]
    """Builds only records, dictionaries, lists, tuples, sets, numbers and strings. Never calls or changes a class.

    It is the Python implementation, in which each operation can be replaced. The C implementation lets a pickle set
    attributes of objects that it names, and allocates memory for the highest index that it mentions.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module in _METADATA_MODULES and name in _METADATA_NAMES:
            return _NamedClass(name)
        if module == _PLAN_MODULE and name in _PLAN_NAMES:
            return _NamedClass(name)
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) in {
            ("torch", "Size"),
            ("builtins", "tuple"),
            ("builtins", "list"),
            ("builtins", "set"),
            ("collections", "OrderedDict"),
            ("torch.serialization", "_get_layout"),
        } or (module in ("pathlib", "pathlib._local") and name in _PATHS):
            return _NamedClass(name)
        raise CheckpointError(
            f"{self._path} asks for the class {module}.{name}, which no checkpoint's metadata needs. Unpickling it "
            "could run arbitrary code, so it was not loaded. Do not use this checkpoint unless you know who wrote it."
        )

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = _make(self.stack[-1], arguments)

    def _newobj_ex(self) -> None:
        named = self.stack.pop()
        if named != {}:
            raise ValueError("a class is called with keyword arguments")
        self._reduce()

    def _build(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is not _InertObject:
            raise ValueError(f"the pickle sets the state of a {type(self.stack[-1]).__name__}")
        self.stack[-1].state = state

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._of(dict)[_as_key(key)] = value

    def _setitems(self) -> None:
        items = self.pop_mark()
        self._of(dict).update(zip(map(_as_key, items[::2]), items[1::2], strict=True))

    def _append(self) -> None:
        value = self.stack.pop()
        self._of(list).append(value)

    def _appends(self) -> None:
        items = self.pop_mark()
        self._of(list).extend(items)

    def _additems(self) -> None:
        items = self.pop_mark()
        self._of(set).update(map(_as_key, items))

    def _frozenset(self) -> None:
        self.append(_as_set(self.pop_mark()))

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append(dict(zip(map(_as_key, items[::2]), items[1::2], strict=True)))

    def _of(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"the pickle adds to a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _never(self) -> None:
        raise ValueError("it has an opcode that metadata never has")

    dispatch |= {
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,
        pickle.NEWOBJ_EX[0]: _newobj_ex,
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _additems,
        pickle.FROZENSET[0]: _frozenset,
        pickle.DICT[0]: _dict,
    }
    dispatch |= dict.fromkeys(
        (
            code[0]
            for code in (
                *(pickle.INST, pickle.OBJ, pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
                *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
            )
        ),
        _never,
    )


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
    entries = typed(state["state_dict_metadata"], dict, "state_dict_metadata")
    metadata = Metadata(
        state_dict_metadata={_text(key): _entry(value) for key, value in entries.items()},
        planner_data=_paths(state.get("planner_data")),
        storage_data=dict(_location(*item) for item in (state["storage_data"] or {}).items()),
        storage_meta=StorageMeta(),
    )
    if state.get("version") is not None:
        metadata.version = _text(state["version"])
    noted = typed(state.get("mcore_data") or {}, dict, "mcore_data")
    metadata.mcore_data = {  # type: ignore[attr-defined]
        _text(key): _plain(typed(facts, dict, "a note of Megatron")) for key, facts in noted.items()
    }
    return metadata


def _entry(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, _InertObject) and record.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(record, "TensorStorageMetadata")
    # The length of this tuple depends on the version of torch: 2.15 appends strides, which older versions cannot read.
    dtype, _, requires_grad, *_ = _state(state["properties"], "TensorProperties", tuple)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a dtype is {dtype!r:.80}")
    size = _size(state["size"])
    whole(math.prod(max(n, 1) for n in size) * dtype.itemsize, "the bytes of a tensor")  # torch computes with these
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in typed(state["chunks"], list, "chunks")]
    found = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    if odd := [chunk for chunk in found if not len(chunk.offsets) == len(chunk.sizes) == len(size)]:
        raise ValueError(
            f"a tensor with {len(size)} dimensions has a chunk {tuple(odd[0].sizes)} at {tuple(odd[0].offsets)}"
        )
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype, requires_grad=bool(requires_grad)), size=size, chunks=found
    )


def _location(index: Any, info: Any) -> tuple[MetadataIndex, Any]:
    at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
    path = _text(where["relative_path"])
    child(Path(), path)
    offset, length = whole(where["offset"], "an offset"), whole(where["length"], "a length")
    offsets = None if at.get("offset") is None else _size(at["offset"])
    number = None if at.get("index") is None else whole(at["index"], "the number of a chunk")
    descriptors = where.get("transform_descriptors")
    if descriptors is not None:
        descriptors = tuple(_text(name) for name in typed(descriptors, (list, tuple), "transform_descriptors"))
    return MetadataIndex(_text(at["fqn"]), offsets, number), compat.storage_info(path, offset, length, descriptors)


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
        return {_text(key): _plain(held, depth + 1) for key, held in value.items()}
    if value is not None and type(value) not in (bool, int, float, str, torch.dtype):
        raise ValueError(f"a note is of type {type(value).__name__}")
    return value


def _state(record: Any, kind: str, of: type = dict) -> Any:
    if not isinstance(record, _InertObject) or record.kind != kind or type(record.state) is not of:
        raise ValueError(f"expected a {kind}, found {getattr(record, 'kind', '') or type(record).__name__}")
    return record.state


def _size(numbers: Any) -> torch.Size:
    if len(typed(numbers, (tuple, list), "a shape")) > MOST_DIMENSIONS:
        raise ValueError(f"a shape has {len(numbers):,} dimensions")
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 63:
            whole(number, "a size or an offset")
    return torch.Size(numbers)


def _text(value: Any) -> str:
    return safe_name(value)


# -- torch.save archives ----------------------------------------------------------------------------------------------

FOREIGN_PACKAGES = ("megatron", "transformer_engine", "nemo")
"""Packages whose objects appear in training arguments. They need not be installed, and are not imported if they are."""


class Foreign:
    """Stands for an object whose class was not imported: the class's name, its constructor arguments, and its state.

    Two are equal if all three are equal. :func:`dump_object` writes it as the object that it stands for.
    """

    called = False
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> Foreign:
        self = super().__new__(cls)
        self.arguments, self.state = arguments, None
        return self

    def __init__(self, *arguments: Any) -> None:
        self.called = True  # not only created with __new__, as unpickling does with ordinary objects

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
    """Writes the class of a foreign object by its name. The C pickler would import the class first."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, Foreign) and obj is not Foreign:
            self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def dump_object(value: Any) -> bytes:
    """Serialize with ``torch.save`` to bytes; :class:`Foreign` objects are written under their original names."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=types.SimpleNamespace(__name__="pickle", Pickler=_NamedPickler))
    return buffer.getvalue()


def load_object(file: IO[bytes], where: Path | str) -> Any:
    """Load what ``torch.save`` wrote to ``file``, on the CPU.

    Args:
        file: Seekable file.
        where: Name of the file and the entry in it, for messages.

    Raises:
        CheckpointError: If it is damaged, or holds objects of a class that is not known to be harmless. The message
            names the class.
    """
    check_sums(file, where)
    try:
        with torch.serialization.safe_globals([*_ADMITTED]):
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        refused = sorted(name for name in unknown if name.partition(".")[0] not in FOREIGN_PACKAGES)
        if refused:
            raise CheckpointError(
                f"{where} holds objects of {', '.join(refused)}. Loading them could run arbitrary code, so they were "
                "not loaded. If you trust whoever wrote the file, load it with torch.load(weights_only=False) and "
                "save it again without them."
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
    """Compare the contents of a ``torch.save`` archive with its checksums, which torch itself does not check.

    Raises:
        CheckpointError: If a byte has changed, or see :func:`check_archive`. Files written under
            ``torch.serialization.set_crc32_options(False)`` cannot be checked, because all their checksums are 0.
    """
    with _archive(file, where) as archive:
        wrong = archive.testzip() if any(item.CRC for item in archive.infolist()) else None
        if wrong is not None:
            raise _damaged(where, f"the checksum of {wrong} differs")


def check_archive(file: IO[bytes], where: Path | str) -> None:
    """Check that reading a ``torch.save`` archive does not take more memory than its size. Reads no values.

    Raises:
        CheckpointError: If it does, because it is compressed or its parts overlap, or if the file is cut short.
    """
    with _archive(file, where):
        pass


@contextlib.contextmanager
def _archive(file: IO[bytes], where: Path | str) -> Iterator[zipfile.ZipFile]:
    """Open a ``torch.save`` archive that is no larger than its file. Rewinds ``file`` at both ends."""
    try:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            items = archive.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED for item in items):
                raise ValueError("it is compressed, which torch.save does not do")
            if (claimed := sum(item.file_size for item in items)) > size:
                raise ValueError(f"its parts have {claimed:,} bytes, all of it {size:,}")
            if len({item.filename for item in items}) < len(items):
                raise ValueError("two of its parts have the same name")
            yield archive
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise _damaged(where, error) from error
    file.seek(0)


@dataclass(frozen=True)
class StoredTensor:
    """Dtype and shape of a tensor in an archive."""

    dtype: torch.dtype
    shape: tuple[int, ...]


_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "UntypedStorage": torch.uint8,
}


@dataclass(frozen=True)
class _StoredValues:
    """Values of tensors in an archive: a part of it with ``bytes`` bytes."""

    dtype: torch.dtype
    part: str
    bytes: int


class _TensorUnpickler(_MetadataUnpickler):
    """Reads the description of a plain tensor in an archive of ``torch.save``, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if (module, name) == ("collections", "OrderedDict") or name in _STORAGES or module == "torch._utils":
            return _NamedClass(name)
        return _refuse(_NamedClass(name))

    def persistent_load(self, found: Any) -> _StoredValues:
        kind, storage, part, _, count = found
        dtype = _STORAGES[storage.name]
        if kind != "storage" or type(part) is not str:
            _refuse(storage)
        return _StoredValues(dtype, part, whole(count, "a number of elements") * dtype.itemsize)

    def _reduce(self) -> None:
        arguments = self.stack.pop()
        named = self.stack[-1]
        if named == _NamedClass("OrderedDict") and arguments == ():
            self.stack[-1] = {}
        elif named == _NamedClass("_rebuild_parameter"):
            self.stack[-1] = arguments[0]
        elif named in (_NamedClass("_rebuild_tensor_v2"), _NamedClass("_rebuild_tensor_v3")):
            self.stack[-1] = _strided(*arguments)
        else:
            _refuse(named)

    dispatch: ClassVar[dict[int, Any]] = _MetadataUnpickler.dispatch | {
        pickle.REDUCE[0]: _reduce,
        pickle.BINPERSID[0]: _Unpickler.load_binpersid,
    }


def _strided(
    values: _StoredValues, offset: Any, shape: Any, stride: Any, _: Any, hooks: Any, dtype: Any = None, *rest: Any
) -> tuple[_StoredValues, StoredTensor]:
    """Return the values and the description of a tensor that torch would make of these arguments.

    Raises:
        ValueError: If it reaches beyond its values.
    """
    dtype = dtype if isinstance(dtype, torch.dtype) else values.dtype
    sizes, steps = _size(shape), _size(stride)
    reach = whole(offset, "an offset") + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) + 1
    if 0 not in sizes and reach * dtype.itemsize > values.bytes:
        _refuse(_NamedClass("_rebuild_tensor"))
    return values, StoredTensor(dtype, tuple(sizes))


def stored_tensor(file: IO[bytes], where: Path | str) -> StoredTensor | None:
    """Describe the tensor in a ``torch.save`` archive that :func:`load_object` can load, without reading its values.

    Returns:
        The description. None: the archive does not hold a plain tensor, or is not as ``torch.save`` writes it.

    Raises:
        CheckpointError: See :func:`check_archive`.
    """
    with _archive(file, where) as archive:
        folder = archive.infolist()[0].filename.partition("/")[0]
        try:
            pickled = archive.read(f"{folder}/data.pkl")
            values, tensor = _TensorUnpickler(io.BytesIO(pickled), Path(where)).load()
            with archive.open(f"{folder}/data/{values.part}"):  # compares its two headers
                has_all = archive.getinfo(f"{folder}/data/{values.part}").file_size == values.bytes
        except Exception:  # whatever it is, it is not a plain tensor
            return None
        return tensor if has_all else None


def _admitted() -> Iterator[Any]:
    yield from (argparse.Namespace, types.SimpleNamespace, signal.Signals)
    yield from ((type(Path()), f"{module}.{name}") for module in ("pathlib", "pathlib._local") for name in _PATHS)
    # NumPy arrays and scalars: states of its random number generators, and values from argument parsers.
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]  # type: ignore[index]
    for package in ("numpy._core", "numpy.core"):
        yield from ((reconstruct, f"{package}.multiarray._reconstruct"), (scalar, f"{package}.multiarray.scalar"))
    yield from (np.ndarray, np.dtype)
    yield from {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}


_ADMITTED = tuple(_admitted())
