"""An optimizer's step over flat shards instead of one parameter at a time.

Adjacent parameters of one group in a bucket form a run, an ordinary flat tensor: a slice of this rank's shard. An
optimizer that works element by element, or block by block, does the same to a run as to its parameters, with one kernel
instead of hundreds. Runs are not DTensors, so even a third-party optimizer that knows nothing about DTensors works.

``param_groups`` and ``state`` stay the same between steps: parameters are DTensors, and their state tensors are views
of the runs' state. Checkpoints, and everything else that reads state by parameter, are unaffected. During ``step`` the
groups hold runs.

Where this is not possible (a parameter without gradient, numbers such as ``step`` that differ between the parameters of
a run), the optimizer steps the run's parameters one by one. Parameters that the model ignores are stepped by
themselves. Hooks of the program run around the whole step, and see parameters.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ... import compat
from ...memory import gradients
from ...memory.bucket import Bucket, ParamHandle
from ...memory.tensor import RowShardedTensor
from ...optim.kinds import has_own_zero_grad, is_constant, is_plain, is_wrapped, kept_outside, kind_of, why_not_flat
from ...optim.own_steps import FLAT_STEP
from .update_kernel import UpdateKernel, UpdateKernels, takes_lr

_STEPPING = threading.Lock()
"""Held by a step over a bucket: in one backward, gradients in host memory may arrive on another thread than others."""


class Number:
    """State of a run that is one number for all elements, such as ``step``.

    Each parameter has one of its own, so that the program can change that of one parameter.

    Args:
        value: The run's, which the optimizer changes.
        count: The number of parameters.
        is_captured: Whether a CUDA graph may contain the step, so that the host reads no values.

    Attributes:
        own: Those of the parameters, ``[count, *value.shape]``.
    """

    def __init__(self, value: Tensor, count: int, is_captured: bool) -> None:
        self._value, self.own = value, value.detach().expand(count, *value.shape).clone()
        self._is_read = value.device.type == "cpu" and not is_captured
        self._version = self.own._version

    def show(self) -> None:
        """Set the numbers of the parameters, after a step over the run."""
        self.own.copy_(self._value)
        self._version = self.own._version

    def take(self) -> bool:
        """Take over what the program has set. Return False if the numbers of the parameters differ."""
        if self._is_read:  # values: what is written through .data, or by NumPy, has no version
            has_changed = not torch.equal(self.own, self._value.expand_as(self.own))
        else:
            has_changed = self.own._version != self._version
        if has_changed:
            if not torch.equal(self.own, self.own[:1].expand_as(self.own)):
                return False
            self._value.copy_(self.own[0])
            self.show()
        return True

    def mark_changed(self) -> None:
        """Compare values the next time: what changes them may not increment versions."""
        self._version = -1


@dataclass(eq=False)
class Run:
    """Adjacent parameters of a bucket, beginning with number ``first``.

    Args:
        bucket: Their bucket.
        params: The parameters.
        first: Index of the first parameter in the bucket.
        start: Offset of the run in the shard, in elements. The run may contain padding.
        flat: ``[numel]``, the memory of the shard. On a rank that holds none of the parameters, a separate tensor of
            one element, so that the optimizer keeps the same state there.
        is_here: Whether this rank holds rows of any of the parameters.
    """

    bucket: Bucket
    params: tuple[RowShardedTensor, ...]
    first: int
    start: int
    flat: Tensor
    is_here: bool
    state: dict[str, Any] = field(default_factory=dict)
    """State of the optimizer for ``flat``."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The same state by parameter, as it was put into the optimizer's state."""
    sources: dict[str, Any] = field(default_factory=dict)
    """State that ``shown`` was made from."""
    numbers: dict[str, Number] = field(default_factory=dict)
    """The tensors of ``state`` that are one number for all elements."""
    group: dict[str, Any] = field(default_factory=dict)
    """Their parameter group."""

    def __post_init__(self) -> None:
        self.memory = self.flat.detach()

    def part_of(self, gradient: Tensor) -> Tensor:
        """Return the run's part of its bucket's gradient, ``[shard_numel]``."""
        gradient = self.bucket.elements(gradient)
        return gradient[self.start : self.start + self.flat.numel()] if self.is_here else gradient.new_zeros(1)

    def cut(self, value: Tensor) -> list[RowShardedTensor]:
        """Return the rows of each parameter in a tensor of the run's shape."""
        places = self.bucket.places[self.first : self.first + len(self.params)]
        return [
            RowShardedTensor.wrap(
                value[place.start - self.start : place.stop - self.start].view(place.shape)
                if place.stop > place.start
                else value[:0].view(place.shape),
                param.row_split,
                param.topology,
                backing=(value,),
            )
            for param, place in zip(self.params, places, strict=True)
        ]

    def held(self) -> tuple[Any, ...]:
        """Return copies of what is held of the state, for :meth:`hold`."""
        return dict(self.state), [dict(shown) for shown in self.shown], dict(self.sources), dict(self.numbers)

    def hold(
        self, state: dict[str, Any], shown: list[dict[str, Any]], sources: dict[str, Any], numbers: dict[str, Number]
    ) -> None:
        """Hold state again as it was."""
        self.state, self.shown, self.sources, self.numbers = state, shown, sources, numbers

    def is_of_its_shape(self, value: Any) -> bool:
        """Whether a state tensor has a value for each element."""
        return type(value) is Tensor and value.shape == self.flat.shape

    def is_for_all(self, value: Any) -> bool:
        """Whether a state value applies to all of the run's parameters."""
        if not isinstance(value, Tensor):
            return is_plain(value)  # not a list of tensors, which have the run's shape
        return value.numel() == 1 and not self.is_of_its_shape(value)

    @property
    def has_containers(self) -> bool:
        """Whether state consists of more than tensors and constants, so that it may change unseen."""
        return any(not isinstance(value, Tensor) and not is_constant(value) for value in self.state.values())

    @property
    def is_shown(self) -> bool:
        """Whether all state is also found by parameter."""
        return all(self.is_for_all(value) or self.is_of_its_shape(value) for value in self.state.values())


