"""Transformer Engine's layers on a GPU, with its own extension: the rows of tests/te."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "te"))
import reference_tex
import te_models

pytestmark = [
    pytest.mark.skipif(not reference_tex.HAS_EXTENSION, reason='needs Transformer Engine: pip install ".[te]"'),
    pytest.mark.usefixtures("one_rank"),
]
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "GroupedLinear")


def skip_unless_available(recipe: str) -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

    checks = {
        "current": "is_fp8_available",
        "mxfp8": "is_mxfp8_available",
        "blockwise": "is_fp8_block_scaling_available",
        "nvfp4": "is_nvfp4_available",
    }
    if recipe in checks:
        available, why = getattr(State, checks[recipe])()
        if not available:
            pytest.skip(why)


@pytest.mark.parametrize("recipe", te_models.BITWISE)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_equals_alone(kind: str, recipe: str) -> None:
    skip_unless_available(recipe)
    te_models.compare(kind, [recipe])


@pytest.mark.parametrize("recipe", ["current", "mxfp8", *te_models.BLOCKS])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_parameters(kind: str, recipe: str) -> None:
    skip_unless_available(recipe)
    te_models.compare(kind, [recipe], primary=True)


def test_scales_and_bytes_of_quantized_parameters() -> None:
    skip_unless_available("current")
    te_models.compare_quantizers()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_written_into_the_bucket(kind: str) -> None:
    alone = te_models.build(kind, fuse_wgrad_accumulation=True)
    expected = te_models.train_alone(alone, kind, "bf16", fused=torch.bfloat16)
    model = te_models.shard(te_models.build(kind, fuse_wgrad_accumulation=True))
    trained = te_models.train_sharded(model, kind, "bf16")
    assert trained.losses == expected.losses and trained.distance(expected) == 0
