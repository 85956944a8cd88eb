"""The eager path: gather, release and reduce from forwards and reads, without a compiler.

Windows
    A window is the outermost running forward of a module that owns parameters; usually the model's. Inside, reading
    ``module.weight`` gives the gathered parameter, and the first read of a bucket gathers it. So a parent that reads
    its child's weight, and a module that runs eagerly inside a compiled model, need nothing special.

Memory
    Nothing here frees memory that somebody may still look at. A gathered bucket lives as long as a reference to it.
    Autograd holds none: a saved tensor that lies in a bucket is packed as (bucket, offset, sizes, strides), and unpacking
    it in backward gathers the bucket again. (FSDP2 and Megatron-FSDP keep the tensor and resize its storage to zero;
    code that touches it at the wrong time then reads freed memory.) At most two units are gathered at a time, and the
    last one of a forward stays for the backward that follows.

Joined units
    A unit of several modules has a window for each. It is gathered when the first of them runs and let go of when all have
    run, or, where a batch skips some, when another unit is used. (FSDP2's ``fully_shard([a, b])`` keeps it then.)

Gradients
    One autograd node per bucket and window, ``_Reduce``, stands between the shard and everything computed from it.
    Autograd runs it when all contributions have arrived, however often and from wherever the parameters were used, and
    with None for those that were not used. It packs and starts the reduction; the previous one is awaited then.

Order
    The next unit is gathered while the current one computes: after the order of the last forward, or, at first, the
    order of registration; in backward, the reverse. A wrong guess costs a gather, never correctness.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import compat, gradients, guards
from .bucket import Bucket, Home
from .exchange import When
from .ops import pack, start_collective, start_stage
from .order import Series
from .topology import Group

__all__ = ["EagerPolicy", "EagerRuntime", "EagerUnit", "GatheredParameter", "Window", "as_gathered", "refuse_write"]


@dataclass(frozen=True)
class EagerPolicy:
    """The numbers that steer the eager path.

    Args:
        prefetch_bytes: the next unit is gathered early if it is at most this large; -1: never.
        reductions_in_flight: how many units' reductions may be under way before the oldest is awaited.
    """

    prefetch_bytes: int = 4 << 30
    reductions_in_flight: int = 1


@dataclass(frozen=True, eq=False)
class EagerUnit:
    """A unit's modules and buckets.

    Args:
        name: of the unit.
        modules: whose forwards are the unit's windows: one, several that were joined, or the model for parts of the root.
        is_root: whether it is a part of the root.
        buckets: of the unit.
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_root: bool
    buckets: tuple[Bucket, ...]

    @functools.cached_property
    def gathered_bytes(self) -> int:
        return sum(bucket.plan.gathered_bytes for bucket in self.buckets)

    @property
    def is_compiled(self) -> bool:
        """Compiled in place (``module.compile()``): its graph gathers for itself."""
        return not self.is_root and any(module._compiled_call_impl is not None for module in self.modules)


@dataclass(eq=False)
class _Gathered:
    """One bucket, on its way (``started``) or there (``full``)."""

    started: Tensor | None
    version: int  # of the shard, when it was gathered
    full: Tensor | None = None
    content: int = 0  # version of ``full``, as it came
    views: Sequence[Tensor] = ()


@dataclass(frozen=True, eq=False)
class _Reduction:
    """One stage of a bucket's reduction, under way."""

    bucket: Bucket
    stage: int
    result: Tensor
    used: frozenset[int]
    """Parameters, by index, with a gradient in it."""


@dataclass(frozen=True, eq=False)
class Window:
    """What the forward of one module means to the eager path.

    Args:
        runtime: of the model.
        unit: that the module is the window of, if any.
        owns: buckets of the root that the module holds parameters of.
        is_root: whether it is the model itself.
    """

    runtime: EagerRuntime
    unit: EagerUnit | None
    owns: tuple[Bucket, ...]
    is_root: bool

    def describe(self) -> str:
        """Whose forward this is, for comparison between ranks."""
        if self.is_root:
            return "the model"
        if self.unit is not None:
            return self.unit.name
        return self.owns[0].plan.name if self.owns else "a part of a unit"

    @property
    def parts(self) -> tuple[EagerUnit | Bucket, ...]:
        """What is done with when this window, and the others that have a share in it, have closed."""
        return (*self.owns, self.unit) if self.unit is not None else self.owns