class FlatStep:
    """Steps one optimizer over runs.

    Args:
        optimizer: Optimizer over sharded parameters, which holds this object.

    Raises:
        ValueError: The optimizer does not work element by element.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_elementwise(optimizer)
        self._reference = weakref.ref(optimizer)
        self._runs: dict[tuple[int, ...], list[Run]] = {}
        self.stepped: set[Bucket] = set()
        """Buckets that were stepped ahead, by :meth:`step_bucket`, and are left alone by the next call."""
        self._kernels: UpdateKernels | None = None
        self._scale: Tensor | None = None
        self.counts_calls = False
        """Whether a step has changed what the optimizer keeps in itself or in its groups."""
        vars(optimizer)[FLAT_STEP] = self
        optimizer.register_state_dict_pre_hook(self._check_state_by_parameter)

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def __call__(self, step: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        """Run ``step``, the optimizer's own without hooks, over runs."""
        loss = None
        if closure is not None:  # called once, as by elementwise optimizers, and before runs take the gradients
            with torch.enable_grad():
                loss = closure()
        before = kept_outside(self._optimizer)
        with self._over_runs():
            result = step()
        self.counts_calls |= kept_outside(self._optimizer) != before
        return result if closure is None else loss

    @property
    def has_hooks(self) -> bool:
        """Whether something runs before or after a step that may look at what the step reads or writes."""
        optimizer = self._optimizer
        return compat.has_step_hooks(optimizer) or is_wrapped(optimizer) or has_own_zero_grad(optimizer)

    @contextlib.contextmanager
    def compiled(self, kernels: UpdateKernels | None, scale: Tensor | None = None) -> Iterator[None]:
        """Context in which steps run ``kernels``, if there are any, where they can.

        Args:
            scale: What gradients are multiplied by, a 0-dimensional tensor on their device. None: nothing.
        """
        self._scale = scale
        if kernels is not None:
            kernels.begin_step()
            self._kernels = kernels
        try:
            yield
        finally:
            self._kernels = self._scale = None

    def kernel_of(self, run: Run, kernels: UpdateKernels, scaled: bool) -> UpdateKernel | str:
        """Return the compiled step of a run, or why it has none."""
        if kind_of(self._optimizer) != "elementwise":
            return "the optimizer is not known to work element by element"
        if run.bucket.plan.decoupled:
            return "its gradients are decoupled_grad"
        if run.bucket.plan.keeps_memory and not takes_lr(run.memory, run.group):
            return (
                "a CUDA graph would repeat the numbers that Python computes for it (cuda_graph_mode): make the "
                "optimizer with capturable=True, and with a learning rate that is a tensor on the device"
            )
        if not self._collect_state(run):
            return "its parameters have different state"
        return kernels.find(run.memory, run.group, run.state, scaled)

    def kernels_of(self, runs: Sequence[Run], kernels: UpdateKernels | None) -> Sequence[UpdateKernel]:
        """Return the compiled steps of a bucket's runs; empty if one of them has none."""
        found = [] if kernels is None else [self.kernel_of(run, kernels, scaled=False) for run in runs]
        compiled = [kernel for kernel in found if isinstance(kernel, UpdateKernel)]
        return compiled if len(compiled) == len(runs) else ()

    def runs_by_bucket(self) -> dict[Bucket, list[Run]]:
        """Return the runs of each bucket, in the order of parameter groups."""
        found: dict[Bucket, list[Run]] = {}
        for group in self._optimizer.param_groups:
            for run in self._runs_of(group):
                found.setdefault(run.bucket, []).append(run)
        return found

    def memory(self) -> Iterator[Tensor]:
        """Yield the tensors that steps over runs read and write, gradients excepted."""
        for run in itertools.chain.from_iterable(self.runs_by_bucket().values()):
            yield run.memory
            yield from (value for value in run.state.values() if isinstance(value, Tensor))
            yield from (number.own for number in run.numbers.values())

    @torch.no_grad()
    def step_bucket(
        self,
        runs: Sequence[Run],
        gradient: Tensor,
        step: Callable[[torch.optim.Optimizer], Any],
        kernels: Sequence[UpdateKernel] = (),
    ) -> bool:
        """Step over one bucket, ahead of the optimizer's step.

        Args:
            runs: The runs of the bucket, from :meth:`runs_by_bucket`.
            gradient: The bucket's gradient, ``[shard_numel]`` in the dtype of the shard.
            step: The optimizer's own step, without hooks.
            kernels: The compiled step of each run, instead of ``step``.

        Returns:
            Whether it was stepped. Not if parameters of a run have different state.
        """
        with _STEPPING:
            if kernels:
                self.stepped.add(runs[0].bucket)
                for run, kernel in zip(runs, kernels, strict=True):
                    self._run_kernel(kernel, run, gradient)
                return True
            return self._step_over(runs, gradient, step)

    def _step_over(self, runs: Sequence[Run], gradient: Tensor, step: Callable[[torch.optim.Optimizer], Any]) -> bool:
        optimizer = self._optimizer
        if not all(self._collect_state(run) for run in runs):
            return False
        groups, params = optimizer.param_groups, [run.group["params"] for run in runs]
        before = kept_outside(optimizer)
        self.stepped.add(runs[0].bucket)
        try:
            optimizer.param_groups = []
            for run in runs:
                self._give_gradient(run, gradient)
                if not optimizer.param_groups or optimizer.param_groups[-1] is not run.group:
                    optimizer.param_groups.append(run.group)
                    run.group["params"] = []
                run.group["params"].append(run.flat)
                if run.state:
                    optimizer.state[run.flat] = run.state
            step(optimizer)
        finally:
            optimizer.param_groups = groups
            for run, given in zip(runs, params, strict=True):
                run.group["params"] = given
            for run in runs:
                self._give_back(run, gradient)
        if kept_outside(optimizer) != before:
            raise RuntimeError(
                f"The {type(optimizer).__name__} counts calls of step() in itself or in its groups, and was declared "
                "to count in the state of parameters only (declare_optimizer). It was called for a part of the model."
            )
        return True

    @contextlib.contextmanager
    def _over_runs(self) -> Iterator[None]:
        state = self._optimizer.state
        is_flat = not why_not_flat(self._optimizer)  # the program may have replaced a part of its code since
        taken: list[tuple[Run, Tensor]] = []
        given = [group["params"] for group in self._optimizer.param_groups]
        try:
            for group in self._optimizer.param_groups:
                tensors: list[Tensor] = [param for param in group["params"] if not isinstance(param, RowShardedTensor)]
                for run in self._runs_of(group):
                    if run.bucket in self.stepped or (is_flat and self._step_compiled(run)):
                        continue
                    if is_flat and (gradient := self._take(run)) is not None:
                        taken.append((run, gradient))
                        tensors.append(run.flat)
                        if run.state:
                            state[run.flat] = run.state
                    else:
                        self._give_up(run)
                        tensors.extend(run.params)
                if self._scale is not None:
                    _scale_gradients(tensors, self._scale)
                group["params"] = tensors
            yield
        finally:
            for group, params in zip(self._optimizer.param_groups, given, strict=True):
                group["params"] = params
            for run, gradient in taken:
                self._give_back(run, gradient)

    def _runs_of(self, group: dict[str, Any]) -> list[Run]:
        params = [param for param in group["params"] if isinstance(param, RowShardedTensor)]
        key = tuple(id(param) for param in params)
        if key not in self._runs:
            self._runs[key] = _find_runs(params)
        for run in self._runs[key]:
            run.group = group
        return self._runs[key]

    @torch.no_grad()
    def _step_compiled(self, run: Run) -> bool:
        """Step over a run after the backward, if that is compiled."""
        if self._kernels is None or (gradient := gradients.flat_gradient(run.bucket)) is None:
            return False
        kernel = self.kernel_of(run, self._kernels, self._scale is not None)
        if isinstance(kernel, str):
            return False
        self._run_kernel(kernel, run, gradient, self._scale)
        return True

    @torch.no_grad()
    def _take(self, run: Run) -> Tensor | None:
        """Prepare a run for the step. Return its gradient; None: its parameters must be stepped one by one."""
        gradient = gradients.flat_gradient(run.bucket)
        if gradient is None or not self._collect_state(run):
            return None
        self._give_gradient(run, gradient)
        return gradient

    def _give_gradient(self, run: Run, gradient: Tensor) -> None:
        setattr(run.flat, run.bucket.plan.grad_attribute, run.part_of(gradient))

    def _collect_state(self, run: Run) -> bool:
        state = self._optimizer.state
        held = [state.get(param) or {} for param in run.params]
        if (
            run.shown
            and not run.has_containers
            and all(_same_objects(shown, state_of) for shown, state_of in zip(run.shown, held, strict=True))
        ):
            return all(number.take() for number in run.numbers.values())
        if not any(held):  # the first step, or the state was cleared
            run.hold({}, [], {}, {})
            return True
        # Build it from the parameters' state: a checkpoint was loaded, steps were taken before, or the optimizer
        # created the state when it was constructed.
        if any(each.keys() != held[0].keys() for each in held):
            return False
        for key, value in held[0].items():
            if not isinstance(value, RowShardedTensor) and not all(_are_equal(value, each[key]) for each in held):
                return False
        collected = {}
        for key, value in held[0].items():
            if isinstance(value, RowShardedTensor):
                flat = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
                for part, each in zip(run.cut(flat), held, strict=True):
                    part._local_tensor.copy_(each[key]._local_tensor)
                collected[key] = flat
            else:
                collected[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        run.state, run.sources = collected, {}
        return True

    @torch.no_grad()
    def _give_back(self, run: Run, gradient: Tensor) -> None:
        """Restore state by parameter after the step with the gradient of its bucket."""
        setattr(run.flat, run.bucket.plan.grad_attribute, None)
        _note_write(run)
        state = self._optimizer.state
        if run.flat in state:
            run.state = state.pop(run.flat)
            _own_state(run.state, gradient)
        self._show_state(run)

    def _run_kernel(self, kernel: UpdateKernel, run: Run, gradient: Tensor, scale: Tensor | None = None) -> None:
        """Step over a run with the gradient of its bucket, ``[shard_numel]``."""
        if scale is not None:
            scale = scale.to(run.memory.device, torch.float32)
        kernel(run.memory, run.part_of(gradient), scale, run.group.get("lr", 0.0), run.state)
        _note_write(run)
        self._show_state(run)

    def _show_state(self, run: Run) -> None:
        """Let the optimizer's state by parameter be views of the run's, and numbers of their own."""
        if run.sources and not run.has_containers and _same_objects(run.sources, run.state):
            for number in run.numbers.values():
                number.show()
            return
        state = self._optimizer.state
        run.shown, run.numbers = [{} for _ in run.params], {}
        for key, value in run.state.items():
            if run.is_of_its_shape(value):
                for shown, part in zip(run.shown, run.cut(value), strict=True):
                    shown[key] = part
            elif isinstance(value, Tensor) and run.is_for_all(value):
                number = run.numbers[key] = Number(value, len(run.params), run.bucket.plan.keeps_memory)
                for shown, part in zip(run.shown, number.own.unbind(), strict=True):
                    shown[key] = part
            elif run.is_for_all(value):
                for shown in run.shown:
                    shown[key] = copy.deepcopy(value)
        run.sources = dict(run.state)
        for param, shown in zip(run.params, run.shown, strict=True):
            if shown:
                state[param] = dict(shown)

    def _give_up(self, run: Run) -> None:
        """Prepare the parameters of a run for separate steps.

        Raises:
            RuntimeError: The optimizer keeps state for all of them together.
        """
        if not run.is_shown:
            raise RuntimeError(
                f"The {type(self._optimizer).__name__} has to step {len(run.params)} parameters of unit "
                f"{run.bucket.plan.unit!r} one by one, because a gradient or a part of its state is missing or was "
                "changed. It keeps state for all of them together (flat=True), which cannot be separated."
            )
        for number in run.numbers.values():
            number.mark_changed()

    def _check_state_by_parameter(self, optimizer: torch.optim.Optimizer) -> None:
        for runs in self._runs.values():
            for run in runs:
                for key, value in run.state.items():
                    if not run.is_for_all(value) and not run.is_of_its_shape(value):
                        raise RuntimeError(
                            f"The {type(optimizer).__name__}'s state {key!r} is a {type(value).__name__} for "
                            f"{len(run.params)} parameters of unit {run.bucket.plan.unit!r} together (flat=True): it "
                            "cannot be separated by parameter, so a checkpoint would lack it."
                        )


def _note_write(run: Run) -> None:
    # Fused kernels, and kernels that take addresses, do not increment the version when they write.
    torch.autograd.graph.increment_version(run.bucket.flat)


def _scale_gradients(tensors: Sequence[Tensor], scale: Tensor) -> None:
    for gradient in [tensor.grad for tensor in tensors if tensor.grad is not None]:
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(local.device))


