"""``mfsdp plan``: plan a training run for any number of ranks, on a laptop."""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.markup import escape

from mfsdp_compile.backend.predictions import OPTIMIZERS
from mfsdp_compile.byte_sizes import parse_bytes
from mfsdp_compile.passes.guests.solver.hardware import hardware, known_hardware
from mfsdp_compile.passes.guests.solver.reasons import gib
from mfsdp_compile.passes.guests.solver.simulate import host_memory
from mfsdp_compile.report import StepReport, bytes_text, headline, percent_text, to_text, write
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.formats.fp8_linear import SCALINGS
from mfsdp_compile.runtime.guests.sums_in_order import wire
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.untrusted_files import FileRefused

from . import published
from .jobs import Job, Planned
from .offloading import EVERY, NOTHING, OffloadedUnits, modules_of
from .on_ranks import problem_of
from .planner import Forecast, plan, planned
from .sizes import best_size, knee_bytes, sizes
from .tables import plain_console, print_table, table_of
from .workloads import CHECKPOINT, SHAPES, Degrees, Workload, workload

OFFLOAD: dict[str, OffloadedUnits | Literal["auto"]] = {
    "none": NOTHING,
    "optimizer": OffloadedUnits(optimizer=EVERY),
    "all": OffloadedUnits(whole=EVERY),
    "auto": "auto",
}
ACTIVATION_OFFLOAD: dict[str, bool | Literal["auto"]] = {"none": False, "all": True, "auto": "auto"}
_DEGREES = {
    "ep": "ranks that divide experts",
    "tp": "ranks that divide the whole model except for experts",
    "cp": "ranks that divide sequences",
    "pp": "pipeline stages (1F1B)",
    "etp": "ranks that divide each expert (expert tensor parallelism)",
}
"""Options with the numbers of :class:`.Degrees`, in its order."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WIRES = {wire.name_of(dtype): dtype for dtype in wire.OUTER_DTYPES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predicts memory, step time and exposed communication of a training run. Nothing is run: the model gets no "
        "memory, no GPU is needed, and every number is simulated."
    )
    parser.add_argument(
        "--model",
        required=True,
        help=f"one of {', '.join(SHAPES)}; a folder with a Hugging Face config.json; the Hub's name of a model whose "
        "config.json is in the local cache, such as meta-llama/Llama-3.1-8B; or package.module:factory",
    )
    parser.add_argument(
        "--world", default="8", help="numbers of ranks, with commas, such as 8,64,512 (default: %(default)s)"
    )
    for option, numbers in _DEGREES.items():
        parser.add_argument(
            f"--{option}", default="1", help=f"numbers of {numbers}, with commas (default: %(default)s)"
        )
    parser.add_argument(
        "--microbatches",
        type=int,
        help="microbatches of a pipeline's step, each of --batch sequences (default: four times as many as stages)",
    )
    parser.add_argument(
        "--hardware",
        default="h100-ib",
        help=f"one of {', '.join(known_hardware())}; or a file of `mfsdp calibrate` (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        metavar="BYTES",
        help="most that a rank's tensors may take, with a unit, such as 70GiB (default: the device's memory, less "
        f"{published.MOST_RESERVED:.1%}% that the allocator may reserve besides)",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--seq", type=int, help="tokens per sequence (default: the model's own)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the model (default: %(default)s)")
    parser.add_argument(
        "--param-dtype",
        choices=DTYPES,
        help="dtype in which parameters are gathered and units compute (param_dtype), if it is not the model's",
    )
    quantized = parser.add_mutually_exclusive_group()
    quantized.add_argument(
        "--gather-fp8",
        choices=[scaling for scaling in quantize.SCALINGS if scaling != quantize.NVFP4],
        help="gather the matrices of units in float8, with scales that rows, matrices or blocks share "
        "(param_comm_scaling); for full sharding without HFSDP",
    )
    quantized.add_argument(
        "--gather-fp4",
        action="store_const",
        const=quantize.NVFP4,
        help="gather them in float4 (param_comm_scaling='nvfp4'), which costs accuracy",
    )
    parser.add_argument(
        "--grad-comm",
        choices=DTYPES | WIRES,
        help="dtype in which gradients are sent (grad_comm_dtype), if it is not that in which units compute; one of 8 "
        "or 4 bits needs --grad-sum float32",
    )
    parser.add_argument(
        "--grad-outer-comm",
        choices=WIRES,
        help="dtype in which sums are sent to outer ranks, and in the second of two levels (grad_outer_comm_dtype); "
        "needs --grad-sum float32",
    )
    parser.add_argument(
        "--grad-sum",
        choices=["float32"],
        help="add gradients in float32, in the order of ranks (grad_sum_dtype); they are sent in --grad-comm's dtype. "
        "Over several nodes, sums in two levels are tried, too: first in each node (grad_sum_within)",
    )
    parser.add_argument(
        "--fp8-matmul",
        choices=(*SCALINGS, "auto"),
        help="compute linear layers of units in float8, as options={'fp8_matmul': ...} does",
    )
    parser.add_argument("--fp8-wgrad", action="store_true", help="with --fp8-matmul: gradients of weights too")
    parser.add_argument(
        "--checkpoint",
        choices=(*CHECKPOINT, "auto"),
        default="none",
        help="activation checkpointing; auto: try each kind, with each --activation-offload if that is not given, and "
        "plan with the fastest that fits (default: %(default)s)",
    )
    parser.add_argument(
        "--bucket",
        metavar="BYTES",
        help="part larger units into buckets of this many bytes, such as 64MiB; auto: try some sizes of units and of "
        "buckets for the best plan",
    )
    parser.add_argument(
        "--unit",
        metavar="BYTES",
        help="join smaller neighboring units until they have this many bytes, such as 512MiB",
    )
    parser.add_argument(
        "--fine-grained",
        action="store_true",
        help="gather the modules of a unit one by one (enable_fine_grained_param_gather)",
    )
    parser.add_argument(
        "--no-bucketing", action="store_true", help="give each parameter a bucket of its own (disable_bucketing)"
    )
    buffers = parser.add_mutually_exclusive_group()
    buffers.add_argument(
        "--double-buffer",
        action="store_true",
        help="gather equal buckets into two buffers, and pack their gradients in two others (fsdp_double_buffer)",
    )
    buffers.add_argument(
        "--maxpool-double-buffer",
        action="store_true",
        help="the same for all buckets, with buffers of the size of the largest (maxpool_double_buffer)",
    )
    parser.add_argument(
        "--reshard",
        default="auto",
        help="whether the backward gathers again: true, false, auto, or a number of neighbors to gather over, as the "
        "option reshard_after_forward (default: %(default)s)",
    )
    parser.add_argument(
        "--offload",
        choices=OFFLOAD,
        default="none",
        help="keep optimizer state and gradients in host memory (offload_policy=OptimizerOffloadPolicy()), or shards "
        "too (CPUOffloadPolicy()); auto: of as many units as it takes to fit (default: %(default)s)",
    )
    parser.add_argument(
        "--activation-offload",
        choices=ACTIVATION_OFFLOAD,
        help="keep values that are saved for backward in host memory meanwhile, as the option activation_offload; "
        "auto: those that are copied while the next unit computes (default: none)",
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer (default: %(default)s)")
    parser.add_argument(
        "--step-in-backward",
        action="store_true",
        help="step over each bucket when its gradient has been reduced (compile_step without max_norm)",
    )
    parser.add_argument("--html", help="write a report of the best plan here; text and a trace for Perfetto beside it")
    parser.add_argument("--schedule", help="write the best plan's schedule here, for options={'schedule': FILE}")
    parser.add_argument("--details", action="store_true", help="print the report of the best plan too")


def run(given: argparse.Namespace) -> int:
    """Run the command line. Returns the exit code: 0, 1 if nothing fits, or 2 if the arguments are wrong."""
    try:
        with compat.collector_off():  # what is made is needed to the end, and scanning it takes a fifth of the time
            return _run(given, plain_console())
    finally:
        gc.freeze()  # avoids scanning it when Python exits


def _run(given: argparse.Namespace, console: Console) -> int:
    try:
        worlds = _numbers(given.world, "--world")
        tried = (_numbers(getattr(given, option), f"--{option}") for option in _DEGREES)
        degrees = [Degrees(*sizes) for sizes in itertools.product(*tried)]
        work = workload(given.model, batch=given.batch, length=given.seq, dtype=DTYPES[given.dtype])
        if given.fp8_wgrad and given.fp8_matmul is None:
            raise ValueError("--fp8-wgrad needs --fp8-matmul")
        param_dtype = DTYPES.get(given.param_dtype)
        work = replace(work, param_dtype=param_dtype, fp8_matmul=given.fp8_matmul, fp8_wgrad=given.fp8_wgrad)
        if given.microbatches is not None and given.microbatches < 1:
            raise ValueError(f"--microbatches takes a number of at least 1, got {given.microbatches}")
        budget = parse_bytes(given.budget, "--budget") if given.budget else None
        most = parse_bytes(given.bucket, "--bucket") if given.bucket not in (None, "auto") else None
        least = parse_bytes(given.unit, "--unit") if given.unit else None
        reshard, optimizer = _reshard(given.reshard), OPTIMIZERS[given.optimizer]
        machine = hardware(given.hardware)
        precision = MixedPrecisionPolicy(
            grad_comm_dtype=(DTYPES | WIRES).get(given.grad_comm),
            grad_sum_dtype=DTYPES.get(given.grad_sum),
            grad_outer_comm_dtype=WIRES.get(given.grad_outer_comm),
        )
        if (scaling := given.gather_fp8 or given.gather_fp4) is not None:
            sent = quantize.dtype_of(scaling)
            precision = replace(precision, param_comm_dtype=sent, param_comm_scaling=scaling)
        job = Job(
            work,
            machine,
            budget,
            optimizer,
            precision,
            reshard=reshard,
            bucket_bytes=most,
            unit_bytes=least,
            by_module=given.fine_grained,
            by_parameter=given.no_bucketing,
            buffers=BufferPolicy(given.double_buffer or given.maxpool_double_buffer, given.maxpool_double_buffer),
            microbatches=given.microbatches,
            offload=OFFLOAD[given.offload],
            step_in_backward=given.step_in_backward,
        )
        if given.bucket == "auto" and least is not None:
            raise ValueError("--bucket auto also tries unit sizes: remove --unit, or pass a size to --bucket")
        if given.fine_grained and least is not None:
            raise ValueError("--fine-grained divides units, and --unit joins them: pass only one of them")
        if given.bucket is not None and (given.no_bucketing or (given.fine_grained and given.bucket == "auto")):
            raise ValueError("--bucket has nothing to try where modules or parameters have buckets of their own")
    except ValueError as error:
        print(f"mfsdp plan: {error}", file=sys.stderr)
        return 2
    forecasts: list[Forecast] = []
    for checkpoint, offload in _ways_to_save(given.checkpoint, given.activation_offload):
        saved = replace(work, checkpoint=checkpoint, activation_offload=ACTIVATION_OFFLOAD[offload])
        with console.status(f"tracing {work.name}, {_saving(saved)}"):
            try:
                parts = given.bucket is not None
                forecasts.append(plan(replace(job, work=saved), worlds, parts=parts, degrees=degrees))
            except (RuntimeError, ValueError) as error:
                print(f"mfsdp plan: {error}", file=sys.stderr)
                return 2
    forecast = max(forecasts, key=_speed)
    if len(forecasts) > 1:
        _show_saving(console, forecasts, forecast)
    _show(console, forecast)
    if forecast.best is None:
        return 1
    _show_offload(console, forecast.best)
    if given.bucket == "auto":
        _show_sizes(console, forecast)
    best = forecast.best
    try:
        _write(console, forecast, best, given)
    except (OSError, FileRefused) as error:
        print(f"mfsdp plan: {error}", file=sys.stderr)
        return 2
    return 0


def _write(console: Console, forecast: Forecast, best: Planned, given: argparse.Namespace) -> None:
    """Write and print what is asked for about the best plan."""
    if given.details or given.html:
        report = report_of(forecast, planned(forecast.job_of(best), forecast.stages, best.candidate, details=True))
        if given.details:
            console.print(to_text(report), markup=False)
        if given.html:
            path = Path(given.html)
            files = write(report, path.parent, path.stem)
            console.print(f"report: {files['html']}, {files['text']}, {files['trace']}")
    if given.schedule:
        assert best.decisions is not None
        ScheduleText.of(
            problem_of(forecast.job_of(best), forecast.trace_of(best), best.candidate).lines(best.decisions)
        ).save(given.schedule)
        console.print(f"schedule: {given.schedule}")


def _ways_to_save(checkpoint: str, offload: str | None) -> Iterator[tuple[str, str]]:
    """Yield pairs of ``--checkpoint`` and ``--activation-offload`` to try."""
    tried = checkpoint == "auto"
    every = ACTIVATION_OFFLOAD if tried else ("none",)
    return itertools.product(CHECKPOINT if tried else (checkpoint,), (offload,) if offload is not None else every)


def _speed(forecast: Forecast) -> tuple[bool, float]:
    """Return whether the best plan fits, and its tokens per second. Without one, a negative number, larger for those
    that need less memory."""
    if forecast.best is None:
        return False, -float(min(row.needed for row in forecast.rows))
    return forecast.best.fits, forecast.tokens_per_second(forecast.best)


def _saving(work: Workload) -> str:
    """Return text such as ``checkpointing full, activations in host memory (auto)``."""
    kinds = {True: ", activations in host memory", "auto": ", activations in host memory (auto)"}
    return f"checkpointing {work.checkpoint}{kinds.get(work.activation_offload, '')}"


def _remark(row: Planned, is_best: bool) -> str:
    """Return text such as ``best, may not fit``."""
    return ", ".join(text for text in ("best" if is_best else "", "" if row.fits else row.verdict) if text)


def _show_saving(console: Console, forecasts: Sequence[Forecast], best: Forecast) -> None:
    console.print("the best plan with each way to save values for backward:")
    table = table_of("values for backward", "sharding", "GiB", "in host memory", "step", "tok/s", "")
    for forecast in forecasts:
        row = forecast.best or min(forecast.rows, key=lambda row: row.needed)
        host = max(stage.outlines[Phase.FORWARD].host_bytes for stage in forecast.stages)
        cells = [
            _saving(forecast.job.work),
            str(row.candidate),
            f"{row.needed / (1 << 30):,.1f}",
            f"{host / (1 << 30):,.1f}",
        ]
        if row.timeline is None:
            table.add_row(*cells, "", "", row.verdict, style="dim")
        else:
            speed = f"{forecast.tokens_per_second(row):,.0f}"
            table.add_row(*cells, f"{row.timeline.seconds:.3g} s", speed, _remark(row, forecast is best))
    print_table(console, table)


def _reshard(text: str) -> bool | int | None:
    words = {"true": True, "false": False, "auto": None}
    if text in words:
        return words[text]
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"--reshard takes true, false, auto or a number of at least 2 ranks, got {text!r}")
    return int(text)


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{option} takes numbers of ranks separated by commas, such as 8,64,512; got {text!r}"
        ) from None
    if min(numbers) < 1:
        raise ValueError(f"{option} takes numbers of at least 1, got {text!r}")
    return numbers


def _show(console: Console, forecast: Forecast) -> None:
    job, stages = forecast.job, forecast.stages
    parameters, units = sum(stage.parameters for stage in stages), sum(len(stage.order) for stage in stages)
    console.print(
        f"[bold]{escape(job.work.name)}[/]: {parameters / 1e9:.2f} billion parameters in {units} units, "
        f"{job.work.batch} x {job.work.length:,} tokens per rank in {_dtypes(job.work)}, {_saving(job.work)}, "
        f"{job.optimizer.name}{_precision(job)}",
    )
    console.print(
        f"on {job.hardware.name}; all figures are simulated, GiB are what a rank's tensors take, tok/s are tokens per "
        "second of one rank, kept is how many buckets stay gathered for the backward"
        f"{' (+ 80/8: and an eighth of 80 others)' if any(row.portion_size for row in forecast.rows) else ''}",
    )
    console.print("assumes")
    for line in assumptions(job):
        console.print(f"- {line}", markup=False)
    pipelined = any(row.candidate.degrees.pipeline > 1 for row in forecast.rows)
    if pipelined:
        console.print(
            f"PP: stages in turns of one forward and one backward, {job.microbatches or 'four times as many'} "
            f"microbatches{'' if job.microbatches else ' as stages'} of so many sequences in a step; GiB are those of "
            "the largest stage, idle is its share of waiting for others, and kept at the end of a name: parameters "
            "are gathered once per step",
        )
    offloaded = any(row.offload != NOTHING for row in forecast.rows)
    if offloaded:
        console.print(
            "host is what a rank has in host memory, of so many units: their optimizer state and gradients "
            "(optimizer), or also their shards (all)",
        )
    if job.work.activation_offload:
        saved = max(stage.outlines[Phase.FORWARD].host_bytes for stage in stages)
        console.print(
            f"{bytes_text(saved)} of values saved for backward are in host memory from forward to backward"
            f"{', for each microbatch' if pipelined else ''}",
        )
    host, idle = ["host"] if offloaded else [], ["idle"] if pipelined else []
    table = table_of("ranks", "sharding", "GiB", *host, "step", "tok/s", "MFU", "exposed", *idle, "kept", "")
    for row in forecast.rows:
        table.add_row(*_cells(forecast, row, pipelined, offloaded), style=None if row.timeline else "dim")
    print_table(console, table)
    if forecast.best is None:
        fewest = min(forecast.rows, key=lambda row: row.needed)
        console.print(f"Nothing fits. {fewest.candidate} on {fewest.candidate.world} ranks: {fewest.refusal}")
    elif not forecast.best.fits:
        console.print(
            "No plan is sure to fit: the best one fits if less is reserved than in some published runs.",
        )
    if forecast.smallest_world is not None:
        console.print(f"Smallest number of ranks that fits, by powers of two: {forecast.smallest_world}")
    else:
        console.print("It fits on no number of ranks with these units and this batch.")


def assumptions(job: Job) -> list[str]:
    """Return what a plan's numbers take for granted, and how far others like them were from published runs."""
    machine = job.hardware
    power = (
        f"{machine.power_watts:g} W per device"
        if machine.power_watts
        else f"what {machine.name} had when it was measured"
    )
    least, most = f"{published.LEAST_RESERVED:.1%}", f"{published.MOST_RESERVED:.1%}"
    allocated = f"predictions were {least} to {most} below what torch's allocator had reserved in published runs"
    if (tightest := job.tightest) is not None:
        fits, may_not = gib(job.usable), gib(tightest.usable)
        of = f"of {gib(machine.memory_bytes)}, a plan fits up to {fits}, and may not fit up to {may_not}"
    else:
        of = f"they are not part of the {gib(job.usable)} that tensors may take"
    slow, fast = (f"{abs(error):.1%}" for error in published.TOKENS_OFF)
    return [
        "compiled with Inductor" if job.fused else "not compiled by Inductor: every operator by itself",
        f"power limit: {power}; products at {machine.sustained_clock:.0%} of their rate in short measurements",
        f"allocator's reserve: {allocated}; {of}",
        f"error of tok/s: {slow} too low to {fast} too high in published runs that nothing was fitted to, "
        f"{published.TOKENS_OFF_MEDIAN:.1%} in the median",
    ]


