"""Recent activity of this rank, for diagnosing hangs.

Every rank records the last few hundred things it did: forwards, backwards, collectives that the eager path starts,
compiled graphs with their schedules. Recording an entry costs about a microsecond and no communication. The progress of
a compiled graph is not recorded but computed on demand. Process groups count their collectives, so the current count,
minus the count when the graph began, tells which line of its schedule was the last to start. The flight recorders of
NCCL and gloo count alike: ``number`` is their ``collective_seq_id``, and ``group`` the name of their process group.

If ``$MFSDP_DEBUG_DIR`` is set, the journal is written to ``$MFSDP_DEBUG_DIR/hang/rank-N.json``: when a forward, a
backward or the program fails; when nothing has happened for most of the process group's timeout (by a thread, because a
rank that waits in a collective cannot do it); and on SIGUSR1. ``mfsdp hang DIR``
(:mod:`mfsdp_compile.diagnostics.hang`) combines the files of all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .. import compat
from ..program_lines import place, program_line

LENGTH = 512
PATIENCE = 0.6
"""Fraction of the process group's timeout after which a rank without new entries writes its journal."""


@dataclass(frozen=True)
class Entry:
    """Something that a rank did.

    Args:
        at: Time in seconds since 1970.
        step: Number of optimizer steps before it.
        model: Name of the model.
        what: Description.
        launches: Returns the collectives that it starts, in order, with the names of their process groups.
        counts: Number of collectives started before it, by process group.
    """

    at: float
    step: int
    model: str
    what: str
    launches: Callable[[], Sequence[tuple[str, str]]]
    counts: dict[str, int]


@dataclass(frozen=True)
class _GroupFacts:
    """Facts about a process group. The group itself belongs to the program, which may destroy it.

    Args:
        ranks: Ranks of its members.
        timeout: Timeout in seconds.
    """

    ranks: tuple[int, ...]
    timeout: float


