"""``reshard_after_forward`` as a number: ranks keep portions of gathered buckets, and backward gathers over fewer.

Numbers are compared bit for bit with those of gathering over all ranks again: the same bits are gathered, whoever sends
them. The reference is eager; ``test_parity.py`` checks that compiled code computes the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import PATIENCE, Failing, short_mesh, values
from parity import AOT_EAGER, EAGER, INDUCTOR, MODELS, raises_everywhere
from pool import on_ranks
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.passes import roles
from mfsdp_compile.passes.roles import PORTION
from mfsdp_compile.planning import forecast
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks import profiling
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase

HYBRIDS = ["HSDP", "HFSDP"]


def portions_of(model: Any) -> list[str]:
    """Return the names of the buckets of which ranks keep portions, once per graph."""
    return [
        record.context.buckets[number].name
        for record in model.sharded.compiled_graphs
        for number in record.decisions.portions or ()
    ]


# -- numbers ----------------------------------------------------------------------------------------------------------

NAMES = ("Tied", "FrozenUnit", "Checkpointed", "CalledTwice", "GraphBreaks", "Autocast", "Uneven", "FrozenParameters")
NAMES += ("CheckpointedReentrant", "DisabledChild", "MixedTypes", "Dropout")


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@on_ranks(4)
def test_numbers_stay_to_the_bit(name: str) -> None:
    """Losses, gradients and parameters of three steps of AdamW are equal bit for bit."""
    data = parity.batches(steps=3)
    over_all = parity.train_sharded(MODELS[name], EAGER, data)  # which gathers over all ranks
    over_two = parity.train_sharded(MODELS[name], AOT_EAGER, data, reshard_after_forward=2)
    assert portions_of(over_two.model)
    parity.assert_bitwise(over_all, over_two)


def hybrid(strategy: str, outer: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=("outer", "inner"))
    return {
        "outer_dp_sharding_strategy": int(strategy == "HFSDP"),
        "device_mesh": mesh,
        "dp_shard_dim": "inner",
        "dp_outer_dim": "outer",
        "hybrid_fsdp_group": mesh["outer", "inner"]._flatten().get_group(),
    }


def trained(again: bool | int, steps: int = 3, microbatches: int = 2, **arguments: Any) -> tuple[Any, list[Tensor]]:
    """Return a model, and its losses, gradients and parameters."""
    torch.compiler.reset()
    model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block], **arguments)
    call = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, "reshard_after_forward": again})
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    results = []
    for step in range(steps):
        data = torch.randn(microbatches, dist.get_world_size(), 3, 8, generator=torch.Generator().manual_seed(step))
        for i, micro in enumerate(data):
            model.is_last_microbatch = i == microbatches - 1
            loss = call(micro[dist.get_rank()])
            loss.backward()
            results.append(loss.detach())
        results += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return model, results + [param.full_tensor().detach() for param in model.parameters()]


def assert_hybrid(strategy: str, outer: int) -> None:
    _, expected = trained(True, **hybrid(strategy, outer))
    model, found = trained(2, **hybrid(strategy, outer))
    assert portions_of(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    first = dist.get_rank() // 2 * 2
    group = compat.process_group(model.sharded.topology.portions[2].name)
    assert dist.get_process_group_ranks(group) == [first, first + 1]


@pytest.mark.long
@pytest.mark.parametrize("strategy", HYBRIDS)
@on_ranks(4)
def test_inner_ranks_are_divided(strategy: str) -> None:
    assert_hybrid(strategy, outer=1)


@pytest.mark.long
@pytest.mark.parametrize("strategy", HYBRIDS)
@on_ranks(8)
def test_inner_ranks_are_divided_on_both_sides(strategy: str) -> None:
    assert_hybrid(strategy, outer=2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["Plain", "Checkpointed"])
@on_ranks(4, timeout=480)
def test_inductor_matches_one_process(name: str) -> None:
    data = parity.batches(steps=2)
    alone = parity.train_alone(MODELS[name], data, parity.sgd)
    run = parity.train_sharded(MODELS[name], INDUCTOR, data, parity.sgd, reshard_after_forward=2)
    assert portions_of(run.model)
    parity.assert_close(run, alone)  # the bounds of all compiled code, whose sums round differently


@pytest.mark.long
@on_ranks(4)
def test_blocks_that_are_compiled_one_by_one() -> None:
    """If three blocks share one graph, each keeps its own portions."""
    data = parity.batches(steps=1)[0, dist.get_rank()]
    results = []
    for again in (True, 2):
        torch.compiler.reset()
        model, _ = parity.shard(parity.build(zoo.Plain), EAGER)
        for block in model.module.blocks:
            block.compile(backend="mfsdp", options={"inner": AOT_EAGER, "reshard_after_forward": again})
        loss = model(data)
        loss.backward()
        results.append([loss.detach(), *(param.grad.to_local() for param in model.parameters())])
        assert len(portions_of(model)) == (again == 2)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# -- collectives ------------------------------------------------------------------------------------------------------


def started(model: Any, step: Callable[[], Any]) -> tuple[Counter[tuple[str, str, str]], Counter[str]]:
    """Count the collectives of a step.

    Returns counts by graph, kind and process group as the model reports them, and by group as torch counts them.
    """
    said: Counter[tuple[str, str, str]] = Counter()
    groups = [compat.process_group(name) for name in model.sharded.topology.group_names]
    before = {group.group_name: compat.collectives_started(group) for group in groups}
    with profiling.listening(lambda launch: said.update([(launch.where, launch.what.split()[0], launch.group)])):
        step()
    return said, Counter({g.group_name: compat.collectives_started(g) - before[g.group_name] for g in groups})


@pytest.mark.long
@on_ranks(4)
def test_collectives_of_a_step_and_their_groups() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), AOT_EAGER, reshard_after_forward=2)
    x = torch.randn(4, 8)
    call(x).backward()
    said, counted = started(model, lambda: call(x).backward())
    every, few = model.sharded.topology.inner.name, model.sharded.topology.portions[2].name
    # Five buckets. Backward needs no weight of the first one, and the last one stays gathered.
    assert said == {
        ("forward graph", "gather", every): 5,
        ("backward graph", "gather", few): 3,
        ("backward graph", "reduce", every): 5,
    }
    assert counted == {every: 10, few: 3}
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(compat.process_group(few)) == ([0, 1] if rank < 2 else [2, 3])
    (record,) = model.sharded.compiled_graphs
    wanted = [f"gather  blocks.{i}, portions of 2  6,144 B in float32 of 2 ranks" for i in (2, 1, 0)]
    assert [line for line in record.schedules[Phase.BACKWARD] if line.startswith("gather")] == wanted
    assert sum(", 3,072 B stay, one of 2 portions" in f", {line.partition(': ')[2]}" for line in told(record)) == 3
    assert not any("portions" in line for line in record.schedules[Phase.FORWARD])


def told(record: Any) -> list[str]:
    return next(report.lines for report in record.reports[Phase.JOINT] if report.name == "portions")


@pytest.mark.long
@on_ranks(4)
def test_all_of_them_means_true() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), AOT_EAGER, reshard_after_forward=4)
    call(torch.randn(4, 8)).backward()
    assert not portions_of(model)
    assert not model.sharded.topology.portions
    (record,) = model.sharded.compiled_graphs
    gathers = [line for line in record.schedules[Phase.BACKWARD] if line.startswith("gather")]
    assert len(gathers) == 3
    assert all(line.endswith("of 4 ranks") for line in gathers)


class Texts:
    """Records the graphs, and changes nothing."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __call__(self, graph: fx.Graph, *_: Any) -> None:
        self.found.append(str(graph))


