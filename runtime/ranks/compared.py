"""Lines that ranks compare, of which messages show a part."""

from __future__ import annotations

_UNSEEN = "\x00"


def line(text: str, unseen: object) -> str:
    """Return a line that is equal on two ranks if both arguments are; messages show ``text`` only."""
    return f"{text}{_UNSEEN}{unseen}"


def shown(line: str) -> str:
    """Return what messages show of a line."""
    return line.partition(_UNSEEN)[0]
