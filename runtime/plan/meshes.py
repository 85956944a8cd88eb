"""Device meshes as users give them: which dimensions are data-parallel, checked, as a topology."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import compat
from ..geometry.groups import Group
from ..geometry.placements import ShardingStrategy
from ..geometry.topology import Topology


class Arguments(NamedTuple):
    """Names of :func:`build_topology`'s arguments in ``fully_shard_model``, for messages."""

    mesh: str
    hybrid_group: str
    gathers: str


DENSE_ARGUMENTS = Arguments("device_mesh", "hybrid_fsdp_group", "fsdp_group_ag")
EXPERT_ARGUMENTS = Arguments("expt_device_mesh", "hybrid_fsdp_expt_group", "expt_fsdp_group_ag")


def build_topology(
    mesh: DeviceMesh | None,
    shard_dim: str | None,
    outer_dim: str | None,
    hybrid_group: dist.ProcessGroup | None,
    strategy: ShardingStrategy,
    outer_strategy: ShardingStrategy,
    gathers: dist.ProcessGroup | None = None,
    called: Arguments = DENSE_ARGUMENTS,
    device_type: str | None = None,
) -> tuple[Topology, dist.ProcessGroup]:
    """Return the topology that the arguments of ``fully_shard_model`` describe, and the process group of all its ranks.

    Args:
        device_type: Preferred device type for a mesh of all ranks, if the process group can communicate such tensors.

    Raises:
        RuntimeError: There is no process group.
        TypeError: A mesh, a name or a group has the wrong type.
        ValueError: Dimensions, groups or strategies do not fit together.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard_model needs a process group. Call torch.distributed.init_process_group first, and start the "
            "program with torchrun --nproc-per-node=N; a single process can shard over itself."
        )
    _check_kinds(mesh, {"dp_shard_dim": shard_dim, "dp_outer_dim": outer_dim}, hybrid_group, gathers, called)
    if outer_strategy not in (ShardingStrategy.NO_SHARD, ShardingStrategy.OPTIM):
        raise ValueError(
            f"outer_dp_sharding_strategy={outer_strategy.name.lower()!r}: outer ranks can share the optimizer's state "
            "(1, 'optim') or nothing (0, 'no_shard')."
        )
    if outer_strategy is ShardingStrategy.OPTIM and outer_dim is None:
        raise ValueError("outer_dp_sharding_strategy='optim' needs dp_outer_dim, the mesh dimension of outer ranks.")
    if outer_strategy.placements.shards and not strategy.placements.shards:
        raise ValueError(
            f"outer_dp_sharding_strategy={outer_strategy.name.lower()!r} divides further what inner ranks divide, and "
            f"with zero_dp_strategy={strategy.name.lower()!r} they divide nothing. Shard over inner ranks too (1, 2 or "
            "3), or swap the two dimensions."
        )
    if (outer_dim is None) != (hybrid_group is None):
        raise ValueError(
            f"dp_outer_dim and {called.hybrid_group} belong together: the name of the outer mesh dimension and the "
            "process group of all ranks of the outer and the inner one, for instance "
            f"{called.mesh}['outer', 'inner']._flatten().get_group()."
        )
    if mesh is None:
        if outer_dim is not None:
            raise ValueError("dp_outer_dim needs a device_mesh that has this dimension.")
        device_type = compat.device_type(preferred=device_type)
        names = (shard_dim,) if shard_dim is not None else None
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=names)
    elif shard_dim is None and (mesh.ndim > 1 or outer_dim is not None):
        raise ValueError(
            f"{called.mesh} has {mesh.ndim} dimensions, {mesh.mesh_dim_names}: name the dimension to shard over with "
            "dp_shard_dim."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Rank {dist.get_rank()} calls fully_shard_model with a device mesh that it is not part of: "
            f"{mesh.mesh.tolist()}. Give each rank the mesh of the ranks that share its model."
        )
    inner_mesh = mesh if shard_dim is None else _dimension(mesh, shard_dim, "dp_shard_dim", called)
    inner = inner_mesh.get_group()
    if gathers is not None and dist.get_process_group_ranks(gathers) != dist.get_process_group_ranks(inner):
        raise ValueError(
            f"{called.gathers} has the ranks {dist.get_process_group_ranks(gathers)}, but parameters are sharded over "
            f"{dist.get_process_group_ranks(inner)}: it must have the same ranks in the same order."
        )
    for_gathers = Group.of(gathers) if gathers is not None else None
    if outer_dim is None:
        _check_covered(mesh, inner)
        group = Group.of(inner)
        return Topology(inner_mesh, strategy, outer_strategy, group, None, group, for_gathers), inner

    assert shard_dim is not None
    assert hybrid_group is not None
    if outer_dim == shard_dim:
        raise ValueError(f"dp_outer_dim and dp_shard_dim are both {outer_dim!r}; they must be two dimensions.")
    outer = _dimension(mesh, outer_dim, "dp_outer_dim", called).get_group()
    try:
        both = sub_mesh(mesh, (outer_dim, shard_dim))
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"dp_outer_dim={outer_dim!r} and dp_shard_dim={shard_dim!r} are dimensions of {called.mesh}, which has "
            f"{mesh.mesh_dim_names}, but the two do not form a mesh: they must have no rank but this one in common, "
            "and the outer one must come first. Make it with init_device_mesh(device, (m, n), "
            f"mesh_dim_names=({outer_dim!r}, {shard_dim!r})). ({error})"
        ) from error
    if sorted(dist.get_process_group_ranks(hybrid_group)) != sorted(both.mesh.flatten().tolist()):
        raise ValueError(
            f"{called.hybrid_group} has the ranks {sorted(dist.get_process_group_ranks(hybrid_group))}, but the mesh "
            f"dimensions {outer_dim!r} and {shard_dim!r} have {sorted(both.mesh.flatten().tolist())}."
        )
    check_order(both, 1, called.mesh)
    _check_covered(mesh, hybrid_group)
    every = Group.of(hybrid_group)
    return (
        Topology(both, strategy, outer_strategy, Group.of(inner), Group.of(outer), every, for_gathers),
        hybrid_group,
    )


@compat.on_values
def check_order(mesh: DeviceMesh, along: int, called: str) -> None:
    """Raise ValueError if ranks order differently along dimension ``along`` in different places of ``mesh``.

    Process groups order their ranks by number, wherever they are in the mesh. Ranks that are side by side in the mesh
    would then hold different shards of what is cut over this dimension.

    Args:
        called: Name of the mesh, for the message.
    """
    places = mesh.mesh.movedim(along, -1).flatten(0, -2).argsort(-1)
    if (places != places[0]).any():
        name = (mesh.mesh_dim_names or range(mesh.ndim))[along]
        raise ValueError(
            f"{called} has the ranks {mesh.mesh.tolist()} in its dimensions {mesh.mesh_dim_names}, and their order "
            f"along {name!r} differs from place to place: process groups order ranks by number, so that those which "
            f"should hold the same piece of a parameter would not. Let them increase along {name!r} everywhere, as "
            "init_device_mesh does."
        )


def tensor_parallel_mesh(
    mesh: DeviceMesh | None, tp_dim: str | None, data_parallel: Sequence[str | None]
) -> DeviceMesh | None:
    """Return the dimension of ``mesh`` that ``tp_dim`` names; None if it names none.

    Raises:
        ValueError: There is no such dimension, or it is one of the ``data_parallel`` ones.
    """
    if tp_dim is None:
        return None
    _check_name(tp_dim, "tp_dim", DENSE_ARGUMENTS)
    if mesh is None:
        raise ValueError(f"tp_dim={tp_dim!r} needs a device_mesh that has this dimension.")
    if tp_dim in data_parallel:
        raise ValueError(
            f"tp_dim and {'dp_shard_dim' if tp_dim == data_parallel[0] else 'dp_outer_dim'} are both {tp_dim!r}: a "
            "mesh dimension is either tensor parallel or data parallel."
        )
    tensor_parallel = _dimension(mesh, tp_dim, "tp_dim", DENSE_ARGUMENTS)
    ranks = dist.get_process_group_ranks(tensor_parallel.get_group())
    for argument, name in zip(("dp_shard_dim", "dp_outer_dim"), data_parallel, strict=False):
        if name is None:
            continue
        others = dist.get_process_group_ranks(_dimension(mesh, name, argument, DENSE_ARGUMENTS).get_group())
        if len(both := sorted({*ranks} & {*others})) > 1:
            raise ValueError(
                f"tp_dim={tp_dim!r} has the ranks {ranks}, and {argument}={name!r} the ranks {others}: {both} cannot "
                f"share both parameters and data. Flatten into {name!r} only dimensions of ranks with other data."
            )
    return tensor_parallel


def _check_kinds(
    mesh: object, dimensions: Mapping[str, object], hybrid_group: object, gathers: object, called: Arguments
) -> None:
    """Raise TypeError if a mesh, a dimension's name or a process group has the wrong type."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{called.mesh} takes a torch.distributed.device_mesh.DeviceMesh, got a {type(mesh).__name__}. To make "
            "one from a process group: DeviceMesh.from_group(group, device_type, mesh_dim_names=('dp',))."
        )
    for argument, name in dimensions.items():
        if name is not None:
            _check_name(name, argument, called)
    for argument, group in ((called.hybrid_group, hybrid_group), (called.gathers, gathers)):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"{argument} is a process group that rank {dist.get_rank()} is not part of: "
                "torch.distributed.new_group gave it to ranks that it was not made of. Give each rank the group that "
                "it is in."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{argument} takes a torch.distributed.ProcessGroup, got a {type(group).__name__}. The group of a mesh "
                "dimension is mesh['name'].get_group()."
            )


