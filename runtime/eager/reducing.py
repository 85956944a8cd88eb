"""Reduces the gradients of buckets as backward completes them.

One autograd node per bucket and outermost forward, ``_Reduce``, stands between the shard and everything computed from
it. Autograd runs it when all contributions have arrived, no matter how often and from where the parameters were used,
and passes None for parameters that were not used. The node packs the gradients, starts the reduction and waits for the
previous one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..collectives.pack import pack
from ..collectives.stages import land_flight, run_places, start_flight
from ..memory import gradients
from ..memory.bucket import Bucket
from ..memory.comm_buffers import enter_pool
from ..memory.deferred_gradients import RequestedGradients
from ..memory.tensor import hooks_of_parameters
from ..memory.written_gradients import WrittenGradients
from ..owner import refuse_dropped
from .context import StepContext
from .gathering import Gathering


@dataclass(frozen=True, eq=False)
class _RunningReduction:
    """One running stage of a bucket's reduction. After the last stage, the copy of its result to the host."""

    bucket: Bucket
    stage: int
    result: Tensor
    used: frozenset[int]
    """Indices of parameters with a gradient in it."""
    due: int | None
    """When a schedule file wants this reduction awaited. 2n: after reduction number n has started. 2n - 1: right before
    that one starts. None: no schedule file says so."""


