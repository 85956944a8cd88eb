"""Passes on small graphs made by hand, and on the graphs of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import parity
import pytest
import torch
import zoo
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy

from mfsdp_compile.passes import drop_unread, pipeline, reduce, reshard, roles, schedule
from mfsdp_compile.passes.context import BucketInfo, Context, NodeKind, phase_of, role_of, set_phase
from mfsdp_compile.passes.verifier import verify
from mfsdp_compile.passes.verifier.analysis import Analysis
from mfsdp_compile.passes.verifier.contract import Contract, set_contract
from mfsdp_compile.passes.verifier.verify import ScheduleError
from mfsdp_compile.runtime.geometry.bucket_plan import BucketPlan
from mfsdp_compile.runtime.geometry.exchange import Exchange
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.geometry.layout import BucketLayout, ParamSpec, plan_layouts
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
WIDTH = 8
RANKS = Group("0", 2, 0)
FULL, OPTIM, NONE = ShardingStrategy.OPTIM_GRADS_PARAMS, ShardingStrategy.OPTIM, ShardingStrategy.NO_SHARD
TOPOLOGY = Topology(None, FULL, NONE, RANKS, None, RANKS)  # type: ignore[arg-type]


def exchange_of(layout: BucketLayout, dtype: torch.dtype, comm_dtype: torch.dtype) -> Exchange:
    """Return how a bucket is exchanged over :data:`TOPOLOGY`."""
    plan = BucketPlan(
        "bucket",
        "unit",
        layout,
        model_dtype=dtype,
        compute_dtype=dtype,
        main_dtype=torch.float32,
        requires_grad=True,
        grad_dtype=torch.float32,
        comm_dtype=comm_dtype,
    )
    return plan.exchange(TOPOLOGY)


def context(units: list[str], policy: SchedulePolicy | None = None, trainable: bool = True) -> Context:
    """Return buckets of one matrix each, for units of these names."""
    infos = []
    for i, unit in enumerate(units):
        (layout,) = plan_layouts([ParamSpec(f"w{i}", (WIDTH, WIDTH))], 4, 2)
        exchange = exchange_of(layout, torch.float32, torch.float32)
        infos.append(BucketInfo(f"{unit}.{i}", unit, layout, exchange, layout.numel * 4, trainable))
    return Context(tuple(infos), policy or SchedulePolicy(), whole_model=False)


def marked(node: fx.Node, bucket: int) -> fx.Node:
    node.meta["custom"] = {roles.MARK: bucket}
    return node


def gather(graph: fx.Graph, shard: fx.Node, bucket: int, cast: bool = False) -> fx.Node:
    source = shard
    if cast:
        source = marked(graph.call_function(aten._to_copy.default, (shard,), {"dtype": torch.bfloat16}), bucket)
    start = marked(graph.call_function(c10d.all_gather_into_tensor.default, (source, 2, "0")), bucket)
    wait = marked(graph.call_function(c10d.wait_tensor.default, (start,)), bucket)
    part = marked(graph.call_function(aten.slice.Tensor, (wait, 0, 0, WIDTH * WIDTH)), bucket)
    return marked(graph.call_function(aten.view.default, (part, [WIDTH, WIDTH])), bucket)


def forward_graph(units: int, cast: bool = False) -> fx.Graph:
    """Return a graph with all gathers at the top, as from AOTAutograd, followed by a chain of matmuls."""
    graph = fx.Graph()
    shards = [graph.placeholder(f"shard_{i}") for i in range(units)]
    x = graph.placeholder("x")
    weights = [gather(graph, shard, i, cast) for i, shard in enumerate(shards)]
    for weight in weights:
        x = graph.call_function(aten.mm.default, (x, weight))
        x = graph.call_function(aten.tanh.default, (x,))
    set_phase_of(graph, (x,), Phase.FORWARD)
    return graph


def backward_graph(units: int, uses: int = 1, in_order_of_buckets: bool = False) -> fx.Graph:
    """Return a graph of gradients, last unit first, with the reduction of each at the end of the graph.

    Args:
        uses: Number of uses of each parameter. Its gradient is their sum.
        in_order_of_buckets: Whether reductions are in the order of buckets. If not, in the order of gradients.
    """
    graph = fx.Graph()
    saved = [graph.placeholder(f"saved_{i}") for i in range(units)]
    gradient = graph.placeholder("tangents")
    packs = []
    for i in reversed(range(units)):
        whole = graph.call_function(aten.mm.default, (saved[i], gradient))
        for _ in range(uses - 1):
            whole = graph.call_function(
                aten.add.Tensor, (whole, graph.call_function(aten.mm.default, (saved[i], gradient)))
            )
        packs.append((i, whole))
        gradient = graph.call_function(aten.tanh.default, (gradient,))
    reduced = []
    for i, whole in sorted(packs) if in_order_of_buckets else packs:
        pack = marked(graph.call_function(torch.ops.mfsdp.pack_gradients.default, ([whole], [0], 64, torch.float32)), i)
        start = marked(graph.call_function(c10d.reduce_scatter_tensor.default, (pack, "avg", 2, "0")), i)
        reduced.append(marked(graph.call_function(c10d.wait_tensor.default, (start,)), i))
    set_phase_of(graph, tuple(reduced), Phase.BACKWARD)
    return graph


def set_phase_of(graph: fx.Graph, outputs: tuple[fx.Node, ...], phase: Phase) -> None:
    graph.output(outputs)
    set_phase(graph, phase)
    roles.assign(graph)


def events(graph: fx.Graph, ctx: Context) -> list[str]:
    """Return ``gather 0``, ``wait 0``, ``compute``, ``reduce 0``, ``await 0`` in graph order."""
    names = {
        NodeKind.START_GATHER: "gather",
        NodeKind.GATHERED: "wait",
        NodeKind.START_REDUCE: "reduce",
        NodeKind.REDUCED: "await",
    }
    found = []
    for node in graph.nodes:
        role = role_of(node)
        if role is not None and role.kind in names:
            found.append(f"{names[role.kind]} {role.bucket}")
        elif node.target in (aten.mm.default,):
            found.append("compute")
    return found


# -- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [False, True])
def test_gathers_start_one_unit_ahead(cast: bool) -> None:
    ctx, graph = context(["a", "b", "c"]), forward_graph(3, cast)
    report = schedule.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert events(graph, ctx) == [
        "gather 0",
        "gather 1",
        "wait 0",
        "compute",
        "gather 2",
        "wait 1",
        "compute",
        "wait 2",
        "compute",
    ]
    assert report.lines[1] == "b: 256 B, started before a is used"


def test_prefetch_distance() -> None:
    graph, ctx = forward_graph(4), context(["a", "b", "c", "d"], SchedulePolicy(prefetch=2))
    schedule.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert events(graph, ctx)[:5] == ["gather 0", "gather 1", "gather 2", "wait 0", "compute"]

    graph, ctx = forward_graph(3), context(["a", "b", "c"], SchedulePolicy(prefetch=0))
    schedule.apply(graph, ctx, phase_of(graph))
    assert events(graph, ctx) == [
        *("gather 0", "wait 0", "compute"),
        *("gather 1", "wait 1", "compute"),
        *("gather 2", "wait 2", "compute"),
    ]


def test_units_too_large_to_prefetch_wait_for_their_turn() -> None:
    graph, ctx = forward_graph(2), context(["a", "b"], SchedulePolicy(prefetch_bytes=255))
    report = schedule.apply(graph, ctx, phase_of(graph))
    assert events(graph, ctx) == ["gather 0", "wait 0", "compute", "gather 1", "wait 1", "compute"]
    assert "larger than prefetch_bytes (255 B)" in report.lines[1]


def test_buckets_of_a_unit_start_together() -> None:
    graph, ctx = forward_graph(4), context(["a", "b", "b", "c"])
    schedule.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert events(graph, ctx)[:4] == ["gather 0", "gather 1", "gather 2", "wait 0"]
    assert events(graph, ctx).index("gather 3") < events(graph, ctx).index("wait 1")


def test_order_follows_use_not_registration() -> None:
    graph = fx.Graph()
    shards = [graph.placeholder(f"shard_{i}") for i in range(2)]
    x = graph.placeholder("x")
    first, second = (gather(graph, shard, i) for i, shard in enumerate(shards))
    for weight in (second, first):
        x = graph.call_function(aten.mm.default, (x, weight))
    set_phase_of(graph, (x,), Phase.FORWARD)
    ctx = context(["a", "b"])
    schedule.apply(graph, ctx, phase_of(graph))
    assert events(graph, ctx) == ["gather 1", "gather 0", "wait 1", "compute", "wait 0", "compute"]


# -- reduce -----------------------------------------------------------------------------------------------------------


def test_reductions_start_early_and_are_awaited_one_later() -> None:
    graph, ctx = backward_graph(3), context(["a", "b", "c"])
    reduce.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert events(graph, ctx) == [
        "compute",
        "reduce 2",
        "compute",
        "reduce 1",
        "await 2",
        "compute",
        "reduce 0",
        "await 1",
        "await 0",
    ]


def test_reductions_start_in_the_order_of_gradients() -> None:
    ctx, graphs = context(["a", "b", "c"]), [backward_graph(3, in_order_of_buckets=given) for given in (False, True)]
    for graph in graphs:
        reduce.apply(graph, ctx, phase_of(graph))
        graph.lint()
    assert events(graphs[1], ctx) == events(graphs[0], ctx)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (SchedulePolicy(reductions_in_flight=0), ["reduce 2", "await 2", "compute", "reduce 1", "await 1"]),
        (SchedulePolicy(reductions_in_flight=2), ["reduce 2", "compute", "reduce 1", "compute", "reduce 0", "await 2"]),
        # Two buckets of 256 B exceed the limit, so each is awaited before the next is packed.
        (SchedulePolicy(reduction_bytes=300), ["reduce 2", "compute", "await 2", "reduce 1", "compute", "await 1"]),
    ],
)
def test_reductions_in_flight_are_bounded(policy: SchedulePolicy, expected: list[str]) -> None:
    graph, ctx = backward_graph(3), context(["a", "b", "c"], policy)
    reduce.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert events(graph, ctx)[1 : 1 + len(expected)] == expected


def test_reductions_of_a_unit_are_awaited_one_unit_later() -> None:
    """The reduction of each bucket can hide behind a unit's computation, however many buckets units have."""
    graph, ctx = backward_graph(5), context(["a", "b", "b", "c", "c"])
    reduce.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert [event for event in events(graph, ctx) if event != "compute"] == [
        *("reduce 4", "reduce 3"),
        *("reduce 2", "await 4", "reduce 1", "await 3"),
        *("reduce 0", "await 2", "await 1", "await 0"),
    ]


