"""Parameters that are already divided over tensor-parallel or expert-parallel ranks (:mod:`.experts`).

Such a parameter is a DTensor (``torch.distributed.tensor.parallel``), or an ordinary tensor that holds this rank's part
and has Megatron's attributes (``tensor_model_parallel``, ``partition_dim``). Data-parallel ranks share the part: that
is what lies in a bucket, is gathered and reduced. The model computes with what it was built with, a DTensor over its
own mesh or the bare part. At rest, the parameter is a DTensor over both, ``(data-parallel dimensions, other
dimensions)``, with the shape of the whole parameter.

               tp 0        tp 1                      W [6, 4], Shard(0) over tp, rows of each part over dp
    dp 0     W[0:2]      W[3:5]
    dp 1     W[2:3]      W[5:6]                      gathered over dp: W[0:3] and W[3:6]
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import compat
from ..memory import extension
from ..topology import Group
from .meshes import check_order

__all__ = ["Partition", "Partitioner", "Peers", "local_part", "local_shape", "model_ranks", "whole_tensor"]


@dataclass(frozen=True, eq=False)
class Partition:
    """How one parameter is divided over mesh dimensions that are not data-parallel.

    Args:
        mesh: These dimensions.
        placements: ``Shard`` or ``Replicate``, one per dimension.
        shape: Shape of the whole parameter.
        bare: Whether the model computes with this rank's part as an ordinary tensor, instead of a DTensor.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    bare: bool = False

    # Compare meshes by identity: meshes of the same ranks are equal, even if the process groups of one are gone.

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Partition)
            and self.mesh is other.mesh
            and (self.placements, self.shape, self.bare) == (other.placements, other.shape, other.bare)
        )

    def __hash__(self) -> int:
        return hash((id(self.mesh), self.placements, self.shape, self.bare))

    @functools.cached_property
    def _part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return compat.local_shape_and_offset(self.shape, self.mesh, self.placements)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank's data-parallel group holds."""
        return self._part[0]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the part begins in the whole parameter, by dimension."""
        return self._part[1]

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups of ranks that hold other parts, by mesh dimension."""
        return tuple(Group.of(self.mesh.get_group(dim)) for dim, _ in self._divided)

    @property
    def placements_over_groups(self) -> tuple[Shard, ...]:
        """How each of :attr:`groups` divides the parameter."""
        return tuple(placement for _, placement in self._divided)

    @property
    def _divided(self) -> list[tuple[int, Shard]]:
        return [
            (dim, placement)
            for dim, placement in enumerate(self.placements)
            if isinstance(placement, Shard) and self.mesh.size(dim) > 1
        ]

    @property
    def count(self) -> int:
        """Number of parameters that reductions cover."""
        return 1

    @property
    def number(self) -> int:
        """This rank's number among these parameters."""
        return 0

    def forget_groups(self) -> None:
        """Forget the process groups, because those of the mesh were replaced."""
        vars(self).pop("groups", None)

    def take(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that broadcasts with the whole parameter; a view."""
        missing = len(self.shape) - whole.ndim
        for dim in range(whole.ndim):
            size, part = self.shape[missing + dim], self.part_shape[missing + dim]
            if whole.shape[dim] == size and part != size:
                whole = whole.narrow(dim, self.offsets[missing + dim], part)
        return whole

    def of_part(self, part: Tensor) -> DTensor:
        """Return the whole parameter as a DTensor whose local tensor is ``part``. Differentiable."""
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.shape), stride=strides
        )

    def assemble(self, part: Tensor) -> Tensor:
        """Return the whole parameter on every rank. A collective over :attr:`groups`."""
        return whole_tensor(self.of_part(part)) if self.groups else part

    def beside(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return a mesh of the data-parallel dimensions of ``mesh``, followed by these dimensions."""
        known: tuple[DeviceMesh, DeviceMesh] | None = vars(self).get("_beside")
        if known is None or known[0] is not mesh:
            known = vars(self)["_beside"] = mesh, compat.concatenate_meshes(mesh, self.mesh)
        return known[1]

    @property
    def placements_at_rest(self) -> tuple[Placement, ...]:
        """Placements that follow a :class:`~mfsdp_compile.runtime.compat.RowShard` with rows of the whole parameter."""
        return tuple(compat.EVERY_ROW if placement == Shard(0) else placement for placement in self.placements)


class Peers(Partition):
    """The partition of a parameter that has different counterparts, with other names, on other ranks: an expert.

    The parameter is whole on this rank. Reductions cover all counterparts: the result is one number that is equal on
    every rank, and the norm of a model's gradients covers all experts.
    """

    @functools.cached_property
    def _part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, (0,) * len(self.shape)

    @property
    def count(self) -> int:
        return self.mesh.size()

    @property
    def number(self) -> int:
        return self.mesh.get_local_rank()

    def assemble(self, part: Tensor) -> Tensor:
        return part

    def beside(self, mesh: DeviceMesh) -> DeviceMesh:
        return mesh

    @property
    def placements_at_rest(self) -> tuple[Placement, ...]:
        return ()


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
                f"Parameter {name!r} is an expert, and marked tensor_model_parallel: tensor parallelism inside of experts is not "
                "implemented. Divide whole experts among ranks (expt_device_mesh of (n / e, e) ranks), and build them without "
                "tensor parallelism (expert_tensor_parallel_size=1), or pass experts as DTensors over an ('ep', 'etp') mesh."
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


@compat.on_values
def model_ranks(mesh: DeviceMesh, partitions: Iterable[Partition]) -> tuple[int, ...]:
    """Return the global ranks, sorted, of the data-parallel dimensions ``mesh`` and of all partitions beside them."""
    meshes = dict.fromkeys((mesh, *(partition.beside(mesh) for partition in partitions)))
    return tuple(sorted({rank for each in meshes for rank in each.mesh.flatten().tolist()}))


def _named(mesh: DeviceMesh) -> str:
    return f"{mesh.mesh_dim_names or '(without names)'} {tuple(mesh.shape)}"


def local_part(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter, an ordinary tensor without autograd."""
    part = param.to_local() if isinstance(param, DTensor) else param
    return extension.plain(compat.transformer_engine.plain(compat.torchao.plain(part))).detach()


def local_shape(param: Tensor) -> torch.Size:
    """Return the shape of this rank's part of a parameter."""
    if hasattr(param, "topology"):  # it was sharded before
        return torch.Size(param.row_split.part_shape)  # type: ignore[attr-defined]
    return (local_part(param) if isinstance(param, DTensor) else param).shape


def whole_tensor(tensor: DTensor) -> Tensor:
    """Return ``tensor.full_tensor()``, gathered over one mesh dimension after the other.

    If a flattened mesh dimension exists, torch 2.13 gathers over all dimensions at once, and takes the padding of
    uneven shards for values.
    """
    placements = list(tensor.placements)
    for dim in reversed(range(len(placements))):
        if not placements[dim].is_replicate():
            placements[dim] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
