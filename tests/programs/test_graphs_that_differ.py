"""Compiled code for batches of other sizes, layouts and branches than before, or than those of other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import families
import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import compile_step, fully_shard_model, fully_shard_optimizer

WIDTH, LONGEST = 6, 12


def compare(
    build: Callable[[], nn.Module],
    batch: Callable[[int, int], Sequence[Any]],
    mode: str,
    units: Sequence[Any],
    steps: int,
    microbatches: int = 1,
    way: str = "",
    sharding: Any = None,
    options: Any = None,
    **compiled: Any,
) -> None:
    """Compare gradients, which parameters have one, and trained values with those of one process and all batches.

    Args:
        batch: Returns a rank's arguments of a microbatch.
        way: ``"step"``: train with ``compile_step``; ``"no_sync"``: reduce in the last microbatch only.
    """
    torch._dynamo.reset()
    ranks = dist.get_world_size()
    alone = parity.build(build)
    model = fully_shard_model(parity.build(build), fsdp_unit_modules=list(units), **(sharding or {}))
    optimizers: Any = [torch.optim.AdamW(each.parameters(), lr=1e-2, eps=1e-3) for each in (model, alone)]
    optimizer = fully_shard_optimizer(optimizers[0])
    options = {} if mode == EAGER else {"options": {"inner": mode, **(options or {})}, **compiled}
    call = torch.compile(model, backend="mfsdp", **options) if options else model
    step = compile_step(model, optimizer, _loss, backend="mfsdp" if options else None, **options) if way else None
    for number in range(steps):
        for micro in range(number * microbatches, (number + 1) * microbatches):
            for rank in range(ranks):
                (_loss(alone, *batch(micro, rank)) / ranks).backward()
            mine = batch(micro, dist.get_rank())
            if way == "step":
                assert step is not None
                step(*mine)
                continue
            is_last = (micro + 1) % microbatches == 0
            with model.no_sync() if way == "no_sync" and not is_last else contextlib.nullcontext():
                _loss(call, *mine).backward()
        if way != "step":
            for (name, param), its in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (param.grad is None) == (its.grad is None), (number, name)
                if its.grad is not None:
                    parity.close(f"{name}, step {number}", param.grad.full_tensor(), its.grad, 1e-4, 1.0)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for (name, param), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        parity.close(name, param.full_tensor(), its, 1e-4)  # type: ignore[operator]
    torch._dynamo.reset()


def _loss(model: Any, *batch: Any) -> Tensor:
    found: Tensor = model(*batch)
    return (found.values() if found.is_nested else found).pow(2).mean()


# -- sizes of the batch ---------------------------------------------------------------------------------------------


def _views(w: Tensor, x: Tensor) -> Tensor:
    """Views of a parameter, ``[LONGEST, WIDTH]``, with the sizes of a batch, ``[rows, length, WIDTH]``."""
    rows, length = x.shape[0], x.shape[1]
    x = torch.cat([w[:1].expand(rows, -1, -1), x], 1)[:, 1:] * w[:length]
    x = torch.bmm(x, w[:WIDTH].unsqueeze(0).repeat(rows, 1, 1)).tanh()
    x = x + w.narrow(0, LONGEST - length, length) + w[length - 1] + torch.as_strided(w, (length, WIDTH), (1, 2))
    x = x * w[: 2 * (length // 2)].unflatten(0, (length // 2, 2)).sum((0, 1)) + w.flatten()[: length * WIDTH].view(
        -1, 6
    )
    short, _ = w.double().float().split([length, LONGEST - length])  # of sizes that are computed late
    return x * short


class Positions(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.linear, self.w = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoints:
            return checkpoint(self.compute, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(_views(self.w, x)))


class Cut(nn.Module):
    """Cuts positional embeddings to the length of a batch, in units and outside of them."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.blocks = nn.ModuleList(Positions(checkpoints) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(_views(self.w, x))
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.long_unless("2-region")
@pytest.mark.parametrize("way", ["region", "no region", "checkpoints", "resident", "budget", "inductor"])
@on_ranks(2, timeout=180)
def test_views_of_parameters_with_sizes_of_the_batch(way: str) -> None:
    """Sizes differ between steps and ranks: what a backward gathers again does not depend on them."""

    def batch(step: int, rank: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return (torch.randn(3 + step + rank, 5 + 2 * step - rank, WIDTH, generator=generator),)

    options = {"region": {"regions": True}, "no region": {"regions": False}, "budget": {"memory_budget": "1GiB"}}
    sharding = {"zero_dp_strategy": 1} if way == "resident" else {}
    mode = INDUCTOR if way == "inductor" else AOT_EAGER
    compare(
        lambda: Cut(way == "checkpoints"),
        batch,
        mode,
        [Positions],
        steps=2,
        sharding=sharding,
        options=options.get(way),
        dynamic=True,
    )


class Images(nn.Module):
    """A model of transformers, whose class token is expanded over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = families.vit()

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vit(pixel_values=pixels).logits  # type: ignore[no-any-return]


@pytest.mark.long
@on_ranks(2, timeout=180)
def test_an_image_model_with_a_smaller_last_batch() -> None:
    def batch(step: int, rank: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return (torch.randn(4 - step, 3, 32, 32, generator=generator),)

    compare(Images, batch, AOT_EAGER, ["auto"], steps=3)


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.long_if("2-inductor")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@on_ranks(2, timeout=180)
def test_jagged_batches(mode: str) -> None:
    def batch(step: int, rank: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(10 * step + rank)
        rows = [torch.randint(11, (count,), generator=generator) for count in (3 + step, 5, 2 + rank, 4)[: 3 + step]]
        return (torch.nested.nested_tensor(rows, layout=torch.jagged),)

    compare(Linears, batch, mode, [nn.Sequential], steps=2)


# -- branches of one rank ---------------------------------------------------------------------------------------------


class Condition(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.null = nn.Embedding(5, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, y: Tensor, use: str) -> Tensor:
        found = {"table": lambda: self.table(y), "null": lambda: self.null.expand(len(y), WIDTH)}
        return self.scale * (found[use]() if use in found else self.table(y) + self.null)


class Guided(nn.Module):
    """A model that takes a parameter in place of a condition, as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = Condition()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, use: str) -> Tensor:
        x = x + self.condition(y, use)
        for block in self.blocks:
            x = x + block(x)
        return x


