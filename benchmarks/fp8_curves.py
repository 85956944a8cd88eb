"""Loss curves of the demo's model on the demo's text, in bfloat16, with gathers in float8 and float4, and matrix
products in float8.

    torchrun --nproc-per-node 2 benchmarks/fp8_curves.py [--steps 300] [--lr 2e-3] [--seeds 4] [--only NAME ...] \\
        [--write FILE]

For each seed, all runs have the same initial weights, batches and optimizer, and go through torch.compile. One run is
bfloat16 with initial weights that were moved by a relative 1e-3: it shows how far apart two runs are that differ by
rounding. Two runs emulate quantized reductions, which the product does not have: each rank's packed gradients are
rounded to float8 or int8 in blocks of 128, and then reduced in float32, as ranks would that exchange quantized
gradients and add them up themselves. The result of a run is the mean loss of its last 20 steps; runs are compared seed
by seed with bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.demo.corpus import ByteText, standard_library
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.runtime.eager import reducing

ROWWISE = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
TENSORWISE = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn, param_comm_scaling="tensorwise")
NVFP4 = MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")
REDUCED = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
RUNS: dict[str, tuple[MixedPrecisionPolicy, dict[str, Any]]] = {
    "bfloat16": (MixedPrecisionPolicy(), {}),
    "moved": (MixedPrecisionPolicy(), {}),
    "gather-rowwise": (ROWWISE, {}),
    "gather-tensorwise": (TENSORWISE, {}),
    "gather-nvfp4": (NVFP4, {}),
    "matmul-rowwise": (MixedPrecisionPolicy(), {"fp8_matmul": "rowwise"}),
    "matmul-tensorwise": (MixedPrecisionPolicy(), {"fp8_matmul": "tensorwise"}),
    "matmul-rowwise-wgrad": (MixedPrecisionPolicy(), {"fp8_matmul": "rowwise", "fp8_wgrad": True}),
    "both-rowwise": (ROWWISE, {"fp8_matmul": "rowwise"}),
    "reduce-fp8": (REDUCED, {}),
    "reduce-int8": (REDUCED, {}),
}
BATCH, LENGTH, WARMUP = 16, 128, 10
"""Sequences per step over all ranks, bytes per sequence, and steps of the warm-up: the demo's."""
LAST = 20


@contextlib.contextmanager
def emulated(name: str) -> Iterator[None]:
    """Round gradients as quantized reductions would: float8 to nearest, int8 at random, so that the mean is right."""

    def rounded(*args: Any, **kwargs: Any) -> Tensor:
        packed = pack(*args, **kwargs)
        blocks = F.pad(packed, (0, -packed.numel() % 128)).view(-1, 128)
        largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
        if name == "reduce-fp8":
            values = (blocks / largest * 448).to(torch.float8_e4m3fn).float() / 448
        else:
            values = torch.floor(blocks / largest * 127 + torch.rand_like(blocks)) / 127
        return (values * largest).view(-1)[: packed.numel()]

    if not name.startswith("reduce"):
        yield
        return
    pack = reducing.pack
    with mock.patch.object(reducing, "pack", rounded):
        yield


def train(name: str, steps: int, lr: float, seed: int) -> list[float]:
    """Return the loss of each step, the mean over ranks."""
    policy, options = RUNS[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(seed)
    whole = Llama(LlamaConfig())
    if "moved" in name:
        with torch.no_grad():
            for param in whole.parameters():
                param.mul_(1 + 1e-3 * torch.randn_like(param))
    model = fully_shard_model(whole.bfloat16(), fsdp_unit_modules=[Block], mixed_precision_policy=policy)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=lr, foreach=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    text, losses = ByteText(standard_library(), LENGTH), []
    call = torch.compile(model, backend="mfsdp", options=options) if policy is not REDUCED else model
    begun = time.perf_counter()
    for step in range(steps):
        tokens, targets = (part.chunk(ranks)[rank].to(device) for part in text.batch(seed * 100_000 + step, BATCH))
        loss = call(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step + 1) % 100 == 0:
            seconds = (time.perf_counter() - begun) / (step + 1)
            print(f"{name}: step {step + 1}, loss {losses[-1]:.4f}, {seconds:.2f} s per step", flush=True)
    model.reset()
    torch._dynamo.reset()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW (default: the demo's, 2e-3)")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds for initial weights and batches")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="some of the runs")
    parser.add_argument("--write", help="write all losses to this file, as JSON")
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    curves: dict[str, list[list[float]]] = {name: [] for name in given.only}
    for seed in range(given.seeds):
        for name, runs in curves.items():
            with emulated(name):
                runs.append(train(name, given.steps, given.lr, seed))
            if dist.get_rank() == 0:
                _print(curves)
                if given.write:
                    found = {
                        "steps": given.steps,
                        "lr": given.lr,
                        "ranks": dist.get_world_size(),
                        "torch": torch.__version__,
                    }
                    Path(given.write).write_text(json.dumps(found | {"losses": curves}) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def _print(curves: dict[str, list[list[float]]]) -> None:
    """Print each run's result, and its distance to bfloat16: the mean over seeds, and its standard error."""
    ends = {name: [sum(losses[-LAST:]) / len(losses[-LAST:]) for losses in runs] for name, runs in curves.items()}
    for name, results in ends.items():
        apart = [a - b for a, b in zip(results, ends.get("bfloat16", ()), strict=False)]
        text = f"{name:22} {', '.join(f'{result:.4f}' for result in results)}"
        if apart and name != "bfloat16":
            error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else math.nan
            text += f"; {statistics.mean(apart):+.4f} +- {error:.4f}"
        print(text, flush=True)


if __name__ == "__main__":
    main()