# -- verify -----------------------------------------------------------------------------------------------------------


def scheduled(graph: fx.Graph, ctx: Context, phase: Phase = Phase.FORWARD) -> fx.Graph:
    set_contract(graph, Contract.of(Analysis(graph, ctx, phase), user_outputs=1))
    reduce.apply(graph, ctx, phase_of(graph))
    schedule.apply(graph, ctx, phase_of(graph))
    return graph


def test_scheduled_graphs_pass() -> None:
    ctx = context(["a", "b", "c"])
    for graph, phase in ((forward_graph(3), Phase.FORWARD), (backward_graph(3), Phase.BACKWARD)):
        report = verify.verify(scheduled(graph, ctx, phase), ctx, phase)
        assert "all rules hold" in report.lines[0]


def find(graph: fx.Graph, kind: NodeKind, bucket: int) -> fx.Node:
    return next(n for n in graph.nodes if (r := role_of(n)) and r.kind is kind and r.bucket == bucket)


def read_before_wait(graph: fx.Graph) -> None:
    start, view = find(graph, NodeKind.START_GATHER, 1), find(graph, NodeKind.VIEW, 1)
    view.replace_input_with(find(graph, NodeKind.GATHERED, 1), start)


def gather_twice(graph: fx.Graph) -> None:
    start = find(graph, NodeKind.START_GATHER, 1)
    with graph.inserting_before(start):
        again = graph.node_copy(start)
        wait = graph.node_copy(find(graph, NodeKind.GATHERED, 1), lambda _: again)
        assert role_of(wait)


