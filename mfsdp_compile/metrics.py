"""Metrics of training steps: tokens per second, MFU, memory, and the time of data, under torchtitan's names.

    metrics = StepMetrics(flops_per_token=model_flops(model, tokens, targets) / tokens.numel())
    for batch in metrics.data(loader):
        with metrics.step(tokens=batch.numel()) as step:
            ...
            step.loss = loss

Between records, a step costs a few readings of the clock and one addition on the device. A record costs one
all-reduce of six numbers per rank, whose result is the only thing that the host waits for.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mfsdp_compile.passes.guests.solver.hardware import hardware, known_gpu
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.modules import as_written

from .quantities import bytes_text, flops_text, percent_text, seconds_text
from .sharded_module import ShardedModule

__all__ = [
    "Step",
    "StepMetrics",
    "StepRecord",
    "TensorBoard",
    "WandB",
    "device_peak_flops",
    "model_flops",
    "to_terminal",
]

T = TypeVar("T")


# -- operations of a model, and of a device ----------------------------------------------------------------------------


def model_flops(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Count the floating-point operations of a forward and a backward of a model, without its values.

    Counted by torch's ``FlopCounterMode``: matrix products, convolutions and attention, without what activation
    checkpointing computes again. Attention counts as without a mask, as in the PaLM paper (arXiv:2204.02311). No memory
    of a device is used, nothing is communicated, and random numbers and gradients stay as they are.

    Args:
        model: Sharded, compiled, both or neither. A model that is divided by tensor parallelism cannot be counted:
            count it before, and divide by the number of ranks.
        args, kwargs: Inputs of a forward, such as one batch. Only shapes matter.

    Raises:
        ValueError: The model cannot run without values, for example because it reads those of tensors.
    """
    inner = getattr(model, "_orig_mod", model)
    step = _ForwardBackward(inner.module if isinstance(inner, ShardedModule) else inner)
    without_values = compat.fake_mode()  # which libraries know, other than the meta device, and read no values of
    device = next((param.device for param in step.parameters() if not param.is_meta), torch.device("cpu"))
    fake = functools.partial(_without_values, device=device)
    with without_values:
        state = {name: fake(value) for name, value in (*step.named_parameters(), *step.named_buffers())}
        inputs, keywords = compat.tree_map_only(Tensor, fake, (args, kwargs))

    def without_recomputation(formula: Callable[..., int]) -> Callable[..., int]:
        # A backward runs without gradients. What it computes with them is a part of the forward that is run again.
        return lambda *a, **b: 0 if step.is_backward and torch.is_grad_enabled() else formula(*a, **b)

    counter = FlopCounterMode(display=False)
    counter.flop_registry = {name: without_recomputation(each) for name, each in counter.flop_registry.items()}
    try:
        with without_values, as_written(step), sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), counter:
            torch.func.functional_call(step, state, inputs, keywords)
    except Exception as error:
        raise ValueError(
            f"The operations of {type(step.model).__name__} cannot be counted, because it does not run without "
            f"values: {type(error).__name__}: {error}. Give StepMetrics flops_per_token another way."
        ) from error
    return counter.get_total_flops()


