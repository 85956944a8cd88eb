"""Names that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'adamw'?"``, with the known name that is most like ``name``; ``""`` if none is."""
    nearest = difflib.get_close_matches(str(name), list(known), 1, cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
