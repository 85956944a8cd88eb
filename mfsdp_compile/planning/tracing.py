"""From a model without values to outlines of its graphs: the way that ``torch.compile(backend="mfsdp")`` goes, but for the
last step.

Equal units that follow on one another are traced three times, not a hundred: the first, one that stands for all in the
middle, and the last. The outline is stretched afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile.api import fully_shard_model
from mfsdp_compile.backend import find_shells, prepare
from mfsdp_compile.options import CompileOptions
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import Phase, phase_of
from mfsdp_compile.passes.costs import CostModel
from mfsdp_compile.passes.flow import flow_of
from mfsdp_compile.passes.hardware import Hardware
from mfsdp_compile.passes.outline import Gradients, Outline, Use, outline_of
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.units import Unit, find_units, repeated_blocks, resolve_unit_classes

from .shapes import Workload

__all__ = ["Trace", "TracedBucket", "trace"]

_RANKS = 8
"""Of the process group that is traced with. The outline does not depend on it."""


@dataclass(frozen=True)
class TracedBucket:
    """A bucket of the traced model, or of a unit that it stands for.

    Args:
        unit: name of the unit.
        like: the unit that was traced.
        parameters: names in the traced unit.
    """

    unit: str
    like: str
    parameters: frozenset[str]


@dataclass(frozen=True)
class Trace:
    """What a step computes, on any number of ranks.

    Args:
        outlines: of forward and backward, of the whole model. Buckets are positions in ``buckets``.
        buckets: as they were traced; a layout for other ranks may part them otherwise.
        units: that were traced, by name.
        order: names of all units, in order of their first use.
        buffer_bytes: of the whole model.
        parameters: of the whole model.
        tokens: of one rank's batch.
        forward_flops: of one rank's forward, in floating-point operations.
    """

    outlines: Mapping[Phase, Outline]
    buckets: Sequence[TracedBucket]
    units: Mapping[str, Unit]
    order: Sequence[str]
    buffer_bytes: int
    parameters: int
    tokens: int
    forward_flops: float


def trace(work: Workload, hardware: Hardware, fused: bool) -> Trace:
    """Trace a model.

    Args:
        work: the model, and what a rank computes with it.
        hardware: whose times outlines have.
        fused: whether the inner compiler fuses kernels (Inductor).

    Raises:
        RuntimeError: there is a process group already, or torch.compile makes several graphs of the model.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "A plan is made with a process group of ranks that do not exist, and there is a real one already: plan in a "
            "process of its own."
        )
    with _fake_group(), compat.fake_mode():
        with _default_dtype(work.dtype):
            model = work.build()
        classes = resolve_unit_classes(model, work.unit_modules if work.unit_modules != "auto" else _blocks(model))
        whole = find_units(model, classes)
        order = [unit.name for unit in whole]
        sizes = (sum(b.nbytes for b in model.buffers()), sum(p.numel() for u in whole for p, _ in u.params))
        runs = _shorten(model, classes)
        if work.checkpoint != "none":
            _checkpoint(model, classes, work.checkpoint)
        units = {unit.name: unit for unit in find_units(model, classes)}
        outlines, buckets, flops = _outlines(model, classes, work, hardware, fused)
    for run in runs:
        outlines, buckets = _stretch(outlines, buckets, run)
    stretched = sum(segment.flops for segment in outlines[Phase.FORWARD].segments) if runs else flops
    return Trace(outlines, buckets, units, order, *sizes, work.batch * work.length, stretched)


def _blocks(model: nn.Module) -> Sequence[type[nn.Module]]:
    """The units of a model that names none."""
    return repeated_blocks(model) or [type(child) for child in model.children()]


