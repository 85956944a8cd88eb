"""Translation of Megatron's settings to arguments of ``fully_shard_model``."""

from __future__ import annotations

from typing import Any

import torch

from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy

from .settings import DistributedDataParallelConfig, TransformerConfig, known

_SAME_NAME = (
    "outer_dp_sharding_strategy",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "average_in_collective",
    "keep_fp8_transpose_cache",
    "nccl_ub",
    "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration",
    "fsdp_manual_registration",
)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "auto": None}


def sharding_arguments(config: Any, ddp_config: Any) -> dict[str, Any]:
    """Return the arguments of ``fully_shard_model`` that settings determine, except for ranks and units.

    Args:
        config: Megatron's model configuration, or a :class:`~.settings.TransformerConfig`.
        ddp_config: Megatron's, or a :class:`~.settings.DistributedDataParallelConfig`. Already validated.

    Raises:
        ValueError: If two settings give different dtypes for the same thing.
    """

    def ddp(name: str) -> Any:
        return getattr(ddp_config, name, known(DistributedDataParallelConfig)[name].default)

    def model(name: str) -> Any:
        return getattr(config, name, known(TransformerConfig)[name].default)

    return {
        "zero_dp_strategy": ddp("data_parallel_sharding_strategy"),
        "init_model_with_meta_device": model("init_model_with_meta_device"),
        "calculate_per_token_loss": model("calculate_per_token_loss"),
        "mixed_precision_policy": _precision(ddp),
        "report_nan_in_param_grad": ddp("check_for_nan_in_grad"),
        "use_decoupled_grad": ddp("megatron_fsdp_use_decoupled_grad"),
        "cuda_graph_mode": ddp("megatron_fsdp_cuda_graph_mode"),
        "enable_fine_grained_param_gather": ddp("megatron_fsdp_enable_fine_grained_param_gather"),
        "maxpool_double_buffer": ddp("megatron_fsdp_max_pool_double_buffer"),
        "sync_model_each_microbatch": False,  # Megatron's training loops mark the end of a step
        **{name: ddp(name) for name in _SAME_NAME},
    }


def ddp_config_of(sharded: ShardedModel) -> DistributedDataParallelConfig:
    """Describe how a model is sharded by Megatron's settings. Those that buckets do not show are at their defaults."""
    topology, precision = sharded.topology, sharded.precision.default
    return DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=topology.strategy.name.lower(),
        outer_dp_sharding_strategy=topology.outer_strategy.name.lower(),
        num_distributed_optimizer_instances=topology.outer.size if topology.outer is not None else 1,
        megatron_fsdp_main_params_dtype=precision.main_params_dtype,
        megatron_fsdp_main_grads_dtype=precision.main_grads_dtype,
        megatron_fsdp_grad_comm_dtype=precision.grad_comm_dtype,
        reduce_scatter_with_fp32_accumulation=precision.grad_sum_dtype is not None,
        overlap_grad_reduce=sharded.overlap.reductions,
        overlap_param_gather=sharded.overlap.gathers,
        fsdp_double_buffer=sharded.comm_buffer_bytes() > 0,
        nccl_ub=sharded.registration is not None,
        megatron_fsdp_cuda_graph_mode=sharded.keeps_gradients,
    )


def _precision(ddp: Any) -> MixedPrecisionPolicy:
    main_params, main_grads, grad_comm = (
        _dtype(f"megatron_fsdp_{name}", ddp(f"megatron_fsdp_{name}"))
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
    )
    if not ddp("preserve_fp32_weights"):
        if main_params not in (None, torch.float32):
            raise ValueError(
                f"preserve_fp32_weights=False means megatron_fsdp_main_params_dtype=None, which is {main_params}. "
                "Pass only one of them."
            )
        main_params = None
    if ddp("grad_reduce_in_fp32"):
        for name, dtype in (("main_grads_dtype", main_grads), ("grad_comm_dtype", grad_comm)):
            if dtype not in (None, torch.float32):
                raise ValueError(
                    f"grad_reduce_in_fp32=True means megatron_fsdp_{name}=torch.float32, which is {dtype}. Pass only "
                    "one of them (--grad-reduce-in-bf16 sets grad_reduce_in_fp32=False)."
                )
        main_grads = grad_comm = torch.float32
    sums = torch.float32 if ddp("reduce_scatter_with_fp32_accumulation") else None
    return MixedPrecisionPolicy(main_params, main_grads, grad_comm, grad_sum_dtype=sums)


def _dtype(name: str, value: Any) -> torch.dtype | None:
    if isinstance(value, str):
        if value not in _DTYPES:
            raise ValueError(f"{name} takes {', '.join(map(repr, _DTYPES))} or a torch.dtype; got {value!r}")
        return _DTYPES[value]
    return value
