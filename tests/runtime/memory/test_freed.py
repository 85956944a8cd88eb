"""A model's memory is freed with the last reference to it: no reference cycle holds it for the garbage collector."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import parity
import pytest
import torch
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn

import mfsdp_compile.fsdp2 as face
from mfsdp_compile import fully_shard_optimizer
from mfsdp_compile.runtime.eager.modules import owner_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        x = self.blocks(x)
        if fails:
            raise ValueError("an error in forward")
        return self.head(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.head(x)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def made(how: str, **options: Any) -> tuple[Any, Any]:
    """Return a sharded model, and what to call."""
    model = Net()
    if how == "face":
        for block in model.blocks:
            face.fully_shard(block)
        sharded: Any = face.fully_shard(model)
        return sharded, sharded
    return parity.shard(model, how, sharding=options)


def memory_of(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, weakref.ref[Tensor]]:
    """Return weak references to the tensors that a model and its optimizer hold."""
    held: dict[str, Tensor | None] = {}
    for number, bucket in enumerate(owner_of(getattr(model, "module", model)).buckets):
        held |= {f"shard {number}": bucket.flat, f"resident {number}": bucket.resident}
        for index, param in enumerate(bucket.params):
            held[f"parameter {number}.{index}"] = param
            held[f"gradient {number}.{index}"] = param.grad
    for number, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
        held |= {f"{key} {number}": value for key, value in state.items()}
    return {name: weakref.ref(tensor) for name, tensor in held.items() if tensor is not None}


def alive(memory: dict[str, weakref.ref[Tensor]]) -> list[str]:
    return [name for name, tensor in memory.items() if tensor() is not None]


def kept(memory: dict[str, weakref.ref[Tensor]]) -> list[str]:
    """Return what stays: threads that watch ranks hold a model for a moment."""
    until = time.monotonic() + 2
    while (names := alive(memory)) and time.monotonic() < until:
        time.sleep(0.01)
    return names


def steps(call: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        call(torch.ones(4, 8)).sum().backward()
        optimizer.step()


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("how", [EAGER, AOT_EAGER, "face"])
def test_a_model_and_its_optimizer(how: str) -> None:
    for kind in ("plain", "by parameter", "flat", "whole"):
        with without_collector():
            model, call = made(how)
            optimizer: Any = torch.optim.AdamW(model.parameters())
            if kind != "plain":
                fully_shard_optimizer(optimizer, flat=kind == "flat", whole=kind == "whole")
                torch.optim.lr_scheduler.StepLR(optimizer, 1)
            steps(call, optimizer)
            memory = memory_of(model, optimizer)
            assert len(memory) > 15
            del model, call, optimizer
            assert not (names := kept(memory)), (kind, names)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("how", [EAGER, "face"])
def test_after_other_uses(how: str) -> None:
    with without_collector():
        model, call = made(how)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        steps(call, optimizer)
        if how == "face":
            face.register_fsdp_forward_method(model, "encode")
        else:
            model.register_forward_method("encode")
        model.encode(torch.ones(4, 8)).sum().backward()
        optimizer.load_state_dict(optimizer.state_dict())
        model.load_state_dict(model.state_dict())
        with contextlib.suppress(ValueError):
            call(torch.ones(4, 8), fails=True)
        twin = copy.deepcopy(model)
        twin(torch.ones(4, 8)).sum().backward()
        assert twin.encode(torch.ones(4, 8)).shape == (4, 3)
        memory, of_twin = memory_of(model, optimizer), memory_of(twin)
        del model, call, optimizer
        assert not kept(memory)
        assert len(alive(of_twin)) == len(of_twin)
        del twin
        assert not (names := kept(of_twin)), names


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_residents_and_deferred_gradients(strategy: str) -> None:
    with without_collector():
        model, call = made(EAGER, zero_dp_strategy=strategy)
        with model.no_sync():
            call(torch.ones(4, 8)).sum().backward()
        memory = memory_of(model)
        del model, call
        assert not kept(memory)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("how", [EAGER, AOT_EAGER, "face"])
def test_a_backward_keeps_the_model(how: str) -> None:
    with without_collector():
        model, call = made(how)
        params = list(model.parameters())
        loss = call(torch.ones(4, 8)).sum()
        del model, call
        loss.backward()
        assert all(param.grad.full_tensor().abs().sum() > 0 for param in params)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("extended", [False, True])
def test_an_optimizer_without_its_model(extended: bool) -> None:
    """It steps on as before, and one module of the model keeps all of it."""
    model, call = made(EAGER)
    block = model.module.blocks[0]
    optimizer = torch.optim.AdamW(model.parameters())
    if extended:
        fully_shard_optimizer(optimizer)
    steps(call, optimizer)
    call(torch.ones(4, 8)).sum().backward()
    before = [param.full_tensor() for param in model.parameters()]
    del model, call
    optimizer.step()
    block(torch.ones(4, 8)).sum().backward()
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert not any(torch.equal(param.full_tensor(), old) for param, old in zip(held, before, strict=True))
    del block
    optimizer.step()
    held[0].requires_grad_(False)
