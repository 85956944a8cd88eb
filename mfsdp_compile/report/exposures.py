"""How much of a collective computation waits for, as text."""

from __future__ import annotations

from mfsdp_compile.passes.guests.solver.simulate import Exposure

from ..quantities import seconds_text

EXPOSED_SECONDS = 1e-9
"""Shorter waits are rounding errors."""


def called(unit: str) -> str:
    """Return the name to show for a unit. The root has none of its own."""
    return unit or "(root)"


def is_exposed(exposure: Exposure) -> bool:
    """Return whether computation waits for a collective."""
    return exposure.exposed > EXPOSED_SECONDS


def exposure_text(exposure: Exposure) -> str:
    """Return text such as ``layers.17 gather 1.90 ms, hidden 1.20 ms, exposed 0.70 ms: limited by memory budget``."""
    return f"{called(exposure.name)} {exposure.what} {seconds_text(exposure.seconds)}, {overlap_text(exposure)}"


def overlap_text(exposure: Exposure) -> str:
    """Describe how much of a collective is hidden behind computation, and why not more."""
    if not is_exposed(exposure):
        return "hidden behind computation"
    hidden, exposed = seconds_text(exposure.hidden), seconds_text(exposure.exposed)
    return f"hidden {hidden}, exposed {exposed}: {reason_text(exposure)}"


def reason_text(exposure: Exposure) -> str:
    """Describe why a collective is exposed: the known reason, or what the times show."""
    if exposure.reason:
        return exposure.reason
    text = f"{seconds_text(exposure.ahead)} of computation between its start and its wait"
    if exposure.queued > EXPOSED_SECONDS:
        text += f", and it queued for {seconds_text(exposure.queued)} behind others of its group"
    return text
