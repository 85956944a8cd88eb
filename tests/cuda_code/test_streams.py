"""The package's code for CUDA keeps to the order of streams, and the checker of that order finds what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import streams_rows
from nccl_rules import Call, differences
from pool import Pools
from stream_mutants import MUTANTS
from streams_rows import EAGER, ROWS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

NOT_RUN: list[Any] = [[], ["it did not run: one before it failed"], {}, []]
Found = dict[str, list[Any]]
"""What ``streams_program.run`` returns on each rank, by name of a row, with mode and mutant."""


def on_fake_gpus(ranks: int, asked: Sequence[str], timeout: float) -> Found:
    """Run rows in processes that see fake GPUs."""
    folders = [ROOT / "tests" / "gpu" / "fake", ROOT, ROOT / "tests", HERE]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "streams_program.py"), str(ranks), *asked]
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert ran.returncode == 0, ran.stderr[-4000:]
    everyones = json.loads(ran.stdout.splitlines()[-1])
    return {name: [found.get(name, NOT_RUN) for found in everyones] for name in asked}


def _is_long(name: str) -> bool:
    """Whether a row, with its mode, is in the long set: not if it is eager, on two ranks, and shows something new."""
    row, mode = ROWS[name.split(":")[0]], name.split(":")[1]
    return row.is_long or row.ranks > 2 or mode != EAGER


def _params(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] if _is_long(name) else []) for name in names]


EVERY_ROW = [f"{name}:{mode}" for name, row in ROWS.items() for mode in row.modes]
EVERY_MUTANT = [f"{mutant.row}:{name}" for name, mutant in MUTANTS.items()]


class Runs:
    """Runs all selected rows of a number of ranks at once, when the first of them is asked for."""

    def __init__(self, pools: Pools, selected: Sequence[str]) -> None:
        self._pools = pools
        self._selected = selected
        self._found: dict[tuple[int, bool], tuple[Found, list[dict[str, list[str]]]] | None] = {}

    def of(self, name: str) -> tuple[Found, list[dict[str, list[str]]]]:
        """Return what a row is among, on fake GPUs and as it is."""
        key = ranks, is_long = ROWS[name.split(":")[0]].ranks, _is_long(name)
        if key not in self._found:
            self._found[key] = None
            alike = [each for each in self._selected if (ROWS[each.split(":")[0]].ranks, _is_long(each)) == key]
            plain = sorted({each.split(":")[0] for each in alike})
            found = on_fake_gpus(ranks, alike, 900 if is_long else 240)
            self._found[key] = found, self._pools.of(ranks).run(streams_rows.plain, names=plain)
        ran = self._found[key]
        assert ran is not None, "the program failed; the first test has its error"
        return ran


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, pools: Pools) -> Runs:
    mine = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return Runs(pools, [item.callspec.params["name"] for item in mine])


@pytest.mark.slow
@pytest.mark.parametrize("name", _params(EVERY_ROW))
def test_rows(name: str, runs: Runs) -> None:
    """No violation, the same numbers to the bit, and a host that does not wait in later steps."""
    found, plain = runs.of(name)
    row = ROWS[name.split(":")[0]]
    for rank, (digests, violations, counts, waited) in enumerate(found[name]):
        assert violations == [], f"rank {rank}"
        assert digests == plain[rank][name.split(":")[0]], f"rank {rank}: numbers differ from those without the fake"
        assert counts["collectives"] > 5
        assert row.waits or row.then or not waited, f"rank {rank}: the host waits in later steps"


@pytest.mark.parametrize("name", _params(EVERY_MUTANT))
def test_mutants(name: str, runs: Runs) -> None:
    """What only a GPU would show is found, by name."""
    found, _ = runs.of(name)
    seen = MUTANTS[name.split(":")[-1]].seen
    violations = [what for _, violations, *_ in found[name] for what in violations]
    assert any(seen in what for what in violations), f"{seen!r} is not in {violations}"


def calls(*given: str, ordered: bool = False) -> tuple[list[Call], list[tuple[str, tuple[int, ...]]]]:
    """Return a rank's calls, given as group and kind, and its groups. One stream orders all calls, or none does."""
    made = [
        Call(group, (0, 1), kind, () if ordered else tuple(range(place)), f"line {place}")
        for place, (group, kind) in enumerate(each.split() for each in given)
    ]
    return made, [(group, (0, 1)) for group in dict.fromkeys(call.group for call in made)]


def test_rules_of_nccl() -> None:
    first = "a gather", "b reduce", "a gather", "b reduce"
    assert not list(differences([calls(*first), calls(*first)]))
    other = "a gather", "b reduce", "b reduce", "a gather"
    (found, *_) = differences([calls(*first), calls(*other)])
    assert found == (
        "no stream orders reduce of group b before gather of group a, and ranks 1 and 0 start them in another order"
    )
    assert not list(differences([calls(*first, ordered=True), calls(*other, ordered=True)]))
    (found,) = differences([calls(*first), calls("a gather", "b reduce", "a gather", "b gather")])
    assert found.startswith("collective 1 of group b: rank 1 starts gather")
    found = list(differences([calls(*first), calls("b reduce", "a gather", "a gather", "b reduce")]))
    assert "ranks 1 and 0 create their communicators in another order" in found
