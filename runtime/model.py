"""A sharded model: the one object that owns its buckets and everything that happens to them."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import compat, gradients, guards, meta, tracing
from .agreement import (
    agree,
    agree_on_order,
    conclude,
    everyones,
    forget_failure,
    has_others,
    report_failure,
    value_digest,
)
from .bucket import Bucket, BucketPlan, Home
from .eager import EagerPolicy, EagerRuntime, EagerUnit, Window
from .experts import Experts, marked
from .journal import journal
from .layout import BucketLayout, LayoutPolicy, ParamSpec, Slot, in_parts, plan_layouts
from .lineage import Lineage
from .modules import label_module, shard_module
from .optimizers import Optimizers, watch_steps
from .order import STEP, Details, Order, Phase, Series, no_details, order_of_group
from .partition import Partition, Partitioner, Peers, local_part
from .references import check_not_replaced, check_references, move_hooks, retire
from .running import named
from .tensor import UnreducedGradient, refuse_unreduced
from .topology import Accumulation, Group, Topology, launches
from .units import Unit, UnitClasses, find_units, join, repeated_blocks, resolve_unit_classes
from .watchdog import watchdog
from .whole import whole_parameters

__all__ = ["BucketPlanner", "GradientPolicy", "Overlap", "Precision", "Scaling", "ShardedModel", "Synchronisation"]


@dataclass(frozen=True)
class Precision:
    """Which dtypes things have, besides the dtype that the model computes in.

    Args:
        main_params_dtype: of shards and optimizer state; None keeps each parameter's own.
        main_grads_dtype: that gradients are summed in; None: that of the shards.
        grad_comm_dtype: that gradients are reduced in; None: ``main_grads_dtype`` if given, else the parameter's own.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def main_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if self.main_params_dtype is None or not compute_dtype.is_floating_point:
            return compute_dtype
        return self.main_params_dtype

    def grad_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        return self.main_grads_dtype or self.main_dtype(compute_dtype)

    def comm_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        return self.grad_comm_dtype or self.main_grads_dtype or compute_dtype


class Scaling(str, Enum):
    """What becomes of gradients over data-parallel ranks."""

    SUM_THEN_SCALE = "sum, then scale"
    AVERAGE_IN_COLLECTIVE = "average in the collective"
    SUM = "sum"


@dataclass(frozen=True)
class GradientPolicy:
    """What is done with gradients.

    Args:
        scaling: mean over data-parallel ranks, in one way or another, or sum.
        decoupled: they go to ``parameter.decoupled_grad``.
        report_nan: look for NaN in them before they are reduced.
    """

    scaling: Scaling = Scaling.SUM_THEN_SCALE
    decoupled: bool = False
    report_nan: bool = False


@dataclass(frozen=True)
class Overlap:
    """What may run while the model computes."""

    gathers: bool = True
    reductions: bool = True


@dataclass
class Synchronisation:
    """When reductions that run once per optimizer step are due.

    What was said last and closest counts: a context manager around the backward, then ``last_microbatch`` if it was
    set, then ``automatic``.

    Args:
        automatic: after every backward.
        last_microbatch: whether the backward at hand is the last before the optimizer's step; None: not told.
        override: by the innermost context manager.
        microbatches: backwards since gradients were last reduced.
    """

    automatic: bool = True
    last_microbatch: bool | None = None
    override: bool | None = None
    microbatches: int = 0

    def is_due(self) -> bool:
        if self.override is not None:
            return self.override
        return self.automatic if self.last_microbatch is None else self.last_microbatch


@dataclass
class _BackwardIds:
    """The backward pass under way, and one inside it."""

    outer: int | None = None
    inner: int | None = None


_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()


