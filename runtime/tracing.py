"""Names of collectives in traces of ``torch.profiler``.

A trace of a training step has fifty events called ``gloo:all_gather``. While a profiler runs, every collective of a sharded
model lies in a range with a name such as ``mfsdp step 3, backward graph, Llama #1: reduce layers.0 (45 of group 0)``:
step, graph, operation, bucket, and the number that :mod:`mfsdp_compile.hang` knows it by.

Compiled code starts collectives by itself. They are met where every call of their operators passes, compiled or not: at a
dispatch key of torch that is used for nothing else here. That is only done while a profiler runs, and costs nothing else.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import compat

__all__ = ["expect", "stop"]

_OPERATORS = ("all_gather_into_tensor", "all_gather_into_tensor_out", "reduce_scatter_tensor", "all_reduce")

_library: Any = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.names: deque[str] = deque()


_thread = _Thread()


def expect(names: Callable[[], Iterable[str]]) -> None:
    """This thread is about to start collectives of these names, in this order; asked for if a profiler runs."""
    global _library
    if not compat.profiler_runs():
        stop()
        return
    if _library is None:
        _library = compat.stand_around_collectives(_OPERATORS, _range)
    _thread.names = deque(names())


def stop() -> None:
    """Leave torch's operators alone."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _range(operator: str) -> contextlib.AbstractContextManager[Any]:
    if not _thread.names:  # the model's own, or somebody else's
        return contextlib.nullcontext()
    return torch.profiler.record_function(_thread.names.popleft())
