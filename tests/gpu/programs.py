"""How the programs of this folder begin and end: they join a process group, on their GPUs, and rank 0 writes JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_models import FAKE

from mfsdp_compile.models.llama import LlamaConfig


def llama(small: bool) -> tuple[LlamaConfig, int, int]:
    """Return the model that is timed, sequences per rank, and tokens per sequence."""
    if small:
        return LlamaConfig(vocabulary=256, width=64, layers=2, heads=4, kv_heads=4, hidden=96), 2, 16
    return LlamaConfig(vocabulary=32768, width=2048, layers=16, heads=16, kv_heads=16, hidden=5504), 4, 2048


def run(work: Callable[[int, torch.device], dict[str, Any]]) -> None:
    """Run ``work(rank, device)`` on this rank, alone or under torchrun, and write the result of rank 0 to ``argv[1]``.

    Ranks share GPUs if there are fewer. NCCL refuses two ranks of one host on one GPU; with a name of its own for each
    rank's host, it takes them for hosts that a network connects, and its kernels send through sockets.

    A result that has ``"failed"``, a list of messages that is not empty, makes the program exit with status 1.
    """
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % gpus)
    torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > gpus:
        os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_MAX_CTAS": "4"}
    if "WORLD_SIZE" in os.environ:
        # With device_id, NCCL splits the default communicator for other groups, which needs all of its ranks.
        dist.init_process_group("nccl", device_id=None if FAKE else device)
    else:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    result = work(rank, device)
    if rank == 0 and len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1))
    dist.barrier(device_ids=[device.index] if not FAKE else None)
    dist.destroy_process_group()
    for message in result.get("failed", ()):
        print(f"rank {rank}: {message}", flush=True)
    if result.get("failed"):
        raise SystemExit(1)
