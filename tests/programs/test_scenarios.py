"""Ways of running a model: microbatches, shapes, modes, several models, block-wise compilation, graph breaks."""

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
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.planning import forecast
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.file import ScheduleText

MODES = [EAGER, AOT_EAGER]


@pytest.mark.long
@on_ranks(4)
def test_four_ranks() -> None:
    data = parity.batches(steps=3)
    for factory in (zoo.Plain, zoo.Uneven, zoo.FrozenParameters):
        parity.train_both_ways(factory, data, alone=parity.train_alone(factory, data, parity.sgd))


@pytest.mark.long
@pytest.mark.parametrize("factory", [zoo.Uneven, zoo.Scalars])
@on_ranks(3)
def test_three_ranks(factory: type[nn.Module]) -> None:
    data = parity.batches(steps=2)
    parity.train_both_ways(factory, data, alone=parity.train_alone(factory, data, parity.sgd))


@pytest.mark.long
@on_ranks(1)
def test_one_rank_is_plain_training() -> None:
    data = parity.batches(steps=2)
    alone = parity.train_alone(zoo.Plain, data, parity.sgd)
    for mode in MODES:
        parity.assert_close(parity.train_sharded(zoo.Plain, mode, data, parity.sgd), alone, 1e-6)


@pytest.mark.long
@on_ranks(2)
def test_microbatches_accumulate() -> None:
    data = parity.batches(steps=2, shape=(6, 8))
    alone = parity.train_alone(zoo.Plain, data, parity.sgd, microbatches=3)
    parity.train_both_ways(zoo.Plain, data, alone=alone, microbatches=3)


@pytest.mark.long
@on_ranks(2)
def test_units_in_several_buckets_train_alike() -> None:
    """With one or two parameters per bucket, training gives the same bits, because sums are over two ranks."""
    data = parity.batches(steps=2)
    for factory in (zoo.Plain, zoo.FrozenParameters):
        whole = parity.train_sharded(factory, EAGER, data, parity.sgd)
        for most in (1, 600):
            eager = parity.train_both_ways(factory, data, bucket_bytes=most)
            assert len(eager.model.sharded.buckets) > len(whole.model.sharded.buckets)
            for name, param in whole.params.items():
                assert torch.equal(param, eager.params[name]), name


@on_ranks(2)
def test_reductions_under_way_are_counted_by_unit() -> None:
    """With six buckets per block, six reductions run behind the next block's computation, not one."""
    model, _ = parity.shard(parity.build(zoo.Plain), EAGER, bucket_bytes=1)
    runtime = model.sharded.eager
    reduce, under_way = runtime.reducing.post_backward, []

    def counted(bucket: Any, *arguments: Any) -> None:
        reduce(bucket, *arguments)
        under_way.append((bucket.plan.unit, len(runtime.reducing.running)))

    runtime.reducing.post_backward = counted
    model(parity.batches(1)[0, dist.get_rank()]).backward()
    assert [count for unit, count in under_way if unit == "root:after"] == [1, 2, 3, 4]
    assert [count for unit, count in under_way if unit == "blocks.2"] == [5, 6, 6, 6, 6, 6]
    assert [count for unit, count in under_way if unit == "blocks.0"] == [6] * 6
    assert [count for unit, count in under_way if unit == "root:before"][-1] == 2


@pytest.mark.long
@on_ranks(2)
def test_schedules_change_no_numbers() -> None:
    """Kept buckets, early gathers, budgets and schedules from files give the same bits on every rank."""
    data = parity.batches(steps=2)
    usual = parity.train_sharded(zoo.Plain, AOT_EAGER, data, parity.sgd)
    text = str(forecast.schedule_of(usual.model))
    forward, backward = text.split("[backward]")
    for options in (
        {"reshard_after_forward": False},
        {"prefetch": 0, "keep_last": False},
        {"prefetch": 3, "reductions_in_flight": 4},
        {"prefetch": "auto", "reshard_after_forward": "auto"},
        {"memory_budget": "1GiB"},
        {"schedule": ScheduleText.parse(text, "as it was")},
        {"schedule": ScheduleText.parse(f"{forward}[backward]{_without_last_gather(backward)}", "one kept")},
    ):
        torch.compiler.reset()
        other = parity.train_sharded(zoo.Plain, AOT_EAGER, data, parity.sgd, **options)
        parity.assert_bitwise(usual, other)


