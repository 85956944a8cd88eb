"""A sharded model: the object that owns its buckets and coordinates everything that happens to them.

Each of its parts has state of its own ::

    members       ranks, topologies and partitions                  membership.py
    coordinator       what is announced to other ranks                  ranks/coordinator.py
    eager         what is gathered, and reductions that run         eager/engine.py
    grad_sync     when gradients are reduced; the running backward  grad_sync.py
    step_tracker  the running optimizer step                        optim/step_tracker.py
    buckets       shards, gathered tensors and gradients            memory/bucket.py
    joint         stages that run for all buckets together          guests/quantized/shards.py

:mod:`.shard` makes it; :mod:`.recovery` makes it usable after failures.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import compat
from ..eager.engine import EagerRuntime
from ..eager.modules import label_module
from ..geometry.bucket_plan import BucketPlan
from ..geometry.exchange import Overlap, buffer_bytes
from ..geometry.partition import Peers
from ..geometry.topology import Topology
from ..lanes.stage import Joint, Stage
from ..memory.bucket import Bucket
from ..memory.comm_buffers import BufferPool
from ..memory.registration import Registration
from ..optim.step_tracker import StepTracker
from ..optim.tracking import Optimizers, watch_steps
from ..owner import owners_of
from ..plan.model_plan import shared_buffers
from ..plan.precision import Policies
from ..ranks.agreement import agree
from ..ranks.coordinator import BegunGraph, Coordinator
from ..ranks.journal import journal
from ..ranks.watchdog import watchdog
from ..schedule.schedule import Schedule
from ..step import checks as step_checks
from ..step.grad_sync import GradSync, SyncSettings
from . import first_values, recovery
from .known_parameters import KnownParameters
from .membership import Membership
from .run_lineage import Lineage
from .summon import whole_parameters

_models: weakref.WeakSet[ShardedModel] = weakref.WeakSet()
"""All sharded models of the process: models that share compiled code learn of each other's schedules."""


