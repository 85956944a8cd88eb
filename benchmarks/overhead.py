"""Host overhead of a forward and backward over many tiny layers: FSDP2 and this package, eager and compiled.

    python benchmarks/overhead.py

The process is rank 0 of N, the other ranks are fake, and layers are so small that nearly all of the time is spent in
Python and the dispatcher: on a GPU, this is time in which the host does not start kernels. The overhead of a system is
its time less that of the unsharded model, eager or compiled like the system itself. In every round each system takes
one turn, in an order that rotates, and differences are taken between turns of the same round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from common import Config, batch_of, build, median, run, synchronize
from torch import Tensor, nn

from mfsdp_compile.models.llama import Llama

UNSHARDED = {"unsharded eager": False, "unsharded compiled": True}
SYSTEMS = {
    "FSDP2 eager": "unsharded eager",
    "mfsdp eager": "unsharded eager",
    "mfsdp eager with double buffers": "unsharded eager",
    "FSDP2 compiled by block": "unsharded compiled",
    "mfsdp compiled by block": "unsharded compiled",
    "mfsdp compiled": "unsharded compiled",
    "mfsdp compiled whole": "unsharded compiled",
}
"""What each system's time is compared with."""
BASELINE = "FSDP2 eager"
TINY = {"width": 64, "heads": 4, "hidden": 128, "vocabulary": 128, "batch": 1, "length": 16, "layers": 24, "ranks": 8}
WARMUP_STEPS = 3


def measure(config: Config, rank: int, device: torch.device) -> dict[str, Any]:
    results: dict[str, Any] = {}
    systems: dict[str, tuple[nn.Module, Callable[..., Tensor]]] = {}
    needed = {base for name, base in SYSTEMS.items() if name in config.systems}
    for name, compiled in UNSHARDED.items():
        if name not in needed:
            continue
        torch.manual_seed(config.seed)
        model = Llama(config.model).to(device, getattr(torch, config.dtype))
        systems[name] = model, torch.compile(model) if compiled else model
    for name in SYSTEMS:
        if name not in config.systems:
            continue
        built = build(name, config, device)
        if isinstance(built, str):
            results[name] = {"skipped": built}
        else:
            systems[name] = built.model, built.call
    batch = batch_of(config, rank, device)

    def turn(name: str) -> float:
        model, call = systems[name]
        synchronize(config, device)
        begun = time.perf_counter()
        call(*batch).backward()
        synchronize(config, device)
        seconds = time.perf_counter() - begun
        model.zero_grad()
        return seconds

    for name in systems:
        for _ in range(WARMUP_STEPS):
            turn(name)
        results[name] = {"seconds": []}
    names = list(systems)
    gc.collect()
    gc.disable()  # a collection would fall on any system
    for round_ in range(config.rounds):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            results[name]["seconds"].append(turn(name))
        gc.collect()
    gc.enable()
    return results


def show(config: Config, results: dict[str, Any]) -> None:
    times = {name: result["seconds"] for name, result in results.items() if "seconds" in result}
    overheads = {name: _differences(times, name) for name in SYSTEMS if name in times}
    baseline = overheads.get(BASELINE)
    print(f"\n{'forward and backward, medians':34} {'ms':>8} {'overhead, ms':>13} {'/ ' + BASELINE:>14}")
    for name, seconds in times.items():
        line = f"{name:34} {median(seconds) * 1e3:8.1f}"
        if name in overheads:
            results[name]["overhead"] = median(overheads[name])
            line += f" {results[name]['overhead'] * 1e3:13.1f}"
            if baseline is not None:
                results[name]["ratio"] = results[name]["overhead"] / median(baseline)
                line += f" {results[name]['ratio']:14.2f}"
        print(line)
    for name, result in results.items():
        if "skipped" in result:
            print(f"{name:34} not run: {result['skipped']}")


def _differences(times: dict[str, list[float]], name: str) -> list[float]:
    return [mine - other for mine, other in zip(times[name], times[SYSTEMS[name]], strict=True)]


if __name__ == "__main__":
    run(__doc__, 40, measure, show, simulate=True, **TINY)
