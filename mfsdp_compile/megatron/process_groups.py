"""Device meshes from Megatron's process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile.runtime import compat

_OUTER, _INNER, _TENSOR, _STAGES, _EXPERTS = "dp_outer", "dp_cp", "tp", "pp", "ep"


def mesh_arguments(config: Any, instances: int, pg_collection: Any = None) -> dict[str, Any]:
    """Return which ranks a model is sharded over, as arguments of ``fully_shard_model``.

    Args:
        config: Megatron's model configuration.
        instances: Number of groups of data-parallel ranks that each hold the whole model. More than one is hybrid
            sharding.
        pg_collection: Megatron's ``ProcessGroupCollection``, or an object with its attributes. These are used:
            ``dp_cp``; with several instances, ``intra_dp_cp`` and ``inter_dist_opt``; ``tp``; and with ``ep``,
            ``expt_dp`` or ``intra_expt_dp``. None: ranks are in Megatron's standard order, with the sizes of
            ``config``.

    Raises:
        ValueError: If ranks cannot be divided, or their order is not the sizes' alone to tell.
        NotImplementedError: If experts are divided inside, by expert tensor parallelism.
    """
    if pg_collection is None:
        return _standard_order(config, instances)
    groups: dict[str, dist.ProcessGroup] = {}
    arguments: dict[str, Any] = {"dp_shard_dim": _INNER}
    if instances > 1:
        groups[_OUTER] = _group(pg_collection, "inter_dist_opt")
        arguments.update(dp_outer_dim=_OUTER, hybrid_fsdp_group=_group(pg_collection, "dp_cp"))
    groups[_INNER] = _group(pg_collection, "intra_dp_cp" if instances > 1 else "dp_cp")
    tensor = getattr(pg_collection, "tp", None)
    has_tensor_parallel = tensor is not None and tensor.size() > 1
    experts = _experts(pg_collection, groups.get(_OUTER), has_tensor_parallel)
    if has_tensor_parallel:
        groups[_TENSOR] = tensor
        arguments["tp_dim"] = _TENSOR
    return {"device_mesh": _mesh(groups), **arguments, **experts}


def _standard_order(config: Any, instances: int) -> dict[str, Any]:
    """Divide all ranks in Megatron's order: tensor-parallel ranks are neighbors; then context, data and pipeline ranks.

    Expert-parallel ranks are neighbors too: tensor-parallel ranks, and then data-parallel ones, divide the experts.
    """
    sizes = {
        name: getattr(config, f"{name}_parallel_size", None) or 1
        for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    }
    tensor, stages, experts = sizes["tensor_model"], sizes["pipeline_model"], sizes["expert_model"]
    if not dist.is_initialized() or max(tensor, stages, experts, sizes["context"], instances) == 1:
        return {}  # all ranks share the model; without a process group, fully_shard_model says what to do
    inside = getattr(config, "expert_tensor_parallel_size", None) or tensor
    if experts > 1 and inside > 1:
        raise NotImplementedError(
            f"expert_model_parallel_size is {experts}, and {inside} ranks divide each expert: "
            f"expert_tensor_parallel_size is {getattr(config, 'expert_tensor_parallel_size', None)}, where None is "
            "tensor_model_parallel_size. Megatron's tensor-parallel experts are not implemented. Set "
            "expert_tensor_parallel_size=1: tensor-parallel ranks then hold different experts."
        )
    ranks, divisor = dist.get_world_size(), tensor * stages * sizes["context"]
    if ranks % divisor:
        raise ValueError(
            f"{ranks} ranks cannot be divided by tensor_model_parallel_size={tensor} x "
            f"pipeline_model_parallel_size={stages} x context_parallel_size={sizes['context']}. Start a multiple of "
            f"{divisor}, or change these."
        )
    data = ranks // (tensor * stages)
    if data % instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={instances} must divide the number of data-parallel ranks, {data}."
        )
    inner = data // instances
    if inner * tensor % experts:
        raise ValueError(
            f"expert_model_parallel_size={experts} must divide the {inner * tensor} data-parallel and tensor-parallel "
            "ranks that share or divide parameters."
        )
    outside = {_STAGES: stages, _OUTER: instances}
    mesh = _new_mesh({**outside, _INNER: inner, _TENSOR: tensor})
    arguments: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": _INNER}
    if tensor > 1:
        arguments["tp_dim"] = _TENSOR
    if instances > 1:
        arguments.update(dp_outer_dim=_OUTER, hybrid_fsdp_group=mesh[_OUTER, _INNER]._flatten().get_group())
    if experts > 1:
        arguments["expt_device_mesh"] = _new_mesh({**outside, _INNER: inner * tensor // experts, _EXPERTS: experts})
        if instances > 1:
            both = arguments["expt_device_mesh"][_OUTER, _INNER]._flatten("experts_of_all_instances")
            arguments["hybrid_fsdp_expt_group"] = both.get_group()
    return arguments


def _new_mesh(sizes: dict[str, int]) -> DeviceMesh:
    """Build a mesh of all ranks, outermost dimension first; return this stage's part. Only ``dp_cp`` may be 1."""
    dims = {name: size for name, size in sizes.items() if size > 1 or name == _INNER}
    mesh = init_device_mesh(compat.device_type(), tuple(dims.values()), mesh_dim_names=tuple(dims))
    own = tuple(name for name in dims if name != _STAGES)
    return mesh if len(own) == len(dims) else mesh[own]


def _experts(pg_collection: Any, outer: dist.ProcessGroup | None, has_tensor_parallel: bool) -> dict[str, Any]:
    parallel = getattr(pg_collection, "ep", None)
    if parallel is None or parallel.size() == 1:
        return {}
    tensor = getattr(pg_collection, "expt_tp", None)
    if tensor is not None and tensor.size() > 1:
        raise NotImplementedError(
            f"pg_collection.expt_tp has {tensor.size()} ranks: tensor-parallel experts are not implemented. Set "
            "expert_tensor_parallel_size=1."
        )
    groups = {_INNER: _group(pg_collection, "expt_dp" if outer is None else "intra_expt_dp")}
    if has_tensor_parallel:  # the mesh says that these ranks divide experts too
        groups[_EXPERTS] = parallel
    if outer is None:
        return {"expt_device_mesh": _mesh(groups)}
    return {
        "expt_device_mesh": _mesh({_OUTER: outer, **groups}),
        "hybrid_fsdp_expt_group": _group(pg_collection, "expt_dp"),
    }


def _group(pg_collection: Any, name: str) -> dist.ProcessGroup:
    group = getattr(pg_collection, name, None)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"pg_collection.{name} is {group!r}, but must be the process group of this rank: "
            "ProcessGroupCollection.use_mpu_process_groups() has it."
        )
    return group


def _mesh(groups: dict[str, dist.ProcessGroup]) -> DeviceMesh:
    """Build a mesh from the groups that this rank is in, outermost first. Collective over these groups."""
    names, members = tuple(groups), list(groups.values())
    ranks: Any = dist.get_process_group_ranks(members[-1])
    for group in reversed(members[:-1]):
        rows: list[Any] = [None] * group.size()
        dist.all_gather_object(rows, ranks, group=group)
        ranks = rows
    device = compat.device_type(members[-1])
    if len(members) == 1:
        return DeviceMesh.from_group(members[0], device, mesh_dim_names=names)
    return DeviceMesh.from_group(members, device, torch.tensor(ranks), mesh_dim_names=names)
