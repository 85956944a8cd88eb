"""The scheduling problem of a traced model on a candidate's ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from mfsdp_compile.backend.compile import bucket_info
from mfsdp_compile.passes.context import BucketInfo, Context, SchedulePolicy
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.outline import Gradients, Outline, grouped
from mfsdp_compile.passes.guests.solver.step_events import StepOutlines
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.bucket_plan import ParamLocation
from mfsdp_compile.runtime.geometry.exchange import buffer_bytes
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy, assign_all
from mfsdp_compile.runtime.memory.comm_buffers import Sizes as SizesOf
from mfsdp_compile.runtime.plan.buckets import BucketPlanner
from mfsdp_compile.runtime.plan.precision import GradientPolicy, Policies
from mfsdp_compile.runtime.plan.precision_plan import PrecisionPlan
from mfsdp_compile.runtime.plan.units import Unit, group_by_size, joined_name

from . import offloading
from .candidates import Candidate
from .jobs import Job
from .trace_model import Trace


def problem_of(job: Job, traced: Trace, candidate: Candidate) -> StepOutlines:
    """Return the scheduling problem of the traced model, with its buckets laid out for a candidate's ranks."""
    portions = 0 if job.reshard is None or isinstance(job.reshard, bool) else job.reshard
    topology = candidate.topology(portions)
    layout = LayoutPolicy(bucket_bytes=job.bucket_bytes, by_parameter=job.by_parameter)
    within = candidate.sums_within or None
    policy = replace(job.precision, param_dtype=job.work.param_dtype, grad_sum_within=within)
    precision = PrecisionPlan(Policies(policy))
    has_experts = job.work.divided is not None and "expert" in job.work.divided.by
    experts = candidate.experts(portions) if has_experts else None
    planner = BucketPlanner(topology, precision, GradientPolicy(), layout, frozenset(), experts)
    numbers: dict[str, list[int]] = {}  # numbers of traced buckets, by unit
    for number, bucket in enumerate(traced.buckets):
        numbers.setdefault(bucket.unit, []).append(number)
    infos: list[BucketInfo] = []
    sources: list[list[_Source]] = []
    names: dict[str, str] = {}  # name of the joined unit, by the name of each unit in it
    known: dict[tuple[str, ...], list[_LaidOut]] = {}  # by traced units
    for name, members in _members(traced, job.unit_bytes).items():
        names |= dict.fromkeys(members, name)
        own = [numbers[member] for member in members]
        alike = tuple(traced.buckets[of[0]].like for of in own)
        if alike not in known:
            parameters = [[traced.buckets[number].parameters for number in of] for of in own]
            known[alike] = _lay_out(
                [traced.units[unit] for unit in alike], parameters, planner, portions, job.by_module
            )
        for laid_out in known[alike]:
            unit = f"{name}.{laid_out.module}" if laid_out.module else name
            of_unit = [other for other in known[alike] if other.module == laid_out.module]
            which = unit if len(of_unit) == 1 else f"{unit}#{of_unit.index(laid_out)}"
            infos.append(replace(laid_out.info, name=which, unit=unit))
            sources.append([_Source(own[i][j], part, whole) for i, j, part, whole in laid_out.sources])
    schedule = SchedulePolicy(memory_budget=job.usable, prefetch="auto", reshard_after_forward="auto")
    if candidate.degrees.pipeline > 1:  # as in the backend
        schedule = replace(schedule, keep_last=False, reshard_after_forward=True)
    messages = 0
    if compat.PIPELINES_HOLD_MESSAGES:
        messages = job.microbatches_of(candidate) * (traced.received_bytes + traced.sent_bytes)
    infos = _with_buffers(infos, job.buffers)
    if job.offload != "auto":
        infos = offloading.offload(infos, job.offload)
    other_bytes = traced.buffer_bytes + messages + buffer_bytes(info.exchange for info in infos)
    context = Context(tuple(infos), schedule, True, overlap=job.overlap, other_bytes=other_bytes)
    if job.step_in_backward and candidate.degrees.pipeline == 1:  # a pipeline's schedule runs its own backwards
        context = replace(context, steps_early=True)
    outlines = {phase: _on_ranks(outline, context, sources, names) for phase, outline in traced.outlines.items()}
    return StepOutlines(outlines, context, CostModel(job.hardware, job.fused))


def _with_buffers(infos: list[BucketInfo], policy: BufferPolicy) -> list[BucketInfo]:
    if not policy.double:
        return infos
    sizes = [
        SizesOf(i.layout.numel, i.exchange.sent.numel, i.exchange.sent.dtype, i.exchange.comm_dtype, i.trainable)
        for i in infos
    ]
    return [
        replace(info, exchange=info.exchange.with_buffers(*buffers))
        for info, buffers in zip(infos, assign_all(sizes, policy), strict=True)
    ]


