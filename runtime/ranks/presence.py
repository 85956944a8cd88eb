"""Whether the processes of other ranks still exist.

Every rank listens at a port whose address is in the store. Nothing is ever sent. A process that has ended, in whatever way,
refuses connections. One that is stopped or busy does not, because the kernel accepts them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import torch.distributed as dist

from .. import compat

__all__ = ["Presence", "ended"]

MOST = 64
"""Maximum number of ranks to ask. In a large job that fails, each of all ranks asks."""
PATIENCE = 0.5
"""Seconds within which the kernel of another machine must answer."""


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
            self._listening.setblocking(False)
        store.set(_key(dist.get_rank()), json.dumps(self._listening.getsockname()[:2]))
        self._told = store

    def answer(self) -> None:
        """Make room for further connections."""
        while self._listening is not None:
            try:
                self._listening.accept()[0].close()
            except OSError:  # there are no more
                return


def ended(store: dist.Store, ranks: Sequence[int]) -> list[int]:
    """Return those of the first :data:`MOST` ranks whose processes have ended."""
    return [rank for rank in ranks[:MOST] if store.check([_key(rank)]) and _refuses(*json.loads(store.get(_key(rank))))]


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # unknown: the network may be at fault
        pass
    return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _key(rank: int) -> str:
    return f"mfsdp/presence/{rank}"
