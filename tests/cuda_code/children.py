"""Processes of a GPU that does not exist, as tests start them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NEEDS = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, for hooks of CUDA"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a driver would answer in place of the fake device"),
]
"""Marks of tests that start such processes."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child that imports this checkout and what tests share."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | more
