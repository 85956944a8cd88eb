"""Sharding a model in place: ranks agree on a plan, memory is allocated, and modules get sharded parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .. import compat
from ..determinism import is_deterministic
from ..eager.engine import EagerRuntime, Window
from ..eager.modules import is_sharded, release_module, shard_module
from ..eager.save_methods import guard_saving
from ..eager.units import EagerUnit
from ..formats.casts import Casts
from ..formats.packed import take_apart
from ..geometry.exchange import Overlap
from ..geometry.layout import LayoutPolicy
from ..geometry.topology import Topology
from ..init import meta
from ..lanes.lane import PARTS, Lane, Plugin, is_own
from ..lanes.rest import ON_DEVICE, Rest
from ..lanes.strategies import lane_of
from ..memory import pickled as pickled  # registers how tensors at rest are pickled
from ..memory.allocation import Allocate, Allocator
from ..memory.bucket import Bucket, ParamHandle
from ..memory.comm_buffers import BufferPolicy, BufferPool
from ..memory.registration import Registration, check_allocator
from ..owner import ModuleRef, stop_ignoring
from ..plan import communicators
from ..plan.buckets import BucketPlanner
from ..plan.communicators import Communication
from ..plan.experts import ExpertPlacement
from ..plan.model_plan import ModelPlan, divide
from ..plan.precision import GradientPolicy, Policies
from ..plan.references import move_hooks, retire
from ..plan.units import Unit, UnitModules
from ..program_lines import warn
from ..ranks.agreement import agree
from ..ranks.coordinator import Coordinator
from .membership import Membership
from .sharded_model import ShardedModel, forget

_RANDOM = "random numbers to initialize with (call torch.manual_seed with one seed on all ranks)"

ParamHandles = Mapping[nn.Module, Mapping[str, ParamHandle]]
"""The bucket of every sharded parameter, by module and attribute."""


@dataclass(frozen=True)
class ShardingOptions:
    """How a model is sharded.

    Args:
        unit_modules: See :data:`~mfsdp_compile.runtime.plan.units.UnitModules`.
        by_module: See :func:`~mfsdp_compile.runtime.plan.units.find_units`.
        precision: Mixed-precision policies.
        gradient_policy: Options for gradients.
        overlap: Kinds of collectives that may overlap with computation.
        check_values: Whether to compare parameter values between ranks, in addition to names, shapes and dtypes.
        layout_policy: Limits for bucket layouts.
        whole: Names of parameters that should each be kept on one rank.
        experts: Function that determines which parameters are experts, and which ranks hold them. None: all ranks hold
            the same parameters.
        tensor_parallel: Mesh dimension that Megatron's tensor-parallel attributes on parameters refer to.
        from_meta: Initializer of parameters and buffers on the meta device. None: there may be none on that device.
        buffer_policy: Which buckets use communication buffers.
        allocate: Function that allocates them. None: torch does.
        registers: Whether buffers are registered with NCCL: now, later (:meth:`.Registration.register`), or never.
        symmetric: Whether they are registered as symmetric memory, if NCCL has that.
        communication: Communicators, and NCCL's settings for them.
        keeps_transposes: See :class:`~.plan.buckets.BucketPlanner`.
        plugins: What changes lanes, of all buckets.
        ignored: Parameters that are not sharded, moved or reduced.
        reshard_after_forward: Function that returns for each unit what its buckets have; see
            :class:`~..geometry.bucket_plan.BucketPlan`.
        rest: Function that returns for each unit where its buckets rest.
    """

    unit_modules: UnitModules
    precision: Policies
    gradient_policy: GradientPolicy = field(default_factory=GradientPolicy)
    overlap: Overlap = field(default_factory=Overlap)
    check_values: bool = True
    layout_policy: LayoutPolicy = field(default_factory=LayoutPolicy)
    whole: Collection[str] = ()
    experts: Callable[[], ExpertPlacement] | None = None
    tensor_parallel: DeviceMesh | None = None
    from_meta: meta.Initializer | None = None
    buffer_policy: BufferPolicy = field(default_factory=BufferPolicy)
    allocate: Allocate | None = None
    registers: Literal["now", "later", "never"] = "never"
    symmetric: bool = True
    communication: Communication = field(default_factory=Communication)
    plugins: tuple[Plugin, ...] = ()
    by_module: bool = False
    keeps_transposes: bool = False
    ignored: frozenset[nn.Parameter] = frozenset()
    reshard_after_forward: Callable[[Unit], bool | int | None] = lambda unit: None
    rest: Callable[[Unit], Rest] = lambda unit: ON_DEVICE


@torch.inference_mode(False)  # tensors of inference mode could not be written to by later steps
def shard_model(
    module: nn.Module, topology: Topology, every: dist.ProcessGroup, device: torch.device, options: ShardingOptions
) -> ShardedModel:
    """Shard a model in place. A collective over ``every``.

    Args:
        module: The model, with full parameters on this rank.
        topology: The data-parallel ranks, and what is sharded over them.
        every: Process group of the data-parallel ranks.
        device: Device of shards and buffers.

    Raises:
        ValueError, TypeError: Unit classes or parameters cannot be sharded. The model is unchanged.
        RuntimeError: Ranks hold different models. The model is unchanged.
    """
    initializer = options.from_meta if meta.has_meta(module) else None
    topology = replace(topology, inspects=options.gradient_policy.report_nan, in_order=is_deterministic())
    communicators.warn_of_idle_settings(topology, options.communication)
    with contextlib.ExitStack() as undoing:
        plan = _agree_on_plan(module, topology, every, device, options, initializer, undoing)
        members = Membership.of(plan, topology, every, options.check_values)
        if members.folds_experts:
            shared = plan.describe_shared_experts(options.check_values)
            members.agree_on_experts([*_settings(topology, plan.experts, options), *shared])
        communicators.check_zero_cta(topology, every, options.communication)
        members.make_communicators(options.communication, options.overlap)
        for size in sorted(
            {getattr(plugin, "within", 0) for bucket in plan.buckets for plugin in bucket.plugins} - {0}
        ):
            members.topology.make_levels(size)
        _probe(plan, members, device)
        if options.registers != "never":
            check_allocator(members.group_names, device)
        coordinator = Coordinator(members, type(module).__name__, [name for name, _ in module.named_parameters()])

        # From here on, only running out of memory can fail, and the initialization of parameters on the meta device.
        made = _make_units(plan, members, device, keeps_originals=initializer is not None)
        casts = {holder: casts for holder, (_, casts) in plan.precision.borders.items()}
        del plan  # it holds the original parameters
        if initializer is not None:
            _initialize(members.everyone, module, made, device, initializer)
        undoing.pop_all()
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            holder._buffers[name] = buffer.to(device) if buffer is not None else None
    eager = EagerRuntime(made.units, module.modules(), options.overlap)
    buckets = [bucket for unit in made.units for bucket in unit.buckets]
    pool = BufferPool(Allocator(options.allocate)) if options.allocate is not None else BufferPool()
    registration = Registration(pool, options.symmetric) if options.registers != "never" else None
    sharded = ShardedModel(
        module,
        buckets,
        eager,
        members,
        coordinator,
        options.precision,
        options.overlap,
        pool,
        registration,
        {name: param for name, param in module.named_parameters(remove_duplicate=False) if param in options.ignored},
    )
    if registration is not None and options.registers == "now":
        registration.register(buckets)
    _shard_modules(module, sharded, made.handles, casts)
    guard_saving(module)
    for part in module.modules():
        compat.refuse_other_sharding(part)
    sharded.forget_old_code()
    sharded.awaits_values = initializer is not None and not initializer.gives_values
    for size in sorted({bucket.plan.portions for bucket in buckets} - {0}):
        sharded.make_portions(size)
    for reference, name, successor in made.replaced:
        if (held := reference()) is not None:
            retire(held, name, successor)
    return sharded


def _probe(plan: ModelPlan, members: Membership, device: torch.device) -> None:
    """Run lanes that the user's plug-ins have changed on small integers, once for each kind of bucket."""
    found: dict[str, tuple[str, Lane, Lane, Topology]] = {}
    plugins = {id(plugin): plugin for bucket in plan.buckets for plugin in bucket.plugins if not is_own(plugin)}
    for bucket in plan.buckets:
        topology = members.topologies[bucket.is_expert]
        if not bucket.is_changed_by_user:
            continue
        own, theirs = (tuple(p for p in bucket.plugins if is_own(p) == mine) for mine in (True, False))
        like, lane = lane_of(replace(bucket, plugins=own), topology), lane_of(bucket, topology)
        for plugin in theirs:
            if lane_of(replace(bucket, plugins=(*own, plugin)), topology) != like:
                plugins.pop(id(plugin), None)
        if any(stage.error and not stage.joint for part in PARTS for stage in like[part]):  # then nothing is exact
            like, lane = (lane_of(replace(bucket, plugins=plugins), topology) for plugins in ((), theirs))
        if compat.is_real_group(topology.every.name):
            found.setdefault(lane.key, (bucket.name, lane, like, topology))
    for plugin in plugins.values():
        warn(f"Plug-in {plugin!r} changes the lane of no bucket. Does the strategy have the stages that it looks for?")
    if found:
        from ..lanes.probe import probe

        probe(found.values(), device)


