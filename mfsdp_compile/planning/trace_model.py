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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile.api import fully_shard_model
from mfsdp_compile.backend.compile import find_shells, prepare
from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.backend.predictions import known_rings
from mfsdp_compile.diagnostics.explain import reason_and_place
from mfsdp_compile.parallel.context_parallel import ContextParallel
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import Context, SchedulePolicy
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.hardware import Hardware
from mfsdp_compile.passes.guests.solver.outline import Outline
from mfsdp_compile.passes.guests.solver.producer import outlines_of
from mfsdp_compile.passes.kernels import kernels, origin
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.plan.experts import is_expert
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, Policies
from mfsdp_compile.runtime.plan.precision_plan import PrecisionPlan
from mfsdp_compile.runtime.plan.units import Unit, find_units, neighbors, repeated_blocks, resolve_unit_classes
from mfsdp_compile.runtime.schedule.phase import Phase

from .equal_units import AROUND, NotAlikeError, TracedBucket, shorten, stretch
from .workloads import UNDIVIDED, Degrees, Divided, Inputs, ModelPart, Workload

_RANKS = 8
"""Number of ranks of the process group used for tracing. The outline does not depend on it."""


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
    if work.loss_chunks is not None and not fused:
        raise ValueError(f"{work.name} has loss_chunks={work.loss_chunks}, which only plans for Inductor can have")
    traced = functools.partial(_trace, work, hardware, fused, parts, degrees, stage, _divided(work, degrees))
    for around in AROUND if work.checkpoint != "none" else AROUND[1:]:
        with contextlib.suppress(NotAlikeError):
            return traced(around)
    return traced(None)


def _trace(
    work: Workload,
    hardware: Hardware,
    fused: bool,
    parts: bool,
    degrees: Degrees,
    stage: int,
    divided: Divided,
    around: tuple[int, int] | None,
) -> Trace:
    """Trace the units at the ends of each run of equal units, and one between them that represents the others.

    Args:
        around: Numbers of units before and after the representative. None: all units are traced.

    Raises:
        NotAlikeError: If the representative differs from the units that it represents.
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
            model = divided.build(part)
        classes = resolve_unit_classes(model, work.unit_modules if work.unit_modules != "auto" else _blocks(model))
        whole = find_units(model, classes)
        order = [unit.name for unit in whole]
        policy = MixedPrecisionPolicy(param_dtype=work.param_dtype)
        precision = PrecisionPlan.of(model, classes, Policies(policy))
        runs_of_neighbors = [
            {unit.name: _gathered_bytes(unit, precision, degrees) for unit in run} for run in neighbors(model, whole)
        ]
        params = [(locations[0].name, param) for unit in whole for param, locations in unit.params]
        counts = (p.numel() * (degrees.experts_apart if is_expert(name, p) else 1) for name, p in params)
        sizes = (sum(b.nbytes for b in model.buffers()), sum(counts))
        runs, names = shorten(model, classes, around, stack) if around is not None else ([], {})
        if work.checkpoint != "none":
            _checkpoint(model, classes, work.checkpoint)
        if degrees.tensor > 1 and divided.parallelize is not None:
            model = divided.parallelize(model, mesh["tp"])
        if within is not None and divided.divide_experts is not None:
            model = divided.divide_experts(model, experts["ep", "etp"])  # type: ignore[index]
        units = {unit.name: unit for unit in find_units(model, classes)}
        meshes = {"device_mesh": mesh, "dp_shard_dim": "fsdp"}
        if experts is not None and "expert" in divided.by:
            meshes["expt_device_mesh"] = experts
        inputs_of = functools.partial(divided.inputs, part) if divided.inputs is not None else work.inputs
        inputs = inputs_of(work.batch, work.length)
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
                raise NotAlikeError(
                    f"{', '.join(sorted(more))} read the output of {unit}, not only that of {following}"
                )
        outlines, buckets = stretch(outlines, buckets, run)
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
    dense = replace(
        unit, params=tuple((p, locations) for p, locations in unit.params if not is_expert(locations[0].name, p))
    )
    every, divided = precision.gathered_bytes(unit), precision.gathered_bytes(dense)
    return every - divided + divided // degrees.tensor


def _blocks(model: nn.Module) -> Sequence[type[nn.Module]]:
    """Return the units of a model that does not name any."""
    return repeated_blocks(model) or [type(child) for child in model.children()]


def _divided(work: Workload, degrees: Degrees) -> Divided:
    """Return how to make a part of the model, or all of it if it is not divided.

    Raises:
        ValueError: If it cannot be divided.
    """
    if degrees == UNDIVIDED:
        return Divided(frozenset(), lambda part: work.build())
    for kind, size in degrees._asdict().items():
        if size > 1 and (work.divided is None or kind not in work.divided.by):
            raise ValueError(
                f"{work.name} cannot be planned with {size} {kind.replace('_', ' ')}-parallel ranks: the workload does "
                "not say how it is divided over them (Workload.divided)"
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
        schedule=schedule,
        hardware=hardware,
        regions=False,
        fp8_matmul=work.fp8_matmul,
        fp8_wgrad=work.fp8_wgrad,
        loss_chunks=work.loss_chunks,
    )

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = compat.copy_graph_module(gm)
        shells = find_shells(gm)
        if not shells:
            return gm.forward
        record, _, inputs = prepare(gm, example_inputs, shells, options)
        found.append(record)

        def partition(joint: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
            joint = pipeline.rewrite_joint(joint, record)
            if fused:
                joint = compat.inductor_joint_passes(joint)
            count = kwargs["num_fwd_outputs"]
            in_two = functools.partial(
                compat.min_cut_partition, joint_inputs=joint_inputs, distinct=record.distinct, **kwargs
            )
            graphs = pipeline.trial(joint, record, count, in_two)
            forward = graphs[Phase.FORWARD]
            outlines.update(outlines_of(graphs, record.context, costs, count))
            readers.update(_readers(forward, record.context, fused))
            outputs.extend(node.meta["val"] for node in forward.output_node().args[0][:count])
            raise _Traced  # nothing after this point is needed

        if not record.context.whole_model:
            shown = ", ".join(record.context.absent[:4]) + (
                f" and {len(record.context.absent) - 4} more" if len(record.context.absent) > 4 else ""
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
    except compat.BackendCompilerFailed as failed:
        raise failed.inner_exception from None
    except compat.TorchDynamoException as error:
        why = reason_and_place(str(error), compat.where_not_traceable(error))
        raise RuntimeError(
            f"torch.compile cannot make one graph of {work.name}, which a plan needs: {why}. "
            "mfsdp_compile.explain(model, *inputs) on a sharded model shows all such places."
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
