"""``mfsdp plan``: models that are never created, on ranks that do not exist."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import cpu_seconds
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.backend.predictions import OPTIMIZERS
from mfsdp_compile.cli import main
from mfsdp_compile.diagnostics.measure import allocated
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.passes.guests.solver import step_events
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.hardware import Link, hardware
from mfsdp_compile.passes.guests.solver.simulate import (
    Stage,
    StartCopy,
    Timeline,
    host_memory,
    resting_memory,
    simulate,
)
from mfsdp_compile.passes.pipeline import CompileRecord
from mfsdp_compile.planning import Candidate, Job, Planned, plan, trace_model, workload
from mfsdp_compile.planning.offloading import EVERY, OffloadedUnits, modules_of
from mfsdp_compile.planning.on_ranks import problem_of
from mfsdp_compile.planning.planner import planned
from mfsdp_compile.planning.published import LEAST_RESERVED, MOST_RESERVED, TOKENS_OFF, TOKENS_OFF_MEDIAN
from mfsdp_compile.planning.sizes import best_size, sizes
from mfsdp_compile.planning.trace_model import Trace, trace
from mfsdp_compile.planning.workloads import Workload, _tokens
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.lanes.lane import Lane
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

pytestmark = pytest.mark.slow
ZERO3 = ShardingStrategy.OPTIM_GRADS_PARAMS
CPU = hardware("cpu")


def llama(layers: int, batch: int = 4, length: int = 64, **options: Any) -> Workload:
    config = LlamaConfig(layers=layers)
    return Workload(
        f"llama of {layers}",
        lambda: Llama(config),
        [Block],
        _tokens(config.vocabulary),
        batch=batch,
        length=length,
        dtype=torch.float32,
        **options,
    )


QUANTIZED = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)


@functools.cache
def traced_llama(layers: int, **options: Any) -> Trace:
    return trace(llama(layers, **options), CPU, fused=True)


@pytest.mark.long
def test_sums_in_two_levels_are_tried_over_several_nodes() -> None:
    """They send less across nodes, and are faster there where messages are large."""
    nodes = replace(CPU, ranks_per_node=2, inter_node=replace(CPU.intra_node, bandwidth=CPU.intra_node.bandwidth / 50))
    precision = MixedPrecisionPolicy(
        grad_comm_dtype=torch.bfloat16, grad_sum_dtype=torch.float32, grad_outer_comm_dtype=torch.int8
    )
    job = Job(llama(10), nodes, precision=precision)
    rows = {str(row.candidate): row for row in plan(job, [4]).rows}
    assert {"ZeRO-3", "ZeRO-3, sums within 2", "HSDP 2 x 2"} <= rows.keys()
    assert not any("HSDP" in name and "within" in name for name in rows)  # inner ranks are on one node

    def exchange(name: str) -> Any:
        return problem_of(job, traced_llama(10), rows[name].candidate).context.buckets[1].exchange

    assert stages(exchange("ZeRO-3").lane) == ["AllToAll", "SumSlices"]
    levels = exchange("ZeRO-3, sums within 2").lane
    assert stages(levels) == [*["EncodeSlices", "AllToAll", "SumSlices"] * 2]
    assert [group.size for group in levels.groups] == [2, 2]
    assert [(stage.format, stage.pieces) for stage in levels.each[::3]] == [("", 2), ("int8", 1)]
    flat, two = (rows[name].timeline for name in ("ZeRO-3", "ZeRO-3, sums within 2"))
    assert flat is not None
    assert two is not None
    assert two.seconds < flat.seconds
    with pytest.raises(ValueError, match="leave grad_sum_within out"):
        Job(llama(10), nodes, precision=replace(precision, grad_sum_within=2))


# -- plans compared with the compiler ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("strategy", [ZERO3, ShardingStrategy.OPTIM, ShardingStrategy.NO_SHARD])
def test_a_plan_is_what_the_compiler_does(strategy: ShardingStrategy) -> None:
    """A plan for ten layers, of which the planner traces four, equals the graphs of all ten."""
    job = Job(llama(10), CPU, solved=False)
    row = planned(job, traced_llama(10), Candidate(strategy, 4))
    assert row.timeline is not None
    real, _ = compiled_llama(job, strategy)
    # Inductor's own passes over joint graphs run after this trace, so a few operators differ.
    assert row.timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)
    assert row.timeline.seconds == pytest.approx(real.seconds, rel=0.03)
    assert row.timeline.flops == pytest.approx(real.flops, rel=0.001)
    assert len(row.timeline.exposures) == len(real.exposures)


@pytest.mark.long
def test_a_plan_with_steps_in_backward_is_what_the_compiler_does() -> None:
    """Gradients of one bucket at a time are in memory, and none when backward ends. The step takes no longer.

    It may be a little shorter: an update in backward hides communication.
    """
    jobs = [Job(llama(10), CPU, solved=False, step_in_backward=steps) for steps in (False, True)]
    before, row = (planned(job, traced_llama(10), Candidate(ZERO3, 4), details=True) for job in jobs)
    assert before.timeline is not None
    assert row.timeline is not None
    real, _ = compiled_llama(jobs[1], step_in_backward=True)
    assert row.timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)
    assert row.timeline.seconds == pytest.approx(real.seconds, rel=0.03)
    assert 0.99 * before.timeline.seconds <= row.timeline.seconds <= before.timeline.seconds * (1 + 1e-6)
    assert before.timeline.memory is not None
    most = max(before.timeline.memory.parts[Category.GRADIENTS])
    for timeline, gone in ((before.timeline, False), (row.timeline, True), (real, True)):
        assert timeline.memory is not None
        gradients = timeline.memory.parts[Category.GRADIENTS]
        assert (gradients[-1] == 0) is gone
        # Without the shards' gradients, those of two buckets before they are reduced are left.
        assert (max(gradients) < 0.6 * most) is gone


def compiled_llama(
    job: Job, strategy: ShardingStrategy = ZERO3, batch: int = 4, length: int = 64, **options: Any
) -> tuple[Timeline, CompileRecord]:
    """Simulate the graphs of ten layers that the compiler makes."""
    from mfsdp_compile.runtime import compat

    with compat.fake_process_group(4):
        model = fully_shard_model(Llama(LlamaConfig(layers=10)), fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
        options |= {"report": True, "hardware": "cpu"}
        call = torch.compile(model, backend="mfsdp", options=options)
        call(*torch.randint(0, 256, (2, batch, length))).backward()
        record = model.sharded.compiled_graphs[-1]
    torch.compiler.reset()
    events = {
        Stage.FORWARD: record.forecast.events[Phase.FORWARD],
        Stage.BACKWARD: record.forecast.events[Phase.BACKWARD],
    }
    resting = resting_memory(record.context.buckets, job.optimizer, record.context.other_bytes)
    return simulate(events, record.context, record.forecast.prediction.costs, resting, job.optimizer), record


@pytest.mark.long
def test_equal_layers_are_traced_four_times_and_count_as_often_as_they_are() -> None:
    whole, short = traced_llama(10), traced_llama(6)
    assert set(whole.order) == {"root:before", *(f"layers.{i}" for i in range(10)), "root:after"}
    per_layer = sum(p.numel() for p in Block(LlamaConfig()).parameters())
    assert whole.parameters - short.parameters == 4 * per_layer
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        long_, few = whole.outlines[phase], short.outlines[phase]
        seconds = [sum(segment.seconds for segment in outline.segments) for outline in (long_, few)]
        layer = [s.seconds for s, unit in zip(long_.segments, long_.units, strict=True) if unit == "layers.4"]
        assert seconds[0] - seconds[1] == pytest.approx(4 * sum(layer))
        assert len(long_.uses) - len(few.uses) == 4
        names = [long_.units.index(f"layers.{i}") for i in range(10)]
        assert names == sorted(names, reverse=phase is Phase.BACKWARD)


class Pattern(nn.Module):
    """Layers of two kinds that look alike: every third one has another setting."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, wide=i % 3 == 2) for i in range(9))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.zeros(*tokens.shape, 32) + tokens[..., None]
        for layer in self.layers:
            x = layer(x)
        return x.mean()


