"""Parameters that hooks and functions read in backward, from modules and from lists of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER, FACE
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fully_shard_model

SIZE = 6


class Product(torch.autograd.Function):
    """A product that keeps its module, not the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, module: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient @ ctx.module.weight, gradient.t() @ x if ctx.needs_input_grad[1] else None, None


class Block(nn.Module):
    """Reads its weight in backward, in a product or with the gradient's own shape.

    Args:
        how: Where it reads it.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "function":
            return x + torch.tanh(Product.apply(x, self.linear.weight, self.linear) + self.linear.bias)
        y = self.linear(x)
        if y.requires_grad and self.how == "product":
            y.register_hook(lambda gradient: gradient + 0.1 * gradient @ self.linear.weight)
        if y.requires_grad and self.how == "sum":
            y.register_hook(lambda gradient: gradient * (1 + (gradient * self.linear.weight).sum()))
        return x + torch.tanh(y)


class Net(nn.Module):
    def __init__(self, how: str, count: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(Block(how) for _ in range(count))
        self.head = nn.Linear(SIZE, 3)
        if how == "module hook":
            for block in self.blocks:
                block.linear.register_full_backward_hook(lambda m, its, of: (its[0] + 0.1 * of[0] @ m.weight,))
        if how == "others":  # which have been reduced, or are about to be
            self.enter.register_full_backward_pre_hook(lambda m, of: (of[0] @ self.blocks[0].linear.weight,))
            self.blocks[0].register_full_backward_pre_hook(
                lambda m, of: (of[0] + of[0] @ self.head.weight.t() @ self.head.weight,)
            )
            self.head.register_full_backward_pre_hook(
                lambda m, of: (of[0] @ self.head.weight @ self.enter.weight[:, :3],)
            )

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def compare(mode: str, build: Callable[[], nn.Module], run: Callable[[Any, Tensor], Any]) -> nn.Module:
    """Run a program that calls backward, sharded and in one process, and compare gradients.

    Return the sharded model.
    """
    rank, batch = dist.get_rank(), parity.batches(1, (SIZE, SIZE))[0]
    model, call = parity.shard_by(mode, parity.build(build))
    alone = parity.build(build)
    for _ in range(2):
        run(call, batch[rank])
        for x in batch:
            run(alone, x)
    for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        if its.grad is not None:
            parity.close(name, mine.grad.full_tensor(), its.grad / len(batch))
    return model


def squares(model: Any, x: Tensor) -> None:
    model(x).pow(2).mean().backward()


@pytest.mark.long_if("*-aot_eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, FACE])
@on_ranks(2, timeout=90)
def test_modules_have_whole_parameters_in_backward(mode: str) -> None:
    hooks_are_traced = mode == AOT_EAGER
    for how in ("function", "product", "sum", "module hook", "others"):
        if hooks_are_traced and how in ("product", "sum"):
            continue  # compiled code computes with the marker's value, as in forward
        for frozen in (False, True):

            def build(how: str = how, frozen: bool = frozen) -> nn.Module:
                net = Net(how)
                net.blocks.requires_grad_(not frozen)
                return net

            compare(mode, build, squares)


@on_ranks(2, timeout=60)
def test_what_backward_has_read_is_released() -> None:
    """Also what it reads after the bucket's gradients were reduced."""
    net = Net("none", count=4)
    model = fully_shard_model(net, fsdp_unit_modules=[Block])
    eager = model.sharded.eager

    def read_all(*_: Any) -> None:
        for block in [*reversed(net.blocks), *net.blocks]:
            assert block.linear.weight.sum().shape == ()

    for block in net.blocks:
        block.register_full_backward_hook(read_all)
    for _ in range(2):
        model(torch.ones(2, SIZE, requires_grad=True)).sum().backward()
        assert not eager.gathering.gathered
    done = [block.linear._mfsdp_homes["weight"].bucket for block in net.blocks]
    counts: list[int] = []

    def read_again(*_: Any) -> None:
        read_all()
        counts.append(len({*done} & {*eager.gathering.gathered}))

    net.enter.register_full_backward_hook(read_again)
    model(torch.ones(2, SIZE, requires_grad=True)).sum().backward()
    assert counts == [1]


@on_ranks(2, timeout=60)
def test_writes_in_backward_are_refused() -> None:
    net = Net("none")
    model = fully_shard_model(net, fsdp_unit_modules=[Block])
    before = [param.to_local().clone() for param in model.parameters()]
    for place in (net.head, net.blocks[0], net.enter):  # before, around and after the reductions
        for frozen in (False, True):
            net.blocks.requires_grad_(not frozen)

            def write(*_: Any) -> None:
                with torch.no_grad():
                    net.blocks[1].linear.weight.mul_(2)

            handle = place.register_full_backward_hook(write)
            loss = model(torch.ones(2, SIZE, requires_grad=True)).sum()
            with parity.raises_everywhere(RuntimeError, "wrote to a parameter of 'blocks.1'"):
                loss.backward()
            handle.remove()
            model.reset()
            model(torch.ones(2, SIZE)).sum().backward()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.to_local(), value)


@on_ranks(2, timeout=60)
def test_a_read_on_one_rank_is_found() -> None:
    net = Net("none")
    model = fully_shard_model(net, fsdp_unit_modules=[Block])
    model(torch.ones(2, SIZE)).sum().backward()
    if dist.get_rank() == 0:
        net.enter.register_full_backward_hook(lambda *_: print(net.head.weight.sum()))
    loss = model(torch.ones(2, SIZE, requires_grad=True)).sum()
    with parity.raises_everywhere(RuntimeError, "rank"):
        loss.backward()
        model(torch.ones(2, SIZE))
    model.reset()


