"""A bucket: one flat shard per rank for parameters of a unit.

The parameters had the same dtype, ``requires_grad`` and group when the model was sharded.

originals     weight [6, 8]                          bias [6]
              |                                      |
bucket        |<- rank 0's shard ->|<- rank 1's shard ->|      with full sharding, whole in memory only while in use
                                   |
flat          this rank's slice, an autograd leaf, in the main dtype; see :mod:`.flat_shard`
params        DTensors, views of ``flat``: what ``model.parameters()`` and the optimizer hold
shells        full-shape parameters without storage: what Dynamo traces. Never handed to a user. If a parameter is also
              divided over other ranks, its shell has the shape of this rank's part
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .. import compat
from ..formats import forms
from ..formats.extension import is_extended
from ..geometry.bucket_plan import BucketPlan, ParamLocation
from ..geometry.partition import Partition, local_part
from ..geometry.topology import Accumulation, Topology
from ..lanes.lane import Lane
from ..lanes.stage import State
from ..owner import Owned, refuse_dropped
from .aliases import Backing
from .comm_buffers import BufferPool
from .deferred_gradients import DeferredGradient, RequestedGradients
from .extension import Extension
from .flat_shard import FlatShard
from .redistribute import RowMove, announce_at_rest, move_rows, take_rows_of_part
from .replicated import ReplicatedTensor, as_rows
from .tensor import (
    ACCUMULATE_HOOKS,
    NOTED_VALUE,
    TENSOR_HOOKS,
    RowShardedTensor,
    UnreducedGradient,
    mark_provisional,
    noted_value,
)

all_buckets: weakref.WeakSet[Bucket] = weakref.WeakSet()
"""The buckets of all sharded models of this process."""


@dataclass(frozen=True, eq=False)
class ParamHandle:
    """The bucket of a shell or sharded parameter, which does not keep it alive, and its index there."""

    reference: weakref.ref[Bucket]
    index: int

    @classmethod
    def at(cls, bucket: Bucket, index: int) -> ParamHandle:
        return cls(weakref.ref(bucket), index)

    @property
    def bucket(self) -> Bucket:
        """The bucket.

        Raises:
            RuntimeError: Its model no longer exists.
        """
        bucket = self.reference()
        return refuse_dropped() if bucket is None else bucket

    def toggled(self) -> None:
        """Handle that the parameter was frozen or unfrozen."""
        if (bucket := self.reference()) is not None:
            bucket.toggled(self.index)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamHandle:
        return ParamHandle.at(deepcopy(self.bucket, memo), self.index)


def handle_of(param: Tensor) -> ParamHandle | None:
    """Return the bucket of a parameter and its index there; None if it is in no bucket, or its model no longer
    exists."""
    handle: ParamHandle | None = vars(param).get("mfsdp_handle")
    return handle if handle is not None and handle.reference() is not None else None


def is_homeless(param: Tensor) -> bool:
    """Whether a parameter is sharded, but in no bucket: its model was dissolved or no longer exists, or it is a
    copy."""
    return isinstance(param, RowShardedTensor) and handle_of(param) is None


class GradientEvents(Protocol):
    """What happens to the gradients of a model, told or asked by its buckets: :class:`~..step.grad_sync.GradSync`."""

    def is_due(self) -> bool:
        """Whether reductions that run once per optimizer step run in the current backward."""

    def touched(self, bucket: Bucket) -> None:
        """The bucket got gradients."""

    def inspect(self, bucket: Bucket, packed: Tensor) -> None:
        """The packed gradient, ``[numel]``, is about to be reduced."""


class InstalledGradient(NamedTuple):
    """The flat gradient that parameters' gradients were made views of last, and its version then."""

    flat: weakref.ref[Tensor]
    version: int


class GradientConsumer(Protocol):
    """An optimizer's step over one bucket, in backward: :class:`~..guests.optimizers.in_backward.BucketStep`."""

    def __call__(self, total: Tensor, used: Collection[int], in_graph: bool) -> bool:
        """Use up the sum of the bucket's gradients, ``[shard_numel]`` in the dtype in which they are accumulated.

        Args:
            used: Indices of parameters that this rank has used in the running backward.
            in_graph: Whether a compiled graph has called, which knows all readers of the bucket. Autograd may run
                further ones, such as those of a detached weight.

        Returns:
            Whether it was used up. If not, nothing has happened, and the parameters get it.
        """


