"""torchtitan: a ``parallelize_fn`` that shards with this package instead of FSDP2.

::

    spec = dataclasses.replace(model_registry("8B"), parallelize_fn=parallelize)
    Trainer.Config(model_spec=spec, ...)

Data-parallel and hybrid sharding, activation checkpointing, compilation, mixed precision and offload to host memory
follow the job's configuration. torchtitan's trainer, optimizers and checkpoints need no changes. The loss may:
``ChunkedLossWrapper`` calls the model's head outside of the model's forward, where its parameters are sharded. Use
``CrossEntropyLoss``.
Written for torchtitan 0.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims

from mfsdp_compile.api import fully_shard_model
from mfsdp_compile.backend.options import INNER_COMPILERS
from mfsdp_compile.distributed_index import hybrid_arguments
from mfsdp_compile.runtime.init.meta import Later
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Shard and compile a decoder on the meta device. torchtitan calls this before ``init_weights``.

    Returns:
        ``model``, compiled in place. Its parameters are shards without values; names are unchanged.

    Raises:
        ValueError: If the job asks for anything that is not supported. The message lists all of it.
    """
    _refuse(parallel_dims, training, parallelism, compile_config)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    compute_dtype, main_dtype, reduce_dtype = (
        getattr(torch, name)
        for name in (training.mixed_precision_param, training.dtype, training.mixed_precision_reduce)
    )
    for param in model.parameters():
        param.data = param.data.to(compute_dtype)  # has no values yet: init_weights fills the shards, in the main dtype
    fully_shard_model(
        model,
        **_mesh(parallel_dims),
        fsdp_unit_modules=list({type(block) for block in model.layers.values()}),
        mixed_precision_policy=MixedPrecisionPolicy(main_dtype, grad_comm_dtype=reduce_dtype),
        calculate_per_token_loss=True,  # the loss is divided by the tokens of all ranks
        init_model_with_meta_device=True,
        init_fn=Later(),
        check_values=False,
        offload_policy=CPUOffloadPolicy() if training.enable_cpu_offload else None,
    )
    if _compiles(compile_config):
        options = {
            "inner": compile_config.backend,
            "reshard_after_forward": parallelism.fsdp_reshard_after_forward != "never",
            "keep_last": parallelism.fsdp_reshard_after_forward != "always",
        }
        model.compile(backend="mfsdp", options=options)
    return model


def _compiles(compile_config: CompileConfig) -> bool:
    return compile_config.enable and "model" in compile_config.components


def _mesh(parallel_dims: ParallelDims) -> dict[str, Any]:
    shard = "fsdp" if parallel_dims.spmd_backend == "partial_dtensor" else "dp_shard"
    if parallel_dims.dp_replicate == 1:
        return {"device_mesh": parallel_dims.get_mesh(shard)}
    return hybrid_arguments(parallel_dims.get_mesh(["dp_replicate", shard]), shard, "dp_replicate")


def _refuse(
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
) -> None:
    degrees = {
        "tensor_parallel_degree": parallel_dims.tp,
        "context_parallel_degree": parallel_dims.cp,
        "pipeline_parallel_degree": parallel_dims.pp,
        "expert_parallel_degree": parallel_dims.ep,
    }
    complaints = [
        f"parallelism.{name}={degree}: only 1 is supported here" for name, degree in degrees.items() if degree > 1
    ]
    if parallelism.enable_fsdp_symm_mem:
        complaints.append("parallelism.enable_fsdp_symm_mem: there are no symmetric-memory collectives")
    if not training.disable_cuda_graphs:
        complaints.append("training.disable_cuda_graphs=False: gathers and reductions are not captured; set it to True")
    if compile_config.enable and compile_config.backend not in INNER_COMPILERS:
        complaints.append(
            f"compile.backend={compile_config.backend!r}: the compiler behind ours is one of {INNER_COMPILERS}"
        )
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard != "default" and not _compiles(compile_config):
        complaints.append(f"parallelism.fsdp_reshard_after_forward={reshard!r}: that takes compile.enable")
    if complaints:
        raise ValueError("mfsdp_compile cannot do what the job asks for:\n" + "\n".join(f"  {c}" for c in complaints))
