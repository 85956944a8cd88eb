"""The verifier rejects every mutant of real graphs by the right rule, accepts the graphs, and checks the user's passes.

``pytest tests/passes/test_verify.py -k mutant -s`` prints the table of rules and mutants.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mutants
import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import Phase as Stage
from hypothesis import strategies as st
from mutants import Subject
from strangers import Changes, Doubled, InPairs, Scrambled
from torch import Tensor, fx
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, ScheduleError, fully_shard_model, verify
from mfsdp_compile.backend.compile import _cache_key
from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.models.llama import Block as LlamaBlock
from mfsdp_compile.models.llama import Llama, LlamaConfig
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import Context, Report
from mfsdp_compile.passes.listing import collectives
from mfsdp_compile.passes.verifier.analysis import tensor_of
from mfsdp_compile.passes.verifier.rules import RULES
from mfsdp_compile.passes.verifier.verify import breaches
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

EXAMPLES = 8
"""Mutants of each kind."""
OFFLOADED = {"activation_offload": True, "activation_offload_least": 1}
KEEPS_NOTHING = {"keep_last": False}
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
QUANTIZED = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
HAS_ROWS = compat.multiplies_by_rows(torch.device("cpu"))
"""Whether graphs with products in float8 that have scales of rows can run here."""
OF_ROWS = (mutants.scales_not_folded, mutants.quantized_over_the_other_dimension)
SUMMED = MixedPrecisionPolicy(grad_sum_dtype=F32)
IN_LEVELS = MixedPrecisionPolicy(
    grad_comm_dtype=torch.int8, grad_sum_dtype=F32, grad_sum_within=2, grad_outer_comm_dtype=torch.int4
)
IN_EIGHT_BITS = MixedPrecisionPolicy(grad_comm_dtype=torch.int8, grad_sum_dtype=F32)
MXFP8 = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn, param_comm_scaling="mxfp8")
NVFP4 = MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")


@dataclass(frozen=True)
class Scheduled:
    """A graph after all passes."""

    name: str
    graph: fx.Graph
    context: Context
    phase: Phase

    def __post_init__(self) -> None:
        vars(self)["lanes"] = [info.exchange.lane for info in self.context.buckets]  # outlive the model, as they do

    def copy(self) -> Subject:
        return Subject(copy.deepcopy(self.graph), self.context, self.phase)

    @cached_property
    def counts(self) -> Counter[Callable[..., Any]]:
        """Number of mutants of each kind in this graph."""
        subject = self.copy()
        return Counter({kind: sum(1 for _ in kind(subject)) for kinds in mutants.KINDS.values() for kind in kinds})


def captured(
    name: str, make: Callable[[], Any], strategy: str, dtype: torch.dtype = F32, **options: Any
) -> list[Scheduled]:
    """Return the graphs of a training step and of inference."""
    found: list[Scheduled] = []
    finish, finish_region = pipeline.finish_graph, pipeline.finish_region

    def spy(graph: fx.Graph, phase: Phase, record: pipeline.CompileRecord) -> None:
        finish(graph, phase, record)
        found.append(Scheduled(f"{name}, {strategy}, {phase.value}", copy.deepcopy(graph), record.context, phase))

    def spy_region(graph: fx.Graph, context: Context, phase: Phase) -> None:
        finish_region(graph, context, phase)
        found.append(Scheduled(f"{name}, {strategy}, region, {phase.value}", copy.deepcopy(graph), context, phase))

    policy = options.pop("policy", MixedPrecisionPolicy())
    model = fully_shard_model(
        parity.build(make).to(dtype),
        fsdp_unit_modules=[zoo.Block],
        mixed_precision_policy=policy,
        fsdp_double_buffer=options.pop("buffers", False),
        offload_policy=options.pop("offload", None),
        plugins=options.pop("plugins", ()),
        **mesh_arguments(strategy),
    )
    pipeline.finish_graph, pipeline.finish_region = spy, spy_region
    try:
        compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager", "regions": False, **options})
        compiled(torch.randn(6, 8, dtype=dtype)).backward()
        if strategy == "optim_grads_params" and make is zoo.Plain:
            with torch.no_grad():
                compiled(torch.randn(6, 8, dtype=dtype))
    finally:
        pipeline.finish_graph, pipeline.finish_region = finish, finish_region
        torch._dynamo.reset()
    return found


def _multiplied_by_rows() -> list[Scheduled]:
    rowwise = {"fp8_matmul": "rowwise"}
    return [
        *captured("float8", zoo.Aligned, "optim_grads_params", BF16, fp8_wgrad=True, **rowwise),
        *captured("float8, quantized", zoo.Aligned, "optim_grads_params", BF16, policy=QUANTIZED, **rowwise),
    ]


@pytest.fixture(scope="module")
def graphs() -> list[Scheduled]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        found = [
            *captured("plain", zoo.Plain, "optim_grads_params"),
            *captured("plain, nothing kept", zoo.Plain, "optim_grads_params", **KEEPS_NOTHING),
            *captured("tied", zoo.Tied, "optim_grads_params"),
            *captured("portions", zoo.Uneven, "optim_grads_params", BF16, reshard_after_forward=2),
            *captured("portions, nested", zoo.Nested, "optim_grads_params", reshard_after_forward=2),
            *captured("frozen biases", zoo.FrozenParameters, "optim"),
            *captured("frozen unit", zoo.FrozenUnit, "optim_grads"),
            *captured("tied", zoo.Tied, "no_shard"),
            *captured("bfloat16", zoo.Plain, "HSDP optim_grads_params", BF16),
            *captured("float16", zoo.Tied, "HFSDP", F16, policy=MixedPrecisionPolicy(grad_comm_dtype=F16)),
            *captured("regions", zoo.Plain, "optim_grads_params", regions=True),
            *captured(
                "regions, portions", zoo.FrozenParameters, "optim_grads_params", regions=True, reshard_after_forward=2
            ),
            *captured(
                "regions", zoo.Plain, "no_shard", F16, regions=True, policy=MixedPrecisionPolicy(grad_comm_dtype=F16)
            ),
            *captured("buffers", zoo.Plain, "optim_grads_params", BF16, buffers=True),
            *captured("buffers, regions", zoo.Plain, "HSDP optim_grads_params", buffers=True, regions=True),
            *captured("host memory", zoo.Tied, "optim_grads_params", BF16, offload=CPUOffloadPolicy()),
            *captured(
                "optimizer in host memory", zoo.Tied, "optim_grads_params", BF16, offload=OptimizerOffloadPolicy()
            ),
            *captured(
                "host memory, buffers, portions, regions",
                zoo.Plain,
                "optim_grads_params",
                offload={zoo.Block: CPUOffloadPolicy(pin_memory=False)},
                regions=True,
                buffers=True,
                reshard_after_forward=2,
            ),
            *captured("saved values in host memory", zoo.Plain, "optim_grads_params", **OFFLOADED),
            *captured(
                "saved values in host memory, regions", zoo.Plain, "optim_grads_params", regions=True, **OFFLOADED
            ),
            *captured("quantized", zoo.Plain, "optim_grads_params", BF16, policy=QUANTIZED),
            *captured(
                "quantized, portions", zoo.Uneven, "optim_grads_params", policy=QUANTIZED, reshard_after_forward=2
            ),
            *captured("mxfp8", zoo.Aligned, "optim_grads_params", BF16, policy=MXFP8),
            *captured("nvfp4", zoo.Aligned, "optim_grads_params", BF16, policy=NVFP4),
            *(_multiplied_by_rows() if HAS_ROWS else ()),
            *captured("float8, regions", zoo.Aligned, "optim", BF16, fp8_matmul="tensorwise", regions=True),
            *captured("sums in float32", zoo.Plain, "HSDP optim_grads_params", BF16, policy=SUMMED),
            *captured("sums in two levels", zoo.Plain, "optim_grads_params", BF16, policy=IN_LEVELS),
            *captured("8 bits on the wire", zoo.Plain, "HSDP optim_grads_params", policy=IN_EIGHT_BITS),
            *captured("steps in backward", zoo.Uneven, "optim_grads_params", step_in_backward=True),
            *captured("steps in backward", zoo.Plain, "HSDP optim", BF16, step_in_backward=True),
            *captured(
                "steps in backward, host memory",
                zoo.Uneven,
                "optim_grads_params",
                step_in_backward=True,
                offload=CPUOffloadPolicy(),
            ),
            *captured("a codec", zoo.Uneven, "optim_grads_params", BF16, plugins=[Scrambled()]),
            *captured("changes", zoo.Uneven, "HSDP optim_grads_params", plugins=[Changes()]),
            *captured("gradients in pairs", zoo.Uneven, "HFSDP", BF16, plugins=[Scrambled(), InPairs()]),
            *captured("doubled and halved", zoo.Plain, "HSDP optim", plugins=[Doubled()]),
            *captured("float32 gradients", zoo.Uneven, "HSDP optim", BF16, policy=MixedPrecisionPolicy(F32, F32)),
        ]
    finally:
        dist.destroy_process_group()
    return found


# -- unchanged graphs -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_graphs_are_accepted(graphs: list[Scheduled]) -> None:
    for scheduled in graphs:
        subject = scheduled.copy()
        report = verify(subject.graph, subject.context, subject.phase)
        assert report.lines[0].endswith("all rules hold")
        assert f"{sum(launch.gathers for launch in subject.launches)} gathers" in report.lines[0]
    assert {scheduled.phase for scheduled in graphs} == {Phase.FORWARD, Phase.BACKWARD, Phase.INFERENCE}


def test_other_schedules_are_accepted(graphs: list[Scheduled]) -> None:
    """Slow but correct schedules are accepted: all gathers at the top, all waits of reductions at the end."""
    for scheduled in graphs:
        s = scheduled.copy()
        for launch in reversed(s.gathers):
            if launch.input.op == "placeholder":
                next(n for n in s.graph.nodes if n.op != "placeholder").prepend(launch.node)
        for reduction in s.reductions:
            ((_, after),) = reduction.returned
            for node in (reduction.stages[-1].waits[0], *after):
                s.output.prepend(node)
        s.graph.lint()
        assert not breaches(s.graph, s.context, s.phase)


def test_buffers_that_a_pass_gives_are_accepted(graphs: list[Scheduled]) -> None:
    """Gathers that are not in use at the same time may share memory that a pass gives them."""
    shared = 0
    for scheduled in graphs:
        s = scheduled.copy()
        if not s.gathered or s.graph.find_nodes(op="call_function", target=roles.START_STAGE):
            continue  # no pass knows how a stage of a plug-in gathers
        memory = mutants.buffer(s, 2 * max(mutants.numel(s, whole) for whole in s.gathered))
        half, in_use = tensor_of(memory).numel() // 2, [0, 0]
        for whole in s.gathered:
            start, end = s.live(whole)
            for i in (0, 1):
                if in_use[i] < start:
                    in_use[i] = end
                    out = mutants.call(
                        memory, torch.ops.aten.slice.Tensor, memory, 0, i * half, i * half + mutants.numel(s, whole)
                    )
                    mutants.gather_into(whole.launch, out)
                    shared += 1
                    break
        s.graph.lint()
        assert not breaches(s.graph, s.context, s.phase)
    assert shared > 20


def test_release_by_hand_is_accepted(graphs: list[Scheduled]) -> None:
    for scheduled in graphs:
        s = scheduled.copy()
        for whole in s.gathered:
            if (last := s.last_read(whole)).op != "output":
                mutants.release(last, whole.node)
        assert not breaches(s.graph, s.context, s.phase)


# -- mutants ----------------------------------------------------------------------------------------------------------


def test_every_mutant_is_rejected(graphs: list[Scheduled]) -> None:
    rows: list[tuple[str, str, int, int, int, str]] = []
    escaped: list[str] = []
    number = int(os.environ["MFSDP_SEED"])
    for rule in RULES:
        for kind in mutants.KINDS[rule.number]:
            if kind in OF_ROWS and not HAS_ROWS:
                continue
            tried: set[tuple[int, int]] = set()
            missed = len(escaped)

            @seed(number)
            @settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                phases=[Stage.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.data())
            def mutate(data: st.DataObject) -> None:
                places = [i for i, scheduled in enumerate(graphs) if scheduled.counts[kind]]
                at = data.draw(st.sampled_from(places))
                place = data.draw(st.integers(0, graphs[at].counts[kind] - 1))
                subject = graphs[at].copy()
                next(itertools.islice(kind(subject), place, None))()
                found = breaches(subject.graph, subject.context, subject.phase)
                tried.add((at, place))
                if rule.number not in {breach.rule for breach in found}:
                    named = sorted({breach.rule for breach in found})
                    escaped.append(f"{rule.number} {kind.__name__} in {graphs[at].name} ({place}): {named}")

            mutate()
            places = sum(scheduled.counts[kind] for scheduled in graphs)
            missed = len(set(escaped[missed:]))
            rows.append((rule.number, kind.__name__, places, len(tried), len(tried) - missed, kind.__doc__ or ""))
    print(f"\n{'rule':5} {'mutant':29} {'places':>6} {'tried':>5} {'rejected':>8}  why it is wrong")
    for rule_number, name, places, tried_, rejected, why in rows:
        print(f"{rule_number:5} {name:29} {places:6} {tried_:5} {rejected:8}  {why}")
    per_rule = Counter(row[0] for row in rows)
    total = [sum(row[i] for row in rows) for i in (3, 4)]
    print(f"{len(rows)} kinds, {total[0]} mutants, {total[1]} rejected by their rule")
    assert all(per_rule[rule.number] >= 5 - (not HAS_ROWS) for rule in RULES)
    assert not escaped, f"MFSDP_SEED={number} draws the same mutants:\n" + "\n".join(escaped)


def test_messages_name_everything(graphs: list[Scheduled]) -> None:
    scheduled = next(s for s in graphs if s.phase is Phase.FORWARD)
    subject = scheduled.copy()
    tuple(mutants.view_reads_start(subject))[3]()
    with pytest.raises(ScheduleError) as caught:
        verify(subject.graph, subject.context, subject.phase, after="mine")
    message = str(caught.value)
    assert message.startswith("The forward graph after pass 'mine' breaks")
    assert "V1 (awaited before use): " in message
    assert "unit 'blocks." in message
    assert "bucket 'blocks." in message
    assert "zoo.py:" in message
    assert {breach.rule for breach in caught.value.breaches} >= {"V1"}

    subject = next(s for s in graphs if s.phase is Phase.BACKWARD).copy()
    next(mutants.gradient_dropped(subject))()
    with pytest.raises(
        ScheduleError, match=r"V4 \(reduced once\): its gradient is lost; .*parameter '.*weight', node .*zoo.py"
    ):
        verify(subject.graph, subject.context, subject.phase)


# -- passes of the user's own -----------------------------------------------------------------------------------------


class Watches:
    """Changes nothing."""

    def __init__(self, identity: Any = None) -> None:
        self.seen: list[Phase] = []
        self.identity = identity

    def __call__(self, graph: fx.Graph, context: Context, phase: Phase) -> Report:
        verify(graph, context, phase)
        self.seen.append(phase)
        return Report("watches", [f"{len(graph.nodes)} nodes"])

    def uuid(self) -> Any:
        return self.identity


def gathers_again(graph: fx.Graph, context: Context, phase: Phase) -> None:
    next(mutants.gathered_twice(Subject(graph, context, phase)))()


def sharded_and_compiled(**options: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    return parity.shard(parity.build(zoo.Plain), parity.AOT_EAGER, **options)


@pytest.mark.long_if("each")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("each", ["once", "each"])
def test_passes_run_after_ours_and_are_verified(each: str) -> None:
    watches = Watches()
    model, call = sharded_and_compiled(passes=[watches, lambda *_: None], verify=each)
    call(torch.randn(6, 8)).backward()
    with torch.no_grad():
        call(torch.randn(6, 8))
    assert watches.seen == [Phase.FORWARD, Phase.BACKWARD, Phase.INFERENCE]
    record = model.sharded.compiled_graphs[0]
    names = [report.name for report in record.reports[Phase.BACKWARD]]
    ours = ["reduce", "verify", "schedule", "verify"] if each == "each" else ["reduce", "schedule", "verify"]
    assert names == [*ours, "watches", "verify", "<lambda>", "verify"]
    assert [report.name for report in record.reports[Phase.JOINT]][1:] == (["verify"] if each == "each" else [])
    assert all(report.seconds > 0 for report in record.reports[Phase.BACKWARD])


@pytest.mark.usefixtures("fake_world")
def test_a_pass_that_breaks_the_graph_is_named() -> None:
    _, call = sharded_and_compiled(passes=[Watches(), gathers_again])
    message = r"forward graph after pass 'gathers_again' breaks(.*\n)*.*V2 \(released after use\): it is gathered twice"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as caught:
        call(torch.randn(6, 8)).backward()
    assert isinstance(caught.value.inner_exception, ScheduleError)


@pytest.mark.usefixtures("fake_world")
def test_passes_return_reports() -> None:
    _, call = sharded_and_compiled(passes=[lambda *_: "done"])
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="returned 'done'; a pass returns a Report, or None"
    ):
        call(torch.randn(6, 8))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"passes": gathers_again}, TypeError, "takes a list of passes"),
        ({"passes": ["mine"]}, TypeError, "got 'mine'"),
        ({"passes": [Watches]}, TypeError, "callables"),
        ({"verify": "never"}, ValueError, "must be one of"),
    ],
)
def test_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CompileOptions.of(options, None)


def test_verify_option_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CompileOptions.of({}, None).verify == "each"  # set by conftest.py
    monkeypatch.delenv("MFSDP_VERIFY")
    assert CompileOptions.of({}, None).verify == "once"
    assert CompileOptions.of({"verify": "each"}, None).verify == "each"
    monkeypatch.setenv("MFSDP_VERIFY", "twice")
    with pytest.raises(ValueError, match="MFSDP_VERIFY"):
        CompileOptions.of({}, None)


def test_caches_know_passes_by_their_uuid() -> None:
    def key(*passes: Any) -> str | None:
        return _cache_key(CompileOptions.of({"passes": passes}, None), None)

    assert key(Watches("a")) == key(Watches("a"))
    assert len({key(), key(Watches("a")), key(Watches("b")), key(Watches("a"), Watches("b"))}) == 4
    assert key(gathers_again) is None
    assert key(Watches("a"), Watches(None)) is None


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
def test_passes_in_compile_caches() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def counted(*passes: Any) -> dict[str, int]:
        """Return the counts of one start of a program."""
        torch._dynamo.reset()
        counters.clear()
        _, call = parity.shard(parity.build(lambda: zoo.Plain(layers=1)), parity.INDUCTOR, passes=passes)
        call(torch.randn(6, 8)).backward()
        return {name.rpartition("_")[2]: n for name, n in counters["aot_autograd"].items() if "cache" in name}

    with fresh_cache():
        watches = Watches("a")
        assert counted(watches)["miss"] == 1
        assert watches.seen == [Phase.FORWARD, Phase.BACKWARD]
        again = Watches("a")
        assert counted(again)["hit"] == 1
        assert not again.seen
        assert counted(Watches("b"))["miss"] == 1
        for _ in range(2):  # a plain function may differ next time
            seen: list[Phase] = []
            assert "hit" not in counted(lambda graph, context, phase, seen=seen: seen.append(phase))
            assert seen == [Phase.FORWARD, Phase.BACKWARD]


# -- cost of verification ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("fake_world")
def test_verifying_takes_less_than_a_hundredth_of_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification takes less than a hundredth of the fastest compilation, without Inductor."""
    spent = {"compiling": 0.0, "noting the contract": 0.0, "verifying": 0.0}

    def timed(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[what] += time.process_time() - begun

        return call

    monkeypatch.setattr(pipeline, "note_contract", timed("noting the contract", pipeline.note_contract))
    monkeypatch.setattr(pipeline.verify, "verify", timed("verifying", pipeline.verify.verify))
    model = fully_shard_model(Llama(LlamaConfig(width=64, hidden=96, layers=4)), fsdp_unit_modules=[LlamaBlock])
    compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager", "verify": "once"})
    timed("compiling", lambda: compiled(torch.zeros(1, 16, dtype=torch.long)).sum().backward())()
    print({what: f"{seconds * 1e3:.1f} ms" for what, seconds in spent.items()})
    assert spent["verifying"] > 0
    assert spent["noting the contract"] + spent["verifying"] < 0.01 * spent["compiling"]


# -- the order ---------------------------------------------------------------------------------------------------------


def test_what_ranks_agree_on_tells_orders_apart(graphs: list[Scheduled]) -> None:
    """The text that ranks compare distinguishes orders of the same collectives, which rule V6 leaves to the ranks."""
    found = set()
    same = (
        "regions",
        "float8",
        "saved values",
        "steps in backward",
        "two levels",
        "doubled",
    )  # these have the same collectives as others
    graphs = [scheduled for scheduled in graphs if not any(word in scheduled.name for word in same)]
    for scheduled in graphs:
        s = scheduled.copy()
        lines = collectives(s.graph, s.context)
        found.add((s.phase, *lines))
        assert collectives(scheduled.graph, s.context) == lines
        for a, b in itertools.pairwise(s.gathers):
            a.node.append(b.node) if s.order[b.node] < s.order[a.node] else b.node.append(a.node)
            assert collectives(s.graph, s.context) != lines
            break
    # "keep_last" changes no forward and no inference graph, and sums in float32 change no forward
    assert len(found) == len(graphs) - 3
