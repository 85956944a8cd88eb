"""When gradients are reduced, and the state of the running backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compat
from ..geometry.layout import Slot
from ..memory import gradients
from ..memory.bucket import Bucket
from ..memory.deferred_gradients import RequestedGradients
from ..program_lines import warn
from ..ranks.agreement import everyones
from ..ranks.coordinator import Coordinator
from ..ranks.watchdog import watchdog
from . import checks as step_checks
from .graph_use import GraphUse


@dataclass
class SyncSettings:
    """When reductions that run once per optimizer step are due.

    The first setting in this order that is not None counts: the innermost context manager around the backward,
    ``last_microbatch``, ``automatic``.

    Args:
        automatic: Whether reductions are due after every backward.
        last_microbatch: Whether the current backward is the last one before the optimizer's step; None: unknown.
        override: Setting of the innermost context manager; None: there is none.
        contradiction: Names of a module whose gradients are not to be reduced and one whose gradients are, if
            ``last_microbatch`` was set by module.
    """

    automatic: bool = True
    last_microbatch: bool | None = None
    override: bool | None = None
    contradiction: tuple[str, str] | None = None

    def is_due(self) -> bool:
        if self.override is not None:
            return self.override
        if self.contradiction is not None:
            waiting, reducing = (f"{name!r}" if name else "the model's own" for name in self.contradiction)
            raise RuntimeError(
                f"Gradients of {reducing} parameters are to be reduced in this backward, and those of {waiting} are "
                "not (set_requires_gradient_sync or set_requires_all_reduce): it is one setting for the model. Call "
                "the method on the model, or with the same value on all of its modules."
            )
        return self.automatic if self.last_microbatch is None else self.last_microbatch


@dataclass
class _BackwardIds:
    """Ids of the running backward pass and of one nested in it."""

    outer: int | None = None
    inner: int | None = None


class Reductions(Protocol):
    """What starts and awaits reductions: :class:`~..eager.engine.EagerRuntime`."""

    @property
    def owner(self) -> Any:
        """The model, which a backward needs to its end."""

    def reduce_waiting(self, bucket: Bucket) -> None:
        """Reduce a bucket's deferred gradients outside of the backward that computed them."""

    def finish_reductions(self) -> None:
        """Wait for running reductions, and accumulate their results."""

    def finish_backward(self) -> None:
        """Finish reductions, and release what backward has gathered."""