class Journal:
    """The journal of this process."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=LENGTH)
        self._groups: dict[str, _GroupFacts] = {}
        self._thread: threading.Thread | None = None
        self._written_for: Entry | None = None
        self._states: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def note(
        self,
        step: int,
        model: str,
        what: str,
        groups: Sequence[str],
        launches: Callable[[], Sequence[tuple[str, str]]] = tuple,
    ) -> None:
        """Add an entry for something that is about to be done.

        Args:
            groups: Names of the model's process groups.
        """
        counts = {}
        for name in groups:
            group = compat.process_group(name)
            if name not in self._groups:
                ranks = tuple(dist.get_process_group_ranks(group))
                self._groups[name] = _GroupFacts(ranks, compat.timeout_of(group).total_seconds())
                self._watch()
            counts[name] = compat.collectives_started(group)
        self._entries.append(Entry(time.time(), step, model, what, launches, counts))

    def doing(self) -> str | None:
        """Describe the last entry and the last collective that it has started."""
        last = self._entries[-1] if self._entries else None
        if last is None:
            return None
        started = [launch["what"] for launch in _written(last, self._counts())["launches"] if launch["started"]]
        what = f"{started[-1]}, " if started and started[-1] != last.what else ""
        return f"{what}{last.what} of {last.model}"

    def has_started_beyond(self, counts: Mapping[str, int], models: Collection[str]) -> bool:
        """Whether these models have started more collectives than ``counts`` has for a group of theirs."""
        return any(
            launch["started"] and launch["number"] > counts.get(launch["group"], launch["number"])
            for entry in self._written_entries(self._counts())
            if entry["model"] in models
            for launch in entry["launches"]
        )

    def began_with(self, group: str, number: int, models: Collection[str]) -> bool:
        """Whether the collective of a process group that has this number was the first of something that a model began.

        Later ones of a compiled graph do not count: the program's own collectives in it may have taken their numbers.
        """
        return any(
            (launch["group"], launch["number"], launch["started"]) == (group, number, True)
            for entry in self._written_entries(self._counts())
            if entry["model"] in models
            for launch in entry["launches"][:1]
        )

    def _counts(self) -> dict[str, int]:
        """Return how many collectives were started so far, by process group."""
        return {name: count for name in self._groups if (count := _started(name)) is not None}

    def _written_entries(self, now: dict[str, int]) -> Iterator[dict[str, Any]]:
        """Yield the entries as plain data; ``now`` are the current counts."""
        entries = list(self._entries)
        for entry, following in itertools.zip_longest(entries, entries[1:]):
            yield _written(entry, following.counts if following is not None else now)

    # -- writing it down ----------------------------------------------------------------------------------------------

    def write(self, why: str, trace: TracebackType | None = None) -> Path | None:
        """Append the current state of this rank to its file.

        Args:
            why: Reason for writing.
            trace: Traceback of an exception that has already left the program's own code.

        Returns:
            Path of the file. None if no folder is set, or the file cannot be written: the current failure matters more.
        """
        folder = directory()
        if folder is None or not dist.is_initialized():
            return None
        from ..untrusted_files import FileRefused, new_file

        path = folder / f"rank-{dist.get_rank()}.json"
        with self._lock, contextlib.suppress(OSError, FileRefused):
            # The first states of an incident count. What a rank does after others have given up says nothing.
            now = time.time()
            self._states = [state for state in self._states if now - state["at"] < max(60.0, 2 * self._timeout())][:7]
            self._states.append(self.state(why, trace))
            with new_file(folder, path.name) as file:
                file.write(json.dumps(self._states, indent=1).encode())
                os.fchmod(file.fileno(), 0o644)  # another user may explain the hang
            return path
        return None

    def state(self, why: str, trace: TracebackType | None = None) -> dict[str, Any]:
        """Return the state of this rank as plain data; see :mod:`mfsdp_compile.diagnostics.hang` for the format."""
        now = self._counts()
        return {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "at": time.time(),
            "why": why,
            "torch": torch.__version__,
            "groups": {name: {"ranks": self._groups[name].ranks, "started": count} for name, count in now.items()},
            "entries": list(self._written_entries(now)),
            "place": place(traceback.extract_tb(trace)) if trace is not None else program_line(),
            "stacks": _stacks(),
        }

    # -- when ---------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Arrange for the journal to be written when it is needed. Once per process, and only if a folder is set."""
        if self._thread is not None or directory() is None:
            return
        self._thread = threading.Thread(target=self._look_now_and_then, name="mfsdp-journal", daemon=True)
        self._thread.start()
        on_uncaught_exceptions(self._write_uncaught)
        if threading.current_thread() is threading.main_thread():
            self._on_signals()

    def _write_uncaught(self, error: BaseException, trace: TracebackType | None) -> None:
        self.write(f"{type(error).__name__}: {error}", trace)

    def _on_signals(self) -> None:
        """Write the journal on SIGUSR1, and on SIGTERM, with which launchers end the other ranks when one has died.

        The program's own signal handlers are kept, also those that it sets later: only this class's own ends the
        process.
        """
        ours = {number for number in (signal.SIGUSR1, signal.SIGTERM) if signal.getsignal(number) is signal.SIG_DFL}
        # Python runs signal handlers between two of its own instructions, which a rank that waits in C++ never reaches.
        # But it writes signal numbers to the wakeup file descriptor at once.
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if before != -1:  # an event loop uses it
            signal.set_wakeup_fd(before)
            return
        self._kept = writing

        def do_nothing(*_: Any) -> None:
            """Keep the signal from ending the process before the journal is written."""

        for number in ours:
            signal.signal(number, do_nothing)

        def listen() -> None:
            while number := reading.recv(1):
                if number[0] in ours:
                    self.write(signal.Signals(number[0]).name)
                    if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is do_nothing:
                        os._exit(128 + signal.SIGTERM)

        threading.Thread(target=listen, name="mfsdp-signals", daemon=True).start()

    def _look_now_and_then(self) -> None:
        while True:
            timeout = self._timeout()
            time.sleep(min(timeout * PATIENCE / 8, 5.0))
            last = self._entries[-1] if self._entries else None
            if last is None or last is self._written_for or not dist.is_initialized():
                continue
            if (silent := time.time() - last.at) > timeout * PATIENCE:
                self._written_for = last
                self.write(f"nothing new for {silent:.0f} s")

    def _timeout(self) -> float:
        return min((group.timeout for group in list(self._groups.values())), default=60.0)


def _started(name: str) -> int | None:
    """Return the number of collectives that a process group has started; None if it was destroyed."""
    try:
        return compat.collectives_started(compat.process_group(name))
    except (RuntimeError, ValueError, KeyError):
        return None


def directory() -> Path | None:
    """Return the folder that ranks write their files to."""
    folder = os.environ.get("MFSDP_DEBUG_DIR")
    return Path(folder) / "hang" if folder else None


def _written(entry: Entry, after: dict[str, int]) -> dict[str, Any]:
    """Return an entry with its collectives, marked as started or not; ``after`` are the counts at its end."""
    count = dict(entry.counts)
    launches = []
    for what, group in entry.launches():
        count[group] = count.get(group, 0) + 1
        launches.append(
            {"what": what, "group": group, "number": count[group], "started": count[group] <= after.get(group, 0)}
        )
    return {"at": entry.at, "step": entry.step, "model": entry.model, "what": entry.what, "launches": launches}


def _stacks() -> dict[str, list[str]]:
    """Return the stacks of all threads, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): traceback.StackSummary.extract(
            (frame, frame.f_lineno) for frame in reversed(compat.frames_of(ident))
        ).format()
        for ident in list(sys._current_frames())
        if not names.get(ident, "").startswith("mfsdp-")
    }


def on_uncaught_exceptions(call: Callable[[BaseException, TracebackType | None], BaseException | None]) -> None:
    """Call a function with exceptions that end the program, and their tracebacks, before they are printed.

    If it returns an exception, that one is printed instead.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        told = call(error, trace)
        if told is None:
            before(kind, error, trace)
        else:
            before(type(told), told, told.__traceback__)

    sys.excepthook = hook


journal = Journal()
"""The journal of this process."""
