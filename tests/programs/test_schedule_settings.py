"""``model.set_schedule``: the same numbers eagerly, block by block and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import MegatronFSDP, fsdp2, fully_shard_model
from mfsdp_compile.planning import forecast
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase

LAYERS = 5


def deep() -> zoo.Plain:
    return zoo.Plain(layers=LAYERS)


def by_block(model: MegatronFSDP) -> MegatronFSDP:
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": AOT_EAGER})
    return model


def built(compiles_blocks: bool = False) -> MegatronFSDP:
    model = fully_shard_model(parity.build(deep), fsdp_unit_modules=[zoo.Block])
    return by_block(model) if compiles_blocks else model


def step(model: MegatronFSDP, call: Callable[..., Any] | None = None) -> list[torch.Tensor]:
    (model if call is None else call)(parity.batches(1)[0, dist.get_rank()]).backward()
    gradients = [param.grad.full_tensor() for param in model.parameters()]
    model.zero_grad()
    return gradients


def done(model: MegatronFSDP) -> tuple[ScheduleText, list[torch.Tensor]]:
    """Return what an eager step does, as a schedule, and its gradients."""
    found: dict[Phase, list[str]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    eager, lines = model.sharded.eager, found[Phase.FORWARD]
    gathering, reducing = eager.gathering, eager.reducing
    announce, gather, take_in = eager.step.announce, gathering._gather_now, reducing._take_in

    def announced(what: str, bucket: Any, group: Any, more: str = "") -> None:
        if "stage" not in more:  # files have no lines of later stages
            lines.append(f"{what}  {bucket.plan.name}")
        announce(what, bucket, group, more)

    def gathered(bucket: Any, *rest: Any) -> Any:
        is_waiting = bucket not in gathering.gathered or gathering.gathered[bucket].started is not None
        state = gather(bucket, *rest)
        if is_waiting:
            lines.append(f"wait  {bucket.plan.name}")
        return state

    def taken_in(reduction: Any) -> None:
        if reduction.stage == 0:
            lines.append(f"await  {reduction.bucket.plan.name}")
        take_in(reduction)

    eager.step.announce, gathering._gather_now, reducing._take_in = announced, gathered, taken_in  # type: ignore
    try:
        loss = model(parity.batches(1)[0, dist.get_rank()])
        lines = found[Phase.BACKWARD]
        loss.backward()
    finally:
        eager.step.announce, gathering._gather_now, reducing._take_in = announce, gather, take_in  # type: ignore
    gradients = [param.grad.full_tensor() for param in model.parameters() if param.requires_grad]
    model.zero_grad()
    return ScheduleText.of(found), gradients


def compiled_schedule(**options: Any) -> ScheduleText:
    torch.compiler.reset()
    model = built()
    step(model, torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, "regions": False, **options}))
    return forecast.schedule_of(model)


def reductions_running(model: MegatronFSDP) -> list[int]:
    """Return a list that grows: how many reductions run after each unit's backward."""
    reducing = model.sharded.eager.reducing
    reduce, running = reducing.post_backward, []

    def counted(bucket: Any, *arguments: Any) -> None:
        reduce(bucket, *arguments)
        running.append(len(reducing.running))

    reducing.post_backward = counted  # type: ignore[method-assign]
    return running


def events(model: MegatronFSDP) -> list[str]:
    """Return what one step does with the blocks: gathers and reductions that start, and forwards of blocks."""
    found: list[str] = []
    start = model.sharded.eager.step.announce

    def announced(what: str, bucket: Any, *rest: Any) -> None:
        found.append(f"{what} {bucket.plan.unit}")
        start(what, bucket, *rest)

    hooks = [
        block.register_forward_pre_hook(lambda *_, i=i: found.append(f"run blocks.{i}"))
        for i, block in enumerate(model.module.blocks)
    ]
    model.sharded.eager.step.announce = announced  # type: ignore[method-assign]
    try:
        step(model)
    finally:
        model.sharded.eager.step.announce = start  # type: ignore[method-assign]
        for hook in hooks:
            hook.remove()
    return [event for event in found if "blocks" in event]


def ahead(found: list[str]) -> list[int]:
    """Return for each block how many units before it the one runs whose forward has started its gather."""
    distances = []
    for i in range(LAYERS):
        before = found[: found.index(f"gather blocks.{i}")]
        distances.append(i + 1 - sum(event.startswith("run") for event in before))
    return distances


@pytest.mark.parametrize("compiles_blocks", [False, True], ids=["eager", "by block"])
@on_ranks(2)
def test_units_are_gathered_as_early_as_the_schedule_says(compiles_blocks: bool) -> None:
    model = built(compiles_blocks)
    expected = step(model)
    for prefetch in range(4):
        model.set_schedule(prefetch=prefetch)
        assert all(map(torch.equal, step(model), expected))
        # In front of the first block is one unit, of the root's parameters.
        assert ahead(events(model)) == [min(prefetch, i + 1) for i in range(LAYERS)]
    model.set_schedule(prefetch=3, prefetch_bytes=1)
    assert ahead(events(model)) == [0] * LAYERS
    model.set_schedule()
    assert ahead(events(model)) == [1] * LAYERS


