"""Connections to the store that a process group was created with."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

__all__ = [
    "CONNECT_TIMEOUT",
    "address_towards",
    "another_connection",
    "connect_to_store",
    "default_store",
    "serve_store",
]


CONNECT_TIMEOUT = 10.0
"""Seconds within which the process that serves a store must answer."""


def another_connection(store: dist.Store) -> dist.Store:
    """Open a separate connection to the same store. A thread that waits in a store blocks its connection for others.

    Raises:
        OSError: The store is gone. Torch would retry for five minutes.
    """
    if (server := _tcp_store(store)) is not None:
        socket.create_connection((server.host, server.port), timeout=CONNECT_TIMEOUT).close()
    another: dist.Store = store.clone()
    another.set_timeout(timedelta(seconds=30))
    return another


def _tcp_store(store: dist.Store) -> dist.TCPStore | None:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, dist.TCPStore) else None


def address_towards(store: dist.Store) -> str | None:
    """Return the address of this machine for processes that reach the store; None if the store is not on a network."""
    if (server := _tcp_store(store)) is None:
        return None
    family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def serve_store(host: str, patience: timedelta) -> dist.TCPStore:
    """Serve a store from this process, on a free port of ``host`` alone. By default, a TCPStore serves all of them."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    listening = socket.create_server((host, 0), family=family)
    return dist.TCPStore(
        host_name=host,
        port=listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=patience,
        master_listen_fd=listening.detach(),
    )


def connect_to_store(host: str, port: int, patience: timedelta) -> dist.TCPStore:
    """Connect to a store that another process serves.

    Raises:
        OSError: The store is gone. Torch would retry for five minutes.
    """
    socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    return dist.TCPStore(host_name=host, port=port, is_master=False, wait_for_workers=False, timeout=patience)


def default_store() -> dist.Store:
    """Return the key-value store of the default process group."""
    return _get_default_store()