class Layer(nn.Module):
    def __init__(self, index: int, wide: bool) -> None:
        super().__init__()
        self.index, self.wide = index, wide
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + torch.tanh(y.repeat(1, 1, 4).sum(-1, keepdim=True)) if self.wide else x + y


def test_layers_that_differ_in_a_setting_are_not_taken_for_equal() -> None:
    work = Workload("pattern", Pattern, [Layer], _tokens(0), batch=2, length=8, dtype=torch.float32)
    found = trace(work, CPU, fused=True)
    assert len(found.units) == len(found.order) == 9


class Summed(nn.Module):
    """The end of the model needs what every layer saves, as in losses of routers; or the layers behind one are dead."""

    def __init__(self, taken: int | None = None) -> None:
        super().__init__()
        self.taken = taken
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(9))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.zeros(*tokens.shape, 32) + tokens[..., None]
        found = [x := layer(x) for layer in self.layers]
        return found[self.taken].mean() if self.taken is not None else torch.cat(found).exp().mean()


@pytest.mark.long_if("*-9")
@pytest.mark.parametrize(("taken", "traced"), [(8, 4), (7, 5), (None, 9)])
def test_as_many_layers_are_traced_as_are_needed(taken: int | None, traced: int) -> None:
    """Enough layers are traced that the one that stands for others saves and releases what they do."""
    kept = taken if taken is None else taken - 9

    def build() -> nn.Module:
        return Summed(kept)

    work = Workload("summed", build, "auto", _tokens(0), batch=2, length=8, dtype=torch.float32)
    found = trace(work, CPU, fused=False)
    assert (len(found.units), len(found.order)) == (traced, 9)


