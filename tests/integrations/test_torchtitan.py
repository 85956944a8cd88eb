"""torchtitan's own trainer over this package, where torchtitan is installed; see ``torchtitan_job.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="pip install -e .[torchtitan], with torch 2.15")

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("torchtitan_job.py")


def run(
    system: str,
    folder: Path,
    steps: int,
    spmd_backend: str = "spmd_types",
    replicas: int = 1,
    ranks: int = 2,
    offload: bool = False,
) -> Any:
    """Run the job. Returns (loss, gradient norm) of each step taken."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launcher, str(JOB), system, str(folder), str(steps), spmd_backend, str(replicas), str(int(offload))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "metrics.json").read_text())


def close(ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Whether two runs agree. Sums of gradients are rounded in another order, and AdamW amplifies that."""
    return all(a == pytest.approx(b, rel=1e-4) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.processes
def test_losses_are_those_of_fsdp2(tmp_path: Path) -> None:
    """Losses equal those of FSDP2: compiled, with selective checkpointing and accumulation, and after resuming.

    Checkpoints are torchtitan's.
    """
    theirs, ours = (run(system, tmp_path / system, 4) for system in ("fsdp2", "mfsdp"))
    assert len(ours) == 4
    assert close(ours, theirs)
    both = [run(system, tmp_path / system, 6) for system in ("mfsdp", "fsdp2")]
    assert [len(taken) for taken in both] == [2, 2]
    assert close(*both)


@pytest.mark.long
@pytest.mark.processes
def test_offload(tmp_path: Path) -> None:
    """``training.enable_cpu_offload``: the numbers of the job without it, bitwise."""
    plain, offloaded = (run("mfsdp", tmp_path / str(given), 3, offload=given) for given in (False, True))
    assert offloaded == plain


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("spmd_backend", ["spmd_types", "partial_dtensor"])
def test_replicas(spmd_backend: str, tmp_path: Path) -> None:
    ours, theirs = (run(system, tmp_path / system, 3, spmd_backend, 2, ranks=4) for system in ("mfsdp", "fsdp2"))
    assert close(ours, theirs)


def test_what_is_refused() -> None:
    """The error names all unsupported settings."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

    from mfsdp_compile.integrations.torchtitan import parallelize

    with pytest.raises(ValueError, match=r"(?s)tensor_parallel_degree=2.*disable_cuda_graphs.*'eager'"):
        parallelize(
            SimpleNamespace(),
            parallel_dims=SimpleNamespace(tp=2, cp=1, pp=1, ep=1),
            training=TrainingConfig(),
            parallelism=ParallelismConfig(),
            compile_config=CompileConfig(enable=True, backend="eager"),
            ac_config=None,
            dump_folder="",
        )
