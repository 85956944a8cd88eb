"""Transformer Engine's own layers, sharded."""

from __future__ import annotations

from typing import Any

import pytest
import reference_tex
import te_models
import torch
from pool import on_ranks

pytestmark = pytest.mark.skipif(not reference_tex.IS_THERE, reason="needs transformer_engine")

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "GroupedLinear")


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_sharded_equals_alone(kind: str) -> None:
    te_models.compare(kind, te_models.BITWISE)