class ShardedModel:
    """Shards ``module`` in place.

    Args:
        module: the model, whole on this rank.
        unit_modules: see :func:`~mfsdp_compile.runtime.units.resolve_unit_classes`.
        topology: the data-parallel ranks, and what is sharded over them.
        every: their process group.
        precision: dtypes of shards and gradients.
        gradient_policy: what is done with gradients.
        overlap: what may run while the model computes.
        device: where shards and buffers live.
        check_values: compare parameter values between ranks, not only names, shapes and dtypes.
        layout_policy: bounds for bucket layouts.
        whole: names of parameters that should lie on one rank each.
        eager_policy: bounds for the eager path.
        experts: finds out which parameters are experts, and who holds them; None: no rank has parameters of its own.
        tensor_parallel: the mesh dimension that Megatron's marks on parameters speak of.
        from_meta: gives values to parameters and buffers on the meta device; None: there must be none.

    Raises:
        ValueError, TypeError: unit classes or parameters that cannot be sharded. The model is as it was.
        RuntimeError: ranks hold different models. The model is as it was.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_modules: UnitClasses,
        topology: Topology,
        every: dist.ProcessGroup,
        precision: Precision,
        device: torch.device,
        gradient_policy: GradientPolicy = GradientPolicy(),
        overlap: Overlap = Overlap(),
        check_values: bool = True,
        layout_policy: LayoutPolicy | None = None,
        whole: Collection[str] = (),
        eager_policy: EagerPolicy | None = None,
        experts: Callable[[], Experts] | None = None,
        tensor_parallel: DeviceMesh | None = None,
        from_meta: meta.Initialiser | None = None,
    ) -> None:
        self.topology = topology
        self.precision = precision
        self.overlap = overlap
        self.synchronisation = Synchronisation()
        self.lineage = Lineage()
        plans: list[tuple[Unit, list[BucketPlan]]] = []
        found: list[Experts] = []
        partitions: dict[str, Partition | None] = {}
        initialiser = from_meta if meta.has_meta(module) else None

        def describe() -> list[str]:
            if initialiser is not None:
                initialiser.prepare(module)
            unit_bytes = layout_policy.unit_bytes if layout_policy is not None else None
            units = _find_units(module, unit_modules, unit_bytes, from_meta is not None)
            if experts is not None:
                found.append(experts())
            planner = BucketPlanner(topology, precision, gradient_policy, layout_policy, frozenset(whole), *found)
            plans.extend((unit, planner.unit(unit)) for unit in units)
            _check_experts(module, plans, *found)
            partitions.update(_partitions(units, plans, Partitioner(topology.mesh, tensor_parallel), *found))
            # Versions, because passes and Inductor's choices of kernels differ between them.
            return [
                f"torch {torch.__version__}",
                str(topology),
                *map(str, found),
                f"tp_dim of {tensor_parallel.size()} ranks" if tensor_parallel is not None else "no tp_dim",
                *_describe(module, plans, check_values),
                *([f"{_RANDOM}: {meta.random_state(device)}"] if initialiser is not None and initialiser.draws else []),
            ]

        def describe_experts() -> tuple[Sequence[int], list[str]]:
            if not found:
                return (), []
            return found[0].ranks, _describe_experts(module, plans, check_values)

        agree(every, "fully_shard_model", describe, within=describe_experts, heeds_refusals=True)
        self.experts = found[0].known_to_all(sorted(_experts_in(plans)), every) if found else None
        if self.experts is not None:
            whole_model = dict(module.named_parameters())
            undivided = [name for name in _experts_in(plans) if partitions[name] is None]
            partitions |= {name: self.experts.partition(whole_model[name]) for name in undivided}
        self.partitions = tuple(partition for partition in partitions.values() if partition is not None)
        others = (partition for name, partition in partitions.items() if name not in _experts_in(plans))
        self._tensor_parallel = tuple(partition for partition in others if partition is not None)
        self._agree_on_replicas(module, partitions, check_values, every, _experts_in(plans))
        self.group, self.everyone = every, every
        if self._tensor_parallel:
            self.everyone = compat.new_group_like(every.group_name, self._ranks())

        # From here on nothing fails but for want of memory.
        self._backward = _BackwardIds()
        self._touched: set[Bucket] = set()
        self._reduced: set[Bucket] = set()  # since the last optimizer step
        self._use_varies: set[Bucket] = set()  # see note_eager_use
        self._told_missing: set[str] = set()
        self.started = self.steps = 0
        self._stepping: torch.optim.Optimizer | None = None
        self._half_step, self._version = False, 0
        self._microbatch = ""
        self._join_order(type(module).__name__, [name for name, _ in module.named_parameters()])
        self._failure: str | None = None
        self._found_nan: list[tuple[Bucket, Tensor]] = []
        self.compiled_graphs: list[Any] = []  # records of the passes, added by the backend
        self.optimizers = Optimizers()
        self._begun: dict[tuple[str, str], tuple[str, Sequence[str]]] = {}
        homes: dict[nn.Module, dict[str, Home]] = {}
        originals: dict[nn.Module, dict[str, nn.Parameter]] = {}  # without values
        replaced: list[tuple[weakref.ref[nn.Parameter], str]] = []
        units = []
        for unit, unit_plans in plans:
            members = {sites[0].name: (param, sites) for param, sites in unit.params}
            buckets = []
            for plan in unit_plans:
                params = [members[slot.name] for slot in plan.layout.slots]
                parts = [partitions[slot.name] for slot in plan.layout.slots]
                shared_by = self.topologies[plan.is_expert]
                bucket = Bucket(plan, [p for p, _ in params], [s for _, s in params], shared_by, device, parts)
                bucket.owner = self
                buckets.append(bucket)
                for index, (original, sites) in enumerate(params):
                    replaced.append((weakref.ref(original), sites[0].name))
                    move_hooks(original, bucket.params[index])
                    for site in sites:
                        if initialiser is not None:
                            originals.setdefault(site.module, {})[site.attribute] = original
                        site.module._parameters[site.attribute] = bucket.params[index]  # lets go of the original
                        homes.setdefault(site.module, {})[site.attribute] = Home(bucket, index)
            units.append(EagerUnit(unit.name, unit.modules, unit.is_root, tuple(buckets)))
        plans.clear()
        if initialiser is not None:
            self._initialise(module, homes, originals, device, initialiser)
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = buffer.to(device) if buffer is not None else None
        self.buckets: tuple[Bucket, ...] = tuple(bucket for unit in units for bucket in unit.buckets)
        eager_policy = eager_policy or EagerPolicy()
        if not overlap.gathers:
            eager_policy = replace(eager_policy, prefetch_bytes=-1)
        if not overlap.reductions:
            eager_policy = replace(eager_policy, reductions_in_flight=0)
        self.eager = EagerRuntime(units, module.modules(), self, eager_policy)
        self._schedules_replaced = 0
        self._shard_modules(module, homes)
        self._know(module)
        self.forget_old_code()
        self._watch()
        for reference, name in replaced:
            if (held := reference()) is not None:
                retire(held, name)

    def _initialise(
        self,
        module: nn.Module,
        homes: Mapping[nn.Module, Mapping[str, Home]],
        originals: Mapping[nn.Module, Mapping[str, nn.Parameter]],
        device: torch.device,
        initialiser: meta.Initialiser,
    ) -> None:
        """Where it fails on one rank, or ranks have drawn different numbers, it fails on all, and the model is as it was."""

        def describe() -> list[str]:
            meta.initialise(module, homes, originals, device, initialiser)
            return [f"random numbers after initialisation: {meta.random_state(device)}"] if initialiser.draws else []

        try:
            agree(self.everyone, "fully_shard_model, initialisation of parameters on the meta device", describe)
        except BaseException:
            for owner, own in originals.items():
                owner._parameters.update(own)
            raise

    def is_miscompiled(self) -> bool:
        """See :func:`.compat.is_miscompiled`."""
        module = self._module()
        return module is not None and compat.is_miscompiled(module, self.buckets[0].flat.device.type)

    def module_buffers(self) -> list[Tensor]:
        """The model's buffers, on this rank."""
        module = self._module()
        return list(module.buffers()) if module is not None else []

    @property
    def topologies(self) -> list[Topology]:
        """Of all buckets: :attr:`topology`, and that of experts if they have their own."""
        return [self.topology] if self.experts is None else [self.topology, self.experts.topology]

    def _agree_on_replicas(
        self,
        module: nn.Module,
        partitions: Mapping[str, Partition | None],
        check_values: bool,
        every: dist.ProcessGroup,
        experts: Collection[str],
    ) -> None:
        """Raise unless parameters that are the same on ranks of other mesh dimensions than ours are it: also ``experts``, by
        name, which tensor-parallel ranks do not divide. Where some ranks of a mesh raise, all do."""
        # By identity: meshes of the same ranks are equal, and may be different dimensions.
        undivided = {id(None), id(self.experts.parallel if self.experts is not None else None)}
        tensor_parallel = {id(partition.mesh) for partition in self._tensor_parallel}
        params = dict(module.named_parameters())
        asked: list[dist.ProcessGroup] = []
        for mesh in self._other_meshes:
            for dim in range(mesh.ndim):
                lines = []
                for name, partition in partitions.items():
                    if partition is not None and partition.mesh is mesh:
                        alike = partition.placements[dim].is_replicate()
                    else:
                        over = partition.mesh if partition is not None else None
                        alike = name in experts and id(mesh) in tensor_parallel and id(over) in undivided
                    if alike:
                        shape = tuple(local_part(params[name]).shape)
                        lines.append(f"parameter {name}: {shape}, {params[name].dtype}")
                        if check_values and not params[name].is_meta:
                            lines.append(f"values of {name}: {value_digest(local_part(params[name]))}")
                dimension = (mesh.mesh_dim_names or ("",))[dim]
                topic = f"fully_shard_model, parameters that are replicated over the mesh dimension {dimension!r}"
                agree(mesh.get_group(dim), topic, lambda lines=lines: lines, heeds_refusals=True)  # type: ignore[misc]
                asked.append(mesh.get_group(dim))
        # A group that differs knows it; those beside it, along the other dimensions, are told.
        for group in [every, *asked[:-1]] if asked else []:
            agree(group, "fully_shard_model, ranks of other mesh dimensions", list, heeds_refusals=True)

    @compat.on_values
    def _ranks(self) -> list[int]:
        """All that hold a part of the model: data-parallel ranks, which divide its experts, and those of other dimensions that
        divide parameters."""
        mesh = self.topology.mesh
        meshes = dict.fromkeys(partition.beside(mesh) for partition in self._tensor_parallel)
        return sorted({rank for each in meshes for rank in each.mesh.flatten().tolist()})

    def buffer_bytes(self) -> int:
        """Of the model's buffers, on this rank."""
        return sum(buffer.nbytes for buffer in self.module_buffers())

    @staticmethod
    def any_exists() -> bool:
        return bool(_models)

    def _know(self, module: nn.Module) -> None:
        _models.add(self)
        watch_steps()
        self._module = weakref.ref(module)
        self._known = frozenset(id(param) for bucket in self.buckets for param in bucket.params)

    def _shard_modules(self, root: nn.Module, homes: dict[nn.Module, dict[str, Home]]) -> None:
        unit_of = {m: unit for unit in self.eager.units if not unit.is_root for m in unit.modules}
        root_buckets = {bucket for unit in self.eager.units if unit.is_root for bucket in unit.buckets}
        for module in dict.fromkeys([root, *unit_of, *homes]):
            owned = {home.bucket for home in homes.get(module, {}).values()}
            owns_of_root = tuple(b for b in self.buckets if b in owned and b in root_buckets)
            window = Window(self.eager, unit_of.get(module), owns_of_root, is_root=module is root)
            self.eager.add_window(window)
            shard_module(module, homes.get(module, {}), window)

    # -- backward -----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Called by whatever happens to this model in backward, compiled or eager: see that it gets finished."""
        current = compat.backward_id()
        if current in (-1, self._backward.outer, self._backward.inner):
            return
        if self._backward.outer is None:
            self._backward.outer = current
            # Whatever the strategy: it reduces something on every rank, which one rank cannot do alone.
            kind = "backward" if self.reductions_are_due() else "backward that accumulates"
            self._note(kind)
            self._order.enter(Phase(kind, f"{self._name}{self._microbatch}"), self._agree_on_order)
            compat.on_backward_end(self._finish_backward)
        else:
            # A backward inside a backward (reentrant checkpointing), or after one that raised. Gradients must be there
            # when it returns; parameters without one are for the outer backward to fill.
            self._backward.inner = current
            compat.on_backward_end(self.eager.finish_reductions)

    def enter_compiled(self, buckets: Sequence[Bucket]) -> None:
        """A compiled graph of this model is about to run."""
        if compat.in_backward():
            self.enter_backward()  # recomputing
        else:
            self.leave_backward()
            self.eager.leave_stray_reads()
            names = [bucket.plan.name for bucket in buckets]
            what = f"compiled code of {names[0] if len(names) == 1 else f'{len(names)} buckets, {names[0]} to {names[-1]}'}"

            def details() -> list[str]:
                return [f"bucket {name}" for name in names]

            if self.eager.is_in_window and self.topology.gather_group is not None:
                self.start(what, details)
            else:
                self.enter_forward(what, details)
                self.started += 1

    def note_backward(self, backwards: Sequence[gradients.Backward]) -> None:
        """A compiled backward is about to compute gradients of buckets, ours among them: see what becomes of these."""
        for backward in backwards:
            bucket = backward.bucket()
            if bucket is None or bucket.owner is not self or not bucket.plan.requires_grad:
                continue
            asked = gradients.Asked.of(backward.leaves)
            if bucket.pending is not None:
                bucket.pending.asked = asked
            if asked.added:
                gradients.note_use(bucket, backward.used - asked.left_out)

    def check_parameters_are_everyones(self, what: str) -> None:
        """Raise NotImplementedError if ranks have parameters of different names. ``what`` takes them."""
        for bucket in self.buckets:
            for split in bucket.splits:
                if isinstance(split.partition, Peers) and self.experts is not None and not self.experts.named_alike:
                    raise NotImplementedError(
                        f"Expert {split.name!r} is on some ranks only, and others have other names: {what} takes parameters that "
                        "all ranks know. Number experts from 0 on every rank, or stack them in one parameter, or use "
                        "torch.distributed.checkpoint with model.state_dict()."
                    )

    def check_complete(self) -> None:
        """Raise if somebody has given the model a parameter that is in no bucket: it would train on each rank alone."""
        module = self._module()
        for owner in module.modules() if module is not None else ():
            for name, param in owner._parameters.items():
                if param is not None and id(param) not in self._known:
                    prefix = next(prefix for prefix, m in module.named_modules() if m is owner)  # type: ignore[union-attr]
                    raise RuntimeError(
                        f"Parameter {f'{prefix}.{name}' if prefix else name!r} came after fully_shard_model: it is not "
                        "sharded, and its gradient would not be reduced. Change the model before sharding it."
                    )

    def leave_backward(self) -> None:
        """Outside of backward: forget one that raised."""
        if not compat.in_backward():
            self._check_step()
            if self._backward.outer is not None and self._failure is None:
                self._failure = "an error in backward"
            if self._failure is not None:
                self._recover()
            self._forget_backward()

    def _forget_backward(self) -> None:
        self._backward = _BackwardIds()
        self._touched.clear()
        self._found_nan.clear()

    # -- agreement with other ranks -----------------------------------------------------------------------------------

    def agree(
        self, topic: str, lines: Sequence[str], patience: float = 1.5, epoch: int = 0, is_last_resort: bool = False
    ) -> None:
        """Raise on every rank unless all come with the same, within ``patience`` times the process group's time-out. See
        :func:`.agreement.agree`."""
        timeout = compat.timeout_of(self.group) * patience
        agree(self.group, topic, lambda: lines, timeout, epoch, is_last_resort=is_last_resort)

    def _watch(self) -> None:
        if has_others(self.group) or has_others(self.everyone):
            watchdog.watch(self)

    @property
    def order(self) -> Order:
        return self._order

    @property
    def scopes(self) -> set[str]:
        """See :class:`.watchdog.Watched`."""
        return {self.group.group_name, self.everyone.group_name}

    @property
    def communicators(self) -> set[str]:
        """See :class:`.watchdog.Watched`."""
        of_mesh = {group.name for topology in self.topologies for group in topology.groups}
        return of_mesh | {group.name for group in self._other_groups}

    def make_portions(self, size: int) -> None:
        """See to the process group that backwards gather over with ``reshard_after_forward=size``. Collective, once.

        Raises:
            RuntimeError: not all ranks came to ask for it.
        """
        if size not in self.topology.portions:
            self._note("process groups for reshard_after_forward")
            self.agree("Compiling", [f"reshard_after_forward={size}"])
            self.topology.make_portions(size)

    def _join_order(self, kind: str, parameters: Iterable[str]) -> None:
        self._order = order_of_group(self.group.group_name)
        self._name, self._copies = self._order.join(kind, parameters), 0

    @property
    def schedules(self) -> dict[str, Any]:
        """What ranks have agreed on about compiled graphs; see :class:`.order.Order`."""
        return self._order.schedules

    def conclude(
        self,
        topic: str,
        lines: Sequence[str],
        offer: Any,
        combine: Callable[[Sequence[Any]], Any],
        patience: float = 1.5,
    ) -> Any:
        """What ``combine`` makes of all ranks' offers, as :func:`.agreement.conclude`; time-out as in :meth:`agree`."""
        return conclude(self.group, topic, lines, offer, combine, compat.timeout_of(self.group) * patience)

    def warn_others(self, error: BaseException) -> None:
        """Errors that other ranks meet from here on say that this one is about to fail with ``error``."""
        report_failure(self.group, error, is_certain=False)

    def others_know(self) -> None:
        """What :meth:`warn_others` told is over: all ranks have met."""
        forget_failure(self.group)

    def schedule_replaced(self) -> None:
        """All ranks agreed on another schedule, while a graph was compiled; see :meth:`forget_old_code`."""
        self._order.schedules_replaced += 1

    def forget_old_code(self) -> None:
        """Have everything compiled anew, if a schedule was replaced: old code follows the old one, and some ranks would run that
        and others the new. Of all models of the group, as they may share code. Not while Dynamo compiles, which looks at
        labels before and after."""
        if self._schedules_replaced != self._order.schedules_replaced:
            for model in _models:
                if model._order is self._order:
                    model._label_modules()

    def _agree_on_order(self, lines: Sequence[str], epoch: int) -> None:
        agree_on_order(self.group, lines, epoch)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to change weights; on all ranks, or the rows of one would be of other weights than those of the
        next. In backward (a step in a hook for each parameter) ranks may come to theirs in another order."""
        if optimizer is self._stepping or compat.in_backward():
            return
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if isinstance(param.grad, UnreducedGradient):  # before weight decay has changed something
                refuse_unreduced(param.grad)
        self._check_step()
        self._order.enter(Phase(STEP, f"{type(optimizer).__name__} of {self._name}"), self._agree_on_order)
        self._stepping, self._version = optimizer, self._weights_version

    def end_step(self) -> None:
        """What has begun last is complete."""
        if self._stepping is not None:
            self._stepping = None
            self.steps += 1

    @property
    def _weights_version(self) -> int:
        return sum(bucket.flat._version for bucket in self.buckets)

    def fail_step(self, error: BaseException) -> None:
        """An error has come out of what has begun last, if it had begun. Where that has changed no weight it may be tried again, which
        ranks compare before the next forward."""
        has_changed = self._stepping is not None and self._weights_version != self._version
        self._half_step |= has_changed
        self._stepping = None
        if self._failure is None:
            self._failure = type(error).__name__
            report_failure(self.group, error, is_certain=has_changed)

    def _check_step(self) -> None:
        """Raise RuntimeError if an optimizer's step has begun and not ended, in the middle of its changes."""
        if self._stepping is None or compat.is_running(self._stepping):  # it may call a closure
            return
        if self._weights_version == self._version:
            self.fail_step(RuntimeError(f"a step of {type(self._stepping).__name__} that was not made"))
            return
        try:
            raise RuntimeError(
                f"The last step of {type(self._stepping).__name__} over {self._name} was not finished on this rank: some weights "
                "are those after it, and some those before. Call model.reset() on every rank, and load a checkpoint."
            )
        except RuntimeError as error:
            self.fail_step(error)
            raise

    def enter_forward(self, what: str, details: Details = no_details) -> None:
        """A forward begins, of the model, a part of it, or compiled code."""
        kind = f"forward {'with' if torch.is_grad_enabled() else 'without'} gradients"
        self._note(f"{kind} of {what}")
        if self.topology.gather_group is not None:  # else one rank may well evaluate alone
            self._order.enter(Phase(kind, f"{what} ({self._name}){self._microbatch}"), self._agree_on_order, details)

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Forwards and backwards inside are of this microbatch: where several models take turns, the next one is known by
        it, and ranks need not agree on each turn."""
        self._microbatch = f", microbatch {number}"
        try:
            yield
        finally:
            self._microbatch = ""

    def start(
        self,
        collective: str,
        details: Details = no_details,
        group: Group | None = None,
        series: Series | None = None,
    ) -> None:
        """A collective is about to be started, over ``group``, or compiled code that has some: ``details`` says which."""
        if group is not None:
            self._note(collective, lambda: [(collective, group.name)])
            tracing.expect(lambda: self._named_launches("eagerly", [(collective, group.name)]))
        numbered = (f"{series[0]} ({self._name})", series[1]) if series is not None else None
        self._order.start(f"{collective} ({self._name})", self._agree_on_order, details, numbered)
        self.started += 1

    def begin_graph(self, phase: str, digest: str, schedule: str, buckets: Sequence[str], options: str) -> None:
        """A compiled graph is about to start its collectives.

        Args:
            phase: of the graph: forward, backward, inference.
            digest: of its schedule.
            schedule: its collectives, a line each, with numbers for ``buckets``.
            buckets: their names.
            options: it was compiled with.
        """
        due = self.reductions_are_due()
        self._begun[phase, digest] = schedule, buckets

        # What the journal keeps must not keep the model.
        experts = self.buckets if self.experts is not None else ()
        topologies = {bucket.plan.name: bucket.topology for bucket in experts if bucket.plan.is_expert}
        started = functools.partial(_launches, topologies, self.topology, schedule, buckets, due)
        self._note(f"{phase} graph", started)
        tracing.expect(lambda: self._named_launches(f"{phase} graph", started()))
        if phase == "inference" and not started():
            return  # as one rank may run alone: see enter_forward
        self.start(f"{phase} graph {digest} ({options})", lambda: [options, *named(schedule, buckets)])

    @property
    def begun_graphs(self) -> list[tuple[str, list[str]]]:
        """Phase and schedule of every compiled graph that has run, also of those that came out of a compile cache."""
        return [(phase, named(schedule, buckets)) for (phase, _), (schedule, buckets) in self._begun.items()]

    def _named_launches(self, where: str, launches: Sequence[tuple[str, str]]) -> Iterator[tracing.Launch]:
        """What collectives are called in traces."""
        counts: dict[str, int] = {}
        for what, group in launches:
            if group not in counts:
                counts[group] = compat.collectives_started(compat.process_group(group))
            counts[group] += 1
            yield tracing.Launch(self.steps, where, self._name, what, counts[group], group)

    def _note(self, what: str, launches: Callable[[], Sequence[tuple[str, str]]] = tuple) -> None:
        groups = [name for topology in self.topologies for name in topology.group_names]
        journal.note(self.steps, self._name, what, groups, launches)

    # -- after failures -----------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """A forward has raised ``error``. Nothing is awaited here: other ranks may never come."""
        self.eager.abandon()
        if self._failure is None:
            self._failure = type(error).__name__
            report_failure(self.group, error)
            journal.write(f"{self._failure}: {error}")

    def _recover(self) -> None:
        """Before the next collective after a failure: go on if all ranks have failed alike.

        If not, some have started collectives that others have not. The next ones would meet those: wrong values where
        sizes are equal by chance, a hang where not.
        """
        stopped = f"stopped after {self.started} collectives with {self._failure}"
        self.eager.abandon()
        try:
            # Ranks that wait for this one come when they have timed out.
            self.agree("The step before failed", [stopped])
            self.eager.settle()
            groups = [*(group for topology in self.topologies for group in topology.groups), *self._other_groups]
            for group in groups if has_others(self.group) else ():
                group.probe(self.topology.mesh.device_type)  # what failed everywhere may have been a collective
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} This rank has {stopped}. Call model.reset() on every rank; training can go on then, from the "
                "weights as they are."
            ) from None
        self._forget_failure()

    def _forget_failure(self) -> None:
        forget_failure(self.group)
        self._order.restart()
        self._failure = None
        for bucket in self.buckets:
            bucket.set_plan(bucket.plan)

    @property
    def _other_meshes(self) -> list[DeviceMesh]:
        return list({id(partition.mesh): partition.mesh for partition in self.partitions}.values())

    @property
    def _other_groups(self) -> tuple[Group, ...]:
        """Of ranks that hold other parts of parameters."""
        return tuple({group.name: group for partition in self.partitions for group in partition.groups}.values())

    def reset(self) -> None:
        """Start afresh after a failure: new process groups of the same ranks, no gradients, nothing under way.

        Raises:
            RuntimeError: not all ranks came within four times the process group's time-out: as long as it can take until
                each has its error.
        """
        self.agree("model.reset()", [], patience=4, is_last_resort=True)
        watchdog.leave(self)
        self.eager.abandon()
        self.eager.settle()
        for bucket in self.buckets:
            bucket.forget_resident()
        self.group = self.topology.renew()
        if self.experts is not None:
            self.experts.topology.renew()
        self.everyone = self.group
        if self._tensor_parallel:
            self.everyone = compat.new_group_like(self.group.group_name, self._ranks())
        for mesh in self._other_meshes:
            compat.renew_mesh(mesh)
        for partition in self.partitions:
            partition.forget_groups()
        self.started, self._failure = 0, None
        self._compare_steps()
        module = self._module()
        names = [name for name, _ in module.named_parameters()] if module is not None else []
        self._join_order(self._name.rpartition(" #")[0], names)  # of the new group
        self._forget_backward()
        self._reduced.clear()
        self._use_varies.clear()
        self.zero_gradients()
        self.synchronisation.microbatches = 0
        for bucket in self.buckets:
            bucket.set_plan(bucket.plan)
        self._label_modules()
        self._watch()

    def _compare_steps(self) -> None:
        """Do all ranks hold rows of the same weights? Collective; warns."""
        half = self._half_step or self._stepping is not None
        self._half_step, self._stepping = False, None
        everyone = everyones((self.steps, half), self.group, "optimizer steps")
        if len(set(everyone)) == 1 and not half:
            return
        ranks = dist.get_process_group_ranks(self.group)
        each = [
            f"rank {r} {count}{' and a part of one' if half else ''}"
            for r, (count, half) in zip(ranks, everyone, strict=True)
        ]
        warnings.warn(
            f"{self._name} was reset after {', '.join(each[:8])}{', ...' if len(each) > 8 else ''} optimizer steps: its rows are of "
            "different weights. Load a checkpoint before training goes on.",
            RuntimeWarning,
            stacklevel=3,
        )
        self.steps = max(count for count, _ in everyone)

    def touched(self, bucket: Bucket) -> None:
        """A bucket got gradients."""
        self._touched.add(bucket)
        self._reduced.add(bucket)
        self.enter_backward()

    @compat.python_only
    def _finish_backward(self) -> None:
        self.eager.finish_backward()
        if self._touched:  # else gradients of something else were computed
            self.synchronisation.microbatches += 1
            if self.reductions_are_due():
                self.finish_synchronisation()
            else:
                self._settle(
                    [bucket for bucket in self.buckets if bucket in self._touched and not bucket.gradient_waits]
                )
        self._touched.clear()
        self._backward = _BackwardIds()
        if self._found_nan:
            self._report_nan()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def reductions_are_due(self) -> bool:
        """Whether reductions that run once per optimizer step run in the backward at hand."""
        return self.synchronisation.is_due()

    def finish_synchronisation(self) -> None:
        """Reduce what still waits. Then every parameter that a rank has used has its gradient, on all ranks."""
        for bucket in self.buckets:
            if bucket.pending is not None and bucket.pending.total is not None:
                bucket.forget_abandoned(bucket.pending.total)
                self.eager.reduce_waiting(bucket)
        # The same buckets on all ranks, also where hooks have taken their gradients already.
        shown = {bucket for bucket in self.buckets if any(gradient is not None for gradient in bucket.gradients)}
        self._settle([bucket for bucket in self.buckets if bucket in shown | self._use_varies])
        self.synchronisation.microbatches = 0
        self.let_go()

    def _settle(self, buckets: Sequence[Bucket]) -> None:
        """Take gradients from parameters that no rank has used."""
        varying = [bucket for bucket in buckets if bucket in self._use_varies]
        everyones = dict(
            zip(varying, self.used_anywhere(varying, list(map(gradients.levels_of_use, varying))), strict=True)
        )
        for bucket in buckets:
            gradients.settle(bucket, everyones.get(bucket) or gradients.levels_of_use(bucket))
        self._use_varies.difference_update(buckets)

    def note_eager_use(self, bucket: Bucket) -> None:
        """The bucket's gradient was computed eagerly: which parameters it uses may differ between ranks. (A compiled graph is
        the same on all.)"""
        self._use_varies.add(bucket)

    @torch.no_grad()
    def used_anywhere(self, buckets: Sequence[Bucket], levels: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each bucket the largest of all ranks' levels of use, by parameter: one all-reduce of a byte for each parameter, of
        buckets that are spread over the same ranks. Collective.

        Args:
            levels: of this rank, as :func:`.gradients.levels_of_use`.
        """
        found = [list(mine) for mine in levels]
        for topology in self.topologies:
            group = topology.every
            positions = [
                i for i, bucket in enumerate(buckets) if bucket.plan.is_expert == (topology is not self.topology)
            ]
            mine = [level for i in positions for level in found[i]]
            if group.size == 1 or not mine:
                continue
            self.start("find out which parameters were used", group=group)
            result = compat.all_reduce_on_host(torch.tensor(mine, dtype=torch.uint8), "max", group.name).tolist()
            for i in positions:
                count = len(found[i])
                found[i], result = result[:count], result[count:]
        return found

    def let_go(self) -> None:
        """Of parameters that stay gathered for a step only."""
        for bucket in self.buckets:
            bucket.let_go()

    def set_accumulation(self, accumulation: Accumulation) -> None:
        """Hold other things between microbatches from now on. Compiled graphs are compiled anew.

        Raises:
            RuntimeError: gradients wait for their reduction.
            ValueError: the strategy cannot do it. Nothing has changed.
        """
        self._refuse_in_step("What stays between microbatches was changed")
        topologies = [bucket.topology.accumulating(accumulation) for bucket in self.buckets]
        self.topology = self.topology.accumulating(accumulation)
        if self.experts is not None:
            self.experts = replace(self.experts, topology=self.experts.topology.accumulating(accumulation))
        self._set_topologies(dict(zip(self.buckets, topologies, strict=True)))

    @contextlib.contextmanager
    def gathered(self, most: int | None) -> Iterator[None]:
        """Inside, buckets stay gathered between uses: the first ones, up to ``most`` bytes; None: all. Collective.

        Raises:
            RuntimeError, ValueError: as :meth:`set_accumulation`.
        """
        self._refuse_in_step("Parameters were to be kept gathered")
        before, kept, room = self.topology, {}, most
        for bucket in self.buckets:
            if bucket.topology.gather_group is None:
                continue
            if room is not None and bucket.plan.gathered_bytes > room:
                break
            room = None if room is None else room - bucket.plan.gathered_bytes
            kept[bucket] = bucket.topology.accumulating(replace(bucket.topology.accumulation, keeps_gathered=True))
        released = {bucket: bucket.topology for bucket in kept}
        if kept and not any(bucket.topology.gather_group for bucket in self.buckets if bucket not in kept):
            # No forward has a collective of its own then: ranks need not run the same ones.
            self.topology = before.accumulating(replace(before.accumulation, keeps_gathered=True))
        try:
            self._set_topologies(kept)
            self.refresh()
            yield
        finally:
            self.topology = before
            self._set_topologies(released)

    def _set_topologies(self, topologies: Mapping[Bucket, Topology]) -> None:
        for bucket, topology in topologies.items():
            bucket.set_plan(bucket.plan, topology)
        self._label_modules()

    @contextlib.contextmanager
    def whole_parameters(self, writeback: bool) -> Iterator[None]:
        """See :func:`.whole.whole_parameters`. Collective.

        Raises:
            RuntimeError: a step is under way.
            NotImplementedError: experts have other names on other ranks.
        """
        self._refuse_in_step("Full parameters were asked for")
        self.check_parameters_are_everyones("summon_full_params")
        module = self._module()
        assert module is not None
        self.eager.leave_stray_reads()
        with whole_parameters(self, module, writeback):
            yield

    def _refuse_in_step(self, what: str) -> None:
        if self.synchronisation.microbatches or self.eager.is_in_window:
            raise RuntimeError(
                f"{what} while a step is under way. Do it after optimizer.step() and zero_grad(), before the next forward."
            )

    def finish_synchronisation_if_needed(self) -> None:
        """Before an optimizer's step: a backward since the last complete reduction may have left something to do."""
        if self.synchronisation.microbatches:
            self.finish_synchronisation()

    def before_step(self) -> None:
        """An optimizer is about to use gradients: look whether they are all there. Collective before the first step."""
        self._order.check()
        reduced, self._reduced = self._reduced, set()
        if not reduced or not guards.enabled():  # without a backward before it: somebody has set gradients by hand
            return
        if self.steps == 0:
            self._note("checks before the first step")
            guards.check_first_step(self._shared_buffers(), self.buckets, reduced, self.group)
        if (told := guards.missing(self.buckets, reduced)) is not None and told not in self._told_missing:
            self._told_missing.add(told)
            warnings.warn(
                f"Step {self.steps} of {self._name}: backward has reduced gradients of {told}. Loss did not depend on the rest "
                "on any rank; it has no gradients, and optimizers leave it alone. (Told once.)",
                RuntimeWarning,
                stacklevel=4,
            )

    def forget_reduced(self) -> None:
        """The gradients so far were not for a step."""
        self._reduced.clear()

    def compare_buffers(self, when: str, group: dist.ProcessGroup | None = None) -> None:
        """Warn if buffers differ between ranks. Collective.

        Args:
            group: to talk over; by default the model's own.
        """
        guards.compare_buffers(self._shared_buffers(), group or self.group, when)

    def _shared_buffers(self) -> dict[str, Tensor]:
        module = self._module()
        assert module is not None
        names = (slot.name for bucket in self.buckets if bucket.plan.is_expert for slot in _slots(bucket))
        return _shared_buffers(module, frozenset(names))

    def zero_gradients(self, set_to_none: bool = True, kept: Collection[int] | None = None) -> None:
        """Of all parameters, except those whose ``id`` is in ``kept``; see :func:`.gradients.clear`."""
        for bucket in self.buckets:
            if set_to_none:
                gradients.clear(bucket, kept)
                continue
            for param, gradient in zip(bucket.params, bucket.gradients, strict=True):
                if gradient is not None and (kept is None or id(param) not in kept):
                    gradient.zero_()

    def inspect(self, bucket: Bucket, packed: Tensor) -> None:
        """Look for NaN in a bucket of this rank's gradients. The answer stays on the device."""
        self._found_nan.append((bucket, torch.stack([packed[s.offset : s.end].isnan().any() for s in _slots(bucket)])))

    def _report_nan(self) -> None:
        """Raise on every rank, if there was a NaN on any."""
        found, self._found_nan = self._found_nan, []
        params = [
            f"unit {bucket.plan.unit!r}, parameter {slot.name!r}" for bucket, _ in found for slot in _slots(bucket)
        ]
        flags = torch.cat([flag for _, flag in found]).tolist()
        mine = next((param for param, is_nan in zip(params, flags, strict=True) if is_nan), None)
        everyone = everyones(mine, self.group, "NaN in gradients")
        ranks = dist.get_process_group_ranks(self.group)
        culprits = [f"rank {rank}, {param}" for rank, param in zip(ranks, everyone, strict=True) if param]
        if culprits:
            self.zero_gradients()
            raise RuntimeError(
                f"NaN in gradients before they were reduced: {'; '.join(culprits[:8])}"
                f"{f' and {len(culprits) - 8} more' if len(culprits) > 8 else ''}. All gradients were set to None; "
                "weights and optimizer state are those of before."
            )

    def set_precision(self, precision: Precision) -> None:
        """Change the dtype that gradients are reduced in. Compiled graphs of another dtype stay for when it is back."""
        self.precision = precision
        for bucket in self.buckets:
            bucket.set_plan(replace(bucket.plan, comm_dtype=precision.comm_dtype(bucket.plan.compute_dtype)))
        self._label_modules()

    def _label_modules(self) -> None:
        self._schedules_replaced = self._order.schedules_replaced
        self.label_modules_of(*self.buckets)

    def label_modules_of(self, *buckets: Bucket) -> None:
        """Tell Dynamo's guards what has changed about buckets."""
        for module in {site.module for bucket in buckets for sites in bucket.sites for site in sites}:
            label_module(module, self._schedules_replaced)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def refresh(self, ahead: bool = False) -> None:
        """Start to gather, for strategies that keep parameters gathered, what has changed; in order, all at once.

        Args:
            ahead: of the forward that uses it; what stays for a step only is left alone then.
        """
        for bucket in self.buckets:
            if bucket.is_stale and not (ahead and bucket.topology.lets_go):
                self.start(f"gather {bucket.plan.name}, to keep", group=bucket.topology.resident_group)
                bucket.start_refresh()

    def await_gathers(self) -> None:
        """Wait for what :meth:`refresh` has started."""
        for bucket in self.buckets:
            bucket.await_gather()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Give ranks that hold the same pieces of parameters those of the first of them. Collective."""
        self.await_gathers()
        for bucket in self.buckets:
            if (group := bucket.topology.replicas) is not None:
                self.start(f"broadcast {bucket.plan.name}", group=group)
                dist.broadcast(bucket.flat.detach(), group=compat.process_group(group.name), group_src=0)
                torch.autograd.graph.increment_version(bucket.flat)  # residents are gathered from what is there now

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        duplicate = object.__new__(ShardedModel)
        memo[id(self)] = duplicate
        duplicate.topology, duplicate.experts, duplicate.group = self.topology, self.experts, self.group
        duplicate.partitions, duplicate._tensor_parallel = self.partitions, self._tensor_parallel
        duplicate.everyone = self.everyone
        duplicate.precision, duplicate.overlap = self.precision, self.overlap
        duplicate.synchronisation = copy.copy(self.synchronisation)
        duplicate.lineage = Lineage(continues=self.lineage.continues)
        duplicate._found_nan = []
        duplicate.started, duplicate.steps, duplicate._failure, duplicate._stepping = 0, 0, None, None
        duplicate._half_step = False
        duplicate._microbatch = ""
        # Copies are numbered by themselves: one rank may make some for its own use.
        self._copies += 1
        duplicate._order, duplicate._name, duplicate._copies = self._order, f"copy {self._copies} of {self._name}", 0
        duplicate._schedules_replaced = self._schedules_replaced
        duplicate._backward = _BackwardIds()
        duplicate._touched, duplicate._reduced, duplicate._told_missing = set(), set(), set()
        duplicate._use_varies = set()
        duplicate.compiled_graphs, duplicate._begun = [], {}
        duplicate.optimizers = Optimizers()
        duplicate.buckets = copy.deepcopy(self.buckets, memo)
        duplicate.eager = copy.deepcopy(self.eager, memo)
        module = self._module()
        assert module is not None
        duplicate._know(copy.deepcopy(module, memo))
        duplicate._watch()
        return duplicate


def _launches(
    topologies: Mapping[str, Topology], other: Topology, schedule: str, buckets: Sequence[str], due: bool
) -> Sequence[tuple[str, str]]:
    return launches(named(schedule, buckets), topologies, other, due)


_RANDOM = "random numbers to initialise with (call torch.manual_seed with one seed on all ranks)"


def _find_units(
    module: nn.Module, unit_modules: UnitClasses, unit_bytes: int | None, from_meta: bool
) -> tuple[Unit, ...]:
    check_not_replaced(module)
    _check_shardable(module, from_meta)
    check_references(module)
    if unit_modules is None and unit_bytes is not None:
        raise ValueError(
            f"unit_bytes={unit_bytes:,} joins small units, and fsdp_unit_modules is None: the whole model is one unit. Name "
            "the classes to shard by, or leave unit_bytes out."
        )
    if unit_modules is None and (blocks := repeated_blocks(module)):
        names = ", ".join(cls.__qualname__ for cls in blocks)
        warnings.warn(
            "fsdp_unit_modules is None: the whole model is one unit, so that all of its parameters are gathered at "
            f"once. Candidates for units, by repetition: {names}. Pass them, or 'auto' to use these.",
            stacklevel=4,
        )
    units = find_units(module, resolve_unit_classes(module, unit_modules))
    return join(module, units, unit_bytes) if unit_bytes is not None else units


def _check_shardable(module: nn.Module, from_meta: bool) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run the model once before fully_shard_model."
            )
        if type(param) is not nn.Parameter and type(param.data) not in (Tensor, DTensor) and not compat.is_fake(param):
            kind = type(param.data).__name__
            sharded = " It seems to be sharded already." if kind == "RowShardedTensor" else ""
            raise ValueError(
                f"Parameter {name!r} is a {kind}; fully_shard_model takes ordinary parameters, and DTensors.{sharded}"
            )
        if param.is_complex():
            raise NotImplementedError(
                f"Parameter {name!r} is complex, which collectives do not sum. Store torch.view_as_real(parameter)."
            )
        if param.is_meta and not from_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device, and has no value. Pass init_model_with_meta_device=True to "
                "initialise it, module by module, or initialise the model on a real device."
            )


@dataclass(frozen=True)
class BucketPlanner:
    """Decides on buckets: plain data, equal on all ranks."""

    topology: Topology
    precision: Precision
    gradient_policy: GradientPolicy
    layout_policy: LayoutPolicy | None
    whole: frozenset[str]
    experts: Experts | None = None

    def unit(self, unit: Unit) -> list[BucketPlan]:
        groups: dict[tuple[torch.dtype, bool, bool], list[ParamSpec]] = {}
        for param, sites in unit.params:
            spec = ParamSpec(
                sites[0].name, tuple(local_part(param).shape), whole=any(site.name in self.whole for site in sites)
            )
            is_expert = self.experts is not None and self.experts.of_sites([site.name for site in sites], param)
            groups.setdefault((param.dtype, param.requires_grad, is_expert), []).append(spec)
        plans: list[BucketPlan] = []
        for (dtype, requires_grad, is_expert), specs in groups.items():
            most = self.layout_policy.bucket_bytes if self.layout_policy is not None else None
            for part in in_parts(specs, dtype.itemsize, most):
                for layout in plan_layouts(
                    part, dtype.itemsize, self.topology_of(is_expert).shards, self.layout_policy
                ):
                    plans.append(self._bucket(unit, layout, dtype, requires_grad, is_expert))
        if len(plans) > 1:
            plans = [replace(plan, name=f"{unit.name}#{number}") for number, plan in enumerate(plans)]
        return plans

    def topology_of(self, is_expert: bool) -> Topology:
        """Of a bucket of experts, or of one of other parameters."""
        return self.experts.topology if is_expert and self.experts is not None else self.topology

    def _scale(self, is_expert: bool) -> float:
        """What sums over a bucket's ranks, or their averages, are multiplied by: gradients of experts are sums over all
        data-parallel ranks' tokens already, and become means over these."""
        ranks = self.topology.every.size
        if self.gradient_policy.scaling is Scaling.SUM_THEN_SCALE:
            return 1 / ranks
        if self.gradient_policy.scaling is Scaling.AVERAGE_IN_COLLECTIVE:
            return self.topology_of(is_expert).every.size / ranks
        return 1.0

    def _bucket(
        self, unit: Unit, layout: BucketLayout, dtype: torch.dtype, requires_grad: bool, is_expert: bool
    ) -> BucketPlan:
        return BucketPlan(
            unit.name,
            unit.name,
            layout,
            dtype,
            self.precision.main_dtype(dtype),
            requires_grad,
            self.precision.grad_dtype(dtype),
            self.precision.comm_dtype(dtype),
            "avg" if self.gradient_policy.scaling is Scaling.AVERAGE_IN_COLLECTIVE else "sum",
            self._scale(is_expert),
            self.gradient_policy.decoupled,
            self.gradient_policy.report_nan,
            is_expert,
        )