SAVED_ON_HOST = {"activation_offload": True, "batch": 16, "length": 128}  # values of 2 MiB


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"checkpoint": "none"}, 4),
        ({"checkpoint": "selective"}, 3),
        ({"checkpoint": "full"}, 3),
        ({"checkpoint": "full", **SAVED_ON_HOST}, 4),
        ({**SAVED_ON_HOST}, 4),
        ({**SAVED_ON_HOST, "activation_offload": "auto"}, 4),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_few_layers_say_what_all_do(options: dict[str, Any], layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    short = traced_llama(6, **options)
    monkeypatch.setattr(trace_model, "AROUND", ())
    whole = trace(llama(6, **options), CPU, fused=True)
    assert (len(short.units), len(whole.units)) == (layers + 2, 6 + 2)
    for phase, outline in whole.outlines.items():
        assert short.outlines[phase].segments == pytest.approx(outline.segments)
        assert short.outlines[phase].units == outline.units
        assert {*short.outlines[phase].copies} == {*outline.copies}
        assert bool(outline.copies) == ("activation_offload" in options)
    rows = [planned(Job(llama(6), CPU), traced, Candidate(ZERO3, 4)) for traced in (short, whole)]
    assert rows[0].needed == rows[1].needed
    assert rows[0].timeline.seconds == pytest.approx(rows[1].timeline.seconds)


@pytest.mark.long
def test_a_plan_traces_once_for_all_strategies_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts graphs, layers and simulations instead of seconds, which differ between machines."""
    graphs: list[int] = []
    simulated = 0

    def outlined(*args: Any) -> Any:
        graphs.append(sum(isinstance(module, Block) for module in args[0].modules()))
        return outlines(*args)

    def counted(*args: Any, **kwargs: Any) -> Timeline:
        nonlocal simulated
        simulated += 1
        return simulate(*args, **kwargs)

    outlines = trace_model._outlines
    monkeypatch.setattr(trace_model, "_outlines", outlined)
    monkeypatch.setattr(step_events, "simulate", counted)
    forecast = plan(Job(workload("llama3-70b", checkpoint="full"), hardware("h100-ib")), [8, 512, 65_536])
    assert graphs == [3]
    assert (len(forecast.rows), len(forecast.trace_of(forecast.rows[0]).order)) == (3 + 7 + 13, 82)
    assert simulated < 30 * len(forecast.rows)


@pytest.mark.long
def test_checkpointing_trades_memory_for_time() -> None:
    job = {how: Job(llama(10, checkpoint=how), CPU, solved=False) for how in ("none", "selective", "full")}
    rows = {how: planned(j, traced_llama(10, checkpoint=how), Candidate(ZERO3, 4)) for how, j in job.items()}
    peaks = [rows[how].needed for how in ("none", "selective", "full")]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.3 * peaks[1] > 1.3 * peaks[2] or peaks[2] < peaks[0] / 1.5
    times = [rows[how].timeline.compute_seconds for how in ("none", "selective", "full")]
    assert times == sorted(times)


@pytest.mark.long
def test_memory_falls_with_ranks_in_closed_form() -> None:
    work = llama(10)
    traced, job = traced_llama(10), Job(work, CPU)
    begun = time.process_time()
    needed = [planned(job, traced, Candidate(ZERO3, world)).needed for world in (2, 8, 32, 65_536)]
    assert time.process_time() - begun < 10
    assert needed[:3] == sorted(needed[:3], reverse=True)  # with more ranks than rows, padding exceeds the savings
    infos = problem_of(job, traced, Candidate(ZERO3, 65_536)).context.buckets
    assert all(info.layout.world_size == 65_536 for info in infos)


def stages(lane: Lane) -> list[str]:
    """Return the kinds of the stages that reduce, without casts and scaling."""
    return [type(stage).__name__ for stage in (*lane.each, *lane.due) if not stage.inlined]


@pytest.mark.long
def test_hsdp_reduces_twice_and_its_outer_ring_spans_nodes() -> None:
    traced, job = traced_llama(10), Job(llama(10), hardware("h100-ib"))
    hsdp = problem_of(job, traced, Candidate(ZERO3, 8, 4)).context.buckets[1]
    assert stages(hsdp.exchange.lane) == ["ReduceScatter", "AllReduce"]
    assert (hsdp.gather_stride, [group.stride for group in hsdp.exchange.lane.groups]) == (1, [1, 8])
    hfsdp = problem_of(job, traced, Candidate(ZERO3, 8, 4, True)).context.buckets[1]
    assert stages(hfsdp.exchange.lane) == ["ReduceScatter", "ReduceScatter"]
    assert [group.size for group in hfsdp.resident_groups] == [4]
    assert hfsdp.layout.shard_numel < hsdp.layout.shard_numel


@pytest.mark.long
def test_the_best_is_the_fastest_that_fits() -> None:
    job = Job(llama(8), hardware("h100-ib"), budget=1 << 30)
    forecast = plan(job, [8, 16])
    fitting = [row for row in forecast.rows if row.timeline is not None]
    assert forecast.best in fitting
    assert forecast.best.timeline.seconds <= 1.006 * min(row.timeline.seconds for row in fitting)
    assert forecast.smallest_world == 1


def _on_memory(**given: Any) -> tuple[int, Callable[[float], Job]]:
    """Return the bytes of the schedule that takes least, and a job on a device that has just so many times as many."""
    least = _least(OffloadedUnits()).needed
    return least, lambda times: Job(llama(10), replace(CPU, memory_bytes=int(times * least)), **given)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        (1.01 / (1 - MOST_RESERVED), "fits"),
        (0.99 / (1 - MOST_RESERVED), "may not fit"),
        (1.01 / (1 - LEAST_RESERVED), "may not fit"),
        (0.99 / (1 - LEAST_RESERVED), "does not fit"),
    ],
)
def test_verdicts_follow_what_published_runs_had_reserved(times: float, verdict: str) -> None:
    least, job_of = _on_memory()
    job = job_of(times)
    row = planned(job, traced_llama(10), Candidate(ZERO3, 4))
    assert row.verdict == verdict
    assert row.fits is (verdict == "fits")
    assert (row.timeline is None) is (verdict == "does not fit")
    reserve = MOST_RESERVED if row.fits else LEAST_RESERVED
    if row.timeline is None:
        assert f"{1 - LEAST_RESERVED:.0%} of what cpu has" in row.refusal
    else:
        assert least <= row.needed <= (1 - reserve) * job.hardware.memory_bytes
    # A budget is what tensors may take: a prediction within it keeps it.
    budget = int(times * least)
    given = planned(replace(job, budget=budget), traced_llama(10), Candidate(ZERO3, 4))
    assert given.verdict == ("fits" if (1 - SchedulePolicy().budget_reserve) * budget >= least else "does not fit")


def test_what_fits_is_better_than_what_is_faster_and_may_not_fit() -> None:
    _, job_of = _on_memory()
    job = job_of(0.99 / (1 - MOST_RESERVED))
    with mock.patch("mfsdp_compile.planning.planner.traced_stages", return_value=[traced_llama(10)]):
        forecast = plan(job, [4, 64], [Candidate(ZERO3, 4), Candidate(ZERO3, 64)])
        alone = plan(job, [4], [Candidate(ZERO3, 4)])
    assert [row.verdict for row in forecast.rows] == ["may not fit", "fits"]
    fast, safe = (row.timeline for row in forecast.rows)
    assert fast is not None
    assert safe is not None
    assert fast.seconds < safe.seconds
    assert forecast.best is forecast.rows[1]
    assert forecast.smallest_world == 8
    assert forecast.job_of(forecast.rows[0]).usable > forecast.job_of(forecast.rows[1]).usable == job.usable
    assert alone.best is alone.rows[0]


def test_units_are_offloaded_before_a_plan_may_not_fit() -> None:
    _, job_of = _on_memory(offload="auto")
    row = planned(job_of(0.99 / (1 - MOST_RESERVED)), traced_llama(10), Candidate(ZERO3, 4))
    assert row.fits
    assert row.offload != OffloadedUnits()


def test_reserves_and_errors_are_those_of_published_runs() -> None:
    """The numbers of a plan's assumptions are those of the benchmark's results, and of the page that shows them."""
    root = Path(__file__).resolve().parents[2]
    results = (root / "benchmarks" / "results" / "published.txt").read_text(encoding="utf-8")
    rows = re.findall(
        r"[-+][\d.]+% +[\d,]+ +[\d.]+ +[\d.]+ +(-[\d.]+)%", results
    )  # error, serial, GiB, predicted, error
    page = (root / "docs" / "foresight.md").read_text(encoding="utf-8")
    assert rows == re.findall(r"\| (-[\d.]+)% \|$", page, re.MULTILINE)
    reserved = [-float(row) / 100 for row in rows]
    assert len(reserved) == 9
    assert (min(reserved), max(reserved)) == pytest.approx((LEAST_RESERVED, MOST_RESERVED))
    held_out = re.search(r"held out: .* values ([\d.]+)%, from (\S+)% to (\S+)%", results)
    assert held_out is not None
    assert [float(text) / 100 for text in held_out.groups()] == pytest.approx([TOKENS_OFF_MEDIAN, *TOKENS_OFF])


def test_a_real_process_group_is_left_alone(fake_world: int) -> None:
    with pytest.raises(RuntimeError, match="plan in a process of its own"):
        trace(llama(2), CPU, fused=True)
    assert dist.get_world_size() == fake_world


# -- joined and split units -------------------------------------------------------------------------------------------


@functools.cache
def by_parameter(layers: int, fused: bool = True) -> Trace:
    return trace(llama(layers), CPU, fused=fused, parts=True)


@pytest.mark.long
def test_a_plan_of_joined_units_is_what_the_compiler_does() -> None:
    traced = by_parameter(8, fused=False)
    least = 4 * traced.neighbors[0]["layers.0"]
    job = Job(llama(8), CPU, fused=False, solved=False, unit_bytes=least)
    row = planned(job, traced, Candidate(ZERO3, 4))
    assert row.timeline is not None

    from mfsdp_compile.runtime import compat

    with compat.fake_process_group(4):
        model = fully_shard_model(Llama(LlamaConfig(layers=8)), fsdp_unit_modules=[Block], unit_bytes=least)
        options = {"inner": "aot_eager", "report": True, "hardware": "cpu"}
        torch.compile(model, backend="mfsdp", options=options)(*torch.randint(0, 256, (2, 4, 64))).backward()
        record = model.sharded.compiled_graphs[-1]
    torch.compiler.reset()
    assert [info.name for info in row.context.buckets] == ["root:before", "layers.0-3", "layers.4-7", "root:after"]
    for mine, its in zip(row.context.buckets, record.context.buckets, strict=True):
        assert (mine.name, mine.gathered_bytes) == (its.name, its.gathered_bytes)
    events = {
        Stage.FORWARD: record.forecast.events[Phase.FORWARD],
        Stage.BACKWARD: record.forecast.events[Phase.BACKWARD],
    }
    resting = resting_memory(record.context.buckets, job.optimizer, record.context.other_bytes)
    real = simulate(events, record.context, CostModel(CPU, fused=False), resting, job.optimizer)
    assert [(e.what, e.name) for e in row.timeline.exposures] == [(e.what, e.name) for e in real.exposures]
    # A few operators differ: graphs are traced for other ranks, and the plan has no decompositions of Inductor.
    assert row.timeline.seconds == pytest.approx(real.seconds, rel=0.03)
    assert row.timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)


@pytest.mark.long
def test_a_plan_with_param_dtype() -> None:
    """A float32 model with ``param_dtype`` is planned as it is sharded: as the bfloat16 model, but for buffers."""
    rows, found = [], []
    for dtypes in ({"dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16}):
        work = replace(llama(3), **dtypes)
        traced = trace(work, CPU, fused=False)
        row = planned(Job(work, CPU, fused=False, solved=False), traced, Candidate(ZERO3, 4))
        assert row.timeline is not None
        rows.append((row.context.buckets, [(e.what, e.name) for e in row.timeline.exposures], traced.neighbors))
        found.append(row.timeline)
    assert rows[0] == rows[1]
    # Rotary tables are float32 in one and bfloat16 in the other.
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=0.02)
    assert found[0].peak_bytes == pytest.approx(found[1].peak_bytes, rel=0.02)

    from mfsdp_compile.runtime import compat

    with compat.fake_process_group(4):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = fully_shard_model(
            Llama(LlamaConfig(layers=3)), fsdp_unit_modules=[Block], mixed_precision_policy=policy
        )
        made = [(b.plan.name, b.plan.gathered_bytes, b.plan.shard_bytes) for b in model.sharded.buckets]
    sizes_of = [(i.name, i.gathered_bytes, i.layout.shard_numel * i.main_dtype.itemsize) for i in rows[1][0]]
    assert sizes_of == made


@pytest.mark.long
@pytest.mark.parametrize(
    ("planned_with", "sharded_with", "at_least"),
    [
        ({"by_module": True}, {"enable_fine_grained_param_gather": True}, 8 * 7),
        ({"by_parameter": True}, {"disable_bucketing": True}, 8 * 7),
        ({"precision": QUANTIZED}, {"mixed_precision_policy": QUANTIZED}, 8 * 2),
    ],
)
def test_a_plan_of_divided_units_is_what_the_compiler_does(
    planned_with: dict[str, Any], sharded_with: dict[str, Any], at_least: int
) -> None:
    job = Job(llama(8), CPU, fused=False, solved=False, **planned_with)
    row = planned(job, by_parameter(8, fused=False), Candidate(ZERO3, 4))
    assert row.timeline is not None

    from mfsdp_compile.runtime import compat

    with compat.fake_process_group(4):
        model = fully_shard_model(Llama(LlamaConfig(layers=8)), fsdp_unit_modules=[Block], **sharded_with)
        options = {"inner": "aot_eager", "report": True, "hardware": "cpu", "regions": False}
        torch.compile(model, backend="mfsdp", options=options)(*torch.randint(0, 256, (2, 4, 64))).backward()
        record = model.sharded.compiled_graphs[-1]
    torch.compiler.reset()
    mine, its = (
        {b.name: (b.unit, b.gathered_bytes, b.sent_bytes) for b in made.context.buckets} for made in (row, record)
    )
    assert mine == its
    assert len(mine) > at_least
    events = {
        Stage.FORWARD: record.forecast.events[Phase.FORWARD],
        Stage.BACKWARD: record.forecast.events[Phase.BACKWARD],
    }
    resting = resting_memory(record.context.buckets, job.optimizer, record.context.other_bytes)
    real = simulate(events, record.context, CostModel(CPU, fused=False), resting, job.optimizer)
    # As above.
    assert row.timeline.seconds == pytest.approx(real.seconds, rel=0.03)
    assert row.timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "sharded_with"),
    [
        (BufferPolicy(True), {"fsdp_double_buffer": True}),
        (BufferPolicy(True, largest=True), {"maxpool_double_buffer": True}),
        (BufferPolicy(True, singles=True), {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True}),
    ],
    ids=["double", "maxpool", "singles"],
)
def test_a_plan_with_communication_buffers_is_what_the_compiler_does(
    policy: BufferPolicy, sharded_with: dict[str, bool]
) -> None:
    traced = by_parameter(8, fused=False)
    plain = planned(Job(llama(8), CPU, fused=False, solved=False), traced, Candidate(ZERO3, 4))
    job = Job(llama(8), CPU, fused=False, solved=False, buffers=policy)
    row = planned(job, traced, Candidate(ZERO3, 4))
    assert row.timeline is not None

    from mfsdp_compile.runtime import compat

    with compat.fake_process_group(4):
        model = fully_shard_model(Llama(LlamaConfig(layers=8)), fsdp_unit_modules=[Block], **sharded_with)
        options = {"inner": "aot_eager", "report": True, "hardware": "cpu", "regions": False}
        call = torch.compile(model, backend="mfsdp", options=options)

        def step() -> None:
            call(*torch.randint(0, 256, (2, 4, 64))).backward()
            model.zero_grad()

        for _ in range(2):
            step()
        record = model.sharded.compiled_graphs[-1]
        held = model.sharded.comm_buffer_bytes()
        measured = allocated(step)[0] + model.sharded.comm_buffers.nbytes - held
        assert model.sharded.comm_buffers.fresh == 0
    torch.compiler.reset()
    assert [b.exchange.buffers for b in row.context.buckets] == [b.exchange.buffers for b in record.context.buckets]
    assert row.context.other_bytes - plain.context.other_bytes == held > 0
    assert row.context.other_bytes == pytest.approx(record.context.other_bytes, rel=1e-3)
    events = {
        Stage.FORWARD: record.forecast.events[Phase.FORWARD],
        Stage.BACKWARD: record.forecast.events[Phase.BACKWARD],
    }
    resting = resting_memory(record.context.buckets, job.optimizer, record.context.other_bytes)
    real = simulate(events, record.context, CostModel(CPU, fused=False), resting, job.optimizer)
    assert row.timeline.seconds == pytest.approx(real.seconds, rel=0.03)
    assert row.timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)
    assert row.timeline.peak_bytes == pytest.approx(measured + sum(resting.values()), rel=0.05)


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ([], BufferPolicy()),
        (["--double-buffer"], BufferPolicy(True)),
        (["--maxpool-double-buffer"], BufferPolicy(True, largest=True)),
    ],
)
def test_command_knows_communication_buffers(flags: list[str], policy: BufferPolicy) -> None:
    reached = mock.patch("mfsdp_compile.planning.commands.plan", side_effect=InterruptedError)
    with reached as planner, pytest.raises(InterruptedError):
        main(["plan", "--model", "demo", *flags])
    assert planner.call_args.args[0].buffers == policy


def test_command_takes_one_kind_of_communication_buffers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--model", "demo", "--double-buffer", "--maxpool-double-buffer"])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fine-grained", "8 units"),
        ("--no-bucketing", "8 units"),
        ("--gather-fp8 rowwise", "gathered in float8 (rowwise)"),
        ("--grad-comm float32", "gradients sent in torch.float32"),
        ("--grad-sum float32", "gradients summed in torch.float32"),
        ("--gather-fp8 tensorwise", "gathered in float8 (tensorwise)"),
        ("--gather-fp8 blockwise", "gathered in float8 (blockwise)"),
        ("--gather-fp8 mxfp8", "gathered in float8 (mxfp8)"),
        ("--gather-fp4", "gathered in float4 (nvfp4)"),
        ("--dtype float32 --param-dtype bfloat16", "in torch.bfloat16, built in torch.float32,"),
    ],
)
def test_command_divides_units(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "demo", "--world", "8", *flags.split()]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_command_refuses_to_divide_and_join(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--fine-grained", "--unit", "1MiB"], ["--no-bucketing", "--bucket", "1MiB"]):
        assert main(["plan", "--model", "demo", "--world", "8", *wrong]) == 2
    assert "divides units, and --unit joins them" in capsys.readouterr().err


@pytest.mark.long
def test_parts_of_a_unit_are_awaited_where_they_are_used() -> None:
    """Each bucket of a unit is awaited where it is used, in traced layers and in those that they stand for."""
    traced = by_parameter(8)
    forward = problem_of(Job(llama(8), CPU, bucket_bytes=1), traced, Candidate(ZERO3, 4)).outlines[Phase.FORWARD]
    units = {}
    for use in forward.uses:
        units.setdefault(forward.units[use.first], []).extend(wait - use.first for wait in use.waits)
    layers = [units[f"layers.{i}"] for i in range(1, 7)]
    assert len(set(layers[0])) > 3
    assert all(waits == layers[0] for waits in layers)


@pytest.mark.long
@pytest.mark.parametrize("bucket_bytes", [None, 1, 400_000])
@pytest.mark.parametrize("unit_bytes", [None, 1 << 30])
def test_memory_returns_to_rest(bucket_bytes: int | None, unit_bytes: int | None) -> None:
    """Gradients that are copied into buckets are freed once each, however the buckets divide what was traced.

    Eagerly all gradients are copied, with fused kernels some.
    """
    for fused in (True, False):
        traced = by_parameter(8, fused)
        job = Job(llama(8), CPU, fused=fused, solved=False, bucket_bytes=bucket_bytes, unit_bytes=unit_bytes)
        row = planned(job, traced, Candidate(ZERO3, 4), details=True)
        copied = sum(g.elsewhere for g in traced.outlines[Phase.BACKWARD].gradients)
        problem = problem_of(job, traced, Candidate(ZERO3, 4))
        assert copied > 0 or fused
        assert sum(g.elsewhere for g in problem.outlines[Phase.BACKWARD].gradients) == copied
        assert row.timeline is not None
        assert row.timeline.memory is not None
        temporary = row.timeline.memory.parts[Category.TEMPORARY]
        assert temporary[-1] - temporary[0] == 4  # the loss


@pytest.mark.long
def test_joining_pays_where_messages_are_small() -> None:
    """Units are joined on a network with high latency, up to the knee, and not where messages are large enough."""
    traced, candidate = by_parameter(8), Candidate(ZERO3, 8)
    slow = replace(hardware("h100-ib"), inter_node=Link(50e9, 5e-3), intra_node=Link(450e9, 5e-3))
    rows = sizes(Job(llama(8), slow), traced, candidate)
    joined = [row for row in rows if row.unit_bytes is not None]
    assert [len(row.planned.context.buckets) for row in joined] == [6, 4, 3]
    best = best_size(rows)
    assert best is joined[-1]
    seconds = [row.planned.timeline.seconds for row in (best, rows[0])]
    assert seconds[0] < 0.6 * seconds[1]  # 3 instead of 10 messages each way save most of the latency
    assert not any(row.bucket_bytes for row in rows)  # all below the knee

    fast = replace(slow, inter_node=Link(1e6, 0.0), intra_node=Link(1e6, 0.0), collective_seconds=0.0)
    rows = sizes(Job(llama(8), fast), traced, candidate)
    assert not any(row.unit_bytes for row in rows)
    assert any(row.bucket_bytes for row in rows)


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_command_writes_report_and_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, schedule = tmp_path / "out" / "plan.html", tmp_path / "plan.sched"
    arguments = ["plan", "--model", "demo", "--world", "8,64", "--html", str(html), "--schedule", str(schedule)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "all figures are simulated" in " ".join(shown.split())
    assert "best" in shown
    assert "Smallest number of ranks that fits, by powers of two: 1" in shown
    assert {path.suffix for path in html.parent.iterdir()} == {".html", ".txt", ".json"}
    assert "Every number is simulated" in html.with_suffix(".txt").read_text()
    assert set(ScheduleText.load(schedule).lines) == {Phase.FORWARD, Phase.BACKWARD}


@pytest.mark.long
def test_command_reshards_over_fewer_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "demo", "--world", "8", "--reshard", "4"]) == 0
    rows = [line for line in capsys.readouterr().out.split("\n") if "ZeRO" in line]
    assert [" + 6/4 " in row for row in rows] == [False, False, True]  # the others gather nothing again


@pytest.mark.long
def test_portions_pay_where_nodes_are_slow_to_reach() -> None:
    """On slow networks between nodes, keeping an eighth of the gathered parameters saves time.

    Backwards then gather in the node.
    """
    job = Job(workload("llama3-8b", length=1024, checkpoint="full"), hardware("h100-eth"))
    traced = trace(job.work, job.hardware, fused=True)
    again, portions = (planned(replace(job, reshard=n), traced, Candidate(ZERO3, 64)) for n in (True, 8))
    assert again.timeline is not None
    assert portions.timeline is not None
    assert portions.decisions is not None
    assert portions.portion_size == 8
    assert portions.timeline.seconds < 0.9 * again.timeline.seconds
    problem = problem_of(replace(job, reshard=8), traced, Candidate(ZERO3, 64))
    assert ScheduleText.of(problem.lines(portions.decisions)).portions == 8
    held = sum(portions.context.buckets[bucket].portion_bytes for bucket in portions.decisions.portions or ())
    assert again.needed <= portions.needed <= again.needed + held  # most of it is where gradients are later


@pytest.mark.long
def test_command_tries_sizes_of_units_and_buckets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "demo", "--world", "64", "--bucket", "auto"]) == 0
    shown = capsys.readouterr().out
    table = shown[shown.index("unit_bytes") :].split("\n")
    assert sum("best" in line for line in table) == 1
    assert "without joining, 8 of 8 buckets are smaller" in " ".join(shown.split())
    assert main(["plan", "--model", "demo", "--world", "64", "--unit", "1GiB"]) == 0


@pytest.mark.long
def test_command_tells_when_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "demo", "--world", "8", "--budget", "1MiB"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits" in shown
    assert "cannot be kept: the smallest schedule" in shown


def test_command_states_its_assumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With twice the memory of the smallest schedule it fits; with a little more than that it may not fit."""
    arguments = ["plan", "--model", "demo", "--world", "8"]
    job = Job(workload("demo"), hardware("h100-ib"), prefetch=0, reshard=True)
    traced = trace(job.work, job.hardware, fused=True)
    least = planned(job, traced, Candidate(ZERO3, 8)).needed
    monkeypatch.setattr("mfsdp_compile.planning.planner.traced_stages", lambda *_, **__: [traced])
    shown = {}
    for times in (2.0, 1.1):
        machine = replace(hardware("h100-ib"), memory_bytes=int(times * least))
        (tmp_path / "small.json").write_text(machine.to_json())
        html = tmp_path / f"{times}.html"
        assert main([*arguments, "--hardware", str(tmp_path / "small.json"), "--html", str(html)]) == 0
        shown[times] = " ".join(capsys.readouterr().out.split())
        for stated in (
            "compiled with Inductor",
            "power limit: 700 W per device; products at 74% of their rate",
            "predictions were 4.0% to 33.6% below what torch's allocator had reserved in published runs; of",
            "a plan fits up to",
            "error of tok/s: 13.7% too low to 26.3% too high",
        ):
            assert stated in shown[times].partition("ranks sharding")[0]
            assert stated in " ".join(html.with_suffix(".txt").read_text().split())
    assert "best, may not fit" in shown[1.1]
    assert "No plan is sure to fit" in shown[1.1]
    assert "best" in shown[2.0]
    assert "No plan is sure to fit" not in shown[2.0]
    assert main([*arguments, "--budget", "1GiB"]) == 0
    assert "they are not part of the 0.99 GiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "elephant"], "unknown model 'elephant'. Known: demo"),
        (["--model", "llama-8b"], "unknown model 'llama-8b'. Did you mean 'llama3-8b'?"),
        (["--model", "hf:nowhere"], "nowhere: neither a file nor a folder"),
        (["--model", "meta-llama/Llama3-8B"], "Get it once with `hf download meta-llama/Llama3-8B config.json`"),
        (["--model", "nowhere:model"], "nowhere:model cannot be imported"),
        (["--model", "demo", "--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--model", "demo", "--world", "many"], "--world takes numbers of ranks"),
        (["--model", "demo", "--world", "0"], "--world takes numbers of at least 1"),
        (["--model", "demo", "--budget", "lots"], "--budget takes bytes"),
        (["--model", "demo", "--budget", "80"], "--budget needs a unit: is 80GiB meant, 80MiB, or 80B?"),
        (["--model", "demo", "--batch", "0"], "batch and length must be at least 1"),
        (["--model", "demo", "--reshard", "1"], "--reshard takes true, false, auto or a number of at least 2 ranks"),
        (["--model", "demo", "--unit", "lots"], "--unit takes bytes"),
        (["--model", "demo", "--unit", "1MiB", "--bucket", "auto"], "--bucket auto also tries unit sizes"),
    ],
)
def test_command_explains_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_code_of_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked, either: input() would wait for an answer."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    for kind in ("vit", "llama", "theirs"):
        config = {"model_type": kind, "architectures": ["TheirModel"], "auto_map": code}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            ValueError, match=r"code that comes with it \(theirs\.Config, theirs\.Model\), which is never run"
        ):
            workload(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llamma"}))
    with pytest.raises(ValueError, match=r"has no model of the type 'llamma'\. Did you mean 'llama'\?"):
        workload(str(tmp_path))
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "auto_map": code, **sizes}
    kernels = {"attn_implementation": "kernels-community/theirs", "_attn_implementation": "kernels-community/theirs"}
    (tmp_path / "config.json").write_text(json.dumps(config | kernels))
    assert type(workload(str(tmp_path)).build()).__module__.startswith("transformers.models.llama")
    assert not (tmp_path / "ran").exists()