class Conductor(Protocol):
    """Announces collectives: :class:`~..ranks.coordinator.Coordinator`."""

    @property
    def is_capturing(self) -> bool: ...

    def in_step(self) -> contextlib.AbstractContextManager[None]:
        """Context of collectives that belong to no forward or backward."""

    def toggled(self, parameter: str, is_trained: bool) -> None:
        """A parameter was frozen or unfrozen."""


class BucketOwner(Protocol):
    """What a bucket needs of its model."""

    @property
    def grad_sync(self) -> GradientEvents: ...

    @property
    def coordinator(self) -> Conductor: ...

    @property
    def comm_buffers(self) -> BufferPool: ...

    @property
    def topology(self) -> Topology: ...

    @property
    def watched(self) -> set[Bucket]:
        """Buckets to whose shards ordinary tensors refer."""

    def label_modules_of(self, *buckets: Bucket) -> None:
        """Make changes of buckets visible to Dynamo's guards."""


class Bucket(FlatShard, Owned[BucketOwner]):
    """The memory of one bucket on this rank.

    Args:
        plan: Layout and dtypes.
        originals: The parameters, in the order of the layout's slots. Their rows are copied if they have values; the
            parameters themselves are not kept.
        locations: For each parameter, every place where a module holds it.
        topology: Ranks and what each of them holds.
        device: Device that the bucket is used on. The shard is on the host if the plan says so.
        partitions: For each parameter, how it is divided over ranks other than those of the topology.
    """

    def __init__(
        self,
        plan: BucketPlan,
        originals: Sequence[nn.Parameter],
        locations: Sequence[Sequence[ParamLocation]],
        topology: Topology,
        device: torch.device,
        partitions: Sequence[Partition | None],
    ) -> None:
        super().__init__(plan, topology, device, partitions)
        self.locations = tuple(tuple(s) for s in locations)
        self.wrappers = tuple(
            None
            if plan.is_extension
            else forms.FORMS[plan.form].wrapper_of(original, [location.module for location in its])
            for original, its in zip(originals, locations, strict=True)
        )
        """What makes the tensors that modules get, for each parameter. None: a view of the gathered bucket."""
        flat = self._at_rest(plan.layout.shard_numel).zero_()
        self._copy_all(originals, flat)
        all_buckets.add(self)
        self.extension = Extension(originals[0], self.views(flat)[0]) if plan.is_extension else None
        """The class of the only parameter, if it gathers itself."""
        self._make(flat, originals)

    def _make(self, flat: Tensor, like: Sequence[nn.Parameter]) -> None:
        """Create the shard, the parameters and the shells from ``flat``; keep the Python attributes of ``like``."""
        plan = self.plan
        self._kept: dict[str, Tensor] = {}
        self._allocate(flat)
        flat = self.flat
        views = self.views(flat)
        if self.extension is not None:
            self.extension = self.extension.around(views[0])
        self.backing = backing = Backing((flat,) if self.resident is None else (flat, self.resident))
        backing.watch = functools.partial(_watch, weakref.ref(self))
        backing.settle = plan.rest.settler(flat)
        noted = zip(self.splits, map(noted_value, like), strict=True)
        backing.noted.update((split.name, digest) for split, digest in noted if digest is not None)
        self.params = tuple(
            _parameter(RowShardedTensor.wrap(view, split, self.topology, backing=backing), original)
            for view, split, original in zip(views, self.splits, like, strict=True)
        )
        for param, view in zip(self.params, views, strict=True):
            param._local_tensor = view  # nn.Parameter() detached the view from the shard's version counter
            # Weakly, which is also why torch.utils.swap_tensors refuses it: the optimizer would step another tensor.
            backing.aliases.add(param)
        self.shells = tuple(
            _shell(slot.shape, plan.compute_dtype, self.device, original.requires_grad)
            for slot, original in zip(plan.layout.slots, like, strict=True)
        )
        for index, original in enumerate(like):
            own = _OWN_ATTRIBUTES | (compat.torchao.OWN_ATTRIBUTES if compat.torchao.is_weight(original) else set())
            own |= compat.transformer_engine.own_attributes(original)
            own |= self.extension.own_attributes if self.extension is not None and is_extended(original) else set()
            kept = {k: v for k, v in vars(original).items() if k not in own}
            handle = ParamHandle.at(self, index)
            vars(self.params[index]).update(kept, mfsdp_handle=handle)
            vars(self.shells[index]).update(kept, mfsdp_handle=handle)
        self.provisional: set[int] = set()
        """Indices of parameters whose gradients are shown until it is known whether any rank has used them."""
        self.used_now: set[int] = set()
        """Indices of parameters that this rank has used since gradients were last settled; see :mod:`.gradients`."""
        self.clean: set[int] = set()
        """Indices of parameters without a gradient whose slices of the flat gradient are zeros."""
        self.stage_states: dict[tuple[str, str, int], dict[str, Any]] = {}
        """What stages remember of the bucket, by the key of their lane, part and index."""
        self.consumer: GradientConsumer | None = None
        """What uses the sum of gradients up as soon as it is complete, so that parameters have none."""
        self.installed: InstalledGradient | None = None
        self.contributions = 0
        """Forwards whose backward has still to add to the gradients: the graphs of a model with graph breaks have one
        each. The sum is complete with the last one."""
        self.set_plan(plan)

    def accumulating(self, accumulation: Accumulation) -> Topology:
        """Return the bucket's topology with another way to accumulate.

        Raises:
            ValueError: See :meth:`.Topology.accumulating`. Or the parameter, which gathers itself, is to stay gathered.
        """
        if accumulation.keeps_gathered and self.plan.is_extension:
            raise ValueError(
                f"keep_gathered=True is not supported for {self.plan.layout.slots[0].name!r}, which gathers itself "
                "(fsdp_pre_all_gather), at each use. Leave keep_gathered out, or use an ordinary parameter."
            )
        return self.topology.accumulating(accumulation)

    def set_plan(self, plan: BucketPlan, topology: Topology | None = None) -> None:
        """Switch to another plan or topology. The layout, and the dtypes of the data at rest, stay the same.

        Args:
            topology: A topology of the same ranks and strategy. None: keep the current one.
        """
        self.plan = plan
        if topology is not None:
            self.let_go()
            self.topology = topology
        self.exchange, before = plan.exchange(self.topology), self.lane
        self.lane = self.exchange.lane
        in_part = before.has_local_copy or self.lane.has_local_copy
        if in_part and self.resident is not None and self.lane.step != before.step:  # they differ in size
            self._drop_resident()
        vars(self).pop("_is_gathered_by_gloo", None)
        self._specs: dict[torch.dtype, list[compat.DTensorSpec]] = {}  # of gradients
        self.trains = tuple(param.requires_grad for param in self.params)
        """Which parameters are trainable. Their own attribute is a property in Python."""
        # Buckets with equal signatures can run each other's compiled graphs.
        self.signature = (
            f"{plan.layout.signature}:{plan.main_dtype}:{plan.requires_grad}:{self.frozen}:{not self.has_resident}:"
            f"{self.exchange[3:]}:{self.topology.accumulation.forwards_overlap}:{plan.reshard_after_forward}"
        )
        if not self.lane.needs_token:
            self.pending = None
        elif self.has_token and self.pending is None:  # a bucket frozen meanwhile keeps its sum
            self.pending = DeferredGradient(self, self._deferred_dtype)
        if self.pending is not None:
            self.pending.requested = None  # a failed backward may have left it set
        self.operands = self.operands._replace(token=self.pending.token if self.pending is not None else None)

    def refuse_parts(self, requested: RequestedGradients) -> None:
        """Raise NotImplementedError if a backward asks for some gradients, and stages remember what they have seen."""
        if self.lane.remembers_gradients and (requested.returned or requested.left_out):
            raise NotImplementedError(
                f"Gradients of bucket {self.plan.name!r} pass stages that keep state ({self.lane.text}), and this "
                "backward asks for some gradients only (torch.autograd.grad, or backward(inputs=...)): they would "
                "remember gradients that are not trained with. Take the plug-in out, or ask for all gradients."
            )

    def state_of(self, lane: Lane, part: str, index: int) -> State:
        """Return what a stage of a lane remembers of the bucket."""
        return self.stage_states.setdefault((lane.key, part, index), {})

    @property
    def _deferred_dtype(self) -> torch.dtype:
        """Dtype in which deferred gradients are summed. Sums that stages compute keep theirs."""
        dtype = self.plan.grad_dtype
        if not any(stage.sums and not stage.flies for stage in self.lane.each):
            return dtype
        return torch.promote_types(dtype, self.lane.deferred_spec.dtype)

    @functools.cached_property
    def _is_gathered_by_gloo(self) -> bool:
        group = self.exchange.gather_group
        return bool(group) and self.device.type == "cpu" and compat.is_real_group(group)

    def references_if_alone(self, full: Tensor) -> int:
        """Return the references to a bucket that was gathered just now, if nothing else refers to it.

        Gloo's thread may hold the result of a collective for a moment after the wait, on some ranks and not on others.
        The references to memory that is fresh, or a communication buffer, are therefore known, and not counted.
        """
        if not self._is_gathered_by_gloo or self.plan.is_extension or "use" not in self.lane.own_parts:
            return compat.references_to(full.untyped_storage())
        if self.exchange.gather_buffers.capacity:
            return self.owner.comm_buffers.references_if_alone(full)
        return compat.references_of_one_tensor()

    @property
    def frozen(self) -> list[int]:
        """Indices of frozen parameters in a bucket that has trainable ones."""
        return [i for i, param in enumerate(self.params) if not param.requires_grad] if self.plan.requires_grad else []

    @property
    def has_token(self) -> bool:
        """Whether graphs take the token that stands for the bucket."""
        return self.lane.has_token(self.plan.requires_grad)

    def toggled(self, index: int) -> None:
        """Update the bucket after a parameter was frozen or unfrozen. Code is compiled once for each combination."""
        if (is_trained := self.params[index].requires_grad) != self.trains[index]:
            self.owner.coordinator.toggled(self.locations[index][0].name, is_trained)
        self.shells[index].requires_grad_(is_trained)  # Dynamo guards on it
        trains = any(param.requires_grad for param in self.params)
        self.set_plan(replace(self.plan, requires_grad=trains))
        self.owner.label_modules_of(self)

    @torch.no_grad()
    def take_rows_of(self, parts: Sequence[Tensor]) -> None:
        """Copy this rank's rows from ``parts``: every parameter, or the part of it that the bucket holds."""
        self.await_gather()
        self._copy_rows(parts, self.flat.detach())

    @torch.no_grad()
    def _copy_all(self, originals: Sequence[nn.Parameter], flat: Tensor) -> None:
        """Copy this rank's rows of the parameters. A collective if some are sharded, in other places."""
        sharded = [isinstance(original, RowShardedTensor) for original in originals]
        whole = [
            torch.empty(0, device="meta") if its else local_part(o) for its, o in zip(sharded, originals, strict=True)
        ]
        self._copy_rows(whole, flat)
        moves = {
            index: RowMove(each._local_tensor, each.row_split, each.topology, self.splits[index], self.topology)
            for index, each in enumerate(originals)
            if isinstance(each, RowShardedTensor)
        }
        away = [index for index, move in moves.items() if not move.is_nothing]
        rows = {index: move.local for index, move in moves.items()}
        rows |= zip(away, move_rows([moves[index] for index in away]), strict=True)
        views = self.views(flat)
        for index, own in rows.items():
            views[index].copy_(own)

    def _copy_rows(self, parts: Sequence[Tensor], flat: Tensor) -> None:
        for part, view, split in zip(parts, self.views(flat), self.splits, strict=True):
            if split.rows(self.topology.shard) and not part.is_meta:
                view.copy_(take_rows_of_part(part, split, self.topology.shard))

    def local_views(self, flat: Tensor, backing: tuple[Tensor, ...] = ()) -> list[RowShardedTensor]:
        """Like :meth:`views`, as DTensors."""
        flat = self.elements(flat)
        specs = self._specs.get(flat.dtype)
        if specs is None:
            specs = self._specs[flat.dtype] = [
                RowShardedTensor.spec_of(split, self.topology, flat.dtype) for split in self.splits
            ]
        return [
            RowShardedTensor.wrap(view, split, self.topology, backing=backing, spec=spec)
            for view, split, spec in zip(self.views(flat), self.splits, specs, strict=True)
        ]

    # -- whole parameters ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_shards(self, rows: Mapping[int, Tensor] | None = None, what: str = "all parameters") -> list[Tensor]:
        """Gather every parameter, or the part of it that the bucket holds, in the main dtype.

        The results are views of one tensor of the bucket's size. A collective: every rank must call it.

        Args:
            rows: What to gather instead, of one dtype, by number of the parameter: this rank's rows of tensors that are
                split like parameters, such as an optimizer's state. The results of other parameters are undefined.
            what: What is gathered, for messages.
        """
        announce_at_rest(self.topology, f"a gather of {what} of {self.plan.name}")
        with self.owner.coordinator.in_step():
            whole = self.fetched() if rows is None else self._joined(rows)
            for group in self.topology.shard_groups:
                whole = compat.wait_tensor(compat.all_gather(whole, group.size, group.name))
        if not self.topology.shard_groups:
            whole = whole.clone()
        return [self.whole_view(whole, index) for index in range(len(self.params))]

    def _joined(self, rows: Mapping[int, Tensor]) -> Tensor:
        """Return one tensor that holds tensors with this rank's rows at the places of their parameters."""
        dtype = next(iter(rows.values())).dtype
        joined = torch.empty(self.flat.numel(), dtype=dtype.to_real(), device=self.device)
        views = self.views(joined)
        for index, its in rows.items():
            views[index].copy_(its)
        return joined

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> list[Tensor | None]:
        """The gradients attached to the parameters.

        What was computed from views and sums of parameters at rest leaves a gradient that every rank holds. It is
        replaced by this rank's rows of it.
        """
        attribute = self.plan.grad_attribute
        with compat.DisableTorchFunctionSubclass():
            found = [getattr(param, attribute, None) for param in self.params]
        for index, gradient in enumerate(found):
            if isinstance(gradient, ReplicatedTensor):
                found[index] = as_rows(gradient, self.params[index])
                setattr(self.params[index], attribute, found[index])
        return found

    @property
    def gradient_factor(self) -> float:
        """What a mean of gradients over ranks is multiplied by to become what the bucket's reduction would give."""
        of_a_sum = self.plan.scale / (self.topology.every.size if self.plan.reduce_op == "avg" else 1)
        return of_a_sum * self.owner.topology.every.size

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient attached."""
        attribute = self.plan.grad_attribute
        return any(getattr(param, attribute, None) is not None for param in self.params)

    @property
    def deferred_total(self) -> Tensor | None:
        """The sum of gradients that waits for its reduction, ``[layout.numel]``; None: there is none."""
        return self.pending.total if self.pending is not None else None

    @property
    def gradient_waits(self) -> bool:
        """Whether the last gradient was kept for a later reduction."""
        return self.pending is not None and self.pending.kept

    @torch.no_grad()
    def keep(self, use: str, values: Tensor) -> Tensor:
        """Return ``values``, which last from step to step, in the memory of this ``use`` if the plan keeps memory."""
        if not self.plan.keeps_memory:
            return values
        kept = self._kept.get(use)
        if kept is None:
            kept = self._kept[use] = torch.empty_like(values)
        return kept if kept is values else kept.copy_(values)

    def free_kept(self, *uses: str) -> None:
        """Free the memory of these uses, see :meth:`keep`, when no other reference remains."""
        for use in uses:
            self._kept.pop(use, None)

    def kept_memory(self) -> list[Tensor]:
        """Return the memory that :meth:`keep` has allocated."""
        return list(self._kept.values())

    def show_unreduced(self) -> None:
        """Show users that gradients are deferred."""
        assert self.pending is not None
        for index, (param, attached) in enumerate(zip(self.params, self.gradients, strict=True)):
            if attached is not None and not isinstance(attached, UnreducedGradient) and not self.plan.keeps_memory:
                self.pending.earlier[index] = attached
                attached = None
            if attached is None and param.requires_grad:
                shown = UnreducedGradient.like(param, self.pending.earlier, index)
                if index in self.provisional:
                    mark_provisional(shown)
                setattr(param, self.plan.grad_attribute, shown)

    def forget_abandoned(self, total: Tensor) -> None:
        """Zero the slices of ``total``, a deferred sum, for parameters whose gradient the user has dropped."""
        dropped = []
        for index, attached in enumerate(self.gradients):
            if attached is None or (isinstance(attached, UnreducedGradient) and attached.zeroed):
                dropped.append(index)
                if attached is not None:
                    attached.zeroed = False
                elif self.pending is not None:
                    self.pending.earlier.pop(index, None)
        self.zero_slices(total, dropped)

    def zero_slices(self, packed: Tensor, params: Iterable[int]) -> None:
        """Zero the slices of these parameters, by index, in a gradient before its reduction, or in a deferred sum."""
        # ``packed`` is the whole bucket or this rank's inner shard of it.
        start = self.topology.inner.rank * packed.numel() if packed.numel() < self.plan.layout.numel else 0
        for slot in (self.plan.layout.slots[index] for index in params):
            packed[max(slot.offset - start, 0) : max(slot.end - start, 0)].zero_()

    def inspect(self, gradient: Tensor) -> None:
        """Inspect a gradient before it is reduced."""
        self.owner.grad_sync.inspect(self, gradient)

    def holders(self) -> Iterator[tuple[int, nn.Module, str]]:
        """Yield index, module and attribute for each place where a module, of those that exist, holds a parameter."""
        for index, locations in enumerate(self.locations):
            for location in locations:
                if (module := location.holder()) is not None:
                    yield index, module, location.attribute

    def check_unchanged(self, is_compiled: bool = False) -> None:
        """Raise if a parameter, or how it is gathered, was replaced since the model was sharded.

        Args:
            is_compiled: Whether compiled code is about to use the bucket. It gathers parameters, and would ignore the
                tensors of ``torch.func.functional_call``.
        """
        for param, locations in zip(self.params, self.locations, strict=True):
            if _GATHERS in vars(param._local_tensor):  # type: ignore[attr-defined]
                raise NotImplementedError(
                    f"fsdp_pre_all_gather was set on the local tensor of parameter {locations[0].name!r}, which is a "
                    "view of its bucket's shard and has no effect on gathers. Define fsdp_pre_all_gather and "
                    "fsdp_post_all_gather in a class around its values, and make it a parameter of that class before "
                    "fully_shard; to gather in another dtype, use MixedPrecisionPolicy(param_dtype=...)."
                )
            for location in locations:
                module = location.holder()
                if module is not None and module._parameters.get(location.attribute) is not param:
                    if compat.in_functional_call():
                        if not is_compiled:
                            continue
                        raise RuntimeError(
                            f"Compiled code gathers {location.name!r}, and would ignore the tensor that "
                            "torch.func.functional_call uses instead. Call the model, or the module, eagerly."
                        )
                    raise RuntimeError(
                        f"Parameter {location.name!r} was replaced after fully_shard_model; the new one is not sharded "
                        "and would not be trained. Copy values into the old one instead (parameter.copy_(values) under "
                        "torch.no_grad()), use load_state_dict without assign=True, or replace it before sharding."
                    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """Copy the bucket with its memory.

        Parameters and shells are entered in ``memo``, so that modules copied with the same memo hold them.
        """
        copy = object.__new__(Bucket)  # registered before its modules are copied, because they refer to it
        memo[id(self)] = copy
        vars(copy).update(vars(self))
        copy._make(self._at_rest(self.flat.numel()).copy_(self.flat.detach()), self.params)
        for mine, its in zip((*self.params, *self.shells), (*copy.params, *copy.shells), strict=True):
            memo[id(mine)] = its
        for mine_param, its_param in zip(self.params, copy.params, strict=True):
            if mine_param.grad is not None:
                its_param.grad = mine_param.grad.clone()
        copy.owner = deepcopy(self.owner, memo)
        copy.locations = tuple(
            tuple(replace(location, holder=deepcopy(location.holder, memo)) for location in locations)
            for locations in self.locations
        )
        return copy

    def __repr__(self) -> str:
        return f"Bucket({self.plan.name!r}: {self.plan.layout})"


_GATHERS = "fsdp_pre_all_gather"
"""Method of FSDP2's classes of parameters that gather themselves."""

_OWN_ATTRIBUTES = {
    "_local_tensor",
    "_spec",
    "split",
    "backing",
    "_is_param",
    "mfsdp_handle",
    NOTED_VALUE,
    TENSOR_HOOKS,
    ACCUMULATE_HOOKS,
}


def _watch(reference: weakref.ref[Bucket]) -> None:
    bucket = reference()
    if bucket is not None and not bucket.owner.coordinator.is_capturing:
        bucket.watch()
        bucket.owner.watched.add(bucket)


def _parameter(rows: RowShardedTensor, original: nn.Parameter) -> Any:
    """Return a parameter with these rows. If ``original`` was sharded before, it gets the rows and is returned, so that
    optimizers still refer to it."""
    if is_homeless(original):
        original.move_in(rows)  # type: ignore[attr-defined]
        return original
    return nn.Parameter(rows, requires_grad=original.requires_grad)


def _shell(shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> nn.Parameter:
    """Create a parameter of this shape, with ordinary strides but no memory.

    Reading its values segfaults on CPU.
    """
    whole = torch.empty(shape, dtype=dtype, device=device)
    whole.untyped_storage().resize_(0)
    return nn.Parameter(whole, requires_grad=requires_grad)
