"""Published training figures of FSDP, and the planner's predictions for the same jobs. Every prediction is simulated.

    python benchmarks/published.py --out benchmarks/results/published.txt

A figure is in the first table if its source states what a prediction needs: model, GPUs, ranks, batch, length,
checkpointing, and whether the model was compiled. The second table has figures whose source leaves one of these open,
mostly the network. An assumption fills the gap there. Hardware files and the cost model are those of the package. Where
a source states that its machine differs from the file (memory, network, power), the stated number replaces the file's.

Every second row of the first table, from the first on, was used to fit ``sustained_clock`` of hardware
files. The others were held out, and show what predictions are worth. Nothing was fitted to the second table.

Predictions are for this package's buckets, with each gather one unit ahead of its use as in FSDP, with ``fused=True``
for compiled runs and ``fused=False`` for eager ones. "serial" is the prediction without any overlap. If a published
figure is below it, exposed communication does not explain the figure. Predicted memory is what is allocated. Sources
give what torch's allocator had reserved, which is more.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from mfsdp_compile.backend.predictions import OPTIMIZERS
from mfsdp_compile.models.llama import Llama, LlamaConfig
from mfsdp_compile.passes.guests.solver.hardware import Hardware, hardware
from mfsdp_compile.planning import Candidate, Job, Workload, workload
from mfsdp_compile.planning.planner import planned
from mfsdp_compile.planning.trace_model import Trace, trace
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy

__all__ = ["GIB", "run"]

GIB = 1 << 30
ANY = 1 << 50
"""A memory budget that accepts everything, because these jobs did run."""

LLAMA2 = {
    "llama2-13b": LlamaConfig(32000, 5120, 40, 40, 40, 13824),
    "llama2-34b": LlamaConfig(32000, 8192, 48, 64, 8, 22016),
    "llama2-70b": LlamaConfig(32000, 8192, 80, 64, 8, 28672),
}
"""Shapes that the planner does not know by name: https://arxiv.org/abs/2307.09288, and 34B as in fms-fsdp."""

H100_96 = replace(hardware("h100-ib"), name="h100 96 GB", memory_bandwidth=2.4e12, memory_bytes=95 * GIB)
"""torchtitan's benchmark machine: 96 GB of HBM2e, 2.4 TB/s, 400 Gb/s per GPU."""
H100_500W = replace(H100_96, name="h100 500 W", sustained_clock=0.61)
"""The same machine with the power limit that the source of December 2024 states. The clock is fitted like those of the
hardware files, to this machine's two rows among every second row: 0.82 of that at 700 W."""
A100 = hardware("a100-ib")
H100 = hardware("h100-ib")
A100_50G = replace(A100, name="a100 50G", inter_node=replace(A100.inter_node, bandwidth=A100.inter_node.bandwidth / 4))
"""fms-fsdp states 400 Gb/s per node of eight: a quarter of the file's 200 Gb/s per GPU."""
H100_100G = replace(hardware("h100-eth"), name="h100 100G")
"""fms-fsdp states 800 Gb/s per node of eight, which is what h100-eth has."""

BFLOAT16 = MixedPrecisionPolicy()
FLOAT32 = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)


@dataclass(frozen=True)
class Figure:
    """What a source says about a run.

    Args:
        model: A name that the planner or :data:`LLAMA2` knows.
        machine: Machine as the source states it.
        ranks: Number of GPUs. ``inner`` of them together hold a copy of the model; 0 means all.
        batch, length: Batch size and sequence length of one rank.
        checkpoint: Activation checkpointing.
        compiled: Whether the model was compiled by torch.compile with Inductor.
        tokens: Tokens per second and GPU.
        gib: GiB of a GPU's memory at the peak; 0.0 if not stated.
        note: What is special about the run.
    """

    model: str
    machine: Hardware
    ranks: int
    batch: int
    length: int
    checkpoint: str
    compiled: bool
    tokens: float
    gib: float = 0.0
    note: str = ""
    inner: int = 0