@pytest.mark.parametrize("keep_last", [True, False])
@on_ranks(2)
def test_units_are_gathered_early_in_backward(keep_last: bool) -> None:
    """Also behind the unit that forward has left: the first gather of a backward is hidden, too."""
    model = built()
    model.set_schedule(prefetch=2, keep_last=keep_last)
    expected = step(model)
    found = events(model)
    backward = found[found.index(f"run blocks.{LAYERS - 1}") + 1 :]
    for i in range(LAYERS):
        reduced = backward[: backward.index(f"reduce blocks.{i}")]
        started = [event for event in reduced if event.startswith("gather")]
        assert len(started) == min(LAYERS, LAYERS - i + 2), (i, backward)
    assert all(map(torch.equal, step(model), expected))


@pytest.mark.parametrize("compiles_blocks", [False, True], ids=["eager", "by block"])
@on_ranks(2)
def test_reductions_are_awaited_as_late_as_the_schedule_says(compiles_blocks: bool) -> None:
    model = built(compiles_blocks)
    expected = step(model)
    running = reductions_running(model)
    size = max(bucket.plan.gathered_bytes for bucket in model.sharded.buckets)
    for settings, most in (
        ({}, 1),
        ({"reductions_in_flight": 0}, 0),
        ({"reductions_in_flight": 3}, 3),
        ({"reductions_in_flight": 3, "reduction_bytes": 2 * size}, 2),
    ):
        model.set_schedule(**settings)
        running.clear()
        assert all(map(torch.equal, step(model), expected))
        assert max(running) == most, (settings, running)


@on_ranks(2)
def test_what_forward_uses_last_stays_if_the_schedule_says_so() -> None:
    model = built()
    gathered = model.sharded.eager.gathering.gathered
    for keeps in (True, False):
        model.set_schedule(keep_last=keeps)
        loss = model(parity.batches(1)[0, dist.get_rank()])
        assert {bucket.plan.unit for bucket in gathered} == ({"root:after"} if keeps else set())
        loss.backward()
        model.zero_grad()


@pytest.mark.long
@on_ranks(2)
def test_compiled_code_takes_the_numbers_of_the_model() -> None:
    """Options that are given go before; without any, the graph is that of the same options."""

    def schedule(settings: dict[str, Any], **options: Any) -> str:
        torch.compiler.reset()
        model = built()
        model.set_schedule(**settings)
        compiled = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, **options})
        gradients.append(step(model, compiled))
        return str(forecast.schedule_of(model))

    gradients: list[list[torch.Tensor]] = []
    plain = schedule({})
    early = schedule({"prefetch": 3, "reductions_in_flight": 2})
    assert early == schedule({}, prefetch=3, reductions_in_flight=2) != plain
    assert schedule({"prefetch": 3}, prefetch=1) == plain
    for each in gradients[1:]:
        assert all(map(torch.equal, each, gradients[0]))


@pytest.mark.long
@on_ranks(2)
def test_a_schedule_that_changes_compiles_again() -> None:
    model = built()
    compiled = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER})
    expected = step(model, compiled)
    graphs = len(model.sharded.compiled_graphs)
    model.set_schedule(prefetch=2)
    assert all(map(torch.equal, step(model, compiled), expected))
    assert len(model.sharded.compiled_graphs) > graphs


@on_ranks(2, timeout=60)
def test_schedules_that_are_refused() -> None:
    model = built()
    for settings, error, message in (
        ({"prefetch": -1}, ValueError, "prefetch cannot be negative"),
        ({"prefetch": 1.5}, TypeError, "prefetch takes a whole number"),
        ({"prefetch": "auto"}, TypeError, "found from a compiled graph"),
        ({"prefetch_bytes": "many"}, ValueError, r"set_schedule\(prefetch_bytes\)"),
        ({"keep_last": 1}, TypeError, "keep_last takes True or False"),
    ):
        with pytest.raises(error, match=message):
            model.set_schedule(**settings)
    loss = model(parity.batches(1)[0, dist.get_rank()])
    loss.backward()
    with parity.raises_everywhere(RuntimeError, "set_schedule"):
        model.set_schedule(prefetch=dist.get_rank())
    model.reset()
    assert model.sharded.eager.schedule.policy.prefetch == 1
    step(model)


@on_ranks(2)
def test_copies_keep_the_schedule() -> None:
    model, _ = parity.shard(parity.build(deep), EAGER)
    model.set_schedule(prefetch=2)
    assert copy.deepcopy(model).sharded.eager.schedule.policy.prefetch == 2