@on_ranks(2, timeout=60)
def test_hooks_of_parameters_see_shards() -> None:
    """They work as between steps: masks, and an optimizer's step."""
    mask = torch.arange(SIZE * SIZE).view(SIZE, SIZE).remainder(3).eq(0).float()

    def run(model: Any, x: Tensor) -> None:
        net = getattr(model, "module", model)
        linear, found = net.blocks[0].linear, []

        def step(param: Tensor) -> None:
            assert linear.weight is param
            found.append((linear.weight * mask + linear.weight.grad * mask).sum())

        handles = [
            linear.weight.register_hook(lambda gradient: gradient * mask),
            linear.weight.register_post_accumulate_grad_hook(step),
        ]
        squares(model, x)
        assert found
        for handle in handles:
            handle.remove()

    compare(EAGER, lambda: Net("none"), run)


@on_ranks(2, timeout=60)
def test_shards_do_not_mix_with_a_ranks_own_values_in_backward() -> None:
    net = Net("none")
    model = fully_shard_model(net, fsdp_unit_modules=[Block])
    weight = dict(net.named_parameters())["blocks.0.linear.weight"]
    own = torch.full((SIZE, SIZE), float(dist.get_rank()))
    x = torch.ones(2, SIZE, requires_grad=True)
    for combine in (
        lambda: (weight * own).sum(),
        lambda: (weight * own[0, 0]).sum(),
        lambda: weight.detach().lerp_(weight.square(), own[:1, :1]),
        lambda: torch._foreach_add([weight], [own]),
        lambda: torch._foreach_mul([weight], own[0, 0]),
        lambda: torch.equal(weight, own),
        lambda: weight.detach().copy_(own),
        lambda: weight.t() * own,
        lambda: weight.detach()[0].copy_(own[0]),
        lambda: weight[own[0].long()],
        lambda: weight.detach().index_put_((torch.tensor([0]),), own[0]),
    ):
        handle = net.head.register_full_backward_hook(lambda *_, combine=combine: print(combine()))
        loss = model(x).sum()
        with parity.raises_everywhere(RuntimeError, "'blocks.0.linear.weight', of which this is one rank's shard"):
            loss.backward()
        handle.remove()
        model.reset()

    for write in (
        lambda norm: norm.detach().add_(own[0, 0]),
        lambda norm: norm.detach().copy_(own[0, 0]),
        lambda norm: torch._foreach_mul_([norm.detach()], own[0, 0]),
        lambda norm: norm.detach().expand(2).clone().index_put_((torch.tensor([0]),), own[0, :1]),
    ):
        handle = net.head.register_full_backward_hook(lambda *_, write=write: print(write(weight.norm())))
        loss = model(x).sum()
        with parity.raises_everywhere(RuntimeError, "to a result that is the same on every rank"):
            loss.backward()
        handle.remove()
        model.reset()

    whole = weight.full_tensor()
    found: list[tuple[Any, Tensor]] = []

    def use(*_: Any) -> None:
        """What no rank's own value is in is the same on all ranks; what one is in is ordinary."""
        norm, scale = weight.norm(), distribute_tensor(own[0, 0].clone(), weight.device_mesh, [Replicate()])
        found.extend(
            [
                ((weight * 2.0).norm() * weight.sum(), (whole * 2).norm() * whole.sum()),
                ((weight * scale).sum(), torch.zeros(())),
                (own.clone().add_(weight), own + whole),
                (norm * own[0, 0], whole.norm() * dist.get_rank()),
                (norm.expand(2)[own[0, :1].long()], whole.norm()[None]),
                (torch.where(own[0, 0] > 0, norm, 0.0), whole.norm() * dist.get_rank()),
            ]
        )

    net.head.register_full_backward_hook(use)
    model(x).sum().backward()
    assert [type(mine) is Tensor for mine, _ in found] == [False, False, True, True, True, True]
    for mine, expected in found:
        torch.testing.assert_close(mine if type(mine) is Tensor else mine.full_tensor(), expected)


@on_ranks(2, timeout=60)
def test_shards_do_not_mix_with_the_gradients_of_a_function() -> None:
    class Scaled(torch.autograd.Function):
        """Reads a shard that it was not passed, and multiplies it with a sum over this rank's gradients."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * (weight.detach() * gradient.sum()).sum().full_tensor()

    net = Net("none")
    model = fully_shard_model(net, fsdp_unit_modules=[Block])
    weight = dict(net.named_parameters())["blocks.0.linear.weight"]
    net.head.register_forward_pre_hook(lambda _, args: (Scaled.apply(args[0]),))
    with parity.raises_everywhere(RuntimeError, "with an ordinary tensor of shape ()"):
        model(torch.ones(2, SIZE) * (1 + dist.get_rank())).sum().backward()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="penalties at rest need torch 2.13")
@on_ranks(2, timeout=60)
def test_derivatives_of_penalties_mix_shards_with_what_is_equal_on_all_ranks() -> None:
    mask = torch.arange(SIZE * SIZE).view(SIZE, SIZE).remainder(3).float()

    def run(model: Any, x: Tensor) -> None:
        weight = getattr(model, "module", model).blocks[0].linear.weight
        penalty = (weight.pow(3) * mask).sum() + checkpoint(lambda: (weight * mask).pow(2).mean(), use_reentrant=False)
        (model(x).pow(2).mean() + penalty).backward()

    compare(EAGER, lambda: Net("product"), run)


@on_ranks(2, timeout=60)
def test_hooks_run_in_differentiated_backwards() -> None:
    """The gradient of what a hook has computed flows into the parameter that it has read."""

    def run(model: Any, x: Tensor) -> None:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).pow(2).mean(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    for how in ("product", "sum", "others"):
        compare(EAGER, lambda how=how: Net(how), run)
