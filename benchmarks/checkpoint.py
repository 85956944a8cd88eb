"""Seconds to save and to load a checkpoint: this package, and FSDP2 through torch.distributed.checkpoint, in turns.

    python benchmarks/checkpoint.py

Both systems hold the same model and AdamW state on the same ranks, and write to the same disk. Ours hashes every file
when it saves, and reads and hashes every file again before it loads. The ratio of a round compares both systems within
that round.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import Config, System, batch_of, build, median, run, synchronize
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mfsdp_compile import fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, load
from mfsdp_compile.diagnostics.measure import collectives

OURS, THEIRS = "mfsdp eager", "FSDP2 eager"
UNVERIFIED = f"{OURS}, verify=False"


class _Ours:
    def __init__(self, verify: bool) -> None:
        self.verify = verify

    def state(self, system: System) -> Any:
        return system.model.state_dict(), system.optimizer.state_dict()

    def save(self, system: System, folder: Path) -> None:
        Checkpoints(folder).save(0, system.model, system.optimizer)  # type: ignore[arg-type]

    def load(self, system: System, folder: Path) -> None:
        load(folder / "step-00000000", system.model, system.optimizer, verify=self.verify)  # type: ignore[arg-type]


class _Fsdp2:
    def state(self, system: System) -> Any:
        return get_state_dict(system.model, system.optimizer)

    def save(self, system: System, folder: Path) -> None:
        weights, state = get_state_dict(system.model, system.optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    def load(self, system: System, folder: Path) -> None:
        weights, state = get_state_dict(system.model, system.optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        set_state_dict(system.model, system.optimizer, model_state_dict=weights, optim_state_dict=state)


def measure(config: Config, rank: int, device: torch.device) -> dict[str, Any]:
    root = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(root)
    systems: dict[str, tuple[Any, System]] = {}
    for name, way in ((OURS, _Ours(True)), (UNVERIFIED, _Ours(False)), (THEIRS, _Fsdp2())):
        system = build(name.partition(",")[0], config, device)
        if isinstance(system, str):
            raise SystemExit(f"{name}: {system}")
        if system.name == OURS:
            fully_shard_optimizer(system.optimizer)
        system.step(*batch_of(config, rank, device))
        systems[name] = way, system
    results: dict[str, Any] = {
        name: {"state_dict_collectives": sum(collectives(partial(way.state, system)).values())}
        for name, (way, system) in systems.items()
    }
    for round_ in range(config.rounds + 1):
        for name in list(systems) if round_ % 2 else reversed(systems):
            way, system = systems[name]
            folder = Path(root[0]) / f"{name} {round_}"

            def timed(function: Callable[[], Any]) -> float:
                synchronize(config, device)
                begun = time.perf_counter()
                function()
                synchronize(config, device)
                return time.perf_counter() - begun

            seconds = {
                "state_dict": timed(partial(way.state, system)),
                "save": timed(partial(way.save, system, folder)),
                "load": timed(partial(way.load, system, folder)),
            }
            if round_:  # the first round creates groups and fills caches
                for what, value in seconds.items():
                    results[name].setdefault(what, []).append(value)
            dist.barrier()
            if rank == 0:
                results[name]["bytes"] = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                shutil.rmtree(folder)
    if rank == 0:
        shutil.rmtree(root[0])
    return results


def show(config: Config, results: dict[str, Any]) -> None:
    kinds = ("state_dict", "save", "load")
    print(f"\n{'ms, median of rounds':26} {'state_dict':>12} {'save':>10} {'load':>10} {'in all / ' + THEIRS:>24}")
    totals = {n: [sum(t) for t in zip(*(r[k] for k in kinds), strict=True)] for n, r in results.items()}
    for name, result in results.items():
        ratios = [mine / other for mine, other in zip(totals[name], totals[THEIRS], strict=True)]
        result["ratio"] = median(ratios)
        times = [median(result[kind]) * 1e3 for kind in kinds]
        print(
            f"{name:26} {times[0]:12.1f} {times[1]:10.0f} {times[2]:10.0f} {result['ratio']:14.2f}  "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )
    for name, result in results.items():
        print(f"{name}: {result['state_dict_collectives']} collectives in state_dict, {result['bytes']:,} B written")


if __name__ == "__main__":
    run(__doc__, 9, measure, show)
