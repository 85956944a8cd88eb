"""The arguments of ``fully_shard_model`` as one object, with checks of their types and of what contradicts what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.init.meta import ByMethod, InitFn, Initializer, has_meta
from mfsdp_compile.runtime.lanes.lane import Plugin
from mfsdp_compile.runtime.memory.allocation import Allocate
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.communicators import Communication
from mfsdp_compile.runtime.plan.experts import IsExpert
from mfsdp_compile.runtime.plan.precision import GradientPolicy, MixedPrecisionPolicy, Policies, PolicyArgument, Scaling
from mfsdp_compile.runtime.plan.units import UnitModules

from .distributed_index import FSDPDistributedIndex
from .flags import check_flag, check_whole
from .plugins import (
    ByModule,
    CommBuffers,
    Communicators,
    Experts,
    HostMemory,
    KeepTransposes,
    ModelPlugin,
    Ranks,
    TensorParallel,
    WholeParameters,
)
from .sharding import shard_in_place
from .tracebacks import shorten_uncaught

if TYPE_CHECKING:
    from mfsdp_compile.runtime.guests.offload.policy import AnyOffloadPolicy


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of :func:`~mfsdp_compile.fully_shard_model`, which describes them, except for the model.

    Annotations of flags and whole numbers are what :meth:`check` tests values against.
    """

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None
    fsdp_unit_modules: UnitModules = None
    zero_dp_strategy: ShardingStrategy | str | int = 3
    outer_dp_sharding_strategy: ShardingStrategy | str | int = 0
    device: torch.device | str | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: PolicyArgument = field(default_factory=MixedPrecisionPolicy)
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False
    fsdp_manual_registration: bool = False
    check_values: bool = True
    preserve_fp32_weights: bool | None = None
    grad_reduce_in_fp32: bool | None = None
    whole_params: Callable[[str, nn.Parameter], bool] | None = None
    optimizer_block_size: int = 1
    bucket_bytes: int | None = None
    unit_bytes: int | None = None
    is_expert: IsExpert | None = None
    init_fn: InitFn | Initializer | None = None
    communication: Communication | Mapping[str, Any] | None = None
    buffer_allocator: Allocate | None = None
    ignored_params: Collection[nn.Parameter] = ()
    plugins: Sequence[ModelPlugin | Plugin] = ()
    reshard_after_forward: bool | int | Mapping[type[nn.Module] | nn.Module, bool | int | None] | None = None
    offload_policy: AnyOffloadPolicy | Mapping[type[nn.Module] | nn.Module, AnyOffloadPolicy | None] | None = None

    def check(self) -> None:
        """Reject values of the wrong type, which could count as true or fail halfway, and contradictions.

        Raises:
            TypeError, ValueError: See :func:`~mfsdp_compile.fully_shard_model`.
        """
        self._check_types()
        self._check_together()

    @property
    def precision(self) -> Policies:
        """The mixed-precision policies, with what the older names of their fields say."""
        return Policies.of(self.mixed_precision_policy, "mixed_precision_policy").map(self._filled)

    @property
    def gradients(self) -> GradientPolicy:
        scaling = Scaling.AVERAGE_IN_COLLECTIVE if self.average_in_collective else Scaling.SUM_THEN_SCALE
        scaling = Scaling.SUM if self.calculate_per_token_loss else scaling
        return GradientPolicy(scaling, self.use_decoupled_grad, self.report_nan_in_param_grad, self.cuda_graph_mode)

    @property
    def buffers(self) -> BufferPolicy:
        return BufferPolicy(
            self.fsdp_double_buffer or self.maxpool_double_buffer or self.nccl_ub or self.cuda_graph_mode,
            self.maxpool_double_buffer,
            self.fsdp_db_use_persist_buf_on_alloc_fail,
        )

    def model_plugins(self) -> Iterator[ModelPlugin]:
        """Yield the plug-ins that the arguments stand for."""
        if self.tp_dim is not None:
            yield TensorParallel(self.tp_dim)
        if self.expt_device_mesh is not None:
            groups = self.hybrid_fsdp_expt_group, self.expt_fsdp_group_ag
            yield Experts(self.expt_device_mesh, *groups, self.is_expert)
        if self.buffers != BufferPolicy() or self.buffer_allocator is not None:
            registers: Any = "never" if not self.nccl_ub else "later" if self.fsdp_manual_registration else "now"
            symmetric = not self.disable_symmetric_registration
            yield CommBuffers(self.buffers, registers, symmetric, self.buffer_allocator)
        if self.communication is not None:
            yield Communicators(self.communication)
        if self.offload_policy is not None:
            yield HostMemory(self.offload_policy)
        if self.whole_params is not None:
            yield WholeParameters(self.whole_params)
        if self.enable_fine_grained_param_gather:
            yield ByModule()
        if self.keep_fp8_transpose_cache:
            yield KeepTransposes()

    def _filled(self, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        default = MixedPrecisionPolicy()
        for older, name in (
            ("preserve_fp32_weights", "main_params_dtype"),
            ("grad_reduce_in_fp32", "main_grads_dtype"),
        ):
            if (given := getattr(self, older)) is None:
                continue
            dtype, current = torch.float32 if given else None, getattr(policy, name)
            if current not in (getattr(default, name), dtype):
                raise ValueError(
                    f"{older}={given} means {name}={dtype}, but mixed_precision_policy says {current}. Pass only one "
                    "of them."
                )
            policy = replace(policy, **{name: dtype})  # type: ignore[arg-type]
        return policy

    def _check_types(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "bool" or (each.type == "bool | None" and value is not None):
                check_flag(each.name, value)
            if each.type in ("int", "int | None"):
                check_whole(each.name, value, each.type == "int | None")

    def _check_together(self) -> None:
        if self.expt_device_mesh is None:
            for name in ("hybrid_fsdp_expt_group", "expt_fsdp_group_ag", "is_expert"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs expt_device_mesh, the mesh of the ranks that share experts.")
        if self.calculate_per_token_loss and self.average_in_collective:
            raise ValueError(
                "calculate_per_token_loss sums gradients and average_in_collective averages them: pass only one of "
                "them."
            )
        if self.init_fn is not None and not self.init_model_with_meta_device:
            raise ValueError(
                "init_fn needs init_model_with_meta_device=True: it initializes parameters on the meta device, and "
                "this model already has values."
            )


def _has_meta(module: object) -> bool:
    return isinstance(module, nn.Module) and has_meta(module)


def shard_by(module: nn.Module, given: Arguments) -> tuple[ShardedModel, FSDPDistributedIndex]:
    """Shard a model in place by the arguments of ``fully_shard_model``. Collective.

    Returns:
        What owns its buckets, and the ranks that it is sharded over.

    Raises:
        RuntimeError, TypeError, ValueError: See :func:`~mfsdp_compile.fully_shard_model`.
    """
    shorten_uncaught()
    given.check()
    sharded = shard_in_place(
        module,
        Ranks(**{each.name: getattr(given, each.name) for each in fields(Ranks)}),
        given.fsdp_unit_modules,
        given.zero_dp_strategy,
        given.precision,
        device=given.device,
        reshard_after_forward=given.reshard_after_forward,
        gradients=given.gradients,
        overlap=Overlap(given.overlap_param_gather, given.overlap_grad_reduce),
        layout=LayoutPolicy(
            block_numel=given.optimizer_block_size,
            bucket_bytes=given.bucket_bytes,
            unit_bytes=given.unit_bytes,
            by_parameter=given.disable_bucketing,
        ),
        init_fn=(given.init_fn or ByMethod()) if given.init_model_with_meta_device and _has_meta(module) else None,
        ignored_params=given.ignored_params,
        check_values=given.check_values,
        plugins=[*given.model_plugins(), *given.plugins],
    )
    sharded.grad_sync.settings.automatic = given.sync_model_each_microbatch
    ranks = {each.name: getattr(given, each.name) for each in fields(FSDPDistributedIndex) if hasattr(given, each.name)}
    if given.device_mesh is None:
        ranks["device_mesh"] = sharded.topology.mesh
    return sharded, FSDPDistributedIndex(**ranks, hsdp_outer_dp_shard=sharded.topology.is_hfsdp)
