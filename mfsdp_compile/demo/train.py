"""``mfsdp demo``: train a transformer on real text, sharded, then report memory, collectives and loss."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.checkpoint.manifest import read_manifest
from mfsdp_compile.metrics import StepMetrics, StepRecord, model_flops
from mfsdp_compile.planning import calibrated, forecast
from mfsdp_compile.quantities import bytes_text, change_text, seconds_text
from mfsdp_compile.report.step_report import step_seconds
from mfsdp_compile.runtime.untrusted_files import read_text, write_text

from ..diagnostics.measure import collectives
from ..models.llama import Block, Llama, LlamaConfig
from ..processes import run_ranks
from .corpus import ByteText, standard_library

_COUNTED = {"gathers": "all_gather_into_tensor", "reductions": "reduce_scatter_tensor"}
PARITY_BOUND = 1e-4
"""Largest allowed relative difference of the loss curve from that of one process.

Floating-point sums in another order differ by about 1e-7, and AdamW's division by the size of the gradient lets that
grow from step to step. A wrong gradient (one rank's, a sum instead of a mean, a missing parameter) differs by far more
within two steps.
"""


@dataclass(frozen=True)
class DemoConfig:
    """What to train.

    Args:
        ranks: Number of processes. With GPUs, at most the number of GPUs.
        steps: Number of optimizer steps.
        eager: Use the eager path instead of ``torch.compile``.
        model: ``"llama"``, this package's own, or ``"hf-llama"``, the same size from transformers.
        batch: Sequences per rank and step.
        length: Bytes per sequence.
        lr: Learning rate of AdamW.
        parity_steps: Number of steps that one process repeats.
        out: Folder for losses, the report and checkpoints.
        save_every: Steps between checkpoints, which are written while training goes on. There is also one at the end.
        resume: Resume from the last checkpoint in ``out``, for ``steps`` more, on any number of ranks.
        recalibrate: Measure this machine again, instead of using what an earlier run has measured.
    """

    ranks: int = 2
    steps: int = 60
    eager: bool = False
    model: str = "llama"
    batch: int = 8
    length: int = 128
    lr: float = 2e-3
    parity_steps: int = 12
    out: str = "demo-out"
    seed: int = 0
    save_every: int = 20
    resume: bool = False
    recalibrate: bool = False

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(Path(self.out) / "checkpoints", keep=2)


@dataclass
class _Outcome:
    """What rank 0 knows at the end."""

    start: int = 0  # steps taken before this run
    steps: list[StepRecord] = field(default_factory=list)
    sharded_bytes: list[dict[str, int]] = field(default_factory=list)  # by rank
    whole_bytes: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    layouts: list[str] = field(default_factory=list)
    schedules: dict[str, list[str]] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    predicted_seconds: float = 0.0  # of a step
    misprediction: float = 0.0  # of the time of forward and backward

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.steps if record.loss is not None]


_MISPREDICTION = 0.25
"""Error of a predicted time that says that the machine was measured while other programs were at work."""


def run(config: DemoConfig) -> int:
    """Train, compare with one process, and print a summary. Returns the exit code: 0 if all checks pass."""
    console = Console(highlight=False)
    use_cuda = torch.cuda.is_available()
    if use_cuda and config.ranks > torch.cuda.device_count():
        console.print(f"RANKS={config.ranks}, but there are {torch.cuda.device_count()} GPUs: NCCL needs one per rank.")
        return 2
    device = f"{config.ranks} x {torch.cuda.get_device_name()}, NCCL" if use_cuda else "CPU, gloo"
    how = "eager hooks" if config.eager else 'torch.compile(model, backend="mfsdp")'
    console.print(f"[bold]mfsdp demo[/]: {config.ranks} processes on {device}, torch {torch.__version__}, {how}")

    begin_with = None
    if config.resume:
        begin_with = config.checkpoints.latest()
        if begin_with is None:
            console.print(
                f"There is no checkpoint in {config.checkpoints.root}: train first, without RESUME=1 (--resume)."
            )
            return 2
        console.print(f"goes on from {begin_with}")
    started = time.monotonic()
    machine = "" if config.eager else _calibrated(config, console)
    outcome: _Outcome = _spawn(partial(_train_rank, machine=machine), config, config.ranks, console)
    alone: list[float] = []
    if config.parity_steps:
        with console.status(f"one process repeats {min(config.parity_steps, config.steps)} steps on the same data"):
            alone = _spawn(partial(_train_alone, checkpoint=begin_with), config, 1, console)
    good = _summarize(console, config, outcome, alone)
    if machine and abs(outcome.misprediction) > _MISPREDICTION:
        Path(machine).unlink(missing_ok=True)  # it was busy when it was measured, or is busy now
        console.print("The prediction is far off: the next run measures this machine again.")
    console.print(f"{time.monotonic() - started:.0f} s in all; files in [bold]{config.out}/[/]")
    return 0 if good else 1


def _calibrated(config: DemoConfig, console: Console) -> str:
    """Return the hardware file of this machine; "" if it cannot be measured."""
    with torch.device("meta"):
        model, _, loss_of = _build(config)
        tokens = torch.zeros(config.batch, config.length, dtype=torch.int64)
        shapes = calibrated.shapes_of(model, tokens.numel(), lambda: loss_of(model, tokens, tokens))
    effort = calibrated.quick(shapes)
    try:
        with console.status("measuring this machine, for predictions"):
            path, _, now = calibrated.calibrated(config.ranks, effort, config.recalibrate)
    except (OSError, ValueError) as error:
        console.print(f"predictions are not for this machine: {error}", markup=False)
        return ""
    console.print(
        f"{'measured this machine' if now else 'machine as measured earlier (--recalibrate: again)'}: {path}",
        markup=False,
        soft_wrap=True,
    )
    return str(path)


# -- the training loop ------------------------------------------------------------------------------------------------


def _train_rank(rank: int, say: Callable[[Any], None], config: DemoConfig, machine: str = "") -> _Outcome:
    device = _device(rank)
    text = ByteText(standard_library(), config.length, config.seed)
    torch.manual_seed(config.seed)
    whole, unit, loss_of = _build(config)
    whole_bytes = _bytes(whole)
    model = fully_shard_model(whole, fsdp_unit_modules=[unit])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=config.lr, foreach=True))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)
    options = {"report": True} | ({"hardware": machine} if machine else {})
    call = model if config.eager else torch.compile(model, backend="mfsdp", options=options)
    checkpoints = config.checkpoints
    outcome = _Outcome(whole_bytes=whole_bytes)
    if config.resume:
        restored = checkpoints.load(model, optimizer)
        assert restored is not None
        assert restored.step is not None
        schedule.load_state_dict(restored.extra["schedule"])
        outcome.start = restored.step

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for step in itertools.count(outcome.start):
            parts = text.batch(step, config.batch * config.ranks)
            yield tuple(part.chunk(config.ranks)[rank].to(device) for part in parts)

    def train_step(batch: tuple[Tensor, ...]) -> Tensor:
        with contextlib.nullcontext() if config.eager else forecast.measuring(model, measured):
            loss = loss_of(call, *batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not outcome.sharded_bytes:
            outcome.sharded_bytes = _of_all_ranks(_sharded_bytes(model))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        return loss

    measured: list[forecast.Measurement] = []
    tokens = config.batch * config.length
    metrics = StepMetrics(
        interval=1,
        writers=[outcome.steps.append, say],
        flops_per_token=model_flops(model, next(batches())[0]) / tokens,
        step=outcome.start,
        device=device,
    )
    data = metrics.data(batches())
    for done, batch in enumerate(itertools.islice(data, config.steps), start=1):
        with metrics.step(tokens) as step:
            step.loss = train_step(batch)
        if done % config.save_every == 0 or done == config.steps:
            extra = {"schedule": schedule.state_dict()}
            checkpoints.save_async(metrics.steps_taken, model, optimizer, extra=extra)
    checkpoints.wait()
    _add_optimizer_bytes(outcome, optimizer, whole_bytes)
    if rank == 0 and not config.eager:
        _report(config, model, measured[1:] or measured, outcome)
    counts = collectives(lambda: train_step(next(data)))
    outcome.collectives = {name: counts[kind] for name, kind in _COUNTED.items()}
    outcome.layouts = [f"{bucket.plan.name}: {bucket.plan.layout}" for bucket in model.sharded.buckets]
    for record in model.sharded.compiled_graphs:
        for phase, lines in record.schedules.items():
            outcome.schedules.setdefault(phase.value, lines)
    return outcome


def _report(config: DemoConfig, model: nn.Module, measured: Sequence[forecast.Measurement], outcome: _Outcome) -> None:
    """Compare steps with their prediction, unit by unit, and write the report."""
    made = forecast.report(
        model,
        config.out,
        measured=measured,
        steps=outcome.steps,
        title=f"mfsdp demo: {config.model} on {config.ranks} ranks",
    )
    outcome.predicted_seconds = made.timeline.seconds
    outcome.report = [f"predicted peak memory {bytes_text(made.timeline.peak_bytes)} per rank"]
    if made.measured:
        predicted, seconds = (sum(getattr(unit, name) for unit in made.measured) for name in ("predicted", "measured"))
        outcome.misprediction = predicted / seconds - 1
        outcome.report[0] += (
            f"; forward and backward take {seconds_text(seconds)} of the step, {seconds_text(predicted)} predicted "
            f"({change_text(predicted, seconds)})"
        )
    outcome.report += [line for line in made.notes if "not compared" in line]


def _train_alone(
    rank: int, say: Callable[[Any], None], config: DemoConfig, checkpoint: Path | None = None
) -> list[float]:
    """Run the same steps in one process, without this package. Returns the mean of the ranks' losses."""
    device = _device(rank)
    text = ByteText(standard_library(), config.length, config.seed)
    torch.manual_seed(config.seed)
    model, _, loss_of = _build(config)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    start = _load_alone(model, optimizer, checkpoint) if checkpoint is not None else 0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warmup(start + step))
    losses = []
    for step in range(start, start + min(config.parity_steps, config.steps)):
        tokens, targets = (part.to(device) for part in text.batch(step, config.batch * config.ranks))
        total = 0.0
        for some_tokens, some_targets in zip(tokens.chunk(config.ranks), targets.chunk(config.ranks), strict=True):
            loss = loss_of(model, some_tokens, some_targets) / config.ranks
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses


