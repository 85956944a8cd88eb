"""What a module of a sharded model controls, which the module keeps."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.units import EagerUnit
from mfsdp_compile.runtime.memory.bucket import Bucket
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from .first_use import sharded
from .request import REQUEST

STATE = "_mfsdp_fsdp2"
"""Where a module keeps its :class:`ModuleState`."""
SETTINGS = "_mfsdp_settings"
"""Where it keeps the last call of each method that sets something."""
METHODS = "_mfsdp_forward_methods"
"""Where it keeps the names of methods, other than ``forward``, that read gathered parameters."""


@dataclass(eq=False)
class ModuleState:
    """What a module of a sharded model controls.

    Args:
        model: The sharded model.
        units: Units of the module; empty if it owns no parameters.
        name: Name of the module in the model; "" for the model.
        together: What each of the model's modules controls; its module keeps it alive.
        holder: The model, if it is a list of modules that ``fully_shard`` was called on: nothing else keeps it alive.
        syncs, all_reduces: Whether gradients are to be reduced at all, and over outer ranks.
        reductions: How many units' reductions may run at a time.
    """

    model: ShardedModel
    units: tuple[EagerUnit, ...]
    name: str
    together: weakref.WeakKeyDictionary[ModuleState, None]
    holder: nn.Module | None
    syncs: bool = True
    all_reduces: bool = True
    reductions: int = SchedulePolicy().reductions_in_flight

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleState:
        duplicate = memo[id(self)] = object.__new__(ModuleState)
        attributes = {**vars(self), "together": list(self.together)}
        vars(duplicate).update(copy.deepcopy(attributes, memo))
        duplicate.together = weakref.WeakKeyDictionary(dict.fromkeys(vars(duplicate)["together"]))
        return duplicate


def state_of(module: Any) -> ModuleState:
    return vars(sharded(module))[STATE]


def states(module: Any, recurse: bool) -> list[ModuleState]:
    """Return what a module controls, with what modules inside do if ``recurse``."""
    state = state_of(module)
    return [vars(each)[STATE] for each in module.modules() if STATE in vars(each)] if recurse else [state]


def units_of(modules: Sequence[Any]) -> tuple[EagerUnit, ...]:
    modules = [compat.uncompiled(module) for module in modules]
    for module in modules:
        if not isinstance(module, nn.Module) or REQUEST not in vars(module):
            raise ValueError(f"Expected modules that fully_shard was called on, got a {type(module).__name__}")
    return tuple(unit for module in modules for unit in state_of(module).units)


def buckets_of(states: Sequence[ModuleState]) -> list[Bucket]:
    units = dict.fromkeys(unit for state in states for unit in state.units)
    return [bucket for unit in units for bucket in unit.buckets]


def apply_sync(state: ModuleState) -> None:
    """Give the model the setting of its modules."""
    settings = state.model.grad_sync.settings
    settings_of = {each.name: each.syncs and each.all_reduces for each in state.together if each.units}
    waiting = [name for name, reduces in settings_of.items() if not reduces]
    reducing = [name for name, reduces in settings_of.items() if reduces]
    settings.last_microbatch = False if waiting else None
    settings.contradiction = (waiting[0], reducing[0]) if waiting and reducing else None
