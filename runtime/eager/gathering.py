"""Gathers and releases buckets, early and late enough: windows and reads of parameters ask for them.

Memory
    Nothing here frees memory that may still be referenced. A gathered bucket lives as long as a reference to it.
    Besides the root's units, and those that were asked to stay, the current unit and the prefetched ones (one, by
    default) are gathered. With ``keep_last``, the last unit of a forward stays for the backward that follows.

Order
    The next unit is gathered while the current one computes. The prediction follows the order of the last forward (at
    first, the order of registration), and in backward its reverse. A wrong prediction costs a gather, never
    correctness.
"""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import compat
from ..collectives.kernels import gather_into_buffer
from ..formats import quantize
from ..geometry.exchange import Overlap
from ..geometry.groups import Group
from ..lanes.plain import Run
from ..memory.bucket import Bucket
from ..memory.comm_buffers import enter_pool
from ..memory.extension import Extension, ExtensionInput, ExtensionOutput
from ..schedule.schedule import Schedule
from .context import StepContext, as_parameters, unseen
from .followed import FollowedSchedule
from .gathered_parameter import refuse_write
from .units import EagerUnit, UnitControl

_PATIENCE = 500
"""Milliseconds. An unknown reference to a gathered bucket is reported if it still exists after this time. A model waits
only once."""


class Planes(enum.Flag):
    """Planes of a bucket that is gathered plane by plane; see :mod:`..guests.quantized.planes`. Others have rows."""

    ROWS = enum.auto()
    COLUMNS = enum.auto()
    BOTH = ROWS | COLUMNS


@dataclass(eq=False)
class Gathered:
    """One bucket that is being gathered (``started``) or is gathered (``full``)."""

    unit: EagerUnit
    started: Tensor | None
    version: int  # of the shard, when it was gathered
    land: Run | None  # what waits for it, if that is not the backend's wait alone
    full: Tensor | None = None
    content: int = 0  # version of ``full`` right after the gather
    attached: list[Tensor | None] = field(default_factory=list)
    """The parameters, connected to their shards by autograd; None for those that have been read."""
    apart: dict[tuple[int, bool], tuple[Tensor, int]] = field(default_factory=dict)
    """Parameters with storage of their own, and their versions, by index and whether they train."""
    references: int = 0  # to the storage, if only this object refers to it
    planes: Planes = Planes.ROWS
    """What of it, if the bucket sends planes."""
    sent: ExtensionInput | None = None
    """What this rank has sent, if the parameter gathers itself."""
    made: ExtensionOutput | None = None
    """What its class has made of ``full``."""
    is_saved: bool = False
    """Whether autograd has saved a part of it for a backward."""
    is_kept: bool = False
    """Whether a forward has left it for its backward, which has not used it yet."""
    is_from_portions: bool = False
    """Whether portions of the gathered bucket were gathered, which are dequantized already."""

    @property
    def is_used(self) -> bool:
        """Whether anything else refers to the gathered bucket."""
        assert self.full is not None
        most = self.references + sum(param is not None for param in self.attached) + len(self.apart)
        for _ in range(_PATIENCE):
            if compat.references_to(self.full.untyped_storage()) <= most:
                return False
            time.sleep(0.001)  # gloo's thread may hold the result of a collective for a moment
        return True


class UnitState(enum.Enum):
    """What may happen to the gathered parameters of a unit.

    ===========================  =========  =====================================================================
    event                        becomes    exceptions
    ===========================  =========  =====================================================================
    a window of it opens         ON_DEMAND  of the root's units, only when the model's own window opens
    all of its windows closed    IDLE       HELD stays
    some of its windows closed   BEGUN      HELD stays; only for joined units, whose next module may be next
    another unit is gathered     ON_DEMAND  of IDLE units, which are released; BEGUN ones become IDLE first, unless the
                                            other is the root's, whose parameters may be read in between
    unshard()                    HELD       released by reshard(), or after its next forward. A backward releases the
                                            memory, and the next read gathers again, on all ranks
    reshard(), end of a forward  ON_DEMAND  HELD stays at the end of a forward that has not used it
    ===========================  =========  =====================================================================
    """

    ON_DEMAND = "gathered when something needs it; nothing is due"
    BEGUN = "some of its modules have run"
    IDLE = "its forward has run: released as soon as another unit is gathered"
    HELD = "kept gathered by unshard() until its next forward has run"


