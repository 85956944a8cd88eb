"""Tracing a model without values to outlines of its graphs.

It follows the path of ``torch.compile(backend="mfsdp")``, except for the last step.

Of a long run of consecutive equal units, only three are traced if they are checkpointed: the first, one that represents
all others, and the last. Without checkpointing, the second is traced too. The outline is extended afterwards. If the
representative turns out to differ from the others, more units are traced.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile.api import fully_shard_model
from mfsdp_compile.backend.compile import find_shells, prepare
from mfsdp_compile.backend.options import CompileOptions, known_rings
from mfsdp_compile.diagnostics.explain import reason_and_place
from mfsdp_compile.parallel.context_parallel import ContextParallel
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import Context, SchedulePolicy
from mfsdp_compile.passes.phase import Phase
from mfsdp_compile.passes.solver.costs import CostModel, kernels, origin
from mfsdp_compile.passes.solver.hardware import Hardware
from mfsdp_compile.passes.solver.outline import Copies, Gradients, Outline, Use
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.plan.experts import is_expert
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, Policies
from mfsdp_compile.runtime.plan.precision_plan import PrecisionPlan
from mfsdp_compile.runtime.plan.units import Unit, find_units, neighbors, repeated_blocks, resolve_unit_classes

from .workloads import UNDIVIDED, Degrees, Divided, Inputs, ModelPart, Workload

__all__ = ["Trace", "TracedBucket", "trace"]

_RANKS = 8
"""Number of ranks of the process group used for tracing. The outline does not depend on it."""


@dataclass(frozen=True)
class TracedBucket:
    """A bucket of the traced model, or of a unit that a traced one represents.

    Args:
        unit: Name of the unit.
        like: Name of the traced unit.
        parameters: Names of the parameters in the traced unit.
    """

    unit: str
    like: str
    parameters: frozenset[str]


@dataclass(frozen=True)
class Trace:
    """What a step computes, on any number of ranks.

    Args:
        outlines: Outlines of forward and backward, of the whole model. Buckets are positions in ``buckets``.
        buckets: Buckets as they were traced. A layout for other ranks may split them differently.
        units: Traced units, by name.
        order: Names of all units, in order of first use.
        neighbors: Units that can be joined, as runs of consecutive units: gathered size in bytes, by name.
        buffer_bytes: Bytes of the whole model's buffers.
        parameters: Number of parameters of the whole model.
        tokens: Tokens in the batch of one rank, or of the ranks that compute it together.
        forward_flops: Floating-point operations of one rank's forward.
        received_bytes, sent_bytes: Bytes that this stage of a pipeline receives from the previous stage and sends to
            the next in a forward. 0 at the ends.
    """

    outlines: Mapping[Phase, Outline]
    buckets: Sequence[TracedBucket]
    units: Mapping[str, Unit]
    order: Sequence[str]
    neighbors: Sequence[Mapping[str, int]]
    buffer_bytes: int
    parameters: int
    tokens: int
    forward_flops: float
    received_bytes: int = 0
    sent_bytes: int = 0


def trace(
    work: Workload,
    hardware: Hardware,
    fused: bool,
    *,
    parts: bool = False,
    degrees: Degrees = UNDIVIDED,
    stage: int = 0,
) -> Trace:
    """Trace a model.

    Args:
        work: The model, and what a rank computes with it.
        hardware: Hardware for the times in the outlines.
        fused: Whether the inner compiler fuses kernels (Inductor).
        parts: Record the uses of each parameter separately, so that plans can split units into smaller buckets. Makes
            both tracing and planning slower.
        degrees: Numbers of ranks that divide the model.
        stage: Stage of the pipeline, if layers are divided.

    Raises:
        RuntimeError: If there already is a process group, or torch.compile makes several graphs of the model.
        ValueError: If the model does not say how to divide it like that, or cannot be divided by these numbers of
            ranks.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A plan needs a fake process group, but a real one already exists: plan in a process of its own."
        )
    divided = _divided(work, degrees)
    for around in _AROUND if work.checkpoint != "none" else _AROUND[1:]:
        with contextlib.suppress(_NotAlikeError):
            return _trace(work, hardware, fused, parts, degrees, stage, divided, around)
    return _trace(work, hardware, fused, parts, degrees, stage, divided, None)


