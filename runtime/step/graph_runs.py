"""Notifications from compiled graphs as they begin, and the models that receive them.

Every graph with collectives begins with ``mfsdp::begin(phase, digest, schedule, used)``. The text is part of the
compiled code, but the code does not say whose buckets the graph runs with: Dynamo runs one graph for many instances of
a module, and a compile cache serves many models. Therefore, whoever runs a graph registers the run first, on the same
thread: the backend before a forward, a hook on the autograd node before a backward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..memory.comm_buffers import enter_pool
from ..memory.gradients import Backward, deliver_to
from ..owner import owners_of
from ..ranks.coordinator import BegunGraph


class GraphRun:
    """A forward of compiled code, and the backward that may follow it.

    It keeps the models alive, as the graph of autograd that holds it may need them; they do not lead to it.

    Args:
        backwards: Each bucket's share of the backward, in the order in which graphs number the buckets.
        options: Options of the backend as text, for ranks to compare.
    """

    def __init__(self, backwards: Sequence[Backward], options: str) -> None:
        self._backwards = backwards
        self._owners = owners_of(bucket for backward in backwards if (bucket := backward.bucket()) is not None)
        self._buckets = [backward.name for backward in backwards]
        self._options = options
        self._given: Sequence[bool] = ()

    @contextlib.contextmanager
    def expecting_graph(self) -> Iterator[None]:
        """Context in which the next graph that begins on this thread belongs to this run.

        A forward can run inside a backward that is about to begin: checkpointing recomputes when the backward asks for
        its saved tensors.
        """
        before, _thread.expected = _thread.expected, self
        try:
            yield
        finally:
            _thread.expected = before

    def watch_backward(self, outputs: Any) -> None:
        """Notify the models when the backward of ``outputs``, the outputs of the forward, begins."""
        for node, numbers in _compiled_nodes(outputs if isinstance(outputs, (list, tuple)) else [outputs]).items():
            if node.metadata.setdefault(_RUN, self) is not self:
                continue  # behind an output that is a view of an input: of the graph that computed the input
            node.register_prehook(functools.partial(self._before_backward, sorted(numbers)))

    @compat.python_only
    def _before_backward(self, numbers: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Attribute the graph of this backward to this run.

        Args:
            numbers: Numbers of the node's outputs that the forward returned.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not supported for the backward of compiled code, which cannot be differentiated "
                "again. Run the forward of this loss eagerly (with torch.compiler.set_stance('force_eager'): ...): "
                "gradients of inputs, as in a gradient penalty, are differentiated there. Or compute the gradient "
                "inside the forward."
            )
        compat.allow_another_backward()
        self._given = [gradients[number] is not None for number in numbers]
        for owner in self._owners:
            owner.grad_sync.enter_backward()
        _thread.expected = self

    def begin(self, phase: str, digest: str, schedule: str, used: str) -> None:
        if self._owners:
            enter_pool(self._owners[0].comm_buffers)
        unused: list[str] = []
        if phase == "backward":
            for backward, found in zip(self._backwards, parse_used(used, self._given), strict=True):
                backward.used = found
            for owner in self._owners:
                unused += owner.grad_sync.note_backward(self._backwards)
        if schedule:
            buckets = [backward.bucket() for backward in self._backwards]
            ranks = [(bucket.topology, bucket.lane.groups) if bucket is not None else None for bucket in buckets]
            graph = BegunGraph(phase, digest, schedule, self._buckets, ranks, self._options, unused)
            for owner in self._owners:
                owner.begin_graph(graph)

    def deliver(self, gradient: Tensor, bucket: int) -> None:
        """Give the parameters of the bucket of this index their gradient."""
        deliver_to(self._backwards[bucket], gradient)


def parse_used(text: str, given: Sequence[bool]) -> list[frozenset[int]]:
    """Return for each bucket the indices of the parameters that have a gradient in a backward.

    Args:
        text: Number of outputs and, per bucket, the parameters that have gradients. In ``"2|0,1/2;"`` there are two
            outputs. The gradient of parameter 0 of the first bucket depends on both outputs' gradients, that of
            parameter 1 only on the second (a mask in hexadecimal), and the second bucket has no gradients.
        given: For each output, whether it has a gradient. Missing gradients count as zeros. If outputs are views of one
            another, it is unknown which is which. All gradients count in that case, as they do for ``torch.compile``.
    """
    count, buckets = text.split("|")
    mask = sum(has << position for position, has in enumerate(given)) if len(given) == int(count) else -1
    found = []
    for params in buckets.split(";"):
        parts = [part.split("/") for part in params.split(",")] if params else []
        found.append(frozenset(int(index) for index, *needs in parts if not needs or int(needs[0], 16) & mask))
    return found


def begin(phase: str, digest: str, schedule: str, used: str) -> None:
    """Implementation of the operator ``mfsdp::begin``: a graph begins on this thread.

    Raises:
        RuntimeError: Other ranks run something else.
    """
    run, _thread.expected = _thread.expected, None
    if phase == "backward" and (run is not None or schedule):  # else a region of a backward begins
        _thread.backward = weakref.ref(run) if run is not None else _Runs.backward
    if run is not None:
        run.begin(phase, digest, schedule, used)


def deliver(gradient: Tensor, bucket: int) -> None:
    """Implementation of the operator ``mfsdp::deliver``: a gradient of the backward that began last has arrived."""
    run = _thread.backward()
    if run is None:
        raise RuntimeError(
            "A compiled backward delivers a gradient, and the forward that it belongs to is not known here. Please "
            "report this; compile the model with torch.compile instead of compile_step meanwhile."
        )
    run.deliver(gradient, bucket)


class _Runs(threading.local):
    expected: GraphRun | None = None
    backward: Callable[[], GraphRun | None] = staticmethod(lambda: None)
    """Refers to the run whose backward has begun last."""


_thread = _Runs()

_RUN = "mfsdp_run"
"""Key in the metadata of a node of compiled code: the run that it belongs to."""
_DEPTH = 3
"""Maximum number of views that AOTAutograd puts between an output and the node of the compiled code."""


def _compiled_nodes(outputs: Iterable[Any]) -> dict[Any, set[int]]:
    """Find the nodes of compiled code behind ``outputs``, and the numbers of each node's outputs among them."""
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
