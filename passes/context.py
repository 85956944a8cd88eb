"""What passes know, and what they say: plain data."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import fx

from mfsdp_compile.runtime.exchange import Exchange, Overlap
from mfsdp_compile.runtime.layout import BucketLayout

from .decisions import Decisions

__all__ = [
    "BucketInfo",
    "Context",
    "NodeKind",
    "Phase",
    "Report",
    "Role",
    "SchedulePolicy",
    "phase_of",
    "role_of",
    "set_phase",
    "set_role",
]


@dataclass(frozen=True)
class SchedulePolicy:
    """The numbers that steer the schedule of a compiled graph.

    Where something is left to the solver (:attr:`is_solved`) it decides about gathers and reductions by time and memory alone:
    ``prefetch_bytes``, ``reductions_in_flight`` and ``reduction_bytes`` are for schedules that are made by number.

    Args:
        memory_budget: bytes that a training step may have in memory at a time on this rank, parameters, gradients and
            optimizer state among them; None: no bound. With a budget, ``prefetch`` and ``reshard_after_forward`` are
            ``"auto"`` unless they are given.
        prefetch: a unit's gather starts this many units before its first use; 0: right at its use; ``"auto"``: as early as
            is needed to hide it, within the budget.
        prefetch_bytes: a unit larger than this, gathered, is not prefetched by a number: two of them might not fit.
        reshard_after_forward: True: the backward gathers again, but for the unit that forward used last, where
            ``keep_last`` says so. False: what forward has gathered stays for the backward. ``"auto"``: those stay for which
            there is room, if that saves time. A number: as for True, but each rank keeps one of so many portions of what
            forward has gathered, and the backward gathers over so many neighbours only, ranks of a node say. It divides
            the ranks that parameters are sharded over; 1 means False, and all of them True, as for FSDP2.
        reductions_in_flight: reductions of this many units may be under way: one is awaited when that of the unit which is so
            many further on has started, or before the graph ends.
        reduction_bytes: ... or when it and those that have started since are together larger than this.
        keep_last: a graph that holds the whole model keeps the bucket that forward uses last for the backward, which
            needs it first.
        budget_reserve: the part of the budget that is left free for what a prediction does not see: workspaces of kernels,
            rounding of allocators.
    """

    memory_budget: int | None = None
    prefetch: int | Literal["auto"] = 1
    prefetch_bytes: int = 4 << 30
    reshard_after_forward: bool | int | Literal["auto"] = True
    reductions_in_flight: int = 1
    reduction_bytes: int = 8 << 30
    keep_last: bool = True
    budget_reserve: float = 0.01

    def __post_init__(self) -> None:
        for name in ("prefetch", "prefetch_bytes", "reductions_in_flight", "reduction_bytes"):
            value = getattr(self, name)
            if name == "prefetch" and value == "auto":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                also = " or 'auto'" if name == "prefetch" else ""
                raise TypeError(f"{name} takes a whole number{also}, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} cannot be negative, got {value}")
        if not isinstance(self.reshard_after_forward, int) and self.reshard_after_forward != "auto":
            raise TypeError(
                f"reshard_after_forward takes True, False, 'auto' or a number of ranks, got {self.reshard_after_forward!r}"
            )
        if not isinstance(self.reshard_after_forward, (bool, str)) and self.reshard_after_forward < 2:
            if self.reshard_after_forward < 1:
                raise ValueError(f"reshard_after_forward takes at least 1 rank, got {self.reshard_after_forward}")
            warnings.warn(
                "reshard_after_forward=1 keeps whole what forward has gathered, and means False. Say True to gather it again "
                "in backward.",
                stacklevel=4,
            )
            object.__setattr__(self, "reshard_after_forward", False)
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(f"memory_budget must be above 0, got {self.memory_budget}")
        if not 0 <= self.budget_reserve < 1:
            raise ValueError(f"budget_reserve is a fraction below 1, got {self.budget_reserve}")

    @property
    def portions(self) -> int:
        """Ranks that backwards gather over, each with its portion; 0: those that forwards gather over, or none."""
        again = self.reshard_after_forward
        return 0 if isinstance(again, (bool, str)) else again

    @property
    def is_solved(self) -> bool:
        """Whether something is left to the solver."""
        return "auto" in (self.prefetch, self.reshard_after_forward) or self.memory_budget is not None


@dataclass(frozen=True)
class BucketInfo:
    """A bucket of the graph at hand.

    Args:
        name: of the bucket in the model that the graph was compiled for; other instances may run the graph too.
        unit: name of its unit there.
        layout: its layout.
        exchange: what ``mfsdp::gather`` takes after its tensors.
        gathered_bytes: of the gathered bucket.
        trainable: whether it has gradients.
        has_resident: whether something of it stays gathered between uses; the graph gets that besides the shard.
        has_token: whether its reduction may have to wait; the graph gets what stands for the waiting sum.
        main_dtype: of the shard.
        gather_stride, reduce_strides: distance between neighbours in the groups that it is gathered and reduced over, in
            ranks of the job: how far data travels.
        resident_bytes: of what stays gathered between uses; 0 for none.
        resident_size, resident_stride: of the group that it is gathered over, once per optimizer step.
        portion_size, portion_group: ranks that may gather it again in backward, each with its portion, and their process
            group: a part of those that forward gathers over, and neighbours among them; 0 and "" for none.
        lets_go: whether it is let go of at the end of each step, and has memory of its own.
        grad_dtype: of the sum of gradients over microbatches.
    """

    name: str
    unit: str
    layout: BucketLayout
    exchange: Exchange
    gathered_bytes: int
    trainable: bool
    has_resident: bool = False
    has_token: bool = False
    main_dtype: torch.dtype = torch.float32
    gather_stride: int = 1
    reduce_strides: tuple[int, ...] = (1, 1)
    resident_bytes: int = 0
    resident_size: int = 1
    resident_stride: int = 1
    portion_size: int = 0
    portion_group: str = ""
    lets_go: bool = False
    grad_dtype: torch.dtype = torch.float32

    @property
    def signature(self) -> str:
        """What the passes' decisions depend on; no names, which differ between instances that share a graph."""
        return (
            f"{self.layout.signature}:{self.exchange[4:]}:{self.gathered_bytes}:{self.trainable}:"
            f"{self.has_resident}:{self.has_token}:{self.main_dtype}:{self.gather_stride}:{self.reduce_strides}:"
            f"{self.resident_bytes}:{self.resident_size}:{self.resident_stride}:{self.portion_size}:{self.portion_group}:"
            f"{self.lets_go}"
        )

    @property
    def portion_bytes(self) -> int:
        """Of what stays of the gathered bucket on a rank, where portions do."""
        return self.gathered_bytes // self.portion_size


