"""Which ranks share what: the ZeRO strategies over one or two dimensions of data-parallel ranks.

                            at rest on a rank               before use                 after backward
    no_shard                everything                      -                          all-reduce
    optim                   1/n of optimizer state          gather, once per step      reduce-scatter, once per step
    optim_grads             1/n of gradients too            gather, once per step      reduce-scatter
    optim_grads_params      1/n of everything               gather, each use           reduce-scatter
    HSDP  (outer no_shard)  the same on each outer rank     same as inner strategy     + all-reduce, once per step
    HFSDP (outer optim)     1/(n m) of optimizer state      gather outer once per      + reduce-scatter, once per step
                            and gradients                   step, inner at each use

n: inner ranks, m: outer ranks. "Once per step" is the frequency when gradients are accumulated over microbatches: see
:mod:`mfsdp_compile.runtime.pending`. Everything else in this package reads the properties of :class:`Topology` and does
not test for strategies by name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from . import compat
from .agreement import announce
from .exchange import When, stride_of

__all__ = [
    "EXPERT_ARGUMENTS",
    "Accumulation",
    "Group",
    "ShardingStrategy",
    "Stage",
    "Topology",
    "build_topology",
    "check_order",
    "launches",
    "tensor_parallel_mesh",
]


class ShardingStrategy(IntEnum):
    """What is sharded over data-parallel ranks, in ZeRO's terms (https://arxiv.org/abs/1910.02054).

    Each strategy shards more than the one before it, and costs more communication.
    """

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3

    @staticmethod
    def of(value: object, argument: str) -> ShardingStrategy:
        """Convert a strategy, its number or its name (``"optim_grads_params"``).

        Raises:
            TypeError: ``value`` is a bool or a float. These compare equal to numbers, but are mistakes.
            ValueError: There is no such strategy.
        """
        if isinstance(value, ShardingStrategy):
            return value
        choices = ", ".join(f"{s.value} or {s.name.lower()!r}" for s in ShardingStrategy)
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"{argument} takes {choices}; got {value!r}, a {type(value).__name__}")
        for strategy in ShardingStrategy:
            if value == strategy.value or value == strategy.name.lower():
                return strategy
        raise ValueError(f"{argument} takes {choices}; got {value!r}")


@dataclass
class Group:
    """Ranks that communicate with one another.

    Args:
        name: Name of the process group for functional collectives. It changes when the group has to be created again.
        size: Number of ranks.
        rank: Rank of this process in the group.
        stride: Distance between neighboring ranks of the group, in global ranks.
    """

    name: str
    size: int
    rank: int
    stride: int = 1

    def __hash__(self) -> int:
        return hash((self.size, self.rank))

    def probe(self, device_type: str) -> None:
        """Raise RuntimeError if a collective over the group fails."""
        one = torch.ones(1, device=device_type)
        found = compat.wait_tensor(compat.all_reduce(one, "sum", self.name))
        if found.item() != self.size:
            raise RuntimeError(f"Ones of {self.size} ranks have the sum {found.item()}.")

    @staticmethod
    def of(group: dist.ProcessGroup) -> Group:
        ranks = dist.get_process_group_ranks(group)
        return Group(group.group_name, len(ranks), dist.get_rank(group), stride_of(ranks))


@dataclass(frozen=True)
class Accumulation:
    """What a rank keeps from one microbatch of a step to the next, beyond what the strategy requires.

    Args:
        whole_gradients: Gradients are accumulated unsharded, and reduced once per step. If False, strategies that shard
            gradients reduce those of every microbatch.
        keeps_gathered: Gathered parameters stay until the step's gradients are reduced.
        forwards_overlap: Several forwards run before the first one's backward. What one forward keeps, each of them
            keeps.
    """

    whole_gradients: bool = False
    keeps_gathered: bool = False
    forwards_overlap: bool = False


@dataclass(frozen=True)
class Stage:
    """One collective of a bucket's reduction: a reduce-scatter, or an all-reduce."""

    scatters: bool
    group: Group
    when: When


