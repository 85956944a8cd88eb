"""What is decided about a bucket before any memory is touched, as plain data."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import nn

from ..formats import forms, quantize
from ..formats.extension import FORM
from ..lanes.lane import Lane, Plugin, is_own, lane_at
from ..lanes.rest import ON_DEVICE, Rest
from ..lanes.strategies import lane_of
from ..owner import ModuleRef, refuse_dropped
from .exchange import NO_BUFFERS, Buffers, Exchange
from .layout import BucketLayout
from .topology import Topology


@dataclass(frozen=True)
class ParamLocation:
    """One place where a module holds a parameter: ``module.<attribute>``. A tied parameter has several.

    Args:
        holder: The module, which the location does not keep alive.
        module_name: Name of the module.
        attribute: Name of the parameter there.
    """

    holder: ModuleRef
    module_name: str
    attribute: str

    @property
    def module(self) -> nn.Module:
        """The module, while a model is planned."""
        module = self.holder()
        return refuse_dropped() if module is None else module

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute


@dataclass(frozen=True)
class BucketPlan:
    """Decisions about a bucket, made before any memory is touched; plain data, equal on all ranks.

    Args:
        name: Name of the bucket, unique in the model: the unit's name, with a number if the unit has several buckets.
        unit: Name of the unit.
        layout: Layout, whose slot names are fully qualified parameter names.
        model_dtype: Dtype of the parameters when the model was sharded. If it is complex, the bucket has real dtypes
            and holds pairs of real numbers.
        compute_dtype: Dtype of the gathered parameters.
        main_dtype: Dtype of the shard, its gradients and the optimizer's state.
        requires_grad: Whether any of its parameters is trainable. When the model is sharded, either all of them are or
            none is.
        grad_dtype: Dtype in which gradients are accumulated over microbatches.
        comm_dtype: Dtype in which gradients are reduced.
        plugins: What changes its lane, in order.
        reduce_op: Reduction over data-parallel ranks, ``"avg"`` or ``"sum"``.
        scale: Factor applied to reduced gradients.
        decoupled: Whether gradients go to ``parameter.decoupled_grad``.
        inspected: Whether gradients are inspected before they are reduced.
        is_expert: Whether its parameters are experts, which live on other ranks than the rest; see :mod:`.experts`.
        scaling: One of ``quantize.SCALINGS`` if the bucket is gathered in float8 or float4; see
            :mod:`..formats.quantize`. "": it is not.
        form: Form in which modules get what is gathered in float8; see :mod:`..formats.forms`. Or that of a parameter
            that gathers itself; see :mod:`.extension`.
        gather_buffers, gradient_buffers: Communication buffers of the bucket; see :mod:`.comm_buffers`.
        reshard_after_forward: What happens between forward and backward to a bucket that is gathered at each use. True:
            it is released, and gathered again. False: it stays gathered. A number: this rank keeps one of that many
            portions, and backward gathers these. None: True, except for the bucket that forward uses last, if backward
            needs it first.
        keeps_memory: Whether gradients, deferred sums and residents keep their addresses from step to step, as CUDA
            graphs need, instead of being freed when they are not needed.
        policy: Position of its mixed-precision policy among the model's.
        rest: Where the shard, its gradients and the optimizer's state are.
    """

    name: str
    unit: str
    layout: BucketLayout
    model_dtype: torch.dtype
    compute_dtype: torch.dtype
    main_dtype: torch.dtype
    requires_grad: bool
    grad_dtype: torch.dtype
    comm_dtype: torch.dtype
    plugins: tuple[Plugin, ...] = ()
    reduce_op: str = "avg"
    scale: float = 1.0
    decoupled: bool = False
    inspected: bool = False
    is_expert: bool = False
    scaling: str = ""
    form: str = quantize.DEQUANTIZED
    gather_buffers: Buffers = NO_BUFFERS
    gradient_buffers: Buffers = NO_BUFFERS
    keeps_memory: bool = False
    reshard_after_forward: bool | int | None = None
    policy: int = 0
    rest: Rest = ON_DEVICE

    @functools.cached_property
    def portions(self) -> int:
        """Number of ranks over which backward gathers portions; 0: it gathers shards, if anything."""
        reshard = self.reshard_after_forward
        return reshard if reshard is not None and not isinstance(reshard, bool) else 0

    @functools.cached_property
    def is_complex(self) -> bool:
        """Whether its parameters are complex."""
        return self.model_dtype.is_complex

    @functools.cached_property
    def grad_attribute(self) -> str:
        """The attribute of parameters that holds their gradients."""
        return "decoupled_grad" if self.decoupled else "grad"

    @property
    def is_changed_by_user(self) -> bool:
        """Whether a plug-in that is not part of the package changes its lane."""
        return not all(map(is_own, self.plugins))

    @property
    def travels_plainly(self) -> bool:
        """Whether it is gathered by the stages of its lane, and in one way."""
        return not (self.is_extension or self.has_planes)

    @property
    def uses_shard(self) -> bool:
        """Whether a rank that gathers from itself alone uses the shard's own memory."""
        return self.travels_plainly and not self.scaling and self.rest == ON_DEVICE

    def lane(self, topology: Topology) -> Lane:
        """Return the lane of the bucket over the ranks of ``topology``. It exists as long as the plan does."""
        lane = lane_of(self, topology)
        return self._lanes.setdefault(lane.key, lane_at(lane.key))

    @functools.cached_property
    def _lanes(self) -> dict[str, Lane]:
        return {}

    def exchange(self, topology: Topology) -> Exchange:
        """How the bucket is gathered and its gradients are reduced over the ranks of ``topology``."""
        slots = self.layout.slots
        return Exchange(
            sizes=[size for slot in slots for size in slot.shape],
            ndims=[len(slot.shape) for slot in slots],
            offsets=[slot.offset for slot in slots],
            lane_key=self.lane(topology).key,
            scaling=self.scaling if self.stays_quantized else "",
            form=self.form,
        ).with_buffers(self.gather_buffers, self.gradient_buffers)

    @functools.cached_property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered bucket in memory."""
        return self.held_numel * self.held_dtype.itemsize

    @functools.cached_property
    def is_extension(self) -> bool:
        """Whether its only parameter gathers itself; see :mod:`.extension`."""
        return self.form == FORM

    @functools.cached_property
    def has_planes(self) -> bool:
        """Whether modules get one plane of the bucket in forward and another in backward."""
        return not self.is_extension and forms.FORMS[self.form].planes

    @functools.cached_property
    def held_numel(self) -> int:
        """Elements of the gathered bucket in memory: of one plane, its data and its scales, if there are planes."""
        return self.sent_numel if self.has_planes else self.layout.numel

    @functools.cached_property
    def stays_quantized(self) -> bool:
        """Whether modules get the gathered bytes themselves."""
        return bool(self.scaling) and self.form not in quantize.DEQUANTIZING

    @functools.cached_property
    def held_dtype(self) -> torch.dtype:
        """Dtype of the gathered bucket in memory, also of one that stays gathered between uses."""
        return quantize.SENT_DTYPE if self.stays_quantized else self.compute_dtype

    @functools.cached_property
    def given_dtype(self) -> torch.dtype:
        """Dtype of the parameters that modules get, if they are ordinary tensors."""
        return self.compute_dtype.to_complex() if self.is_complex else self.compute_dtype

    @functools.cached_property
    def sent_dtype(self) -> torch.dtype:
        """Dtype in which the bucket is gathered."""
        return quantize.SENT_DTYPE if self.scaling else self.compute_dtype

    @functools.cached_property
    def sent_numel(self) -> int:
        """Elements in which the bucket is gathered."""
        return quantize.sent_numel(self.layout.numel, self.scaling)

    @property
    def shard_bytes(self) -> int:
        return self.layout.shard_numel * self.main_dtype.itemsize
