"""What may follow what: forwards and backwards of a model, the same on all ranks.

A rank that leaves out a backward (``if not loss.isfinite(): continue``) comes to the next forward while the others are in
backward. Its gathers would meet theirs of other layers, and where sizes agree nobody would notice. So what has never
followed what was before is agreed on through the store before it starts any collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Phases"]

Agree = Callable[[str, Sequence[str]], None]
"""``agree(topic, lines)`` raises RuntimeError on every rank unless all of them come with the same lines."""


class Phases:
    """Forwards and backwards of one model, each with a name.

    Args:
        agree: between the ranks.
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
