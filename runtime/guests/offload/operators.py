"""Operators that copy between the device and host memory.

``fetch(shard, device)``
    A copy of a shard on this rank's device of a type.
``offload(gradient, pins)``
    A copy of a reduced gradient in host memory. It may still be arriving: the runtime waits before it is read.
``offload_saved(saved)``, ``fetch_saved(copy, device)``
    Start a copy of a value that forward saves for backward to host memory, and back.
``wait_saved(copy, source)``
    Waits for such a copy. It is declared to write to the copy, so that compilers keep it before the readers, and it
    takes the source, which thereby exists until the copy has been made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...collectives.library import library
from ...lanes.stage import local_operators
from ...memory.devices import device_of
from . import host

library.define("fetch(Tensor shard, str device) -> Tensor")
library.define("offload(Tensor gradient, bool pins) -> Tensor")
library.define("offload_saved(Tensor saved) -> Tensor")
library.define("fetch_saved(Tensor copy, str device) -> Tensor")
library.define("wait_saved(Tensor(a!) copy, Tensor source) -> ()")

FETCH = torch.ops.mfsdp.fetch.default
OFFLOAD = torch.ops.mfsdp.offload.default
OFFLOAD_SAVED = torch.ops.mfsdp.offload_saved.default
FETCH_SAVED = torch.ops.mfsdp.fetch_saved.default
WAIT_SAVED = torch.ops.mfsdp.wait_saved.default
local_operators.update({FETCH: None, OFFLOAD: None})


@torch.library.impl(library, "fetch", "CompositeExplicitAutograd")
def _fetch(shard: Tensor, device: str) -> Tensor:
    return host.fetch(shard, device_of(device))


@torch.library.impl(library, "offload", "CompositeExplicitAutograd")
def _offload(gradient: Tensor, pins: bool) -> Tensor:
    return host.offload(gradient, pins)


@torch.library.impl(library, "offload_saved", "CompositeExplicitAutograd")
def _offload_saved(saved: Tensor) -> Tensor:
    return host.offload_saved(saved)


@torch.library.impl(library, "fetch_saved", "CompositeExplicitAutograd")
def _fetch_saved(copy: Tensor, device: str) -> Tensor:
    return host.fetch_saved(copy, device_of(device))


@torch.library.impl(library, "wait_saved", "CompositeExplicitAutograd")
def _wait_saved(copy: Tensor, source: Tensor) -> None:
    host.await_copy(copy)


@torch.library.register_fake("mfsdp::fetch", lib=library)
@torch.library.register_fake("mfsdp::fetch_saved", lib=library)
def _on_device(x: Tensor, device: str) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride(), device=device)  # needs no GPU


@torch.library.register_fake("mfsdp::offload", lib=library)
def _offloaded(gradient: Tensor, pins: bool) -> Tensor:
    return gradient.new_empty(gradient.shape, device="cpu")


@torch.library.register_fake("mfsdp::offload_saved", lib=library)
def _saved(saved: Tensor) -> Tensor:
    return saved.new_empty_strided(saved.shape, saved.stride(), device="cpu")


@torch.library.register_fake("mfsdp::wait_saved", lib=library)
def _awaited(copy: Tensor, source: Tensor) -> None:
    return