@dataclass(frozen=True)
class Source:
    """A source of figures, and what holds for all of them.

    Args:
        optimizer: A name in :data:`~mfsdp_compile.backend.predictions.OPTIMIZERS`.
        precision: Dtypes of shards and reductions.
        assumed: What the source leaves open, and the assumption made.
    """

    name: str
    reference: str
    optimizer: str
    precision: MixedPrecisionPolicy
    figures: tuple[Figure, ...]
    assumed: str = ""


def megatron_flops(layers: int, width: int, length: int, vocabulary: int, recomputed: bool) -> float:
    """Return the floating-point operations per token of a GPT, as in https://arxiv.org/abs/2104.04473, section 5.1.

    Counts the matrix products and attention without regard to its mask, in forward and backward. ``recomputed`` counts
    the forward a second time.
    """
    passes = 4 if recomputed else 3
    return passes * 24 * layers * width**2 * (1 + length / (6 * width) + vocabulary / (16 * layers * width))


_GPT = functools.partial(megatron_flops, 96, 12288, 2048, 50257)
_FSDP1 = ((1, 173e12), (2, 186e12))

_DEEPCOMPILE = {  # sequences per rank, tokens in each: FSDP, FSDP compiled
    (1, 512): (215, 216),
    (1, 1024): (371, 372),
    (1, 2048): (522, 524),
    (2, 512): (375, 378),
    (2, 1024): (548, 550),
    (2, 2048): (644, 647),
    (4, 512): (562, 565),
    (4, 1024): (686, 687),
}
_YAFSDP = (  # model, GPUs, tokens in a sequence, seconds per step of FSDP
    ("llama2-7b", 64, 2048, 0.90),
    ("llama2-7b", 64, 4096, 1.21),
    ("llama2-7b", 64, 8192, 2.29),
    ("llama2-7b", 128, 2048, 0.97),
    ("llama2-7b", 128, 4096, 1.22),
    ("llama2-7b", 128, 8192, 2.31),
    ("llama2-13b", 128, 2048, 1.76),
    ("llama2-13b", 128, 4096, 2.14),
    ("llama2-34b", 128, 2048, 4.27),
    ("llama2-34b", 256, 2048, 4.50),
    ("llama3-8b", 64, 2048, 1.10),
    ("llama3-8b", 64, 4096, 1.48),
)