def _load_alone(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> int:
    """Load a sharded checkpoint into an unsharded model and optimizer, using only torch. Returns its step."""
    params = {f"module.{name}": param for name, param in model.named_parameters()}
    for param in params.values():
        moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[param] = {"step": torch.zeros(()), **moments}
    state = {name: optimizer.state[param] for name, param in params.items()}
    weights = {name: param.detach() for name, param in params.items()}
    dcp.load({"model": weights, "optimizer": {"state": state}}, checkpoint_id=checkpoint)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert manifest.step is not None
    return manifest.step


def _build(config: DemoConfig) -> tuple[nn.Module, type[nn.Module], Callable[[Any, Tensor, Tensor], Tensor]]:
    """Return a model, the class of its units, and a function that computes its loss."""
    sizes = LlamaConfig()
    if config.model == "llama":
        return Llama(sizes), Block, lambda call, tokens, targets: call(tokens, targets)
    if config.model != "hf-llama":
        raise ValueError(f"model must be 'llama' or 'hf-llama', got {config.model!r}")
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    hf_config = transformers.LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=config.length,
        use_cache=False,
    )

    def loss_of(call: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(call(input_ids=tokens).logits.flatten(0, 1).float(), targets.flatten())

    return transformers.LlamaForCausalLM(hf_config), LlamaDecoderLayer, loss_of


def _warmup(step: int) -> float:
    return min(1.0, (step + 1) / 10)


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


# -- accounting -------------------------------------------------------------------------------------------------------


def _bytes(model: nn.Module) -> dict[str, int]:
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"parameters": total, "gradients": total}


