"""Archives of ``torch.save``, read without running code that they may contain: tensors, bytes entries, ``common.pt``.

:func:`load_object` loads with ``weights_only=True`` and a short list of additional classes. Classes of Megatron and
Transformer Engine, as in the training arguments of ``common.pt``, are neither imported nor refused: a :class:`Foreign`
object stands in for them, and is written back under the original name.
"""

from __future__ import annotations

import argparse
import contextlib
import copyreg
import io
import pickle
import signal
import struct
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch

from mfsdp_compile.runtime.untrusted_files import typed, whole

from .errors import CheckpointError, raise_damaged
from .inert_pickles import InertUnpickler, checked_size, dict_of

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
        made: tuple[Any, ...] = type(self), self.arguments
        if not self.called:
            made = copyreg.__newobj__, (type(self), *self.arguments)  # type: ignore[attr-defined]
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


def _admitted() -> Iterator[Any]:
    yield from (argparse.Namespace, types.SimpleNamespace, signal.Signals)
    yield from (
        (type(Path()), f"{module}.{name}")
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    )
    # NumPy arrays and scalars: states of its random number generators, and values from argument parsers.
    reconstruct, scalar = np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]  # type: ignore[index]
    for package in ("numpy._core", "numpy.core"):
        yield from ((reconstruct, f"{package}.multiarray._reconstruct"), (scalar, f"{package}.multiarray.scalar"))
    yield from (np.ndarray, np.dtype)
    yield from {type(np.dtype(code)) for code in "?bBhHiIlLqQefdFD"}


_ADMITTED = tuple(_admitted())


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
        raise_damaged(where, error)


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
            raise_damaged(where, f"the checksum of {wrong} differs")


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
            if any(i.compress_type != zipfile.ZIP_STORED or i.compress_size != i.file_size for i in items):
                raise ValueError("it is compressed, which torch.save does not do")
            if (claimed := sum(item.file_size for item in items)) > size:
                raise ValueError(f"its parts have {claimed:,} bytes, all of it {size:,}")
            if len({item.filename for item in items}) < len(items):
                raise ValueError("two of its parts have the same name")
            yield archive
    except (CheckpointError, OSError):
        raise
    except Exception as error:
        raise_damaged(where, error)
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


def _strided(
    values: _StoredValues, offset: Any, shape: Any, stride: Any, _: Any, hooks: Any, dtype: Any = None, *rest: Any
) -> tuple[_StoredValues, StoredTensor]:
    """Return the values and the description of a tensor that torch would make of these arguments.

    Raises:
        ValueError: If it reaches beyond its values.
    """
    dtype = dtype if isinstance(dtype, torch.dtype) else values.dtype
    sizes, steps = checked_size(shape), checked_size(stride)
    reach = whole(offset, "an offset") + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True)) + 1
    if 0 not in sizes and reach * dtype.itemsize > values.bytes:
        raise ValueError("a tensor reaches beyond its values")
    return values, StoredTensor(dtype, tuple(sizes))


class _TensorUnpickler(InertUnpickler):
    """Reads the description of a plain tensor in an archive of ``torch.save``, and nothing else."""

    known: ClassVar[dict[tuple[str, str], Any]] = {
        **{(module, name): dtype for name, dtype in _STORAGES.items() for module in ("torch", "torch.storage")},
        ("collections", "OrderedDict"): dict_of,
        ("torch._utils", "_rebuild_parameter"): lambda tensor, *rest: tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _strided,
        ("torch._utils", "_rebuild_tensor_v3"): _strided,
    }
    dispatch: ClassVar[dict[int, Any]] = InertUnpickler.dispatch | {pickle.BINPERSID[0]: InertUnpickler.load_binpersid}

    def persistent_load(self, found: Any) -> _StoredValues:
        kind, dtype, part, _, count = found
        if kind != "storage":
            raise ValueError(f"a {kind!r:.80} is stored")
        bytes_ = whole(count, "a number of elements") * typed(dtype, torch.dtype, "a storage").itemsize
        return _StoredValues(dtype, typed(part, str, "a part of the archive"), bytes_)


def _can_be_read(file: IO[bytes], archive: zipfile.ZipFile, values: str) -> bool:
    """Whether torch can read all parts of an archive. Of those that begin with ``values``, only headers are looked at.

    Raises:
        Exception: It cannot.
    """
    end = 0
    for item in archive.infolist():
        if item.header_offset < end or (not end and item.header_offset) or item.external_attr & _IS_FOLDER:
            return False
        with archive.open(item) as part:  # compares its two headers
            content = part.read() if not item.filename.startswith(values) else b""  # compares its checksum
        if item.filename.endswith("/version") and not content.strip().isdigit():
            return False
        if item.filename.endswith("/byteorder") and content not in (b"little", b"big"):
            return False
        file.seek(item.header_offset + _SIZES_OF_NAMES)
        names = sum(struct.unpack("<HH", file.read(4)))  # of the file's name and of extra fields
        end = item.header_offset + _SIZES_OF_NAMES + 4 + names + item.file_size
    file.seek(0)
    torch.serialization.get_unsafe_globals_in_checkpoint(file)  # torch's reader looks at the directory's headers
    return end <= archive.start_dir


_IS_FOLDER = 0x10
"""MS-DOS's attribute of folders. Torch's reader would leave the memory for such a part as it is."""
_SIZES_OF_NAMES = 26
"""Offset of the lengths of name and extra fields in the header of a part of a ZIP archive."""


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
            values, tensor = _TensorUnpickler(io.BytesIO(pickled)).load()
            has_all = archive.getinfo(f"{folder}/data/{values.part}").file_size == values.bytes
            has_all = has_all and _can_be_read(file, archive, f"{folder}/data/")
        except Exception:  # whatever it is, it is not a plain tensor
            return None
        return tensor if has_all else None
