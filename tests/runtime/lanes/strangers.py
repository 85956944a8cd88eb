"""Stages that the package has never seen, as a user would write them: docs/write_a_stage.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from mfsdp_compile.stages import AllGather, AllReduce, Collective, Cost, Lane, Local, ReduceScatter, Spec

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def bits(x: Tensor) -> Tensor:
    return x.view(_BITS[x.dtype.itemsize])


@dataclass(frozen=True)
class Scramble(Local):
    """A codec without state: XOR with a key, as bytes."""

    key: int

    def out(self, spec: Spec) -> Spec:
        return Spec(spec.bytes, torch.uint8)

    def run(self, x: Tensor, state: Any) -> Tensor:
        return x.view(torch.uint8) ^ self.key


@dataclass(frozen=True)
class Unscramble(Local):
    key: int
    dtype: torch.dtype

    def out(self, spec: Spec) -> Spec:
        return Spec(spec.numel // self.dtype.itemsize, self.dtype)

    def run(self, x: Tensor, state: Any) -> Tensor:
        return (x ^ self.key).view(self.dtype)


@dataclass(frozen=True)
class Scrambled:
    """Gathers bytes that nobody can read."""

    key: int = 0x5A

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        def around(gather: Any) -> tuple[Any, ...]:
            return Scramble(self.key), gather, Unscramble(self.key, lane.whole.dtype)

        return lane.change(lambda stage: isinstance(stage, AllGather), around, "step", "use")


@dataclass(frozen=True)
class GatherChanges(Collective):
    """A stage that flies and keeps state: sends what has changed since it was last sent. Exact: bits are XORed."""

    gathers = keeps_state = True

    def start(self, x: Tensor, state: Any) -> Tensor:
        changed = bits(x) ^ state["sent"] if "sent" in state else bits(x).clone()
        state["sent"] = bits(x).clone()
        return torch.ops._c10d_functional.all_gather_into_tensor(changed, self.group.size, self.group.name).view(
            x.dtype
        )

    def wait(self, flying: Tensor, state: Any) -> Tensor:
        changed = bits(torch.ops._c10d_functional.wait_tensor(flying))
        state["whole"] = changed ^ state["whole"] if "whole" in state else changed
        return state["whole"].view(flying.dtype)


@dataclass(frozen=True)
class Changes:
    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        return lane.change(lambda s: isinstance(s, AllGather), lambda s: (GatherChanges(s.group),), "step", "use")


@dataclass(frozen=True)
class SumInPairs(Collective):
    """A stage on the gradient's side: ranks send slices, and each adds those it gets, neighbors first, in float32."""

    scatters = sums = True

    def out(self, spec: Spec) -> Spec:
        return Spec(spec.numel // self.ranks, torch.float32)

    def flight(self, spec: Spec) -> Spec:
        return spec

    def start(self, x: Tensor, state: Any) -> Tensor:
        sizes = [x.numel() // self.ranks] * self.ranks
        return torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, self.group.name)

    def wait(self, flying: Tensor, state: Any) -> Tensor:
        slices = torch.ops._c10d_functional.wait_tensor(flying).view(self.ranks, -1).float()
        while len(slices) > 1:
            last = slices[len(slices) // 2 * 2 :]
            slices = torch.cat([slices[0 : len(slices) // 2 * 2 : 2] + slices[1::2], last])
        return slices[0].clone()

    def cost(self, spec: Spec) -> Cost:
        return Cost(sent=spec.bytes * (self.ranks - 1) // self.ranks)


@dataclass(frozen=True)
class InPairs:
    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        def put(stage: Any) -> tuple[Any, ...]:
            if isinstance(stage, AllReduce):
                return SumInPairs(stage.group), AllGather(stage.group)
            return (SumInPairs(stage.group),)

        return lane.change(lambda stage: isinstance(stage, (ReduceScatter, AllReduce)), put, "each", "due")


@dataclass(frozen=True)
class Times(Local):
    """A local stage on the gradient's side: exact, if the factor is a power of two."""

    factor: float

    def run(self, x: Tensor, state: Any) -> Tensor:
        return x * self.factor


@dataclass(frozen=True)
class Doubled:
    """Sends twice the gradients, and halves the sum."""

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        def around(stage: Any) -> tuple[Any, ...]:
            return Times(2.0), stage, Times(0.5)

        return lane.change(lambda stage: stage.sums, around, "each", "due")


@dataclass(frozen=True)
class Same(Local):
    """Returns what it is given."""

    def run(self, x: Tensor, state: Any) -> Tensor:
        return x


@dataclass(frozen=True)
class Kept(Local):
    """Returns what it keeps, and overwrites it when it runs again."""

    keeps_state = True

    def run(self, x: Tensor, state: Any) -> Tensor:
        return state.setdefault("kept", torch.empty_like(x)).copy_(x)


@dataclass(frozen=True)
class GatherHere(Collective):
    """What is in flight lands where it is; it has no wait of its own."""

    gathers = functional = True

    def start(self, x: Tensor, state: Any) -> Tensor:
        return torch.ops._c10d_functional.all_gather_into_tensor(x, self.group.size, self.group.name)


@dataclass(frozen=True)
class GatherThere(GatherHere):
    """Its own wait returns what was in flight."""

    def wait(self, flying: Tensor, state: Any) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(flying)


@dataclass(frozen=True)
class InPlace:
    """Stages that return no new memory."""

    gather: type[GatherHere]

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        gathers = lane.change(
            lambda s: isinstance(s, AllGather), lambda s: (Same(), self.gather(s.group), Kept()), "step", "use"
        )
        return gathers.change(lambda s: s.sums, lambda s: (Same(), s, Kept()), "each", "due")


STRANGERS = {
    "codec": Scrambled(),
    "changes": Changes(),
    "in pairs": InPairs(),
    "doubled": Doubled(),
    "here": InPlace(GatherHere),
    "there": InPlace(GatherThere),
}

assert collectives  # defines the operators above