def save_parameter(graph: fx.Graph) -> None:
    output = graph.output_node()
    output.args = ((*output.args[0], find(graph, NodeKind.VIEW, 0)),)  # type: ignore[misc]


def save_bucket(graph: fx.Graph) -> None:
    output = graph.output_node()
    output.args = ((*output.args[0], find(graph, NodeKind.GATHERED, 0)),)  # type: ignore[misc]


def reduce_twice(graph: fx.Graph) -> None:
    start, wait = find(graph, NodeKind.START_REDUCE, 1), find(graph, NodeKind.REDUCED, 1)
    with graph.inserting_after(wait):
        again = graph.node_copy(start)
    with graph.inserting_after(again):
        waited = graph.node_copy(wait, lambda _: again)
    output = graph.output_node()
    output.args = ((*output.args[0], waited),)  # type: ignore[misc]


def wrong_offset(graph: fx.Graph) -> None:
    pack = find(graph, NodeKind.PACK, 1)
    pack.args = (pack.args[0], [4], *pack.args[2:])


def wrong_size(graph: fx.Graph) -> None:
    pack = find(graph, NodeKind.PACK, 1)
    pack.args = (*pack.args[:2], 32, *pack.args[3:])


def sum_for_mean(graph: fx.Graph) -> None:
    start = find(graph, NodeKind.START_REDUCE, 1)
    start.args = (start.args[0], "sum", *start.args[2:])