def _trace(
    work: Workload,
    hardware: Hardware,
    fused: bool,
    parts: bool,
    degrees: Degrees,
    stage: int,
    divided: Divided | None,
    around: tuple[int, int] | None,
) -> Trace:
    """Trace the units at the ends of each run of equal units, and one between them that represents the others.

    Args:
        around: Numbers of units before and after the representative. None: all units are traced.

    Raises:
        _NotAlikeError: If the representative differs from the units that it represents.
    """
    with contextlib.ExitStack() as stack:
        mesh, experts = stack.enter_context(_fake_group(degrees))
        context = ContextParallel(mesh["cp"]) if degrees.context > 1 else None
        if context is not None:
            context.positions(work.length)  # creates masks, which fails where tensors have no values
        group = experts["ep"].get_group() if experts is not None and degrees.expert > 1 else None
        within = experts["etp"].get_group() if experts is not None and degrees.expert_tensor > 1 else None
        part = ModelPart(degrees, group, context, stage, within)
        stack.enter_context(compat.fake_mode())
        stack.enter_context(compat.quiet())
        stack.enter_context(compat.without_collection())
        with _default_dtype(work.dtype), _NoValues():
            model = divided.build(part) if divided is not None else work.build()
        classes = resolve_unit_classes(model, work.unit_modules if work.unit_modules != "auto" else _blocks(model))
        whole = find_units(model, classes)
        order = [unit.name for unit in whole]
        policy = MixedPrecisionPolicy(param_dtype=work.param_dtype)
        precision = PrecisionPlan.of(model, classes, Policies(policy))
        runs_of_neighbors = [
            {unit.name: _gathered_bytes(unit, precision, degrees) for unit in run} for run in neighbors(model, whole)
        ]
        params = [(sites[0].name, param) for unit in whole for param, sites in unit.params]
        counts = (p.numel() * (degrees.experts_apart if is_expert(name, p) else 1) for name, p in params)
        sizes = (sum(b.nbytes for b in model.buffers()), sum(counts))
        runs, names = _shorten(model, classes, around, stack) if around is not None else ([], {})
        if work.checkpoint != "none":
            _checkpoint(model, classes, work.checkpoint)
        if degrees.tensor > 1 and divided is not None and divided.parallelize is not None:
            model = divided.parallelize(model, mesh["tp"])
        if within is not None and divided is not None and divided.divide_experts is not None:
            model = divided.divide_experts(model, experts["ep", "etp"])  # type: ignore[index]
        units = {unit.name: unit for unit in find_units(model, classes)}
        meshes = {"device_mesh": mesh, "dp_shard_dim": "fsdp"}
        if experts is not None and divided is not None and "expert" in divided.by:
            meshes["expt_device_mesh"] = experts
        if divided is not None and divided.inputs is not None:
            inputs = divided.inputs(part, work.batch, work.length)
        else:
            inputs = work.inputs(work.batch, work.length)
        outlines, buckets, readers, sent = _outlines(
            model, meshes, classes, work, policy, inputs, hardware, fused, 1 if parts else None
        )
        received = sum(
            each.nbytes for each in compat.tree_leaves(inputs) if isinstance(each, Tensor) and each.requires_grad
        )
    outlines = {
        phase: replace(outline, units=tuple(names.get(unit, unit) for unit in outline.units))
        for phase, outline in outlines.items()
    }
    buckets = [replace(bucket, unit=names.get(bucket.unit, bucket.unit)) for bucket in buckets]
    readers = {names.get(of, of): {names.get(unit, unit) for unit in units} for of, units in readers.items()}
    for run in runs:
        for unit, following in itertools.pairwise((run.before, run.names[0], run.after)):
            if more := readers.get(unit, set()) - {following}:
                raise _NotAlikeError(
                    f"{', '.join(sorted(more))} read the output of {unit}, not only that of {following}"
                )
        outlines, buckets = _stretch(outlines, buckets, run)
    flops = sum(segment.flops for segment in outlines[Phase.FORWARD].segments)
    tokens = work.batch * work.length
    return Trace(
        outlines,
        buckets,
        units,
        order,
        runs_of_neighbors,
        *sizes,
        tokens,
        flops,
        received,
        0 if part.is_last else sent,
    )


