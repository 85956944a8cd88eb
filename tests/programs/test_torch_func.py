"""torch.func over sharded models: transforms around a model, and inside its forward."""

from __future__ import annotations

from collections.abc import Callable

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from test_programs import assert_gradients, both, mean_loss, mine
from torch import Tensor

from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat


@on_ranks(2)
def test_transforms_over_inputs() -> None:
    """torch.func.grad, vmap, jvp, jacrev and jacfwd of a sharded model work, and a loss of them trains it."""

    class Net(zoo.Plain):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.trunk(self.enter(x))))

    model, alone = fully_shard_model(parity.build(Net), fsdp_unit_modules=[zoo.Block]), parity.build(Net)
    x = torch.randn(8, generator=torch.Generator().manual_seed(dist.get_rank()))

    def results(net: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [
            torch.func.grad(lambda x: net(x).sum())(x),
            torch.func.vmap(net)(x.expand(3, 8)),
            torch.func.jvp(net, (x,), (torch.ones(8),))[1],
            torch.func.jacrev(net)(x),
            torch.func.jacfwd(net)(x),
            torch.func.vmap(torch.func.jacrev(net))(x.expand(3, 8)),
        ]

    for found, expected in zip(results(model), results(alone), strict=True):
        torch.testing.assert_close(found, expected)

    (batch,) = parity.batches(1, shape=(8,))
    torch.func.jacrev(model)(mine(batch)).pow(2).sum().backward()
    for each in batch:
        (torch.func.jacrev(alone)(each).pow(2).sum() / 2).backward()
    assert_gradients(model, alone)


class Forces(zoo.Plain):
    """A gradient of inputs in the loss, as in models of molecules."""

    def energy(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.enter(x)))).pow(2).sum()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(self.energy)(x).pow(2).mean()


class ScaledForces(Forces):
    """What the transform differentiates reads a parameter of the module that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def energy(self, x: Tensor) -> Tensor:
        return super().energy(x * self.scale)


class ForcesByAutograd(Forces):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return forces.pow(2).mean()


class Mapped(Forces):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.energy)(x).mean()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        (Forces, EAGER),
        (Forces, AOT_EAGER),
        (ScaledForces, EAGER),
        (ForcesByAutograd, EAGER),
        (Mapped, EAGER),
        (Mapped, AOT_EAGER),
    ],
)
@on_ranks(2)
def test_transforms_inside_forward(model: type[Forces], mode: str) -> None:
    sharded, call, alone = both(model, mode, units=[zoo.Block])
    (batch,) = parity.batches(1)
    for _ in range(2):
        call(mine(batch)).backward()
        mean_loss(alone, batch).backward()
    assert_gradients(sharded, alone)


class ReadsBefore(ScaledForces):
    """The module that calls the transform has read a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale.mean())


@on_ranks(2, timeout=60)
def test_gradients_after_a_read_in_an_eager_forward_are_refused() -> None:
    """torch.func.grad inside the eager forward of a module raises after that module has read a parameter.

    It does not allow hooks on saved tensors, which keep gathered parameters out of them.
    """
    _, call, _ = both(ReadsBefore, EAGER, units=[zoo.Block])
    with parity.raises_everywhere(RuntimeError, "torch.autograd.grad(outputs, inputs, create_graph=True)"):
        call(torch.randn(4, 8))


@pytest.mark.skipif(
    not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate what is computed from shards only"
)
@on_ranks(2, timeout=60)
def test_functional_call() -> None:
    """torch.func.functional_call works with the model's own parameters, with others, and on a part of the model."""
    model, _, alone = both(zoo.Plain, EAGER)
    (batch,) = parity.batches(1)

    def loss(net: zoo.Plain, x: Tensor) -> Tensor:
        call, ones = torch.func.functional_call, torch.ones(8, 16)
        total = call(net, {"head.weight": net.head.weight * 2}, (x,))
        return total + call(net.head, {"weight": torch.ones(5, 16)}, (x @ ones,)).mean()

    loss(model.module, mine(batch)).backward()
    for each in batch:
        (loss(alone, each) / 2).backward()
    assert_gradients(model, alone)
    model.zero_grad()
    alone.zero_grad()
    torch.func.functional_call(model.module, dict(model.module.named_parameters()), (mine(batch),)).backward()
    mean_loss(alone, batch).backward()
    assert_gradients(model, alone)
