"""Do N ranks on NCCL train what one rank trains? The checks of ``tests/programs`` on gloo, on GPUs.

    torchrun --nproc-per-node 8 -m across_ranks RESULT.json models strategies settings groups failures
    torchrun --nproc-per-node 2 -m across_ranks RESULT.json models:0/3      # every third model, from the first

Each row ends with the comparison that its function names. The eager path and the compiled graph agree bit for bit,
all ranks agree, and one rank that computes the batches of all ranks gets the same up to the rounding of sums in another
order. ``groups`` and ``failures`` come last, because a failure there hangs.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for products with the same bits; read when cuBLAS is first used
os.environ["MFSDP_VERIFY"] = "each"

import parity
import torch
import torch.distributed as dist
import zoo
from failing import Failing, values
from gpu_models import FAKE, MODES, same_bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mfsdp_compile import (
    MixedPrecisionPolicy,
    compile_step,
    fsdp2,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime import compat

ON_CPU = {"SparseGradients"}
"""Models left out: NCCL reduces no sparse tensor, and the reference needs one."""
MODELS = [name for name in parity.MODELS if name not in ON_CPU]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
DOUBLE = {"fsdp_double_buffer": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "communication buffers": DOUBLE,
    "buffers of equal sizes": {"maxpool_double_buffer": True},
    "registered buffers": {"nccl_ub": True, **DOUBLE},
    "registered buffers, not symmetric": {"nccl_ub": True, "disable_symmetric_registration": True, **DOUBLE},
    "one communicator": {"communication": {"separate_gathers": False}},
    "two communicators": {"communication": {"separate_gathers": True}},
    "communicators with settings": {
        "communication": {"gathers": {"high_priority": True, "max_ctas": 4}, "reductions": {"max_ctas": 2}}
    },
    "gathers not overlapped": {"overlap_param_gather": False},
    "reductions not overlapped": {"overlap_grad_reduce": False},
    "gathered until backward": {"reshard_after_forward": False},
}
"""Arguments that change no bit."""
PRECISIONS = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16),
    "bfloat16, reduced in float32": MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=torch.float32),
    "bfloat16, added up in float32": MixedPrecisionPolicy(
        param_dtype=BF16, grad_comm_dtype=BF16, grad_sum_dtype=torch.float32
    ),
    "gathers in float8": MixedPrecisionPolicy(param_dtype=BF16, param_comm_dtype=E4M3),
}
SECONDS = 40.0
"""Timeout of the process group that is made to fail."""
Row = tuple[str, Callable[[], None]]


def check(rank: int, device: torch.device) -> dict[str, Any]:
    passed: list[str] = []
    failed: list[str] = []
    for name, work in (row for chosen in sys.argv[2:] or list(SETS) for row in _rows(chosen, device)):
        begun = time.monotonic()
        faulthandler.dump_traceback_later(SECONDS, exit=False)  # where it hangs
        try:
            work()
            error = ""
        except Exception:
            error = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        wrong = torch.tensor(int(bool(error)), device=device)
        dist.all_reduce(wrong)
        if error or wrong:
            failed.append(f"{name}: {error or 'failed on another rank'}")
        else:
            passed.append(name)
        if rank == 0:
            print(f"{'FAILED' if wrong else 'passed'} {name} ({time.monotonic() - begun:.1f} s)", flush=True)
        torch._dynamo.reset()
    return {"ranks": dist.get_world_size(), "passed": passed, "failed": failed}


def _rows(chosen: str, device: torch.device) -> Iterator[Row]:
    """Yield the rows of a set: all, or for ``name:1/3`` every third from the second."""
    name, _, part = chosen.partition(":")
    first, _, step = part.partition("/")
    rows = list(SETS[name](device))
    yield from rows[int(first or 0) :: int(step or 1)]


def _models(device: torch.device) -> Iterator[Row]:
    for name in MODELS:
        yield f"one rank's numbers: {name}", functools.partial(_compare, parity.MODELS[name], device)


def _strategies(device: torch.device) -> Iterator[Row]:
    hybrid = () if dist.get_world_size() % 2 else ("HSDP optim_grads_params", "HFSDP")
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params", *hybrid):
        arguments = mesh_arguments(strategy, device.type)
        yield strategy, functools.partial(_compare, zoo.Uneven, device, 2, arguments)


def _settings(device: torch.device) -> Iterator[Row]:
    backend = compat.nccl_backend(dist.group.WORLD.group_name, device)
    registers = backend is not None and compat.allocates(backend)
    for name, arguments in SETTINGS.items():
        if "nccl_ub" not in arguments or registers:
            yield name, functools.partial(_unchanged, arguments, device)
    if backend is not None and not registers:
        yield "registered buffers, which this machine cannot have", functools.partial(_refused, device)
    for name, policy in PRECISIONS.items():
        yield name, functools.partial(_both_ways, policy, device)
    for mode in MODES[:2]:
        yield f"steps in backward, {mode}", functools.partial(_stepped, mode, device)
    if not FAKE:  # nothing compiles for fake GPUs
        yield "compiled steps of an optimizer", functools.partial(_stepped, parity.EAGER, device, compiles=True)
    yield "FSDP2 beside its face", functools.partial(_beside_fsdp2, device)


def _groups(device: torch.device) -> Iterator[Row]:
    yield "groups of some ranks", functools.partial(_subgroups, device)
    yield "groups of some ranks, made by some ranks", functools.partial(_lonely_group, device)


def _failures(device: torch.device) -> Iterator[Row]:
    for mode in MODES[:2]:
        yield f"one rank fails, {mode}", functools.partial(_one_fails, mode, device)


SETS: dict[str, Callable[[torch.device], Iterator[Row]]] = {
    "models": _models,
    "strategies": _strategies,
    "settings": _settings,
    "groups": _groups,
    "failures": _failures,
}


def _on(device: torch.device, factory: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: factory().to(device)


def _compare(factory: Any, device: torch.device, microbatches: int = 1, sharding: Any = None) -> None:
    """Compare all modes with one rank, and the first two to the bit."""
    built = _on(device, factory)
    data = parity.batches(3).to(device)
    with same_bits():
        alone = parity.train_alone(built, data, parity.sgd, microbatches)
        runs = [
            parity.train_sharded(built, mode, data, parity.sgd, microbatches, sharding=dict(sharding or {}))
            for mode in MODES
        ]
    parity.assert_bitwise(runs[0], runs[1])
    for run in runs:
        # Autocast computes in bfloat16: 2^-8, amplified by three layers
        parity.assert_close(run, alone, 2e-2 if factory is zoo.Autocast else 1e-5)


def _unchanged(arguments: dict[str, Any], device: torch.device) -> None:
    """Compare trainings with and without settings to the bit, eager and compiled; Inductor's to rounding."""
    built = _on(device, zoo.Stacked)
    data = parity.batches(3).to(device)
    with same_bits():
        plain = parity.train_sharded(built, MODES[0], data, parity.sgd)
        runs = [parity.train_sharded(built, mode, data, parity.sgd, sharding=dict(arguments)) for mode in MODES]
    for run in runs[:2]:
        parity.assert_bitwise(plain, run)
    for run in runs[2:]:
        parity.assert_close(run, plain)


