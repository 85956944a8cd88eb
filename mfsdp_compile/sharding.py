"""Shards a model by arguments. ``fully_shard_model`` and ``MegatronFSDP``'s constructor wrap the result."""

from __future__ import annotations

import functools
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields
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
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.init.meta import ByFunction, ByMethod, InitFn, Initializer
from mfsdp_compile.runtime.lanes.rest import ON_DEVICE, Rest
from mfsdp_compile.runtime.model.shard import ShardingOptions, shard_model
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.communicators import Communication
from mfsdp_compile.runtime.plan.experts import ExpertPlacement, build_experts
from mfsdp_compile.runtime.plan.meshes import build_topology, tensor_parallel_mesh
from mfsdp_compile.runtime.plan.units import Unit
from mfsdp_compile.runtime.program_lines import warn

from .distributed_index import FSDPDistributedIndex
from .progress import working
from .sharding_arguments import Arguments
from .tracebacks import shorten_uncaught


def shard(module: nn.Module, given: Arguments) -> tuple[ShardedModel, FSDPDistributedIndex]:
    """Shard a model in place. Collective.

    Returns:
        What owns its buckets, and the ranks that it is sharded over.

    Raises:
        RuntimeError, TypeError, ValueError: See :func:`~mfsdp_compile.fully_shard_model`.
    """
    shorten_uncaught()
    given.check()
    precision = given.precision
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard_model takes an nn.Module, got a {type(module).__name__}")
    if isinstance(vars(module).get("sharded"), ShardedModel):
        raise ValueError(
            "The model is already sharded: it is a MegatronFSDP. Pass the module that is inside only once."
        )
    _refuse_other_data_parallelism(module)
    strategy = ShardingStrategy.of(given.zero_dp_strategy, "zero_dp_strategy")
    outer_strategy = ShardingStrategy.of(given.outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
    topology, every = build_topology(
        given.device_mesh,
        given.dp_shard_dim,
        given.dp_outer_dim,
        given.hybrid_fsdp_group,
        strategy,
        outer_strategy,
        given.fsdp_group_ag,
        device_type=_device_type(given.device, module),
    )

    experts: Callable[[], ExpertPlacement] | None = None
    if given.expt_device_mesh is not None:
        experts = functools.partial(
            build_experts,
            given.expt_device_mesh,
            given.dp_shard_dim,
            given.dp_outer_dim,
            given.hybrid_fsdp_expt_group,
            strategy,
            outer_strategy,
            given.expt_fsdp_group_ag,
            given.is_expert,
            topology,
        )
    is_whole = given.whole_params or (lambda name, param: False)
    options = ShardingOptions(
        unit_modules=given.fsdp_unit_modules,
        precision=precision,
        gradient_policy=given.gradients,
        overlap=Overlap(given.overlap_param_gather, given.overlap_grad_reduce),
        check_values=given.check_values,
        layout_policy=LayoutPolicy(
            block_numel=given.optimizer_block_size,
            bucket_bytes=given.bucket_bytes,
            unit_bytes=given.unit_bytes,
            by_parameter=given.disable_bucketing,
        ),
        by_module=given.enable_fine_grained_param_gather,
        whole=[name for name, param in module.named_parameters() if is_whole(name, param)],
        experts=experts,
        tensor_parallel=tensor_parallel_mesh(given.device_mesh, given.tp_dim, (given.dp_shard_dim, given.dp_outer_dim)),
        from_meta=_initializer(given.init_fn) if given.init_model_with_meta_device else None,
        buffer_policy=given.buffers,
        registers="never" if not given.nccl_ub else "later" if given.fsdp_manual_registration else "now",
        allocate=given.buffer_allocator,
        symmetric=not given.disable_symmetric_registration,
        communication=Communication.of(given.communication),
        keeps_transposes=given.keep_fp8_transpose_cache,
        plugins=tuple(given.plugins),
        ignored=frozenset(given.ignored_params),
        reshard_after_forward=_resharding(given.reshard_after_forward, module, topology),
        rest=_resting(given.offload_policy, module),
    )
    with working(f"sharding {type(module).__name__}"):
        sharded = shard_model(module, topology, every, _device(given.device, topology.mesh), options)
    sharded.grad_sync.settings.automatic = given.sync_model_each_microbatch
    ranks = {each.name: getattr(given, each.name) for each in fields(FSDPDistributedIndex) if hasattr(given, each.name)}
    ranks["device_mesh"] = given.device_mesh if given.device_mesh is not None else topology.mesh
    return sharded, FSDPDistributedIndex(**ranks, hsdp_outer_dp_shard=topology.is_hfsdp)


def _resharding(given: Any, module: nn.Module, topology: Topology) -> Callable[[Unit], bool | int | None]:
    """Return the function that says what happens to a unit's buckets between forward and backward."""
    values = _by_module("reshard_after_forward", given, module)
    for key, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int):
            raise TypeError(
                f"reshard_after_forward takes True, False, a number of ranks or None, got {reprlib.repr(value)}"
            )
        if value < 1:
            raise ValueError(f"reshard_after_forward takes at least 1 rank, got {value}")
        values[key] = topology.portions_of(value, "reshard_after_forward")
    return _of_unit(values)


def _resting(given: Any, module: nn.Module) -> Callable[[Unit], Rest]:
    """Return the function that says where a unit's buckets rest."""
    if given is None:
        return lambda unit: ON_DEVICE
    from mfsdp_compile.runtime.guests.offload.policy import rest_of

    values = _by_module("offload_policy", given, module)
    of_unit = _of_unit({key: rest_of(value, "offload_policy") for key, value in values.items()})
    return lambda unit: of_unit(unit) or ON_DEVICE


def _by_module(name: str, given: Any, module: nn.Module) -> dict[type[nn.Module] | nn.Module, Any]:
    """Return the values of an argument that may be a mapping from modules or their classes, with its keys checked."""
    values = dict(given) if isinstance(given, Mapping) else {nn.Module: given}
    inside = set(module.modules())
    for key in values:
        if not (isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))):
            raise TypeError(f"{name} has the key {reprlib.repr(key)}, which is no module or class of modules")
        if isinstance(key, nn.Module) and key not in inside:
            raise ValueError(f"{name} has a {type(key).__name__} as a key that is not part of the model")
    return values


def _of_unit(values: Mapping[type[nn.Module] | nn.Module, Any]) -> Callable[[Unit], Any]:
    """Return the function that finds a unit's value: of its module, its class, or a base of that."""

    def of_unit(unit: Unit) -> Any:
        found = [values[key] for key in (*unit.modules, *map(type, unit.modules)) if key in values]
        found += [value for key, value in values.items() if isinstance(key, type) and isinstance(unit.modules[0], key)]
        return found[0] if found else None

    return of_unit


def _refuse_other_data_parallelism(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, compat.ReplicatedModule)):
            where = f"Module {name!r}" if name else "The model"
            raise ValueError(
                f"{where} is a {type(inner).__name__}: torch's data parallelism is already applied to it, and "
                "gradients would be reduced twice. Use one of the two: pass fully_shard_model the module as it was "
                "before torch's fully_shard, FullyShardedDataParallel or DistributedDataParallel."
            )


def _initializer(init_fn: InitFn | Initializer | None) -> Initializer:
    if init_fn is None:
        return ByMethod()
    return init_fn if isinstance(init_fn, Initializer) else ByFunction(init_fn)


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
