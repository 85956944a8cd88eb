"""Parameters that code keeps from forward to backward, whatever runs in between; and backwards that run twice."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fully_shard_model

WIDTH = 6


class Head(torch.autograd.Function):
    """A product whose backward reads the weight's shape and values, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, keep: str, x: Tensor, weight: Tensor) -> Tensor:
        kept = {"view": weight.view(-1), "cast": weight.double(), "whole": weight, "attribute": weight}[keep]
        ctx.keep = keep
        if keep == "attribute":
            ctx.weight = kept
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(x, kept)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *kept = ctx.saved_tensors
        weight = kept[0] if kept else ctx.weight
        if ctx.keep == "view":
            weight = weight.view(gradient.shape[-1], -1)
        assert weight.shape[0] == gradient.shape[-1]
        needed = ctx.needs_input_grad[2]
        return None, (gradient @ weight.to(gradient.dtype)), gradient.t() @ x if needed else None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Out(nn.Module):
    """A unit that reads its child's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, keep: str, x: Tensor) -> Tensor:
        return Head.apply(keep, x, self.head.weight)


class Giver(nn.Linear):
    """Returns its weight, which another module uses."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight


@contextlib.contextmanager
def nothing(_: Any = None) -> Any:
    yield


def as_it_is() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


AROUND: dict[str, Callable[[], Any]] = {
    "plain": nothing,
    "kept as it is": as_it_is,
    "on the host": torch.autograd.graph.save_on_cpu,
}


