"""Plan of a sharded model: units, buckets and partitions, decided before any memory is touched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import compat
from ..digests import value_digest
from ..formats import extension, quantize
from ..geometry.bucket_plan import BucketPlan
from ..geometry.partition import Partition, Peers, local_part, model_ranks
from ..geometry.topology import Topology
from ..lanes.lane import is_own
from ..lanes.rest import Rest
from ..memory.bucket import is_homeless
from ..memory.comm_buffers import BufferPolicy, Sizes, assign_all
from ..memory.tensor import RowShardedTensor
from ..program_lines import warn
from ..ranks import compared
from .buckets import BucketPlanner
from .experts import ExpertPlacement, marked
from .partition import Partitioner
from .precision import Policies
from .precision_plan import PrecisionPlan
from .references import check_not_replaced, check_references
from .units import Unit, UnitModules, find_units, join, repeated_blocks, resolve_units


@dataclass(frozen=True)
class ModelPlan:
    """How a model is sharded.

    Args:
        module: The model, with full parameters on this rank.
        units: Units with the plans of their buckets.
        experts: Which parameters are experts. None: all ranks hold the same parameters.
        precision: The policy of each parameter, and the modules that cast.
        partitions: How parameters are already divided, by name. None: not at all. Ignored parameters are absent.
    """

    module: nn.Module
    units: tuple[tuple[Unit, tuple[BucketPlan, ...]], ...]
    experts: ExpertPlacement | None
    precision: PrecisionPlan
    partitions: dict[str, Partition | None]

    @classmethod
    def of(
        cls, module: nn.Module, units: Sequence[Unit], planner: BucketPlanner, tensor_parallel: DeviceMesh | None
    ) -> ModelPlan:
        """Plan a model.

        Args:
            module: The model.
            units: See :func:`divide`.
            planner: Plans the buckets of each unit.
            tensor_parallel: Mesh dimension that Megatron's tensor-parallel attributes on parameters refer to.

        Raises:
            ValueError, NotImplementedError: Parameters cannot be sharded as they are.
        """
        plans = tuple((unit, tuple(planner.unit(unit))) for unit in units)
        plan = cls(module, plans, planner.experts, planner.precision, {})
        plan._check_experts()
        dense = Partitioner(planner.topology.mesh, tensor_parallel)
        expert = Partitioner(planner.experts.topology.mesh, of_experts=True) if planner.experts is not None else dense
        for unit in units:
            for param, locations in unit.params:
                name = locations[0].name
                partitioner = expert if name in plan.expert_names else dense
                is_sharded = isinstance(param, RowShardedTensor)
                plan.partitions[name] = (
                    param.row_split.partition
                    if is_sharded
                    else partitioner.of(name, param, [location.module for location in locations])
                )
        plan._check_quantized(planner)
        plan._check_extensions(planner)
        if plan.experts is None:
            return plan
        mesh, others = planner.topology.mesh, plan.tensor_parallel
        names = {name for partition in others for name in partition.mesh.mesh_dim_names or ()}
        return replace(plan, experts=plan.experts.among(model_ranks(mesh, ()), model_ranks(mesh, others), names))

    def with_buffers(self, policy: BufferPolicy) -> ModelPlan:
        """Return the plan with communication buffers for its buckets."""
        buckets = list(self.buckets)
        sizes = [Sizes(b.layout.numel, b.sent_numel, b.sent_dtype, b.comm_dtype, b.requires_grad) for b in buckets]
        made = iter(
            replace(bucket, gather_buffers=gathers, gradient_buffers=gradients)
            for bucket, (gathers, gradients) in zip(buckets, assign_all(sizes, policy), strict=True)
        )
        return replace(
            self, units=tuple((unit, tuple(itertools.islice(made, len(plans)))) for unit, plans in self.units)
        )

    def with_resharding(self, of_unit: Callable[[Unit], bool | int | None]) -> ModelPlan:
        """Return the plan with what happens to the buckets of each unit between forward and backward."""
        return replace(
            self,
            units=tuple(
                (unit, tuple(replace(bucket, reshard_after_forward=of_unit(unit)) for bucket in buckets))
                for unit, buckets in self.units
            ),
        )

    def with_rest(self, of_unit: Callable[[Unit], Rest], topologies: Sequence[Topology]) -> ModelPlan:
        """Return the plan with the places where the buckets of units rest.

        Args:
            topologies: Those of dense parameters and of experts.

        Raises:
            NotImplementedError: A bucket cannot rest there.
        """
        units = tuple(
            (unit, tuple(replace(bucket, rest=of_unit(unit)) for bucket in buckets)) for unit, buckets in self.units
        )
        for bucket in (bucket for _, buckets in units for bucket in buckets):
            bucket.rest.check(bucket, topologies[bucket.is_expert])
        return replace(self, units=units)

    @property
    def buckets(self) -> Iterator[BucketPlan]:
        return (bucket for _, buckets in self.units for bucket in buckets)

    @property
    def tensor_parallel(self) -> list[Partition]:
        """Partitions of parameters that are not experts."""
        experts = self.expert_names
        return [p for name, p in self.partitions.items() if p is not None and name not in experts]

    @property
    def expert_names(self) -> frozenset[str]:
        """Names of the experts' parameters."""
        return frozenset(slot.name for bucket in self.buckets if bucket.is_expert for slot in bucket.layout.slots)

    def describe(self, check_values: bool) -> list[str]:
        """Describe what all data-parallel ranks have in common. Experts are described without their names and
        values."""
        experts = self.expert_names
        params = dict(self.module.named_parameters())
        lines = []
        for name, param in params.items():
            called = "an expert's" if name in experts else name
            ignored = "" if name in self.partitions else "ignored "
            lines.append(
                f"{ignored}parameter {called}: {tuple(param.shape)}, {param.dtype}, requires_grad={param.requires_grad}"
            )
        for name, buffer in shared_buffers(self.module, experts).items():
            lines.append(f"buffer {name}: {tuple(buffer.shape)}, {buffer.dtype}")
        lines += [*map(_bucket, self.buckets), *self.precision.describe()]
        return lines + (_values(params, self.partitions.keys() - experts) if check_values else [])

    def describe_experts(self, check_values: bool) -> list[str]:
        """Describe what ranks with the same experts have in common beyond that."""
        experts = self.expert_names
        params = {name: param for name, param in self.module.named_parameters() if name in experts}
        lines = [f"expert {name}: {tuple(param.shape)}" for name, param in params.items()]
        return lines + (_values(params, experts) if check_values else [])

    def describe_shared_experts(self, check_values: bool) -> list[str]:
        """Describe what ranks with the same experts have in common if they have parts of other parameters."""
        buckets = [bucket for bucket in self.buckets if bucket.is_expert]
        return [*map(_bucket, buckets), *self.precision.describe(), *self.describe_experts(check_values)]

    def _check_quantized(self, planner: BucketPlanner) -> None:
        """Raise if parameters are to be gathered in float8, and that means nothing here, or would not be right."""
        topology = planner.topology
        asking = [policy for policy in planner.precision.policies if policy.param_comm_dtype is not None]
        quantized = [bucket for bucket in self.buckets if bucket.scaling]
        with_transposes = compat.transformer_engine.FORMS.keys() - {compat.transformer_engine.MXFP8}
        if planner.keeps_transposes and not any(bucket.form in with_transposes for bucket in quantized):
            warn(
                "keep_fp8_transpose_cache has no effect: it is for weights that layers of Transformer Engine get as "
                "they were gathered in fp8, and the model has none (quantized_model_init with Float8CurrentScaling, "
                "and full sharding).",
            )
        by_torchao = any(bucket.form == compat.torchao.FORM for bucket in quantized)
        if not asking and not by_torchao:
            return
        asked = (
            "Float8LinearConfig(enable_fsdp_float8_all_gather=True)"
            if by_torchao
            else f"param_comm_dtype={asking[0].param_comm_dtype}"
        )
        if not topology.gathers_shards:
            raise NotImplementedError(
                f"{asked} is for shards that are gathered at each use, but the model is sharded as {topology}, where "
                "gathered parameters stay between uses. Use zero_dp_strategy='optim_grads_params', with "
                "outer_dp_sharding_strategy='no_shard' if there are outer ranks, or take it out."
            )
        if not quantized:
            raise ValueError(
                f"param_comm_dtype={asking[0].param_comm_dtype} is given, but no parameter is quantized: by default "
                "only matrices in units are, and only parameters of two or three dimensions can be (with "
                "param_comm_scaling='mxfp8' or 'nvfp4', if their rows are multiples of 32 or 16). Pass "
                "fsdp_unit_modules, or param_comm_filter=lambda name, parameter: ..."
            )
        for bucket in quantized:
            if bucket.scaling != "tensorwise" or bucket.stays_quantized:  # libraries have scales per part
                continue
            for slot in bucket.layout.slots:
                if _is_cut(self.partitions[slot.name], len(slot.shape)):
                    raise NotImplementedError(
                        f"param_comm_scaling='tensorwise' takes one scale per matrix, but {slot.name!r} is divided "
                        "over other ranks (tensor parallelism), which know only their part's largest value. Use "
                        "param_comm_scaling='rowwise', or leave it out with param_comm_filter."
                    )

    def _check_extensions(self, planner: BucketPlanner) -> None:
        """Raise NotImplementedError if parameters that gather themselves cannot do so."""
        for bucket in self.buckets:
            if not bucket.is_extension:
                continue
            (slot,), ranks = bucket.layout.slots, bucket.layout.world_size
            what = f"Parameter {slot.name!r} gathers itself (fsdp_pre_all_gather)"
            if bucket.is_expert:
                raise NotImplementedError(
                    f"{what} and is an expert, which is not implemented. Use an ordinary parameter."
                )
            if not planner.topology.gathers_shards:
                raise NotImplementedError(
                    f"{what} at each use, but the model is sharded as {planner.topology}, where gathered parameters "
                    "stay between uses. Use zero_dp_strategy='optim_grads_params', with "
                    "outer_dp_sharding_strategy='no_shard' if there are outer ranks, or an ordinary parameter."
                )
            if not all(bucket.layout.rows(0, rank) for rank in range(ranks)):
                raise NotImplementedError(
                    f"{what}, which needs rows on each rank, but its shape is {slot.shape}, and each of {ranks} ranks "
                    f"gets {-(-slot.num_rows // ranks)} rows while there are some. Use an ordinary parameter, or fewer "
                    "ranks (HSDP)."
                )

    def _check_experts(self) -> None:
        """Raise ValueError if experts are expected and not found, or found and not expected."""
        if self.experts is None:
            for name, param in self.module.named_parameters():
                if marked(param):
                    raise ValueError(
                        f"Parameter {name!r} has allreduce=False: it is an expert, which other data-parallel ranks do "
                        "not hold. Pass expt_device_mesh, the mesh of the ranks that share it: of n data-parallel "
                        "ranks and e-fold expert parallelism one of (n / e, e) ranks, with dp_shard_dim as the name "
                        "of the first dimension."
                    )
        elif self.experts.is_default and not self.expert_names:
            raise ValueError(
                "expt_device_mesh is given, but no parameter is an expert: none is in a module called 'experts', or "
                "has the attribute allreduce=False. Pass is_expert=lambda name, parameter: ..., or leave "
                "expt_device_mesh out."
            )


