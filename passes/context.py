"""Inputs and reports of passes, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import fx

from mfsdp_compile.runtime.geometry.exchange import Exchange, Overlap
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.geometry.layout import BucketLayout
from mfsdp_compile.runtime.schedule.decisions import Decisions
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

__all__ = [
    "BucketInfo",
    "Context",
    "Feature",
    "NodeKind",
    "Pass",
    "Report",
    "Role",
    "phase_of",
    "region_of",
    "role_of",
    "set_phase",
    "set_role",
]


@dataclass(frozen=True)
class BucketInfo:
    """A bucket of the current graph.

    Args:
        name: Name of the bucket in the model instance that the graph was compiled for. Other instances may run the
            graph too.
        unit: Name of the bucket's unit in that instance.
        layout: Layout of the bucket.
        exchange: Arguments of ``mfsdp::gather`` after its tensors.
        gathered_bytes: Bytes of the gathered bucket in memory.
        trainable: Whether the bucket has gradients.
        has_resident: Whether data of the bucket stays gathered between uses. If so, the graph takes this resident
            tensor in addition to the shard.
        portion_size, portion_group: Number and process group of the ranks that gather the bucket from portions in
            backward. They are neighboring ranks out of those that forward gathers over. 0 and "" for none.
        releases_resident: Whether the bucket has memory of its own, which is released at the end of each step.
        grad_dtype: Dtype of the sum of gradients over microbatches.
        stays: Whether the bucket stays gathered from forward to backward, where the policy says True; None: as the
            policy says.
    """

    name: str
    unit: str
    layout: BucketLayout
    exchange: Exchange
    gathered_bytes: int
    trainable: bool
    has_resident: bool = False
    portion_size: int = 0
    portion_group: str = ""
    releases_resident: bool = False
    grad_dtype: torch.dtype = torch.float32
    stays: bool | None = None

    @property
    def signature(self) -> str:
        """All properties that the passes' decisions depend on.

        Names are left out, because instances that share a graph have different names.
        """
        return (
            f"{self.layout.signature}:{self.exchange[3:]}:{self.gathered_bytes}:{self.trainable}:"
            f"{self.has_resident}:{self.has_token}:"
            f"{self.portion_size}:{self.portion_group}:{self.releases_resident}:{self.stays}"
        )

    @property
    def has_token(self) -> bool:
        """Whether the graph takes a token that says which bucket it is: for a sum that waits, or for stages' state."""
        return self.exchange.lane.has_token(self.trainable)

    @property
    def main_dtype(self) -> torch.dtype:
        """Dtype of the shard."""
        return self.exchange.lane.shard.dtype

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay between uses, of what is made of the shard; 0 for none."""
        lane = self.exchange.lane
        return lane.spec("use").bytes if lane.step else 0

    @property
    def resident_groups(self) -> list[Group]:
        """The groups that the resident is gathered over, once per optimizer step."""
        return [stage.group for stage in self.exchange.lane.step if stage.group is not None]

    @property
    def gather_stride(self) -> int:
        """Distance between neighbors in the group that the bucket is gathered over, in global ranks; 1 for none. It
        tells how far data travels."""
        lane = self.exchange.lane
        group = lane.use[lane.gather].group if lane.gather is not None else None
        return group.stride if group is not None else 1

    @property
    def sent_bytes(self) -> int:
        """Bytes of the all-gather's result."""
        return self.exchange.sent.bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard, and of its gradient."""
        return self.layout.shard_numel * self.main_dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of the shard's sum of gradients over microbatches; none if the bucket is not trained."""
        return self.layout.shard_numel * self.grad_dtype.itemsize if self.trainable else 0

    @property
    def device_shard_bytes(self) -> int:
        """Bytes of the shard on the device: none of a bucket in host memory."""
        return 0 if self.rests_in_host_memory else self.shard_bytes

    @property
    def device_gradient_bytes(self) -> int:
        """Bytes of the shard's gradient on the device: none of a bucket in host memory."""
        return 0 if self.rests_in_host_memory else self.shard_bytes

    @property
    def rests_in_host_memory(self) -> bool:
        return self.exchange.lane.shard.in_host_memory

    @property
    def made_bytes(self) -> int:
        """Bytes of what a joint stage makes of the shard, if it is not what stays."""
        lane = self.exchange.lane
        return lane.spec("step", 1).bytes if lane.is_joint and len(lane.step) > 1 else 0

    @property
    def decodes(self) -> bool:
        """Whether the bucket is made from what lands, in new memory."""
        lane = self.exchange.lane
        return lane.gather is not None and any(not stage.inlined for stage in lane.use[lane.gather + 1 :])

    @property
    def fresh_bytes(self) -> int:
        """Bytes that the gathered bucket allocates: none if it stays in a communication buffer."""
        in_buffer = self.exchange.gather_buffers.capacity and not self.decodes
        return 0 if in_buffer else self.gathered_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that a gather allocates until the bucket is made from them: none in a communication buffer."""
        allocates = self.decodes and not self.exchange.gather_buffers.capacity
        return self.sent_bytes if allocates else 0

    @property
    def fresh_gradient_bytes(self) -> int:
        """Bytes that packing gradients allocates: none if they are packed in a communication buffer."""
        exchange = self.exchange
        return 0 if exchange.gradient_buffers.capacity else self.layout.numel * exchange.comm_dtype.itemsize

    @property
    def portion_bytes(self) -> int:
        """Bytes of the portion that each rank keeps. Only for buckets with portions."""
        return self.gathered_bytes // self.portion_size


Pass = Callable[[fx.Graph, "Context", Phase], "Report"]
"""A function that changes a graph and reports what it did."""


class Feature:
    """A feature of the compiled path. Each member is a place in the pipeline, where it does nothing by default.

    Subclasses are frozen dataclasses. Their ``repr`` is part of compile caches' keys: it has all that graphs depend on.
    """

    runs_early: ClassVar[Mapping[Phase, tuple[Pass, ...]]] = {}
    """Passes over a graph before reductions are started and the schedule is made."""
    runs_late: ClassVar[Mapping[Phase, tuple[Pass, ...]]] = {}
    """Passes over a scheduled graph."""
    in_regions: ClassVar[bool] = False
    """Whether :attr:`runs_early` runs over the graphs of regions, too."""
    rewrites_joint: ClassVar[bool] = False
    """Whether :meth:`rewrite_joint` is called."""
    distinct: ClassVar[tuple[Any, ...]] = ()
    """Operators whose calls the partitioner must not merge, even if they are equal."""

    def rewrite(self, graph: fx.Graph, context: Context) -> tuple[Report, Context] | None:
        """Change Dynamo's graph, before it gathers anything. Return a report and the context from then on."""
        return None

    def rewrite_joint(self, joint: fx.GraphModule, context: Context) -> tuple[fx.GraphModule, Report | None]:
        """Rewrite a joint graph before the passes. Return the graph to go on with, and a report."""
        return joint, None

    def rewrite_both(self, forward: fx.Graph, backward: fx.Graph, context: Context, user_outputs: int) -> Report | None:
        """Change the forward and the backward graph of one joint graph together, after the partition.

        Args:
            user_outputs: Number of outputs of the forward graph before those that are saved for backward.
        """
        return None


