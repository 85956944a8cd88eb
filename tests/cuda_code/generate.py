"""Generate code for rows of settings, in a process of its own, and write what it does as JSON.

    python generate.py sm_90 FOLDER < rows > results

Each line of the input is a row's ``[model, setting]``, in the words of :mod:`cuda_rows`. Each line of the output is a
dictionary of the facts of that row (:mod:`code_facts`).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import fake_gpu

ARCHITECTURE, FOLDER = sys.argv[1], Path(sys.argv[2])
fake_gpu.start(ARCHITECTURE, FOLDER)

import torch._inductor.config as inductor_config
from code_facts import Wanted, baseline, facts, wanted_of
from cuda_rows import LARGE, RANKS, Setting
from generating import fake_ranks, on_fake_device, shard
from recording import Recording, recordings_of
from torch._inductor.compile_fx import compile_fx

from mfsdp_compile.backend.compile import mfsdp

_whole: dict[tuple[str, bool], list[Recording]] = {}


def whole(name: str, setting: Setting) -> list[Recording]:
    """Return the recordings of the model that is not sharded."""
    key = name, setting.trains
    if key not in _whole:
        with on_fake_device(name, LARGE, setting.dtype) as (model, _, inputs):
            _whole[key] = recordings_of(model, inputs, compile_fx, setting.trains)
    return _whole[key]


def sharded(name: str, setting: Setting) -> tuple[list[Recording], dict[str, Wanted]]:
    """Return the recordings of the sharded model, and what the passes decided about them, by phase."""
    wanted: dict[str, Wanted] = {}

    def observe(graph: Any, context: Any, phase: Any) -> None:
        wanted[phase.value] = wanted_of(graph, context)

    options = {**setting.options, "report": True, "passes": [observe]}
    with on_fake_device(name, LARGE, setting.dtype) as (model, units, inputs):
        model = shard(model, units, setting, "cuda")
        recordings = recordings_of(model, inputs, lambda *graph: mfsdp(*graph, options=options), setting.trains)
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
    with fake_ranks(RANKS):
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
