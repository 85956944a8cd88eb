"""Host memory and a device's, told apart on a CPU: which of them each tensor is in, and how much of it each takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mfsdp_compile.runtime.guests.offload import host
from mfsdp_compile.runtime.memory import devices, gradients
from mfsdp_compile.runtime.memory.bucket import Bucket

HOST, DEVICE = "host", "device"
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)


class Arenas(TorchDispatchMode):
    """Follows tensors through operators. One that takes tensors of both arenas, or a collective in host memory, raises.

    What an operator returns is where its arguments are. Of tensors that are made from none, it is not known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}  # weak references keep addresses from being used again
        self.violations: list[str] = []

    def mark(self, tensor: Tensor, arena: str) -> Tensor:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._known[reference.cdata] = (reference, arena)
        return tensor

    def of(self, tensor: Tensor) -> str | None:
        found = self._known.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return found[1] if found is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again for the rows
        out = func(*args, **kwargs or {})
        if func in _COPIES:
            return out
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        arenas = {arena for tensor in tensors if (arena := self.of(tensor)) is not None}
        if len(arenas) == 2:
            self.violations.append(f"{func} takes tensors of both arenas")
        elif arenas == {HOST} and func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.violations.append(f"{func} is given host memory")
        if len(arenas) == 1:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and self.of(leaf) is None:
                    self.mark(leaf, *arenas)
        return out


@contextlib.contextmanager
def arenas() -> Iterator[Arenas]:
    """Context in which models are sharded and trained by the eager path, and what mixes arenas raises at the end."""
    mode = Arenas()

    def marking(function: Callable[..., Tensor], arena: str) -> Callable[..., Tensor]:
        return lambda *args: mode.mark(function(*args), arena)

    def moved(function: Callable[..., Tensor]) -> Callable[..., Tensor]:  # by .to(device), which copies nothing here
        return lambda *args, **kwargs: mode.mark(function(*args, **kwargs).clone(), DEVICE)

    with (
        mock.patch.object(host, "empty", marking(host.empty, HOST)),
        mock.patch.object(host, "offload", marking(host.offload, HOST)),
        mock.patch.object(host, "fetch", marking(host.fetch, DEVICE)),
        mock.patch.object(devices, "on_device", moved(devices.on_device)),
        mock.patch.object(Bucket, "own_part", moved(Bucket.own_part)),
        mode,
    ):
        yield mode
    assert not mode.violations, "\n".join(dict.fromkeys(mode.violations))


def peaks(function: Callable[[], Any], offloads: bool) -> dict[str, int]:
    """Return the most bytes of each arena that are allocated at one time beyond what was before, of an offloaded model.

    Everything that ``on_host`` runs, and what the package does in host memory, is the host's. Needs a fake process
    group, like :func:`mfsdp_compile.diagnostics.measure.allocated`.
    """
    patches = contextlib.ExitStack()
    if offloads:
        for holder, name in ((host, "empty"), (gradients, "accumulate")):
            patches.enter_context(mock.patch.object(holder, name, on_host(getattr(holder, name))))
    with patches, profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
        function()
    changes: list[tuple[int, int, int, str]] = []
    events = [(event, DEVICE) for event in profiled.profiler.kineto_results.experimental_event_tree()]
    while events:
        event, arena = events.pop()
        arena = HOST if event.name == _HOST else arena
        if event.tag == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size, arena))
        events += [(child, arena) for child in event.children]
    held, most, arena_of = {HOST: 0, DEVICE: 0}, {HOST: 0, DEVICE: 0}, {}
    for _, address, size, arena in sorted(changes, key=lambda change: change[0]):
        if size > 0:
            arena_of[address] = arena
        else:
            arena = arena_of.pop(address, DEVICE)
        held[arena] += size
        most[arena] = max(most[arena], held[arena])
    return most


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose memory :func:`peaks` counts as the host's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(_HOST):
            return function(*args, **kwargs)

    return run


_HOST = "in host memory"