@contextlib.contextmanager
def _fake_group() -> Iterator[None]:
    with compat.fake_process_group(_RANKS):
        try:
            yield
        finally:
            torch.compiler.reset()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _outlines(
    model: nn.Module, classes: Sequence[type[nn.Module]], work: Workload, hardware: Hardware, fused: bool
) -> tuple[dict[Phase, Outline], list[TracedBucket], float]:
    mesh = init_device_mesh("cpu", (_RANKS,), mesh_dim_names=("fsdp",))
    sharded = fully_shard_model(model, mesh, fsdp_unit_modules=list(classes), check_values=False)
    outlines: dict[Phase, Outline] = {}
    found: list[pipeline.Record] = []
    costs = CostModel(hardware, fused)
    options = CompileOptions(hardware=hardware)

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        gm = compat.copy_graph_module(gm)
        shells = find_shells(gm)
        if not shells:
            return gm.forward
        record, call, inputs = prepare(gm, example_inputs, shells, options)
        found.append(record)

        def partition(joint: Any, joint_inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
            pipeline.tag_for_trial(joint.graph, record)
            graphs = compat.min_cut_partition(joint, joint_inputs, **kwargs)
            saved = None
            for phase, graph_module in zip((Phase.FORWARD, Phase.BACKWARD), graphs, strict=True):
                roles.assign(graph_module.graph)
                count = kwargs["num_fwd_outputs"]
                flow = flow_of(graph_module.graph, record.context, costs, user_outputs=count, saved=saved)
                saved = flow.saved
                outlines[phase] = outline_of(flow, record.context)
            return graphs

        run = compat.trace_with_aot(gm, inputs, partition, decomposed=fused)

        def called(*args: Any) -> Any:
            _, tensors, rest = call.exchange(args)
            return run(*tensors, *rest)

        return called

    args, kwargs = work.inputs(work.batch, work.length)
    work.loss(torch.compile(sharded, backend=backend)(*args, **kwargs))
    if len(found) != 1 or Phase.BACKWARD not in outlines:
        raise RuntimeError(
            f"torch.compile makes {len(found)} graphs of {work.name}, and a plan needs one that holds the whole model. "
            "mfsdp_compile.explain(model, *inputs) on a sharded model says where it breaks, and why."
        )
    infos = found[0].context.buckets
    buckets = [TracedBucket(i.unit, i.unit, frozenset(slot.name for slot in i.layout.slots)) for i in infos]
    return outlines, buckets, sum(segment.flops for segment in outlines[Phase.FORWARD].segments)


# -- activation checkpointing -----------------------------------------------------------------------------------------


def _checkpoint(model: nn.Module, classes: Sequence[type[nn.Module]], how: str) -> None:
    from torch.utils.checkpoint import checkpoint

    for module in model.modules():
        if isinstance(module, tuple(classes)):
            options = {"context_fn": _save_some} if how == "selective" else {}
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **options)  # type: ignore[method-assign]


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
class _Run:
    """Equal units that follow on one another.

    Args:
        before, middle, after: names of the units that were traced.
        names: of all that ``middle`` stands for, in order.
    """

    before: str
    middle: str
    after: str
    names: tuple[str, ...]


_TRACED = 3


def _shorten(model: nn.Module, classes: Sequence[type[nn.Module]]) -> list[_Run]:
    """Take equal units out of lists of modules, so that three of each run are left."""
    runs = []
    for name, owner in list(model.named_modules()):
        if not isinstance(owner, nn.ModuleList):
            continue
        children = list(owner)
        if not all(isinstance(child, tuple(classes)) for child in children):
            continue
        kept: list[nn.Module] = []
        for start, stop in _equal(children):
            if stop - start > _TRACED:
                at = len(kept)
                names = tuple(f"{name}.{i}" for i in range(start + 1, stop - 1))
                runs.append(_Run(f"{name}.{at}", f"{name}.{at + 1}", f"{name}.{at + 2}", names))
                kept += [children[start], children[start + 1], children[stop - 1]]
            else:
                kept += children[start:stop]
        if len(kept) < len(children):
            del owner[:]
            owner.extend(kept)
    _tell_config(model, runs)
    return runs


def _tell_config(model: nn.Module, runs: Sequence[_Run]) -> None:
    """Configurations of transformers say how many layers there are; models ask them."""
    config = getattr(model, "config", None)
    if runs and hasattr(config, "num_hidden_layers") and hasattr(config, "to_dict"):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        config.num_hidden_layers = max(len(found) for found in lists)


def _equal(children: Sequence[nn.Module]) -> Iterator[tuple[int, int]]:
    """Runs ``[start, stop)`` of modules that are equal but for their values and their place."""
    start = 0
    kinds = [_kind(child, index) for index, child in enumerate(children)]
    for index in range(1, len(children) + 1):
        if index == len(children) or kinds[index] != kinds[start]:
            yield start, index
            start = index


