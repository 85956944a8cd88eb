"""``shard``, and what it shares with the faces of other libraries."""

from __future__ import annotations

import functools
import os
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.init.meta import ByFunction, InitFn, Initializer
from mfsdp_compile.runtime.lanes.lane import Plugin
from mfsdp_compile.runtime.model.shard import ShardingOptions, shard_model
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.nearest import names_arguments
from mfsdp_compile.runtime.plan.meshes import build_topology
from mfsdp_compile.runtime.plan.precision import GradientPolicy, MixedPrecisionPolicy, Policies, PolicyArgument
from mfsdp_compile.runtime.plan.units import Unit, UnitModules
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.ranks.agreement import telling_others

from .by_unit import by_module, of_unit
from .flags import check_flag
from .option_checks import check_initializer, check_options, check_together, check_types
from .plugins import HERE, ModelPlugin, Ranks, Setup
from .progress import working
from .sharded_module import ShardedModule
from .tracebacks import shorten_uncaught

Resharding = bool | int | Mapping[type[nn.Module] | nn.Module, bool | int | None] | None
"""What happens to parameters between forward and backward; one value, or one by module or class of modules."""


ELSEWHERE = {
    "mesh": "FSDP2's mesh is device_mesh here.",
    "mp_policy": "FSDP2's mp_policy is mixed_precision_policy here.",
    "mixed_precision": "It is mixed_precision_policy here.",
    "shard_placement_fn": "Rows (dimension 0) are divided; whole_params keeps whole parameters on one rank.",
    "auto_wrap_policy": "Units are named by fsdp_unit_modules here.",
    "sharding_strategy": "It is zero_dp_strategy here.",
    "cpu_offload": "It is offload_policy here.",
    "device_id": "It is device here.",
    "process_group": "Ranks are given by device_mesh here.",
    "ignored_states": "It is ignored_params here.",
    "param_init_fn": "It is init_fn here, with init_model_with_meta_device=True.",
}
"""Arguments of FSDP1 and FSDP2, and what to use in their place."""


@names_arguments("shard", ELSEWHERE | HERE)
@telling_others()
def shard(
    module: nn.Module,
    device_mesh: DeviceMesh | Ranks | None = None,
    fsdp_unit_modules: UnitModules = None,
    zero_dp_strategy: ShardingStrategy | str | int = 3,
    mixed_precision_policy: PolicyArgument = MixedPrecisionPolicy(),
    *,
    device: torch.device | str | None = None,
    reshard_after_forward: Resharding = None,
    gradients: GradientPolicy = GradientPolicy(),
    overlap: Overlap = Overlap(),
    layout: LayoutPolicy = LayoutPolicy(),
    init_fn: InitFn | Initializer | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    check_values: bool = True,
    plugins: Sequence[ModelPlugin | Plugin] = (),
) -> ShardedModule:
    """Shard a model over data-parallel ranks, in place, and wrap it. Collective: every rank of the mesh calls it.

    This is :func:`fully_shard_model` with few arguments: what only some models need is a plug-in. Arguments of the same
    name mean the same.

    Args:
        module: The unsharded model, with the same values on every rank.
        device_mesh: The ranks to shard over: a mesh of one dimension, a :class:`~mfsdp_compile.plugins.Ranks` that says
            which dimensions of a mesh are data parallel, or None: all ranks.
        fsdp_unit_modules: What is gathered and released as a whole.
        zero_dp_strategy: What is sharded: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too.
        mixed_precision_policy: Dtypes; one policy, or one by class of modules.
        device: Device of shards. None: that of the mesh.
        reshard_after_forward: Whether parameters are released after forward and gathered again in backward.
        gradients: How gradients are combined and where they go.
        overlap: Kinds of collectives that may overlap with computation.
        layout: Limits for buckets.
        init_fn: Initializes parameters on the meta device: a function of a module, or an initializer such as
            :class:`~mfsdp_compile.plugins.ByMethod`. None: parameters have values.
        ignored_params: Parameters that are left alone.
        check_values: Whether ranks compare the values of parameters.
        plugins: In order: those for models (:mod:`mfsdp_compile.plugins`), and functions that change how buckets travel
            (:mod:`mfsdp_compile.stages`).

    Returns:
        The wrapped model; ``.module`` is ``module``.

    Raises:
        RuntimeError: If there is no process group, if ranks hold different models (the message says which and where),
            or if an argument is wrong on another rank.
        ValueError, TypeError: If an argument is wrong. The model is left unchanged.
    """
    return ShardedModule(module, shard_in_place(**locals()))


