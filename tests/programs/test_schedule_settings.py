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
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import MegatronFSDP, fsdp2, fully_shard_model
from mfsdp_compile.planning import forecast

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
    assert model.sharded.eager.policy.prefetch == 1
    step(model)


@on_ranks(2)
def test_copies_keep_the_schedule() -> None:
    model, _ = parity.shard(parity.build(deep), EAGER)
    model.set_schedule(prefetch=2)
    assert copy.deepcopy(model).sharded.eager.policy.prefetch == 2


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
    assert sharded.eager.policy.reductions_in_flight == 3
    assert [record.context.policy.reductions_in_flight for record in sharded.compiled_graphs] == [1]
