"""Stages run, and what they return is what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import compat
from .lane import Lane
from .plain import is_plain
from .stage import Spec, State


def run(lane: Lane, part: str, index: int, x: Tensor, state: State) -> Tensor:
    """Run a local stage."""
    stage, spec = lane[part][index], lane.spec(part, index)
    if (call := stage.call(spec)) is not None:
        operator, arguments = call
        result: Tensor = operator(x, *arguments)
        return result
    return _unkept(_checked(stage.run, x, state, lane.spec(part, index + 1)), state)


def start(lane: Lane, part: str, index: int, x: Tensor, state: State) -> Tensor:
    """Start a flying stage."""
    stage = lane[part][index]
    if stage.group is not None and stage.group.size == 1 and is_plain(stage):
        return x.clone()
    return _checked(stage.start, x, state, lane.flight_spec(part, index))


def wait(lane: Lane, part: str, index: int, flying: Tensor, state: State) -> Tensor:
    """Wait for a flying stage."""
    return _unkept(_checked(lane[part][index].wait, flying, state, lane.spec(part, index + 1)), state)


def _unkept(result: Tensor, state: State) -> Tensor:
    """Copy what a stage keeps and returns: its memory is freed when a bucket reshards, and may be written to."""
    return apart(result, *compat.tree_leaves(state)) if state else result


def apart(result: Tensor, *others: Any) -> Tensor:
    """Return ``result``, or a copy of it if it shares memory with one of ``others``."""
    memory = result.untyped_storage().data_ptr()
    shares = any(isinstance(other, Tensor) and other.untyped_storage().data_ptr() == memory for other in others)
    return result.clone() if shares else result


def _checked(call: Callable[[Tensor, State], Tensor], x: Tensor, state: State, spec: Spec) -> Tensor:
    result = call(x, state)
    if not isinstance(result, Tensor) or (tuple(result.shape), result.dtype) != ((spec.numel,), spec.dtype):
        got = f"{list(result.shape)} in {result.dtype}" if isinstance(result, Tensor) else repr(result)
        raise RuntimeError(
            f"{call.__qualname__} returned {got} for [{x.numel()}] in {x.dtype}, not [{spec.numel}] in {spec.dtype}, "
            "as the stage's out(spec) or flight(spec) says. Mend the stage."
        )
    if result.device != x.device:
        raise RuntimeError(f"{call.__qualname__} returned a tensor on {result.device}, not on {x.device}.")
    return result