def _kind(module: nn.Module, index: int) -> Any:
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    buffers = [(name, b.shape, b.dtype) for name, b in module.named_buffers()]
    settings = [
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, (bool, int, float, str)) and not (isinstance(value, int) and value == index)
    ]
    return str(module), tensors, buffers, [s for s in settings if not s[1].endswith("_idx")]


def _stretch(
    outlines: Mapping[Phase, Outline], buckets: Sequence[TracedBucket], run: _Run
) -> tuple[dict[Phase, Outline], list[TracedBucket]]:
    """As if all units of a run had been traced."""
    own = [number for number, bucket in enumerate(buckets) if bucket.unit == run.middle]
    count = len(run.names)
    # The first copy keeps the numbers; the others come at the end. Names of the units after the run move on.
    first = int(run.after.rpartition(".")[2])
    prefix = run.after.rpartition(".")[0]
    renamed = {run.middle: run.names[0]}
    for bucket in buckets:
        owner, _, index = bucket.unit.rpartition(".")
        if owner == prefix and index.isdigit() and int(index) >= first:
            renamed[bucket.unit] = f"{prefix}.{int(index) + count - 1}"
    numbers = {(number, 0): number for number in own}
    found = [replace(bucket, unit=renamed.get(bucket.unit, bucket.unit)) for bucket in buckets]
    for copy in range(1, count):
        for number in own:
            numbers[number, copy] = len(found)
            found.append(replace(buckets[number], unit=run.names[copy]))
    stretched = {phase: _repeat(outline, run, renamed, numbers) for phase, outline in outlines.items()}
    return stretched, found


def _repeat(
    outline: Outline, run: _Run, renamed: Mapping[str, str], numbers: Mapping[tuple[int, int], int]
) -> Outline:
    """The segments of the middle unit, as often as it stands for others."""
    places = [i for i, unit in enumerate(outline.units) if unit == run.middle]
    begin, end = places[0], places[-1] + 1
    if places != list(range(begin, end)):
        raise RuntimeError(
            f"{run.middle} computes in between with the parameters of another unit: it cannot stand for others. Plan with "
            "fewer layers, or name the units with unit_modules."
        )
    count, length = len(run.names), end - begin
    backwards = outline.units.index(run.after) < begin
    own = {number for number, _ in numbers}

    def units(copy: int) -> str:
        return run.names[count - 1 - copy if backwards else copy]

    def moved(place: int) -> int:
        return place if place < end else place + (count - 1) * length

    segments = [*outline.segments[:begin], *outline.segments[begin:end] * count, *outline.segments[end:]]
    labels = [renamed.get(unit, unit) for unit in outline.units[:begin]]
    labels += [units(copy) for copy in range(count) for _ in range(length)]
    labels += [renamed.get(unit, unit) for unit in outline.units[end:]]
    uses: list[Use] = []
    gradients: list[Gradients] = []
    wholes: dict[int, tuple[int, int]] = {}
    for copy in range(count):
        shift, which = copy * length, count - 1 - copy if backwards else copy
        for use in outline.uses:
            if use.buckets[0] in own:
                new = tuple(numbers[bucket, which] for bucket in use.buckets)
                uses.append(Use(new, use.first + shift, tuple(last + shift for last in use.last)))
        for g in outline.gradients:
            if g.bucket in own:
                start = g.begin + shift if g.begin is not None else None
                gradients.append(Gradients(numbers[g.bucket, which], start, g.ready + shift, g.elsewhere))
        for bucket, (start, stop) in outline.wholes.items():
            if bucket in own:
                wholes[numbers[bucket, which]] = (start + shift, stop + shift)
    for use in outline.uses:
        if use.buckets[0] not in own:
            uses.append(Use(use.buckets, moved(use.first), tuple(moved(last) for last in use.last)))
    for g in outline.gradients:
        if g.bucket not in own:
            start = moved(g.begin) if g.begin is not None else None
            gradients.append(Gradients(g.bucket, start, moved(g.ready), g.elsewhere))
    for bucket, (start, stop) in outline.wholes.items():
        if bucket not in own:
            wholes[bucket] = (moved(start), moved(stop))
    return Outline(
        tuple(segments),
        tuple(labels),
        tuple(sorted(uses, key=lambda use: use.first)),
        wholes,
        tuple(sorted(gradients, key=lambda g: g.ready)),
    )
