"""The code that Inductor generates for an H200, on a machine without one.

A child process generates it (``generate.py``): its GPU, its tensors and its other ranks are fake. The code is run on
these tensors, so that what is asserted is what a stream would see. ``MFSDP_WRITE_TABLES=1`` rewrites the table in
``docs/performance.md``.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from children import HERE, NEEDS, environment
from cuda_rows import LONG, QUICK, TABLED, Row
from doc_tables import DOCS, check_rows, rows_of

pytestmark = NEEDS

PAGE, TABLE = DOCS / "performance.md", "generated code"
HEADER = [
    "model",
    "setting",
    "starts and ends: forward, backward",
    "matrix gradients in place",
    "casts of shards, MB",
    "other copies, MB",
    "... not sharded, MB",
    "kernels",
]
EXCEPTIONS = {"embedding.weight", "first", "second"}
"""Matrices whose gradients no product computes: they are accumulated by index in float32, or come from outside."""


def _marked(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=str(row), marks=pytest.mark.long) for row in rows]


EVERY = _marked([*QUICK, *TABLED, *LONG])
each_row = pytest.mark.parametrize("row", EVERY)


def generate(rows: list[Row], architecture: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the facts of each row, from a child process."""
    given = "".join(json.dumps([row.model, dataclasses.asdict(row.setting)]) + "\n" for row in rows)
    done = subprocess.run(
        [sys.executable, str(HERE / "generate.py"), architecture, str(folder)],
        input=given,
        capture_output=True,
        text=True,
        timeout=120 + 90 * len(rows),
        env=environment(),
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows), f"{len(lines)} of {len(rows)} rows were generated:\n{done.stderr[-4000:]}"
    yield from map(json.loads, lines)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The facts of all rows that the tests of this run ask for."""
    here = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    wanted = {str(row): row for item in here if (row := item.callspec.params.get("row"))}  # type: ignore[attr-defined]
    rows = list(wanted.values())
    results = generate(rows, "sm_90", tmp_path_factory.mktemp("sm_90"))
    return dict(zip(map(str, rows), results, strict=True))


@pytest.fixture
def facts(row: Row, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    assert "error" not in found[str(row)], found[str(row)]["error"]
    return found[str(row)]


@each_row
def test_collectives_start_and_end_in_the_order_of_the_schedule(row: Row, facts: dict[str, Any]) -> None:
    assert set(facts["phases"]) == ({"forward", "backward"} if row.setting.trains else {"inference"})
    for phase in facts["phases"].values():
        assert phase["found"] == phase["wanted"]
        assert phase["wanted"]
        assert phase["calls"] > 1 or not row.setting.options.get("regions")  # equal pieces are one without regions, too


@each_row
def test_nothing_touches_what_a_collective_uses(facts: dict[str, Any]) -> None:
    assert {name: phase["races"] for name, phase in facts["phases"].items() if phase["races"]} == {}


@each_row
def test_a_step_does_not_wait_for_the_device(facts: dict[str, Any]) -> None:
    assert {name: phase["syncs"] for name, phase in facts["phases"].items() if phase["syncs"]} == {}


@each_row
def test_matrix_gradients_are_written_in_place(row: Row, facts: dict[str, Any]) -> None:
    copied = {name: how for name, how in facts["gradients"].items() if how != "product"}
    assert bool(facts["gradients"]) == row.setting.trains
    if row.setting.precision == "float32 reductions" and "float32_gradients" not in row.setting.options:
        assert copied.keys() - EXCEPTIONS == facts["gradients"].keys() - EXCEPTIONS  # computed in bfloat16, then cast
    elif row.setting.precision == "float32 reductions":  # the option does not apply to batched matmuls
        assert {name for name in copied if ".experts." not in name} <= EXCEPTIONS
    else:
        assert copied.keys() <= EXCEPTIONS


@each_row
def test_copies(row: Row, facts: dict[str, Any]) -> None:
    """The code copies what that of the unsharded model copies, and casts each shard once before each gather."""
    copies = facts["copies"]
    assert copies.get("shards", 0) == facts["shard_casts"]
    assert ("portions" in copies) == ("reshard_after_forward" in row.name and "False" not in row.name)
    needed = facts["padding"] + facts["gradient_casts"]
    if (
        row.model == "gradients from outside"
    ):  # one read and one write: an unsharded model's gradient is what it is given
        needed += 2 * sum(facts["sizes"].values())
    # 5 %: other memory is reused, so that other copies are fused into kernels that compute. No row needs it so far.
    assert copies.get("others", 0) <= 1.05 * facts["whole"].get("others", 0) + needed


@each_row
def test_every_kernel_compiles(facts: dict[str, Any]) -> None:
    assert facts["cubins"] == facts["kernels"] > 0


@pytest.mark.parametrize("row", _marked([row for row in TABLED if row.model == "gradients from outside"]))
def test_gradients_that_are_inputs_are_moved_by_one_kernel(facts: dict[str, Any]) -> None:
    assert facts["foreach"] == 1


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13")
@pytest.mark.parametrize("row", _marked([*QUICK, *TABLED]))
def test_table(row: Row, facts: dict[str, Any]) -> None:
    points = [str(len(phase["found"])) for phase in facts["phases"].values()]
    gradients = list(facts["gradients"].values())
    shards = facts["copies"].get("shards", 0)
    copies = [shards, sum(facts["copies"].values()) - shards, facts["whole"].get("others", 0)]
    cells = [
        row.model,
        row.name,
        ", ".join(points),
        f"{gradients.count('product')} of {len(gradients)}" if gradients else "-",
        *(f"{count / 1e6:.1f}" for count in copies),
        facts["kernels"],
    ]
    check_rows(PAGE, TABLE, HEADER, [cells], keys=2)


def test_the_table_has_these_rows() -> None:
    assert {tuple(cells[:2]) for cells in rows_of(PAGE, TABLE)} == {(row.model, row.name) for row in QUICK + TABLED}


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_100"])
def test_another_gpu(architecture: str, tmp_path: Path) -> None:
    """The kernels of the table compile for it too."""
    for row, facts in zip(QUICK, generate(QUICK, architecture, tmp_path), strict=True):
        assert "error" not in facts, f"{row}: {facts['error']}"
        assert facts["cubins"] == facts["kernels"] > 0