def _gathered_bytes(unit: Unit, precision: PrecisionPlan, degrees: Degrees) -> int:
    """Return the bytes of a gathered unit, after tensor parallelism has divided what is not an expert."""
    dense = replace(unit, params=tuple((p, sites) for p, sites in unit.params if not is_expert(sites[0].name, p)))
    every, divided = precision.gathered_bytes(unit), precision.gathered_bytes(dense)
    return every - divided + divided // degrees.tensor


def _blocks(model: nn.Module) -> Sequence[type[nn.Module]]:
    """Return the units of a model that does not name any."""
    return repeated_blocks(model) or [type(child) for child in model.children()]


def _divided(work: Workload, degrees: Degrees) -> Divided | None:
    """Return how to make a part of the model, or None if it is not divided.

    Raises:
        ValueError: If it cannot be divided.
    """
    if degrees == UNDIVIDED:
        return None
    for kind, size in degrees._asdict().items():
        if size > 1 and (work.divided is None or kind not in work.divided.by):
            raise ValueError(
                f"{work.name} cannot be planned with {size} {kind.replace('_', ' ')}-parallel ranks: the workload does not say how it "
                "is divided over them (Workload.divided)"
            )
    assert work.divided is not None
    if work.length % (2 * degrees.context) and degrees.context > 1:
        raise ValueError(
            f"sequences of {work.length} tokens cannot be divided into {2 * degrees.context} chunks, two for each of "
            f"{degrees.context} context-parallel ranks"
        )
    return work.divided


@contextlib.contextmanager
def _fake_group(degrees: Degrees) -> Iterator[tuple[DeviceMesh, DeviceMesh | None]]:
    """Yield the mesh of all ranks, and the mesh of experts if these are not on all data-parallel ranks alike.

    The dimension ``fsdp`` of the first covers all ranks that parameters are sharded over, that of the second those that
    share experts. Neighbors hold different parts of the experts, also where tensor parallelism divides everything else.
    """
    apart, tensor, context = degrees.experts_apart, degrees.tensor, degrees.context
    ranks = _RANKS * apart * context
    with compat.fake_process_group(ranks * tensor):
        try:
            names = ("fsdp", "tp") if context == 1 else ("dp", "cp", "tp")
            shape = (ranks,) if context == 1 else (ranks // context, context)
            dense = init_device_mesh("cpu", (*shape, tensor), mesh_dim_names=names)
            if context > 1:
                dense["dp", "cp"]._flatten("fsdp")
            if apart == tensor == 1:
                yield dense, None
            else:
                sizes = (ranks * tensor // apart, degrees.expert, degrees.expert_tensor)
                yield dense, init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "ep", "etp"))
        finally:
            torch.compiler.reset()


