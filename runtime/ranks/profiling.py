"""Instrumentation of collectives as they start, compiled or not: names in traces of ``torch.profiler``, and listeners.

A trace of a training step has fifty events called ``gloo:all_gather``. While a profiler runs, every collective of a
sharded model is in a range with a name such as ``mfsdp step 3, backward graph, Llama: reduce layers.0 (45 of group
0)``: step, graph, operation, bucket, and the number that :mod:`mfsdp_compile.diagnostics.hang` uses for it. Listeners
(:func:`listening`) are notified of each collective.

Compiled code starts collectives itself. They are intercepted where every call of their operators passes, compiled or
not: at a dispatch key of torch that nothing else here uses. The interception is installed only while a profiler runs or
there is a listener, and costs nothing otherwise.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .. import compat

_OPERATORS = (
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "reduce_scatter_tensor",
    "all_reduce",
    "all_to_all_single",
)


class Launch(NamedTuple):
    """A collective that is started.

    Args:
        step: Number of optimizer steps before it.
        where: ``"forward graph"``, ``"backward graph"``, ``"inference graph"`` or ``"eagerly"``.
        model: Name of its model.
        what: Name of the operation, such as ``"gather layers.3"``.
        number: Number among the collectives of its group.
        group: Name of the process group.
    """

    step: int
    where: str
    model: str
    what: str
    number: int
    group: str

    def __str__(self) -> str:
        return f"mfsdp step {self.step}, {self.where}, {self.model}: {self.what} ({self.number} of group {self.group})"


class _Interception:
    """What is installed around torch's operators.

    Attributes:
        is_on: Whether there is anything to install or to remove. Callers look at it before they describe collectives.
    """

    def __init__(self) -> None:
        self.library: Any = None
        self.listener: Callable[[Launch], None] | None = None
        self.is_on = False

    def note(self) -> None:
        self.is_on = self.library is not None or self.listener is not None


interception = _Interception()


class _Listeners(threading.local):
    def __init__(self) -> None:
        self.launches: deque[Launch] = deque()
        self.exchanges_slices = False


_thread = _Listeners()


def expect(launches: Callable[[], Iterable[Launch]]) -> None:
    """Register the collectives that this thread is about to start, in order. ``launches`` is only called if needed."""
    if interception.listener is None and not compat.profiler_runs():
        stop()
        return
    if interception.library is None:
        interception.library = compat.stand_around_collectives(_OPERATORS, _range)
        interception.note()
    _thread.launches = deque(launches())


@contextlib.contextmanager
def listening(listener: Callable[[Launch], None]) -> Iterator[None]:
    """Context in which ``listener`` is called whenever a thread starts a collective of a sharded model.

    It is called on that thread.
    """
    before, interception.listener = interception.listener, listener
    interception.note()
    try:
        yield
    finally:
        interception.listener = before
        interception.note()


@contextlib.contextmanager
def exchanging_slices() -> Iterator[None]:
    """Context in which an all-to-all is a stage of a reduction."""
    _thread.exchanges_slices = True
    try:
        yield
    finally:
        _thread.exchanges_slices = False


def stop() -> None:
    """Stop intercepting torch's operators."""
    if interception.library is not None:
        interception.library._destroy()
        interception.library = None
        interception.note()


def _range(operator: str) -> contextlib.AbstractContextManager[Any]:
    if not _thread.launches:  # a collective of the model itself, or of other code
        return contextlib.nullcontext()
    if operator == "all_to_all_single" and not _thread.exchanges_slices:
        return contextlib.nullcontext()  # experts exchange tokens
    launch = _thread.launches.popleft()
    if interception.listener is not None:
        interception.listener(launch)
    return torch.profiler.record_function(str(launch)) if compat.profiler_runs() else contextlib.nullcontext()
