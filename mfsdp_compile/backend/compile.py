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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from mfsdp_compile import backend, passes, progress, runtime
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import (
    BucketInfo,
    Context,
    NodeKind,
    Role,
    SchedulePolicy,
    phase_of,
    region_of,
    set_phase,
    set_role,
)
from mfsdp_compile.passes.fp8_matmul import Fp8Matmul
from mfsdp_compile.passes.phase import Phase
from mfsdp_compile.passes.regions import LEAST, outline
from mfsdp_compile.passes.unshard import MARKERS
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.gathering import as_gathered, refuse_write
from mfsdp_compile.runtime.geometry.bucket_plan import BucketPlan
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.memory import gradients
from mfsdp_compile.runtime.memory.bucket import Bucket, Home
from mfsdp_compile.runtime.model.sharded_model import ShardedModel, models_of
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.step.graph_runs import GraphRun

from .dumps import GraphFolder
from .lowerings import register_lowerings
from .options import CompileOptions
from .rank_meeting import RankMeeting
from .regions import region_context, trace

__all__ = ["bucket_info", "find_shells", "mfsdp", "prepare"]


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
    compat.compile_beyond_limit(_warn_of_limit)
    if not shells:
        if not ShardedModel.any_exists():
            warn(
                'backend="mfsdp" compiles a model that is not sharded, and this process has no sharded model: every '
                "rank would train alone. Call fully_shard_model first.",
            )
        alone = _compile_inner(compat.copy_graph_module(gm), example_inputs, chosen, None)

        def run_alone(*args: Any) -> Any:
            outputs = alone(*args)
            GraphRun([], str(chosen)).watch_backward(outputs)
            return outputs

        return run_alone

    escaped = _escaped(gm)
    buckets = list(dict.fromkeys(home.bucket for home in shells.values()))
    served = not chosen.steers_schedule and all(owner.eager.is_in_window for owner in models_of(buckets))
    refused: dict[str, str] = {}
    with (
        _telling_models(buckets),
        compat.without_collection(),
        progress.working(_work(buckets, served), chosen.progress),
    ):
        while True:
            progress.step("passes and AOTAutograd")
            copied = compat.copy_graph_module(gm)
            record, call, inputs = prepare(copied, example_inputs, shells, chosen, served, refused)
            try:
                compiled = _compile_inner(copied, inputs, chosen, record)
                break
            except compat.NotARegion as error:
                for owner in models_of(buckets):
                    owner.compiled_graphs.remove(record)
                refused |= {unit: error.reason for unit in record.units_of(error.region)}

    def run_served(*args: Any) -> Any:
        homes = call.homes(args)
        owners = models_of(home.bucket for home in homes)
        with contextlib.ExitStack() as stack:
            for owner in owners:
                owner.forget_old_code()
                stack.enter_context(owner.eager.serving(home for home in homes if home.bucket.owner is owner))
            backwards, tensors, rest = call.serve(homes, args)
            graphs = GraphRun(backwards, str(chosen))
            with graphs.expecting_graph():
                outputs = compiled(*tensors, *rest)
            graphs.watch_backward(outputs)
            hand_out(outputs, args)
        return outputs

    def run(*args: Any) -> Any:
        buckets, backwards, tensors, rest = call.exchange(args)
        owners = models_of(buckets)
        for owner in owners:
            owner.forget_old_code()
        graphs = GraphRun(backwards, str(chosen))
        with _telling_models(buckets):
            with contextlib.ExitStack() as stack:
                for owner in owners:
                    stack.enter_context(owner.eager.saved.for_compiled_code())
                stack.enter_context(graphs.expecting_graph())
                outputs = compiled(*tensors, *rest)
            graphs.watch_backward(outputs)
            hand_out(outputs, args)
            return outputs

    def hand_out(outputs: Sequence[Any], args: Sequence[Any]) -> None:
        for position, argument in escaped.items():
            home: Home = args[argument].mfsdp_home
            (owner,) = models_of([home.bucket])
            owner.eager.parameters.hand_out(
                as_gathered(outputs[position], home.bucket.splits[home.index].name), home.bucket
            )

    return run_served if served else run


