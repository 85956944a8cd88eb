"""A sharded model: the object that owns its buckets and coordinates everything that happens to them."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import compat, step_checks
from .eager.engine import EagerPolicy, EagerRuntime, EagerUnit, Window
from .eager.modules import label_module, shard_module
from .eager.summon import whole_parameters
from .exchange import Overlap
from .init import meta
from .layout import LayoutPolicy, Slot
from .memory import gradients
from .memory.bucket import Bucket, Home
from .memory.tensor import UnreducedGradient, refuse_unreduced
from .optim.tracking import Optimizers, watch_steps
from .plan.buckets import BucketPlanner
from .plan.experts import Experts
from .plan.model_plan import ModelPlan, divide, shared_buffers
from .plan.partition import Partition, Peers, local_part
from .plan.references import move_hooks, retire
from .plan.units import UnitClasses
from .precision import GradientPolicy, MixedPrecisionPolicy
from .ranks import profiling
from .ranks.agreement import (
    agree,
    agree_on_order,
    conclude,
    everyones,
    forget_failure,
    has_others,
    report_failure,
    value_digest,
)
from .ranks.collective_order import STEP, Details, Order, Phase, Series, no_details, order_of_group
from .ranks.graph_runs import launches, named
from .ranks.journal import journal
from .ranks.watchdog import watchdog
from .run_lineage import Lineage
from .topology import Accumulation, Group, Topology

__all__ = ["ShardedModel", "Synchronisation"]


@dataclass
class Synchronisation:
    """When reductions that run once per optimizer step are due.

    The first setting in this order that is not None counts: the innermost context manager around the backward,
    ``last_microbatch``, ``automatic``.

    Args:
        automatic: Whether reductions are due after every backward.
        last_microbatch: Whether the current backward is the last one before the optimizer's step; None: unknown.
        override: Setting of the innermost context manager; None: there is none.
        microbatches: Number of backwards since gradients were last reduced.
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
    """Ids of the running backward pass and of one nested in it."""

    outer: int | None = None
    inner: int | None = None


_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()

_RANDOM = "random numbers to initialise with (call torch.manual_seed with one seed on all ranks)"