def _refused(device: torch.device) -> None:
    """Ask for registered buffers where torch has no memory of NCCL's."""
    with parity.raises_everywhere(RuntimeError, "nccl_ub=True needs memory that NCCL allocates"):
        fully_shard_model(parity.build(zoo.Plain).to(device), fsdp_unit_modules=[zoo.Block], nccl_ub=True)


def _both_ways(policy: MixedPrecisionPolicy, device: torch.device) -> None:
    """Compare the eager path with the compiled graph to the bit; Inductor's code rounds less often."""
    built = _on(device, zoo.Aligned)
    data = parity.batches(3).to(device)
    with same_bits():
        runs = [parity.train_sharded(built, mode, data, parity.sgd, precision=policy) for mode in MODES]
    parity.assert_bitwise(runs[0], runs[1])
    for run in runs[2:]:
        parity.assert_close(run, runs[0], 3e-2)  # bfloat16 rounds to 2^-8, and Inductor keeps float32 between operators


def _stepped(mode: str, device: torch.device, compiles: bool = False) -> None:
    """Compare ``compile_step`` with steps that are written out: to the bit, unless the optimizer's step is compiled."""
    data = parity.batches(4).to(device)
    found: list[list[torch.Tensor]] = []
    for is_written_out in (True, False):
        model = fully_shard_model(parity.build(zoo.Plain).to(device), fsdp_unit_modules=[zoo.Block])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        optimizer = fully_shard_optimizer(optimizer, flat=True)
        options = {"inner": mode}
        step = compile_step(
            model,
            optimizer,
            compile_optimizer=compiles,
            backend=None if mode == parity.EAGER else "mfsdp",
            options=options,
        )
        call = model if mode == parity.EAGER else torch.compile(model, backend="mfsdp", options=options)
        with same_bits():
            for batch in data:
                if is_written_out:
                    call(batch[dist.get_rank()]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                else:
                    step(batch[dist.get_rank()])
        found.append([param.to_local().detach().clone() for param in model.parameters()])
        assert not compiles or is_written_out or "as 1 kernel" in step.explain(), step.explain()
    for one, other in zip(*found, strict=True):
        # A kernel rounds less often; four steps of 0.01 amplify the difference of small gradients.
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5) if compiles else torch.equal(one, other)