class _ForwardBackward(nn.Module):
    """A forward and a backward as one forward, during all of which other parameters can be in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.is_backward = False

    def forward(self, *args: Any, **kwargs: Any) -> None:
        results = compat.tree_leaves(self.model(*args, **kwargs))
        self.is_backward = True
        torch.autograd.backward([each.sum() for each in results if isinstance(each, Tensor) and each.requires_grad])


def _without_values(value: Tensor, device: torch.device) -> Tensor:
    dtype = torch.float32 if value.is_floating_point() else value.dtype  # one dtype, whichever the model is gathered in
    return torch.empty(value.shape, dtype=dtype, device=device, requires_grad=value.requires_grad and value.is_leaf)


def device_peak_flops(device: torch.device) -> float | None:
    """Return the peak floating-point operations per second of a device, of dense bfloat16 products.

    Returns:
        None for CPUs, parts of GPUs (MIG), and GPUs that :func:`.hardware` has no numbers of.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    known = known_gpu(name)
    if known is None or any(form in name for form in ("H100 PCIe", "H100 NVL", "H200 NVL", "MIG")):  # slower than SXM
        return None
    return hardware(known).flops_of("bfloat16")


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepRecord:
    """Measurements of one step, or the means of several.

    Args:
        step: Number of the last of the steps, from 1.
        steps: Number of steps.
        ranks: Number of ranks.
        tokens: Tokens of all ranks and steps. 0: unknown.
        seconds: Time of a step of this rank, with its waiting for data and for other ranks.
        data_seconds: Time that the rank which waited longest for data waited, per step.
        loss: Mean over steps and over the ranks that gave one. None: no rank did.
        flops_per_token: Floating-point operations per token. None: unknown.
        peak_flops: Peak floating-point operations per second of a device. None: unknown.
        active_bytes: Largest peak of a rank's tensors so far. None on devices without statistics, such as CPUs.
        reserved_bytes: Largest peak of what a rank's allocator has reserved so far. None: as above.
    """

    step: int
    steps: int
    ranks: int
    tokens: int
    seconds: float
    data_seconds: float
    loss: float | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    active_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks."""
        return self.tokens / (self.seconds * self.steps) if self.tokens else None

    @property
    def flops_per_second(self) -> float | None:
        """Floating-point operations per second of a rank."""
        if self.flops_per_token is None or self.tokens_per_second is None:
            return None
        return self.flops_per_token * self.tokens_per_second / self.ranks

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: :attr:`flops_per_second` as a fraction of the peak."""
        if self.flops_per_second is None or self.peak_flops is None:
            return None
        return self.flops_per_second / self.peak_flops

    def scalars(self) -> dict[str, float]:
        """Return what is known, by torchtitan's names. ``throughput(tps)`` and ``tflops`` are those of a rank."""
        named = {
            "loss_metrics/global_avg_loss": (self.loss, 1),
            "throughput(tps)": (self.tokens_per_second, 1 / self.ranks),
            "tflops": (self.flops_per_second, 1e-12),
            "mfu(%)": (self.mfu, 100),
            "time_metrics/end_to_end(s)": (self.seconds, 1),
            "time_metrics/data_loading(s)": (self.data_seconds, 1),
            "time_metrics/data_loading(%)": (self.data_seconds / self.seconds, 100),
            "memory/max_active(GiB)": (self.active_bytes, 2**-30),
            "memory/max_reserved(GiB)": (self.reserved_bytes, 2**-30),
        }
        return {name: value * factor for name, (value, factor) in named.items() if value is not None}

    def __str__(self) -> str:
        """Return one line, such as ``step   10  loss 3.3166  2,349 tokens/s  872.0 ms  data 0.1%``."""
        parts = [f"step {self.step:4d}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        parts.append(seconds_text(self.seconds))
        if self.flops_per_second is not None:
            parts.append(f"{flops_text(self.flops_per_second)}/s per rank")
        if self.mfu is not None:
            parts.append(f"mfu {percent_text(self.mfu, 1)}")
        parts.append(f"data {percent_text(self.data_seconds, self.seconds)}")
        if self.reserved_bytes is not None:
            parts.append(f"memory {bytes_text(self.reserved_bytes)}")
        return "  ".join(parts)


def to_terminal(record: StepRecord) -> None:
    """Print a record as a line, on the standard output."""
    Console(soft_wrap=True).print(str(record))


class TensorBoard:
    """Writes records as scalars for TensorBoard.

    Args:
        folder: Folder of the run.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: str) -> None:
        _require("tensorboard", "TensorBoard")
        self.folder = folder
        self._writer: Any = None

    def __call__(self, record: StepRecord) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = self._writer or SummaryWriter(self.folder)
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, record.step)
        self._writer.flush()  # a program need not close it


class WandB:
    """Sends records to Weights & Biases: to the run that the program has begun, or to one of its own.

    Args:
        options: Arguments of ``wandb.init``, such as ``project``.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, **options: Any) -> None:
        _require("wandb", "Weights & Biases")
        self.options = options

    def __call__(self, record: StepRecord) -> None:
        import wandb

        run = wandb.run or wandb.init(**self.options)
        run.log(record.scalars(), step=record.step)


