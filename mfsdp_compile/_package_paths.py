"""Locations of the package's parts: inside its folder when it is installed, next to it in a checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent
"""Root of the checkout, if the package is in one."""


def elsewhere() -> str | None:
    """Return where Python would import ``runtime`` from, or None if that is inside or next to this folder."""
    found = importlib.util.find_spec("mfsdp_compile.runtime")
    if found is None or found.origin is None:
        return "nowhere"
    place = Path(found.origin).resolve().parent
    return None if place in (PACKAGE / "runtime", CHECKOUT / "runtime") else f"in {place}"
