"""What gloo needs: three overridden kernels on the CPU, and connections that are broken on purpose and made again."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import DispatchKey, DispatchKeySet, Tensor
from torch.distributed.distributed_c10d import _world

from . import nccl
from .distributed import all_gather_out, count_again, timeout_of, wait_tensor
from .stores import another_connection

__all__ = ["break_connections", "broken_groups", "is_of_gloo", "is_timeout", "on_failed_waits", "reconnect"]


def break_connections(*groups: dist.ProcessGroup) -> None:
    """Make every wait for other ranks in these process groups fail at once, on this rank and on the others.

    The groups cannot be used any more, until :func:`reconnect`. Gloo cannot abort a wait (its ``abort()`` does
    nothing), but it notices closed connections. A group's store holds the addresses that its ranks published for each
    other. They identify which of the process's connections belong to the group.
    """
    others = []
    for group in groups:
        _broken.add(group)
        with contextlib.suppress(RuntimeError, ValueError, KeyError, OSError):  # the group or its store is gone
            for device in group._device_types:
                backend = group._get_backend(device)
                if backend.name() == "gloo":
                    store = another_connection(_store_of(group))
                    _close_connections(store, f"{device.type}/", dist.get_rank(group), group.size())
                else:
                    others.append(backend)
    nccl.abort(others)


def is_of_gloo(error: RuntimeError) -> bool:
    """Whether gloo has raised an error: a connection was closed, or another rank did not come."""
    return "/gloo/" in str(error).partition("]")[0]


def is_timeout(error: RuntimeError) -> bool:
    """Whether a wait has ended because another rank did not come, with its connection open."""
    return any(text in str(error) for text in ("Timed out", "timed out", "Application timeout"))


def broken_groups() -> list[dist.ProcessGroup]:
    """Return the groups whose connections this process has broken."""
    return [group for group in _broken if group in _world.pg_map]


def reconnect(group: dist.ProcessGroup) -> bool:
    """Make a process group usable whose connections are broken. All of its ranks must call this, equally often.

    Whatever refers to the group (a mesh, a variable of the program, the default group) keeps working: the object stays,
    and gets another backend. Torch cannot replace a backend, but a group may have one of each kind.

    Returns:
        Whether that was possible: gloo alone runs the group, and it was not reconnected too often (four times or more).
    """
    old = {device: group._get_backend(device) for device in sorted(group._device_types, key=str)}  # alike on all ranks
    if any(type(backend) is not dist.ProcessGroupGloo for backend in old.values()):
        return False
    timeout, name, description = timeout_of(group), group.group_name, group.group_desc
    _reconnected[group] = _reconnected.get(group, 0) + 1
    store = _store_of(group)
    made: dict[torch.device, Any] = {}
    for device in old:
        made[device] = next((b for d, b in made.items() if old[d] is old[device]), None) or dist.ProcessGroupGloo(
            dist.PrefixStore(f"{device.type}/", store), dist.get_rank(group), group.size(), timeout
        )
    for kind in (getattr(dist.ProcessGroup.BackendType, name) for name in ("CUSTOM", "UCC", "XCCL", "MPI")):
        for device, backend in made.items():
            group._register_backend(device, kind, backend)  # has no effect if there is a backend of this kind
        if all(group._get_backend(device) is backend for device, backend in made.items()):
            group._set_default_backend(kind)
            group._set_group_name(name)  # which torch keeps in the backends
            group._set_group_desc(description)
            count_again(group)
            _broken.discard(group)
            return True
    return False


_broken: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_reconnected: MutableMapping[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How often each group was reconnected."""


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store in which the ranks of a group have published addresses, under the name of the device."""
    store: dist.Store = _world.pg_map[group][1]
    number = _reconnected.get(group, 0)
    return dist.PrefixStore(f"reconnected/{number}", store) if number else store


def _close_connections(store: dist.Store, prefix: str, rank: int, size: int) -> None:
    listening: list[bytes] = []  # messages of the ranks, which contain the addresses that they listen at
    number = 0
    while store.check([f"{prefix}/{number}/{rank}"]):
        listening += [store.get(f"{prefix}/{number}/{other}") for other in range(size)]
        number += 1
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                _shut_down(os.dup(int(name)), listening)


def _shut_down(descriptor: int, listening: Sequence[bytes]) -> None:
    """Shut a connection down if one of its ends is among the addresses that ranks have published."""
    with socket.socket(fileno=descriptor) as connection:
        for end in (connection.getsockname(), connection.getpeername()):
            address = _as_gloo_tells(connection.family, end)
            if address is not None and any(address in told for told in listening):
                connection.shutdown(socket.SHUT_RDWR)
                return


def _as_gloo_tells(family: int, address: Any) -> bytes | None:
    """Return the beginning of an address's ``sockaddr`` structure, as in gloo's messages; None for other families."""
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + socket.inet_pton(family, address[0])
    if family == socket.AF_INET6:
        flow = struct.pack("!I", address[2])
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + flow + socket.inet_pton(family, address[0])
    return None


_TORCHS_OWN = DispatchKeySet(DispatchKey.CompositeExplicitAutograd)
_gloo = torch.library.Library("_c10d_functional", "IMPL")


@torch.library.impl(_gloo, "all_gather_into_tensor", "CPU")
def _gather_on_cpu(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    """Override torch's kernel, which corrupts memory when two gathers end at the same time.

    Torch's kernel runs an operation that gloo calls ``ALLGATHER_COALESCED``. When such an operation ends, the two
    threads of a gloo process group write that name to one shared string, without a lock. The name does not fit into the
    string's inline buffer, so two operations that end at the same time free the same heap block twice. Some allocations
    later, the process crashes ("malloc(): unaligned tcache chunk detected", or a segmentation fault). With torch 2.11
    to 2.15, a loop of functional gathers, eight in flight, crashes within seconds. If memory for the result is passed
    in, the operation is called ``ALLGATHER``, which fits.
    """
    full = shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))
    return _gather_into_on_cpu(shard, group_size, group_name, out=full)


@torch.library.impl(_gloo, "all_gather_into_tensor_out", "CPU")
def _gather_into_on_cpu(shard: Tensor, group_size: int, group_name: str, *, out: Tensor) -> Tensor:
    """Override torch's kernel, to gather values of dtypes that gloo does not know, such as float8, as bytes."""
    sent, into = (shard, out) if shard.dtype in _KNOWN else (shard.view(torch.uint8), out.view(torch.uint8))
    all_gather_out.redispatch(_TORCHS_OWN, sent, group_size, group_name, out=into)
    return out


_KNOWN = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
}
"""Dtypes that gloo gathers."""


def on_failed_waits(explain: Callable[[RuntimeError], None]) -> None:
    """Call ``explain`` with torch's error when a wait for a collective on the CPU fails, in compiled code or not.

    ``explain`` may raise another error instead. Call this function once per process.
    """

    @torch.library.impl(_gloo, "wait_tensor", "CPU")
    def wait(tensor: Tensor) -> Tensor:
        try:
            return wait_tensor.redispatch(_TORCHS_OWN, tensor)
        except RuntimeError as error:
            explain(error)
            raise