def _sharded_bytes(model: nn.Module) -> dict[str, int]:
    params = list(model.parameters())
    return {
        "parameters": sum(p.to_local().nbytes for p in params),
        "gradients": sum(p.grad.to_local().nbytes for p in params if p.grad is not None),
    }


def _add_optimizer_bytes(outcome: _Outcome, optimizer: torch.optim.Optimizer, whole: dict[str, int]) -> None:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    mine = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in tensors)
    for held, optimizer_bytes in zip(outcome.sharded_bytes, _of_all_ranks(mine), strict=True):
        held["optimizer state"] = optimizer_bytes
    whole["optimizer state"] = 2 * whole["parameters"]  # AdamW's two moments


def _of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# -- the summary ------------------------------------------------------------------------------------------------------


def _summarize(console: Console, config: DemoConfig, outcome: _Outcome, alone: list[float]) -> bool:
    losses = outcome.losses
    # A resumed run has a noisy loss from its first step on, so it must only not have risen to its starting level.
    few = max(1, len(losses) // 4)
    fell = len(losses) > 1 and sum(losses[-few:]) < sum(losses[:few]) * (1.05 if outcome.start else 1)
    console.print()
    console.print(_plot(losses))
    seconds = step_seconds(outcome.steps)
    predicted = f"; {seconds_text(outcome.predicted_seconds)} predicted" if outcome.predicted_seconds else ""
    console.print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte in {len(losses)} steps"
        f"{f' after {outcome.start}' if outcome.start else ''}; first step {seconds_text(outcome.steps[0].seconds)}"
        f"{'' if config.eager else ' (with compilation)'}, then {seconds_text(seconds)} each (median{predicted}), "
        f"{outcome.steps[-1].tokens / seconds:,.0f} tokens/s"
    )
    good = fell
    if not fell:
        console.print("[red]The loss did not fall.[/]")

    if alone:
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=False))
        equal = worst <= PARITY_BOUND
        good &= equal
        console.print(
            f"parity with one process over {len(alone)} steps: largest relative difference of the loss {worst:.1e} "
            f"(allowed {PARITY_BOUND:.0e}): {'[green]holds[/]' if equal else '[red]DOES NOT HOLD[/]'}"
        )

    table = Table("bytes", "unsharded", *(f"rank {rank}" for rank in range(len(outcome.sharded_bytes))), "share")
    for what, whole in outcome.whole_bytes.items():
        each = [held[what] for held in outcome.sharded_bytes]
        table.add_row(what, f"{whole:,}", *(f"{b:,}" for b in each), f"{max(each) / whole:.1%}")
    console.print(table)

    buckets = len(outcome.layouts)
    console.print(
        f"one step: {outcome.collectives['gathers']} all-gathers and {outcome.collectives['reductions']} "
        f"reduce-scatters for {buckets} buckets (counted)"
    )
    for phase in ("forward", "backward"):
        if phase in outcome.schedules:
            console.print(f"[bold]schedule of the {phase}[/]")
            for line in _shortened(outcome.schedules[phase]):
                console.print(f"  {line}")
    if outcome.report:
        for line in outcome.report:
            console.print(line)
        console.print(f"report: [bold]{config.out}/report.html[/], report.txt, and report.trace.json for Perfetto")
    if (saved := config.checkpoints.latest()) is not None:
        size = sum(file.stat().st_size for file in saved.iterdir())
        console.print(
            f"checkpoint {saved}, {size:,} B, written while training went on; RESUME=1 (--resume) goes on from it"
        )
    _write_files(config, outcome, alone)
    return good


