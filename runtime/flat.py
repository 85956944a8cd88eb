"""An optimizer's step over flat shards instead of parameter by parameter.

Parameters of one group that lie side by side in a bucket are one run, an ordinary flat tensor: a slice of this rank's
shard. An optimizer that works element by element, or block by block, does the same to a run as to its parameters, with one
kernel instead of hundreds; and it may be somebody else's that has never heard of DTensors, since runs are none.

``param_groups`` and ``state`` stay what they are between steps: parameters are DTensors, and their state tensors are views
of the runs' (so that checkpoints, and everything else that asks by parameter, need not know). During ``step`` the groups
hold runs.

Where this cannot be (a parameter without gradient, state that differs between the parameters of a run) the run is stepped
parameter by parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import gradients
from .bucket import Bucket, Home
from .tensor import RowShardedTensor

__all__ = ["FlatStep", "check_elementwise"]

_NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)


@dataclass(eq=False)
class _Run:
    """Parameters ``first`` to ``last`` of a bucket, side by side.

    Args:
        bucket: theirs.
        params: they.
        start: where the run begins in the shard; it may hold padding.
        flat: ``[numel]``, the memory of the shard. On a rank that holds none of the parameters one element of its own, so
            that the optimizer keeps the same state there.
        is_here: whether this rank holds any.
    """

    bucket: Bucket
    params: tuple[RowShardedTensor, ...]
    first: int
    start: int
    flat: Tensor
    is_here: bool
    state: dict[str, Any] = field(default_factory=dict)
    """The optimizer's, for ``flat``."""
    shown: list[dict[str, Any]] = field(default_factory=list)
    """The same by parameter, as it was put into the optimizer's state."""
    sources: dict[str, Any] = field(default_factory=dict)
    """What ``shown`` was made of."""

    def cut(self, value: Tensor) -> list[RowShardedTensor]:
        """The rows of each parameter in a tensor of the run's shape."""
        places = self.bucket.places[self.first : self.first + len(self.params)]
        return [
            RowShardedTensor.wrap(
                value[place.start - self.start : place.stop - self.start].view(place.shape)
                if place.stop > place.start
                else value[:0].view(place.shape),
                param.split,
                param.topology,
                backing=(value,),
            )
            for param, place in zip(self.params, places, strict=True)
        ]

    def is_of_its_shape(self, value: Any) -> bool:
        """Whether a state tensor has a value for each element."""
        return type(value) is Tensor and value.shape == self.flat.shape

    def is_for_all(self, value: Any) -> bool:
        """Whether a state value is one for all of the run's parameters."""
        return not isinstance(value, Tensor) or (value.numel() == 1 and not self.is_of_its_shape(value))


