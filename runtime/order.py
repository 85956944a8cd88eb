"""What follows what: forwards, backwards and the collectives in them, in the same order on all ranks.

Ranks run the same program on data of their own. A branch that depends on data may take one rank past a block that the
others run, or past a backward (``if not loss.isfinite(): continue``). Its next collective then meets another one of
theirs: a hang, or, where sizes happen to agree, weights of one layer in the place of another's, which nobody notices.

So a rank keeps a tree of everything that has followed what came before, for all models that share a process group, the
same tree on all ranks. Where one thing has
ever followed, that thing is free; it costs a look into a dictionary. Anything else is agreed on through the store first:
what is new, and every turn at a fork, a place from which ranks have gone different ways before. What all ranks do
alike is always allowed; what one rank does alone raises, before its collective has met anybody else's.

Which kind of phase comes next is not a fork: a program evaluates now and then, and accumulates over microbatches. A rank
that evaluates alone is caught the first time only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Agree", "Details", "Order", "Phase", "no_details", "order_of_group"]

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
        kind: ``"forward with gradients"``, ``"forward without gradients"``, ``"backward"``, ``"backward that accumulates"``.
        what: runs: ``"the model (GPT #1)"``, ``"compiled code of layers.0 (GPT #1)"``; a backward, ``"GPT #1"``.
    """

    kind: str
    what: str = ""

    def __str__(self) -> str:
        return f"a {self.kind}{f' of {self.what}' if self.what else ''}"


@dataclass(eq=False)
class _Place:
    """After something that has happened."""

    number: int
    after: str
    collectives: dict[str, _Place] = field(default_factory=dict)
    phases: dict[Phase, _Place] = field(default_factory=dict)


def order_of_group(name: str) -> Order:
    """Of the models that communicate over a process group: theirs meet each other."""
    return _orders.setdefault(name, Order())


class Order:
    """Of the models of one process group, on this rank.

    Args:
        limit: places to remember. A program that goes another way in every step would fill the memory with them.
    """

    schedules: dict[str, Any]
    """What ranks have decided together about the schedules of compiled graphs, by structure; the same on all. Not forgotten while
    the group lives: code that follows it runs on, of other models too, which may share it."""
    schedules_replaced: int
    """How often another one has come in the place of one of these."""

    def __init__(self, limit: int = 100_000) -> None:
        self.schedules = {}
        self.schedules_replaced = 0
        self._limit = limit
        self._epoch = self._models = 0
        self.forget()

    def join(self, kind: str) -> str:
        """A model is sharded, on all ranks. Returns its name here.

        From here on all ranks know the same again, which is nothing.
        """
        self._models += 1
        self._epoch += 1
        self.forget()
        return f"{kind} #{self._models}"

    def forget(self) -> None:
        """All of it: after a failure ranks may have come to know different things."""
        self._places = 0
        self._begins: dict[tuple[Phase, Phase | None], _Place] = {}
        self._at = self._start = self._place("the start")
        self._phase: Phase | None = None

    def restart(self) -> None:
        """After a failure that was the same on all ranks anything may follow."""
        self._at, self._phase = self._start, None

    def enter(self, phase: Phase, agree: Agree, details: Details = no_details) -> None:
        """A phase begins.

        Raises:
            RuntimeError: it is new here, or this is a fork, and other ranks did not come to do the same.
        """
        if self._places > self._limit:
            at = self._at.after
            self.forget()
            self._at = self._place(at)
        here = self._at
        if (
            phase not in here.phases
            or here.collectives
            or any(other.kind == phase.kind and other != phase for other in here.phases)
        ):
            self._ask(agree, str(phase), phase in here.phases, details)
            if phase not in here.phases:
                # What a forward is made of does not depend on what came before it; of a backward it does.
                begin = (phase, self._phase if phase.kind.startswith("backward") else None)
                if begin not in self._begins:
                    self._begins[begin] = self._place(str(phase))
                here.phases[phase] = self._begins[begin]
        self._at, self._phase = here.phases[phase], phase

    def start(self, collective: str, agree: Agree, details: Details = no_details) -> None:
        """A collective is about to be started, or a compiled graph of some.

        Args:
            collective: ``"gather layers.0 (GPT #1)"``, ``"forward graph 1c5e... (GPT #1)"``.
            details: of a graph, its schedule. Ranks compare it, and show the first line that differs.

        Raises:
            RuntimeError: it is new here, or this is a fork, and other ranks did not come to do the same.
        """
        here = self._at
        if collective not in here.collectives or len(here.collectives) > 1 or here.phases:
            self._ask(agree, collective, collective in here.collectives, details)
            if collective not in here.collectives:
                here.collectives[collective] = self._place(collective)
        self._at = here.collectives[collective]

    def _place(self, after: str) -> _Place:
        self._places += 1
        return _Place(self._places, after)

    def _ask(self, agree: Agree, what: str, is_known: bool, details: Details) -> None:
        here = self._at
        usual = [str(phase) for phase in here.phases] + list(here.collectives)
        try:
            agree([*details(), f"{what} after {here.after} (place {here.number})"], self._epoch)
        except RuntimeError as error:
            so_far = f"; so far, what followed there was {' or '.join(usual[:4])}" if usual else ""
            raise RuntimeError(
                f"This rank comes to {what} after {here.after}{'' if is_known else ', for the first time'}{so_far}. "
                f"Other ranks do something else: {error} All ranks must go through the model in the same way, and call "
                "forward and backward equally often. Does a branch depend on data, or did one rank skip a batch? Run "
                "the block on every rank (and multiply what is not wanted by zero), or decide for all ranks together. "
                "Weights and optimizer state are unchanged; model.reset() on every rank makes the model usable again."
            ) from None


_orders: dict[str, Order] = {}
"""By name of the group. For good: ranks would forget them at different times."""