def _members(traced: Trace, unit_bytes: int | None) -> dict[str, list[str]]:
    """Return the names of units after joining, each with the names of the units in it, in order."""
    joined: dict[str, list[str]] = {}
    for run in traced.neighbors if unit_bytes is not None else ():
        of_run = list(run)
        for group in group_by_size(list(run.values()), unit_bytes or 0):
            joined |= {of_run[i]: [of_run[j] for j in group] for i in group}
    members = [joined.get(name, [name]) for name in traced.order]
    return {joined_name(of): of for of in members}


class _Source(NamedTuple):
    """A traced bucket that the outline of a bucket comes from.

    Args:
        bucket: The traced bucket.
        part, whole: Number of its elements that are in the new bucket, and of all its elements.
    """

    bucket: int
    part: int
    whole: int


class _LaidOut(NamedTuple):
    """A bucket on a candidate's ranks.

    Args:
        info: Description of the bucket.
        sources: Unit, number of the traced bucket within that unit, and ``part`` and ``whole`` of :class:`_Source`.
        module: Name in its unit of the module that is gathered by itself; empty if the unit is gathered as a whole.
    """

    info: BucketInfo
    sources: Sequence[tuple[int, int, int, int]]
    module: str = ""


def _lay_out(
    units: Sequence[Unit],
    traced: Sequence[Sequence[Set[str]]],
    planner: BucketPlanner,
    portions: int,
    by_module: bool = False,
) -> list[_LaidOut]:
    """Lay out the buckets of units that are joined into one.

    Args:
        traced: For each unit, the parameters in each traced bucket.
        portions: Number of ranks that backwards gather over. 0: that of forwards.
        by_module: Whether each module of a unit has buckets of its own.
    """
    params: list[tuple[nn.Parameter, tuple[ParamLocation, ...]]] = []
    origin: dict[str, tuple[int, int]] = {}  # unit and bucket, by parameter
    places = {
        param: {location.module_name for location in locations} for unit in units for param, locations in unit.params
    }
    for i, unit in enumerate(units):
        for param, (location, *_) in unit.params:
            # Several units may share one trace, in which case their names are the same.
            renamed = replace(location, module_name=f"{i}.{location.module_name}")
            params.append((param, (renamed,)))
            origin[renamed.name] = i, next(j for j, names in enumerate(traced[i]) if location.name in names)
    whole = Counter[tuple[int, int]]()
    for param, (location,) in params:
        whole[origin[location.name]] += param.numel()
    modules: dict[str, list[tuple[nn.Parameter, tuple[ParamLocation, ...]]]] = {}
    for param, (location,) in params:
        # A parameter of several modules belongs to their unit, as in find_units.
        alone = by_module and not units[0].is_root and len(places[param]) == 1
        inner = location.module_name.removeprefix(f"0.{units[0].name}").removeprefix(".") if alone else ""
        modules.setdefault(inner, []).append((param, (location,)))
    planned = [
        (module, plan)
        for module, own in modules.items()
        for plan in planner.unit(Unit(units[0].name, (), tuple(own), is_root=units[0].is_root))
    ]
    found = []
    for module, plan in planned:
        part = Counter[tuple[int, int]]()
        for slot in plan.layout.slots:
            part[origin[slot.name]] += slot.numel
        laid_out = [(*where, count, whole[where]) for where, count in part.items()]
        topology = planner.topology_of(plan.is_expert)
        found.append(_LaidOut(bucket_info(plan, topology, portions), laid_out, module))
    return found


def _on_ranks(
    outline: Outline, context: Context, sources: Sequence[Sequence[_Source]], names: Mapping[str, str]
) -> Outline:
    """Replace the buckets of an outline.

    Each bucket is used from the first to the last use of the traced buckets that it comes from.
    """
    lives = {bucket: (wait, last) for use in outline.uses for bucket, wait, last in use.lives}
    gradients = {g.bucket: g for g in outline.gradients}
    gathered: list[tuple[int, int, int]] = []
    wholes: dict[int, tuple[int, int]] = {}
    reduced: list[Gradients] = []
    for number, (info, traced) in enumerate(zip(context.buckets, sources, strict=True)):
        if used := [lives[source.bucket] for source in traced if source.bucket in lives]:
            begin, end = min(wait for wait, _ in used), max(last for _, last in used)
            if info.exchange.gather_group:
                gathered.append((number, begin, end))
            elif info.main_dtype != info.exchange.dtype and not info.has_resident:
                wholes[number] = (begin, end)
        if computed := [(gradients[source.bucket], source) for source in traced if source.bucket in gradients]:
            begins = [g.begin for g, _ in computed if g.begin is not None]
            elsewhere = sum(g.elsewhere * source.part // source.whole for g, source in computed if g.elsewhere)
            ready = max(g.ready for g, _ in computed)
            reduced.append(Gradients(number, min(begins, default=None), ready, elsewhere))
    return replace(
        outline,
        units=tuple(names.get(unit, unit) for unit in outline.units),
        uses=tuple(grouped(sorted(gathered, key=lambda life: life[1]), context)),
        wholes=wholes,
        gradients=tuple(sorted(reduced, key=lambda g: g.ready)),
    )
