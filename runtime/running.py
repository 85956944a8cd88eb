"""What a compiled graph says as it begins, and to whom.

Every graph with collectives begins with ``mfsdp::begin(phase, digest, schedule)``. The text is part of the compiled code;
whose buckets the graph is run with is known only here: Dynamo runs one graph for many instances of a module, and a
compile cache for many models. So whoever runs a graph says so first, on the same thread: the backend before a forward,
a hook on the autograd node before a backward.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .compat import python_only

if TYPE_CHECKING:
    from .gradients import Backward
    from .model import ShardedModel

__all__ = ["GraphRun", "begin", "named"]


class GraphRun:
    """A forward of compiled code, and the backward that may follow it.

    It does not keep models alive: autograd holds it, and Python's garbage collector does not see through that.

    Args:
        owners: of the buckets.
        buckets: by name, in the order in which graphs number them, what its backward computes of each.
        options: of the backend, in words, for ranks to compare.
    """

    def __init__(self, owners: Sequence[ShardedModel], buckets: Mapping[str, Backward], options: str) -> None:
        self._owners = [weakref.ref(owner) for owner in owners]
        self._backwards = buckets
        self._buckets = tuple(buckets)
        self._options = options

    def expect_graph(self) -> None:
        """The next graph that begins on this thread is this one's."""
        _thread.expected = self

    def watch_backward(self, outputs: Any) -> None:
        """``outputs`` are those of the forward: their backward begins with a word to the model."""
        for node in _compiled_nodes(outputs if isinstance(outputs, (list, tuple)) else [outputs]):
            node.register_prehook(self._before_backward)

    @python_only
    def _before_backward(self, gradients: Any) -> None:
        for reference in self._owners:
            if (owner := reference()) is not None:
                owner.enter_backward()
        self.expect_graph()

    def begin(self, phase: str, digest: str, schedule: str, used: str) -> None:
        for name, indices in zip(self._buckets, used.split(";"), strict=False):
            self._backwards[name].used = frozenset(map(int, indices.split(","))) if indices else frozenset()
        for reference in self._owners:
            if (owner := reference()) is not None:
                if phase == "backward":
                    owner.note_backward(self._backwards)
                owner.begin_graph(phase, digest, schedule, self._buckets, self._options)


def begin(phase: str, digest: str, schedule: str, used: str) -> None:
    """A graph begins on this thread: the operator ``mfsdp::begin``.

    Raises:
        RuntimeError: other ranks do not run the same.
    """
    run, _thread.expected = _thread.expected, None
    if run is not None:
        run.begin(phase, digest, schedule, used)


def named(schedule: str, buckets: Sequence[str]) -> list[str]:
    """The lines of a schedule, with names for the numbers of buckets."""
    return re.sub(r"#(\d+)", lambda number: buckets[int(number[1])], schedule).split("\n")


class _Thread(threading.local):
    expected: GraphRun | None = None


_thread = _Thread()

_DEPTH = 3
"""Views that AOTAutograd may put between an output and the node of the compiled code."""


def _compiled_nodes(outputs: Iterable[Any]) -> set[Any]:
    found: set[Any] = set()
    level = {output.grad_fn for output in outputs if isinstance(output, Tensor)} - {None}
    for _ in range(_DEPTH):
        found |= {node for node in level if "CompiledFunction" in type(node).__name__}
        level = {following for node in level - found for following, _ in node.next_functions} - {None}
    return found
