"""Whether the processes of other ranks exist and run.

Each process listens at a port, whose address is in the store, and closes what connects to it. A rank that suspects
others :func:`asks <ask>` them: the operating system refuses connections to a process that has ended, however it ended,
and accepts them for one that is stopped, which then does not close them. A process that runs says where its program is,
which may wait for a lock for ever.

For a large job to notice an end, not every rank can ask every other one. Therefore the ranks form a ring of connections
that stay open::

    rank 0 --- rank 1 --- rank 2 --- ... --- rank n - 1 --- rank 0

When a process ends, its connections are closed. Its two neighbors see this and publish it in the store, where ranks
that wait look (:mod:`.watchdog`). TCP's keep-alive packets notice machines that are gone. Each rank has two
connections, in jobs of any size, and sends nothing while all ranks live. A process that ends in order withdraws its
address first, so that a message can tell an exit from a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from .. import compat

KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
"""Socket options: a machine that has not answered for 20 seconds is gone. Systems that lack one use their default."""
MOST = 64
"""Maximum number of ranks to ask. In a large job that fails, each of all ranks asks."""
REACH = 1.0
"""Seconds within which other machines must answer. Ranks that are not reached in that time count as there."""

ENDED = "mfsdp/ended"
"""Key of the store with a JSON line for each rank that has ended."""

_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class RankLost(RuntimeError):
    """The process of a rank that this one waits for has ended."""


@dataclass(frozen=True)
class Lost:
    """A rank whose process has ended.

    Args:
        rank: The rank.
        in_order: Whether it ended in order. If not, it was killed, crashed, or its machine is gone.
    """

    rank: int
    in_order: bool

    def __str__(self) -> str:
        how = "has ended" if self.in_order else "was killed or has crashed"
        return f"the process of rank {self.rank} {how}"


class _Neighbor:
    """A connection to a neighbor, over which nothing is sent."""

    def __init__(self, connection: socket.socket, rank: int, token: str) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if (number := getattr(socket, option, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, number, value)
        self.connection = connection
        self.rank = rank
        self.token = token

    def is_open(self) -> bool:
        try:
            return bool(self.connection.recv(1))
        except BlockingIOError:
            return True
        except OSError:  # reset, or the machine does not answer
            return False


class Lifeline:
    """This process for other ranks: where it listens, and its place in the ring of one store.

    Args:
        where: Says where the program of this process is; empty if there is nothing to say.
    """

    def __init__(self, where: Callable[[], str] = str) -> None:
        self._where = where
        self._token = secrets.token_hex(16)
        self._server: socket.socket | None = None
        self._store: dist.Store | None = None
        self._rank = 0
        self._greeted: deque[_Neighbor] = deque()  # by the listening thread
        self._neighbors: list[_Neighbor] = []
        self._has_called = False
        self._lock = threading.Lock()
        _lifelines.add(self)

    def join(self, store: dist.Store) -> None:
        """Publish the address of this rank in the store of the default process group, and leave that of an earlier one.

        Does nothing for stores that are not on a network, and in jobs of one rank.
        """
        if self._store is store:
            return
        self.leave()
        self._rank = dist.get_rank()
        self._token = secrets.token_hex(16)  # a neighbor of the earlier ring may connect, or be accepted, only now
        if dist.get_world_size() == 1 or (host := compat.address_towards(store)) is None:
            self._store = store
            return
        if self._server is None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = socket.create_server((host, 0), family=family, backlog=MOST)
            threading.Thread(target=self._listen, args=(self._server,), name="mfsdp-lifeline", daemon=True).start()
        store.set(_address_of(self._rank), json.dumps([*self._server.getsockname()[:2], self._token]))
        self._store = store  # from now on, the other thread looks

    def look(self, store: dist.Store) -> None:
        """Connect to the next rank once it is there, and publish neighbors that have ended.

        Args:
            store: A connection, which no other thread uses, to the store of the default process group.
        """
        with self._lock:
            # After another initialization of the default group, neighbors of the old ring leave it for the new one.
            if self._server is not None and self._store is compat.default_store():
                self._look(store)

    def _look(self, store: dist.Store) -> None:
        while self._greeted:
            neighbor = self._greeted.popleft()
            if neighbor.token == self._token:
                self._neighbors.append(neighbor)
            else:
                neighbor.connection.close()
        after = (self._rank + 1) % dist.get_world_size()
        lost = []
        if not self._has_called and store.check([_address_of(after)]):
            self._has_called = True
            if self._call(store, after) is False:
                lost.append(after)
        for neighbor in list(self._neighbors):
            if not neighbor.is_open():
                self._neighbors.remove(neighbor)
                neighbor.connection.close()
                if any(other.rank == neighbor.rank for other in self._neighbors):
                    continue  # the other connection will tell
                if not self._call(store, neighbor.rank):  # if it answers, our greeting had come too late
                    lost.append(neighbor.rank)
        for rank in lost:
            store.append(ENDED, json.dumps([rank, _address(store, rank)]) + "\n")

    def _call(self, store: dist.Store, rank: int) -> bool | None:
        """Connect to a rank. Return whether its process exists; None: unknown, as the network may be at fault."""
        if (address := _address(store, rank)) is None:
            return False
        try:
            connection = socket.create_connection(tuple(address[:2]), timeout=compat.CONNECT_TIMEOUT)
            connection.sendall(f"{address[2]} {self._rank}\n".encode())
        except ConnectionRefusedError:
            return False
        except OSError:
            return None
        self._neighbors.append(_Neighbor(connection, rank, self._token))
        return True

    def lost(self, store: dist.Store, ranks: Iterable[int]) -> list[Lost]:
        """Return those of ``ranks`` that any rank has seen end, and that have no other address since."""
        if self._server is None or not store.check([ENDED]):
            return []
        ended = dict(json.loads(line) for line in store.get(ENDED).decode().splitlines())
        gone = [rank for rank in ranks if rank in ended and ended[rank] == _address(store, rank)]
        return [Lost(rank, in_order=ended[rank] is None) for rank in gone]

    def leave(self) -> None:
        """Leave the ring in order."""
        with self._lock:
            if self._server is not None and self._store is not None:
                with contextlib.suppress(RuntimeError):  # the store's process has ended
                    self._store.set(_address_of(self._rank), json.dumps(None))
            self._store = None
            self._close()

    def _close(self) -> None:
        for neighbor in (*self._neighbors, *self._greeted):
            neighbor.connection.close()
        self._neighbors.clear()
        self._greeted.clear()
        self._has_called = False

    def close_in_child(self) -> None:
        """Close connections that a forked child inherits, such as a worker of a DataLoader that outlives its parent."""
        self._close()  # without the lock, which another thread of the parent may have held
        if self._server is not None:
            self._server.close()

    def _listen(self, server: socket.socket) -> None:
        while True:
            with contextlib.suppress(OSError):  # the other rank has not waited
                connection, _ = server.accept()
                connection.settimeout(REACH)
                try:
                    token, _, rank = connection.recv(64).decode(errors="replace").strip().partition(" ")
                except TimeoutError:
                    token = rank = ""
                if rank.isdecimal() and token == self._token:
                    self._greeted.append(_Neighbor(connection, int(rank), token))
                    continue
                with connection:
                    if rank == _QUESTION and token == self._token:
                        connection.sendall(self._where()[:_LENGTH].encode())


@dataclass
class Answers:
    """What ranks have answered.

    Attributes:
        ended: Ranks whose processes have ended.
        silent: Ranks whose processes exist but do not answer: they are stopped, or something keeps Python from running.
        where: Where the programs of others are, by rank, of those that said it.
    """

    ended: list[int] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)
    where: dict[int, str] = field(default_factory=dict)


def ask(store: dist.Store, ranks: Sequence[int], patience: float) -> Answers:
    """Ask the first :data:`MOST` of some ranks whether they are there.

    Args:
        patience: Seconds to wait for answers.
    """
    begun, answers = time.monotonic(), Answers()
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as connections:
        for rank in ranks[:MOST]:
            if time.monotonic() > begun + REACH or (address := _address(store, rank)) is None:
                continue
            try:
                connection = socket.create_connection(tuple(address[:2]), timeout=REACH)
                connection.sendall(f"{address[2]} {_QUESTION}\n".encode())
            except ConnectionRefusedError:
                answers.ended.append(rank)
            except OSError:  # unknown: the network may be at fault
                pass
            else:
                waiting.register(connections.enter_context(connection), selectors.EVENT_READ, rank)
        deadline = time.monotonic() + patience
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for answered, _ in waiting.select(left):
                waiting.unregister(answered.fileobj)
                with contextlib.suppress(OSError):
                    if text := answered.fileobj.recv(4 * _LENGTH).decode(errors="replace"):  # type: ignore[union-attr]
                        answers.where[int(answered.data)] = text
        answers.silent = [int(key.data) for key in waiting.get_map().values()]
        return answers


_QUESTION = "?"
_LENGTH = 1000


def _address(store: dist.Store, rank: int) -> list[Any] | None:
    """Return host, port and token of a rank; None if it has none, or has withdrawn it."""
    return json.loads(store.get(_address_of(rank))) if store.check([_address_of(rank)]) else None


def _address_of(rank: int) -> str:
    return f"mfsdp/lifeline/{rank}"


def _close_in_child() -> None:
    for lifeline in list(_lifelines):
        lifeline.close_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
