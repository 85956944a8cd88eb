"""What a model is sharded with besides the arguments of :func:`~mfsdp_compile.shard`.

A plug-in for a model changes the options that it is sharded by. A plug-in for lanes is a function that changes how each
bucket travels (docs/write_a_stage.md). Both go into ``plugins=[...]``.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.init.meta import ByMethod
from mfsdp_compile.runtime.lanes.rest import ON_DEVICE
from mfsdp_compile.runtime.memory.allocation import Allocate
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.model.shard import ShardingOptions
from mfsdp_compile.runtime.plan import communicators
from mfsdp_compile.runtime.plan.experts import IsExpert, build_experts
from mfsdp_compile.runtime.plan.meshes import tensor_parallel_mesh
from mfsdp_compile.runtime.plan.precision import GradientPolicy, Scaling

from .by_unit import by_module, of_unit
from .flags import check_flag, check_group

__all__ = [
    "BufferPolicy",
    "ByMethod",
    "ByModule",
    "CommBuffers",
    "Communicators",
    "Experts",
    "GradientPolicy",
    "HostMemory",
    "KeepTransposes",
    "LayoutPolicy",
    "ModelPlugin",
    "Overlap",
    "Ranks",
    "Scaling",
    "Setup",
    "TensorParallel",
    "WholeParameters",
]

if TYPE_CHECKING:
    from mfsdp_compile.runtime.guests.offload.policy import AnyOffloadPolicy


@dataclass(frozen=True)
class Ranks:
    """The ranks that a model is sharded over. See :func:`~mfsdp_compile.fully_shard_model` for each of them."""

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    outer_dp_sharding_strategy: ShardingStrategy | str | int = 0


@dataclass
class Setup:
    """What a plug-in for a model sees.

    Args:
        module: The model, which is not sharded yet.
        ranks: The ranks as they were given.
        build: Interprets them, which needs a process group; see :func:`.build_topology`.
    """

    module: nn.Module
    ranks: Ranks
    build: Callable[[], tuple[Topology, dist.ProcessGroup]]

    @functools.cached_property
    def built(self) -> tuple[Topology, dist.ProcessGroup]:
        """The ranks and what is sharded over them, and the process group of all."""
        return self.build()

    @property
    def topology(self) -> Topology:
        return self.built[0]


class ModelPlugin:
    """Changes how a model is sharded. All ranks must pass equal plug-ins."""

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        """Return the options to shard by. Called in the order of ``plugins``, before anything is changed.

        It must not change the module: nobody would undo that.

        Raises:
            TypeError, ValueError: The plug-in does not suit the model or the ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure(options, setup).")


@dataclass(frozen=True)
class TensorParallel(ModelPlugin):
    """The tensor-parallel dimension of models whose parameters have Megatron's attributes.

    Args:
        tp_dim: Name of the mesh dimension.
    """

    tp_dim: str

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        ranks = setup.ranks
        found = tensor_parallel_mesh(ranks.device_mesh, self.tp_dim, (ranks.dp_shard_dim, ranks.dp_outer_dim))
        return replace(options, tensor_parallel=found)


@dataclass(frozen=True)
class Experts(ModelPlugin):
    """Experts, which only some ranks hold. The names of mesh dimensions are those of :class:`Ranks`.

    Args:
        expt_device_mesh: The ranks that share experts.
        hybrid_fsdp_expt_group: Process group of all ranks of both data-parallel dimensions.
        expt_fsdp_group_ag: A second process group of the ranks that experts are sharded over, for gathers.
        is_expert: Tells whether a parameter is an expert's, by its name; None: see
            :func:`~mfsdp_compile.fully_shard_model`.
    """

    expt_device_mesh: DeviceMesh
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None
    is_expert: IsExpert | None = None

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        if self.expt_device_mesh is None:  # type: ignore[redundant-expr]  # for everything else, that is all ranks
            raise TypeError("Experts takes a DeviceMesh, got None")
        ranks = setup.ranks
        build = functools.partial(
            build_experts,
            self.expt_device_mesh,
            ranks.dp_shard_dim,
            ranks.dp_outer_dim,
            self.hybrid_fsdp_expt_group,
            setup.topology.strategy,
            ShardingStrategy.of(ranks.outer_dp_sharding_strategy, "outer_dp_sharding_strategy"),
            self.expt_fsdp_group_ag,
            self.is_expert,
            setup.topology,
        )
        return replace(options, experts=build)