class ShardedModel:
    """A model whose parameters are sharded in place.

    Args:
        module: The model, with full parameters on this rank.
        unit_modules: See :func:`~mfsdp_compile.runtime.plan.units.resolve_unit_classes`.
        topology: The data-parallel ranks, and what is sharded over them.
        every: Process group of the data-parallel ranks.
        precision: Dtypes of shards and gradients.
        gradient_policy: Options for gradients.
        overlap: Kinds of collectives that may overlap with computation.
        device: Device of shards and buffers.
        check_values: Whether to compare parameter values between ranks, in addition to names, shapes and dtypes.
        layout_policy: Limits for bucket layouts.
        whole: Names of parameters that should each be kept on one rank.
        eager_policy: Limits for the eager path.
        experts: Function that determines which parameters are experts, and which ranks hold them. None: all ranks hold
            the same parameters.
        tensor_parallel: Mesh dimension that Megatron's tensor-parallel attributes on parameters refer to.
        from_meta: Initializer of parameters and buffers on the meta device. None: there may be none on that device.

    Raises:
        ValueError, TypeError: Unit classes or parameters cannot be sharded. The model is unchanged.
        RuntimeError: Ranks hold different models. The model is unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_modules: UnitClasses,
        topology: Topology,
        every: dist.ProcessGroup,
        precision: MixedPrecisionPolicy,
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
        found: list[ModelPlan] = []
        initialiser = from_meta if meta.has_meta(module) else None

        def describe() -> list[str]:
            if initialiser is not None:
                initialiser.prepare(module)
            unit_bytes = layout_policy.unit_bytes if layout_policy is not None else None
            units = divide(module, unit_modules, unit_bytes, allows_meta=from_meta is not None)
            own = experts() if experts is not None else None
            planner = BucketPlanner(topology, precision, gradient_policy, layout_policy, frozenset(whole), own)
            found.append(ModelPlan.of(module, units, planner, tensor_parallel))
            # Includes versions, because passes and Inductor's choices of kernels differ between them.
            return [
                f"torch {torch.__version__}",
                str(topology),
                *([str(own)] if own is not None else []),
                f"tp_dim of {tensor_parallel.size()} ranks" if tensor_parallel is not None else "no tp_dim",
                *found[0].describe(check_values),
                *([f"{_RANDOM}: {meta.random_state(device)}"] if initialiser is not None and initialiser.draws else []),
            ]

        def describe_experts() -> tuple[Sequence[int], list[str]]:
            if (own := found[0].experts) is None:
                return (), []
            return own.ranks, found[0].describe_experts(check_values)

        agree(every, "fully_shard_model", describe, within=describe_experts, heeds_refusals=True)
        plan = found.pop()
        partitions, expert_names = dict(plan.partitions), plan.expert_names
        self.experts = plan.experts.known_to_all(sorted(expert_names), every) if plan.experts is not None else None
        if self.experts is not None:
            undivided = [name for name in expert_names if partitions[name] is None]
            partitions |= {name: self.experts.partition(module.get_parameter(name)) for name in undivided}
        self.partitions = tuple(partition for partition in partitions.values() if partition is not None)
        dense = (partition for name, partition in partitions.items() if name not in expert_names)
        self._tensor_parallel = tuple(partition for partition in dense if partition is not None)
        self._agree_on_replicas(module, partitions, check_values, every, expert_names)
        self.group, self.everyone = every, every
        if self._tensor_parallel:
            self.everyone = compat.new_group_like(every.group_name, self._ranks())

        # From here on, only running out of memory can fail.
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
        originals: dict[nn.Module, dict[str, nn.Parameter]] = {}  # parameters on the meta device, to restore on failure
        replaced: list[tuple[weakref.ref[nn.Parameter], str]] = []
        units = []
        for unit, bucket_plans in plan.units:
            members = {sites[0].name: (param, sites) for param, sites in unit.params}
            buckets = []
            for bucket_plan in bucket_plans:
                params = [members[slot.name] for slot in bucket_plan.layout.slots]
                parts = [partitions[slot.name] for slot in bucket_plan.layout.slots]
                shared_by = self.topologies[bucket_plan.is_expert]
                bucket = Bucket(bucket_plan, [p for p, _ in params], [s for _, s in params], shared_by, device, parts)
                bucket.owner = self
                buckets.append(bucket)
                for index, (original, sites) in enumerate(params):
                    replaced.append((weakref.ref(original), sites[0].name))
                    move_hooks(original, bucket.params[index])
                    for site in sites:
                        if initialiser is not None:
                            originals.setdefault(site.module, {})[site.attribute] = original
                        site.module._parameters[site.attribute] = bucket.params[index]  # releases the original
                        homes.setdefault(site.module, {})[site.attribute] = Home(bucket, index)
            units.append(EagerUnit(unit.name, unit.modules, unit.is_root, tuple(buckets)))
        del plan  # it holds the original parameters
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
        """Initialize parameters and buffers on the meta device.

        If this fails on one rank, or ranks have drawn different numbers, it fails on all ranks, and the model is
        unchanged.
        """

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
        """Return the model's buffers on this rank."""
        module = self._module()
        return list(module.buffers()) if module is not None else []

    @property
    def topologies(self) -> list[Topology]:
        """Topologies of all buckets: :attr:`topology`, and that of experts if they have their own."""
        return [self.topology] if self.experts is None else [self.topology, self.experts.topology]

    def _agree_on_replicas(
        self,
        module: nn.Module,
        partitions: Mapping[str, Partition | None],
        check_values: bool,
        every: dist.ProcessGroup,
        experts: Collection[str],
    ) -> None:
        """Raise unless parameters that are replicated over other mesh dimensions than ours are equal there.

        This includes ``experts``, by name, which tensor-parallel ranks do not divide. If some ranks of a mesh raise,
        all do.
        """
        # Compare by identity: meshes of the same ranks are equal, but may be different dimensions.
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
        # Ranks of a group that differs know it. The groups next to it, along the other dimensions, are told here.
        for group in [every, *asked[:-1]] if asked else []:
            agree(group, "fully_shard_model, ranks of other mesh dimensions", list, heeds_refusals=True)

    @compat.on_values
    def _ranks(self) -> list[int]:
        """Return all ranks that hold a part of the model.

        These are the data-parallel ranks, which divide its experts, and ranks of other dimensions that divide
        parameters.
        """
        mesh = self.topology.mesh
        meshes = dict.fromkeys(partition.beside(mesh) for partition in self._tensor_parallel)
        return sorted({rank for each in meshes for rank in each.mesh.flatten().tolist()})

    def buffer_bytes(self) -> int:
        """Return the size of the model's buffers on this rank, in bytes."""
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
        """Make sure that the running backward gets finished.

        Called by everything that happens to this model in backward, compiled or eager.
        """
        current = compat.backward_id()
        if current in (-1, self._backward.outer, self._backward.inner):
            return
        if self._backward.outer is None:
            self._backward.outer = current
            # Ranks agree on a backward with every strategy: it reduces something, which one rank cannot do alone.
            kind = "backward" if self.reductions_are_due() else "backward that accumulates"
            self._note(kind)
            self._order.enter(Phase(kind, f"{self._name}{self._microbatch}"), self._agree_on_order)
            compat.on_backward_end(self._finish_backward)
        else:
            # A backward inside a backward (reentrant checkpointing), or after one that raised. Gradients must be
            # complete when it returns; the outer backward handles parameters without a gradient.
            self._backward.inner = current
            compat.on_backward_end(self.eager.finish_reductions)

    def enter_compiled(self, buckets: Sequence[Bucket]) -> None:
        """Prepare for a compiled graph of this model that is about to run."""
        if compat.in_backward():
            self.enter_backward()  # a recomputation
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
        """Record what a compiled backward is about to compute for our buckets, and what autograd wants of it."""
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
        """Raise NotImplementedError if ranks have parameters of different names. ``what`` needs equal names."""
        for bucket in self.buckets:
            for split in bucket.splits:
                if isinstance(split.partition, Peers) and self.experts is not None and not self.experts.named_alike:
                    raise NotImplementedError(
                        f"Expert {split.name!r} is on some ranks only, and others have other names: {what} takes parameters that "
                        "all ranks know. Number experts from 0 on every rank, or stack them in one parameter, or use "
                        "torch.distributed.checkpoint with model.state_dict()."
                    )

    def check_complete(self) -> None:
        """Raise if the model was given a parameter that is in no bucket: each rank would train it alone."""
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
        """Outside of backward, clean up after a backward that raised."""
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
        """Raise on every rank unless all ranks pass the same arguments within ``patience`` process group timeouts.

        See :func:`.agreement.agree`.
        """
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
        """Create the process group for ``reshard_after_forward=size``, which backwards gather over, if there is none.

        The first call for a size is a collective.

        Raises:
            RuntimeError: Not all ranks have requested it.
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
        """Decisions about compiled graphs that ranks have agreed on; see :class:`.collective_order.Order`."""
        return self._order.schedules

    def conclude(
        self,
        topic: str,
        lines: Sequence[str],
        offer: Any,
        combine: Callable[[Sequence[Any]], Any],
        patience: float = 1.5,
    ) -> Any:
        """Combine the offers of all ranks; see :func:`.agreement.conclude`. Timeout as in :meth:`agree`."""
        return conclude(self.group, topic, lines, offer, combine, compat.timeout_of(self.group) * patience)

    def warn_others(self, error: BaseException) -> None:
        """Announce that this rank is about to fail with ``error``: from here on, errors on other ranks quote it."""
        report_failure(self.group, error, is_certain=False)

    def others_know(self) -> None:
        """Withdraw the announcement of :meth:`warn_others`, because all ranks have met."""
        forget_failure(self.group)

    def schedule_replaced(self) -> None:
        """Record that all ranks agreed on another schedule while a graph was compiled; see :meth:`forget_old_code`."""
        self._order.schedules_replaced += 1

    def forget_old_code(self) -> None:
        """Have all graphs compiled again if a schedule was replaced.

        Old code follows the old schedule: without this, some ranks would run the old schedule and others the new one.
        This affects all models of the group, because they may share code. Not to be called while Dynamo compiles,
        because Dynamo reads labels before and after.
        """
        if self._schedules_replaced != self._order.schedules_replaced:
            for model in _models:
                if model._order is self._order:
                    model._label_modules()

    def _agree_on_order(self, lines: Sequence[str], epoch: int) -> None:
        agree_on_order(self.group, lines, epoch)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Handle an optimizer that is about to change weights.

        All ranks must take the step, or their rows would belong to different weights. Inside a backward (one step per
        parameter, in a hook) nothing is compared, because ranks may take these steps in different orders.
        """
        if optimizer is self._stepping or compat.in_backward():
            return
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if isinstance(param.grad, UnreducedGradient):  # raise before weight decay changes anything
                refuse_unreduced(param.grad)
        self._check_step()
        self._order.enter(Phase(STEP, f"{type(optimizer).__name__} of {self._name}"), self._agree_on_order)
        self._stepping, self._version = optimizer, self._weights_version

    def end_step(self) -> None:
        """Mark the step that began last as complete."""
        if self._stepping is not None:
            self._stepping = None
            self.steps += 1

    @property
    def _weights_version(self) -> int:
        return sum(bucket.flat._version for bucket in self.buckets)

    def fail_step(self, error: BaseException) -> None:
        """Handle an error from the step that began last, if one has begun.

        If the step has changed no weight, it may be repeated. Ranks compare that before the next forward.
        """
        has_changed = self._stepping is not None and self._weights_version != self._version
        self._half_step |= has_changed
        self._stepping = None
        if self._failure is None:
            self._failure = type(error).__name__
            report_failure(self.group, error, is_certain=has_changed)

    def _check_step(self) -> None:
        """Raise RuntimeError if an optimizer's step was interrupted in the middle of its changes."""
        if self._stepping is None or compat.is_running(self._stepping):  # a running step may call a closure
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
        """Handle the beginning of a forward: of the model, a part of it, or compiled code."""
        kind = f"forward {'with' if torch.is_grad_enabled() else 'without'} gradients"
        self._note(f"{kind} of {what}")
        if self.topology.gather_group is not None:  # otherwise a single rank may evaluate alone
            self._order.enter(Phase(kind, f"{what} ({self._name}){self._microbatch}"), self._agree_on_order, details)

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Attribute the forwards and backwards inside to microbatch ``number``.

        If several models take turns, the number identifies the next model, so that ranks need not agree on each turn.
        """
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
        """Prepare for a collective over ``group``, or for compiled code with collectives, which ``details`` lists."""
        if group is not None:
            self._note(collective, lambda: [(collective, group.name)])
            profiling.expect(lambda: self._named_launches("eagerly", [(collective, group.name)]))
        numbered = (f"{series[0]} ({self._name})", series[1]) if series is not None else None
        self._order.start(f"{collective} ({self._name})", self._agree_on_order, details, numbered)
        self.started += 1

    def begin_graph(self, phase: str, digest: str, schedule: str, buckets: Sequence[str], options: str) -> None:
        """Prepare for a compiled graph that is about to start its collectives.

        Args:
            phase: Phase of the graph: forward, backward or inference.
            digest: Digest of its schedule.
            schedule: Its collectives, one per line, with numbers for ``buckets``.
            buckets: Names of the buckets.
            options: Options that it was compiled with.
        """
        due = self.reductions_are_due()
        self._begun[phase, digest] = schedule, buckets

        # Entries of the journal must not keep the model alive.
        experts = self.buckets if self.experts is not None else ()
        topologies = {bucket.plan.name: bucket.topology for bucket in experts if bucket.plan.is_expert}
        started = functools.partial(_launches, topologies, self.topology, schedule, buckets, due)
        self._note(f"{phase} graph", started)
        profiling.expect(lambda: self._named_launches(f"{phase} graph", started()))
        if phase == "inference" and not started():
            return  # a single rank may run it alone: see enter_forward
        self.start(f"{phase} graph {digest} ({options})", lambda: [options, *named(schedule, buckets)])

    @property
    def begun_graphs(self) -> list[tuple[str, list[str]]]:
        """Phase and schedule of every compiled graph that has run, including graphs from a compile cache."""
        return [(phase, named(schedule, buckets)) for (phase, _), (schedule, buckets) in self._begun.items()]

    def _named_launches(self, where: str, launches: Sequence[tuple[str, str]]) -> Iterator[profiling.Launch]:
        """Yield the collectives as they are named in traces."""
        counts: dict[str, int] = {}
        for what, group in launches:
            if group not in counts:
                counts[group] = compat.collectives_started(compat.process_group(group))
            counts[group] += 1
            yield profiling.Launch(self.steps, where, self._name, what, counts[group], group)

    def _note(self, what: str, launches: Callable[[], Sequence[tuple[str, str]]] = tuple) -> None:
        groups = [name for topology in self.topologies for name in topology.group_names]
        journal.note(self.steps, self._name, what, groups, launches)

    # -- after failures -----------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Handle ``error``, which a forward has raised. Wait for nothing here: other ranks may never arrive."""
        self.eager.abandon()
        if self._failure is None:
            self._failure = type(error).__name__
            report_failure(self.group, error)
            journal.write(f"{self._failure}: {error}")

    def _recover(self) -> None:
        """Check before the next collective after a failure that all ranks have failed in the same place.

        If they have not, some ranks have started collectives that others have not. The next collectives would be
        matched with those: wrong values if sizes happen to be equal, a hang if not.
        """
        stopped = f"stopped after {self.started} collectives with {self._failure}"
        self.eager.abandon()
        try:
            # Ranks that are waiting for this one arrive here once they have timed out.
            self.agree("The step before failed", [stopped])
            self.eager.settle()
            groups = [*(group for topology in self.topologies for group in topology.groups), *self._other_groups]
            for group in groups if has_others(self.group) else ():
                group.probe(self.topology.mesh.device_type)  # the failure on all ranks may have been a collective's
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
        """Groups of ranks that hold other parts of parameters."""
        return tuple({group.name: group for partition in self.partitions for group in partition.groups}.values())

    def reset(self) -> None:
        """Start over after a failure: new process groups of the same ranks, no gradients, nothing running.

        Raises:
            RuntimeError: Not all ranks called this within four process group timeouts, the longest time until each of
                them has its error.
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
        self._join_order(self._name.rpartition(" #")[0], names)  # the order of the new group
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
        """Warn if ranks hold rows of different weights, after different numbers of optimizer steps. A collective."""
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
        """Record that a bucket got gradients."""
        self._touched.add(bucket)
        self._reduced.add(bucket)
        self.enter_backward()

    @compat.python_only
    def _finish_backward(self) -> None:
        self.eager.finish_backward()
        if self._touched:  # else the backward computed gradients of something else
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
        """Whether reductions that run once per optimizer step run in the current backward."""
        return self.synchronisation.is_due()

    def finish_synchronisation(self) -> None:
        """Reduce deferred gradients. Afterwards, every parameter that any rank has used has its gradient everywhere."""
        for bucket in self.buckets:
            if bucket.pending is not None and bucket.pending.total is not None:
                bucket.forget_abandoned(bucket.pending.total)
                self.eager.reduce_waiting(bucket)
        # The same buckets on all ranks, even if hooks have taken their gradients off already.
        shown = {bucket for bucket in self.buckets if any(gradient is not None for gradient in bucket.gradients)}
        self._settle([bucket for bucket in self.buckets if bucket in shown | self._use_varies])
        self.synchronisation.microbatches = 0
        self.let_go()

    def _settle(self, buckets: Sequence[Bucket]) -> None:
        """Set gradients of parameters that no rank has used to None."""
        varying = [bucket for bucket in buckets if bucket in self._use_varies]
        everyones = dict(
            zip(varying, self.used_anywhere(varying, list(map(gradients.levels_of_use, varying))), strict=True)
        )
        for bucket in buckets:
            gradients.settle(bucket, everyones.get(bucket) or gradients.levels_of_use(bucket))
        self._use_varies.difference_update(buckets)

    def note_eager_use(self, bucket: Bucket) -> None:
        """Record that the bucket's gradient was computed eagerly: ranks may have used different parameters.

        A compiled graph uses the same parameters on all ranks.
        """
        self._use_varies.add(bucket)

    @torch.no_grad()
    def used_anywhere(self, buckets: Sequence[Bucket], levels: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return for each bucket and parameter the largest level of use over all ranks.

        A collective: one all-reduce of one byte per parameter for all buckets that are spread over the same ranks.

        Args:
            levels: Levels of this rank, from :func:`.gradients.levels_of_use`.
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
        """Release residents that stay gathered only within a step."""
        for bucket in self.buckets:
            bucket.let_go()

    def set_accumulation(self, accumulation: Accumulation) -> None:
        """Change what is kept between microbatches. Compiled graphs are compiled again.

        Raises:
            RuntimeError: A step is in progress.
            ValueError: The strategy does not support it. Nothing has changed.
        """
        self._refuse_in_step("What stays between microbatches was changed")
        topologies = [bucket.topology.accumulating(accumulation) for bucket in self.buckets]
        self.topology = self.topology.accumulating(accumulation)
        if self.experts is not None:
            self.experts = replace(self.experts, topology=self.experts.topology.accumulating(accumulation))
        self._set_topologies(dict(zip(self.buckets, topologies, strict=True)))

    @contextlib.contextmanager
    def gathered(self, most: int | None) -> Iterator[None]:
        """Context in which buckets stay gathered between uses: the first ones, up to ``most`` bytes; None: all of them.

        A collective.

        Raises:
            RuntimeError, ValueError: See :meth:`set_accumulation`.
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
            # No forward has collectives of its own then, so ranks need not run the same forwards.
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
        """See :func:`.summon.whole_parameters`. A collective.

        Raises:
            RuntimeError: A step is in progress.
            NotImplementedError: Experts have other names on other ranks.
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
        """Reduce, before an optimizer's step, what backwards since the last complete reduction have deferred."""
        if self.synchronisation.microbatches:
            self.finish_synchronisation()

    def before_step(self) -> None:
        """Check that an optimizer is about to use complete gradients. A collective before the first step."""
        self._order.check()
        reduced, self._reduced = self._reduced, set()
        if not reduced or not step_checks.enabled():  # no backward before this step: gradients were set by hand
            return
        if self.steps == 0:
            self._note("checks before the first step")
            step_checks.check_first_step(self._shared_buffers(), self.buckets, reduced, self.group)
        if (told := step_checks.missing(self.buckets, reduced)) is not None and told not in self._told_missing:
            self._told_missing.add(told)
            warnings.warn(
                f"Step {self.steps} of {self._name}: backward has reduced gradients of {told}. Loss did not depend on the rest "
                "on any rank; it has no gradients, and optimizers leave it alone. (Told once.)",
                RuntimeWarning,
                stacklevel=4,
            )

    def forget_reduced(self) -> None:
        """Forget which gradients were reduced so far: they were not for an optimizer step."""
        self._reduced.clear()

    def compare_buffers(self, when: str, group: dist.ProcessGroup | None = None) -> None:
        """Warn if buffers differ between ranks. A collective.

        Args:
            group: Process group to communicate over. None: the model's own.
        """
        step_checks.compare_buffers(self._shared_buffers(), group or self.group, when)

    def _shared_buffers(self) -> dict[str, Tensor]:
        module = self._module()
        assert module is not None
        names = (slot.name for bucket in self.buckets if bucket.plan.is_expert for slot in _slots(bucket))
        return shared_buffers(module, frozenset(names))

    def zero_gradients(self, set_to_none: bool = True, kept: Collection[int] | None = None) -> None:
        """Zero or drop gradients of parameters whose ``id`` is not in ``kept``; see :func:`.gradients.clear`."""
        for bucket in self.buckets:
            if set_to_none:
                gradients.clear(bucket, kept)
                continue
            for param, gradient in zip(bucket.params, bucket.gradients, strict=True):
                if gradient is not None and (kept is None or id(param) not in kept):
                    gradient.zero_()

    def inspect(self, bucket: Bucket, packed: Tensor) -> None:
        """Look for NaN in this rank's gradients of a bucket. The answer stays on the device."""
        self._found_nan.append((bucket, torch.stack([packed[s.offset : s.end].isnan().any() for s in _slots(bucket)])))

    def _report_nan(self) -> None:
        """Raise on every rank if any rank has found a NaN."""
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

    def set_precision(self, precision: MixedPrecisionPolicy) -> None:
        """Change the dtype in which gradients are reduced. Compiled graphs of other dtypes are kept for later use."""
        self.precision = precision
        for bucket in self.buckets:
            bucket.set_plan(replace(bucket.plan, comm_dtype=precision.comm_dtype(bucket.plan.compute_dtype)))
        self._label_modules()

    def _label_modules(self) -> None:
        self._schedules_replaced = self._order.schedules_replaced
        self.label_modules_of(*self.buckets)

    def label_modules_of(self, *buckets: Bucket) -> None:
        """Make changes of buckets visible to Dynamo's guards."""
        for module in {site.module for bucket in buckets for sites in bucket.sites for site in sites}:
            label_module(module, self._schedules_replaced)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def refresh(self, ahead: bool = False) -> None:
        """Start gathering all stale residents, in order, for strategies that keep parameters gathered.

        Args:
            ahead: Whether this runs ahead of the forward that uses them. Residents that stay only within a step are
                then skipped.
        """
        for bucket in self.buckets:
            if bucket.is_stale and not (ahead and bucket.topology.lets_go):
                self.start(f"gather {bucket.plan.name}, to keep", group=bucket.topology.resident_group)
                bucket.start_refresh()

    def await_gathers(self) -> None:
        """Wait for the gathers that :meth:`refresh` has started."""
        for bucket in self.buckets:
            bucket.await_gather()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy shards from the first of the ranks that hold the same shard to the others. A collective."""
        self.await_gathers()
        for bucket in self.buckets:
            if (group := bucket.topology.replicas) is not None:
                self.start(f"broadcast {bucket.plan.name}", group=group)
                dist.broadcast(bucket.flat.detach(), group=compat.process_group(group.name), group_src=0)
                torch.autograd.graph.increment_version(bucket.flat)  # residents must be gathered from the new values

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
        # Copies are numbered per model: one rank may make some for its own use.
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


def _slots(bucket: Bucket) -> tuple[Slot, ...]:
    return bucket.plan.layout.slots
