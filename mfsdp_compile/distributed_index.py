"""Megatron-FSDP's ``FSDPDistributedIndex``: which ranks a model is sharded over, by device meshes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.plan.meshes import build_topology, sub_mesh


@dataclass(eq=False, repr=False)
class FSDPDistributedIndex:
    """The device meshes and process groups of a sharded model. Communicates nothing.

    Args:
        device_mesh, dp_shard_dim, dp_outer_dim, tp_dim: See :func:`~mfsdp_compile.fully_shard_model`.
        hybrid_fsdp_group, fsdp_group_ag: See :func:`~mfsdp_compile.fully_shard_model`.
        expt_device_mesh, hybrid_fsdp_expt_group, expt_fsdp_group_ag: The same for experts.
        hsdp_outer_dp_shard: Whether outer ranks divide the optimizer state (``outer_dp_sharding_strategy="optim"``).

    Raises:
        RuntimeError: If there is no process group.
        TypeError, ValueError: If dimensions and groups do not fit together.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        outer = ShardingStrategy.OPTIM if self.hsdp_outer_dp_shard else ShardingStrategy.NO_SHARD
        build_topology(
            self.device_mesh,
            self.dp_shard_dim,
            self.dp_outer_dim,
            self.hybrid_fsdp_group,
            ShardingStrategy.OPTIM_GRADS_PARAMS,
            outer,
            self.fsdp_group_ag,
        )

    @classmethod
    def of(cls, index: object) -> FSDPDistributedIndex | None:
        """Return an index, or Megatron-FSDP's own one as one of these. None if it is neither."""
        if isinstance(index, cls):
            return index
        if not isinstance(getattr(index, "device_mesh", None), DeviceMesh) or not hasattr(index, "get_fsdp_group"):
            return None
        given: dict[str, Any] = {each.name: getattr(index, each.name, None) for each in fields(cls)}
        if given["expt_device_mesh"] is given["device_mesh"]:  # how theirs says that there is none
            given["expt_device_mesh"] = given["hybrid_fsdp_expt_group"] = None
        given["hsdp_outer_dp_shard"] = bool(given["hsdp_outer_dp_shard"])
        return cls(**given)

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPDistributedIndex:
        return self  # copies of a model communicate over the same groups

    def __repr__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if value is not None and not name.endswith("_group")}
        return f"FSDPDistributedIndex({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def use_hybrid_fsdp(self) -> bool:
        """Whether there are outer ranks (HSDP or HFSDP)."""
        return self.dp_outer_dim is not None

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the mesh of all parameters, or of experts. Without ``expt_device_mesh``, they have the same."""
        return self.expt_device_mesh if is_expert_parallel and self.expt_device_mesh is not None else self.device_mesh

    def get_submesh(self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the part of the mesh with these dimensions, in this order.

        Raises:
            ValueError: If the mesh has no such dimensions.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        mesh = self.get_root_mesh(is_expert_parallel)
        try:
            return sub_mesh(mesh, names if len(names) > 1 else names[0])
        except (KeyError, RuntimeError, ValueError, IndexError) as error:
            raise ValueError(
                f"get_submesh: the device mesh has no dimensions {names}, it has {mesh.mesh_dim_names}. Pass the names "
                f"that the model was sharded with: dp_shard_dim={self.dp_shard_dim!r}, "
                f"dp_outer_dim={self.dp_outer_dim!r}, tp_dim={self.tp_dim!r}. ({error})"
            ) from error

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the ranks that parameters are sharded over.

        Args:
            independent_all_gather: The group that was passed for gathers; None if there is none.
        """
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        mesh = self.get_root_mesh(is_expert_parallel)
        if self.dp_shard_dim is None:
            return mesh.get_group()
        return self.get_submesh(self.dp_shard_dim, is_expert_parallel).get_group()

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return this rank's outer ranks; None if there are none."""
        if self.dp_outer_dim is None:
            return None
        return self.get_submesh(self.dp_outer_dim, is_expert_parallel).get_group()

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return all data-parallel ranks, which gradients are reduced over."""
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)
        if is_expert_parallel and self.expt_device_mesh is not None:
            return self.hybrid_fsdp_expt_group
        return self.hybrid_fsdp_group

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Return the number of this rank's shard if outer ranks divide the optimizer state. Inner ranks come first.

        Raises:
            ValueError: If they do not.
        """
        inner, outer = self.get_fsdp_group(is_expert_parallel), self.get_outer_fsdp_group(is_expert_parallel)
        if not self.hsdp_outer_dp_shard or outer is None or inner is None:
            raise ValueError(
                "get_logical_hybrid_fsdp_rank: outer ranks hold the same shards here. It numbers those of "
                "hsdp_outer_dp_shard=True (outer_dp_sharding_strategy='optim')."
            )
        return inner.rank() * outer.size() + outer.rank()


def hybrid_arguments(mesh: DeviceMesh, shard: str, outer: str) -> dict[str, Any]:
    """Return arguments of ``fully_shard_model``: shards over one mesh dimension, replicas over another. Collective."""
    group = mesh[outer, shard]._flatten(f"{outer}_{shard}").get_group()
    return {"device_mesh": mesh, "dp_shard_dim": shard, "dp_outer_dim": outer, "hybrid_fsdp_group": group}
