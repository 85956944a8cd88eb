"""Losses that use parameters outside of the model's forward, compared with one process that sees all ranks' batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mfsdp_compile import compile_step, fsdp2, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime import compat


class Net(nn.Module):
    """A model with parameters that only losses use. Some ranks hold no rows of most of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.weights = nn.Parameter(torch.tensor([0.1, -0.2]))
        self.temperature, self.scalar = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor(0.7))
        self.center, self.classes = nn.Parameter(torch.full((4,), 0.3)), nn.Parameter(torch.randn(5, 4))
        self.frozen = nn.Parameter(torch.tensor([0.4, 0.3, 0.2, 0.1]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.enter(x).tanh())


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _whole(param: Any, *placements: Any) -> Tensor:
    if not isinstance(param, DTensor):
        return param
    return param.redistribute(placements=placements).full_tensor() if placements else param.full_tensor()


def _kind(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def _buffer(m: Any, y: Tensor) -> Tensor:
    buffer = torch.zeros(4, 4)
    buffer[0] = m.center
    buffer[1:] = m.classes[:3]
    return buffer * y


def _in_place(m: Any, y: Tensor) -> Tensor:
    y = y * 1
    y += m.center
    y[:, 0] = m.center[1]
    return y.mul_(m.center.exp())


class _Fused(torch.autograd.Function):
    """A loss that computes gradients in forward, in a tensor like the weight."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        error, gradient = y @ weight.t() + bias, torch.zeros_like(weight)
        gradient += 2 * error.t() @ y
        ctx.save_for_backward(2 * error, gradient, weight)
        return error.square().sum()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        error, gradient, weight = ctx.saved_tensors
        return factor * error @ weight, factor * gradient, factor * error.sum(0)


def _labels(x: Tensor) -> list[int]:
    return [1 + int(each) for each in _kind(x)]


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "tasks": lambda m, y, x: (
        (torch.exp(-m.weights) * torch.stack([y.square().mean(), y.abs().mean()])).sum() + m.weights.sum()
    ),
    "each task": lambda m, y, x: torch.exp(-m.weights[0]) * y.square().mean() + m.weights[1] * y.abs().mean(),
    "scalar": lambda m, y, x: m.scalar.exp() * y.square().mean() - m.scalar + torch.max(m.scalar, y.mean()),
    "contrastive": lambda m, y, x: F.cross_entropy(y @ y.t() * m.temperature.exp().clamp(max=100), torch.arange(4)),
    "arcface": lambda m, y, x: F.cross_entropy(
        F.linear(F.normalize(y), F.normalize(m.classes)) / m.temperature, torch.arange(4)
    ),
    "transposed": lambda m, y, x: (F.normalize(y) @ F.normalize(m.classes).t()).logsumexp(1).mean(),
    "centers": lambda m, y, x: (
        (y - m.classes[_kind(x)]).square().sum(1).mean() + F.embedding(_kind(x), m.classes).sum()
    ),
    "distances": lambda m, y, x: (
        torch.cdist(y, m.classes).min(1)[0].mean() + F.cosine_similarity(y, m.center.unsqueeze(0)).mean()
    ),
    "also in forward": lambda m, y, x: (y @ m.head.weight).square().mean() + (y - m.head.bias).abs().mean(),
    "frozen": lambda m, y, x: (m.center * y + m.frozen).square().mean() + (m.frozen.detach() * y).mean(),
    "stack": lambda m, y, x: (
        torch.cat([m.classes, y]).square().mean() + torch.stack([m.center, y[0], m.frozen]).sin().sum()
    ),
    "where": lambda m, y, x: torch.where(y > 0, y * m.center, m.center).sum() + torch.where(m.center > 0, y, -y).mean(),
    "masked": lambda m, y, x: m.center.expand(4, 4)[y > 0].sum() + m.center.masked_fill(y[0] > 0, 0.0).square().sum(),
    "einsum": lambda m, y, x: torch.einsum("bi,ki->bk", y, m.classes).logsumexp(1).mean(),
    "attention": lambda m, y, x: F.scaled_dot_product_attention(y[None], m.classes[None], m.classes[None]).sum(),
    "layer norm": lambda m, y, x: F.layer_norm(y, (4,), m.center, m.center).square().mean(),
    "foreach": lambda m, y, x: torch._foreach_mul([m.center, m.center], [y[0], m.center])[0].sum(),
    "views": lambda m, y, x: (
        (y * m.classes[1]).mean()
        + (y[:, :2] * m.classes.t()[:, 0][:2]).sum()
        + (y.flatten() * m.classes.view(-1)[:16]).sum()
    ),
    "in place": lambda m, y, x: _in_place(m, y).square().mean(),
    "vmap": lambda m, y, x: torch.func.vmap(lambda row: (row * m.center).sum())(y).square().mean(),
    "mapped": lambda m, y, x: torch.func.vmap(lambda row: (row * m.classes[1] * m.center.norm()).sum())(y).exp().mean(),
    "derivative": lambda m, y, x: torch.func.grad(lambda z: (z * m.center).square().sum())(y).mean(),
    "buffer": lambda m, y, x: _buffer(m, y).sum().sin(),
    "own number": lambda m, y, x: (
        (m.classes * x.abs().mean()).square().sum() + (m.center * (m.center.norm() * x.abs().mean())).sum()
    ),
    "labels": lambda m, y, x: (
        sum(m.classes[label].square().sum() for label in _labels(x))
        + m.classes[: _labels(x)[0]].pow(3).sum()
        + m.classes[:, _labels(x)[0] - 1].exp().sum()
        + m.classes.roll(_labels(x)[1], 0)[0].sum()
        + x.abs().mean().item() * (m.center.norm() * m.weights.sum() ** 2).exp()
        + y.mean()
    ),
    "custom": lambda m, y, x: _Fused.apply(y, m.classes * 0.5, m.classes[:, 0]),
    "functional call": lambda m, y, x: torch.func.functional_call(m.enter, {"bias": m.enter.bias * 2}, (x,)).sum(),
    "target": lambda m, y, x: F.kl_div(y.log_softmax(1), (y.detach() + m.center).softmax(1), reduction="batchmean"),
    "penalties": lambda m, y, x: (
        y.mean() + x.abs().mean() * m.classes.square().sum() + sum(p.square().sum() for p in m.parameters())
    ),
    "full tensors": lambda m, y, x: y.mean() + _whole(m.classes).square().sum() + (_whole(m.center) * y).sum(),
    "redistributed": lambda m, y, x: (
        y.mean()
        + _whole(m.classes, Replicate()).square().sum()
        + _whole(m.classes, Shard(1)).sin().sum()
        + _whole(m.center, Shard(0)).cos().sum()
        + (_whole(m.center, Replicate()) * y).sum()
    ),
}


def compare(model: Any, module: Any, losses: Any, call: Any = None, **more: Any) -> None:
    """Compare values, gradients, and values without gradients, of losses with those of one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for number, (name, loss) in enumerate(losses.items()):
        model.zero_grad()
        alone, total, x = Net(), 0.0, batch(number, rank)
        mine = loss(module, (model if call is None else call)(x), x)
        mine.backward()
        for each in range(world):
            its = loss(alone, alone(batch(number, each)), batch(number, each))
            (its * more.get("factor", 1 / world)).backward()
            total += its.item() if each == rank else 0.0
        torch.testing.assert_close(full(mine).item(), total, rtol=1e-5, atol=1e-5, msg=name)
        with torch.no_grad():
            again = full(loss(module, (model if call is None else call)(x), x)).item()
        torch.testing.assert_close(again, total, rtol=1e-5, atol=1e-5, msg=f"{name}, without gradients")
        check(model, alone, name)


def check(model: Any, alone: Any, what: str) -> None:
    for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        if its.grad is None or mine.grad is None:
            assert all(p.grad is None or not full(p.grad).any() for p in (mine, its)), (what, name)
        else:
            torch.testing.assert_close(full(mine.grad), its.grad, rtol=1e-4, atol=1e-5, msg=f"{what}, {name}")


needs_dispatch = pytest.mark.skipif(
    not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate what is computed from shards only"
)


@needs_dispatch
@on_ranks(2, 4)
def test_losses() -> None:
    model = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear])
    compare(model, model.module, LOSSES)


