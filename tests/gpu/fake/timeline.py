"""Streams and events of fake GPUs: what they order, as vector clocks.

The host is one task; each stream is another, and so is each process group, whose collectives run on a stream of its
own. A task counts its operations. Its clock says how many operations of each task come before whatever it does next.
What the host launches comes after everything that the host has done or waited for, and nothing else: two launches on
different streams are not ordered by being launched one after the other.

A capture is what ``torch.cuda.graph`` surrounds. Streams take part in it once they wait for one that does.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Task:
    """Operations that run one after the other."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = defaultdict(int)

    def tick(self) -> int:
        """Begin the next operation, and return its number."""
        self.clock[self.name] += 1
        return self.clock[self.name]

    def follow(self, clock: dict[str, int]) -> None:
        """Let everything from here on come after what a clock says."""
        for name, count in clock.items():
            self.clock[name] = max(self.clock[name], count)

    def __repr__(self) -> str:
        return self.name


HOST = Task("the host")
"""All threads of the program: they are taken to wait for each other where they must."""

tasks: dict[str, Task] = {}
"""All streams, by name, also those of process groups."""


class _Thread(threading.local):
    current: Stream | None = None


_thread = _Thread()
_names = itertools.count(1)


class _Capture:
    """What a capture has seen: the streams that take part, and what it may not do."""

    def __init__(self) -> None:
        self.streams: set[Stream] = set()
        self.begun: dict[Stream, int] = {}
        self.errors: list[str] = []

    def refuse(self, what: str) -> None:
        """Note something that CUDA does not do during a capture, if there is one."""
        if self.streams:
            self.errors.append(f"{what} during a capture, {where()}")

    @contextlib.contextmanager
    def of(self, origin: Stream) -> Iterator[None]:
        """Context of the capture that begins on a stream."""
        self.add(origin)
        try:
            yield
        finally:
            self._end(origin)

    def add(self, stream: Stream) -> None:
        if stream not in self.streams:
            self.streams.add(stream)
            self.begun[stream] = stream.clock[stream.name]

    def _end(self, origin: Stream) -> None:
        for stream in self.streams - {origin}:
            if origin.clock[stream.name] < stream.clock[stream.name]:
                self.errors.append(f"the capture ends, and its stream {origin} does not wait for {stream}, {where()}")
        for stream in self.streams:  # what was captured does not run
            HOST.follow(stream.clock)
        self.streams.clear()
        self.begun.clear()


capture = _Capture()


class Stream(Task):
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        super().__init__(name or f"stream {next(_names)}")
        tasks[self.name] = self

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.clock is None:
            return  # CUDA takes an event that was never recorded as one that is over
        if capture.streams:
            if event.stream in capture.streams and event.clock[event.stream.name] >= capture.begun[event.stream]:
                capture.add(self)
            elif self in capture.streams:
                capture.refuse(f"{self} waits for {event.stream}, which takes no part,")
        self.follow(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        _wait(self.clock, str(self))

    def __enter__(self) -> Stream:
        raise TypeError("torch.cuda.stream(stream) makes a stream the current one")


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: dict[str, int] | None = None
        self.stream: Stream = _default
        self.at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        after = Task(self.stream.name)
        after.follow(self.stream.clock)
        after.follow(HOST.clock)
        self.clock, self.at = after.clock, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        assert self.clock is not None, "the event was not recorded"
        _wait(self.clock, "an event")

    def elapsed_time(self, end: Event) -> float:
        assert self.at is not None
        assert end.at is not None
        return (end.at - self.at) * 1e3


class as_current:
    """Stands for ``torch.cuda.stream``."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._before, _thread.current = _thread.current, self._stream

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        _thread.current = self._before


def current_stream(device: Any = None) -> Stream:
    return _thread.current or _default


def synchronize(device: Any = None) -> None:
    everything = Task("everything")
    for task in tasks.values():
        everything.follow(task.clock)
    _wait(everything.clock, "the GPU")


def _wait(clock: dict[str, int], what: str) -> None:
    capture.refuse(f"the host waits for {what}")
    waits[where()] += 1
    HOST.follow(clock)


waits: Counter[str] = Counter()
"""How often the host has waited, by line."""


def stream_of(group: str) -> Stream:
    """Return the stream on which the collectives of a process group run."""
    name = f"the stream of group {group}"
    found = tasks.get(name)
    return found if isinstance(found, Stream) else Stream(name=name)


LINES: tuple[str, ...] = ()
"""Folders of the lines that :func:`where` looks for first, in one folder, which comes last."""


def where() -> str:
    """Return the innermost line of the package that runs, or of the program."""
    innermost = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        line = f"{file.removeprefix(LINES[-1] if LINES else '')}:{frame.f_lineno} ({frame.f_code.co_name})"
        if file.startswith(LINES[:-1]) and not file.startswith(_HERE):
            return line
        if not innermost and not any(each in file for each in ("/torch/", "cuda_code/streams.py", _HERE, "<")):
            innermost = line
        frame = frame.f_back
    return innermost


_HERE = __file__.rpartition("/")[0]


_default = Stream(name="the default stream")