STATED = (
    Source(
        "torchtitan, 2024-12",
        "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3; settings: "
        "train_configs/llama3_8b.toml at 9dec370",
        "adamw-foreach",
        FLOAT32,
        (
            Figure("llama3-8b", H100_500W, 8, 2, 8192, "selective", False, 5762, 82.4),
            Figure("llama3-8b", H100_500W, 8, 2, 8192, "selective", True, 6667, 77.0, "blocks compiled, loss eager"),
            Figure("llama3-8b", H100_500W, 128, 2, 8192, "selective", False, 5605, 67.0),
            Figure("llama3-8b", H100_500W, 128, 2, 8192, "selective", True, 6514, 62.0, "blocks compiled, loss eager"),
        ),
    ),
    Source(
        "torchtitan #1881",
        "github.com/pytorch/torchtitan/pull/1881; settings: train_configs/llama3_8b.toml at d9bdfbb; 43.12% of the "
        "memory are "
        "40.96 GiB, so that it is the 96 GB machine",
        "adamw",
        FLOAT32,
        (
            Figure("llama3-8b", H100_96, 8, 1, 8192, "selective", False, 7380, 47.82, "FSDP2"),
            Figure("llama3-8b", H100_96, 8, 1, 8192, "selective", False, 7227, 40.96, "SimpleFSDP, aot_eager"),
            Figure("llama3-8b", H100_96, 64, 1, 8192, "selective", False, 5097, 31.41, "FSDP2"),
            Figure("llama3-8b", H100_96, 64, 1, 8192, "selective", False, 4984, 29.37, "SimpleFSDP, aot_eager"),
        ),
    ),
    Source(
        "torchtitan #3429",
        "github.com/pytorch/torchtitan/pull/3429, FSDP8 + TP1, memory_policy full; settings: llama3_8b at 27aa490",
        "adamw",
        FLOAT32,
        (Figure("llama3-8b", H100_96, 8, 1, 8192, "full", False, 7006, 32.07, "CUDA graph, loss in chunks"),),
    ),
    Source(
        "torchtitan, 2024-04",
        "github.com/pytorch/torchtitan, docs/performance.md at 1ea476e; settings: train_configs at 1ea476e",
        "adamw-foreach",
        FLOAT32,
        (
            Figure("llama3-8b", A100, 64, 1, 8192, "selective", False, 2973, note="58.2% MFU there"),
            Figure("llama3-70b", A100, 64, 1, 8192, "full", False, 331, note="51.7% MFU there"),
            Figure("llama2-13b", A100, 64, 2, 4096, "none", False, 2162, note="61.1% MFU there"),
            Figure("llama2-13b", A100, 64, 2, 4096, "selective", False, 1904, note="53.8% MFU there"),
            Figure("llama2-70b", A100, 64, 1, 4096, "selective", False, 355, note="50.8% MFU there"),
            Figure("llama2-70b", A100, 64, 2, 4096, "full", False, 353, note="50.5% MFU there"),
        ),
    ),
    Source(
        "fms-fsdp, 2024",
        "github.com/foundation-model-stack/fms-fsdp, README.md: eager at ea662fe, compiled at 3b1ce15; settings: "
        "scripts/train.sh and fms_fsdp/config/training.py",
        "adamw-foreach",
        BFLOAT16,
        (
            Figure("llama2-7b", A100_50G, 128, 2, 4096, "none", False, 3650, note="HSDP", inner=8),
            Figure("llama2-7b", A100_50G, 128, 2, 4096, "none", True, 4550, note="HSDP", inner=8),
            Figure("llama2-34b", A100_50G, 128, 2, 4096, "full", False, 700),
            Figure("llama2-70b", A100_50G, 128, 2, 4096, "full", False, 370),
            Figure("llama2-7b", H100_100G, 96, 2, 4096, "none", False, 7500, note="HSDP", inner=8),
            Figure("llama2-7b", H100_100G, 96, 2, 4096, "none", True, 9600, note="HSDP", inner=8),
            Figure("llama2-34b", H100_100G, 96, 2, 4096, "full", False, 1550),
            Figure("llama2-70b", H100_100G, 96, 2, 4096, "full", False, 800),
        ),
    ),
)
"""Sources that state what a prediction needs."""

ASSUMED = (
    Source(
        "FSDP paper, 2023",
        "arxiv.org/abs/2304.11277, minGPT-175B on A100 80 GB: 173 and 186 TFLOP/s per GPU at batch 1 and 2, alike "
        "from 128 to 512 "
        "GPUs",
        "adamw-foreach",
        BFLOAT16,
        tuple(
            Figure("gpt3-175b", A100, 128, batch, 2048, "full", False, flops / _GPT(recomputed), note=note)
            for batch, flops in _FSDP1
            for recomputed, note in (
                (False, f"{flops / 1e12:.0f} TFLOP/s without recomputation"),
                (True, f"{flops / 1e12:.0f} TFLOP/s with recomputation"),
            )
        ),
        "whether recomputation counts as work; both readings are shown, converted as in arxiv.org/abs/2104.04473",
    ),
    Source(
        "DeepCompile charts",
        "github.com/deepspeedai/DeepSpeedExamples, benchmarks/deepcompile, and arxiv.org/abs/2504.09983: FSDP of "
        "torch 2.6 through "
        "accelerate, read off charts",
        "adamw-foreach",
        BFLOAT16,
        tuple(
            Figure("llama3-70b", H100, 32, batch, length, "full", compiled, tokens)
            for (batch, length), pair in _DEEPCOMPILE.items()
            for compiled, tokens in zip((False, True), pair, strict=True)
        ),
        "400 Gb/s per GPU",
    ),
    Source(
        "YaFSDP, 2024",
        "github.com/yandex/YaFSDP, README.md, column FSDP, rows without activation checkpointing; seconds per step "
        "converted",
        "adamw-foreach",
        BFLOAT16,
        tuple(
            Figure(
                model, A100, ranks, 1, length, "none", False, length / seconds, note=f"{seconds:.2f} s per step there"
            )
            for model, ranks, length, seconds in _YAFSDP
        ),
        "200 Gb/s per GPU",
    ),
)
"""Sources that leave something open. The table states the assumption."""