def lose_gradient(graph: fx.Graph) -> None:
    wait = find(graph, NodeKind.REDUCED, 1)
    output = graph.output_node()
    output.args = (tuple(None if a is wait else a for a in output.args[0]),)  # type: ignore[misc,union-attr]


def do_not_reduce(graph: fx.Graph) -> None:
    lose_gradient(graph)
    for kind in (NodeKind.REDUCED, NodeKind.START_REDUCE, NodeKind.PACK):
        graph.erase_node(find(graph, kind, 1))


def lose_a_term(graph: fx.Graph) -> None:
    total = graph.find_nodes(op="call_function", target=aten.add.Tensor)[1]
    total.replace_all_uses_with(total.args[0])
    graph.erase_node(total)


def of_tied_parameters(units: int) -> fx.Graph:
    return backward_graph(units, uses=2)


MUTANTS: list[tuple[Callable[[fx.Graph], None], Callable[[int], fx.Graph], str]] = [
    (read_before_wait, forward_graph, "V1"),
    (gather_twice, forward_graph, "V2"),
    (save_parameter, forward_graph, "V8"),
    (save_bucket, forward_graph, "V8"),
    (reduce_twice, backward_graph, "V4"),
    (wrong_offset, backward_graph, "V4"),
    (wrong_size, backward_graph, "V10"),
    (sum_for_mean, backward_graph, "V9"),
    (lose_gradient, backward_graph, "V4"),
    (do_not_reduce, backward_graph, "V4"),
    (lose_a_term, of_tied_parameters, "V5"),
]


@pytest.mark.parametrize(("mutate", "make", "rule"), MUTANTS, ids=lambda m: getattr(m, "__name__", str(m)))
def test_broken_graphs_are_rejected(
    mutate: Callable[[fx.Graph], None], make: Callable[[int], fx.Graph], rule: str
) -> None:
    ctx = context(["a", "b", "c"])
    phase = Phase.FORWARD if make is forward_graph else Phase.BACKWARD
    graph = scheduled(make(3), ctx, phase)
    verify.verify(graph, ctx, phase)
    mutate(graph)
    with pytest.raises(ScheduleError, match=rf"{rule} \(.*unit '.', bucket .*node"):
        verify.verify(graph, ctx, phase)


def test_frozen_buckets_are_not_reduced() -> None:
    ctx = context(["a", "b", "c"], trainable=False)
    with pytest.raises(ScheduleError, match=r"V4 .*frozen"):
        verify.verify(scheduled(backward_graph(3), ctx, Phase.BACKWARD), ctx, Phase.BACKWARD)


def test_forward_graphs_do_not_reduce() -> None:
    ctx = context(["a", "b", "c"])
    with pytest.raises(ScheduleError, match=r"V4 .*the inference graph reduces"):
        verify.verify(scheduled(backward_graph(3), ctx, Phase.INFERENCE), ctx, Phase.INFERENCE)