def _slots(bucket: Bucket) -> tuple[Slot, ...]:
    return bucket.plan.layout.slots


def _partitions(
    units: Sequence[Unit],
    plans: Sequence[tuple[Unit, Sequence[BucketPlan]]],
    partitioner: Partitioner,
    experts: Experts | None = None,
) -> dict[str, Partition | None]:
    """How parameters come divided, by name; of experts, those that are DTensors."""
    of_experts = Partitioner(experts.topology.mesh, of_experts=True) if experts is not None else partitioner
    names = _experts_in(plans)
    found = {}
    for unit in units:
        for param, sites in unit.params:
            name = sites[0].name
            found[name] = (of_experts if name in names else partitioner).of(name, param)
    return found


def _describe(module: nn.Module, plans: Sequence[tuple[Unit, Sequence[BucketPlan]]], check_values: bool) -> list[str]:
    """What all data-parallel ranks hold alike. Of experts that is how they look, and not their names and values."""
    experts = _experts_in(plans)
    lines = []
    for name, param in module.named_parameters():
        called = "an expert's" if name in experts else name
        lines.append(f"parameter {called}: {tuple(param.shape)}, {param.dtype}, requires_grad={param.requires_grad}")
    for name, buffer in _shared_buffers(module, experts).items():
        lines.append(f"buffer {name}: {tuple(buffer.shape)}, {buffer.dtype}")
    for _, unit_plans in plans:
        for plan in unit_plans:
            digest = plan.layout.signature if plan.is_expert else plan.layout.fingerprint
            lines.append(f"bucket {plan.name}: {digest}, main dtype {plan.main_dtype}")
    if check_values:
        shared = ((name, p) for name, p in module.named_parameters() if name not in experts and not p.is_meta)
        lines.extend(f"values of {name}: {value_digest(local_part(param))}" for name, param in shared)
    return lines


