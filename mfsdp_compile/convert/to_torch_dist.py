"""Conversion of fsdp_dtensor to torch_dist, the inverse of :mod:`.from_torch_dist`."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mfsdp_compile.checkpoint.archives import dump_object
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.runtime.untrusted_files import FileRefused, inside, read_bytes, read_json, safe_name, typed, whole

from . import keys
from .conversion_plan import ConversionPlan, OutputEntry
from .from_torch_dist import CARRIED, CHECKPOINT_VERSION, COMMON_ENTRY, TorchDistOptions
from .keys import Name
from .param_groups import groups_from_options
from .stacked_tensors import RESHAPED, flatten_blocks

MOST_CARRIED_BYTES = 1 << 30
"""Maximum size of ``common.pt`` and ``metadata.json``, which hold training arguments."""

FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Contents of Megatron's ``metadata.json`` for such a checkpoint."""


@dataclass(frozen=True)
class _Target:
    """A tensor of torch_dist.

    Args:
        key: Key in torch_dist.
        shape: Shape, with layers and experts first.
        dtype: Dtype of the tensor and its sources.
        grid: Number of blocks along each dimension, if it is to be flattened.
        sources: For each index of layers and experts, (key,), or (key of the first half, key of the second half).
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: tuple[int, ...] | None
    sources: dict[tuple[int, ...], tuple[str, ...]]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.grid is None:
            return self.shape
        return (*self.grid, math.prod(n // g for n, g in zip(self.shape, self.grid, strict=True)))

    def chunks(
        self, reader: CheckpointReader, advance: Callable[[int], None]
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield a chunk for each layer and expert, as Megatron's ranks write them. ``advance`` gets its bytes."""
        for index, sources in self.sources.items():
            halves = [reader.tensor(key) for key in sources]
            tensor = halves[0] if len(halves) == 1 else torch.cat(halves)
            del halves
            depth = len(index)
            if self.grid is not None:
                tensor = flatten_blocks(tensor, self.grid[depth:])
            yield (*index, *([0] * tensor.dim())), tensor.reshape((1,) * depth + tuple(tensor.shape))
            advance(tensor.nbytes)


def plan_to_torch_dist(source: Path, options: TorchDistOptions) -> ConversionPlan:
    """Plan the conversion of an fsdp_dtensor checkpoint to torch_dist.

    If the checkpoint was once converted from torch_dist, the layout of that checkpoint is restored.

    Raises:
        CheckpointError: If ``source`` is not readable, layers that are to be stacked differ, or half of a matrix is
            missing.
    """
    reader, plan = CheckpointReader(source), ConversionPlan()
    layout = _layout(source)
    named, others = _parameters(reader, options)
    if not named:
        raise CheckpointError(
            f"{source} has no key that begins with {options.prefixes.model!r} or {options.prefixes.optimizer!r}. Pass "
            "its prefixes with --model-prefix and --optimizer-prefix; mfsdp checkpoint inspect shows the keys."
        )
    targets = [
        _target(reader, name, parts, layout, options)
        for name, parts in _grouped(reader, named, layout, options).items()
    ]
    for target in targets:
        shown = tuple(itertools.chain.from_iterable(target.sources.values()))
        plan.moves.append(OutputEntry(target.key, shown, target.stored_shape, target.dtype))
    raw = [key for key in layout["values"] if key in reader]
    plan.moves += [OutputEntry(key, (key,)) for key in raw]
    plan.moves += [OutputEntry(key, ("(empty)",)) for key in layout["extra_states"]]
    content, known = (_carried_bytes(source, name) for name in ("common.pt", "metadata.json"))
    if content is not None:
        plan.moves.append(OutputEntry("common.pt", (f"{CARRIED}/common.pt",)))
    elif not any(key.startswith(COMMON_ENTRY) for key in raw):
        leaves = [key for key in others if key not in raw and options.prefixes.parse_group(key) is None]
        content = dump_object(_common(reader, leaves, options))
        plan.moves.append(OutputEntry("common.pt", tuple(leaves) or ("(default)",)))
    plan.left_out += [
        (key, "state of the rerun state machine, of one rank") for key in others if _is_rerun(key) and key not in raw
    ]
    plan.notes.append("Without states of random number generators: training goes on with those that it starts with.")

    def write(out: Path, advance: Callable[[int], None]) -> None:
        writer = CheckpointWriter(out)
        for target in targets:
            writer.add_chunks(target.key, target.stored_shape, target.dtype, target.chunks(reader, advance))
            writer.mcore_data[target.key] = {} if target.grid is None else {RESHAPED: target.shape}
        for key in raw:
            writer.add_bytes(key, reader.raw(key))
        for key in layout["extra_states"]:
            writer.add_value(key, [None])
        if content is not None:
            (out / "common.pt").write_bytes(content)
        (out / "metadata.json").write_bytes(json.dumps(FORMAT).encode() if known is None else known)
        writer.close()

    plan.write = write
    return plan


