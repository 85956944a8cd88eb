"""Hardware of this machine from the user's cache, and the matrix products of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_compile.cli import main
from mfsdp_compile.passes.guests.solver.hardware import Link, hardware
from mfsdp_compile.planning import calibrated, calibration, measuring
from mfsdp_compile.planning.calibrated import cache_folder, quick, shapes_of, shapes_of_workload
from mfsdp_compile.planning.measuring import Measured, Shapes, Timing

MEASURED = Measured(
    device="a box",
    matmul={"float32": (1e9, 2e9)},
    dtype="float32",
    attention=1e9,
    memory={"copy": 8e9},
    memory_bytes=12345,
    kernel_seconds=2e-6,
    host_link=Link(2e9, 1e-6),
    host_memory={"copy": 5e9},
    timings=tuple(Timing("all_gather", 2, size, 1e-4 + size / 2e9) for size in (2**10, 2**24)),
    slowdown=0.25,
)
EFFORT = quick(Shapes(((8, 8, 8),)))


@pytest.fixture
def measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks of each measurement, none of which takes place."""
    found: list[int] = []

    def run_ranks(work: Any, ranks: int, *_: Any, **__: Any) -> Iterator[Measured]:
        found.append(ranks)
        yield MEASURED

    monkeypatch.setattr(calibrated, "run_ranks", run_ranks)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return found


def test_a_machine_is_measured_once_for_each_setting(measurements: list[int]) -> None:
    path, machine, now = calibrated.calibrated(2, EFFORT)
    assert now
    assert path.parent == cache_folder()
    assert machine == hardware(str(path))
    assert calibrated.calibrated(2, EFFORT) == (path, machine, False)
    assert measurements == [2]
    other = {calibrated.calibrated(3, EFFORT)[0], calibrated.calibrated(2, quick(Shapes(((8, 8, 16),))))[0]}
    assert len(other | {path}) == 3
    assert measurements == [2, 3, 2]
    assert calibrated.calibrated(2, EFFORT, again=True) == (path, machine, True)


def test_another_version_of_torch_measures_again(measurements: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = calibrated.calibrated(2, EFFORT)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert calibrated.calibrated(2, EFFORT)[0] != path
    assert measurements == [2, 2]


@pytest.mark.parametrize("text", ["", '{"name": "x"}'])
def test_a_file_that_cannot_be_read_is_replaced(text: str, measurements: list[int]) -> None:
    path, machine, _ = calibrated.calibrated(2, EFFORT)
    path.write_text(text)
    assert calibrated.calibrated(2, EFFORT) == (path, machine, True)
    assert hardware(str(path)) == machine
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_shapes_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16))
    found = shapes_of(model, 2, lambda: model(torch.zeros(2, 4)))
    assert set(found.products) == {(2, 4, 16), (2, 16, 4), (16, 2, 4), (4, 2, 16)}
    assert found.attention is None
    assert quick(found).attention == quick(Shapes()).attention
    found = shapes_of_workload("llama3-8b", 2, 128)
    large = [rows * inner * columns for rows, inner, columns in found.products]
    assert large == sorted(large)
    assert max(large) == 256 * 4096 * 128256
    assert found.attention == quick(found).attention == (2, 32, 128, 128)


@pytest.mark.parametrize(("lost", "slowdown"), [(-0.1, 0.0), (0.0, 0.0), (0.5, 1.0), (0.75, 3.0), (2.0, 19.0)])
def test_what_collectives_cost_computation(lost: float, slowdown: float) -> None:
    """While a collective of one second runs, computation that is slower by s does 1 / (1 + s) seconds of work."""
    assert measuring.slowdown_of(lost) == pytest.approx(slowdown)
    assert 1 - 1 / (1 + slowdown) == pytest.approx(min(max(lost, 0.0), 0.95))


def test_the_best_round_counts_unless_ranks_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = measuring._OperationTimer(torch.device("cpu"), EFFORT)
    for shares, seconds in ((False, 0.25), (True, 0.5)):
        rounds = iter([1.0, 0.5, 0.25, 0.75])  # the first one says how often to call
        monkeypatch.setattr(measuring._OperationTimer, "once", lambda *_, rounds=rounds: next(rounds))
        monkeypatch.setattr(measuring, "_shares_cores", lambda shares=shares: shares)
        assert clock.seconds(lambda: None) == seconds


def test_memory_is_measured_on_pages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched zeros are one page for all, which is read from the cache."""
    made = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: made.append(1))
    clock = measuring._OperationTimer(torch.device("cpu"), dataclasses.replace(EFFORT, memory_bytes=4096, rounds=1))
    assert all(rate > 0 for rate in measuring._memory(clock).values())
    assert not made


def test_calibrating_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    efforts: list[Any] = []
    monkeypatch.setattr(
        calibration,
        "run_ranks",
        lambda _, ranks, effort, **__: iter([efforts.append(effort) or MEASURED]),  # type: ignore[func-returns-value]
    )
    out = str(tmp_path / "box.json")
    assert main(["calibrate", "--out", out, "--ranks", "2", "--model", "demo", "--seq", "16"]) == 0
    assert efforts[0].matmul == shapes_of_workload("demo", 8, 16).products
    assert efforts[0].attention == (8, 8, 16, 32)
    assert main(["calibrate", "--out", out, "--model", "nothing"]) == 2
    assert "unknown model" in capsys.readouterr().out
    assert len(efforts) == 1
