"""The optimizer in a checkpoint with Megatron's names, such as ``mfsdp convert`` makes of torch_dist.

::

    optimizer.state.module.module.module.layers.0.weight.exp_avg           a state
    optimizer.state.module.module.module.layers.0.weight.param             the main weight, in float32
    optimizer.param_to_group_meta.module.module.module.layers.0.weight.lr  a parameter's setting, if groups were mapped
    optimizer.param_groups.0.step                                          a group's setting; it names no parameters

Megatron counts steps by group, torch by parameter. It keeps weights in the dtype of the model, and main weights among
the states of the optimizer; here the shards are the main weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .dcp_reader import CheckpointReader
from .errors import CheckpointError

PREFIX = "module.module.module."
"""Prefix of parameters in the names of states."""

_STATE = re.compile(rf"optimizer\.state\.{re.escape(PREFIX)}(.+)\.([^.]+)")
_OF_PARAMETER = re.compile(rf"optimizer\.param_to_group_meta\.{re.escape(PREFIX)}\.?(.+)\.([^.]+)")
_OF_GROUP = re.compile(r"optimizer\.(?:(\d+)\.)?(?:optimizer\.)?param_groups\.(\d+)\.([^.]+)")

_MAIN_WEIGHTS = ("param", "fp32_param")
"""What Megatron calls main weights in the formats fully_reshardable and fully_sharded_model_space."""


@dataclass(frozen=True)
class MegatronStates:
    """States and settings by parameter.

    Args:
        directory: The checkpoint, for messages.
        main_weights: Keys of main weights, by parameter.
        settings: Settings of parameters whose groups were mapped.
        groups: Settings of the groups, which name no parameters.
    """

    directory: str
    main_weights: Mapping[str, str]
    settings: Mapping[str, Mapping[str, Any]]
    groups: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, reader: CheckpointReader, names: Collection[str]) -> MegatronStates | None:
        """Read what a checkpoint says about parameters of these names. None if it does not use Megatron's names."""
        matches = ((key, _STATE.fullmatch(key)) for key in reader)
        found = [
            (key, match)
            for key, match in matches
            if match and match[1] in names and f"module.module.{match[1]}" not in names
        ]
        if not found:
            return None
        settings: dict[str, dict[str, Any]] = {}
        groups: dict[tuple[str, str], dict[str, Any]] = {}
        for key in reader:
            if match := _OF_PARAMETER.fullmatch(key):
                settings.setdefault(match[1], {})[match[2]] = reader.read(key)
            elif (match := _OF_GROUP.fullmatch(key)) and match[3] != "params":
                groups.setdefault((match[1] or "", match[2]), {})[match[3]] = reader.read(key)
        main_weights = {match[1]: key for key, match in found if match[2] in _MAIN_WEIGHTS}
        return cls(str(reader.directory), main_weights, settings, tuple(groups.values()))

    def is_main_weight(self, key: str) -> bool:
        match = _STATE.fullmatch(key)
        return match is not None and self.main_weights.get(match[1]) == key

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a parameter's group. Empty if it is unknown which of several groups that is."""
        if name in self.settings:
            return self.settings[name]
        return self.groups[0] if len(self.groups) == 1 else {}

    def step_of(self, name: str) -> Tensor | None:
        """Return the number of steps that a parameter has taken. None if the checkpoint does not say.

        Raises:
            CheckpointError: Its group is unknown, and groups have taken different numbers of steps.
        """
        found = [group["step"] for group in (self.settings_of(name), *self.groups) if "step" in group]
        if not found:
            return None
        if "step" not in self.settings_of(name) and len(set(map(float, found))) > 1:
            raise CheckpointError(
                f"The optimizer's groups in {self.directory} have taken different numbers of steps "
                f"({', '.join(map(str, found))}), and nothing says in which group {name} is. Convert the checkpoint "
                "again, with --param-to-param-group-map-json. Nothing was loaded."
            )
        return torch.tensor(float(found[0]))