def divide(
    module: nn.Module,
    unit_modules: UnitModules,
    policies: Policies,
    unit_bytes: int | None,
    by_module: bool,
    allows_meta: bool,
    ignored: Collection[nn.Parameter] = (),
) -> tuple[tuple[Unit, ...], PrecisionPlan]:
    """Divide a model that can be sharded into units, and find the policies of its parameters and modules.

    Args:
        module: The model.
        unit_modules: See :data:`~mfsdp_compile.runtime.plan.units.UnitModules`.
        policies: Mixed-precision policies.
        unit_bytes: See :class:`~mfsdp_compile.runtime.geometry.layout.LayoutPolicy`.
        by_module: See :func:`~mfsdp_compile.runtime.plan.units.find_units`.
        allows_meta: Whether parameters may be on the meta device.
        ignored: Parameters that are not sharded.

    Raises:
        ValueError, TypeError, NotImplementedError: Unit classes or parameters cannot be sharded.
    """
    check_not_replaced(module)
    _check_ignored(module, ignored)
    _check_shardable(module, allows_meta, ignored)
    check_references(module)
    if unit_modules is None and unit_bytes is not None:
        raise ValueError(
            f"unit_bytes={unit_bytes:,} joins small units, but with fsdp_unit_modules=None the whole model is one "
            "unit. Pass the classes to shard by, or remove unit_bytes."
        )
    if unit_modules is None and by_module:
        raise ValueError(
            "enable_fine_grained_param_gather gathers the modules of a unit one by one, but with "
            "fsdp_unit_modules=None the whole model is one unit, which is not divided. Pass the classes to shard by, "
            "or 'auto'."
        )
    if unit_modules is None and (blocks := repeated_blocks(module)):
        names = ", ".join(cls.__qualname__ for cls in blocks)
        warn(
            "fsdp_unit_modules is None: the whole model is one unit, so all of its parameters are gathered at once, "
            "and during a step each rank holds them all, as with DDP. "
            f"Candidates for units, by repetition: {names}. Pass them, or 'auto' to use these.",
        )
    classes, groups = resolve_units(module, unit_modules)
    if (several := next((group for group in groups if len(group) > 1), None)) and (unit_bytes is not None or by_module):
        raise ValueError(
            f"fsdp_unit_modules makes one unit of {len(several)} modules, and "
            + (
                "unit_bytes joins units by size"
                if unit_bytes is not None
                else "enable_fine_grained_param_gather divides"
            )
            + ": pass only one of them."
        )
    precision = PrecisionPlan.of(module, classes, policies, {each for group in groups for each in group})
    units = find_units(module, classes, by_module, groups, ignored)
    joined = join(module, units, unit_bytes, precision.gathered_bytes) if unit_bytes is not None else units
    return joined, precision