def _describe_experts(
    module: nn.Module, plans: Sequence[tuple[Unit, Sequence[BucketPlan]]], check_values: bool
) -> list[str]:
    """What ranks that hold the same experts hold alike besides."""
    experts = _experts_in(plans)
    params = [(name, param) for name, param in module.named_parameters() if name in experts]
    lines = [f"expert {name}: {tuple(param.shape)}" for name, param in params]
    if check_values:
        with_values = ((name, param) for name, param in params if not param.is_meta)
        lines.extend(f"values of {name}: {value_digest(local_part(param))}" for name, param in with_values)
    return lines


def _experts_in(plans: Sequence[tuple[Unit, Sequence[BucketPlan]]]) -> frozenset[str]:
    return frozenset(slot.name for _, found in plans for plan in found if plan.is_expert for slot in plan.layout.slots)


def _shared_buffers(module: nn.Module, experts: Collection[str]) -> dict[str, Tensor]:
    """Buffers that all ranks have: those that are not in a module that holds experts.

    Args:
        experts: names of parameters.
    """
    owners = {name.rpartition(".")[0] for name in experts}

    def is_shared(name: str) -> bool:
        parts = name.split(".")[:-1]
        return not any(".".join(parts[: i + 1]) in owners for i in range(len(parts)))

    return {name: buffer for name, buffer in module.named_buffers() if is_shared(name)}


def _check_experts(
    module: nn.Module, plans: Sequence[tuple[Unit, Sequence[BucketPlan]]], experts: Experts | None = None
) -> None:
    """Raise ValueError where experts are looked for and not found, or the other way round."""
    if experts is None:
        for name, param in module.named_parameters():
            if marked(param):
                raise ValueError(
                    f"Parameter {name!r} has allreduce=False: it is an expert that other data-parallel ranks do not have. "
                    "Pass expt_device_mesh, the mesh of the ranks that share it: of n data-parallel ranks and e-fold expert "
                    "parallelism one of (n / e, e) ranks, with dp_shard_dim as the name of the first dimension."
                )
    elif experts.is_default and not _experts_in(plans):
        raise ValueError(
            "expt_device_mesh is given, but no parameter is an expert: none is in a module called 'experts', or has the "
            "attribute allreduce=False. Pass is_expert=lambda name, parameter: ..., or leave expt_device_mesh out."
        )