@pytest.mark.long
@on_ranks(2)
def test_a_schedule_is_one_models() -> None:
    """Models of one class share compiled code only if their schedules are the same, and others stay as they are."""
    models = [built(), built()]
    models[0].set_schedule(prefetch=3)
    compiled = [torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER}) for model in models]
    for _ in range(2):
        for model, call in zip(models, compiled, strict=True):
            step(model, call)
    early, usual = (str(forecast.schedule_of(model)) for model in models)
    assert early != usual
    assert [len(model.sharded.compiled_graphs) for model in models] == [1, 1]


@on_ranks(2)
def test_options_of_a_block_go_before_the_models_schedule() -> None:
    """A block whose options contradict the model gathers by itself; others are served by the eager path."""
    model = built()
    model.set_schedule(prefetch=3)
    expected = step(model)
    for i, block in enumerate(model.module.blocks):
        block.compile(backend="mfsdp", options={"inner": AOT_EAGER, "prefetch": 1} if i == 2 else {"inner": AOT_EAGER})
    assert all(map(torch.equal, step(model), expected))
    assert not any(event.startswith("gather blocks.2") for event in events(model))  # by its own graph


@on_ranks(4)
def test_no_reductions_in_flight_over_two_dimensions() -> None:
    """With HSDP a reduction has two stages: neither is left running."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    both = mesh["outer", "inner"]._flatten("both").get_group()
    dims = {"dp_outer_dim": "outer", "dp_shard_dim": "inner", "hybrid_fsdp_group": both}
    model = fully_shard_model(parity.build(deep), fsdp_unit_modules=[zoo.Block], device_mesh=mesh, **dims)
    model.set_schedule(reductions_in_flight=0)
    running = reductions_running(model)
    step(model)
    assert set(running) == {0}


@on_ranks(2)
def test_the_eager_path_can_be_copied_alone() -> None:
    model = built()
    twin = copy.deepcopy(model.sharded.eager)
    assert twin.units


@on_ranks(2)
def test_fsdp2s_setting_is_for_eager_code() -> None:
    """It is each rank's own: graphs, which ranks compare, do not depend on it."""
    model = parity.build(deep)
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    model.set_reduce_scatter_max_input_buffers(3)
    compiled = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER})
    compiled(parity.batches(1)[0, dist.get_rank()]).backward()
    sharded = model._mfsdp_window.owner
    assert sharded.eager.schedule.policy.reductions_in_flight == 3
    assert [record.context.policy.reductions_in_flight for record in sharded.compiled_graphs] == [1]


@on_ranks(2)
def test_embeddings_are_not_gathered_for_backward() -> None:
    """Whatever the schedule, and in copies."""

    class Embedded(zoo.Plain):
        def __init__(self) -> None:
            super().__init__(layers=2)
            self.enter = nn.Embedding(9, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.abs().long().clamp(max=8)[:, 0])

    def gathered_in_backward(model: MegatronFSDP) -> list[str]:
        return [line.bucket for line in done(model)[0].lines[Phase.BACKWARD] if line.what == "gather"]

    model = fully_shard_model(parity.build(Embedded), fsdp_unit_modules=[zoo.Block])
    blocks = ["blocks.1", "blocks.0"]
    assert gathered_in_backward(model) == blocks
    model.set_schedule(prefetch=3)
    assert gathered_in_backward(model) == blocks
    forward, backward = str(done(model)[0]).split("[backward]")
    model.set_schedule(schedule=ScheduleText.parse(f"{forward}[backward]{backward}", "as it was"))
    loss = model(parity.batches(1)[0, dist.get_rank()])
    assert "root:before" not in {bucket.plan.name for bucket in model.sharded.eager.gathering.gathered}
    loss.backward()
    model.zero_grad()


# -- schedule files ---------------------------------------------------------------------------------------------------


@pytest.mark.long_unless("2-prefetch-3", "2-reductions_in_flight-0", "2-reduction_bytes-1")
@pytest.mark.parametrize(
    "option",
    [
        ("prefetch", 0),
        ("prefetch", 3),
        ("reductions_in_flight", 0),
        ("reductions_in_flight", 3),
        ("reduction_bytes", 1),
        ("keep_last", False),
        ("reshard_after_forward", False),
        ("prefetch", "auto"),
        ("reshard_after_forward", "auto"),
        ("memory_budget", 20 << 20),
    ],
    ids=lambda option: f"{option[0]}-{option[1]}",
)
@on_ranks(2)
def test_the_eager_path_does_what_a_file_says(option: tuple[str, Any]) -> None:
    """Line by line: what compiled code does with options, the eager path does with the schedule that this gave."""
    text = compiled_schedule(**dict([option]))
    model = built()
    plain, expected = done(model)
    model.set_schedule(schedule=text)
    made, gradients = done(model)
    assert str(made) == str(text)
    assert all(map(torch.equal, gradients, expected))
    model.set_schedule()
    assert str(done(model)[0]) == str(plain)


