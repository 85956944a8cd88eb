"""FSDP2's interface: a script written for ``torch.distributed.fsdp.fully_shard`` moves by changing an import.

::

    from mfsdp_compile.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

One model is planned, checked and compiled as a whole, but FSDP2's calls come one by one and none says that it is the
last. So a call only records what is asked for, and the model is sharded when it is used for the first time: when a
parameter of it or its state dict is read, when it is moved or called. The outermost module that was given to
``fully_shard`` is then the model. Until then, parameters are whole. Whatever a program can see of them is sharded: each
module that owns some has a class that shards the model when they are read (:mod:`.first_use`).

A module that is used before the model around it was given to ``fully_shard`` becomes a model of its own. The larger
model dissolves it at its own first use and takes over its parameters, which stay the same objects (:mod:`.sharding`).

Modules that are compiled (``layer.compile()``, ``torch.compile(layer)``) are compiled with ``backend="mfsdp"`` instead,
with the same settings: other backends do not know how to gather parameters.

What differs from FSDP2 is listed in docs/moving/fsdp2.md.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.modules import register_forward
from mfsdp_compile.runtime.eager.save_methods import guard_saving
from mfsdp_compile.runtime.guests.offload.policy import AnyOffloadPolicy, rest_of
from mfsdp_compile.runtime.nearest import did_you_mean, names_arguments
from mfsdp_compile.runtime.owner import ModuleRef

from .first_use import Pending, sharded, wait
from .module import FSDPModule
from .request import REQUEST, Request, check_bool, check_mesh, check_modules, check_placements
from .sharding import shard
from .state import METHODS, units_of

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def __getattr__(name: str) -> Any:
    """Return the names of FSDP2 that only newer versions of torch have."""
    if name in ("DataParallelMeshDims", "GradientReductionHandle"):
        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")


@names_arguments(
    "mfsdp_compile.fsdp2.fully_shard",
    {
        "device_mesh": "It is mesh here.",
        "mixed_precision_policy": "It is mp_policy here.",
        "mixed_precision": "It is mp_policy here.",
        "fsdp_unit_modules": "Call fully_shard on each unit, or fully_shard_model once.",
        "auto_wrap_policy": "Call fully_shard on each unit, or fully_shard_model once.",
        "zero_dp_strategy": "reshard_after_forward=False keeps parameters; for strategies, call fully_shard_model.",
        "sharding_strategy": "reshard_after_forward=False keeps parameters; for strategies, call fully_shard_model.",
        "cpu_offload": "It is offload_policy here.",
        "ignored_states": "It is ignored_params here.",
    },
)
def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: AnyOffloadPolicy = OffloadPolicy(),
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    check_values: bool = True,
) -> Any:
    """Make a module a unit of the model that it belongs to. See ``torch.distributed.fsdp.fully_shard``.

    The model is sharded when it, or a module inside, is used for the first time, which is a collective: every rank of
    the mesh makes the same calls. What is used before its model is given to ``fully_shard`` is sharded alone. The model
    then takes over its parameters, which stay the same objects.

    Args:
        module: The unit, or a list of modules that are one unit together; last, the model itself. Parameters of the
            model in no unit are gathered in up to three parts: those before, among and after the units.
        mesh: The ranks to shard over; with two dimensions, the first one replicates (HSDP). The same for all calls.
            None: all ranks.
        reshard_after_forward: Whether the unit's parameters are released after forward and gathered again in backward;
            or the number of ranks to gather over in backward. None: True, except for the unit that forward uses last.
            ``torch.compile``'s option of the same name goes before, if it is not True.
        shard_placement_fn: May return None or ``Shard(0)`` only.
        mp_policy: Dtypes of the unit's parameters, gradients, inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()``: the unit's shards, gradients and optimizer state are in host memory.
            :class:`~mfsdp_compile.OptimizerOffloadPolicy`: the same, but gathers need no copy from the host.
        ignored_params: Parameters that are neither sharded nor reduced.
        dp_mesh_dims: Names of the mesh dimensions that shard and replicate, if ``mesh`` has others.
        check_values: Whether the values of parameters must be equal on all ranks, as FSDP2 assumes. They are compared
            before the first forward, except for parameters that have been overwritten by then, as by
            ``load_state_dict``. With HSDP, replicas compare the rows that they hold then.

    Returns:
        ``module``. Its class is a subclass of :class:`FSDPModule` and of its class.

    Raises:
        TypeError, ValueError, NotImplementedError: An argument is wrong or not supported. Nothing has changed. What
            concerns the model as a whole is raised at its first use.
    """
    given = (module,) if isinstance(module, nn.Module) else tuple(module)
    modules = tuple(compat.uncompiled(each) for each in given)
    check_modules(modules)
    check_bool("check_values", check_values)
    check_mesh(mesh, dp_mesh_dims is not None)
    check_placements(modules, shard_placement_fn)
    rest_of(offload_policy, "fully_shard(offload_policy)")
    request = Request(
        tuple(map(ModuleRef, modules)),
        mesh,
        None if dp_mesh_dims is None else (dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names),
        reshard_after_forward,
        mp_policy,
        offload_policy,
        frozenset(ignored_params or ()),
        check_values,
        tuple(ModuleRef(wrapper) for wrapper in given if wrapper not in modules),
        FSDPModule,
    )
    for each in modules:
        vars(each)[REQUEST] = request
        compat.register_fully_sharded(each)
        guard_saving(each)
        wait(each, shard)
    for wrapper in request.wrappers:
        compat.before_compiled_call(wrapper, functools.partial(sharded, compat.uncompiled(wrapper)))
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` read gathered parameters.

    Raises:
        AttributeError: The module has no such method.
    """
    module = compat.uncompiled(module)
    if not hasattr(module, method_name):
        raise AttributeError(f"{type(module).__name__!r} has no method {method_name!r}")
    if not isinstance(module, FSDPModule):
        return  # as in FSDP2
    vars(module).setdefault(METHODS, []).append(method_name)
    if not isinstance(module, Pending):
        register_forward(cast(nn.Module, module), method_name)
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(sharded(self), method_name)(*args, **kwargs)

    vars(module)[method_name] = types.MethodType(call, module)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Has no effect: a model's schedule does not depend on others."""
    units_of(modules)
