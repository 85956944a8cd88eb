"""The ``mfsdp`` backend of ``torch.compile``.

In the graph that Dynamo passes in, every parameter of a sharded model is a shell: a placeholder of full shape behind a
marker. The shells themselves say which buckets they belong to. That is looked up twice, when the graph is compiled and
again whenever it runs, because Dynamo runs one graph for many instances of a module (blocks compiled one by one,
functions resumed after a graph break).

A graph that is compiled while the model runs eagerly around it, such as a block's, is served by the eager path: it
takes gathered buckets and returns packed gradients, and the eager path overlaps gathers and reductions with it. Options
that steer the schedule keep collectives inside the graph.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile import backend, passes, progress, runtime
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import Context, NodeKind, Report, Role, phase_of, region_of, set_phase, set_role
from mfsdp_compile.passes.regions import LEAST, outline
from mfsdp_compile.passes.unshard import MARKERS
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.gathered_parameter import as_gathered
from mfsdp_compile.runtime.eager.units import EagerUnit
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.memory.bucket import Bucket, ParamHandle
from mfsdp_compile.runtime.model.sharded_model import ShardedModel, any_exists, models_of
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.runtime.step.graph_runs import GraphRun

from . import guests
from .arguments import GraphArguments, beside_shard, like_served
from .bucket_infos import bucket_info, region_info, served_info
from .checks import check, policy_for, refuse_writes, warn_of_limit
from .compiled_graph import CompiledGraph, NeedsOtherPieces
from .dumps import GraphFolder
from .fp8 import fp8_candidates
from .lowerings import register_lowerings
from .options import CompileOptions
from .pieces import Piece, cut
from .rank_meeting import RankMeeting
from .region_graphs import trace
from .shared_compiles import compile_together
from .straight_line import Code


def mfsdp(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs. A graph without sharded parameters goes to the inner compiler unchanged."""
    chosen = CompileOptions.of(options, mode)
    compat.on_compilation(_dynamo_begins, _dynamo_ends)
    compat.guard_on_hooks()
    shells = find_shells(gm)
    compat.compile_beyond_limit(warn_of_limit)
    if not shells:
        if not any_exists():
            warn(
                'backend="mfsdp" compiles a model that is not sharded, and this process has no sharded model: every '
                "rank would train alone. Call fully_shard_model first.",
            )
        alone, told = _compile_inner(compat.copy_graph_module(gm), example_inputs, chosen, None, None), str(chosen)

        def run_alone(*args: Any) -> Any:
            outputs = alone(*args)
            GraphRun([], told).watch_backward(outputs)
            return outputs

        return run_alone

    escaped = _escaped(gm)
    buckets = list(dict.fromkeys(handle.bucket for handle in shells.values()))
    owners = models_of(buckets)
    steers = chosen.steers_schedule or chosen.contradict(owners)
    served = not steers and all(owner.eager.is_in_window for owner in owners)
    if not served:
        chosen = chosen.with_defaults_of(owners, _hold_all(buckets, owners))
    compiles = functools.partial(_compile_graph, gm, example_inputs, shells, served)
    with (
        _reporting_errors(buckets),
        compat.without_collection(),
        progress.working(_described(buckets, served), chosen.progress),
    ):
        tuned = None
        if _tunes(chosen, buckets, owners):
            from .tuning import Tuning, tuned_graph

            tuning = Tuning.of(owners[0])
            if tuning is not None and tuning.chosen is not None:
                compiled = compiles(replace(chosen, schedule=tuning.schedules[tuning.chosen].policy))
            else:
                compiled = compiles(chosen, explores=True)
                tuned = tuned_graph(compiled, compiles, chosen, owners[0], tuning)
        else:
            compiled = compiles(chosen)
    for owner in owners:
        owner.compiled_graphs.append(compiled.record)

    place, told = next(iter(shells)), str(chosen)

    def run_served(*args: Any) -> Any:
        call = compiled.call
        handles = call.handles(args)
        owners = models_of(handle.bucket for handle in handles)
        with contextlib.ExitStack() as stack:
            for owner in owners:
                owner.forget_old_code()
                stack.enter_context(owner.eager.serving(handle for handle in handles if handle.bucket.owner is owner))
            backwards, tensors, rest = call.serve(args)
            graphs = GraphRun(backwards, told)
            with graphs.expecting_graph():
                outputs = compiled.run(*tensors, *rest)
            graphs.watch_backward(outputs)
            hand_out(outputs, args)
        return outputs

    def run(*args: Any) -> Any:
        graph = compiled
        if tuned is not None:
            owner = args[place].mfsdp_handle.bucket.owner
            with _reporting_errors(owner.buckets):
                graph = tuned.current(owner)
        buckets, backwards, tensors, rest = graph.call.exchange(args)
        owners = models_of(buckets)
        for owner in owners:
            owner.forget_old_code()
        graphs = GraphRun(backwards, told)
        with _reporting_errors(buckets):
            with contextlib.ExitStack() as stack:
                for owner in owners:
                    stack.enter_context(owner.eager.saved.for_compiled_code())
                stack.enter_context(graphs.expecting_graph())
                outputs = graph.run(*tensors, *rest)
            graphs.watch_backward(outputs)
            hand_out(outputs, args)
            return outputs

    def hand_out(outputs: Sequence[Any], args: Sequence[Any]) -> None:
        for position, argument in escaped.items():
            handle: ParamHandle = args[argument].mfsdp_handle
            (owner,) = models_of([handle.bucket])
            owner.eager.parameters.hand_out(
                as_gathered(outputs[position], handle.bucket.splits[handle.index].name), handle.bucket
            )

    return run_served if served else run


