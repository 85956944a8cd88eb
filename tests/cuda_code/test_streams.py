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


def rows(ranks: int, is_long: bool) -> list[str]:
    """Return rows with their modes. The quick ones are eager, on two ranks."""
    every = [(name, mode) for name, row in ROWS.items() if row.ranks == ranks for mode in row.modes]
    return [f"{n}:{mode}" for n, mode in every if (ranks > 2 or ROWS[n].is_long or mode != EAGER) == is_long]


def mutants(is_long: bool) -> list[str]:
    every = [(f"{mutant.row}:{name}", mutant) for name, mutant in MUTANTS.items()]
    return [name for name, mutant in every if (not mutant.row.endswith(f":{EAGER}")) == is_long]


@pytest.fixture(scope="module")
def quick() -> Found:
    return on_fake_gpus(2, [*rows(2, False), *mutants(False)], 240)


@pytest.fixture(scope="module")
def plain(pools: Pools) -> list[dict[str, list[str]]]:
    return pools.of(2).run(streams_rows.plain, names=sorted({name.split(":")[0] for name in rows(2, False)}))


def check_row(name: str, found: Found, plain: list[dict[str, list[str]]]) -> None:
    row = ROWS[name.split(":")[0]]
    for rank, (digests, violations, counts, waited) in enumerate(found[name]):
        assert violations == [], f"rank {rank}"
        assert digests == plain[rank][name.split(":")[0]], f"rank {rank}: numbers differ from those without the fake"
        assert counts["collectives"] > 10
        assert row.waits or row.then or not waited, f"rank {rank}: the host waits in later steps"


def check_mutant(name: str, found: Found) -> None:
    seen = MUTANTS[name.split(":")[-1]].seen
    violations = [what for _, violations, *_ in found[name] for what in violations]
    assert any(seen in what for what in violations), f"{seen!r} is not in {violations}"


@pytest.mark.parametrize("name", rows(2, False))
def test_rows(name: str, quick: Found, plain: list[dict[str, list[str]]]) -> None:
    """No violation, and the same numbers to the bit."""
    check_row(name, quick, plain)


@pytest.mark.parametrize("name", mutants(False))
def test_mutants(name: str, quick: Found) -> None:
    """What only a GPU would show is found, by name."""
    check_mutant(name, quick)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_long_rows(ranks: int, pools: Pools) -> None:
    names = rows(ranks, True)
    found = on_fake_gpus(ranks, names, 900)
    plain = pools.of(ranks).run(streams_rows.plain, names=sorted({name.split(":")[0] for name in names}))
    for name in names:
        check_row(name, found, plain)


@pytest.mark.long
def test_long_mutants() -> None:
    found = on_fake_gpus(2, mutants(True), 900)
    for name in mutants(True):
        check_mutant(name, found)


def calls(*given: str, ordered: bool = False) -> tuple[list[Call], list[tuple[str, tuple[int, ...]]]]:
    """Return a rank's calls, given as group and kind, and its groups. No stream orders the calls, or one orders them all."""
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