def _lanes(plan: ModelPlan, topologies: Sequence[Topology]) -> list[str]:
    """Return what the user's plug-ins have made of lanes, for comparison between ranks."""
    changed = [bucket for bucket in plan.buckets if bucket.is_changed_by_user]
    lanes = [lane_of(bucket, topologies[-1 if bucket.is_expert else 0]) for bucket in changed]
    return [f"lane of {bucket.name}: {lane.text}" for bucket, lane in zip(changed, lanes, strict=True)]


def _agree_on_plan(
    module: nn.Module,
    topology: Topology,
    every: dist.ProcessGroup,
    device: torch.device,
    options: ShardingOptions,
    initializer: meta.Initializer | None,
    undoing: contextlib.ExitStack,
) -> ModelPlan:
    """Plan how to shard the model. If planning fails on one rank, or plans differ, it fails on all ranks.

    Args:
        undoing: Gets what undoes changes of the model.
    """
    found: list[ModelPlan] = []

    def describe() -> list[str]:
        undoing.callback(take_apart(module, options.ignored))
        if initializer is not None:
            initializer.prepare(module)
        layout_policy, tensor_parallel = options.layout_policy, options.tensor_parallel
        units, precision = divide(
            module,
            options.unit_modules,
            options.precision,
            layout_policy.unit_bytes,
            options.by_module,
            options.from_meta is not None,
            options.ignored,
        )
        own = options.experts() if options.experts is not None else None
        if own is not None:
            own = replace(
                own,
                topology=replace(
                    own.topology,
                    skips_itself=not topology.inspects,
                    inspects=topology.inspects,
                    in_order=topology.in_order,
                ),
            )
        communicating = [topology] if own is None else [topology, own.topology]
        planner = BucketPlanner(
            topology,
            precision,
            options.gradient_policy,
            layout_policy,
            frozenset(options.whole),
            own,
            options.keeps_transposes,
            options.plugins,
        )
        plan = ModelPlan.of(module, units, planner, tensor_parallel).with_buffers(options.buffer_policy)
        plan = plan.with_resharding(options.reshard_after_forward)
        found.append(plan.with_rest(options.rest, [communicating[0], communicating[-1]]))
        return [
            *_settings(topology, own, options),
            *found[0].describe(options.check_values),
            *_lanes(found[0], communicating),
            *([f"{_RANDOM}: {meta.random_state(device)}"] if initializer is not None and initializer.draws else []),
        ]

    def describe_experts() -> tuple[Sequence[int], list[str]]:
        if (own := found[0].experts) is None:
            return (), []
        here = set(dist.get_process_group_ranks(every))
        return [rank for rank in own.ranks if rank in here], found[0].describe_experts(options.check_values)

    agree(every, "fully_shard_model", describe, within=describe_experts, heeds_refusals=True)
    return found.pop()


