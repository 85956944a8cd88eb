"""What takes long says so: after a few seconds, rank 0 writes on stderr what it is doing and for how long.

    mfsdp: compiling Llama: Dynamo 4 s, passes and AOTAutograd 3 s, Inductor, forward 41 s

One line, rewritten, where stderr is a terminal; otherwise one every ten seconds, and one at the end. The environment
variable ``MFSDP_PROGRESS=0`` and ``options={"progress": False}`` switch it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

PATIENCE = 5.0
"""Seconds of silence."""
INTERVAL = 10.0
"""Seconds between lines, where stderr is not a terminal."""


class _Work:
    """Something that takes long, and a thread that tells about it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.is_told = True
        self.steps: list[tuple[str, float]] = []
        self.detail = ""
        self.is_in_one_step = False
        self._ended = threading.Event()
        self._began = time.monotonic()
        self._teller = threading.Thread(target=self._tell, name="mfsdp-progress", daemon=True)
        self._teller.start()

    def end(self) -> None:
        self._ended.set()
        self._teller.join()

    def _tell(self) -> None:
        if self._ended.wait(PATIENCE):
            return
        rewrites, has_told = sys.stderr.isatty(), False
        before, after = ("\r\x1b[2K", "") if rewrites else ("", "\n")
        while True:
            if self.is_told:
                has_told = True
                sys.stderr.write(f"{before}{self._line()}{after}")
                sys.stderr.flush()
            if self._ended.wait(1.0 if rewrites else INTERVAL):
                break
        if has_told:
            sys.stderr.write(f"{before}{self._line()}: done after {time.monotonic() - self._began:.0f} s\n")
            sys.stderr.flush()

    def _line(self) -> str:
        steps, now = list(self.steps), time.monotonic()  # another thread begins steps
        ends = [*(began for _, began in steps[1:]), now][: len(steps)]
        parts = [f"{name} {end - began:.0f} s" for (name, began), end in zip(steps, ends, strict=True)]
        if parts and self.detail and not self._ended.is_set():
            parts[-1] += f" ({self.detail})"
        return f"mfsdp: {self.what}: {', '.join(parts) or f'{now - self._began:.0f} s'}"


_running: _Work | None = None


@contextlib.contextmanager
def working(what: str, is_told: bool = True) -> Iterator[None]:
    """Tell about a piece of work that takes long.

    Args:
        what: What is being done, as a participle: ``"compiling Llama"``. It names the work around this one, if there is
            any, which is told about as a whole.
        is_told: Whether to.
    """
    if _running is not None:
        _running.what, _running.is_told = what, is_told
        yield
        return
    begin(what, is_told)
    try:
        yield
    finally:
        end()


def begin(what: str, is_told: bool = True) -> None:
    """Begin what :func:`working` tells about, if nothing is being told about."""
    global _running
    if _running is None and is_told and _tells():
        _running = _Work(what)


def end() -> None:
    """End it, if there is any."""
    global _running
    if _running is not None:
        _running.end()
        _running = None


def step(name: str, detail: str = "") -> None:
    """Begin the next step of the work that is told about, if any.

    Args:
        detail: How far the step has come. It may be given again for the same step.
    """
    if _running is not None and not _running.is_in_one_step:
        if not _running.steps or _running.steps[-1][0] != name:
            _running.steps.append((name, time.monotonic()))
        _running.detail = detail


@contextlib.contextmanager
def one_step(name: str, detail: str = "") -> Iterator[None]:
    """Tell about everything inside as about one step."""
    step(name, detail)
    work = _running
    if work is None:
        yield
        return
    work.is_in_one_step = True
    try:
        yield
    finally:
        work.is_in_one_step = False


def _tells() -> bool:
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    return is_first_rank and os.environ.get("MFSDP_PROGRESS") != "0"


def tell(line: str) -> None:
    """Write a line on stderr, on rank 0, unless progress is switched off."""
    if _tells():
        sys.stderr.write(f"mfsdp: {line}\n")
