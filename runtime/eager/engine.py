"""The eager path: gathers, releases and reduces as modules run and parameters are read, without a compiler.

Windows
    A window is the outermost running forward of a module that owns parameters, usually the model's. Inside a window,
    ``module.weight`` returns the gathered parameter, and the first read of a bucket gathers it. A parent that reads its
    child's weight, or a module that runs eagerly inside a compiled model, therefore needs no special handling.

Memory
    Nothing here frees memory that may still be referenced. A gathered bucket lives as long as a reference to it.
    Autograd holds none: a saved tensor that lies in a bucket is packed as (bucket, offset, sizes, strides), and
    unpacking it in backward gathers the bucket again. (FSDP2 and Megatron-FSDP keep the tensor and resize its storage
    to zero; code that touches it at the wrong time then reads freed memory.) At most two units are gathered at a time,
    and the last unit of a forward stays gathered for the backward that follows.

    Tensors are packed by hooks, which cost more than anything else here. They are active from the first read of a
    parameter in a module's window to the end of that window, because this is where parameters are used. If a bucket is
    still referenced when it is released, a module has used what another one returned, and from the next forward on hooks
    are active everywhere.

    What other code keeps of an earlier forward stays in memory: what a function's ``ctx``, a closure or a module holds.
    It is a :class:`OutdatedParameter`, which only a backward may use, while the shards have the values that were
    gathered.

Joined units
    A unit of several modules has one window per module. The unit is gathered when the first of them runs and released
    when all have run. If a batch skips some of them, it is released when another unit is used. (FSDP2's
    ``fully_shard([a, b])`` keeps it gathered in that case.)

Gradients
    One autograd node per bucket and window, ``_Reduce``, stands between the shard and everything computed from it.
    ``_Attach`` puts the gathered parameters in its place, those of a bucket together.
    Autograd runs it when all contributions have arrived, no matter how often and from where the parameters were used,
    and passes None for parameters that were not used. The node packs the gradients, starts the reduction and waits for
    the previous one.

Served code
    Modules that are compiled one by one (``block.compile()``) are served: their graphs take gathered buckets from here
    and return gradients packed in buckets, so gathers and reductions overlap with compiled code as they do with eager
    code.

Order
    The next unit is gathered while the current one computes. The prediction follows the order of the last forward (at
    first, the order of registration), and in backward its reverse. A wrong prediction costs a gather, never
    correctness.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import compat
from ..collectives.ops import gather_into_buffer, pack, start_collective, start_stage
from ..formats import quantize
from ..formats.forms import Wrapper
from ..geometry.exchange import When
from ..geometry.topology import Group
from ..memory import gradients, host
from ..memory.bucket import Bucket, Home
from ..memory.comm_buffers import BufferPool, enter_pool
from ..memory.deferred_gradients import RequestedGradients
from ..memory.extension import Extension, Made, Sent
from ..memory.redistribute import as_real
from ..memory.tensor import hooks_of_parameters
from ..memory.written_gradients import WrittenGradients
from ..owner import ModuleRef, Owned, refuse_dropped
from ..ranks.conduct import Announcement, Conduct
from ..step import checks as step_checks
from ..step.grad_sync import GradSync

__all__ = [
    "EagerPolicy",
    "EagerRuntime",
    "EagerUnit",
    "GatheredParameter",
    "UnitControl",
    "Window",
    "as_gathered",
    "refuse_write",
]


@dataclass(frozen=True)
class EagerPolicy:
    """The numbers that control the eager path.

    Args:
        prefetch_bytes: The next unit is prefetched if it is at most this large, in bytes; -1: never.
        reductions_in_flight: How many units' reductions may be running before the eager path waits for the oldest.
    """

    prefetch_bytes: int = 4 << 30
    reductions_in_flight: int = 1


@dataclass(frozen=True, eq=False)
class EagerUnit:
    """A unit's modules and buckets.

    Args:
        name: Name of the unit.
        modules: Modules whose forwards are the unit's windows: one module, several that were joined, or the model for
            parts of the root.
        is_root: Whether the unit is a part of the root.
        buckets: Buckets of the unit.
        is_module: Whether it is one module of a larger unit, whose modules are gathered one by one.
    """

    name: str
    modules: tuple[ModuleRef, ...]
    is_root: bool
    buckets: tuple[Bucket, ...]
    is_module: bool = False

    @functools.cached_property
    def gathered_bytes(self) -> int:
        return sum(bucket.plan.gathered_bytes for bucket in self.buckets)


@dataclass(eq=False)
class UnitControl:
    """What the user has set for a unit. None: as the runtime does by itself.

    Args:
        forward_prefetch: Units to start gathering when this unit has been gathered in forward.
        backward_prefetch: The same for backward.
        reduced_hook: Called with each reduced gradient of the unit's buckets, ``[shard_numel]`` in the main dtype, before
            it is accumulated. It may change it in place.
    """

    forward_prefetch: tuple[EagerUnit, ...] | None = None
    backward_prefetch: tuple[EagerUnit, ...] | None = None
    reduced_hook: Callable[[Tensor], None] | None = None


class Planes(enum.Flag):
    """Planes of a bucket that is gathered plane by plane; see :mod:`..memory.planes`. Other buckets have rows."""

    ROWS = enum.auto()
    COLUMNS = enum.auto()
    BOTH = ROWS | COLUMNS


@dataclass(eq=False)
class _Gathered:
    """One bucket that is being gathered (``started``) or is gathered (``full``)."""

    unit: EagerUnit
    started: Tensor | None
    version: int  # of the shard, when it was gathered
    full: Tensor | None = None
    content: int = 0  # version of ``full`` right after the gather
    attached: list[Tensor | None] = field(default_factory=list)
    """The parameters, connected to their shards by autograd; None for those that have been read."""
    apart: dict[tuple[int, bool], tuple[Tensor, int]] = field(default_factory=dict)
    """Parameters with storage of their own, and their versions, by index and whether they train."""
    references: int = 0  # to the storage, right after the gather
    planes: Planes = Planes.ROWS
    """What of it, if the bucket sends planes."""
    sent: Sent | None = None
    """What this rank has sent, if the parameter gathers itself."""
    made: Made | None = None
    """What its class has made of ``full``."""
    is_from_portions: bool = False
    """Whether portions of the gathered bucket were gathered, which are dequantized already."""

    @property
    def is_used(self) -> bool:
        """Whether anything else refers to the gathered bucket."""
        assert self.full is not None
        ours = sum(param is not None for param in self.attached) + len(self.apart)
        return compat.references_to(self.full.untyped_storage()) > self.references + ours


@dataclass(frozen=True, eq=False)
class _RunningReduction:
    """One running stage of a bucket's reduction. After the last stage, the copy of its result to the host."""

    bucket: Bucket
    stage: int
    result: Tensor
    used: frozenset[int]
    """Indices of parameters with a gradient in it."""