@dataclass(frozen=True)
class Topology:
    """The data-parallel ranks of a model and what they share.

    Args:
        mesh: Mesh of the parameters' DTensors: (inner,) or (outer, inner).
        strategy: Strategy over the inner ranks.
        outer_strategy: Strategy over the outer ranks: no_shard (HSDP) or optim (HFSDP, with ``optim_grads_params`` over
            inner ranks).
        inner: Ranks that the strategy shards over.
        outer: Ranks along the outer dimension; None if there is only one dimension.
        every: All data-parallel ranks.
        inner_gathers: The ranks of ``inner`` with a separate communicator for gathers, so that gathers do not queue
            behind reductions; None: :attr:`inner`.
        portions: Parts of :attr:`gather_group` that backwards gather over with ``reshard_after_forward``, by their
            size. Each consists of neighboring ranks, including this one, and is created when a graph first needs it.
        accumulation: What is kept between microbatches.
    """

    mesh: DeviceMesh
    strategy: ShardingStrategy
    outer_strategy: ShardingStrategy
    inner: Group
    outer: Group | None
    every: Group
    inner_gathers: Group | None = None
    portions: dict[int, Group] = field(default_factory=dict, compare=False)
    accumulation: Accumulation = Accumulation()

    def __deepcopy__(self, memo: dict[int, object]) -> Topology:
        return self  # copies communicate over the same groups

    def accumulating(self, accumulation: Accumulation) -> Topology:
        """Return a topology of the same ranks and strategy with another way to accumulate.

        Raises:
            ValueError: Parameters are to stay gathered with HFSDP.
        """
        if accumulation.keeps_gathered and self.is_hfsdp:
            raise ValueError(
                "keep_gathered=True is not supported with outer_dp_sharding_strategy='optim' (HFSDP), whose parameters are "
                "gathered over outer and inner ranks one after the other. Use 'no_shard' for outer ranks (HSDP), or leave "
                "keep_gathered out."
            )
        return replace(self, accumulation=accumulation)

    @property
    def is_hfsdp(self) -> bool:
        return self.outer is not None and self.outer_strategy is not ShardingStrategy.NO_SHARD

    # -- parameters, gradients and optimizer state at rest ------------------------------------------------------------

    @property
    def shards(self) -> int:
        """Number of shards that a bucket is cut into, at rest."""
        if self.strategy is ShardingStrategy.NO_SHARD:
            return 1
        return self.every.size if self.is_hfsdp else self.inner.size

    @property
    def shard(self) -> int:
        """Number of the shard that this rank holds.

        With HFSDP, inner ranks come first, so that the shards of the outer ranks are adjacent in the inner shard that
        is gathered.
        """
        if self.strategy is ShardingStrategy.NO_SHARD:
            return 0
        if self.is_hfsdp:
            assert self.outer is not None
            return self.inner.rank * self.outer.size + self.outer.rank
        return self.inner.rank

    def placements(self, rows: range) -> tuple[Placement, ...]:
        """Return the placements of a DTensor over :attr:`mesh` of which this rank holds ``rows``."""
        inner: Placement = Replicate() if self.strategy is ShardingStrategy.NO_SHARD else compat.RowShard(rows)
        if self.outer is None:
            return (inner,)
        return (compat.EVERY_ROW if self.is_hfsdp else Replicate(), inner)

    @property
    def shard_groups(self) -> tuple[Group, ...]:
        """Groups to gather over, one after the other, to assemble the shards."""
        if self.strategy is ShardingStrategy.NO_SHARD:
            return ()
        if self.is_hfsdp:
            assert self.outer is not None
            return (self.outer, self.inner)
        return (self.inner,)

    @property
    def replicas(self) -> Group | None:
        """Ranks that hold the same shard; None if no two do."""
        if self.strategy is ShardingStrategy.NO_SHARD:
            return self.every
        return None if self.is_hfsdp else self.outer

    def announce(self, what: str, parameter: str | None = None) -> None:
        """Announce that an operation on parameters at rest is about to communicate; see :func:`.agreement.announce`."""
        if self.shard_groups:  # otherwise every rank holds everything
            announce(what, self.every.name, parameter)

    def sum(self, value: Tensor, op: str) -> Tensor:
        """Reduce results for each shard to the result for the whole tensor; the same on every rank."""
        for group in self.shard_groups:
            value = compat.wait_tensor(compat.all_reduce(value, op, group.name))
        return value

    # -- parameters in use --------------------------------------------------------------------------------------------

    @property
    def resident_group(self) -> Group | None:
        """Group to gather over once after each change of the shards; None: only shards stay between uses."""
        if self.is_hfsdp:
            return self.outer
        if self.strategy in (ShardingStrategy.OPTIM, ShardingStrategy.OPTIM_GRADS) or self.lets_go:
            return self.inner_gathers or self.inner
        return None

    @property
    def lets_go(self) -> bool:
        """Whether tensors that stay gathered between uses are released at the end of each step."""
        return self.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS and self.accumulation.keeps_gathered

    @property
    def gather_group(self) -> Group | None:
        """Group to gather over at each use."""
        if self.strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS or self.lets_go:
            return None
        return self.inner_gathers or self.inner

    def make_portions(self, size: int) -> None:
        """Create the process group of ``size`` neighbors; ``size`` divides :attr:`gather_group`'s.

        Every rank must call this.
        """
        gathers = self.gather_group
        assert gathers is not None
        start = gathers.rank // size * size
        ranks = dist.get_process_group_ranks(compat.process_group(gathers.name))[start : start + size]
        self.portions[size] = Group.of(compat.new_group_like(gathers.name, ranks))

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of a bucket's reduction, one collective each, in order."""
        if self.strategy is ShardingStrategy.NO_SHARD:
            return (Stage(False, self.every, When.IF_DUE),)
        keeps_whole = self.strategy is ShardingStrategy.OPTIM or self.accumulation.whole_gradients
        inner = Stage(True, self.inner, When.IF_DUE if keeps_whole else When.ALWAYS)
        if self.outer is None:
            return (inner,)
        return (inner, Stage(self.is_hfsdp, self.outer, When.FOLLOWS if keeps_whole else When.IF_DUE))

    # -- process groups -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[Group]:
        """Each group once, :attr:`every` last. With one dimension, :attr:`every` is :attr:`inner`."""
        others = (self.inner, self.inner_gathers, self.outer, *self.portions.values())
        return [group for group in others if group is not None and group != self.every] + [self.every]

    @property
    def mesh_groups(self) -> list[Group]:
        """Groups of the dimensions of :attr:`mesh`."""
        return [self.inner] if self.outer is None else [self.outer, self.inner]

    @property
    def group_names(self) -> list[str]:
        return [group.name for group in self.groups]

    def renew(self) -> dist.ProcessGroup:
        """Create new process groups of the same ranks. Every rank must call this.

        They replace groups that cannot be used any more, because a collective timed out or ranks disagree on which is
        next. The old groups belong to the user and are left alone.

        Returns:
            The new process group of :attr:`every`.
        """
        self.portions.clear()  # some ranks may not have created one yet; recompiled graphs request it again
        for group in self.groups:
            made = compat.new_group_like(group.name)
            group.name = made.group_name
        return made  # ``every`` is the last

    def __str__(self) -> str:
        name = self.strategy.name.lower()
        if self.outer is None:
            return f"{name} over {self.inner.size} ranks"
        return f"{'HFSDP' if self.is_hfsdp else 'HSDP'}, {name} over {self.outer.size} x {self.inner.size} ranks"


