"""What a layer of Llama-3-8B launches and moves on a GPU, by its generated code.

``MFSDP_WRITE_TABLES=1`` rewrites the table in ``docs/performance.md``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from children import HERE, NEEDS, environment
from doc_tables import DOCS, check_table

pytestmark = [*NEEDS, pytest.mark.long]

FLOPS, MEMORY, LINK = 989e12, 3.35e12, 450e9
"""Data sheet of an H100: FLOP/s in bfloat16; bandwidths of memory, and of NVLink in one direction, in bytes/s."""
RANKS = 8
ACTIVATION = 2 * 8192 * 4096
"""Bytes of what is between two layers."""
HEADER = [
    "layer",
    "products",
    "other launches",
    "they move, GB",
    "products, ms",
    "the rest, ms",
    "communication, ms",
    "layer, ms",
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "traffic.py"), "sm_90", str(tmp_path_factory.mktemp("traffic"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment())
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_sharding_adds_casts_and_nothing_else(facts: dict[str, Any]) -> None:
    """A shard is cast from float32 twice, and its reduced gradient to float32. Nothing whole is copied.

    In backward, the gradient of a norm's result is summed by one piece and read by the next: the layer's reduction
    starts between them.
    """
    plain, ours = (facts["costs"][name] for name in ("not sharded", "mfsdp compiled, `regions` False"))
    casts, border = 3 * (4 + 2) * facts["parameters"] / RANKS, 2 * ACTIVATION
    assert ours["products"] == plain["products"]
    # 1 %: what else is fused differs, because gathered weights are views of a bucket
    assert abs(ours["bytes"] - plain["bytes"] - casts - border) <= 0.01 * plain["bytes"]


@pytest.mark.parametrize(
    ("way", "more"), [("regions auto", 0.01), ("regions False", 0.05), ("gradients in int8", 0.01)]
)
def test_pieces_move_what_whole_graphs_move(facts: dict[str, Any], way: str, more: float) -> None:
    """A model of three layers, with head and loss. Only whole graphs fuse across what communicates.

    Besides, they copy the weight of a norm that is read again after its bucket was freed: one launch per border. What
    operators encode and decode would not be counted: bytes would be missing.
    """
    whole, pieces = (facts["models"][f"{inner}, {way}"] for inner in ("inductor_whole", "inductor"))
    assert pieces["products"] == whole["products"]
    assert abs(pieces["bytes"] / whole["bytes"] - 1) <= more
    assert pieces["launches"] <= whole["launches"] + 8


@pytest.mark.parametrize(
    ("reduction", "sent"),
    [("sums in float32", 2.0), ("gradients in int8", 1 + 4 / 128), ("gradients in int4, stochastic", 0.5 + 2 / 32)],
)
def test_sums_read_what_was_received_once(facts: dict[str, Any], reduction: str, sent: float) -> None:
    """A sum reads all slices and writes the gradient, in float32, where a cast read a shard and wrote it.

    What is sent in a format is read for its scales, again to be rounded, a third time for the hash of its bits if that
    is stochastic, and written.
    """
    of_backend, of_sums = facts["reductions"]["mixed"], facts["reductions"][reduction]
    numel = facts["parameters"]
    sums = sent * numel - 2 * numel / RANKS
    encoding = 0.0 if sent == 2 else (2 + 2 + 2 * ("stochastic" in reduction) + sent) * numel
    extra = of_sums["bytes"] - of_backend["bytes"] - sums
    assert of_sums["products"] == of_backend["products"]
    # 0.2 bytes: scales, and sums of blocks' bits, in memory of their own
    assert abs(extra) <= 0.01 * numel if not encoding else 0 <= extra <= encoding + 0.4 * numel, extra / numel


def test_hooks_copy_what_is_whole(facts: dict[str, Any]) -> None:
    """FSDP2 copies each gathered bucket to its parameters, twice, and each gradient to its bucket."""
    whole = 2 * facts["parameters"]
    hooks = facts["hooks"]
    assert hooks["fsdp.split_with_sizes_copy"] == 2 * 2 * whole
    assert hooks["fsdp.chunk_cat"] == 2 * whole


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is that of torch 2.13")
def test_table(facts: dict[str, Any]) -> None:
    share = 2 * facts["parameters"] * (RANKS - 1) / RANKS
    rows = []
    for name, cost in facts["costs"].items():
        products = facts["flops"] / FLOPS if cost["products"] else 0.0
        rest = cost["bytes"] / MEMORY
        communication = 0.0 if name == "not sharded" else 3 * share / LINK
        seconds = (products, rest, communication, max(products + rest, communication))
        times = [f"{1e3 * each:.2f}" for each in seconds] if cost["products"] else ["-", f"{1e3 * rest:.2f}", "-", "-"]
        rows.append([name, f"{cost['products']:g}", f"{cost['launches']:g}", f"{cost['bytes'] / 1e9:.2f}", *times])
    check_table(DOCS / "performance.md", "layer", HEADER, rows)
