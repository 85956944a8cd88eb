"""Hardware of this machine from the user's cache, and the matrix products of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mfsdp_compile.cli import main
from mfsdp_compile.passes.solver.hardware import Link, hardware
from mfsdp_compile.planning import calibrated, calibration
from mfsdp_compile.planning.calibrated import cache_folder, products_of, products_of_workload, quick
from mfsdp_compile.planning.calibration import Measured, Timing

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
EFFORT = quick(((8, 8, 8),))


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
    other = {calibrated.calibrated(3, EFFORT)[0], calibrated.calibrated(2, quick(((8, 8, 16),)))[0]}
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


def test_products_of_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 16))
    assert set(products_of(model, 2)) == {(2, 4, 16), (2, 16, 4), (16, 2, 4), (4, 2, 16)}
    large = [rows * inner * columns for rows, inner, columns in products_of_workload("llama3-8b", 2, 128)]
    assert large == sorted(large)
    assert max(large) == 256 * 4096 * 128256


def test_calibrating_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    efforts: list[Any] = []
    monkeypatch.setattr(
        calibration,
        "run_ranks",
        lambda _, ranks, effort, **__: iter([efforts.append(effort) or MEASURED]),  # type: ignore[func-returns-value]
    )
    out = str(tmp_path / "box.json")
    assert main(["calibrate", "--out", out, "--ranks", "2", "--model", "demo", "--seq", "16"]) == 0
    assert efforts[0].matmul == products_of_workload("demo", 8, 16)
    assert main(["calibrate", "--out", out, "--model", "nothing"]) == 2
    assert "unknown model" in capsys.readouterr().out
    assert len(efforts) == 1
