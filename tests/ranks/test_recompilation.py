"""Ranks with inputs of more kinds than Dynamo compiles code for stay in step with ranks that have fewer."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import values
from parity import AOT_EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.fsdp2 import fully_shard

LIMIT = 2
"""Number of graphs that Dynamo may make of a function in these tests."""


class Layers(nn.Module):
    """Equal layers, which can be one region. Something can vary from call to call that is not a size."""

    def __init__(self, breaks: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(zoo.Block(8) for _ in range(3))
        self.breaks, self.counts = breaks, counts
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks:
            x = block(x)
        if self.counts:
            self.count += 1
            x = x * (1 + 1 / self.count)
        return x.pow(2).sum()


WAYS = ["model", "regions", "function", "graph break", "layers", "fullgraph", "fsdp2", "numbers"]


def prepare(way: str, inner: str | None) -> tuple[nn.Module, Any]:
    """Return a sharded model, and what to call: it if ``inner`` is None, else compiled code."""
    model: Any = parity.build(lambda: Layers(breaks=way == "graph break", counts=way == "numbers"))
    if way == "fsdp2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = fully_shard_model(model, fsdp_unit_modules=[zoo.Block])
    settings: Any = {"backend": "mfsdp", "dynamic": False}
    settings["options"] = {"inner": inner, "regions": way == "regions"}
    if inner is None:
        return model, model
    if way == "layers":
        for block in model.module.blocks:
            block.compile(**settings)
        return model, model
    if way == "function":
        return model, torch.compile(lambda x: 2 * model(x.sin()), **settings)
    return model, torch.compile(model, fullgraph=way == "fullgraph", **settings)


def rows(step: int, rank: int) -> int:
    """Return how many rows a batch has: rank 0 always has 4, and others reach the limit in different steps."""
    sizes = {0: [4] * 6, 1: [4, 5, 6, 0, 7, 5], 2: [4, 4, 4, 8, 9, 3], 3: [2, 4, 1, 0, 5, 2]}
    return sizes[rank][step]


def train(way: str, inner: str | None) -> list[Tensor]:
    model, call = prepare(way, inner)
    eager = (lambda x: 2 * model(x.sin())) if way == "function" else model
    call = eager if inner is None else call
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = optimizer if way == "fsdp2" else fully_shard_optimizer(optimizer)
    rank = dist.get_rank()
    for step in range(6):
        x = parity.batches(1, (rows(step, rank), 8), seed=step)[0, rank]
        for part in (x, -x) if step % 2 else (x,):  # two microbatches in every second step
            call(part).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 4:
            with torch.no_grad():
                call(x)
    return values(model)


@contextlib.contextmanager
def small_limit() -> Any:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=120)
def test_numbers_beyond_the_limit(way: str) -> None:
    """All ranks go on with compiled code, and with the bits of the eager path."""
    has_bits_of_eager(way)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@on_ranks(4, timeout=180)
def test_numbers_beyond_the_limit_on_four_ranks(way: str) -> None:
    has_bits_of_eager(way)


@pytest.mark.long
@on_ranks(2, timeout=180)
def test_inductor_beyond_the_limit() -> None:
    with small_limit():
        compiled = train("model", INDUCTOR)
    for mine, expected in zip(compiled, train("model", None), strict=True):
        torch.testing.assert_close(mine, expected)


def has_bits_of_eager(way: str) -> None:
    with small_limit() as told:
        compiled = train(way, AOT_EAGER)
    assert all(torch.equal(a, b) for a, b in zip(compiled, train(way, None), strict=True))
    texts = [str(each.message) for each in told if "recompile_limit" in str(each.message)]
    expected = dist.get_rank() > 0 or way == "numbers"
    assert bool(texts) == expected, texts
    assert not expected or (f"recompile_limit is {LIMIT}" in texts[0] and ", 8]" in texts[0])


class Either(nn.Module):
    """Uses one of two layers, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, takes_first: bool) -> Tensor:
        return (self.first(x) if takes_first else self.second(x)).sum()


@on_ranks(2, timeout=60)
def test_ranks_that_use_different_parameters() -> None:
    """Compiled or not, a parameter that one rank uses has a gradient on all. Gradients that are returned cannot."""
    torch._dynamo.reset()
    rank, x = dist.get_rank(), torch.ones(2, 8)
    model = fully_shard_model(parity.build(Either), fsdp_unit_modules=[Either])
    model(x, rank == 0).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    compiled = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER})
    compiled(x, rank == 0).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    with parity.raises_everywhere(RuntimeError, "without gradients of 2 parameters", "Other ranks are elsewhere"):
        torch.autograd.grad(compiled(x, rank == 0), list(model.parameters()), allow_unused=True)
    model.reset()
    compiled(x, True).backward()
    assert model.module.first.weight.grad is not None and model.module.second.weight.grad is None
    torch._dynamo.reset()
