"""Megatron-FSDP's functions, with its names and arguments: ``fully_shard_model``, ``fully_shard_optimizer`` and
``fully_shard``. :mod:`.sharding` does what they say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.init.meta import InitFn, Initializer
from mfsdp_compile.runtime.lanes.lane import Plugin
from mfsdp_compile.runtime.memory.allocation import Allocate
from mfsdp_compile.runtime.nearest import names_arguments
from mfsdp_compile.runtime.plan.communicators import Communication
from mfsdp_compile.runtime.plan.experts import IsExpert
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, PolicyArgument
from mfsdp_compile.runtime.plan.units import UnitModules
from mfsdp_compile.runtime.ranks.agreement import telling_others

from .flags import check_flag
from .megatron_fsdp import MegatronFSDP
from .plugins import ModelPlugin
from .sharding import ELSEWHERE
from .sharding_arguments import Arguments, shard_by

if TYPE_CHECKING:
    from mfsdp_compile.runtime.guests.offload.policy import AnyOffloadPolicy


@names_arguments("fully_shard_model", ELSEWHERE)
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
    plugins: Sequence[ModelPlugin | Plugin] = (),
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
            model's repeated blocks, or a single one in a ``ModuleList``. None: the whole model is one unit.
        zero_dp_strategy: What to shard, as in ZeRO. 0 or ``"no_shard"``: nothing. 1 or ``"optim"``: optimizer state. 2
            or ``"optim_grads"``: also gradients. 3 or ``"optim_grads_params"``: also parameters.
        outer_dp_sharding_strategy: What to shard further over ``dp_outer_dim``: nothing (0 or ``"no_shard"``), or the
            optimizer state and gradients (1 or ``"optim"``), with every ``zero_dp_strategy`` but 0.
        device: Device that holds the shards. None: the current device of the mesh's type.
        init_model_with_meta_device: Initialize parameters and buffers that are on the meta device. Modules are visited
            in the order of ``module.modules()``, and each fills its own tensors with ``reset_parameters()`` or
            ``_reset_parameters()``. All ranks must have the same random seed; the values are those that one process
            draws.
        mixed_precision_policy: Dtypes of parameters, gradients, inputs and outputs, as a :class:`MixedPrecisionPolicy`
            or FSDP2's. The default keeps float32 shards. A mapping gives classes of modules policies of their own, as
            in ``{torch.nn.LayerNorm: policy, None: other}``, with the policy of everything else under None. A module of
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
        keep_fp8_transpose_cache: For weights that layers of Transformer Engine get in fp8 (``quantized_model_init``),
            on devices that need a transposed copy in backward: make it in forward, and keep it until then. It takes one
            byte per element. By default, backward makes it, one weight at a time. Warns if there are no such weights.
        nccl_ub: Register the communication buffers with NCCL, which then needs fewer of the GPU's multiprocessors.
            Implies ``fsdp_double_buffer``. Has no effect where NCCL does not run the collectives.
        disable_symmetric_registration: With ``nccl_ub``: register local memory instead of symmetric windows, which NCCL
            has since 2.27. With symmetric memory, a buffer that is still referred to when it is its turn is an error.
        fsdp_manual_registration: With ``nccl_ub``: register when :meth:`MegatronFSDP.manual_buffer_registration` is
            called.
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
        cuda_graph_mode: Keep gradients, deferred sums and gathered parameters that last from step to step at one
            address, as CUDA graphs need: for :func:`~mfsdp_compile.capture_step`, or ``torch.cuda.graph`` around
            forward and backward. ``zero_grad`` then zeroes gradients where it would set them to None. Implies
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
            own tokens to them (sequence parallelism); a mesh of the data-parallel ranks, or one with the
            tensor-parallel dimension, that they hold the same experts.
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
        communication: Which collectives have a communicator of their own, and NCCL's settings for each (priority,
            thread blocks, copy engines, SHARP): a :class:`Communication`, or a dict of its fields. All ranks must pass
            the same. None: gathers have their own where NCCL runs them and that pays.
        buffer_allocator: Called as ``buffer_allocator(numel, dtype, device)`` for each communication buffer, at its
            first use; returns a contiguous tensor ``[numel]`` of memory that nothing else uses, at an address that is a
            multiple of 16 bytes. Anything else is an error in that step. Called again after a step that failed, and
            for copies of the model. Needs buffers (``fsdp_double_buffer``, ``maxpool_double_buffer``), and excludes
            ``nccl_ub``, whose buffers NCCL allocates. Memory that is used while all buffers are in use is torch's.
            None: torch allocates.
        plugins: What changes how buckets travel, in order: functions that take a :class:`~mfsdp_compile.stages.Lane`
            and the ranks, and return a lane with other stages. See docs/write_a_stage.md.
        ignored_params: Parameters of the model that are left alone: neither sharded, nor moved to ``device``, nor
            compared between ranks. Their gradients are this rank's own; reduce them yourself.
        reshard_after_forward: Whether parameters are released after forward and gathered again in backward. A number n
            of ranks, which divides the ranks that parameters are sharded over: each rank keeps one of n portions, and
            backward gathers over n neighbors. None: True, except for the unit that forward uses last. A mapping from
            unit modules, or their classes, to such values; ``module`` itself stands for parameters in no unit. For
            ``optim_grads_params``. The option of the same name of ``torch.compile`` goes before, if it is not True.
        offload_policy: FSDP2's ``CPUOffloadPolicy(pin_memory=True)``, for ``optim_grads_params``: shards, reduced
            gradients and optimizer state are in host memory, and the optimizer steps on the CPU. A gather copies the
            shard to the device first. :class:`OptimizerOffloadPolicy`, for all strategies: the same, but the device
            keeps what it gathers, and gets it from the host once per optimizer step. None, or ``OffloadPolicy()``:
            everything is on the device. A mapping from unit modules, or their classes, to such policies; ``module``
            itself stands for parameters in no unit.

    Returns:
        The wrapped model; ``.module`` is ``module``.

    Raises:
        RuntimeError: If there is no process group, if ranks hold different models (the message says which and where),
            or if an argument is wrong on another rank.
        ValueError, TypeError: If an argument is wrong. The model is left unchanged.
    """
    given = dict(locals())
    sharded, index = shard_by(given.pop("module"), Arguments(**given))
    return MegatronFSDP.of(module, sharded, index)


