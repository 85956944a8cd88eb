"""What a captured step has baked in: addresses of memory, and numbers on the host. Compared before each replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ... import compat
from ...memory.tensor import ACCUMULATE_HOOKS, TENSOR_HOOKS, UnreducedGradient
from ...model.sharded_model import ShardedModel
from ...optim.kinds import is_of_torch
from ..optimizers.constants import OF_SCHEDULERS
from ..optimizers.flat_step import flat_step_of

_ADDRESS = "address"
_ELSEWHERE = frozenset({"param_groups", "state", "_opt_called"})
"""Attributes of an optimizer that are looked at by themselves, or that schedulers set."""
Fact = tuple[str, str, Any]
"""Kind of what is baked in, its name, and its address or value."""


class Baked:
    """What steps of one model bake in.

    Args:
        model: The model. It gets no other modules or buffers later.
    """

    def __init__(self, model: ShardedModel) -> None:
        assert model.module is not None
        self._model = model
        self._buffers = [
            (f"{prefix}.{name}" if prefix else name, module, name)
            for prefix, module in model.module.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._hooks: list[tuple[str, Mapping[Any, Any]]] = [
            (f"{prefix} ({name})", hooks)
            for prefix, module in model.module.named_modules()
            for name, hooks in vars(module).items()
            if name.endswith("_hooks")
        ]

    def facts(self, optimizers: Iterable[torch.optim.Optimizer], gradients: bool = True) -> list[Fact]:
        """Return what a step that is captured now bakes in.

        Args:
            optimizers: The optimizers that step in it.
            gradients: Whether to include gradients and deferred sums.
        """
        return [*self._of_model(gradients), *(fact for each in optimizers for fact in _of_optimizer(each))]

    def _of_model(self, gradients: bool) -> Iterator[Fact]:
        for bucket in self._model.buckets:
            name = bucket.plan.name
            yield "parameters of bucket", name, bucket.flat.data_ptr()
            if bucket.resident is not None:
                yield "gathered parameters of bucket", name, bucket.resident.data_ptr()
            yield from (("what is sent of bucket", name, made.data_ptr()) for made in bucket.of_maker())
            if not gradients:
                continue
            if (total := bucket.deferred_total) is not None:
                yield "deferred gradients of bucket", name, total.data_ptr()
            for gradient, locations in zip(bucket.gradients, bucket.locations, strict=True):
                if gradient is not None and not isinstance(gradient, UnreducedGradient):
                    yield "gradient of", locations[0].name, _address(gradient)
        for full_name, module, name in self._buffers:
            yield "buffer", full_name, _fact(module._buffers.get(name))
        yield from self._of_hooks()

    def _of_hooks(self) -> Iterator[Fact]:
        for name, hooks in self._hooks:
            if hooks:
                yield "hooks of module", name, tuple(map(_Same, hooks.values()))
        yield "hooks of", "all modules", tuple(map(_Same, compat.hooks_of_all_modules()))
        for bucket in self._model.buckets:
            for param, locations in zip(bucket.params, bucket.locations, strict=True):
                for hooks in (vars(param).get(TENSOR_HOOKS), vars(param).get(ACCUMULATE_HOOKS)):
                    if hooks:
                        yield "hooks of parameter", locations[0].name, tuple(map(_Same, hooks.values()))


def difference(before: Sequence[Fact], now: Sequence[Fact]) -> Fact | None:
    """Return the first fact of ``before`` that does not hold now, or that is new; None: they are equal."""
    if before == now:
        return None
    known, new = ({_hashable(fact): fact for fact in facts} for facts in (before, now))
    return next((fact for key, fact in (*known.items(), *new.items()) if not (key in known and key in new)), None)


def _hashable(fact: Fact) -> tuple[str, str, str]:
    return fact[0], fact[1], repr(fact[2])


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Fact]:
    kind, is_torchs = type(optimizer).__name__, is_of_torch(optimizer)
    yield f"{kind}'s hooks around", "step", compat.has_step_hooks(optimizer)
    for name, value in () if is_torchs else vars(optimizer).items():
        if name not in _ELSEWHERE and not name.endswith("_hooks"):
            yield f"{kind}'s attribute", name, _fact(value)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and not (is_torchs and name in OF_SCHEDULERS):
                yield f"{kind}'s hyperparameter, in group {number},", name, _fact(value)
        for param in group["params"]:
            handle = getattr(param, "mfsdp_handle", None)
            owner = (
                handle.bucket.locations[handle.index][0].name
                if handle is not None
                else f"parameter of {tuple(param.shape)}"
            )
            for name, value in optimizer.state.get(param, {}).items():
                yield f"{kind}'s state {name!r} of", owner, _fact(value)
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            yield f"{kind}'s state", str(key), _fact(value)


class _Same:
    """A value that is compared by what it is, and not by what it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        is_method = isinstance(self.value, MethodType)
        return self.value is other.value or (is_method and self.value == other.value)

    def __hash__(self) -> int:
        return id(type(self.value))

    def __repr__(self) -> str:
        function = getattr(self.value, "__func__", self.value)
        return f"a {type(self.value).__name__} at {id(function):#x}"