SKIPPED = (
    ("torchtitan, 8B, selective layer (2,904 tokens/s)", "the planner has no mode that checkpoints every second layer"),
    ("torchtitan, float8; Trainy, 8B float8 on H200", "the planner has no float8 matrix products"),
    ("torchtitan, 70B and 405B on H100, async TP; FSDP4 + TP2", "tensor, pipeline or context parallelism"),
    ("torchtitan #3429, default policy (7,890 tokens/s)", "saves every matrix product; the planner has no such mode"),
    ("torchtitan #3455, #3592, #3639, #2080", "utilisation without settings, or expert parallelism"),
    ("torchtitan #1690, Qwen3-32B", "heads wider than width / heads, which no model here has"),
    ("pytorch #184236, 8B on 8 GPUs (7,852 ms)", "neither GPU nor checkpointing is stated"),
    ("fms-fsdp, 13B; 34B and 70B compiled", "which part of the blocks is checkpointed is not stated"),
    ("FSDP paper, T5-11B and DHEN", "models that this package does not have"),
    (
        "DeepCompile, ZeRO-3 and its own columns",
        "schedules of another system, with limits in bytes that are not stated",
    ),
    ("DeepCompile, Mixtral", "experts computed in turns, and unevenly loaded: most of the batch is padding"),
    ("YaFSDP, 34B at 4,096 and both 70B", "5 to 50 layers checkpointed; the planner has all or none"),
    ("SimpleFSDP and veScale-FSDP papers, FT-HSDP", "ratios, no absolute figures, or settings not stated"),
    ("Megatron-FSDP #3067 (261 and 337 TFLOP/s), accelerate #4022", "ranks, batch or length not stated"),
)
"""Figures that were not reproduced, and why."""


# -- predictions ------------------------------------------------------------------------------------------------------


def work_of(figure: Figure) -> Workload:
    given = {"batch": figure.batch, "length": figure.length, "checkpoint": figure.checkpoint}
    if figure.model not in LLAMA2:
        return workload(figure.model, **given)  # type: ignore[arg-type]
    like = workload("llama2-7b", **given)  # type: ignore[arg-type]
    config = LLAMA2[figure.model]
    return replace(like, name=figure.model, build=lambda: Llama(config))


@functools.cache
def traced(figure: Figure) -> Trace:
    return trace(work_of(figure), figure.machine, figure.compiled)


def predicted(source: Source, figure: Figure) -> tuple[float, float, float]:
    """Predict tokens per second and GPU, the same without overlap, and GiB at the peak."""
    like = replace(figure, ranks=0, inner=0, tokens=0.0, gib=0.0, note="")  # all that a trace depends on
    job = Job(
        work_of(figure),
        figure.machine,
        ANY,
        OPTIMIZERS[source.optimizer],
        source.precision,
        fused=figure.compiled,
        solved=False,
    )
    inner = figure.inner or figure.ranks
    candidate = Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, inner, figure.ranks // inner)
    timeline, serial = (
        planned(replace(job, overlap=Overlap(overlap, overlap)), traced(like), candidate).timeline
        for overlap in (True, False)
    )
    assert timeline is not None
    assert serial is not None
    tokens = figure.batch * figure.length
    return tokens / timeline.seconds, tokens / serial.seconds, timeline.peak_bytes / GIB