class UnitStates:
    """The states of a model's units. Those that are not ON_DEMAND are few, and listed."""

    def __init__(self) -> None:
        self._others: dict[EagerUnit, UnitState] = {}

    def __getitem__(self, unit: EagerUnit) -> UnitState:
        return self._others.get(unit, UnitState.ON_DEMAND)

    def use(self, unit: EagerUnit) -> None:
        """Handle a window that opens, or the release of a unit."""
        self._others.pop(unit, None)

    def ran(self, unit: EagerUnit, completely: bool) -> None:
        """Handle a window that has closed."""
        if self._others.get(unit) is not UnitState.HELD:
            self._others.pop(unit, None)  # the last one to close is the last to be released
            self._others[unit] = UnitState.IDLE if completely else UnitState.BEGUN

    def hold(self, unit: EagerUnit) -> None:
        self._others[unit] = UnitState.HELD

    def use_root(self) -> None:
        """Handle the model's own window, which opens: it uses the root's units."""
        for unit in [unit for unit, state in self._others.items() if unit.is_root and state is UnitState.HELD]:
            del self._others[unit]

    def take_idle(self, unit: EagerUnit) -> list[EagerUnit]:
        """Return the units that are to be released because ``unit`` is gathered."""
        if not self._others:
            return []
        ending = (UnitState.IDLE,) if unit.is_root else (UnitState.IDLE, UnitState.BEGUN)
        idle = [other for other, state in self._others.items() if state in ending]
        for other in idle:
            del self._others[other]
        return [other for other in idle if other is not unit]

    def end_forward(self) -> None:
        """Forget what is idle, because a forward has ended and released everything."""
        self._others = {unit: state for unit, state in self._others.items() if state is UnitState.HELD}

    def clear(self) -> None:
        self._others.clear()

    @property
    def holds_any(self) -> bool:
        return UnitState.HELD in self._others.values()


