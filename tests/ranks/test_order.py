"""Ranks that diverge get an error, and never compute with another layer's weights. What all ranks do is allowed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import short_mesh, values
from hypothesis import given
from hypothesis import strategies as st
from parity import AOT_EAGER, EAGER, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime.ranks import compared
from mfsdp_compile.runtime.ranks.collective_order import AT_REST, Order, Series, StepPhase


class Branches(nn.Module):
    """Equal blocks, some of which can be left out. Their sizes do not distinguish them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(zoo.Block(8) for _ in range(count))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, without: Sequence[int] = (), stop: int = -1) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number not in without:
                x = block(x)
            if number == stop:
                x = x.detach()
        return self.head(x).pow(2).mean()


def make(mode: str = EAGER, **arguments: Any) -> tuple[Any, Any]:
    model = fully_shard_model(parity.build(Branches), short_mesh(), fsdp_unit_modules=[zoo.Block], **arguments)
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    return model, call


def count_agreements(model: Any) -> list[str]:
    asked: list[str] = []
    real = model.sharded.coordinator.agree_on_order

    def counted(lines: Any, epoch: int) -> None:
        asked.extend(lines)
        real(lines, epoch)

    model.sharded.coordinator.agree_on_order = counted
    return asked


ASTRAY = [
    ("optim_grads_params", {"without": (1,)}),
    ("optim_grads_params", {"without": (3,)}),  # the last block; a backward follows
    ("optim_grads_params", {"stop": 1}),  # the first blocks get no gradients
    ("optim_grads", {"without": (2,)}),
    ("no_shard", {"stop": 0}),
]


@pytest.mark.long_unless("*-way0-*")
@pytest.mark.parametrize(
    ("strategy", "way", "known"),
    [(*case, known) for case in ASTRAY for known in (False, True)],
)
@on_ranks(2, timeout=90)
def test_a_branch_that_one_rank_takes(strategy: str, way: dict[str, Any], known: bool) -> None:
    model, _ = make(zero_dp_strategy=strategy)
    x = torch.randn(2, 8)
    for _ in range(3):
        model(x).backward()
        if known:  # all ranks have taken both branches before
            model(x, **way).backward()
    before = values(model)
    model.zero_grad_buffer()
    try:
        model(x, **way if dist.get_rank() == 1 else {}).backward()
        model(x).backward()  # the omitted call may have been the last one
        raise AssertionError("this rank noticed nothing")
    except RuntimeError as error:
        messages = [str(error)] * 2
        dist.all_gather_object(messages, str(error))
    # Either rank may be the one that asks, while the other waits for it in a collective.
    assert any("All ranks must go through the model in the same way" in message for message in messages)
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    model.reset()
    model(x).backward()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "no_shard"])
@on_ranks(2, timeout=60)
def test_branches_that_all_ranks_take(strategy: str) -> None:
    """Branches that depend on the step, and not on the rank, train as in one process."""
    model, _ = make(zero_dp_strategy=strategy)
    alone = parity.build(Branches)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    ways: list[dict[str, Any]] = [{}, {"without": (1,)}, {}, {"without": (0, 3)}, {"stop": 2}, {"without": (1,)}, {}]
    for way, batch in zip(ways, parity.batches(len(ways)), strict=True):
        model(batch[dist.get_rank()], **way).backward()
        sum(alone(x, **way) / len(batch) for x in batch).backward()
        for opt in (optimizer, alone_optimizer):
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            model(batch[0], **way)
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        # Rounding of sums over ranks in another order, accumulated over seven steps.
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-4, atol=1e-6)


@on_ranks(2, timeout=60)
def test_agreements_do_not_grow_with_layers() -> None:
    counts = []
    for layers in (4, 12):
        model = fully_shard_model(Branches(layers), short_mesh(), fsdp_unit_modules=[zoo.Block], check_values=False)
        asked = count_agreements(model)
        model(torch.ones(2, 8)).backward()
        for param in model.parameters():
            param.grad.full_tensor()
        counts.append(len(asked))
    assert counts[0] == counts[1] <= 20, counts


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_what_follows_what_is_agreed_on_once(mode: str) -> None:
    model, call = make(mode)
    asked = count_agreements(model)
    x = torch.randn(2, 8)
    call(x).backward()
    call(x).backward()
    assert asked
    asked.clear()
    for _ in range(3):
        call(x).backward()
    assert not asked
    for turn in range(6):  # a rhythm
        call(x).backward()
        with torch.no_grad():
            call(x)
            call(x)
        if turn == 3:
            asked.clear()
    assert not asked


