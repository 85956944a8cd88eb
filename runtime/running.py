"""What a compiled graph says as it begins, and to whom.

Every graph with collectives begins with ``mfsdp::begin(phase, digest, schedule)``. The text is part of the compiled code;
whose buckets the graph is run with is known only here: Dynamo runs one graph for many instances of a module, and a
compile cache for many models. So whoever runs a graph says so first, on the same thread: the backend before a forward,
a hook on the autograd node before a backward.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .compat import python_only

if TYPE_CHECKING:
    from .gradients import Backward
    from .model import ShardedModel

__all__ = ["GraphRun", "begin", "named", "parse_used"]


class GraphRun:
    """A forward of compiled code, and the backward that may follow it.

    It does not keep models alive: autograd holds it, and Python's garbage collector does not see through that.

    Args:
        owners: of the buckets.
        backwards: what its backward computes of each bucket, in the order in which graphs number them.
        options: of the backend, in words, for ranks to compare.
    """

    def __init__(self, owners: Sequence[ShardedModel], backwards: Sequence[Backward], options: str) -> None:
        self._owners = [weakref.ref(owner) for owner in owners]
        self._backwards = backwards
        self._buckets = [backward.name for backward in backwards]
        self._options = options
        self._given: Sequence[bool] = ()

    def expect_graph(self) -> None:
        """The next graph that begins on this thread is this one's."""
        _thread.expected = self

    def watch_backward(self, outputs: Any) -> None:
        """``outputs`` are those of the forward: their backward begins with a word to the model."""
        for node, numbers in _compiled_nodes(outputs if isinstance(outputs, (list, tuple)) else [outputs]).items():
            node.register_prehook(functools.partial(self._before_backward, sorted(numbers)))

    @python_only
    def _before_backward(self, numbers: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Args: numbers: of the node's outputs that have gradients."""
        self._given = [gradients[number] is not None for number in numbers]
        for reference in self._owners:
            if (owner := reference()) is not None:
                owner.enter_backward()
        self.expect_graph()

    def begin(self, phase: str, digest: str, schedule: str, used: str) -> None:
        if phase == "backward":
            for backward, found in zip(self._backwards, parse_used(used, self._given), strict=True):
                backward.used = found
        for reference in self._owners:
            if (owner := reference()) is not None:
                if phase == "backward":
                    owner.note_backward(self._backwards)
                owner.begin_graph(phase, digest, schedule, self._buckets, self._options)


def parse_used(text: str, given: Sequence[bool]) -> list[frozenset[int]]:
    """For each bucket, the parameters, by index, that have a gradient in a backward.

    Args:
        text: ``"2|0,1/2;"``: of two outputs' gradients, that of parameter 0 of the first bucket depends on both, that of
            parameter 1 on the second (a mask in hexadecimal), and the second bucket has none.
        given: for each output, whether it has a gradient. Those that have none count as zeros. Where outputs are views of
            one another it is not known which is which: then all gradients count, as they do for ``torch.compile``.
    """
    count, buckets = text.split("|")
    mask = sum(has << position for position, has in enumerate(given)) if len(given) == int(count) else -1
    found = []
    for params in buckets.split(";"):
        parts = [part.split("/") for part in params.split(",")] if params else []
        found.append(frozenset(int(index) for index, *needs in parts if not needs or int(needs[0], 16) & mask))
    return found


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


def _compiled_nodes(outputs: Iterable[Any]) -> dict[Any, set[int]]:
    """The nodes of compiled code behind outputs, and which of each one's outputs these are."""
    found: dict[Any, set[int]] = {}
    level = {(o.grad_fn, o.output_nr) for o in outputs if isinstance(o, Tensor) and o.grad_fn is not None}
    for _ in range(_DEPTH):
        above = set()
        for node, number in level:
            if "CompiledFunction" in type(node).__name__:
                found.setdefault(node, set()).add(number)
            else:
                above |= {edge for edge in node.next_functions if edge[0] is not None}
        level = above
    return found