def _without_last_gather(text: str) -> str:
    lines = text.split("\n")
    name = [line.split()[1] for line in lines if line.startswith("gather")][-1]
    return "\n".join(line for line in lines if line.split() not in (["gather", name], ["wait", name]))


@pytest.mark.long
@on_ranks(2)
def test_inductor_matches_one_process() -> None:
    data = parity.batches(steps=3)
    for factory in (zoo.Plain, zoo.Checkpointed):
        alone = parity.train_alone(factory, data, parity.sgd)
        parity.assert_close(parity.train_sharded(factory, parity.INDUCTOR, data, parity.sgd), alone)


@pytest.mark.long
@on_ranks(2)
def test_bfloat16_model_keeps_float32_shards() -> None:
    data = parity.batches(steps=2).bfloat16()

    def factory() -> nn.Module:
        return zoo.Plain().bfloat16()

    eager = parity.train_both_ways(factory, data, units=[zoo.Block])
    for param in eager.model.parameters():
        assert param.dtype == torch.float32
    # bfloat16 has 8 bits, so sums of two ranks' gradients are rounded at 2**-8 of the largest.
    parity.assert_close(eager, parity.train_alone(factory, data, parity.sgd), relative=2e-2, params=False)

    own = parity.train_sharded(
        factory, EAGER, data, parity.sgd, units=[zoo.Block], precision=MixedPrecisionPolicy(main_params_dtype=None)
    )
    assert {param.dtype for param in own.model.parameters()} == {torch.bfloat16}


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_batch_and_sequence_sizes_change(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    alone = parity.build(zoo.Plain)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for rows, length in [(4, 3), (6, 3), (2, 5), (7, 8), (3, 9)]:
        data = torch.randn(world_size, rows, length, 8, generator=torch.Generator().manual_seed(rows))
        call(data[rank]).backward()
        sum(alone(data[i]) / world_size for i in range(world_size)).backward()
        _assert_same_gradients(model.module, alone)
    if mode != EAGER:
        # One graph for the first shape, one for any number of rows, one for any length as well.
        assert len(model.sharded.compiled_graphs) <= 3


@pytest.mark.long
@on_ranks(2)
def test_ranks_may_have_different_batch_sizes() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), AOT_EAGER)
    alone = parity.build(zoo.Plain)
    data = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    parts = [data[:2], data[2:]]
    call(parts[dist.get_rank()]).backward()
    sum(alone(part) / 2 for part in parts).backward()
    _assert_same_gradients(model.module, alone)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_inference(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Dropout), mode)
    alone = parity.build(zoo.Dropout)
    x = torch.randn(4, 8)
    model.eval()
    alone.eval()
    expected = alone(x).detach()
    with torch.no_grad():
        assert torch.equal(call(x), expected)
    with torch.inference_mode():
        assert torch.equal(call(x), expected)
    assert all(param.grad is None for param in model.parameters())
    # Training continues.
    call(x).backward()
    alone(x).backward()
    _assert_same_gradients(model.module, alone)
    with torch.no_grad():
        assert torch.equal(call(x), expected)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_forward_without_backward_leaves_nothing_gathered(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    call(torch.randn(4, 8))
    with torch.no_grad():
        call(torch.randn(4, 8))
    assert not model.sharded.eager.gathering.gathered


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_two_models_in_one_process(mode: str) -> None:
    """A generator and a discriminator train against each other, with gradients that flow from one into the other."""
    pairs = [(parity.build(zoo.Plain, 0), parity.build(zoo.Plain, 1)) for _ in range(2)]
    (one, other), (one_alone, other_alone) = pairs
    one, call_one = parity.shard(one, mode)
    other, call_other = parity.shard(other, mode)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = parity.batches(1)[0]

    def loss(f: Callable[..., Tensor], g: Callable[..., Tensor], x: Tensor) -> Tensor:
        return g(x * f(x)) + f(x + 1)

    for _ in range(2):
        loss(call_one, call_other, data[rank]).backward()
        sum(loss(one_alone, other_alone, data[i]) / world_size for i in range(world_size)).backward()
        _assert_same_gradients(one.module, one_alone)
        _assert_same_gradients(other.module, other_alone)


@pytest.mark.long
@on_ranks(2)
def test_models_of_one_class_that_reduce_otherwise() -> None:
    """Models of one class do not share compiled code if one sums over ranks and the other averages."""
    x = parity.batches(1)[0][dist.get_rank()]
    found = []
    for arguments in ({}, {"calculate_per_token_loss": True}):
        model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], **arguments)
        torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})(x).backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    for mean, total in zip(*found, strict=True):
        assert torch.equal(mean * 2, total)