@on_ranks(2, timeout=60)
def test_accumulation_needs_no_agreement_once_it_is_known() -> None:
    model, _ = make(zero_dp_strategy="optim")
    asked = count_agreements(model)
    x = torch.randn(2, 8)
    for step in range(4):
        if step == 2:
            asked.clear()
        with model.no_sync():
            model(x).backward()
        model(x).backward()
    assert not asked


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_a_backward_that_one_rank_leaves_out(mode: str) -> None:
    """If one rank skips a backward (``if not loss.isfinite(): continue``), all ranks raise."""
    model, call = make(mode)
    x = torch.randn(2, 8)
    for _ in range(2):
        call(x).backward()
    loss = call(x)
    if dist.get_rank() == 1:
        with raises_everywhere(RuntimeError, "rank 0 has come as far as", "skip a batch"):
            call(x)
    else:
        with raises_everywhere(RuntimeError):
            loss.backward()
            raise AssertionError("backward got gathers of the next forward")
    del loss
    model.reset()
    call(x).backward()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_frozen_on_one_rank(mode: str) -> None:
    """If one rank freezes or unfreezes parameters after they were sharded, all ranks raise, and are told which."""
    model, call = make(mode)
    x = torch.randn(2, 8)
    call(x).backward()
    name, param = next(iter(model.named_parameters()))
    for value in (False, True):
        param.requires_grad_(not value)  # on all ranks: no error
        call(x).backward()
        if dist.get_rank() == 1:
            param.requires_grad_(value)
        with raises_everywhere(RuntimeError, "requires_grad=False", repr(name.removeprefix("module."))):
            call(x).backward()
        param.requires_grad_(True)
        model.reset()
        call(x).backward()


@on_ranks(2, timeout=60)
def test_an_optimizer_that_differs_on_one_rank() -> None:
    """Settings of its groups, and gradients that are None, are compared before the first step changes anything."""
    for differs, optimize in (("lr of group 0 is", fully_shard_optimizer), ("no gradient of 'head.bias'", lambda o: o)):
        model, call = make()
        is_other = dist.get_rank() == 1
        rate = 0.2 if is_other and differs.startswith("lr") else 0.1
        optimizer = optimize(torch.optim.SGD(model.parameters(), rate))
        call(torch.ones(2, 8)).backward()
        if is_other and differs.startswith("no"):
            model.module.head.bias.grad = None
        before = values(model)
        with raises_everywhere(RuntimeError, differs):
            optimizer.step()
        assert all(map(torch.equal, before, values(model)))


@on_ranks(2, timeout=60)
def test_a_state_dict_that_one_rank_loads() -> None:
    """``if rank == 0: model.load_state_dict(full)`` would write the rows of one rank only."""
    for prefix in ("", "module."):
        model, call = make()
        part = model.module if prefix else model
        call(torch.ones(2, 8)).backward()
        full = {name.removeprefix(prefix): torch.ones(p.shape) for name, p in model.named_parameters()}
        part.load_state_dict(full)
        before = values(model)
        with raises_everywhere(RuntimeError, "load_state_dict of 'enter.weight'"):
            if dist.get_rank() == 0:
                part.load_state_dict({name: 2 * value for name, value in full.items()})
            else:
                call(torch.ones(2, 8)).backward()
        assert all(map(torch.equal, before, values(model)))


@on_ranks(2, timeout=60)
def test_graphs_that_differ_only_in_whose_buckets_they_gather() -> None:
    """All ranks know both graphs; then each runs another one."""
    model, _ = make()
    call: Any = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER}, dynamic=False)
    x = torch.ones(2, 8)
    with torch.no_grad():
        for without in ((0, 1), (2, 3), (0, 1), (2, 3)):
            call(x, without)
        with raises_everywhere(RuntimeError, "inference graph"):
            call(x, (0, 1) if dist.get_rank() else (2, 3))