def _carried_bytes(source: Path, name: str) -> bytes | None:
    """Return the contents of a file in the subfolder, or None if there is none."""
    try:
        return read_bytes(inside(source, f"{CARRIED}/{name}"), MOST_CARRIED_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except FileRefused as error:
        raise CheckpointError(f"{source} cannot be read: {error}.") from None


def _layout(source: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"stacked": {}, "mtp_renamed": False, "flattened": {}, "values": []}
    empty |= {"extra_states": [], "chained": {}}
    try:
        found = typed(read_json(inside(source, f"{CARRIED}/layout.json")), dict, "it")
        layout = {name: typed(found.get(name), type(default), name) for name, default in empty.items()}
        for name, kind in (("stacked", bool), ("flattened", list), ("chained", str)):
            for key, held in layout[name].items():
                typed(held, kind, f"{name} of {safe_name(key)}")
        for shape in layout["flattened"].values():
            for size in shape:
                whole(size, "a size")
        for key in (*layout["values"], *layout["extra_states"]):
            safe_name(key)
        return layout
    except (FileNotFoundError, NotADirectoryError):
        return empty
    except FileRefused as error:
        path = source / CARRIED / "layout.json"
        raise CheckpointError(
            f"{path} is damaged ({error}). Remove it to convert without the original layout."
        ) from error


def _parameters(reader: CheckpointReader, options: TorchDistOptions) -> tuple[dict[str, Name], list[str]]:
    """Separate tensors that are parameters or states from all other keys."""
    names = {key: options.prefixes.parse(key) if reader.is_tensor(key) else None for key in reader}
    named = {key: name for key, name in names.items() if name is not None}
    return named, [key for key in names if key not in named]


_Parts = dict[tuple[int, ...], dict[int | None, str]]


def _grouped(
    reader: CheckpointReader, named: dict[str, Name], layout: dict[str, Any], options: TorchDistOptions
) -> dict[Name, _Parts]:
    """For each tensor of torch_dist, return the keys that it comes from, by index and half."""
    rename = layout["mtp_renamed"] if options.rename_mtp is None else options.rename_mtp
    grouped: dict[Name, _Parts] = {}
    for key, name in named.items():
        old = keys.modern_mtp(name.name, new=False) if rename else name.name
        stack = keys.layer_stack(old)
        known = layout["stacked"].get(stack) if options.stack_layers is None else options.stack_layers
        stacked = not f".{stack}".endswith(".mtp.layers") if known is None else known
        # If a state is a single number, each of the two halves has its own.
        gated = options.swiglu is not False and len(reader.shape(key)) > 0
        part = keys.compose(old, gated, stacked)
        halves = grouped.setdefault(Name(part.name, name.state), {}).setdefault(part.index, {})
        if part.half in halves:
            raise CheckpointError(
                f"{reader.directory}: {key} and {halves[part.half]} are the same part of {part.name}."
            )
        halves[part.half] = key
    return grouped


def _target(
    reader: CheckpointReader, name: Name, parts: _Parts, layout: dict[str, Any], options: TorchDistOptions
) -> _Target:
    plain = keys.torch_dist_key(name)
    key = layout["chained"].get(plain, plain)
    depth = keys.stacked_dimensions(name.name)
    counts = tuple(1 + max(index[i] for index in parts) for i in range(depth))
    missing = sorted(set(itertools.product(*map(range, counts))) - set(parts))
    if missing:
        raise CheckpointError(_differing(reader, name, f"there is none for {list(missing[0])}", counts))
    sources: dict[tuple[int, ...], tuple[str, ...]] = {}
    shapes = {}
    for index in sorted(parts):
        halves = parts[index]
        if set(halves) not in ({None}, {0, 1}):
            raise CheckpointError(
                f"{reader.directory} holds only one half of a gated matrix: {', '.join(halves.values())}"
            )
        sources[index] = tuple(halves[half] for half in sorted(halves, key=lambda half: half or 0))
        kinds = {(tuple(reader.shape(source)), reader.dtype(source)) for source in sources[index]}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{reader.directory}: {' and '.join(sources[index])} differ in shape or dtype: {kinds}"
            )
        ((shape, dtype),) = kinds
        shapes[index] = ((2 * shape[0], *shape[1:]) if len(halves) == 2 else shape, dtype, len(halves))
    first = shapes[min(shapes)]
    for index, found in shapes.items():
        if found != first:
            what = f"shape and dtype are {first[:2]} at {list(min(shapes))}, but {found[:2]} at {list(index)}"
            raise CheckpointError(_differing(reader, name, what, counts))
    shape = (*counts, *first[0])
    return _Target(key, shape, first[1], _grid(key, name, shape, first[2] == 2, layout, options), sources)


