"""One rank of a sharded model whose code for a GPU is computed on the CPU, against the eager path and one process.

    python compute.py RANK WORLD FOLDER < rows > results

Each line of the input is a row's ``[model, setting, way, mutant]``, in the words of :mod:`cuda_rows` and
:mod:`wrong_code`. Each line of the output has the worst differences and what was launched. There are two ways:

- *kernels*: tensors of the CPU, with Inductor's Triton kernels, which the interpreter runs
- *wrapper*: the code that is generated for CUDA tensors on a device that does not exist, on memory of the host
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import fake_gpu

RANK, WORLD, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
LIMIT = timedelta(seconds=90)
fake_gpu.start(
    "sm_90",
    FOLDER,
    RANK=str(RANK),
    WORLD_SIZE=str(WORLD),
    MFSDP_POISON="1",
    TORCHINDUCTOR_CACHE_DIR=str(FOLDER / f"inductor{RANK}"),
    TRITON_CACHE_DIR=str(FOLDER / f"triton{RANK}"),
    TRITON_INTERPRET="1",
)

import interpreter
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import wrong_code
from cuda_rows import SMALL, Setting, models
from generating import (
    codes_are_seen,
    compiled_with,
    fake_ranks,
    forget_groups,
    modules_are_seen,
    on_fake_device,
    shard,
)
from host_device import HostDevice, poisoning_reuse, prepare, wrapper_of
from late_collectives import Traffic, late_collectives, poison
from torch import Tensor, nn

from mfsdp_compile.backend import compile as backend
from mfsdp_compile.backend.straight_line import Code, Runner
from mfsdp_compile.passes.context import phase_of


@dataclass
class Generated:
    """A row's code for a GPU.

    Args:
        modules: What Inductor has generated for the pieces.
        codes: What calls the pieces, by phase.
        run: What runs these, as the backend returned it.
        on_host: How they run.
    """

    modules: list[ModuleType] = field(default_factory=list)
    codes: dict[str, Code] = field(default_factory=dict)
    run: Callable[..., Any] | None = None
    on_host: dict[str, Runner] = field(default_factory=dict)


def run_on_host(generated: Generated, mutant: str) -> None:
    """Let generated code run on the host, changed by a mutant."""
    changed = False
    for module in generated.modules:
        if not hasattr(module, "kernels_as_made"):
            module.kernels_as_made = {  # type: ignore[attr-defined]
                name: value for name, value in vars(module).items() if isinstance(value, interpreter.InterpretedKernel)
            }
        kernels = module.kernels_as_made
        right = poisoning_reuse(wrapper_of(module), {name: kernel.parameters for name, kernel in kernels.items()})
        wrapper = right if changed else wrong_code.piece(mutant, right)
        vars(module).update(kernels)  # without what an earlier mutant has changed
        changed |= wrapper != right
        for name, kernel in kernels.items():
            edited = wrong_code.kernel(mutant, kernel.source)
            if edited != kernel.source:
                vars(module)[name], changed = interpreter.InterpretedKernel(name, edited), True
        prepare(module, wrapper)
        runner = module.runner if hasattr(module, "runner") else module.Runner(partitions=[])
        module.on_host = runner.call  # type: ignore[attr-defined]
    for phase, code in generated.codes.items():
        source = wrong_code.graph(mutant, phase, code.source)
        changed |= source != code.source
        constants = code.constants | {"_poison_reused": poison}
        function = replace(code, source=source, constants=constants, _function=None).function()
        generated.on_host[phase] = functools.partial(_run_on_host, function)
    assert changed == bool(mutant), f"{mutant!r} changed nothing"


def _run_on_host(function: Runner, arguments: list[Any]) -> Any:
    with HostDevice():
        return function(arguments)


@contextlib.contextmanager
def _group(number: int) -> Iterator[None]:
    forget_groups()
    store = dist.FileStore(str(FOLDER / f"store{number}"), WORLD)
    dist.init_process_group("gloo", rank=RANK, world_size=WORLD, store=store, timeout=LIMIT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _batches(make_inputs: Callable[[], list[Any]], setting: Setting, rank: int) -> list[list[Any]]:
    torch.manual_seed(10 + rank)
    dtype = setting.dtype
    batches = [make_inputs() for _ in range(setting.microbatches)]
    return [[x.to(dtype) if x.is_floating_point() else x for x in batch] for batch in batches]


def _train(call: Any, model: Any, batches: list[list[Any]], sharded: bool) -> list[Tensor]:
    losses = []
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        if sharded:
            model.is_last_microbatch = last
        loss = call(*batch)
        loss.backward()
        losses.append(loss.detach())
    return losses


def _worst(mine: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest relative difference in norm; NaN if there is any."""
    found = [((a - b).norm() / (b.norm() + 1e-9)) for a, b in zip(mine, other, strict=True)]
    return torch.stack(found).max().item()


