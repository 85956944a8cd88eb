"""Which entry of a checkpoint goes where in a model and its optimizer, and what does not fit.

Names are those of the module that was sharded. Other programs put prefixes before them (``model.``, ``module.``); the
prefix with which most names match is used, so checkpoints of plain models, DDP and FSDP2 work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor
from mfsdp_compile.runtime.optim.state import PREFIX, follows_rows, initial_state, state_dict_groups
from mfsdp_compile.runtime.optim.whole_step import whole_step_of
from mfsdp_compile.runtime.owner import name_of
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.wrapper import MegatronFSDP

from .dcp_reader import CheckpointReader
from .errors import CheckpointError
from .megatron_states import PREFIX as MEGATRON_PREFIX
from .megatron_states import MegatronStates
from .weights import inner_name

EXTRA_STATE = "_extra_state"
"""Last part of the names of the values that modules return from ``get_extra_state``."""

_MODEL_PREFIXES = ("model.module.", "model.", "module.", "")
_NOT_OF_MODEL = ("optimizer.", "optim.", "rng.")


DIFFERENCES = {
    "missing": "missing",
    "unexpected": "unexpected",
    "reshaped": "of another shape",
    "cast": "of another dtype",
}
"""Kinds of differences between a model and a checkpoint, as in the arguments ``allow_...`` of a load, and in words."""


class LoadPlan:
    """Which stored key goes where. Made without communication, from information that is the same on all ranks.

    Args:
        allowed: Patterns of names that may differ, by kind of difference.

    Raises:
        CheckpointError: If the checkpoint does not match.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        model: MegatronFSDP,
        optimizer: torch.optim.Optimizer | None,
        allowed: Mapping[str, Sequence[str]],
    ) -> None:
        self.in_place: dict[str, Tensor] = {}  # by stored key: the model's own memory
        self.staged: dict[str, Any] = {}  # memory of the load's; None for what is not a tensor
        self.differences: dict[str, list[tuple[str, str]]] = {kind: [] for kind in DIFFERENCES}  # names, and how
        self._optimizer = optimizer
        self._reader = reader
        self._stored = reader.metadata.state_dict_metadata
        self._extra_states: dict[str, Any] = {}  # by name in the module
        self._not_in_place: dict[str, str] = {}  # name in the module -> stored key: for load_state_dict
        # Two names of one parameter, stored key of the second, target.
        self._twins: list[tuple[str, str, str, Any]] = []
        self._module = model.module
        self._state_of: dict[str, tuple[str, ...]] = {}  # stored key -> parameter's name, path in its state
        self._steps: dict[str, Tensor] = {}  # parameter's name -> its steps, where the checkpoint counts them by group
        self._initial: dict[tuple[str, str], Any] = {}  # parameter's name, and a state that the checkpoint lacks
        self._megatron_name: dict[str, str] = {}  # parameter's name -> its name in the checkpoint
        self._elsewhere: set[str] = set()  # stored keys of state that other ranks hold
        self._used: set[str] = set()
        names = {inner_name(name) for name, _ in self._module.named_parameters(remove_duplicate=False)}
        self._megatron = MegatronStates.of(reader, names)
        self._plan_model()
        if optimizer is not None:
            self._plan_optimizer(optimizer)
        self._refuse(allowed)
        for key in [*self.in_place, *self.staged, *self._elsewhere]:
            self._reader.check(key)
        self._groups = self._plan_groups(optimizer) if optimizer is not None else []

    def described(self) -> list[tuple[str, str]]:
        """Return what is read, here or on other ranks."""
        return [
            (key, _describe(info))
            for key, info in self._stored.items()
            if key in self.in_place or key in self.staged or key in self._elsewhere
        ]

    def _differs(self, kind: str, name: str, how: str = "") -> None:
        self.differences[kind].append((name, how))

    # -- the model ----------------------------------------------------------------------------------------------------

    def _plan_model(self) -> None:
        state = self._module.state_dict()
        inner = {inner_name(name): name for name in state}
        prefix = max(_MODEL_PREFIXES, key=lambda prefix: sum(name in inner for name in self._of_model(prefix)))
        stored = self._of_model(prefix)
        # A tied parameter has several names here, and possibly only one of them in the checkpoint.
        params = dict(self._module.named_parameters(remove_duplicate=False))
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        names_of: dict[int, list[str]] = {}
        for name, param in params.items():
            names_of.setdefault(id(param), []).append(name)
        first_found: dict[int, str] = {}
        for name, value in state.items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                self._plan_extra_state(name, stored)
                continue
            found = stored.get(inner_name(name))
            if found is None:
                twins = names_of.get(id(params.get(name)), ())
                if not any(inner_name(twin) in stored for twin in twins):
                    self._differs("missing", f"model.{name}")
                continue
            self._used.add(found)
            if not isinstance(value, Tensor):
                if isinstance(self._stored[found], BytesStorageMetadata):
                    self.staged[found] = None
                    self._not_in_place[name] = found
                else:
                    self._differs("reshaped", f"model.{name}", f"a tensor there, a {type(value).__name__} here")
            elif self._fits(f"model.{name}", found := self._best(name, found, value.dtype), value.shape, value.dtype):
                own = params.get(name, buffers.get(name))
                if own is None or _address(own) != _address(value):  # created by a hook of the module
                    self.staged[found] = _beside(value)
                    self._not_in_place[name] = found
                elif (first := first_found.setdefault(id(own), name)) is not name and name in params:
                    self.staged[found] = _beside(value)
                    self._twins.append((first, name, found, value))
                else:
                    self.in_place[found] = value
        unused = [name for name, key in stored.items() if key not in self._used]
        self.differences["unexpected"] += [(f"model.{name}", "") for name in unused]

    def _best(self, name: str, key: str, dtype: torch.dtype) -> str:
        """Return the key to load a weight from: that of its main weight, if this has the dtype of the shard."""
        main = self._megatron.main_weights.get(inner_name(name)) if self._megatron is not None else None
        if main is None or not self._reader.is_tensor(main):
            return key
        return main if self._reader.dtype(main) == dtype else key

    def _of_model(self, prefix: str) -> dict[str, str]:
        """Return the stored keys by their names in the module, assuming that ``prefix`` precedes them."""
        keys = [key for key in self._stored if key.startswith(prefix)]
        if not prefix:
            keys = [key for key in keys if not key.startswith(_NOT_OF_MODEL) and key != "extra"]
        return {inner_name(key.removeprefix(prefix)): key for key in keys}

    def _plan_extra_state(self, name: str, stored: dict[str, str]) -> None:
        """Plan a result of ``get_extra_state``: a value, a tensor, or a dictionary of these that DCP has flattened."""
        keys = {
            inner: key
            for inner, key in stored.items()
            if inner == inner_name(name) or inner.startswith(f"{inner_name(name)}.")
        }
        if not keys:
            self._differs("missing", f"model.{name}")
            return
        self._used.update(keys.values())
        if inner_name(name) in keys:
            self._extra_states[name] = self._reader.read(keys[inner_name(name)])
            return
        whole: dict[str, Any] = {}
        for key in keys.values():
            path = [*self._path(key)]
            position = max(i for i, step in enumerate(path) if str(step).endswith(EXTRA_STATE))
            compat.set_element(whole, (EXTRA_STATE, *path[position + 1 :]), self._reader.read(key))
        self._extra_states[name] = whole[EXTRA_STATE]

    def _path(self, key: str) -> tuple[Any, ...]:
        """Return the path of a stored value in the dictionaries and lists that were saved."""
        return self._recorded_path(key) or tuple(key.split("."))

    def _recorded_path(self, key: str) -> tuple[Any, ...]:
        """Return the path that the checkpoint records; empty if it records none."""
        return (self._reader.metadata.planner_data or {}).get(key, ())

    # -- the optimizer ------------------------------------------------------------------------------------------------

    def _plan_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        params = {}
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            params[name_of(param)] = param
        first_name = {id(param): name for name, param in params.items()}
        by_inner = {inner_name(name): name for name in params}
        for name, param in self._module.named_parameters(remove_duplicate=False):  # other names of tied ones
            if id(param) in first_name:
                by_inner[inner_name(name)] = first_name[id(param)]
        self._name_in_optimizer = by_inner
        self._optimizer_prefix = max(
            (MEGATRON_PREFIX, "module.", ""),
            key=lambda prefix: sum(name in by_inner for name in self._with_state(prefix)),
        )
        reshaped = {name.removeprefix("model.") for name, _ in self.differences["reshaped"]}
        whole = whole_step_of(optimizer)
        with_state: dict[str, set[str]] = {}  # parameter's name -> its entries
        for key, info in self._stored.items():
            if not key.startswith("optimizer.state.") or self._is_empty_state(key):
                continue
            name, state = self._state_key(key)
            owner = by_inner.get(name)
            if owner is None:
                self._differs("unexpected", f"optimizer.{name}.{state}")
                continue
            if self._megatron is not None and self._megatron.is_main_weight(key):
                continue
            with_state.setdefault(owner, set()).add(state)
            param = params[owner]
            if owner in reshaped:  # a part of its state is useless; the state starts fresh
                self._differs("reshaped", f"optimizer.{owner}.{state}", "of a parameter of another shape")
                continue
            if whole is not None and not whole.owns(param):
                self._elsewhere.add(key)
                continue
            self._state_of[key] = (owner, state) if whole is None else (owner, *self._state_path(key)[1:])
            if isinstance(info, BytesStorageMetadata):
                self.staged[key] = None
            elif whole is not None or not follows_rows(state, info.size, param):
                self._reader.check(key)  # before memory is allocated for it
                self.staged[key] = torch.empty(info.size, dtype=info.properties.dtype)
            else:
                dtype = info.properties.dtype
                if dtype.is_floating_point and dtype != param.dtype:
                    self._differs("cast", f"optimizer.{owner}.{state}", f"{dtype} there, {param.dtype} here")
                    dtype = param.dtype
                self.staged[key] = _beside(param, dtype)
            if self._megatron is not None:
                self._megatron_name[owner] = name
                if (step := self._megatron.step_of(name)) is not None:
                    self._steps[owner] = step
        if with_state or not any(key.startswith("optimizer.") for key in self._stored):
            without = [name for name, param in params.items() if name not in with_state and param.requires_grad]
            self.differences["missing"] += [(f"optimizer.{name}", "") for name in without]
        self._plan_missing_entries(optimizer, {name: its for name, its in with_state.items() if name not in reshaped})

    def _plan_missing_entries(self, optimizer: torch.optim.Optimizer, with_state: dict[str, set[str]]) -> None:
        """Plan initial values for what some of the checkpoint's parameters lack of their state: a step would fail."""
        for group in optimizer.param_groups:
            for param in group["params"]:
                name = name_of(param)
                if name not in with_state:
                    continue
                entries = with_state[name] | ({"step"} if name in self._steps else set())
                for entry, first in initial_state(optimizer, group, param).items():
                    if entry not in entries:
                        self._differs("missing", f"optimizer.{name}.{entry}")
                        self._initial[name, entry] = first

    def _is_empty_state(self, key: str) -> bool:
        """Whether a stored value is the empty state of a parameter that another rank stepped (``whole=True``)."""
        return len(self._recorded_path(key)) == 3 and isinstance(self._stored[key], BytesStorageMetadata)

    def _with_state(self, prefix: str) -> set[str]:
        start = f"optimizer.state.{prefix}"
        keys = (key.removeprefix(start) for key in self._stored if key.startswith(start))
        return {inner_name(key.rpartition(".")[0]) for key in keys}

    def _state_key(self, key: str) -> tuple[str, str]:
        """Return the parameter's name and the name of its state."""
        name, state = map(str, self._state_path(key)[:2])
        return inner_name(name.removeprefix(self._optimizer_prefix)), state

    def _state_path(self, key: str) -> tuple[Any, ...]:
        """Return the stored name of a parameter, and the path of a value in its state."""
        path = self._recorded_path(key)
        return path[2:] if len(path) > 3 else key.removeprefix("optimizer.state.").rpartition(".")[::2]

    def _plan_groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the stored settings of their parameters.

        New parameters take the settings of their group.
        """
        stored: dict[int, dict[str, Any]] = {}
        for key in self._stored if self._megatron is None else ():
            if key.startswith("optimizer.param_groups."):
                number, *setting = self._path(key)[2:]
                if str(number).isdecimal():  # else torch's form by parameter: the program's settings apply
                    compat.set_element(stored.setdefault(int(number), {}), tuple(setting), self._reader.read(key))
        group_of = {}
        for number, group in stored.items():
            for name in group.get("params", ()):
                known = self._name_in_optimizer.get(inner_name(str(name).removeprefix(self._optimizer_prefix)))
                group_of[f"{PREFIX}{known}"] = number
        groups = []
        for i, group in enumerate(state_dict_groups(optimizer)):
            sources = {group_of[name] for name in group["params"] if name in group_of}
            if len(sources) > 1:
                raise CheckpointError(
                    f"Parameter group {i} of the {type(optimizer).__name__} holds parameters of the groups "
                    f"{sorted(sources)} of {self._reader.directory}, so it has no single learning rate. Use the same "
                    "parameter groups as when it was saved. Nothing was loaded."
                )
            settings = stored[sources.pop()] if sources else {}
            if self._megatron is not None:
                settings = self._megatron_settings(i, group)
            own: dict[str, Any] = {key: group[key] for key in ("params", "param_names") if key in group}
            groups.append({**group, **settings, **own})
        return groups

    def _megatron_settings(self, number: int, group: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of Megatron's groups that a group of the optimizer has too."""
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
        return found[0] if found else {}

    # -- model and optimizer ------------------------------------------------------------------------------------------

    def _fits(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> bool:
        info = self._stored[key]
        if not isinstance(info, TensorStorageMetadata) or info.size != shape:
            there = tuple(info.size) if isinstance(info, TensorStorageMetadata) else "no tensor"
            self._differs("reshaped", name, f"{there} there, {tuple(shape)} here")
            return False
        if info.properties.dtype != dtype:
            self._differs("cast", name, f"{info.properties.dtype} there, {dtype} here")
        return True

    def _refuse(self, allowed: Mapping[str, Sequence[str]]) -> None:
        lines = []
        for kind, in_words in DIFFERENCES.items():
            refused = [
                f"{name} ({how})" if how else name
                for name, how in self.differences[kind]
                if not any(fnmatchcase(name, pattern) for pattern in allowed[kind])
            ]
            if refused:
                lines.append(f"  {in_words} (allow_{kind}): {_listed(refused)}")
        if lines:
            raise CheckpointError(
                f"{self._reader.directory} does not fit the model. Nothing was loaded.\n"
                + "\n".join(lines)
                + "\nName what is meant to be different in the argument in parentheses; patterns such as "
                "'model.head.*' do."
            )

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict, of what has been read."""
        if self._optimizer is None:
            return {}
        state: dict[str, dict[str, Any]] = {}
        for key, (name, *path) in self._state_of.items():
            compat.set_element(state.setdefault(f"module.{name}", {}), tuple(path), self.staged[key])
        for (name, entry), first in self._initial.items():
            state[f"module.{name}"][entry] = first
        for name, step in self._steps.items():
            state[f"module.{name}"].setdefault("step", step.clone())
        if whole_step_of(self._optimizer) is not None:  # empty: starts over, as allow_missing says
            state = {f"module.{name}": {} for name in self._name_in_optimizer.values()} | state
        return {"state": state, "param_groups": self._groups}

    def load_rest(self) -> None:
        """Load what modules take from ``load_state_dict`` only."""
        rest = {name: self.staged[key] for name, key in self._not_in_place.items()} | self._extra_states
        for name, value in rest.items():
            self._module.load_state_dict({name: value}, strict=False)

    def compare_twins(self) -> None:
        """Warn of two values of one parameter."""
        for first, second, key, loaded in self._twins:
            if not torch.equal(_local(self.staged[key]), _local(loaded)):
                warn(
                    f"{first!r} and {second!r} are one parameter here, but {self._reader.directory} has different "
                    f"values for them. The values of {first!r} were loaded.",
                    by=None,
                )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _address(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    local = _local(tensor)
    return local.data_ptr(), tuple(local.shape)


def _beside(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return new memory for this rank's part of a tensor."""
    if not isinstance(tensor, RowShardedTensor):
        return torch.empty_like(tensor.detach(), dtype=dtype)
    local = torch.empty_like(tensor.to_local().detach(), dtype=dtype)
    return RowShardedTensor.wrap(local, tensor.row_split, tensor.topology)


def _describe(info: TensorStorageMetadata | BytesStorageMetadata) -> str:
    return f"{tuple(info.size)} {info.properties.dtype}" if isinstance(info, TensorStorageMetadata) else "a value"


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")
