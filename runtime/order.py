"""What follows what: forwards, backwards and the collectives in them, in the same order on all ranks.

Ranks run the same program on data of their own. A branch that depends on data may take one rank past a block that the
others run, or past a backward (``if not loss.isfinite(): continue``). Its next collective then meets another one of
theirs: a hang, or, where sizes happen to agree, weights of one layer in the place of another's, which nobody notices.

So a rank keeps a tree of everything that has followed what came before, for all models that share a process group, the
same tree on all ranks. Where one thing has
ever followed, that thing is free; it costs a look into a dictionary. Anything else is agreed on through the store first:
what is new, and every turn at a fork, a place from which ranks have gone different ways before. What all ranks do
alike is always allowed; what one rank does alone raises, before its collective has met anybody else's.

A model has many layers, and what is new of one is what the last one has shown: after its gather came that of the next one, after its
gradients were reduced, the gather of the one before it. That is expected, and free, as if it had followed before; so the first step asks about a
dozen times, however many layers there are, and a loop over parameters (a norm of each) three times.

Which kind of phase comes next is not a fork: a program evaluates now and then, prints a norm every hundred steps, and
accumulates over microbatches. Ranks expect there what followed the last time, after the same phases, and agree on what
they did not expect. So training asks nothing, and neither does a program with a rhythm (rollouts and training, a teacher and
a student, a generator and a discriminator, an evaluation after every thousandth step) after three rounds of it; one
without pays for each change, there and back. Whether a backward accumulates is free either way. An agreement takes about a
millisecond on one machine.

A rank that goes a way of its own asks; those on the usual one do not listen, start what they know, and wait in a collective.
Each rank counts what it has done. One that has done more than a rank that asks, and was not asked the same, has gone another
way for certain: that one will never start what this one waits for. :mod:`.watchdog` looks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "ADVICE",
    "AT_REST",
    "STEP",
    "Agree",
    "Details",
    "Order",
    "Phase",
    "Series",
    "no_details",
    "order_of_group",
    "orders",
    "standstill",
]

ADVICE = (
    "All ranks must go through the model in the same way, and call forward and backward equally often. Does a branch depend on "
    "data, or did one rank skip a batch? Run the block on every rank (and multiply what is not wanted by zero), or decide for "
    "all ranks together. Weights and optimizer state are those of the last optimizer step; model.reset() on every rank makes the "
    "model usable again."
)

AT_REST = "at rest"
"""The kind of phase that is one operation on parameters between steps: a norm, ``full_tensor()``."""

STEP = "step"
"""The kind of phase that is an optimizer's step."""

Agree = Callable[[Sequence[str], int], None]
"""``agree(lines, epoch)`` raises RuntimeError on every rank unless all of them come with the same lines, in the same epoch
of the order's life."""

Details = Callable[[], Sequence[str]]
"""Lines that say more of something than its name. Asked for where ranks are about to compare them."""


def no_details() -> Sequence[str]:
    return ()


