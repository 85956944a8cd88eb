"""Ranks that take different ways through a model: their gradients count as zeros, or they are told; they never hang, and
never compute with another layer's weights."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, raises_everywhere
from pool import on_ranks
from test_failures import short_mesh
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.doctor import mesh_arguments
from mfsdp_compile.runtime.order import Entry, LaunchOrder, Phases


class Branches(nn.Module):
    """Equal blocks, of which some are left out: sizes do not tell them apart."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(zoo.Block(8) for _ in range(count))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, without: tuple[int, ...] = ()) -> Tensor:
        x = self.enter(x)
        for number, block in enumerate(self.blocks):
            if number not in without:
                x = block(x)
        return self.head(x).pow(2).mean()


WAYS: list[tuple[tuple[int, ...], ...]] = [
    ((), ()),
    ((), (1,)),  # what ranks 0 and 1 leave out
    ((0,), (3,)),
    ((2, 3), ()),
    ((1, 2), (1, 2)),
    ((0, 1, 2, 3), (0,)),
    ((), ()),
]


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "no_shard"])
@pytest.mark.parametrize("microbatches", [1, 2])
@on_ranks(2, timeout=50)
def test_units_that_a_rank_skips_get_zeros(strategy: str, microbatches: int) -> None:
    compare_with_one_process(strategy, microbatches, WAYS)


@on_ranks(4, timeout=60)
def test_units_that_a_rank_skips_get_zeros_in_two_dimensions() -> None:
    for strategy in ("HSDP optim_grads_params", "HFSDP"):
        compare_with_one_process(strategy, 2, [(*ways, ways[1], ways[0]) for ways in WAYS])


def compare_with_one_process(strategy: str, microbatches: int, steps: list[tuple[tuple[int, ...], ...]]) -> None:
    model = fully_shard_model(parity.build(Branches), fsdp_unit_modules=[zoo.Block], **mesh_arguments(strategy))
    alone = parity.build(Branches)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    data = parity.batches(len(steps) * microbatches).unflatten(0, (len(steps), microbatches))
    for ways, batches in zip(steps, data, strict=True):
        for i, batch in enumerate(batches):
            with contextlib.nullcontext() if i == microbatches - 1 else model.no_sync():
                model(batch[dist.get_rank()], ways[dist.get_rank()]).backward()
            sum(alone(x, way) / len(batch) for x, way in zip(batch, ways, strict=True)).backward()
        # In one process what nobody used has no gradient; here it has zeros, on every rank and with every strategy.
        for param in alone.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
        alone_optimizer.step()
        optimizer.zero_grad()
        alone_optimizer.zero_grad()
        with torch.no_grad():
            model(batches[0][0], ways[dist.get_rank()])
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        # Rounding of sums over ranks in another order, over seven steps.
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-4, atol=1e-6)


def make(mode: str = EAGER) -> tuple[Any, Any]:
    model = fully_shard_model(parity.build(Branches), short_mesh(), fsdp_unit_modules=[zoo.Block])
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    return model, call


@on_ranks(2, timeout=60)
def test_the_first_time_ranks_must_agree() -> None:
    model, _ = make()
    x = torch.randn(2, 8)
    without = (1,) if dist.get_rank() == 1 else ()
    with raises_everywhere(RuntimeError, "rank 0 has [3: gather 'blocks.1'], rank 1 has [3: gather 'blocks.2']"):
        model(x, without)
    model(x).backward()  # nobody has started anything that others have not
    model(x, without).backward()


@on_ranks(2, timeout=60)
def test_a_way_that_only_one_rank_takes() -> None:
    """What was never in any order cannot be made up by the others."""
    model, _ = make()
    x = torch.randn(2, 8)
    model(x, (2,)).backward()
    without = () if dist.get_rank() == 1 else (2,)
    with raises_everywhere(RuntimeError):
        model(x, without).backward()
    model.reset()
    model(x, (2,)).backward()
    model(x).backward()  # all ranks at once: agreed
    model(x, without).backward()


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=60)
def test_a_backward_that_one_rank_leaves_out(mode: str) -> None:
    """``if not loss.isfinite(): continue`` on one rank."""
    model, call = make(mode)
    x = torch.randn(2, 8)
    for _ in range(2):
        call(x).backward()
    loss = call(x)
    if dist.get_rank() == 1:
        with raises_everywhere(RuntimeError, "Forwards and backwards", "rank 0 did not come", "skip"):
            call(x)
    else:
        with raises_everywhere(RuntimeError):
            loss.backward()
            raise AssertionError("backward got gathers of the next forward")
    del loss
    model.reset()
    call(x).backward()