def _dtypes(work: Workload) -> str:
    built = f", built in {work.dtype}" if work.compute_dtype != work.dtype else ""
    return f"{work.compute_dtype}{built}"


def _precision(job: Job) -> str:
    precision, work = job.precision, job.work
    scaling, gathered = precision.param_comm_scaling, precision.param_comm_dtype is not None
    found = f", gathered in {quantize.kind_of(scaling)} ({scaling})" if gathered else ""
    sums = ("gradients summed", precision.grad_sum_dtype), ("sums sent", precision.grad_outer_comm_dtype)
    for what, dtype in (("gradients sent", precision.grad_comm_dtype), *sums):
        found += f", {what} in {dtype}" if dtype is not None else ""
    if job.step_in_backward:
        found += ", stepped in backward"
    if work.fp8_matmul is not None:
        found += f", multiplied in float8 ({work.fp8_matmul}{', wgrad too' if work.fp8_wgrad else ''})"
    return found


def _show_sizes(console: Console, forecast: Forecast) -> None:
    assert forecast.best is not None
    candidate = forecast.best.candidate
    console.print(f"{candidate} on {candidate.world:,} ranks, with units joined or parted into buckets")
    table = table_of("unit_bytes", "bucket_bytes", "buckets", "GiB", "step", "exposed", "")
    rows = sizes(forecast.job, forecast.stages, candidate)
    best = best_size(rows)
    for row in rows:
        limits = [bytes_text(size) if size is not None else "" for size in (row.unit_bytes, row.bucket_bytes)]
        cells = [*limits, f"{len(row.planned.context.buckets):,}", f"{row.planned.needed / (1 << 30):,.1f}"]
        if (timeline := row.planned.timeline) is not None:
            exposed = percent_text(timeline.exposed_seconds, timeline.seconds)
            cells += [f"{timeline.seconds:.4g} s", exposed, _remark(row.planned, row is best)]
        else:
            cells += ["", "", row.planned.verdict]
        table.add_row(*cells, style=None if timeline else "dim")
    print_table(console, table)
    knee = knee_bytes(candidate, forecast.job.hardware)
    small = sum(info.gathered_bytes < knee for info in rows[0].planned.context.buckets)
    console.print(
        f"A gather reaches nine tenths of this network's bandwidth from {bytes_text(knee)} on; without joining, "
        f"{small} of {len(rows[0].planned.context.buckets)} buckets are smaller. fully_shard_model takes both sizes.",
    )