@needs_dispatch
@on_ranks(2)
def test_losses_of_fsdp2s_face() -> None:
    model = Net()
    fsdp2.fully_shard(model.enter)
    fsdp2.fully_shard(model)
    compare(model, model, {name: LOSSES[name] for name in ("tasks", "arcface", "also in forward", "full tensors")})


@needs_dispatch
@pytest.mark.slow
@on_ranks(2)
def test_losses_of_compiled_models() -> None:
    model = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear])
    compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    chosen = {name: LOSSES[name] for name in ("tasks", "centers", "also in forward", "views", "redistributed")}
    compare(model, model.module, chosen, compiled)


@needs_dispatch
@on_ranks(2)
def test_losses_per_token_are_summed() -> None:
    model = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear], calculate_per_token_loss=True)
    chosen = {
        "rows": lambda m, y, x: (y - m.center).square().sum() + F.linear(y, m.classes).square().sum(),
        "views": lambda m, y, x: (y @ m.classes.t()).logsumexp(1).sum() + (y * m.classes[_kind(x)]).sum(),
    }
    compare(model, model.module, chosen, factor=1.0)


@needs_dispatch
@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_accumulation(strategy: int) -> None:
    """What losses add to gradients that are not reduced yet is part of them, and zeroing drops it."""
    model, alone = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy), Net()
    for step in range(2):
        for number in range(3):
            with model.sync() if number == 2 else model.no_sync():
                x = batch(number, dist.get_rank())
                y = model(x)
                sum(
                    LOSSES[name](model.module, y, x) for name in ("tasks", "also in forward", "full tensors")
                ).backward()
            for rank in range(dist.get_world_size()):
                x = batch(number, rank)
                y = alone(x)
                its = sum(LOSSES[name](alone, y, x) for name in ("tasks", "also in forward", "full tensors"))
                (its / dist.get_world_size()).backward()
            if step == 1 and number == 0:
                for each in (model, alone):
                    each.zero_grad(set_to_none=False)
        check(model, alone, f"step {step}")
        model.zero_grad()
        alone.zero_grad()