@on_ranks(2, timeout=60)
def test_blocks_compiled_by_themselves_cannot_be_skipped() -> None:
    model, _ = make()
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": AOT_EAGER})
    x = torch.randn(2, 8)
    for _ in range(2):
        model(x).backward()
    if dist.get_rank() == 1:
        with raises_everywhere(RuntimeError, "cannot skip", "blocks.1"):
            model(x, (1,)).backward()
    else:
        with raises_everywhere(RuntimeError):
            model(x).backward()
    model.reset()
    model(x).backward()


@on_ranks(2, timeout=60)
def test_agreements_are_few() -> None:
    """None after the first step; one for whatever is new."""
    model, _ = make()
    topics: list[str] = []
    real = model.sharded.agree

    def counted(topic: str, lines: Any) -> None:
        topics.append(topic)
        real(topic, lines)

    for part in (model.sharded._phases, model.sharded.eager._forward, model.sharded.eager._backward):
        part._agree = counted
    x = torch.randn(2, 8)
    model(x).backward()
    buckets = 6
    # Each gather, in both; each reduction; that there are no more, and what has begun, in both. Backward has a unit left.
    assert topics.count("Order of collectives") == 3 * buckets - 1 + 2
    assert topics.count("Forwards and backwards") == 2
    topics.clear()
    for _ in range(3):
        model(x).backward()
    assert topics == ["Forwards and backwards"]  # forward after backward
    topics.clear()
    model.eval()
    for _ in range(3):
        with torch.no_grad():
            model(x)
    assert topics.count("Order of collectives") == buckets + 1
    assert topics.count("Forwards and backwards") == 2  # evaluation after backward, evaluation after evaluation


# -- the parts --------------------------------------------------------------------------------------------------------


def test_launch_order() -> None:
    agreed: list[list[str]] = []
    order = LaunchOrder(lambda topic, lines: agreed.append(list(lines)))
    a, b, c, d = (Entry("gather", name) for name in "abcd")
    assert order.follow(a) == ()  # nothing under way
    assert order.end() == ()
    order.begin("x")
    for entry in (a, b, a, c):
        assert order.follow(entry) == ()
    assert order.end() == ()
    assert agreed == [["1: gather 'a'"], ["2: gather 'b'"], ["3: gather 'a'"], ["4: gather 'c'"], ["5: the end"]]
    agreed.clear()
    order.begin("x")
    assert order.follow(b) == (a,)
    assert order.follow(c) == (a,)
    assert order.end() == ()
    order.begin("x")
    assert order.end() == (a, b, a, c)
    order.begin("x")
    assert order.follow(a) == ()
    order.drop()
    assert order.end() == ()
    assert not agreed
    order.begin("x")
    assert order.follow(a) == ()
    assert order.follow(d) == ()  # agreed to depart: recorded anew
    assert order.follow(b) == ()
    assert order.end() == ()
    assert len(agreed) == 3  # to depart, the next one, the end
    order.begin("x")
    assert order.follow(b) == (a, d)


def test_what_others_do_not_agree_on() -> None:
    def refuse(topic: str, lines: Any) -> None:
        raise RuntimeError("rank 7 did not come")

    order = LaunchOrder(lambda topic, lines: None)
    order.begin("x")
    order.follow(Entry("gather", "a"))
    order.end()
    order._agree = refuse
    order.begin("x")
    with pytest.raises(RuntimeError, match=r"gather 'b', where usually gather 'a' follows: rank 7 did not come"):
        order.follow(Entry("gather", "b"))
    phases = Phases(refuse)
    with pytest.raises(RuntimeError, match=r"begins a forward, which it has not done before: rank 7"):
        phases.enter("a forward")
    known = copy.copy(phases)
    known._agree = lambda topic, lines: None
    known.enter("a forward")
    known._agree = refuse
    known.forget()
    known.enter("a forward")
    with pytest.raises(RuntimeError, match="a forward after a forward"):
        known.enter("a forward")
