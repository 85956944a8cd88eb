"""Timing of the stages of a pipeline under the one-forward-one-backward schedule, torch's Schedule1F1B.

Sources: https://arxiv.org/abs/1806.03377 and https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mfsdp_compile.runtime.schedule.phase import Phase


def order(stage: int, stages: int, microbatches: int) -> list[Phase]:
    """Return the forwards and backwards of a stage, in order.

    There must be at least as many microbatches as stages. Activations of at most ``stages - stage`` microbatches are in
    memory at a time.
    """
    ahead = stages - stage - 1
    alternating = [Phase.FORWARD, Phase.BACKWARD] * (microbatches - ahead)
    return [Phase.FORWARD] * ahead + alternating + [Phase.BACKWARD] * ahead


def begins(
    orders: Sequence[Sequence[Phase]], seconds: Sequence[Mapping[Phase, Sequence[float]]], hop: float
) -> list[list[float]]:
    """Return when each forward and backward can begin: when its rank is free, and its input has arrived.

    Args:
        orders: Forwards and backwards of each stage, in order.
        seconds: Their durations: for each stage, by microbatch.
        hop: Seconds from a stage to the next.

    Returns:
        Start times for each stage, in its order.
    """
    last = len(orders) - 1
    over: dict[tuple[int, Phase, int], float] = {}
    found: list[list[float]] = [[] for _ in orders]
    free = [0.0] * len(orders)
    counts = [dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0) for _ in orders]
    while any(len(done) < len(all_) for done, all_ in zip(found, orders, strict=True)):
        for stage, phases in enumerate(orders):
            while len(found[stage]) < len(phases):
                phase = phases[len(found[stage])]
                number = counts[stage][phase]
                source = stage - 1 if phase is Phase.FORWARD else stage + 1
                arrived = 0.0
                if 0 <= source <= last:
                    if (source, phase, number) not in over:
                        break
                    arrived = over[source, phase, number] + hop
                begin = max(free[stage], arrived)
                free[stage] = over[stage, phase, number] = begin + seconds[stage][phase][number]
                found[stage].append(begin)
                counts[stage][phase] += 1
    return found
