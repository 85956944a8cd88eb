"""Parameter groups of an optimizer in a checkpoint, in the two forms that torch writes.

::

    optimizer.param_groups.0.lr                 a group's setting
    optimizer.param_groups.0.params             names of its parameters, one list or an entry for each
    optimizer.param_groups.layers.0.weight.lr   a parameter's setting (``flatten_optimizer_state_dict=True``)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mfsdp_compile.runtime import compat

from .dcp_reader import CheckpointReader
from .errors import CheckpointError

_GROUPS = "optimizer.param_groups."


@dataclass(frozen=True)
class StoredGroups:
    """Settings of groups by number, and which parameters they have.

    Args:
        directory: The checkpoint, for messages.
        settings: Settings of each group.
        params: Stored names of the parameters of each group.
    """

    directory: str
    settings: Mapping[int, Mapping[str, Any]]
    params: Mapping[int, tuple[str, ...]]

    @classmethod
    def of(cls, reader: CheckpointReader) -> StoredGroups:
        """Read the groups of a checkpoint.

        Raises:
            CheckpointError: They do not name their parameters, or two have the same parameter.
        """
        by_number: dict[int, dict[str, Any]] = {}
        by_name: dict[str, dict[str, Any]] = {}
        for key in reader:
            if not key.startswith(_GROUPS):
                continue
            path = reader.path(key)[2:]
            if path and str(path[0]).isdecimal():
                compat.set_element(by_number.setdefault(int(path[0]), {}), path[1:], reader.read(key))
            else:
                name, _, setting = key.removeprefix(_GROUPS).rpartition(".")
                by_name.setdefault(name, {})[setting] = reader.read(key)
        params: dict[int, tuple[str, ...]] = {}
        for number, group in by_number.items():
            held = group.pop("params", None)
            if not isinstance(held, (list, tuple)):
                raise CheckpointError(
                    f"{reader.directory}: parameter group {number} of the optimizer does not say which parameters it "
                    "has. Use another checkpoint. Nothing was loaded."
                )
            params[number] = tuple(name if isinstance(name, str) else f"number {name}" for name in held)
        if numbers := [name for names in params.values() for name in names if name.startswith("number ")]:
            raise numbered(reader, numbers[0])
        start = len(by_number) and max(by_number) + 1
        for number, (name, group) in enumerate(by_name.items(), start):  # each parameter is a group of its own
            by_number[number], params[number] = group, (name,)
        names = [name for held in params.values() for name in held]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(
                f"{reader.directory}: the parameter {twice} is in two parameter groups of the optimizer. Use another "
                "checkpoint. Nothing was loaded."
            )
        return cls(str(reader.directory), by_number, params)

    def names(self) -> list[str]:
        """Return the stored names of all parameters."""
        return [name for names in self.params.values() for name in names]

    def merged(self, number: int, group: Mapping[str, Any], known: Callable[[str], str | None]) -> dict[str, Any]:
        """Return a group of an optimizer with the stored settings of its parameters.

        New parameters take the settings of their group.

        Args:
            number: Number of the group.
            known: Returns the name that the optimizer has for a stored one.

        Raises:
            CheckpointError: Its parameters have different settings, or settings of another kind.
        """
        own = set(group["params"])
        sources = [source for source, names in self.params.items() if any(known(name) in own for name in names)]
        settings = self.settings[sources[0]] if sources else {}
        if any(not _equal(self.settings[source], settings) for source in sources):
            raise CheckpointError(
                f"Parameter group {number} of the optimizer holds parameters of the groups {sources} of "
                f"{self.directory}, so it has no single learning rate. Use the same parameter groups as when it was "
                "saved. Nothing was loaded."
            )
        for key, value in settings.items():
            if key in group and not _is_of_kind(value, group[key]):
                raise CheckpointError(
                    f"{self.directory}: the setting {key!r} of parameter group {sources[0]} of the optimizer is "
                    f"{value!r:.80}, which cannot take the place of {group[key]!r:.80}. Nothing was loaded."
                )
        if sources and "lr" in group and "lr" not in settings:
            raise CheckpointError(
                f"{self.directory}: parameter group {sources[0]} of the optimizer has no learning rate. Use another "
                "checkpoint. Nothing was loaded."
            )
        kept = {key: group[key] for key in ("params", "param_names") if key in group}
        return {**group, **settings, **kept}


def numbered(reader: CheckpointReader, which: str) -> CheckpointError:
    """Return the error that a checkpoint does not name parameters of the optimizer."""
    return CheckpointError(
        f"{reader.directory} numbers the optimizer's parameters ({which}) and does not name them: which one is meant "
        "depends on the order in which they were passed. Save with Checkpoints, or with the state dict of an optimizer "
        "that fully_shard_optimizer or compile_step extended. Without an optimizer, the weights can be loaded. Nothing "
        "was loaded."
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def _is_of_kind(stored: Any, own: Any) -> bool:
    """Whether a stored setting can take the place of one of the program's."""
    if stored is None or own is None or isinstance(own, Mapping):
        return True
    if isinstance(own, (list, tuple)):
        alike = isinstance(stored, (list, tuple)) and len(stored) == len(own)
        return alike and all(map(_is_of_kind, stored, own))
    if _is_number(own):
        return _is_number(stored)
    return isinstance(stored, str) == isinstance(own, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
