"""Which entry of a checkpoint goes where in an optimizer, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.optim.own_steps import whole_step_of
from mfsdp_compile.runtime.optim.state import (
    PREFIX,
    follows_rows,
    initial_state,
    is_by_element,
    is_number,
    named_param_groups,
)
from mfsdp_compile.runtime.owner import name_of

from .dcp_reader import CheckpointReader
from .differences import Differences
from .errors import CheckpointError
from .megatron_states import PREFIX as MEGATRON_PREFIX
from .megatron_states import MegatronStates
from .stored_groups import StoredGroups, numbered
from .tied import check_equal, memory_beside
from .weights import inner_name

_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups."


class OptimizerPlan:
    """Plans an optimizer's state and the settings of its groups, by name of parameter.

    Args:
        megatron: What a checkpoint with Megatron's names says. None: it has others.
        differences: Gets the differences. The parameters of another shape are known.
        is_of_class: Whether the state is that of an optimizer of the same class, as far as the checkpoint says.

    Raises:
        CheckpointError: If the checkpoint does not name parameters.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        megatron: MegatronStates | None,
        differences: Differences,
        is_of_class: bool,
    ) -> None:
        self.staged: dict[str, Any] = {}  # by stored key; None for what is not a tensor
        self.elsewhere: set[str] = set()  # stored keys of state that other ranks hold
        self._reader = reader
        self._stored = reader.metadata.state_dict_metadata
        self._optimizer = optimizer
        self._megatron = megatron
        self._differences = differences
        self._is_of_class = is_of_class
        self._conflict: CheckpointError | None = None
        self._state_of: dict[str, tuple[Any, ...]] = {}  # stored key -> parameter's name, path in its state
        self._firsts: dict[tuple[Any, ...], tuple[str, str]] = {}  # what _state_of has -> stored name and key
        self._twins: list[tuple[str, str, str, str]] = []  # names of one parameter's state, and their stored keys
        self._numbers: dict[str, str] = {}  # stored keys of numbers, and their names
        self._steps: dict[str, Tensor] = {}  # parameter's name -> its steps, where the checkpoint counts them by group
        self._initial: dict[tuple[str, str], Any] = {}  # parameter's name, and a state that the checkpoint lacks
        self._megatron_name: dict[str, str] = {}  # parameter's name -> its name in the checkpoint
        params = {name_of(param): param for group in optimizer.param_groups for param in group["params"]}
        self._known = self._names(module, params)
        self._refuse_numbers()
        stored = StoredGroups.of(reader) if megatron is None else None
        in_groups = stored.names() if stored is not None else []
        self._prefix = max(
            (MEGATRON_PREFIX, PREFIX, ""),
            key=lambda prefix: sum(name in self._known for name in self._names_after(prefix, in_groups)),
        )
        self._groups = self._plan_groups(stored) if stored is not None else named_param_groups(optimizer)
        stateful = self._plan_states(params)
        self._note_missing(stateful, stored)
        if megatron is not None:
            self._groups = self._merged_groups(self._megatron_group)

    def check(self) -> None:
        """Raise CheckpointError if groups are not those of the checkpoint. For after other differences were refused."""
        if self._conflict is not None:
            raise self._conflict

    def check_read(self) -> None:
        """Compare what was read with what it must be.

        Raises:
            CheckpointError: A number is something else, or two entries for one parameter differ.
        """
        for key, name in self._numbers.items():
            value = self.staged[key]
            if not isinstance(value, (int, float)) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise CheckpointError(
                    f"{self._reader.directory}: {name} is {value!r:.80}, not a number. Nothing was loaded."
                )
        check_equal(self._reader.directory, self._twins, self.staged)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, of what has been read."""
        state: dict[str, dict[str, Any]] = {}
        for key, (name, *path) in self._state_of.items():
            compat.set_element(state.setdefault(PREFIX + name, {}), tuple(path), self.staged[key])
        for (name, entry), first in self._initial.items():
            state[PREFIX + name][entry] = first
        for name, step in self._steps.items():
            state[PREFIX + name].setdefault("step", step.clone())
        if whole_step_of(self._optimizer) is not None:  # empty: starts over, as allow_missing says
            state = {PREFIX + name: {} for name in self._known.values()} | state
        return {"state": state, "param_groups": self._groups}

    # -- names --------------------------------------------------------------------------------------------------------

    def _names(self, module: nn.Module, params: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of the optimizer's parameters, by each name that they have in the module."""
        first_name = {id(param): name for name, param in params.items()}
        known = {inner_name(name): name for name in params}
        for name, param in module.named_parameters(remove_duplicate=False):  # other names of tied ones
            if id(param) in first_name:
                known[inner_name(name)] = first_name[id(param)]
        return known

    def _refuse_numbers(self) -> None:
        for key in self._stored:
            if key.startswith(_STATE) and len(path := self._reader.recorded_path(key)) > 2 and type(path[2]) is int:
                raise numbered(self._reader, f"number {path[2]}")

    def _names_after(self, prefix: str, in_groups: Collection[str]) -> set[str]:
        """Return the parameters of the checkpoint, assuming that ``prefix`` precedes their names."""
        start = f"{_STATE}{prefix}"
        keys = (key.removeprefix(start) for key in self._stored if key.startswith(start))
        names = {inner_name(key.rpartition(".")[0]) for key in keys}
        return names | {inner_name(name.removeprefix(prefix)) for name in in_groups if name.startswith(prefix)}

    def _plain(self, name: Any) -> str:
        """Return the name in the module of a stored name."""
        return inner_name(str(name).removeprefix(self._prefix))

    def _state_path(self, key: str) -> tuple[Any, ...]:
        """Return the stored name of a parameter, and the path of a value in its state."""
        path = self._reader.recorded_path(key)
        return path[2:] if len(path) > 3 else key.removeprefix(_STATE).rpartition(".")[::2]

    def _is_empty_state(self, key: str) -> bool:
        """Whether a stored value is the empty state of a parameter that another rank stepped (``whole=True``)."""
        return len(self._reader.recorded_path(key)) == 3 and isinstance(self._stored[key], BytesStorageMetadata)

    # -- state --------------------------------------------------------------------------------------------------------

    def _plan_states(self, params: Mapping[str, Any]) -> set[str]:
        """Plan all state. Returns the names of parameters that have some in the checkpoint."""
        found: dict[str, list[tuple[str, str, tuple[Any, ...]]]] = {}  # by parameter: key, stored name, path
        for key in self._stored:
            if not key.startswith(_STATE) or self._is_empty_state(key):
                continue
            full_path = self._state_path(key)
            name, path = self._plain(full_path[0]), full_path[1:]
            if (owner := self._known.get(name)) is None:
                self._differences.add("unexpected", f"optimizer.{name}.{path[0]}")
            elif self._megatron is None or not self._megatron.is_main_weight(key):
                found.setdefault(owner, []).append((key, name, path))
        reshaped = {name.removeprefix("model.") for name in self._differences.names("reshaped")}
        whole = whole_step_of(self._optimizer)
        group_of = {name: group for group in self._groups for name in group["params"]}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if (owner := name_of(param)) not in found:
                    continue
                if owner in reshaped:  # a part of its state is useless; the state starts fresh
                    for _, _, path in found[owner]:
                        how = "of a parameter of another shape"
                        self._differences.add("reshaped", f"optimizer.{owner}.{path[0]}", how)
                elif whole is not None and not whole.owns(param):
                    self.elsewhere.update(key for key, _, _ in found[owner])
                else:
                    # A parameter that is tied here has several names. That which the optimizer has goes before.
                    entries = sorted(found[owner], key=lambda entry: entry[1] != inner_name(owner))
                    self._plan_state(param, owner, entries, group, group_of[PREFIX + owner])
        return set(found)

    def _plan_state(
        self,
        param: Any,
        owner: str,
        entries: list[tuple[str, str, tuple[Any, ...]]],
        group: Mapping[str, Any],
        merged: Mapping[str, Any],
    ) -> None:
        """Plan the state of a parameter.

        Args:
            entries: Keys of the checkpoint, with the stored name of the parameter and the path in its state.
            group: The parameter's group as the program has made it.
            merged: The same with the settings of the checkpoint.
        """
        first = initial_state(self._optimizer, group, param)
        with_stored = initial_state(self._optimizer, {**merged, "params": [param]}, param)
        expected = {key: _shapes(value) for key, value in with_stored.items()}
        expected |= {key: _shapes(value) for key, value in self._optimizer.state.get(param, {}).items()}
        del with_stored
        unfit = [(path, how) for key, _, path in entries if (how := self._unlike(key, path, param, expected))]
        if unfit:  # all of it starts over
            for path, how in unfit:
                self._differences.add("reshaped", f"optimizer.{owner}.{path[0]}", how)
            return
        for key, name, path in entries:
            if not self._is_of_class and is_by_element(self._optimizer) and path[0] not in expected:
                self._differences.add("unexpected", f"optimizer.{owner}.{path[0]}")
                continue
            target = (owner, *path)
            if target in self._firsts and self._firsts[target][0] != name:
                if self._differences.is_allowed("unexpected", f"optimizer.{name}.{path[0]}"):
                    self._differences.add("unexpected", f"optimizer.{name}.{path[0]}")
                    continue
                first_name, first_key = self._firsts[target]
                first_entry, entry = (f"optimizer.{known}.{path[0]}" for known in (first_name, name))
                self._twins.append((first_entry, entry, first_key, key))
            else:
                self._firsts[target] = (name, key)
                self._state_of[key] = target
            if isinstance(self._stored[key], BytesStorageMetadata) and _at(expected, path) == torch.Size():
                self._numbers[key] = f"optimizer.{name}.{path[0]}"
            self._stage(key, param, owner, str(path[0]))
            if self._megatron is not None:
                self._megatron_name[owner] = name
                if (step := self._megatron.step_of(name)) is not None:
                    self._steps[owner] = step
        held = {str(path[0]) for _, _, path in entries} | ({"step"} if owner in self._steps else set())
        for entry, value in first.items():  # a step would fail without it
            if entry not in held:
                self._differences.add("missing", f"optimizer.{owner}.{entry}")
                self._initial[owner, entry] = value

    def _stage(self, key: str, param: Any, owner: str, state: str) -> None:
        """Make memory for an entry."""
        info = self._stored[key]
        if isinstance(info, BytesStorageMetadata):
            self.staged[key] = None
        elif whole_step_of(self._optimizer) is not None or not follows_rows(self._optimizer, state, info.size, param):
            self._reader.check(key)  # before memory is allocated for it
            self.staged[key] = torch.empty(info.size, dtype=info.properties.dtype)
        else:
            dtype = info.properties.dtype
            if dtype.is_floating_point and dtype != param.dtype:
                self._differences.add("cast", f"optimizer.{owner}.{state}", f"{dtype} there, {param.dtype} here")
                dtype = param.dtype
            self.staged[key] = memory_beside(param, dtype)

    def _unlike(self, key: str, path: tuple[Any, ...], param: Any, expected: Mapping[str, Any]) -> str:
        """Return how an entry differs in shape from what the optimizer can step with; empty if it does not."""
        info, state = self._stored[key], str(path[0])
        wanted = _at(expected, path)
        is_one = is_number(self._optimizer, state)
        if wanted is None and (is_one or is_by_element(self._optimizer)):
            of_param = not is_one and not isinstance(info, BytesStorageMetadata) and info.size.numel() != 1
            wanted = param.shape if of_param else torch.Size()
        if wanted is None:  # state that the optimizer creates later, or that only its first step can tell
            return ""
        if isinstance(info, BytesStorageMetadata):
            return f"no tensor there, {tuple(wanted)} here" if len(wanted) else ""
        return f"{tuple(info.size)} there, {tuple(wanted)} here" if info.size != wanted else ""

    def _note_missing(self, stateful: set[str], stored: StoredGroups | None) -> None:
        """Note parameters that the checkpoint lacks, and entries that nothing reads."""
        groups = stored.params.values() if stored is not None else ()
        settled = {self._known[name] for held in groups for name in map(self._plain, held) if name in self._known}
        if stateful or any(groups) or not any(key.startswith("optimizer.") for key in self._stored):
            for group, merged in zip(self._optimizer.param_groups, self._groups, strict=True):
                for param in group["params"]:
                    if (name := name_of(param)) in stateful or not param.requires_grad:
                        continue
                    # SGD without momentum has none, and LBFGS that of one parameter.
                    if name not in settled or initial_state(self._optimizer, {**merged, "params": [param]}, param):
                        self._differences.add("missing", f"optimizer.{name}")
        for held in groups:
            strangers = [self._plain(name) for name in held if self._plain(name) not in self._known]
            if not stateful or len(strangers) == len(held):  # others have nothing to lose: they are frozen
                for name in strangers:
                    self._differences.add("unexpected", f"optimizer.{name}")
        if self._megatron is None:
            for key in self._stored:
                if key.startswith("optimizer.") and not key.startswith((_STATE, _GROUPS)):
                    self._differences.add("unexpected", key)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _plan_groups(self, stored: StoredGroups) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the stored settings of their parameters."""

        def known(name: str) -> str | None:
            found = self._known.get(self._plain(name))
            return None if found is None else PREFIX + found

        return self._merged_groups(lambda number, group: stored.merged(number, group, known))

    def _merged_groups(self, merged: Callable[[int, dict[str, Any]], dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the optimizer's groups with stored settings. The first conflict is kept for :meth:`check`."""
        groups = named_param_groups(self._optimizer)
        for number, group in enumerate(groups):
            try:
                groups[number] = merged(number, group)
            except CheckpointError as error:
                self._conflict = self._conflict or error
        return groups

    def _megatron_group(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group of the optimizer with the settings of Megatron's groups that it has too."""
        assert self._megatron is not None
        names = [self._megatron_name.get(str(name).removeprefix(PREFIX)) for name in group["params"]]
        found = [
            {key: value for key, value in self._megatron.settings_of(name).items() if key in group}
            for name in names
            if name is not None
        ]
        if differing := sorted({key for one in found for key in one if one[key] != found[0].get(key)}):
            raise CheckpointError(
                f"Parameter group {number} of the {type(self._optimizer).__name__} holds parameters with different "
                f"{', '.join(differing)} in {self._reader.directory}. Use the same parameter groups as when it was "
                "saved. Nothing was loaded."
            )
        settings: dict[str, Any] = {**group, **(found[0] if found else {})}
        return settings | {key: group[key] for key in ("params", "param_names") if key in group}


def _shapes(value: Any) -> Any:
    """Return the shapes in a state: those of tensors, none for numbers, in the same structure."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (bool, int, float)):
        return torch.Size()
    if isinstance(value, Mapping):
        return {str(key): _shapes(held) for key, held in value.items()}
    return {str(i): _shapes(held) for i, held in enumerate(value)} if isinstance(value, (list, tuple)) else None


def _at(shapes: Any, path: tuple[Any, ...]) -> torch.Size | None:
    for step in path:
        shapes = shapes.get(str(step)) if isinstance(shapes, dict) else None
    return shapes if isinstance(shapes, torch.Size) else None
