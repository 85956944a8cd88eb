"""The functions that users call: ``fully_shard_model``, ``fully_shard_optimizer`` and ``fully_shard``.

Names and arguments are those of Megatron-FSDP.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.bucket_plan import Offload
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.init.meta import ByFunction, ByMethod, InitFn, Initializer
from mfsdp_compile.runtime.memory.allocation import Allocate
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.model.shard import ShardingOptions, shard_model
from mfsdp_compile.runtime.optim import extend as optimizers
from mfsdp_compile.runtime.plan.communicators import Communication
from mfsdp_compile.runtime.plan.experts import ExpertPlacement, IsExpert, build_experts
from mfsdp_compile.runtime.plan.meshes import build_topology, tensor_parallel_mesh
from mfsdp_compile.runtime.plan.offload import AnyOffloadPolicy, offload_of
from mfsdp_compile.runtime.plan.precision import (
    GradientPolicy,
    MixedPrecisionPolicy,
    Policies,
    PolicyArgument,
    Scaling,
)
from mfsdp_compile.runtime.plan.units import Unit, UnitModules
from mfsdp_compile.runtime.ranks.agreement import telling_others

from .distributed_index import FSDPDistributedIndex
from .progress import working
from .runtime.program_lines import warn
from .tracebacks import shorten_uncaught
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
    fsdp_unit_modules: UnitModules = None,
    zero_dp_strategy: ShardingStrategy | str | int = 3,
    outer_dp_sharding_strategy: ShardingStrategy | str | int = 0,
    device: torch.device | str | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: PolicyArgument = MixedPrecisionPolicy(),
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
    fsdp_manual_registration: bool = False,
    check_values: bool = True,
    preserve_fp32_weights: bool | None = None,
    grad_reduce_in_fp32: bool | None = None,
    whole_params: Callable[[str, nn.Parameter], bool] | None = None,
    optimizer_block_size: int = 1,
    bucket_bytes: int | None = None,
    unit_bytes: int | None = None,
    is_expert: IsExpert | None = None,
    init_fn: InitFn | Initializer | None = None,
    communication: Communication | Mapping[str, Any] | None = None,
    buffer_allocator: Allocate | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    reshard_after_forward: bool | int | Mapping[type[nn.Module] | nn.Module, bool | int | None] | None = None,
    offload_policy: AnyOffloadPolicy | Mapping[type[nn.Module] | nn.Module, AnyOffloadPolicy | None] | None = None,
) -> MegatronFSDP:
    """Shard a model over data-parallel ranks, in place, and wrap it. Collective: every rank of the mesh calls it.

    Afterwards, ``model.parameters()`` are DTensors that hold this rank's rows of each parameter. Build the optimizer
    from them. The model trains with eager hooks, or compiled with ``torch.compile(model, backend="mfsdp")``.

    Args:
        module: The unsharded model, with the same values on every rank. Freeze parameters and change its dtype before
            the call.
        device_mesh: The ranks to shard over. None: all ranks. Their device type is then that of ``device``, or the one
            that the model's parameters are on, if the default process group has a backend for it; otherwise CUDA, if it
            has a backend for that.
        dp_shard_dim: Name of the mesh dimension to shard over. Required if the mesh has several dimensions.
        dp_outer_dim: Name of a second data-parallel dimension, around the first. Its ranks replicate the shards (HSDP),
            or shard the optimizer state further (HFSDP, with ``outer_dp_sharding_strategy="optim"``).
        tp_dim: Name of the tensor-parallel mesh dimension, for models whose parameters are plain tensors. Parameters
            with Megatron's attributes (``tensor_model_parallel``, ``partition_dim``) are shards of a larger parameter;
            all others are replicated over this dimension. Parameters that are DTensors
            (``torch.distributed.tensor.parallel``) need no ``tp_dim``.
        hybrid_fsdp_group: Process group of all ranks of ``dp_outer_dim`` and ``dp_shard_dim`` together. Required with
            ``dp_outer_dim``.
        fsdp_group_ag: A second process group of the ranks that parameters are sharded over, used for gathers. NCCL runs
            the collectives of one communicator one after the other; with a second one, gathers do not queue behind
            reductions.
        fsdp_unit_modules: Classes, or import paths of classes, whose instances are units: each is gathered and released
            as a whole. Typically a transformer's layer. The list may also contain modules, each of which is a unit, and
            lists of modules, which are one unit together: it is gathered when the first of them runs. ``"auto"``: the
            model's repeated blocks. None: the whole model is one unit.
        zero_dp_strategy: What to shard, as in ZeRO. 0 or ``"no_shard"``: nothing. 1 or ``"optim"``: optimizer state. 2
            or ``"optim_grads"``: also gradients. 3 or ``"optim_grads_params"``: also parameters.
        outer_dp_sharding_strategy: What to shard over ``dp_outer_dim``: 0 or ``"no_shard"``, or 1 or ``"optim"``, which
            requires ``zero_dp_strategy=3``.
        device: Device that holds the shards. None: the current device of the mesh's type.
        init_model_with_meta_device: Initialize parameters and buffers that are on the meta device. Modules are visited
            in the order of ``module.modules()``, and each fills its own tensors with ``reset_parameters()`` or
            ``_reset_parameters()``. All ranks must have the same random seed; the values are those that one process
            draws.
        mixed_precision_policy: Dtypes of parameters, gradients, inputs and outputs, as a :class:`MixedPrecisionPolicy` or
            FSDP2's. The default keeps float32 shards. A mapping gives classes of modules policies of their own, as in
            ``{torch.nn.LayerNorm: policy, None: other}``, with the policy of everything else under None. A module of
            such a class, which may be a unit or not, casts what it gets and returns by its policy. Classes are given
            as in ``fsdp_unit_modules``; of several that fit, the most derived one decides.
        overlap_grad_reduce: Let reductions run while backward computes.
        overlap_param_gather: Let gathers run while the previous unit computes.
        sync_model_each_microbatch: Reduce gradients completely after every backward. If False, whatever part of the
            reduction the strategy can defer is deferred to the optimizer step, unless the last microbatch is marked;
            see :meth:`MegatronFSDP.sync`.
        preproc_state_dict_for_dcp_ckpt: Applies to the optimizer; see :func:`fully_shard_optimizer`. A model's state
            dict needs no preprocessing, because its DTensors know their rows.
        report_nan_in_param_grad: Check every rank's gradients for NaN before they are reduced. If there is one, all
            ranks raise after the backward, with its rank, unit and parameter. Synchronizes with the device once per
            backward.
        average_in_collective: Let the collective average gradients. By default, gradients are summed and the sum is
            scaled. Float16 gradients are scaled first, because their sum could overflow.
        calculate_per_token_loss: Make gradients the sum over ranks instead of the mean; see
            :meth:`MegatronFSDP.scale_gradients`.
        keep_fp8_transpose_cache: For weights that layers of Transformer Engine get in fp8 (``quantized_model_init``), on devices
            that need a transposed copy in backward: make it in forward, and keep it until then. It takes one byte per
            element. By default, backward makes it, one weight at a time. Warns if there are no such weights.
        nccl_ub: Register the communication buffers with NCCL, which then needs fewer of the GPU's multiprocessors. Implies
            ``fsdp_double_buffer``. Has no effect where NCCL does not run the collectives.
        disable_symmetric_registration: With ``nccl_ub``: register local memory instead of symmetric windows, which NCCL
            has since 2.27. With symmetric memory, a buffer that is still referred to when it is its turn is an error.
        fsdp_manual_registration: With ``nccl_ub``: register when :meth:`MegatronFSDP.manual_buffer_registration` is called.
        fsdp_double_buffer: Gather into two buffers that stay, and pack gradients in two others, for each group of
            buckets of the same size and dtype. They are never overwritten while something refers to them; if both are
            in use, fresh memory is. Costs memory: twice the largest layer for gathers, and twice for gradients.
        maxpool_double_buffer: The same for all buckets, with buffers of the size of the largest one of each dtype.
        fsdp_db_use_persist_buf_on_alloc_fail: With ``fsdp_double_buffer``: a bucket that has its size to itself gets a
            buffer of its own.
        enable_fine_grained_param_gather: Gather each module inside a unit at its first use, and release it after it has
            run, instead of the unit as a whole. Only one module and the next one are gathered at a time, so less memory
            is in use, and computation starts earlier. Messages are smaller and more numerous, and compiled units do not
            share code (``options={"regions": ...}``). For large units, such as layers with many experts.
        disable_bucketing: Give each parameter a bucket of its own. A unit still starts all of its gathers together,
            but each parameter is awaited, and its gradient reduced, by itself. For comparisons, and for parameters that
            are large enough to be messages of their own.
        cuda_graph_mode: Keep gradients, deferred sums and gathered parameters that last from step to step at one address,
            as CUDA graphs need: for :func:`~mfsdp_compile.capture_step`, or ``torch.cuda.graph`` around forward and
            backward. ``zero_grad`` then zeroes gradients where it would set them to None. Implies
            ``fsdp_double_buffer``. Costs memory: the gradients between ``zero_grad`` and the next backward.
        use_decoupled_grad: Store gradients in ``parameter.decoupled_grad``, in ``main_grads_dtype``, and leave
            ``.grad`` None. For Transformer Engine's ``FusedAdam(use_decoupled_grad=True)``.
        check_values: Compare the values of parameters between ranks, in addition to names, shapes and dtypes. Set it to
            False if values differ on purpose.
        preserve_fp32_weights: Older name for ``mixed_precision_policy.main_params_dtype``: True means float32, False
            means None.
        grad_reduce_in_fp32: Older name for ``mixed_precision_policy.main_grads_dtype``: True means float32, False means
            None.
        whole_params: Called with the name of each parameter and the parameter. Parameters for which it returns True are
            kept on one rank where that costs little padding, for optimizers that work on whole matrices.
            :func:`fully_shard` sets it when the optimizer is a Muon.
        bucket_bytes: Split a unit whose gathered size exceeds this into several buckets. Computation starts when the
            first bucket arrives, reductions start when the first bucket's gradients are complete, and less memory is in
            use at a time. Smaller messages use the network less efficiently; ``mfsdp plan --bucket`` estimates the
            trade-off. None: units are not split.
        unit_bytes: Join neighboring units whose gathered size is below this, until the joined unit reaches it. A joined
            unit is gathered before its first module runs, released after the last one, and reduced when all of its
            parameters have gradients. Messages become fewer and larger, which matters on thousands of ranks, where each
            message has high latency; more memory is in use at a time. FSDP2's ``fully_shard([a, b])`` does the same by
            hand. Units that contain other units are not joined, nor are units from different parts of the model.
            Parameter names and checkpoints do not change. Compile the model as a whole: blocks that are compiled one by
            one would each gather everything they are joined with. ``mfsdp plan --bucket auto`` estimates the gain.
            None: units are not joined.
        optimizer_block_size: Number of elements that an optimizer quantizes together (256 for most 8-bit optimizers).
            No such block is split between ranks. Must be a power of two.
        expt_device_mesh: For expert parallelism, where data-parallel ranks divide a model's experts among them. The
            mesh of the ranks that hold the same experts, with the same dimension names as ``device_mesh``. For n
            data-parallel ranks and e-fold expert parallelism, pass a mesh of (n / e, e) ranks named
            ``(dp_shard_dim, "ep")``, or the same mesh without its last dimension. Each rank's model contains its own
            experts; everything else is the same on all ranks. Gradients of experts are the mean over all data-parallel
            ranks, as in one process with all experts. Where tensor-parallel ranks divide everything else, a mesh of all
            n data-parallel times tensor-parallel ranks says that they divide experts too, and that each rank sends its
            own tokens to them (sequence parallelism); a mesh of the data-parallel ranks, or one with the tensor-parallel
            dimension, that they hold the same experts.
        hybrid_fsdp_expt_group: Process group of all ranks of ``expt_device_mesh``'s ``dp_outer_dim`` and
            ``dp_shard_dim``. Required with ``dp_outer_dim``.
        expt_fsdp_group_ag: Like ``fsdp_group_ag``, for experts.
        is_expert: Called with the name of each parameter and the parameter; returns whether it belongs to an expert. By
            default, experts are the parameters inside a module called ``experts`` and those that Megatron marks with
            ``allreduce = False``.
        init_fn: Called instead of the modules' own methods, with each module that owns a tensor on the meta device. The
            module's own parameters and buffers have memory at that point; those of its submodules may already be
            sharded. For transformers models use :class:`mfsdp_compile.integrations.huggingface_init.Initialization`, or
            :class:`mfsdp_compile.integrations.huggingface_init.Pretrained` to load weights from a folder.
        communication: Which collectives have a communicator of their own, and NCCL's settings for each (priority, thread
            blocks, copy engines, SHARP): a :class:`Communication`, or a dict of its fields. All ranks must pass the
            same. None: gathers have their own where NCCL runs them and that pays.
        buffer_allocator: Called as ``buffer_allocator(numel, dtype, device)`` for each communication buffer, at its first
            use; returns a contiguous tensor ``[numel]`` of memory that nothing else uses, at an address that is a
            multiple of 16 bytes. Anything else is an error in that step. Called again after a step that failed, and
            for copies of the model. Needs buffers (``fsdp_double_buffer``, ``maxpool_double_buffer``), and excludes
            ``nccl_ub``, whose buffers NCCL allocates. Memory that is used while all buffers are in use is torch's.
            None: torch allocates.
        ignored_params: Parameters of the model that are left alone: neither sharded, nor moved to ``device``, nor compared
            between ranks. Their gradients are this rank's own; reduce them yourself.
        reshard_after_forward: Whether parameters are released after forward and gathered again in backward. A number n
            of ranks, which divides the ranks that parameters are sharded over: each rank keeps one of n portions, and
            backward gathers over n neighbors. None: True, except for the unit that forward uses last. A mapping from unit
            modules, or their classes, to such values; ``module`` itself stands for parameters in no unit. For
            ``optim_grads_params``. The option of the same name of ``torch.compile`` goes before, if it is not True.
        offload_policy: FSDP2's ``CPUOffloadPolicy(pin_memory=True)``, for ``optim_grads_params``: shards, reduced gradients
            and optimizer state are in host memory, and the optimizer steps on the CPU. A gather copies the shard to the
            device first. :class:`OptimizerOffloadPolicy`, for all strategies: the same, but the device keeps what it
            gathers, and gets it from the host once per optimizer step. None, or ``OffloadPolicy()``: everything is on the
            device. A mapping from unit modules, or their classes, to such policies; ``module`` itself stands for
            parameters in no unit.

    Returns:
        The wrapped model; ``.module`` is ``module``.

    Raises:
        RuntimeError: If there is no process group, if ranks hold different models (the message says which and where),
            or if an argument is wrong on another rank.
        ValueError, TypeError: If an argument is wrong. The model is left unchanged.
    """
    given = dict(locals())
    _refuse_wrong_types(given)
    if expt_device_mesh is None:
        _refuse_without_experts(given)
    if calculate_per_token_loss and average_in_collective:
        raise ValueError(
            "calculate_per_token_loss sums gradients and average_in_collective averages them: pass only one of them."
        )
    if nccl_ub and average_in_collective and not disable_symmetric_registration:
        raise ValueError(
            "average_in_collective: NCCL only sums in symmetric memory, which nccl_ub registers. Leave "
            "average_in_collective out, or pass disable_symmetric_registration=True."
        )
    if nccl_ub and "expandable_segments:true" in compat.allocator_settings().replace(" ", "").lower():
        raise ValueError(
            f"nccl_ub: PYTORCH_ALLOC_CONF has {compat.allocator_settings()!r}, and NCCL cannot register memory of "
            "expandable segments. Leave expandable_segments out, or train without nccl_ub."
        )
    if buffer_allocator is not None and nccl_ub:
        raise ValueError("buffer_allocator: NCCL allocates the buffers of nccl_ub. Pass only one of them.")
    communicators = Communication.of(communication)
    if communicators.zero_cta and (not nccl_ub or disable_symmetric_registration):
        raise ValueError(
            "communication: zero_cta gathers from and into symmetric memory. Pass nccl_ub=True, and leave "
            "disable_symmetric_registration out."
        )
    if enable_fine_grained_param_gather and unit_bytes is not None:
        raise ValueError(
            "enable_fine_grained_param_gather divides units into modules, and unit_bytes joins units: pass only one of them."
        )
    if disable_bucketing and bucket_bytes is not None:
        raise ValueError(
            "disable_bucketing gives each parameter a bucket of its own, so there is nothing that bucket_bytes could "
            "split: pass only one of them."
        )
    precision = Policies.of(mixed_precision_policy, "mixed_precision_policy").map(
        lambda policy: _precision(policy, preserve_fp32_weights, grad_reduce_in_fp32)
    )
    if isinstance(module, MegatronFSDP):
        raise ValueError(
            "The model is already sharded: it is a MegatronFSDP. Pass the module that is inside only once."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard_model takes an nn.Module, got a {type(module).__name__}")
    shorten_uncaught()
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

    def experts() -> ExpertPlacement:
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
        )

    if init_fn is not None and not init_model_with_meta_device:
        raise ValueError(
            "init_fn needs init_model_with_meta_device=True: it initializes parameters on the meta device, and this "
            "model already has values."
        )
    scaling = Scaling.SUM_THEN_SCALE
    if calculate_per_token_loss or average_in_collective:
        scaling = Scaling.SUM if calculate_per_token_loss else Scaling.AVERAGE_IN_COLLECTIVE
    options = ShardingOptions(
        unit_modules=fsdp_unit_modules,
        precision=precision,
        gradient_policy=GradientPolicy(scaling, use_decoupled_grad, report_nan_in_param_grad, cuda_graph_mode),
        overlap=Overlap(overlap_param_gather, overlap_grad_reduce),
        check_values=check_values,
        layout_policy=LayoutPolicy(
            block_numel=optimizer_block_size,
            bucket_bytes=bucket_bytes,
            unit_bytes=unit_bytes,
            by_parameter=disable_bucketing,
        ),
        by_module=enable_fine_grained_param_gather,
        whole=[
            name for name, param in module.named_parameters() if whole_params is not None and whole_params(name, param)
        ],
        experts=experts if expt_device_mesh is not None else None,
        tensor_parallel=tensor_parallel_mesh(device_mesh, tp_dim, (dp_shard_dim, dp_outer_dim)),
        from_meta=_initializer(init_fn) if init_model_with_meta_device else None,
        buffer_policy=BufferPolicy(
            fsdp_double_buffer or maxpool_double_buffer or nccl_ub or cuda_graph_mode,
            maxpool_double_buffer,
            fsdp_db_use_persist_buf_on_alloc_fail,
        ),
        registers="never" if not nccl_ub else "later" if fsdp_manual_registration else "now",
        allocate=buffer_allocator,
        symmetric=not disable_symmetric_registration,
        communication=communicators,
        keeps_transposes=keep_fp8_transpose_cache,
        ignored=frozenset(ignored_params),
        reshard_after_forward=_resharding(reshard_after_forward, module, topology),
        offload=_offloading(offload_policy, module),
    )
    if buffer_allocator is not None and not options.buffer_policy.double:
        raise ValueError(
            "buffer_allocator allocates communication buffers, and this model has none: pass fsdp_double_buffer=True or "
            "maxpool_double_buffer=True."
        )
    with working(f"sharding {type(module).__name__}"):
        sharded = shard_model(module, topology, every, _device(device, topology.mesh), options)
    sharded.grad_sync.settings.automatic = sync_model_each_microbatch
    index = FSDPDistributedIndex(
        device_mesh if device_mesh is not None else topology.mesh,
        dp_shard_dim,
        dp_outer_dim,
        tp_dim,
        hybrid_fsdp_group,
        hybrid_fsdp_expt_group,
        topology.is_hfsdp,
        expt_device_mesh,
        fsdp_group_ag,
        expt_fsdp_group_ag,
    )
    return MegatronFSDP.of(module, sharded, index)


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    *,
    flat: bool = False,
    whole: bool = False,
) -> torch.optim.Optimizer:
    """Add Megatron-FSDP's arguments to the methods of an optimizer over sharded parameters, in place.

    ``optimizer.step(closure=None, *, sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)``
    returns what the optimizer's own ``step`` returns.

    ``optimizer.zero_grad(set_to_none=True, *, zero_grad_buffer=True)`` also clears, with ``zero_grad_buffer``, the
    model's gradients that belong to no optimizer. It leaves the gradients of other optimizers alone, whether or not
    those are extended.

    An optimizer that is not extended trains the same.

    Args:
        optimizer: Built from ``model.parameters()`` after :func:`fully_shard_model`. A ``torch.optim.Muon`` gets a step
            that works on whole matrices, each on one rank.
        preproc_state_dict_for_dcp_ckpt: Key ``optimizer.state_dict()`` by parameter name, as in
            ``model.named_parameters()``. If False, parameters are numbered, as torch does. Both forms hold DTensors and
            communicate nothing. ``load_state_dict`` accepts both, and also the state of unsharded parameters.
        flat: Step over flat tensors, one per bucket and parameter group, instead of over parameters. For any optimizer
            that works element by element, or block by block (see ``optimizer_block_size`` of
            :func:`fully_shard_model`); it gets plain tensors. Between steps, ``param_groups`` and ``state`` are by
            parameter as usual. Step hooks see flat tensors.
        whole: Step over whole parameters, each on one rank, which also holds its state. For any optimizer that works on
            each parameter by itself, such as Shampoo, SOAP and Adafactor; it gets plain tensors. State dicts hold the
            state of what this rank steps.

    Returns:
        The same optimizer.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer.
        ValueError: If it has no parameters, or some that are not sharded; if it is already extended; or if it does not
            support ``flat`` or ``whole``.
        NotImplementedError: With ``whole`` or a Muon, if a matrix is divided over two mesh dimensions besides the
            data-parallel ones.
    """
    _check_flag("preproc_state_dict_for_dcp_ckpt", preproc_state_dict_for_dcp_ckpt)
    _check_flag("flat", flat)
    _check_flag("whole", whole)
    optimizers.check(optimizer, "fully_shard_optimizer", flat, whole)
    return optimizers.extend(optimizer, flat, preproc_state_dict_for_dcp_ckpt, whole)


@telling_others()
def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, flat_optimizer: bool = False, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and an optimizer that was built for it.

    The optimizer keeps its parameter groups with all their settings, and its state. State that it has already
    accumulated for unsharded parameters is sharded like the parameters.

    Args:
        module: See :func:`fully_shard_model`.
        optimizer: The optimizer of ``module``'s parameters.
        *args, **kwargs: The other arguments of :func:`fully_shard_model`.
        flat_optimizer: See ``flat`` of :func:`fully_shard_optimizer`.

    Returns:
        The wrapped model and the same optimizer, extended as by :func:`fully_shard_optimizer`.

    Raises:
        ValueError: If the optimizer holds other parameters, or state that cannot be sharded, or does not support
            ``flat_optimizer``; also where :func:`fully_shard_model` raises it. Nothing is changed then.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes an nn.Module and its optimizer, in this order; got a {type(module).__name__} and a "
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
    "nccl_ub",
    "disable_symmetric_registration",
    "fsdp_manual_registration",
    "disable_bucketing",
    "enable_fine_grained_param_gather",
    "fsdp_double_buffer",
    "maxpool_double_buffer",
    "fsdp_db_use_persist_buf_on_alloc_fail",
    "cuda_graph_mode",
    "keep_fp8_transpose_cache",
)


def _refuse_wrong_types(given: Mapping[str, Any]) -> None:
    """Reject values of the wrong type that would otherwise count as true, or fail halfway through."""
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
            f"whole_params takes a function (name, parameter) -> bool, got {reprlib.repr(given['whole_params'])}"
        )
    if given["buffer_allocator"] is not None and not callable(given["buffer_allocator"]):
        raise TypeError(
            "buffer_allocator takes a function (numel, dtype, device) -> tensor, got "
            f"{reprlib.repr(given['buffer_allocator'])}. Memory that is freed after each use, as by Megatron-FSDP's "
            "StorageResizeBasedBucketAllocator, is what models without fsdp_double_buffer use; with it, buffers are used in "
            "turn, as by its rotary and fixed pools."
        )
    ignored = given["ignored_params"]
    if not isinstance(ignored, Collection) or not all(isinstance(param, nn.Parameter) for param in ignored):
        raise TypeError(f"ignored_params takes a collection of parameters, got {reprlib.repr(ignored)}")
    units = given["fsdp_unit_modules"]
    if units is not None and (isinstance(units, nn.Module) or not isinstance(units, (str, type, Iterable))):
        raise TypeError(
            "fsdp_unit_modules takes a list of nn.Module classes, their import paths, or modules; 'auto'; or None; "
            f"got a {type(units).__name__}"
        )


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} takes True or False, got {reprlib.repr(value)}, a {type(value).__name__}")


def _resharding(given: Any, module: nn.Module, topology: Topology) -> Callable[[Unit], bool | int | None]:
    """Return the function that says what happens to a unit's buckets between forward and backward."""
    values = _by_module("reshard_after_forward", given, module)
    for key, value in values.items():
        if value is None or isinstance(value, bool):
            continue
        if not isinstance(value, int):
            raise TypeError(
                f"reshard_after_forward takes True, False, a number of ranks or None, got {reprlib.repr(value)}"
            )
        if value < 1:
            raise ValueError(f"reshard_after_forward takes at least 1 rank, got {value}")
        values[key] = topology.portions_of(value, "reshard_after_forward")
    return _of_unit(values)


