"""A bucket: the parameters of one unit that shared dtype, ``requires_grad`` and group when the model was sharded, as one
flat shard per rank.

originals     weight [6, 8]                          bias [6]
              |                                      |
bucket        |<- rank 0's shard ->|<- rank 1's shard ->|      with full sharding never whole in memory, except in use
                                   |
flat          this rank's slice, a leaf that autograd knows; main dtype
params        DTensors, views of ``flat``: what ``model.parameters()`` and the optimizer hold
resident      what stays gathered between uses, in the compute dtype, for strategies that leave parameters whole, or
              HFSDP, which leaves them whole over outer ranks. ``flat`` is a part of it where dtypes agree
shells        full-shape parameters (parts, where they are divided over other ranks too) without storage: what Dynamo traces. Never handed to a user
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import compat
from .exchange import Exchange
from .layout import BucketLayout
from .partition import Partition, local_part
from .pending import Pending
from .tensor import Backing, RowShardedTensor, RowSplit, UnreducedGradient, mark_provisional
from .topology import Topology

__all__ = ["Bucket", "BucketPlan", "Home", "Site"]


@dataclass(frozen=True)
class Site:
    """A place where a module holds a parameter: ``module.<attribute>``. Tied parameters have several."""

    module: nn.Module
    module_name: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute


@dataclass(frozen=True)
class BucketPlan:
    """What is decided about a bucket before any memory is touched; plain data, equal on all ranks.

    Args:
        name: of the bucket, unique in the model: the unit's name, with a number where a unit has several buckets.
        unit: name of the unit.
        layout: whose slot names are fully qualified parameter names.
        compute_dtype: of the gathered parameters; the dtype that the model was built with.
        main_dtype: of the shard, its gradients and the optimizer's state.
        requires_grad: whether any of its parameters trains. They all do, or none does, when the model is sharded.
        grad_dtype: that gradients are summed in, over microbatches.
        comm_dtype: that gradients are reduced in.
        reduce_op: over data-parallel ranks, ``"avg"`` or ``"sum"``.
        scale: of reduced gradients.
        decoupled: gradients go to ``parameter.decoupled_grad``.
        inspected: gradients are looked at before they are reduced.
        is_expert: whether its parameters are experts, which other ranks hold than the rest; see :mod:`.experts`.
    """

    name: str
    unit: str
    layout: BucketLayout
    compute_dtype: torch.dtype
    main_dtype: torch.dtype
    requires_grad: bool
    grad_dtype: torch.dtype
    comm_dtype: torch.dtype
    reduce_op: str = "avg"
    scale: float = 1.0
    decoupled: bool = False
    inspected: bool = False
    is_expert: bool = False

    @property
    def grad_attribute(self) -> str:
        """The attribute of parameters that holds gradients."""
        return "decoupled_grad" if self.decoupled else "grad"

    def exchange(self, topology: Topology) -> Exchange:
        """How the bucket becomes whole and is reduced over these ranks."""
        return Exchange.of(
            self.layout, topology, self.compute_dtype, self.comm_dtype, self.reduce_op, self.scale, self.inspected
        )

    @property
    def gathered_bytes(self) -> int:
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.layout.shard_numel * self.main_dtype.itemsize


@dataclass(frozen=True, eq=False)
class Home:
    """Where a shell or a sharded parameter belongs: parameter ``index`` of ``bucket``."""

    bucket: Bucket
    index: int


class Place(NamedTuple):
    """The part ``[start, stop)`` of a rank's shard that holds its rows of one parameter, and their shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