def test_a_name_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    stored = tmp_path / "models--a-llama--Tiny"
    for folder in ("refs", "blobs", "snapshots/0a"):
        (stored / folder).mkdir(parents=True)
    (stored / "refs" / "main").write_text("0a")
    (stored / "blobs" / "1b").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 32}))
    (stored / "snapshots" / "0a" / "config.json").symlink_to("../../blobs/1b")
    for name in ("a-llama/Tiny", "hf:a-llama/Tiny", str(stored / "snapshots" / "0a")):
        assert workload(name).length == 32
    with pytest.raises(ValueError, match=r"hf download a-llama/Other config\.json"):
        workload("a-llama/Other")


# -- host memory ------------------------------------------------------------------------------------------------------


def _least(offload: OffloadedUnits | str) -> Planned:
    """Plan the schedule that takes least memory."""
    job = Job(llama(10), CPU, prefetch=0, reshard=True, offload=offload)  # type: ignore[arg-type]
    return planned(job, traced_llama(10), Candidate(ZERO3, 4))


def test_offload_takes_shards_gradients_and_state_from_the_device() -> None:
    """With float32, a rank holds 8 bytes of Adam's state per element, and 4 of its shard and of its gradient each."""
    nothing, optimizer, everything = map(
        _least, (OffloadedUnits(), OffloadedUnits(optimizer=EVERY), OffloadedUnits(whole=EVERY))
    )
    adamw, elements = OPTIMIZERS["adamw"], sum(i.layout.shard_numel for i in nothing.context.buckets)
    rows = (nothing, optimizer, everything)
    at_rest = [sum(resting_memory(row.context.buckets, adamw).values()) for row in rows]
    assert at_rest == [12 * elements, 4 * elements, 0]
    assert not host_memory(nothing.context.buckets, adamw)
    for row in (optimizer, everything):
        assert sum(host_memory(row.context.buckets, adamw).values()) == 16 * elements
    # The peak is at the beginning of backward, where there are no reduced gradients yet.
    assert optimizer.needed == nothing.needed - 8 * elements
    assert everything.needed < optimizer.needed


