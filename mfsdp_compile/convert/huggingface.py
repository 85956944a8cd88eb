"""Conversion of safetensors and Hugging Face folders to fsdp_dtensor, and back.

A tensor ``NAME`` of the folder is ``model.module.NAME`` in the checkpoint. The folder's other files (config, tokenizer,
generation config) are kept in the checkpoint's subfolder ``huggingface`` and put back on export, so that
``from_pretrained`` can load the result.

Tied parameters: transformers saves a weight that two modules share once, under the name of the embedding, and ties the
modules when it loads. A ``state_dict`` has both names. So in the checkpoint, ``lm_head.weight`` is a second name for
the embedding's data, and it is left out again on export.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.runtime.untrusted_files import (
    FileRefused,
    copy_inside,
    inside,
    members,
    read_json,
    safe_name,
    subfolder,
    typed,
)

from .conversion_plan import ConversionPlan, OutputEntry
from .keys import Prefixes
from .safetensors_files import Layout, SafetensorsReader, split_into_files, write_file, write_index

CARRIED = "huggingface"
"""Subfolder of an fsdp_dtensor checkpoint for the files that are not weights."""

MAX_SHARD_BYTES = 5 * 10**9
"""Size of a .safetensors file. Was the default of transformers for years, and is the recommendation of the Hub."""

_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp"}


@dataclass(frozen=True)
class HuggingFaceOptions:
    """How to convert.

    Args:
        prefixes: Prefixes of fsdp_dtensor's keys.
        tied: Pairs of a name and the name that it shares its data with. Overrides config.json.
        dtype: Dtype of floating-point tensors on export. None keeps their dtypes.
        max_shard_bytes: Size of a .safetensors file, unless a single tensor is larger.
        files_from: On export, a folder with the files that are not weights. None: the files in the checkpoint.
    """

    prefixes: Prefixes = field(default_factory=Prefixes)
    tied: Sequence[tuple[str, str]] | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    files_from: Path | None = None


def plan_from_huggingface(source: Path, options: HuggingFaceOptions) -> ConversionPlan:
    """Plan the conversion of a .safetensors file, or of a folder of such files, to an fsdp_dtensor checkpoint.

    Raises:
        CheckpointError: If safetensors is not installed, or ``source`` is not readable.
    """
    reader, plan = SafetensorsReader(source), ConversionPlan()
    extras = _extras(source)
    tied = [(a, b) for a, b in _tied(options, _config(source), reader.layouts) if a not in reader.layouts]
    for name, other in tied:
        if other not in reader.layouts:
            raise CheckpointError(f"{source} has no {other}, which {name} should share its data with.")
    names = sorted(reader.layouts)
    for name in names:
        layout = reader.layouts[name]
        plan.moves.append(OutputEntry(f"{options.prefixes.model}.{name}", (name,), layout.shape, layout.dtype))
    for name, other in tied:
        plan.moves.append(OutputEntry(f"{options.prefixes.model}.{name}", (f"{other} (tied)",)))
    plan.moves += [OutputEntry(f"{CARRIED}/{path.name}", (path.name,)) for path in extras]

    def write(out: Path, advance: Callable[[int], None]) -> None:
        writer = CheckpointWriter(out)
        for name in names:
            tensor = reader.tensor(name)
            writer.add(f"{options.prefixes.model}.{name}", tensor)
            advance(tensor.nbytes)
        for name, other in tied:
            writer.add_alias(f"{options.prefixes.model}.{name}", f"{options.prefixes.model}.{other}")
        if source.is_dir():
            (out / CARRIED).mkdir()
        copy_inside(source, {f"{CARRIED}/{path.name}": path for path in extras}, out)
        writer.close()

    plan.write = write
    return plan


def plan_to_huggingface(source: Path, options: HuggingFaceOptions, single_file: bool = False) -> ConversionPlan:
    """Plan the conversion of an fsdp_dtensor checkpoint to a Hugging Face folder or one .safetensors file.

    ``from_pretrained`` loads the folder.

    Raises:
        CheckpointError: If ``source`` is not readable or contains no model, or parameters that should be tied differ.
    """
    reader, plan = CheckpointReader(source), ConversionPlan()
    keys = {}
    for key in reader:
        parsed = options.prefixes.parse(key)
        if parsed is None or parsed.state is not None or not reader.is_tensor(key):
            plan.left_out.append((key, "not a weight of the model"))
        else:
            keys[parsed.name] = key
    if not keys:
        raise CheckpointError(
            f"{source} has no tensor that begins with {options.prefixes.model!r}. Pass the model's prefix with "
            "--model-prefix; mfsdp checkpoint inspect shows the keys."
        )
    stored = {name: Layout(tuple(reader.shape(key)), reader.dtype(key)) for name, key in keys.items()}
    try:
        carried = options.files_from or subfolder(source, CARRIED)
    except FileRefused as error:
        raise CheckpointError(f"{source} cannot be read: {error}.") from None
    for name, other in _tied(options, _config(carried), stored):
        if name in keys and other in keys:
            _check_tied(reader, keys[name], keys[other])
            plan.left_out.append((keys.pop(name), f"shares its data with {other}"))
    layouts = {name: Layout(stored[name].shape, _cast(stored[name].dtype, options.dtype)) for name in sorted(keys)}
    files = split_into_files(
        layouts, sum(x.nbytes for x in layouts.values()) if single_file else options.max_shard_bytes
    )
    extras = _extras(carried)
    if not single_file and not any(path.name == "config.json" for path in extras):
        plan.notes.append(
            f"{carried} has no config.json, which from_pretrained needs beside the weights. Say with --files-from "
            "where the model's folder is."
        )
    for file, name in ((file, name) for file, names in files.items() for name in names):
        plan.moves.append(OutputEntry(f"{file}: {name}", (keys[name],), layouts[name].shape, layouts[name].dtype))
    if not single_file:
        plan.moves += [OutputEntry(path.name, (str(path),)) for path in extras]

    def write(out: Path, advance: Callable[[int], None]) -> None:
        def read(name: str) -> Tensor:
            tensor = reader.tensor(keys[name]).to(layouts[name].dtype)
            advance(tensor.nbytes)
            return tensor

        if single_file:
            write_file(out, layouts, list(layouts), read)
            return
        out.mkdir()
        for file, names in files.items():
            write_file(out / file, layouts, names, read)
        write_index(out, layouts, files)
        copy_inside(carried, {path.name: path for path in extras}, out)
        if options.dtype is not None and (out / "config.json").exists():
            (out / "config.json").write_text(_with_dtype(_config(carried), options.dtype))

    plan.write = write
    return plan


def _extras(folder: Path) -> list[Path]:
    """Return the files of a folder that are not weights."""
    try:
        return [
            inside(folder, path.name)
            for path in members(folder)
            if not (path.suffix in _WEIGHTS or path.name.endswith(".index.json") or path.name.startswith("."))
            and not path.is_dir()
        ]
    except FileRefused as error:
        raise CheckpointError(f"{folder} cannot be copied: {error}.") from None


def _config(folder: Path) -> dict[str, Any]:
    """Read config.json. The fields used here are checked; the rest is returned unchanged."""
    path = folder / "config.json"
    try:
        config = typed(read_json(inside(folder, path.name)), dict, "it")
        for held in (config, typed(config.get("text_config") or {}, dict, "text_config")):
            typed(held.get("tie_word_embeddings", True), bool, "tie_word_embeddings")
        for name in typed(config.get("architectures") or [], list, "architectures"):
            safe_name(name, "an architecture")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except FileRefused as error:
        raise CheckpointError(f"{path} is damaged ({error}). Copy it again.") from error
    return config


def _tied(options: HuggingFaceOptions, config: dict[str, Any], names: Any) -> list[tuple[str, str]]:
    """Return pairs of a name and the name whose data it shares.

    They are those that the user gives; otherwise, the output is tied to the embedding as transformers does.
    """
    if options.tied is not None:
        return list(options.tied)
    # Transformers ties unless the config says otherwise. A config that differs from this default is saved with it.
    wanted = config.get("tie_word_embeddings", (config.get("text_config") or {}).get("tie_word_embeddings", True))
    generates = any("LM" in name or "Generation" in name for name in config.get("architectures") or [])
    embeddings = [name for name in names if name.endswith(_EMBEDDINGS)]
    if not (wanted and generates) or len(embeddings) != 1:
        return []
    return [(_HEAD, embeddings[0])]


def _check_tied(reader: CheckpointReader, key: str, other: str) -> None:
    if reader.stored_as(key) == reader.stored_as(other):
        return
    if reader.shape(key) != reader.shape(other) or not torch.equal(reader.tensor(key), reader.tensor(other)):
        raise CheckpointError(
            f"{reader.directory}: config.json says that {key} and {other} are tied, but they differ. Exported like "
            "this, transformers would drop one. Set tie_word_embeddings to false in config.json, or give --no-tied."
        )


def _cast(dtype: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    return to if to is not None and dtype.is_floating_point else dtype


def _with_dtype(config: dict[str, Any], dtype: torch.dtype) -> str:
    name = "torch_dtype" if "torch_dtype" in config else "dtype"  # renamed in transformers 5
    return json.dumps({**config, name: str(dtype).removeprefix("torch.")}, indent=2) + "\n"
