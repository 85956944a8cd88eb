"""The ranks that hold one model, and how its parameters are divided over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import compat
from ..digests import value_digest
from ..geometry.exchange import Overlap
from ..geometry.partition import Partition, local_part, model_ranks
from ..geometry.topology import Accumulation, Group, Topology
from ..plan import communicators
from ..plan.communicators import Communication
from ..plan.experts import ExpertPlacement
from ..plan.model_plan import ModelPlan
from ..ranks import compared
from ..ranks.agreement import agree


@dataclass
class Membership:
    """The ranks that hold one model, and how its parameters are divided over them.

    Args:
        topology: The data-parallel ranks, and what is sharded over them.
        group: Process group of the data-parallel ranks.
        experts: Which parameters are experts, and which ranks hold them. None: all data-parallel ranks hold the same
            parameters.
        partitions: For each parameter, by name, how it is divided over other ranks than those of its topology. None:
            not divided.
        expert_names: Names of the experts' parameters on this rank.

    Attributes:
        everyone: Process group of all ranks that hold a part of the model: those of ``group``, and ranks of other mesh
            dimensions that divide parameters.
    """

    topology: Topology
    group: dist.ProcessGroup
    experts: ExpertPlacement | None
    partitions: Mapping[str, Partition | None]
    expert_names: frozenset[str]
    everyone: dist.ProcessGroup = field(init=False)

    @classmethod
    def of(cls, plan: ModelPlan, topology: Topology, group: dist.ProcessGroup, check_values: bool) -> Membership:
        """Find out which ranks hold the parameters of a planned model. A collective over ``group``.

        Args:
            check_values: Whether to compare values of parameters that ranks of other mesh dimensions replicate.

        Raises:
            RuntimeError: Ranks of other mesh dimensions hold different models.
        """
        found = cls(topology, group, plan.experts, dict(plan.partitions), plan.expert_names)
        if not found.folds_experts:
            found._complete_experts(plan.module, group)
        found._agree_on_replicas(plan.module, check_values)
        found._make_everyone()
        if found.folds_experts:
            found._complete_experts(plan.module, found.everyone)
        return found

    @property
    def folds_experts(self) -> bool:
        """Whether tensor-parallel ranks of the other parameters divide experts, or share them as data-parallel ranks
        do."""
        return self.experts is not None and self.experts.over_tensor_parallel

    @property
    def agreeing(self) -> dist.ProcessGroup:
        """Process group of the ranks that must do the same things in the same order.

        Tensor-parallel ranks with the same experts as ours may hold other parts of everything else. What they would
        reduce or gather in another order could be matched with ours, so they count.
        """
        return self.everyone if self.folds_experts else self.group

    @property
    def topologies(self) -> list[Topology]:
        """Topologies of all buckets: :attr:`topology`, and that of experts if they have their own."""
        return [self.topology] if self.experts is None else [self.topology, self.experts.topology]

    @property
    def group_names(self) -> list[str]:
        """Names of the process groups of all topologies."""
        return [name for topology in self.topologies for name in topology.group_names]

    @property
    def divided(self) -> tuple[Partition, ...]:
        """The partitions of all divided parameters."""
        return tuple(partition for partition in self.partitions.values() if partition is not None)

    @property
    def partition_groups(self) -> tuple[Group, ...]:
        """Groups of ranks that hold other parts of divided parameters, each once."""
        return tuple({group.name: group for partition in self.divided for group in partition.groups}.values())

    def make_communicators(self, communication: Communication, overlap: Overlap) -> None:
        """Create the communicators that settings ask for. Every rank must call this; see :mod:`.plan.communicators`."""
        self.topology = communicators.make(self.topology, communication, overlap)
        if self.experts is not None:
            topology = communicators.make(self.experts.topology, communication, overlap)
            self.experts = replace(self.experts, topology=topology)

    def set_accumulation(self, accumulation: Accumulation) -> None:
        """Change what is kept between microbatches.

        Raises:
            ValueError: The strategy does not support it. Nothing has changed.
        """
        topology = self.topology.accumulating(accumulation)
        if self.experts is not None:
            self.experts = replace(self.experts, topology=self.experts.topology.accumulating(accumulation))
        self.topology = topology

    def renew(self) -> None:
        """Create new process groups of the same ranks. Every rank must call this; see :meth:`.Topology.renew`."""
        self.group = self.topology.renew()
        if self.experts is not None:
            self.experts.topology.renew()
        self._make_everyone()
        for mesh in self._partition_meshes:
            compat.renew_mesh(mesh)
        for partition in self.divided:
            partition.forget_groups()

    def _complete_experts(self, module: nn.Module, dividing: dist.ProcessGroup) -> None:
        """Find out what experts that are ordinary tensors are parts of. A collective over ``dividing``."""
        if self.experts is None:
            return
        bare = [name for name in self.expert_names if self.partitions[name] is None]
        self.experts = experts = self.experts.known_to_all(sorted(self.expert_names), dividing, bool(bare))
        self.partitions = {
            **self.partitions,
            **{name: experts.partition(module.get_parameter(name)) for name in bare},
        }

    def agree_on_experts(self, lines: Sequence[str]) -> None:
        """Raise on every rank unless ranks with the same experts pass the same lines, and so do all others.

        Only for experts that tensor-parallel ranks divide: data-parallel ranks have compared them already.
        """
        if not self.folds_experts:
            return
        assert self.experts is not None
        holders = compat.process_group(self.experts.topology.every.name)
        agree(holders, "fully_shard_model, experts", lambda: lines, heeds_refusals=True)
        agree(self.everyone, "fully_shard_model, experts of other ranks", list, heeds_refusals=True)

    @property
    def _partition_meshes(self) -> list[DeviceMesh]:
        # By identity: meshes of the same ranks are equal, but may be different dimensions.
        return list({id(partition.mesh): partition.mesh for partition in self.divided}.values())

    @property
    def _tensor_parallel(self) -> list[Partition]:
        """Partitions of parameters that are not experts."""
        return [p for name, p in self.partitions.items() if p is not None and name not in self.expert_names]

    def _make_everyone(self) -> None:
        self.everyone = self.group
        if self._tensor_parallel:
            self.everyone = compat.new_group_like(
                self.group.group_name, model_ranks(self.topology.mesh, self._tensor_parallel)
            )

    def _agree_on_replicas(self, module: nn.Module, check_values: bool) -> None:
        """Raise unless parameters that are replicated over other mesh dimensions than ours are equal there.

        This includes experts, which tensor-parallel ranks do not divide. If some ranks of a mesh raise, all do.
        """
        undivided = {id(None), id(self.experts.parallel if self.experts is not None else None)}
        tensor_parallel = {id(partition.mesh) for partition in self._tensor_parallel}
        params = dict(module.named_parameters())
        asked: list[dist.ProcessGroup] = []
        for mesh in self._partition_meshes:
            for dim in range(mesh.ndim):
                lines = []
                for name, partition in self.partitions.items():
                    if partition is not None and partition.mesh is mesh:
                        alike = partition.placements[dim].is_replicate()
                    else:
                        over = partition.mesh if partition is not None else None
                        is_whole = name in self.expert_names and id(over) in undivided and not self.folds_experts
                        alike = is_whole and id(mesh) in tensor_parallel
                    if alike:
                        shape = tuple(local_part(params[name]).shape)
                        lines.append(f"parameter {name}: {shape}, {params[name].dtype}")
                        if check_values and not params[name].is_meta:
                            lines.append(compared.line(f"values of {name}", value_digest(local_part(params[name]))))
                dimension = (mesh.mesh_dim_names or ("",))[dim]
                topic = f"fully_shard_model, parameters that are replicated over the mesh dimension {dimension!r}"
                agree(mesh.get_group(dim), topic, lambda lines=lines: lines, heeds_refusals=True)  # type: ignore[misc]
                asked.append(mesh.get_group(dim))
        # Ranks of a group that differs know it. The groups next to it, along the other dimensions, are told here.
        for group in [self.group, *asked[:-1]] if asked else []:
            agree(group, "fully_shard_model, ranks of other mesh dimensions", list, heeds_refusals=True)