@dataclass(frozen=True)
class Context:
    """Data shared by the passes over one Dynamo graph and the graphs derived from it.

    Args:
        buckets: Buckets that the graph uses, in order of their first use in Dynamo's graph. Roles refer to them by
            index.
        policy: Policy of the schedule.
        whole_model: Whether the graph holds all of a model's buckets, so that its backward directly follows its
            forward.
        features: Features that add passes, in order.
        overlap: Kinds of collectives that may overlap with computation.
        other_bytes: Bytes that the model holds outside its buckets: buffers, and communication buffers.
        delivers_early: Whether backwards deliver each gradient as soon as it has arrived; see :mod:`.deliver`.
        steps_early: Whether predictions may count on a step over each bucket there, which frees its gradient. The
            first step of a process keeps all gradients, so the backend's decisions under a memory budget do not.
        in_pieces: Whether stretches between collectives are compiled one by one; see :mod:`.stretches`.
        absent: Units of the model that the graph does not use.
        decisions: Decisions about the schedule so far.
    """

    buckets: tuple[BucketInfo, ...]
    policy: SchedulePolicy
    whole_model: bool
    features: tuple[Feature, ...] = ()
    overlap: Overlap = field(default_factory=Overlap)
    other_bytes: int = 0
    delivers_early: bool = False
    steps_early: bool = False
    in_pieces: bool = False
    absent: tuple[str, ...] = ()
    decisions: Decisions = field(default_factory=Decisions)

    @property
    def signature(self) -> str:
        units = [b.unit for b in self.buckets]
        neighbors = [units.index(unit) for unit in units]  # which buckets share a unit, without the names
        return (
            f"{[b.signature for b in self.buckets]}:{neighbors}:{self.policy}:{self.whole_model}:"
            f"{self.features}:{self.overlap}:{self.delivers_early}:"
            f"{self.other_bytes if self.policy.is_solved else 0}"
        )


