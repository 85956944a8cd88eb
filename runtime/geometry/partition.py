"""Parameters that are already divided over tensor-parallel or expert-parallel ranks.

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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import compat
from ..formats import extension
from .topology import Group


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


@compat.on_values
def model_ranks(mesh: DeviceMesh, partitions: Iterable[Partition]) -> tuple[int, ...]:
    """Return the global ranks, sorted, of the data-parallel dimensions ``mesh`` and of all partitions beside them."""
    meshes = dict.fromkeys((mesh, *(partition.beside(mesh) for partition in partitions)))
    return tuple(sorted({rank for each in meshes for rank in each.mesh.flatten().tolist()}))


def local_part(param: Tensor) -> Tensor:
    """Return this rank's part of a parameter, an ordinary tensor without autograd."""
    part = own_rows(param) if isinstance(param, DTensor) else param
    return extension.plain(compat.transformer_engine.plain(compat.torchao.plain(part))).detach()


def own_rows(tensor: DTensor) -> Tensor:
    """Return this rank's part for a use that ends at once: nobody keeps it."""
    rows: Tensor = tensor.rows() if hasattr(tensor, "rows") else tensor.to_local()
    return rows


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
