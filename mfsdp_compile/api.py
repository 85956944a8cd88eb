"""``fully_shard_model``, ``fully_shard_optimizer``, ``fully_shard``: what users of Megatron-FSDP already type."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mfsdp_compile.runtime import optimizer as optimizers
from mfsdp_compile.runtime.agreement import telling_others
from mfsdp_compile.runtime.exchange import Overlap
from mfsdp_compile.runtime.experts import Experts, IsExpert, build_experts
from mfsdp_compile.runtime.layout import LayoutPolicy
from mfsdp_compile.runtime.meta import ByFunction, ByMethod, InitFn, Initialiser
from mfsdp_compile.runtime.model import ShardedModel
from mfsdp_compile.runtime.plan.meshes import build_topology, tensor_parallel_mesh
from mfsdp_compile.runtime.precision import GradientPolicy, MixedPrecisionPolicy, Scaling
from mfsdp_compile.runtime.topology import ShardingStrategy

from .wrapper import MegatronFSDP

__all__ = ["fully_shard", "fully_shard_model", "fully_shard_optimizer"]


@telling_others()
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
    whole_params: Callable[[str, nn.Parameter], bool] | None = None,
    optimizer_block_size: int = 1,
    bucket_bytes: int | None = None,
    unit_bytes: int | None = None,
    is_expert: IsExpert | None = None,
    init_fn: InitFn | Initialiser | None = None,
) -> MegatronFSDP:
    """Shard a model over data-parallel ranks, in place, and wrap it. Collective: every rank of the mesh calls it.

    Afterwards ``model.parameters()`` are DTensors, this rank's rows of every parameter; build the optimizer from them.
    The model trains with eager hooks, or compiled: ``torch.compile(model, backend="mfsdp")``.

    Args:
        module: the model, whole and with the same values on every rank. Freeze parameters, and change its dtype,
            before.
        device_mesh: the ranks to shard over; None: all ranks, on devices of the type that ``device`` says, or that the model's
            parameters are on, if the default process group has a backend for it; else on GPUs, if it has one for those.
        dp_shard_dim: name of the mesh dimension to shard over; needed if the mesh has several.
        dp_outer_dim: name of a second data-parallel dimension, around the first: its ranks hold the same shards (HSDP),
            or divide the optimizer's state further (HFSDP, with ``outer_dp_sharding_strategy="optim"``).
        tp_dim: name of the tensor-parallel mesh dimension, for models whose parameters are ordinary tensors: those marked as
            Megatron marks them (``tensor_model_parallel``, ``partition_dim``) are parts, the others the same on all its
            ranks. Parameters that are DTensors (``torch.distributed.tensor.parallel``) tell by themselves.
        hybrid_fsdp_group: the process group of all ranks of both; needed with ``dp_outer_dim``.
        fsdp_group_ag: a second process group of the ranks that parameters are sharded over. Gathers use it, so that they do
            not queue up behind reductions: NCCL runs the collectives of one communicator one after the other.
        fsdp_unit_modules: classes, or import paths of classes, whose instances are gathered and released as one: a
            transformer's layer. ``"auto"``: the model's repeated blocks. None: the whole model is one unit.
        zero_dp_strategy: what is sharded, in the words of ZeRO: 0 or ``"no_shard"``, nothing; 1 or ``"optim"``, the
            optimizer's state; 2 or ``"optim_grads"``, gradients too; 3 or ``"optim_grads_params"``, parameters too.
        outer_dp_sharding_strategy: over ``dp_outer_dim``: 0 or ``"no_shard"``; 1 or ``"optim"``, which needs
            ``zero_dp_strategy`` 3.
        device: where the shards live; None: the current device of the mesh's type.
        init_model_with_meta_device: parameters and buffers of ``module`` that are on the meta device get values, module by
            module, in the order of ``module.modules()``: by ``reset_parameters()`` or ``_reset_parameters()`` of the modules
            that own them. Ranks must have the same random seed, and draw the numbers that one process draws.
        mixed_precision_policy: dtypes of shards and gradients. The default keeps float32 shards.
        overlap_grad_reduce: let reductions run while backward computes.
        overlap_param_gather: let gathers run while the unit before computes.
        sync_model_each_microbatch: reduce gradients completely after every backward. If False, what can wait for the
            optimizer's step does, unless the last microbatch is marked; see :meth:`MegatronFSDP.sync`.
        preproc_state_dict_for_dcp_ckpt: for the optimizer, see :func:`fully_shard_optimizer`. A model's state dict needs no
            preparation: its DTensors know their rows.
        report_nan_in_param_grad: look for NaN in every rank's gradients before they are reduced, and raise on all ranks
            after the backward, naming rank, unit and parameter. Waits for the device once per backward.
        average_in_collective: let the collective average gradients. By default they are summed and the sum is scaled,
            but float16 gradients, whose sum might overflow, are scaled first.
        calculate_per_token_loss: gradients are the sum over ranks, not the mean; see
            :meth:`MegatronFSDP.scale_gradients`.
        use_decoupled_grad: gradients are in ``parameter.decoupled_grad``, in ``main_grads_dtype``, and ``.grad`` is
            None; for Transformer Engine's ``FusedAdam(use_decoupled_grad=True)``.
        check_values: compare the values of parameters between ranks too, not only names, shapes and dtypes; False if
            they differ on purpose.
        preserve_fp32_weights: older name for ``mixed_precision_policy.main_params_dtype``: True is float32, False None.
        grad_reduce_in_fp32: older name for ``mixed_precision_policy.main_grads_dtype``: True is float32, False None.
        whole_params: called with every parameter and its name; those for which it is true lie whole on one rank where that
            costs little padding, for optimizers that work on whole matrices. :func:`fully_shard` asks for it by itself
            when it is given a Muon.
        bucket_bytes: a unit that is larger than this when it is gathered is parted into several buckets: computation begins
            when the first of them is there, reductions start when the first one's gradients are complete, and less is in
            memory at a time; but smaller messages use a network worse. ``mfsdp plan --bucket`` tells what is gained. None: a
            unit is one bucket.
        unit_bytes: neighbouring units that are smaller than this when they are gathered become one unit, until it is as
            large: gathered before the first of its modules runs, released after the last one, reduced when all have their
            gradients. Fewer and larger messages (on thousands of ranks each costs much latency), and more in memory at a
            time. What FSDP2's ``fully_shard([a, b])`` does, by size. Units that hold other units are not joined, nor
            those of different parts of the model; names of parameters, and so checkpoints, stay the same. Blocks that are
            compiled one by one would each gather all that they are joined with: compile the model. ``mfsdp plan --bucket
            auto`` tells what is gained. None: each is a unit by itself.
        optimizer_block_size: elements that an optimizer quantises together (256 for most 8-bit optimizers); no such
            block is parted between ranks. A power of two.
        expt_device_mesh: for expert parallelism, where data-parallel ranks divide a model's experts among them: the mesh of
            the ranks that hold the same experts, with the same names of dimensions as ``device_mesh``. Of n data-parallel
            ranks and e-fold expert parallelism a mesh of (n / e, e) ranks called ``(dp_shard_dim, "ep")`` does; so does one
            without the last dimension. Each rank's model has its own experts, and everything else alike. Their gradients are
            the mean over all data-parallel ranks, as in one process with all experts.
        hybrid_fsdp_expt_group: the process group of all ranks of ``expt_device_mesh``'s ``dp_outer_dim`` and ``dp_shard_dim``;
            needed with ``dp_outer_dim``.
        expt_fsdp_group_ag: as ``fsdp_group_ag``, for experts.
        is_expert: called with every parameter and its name, tells experts; by default they are what is in a module called
            ``experts``, and what Megatron marks with ``allreduce = False``.
        init_fn: called instead of the modules' own methods, with every module that owns a tensor on the meta device; its own
            parameters and buffers have memory then, and those of modules inside may be sharded already. For models of
            transformers: :class:`mfsdp_compile.huggingface.Initialisation`, or, from a folder with weights,
            :class:`mfsdp_compile.huggingface.Pretrained`.

    The other arguments are Megatron-FSDP's. They raise NotImplementedError when set to anything but their default.

    Returns:
        The wrapped model; ``.module`` is ``module``.

    Raises:
        RuntimeError: there is no process group, or ranks hold different models (the message says which and where), or an
            argument is wrong on another rank.
        ValueError, TypeError: an argument is wrong; the model is as it was.
    """
    given = dict(locals())
    _refuse_wrong_types(given)
    _refuse_unimplemented(given)
    if expt_device_mesh is None:
        _refuse_without_experts(given)
    if calculate_per_token_loss and average_in_collective:
        raise ValueError(
            "calculate_per_token_loss sums gradients and average_in_collective averages them: give one of them."
        )
    policy = MixedPrecisionPolicy.of(mixed_precision_policy, "mixed_precision_policy")
    precision = _precision(policy, preserve_fp32_weights, grad_reduce_in_fp32)
    if isinstance(module, MegatronFSDP):
        raise ValueError(
            "The model is sharded already: it is a MegatronFSDP. Pass the module that is inside only once."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard_model takes an nn.Module, got a {type(module).__name__}")
    _refuse_other_data_parallelism(module)
    strategy = ShardingStrategy.of(zero_dp_strategy, "zero_dp_strategy")
    outer_strategy = ShardingStrategy.of(outer_dp_sharding_strategy, "outer_dp_sharding_strategy")
    topology, every = build_topology(
        device_mesh,
        dp_shard_dim,
        dp_outer_dim,
        hybrid_fsdp_group,
        strategy,
        outer_strategy,
        fsdp_group_ag,
        device_type=_device_type(device, module),
    )

    def experts() -> Experts:
        assert expt_device_mesh is not None
        return build_experts(
            expt_device_mesh,
            dp_shard_dim,
            dp_outer_dim,
            hybrid_fsdp_expt_group,
            strategy,
            outer_strategy,
            expt_fsdp_group_ag,
            is_expert,
            topology,
            every,
        )

    if init_fn is not None and not init_model_with_meta_device:
        raise ValueError(
            "init_fn is given without init_model_with_meta_device=True: it has no meaning for a model that has values."
        )
    scaling = Scaling.SUM_THEN_SCALE
    if calculate_per_token_loss or average_in_collective:
        scaling = Scaling.SUM if calculate_per_token_loss else Scaling.AVERAGE_IN_COLLECTIVE
    sharded = ShardedModel(
        module,
        fsdp_unit_modules,
        topology,
        every,
        precision,
        _device(device, topology.mesh),
        GradientPolicy(scaling, use_decoupled_grad, report_nan_in_param_grad),
        Overlap(overlap_param_gather, overlap_grad_reduce),
        check_values,
        LayoutPolicy(block_numel=optimizer_block_size, bucket_bytes=bucket_bytes, unit_bytes=unit_bytes),
        [name for name, param in module.named_parameters() if whole_params is not None and whole_params(name, param)],
        experts=experts if expt_device_mesh is not None else None,
        tensor_parallel=tensor_parallel_mesh(device_mesh, tp_dim, (dp_shard_dim, dp_outer_dim)),
        from_meta=_initialiser(init_fn) if init_model_with_meta_device else None,
    )
    sharded.synchronisation.automatic = sync_model_each_microbatch
    return MegatronFSDP(module, sharded)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True, *, flat: bool = False
) -> torch.optim.Optimizer:
    """Give an optimizer over sharded parameters Megatron-FSDP's arguments, in place.

    ``optimizer.step(closure=None, *, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)``
    returns what the optimizer's own ``step`` does. ``optimizer.zero_grad(set_to_none=True, *, zero_grad_buffer=True)``
    clears, with ``zero_grad_buffer``, also gradients of the model that no optimizer holds; those of another optimizer, extended
    or not, it leaves alone. Optimizers that are not extended train the same.

    Args:
        optimizer: built from ``model.parameters()`` after :func:`fully_shard_model`. A ``torch.optim.Muon`` gets a step
            that works on whole matrices, each on one rank.
        preproc_state_dict_for_dcp_ckpt: ``optimizer.state_dict()`` is by parameter name, as in ``model.named_parameters()``;
            if False, numbered as torch does. Both hold DTensors and communicate nothing; ``load_state_dict`` takes both, and
            state of whole parameters.
        flat: step over flat tensors, one per bucket and parameter group, instead of over parameters. For optimizers that
            work element by element, or block by block (see ``optimizer_block_size`` of :func:`fully_shard_model`), from
            anywhere: they get ordinary tensors. Between steps ``param_groups`` and ``state`` are by parameter as ever;
            step hooks see flat tensors.

    Returns:
        The same optimizer.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it has no parameters, or some that are not sharded; it is extended already; or ``flat`` does not suit it.
    """
    _check_flag("preproc_state_dict_for_dcp_ckpt", preproc_state_dict_for_dcp_ckpt)
    _check_flag("flat", flat)
    optimizers.check(optimizer, "fully_shard_optimizer", flat)
    return optimizers.extend(optimizer, flat, preproc_state_dict_for_dcp_ckpt)


@telling_others()
def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, flat_optimizer: bool = False, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and an optimizer that was built for it.

    The optimizer keeps its parameter groups with all their settings, and its state: the values that it has gathered for
    whole parameters are cut like the parameters.

    Args:
        module: as for :func:`fully_shard_model`.
        optimizer: whose parameters are ``module``'s.
        *args, **kwargs: the other arguments of :func:`fully_shard_model`.
        flat_optimizer: ``flat`` of :func:`fully_shard_optimizer`.

    Returns:
        The wrapped model and the same optimizer, extended as by :func:`fully_shard_optimizer`.

    Raises:
        ValueError: the optimizer holds other parameters, or state that cannot be cut, or ``flat_optimizer`` does not suit it;
            otherwise as :func:`fully_shard_model`. Nothing is changed then.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes an nn.Module and its optimizer, in this order, got a {type(module).__name__} and a "
            f"{type(optimizer).__name__}"
        )
    _check_flag("flat_optimizer", flat_optimizer)
    optimizers.check(optimizer, "fully_shard", flat_optimizer)
    names = optimizers.named_groups(optimizer, module)
    if isinstance(optimizer, torch.optim.Muon):
        kwargs.setdefault("whole_params", lambda _, param: param in names)
    model = fully_shard_model(module, *args, **kwargs)
    optimizers.rebind(optimizer, names, module)
    by_name = kwargs.get("preproc_state_dict_for_dcp_ckpt", True)
    return model, fully_shard_optimizer(optimizer, by_name, flat=flat_optimizer)


_UNIMPLEMENTED: Mapping[str, tuple[Any, str]] = {
    "disable_bucketing": (False, "sharding without buckets"),
    "keep_fp8_transpose_cache": (False, "fp8 parameters"),
    "nccl_ub": (False, "NCCL user buffers"),
    "fsdp_double_buffer": (False, "persistent communication buffers"),
    "fsdp_db_use_persist_buf_on_alloc_fail": (False, "persistent communication buffers"),
    "disable_symmetric_registration": (False, "NCCL user buffers"),
    "enable_fine_grained_param_gather": (False, "gathering module by module"),
    "cuda_graph_mode": (False, "CUDA graphs"),
    "maxpool_double_buffer": (False, "persistent communication buffers"),
}


def _refuse_unimplemented(given: Mapping[str, Any]) -> None:
    for name, (default, what) in _UNIMPLEMENTED.items():
        if given[name] is not default:
            raise NotImplementedError(
                f"{name}={given[name]!r}: {what} is not implemented yet; leave {name} at its default, {default!r}."
            )


_FLAGS = (
    "init_model_with_meta_device",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "sync_model_each_microbatch",
    "preproc_state_dict_for_dcp_ckpt",
    "report_nan_in_param_grad",
    "average_in_collective",
    "calculate_per_token_loss",
    "use_decoupled_grad",
    "check_values",
)


def _refuse_wrong_types(given: Mapping[str, Any]) -> None:
    """What would count as true, or fail in the middle of something."""
    for name in _FLAGS:
        _check_flag(name, given[name])
    for name in ("preserve_fp32_weights", "grad_reduce_in_fp32"):
        if given[name] is not None:
            _check_flag(name, given[name])
    for name in ("optimizer_block_size", "bucket_bytes", "unit_bytes"):
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise TypeError(f"{name} takes a whole number, got {reprlib.repr(value)}, a {type(value).__name__}")
    if given["whole_params"] is not None and not callable(given["whole_params"]):
        raise TypeError(
            "whole_params takes a function of a parameter's name and the parameter that tells whether it is to lie whole on one "
            f"rank, got {reprlib.repr(given['whole_params'])}"
        )
    units = given["fsdp_unit_modules"]
    if units is not None and (isinstance(units, nn.Module) or not isinstance(units, (str, type, Iterable))):
        raise TypeError(
            "fsdp_unit_modules takes nn.Module classes, not modules, in a list, or import paths of classes, 'auto', or None; got "
            f"a {type(units).__name__}"
        )


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} takes True or False, got {reprlib.repr(value)}, a {type(value).__name__}")


def _refuse_without_experts(given: Mapping[str, Any]) -> None:
    for name in ("hybrid_fsdp_expt_group", "expt_fsdp_group_ag", "is_expert"):
        if given[name] is not None:
            raise ValueError(
                f"{name} is given without expt_device_mesh, the mesh of the ranks that share experts: it has no meaning then."
            )


def _refuse_other_data_parallelism(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)):
            where = f"Module {name!r}" if name else "The model"
            raise ValueError(
                f"{where} is a {type(inner).__name__}: torch's data parallelism has it already, and gradients would be reduced "
                "twice. Use one of the two: pass fully_shard_model the module as it was before torch's fully_shard, "
                "FullyShardedDataParallel or DistributedDataParallel."
            )


def _precision(
    policy: MixedPrecisionPolicy, preserve_fp32_weights: bool | None, grad_reduce_in_fp32: bool | None
) -> MixedPrecisionPolicy:
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
    return replace(policy, main_params_dtype=main_params, main_grads_dtype=main_grads)


def _initialiser(init_fn: InitFn | Initialiser | None) -> Initialiser:
    if init_fn is None:
        return ByMethod()
    return init_fn if isinstance(init_fn, Initialiser) else ByFunction(init_fn)


def _device_type(device: torch.device | str | None, module: nn.Module) -> str | None:
    """That is asked for, or that all parameters with values are on; None: neither."""
    if device is not None:
        return _known_device(device).type
    types = {param.device.type for param in module.parameters() if not param.is_meta}
    return types.pop() if len(types) == 1 else None


def _known_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no device that this torch knows: {error}") from error


def _device(device: torch.device | str | None, mesh: DeviceMesh) -> torch.device:
    chosen = _known_device(device if device is not None else mesh.device_type)
    if chosen.type != mesh.device_type:
        raise ValueError(
            f"device={str(device)!r}, but the device mesh is of type {mesh.device_type!r}: parameters are gathered "
            "where they live."
        )
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen
