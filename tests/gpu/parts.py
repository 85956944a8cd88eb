"""What ``make gpu`` runs, the most telling first: a command per part, its time limit, and what its results say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SLOWER = 1.15
"""A step that takes more than this many times its predicted duration is listed as slower than predicted."""

Reader = Callable[[Any], str]


@dataclass(frozen=True)
class Part:
    """One process, or one torchrun, so that a crash or a hang takes no others with it.

    Args:
        name: Name in the table, and of its log.
        command: Arguments of Python. ``{out}`` is the folder of results.
        limit: Seconds until it is ended.
        result: JSON file that the command writes into the folder of results.
        note: Text for the table, from the content of that file.
        measures: Nothing else may run meanwhile.
    """

    name: str
    command: tuple[str, ...]
    limit: float
    result: str = ""
    note: Reader | None = None
    measures: bool = True


UNPROVEN = [
    ("products of cuBLAS", "the CPU's products", "tests: training"),
    ("flash attention's kernels", "the CPU's flash attention, with the strides of CUDA's", "tests: training"),
    ("`_scaled_mm` and the bits of casts to float8 and float4", "the CPU's", "tests: products and gathers in float8"),
    ("Transformer Engine", "a copy of its Python interface that computes on the CPU", "tests: Transformer Engine"),
    (
        "Triton's machine code",
        "its interpreter computes the kernels; its assembler makes cubins, which nothing runs",
        "tests: generated code",
    ),
    (
        "NCCL: its kernels, communicators, registration of buffers",
        "gloo on real ranks, late; the order of calls is checked",
        "one rank's numbers on 2: settings",
    ),
    (
        "streams and CUDA's allocator",
        "streams that are recorded and checked",
        "tests: groups, scaler, streams, checkpoint",
    ),
    ("capture and replay of CUDA graphs", "a recorder that runs operators again", "tests: CUDA graphs"),
    ("times of kernels, copies and collectives", "data sheets, and figures that others published", "calibrate"),
    ("peak memory of the allocator", "allocations counted on the CPU", "tests: memory and time"),
    ("whether predicted step times hold", "step times that others published", "predicted step time"),
    ("step time beside FSDP2", "step times on two CPU cores", "step time"),
]
"""What no test without a GPU shows, what is used in its place there, and the part of ``make gpu`` that shows it."""
FIRST = ("one_rank_trains", "agree_to_the_bit", "bfloat16_with")
CODE = ("generated_code", "float32_gradients")
PREDICTED = ("peak_memory", "as_predicted")


def one_gpu(fake: bool) -> list[Part]:
    """Return the parts for one GPU."""
    small = SMALL if fake else ()
    whole = SMALL if fake else ("--layers", "8")  # several models, unsharded, in the memory of one GPU
    alone, of_8, four = ("--ranks", "1"), ("--simulate", "8"), _of(fake, *COMPARED[:4])
    return [
        _environment(),
        # What nothing without a GPU can show, in the order of UNPROVEN
        _tests("training", "test_gpu.py", FIRST),
        _tests("products and gathers in float8", "test_gpu_fp8.py"),
        _tests("Transformer Engine", "test_gpu_te.py"),
        _tests("generated code", "test_gpu.py", CODE),
        _across(2, "settings"),
        _tests("groups, scaler, streams, checkpoint", "test_gpu_state.py"),
        _tests("CUDA graphs", "test_gpu_graphs.py"),
        _calibrate(1),
        _tests("memory and time", "test_gpu.py", PREDICTED, measures=True),
        _prediction(1),
        _bench("step time", "step_time", 150, _steps, *alone, *_of(fake, *COMPARED[:5]), *whole),
        # What other machines have shown in part. Two and four ranks share the GPU
        *_across_in_parts(2, 4),
        _bench("memory, 8 simulated ranks", "memory", 120, _peaks, *of_8, *four, *small),
        _tests("optimizers, synchronization, the rest", "test_gpu.py", (*FIRST, *CODE, *PREDICTED), others=True),
        _overlap(1),
        _demo(1, fake),
        _bench("optimizer step", "optimizer_step", 60, _medians, *of_8, *whole),
        _bench("overhead", "overhead", 90, _overheads, "--rounds", "20", *_of(fake, *COMPARED[:4])),
        _bench("step time, 8 simulated ranks", "step_time", 90, _steps, *of_8, *four, *small),
        _bench("memory, 64 simulated ranks", "memory", 90, _peaks, "--simulate", "64", *four, *small),
    ]


def many_gpus(ranks: int, fake: bool) -> list[Part]:
    """Return the parts for a node with a GPU per rank."""
    small = SMALL if fake else ()
    every, systems = ("--ranks", str(ranks)), _of(fake, *COMPARED)
    return [
        _environment(),
        _across(ranks, "settings"),
        *_across_in_parts(ranks, ranks),
        _calibrate(ranks),
        _bench("step time", "step_time", 200, _steps, *every, *systems, *small),
        _prediction(ranks),
        _overlap(ranks),
        _bench("memory", "memory", 150, _peaks, *every, *systems, *small),
        _demo(ranks, fake),
    ]


SMALL = (
    *("--width", "64", "--layers", "2", "--heads", "4", "--hidden", "96", "--vocabulary", "256"),
    *("--batch", "2", "--length", "16", "--rounds", "2", "--dtype", "float32"),
)
COMPARED = ("mfsdp compiled", "mfsdp eager", "FSDP2 compiled by block", "FSDP2 eager", "Megatron-FSDP", "SimpleFSDP")


def _of(fake: bool, *systems: str) -> tuple[str, ...]:
    """Return which systems run: on fake GPUs none that compiles, which takes minutes there and tells nothing."""
    return ("--systems", *(name for name in systems if not fake or "compiled" not in name))


def _torchrun(ranks: int) -> tuple[str, ...]:
    if ranks == 1:
        return ("-m",)
    return (
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(ranks), "-m"),
    )


def _environment() -> Part:
    return Part(
        "environment", ("-m", "facts", "{out}/environment.json"), 90, "environment.json", _facts, measures=False
    )


def _across_in_parts(ranks: int, for_strategies: int) -> list[Part]:
    """Return all rows of ``across_ranks.py`` but the settings, in parts that may run at once."""
    models = (_across(ranks, f"models:{first}/3") for first in range(3))
    return [*models, _across(for_strategies, "strategies"), _across(ranks, "groups", "failures")]


def _across(ranks: int, *sets: str) -> Part:
    """Return rows of ``across_ranks.py``."""
    rows = ", ".join(sets)
    result = f"across_{ranks}_{''.join(c if c.isalnum() else '_' for c in rows)}.json"
    return Part(
        f"one rank's numbers on {ranks}: {rows}",
        (*_torchrun(ranks), "across_ranks", f"{{out}}/{result}", *sets),
        240,
        result,
        lambda found: f"{len(found['passed'])} right, {len(found['failed'])} wrong",
        measures=False,
    )


def _tests(name: str, file: str, words: Sequence[str] = (), others: bool = False, measures: bool = False) -> Part:
    """Return the tests of a file whose names have one of some words, or the others."""
    chosen = " or ".join(words)
    selection = ("-k", f"not ({chosen})" if others else chosen) if words else ()
    how = ("-q", "-p", "no:cacheprovider", "--confcutdir", str(ROOT / "tests/gpu"), "--tb=short")
    command = ("-m", "pytest", *how, str(ROOT / "tests/gpu" / file), *selection)
    return Part(f"tests: {name}", command, 240, measures=measures)


def _calibrate(ranks: int) -> Part:
    command = ("-m", "mfsdp_compile.cli", "calibrate", "--ranks", str(ranks), "--out", "{out}/hardware.json")
    return Part("calibrate", command, 120, "hardware.json", _hardware)


def _prediction(ranks: int) -> Part:
    command = (*_torchrun(ranks), "step_prediction", "{out}/prediction.json", "{out}/hardware.json")
    return Part("predicted step time", command, 120, "prediction.json", _predicted)


def _overlap(ranks: int) -> Part:
    command = (*_torchrun(ranks), "overlap", "{out}/overlap.json", "{out}/overlap.trace.json")
    return Part("overlap", command, 120, "overlap.json", _hidden)


def _demo(ranks: int, fake: bool) -> Part:
    length = (
        ("--steps", "2", "--parity-steps", "2", "--eager", "--batch", "2", "--length", "32")
        if fake
        else ("--steps", "30")
    )
    return Part(
        "demo", ("-m", "mfsdp_compile.cli", "demo", "--ranks", str(ranks), *length, "--out", "{out}/cache/demo"), 120
    )


def _bench(name: str, program: str, limit: float, note: Reader, *arguments: str) -> Part:
    result = f"{name.replace(',', '').replace(' ', '_')}.json"
    where = ("--cache", "{out}/cache/inductor", "--out", f"{{out}}/{result}")
    return Part(name, (str(ROOT / "benchmarks" / f"{program}.py"), *arguments, *where), limit, result, note)


# -- what results say -------------------------------------------------------------------------------------------------


def summary_of_tests(log: str) -> str:
    """Return pytest's own last line, such as ``3 passed, 1 skipped``, without its duration; empty if there is none."""
    found = re.findall(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s", log, re.MULTILINE)
    return found[-1].strip() if found else ""


def slower_by(result: Any) -> float:
    """Return measured by predicted duration; 0 if nothing was predicted."""
    predicted = result.get("predicted_s", 0.0) if isinstance(result, dict) else 0.0
    return result["measured_s"] / predicted if predicted else 0.0


def read(path: Path) -> Any:
    """Return the content of a JSON file, or None if there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _facts(found: Any) -> str:
    machine = f"{len(found['gpus'])} x {found['gpus'][0]}" if found["gpus"] else "no GPU"
    missing = [name for name, there in found["modules"].items() if not there]
    return f"torch {found['torch']}, {machine}" + (f"; not installed: {', '.join(missing)}" if missing else "")


def _hardware(found: Any) -> str:
    best = ", ".join(f"{dtype} {flops / 1e12:.3g}" for dtype, flops in found["flops"].items())
    return f"TFLOP/s: {best}; memory {found['memory_bandwidth'] / 1e9:.3g} GB/s"


def _predicted(found: Any) -> str:
    measured, predicted = (found[key] * 1e3 for key in ("measured_s", "predicted_s"))
    return f"measured {measured:.3g} ms, predicted {predicted:.3g} ms ({slower_by(found):.2f} x)"


def _hidden(found: Any) -> str:
    if found["hidden"] is None:
        return "no kernel communicates"
    return f"{found['hidden']:.0%} of {found['communication_s'] * 1e3:.3g} ms of communication hidden"


def _systems(found: Any, shown: Callable[[Any], str]) -> str:
    return "; ".join(
        f"{name}: {'not run, ' + result['skipped'].splitlines()[0] if 'skipped' in result else shown(result)}"
        for name, result in found["results"].items()
    )


def _steps(found: Any) -> str:
    return _systems(found, lambda result: f"{median(result['steps_s']) * 1e3:.3g} ms")


def _peaks(found: Any) -> str:
    return _systems(found, lambda result: f"{result['peak'] / 2**20:.4g} MiB")


def _medians(found: Any) -> str:
    return _systems(found, lambda result: f"{median(result['seconds']) * 1e3:.3g} ms")


def _overheads(found: Any) -> str:
    compared = {name: result for name, result in found["results"].items() if {"overhead", "skipped"} & result.keys()}
    return _systems(
        {"results": compared},
        lambda result: f"{result['overhead'] * 1e3:.3g} ms, {result['ratio']:.2f} of FSDP2 eager's",
    )
