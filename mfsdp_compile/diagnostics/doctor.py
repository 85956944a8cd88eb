"""``mfsdp doctor``: a :mod:`.checkup`. ``--table`` tests every strategy with every way of accumulating.

The table covers strategies x ways of accumulating x compiled and eager x scalings x one and three microbatches, on four
processes. The reference for each cell is computed in one process, without this package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.distributed_index import hybrid_arguments
from mfsdp_compile.processes import run_ranks

from . import checkup

STRATEGIES: dict[str, dict[str, Any]] = {
    "no_shard": {"zero_dp_strategy": 0},
    "optim": {"zero_dp_strategy": 1},
    "optim_grads": {"zero_dp_strategy": 2},
    "optim_grads_params": {"zero_dp_strategy": 3},
    "HSDP no_shard": {"zero_dp_strategy": 0, "outer": 0},
    "HSDP optim": {"zero_dp_strategy": 1, "outer": 0},
    "HSDP optim_grads": {"zero_dp_strategy": 2, "outer": 0},
    "HSDP optim_grads_params": {"zero_dp_strategy": 3, "outer": 0},
    "HFSDP optim": {"zero_dp_strategy": 1, "outer": 1},
    "HFSDP optim_grads": {"zero_dp_strategy": 2, "outer": 1},
    "HFSDP": {"zero_dp_strategy": 3, "outer": 1},
}
SCALINGS: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean in collective": {"average_in_collective": True},
    "sum": {"calculate_per_token_loss": True},
}


def mesh_arguments(strategy: str, device_type: str = "cpu") -> dict[str, Any]:
    """Return the arguments of ``fully_shard_model`` for a strategy. Two-dimensional meshes are 2 x (world / 2)."""
    arguments = dict(STRATEGIES[strategy])
    if "outer" not in arguments:
        return arguments
    mesh = init_device_mesh(device_type, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    outer_strategy = arguments.pop("outer")
    return {**arguments, "outer_dp_sharding_strategy": outer_strategy, **hybrid_arguments(mesh, "inner", "outer")}


class ResidualBlock(nn.Module):
    """A residual MLP with sizes that are not divisible by the number of shards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(13)
        self.up = nn.Linear(13, 24)
        self.down = nn.Linear(24, 13)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 13)
        self.blocks = nn.Sequential(ResidualBlock(), ResidualBlock())
        self.head = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.enter(x))).pow(2).mean()


def _model() -> ResidualModel:
    torch.manual_seed(0)
    return ResidualModel()


# -- ways of accumulating ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _setting(model: MegatronFSDP, automatic: bool = True, last: bool | None = None) -> Iterator[None]:
    model.set_model_auto_sync(automatic)
    model.is_last_microbatch = last
    yield


@contextlib.contextmanager
def sync(model: MegatronFSDP, last: bool) -> Iterator[None]:
    model.set_model_auto_sync(False)
    with model.sync() if last else contextlib.nullcontext():
        yield


WAYS: dict[str, Callable[[MegatronFSDP, bool], contextlib.AbstractContextManager[None]]] = {
    "every microbatch": lambda model, last: _setting(model),
    "auto on last": lambda model, last: _setting(model, last),
    "no_sync": lambda model, last: contextlib.nullcontext() if last else model.no_sync(),
    "sync": sync,
    "is_last_microbatch": lambda model, last: _setting(model, last=last),
    "unflagged": lambda model, last: _setting(model, False),
}
"""Ways of accumulating: each returns the context of a microbatch, which may be the last."""


def expected_gradients(model: nn.Module, data: Tensor, scaling: str) -> dict[str, Tensor]:
    """Return the sum over microbatches of the mean, or sum, of the gradients over ranks.

    Args:
        data: ``[microbatches, ranks, rows, columns]``.
    """
    model.zero_grad()
    ranks = data.shape[1]
    for micro in data:
        for x in micro:
            (model(x) / (1 if scaling == "sum" else ranks)).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def wrong_gradients(model: MegatronFSDP, expected: dict[str, Tensor]) -> list[str]:
    """Return the names of parameters whose gradients are wrong.

    The tolerance is 1e-5 of the largest gradient, because sums are computed in another order.
    """
    scale = max(gradient.abs().max().item() for gradient in expected.values() if gradient.numel())
    wrong = []
    for name, param in model.module.named_parameters():
        if param.grad is None or (param.grad.full_tensor() - expected[name]).abs().max().item() > 1e-5 * scale:
            wrong.append(name)
    return wrong


@dataclass
class Cell:
    """One cell of the table: a way of accumulating, and the parameters whose gradients are wrong with it."""

    strategy: str
    way: str
    mode: str
    scaling: str
    microbatches: int
    wrong: list[str]


def cells(strategy: str, mode: str, scaling: str) -> list[Cell]:
    """Test all ways of accumulating on one model, with two optimizer steps each."""
    model = fully_shard_model(
        _model(), fsdp_unit_modules=[ResidualBlock], **mesh_arguments(strategy), **SCALINGS[scaling]
    )
    call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": mode})
    alone = _model()
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    own_optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    rank = dist.get_rank()
    found = []
    for way, context in WAYS.items():
        for microbatches in (1, 3):
            model.set_model_auto_sync(True)
            model.is_last_microbatch = None
            data = torch.randn(microbatches, dist.get_world_size(), 3, 8, generator=torch.Generator().manual_seed(7))
            for i, micro in enumerate(data):
                with context(model, i == microbatches - 1):
                    call(micro[rank]).backward()
            if way == "unflagged":
                model.finish_grad_sync()
            expected = expected_gradients(alone, data, scaling)
            found.append(Cell(strategy, way, mode, scaling, microbatches, wrong_gradients(model, expected)))
            optimizer.step()
            optimizer.zero_grad()
            for name, param in alone.named_parameters():
                param.grad = expected.get(name)
            own_optimizer.step()
    apart = [
        name
        for name, param in model.module.named_parameters()
        if not torch.allclose(param.full_tensor(), alone.get_parameter(name), rtol=1e-4, atol=1e-6)
    ]
    return [*found, Cell(strategy, "weights after all steps", mode, scaling, 0, apart)]


# -- the command ------------------------------------------------------------------------------------------------------


def run(table: bool) -> int:
    """Print a check-up of the machine and the installation, or, with ``table``, the table. Return the exit code."""
    console = Console()
    if not table:
        return checkup.run(console)
    wrong = 0
    console.print("four processes; ways of accumulating: " + ", ".join(WAYS), highlight=False)
    for row in run_ranks(_table, 4, backend="gloo", threads=1):
        bad = [f"{cell.way}, {cell.microbatches} microbatches: {', '.join(cell.wrong)}" for cell in row if cell.wrong]
        wrong += len(bad)
        verdict = "[red]WRONG[/]: " + "; ".join(bad) if bad else f"{len(row)} cells right"
        console.print(f"{row[0].strategy:24} {row[0].mode:10} {row[0].scaling:19} {verdict}", highlight=False)
    console.print(f"{wrong} wrong cells; gradients compared with one process's, with 1 and 3 microbatches")
    return 1 if wrong else 0


def _table(rank: int, say: Callable[[list[Cell]], None]) -> None:
    for strategy in STRATEGIES:
        for mode in ("eager", "aot_eager"):
            for scaling in SCALINGS:
                row = cells(strategy, mode, scaling)
                torch._dynamo.reset()
                if rank == 0:
                    say(row)
