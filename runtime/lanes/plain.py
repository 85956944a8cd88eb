"""Plain stages, of which the strategies' lanes consist: casts, scaling, and the backend's collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import compat
from .stage import Call, Collective, Local, Spec, Stage, State

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Cast(Local):
    """Cast to a dtype."""

    dtype: torch.dtype
    inlined = True

    def out(self, spec: Spec) -> Spec:
        return spec._replace(dtype=self.dtype)

    def run(self, x: Tensor, state: State) -> Tensor:
        return x.to(self.dtype)


@dataclass(frozen=True)
class Scale(Local):
    """Multiply by a number."""

    factor: float
    inlined = True

    def run(self, x: Tensor, state: State) -> Tensor:
        return x * self.factor


@dataclass(frozen=True)
class Trim(Local):
    """Take the first elements."""

    numel: int
    inlined = True

    def out(self, spec: Spec) -> Spec:
        return spec._replace(numel=self.numel)

    def run(self, x: Tensor, state: State) -> Tensor:
        return x[: self.numel]


@dataclass(frozen=True)
class AllGather(Collective):
    """Put the tensors of ranks together."""

    gathers = functional = True

    @property
    def text(self) -> str:
        return f"gathered over {self.group.size} ranks"

    def start(self, x: Tensor, state: State) -> Tensor:
        return compat.all_gather(x, self.group.size, self.group.name)

    def call(self, spec: Spec) -> Call:
        return _c10d.all_gather_into_tensor.default, (self.group.size, self.group.name)


@dataclass(frozen=True)
class ReduceScatter(Collective):
    """Add the tensors of ranks, in the dtype and order of the backend. Each rank keeps its part.

    Args:
        op: ``"sum"`` or ``"avg"``.
    """

    op: str
    scatters = sums = functional = True

    @property
    def text(self) -> str:
        return f"{self.op} over {self.group.size} ranks"

    def start(self, x: Tensor, state: State) -> Tensor:
        return compat.reduce_scatter(x, self.op, self.group.size, self.group.name)

    def call(self, spec: Spec) -> Call:
        return _c10d.reduce_scatter_tensor.default, (self.op, self.group.size, self.group.name)


@dataclass(frozen=True)
class AllReduce(Collective):
    """Add the tensors of ranks, in the dtype and order of the backend. Each rank gets the sum.

    Args:
        op: ``"sum"`` or ``"avg"``.
    """

    op: str
    sums = functional = True

    @property
    def text(self) -> str:
        return f"{self.op} over {self.group.size} ranks"

    def start(self, x: Tensor, state: State) -> Tensor:
        return compat.all_reduce(x, self.op, self.group.name)

    def call(self, spec: Spec) -> Call:
        return _c10d.all_reduce.default, (self.op, self.group.name)


@dataclass(frozen=True)
class AllToAll(Collective):
    """Send a part to each rank, and receive one from each: ``[ranks * n]`` to ``[ranks * n]``."""

    functional = True

    @property
    def text(self) -> str:
        return f"exchanged over {self.group.size} ranks"

    def start(self, x: Tensor, state: State) -> Tensor:
        return torch.ops.mfsdp.exchange_slices(x, self.group.size, self.group.name)

    def call(self, spec: Spec) -> Call:
        return torch.ops.mfsdp.exchange_slices.default, (self.group.size, self.group.name)


_PLAIN: tuple[type[Stage], ...] = (Cast, Scale, Trim, AllGather, ReduceScatter, AllReduce, AllToAll)


def is_plain(stage: Stage) -> bool:
    """Whether a stage is one of this module's, and not one derived from it."""
    return type(stage) in _PLAIN


class Operands(NamedTuple):
    """What a bucket has for its stages besides the tensor that travels.

    Args:
        token: Stands for the bucket in graphs. None: its stages need not know it.
        scales: Scales of the whole bucket.
    """

    token: Tensor | None = None
    scales: Tensor | None = None


Run = Callable[[Tensor, Operands], Tensor]
"""What stages do to a tensor, in graphs and out of them."""


def chain_of(runs: Sequence[Run]) -> Run:
    """Return what runs stages one after the other."""
    if len(runs) == 1:
        return runs[0]

    def chain(x: Tensor, operands: Operands) -> Tensor:
        for run in runs:
            x = run(x, operands)
        return x

    return chain


def landing_of(wait: Run | None, after: Sequence[Run]) -> Run:
    """Return what waits for what is in flight, with ``wait_tensor`` if ``wait`` is None, and runs the stages behind."""

    def land(x: Tensor, operands: Operands) -> Tensor:
        x = compat.wait_tensor(x) if wait is None else wait(x, operands)
        for run in after:
            x = run(x, operands)
        return x

    return land
