"""Hardware of the current machine, measured in a few seconds and kept in the user's cache for the next time."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mfsdp_compile.passes.guests.solver.hardware import Hardware, hardware
from mfsdp_compile.processes import run_ranks
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.untrusted_files import write_text

from .calibration import describe, threads_of
from .measuring import ON_CPU, ON_CUDA, Effort, Shapes, measure_rank
from .workloads import workload


def shapes_of(model: nn.Module, tokens: int, forward: Callable[[], object]) -> Shapes:
    """Return the shapes of a model's linear layers, in forward and backward, and of its first fused attention.

    Args:
        model: Its parameters may be on the meta device.
        tokens: Rows of the input of each linear layer: batch size times sequence length.
        forward: Runs the model's forward.
    """
    products: set[tuple[int, int, int]] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            inputs, outputs = module.in_features, module.out_features
            # The output, the gradient of the input, and the gradient of the weight.
            products |= {(tokens, inputs, outputs), (tokens, outputs, inputs), (outputs, tokens, inputs)}
    with _Attention() as found, torch.no_grad():
        forward()
    by_size = sorted(products, key=lambda sizes: (sizes[0] * sizes[1] * sizes[2], sizes))
    return Shapes(tuple(by_size), found.shape)


class _Attention(compat.TorchFunctionMode):
    """Notes the shape of the queries of the first fused attention, ``[batch, heads, length, width]``."""

    shape: tuple[int, int, int, int] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and self.shape is None:
            query = args[0] if args else kwargs["query"]
            self.shape = tuple(query.shape)
        return function(*args, **(kwargs or {}))


def shapes_of_workload(model: str, batch: int | None = None, length: int | None = None) -> Shapes:
    """Return the shapes of the operations of a model by name.

    Args:
        model: What :func:`~mfsdp_compile.planning.workload` takes.
        batch, length: Sequences per rank, and their length. None: those of the demo for ``"demo"``; otherwise 1, and
            the model's default length.

    Raises:
        ValueError: There is no such model, or it has no linear layers.
    """
    work = workload(model, batch=batch or (8 if model == "demo" else 1), length=length)
    with torch.device("meta"):
        built = work.build()
        args, kwargs = work.inputs(work.batch, work.length)
        found = shapes_of(built, work.batch * work.length, lambda: built(*args, **kwargs))
    if not found.products:
        raise ValueError(f"{model} has no torch.nn.Linear, so there are no matrix products to measure")
    return found


def quick(shapes: Shapes) -> Effort:
    """Return what to measure in a few seconds."""
    base = ON_CUDA if torch.cuda.is_available() else ON_CPU
    sizes = base.collective_bytes[::2]
    return replace(
        base.of(shapes), memory_bytes=base.memory_bytes // 4, collective_bytes=sizes, round_seconds=0.02, rounds=3
    )


def cache_folder() -> Path:
    """Return the folder of this package in the user's cache: ``$XDG_CACHE_HOME/mfsdp``, or ``~/.cache/mfsdp``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mfsdp"


def calibrated(ranks: int, effort: Effort, again: bool = False) -> tuple[Path, Hardware, bool]:
    """Return hardware as measured on this machine, now or at an earlier call.

    The file's name depends on the machine, its devices, the versions of torch and Python, the number of ranks, the
    threads of each, and ``effort``.

    Args:
        ranks: Number of processes that measure at the same time. With GPUs, one per GPU.
        effort: What to measure.
        again: Measure even if there is a file.

    Returns:
        The file, what it says, and whether it was measured now.

    Raises:
        OSError: The file cannot be written.
        RuntimeError: A rank fails.
        ValueError: What was measured cannot be, as on a very busy machine.
    """
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    key = (platform.node(), platform.machine(), os.cpu_count(), gpus, torch.__version__, platform.python_version())
    digest = hashlib.sha256(repr((*key, ranks, threads_of(ranks), effort)).encode()).hexdigest()[:16]
    path = cache_folder() / f"hardware-{digest}.json"
    if not again and path.exists():
        try:
            return path, hardware(str(path)), False
        except ValueError:
            pass  # written by another version of this package, or cut off
    backend = "nccl" if gpus else "gloo"
    (measured,) = run_ranks(measure_rank, ranks, effort, backend=backend, threads=threads_of(ranks))
    machine = describe(measured, "this-machine", ranks)
    write_text(path, machine.to_json())
    return path, machine, True
