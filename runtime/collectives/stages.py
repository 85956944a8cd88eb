"""Stages run: what they get of a bucket, and what they must return."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ..lanes.lane import Flight, Lane
from ..lanes.plain import PLAIN
from ..lanes.stage import NO_STATE, Spec, State
from ..memory.deferred_gradients import bucket_of


def run_stage(lane: Lane, part: str, index: int, x: Tensor, token: Tensor | None) -> Tensor:
    """Run a local stage."""
    return _checked(lane, part, index, lane[part][index].run, x, token, lane.spec(part, index + 1))


def start_stage(lane: Lane, part: str, index: int, x: Tensor, token: Tensor | None) -> Tensor:
    """Start a flying stage, whether or not it is due."""
    stage = lane[part][index]
    if stage.group is not None and stage.group.size == 1 and isinstance(stage, PLAIN):
        return x.clone()
    return _checked(lane, part, index, stage.start, x, token, lane.flight_spec(part, index))


def wait_stage(lane: Lane, part: str, index: int, flying: Tensor, token: Tensor | None) -> Tensor:
    """Wait for a flying stage."""
    return _checked(lane, part, index, lane[part][index].wait, flying, token, lane.spec(part, index + 1))


def start_flight(lane: Lane, flight: Flight, x: Tensor, token: Tensor | None) -> Tensor:
    """Start a flight, whether or not it is due, after the local stages behind its gate."""
    return start_stage(lane, flight.part, flight.index, run_places(lane, flight.gated, x, token), token)


def land_flight(flying: Tensor, lane: Lane, flight: Flight, token: Tensor | None) -> Tensor:
    """Wait for a flight, whether or not it is due, and run the local stages behind it."""
    landed = wait_stage(lane, flight.part, flight.index, flying, token)
    return run_places(lane, flight.after, landed, token)


def run_places(lane: Lane, places: Sequence[tuple[str, int]], x: Tensor, token: Tensor | None) -> Tensor:
    """Run local stages, whether or not they are due."""
    for part, index in places:
        stage = lane[part][index]
        call = stage.call(lane.spec(part, index))
        x = call[0](x, *call[1]) if call is not None else run_stage(lane, part, index, x, token)
    return x


def _checked(
    lane: Lane,
    part: str,
    index: int,
    call: Callable[[Tensor, State], Tensor],
    x: Tensor,
    token: Tensor | None,
    spec: Spec,
) -> Tensor:
    stage = lane[part][index]
    state = bucket_of(token).state_of(part, index) if stage.keeps_state and token is not None else NO_STATE
    result = call(x, state)
    if not isinstance(result, Tensor) or (tuple(result.shape), result.dtype) != ((spec.numel,), spec.dtype):
        got = f"{list(result.shape)} in {result.dtype}" if isinstance(result, Tensor) else repr(result)
        raise RuntimeError(
            f"{call.__qualname__}, stage {index} of {part!r}, returned {got} for [{x.numel()}] in {x.dtype}, not "
            f"[{spec.numel}] in {spec.dtype}, as its out(spec) or flight(spec) says. Mend the stage."
        )
    return result
