"""Compiled steps of optimizers: what their code for a GPU moves, and what it computes in Triton's interpreter.

python updates.py FOLDER > facts
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_gpu

fake_gpu.start("sm_90", Path(sys.argv[1]), TRITON_INTERPRET="1")

import interpreter
import torch
from generating import code_of, modules_are_seen
from host_device import HostDevice, prepare, wrapper_of
from interpreter import InterpretedKernel
from recording import Recording, kernels_are_recorded, record
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.optimizers.update_kernel import UpdateKernel, UpdateKernels
from mfsdp_compile.runtime.optim import update_kernel

NUMEL = 4096
LR = 1e-2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=LR),
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, lr=LR, amsgrad=True),
    "AdamW capturable": lambda params: torch.optim.AdamW(params, lr=LR, capturable=True),
    "AdamW capturable, lr on the device": lambda params: torch.optim.AdamW(
        params, lr=torch.tensor(LR), foreach=False, capturable=True
    ),
    "SGD": lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=LR),
}


def generated(optimizer: torch.optim.Optimizer, like: dict[str, Tensor], see: Callable[..., None]) -> UpdateKernel:
    """Compile a step for a GPU, with gradients that are scaled."""
    on_host = ("step",) if not optimizer.param_groups[0].get("capturable") else ()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), modules_are_seen(see):
        flat = torch.empty(NUMEL, device="cuda:0")
        state = {
            name: torch.empty(value.shape, device="cpu" if name in on_host else "cuda:0")
            for name, value in like.items()
        }
        kernels = UpdateKernels(optimizer, compat.step_without_hooks(type(optimizer)), {})
        (group,) = optimizer.param_groups
        lr = group["lr"]
        if isinstance(lr, Tensor):
            group["lr"] = torch.empty((), device="cuda:0")
        kernel = kernels.find(flat, group, state, scaled=True)
        group["lr"] = lr
    assert isinstance(kernel, UpdateKernel), kernel
    return kernel


def moved(optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> list[Recording]:
    found = []

    def see(graph: Any, module: ModuleType) -> None:
        given = [node.meta.get("val") for node in graph.orig_gm.graph.find_nodes(op="placeholder")]
        with graph.fake_mode:
            found.append(record("inference", code_of(module), module, module.call, given))

    with kernels_are_recorded():
        generated(optimizer, state, see)
    return found


def computed(optimizer: torch.optim.Optimizer, flat: Tensor, state: dict[str, Tensor]) -> None:
    """Step with interpreted kernels on the host, as ``optimizer`` does after it."""
    modules: list[Any] = []
    kernel = generated(optimizer, state, lambda _, module: modules.append(module))
    (module,) = modules
    assert any(isinstance(value, InterpretedKernel) for value in vars(module).values())
    prepare(module, wrapper_of(module))
    call = module.runner.call if hasattr(module, "runner") else module.call

    def run(*args: Tensor) -> None:
        with HostDevice():
            call(list(args))

    kernel._kernel = run
    (param,) = optimizer.param_groups[0]["params"]
    group = optimizer.param_groups[0]
    is_tensor = isinstance(group["lr"], Tensor)
    for number in range(1, 4):
        gradient, scale = torch.randn(NUMEL), torch.rand(())
        param.grad = gradient * scale
        group["lr"] = torch.tensor(LR * number) if is_tensor else LR * number
        group["capturable"] = False
        optimizer.step()
        kernel(flat, gradient, scale, group["lr"], state)


def row(make: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(NUMEL))
    optimizer = make([param])
    (group,) = optimizer.param_groups
    is_capturable = group.get("capturable", False)
    group["capturable"] = False  # torch's own step refuses it on the host
    param.grad = torch.randn(NUMEL)
    optimizer.step()
    group["capturable"] = is_capturable
    flat, state = param.detach().clone(), {name: value.clone() for name, value in optimizer.state[param].items()}
    (recording,) = moved(optimizer, state)
    computed(optimizer, flat, state)
    right = {"": param.detach(), **optimizer.state[param]}
    return {
        "launches": len(recording.events),
        "bytes": sum(event.bytes for event in recording.events),
        "reads of the device": [each for each in recording.syncs if "_local_scalar_dense" not in each],
        "tensors of the state": sum(value.ndim for value in state.values()),
        "worst": max((mine - right[name]).abs().max().item() for name, mine in {"": flat, **state}.items()),
        "violations": interpreter.violations,
    }


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    update_kernel._LENGTH = NUMEL  # type: ignore[misc]
    update_kernel._refused = lambda *_: ""  # fake tensors have no addresses
    UpdateKernels._try = lambda *_: None  # type: ignore[method-assign, misc]  # and cannot be computed with
    interpreter.install()
    print(json.dumps({name: row(make) for name, make in OPTIMIZERS.items()}), file=results, flush=True)


if __name__ == "__main__":
    main()