@pytest.mark.long
@on_ranks(2)
def test_two_models_in_one_compiled_function() -> None:
    one = fully_shard_model(parity.build(zoo.Plain, 0), fsdp_unit_modules=[zoo.Block])
    other = fully_shard_model(parity.build(zoo.Plain, 1), fsdp_unit_modules=[zoo.Block])
    alone = parity.build(zoo.Plain, 0), parity.build(zoo.Plain, 1)

    def step(x: Tensor) -> Tensor:
        return one(x) * other(x)

    compiled = torch.compile(step, backend="mfsdp", options={"inner": "aot_eager"}, fullgraph=True)
    data = parity.batches(1)[0]
    compiled(data[dist.get_rank()]).backward()
    sum(alone[0](x) * alone[1](x) / len(data) for x in data).backward()
    _assert_same_gradients(one.module, alone[0])
    _assert_same_gradients(other.module, alone[1])


@pytest.mark.long
@on_ranks(2)
def test_blocks_compiled_one_by_one_share_a_graph() -> None:
    model = fully_shard_model(parity.build(lambda: zoo.Plain(layers=6)), fsdp_unit_modules=[zoo.Block])
    alone = parity.build(lambda: zoo.Plain(layers=6))
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": "aot_eager"}, fullgraph=True)
    data = parity.batches(2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for batch in data:
        model(batch[rank]).backward()
        sum(alone(x) / world_size for x in batch).backward()
        _assert_same_gradients(model.module, alone)
    assert len(model.sharded.compiled_graphs) == 1
    assert not model.sharded.eager.gathering.gathered


@pytest.mark.long
@on_ranks(2)
def test_equal_modules_in_different_units_get_code_of_their_own() -> None:
    """Modules of the same class and shapes in different buckets do not share a graph of Dynamo."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = zoo.Block()
            self.rest = nn.ModuleList([zoo.Block(), zoo.Block()])

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            for block in self.rest:
                x = block(x)
            return x.pow(2).mean()

    model = fully_shard_model(parity.build(Small), fsdp_unit_modules=[nn.Linear])
    alone = parity.build(Small)
    for block in [model.module.one, *model.module.rest]:
        block.compile(backend="mfsdp", options={"inner": "aot_eager"})
    data = parity.batches(1, shape=(6, 16))[0]
    model(data[dist.get_rank()]).backward()
    sum(alone(x) / len(data) for x in data).backward()
    _assert_same_gradients(model.module, alone)


@on_ranks(2)
def test_loss_over_several_forwards() -> None:
    """One backward can go through two calls of the model."""
    for mode in MODES:
        model, call = parity.shard(parity.build(zoo.Plain), mode)
        alone = parity.build(zoo.Plain)
        data = parity.batches(2)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        (call(data[0][rank]) * call(data[1][rank])).backward()
        sum(alone(data[0][i]) * alone(data[1][i]) / world_size for i in range(world_size)).backward()
        _assert_same_gradients(model.module, alone)


@pytest.mark.long
@on_ranks(2)
def test_gradients_of_inputs() -> None:
    for mode in MODES:
        model, call = parity.shard(parity.build(zoo.Plain), mode)
        alone = parity.build(zoo.Plain)
        x = torch.randn(4, 8, requires_grad=True)
        (mine,) = torch.autograd.grad(call(x), x)
        (its,) = torch.autograd.grad(alone(x), x)
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)
        assert all(param.grad is None for param in model.parameters())
        assert not model.sharded.eager.gathering.gathered


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_parameter_returned_from_forward(mode: str) -> None:
    class Returns(zoo.Plain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.head.weight

    model, call = parity.shard(parity.build(Returns), mode, units=[zoo.Block])
    alone = parity.build(Returns)
    data = parity.batches(1)[0]
    loss, weight = call(data[dist.get_rank()])
    assert torch.equal(weight, alone.head.weight)
    (loss + weight.sum()).backward()
    for x in data:
        loss, weight = alone(x)
        ((loss + weight.sum()) / len(data)).backward()
    _assert_same_gradients(model.module, alone)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_copy_of_a_model_is_its_own(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Tied), mode)
    data = parity.batches(1)[0]
    call(data[dist.get_rank()]).backward()
    twin = copy.deepcopy(model)
    call_twin = twin if mode == EAGER else torch.compile(twin, backend="mfsdp", options={"inner": mode})
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        kept = mine.grad.full_tensor()
        its.grad.mul_(2)
        assert torch.equal(mine.grad.full_tensor(), kept)
        mine.grad = its.grad = None
    before = {name: param.full_tensor() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    call_twin(data[dist.get_rank()]).backward()
    assert all(param.grad is None for param in model.parameters())
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), before[name])
    alone = parity.build(zoo.Tied)
    sum(alone(x) / len(data) for x in data).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for name, param in twin.module.named_parameters():
        torch.testing.assert_close(param.full_tensor(), dict(alone.named_parameters())[name], rtol=1e-5, atol=1e-7)
    assert twin.module.head.weight is twin.module.enter.weight  # still tied
    call(data[dist.get_rank()]).backward()


@on_ranks(2)
def test_copy_of_a_model_of_leaf_units() -> None:
    """Units without modules inside: a copy reaches their buckets before the eager path."""

    def gradients(model: Any) -> list[Tensor]:
        model(parity.batches(1)[0, dist.get_rank()]).backward()
        return [param.grad.to_local().clone() for param in model.parameters()]

    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[nn.Linear])
    twin = copy.deepcopy(model)
    assert all(map(torch.equal, gradients(model), gradients(twin)))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert all(param.to_local().any() for param in twin.module.head.parameters() if param.to_local().numel())


@on_ranks(2)
def test_compiled_optimizer_step() -> None:
    """A compiled optimizer step works. Dynamo leaves it to Python, because it would take shards for plain DTensors."""
    model, call = parity.shard(parity.build(zoo.Uneven), EAGER)
    alone = parity.build(zoo.Uneven)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True) for m in (model, alone)]
    step = torch.compile(optimizers[0].step, backend="aot_eager")
    data = parity.batches(3)
    for batch in data:
        call(batch[dist.get_rank()]).backward()
        sum(alone(x) / len(batch) for x in batch).backward()
        step()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    for name, param in model.module.named_parameters():
        # Adam makes steps of about lr from gradients of any size, so the bound is 1e-3 of one step.
        torch.testing.assert_close(param.full_tensor(), alone.get_parameter(name), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@on_ranks(2)
def test_penalty_on_weights_in_compiled_code() -> None:
    model, _ = parity.shard(parity.build(zoo.Uneven), EAGER)
    alone = parity.build(zoo.Uneven)

    def loss(each: nn.Module, x: Tensor) -> Tensor:
        penalty = sum(param.detach().pow(2).mean() for param in each.parameters())
        return each(x) * (1 + penalty)

    data = parity.batches(1)[0]
    compiled = torch.compile(loss, backend="mfsdp", options={"inner": "aot_eager"})
    compiled(model, data[dist.get_rank()]).backward()
    sum(loss(alone, x) / len(data) for x in data).backward()
    _assert_same_gradients(model.module, alone)

    torch._dynamo.reset()  # Dynamo remembers to skip the function, also under fullgraph
    with parity.raises_everywhere(Exception, "is sharded over 2 ranks", "fullgraph"):
        torch.compile(loss, backend="mfsdp", fullgraph=True)(model, data[0])
    model(data[dist.get_rank()]).backward()  # the model is unchanged


@on_ranks(2)
def test_hooks_of_parameters_run() -> None:
    for mode in MODES:
        model, call = parity.shard(parity.build(zoo.Plain), mode)
        alone = parity.build(zoo.Plain)
        seen = []
        for each in (model.module, alone):
            each.head.weight.register_hook(lambda grad: grad * 2)
        # Hooks get a copy.
        model.module.enter.weight.register_hook(lambda grad: None if grad.zero_() is grad else grad)
        model.module.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor()))
        data = parity.batches(1)[0]
        call(data[dist.get_rank()]).backward()
        sum(alone(x) / len(data) for x in data).backward()
        _assert_same_gradients(model.module, alone)
        torch.testing.assert_close(seen[0], alone.head.weight.grad, rtol=1e-5, atol=1e-7)


def _assert_same_gradients(model: nn.Module, alone: nn.Module) -> None:
    """Assert equality up to rounding of sums in another order: 1e-5 of the largest gradient."""
    expected = dict(alone.named_parameters())
    scale = max(p.grad.abs().max().item() for p in expected.values() if p.grad is not None and p.grad.numel())
    for name, param in model.named_parameters():
        other = expected[name].grad
        assert (param.grad is None) == (other is None), name
        if other is not None:
            difference = (param.grad.full_tensor() - other).abs()
            assert not difference.numel() or difference.max().item() <= 1e-5 * scale, name