def _differing(reader: CheckpointReader, name: Name, what: str, counts: tuple[int, ...]) -> str:
    return (
        f"{reader.directory}: {keys.torch_dist_key(name)} cannot be one tensor for {list(counts)} layers (and "
        f"experts): {what}. If layers differ by design, pass --layers indexed, which is how Megatron stores such "
        "models."
    )


def _grid(
    key: str, name: Name, shape: tuple[int, ...], gated: bool, layout: dict[str, Any], options: TorchDistOptions
) -> tuple[int, ...] | None:
    if key in layout["flattened"]:
        try:
            return keys.grid_of(shape, layout["flattened"][key])
        except ValueError as error:
            raise CheckpointError(
                f"{key} cannot be flattened as it was before its conversion: {error}. Remove the checkpoint's "
                f"subfolder {CARRIED} to convert without the original layout."
            ) from error
    depth = keys.stacked_dimensions(name.name)
    if name.state is None or not options.flatten_optimizer or len(shape) == depth:
        return None
    return (*shape[:depth], 2 if gated else 1, *([1] * (len(shape) - depth - 1)))


def _is_rerun(key: str) -> bool:
    return key.startswith("rerun_state_machine.")


def _common(reader: CheckpointReader, leaves: list[str], options: TorchDistOptions) -> dict[str, Any]:
    """Build the contents of ``common.pt`` from the dotted keys of fsdp_dtensor."""
    held = {key: reader.read(key) for key in leaves if not _is_rerun(key)}
    renamed = {re.sub(r"^(?=optimizer\.param_groups\.)", "optimizer.", key): value for key, value in held.items()}
    try:
        common: dict[str, Any] = keys.unflatten(renamed)
    except ValueError as error:
        raise CheckpointError(f"{reader.directory}: {error}") from error
    common.setdefault("checkpoint_version", CHECKPOINT_VERSION)
    groups = groups_from_options(reader, options.prefixes)
    if groups and not any(key.startswith("optimizer.param_groups.") for key in leaves):
        common.setdefault("optimizer", {}).setdefault("optimizer", {})["param_groups"] = groups
    return common
