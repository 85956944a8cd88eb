"""The optimizer's parameter groups: the ``param_to_param_group_map`` that conversion takes.

torch_dist stores options (learning rate, weight decay) by group, fsdp_dtensor by parameter. The map connects them. It
is a JSON file with one object, from the key of a parameter in fsdp_dtensor, such as
``model.module.decoder.layers.0.mlp.linear_fc1.weight``, to the number of its group.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.runtime.untrusted_files import FileRefused, read_json, safe_name, typed, whole, write_text

from . import keys

FILE_NAME = "param_to_param_group_map.json"
_WRAPPERS = {"module", "_orig_mod"}


def param_to_param_group_map(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], prefix: str = "model.module"
) -> dict[str, int]:
    """Return the map of a model and its optimizer.

    Args:
        model: The model, possibly wrapped. Leading ``module.`` and ``_orig_mod.`` in names are ignored.
        optimizer: The optimizer, or several, whose groups are numbered consecutively, as Megatron chains them.
        prefix: Prefix of model keys in fsdp_dtensor.

    Raises:
        ValueError: If a parameter that requires a gradient is in no group.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    groups = [group["params"] for one in optimizers for group in one.param_groups]
    number = {id(parameter): index for index, group in enumerate(groups) for parameter in group}
    mapped = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        while len(parts) > 1 and parts[0] in _WRAPPERS:
            parts.pop(0)
        if id(parameter) in number:
            mapped[f"{prefix}.{'.'.join(parts)}"] = number[id(parameter)]
        elif parameter.requires_grad:
            raise ValueError(
                f"{name} is in no parameter group. Pass all optimizers of the model, or freeze the parameter."
            )
    return mapped


def write_map(mapped: Mapping[str, int], path: Path) -> None:
    """Write a map as JSON."""
    write_text(path, json.dumps(dict(mapped), indent=2) + "\n")


def read_map(path: Path) -> dict[str, int]:
    """Read a map from JSON.

    Raises:
        CheckpointError: If it is not such a file.
    """
    try:
        mapped = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} could not be read as JSON: {error}") from error
    try:
        return {safe_name(name): whole(n, f"the group of {name}") for name, n in typed(mapped, dict, "it").items()}
    except FileRefused as error:
        raise CheckpointError(
            f"{path} is not a JSON object that maps parameter names to group numbers: {error}."
        ) from None


def map_from_dcp(directory: Path, prefix: str = "model.module") -> dict[str, int]:
    """Read the map that Megatron's ``--dump-param-to-param-group-map`` has written as a DCP directory.

    Its names begin with ``module.module``, which is replaced by ``prefix``.

    Raises:
        CheckpointError: If it is not a DCP directory, or contains something else.
    """
    reader = CheckpointReader(directory)
    mapped = {}
    for key in reader:
        value = reader.read(key)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if type(value) is not int:
            raise CheckpointError(f"{directory}: {key} is {type(value).__name__}, not a group number.")
        mapped[key.replace("module.module", prefix)] = value
    return mapped


def find_groups(common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Find the optimizer's groups in ``common.pt``, whether of one optimizer, a wrapped one, or several."""

    def found(node: Any) -> Iterator[dict[str, Any]]:
        if not isinstance(node, Mapping):
            return
        if isinstance(node.get("param_groups"), list):
            yield from node["param_groups"]
            return
        for inner in node.values():
            yield from found(inner)

    return list(found(common.get("optimizer")))


def group_of(candidates: Iterable[str], mapped: Mapping[str, int], count: int) -> int | None:
    """Return the number of the group of a parameter that may appear under several keys, or None if none is in the map.

    Raises:
        CheckpointError: If the map refers to more groups than the checkpoint has.
    """
    for key in candidates:
        if key in mapped:
            if not 0 <= mapped[key] < count:
                raise CheckpointError(
                    f"The map puts {key} into group {mapped[key]}, but the checkpoint's optimizer has {count} groups. "
                    "Write the map with the settings of the training run."
                )
            return mapped[key]
    return None


def groups_from_options(reader: CheckpointReader, prefixes: keys.Prefixes) -> list[dict[str, Any]]:
    """Rebuild the optimizer's groups from the options that fsdp_dtensor stores for each parameter.

    Each distinct set of options is a group.
    """
    options: dict[str, dict[str, Any]] = {}
    for key in reader:
        if (parsed := prefixes.parse_group(key)) is not None:
            name, option = parsed
            options.setdefault(name, {})[option] = reader.read(key)
    groups: dict[str, dict[str, Any]] = {}
    for group in options.values():
        groups.setdefault(repr(sorted(group.items())), group)
    return list(groups.values())
