"""Expert parallelism: parameters that differ between data-parallel ranks.

The data-parallel ranks of a model divide its experts among them. Ranks that hold the same experts shard only these;
everything that is not an expert is sharded over all data-parallel ranks ::

    8 data-parallel ranks, 4 ways of expert parallelism

    rank        0    1    2    3    4    5    6    7
    dense      |<------- sharded over 8 ranks ------->|
    experts     A    B    C    D    A    B    C    D      A over ranks 0 and 4, B over 1 and 5, ...

An expert sees the tokens that any rank sends to it. Its gradient, summed over the ranks that hold it, is therefore the
sum over the tokens of all data-parallel ranks. Divided by the number of *all* data-parallel ranks, it is a mean like
every other gradient. (Megatron-FSDP uses the same factor, except for ``average_in_collective``: there it averages over
the expert's ranks only, which is too large by a factor of the expert-parallel size.)

At rest, parameters with the same name on all these ranks are one parameter: ``experts.up [e, ...]``, which stacks a
rank's e experts, is a part of ``[all experts, ...]``, and a DTensor of that shape. Norms therefore cover all experts,
and checkpoints fit any number of expert-parallel ranks. If ranks use different names (``experts.4.up`` on one,
``experts.0.up`` on another), each is a separate parameter. Its norm is reduced together with those of its counterparts
on other ranks, so that the norm of all gradients covers all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .. import compat
from ..ranks.agreement import everyones
from ..topology import ShardingStrategy, Topology
from .meshes import EXPERT_ARGUMENTS, build_topology
from .partition import Partition, Peers

__all__ = ["ExpertPlacement", "IsExpert", "build_experts", "is_expert", "marked"]

IsExpert = Callable[[str, nn.Parameter], bool]
"""Function of a parameter's name in the model, and the parameter."""


def is_expert(name: str, param: nn.Parameter) -> bool:
    """Whether a parameter is an expert, by default: its module is called ``experts``, or it has ``allreduce = False``.

    The attribute is Megatron's. ``shared_experts.up.weight`` is not an expert: every rank has it.
    """
    return "experts" in name.split(".")[:-1] or marked(param)


def marked(param: nn.Parameter) -> bool:
    """Whether Megatron's attribute says that not all data-parallel ranks have the parameter."""
    return getattr(param, "allreduce", True) is False


@dataclass(frozen=True)
class ExpertPlacement:
    """Which parameters are experts, and which ranks hold them.

    Args:
        given: ``expt_device_mesh``.
        topology: Ranks that hold the same experts as this one.
        is_expert: Function that identifies experts.
        is_default: Whether that is :func:`is_expert`.
        holders: Global ranks, ``[e, *topology.mesh.shape]``, of all e meshes that experts are divided over. None: the
            given mesh contains only this rank's.
        parallel: Ranks that hold the other experts, one from each mesh. None: there are none, or they are not known
            yet.
        named_alike: Whether those ranks use the same names for their experts as this one.
    """

    given: DeviceMesh
    topology: Topology
    is_expert: IsExpert
    is_default: bool
    holders: Tensor | None
    parallel: DeviceMesh | None = None
    named_alike: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the experts of this one, sorted."""
        group = compat.process_group(self.topology.every.name)
        return tuple(sorted(dist.get_process_group_ranks(group)))

    @compat.on_values
    def known_to_all(self, names: Sequence[str], every: dist.ProcessGroup) -> ExpertPlacement:
        """Return a copy completed with what other ranks know. A collective.

        Args:
            names: Names of experts.
            every: Process group of the data-parallel ranks.

        Raises:
            ValueError: On all of them: the ranks that hold experts do not divide the data-parallel ranks.
        """
        holders = self.holders
        if holders is None:
            own = self.topology.mesh.mesh.tolist()
            holders = check_holders(
                map(torch.tensor, everyones(own, every, "ranks of experts")), dist.get_process_group_ranks(every)
            )
        if len(holders) == 1:
            return replace(self, holders=holders)
        alike = (
            not compat.is_real_group(every.group_name)
            or len({*map(tuple, everyones(names, every, "names of experts"))}) == 1
        )
        if (holders.flatten(1).diff(dim=0) <= 0).any():
            raise ValueError(
                f"expt_device_mesh divides experts over {holders.tolist()}, where ranks that hold different experts "
                "are not always in increasing order. Make it with init_device_mesh(device, (n / e, e), ...)."
            )
        peers = holders.flatten(1)[:, (holders == dist.get_rank()).any(0).flatten()].flatten().tolist()
        for name in self.given.mesh_dim_names or ():
            if dist.get_process_group_ranks(self.given[name].get_group()) == peers:
                return replace(self, holders=holders, parallel=self.given[name], named_alike=alike)
        groups = [compat.process_group(group.name) for group in self.topology.mesh_groups]
        names = self.topology.mesh.mesh_dim_names or ("expert_dp",)
        whole = DeviceMesh.from_group(
            [*groups, compat.new_group_like(self.topology.every.name, peers)],
            self.given.device_type,
            mesh=holders.movedim(0, -1),
            mesh_dim_names=(*names, _PARALLEL),
        )
        topology = replace(self.topology, mesh=whole[names])
        return replace(self, holders=holders, topology=topology, parallel=whole[_PARALLEL], named_alike=alike)

    def partition(self, param: Tensor) -> Partition | None:
        """Return what an expert's parameter is a part of. Call this after :meth:`known_to_all`."""
        if self.parallel is None:
            return None
        if not param.ndim or not self.named_alike:
            return Peers(self.parallel, (Shard(0),), tuple(param.shape), bare=True)
        shape = (param.shape[0] * self.parallel.size(), *param.shape[1:])
        return Partition(self.parallel, (Shard(0),), shape, bare=True)

    def of_sites(self, names: Sequence[str], param: nn.Parameter) -> bool:
        """Whether a parameter, under all its names, is an expert.

        Raises:
            ValueError: It is one under some of its names only.
        """
        found = [bool(self.is_expert(name, param)) for name in names]
        if len(set(found)) > 1:
            raise ValueError(
                f"Parameter {names[found.index(True)]!r} is an expert, and {names[found.index(False)]!r} is tied to a "
                "parameter that is not an expert: a parameter cannot be both divided among ranks and on all of them. "
                "Untie them, or pass is_expert."
            )
        return found[0]

    def __str__(self) -> str:
        return f"experts {self.topology}"


