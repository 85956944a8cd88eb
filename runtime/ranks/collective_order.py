"""The order of forwards, backwards and the collectives in them, which must be the same on all ranks.

Ranks run the same program on different data. A branch that depends on data may take one rank past a block that the
others run, or past a backward (``if not loss.isfinite(): continue``). Its next collective is then matched with a
different one on the other ranks. The result is a hang or, if the sizes happen to agree, silently wrong weights: those
of one layer in place of another's.

Therefore each rank keeps a tree of what has followed what, for all models that share a process group. The tree is the
same on all ranks. Where only one thing has ever followed, that thing is free: it costs a dictionary lookup. Ranks agree
on anything else through the store first: on anything new, and on every turn at a fork, a place after which ranks have
taken different turns before. What all ranks do is always allowed. What only some ranks do raises an error before its
collective can be matched with another.

A model has many layers, and the previous layer predicts what is new about the next one: its gather is followed by the
next layer's gather, and the reduction of its gradients by the gather of the layer before it. Such a continuation is
expected, and free, as if it had followed before. The first step therefore asks about a dozen times, however many layers
there are, and a loop over parameters (a norm of each) asks three times.

The kind of the next phase does not make a fork: a program evaluates now and then, prints a norm every hundred steps,
and accumulates over microbatches. Ranks expect the phase that followed last time, after the same phases, and agree on
any other. Training therefore asks nothing. A program with a rhythm (rollouts and training, a teacher and a student, a
generator and a discriminator, an evaluation after every thousandth step) asks nothing after three rounds of it. A
program without a rhythm pays for each change, there and back. Whether a backward accumulates is free either way. An
agreement takes about a millisecond on one machine.

A rank that diverges asks. The ranks that continue as usual do not listen: they start the collectives they know and wait
in one of them. Each rank counts what it has begun. A rank that has begun more than a rank that asks, and was not asked
the same question, has certainly diverged from it: the asking rank will never start what this rank waits for.
:mod:`.watchdog` detects this.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import compat
from . import compared
from .lifeline import RankLost

_OF_FACE = "(of FSDP2's face: model.reset_iter_state())"

RESET_METHOD = f"model.reset() {_OF_FACE}"
"""The method that starts over."""

RESET = f"model.reset() on every rank {_OF_FACE}"
"""How to continue after ranks have diverged."""

_RULE = (
    "All ranks must go through the model in the same way, call forward and backward equally often, and save, load and "
    "export together. Does a branch depend on data or on the rank, or did one rank skip a batch? Run the block on "
    "every rank (and multiply what is not wanted by zero), or decide for all ranks together."
)

KEPT = f"Weights and optimizer state are those of the last optimizer step; {RESET} makes the model usable again"

ADVICE = f"{_RULE} {KEPT}."

LOST = (
    "What was queued on the GPU when the wait was ended has run with incomplete values, an optimizer's step too: load "
    "weights and optimizer state from a checkpoint"
)
"""What the end of a wait on a GPU means. The program runs ahead of the GPU, and the GPU goes on after an abort."""

AFTER_ABORT = f"{LOST}, after {RESET}, which makes the model usable again"

_ADVICE_ON_GPUS = f"{_RULE} {AFTER_ABORT}."

_NUMBERS = (
    "Functions of parameters that stay sharded, each row on its rank, are computed in the same way and with the same "
    "Python numbers on every rank. If a number is this rank's own, such as a weight of its batch, use "
    "torch.tensor(number) instead: beside an ordinary tensor, the parameter is whole, and its gradient is averaged."
)

AT_REST = "at rest"
"""Kind of a phase that is one operation on parameters between steps: a norm, ``full_tensor()``."""

STEP = "step"
"""Kind of a phase that is an optimizer's step."""

Agree = Callable[[Sequence[str], int], None]
"""``agree(lines, epoch)`` raises RuntimeError on every rank unless all of them pass the same lines in the same epoch of
the order."""

Details = Callable[[], Sequence[str]]
"""Returns lines that describe something in more detail than its name. Called when ranks are about to compare them."""


def no_details() -> Sequence[str]:
    return ()