@pytest.mark.long
@on_ranks(2, timeout=60)
def test_a_graph_break_that_depends_on_data() -> None:
    """If a model is compiled in parts and one rank continues with another part, all ranks raise."""

    class Broken(Branches):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            x = self.blocks[0](self.enter(x))
            if x.sum() > 0:  # breaks the graph
                x = self.blocks[1](x)
            else:
                x = self.blocks[2](x)
            return self.head(x).pow(2).mean()

    model = fully_shard_model(parity.build(Broken), short_mesh(), fsdp_unit_modules=[zoo.Block])
    call = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER})
    x = torch.randn(2, 8)
    with torch.no_grad():
        model.module.head.weight.zero_()
        model.module.blocks[0].load_state_dict(copy.deepcopy(model.module.blocks[0].state_dict()))
    inputs = {sign: next(y for y in torch.randn(200, 2, 8) if (total(model, y) > 0) == sign) for sign in (True, False)}
    for _ in range(2):
        for y in inputs.values():
            call(y).backward()
    with raises_everywhere(RuntimeError):
        call(inputs[dist.get_rank() == 0]).backward()
        raise AssertionError("nobody noticed")
    model.reset()
    call(x).backward()


def total(model: Any, x: Tensor) -> Tensor:
    """Return the value that decides in ``Broken``."""
    found = []
    hook = model.module.blocks[0].register_forward_hook(lambda _, __, out: found.append(out.detach().sum()))
    with torch.no_grad():
        model(x)
    hook.remove()
    return found[0]


@pytest.mark.long_unless("*-eager-False")
@pytest.mark.parametrize(
    ("mode", "known"),
    [
        (EAGER, False),
        (AOT_EAGER, True),
        (EAGER, True),
        (AOT_EAGER, False),
    ],
)
@on_ranks(2, timeout=90)
def test_models_that_look_alike(mode: str, known: bool) -> None:
    """If ranks run different models of the same shapes, all ranks raise. They would compute with halves of both."""
    mesh = short_mesh()
    models = [fully_shard_model(parity.build(Branches, seed), mesh, fsdp_unit_modules=[zoo.Block]) for seed in (0, 1)]
    models.append(copy.deepcopy(models[0]))  # for example an average of weights
    calls = models if mode == EAGER else [torch.compile(m, backend="mfsdp", options={"inner": mode}) for m in models]
    x = torch.randn(2, 8)

    def turn() -> None:
        with torch.no_grad():
            calls[1](x)
        calls[0](x).backward()
        with torch.no_grad():
            calls[2](x)

    for _ in range(3 if known else 0):
        turn()
    if known:
        asked = [line for model in models for line in count_agreements(model)]
        turn()
        assert not asked
    with raises_everywhere(RuntimeError), torch.no_grad():
        calls[dist.get_rank()](x)
        calls[1 - dist.get_rank()](x)
        raise AssertionError("this rank noticed nothing")
    for model in models:
        model.reset()
    turn()


# -- the tree of what followed what ------------------------------------------------------------------------------------

FORWARD, EVALUATION, BACKWARD = (
    StepPhase("forward with gradients", "the model"),
    StepPhase("forward without gradients", "the model"),
    StepPhase("backward"),
)