def _gradients(model: nn.Module) -> list[Tensor]:
    grads = [param.grad for param in model.parameters()]
    return [(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).float() for grad in grads]


def step(make: Any, units: Any, make_inputs: Any, setting: Setting, traffic: Traffic) -> dict[str, Any]:
    """Train one step each way, in a group. Return the differences."""
    torch.manual_seed(0)
    torch.set_default_dtype(setting.dtype)
    plain = make()
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in plain.parameters():  # zeros and ones would hide wrong offsets
            parameter.add_(0.1 * torch.randn_like(parameter))
    eager, sharded = (shard(copy.deepcopy(plain), units, setting, "cpu") for _ in range(2))
    whole = copy.deepcopy(plain).float()
    batches = _batches(make_inputs, setting, RANK)
    expected = _train(eager, eager, batches, True)
    for rank in range(WORLD):
        theirs = [[x.float() if x.is_floating_point() else x for x in b] for b in _batches(make_inputs, setting, rank)]
        _train(whole, whole, theirs, False)
    for parameter in whole.parameters():
        assert parameter.grad is not None
        parameter.grad /= WORLD
    options = {**setting.options, "float32_gradients": False}  # generated with it, for CUDA only
    compiled = torch.compile(sharded, backend=lambda *graph: backend.mfsdp(*graph, options=options), fullgraph=True)
    interpreter.launches.clear()
    interpreter.violations.clear()
    begun = time.perf_counter()
    losses = _train(compiled, sharded, batches, True)
    seconds = time.perf_counter() - begun
    traffic.end()
    started = copy.deepcopy(traffic.started)
    mine, its, one = map(_gradients, (sharded, eager, whole))
    return {
        "loss": _worst(losses, expected),
        "gradients": _worst(mine, its),
        "one process": _worst(mine, one),
        "eager, one process": _worst(its, one),
        "kernels": len(interpreter.launches),
        "launches": sum(interpreter.launches.values()),
        "seconds": round(seconds, 2),
        "started": started,
        "violations": [*interpreter.violations, *traffic.violations],
    }


def row(number: int, name: str, setting: Setting, way: str, mutant: str) -> dict[str, Any]:
    make, units, make_inputs = models(SMALL)[name]
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        if way == "wrapper":
            generated = _generated_once(name, setting)
            run_on_host(generated, mutant)
            stack.enter_context(mock.patch.object(backend, "_compile_inner", _in_place_of(generated.run)))
        else:
            stack.enter_context(inductor_config.patch(cpu_backend="triton"))
        stack.enter_context(_group(number))
        traffic = stack.enter_context(late_collectives())
        return step(make, units, make_inputs, setting, traffic)


def _in_place_of(run: Callable[..., Any] | None) -> Callable[..., Any]:
    """Compile as the backend does, which decides and makes groups, and return the code of another process group."""
    compile_inner = backend._compile_inner

    def compile_here(gm: Any, inputs: Any, options: Any, *more: Any) -> Any:
        compile_inner(gm, inputs, replace(options, inner="aot_eager"), *more)
        return run

    return compile_here


_generated: dict[str, Generated] = {}


def _generated_once(name: str, setting: Setting) -> Generated:
    key = json.dumps([name, dataclasses.asdict(setting)])
    if key not in _generated:
        generated = Generated()
        compile_inner = backend._compile_inner

        def see_module(_: Any, module: Any) -> None:
            generated.modules.append(module)
            module.call = lambda arguments: module.on_host(arguments)

        def see_code(graph: Any, code: Code) -> None:
            phase = phase_of(graph).value
            generated.codes[phase] = code
            code._function = lambda arguments: generated.on_host[phase](arguments)

        def keep(*args: Any) -> Any:
            generated.run = compile_inner(*args)
            return generated.run

        with (
            mock.patch.object(backend, "_compile_inner", keep),
            fake_ranks(WORLD, RANK),
            modules_are_seen(see_module),
            codes_are_seen(see_code),
            on_fake_device(name, SMALL, setting.dtype) as (model, units, inputs),
        ):
            model = shard(model, units, setting, "cuda")
            compiled_with(lambda *graph: backend.mfsdp(*graph, options=dict(setting.options)), model, inputs)
        _generated[key] = generated
    return _generated[key]


def main() -> None:
    interpreter.install()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    for number, line in enumerate(sys.stdin):
        name, given, way, mutant = json.loads(line)
        try:
            found = row(number, name, Setting(**given), way, mutant)
        except Exception as error:
            found = {"error": traceback.format_exc(), "kind": type(error).__name__}
        print(json.dumps(found), file=results, flush=True)


if __name__ == "__main__":
    main()
