"""Seconds per optimizer step: by parameter, over flat shards, compiled, and over whole parameters in one process.

    python benchmarks/optimizer_step.py
    python benchmarks/optimizer_step.py --simulate 8

Gradients are computed beforehand; only ``optimizer.step()`` is timed. It does not communicate, so the group is always
simulated: this rank's shards are real, the other ranks are fake. Variants take turns within each round.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import Any

import torch
from common import Config, median, run, synchronize
from torch import nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.models.llama import Block, Llama
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.optimizers.flat_step import flat_step_of
from mfsdp_compile.runtime.guests.optimizers.update_kernel import UpdateKernels

HOW = {"for": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


def measure(config: Config, rank: int, device: torch.device) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    for how, settings in HOW.items():
        for kind in ("by parameter", "flat", "compiled") if how == "foreach" else ("by parameter", "flat"):
            model: nn.Module = Llama(config.model).to(device)
            sharded = fully_shard_model(model, fsdp_unit_modules=[Block], check_values=False)
            optimizer = torch.optim.AdamW(groups(sharded), lr=1e-4, **settings)
            steps[f"{how}, {kind}"] = sharded, fully_shard_optimizer(optimizer, flat=kind != "by parameter")
        model = Llama(config.model).to(device)
        steps[f"{how}, one process"] = model, torch.optim.AdamW(groups(model), lr=1e-4, **settings)
    for model, _ in steps.values():
        model(torch.zeros(1, 8, dtype=torch.long, device=device)).float().square().mean().backward()
    _, compiled = steps["foreach, compiled"]
    flat = flat_step_of(compiled)
    assert flat is not None
    kernels = UpdateKernels(compiled, compat.step_without_hooks(torch.optim.AdamW), {})
    contexts = {"foreach, compiled": functools.partial(flat.compiled, kernels)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(config.rounds + 2):
        for name, (_, optimizer) in steps.items():
            with contexts.get(name, contextlib.nullcontext)():
                synchronize(config, device)
                begun = time.perf_counter()
                optimizer.step()
                synchronize(config, device)
            times[name].append(time.perf_counter() - begun)
    return {name: {"seconds": values[2:]} for name, values in times.items()}


def show(config: Config, results: dict[str, Any]) -> None:
    print(f"\n{'AdamW':24} {'median':>10} {'least':>10}   ms, rank 0 of {config.ranks}")
    for name, result in results.items():
        seconds = result["seconds"]
        print(f"{name:24} {median(seconds) * 1e3:10.2f} {min(seconds) * 1e3:10.2f}")


if __name__ == "__main__":
    run(__doc__, 20, measure, show, simulate=True)
