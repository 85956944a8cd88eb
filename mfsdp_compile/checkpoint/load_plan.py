"""Which entry of a checkpoint goes where in a model and its optimizer, and what does not fit.

Names are those of the module that was sharded. Other programs put prefixes before them (``model.``, ``module.``); the
prefix with which most names match is used, so checkpoints of plain models, DDP and FSDP2 work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.partition import own_rows
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.sharded_module import ShardedModule

from .dcp_reader import CheckpointReader
from .differences import Differences, listed
from .megatron_states import MegatronStates
from .optimizer_plan import OptimizerPlan
from .tied import check_equal, memory_beside
from .weights import inner_name

EXTRA_STATE = "_extra_state"
"""Last part of the names of the values that modules return from ``get_extra_state``."""

_MODEL_PREFIXES = ("model.module.", "model.", "module.", "")
_NOT_OF_MODEL = ("optimizer.", "optim.", "rng.")


class LoadPlan:
    """Which stored key goes where. Made without communication, from information that is the same on all ranks.

    Args:
        allowed: Patterns of names that may differ, by kind of difference.
        is_of_class: Whether the checkpoint says that its state is that of an optimizer of the same class.

    Raises:
        CheckpointError: If the checkpoint does not match.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        model: ShardedModule,
        optimizer: torch.optim.Optimizer | None,
        allowed: Mapping[str, Sequence[str]],
        is_of_class: bool,
    ) -> None:
        self.in_place: dict[str, Tensor] = {}  # by stored key: the model's own memory
        self.staged: dict[str, Any] = {}  # memory of the load's; None for what is not a tensor
        self.differences = Differences(reader.directory, allowed)
        self._reader = reader
        self._stored = reader.metadata.state_dict_metadata
        self._extra_states: dict[str, Any] = {}  # by name in the module
        self._not_in_place: dict[str, str] = {}  # name in the module -> stored key: for load_state_dict
        self._twins: list[tuple[str, str, str, str]] = []  # two names of one parameter here, and their stored keys
        self._module = model.module
        self._used: set[str] = set()
        self.others: tuple[str, ...] = ()  # stored keys that are nobody's
        names = {inner_name(name) for name, _ in self._module.named_parameters(remove_duplicate=False)}
        self._megatron = MegatronStates.of(reader, names)
        self._plan_model()
        self._optimizer: OptimizerPlan | None = None
        if optimizer is not None:
            self._optimizer = OptimizerPlan(
                reader, self._module, optimizer, self._megatron, self.differences, is_of_class
            )
            self.staged |= self._optimizer.staged
        self.differences.refuse()
        for key in [*self.in_place, *self.staged, *self._elsewhere]:
            self._reader.check(key)
        if self._optimizer is not None:
            self._optimizer.check()

    @property
    def _elsewhere(self) -> set[str]:
        return self._optimizer.elsewhere if self._optimizer is not None else set()

    def described(self) -> list[tuple[str, str]]:
        """Return what is read, here or on other ranks."""
        elsewhere = self._elsewhere
        return [
            (key, _describe(info))
            for key, info in self._stored.items()
            if key in self.in_place or key in self.staged or key in elsewhere
        ]

    def check_read(self) -> None:
        """Raise CheckpointError if what was read is not what it must be."""
        check_equal(self._reader.directory, self._twins, self.staged)
        if self._optimizer is not None:
            self._optimizer.staged = self.staged
            self._optimizer.check_read()

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state dict, of what has been read."""
        return self._optimizer.state_dict() if self._optimizer is not None else {}

    def load_rest(self) -> None:
        """Load what modules take from ``load_state_dict`` only."""
        rest = {name: self.staged[key] for name, key in self._not_in_place.items()} | self._extra_states
        for name, value in rest.items():
            self._module.load_state_dict({name: value}, strict=False)

    # -- the model ----------------------------------------------------------------------------------------------------

    def _plan_model(self) -> None:
        state = self._module.state_dict()
        inner = {inner_name(name): name for name in state}
        prefix = max(_MODEL_PREFIXES, key=lambda prefix: sum(name in inner for name in self._of_model(prefix)))
        stored = self._of_model(prefix)
        extra = {name: key for name, key in stored.items() if EXTRA_STATE in name}
        # A tied parameter has several names here, and possibly only one of them in the checkpoint.
        params = dict(self._module.named_parameters(remove_duplicate=False))
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        names_of: dict[int, list[str]] = {}
        for name, param in params.items():
            names_of.setdefault(id(param), []).append(name)
        first_found: dict[int, tuple[str, str]] = {}  # name and stored key
        for name, value in state.items():
            if name.rpartition(".")[2] == EXTRA_STATE:
                self._plan_extra_state(name, extra)
                continue
            found = stored.get(inner_name(name))
            if found is None:
                twins = names_of.get(id(params.get(name)), ())
                if not any(inner_name(twin) in stored for twin in twins):
                    self.differences.add("missing", f"model.{name}")
                continue
            self._used.add(found)
            if not isinstance(value, Tensor):
                if isinstance(self._stored[found], BytesStorageMetadata):
                    self.staged[found] = None
                    self._not_in_place[name] = found
                else:
                    self.differences.add("reshaped", f"model.{name}", f"a tensor there, a {type(value).__name__} here")
            elif self._fits(f"model.{name}", found := self._best(name, found, value.dtype), value.shape, value.dtype):
                own = params.get(name, buffers.get(name))
                if own is None or _address(own) != _address(value):  # created by a hook of the module
                    self.staged[found] = memory_beside(value)
                    self._not_in_place[name] = found
                elif (first := first_found.setdefault(id(own), (name, found)))[0] is name or name not in params:
                    self.in_place[found] = value
                elif self.differences.is_allowed("unexpected", f"model.{name}"):
                    self.differences.add("unexpected", f"model.{name}")
                else:
                    self.staged[first[1]], self.staged[found] = memory_beside(value), memory_beside(value)
                    self._twins.append((f"model.{first[0]}", f"model.{name}", first[1], found))
        for name, key in stored.items():
            if key not in self._used:
                self.differences.add("unexpected", f"model.{name}")
        self._leave_out_others(stored.values())

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

    def _leave_out_others(self, of_model: Iterable[str]) -> None:
        """Note entries that are neither the model's nor the optimizer's, and that a load does not return either."""
        reader, known = self._reader, set(of_model)
        self.ranks_with_generators = {key.split(".")[1] for key in self._stored if key.startswith("rng.")}
        self.has_extra = "extra" in reader and reader.is_tensor("extra")
        others = [key for key in self._stored if key not in known and not key.startswith(_NOT_OF_MODEL)]
        others = [key for key in others if not (key == "extra" and self.has_extra)]
        for key in [key for key in others if key.startswith("model.")]:
            self.differences.add("unexpected", key)
            others.remove(key)
        if self._megatron is not None:  # Megatron's own arguments and schedulers
            return
        self.others = tuple(others)
        if unnamed := [key for key in others if not self.differences.is_allowed("unexpected", key)]:
            warn(
                f"{reader.directory} also holds {listed(unnamed, 4)}, neither the model's nor the optimizer's, which "
                "is not loaded. If the program needs it, read it with torch.distributed.checkpoint; name it in "
                "allow_unexpected.",
            )

    def _plan_extra_state(self, name: str, stored: dict[str, str]) -> None:
        """Plan a result of ``get_extra_state``: a value, a tensor, or a dictionary of these that DCP has flattened."""
        keys = {
            inner: key
            for inner, key in stored.items()
            if inner == inner_name(name) or inner.startswith(f"{inner_name(name)}.")
        }
        if not keys:
            self.differences.add("missing", f"model.{name}")
            return
        self._used.update(keys.values())
        if inner_name(name) in keys:
            self._extra_states[name] = self._reader.read(keys[inner_name(name)])
            return
        whole: dict[str, Any] = {}
        for key in keys.values():
            path = [*self._reader.path(key)]
            position = max(i for i, step in enumerate(path) if str(step).endswith(EXTRA_STATE))
            compat.set_element(whole, (EXTRA_STATE, *path[position + 1 :]), self._reader.read(key))
        self._extra_states[name] = whole[EXTRA_STATE]

    def _fits(self, name: str, key: str, shape: torch.Size, dtype: torch.dtype) -> bool:
        info = self._stored[key]
        if not isinstance(info, TensorStorageMetadata) or info.size != shape:
            there = tuple(info.size) if isinstance(info, TensorStorageMetadata) else "no tensor"
            self.differences.add("reshaped", name, f"{there} there, {tuple(shape)} here")
            return False
        if info.properties.dtype != dtype:
            self.differences.add("cast", name, f"{info.properties.dtype} there, {dtype} here")
        return True


def _address(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    local = own_rows(tensor) if isinstance(tensor, DTensor) else tensor
    return local.data_ptr(), tuple(local.shape)


def _describe(info: TensorStorageMetadata | BytesStorageMetadata) -> str:
    return f"{tuple(info.size)} {info.properties.dtype}" if isinstance(info, TensorStorageMetadata) else "a value"
