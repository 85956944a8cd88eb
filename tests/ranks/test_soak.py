"""A training under faults ends with the weights of one without, and leaves nothing behind.

``make soak`` does this for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.faults import Kind
from soak.growth import GROWTH, Held, grown, growth
from soak.rounds import Plan, Summary, run_round

SHORT = Plan(
    steps=12, faults=1, kinds=(Kind.KILL_ONE,), ranks=(2,), modes=("eager", "aot_eager"), save_every=2, limit=60.0
)
LONG = Plan(steps=60, faults=10, modes=("eager", "aot_eager"), stall=1.0, limit=120.0)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("plan", "seed"), [(SHORT, 3), (LONG, 2)], ids=["one", "ten"])
def test_faults_change_nothing(plan: Plan, seed: int, tmp_path: Path) -> None:
    summary = Summary()
    run_round(plan, seed, tmp_path, print, summary)
    assert summary.faults.total() == plan.faults
    assert summary.rounds == 1


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(("mode", "ranks"), GROWTH)
def test_ten_thousand_steps_leave_nothing_behind(mode: str, ranks: int, tmp_path: Path) -> None:
    assert growth(mode, ranks, 10_000, tmp_path, print) == []


@pytest.mark.parametrize(("per_step", "jump", "is_leak"), [(150, 0, True), (40, 0, False), (40, 1 << 20, False)])
def test_what_counts_as_growth(per_step: int, jump: int, is_leak: bool) -> None:
    """What every step leaves behind is found; a container that doubles once is not a leak."""
    samples = [
        Held(step, (400 << 20) + per_step * step + jump * (step > 6000), 0, 0, 0, 0) for step in range(500, 10_001, 500)
    ]
    assert bool(grown(samples)) is is_leak