def launches(
    schedule: Sequence[str], topologies: Mapping[str, Topology], other: Topology, due: bool
) -> list[tuple[str, str]]:
    """Return the collectives that a compiled graph starts, each with the name of its process group.

    Args:
        schedule: Lines from ``passes.pipeline.collectives``.
        topologies: Topologies by name of the bucket.
        other: Topology of all other buckets.
        due: Whether reductions that may be deferred run.
    """
    found = []
    for line in schedule:
        kind, name, *rest = line.split("  ")
        topology = topologies.get(name.partition(", portions of ")[0], other)
        if kind == "gather" and topology.gather_group is not None:
            of = re.search(r", portions of (\d+)$", name)
            group = topology.portions.get(int(of[1])) if of else topology.gather_group
            if group is not None:  # otherwise another model created it, whose code this one runs
                found.append((f"gather {name}", group.name))
        elif kind == "reduce" and (due or not line.endswith(", if due")):
            stage = re.search(r", stage (\d+)", rest[-1])
            number = int(stage[1]) if stage else 1
            what = f"reduce {name}{f', stage {number}' if number > 1 else ''}"
            found.append((what, topology.stages[number - 1].group.name))
    return found


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
    if outer_strategy is ShardingStrategy.OPTIM and strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS:
        raise ValueError(
            f"outer_dp_sharding_strategy='optim' needs zero_dp_strategy='optim_grads_params', got "
            f"{strategy.name.lower()!r}: outer ranks can only divide what inner ranks have divided."
        )
    if (outer_dim is None) != (hybrid_group is None):
        raise ValueError(
            f"dp_outer_dim and {called.hybrid_group} belong together: the name of the outer mesh dimension and the process "
            "group of all ranks of the outer and the inner one, for instance "
            f"{called.mesh}['outer', 'inner']._flatten().get_group()."
        )
    if mesh is None:
        if outer_dim is not None:
            raise ValueError("dp_outer_dim needs a device_mesh that has this dimension.")
        device_type = compat.device_type(preferred=device_type)
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(shard_dim or "fsdp",))
    elif shard_dim is None and (mesh.ndim > 1 or outer_dim is not None):
        raise ValueError(
            f"{called.mesh} has {mesh.ndim} dimensions, {mesh.mesh_dim_names}: name the one to shard over with "
            "dp_shard_dim."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"Rank {dist.get_rank()} calls fully_shard_model with a device mesh that it is not in: {mesh.mesh.tolist()}. "
            "Give each rank the mesh of the ranks that share its model."
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
        both = _sliced(mesh, (outer_dim, shard_dim))
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"dp_outer_dim={outer_dim!r} and dp_shard_dim={shard_dim!r} are dimensions of {called.mesh}, which has "
            f"{mesh.mesh_dim_names}, but no two that make a mesh: they must have no rank but this one in common, and the outer "
            f"one must come first. Make it with init_device_mesh(device, (m, n), mesh_dim_names=({outer_dim!r}, "
            f"{shard_dim!r})). ({error})"
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
            f"{called} has the ranks {mesh.mesh.tolist()} in its dimensions {mesh.mesh_dim_names}, which are in another order along "
            f"{name!r} in one place than in another: process groups order ranks by number, so that those which should hold the "
            f"same piece of a parameter would not. Let them increase along {name!r} everywhere, as init_device_mesh does."
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
            f"tp_dim and {'dp_shard_dim' if tp_dim == data_parallel[0] else 'dp_outer_dim'} are both {tp_dim!r}: the ranks of "
            "a dimension share either parameters or data."
        )
    tensor_parallel = _dimension(mesh, tp_dim, "tp_dim", DENSE_ARGUMENTS)
    ranks = dist.get_process_group_ranks(tensor_parallel.get_group())
    for argument, name in zip(("dp_shard_dim", "dp_outer_dim"), data_parallel, strict=False):
        if name is None:
            continue
        others = dist.get_process_group_ranks(_dimension(mesh, name, argument, DENSE_ARGUMENTS).get_group())
        if len(both := sorted({*ranks} & {*others})) > 1:
            raise ValueError(
                f"tp_dim={tp_dim!r} has the ranks {ranks}, and {argument}={name!r} the ranks {others}: {both} cannot share "
                f"both parameters and data. Flatten into {name!r} only dimensions of ranks with other data."
            )
    return tensor_parallel


