"""Trains under faults, and then compares with the same training without faults, bit for bit.

"The same training" takes each step with the same number of ranks in the same mode: the order of sums, and with it the
bits, depend on both. It also loads a checkpoint wherever one of the two changes, so it would not notice a checkpoint
that is always wrong. Therefore the weights are also compared with those of one process that uses torch alone. All is
float64, and that comparison has a tolerance.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pool import server
from torch import Tensor

from mfsdp_compile.checkpoint.manifest import Manifest, read_manifest
from mfsdp_compile.processes import open_store

from .faults import Fault, Kind, Start, faults, starts
from .supervisor import Disk, Ranks, SoakError, damage
from .training import KEEP, Job, Segment, alone

TOLERANCE = 1e-9
"""Largest difference from one process with torch alone, relative to the largest weight of the tensor. Rounding gives
2e-12 in 24 steps."""


@dataclass(frozen=True)
class Plan:
    """What one round does.

    Args:
        steps: Length of the training.
        faults: Number of faults.
        kinds: Kinds of faults to draw from.
        ranks: Numbers of ranks to draw from.
        modes: Modes to draw from: ``"eager"`` or an inner compiler.
        save_every: Steps between two checkpoints.
        timeout: Timeout of process groups, in seconds.
        stall: Seconds of a stall that ranks must survive.
        limit: Seconds without a step after which ranks hang. Compilation takes the longest.
    """

    steps: int
    faults: int
    kinds: tuple[Kind, ...] = tuple(Kind)
    ranks: tuple[int, ...] = (2, 3, 4)
    modes: tuple[str, ...] = ("eager", "aot_eager", "inductor")
    save_every: int = 4
    timeout: float = 20.0
    stall: float = 2.0
    limit: float = 240.0


@dataclass
class Summary:
    """What has happened in all rounds."""

    faults: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    restarts: int = 0
    steps: int = 0
    repeated: int = 0
    seconds_lost: float = 0.0

    def lines(self) -> Iterator[str]:
        for kind, count in sorted(self.faults.items()):
            yield f"{count:5}  {kind}"
        yield (
            f"{self.rounds} rounds, {sum(self.faults.values())} faults, {self.restarts} restarts, {self.steps} steps, "
            "of "
            f"which {self.repeated} again; {self.seconds_lost:.0f} s lost to faults"
        )


def run_round(plan: Plan, seed: int, folder: Path, say: Callable[[str], None], summary: Summary) -> None:
    """Train with faults in ``folder``, and compare.

    Raises:
        SoakError: On any difference, hang or leak.
    """
    server()  # it and torch's first store keep a few files open
    open_store()
    gc.collect()
    before = _held()
    disk = Disk(folder / "disk")
    try:
        faulty = _Faulty(plan, seed, folder, disk, say, summary).run()
    finally:
        disk.close()
    _compare(plan, faulty, folder, say)
    gc.collect()
    after = _held()  # less is fine: other tests of this process leave files that are closed meanwhile
    if any(after[what] > before[what] for what in before):
        raise SoakError(f"the supervisor held {before} before the round, and {after} after it")
    summary.rounds += 1


def _held() -> dict[str, int]:
    return {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}


class _Faulty:
    """The training with faults."""

    def __init__(
        self, plan: Plan, seed: int, folder: Path, disk: Disk, say: Callable[[str], None], summary: Summary
    ) -> None:
        self._plan, self._disk, self._say, self._summary = plan, disk, say, summary
        draws = random.Random(seed)
        # Faults come at most every second checkpoint, so that there is progress.
        self._faults = faults(draws, plan.faults, plan.kinds, 2 * plan.save_every)
        self._starts = starts(draws, plan.ranks, plan.modes)
        self._root, self._result = disk.folder / "checkpoints", folder / "result.pt"
        self._step = -1  # of the current ranks; -1 until they have loaded
        self._lost: tuple[int, float] | None = None  # the step at the last fault, and its time
        self._saved = 0  # the last step whose save was complete
        self._damaged: set[tuple[Path, int]] = set()  # folders and their inodes: names are used again
        self._must_refuse = False
        self._refused: list[str] = []
        self._failed_saves: list[str] = []
        self._errors: list[str] = []
        self._done = False

    def run(self) -> dict[str, Any]:
        fault = next(self._faults, None)
        fault = self._start(next(self._starts), fault)
        while not self._done:
            self._summary.restarts += 1
            fault = self._start(next(self._starts), fault)
        good = self._good()
        if self._saved == self._plan.steps:  # the last save had room
            left = [path.name for path in self._root.iterdir() if path.name.startswith((".saving-", ".removing-"))]
            if left:
                raise SoakError(f"a save has succeeded and left {left}")
            if not 1 <= len(good) <= KEEP:
                raise SoakError(f"{KEEP} checkpoints were to be kept; there are {[path.name for _, path in good]}")
        return torch.load(self._result)

    def _good(self) -> list[tuple[Manifest, Path]]:
        """Return the complete checkpoints that were not damaged, in the order in which they were written."""
        found = []
        for path in self._root.glob("step-*"):
            if (path, path.stat().st_ino) not in self._damaged and (manifest := read_manifest(path)) is not None:
                found.append((manifest, path))
        return sorted(found, key=lambda held: held[0].serial)

    def _start(self, start: Start, fault: Fault | None) -> Fault | None:
        """Run ranks until they end. Returns the next fault."""
        plan = self._plan
        good = self._good()
        expected = good[-1][0].step if good else 0
        assert expected is not None
        if expected < self._saved:
            raise SoakError(f"the checkpoint of step {self._saved} was complete, and is gone")
        self._step, self._errors, self._refused = -1, [], []
        job = Job(self._root, plan.steps, start.ranks, start.mode, plan.save_every, plan.timeout, self._result)
        self._say(f"  {start.ranks} ranks, {start.mode}, from step {expected}")
        ranks = Ranks(job)
        try:
            self._listen(ranks, lambda: self._step >= 0, plan.limit)
            if self._step != expected:
                raise SoakError(f"the last good checkpoint is of step {expected}; loaded: {self._step}; {self._errors}")
            if self._must_refuse and not self._refused:
                raise SoakError("the last checkpoint is damaged, and no rank has refused it")
            self._must_refuse = False
            while not self._done and fault is not None:
                at = self._step + fault.after
                self._listen(ranks, lambda at=at: self._step >= at, plan.limit)
                if self._done:
                    break
                ended = self._inject(fault, ranks)
                fault = next(self._faults, None)
                if ended:
                    return fault
            self._listen(ranks, lambda: self._done, plan.limit)
            self._rest(ranks)
            if codes := [process.exitcode for process in ranks.processes if process.exitcode]:
                raise SoakError(f"ranks have ended with exit codes {codes} after the training")
        finally:
            ranks.close()
        return fault

    def _listen(self, ranks: Ranks, until: Callable[[], bool], limit: float) -> None:
        """Listen until something holds or the training has ended. Steps start the limit again."""
        moved = time.monotonic()
        while not until() and not self._done:
            for rank, what in ranks.heard(0.02):
                self._hear(rank, what)
                moved = time.monotonic()
            if self._errors or (not ranks.running and not self._done and not ranks.speaking):
                codes = [process.exitcode for process in ranks.processes]
                raise SoakError(f"ranks failed without a fault, exit codes {codes}: {self._errors}")
            if time.monotonic() - moved > limit:
                ranks.hang(f"no step for {limit:.0f} s")

    def _rest(self, ranks: Ranks) -> None:
        for rank, what in ranks.rest(self._plan.timeout + 20):
            self._hear(rank, what)

    def _hear(self, rank: int, what: tuple[Any, ...]) -> None:
        kind, *rest = what
        if kind == "refused":
            self._refused.append(rest[0])
        elif kind == "failed":
            self._errors.append(f"rank {rank}: {rest[0]}")
        elif kind == "save failed":
            self._failed_saves.append(rest[1])
        elif kind == "done" and rank == 0:
            self._done = True
        elif rank == 0 and kind == "loaded":
            self._step = rest[0]
        elif rank == 0 and kind == "saved":
            self._saved = rest[0]
        elif rank == 0 and kind == "step":
            self._step = rest[0]
            self._count_step()

    def _count_step(self) -> None:
        self._summary.steps += 1
        if self._lost is not None:
            step, since = self._lost
            self._summary.repeated += self._step <= step
            if self._step > step:
                self._summary.seconds_lost += time.monotonic() - since
                self._lost = None

    # -- faults -------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault, ranks: Ranks) -> bool:
        """Cause a fault. Returns whether the ranks have ended."""
        victim = int(fault.choice * ranks.job.ranks)
        time.sleep(fault.delay)
        step, begun = self._step, time.monotonic()
        if self._lost is None or self._lost[0] < step:
            self._lost = step, begun
        ended, what = self._cause(fault, ranks, victim)
        if self._done and not ended:
            self._lost = None
        self._summary.faults[fault.kind.value] += 1
        first = min((error for error in self._errors), default="", key=len)
        told = f"; {len(self._errors)} ranks were told, such as {first[:300]!r}" if self._errors else ""
        self._say(f"    step {step}, {time.monotonic() - begun:.1f} s: {fault.kind.value}: {what}{told}")
        return ended

    def _cause(self, fault: Fault, ranks: Ranks, victim: int) -> tuple[bool, str]:
        match fault.kind:
            case Kind.KILL_ONE | Kind.KILL_SAVING:
                if fault.kind is Kind.KILL_SAVING:
                    self._listen(ranks, lambda: any(self._root.glob(".saving-*")), self._plan.limit)
                ranks.signal(signal.SIGKILL, [victim])
                self._rest(ranks)
                return True, f"rank {victim}"
            case Kind.KILL_ALL:
                ranks.signal(signal.SIGKILL, ranks.running)
                self._rest(ranks)
                return True, "all"
            case Kind.TERMINATE:
                ranks.signal(signal.SIGTERM, ranks.running)
                self._rest(ranks)
                if self._errors:
                    raise SoakError(f"ranks that were to save and end have failed: {self._errors}")
                return True, f"saved step {self._saved}"
            case Kind.SHORT_STALL:
                ranks.signal(signal.SIGSTOP, [victim])
                time.sleep(self._plan.stall)
                ranks.signal(signal.SIGCONT, [victim])
                return False, f"rank {victim}"
            case Kind.LONG_STALL:
                return self._stall(ranks, victim)
            case Kind.FULL_DISK:
                return False, self._fill(ranks)
            case Kind.DAMAGE:
                ranks.signal(signal.SIGKILL, ranks.running)
                self._rest(ranks)
                return True, self._damage(fault.choice)

    def _stall(self, ranks: Ranks, victim: int) -> tuple[bool, str]:
        """Stop a rank until the others have given up. During a save they wait longer than that."""
        ranks.signal(signal.SIGSTOP, [victim])
        deadline = time.monotonic() + 2 * self._plan.timeout
        while len(ranks.running) > 1 and time.monotonic() < deadline:
            for rank, what in ranks.heard(0.1):
                self._hear(rank, what)
        ranks.signal(signal.SIGCONT, [victim])
        if not self._errors:
            return False, f"rank {victim}; the others have waited"
        self._rest(ranks)
        return True, f"rank {victim}"

    def _fill(self, ranks: Ranks) -> str:
        """Fill the disk until a save has failed."""
        self._failed_saves.clear()
        self._disk.fill(ranks)
        self._listen(ranks, lambda: len(self._failed_saves) >= ranks.job.ranks, self._plan.limit)
        self._disk.empty(ranks)
        for text in self._failed_saves:
            if "the disk is full" not in text and "a file may not be as large" not in text:
                raise SoakError(f"the error of a save does not say that the disk is full: {text}")
        return self._failed_saves[0][:200] if self._failed_saves else "no save came"

    def _damage(self, choice: float) -> str:
        good = self._good()
        if len(good) < 2:
            return "there is only one checkpoint, which is not damaged"
        _, path = good[-1]
        file, how = damage(path, choice)
        self._damaged.add((path, path.stat().st_ino))
        self._saved = good[-2][0].step or 0
        self._must_refuse = True
        return f"{path.name}/{file} {how}"


# -- comparison -------------------------------------------------------------------------------------------------------


def _compare(plan: Plan, faulty: dict[str, Any], folder: Path, say: Callable[[str], None]) -> None:
    history = faulty["history"]
    borders = [0, *(end for _, end, _, _ in history)]
    if borders[-1] != plan.steps or [start for start, *_ in history] != borders[:-1]:
        raise SoakError(f"steps are missing, or were taken twice: {history}")
    result = folder / "without_faults.pt"
    segments = list(_segments(history))
    for end, ranks, mode in segments:
        _run(Job(folder / "without_faults", end, ranks, mode, plan.steps, plan.limit, result), plan.limit)
    faultless = torch.load(result)
    different = [
        f"{part} {name}"
        for part in ("model", "optimizer")
        for name, value in _tensors(faultless[part])
        if not torch.equal(value, dict(_tensors(faulty[part]))[name])
    ]
    if not torch.equal(faultless["rng"], faulty["rng"]):
        different.append("random number generator")
    if different:
        raise SoakError(f"not the bits of the training without faults, {segments}: {', '.join(different)}")
    worst = _difference_from_torch(plan, faulty["model"], folder)
    if not worst <= TOLERANCE:
        raise SoakError(f"the weights differ from those of torch alone by {worst:.1e}; allowed: {TOLERANCE:.0e}")
    say(f"  bits as without faults, with {len(segments)} changes of ranks or mode; {worst:.1e} from torch alone")


def _segments(history: list[Segment]) -> Iterator[tuple[int, int, str]]:
    """Yield end, number of ranks and mode of what one start can do. The eager path takes the place of aot_eager."""
    same = itertools.groupby(history, lambda segment: (segment[2], "inductor" if segment[3] == "inductor" else "eager"))
    for (ranks, mode), segments in same:
        yield list(segments)[-1][1], ranks, mode


def _run(job: Job, limit: float) -> None:
    ranks = Ranks(job)
    try:
        said = list(ranks.rest(limit))
        codes = [process.exitcode for process in ranks.processes]
        if any(codes):
            raise SoakError(
                f"{job} failed without a fault: {codes} {[what for _, what in said if what[0] == 'failed']}"
            )
    finally:
        ranks.close()


def _difference_from_torch(plan: Plan, weights: dict[str, Tensor], folder: Path) -> float:
    result = folder / "alone.pt"
    process = server().Process(target=alone, args=(plan.steps, result), daemon=True)
    process.start()
    process.join(plan.limit)
    process.kill()
    process.join(10)
    process.close()
    worst = 0.0
    for name, value in torch.load(result).items():
        its = weights[name]
        worst = max(worst, ((its - value).abs().max() / value.abs().max()).item())
    return worst


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, held in value.items():
            yield from _tensors(held, f"{name}.{key}")