class _NoValues(compat.TorchFunctionMode):
    """Turns initialization into a no-op.

    Initialization takes most of the time to create a large model without values, and some of torch's initializers look
    at the values that they have drawn.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__self__", None) is torch.Tensor.is_meta:
            return True
        if getattr(function, "__name__", "") in ("normal_", "uniform_", "fill_", "zero_") and args:
            return args[0]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Traced(BaseException):
    """Raised when tracing has everything it needs.

    Not an Exception: for those, Dynamo builds a report that takes longer than finishing the trace.
    """


def _outlines(
    model: nn.Module,
    meshes: Mapping[str, Any],
    classes: Sequence[type[nn.Module]],
    work: Workload,
    policy: MixedPrecisionPolicy,
    arguments: Inputs,
    hardware: Hardware,
    fused: bool,
    bucket_bytes: int | None,
) -> tuple[dict[Phase, Outline], list[TracedBucket], dict[str, set[str]], int]:
    """Trace the graphs of a sharded model.

    Returns:
        Outlines, buckets, for each unit the other units that read its results in forward, and the bytes of the output.
    """
    sharded = fully_shard_model(
        model,
        fsdp_unit_modules=list(classes),
        mixed_precision_policy=policy,
        check_values=False,
        bucket_bytes=bucket_bytes,
        **meshes,
    )
    outlines: dict[Phase, Outline] = {}
    readers: dict[str, set[str]] = {}
    outputs: list[Tensor] = []
    found: list[pipeline.CompileRecord] = []
    costs = CostModel(hardware, fused, groups=known_rings())
    schedule = SchedulePolicy(activation_offload=work.activation_offload)
    options = CompileOptions(
        schedule=schedule, hardware=hardware, regions=False, fp8_matmul=work.fp8_matmul, fp8_wgrad=work.fp8_wgrad
    )

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = compat.copy_graph_module(gm)
        shells = find_shells(gm)
        if not shells:
            return gm.forward
        record, _, inputs = prepare(gm, example_inputs, shells, options)
        found.append(record)

        def partition(joint: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
            if fused:
                joint = compat.inductor_joint_passes(joint)
            pipeline.tag_for_trial(joint.graph, record)
            forward, backward = compat.min_cut_partition(joint, joint_inputs, **kwargs)
            graphs = {Phase.FORWARD: forward.graph, Phase.BACKWARD: backward.graph}
            count = kwargs["num_fwd_outputs"]
            pipeline.offload_saved_on_trial(forward.graph, backward.graph, record, count)
            outlines.update(pipeline.outlines_of(graphs, record.context, costs, count))
            readers.update(_readers(forward.graph, record.context, fused))
            outputs.extend(node.meta["val"] for node in forward.graph.output_node().args[0][:count])
            raise _Traced  # nothing after this point is needed

        if not record.context.whole_model:
            shown = ", ".join(record.absent[:4]) + (
                f" and {len(record.absent) - 4} more" if len(record.absent) > 4 else ""
            )
            raise RuntimeError(
                f"{work.name} does not use {shown} for the planned batch. Pass inputs that use all units (a batch "
                "with images, if the model has a vision tower), or remove them from the model."
            )
        return compat.trace_with_aot(gm, inputs, partition, decomposed=fused)

    args, kwargs = arguments
    try:
        with contextlib.suppress(_Traced):
            work.loss(torch.compile(sharded, backend=backend, fullgraph=True)(*args, **kwargs))
    except compat.backend_failed() as failed:
        raise compat.inner_exception(failed) from None
    except compat.not_traceable() as error:
        why = reason_and_place(str(error), compat.where_not_traceable(error))
        raise RuntimeError(
            f"torch.compile cannot make one graph of {work.name}, which a plan needs: {why}. mfsdp_compile.explain(model, "
            "*inputs) on a sharded model shows all such places."
        ) from None
    if Phase.BACKWARD not in outlines:
        raise RuntimeError(f"{work.name} has no trainable parameters, or its output does not depend on them")
    infos = found[0].context.buckets
    buckets = [TracedBucket(i.unit, i.unit, frozenset(slot.name for slot in i.layout.slots)) for i in infos]
    return outlines, buckets, readers, sum(output.nbytes for output in outputs)


def _readers(forward: torch.fx.Graph, context: Context, fused: bool) -> dict[str, set[str]]:
    """Return, for each unit, the other units that read its results.

    A kernel belongs to the unit whose parameters were used last before it. What does not depend on parameters, such as
    rotary tables, is no unit's result.
    """
    order = {node: position for position, node in enumerate(forward.nodes)}
    gathers = [g for g in roles.gathers(forward) if g.uses]
    first = {order[min(g.uses)]: context.buckets[g.bucket].unit for g in gathers}
    users = {user for g in gathers for user in g.uses}
    begins = sorted(first)
    unit_of: dict[torch.fx.Node, str] = {}
    found: dict[str, set[str]] = {}
    for kernel in kernels(forward, fused):
        position = bisect.bisect_right(begins, kernel.place)
        unit = first[begins[position - 1]] if position else ""
        sources = {origin(source) for node in kernel.nodes for source in node.all_input_nodes}
        if not sources.isdisjoint(unit_of) or not users.isdisjoint(kernel.nodes):
            unit_of |= dict.fromkeys(kernel.nodes, unit)
        for source in sources:
            if unit_of.get(source, unit) != unit:
                found.setdefault(unit_of[source], set()).add(unit)
    return found


# -- activation checkpointing -----------------------------------------------------------------------------------------


def _checkpoint(model: nn.Module, classes: Sequence[type[nn.Module]], how: str) -> None:
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        if isinstance(module, tuple(classes)):
            unit: Any = module
            options: dict[str, Any] = {"context_fn": _save_some} if how == "selective" else {}
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, **options)


def _save_some() -> Any:
    """Save attention and every second matrix product, as torchtitan does."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products = 0

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal products
        name = getattr(operator, "_opname", "")
        if name in ("mm", "addmm", "bmm"):
            products += not context.is_recompute
            return CheckpointPolicy.MUST_SAVE if products % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        saved = "scaled_dot_product" in name and "backward" not in name
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# -- equal units ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _EqualUnits:
    """Consecutive equal units.

    Args:
        names: Names of the units in the middle, in order. The first one was traced, and represents all of them.
        before, after: Names of the units before and after these, which were traced.
    """

    names: tuple[str, ...]
    before: str
    after: str