@needs_dispatch
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
@on_ranks(2)
def test_compiled_steps(backend: str | None) -> None:
    """A loss that is compiled with the model, and steps of optimizers in backward."""

    def loss(model: Any, x: Tensor) -> Tensor:
        module, y = getattr(model, "module", model), model(x)
        total = LOSSES["tasks"](module, y, x) + LOSSES["arcface"](module, y, x)
        params = {name.rpartition(".")[2]: param for name, param in model.named_parameters()}
        return total + _whole(params["classes"]).square().sum() + (y - params["center"]).square().mean()

    model, alone = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear]), Net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    options = {"backend": None} if backend is None else {"options": {"inner": backend}}
    step = compile_step(model, fully_shard_optimizer(optimizers[0]), loss, **options)
    for number in range(3):
        step(batch(number, dist.get_rank()))
        for rank in range(dist.get_world_size()):
            (loss(alone, batch(number, rank)) / dist.get_world_size()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), its, rtol=1e-4, atol=1e-5)


@on_ranks(2, timeout=60)
def test_a_use_on_one_rank_is_an_error() -> None:
    model = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear])
    y = model(batch(0, dist.get_rank()))
    with raises_everywhere(RuntimeError, "mul of 'center'"):
        loss = (y * model.module.center).sum() if dist.get_rank() == 0 else y.sum()
        loss.backward()


@needs_dispatch
@on_ranks(2, timeout=60)
def test_numbers_of_one_rank() -> None:
    """Shards that ranks multiply by different Python numbers, now or later, are no sum of anything."""
    model, rank = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear]), dist.get_rank()
    for compute, number in (
        (lambda p, n: (p * n).square().sum(), 0.5),
        (lambda p, n: (p * (n * model.module.weights.norm())).sum(), 0.5),
        (lambda p, n: torch.where(p > n, p, 0.0).sum(), 0.5),
        (lambda p, n: (p**n).full_tensor().sum(), 2),
    ):
        for _ in range(2):
            compute(model.module.classes, number).backward()
        with raises_everywhere(RuntimeError, "'classes'"):
            compute(model.module.classes, number + rank).backward()
        model.reset()
    with raises_everywhere(RuntimeError, "torch.tensor(number)", "mul(parameter, "):
        (model.module.classes * (0.1 + rank)).sum()


@needs_dispatch
@on_ranks(2)
def test_transforms_and_derivatives_of_shards() -> None:
    """They hide shards from functions, and would combine rows of different ranks with tensors of different ranks."""
    model, own = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear]), torch.randn(5, 4)
    classes = model.module.classes
    for compute in (
        lambda: torch.func.grad(lambda p: (p * own).square().sum())(classes),
        lambda: torch.func.vjp(torch.exp, classes.detach())[1](own),
        lambda: torch.func.vmap(lambda p: (p * own[0]).sum())(classes),
        lambda: torch.func.vmap(lambda p: p[dist.get_rank()].exp())(classes),
    ):
        with raises_everywhere(RuntimeError, "'classes'", "full_tensor()"):
            compute()
    with raises_everywhere(RuntimeError, "'classes'", "full_tensor()"):
        classes.exp().backward(gradient=own)


@on_ranks(2)
def test_writes_that_autograd_records_are_refused() -> None:
    model = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear])
    losses = torch.ones(2, requires_grad=True)
    for write in (
        lambda w: w.mul_(losses),
        lambda w: w.__imul__(losses.detach()),
        lambda w: torch.add(w, losses, out=w),
    ):
        scaled = model.module.weights.exp()
        with raises_everywhere(RuntimeError, "'weights'", "one rank's shard", "new tensor"):
            write(scaled)
        assert torch.equal(scaled.full_tensor(), model.module.weights.full_tensor().exp())


@needs_dispatch
@on_ranks(2)
def test_gradients_of_whole_tensors() -> None:
    model = fully_shard_model(Net(), fsdp_unit_modules=[nn.Linear])
    param, ranks = model.module.classes, torch.arange(dist.get_world_size()) + 1.0
    own = ranks[dist.get_rank()]
    for placements, expected in ((None, ranks.mean()), ([Replicate()], ranks.mean()), ([Partial()], ranks.sum())):
        param.grad = None
        (param.full_tensor(grad_placements=placements) * own).sum().backward()
        assert full(param.grad).eq(expected).all(), placements
        assert not full(param.grad).requires_grad
    with pytest.raises(ValueError, match=r"'classes' takes grad_placements"):
        param.full_tensor(grad_placements=[Shard(0)])
    for context in (torch.no_grad(), contextlib.nullcontext()):
        with context:
            assert param.full_tensor().requires_grad == torch.is_grad_enabled()
            assert not model.module.frozen.full_tensor().requires_grad
    whole = param.full_tensor()
    with raises_everywhere(RuntimeError, "once_differentiable"):
        (gradient,) = torch.autograd.grad(whole.square().sum(), param, create_graph=True)
        gradient.sum().backward()