def _check_kinds(
    mesh: object, dimensions: Mapping[str, object], hybrid_group: object, gathers: object, called: Arguments
) -> None:
    """Raise TypeError if a mesh, a dimension's name or a process group has the wrong type."""
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{called.mesh} takes a torch.distributed.device_mesh.DeviceMesh, got a {type(mesh).__name__}. "
            "DeviceMesh.from_group(group, device_type, mesh_dim_names=('dp',)) makes one of a process group."
        )
    for argument, name in dimensions.items():
        if name is not None:
            _check_name(name, argument, called)
    for argument, group in ((called.hybrid_group, hybrid_group), (called.gathers, gathers)):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"{argument} is a process group that rank {dist.get_rank()} is not in: torch.distributed.new_group gave it to "
                "ranks that it was not made of. Give each rank the group that it is in."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{argument} takes a torch.distributed.ProcessGroup, got a {type(group).__name__}. The group of a mesh dimension "
                "is mesh['name'].get_group()."
            )


def _check_name(name: object, argument: str, called: Arguments) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"{argument} takes the name of one dimension of {called.mesh}, got {name!r}. To name several, flatten them into one "
            f"first: mesh['dp', 'cp']._flatten('dp_cp'), and {argument}='dp_cp'."
        )


def _dimension(mesh: DeviceMesh, name: str, argument: str, called: Arguments) -> DeviceMesh:
    try:
        return _sliced(mesh, name)
    except (KeyError, RuntimeError, ValueError) as error:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"{argument}={name!r} is not a dimension of {called.mesh}, whose dimensions have no names. Give it some: "
                f"init_device_mesh(device, {tuple(mesh.shape)}, mesh_dim_names=(..., {name!r}, ...))."
            ) from error
        raise ValueError(
            f"{argument}={name!r} is not a dimension of {called.mesh}, which has {mesh.mesh_dim_names}. Flattened "
            f"dimensions are those of the whole mesh: mesh['dp', 'cp']._flatten({name!r}) makes one. ({error})"
        ) from error


def _sliced(mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
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
                f"The device mesh has a dimension {name!r} of {mesh.size((mesh.mesh_dim_names or ()).index(name))} ranks that "
                "parameters are neither sharded over nor replicated over: gradients would not be reduced over it, and its "
                f"ranks would part. Flatten it together with the others (mesh[..., {name!r}]._flatten('dp_{name}'), "
                f"dp_shard_dim='dp_{name}'), name it as dp_outer_dim, or, if its ranks hold different models, pass the "
                "sub-mesh of the other dimensions."
            )