_AROUND = ((1, 1), (2, 1), (2, 2))
"""Numbers of units to trace before and after the representative of a run, tried in order until one works.

1, 1: The representative must have an equal unit on both sides.
2, 1: Without checkpointing, the partitioner saves other values of a unit if the first one comes before it. Not tried
before this, as a trace in vain takes longer than one more unit.
2, 2: The rest of the model may use the output of the second-to-last unit.

If none works, because a unit in the middle differs from the others, all units are traced.
"""


class _NotAlikeError(RuntimeError):
    """A unit cannot represent others."""


def _shorten(
    model: nn.Module, classes: Sequence[type[nn.Module]], around: tuple[int, int], stack: contextlib.ExitStack
) -> tuple[list[_EqualUnits], dict[str, str]]:
    """Remove equal units from lists of modules, so that of each run one and those ``around`` it remain.

    Args:
        around: Numbers of units to keep before and after it.
        stack: Restores changed configurations.

    Returns:
        The runs, and the original names of the remaining units, by their current names.
    """
    runs: list[_EqualUnits] = []
    names: dict[str, str] = {}
    for name, owner in list(model.named_modules()):
        if not isinstance(owner, nn.ModuleList):
            continue
        children = list(owner)
        if not all(isinstance(child, tuple(classes)) for child in children):
            continue
        kept: list[int] = []
        for start, stop in _equal(children):
            first, after = start + around[0], stop - around[1]
            if after - first > 1:
                middle = tuple(f"{name}.{i}" for i in range(first, after))
                runs.append(_EqualUnits(middle, f"{name}.{first - 1}", f"{name}.{after}"))
                kept += [*range(start, first + 1), *range(after, stop)]
            else:
                kept += range(start, stop)
        names |= {f"{name}.{now}": f"{name}.{before}" for now, before in enumerate(kept)}
        if len(kept) < len(children):
            del owner[:]
            owner.extend(children[i] for i in kept)
            _tell_config(model, name, len(children), kept, stack)
    return runs, names


