"""A stage: one step of a bucket's way. All that the rest of the package knows about how a bucket travels.

A *local* stage computes: ``run(x, state)``. A *flying* stage communicates: ``start(x, state)`` returns what is in
flight, and ``wait(flying, state)`` what has landed. ``x`` is one flat tensor. What is sent beside data, such as scales,
goes into the same tensor.

The eager path calls stages. AOTAutograd traces the same calls, so eager and compiled steps have the same bits. In a
graph, a stage is a node of an operator that carries the digest of its lane, and its place there
(``mfsdp::run_stage``, ``start_stage``, ``wait_stage``). Stages that consist of operators that passes know, or that
have operators of their own, say so with :meth:`Stage.call`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .. import compat
from ..geometry.groups import Group


class Spec(NamedTuple):
    """A flat tensor that travels: ``[numel]``, on the device or in host memory."""

    numel: int
    dtype: torch.dtype
    in_host_memory: bool = False

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Cost(NamedTuple):
    """What a stage costs a rank, for predictions. Nothing is measured.

    Args:
        sent: Bytes that this rank sends to others.
        kernels: Bytes that each kernel reads and writes, one operator after the other.
        fused: The same where a compiler fuses operators; None: as ``kernels``.
        copied: Bytes that are copied between the device and host memory.
        jointly: Bytes of a joint stage in the collective that it shares with those of other buckets.
    """

    sent: int = 0
    kernels: tuple[int, ...] = ()
    fused: tuple[int, ...] | None = None
    copied: int = 0
    jointly: int = 0


Call = tuple[Any, tuple[Any, ...]]
"""An operator, and its arguments behind the tensor, the token and scales."""

State = dict[str, Any]


class _NoState(State):
    """State of stages that keep none."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise RuntimeError(
            f"A stage writes state[{key!r}], but says that it keeps none, so nobody would find it again. Set "
            "keeps_state = True in its class."
        )


NO_STATE: State = _NoState()


class Joint(Protocol):
    """Runs a joint stage for all buckets of a model."""

    def refresh(self, announces: Any) -> None:
        """Run it again for all buckets if any shard has changed. A collective then: every rank must call it."""

    def forget(self) -> None:
        """Run it again at the next use: after a failure, ranks may not agree on what is stale."""


