"""What a program has asked for: a call of ``fully_shard``, which the modules that it was given keep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from mfsdp_compile.runtime.eager.modules import owner_of
from mfsdp_compile.runtime.guests.offload.policy import AnyOffloadPolicy
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.owner import ModuleRef

REQUEST = "_mfsdp_request"
"""Where a module keeps its :class:`Request`."""


@dataclass(frozen=True, eq=False)
class Request:
    """One call of :func:`~mfsdp_compile.fsdp2.fully_shard`: its arguments.

    Args:
        given: The modules that are one unit.
        compiled: What ``torch.compile`` has made of some of them.
        mixin: Class that is mixed into those of the modules.
    """

    given: tuple[ModuleRef, ...]
    mesh: DeviceMesh | None
    dims: tuple[tuple[str, ...], tuple[str, ...]] | None
    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: AnyOffloadPolicy
    ignored: frozenset[nn.Parameter]
    check_values: bool
    compiled: tuple[ModuleRef, ...]
    mixin: type

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for each in self.given if (module := each()) is not None)

    @property
    def wrappers(self) -> list[nn.Module]:
        """What ``torch.compile`` has made of some of the modules."""
        return [module for each in self.compiled if (module := each()) is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Request:
        given, compiled, ignored = copy.deepcopy((self.given, self.compiled, tuple(self.ignored)), memo)
        return replace(self, given=given, compiled=compiled, ignored=frozenset(ignored))


def check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got a {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard got a {type(module).__name__}, which has no forward, so nothing would gather its "
                "parameters. Pass its modules, one by one or as a list."
            )
        if REQUEST in vars(module):
            raise ValueError(f"fully_shard was called twice on the same {type(module).__name__}.")
        inside = set(module.modules())
        if any(unit not in inside for owner in owners(module) for unit in units_in(owner.module)):
            raise ValueError(
                f"fully_shard was called on a {type(module).__name__} that is a part of a sharded model. Call it on "
                "all modules, from the inside out, before anything uses the model."
            )
    for one in modules:
        inside = set(one.modules()) - {one}
        if any(other in inside for other in modules):
            raise ValueError(
                "fully_shard got a list of modules of which one contains another: pass modules side by side."
            )


def check_mesh(mesh: DeviceMesh | None, has_dims: bool) -> None:
    if mesh is None or has_dims or mesh.ndim == 1 or (mesh.ndim == 2 and mesh.mesh_dim_names is not None):
        return
    raise ValueError(f"fully_shard takes a mesh of one dimension, or of two with names, got {mesh}")


def check_placements(modules: Sequence[nn.Module], placement: Callable[[nn.Parameter], Any] | None) -> None:
    if placement is None:
        return
    for module in modules:
        for name, param in _whole_parameters(module):
            chosen = placement(param)
            if chosen is not None and not (isinstance(chosen, Shard) and chosen.dim in (0, -param.ndim)):
                raise NotImplementedError(
                    f"shard_placement_fn asks for {chosen} for parameter {name!r}: rows (dimension 0) are divided, "
                    "unevenly if need be. For experts on a mesh of their own use "
                    "fully_shard_model(expt_device_mesh=...); for whole matrices on one rank, whole_params."
                )


def _whole_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their names, without sharding modules that are not sharded yet."""
    for prefix, module in root.named_modules():
        for name, param in vars(module)["_parameters"].items():
            if param is not None:
                yield f"{prefix}.{name}" if prefix else name, param


def owners(module: nn.Module) -> list[ShardedModel]:
    """Return the sharded models that modules inside belong to."""
    return list({id(owner): owner for inner in module.modules() if (owner := owner_of(inner)) is not None}.values())


def units_in(root: nn.Module) -> list[nn.Module]:
    """Return the modules inside that :func:`~mfsdp_compile.fsdp2.fully_shard` was called on."""
    return [module for module in root.modules() if REQUEST in vars(module)]


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} takes True or False, got {value!r}")