def _warn_of_limit(reached: compat.LimitReached) -> None:
    """Warn of code that was compiled as often as a setting allows.

    A rank that ran it eagerly would start other collectives than ranks that run its graphs. Ranks reach the limit at
    different times, and find graphs for different inputs afterwards.
    """
    shapes = ", ".join(str(list(shape)) for shape in reached.shapes[:_SHOWN])
    why = f"{reached.limit} graphs of {reached.code} are not for what it is called with now, tensors of {shapes or 'no shape'}"
    if reached.setting == "recompile_limit":
        warn(
            f"{why}, and torch._dynamo.config.recompile_limit is {reached.limit}. It is compiled again, for sizes and "
            "numbers that vary: if this rank ran it eagerly, it would start other collectives than ranks that run its "
            f"graphs. Pass torch.compile(dynamic=True), or raise the limit. Last guard that failed: {reached.reason}",
            by=None,
        )
    else:
        warn(
            f"{why}, and torch._dynamo.config.{reached.setting} is {reached.limit}. It runs eagerly from now on, which is "
            "an error on all ranks if others run its graphs. Keep what varies constant or the same on all ranks, or "
            f"raise the limit. Last guard that failed: {reached.reason}",
            by=None,
        )


def _dynamo_begins(args: Any) -> None:
    if not ShardedModel.any_exists():
        return
    if args.callback_trigger.name == "LAZY_BACKWARD":
        progress.begin("compiling a backward")
    else:
        progress.begin("compiling")
        progress.step("Dynamo")


def _dynamo_ends(_: Any) -> None:
    progress.end()


compat.on_compilation(_dynamo_begins, _dynamo_ends)


def _work(buckets: Sequence[Bucket], served: bool) -> str:
    """Return what is compiled, in words."""
    owners = models_of(buckets)
    names = " and ".join(dict.fromkeys(type(owner.module).__name__ for owner in owners))
    what = f"a module of {names}" if served else names
    if torch.is_grad_enabled():
        return f"compiling {what}"
    again = ", besides the graphs for training" if any(owner.compiled_graphs for owner in owners) else ""
    return f"compiling {what} for calls without gradients (evaluation){again}"


@contextlib.contextmanager
def _telling_models(buckets: Sequence[Bucket]) -> Iterator[None]:
    """Report an error raised inside to the models, which tell the other ranks: it may concern only this rank."""
    try:
        yield
    except BaseException as error:
        for owner in models_of(buckets):
            if not owner.eager.is_in_window and not compat.in_backward():  # otherwise the error may still be caught
                owner.failed(error)
        raise


