"""``MegatronFSDP(module, dist_index, ...)``: a model sharded by the class itself, as Megatron-Core's adapter does."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mfsdp_compile.distributed_index import FSDPDistributedIndex
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, PolicyArgument
from mfsdp_compile.sharding_arguments import Arguments, shard_by

from .settings import DistributedDataParallelConfig
from .translation import sharding_arguments
from .validation import validate

_BOTH = {
    "keep_fp8_transpose_cache": "keep_fp8_transpose_cache",
    "nccl_ub": "nccl_ub",
    "fsdp_double_buffer": "fsdp_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail": "fsdp_db_use_persist_buf_on_alloc_fail",
    "disable_symmetric_registration": "disable_symmetric_registration",
    "report_nan_in_param_grad": "check_for_nan_in_grad",
    "enable_fine_grained_param_gather_hook": "megatron_fsdp_enable_fine_grained_param_gather",
    "enable_fine_grained_param_gather_backward_hook": "megatron_fsdp_enable_fine_grained_param_gather",
}
"""Arguments that are also settings of ``ddp_config``, with the setting's name. Either turns them on."""


def shard_by_index(
    module: nn.Module,
    dist_index: Any,
    ddp_config: Any,
    mixed_precision_policy: PolicyArgument,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None,
    disable_bucketing: bool,
    device: torch.device | None,
    fine_grained_recurse_module_types: Sequence[type[nn.Module]] | None,
    **flags: bool,
) -> tuple[ShardedModel, FSDPDistributedIndex, Any]:
    """Shard a model by the arguments of the constructor of :class:`~mfsdp_compile.MegatronFSDP`, which describes them.

    Returns:
        What owns its buckets, the ranks that it is sharded over, and the settings that it was sharded with.
    """
    if fine_grained_recurse_module_types is not None:
        raise NotImplementedError(
            "fine_grained_recurse_module_types is not implemented: modules inside of units are gathered one by one, "
            "and none together with its children. Leave it at None, or make units of these modules."
        )
    index = FSDPDistributedIndex.of(dist_index)
    if index is None:
        raise TypeError(
            f"MegatronFSDP takes the ranks as an FSDPDistributedIndex, got a {type(dist_index).__name__}: "
            "MegatronFSDP(module, FSDPDistributedIndex(device_mesh, dp_shard_dim=...), ddp_config). For a device mesh, "
            "call fully_shard_model(module, device_mesh=..., dp_shard_dim=..., fsdp_unit_modules=[...])."
        )
    ddp = copy.copy(ddp_config) if ddp_config is not None else DistributedDataParallelConfig()
    ddp.use_megatron_fsdp = True
    for argument, setting in _BOTH.items():
        if flags[argument]:
            setattr(ddp, setting, True)
    outer = index.get_outer_fsdp_group()
    ddp.num_distributed_optimizer_instances = outer.size() if outer is not None else 1
    if index.hsdp_outer_dp_shard:
        ddp.outer_dp_sharding_strategy = "optim"
    model = SimpleNamespace(
        calculate_per_token_loss=flags["calculate_per_token_loss"],
        init_model_with_meta_device=flags["init_model_with_meta_device"],
    )
    validate(SimpleNamespace(model=model, ddp=ddp))
    arguments = sharding_arguments(model, ddp)
    if mixed_precision_policy != MixedPrecisionPolicy():
        if arguments["mixed_precision_policy"] != MixedPrecisionPolicy():
            raise ValueError(
                f"MegatronFSDP: ddp_config says {arguments['mixed_precision_policy']}, and mixed_precision_policy says "
                f"{mixed_precision_policy}. Pass the dtypes in only one of them."
            )
        arguments["mixed_precision_policy"] = mixed_precision_policy
    arguments["sync_model_each_microbatch"] = flags["sync_model_each_microbatch"]
    ranks = {name: value for name, value in vars(index).items() if name != "hsdp_outer_dp_shard"}
    given = Arguments(fsdp_unit_modules=fsdp_unit_modules, device=device, **ranks, **arguments)
    return *shard_by(module, given), ddp
