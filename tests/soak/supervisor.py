"""Starts ranks, hears what they say, and harms them. Every wait has a limit."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from pool import server

from mfsdp_compile.processes import open_store

from .training import Job, rank_process

Heard = tuple[int, tuple[Any, ...]]
"""A rank, and what it said."""


class SoakError(AssertionError):
    """A training that hangs, loses a checkpoint, ends with other weights, or leaves something behind."""


class Ranks:
    """The ranks of one start of the training."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._store = open_store()
        context = server()
        self._pipes, self.processes = [], []
        for rank in range(job.ranks):
            hears, says = context.Pipe(duplex=False)
            process = context.Process(target=rank_process, args=(job, rank, self._store.port, says), daemon=True)
            process.start()
            says.close()
            self._pipes.append(hears)
            self.processes.append(process)
        self._open = dict(zip(self._pipes, range(job.ranks), strict=True))

    @property
    def running(self) -> list[int]:
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    @property
    def speaking(self) -> bool:
        """Whether something may still be heard, also from ranks that have ended."""
        return bool(self._open)

    def heard(self, seconds: float) -> Iterator[Heard]:
        """Yield what ranks have said, at the latest after ``seconds``."""
        for pipe in wait(list(self._open), seconds) if self._open else ():
            rank = self._open[pipe]
            try:
                yield rank, pipe.recv()
            except (EOFError, OSError):
                del self._open[pipe]

    def rest(self, limit: float) -> Iterator[Heard]:
        """Yield what ranks say until all of them have ended.

        Raises:
            SoakError: If they have not after ``limit`` seconds.
        """
        deadline = time.monotonic() + limit
        while self._open or self.running:
            yield from self.heard(0.1)
            if not self._open:
                time.sleep(0.02)
            if time.monotonic() > deadline:
                self.hang(f"ranks {self.running} have not ended {limit:.0f} s after others")

    def hang(self, what: str) -> None:
        """Make the ranks print their stacks, and raise an error."""
        self.signal(signal.SIGUSR1, self.running)
        time.sleep(1)
        raise SoakError(f"{self.job}: {what}; their stacks are above")

    def signal(self, number: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
            process.close()
        for pipe in self._pipes:
            pipe.close()


class Disk:
    """The disk that checkpoints are written to: 16 MiB in memory, or without the right to mount it, a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "mfsdp-soak", str(folder)]
        try:
            self.mounted = subprocess.run(mount, capture_output=True).returncode == 0
        except FileNotFoundError:
            self.mounted = False

    def fill(self, ranks: Ranks) -> None:
        """Leave no room. If the disk is only a folder, limit the size of each file that ranks write."""
        if not self.mounted:
            self._limit(ranks, 2000)
            return
        with open(self.folder / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))

    def empty(self, ranks: Ranks) -> None:
        if not self.mounted:
            self._limit(ranks, resource.RLIM_INFINITY)
        (self.folder / "ballast").unlink(missing_ok=True)

    @staticmethod
    def _limit(ranks: Ranks, size: int) -> None:
        for rank in ranks.running:
            with contextlib.suppress(ProcessLookupError):
                hard = resource.prlimit(ranks.processes[rank].pid, resource.RLIMIT_FSIZE)[1]
                limit = hard if size == resource.RLIM_INFINITY else size
                resource.prlimit(ranks.processes[rank].pid, resource.RLIMIT_FSIZE, (limit, hard))

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", str(self.folder)], check=True)


def damage(path: Path, choice: float) -> tuple[str, str]:
    """Damage a file of a checkpoint: cut it off, change a byte, or remove it. Returns its name and what was done."""
    files = sorted(file for file in path.iterdir() if file.stat().st_size)
    number = int(choice * len(files) * 3)
    file, how = files[number // 3], ("cut off", "changed", "removed")[number % 3]
    content = bytearray(file.read_bytes())
    if how == "removed":
        file.unlink()
    elif how == "cut off" or file.name == "manifest.json":  # some bytes of a manifest, such as its date, mean nothing
        how = "cut off"
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return file.name, how