@dataclass(frozen=True, eq=False)
class Window:
    """What the forward of one module means to the eager path.

    Args:
        owner: The model, which its modules keep alive by their windows.
        runtime: Eager runtime of the model.
        module: The module.
        unit: Unit whose window the module is, if any.
        owns: Buckets of the root that hold parameters of the module.
        is_root: Whether the module is the model itself.
    """

    owner: EagerOwner
    runtime: EagerRuntime
    module: ModuleRef
    unit: EagerUnit | None
    owns: tuple[Bucket, ...]
    is_root: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        """Copy the runtime first: a module that is copied before it leads here, and the runtime needs whole windows."""
        runtime = copy.deepcopy(self.runtime, memo)
        if id(self) in memo:
            found: Window = memo[id(self)]
            return found
        duplicate = memo[id(self)] = object.__new__(Window)
        of = {f.name: copy.deepcopy(getattr(self, f.name), memo) for f in fields(self) if f.name != "runtime"}
        Window.__init__(duplicate, runtime=runtime, **of)
        return duplicate

    def describe(self) -> str:
        """Describe whose forward this is, for comparison between ranks."""
        if self.is_root:
            return "the model"
        if self.unit is not None:
            return self.unit.name
        return self.owns[0].plan.name if self.owns else "a part of a unit"

    @property
    def parts(self) -> tuple[EagerUnit | Bucket, ...]:
        """The unit and root buckets that can be released once all windows that share them have closed."""
        return (*self.owns, self.unit) if self.unit is not None else self.owns


@dataclass(frozen=True)
class _SavedView:
    """A tensor saved for backward that lies in a bucket, recorded without its memory."""

    bucket: Bucket
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    leaf: int = -1
    """Number of the tensor that it lies in, of those that a parameter that gathers itself is made of."""


@dataclass(frozen=True)
class _SavedPlane:
    """A tensor saved for backward that wraps a plane of a parameter, recorded without its memory.

    Backward gets the plane of columns if ``columns``, else that of rows.
    """

    bucket: Bucket
    version: int
    index: int
    columns: bool


@dataclass(frozen=True)
class _SavedDTensor:
    """A DTensor saved for backward whose local part lies in a bucket."""

    local: Any
    spec: compat.DTensorSpec


@dataclass(frozen=True)
class _SavedWrapper:
    """A tensor saved for backward that wraps others, some of which lie in a bucket."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


_Saved: TypeAlias = "_SavedView | _SavedPlane | _SavedDTensor | _SavedWrapper | tuple[Tensor, int]"


def _as_parameters(function: Callable[..., Any]) -> Callable[..., Any]:
    """Create gathered parameters as ordinary tensors without history, wherever they are gathered.

    This includes inference mode and the inside of ``torch.func.grad``, ``vmap`` and similar transforms.
    """

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with compat.below_function_transforms():
            if not torch.is_inference_mode_enabled():
                return function(*args)
            with torch.inference_mode(False), torch.no_grad():
                return function(*args)

    return wrapped


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide gathers from a user's selective checkpointing, which saves and counts operators.

    Which gathers run in a block depends on what is gathered already.
    """

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with compat.outside_selective_checkpoint():
            return function(*args)

    return wrapped


class EagerOwner(Protocol):
    """What the eager path needs of its model."""

    @property
    def conduct(self) -> Conduct: ...

    @property
    def grad_sync(self) -> GradSync: ...

    @property
    def comm_buffers(self) -> BufferPool: ...

    @property
    def eager(self) -> EagerRuntime: ...

    def leave_backward(self) -> None:
        """A forward begins: a backward that was entered and not finished must have raised.

        After a failure, raises unless all ranks have failed in the same place.
        """

    def failed(self, error: BaseException) -> None:
        """A forward, or a collective in backward, has raised."""

    def check_complete(self) -> None:
        """Raise if the model has parameters that are in no bucket."""

    def refresh(self, ahead: bool = False) -> None:
        """Start gathering stale residents, possibly ahead of the forward that uses them."""