def _check_ignored(module: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    own = set(module.parameters())
    if strangers := [param for param in ignored if param not in own]:
        raise ValueError(
            f"ignored_params contains a parameter of shape {tuple(strangers[0].shape)} that does not belong to the "
            "model."
        )


def shared_buffers(module: nn.Module, experts: Collection[str]) -> dict[str, Tensor]:
    """Return the buffers that all ranks have: those that are not in a module that holds experts.

    Args:
        experts: Names of the experts' parameters.
    """
    owners = {name.rpartition(".")[0] for name in experts}

    def is_shared(name: str) -> bool:
        parts = name.split(".")[:-1]
        return not any(".".join(parts[: i + 1]) in owners for i in range(len(parts)))

    return {name: buffer for name, buffer in module.named_buffers() if is_shared(name)}


def _is_cut(partition: Partition | None, ndim: int) -> bool:
    """Whether other ranks hold parts of the same matrices."""
    if partition is None or isinstance(partition, Peers):
        return False
    return any(placement.is_shard() and placement.dim % ndim >= ndim - 2 for placement in partition.placements)


def _bucket(bucket: BucketPlan) -> str:
    digest = bucket.layout.signature if bucket.is_expert else bucket.layout.fingerprint
    dtypes = f"gathered in {bucket.compute_dtype}, main dtype {bucket.main_dtype}"
    how = "".join(str(plugin) for plugin in bucket.plugins if is_own(plugin))
    reduced = f", reduced in {bucket.comm_dtype}{how}, summed in {bucket.grad_dtype}"
    reshard = bucket.reshard_after_forward
    more = f"{_quantized(bucket)}{f', reshard_after_forward={reshard}' if reshard is not None else ''}"
    more += f", in {rest}" if (rest := str(bucket.rest)) else ""
    return f"bucket {bucket.name}: {digest}, {dtypes}{reduced}{more}"


def _quantized(bucket: BucketPlan) -> str:
    if bucket.is_extension:
        return ", gathers itself"
    if not bucket.scaling:
        return ""
    return f", gathered in {quantize.kind_of(bucket.scaling)}, {bucket.scaling}, {bucket.form}"


def _values(params: Mapping[str, nn.Parameter], names: Collection[str]) -> list[str]:
    """Describe the values of those parameters that each rank has."""
    found = {
        name: param
        for name, param in params.items()
        if name in names and not param.is_meta and not isinstance(param, RowShardedTensor)
    }
    return [compared.line(f"values of {name}", value_digest(local_part(param))) for name, param in found.items()]


def _check_shardable(module: nn.Module, allows_meta: bool, ignored: Collection[nn.Parameter]) -> None:
    for name, part in module.named_modules():
        compat.transformer_engine.check_layer(part, name)
        own = [param for param in part.parameters(recurse=False) if param not in ignored]
        if isinstance(part, torch.jit.ScriptModule) and own:
            raise NotImplementedError(
                f"Module {name or 'model'!r} is a torch.jit.ScriptModule: its code reads its parameters itself, and "
                "would not find what was gathered. Shard the module that it was scripted or traced from, or pass its "
                "parameters as ignored_params: each rank then trains them alone, unless they are frozen."
            )
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None and own:
            raise NotImplementedError(
                f"Embedding {name or 'model'!r} has max_norm={part.max_norm}: its forward writes to its weight, which "
                "is a gathered copy there, and each rank would write other rows. Normalize its output instead (set its "
                "max_norm to None), or pass its weight as ignored_params."
            )
    names: dict[int, str] = {}
    for name, param in module.named_parameters():
        if param in ignored:
            continue
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run the model once before fully_shard_model."
            )
        other = names.setdefault(id(compat.torchao.plain(param)), name)
        if other != name:
            raise ValueError(
                f"Parameters {other!r} and {name!r} were one before torchao converted their layers: with "
                "enable_fsdp_float8_all_gather=True it wraps each on its own, and they would be trained apart. Leave "
                "one of the layers out with module_filter_fn, and tie the weights after the conversion."
            )
        if compat.torchao.is_weight(param):
            compat.torchao.check_weight(name, param)
        elif compat.transformer_engine.is_weight(param):
            compat.transformer_engine.check_weight(name, param)
        elif extension.is_extended(param):
            extension.check(name, param, compat.torchao.refusal(type(param.data)))
        elif (
            type(param) is not nn.Parameter
            and type(param.data) not in (Tensor, DTensor)
            and not is_homeless(param)
            and not compat.is_fake(param)
        ):
            kind = type(param.data).__name__
            sharded = " It seems to be already sharded." if kind == "RowShardedTensor" else ""
            sharded += compat.torchao.refusal(type(param.data))
            raise ValueError(
                f"Parameter {name!r} is a {kind}; fully_shard_model takes ordinary parameters, and DTensors.{sharded}"
            )
        elif compat.bitsandbytes.is_of_8_bits(param):
            raise NotImplementedError(
                f"Parameter {name!r} is a {type(param).__name__}, which bitsandbytes has put there, with statistics "
                "that only it has. Of its weights, those of 4 bits can be sharded (load_in_4bit=True, Linear4bit). "
                "Others can stay whole on each rank: pass them in ignored_params."
            )
        if param.is_meta and not allows_meta:
            raise ValueError(
                f"Parameter {name!r} is on the meta device and has no value. Pass init_model_with_meta_device=True to "
                "initialize it, module by module (to shard: init_fn), or initialize the model on a real device."
            )