def _compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    shells: Mapping[int, ParamHandle],
    served: bool,
    chosen: CompileOptions,
    explores: bool = False,
    first: CompiledGraph | None = None,
    known: Set[compat.CompiledPiece] | None = None,
) -> CompiledGraph:
    """Compile one of Dynamo's graphs.

    Args:
        explores: Whether other schedules are looked for.
        first: What was compiled with another schedule.
        known: Pieces that it may consist of; None: all.

    Raises:
        NeedsOtherPieces: It needs other ones.
    """
    refused = dict(first.refused) if first is not None else {}
    budgets = chosen.schedule.activation_budgets
    while True:
        progress.step("passes and AOTAutograd")
        copied = compat.copy_graph_module(gm)
        policy = replace(chosen.schedule, activation_memory_budget=budgets[0])
        plan = first.record.producer.plan if first is not None else None
        record, call, inputs = prepare(copied, example_inputs, shells, chosen, served, refused, policy, explores, plan)
        try:
            run = _compile_inner(copied, inputs, chosen, record, known)
            return CompiledGraph(record, call, run, refused)
        except compat.NotARegion as error:
            refused |= {unit: error.reason for unit in record.units_of(error.region)}
        except Exception as error:
            others = record.producer.budgets_after(error, budgets, bool(record.regions))
            if others is None:
                raise
            budgets = others


def _tunes(chosen: CompileOptions, buckets: Sequence[Bucket], owners: Sequence[ShardedModel]) -> bool:
    """Whether the schedule of a graph is tuned.

    Raises:
        ValueError: It trains a part of a model, or several models.
    """
    if not chosen.tune or chosen.report or torch.are_deterministic_algorithms_enabled() or not torch.is_grad_enabled():
        return False
    if len(owners) > 1 or not _hold_all(buckets, owners):
        what = "several models" if len(owners) > 1 else "a part of the model"
        raise ValueError(
            f"options['tune'] measures steps of a model in one graph, and this graph holds {what}. Compile with "
            "fullgraph=True to see what breaks the graph (or use mfsdp_compile.explain), or leave the option out."
        )
    return True


def _hold_all(buckets: Sequence[Bucket], owners: Sequence[ShardedModel]) -> bool:
    return all(set(owner.buckets) <= set(buckets) for owner in owners)