class Net(nn.Module):
    """A model that uses a weight of its child, of a unit's child, or what a child returns."""

    def __init__(self, where: str, keep: str, around: str = "plain", recompute: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head, self.out, self.giver = nn.Linear(WIDTH, 4, bias=False), Out(), Giver(WIDTH, 4, bias=False)
        self.where, self.keep, self.around, self.recompute = where, keep, around, recompute

    def last(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self.where == "unit":
            return self.out(self.keep, x)
        return Head.apply(self.keep, x, self.head.weight if weight is None else weight)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        weight = {
            "root": lambda: None,
            "unit": lambda: None,
            "returned": self.giver,
            "argument": lambda: self.head.weight,
        }
        given = weight[self.where]()
        with AROUND[self.around]():
            if self.recompute is None:
                return self.last(x, given)
            return checkpoint(self.last, x, given, use_reentrant=self.recompute)


def nets(frozen: bool, *args: Any) -> tuple[nn.Module, nn.Module]:
    """Return a sharded model, and the same in one process."""
    both = [parity.build(lambda: Net(*args)) for _ in range(2)]
    for net in both:
        for part in (net.head, net.out, net.giver):
            part.requires_grad_(not frozen)
    return fully_shard_model(both[0], fsdp_unit_modules=[Block, Out]), both[1]


def distilled(second: str, model: Any, x: Tensor) -> Tensor:
    """Return a loss, with another forward between its own forward and its backward."""
    y, target = model(x), torch.zeros(())
    if second == "no_grad":
        with torch.no_grad():
            target = model(x + 1)
    elif second == "grad":
        target = model(x + 1).detach()
    return (y - target).pow(2).mean()


def check(run: Callable[[Any, Tensor], Any], model: Any, alone: nn.Module) -> None:
    """Run a program that calls backward on both models, and compare gradients."""
    rank, batch = dist.get_rank(), parity.batches(1, (3, WIDTH))[0]
    run(model, batch[rank])
    for x in batch:
        run(alone, x)
    for (name, mine), its in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        if mine.grad is not None:
            expected = torch.zeros_like(its) if its.grad is None else its.grad / len(batch)
            parity.close(name, mine.grad.full_tensor(), expected)
    model.zero_grad()
    alone.zero_grad()


WHERE = ["root", "unit", "returned"]
KEPT = ["whole", "view", "cast", "attribute"]


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_what_functions_save_is_there_in_their_backward() -> None:
    """Whatever ran in between: DPO and distillation run the model again before the first backward."""
    for where in WHERE:
        for keep in KEPT:
            for frozen in (False, True) if keep in ("whole", "attribute") else (False,):
                model, alone = nets(frozen, where, keep)
                for second in ("none", "no_grad", "grad"):
                    check(lambda m, x, s=second: distilled(s, m, x).backward(), model, alone)


def first_first(model: Any, x: Tensor) -> None:
    a, b, c = (model(x + i).pow(2).mean() for i in range(3))
    for loss in (a, c, b):
        loss.backward()


def twice(model: Any, x: Tensor) -> None:
    a = model(x).pow(2).mean()
    a.backward(retain_graph=True)
    b = model(x + 1).pow(2).mean()
    a.backward()
    b.backward()


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_backwards_in_any_order() -> None:
    for where in WHERE:
        for keep in KEPT:
            model, alone = nets(False, where, keep)
            check(first_first, model, alone)
            check(twice, model, alone)


@on_ranks(2, timeout=120)
def test_what_checkpoints_and_hooks_of_others_keep() -> None:
    """Checkpoints keep their arguments; hooks that others have installed keep what they are given."""
    for where in ("root", "returned", "argument"):
        for keep in ("whole", "attribute"):
            for around, recompute in [
                ("plain", False),
                ("plain", True),
                ("kept as it is", None),
                ("on the host", None),
            ]:
                model, alone = nets(False, where, keep, around, recompute)
                check(lambda m, x: distilled("grad", m, x).backward(), model, alone)


@on_ranks(2, timeout=120)
def test_a_step_between_forward_and_backward_is_found() -> None:
    """Wherever the weight was kept, and whether or not a forward runs after the step."""
    for where in WHERE:
        for keep in ("whole", "attribute"):
            model, _ = nets(True, where, keep)
            loss = model(torch.ones(3, WIDTH)).sum()
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)
                model(torch.ones(3, WIDTH))
            with parity.raises_everywhere(RuntimeError, "were modified in place between forward and backward"):
                loss.backward()
            model.reset()
            model(torch.ones(3, WIDTH)).sum().backward()


@on_ranks(2, timeout=120)
def test_a_weight_of_a_child_is_not_kept_for_backward() -> None:
    """From the first forward on: what autograd saves of it is gathered again."""
    for where in ("root", "unit"):
        model, _ = nets(False, where, "whole")
        gathered = []
        eager = model.sharded.eager
        loss = model(torch.ones(3, WIDTH)).sum()
        with torch.no_grad():
            model(torch.ones(3, WIDTH))
        handle = (model.module.head if where == "root" else model.module.out.head)._mfsdp_homes["weight"]
        gc.collect()
        assert handle.bucket not in eager.gathering.gathered
        gather = eager.gathering.gather
        eager.gathering.gather = lambda bucket, *planes: (gathered.append(bucket), gather(bucket, *planes))[1]
        loss.backward()
        assert handle.bucket in gathered
        assert not eager.gathering.hooks_everywhere


@on_ranks(2, timeout=120)
def test_a_parameter_of_an_earlier_forward_is_for_backwards() -> None:
    model, _ = nets(False, "root", "whole")
    kept = []
    model.module.head.register_forward_hook(lambda module, *_: None)
    model.module.out.register_forward_hook(lambda module, *_: kept.append(module.head.weight))
    model.module.where = "unit"
    model(torch.ones(3, WIDTH))
    values = kept[0].detach().clone()
    model.module.where = "root"
    found = []
    y = model(torch.ones(3, WIDTH)).sum()
    y.register_hook(lambda _: found.append(kept[0] * 1))
    with parity.raises_everywhere(RuntimeError, "'out.head.weight' was gathered for an earlier forward"):
        kept[0].size()
    y.backward()
    assert torch.equal(found[0], values)
    model(torch.ones(3, WIDTH)).sum().backward()
    with parity.raises_everywhere(RuntimeError, "'out.head.weight' was gathered for an earlier forward"):
        kept[0] + 1


# -- retain_graph in compiled code -------------------------------------------------------------------------------------


class Two(zoo.Plain):
    """Two losses, with products and pointwise operators whose results Inductor's backward writes to."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = self.norm(self.trunk((self.enter(x).exp() + 1).tanh().sigmoid()))
        return self.head(h).tanh().exp().pow(2).mean(), h.sigmoid().tanh().mean()


class Broken(Two):
    def trunk(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (super().trunk(x).exp() + 1).log()


def halves(model: Any, x: Tensor) -> None:
    sum(model(x)).backward()  # what is compiled here need not be retained
    a, b = model(x + 1)
    a.backward(retain_graph=True)
    torch.autograd.grad(b, list(model.parameters()), retain_graph=True, allow_unused=True)
    a.backward(retain_graph=True)
    b.backward()


@pytest.mark.long_if("*-graph break-*")
@pytest.mark.parametrize("mode", [AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["regions", "flat", "blocks", "graph break"])
@on_ranks(2, timeout=120)
def test_compiled_backwards_run_again(how: str, mode: str) -> None:
    factory = Broken if how == "graph break" else Two
    model, alone = fully_shard_model(parity.build(factory), fsdp_unit_modules=[zoo.Block]), parity.build(factory)
    options: dict[str, Any] = {"inner": mode}
    call: Any = model
    if how == "blocks":
        for block in model.module.blocks:
            block.compile(backend="mfsdp", options=options)
    else:
        call = torch.compile(model, backend="mfsdp", options=options | ({"regions": False} if how == "flat" else {}))
    batch = parity.batches(1)[0]
    halves(call, batch[dist.get_rank()])
    for x in batch:
        halves(alone, x)
    for (name, mine), its in zip(model.module.named_parameters(), alone.named_parameters(), strict=True):
        parity.close(name, mine.grad.full_tensor(), its[1].grad / len(batch))