class Stage:
    """One step of a bucket's way: derive from :class:`Local`, :class:`Flying` or :class:`Collective`.

    A stage is a frozen dataclass. Equal stages do the same, and their ``repr`` says all that this depends on. What a
    stage remembers, it keeps in ``state``.

    Attributes:
        group: Ranks that communicate; None: this rank alone.
        flies: Whether it has ``start`` and ``wait``; otherwise it has ``run``.
        gathers: Whether ranks of the group put their tensors together, in the order of ranks.
        scatters: Whether each rank keeps its part.
        sums: Whether what ranks have is added.
        error: Relative error that it may add to the largest value of a tensor: of rounding, 0.0 if it is exact.
        keeps_state: Whether ``state`` is a dict that lasts from call to call, one for each bucket and place. Otherwise
            nothing can be put there.
        inlined: Whether graphs have the operators of ``run`` in its place. Only for stages that passes know.
        joint: Whether it begins ``step``, and is run for all buckets of a model together, by a guest. Then it has no
            ``run``.
        functional: Whether ``start`` returns what a functional collective of torch has returned. It lands there,
            and the stage needs no ``wait``.
        takes_scales: Whether its operator takes the scales of the bucket, which are no part of what travels. Only for
            stages with an operator.

    What a stage means (``gathers``, ``scatters``, ``sums``) is what the verifier counts. When a model is sharded, lanes
    with stages that are not plain are run on small integers, and must do what they say; see :mod:`.probe`.
    """

    group: Group | None
    flies: ClassVar[bool]
    gathers: ClassVar[bool] = False
    scatters: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    error: ClassVar[float] = 0.0
    keeps_state: ClassVar[bool] = False
    inlined: ClassVar[bool] = False
    joint: ClassVar[bool] = False
    functional: ClassVar[bool] = False
    takes_scales: ClassVar[bool] = False

    @property
    def ranks(self) -> int:
        """Number of ranks whose tensors it puts together, parts or adds."""
        return self.group.size if self.group is not None else 1

    def out(self, spec: Spec) -> Spec:
        """Return what the stage makes of ``spec``. By default a tensor of the same dtype, of the size that the stage
        means."""
        if self.gathers:
            return spec._replace(numel=spec.numel * self.ranks)
        return spec._replace(numel=spec.numel // self.ranks) if self.scatters else spec

    def flight(self, spec: Spec) -> Spec:
        """Return what ``start`` returns. By default the same as :meth:`out`."""
        return self.out(spec)

    def run(self, x: Tensor, state: State) -> Tensor:
        """Compute. The result is new memory, ``x``, or a view of it: then graphs copy it. ``x`` stays as it is."""
        raise NotImplementedError(f"{type(self).__name__} has no run(x, state).")

    def start(self, x: Tensor, state: State) -> Tensor:
        """Start to communicate. Nobody writes to ``x``, or to the result, until :meth:`wait` has returned."""
        raise NotImplementedError(f"{type(self).__name__} flies, but has no start(x, state).")

    def wait(self, flying: Tensor, state: State) -> Tensor:
        """Wait for what ``start`` returned. Return what has landed: new memory, ``flying``, or a view.

        What a functional collective of torch has returned needs no ``wait``: graphs have ``wait_tensor``. What one
        returns they copy if it shares memory with ``flying``.
        """
        if not self.functional:
            raise NotImplementedError(
                f"{type(self).__name__} flies, but has no wait(flying, state), and is not functional."
            )
        return compat.wait_tensor(flying)

    def cost(self, spec: Spec) -> Cost:
        """Return what the stage costs for ``spec``. By default what it means, and of a local one a kernel."""
        if self.group is None:
            moved = spec.bytes + self.out(spec).bytes
            return Cost(kernels=(moved,))
        size, others = spec.bytes, self.group.size - 1
        if self.gathers:
            return Cost(sent=size * others)
        sent = size * others // self.group.size
        return Cost(sent=2 * sent if self.sums and not self.scatters else sent)

    @property
    def text(self) -> str:
        """What schedules print, and ranks compare: the same on all ranks.

        It names all that the stage depends on, so that ranks with other settings are found out.
        """
        settings = [
            f"{field.name}={getattr(self, field.name)!r}" for field in fields(cast(Any, self)) if field.name != "group"
        ]
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", type(self).__name__).lower()
        over = [f"over {self.group.size} ranks"] if self.group is not None else []
        return " ".join([words, *settings, *over])

    @classmethod
    def joint_of(cls, buckets: Sequence[Any]) -> Joint:
        """Return what runs a joint stage for buckets of a model, :class:`~..memory.bucket.Bucket`."""
        raise NotImplementedError

    # -- in graphs ----------------------------------------------------------------------------------------------------

    def call(self, spec: Spec) -> Call | None:
        """Return the operator that stands for :meth:`run` or :meth:`start` in graphs, and its arguments behind tensors.

        None: one that finds the stage by its place, ``mfsdp::run_stage`` or ``mfsdp::start_stage``.
        """
        return None


class Local(Stage):
    """A stage that computes: it has ``run``."""

    group = None
    flies = False


class Flying(Stage):
    """A stage that starts now and lands later, on this rank alone: it has ``start`` and ``wait``."""

    group = None
    flies = True


@dataclass(frozen=True)
class Collective(Stage):
    """A stage in which ranks communicate: it has ``start`` and ``wait``."""

    group: Group
    flies = True


local_operators: dict[Any, Callable[..., Any] | None] = {}
"""Operators of local stages, with the lowerings by which Inductor compiles them with what is around them. None: they
run by themselves, between pieces."""