def _offloading(given: Any, module: nn.Module) -> Callable[[Unit], Offload | None]:
    """Return the function that says how a unit's buckets are kept in host memory."""
    values = _by_module("offload_policy", given, module)
    return _of_unit({key: offload_of(value, "offload_policy") for key, value in values.items()})


def _by_module(name: str, given: Any, module: nn.Module) -> dict[type[nn.Module] | nn.Module, Any]:
    """Return the values of an argument that may be a mapping from modules or their classes, with its keys checked."""
    values = dict(given) if isinstance(given, Mapping) else {nn.Module: given}
    inside = set(module.modules())
    for key in values:
        if not (isinstance(key, nn.Module) or (isinstance(key, type) and issubclass(key, nn.Module))):
            raise TypeError(f"{name} has the key {reprlib.repr(key)}, which is no module or class of modules")
        if isinstance(key, nn.Module) and key not in inside:
            raise ValueError(f"{name} has a {type(key).__name__} as a key that is not part of the model")
    return values


def _of_unit(values: Mapping[type[nn.Module] | nn.Module, Any]) -> Callable[[Unit], Any]:
    """Return the function that finds a unit's value: of its module, its class, or a base of that."""

    def of_unit(unit: Unit) -> Any:
        found = [values[key] for key in (*unit.modules, *map(type, unit.modules)) if key in values]
        found += [value for key, value in values.items() if isinstance(key, type) and isinstance(unit.modules[0], key)]
        return found[0] if found else None

    return of_unit