_PARALLEL = "ep"
"""Name of the mesh dimension of ranks with other experts, if the program's mesh has none."""


@compat.on_values
def build_experts(
    mesh: DeviceMesh,
    shard_dim: str | None,
    outer_dim: str | None,
    hybrid_group: dist.ProcessGroup | None,
    strategy: ShardingStrategy,
    outer_strategy: ShardingStrategy,
    gathers: dist.ProcessGroup | None,
    recognize: IsExpert | None,
    dense: Topology,
    every: dist.ProcessGroup,
) -> ExpertPlacement:
    """Interpret the arguments of ``fully_shard_model`` about experts. Does not communicate.

    Args:
        recognize: Function that identifies experts; None: :func:`is_expert`.
        dense: Topology that everything else is sharded over.
        every: Process group of that topology's ranks.

    Raises:
        ValueError, TypeError: Dimensions, groups or ranks do not fit together.
    """
    if recognize is not None and not callable(recognize):
        raise TypeError(f"is_expert takes a function (name, parameter) -> bool, got {recognize!r}")
    topology, sharers = build_topology(
        mesh, shard_dim, outer_dim, hybrid_group, strategy, outer_strategy, gathers, EXPERT_ARGUMENTS
    )
    if mesh.device_type != dense.mesh.device_type:
        raise ValueError(
            f"expt_device_mesh is of type {mesh.device_type!r}, but device_mesh is of type "
            f"{dense.mesh.device_type!r}. Both must be the same type of device."
        )
    data_parallel = dist.get_process_group_ranks(every)
    if not set(data_parallel).issuperset(own := dist.get_process_group_ranks(sharers)):
        raise _not_divided([sorted(own)], data_parallel)
    told = [ranks for ranks in _slices(mesh, topology.mesh) if set(data_parallel).issuperset(ranks.flatten().tolist())]
    tells_all = sum(ranks.numel() for ranks in told) >= len(data_parallel)
    holders = check_holders(told, data_parallel) if tells_all else None
    return ExpertPlacement(mesh, topology, recognize or is_expert, recognize is None, holders)


def check_holders(found: Iterable[Tensor], data_parallel: Sequence[int]) -> Tensor:
    """Return the distinct meshes that experts are divided over, in order of their first rank: ``[e, *shape]``.

    Args:
        found: One mesh per rank, or one per set of holders.
        data_parallel: Ranks that the meshes divide.

    Raises:
        ValueError: The meshes do not divide these ranks into equal parts.
    """
    distinct = {tuple(ranks.flatten().tolist()): ranks for ranks in found}
    rows = sorted(distinct)
    if sorted(rank for row in rows for rank in row) != sorted(data_parallel) or len({*map(len, rows)}) > 1:
        raise _not_divided(rows, data_parallel)
    return torch.stack([distinct[row] for row in rows])


def _slices(mesh: DeviceMesh, part: DeviceMesh) -> Iterable[Tensor]:
    """Return the ranks of every part of ``mesh`` along the dimensions of ``part``, which is this rank's part."""
    names, wanted = list(mesh.mesh_dim_names or ()), part.mesh_dim_names or ()
    along = [names.index(name) for name in wanted] or list(range(mesh.ndim))
    across = [dim for dim in range(mesh.ndim) if dim not in along]
    return mesh.mesh.permute(*across, *along).reshape(-1, *part.mesh.shape)


def _not_divided(holders: Sequence[Sequence[int]], data_parallel: Sequence[int]) -> ValueError:
    shown = ", ".join(str(list(ranks)) for ranks in holders[:4]) + (", ..." if len(holders) > 4 else "")
    return ValueError(
        f"expt_device_mesh shards experts over the ranks {shown}, but everything else is sharded over "
        f"{sorted(data_parallel)[:16]}{', ...' if len(data_parallel) > 16 else ''}: the former must divide the latter into "
        "equal parts. Of n data-parallel ranks and e-fold expert parallelism a mesh of (n / e, e) ranks, with dp_shard_dim as "
        "the name of the first dimension, does."
    )
