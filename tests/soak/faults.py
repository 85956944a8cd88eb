"""What happens to a training, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Kinds of faults. The value is what the log calls it."""

    KILL_ONE = "SIGKILL of one rank"
    KILL_ALL = "SIGKILL of all ranks"
    KILL_SAVING = "SIGKILL of one rank while a checkpoint is written"
    TERMINATE = "SIGTERM of all ranks"
    SHORT_STALL = "SIGSTOP of one rank, shorter than the timeout"
    LONG_STALL = "SIGSTOP of one rank, longer than the timeout"
    FULL_DISK = "full disk"
    DAMAGE = "SIGKILL of all ranks, and the last checkpoint damaged"


BRIEF = (Kind.KILL_SAVING, Kind.FULL_DISK, Kind.DAMAGE, Kind.SHORT_STALL, Kind.TERMINATE, Kind.KILL_ONE)
"""Kinds that take a few seconds. Only a long stall has to wait for a timeout."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: What happens.
        after: Number of steps from the previous fault, or the start of the ranks.
        delay: Seconds from the end of that step.
        choice: Number in [0, 1) that chooses the rank or the file.
    """

    kind: Kind
    after: int
    delay: float
    choice: float


@dataclass(frozen=True)
class Start:
    """How ranks are started."""

    ranks: int
    mode: str


def faults(random_: random.Random, number: int, kinds: Sequence[Kind], most_steps: int) -> Iterator[Fault]:
    """Draw faults. Each kind comes once before one comes again."""
    bag: list[Kind] = []
    for _ in range(number):
        if not bag:
            bag = random_.sample(kinds, len(kinds))
        yield Fault(bag.pop(), random_.randint(0, most_steps), random_.uniform(0, 0.1), random_.random())


def starts(random_: random.Random, ranks: Sequence[int], modes: Sequence[str]) -> Iterator[Start]:
    """Draw starts without end. Some have the number of ranks and the mode of the one before."""
    while True:
        start = Start(random_.choice(ranks), random_.choice(modes))
        yield start
        if random_.random() < 0.5:
            yield start