def _tell_config(model: nn.Module, name: str, count: int, kept: Sequence[int], stack: contextlib.ExitStack) -> None:
    """Adapt a transformers configuration, which models query for the number of layers and the kind of each.

    The configuration is that of the innermost module around the layers.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        config: Any = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        if getattr(config, "num_hidden_layers", None) == count and hasattr(config, "to_dict"):
            of_layers = {
                key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == count
            }
            said = {"num_hidden_layers": len(kept)} | {
                key: [value[i] for i in kept] for key, value in of_layers.items()
            }
            for key, value in said.items():
                stack.callback(setattr, config, key, getattr(config, key))
                setattr(config, key, value)
            return


def _equal(children: Sequence[nn.Module]) -> Iterator[tuple[int, int]]:
    """Yield runs ``[start, stop)`` of modules that are equal except for their values and their position."""
    kinds = [_kind(child) for child in children]
    # Settings that only number the modules do not count as differences.
    counting = (
        {key for key in kinds[0][1] if all(kind[1].get(key) == i for i, kind in enumerate(kinds))} if kinds else ()
    )
    for _, settings in kinds:
        for key in counting:
            settings.pop(key)
    start = 0
    for index in range(1, len(children) + 1):
        if index == len(children) or kinds[index] != kinds[start]:
            yield start, index
            start = index


def _kind(module: nn.Module) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Return what a module is, and its settings."""
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    tensors += [(name, b.shape, b.dtype, False) for name, b in module.named_buffers()]
    settings = {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, (bool, int, float, str))
    }
    return (str(module), tensors), settings


def _stretch(
    outlines: Mapping[Phase, Outline], buckets: Sequence[TracedBucket], run: _EqualUnits
) -> tuple[dict[Phase, Outline], list[TracedBucket]]:
    """Extend outlines as if all units of a run had been traced."""
    own = [number for number, bucket in enumerate(buckets) if bucket.unit == run.names[0]]
    numbers = {(number, 0): number for number in own}  # the first copy keeps them, others are appended
    found = list(buckets)
    for copy, name in enumerate(run.names[1:], 1):
        for number in own:
            numbers[number, copy] = len(found)
            found.append(replace(buckets[number], unit=name))
    stretched = {phase: _repeat(outline, run, numbers, phase is Phase.BACKWARD) for phase, outline in outlines.items()}
    if _left(stretched) != _left(outlines):
        raise _NotAlikeError(f"{run.names[0]} saves for backward what others release")
    return stretched, found


def _left(outlines: Mapping[Phase, Outline]) -> int:
    """Return the bytes in memory after a step, excluding gradients."""
    segments = sum(segment.saved + segment.temporary for outline in outlines.values() for segment in outline.segments)
    return segments - sum(gradients.elsewhere for outline in outlines.values() for gradients in outline.gradients)