def _beside_fsdp2(device: torch.device) -> None:
    """Compare FSDP2 with its face. With more than two ranks, sums are in another order."""
    data = parity.batches(3).to(device)
    results: list[list[torch.Tensor]] = []
    for shard in (fully_shard, fsdp2.fully_shard):
        torch.manual_seed(0)
        model = zoo.Plain().to(device)
        for module in (*model.blocks, model):
            shard(module)
        optimizer = parity.sgd(model.parameters())
        found = []
        for batch in data:
            loss = model(batch[dist.get_rank()])
            loss.backward()
            found += [loss.detach(), *(param.grad.full_tensor() for param in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
        results.append([*found, *(param.full_tensor().detach() for param in model.parameters())])
    for theirs, mine in zip(*results, strict=True):
        parity.close("FSDP2", mine, theirs)


def _subgroups(device: torch.device) -> None:
    """A mesh of two dimensions: each half of the ranks shards a model of its own."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (2, ranks // 2) if ranks % 2 == 0 else (1, ranks), mesh_dim_names=("pp", "dp"))
    _train(mesh["dp"], device, seed=mesh["pp"].get_local_rank())


def _lonely_group(device: torch.device) -> None:
    """The package makes further groups for one half of the ranks, while the others do something else."""
    ranks = max(1, dist.get_world_size() // 2)
    group = dist.new_group(range(ranks))
    if dist.get_rank() < ranks:
        _train(DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",)), device, seed=0)
    dist.barrier()


def _train(mesh: DeviceMesh, device: torch.device, seed: int) -> None:
    """Train on the same batch on every rank: the loss must be that of the whole model."""
    torch.manual_seed(seed)
    whole = zoo.Plain().to(device)
    torch.manual_seed(seed)
    model = fully_shard_model(zoo.Plain().to(device), mesh, fsdp_unit_modules=[zoo.Block])
    x = torch.ones(6, 8, device=device)
    for each in (whole, model):
        each(x).backward()
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        parity.close("gradient", mine.grad.full_tensor(), its.grad)


def _one_fails(mode: str, device: torch.device) -> None:
    """One rank raises in its forward: all have an error within the timeout, and go on from what they had saved.

    A rank that runs ahead of its GPU waits where it synchronizes, and has its error in the next call.
    """
    data = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)).to(device)

    def made() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        group = dist.new_group(timeout=timedelta(seconds=SECONDS))  # NCCL cannot connect one again that was aborted
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
        model = fully_shard_model(Failing().to(device), mesh, fsdp_unit_modules=[zoo.Block])
        call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": mode})
        return model, call, parity.sgd(model.parameters())

    def step(call: Any, optimizer: Any, batch: torch.Tensor) -> None:
        call(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with same_bits():
        model, call, optimizer = made()
        step(call, optimizer, data[0])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        Failing.where = 1 if dist.get_rank() == dist.get_world_size() - 1 else -1
        begun = time.monotonic()
        try:
            step(call, optimizer, data[1])
            torch.cuda.synchronize()
            print(f"rank {dist.get_rank()} goes on after {time.monotonic() - begun:.1f} s", flush=True)
            call(data[1])
        except (RuntimeError, ValueError) as error:
            print(f"rank {dist.get_rank()}, after {time.monotonic() - begun:.1f} s: {error}", flush=True)
            assert "a bad batch" in str(error)
        else:
            raise AssertionError("no error")
        finally:
            Failing.where = -1
        assert time.monotonic() - begun < SECONDS
        model.reset()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step(call, optimizer, data[2])
        found = values(model)
        model, call, optimizer = made()
        for batch in (data[0], data[2]):
            step(call, optimizer, batch)
        assert all(map(torch.equal, found, values(model)))


if __name__ == "__main__":
    import programs

    programs.run(check)
