"""Checkpoints that Megatron itself has written, converted to fsdp_dtensor, and back for Megatron to load."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import ROOT
from megatron_files import load_and_step
from pool import Pools
from torch import Tensor

from mfsdp_compile import cli
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.megatron_states import PREFIX

FOLDER = os.environ.get("MFSDP_MEGATRON_CORE", os.path.join(sys.prefix, "megatron_core"))
IS_THERE = importlib.util.find_spec("megatron") is not None or os.path.isdir(os.path.join(FOLDER, "megatron"))
RANKS, SECONDS = 2, 600
EXPERTS = 2

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
    """Return a parameter's name in Megatron's checkpoints: Transformer Engine's, for layers without it too."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    return re.sub(r"local_experts\.(\d+)\.(.*)", r"\2\1", name)


def with_its_experts(params: dict[str, Any], rank: int, ep: int) -> dict[str, Any]:
    """Number a rank's experts as those of the whole model are."""

    def numbered(local: re.Match[str]) -> str:
        return f"local_experts.{int(local[1]) + rank % ep * EXPERTS // ep}."

    return {re.sub(r"local_experts\.(\d+)\.", numbered, name): param for name, param in params.items()}


def full_tensors(ranks: list[dict[str, Any]], tp: int = 1, ep: int = 1) -> dict[str, Tensor]:
    """Join what the ranks hold, under the keys of fsdp_dtensor.

    Ranks of tensor parallelism hold shards; the others hold ranges of the flattened states of the same parameters.
    """
    joined = {}
    held = [with_its_experts(params["before"]["params"], rank, ep) for rank, params in enumerate(ranks)]
    for name in dict.fromkeys(itertools.chain(*held)):
        held_by = [params[name] for params in held if name in params]
        shards = [[part] for part in held_by] if tp > 1 else [held_by]
        dim = held_by[0]["dim"] if tp > 1 else None
        for state in ("", "param", "exp_avg", "exp_avg_sq"):
            tensors = [state_of(parts, state) if state else parts[0]["value"] for parts in shards]
            gated = name.endswith("linear_fc1.weight")
            for half, number in [("_w", 0), ("_v", 1)] if gated else [("", None)]:
                cut = tensors if number is None else [tensor.chunk(2)[number] for tensor in tensors]
                key = f"{in_checkpoints(name)}{half}"
                where = f"optimizer.state.module.module.module.{key}.{state}" if state else f"model.module.{key}"
                joined[where] = cut[0] if dim is None else torch.cat(cut, dim)
    return joined


def state_of(parts: list[dict[str, Any]], state: str) -> Tensor:
    """Return a state in its parameter's shape from the ranges that ranks hold, which must cover it exactly."""
    value = parts[0]["value"]
    ranges = sorted((part["range"], part["states"][state]) for part in parts if part.get("range"))
    flat = torch.cat([held for _, held in ranges])
    assert [start for (start, _), _ in ranges] == [0, *(stop for (_, stop), _ in ranges[:-1])]
    return flat.view(value.shape)


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


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "dp2": {},
    "experts": {"experts": True},
    "ep2": {"experts": True, "ep": 2},
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_round_trip(megatron: Megatron, tmp_path: Path, layout: str) -> None:
    """All tensors arrive; Megatron loads what comes back, and its next step is that of the uninterrupted run."""
    job = LAYOUTS[layout]
    saved = megatron(tmp_path / "run", **job)
    between, back = tmp_path / "fsdp", tmp_path / "back"
    assert not cli.main(["convert", str(tmp_path / "run" / "iter_0000003"), str(between)])
    reader, expected = CheckpointReader(between), full_tensors(saved, job.get("tp", 1), job.get("ep", 1))
    assert {key for key in reader if reader.is_tensor(key)} == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(reader.tensor(key), tensor), key
    assert reader.value("iteration") == 3
    assert not cli.main(["convert", str(between), str(back / "iter_0000003"), "--to", "torch_dist"])
    (back / "latest_checkpointed_iteration.txt").write_text("3")
    for rank, loaded in enumerate(megatron(back, load=True, **job)):
        del saved[rank]["losses"]
        assert_same(loaded, saved[rank])


