"""Compiled code in files, for a job that starts on other machines, or with empty caches.

A folder holds, for each rank that saved, a manifest, the entries of torch's compile caches that this rank has made or
read (``torch.compiler.save_cache_artifacts``), and the libraries that were compiled from C++ for the CPU. Loading
compares everything with the manifest's digests and the manifest with this installation, before torch reads a byte, and
then fills the caches on the disk. Keys of entries contain graphs, options and guards on sizes, so that code is found
for what it was compiled for, and for nothing else. What is left at a start is Dynamo's tracing of the model.

Entries are code. Digests protect from damage, not from malice: load what you have saved, or somebody whom you trust.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .backend.compile import source_digest
from .runtime import compat
from .runtime.untrusted_files import (
    FileRefused,
    child,
    members,
    new_file,
    parse_json,
    read_bytes,
    read_text,
    typed,
    whole,
)

MOST_BYTES = 4 << 30
"""Maximum size of a file."""

_FORMAT = "mfsdp compiled code 1"


@dataclass(frozen=True)
class CompiledFiles:
    """What was saved or loaded.

    Attributes:
        folder: The folder.
        pieces: Number of compiled pieces.
        graphs: Number of graphs that call them.
        bytes: Size of the files of this rank.
    """

    folder: Path
    pieces: int
    graphs: int
    bytes: int


def save_compiled(path: str | Path) -> CompiledFiles:
    """Save what this process has compiled, or has found in caches, to files in a folder. Every rank calls it.

    Call it after the first step, in which the backward is used. Ranks do not wait for one another. Ranks on machines
    that share no folder save to folders of their own.

    Args:
        path: The folder. Files of this rank are replaced.

    Raises:
        RuntimeError: Nothing was compiled, or compile caches are switched off.
    """
    folder, cache = Path(path), _cache()
    data, pieces, graphs = compat.cache_entries()
    if not data:
        raise RuntimeError(
            "save_compiled has nothing to save: nothing was compiled so far, or read from caches. Run a training step "
            "first. What cannot be cached, such as a pass without uuid() in options['passes'], or "
            "options={'report': True}, is not saved."
        )
    name = f"rank{_rank()}"
    libraries: dict[str, str] = {}
    size = len(data)
    for library in compat.libraries_of_pieces(cache):
        content = Path(library).read_bytes()
        libraries[os.path.relpath(library, os.path.realpath(cache))] = _digest(content)
        size += len(content)
        _write(folder, f"libraries/{_digest(content)}", content)
    _write(folder, f"{name}.entries", data)
    manifest = {
        "format": _FORMAT,
        "made with": _installation() | (_processor() if libraries else {}),
        "pieces": pieces,
        "graphs": graphs,
        "entries": _digest(data),
        "libraries": libraries,
    }
    _write(folder, f"{name}.json", json.dumps(manifest, indent=1).encode())
    return CompiledFiles(folder, pieces, graphs, size)


def load_compiled(path: str | Path) -> CompiledFiles:
    """Fill the compile caches of this machine with what :func:`save_compiled` has saved. Every rank calls it.

    Call it before the model is called for the first time. A rank for which nothing was saved, or by another
    installation, loads what the first rank has saved: pieces are the same for all ranks, and for any number of them.

    Args:
        path: The folder.

    Raises:
        FileRefused: A file is damaged, or was saved by another version of this package or of torch, or for another
            device. Nothing is loaded.
        FileNotFoundError: Nothing was saved there, or a file is missing.
    """
    folder, cache = Path(path), _cache()
    where, manifest = _manifest(folder)
    libraries = typed(manifest.get("libraries"), dict, f"{where}: libraries")
    _compare(where, typed(manifest.get("made with"), dict, f"{where}: made with"), bool(libraries))
    data = _read(where.with_suffix(".entries"), manifest.get("entries"))
    contents: dict[Path, bytes] = {}
    for library, expected in libraries.items():
        place = child(Path(cache), library)
        if place.suffix != ".so":
            raise FileRefused(f"{where} names {library!r} as a library, and libraries end with .so")
        contents[place] = _read(child(folder, f"libraries/{typed(expected, str, str(where))}"), expected)
    pieces, graphs = (whole(manifest.get(what), f"{where}: {what}") for what in ("pieces", "graphs"))
    for place, content in contents.items():
        if not place.exists():
            _write(Path(cache), place.relative_to(cache).as_posix(), content)
    if compat.fill_caches(data) != (pieces, graphs):
        raise FileRefused(f"{where.with_suffix('.entries')} holds other entries than {where} says")
    return CompiledFiles(folder, pieces, graphs, len(data) + sum(map(len, contents.values())))


def _manifest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the manifest that this rank loads: its own, or else the first one that this installation has written."""
    saved = [path for path in members(folder) if re.fullmatch(r"rank\d+\.json", path.name)]
    if not saved:
        raise FileNotFoundError(f"Nothing was saved in {folder}: there is no file that save_compiled writes.")
    mine, here = folder / f"rank{_rank()}.json", _installation()
    found = {}
    for path in sorted(saved, key=lambda path: (path != mine, int(path.stem[4:]))):
        try:
            manifest = typed(parse_json(read_text(path)), dict, "the manifest")
        except FileRefused as error:
            raise FileRefused(f"{path} does not hold what save_compiled writes: {error}") from None
        if manifest.get("format") != _FORMAT:
            raise FileRefused(f"{path} was not written by save_compiled of this version")
        found[path] = manifest
        made = manifest.get("made with")
        if isinstance(made, dict) and all(made.get(name) == value for name, value in here.items()):
            return path, manifest
    return next(iter(found.items()))


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _cache() -> str:
    folder = compat.pieces_cache()
    if folder is None:
        raise RuntimeError("Inductor's cache is switched off (fx_graph_cache, force_disable_caches): switch it on.")
    return folder


def _installation() -> dict[str, str]:
    """Return what entries of caches depend on, besides graphs and options."""
    from . import __version__

    device = "cpu"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return {
        "mfsdp-compile": f"{__version__}, source {source_digest()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }


def _processor() -> dict[str, str]:
    """Return what libraries depend on: they are compiled for the processor of the machine."""
    flags = ""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return {"processor": f"{platform.machine()}, features {_digest(flags.encode())[:16]}"}


def _compare(where: Path, theirs: Mapping[str, Any], has_libraries: bool) -> None:
    mine = _installation() | (_processor() if has_libraries else {})
    if other := [name for name in mine if theirs.get(name) != mine[name]]:
        here = [f"{name} {theirs.get(name)!r:.200}, and this installation has {mine[name]!r}" for name in other]
        raise FileRefused(
            f"{where} was saved with {'; '.join(here)}. Compiled code works only with the installation and kind "
            "of device that have saved it. Train without load_compiled, which compiles the model again, and save again."
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path, expected: Any) -> bytes:
    content = read_bytes(path, MOST_BYTES)
    if _digest(content) != expected:
        raise FileRefused(f"{path} is damaged: its content is not what was saved. Nothing was loaded; save again.")
    return content


def _write(folder: Path, name: str, content: bytes) -> None:
    with new_file(folder, name) as file:
        file.write(content)