def _require(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{name} needs the package {package}: pip install 'mfsdp-compile[{package}]'")


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step that is being taken. Its ``loss`` may be set to a number, or to a tensor of one number."""

    loss: Tensor | float | None = None


class StepMetrics:
    """Measures training steps, and passes a record of them to writers every few steps.

    Every rank measures, with the same ``interval``, because a record is an all-reduce of six numbers per rank. The
    first step, which compiles, has a record of its own. What a program does between steps, such as evaluation and
    checkpoints, is not counted.

    Args:
        interval: Steps between records. None: records are made by :meth:`record` alone.
        writers: Functions that take a :class:`StepRecord`, called on the first rank of ``group``.
        flops_per_token: Floating-point operations of forward and backward per token; see :func:`model_flops`. None: no
            TFLOP/s and no MFU.
        peak_flops: Floating-point operations per second that MFU is a fraction of. None:
            :func:`device_peak_flops`, without which there is no MFU.
        step: Number of steps taken before, by the run that this one resumes.
        device: Device that computes. None: the current GPU, or the CPU without GPUs.
        group: Ranks to collect numbers of. None: all.
    """

    def __init__(
        self,
        *,
        interval: int | None = 10,
        writers: Sequence[Callable[[StepRecord], Any]] = (to_terminal,),
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
        step: int = 0,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if interval is not None and interval < 1:
            raise ValueError(f"interval must be at least 1 step, got {interval}")
        if device is None:
            has_gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        self.device = device
        self.interval, self.writers, self.group = interval, writers, group
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops if peak_flops is not None else device_peak_flops(self.device)
        self.steps_taken = step
        self._first = step + 1
        self._is_in_step = False
        self._reset()

    def _reset(self) -> None:
        self._steps = self._losses = 0
        self._tokens = self._seconds = self._data_seconds = 0.0
        self._loss: Tensor | float = 0.0

    def data(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, and measure how long each is waited for."""
        iterator = iter(batches)
        while True:
            begun = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            seconds = time.perf_counter() - begun
            self._data_seconds += seconds
            if not self._is_in_step:  # else it is in the time of the step
                self._seconds += seconds
            yield batch

    @contextlib.contextmanager
    def step(self, tokens: float) -> Iterator[Step]:
        """Measure an optimizer step: forward, backward and update, of all its microbatches.

        Makes a record when one is due, which is collective. A step that raises is not counted.

        Args:
            tokens: Tokens that this rank processes in the step. Of tokens that several ranks process together, as with
                tensor or context parallelism, its share. 0: unknown.

        Yields:
            The step, which takes the loss.
        """
        begun = time.perf_counter()
        self._is_in_step = True
        try:
            yield (step := Step())
        finally:
            self._is_in_step = False
        self.steps_taken += 1
        self._steps += 1
        self._tokens += tokens
        if step.loss is not None:
            loss = step.loss
            self._loss = self._loss + (loss.detach().double() if isinstance(loss, Tensor) else loss)
            self._losses += 1
        self._seconds += time.perf_counter() - begun
        if self.interval is not None and (self.steps_taken == self._first or self.steps_taken % self.interval == 0):
            self.record()

    def record(self) -> StepRecord | None:
        """Make a record of the steps since the last one, and pass it to the writers. Collective.

        Waits for the device, and for the other ranks.

        Returns:
            The record, on all ranks. None if there was no step.
        """
        if not self._steps:
            return None
        begun = time.perf_counter()
        stats = torch.cuda.memory_stats(self.device) if self.device.type == "cuda" else {}
        active, reserved = (stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("active", "reserved"))
        own = [self._tokens, self._losses, self._data_seconds, active, reserved]
        numbers = torch.tensor(own, dtype=torch.float64).to(self.device, non_blocking=True)
        total = self._loss
        loss = torch.as_tensor(total, dtype=torch.float64).to(self.device, non_blocking=True)
        rows = self._of_ranks(torch.cat([numbers, loss.reshape(1)]))
        self._seconds += time.perf_counter() - begun
        tokens, losses, data, actives, reserves, totals = zip(*rows, strict=True)
        record = StepRecord(
            self.steps_taken,
            self._steps,
            len(rows),
            round(sum(tokens)),
            self._seconds / self._steps,
            max(data) / self._steps,
            sum(totals) / sum(losses) if any(losses) else None,
            self.flops_per_token,
            self.peak_flops,
            round(max(actives)) if stats else None,
            round(max(reserves)) if stats else None,
        )
        self._reset()
        if not dist.is_initialized() or dist.get_rank(self.group) == 0:
            for writer in self.writers:
                writer(record)
        return record

    def _of_ranks(self, numbers: Tensor) -> list[list[float]]:
        """Return the numbers of each rank."""
        if not dist.is_initialized():
            return [numbers.tolist()]
        ranks = dist.get_world_size(self.group)
        every = numbers.new_zeros(ranks, numbers.numel())
        every[dist.get_rank(self.group)] = numbers
        dist.all_reduce(every, group=self.group)  # one collective, for sums and maxima
        found: list[list[float]] = every.tolist()
        return found
