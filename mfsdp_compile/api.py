"""``fully_shard_model``, ``fully_shard_optimizer``, ``fully_shard``: what users of Megatron-FSDP already type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile.runtime import optimizer as optimizers
from mfsdp_compile.runtime.model import Precision, ShardedModel

from .policy import MixedPrecisionPolicy, ShardingStrategy
from .wrapper import MegatronFSDP

__all__ = ["fully_shard", "fully_shard_model", "fully_shard_optimizer"]


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: dist.ProcessGroup | None = None,
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: dist.ProcessGroup | None = None,
    expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | str | None = None,
    zero_dp_strategy: ShardingStrategy | str | int = 3,
    outer_dp_sharding_strategy: ShardingStrategy | str | int = 0,
    device: torch.device | str | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
    *,
    check_values: bool = True,
    preserve_fp32_weights: bool | None = None,
    grad_reduce_in_fp32: bool | None = None,
) -> MegatronFSDP:
    """Shard a model over data-parallel ranks, in place, and wrap it. Collective: every rank of the mesh calls it.

    Afterwards ``model.parameters()`` are DTensors, this rank's rows of every parameter; build the optimizer from them.
    The model trains with eager hooks, or compiled: ``torch.compile(model, backend="mfsdp")``.

    Args:
        module: the model, whole and with the same values on every rank. Freeze parameters, and change its dtype,
            before.
        device_mesh: the ranks to shard over; None: all ranks, on the device type of the default process group.
        dp_shard_dim: name of the mesh dimension to shard over; needed if the mesh has several.
        fsdp_unit_modules: classes, or import paths of classes, whose instances are gathered and released as one: a
            transformer's layer. ``"auto"``: the model's repeated blocks. None: the whole model is one unit.
        zero_dp_strategy: what is sharded; 3 or ``"optim_grads_params"``, everything, is implemented.
        outer_dp_sharding_strategy: for hybrid sharding; 0 or ``"no_shard"`` is implemented.
        device: where the shards live; None: the current device of the mesh's type.
        mixed_precision_policy: dtypes of shards and gradients. The default keeps float32 shards.
        check_values: compare the values of parameters between ranks too, not only names, shapes and dtypes; False if
            they differ on purpose.
        preserve_fp32_weights: older name for ``mixed_precision_policy.main_params_dtype``: True is float32, False None.
        grad_reduce_in_fp32: older name for ``mixed_precision_policy.main_grads_dtype``: True is float32, False None.

    The other arguments are Megatron-FSDP's. They raise NotImplementedError when set to anything but their default.

    Returns:
        The wrapped model; ``.module`` is ``module``.

    Raises:
        RuntimeError: there is no process group, or ranks hold different models (the message says which and where).
        ValueError, TypeError: an argument is wrong; the model is as it was.
    """
    given = dict(locals())
    _refuse_unimplemented(given)
    strategy = ShardingStrategy.of(zero_dp_strategy, "zero_dp_strategy")
    if strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS:
        raise NotImplementedError(
            f"zero_dp_strategy={zero_dp_strategy!r} is not implemented yet; 3 ('optim_grads_params') is."
        )
    outer = ShardingStrategy.of(outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
    if outer is not ShardingStrategy.NO_SHARD:
        raise NotImplementedError(
            f"outer_dp_sharding_strategy={outer_dp_sharding_strategy!r} is not implemented yet; 0 ('no_shard') is."
        )
    precision = _precision(mixed_precision_policy, preserve_fp32_weights, grad_reduce_in_fp32)
    if isinstance(module, MegatronFSDP):
        raise ValueError(
            "The model is sharded already: it is a MegatronFSDP. Pass the module that is inside only once."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard_model takes an nn.Module, got a {type(module).__name__}")
    mesh = _data_parallel_mesh(device_mesh, dp_shard_dim)
    sharded = ShardedModel(module, fsdp_unit_modules, mesh, precision, _device(device, mesh), check_values)
    return MegatronFSDP(module, sharded)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True
) -> torch.optim.Optimizer:
    """Give an optimizer over sharded parameters Megatron-FSDP's arguments, in place.

    ``optimizer.step(closure=None, *, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)``
    returns what the optimizer's own ``step`` does. ``optimizer.zero_grad(set_to_none=True, *, zero_grad_buffer=True)``
    clears, with ``zero_grad_buffer``, also gradients of the model that the optimizer does not hold. Optimizers that are
    not extended train the same.

    Args:
        optimizer: built from ``model.parameters()`` after :func:`fully_shard_model`.

    Returns:
        The same optimizer.

    Raises:
        ValueError: it has no parameters, or some that are not sharded.
    """
    if not preproc_state_dict_for_dcp_ckpt:
        raise NotImplementedError("preproc_state_dict_for_dcp_ckpt=False is not implemented.")
    return optimizers.extend(optimizer)


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and an optimizer that was built for it.

    The optimizer keeps its parameter groups with all their settings, and its state: the values that it has gathered for
    whole parameters are cut like the parameters.

    Args:
        module: as for :func:`fully_shard_model`.
        optimizer: whose parameters are ``module``'s.
        *args, **kwargs: the other arguments of :func:`fully_shard_model`.

    Returns:
        The wrapped model and the same optimizer, extended as by :func:`fully_shard_optimizer`.

    Raises:
        ValueError: the optimizer holds other parameters, or state that cannot be cut; otherwise as
            :func:`fully_shard_model`. Nothing is changed then.
    """
    names = optimizers.named_groups(optimizer, module)
    model = fully_shard_model(module, *args, **kwargs)
    optimizers.rebind(optimizer, names, module)
    return model, fully_shard_optimizer(optimizer)


