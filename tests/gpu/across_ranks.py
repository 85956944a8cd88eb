"""Do N ranks on NCCL train what one rank trains? The checks of ``tests/programs`` on gloo, for some models.

    torchrun --nproc-per-node 8 -m across_ranks RESULT.json

The eager path and the compiled graph agree bit for bit, all ranks agree, and one rank that computes the batches of all
ranks gets the same up to the rounding of sums in another order. Last, because a failure there hangs: groups that only
some ranks are in, as in pipelines.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for products with the same bits; read when cuBLAS is first used
os.environ["MFSDP_VERIFY"] = "each"

import parity
import torch
import torch.distributed as dist
import zoo
from gpu_models import MODES, same_bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile import fully_shard_model

MODELS = ("Plain", "Tied", "Uneven", "FrozenUnit", "Checkpointed", "TransformerLayer")


def check(rank: int, device: torch.device) -> dict[str, Any]:
    passed: list[str] = []
    failed: list[str] = []

    def one(name: str, work: Callable[[], None]) -> None:
        try:
            work()
            error = ""
        except Exception:
            error = traceback.format_exc()
        wrong = torch.tensor(int(bool(error)), device=device)
        dist.all_reduce(wrong)
        if error or wrong:
            failed.append(f"{name}: {error or 'failed on another rank'}")
        else:
            passed.append(name)
        if rank == 0:
            print(f"{'FAILED' if wrong else 'passed'} {name}", flush=True)
        torch._dynamo.reset()

    for name in MODELS:
        one(f"one rank's numbers: {name}", lambda name=name: _compare(name, device))
    one("groups of some ranks", lambda: _subgroups(rank, device))
    one("groups of some ranks, made by some ranks", lambda: _lonely_group(rank, device))
    return {"ranks": dist.get_world_size(), "passed": passed, "failed": failed}


def _compare(name: str, device: torch.device) -> None:
    def factory() -> torch.nn.Module:
        return getattr(zoo, name)().to(device)

    data = parity.batches(3).to(device)
    with same_bits():
        alone = parity.train_alone(factory, data, parity.sgd)
        runs = [parity.train_sharded(factory, mode, data, parity.sgd) for mode in MODES]
    parity.assert_bitwise(runs[0], runs[1])
    for run in runs:
        parity.assert_close(run, alone)


def _subgroups(rank: int, device: torch.device) -> None:
    """A mesh of two dimensions: each half of the ranks shards a model of its own."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (2, ranks // 2) if ranks % 2 == 0 else (1, ranks), mesh_dim_names=("pp", "dp"))
    _train(mesh["dp"], device, seed=mesh["pp"].get_local_rank())


def _lonely_group(rank: int, device: torch.device) -> None:
    """The package makes further groups for one half of the ranks, while the others do something else."""
    ranks = max(1, dist.get_world_size() // 2)
    group = dist.new_group(range(ranks))
    if rank < ranks:
        _train(DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",)), device, seed=0)
    dist.barrier()


def _train(mesh: DeviceMesh, device: torch.device, seed: int) -> None:
    """Train on the same batch on every rank: the loss must be that of the whole model."""
    torch.manual_seed(seed)
    whole = zoo.Plain().to(device)
    torch.manual_seed(seed)
    model = fully_shard_model(zoo.Plain().to(device), mesh, fsdp_unit_modules=[zoo.Block])
    x = torch.ones(6, 8, device=device)
    for each in (whole, model):
        each(x).backward()
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        parity.close("gradient", mine.grad.full_tensor(), its.grad)


if __name__ == "__main__":
    import programs

    programs.run(check)
