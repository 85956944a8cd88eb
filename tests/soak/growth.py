"""What a process holds must not grow with the number of steps: memory, tensors, Python objects, files, threads."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import zoo
from parity import EAGER

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.processes import run_ranks

GROWTH = (("eager", 1), ("eager", 2), ("aot_eager", 2), ("inductor", 1))
"""Modes and numbers of ranks to watch."""

RSS_BYTES_PER_STEP = 100
"""Growth of resident memory that is not called a leak. A Python object that is kept takes 56 bytes and more, so two for
each step are one; tensors take 500 and more. Measured: 16 for a loop of torch alone, and torch's own
torch.distributed.checkpoint.save leaves 6 kB behind, 25 for each of our steps.
"""
OBJECTS = 50
"""Growth of the number of objects of one type that is not called a leak: bounded records fill up, caches find keys."""
WARM_UP = 2500
"""Steps before the first sample: longer than it takes to fill the bounded records of diagnostics, of which the order of
collectives remembers runs of 2,000 forwards."""


@dataclass
class Held:
    """What a process holds.

    Args:
        step: Steps taken so far.
        rss: Resident bytes.
        tensors: Bytes of live tensors' storages.
        files: Open file descriptors.
        threads: Threads of Python.
        tasks: Threads of the operating system.
        objects: Objects that the garbage collector follows, by type, of types with more than :data:`OBJECTS` of them:
            the samples themselves must not take much memory.
    """

    step: int
    rss: int
    tensors: int
    files: int
    threads: int
    tasks: int
    objects: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"step {self.step}: {self.rss / 2**20:.1f} MiB resident, {self.tensors:,} B of tensors, {self.files} "
            "files, "
            f"{self.threads} threads, {self.tasks} tasks, {self.objects.total():,} objects"
        )


def held(step: int) -> Held:
    """Count what this process holds now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    objects = gc.get_objects()
    storages = {}
    counts: Counter[str] = Counter()
    for each in objects:
        kind = type(each)  # not isinstance, which asks proxies for the class of what they stand for
        counts[sys.intern(f"{kind.__module__}.{kind.__qualname__}")] += 1
        if issubclass(kind, torch.Tensor) and kind in (torch.Tensor, torch.nn.Parameter):
            storages[each.untyped_storage()._cdata] = each.untyped_storage().nbytes()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Held(
        step,
        resident,
        sum(storages.values()),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        Counter({kind: count for kind, count in counts.items() if count > OBJECTS}),
    )


def growth(mode: str, ranks: int, steps: int, folder: Path, say: Callable[[str], None]) -> list[str]:
    """Train a tiny model for many steps, and describe what has grown on any rank."""
    training = run_ranks(_watch_rank, ranks, mode, steps, folder, backend="gloo", threads=1)
    found: list[str] = []
    for rank, line, has_grown in training:
        say(f"{mode}, rank {rank} of {ranks}: {line}")
        if has_grown:
            found.append(f"{mode}, rank {rank} of {ranks}: {line}")
    return found


def _watch_rank(rank: int, say: Callable[[tuple[int, str, bool]], None], mode: str, steps: int, folder: Path) -> None:
    samples = _watched(mode, steps, folder, lambda line: say((rank, line, False)))
    for line in grown(samples):
        say((rank, line, True))


def _watched(mode: str, steps: int, folder: Path, say: Callable[[str], None]) -> list[Held]:
    """Train, and count what is held every 500 steps.

    Steps accumulate over two microbatches now and then, are evaluated now and then, and a checkpoint is written now and
    then, in turn at once and in the background.
    """
    torch.manual_seed(0)
    model = fully_shard_model(zoo.Plain(layers=2), fsdp_unit_modules=[zoo.Block])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    checkpoints = Checkpoints(folder, keep=2)
    x = torch.randn(4, 8)
    samples: list[Held] = []
    for step in range(1, steps + 1):
        if step % 7 == 0:
            with model.no_sync():
                call(x).backward()
        call(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            with torch.no_grad():
                call(x)
        if step % 250 == 0:
            save = checkpoints.save if step % 500 else checkpoints.save_async
            save(step, model, optimizer, extra={"step": step})
        if step % 500 == 0:
            checkpoints.wait()
            samples.append(held(step))
            say(str(samples[-1]))
    return samples


def grown(samples: list[Held]) -> list[str]:
    """Describe what has grown after the warm-up. The least of the last third is compared with the most of the first.

    Resident memory must have grown at the limit's pace twice, from the first third to the second and from there to the
    last, in medians. What each step leaves behind shows in both. A container that doubles, or an arena of malloc's, is
    a jump in one of them: one of 0.3 MiB near step 6,000 is followed by 4,000 steps without growth, with and without
    compiled code.
    """
    after = [sample for sample in samples if sample.step >= WARM_UP]
    size = len(after) // 3
    first, middle, last = after[:size], after[size : 2 * size], after[-size:]
    found = []

    def compare(what: str, of: Callable[[Held], int], allowed: int) -> None:
        before, now = max(map(of, first)), min(map(of, last))
        if now - before > allowed:
            found.append(
                f"{what}: from at most {before:,} to at least {now:,} in {last[0].step - first[-1].step} steps; "
                f"allowed: {allowed:,} more"
            )

    if (pace := min(_rss_per_step(first, middle), _rss_per_step(middle, last))) > RSS_BYTES_PER_STEP:
        found.append(f"resident bytes: at least {pace:.0f} more with each step; allowed: {RSS_BYTES_PER_STEP}")
    compare("bytes of tensors", lambda sample: sample.tensors, 0)
    compare("files", lambda sample: sample.files, 0)
    compare("threads", lambda sample: sample.threads, 0)
    compare("tasks", lambda sample: sample.tasks, 0)
    for kind in set().union(*(sample.objects for sample in after)):
        compare(kind, lambda sample, kind=kind: max(sample.objects[kind], OBJECTS), OBJECTS)
    return found


def _rss_per_step(earlier: list[Held], later: list[Held]) -> float:
    rss, steps = (
        [statistics.median(getattr(each, name) for each in some) for some in (earlier, later)]
        for name in ("rss", "step")
    )
    return (rss[1] - rss[0]) / (steps[1] - steps[0])
