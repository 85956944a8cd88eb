"""The order in which this rank starts collectives for a model, kept the same on all ranks.

Ranks run the same program, but on data of their own, and a branch that depends on data may take one rank past a block that
the others run. Its next collective would then meet another one of theirs: a hang, or, where sizes happen to agree, weights
of one layer in the place of another's, which nobody notices.

So the first time that something runs (a forward of the model, with or without gradients; the backward after it), ranks
compare each collective through the store before they start it, and record the order. From then on every rank keeps to
it: one that has skipped something starts the collectives that belong to it all the same (weights that it does not use,
zeros for gradients), and the others do not notice. What is in no recorded order must be agreed on before it starts. Ranks
that agree record a new order; if some do not come, this one raises and says what it was about to do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

__all__ = ["Entry", "LaunchOrder", "Phases"]


class Entry(NamedTuple):
    """Something that starts collectives.

    Args:
        kind: ``"gather"`` or ``"reduce"``; ``"run compiled code of"``.
        name: of the bucket, or of several.
    """

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


_TOPIC = "Order of collectives"

Agree = Callable[[str, Sequence[str]], None]
"""``agree(topic, lines)`` raises RuntimeError on every rank unless all of them come with the same lines."""


class LaunchOrder:
    """Orders of one kind, forwards or backwards; at most one is under way.

    Args:
        agree: between the ranks.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._known: dict[Hashable, tuple[Entry, ...]] = {}
        self._key: Hashable = None
        self._expected: tuple[Entry, ...] | None = None
        self._position = 0
        self._recorded: list[Entry] = []

    def begin(self, key: Hashable) -> None:
        """What begins is of the kind that ``key`` names, not None."""
        self._key = key
        self._expected = self._known.get(key)
        self._position = 0
        self._recorded = []

    def drop(self) -> None:
        """It has failed, or nobody cares."""
        self._key = None

    @property
    def is_under_way(self) -> bool:
        return self._key is not None

    @property
    def is_recording(self) -> bool:
        """Whether it is the first of its kind."""
        return self._key is not None and self._expected is None

    @property
    def upcoming(self) -> Entry | None:
        """What is started next, if that is known."""
        if self._key is None or self._expected is None or self._position == len(self._expected):
            return None
        return self._expected[self._position]

    def known(self, key: Hashable) -> Sequence[Entry]:
        """The order of what ``key`` names, as agreed."""
        return self._known.get(key, ())

    def follow(self, entry: Entry) -> Sequence[Entry]:
        """Ask before ``entry`` is started.

        Returns:
            what has to be started before it, because other ranks do.

        Raises:
            RuntimeError: it is the first time, and other ranks are about to do something else; or it is not in the order,
                and other ranks did not come to agree on another.
        """
        if self._key is None:
            return ()
        if self._expected is None:
            self._agree(_TOPIC, [f"{len(self._recorded) + 1}: {entry}"])
            self._recorded.append(entry)
            return ()
        try:
            found = self._expected.index(entry, self._position)
        except ValueError:
            self._depart_from(entry)
            return ()
        skipped = self._expected[self._position : found]
        self._position = found + 1
        return skipped

    def _depart_from(self, entry: Entry) -> None:
        assert self._expected is not None
        done, rest = self._expected[: self._position], self._expected[self._position :]
        usual = f"usually {rest[0]} follows" if rest else "usually nothing follows"
        try:
            self._agree(_TOPIC, [f"{len(done) + 1}: {entry}, where {usual}"])
        except RuntimeError as error:
            raise RuntimeError(
                f"This rank was about to {entry}, where {usual}: {error} All ranks must take the same way through the "
                "model the first time; afterwards a rank may skip units, but not run what it did not run then."
            ) from None
        self._recorded = [*done, entry]
        self._expected = None

    def end(self) -> Sequence[Entry]:
        """It is over.

        Returns:
            what other ranks start besides.

        Raises:
            RuntimeError: it was the first of its kind, and other ranks go on.
        """
        if self._key is None:
            return ()
        key, self._key = self._key, None
        if self._expected is not None:
            return self._expected[self._position :]
        if self._recorded:
            self._agree(_TOPIC, [f"{len(self._recorded) + 1}: the end"])
        self._known[key] = tuple(self._recorded)
        return ()


class Phases:
    """What may follow what: forwards and backwards of a model, each with a name.

    A rank that leaves out a backward (its loss was not a number, say) comes to the next forward while the others are in
    backward. What has not followed before, on all ranks, must be agreed on.
    """

    def __init__(self, agree: Agree) -> None:
        self._agree = agree
        self._known: set[tuple[str, str]] = set()
        self._last = ""

    def enter(self, name: str) -> None:
        """Raises:
        RuntimeError: it has never followed what was before, and other ranks did not come to agree that it does.
        """
        if (self._last, name) not in self._known:
            what = f"{name} after {self._last}" if self._last else name
            try:
                self._agree("Forwards and backwards", [what])
            except RuntimeError as error:
                raise RuntimeError(
                    f"This rank begins {what}, which it has not done before: {error} Did one rank skip a forward or a "
                    "backward? Every rank must call both the same number of times."
                ) from None
            self._known.add((self._last, name))
        self._last = name

    def forget(self) -> None:
        """After a failure anything may follow."""
        self._last = ""
