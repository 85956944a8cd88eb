"""Conversion of torch_dist to fsdp_dtensor, and back.

Megatron's 3D-parallel training writes torch_dist: a DCP directory whose tensors are stacked over layers and experts,
with the distributed optimizer's tensors flattened block by block (:func:`.keys.grid_of`), next to ``common.pt``
(training arguments, iteration, options of the optimizer's groups) and ``metadata.json``.

fsdp_dtensor is a plain DCP directory. Data that it has no place for, but torch_dist needs, is kept in a subfolder::

    torch_dist/common.pt        unchanged
    torch_dist/metadata.json    unchanged
    torch_dist/layout.json      which layers were stacked, what was flattened and how, and which extra states there were

A round trip therefore restores equal tensors under equal keys. Not kept are Transformer Engine's ``_extra_state``, and
the states of random number generators and of the rerun state machine, which belong to ranks that no longer exist.
Extra states come back empty, as modules that have none write them: Megatron does not load a checkpoint that lacks one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mfsdp_compile.checkpoint.archives import load_object
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.runtime.untrusted_files import FileRefused, copy_inside, inside, open_regular

from . import keys
from .conversion_plan import ConversionPlan, OutputEntry
from .keys import Name, Prefixes, TensorPart
from .param_groups import find_groups, group_of
from .stacked_tensors import StoredTensor

CARRIED = "torch_dist"
"""Subfolder of an fsdp_dtensor checkpoint for what only torch_dist needs."""

COMMON_ENTRY = "common_state/"

CHECKPOINT_VERSION = 3.0
"""Version of Megatron's checkpoints; written if the training state does not contain one."""


@dataclass(frozen=True)
class TorchDistOptions:
    """How to convert.

    Args:
        prefixes: Prefixes of fsdp_dtensor's keys.
        swiglu: Whether MLPs are gated, so that fsdp_dtensor has ``linear_fc1`` in two halves. None: as the training
            arguments say, or otherwise the shapes. On the way back: whether halves are joined; None means yes.
        swiglu_modules: Only modules with one of these among the parts of their names are gated.
        rename_mtp: Rename multi-token-prediction layers as in Megatron-FSDP's models. None: if the old name is found;
            on the way back, restore the original names.
        stack_layers: On the way to torch_dist, whether layers are stacked. None: as they were originally; if that is
            unknown, they are stacked except for those of multi-token prediction, as in Megatron.
        flatten_optimizer: On the way to torch_dist, flatten optimizer states whose original layout is unknown, as older
            versions of Megatron-LM require.
        group_map: From parameter (key in fsdp_dtensor) to the number of its group in the optimizer.
    """

    prefixes: Prefixes = field(default_factory=Prefixes)
    swiglu: bool | None = None
    swiglu_modules: tuple[str, ...] = ()
    rename_mtp: bool | None = None
    stack_layers: bool | None = None
    flatten_optimizer: bool = False
    group_map: Mapping[str, int] | None = None