class EagerRuntime(Owned[EagerOwner]):
    """Gathers and releases buckets of one model as its modules run.

    Args:
        units: Units in registration order.
        modules: All modules of the model.
        policy: Limits on prefetches and reductions.
    """

    def __init__(self, units: Sequence[EagerUnit], modules: Iterable[nn.Module], policy: EagerPolicy) -> None:
        self.units = tuple(units)
        self.modules = weakref.WeakSet(modules)
        self.policy = policy
        self._unit_of = {bucket: unit for unit in self.units for bucket in unit.buckets}
        self._numbers = {bucket: number for number, bucket in enumerate(self._unit_of)}
        self._lent = frozenset(
            bucket
            for bucket in self._numbers
            if any(compat.transformer_engine.is_layer(type(module)) for _, module, _ in bucket.holders())
        )
        self._depth = 0
        self._hooked_at = 0  # depth of the window that has installed our hooks on saved tensors; 0: none has
        self._hooks_everywhere = False  # else in windows that have read parameters
        self._learns_hooks = False  # whether this forward tells if hooks are needed everywhere
        self._gathered: dict[Bucket, _Gathered] = {}
        self._by_storage: dict[int, Bucket] = {}
        self._anchors: dict[Bucket, tuple[Tensor, ...]] = {}
        self._served: dict[Bucket, list[gradients.Backward]] = {}
        self._written: dict[Bucket, WrittenGradients] = {}
        self._gather_themselves: set[EagerUnit] = set()  # by compiled code with a schedule of its own
        self._idle: list[EagerUnit] = []  # their forward has run: released as soon as another unit is gathered
        self._begun: list[EagerUnit] = []  # joined units of which some modules have run: the next may be one of theirs
        self._last_read: EagerUnit | None = None
        self._controls = {unit: UnitControl() for unit in self.units}
        self._held: set[EagerUnit] = set()  # by unshard(), until their next forward
        self._portions: dict[Bucket, tuple[Tensor, int]] = {}  # with the version of the shard
        self._complete: set[Bucket] = set()  # whose gradients the running backward has computed
        self._ran: dict[EagerUnit | Bucket, weakref.WeakSet[Window]] = {}
        self._windows_of: dict[EagerUnit | Bucket, weakref.WeakKeyDictionary[Window, None]] = {}  # in order
        self._reductions: deque[_RunningReduction] = deque()
        self._abandoned: list[Tensor] = []
        self._order: list[EagerUnit] = []  # of this forward
        self._content_checked: set[Bucket] = set()
        self._announced: dict[tuple[str, str, Bucket], Announcement] = {}
        self._handed_out: list[tuple[weakref.ref[Tensor], Bucket, int]] = []  # with the version of the shard
        self._handed_out_wrapped: list[tuple[weakref.ref[Tensor], Wrapper, str]] = []
        self._learn(self.units)

    # -- windows ------------------------------------------------------------------------------------------------------

    def in_forward(self) -> bool:
        """Whether the code that reads a parameter belongs to the model's forward."""
        return self._depth > 0 or compat.in_call_of(self.modules) or compat.in_recomputation()

    def is_in_use(self, bucket: Bucket) -> bool:
        """Whether code that reads a parameter of the bucket from its module gets the gathered one.

        In a backward, that is what hooks of modules and activations compute with, and functions that keep a module. Hooks
        of parameters get shards, so they read shards too.
        """
        in_backward = compat.in_backward() and not hooks_of_parameters.run
        return self._depth > 0 or in_backward or self.holds(bucket) or compat.in_call_of(self.modules)

    @property
    def is_in_window(self) -> bool:
        return self._depth > 0

    def add_window(self, window: Window) -> None:
        for part in window.parts:
            self._windows_of.setdefault(part, weakref.WeakKeyDictionary())[window] = None

    @compat.python_only
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
                self._held.discard(window.unit)
                self._start(window.unit)
            if window.is_root:
                self._held.difference_update([unit for unit in self._held if unit.is_root])
        except BaseException as error:
            if self._depth == 0:
                self.owner.failed(error)
            raise
        self._depth += 1
        if self._hooks_everywhere:
            self._hook()

    @compat.python_only
    def leave(self, window: Window) -> None:
        if self._depth == 0:
            return
        if self._hooked_at == self._depth:
            self._unhook()
        if not compat.in_backward():  # else this is a recomputation, and the backward of the same unit is next
            for part in window.parts:
                ran = self._ran.setdefault(part, weakref.WeakSet())
                ran.add(window)
                if len(ran) == len(self._windows_of[part]):
                    self._idle.append(part if isinstance(part, EagerUnit) else self._unit_of[part])
                elif isinstance(part, EagerUnit):
                    self._begun.append(part)
        self._depth -= 1
        if self._depth == 0:
            self._close(window.is_root and torch.is_grad_enabled())

    @compat.python_only
    def leave_failed(self, window: Window, error: BaseException) -> None:
        """Handle an exception that the window's forward has raised."""
        if self._depth > 1 or compat.in_backward():
            self.leave(window)  # an outer caller may catch the exception
        elif self._depth == 1:
            self.owner.failed(error)
        if compat.refuses_saved_tensor_hooks(error):
            raise RuntimeError(
                "Forward calls torch.func.grad (or vjp, jacrev, hessian), which cannot run inside the eager forward of "
                "a sharded module after it has read a parameter: gathered parameters are kept out of what autograd saves "
                "by hooks, and torch.func allows none. Use torch.autograd.grad(outputs, inputs, create_graph=True) in "
                "forward, apply the transform to the model from outside, or compile the model."
            ) from error

    @_unseen
    def _open(self, window: Window) -> None:
        if compat.in_backward():
            self.owner.grad_sync.enter_backward()
        else:
            self.owner.leave_backward()
            self.reset()
            self._retire_handed_out()
            mine = self.units if window.is_root else [window.unit] if window.unit is not None else []
            for bucket in [*(bucket for unit in mine for bucket in unit.buckets), *window.owns]:
                bucket.check_unchanged()
            if window.is_root:
                self.owner.check_complete()
            self._learns_hooks = torch.is_grad_enabled()
            self._hooks_everywhere |= self.owner.comm_buffers.is_strict  # no buffer may stay in use
            self.owner.conduct.enter_forward(window.describe())

    def _hook(self) -> None:
        """Keep gathered parameters out of what autograd saves until the innermost window ends.

        Hooks that others installed (checkpointing, offloading) see our tensors and may keep them. That is correct, and
        it is their decision. Our hooks on top would hide tensors from a recomputation that counts them. torch.func.grad
        allows no hooks: gathered parameters then stay in memory until the backward.
        """
        if self._hooked_at:
            return
        owner = self.owner  # as long as a graph may need parameters

        def unpack(packed: _Saved) -> Tensor:
            return owner.eager._unpack(packed)

        if compat.hook_saved_tensors(self._pack, unpack):
            self._hooked_at = self._depth
        else:
            self._learns_hooks = False

    def _unhook(self) -> None:
        if self._hooked_at:
            compat.unhook_saved_tensors(self._pack)
            self._hooked_at = 0

    @_unseen
    def _close(self, keep_last: bool) -> None:
        if compat.in_backward():
            return
        written = [bucket for bucket, state in self._gathered.items() if self._is_written(state)]
        for bucket, state in list(self._gathered.items()):
            self._check_content(bucket, state)
        for unit in self.units:
            self._end_forward_of(unit, keep_last and unit is self._last_read)
        self._idle.clear()
        self._begun.clear()
        if self._order:
            self._learn(self._order)
        for bucket in written:
            self._release_bucket(bucket)
            self._refuse_writes(bucket)

    def _end_forward_of(self, unit: EagerUnit, is_last: bool) -> None:
        """Release a unit that forward has used, except for what its backward is to find.

        Args:
            is_last: Whether forward used it last, and a backward may follow.
        """
        if unit in self._held:
            return
        for bucket in unit.buckets:
            reshard = bucket.plan.reshard_after_forward
            if reshard is None and is_last:
                continue
            if reshard is not None and torch.is_grad_enabled() and bucket in self._gathered:
                if reshard is False:
                    continue
                self._keep_portion(bucket)
            self._release_checked(bucket)

    def _keep_portion(self, bucket: Bucket) -> None:
        """Keep this rank's portion of a gathered bucket, if backward is to gather portions."""
        few, state = bucket.topology.portions.get(bucket.plan.portions), self._gathered[bucket]
        has_portions = not (bucket.sends_planes or bucket.plan.is_extension)
        if few is not None and state.full is not None and has_portions and not self._is_written(state):
            portion = state.full.view(few.size, -1)[few.rank].clone()
            self._portions[bucket] = portion, state.version

    def reset(self) -> None:
        """Release everything that belongs to a running step. Wait for running reductions and drop their results."""
        self._unhook()
        self._depth = 0
        for unit in self.units:
            if unit not in self._held:
                self._release(unit)
        self._portions.clear()
        while self._reductions:
            reduction = self._reductions.popleft()
            if reduction.stage < len(reduction.bucket.exchange.groups):
                compat.wait_tensor(reduction.result)
        self._anchors.clear()
        self._served.clear()
        self._written.clear()
        self._idle.clear()
        self._begun.clear()
        self._ran.clear()
        self._order.clear()
        self._complete.clear()

    def abandon(self) -> None:
        """Like :meth:`reset`, but without waiting: other ranks may not take part in the running collectives."""
        self._abandoned += [state.started for state in self._gathered.values() if state.started is not None]
        self._abandoned += [reduction.result for reduction in self._reductions]
        self._gathered.clear()
        self._by_storage.clear()
        self._reductions.clear()
        self._held.clear()
        self.reset()
        self._learn(self.units)  # ranks may have learned different orders

    def settle(self) -> None:
        """Wait until abandoned collectives have finished or timed out."""
        while self._abandoned:
            with contextlib.suppress(RuntimeError):
                compat.wait_tensor(self._abandoned.pop())

    def leave_stray_reads(self) -> None:
        """Release what was gathered by reads outside of a window."""
        if self._depth == 0:
            self.reset()

    # -- what the user controls ---------------------------------------------------------------------------------------

    def control(self, unit: EagerUnit) -> UnitControl:
        """Return the settings of a unit, to be changed."""
        return self._controls[unit]

    def holds(self, bucket: Bucket) -> bool:
        """Whether :meth:`unshard` keeps a bucket gathered, so that its parameters can be read outside of forwards."""
        return bool(self._held) and self._unit_of[bucket] in self._held

    def unshard(self, units: Sequence[EagerUnit]) -> Callable[[], None]:
        """Start gathering units, and keep them gathered until their next forward has run, or :meth:`reshard`.

        A collective, outside of backward.

        Returns:
            A function that waits until they are gathered. Their first use waits as well.
        """
        for unit in units:
            self._start(unit)
            self._held.add(unit)

        def wait() -> None:
            for unit in units:
                for bucket in unit.buckets if unit in self._held else ():
                    self._gather(bucket)

        return wait

    def reshard(self, units: Sequence[EagerUnit]) -> None:
        """Release units."""
        for unit in units:
            self._held.discard(unit)
            self._release(unit)

    # -- gather and release -------------------------------------------------------------------------------------------

    def read(self, home: Home) -> Tensor:
        """Return a full parameter, connected to its shard by autograd if gradients are recorded."""
        bucket, index = home.bucket, home.index
        state = self._gather_to_read(bucket)
        if not (bucket.trains[index] and torch.is_grad_enabled()):
            ordinary = bucket.wrappers[index] is None and bucket.extension is None
            return self._plain(bucket, state, index) if ordinary else self._wrapped(home, state)
        param = (state.attached or self._attach(bucket, state))[index]
        if param is None:
            return self._attach_again(bucket, state, index)
        state.attached[index] = None
        return param

    def _gather_to_read(self, bucket: Bucket) -> _Gathered:
        if not self._hooked_at and self._depth:
            self._hook()
        if in_backward := compat.in_backward():
            self.owner.grad_sync.enter_backward()  # its end releases what is gathered here
        state = self._gather(bucket, Planes.BOTH if in_backward else Planes.ROWS)  # recomputed: both are used
        self._last_read = state.unit
        return state

    def read_apart(self, home: Home) -> Tensor:
        """Like :meth:`read`, for code that another compiler has made: the same tensor while the bucket stays gathered.

        Its storage holds nothing else, although it lies in the bucket: operators with branches refuse operands that share
        storage.
        """
        bucket, index = home.bucket, home.index
        state, trains = self._gather_to_read(bucket), bucket.trains[index]
        if self._depth and not (state.unit.is_root or state.unit in self._idle or compat.in_backward()):
            self._idle.append(state.unit)  # its forward may be a part of the compiled code
        if (index, trains) not in state.apart:
            param = self._apart(bucket, state, index, trains)
            state.apart[index, trains] = param, param._version
        return state.apart[index, trains][0]

    @_unseen
    @_as_parameters
    def _apart(self, bucket: Bucket, state: _Gathered, index: int, trains: bool) -> Tensor:
        param = compat.apart(self._presented(bucket, state, index))
        if address := compat.storage_address(param):
            self._by_storage[address] = bucket
        if trains:
            with torch.enable_grad():  # guards expect the same outside of a context that the code enters
                (param,) = _Attach.apply([param], self._anchors_of(bucket)[index])
        return self._given(bucket, index, param)

    @_unseen
    @_as_parameters
    def _plain(self, bucket: Bucket, state: _Gathered, index: int) -> Tensor:
        """Return a parameter without history."""
        assert state.full is not None
        return self._given(bucket, index, self._presented(bucket, state, index))

    @_unseen
    def _wrapped(self, home: Home, state: _Gathered) -> Tensor:
        """Return a parameter without history that wraps what was gathered.

        Unlike an ordinary one, it is a tensor of inference mode there: views of others, which its class makes, would
        not be.
        """
        assert state.full is not None
        with compat.below_function_transforms(), torch.no_grad():
            return self._given(home.bucket, home.index, self._presented(home.bucket, state, home.index))

    @_unseen
    def _attach(self, bucket: Bucket, state: _Gathered) -> list[Tensor | None]:
        """Connect all parameters of a bucket at once: an autograd node for each would cost more than what it computes."""
        assert state.full is not None
        with compat.below_function_transforms():  # transforms see a parameter as a constant, like an ordinary one
            *anchors, _ = self._anchors_of(bucket)
            with torch.no_grad():
                views = [self._presented(bucket, state, index) for index in range(len(anchors))]
            attached = _Attach.apply(views, *anchors)
        state.attached = [self._given(bucket, index, param) for index, param in enumerate(attached)]
        return state.attached

    @_unseen
    def _attach_again(self, bucket: Bucket, state: _Gathered, index: int) -> Tensor:
        """Connect a parameter that was read before.

        Every read has a gradient of its own. They are added in the order in which they arrive, as in the graph that
        AOTAutograd traces: floating-point sums are equal only in equal order.
        """
        assert state.full is not None
        with compat.below_function_transforms():
            with torch.no_grad():
                view = self._presented(bucket, state, index)
            (attached,) = _Attach.apply([view], self._anchors_of(bucket)[index])
        return self._given(bucket, index, attached)

    def _presented(self, bucket: Bucket, state: _Gathered, index: int) -> Tensor:
        """Return what modules get for a parameter of the gathered bucket, in the bucket's form, without history.

        An ordinary parameter is a view. It does not keep the bucket alive if its memory is taken back.
        """
        if bucket.extension is not None:
            assert state.made is not None
            return bucket.extension.present(bucket.plan, state.made)
        full = state.full
        assert full is not None
        view = bucket.whole_view(full, index)
        if (wrapper := bucket.wrappers[index]) is not None:
            others: tuple[Tensor, ...] = ()
            if bucket.plan.has_planes and full.numel() > bucket.plan.held_numel:
                others = self._inside(bucket, bucket.plane(full, columns=True), index)
            return wrapper.wrap(*self._inside(bucket, full, index), bucket.plan.compute_dtype, *others)
        return view.detach() if bucket in self._lent else view

    def _inside(self, bucket: Bucket, full: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return data and scales of a parameter in the gathered bucket, or in a plane of it."""
        return bucket.whole_view(full, index).view(quantize.DTYPE), bucket.scale_of(index, full)

    def _given(self, bucket: Bucket, index: int, param: Tensor) -> Tensor:
        """Record that a forward is given a parameter, which no later forward may use."""
        name = bucket.plan.layout.slots[index].name
        if bucket.extension is not None and type(param) is not Tensor:
            vars(param).update(_is_param=True, mfsdp_name=name)  # isinstance(module.weight, nn.Parameter) holds
            self.hand_out(param, bucket)
            return param
        if (wrapper := bucket.wrappers[index]) is not None:
            self._handed_out_wrapped.append((weakref.ref(param), wrapper, name))
            return param
        self.hand_out(as_gathered(param, name), bucket)
        return param

    def hand_out(self, param: Tensor, bucket: Bucket) -> None:
        """Record that a forward was given this gathered parameter, which is outdated when the next one begins."""
        self._handed_out.append((weakref.ref(param), bucket, bucket.flat._version))

    def hand_out_again(self, param: Tensor, bucket: Bucket, version: int) -> None:
        """Record that a backward uses an outdated parameter, of this version of the shard, until the next forward."""
        self._handed_out.append((weakref.ref(param), bucket, version))

    def _retire_handed_out(self) -> None:
        for state in self._gathered.values():
            state.attached, state.apart = (
                [],
                {},
            )  # of a unit that was read outside of forwards; the next forward gets others
        for kept, bucket, version in self._handed_out:
            if (param := kept()) is not None:
                OutdatedParameter.replace(param, self, bucket, version)
        self._handed_out.clear()
        for wrapped, wrapper, name in self._handed_out_wrapped:
            if (tensor := wrapped()) is not None:
                wrapper.retire(tensor, OutdatedParameter.in_wrapper(name))
        self._handed_out_wrapped.clear()

    def _anchors_of(self, bucket: Bucket) -> tuple[Tensor, ...]:
        """Return an anchor for each parameter, and one for the packed bucket."""
        if bucket not in self._anchors:
            served, written = [], WrittenGradients(bucket)  # type: ignore[var-annotated]
            self._served[bucket], self._written[bucket] = served, written
            self._anchors[bucket] = _Reduce.apply(bucket, self, served, written, *bucket.params)
        return self._anchors[bucket]

    def lend(self, home: Home, param: Tensor) -> None:
        """Let the kernels of a layer write the gradient of a gathered parameter into the packed gradient."""
        if torch.is_grad_enabled():
            written = self._written.get(home.bucket) or WrittenGradients(home.bucket)  # of a frozen bucket: not asked
            written.offer(param, home.index)

    # -- served code --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, homes: Iterable[Home]) -> Iterator[None]:
        """Context for compiled code that is served: it is a part of the windows of the parameters that it reads."""
        with contextlib.ExitStack() as stack:
            for window in dict.fromkeys(map(self._window_of, homes)):
                self.enter(window)
                stack.push(functools.partial(self._leave_served, window))
            self._hook()  # autograd saves the gathered buckets that the code takes
            yield

    def _window_of(self, home: Home) -> Window:
        """Return the window whose end releases a parameter."""
        unit, module = self._unit_of[home.bucket], home.bucket.sites[home.index][0].holder()
        if unit.is_root:
            return next(window for window in self._windows_of[home.bucket] if window.module() is module)
        first, *others = self._windows_of[unit]
        of_module = (window for window in others if _is_inside(module, window.module()))
        return next(of_module, first)

    def _leave_served(self, window: Window, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self.leave(window)
        else:
            self.leave_failed(window, error)

    def serve(self, backward: gradients.Backward, bucket: Bucket) -> tuple[Tensor, ...]:
        """Return what served code takes for a bucket.

        Args:
            backward: The bucket's share of the code's backward.

        Returns:
            A tensor without memory that takes the packed gradient, ``[numel]`` in the communication dtype, and the
            gathered bucket, ``[numel]`` in the dtype in which it is held; and its scales if modules get it quantized.
        """
        full = self._gather(bucket).full
        assert full is not None
        self._last_read = self._unit_of[bucket]
        if torch.is_grad_enabled() and bucket.plan.requires_grad:
            anchor = self._anchors_of(bucket)[-1]
            self._served[bucket].append(backward)
        else:
            anchor = _anchor_of_bucket(bucket)
        if not bucket.plan.stays_quantized:
            return anchor, full
        assert bucket.scales is not None
        return anchor, full, bucket.scales

    def note_own_gathers(self, buckets: Iterable[Bucket]) -> None:
        """Record that compiled code gathers these buckets by a schedule of its own, so that nobody prefetches them."""
        self._gather_themselves.update(self._unit_of[bucket] for bucket in buckets)

    def _start(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            state = self._gathered.get(bucket)
            if state is None or state.version != bucket.flat._version:
                self._start_all(unit)
                return

    @_unseen
    @_as_parameters
    def _start_all(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            state = self._gathered.get(bucket)
            if state is not None and state.version != bucket.flat._version:
                self._release_bucket(bucket)  # shards have changed since the gather
            if bucket not in self._gathered:
                in_backward = bucket.sends_planes and compat.in_backward()
                self._start_bucket(unit, bucket, Planes.COLUMNS if in_backward else Planes.ROWS)

    def _start_bucket(self, unit: EagerUnit, bucket: Bucket, plane: Planes) -> None:
        if bucket.is_stale or bucket.is_quantized_stale:
            self.owner.refresh()
        group = bucket.topology.gather_group
        started, is_from_portions = None, False
        if group is not None and compat.in_backward() and (kept := self._portions.pop(bucket, None)) is not None:
            portion, version = kept
            if is_from_portions := version == bucket.flat._version:
                few = bucket.topology.portions[bucket.plan.portions]
                self._announce("gather", bucket, few, f", portions of {few.size}")
                with compat.below_autograd():
                    started = compat.all_gather(portion, few.size, few.name)
        sent = self._prepare(bucket, bucket.extension) if bucket.extension is not None else None
        if group is not None and started is None:
            started = self._start_gather(bucket, group, plane, sent)
        self._gathered[bucket] = _Gathered(
            unit, started, bucket.flat._version, planes=plane, sent=sent, is_from_portions=is_from_portions
        )

    def _prepare(self, bucket: Bucket, extension: Extension) -> Sent:
        try:
            with compat.below_function_transforms(), torch.no_grad():
                return extension.prepare(bucket.plan, bucket.sites[0][0].module, bucket.topology.mesh)
        except BaseException as error:
            self.owner.failed(error)  # in a backward, nothing else catches it
            raise

    def _start_gather(self, bucket: Bucket, group: Group, plane: Planes, sent: Sent | None = None) -> Tensor:
        self._announce("gather", bucket, group, ", columns" if plane is Planes.COLUMNS else "")
        if sent is not None:
            with compat.below_autograd():
                return compat.all_gather(sent.packed, group.size, group.name)
        (capacity, count) = bucket.exchange.gather_buffers
        if plane is Planes.COLUMNS:
            assert bucket.quantized_columns is not None
            shard = bucket.quantized_columns
        else:
            shard = bucket.sent()
        with compat.below_autograd():
            if capacity:
                enter_pool(self.owner.comm_buffers)
                return gather_into_buffer(shard, capacity, count, bucket.exchange.sent_dtype, group.size, group.name)
            if not bucket.exchange.gather_group:  # one rank
                return shard.to(bucket.exchange.sent_dtype, copy=True)
            return compat.all_gather(shard.to(bucket.exchange.sent_dtype), group.size, group.name)

    def _gather(self, bucket: Bucket, planes: Planes = Planes.ROWS) -> _Gathered:
        state = self._gathered.get(bucket)
        if (
            state is not None
            and state.full is not None
            and state.version == bucket.flat._version
            and (planes in state.planes or not bucket.sends_planes)
        ):
            return state
        return self._gather_now(bucket, planes)

    @_unseen
    @_as_parameters
    def _gather_now(self, bucket: Bucket, planes: Planes) -> _Gathered:
        unit = self._unit_of[bucket]
        if not unit.is_root:  # root parameters may be read between two modules of a joined unit
            self._idle += self._begun
            self._begun.clear()
        for idle in self._idle:
            if idle is not unit:
                self._end_forward_of(idle, is_last=False)
        self._idle.clear()
        state = self._gathered.get(bucket)
        if state is None or state.version != bucket.flat._version:  # else others of the unit may have been reduced
            self._start(unit)
            state = self._gathered[bucket]
        if bucket.sends_planes and planes not in state.planes and (state.full is not None or planes is not Planes.BOTH):
            self._release_bucket(bucket)
            self._start_bucket(unit, bucket, planes if planes is Planes.COLUMNS else Planes.ROWS)
            state = self._gathered[bucket]
        if state.started is not None:
            state.full, state.started = self._await(state.started), None
            if bucket.sends_planes:
                self._arrange(bucket, state, planes)
            if bucket.exchange.dequantizes and not state.is_from_portions:
                with compat.below_autograd():
                    state.full = bucket.dequantized(state.full)
        elif state.sent is not None:
            state.full = state.sent.packed
        else:
            state.full = bucket.sent().to(bucket.plan.held_dtype)
        if bucket.extension is not None:
            assert state.sent is not None
            with torch.no_grad():
                state.made = bucket.extension.finish(bucket.plan, state.sent, state.full)
            self._by_storage.update({compat.storage_address(leaf) or 0: bucket for leaf in state.made.leaves})
        state.content = state.full._version
        state.references = compat.references_to(state.full.untyped_storage())
        if address := compat.storage_address(state.full):
            self._by_storage[address] = bucket
        in_backward = compat.in_backward()
        if not in_backward and (not self._order or self._order[-1] is not unit):
            self._order.append(unit)
        following = self._following(unit, in_backward)
        if in_backward:
            following = [each for each in following if not self._complete.issuperset(each.buckets)]
        for each in following:
            if self._may_prefetch(each):
                self._start(each)
        if in_backward:
            # Buckets with trainable parameters are released when their gradients are complete. Frozen buckets have no
            # such event, and a hook may read a bucket after it, so these are released when another unit is gathered.
            for other, gathered in list(self._gathered.items()):
                is_done = not other.plan.requires_grad or other in self._complete
                if is_done and gathered.unit is not unit and gathered.unit not in following:
                    self._release_checked(other)
        return state

    def _arrange(self, bucket: Bucket, state: _Gathered, planes: Planes) -> None:
        """Arrange a gathered plane as modules take it, and the other beside it if both are asked for."""
        assert state.full is not None
        found = {state.planes: state.full}
        if planes is Planes.BOTH:
            other, group = planes ^ state.planes, bucket.topology.gather_group
            assert group is not None
            found[other] = self._await(self._start_gather(bucket, group, other))
        with compat.below_autograd():
            arranged = [quantize.from_records(found[plane]) for plane in Planes if plane in found]
            state.full = torch.cat(arranged) if len(arranged) > 1 else arranged[0]
        state.planes |= planes

    def _announce(self, what: str, bucket: Bucket, group: Group | None, more: str = "") -> None:
        conduct = self.owner.conduct
        announced = self._announced.get((what, more, bucket))
        if announced is None or announced.group is not group or announced.model != conduct.name:
            series = f"{what}{more}", self._numbers[bucket]
            announced = conduct.announcement(f"{what} {bucket.plan.name}{more}", group, series)
            self._announced[what, more, bucket] = announced
        try:
            conduct.announce(announced)
        except RuntimeError as error:
            self.owner.failed(error)
            raise

    def _await(self, started: Tensor) -> Tensor:
        try:
            with compat.below_autograd():
                return compat.wait_tensor(started)
        except RuntimeError as error:
            self.owner.failed(error)  # in a backward, nothing else catches it
            raise

    def _following(self, unit: EagerUnit, in_backward: bool) -> Sequence[EagerUnit]:
        """Return the units to prefetch when a unit has been gathered."""
        control = self._controls[unit]
        chosen = control.backward_prefetch if in_backward else control.forward_prefetch
        if chosen is not None:
            return chosen
        following = (self._previous if in_backward else self._next).get(unit)
        return () if following is None else (following,)

    def _may_prefetch(self, unit: EagerUnit) -> bool:
        return unit not in self._gather_themselves and unit.gathered_bytes <= self.policy.prefetch_bytes

    def _release(self, unit: EagerUnit) -> None:
        for bucket in unit.buckets:
            self._release_checked(bucket)

    def _release_checked(self, bucket: Bucket) -> None:
        state = self._gathered.get(bucket)
        self._release_bucket(bucket)
        if state is None:
            return
        if (self._depth > 0 or compat.in_backward()) and self._is_written(state):
            self._refuse_writes(bucket)
        if self._depth > 0 and state.version == bucket.flat._version:
            self._check_content(bucket, state)

    def _release_bucket(self, bucket: Bucket) -> None:
        state = self._gathered.pop(bucket, None)
        if state is None:
            return
        if state.started is not None:  # prefetched and not used: every collective must be awaited
            compat.wait_tensor(state.started)
        if state.full is None:
            return
        apart = [param for param, _ in state.apart.values()]
        for tensor in (state.full, *apart, *(state.made.leaves if state.made is not None else ())):
            if address := compat.storage_address(tensor):
                self._by_storage.pop(address, None)
        if self._learns_hooks and not self._hooks_everywhere and state.is_used:
            # Something that autograd saved outside of these windows refers to it: a module that reads its child's
            # parameters. It stays in memory until the backward, this time.
            self._hooks_everywhere = True

    def _is_written(self, state: _Gathered) -> bool:
        is_written = state.full is not None and state.full._version != state.content
        return is_written or any(param._version != version for param, version in state.apart.values())

    def _refuse_writes(self, bucket: Bucket) -> None:
        try:
            refuse_write(bucket.plan.unit, [sites[0].name for sites in bucket.sites])
        except RuntimeError as error:
            if compat.in_backward():  # nothing else catches it
                self.owner.failed(error)
            raise

    def _check_content(self, bucket: Bucket, state: _Gathered) -> None:
        """Raise if the gathered bucket was written to without a trace: through NumPy, or ``.data`` of a view.

        Each rank compares the rows that it has sent. On a CPU this happens after each forward. On other devices, where
        looking at values synchronizes with the device, it happens only after the first forward.
        """
        group = bucket.topology.gather_group
        if state.full is None or group is None or not step_checks.enabled() or self.owner.conduct.is_capturing:
            return
        if bucket.extension is not None:  # its class may send anything
            return
        if bucket in self._content_checked and state.full.device.type != "cpu":
            return
        self._content_checked.add(bucket)
        mine = state.full.narrow(0, 0, bucket.plan.layout.numel).view(group.size, -1)[group.rank]
        if not compat.equal_bits(mine, bucket.own_part(columns=state.planes is Planes.COLUMNS)):
            self._refuse_writes(bucket)

    def _learn(self, order: Sequence[EagerUnit]) -> None:
        pairs = list(itertools.pairwise(order))
        self._next = dict(pairs)
        self._previous = {later: earlier for earlier, later in pairs}

    def for_compiled_code(self) -> contextlib.AbstractContextManager[None]:
        """Context for compiled graphs in a window. They save no gathered parameter, so there is nothing to pack."""
        return compat.without_hook(self._pack)

    # -- tensors saved for backward -----------------------------------------------------------------------------------

    @compat.python_only
    def _pack(self, tensor: Tensor) -> _Saved:
        if type(tensor) not in _ORDINARY and (inside := compat.inner_tensors(tensor)):
            if not any(map(self._lies_in_a_bucket, inside.values())):
                return tensor.detach(), tensor._version
            if (saved := self._plane_of(inside.values())) is not None:
                return saved
            packed = {name: self._pack(inner) for name, inner in inside.items()}
            if isinstance(tensor, DTensor):
                return _SavedDTensor(packed["_local_tensor"], tensor._spec)
            _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return _SavedWrapper(type(tensor), packed, context, tensor.size(), tensor.stride())
        bucket = self._by_storage.get(compat.storage_address(tensor) or 0)
        leaf = (
            made.leaf_of(tensor) if bucket is not None and (made := self._gathered[bucket].made) is not None else None
        )
        if bucket is not None and (tensor.is_conj() or tensor.is_neg()):  # the memory does not hold the values
            bucket, tensor = None, tensor.resolve_conj().resolve_neg()
        own = () if bucket is None else (bucket.plan.held_dtype, quantize.DTYPE, bucket.plan.given_dtype)
        has_dtype = tensor.dtype in own
        if bucket is None or (leaf is None and (bucket.extension is not None or not has_dtype)):
            # Detached, because a saved output would otherwise keep its own node alive. Autograd does not check tensors
            # that went through hooks for in-place changes, so the version is checked in _unpack.
            return tensor.detach(), tensor._version
        version, size = self._gathered[bucket].version, tuple(tensor.shape)
        offset = tensor.storage_offset()
        if leaf is None:  # the storage may be that of a parameter apart
            start = compat.storage_address(self._gathered[bucket].full)
            offset = (tensor.data_ptr() - start) // tensor.element_size()
        place = tensor.stride(), offset, tensor.dtype
        return _SavedView(bucket, version, size, *place, -1 if leaf is None else leaf)

    def _plane_of(self, inside: Iterable[Tensor]) -> _SavedPlane | None:
        """Return what to save for a tensor that wraps data and scales of a plane, of which backward takes the other."""
        for tensor in inside:
            bucket = self._by_storage.get(compat.storage_address(tensor) or 0)
            if bucket is None or bucket.quantized_columns is None:
                continue
            start = tensor.storage_offset() % bucket.plan.held_numel
            index = next(i for i, slot in enumerate(bucket.plan.layout.slots) if slot.offset == start and slot.numel)
            columns = not compat.transformer_engine.backward_takes_rows()
            return _SavedPlane(bucket, self._gathered[bucket].version, index, columns)
        return None

    def _lies_in_a_bucket(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one that it wraps, is in the memory of a gathered bucket."""
        if type(tensor) not in _ORDINARY and (inside := compat.inner_tensors(tensor)):
            return any(map(self._lies_in_a_bucket, inside.values()))
        return self._by_storage.get(compat.storage_address(tensor) or 0) is not None

    @compat.python_only
    def _unpack(self, packed: _Saved) -> Tensor:
        if isinstance(packed, _SavedDTensor):
            return compat.dtensor_of(self._unpack(packed.local), packed.spec)
        if isinstance(packed, _SavedWrapper):
            inner = {name: self._unpack(each) for name, each in packed.inner.items()}
            return packed.kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
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
        columns = isinstance(packed, _SavedPlane) and packed.columns
        _check_version(bucket, packed.version)
        self.owner.grad_sync.enter_backward()
        state = self._gather(bucket, Planes.COLUMNS if columns else Planes.ROWS)
        full = state.full
        assert full is not None
        if isinstance(packed, _SavedView) and packed.leaf >= 0:
            assert state.made is not None
            full = state.made.leaves[packed.leaf]
        if isinstance(packed, _SavedPlane):
            return self._unpacked_plane(packed, bucket.plane(full, columns))
        if packed.dtype != full.dtype:
            full = full.view(packed.dtype)
        return full.as_strided(packed.size, packed.stride, packed.offset)

    def _unpacked_plane(self, saved: _SavedPlane, plane: Tensor) -> Tensor:
        bucket, index = saved.bucket, saved.index
        wrapper, inside = bucket.wrappers[index], self._inside(bucket, plane, index)
        assert wrapper is not None
        of_rows, of_columns = ((None, None), inside) if saved.columns else (inside, (None, None))
        return wrapper.wrap(*of_rows, bucket.plan.compute_dtype, *of_columns)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @compat.python_only
    def reduce(self, bucket: Bucket, packed: Tensor, used: frozenset[int]) -> None:
        """Start reducing a bucket whose gradients are complete, and finish earlier reductions.

        Args:
            packed: Packed gradients, ``[numel]`` in the communication dtype.
            used: Indices of parameters with a gradient in it.
        """
        self.owner.grad_sync.enter_backward()
        gradients.note_use(bucket, used)
        self.owner.grad_sync.note_eager_use(bucket)
        if bucket.exchange.groups:
            self._start_stage(bucket, 0, packed, used)
        else:  # no other rank shares the bucket
            self._accumulate(bucket, packed, used)
        self._complete.add(bucket)
        self._release_checked(bucket)
        in_a_unit = sum(other.plan.requires_grad for other in self._unit_of[bucket].buckets)
        for _ in range(len(self._reductions) - self.policy.reductions_in_flight * in_a_unit):
            self._take_in()

    @compat.python_only
    def reduce_now(
        self, bucket: Bucket, packed: Tensor, used: frozenset[int], requested: RequestedGradients
    ) -> Sequence[Tensor | None]:
        """Reduce gradients for ``torch.autograd.grad``, even if that is not due, without accumulating them."""
        self.owner.grad_sync.enter_backward()
        self._release_bucket(bucket)
        reduced = self._reduce_stages(bucket, 0, packed, "for torch.autograd.grad")
        mine = [int(index in used) for index in range(len(bucket.params))]
        (levels,) = self.owner.grad_sync.used_anywhere([bucket], [mine])
        return gradients.select(requested, bucket, reduced, {index for index, level in enumerate(levels) if level})

    def _start_stage(self, bucket: Bucket, stage: int, gradient: Tensor, used: frozenset[int]) -> None:
        will_run = bucket.owner.grad_sync.is_due() or not bucket.exchange.may_wait(stage)
        group = bucket.topology.stages[stage].group if will_run else None
        self._announce("reduce", bucket, group, f", stage {stage + 1}" if stage else "")
        token = bucket.pending.token if bucket.pending is not None else None
        with compat.below_autograd():
            started = start_stage(gradient, stage, bucket.exchange, token)
        self._reductions.append(_RunningReduction(bucket, stage, started, used))

    def _take_in(self) -> None:
        """Wait for the oldest running stage. Feed its result to the next stage, or accumulate it as the gradient."""
        reduction = self._reductions.popleft()
        bucket, stages = reduction.bucket, len(reduction.bucket.exchange.groups)
        if reduction.stage == stages and bucket.plan.offload is not None:  # its copy to the host
            gradients.accumulate(bucket, reduction.result, reduction.used)
            self.owner.grad_sync.touched(bucket)
            return
        result, following = self._await(reduction.result), reduction.stage + 1
        if following < stages:
            self._start_stage(bucket, following, result, reduction.used)
            return
        self._accumulate(bucket, result, reduction.used)

    def _accumulate(self, bucket: Bucket, reduced: Tensor, used: frozenset[int]) -> None:
        if not bucket.gradient_waits:  # a deferred gradient is zeros here
            finished = self._finished(bucket, reduced)
            if bucket.plan.offload is not None:  # it arrives while the next unit's backward runs
                self._reductions.append(_RunningReduction(bucket, len(bucket.exchange.groups), finished, used))
                return
            gradients.accumulate(bucket, finished, used)
        self.owner.grad_sync.touched(bucket)

    def reduce_waiting(self, bucket: Bucket) -> None:
        """Reduce a bucket's deferred gradients outside of the backward that computed them."""
        assert bucket.pending is not None
        exchange = bucket.exchange
        first = exchange.when.index(When.IF_DUE.value)
        waiting = bucket.pending.take(exchange.comm_dtype)
        reduced = self._reduce_stages(bucket, first, waiting, "what waits")
        gradients.accumulate(bucket, reduced, gradients.used_so_far(bucket))

    def _reduce_stages(self, bucket: Bucket, first: int, gradient: Tensor, why: str) -> Tensor:
        """Run the reduction from stage ``first`` on. Return the gradient, ``[shard_numel]`` in the main dtype."""
        exchange = bucket.exchange
        for stage in range(first, len(exchange.groups)):
            more = f", {why}{f', stage {stage + 1}' if stage else ''}"
            self._announce("reduce", bucket, bucket.topology.stages[stage].group, more)
            gradient = self._await(start_collective(gradient, stage, exchange))
        return self._finished(bucket, gradient)

    def _finished(self, bucket: Bucket, reduced: Tensor) -> Tensor:
        """Return a reduced gradient, ``[shard_numel]`` in the main dtype, where the shard rests, after the user's hook."""
        gradient = bucket.exchange.finish(reduced, bucket.plan.main_dtype)
        if (hook := self._controls[self._unit_of[bucket]].reduced_hook) is not None:
            with torch.no_grad():
                hooks_of_parameters.call(hook, gradient)
        offload = bucket.plan.offload
        return gradient if offload is None else host.offload(gradient, offload.pins)

    def finish_reductions(self) -> None:
        while self._reductions:
            self._take_in()

    def finish_backward(self) -> None:
        self.finish_reductions()
        self._complete.clear()
        for unit in self.units:
            self._release(unit)
        self._portions.clear()
        self._anchors.clear()
        self._served.clear()
        self._written.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerRuntime:
        """Copy the runtime for the copy of a model, without the state of a running step."""
        duplicate = object.__new__(EagerRuntime)
        memo[id(self)] = duplicate
        units, modules, duplicate.owner = copy.deepcopy((self.units, tuple(self.modules), self.owner), memo)
        EagerRuntime.__init__(duplicate, units, modules, self.policy)
        twin = dict(zip(self.units, units, strict=True))
        for unit, control in self._controls.items():
            ahead, back = (
                None if chosen is None else tuple(twin[each] for each in chosen)
                for chosen in (control.forward_prefetch, control.backward_prefetch)
            )
            duplicate._controls[twin[unit]] = UnitControl(ahead, back, control.reduced_hook)
        for window in copy.deepcopy(
            list(dict.fromkeys(w for windows in self._windows_of.values() for w in windows)), memo
        ):
            duplicate.add_window(window)
        return duplicate


def refuse_write(unit: str, names: Sequence[str]) -> NoReturn:
    """Raise RuntimeError because forward or backward has written to a parameter of ``unit``, one of ``names``."""
    raise RuntimeError(
        f"Forward or backward wrote to a parameter of {unit!r} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}): what "
        "it wrote to was a gathered copy, and is lost. Write to parameters between steps (under torch.no_grad()), or "
        "hold what they write to in a buffer. An nn.Embedding with max_norm writes too."
    )


class GatheredParameter(nn.Parameter):
    """The value of ``module.weight`` inside a forward or backward: an ordinary tensor, except that writes through ``.data`` raise.

    A tensor's own ``.data`` does not share its version counter, so that writes through it would go unnoticed.
    """

    __torch_function__ = compat.no_torch_function
    mfsdp_name: str

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        refuse_write(self.mfsdp_name.rpartition(".")[0], [self.mfsdp_name])


_ORDINARY = (Tensor, nn.Parameter, GatheredParameter)
"""Types that wrap no other tensors: most of what autograd saves."""


def _check_version(bucket: Bucket, version: int) -> None:
    """Raise if a bucket's shard has changed since a forward gathered it, in a backward that needs its values."""
    if bucket.flat._version != version:
        raise RuntimeError(
            f"Parameters of {bucket.plan.unit!r} were modified in place between forward and backward (by an "
            "optimizer step?), so that gradients cannot be computed for the values that forward used."
        )


class OutdatedParameter(nn.Parameter):
    """A gathered parameter that something has kept since an earlier forward.

    A backward may use it, as it may be that of the earlier forward: then it becomes what it was, until the next forward.
    Anything else is an error, and so is a backward after the shard has changed.
    """

    mfsdp_name: str
    mfsdp_was: tuple[type[Tensor], weakref.ref[EagerRuntime], weakref.ref[Bucket], int] | None
    """Its class, and where it came from, with the version of the shard. None: it is in a wrapper, without values."""

    @staticmethod
    def replace(param: Tensor, runtime: EagerRuntime, bucket: Bucket, version: int) -> None:
        """Turn a parameter into an outdated one, in place.

        Autograd may hold it, where Python's garbage collector does not look, so it does not keep the model alive.
        """
        vars(param)["mfsdp_was"] = type(param), weakref.ref(runtime), weakref.ref(bucket), version
        param.__class__ = OutdatedParameter

    @staticmethod
    def in_wrapper(name: str) -> Tensor:
        """Return what takes the place of the data inside an outdated parameter that wraps what was gathered."""
        outdated: Tensor = as_gathered(torch.empty(0), name)
        vars(outdated)["mfsdp_was"] = None
        outdated.__class__ = OutdatedParameter
        return outdated

    def _come_back(self) -> None:
        """Become what it was.

        Raises:
            RuntimeError: No backward runs, or the shard has changed.
        """
        if self.mfsdp_was is not None and compat.in_backward():
            kind, runtime_of, bucket_of, version = self.mfsdp_was
            runtime, bucket = runtime_of(), bucket_of()
            if runtime is not None and bucket is not None:
                _check_version(bucket, version)
                self.__class__ = kind  # type: ignore[assignment]
                runtime.hand_out_again(self, bucket, version)
                return
        raise RuntimeError(
            f"Parameter {self.mfsdp_name!r} was gathered for an earlier forward, and something still holds it (an "
            "attribute, a list, a cache): its values may be stale. Read it from its module in each forward, or keep "
            "parameter.detach().clone() if values of then are what you want."
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in compat.tree_leaves((args, kwargs)):
            if isinstance(each, OutdatedParameter):
                each._come_back()
        return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OutdatedParameter({self.mfsdp_name!r})"


def as_gathered(tensor: Tensor, name: str) -> Any:
    """Turn ``tensor`` into a :class:`GatheredParameter` in place."""
    tensor.__class__ = GatheredParameter
    vars(tensor)["mfsdp_name"] = name
    return tensor


class _Reduce(torch.autograd.Function):
    """Maps a bucket's parameters, which are autograd leaves, to anchors without memory.

    There is one anchor of full shape per parameter, and one for the packed bucket, ``[numel]`` in the communication
    dtype. The backward receives the bucket's gradients.
    """

    @staticmethod
    @compat.python_only
    def forward(
        ctx: Any,
        bucket: Bucket,
        runtime: EagerRuntime,
        served: Sequence[gradients.Backward],
        written: WrittenGradients,
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Python's garbage collector does not see through autograd nodes: the model must not be reachable from a node
        # that it holds itself.
        ctx.bucket, ctx.runtime, ctx.served, ctx.written = weakref.ref(bucket), weakref.ref(runtime), served, written
        nothing = torch.empty((), dtype=bucket.plan.compute_dtype, device=bucket.device)
        return *(nothing.expand(slot.shape) for slot in bucket.plan.layout.slots), _anchor_of_bucket(bucket)

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        bucket, runtime = ctx.bucket(), ctx.runtime()
        requested = RequestedGradients.of([node for node, _ in ctx.next_functions])
        nothing = (
            None,
            None,
            None,
            None,
            *requested.nothing,
        )  # gradients are accumulated when their reduction has finished
        if bucket is None or runtime is None:
            refuse_dropped()
        *whole_gradients, packed = given
        used = frozenset(index for index, gradient in enumerate(whole_gradients) if gradient is not None)
        if packed is not None:
            used = used.union(*(backward.used for backward in ctx.served))
        used |= ctx.written.indices
        gradients.tell_counting_hooks(bucket, requested.added - used)
        if not used and packed is None:
            return nothing
        if torch.is_grad_enabled():
            gradients.refuse_double_backward()
        if requested.left_out and not requested.returned:
            whole_gradients = [None if index in requested.left_out else g for index, g in enumerate(whole_gradients)]
            if packed is not None:
                packed = _without(bucket, packed, used & requested.left_out)
            used -= requested.left_out
        if ctx.written.indices:
            alone = ctx.written.pack(whole_gradients)
            if not requested.returned:
                alone = _without(bucket, alone, requested.left_out)
            packed = alone if packed is None else alone + packed
        elif any(gradient is not None for gradient in whole_gradients):
            enter_pool(runtime.owner.comm_buffers)
            with compat.below_autograd():
                alone = pack(whole_gradients, bucket.exchange, is_traced=False)
            packed = alone if packed is None else alone + packed
        if packed is None or not used:
            return nothing
        if requested.returned:
            return None, None, None, None, *runtime.reduce_now(bucket, packed, used, requested)
        runtime.reduce(bucket, packed, used)
        return nothing


def _is_inside(module: nn.Module | None, outer: nn.Module | None) -> bool:
    return outer is not None and any(module is each for each in outer.modules())


def _anchor_of_bucket(bucket: Bucket) -> Tensor:
    nothing = torch.empty((), dtype=bucket.plan.comm_dtype, device=bucket.device)
    return nothing.expand(bucket.plan.layout.numel)


def _without(bucket: Bucket, packed: Tensor, indices: frozenset[int]) -> Tensor:
    """Return packed gradients, with zeros for the parameters ``indices``."""
    if not indices:
        return packed
    packed = packed.clone()
    for index in indices:
        slot = bucket.plan.layout.slots[index]
        packed[slot.offset : slot.end].zero_()
    return packed


class _Attach(torch.autograd.Function):
    """Puts gathered parameters in place of their anchors."""

    @staticmethod
    def forward(ctx: Any, params: Sequence[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(params)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Anchors of complex parameters are real.
        return None, *(as_real(gradient) if gradient is not None else None for gradient in gradients)