def _settings(topology: Topology, experts: ExpertPlacement | None, options: ShardingOptions) -> list[str]:
    """Describe what was asked for, and versions, because passes and Inductor's choices of kernels differ between
    them."""
    communicating = [topology] if experts is None else [topology, experts.topology]
    tensor_parallel = options.tensor_parallel
    return [
        f"torch {torch.__version__}",
        f"{topology}{', sums in the order of ranks' if topology.in_order else ''}",
        *(communicators.describe(each, options.communication, options.overlap) for each in communicating),
        *([str(experts)] if experts is not None else []),
        f"tp_dim of {tensor_parallel.size()} ranks" if tensor_parallel is not None else "no tp_dim",
        *([str(options.buffer_policy)] if options.buffer_policy != BufferPolicy() else []),
        *_flags(options),
    ]


def _flags(options: ShardingOptions) -> list[str]:
    """Describe options of which another rank's would change numbers, or which collectives it starts."""
    return [
        *([str(options.gradient_policy)] if options.gradient_policy != GradientPolicy() else []),
        *([str(options.overlap)] if options.overlap != Overlap() else []),
        *([f"buffers are registered {options.registers}"] if options.registers != "never" else []),
        *(["buffers are not in symmetric memory"] if not options.symmetric else []),
        *(["values are not compared (check_values)"] if not options.check_values else []),
        *(["transposes of weights are kept"] if options.keeps_transposes else []),
    ]


@dataclass
class _Made:
    """What sharding has made of a model.

    Args:
        units: Units with their buckets.
        handles: The bucket of every sharded parameter.
        originals: Replaced parameters, by module and attribute, if they were asked for.
        replaced: Weak references to the replaced parameters, their names, and what has replaced them.
    """

    units: list[EagerUnit]
    handles: dict[nn.Module, dict[str, ParamHandle]]
    originals: dict[nn.Module, dict[str, nn.Parameter]]
    replaced: list[tuple[weakref.ref[nn.Parameter], str, nn.Parameter]]


