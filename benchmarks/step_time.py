"""Seconds per training step: this package, FSDP2, DDP and Megatron-FSDP, in turns within one run.

    python benchmarks/step_time.py                     # all ranks that the machine has GPUs for, or two on the CPU
    python benchmarks/step_time.py --simulate 64       # rank 0 of 64, on one GPU or CPU: computation only

In every round, each system does one step on the same data, in an order that rotates. Ratios compare steps of the same
round, so a machine whose speed drifts favors no system. The first step, with compilation, is shown separately.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import Config, System, batch_of, build, median, rows, run, synchronize

BASELINE = "FSDP2 compiled by block"
WARMUP_STEPS = 4
"""The first, two that run as usual, and the one that CUDA graphs are captured in."""


def measure(config: Config, rank: int, device: torch.device) -> dict[str, Any]:
    tokens, targets = batch_of(config, rank, device)
    systems: list[System] = []
    results: dict[str, Any] = {}
    for name in config.systems:
        system = build(name, config, device)
        if isinstance(system, str):
            results[name] = {"skipped": system}
            continue
        begun = time.perf_counter()
        losses = [system.step(tokens, targets).item()]
        synchronize(config, device)
        first = time.perf_counter() - begun
        losses += [system.step(tokens, targets).item() for _ in range(WARMUP_STEPS - 1)]
        results[name] = {"first_step_s": first, "losses": losses, "steps_s": []}
        systems.append(system)
        if rank == 0:
            print(f"{name}: first step {first:.1f} s, losses {[f'{loss:.4f}' for loss in losses]}", flush=True)
    for round_ in range(config.rounds):
        turn = round_ % len(systems)
        for system in systems[turn:] + systems[:turn]:
            synchronize(config, device)
            begun = time.perf_counter()
            system.step(tokens, targets)
            synchronize(config, device)
            results[system.name]["steps_s"].append(time.perf_counter() - begun)
    return results


def show(config: Config, results: dict[str, Any]) -> None:
    baseline = results.get(BASELINE, {}).get("steps_s")
    label = " (simulated: no communication)" if config.simulate else ""
    print(f"\n{'system':26} {'first step':>11} {'median step':>12} {'min':>9} {'max':>9}  {'/ ' + BASELINE}{label}")
    for name, result in rows(results):
        steps = result["steps_s"]
        ratio = ""
        if baseline:
            ratios = sorted(mine / other for mine, other in zip(steps, baseline, strict=True))
            result["ratio"] = median(ratios)
            ratio = f"{result['ratio']:.3f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(
            f"{name:26} {result['first_step_s']:9.1f} s {median(steps) * 1e3:9.1f} ms {min(steps) * 1e3:6.1f} ms "
            f"{max(steps) * 1e3:6.1f} ms  {ratio}"
        )


if __name__ == "__main__":
    run(__doc__, 15, measure, show)
