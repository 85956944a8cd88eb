"""What ``mfsdp calibrate`` measures, on every rank at the same time."""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mfsdp_compile.passes.guests.solver.hardware import Link
from mfsdp_compile.runtime import compat


@dataclass(frozen=True)
class Effort:
    """What to measure, and for how long.

    Args:
        matmul: Rows, inner size and columns of matrix products, from small to large. The last one also runs beside
            collectives.
        matmul_seconds: Products that would take longer are skipped; the device then has no instructions for their
            dtype.
        attention: Batch, heads, length and head width.
        memory_bytes: Size of the tensor to copy; must be far larger than the caches.
        collective_bytes: Sizes of the full tensors, in ascending order.
        round_seconds: Duration of one round of repetitions.
        rounds: Number of rounds of each measurement.
    """

    matmul: tuple[tuple[int, int, int], ...]
    matmul_seconds: float
    attention: tuple[int, int, int, int]
    memory_bytes: int
    collective_bytes: tuple[int, ...] = tuple(2**i for i in range(10, 27, 2))  # 1 KiB to 64 MiB
    round_seconds: float = 0.1
    rounds: int = 5

    def of(self, shapes: Shapes) -> Effort:
        """Return the same effort for a model's operations."""
        return replace(self, matmul=shapes.products or self.matmul, attention=shapes.attention or self.attention)


@dataclass(frozen=True)
class Shapes:
    """Shapes of a model's operations.

    Args:
        products: Rows, inner size and columns of matrix products, from small to large. Empty: there are none.
        attention: Batch, heads, length and head width of fused attention. None: there is none.
    """

    products: tuple[tuple[int, int, int], ...] = ()
    attention: tuple[int, int, int, int] | None = None


ON_CPU = Effort(
    matmul=((512, 512, 512), (1024, 768, 768), (1024, 768, 3072), (1024, 3072, 768), (1024, 1024, 1024)),
    matmul_seconds=0.5,
    attention=(1, 8, 1024, 64),
    memory_bytes=128 * 2**20,
)
ON_CUDA = Effort(
    matmul=((4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096), (8192, 8192, 8192)),
    matmul_seconds=1.0,
    attention=(4, 32, 4096, 128),
    memory_bytes=2**30,
)


