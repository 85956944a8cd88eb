"""Parameters that stay whole for a while: for generation, for export, for methods other than forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.runtime import compat

GATHER = "all_gather_into_tensor"
CONFIG = LlamaConfig(50, 32, 2, 4, 2, 44)


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return fully_shard_model(Llama(CONFIG), fsdp_unit_modules=[Block], **options)


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))


def alone() -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        return Llama(CONFIG)(tokens())


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@on_ranks(2)
def test_what_is_gathered_stays_within_its_budget(mode: str) -> None:
    """Gathered parameters stay within their budget.

    If all stay, ranks may run different numbers of forwards. If some stay, the other units are gathered as usual.
    """
    model, expected = llama(), alone()
    call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": mode})
    sizes = [bucket.plan.gathered_bytes for bucket in model.sharded.buckets]
    assert len(sizes) == 4  # two parts of the root, and two layers

    @torch.no_grad()
    def forward() -> None:
        torch.testing.assert_close(call(tokens()), expected)

    forward()
    assert collectives(forward) == {GATHER: 4}
    with model.gathered():
        held = sum(bucket.resident.nbytes for bucket in model.sharded.buckets)
        assert held == sum(sizes)
        forward()
        for _ in range(dist.get_rank()):
            assert collectives(forward) == {}
    assert all(bucket.resident is None for bucket in model.sharded.buckets)
    with model.gathered(sizes[0] + sizes[1]):
        assert [bucket.resident is not None for bucket in model.sharded.buckets] == [True, True, False, False]
        forward()
        assert collectives(forward) == {GATHER: 2}
    forward()
    assert collectives(forward) == {GATHER: 4}


@on_ranks(2)
def test_training_goes_on_between_generations() -> None:
    """Weights that a step has changed are gathered again, inside and outside."""
    model = llama()
    reference = llama()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]

    def step(each: Any, optimizer: Any) -> Tensor:
        loss = each(tokens(), tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with model.gathered("1MiB"):
        losses = [step(model, optimizers[0])]
        with torch.no_grad():
            inside = model(tokens())
    losses.append(step(model, optimizers[0]))
    expected = [step(reference, optimizers[1])]
    with torch.no_grad():
        assert torch.equal(inside, reference(tokens()))
    expected.append(step(reference, optimizers[1]))
    assert torch.equal(torch.stack(losses), torch.stack(expected))


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2, 3)
def test_summoned_parameters_are_the_models(strategy: int) -> None:
    model, expected = llama(zero_dp_strategy=strategy), alone()
    torch.manual_seed(0)
    original = Llama(CONFIG)
    shards = list(model.parameters())

    def inside() -> None:
        with model.summon_full_params(writeback=False), torch.no_grad():
            for (name, param), its in zip(model.module.named_parameters(), original.parameters(), strict=True):
                assert type(param) is nn.Parameter, name
                assert torch.equal(param, its), name
            assert type(model.module) is Llama
            assert torch.equal(model.module(tokens()), expected)
            model.module.norm.weight.zero_()

    found = collectives(inside)
    assert found == ({GATHER: 4} if strategy == 3 else {})
    assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()), expected)  # written values are lost
        with model.summon_full_params():
            model.module.norm.weight.mul_(2)
            model.module.layers[1].feed_forward.down.weight.zero_()
            original.norm.weight.mul_(2)
            original.layers[1].feed_forward.down.weight.zero_()
        assert torch.equal(model(tokens()), original(tokens()))
    model(tokens(), tokens()).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("strategy", [0, 1, 3])
@on_ranks(2)
def test_ranks_that_write_other_values_change_nothing(strategy: int) -> None:
    model, before = llama(zero_dp_strategy=strategy), alone()
    mine = dist.get_rank() == 1

    def writes() -> None:
        if mine:
            model.module.norm.weight.data.mul_(2)  # no version counts this

    def fails() -> None:
        model.module.norm.weight.mul_(2)
        if mine:
            raise KeyError("mistake")

    def changes_a_shape() -> None:
        model.module.norm.weight.mul_(2)
        if mine:
            model.module.layers[0].feed_forward.down.weight = nn.Parameter(torch.ones(3))

    def change(write: Any) -> None:
        with model.summon_full_params(), torch.no_grad():
            write()

    for write, error in ((writes, RuntimeError), (fails, KeyError), (changes_a_shape, ValueError)):
        with pytest.raises(
            error if mine else RuntimeError, match="mistake" if write is fails else "summon_full_params"
        ):
            change(write)
        torch.testing.assert_close(model(tokens()).detach(), before)


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x)

    def score(self, x: Tensor) -> Tensor:
        return (self.inner(x) @ self.weight.t()).square().mean()


@on_ranks(2)
def test_methods_other_than_forward() -> None:
    def gradients(model: nn.Module, call: Any) -> list[Tensor]:
        call(torch.ones(2, 4)).backward()
        return [param.grad.full_tensor() if dist.is_initialized() else param.grad for param in model.parameters()]

    torch.manual_seed(0)
    model = fully_shard_model(TwoWays(), fsdp_unit_modules=[nn.Linear])
    expected = gradients(model, model)
    model.zero_grad()
    if compat.DTENSOR_SUBCLASSES_DISPATCH:  # else torch cannot differentiate parameters at rest
        for mine, its in zip(
            gradients(model, model.score), expected, strict=True
        ):  # of a parameter at rest, and a unit
            torch.testing.assert_close(mine, its)
        model.zero_grad()
    model.register_forward_method("score")
    assert all(map(torch.equal, gradients(model, model.score), expected))
    model.zero_grad()
    compiled = torch.compile(model.score, backend="mfsdp", options={"inner": "aot_eager"}, fullgraph=True)
    assert all(map(torch.equal, gradients(model, compiled), expected))
    with pytest.raises(AttributeError, match="scores"):
        model.register_forward_method("scores")
    with pytest.raises(ValueError, match="nothing to gather"):
        model.register_forward_method("extra_repr", nn.ReLU())


@on_ranks(2)
def test_mistakes_are_explained() -> None:
    model = llama()
    for mistake in ("lots", "-1 GiB", [1]):
        with pytest.raises((ValueError, TypeError), match="gathered"):
            model.gathered(mistake)
    with model.no_sync():
        model(tokens(), tokens()).backward()
    with raises_everywhere(RuntimeError, "during a step"), model.gathered():
        pass
    with raises_everywhere(RuntimeError, "during a step"), model.summon_full_params():
        pass
    model.finish_grad_sync()
    model.zero_grad()
    expected = [param.full_tensor() for param in model.parameters()]
    with (
        raises_everywhere(ValueError, "'norm.weight' was changed to a tensor of shape (3,)"),
        model.summon_full_params(),
    ):
        model.module.norm.weight = nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroDivisionError), model.summon_full_params():
        model.module.norm.weight.data.fill_(1 // 0)
    assert all(torch.equal(a.full_tensor(), b) for a, b in zip(model.parameters(), expected, strict=True))
    torch.testing.assert_close(model(tokens()).detach(), alone())


@on_ranks(2)
def test_names_that_share_a_parameter_keep_sharing_it() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    model, x = fully_shard_model(module), torch.ones(1, 4)
    before = model(x).detach()
    for number in range(2):
        with (
            raises_everywhere(ValueError, "Parameters '0.weight' and '1.weight' are one, and were given different"),
            model.summon_full_params(),
        ):
            module[number].weight = nn.Parameter(module[number].weight.detach() * 2)
        assert torch.equal(model(x), before)
    with model.summon_full_params():
        state = {name: value / 2 for name, value in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        module[0].bias.requires_grad_(False)
    assert module[0].weight is module[1].weight
    assert torch.equal(module[1].weight.full_tensor(), state["1.weight"])
    assert [param.requires_grad for param in module.parameters()] == [True, False, True]
