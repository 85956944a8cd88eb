"""A training under faults ends with the weights of one without. ``make soak`` does this for longer, with more faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak.faults import BRIEF
from soak.rounds import Plan, Summary, run_round


@pytest.mark.processes
def test_faults_change_nothing(tmp_path: Path) -> None:
    plan = Plan(steps=24, faults=4, kinds=BRIEF, ranks=(2, 3), modes=("eager", "aot_eager"), stall=1.0, limit=60.0)
    summary = Summary()
    run_round(plan, 1, tmp_path, print, summary)
    assert summary.faults.total() >= 1
    assert summary.rounds == 1
