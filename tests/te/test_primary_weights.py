"""Models of Transformer Engine whose weights are quantized when they are built, sharded."""

from __future__ import annotations

import pytest
import reference_tex
import te_models
from pool import on_ranks

pytestmark = pytest.mark.skipif(not reference_tex.IS_THERE, reason="needs transformer_engine")

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "GroupedLinear")
RECIPES = ("current", "mxfp8", "blockwise")


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_sharded_equals_alone(kind: str) -> None:
    te_models.compare(kind, RECIPES, primary=True)