class GradSync:
    """Gradients of one model, from the backward that computes them to the optimizer's step.

    Args:
        buckets: The model's buckets.
        reductions: What starts and awaits reductions.
        coordinator: Announces collectives.
        settings: When deferred reductions are due.

    Attributes:
        microbatches: Number of backwards since gradients were last reduced.
        drops: How often all gradients have been zeroed or dropped at once.
        use_varies: Buckets whose gradients were computed eagerly: ranks compare which parameters they have used. Those
            of compiled code are compared only where a rank has left some out (:mod:`.graph_use`).
    """

    def __init__(
        self, buckets: Sequence[Bucket], reductions: Reductions, coordinator: Coordinator, settings: SyncSettings
    ) -> None:
        self.settings = settings
        self.microbatches = self.drops = 0
        self._buckets = buckets
        self._reductions = reductions
        self._coordinator = coordinator
        self._backward = _BackwardIds()
        self._touched: set[Bucket] = set()  # in the running backward
        self._reduced: set[Bucket] = set()  # since the last optimizer step
        self.use_varies: set[Bucket] = set()
        self._graph_use = GraphUse(coordinator)
        self._found_nan: list[tuple[Bucket, Tensor]] = []
        self._warned: set[str] = set()

    def is_due(self) -> bool:
        """Whether reductions that run once per optimizer step run in the current backward."""
        return self.settings.is_due()

    @property
    def progress(self) -> tuple[int, frozenset[Bucket], frozenset[Bucket]]:
        """What is known between two backwards: microbatches, buckets that were reduced, buckets whose use varies."""
        return self.microbatches, frozenset(self._reduced), frozenset(self.use_varies)

    @progress.setter
    def progress(self, value: tuple[int, frozenset[Bucket], frozenset[Bucket]]) -> None:
        self.microbatches, self._reduced, self.use_varies = value[0], set(value[1]), set(value[2])

    # -- the running backward -----------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward was entered and has not finished."""
        return self._backward.outer is not None

    def enter_backward(self) -> None:
        """Make sure that the running backward gets finished.

        Called by everything that happens to this model in backward, compiled or eager.
        """
        current = compat.backward_id()
        if current in (-1, self._backward.outer, self._backward.inner):
            return
        if self._backward.outer is None:
            self._backward.outer = current
            self._coordinator.enter_backward(self.is_due())
            owner = self._reductions.owner  # which the backward needs to its end, even if nothing else holds it

            def finish() -> None:
                owner.grad_sync._finish_backward()

            compat.on_backward_end(finish)
        else:
            # A backward inside a backward (reentrant checkpointing), or after one that raised. Gradients must be
            # complete when it returns; the outer backward handles parameters without a gradient.
            self._backward.inner = current
            compat.on_backward_end(self._reductions.finish_reductions)

    def forget_backward(self) -> None:
        """Forget a backward that has raised."""
        self._backward = _BackwardIds()
        self._touched.clear()
        self._found_nan.clear()

    @compat.python_only
    def _finish_backward(self) -> None:
        self._reductions.finish_backward()
        if self._touched:  # else the backward computed gradients of something else
            self.microbatches += 1
            if self.is_due():
                self.finish()
            else:
                self._settle(
                    [bucket for bucket in self._buckets if bucket in self._touched and not bucket.gradient_waits]
                )
        self._touched.clear()
        self._backward = _BackwardIds()
        if self._found_nan:
            self._report_nan()

    def note_backward(self, backwards: Sequence[gradients.Backward]) -> list[str]:
        """Record what a compiled backward is about to compute for these buckets, and what autograd wants of it.

        Returns:
            Names of parameters without a gradient that must be the same on all ranks, because nothing compares them
            later: gradients for ``torch.autograd.grad`` are returned at once, and a captured step is replayed without
            the host.
        """
        own, unused = set(self._buckets), list[str]()
        for backward in backwards:
            bucket = backward.bucket()
            if bucket is None or bucket not in own or not bucket.plan.requires_grad or not backward.leaves:
                continue  # without leaves, the eager path reduces
            requested = backward.requested = RequestedGradients.of(backward.leaves)
            bucket.refuse_parts(requested)
            if bucket.pending is not None:
                bucket.pending.requested = requested
            used = backward.used - requested.left_out
            if requested.added:
                gradients.note_use(bucket, used)
            if requested.returned or self._coordinator.is_capturing:
                unused += [slot.name for index, slot in enumerate(_slots(bucket)) if index not in backward.used]
            elif requested.added:
                self._graph_use.begin(bucket, used)
        return unused

    def touched(self, bucket: Bucket) -> None:
        """Record that a bucket got the gradients of one forward."""
        self._touched.add(bucket)
        self._reduced.add(bucket)
        bucket.contributions = max(0, bucket.contributions - 1)  # a graph may be run backward again
        self.enter_backward()

    # -- reductions ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce deferred gradients. Afterwards, every parameter that any rank has used has its gradient everywhere."""
        for bucket in self._buckets:
            if (total := bucket.deferred_total) is not None:
                bucket.forget_abandoned(total)
                self._reductions.reduce_waiting(bucket)
        # The same buckets on all ranks, even if hooks have taken their gradients off already.
        shown = {bucket for bucket in self._buckets if bucket.has_gradients}
        self._settle([bucket for bucket in self._buckets if bucket in shown | self.use_varies])
        self.microbatches = 0
        for bucket in self._buckets:
            bucket.let_go()

    def finish_if_needed(self) -> None:
        """Reduce, before an optimizer's step, what backwards since the last complete reduction have deferred."""
        if self.microbatches:
            self.finish()

    def _settle(self, buckets: Sequence[Bucket]) -> None:
        """Set gradients of parameters that no rank has used to None."""
        varying = [bucket for bucket in buckets if bucket in self.use_varies]
        everyones = dict(
            zip(varying, self.used_anywhere(varying, list(map(gradients.levels_of_use, varying))), strict=True)
        )
        for bucket in buckets:
            gradients.settle(bucket, everyones[bucket] if bucket in everyones else self._graph_use.levels(bucket))
        self.use_varies.difference_update(buckets)

    @torch.no_grad()
    def used_anywhere(self, buckets: Sequence[Bucket], levels: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return for each bucket and parameter the largest level of use over all ranks.

        A collective: one all-reduce of one byte per parameter for all buckets that are spread over the same ranks.

        Args:
            levels: Levels of this rank, from :func:`.gradients.levels_of_use`.
        """
        found = [list(mine) for mine in levels]
        for are_experts, topology in enumerate(self._coordinator.members.topologies):
            group = topology.every
            positions = [i for i, bucket in enumerate(buckets) if bucket.plan.is_expert == bool(are_experts)]
            mine = [level for i in positions for level in found[i]]
            if group.size == 1 or not mine:
                continue
            what = "find out which parameters were used"
            self._coordinator.start(what, group=group)
            if self._coordinator.is_capturing:  # through the store, once: replays use the same parameters
                result = self._coordinator.maxima(group, what, mine)
            else:
                flags = torch.tensor(mine, dtype=torch.uint8)
                with watchdog.failed_waits.explaining(what):  # in a backward, nothing else catches an error of NCCL's
                    result = group.all_reduce(compat.to_backend(flags, group.name), "max", in_order=False).tolist()
            for i in positions:
                count = len(found[i])
                found[i], result = result[:count], result[count:]
        return found

    # -- checks -------------------------------------------------------------------------------------------------------

    def before_step(self, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        """Check that an optimizer is about to use complete gradients. A collective before the first step.

        Args:
            buffers: Returns the buffers that all ranks have.
        """
        self._coordinator.order.check()
        reduced, self._reduced = self._reduced, set()
        if not reduced or not step_checks.enabled():  # no backward before this step: gradients were set by hand
            return
        if self._coordinator.steps == 0:
            self._coordinator.note("checks before the first step")
            step_checks.check_first_step(buffers(), self._buckets, reduced, self._coordinator.members.group)
        if self.in_backward:  # an optimizer that steps in backward: the other gradients are still to come
            return
        if (missing := step_checks.missing(self._buckets, reduced)) is not None and missing not in self._warned:
            self._warned.add(missing)
            warn(
                f"Step {self._coordinator.steps} of {self._coordinator.name}: backward reduced gradients of {missing}. "
                "The loss did not depend on the others on any rank; it has no gradients, and optimizers leave it "
                "alone. (Told once.)",
                RuntimeWarning,
                by=dist.get_process_group_ranks(self._coordinator.members.group)[0],
            )

    def forget_reduced(self) -> None:
        """Forget which gradients were reduced so far: they were not for an optimizer step."""
        self._reduced.clear()

    def inspect(self, bucket: Bucket, packed: Tensor) -> None:
        """Look for NaN in this rank's gradients of a bucket. The answer stays on the device."""
        self._found_nan.append((bucket, torch.stack([packed[s.offset : s.end].isnan().any() for s in _slots(bucket)])))

    def _report_nan(self) -> None:
        """Raise on every rank if any rank has found a NaN."""
        found, self._found_nan = self._found_nan, []
        params = [
            f"unit {bucket.plan.unit!r}, parameter {slot.name!r}" for bucket, _ in found for slot in _slots(bucket)
        ]
        flags = torch.cat([flag for _, flag in found]).tolist()
        mine = next((param for param, is_nan in zip(params, flags, strict=True) if is_nan), None)
        group = self._coordinator.members.agreeing
        everyone = everyones(mine, group, "NaN in gradients")
        ranks = dist.get_process_group_ranks(group)
        culprits = [f"rank {rank}, {param}" for rank, param in zip(ranks, everyone, strict=True) if param]
        if culprits:
            self.zero()
            raise RuntimeError(
                f"NaN in gradients before they were reduced: {'; '.join(culprits[:8])}"
                f"{f' and {len(culprits) - 8} more' if len(culprits) > 8 else ''}. All gradients were set to None; "
                "weights and optimizer state are those of before."
            )

    # -- starting over ------------------------------------------------------------------------------------------------

    def zero(self, set_to_none: bool = True, kept: Collection[int] | None = None) -> None:
        """Zero or drop gradients of parameters whose ``id`` is not in ``kept``; see :func:`.gradients.clear`."""
        self.drops += kept is None
        for bucket in self._buckets:
            if set_to_none:
                gradients.clear(bucket, kept)
                continue
            for param, gradient in zip(bucket.params, bucket.gradients, strict=True):
                if gradient is not None and (kept is None or id(param) not in kept):
                    gradient.zero_()

    def reset(self) -> None:
        """Drop all gradients, and everything known about them."""
        self.forget_backward()
        self._reduced.clear()
        self.use_varies.clear()
        self._graph_use.forget()
        self.zero()
        self.microbatches = 0


def _slots(bucket: Bucket) -> tuple[Slot, ...]:
    return bucket.plan.layout.slots