@pytest.mark.long
def test_states_by_buckets(megatron: Megatron, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``dp_reshardable`` is refused: nothing in it names parameters, and their sizes do not tell them apart.

    Its weights alone are converted.
    """
    saved = megatron(tmp_path / "run", sharding="dp_reshardable")
    run, weights, out = tmp_path / "run" / "iter_0000003", tmp_path / "weights", tmp_path / "fsdp"
    assert cli.main(["convert", str(run), str(out)]) == 2
    assert "--dist-ckpt-optim-fully-reshardable" in capsys.readouterr().err
    assert not out.exists()

    reader = CheckpointReader(run)
    states = [key for key in reader if "optimizer" in key]
    names = {re.sub(r"layers\.\d+\.", "layers.", in_checkpoints(name)) for name in saved[0]["before"]["params"]}
    tensors = [key for key in states if reader.is_tensor(key)]
    assert tensors
    assert not any(name in f"{key} {'' if key in tensors else reader.value(key)}" for name in names for key in states)
    sizes = Counter(part.numel() for _, part in reader.chunks(tensors[0]))
    assert sizes[16] >= 8  # weights and biases of four layer norms, to name only those

    assert not cli.main(["checkpoint", "remove", str(run), str(weights), r"optimizer\.distributed\."])
    assert not cli.main(["convert", str(weights), str(out), "--from", "torch_dist"])
    reader = CheckpointReader(out)
    expected = {key: tensor for key, tensor in full_tensors(saved).items() if key.startswith("model.")}
    assert {key for key in reader if reader.is_tensor(key)} == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(reader.tensor(key), tensor), key


@pytest.mark.long
def test_another_size_of_tensor_parallelism(megatron: Megatron, tmp_path: Path) -> None:
    """What came back from TP 2 is loaded with TP 1: parameters are those that were saved."""
    saved = megatron(tmp_path / "run", tp=2)
    between, back = tmp_path / "fsdp", tmp_path / "back"
    assert not cli.main(["convert", str(tmp_path / "run" / "iter_0000003"), str(between)])
    assert not cli.main(["convert", str(between), str(back / "iter_0000003"), "--to", "torch_dist"])
    (back / "latest_checkpointed_iteration.txt").write_text("3")
    expected = full_tensors(saved, tp=2)
    for loaded in megatron(back, tp=1, load=True):
        assert loaded["iteration"] == 3
        assert_same(loaded["before"]["schedule"], saved[0]["before"]["schedule"])
        for name, param in loaded["before"]["params"].items():
            key = f"model.module.{in_checkpoints(name)}"
            halves = [key] if key in expected else [f"{key}_w", f"{key}_v"]
            assert torch.equal(param["value"], torch.cat([expected[half] for half in halves])), name


@pytest.mark.long
@pytest.mark.processes
def test_what_conversion_makes_is_loaded_by_two_ranks(megatron: Megatron, pools: Pools, tmp_path: Path) -> None:
    """A sharded model takes main weights and states. Its next step is that of AdamW with what Megatron held."""
    expected = full_tensors(megatron(tmp_path / "run", tp=2), tp=2)
    out = tmp_path / "fsdp"
    run = str(tmp_path / "run" / "iter_0000003")
    assert not cli.main(["convert-torch-dist-to-fsdp-dtensor", run, str(out)])
    loaded = pools.of(2).run(load_and_step, folder=str(out), steps=3)[0]
    main = {
        key.removesuffix(".param").removeprefix(f"optimizer.state.{PREFIX}"): t
        for key, t in expected.items()
        if key.endswith(".param")
    }
    assert loaded.keys() == main.keys()
    for name, tensor in main.items():
        assert np.array_equal(loaded[name], tensor.numpy()), name
