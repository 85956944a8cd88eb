"""A training job in the style of torchtitan: a TOML file says how the model is divided, compiled, trained and saved.

    torchrun --nproc-per-node=2 -m mfsdp_compile.examples.torchtitan_style
    torchrun --nproc-per-node=4 -m mfsdp_compile.examples.torchtitan_style --parallelism.tensor_parallel_degree 2

Runs on GPUs if there are any, with one process per GPU, otherwise on the CPU. For another model, write another
``parallelize``.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints

from ..demo.corpus import ByteText, standard_library
from ..models import llama
from .job_config import JobConfig, LRScheduler, Parallelism, parse

FLAVORS = {
    "debugmodel": llama.LlamaConfig(width=128, layers=4, heads=4, kv_heads=2, hidden=344),
    "30M": llama.LlamaConfig(width=512, layers=8, heads=8, kv_heads=4, hidden=1408),
}


def build_mesh(parallelism: Parallelism) -> DeviceMesh:
    """Return the mesh ``("dp_replicate", "dp_shard", "tp")``.

    Raises:
        ValueError: If the product of the degrees is not the number of ranks.
    """
    replicate, shard = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    tensor, ranks = parallelism.tensor_parallel_degree, dist.get_world_size()
    if shard == -1:
        shard = ranks // (replicate * tensor)
    if min(replicate, shard, tensor) < 1 or replicate * shard * tensor != ranks:
        raise ValueError(
            f"[parallelism]: data_parallel_replicate_degree={replicate}, data_parallel_shard_degree={shard} and "
            f"tensor_parallel_degree={tensor} do not multiply to {ranks} ranks."
        )
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    names = ("dp_replicate", "dp_shard", "tp")
    return init_device_mesh(device_type, (replicate, shard, tensor), mesh_dim_names=names)


def parallelize(model: llama.Llama, mesh: DeviceMesh, config: JobConfig) -> tuple[MegatronFSDP, nn.Module]:
    """Apply tensor parallelism, activation checkpointing, data parallelism and compilation, in this order.

    Returns:
        The sharded model, and the module to call.

    Raises:
        ValueError: If a value in the configuration is unknown.
    """
    parallelism, ac = config.parallelism, config.activation_checkpoint
    if parallelism.tensor_parallel_degree > 1:
        llama.parallelize(model, mesh["tp"], sequence=parallelism.enable_sequence_parallel)
    every = {"none": 0, "full": 1, "selective": ac.selective_ac_option}[_one_of(ac.mode, "none", "full", "selective")]
    for number, layer in enumerate(model.layers):
        if every and number % every == 0:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    replicas: dict[str, Any] = {}
    if parallelism.data_parallel_replicate_degree > 1:
        group = mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()
        replicas = {"dp_outer_dim": "dp_replicate", "hybrid_fsdp_group": group}
    model.to(getattr(torch, _one_of(config.training.mixed_precision_param, "bfloat16", "float32")))
    reduce_dtype = getattr(torch, _one_of(config.training.mixed_precision_reduce, "bfloat16", "float32"))
    sharded = fully_shard_model(
        model,
        mesh,
        dp_shard_dim="dp_shard",
        fsdp_unit_modules=[llama.Block],
        mixed_precision_policy=MixedPrecisionPolicy(grad_comm_dtype=reduce_dtype),
        **replicas,
    )
    reshard = _one_of(parallelism.fsdp_reshard_after_forward, "default", "always", "never")
    if config.compile.enable:
        schedule = {"reshard_after_forward": reshard != "never", "keep_last": reshard != "always"}
        return sharded, torch.compile(sharded, backend="mfsdp", options={"inner": config.compile.backend, **schedule})
    if reshard != "default":
        raise ValueError(f"[parallelism]: fsdp_reshard_after_forward={reshard!r} takes [compile] enable = true.")
    return sharded, sharded


def train(config: JobConfig) -> list[float]:
    """Train until the configured number of steps has been taken, including those before the checkpoint.

    Returns:
        The mean loss over data-parallel ranks of each step taken in this run.
    """
    mesh = build_mesh(config.parallelism)
    dp = mesh["dp_replicate", "dp_shard"]
    ranks, (replica, shard) = dp.size(), dp.get_coordinate()
    rank = replica * dp.size(1) + shard
    training = config.training
    size = training.global_batch_size if training.global_batch_size != -1 else training.local_batch_size * ranks
    microbatches, rest = divmod(size, training.local_batch_size * ranks)
    if rest or not microbatches:
        raise ValueError(
            f"[training]: global_batch_size={size} is no multiple of local_batch_size={training.local_batch_size} "
            f"times {ranks} data-parallel ranks."
        )

    torch.manual_seed(0)  # all ranks build the same model
    model, call = parallelize(llama.Llama(FLAVORS[_one_of(config.model.flavor, *FLAVORS)]), mesh, config)
    kind = optimizer_class(config.optimizer.name)
    optimizer = kind(model.parameters(), lr=config.optimizer.lr, weight_decay=config.optimizer.weight_decay)
    optimizer = fully_shard_optimizer(optimizer)
    factor = functools.partial(lr_factor, config.lr_scheduler, training.steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    folder = Path(config.job.dump_folder) / config.checkpoint.folder
    checkpoints = Checkpoints(folder, keep=config.checkpoint.keep_latest_k)
    restored = checkpoints.load(model, optimizer) if config.checkpoint.enable else None
    if restored is not None:
        schedule.load_state_dict(restored.extra["schedule"])

    text = ByteText(standard_library(), training.seq_len)
    device = next(model.parameters()).device
    losses = []
    for step in range((restored.step or 0) if restored else 0, training.steps):
        tokens, targets = (part.chunk(ranks)[rank].to(device) for part in text.batch(step, size))
        total = torch.zeros((), device=device)
        for number in range(microbatches):
            model.is_last_microbatch = number == microbatches - 1
            loss = call(tokens.chunk(microbatches)[number], targets.chunk(microbatches)[number]) / microbatches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        for group in mesh["dp_replicate"].get_group(), mesh["dp_shard"].get_group():
            dist.all_reduce(total, group=group)
        losses.append(total.item() / ranks)
        if config.checkpoint.enable and ((step + 1) % config.checkpoint.interval == 0 or step + 1 == training.steps):
            checkpoints.save_async(step + 1, model, optimizer, extra={"schedule": schedule.state_dict()})
    checkpoints.wait()
    return losses


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of an optimizer by name.

    Raises:
        ValueError: If ``torch.optim`` has no optimizer of this name.
    """
    kinds = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    return kinds[_one_of(name, *kinds)]


def lr_factor(config: LRScheduler, steps: int, step: int) -> float:
    """Return the factor of the learning rate: linear warmup, stable, then decay to ``min_lr_factor``.

    Raises:
        ValueError: If ``decay_type`` is unknown.
    """
    decay = round(steps * config.decay_ratio) if config.decay_ratio is not None else steps - config.warmup_steps
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if step < steps - decay:
        return 1.0
    progress = (step + 1 - (steps - decay)) / decay
    kind = _one_of(config.decay_type, "linear", "sqrt", "cosine")
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.min_lr_factor + (1 - config.min_lr_factor) * left[kind]


def _one_of(value: str, *known: str) -> str:
    if value not in known:
        raise ValueError(f"The configuration has {value!r}, where one of {', '.join(known)} is known.")
    return value


def main() -> None:
    config = parse(sys.argv[1:], Path(__file__).with_suffix(".toml"))
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0))
    dist.init_process_group()
    losses = train(config)
    if dist.get_rank() == 0:
        for number, loss in enumerate(losses, config.training.steps - len(losses) + 1):
            print(f"step {number}: loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