@dataclass(frozen=True)
class CommBuffers(ModelPlugin):
    """Communication buffers, which gathers and reductions use again and again.

    Args:
        policy: Which buckets use them.
        registers: Whether they are registered with NCCL: now, later (``model.manual_buffer_registration()``), or never.
        symmetric: Whether they are registered as symmetric memory, if NCCL has that.
        allocate: Allocates them, as ``buffer_allocator`` of :func:`~mfsdp_compile.fully_shard_model`. None: torch does.
    """

    policy: BufferPolicy = field(default_factory=lambda: BufferPolicy(double=True))
    registers: Literal["now", "later", "never"] = "never"
    symmetric: bool = True
    allocate: Allocate | None = None

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        check_group("CommBuffers", self.policy, BufferPolicy)
        check_flag("CommBuffers: symmetric", self.symmetric)
        if self.registers not in ("now", "later", "never"):
            raise ValueError(f"CommBuffers: registers is 'now', 'later' or 'never', got {self.registers!r}")
        if self.allocate is not None and not callable(self.allocate):
            raise TypeError(
                "buffer_allocator takes a function (numel, dtype, device) -> tensor, got "
                f"{reprlib.repr(self.allocate)}. Memory that is freed after each use, as by Megatron-FSDP's "
                "StorageResizeBasedBucketAllocator, is what models without fsdp_double_buffer use; with it, buffers "
                "are used in turn, as by its rotary and fixed pools."
            )
        return replace(
            options,
            buffer_policy=self.policy,
            registers=self.registers,
            symmetric=self.symmetric,
            allocate=self.allocate,
        )


@dataclass(frozen=True)
class Communicators(ModelPlugin):
    """Communicators, and NCCL's settings for them: ``communication`` of :func:`~mfsdp_compile.fully_shard_model`."""

    communication: communicators.Communication | Mapping[str, Any] | None

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        return replace(options, communication=communicators.Communication.of(self.communication))


@dataclass(frozen=True)
class HostMemory(ModelPlugin):
    """Shards, gradients and the optimizer's state in host memory.

    Args:
        offload_policy: See :func:`~mfsdp_compile.fully_shard_model`: one policy, or one by module or class of modules.
    """

    offload_policy: AnyOffloadPolicy | Mapping[type[nn.Module] | nn.Module, AnyOffloadPolicy | None] | None

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        from mfsdp_compile.runtime.guests.offload.policy import rest_of

        values = by_module("offload_policy", self.offload_policy, setup.module)
        find = of_unit({key: rest_of(value, "offload_policy") for key, value in values.items()})
        return replace(options, rest=lambda unit: find(unit) or ON_DEVICE)


@dataclass(frozen=True)
class WholeParameters(ModelPlugin):
    """Parameters that are each kept on one rank, for optimizers that look at all of one.

    Args:
        whole_params: Tells whether a parameter is kept whole, by its name.
    """

    whole_params: Callable[[str, nn.Parameter], bool]

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        if not callable(self.whole_params):
            raise TypeError(
                f"whole_params takes a function (name, parameter) -> bool, got {reprlib.repr(self.whole_params)}"
            )
        named = setup.module.named_parameters()
        return replace(options, whole=[name for name, param in named if self.whole_params(name, param)])


@dataclass(frozen=True)
class ByModule(ModelPlugin):
    """Gather the modules of a unit one by one, each where it is used: ``enable_fine_grained_param_gather``."""

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        return replace(options, by_module=True)


@dataclass(frozen=True)
class KeepTransposes(ModelPlugin):
    """Let layers of Transformer Engine keep transposes of weights in float8: ``keep_fp8_transpose_cache``."""

    def configure(self, options: ShardingOptions, setup: Setup) -> ShardingOptions:
        return replace(options, keeps_transposes=True)


_PLUGINS = {
    "Ranks": "dp_shard_dim dp_outer_dim hybrid_fsdp_group fsdp_group_ag outer_dp_sharding_strategy",
    "TensorParallel": "tp_dim",
    "Experts": "expt_device_mesh hybrid_fsdp_expt_group expt_fsdp_group_ag is_expert",
    "CommBuffers": """fsdp_double_buffer maxpool_double_buffer fsdp_db_use_persist_buf_on_alloc_fail nccl_ub
        fsdp_manual_registration disable_symmetric_registration buffer_allocator""",
    "Communicators": "communication",
    "HostMemory": "offload_policy cpu_offload",
    "WholeParameters": "whole_params",
    "ByModule": "enable_fine_grained_param_gather",
    "KeepTransposes": "keep_fp8_transpose_cache",
    "GradientPolicy": """average_in_collective calculate_per_token_loss use_decoupled_grad report_nan_in_param_grad
        cuda_graph_mode""",
    "Overlap": "overlap_grad_reduce overlap_param_gather",
    "LayoutPolicy": "optimizer_block_size bucket_bytes unit_bytes disable_bucketing",
    "ByMethod": "init_model_with_meta_device",
}
"""Names in this module, and the arguments of ``fully_shard_model`` that they stand for."""
HERE = {
    "param_init_fn": "It is init_fn here.",
    "shard_placement_fn": "Rows (dimension 0) are divided; mfsdp_compile.plugins.WholeParameters keeps some whole.",
    "sync_model_each_microbatch": "Call model.set_model_auto_sync(...) afterwards.",
    "preserve_fp32_weights": "It is main_params_dtype of mixed_precision_policy here.",
    "grad_reduce_in_fp32": "It is main_grads_dtype of mixed_precision_policy here.",
} | {
    argument: f"It is part of mfsdp_compile.plugins.{name} here; see docs/shard.md."
    for name, arguments in _PLUGINS.items()
    for argument in arguments.split()
}
"""Where the arguments of ``fully_shard_model`` are that ``shard`` does not take, for messages."""
