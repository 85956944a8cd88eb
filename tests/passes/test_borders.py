"""Cheap computation is moved across waits: the numbers stay, and no more memory crosses borders."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from mfsdp_compile.backend import pieces
from mfsdp_compile.passes import borders, roles
from mfsdp_compile.passes.context import Context
from mfsdp_compile.passes.stretches import divide
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

CONTEXT = Context((), SchedulePolicy(), whole_model=False, in_pieces=True)
convert = torch.ops.prims.convert_element_type.default
wait = torch.ops._c10d_functional.wait_tensor.default
"""Returns what no collective writes as it is."""


def traced(function: Callable[..., object], *inputs: Tensor) -> fx.GraphModule:
    # Fake tensors give each node its value; constants stay operators.
    return make_fx(function, tracing_mode="fake")(*inputs)


def crossing(graph: fx.Graph) -> int:
    """Return the bytes that stretches read of others' results: each value once per stretch."""
    divided = divide(graph)
    read = set()
    for stretch in divided.stretches:
        for leaf in (
            leaf for node in stretch.nodes for source in node.all_input_nodes for leaf in divided.leaves(source)
        ):
            if divided.stretch_of.get(leaf, stretch) is not stretch:
                read.add((leaf, stretch))
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node, _ in read)


def applied(module: fx.GraphModule) -> fx.GraphModule:
    borders.apply(module.graph, CONTEXT, Phase.FORWARD)
    module.graph.lint()
    module.recompile()
    return module


def stretch_number(module: fx.GraphModule, target: object) -> list[int]:
    """Return the numbers of the stretches that call an operator."""
    stretches = divide(module.graph).stretches
    return [number for number, each in enumerate(stretches) for node in each.nodes if node.target is target]


def test_a_norm_follows_the_wait_for_its_weight() -> None:
    def layer(x: Tensor, y: Tensor, first: Tensor, shard: Tensor, second: Tensor) -> Tensor:
        h = x @ first + y
        normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * wait(shard)) @ second

    inputs = [torch.randn(64, 64) for _ in range(3)] + [torch.randn(64), torch.randn(64, 64)]
    module = traced(layer, *inputs)
    expected = layer(*inputs)
    assert stretch_number(module, torch.ops.aten.rsqrt.default) == [0]
    assert stretch_number(applied(module), torch.ops.aten.rsqrt.default) == [1]
    assert stretch_number(module, torch.ops.aten.mm.default) == [0, 1]  # products stay
    assert torch.equal(module(*inputs), expected)


def test_a_cast_is_computed_again() -> None:
    def cast(x: Tensor, shard: Tensor) -> Tensor:
        wide = convert(x, torch.float32)
        (a := wide @ wide)
        b = wait(shard)
        return (wide + b) @ a

    inputs = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64)
    module = traced(cast, *inputs)
    expected = cast(*inputs)
    before = crossing(module.graph)
    assert before - crossing(applied(module).graph) == 64 * 64 * 4  # x is an input, and is read instead
    assert torch.equal(module(*inputs), expected)


def test_a_sum_is_not_kept_from_freeing_what_it_sums() -> None:
    def bias(x: Tensor, w: Tensor, shard: Tensor) -> Tensor:
        total = (x @ w).sum(0)
        return wait(shard) + total

    inputs = torch.randn(256, 64), torch.randn(64, 64), torch.randn(64)
    module = applied(traced(bias, *inputs))
    assert stretch_number(module, torch.ops.aten.sum.dim_IntList) == [0]


