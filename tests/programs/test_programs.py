"""Programs that people write: each gives the numbers of one process, or is rejected with the reason."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime import compat

MODES = [EAGER, AOT_EAGER]


def both(factory: Callable[[], nn.Module], mode: str, **options: Any) -> tuple[Any, Any, nn.Module]:
    """Return a sharded model, what to call in its place, and the same model in one process."""
    model, call = parity.shard(parity.build(factory), mode, **options)
    return model, call, parity.build(factory)


def mean_loss(alone: nn.Module, batch: Tensor) -> Tensor:
    return sum(alone(x) for x in batch) / len(batch)  # type: ignore[return-value]


def mine(batch: Tensor) -> Tensor:
    return batch[dist.get_rank()]


def assert_gradients(model: Any, alone: nn.Module) -> None:
    """Assert that the same gradients are None, and the others close. Sums are in another order."""
    for name, param in model.module.named_parameters():
        expected = alone.get_parameter(name).grad
        assert (param.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(param.grad.full_tensor(), expected, rtol=1e-4, atol=1e-6, msg=name)


def assert_params(model: Any, alone: nn.Module) -> None:
    for name, param in model.module.named_parameters():
        torch.testing.assert_close(param.full_tensor(), alone.get_parameter(name), rtol=1e-4, atol=1e-5, msg=name)


# -- other ways to compute gradients ----------------------------------------------------------------------------------


@pytest.mark.long_if("*-inductor")
@pytest.mark.parametrize("mode", [*MODES, INDUCTOR])
@on_ranks(2)
def test_gradients_of_chosen_parameters(mode: str) -> None:
    model, call, alone = both(zoo.Unused, mode)
    (batch,) = parity.batches(1)
    params, theirs = dict(model.module.named_parameters()), list(alone.parameters())
    expected = torch.autograd.grad(mean_loss(alone, batch), theirs, allow_unused=True)

    found = torch.autograd.grad(call(mine(batch)), list(params.values()), allow_unused=True)
    for (name, param), gradient, its in zip(params.items(), found, expected, strict=True):
        assert (gradient is None) == (its is None), name
        if its is not None:
            torch.testing.assert_close(gradient.full_tensor(), its, rtol=1e-4, atol=1e-6)
        assert param.grad is None

    some = [params["head.weight"], params["blocks.0.up.bias"]]
    call(mine(batch)).backward(inputs=some)
    assert [name for name, p in params.items() if p.grad is not None] == ["blocks.0.up.bias", "head.weight"]
    call(mine(batch)).backward()
    for (name, param), its in zip(params.items(), expected, strict=True):
        assert (param.grad is None) == (its is None), name
        if its is not None:
            times = 2 if any(param is each for each in some) else 1
            torch.testing.assert_close(param.grad.full_tensor(), times * its, rtol=1e-4, atol=1e-6)

    seen: list[list[bool]] = []
    hook = torch.autograd.graph.register_multi_grad_hook(
        list(params.values()), lambda gradients: seen.append([g is None for g in gradients])
    )
    call(mine(batch)).backward()
    assert seen == [[its is None for its in expected]]
    hook.remove()
    call(mine(batch)).backward()
    assert len(seen) == 1


@pytest.mark.long_unless("*-eager", "*-0-*")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
@on_ranks(2)
def test_gradients_of_chosen_parameters_between_microbatches(mode: str, strategy: int) -> None:
    """``torch.autograd.grad`` between microbatches does not add to the accumulated gradients."""
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], zero_dp_strategy=strategy)
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    alone = parity.build(zoo.Plain)
    first, second = parity.batches(2)
    head, its_head = model.module.head.weight, alone.head.weight
    with model.no_sync():
        call(mine(first)).backward()
        (gradient,) = torch.autograd.grad(call(mine(second)), [head])
    (expected,) = torch.autograd.grad(mean_loss(alone, second), [its_head])
    torch.testing.assert_close(gradient.full_tensor(), expected, rtol=1e-4, atol=1e-6)
    call(mine(second)).backward(inputs=[head])
    mean_loss(alone, first).backward()
    mean_loss(alone, second).backward(inputs=[its_head])
    assert_gradients(model, alone)


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Biases(nn.Sequential):
    """All biases have the same gradient."""

    block = Bias

    def __init__(self, count: int = 2) -> None:
        super().__init__(nn.Linear(8, 8), *(Bias() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = super().forward(x).pow(2).mean()
        return loss


@pytest.mark.parametrize(("strategy", "count"), [(1, 2), (2, 2), (3, 2), (3, 4)])
@on_ranks(2)
def test_equal_gradients_of_several_units(strategy: int, count: int) -> None:
    model, call, alone = both(lambda: Biases(count), AOT_EAGER, sharding={"zero_dp_strategy": strategy})
    (batch,) = parity.batches(1)
    mean_loss(alone, batch).backward()
    call(mine(batch)).backward()
    assert_gradients(model, alone)
    for chosen in range(1, count + 1):
        for each in (model, alone):
            each.zero_grad()
        call(mine(batch)).backward(inputs=[model.module[chosen].weight])
        mean_loss(alone, batch).backward(inputs=[alone[chosen].weight])  # type: ignore[index]
        assert_gradients(model, alone)


@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@on_ranks(2)
def test_weights_of_tasks_by_gradient_norms() -> None:
    """GradNorm works: the loss of each task is weighted by the norm of its gradient in the last shared layer."""

    class Tasks(zoo.Plain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            out = self.head(self.norm(self.trunk(self.enter(x))))
            return out[..., :2].pow(2).mean(), out[..., 2:].abs().mean()

    model, alone = fully_shard_model(parity.build(Tasks), fsdp_unit_modules=[zoo.Block]), parity.build(Tasks)
    optimizers = [parity.sgd(model.parameters()), parity.sgd(alone.parameters())]
    for batch in parity.batches(2):
        losses = model(mine(batch))
        shared = model.module.blocks[2].down.weight
        norms = [torch.autograd.grad(loss, shared, retain_graph=True)[0].norm() for loss in losses]
        sum(loss / norm for loss, norm in zip(losses, norms, strict=True)).backward()  # type: ignore[union-attr]
        each = [alone(x) for x in batch]
        means = [sum(losses) / len(each) for losses in zip(*each, strict=True)]
        its = alone.blocks[2].down.weight
        norms = [torch.autograd.grad(mean, its, retain_graph=True)[0].norm() for mean in means]
        sum(mean / norm for mean, norm in zip(means, norms, strict=True)).backward()  # type: ignore[union-attr]
        assert_gradients(model, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# -- unused parameters ------------------------------------------------------------------------------------------------


class TwoHeads(zoo.Plain):
    """The loss uses one of two heads, by the sign of the first number. Neither uses the pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.pooler = nn.Linear(16, 5), nn.Linear(16, 16)

    def forward(self, x: Tensor, task: int) -> Tensor:  # type: ignore[override]
        hidden = self.norm(self.trunk(self.enter(x)))
        return (self.head if task == 0 else self.other)(hidden).pow(2).mean()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_unused_heads_are_left_alone(mode: str, strategy: int) -> None:
    """Weight decay does not change parameters that no rank used, in any step.

    In eager mode, ranks use different heads.
    """
    model = fully_shard_model(parity.build(TwoHeads), fsdp_unit_modules=[zoo.Block], zero_dp_strategy=strategy)
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    alone = parity.build(TwoHeads)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.5) for each in (model, alone)]
    tasks = [(0, 0), (1, 1), (0, 1), (0, 0)] if mode == EAGER else [(0, 0), (1, 1), (0, 0)]
    for step, (batch, of_ranks) in enumerate(zip(parity.batches(len(tasks)), tasks, strict=True)):
        for part in range(2):
            with model.sync() if part else model.no_sync():
                # In the third step, microbatches use different heads.
                heads = [(task + part * (step == 2)) % 2 for task in of_ranks]
                call(mine(batch)[3 * part : 3 * part + 3], heads[dist.get_rank()]).backward()
            for x, head in zip(batch, heads, strict=True):
                (alone(x[3 * part : 3 * part + 3], head) / 2).backward()
        assert_gradients(model, alone)
        assert model.module.pooler.weight.grad is None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
    assert_params(model, alone)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_outputs_that_the_loss_leaves_out(mode: str) -> None:
    """A pooler whose output is not in the loss gets no gradient, although compiled code computes zeros for it."""

    class Encoder(zoo.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.pooler = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            hidden = self.trunk(self.enter(x))
            return self.head(self.norm(hidden)), self.pooler(hidden).tanh()

    model, call, alone = both(Encoder, mode)
    losses = [lambda out: out[0].pow(2).mean(), lambda out: out[1].mean(), lambda out: out[0].mean() + out[1].mean()]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.5) for each in (model, alone)]
    for loss, batch in zip(losses, parity.batches(3), strict=True):
        loss(call(mine(batch))).backward()
        for x in batch:
            (loss(alone(x)) / 2).backward()
        assert_gradients(model, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_params(model, alone)


# -- writes in forward ------------------------------------------------------------------------------------------------


def _assign(block: nn.Module) -> None:
    block.up.weight.data = torch.clamp(block.up.weight.data, -0.01, 0.01)


def _clamp_data(block: nn.Module) -> None:
    block.up.weight.data.clamp_(-0.01, 0.01)


def _clamp(block: nn.Module) -> None:
    with torch.no_grad():
        block.up.weight.clamp_(-0.01, 0.01)


def _detached(block: nn.Module) -> None:
    block.up.weight.detach().mul_(2)


def _part_of_data(block: nn.Module) -> None:
    block.up.weight[:, :].data.mul_(2)


def _list(block: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_([block.up.weight, block.up.bias], 0.5)


WRITES = [_assign, _clamp_data, _clamp, _detached, _part_of_data, _list]


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=120)
def test_writes_to_parameters_in_forward_are_refused(mode: str) -> None:
    for number, write in enumerate(WRITES):

        class Writes(zoo.Block):
            def forward(self, x: Tensor) -> Tensor:
                write(self)
                return super().forward(x)

        class Model(zoo.Plain):
            block = Writes

        torch._dynamo.reset()
        model, call = parity.shard(parity.build(functools.partial(Model, layers=1)), mode, units=[Writes])
        before = model.module.blocks[0].up.weight.full_tensor()
        refused = parity.raises_everywhere(Exception, "wrote to a parameter", "up.weight")
        with torch.set_grad_enabled(number % 2 == 0), refused:
            call(torch.randn(4, 8))
        assert torch.equal(model.module.blocks[0].up.weight.full_tensor(), before)


# -- parameters that are frozen and unfrozen --------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [*MODES, INDUCTOR])
@on_ranks(2)
def test_freezing_and_unfreezing(mode: str) -> None:
    """A whole unit, a part of a bucket, and parameters that were frozen when sharded can be frozen and unfrozen."""
    model, call, alone = both(zoo.FrozenUnit, mode)
    optimizers = [parity.sgd(model.parameters()), parity.sgd(alone.parameters())]
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: None,
        lambda m: m.blocks[0].requires_grad_(False),
        lambda m: m.blocks[2].up.weight.requires_grad_(False),
        lambda m: m.blocks.requires_grad_(True),
        lambda m: setattr(m.enter.bias, "requires_grad", True),
    ]
    for change, batch in zip(changes, parity.batches(len(changes)), strict=True):
        change(model.module)
        change(alone)
        call(mine(batch)).backward()
        mean_loss(alone, batch).backward()
        assert_gradients(model, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_params(model, alone)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_discriminator_frozen_in_turn(mode: str) -> None:
    """The GAN idiom works: D.requires_grad_(False) while the generator trains."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append((nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), zoo.Plain()))
    (generator, judge), (alone_generator, alone_judge) = made
    units = {generator: [nn.Linear], judge: [zoo.Block]}
    models = [fully_shard_model(each, fsdp_unit_modules=of) for each, of in units.items()]
    calls: Any = models
    if mode != EAGER:
        calls = [torch.compile(each, backend="mfsdp", options={"inner": mode}) for each in models]
    generator_call, judge_call = calls

    def step(draw: Callable[[Tensor], Tensor], judge: Any, of: nn.Module, train: str, ranks: int) -> None:
        of.requires_grad_(train == "judge")
        for x in noise if ranks == 2 else [mine(noise)]:
            fake = draw(x) if train == "generator" else draw(x).detach()
            (judge(fake) / ranks).backward()
        of.requires_grad_(True)

    optimizers = [parity.sgd(each.parameters()) for each in (*models, alone_generator, alone_judge)]
    for number in range(3):
        noise = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(number))
        for train in ("judge", "generator"):
            step(generator_call, judge_call, models[1], train, 1)
            step(alone_generator, alone_judge, alone_judge, train, 2)
            assert_gradients(models[0], alone_generator)
            assert_gradients(models[1], alone_judge)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


# -- one function for a whole step ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("inner", [AOT_EAGER, INDUCTOR])
@on_ranks(2)
def test_a_whole_step_in_one_compiled_function(inner: str) -> None:
    model, alone = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block]), parity.build(zoo.Plain)
    optimizer = fully_shard_optimizer(parity.sgd(model.parameters()))
    its = parity.sgd(alone.parameters())

    @torch.compile(backend="mfsdp", options={"inner": inner})
    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for batch in parity.batches(3):
        step(mine(batch))
        mean_loss(alone, batch).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        its.step()
        its.zero_grad()
    assert_params(model, alone)
