"""Precision of a model: the policy of each parameter, and which modules cast what they get and return."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..formats.casts import Casts
from ..geometry.bucket_plan import ParamLocation
from ..geometry.partition import local_shape
from ..owner import ModuleRef
from .precision import MixedPrecisionPolicy, Policies
from .units import Unit, resolve_classes


@dataclass(frozen=True, eq=False)
class PrecisionPlan:
    """Which policy applies where.

    A module with a policy of its own, or of a class with one, has that policy; other units and the model have the
    default. A parameter has the policy of the innermost such module around it. These modules are also those that cast.

    Args:
        policies: The model's policies.
        positions: Position in ``policies`` of each module's policy. Others have the default.
        borders: Names and casts of the modules that cast.
    """

    policies: Policies
    positions: Mapping[nn.Module, int] = field(default_factory=dict)
    borders: Mapping[nn.Module, tuple[str, Casts]] = field(default_factory=dict)
    _chosen: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)  # param_dtype_override_fn is asked once

    @classmethod
    def of(
        cls,
        model: nn.Module,
        unit_classes: Sequence[type[nn.Module]],
        policies: Policies,
        units: Collection[nn.Module] = (),
    ) -> PrecisionPlan:
        """Find the policies of a model's modules.

        Args:
            unit_classes: Classes of units.
            units: Other modules that are units, or parts of one.

        Raises:
            ValueError: No module of the model is of a class that has a policy, or a module that has one is not part of
                it.
        """
        keys = [key() if isinstance(key, ModuleRef) else key for key, _ in policies.own]
        inside = set(model.modules())
        if strangers := [key for key in keys if isinstance(key, nn.Module) and key not in inside]:
            raise ValueError(
                f"mixed_precision_policy has a {type(strangers[0]).__name__} as a key that is not part of the model"
            )
        own: dict[Any, int] = {}  # by module, or class
        every = list(policies)
        for number, key in enumerate(keys, 1):
            found = [key] if isinstance(key, nn.Module) else resolve_classes(model, [key], "mixed_precision_policy")
            own |= dict.fromkeys(found, every.index(every[number]))  # equal policies share buckets
        positions: dict[nn.Module, int] = {}
        borders: dict[nn.Module, tuple[str, Casts]] = {}
        for name, module in model.named_modules():
            position: int | None = next((own[key] for key in (module, *type(module).__mro__) if key in own), None)
            is_border = not name or position is not None or module in units or isinstance(module, tuple(unit_classes))
            if not is_border:
                position = positions[model.get_submodule(name.rpartition(".")[0])]
            elif casts := every[position or 0].casts:
                borders[module] = (name, casts)
            positions[module] = position or 0
        return cls(policies, positions, borders)

    def position(self, locations: Sequence[ParamLocation]) -> int:
        """Return the position of a parameter's policy.

        Raises:
            ValueError: It is tied between modules of different policies.
        """
        first, *others = ((location, self.positions.get(location.module, 0)) for location in locations)
        for location, position in others:
            if self.policy_at(position) != self.policy_at(first[1]):
                raise ValueError(
                    f"Parameter {first[0].name!r} is also {location.name!r}, and mixed_precision_policy has different "
                    f"policies for the two: {self.policy_at(first[1])}, and {self.policy_at(position)}. A tied "
                    "parameter is gathered in one dtype: give both modules the same policy, or untie them."
                )
        return first[1]

    def policy_at(self, position: int) -> MixedPrecisionPolicy:
        return list(self.policies)[position]

    def compute_dtype(self, param: nn.Parameter, locations: Sequence[ParamLocation]) -> torch.dtype:
        """Return the dtype in which a parameter is gathered and computed with.

        Raises:
            ValueError: Its policies differ, or ``param_dtype_override_fn`` returned something else than is allowed.
        """
        if param not in self._chosen:
            self._chosen[param] = self.policy_at(self.position(locations)).compute_dtype(locations[0].name, param)
        return self._chosen[param]

    def gathered_bytes(self, unit: Unit) -> int:
        """Return the size of a unit's gathered parameters in bytes, without padding."""
        return sum(
            local_shape(param).numel() * (1 + param.is_complex()) * self.compute_dtype(param, locations).itemsize
            for param, locations in unit.params
        )

    def describe(self) -> list[str]:
        """Describe what all ranks have in common, besides the dtypes of buckets."""
        return [f"casts of {name or 'the model'}: {casts}" for name, casts in self.borders.values()]
