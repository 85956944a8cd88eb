"""Why waits for collectives fail, and groups whose waits end if a rank's process does not answer."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import torch.distributed as dist

from .. import compat
from .collective_order import AFTER_ABORT, KEPT, Order
from .journal import journal
from .lifeline import Answers, ask
from .notices import Notice, conclude_once, ended, found, key_of, last_told, ranks_text
from .outstanding import Outstanding
from .waits import main_order

ENDING = 1.0
"""Seconds to look for a process that has ended, when a connection was closed."""
ANSWER = 1.0
"""Seconds within which processes of other ranks must answer."""
PAUSE = 5.0
"""Maximum number of seconds between two questions whether they do."""

_log = logging.getLogger("mfsdp_compile")


@dataclass(eq=False)
class Guarded:
    """A process group in which waits end if a rank's process does not answer for long (:meth:`FailedWaits.guarding`).

    Args:
        group: The process group.
        patience: Seconds.
    """

    group: dist.ProcessGroup
    patience: float
    due: float = field(default_factory=time.monotonic)
    silent: dict[int, float] = field(default_factory=dict)
    """Ranks that do not answer, and since when."""
    why: str = ""
    """Why the group's waits were ended; empty if they were not."""

    def look(self, store: dist.Store) -> None:
        """End the waits in the group if one of its ranks has not answered for too long."""
        now = time.monotonic()
        if now < self.due or self.why:
            return
        self.due = now + min(self.patience / 4, PAUSE) - ANSWER
        others = [rank for rank in dist.get_process_group_ranks(self.group) if rank != dist.get_rank()]
        silent = ask(store, others, ANSWER).silent
        self.silent = {rank: self.silent.get(rank, now) for rank in silent}
        if late := [rank for rank, since in self.silent.items() if now - since >= self.patience]:
            self.why = f"The process of {ranks_text(late)} has not answered for {self.patience:.0f} s."
            _log.error("Rank %d: %s", dist.get_rank(), self.why)
            compat.break_connections(self.group)


