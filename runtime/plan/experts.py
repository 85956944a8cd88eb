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

Where tensor-parallel ranks divide everything else, they hold the same experts, or they divide the experts as
data-parallel ranks do. Activations are then divided by positions, and each rank sends its own tokens ::

    2 data-parallel x 2 tensor-parallel ranks, 4 ways of expert parallelism

    rank        0    1    2    3
    dense       0    1    0    1      number of the tensor-parallel part, sharded over ranks 0 and 2, and 1 and 3
    experts     A    B    C    D

An expert's gradient is again the sum over the tokens of all data-parallel ranks, whose number divides it.

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
from ..geometry.partition import Partition, Peers
from ..geometry.placements import ShardingStrategy
from ..geometry.topology import Topology
from ..ranks.agreement import everyones
from .meshes import EXPERT_ARGUMENTS, build_topology

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
        dividing: Global ranks that divide the experts, sorted; see :meth:`among`.
        over_tensor_parallel: Whether tensor-parallel ranks divide the experts too.
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
    dividing: tuple[int, ...] = ()
    over_tensor_parallel: bool = False
    holders: Tensor | None = None
    parallel: DeviceMesh | None = None
    named_alike: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold the experts of this one, sorted."""
        group = compat.process_group(self.topology.every.name)
        return tuple(sorted(dist.get_process_group_ranks(group)))

    @compat.on_values
    def among(
        self, data_parallel: Sequence[int], model: Sequence[int], tensor_parallel: Iterable[str]
    ) -> ExpertPlacement:
        """Return a copy that knows which ranks divide the experts. Does not communicate.

        These are all ranks of the model if the given mesh has them, not counting dimensions that are those of tensor
        parallelism by name. Otherwise, they are the data-parallel ranks.

        Args:
            data_parallel: Global ranks that everything else is sharded over.
            model: These, and ranks that divide other parameters by tensor parallelism.
            tensor_parallel: Names of the mesh dimensions of tensor parallelism.

        Raises:
            ValueError: The ranks that hold experts divide neither.
        """
        own, parts = set(self.ranks), list(_slices(self.given, self.topology.mesh, frozenset(tensor_parallel)))
        for ranks in dict.fromkeys((tuple(sorted(model)), tuple(sorted(data_parallel)))):
            over_tensor_parallel = len(ranks) > len(data_parallel)
            told = [part for part in parts if set(ranks).issuperset(part.flatten().tolist())]
            tells_all = sum(part.numel() for part in told) >= len(ranks)
            if tells_all or (own.issubset(ranks) and not (over_tensor_parallel and own.issubset(data_parallel))):
                holders = check_holders(told, ranks) if tells_all else None
                return replace(self, dividing=ranks, over_tensor_parallel=over_tensor_parallel, holders=holders)
        raise _not_divided([sorted(own)], data_parallel)

    @compat.on_values
    def known_to_all(self, names: Sequence[str], every: dist.ProcessGroup, are_bare: bool) -> ExpertPlacement:
        """Return a copy completed with what other ranks know. A collective.

        Args:
            names: Names of experts.
            every: Process group of the ranks that divide them.
            are_bare: Whether some experts are ordinary tensors, which do not say what they are a part of.

        Raises:
            ValueError: On all of them: the ranks that hold experts do not divide these ranks.
        """
        holders = self.holders
        if holders is None:
            own = self.topology.mesh.mesh.tolist()
            holders = check_holders(
                map(torch.tensor, everyones(own, every, "ranks of experts")), dist.get_process_group_ranks(every)
            )
        if len(holders) == 1 or not are_bare:
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

    def of_locations(self, names: Sequence[str], param: nn.Parameter) -> bool:
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
) -> ExpertPlacement:
    """Interpret the arguments of ``fully_shard_model`` about experts. Does not communicate.

    Args:
        recognize: Function that identifies experts; None: :func:`is_expert`.
        dense: Topology that everything else is sharded over.

    Raises:
        ValueError, TypeError: Dimensions, groups or ranks do not fit together.
    """
    if recognize is not None and not callable(recognize):
        raise TypeError(f"is_expert takes a function (name, parameter) -> bool, got {recognize!r}")
    topology, _ = build_topology(
        mesh, shard_dim, outer_dim, hybrid_group, strategy, outer_strategy, gathers, EXPERT_ARGUMENTS
    )
    if mesh.device_type != dense.mesh.device_type:
        raise ValueError(
            f"expt_device_mesh is of type {mesh.device_type!r}, but device_mesh is of type "
            f"{dense.mesh.device_type!r}. Both must be the same type of device."
        )
    return ExpertPlacement(mesh, topology, recognize or is_expert, recognize is None)


def check_holders(found: Iterable[Tensor], dividing: Sequence[int]) -> Tensor:
    """Return the distinct meshes that experts are divided over, in order of their first rank: ``[e, *shape]``.

    Args:
        found: One mesh per rank, or one per set of holders.
        dividing: Ranks that the meshes divide.

    Raises:
        ValueError: The meshes do not divide these ranks into equal parts.
    """
    distinct = {tuple(ranks.flatten().tolist()): ranks for ranks in found}
    rows = sorted(distinct)
    if sorted(rank for row in rows for rank in row) != sorted(dividing) or len({*map(len, rows)}) > 1:
        raise _not_divided(rows, dividing)
    return torch.stack([distinct[row] for row in rows])


def _slices(mesh: DeviceMesh, part: DeviceMesh, fixed: frozenset[str]) -> Iterable[Tensor]:
    """Return the ranks of parts of ``mesh`` along the dimensions of ``part``, which is this rank's part.

    Args:
        fixed: Names of other dimensions, along which only parts in this rank's place count.
    """
    names, wanted = list(mesh.mesh_dim_names or ()), part.mesh_dim_names or ()
    along = [names.index(name) for name in wanted] or list(range(mesh.ndim))
    across = [dim for dim in range(mesh.ndim) if dim not in along]
    ranks, place = mesh.mesh, mesh.get_coordinate()
    for dim in across:
        if names[dim:] and names[dim] in fixed and place is not None:
            ranks = ranks.narrow(dim, place[dim], 1)
    return ranks.permute(*across, *along).reshape(-1, *part.mesh.shape)


def _not_divided(holders: Sequence[Sequence[int]], dividing: Sequence[int]) -> ValueError:
    shown = ", ".join(str(list(ranks)) for ranks in holders[:4]) + (", ..." if len(holders) > 4 else "")
    return ValueError(
        f"expt_device_mesh shards experts over the ranks {shown}, but everything else is sharded over "
        f"{sorted(dividing)[:16]}{', ...' if len(dividing) > 16 else ''}: the former must divide the latter into "
        "equal parts. Of n data-parallel ranks and e-fold expert parallelism a mesh of (n / e, e) ranks, with "
        "dp_shard_dim as the name of the first dimension, does. Where tensor-parallel ranks divide experts too, n "
        "counts them."
    )