class Reducing:
    """The gradients of one model, from autograd's nodes to the parameters.

    Args:
        step: The running step.
        gathering: What is gathered, which is released when gradients are complete.

    Attributes:
        running: Stages of reductions that run, the oldest first.
    """

    def __init__(self, step: StepContext, gathering: Gathering) -> None:
        self._step = step
        self._gathering = gathering
        self._anchors: dict[Bucket, Anchors] = {}
        self.running: list[_RunningReduction] = []
        self._started = 0  # reductions, ever

    def anchors(self, bucket: Bucket) -> Anchors:
        """Return what stands for the shard of a bucket in the graph of autograd until the running backward ends."""
        found = self._anchors.get(bucket)
        if found is None:
            found = self._anchors[bucket] = Anchors.of(bucket, self)
        return found

    def written(self, bucket: Bucket) -> WrittenGradients:
        """Return the gradients that kernels write. Of a frozen bucket, nobody asks for them."""
        found = self._anchors.get(bucket)
        if found is None:
            return WrittenGradients(bucket)
        if not found.written:
            found.written.append(WrittenGradients(bucket))
        return found.written[0]

    @compat.python_only
    def complete(self, bucket: Bucket) -> None:
        """Release a bucket whose gradients are complete, before packing them takes as much memory again."""
        self._step.complete.add(bucket)
        self._gathering.release_checked(bucket)

    @compat.python_only
    def post_backward(self, bucket: Bucket, packed: Tensor, used: frozenset[int]) -> None:
        """Start reducing a bucket whose gradients are complete, and finish earlier reductions.

        Args:
            packed: Packed gradients, ``[numel]`` in the communication dtype.
            used: Indices of parameters with a gradient in it.
        """
        self._step.owner.grad_sync.enter_backward()
        gradients.note_use(bucket, used)
        self._step.owner.grad_sync.use_varies.add(bucket)
        schedule = self._gathering.schedule
        if schedule.before_reduction:
            self._gathering.start_before_reduction(bucket)
        self._started += 1
        if schedule.behind:
            self._take_in_due(2 * self._started - 1)
        if bucket.lane.reduction:
            size, most = bucket.plan.gathered_bytes, schedule.largest_in_flight
            while self.running and size + sum(each.bucket.plan.gathered_bytes for each in self.running) > most:
                self._take_in(self.running[0])
            self._start_stage(bucket, 0, packed, used)
        else:  # no other rank shares the bucket
            self._accumulate(bucket, packed, used)
        if schedule.behind:
            self._take_in_due(2 * self._started)
        if bucket in schedule.behind:
            return
        in_a_unit = sum(other.plan.requires_grad for other in self._gathering.unit_of[bucket].buckets)
        if not (in_flight := schedule.reductions_in_flight * in_a_unit):
            self.finish()
        undecided = [each for each in self.running if each.due is None]
        for oldest in undecided[: max(len(undecided) - in_flight, 0)]:
            self._take_in(oldest)

    @compat.python_only
    def reduce_now(
        self, bucket: Bucket, packed: Tensor, used: frozenset[int], requested: RequestedGradients
    ) -> Sequence[Tensor | None]:
        """Reduce gradients for ``torch.autograd.grad``, even if that is not due, without accumulating them."""
        self._step.owner.grad_sync.enter_backward()
        self._gathering.release_bucket(bucket)
        lane = bucket.lane
        if lane.reduction:
            packed = run_places(lane, lane.reduction[0].ungated, packed, bucket.operands.token)
        reduced = self._reduce_stages(bucket, 0, packed, "for torch.autograd.grad")
        mine = [int(index in used) for index in range(len(bucket.params))]
        (levels,) = self._step.owner.grad_sync.used_anywhere([bucket], [mine])
        return gradients.select(requested, bucket, reduced, {index for index, level in enumerate(levels) if level})

    def _start_stage(self, bucket: Bucket, stage: int, gradient: Tensor, used: frozenset[int]) -> None:
        flight = bucket.lane.reduction[stage]
        will_run = not flight.may_wait or bucket.owner.grad_sync.is_due()
        group = flight.stage.group if will_run else None
        self._step.announce("reduce", bucket, group, f", stage {stage + 1}" if stage else "")
        with compat.below_autograd():
            started = flight.start(gradient, bucket.operands)
        self.running.append(_RunningReduction(bucket, stage, started, used, self._due(bucket)))

    def _due(self, bucket: Bucket) -> int | None:
        if (behind := self._gathering.schedule.behind.get(bucket)) is None:
            return None
        later, before_start = behind
        return 2 * (self._started + later) - before_start

    def _take_in_due(self, now: int) -> None:
        while (
            due := next((each for each in self.running if each.due is not None and each.due <= now), None)
        ) is not None:
            self._take_in(due)

    def _take_in(self, reduction: _RunningReduction) -> None:
        """Wait for a running stage. Feed its result to the next stage, or accumulate it as the gradient."""
        self.running.remove(reduction)
        bucket, stages = reduction.bucket, len(reduction.bucket.lane.reduction)
        if reduction.stage == stages:  # it was on its way to where the shard rests
            gradients.accumulate(bucket, reduction.result, reduction.used)
            self._step.owner.grad_sync.touched(bucket)
            return
        following = reduction.stage + 1
        flight = bucket.lane.reduction[reduction.stage]
        if flight.may_wait and bucket.gradient_waits:
            result = self._step.wait(reduction.result)
        else:
            result = self._step.wait(reduction.result, flight.land, bucket.operands)
        if following < stages:
            self._start_stage(bucket, following, result, reduction.used)
            return
        self._accumulate(bucket, result, reduction.used)

    def _accumulate(self, bucket: Bucket, reduced: Tensor, used: frozenset[int]) -> None:
        if bucket.pending is None or not bucket.pending.kept:  # else ``reduced`` is zeros: the gradient is in the sum
            finished = self._finished(bucket, reduced)
            if bucket.lane.rest:  # it arrives there while the next unit's backward runs
                copy = _RunningReduction(bucket, len(bucket.lane.reduction), finished, used, self._due(bucket))
                self.running.append(copy)
                return
            gradients.accumulate(bucket, finished, used)
        self._step.owner.grad_sync.touched(bucket)

    def reduce_waiting(self, bucket: Bucket) -> None:
        """Reduce a bucket's deferred gradients outside of the backward that computed them."""
        assert bucket.pending is not None
        first = next(number for number, flight in enumerate(bucket.lane.reduction) if flight.decides)
        waiting = bucket.pending.take(bucket.lane.deferred_spec.dtype)
        reduced = self._reduce_stages(bucket, first, waiting, "what waits")
        gradients.accumulate(bucket, reduced, gradients.used_so_far(bucket))

    def _reduce_stages(self, bucket: Bucket, first: int, gradient: Tensor, why: str) -> Tensor:
        """Run the reduction from the start of stage ``first`` on. Return the gradient, ``[shard_numel]`` in the main
        dtype."""
        lane = bucket.lane
        for stage, flight in enumerate(lane.reduction[first:], first):
            more = f", {why}{f', stage {stage + 1}' if stage else ''}"
            self._step.announce("reduce", bucket, flight.stage.group, more)
            if stage > first:
                gradient = run_places(lane, flight.ungated, gradient, bucket.operands.token)
            started = start_flight(lane, flight, gradient, bucket.operands.token)
            gradient = self._step.wait(started, land_flight, lane, flight, bucket.operands.token)
        return self._finished(bucket, gradient)

    def _finished(self, bucket: Bucket, reduced: Tensor) -> Tensor:
        """Return a reduced gradient, ``[shard_numel]`` in the main dtype, where the shard rests, after the user's
        hook."""
        gradient = bucket.lane.finish(reduced, bucket.operands) if bucket.lane.unreduced else reduced
        if (hook := self._gathering.controls[self._gathering.unit_of[bucket]].reduced_hook) is not None:
            with torch.no_grad():
                hooks_of_parameters.call(hook, gradient)
        return bucket.lane.travel("rest", gradient) if bucket.lane.rest else gradient

    def finish(self) -> None:
        """Wait for running reductions, and accumulate their results."""
        while self.running:
            self._take_in(self.running[0])

    def end_backward(self) -> None:
        """Forget the graph of a backward that has ended."""
        self._step.complete.clear()
        self._anchors.clear()

    def reset(self) -> None:
        """Wait for running reductions and drop their results."""
        while self.running:
            reduction = self.running.pop(0)
            if reduction.stage < len(reduction.bucket.lane.reduction):
                land = reduction.bucket.lane.reduction[reduction.stage].land
                self._step.wait(reduction.result, land, reduction.bucket.operands)
        self.end_backward()

    def abandon(self) -> None:
        """Forget running reductions, without waiting."""
        self._step.outstanding.add(reduction.result for reduction in self.running)
        self.running.clear()