class FailedWaits:
    """What this rank says of waits for collectives that fail.

    Args:
        live: Returns the orders of the models that exist.

    Attributes:
        guarded: The groups that are guarded.
        outstanding: Collectives of compiled graphs whose results nothing will use.
    """

    def __init__(self, live: Callable[[], Collection[Order]]) -> None:
        self.guarded: list[Guarded] = []
        self.outstanding = Outstanding()
        self._live = live
        self._explained: set[str] = set()  # groups

    @contextlib.contextmanager
    def guarding(self, group: dist.ProcessGroup, patience: float) -> Iterator[None]:
        """Context in which waits in a process group end if a rank's process does not answer for ``patience`` seconds.

        For waits that may take longer than that while all processes run, such as for a slow disk.
        """
        guarded = Guarded(group, patience)
        self.guarded.append(guarded)
        try:
            yield
        finally:
            self.guarded.remove(guarded)

    def abandon(self, group: dist.ProcessGroup, error: BaseException) -> None:
        """Leave a guarded group in which ranks wait for this one: publish why, and end all waits in it."""
        with contextlib.suppress(RuntimeError, OSError):  # the store's process is gone
            told = f"Rank {dist.get_rank()} had failed with {type(error).__name__}: {error}"[:1000]
            conclude_once(compat.default_store(), key_of(group.group_name, "abandoned"), {"text": told})
            compat.break_connections(group)

    def explain(self, error: RuntimeError, what: str | None = None) -> None:
        """Raise an error that says more than the one with which a wait for a collective has ended.

        Other ranks may have ended the wait before the thread of this one has looked.

        Args:
            what: What the collective belongs to. None: what the journal says.
        """
        live = self._live()
        trained = main_order(live)
        if trained is None:
            return
        self.outstanding.add_of_graphs(sys._getframe(1))
        for order in live:
            if order.stalled is None and dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # the store's process is gone
                    store = compat.default_store()
                    if (over := found(store, key_of(order.group, "over"))) and over["epoch"] == order.epoch:
                        order.stall(over["text"])
            if order.stalled is not None and order.group not in self._explained:
                self._explained.add(order.group)
                raise order.standstill(error) from None
        if any(order.stalled is not None for order in live):
            return
        what = what or journal.doing() or trained.latest
        raise RuntimeError(
            f"A collective failed on rank {dist.get_rank()}, in {what}, {trained.progress}. "
            f"{why_failed(live, self.guarded, error)} {AFTER_ABORT if trained.runs_on_nccl else KEPT} where all ranks "
            f"live. The backend's error: {error}"
        ) from None

    def explain_nccl(self, error: BaseException) -> None:
        """Do the same for an error of NCCL's, which compiled code and the eager path get where they start something."""
        if isinstance(error, RuntimeError) and compat.is_of_nccl(error):
            self.explain(error)

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Context for collectives of ``torch.distributed``; see :meth:`explain`."""
        try:
            yield
        except RuntimeError as error:
            if not error.__suppress_context__:  # it was not explained yet, where it was raised
                self.explain(error, what)
            raise

    def uncaught(self, error: BaseException, trace: TracebackType | None) -> RuntimeError | None:
        """Return an error that says more than one of a collective of the program itself that ends the program."""
        if not (isinstance(error, RuntimeError) and compat.is_of_gloo(error) and dist.is_initialized()):
            return None
        live = self._live()
        order = main_order(live)
        if order is None:
            return None
        if order.stalled is not None:
            return order.standstill(error).with_traceback(trace)
        return RuntimeError(
            f"A collective of the program itself failed on rank {dist.get_rank()}, {order.progress}: "
            f"{why_failed(live, self.guarded, error)} The backend's error: {error}"
        ).with_traceback(trace)

    def forget(self, group: str) -> None:
        """Explain failures in a group again, which was connected again."""
        self._explained.discard(group)


def why_failed(live: Collection[Order], guarded: Collection[Guarded], error: RuntimeError) -> str:
    """Say which rank has made a collective fail, and what is known of it.

    Args:
        live: Orders of the models that exist.
        guarded: The groups that are guarded.
        error: The error with which the wait has ended.
    """
    if why := next((each.why for each in guarded if each.why), None):
        return why
    try:
        store, known = compat.default_store(), compat.known_groups()
        for each in guarded:
            if abandoned := found(store, key_of(each.group.group_name, "abandoned")):
                return f"{abandoned['text']}."
        groups = {order.group for order in live} & known.keys()  # of others, the program has destroyed the group
        others = sorted({rank for group in groups for rank in known[group]} - {dist.get_rank()})
        if compat.is_timeout(error):
            answers, failed = ask(store, others, ANSWER), None  # ranks that have waited as well
        else:
            answers, failed = _wait_for_end(store, live, others)
        if silent := [rank for rank in answers.ended if last_told(store, groups, rank) is None]:
            return (
                f"The process of {ranks_text(silent)} has ended and could not say why: it was killed, crashed or ran "
                "out of memory. What it printed last, or the log of its machine, tells."
            )
    except (RuntimeError, OSError):
        return (
            "The process that keeps the store of the process group has ended: rank 0, or its launcher. What it printed "
            "last says why."
        )
    if failed is not None:
        return f"{ended(failed)}."
    late = f"{where}." if (where := _where(answers)) else "Another rank takes longer than the process group's timeout."
    return f"{late} `mfsdp hang` says where each rank is."


def where_they_are(store: dist.Store, ranks: Sequence[int]) -> str:
    """Say what keeps ranks that others have waited for, as far as their processes tell; empty if they do not."""
    try:
        return _where(ask(store, [rank for rank in ranks if rank != dist.get_rank()], ANSWER))
    except (RuntimeError, OSError):  # the store is gone
        return ""


def _where(answers: Answers) -> str:
    if answers.silent:
        return (
            f"The process of {ranks_text(answers.silent)} does not answer: it is stopped, or something keeps Python "
            "from running there"
        )
    return "; ".join(f"rank {rank} {text}" for rank, text in list(answers.where.items())[:4]).replace("rank", "Rank", 1)


def _wait_for_end(store: dist.Store, live: Collection[Order], others: Sequence[int]) -> tuple[Answers, Notice | None]:
    """Find out which processes have ended, and which rank has said first that it fails.

    While a process ends, its connections are closed one by one.
    """
    deadline = time.monotonic() + ENDING
    while True:
        told = [found(store, key_of(order.group, "failed")) for order in live]
        failed = next((each for each in told if each is not None and each["rank"] != dist.get_rank()), None)
        answers = ask(store, others, 0)
        if answers.ended or failed is not None or time.monotonic() > deadline:
            answers.silent.clear()  # they had no time to answer
            return answers, failed
        time.sleep(0.1)
