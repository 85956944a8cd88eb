"""Warnings point at the program's own line, once, from the first rank that would give them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zoo
from messages import messages
from torch import nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.step import checks as step_checks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        yield found


def lines(caught: list[warnings.WarningMessage], words: str) -> list[tuple[str, str]]:
    """Return file and source line of each warning with these words."""
    of = [(each.filename, each.lineno) for each in caught if words in str(each.message)]
    return [(file, Path(file).read_text().splitlines()[number - 1].strip()) for file, number in of]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([zoo.Block(8), zoo.Block(8)])
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def test_of_sharding_and_of_a_step(
    fake_world: int, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through decorators, torch's optimizers, their hooks, and a scheduler's wrapper."""
    # Gradients that fake collectives give are undefined, padding included.
    monkeypatch.setattr(step_checks, "check_first_step", lambda *_: None)
    model: Any = fully_shard_model(Two())
    assert lines(caught, "fsdp_unit_modules is None") == [(__file__, "model: Any = fully_shard_model(Two())")]
    model = fully_shard_model(Two(), fsdp_unit_modules=[zoo.Block, nn.Linear])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
        optimizer.step()  # this line
        optimizer.zero_grad()
    assert lines(caught, "none of 'unused'") == [(__file__, "optimizer.step()  # this line")]
    matrices = [param for param in model.parameters() if param.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=0.1)
    model(torch.ones(2, 8)).backward()
    muon.step()
    assert lines(caught, "Muon's step gathers every matrix") == [(__file__, "muon.step()")]


def test_of_compiling(fake_world: int, caught: list[warnings.WarningMessage]) -> None:
    """Through Dynamo, which calls the backend from the line that calls the model."""
    model: Any = fully_shard_model(Two(), fsdp_unit_modules=[zoo.Block])
    compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager", "reshard_after_forward": 1})
    compiled(torch.ones(2, 8))
    assert lines(caught, "reshard_after_forward=1 keeps") == [(__file__, "compiled(torch.ones(2, 8))")]


def test_of_a_thread_and_of_other_ranks(
    fake_world: int, caught: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(warn, "from a thread").result()  # none of its frames is the program's
    for _ in range(3):
        warn("once")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    warn("by rank 0")
    warn("by this rank", by=1)
    warn("by every rank", RuntimeWarning, by=None)
    said = [str(each.message) for each in caught]
    assert said == ["from a thread", "once", "by this rank", "by every rank"]
    assert caught[1].filename == __file__


@pytest.mark.long
def test_of_a_program_without_a_file() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from mfsdp_compile.runtime.program_lines import warn\n\nwarn('here')"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stderr
    assert "<string>:3: UserWarning: here" in told


@pytest.mark.slow
def test_all_warnings_are_given_so() -> None:
    """No other call of the ``warnings`` module gives one."""
    assert len([message for message in messages() if message.kind == "warning"]) >= 25
    files = [path for folder in ("mfsdp_compile", "passes", "runtime") for path in (ROOT / folder).rglob("*.py")]
    others = [path for path in files if "warnings.warn(" in path.read_text(encoding="utf-8")]
    assert not others