class Bucket:
    """The memory of one bucket on this rank.

    Args:
        plan: layout and dtypes.
        originals: the parameters, in the order of the layout's slots. Their rows are copied, where they have values; they are
            not kept.
        sites: for each parameter, every place where a module holds it.
        topology: who holds what.
        device: of the shard.
        partitions: for each parameter, how it is divided over other ranks than those of the topology.
    """

    owner: Any
    """The sharded model; set by it."""

    def __init__(
        self,
        plan: BucketPlan,
        originals: Sequence[nn.Parameter],
        sites: Sequence[Sequence[Site]],
        topology: Topology,
        device: torch.device,
        partitions: Sequence[Partition | None],
    ) -> None:
        self.plan = plan
        self.sites = tuple(tuple(s) for s in sites)
        self.topology = topology
        layout = plan.layout
        self.splits = tuple(RowSplit(layout, index, partition) for index, partition in enumerate(partitions))
        self.places = tuple(self._place(index) for index in range(len(layout.slots)))
        flat = torch.zeros(layout.shard_numel, dtype=plan.main_dtype, device=device)
        self._copy_rows([local_part(original) for original in originals], flat)
        self._make(flat, originals)

    def _make(self, flat: Tensor, like: Sequence[nn.Parameter]) -> None:
        """Shard, parameters and shells over the values of ``flat``; Python attributes of ``like`` are kept."""
        plan = self.plan
        self.resident: Tensor | None = None
        self._unused_gather: weakref.finalize | None = None
        self._resident_of = -1  # version of the shard that the resident was gathered from
        self._resident_awaited = True
        group = self.topology.resident_group
        if group is not None and not self.topology.lets_go:
            resident = torch.empty(flat.numel() * group.size, dtype=plan.compute_dtype, device=flat.device)
            if plan.main_dtype == plan.compute_dtype:
                mine = resident[group.rank * flat.numel() : (group.rank + 1) * flat.numel()]
                # The same memory, but a version of its own: gathers write to the resident whenever they like.
                flat = mine.copy_(flat).data
            self._hold(resident)
        self.flat = flat
        views = self.views(flat)
        backing = Backing((flat,) if self.resident is None else (flat, self.resident))
        self.params = tuple(
            nn.Parameter(
                RowShardedTensor.wrap(view, split, self.topology, backing=backing), requires_grad=original.requires_grad
            )
            for view, split, original in zip(views, self.splits, like, strict=True)
        )
        for param, view in zip(self.params, views, strict=True):
            param._local_tensor = view  # making a Parameter detached it, from the version too
        self.shells = tuple(
            _shell(split.part_shape, plan.compute_dtype, flat.device, original.requires_grad)
            for split, original in zip(self.splits, like, strict=True)
        )
        for index, original in enumerate(like):
            kept = {k: v for k, v in vars(original).items() if k not in _OWN_ATTRIBUTES}
            home = Home(self, index)
            vars(self.params[index]).update(kept, mfsdp_home=home)
            vars(self.shells[index]).update(kept, mfsdp_home=home)
        self.provisional: set[int] = set()
        """Parameters, by index, whose gradients are shown until it is known whether any rank has used them."""
        self.used_now: set[int] = set()
        """Parameters, by index, that this rank has used since gradients were last settled; see :mod:`.gradients`."""
        self.clean: set[int] = set()
        """Parameters without a gradient whose slices of the flat gradient are zeros."""
        self.pending: Pending | None = None
        self.set_plan(plan)

    def set_plan(self, plan: BucketPlan, topology: Topology | None = None) -> None:
        """Take over another way of exchanging, or of accumulating; layout and dtypes of what is at rest stay.

        Args:
            topology: the same ranks and strategy.
        """
        self.plan = plan
        if topology is not None:
            self.let_go()
            self.topology = topology
        self.exchange = plan.exchange(self.topology)
        # Buckets whose signatures are equal can run each other's compiled graphs.
        self.signature = (
            f"{plan.layout.signature}:{plan.main_dtype}:{plan.requires_grad}:{self.frozen}:{not self.has_resident}:"
            f"{self.exchange[4:]}:{self.topology.accumulation.forwards_overlap}"
        )
        if not self.exchange.needs_token:
            self.pending = None
        elif plan.requires_grad and self.pending is None:  # one that was frozen since may still hold a sum
            self.pending = Pending(self, plan.grad_dtype)
        if self.pending is not None:
            self.pending.asked = None  # what a backward that has failed had noted is over

    @property
    def frozen(self) -> list[int]:
        """Parameters, by index, that do not train, where others of the bucket do."""
        return [i for i, param in enumerate(self.params) if not param.requires_grad] if self.plan.requires_grad else []

    @property
    def has_token(self) -> bool:
        """Whether graphs take what stands for the sum of gradients that wait."""
        return self.plan.requires_grad and self.exchange.needs_token

    def toggled(self, index: int) -> None:
        """A parameter has been frozen, or made trainable. Code is compiled once for each combination."""
        self.shells[index].requires_grad_(self.params[index].requires_grad)  # Dynamo guards on it
        trains = any(param.requires_grad for param in self.params)
        self.set_plan(replace(self.plan, requires_grad=trains))
        self.owner.label_modules_of(self)

    def _place(self, index: int) -> Place:
        layout = self.plan.layout
        start = layout.shard_offset(index, self.topology.shard)
        numel = len(layout.rows(index, self.topology.shard)) * layout.slots[index].row_numel
        return Place(start, start + numel, self.splits[index].local_shape(self.topology.shard))

    @torch.no_grad()
    def take_rows_of(self, parts: Sequence[Tensor]) -> None:
        """Copy this rank's rows of every parameter, or of the part of it that the bucket holds."""
        self.await_gather()
        self._copy_rows(parts, self.flat.detach())

    def _copy_rows(self, parts: Sequence[Tensor], flat: Tensor) -> None:
        for part, view, split in zip(parts, self.views(flat), self.splits, strict=True):
            rows = split.rows(self.topology.shard)
            if rows and not part.is_meta:
                view.copy_(part[rows.start : rows.stop] if split.shape else part)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat shard (or of its gradient), ``[shard_numel]``, that belong to each parameter."""
        return [flat[start:stop].view(shape) for start, stop, shape in self.places]

    def local_views(self, flat: Tensor, backing: tuple[Tensor, ...] = ()) -> list[RowShardedTensor]:
        """The same as DTensors."""
        return [
            RowShardedTensor.wrap(view, split, self.topology, backing=backing)
            for view, split in zip(self.views(flat), self.splits, strict=True)
        ]

    # -- residents ----------------------------------------------------------------------------------------------------

    @property
    def has_resident(self) -> bool:
        """Whether something stays gathered between uses, be it only for a step."""
        return self.topology.resident_group is not None

    @property
    def is_stale(self) -> bool:
        """Whether shards have changed since the resident was gathered, or it was let go of."""
        return self.has_resident and self._resident_of != self.flat._version

    def hold_resident(self) -> Tensor:
        """The resident; where it was let go of, new memory for one."""
        if self.resident is None:
            group = self.topology.resident_group
            assert group is not None
            numel = self.flat.numel() * group.size
            self._hold(torch.empty(numel, dtype=self.plan.compute_dtype, device=self.flat.device))
        assert self.resident is not None
        return self.resident

    def _hold(self, resident: Tensor) -> None:
        self.resident = resident
        self._unused_gather = weakref.finalize(self, compat.wait_tensor_when_dropped, resident)

    def let_go(self) -> None:
        """Drop a resident that stays for a step only. Its memory is free when nobody refers to it any more."""
        if self.topology.lets_go and self.resident is not None:
            self.await_resident()
            self._drop_resident()

    def _drop_resident(self) -> None:
        assert self._unused_gather is not None
        self._unused_gather.detach()  # it holds the memory
        self.resident, self._resident_of = None, -1

    @torch.no_grad()
    def start_refresh(self) -> None:
        """Start to gather the resident anew. Every rank must."""
        group = self.topology.resident_group
        assert group is not None
        resident = self.hold_resident()
        self.await_resident()
        shard = self.flat.detach().to(self.plan.compute_dtype)
        compat.all_gather_out(shard, group.size, group.name, out=resident)
        self._resident_of, self._resident_awaited = self.flat._version, False

    def await_gather(self) -> None:
        """Before the shard is written to: it may be a part of the resident, which may be gathered at the time."""
        if self.resident is not None:
            self.await_resident()

    def await_resident(self) -> Tensor:
        assert self.resident is not None
        if not self._resident_awaited:
            compat.wait_tensor(self.resident)
            self._resident_awaited = True
        return self.resident

    def forget_resident(self) -> None:
        """After a failure: its gather may have failed."""
        if self.resident is not None:
            with contextlib.suppress(RuntimeError):
                self.await_resident()
            self._resident_of, self._resident_awaited = -1, True
            if self.topology.lets_go:
                self._drop_resident()

    def source(self) -> Tensor:
        """What parameters in use are made of on this rank: the resident, or the shard; without autograd."""
        return self.await_resident() if self.has_resident else self.flat.detach()

    @torch.no_grad()
    def gather_shards(self) -> list[Tensor]:
        """Every parameter, or the part of it that the bucket holds, in the main dtype; views of one tensor of the bucket's
        size. Every rank must."""
        whole = self.flat.detach()
        self.topology.announce(f"a gather of all parameters of {self.plan.name}")
        for group in self.topology.shard_groups:
            whole = compat.wait_tensor(compat.all_gather(whole, group.size, group.name))
        if not self.topology.shard_groups:
            whole = whole.clone()
        return [whole[slot.offset : slot.end].view(slot.shape) for slot in self.plan.layout.slots]

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> list[Tensor | None]:
        """What is attached to each parameter."""
        return [getattr(param, self.plan.grad_attribute, None) for param in self.params]

    @property
    def gradient_waits(self) -> bool:
        """Whether the last gradient was kept for a later reduction."""
        return self.pending is not None and self.pending.kept

    # What Pending asks of its holder

    def reductions_are_due(self) -> bool:
        return self.owner.reductions_are_due()

    def show_unreduced(self) -> None:
        for index, (param, attached) in enumerate(zip(self.params, self.gradients, strict=True)):
            if attached is None and param.requires_grad:
                shown = UnreducedGradient.like(param)
                if index in self.provisional:
                    mark_provisional(shown)
                setattr(param, self.plan.grad_attribute, shown)

    def forget_abandoned(self, total: Tensor) -> None:
        dropped = []
        for index, attached in enumerate(self.gradients):
            if attached is None or (isinstance(attached, UnreducedGradient) and attached.zeroed):
                dropped.append(index)
                if attached is not None:
                    attached.zeroed = False
        self.zero_slices(total, dropped)

    def zero_slices(self, packed: Tensor, params: Iterable[int]) -> None:
        # All of the bucket, or this rank's inner shard of it.
        start = self.topology.inner.rank * packed.numel() if packed.numel() < self.plan.layout.numel else 0
        for slot in (self.plan.layout.slots[index] for index in params):
            packed[max(slot.offset - start, 0) : max(slot.end - start, 0)].zero_()

    def inspect(self, gradient: Tensor) -> None:
        self.owner.inspect(self, gradient)

    def check_unchanged(self) -> None:
        """Raise if somebody replaced a parameter since the model was sharded."""
        for param, sites in zip(self.params, self.sites, strict=True):
            for site in sites:
                if site.module._parameters.get(site.attribute) is not param:
                    raise RuntimeError(
                        f"Parameter {site.name!r} was replaced after fully_shard_model; the new one is not sharded and "
                        "would not be trained. Copy values into the old one instead (parameter.copy_(values) under "
                        "torch.no_grad()), use load_state_dict without assign=True, or replace it before sharding."
                    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """A bucket of its own memory. Its parameters and shells are entered in ``memo``, so that modules copied
        with the same memo hold them."""
        copy = object.__new__(Bucket)  # before its modules, which hold it again
        memo[id(self)] = copy
        vars(copy).update(vars(self))
        copy._make(self.flat.detach().clone(), self.params)
        for mine, its in zip((*self.params, *self.shells), (*copy.params, *copy.shells), strict=True):
            memo[id(mine)] = its
        for mine_param, its_param in zip(self.params, copy.params, strict=True):
            if mine_param.grad is not None:
                its_param.grad = mine_param.grad.clone()
        copy.owner = deepcopy(self.owner, memo)
        copy.sites = tuple(
            tuple(replace(site, module=deepcopy(site.module, memo)) for site in sites) for sites in self.sites
        )
        return copy

    def __repr__(self) -> str:
        return f"Bucket({self.plan.name!r}: {self.plan.layout})"


_HOOKS = ("mfsdp_hooks", "mfsdp_accumulate_hooks")
_OWN_ATTRIBUTES = {"_local_tensor", "_spec", "split", "backing", "_is_param", "mfsdp_home", *_HOOKS}


def _shell(shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> nn.Parameter:
    """A parameter of the right shape, strides and dtype, and no memory. Reading its values is a segfault on CPU."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    whole.untyped_storage().resize_(0)
    return nn.Parameter(whole, requires_grad=requires_grad)
