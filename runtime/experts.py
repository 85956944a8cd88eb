"""Expert parallelism: parameters of which each rank has others.

The data-parallel ranks of a model divide its experts among them. Ranks that hold the same experts shard these, and nothing
else; everything that is not an expert is sharded over all of them ::

    8 data-parallel ranks, 4 ways of expert parallelism

    rank        0    1    2    3    4    5    6    7
    dense      |<------- sharded over 8 ranks ------->|
    experts     A    B    C    D    A    B    C    D      A over ranks 0 and 4, B over 1 and 5, ...

An expert sees the tokens of every rank that sends it some, so that its gradient, summed over the ranks that hold it, is the
sum over all data-parallel ranks' tokens. Divided by the number of *all* data-parallel ranks it is the mean that every other
gradient is. (Megatron-FSDP has that factor too, but for ``average_in_collective``, where it averages over the expert's ranks
alone: a factor of the expert-parallel size too much.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import compat
from .agreement import everyones
from .topology import EXPERT_ARGUMENTS, ShardingStrategy, Topology, build_topology

__all__ = ["Experts", "IsExpert", "build_experts", "check_holders", "is_expert", "marked"]

IsExpert = Callable[[str, nn.Parameter], bool]
"""From a parameter's name in the model, and the parameter."""


def is_expert(name: str, param: nn.Parameter) -> bool:
    """The default: a parameter in a module called ``experts``, or with Megatron's mark, ``allreduce = False``.

    ``shared_experts.up.weight`` is no expert: every rank has it.
    """
    return "experts" in name.split(".")[:-1] or marked(param)


def marked(param: nn.Parameter) -> bool:
    """Whether Megatron's mark says that not all data-parallel ranks have the parameter."""
    return getattr(param, "allreduce", True) is False


@dataclass(frozen=True)
class Experts:
    """Which parameters are experts, and who holds them.

    Args:
        topology: the ranks that hold what this one does.
        is_expert: tells them.
        is_default: whether that is :func:`is_expert`.
        holders: global ranks of every such set of ranks among the data-parallel ones, in order of their first rank; None:
            the mesh tells only of this rank's.
    """

    topology: Topology
    is_expert: IsExpert
    is_default: bool
    holders: tuple[tuple[int, ...], ...] | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """That hold the experts of this one, all of them: global ranks, sorted."""
        group = compat.process_group(self.topology.every.name)
        return tuple(sorted(dist.get_process_group_ranks(group)))

    def known_to_all(self, every: dist.ProcessGroup) -> Experts:
        """With :attr:`holders`. Collective if the mesh does not tell.

        Args:
            every: the data-parallel ranks.

        Raises:
            ValueError: on all of them: experts are held by ranks that do not divide these.
        """
        if self.holders is not None:
            return self
        return replace(self, holders=check_holders(everyones(self.ranks, every), dist.get_process_group_ranks(every)))

    def of_sites(self, names: Sequence[str], param: nn.Parameter) -> bool:
        """Whether a parameter, with every name that it has, is an expert.

        Raises:
            ValueError: under one name, and not under another.
        """
        found = [bool(self.is_expert(name, param)) for name in names]
        if len(set(found)) > 1:
            raise ValueError(
                f"Parameter {names[found.index(True)]!r} is an expert, and {names[found.index(False)]!r} is the same "
                "parameter and none: it cannot be divided among ranks and be on all of them. Untie them, or pass is_expert."
            )
        return found[0]

    def __str__(self) -> str:
        return f"experts {self.topology}"


def build_experts(
    mesh: DeviceMesh,
    shard_dim: str | None,
    outer_dim: str | None,
    hybrid_group: dist.ProcessGroup | None,
    strategy: ShardingStrategy,
    outer_strategy: ShardingStrategy,
    gathers: dist.ProcessGroup | None,
    recognise: IsExpert | None,
    dense: Topology,
    every: dist.ProcessGroup,
) -> Experts:
    """What the arguments of ``fully_shard_model`` say of experts. Without communication.

    Args:
        recognise: tells experts; None: :func:`is_expert`.
        dense: that everything else is sharded over.
        every: process group of its ranks.

    Raises:
        ValueError, TypeError: dimensions, groups or ranks that do not fit together.
    """
    if recognise is not None and not callable(recognise):
        raise TypeError(
            "is_expert takes a function of a parameter's name and the parameter that tells whether it is an expert, got "
            f"{recognise!r}"
        )
    topology, sharers = build_topology(
        mesh, shard_dim, outer_dim, hybrid_group, strategy, outer_strategy, gathers, EXPERT_ARGUMENTS
    )
    if mesh.device_type != dense.mesh.device_type:
        raise ValueError(
            f"expt_device_mesh is of type {mesh.device_type!r}, device_mesh of type {dense.mesh.device_type!r}: a model lives on "
            "one type of device."
        )
    data_parallel = dist.get_process_group_ranks(every)
    if not set(data_parallel).issuperset(own := dist.get_process_group_ranks(sharers)):
        raise _not_divided([sorted(own)], data_parallel)
    dims = [dim for dim in (outer_dim, shard_dim) if dim is not None] or list(mesh.mesh_dim_names or ())
    told = [ranks for ranks in _rows(mesh, dims) if set(data_parallel).issuperset(ranks)]
    tells_all = sum(len(ranks) for ranks in told) >= len(data_parallel)
    holders = check_holders(told, data_parallel) if tells_all else None
    return Experts(topology, recognise or is_expert, recognise is None, holders)


def check_holders(found: Iterable[Sequence[int]], data_parallel: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Sets of ranks that hold the same experts, each once, in order of their first rank.

    Args:
        found: one for each rank, or one for each set.
        data_parallel: the ranks that they divide.

    Raises:
        ValueError: they do not divide these into equal parts.
    """
    holders = sorted({tuple(sorted(ranks)) for ranks in found})
    if sorted(rank for ranks in holders for rank in ranks) != sorted(data_parallel) or len({*map(len, holders)}) > 1:
        raise _not_divided(holders, data_parallel)
    return tuple(holders)


def _rows(mesh: DeviceMesh, dims: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of every line, or plane, of a mesh along ``dims``."""
    names = list(mesh.mesh_dim_names or ())
    along = [names.index(dim) for dim in dims] or list(range(mesh.ndim))
    size = 1
    for dim in along:
        size *= mesh.mesh.shape[dim]
    across = [dim for dim in range(mesh.ndim) if dim not in along]
    return [tuple(sorted(row)) for row in mesh.mesh.permute(*across, *along).reshape(-1, size).tolist()]


def _not_divided(holders: Sequence[Sequence[int]], data_parallel: Sequence[int]) -> ValueError:
    shown = ", ".join(str(list(ranks)) for ranks in holders[:4]) + (", ..." if len(holders) > 4 else "")
    return ValueError(
        f"expt_device_mesh shards experts over the ranks {shown}, but everything else is sharded over "
        f"{sorted(data_parallel)[:16]}{', ...' if len(data_parallel) > 16 else ''}: the former must divide the latter into "
        "equal parts. Of n data-parallel ranks and e-fold expert parallelism a mesh of (n / e, e) ranks, with dp_shard_dim as "
        "the name of the first dimension, does."
    )