class StepPhase(NamedTuple):
    """A part of a step.

    Args:
        kind: ``"forward with gradients"``, ``"forward without gradients"``, ``"backward"``, ``"backward that
            accumulates"``, :data:`STEP` or :data:`AT_REST`.
        what: What runs: for a forward, ``"the model (GPT)"`` or ``"compiled code of layers.0 (GPT)"``; for a
            backward, ``"GPT"``; at rest, ``"full_tensor() of 'layers.0.weight'"``.
    """

    kind: str
    what: str = ""

    @property
    def is_backward(self) -> bool:
        return self.kind.startswith("backward")

    def __str__(self) -> str:
        if self.kind == AT_REST:
            return self.what
        return f"a {self.kind}{f' of {self.what}' if self.what else ''}"


Series = tuple[str, int]
"""Operation on one of many objects, and the object's number: ``("gather", 3)`` gathers the fourth bucket."""

_Past = tuple[tuple[tuple[StepPhase | None, int], ...], int]
"""Runs of equal forwards before the last one, with their lengths, and the length of the last run so far."""


@dataclass(eq=False)
class _OrderState:
    """The state after something that has happened."""

    number: int
    after: str
    collectives: dict[str, _OrderState] = field(default_factory=dict)
    phases: dict[StepPhase, _OrderState] = field(default_factory=dict)
    last: StepPhase | str = ""
    """What followed the last time."""
    last_after: dict[_Past, StepPhase] = field(default_factory=dict)
    """The same, by the forwards that preceded it."""
    computed: dict[StepPhase, str] = field(default_factory=dict)
    """How operands of what followed at rest were computed the last time."""

    def expects(self, past: _Past) -> StepPhase | str:
        return self.last_after.get(past, self.last)

    def followed_by(self, what: StepPhase | str, past: _Past) -> None:
        if len(self.last_after) > _PASTS:
            self.last_after.clear()
        self.last = what
        if isinstance(what, StepPhase):
            self.last_after[past] = what
        else:
            self.last_after.pop(past, None)


def order_of_group(name: str, part: str | None = None) -> Order:
    """Return the order of the models that communicate over a process group. Their collectives can be confused.

    Args:
        part: Name of the group of some of its ranks, whose operations at rest count in the same order unless this group
            has one of its own.
    """
    order = _orders.setdefault(name, Order(group=name))
    if part is not None:
        _orders.setdefault(part, order)
    return order


def orders() -> dict[str, Order]:
    """Return all orders, by name of the group."""
    return _orders


