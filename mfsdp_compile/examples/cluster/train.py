"""Trains on any number of nodes, and goes on from its last checkpoint on any other number.

    torchrun --nproc-per-node=2 -m mfsdp_compile.examples.cluster.train --folder runs/a

Every launcher that sets torchrun's variables starts it: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
``MASTER_ADDR``, ``MASTER_PORT``. All nodes must see the same ``--folder``.

``--batch`` is the batch of the whole job, and data depend on the step alone: on another number of ranks, a step
computes the same gradient, except for rounding. On SIGTERM or SIGUSR1 to any rank, all save after the current step and
exit with 143: a launcher then knows that training is not finished.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints

from ...demo.corpus import ByteText, standard_library
from ...models.llama import Block, Llama, LlamaConfig

STOPPED = 128 + signal.SIGTERM


def main(words: Sequence[str] | None = None) -> int:
    """Train.

    Args:
        words: Arguments. None: those of the command line.

    Returns:
        The exit code: 0 after the last step, 143 if a signal has stopped training before it.

    Raises:
        ValueError: The ranks do not divide the batch.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", required=True, help="for checkpoints; if it has some, go on from the last")
    parser.add_argument("--steps", type=int, default=100, help="of the whole training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all ranks (default: %(default)s)")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--sharding", choices=SHARDING, default="fsdp", help="(default: %(default)s)")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"], help="inner compiler")
    given = parser.parse_args(words)

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():  # Ray Train has done it
        dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if given.batch % ranks:
        raise ValueError(f"{ranks} ranks do not divide a batch of {given.batch}: choose another --batch")

    torch.manual_seed(0)  # all ranks build the same model
    model = fully_shard_model(
        Llama(LlamaConfig(width=128, layers=4, heads=4, kv_heads=2, hidden=344)),
        fsdp_unit_modules=[Block],
        **sharding(given.sharding, kind, ranks),
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    compiled = torch.compile(model, backend="mfsdp", options={"inner": given.inner})
    text = ByteText(standard_library(), given.length)
    device = next(model.parameters()).device

    code = 0
    stop = Stop()  # until here, a signal ends the process at once
    with Checkpoints(given.folder, keep=2) as checkpoints:
        restored = checkpoints.load(model, optimizer)
        done = (restored.step or 0) if restored is not None else 0
        for step in range(done + 1, given.steps + 1):
            tokens, targets = (part.chunk(ranks)[rank].to(device) for part in text.batch(step, given.batch))
            loss = compiled(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            shared = torch.stack([loss.detach(), loss.new_tensor(float(stop.requested))])
            dist.all_reduce(shared)  # ranks get signals at different times, and must end after the same step
            mean, stopping = shared[0].item() / ranks, shared[1].item() > 0
            if rank == 0:
                print(f"step {step}: loss {mean:.6f}, {ranks} ranks", flush=True)
            if stopping and step < given.steps:
                checkpoints.save(step, model, optimizer)
                code = STOPPED
                break
            if step % given.save_every == 0 or step == given.steps:
                checkpoints.save_async(step, model, optimizer)
    dist.destroy_process_group()
    return code


SHARDING = ("fsdp", "hsdp", "hfsdp")


def sharding(how: str, kind: str, ranks: int) -> dict[str, Any]:
    """Return arguments of ``fully_shard_model``.

    Args:
        how: ``"fsdp"``: over all ranks. ``"hsdp"``: over those of a node, with a copy in each node. ``"hfsdp"``: the
            same, with optimizer state over all.
        kind: Type of device.
    """
    in_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if how == "fsdp" or in_node == ranks:
        return {"device_mesh": init_device_mesh(kind, (ranks,), mesh_dim_names=("dp",)), "dp_shard_dim": "dp"}
    mesh = init_device_mesh(kind, (ranks // in_node, in_node), mesh_dim_names=("nodes", "dp"))
    every = mesh[("nodes", "dp")]._flatten("all").get_group()
    found = {"device_mesh": mesh, "dp_shard_dim": "dp", "dp_outer_dim": "nodes", "hybrid_fsdp_group": every}
    return found | ({"outer_dp_sharding_strategy": "optim"} if how == "hfsdp" else {})


class Stop:
    """Whether a signal has asked this process to end: SIGTERM from torchrun and Kubernetes, SIGUSR1 from Slurm."""

    def __init__(self) -> None:
        self.requested = False
        if threading.current_thread() is threading.main_thread():  # Ray Train runs workers in other threads
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


if __name__ == "__main__":
    sys.exit(main())