def prepare(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    shells: Mapping[int, Home],
    chosen: CompileOptions,
    served: bool = False,
    refused: Mapping[str, str] | None = None,
) -> tuple[pipeline.CompileRecord, _Call, list[Any]]:
    """Rewrite Dynamo's graph so that it takes shards and gathers them.

    Args:
        served: Let the graph take gathered buckets instead, and return packed gradients.
        refused: Units that cannot be part of a region, each with the reason.

    Returns:
        The passes' record of the graph, the object that converts its arguments, and example inputs.
    """
    _refuse_writes(gm, shells)
    buckets = tuple(dict.fromkeys(home.bucket for home in shells.values()))
    if chosen.float32_gradients:
        _check_float32_gradients(buckets)
    owners = models_of(buckets)
    if chosen.schedule.activation_offload and any(owner.keeps_gradients for owner in owners):
        raise ValueError(
            "options['activation_offload'] copies saved values to host memory that each step allocates, which a CUDA graph "
            "cannot do (cuda_graph_mode). Use only one of them."
        )
    if not served:
        _refuse_hooks(owners, buckets)
    if chosen.inner == "inductor" and any(owner.is_miscompiled() for owner in owners):
        warn(
            f"The Inductor of torch {torch.__version__} computes wrong gradients for the routers of GPT-OSS on the "
            "CPU when the auxiliary loss is part of the outputs, with or without this package. Use torch 2.15, "
            "options={'inner': 'aot_eager'}, or output_router_logits=False, and compare with model.verify_step(batch).",
        )
    portions = chosen.schedule.portions
    for owner in owners if portions else ():
        meant = owner.topology.portions_of(portions, "options['reshard_after_forward']")
        if not isinstance(meant, bool):
            owner.make_portions(portions)
    context = Context(
        buckets=tuple(
            served_info(bucket.plan, bucket.topology) if served else bucket_info(bucket.plan, bucket.topology, portions)
            for bucket in buckets
        ),
        policy=_policy(chosen.schedule, buckets),
        whole_model=not served and _is_whole_model(buckets),
        float32_gradients=chosen.float32_gradients,
        overlap=Overlap(
            gathers=all(owner.overlap.gathers for owner in owners),
            reductions=all(owner.overlap.reductions for owner in owners),
        ),
        other_bytes=sum(owner.buffer_bytes() + owner.comm_buffer_bytes() for owner in owners),
    )
    for position, node in enumerate(n for n in gm.graph.nodes if n.op == "placeholder"):
        if (home := shells.get(position)) is not None:
            set_role(node, Role(NodeKind.SHELL, buckets.index(home.bucket), home.index))
    dumps = GraphFolder.wanted(f"{len(buckets)} buckets, {buckets[0].plan.name} to {buckets[-1].plan.name}")
    is_real = compat.is_real_group(buckets[0].topology.every.name)
    prediction = chosen.prediction(buckets[0].device, is_real)
    meeting = RankMeeting.of(owners[0], _batch(gm, shells, owners), str(chosen))
    units = [unit for owner in owners for unit in owner.eager.units]
    absent = tuple(unit.name for unit in units if not set(buckets).issuperset(unit.buckets))
    fp8 = _fp8(chosen, buckets)
    record = pipeline.CompileRecord(context, chosen.passes, chosen.verify == "each", dumps, prediction, meeting, absent)
    call = _Call(shells, buckets, functools.partial(_fp8_candidates, chosen) if fp8 is not None else None)
    least = _least_equal(chosen.regions)

    def outlined(graph: fx.Graph) -> None:
        record.regions, record.inlined = outline(
            graph,
            record.context,
            {
                str(id(module())): unit.name
                for unit in units
                if not (unit.is_root or unit.is_module)
                for module in unit.modules
            },
            [
                replace(_as_decided(served_info(bucket.plan, bucket.topology), info), has_resident=False)
                for bucket, info in zip(buckets, record.context.buckets, strict=True)
            ],
            least,
            refused or {},
        )
        record.inlined |= {unit.name: "its unit is gathered module by module" for unit in units if unit.is_module}
        for body in record.regions:
            its = region_context(body, chosen.float32_gradients)
            fused = chosen.inner == "inductor"
            make = functools.partial(trace, body, its, fused)
            body.module.region = compat.Region(body.name, make, is_exact=not fused)  # type: ignore[assignment]

    pipeline.rewrite_dynamo_graph(gm, record, outlined if least else None, fp8)
    for owner in owners:
        owner.check_complete()
        owner.compiled_graphs.append(record)
    fake_mode = compat.detect_fake_mode(example_inputs) or compat.tracing_fake_mode()
    if served:
        with fake_mode:
            shards = [tensor for bucket in buckets for tensor in _like_served(bucket)]
    else:
        tensors = [
            t for b in buckets for t in (b.flat.detach().requires_grad_(b.plan.requires_grad), *_beside_shard(b))
        ]
        shards = [fake_mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
    others = [value for position, value in enumerate(example_inputs) if position not in shells]
    return record, call, [*shards, *others]


def _fp8(chosen: CompileOptions, buckets: Sequence[Bucket]) -> Fp8Matmul | None:
    if chosen.fp8_matmul is None:
        return None
    _check_multiplies_fp8(buckets[0].device, chosen.fp8_matmul)
    candidates = tuple(_fp8_candidates(chosen, bucket) for bucket in buckets)
    return Fp8Matmul(chosen.fp8_matmul, chosen.fp8_wgrad, candidates)


def _check_multiplies_fp8(device: torch.device, scaling: str) -> None:
    """Raise ValueError if the device has no products in float8 with such scales."""
    if scaling != "tensorwise" and not compat.multiplies_by_rows(device):
        raise ValueError(
            f"options['fp8_matmul'] is {scaling!r}, but torch {torch.__version__} has no products with scales of rows on "
            "CPUs. Use 'tensorwise', or torch 2.13 or newer."
        )
    if device.type != "cuda" or torch.version.hip is not None:
        return
    if (has := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ValueError(
            f"options['fp8_matmul'] needs a GPU that multiplies in float8 (compute capability 8.9 or newer), but "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}. Leave the option out."
        )


def _fp8_candidates(chosen: CompileOptions, bucket: Bucket) -> frozenset[int]:
    """Return the indices of a bucket's weights that may be multiplied in float8."""
    slots = [(i, slot) for i, slot in enumerate(bucket.plan.layout.slots) if len(slot.shape) == 2]
    if chosen.fp8_filter is not None:
        return frozenset(i for i, slot in slots if chosen.fp8_filter(slot.name, torch.Size(slot.shape)))
    (owner,) = models_of([bucket])
    in_unit = not any(unit.is_root for unit in owner.eager.units if bucket in unit.buckets)
    return frozenset(i for i, _ in slots) if in_unit else frozenset()


def _as_decided(served: BucketInfo, info: BucketInfo) -> BucketInfo:
    """Let a bucket that a region reads stay in float8 if the graph around it decided so."""
    if not info.exchange.stays_quantized:
        return served
    exchange = served.exchange._replace(scaling=info.exchange.scaling, form=info.exchange.form)
    return replace(served, exchange=exchange, gathered_bytes=info.gathered_bytes)


def _least_equal(regions: bool | str) -> int:
    """Return the number of equal units from which on they become a region; 0: never."""
    if regions == "auto":
        return LEAST
    return 2 if regions else 0


class _Call:
    """Converts the arguments of Dynamo's graph into those of the rewritten graph.

    It holds no bucket, because Dynamo keeps compiled code longer than users keep models.

    Args:
        shells: The shells, by position among the graph's arguments.
        buckets: The buckets they belong to, in the order of the graph.
        fp8_candidates: Returns the indices of a bucket's weights that may be multiplied in float8. None: no weight is.
    """

    def __init__(
        self,
        shells: Mapping[int, Home],
        buckets: Sequence[Bucket],
        fp8_candidates: Callable[[Bucket], frozenset[int]] | None = None,
    ) -> None:
        self._names = [bucket.plan.name for bucket in buckets]
        self._signatures = [bucket.signature for bucket in buckets]
        self._shells = [(position, buckets.index(h.bucket), h.index) for position, h in shells.items()]
        self._first_of = [next(p for p, b, _ in self._shells if b == number) for number in range(len(buckets))]
        self._positions = frozenset(shells)
        self._fp8_candidates = fp8_candidates
        self._fp8 = WeakKeyDictionary({b: fp8_candidates(b) for b in buckets}) if fp8_candidates is not None else None
        self._fp8_expected = list(self._fp8.values()) if self._fp8 is not None else []

    def exchange(self, args: Sequence[Any]) -> tuple[list[Bucket], list[gradients.Backward], list[Tensor], list[Any]]:
        """Convert the arguments of Dynamo's graph.

        Returns:
            The buckets of the shells in ``args``, the upcoming backward through each, the tensors that the graph takes
            for them (each bucket's shard, and what :func:`_beside_shard` adds), and the other arguments.
        """
        buckets = self._buckets(args)
        for owner in models_of(buckets):
            owner.enter_compiled([bucket for bucket in buckets if bucket.owner is owner])
            owner.refresh()
        backwards = [gradients.Backward.through(bucket) for bucket in buckets]
        shards = gradients.shards_of(buckets, backwards)
        tensors = [
            tensor for bucket, shard in zip(buckets, shards, strict=True) for tensor in (shard, *_beside_shard(bucket))
        ]
        return buckets, backwards, tensors, self._rest(args)

    def homes(self, args: Sequence[Any]) -> list[Home]:
        """Return the homes of the shells in ``args``."""
        self._buckets(args)
        return [args[position].mfsdp_home for position, _, _ in self._shells]

    def serve(
        self, homes: Sequence[Home], args: Sequence[Any]
    ) -> tuple[list[gradients.Backward], list[Tensor], list[Any]]:
        """Convert the arguments of Dynamo's graph for a graph that is served. Gathers, and waits for it.

        Returns:
            The upcoming backward through each bucket, the tensors for each bucket (see :meth:`.EagerRuntime.serve`), and
            the other arguments.
        """
        buckets = self._buckets(args)
        backwards = [gradients.Backward.through(bucket) for bucket in buckets]
        tensors: list[Tensor] = []
        for bucket, backward in zip(buckets, backwards, strict=True):
            (owner,) = models_of([bucket])
            tensors += owner.eager.serve(backward, bucket)
        return backwards, tensors, self._rest(args)

    def _rest(self, args: Sequence[Any]) -> list[Any]:
        return [value for position, value in enumerate(args) if position not in self._positions]

    def _buckets(self, args: Sequence[Any]) -> list[Bucket]:
        """Return the buckets of the shells in ``args``. Raise RuntimeError if the code is not for them."""
        buckets = [args[position].mfsdp_home.bucket for position in self._first_of]
        for position, number, index in self._shells:
            home: Home = args[position].mfsdp_home
            if home.bucket is not buckets[number] or home.index != index:
                raise RuntimeError(
                    f"Compiled code for {self._names[number]!r} was given parameters that are bucketed differently "
                    f"({home.bucket.splits[home.index].name!r}): torch.compile shared code between modules whose "
                    "parameters are grouped into units differently. Compile these modules apart, with "
                    "module.compile(backend='mfsdp') on each."
                )
        for bucket, signature in zip(buckets, self._signatures, strict=True):
            if bucket.signature != signature:
                raise RuntimeError(
                    f"Compiled code for a bucket {signature} was given {bucket.plan.name!r}, {bucket.signature}. "
                    "Please report this; torch._dynamo.reset() makes torch compile again."
                )
            bucket.check_unchanged()
        self._check_fp8(buckets)
        return buckets

    def _check_fp8(self, buckets: Sequence[Bucket]) -> None:
        """Raise RuntimeError if the code multiplies weights in float8 that are not to be, or the other way round."""
        if self._fp8 is None or self._fp8_candidates is None:
            return
        for number, bucket in enumerate(buckets):
            if (found := self._fp8.get(bucket)) is None:
                found = self._fp8[bucket] = self._fp8_candidates(bucket)
            if found != self._fp8_expected[number]:
                raise RuntimeError(
                    f"Compiled code for {self._names[number]!r} was given {bucket.plan.name!r}, of which options['fp8_filter'] "
                    "chooses other weights: torch.compile shared code between equal modules. Compile the whole model at "
                    "once, or let the filter answer the same for all modules of a class."
                )


_SHOWN = 4
"""Maximum number of a batch's inputs that messages name."""


def _batch(gm: fx.GraphModule, shells: Mapping[int, Home], owners: Sequence[ShardedModel]) -> str:
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


def _beside_shard(bucket: Bucket) -> list[Tensor]:
    """Return what a graph takes for a bucket after its shard, in the order of :mod:`~mfsdp_compile.passes.unshard`."""
    tensors = []
    if bucket.has_resident:
        tensors.append(bucket.hold_resident())
    if bucket.has_token:
        assert bucket.pending is not None
        tensors.append(bucket.pending.token)
    if bucket.exchange.takes_sent:
        tensors.append(bucket.source())
    if bucket.exchange.is_quantized:
        assert bucket.scales is not None
        tensors.append(bucket.scales)
    return tensors


def _like_served(bucket: Bucket) -> tuple[Tensor, ...]:
    """Return tensors like those that :meth:`.EagerRuntime.serve` returns."""
    plan, device = bucket.plan, bucket.device
    anchor = torch.empty((), dtype=plan.comm_dtype, device=device).expand(plan.layout.numel)
    full = torch.empty(plan.layout.numel, dtype=plan.held_dtype, device=device)
    count = bucket.scale_count if plan.stays_quantized else None
    scales = [torch.empty(count, dtype=torch.float32, device=device)] if count is not None else []
    return anchor.detach().requires_grad_(plan.requires_grad), full, *scales


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


def _refuse_writes(gm: fx.GraphModule, shells: Mapping[int, Home]) -> None:
    """Raise RuntimeError if forward writes to a parameter."""
    if not (written := compat.written(gm, lambda node: node.target in MARKERS)):
        return
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [placeholders.index(node.args[0]) for node in written if node.args[0] in placeholders]
    homes = [shells[position] for position in sources or shells]  # in a region, the written parameter is unknown
    refuse_write(homes[0].bucket.plan.unit, [home.bucket.splits[home.index].name for home in homes])


def find_shells(gm: fx.GraphModule) -> dict[int, Home]:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    arguments = (compat.graph_argument(node) for node in placeholders)
    return {i: value.mfsdp_home for i, value in enumerate(arguments) if hasattr(value, "mfsdp_home")}


def bucket_info(plan: BucketPlan, topology: Topology, portions: int = 0) -> BucketInfo:
    """Return the passes' description of a bucket.

    Args:
        portions: Number of ranks that backwards gather over, for all buckets; 0: as the plan says. If there is no group
            of that size: the ranks that forwards gather over.
    """
    few, reshard = topology.portions.get(portions or plan.portions), plan.reshard_after_forward
    exchange = plan.exchange(topology)
    gathers, resident = topology.gather_group, topology.resident_group
    resident_numel = plan.layout.shard_numel * resident.size if resident is not None else 0
    return BucketInfo(
        name=plan.name,
        unit=plan.unit,
        layout=plan.layout,
        exchange=exchange,
        gathered_bytes=plan.gathered_bytes,
        trainable=plan.requires_grad,
        has_resident=resident is not None,
        has_token=plan.requires_grad and exchange.needs_token,
        main_dtype=plan.main_dtype,
        gather_stride=gathers.stride if gathers is not None else 1,
        reduce_strides=tuple(stage.group.stride for stage in topology.stages),
        resident_bytes=resident_numel * plan.held_dtype.itemsize,
        resident_size=resident.size if resident is not None else 1,
        resident_stride=resident.stride if resident is not None else 1,
        portion_size=few.size if few is not None else 0,
        portion_group=few.name if few is not None else "",
        releases_resident=topology.releases_resident,
        grad_dtype=plan.grad_dtype,
        stays=None if reshard is None or topology.accumulation.forwards_overlap else reshard is False,
    )


def served_info(plan: BucketPlan, topology: Topology) -> BucketInfo:
    """Return the passes' description of a bucket that the eager path gathers and reduces.

    To the passes it is whole at all times and on one rank. What stands for its shard is a tensor without memory that
    takes the packed gradient.
    """
    exchange = plan.exchange(topology)
    alone = exchange._replace(
        gather_size=1,
        gather_group="",
        scaling=exchange.scaling if exchange.stays_quantized else "",
        scale=exchange.scale if exchange.scales_first else 1.0,
        collectives=[],
        when=[],
        group_sizes=[],
        groups=[],
        inspected=False,
        offload="",
        pins=False,
        keeps_copy=False,
    )
    return BucketInfo(
        name=plan.name,
        unit=plan.unit,
        layout=replace(plan.layout, world_size=1, shard_numel=plan.layout.numel),
        exchange=alone,
        gathered_bytes=plan.gathered_bytes,
        trainable=plan.requires_grad,
        has_resident=True,
        main_dtype=plan.comm_dtype,
        grad_dtype=plan.grad_dtype,
    )


def _refuse_hooks(owners: Sequence[ShardedModel], buckets: Sequence[Bucket]) -> None:
    """Raise NotImplementedError if reduced gradients are to be shown to a hook: graphs do not call it."""
    hooked = [
        unit for owner in owners for unit in owner.eager.units if owner.eager.control(unit).reduced_hook is not None
    ]
    for unit in hooked:
        if not set(buckets).isdisjoint(unit.buckets):
            raise NotImplementedError(
                f"set_all_reduce_hook was called for {unit.name!r}, whose gradients a graph of the whole model would reduce "
                "without calling the hook. Compile layer by layer (layer.compile(backend='mfsdp')), where the hook is "
                "called, or change gradients after backward."
            )


def _policy(given: SchedulePolicy, buckets: Sequence[Bucket]) -> SchedulePolicy:
    """Return the schedule policy for a graph.

    If several forwards run before the first backward, no forward keeps gathered parameters.

    Raises:
        ValueError: If the options ask it to keep them.
    """
    topologies = [bucket.topology for bucket in buckets]
    if not any(of.accumulation.forwards_overlap and of.gather_group is not None for of in topologies):
        return given
    if given.reshard_after_forward is False:
        raise ValueError(
            "options['reshard_after_forward'] is False, but the model is a stage of a pipeline: each forward in "
            "flight would keep its own gathered parameters. Take it out, and give PipelineStage keep_gathered=True, "
            "which keeps them once."
        )
    keeps = True if given.reshard_after_forward == "auto" else given.reshard_after_forward
    return replace(given, keep_last=False, reshard_after_forward=keeps)


def _check_float32_gradients(buckets: Sequence[Bucket]) -> None:
    """Raise ValueError if ``options={"float32_gradients": True}`` is not supported."""
    for bucket in buckets:
        plan, device = bucket.plan, bucket.device.type
        if not plan.requires_grad:
            continue
        where = f"options['float32_gradients'] is given, but bucket {plan.name!r} of unit {plan.unit!r}"
        if device != "cuda" or torch.version.hip is not None:
            on = "a ROCm device" if device == "cuda" else f"device {device!r}"
            raise ValueError(
                f"{where} is on {on}: matrix products in bfloat16 or float16 that give float32 need CUDA. Take the "
                "option out."
            )
        if plan.comm_dtype != torch.float32:
            raise ValueError(
                f"{where} reduces gradients in {plan.comm_dtype}: a float32 gradient would be rounded when it is packed. "
                "Give MixedPrecisionPolicy(grad_comm_dtype=torch.float32), or take the option out."
            )
        if plan.compute_dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
            raise ValueError(
                f"{where} computes in float16 with torch.backends.cuda.matmul.allow_fp16_accumulation, for which torch has "
                "no float32 output. Set that to False, or take the option out."
            )


def _is_whole_model(buckets: Sequence[Bucket]) -> bool:
    return all(set(owner.buckets) <= set(buckets) for owner in models_of(buckets))


def _compile_inner(
    gm: fx.GraphModule, inputs: Sequence[Any], options: CompileOptions, record: pipeline.CompileRecord | None
) -> Callable[..., Any]:
    def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        if record is not None:
            user_outputs: int = kwargs["num_fwd_outputs"]
            if pipeline.needs_decisions(record):
                # What stays gathered must be decided before the partition, but depends on the graphs that the partition
                # makes. So a copy is partitioned first.
                trial = compat.copy_graph_module(joint)
                pipeline.tag_for_trial(trial.graph, record)
                graphs = compat.min_cut_partition(trial, joint_inputs, distinct=roles.DISTINCT, **kwargs)
                phases = (Phase.FORWARD, Phase.BACKWARD)
                pipeline.offload_saved_on_trial(graphs[0].graph, graphs[1].graph, record, user_outputs)
                pipeline.decide(
                    {phase: gm.graph for phase, gm in zip(phases, graphs, strict=True)}, record, user_outputs
                )
            pipeline.prepare_joint(joint.graph, record, user_outputs)
        forward, backward = compat.min_cut_partition(joint, joint_inputs, distinct=roles.DISTINCT, **kwargs)
        if record is not None:
            pipeline.keep_portions(forward.graph, backward.graph, record)
            pipeline.offload_saved(forward.graph, backward.graph, record)
        set_phase(forward.graph, Phase.FORWARD)
        set_phase(backward.graph, Phase.BACKWARD)
        return forward, backward

    def finish(graph: fx.Graph) -> None:
        progress.step(f"{options.inner.replace('inductor', 'Inductor')}, {phase_of(graph).value}")
        if (context := region_of(graph)) is not None:
            pipeline.finish_region(graph, context, phase_of(graph))
        elif record is not None:
            pipeline.finish_graph(graph, phase_of(graph), record)

    def finish_all(gm: fx.GraphModule) -> None:
        for region in dict.fromkeys(map(roles.body_of, roles.region_calls(gm.graph))):
            finish(region.graph)  # Inductor's passes come to the graphs inside by themselves
        finish(gm.graph)

    if options.inner == "aot_eager":
        return compat.compile_with_aot_eager(gm, inputs, partition, finish_all)
    register_lowerings()

    def uuid() -> str | None:
        return _cache_key(options, record)

    patches = compat.inductor_config_patches() | dict(options.inductor)
    if record is not None:
        if record.meeting is not None and "joint_custom_post_pass" not in patches:
            decide = functools.partial(pipeline.decide_inference, record=record)
            patches["joint_custom_post_pass"] = compat.graph_pass(decide, uuid)
        patches["custom_partitioner_fn"] = compat.partitioner(partition, uuid)
        patches["post_grad_custom_post_pass"] = compat.graph_pass(finish, uuid)
    return compat.compile_with_inductor(gm, inputs, patches, calls=record is not None and bool(record.regions))


def _cache_key(options: CompileOptions, record: pipeline.CompileRecord | None) -> str | None:
    """Return what compile caches must know in addition to the graph, or None to disable caching.

    The key covers the passes, their options, what controls their decisions, and the decisions themselves where ranks
    agree on them. None is returned if one of the user's passes has no identity, if graphs are to be observed or
    reported, or before the decisions are made: AOTAutograd's cache asks too early for that.
    """
    context, decided = "", ""
    identities = options.pass_identities()
    if record is not None:
        if record.observer is not None or options.report or (digest := pipeline.decision_digest(record)) is None:
            return None
        context, decided = record.context.signature, digest
    if identities is None:
        return None
    key = f"{_source_digest()}:{options}:{identities}:{context}:{decided}"
    return hashlib.sha256(key.encode()).hexdigest()


@functools.cache
def _source_digest() -> str:
    """Return a digest of the source that makes graphs: another version of it never gets graphs from an older one."""
    digest = hashlib.sha256()
    for package in (passes, runtime, backend):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