_UNIMPLEMENTED: Mapping[str, tuple[Any, str]] = {
    "dp_outer_dim": (None, "hybrid sharding"),
    "tp_dim": (None, "tensor parallelism"),
    "hybrid_fsdp_group": (None, "hybrid sharding"),
    "hybrid_fsdp_expt_group": (None, "expert parallelism"),
    "expt_device_mesh": (None, "expert parallelism"),
    "fsdp_group_ag": (None, "a separate group for gathers"),
    "expt_fsdp_group_ag": (None, "expert parallelism"),
    "init_model_with_meta_device": (False, "initialisation from the meta device"),
    "overlap_grad_reduce": (True, "sharding without overlap"),
    "overlap_param_gather": (True, "sharding without overlap"),
    "sync_model_each_microbatch": (True, "deferred gradient synchronisation"),
    "preproc_state_dict_for_dcp_ckpt": (True, "another checkpoint format"),
    "report_nan_in_param_grad": (False, "the search for NaN in gradients"),
    "average_in_collective": (False, "the choice of the averaging operator"),
    "disable_bucketing": (False, "sharding without buckets"),
    "calculate_per_token_loss": (False, "summing gradients without averaging"),
    "keep_fp8_transpose_cache": (False, "fp8 parameters"),
    "nccl_ub": (False, "NCCL user buffers"),
    "fsdp_double_buffer": (False, "persistent communication buffers"),
    "fsdp_db_use_persist_buf_on_alloc_fail": (False, "persistent communication buffers"),
    "disable_symmetric_registration": (False, "NCCL user buffers"),
    "enable_fine_grained_param_gather": (False, "gathering module by module"),
    "use_decoupled_grad": (False, "decoupled gradients"),
    "cuda_graph_mode": (False, "CUDA graphs"),
    "maxpool_double_buffer": (False, "persistent communication buffers"),
}


def _refuse_unimplemented(given: Mapping[str, Any]) -> None:
    for name, (default, what) in _UNIMPLEMENTED.items():
        if given[name] is not default:
            raise NotImplementedError(
                f"{name}={given[name]!r}: {what} is not implemented yet; leave {name} at its default, {default!r}."
            )


def _precision(
    policy: MixedPrecisionPolicy, preserve_fp32_weights: bool | None, grad_reduce_in_fp32: bool | None
) -> Precision:
    default = MixedPrecisionPolicy()
    main_params, main_grads = policy.main_params_dtype, policy.main_grads_dtype
    if preserve_fp32_weights is not None:
        wanted = torch.float32 if preserve_fp32_weights else None
        if main_params not in (default.main_params_dtype, wanted):
            raise ValueError(
                f"preserve_fp32_weights={preserve_fp32_weights} means main_params_dtype={wanted}, but "
                f"mixed_precision_policy says {main_params}. Give one of them."
            )
        main_params = wanted
    if grad_reduce_in_fp32 is not None:
        wanted = torch.float32 if grad_reduce_in_fp32 else None
        if main_grads not in (default.main_grads_dtype, wanted):
            raise ValueError(
                f"grad_reduce_in_fp32={grad_reduce_in_fp32} means main_grads_dtype={wanted}, but "
                f"mixed_precision_policy says {main_grads}. Give one of them."
            )
        main_grads = wanted
    if main_grads is not None or policy.grad_comm_dtype is not None:
        name = "main_grads_dtype" if main_grads is not None else "grad_comm_dtype"
        raise NotImplementedError(f"mixed_precision_policy.{name} is not implemented yet; leave it at None.")
    return Precision(main_params)


def _data_parallel_mesh(device_mesh: DeviceMesh | None, dp_shard_dim: str | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard_model needs a process group. Call torch.distributed.init_process_group first, and start the "
            "program with torchrun --nproc-per-node=N; a single process can shard over itself."
        )
    if device_mesh is None:
        device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=(dp_shard_dim or "fsdp",))
    if dp_shard_dim is None:
        if device_mesh.ndim > 1:
            raise ValueError(
                f"The device mesh has {device_mesh.ndim} dimensions, {device_mesh.mesh_dim_names}: name the one to "
                "shard over with dp_shard_dim."
            )
        return device_mesh
    try:
        mesh = device_mesh[dp_shard_dim]
    except (KeyError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"dp_shard_dim={dp_shard_dim!r} is not a dimension of the device mesh, which has "
            f"{device_mesh.mesh_dim_names}. ({error})"
        ) from error
    return mesh


def _device(device: torch.device | str | None, mesh: DeviceMesh) -> torch.device:
    chosen = torch.device(device if device is not None else mesh.device_type)
    if chosen.type != mesh.device_type:
        raise ValueError(
            f"device={str(device)!r}, but the device mesh is of type {mesh.device_type!r}: parameters are gathered "
            "where they live."
        )
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