@torch.compiler.disable  # Dynamo would compile it, and call it for that: a compiled function can call backward()
def _dynamo_begins(args: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the backend gives them
        compat.check_before_tracing(mfsdp, CompileOptions.of)  # a mistake costs no time in Dynamo
    if not any_exists():
        return
    if args.callback_trigger.name == "LAZY_BACKWARD":
        progress.begin("compiling a backward")
    else:
        progress.begin("compiling")
        progress.step("Dynamo")


@torch.compiler.disable
def _dynamo_ends(_: Any) -> None:
    progress.end()


compat.on_compilation(_dynamo_begins, _dynamo_ends)


def _described(buckets: Sequence[Bucket], served: bool) -> str:
    """Return what is compiled, in words."""
    owners = models_of(buckets)
    names = " and ".join(dict.fromkeys(type(owner.module).__name__ for owner in owners))
    what = f"a module of {names}" if served else names
    if torch.is_grad_enabled():
        return f"compiling {what}"
    again = ", besides the graphs for training" if any(owner.compiled_graphs for owner in owners) else ""
    return f"compiling {what} for calls without gradients (evaluation){again}"


@contextlib.contextmanager
def _reporting_errors(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Report an error raised inside to the models, which tell the other ranks: it may concern only this rank.

    What Dynamo catches is no failure: it traces the frame again, or runs it in another way.
    """
    try:
        yield
    except BaseException as error:
        for owner in models_of(buckets) if not compat.is_caught_by_dynamo(error) else ():
            if not owner.eager.is_in_window and not compat.in_backward():  # otherwise the error may still be caught
                owner.failed(error)
        raise


def prepare(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    shells: Mapping[int, ParamHandle],
    chosen: CompileOptions,
    served: bool = False,
    refused: Mapping[str, str] | None = None,
    policy: SchedulePolicy | None = None,
    explores: bool = False,
    plan: Any = None,
) -> tuple[pipeline.CompileRecord, GraphArguments, list[Any]]:
    """Rewrite Dynamo's graph so that it takes shards and gathers them.

    Args:
        served: Let the graph take gathered buckets instead, and return packed gradients.
        refused: Units that cannot be part of a region, each with the reason.
        policy: The numbers for the schedule, with one ``activation_memory_budget``; None: those of the options.
        explores, plan: See :func:`.guests.producer`.

    Returns:
        The passes' record of the graph, the object that converts its arguments, and example inputs.
    """
    refuse_writes(gm, shells)
    buckets = tuple(dict.fromkeys(handle.bucket for handle in shells.values()))
    owners = models_of(buckets)
    check(chosen, owners, buckets, served)
    portions = chosen.schedule.portions
    for owner in owners if portions else ():
        meant = owner.topology.portions_of(portions, "options['reshard_after_forward']")
        if not isinstance(meant, bool):
            owner.make_portions(portions)
    units = [unit for owner in owners for unit in owner.eager.units]
    context = Context(
        buckets=tuple(
            served_info(bucket.plan, bucket.topology) if served else bucket_info(bucket.plan, bucket.topology, portions)
            for bucket in buckets
        ),
        policy=policy_for(policy or chosen.schedule, buckets),
        whole_model=not served and _hold_all(buckets, owners),
        features=guests.features(chosen, buckets),
        overlap=Overlap(
            gathers=all(owner.overlap.gathers for owner in owners),
            reductions=all(owner.overlap.reductions for owner in owners),
        ),
        delivers_early=chosen.step_in_backward and not served,
        in_pieces=chosen.cuts,
        other_bytes=sum(owner.buffer_bytes() + owner.comm_buffer_bytes() for owner in owners),
        absent=tuple(unit.name for unit in units if not set(buckets).issuperset(unit.buckets)),
    )
    for position, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        if (handle := shells.get(position)) is not None:
            set_role(node, Role(NodeKind.SHELL, buckets.index(handle.bucket), handle.index))
    dumps = GraphFolder.from_environment(f"{len(buckets)} buckets, {buckets[0].plan.name} to {buckets[-1].plan.name}")
    meeting = RankMeeting.of(owners[0], _batch(gm, shells, owners), str(chosen))
    record = pipeline.CompileRecord(
        context,
        chosen.passes,
        chosen.verify == "each",
        dumps,
        guests.producer(chosen, buckets, meeting, explores, plan),
        guests.forecast(chosen, buckets),
    )
    in_fp8 = chosen.fp8_matmul is not None
    call = GraphArguments(shells, buckets, functools.partial(fp8_candidates, chosen) if in_fp8 else None)
    least = LEAST if chosen.regions == "auto" else 2 if chosen.regions else 0
    move = functools.partial(_move_into_regions, record, chosen, units, buckets, least, refused or {})
    pipeline.rewrite_dynamo_graph(gm, record, move if least else None)
    for owner in owners:
        owner.check_complete()
    fake_mode = compat.detect_fake_mode(example_inputs) or compat.tracing_fake_mode()
    if served:
        with fake_mode:
            shards = [tensor for bucket in buckets for tensor in like_served(bucket)]
    else:
        tensors = [t for b in buckets for t in (b.flat.detach().requires_grad_(b.plan.requires_grad), *beside_shard(b))]
        shards = [fake_mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
    others = [value for position, value in enumerate(example_inputs) if position not in shells]
    return record, call, [*shards, *others]


_SHOWN = 4
"""Maximum number of a batch's inputs that messages name."""


def _move_into_regions(
    record: pipeline.CompileRecord,
    chosen: CompileOptions,
    units: Sequence[EagerUnit],
    buckets: Sequence[Bucket],
    least: int,
    refused: Mapping[str, str],
    graph: fx.Graph,
) -> None:
    """Move equal units of Dynamo's graph into regions, and let AOTAutograd trace each region once.

    Args:
        units: Units of the models.
        least: Number of equal units from which on they become a region.
        refused: Units that cannot be part of a region, each with the reason.
    """
    unit_of = {
        str(id(module())): unit.name
        for unit in units
        if not (unit.is_root or unit.is_module)
        for module in unit.modules
    }
    infos = zip(buckets, record.context.buckets, strict=True)
    of_regions = [region_info(bucket.plan, bucket.topology, info) for bucket, info in infos]
    record.regions, record.inlined = outline(graph, record.context, unit_of, of_regions, least, refused)
    record.inlined |= {unit.name: "its unit is gathered module by module" for unit in units if unit.is_module}
    fused = chosen.fuses
    features = tuple(feature for feature in record.context.features if feature.in_regions)
    for body in record.regions:
        make = functools.partial(trace, body, record.context.policy, features, fused)
        body.module.region = compat.Region(body.name, make, is_exact=not fused)  # type: ignore[assignment]


def _batch(gm: fx.GraphModule, shells: Mapping[int, ParamHandle], owners: Sequence[ShardedModel]) -> str:
    """Describe what a graph is compiled for: the tensors among its inputs that are not parameters or buffers."""
    buffers = {id(buffer) for owner in owners for buffer in owner.module_buffers()}
    found = []
    for position, node in enumerate(node for node in gm.graph.nodes if node.op == "placeholder"):
        example = node.meta.get("example_value")
        if position in shells or not isinstance(example, Tensor) or id(compat.graph_argument(node)) in buffers:
            continue
        found.append(f"{str(example.dtype).removeprefix('torch.')}{[compat.concrete(size) for size in example.shape]}")
    shown = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    return f"a batch of {shown}" if found else "no batch"


def _escaped(gm: fx.GraphModule) -> dict[int, int]:
    """Return the positions of the parameters that a graph returns unchanged, among its outputs and its arguments.

    Code behind a graph break gets them, and may write to them.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    found = {}
    for position, node in enumerate(gm.graph.output_node().args[0]):
        if isinstance(node, fx.Node) and node.target is torch.view_as_complex:
            node = node.args[0]
        if isinstance(node, fx.Node) and node.target in MARKERS:
            found[position] = placeholders.index(node.args[0])
    return found


def find_shells(gm: fx.GraphModule) -> dict[int, ParamHandle]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    arguments = (compat.graph_argument(node) for node in placeholders)
    return {i: value.mfsdp_handle for i, value in enumerate(arguments) if hasattr(value, "mfsdp_handle")}


def _compile_inner(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: CompileOptions,
    record: pipeline.CompileRecord | None,
    known: Set[compat.CompiledPiece] | None,
) -> Callable[..., Any]:
    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        def in_two(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            budget, distinct = 1.0, record.distinct if record is not None else roles.DISTINCT
            if record is not None and not record.regions:  # otherwise it is that of the regions
                budget = record.context.policy.activation_budgets[0]
            return compat.min_cut_partition(
                joint, joint_inputs, distinct=distinct, activation_memory_budget=budget, **kwargs
            )

        user_outputs: int = kwargs["num_fwd_outputs"]
        forward, backward = (
            pipeline.partitioned(joint, record, user_outputs, in_two) if record is not None else in_two(joint)
        )
        set_phase(forward.graph, Phase.FORWARD)
        set_phase(backward.graph, Phase.BACKWARD)
        return forward, backward

    def finish(graph: fx.Graph) -> None:
        progress.step(f"{'Inductor' if options.fuses else options.inner}, {phase_of(graph).value}")
        if (context := region_of(graph)) is not None:
            pipeline.finish_region(graph, context, phase_of(graph))
        elif record is not None:
            pipeline.finish_graph(graph, phase_of(graph), record)

    def rewrite(graph: fx.Graph) -> None:
        if region_of(graph) is None and record is not None:
            joint = graph.owning_module
            joint.graph = pipeline.rewrite_joint(joint, record).graph

    def finish_all(gm: fx.GraphModule) -> None:
        for region in dict.fromkeys(map(roles.body_of, roles.region_calls(gm.graph))):
            finish(region.graph)  # Inductor's passes come to the graphs inside by themselves
        finish(gm.graph)

    if options.inner == "aot_eager":
        return compat.compile_with_aot_eager(gm, inputs, partition, finish_all)

    def uuid() -> str | None:
        return _cache_key(options, record)

    settings = dict(options.inductor)
    patches = ({} if options.cuts else compat.inductor_config_patches()) | settings
    if record is not None:
        if record.producer.meets and "joint_custom_post_pass" not in patches:
            decide = functools.partial(pipeline.decide_early, record=record)
            patches["joint_custom_post_pass"] = compat.graph_pass(decide, uuid)
        if any(feature.rewrites_joint for feature in record.context.features):
            patches |= {"use_joint_graph_passes": True, "joint_custom_pre_pass": compat.graph_pass(rewrite, uuid)}
        patches["custom_partitioner_fn"] = compat.partitioner(partition, uuid)
    if options.cuts:
        # Lowerings are registered when a piece is compiled: importing Inductor's takes half a second of a warm start.
        run = functools.partial(_run_in_pieces, finish_all, settings, record, known)
        return compat.compile_around(gm, inputs, patches, run, is_cached=uuid() is not None)
    register_lowerings()
    if record is not None:
        patches["post_grad_custom_post_pass"] = compat.graph_pass(finish, uuid)
    return compat.compile_with_inductor(gm, inputs, patches)


def _run_in_pieces(
    finish: Callable[[fx.GraphModule], None],
    settings: dict[str, Any],
    record: pipeline.CompileRecord | None,
    known: Set[compat.CompiledPiece] | None,
    module: fx.GraphModule,
) -> Code:
    """Finish a graph, and compile its pieces.

    Args:
        settings: Settings of Inductor.
        record: Gets a report of them, if there is one.
        known: Pieces that it may consist of; None: all.

    Raises:
        NeedsOtherPieces: It needs other ones.
    """
    register_lowerings()
    finish(module)
    begun, phase = time.perf_counter(), phase_of(module.graph)

    forecast = record.forecast if record is not None else None
    seconds: dict[compat.CompiledPiece, float] = {}

    def prepared(piece: Piece) -> compat.CompiledPiece:
        found = compat.prepare_piece(piece.module, piece.inputs, settings, f"mfsdp {source_digest()}")
        if forecast is not None and found not in seconds:  # of equal pieces, the first one
            seconds[found] = forecast.seconds(piece.module.graph)
        return found

    program = cut(module, prepared)
    compat.report_strides(module.graph)
    pieces = program.code.pieces()
    if known is not None and not known >= set(pieces):
        raise NeedsOtherPieces
    compile_together(pieces, f"Inductor, {phase.value}")
    if record is not None:
        record.pieces += pieces
        told = Report("pieces", program.described(seconds), time.perf_counter() - begun)
        record.reports.setdefault(phase, []).append(told)
    return program.code


def _cache_key(options: CompileOptions, record: pipeline.CompileRecord | None) -> str | None:
    """Return what compile caches must know in addition to the graph, or None to disable caching.

    The key covers the passes, their options, what controls their decisions, and the decisions themselves where ranks
    agree on them. None is returned if one of the user's passes has no identity, if graphs are to be observed or
    reported, or before the decisions are made: AOTAutograd's cache asks too early for that.
    """
    context, decided = "", ""
    identities = options.pass_identities()
    if record is not None:
        observes = record.observer is not None or options.report or not record.producer.is_cacheable
        if observes or (digest := record.producer.digest) is None:
            return None
        context, decided = record.context.signature, digest
    if identities is None:
        return None
    key = f"{source_digest()}:{options}:{identities}:{context}:{decided}"
    return hashlib.sha256(key.encode()).hexdigest()


@functools.cache
def source_digest() -> str:
    """Return a digest of the source that makes graphs: another version of it never gets graphs from an older one."""
    digest = hashlib.sha256()
    for package in (passes, runtime, backend):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