@pytest.mark.long
def test_a_plan_with_activation_offload_is_what_the_compiler_does() -> None:
    """Saved values are on the device for as long as in the graphs, and as many of them are in host memory."""
    job = Job(llama(10, **SAVED_ON_HOST), CPU, solved=False)
    traced = traced_llama(10, **SAVED_ON_HOST)
    row = planned(job, traced, Candidate(ZERO3, 4))
    real, record = compiled_llama(job, **SAVED_ON_HOST, regions=False)
    copies = [event.copy for event in record.forecast.events[Phase.FORWARD] if isinstance(event, StartCopy)]
    assert traced.outlines[Phase.FORWARD].host_bytes == sum(copy.bytes for copy in copies) > 0
    assert row.timeline is not None
    assert row.timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.03)
    assert row.timeline.seconds == pytest.approx(real.seconds, rel=0.03)
    on_device = replace(job, work=replace(job.work, activation_offload=False))
    stays = planned(on_device, trace(on_device.work, CPU, fused=True), Candidate(ZERO3, 4))
    assert row.needed < 0.7 * stays.needed


@pytest.mark.long
def test_copies_of_saved_values_take_time() -> None:
    """The link carries what is copied, in each direction, however slow it is."""
    slow = replace(CPU, host_link=Link(1e7, 0.0))
    work = llama(6, **SAVED_ON_HOST)
    traced = trace(work, slow, fused=True)
    for job in (Job(work, slow, solved=False), Job(work, slow)):
        row = planned(job, traced, Candidate(ZERO3, 4))
        assert row.timeline is not None
        assert row.timeline.seconds > 2 * traced.outlines[Phase.FORWARD].host_bytes / 1e7


