"""TRL's DPOTrainer over sharded models: policy and reference sharded, the numbers of one process.

TRL is not in the ``test`` extra: ``pip install trl`` to run this.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("dpo_program.py")
ROOT = PROGRAM.parents[2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl"),
]


def run(folder: Path, *words: str, ranks: int = 1) -> dict[str, Any]:
    """Run the program on this many ranks, and return what its first rank printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), str(folder), *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(results[0]) if results else {}


@pytest.mark.parametrize("saves", ["all", "checkpointed"])
def test_dpo(saves: str, tmp_path: Path) -> None:
    """Eager and compiled log the same values to the bit, and those of one process but for the order of sums."""
    run(tmp_path, "prepare")
    alone = run(tmp_path, "one", saves)
    eager, compiled = (run(tmp_path, mode, saves, ranks=2) for mode in ("eager", "compiled"))
    assert eager["graphs"] == 0 < compiled["graphs"]
    assert eager["logged"] == compiled["logged"]
    assert eager["reference"] < 0.6 * alone["reference"], "the reference is not sharded"
    for mine, its in zip(eager["logged"], alone["logged"], strict=True):
        assert mine == pytest.approx(its, rel=1e-5, abs=1e-5)  # float32, and each process pads to other lengths
    assert alone["logged"][-1]["loss"] < 0.9 * alone["logged"][0]["loss"]