class NodeKind(Enum):
    """What a node does for its bucket."""

    SHELL = "shell"  # placeholder of a full-shape parameter, in Dynamo's graph
    SHARD = "shard"  # placeholder of this rank's shard, or of its resident
    TOKEN = "token"  # placeholder that represents the deferred sum of gradients
    SCALES = "scales"  # placeholder of the scales of a bucket that is gathered in float8, or a view of it
    CAST = "cast"  # input of the all-gather: the shard in the compute dtype, or the awaited resident
    START_GATHER = "start gather"
    LANDED = "landed"  # an awaited gather, in front of local stages
    GATHERED = (
        "gathered"  # the whole bucket: an awaited (and dequantized) gather or resident, or a cast of a whole shard
    )
    VIEW = "view"  # view of the gathered bucket
    PORTION = "portion"  # portion of the gathered bucket: a copy in forward, a placeholder in backward that is gathered
    PACK = "pack"  # the bucket of gradients
    START_REDUCE = "start reduce"  # start of a stage
    REDUCED = "reduced"  # an awaited stage; the last one gives the shard's gradient


@dataclass(frozen=True)
class Role:
    """Role of a node for a bucket, stored in ``node.meta["mfsdp"]``."""

    kind: NodeKind
    bucket: int
    index: int | None = None  # index of the parameter, for shells


def role_of(node: fx.Node) -> Role | None:
    return node.meta.get("mfsdp")


def set_role(node: fx.Node, role: Role) -> None:
    node.meta["mfsdp"] = role


def phase_of(graph: fx.Graph) -> Phase:
    """Return the phase that the partitioner gave a graph. A graph that no partitioner made is an inference graph."""
    return graph.output_node().meta.get("mfsdp_phase", Phase.INFERENCE)


def set_phase(graph: fx.Graph, phase: Phase) -> None:
    graph.output_node().meta["mfsdp_phase"] = phase


def region_of(graph: fx.Graph) -> Context | None:
    """Return the context of a region's graph; None for other graphs."""
    return graph.output_node().meta.get("mfsdp_region")


@dataclass(frozen=True)
class Report:
    """What a pass did.

    Args:
        name: Name of the pass.
        lines: Human-readable lines, one decision each.
        seconds: Run time of the pass.
        changes: Changes to the schedule in the format of :mod:`.changes`. The runner of the pass fills them in.
    """

    name: str
    lines: Sequence[str]
    seconds: float = 0.0
    changes: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"    {line}" for line in self.lines)])