def load_common(path: Path) -> dict[str, Any]:
    """Read ``common.pt``. Empty if there is none.

    Raises:
        CheckpointError: If it is damaged, or contains a class that is not known to be harmless.
    """
    try:
        with open_regular(inside(path.parent, path.name)) as file:
            common = load_object(file, path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except FileRefused as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    if not isinstance(common, dict):
        raise CheckpointError(f"{path} holds a {type(common).__name__}, not the dictionary that Megatron writes.")
    return common


@dataclass(frozen=True)
class _OutputTensor:
    """A tensor of fsdp_dtensor: the part of a stored tensor that it is, its name, and its key."""

    part: TensorPart
    name: Name
    key: str


def plan_to_fsdp(source: Path, options: TorchDistOptions) -> ConversionPlan:
    """Plan the conversion of a torch_dist checkpoint to fsdp_dtensor.

    Raises:
        CheckpointError: If ``source`` is not readable or not organized by parameters, if it is unclear whether MLPs are
            gated, or if a parameter is missing from the map of groups.
    """
    reader, plan = CheckpointReader(source), ConversionPlan()
    common = load_common(source / "common.pt") or _common_entry(reader)
    kept = [key for key in reader if _stays(key, plan)]
    tensors = [StoredTensor.of(reader, key) for key in kept if reader.is_tensor(key)]
    raw = [key for key in kept if not reader.is_tensor(key)]
    gated = _gated(tensors, common, options)
    has_old_mtp = any(keys.modern_mtp(stored.name.name) != stored.name.name for stored in tensors)
    rename = has_old_mtp if options.rename_mtp is None else options.rename_mtp
    jobs = [(stored, list(_outputs(stored, gated, rename, options, source))) for stored in tensors]
    for stored, outputs in jobs:
        for out in outputs:
            shape = list(stored.shape[len(out.part.index) :])
            if out.part.half is not None:
                shape[0] //= 2
            plan.moves.append(OutputEntry(out.key, (_shown(stored.key, out.part),), tuple(shape), stored.dtype))
    values = list(_values(reader, common, jobs, options, plan))
    plan.moves += [OutputEntry(key, (key,)) for key in raw]
    plan.moves += [OutputEntry(key, (origin,)) for key, origin, _ in values]
    layout = {
        "stacked": _stacks(jobs),
        "mtp_renamed": rename and has_old_mtp,
        "flattened": {stored.key: list(reader.shape(stored.key)) for stored in tensors if stored.grid is not None},
        "values": raw,
        "extra_states": [key for key in reader if keys.is_extra_state(key) and not reader.is_tensor(key)],
        "chained": {name: s.key for s in tensors if (name := keys.torch_dist_key(s.name)) != s.key},
    }

    def write(out: Path, advance: Callable[[int], None]) -> None:
        writer = CheckpointWriter(out)
        for stored, outputs in jobs:
            for output in outputs:
                tensor = stored.read(reader, output.part)
                writer.add(output.key, tensor)
                advance(tensor.nbytes)
            reader.release()
        for key in raw:
            writer.add_bytes(key, reader.raw(key))
        for key, _, value in values:
            writer.add_value(key, value)
        carried = out / CARRIED
        carried.mkdir()
        (carried / "layout.json").write_text(json.dumps(layout, indent=1))
        held = {f"{CARRIED}/{name}": source / name for name in ("common.pt", "metadata.json")}
        copy_inside(source, {name: path for name, path in held.items() if path.is_file()}, out)
        writer.close()

    plan.write = write
    return plan


def _common_entry(reader: CheckpointReader) -> dict[str, Any]:
    """Return what recent versions of Megatron store as an entry instead of ``common.pt``."""
    for key in reader:
        if key.startswith(COMMON_ENTRY) and not reader.is_tensor(key):
            held = reader.value(key)
            held = held[0] if isinstance(held, list) and held else held
            return held if isinstance(held, dict) else {}
    return {}


def _stays(key: str, plan: ConversionPlan) -> bool:
    """Return whether an entry is converted. If not, the reason is noted in the plan."""
    if re.match(r"(chained_\d+\.)?optimizer\.distributed\.", key):
        raise CheckpointError(
            f"The optimizer is stored by communication buckets ({key}), which do not name their parameters: only the "
            "model and the parallel layout that wrote them can read them. Save the checkpoint with "
            "--ckpt-fully-parallel-save and the distributed optimizer's state by parameters "
            "(--dist-ckpt-optim-fully-reshardable, in older versions fully_sharded_model_space), or without the "
            "optimizer (--no-save-optim). To convert the weights alone: mfsdp checkpoint remove IN WEIGHTS "
            "'optimizer\\.distributed', and mfsdp convert WEIGHTS OUT --from torch_dist."
        )
    if keys.is_extra_state(key):
        plan.left_out.append((key, "state of Transformer Engine, recreated by calibration"))
    elif key.startswith("rng_state"):
        plan.left_out.append((key, "random number generators of ranks that are no more"))
    else:
        return not key.startswith("rerun_state_machine_state")
    return False


def _gated(tensors: Iterable[StoredTensor], common: Mapping[str, Any], options: TorchDistOptions) -> bool:
    """Return whether MLPs are gated, according to the user, the training arguments, or the shapes."""
    if options.swiglu is not None:
        return options.swiglu
    if options.swiglu_modules:
        return True
    said = getattr(common.get("args"), "swiglu", None)
    if said is not None:
        return bool(said)
    shapes = {stored.name.name: stored.shape for stored in tensors if stored.name.state is None}
    seen = set()
    for name, shape in shapes.items():
        other = shapes.get(name.replace("linear_fc1", "linear_fc2"))
        if name.endswith(".linear_fc1.weight") and other is not None:
            seen.add(shape[-2] == 2 * other[-1])  # gated: linear_fc1 outputs twice the columns that linear_fc2 takes
    if len(seen) > 1:
        raise CheckpointError(
            "Some MLPs are gated (SwiGLU) and some are not. Name them with --swiglu-modules, or pass --no-swiglu if "
            "none is."
        )
    return seen == {True}


def _outputs(
    stored: StoredTensor, gated: bool, rename: bool, options: TorchDistOptions, source: Path
) -> Iterator[_OutputTensor]:
    try:
        parts = keys.decompose(stored.name.name, stored.shape, gated, options.swiglu_modules)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from error
    for part in parts:
        name = Name(keys.modern_mtp(part.name) if rename else part.name, stored.name.state)
        yield _OutputTensor(part, name, options.prefixes.key(name))


def _stacks(jobs: Iterable[tuple[StoredTensor, list[_OutputTensor]]]) -> dict[str, bool]:
    """Return, for each list of layers, whether its layers were stored as one tensor."""
    stacked = {}
    for stored, outputs in jobs:
        for output in outputs[:1]:
            if (stack := keys.layer_stack(output.name.name)) is not None:
                stacked[stack] = keys.is_layer_stacked(stored.name.name)
    return stacked


def _shown(key: str, part: TensorPart) -> str:
    index = f"[{', '.join(map(str, part.index))}]" if part.index else ""
    return key + index + ("" if part.half is None else (" first half", " second half")[part.half])


def _values(
    reader: CheckpointReader,
    common: dict[str, Any],
    jobs: Iterable[tuple[StoredTensor, list[_OutputTensor]]],
    options: TorchDistOptions,
    plan: ConversionPlan,
) -> Iterator[tuple[str, str, Any]]:
    """Yield key, origin and value of everything that is neither a parameter nor a state."""
    reruns = [key for key in reader if key.startswith("rerun_state_machine_state")]
    for number, key in enumerate(reruns):
        if number or reader.is_tensor(key):
            plan.left_out.append((key, "state of the rerun state machine of another rank"))
            continue
        held = reader.value(key)
        for name, leaf in keys.flatten(
            held[0] if isinstance(held, list) and held else held, "rerun_state_machine.sharded"
        ):
            yield name, key, leaf
    for name, leaf in keys.flatten(common):
        yield name.replace("optimizer.optimizer.param_groups.", "optimizer.param_groups."), "common.pt", leaf
    if "checkpoint_version" not in common:
        yield "checkpoint_version", "(default)", CHECKPOINT_VERSION
    yield from _group_values(common, jobs, options, plan)


def _group_values(
    common: dict[str, Any],
    jobs: Iterable[tuple[StoredTensor, list[_OutputTensor]]],
    options: TorchDistOptions,
    plan: ConversionPlan,
) -> Iterator[tuple[str, str, Any]]:
    """Yield the group options of every parameter."""
    groups = find_groups(common)
    if options.group_map is None:
        if len(groups) > 1:
            plan.notes.append(
                f"The optimizer has {len(groups)} groups, and without --param-to-param-group-map-json nothing says "
                "which parameter is in which: their options will be those that training starts with."
            )
        return
    if not groups:
        plan.notes.append("common.pt has no groups of the optimizer: the map of groups is not used.")
        return
    prefixes = options.prefixes
    for stored, outputs in jobs:
        for output in outputs:
            if stored.name.state is not None or stored.name.name.endswith(".expert_bias"):
                continue
            names = [output.name.name, output.part.name, output.part.name.removesuffix("_w").removesuffix("_v")]
            candidates = [f"{prefixes.model}.{name}" for name in [*names, stored.name.name]]
            number = group_of([*candidates, stored.name.name], options.group_map, len(groups))
            if number is None:
                raise CheckpointError(
                    f"The map of groups has no {candidates[0]}. Write it with the checkpoint's model, or convert "
                    "without it."
                )
            for name, value in groups[number].items():
                if name != "params":
                    yield prefixes.group_key(output.name.name, name), f"common.pt, group {number}", value