@pytest.mark.long
@on_ranks(4)
def test_ranks_of_a_group_have_the_same_graph() -> None:
    """Ranks can share compiled code, because a rank's place in a group is looked up when the graph runs."""
    texts = Texts()
    _, call = parity.shard(parity.build(zoo.Plain), AOT_EAGER, reshard_after_forward=2, passes=[texts])
    call(torch.randn(4, 8)).backward()
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, texts.found)
    assert any("mfsdp.portion" in text for text in texts.found)
    assert everyones[0] == everyones[1]
    assert everyones[2] == everyones[3]


# -- failures ---------------------------------------------------------------------------------------------------------


def failing(again: bool | int = 2) -> tuple[Any, Any, Any]:
    Failing.where = -1
    torch.compiler.reset()
    model = fully_shard_model(parity.build(Failing), short_mesh(), fsdp_unit_modules=[zoo.Block])
    call = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, "reshard_after_forward": again})
    return model, call, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def step(call: Any, optimizer: Any, batch: Tensor) -> None:
    call(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.long
@on_ranks(4, timeout=120)
def test_training_goes_on_after_reset() -> None:
    data = parity.batches(3)[:, dist.get_rank()]
    model, call, optimizer = failing()
    step(call, optimizer, data[0])
    before = model.sharded.topology.portions[2].name
    Failing.where = 1 if dist.get_rank() == 1 else -1
    with raises_everywhere((RuntimeError, ValueError)):  # type: ignore[arg-type]
        step(call, optimizer, data[1])
    Failing.where = -1
    optimizer.zero_grad()
    model.reset()
    assert not model.sharded.topology.portions  # created again when needed
    step(call, optimizer, data[2])
    assert model.sharded.topology.portions[2].name != before
    assert len(portions_of(model)) == 2 * len(set(portions_of(model)))
    untouched, other, its = failing()
    for batch in (data[0], data[2]):
        step(other, its, batch)
    assert all(torch.equal(a, b) for a, b in zip(values(untouched), values(model), strict=True))


@pytest.mark.long
@on_ranks(4, timeout=120)
def test_ranks_that_ask_for_something_else_are_told() -> None:
    _, call, optimizer = failing(again=True if dist.get_rank() == 3 else 2)
    begun = time.monotonic()
    with raises_everywhere(Exception, "did not arrive within"):
        step(call, optimizer, parity.batches(1)[0, dist.get_rank()])
    assert time.monotonic() - begun < 2 * PATIENCE  # compilation, and 1.5 times the timeout once or twice


# -- the option -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("number", "strategy", "message"),
    [
        (3, 3, r"is 3, but parameters are sharded over 4 ranks.*groups of 3\. Numbers that divide them: 1, 2, 4"),
        (8, 3, "divided into groups of 8"),
        (2, 2, "with optim_grads over 4 ranks parameters are not gathered at each use.*Take it out"),
        (2, 1, "with optim over 4 ranks"),
        (2, 0, "with no_shard over 4 ranks"),
    ],
)
def test_refused(number: int, strategy: int, message: str) -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], zero_dp_strategy=strategy)
    call = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, "reshard_after_forward": number})
    with pytest.raises(Exception, match=message):
        call(torch.randn(4, 8))