class Store:
    """Stands for other ranks, which do the same."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.epochs: list[int] = []
        self.refuses = False

    def __call__(self, lines: Sequence[str], epoch: int) -> None:
        self.asked += map(compared.shown, lines)
        self.epochs.append(epoch)
        if self.refuses:
            raise RuntimeError("rank 7 did not arrive")


def go(order: Order, store: Store, *steps: str | StepPhase) -> None:
    for step in steps:
        if isinstance(step, StepPhase):
            order.enter(step, store)
        else:
            order.start(step, store)


STEP = (FORWARD, "gather a", "gather b", BACKWARD, "gather a", "reduce b", "reduce a")


def test_a_known_way_is_free() -> None:
    store = Store()
    order = Order()
    go(order, store, *STEP, *STEP)
    assert len(store.asked) == len(STEP) + 1  # the second forward follows a backward
    evaluation = (EVALUATION, "gather a")
    for _ in range(4):
        store.asked.clear()
        go(order, store, *STEP, *STEP, *evaluation, *evaluation, *evaluation)
    assert not store.asked
    store.refuses = True
    for _ in range(2):
        go(order, store, *STEP, *STEP, *evaluation, *evaluation, *evaluation)


def test_a_long_training_takes_bounded_memory() -> None:
    """Nothing is remembered of each forward of a mere training, and evaluation after it is still asked for."""
    store, order = Store(), Order()
    for _ in range(10_000):
        go(order, store, *STEP)
    places = {id(state): state for state in [order._start, *order._begins.values()]}
    assert max(len(state.last_after) for state in places.values()) <= 2_001
    store.asked.clear()
    go(order, store, EVALUATION, "gather a")
    assert store.asked


def test_nothing_follows_a_standstill() -> None:
    store, order = Store(), Order()
    go(order, store, *STEP)
    order.stalled = "Ranks have diverged."
    store.asked.clear()
    for step in (FORWARD, "gather a"):
        with pytest.raises(RuntimeError, match="Ranks have diverged"):
            go(order, store, step)
    assert not store.asked


def test_what_is_known_and_not_expected_is_asked_for() -> None:
    """Ranks agree on a known phase that is not the expected one: an evaluation, or its absence."""
    store = Store()
    order = Order()
    go(order, store, *STEP, EVALUATION, "gather a", *STEP, *STEP, *STEP)
    store.asked.clear()
    go(order, store, EVALUATION, "gather a")
    assert store.asked == [f"{EVALUATION} after reduce a"]
    go(order, store, *STEP, *STEP, FORWARD, "gather a", "gather b", *STEP, *STEP)
    store.refuses = True
    go(order, store, FORWARD, "gather a", "gather b")
    with pytest.raises(RuntimeError, match="reaches a forward with gradients of the model after gather b"):
        go(order, store, FORWARD)


NORM = StepPhase(AT_REST, "a sum over 'w'")


def test_operations_on_parameters_at_rest() -> None:
    store = Store()
    order = Order()
    go(order, store, *STEP, *STEP, *STEP)
    store.asked.clear()
    go(order, store, NORM, *STEP, *STEP)
    assert len(store.asked) == 3  # a new phase, a new phase after it, and the usual one again
    store.asked.clear()
    go(order, store, *STEP, NORM, *STEP, *STEP, NORM)
    assert store.asked.count("a sum over 'w' after reduce a") == 2
    store.asked.clear()
    order, store = Order(), Store()
    for _ in range(3):  # a step with gradient clipping
        store.asked.clear()
        go(order, store, *STEP, NORM)
    assert not store.asked


@pytest.mark.parametrize(
    ("astray", "message"),
    [
        ((FORWARD, "gather b"), "reaches gather b after a forward .*, for the first time; so far, .* was gather a"),
        ((FORWARD, "gather a", BACKWARD), "reaches a backward after gather a"),
        ((FORWARD, "gather a", "gather b", "gather c"), "reaches gather c after gather b"),
        ((FORWARD, "gather a", "gather b", FORWARD), "reaches a forward with gradients of the model after gather b"),
        ((*STEP[:-1], FORWARD), "after reduce b"),
        ((EVALUATION,), "reaches a forward without gradients of the model after reduce a"),
    ],
)
def test_another_way_is_asked_for(astray: tuple[Any, ...], message: str) -> None:
    store = Store()
    order = Order()
    go(order, store, *STEP, *STEP)
    store.refuses = True
    go(order, store, *astray[:-1])
    with pytest.raises(RuntimeError, match=message):
        go(order, store, astray[-1])


def test_a_fork_is_asked_for_every_time() -> None:
    store = Store()
    order = Order()
    for _ in range(2):
        go(order, store, FORWARD, "gather a", "gather b", BACKWARD)
        go(order, store, FORWARD, "gather a", BACKWARD)
    store.asked.clear()
    go(order, store, FORWARD, "gather a", "gather b", BACKWARD)
    assert store.asked == ["gather b after gather a"]
    store.asked.clear()
    go(order, store, FORWARD, "gather a", BACKWARD)
    assert store.asked == ["a backward after gather a"]


def test_a_fork_between_collectives_is_asked_for_every_time() -> None:
    store, order = Store(), Order()
    for last in "bbccc":
        store.asked.clear()
        go(order, store, FORWARD, "gather a", f"gather {last}")
    assert store.asked == ["gather c after gather a"]


def test_after_a_restart_ranks_begin_in_another_epoch() -> None:
    """After a restart, ranks are in another epoch, so they do not meet ranks that missed the failure."""
    store, order = Store(), Order()
    go(order, store, *STEP, FORWARD, "gather a")
    before = order.epoch
    order.restart()
    store.asked.clear()
    assert order.latest == "the start"
    go(order, store, BACKWARD)
    assert store.asked == [f"{BACKWARD} after the start"]
    assert order.epoch == store.epochs[-1] > before
    assert order.events == 1


def numbered(*names: str) -> list[tuple[str, Series]]:
    """Parse collectives of blocks: ``"gather 3"``."""
    return [(name, (name.partition(" ")[0], int(name.partition(" ")[2]))) for name in names]


def step_of(layers: int) -> list[Any]:
    """Return what the eager runtime starts: the next block's gather before the last one's reduction."""
    last = layers - 1
    forward = numbered(*(f"gather {i}" for i in range(layers)))
    turns = (turn for i in range(last - 1, -1, -1) for turn in (f"gather {i}", f"reduce {i + 1}"))
    return [FORWARD, *forward, BACKWARD, *numbered(f"gather {last}", *turns, "reduce 0")]


def asked_by(order: Order, steps: Sequence[Any]) -> list[str]:
    store = Store()
    for step in steps:
        if isinstance(step, StepPhase):
            order.enter(step, store)
        else:
            order.start(step[0], store, series=step[1])
    return store.asked


def test_layers_that_go_on_as_the_last_one_are_free() -> None:
    counts = [len(asked_by(Order(), step_of(layers))) for layers in (8, 80)]
    assert counts[0] == counts[1] <= 12
    order = Order()
    asked_by(order, step_of(8)[:5])
    assert asked_by(order, numbered("gather 5")) == ["gather 5 after gather 3"]  # one block is left out
    order = Order()
    asked_by(order, [*step_of(8), FORWARD, *numbered("gather 0", "gather 1")])
    assert asked_by(order, numbered("gather 3"))  # expected after this one, but new at this place
    order, norms = Order(), [StepPhase(AT_REST, f"a norm of {i}") for i in range(50)]
    store = Store()
    for number, norm in enumerate(norms):
        order.enter(norm, store, series=("norm", number))
    assert len(store.asked) == 3


def test_memory_is_bounded() -> None:
    store = Store()
    order = Order(limit=50)
    for i in range(100):
        go(order, store, FORWARD, f"gather {i}")
        assert order._places <= 53


WAYS = st.lists(st.tuples(st.sampled_from("gr"), st.integers(0, 5)), max_size=6)


@given(st.lists(WAYS, max_size=4), st.tuples(WAYS, WAYS), st.sampled_from([("", ""), ("", " that accumulates")]))
def test_two_ranks_with_layers_never_part_without_asking(history: Any, ways: Any, kinds: Any) -> None:
    """The same holds for models with layers, where more is free.

    Whether a backward accumulates may differ between ranks.
    """
    done = []
    for way, kind in zip(ways, kinds, strict=True):
        order, unasked = Order(), []
        backward = StepPhase(f"backward{kind}", "M")
        for earlier in history:
            asked_by(order, [FORWARD, *numbered(*(f"{what} {n}" for what, n in earlier)), backward])
        for step in (FORWARD, *numbered(*(f"{what} {n}" for what, n in way))):
            if asked_by(order, [step]):
                break
            unasked.append(step)
        done.append(unasked)
    shorter = min(map(len, done))
    assert done[0][:shorter] == done[1][:shorter]


@given(st.lists(st.lists(st.sampled_from("abc"), max_size=4), min_size=1, max_size=8), st.data())
def test_two_ranks_never_part_without_asking(history: list[list[str]], data: st.DataObject) -> None:
    """After any common history, two ranks do the same as long as neither asks."""
    store = Store()
    ranks = [Order(), Order()]
    for way in history:
        for order in ranks:
            go(order, store, FORWARD, *way, BACKWARD)
    ways = [data.draw(st.lists(st.sampled_from("abc"), max_size=4)) for _ in ranks]
    done = []
    for order, way in zip(ranks, ways, strict=True):
        store.asked.clear()
        unasked: list[Any] = []
        for step in (FORWARD, *way, BACKWARD):
            go(order, store, step)
            if store.asked:
                break
            unasked.append(step)
        done.append(unasked)
    shorter = min(map(len, done))
    assert done[0][:shorter] == done[1][:shorter]


def test_models_have_the_names_of_their_classes() -> None:
    order = Order()
    assert [order.join(kind) for kind in ("Llama", "Llama", "Critic")] == ["Llama", "Llama #2", "Critic"]


def test_how_far_a_rank_has_come() -> None:
    order, store, step = Order(), Store(), StepPhase("step", "SGD of Net")
    assert order.progress == "after 0 optimizer steps"
    go(order, store, FORWARD, "gather a")
    assert order.progress == "in its 1st optimizer step"
    go(order, store, BACKWARD, "reduce a", step)
    assert order.progress == "after 1 optimizer step"
    go(order, store, EVALUATION)
    assert order.progress == "after 1 optimizer step"
    for number, ordinal in ((1, "2nd"), (2, "3rd"), (10, "11th"), (11, "12th"), (20, "21st"), (110, "111th")):
        order.steps = number
        go(order, store, FORWARD)
        assert order.progress == f"in its {ordinal} optimizer step"
        go(order, store, step)
