"""The eager path: gathers, releases and reduces as modules run and parameters are read, without a compiler.

A step of a unit, from top to bottom ::

    station         when                         what happens                                        done in

    pre_forward     its window opens             the unit is gathered, unless that was done early    gathering.py
      read          of each parameter            connected to its shard by autograd                  parameters.py
      pack          of each tensor that is saved recorded without its memory                         saved_tensors.py
    post_forward    its window closes            released when the next unit is gathered             gathering.py
      unpack        of each saved tensor         gathered again                                      saved_tensors.py
    post_backward   its gradients are complete   packed, reduced; the unit is released               reducing.py

Windows
    A window is the running forward of a module that owns parameters, or is a unit or the model. Windows nest. Inside
    one, ``module.weight`` returns the gathered parameter, and the first read of a bucket gathers it. A parent that
    reads its child's weight, or a module that runs eagerly inside a compiled model, therefore needs no special
    handling.

Joined units
    A unit of several modules has one window per module. The unit is gathered when the first of them runs and released
    when all have run. If a batch skips some of them, it is released when another unit is used. (FSDP2's
    ``fully_shard([a, b])`` keeps it gathered in that case.)

Served code
    Modules that are compiled one by one (``block.compile()``) are served: their graphs take gathered buckets from here
    and return gradients packed in buckets, so gathers and reductions overlap with compiled code as they do with eager
    code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..geometry.exchange import Overlap
from ..memory import gradients
from ..memory.bucket import Bucket, ParamHandle
from ..memory.tensor import hooks_of_parameters
from ..owner import ModuleRef
from ..schedule.schedule import Schedule
from ..step import checks as step_checks
from .context import EagerOwner, StepContext, unseen
from .followed import FollowedSchedule
from .gathering import Gathering
from .parameters import Parameters
from .reducing import Reducing, anchor_of_bucket
from .saved_tensors import SavedTensors
from .units import EagerUnit, UnitControl


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


class EagerRuntime:
    """The eager path of one model: its windows, and the parts that they drive.

    Args:
        units: Units in registration order.
        modules: All modules of the model.
        overlap: Kinds of collectives that may overlap with computation.

    Attributes:
        step: The running step.
        gathering: What is gathered.
        parameters: Parameters as modules read them.
        saved: Tensors that autograd saves.
        reducing: Gradients.
    """

    def __init__(self, units: Sequence[EagerUnit], modules: Iterable[nn.Module], overlap: Overlap) -> None:
        self.units = tuple(units)
        self.modules = weakref.WeakSet(modules)
        self.step = StepContext([bucket for unit in self.units for bucket in unit.buckets])
        self.gathering = Gathering(self.step, self.units, overlap)
        self.saved = SavedTensors(self.step, self.gathering)
        self.reducing = Reducing(self.step, self.gathering)
        self.parameters = Parameters(self.step, self.gathering, self.reducing, self.saved)
        self._ran: dict[EagerUnit | Bucket, weakref.WeakSet[Window]] = {}
        self._windows_of: dict[EagerUnit | Bucket, weakref.WeakKeyDictionary[Window, None]] = {}  # in order

    @property
    def owner(self) -> EagerOwner:
        """The model."""
        return self.step.owner

    @owner.setter
    def owner(self, owner: EagerOwner) -> None:
        self.step.owner = owner

    @property
    def schedule(self) -> Schedule:
        """How early units are gathered, and how late reductions are awaited."""
        return self.gathering.schedule.schedule

    def follow(self, schedule: Schedule) -> None:
        """Follow a schedule from now on.

        Raises:
            ValueError: It has a text that the model cannot follow. Nothing has changed.
        """
        self.gathering.schedule = FollowedSchedule(schedule, self.units, self.gathering.overlap)

    # -- windows ------------------------------------------------------------------------------------------------------

    def in_forward(self) -> bool:
        """Whether the code that reads a parameter belongs to the model's forward, for layers of Transformer Engine."""
        return self.step.depth > 0 or compat.in_call_of(self.modules) or compat.in_recomputation()

    def is_in_use(self, bucket: Bucket) -> bool:
        """Whether code that reads a parameter of the bucket from its module gets the gathered one.

        In a backward, that is what hooks of modules and activations compute with, and functions that keep a module.
        Hooks of parameters get shards, so they read shards too.
        """
        in_backward = compat.backward_id() != -1 and not hooks_of_parameters.run
        in_window = self.step.depth > 0 or in_backward
        return in_window or self.gathering.holds(bucket) or compat.in_call_of(self.modules)

    @property
    def is_in_window(self) -> bool:
        return self.step.depth > 0

    def add_window(self, window: Window) -> None:
        for part in window.parts:
            self._windows_of.setdefault(part, weakref.WeakKeyDictionary())[window] = None

    @compat.python_only
    def pre_forward(self, window: Window) -> None:
        """Open a window: start gathering its unit."""
        step, states = self.step, self.gathering.states
        if window.is_root and compat.backward_id() == -1:
            step.depth = 0
        try:
            if step.depth == 0:
                self._open(window)
            if window.unit is not None:
                states.use(window.unit)
                self.gathering.start(window.unit)
            if window.is_root:
                states.use_root()
        except BaseException as error:
            if step.depth == 0:
                step.owner.failed(error)
            raise
        step.depth += 1
        if self.gathering.hooks_everywhere:
            self.saved.hook()

    @compat.python_only
    def post_forward(self, window: Window) -> None:
        """Close a window: its unit is released when another one is gathered."""
        step = self.step
        if step.depth == 0:
            return
        if self.saved.hooked_at == step.depth:
            self.saved.unhook()
        if compat.backward_id() == -1:  # else this is a recomputation, and the backward of the same unit is next
            for part in window.parts:
                ran = self._ran.setdefault(part, weakref.WeakSet())
                ran.add(window)
                completely = len(ran) == len(self._windows_of[part])
                if completely or isinstance(part, EagerUnit):
                    unit = part if isinstance(part, EagerUnit) else self.gathering.unit_of[part]
                    self.gathering.states.ran(unit, completely)
        step.depth -= 1
        if step.depth == 0:
            self._close(window.is_root and torch.is_grad_enabled())

    @compat.python_only
    def forward_failed(self, window: Window, error: BaseException) -> None:
        """Handle an exception that the window's forward has raised."""
        if self.step.depth > 1 or compat.in_backward():
            self.post_forward(window)  # an outer caller may catch the exception
        elif self.step.depth == 1:
            self.owner.failed(error)
        if compat.refuses_saved_tensor_hooks(error):
            raise RuntimeError(
                "Forward calls torch.func.grad (or vjp, jacrev, hessian), which cannot run inside the eager forward of "
                "a sharded module after it has read a parameter: gathered parameters are kept out of what autograd "
                "saves by hooks, and torch.func allows none. Use torch.autograd.grad(outputs, inputs, "
                "create_graph=True) in forward, apply the transform to the model from outside, or compile the model."
            ) from error

    @unseen
    def _open(self, window: Window) -> None:
        owner = self.owner
        if compat.in_backward():
            owner.grad_sync.enter_backward()
            return
        owner.leave_backward()
        self.reset()
        self.parameters.retire()
        mine = self.units if window.is_root else [window.unit] if window.unit is not None else []
        for bucket in [*(bucket for unit in mine for bucket in unit.buckets), *window.owns]:
            bucket.check_unchanged()
        if window.is_root:
            owner.check_complete()
        self.gathering.learns_hooks = torch.is_grad_enabled()
        self.gathering.checks_content = step_checks.enabled() and not owner.coordinator.is_capturing
        self.gathering.hooks_everywhere |= owner.comm_buffers.is_strict  # no buffer may stay in use
        owner.notice_writes()
        owner.coordinator.enter_forward(window.describe())

    @unseen
    def _close(self, keep_last: bool) -> None:
        if not compat.in_backward():
            self.gathering.end_forward(keep_last)

    def reset(self) -> None:
        """Release everything that belongs to a running step. Wait for running reductions and drop their results."""
        self.saved.unhook()
        self.step.depth = 0
        self.gathering.reset()
        self.reducing.reset()
        self._ran.clear()

    def abandon(self) -> None:
        """Like :meth:`reset`, but without waiting: other ranks may not take part in the running collectives."""
        self.gathering.abandon()
        self.reducing.abandon()
        self.reset()

    def settle(self) -> None:
        """Wait until abandoned collectives have finished or timed out."""
        self.step.outstanding.settle()

    def leave_stray_reads(self) -> None:
        """Reset, outside of a window: release what stray reads have gathered, and drop what a failed step has left."""
        if self.step.depth == 0:
            self.reset()

    # -- what gradient synchronization needs; see :class:`~..step.grad_sync.Reductions` --------------------------------

    def reduce_waiting(self, bucket: Bucket) -> None:
        """Reduce a bucket's deferred gradients outside of the backward that computed them."""
        self.reducing.reduce_waiting(bucket)

    def finish_reductions(self) -> None:
        """Wait for running reductions, and accumulate their results."""
        self.reducing.finish()

    def finish_backward(self) -> None:
        """Finish reductions, and release what backward has gathered."""
        self.reducing.finish()
        self.gathering.end_backward()
        self.reducing.end_backward()

    # -- what the user controls ---------------------------------------------------------------------------------------

    def control(self, unit: EagerUnit) -> UnitControl:
        """Return the settings of a unit, to be changed."""
        return self.gathering.controls[unit]

    # -- served code --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serving(self, handles: Iterable[ParamHandle]) -> Iterator[None]:
        """Context for compiled code that is served: it is a part of the windows of the parameters that it reads."""
        with contextlib.ExitStack() as stack:
            for window in dict.fromkeys(map(self._window_of, handles)):
                self.pre_forward(window)
                stack.push(functools.partial(self._leave_served, window))
            self.saved.hook()  # autograd saves the gathered buckets that the code takes
            yield

    def _window_of(self, handle: ParamHandle) -> Window:
        """Return the window whose end releases a parameter."""
        unit, module = self.gathering.unit_of[handle.bucket], handle.bucket.locations[handle.index][0].holder()
        if unit.is_root:
            return next(window for window in self._windows_of[handle.bucket] if window.module() is module)
        first, *others = self._windows_of[unit]
        of_module = (window for window in others if _is_inside(module, window.module()))
        return next(of_module, first)

    def _leave_served(self, window: Window, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            self.post_forward(window)
        else:
            self.forward_failed(window, error)

    def serve(self, backward: gradients.Backward, bucket: Bucket) -> tuple[Tensor, ...]:
        """Return what served code takes for a bucket.

        Args:
            backward: The bucket's share of the code's backward.

        Returns:
            A tensor without memory that takes the packed gradient, ``[numel]`` in the communication dtype, and the
            gathered bucket, ``[numel]`` in the dtype in which it is held; and its scales if modules get it quantized.
        """
        full = self.gathering.gather(bucket).full
        assert full is not None
        self.gathering.last_read = self.gathering.unit_of[bucket]
        if torch.is_grad_enabled() and bucket.plan.requires_grad:
            anchors = self.reducing.anchors(bucket)
            anchors.served.append(backward)
            anchor = anchors.bucket
        else:
            anchor = anchor_of_bucket(bucket)
        if not bucket.plan.stays_quantized:
            return anchor, full
        assert bucket.scales is not None
        return anchor, full, bucket.scales

    def __deepcopy__(self, memo: dict[int, Any]) -> EagerRuntime:
        """Copy the runtime for the copy of a model, without the state of a running step."""
        duplicate = object.__new__(EagerRuntime)
        memo[id(self)] = duplicate
        duplicate.step = StepContext([])  # for the model, which may be copied first, and sets the owner
        units, modules, owner = copy.deepcopy((self.units, tuple(self.modules), self.owner), memo)
        EagerRuntime.__init__(duplicate, units, modules, self.gathering.overlap)
        duplicate.follow(self.schedule)
        duplicate.owner = owner
        twin = dict(zip(self.units, units, strict=True))
        for unit in self.units:
            control = self.control(unit)
            ahead, back = (
                None if chosen is None else tuple(twin[each] for each in chosen)
                for chosen in (control.forward_prefetch, control.backward_prefetch)
            )
            duplicate.gathering.controls[twin[unit]] = UnitControl(ahead, back, control.reduced_hook)
        windows = dict.fromkeys(window for windows in self._windows_of.values() for window in windows)
        for window in copy.deepcopy(list(windows), memo):
            duplicate.add_window(window)
        return duplicate


def _is_inside(module: nn.Module | None, outer: nn.Module | None) -> bool:
    return outer is not None and any(module is each for each in outer.modules())
