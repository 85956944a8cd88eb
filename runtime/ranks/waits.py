"""What this rank waits in: agreements with other ranks, of which it tells them if the wait is long.

There is one notice per process group, ``ask``, whatever ranks agree on and however many of them wait. Reading those of
all groups that a rank is in is therefore cheap in jobs of any size. It suffices to notice ranks that wait in different
agreements: of two such ranks, one finds the notice of the other (:mod:`.watchdog`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from .. import compat
from ..program_lines import program_line
from .collective_order import Order, orders
from .notices import Notice, come_so_far, found, key_of, publish, refusal_of


@dataclass(eq=False)
class Asking:
    """A wait of this rank for others in an agreement.

    Args:
        group: Name of the process group.
        ranks: Ranks of the group.
        place: Where in the store ranks meet, for this topic.
        visit: Number of the visit at this place.
        what: What is to be agreed on.
        is_next: Whether that is the next step in the order of collectives.
        is_last_resort: Whether diverged ranks meet again here. Such an agreement is never answered for others.
        heeds_refusals: Whether the ranks that wait learn from those that were refused why they do not come.

    Attributes:
        order: Order of the group, if it has one.
    """

    group: str
    ranks: Sequence[int]
    place: str
    visit: int
    what: str
    is_next: bool
    is_last_resort: bool
    heeds_refusals: bool
    order: Order | None = field(init=False)
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    was_told: bool = False

    def __post_init__(self) -> None:
        self.order = orders().get(self.group)

    @property
    def key(self) -> str:
        return _key(self.place, self.visit)

    @property
    def shown(self) -> str:
        """What is to be agreed on, for messages."""
        return self.what if self.is_next else repr(self.what)


class Waits:
    """The waits of this rank in agreements."""

    def __init__(self) -> None:
        self._asking: dict[int, Asking] = {}  # by thread
        self._visits: Counter[str] = Counter()
        self._done: list[Asking] = []

    @contextlib.contextmanager
    def asking(self, asked: Asking) -> Iterator[None]:
        """Context for a wait of this rank for others in an agreement."""
        self._visits[asked.place] = asked.visit
        before = self._asking.get(asked.thread)
        self._asking[asked.thread] = asked
        try:
            yield
        finally:
            if asked.was_told:
                self._done.append(asked)
            if before is None:
                del self._asking[asked.thread]
            else:
                self._asking[asked.thread] = before

    def longer_than(self, seconds: float) -> list[Asking]:
        now = time.monotonic()
        return [each for each in list(self._asking.values()) if now - each.since >= seconds]

    def is_waiting(self, store: dist.Store, asked: Asking) -> bool:
        """Whether a wait goes on: it has no verdict, even one that the waiting thread has not read yet."""
        return self._asking.get(asked.thread) is asked and not store.check([f"{asked.key}/verdict"])

    def tell(self, store: dist.Store, asked: Asking, live: Collection[Order]) -> None:
        """Tell other ranks that this one waits, unless another one has told that has begun no more than this one."""
        order = asked.order or main_order(live)
        told = come_so_far(order) | {
            "number": order.events + 1 if order is not None else 0,
            "what": asked.shown,
            "after": order.latest if order is not None else "",
            "line": program_line(asked.thread) or (program_line(order.thread) if order is not None else None),
            "group": asked.group,
            "place": asked.place,
            "visit": asked.visit,
            "is last resort": asked.is_last_resort,
            "heeds refusals": asked.heeds_refusals,
            "next": {each.group: (each.epoch, each.events + 1) for each in live},
        }
        there = found(store, key_of(asked.group, "ask"))
        if (
            there is None
            or (there["epoch"], -there["number"]) < (told["epoch"], -told["number"])
            or there["rank"] == told["rank"]
            or not self._stands(store, there)
        ):
            publish(store, asked.group, "ask", told)
        asked.was_told = True

    def take_back(self, store: dist.Store) -> None:
        """Withdraw what others were told about waits that have ended."""
        while self._done:
            asked = self._done.pop()
            key = key_of(asked.group, "ask")
            ask, mine = found(store, key), (dist.get_rank(), asked.place, asked.visit)
            if ask is not None and (ask["rank"], ask["place"], ask["visit"]) == mine:
                store.set(key, "null")

    def of_others(self, store: dist.Store) -> Iterator[Notice]:
        """Yield what other ranks have told of their waits for this one in agreements that it has not come to.

        Those are left out that learn of the error with which this one was refused. It says more.
        """
        me = dist.get_rank()
        for group in compat.known_groups():
            ask = found(store, key_of(group, "ask"))
            if ask is None or ask["rank"] == me or not self._stands(store, ask):
                continue
            if not (ask["heeds refusals"] and store.check([refusal_of(me)]) and store.get(refusal_of(me))):
                yield ask

    def was_asked(self, ask: Notice) -> bool:
        """Whether this rank has come to the agreement that another one waits in."""
        return self._visits[ask["place"]] >= ask["visit"]

    def _stands(self, store: dist.Store, ask: Notice) -> bool:
        """Whether another rank waits for this one in an agreement: it has no verdict, and this one has not come."""
        return not self.was_asked(ask) and not store.check([f"{key_of_ask(ask)}/verdict"])


def key_of_ask(ask: Notice) -> str:
    return _key(ask["place"], ask["visit"])


def _key(place: str, visit: int) -> str:
    return f"{place}/{visit}"


def main_order(live: Collection[Order]) -> Order | None:
    """Return the order of the model that is trained; None if there is no model."""
    return max(live, key=lambda order: order.steps, default=None)
