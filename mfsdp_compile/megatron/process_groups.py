"""Device meshes from Megatron's process groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile.runtime import compat

__all__ = ["mesh_arguments"]

_OUTER, _INNER, _TENSOR = "dp_outer", "dp_cp", "tp"
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def mesh_arguments(config: Any, instances: int, pg_collection: Any = None) -> dict[str, Any]:
    """Return which ranks a model is sharded over, as arguments of ``fully_shard_model``.

    Args:
        config: Megatron's model configuration.
        instances: Number of groups of data-parallel ranks that each hold the whole model. More than one is hybrid
            sharding.
        pg_collection: Megatron's ``ProcessGroupCollection``, or an object with its attributes. These are used:
            ``dp_cp``; with several instances, ``intra_dp_cp`` and ``inter_dist_opt``; ``tp``; and with ``ep``,
            ``expt_dp`` or ``intra_expt_dp``. None: all ranks share the model.

    Raises:
        ValueError: If not all ranks share the model and ``pg_collection`` does not say which do, or if ranks cannot be
            divided.
        NotImplementedError: If experts are divided over tensor-parallel ranks.
    """
    if pg_collection is None:
        for name in _PARALLEL:
            if (size := getattr(config, name, 1)) > 1:
                raise ValueError(
                    f"{name} is {size}, so not all ranks share this model, and FullyShardedDataParallel was not told "
                    "which ones do. Pass pg_collection (ProcessGroupCollection.use_mpu_process_groups() makes one of "
                    "Megatron's groups), or fully_shard_model's device_mesh, dp_shard_dim and tp_dim or "
                    "expt_device_mesh."
                )
        return _hybrid(instances) if instances > 1 else {}
    groups: dict[str, dist.ProcessGroup] = {}
    arguments: dict[str, Any] = {"dp_shard_dim": _INNER}
    if instances > 1:
        groups[_OUTER] = _group(pg_collection, "inter_dist_opt")
        arguments.update(dp_outer_dim=_OUTER, hybrid_fsdp_group=_group(pg_collection, "dp_cp"))
    groups[_INNER] = _group(pg_collection, "intra_dp_cp" if instances > 1 else "dp_cp")
    experts = _experts(pg_collection, groups.get(_OUTER))
    if (tensor := getattr(pg_collection, "tp", None)) is not None and tensor.size() > 1:
        groups[_TENSOR] = tensor
        arguments["tp_dim"] = _TENSOR
    return {"device_mesh": _mesh(groups), **arguments, **experts}


def _hybrid(instances: int) -> dict[str, Any]:
    ranks = (
        dist.get_world_size() if dist.is_initialized() else instances
    )  # without a process group, another error is raised
    if ranks % instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={instances} must divide the number of data-parallel ranks, {ranks}."
        )
    mesh = init_device_mesh(compat.device_type(), (instances, ranks // instances), mesh_dim_names=(_OUTER, _INNER))
    return {
        "device_mesh": mesh,
        "dp_outer_dim": _OUTER,
        "dp_shard_dim": _INNER,
        "hybrid_fsdp_group": mesh[_OUTER, _INNER]._flatten().get_group(),
    }


def _experts(pg_collection: Any, outer: dist.ProcessGroup | None) -> dict[str, Any]:
    parallel = getattr(pg_collection, "ep", None)
    if parallel is None or parallel.size() == 1:
        return {}
    tensor = getattr(pg_collection, "expt_tp", None)
    if tensor is not None and tensor.size() > 1:
        raise NotImplementedError(
            f"pg_collection.expt_tp has {tensor.size()} ranks: tensor-parallel experts are not implemented. Set "
            "expert_tensor_parallel_size=1."
        )
    if outer is None:
        return {"expt_device_mesh": _mesh({_INNER: _group(pg_collection, "expt_dp")})}
    return {
        "expt_device_mesh": _mesh({_OUTER: outer, _INNER: _group(pg_collection, "intra_expt_dp")}),
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
