"""Inputs and reports of passes, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import fx

from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.geometry.exchange import Exchange, Overlap
from mfsdp_compile.runtime.geometry.layout import BucketLayout
from mfsdp_compile.runtime.program_lines import warn

from .decisions import Decisions
from .phase import Phase

__all__ = [
    "BucketInfo",
    "Context",
    "NodeKind",
    "Report",
    "Role",
    "SchedulePolicy",
    "phase_of",
    "region_of",
    "role_of",
    "set_phase",
    "set_role",
]


@dataclass(frozen=True)
class SchedulePolicy:
    """The numbers that steer the schedule of a compiled graph.

    If anything is left to the solver (:attr:`is_solved`), the solver schedules gathers and reductions by time and
    memory alone. ``prefetch_bytes``, ``reductions_in_flight`` and ``reduction_bytes`` apply only when the solver is
    off.

    Args:
        memory_budget: Peak bytes that a training step may use on this rank, including parameters, gradients and
            optimizer state; None: no bound. With a budget, ``prefetch`` and ``reshard_after_forward`` default to
            ``"auto"``.
        prefetch: Number of units before its first use at which a unit's gather starts; 0: right at its use; ``"auto"``:
            as early as needed to hide it, within the budget.
        prefetch_bytes: Largest unit, in gathered bytes, that is prefetched when ``prefetch`` is a number. Two larger
            units might not fit in memory.
        reshard_after_forward: True: the backward gathers every unit again, except the unit that forward used last if
            ``keep_last`` is set, and units for which the model says otherwise. False: gathered parameters stay for the backward. ``"auto"``: those parameters stay
            that fit in memory, if that saves time. A number n: as True, but each rank keeps one of n portions of each
            gathered bucket, and the backward gathers over n neighboring ranks only, for example those of a node. It
            must divide the number of ranks that parameters are sharded over. 1 means False and that number of ranks
            means True, as in FSDP2.
        reductions_in_flight: Number of units whose reductions may be in flight. A reduction is awaited when the
            reduction of the unit this many units later has started, or before the graph ends.
        reduction_bytes: Largest total bytes of reductions in flight. A reduction is awaited earlier if it and the
            reductions started since exceed this.
        keep_last: Whether a graph that holds the whole model keeps the bucket that forward uses last for the backward,
            which needs it first.
        activation_offload: Which values saved for backward wait for it in host memory. False: none. True: all that are
            worth a copy. ``"auto"``: the largest of each unit, as far as the link can copy them while the next unit
            computes. A number: the first ones, up to about that many bytes. See :mod:`.activations`.
        activation_offload_least: Values of fewer bytes stay on the device.
        budget_reserve: Fraction of the budget left free for memory that a prediction does not see: kernel workspaces
            and allocator rounding.
    """

    memory_budget: int | None = None
    prefetch: int | Literal["auto"] = 1
    prefetch_bytes: int = 4 << 30
    reshard_after_forward: bool | int | Literal["auto"] = True
    reductions_in_flight: int = 1
    reduction_bytes: int = 8 << 30
    keep_last: bool = True
    budget_reserve: float = 0.01
    activation_offload: bool | int | Literal["auto"] = False
    activation_offload_least: int = 1 << 20

    def __post_init__(self) -> None:
        for name in (
            "prefetch",
            "prefetch_bytes",
            "reductions_in_flight",
            "reduction_bytes",
            "activation_offload_least",
        ):
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
            warn(
                "reshard_after_forward=1 keeps what forward has gathered, which is the same as False. Say True to "
                "gather it again in backward.",
            )
            object.__setattr__(self, "reshard_after_forward", False)
        if not isinstance(self.activation_offload, int) and self.activation_offload != "auto":
            raise TypeError(
                f"activation_offload takes True, False, 'auto' or a number of bytes, got {self.activation_offload!r}"
            )
        if self.activation_offload != "auto" and self.activation_offload < 0:
            raise ValueError(f"activation_offload cannot be negative, got {self.activation_offload}")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(f"memory_budget must be above 0, got {self.memory_budget}")
        if not isinstance(self.keep_last, bool):
            raise TypeError(f"keep_last takes True or False, got {self.keep_last!r}")
        if not isinstance(self.budget_reserve, (int, float)) or not 0 <= self.budget_reserve < 1:
            raise ValueError(f"budget_reserve is a fraction below 1, got {self.budget_reserve!r}")

    @property
    def portions(self) -> int:
        """Number of ranks that each keep a portion for the backward to gather; 0: no portions are kept."""
        again = self.reshard_after_forward
        return 0 if isinstance(again, (bool, str)) else again

    @property
    def is_solved(self) -> bool:
        """Whether any decision is left to the solver."""
        return "auto" in (self.prefetch, self.reshard_after_forward) or self.memory_budget is not None


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
        has_token: Whether the bucket's reduction may be deferred. If so, the graph takes a token for the deferred sum.
        main_dtype: Dtype of the shard.
        gather_stride, reduce_strides: Distance between neighbors in the groups that the bucket is gathered and reduced
            over, in global ranks. It tells how far data travels.
        resident_bytes: Bytes that stay gathered between uses; 0 for none.
        resident_size, resident_stride: Size and stride of the group that the resident is gathered over, once per
            optimizer step.
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
    has_token: bool = False
    main_dtype: torch.dtype = torch.float32
    gather_stride: int = 1
    reduce_strides: tuple[int, ...] = (1, 1)
    resident_bytes: int = 0
    resident_size: int = 1
    resident_stride: int = 1
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
            f"{self.layout.signature}:{self.exchange[4:]}:{self.gathered_bytes}:{self.trainable}:"
            f"{self.has_resident}:{self.has_token}:{self.main_dtype}:{self.gather_stride}:{self.reduce_strides}:"
            f"{self.resident_bytes}:{self.resident_size}:{self.resident_stride}:{self.portion_size}:{self.portion_group}:"
            f"{self.releases_resident}:{self.stays}"
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes of the all-gather's result."""
        return self.exchange.sent_numel * self.exchange.sent_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shard, and of its gradient."""
        return self.layout.shard_numel * self.main_dtype.itemsize

    @property
    def device_shard_bytes(self) -> int:
        """Bytes of the shard on the device: of a bucket in host memory, those of the copy that the device keeps, if any."""
        if self.exchange.keeps_copy:
            return self.layout.shard_numel * self.exchange.dtype.itemsize
        return 0 if self.exchange.offload else self.shard_bytes

    @property
    def device_gradient_bytes(self) -> int:
        """Bytes of the shard's gradient on the device: none of a bucket in host memory."""
        return 0 if self.exchange.offload else self.shard_bytes

    @property
    def is_fetched(self) -> bool:
        """Whether gathers copy the shard from host memory first."""
        return bool(self.exchange.offload) and not (self.exchange.keeps_copy or self.has_resident)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of this rank's shard in float8; 0 if the bucket is not gathered in float8."""
        exchange = self.exchange
        numel = quantize.sent_numel(self.layout.shard_numel, exchange.scaling)
        return numel * exchange.sent_dtype.itemsize if exchange.is_quantized else 0

    @property
    def fresh_bytes(self) -> int:
        """Bytes that the gathered bucket allocates: none if it stays in a communication buffer."""
        in_buffer = self.exchange.gather_buffers.capacity and not self.exchange.dequantizes
        return 0 if in_buffer else self.gathered_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that a gather in float8 allocates until they are dequantized: none in a communication buffer."""
        allocates = self.exchange.dequantizes and not self.exchange.gather_buffers.capacity
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


@dataclass(frozen=True)
class Context:
    """Data shared by the passes over one Dynamo graph and the graphs derived from it.

    Args:
        buckets: Buckets that the graph uses, in order of their first use in Dynamo's graph. Roles refer to them by
            index.
        policy: Policy of the schedule.
        whole_model: Whether the graph holds all of a model's buckets, so that its backward directly follows its
            forward.
        float32_gradients: Whether matmuls write gradients in float32 where possible.
        overlap: Kinds of collectives that may overlap with computation.
        other_bytes: Bytes that the model holds outside its buckets: buffers, and communication buffers.
        decisions: Decisions about the schedule so far.
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
        neighbors = [units.index(unit) for unit in units]  # which buckets share a unit, without the names
        return (
            f"{[b.signature for b in self.buckets]}:{neighbors}:{self.policy}:{self.whole_model}:"
            f"{self.float32_gradients}:{self.overlap}:{self.other_bytes if self.policy.is_solved else 0}"
        )


class NodeKind(Enum):
    """What a node does for its bucket."""

    SHELL = "shell"  # placeholder of a full-shape parameter, in Dynamo's graph
    SHARD = "shard"  # placeholder of this rank's shard, or of its resident
    TOKEN = "token"  # placeholder that represents the deferred sum of gradients
    QUANTIZED = "quantized shard"  # placeholder of this rank's shard in float8
    SCALES = "scales"  # placeholder of the scales of a bucket that is gathered in float8, or a view of it
    FETCH = "fetch"  # copy of the shard, from host memory to the device
    CAST = "cast"  # input of the all-gather: the shard in the compute dtype, or the awaited resident
    START_GATHER = "start gather"
    GATHERED = (
        "gathered"  # the whole bucket: an awaited (and dequantized) gather or resident, or a cast of a whole shard
    )
    VIEW = "view"  # view of the gathered bucket
    PORTION = "portion"  # portion of the gathered bucket: a copy in forward, a placeholder in backward that is gathered
    PACK = "pack"  # the bucket of gradients
    START_REDUCE = "start reduce"  # start of a stage
    OFFLOAD = "offload"  # copy of the shard's gradient, from the device to host memory
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
