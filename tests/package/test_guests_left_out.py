"""The core works without its guests: their folders are removed, one by one and all together, and models train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUESTS = {
    **{name: [f"runtime.guests.{name}"] for name in ("sums_in_order", "quantized", "optimizers", "capture")},
    "offload": ["runtime.guests.offload", "passes.guests.activations"],
    "solver": ["passes.guests.solver"],
    **{name: [f"passes.guests.{name}"] for name in ("fp8_matmul", "loss_chunks", "float32_gradients")},
}
"""Modules of guests that the core does not need. Others are still parts of it: portions, buffers, ranks in step."""

TRAINS = """
import importlib.util
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import mfsdp_compile.backend.compile
from mfsdp_compile import explain, fully_shard_model

assert not any(importlib.util.find_spec(f"mfsdp_compile.{name}") for name in sys.argv[1:])
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
for strategy in range(4):
    for mode in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
        call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": mode})
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            call(torch.ones(2, 8)).sum().backward()
            assert all(param.grad is not None for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    assert "all rules hold" in str(explain(call, torch.ones(2, 8)))
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize("guest", ["all", *(pytest.param(guest, marks=pytest.mark.long) for guest in GUESTS)])
def test_models_train(guest: str, tmp_path: Path) -> None:
    package = tmp_path / "mfsdp_compile"
    for source, to in (("mfsdp_compile", package), ("passes", package / "passes"), ("runtime", package / "runtime")):
        shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
    left_out = GUESTS[guest] if guest != "all" else [name for names in GUESTS.values() for name in names]
    for path in (package.joinpath(*name.split(".")) for name in left_out):
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", TRAINS, *left_out]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.endswith("trained\n"), done.stderr[-4000:]
