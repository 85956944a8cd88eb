"""Hooks that are registered after the first call run from the next call on, also in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import nn

Register = Callable[[nn.Module, Callable[..., Any]], Any]

HOOKS: dict[str, Register] = {
    "forward hook of a unit": lambda model, hook: model.blocks[0].register_forward_hook(hook),
    "forward hook that gets keywords": lambda model, hook: model.blocks[0].register_forward_hook(
        hook, with_kwargs=True
    ),
    "forward hook of a module inside": lambda model, hook: model.blocks[1].up.register_forward_hook(hook),
    "forward hook of a module without parameters": lambda model, hook: model.still.register_forward_hook(hook),
    "forward pre-hook of the model": lambda model, hook: model.register_forward_pre_hook(hook),
    "backward hook of a unit": lambda model, hook: model.blocks[0].register_full_backward_hook(hook),
    "backward pre-hook of a module inside": lambda model, hook: model.blocks[0].up.register_full_backward_pre_hook(
        hook
    ),
    "hook of a parameter": lambda model, hook: model.head.weight.register_hook(hook),
    "hook after accumulation": lambda model, hook: model.head.weight.register_post_accumulate_grad_hook(hook),
}


class Model(zoo.Plain):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.still = nn.Identity()

    def trunk(self, x: torch.Tensor) -> torch.Tensor:
        return self.still(super().trunk(x))


@pytest.mark.long_unless("eager-*")
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("way", [EAGER, AOT_EAGER, "block by block"])
def test_hooks_run_from_the_next_call_on(way: str) -> None:
    torch.compiler.reset()
    model, call = parity.shard(parity.build(Model), EAGER if way == "block by block" else way, [zoo.Block])
    if way == "block by block":
        for block in model.module.blocks:
            block.compile(backend="mfsdp", options={"inner": AOT_EAGER})
    x = torch.randn(4, 8)
    call(x).backward()
    runs: dict[str, int] = {}
    handles = []
    for name, register in HOOKS.items():  # all at once: each would have everything compiled again

        def count(*_: Any, name: str = name) -> None:
            runs[name] = runs.get(name, 0) + 1

        handles.append(register(model.module, count))
    call(x).backward()
    assert runs == dict.fromkeys(HOOKS, 1)
    for handle in handles:
        handle.remove()
    call(x).backward()
    assert runs == dict.fromkeys(HOOKS, 1)


@on_ranks(2, timeout=120)
def test_hooks_of_all_modules() -> None:
    torch.compiler.reset()
    model, call = parity.shard(parity.build(Model), AOT_EAGER, [zoo.Block])
    x, seen = torch.randn(4, 8), []  # type: ignore[var-annotated]
    call(x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        call(x)
    finally:
        handle.remove()
    assert seen.count("LayerNorm") == 3
    seen.clear()
    call(x)
    assert not seen
    model.zero_grad()
