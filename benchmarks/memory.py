"""Bytes per rank: what stays between steps, and the peak within one, for the same systems as ``step_time.py``.

    python benchmarks/memory.py
    python benchmarks/memory.py --simulate 64  # what rank 0 of 64 holds; without what collectives allocate themselves

At rest: the storages of parameters, gradients (before they are cleared; a step in backward leaves none) and optimizer
state. Peak: the most bytes
allocated at one time during a step, beyond what is at rest before it. Torch's allocator counts them on CUDA, its
profiler on CPU. The profiler sees every allocation, but crashes when gloo runs beside it, so on CPU the group is always
simulated. One system is in memory at a time.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from common import Config, System, batch_of, build, rows, run, synchronize
from torch import Tensor

from mfsdp_compile.diagnostics.measure import allocated


def measure(config: Config, rank: int, device: torch.device) -> dict[str, Any]:
    tokens, targets = batch_of(config, rank, device)
    results: dict[str, Any] = {}
    for name in config.systems:
        system = build(name, config, device)
        if isinstance(system, str):
            results[name] = {"skipped": system}
            continue
        for _ in range(3):
            system.step(tokens, targets)
        synchronize(config, device)
        results[name] = _at_rest(system, tokens, targets) | {"peak": _peak(system, tokens, targets, device)}
        if rank == 0:
            print(f"{name}: measured", flush=True)
        del system
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def _at_rest(system: System, tokens: Tensor, targets: Tensor) -> dict[str, int]:
    if system.train_step is None:
        system.call(tokens, targets).backward()
    params = list(system.model.parameters())
    state = [v for s in system.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    held = {
        "parameters": _bytes(params),
        "gradients": _bytes([p.grad for p in params if p.grad is not None]),
        "optimizer": _bytes(state),
    }
    system.optimizer.zero_grad()
    return held


def _bytes(tensors: list[Tensor]) -> int:
    """Sum the bytes of the storages behind the tensors. A shared storage counts once."""
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _peak(system: System, tokens: Tensor, targets: Tensor, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        system.step(tokens, targets)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    return allocated(lambda: system.step(tokens, targets))[0]


def show(config: Config, results: dict[str, Any]) -> None:
    label = "simulated, " if config.simulate else ""
    print(
        f"\n{'system':26} {'parameters':>12} {'gradients':>12} {'optimizer':>12} {'peak beyond':>12}"
        f"   MiB, {label}rank 0"
    )
    for name, result in rows(results):
        columns = (result[key] / (1 << 20) for key in ("parameters", "gradients", "optimizer", "peak"))
        print(f"{name:26} " + " ".join(f"{value:12.1f}" for value in columns))


if __name__ == "__main__":
    run(__doc__, 1, measure, show, simulate=not torch.cuda.is_available())