@dataclass(frozen=True, eq=False)
class Anchors:
    """What stands for the shard of a bucket in the graph of autograd.

    Args:
        params: For each parameter, a tensor of its shape without memory, whose gradient is the parameter's.
        bucket: A tensor of the bucket's size without memory, whose gradient is the packed gradient.
        served: Shares of the backwards of compiled code that return packed gradients.
        written: Gradients that kernels write, if any do.
    """

    params: tuple[Tensor, ...]
    bucket: Tensor
    served: list[gradients.Backward]
    written: list[WrittenGradients]

    @staticmethod
    def of(bucket: Bucket, reducing: Reducing) -> Anchors:
        served: list[gradients.Backward] = []
        written: list[WrittenGradients] = []
        bucket.contributions += 1
        *params, whole = _Reduce.apply(bucket, reducing, served, written, *bucket.params)
        return Anchors(tuple(params), whole, served, written)


class _Reduce(compat.Uncaptured):
    """Maps a bucket's parameters, which are autograd leaves, to anchors without memory ::

        shards  -- _Reduce -->  anchors, of full shape  -- _Attach -->  gathered views

    ``_Attach`` ignores the anchors' values, and passes gradients on to them. ``_Reduce.backward`` gets all of a bucket.

    There is one anchor of full shape per parameter, and one for the packed bucket, ``[numel]`` in the communication
    dtype. The backward receives the bucket's gradients.
    """

    @staticmethod
    @compat.python_only
    def forward(
        ctx: Any,
        bucket: Bucket,
        reducing: Reducing,
        served: Sequence[gradients.Backward],
        written: Sequence[WrittenGradients],
        *params: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Python's garbage collector does not see through autograd nodes: the model must not be reachable from a node
        # that it holds itself.
        ctx.bucket, ctx.reducing, ctx.served, ctx.written = weakref.ref(bucket), weakref.ref(reducing), served, written
        nothing = torch.empty((), dtype=bucket.plan.compute_dtype, device=bucket.device)
        return *(nothing.expand(slot.shape) for slot in bucket.plan.layout.slots), anchor_of_bucket(bucket)

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
        bucket, reducing = ctx.bucket(), ctx.reducing()
        requested = RequestedGradients.of([node for node, _ in ctx.next_functions])
        if bucket is not None and (requested.returned or requested.left_out):
            bucket.refuse_parts(requested)
        # Gradients are accumulated when their reduction has finished.
        nothing = (None, None, None, None) + (None,) * requested.count
        if bucket is None or reducing is None:
            refuse_dropped()
        *whole_gradients, packed = given
        used = frozenset(index for index, gradient in enumerate(whole_gradients) if gradient is not None)
        if packed is not None:
            used = used.union(*(backward.used for backward in ctx.served))
        written = ctx.written[0] if ctx.written and ctx.written[0].indices else None
        if written is not None:
            used |= written.indices
        if unused := requested.added - used:
            gradients.tell_counting_hooks(bucket, unused)
        if not used and packed is None:
            return nothing
        if torch.is_grad_enabled():
            gradients.refuse_double_backward()
        if requested.left_out and not requested.returned:
            whole_gradients = [None if index in requested.left_out else g for index, g in enumerate(whole_gradients)]
            if packed is not None:
                packed = _without(bucket, packed, used & requested.left_out)
            used -= requested.left_out
        if not requested.returned:
            reducing.complete(bucket)
        if written is not None:
            alone = written.pack(whole_gradients)
            if not requested.returned:
                alone = _without(bucket, alone, requested.left_out)
            packed = alone if packed is None else alone + packed
        elif any(gradient is not None for gradient in whole_gradients):
            if bucket.exchange.gradient_buffers.capacity:
                enter_pool(bucket.owner.comm_buffers)
            with compat.below_autograd():
                alone = pack(whole_gradients, bucket.exchange, bucket.lane, is_traced=False)
            packed = alone if packed is None else alone + packed
        if packed is None or not used:
            return nothing
        if requested.returned:
            return None, None, None, None, *reducing.reduce_now(bucket, packed, used, requested)
        reducing.post_backward(bucket, packed, used)
        return nothing


def anchor_of_bucket(bucket: Bucket) -> Tensor:
    nothing = torch.empty((), dtype=bucket.plan.comm_dtype, device=bucket.device)
    return nothing.expand(bucket.plan.layout.numel)


def _without(bucket: Bucket, packed: Tensor, indices: frozenset[int]) -> Tensor:
    """Return packed gradients, with zeros for the parameters ``indices``."""
    if not indices:
        return packed
    packed = packed.clone()
    for index in indices:
        slot = bucket.plan.layout.slots[index]
        packed[slot.offset : slot.end].zero_()
    return packed
