"""What ``mfsdp doctor`` finds: versions, settings, a collective of each kind on each device, and a verdict."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from mfsdp_compile import __version__
from mfsdp_compile.processes import run_ranks
from mfsdp_compile.runtime import compat

LIMIT = timedelta(seconds=30)
"""Time after which a collective counts as hung."""


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Args:
        what: What it is.
        found: What was found.
        problem: What is wrong with it and what to do; empty if nothing is.
    """

    what: str
    found: str
    problem: str = ""


def run(console: Console) -> int:
    """Print what was found, then a verdict. Returns the exit code: 1 if something is wrong."""
    table = Table("what", "found", show_header=False)
    problems = []
    for finding in findings():
        table.add_row(finding.what, escape(finding.found))
        if finding.problem:
            problems.append(finding)
    console.print(table)
    for finding in problems:
        console.print(f"[red]wrong[/] {finding.what}: {escape(finding.problem)}", highlight=False, soft_wrap=True)
    if problems:
        console.print(f"{len(problems)} of these must change before training.", highlight=False)
        return 1
    devices = "GPUs" if torch.cuda.is_available() else "the CPU; no GPU was found"
    console.print(
        f"Ready to train on {devices}. `mfsdp demo` trains a small model; `mfsdp doctor --table` checks numbers."
    )
    return 0


def findings() -> Iterator[Finding]:
    """Look at versions and settings, then run collectives."""
    yield Finding("mfsdp-compile", __version__)
    yield Finding("python", platform.python_version())
    yield _torch()
    yield Finding("triton", _version("triton"))
    yield _gpus()
    yield _compiler()
    yield _backend()
    yield from _settings()
    for backend, ranks in [("gloo", 2), *([("nccl", torch.cuda.device_count())] if torch.cuda.is_available() else [])]:
        yield _collectives(backend, ranks)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _torch() -> Finding:
    newest = ".".join(map(str, compat.MAX_TESTED_TORCH))
    is_tested = compat.TORCH_VERSION <= compat.MAX_TESTED_TORCH
    return Finding(
        "torch", torch.__version__, "" if is_tested else f"the newest that was tested is {newest}. Install it."
    )


def _gpus() -> Finding:
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build of torch"
        return Finding("GPUs", f"none; {built}")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
    driver = compat.cuda_driver_version()
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    about = f"CUDA {torch.version.cuda}, driver for CUDA {driver // 1000}.{driver % 1000 // 10}, NCCL {nccl}"
    return Finding("GPUs", f"{torch.cuda.device_count()} x {names}; {about}")


def _compiler() -> Finding:
    found = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if found:
        return Finding("C++ compiler", found)
    what = "Inductor needs one to compile for the CPU. Install g++ or clang, or pass options={'inner': 'aot_eager'}."
    return Finding("C++ compiler", "none", "" if torch.cuda.is_available() else what)


def _backend() -> Finding:
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    found = [point.value for point in points if point.name == "mfsdp"]
    return Finding(
        'backend="mfsdp"',
        found[0] if found else "not installed: programs must import mfsdp_compile before torch.compile",
    )


def _settings() -> Iterator[Finding]:
    allocator = compat.allocator_settings()
    yield Finding("allocator", allocator or "default settings of torch's CUDA allocator")
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    note = " (kernels and collectives of different streams start in turn)" if connections == "1" else ""
    yield Finding("CUDA_DEVICE_MAX_CONNECTIONS", (connections or "not set") + note)
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    yield Finding("NCCL's settings", ", ".join(f"{name}={value}" for name, value in given.items()) or "none")


def _collectives(backend: str, ranks: int) -> Finding:
    what = f"{backend}, {ranks} rank{'s' * (ranks > 1)}"
    try:
        (told,) = run_ranks(_try_collectives, ranks, backend=backend, threads=1)
    except (RuntimeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        return Finding(what, "failed", f"{lines[-1]}. Training with {backend} on this machine will fail the same way.")
    return Finding(what, told)


def _try_collectives(rank: int, say: Callable[[str], None]) -> None:
    """Run each collective that training needs, compare what it gives, and let rank 0 say how long each took."""
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    name, ranks = dist.new_group(timeout=LIMIT).group_name, dist.get_world_size()
    numbers = torch.arange(1024.0, device=device)
    total = numbers * sum(range(1, ranks + 1))
    own = numbers * (rank + 1)

    collectives: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "all-gather": (
            lambda: compat.wait_tensor(compat.all_gather(own, ranks, name)),
            torch.cat([numbers * (each + 1) for each in range(ranks)]),
        ),
        "reduce-scatter": (
            lambda: compat.wait_tensor(compat.reduce_scatter(own.repeat(ranks), "sum", ranks, name)),
            total,
        ),
        "all-reduce": (lambda: compat.wait_tensor(compat.all_reduce(own, "sum", name)), total),
    }
    results = []
    for what, (collective, expected) in collectives.items():
        collective()
        began = time.perf_counter()
        is_right = torch.equal(collective(), expected)  # waits for the collective, and the GPU
        if not is_right:
            raise RuntimeError(f"{what} over {dist.get_backend()} gives wrong numbers on rank {rank}")
        results.append(f"{what} {(time.perf_counter() - began) * 1e3:.2f} ms")
    if rank == 0:
        say(f"right: {', '.join(results)} (4 KiB)")