@dataclass(frozen=True)
class _SavedView:
    """A tensor saved for backward that lies in a bucket, without its memory."""

    bucket: Bucket
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _SavedDTensor:
    """A DTensor saved for backward whose local part lies in a bucket."""

    local: Any
    spec: compat.DTensorSpec


def _as_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gathered parameters are ordinary tensors without history, wherever they are gathered: also in inference mode, and inside
    ``torch.func.grad``, ``vmap`` and the like."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with compat.below_function_transforms():
            if not torch.is_inference_mode_enabled():
                return function(*args)
            with torch.inference_mode(False), torch.no_grad():
                return function(*args)

    return wrapped


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gathers are not a part of what a user's selective checkpointing saves and counts: which of them run in a block depends on
    what is gathered already."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with compat.outside_selective_checkpoint():
            return function(*args)

    return wrapped


class BackwardOwner(Protocol):
    """The sharded model, as the eager path sees it."""

    def enter_forward(self, what: str) -> None:
        """A forward begins."""

    def start(self, collective: str, *, group: Group | None, series: Series | None) -> None:
        """A collective is about to be started, over ``group``. Raises if other ranks do something else."""

    def failed(self, error: BaseException) -> None:
        """A forward has raised, or a collective in backward."""

    def enter_backward(self) -> None:
        """Something happens in a backward pass: see that it gets finished."""

    def leave_backward(self) -> None:
        """A forward begins: a backward that was entered and not finished has raised. After a failure, raise unless all
        ranks have failed in the same place."""

    def touched(self, bucket: Bucket) -> None:
        """The bucket got gradients."""

    def note_eager_use(self, bucket: Bucket) -> None:
        """The bucket's gradient was computed eagerly."""

    def used_anywhere(self, buckets: Sequence[Bucket], levels: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each bucket the largest of all ranks' levels of use, by parameter. Collective."""

    def check_complete(self) -> None:
        """Raise if the model has parameters that are in no bucket."""

    def refresh(self) -> None:
        """Start to gather what stays gathered, if shards have changed since."""


class EagerRuntime:
    """Gathers and releases buckets of one model as its modules run.

    Args:
        units: in registration order.
        modules: all modules of the model.
        owner: told of what happens in backward.
        policy: bounds.
    """

    def __init__(
        self, units: Sequence[EagerUnit], modules: Iterable[nn.Module], owner: BackwardOwner, policy: EagerPolicy
    ) -> None:
        self.units = tuple(units)
        self.modules = frozenset(modules)
        self.policy = policy
        self._owner = owner
        self._unit_of = {bucket: unit for unit in self.units for bucket in unit.buckets}
        self._numbers = {bucket: number for number, bucket in enumerate(self._unit_of)}
        self._depth = 0
        self._hooks = contextlib.ExitStack()
        self._gathered: dict[Bucket, _Gathered] = {}
        self._by_storage: dict[int, Bucket] = {}
        self._anchors: dict[Bucket, tuple[Tensor, ...]] = {}
        self._idle: list[EagerUnit] = []  # their forward has run: released as soon as another unit is there
        self._begun: list[EagerUnit] = []  # joined, and some of their forwards have run: the next may be one of theirs
        self._last_read: EagerUnit | None = None
        self._ran: dict[EagerUnit | Bucket, set[Window]] = {}
        self._windows_of: dict[EagerUnit | Bucket, set[Window]] = {}
        self._reductions: deque[_Reduction] = deque()
        self._abandoned: list[Tensor] = []
        self._order: list[EagerUnit] = []  # of this forward
        self._content_checked: set[Bucket] = set()
        self._handed_out: weakref.WeakValueDictionary[int, GatheredParameter] = weakref.WeakValueDictionary()  # by id
        self._learn(self.units)

    # -- windows ------------------------------------------------------------------------------------------------------

    def in_forward(self) -> bool:
        """Whether the code that reads a parameter belongs to the model's forward."""
        return self._depth > 0 or compat.in_call_of(self.modules)

    @property
    def is_in_window(self) -> bool:
        return self._depth > 0

    def add_window(self, window: Window) -> None:
        for part in window.parts:
            self._windows_of.setdefault(part, set()).add(window)

    @compat.python_only
    @_unseen
    def enter(self, window: Window) -> None:
        if window.is_root and not compat.in_backward():
            self._depth = 0
        try:
            if self._depth == 0:
                self._open(window)
            if window.unit is not None:
                for waiting in (self._idle, self._begun):
                    if window.unit in waiting:
                        waiting.remove(window.unit)
                self._start(window.unit)
        except BaseException as error:
            if self._depth == 0:
                self._hooks.close()
                self._owner.failed(error)
            raise
        self._depth += 1

    @compat.python_only
    @_unseen
    def leave(self, window: Window) -> None:
        if self._depth == 0:
            return
        if not compat.in_backward():  # else recomputing: backward of the same unit is next
            for part in window.parts:
                ran = self._ran.setdefault(part, set())
                ran.add(window)
                if ran == self._windows_of[part]:
                    self._idle.append(part if isinstance(part, EagerUnit) else self._unit_of[part])
                elif isinstance(part, EagerUnit):
                    self._begun.append(part)
        self._depth -= 1
        if self._depth == 0:
            self._close(keep_last=window.is_root and torch.is_grad_enabled())

    @compat.python_only
    def leave_failed(self, window: Window, error: BaseException) -> None:
        """The window's forward has raised."""
        if self._depth > 1 or compat.in_backward():
            self.leave(window)  # somebody may catch it
        elif self._depth == 1:
            self._owner.failed(error)
        if compat.refuses_saved_tensor_hooks(error):
            raise RuntimeError(
                "Forward calls torch.func.grad (or vjp, jacrev, hessian), which cannot run inside of an eager forward of a "
                "sharded model: gathered parameters are kept out of what autograd saves by hooks, and torch.func allows "
                "none. Use torch.autograd.grad(outputs, inputs, create_graph=True) in forward, apply the transform to "
                "the model from outside, or compile the model."
            ) from error

    def _open(self, window: Window) -> None:
        if compat.in_backward():
            self._owner.enter_backward()
        else:
            self._owner.leave_backward()
            self.reset()
            self._retire_handed_out()
            mine = self.units if window.is_root else [window.unit] if window.unit is not None else []
            for bucket in [*(bucket for unit in mine for bucket in unit.buckets), *window.owns]:
                bucket.check_unchanged()
            if window.is_root:
                self._owner.check_complete()
            self._owner.enter_forward(window.describe())
        if not compat.saved_tensor_hooks_active() and compat.saved_tensor_hooks_allowed():
            # Somebody else's hooks (checkpointing, offloading) see our tensors and may keep them: correct, and theirs
            # to decide. Ours on top would hide tensors from a recomputation that counts them. Inside torch.func.grad
            # there can be none: gathered parameters stay in memory until the backward then.
            self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def _close(self, keep_last: bool) -> None:
        self._hooks.close()
        if compat.in_backward():
            return
        written = [bucket for bucket, state in self._gathered.items() if self._is_written(state)]
        for bucket, state in list(self._gathered.items()):
            self._check_content(bucket, state)
        for unit in self.units:
            if not keep_last or unit is not self._last_read:
                self._release(unit)
        self._idle.clear()
        self._begun.clear()
        if self._order:
            self._learn(self._order)
        for bucket in written:
            self._release_bucket(bucket)
            self._refuse_writes(bucket)

    def reset(self) -> None:
        """Let go of everything that belongs to a running step. Reductions under way are awaited and dropped."""
        self._hooks.close()
        self._depth = 0
        for unit in self.units:
            self._release(unit)
        while self._reductions:
            compat.wait_tensor(self._reductions.popleft().result)
        self._anchors.clear()
        self._idle.clear()
        self._begun.clear()
        self._ran.clear()
        self._order.clear()

    def abandon(self) -> None:
        """Like :meth:`reset`, without waiting: other ranks may not take part in what is under way."""
        self._abandoned += [state.started for state in self._gathered.values() if state.started is not None]
        self._abandoned += [reduction.result for reduction in self._reductions]
        self._gathered.clear()
        self._by_storage.clear()
        self._reductions.clear()
        self.reset()
        self._learn(self.units)  # ranks may have learned different orders

    def settle(self) -> None:
        """Wait for what was abandoned: until it is there, or has timed out."""
        while self._abandoned:
            with contextlib.suppress(RuntimeError):
                compat.wait_tensor(self._abandoned.pop())

    def leave_stray_reads(self) -> None:
        """Let go of what was read without a window."""
        if self._depth == 0:
            self.reset()

    # -- gather and release -------------------------------------------------------------------------------------------

    @_unseen
    def read(self, home: Home) -> Tensor:
        """A whole parameter, connected to its shard by autograd if gradients are recorded."""
        bucket = home.bucket
        view = self._gather(bucket).views[home.index]
        self._last_read = self._unit_of[bucket]
        if torch.is_grad_enabled() and bucket.params[home.index].requires_grad:
            with compat.below_function_transforms():  # a parameter is a constant to them, as an ordinary one is
                view = as_gathered(_Attach.apply(view, self._anchors_of(bucket)[home.index]), view.mfsdp_name)
        self.hand_out(view)
        return view

    def hand_out(self, param: GatheredParameter) -> None:
        """Forward is given a gathered parameter. Whoever keeps it beyond the next forward would compute with values of then."""
        self._handed_out[id(param)] = param

    def _retire_handed_out(self) -> None:
        for kept in list(self._handed_out.values()):
            kept.__class__ = OutdatedParameter
        self._handed_out.clear()

    def _anchors_of(self, bucket: Bucket) -> tuple[Tensor, ...]:
        if bucket not in self._anchors:
            self._anchors[bucket] = _Reduce.apply(bucket, self, *bucket.params)
        return self._anchors[bucket]

    @_as_parameters
    def _start(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            state = self._gathered.get(bucket)
            if state is not None and state.version != bucket.flat._version:
                self._release_bucket(bucket)  # shards have changed since
            if bucket not in self._gathered:
                if bucket.is_stale:
                    self._owner.refresh()
                group = bucket.topology.gather_group
                started = None
                if group is not None:
                    self._announce("gather", bucket, group)
                    shard = bucket.source().to(bucket.plan.compute_dtype)
                    started = compat.all_gather(shard, group.size, group.name)
                self._gathered[bucket] = _Gathered(started, bucket.flat._version)

    @_as_parameters
    def _gather(self, bucket: Bucket) -> _Gathered:
        state = self._gathered.get(bucket)
        if state is not None and state.full is not None and state.version == bucket.flat._version:
            return state
        unit = self._unit_of[bucket]
        if not unit.is_root:  # parameters of the root may be read between two modules of a joined unit
            self._idle += self._begun
            self._begun.clear()
        for idle in self._idle:
            if idle is not unit:
                self._release(idle)
        self._idle.clear()
        self._start(unit)
        state = self._gathered[bucket]
        if state.started is not None:
            state.full, state.started = self._await(state.started), None
        else:
            state.full = bucket.source().to(bucket.plan.compute_dtype)
        state.content = state.full._version
        state.views = [
            as_gathered(state.full[slot.offset : slot.end].view(slot.shape), slot.name)
            for slot in bucket.plan.layout.slots
        ]
        if address := compat.storage_address(state.full):
            self._by_storage[address] = bucket
        in_backward = compat.in_backward()
        if not in_backward and (not self._order or self._order[-1] is not unit):
            self._order.append(unit)
        following = (self._previous if in_backward else self._next).get(unit)
        if following is not None and self._may_prefetch(following):
            self._start(following)
        if in_backward:
            # Buckets with trainable parameters are released when their gradients are complete; for frozen ones
            # nothing tells, so they go when another unit comes.
            for other in self.units:
                if other is not unit and other is not following:
                    self._release(other, only_frozen=True)
        return state

    def _announce(self, what: str, bucket: Bucket, group: Group | None, more: str = "") -> None:
        try:
            series = f"{what}{more}", self._numbers[bucket]
            self._owner.start(f"{what} {bucket.plan.name}{more}", group=group, series=series)
        except RuntimeError as error:
            self._owner.failed(error)
            raise

    def _await(self, started: Tensor) -> Tensor:
        try:
            return compat.wait_tensor(started)
        except RuntimeError as error:
            self._owner.failed(error)  # in a backward nobody else sees it
            raise

    def _may_prefetch(self, unit: EagerUnit) -> bool:
        return not unit.is_compiled and unit.gathered_bytes <= self.policy.prefetch_bytes

    def _release(self, unit: EagerUnit, only_frozen: bool = False) -> None:
        for bucket in unit.buckets:
            if only_frozen and bucket.plan.requires_grad:
                continue
            state = self._gathered.get(bucket)
            self._release_bucket(bucket)
            if state is not None and self._depth > 0:
                if self._is_written(state):
                    self._refuse_writes(bucket)
                if state.version == bucket.flat._version:
                    self._check_content(bucket, state)

    def _release_bucket(self, bucket: Bucket) -> None:
        state = self._gathered.pop(bucket, None)
        if state is None:
            return
        if state.started is not None:  # gathered early and not used: a collective must not be left unawaited
            compat.wait_tensor(state.started)
        if state.full is not None and (address := compat.storage_address(state.full)):
            self._by_storage.pop(address, None)

    def _is_written(self, state: _Gathered) -> bool:
        return state.full is not None and state.full._version != state.content

    def _refuse_writes(self, bucket: Bucket) -> None:
        refuse_write(bucket.plan.unit, [sites[0].name for sites in bucket.sites])

    def _check_content(self, bucket: Bucket, state: _Gathered) -> None:
        """Writes that leave no trace, through NumPy or ``.data`` of a part of a parameter: each rank compares the rows that it has
        sent. On a CPU after each forward, elsewhere, where looking means waiting for the device, after the first one."""
        group = bucket.topology.gather_group
        if state.full is None or group is None or not guards.enabled():
            return
        if bucket in self._content_checked and state.full.device.type != "cpu":
            return
        self._content_checked.add(bucket)
        mine = state.full.view(group.size, -1)[group.rank]
        if not compat.equal_bits(mine, bucket.source().to(bucket.plan.compute_dtype)):
            self._refuse_writes(bucket)

    def _learn(self, order: Sequence[EagerUnit]) -> None:
        pairs = list(itertools.pairwise(order))
        self._next = dict(pairs)
        self._previous = {later: earlier for earlier, later in pairs}

    def for_compiled_code(self) -> contextlib.AbstractContextManager[None]:
        """Around compiled graphs that run inside a window. They save no gathered parameter, so there is nothing to pack."""
        return compat.without_hook(self._pack)

    # -- tensors saved for backward -----------------------------------------------------------------------------------

    @compat.python_only
    def _pack(self, tensor: Tensor) -> _SavedView | _SavedDTensor | tuple[Tensor, int]:
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            if self._by_storage.get(compat.storage_address(local) or 0) is not None:
                return _SavedDTensor(self._pack(local), tensor._spec)
            return tensor.detach(), tensor._version
        bucket = self._by_storage.get(compat.storage_address(tensor) or 0)
        if bucket is None or tensor.dtype != bucket.plan.compute_dtype:
            # Detached, because a saved output would otherwise keep its own node alive. Autograd does not look for
            # in-place changes of tensors that went through hooks, so that is done here.
            return tensor.detach(), tensor._version
        version = self._gathered[bucket].version
        return _SavedView(bucket, version, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    @compat.python_only
    def _unpack(self, packed: _SavedView | _SavedDTensor | tuple[Tensor, int]) -> Tensor:
        if isinstance(packed, _SavedDTensor):
            return compat.dtensor_of(self._unpack(packed.local), packed.spec)
        if isinstance(packed, tuple):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
                    f"{version} instead."
                )
            return tensor
        bucket = packed.bucket
        if bucket.flat._version != packed.version:
            raise RuntimeError(
                f"Parameters of {bucket.plan.unit!r} were changed in place between forward and backward (by an "
                "optimizer step?), so that gradients cannot be computed for the values that forward used."
            )
        self._owner.enter_backward()
        full = self._gather(bucket).full
        assert full is not None
        return full.as_strided(packed.size, packed.stride, packed.offset)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @compat.python_only
    def reduce(self, bucket: Bucket, whole_gradients: Sequence[Tensor | None]) -> None:
        """All gradients of a bucket are there: start to reduce them, and take in earlier reductions."""
        self._owner.enter_backward()
        used = frozenset(index for index, gradient in enumerate(whole_gradients) if gradient is not None)
        gradients.note_use(bucket, used)
        self._owner.note_eager_use(bucket)
        self._start_stage(bucket, 0, pack(whole_gradients, bucket.exchange), used)
        self._release_bucket(bucket)
        in_a_unit = sum(other.plan.requires_grad for other in self._unit_of[bucket].buckets)
        for _ in range(len(self._reductions) - self.policy.reductions_in_flight * in_a_unit):
            self._take_in()

    @compat.python_only
    def reduce_now(
        self, bucket: Bucket, whole_gradients: Sequence[Tensor | None], asked: gradients.Asked
    ) -> Sequence[Tensor | None]:
        """For ``torch.autograd.grad``: the bucket's gradients, reduced whether that is due or not, and accumulated nowhere."""
        self._owner.enter_backward()
        used = [int(gradient is not None) for gradient in whole_gradients]
        result = pack(whole_gradients, bucket.exchange)
        self._release_bucket(bucket)
        reduced = self._reduce_stages(bucket, 0, result, "for torch.autograd.grad")
        (levels,) = self._owner.used_anywhere([bucket], [used])
        return asked.select(bucket, reduced, {index for index, level in enumerate(levels) if level})

    def _start_stage(self, bucket: Bucket, stage: int, gradient: Tensor, used: frozenset[int]) -> None:
        will_run = bucket.owner.reductions_are_due() or not bucket.exchange.may_wait(stage)
        group = bucket.topology.stages[stage].group if will_run else None
        self._announce("reduce", bucket, group, f", stage {stage + 1}" if stage else "")
        token = bucket.pending.token if bucket.pending is not None else None
        started = start_stage(gradient, stage, bucket.exchange, token)
        self._reductions.append(_Reduction(bucket, stage, started, used))

    def _take_in(self) -> None:
        """Await the oldest stage under way. What it has reduced goes into the next stage, or is the gradient."""
        reduction = self._reductions.popleft()
        bucket, exchange, result = reduction.bucket, reduction.bucket.exchange, self._await(reduction.result)
        following = reduction.stage + 1
        if following < len(exchange.groups):
            self._start_stage(bucket, following, result, reduction.used)
            return
        if not bucket.gradient_waits:  # if it does, this is zeros
            gradients.accumulate(bucket, exchange.finish(result, bucket.plan.main_dtype), reduction.used)
        self._owner.touched(bucket)

    def reduce_waiting(self, bucket: Bucket) -> None:
        """Reduce what waits for it, outside of the backward that it came from."""
        assert bucket.pending is not None
        exchange = bucket.exchange
        first = exchange.when.index(When.IF_DUE.value)
        waiting = bucket.pending.take(exchange.comm_dtype)
        reduced = self._reduce_stages(bucket, first, waiting, "what waits")
        gradients.accumulate(bucket, reduced, gradients.used_so_far(bucket))

    def _reduce_stages(self, bucket: Bucket, first: int, gradient: Tensor, why: str) -> Tensor:
        """The reduced gradient, ``[shard_numel]`` in the main dtype, from stage ``first`` on."""
        exchange = bucket.exchange
        for stage in range(first, len(exchange.groups)):
            more = f", {why}{f', stage {stage + 1}' if stage else ''}"
            self._announce("reduce", bucket, bucket.topology.stages[stage].group, more)
            gradient = self._await(start_collective(gradient, stage, exchange))
        return exchange.finish(gradient, bucket.plan.main_dtype)

    def finish_reductions(self) -> None:
        while self._reductions:
            self._take_in()

    def finish_backward(self) -> None:
        self.finish_reductions()
        for unit in self.units:
            self._release(unit)
        self._anchors.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerRuntime:
        """For the copy of a model: nothing of a running step is taken along."""
        duplicate = object.__new__(EagerRuntime)
        memo[id(self)] = duplicate
        units, modules, owner = copy.deepcopy((self.units, tuple(self.modules), self._owner), memo)
        EagerRuntime.__init__(duplicate, units, modules, owner, self.policy)
        for window in copy.deepcopy({w for windows in self._windows_of.values() for w in windows}, memo):
            duplicate.add_window(window)
        return duplicate


def refuse_write(unit: str, names: Sequence[str]) -> NoReturn:
    """Raise RuntimeError: forward has written to a parameter of ``unit``, one of ``names``."""
    raise RuntimeError(
        f"Forward has written to a parameter of {unit!r} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}): "
        "what it wrote to was a gathered copy, and is lost. Write to parameters between steps (under torch.no_grad()), or "
        "hold what forward writes to in a buffer. An nn.Embedding with max_norm writes too."
    )


class GatheredParameter(nn.Parameter):
    """What ``module.weight`` is inside a forward: an ordinary tensor, but that writes through ``.data`` do not go unseen. (A
    tensor's own ``.data`` does not share its version.)"""

    __torch_function__ = compat.no_torch_function
    mfsdp_name: str

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        refuse_write(self.mfsdp_name.rpartition(".")[0], [self.mfsdp_name])


class OutdatedParameter(nn.Parameter):
    """A gathered parameter that something has kept from one forward to the next. Using it is an error."""

    mfsdp_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        found = [each for each in compat.tree_leaves((args, kwargs)) if isinstance(each, OutdatedParameter)]
        raise RuntimeError(
            f"Parameter {found[0].mfsdp_name!r} was gathered for an earlier forward, and something has kept it since (an "
            "attribute, a list, a cache): its values may be out of date. Read it from its module in each forward, or keep "
            "parameter.detach().clone() if values of then are what you want."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OutdatedParameter({self.mfsdp_name!r})"


def as_gathered(tensor: Tensor, name: str) -> Any:
    """``tensor``, as a :class:`GatheredParameter`."""
    tensor.__class__ = GatheredParameter
    vars(tensor)["mfsdp_name"] = name
    return tensor


class _Reduce(torch.autograd.Function):
    """From a bucket's parameters, which autograd knows as leaves, to one anchor for each: full shape, no memory. Its backward
    has the bucket's gradients."""

    @staticmethod
    @compat.python_only
    def forward(ctx: Any, bucket: Bucket, runtime: EagerRuntime, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Python's garbage collector does not see through autograd nodes: the model must not be reachable from one that
        # it holds itself.
        ctx.bucket, ctx.runtime = weakref.ref(bucket), weakref.ref(runtime)
        nothing = torch.empty((), dtype=bucket.plan.compute_dtype, device=bucket.flat.device)
        return tuple(nothing.expand(slot.shape) for slot in bucket.plan.layout.slots)

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, *whole_gradients: Tensor | None) -> tuple[Any, ...]:
        bucket, runtime = ctx.bucket(), ctx.runtime()
        asked = gradients.Asked.of([node for node, _ in ctx.next_functions])
        if bucket is None or runtime is None:
            return None, None, *asked.nothing
        gradients.tell_counting_hooks(bucket, [i for i in asked.added if whole_gradients[i] is None])
        if all(gradient is None for gradient in whole_gradients):
            return None, None, *asked.nothing
        if torch.is_grad_enabled():
            gradients.refuse_double_backward()
        if asked.returned:
            return None, None, *runtime.reduce_now(bucket, whole_gradients, asked)
        if asked.left_out:
            whole_gradients = tuple(None if i in asked.left_out else g for i, g in enumerate(whole_gradients))
        if any(gradient is not None for gradient in whole_gradients):
            runtime.reduce(bucket, whole_gradients)
        return None, None, *asked.nothing  # gradients are added to the parameters' when their reduction has arrived


class _Attach(torch.autograd.Function):
    """A gathered parameter in the place of its anchor.

    One per read, so that gradients reach ``_Reduce`` use by use and are summed in the order in which they arrive, which
    is what AOTAutograd traces for the compiled graph: floating-point sums are equal only in equal order.
    """

    @staticmethod
    def forward(ctx: Any, view: Tensor, anchor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return view.view_as(view)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:  # type: ignore[override]
        return None, gradient
