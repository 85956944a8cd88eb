"""Lanes with stages of plug-ins run on small integers, and must do what the strategy's lane does.

What a stage means is what it says (:class:`.stage.Stage`), and the verifier believes it. Small integers are exact in
every dtype, so the sum of all ranks, and what is gathered, are known to the bit. A stage that rounds says how much it
may be off.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..geometry.topology import Topology
from . import running
from .lane import GATHERING, REDUCING, Lane
from .plain import Scale
from .stage import NO_STATE, State

ROUNDS = 3
"""So many times, so that stages that keep state have something to remember."""


class LyingStage(RuntimeError):
    """A stage does something else than it says."""


def probe(lanes: Iterable[tuple[str, Lane, Lane, Topology]], device: torch.device) -> None:
    """Run lanes, and compare them with those of the strategy. A collective of all ranks of their topologies.

    Args:
        lanes: Name of the bucket, the lane, the one that it must be like, and the ranks.

    Raises:
        LyingStage: On every rank, if any rank has got something else.
    """
    for bucket, lane, plain, topology in lanes:
        for parts, what in ((GATHERING, "gathers"), (REDUCING, "reduces")):
            if all(lane[part] == plain[part] for part in parts):
                continue
            states: dict[tuple[str, int], State] = collections.defaultdict(dict)
            lane, plain = _travelling(lane), _travelling(plain)
            off, allowed = 0.0, sum(stage.error for part in parts for stage in lane[part])
            if topology.every.size & topology.every.size - 1 and any(getattr(s, "op", "") == "avg" for s in lane.each):
                allowed += torch.finfo(lane.packed.dtype).eps  # means of three are no integers
            for number in range(ROUNDS):
                x = _integers(lane, parts, topology, number, device)
                right, got = travel(_unscaled(plain), parts, x.clone(), None), travel(_unscaled(lane), parts, x, states)
                scale = right.abs().max().clamp(min=1e-30).double()
                worst = ((got.double() - right.double()).abs().max() / scale).nan_to_num(torch.inf).item()
                off = max(off, worst)
            most = topology.every.all_reduce(torch.tensor([off], device=device), "max", in_order=False).item()
            if most > allowed:
                mine = "" if off > allowed else "; this rank got what it should, others did not"
                raise LyingStage(
                    f"Bucket {bucket!r} {what} something else than the strategy does: of small integers, the result "
                    f"is off by {most:.3g} of the largest{mine}. Allowed: {allowed:.3g}, the sum of stages' errors. "
                    f"Its lane is {lane.text!r}. A stage does not do what it says (gathers, scatters, sums, error, "
                    "keeps_state): mend it, or take the plug-in out."
                )


def _travelling(lane: Lane) -> Lane:
    """Return a lane without what is run for all buckets together, and what needs scales."""
    if not lane.is_joint:
        return lane
    lane = lane.change(lambda stage: stage.takes_scales, lambda stage: (), *GATHERING)
    return replace(lane, shard=lane.spec("step", 1), step=lane.step[1:])


def _unscaled(lane: Lane) -> Lane:
    return lane.change(lambda stage: isinstance(stage, Scale), lambda stage: (), *REDUCING)


def _integers(lane: Lane, parts: Sequence[str], topology: Topology, number: int, device: torch.device) -> Tensor:
    """Return integers that are exact in 8 bits, those of bfloat16, and whose sums over all ranks are."""
    spec = lane.spec(parts[0])
    if parts is GATHERING:
        most, first = 127, topology.shard * spec.numel
    else:
        most, first = max(1, 128 // topology.every.size), topology.every.rank * 3
    places = torch.arange(first, first + spec.numel, device=device)
    values = (places * (5 + 2 * number) + places // 11) % (2 * most + 1) - most
    return values.to(spec.dtype)


def travel(lane: Lane, parts: Sequence[str], x: Tensor, states: dict[tuple[str, int], State] | None) -> Tensor:
    """Run parts of a lane, whether or not they are due.

    Args:
        states: What stages remember; None if none does.
    """
    for part in parts:
        for index, stage in enumerate(lane[part]):
            state = states[part, index] if states is not None and stage.keeps_state else NO_STATE
            if not stage.flies:
                x = running.run(lane, part, index, x, state)
                continue
            x = running.wait(lane, part, index, running.start(lane, part, index, x, state), state)
    return x