def _refuse_without_experts(given: Mapping[str, Any]) -> None:
    for name in ("hybrid_fsdp_expt_group", "expt_fsdp_group_ag", "is_expert"):
        if given[name] is not None:
            raise ValueError(f"{name} needs expt_device_mesh, the mesh of the ranks that share experts.")


def _refuse_other_data_parallelism(module: nn.Module) -> None:
    for name, inner in module.named_modules():
        if isinstance(inner, (FSDPModule, FullyShardedDataParallel, DistributedDataParallel, compat.ReplicatedModule)):
            where = f"Module {name!r}" if name else "The model"
            raise ValueError(
                f"{where} is a {type(inner).__name__}: torch's data parallelism is already applied to it, and "
                "gradients would be reduced twice. Use one of the two: pass fully_shard_model the module as it was "
                "before torch's fully_shard, FullyShardedDataParallel or DistributedDataParallel."
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
                f"mixed_precision_policy says {main_params}. Pass only one of them."
            )
        main_params = wanted
    if grad_reduce_in_fp32 is not None:
        wanted = torch.float32 if grad_reduce_in_fp32 else None
        if main_grads not in (default.main_grads_dtype, wanted):
            raise ValueError(
                f"grad_reduce_in_fp32={grad_reduce_in_fp32} means main_grads_dtype={wanted}, but "
                f"mixed_precision_policy says {main_grads}. Pass only one of them."
            )
        main_grads = wanted
    return replace(policy, main_params_dtype=main_params, main_grads_dtype=main_grads)