@dataclass(frozen=True)
class Context:
    """What the passes over one graph, and the graphs that come from it, have in common.

    Args:
        buckets: that the graph uses, in order of their first use in Dynamo's graph. Roles refer to them by index.
        policy: of the schedule.
        whole_model: whether the graph holds all of a model's buckets, so that its backward follows its forward.
        float32_gradients: whether matmuls are to write gradients in float32 where they can.
        overlap: Kinds of collectives that may overlap with computation.
        other_bytes: that the model holds besides its buckets: buffers.
        decisions: What is decided about the schedule so far.
    """

    buckets: tuple[BucketInfo, ...]
    policy: SchedulePolicy
    whole_model: bool
    float32_gradients: bool = False
    overlap: Overlap = field(default_factory=Overlap)
    other_bytes: int = 0
    decisions: Decisions = field(default_factory=Decisions)

    @property
    def signature(self) -> str:
        units = [b.unit for b in self.buckets]
        neighbours = [units.index(unit) for unit in units]  # which buckets share a unit, without the names
        return (
            f"{[b.signature for b in self.buckets]}:{neighbours}:{self.policy}:{self.whole_model}:"
            f"{self.float32_gradients}:{self.overlap}:{self.other_bytes if self.policy.is_solved else 0}"
        )


class Phase(Enum):
    """Which graph a pass is looking at."""

    JOINT = "joint"
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class NodeKind(Enum):
    """What a node is to its bucket."""

    SHELL = "shell"  # placeholder of a full-shape parameter, in Dynamo's graph
    SHARD = "shard"  # placeholder of this rank's shard, or of its resident
    TOKEN = "token"  # placeholder of what stands for the waiting sum of gradients
    CAST = "cast"  # what is gathered: the shard in the compute dtype, the awaited resident
    START_GATHER = "start gather"
    GATHERED = "gathered"  # the whole bucket: an awaited gather, an awaited resident, a cast of a whole shard
    VIEW = "view"  # of the gathered bucket
    PORTION = "portion"  # of the gathered bucket, copied in forward, a placeholder in backward, which is gathered
    PACK = "pack"  # the bucket of gradients
    START_REDUCE = "start reduce"  # of a stage
    REDUCED = "reduced"  # an awaited stage; the last one is the shard's gradient


@dataclass(frozen=True)
class Role:
    """What a node has to do with a bucket; in ``node.meta["mfsdp"]``."""

    kind: NodeKind
    bucket: int
    index: int | None = None  # of the parameter, for shells


def role_of(node: fx.Node) -> Role | None:
    return node.meta.get("mfsdp")


def set_role(node: fx.Node, role: Role) -> None:
    node.meta["mfsdp"] = role


def phase_of(graph: fx.Graph) -> Phase:
    """The phase that the partition gave a graph; a graph that no partition made is for inference."""
    return graph.output_node().meta.get("mfsdp_phase", Phase.INFERENCE)


def set_phase(graph: fx.Graph, phase: Phase) -> None:
    graph.output_node().meta["mfsdp_phase"] = phase


@dataclass(frozen=True)
class Report:
    """What a pass did.

    Args:
        name: of the pass.
        lines: for people, one decision each.
        seconds: that it took.
        changes: to the schedule, as :mod:`.changes` tells them; who runs the pass finds these.
    """

    name: str
    lines: Sequence[str]
    seconds: float = 0.0
    changes: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join([self.name, *(f"    {line}" for line in self.lines)])
