"""Loss curves of the demo's model on the demo's text, with weights gathered in bfloat16 and in float8.

    torchrun --nproc-per-node 2 benchmarks/fp8_curves.py [--steps 300] [--only rowwise] [--write]

All runs have the same initial weights, batches and optimizer. Besides quantized gathers, one run has bfloat16 gathers
and initial weights that were moved by a relative 1e-3: it shows how far apart two runs are that differ by rounding. The
result of a run is the mean loss of its last 20 steps. ``--write`` writes all losses to ``results/fp8_curves.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.demo.corpus import ByteText, standard_library
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig

RUNS = {
    "bfloat16": MixedPrecisionPolicy(),
    "rowwise": MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn),
    "tensorwise": MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn, param_comm_scaling="tensorwise"),
    "bfloat16, moved weights": MixedPrecisionPolicy(),
}
BATCH, LENGTH, LR, WARMUP = 16, 128, 2e-3, 10
"""Sequences per step over all ranks, bytes per sequence, AdamW's learning rate, and steps of its warm-up: the demo's."""
LAST = 20


def train(name: str, steps: int) -> list[float]:
    """Return the loss of each step, the mean over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    whole = Llama(LlamaConfig())
    if "moved" in name:
        with torch.no_grad():
            for param in whole.parameters():
                param.mul_(1 + 1e-3 * torch.randn_like(param))
    model = fully_shard_model(whole.bfloat16(), fsdp_unit_modules=[Block], mixed_precision_policy=RUNS[name])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=LR, foreach=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    text, losses = ByteText(standard_library(), LENGTH), []
    begun = time.perf_counter()
    for step in range(steps):
        tokens, targets = (part.chunk(ranks)[rank].to(device) for part in text.batch(step, BATCH))
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step + 1) % 25 == 0:
            seconds = (time.perf_counter() - begun) / (step + 1)
            print(f"{name}: step {step + 1}, loss {losses[-1]:.4f}, {seconds:.2f} s per step", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=RUNS, help="one of the runs")
    parser.add_argument("--write", action="store_true", help="write results/fp8_curves.json")
    given = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    curves: dict[str, list[float]] = {}
    for name in [given.only] if given.only else RUNS:
        curves[name] = train(name, given.steps)
        ends = {name: sum(losses[-LAST:]) / len(losses[-LAST:]) for name, losses in curves.items()}
        if dist.get_rank() != 0:
            continue
        print(f"{name:24} {ends[name]:.4f}", flush=True)
        if given.write:
            found = {"steps": given.steps, "ranks": dist.get_world_size(), "torch": torch.__version__, "ends": ends}
            results = Path(__file__).parent / "results" / "fp8_curves.json"
            results.write_text(json.dumps(found | {"losses": curves}, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
