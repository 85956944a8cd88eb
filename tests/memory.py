"""How many bytes are live while a function runs, by torch's profiler: every CPU allocation, compiled code's too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that were allocated at a time beyond what was there when ``function`` began."""
    return _live(function)[0]


def net_bytes(function: Callable[[], Any]) -> int:
    """What ``function`` allocated and did not free."""
    return _live(function)[1]


def _live(function: Callable[[], Any]) -> tuple[int, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    assert events, "the profiler recorded no allocations"
    return peak, live