def shard_in_place(
    module: nn.Module,
    device_mesh: DeviceMesh | Ranks | None,
    fsdp_unit_modules: UnitModules,
    zero_dp_strategy: ShardingStrategy | str | int,
    mixed_precision_policy: PolicyArgument | Policies,
    *,
    device: torch.device | str | None,
    reshard_after_forward: Resharding,
    gradients: GradientPolicy,
    overlap: Overlap,
    layout: LayoutPolicy,
    init_fn: InitFn | Initializer | None,
    ignored_params: Collection[nn.Parameter],
    check_values: bool,
    plugins: Sequence[ModelPlugin | Plugin],
) -> ShardedModel:
    """Shard a model in place. Collective. See :func:`~mfsdp_compile.shard`."""
    shorten_uncaught()
    precision = mixed_precision_policy
    if not isinstance(precision, Policies):
        precision = Policies.of(precision, "mixed_precision_policy")
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard_model takes an nn.Module, got a {type(module).__name__}")
    if isinstance(vars(module).get("sharded"), ShardedModel):
        raise ValueError(
            f"The model is already sharded: it is a {type(module).__name__}. Pass the module that is inside only once."
        )
    _refuse_other_data_parallelism(module)
    groups = [("gradients", gradients, GradientPolicy), ("overlap", overlap, Overlap), ("layout", layout, LayoutPolicy)]
    check_types(fsdp_unit_modules, ignored_params, groups, plugins)
    check_flag("check_values", check_values)
    check_initializer(init_fn, module)
    ranks = device_mesh if isinstance(device_mesh, Ranks) else Ranks(device_mesh)
    build = functools.partial(
        build_topology,
        ranks.device_mesh,
        ranks.dp_shard_dim,
        ranks.dp_outer_dim,
        ranks.hybrid_fsdp_group,
        ShardingStrategy.of(zero_dp_strategy, "zero_dp_strategy"),
        ShardingStrategy.of(ranks.outer_dp_sharding_strategy, "outer_dp_sharding_strategy"),
        ranks.fsdp_group_ag,
        device_type=_device_type(device, module),
    )
    setup = Setup(module, ranks, build)
    options = ShardingOptions(
        unit_modules=fsdp_unit_modules,
        precision=precision,
        gradient_policy=gradients,
        overlap=overlap,
        check_values=check_values,
        layout_policy=layout,
        from_meta=init_fn if init_fn is None or isinstance(init_fn, Initializer) else ByFunction(init_fn),
        plugins=tuple(plugin for plugin in plugins if not isinstance(plugin, ModelPlugin)),
        ignored=frozenset(ignored_params),
        reshard_after_forward=_resharding(reshard_after_forward, setup),
    )
    for plugin in plugins:
        if isinstance(plugin, ModelPlugin):
            options = plugin.configure(options, setup)
            check_options(options, type(plugin).__name__, module)
    check_together(options)
    topology, every = setup.built
    with working(f"sharding {type(module).__name__}"):
        return shard_model(module, topology, every, _device(device, topology.mesh), options)


def _resharding(given: Any, setup: Setup) -> Callable[[Unit], bool | int | None]:
    """Return the function that says what happens to a unit's buckets between forward and backward."""
    values = by_module("reshard_after_forward", given, setup.module)
    for key, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int):
            raise TypeError(
                f"reshard_after_forward takes True, False, a number of ranks or None, got {reprlib.repr(value)}"
            )
        if value < 1:
            raise ValueError(f"reshard_after_forward takes at least 1 rank, got {value}")
        values[key] = setup.topology.portions_of(value, "reshard_after_forward")
    return of_unit(values)


def _refuse_other_data_parallelism(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, compat.ReplicatedModule)):
            where = f"Module {name!r}" if name else "The model"
            raise ValueError(
                f"{where} is a {type(inner).__name__}: torch's data parallelism is already applied to it, and "
                "gradients would be reduced twice. Use one of the two: pass fully_shard_model the module as it was "
                "before torch's fully_shard, FullyShardedDataParallel or DistributedDataParallel."
            )


def _device_type(device: torch.device | str | None, module: nn.Module) -> str | None:
    """Return the device type that was asked for, or the one that all parameters with values are on. None: neither."""
    if device is not None:
        return _known_device(device).type
    types = {param.device.type for param in module.parameters() if not param.is_meta}
    return types.pop() if len(types) == 1 else None


def _known_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device of this build of torch: {error}") from error


def _device(device: torch.device | str | None, mesh: DeviceMesh) -> torch.device:
    chosen = _known_device(device if device is not None else mesh.device_type)
    if chosen.type != mesh.device_type:
        raise ValueError(
            f"device={str(device)!r}, but the device mesh is of type {mesh.device_type!r}. Both must be the same type "
            "of device."
        )
    if chosen.type == "cpu" and device is None and "cuda" in compat.device_types():
        warn(
            "The model is on the CPU and trains there, although the process group also has a backend for CUDA and "
            "there are GPUs. To train on them, call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
            "init_process_group and model.cuda() before sharding, or pass this rank's GPU as device. device='cpu' ends "
            "this warning.",
        )
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if chosen.index == 0 and local_rank != "0" and torch.cuda.device_count() > 1:
            raise ValueError(
                f"The current GPU of rank {dist.get_rank()} is cuda:0, the default, and LOCAL_RANK is {local_rank}: "
                "all ranks of this machine would share one GPU. Call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group, or pass "
                "device='cuda:0' if this rank shall have it."
            )
    return chosen
