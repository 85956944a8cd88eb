"""Whole graphs, which Inductor gets with ``options={"inner": "inductor_whole"}``: order of collectives, and numbers.

Everything else in this folder is about pieces.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from children import NEEDS
from cuda_rows import Row, Setting
from test_computed import FLOAT32, compute
from test_cuda_code import generate

pytestmark = [*NEEDS, pytest.mark.long]


def test_whole_graphs(tmp_path: Path) -> None:
    whole = Setting(precision="float32", options={"inner": "inductor_whole", "regions": True})
    (facts,) = generate([Row("Llama", "whole graphs", replace(whole, precision="mixed"))], "sm_90", tmp_path)
    assert "error" not in facts, facts["error"]
    for phase in facts["phases"].values():
        assert phase["found"] == phase["wanted"] != []
        assert phase["races"] == phase["syncs"] == []
    (ranks,) = compute(2, [("Llama", whole, "kernels", "")])
    for found in ranks:
        assert "error" not in found, found["error"]
        assert found["violations"] == []
        assert max(found["loss"], found["gradients"], found["one process"]) <= FLOAT32
