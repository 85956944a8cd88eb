"""A training that prints a digest of its parameters. Ranks: 2 x 2, with dropout, clipped."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_compile import MixedPrecisionPolicy, deterministic, fully_shard_model, fully_shard_optimizer, seed_step
from mfsdp_compile.diagnostics.doctor import mesh_arguments


def main() -> None:
    dist.init_process_group("gloo")
    deterministic()
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)]
    model = fully_shard_model(
        nn.Sequential(*blocks),
        fsdp_unit_modules=[nn.Sequential],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.bfloat16),
        **mesh_arguments("HSDP optim_grads_params"),
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    for step in range(4):
        seed_step(1, step)
        batch = torch.randn(8, 32, dtype=torch.bfloat16)
        compiled(batch).float().square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.full_tensor().detach().view(torch.uint8).numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"digest {digest.hexdigest()} norm {norm.item().hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
