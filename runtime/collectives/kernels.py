"""Kernels of the operators that are listed in :mod:`.library`. Those that pack gradients are in :mod:`.pack`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compat
from ..geometry.exchange import Buffers
from ..lanes import running
from ..lanes.lane import lane_at
from ..memory.comm_buffers import take
from ..memory.deferred_gradients import bucket_of
from ..memory.gradients import defer_unless_due
from ..ranks import profiling
from ..step import graph_runs
from .fakes import like
from .library import library
from .stages import start_flight, state_of


@torch.library.impl(library, "portion", "CompositeExplicitAutograd")
def _portion(whole: Tensor, size: int, group: str) -> Tensor:
    return whole.chunk(size)[dist.get_rank(compat.process_group(group))].clone()


@torch.library.impl(library, "gather_into_buffer", "CompositeExplicitAutograd")
def gather_into_buffer(
    shard: Tensor, capacity: int, count: int, dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    """The operator's kernel, which the eager path calls without torch's dispatcher."""
    numel = shard.numel()
    whole = take("gather", Buffers(capacity, count), numel * group_size, dtype, shard.device)
    # The cast shard goes right to its place, from where NCCL gathers without a copy.
    mine = whole.narrow(0, dist.get_rank(compat.process_group(group_name)) * numel, numel).copy_(shard)
    compat.all_gather_out(mine, group_size, group_name, out=whole)
    return whole


@torch.library.impl(library, "gradient_buffer", "CompositeExplicitAutograd")
def _gradient_buffer(capacity: int, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not capacity:
        return torch.empty(numel, dtype=dtype, device=device)
    return take("gradients", Buffers(capacity, count), numel, dtype, device)


@torch.library.impl(library, "begin", "CompositeExplicitAutograd")
def _begin(phase: str, digest: str, schedule: str, used: str) -> None:
    graph_runs.begin(phase, digest, schedule, used)


@torch.library.impl(library, "deliver", "CompositeExplicitAutograd")
def _deliver(gradient: Tensor, at_rest: Sequence[Tensor], bucket: int) -> Tensor:
    graph_runs.deliver(gradient, bucket)
    return gradient.new_zeros(()).expand(gradient.shape)


@torch.library.impl(library, "exchange_slices", "CompositeExplicitAutograd")
def _exchange_slices(slices: Tensor, group_size: int, group: str) -> Tensor:
    sizes = [slices.numel() // group_size] * group_size
    with profiling.exchanging_slices():
        return compat.all_to_all(slices, sizes, sizes, group)


@torch.library.impl(library, "run_stage", "CompositeExplicitAutograd")
def _run_stage(x: Tensor, token: Tensor | None, lane: str, part: str, index: int) -> Tensor:
    return _unless_skipped(running.run, x, token, lane, part, index)


@torch.library.impl(library, "start_stage", "CompositeExplicitAutograd")
def _start_stage(x: Tensor, token: Tensor | None, lane: str, part: str, index: int) -> Tensor:
    return _apart(running.start, x, token, lane, part, index)


@torch.library.impl(library, "wait_stage", "CompositeExplicitAutograd")
def _wait_stage(flying: Tensor, token: Tensor | None, lane: str, part: str, index: int) -> Tensor:
    return _unless_skipped(running.wait, flying, token, lane, part, index)


def _unless_skipped(
    how: Callable[..., Tensor], x: Tensor, token: Tensor | None, lane: str, part: str, index: int
) -> Tensor:
    """Run or await a stage. Return zeros if it is skipped."""
    if _is_skipped(token, part):
        return like(x, lane_at(lane).spec(part, index + 1)).zero_()
    return _apart(how, x, token, lane, part, index)


def _apart(how: Callable[..., Tensor], x: Tensor, token: Tensor | None, lane: str, part: str, index: int) -> Tensor:
    """Run, start or await a stage. A graph takes what an operator returns for other memory than what it is given."""
    way = lane_at(lane)
    return running.apart(how(way, part, index, x, state_of(way, part, index, token)), x)


def _is_skipped(token: Tensor | None, part: str) -> bool:
    return part == "due" and token is not None and bucket_of(token).gradient_waits


@torch.library.impl(library, "reduce_if_due", "CompositeExplicitAutograd")
def _reduce_if_due(gradient: Tensor, token: Tensor, lane: str, part: str, index: int) -> Tensor:
    way, bucket = lane_at(lane), bucket_of(token)
    flight = next(flight for flight in way.reduction if (flight.part, flight.index) == (part, index))
    to_reduce: Tensor | None = gradient
    if way.inspected and flight is way.reduction[0]:
        bucket.inspect(gradient)
    if flight.decides:
        to_reduce = defer_unless_due(token, gradient)
    elif _is_skipped(token, part):
        to_reduce = None
    if to_reduce is None:
        return like(gradient, way.flight_spec(part, index)).zero_()
    return running.apart(start_flight(way, flight, to_reduce, token), gradient)
