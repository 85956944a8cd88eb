"""Ranks that would wait for each other until the process group's time-out, half an hour here, have an error within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from test_order import Branches
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile import fully_shard_model, fully_shard_optimizer

SECONDS = 30.0
"""Within which every rank has to have its error. It takes about three."""


def mesh() -> DeviceMesh:
    """All ranks, with a time-out that no test can wait for."""
    return DeviceMesh.from_group(dist.new_group(timeout=timedelta(minutes=30)), "cpu", mesh_dim_names=("dp",))


class Training:
    """A model, and steps of it that are the same on all ranks."""

    def __init__(self, mode: str = EAGER, **arguments: Any) -> None:
        self.arguments = arguments
        self.model: Any = fully_shard_model(
            parity.build(lambda: Branches(2)), mesh(), fsdp_unit_modules=[zoo.Block], **arguments
        )
        self.call: Any = self.model
        if mode != EAGER:
            self.call = torch.compile(self.model, backend="mfsdp", options={"inner": mode})
        self.optimizer = fully_shard_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        self.x = torch.ones(2, 8)

    def step(self, count: int = 1, **way: Any) -> None:
        for _ in range(count):
            self.call(self.x, **way).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.call(self.x)

    def values(self) -> list[torch.Tensor]:
        return [param.to_local().clone() for param in self.model.parameters()]

    def stalls(self, program: Callable[[], None], *fragments: str) -> None:
        """``program`` raises on all ranks, soon; then a reset makes the model usable again."""
        before, begun, message = self.values(), time.monotonic(), "nothing"
        try:
            program()
        except RuntimeError as error:
            message = str(error)
        took = time.monotonic() - begun
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (took, message))
        for its, text in everyone:
            assert its < SECONDS, everyone
            for fragment in (*fragments, "test_stalls.py:", "model.reset()"):
                assert fragment in text, f"{fragment!r} is not in {everyone}"
        assert all(torch.equal(a, b) for a, b in zip(before, self.values(), strict=True))
        self.model.reset()
        self.step()
        after = self.values()
        fresh = Training(**self.arguments)  # eagerly, with the same numbers
        with torch.no_grad():
            for param, value in zip(fresh.model.parameters(), before, strict=True):
                param.to_local().copy_(value)
        fresh.step()
        assert all(torch.equal(a, b) for a, b in zip(after, fresh.values(), strict=True))


RANK = "Rank 0"


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_one_rank_evaluates(mode: str) -> None:
    training = Training(mode)
    training.step(3)

    def program() -> None:
        if dist.get_rank() == 0:
            training.evaluate()
        training.step()

    training.stalls(program, RANK, "forward without gradients", "Branches #1")
    training = Training(mode)
    training.step(2)
    training.evaluate()
    training.step(3)
    training.stalls(program, RANK, "forward without gradients")
