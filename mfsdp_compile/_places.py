"""Where the package's parts lie: in its folder when it is installed, beside it in a checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
"""Of the package, where it is in one."""


def elsewhere() -> str | None:
    """Where Python would import ``runtime`` from, if that is neither in this folder nor beside it."""
    found = importlib.util.find_spec("mfsdp_compile.runtime")
    if found is None or found.origin is None:
        return "nowhere"
    place = Path(found.origin).resolve().parent
    return None if place in (PACKAGE / "runtime", CHECKOUT / "runtime") else f"in {place}"
