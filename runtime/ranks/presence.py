"""Whether the processes of other ranks still exist.

Every rank listens at a port whose address is in the store. Nothing is sent: a rank answers by closing the connection. The
kernel refuses connections to a process that has ended, in whatever way, and accepts them for one that is stopped.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Sequence

import torch.distributed as dist

from .. import compat

__all__ = ["Presence", "ask"]

MOST = 64
"""Maximum number of ranks to ask. In a large job that fails, each of all ranks asks."""
REACH = 1.0
"""Seconds within which the kernels of other machines must answer. Ranks that are not reached in that time count as there."""


class Presence:
    """The presence of this process for other ranks."""

    def __init__(self) -> None:
        self._listening: socket.socket | None = None
        self._told: dist.Store | None = None

    def tell(self, store: dist.Store) -> None:
        """Publish the address of this rank. Stores that are not on a network have no addresses."""
        if self._told is store or (host := compat.address_towards(store)) is None:
            return
        if self._listening is None:
            self._listening = socket.create_server((host, 0), family=_family(host), backlog=MOST)
            threading.Thread(target=_answer, args=(self._listening,), name="mfsdp-presence", daemon=True).start()
        store.set(_key(dist.get_rank()), json.dumps(self._listening.getsockname()[:2]))
        self._told = store


def _answer(listening: socket.socket) -> None:
    while True:
        with contextlib.suppress(OSError):  # the other rank has not waited
            listening.accept()[0].close()


def ask(store: dist.Store, ranks: Sequence[int], patience: float) -> tuple[list[int], list[int]]:
    """Ask the first :data:`MOST` of some ranks whether they are there.

    Args:
        patience: Seconds to wait for answers.

    Returns:
        Ranks whose processes have ended, and ranks whose processes exist but do not answer: they are stopped, or something
        keeps Python from running.
    """
    begun, ended = time.monotonic(), []
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as connections:
        for rank in ranks[:MOST]:
            if time.monotonic() > begun + REACH or not store.check([_key(rank)]):
                continue
            try:
                connection = socket.create_connection(json.loads(store.get(_key(rank))), timeout=REACH)
            except ConnectionRefusedError:
                ended.append(rank)
            except OSError:  # unknown: the network may be at fault
                pass
            else:
                waiting.register(connections.enter_context(connection), selectors.EVENT_READ, rank)
        deadline = time.monotonic() + patience
        while waiting.get_map() and (left := deadline - time.monotonic()) > 0:
            for answered, _ in waiting.select(left):
                waiting.unregister(answered.fileobj)
        return ended, [int(key.data) for key in waiting.get_map().values()]


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _key(rank: int) -> str:
    return f"mfsdp/presence/{rank}"