def test_a_part_of_a_whole_bucket_is_copied() -> None:
    """The bucket is not kept for what is computed again."""

    def weighted(x: Tensor, shard: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        whole = wait(shard)
        scaled = convert(x @ x, torch.float32) * convert(whole[:64], torch.float32)
        total = scaled.sum(0)
        return total, (wait(other) + scaled) @ x.float()

    inputs = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(8192).bfloat16(), torch.randn(64)
    module = traced(weighted, *inputs)
    expected = weighted(*inputs)
    before = crossing(module.graph)
    assert crossing(applied(module).graph) < before
    (whole,) = (node for node in module.graph.nodes if node.target is wait and node.meta["val"].numel() == 8192)
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    later = next(node for node in module.graph.nodes if node.target is wait and node is not whole)
    readers = [user for view in whole.users for user in view.users]
    assert all(order[user] < order[later] for user in readers)
    assert [torch.equal(x, y) for x, y in zip(module(*inputs), expected, strict=True)] == [True, True]


def test_what_is_written_is_read_in_its_place() -> None:
    def writes(x: Tensor, seen: Tensor, shard: Tensor) -> Tensor:
        before = seen.exp()
        torch.ops.aten.copy_.default(seen, x)
        return wait(shard) * before + seen.sin()

    inputs = [torch.randn(64, 64) for _ in range(3)]
    expected_seen = inputs[0].clone()
    expected = inputs[2] * inputs[1].exp() + inputs[0].sin()
    module = applied(traced(writes, *inputs))
    assert torch.equal(module(*inputs), expected)
    assert torch.equal(inputs[1], expected_seen)


def test_a_part_of_what_is_written_is_not_copied() -> None:
    def writes(x: Tensor, seen: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
        row = seen[:1]
        torch.ops.aten.copy_.default(seen, x)
        scaled = convert(x @ x, torch.float32) * row
        return scaled.sum(0), (wait(shard) + scaled) @ x.float()

    inputs = torch.randn(64, 64, dtype=torch.bfloat16), torch.randn(64, 64), torch.randn(64)
    expected = writes(*(each.clone() for each in inputs))
    module = applied(traced(writes, *inputs))
    assert [torch.equal(x, y) for x, y in zip(module(*inputs), expected, strict=True)] == [True, True]


def test_random_numbers_are_drawn_once() -> None:
    def draws(x: Tensor, shard: Tensor) -> Tensor:
        mask = torch.bernoulli(x.sigmoid())
        (a := mask @ x)
        return (wait(shard) + mask) @ a

    module = applied(traced(draws, torch.randn(64, 64), torch.randn(64)))
    assert [node.target for node in module.graph.nodes].count(torch.ops.aten.bernoulli.default) == 1


KINDS = ("elementwise", "binary", "cast", "sum", "product", "wait", "wait", "view", "slice", "write", "narrow")


def test_numbers_that_are_read_from_tensors() -> None:
    """What is computed from them stays behind them."""

    def scaled(x: Tensor, flag: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ x
        c = wait(shard)
        return a * flag.sum().item(), c

    inputs = torch.randn(64, 64), torch.ones(3), torch.randn(64)
    expected = scaled(*inputs)
    module = applied(make_fx(scaled, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs))
    for x, y in zip(module(*inputs), expected, strict=True):
        assert torch.equal(x, y)


def test_sizes_are_symbols() -> None:
    """An elementwise value is computed again from a size; a sum of unknown size stays."""

    def averaged(x: Tensor, y: Tensor, shard: Tensor) -> tuple[Tensor, Tensor]:
        mean = y * x.shape[0]
        total = (x * 2).mean(-1, keepdim=True)
        return wait(shard) + mean, (wait(shard) + mean) @ mean + total.sum()

    inputs = torch.randn(24, 4096), torch.randn(64, 64), torch.randn(64)
    module = make_fx(averaged, tracing_mode="symbolic")(*inputs)
    expected = averaged(*inputs)
    assert stretch_number(applied(module), torch.ops.aten.mean.dim) == [0]
    for x, y in zip(module(*inputs), expected, strict=True):
        assert torch.equal(x, y)


def test_each_value_is_read_before_its_memory_is_written() -> None:
    """Values that move together move to different stretches."""

    def writes(x: Tensor, at_rest: Tensor, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        whole = wait(at_rest)
        twice = x * 2
        scaled = twice * whole[:64]
        first = wait(one) + twice + whole[64:128]
        torch.ops.aten.zero_.default(at_rest)
        return first @ x, (wait(other) + scaled) @ x

    inputs = torch.randn(64, 64), torch.randn(128), torch.randn(64), torch.randn(64)
    expected = writes(*(each.clone() for each in inputs))
    module = applied(traced(writes, *inputs))
    for x, y in zip(module(*(each.clone() for each in inputs)), expected, strict=True):
        assert torch.equal(x, y)


def test_elements_stay_behind_what_returns_them() -> None:
    def normed(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        h = x @ x
        variance, mean = torch.var_mean(h, 1, keepdim=True)
        first = (wait(one) + torch.rsqrt(variance + 1)) @ x
        return (wait(other) + h - mean) @ first

    inputs = torch.randn(64, 64), torch.randn(64), torch.randn(64)
    expected = normed(*inputs)
    module = applied(traced(normed, *inputs))
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    (variance,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.var_mean.correction)
    assert sorted(order[each] - order[variance] for each in variance.users) == [1, 2]
    assert torch.equal(module(*inputs), expected)


def test_each_stretch_packs_its_gradients() -> None:
    """Those of a bucket with a gap between them, and zeros in the gap and at its end."""

    def backward(x: Tensor, y: Tensor, one: Tensor, other: Tensor) -> Tensor:
        first = (x @ y).t()
        second = (wait(one) * x).sum(0)
        third = wait(other) @ y
        return wait(
            torch.ops.mfsdp.pack_gradients([third, second, first], [0, 4096, 4200], 8400, torch.float32).clone()
        )

    inputs = [torch.randn(64, 64) for _ in range(4)]
    module = traced(backward, *inputs)
    expected = backward(*inputs)
    pieces._pack_where_computed(module.graph)
    module.recompile()
    parts = stretch_number(module, torch.ops.mfsdp.pack_into.default)
    assert parts == sorted(set(parts))
    assert len(parts) == 3
    assert torch.equal(module(*inputs), expected)


def test_long_chains() -> None:
    """Neither the depth of Python's stack nor the time grows with their length."""

    def chained(x: Tensor, shard: Tensor) -> Tensor:
        for _ in range(1500):
            x = x.sin()
        product = x @ x
        return (wait(shard) + x) @ product

    module = traced(chained, torch.randn(8, 8), torch.randn(8))
    assert applied(module)


def _program(seed: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function of random operators, some with waits between them."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        draw = random.Random(seed)
        values: list[Tensor] = list(inputs)

        def pick() -> Tensor:
            return values[max(draw.randrange(len(values)), draw.randrange(len(values)))]

        for _ in range(draw.randint(8, 40)):
            kind = draw.choice(KINDS)
            x = pick()
            if kind == "elementwise":
                values.append(draw.choice((torch.sin, torch.exp, torch.relu, torch.sigmoid))(x.float()))
            elif kind == "binary":
                values.append(x * pick() + 0.5)
            elif kind == "cast":
                values.append(convert(x, torch.bfloat16 if x.dtype is torch.float32 else torch.float32))
            elif kind == "sum":
                values.append(x.float().mean(-1, keepdim=True) + torch.zeros(32, 32))
            elif kind == "product":
                values.append(x.float() @ pick().float() * 0.03)
            elif kind == "wait":
                values.append(wait(x.clone()))
            elif kind == "view":
                values.append(x.t())
            elif kind == "slice":
                values.append(x[:16].repeat(2, 1))
            elif kind == "narrow":
                values.append(x[:1] * pick())
            else:
                torch.ops.aten.copy_.default(inputs[0], x.float().cos())
        return tuple(values[-4:])

    return run


SEED = int(os.environ["MFSDP_SEED"])


@pytest.mark.parametrize("number", range(60))
def test_random_programs(number: int) -> None:
    """The numbers stay to the bit, and so do writes. What crosses borders does not grow."""
    program = _program(SEED + number)
    inputs = [torch.randn(32, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    module = traced(program, *[each.clone() for each in inputs])
    module.graph.eliminate_dead_code()
    mine, its = ([each.clone() for each in inputs] for _ in range(2))
    expected = fx.Interpreter(module).run(*its)
    before = [node.target for node in module.graph.nodes if node.target is wait]
    applied(module)
    assert [node.target for node in module.graph.nodes if node.target is wait] == before
    found: Sequence[Tensor] = fx.Interpreter(module).run(*mine)
    for x, y in zip([*found, *mine], [*expected, *its], strict=True):
        assert torch.equal(x, y) or bool((x.isnan() == y.isnan()).all()), f"MFSDP_SEED={SEED}, program {number}"


def test_nothing_moves_that_is_not_known() -> None:
    """Operators without a tag stay where they are."""

    def sorts(x: Tensor, shard: Tensor) -> Tensor:
        return wait(shard) + x.sort(0).values

    module = applied(traced(sorts, torch.randn(64, 64), torch.randn(64)))
    assert stretch_number(module, torch.ops.aten.sort.default) == [0]
    assert all(roles.is_collective(node) is False for node in module.graph.nodes)