class ShardedModel:
    """A model whose parameters are sharded in place. :func:`.shard.shard_model` makes one.

    Args:
        module: The model, with sharded parameters. Not kept alive.
        buckets: Its buckets, in the order of their units.
        eager: Its eager runtime.
        members: The ranks that hold it.
        coordinator: Its announcements to other ranks.
        precision: Its mixed-precision policies.
        overlap: Kinds of collectives that may overlap with computation.
        comm_buffers: Its communication buffers.
        registration: Their registration with NCCL, if it was asked for.
        ignored: Parameters of the module that are not sharded, by the name of each place: each rank has its own.

    Attributes:
        compiled_graphs: Records of the passes, added by the backend.
        optimizers: The optimizers that hold its parameters.
        compares_values: Whether noted values of parameters are to be compared between ranks; see
            :func:`.first_values.note`.
        awaits_values: Whether parameters from the meta device may have no values yet.
        lineage: Which run this is, for checkpoints.
        schedule: What was set for it, which compiled graphs take as default.
        captured_steps: Its :class:`~.captured_step.CapturedStep` objects, whose graphs end with the process groups.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        eager: EagerRuntime,
        members: Membership,
        coordinator: Coordinator,
        precision: Policies,
        overlap: Overlap,
        comm_buffers: BufferPool,
        registration: Registration | None = None,
        ignored: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.comm_buffers = comm_buffers
        self.registration = registration
        self.eager = eager
        self.schedule = Schedule()
        self.members = members
        self.coordinator = coordinator
        self.precision = precision
        self.overlap = overlap
        self.watched: set[Bucket] = set()
        self.grad_sync = GradSync(self.buckets, eager, coordinator, SyncSettings())
        self.step_tracker = StepTracker(self.buckets, coordinator)
        self.optimizers = Optimizers()
        joint: dict[type[Stage], list[Bucket]] = {}
        for bucket in self.buckets:
            if bucket.lane.is_joint:
                joint.setdefault(type(bucket.lane.step[0]), []).append(bucket)
        self.joint: Sequence[Joint] = [stage.joint_of(its) for stage, its in joint.items()]
        """What runs joint stages."""
        self.compares_values = False
        self.awaits_values = False
        self.lineage = Lineage()
        self.compiled_graphs: list[Any] = []
        self.captured_steps: weakref.WeakSet[Any] = weakref.WeakSet()
        self._module = weakref.ref(module)
        sharded = (param for bucket in self.buckets for param in bucket.params)
        self.known = KnownParameters(self, sharded, ignored or {})
        self._schedules_replaced = 0
        eager.owner = self
        for bucket in self.buckets:
            bucket.owner = self
        _models.add(self)
        watch_steps()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """Copy the model with its memory, but without the state of a running step."""
        duplicate = object.__new__(ShardedModel)
        memo[id(self)] = duplicate  # buckets refer to their owner
        buckets, eager, module, ignored = copy.deepcopy(
            (self.buckets, self.eager, self.module, self.known.places(self.module)), memo
        )
        members = copy.copy(self.members)
        coordinator = self.coordinator.of_copy(members)
        pool = copy.deepcopy(self.comm_buffers)
        registration = self.registration.of_copy(pool) if self.registration is not None else None
        ShardedModel.__init__(
            duplicate,
            module,
            buckets,
            eager,
            members,
            coordinator,
            self.precision,
            self.overlap,
            pool,
            registration,
            ignored,
        )
        if self.registration is not None and self.registration.is_expected:  # ranks use the copy together
            of_copy = weakref.WeakMethod(duplicate.manual_buffer_registration)
            pool.before_use = lambda: registered() if (registered := of_copy()) is not None else None
        duplicate.grad_sync.settings = copy.copy(self.grad_sync.settings)
        duplicate.grad_sync.microbatches = self.grad_sync.microbatches
        duplicate.compares_values, duplicate.awaits_values = self.compares_values, self.awaits_values
        duplicate.lineage = Lineage(continues=self.lineage.continues, refused=dict(self.lineage.refused))
        duplicate._schedules_replaced, duplicate.schedule = self._schedules_replaced, self.schedule
        return duplicate

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module | None:
        """The model's module; None if the program has dropped it."""
        return self._module()

    @property
    def ignored(self) -> dict[str, nn.Parameter]:
        """The parameters that are not sharded, by name."""
        return self.known.ignored(self.module)

    @property
    def parameter_names(self) -> list[str]:
        return [name for name, _ in self.module.named_parameters()] if self.module is not None else []

    @property
    def topology(self) -> Topology:
        """Topology of all parameters but experts."""
        return self.members.topology

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the data-parallel ranks."""
        return self.members.group

    @property
    def everyone(self) -> dist.ProcessGroup:
        """Process group of all ranks that hold a part of the model."""
        return self.members.everyone

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay at one address: they are zeroed where they would be dropped."""
        return any(bucket.plan.keeps_memory for bucket in self.buckets)

    def is_miscompiled(self) -> bool:
        """See :func:`.compat.is_miscompiled`."""
        return self.module is not None and compat.is_miscompiled(self.module, self.topology.mesh.device_type)

    def module_buffers(self) -> list[Tensor]:
        """Return the model's buffers on this rank."""
        return list(self.module.buffers()) if self.module is not None else []

    def buffer_bytes(self) -> int:
        """Return the size of the model's buffers on this rank, in bytes."""
        return sum(buffer.nbytes for buffer in self.module_buffers())

    def comm_buffer_bytes(self) -> int:
        """Return the size of the communication buffers once all of them have been used, in bytes."""
        return buffer_bytes(bucket.exchange for bucket in self.buckets)

    def manual_buffer_registration(self) -> bool:
        """Register the communication buffers with NCCL. Returns whether NCCL runs the model's collectives.

        Raises:
            ValueError: The model was sharded without ``nccl_ub``.
        """
        if self.registration is None:
            raise ValueError("manual_buffer_registration needs a model that was sharded with nccl_ub=True")
        return self.registration.register(self.buckets)

    def shared_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that all ranks have, by name."""
        assert self.module is not None
        return shared_buffers(self.module, self.members.expert_names)

    def compare_buffers(self, when: str, group: dist.ProcessGroup | None = None) -> None:
        """Warn if buffers differ between ranks. A collective.

        Args:
            group: Process group to communicate over. None: the model's own.
        """
        step_checks.compare_buffers(self.shared_buffers(), group or self.group, when)

    def check_parameters_are_everyones(self, what: str) -> None:
        """Raise NotImplementedError if ranks have parameters of different names. ``what`` needs equal names."""
        experts = self.members.experts
        for bucket in self.buckets:
            for split in bucket.splits:
                if isinstance(split.partition, Peers) and experts is not None and not experts.named_alike:
                    raise NotImplementedError(
                        f"Expert {split.name!r} is only on some ranks; others have experts with other names: {what} "
                        "takes parameters that all ranks know. Number experts from 0 on every rank, or stack them in "
                        "one parameter, or use torch.distributed.checkpoint with model.state_dict()."
                    )

    def fsdp2s_policy(self, plan: BucketPlan) -> MixedPrecisionPolicy:
        """Return a bucket's policy as FSDP2's class."""
        return list(self.precision)[plan.policy].as_fsdp2s

    def check_complete(self) -> None:
        """Raise if the model was given a parameter that is in no bucket: each rank would train it alone."""
        if (module := self.module) is not None:
            self.known.check(module)

    # -- forward and backward -----------------------------------------------------------------------------------------

    def enter_compiled(self, buckets: Sequence[Bucket]) -> None:
        """Prepare for a compiled graph of this model that is about to run."""
        if compat.in_backward():
            self.grad_sync.enter_backward()  # a recomputation
            return
        self.leave_backward()
        self.eager.leave_stray_reads()
        names = [bucket.plan.name for bucket in buckets]
        what = f"compiled code of {names[0] if len(names) == 1 else f'{len(names)} buckets, {names[0]} to {names[-1]}'}"

        def details() -> list[str]:
            return [f"bucket {name}" for name in names]

        if self.eager.is_in_window:
            self.eager.gathering.note_own_gathers(buckets)
        if self.eager.is_in_window and self.topology.gather_group is not None:
            self.coordinator.start(what, details)
        else:
            self.coordinator.enter_forward(what, details)
            self.coordinator.started += 1

    def begin_graph(self, graph: BegunGraph) -> None:
        """Prepare for a compiled graph that is about to start its collectives; see :meth:`.Coordinator.begin_graph`."""
        self.coordinator.begin_graph(graph, self.grad_sync.is_due())

    def leave_backward(self) -> None:
        """Outside of backward, clean up after a backward that raised."""
        if not compat.in_backward():
            self.step_tracker.check()
            if self.grad_sync.in_backward and self.coordinator.failure is None:
                self.coordinator.failure = "an error in backward"
            if self.coordinator.failure is not None:
                recovery.recover(self)
            self.grad_sync.forget_backward()
            if self.compares_values:
                first_values.compare(self.group, self.topology, self.buckets)
                self.compares_values = False
            if self.awaits_values:
                agree(
                    self.everyone,
                    "values of parameters from the meta device",
                    lambda: first_values.refuse_missing(self.buckets),
                )
                self.awaits_values = False

    def failed(self, error: BaseException) -> None:
        """Handle ``error``, which a forward has raised. Wait for nothing here: other ranks may never arrive."""
        self.eager.abandon()
        self.comm_buffers.drop()
        if self.coordinator.failure is None:
            self.coordinator.fail(error)
            journal.write(f"{self.coordinator.failure}: {error}")
        watchdog.failed_waits.explain_nccl(error)

    # -- code that Dynamo has compiled --------------------------------------------------------------------------------

    @property
    def schedules(self) -> dict[str, Any]:
        """Decisions about compiled graphs that ranks have agreed on; see :class:`.collective_order.Order`."""
        return self.coordinator.order.schedules

    def schedule_replaced(self) -> None:
        """Record that all ranks agreed on another schedule while a graph was compiled; see :meth:`forget_old_code`."""
        self.coordinator.order.schedules_replaced += 1

    def forget_old_code(self) -> None:
        """Have all graphs compiled again if a schedule was replaced.

        Old code follows the old schedule: without this, some ranks would run the old schedule and others the new one.
        This affects all models of the group, because they may share code. Not to be called while Dynamo compiles,
        because Dynamo reads labels before and after.
        """
        if self._schedules_replaced != self.coordinator.order.schedules_replaced:
            for model in _models:
                if model.coordinator.order is self.coordinator.order:
                    model.label_modules()

    def label_modules(self) -> None:
        """Make changes of all buckets visible to Dynamo's guards."""
        self._schedules_replaced = self.coordinator.order.schedules_replaced
        self.label_modules_of(*self.buckets)

    def label_modules_of(self, *buckets: Bucket) -> None:
        """Make changes of buckets visible to Dynamo's guards."""
        for module in {module for bucket in buckets for _, module, _ in bucket.holders()}:
            label_module(module, self._schedules_replaced, self.schedule.label)

    def make_portions(self, size: int) -> None:
        """Create the process group for ``reshard_after_forward=size``, which backwards gather over, if there is none.

        The first call for a size is a collective.

        Args:
            size: A number that divides the ranks; see :meth:`.Topology.portions_of`.

        Raises:
            RuntimeError: Not all ranks have requested it.
        """
        if size not in self.topology.portions:
            self.coordinator.note("process groups for reshard_after_forward")
            self.coordinator.agree("Compiling", [f"reshard_after_forward={size}"])
            self.topology.make_portions(size)

    @contextlib.contextmanager
    def whole_parameters(self, writeback: bool) -> Iterator[None]:
        """See :func:`.summon.whole_parameters`. A collective.

        Raises:
            RuntimeError: A step is in progress.
            NotImplementedError: Experts have other names on other ranks.
        """
        self.refuse_in_step("Full parameters were asked for")
        self.check_parameters_are_everyones("summon_full_params")
        assert self.module is not None
        self.eager.leave_stray_reads()
        with whole_parameters(self.buckets, self.module, self.members.agreeing if writeback else None):
            yield

    def refuse_in_step(self, what: str) -> None:
        if self.grad_sync.microbatches or self.eager.is_in_window:
            raise RuntimeError(
                f"{what} during a step. Do it after optimizer.step() and zero_grad(), before the next forward."
            )

    # -- parameters ---------------------------------------------------------------------------------------------------

    def refresh(self, ahead: bool = False) -> None:
        """Run joint stages again if shards have changed, such as their quantization, and start gathering stale
        residents.

        ``ahead`` of the forward that uses them, residents that stay only within a step are skipped, and so is what
        joint stages make: other optimizers may be about to step.
        """
        self.notice_writes()
        if not ahead:
            for each in self.joint:
                each.refresh(self.coordinator)
        for bucket in self.buckets:
            if bucket.is_stale and not (ahead and (bucket.topology.releases_resident or bucket.lane.is_joint)):
                for more, group in zip(("", ", stage 2"), bucket.topology.resident_groups, strict=False):
                    self.coordinator.start(f"gather {bucket.plan.name}, to keep{more}", group=group)
                bucket.start_refresh()
                if bucket.is_overwritten_by_gathers and not self.eager.is_in_window:
                    bucket.await_resident()

    def notice_writes(self) -> None:
        """Find writes to shards that left no trace, before what was made of the shards is used."""
        if not self.watched or self.coordinator.is_capturing:
            return
        for bucket in tuple(self.watched):
            bucket.notice_writes(is_watched := bucket.backing.aliases.any_ordinary())
            if not is_watched:
                self.watched.remove(bucket)

    def wholes(self, among: Collection[int] | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters and their whole tensors, bucket by bucket; ignored ones come last: copies of what this rank
        has.

        A collective: all ranks exhaust the iterator. Memory: one bucket.

        Args:
            among: The ``id`` of the parameters that are wanted; buckets without any are not gathered. None: all.
        """
        for bucket in self.buckets:
            wanted = [among is None or id(param) in among for param in bucket.params]
            if any(wanted):
                parts = bucket.gather_shards()
                for param, split, part, is_wanted in zip(bucket.params, bucket.splits, parts, wanted, strict=True):
                    if is_wanted:
                        yield param, split.assemble(part)
                del parts, part
        for param in self.ignored.values():
            if among is None or id(param) in among:
                yield param, param.detach().clone()

    def await_gathers(self) -> None:
        """Wait for the gathers that :meth:`refresh` has started."""
        for bucket in self.buckets:
            bucket.await_gather()

    def let_go(self) -> None:
        """Release residents that stay gathered only within a step."""
        for bucket in self.buckets:
            bucket.let_go()

    @torch.no_grad()
    def broadcast(self) -> None:
        """Copy shards from the first of the ranks that hold the same shard to the others. A collective."""
        self.await_gathers()
        for bucket in self.buckets:
            if (group := bucket.topology.replicas) is not None:
                self.coordinator.start(f"broadcast {bucket.plan.name}", group=group)
                shard = bucket.fetched()
                dist.broadcast(shard, group=compat.process_group(group.name), group_src=0)
                if bucket.lane.shard.in_host_memory:
                    bucket.flat.detach().copy_(shard)
                torch.autograd.graph.increment_version(bucket.flat)  # residents must be gathered from the new values

    def zero_gradients(self, set_to_none: bool = True, kept: Collection[int] | None = None) -> None:
        """Zero or drop gradients of parameters whose ``id`` is not in ``kept``; see :func:`.gradients.clear`."""
        self.grad_sync.zero(set_to_none and not self.keeps_gradients, kept)
        for param in self.ignored.values():
            if param.grad is None or (kept is not None and id(param) in kept):
                continue
            if set_to_none and not self.keeps_gradients:
                param.grad = None
            else:
                param.grad.zero_()


def any_exists() -> bool:
    """Whether this process has a sharded model."""
    return bool(_models)


def forget(model: ShardedModel) -> None:
    """Leave a model out of those that learn of each other's schedules, because it was dissolved."""
    _models.discard(model)


def models_of(buckets: Iterable[Bucket]) -> list[ShardedModel]:
    """Return the models that own ``buckets``, each once, in order."""
    return [owner for owner in owners_of(buckets) if isinstance(owner, ShardedModel)]
