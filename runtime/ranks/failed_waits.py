"""Why waits for collectives fail, and groups whose waits end if a rank's process does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from .. import compat
from .collective_order import Order
from .lifeline import Answers, ask
from .notices import Notice, ended, found, key_of, last_told, ranks_text

ENDING = 1.0
"""Seconds to look for a process that has ended, when a connection was closed."""
ANSWER = 1.0
"""Seconds within which processes of other ranks must answer."""
PAUSE = 5.0
"""Maximum number of seconds between two questions whether they do."""

_log = logging.getLogger("mfsdp_compile")


@dataclass(eq=False)
class Guarded:
    """A process group in which waits end if a rank's process does not answer for long; see :meth:`.Watchdog.guarding`.

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