class FlatStep:
    """Steps of one optimizer over runs.

    Args:
        optimizer: over sharded parameters.

    Raises:
        ValueError: the optimizer needs more than the elements.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        check_elementwise(optimizer)
        self._optimizer = optimizer
        self._runs: dict[tuple[int, ...], list[_Run]] = {}
        optimizer.register_state_dict_pre_hook(self._check_state_by_parameter)

    def __call__(self, step: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        """Run ``step``, the optimizer's own, over runs."""
        loss = None
        if closure is not None:  # once, as elementwise optimizers do, and before runs take the gradients
            with torch.enable_grad():
                loss = closure()
        with self._over_runs():
            result = step()
        return result if closure is None else loss

    @contextlib.contextmanager
    def _over_runs(self) -> Iterator[None]:
        state = self._optimizer.state
        taken: list[_Run] = []
        given = [group["params"] for group in self._optimizer.param_groups]
        try:
            for group in self._optimizer.param_groups:
                tensors: list[Tensor] = []
                for run in self._runs_of(group["params"]):
                    if self._take(run):
                        taken.append(run)
                        tensors.append(run.flat)
                        if run.state:
                            state[run.flat] = run.state
                    else:
                        self._give_up(run)
                        tensors.extend(run.params)
                group["params"] = tensors
            yield
        finally:
            for group, params in zip(self._optimizer.param_groups, given, strict=True):
                group["params"] = params
            for run in taken:
                self._give_back(run)

    def _runs_of(self, params: list[Any]) -> list[_Run]:
        key = tuple(id(param) for param in params)
        if key not in self._runs:
            self._runs[key] = _find_runs(params)
        return self._runs[key]

    @torch.no_grad()
    def _take(self, run: _Run) -> bool:
        """Prepare a run for the step; False if it must go by parameters."""
        gradient = gradients.flat_gradient(run.bucket)
        if gradient is None or not self._collect_state(run):
            return False
        mine = gradient[run.start : run.start + run.flat.numel()] if run.is_here else gradient.new_zeros(1)
        setattr(run.flat, run.bucket.plan.grad_attribute, mine)
        return True

    def _collect_state(self, run: _Run) -> bool:
        state = self._optimizer.state
        held = [state.get(param) or {} for param in run.params]
        if run.shown and all(_same_objects(mine, its) for mine, its in zip(run.shown, held, strict=True)):
            return True
        if not any(held):  # the first step, or somebody has cleared it
            run.state, run.shown, run.sources = {}, [], {}
            return True
        # From parameters: a checkpoint was loaded, steps were made before, or the optimizer made it when it was built.
        if any(its.keys() != held[0].keys() for its in held):
            return False
        collected = {}
        for key, value in held[0].items():
            values = [its[key] for its in held]
            if isinstance(value, RowShardedTensor):
                flat = torch.zeros_like(run.flat, dtype=value.dtype, requires_grad=False)
                for part, whole in zip(run.cut(flat), values, strict=True):
                    part._local_tensor.copy_(whole._local_tensor)
                collected[key] = flat
            elif isinstance(value, Tensor):
                if not all(torch.equal(value, other) for other in values):
                    return False
                collected[key] = value.clone()
            elif any(other != value for other in values):
                return False
            else:
                collected[key] = value
        run.state, run.sources = collected, {}
        return True

    @torch.no_grad()
    def _give_back(self, run: _Run) -> None:
        """After the step: state by parameter again."""
        setattr(run.flat, run.bucket.plan.grad_attribute, None)
        # Fused kernels, and those that are given addresses, do not say that they have written.
        torch.autograd.graph.increment_version(run.bucket.flat)
        state = self._optimizer.state
        if run.flat in state:
            run.state = state.pop(run.flat)
        if run.sources and _same_objects(run.sources, run.state):
            return
        run.shown = [{} for _ in run.params]
        for key, value in run.state.items():
            if run.is_of_its_shape(value):
                for shown, part in zip(run.shown, run.cut(value), strict=True):
                    shown[key] = part
            elif run.is_for_all(value):
                for shown in run.shown:
                    shown[key] = value
        run.sources = dict(run.state)
        for param, shown in zip(run.params, run.shown, strict=True):
            if shown:
                state[param] = dict(shown)

    def _give_up(self, run: _Run) -> None:
        """Parameters step by themselves: each counts its own steps."""
        for param in run.params:
            its = self._optimizer.state.get(param) or {}
            for key, value in its.items():
                if isinstance(value, Tensor) and not isinstance(value, RowShardedTensor):
                    its[key] = value.clone()

    def _check_state_by_parameter(self, optimizer: torch.optim.Optimizer) -> None:
        for runs in self._runs.values():
            for run in runs:
                for key, value in run.state.items():
                    if not run.is_for_all(value) and not run.is_of_its_shape(value):
                        raise RuntimeError(
                            f"The {type(optimizer).__name__}'s state {key!r} is a {type(value).__name__} of shape "
                            f"{tuple(value.shape)} for {len(run.params)} parameters of unit {run.bucket.plan.unit!r} "
                            "together (flat=True): it cannot be told apart by parameter, so that a checkpoint would "
                            "lack it."
                        )


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimizer is known to need more than the elements."""
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise ValueError(
            f"flat=True: a {type(optimizer).__name__} does not work element by element; it has to see parameters."
        )


def _find_runs(params: list[Any]) -> list[_Run]:
    """Runs of one group's parameters, in the order of their buckets."""
    members: dict[Bucket, list[int]] = {}
    for param in params:
        home: Home = param.mfsdp_home
        members.setdefault(home.bucket, []).append(home.index)
    runs = []
    for bucket, indices in members.items():
        indices.sort()
        begin = 0
        for i in range(1, len(indices) + 1):
            if i == len(indices) or indices[i] != indices[i - 1] + 1:
                runs.append(_run(bucket, indices[begin], indices[i - 1]))
                begin = i
    return runs


def _run(bucket: Bucket, first: int, last: int) -> _Run:
    """With the padding up to where the next parameter begins: of an optimizer's blocks the last is whole then."""
    params = bucket.params[first : last + 1]
    held = [place for place in bucket.places[first : last + 1] if place.stop > place.start]
    if not held:
        return _Run(bucket, params, first, 0, torch.zeros_like(bucket.flat[:1], requires_grad=True), is_here=False)
    later = [place.start for place in bucket.places[last + 1 :] if place.stop > place.start]
    start, stop = held[0].start, min([*later, bucket.flat.numel()])
    return _Run(bucket, params, first, start, bucket.flat.detach()[start:stop].requires_grad_(), is_here=True)


def _same_objects(mine: dict[str, Any], its: dict[str, Any]) -> bool:
    return mine.keys() == its.keys() and all(its[key] is value for key, value in mine.items())
