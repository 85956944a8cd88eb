"""A plain training loop over a sharded, compiled model, which resumes from its last checkpoint.

    torchrun --nproc-per-node=2 -m mfsdp_compile.examples.plain_loop --steps 20

Runs on GPUs if there are any, with one process per GPU, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints

from ..demo.corpus import Windows, standard_library
from ..models.llama import Block, Llama, LlamaConfig

__all__ = ["batches", "main", "train"]

Batch = dict[str, Tensor]


def batches(data: Dataset[Batch], batch_size: int) -> DataLoader[Batch]:
    """Return this rank's batches: every n-th batch of the data, for n ranks."""
    every = list(BatchSampler(SequentialSampler(data), batch_size, drop_last=True))
    return DataLoader(data, batch_sampler=every[dist.get_rank() :: dist.get_world_size()])


def train(
    model: nn.Module,
    units: list[Any],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    loader: Iterable[Batch],
    *,
    steps: int,
    lr: float = 2e-3,
    folder: str | None = None,
    save_every: int = 10,
    compile_options: dict[str, Any] | None = None,
) -> list[float]:
    """Train until ``steps`` steps have been taken.

    If ``folder`` contains a checkpoint, training resumes from it, and its steps count.

    Returns:
        The mean loss over ranks of each step taken in this run.
    """
    model = fully_shard_model(model, fsdp_unit_modules=units)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (steps - step) / steps))
    compiled = torch.compile(model, backend="mfsdp", options=compile_options)

    checkpoints = Checkpoints(folder, keep=2) if folder is not None else None
    restored = checkpoints.load(model, optimizer) if checkpoints is not None else None
    taken = 0
    if restored is not None:
        schedule.load_state_dict(restored.extra["schedule"])
        taken = restored.extra["taken"]

    device = next(model.parameters()).device
    losses = []
    for step, batch in enumerate(loader):
        if step < taken:
            continue
        loss = loss_of(compiled, {name: value.to(device) for name, value in batch.items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if checkpoints is not None and ((step + 1) % save_every == 0 or step + 1 == steps):
            extra = {"schedule": schedule.state_dict(), "taken": step + 1}
            checkpoints.save_async(step + 1, model, optimizer, extra=extra)
        if step + 1 == steps:
            break
    if checkpoints is not None:
        checkpoints.wait()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", help="for checkpoints; if it has some, go on from the last")
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager"])
    given = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group()

    torch.manual_seed(0)  # all ranks build the same model
    model = Llama(LlamaConfig(width=128, layers=4, heads=4, kv_heads=2, hidden=344))

    def loss_of(call: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = call(batch["input_ids"][:, :-1], batch["labels"][:, 1:])
        return loss

    data = Windows(standard_library(), length=129, count=4 * dist.get_world_size() * given.steps)
    losses = train(
        model,
        [Block],
        loss_of,
        batches(data, 4),
        steps=given.steps,
        folder=given.folder,
        compile_options={"inner": given.inner},
    )
    if dist.get_rank() == 0:
        for number, loss in enumerate(losses, given.steps - len(losses) + 1):
            print(f"step {number}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
