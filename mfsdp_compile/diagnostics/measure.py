"""Measures the collectives and allocations of a function, including compiled code."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile

from mfsdp_compile.runtime import compat

_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)


def collectives(function: Callable[[], Any]) -> Counter[str]:
    """Count how often each functional collective is started, by name without namespace.

    See :func:`~mfsdp_compile.runtime.compat.stand_around_collectives`.
    """
    counts: Counter[str] = Counter()

    def count(name: str) -> contextlib.AbstractContextManager[None]:
        counts[name] += 1
        return contextlib.nullcontext()

    library = compat.stand_around_collectives(_COLLECTIVES, count)
    try:
        function()
    finally:
        library._destroy()
    return counts


def allocated(function: Callable[[], Any]) -> tuple[int, int]:
    """Return bytes of CPU memory: the peak above what was allocated before, and what stays allocated.

    Measured with torch's profiler. Gloo allocates memory of its own, which does not belong to the schedule, so use a
    fake process group.

    Raises:
        RuntimeError: If the profiler recorded no allocations.
    """
    gc.collect()  # garbage that is freed meanwhile would hide as much of the peak
    with _silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        function()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    if not events:
        raise RuntimeError("the profiler recorded no allocations")
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress output of the profiler, which some builds print from C++, out of reach of Python's redirection."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    kept = {target: os.dup(target) for target in (1, 2)}
    for target in kept:
        os.dup2(nowhere, target)
    try:
        yield
    finally:
        for target, descriptor in kept.items():
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.close(nowhere)
