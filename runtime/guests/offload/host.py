"""Two arenas: host memory, where offloaded shards rest, and the device's, where they are used.

    fetch           shard at rest, on the host -> the same on the device, before it is cast and gathered
    offload         reduced gradient, on the device -> the same on the host, where it is accumulated
    offload_saved   what forward has saved for backward, on the device -> the same on the host, until backward needs it
    fetch_saved     and back

If only the optimizer is offloaded, shards are fetched once after each change, and cast to the copy that is gathered, or
gathered to the resident.

Copies of buckets go through :func:`copied`, copies of saved values through :func:`start_copy`. If the device is the
CPU, both arenas are in the same memory, but never in the same tensor.

What is copied is in the main dtype, and the device casts it: a cast on the host would run on the thread that launches
kernels, and read host memory for longer than the link takes for the bytes that it saves.

On a GPU, copies run on streams of their own, one for each direction, in order. The stream that asked waits for copies
of buckets, and the thread does not. It waits for copies of saved values where a graph says so (:func:`await_copy`).
What the CPU reads or writes afterwards must therefore wait (:func:`settle`): gradients that are still arriving, and
shards that are still being read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...memory import devices


def empty(numel: int, dtype: torch.dtype, device: torch.device, pins: bool) -> Tensor:
    """Return uninitialized host memory for a bucket that ``device`` uses, ``[numel]``."""
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pins and device.type == "cuda")


def fetch(shard: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a shard on the device, ``[shard_numel]``."""
    return copied(shard, lambda: torch.empty(shard.shape, dtype=shard.dtype, device=device), device)


def offload(gradient: Tensor, pins: bool) -> Tensor:
    """Return a copy of a reduced gradient on the host, ``[shard_numel]``. It has arrived after :func:`settle`."""
    device = gradient.device
    return copied(gradient, lambda: empty(gradient.numel(), gradient.dtype, device, pins), device)


def copied(source: Tensor, allocate: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return a copy of ``source`` in memory of the other arena, from ``allocate``.

    Args:
        device: The device that ``source`` comes from or goes to.
    """
    if device.type != "cuda":
        return allocate().copy_(source)
    stream, current = _stream_of(device, source.device == device), torch.cuda.current_stream(device)
    if source.device == device:
        stream.wait_stream(current)  # which computes it
        source.record_stream(stream)
    with torch.cuda.stream(stream):  # memory of this stream: in that of the other one, queued kernels may still work
        target = allocate()
        target.copy_(source, non_blocking=True)
    if target.device == device:
        current.wait_stream(stream)
        target.record_stream(current)
    return target


def offload_saved(saved: Tensor) -> Tensor:
    """Start a copy of a dense tensor to the host, with the same strides. See :func:`start_copy`."""

    def allocate() -> Tensor:
        return empty(saved.numel(), saved.dtype, saved.device, pins=True).as_strided(saved.shape, saved.stride())

    return start_copy(saved, allocate, saved.device)


def fetch_saved(copy: Tensor, device: torch.device) -> Tensor:
    """Start a copy of what :func:`offload_saved` returned to the device, with the same strides."""

    def allocate() -> Tensor:
        return torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=device)

    return start_copy(copy, allocate, device)


def start_copy(source: Tensor, allocate: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Like :func:`copied`, but nothing waits for the copy.

    Until :func:`await_copy`, the target must not be read, and the source must not be written to. Both stay in memory
    until then, or until :func:`settle` if a failure leaves the wait out.
    """
    if device.type != "cuda":
        return allocate().copy_(source)
    stream, current = _stream_of(device, source.device == device), torch.cuda.current_stream(device)
    target = allocate()
    stream.wait_stream(current)  # which computes the source, or has queued kernels that use the target's memory
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        _in_flight[target.data_ptr()] = _Copy(stream.record_event(), device, source, target)
    return target


def await_copy(target: Tensor) -> None:
    """Let the current stream wait for the copy that :func:`start_copy` returned."""
    if (started := _in_flight.pop(target.data_ptr(), None)) is not None:
        torch.cuda.current_stream(started.device).wait_event(started.event)


def settle(device: torch.device) -> None:
    """Wait until the CPU may read what was offloaded from ``device``, and write to what was fetched to it."""
    for (of, _), stream in _streams.items():
        if of == device:
            stream.synchronize()
    for address in [address for address, copy in _in_flight.items() if copy.device == device]:
        del _in_flight[address]


def settle_pinned(memory: Tensor) -> None:
    """Like :func:`settle`, before the CPU reads or writes this memory, if devices may still copy from or to it."""
    if _streams and memory.device.type == "cpu" and memory.is_pinned():
        for stream in _streams.values():
            stream.synchronize()


def _stream_of(device: torch.device, outward: bool) -> Any:
    """Return the stream of copies from (``outward``) or to a device."""
    if (device, outward) not in _streams:
        _streams[device, outward] = torch.cuda.Stream(device)
    return _streams[device, outward]


devices.settlers.append(settle)

_streams: dict[tuple[torch.device, bool], Any] = {}
"""The streams that copies run on, by device and direction: models share them, as they share the link."""


class _Copy(NamedTuple):
    """A copy of a saved value that nothing has waited for yet: the event that ends it, and what it reads and writes."""

    event: Any
    device: torch.device
    source: Tensor
    target: Tensor


_in_flight: dict[int, _Copy] = {}
"""Copies of saved values, by address of the target."""