def _own_state(state: dict[str, Any], gradient: Tensor) -> None:
    """Copy state that an optimizer keeps in the memory of a gradient, which is used again for other gradients."""
    address = gradient.untyped_storage().data_ptr()
    for key, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == address:
            state[key] = value.clone()


def flat_step_of(optimizer: torch.optim.Optimizer) -> FlatStep | None:
    """Return what steps ``optimizer`` over flat shards; None: it steps over parameters."""
    found: FlatStep | None = vars(optimizer).get(FLAT_STEP)
    return found


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer is not known to work element by element, or block by block."""
    if why := why_not_flat(optimizer):
        raise ValueError(
            f"flat=True: {why}. Or leave flat=True out; whole=True takes optimizers that step each parameter by itself."
        )


def _find_runs(params: list[Any]) -> list[Run]:
    """Return the runs of one group's parameters, in the order of their buckets."""
    members: dict[Bucket, list[int]] = {}
    for param in params:
        handle: ParamHandle = param.mfsdp_handle
        members.setdefault(handle.bucket, []).append(handle.index)
    runs = []
    for bucket, indices in members.items():
        indices.sort()
        begin = 0
        for i in range(1, len(indices) + 1):
            if i == len(indices) or indices[i] != indices[i - 1] + 1:
                runs.append(_run(bucket, indices[begin], indices[i - 1]))
                begin = i
    return runs


def _run(bucket: Bucket, first: int, last: int) -> Run:
    """Make a run that includes the padding up to the next parameter, so that an optimizer's last block is complete."""
    params = bucket.params[first : last + 1]
    shard = bucket.elements(bucket.flat.detach())
    held = [place for place in bucket.places[first : last + 1] if place.stop > place.start]
    if not held:
        return Run(bucket, params, first, 0, torch.zeros_like(shard[:1], requires_grad=True), is_here=False)
    later = [place.start for place in bucket.places[last + 1 :] if place.stop > place.start]
    start, stop = held[0].start, min([*later, shard.numel()])
    return Run(bucket, params, first, start, shard[start:stop].requires_grad_(), is_here=True)


def _same_objects(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(other[key] is value for key, value in one.items())


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)