@pytest.mark.parametrize("cast", [False, True])
def test_unread_gathers_are_taken_out(cast: bool) -> None:
    graph, ctx = forward_graph(3, cast), context(["a", "b", "c"])
    products = graph.find_nodes(op="call_function", target=aten.mm.default)
    products[1].replace_all_uses_with(products[1].args[0])
    graph.erase_node(products[1])
    report = drop_unread.apply(graph, ctx, phase_of(graph))
    graph.lint()
    assert report.lines == ["b.1: nothing reads it, not gathered"]
    assert events(graph, ctx) == ["gather 0", "wait 0", "gather 2", "wait 2", "compute", "compute"]
    assert drop_unread.apply(graph, ctx, phase_of(graph)).lines == []


def test_copies_of_weights_are_computed_again() -> None:
    """Casts of gathered weights, and views of the casts, are recomputed, because they are as large as the weights."""
    graph = fx.Graph()
    shard, x = graph.placeholder("shard_0"), graph.placeholder("x")
    weight = gather(graph, shard, 0)
    cast = graph.call_function(aten._to_copy.default, (weight,), {"dtype": torch.bfloat16})
    turned = graph.call_function(aten.t.default, (cast,))
    product = graph.call_function(aten.mm.default, (x, turned))
    set_phase_of(graph, (product,), Phase.JOINT)
    reshard.apply(graph, context(["a"]), Phase.JOINT)
    assert all(node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for node in (weight, cast, turned))
    assert "recompute" not in product.meta


def test_quantized_weights_are_computed_again() -> None:
    """A layer that quantizes its weight: what is as large as the weight is recomputed, what inputs give is not."""
    graph = fx.Graph()
    shard, x = graph.placeholder("shard_0"), graph.placeholder("x")
    weight = gather(graph, shard, 0)
    absolute = graph.call_function(aten.abs.default, (weight,))
    largest = graph.call_function(aten.amax.default, (absolute,))
    scale = graph.call_function(aten.reciprocal.default, (largest,))
    scaled = graph.call_function(aten.mul.Tensor, (weight, scale))
    data = graph.call_function(aten._to_copy.default, (scaled,), {"dtype": torch.float8_e4m3fn})
    copied = graph.call_function(aten.clone.default, (data,))
    mixed = graph.call_function(aten.mul.Tensor, (weight, x))
    for node in (weight, absolute, largest, scale, scaled, data, copied, mixed):
        node.meta["val"] = torch.empty(1 if node in (largest, scale) else 16)
    set_phase_of(graph, (copied, mixed), Phase.JOINT)
    reshard.apply(graph, context(["a"]), Phase.JOINT)
    assert all(
        node.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE for node in (weight, absolute, scaled, data, copied)
    )
    assert not any("recompute" in node.meta for node in (largest, scale, mixed))


def test_only_whole_models_keep_what_forward_used_last() -> None:
    """Only graphs of whole models keep the last bucket. A block compiled alone does not know what runs in between."""
    graph = fx.Graph()
    shards, x = [graph.placeholder(f"shard_{i}") for i in range(2)], graph.placeholder("x")
    weights = [gather(graph, shard, i) for i, shard in enumerate(shards)]
    for weight in weights:
        x = graph.call_function(aten.mm.default, (x, weight))
    for weight in reversed(weights):
        x = graph.call_function(aten.mm.default, (x, weight))
        x.meta["partitioner_tag"] = "is_backward"
    set_phase_of(graph, (x,), Phase.JOINT)
    ctx = context(["a", "b"])
    assert reshard.kept_buckets(graph, replace(ctx, whole_model=True)) == {1}
    assert reshard.kept_buckets(graph, ctx) == frozenset()


# -- real graphs ------------------------------------------------------------------------------------------------------


def compiled_record(factory: Callable[[], nn.Module], **options: Any) -> pipeline.CompileRecord:
    model, call = parity.shard(parity.build(factory), parity.AOT_EAGER, **options)
    call(torch.randn(6, 8)).backward()
    (record,) = model.sharded.compiled_graphs
    return record


@pytest.mark.usefixtures("fake_world")
def test_whole_models_keep_what_forward_used_last() -> None:
    kept = compiled_record(zoo.Plain)
    assert "root:after: kept for backward" in kept.reports[Phase.JOINT][0].lines
    assert "gather  root:after" not in " ".join(kept.schedules[Phase.BACKWARD])
    not_kept = compiled_record(zoo.Plain, keep_last=False)
    assert any("gather  root:after" in line for line in not_kept.schedules[Phase.BACKWARD])