def test_one_means_false_and_says_so() -> None:
    with pytest.warns(UserWarning, match="reshard_after_forward=1 keeps what forward has gathered"):
        options = CompileOptions.of({"reshard_after_forward": 1}, None)
    assert options.schedule.reshard_after_forward is False
    assert "reshard_after_forward=False" in str(options)


def compiled(**options: Any) -> tuple[Any, ScheduleText]:
    torch.compiler.reset()
    model, call = parity.shard(parity.build(zoo.Plain), AOT_EAGER, **options)
    call(torch.randn(4, 8)).backward()
    return model, forecast.schedule_of(model)


@pytest.mark.usefixtures("fake_world")
def test_schedule_files_have_portions() -> None:
    _, text = compiled(reshard_after_forward=2)
    assert str(text).count(", portions of 2\n") == 3
    parsed = ScheduleText.parse(str(text), "a file")
    assert parsed.lines == text.lines
    assert parsed.portions == 2
    model, followed = compiled(schedule=parsed)
    assert followed.lines == text.lines
    assert sorted(portions_of(model)) == ["blocks.0", "blocks.1", "blocks.2"]

    one = str(text).replace("gather  blocks.1, portions of 2", "gather  blocks.1")
    model, followed = compiled(schedule=ScheduleText.parse(one, "edited"))
    assert str(followed) == one
    assert sorted(portions_of(model)) == ["blocks.0", "blocks.2"]
    (record,) = model.sharded.compiled_graphs
    assert "blocks.1: gathered from shards again: as was decided" in told(record)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gather  blocks.1\n", "gather  blocks.1, portions of 2\n", r"\[forward\] gathers portions, but only"),
        ("blocks.1, portions of 2", "blocks.1, portions of 4", r"\[backward\] gathers portions of \[2, 4\] ranks"),
    ],
)
def test_wrong_schedule_files(old: str, new: str, message: str) -> None:
    _, text = compiled(reshard_after_forward=2)
    assert old in str(text)
    wrong = ScheduleText.parse(str(text).replace(old, new, 1), "wrong.sched")
    with pytest.raises(Exception, match=f"wrong.sched: {message}"):
        compiled(schedule=wrong)


@pytest.mark.usefixtures("fake_world")
def test_groups_are_made_anew() -> None:
    """A renewal replaces all groups. Graphs ask for groups of portions again when they are compiled."""
    model, _ = compiled(reshard_after_forward=2)
    topology = model.sharded.topology
    before = {group.name for group in topology.groups}
    assert topology.portions
    topology.renew()
    assert not topology.portions
    assert before.isdisjoint(group.name for group in topology.groups)
    topology = fully_shard_model(parity.build(zoo.Plain), **mesh_arguments("HSDP optim_grads_params")).sharded.topology
    before = {group.name for group in topology.groups}
    assert len(before) > 1
    topology.renew()
    assert before.isdisjoint(group.name for group in topology.groups)


# -- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
def test_portions_are_copied_after_the_last_use() -> None:
    """A portion is copied after the last use of its bucket. Earlier, both would be in memory."""
    seen: list[fx.Graph] = []

    def look(graph: fx.Graph, context: Any, phase: Phase) -> None:
        if phase is Phase.FORWARD:
            seen.append(graph)

    compiled(reshard_after_forward=2, regions=False, passes=[look])  # a region uses its bucket once
    roles.assign(seen[0])
    gathers = {gather.bucket: gather for gather in roles.gathers(seen[0])}
    found = seen[0].find_nodes(op="call_function", target=PORTION)
    assert len(found) == 3
    for node in found:
        uses = gathers[node.meta["mfsdp"].bucket].uses
        assert node == max(uses)
        assert len(uses) > 2
        assert node.meta["val"].numel() == gathers[node.meta["mfsdp"].bucket].collective[1].meta["val"].numel() // 2