class Phase(NamedTuple):
    """A part of a step.

    Args:
        kind: ``"forward with gradients"``, ``"forward without gradients"``, ``"backward"``, ``"backward that accumulates"``,
            :data:`STEP`, :data:`AT_REST`.
        what: runs: ``"the model (GPT #1)"``, ``"compiled code of layers.0 (GPT #1)"``; a backward, ``"GPT #1"``; at rest,
            ``"full_tensor() of 'layers.0.weight'"``.
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
"""What is done to one of many, and which one: ``("gather", 3)``, of the fourth bucket."""

_Past = tuple[tuple[tuple[Phase | None, int], ...], int]
"""Rows of equal forwards that came before the last one, with their lengths; and the length of that one so far."""


@dataclass(eq=False)
class _Place:
    """After something that has happened."""

    number: int
    after: str
    collectives: dict[str, _Place] = field(default_factory=dict)
    phases: dict[Phase, _Place] = field(default_factory=dict)
    last: Phase | str = ""
    """What has followed the last time."""
    last_after: dict[_Past, Phase] = field(default_factory=dict)
    """The same, by the forwards before it."""

    def expects(self, past: _Past) -> Phase | str:
        return self.last_after.get(past, self.last)

    def followed_by(self, what: Phase | str, past: _Past) -> None:
        if len(self.last_after) > _PASTS:
            self.last_after.clear()
        self.last = what
        if isinstance(what, Phase):
            self.last_after[past] = what
        else:
            self.last_after.pop(past, None)


def standstill(why: str) -> RuntimeError:
    """The error of a rank that others will never come to meet."""
    return RuntimeError(f"This rank would wait for others for good. {why} {ADVICE}")


def order_of_group(name: str) -> Order:
    """Of the models that communicate over a process group: theirs meet each other."""
    return _orders.setdefault(name, Order(group=name))


def orders() -> dict[str, Order]:
    """All there are, by name of the group."""
    return _orders


class Order:
    """Of the models of one process group, on this rank.

    Args:
        limit: places to remember. A program that goes another way in every step would fill the memory with them.
        group: name of the process group.

    Attributes:
        epoch: of its life; ranks that are not in the same one do not compare.
        events: phases and collectives that were begun in this epoch.
        steps: of optimizers, that were begun.
        stalled: why nothing can follow any more: ranks have gone different ways, and this one was waiting for another one.
        thread: in which the last model was sharded, and very likely is trained.
        numbers: of parameters, by name, for series over them.
    """

    schedules: dict[str, Any]
    """What ranks have decided together about the schedules of compiled graphs, by structure; the same on all. Not forgotten while
    the group lives: code that follows it runs on, of other models too, which may share it."""
    schedules_replaced: int
    """How often another one has come in the place of one of these."""

    def __init__(self, limit: int = 100_000, group: str = "") -> None:
        self.schedules = {}
        self.schedules_replaced = 0
        self.group = group
        self.epoch = self.events = self.steps = 0
        self.stalled: str | None = None
        self.thread = threading.get_ident()
        self.numbers: dict[str, int] = {}
        self._limit = limit
        self._models = 0
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Order:
        return self  # of a process group, of which there is one

    def join(self, kind: str, parameters: Iterable[str] = ()) -> str:
        """A model is sharded, on all ranks, with parameters of these names. Returns its name here.

        From here on all ranks know the same again, which is nothing.
        """
        self._models += 1
        for name in parameters:
            self.numbers.setdefault(name, len(self.numbers))
        self._next_epoch()
        self.thread = threading.get_ident()
        self.forget()
        return f"{kind} #{self._models}"

    def forget(self) -> None:
        """All of it: after a failure ranks may have come to know different things."""
        self._places = 0
        self._begins: dict[tuple[Phase, Phase | None], _Place] = {}
        self._at = self._start = self._place("the start")
        self._phase: Phase | None = None
        self._before: Phase | None = None  # also at rest
        self._forward: Phase | None = None
        self._past: _Past = ((), 0)
        self._recent: tuple[Series, ...] = ()
        self._strides: dict[tuple[bool, tuple[str, ...]], Series] = {}  # from the last one, by what the last two were

    def restart(self) -> None:
        """After a failure that was the same on all ranks anything may follow."""
        self._next_epoch()
        self._at, self._phase, self._before, self._forward, self._past = self._start, None, None, None, ((), 0)
        self._recent = ()

    def _next_epoch(self) -> None:
        self.epoch, self.events = self.epoch + 1, 0

    @property
    def latest(self) -> str:
        """What was begun last."""
        return self._at.after

    def check(self) -> None:
        """Raise RuntimeError if nothing can follow."""
        if self.stalled is not None:
            raise standstill(self.stalled)

    def enter(self, phase: Phase, agree: Agree, details: Details = no_details, series: Series | None = None) -> None:
        """A phase begins.

        Args:
            series: it is one of.

        Raises:
            RuntimeError: it is new here, or this is a fork, and other ranks did not come to do the same.
        """
        if self.stalled is not None:
            raise standstill(self.stalled)
        if self._places > self._limit:
            at = self._at.after
            self.forget()
            self._at = self._place(at)
        here = self._at
        is_new = phase not in here.phases
        if (is_new and not self._continues(series, here)) or (not is_new and self._is_unexpected(phase, here)):
            self._ask(agree, str(phase), not is_new, details)
        if is_new:
            # What a forward is made of does not depend on what came before it; of a backward it does.
            before = self._phase if phase.is_backward else self._before if phase.kind == AT_REST else None
            if (phase, before) not in self._begins:
                self._begins[phase, before] = self._place(str(phase))
            here.phases[phase] = self._begins[phase, before]
        here.followed_by(phase, self._past)
        self.steps += phase.kind == STEP
        if phase.kind not in (AT_REST, STEP):
            self._phase = phase
            if not phase.is_backward:
                rows, length = self._past
                if phase == self._forward:
                    self._past = rows, length + 1
                else:
                    self._past = (*rows, (self._forward, length))[-_ROWS:], 1
                    self._forward = phase
        self._at, self._before = here.phases[phase], phase
        self._follow(series)
        self.events += 1

    def _continues(self, series: Series | None, here: _Place) -> bool:
        """Whether something new is what a series goes on with, where nothing else has followed yet."""
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
        """Whether a backward accumulates is each rank's own affair, and makes no difference here."""
        return self._phase is not None and self._phase.is_backward, tuple(what for what, _ in self._recent)

    def _is_unexpected(self, phase: Phase, here: _Place) -> bool:
        """Of a phase that has followed this place before."""
        expected = here.expects(self._past)
        if phase.kind == AT_REST:
            return phase != expected
        if here.collectives or any(other.kind == phase.kind and other != phase for other in here.phases):
            return True
        return phase != expected and not (phase.is_backward and isinstance(expected, Phase) and expected.is_backward)

    def start(self, collective: str, agree: Agree, details: Details = no_details, series: Series | None = None) -> None:
        """A collective is about to be started, or a compiled graph of some.

        Args:
            collective: ``"gather layers.0 (GPT #1)"``, ``"forward graph 1c5e... (GPT #1)"``.
            details: of a graph, its schedule. Ranks compare it, and show the first line that differs.
            series: it is one of.

        Raises:
            RuntimeError: it is new here, or this is a fork, and other ranks did not come to do the same.
        """
        if self.stalled is not None:
            raise standstill(self.stalled)
        here = self._at
        if collective not in here.collectives or len(here.collectives) > 1 or here.phases:
            if not self._is_usual(collective, here) and not self._continues(series, here):
                self._ask(agree, collective, collective in here.collectives, details)
            if collective not in here.collectives:
                here.collectives[collective] = self._place(collective)
            here.followed_by(collective, self._past)
        self._at = here.collectives[collective]
        self._follow(series)
        self.events += 1

    def _is_usual(self, collective: str, here: _Place) -> bool:
        """At a place that operations on parameters at rest have followed too."""
        is_alone = len(here.collectives) == 1 and all(phase.kind == AT_REST for phase in here.phases)
        return is_alone and collective in here.collectives and here.expects(self._past) == collective

    def _place(self, after: str) -> _Place:
        self._places += 1
        return _Place(self._places, after)

    def _ask(self, agree: Agree, what: str, is_known: bool, details: Details) -> None:
        here = self._at
        usual = [str(phase) for phase in here.phases] + list(here.collectives)
        try:
            agree([*details(), f"{what} after {here.after} (place {here.number})"], self.epoch)
        except RuntimeError as error:
            so_far = f"; so far, what followed there was {' or '.join(usual[:4])}" if usual else ""
            raise RuntimeError(
                f"This rank comes to {what} after {here.after}{'' if is_known else ', for the first time'}{so_far}. "
                f"Other ranks do something else: {error} {ADVICE}"
            ) from None


_ROWS = 2
_PASTS = 20_000
"""To remember, of one place."""

_orders: dict[str, Order] = {}
"""By name of the group. For good: ranks would forget them at different times."""