@pytest.mark.long
def test_command_says_what_is_saved_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "demo", "--batch", "8", "--world", "2", "--hardware", "cpu", "--dtype", "float32"]
    assert main([*arguments, "--activation-offload", "all", "--details"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    found = re.search(r"(\S+ MiB) of values saved for backward are in host memory from forward to backward", shown)
    assert found is not None
    assert f"{found[1]} per rank: saved for backward {found[1]} (predicted)" in shown


def test_auto_offloads_as_many_units_as_it_takes() -> None:
    """With a little less memory than a plan needs, the first units are offloaded; none where it fits."""
    needed = _least(OffloadedUnits()).needed
    slow = replace(CPU, host_link=Link(1e9, 1e-5), host_memory_bandwidth=1e9)  # so that no more units are offloaded
    job = Job(llama(10), slow, offload="auto", budget=2 * needed)
    assert planned(job, traced_llama(10), Candidate(ZERO3, 4)).offload == OffloadedUnits()
    job = replace(job, budget=int(0.9 * needed))
    row = planned(job, traced_llama(10), Candidate(ZERO3, 4))
    units = len(modules_of(row.context.buckets))
    assert row.fits
    assert row.offload.whole == 0
    assert 0 < row.offload.optimizer < units
    offloaded = {info.unit.partition(":")[0] for info in row.context.buckets if info.rests_in_host_memory}
    assert offloaded == set(modules_of(row.context.buckets)[: row.offload.optimizer])
    fewer = replace(job, offload=OffloadedUnits(optimizer=row.offload.optimizer - 1))
    assert not planned(fewer, traced_llama(10), Candidate(ZERO3, 4)).fits
    # Shards too, where the optimizer's state is not enough.
    job = replace(job, budget=int(1.02 * _least(OffloadedUnits(whole=EVERY)).needed))
    row = planned(job, traced_llama(10), Candidate(ZERO3, 4))
    assert row.fits
    assert row.offload.whole > 0
    # Gathered parameters stay on the device where they are residents.
    row = planned(job, traced_llama(10), Candidate(ShardingStrategy.OPTIM, 4))
    assert row.offload.whole == 0


@pytest.mark.long
def test_command_says_what_to_offload(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "demo", "--world", "2", "--hardware", "cpu", "--dtype", "float32"]
    assert main([*arguments, "--offload", "optimizer"]) == 0
    assert "offload_policy=OptimizerOffloadPolicy()" in capsys.readouterr().out
    assert main([*arguments, "--offload", "all"]) == 0
    shown = capsys.readouterr().out
    assert "offload_policy=CPUOffloadPolicy()" in shown
    assert "ZeRO-1" not in shown  # its gathered parameters stay on the device
    assert main([*arguments, "--offload", "all", "--gather-fp8", "rowwise"]) == 2
    assert "cannot be gathered in float8 or float4" in capsys.readouterr().err


def make_model() -> nn.Module:
    return Llama(LlamaConfig(layers=2))


@pytest.mark.long
def test_a_factory_of_ones_own() -> None:
    work = workload(f"{__name__}:make_model", batch=2, length=32, dtype=torch.float32)
    found = trace(work, CPU, fused=True)
    assert found.parameters == sum(p.numel() for p in make_model().parameters())
    assert found.tokens == 64


@pytest.mark.long
def test_a_hugging_face_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    found = trace(workload(f"hf:{tmp_path}", length=32), CPU, fused=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert len(found.order) == 9


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama3-70b", "llama3-405b"])
def test_large_models_are_planned_in_seconds(model: str) -> None:
    """Large models are planned in seconds.

    The project asks for 10 s on two idle cores, and docs/foresight.md has the measurement. This test counts CPU
    seconds, of which a busy machine takes up to twice as many.
    """
    command = [sys.executable, "-m", "mfsdp_compile.cli", "plan", "--model", model, "--world", "65536"]
    begun = cpu_seconds()
    done = subprocess.run([*command, "--checkpoint", "full"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "best" in done.stdout
    assert cpu_seconds() - begun < 40


def test_optimizers_cost_what_they_keep() -> None:
    work, traced = llama(10), traced_llama(10)
    states = {}
    for name in ("sgd", "sgd-momentum", "adamw"):
        job = Job(work, CPU, optimizer=OPTIMIZERS[name], solved=False)
        states[name] = planned(job, traced, Candidate(ZERO3, 1)).needed
    shard = sum(i.layout.shard_numel for i in problem_of(Job(work, CPU), traced, Candidate(ZERO3, 1)).context.buckets)
    assert states["sgd-momentum"] - states["sgd"] == 4 * shard
    assert states["adamw"] - states["sgd"] == 8 * shard
