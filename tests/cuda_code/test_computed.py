"""The code for a GPU computes the right numbers: kernels in Triton's interpreter, the wrapper on memory of the host.

Child processes are the ranks (``compute.py``). They compare one training step with the eager path of the same ranks and
with one process in float32. ``MFSDP_WRITE_TABLES=1`` rewrites the table in ``docs/performance.md``.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from children import HERE, NEEDS, environment
from cuda_rows import COMPUTED, Row, Setting
from doc_tables import DOCS, check_rows, rows_of
from wrong_code import MUTANTS

pytestmark = NEEDS

PAGE, TABLE = DOCS / "performance.md", "computed code"
HEADER = [
    "model",
    "setting",
    "ranks",
    "kernels, launches",
    "of the eager path's gradients",
    "of one process's",
    "the eager path's",
]
FLOAT32 = 1e-5
"""Bound on the difference of a gradient, relative to its norm: some tens of roundings of float32, in another order."""
HALF = 0.05
"""The same for bfloat16, whose roundings are 2^-8."""
FLOAT8 = 0.25
"""The same where products are in float8, which the eager path's are not: their operands' roundings are 2^-4."""
QUANTIZED = 0.5
"""The same for the distance to one process where what is sent is quantized, to four bits at worst."""
CHANGED = {"early scales": Setting(precision="mxfp8 gathers")}
"""Settings of Llama whose code mutants change; not named: float32."""
QUICK = {("Llama: strategy 3", "wrapper")}
"""Rows that ``make test`` computes. Its code is also what most mutants change."""


def compute(ranks: int, rows: Sequence[tuple[str, Setting, str, str]]) -> list[list[dict[str, Any]]]:
    """Compute rows of model, setting, way and mutant. Return what each rank found, by row."""
    given = "".join(json.dumps([m, dataclasses.asdict(s), way, mutant]) + "\n" for m, s, way, mutant in rows)
    one_thread = environment(OMP_NUM_THREADS="1")
    # Not pytest's folder, which xdist's workers share: file stores have short lives.
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"results{rank}") for rank in range(ranks)]
        errors = [Path(folder, f"errors{rank}") for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            with outputs[rank].open("w") as output, errors[rank].open("w") as error:
                command = [sys.executable, str(HERE / "compute.py"), str(rank), str(ranks), folder]
                processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=output, stderr=error, text=True, env=one_thread
                    )
                )
        try:
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(given)
                process.stdin.close()
            for process in processes:
                process.wait(timeout=240 + 60 * len(rows))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = [[json.loads(line) for line in output.read_text().splitlines()] for output in outputs]
        for rank, results in enumerate(found):
            assert len(results) == len(rows), (
                f"rank {rank} computed {len(results)} rows:\n{errors[rank].read_text()[-4000:]}"
            )
    return [list(of_row) for of_row in zip(*found, strict=True)]


def _each(ways: Sequence[str]) -> list[Any]:
    return [
        pytest.param(ranks, row, way, id=f"{row}-{way}", marks=[] if (str(row), way) in QUICK else [pytest.mark.long])
        for ranks, rows in COMPUTED.items()
        for row in rows
        for way in ways
    ]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """What the ranks found about all rows and mutants that the tests of this run ask for."""
    here = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    asked: dict[int, dict[tuple[Any, ...], tuple[str, Setting, str, str]]] = {}
    for item in here:
        given = item.callspec.params  # type: ignore[attr-defined]
        if "row" in given:
            row, way = given["row"], given["way"]
            asked.setdefault(given["ranks"], {})[str(row), way] = row.model, row.setting, way, ""
        elif "mutant" in given:
            setting = CHANGED.get(given["mutant"], Setting(precision="float32"))
            asked.setdefault(2, {})[(given["mutant"],)] = "Llama", setting, "wrapper", given["mutant"]
    results: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for ranks, rows in asked.items():
        results |= dict(zip(rows, compute(ranks, list(rows.values())), strict=True))
    return results


def bounds(row: Row) -> tuple[float, float]:
    """Return bounds on the difference to the eager path and to one process."""
    setting = row.setting
    if "fp8_matmul" in setting.options:
        return FLOAT8, FLOAT8
    mine = FLOAT32 if setting.precision == "float32" else HALF
    # Other numbers are rounded to other neighbors.
    if setting.precision == "gradients in float8":
        mine = 2**-3  # half a step of float8_e5m2
    elif "4" in setting.precision and "gradients" in setting.precision:
        mine = QUANTIZED
    is_quantized = any(word in setting.precision for word in ("gathers", "gradients", "levels"))
    return mine, QUANTIZED if is_quantized else mine


@pytest.mark.parametrize(("ranks", "row", "way"), _each(("wrapper", "kernels")))
def test_numbers(ranks: int, row: Row, way: str, found: Any) -> None:
    for rank, facts in enumerate(found[str(row), way]):
        assert "error" not in facts, f"rank {rank}: {facts['error']}"
        assert facts["kernels"] > 1
        assert facts["violations"] == []
        of_eager, of_one = bounds(row)
        assert facts["loss"] <= of_eager
        assert facts["gradients"] <= of_eager
        assert facts["one process"] <= of_one
        # Not further from float32 than the eager path, unless that rounds less.
        assert of_eager == FLOAT8 or facts["one process"] <= max(FLOAT32, 1.5 * facts["eager, one process"])


@pytest.mark.parametrize(("ranks", "row", "way"), _each(("wrapper", "kernels")))
def test_ranks_start_the_same_collectives_in_the_same_order(ranks: int, row: Row, way: str, found: Any) -> None:
    """NCCL needs it in each communicator, and of those that share a rank."""
    results = [facts["started"] for facts in found[str(row), way]]
    for started in results:
        for communicator, collectives in started.items():
            for other in json.loads(communicator):
                assert results[other][communicator] == collectives


@pytest.mark.long_unless("late wait, backward")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_code_is_noticed(mutant: str, found: Any) -> None:
    for facts in found[(mutant,)]:
        assert "error" not in facts, facts["error"]
    bound = HALF if mutant in CHANGED else FLOAT32
    assert any(
        facts["violations"] or not (facts["loss"] <= bound and facts["gradients"] <= bound)
        for facts in found[(mutant,)]
    ), found[(mutant,)]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13")
@pytest.mark.parametrize(("ranks", "row", "way"), _each(["wrapper"]))
def test_table(ranks: int, row: Row, way: str, found: Any) -> None:
    facts = found[str(row), way][0]
    numbers = [f"{facts[name]:.1e}" for name in ("gradients", "one process", "eager, one process")]
    cells = [row.model, row.name, ranks, f"{facts['kernels']}, {facts['launches']}", *numbers]
    of_eager, of_one = bounds(row)
    limits = dict(zip(HEADER[-3:], (of_eager, of_one, of_one), strict=True))
    check_rows(PAGE, TABLE, HEADER, [cells], keys=2, bounds=limits)


def test_the_table_has_these_rows() -> None:
    wanted = {(row.model, row.name) for rows in COMPUTED.values() for row in rows}
    assert {tuple(cells[:2]) for cells in rows_of(PAGE, TABLE)} == wanted