@pytest.mark.usefixtures("fake_world")
def test_parts_of_models_keep_nothing() -> None:
    """Blocks that are compiled one by one keep nothing.

    If each kept its bucket, the whole model would stay gathered.
    """
    model, _ = parity.shard(parity.build(zoo.Plain), parity.EAGER)
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": "aot_eager"})
    model(torch.randn(6, 8)).backward()
    (record,) = model.sharded.compiled_graphs
    assert not any("kept" in line for report in record.reports[Phase.JOINT] for line in report.lines)


@pytest.mark.long_unless("Plain", "FrozenUnit")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", ["Plain", "Tied", "FrozenParameters", "FrozenUnit", "Checkpointed", "CalledTwice"])
def test_reports_read_well(name: str) -> None:
    record = compiled_record(parity.MODELS[name])
    text = "\n".join(str(report) for reports in record.reports.values() for report in reports)
    for words in ("unshard", "reshard", "reduce", "schedule", "all rules hold"):
        assert words in text
    for lines in record.schedules.values():
        assert any(line.startswith("gather") for line in lines)
        assert any("operators" in line for line in lines)


@pytest.mark.usefixtures("fake_world")
def test_frozen_units_are_gathered_and_not_reduced() -> None:
    record = compiled_record(zoo.FrozenUnit)
    backward = record.schedules[Phase.BACKWARD]
    assert any(line.startswith("gather  blocks.1 ") for line in backward)  # gradients flow through it
    assert not any(line.startswith("reduce  blocks.1 ") for line in backward)
    assert not any("root:before" in line for line in backward)  # nothing in front of it trains


@pytest.mark.usefixtures("fake_world")
def test_no_gradients_are_computed_for_what_was_frozen_since() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), parity.AOT_EAGER)
    model.module.blocks[1].up.bias.requires_grad_(False)
    seen: list[fx.Graph] = []
    call = torch.compile(
        model,
        backend="mfsdp",
        options={
            "inner": "aot_eager",
            "passes": [lambda g, _, phase: seen.append(g) if phase is Phase.BACKWARD else None],
        },
    )
    call(torch.randn(6, 8)).backward()
    (bucket,) = (bucket for bucket in model.sharded.buckets if bucket.plan.unit == "blocks.1")
    names = [slot.name for slot in bucket.plan.layout.slots]
    offset = bucket.plan.layout.slots[names.index("blocks.1.up.bias")].offset
    roles.assign(seen[0])
    packs = [
        node
        for node in seen[0].nodes
        if (r := role_of(node)) and r.kind is NodeKind.PACK and r.bucket == model.sharded.buckets.index(bucket)
    ]
    assert [offset in pack.args[1] for pack in packs] == [False]


@pytest.mark.usefixtures("fake_world")
def test_what_nothing_reads_is_not_gathered() -> None:
    record = compiled_record(zoo.DeadEnd)
    (dead,) = (bucket for bucket in record.context.buckets if bucket.unit == "blocks.2")
    told = [line for report in record.reports[Phase.JOINT] if report.name == "unread" for line in report.lines]
    assert told == [f"{dead.name}: nothing reads it, not gathered"]
    assert not any(dead.name in line for lines in record.schedules.values() for line in lines)

    model, call = parity.shard(parity.build(zoo.DeadEnd), parity.AOT_EAGER)
    with torch.no_grad():
        call(torch.randn(6, 8))
    (record,) = model.sharded.compiled_graphs
    assert [report.name for report in record.reports[Phase.INFERENCE]][:1] == ["unread"]
    assert not any(dead.name in line for line in record.schedules[Phase.INFERENCE])


@pytest.mark.usefixtures("fake_world")
def test_rewritten_graph_runs_by_itself() -> None:
    """The graph that ``unshard`` leaves is valid Python and computes."""
    seen: list[str] = []

    def spy(gm: fx.GraphModule, *arguments: Any) -> None:
        original(gm, *arguments)
        seen.append(gm.print_readable(print_output=False))

    original = pipeline.rewrite_dynamo_graph
    pipeline.rewrite_dynamo_graph = spy
    try:
        compiled_record(zoo.Plain)
    finally:
        pipeline.rewrite_dynamo_graph = original
    assert "torch.ops.mfsdp.gather.default(shard_0" in seen[0]
    assert "mfsdp.unshard" not in seen[0]
    compile(seen[0], "graph", "exec")
