"""Generate code for rows of settings, in a process of its own, and write what it does as JSON.

    python generate.py sm_90 FOLDER < rows > results

Each line of the input is a row's ``[model, setting]``, in the words of :mod:`cuda_rows`. Each line of the output is a
dictionary of the facts of that row (:mod:`code_facts`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_gpu

ARCHITECTURE, FOLDER = sys.argv[1], Path(sys.argv[2])
os.environ.update(
    TORCHINDUCTOR_COMPILE_THREADS="1",
    TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
    TORCHINDUCTOR_CACHE_DIR=str(FOLDER / "inductor"),
    TRITON_CACHE_DIR=str(FOLDER / "triton"),
)
fake_gpu.load_guard(FOLDER)

import torch

torch.set_num_threads(1)
fake_gpu.install(fake_gpu.GPUS[ARCHITECTURE])

import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from code_facts import Wanted, baseline, facts, wanted_of
from cuda_rows import PRECISIONS, RANKS, Setting, models
from recording import Recording, kernels_are_recorded, record
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from mfsdp_compile import MixedPrecisionPolicy, api, fully_shard_model
from mfsdp_compile.backend.compile import mfsdp
from mfsdp_compile.runtime import compat


def _really(function: Any) -> Any:
    """Let a function compute with real tensors although a fake mode is active."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


api.build_topology = _really(api.build_topology)  # reads ranks from a device mesh, which is a tensor


class _Generated(BaseException):
    """Ends a call of a compiled model when its code is there."""


@contextlib.contextmanager
def recorded(recordings: list[Recording]) -> Iterator[None]:
    """Context in which each graph's code is recorded when it is made."""
    compiles = GraphLowering.compile_to_module

    def compile_to_module(self: Any) -> Any:
        module = compiles(self)
        phase = "backward" if self.is_backward else "inference" if self.is_inference else "forward"
        inputs = [node.meta.get("val") for node in self.orig_gm.graph.find_nodes(op="placeholder")]
        with self.fake_mode:
            call = record(phase, Path(module.__file__).read_text(encoding="utf-8"), module, module.call, inputs)
        recordings.append(call)
        return module

    GraphLowering.compile_to_module = compile_to_module
    try:
        with (
            kernels_are_recorded(),
            functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
            inductor_config.patch(fx_graph_cache=False, joint_graph_constant_folding=False),
        ):
            yield
    finally:
        GraphLowering.compile_to_module = compiles


def generated(model: Any, inputs: list[Any], compile_graph: Any, trains: bool) -> list[Recording]:
    """Return the recordings of a model's graphs."""
    recordings: list[Recording] = []

    def backend(gm: Any, examples: Any) -> Any:
        compile_graph(gm, examples)
        raise _Generated

    torch._dynamo.reset()
    grad = contextlib.nullcontext() if trains else torch.no_grad()
    with recorded(recordings), grad, contextlib.suppress(_Generated):
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return recordings


@contextlib.contextmanager
def made(name: str) -> Iterator[tuple[Any, list[type], list[Any]]]:
    """Context in which a model exists, in bfloat16 and in fake memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), compat.quiet():
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda:0"):
            model, units, inputs = models()[name]()
        torch.set_default_dtype(torch.float32)
        yield model, units, inputs


_whole: dict[tuple[str, bool], list[Recording]] = {}


def whole(name: str, setting: Setting) -> list[Recording]:
    """Return the recordings of the model that is not sharded."""
    key = name, setting.trains
    if key not in _whole:
        with made(name) as (model, _, inputs):
            _whole[key] = generated(model, inputs, compile_fx, setting.trains)
    return _whole[key]


def sharded(name: str, setting: Setting) -> tuple[list[Recording], dict[str, Wanted]]:
    """Return the recordings of the sharded model, and what the passes decided about them, by phase."""
    wanted: dict[str, Wanted] = {}

    def observe(graph: Any, context: Any, phase: Any) -> None:
        wanted[phase.value] = wanted_of(graph, context)

    sizes = {"outer": 2, "fsdp": RANKS // 2} if setting.outer else {"fsdp": RANKS}
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    both = mesh["outer", "fsdp"]._flatten().get_group() if setting.outer else None
    dtypes = {field: dtype and getattr(torch, dtype) for field, dtype in PRECISIONS[setting.precision].items()}
    with made(name) as (model, units, inputs):
        model = fully_shard_model(
            model,
            device_mesh=mesh,
            dp_shard_dim="fsdp",
            dp_outer_dim="outer" if setting.outer else None,
            hybrid_fsdp_group=both,
            fsdp_unit_modules=units,
            zero_dp_strategy=setting.strategy,
            mixed_precision_policy=MixedPrecisionPolicy(**dtypes),
            check_values=False,
            **setting.sharding,
        )
        options = {**setting.options, "report": True, "passes": [observe]}
        recordings = generated(model, inputs, lambda *graph: mfsdp(*graph, options=options), setting.trains)
    return recordings, wanted


_STATIC = [
    name for name in ("use_static_cuda_launcher", "use_static_triton_launcher") if hasattr(inductor_config, name)
]
"""Launches kernels without Triton, and keeps no cubin. Torch 2.13 and later have both names."""

_cubins: set[str] = set()


def compiled(recordings: list[Recording]) -> int:
    """Compile the kernels with Triton's assembler, each with the first of its configurations. Return their number."""
    from torch._inductor.codecache import PyCodeCache

    for recording in recordings:
        for source in {event.kernel.source for event in recording.events if event.kernel is not None} - _cubins:
            tuner = PyCodeCache.load(source).kernel
            tuner.configs = tuner.configs[:1]
            with inductor_config.patch(dict.fromkeys(_STATIC, False)):
                tuner.precompile(warm_cache_only=True)
            (result,) = tuner.compile_results
            cubin = result.kernel.asm["cubin"]
            assert cubin.startswith(b"\x7fELF"), source
            _cubins.add(source)
    kernels = {event.kernel.source for r in recordings for event in r.events if event.kernel is not None}
    return len(kernels & _cubins)


def row(name: str, setting: Setting) -> dict[str, Any]:
    begun = time.process_time()
    with compat.fake_process_group(RANKS):
        recordings, wanted = sharded(name, setting)
        alone = whole(name, setting)
    coded = time.process_time()
    found = facts(recordings, wanted) | {"whole": baseline(alone), "cubins": compiled(recordings)}
    return found | {"seconds": [round(coded - begun, 1), round(time.process_time() - coded, 1)]}


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print to standard output
    for line in sys.stdin:
        name, given = json.loads(line)
        setting = Setting(**given)
        try:
            found = row(name, setting)
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps(found), file=results, flush=True)


if __name__ == "__main__":
    main()