@names_arguments("fully_shard_optimizer")
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
            :func:`fully_shard_model`); it gets plain tensors. Between steps, and in step hooks, ``param_groups`` and
            ``state`` are by parameter as usual. Classes that are not torch's must be declared, with
            :func:`declare_optimizer`.
        whole: Step over whole parameters, each on one rank, which also holds its state. For any optimizer that works on
            each parameter by itself, such as Shampoo, SOAP and Adafactor; it gets plain tensors. State dicts hold the
            state of what this rank steps. Classes that are not torch's must be declared, too.

    Returns:
        The same optimizer.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer.
        ValueError: If it has no parameters, or some that are not sharded; if it is already extended; or if it is
            not known to support ``flat`` or ``whole``.
        NotImplementedError: With ``whole`` or a Muon, if a matrix is divided over two mesh dimensions besides the
            data-parallel ones.
    """
    check_flag("preproc_state_dict_for_dcp_ckpt", preproc_state_dict_for_dcp_ckpt)
    check_flag("flat", flat)
    check_flag("whole", whole)
    from mfsdp_compile.runtime.optim import extend as optimizers

    optimizers.check(optimizer, "fully_shard_optimizer", flat, whole)
    return optimizers.extend(optimizer, flat, preproc_state_dict_for_dcp_ckpt, whole)


@telling_others()
def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer = ...,  # type: ignore[assignment]
    *args: Any,
    flat_optimizer: bool = False,
    **kwargs: Any,
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model and an optimizer that was built for it.

    The optimizer keeps its parameter groups with all their settings, and its state. State that it has already
    accumulated for unsharded parameters is sharded like the parameters.

    Args:
        module: See :func:`fully_shard_model`.
        optimizer: The optimizer of ``module``'s parameters. It has no default.
        *args, **kwargs: The other arguments of :func:`fully_shard_model`.
        flat_optimizer: See ``flat`` of :func:`fully_shard_optimizer`.

    Returns:
        The wrapped model and the same optimizer, extended as by :func:`fully_shard_optimizer`.

    Raises:
        ValueError: If the optimizer holds other parameters, or state that cannot be sharded, or does not support
            ``flat_optimizer``; also where :func:`fully_shard_model` raises it. Nothing is changed then.
    """
    if optimizer is ...:
        raise TypeError(
            "mfsdp_compile.fully_shard(module, optimizer) is called once, with the whole model and the optimizer of "
            "its parameters, and got no optimizer. FSDP2's fully_shard(module), which is called on each block, is "
            "mfsdp_compile.fsdp2.fully_shard. To shard a whole model before its optimizer is made, call "
            "fully_shard_model."
        )
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard takes an nn.Module and its optimizer, in this order; got a {type(module).__name__} and a "
            f"{type(optimizer).__name__}"
        )
    check_flag("flat_optimizer", flat_optimizer)
    from mfsdp_compile.runtime.optim import extend as optimizers

    optimizers.check(optimizer, "fully_shard", flat_optimizer)
    names = optimizers.named_groups(optimizer, module)
    if isinstance(optimizer, torch.optim.Muon):
        kwargs.setdefault("whole_params", lambda _, param: param in names)
    model = fully_shard_model(module, *args, **kwargs)
    optimizers.rebind(optimizer, names, module)
    by_name = kwargs.get("preproc_state_dict_for_dcp_ckpt", True)
    return model, fully_shard_optimizer(optimizer, by_name, flat=flat_optimizer)