USES = [("table", "table"), ("null", "table"), ("both", "null"), ("null", "null"), ("table", "both"), ("null", "table")]
"""What each of two ranks uses, by microbatch."""


def _guided(step: int, rank: int) -> tuple[Tensor, Tensor, str]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    y = torch.randint(5, (3,), generator=generator)
    return torch.randn(3, WIDTH, generator=generator), y, USES[step][rank]


WAYS: dict[str, dict[str, Any]] = {
    "root": {"units": [nn.Sequential], "steps": 6},
    "unit": {"units": [nn.Sequential, Condition], "steps": 6},
    "step": {"units": [nn.Sequential, Condition], "steps": 6, "way": "step"},
    "microbatches": {"units": [nn.Sequential], "steps": 3, "microbatches": 2},
    "no_shard": {"units": [nn.Sequential], "steps": 6, "sharding": {"zero_dp_strategy": 0}},
    "deferred": {
        "units": [nn.Sequential],
        "steps": 3,
        "microbatches": 2,
        "way": "no_sync",
        "sharding": {"zero_dp_strategy": 1},
    },
}


@pytest.mark.long_unless("2-root-aot_eager", "2-step-aot_eager", "2-deferred-aot_eager", "2-step-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2, timeout=180)
def test_parameters_that_only_some_ranks_use(way: str, mode: str) -> None:
    """They have a gradient on all ranks, and those that no rank uses have none: an optimizer leaves these alone."""
    compare(Guided, _guided, mode, **WAYS[way])


@pytest.mark.long
@on_ranks(4, timeout=180)
def test_parameters_that_only_some_of_four_ranks_use() -> None:
    """The strategy over outer ranks reduces in two stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    every = mesh._flatten().get_group()
    given = {"device_mesh": mesh, "dp_shard_dim": "shard", "dp_outer_dim": "outer", "hybrid_fsdp_group": every}

    def batch(step: int, rank: int) -> Sequence[Any]:
        return _guided(step if rank < 2 else 5 - step, rank % 2)

    compare(Guided, batch, AOT_EAGER, [nn.Sequential], steps=6, sharding=given)