def _fact(value: Any) -> Any:
    """Return what is baked in of a value: where a tensor is, what numbers and containers hold, which object it is."""
    if isinstance(value, Tensor):
        return _ADDRESS, _address(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_fact, value))
    if isinstance(value, dict):
        return tuple((_fact(key), _fact(each)) for key, each in value.items())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return value
    return value.tobytes() if hasattr(value, "tobytes") else _Same(value)


def is_address(value: Any) -> bool:
    """Whether a fact about a hyperparameter, a buffer or state is where a tensor is, and not a number."""
    return isinstance(value, tuple) and value[:1] == (_ADDRESS,)


def _address(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def static_tensors(model: ShardedModel, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors that a step may read, besides its arguments, and that other code does not replace unseen."""
    for bucket in model.buckets:
        yield bucket.flat
        if bucket.resident is not None:
            yield bucket.resident
        yield from bucket.of_maker()
        if bucket.pending is not None:
            yield bucket.pending.token
        yield from bucket.kept_memory()
        yield from (gradient for gradient in bucket.gradients if gradient is not None)
    yield from model.comm_buffers.memory
    yield from model.module_buffers()
    for optimizer in optimizers:
        if (flat := flat_step_of(optimizer)) is not None:
            yield from flat.memory()
        for group in optimizer.param_groups:
            yield from (value for value in group.values() if isinstance(value, Tensor))
        yield from (leaf for leaf in compat.tree_leaves([*optimizer.state.values()]) if isinstance(leaf, Tensor))


def refuse_optimizers(optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> str | None:
    """Return why a step of one of these optimizers cannot be captured on ``device``; None: all of them can."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if compat.has_step_hooks(optimizer):
            return f"hooks run before or after the step of {kind}, and a replay runs no Python. Remove them"
        states = [state for state in optimizer.state.values() if isinstance(state, dict)]
        for group in optimizer.param_groups:
            if not group.get("capturable", True):
                return (
                    f"{kind} counts its steps on the host, so that every replay would be the same step. Make it with "
                    "capturable=True"
                )
        for state in states:
            for name, value in state.items():
                if name == "step" and not isinstance(value, Tensor):
                    return (
                        f"{kind} counts its steps in a Python number, state {name!r}, so that every replay would be "
                        "the same step. Use an optimizer of torch.optim with capturable=True"
                    )
        held = [(f"state {name!r}", value) for state in states for name, value in state.items()]
        for group in optimizer.param_groups:
            held += [(f"hyperparameter {n!r}", value) for n, value in group.items() if n not in OF_SCHEDULERS]
        for what, value in held:
            if isinstance(value, Tensor) and value.device != device:
                return (
                    f"the {kind}'s {what} is a tensor on {value.device}, whose value every replay would take from the "
                    f"capture. Put it on {device}"
                )
    return None