class Order:
    """The order of events of one process group's models, on this rank.

    Args:
        limit: Number of places to remember. Without a limit, a program that takes another path in every step would fill
            the memory.
        group: Name of the process group.

    Attributes:
        epoch: Number of the current epoch. Ranks in different epochs are not compared.
        events: Number of phases and collectives that were begun in this epoch.
        steps: Number of optimizer steps that were begun.
        stalled: Why nothing can follow any more: ranks have diverged, and this one was waiting for another one. None:
            it can.
        was_aborted: NCCL's communicators are aborted to end the wait.
        device_type: Type of the models' devices.
        thread: Thread in which the last model was sharded, and which very likely trains it.
        numbers: Numbers of parameters, by name, for series over them.
    """

    schedules: dict[str, Any]
    """Decisions of all ranks about the schedules of compiled graphs, by structure; the same on all ranks. They are kept
    as long as the group exists, because code that follows them keeps running, also in other models that share it."""
    schedules_replaced: int
    """How often a schedule was replaced by another one."""

    def __init__(self, limit: int = 100_000, group: str = "") -> None:
        self.schedules = {}
        self.schedules_replaced = 0
        self.group = group
        self.epoch = self.events = self.steps = 0
        self.stalled: str | None = None
        self.was_aborted = False
        self.device_type = ""
        self.thread = threading.get_ident()
        self.numbers: dict[str, int] = {}
        self._limit = limit
        self._models: Counter[str] = Counter()
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Order:
        return self  # there is one order per process group

    def join(self, kind: str, parameters: Iterable[str] = ()) -> str:
        """Register a model that is being sharded on all ranks, with parameters of these names. Return its name here.

        That is the name of its class; with a number, from the second model of the class on. From here on, all ranks
        know the same again: nothing.
        """
        self._models[kind] += 1
        for name in parameters:
            self.numbers.setdefault(name, len(self.numbers))
        self._next_epoch()
        self.thread = threading.get_ident()
        self.forget()
        return kind if self._models[kind] == 1 else f"{kind} #{self._models[kind]}"

    def forget(self) -> None:
        """Forget the whole tree: after a failure, ranks may know different things."""
        self._places = 0
        self._begins: dict[tuple[StepPhase, StepPhase | None], _OrderState] = {}
        self._at = self._start = self._place("the start")
        self._phase: StepPhase | None = None
        self._before: StepPhase | None = None  # the previous phase, including phases at rest
        self._forward: StepPhase | None = None
        self._past: _Past = ((), 0)
        self._recent: tuple[Series, ...] = ()
        self._computed = ""  # of the previous phase at rest
        self._strides: dict[tuple[bool, tuple[str, ...]], Series] = {}  # what followed each context

    def restart(self) -> None:
        """Allow anything to follow, after a failure that was the same on all ranks."""
        self._next_epoch()
        self._at, self._phase, self._before, self._forward, self._past = self._start, None, None, None, ((), 0)
        self._recent, self._computed = (), ""

    def revive(self) -> None:
        """Allow anything to follow in a group that was closed, and is connected again."""
        self.stalled, self.was_aborted = None, False
        self._next_epoch()
        self.forget()

    def _next_epoch(self) -> None:
        self.epoch, self.events = self.epoch + 1, 0

    @property
    def latest(self) -> str:
        """Description of what was begun last."""
        return self._at.after

    @property
    def progress(self) -> str:
        """How far this rank has come: ``"in its 4th optimizer step"``, ``"after 3 optimizer steps"``."""
        phase = self._before
        if phase is None or phase.kind in (AT_REST, STEP) or phase.kind == "forward without gradients":
            return f"after {self.steps} optimizer step{'s' if self.steps != 1 else ''}"
        number = self.steps + 1
        ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
        return f"in its {number}{ending} optimizer step"

    def stall(self, why: str) -> None:
        """Let nothing follow: this rank's wait for others is being ended."""
        self.was_aborted = self.runs_on_nccl
        self.stalled = why

    @property
    def runs_on_nccl(self) -> bool:
        """Whether collectives of the models are NCCL's."""
        if self.device_type == "cpu":  # the group may have a backend for GPUs as well
            return False
        with contextlib.suppress(RuntimeError, ValueError, KeyError):  # the group was destroyed
            return compat.nccl_options(compat.process_group(self.group)) is not None
        return False

    def standstill(self, error: BaseException | None = None) -> RuntimeError:
        """Return the error of a rank that waits for ranks which will never arrive.

        Args:
            error: The backend's error, with which the wait has ended.
        """
        advice = _ADVICE_ON_GPUS if self.was_aborted else ADVICE
        last = f" The backend's error: {error}" if error is not None else ""
        return RuntimeError(f"This rank would wait forever for other ranks. {self.stalled} {advice}{last}")

    def check(self) -> None:
        """Raise RuntimeError if nothing can follow."""
        if self.stalled is not None:
            raise self.standstill()

    def enter(
        self,
        phase: StepPhase,
        agree: Agree,
        details: Details = no_details,
        series: Series | None = None,
        computed: str = "",
    ) -> None:
        """Handle the beginning of a phase.

        Args:
            series: Series that the phase is a member of, if any.
            computed: How the operand of a phase at rest was computed. Of a series, it is the same for all members.

        Raises:
            RuntimeError: The phase is new here, or this is a fork, and other ranks are doing something else.
        """
        if self.stalled is not None:
            raise self.standstill()
        if self._places > self._limit:
            at = self._at.after
            self.forget()
            self._at = self._place(at)
        here = self._at
        is_new = phase not in here.phases
        is_other = computed != (self._computed if is_new else here.computed.get(phase, ""))
        if is_other or (not self._continues(series, here) if is_new else self._is_unexpected(phase, here)):
            what = f"{phase}, of {computed}" if computed else str(phase)
            self._ask(agree, what, not is_new, details, f"{_NUMBERS} {KEPT}." if computed else ADVICE)
        if is_new:
            # The contents of a forward do not depend on what preceded it; those of a backward do.
            before = self._phase if phase.is_backward else self._before if phase.kind == AT_REST else None
            if (phase, before) not in self._begins:
                self._begins[phase, before] = self._place(str(phase))
            here.phases[phase] = self._begins[phase, before]
        here.followed_by(phase, self._past)
        if phase.kind == AT_REST:
            self._computed = here.computed[phase] = computed
        self.steps += phase.kind == STEP
        if phase.kind not in (AT_REST, STEP):
            self._phase = phase
            if not phase.is_backward:
                rows, length = self._past
                if phase == self._forward:
                    self._past = rows, min(length + 1, _LONGEST)
                else:
                    self._past = (*rows, (self._forward, length))[-_ROWS:], 1
                    self._forward = phase
        self._at, self._before = here.phases[phase], phase
        self._follow(series)
        self.events += 1

    def _continues(self, series: Series | None, here: _OrderState) -> bool:
        """Whether something new continues a series, at a place that nothing else has followed yet."""
        if series is None or here.phases or here.collectives or not self._recent:
            return False
        what, number = series
        return self._strides.get(self._context) == (what, number - self._recent[-1][1])

    def _follow(self, series: Series | None) -> None:
        if series is None:
            self._recent = ()
            return
        if self._recent:
            self._strides[self._context] = series[0], series[1] - self._recent[-1][1]
        self._recent = (*self._recent, series)[-2:]

    @property
    def _context(self) -> tuple[bool, tuple[str, ...]]:
        """Context for predicting series.

        It ignores whether a backward accumulates, which each rank decides for itself.
        """
        return self._phase is not None and self._phase.is_backward, tuple(what for what, _ in self._recent)

    def _is_unexpected(self, phase: StepPhase, here: _OrderState) -> bool:
        """Whether a phase that has followed this place before is unexpected now."""
        expected = here.expects(self._past)
        if phase.kind == AT_REST:
            return phase != expected
        if here.collectives or any(other.kind == phase.kind and other != phase for other in here.phases):
            return True
        return phase != expected and not (
            phase.is_backward and isinstance(expected, StepPhase) and expected.is_backward
        )

    def start(self, collective: str, agree: Agree, details: Details = no_details, series: Series | None = None) -> None:
        """Handle the start of a collective, or of a compiled graph with collectives.

        Args:
            collective: ``"gather layers.0 (GPT)"``, ``"forward graph 1c5e... (GPT)"``.
            details: Schedule of a graph. Ranks compare it, and show the first line that differs.
            series: Series that the collective is a member of, if any.

        Raises:
            RuntimeError: The collective is new here, or this is a fork, and other ranks are doing something else.
        """
        if self.stalled is not None:
            raise self.standstill()
        here = self._at
        following = here.collectives.get(collective)
        if following is not None and len(here.collectives) == 1 and not here.phases:
            self._at = following
            self._recent = (*self._recent, series)[-2:] if series is not None else ()
            self.events += 1
            return
        if not self._is_usual(collective, here) and not self._continues(series, here):
            self._ask(agree, collective, following is not None, details)
        if following is None:
            following = here.collectives[collective] = self._place(collective)
        here.followed_by(collective, self._past)
        self._at = following
        self._follow(series)
        self.events += 1

    def _is_usual(self, collective: str, here: _OrderState) -> bool:
        """Whether the collective is expected here, where operations on parameters at rest may follow, too."""
        is_alone = len(here.collectives) == 1 and all(phase.kind == AT_REST for phase in here.phases)
        return is_alone and collective in here.collectives and here.expects(self._past) == collective

    def _place(self, after: str) -> _OrderState:
        self._places += 1
        return _OrderState(self._places, after)

    def _ask(self, agree: Agree, what: str, is_known: bool, details: Details, advice: str = ADVICE) -> None:
        here = self._at
        usual = [str(phase) for phase in here.phases] + list(here.collectives)
        try:
            agree([*details(), compared.line(f"{what} after {here.after}", here.number)], self.epoch)
        except RankLost:
            raise
        except RuntimeError as error:
            so_far = f"; so far, what followed there was {' or '.join(usual[:4])}" if usual else ""
            raise RuntimeError(
                f"This rank reaches {what} after {here.after}{'' if is_known else ', for the first time'}{so_far}. "
                f"Other ranks are elsewhere: {error} {advice}"
            ) from None


_ROWS = 2
_LONGEST = 2_000
"""Length of a run of forwards from which on it is not counted further. Otherwise each forward of a training that does
nothing else would be another past."""
_PASTS = 20_000
"""Number of pasts to remember per place."""

_orders: dict[str, Order] = {}
"""Orders by name of the group. They are never removed, because ranks would forget them at different times."""
