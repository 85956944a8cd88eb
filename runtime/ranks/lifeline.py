"""Notices within seconds that the process of another rank has ended, whatever ended it.

A killed process cannot say so. Ranks that wait for it in an agreement would wait for the whole time limit of their
process group. Therefore the ranks of a job form a ring of connections::

    rank 0 --- rank 1 --- rank 2 --- ... --- rank n - 1 --- rank 0

When a process ends, the operating system closes its connections. Its two neighbors see this and publish it in the
store, where ranks that wait look (:mod:`.watchdog`). TCP's keep-alive packets notice machines that are gone. Each rank
has two connections, in jobs of any size, and sends nothing while all ranks live. A process that ends in order says
goodbye first, so that a message can tell an exit from a kill.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from .. import compat

__all__ = ["Lifeline", "Lost", "RankLost"]

KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}
"""Socket options: a machine that has not answered for 20 seconds is gone. Systems that lack one use their default."""

ENDED = "mfsdp/ended"
"""Key of the store with a JSON line for each rank that has ended."""

GOODBYE = b"goodbye\n"

_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


class RankLost(RuntimeError):
    """The process of a rank that this one waits for has ended."""


@dataclass(frozen=True)
class Lost:
    """A rank whose process has ended.

    Args:
        rank: The rank.
        said_goodbye: Whether it ended in order. If not, it was killed, crashed, or its machine is gone.
    """

    rank: int
    said_goodbye: bool

    def __str__(self) -> str:
        how = "has ended" if self.said_goodbye else "was killed or has crashed"
        return f"the process of rank {self.rank} {how}"


class _Neighbor:
    """A connection to a neighbor. It receives nothing but a greeting and a goodbye."""

    def __init__(self, connection: socket.socket, rank: int | None = None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if (number := getattr(socket, option, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, number, value)
        self.connection = connection
        self.rank = rank
        self.received = b""

    def is_open(self) -> bool:
        """Read what has arrived. Return False if the connection has ended."""
        try:
            while chunk := self.connection.recv(4096):
                self.received = (self.received + chunk)[-4096:]
        except BlockingIOError:
            return True
        except OSError:  # reset, or the machine does not answer
            pass
        return False


class Lifeline:
    """This process's place in the ring. One thread uses it, that of the watchdog.

    Args:
        store: The store of the default process group. This method and others get a connection that no other thread uses.
        host: Address of this machine for the other ranks.
        rank: This process's rank.
        size: Number of ranks, at least two.
    """

    def __init__(self, store: dist.Store, host: str, rank: int, size: int) -> None:
        self._rank = rank
        self._before, self._after = (rank - 1) % size, (rank + 1) % size
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._server = socket.create_server((host, 0), family=family)
        self._server.setblocking(False)
        self._token = secrets.token_hex(16)
        self._strangers: list[_Neighbor] = []  # connected, and have not greeted yet
        self._neighbors: list[_Neighbor] = []
        self._has_called = False
        _lifelines.add(self)
        store.set(_address_of(rank), json.dumps([host, self._server.getsockname()[1], self._token]))

    def look(self, store: dist.Store) -> None:
        """Connect to the neighbors once they are there, and publish those that have ended. Does not wait."""
        self._accept()
        if not self._has_called and store.check([_address_of(self._after)]):
            self._call(store)
        for neighbor in list(self._neighbors):
            if not neighbor.is_open():
                self._neighbors.remove(neighbor)
                neighbor.connection.close()
                ended = {"rank": neighbor.rank, "said goodbye": neighbor.received.endswith(GOODBYE)}
                store.append(ENDED, json.dumps(ended) + "\n")

    def lost(self, store: dist.Store, ranks: Iterable[int]) -> list[Lost]:
        """Return those of ``ranks`` that any rank has seen end."""
        if not store.check([ENDED]):
            return []
        ended = map(json.loads, store.get(ENDED).decode().splitlines())
        found = {each["rank"]: Lost(each["rank"], each["said goodbye"]) for each in ended}
        return [found[rank] for rank in ranks if rank in found]

    def end(self, says_goodbye: bool = True) -> None:
        """Leave the ring.

        Args:
            says_goodbye: Tell the neighbors that this process ends in order. A forked child, which shares the connections with
                its parent, must not.
        """
        for neighbor in self._neighbors if says_goodbye else ():
            with contextlib.suppress(OSError):
                neighbor.connection.send(GOODBYE)
        for each in (*self._neighbors, *self._strangers):
            each.connection.close()
        self._server.close()
        self._neighbors.clear()
        self._strangers.clear()

    def _call(self, store: dist.Store) -> None:
        self._has_called = True
        host, port, token = json.loads(store.get(_address_of(self._after)))
        try:
            connection = socket.create_connection((host, port), timeout=compat.CONNECT_TIMEOUT)
            connection.sendall(f"{token} {self._rank}\n".encode())
        except OSError:  # it has ended before this rank could connect, which its other neighbor may have seen
            return
        self._neighbors.append(_Neighbor(connection, self._after))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._strangers.append(_Neighbor(self._server.accept()[0]))
        for stranger in list(self._strangers):
            is_open = stranger.is_open()
            if b"\n" not in stranger.received and is_open:
                continue
            self._strangers.remove(stranger)
            if stranger.received.startswith(f"{self._token} {self._before}\n".encode()):
                stranger.rank = self._before
                self._neighbors.append(stranger)
            else:
                stranger.connection.close()


def _address_of(rank: int) -> str:
    return f"mfsdp/lifeline/{rank}"


def _close_in_child() -> None:
    """Close connections that a forked child inherits, such as a worker of a DataLoader that outlives its parent."""
    for lifeline in list(_lifelines):
        lifeline.end(says_goodbye=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
