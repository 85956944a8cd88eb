"""Checkpoints that Megatron itself has written, converted to fsdp_dtensor, and back for Megatron to load."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT
from torch import Tensor

from mfsdp_compile import cli
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader

FOLDER = os.environ.get("MFSDP_MEGATRON_CORE", os.path.join(sys.prefix, "megatron_core"))
IS_THERE = importlib.util.find_spec("megatron") is not None or os.path.isdir(os.path.join(FOLDER, "megatron"))
RANKS, SECONDS = 2, 120

pytestmark = pytest.mark.skipif(not IS_THERE, reason="needs megatron-core")


class Megatron:
    """Runs jobs of ``megatron_core_ranks.py``, which imports Megatron once for all of them."""

    def __init__(self, log: Path) -> None:
        script = Path(__file__).with_name("megatron_core_ranks.py")
        paths = os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")])
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                ["timeout", "-s", "KILL", str(SECONDS), sys.executable, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""},
            )

    def __call__(self, folder: Path, **job: Any) -> list[dict[str, Any]]:
        """Run a job. Returns what each rank held."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"folder": str(folder), **job}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        errors = [path.read_text() for path in folder.parent.glob(f"{folder.name}.error.*")]
        assert answer == "done\n", (answer, *errors, self.log.read_text()[-2000:])
        which = "loaded" if job.get("load") else "saved"
        return [torch.load(f"{folder}.{which}.{rank}", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Megatron]:
    runner = Megatron(tmp_path_factory.mktemp("megatron") / "log")
    yield runner
    assert runner.process.stdin is not None
    runner.process.stdin.close()
    runner.process.wait(SECONDS)


def in_checkpoints(name: str) -> str:
    """Return the name that Megatron gives a parameter in checkpoints: Transformer Engine's, for layers without it too."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")


def full_tensors(ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Join what the ranks of tensor parallelism hold, under the keys of fsdp_dtensor."""
    joined = {}
    held = [rank["before"]["params"] for rank in ranks]
    for name, first in held[0].items():
        parts = [{"": params[name]["value"], **params[name]["states"]} for params in held]
        key = in_checkpoints(name)
        for state in ("", "param", "exp_avg", "exp_avg_sq"):
            shards = [part[state].view(first["value"].shape) for part in parts]
            halves = [("_w", 0), ("_v", 1)] if name.endswith("linear_fc1.weight") else [("", None)]
            for half, number in halves:
                cut = shards if number is None else [shard.chunk(2)[number] for shard in shards]
                full = cut[0] if first["dim"] is None else torch.cat(cut, first["dim"])
                where = f"optimizer.state.module.module.module.{key}{half}.{state}"
                joined[where if state else f"model.module.{key}{half}"] = full
    return joined


def assert_same(mine: Any, its: Any, where: str = "") -> None:
    """Compare nested dictionaries and lists with tensors, bitwise."""
    if isinstance(its, Tensor):
        assert torch.equal(mine, its), where
    elif isinstance(its, dict):
        assert mine.keys() == its.keys(), where
        for key, value in its.items():
            assert_same(mine[key], value, f"{where}/{key}")
    elif isinstance(its, list):
        assert len(mine) == len(its), where
        for number, value in enumerate(its):
            assert_same(mine[number], value, f"{where}/{number}")
    else:
        assert mine == its, where


def test_a_round_trip(megatron: Megatron, tmp_path: Path) -> None:
    """TP 2: all tensors arrive; Megatron loads what comes back, and its next step is that of the uninterrupted run."""
    saved = megatron(tmp_path / "run", tp=2)
    between, back = tmp_path / "fsdp", tmp_path / "back"
    assert not cli.main(["convert", str(tmp_path / "run" / "iter_0000003"), str(between)])
    reader, expected = CheckpointReader(between), full_tensors(saved)
    assert {key for key in reader if reader.is_tensor(key)} == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(reader.tensor(key), tensor), key
    assert reader.value("iteration") == 3
    assert not cli.main(["convert", str(between), str(back / "iter_0000003"), "--to", "torch_dist"])
    (back / "latest_checkpointed_iteration.txt").write_text("3")
    for rank, loaded in enumerate(megatron(back, tp=2, load=True)):
        del saved[rank]["losses"]
        assert_same(loaded, saved[rank])


def test_another_size_of_tensor_parallelism(megatron: Megatron, tmp_path: Path) -> None:
    """What came back from TP 2 is loaded with TP 1: parameters are those that were saved."""
    saved = megatron(tmp_path / "run", tp=2)
    between, back = tmp_path / "fsdp", tmp_path / "back"
    assert not cli.main(["convert", str(tmp_path / "run" / "iter_0000003"), str(between)])
    assert not cli.main(["convert", str(between), str(back / "iter_0000003"), "--to", "torch_dist"])
    (back / "latest_checkpointed_iteration.txt").write_text("3")
    expected = full_tensors(saved)
    for loaded in megatron(back, tp=1, load=True):
        assert loaded["iteration"] == 3
        assert_same(loaded["before"]["schedule"], saved[0]["before"]["schedule"])
        for name, param in loaded["before"]["params"].items():
            key = f"model.module.{in_checkpoints(name)}"
            halves = [key] if key in expected else [f"{key}_w", f"{key}_v"]
            assert torch.equal(param["value"], torch.cat([expected[half] for half in halves])), name