def _shortened(lines: list[str], ends: int = 9) -> list[str]:
    if len(lines) <= 2 * ends + 1:
        return lines
    return [*lines[:ends], f"... {len(lines) - 2 * ends} lines like these ...", *lines[-ends:]]


def _plot(values: list[float], width: int = 72, height: int = 12) -> str:
    """Draw a curve with characters, for terminals."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    columns = min(width, len(values))
    rows = [[" "] * columns for _ in range(height)]
    for column in range(columns):
        part = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        level = (sum(part) / len(part) - low) / span
        rows[height - 1 - round(level * (height - 1))][column] = "*"
    labels = [f"{high - (high - low) * i / (height - 1):7.3f} |" for i in range(height)]
    lines = [label + "".join(row) for label, row in zip(labels, rows, strict=True)]
    return "\n".join([*lines, " " * 8 + "+" + "-" * columns, " " * 9 + f"loss over {len(values)} steps"])


def _rows_before(path: Path, step: int) -> list[str]:
    """Return the rows of the runs that this one resumes."""
    if not step or not path.exists():
        return []
    return [row for row in read_text(path).splitlines()[1:] if int(row.split(",")[0]) < step]


def _write_files(config: DemoConfig, outcome: _Outcome, alone: list[float]) -> None:
    out = Path(config.out)
    rows = _rows_before(out / "loss.csv", outcome.start)
    numbered = enumerate(itertools.zip_longest(outcome.losses, alone, fillvalue=""), outcome.start)
    rows += [f"{step},{loss},{loss_alone}" for step, (loss, loss_alone) in numbered]
    write_text(out / "loss.csv", "\n".join(["step,loss,one_process", *rows, ""]))
    facts = {"config": asdict(config), "torch": torch.__version__, "machine": platform.machine()}
    found = asdict(outcome) | {"losses": outcome.losses, "step_seconds": step_seconds(outcome.steps)}
    write_text(out / "summary.json", json.dumps(facts | found, indent=1))


# -- processes --------------------------------------------------------------------------------------------------------


def _spawn(work: Callable[..., Any], config: DemoConfig, ranks: int, console: Console) -> Any:
    """Run ``work`` on every rank, show the progress that rank 0 reports, and return rank 0's result."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task("compiling", total=config.steps)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    threads = max(1, (os.cpu_count() or 1) // ranks)
    with contextlib.closing(run_ranks(work, ranks, config, backend=backend, threads=threads)) as running, progress:
        while True:
            try:
                record: StepRecord = next(running)
            except StopIteration as end:
                result = end.value
                break
            progress.update(task, advance=1, description=str(record))
            if not console.is_terminal and (record.step % 10 == 0 or progress.tasks[0].completed == 1):
                console.print(str(record), soft_wrap=True)
        if progress.tasks[0].completed == 0:
            progress.remove_task(task)
    return result