def _repeat(outline: Outline, run: _EqualUnits, numbers: Mapping[tuple[int, int], int], backwards: bool) -> Outline:
    """Repeat the segments of the representative for each unit of the run. In a backward, the last unit comes first."""
    places = [i for i, unit in enumerate(outline.units) if unit == run.names[0]]
    if not places:
        return outline  # the backward of a model with this part frozen
    begin, end = places[0], places[-1] + 1
    if places != list(range(begin, end)):
        raise _NotAlikeError(f"{run.names[0]} uses the parameters of another unit in between")
    count, length = len(run.names), end - begin
    own = {number for number, _ in numbers}

    def moved(place: int, last: int) -> int:
        """Move a place of another unit's bucket. One that lives on behind the run begins, if inside, in its last unit."""
        return place + (count - 1) * length if last >= end and place >= begin else place

    def use_of(lives: Iterable[tuple[int, int, int]]) -> Use:
        buckets, waits, last = zip(*lives, strict=True)
        return Use(buckets, min(waits), last, waits)

    segments = [*outline.segments[:begin], *outline.segments[begin:end] * count, *outline.segments[end:]]
    order = run.names[::-1] if backwards else run.names
    labels = [*outline.units[:begin], *(name for name in order for _ in range(length)), *outline.units[end:]]
    uses: list[Use] = []
    gradients: list[Gradients] = []
    wholes: dict[int, tuple[int, int]] = {}
    for copy in range(count):
        shift, which = copy * length, count - 1 - copy if backwards else copy
        for use in outline.uses:
            if use.buckets[0] in own:
                uses.append(use_of((numbers[b, which], wait + shift, last + shift) for b, wait, last in use.lives))
        for g in outline.gradients:
            if g.bucket in own:
                start = g.begin + shift if g.begin is not None else None
                gradients.append(Gradients(numbers[g.bucket, which], start, g.ready + shift, g.elsewhere))
        for bucket, (start, stop) in outline.wholes.items():
            if bucket in own:
                wholes[numbers[bucket, which]] = (start + shift, stop + shift)
    for use in outline.uses:
        if use.buckets[0] not in own:
            uses.append(use_of((bucket, moved(wait, last), moved(last, last)) for bucket, wait, last in use.lives))
    for g in outline.gradients:
        if g.bucket not in own:
            start = moved(g.begin, g.ready) if g.begin is not None else None
            gradients.append(Gradients(g.bucket, start, moved(g.ready, g.ready), g.elsewhere))
    for bucket, (start, stop) in outline.wholes.items():
        if bucket not in own:
            wholes[bucket] = (moved(start, stop), moved(stop, stop))
    return Outline(
        tuple(segments),
        tuple(labels),
        tuple(sorted(uses, key=lambda use: use.first)),
        wholes,
        tuple(sorted(gradients, key=lambda g: g.ready)),
        tuple(sorted(_copies(outline, labels, begin, count), key=lambda copies: (copies.start, copies.wait))),
    )


def _copies(outline: Outline, labels: Sequence[str], begin: int, count: int) -> Iterator[Copies]:
    """Yield the copies of an outline in which ``count`` units are in the place of the one that begins with segment ``begin``.

    A copy's start and wait are up to two units apart: one is where the unit computes or reads the values, the other one at
    the turn of a unit before or after it. They are as far apart everywhere.

    Args:
        labels: Unit of each segment of the result.
    """
    traced, result = _Turns(outline.units), _Turns(labels)
    run = traced.of(begin)
    found = []
    for copies in outline.copies:
        at, other = (copies.start, copies.wait) if copies.outward else (copies.wait, copies.start)
        found.append((copies, at, other, traced.of(other) - traced.of(at)))
    # Where the turn of a unit of the run begins, as copies tell that start or end there.
    turn = {apart: traced.within(other) for _, _, other, apart in found if abs(traced.of(other) - run) <= 1}
    for copies, at, other, apart in found:
        unit = traced.of(at)
        for copy in range(count) if unit == run else [count - 1 if unit > run else 0]:
            there = unit + copy + apart
            in_run = abs(traced.of(other) - run) <= 1 or not run - 1 <= there <= run + count
            within = traced.within(other) if in_run else turn.get(apart, 0)
            places = result.place(unit + copy, traced.within(at)), result.place(there, within)
            start, wait = places if copies.outward else places[::-1]
            yield replace(copies, start=start, wait=wait)


class _Turns:
    """Segments by the position of their unit: consecutive segments of one unit have the same."""

    def __init__(self, units: Sequence[str]) -> None:
        self.begins = [i for i, unit in enumerate(units) if i == 0 or unit != units[i - 1]]
        self.count = len(units)

    def of(self, segment: int) -> int:
        """Return the position of a segment's unit; at the end, one more than that of the last unit."""
        return bisect.bisect_right(self.begins, segment) - 1 + (segment == self.count)

    def within(self, segment: int) -> int:
        """Return the number of segments between the beginning of the segment's unit and it."""
        return 0 if segment == self.count else segment - self.begins[self.of(segment)]

    def place(self, unit: int, within: int) -> int:
        """Return a segment.

        Raises:
            _NotAlikeError: The unit has fewer segments.
        """
        begins = [*self.begins, self.count]
        if unit + 1 < len(begins) and within >= begins[unit + 1] - begins[unit]:
            raise _NotAlikeError("values go to host memory while units of other sizes compute")
        return begins[unit] + within
