"""Parts of a model that compile themselves: operators with bodies, and methods with a decorator."""

from __future__ import annotations

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER, FACE, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fully_shard_model

SIZE = 6


class Block(nn.Module):
    """Reads its parameters in code that compiles itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.scale = nn.Parameter(torch.ones(SIZE))
        self.how = how

    @torch.compile(backend="aot_eager")
    def helper(self, x: Tensor) -> Tensor:
        return self.b(x).sin() * self.scale + x @ self.a.weight

    def inner(self, x: Tensor) -> Tensor:
        if self.how == "method":
            return self.helper(x)
        if self.how == "map":
            return torch._higher_order_ops.map(lambda row: self.a(row).sin() * self.scale, x)
        if self.how == "while_loop":
            step = (lambda i, x: i < 3), (lambda i, x: (i + 1, self.a(x).sin() * self.scale))
            return torch._higher_order_ops.while_loop(*step, (torch.zeros((), dtype=torch.int64), x))[1]
        if self.how == "flex":
            q = x.view(1, 1, *x.shape)
            return flex_attention(
                q, q, q, score_mod=lambda score, b, h, i, j: score * self.scale[(i + j) % SIZE]
            ).view_as(x)
        return torch.cond(x.sum() > 0, lambda x: self.a(x).sin(), lambda x: self.b(x).cos() * self.scale, (x,))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            return x + checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(2))
        self.head = nn.Linear(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def check(mode: str, how: str, *, trains: bool = True, frozen: bool = False) -> None:
    """Compare three steps with those in one process. Only the first may compile."""
    torch._dynamo.reset()
    alone = parity.build(lambda: Net(how))
    model = parity.build(lambda: Net(how))
    for net in (alone, model):
        net.blocks.requires_grad_(not frozen)
    model, call = parity.shard_by(mode, model)
    batches, compiled = parity.batches(3, (5, SIZE)), []
    for step, batch in enumerate(batches):
        with torch.set_grad_enabled(trains):
            mine = call(batch[dist.get_rank()])
            parity.close(f"step {step}", mine, alone(batch[dist.get_rank()]))
            compiled.append(graphs())
            if trains:
                mine.pow(2).mean().backward()
                for x in batch:
                    alone(x).pow(2).mean().backward()
        with torch.no_grad():
            for (name, param), its in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (param.grad is None) == (its.grad is None), name
                if its.grad is not None:
                    parity.close(name, param.grad.full_tensor(), its.grad / len(batch))
                    param.sub_(param.grad, alpha=0.1)
                    its.sub_(its.grad / len(batch), alpha=0.1)
                else:
                    param.mul_(1.1)
                    its.mul_(1.1)
                param.grad = its.grad = None
    assert compiled[1] == compiled[2], compiled


@pytest.mark.long_if("*-cond")
@pytest.mark.parametrize(("mode", "how"), [(EAGER, "cond"), (FACE, "method")])
@on_ranks(2, timeout=120)
def test_parts_that_compile_themselves(mode: str, how: str) -> None:
    check(mode, how)


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, FACE, AOT_EAGER, INDUCTOR])
@on_ranks(2, timeout=200)
def test_more_parts_that_compile_themselves(mode: str) -> None:
    check(mode, "cond")
    check(mode, "cond", frozen=True)
    if mode in (EAGER, FACE):  # torch does not compile torch.cond inside a checkpoint
        check(mode, "checkpoint")
    check(mode, "while_loop", trains=False)
    if mode != INDUCTOR:  # there, plain torch.compile fails, too (torch 2.11 to 2.15, on the CPU)
        check(mode, "map", trains=False)
        check(mode, "flex", trains=False)


@pytest.mark.usefixtures("fake_world")
def test_branches_in_compiled_models_get_copies_that_backward_computes_again() -> None:
    model = fully_shard_model(Net("cond"), fsdp_unit_modules=[Block])
    saved: list[Tensor] = []
    compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager", "regions": False})
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        loss = compiled(torch.ones(2, SIZE)).sum()
    assert not [tensor for tensor in saved if tensor.shape == (SIZE, SIZE)]
    loss.backward()


@on_ranks(2, timeout=60)
def test_bucket_is_released_when_compiled_code_has_read_it() -> None:
    model = fully_shard_model(Net("method"), fsdp_unit_modules=[Block])
    eager, most = model.sharded.eager, []
    first, second = (block.a._mfsdp_homes["weight"].bucket for block in model.module.blocks)
    model.module.head.register_forward_hook(lambda *_: most.append({first, second} & {*eager.gathering.gathered}))
    for _ in range(2):
        loss = model(torch.ones(2, SIZE)).sum()
        assert not eager.gathering.hooks_everywhere
        assert first not in eager.gathering.gathered
        loss.backward()
        assert not eager.gathering.gathered
    assert all(first not in gathered for gathered in most)


class Repeats(nn.Module):
    """Uses its layers twice, some of them frozen, or recomputed."""

    def __init__(self, frozen: bool, recomputed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))
        self.layers[1].requires_grad_(not frozen)
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            x = checkpoint(layer, x, use_reentrant=False).sin() if self.recomputed else layer(x).sin()
        return x


@pytest.mark.parametrize(("frozen", "recomputed"), [(False, False), (True, True)])
@on_ranks(2, timeout=60)
def test_a_step_is_compiled_with_its_backward(frozen: bool, recomputed: bool) -> None:
    """Dynamo is at work while ``backward()`` compiles the graph: it would compile what is called then."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).mean()
        loss.backward()
        return loss

    losses = []
    for run in (step, torch.compile(step, backend="mfsdp", options={"inner": "aot_eager"})):
        torch.manual_seed(0)
        model = fully_shard_model(Repeats(frozen, recomputed), fsdp_unit_modules=[nn.Linear])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            losses.append(run(model, torch.ones(2, SIZE) + dist.get_rank()).item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[:3] == losses[3:]


@on_ranks(2, timeout=60)
def test_compiled_code_may_not_write_to_a_gathered_parameter() -> None:
    class Writer(nn.Linear):
        @torch.compile(backend="eager")
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(2)
            return super().forward(x)

    model = fully_shard_model(nn.Sequential(Writer(SIZE, SIZE)), fsdp_unit_modules=[Writer])
    with parity.raises_everywhere(RuntimeError, "wrote to a parameter of '0'"):
        model(torch.ones(2, SIZE))


@on_ranks(2, timeout=60)
def test_compiled_methods_called_at_rest_are_refused() -> None:
    model = fully_shard_model(Net("method"), fsdp_unit_modules=[Block])
    x = torch.ones(2, SIZE)
    model(x).sum().backward()
    with parity.raises_everywhere(RuntimeError, "another backend"):
        model.module.blocks[0].helper(x)
    model(x).sum().backward()
