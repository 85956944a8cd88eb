"""Stages run with what they remember of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..lanes import running
from ..lanes.lane import Flight, Lane
from ..lanes.stage import NO_STATE, State
from ..memory.deferred_gradients import bucket_of


def state_of(lane: Lane, part: str, index: int, token: Tensor | None) -> State:
    """Return what a stage remembers of the bucket that a token stands for."""
    if not lane[part][index].keeps_state or token is None:
        return NO_STATE
    state: State = bucket_of(token).state_of(lane, part, index)
    return state


def start_flight(lane: Lane, flight: Flight, x: Tensor, token: Tensor | None) -> Tensor:
    """Start a flight, whether or not it is due, after the local stages behind its gate."""
    x = run_places(lane, flight.gated, x, token)
    return running.start(lane, flight.part, flight.index, x, state_of(lane, flight.part, flight.index, token))


def land_flight(flying: Tensor, lane: Lane, flight: Flight, token: Tensor | None) -> Tensor:
    """Wait for a flight, whether or not it is due, and run the local stages behind it."""
    state = state_of(lane, flight.part, flight.index, token)
    return run_places(lane, flight.after, running.wait(lane, flight.part, flight.index, flying, state), token)


def run_places(lane: Lane, places: Sequence[tuple[str, int]], x: Tensor, token: Tensor | None) -> Tensor:
    """Run local stages, whether or not they are due."""
    for part, index in places:
        x = running.run(lane, part, index, x, state_of(lane, part, index, token))
    return x
