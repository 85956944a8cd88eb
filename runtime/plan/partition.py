"""Finds out how parameters are already divided over tensor-parallel or expert-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import compat
from ..geometry.partition import Partition
from .meshes import check_order


@dataclass(frozen=True)
class Partitioner:
    """Finds out how parameters are divided.

    Args:
        data_parallel: Mesh to shard the parameters over.
        tensor_parallel: Mesh dimension that Megatron's attributes refer to; None: there is none.
        of_experts: Whether the parameters are experts, which may not have Megatron's attributes.
    """

    data_parallel: DeviceMesh
    tensor_parallel: DeviceMesh | None = None
    of_experts: bool = False
    _meshes: dict[object, DeviceMesh] = field(default_factory=dict, repr=False)
    _in_order: set[int] = field(default_factory=set, repr=False)

    def of(self, name: str, param: Tensor, modules: Iterable[nn.Module] = ()) -> Partition | None:
        """Return how a parameter is divided; None for an ordinary parameter.

        Args:
            modules: The modules that hold it.

        Raises:
            ValueError: A mesh or a placement does not fit, or Megatron's attributes have no mesh to refer to.
        """
        if isinstance(param, DTensor):
            partition: Partition | None = self._of_dtensor(name, param)
        else:
            is_whole = any(compat.transformer_engine.is_whole(module) for module in modules)
            partition = self._of_marks(name, param, getattr(param, "tensor_model_parallel", False) and not is_whole)
        if partition is not None and id(partition.mesh) not in self._in_order:
            check_order(partition.beside(self.data_parallel), self.data_parallel.ndim - 1, "device_mesh")
            self._in_order.add(id(partition.mesh))
        return partition

    def _of_dtensor(self, name: str, param: DTensor) -> Partition:
        mesh, placements = self._first_like(param.device_mesh), tuple(param.placements)
        odd = [p for p in placements if type(p) not in (Shard, Replicate)]
        if odd:
            raise ValueError(
                f"Parameter {name!r} is a DTensor with placements {placements}: {odd[0]} cannot be sharded further. "
                "Tensor-parallel parameters are Shard or Replicate."
            )
        mine = set(self.data_parallel.mesh_dim_names or ())
        if shared := mine & set(mesh.mesh_dim_names or ()):
            raise ValueError(
                f"Parameter {name!r} is a DTensor over the mesh dimension {sorted(shared)[0]!r}, which parameters are "
                "also sharded over by fully_shard_model: it would be sharded twice. Distribute it over other "
                "dimensions (tensor-parallel ones), or shard over others (dp_shard_dim)."
            )
        partition = Partition(mesh, placements, tuple(param.shape))
        try:
            partition.beside(self.data_parallel)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"Parameter {name!r} is a DTensor over the mesh {_named(mesh)}, and is to be sharded over "
                f"{_named(self.data_parallel)}: both must be dimensions of one DeviceMesh. Make it with "
                "init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')) and take mesh['tp'] for the model and "
                f"mesh with dp_shard_dim='dp' here. ({error})"
            ) from error
        return partition

    def _first_like(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return one mesh object for all slices ``mesh["tp"]``, so that equal layers share compiled code."""
        groups = tuple(mesh.get_group(dim).group_name for dim in range(mesh.ndim))
        return self._meshes.setdefault((mesh, groups), mesh)

    def _of_marks(self, name: str, param: Tensor, marked: bool) -> Partition | None:
        mesh = self.tensor_parallel
        if not marked:
            if mesh is None:
                return None
            return Partition(mesh, (Replicate(),), tuple(param.shape), bare=True)
        if self.of_experts:
            raise NotImplementedError(
                f"Parameter {name!r} is an expert, and marked tensor_model_parallel: tensor parallelism inside of "
                "experts is not implemented. Divide whole experts among ranks (expt_device_mesh of (n / e, e) ranks), "
                "and build them without tensor parallelism (expert_tensor_parallel_size=1), or pass experts as "
                "DTensors over an ('ep', 'etp') mesh."
            )
        if mesh is None:
            raise ValueError(
                f"Parameter {name!r} is marked tensor_model_parallel: it is a part of a parameter, but tp_dim does "
                "not name the mesh dimension that holds the other parts. Pass device_mesh with a tensor-parallel "
                "dimension, and its name as tp_dim."
            )
        dim, stride = getattr(param, "partition_dim", None), getattr(param, "partition_stride", 1)
        if not isinstance(dim, int) or not -param.ndim <= dim < param.ndim:
            raise ValueError(
                f"Parameter {name!r} is marked tensor_model_parallel with partition_dim={dim!r}: the parameter has "
                f"{param.ndim} dimensions."
            )
        if stride != 1:
            raise NotImplementedError(
                f"Parameter {name!r} is marked with partition_stride={stride}: its rows are not contiguous, which a "
                "DTensor cannot express. Make each contiguous block a parameter of its own."
            )
        dim %= param.ndim
        shape = list(param.shape)
        shape[dim] *= mesh.size()
        return Partition(mesh, (Shard(dim),), tuple(shape), bare=True)


def _named(mesh: DeviceMesh) -> str:
    return f"{mesh.mesh_dim_names or '(without names)'} {tuple(mesh.shape)}"