@dataclass(frozen=True)
class Timing:
    """Measured time of a collective.

    Args:
        kind: ``"all_gather"`` or ``"reduce_scatter"``.
        ranks: Number of ranks in the group.
        size: Bytes of the full tensor.
        seconds: Duration of one collective.
    """

    kind: str
    ranks: int
    size: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Measurements on one rank, taken while the other ranks did the same.

    Args:
        device: Name of the device.
        matmul: Floating-point operations per second of each matrix product, by dtype.
        dtype: Dtype that models compute in on this device. Attention and the efficiencies are measured in it.
        attention: Floating-point operations per second, forward and backward.
        memory: Bytes read and written per second, by operation.
        memory_bytes: Memory of the device.
        kernel_seconds: Duration of the smallest operation.
        host_link: Link to pinned host memory, in the slower direction. Without GPUs: a copy in memory.
        host_memory: Bytes read and written per second in host memory, by operation.
        timings: Times of collectives. Empty with one rank.
        slowdown: Fraction by which computation takes longer while a collective runs; see :func:`slowdown_of`.
    """

    device: str
    matmul: Mapping[str, tuple[float, ...]]
    dtype: str
    attention: float
    memory: Mapping[str, float]
    memory_bytes: int
    kernel_seconds: float
    host_link: Link
    host_memory: Mapping[str, float]
    timings: tuple[Timing, ...]
    slowdown: float


def measure_rank(rank: int, say: Callable[[Measured], None], effort: Effort) -> None:
    """Measure on one rank, while all others do the same. Rank 0 passes its results to ``say``."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    clock = _OperationTimer(device, effort)
    matmul = {}
    for each in (torch.float32, torch.bfloat16, torch.float16):
        dist.barrier()
        if rates := _matmul(clock, each):
            matmul[_name(each)] = rates
    dist.barrier()
    attention = _attention(clock, dtype)
    dist.barrier()
    memory, kernel_seconds = _memory(clock), clock.seconds(_smallest(device))
    dist.barrier()
    host_link = _host_link(clock)
    dist.barrier()
    host_memory = memory if device.type == "cpu" else _memory(_OperationTimer(torch.device("cpu"), effort))
    timings: list[Timing] = []
    world = dist.get_world_size()
    for size in sorted({max(1, world // 2), world}) if world > 1 else ():
        group = dist.new_group(range(size))
        if rank < size:
            # A group of one sends nothing: the time of its smallest collective is the launch time.
            for numbytes in effort.collective_bytes if size > 1 else effort.collective_bytes[:1]:
                timings += _collectives(clock, group, numbytes)
        dist.barrier()
    gathers = [timing for timing in timings if timing.kind == "all_gather" and timing.ranks == world]
    slowdown = _slowdown(clock, dtype, gathers[-2] if rank == 0 else None) if world > 1 else 0.0
    if rank == 0:
        say(
            Measured(
                device=_device_name(device),
                matmul=matmul,
                dtype=_name(dtype),
                attention=attention,
                memory=memory,
                memory_bytes=_memory_bytes(device, world),
                kernel_seconds=kernel_seconds,
                host_link=host_link,
                host_memory=host_memory,
                timings=tuple(timings),
                slowdown=slowdown,
            )
        )


@dataclass(frozen=True)
class _OperationTimer:
    """Times operations on a device. On CUDA it uses events, so the CPU does not wait between operations."""

    device: torch.device
    effort: Effort

    def once(self, run: Callable[[], object], calls: int) -> float:
        """Return the total seconds of ``calls`` calls."""
        if self.device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # Calls before these may still be queued. Behind them, the CPU would get ahead, and its time would not show.
            torch.cuda.synchronize(self.device)
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - begin

    def seconds(self, run: Callable[[], object], group: dist.ProcessGroup | None = None) -> float:
        """Return the seconds of one call. With a group, all its ranks make the same number of calls."""
        run()
        calls = max(1, min(1000, round(self.effort.round_seconds / self.once(run, 1))))
        if group is not None:
            agreed = torch.tensor(calls, device=self.device)
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group)
            calls = int(agreed)
        typical = statistics.median if _shares_cores() else min
        return typical(self.once(run, calls) for _ in range(self.effort.rounds)) / calls


def _shares_cores() -> bool:
    """Whether ranks take turns on the CPU's cores. The best round is then one in which the others did not run.

    Otherwise, the best round is the one that other programs have disturbed least.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return not torch.cuda.is_available() and ranks > (os.cpu_count() or 1)


def _matmul(clock: _OperationTimer, dtype: torch.dtype) -> tuple[float, ...]:
    """Return floating-point operations per second of each matrix product that is not skipped."""
    rates: list[float] = []
    for rows, inner, columns in clock.effort.matmul:
        flops = 2 * rows * inner * columns
        if rates and flops / min(rates) > clock.effort.matmul_seconds:
            continue
        try:
            left = torch.randn(rows, inner, device=clock.device).to(dtype)
            right = torch.randn(columns, inner, device=clock.device).to(dtype)
            rates.append(flops / clock.seconds(functools.partial(F.linear, left, right)))
        except RuntimeError:
            if clock.device.type == "cuda":
                raise
            return ()  # torch has no product of this dtype on this CPU
    return tuple(rates)


def _attention(clock: _OperationTimer, dtype: torch.dtype) -> float:
    """Return floating-point operations per second of causal attention.

    It counts two products in forward and five in backward, each of them half because of the mask.
    """
    batch, heads, length, width = clock.effort.attention
    shape = (batch, heads, length, width)
    query, key, value = (
        torch.randn(shape, device=clock.device).to(dtype).requires_grad_() for _ in ("query", "key", "value")
    )
    gradient = torch.randn(shape, device=clock.device).to(dtype)

    def run() -> None:
        torch.autograd.grad(
            F.scaled_dot_product_attention(query, key, value, is_causal=True), (query, key, value), gradient
        )

    return 3.5 * 4 * batch * heads * length**2 * width / 2 / clock.seconds(run)


def _memory(clock: _OperationTimer) -> dict[str, float]:
    """Return bytes read and written per second by large operations."""
    # Not zeros: Linux maps untouched zeros to one page, which is read from the cache.
    one, two, out = (torch.ones(clock.effort.memory_bytes // 4, device=clock.device) for _ in range(3))
    operations: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: out.copy_(one)),
        "scale": (2, lambda: torch.mul(one, 2.0, out=out)),
        "add": (3, lambda: torch.add(one, two, out=out)),
    }
    return {
        name: tensors * clock.effort.memory_bytes / clock.seconds(run) for name, (tensors, run) in operations.items()
    }


def _host_link(clock: _OperationTimer) -> Link:
    """Return the link between the device and host memory, in the slower direction."""
    pins = clock.device.type == "cuda"

    def seconds(size: int) -> float:
        on_host, on_device = torch.ones(size // 4, pin_memory=pins), torch.ones(size // 4, device=clock.device)
        return max(
            clock.seconds(lambda: on_host.copy_(on_device, non_blocking=True)),
            clock.seconds(lambda: on_device.copy_(on_host, non_blocking=True)),
        )

    small, large = seconds(4), seconds(clock.effort.memory_bytes)
    return Link(clock.effort.memory_bytes / max(large - small, 1e-9), small)


def _smallest(device: torch.device) -> Callable[[], object]:
    number = torch.zeros(1, device=device)
    return lambda: number.add_(1.0)


def _collectives(clock: _OperationTimer, group: dist.ProcessGroup, size: int) -> list[Timing]:
    ranks = group.size()
    numel = max(1, size // 4 // ranks)
    shard, whole = torch.ones(numel, device=clock.device), torch.ones(numel * ranks, device=clock.device)
    name = group.group_name
    gather = clock.seconds(lambda: compat.wait_tensor(compat.all_gather(shard, ranks, name)), group)
    reduce = clock.seconds(lambda: compat.wait_tensor(compat.reduce_scatter(whole, "sum", ranks, name)), group)
    return [
        Timing("all_gather", ranks, 4 * numel * ranks, gather),
        Timing("reduce_scatter", ranks, 4 * numel * ranks, reduce),
    ]


def _slowdown(clock: _OperationTimer, dtype: torch.dtype, gather: Timing | None) -> float:
    """Return the fraction by which computation slows down while a collective runs.

    Matrix products run with and without an all-gather beside them, which has the time to finish. The difference is what
    the all-gather costs them. In a simulation it lasts as long as without products, so that what it loses to them,
    where it needs the same cores, counts as theirs.

    Args:
        gather: The all-gather. Read on rank 0, which broadcasts its size and how many products there are.
    """
    group = dist.group.WORLD
    assert group is not None
    rows, inner, columns = clock.effort.matmul[-1]
    left, right = (torch.randn(n, inner, device=clock.device).to(dtype) for n in (rows, columns))

    def product() -> object:
        return F.linear(left, right)

    seconds = gather.seconds if gather is not None else 0.0
    size = gather.size if gather is not None else 0
    agreed = torch.tensor([size, math.ceil(3 * seconds / clock.seconds(product))], device=clock.device)
    dist.broadcast(agreed, 0)
    size, products = agreed.tolist()
    shard = torch.ones(size // 4 // group.size(), device=clock.device)

    def alone() -> None:
        for _ in range(products):
            product()

    def beside() -> None:
        full = compat.all_gather(shard, group.size(), group.group_name)
        alone()
        compat.wait_tensor(full)

    lost = []
    for _ in range(clock.effort.rounds):
        dist.barrier()
        without = clock.once(alone, _TURNS)
        dist.barrier()
        lost.append((clock.once(beside, _TURNS) - without) / _TURNS)
    return slowdown_of(statistics.median(lost) / seconds) if gather is not None else 0.0


_TURNS = 8
"""Number of collectives that are timed together."""


def slowdown_of(lost: float) -> float:
    """Return the fraction by which computation slows down, from the seconds that it loses per second of a collective.

    Slowed down by s, it does 1 / (1 + s) of its work while the collective runs, and loses the rest. If it loses nearly
    all, the cores do nothing else.
    """
    lost = min(max(lost, 0.0), 0.95)
    return lost / (1 - lost)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} cores, {platform.machine()}"


def _memory_bytes(device: torch.device, ranks: int) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
