"""For every feature, eager and compiled agree bit for bit, and with one process up to rounding."""

from __future__ import annotations

import parity
import pytest
from parity import AOT_EAGER, EAGER, MODELS
from pool import on_ranks


@pytest.mark.long_unless("*-Checkpointed")
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_feature(name: str) -> None:
    factory = MODELS[name]
    data = parity.batches(steps=3)
    alone = parity.train_alone(factory, data, parity.sgd)
    eager = parity.train_sharded(factory, EAGER, data, parity.sgd)
    compiled = parity.train_sharded(factory, AOT_EAGER, data, parity.sgd)
    tolerance = 2e-2 if name == "Autocast" else 1e-5
    parity.assert_close(eager, alone, tolerance)
    parity.assert_close(compiled, alone, tolerance)
    parity.assert_bitwise(eager, compiled)