def _initializer(init_fn: InitFn | Initializer | None) -> Initializer:
    if init_fn is None:
        return ByMethod()
    return init_fn if isinstance(init_fn, Initializer) else ByFunction(init_fn)


def _device_type(device: torch.device | str | None, module: nn.Module) -> str | None:
    """Return the device type that was asked for, or the one that all parameters with values are on. None: neither."""
    if device is not None:
        return _known_device(device).type
    types = {param.device.type for param in module.parameters() if not param.is_meta}
    return types.pop() if len(types) == 1 else None


def _known_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a device of this build of torch: {error}") from error


def _device(device: torch.device | str | None, mesh: DeviceMesh) -> torch.device:
    chosen = _known_device(device if device is not None else mesh.device_type)
    if chosen.type != mesh.device_type:
        raise ValueError(
            f"device={str(device)!r}, but the device mesh is of type {mesh.device_type!r}. Both must be the same type "
            "of device."
        )
    if chosen.type == "cpu" and device is None and "cuda" in compat.device_types():
        warn(
            "The model is on the CPU and trains there, although the process group also has a backend for CUDA and there "
            "are GPUs. To train on them, call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before "
            "init_process_group and model.cuda() before sharding, or pass this rank's GPU as device. device='cpu' ends "
            "this warning.",
        )
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if chosen.index == 0 and local_rank != "0" and torch.cuda.device_count() > 1:
            raise ValueError(
                f"The current GPU of rank {dist.get_rank()} is cuda:0, the default, and LOCAL_RANK is {local_rank}: all "
                "ranks of this machine would share one GPU. Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) "
                "before init_process_group, or pass device='cuda:0' if this rank shall have it."
            )
    return chosen
