"""What gradients in fewer bits on the wire cost: loss on held-out text after the same steps, for three seeds.

    python benchmarks/gradient_formats.py --out benchmarks/results/gradient_formats_cpu_2ranks.json

A Llama of 0.7 M parameters learns bytes of Python's standard library, eagerly, on two CPU ranks with gloo. All formats
see the same batches. The last tenth of the text is held out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.demo.corpus import ByteText, standard_library
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig

_NAMES = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1fn_x2", "int4")
FORMATS: dict[str, Any] = {
    "float32": {},
    **{name: {"grad_comm_dtype": getattr(torch, name), "grad_sum_dtype": torch.float32} for name in _NAMES},
    **{
        f"{name}, stochastic": {
            "grad_comm_dtype": getattr(torch, name),
            "grad_sum_dtype": torch.float32,
            "grad_comm_rounding": "stochastic",
        }
        for name in _NAMES[1:]
    },
}
SEEDS = (0, 1, 2)
BATCH, LENGTH, RANKS = 16, 128, 2


def trained(policy: dict[str, Any], seed: int, steps: int, rank: int) -> float:
    """Return the loss on held-out text after training."""
    data = standard_library()
    border = len(data) * 9 // 10
    text, held_out = ByteText(data[:border], LENGTH, seed), ByteText(data[border:], LENGTH)
    torch.manual_seed(seed)
    model = fully_shard_model(
        Llama(LlamaConfig(256, 128, 3, 4, 4, 352)),
        fsdp_unit_modules=[Block],
        mixed_precision_policy=MixedPrecisionPolicy(**policy),
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=5e-4), flat=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    mine = slice(rank * BATCH // RANKS, (rank + 1) * BATCH // RANKS)
    for step in range(steps):
        tokens, targets = text.batch(step, BATCH)
        model(tokens[mine], targets[mine]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = [model(*held_out.batch(number, BATCH)).item() for number in range(16)]
    return sum(losses) / len(losses)


def work(rank: int, store: str, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    results: dict[str, list[float]] = {}
    for name, policy in FORMATS.items():
        results[name] = [trained(policy, seed, steps, rank) for seed in SEEDS]
        if rank == 0:
            less = [loss - exact for loss, exact in zip(results[name], results["float32"], strict=True)]
            shown = "  ".join(
                f"{loss:.4f} ({difference:+.4f})" for loss, difference in zip(results[name], less, strict=True)
            )
            print(f"{name:28} {shown}", flush=True)
    if rank == 0 and out:
        about = [
            f"machine: {platform.machine()} CPU, {os.cpu_count()} cores",
            f"versions: torch {torch.__version__}, Python {platform.python_version()}",
            f"command: python benchmarks/gradient_formats.py --steps {steps}",
            f"model: Llama of width 128, 3 layers; {BATCH} x {LENGTH} bytes per step on {RANKS} ranks; AdamW",
            f"date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        ]
        Path(out).write_text(json.dumps({"about": about, "steps": steps, "losses by seed": results}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", default="", help="a JSON file to write")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(f"{folder}/store", given.steps, given.out), nprocs=RANKS)


if __name__ == "__main__":
    main()
