"""Compiled steps of optimizers on a GPU: one kernel, which reads and writes every element once, and its numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from children import HERE, NEEDS, environment

pytestmark = [*NEEDS, pytest.mark.long]

NUMEL = 4096
ON_DEVICE = ["AdamW capturable", "AdamW capturable, lr on the device"]
OPTIMIZERS = ["AdamW", "AdamW amsgrad", *ON_DEVICE, "SGD", "Adagrad"]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "updates.py"), str(tmp_path_factory.mktemp("updates"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_kernel(facts: dict[str, Any], name: str) -> None:
    """Parameters are read and written, the gradient is read, and each tensor of the state is read and written."""
    row = facts[name]
    is_capturable = name in ON_DEVICE
    assert row["launches"] == 1 + is_capturable, "a counter on the device has a kernel of its own"
    numbers = row["bytes"] - 4 * NUMEL * (2 + 1 + 2 * row["tensors of the state"])
    assert 0 < numbers <= 20, "the scale of gradients, a counter and the learning rate on the device"
    assert row["reads of the device"] == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers(facts: dict[str, Any], name: str) -> None:
    """Triton's interpreter computes three steps. Each is rounded otherwise: a few units in the last place of 4."""
    assert facts[name]["violations"] == []
    assert facts[name]["worst"] <= 2e-6