@on_ranks(2)
def test_lines_that_were_moved_by_hand() -> None:
    """A unit that is gathered ahead of one before it; a reduction that is awaited one later than others."""
    text = str(compiled_schedule())
    forward, backward = text.split("[backward]\n")
    late = "gather  blocks.2\nwait    blocks.1\ngather  blocks.3\n"
    assert late in forward
    forward = forward.replace(
        "wait    blocks.0\n" + late, "gather  blocks.3\nwait    blocks.0\ngather  blocks.2\nwait    blocks.1\n"
    )
    last, later = "await   blocks.3\n", "await   blocks.2\n"
    assert backward.index(last) < backward.index(later)
    backward = backward.replace(last, "").replace(later, last + later)
    edited = ScheduleText.parse(f"{forward}[backward]\n{backward}", "edited")
    model = built()
    expected = step(model)
    model.set_schedule(schedule=edited)
    made, gradients = done(model)
    assert str(made) == str(edited)
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.long
@on_ranks(2)
def test_compiled_code_follows_the_models_file() -> None:
    """Also one whose reductions are awaited at once. Options that are given go before it."""
    at_once, plain = compiled_schedule(reductions_in_flight=0), compiled_schedule()
    assert str(at_once) != str(plain)
    for options, expected in (({}, at_once), ({"reductions_in_flight": 1}, plain)):
        torch.compiler.reset()
        model = built()
        compiled = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, "regions": False, **options})
        gradients = step(model, compiled)
        model.set_schedule(schedule=at_once)
        assert all(map(torch.equal, step(model, compiled), gradients))
        assert str(forecast.schedule_of(model)) == str(expected)


@pytest.mark.long
@pytest.mark.parametrize("outer", [False, True], ids=["HSDP", "HFSDP"])
@on_ranks(4)
def test_files_over_two_dimensions(outer: bool) -> None:
    """Later stages follow by the same rule."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    both = mesh["outer", "inner"]._flatten("both").get_group()
    dims: dict[str, Any] = {"dp_outer_dim": "outer", "dp_shard_dim": "inner", "hybrid_fsdp_group": both}
    if outer:
        dims["outer_dp_sharding_strategy"] = "optim"
    text = compiled_schedule(prefetch=2, reductions_in_flight=2)
    model = fully_shard_model(parity.build(deep), fsdp_unit_modules=[zoo.Block], device_mesh=mesh, **dims)
    _, expected = done(model)
    model.set_schedule(schedule=text)
    running = reductions_running(model)
    for _ in range(2):
        made, gradients = done(model)
        assert str(made) == str(text)
        assert all(map(torch.equal, gradients, expected))
    assert max(running) > 2


@on_ranks(2, timeout=60)
def test_files_that_are_refused() -> None:
    text = str(compiled_schedule())
    model = built()
    for old, new, message in (
        ("blocks.2", "blocks.9", "names the bucket 'blocks.9', but the graph has"),
        ("wait    blocks.2\n", "", "has no 'wait blocks.2'"),
        ("[backward]\ngather  blocks.4", "[backward]\ngather  blocks.4, portions of 2", "reshard_after_forward=2"),
    ):
        wrong = ScheduleText.parse(text.replace(old, new), "wrong.sched")
        with pytest.raises(ValueError, match=message) as caught:
            model.set_schedule(schedule=wrong)
        assert "wrong.sched" in str(caught.value)
    with pytest.raises(ValueError, match=r"no/such\.sched cannot be read"):
        model.set_schedule(schedule="no/such.sched")
    assert model.sharded.schedule.text is None
    step(model)
    with parity.raises_everywhere(RuntimeError, "set_schedule"):
        model.set_schedule(schedule=ScheduleText.parse(text, "a file") if dist.get_rank() else None)


@on_ranks(2)
def test_a_file_keeps_a_frozen_bucket_for_its_backward() -> None:
    """Nothing of it is reduced, which would release it: other units are gathered meanwhile."""
    module = parity.build(deep)
    module.blocks[1].requires_grad_(False)
    model = fully_shard_model(module, fsdp_unit_modules=[zoo.Block])
    plain, expected = done(model)
    forward, backward = str(plain).split("[backward]")
    kept = backward.replace("gather  blocks.1\n", "").replace("wait    blocks.1\n", "")
    assert kept != backward
    kept = kept.replace("gather  root:before\n", "")  # the policy gathers it for nobody
    text = ScheduleText.parse(f"{forward}[backward]{kept}", "kept")
    model.set_schedule(schedule=text)
    made, gradients = done(model)
    assert str(made) == str(text)
    assert all(map(torch.equal, gradients, expected))