# -- the table --------------------------------------------------------------------------------------------------------


def is_fitted(row: int) -> bool:
    """Whether a row of the first table, counted from 0, was used to fit hardware files."""
    return row % 2 == 0


def table(sources: Sequence[Source], halves: bool = False) -> Iterator[str]:
    """Yield the lines of a table. With ``halves``, tell fitted rows from those held out."""
    yield (
        f"{'model':11} {'GPUs':>14} {'batch':>8} {'saves':9} {'run':8} {'tok/s':>7} {'predicted':>9} {'error':>7} "
        f"{'serial':>7} {'GiB':>6} {'predicted':>9} {'error':>7}  note"
    )
    errors: list[float] = []
    for source in sources:
        yield source.name + (f"; assumed: {source.assumed}" if source.assumed else "")
        for figure in source.figures:
            tokens, serial, gib = predicted(source, figure)
            errors.append(tokens / figure.tokens - 1)
            memory = f"{figure.gib or '':>6} {gib:9.1f} {f'{gib / figure.gib - 1:+.1%}' if figure.gib else '':>7}"
            gpus = f"{figure.ranks} {figure.machine.name}"
            half = ("fitted  " if is_fitted(len(errors) - 1) else "held out") if halves else ""
            yield (
                f"{figure.model:11} {gpus:>14} {f'{figure.batch} x {figure.length}':>8} {figure.checkpoint:9} "
                f"{'compiled' if figure.compiled else 'eager':8} {figure.tokens:7,.0f} {tokens:9,.0f} "
                f"{errors[-1]:+7.1%} "
                f"{serial:7,.0f} {memory}  {half}  {figure.note}"
            ).rstrip()
        yield ""
    yield summary("all rows", errors)
    if halves:
        for what, fitted in (("fitted, every second row from the first on", True), ("held out", False)):
            yield summary(what, [error for row, error in enumerate(errors) if is_fitted(row) is fitted])


def summary(rows: str, errors: Sequence[float]) -> str:
    return (
        f"error of tokens/s, {rows}: {len(errors)} rows, median {statistics.median(errors):+.1%}, median of absolute "
        f"values {statistics.median(map(abs, errors)):.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
    )


def lines() -> Iterator[str]:
    yield "Published figures, and predictions for the same settings"
    yield ""
    yield from table(STATED, halves=True)
    yield ""
    yield "Published figures whose source leaves open what a prediction needs; it is assumed"
    yield ""
    yield from table(ASSUMED)
    yield ""
    yield "Sources:"
    for source in (*STATED, *ASSUMED):
        yield f"  {source.name}: {source.reference}"
    yield ""
    yield "Not reproduced:"
    for what, why in SKIPPED:
        yield f"  {what}: {why}"


# -- what this script shares with ablation.py -------------------------------------------------------------------------


def about() -> list[str]:
    """Return what a reader must know about a result."""
    return [
        f"machine: {platform.machine()} CPU, {os.cpu_count()} cores; it only calculates",
        f"versions: torch {torch.__version__}, Python {platform.python_version()}",
        f"command: {' '.join([Path(sys.executable).name, *sys.argv])}",
        "group: SIMULATED: no rank of these jobs exists, every time and every byte is predicted",
        f"date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    ]


def run(description: str, lines: Iterable[str]) -> None:
    """Print the lines of a result as they are computed, and write them to a file if the command line names one."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", default="", help="a text file to write")
    out = parser.parse_args().out
    text = [*about(), ""]
    print("\n".join(text))
    for line in lines:
        print(line, flush=True)
        text.append(line)
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text("\n".join(text) + "\n")
        print(f"written to {out}")


if __name__ == "__main__":
    run(__doc__, lines())