def _cells(forecast: Forecast, row: Planned, pipelined: bool, offloaded: bool) -> list[str]:
    start = [f"{row.candidate.world:,}", str(row.candidate), f"{row.needed / (1 << 30):,.1f}"]
    if offloaded:
        start.append(_host(forecast, row))
    if row.timeline is None or row.decisions is None:
        return [*start, *[""] * (6 if pipelined else 5), row.verdict]
    exposed = [percent_text(row.timeline.exposed_seconds, row.timeline.seconds)]
    if pipelined:
        exposed.append(percent_text(row.idle, row.timeline.seconds) if row.candidate.degrees.pipeline > 1 else "")
    return [
        *start,
        f"{row.timeline.seconds:.3g} s",
        f"{forecast.tokens_per_second(row):,.0f}",
        f"{forecast.mfu(row):.1%}",
        *exposed,
        f"{len(row.decisions.kept)}{_portions(row)}",
        _remark(row, row is forecast.best),
    ]


def _host(forecast: Forecast, row: Planned) -> str:
    """Return text such as ``12.0 all 20, optimizer 14``: GiB in host memory, and the units they are of."""
    if row.offload == NOTHING:
        return "0.0"
    held = sum(host_memory(row.context.buckets, forecast.job.optimizer).values())
    kinds = zip(("all", "optimizer"), row.offload.of(modules_of(row.context.buckets)), strict=True)
    return f"{held / (1 << 30):,.1f} {', '.join(f'{kind} {len(units)}' for kind, units in kinds if units)}"