def _make_units(plan: ModelPlan, members: Membership, device: torch.device, keeps_originals: bool) -> _Made:
    """Allocate buckets and put their parameters into the modules.

    Args:
        keeps_originals: Whether to keep the replaced parameters, to restore them if initialization fails.
    """
    made = _Made([], {}, {}, [])
    for unit, bucket_plans in plan.units:
        params_of = {locations[0].name: (param, locations) for param, locations in unit.params}
        buckets = []
        for bucket_plan in bucket_plans:
            params = [params_of[slot.name] for slot in bucket_plan.layout.slots]
            partitions = [members.partitions[slot.name] for slot in bucket_plan.layout.slots]
            shared_by = members.topologies[bucket_plan.is_expert]
            bucket = Bucket(bucket_plan, [p for p, _ in params], [s for _, s in params], shared_by, device, partitions)
            buckets.append(bucket)
            for index, (original, locations) in enumerate(params):
                if original is not bucket.params[index]:
                    made.replaced.append((weakref.ref(original), locations[0].name, bucket.params[index]))
                    move_hooks(original, bucket.params[index])
                for location in locations:
                    if keeps_originals:
                        made.originals.setdefault(location.module, {})[location.attribute] = original
                    location.module._parameters[location.attribute] = bucket.params[index]
                    made.handles.setdefault(location.module, {})[location.attribute] = ParamHandle.at(bucket, index)
        made.units.append(
            EagerUnit(unit.name, tuple(map(ModuleRef, unit.modules)), unit.is_root, tuple(buckets), unit.is_module)
        )
    return made


def _initialize(
    everyone: dist.ProcessGroup,
    module: nn.Module,
    made: _Made,
    device: torch.device,
    initializer: meta.Initializer,
) -> None:
    """Initialize parameters and buffers on the meta device.

    If this fails on one rank, or ranks have drawn different numbers, it fails on all ranks, and the model is unchanged.
    """

    def describe() -> list[str]:
        meta.initialize(module, made.handles, made.originals, device, initializer)
        return [f"random numbers after initialization: {meta.random_state(device)}"] if initializer.draws else []

    try:
        agree(everyone, "fully_shard_model, initialization of parameters on the meta device", describe)
    except BaseException:
        for holder, own in made.originals.items():
            holder._parameters.update(own)
        raise


def _shard_modules(
    root: nn.Module, model: ShardedModel, handles: ParamHandles, casts: Mapping[nn.Module, Casts]
) -> None:
    """Give each module that is a window, holds parameters, or casts, the behavior of a sharded one."""
    eager = model.eager
    unit_of = {m(): unit for unit in eager.units if not unit.is_root for m in unit.modules}
    root_buckets = [bucket for unit in eager.units if unit.is_root for bucket in unit.buckets]
    for module in dict.fromkeys([root, *unit_of, *handles, *casts]):
        own = handles.get(module, {})
        held = {handle.bucket for handle in own.values()}
        owns = tuple(bucket for bucket in root_buckets if bucket in held)
        window = Window(model, eager, ModuleRef(module), unit_of.get(module), owns, is_root=module is root)
        eager.add_window(window)
        shard_module(module, own, window, casts.get(module, Casts()))


def check_dissolves(model: ShardedModel) -> None:
    """Raise if :meth:`dissolve` would lose something.

    Raises:
        RuntimeError: A step is in progress, or there are gradients.
        NotImplementedError: A parameter gathers itself, or modules get it quantized.
    """
    model.refuse_in_step("The model became a part of a larger one")
    for bucket in model.buckets:
        name = bucket.plan.layout.slots[0].name
        if bucket.has_gradients:
            raise RuntimeError(
                f"Parameters like {name!r} have gradients from before their module became a part of a larger "
                "model, which would be lost. Use them, and call zero_grad(), before the larger model is used."
            )
        if bucket.plan.is_extension or bucket.plan.scaling:
            raise NotImplementedError(
                f"Parameter {name!r} was sharded before the model that it is a part of, because something used it, "
                "and it is gathered in its own form, which cannot be sharded again. Call fully_shard on all "
                "modules, from the inside out, before anything reads their parameters."
            )


def dissolve(model: ShardedModel) -> None:
    """Let the model's modules be sharded again, as a part of a larger model, which takes over their parameters.

    Parameters stay the same objects, with the same rows, but are in no bucket until then.
    """
    assert model.module is not None
    model.await_gathers()
    forget(model)
    for module in model.module.modules():
        if is_sharded(module):
            release_module(module)
    for param in (param for bucket in model.buckets for param in bucket.params):
        del vars(param)["mfsdp_handle"]
    stop_ignoring(model.ignored.values())