def _check_name(name: object, argument: str, called: Arguments) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"{argument} takes the name of one dimension of {called.mesh}, got {name!r}. To name several, flatten them "
            f"into one first: mesh['dp', 'cp']._flatten('dp_cp'), and {argument}='dp_cp'."
        )


def _dimension(mesh: DeviceMesh, name: str, argument: str, called: Arguments) -> DeviceMesh:
    try:
        return sub_mesh(mesh, name)
    except (KeyError, RuntimeError, ValueError) as error:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"{argument}={name!r} is not a dimension of {called.mesh}, whose dimensions have no names. Name them: "
                f"init_device_mesh(device, {tuple(mesh.shape)}, mesh_dim_names=(..., {name!r}, ...))."
            ) from error
        raise ValueError(
            f"{argument}={name!r} is not a dimension of {called.mesh}, which has {mesh.mesh_dim_names}. Flattened "
            f"dimensions are those of the whole mesh: mesh['dp', 'cp']._flatten({name!r}) makes one. ({error})"
        ) from error


def sub_mesh(mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh with dimensions of these names, which may be flattened ones.

    Raises:
        KeyError, RuntimeError, ValueError: Torch finds no such part.
    """
    with warnings.catch_warnings():
        # Torch 2.11 to 2.15 warn that slicing by the name of a flattened dimension will be removed, but support it.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        return mesh[names]


_DATA = re.compile(r"(dp|ddp|fsdp|hsdp|cp|data|context|replicate)", re.IGNORECASE)
"""Prefixes of names of dimensions whose ranks have different data."""


def _check_covered(mesh: DeviceMesh, every: dist.ProcessGroup) -> None:
    """Raise ValueError if gradients are not reduced over a dimension whose name implies different data."""
    covered = set(dist.get_process_group_ranks(every))
    for name in mesh.mesh_dim_names or ():
        if _DATA.match(name) and not covered.issuperset(dist.get_process_group_ranks(mesh.get_group(name))):
            raise ValueError(
                f"The device mesh has a dimension {name!r} of {mesh.size((mesh.mesh_dim_names or ()).index(name))} "
                "ranks over which parameters are neither sharded nor replicated: gradients would not be reduced over "
                "it, and its ranks would part. Flatten it together with the others (mesh[..., "
                f"{name!r}]._flatten('dp_{name}'), dp_shard_dim='dp_{name}'), name it as dp_outer_dim, or, if its "
                "ranks hold different models, pass the sub-mesh of the other dimensions."
            )