def _show_offload(console: Console, best: Planned) -> None:
    """Print what to write for the units that the best plan offloads."""
    units = modules_of(best.context.buckets)
    whole, optimizer = best.offload.of(units)
    said = []
    for policy, names in (("CPUOffloadPolicy()", whole), ("OptimizerOffloadPolicy()", optimizer)):
        if len(names) == len(units):
            console.print(f"offload_policy={policy}", markup=False)
            return
        names = ["the model itself" if name == "root" else name for name in names]
        if names:
            said.append(
                f"{policy} for {names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} ({len(names)} of {len(units)} "
                "units)"
            )
    if said:
        console.print(
            f"offload_policy: a mapping of modules, with {' and '.join(said)}, in the order of forward",
            markup=False,
        )


def _portions(row: Planned) -> str:
    """Return text such as `` + 80/8``: an eighth of each of 80 buckets stays."""
    assert row.decisions is not None
    found = row.decisions.portions
    return f" + {len(found)}/{row.portion_size}" if found else ""


def report_of(forecast: Forecast, row: Planned) -> StepReport:
    """Return the report of one of a forecast's rows, with its full timeline."""
    job, traced = forecast.job_of(row), forecast.trace_of(row)
    assert row.timeline is not None
    assert row.decisions is not None
    of = f", backward gathers portions over {row.portion_size}," if row.portion_size else ""
    numbers = [
        ("sharding", f"{row.candidate}{of} over {row.candidate.world:,} ranks"),
        ("tokens per second and rank", f"{forecast.tokens_per_second(row):,.0f} (predicted)"),
        ("model FLOPs utilisation", f"{forecast.mfu(row):.1%} (predicted)"),
    ]
    if row.candidate.degrees.pipeline > 1:
        stages, microbatches = row.candidate.degrees.pipeline, job.microbatches_of(row.candidate)
        numbers.append(
            ("pipeline", f"{microbatches} microbatches through {stages} stages, this is the {row.stage + 1}. of them")
        )
        numbers.append(("idle", f"{percent_text(row.idle, row.timeline.seconds)} of the step (predicted)"))
    lines = problem_of(job, traced, row.candidate).lines(row.decisions)
    host = host_memory(row.context.buckets, job.optimizer, traced.outlines[Phase.FORWARD].host_bytes)
    source = dict(job.hardware.sources)
    return StepReport(
        f"Plan of {job.work.name} on {row.candidate.world:,} ranks of {job.hardware.name}",
        [*headline(row.timeline, job.usable, host), *numbers],
        row.timeline,
        row.context.buckets,
        {phase.value: found for phase, found in lines.items()},
        environment={
            "model": f"{job.work.name}, {traced.parameters:,} parameters, {_dtypes(job.work)}",
            "batch": f"{job.work.batch} x {job.work.length:,} tokens per rank, {_saving(job.work)}",
            "hardware": job.hardware.name,
            "optimizer": job.optimizer.name,
            "torch": torch.__version__,
            **{f"source of {name}": text for name, text in source.items()},
        },
        notes=[
            "Every number is simulated: nothing was run on the machines that this plan is for.",
            *(f"Assumed: {line}" for line in assumptions(forecast.job)),
        ],
        budget_bytes=job.usable,
    )