class Gathering:
    """What is gathered of one model.

    Args:
        step: The running step.
        units: Units in registration order.
        overlap: Kinds of collectives that may overlap with computation.

    Attributes:
        schedule: How early units are gathered, and how late reductions are awaited.
        gathered: The buckets that are gathered, or being gathered.
        by_storage: Buckets by the addresses of the memory that they and their parameters lie in.
        states: States of the units.
        controls: What the user has set for each unit.
        last_read: The unit that was read last.
        learns_hooks: Whether a bucket that is still referenced when it is released turns on ``hooks_everywhere``.
        hooks_everywhere: Whether windows hook saved tensors from their beginning on, and not from their first read.
        checks_content: Whether this forward looks for writes to gathered parameters that left no trace.
    """

    def __init__(self, step: StepContext, units: Sequence[EagerUnit], overlap: Overlap) -> None:
        self.step = step
        self.units = tuple(units)
        self.overlap = overlap
        self.unit_of = {bucket: unit for unit in self.units for bucket in unit.buckets}
        self.gathered: dict[Bucket, Gathered] = {}
        self.by_storage: dict[int, Bucket] = {}
        self.states = UnitStates()
        self.controls = {unit: UnitControl() for unit in self.units}
        self.last_read: EagerUnit | None = None
        self.learns_hooks = False
        self.hooks_everywhere = False
        self.checks_content = False
        self._gathered_by_graphs: set[EagerUnit] = set()  # by compiled code with a schedule of its own
        self._portions: dict[Bucket, tuple[Tensor, int]] = {}  # with the version of the shard
        self._order: list[EagerUnit] = []  # of this forward
        self._early: set[EagerUnit] = set()  # started before a reduction, and not used yet
        self._content_checked: set[Bucket] = set()
        self._learn(self.units)
        self.schedule = FollowedSchedule(Schedule(), self.units, overlap)

    # -- gather -------------------------------------------------------------------------------------------------------

    def start(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            state = self.gathered.get(bucket)
            if state is None or state.version != bucket.flat._version:
                self._start_all(unit)
                return

    @unseen
    @as_parameters
    def _start_all(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            state = self.gathered.get(bucket)
            if state is not None and state.version != bucket.flat._version:
                self.release_bucket(bucket)  # shards have changed since the gather
            if bucket not in self.gathered:
                in_backward = bucket.made_columns is not None and bucket.sends_planes and compat.backward_id() != -1
                self.start_bucket(unit, bucket, Planes.COLUMNS if in_backward else Planes.ROWS)

    def start_bucket(self, unit: EagerUnit, bucket: Bucket, plane: Planes) -> None:
        group = bucket.topology.gather_group
        if bucket.lane.step and bucket.is_stale:
            self.step.owner.refresh()
        started, land, is_from_portions = None, None, False
        in_backward = compat.backward_id() != -1
        if group is not None and in_backward and (kept := self._portions.pop(bucket, None)) is not None:
            portion, version = kept
            if is_from_portions := version == bucket.flat._version:
                few = bucket.topology.portions[bucket.plan.portions]
                self.step.announce("gather", bucket, few, f", portions of {few.size}")
                with compat.below_autograd():
                    started = compat.all_gather(portion, few.size, few.name)
        sent = _prepare(self.step, bucket, bucket.extension) if bucket.extension is not None else None
        if group is not None and started is None:
            started = self._start_gather(bucket, group, plane, sent)
            land = bucket.lane.land_gather if bucket.lane.gather is not None and sent is None else None
        self.gathered[bucket] = Gathered(
            unit, started, bucket.flat._version, land, planes=plane, sent=sent, is_from_portions=is_from_portions
        )

    def _start_gather(self, bucket: Bucket, group: Group, plane: Planes, sent: ExtensionInput | None = None) -> Tensor:
        self.step.announce("gather", bucket, group, ", columns" if plane is Planes.COLUMNS else "")
        if sent is not None:
            with compat.below_autograd():
                return compat.all_gather(sent.packed, group.size, group.name)
        (capacity, count) = bucket.exchange.gather_buffers
        with compat.below_autograd():
            shard = bucket.made_columns if plane is Planes.COLUMNS else None
            if capacity:
                enter_pool(self.step.owner.comm_buffers)
                shard = bucket.sent() if shard is None else shard
                return gather_into_buffer(shard, capacity, count, bucket.exchange.sent.dtype, group.size, group.name)
            shard = bucket.source() if shard is None else shard
            if bucket.lane.gather is not None:
                return bucket.lane.start_gather(shard, bucket.operands)
            alone = bucket.lane.travel("use", shard, bucket.operands)  # one rank
            return alone.clone() if alone is shard else alone

    def gather(self, bucket: Bucket, planes: Planes = Planes.ROWS) -> Gathered:
        """Return a gathered bucket. Start the gathers of its unit if nobody has, and wait."""
        state = self.gathered.get(bucket)
        if (
            state is not None
            and state.full is not None
            and state.version == bucket.flat._version
            and (planes in state.planes or not bucket.sends_planes)
        ):
            if state.is_kept and compat.backward_id() != -1:
                state.is_kept = False
                self._prefetch(state.unit, in_backward=True)
            return state
        return self._gather_now(bucket, planes)

    @unseen
    @as_parameters
    def _gather_now(self, bucket: Bucket, planes: Planes) -> Gathered:
        """Release idle units, gather the bucket, learn the order, and prefetch. In backward, release what is done."""
        unit = self.unit_of[bucket]
        self._early.discard(unit)
        for idle in self.states.take_idle(unit):
            self._end_forward_of(idle, is_last=False)
        state = self.gathered.get(bucket)
        # Otherwise ``start`` would gather buckets of the unit that backward has released.
        if state is None or state.version != bucket.flat._version:
            self.start(unit)
            state = self.gathered[bucket]
        sends_planes = bucket.made_columns is not None and bucket.sends_planes
        if sends_planes and planes not in state.planes and (state.full is not None or planes is not Planes.BOTH):
            self.release_bucket(bucket)
            self.start_bucket(unit, bucket, planes if planes is Planes.COLUMNS else Planes.ROWS)
            state = self.gathered[bucket]
        if state.started is not None:
            landing = (state.land, bucket.operands) if state.land is not None else ()
            state.full, state.started = self.step.wait(state.started, *landing), None
            if sends_planes:
                self._arrange(bucket, state, planes)
        elif state.sent is not None:
            state.full = state.sent.packed
        else:
            with compat.below_autograd():
                state.full = bucket.lane.travel("use", bucket.source(), bucket.operands)
        if bucket.extension is not None:
            assert state.sent is not None
            with torch.no_grad():
                state.made = bucket.extension.finish(bucket.plan, state.sent, state.full)
            addresses = map(compat.storage_address, state.made.leaves)
            self.by_storage.update({address: bucket for address in addresses if address})
        state.content = state.full._version
        state.references = bucket.references_if_alone(state.full)
        if address := compat.storage_address(state.full):
            self.by_storage[address] = bucket
        in_backward = compat.backward_id() != -1
        if not in_backward and (not self._order or self._order[-1] is not unit):
            self._order.append(unit)
        following = self._prefetch(unit, in_backward)
        if in_backward:
            # Buckets with trainable parameters are released when their gradients are complete. Frozen buckets have no
            # such event, and a hook may read a bucket after it, so these are released when another unit is gathered.
            for other, gathered in list(self.gathered.items()):
                is_waiting = gathered.is_kept or gathered.unit in self._early
                is_done = other in self.step.complete or not (other.plan.requires_grad or is_waiting)
                if is_done and gathered.unit is not unit and gathered.unit not in following:
                    self.release_checked(other)
        return state

    def _arrange(self, bucket: Bucket, state: Gathered, planes: Planes) -> None:
        """Arrange a gathered plane as modules take it, and the other beside it if both are asked for."""
        assert state.full is not None
        found = {state.planes: state.full}
        if planes is Planes.BOTH:
            other, group = planes ^ state.planes, bucket.topology.gather_group
            assert group is not None
            found[other] = self.step.wait(self._start_gather(bucket, group, other))
        with compat.below_autograd():
            arranged = [quantize.from_records(found[plane]) for plane in Planes if plane in found]
            state.full = torch.cat(arranged) if len(arranged) > 1 else arranged[0]
        state.planes |= planes

    def _prefetch(self, unit: EagerUnit, in_backward: bool) -> Sequence[EagerUnit]:
        """Start gathering the units that follow on one that is used. Return them."""
        following = self._following(unit, in_backward)
        if in_backward:
            following = [each for each in following if not self.step.complete.issuperset(each.buckets)]
        for each in following:
            if each.gathered_bytes <= self.schedule.largest_ahead and each not in self._gathered_by_graphs:
                self.start(each)
        return following

    def start_before_reduction(self, bucket: Bucket) -> None:
        """Start the gathers that a schedule file has right before the reduction of a bucket."""
        for unit in self.schedule.before_reduction.get(bucket, ()):
            if not self.step.complete.issuperset(unit.buckets) and unit not in self._gathered_by_graphs:
                self.start(unit)
                self._early.add(unit)

    # -- order --------------------------------------------------------------------------------------------------------

    def _following(self, unit: EagerUnit, in_backward: bool) -> Sequence[EagerUnit]:
        """Return the units whose gathers are due when a unit has been gathered."""
        control = self.controls[unit]
        chosen = control.backward_prefetch if in_backward else control.forward_prefetch
        if chosen is not None:
            return chosen
        schedule = self.schedule
        neighbors, ahead = (self._previous, schedule.ahead_in_backward) if in_backward else (self._next, schedule.ahead)
        following: list[EagerUnit] = []
        at = neighbors.get(unit)
        for distance in range(1, schedule.furthest + 1):
            if at is None or at is unit or at in following:
                break
            if ahead[at] >= distance:
                following.append(at)
            at = neighbors.get(at)
        return following

    def note_own_gathers(self, buckets: Iterable[Bucket]) -> None:
        """Record that compiled code gathers these buckets by a schedule of its own, so that nobody prefetches them."""
        self._gathered_by_graphs.update(self.unit_of[bucket] for bucket in buckets)

    def _learn(self, order: Sequence[EagerUnit]) -> None:
        self._next = dict(itertools.pairwise(order))
        self._previous = {later: earlier for earlier, later in itertools.pairwise(order)}

    # -- release ------------------------------------------------------------------------------------------------------

    def end_forward(self, keep_last: bool) -> None:
        """Release everything that a forward has used, except for what its backward is to find.

        Args:
            keep_last: Whether a backward may follow, which finds the unit that was read last.

        Raises:
            RuntimeError: Forward has written to a gathered parameter.
        """
        written = [bucket for bucket, state in self.gathered.items() if self._is_written(state)]
        for bucket, state in list(self.gathered.items()):
            self._check_content(bucket, state)
        keep_last = keep_last and self.schedule.keep_last
        for unit in self.units:
            self._end_forward_of(unit, keep_last and unit is self.last_read)
        for state in self.gathered.values():
            state.is_kept = True
        self.states.end_forward()
        if self._order:
            self._learn(self._order)
        for bucket in written:
            self.release_bucket(bucket)
            _refuse_writes(self.step, bucket)

    def end_backward(self) -> None:
        """Release everything."""
        for unit in self.units:
            self._release(unit)
        self._portions.clear()
        self._early.clear()

    def reset(self) -> None:
        """Release everything that belongs to a running step."""
        for unit in self.units:
            if self.states[unit] is not UnitState.HELD:
                self._release(unit)
        self._portions.clear()
        self._early.clear()
        self.states.end_forward()
        self._order.clear()

    def abandon(self) -> None:
        """Forget everything, without waiting: other ranks may not take part in the running collectives."""
        self.step.outstanding.add(state.started for state in self.gathered.values() if state.started is not None)
        self.gathered.clear()
        for bucket in self.unit_of:
            bucket.stage_states.clear()  # of what was under way; all ranks do this together
        self.by_storage.clear()
        self.states.clear()
        self._learn(self.units)  # ranks may have learned different orders

    def _end_forward_of(self, unit: EagerUnit, is_last: bool) -> None:
        """Release a unit that forward has used, except for what its backward is to find.

        Args:
            is_last: Whether forward used it last, and a backward may follow.
        """
        if self.states[unit] is UnitState.HELD:
            return
        for bucket in unit.buckets:
            reshard, state = bucket.plan.reshard_after_forward, self.gathered.get(bucket)
            before_backward = state is not None and torch.is_grad_enabled()
            stays = is_last if reshard is None else before_backward and not reshard
            if (kept := self.schedule.kept.get(bucket)) is not None:
                stays = kept and before_backward and state is not None and state.is_saved
            if stays:
                continue
            if reshard and before_backward:
                self._keep_portion(bucket)
            self.release_checked(bucket)

    def _keep_portion(self, bucket: Bucket) -> None:
        """Keep this rank's portion of a gathered bucket, if backward is to gather portions."""
        few, state = bucket.topology.portions.get(bucket.plan.portions), self.gathered[bucket]
        has_portions = not (bucket.sends_planes or bucket.plan.is_extension)
        if few is not None and state.full is not None and has_portions and not self._is_written(state):
            portion = state.full.view(few.size, -1)[few.rank].clone()
            self._portions[bucket] = portion, state.version

    def _release(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            self.release_checked(bucket)

    def release_checked(self, bucket: Bucket) -> None:
        """Release a bucket. Raise RuntimeError if it was written to."""
        state = self.gathered.get(bucket)
        self.release_bucket(bucket)
        if state is None:
            return
        if (self.step.depth > 0 or compat.backward_id() != -1) and self._is_written(state):
            _refuse_writes(self.step, bucket)
        if self.step.depth > 0 and state.version == bucket.flat._version:
            self._check_content(bucket, state)

    def release_bucket(self, bucket: Bucket) -> None:
        """Release a bucket without checks. A gather that runs is awaited."""
        state = self.gathered.pop(bucket, None)
        if state is None:
            return
        if state.started is not None:  # prefetched and not used: every collective must be awaited
            if state.land is not None:
                state.land(state.started, bucket.operands)
            else:
                compat.wait_tensor(state.started)
        if state.full is None:
            return
        if self.learns_hooks and not self.hooks_everywhere and state.is_used:
            # Autograd has saved it where no hooks were: a module used what another one returned. It stays in memory
            # until the backward, this time.
            self.hooks_everywhere = True
        apart = [param for param, _ in state.apart.values()]
        for tensor in (state.full, *apart, *(state.made.leaves if state.made is not None else ())):
            if address := compat.storage_address(tensor):
                self.by_storage.pop(address, None)

    # -- checks -------------------------------------------------------------------------------------------------------

    def _is_written(self, state: Gathered) -> bool:
        is_written = state.full is not None and state.full._version != state.content
        return is_written or any(param._version != version for param, version in state.apart.values())

    def _check_content(self, bucket: Bucket, state: Gathered) -> None:
        """Raise if the gathered bucket was written to without a trace: through NumPy, or ``.data`` of a view.

        Each rank compares the rows that it has sent. On a CPU this happens after each forward. On other devices, where
        looking at values synchronizes with the device, it happens only after the first forward.
        """
        group = bucket.topology.gather_group
        if state.full is None or group is None or not self.checks_content:
            return
        if bucket.extension is not None or "use" not in bucket.lane.own_parts:  # they may send anything
            return
        if state.full.device.type != "cpu" and (bucket in self._content_checked or self.step.is_capturing):
            return
        self._content_checked.add(bucket)
        mine = state.full.narrow(0, 0, bucket.plan.layout.numel).view(group.size, -1)[group.rank]
        if not compat.equal_bits(mine, bucket.own_part(columns=state.planes is Planes.COLUMNS)):
            _refuse_writes(self.step, bucket)

    # -- what the user controls ---------------------------------------------------------------------------------------

    def holds(self, bucket: Bucket) -> bool:
        """Whether :meth:`unshard` keeps a bucket gathered, so that its parameters can be read outside of forwards."""
        return self.states.holds_any and self.states[self.unit_of[bucket]] is UnitState.HELD

    def unshard(self, units: Sequence[EagerUnit]) -> Callable[[], None]:
        """Start gathering units, and keep them gathered until their next forward has run, or :meth:`reshard`.

        A collective, outside of backward.

        Returns:
            A function that waits until they are gathered. Their first use waits as well.
        """
        for unit in units:
            self.start(unit)
            self.states.hold(unit)

        def wait() -> None:
            for unit in units:
                for bucket in unit.buckets if self.states[unit] is UnitState.HELD else ():
                    self.gather(bucket)

        return wait

    def reshard(self, units: Sequence[EagerUnit]) -> None:
        """Release units."""
        for unit in units:
            self.states.use(unit)
            self._release(unit)


def _prepare(step: StepContext, bucket: Bucket, extension: Extension) -> ExtensionInput:
    try:
        with compat.below_function_transforms(), torch.no_grad():
            policy = step.owner.fsdp2s_policy(bucket.plan)
            return extension.prepare(bucket.plan, bucket.locations[0][0].module, bucket.topology.mesh, policy)
    except BaseException as error:
        step.owner.failed(error)  # in a backward, nothing else catches it
        raise


def _refuse_writes(step: StepContext, bucket: Bucket) -> None:
    try:
        refuse_write(bucket.plan.unit, [locations[0].name for locations in bucket.locations])
    except RuntimeError as error:
        if compat.backward_id() != -1:  # nothing else catches it
            step.owner.failed(error)
        raise
