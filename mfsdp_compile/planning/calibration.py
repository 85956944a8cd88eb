"""``mfsdp calibrate``: measure the current machine, and save it as :class:`.Hardware`.

Every rank computes at the same time, as in training; rank 0's times are used. Each time is the best of several rounds.
Peaks are the best rates found; efficiencies are the typical rates relative to them. Collectives are timed among all
ranks and among half of them, which separates the time to launch one from the latency of links. Bandwidth and latency
are fitted to the model that predictions use: ``seconds = launch + (ranks - 1) latency + (ranks - 1) / ranks  bytes /
bandwidth``.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from mfsdp_compile.passes.guests.solver.hardware import Hardware, Link
from mfsdp_compile.processes import run_ranks
from mfsdp_compile.runtime.untrusted_files import write_text

from .measuring import ON_CPU, ON_CUDA, Effort, Measured, Shapes, Timing, measure_rank
from .tables import plain_console, print_table


def calibrate(
    out: str,
    ranks: int,
    name: str,
    effort: Effort | None = None,
    shapes: Shapes | None = None,
) -> int:
    """Measure the machine, print the results, and write them to ``out``. Returns 2 if that fails, otherwise 0.

    Args:
        out: Path of a file that ends in ``.json``.
        ranks: Number of processes. With GPUs, one per GPU.
        name: Name of the machine.
        effort: What to measure. Default: :data:`ON_CUDA` with GPUs, otherwise :data:`ON_CPU`.
        shapes: What to measure instead of the operations of ``effort``.

    Raises:
        RuntimeError: If a rank fails.
    """
    console = plain_console()
    gpus = torch.cuda.device_count()
    problem = _unwritable(Path(out))
    if problem is None and gpus and ranks > gpus:
        problem = f"{ranks} ranks need as many GPUs, and there are {gpus}: give --ranks {gpus}"
    if problem is not None:
        console.print(problem, markup=False, soft_wrap=True)
        return 2
    backend = "nccl" if gpus else "gloo"
    console.print(
        f"measuring on {ranks} {'rank' if ranks == 1 else 'ranks'}, which takes about a minute", highlight=False
    )
    effort = effort or (ON_CUDA if gpus else ON_CPU)
    if shapes is not None:
        effort = effort.of(shapes)
    (measured,) = run_ranks(measure_rank, ranks, effort, backend=backend, threads=threads_of(ranks))
    try:
        hardware = describe(measured, name, ranks)
    except ValueError as error:
        console.print(f"measured something that cannot be: {error}. Is the machine busy?", markup=False, soft_wrap=True)
        return 2
    write_text(Path(out), hardware.to_json())
    print_table(console, _table(measured, hardware))
    if ranks == 1:
        console.print("One rank has nobody to send to: links are not measured. Give --ranks 2 or more.", soft_wrap=True)
    console.print(
        f'written to {out}. It is used by torch.compile(model, backend="mfsdp", options={{"hardware": "{out}"}}) and '
        f"by mfsdp plan --hardware {out}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def threads_of(ranks: int) -> int:
    """Return the number of threads of each rank: with GPUs 1, otherwise its part of the cores."""
    return 1 if torch.cuda.is_available() else max(1, (os.cpu_count() or 1) // ranks)


def _unwritable(path: Path) -> str | None:
    """Return why a file cannot be written, or None if it can."""
    if path.suffix != ".json":
        return f"{path} does not end in .json, by which a file of hardware is told from a name. Give --out {path}.json"
    if path.is_dir():
        return f"cannot write to {path}: it is a folder"
    if not path.parent.is_dir():
        return f"cannot write to {path}: there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"cannot write to {path}: permission denied"
    return None


def _table(measured: Measured, hardware: Hardware) -> Table:
    table = Table("what", "measured", "fitted", title=f"{hardware.name}: {measured.device}", title_justify="left")
    for dtype, rates in measured.matmul.items():
        typical = f"best of {len(rates)}; median {statistics.median(rates) / 1e9:,.0f}"
        table.add_row(f"products, {dtype}", f"{max(rates) / 1e9:,.0f} GFLOP/s, {typical}")
    table.add_row(f"attention, {measured.dtype}", f"{measured.attention / 1e9:,.0f} GFLOP/s, forward and backward")
    for operation, rate in measured.memory.items():
        table.add_row(f"memory, {operation}", f"{rate / 1e9:,.1f} GB/s")
    table.add_row("smallest kernel", _duration(measured.kernel_seconds))
    for ranks, size in dict.fromkeys((timing.ranks, timing.size) for timing in measured.timings):
        same = [timing for timing in measured.timings if (timing.ranks, timing.size) == (ranks, size)]
        taken = ", ".join(f"{timing.kind} {_duration(timing.seconds)}" for timing in same)
        many = f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
        table.add_row(f"{_size(size)}, {many}", taken, _duration(_predicted(same[0], hardware)))
    if measured.timings:
        table.add_row("launching", "", _duration(hardware.collective_seconds))
        table.add_row("latency", "", _duration(hardware.intra_node.latency))
        table.add_row("bandwidth", "", f"{hardware.intra_node.bandwidth / 1e9:,.3g} GB/s")
        table.add_row("beside collectives", f"products take {measured.slowdown:.0%} longer")
    return table


def _duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:,.3g} ms"


def _size(numbytes: int) -> str:
    return f"{numbytes / 2**10:,.0f} KiB" if numbytes < 2**20 else f"{numbytes / 2**20:,.0f} MiB"


def _predicted(timing: Timing, hardware: Hardware) -> float:
    link, hops = hardware.intra_node, timing.ranks - 1
    return hardware.collective_seconds + hops * link.latency + hops / timing.ranks * timing.size / link.bandwidth


# -- fitting hardware to times ----------------------------------------------------------------------------------------


def fit_link(sizes: Sequence[float], seconds: Sequence[float], ranks: Sequence[int]) -> tuple[float, Link]:
    """Fit launch time, latency and bandwidth to times of collectives.

    Minimizes the squared relative errors of this model, with no negative numbers:
    ``seconds = launch + (ranks - 1) latency + (ranks - 1) / ranks  bytes / bandwidth``

    Args:
        sizes: Bytes of the full tensors.
        seconds: Duration of each collective.
        ranks: Number of ranks in each group. If all groups have the same size, launch time and latency cannot be
            separated, and all of it counts as launch time.

    Returns:
        Seconds to launch a collective, and the link.

    Raises:
        ValueError: If no bandwidth follows from the times, because in the largest group large tensors take no longer
            than small ones.
    """
    size, taken, group = (np.asarray(values, dtype=np.float64) for values in (sizes, seconds, ranks))
    largest = group == group.max()
    few, many = (taken[largest & (size == end)].mean() for end in (size[largest].min(), size[largest].max()))
    if many <= few or group.max() == 1:
        raise ValueError(
            f"no bandwidth measured: collectives took {few:.3g} s with few bytes and {many:.3g} s with many"
        )
    hops = group - 1
    columns = np.stack([np.ones_like(size), hops, hops / group * size], axis=1) / taken[:, None]
    # With three unknowns it is cheap to try all combinations of zeros. The last one, seconds per byte, is never zero.
    unknown = (0, 1) if len(set(ranks)) > 1 else (0,)
    found, error = {2: 0.0}, math.inf
    for chosen in (kept for count in range(len(unknown) + 1) for kept in combinations(unknown, count)):
        used = [*chosen, 2]
        scale = np.linalg.norm(columns[:, used], axis=0)
        solution = np.linalg.lstsq(columns[:, used] / scale, np.ones_like(taken), rcond=None)[0] / scale
        off = float(np.linalg.norm(columns[:, used] @ solution - 1))
        if (solution >= 0).all() and solution[-1] > 0 and off < error:
            found, error = dict(zip(used, solution.tolist(), strict=True)), off
    return found.get(0, 0.0), Link(bandwidth=1 / found[2], latency=found.get(1, 0.0))


def describe(measured: Measured, name: str, ranks: int) -> Hardware:
    """Return the machine, rounded to three digits. Each number's source says how it was found."""
    rates = measured.matmul[measured.dtype]
    bandwidths = list(measured.memory.values())
    how = f"measured on {measured.device}, torch {torch.__version__}"
    sources = {
        "flops": f"{how}: the best of {len(rates)} matrix products or, of slow dtypes, fewer",
        "matmul_efficiency": f"{how}: their median by the best, {measured.dtype}",
        "attention_efficiency": f"{how}: forward and backward, causal, {measured.dtype}",
        "memory_bandwidth": f"{how}: the best of {', '.join(measured.memory)}",
        "memory_efficiency": f"{how}: their median by the best",
        "memory_bytes": "what torch reports; without GPUs a rank's part of the machine's memory",
        "kernel_seconds": f"{how}: adding to one number",
        "host_link": f"{how}: a large copy and a small one, the slower direction",
        "host_memory_bandwidth": f"{how}: the best of {', '.join(measured.host_memory)}, on the CPU",
        "multiprocessors": "not counted: the efficiency is that of the shapes that were measured",
        "power_watts": "not measured",
        "sustained_clock": "not measured: as in the short rounds of the measurements",
        "ranks_per_node": "not measured: the ranks that took part",
    }
    if measured.timings:
        timings = measured.timings
        launch, link = fit_link([t.size for t in timings], [t.seconds for t in timings], [t.ranks for t in timings])
        sources |= {
            "collective_seconds": f"{how}: fitted to {len(timings)} times",
            "intra_node": f"{how}: fitted to {len(timings)} times",
            "inter_node": "not measured: as inside a node",
            "compute_slowdown": f"{how}: matrix products with and without an all-gather beside them",
        }
    else:
        launch, link = measured.kernel_seconds, Link(bandwidth=max(bandwidths) / 2, latency=0.0)
        missing = "not measured, with one rank: a copy in memory"
        sources |= dict.fromkeys(("collective_seconds", "intra_node", "inter_node"), missing)
        sources["compute_slowdown"] = "not measured, with one rank"
    link = Link(_rounded(link.bandwidth), _rounded(link.latency))
    return Hardware(
        name=name,
        flops={dtype: _rounded(max(found)) for dtype, found in measured.matmul.items()},
        matmul_efficiency=_rounded(statistics.median(rates) / max(rates)),
        attention_efficiency=_rounded(min(1.0, measured.attention / max(rates))),
        memory_bandwidth=_rounded(max(bandwidths)),
        memory_efficiency=_rounded(statistics.median(bandwidths) / max(bandwidths)),
        memory_bytes=measured.memory_bytes,
        kernel_seconds=_rounded(measured.kernel_seconds),
        collective_seconds=_rounded(launch),
        ranks_per_node=ranks,
        intra_node=link,
        inter_node=link,
        host_link=Link(_rounded(measured.host_link.bandwidth), _rounded(measured.host_link.latency)),
        host_memory_bandwidth=_rounded(max(measured.host_memory.values())),
        compute_slowdown=_rounded(measured.slowdown),
        sources=sources,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
