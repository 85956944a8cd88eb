"""Every private torch symbol that mfsdp-compile uses, in one place.

Supported: torch 2.11 to 2.15. Symbols imported at the top of this file are checked when the package is imported. If
torch lacks one of them, the import fails and names the symbol, instead of a failure in the middle of a training step.
Symbols of the compiler are imported inside the functions that use them, because importing Inductor takes seconds that
eager users should not pay for. Each function has a test in ``tests/runtime/test_compat.py``. Nothing in torch is monkeypatched,
but two of its CPU kernels are overridden: see ``_gather_on_cpu`` (at import) and ``on_failed_waits``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import heapq
import importlib.util
import logging
import os
import re
import socket
import stat
import struct
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

_F = TypeVar("_F", bound=Callable[..., Any])

MIN_TORCH = (2, 11)
MAX_TESTED_TORCH = (2, 15)


def _version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


TORCH_VERSION = _version()
if TORCH_VERSION < MIN_TORCH:
    raise ImportError(
        f"mfsdp-compile needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, found {torch.__version__}. "
        "Install a newer torch, for instance with: pip install --upgrade torch"
    )
if not dist.is_available():
    raise ImportError("mfsdp-compile needs a torch that was built with torch.distributed")

try:
    from torch._C import (
        DisableTorchFunction,
        DisableTorchFunctionSubclass,
        DispatchKey,
        _current_graph_task_id,
        _will_engine_execute_node,
    )
    from torch._C._autograd import (  # type: ignore[attr-defined]
        _pop_saved_tensors_default_hooks,
        _push_saved_tensors_default_hooks,
        _saved_tensors_hooks_is_enabled,
        _top_saved_tensors_default_hooks,
    )
    from torch._C._functorch import peek_interpreter_stack as _peek_functorch_interpreter
    from torch._guards import TracingContext, detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed._functional_collectives import all_to_all_single_autograd
    from torch.distributed.checkpoint._traverse import set_element
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.state_dict import _patched_state_dict
    from torch.distributed.distributed_c10d import (
        _get_default_group,
        _get_default_store,
        _get_default_timeout,
        _new_process_group_helper,
        _resolve_process_group,
        _world,
    )
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.fx.graph import _BoxedCodeGen
    from torch.optim._muon import _adjust_lr as muon_learning_rate
    from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalise
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import (
        TorchDispatchMode,
        _disable_current_modes,
        _get_current_dispatch_mode_stack,
        _len_torch_dispatch_stack,
    )
    from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map_only
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    all_gather_out = torch.ops._c10d_functional.all_gather_into_tensor_out.default
    reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    all_reduce = torch.ops._c10d_functional.all_reduce.default
    all_to_all = torch.ops._c10d_functional.all_to_all_single.default
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default
    no_torch_function = torch._C._disabled_torch_function_impl
    _execution_engine = torch.autograd.Variable._execution_engine
    _eval_frame: Any = torch._C._dynamo.eval_frame
    _run_as_is = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torch {torch.__version__} lacks a symbol that mfsdp-compile needs ({error}). Supported: torch "
        f"{MIN_TORCH[0]}.{MIN_TORCH[1]} to {MAX_TESTED_TORCH[0]}.{MAX_TESTED_TORCH[1]}"
    ) from error

TORCH_FOLDER = str(Path(torch.__file__).parent)
"""Folder of torch's own source."""

DTENSOR_SUBCLASSES_DISPATCH = TORCH_VERSION >= (2, 13)
"""Whether a DTensor subclass's own ``__torch_dispatch__`` is called. Older versions of torch call DTensor's."""

PIPELINES_HOLD_MESSAGES = importlib.util.find_spec("torch.distributed.pipelining._recv_buffers") is None
"""Whether a stage of torch's pipelines holds all messages of a step in memory.

Older torch has a buffer for each message, and keeps sent outputs until the backward. Newer torch (2.15) receives into
memory for a single message, and releases outputs once they are sent. Gradients of inputs stay until the end of the
step.
"""

__all__ = [
    "DTENSOR_SUBCLASSES_DISPATCH",
    "PIPELINES_HOLD_MESSAGES",
    "ChunkStorageMetadata",
    "DTensorSpec",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "StorageInfo",
    "TensorMeta",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "all_gather",
    "all_gather_out",
    "all_reduce",
    "all_to_all",
    "default_store",
    "detect_fake_mode",
    "graph_argument",
    "in_backward",
    "inductor_config_patches",
    "keystr",
    "muon_learning_rate",
    "on_backward_end",
    "orthogonalise",
    "reduce_scatter",
    "saved_tensor_hooks_active",
    "set_element",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_map_only",
    "wait_tensor",
]


# -- autograd ---------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether this thread is inside ``backward()``. True in hooks, and while activation checkpointing recomputes."""
    return _current_graph_task_id() != -1


def backward_id() -> int:
    """Return a number that is the same throughout one backward pass; -1 outside of any."""
    return _current_graph_task_id()


class Wanted(Enum):
    """What a running backward does with the gradient of a leaf."""

    NOT = "nothing"
    ADDED = "adds it to .grad"
    RETURNED = "returns it"  # torch.autograd.grad


def wanted(leaf: Any) -> Wanted:
    """In backward, return what happens to the gradient of a leaf, given by its node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` request only some gradients.
    """
    try:
        return Wanted.ADDED if _will_engine_execute_node(leaf) else Wanted.NOT
    except RuntimeError:  # torch raises this for a leaf whose gradient torch.autograd.grad returns
        return Wanted.RETURNED


def counts_tensors(hook: Callable[..., Any]) -> bool:
    """Whether a tensor hook was created by ``torch.autograd.graph.register_multi_grad_hook``."""
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook")


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost running backward has finished. It does not run if the backward raises."""
    _execution_engine.queue_callback(callback)


def saved_tensor_hooks_active() -> bool:
    """Whether this thread has default hooks on saved tensors (installed by checkpointing or offloading)."""
    return _top_saved_tensors_default_hooks(False) is not None


def saved_tensor_hooks_allowed() -> bool:
    """Whether default hooks on saved tensors can be installed: not inside transforms like ``torch.func.grad``."""
    return _saved_tensors_hooks_is_enabled()


def refuses_saved_tensor_hooks(error: BaseException) -> bool:
    """Whether a transform of ``torch.func`` has raised ``error`` because there are default hooks on saved tensors."""
    return "torch.func" in str(error) and "saved tensor hooks" in str(error)


def below_function_transforms() -> contextlib.AbstractContextManager[Any]:
    """Context that hides operators from the running transforms of ``torch.func``.

    To the transforms, what is computed inside is a constant.
    """
    if _peek_functorch_interpreter() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype have equal bits. NaN equals the same NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


@contextlib.contextmanager
def without_hook(pack: Callable[..., Any]) -> Iterator[None]:
    """Temporarily remove this thread's default hooks on saved tensors, as long as the topmost is ``pack``'s."""
    taken: list[tuple[Any, Any]] = []
    while (top := _top_saved_tensors_default_hooks(False)) is not None and top[0] == pack:
        taken.append(top)
        _pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack_hook, unpack_hook in reversed(taken):
            _push_saved_tensors_default_hooks(pack_hook, unpack_hook)


def profiler_runs() -> bool:
    """Whether torch's profiler is recording."""
    return torch.autograd._profiler_enabled()


def device_types(group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the device types that a group, or the default one, communicates tensors of; GPUs first.

    A group may have a backend for each of several device types (``init_process_group()`` creates such a group if there
    are GPUs). Gloo also supports some collectives on CUDA tensors, but not those needed here. CUDA therefore does not
    count if gloo is its only backend.
    """
    group = group or _get_default_group()
    types = {device.type for device in group._device_types}
    if "cuda" in types and (not torch.cuda.is_available() or "gloo" in group._get_backend(torch.device("cuda")).name()):
        types -= {"cuda"}
    return sorted(types & {"cpu", "cuda"}, reverse=True)


def device_type(group: dist.ProcessGroup | None = None, preferred: str | None = None) -> str:
    """Return the device type to communicate over a group, or the default one: ``preferred`` if possible, else CUDA."""
    types = device_types(group)
    return preferred if preferred in types else next(iter(types), "cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return the time after which a collective of the group fails, whatever backend runs it."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without options
            timeouts.append(group._get_backend(device).options._timeout)
    return max(timeouts, default=dist.default_pg_timeout)


def process_group(name: str) -> dist.ProcessGroup:
    """Return the group with the name that functional collectives use."""
    return _resolve_process_group(name)


def known_groups() -> dict[str, list[int]]:
    """Return the ranks of every process group that this rank is in, by name."""
    groups = [group for group in _world.pg_map if dist.get_rank(group) >= 0]
    return {group.group_name: dist.get_process_group_ranks(group) for group in groups}


def collectives_started(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has started on a group; 0 if the backend does not count them."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:  # the group has several backends, or one that does not count
        pass
    counts: dict[Any, int] = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            counts[backend] = backend._get_sequence_number_for_group()
    return sum(counts.values())


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether a process group is fake: its other ranks do not exist."""
    return {backend.rpartition(":")[2] for backend in dist.get_backend(group).split(",")} == {"fake"}


def is_real_group(name: str) -> bool:
    """Whether a process group, given by name, is not fake."""
    return not is_simulated(_resolve_process_group(name))


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Context in which this process is the first of ``ranks`` simulated ranks.

    Collectives return immediately, with undefined content.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_group_like(name: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Create a process group with the backend and timeout of another one. All of its ranks must call this.

    Args:
        name: Name of the other group.
        ranks: Global ranks, including this one. None: those of the other group.
    """
    old = _resolve_process_group(name)
    ranks = ranks if ranks is not None else dist.get_process_group_ranks(old)
    return new_group(ranks, timeout=timeout_of(old), backend=dist.get_backend(old))


def new_group(
    ranks: Sequence[int], *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group. All of its ranks must call this; other ranks need not.

    Torch names such a group by the number of groups that a rank has created, and ranks find each other by that name.
    Ranks that have created different numbers of groups, such as ranks of different pipeline stages, would wait for each
    other until they time out. This group is named by the number of groups that were created here with the same ranks.
    """
    ranks, default = tuple(sorted(ranks)), _get_default_group()
    default_backend, store = _world.pg_map[default]
    backend = dist.Backend(backend or default_backend)
    _groups_made[ranks] += 1
    name = hashlib.sha1(repr((ranks, _groups_made[ranks])).encode(), usedforsecurity=False).hexdigest()
    made, _ = _new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        backend,
        store,
        f"mfsdp_{name}",
        timeout=timeout or _get_default_timeout(backend),
        device_id=default.bound_device_id,
        group_desc="mfsdp",
    )
    _world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


_groups_made: Counter[tuple[int, ...]] = Counter()


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
    """Serve a store from this process, on a free port."""
    return dist.TCPStore(host_name=host, port=0, is_master=True, wait_for_workers=False, timeout=patience)


def connect_to_store(host: str, port: int, patience: timedelta) -> dist.TCPStore:
    """Connect to a store that another process serves.

    Raises:
        OSError: The store is gone. Torch would retry for five minutes.
    """
    socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    return dist.TCPStore(host_name=host, port=port, is_master=False, wait_for_workers=False, timeout=patience)


def break_connections(group: dist.ProcessGroup) -> None:
    """Make every wait for other ranks in this process group fail at once, on this rank and on the others.

    The group cannot be used any more. Gloo cannot abort a wait (its ``abort()`` does nothing), but it notices closed
    connections. The group's store holds the addresses that its ranks published for each other. They identify which of
    the process's connections belong to the group.
    """
    store = _world.pg_map[group][1]
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == "gloo":
            _close_connections(another_connection(store), f"{device.type}/", dist.get_rank(group), group.size())
        else:
            backend.abort()


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


def is_generated(file: str) -> bool:
    """Whether a file contains code that Inductor has generated."""
    cache = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return cache is not None and file.startswith(cache.cache_dir())


def waits_in(frame: FrameType | None) -> str | None:
    """Return the group name of the ``torch.distributed`` collective that a thread is in; None if it is in none.

    Args:
        frame: The innermost frame of the thread.
    """
    while frame is not None and frame.f_code.co_filename.startswith(TORCH_FOLDER):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "group" in frame.f_locals:
            group = frame.f_locals["group"] or _get_default_group()
            return group.group_name if isinstance(group, dist.ProcessGroup) else None
        frame = frame.f_back
    return None


def stand_around_collectives(
    names: Iterable[str], around: Callable[[str], contextlib.AbstractContextManager[Any]]
) -> torch.library.Library:
    """Run every start of a functional collective with one of these names inside ``around(name)``, compiled or not.

    The wrapper is installed at a dispatch key that every call passes, and stays until ``_destroy()`` is called on the
    result.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")

    def watch(name: str) -> None:
        collective = getattr(torch.ops._c10d_functional, name).default

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            with around(name):
                return collective.redispatch(keys.remove(DispatchKey.BackendSelect), *args, **kwargs)

        library.impl(name, run, "BackendSelect", with_keyset=True)

    for name in names:
        watch(name)
    return library


_ON_CPU = torch._C.DispatchKeySet(DispatchKey.CPU)
_WAITS_ON_CPU = torch._C.DispatchKeySet(DispatchKey.CompositeExplicitAutograd)
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
    return all_gather_out.redispatch(_ON_CPU, shard, group_size, group_name, out=full)


def all_reduce_on_host(tensor: Tensor, op: str, group: str) -> Tensor:
    """All-reduce a tensor on the CPU. This does not wait for the device if the group has a backend for the CPU."""
    devices = {device.type for device in _resolve_process_group(group)._device_types}
    if "cpu" not in devices and devices:
        tensor = tensor.to(next(iter(devices)))
    return wait_tensor(all_reduce(tensor, op, group)).cpu()


def on_failed_waits(explain: Callable[[RuntimeError], None]) -> None:
    """Call ``explain`` with torch's error when a wait for a collective on the CPU fails, in compiled code or not.

    ``explain`` may raise another error instead. Call this function once per process.
    """

    @torch.library.impl(_gloo, "wait_tensor", "CPU")
    def wait(tensor: Tensor) -> Tensor:
        try:
            return wait_tensor.redispatch(_WAITS_ON_CPU, tensor)
        except RuntimeError as error:
            explain(error)
            raise


def all_to_all_autograd(tensor: Tensor, incoming: Sequence[int], outgoing: Sequence[int], group: str) -> Tensor:
    """Exchange rows of ``tensor`` between the ranks of a group. The backward sends gradients the opposite way.

    Args:
        tensor: ``[sum(outgoing), ...]``.
        incoming, outgoing: Number of rows from each rank, and to each rank. While Dynamo traces, they may be sizes that
            are known only at run time.
        group: Name of the process group.

    Returns:
        ``[sum(incoming), ...]``.
    """
    received = all_to_all_single_autograd(tensor, list(incoming), list(outgoing), group)
    return wait_tensor(received)


with _disable_current_modes():
    pass  # the first use imports modules; do that now, because a finalizer may run in the middle of another import


def wait_tensor_when_dropped(tensor: Tensor) -> None:
    """Run ``wait_tensor`` in a finalizer, which may run in the middle of a trace."""
    with _disable_current_modes(), torch.no_grad():
        wait_tensor(tensor)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context that hides operators from all dispatch modes, and functions from all function modes."""
    with _disable_current_modes(), DisableTorchFunction():
        yield


def outside_selective_checkpoint() -> contextlib.AbstractContextManager[None]:
    """Context that hides operators from selective activation checkpointing.

    Selective checkpointing counts operators, saves the results of some, and matches them by position when it
    recomputes.
    """
    if _len_torch_dispatch_stack() and any(
        isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))
        for mode in _get_current_dispatch_mode_stack()
    ):
        outside: contextlib.AbstractContextManager[None] = _disable_current_modes()
        return outside
    return contextlib.nullcontext()


def storage_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None for a tensor that has none, or wraps others.

    The address is computed, because ``untyped_storage()`` would create a Python object per storage.
    """
    try:
        return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


_MODULE_FILE = torch.nn.Module._call_impl.__code__.co_filename


def in_call_of(modules: Collection[torch.nn.Module]) -> bool:
    """Whether this thread is inside the call of one of ``modules``.

    This is for code that runs eagerly in the middle of compiled code: the forwards around it were traced and do not
    run. A call of a module leaves a frame of ``nn.Module._call_impl`` on the stack, even if Dynamo has rewritten it.
    Other methods of ``nn.Module`` (``apply``, ``__repr__``, ``state_dict``) do not count as calls.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _MODULE_FILE and "_call_impl" in frame.f_code.co_name:
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.nn.Module) and owner in modules:
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_running(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this thread is inside a method of ``optimizer``."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


_DYNAMO_FOLDER = str(Path(torch.__file__).parent / "_dynamo")


def called_by_guards() -> bool:
    """Whether the property that calls this function is read by Dynamo's guards instead of a module's code.

    ``hasattr(self, "weight")`` in a forward creates such a guard.
    """
    reader = sys._getframe(2).f_code.co_filename
    return reader == _MODULE_FILE or reader.startswith(_DYNAMO_FOLDER)


def graph_break(message: str) -> Exception:
    """Return an exception that makes Dynamo leave the current code to Python; with ``fullgraph``, it is an error."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(message, "mfsdp_compile: a sharded parameter")


def dynamo_traces() -> bool:
    """Whether this thread is compiling."""
    return TracingContext.try_get() is not None


def python_only(function: Any) -> Any:
    """Decorate ``function`` so that Dynamo does not compile it or its callees when eager code calls it.

    This is for calls between two graphs. Compiled code may still inline the function.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _run_as_is)
    return function


def is_dynamo_disabled(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` was applied to a function."""
    return bool(getattr(function, "_torchdynamo_disable", False))


# -- torch.distributed ------------------------------------------------------------------------------------------------


def shard_write_item(name: str, chunk: ChunkStorageMetadata, local: Tensor, shape: torch.Size) -> WriteItem:
    """Return the item that torch.distributed.checkpoint writes for this rank's part of a tensor."""
    data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=shape)
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


# Files of torch.distributed.checkpoint: ``StorageInfo(path, offset, length)`` is the location of an entry. It is
# pickled into ``.metadata``, where torch's own reader finds it.


def storage_info(path: str, offset: int, length: int, transforms: Sequence[str] | None) -> StorageInfo:
    """Return the location of a checkpoint's entry: ``length`` bytes at ``offset`` of the file ``path``."""
    return StorageInfo(path, offset, length, transforms)


def default_store() -> dist.Store:
    """Return the key-value store of the default process group."""
    return _get_default_store()


# -- Dynamo -----------------------------------------------------------------------------------------------------------


def graph_argument(placeholder: fx.Node) -> Any:
    """Return the real object that a placeholder of a Dynamo graph stands for; None for symbolic sizes."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def _storage_of(value: Tensor) -> int:
    """Return a number that identifies a storage; 0 for a value without one, inside a transform of ``torch.func``."""
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return 0


def written(gm: fx.GraphModule, marks: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Find the nodes in a Dynamo graph and its regions that ``marks`` selects and whose value is written to.

    This includes in-place writes, and writes through a view or through ``.data``.
    """
    found: list[fx.Node] = []
    values = {node: node.meta.get("example_value") for node in gm.graph.nodes}
    storages: dict[int, fx.Node] = {}
    for node, value in values.items():
        if isinstance(value, Tensor) and marks(node):
            storages[_storage_of(value)] = node
    changed = [value for value in values.values() if isinstance(value, Tensor) and value._version]
    for node in gm.graph.nodes if storages else ():
        # Operators on lists do not increment the versions of fake tensors.
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith("_foreach_") and name.endswith("_") and node.args:
            changed += [values[each] for each in node.args[0] if isinstance(values.get(each), Tensor)]
    for value in changed:
        if (node := storages.get(_storage_of(value))) is not None and node not in found:
            found.append(node)
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            found += written(child, marks)
    return found


def requires_grad(placeholder: fx.Node) -> bool:
    """Whether a placeholder of a Dynamo graph requires a gradient. True if it stands for no real tensor."""
    argument = graph_argument(placeholder)
    return argument is None or bool(argument.requires_grad)


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph module for passes to rewrite: Dynamo keeps reading its own graph after the backend has returned.

    Submodules that hold graphs (bodies of checkpoint regions and of control flow) are copied too.
    """
    mapping: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, mapping)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    graph.output(output).meta = dict(gm.graph.output_node().meta)
    copied = fx.GraphModule(gm, graph)
    copied.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source  # type: ignore[assignment]
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph_module(child))
    return copied


def add_parameter_placeholder(graph: fx.Graph, name: str, like: fx.Node | None) -> fx.Node:
    """Add a placeholder that AOTAutograd treats as a parameter: static address, no guards.

    Args:
        like: Placeholder whose source the new one takes over. AOTAutograd and Inductor look up sources for messages.
            None if the placeholder stands for nothing in the user's program.
    """
    node = graph.placeholder(name)
    if like is None:
        node._dynamo_source = None  # type: ignore[attr-defined]
    elif hasattr(like, "_dynamo_source"):
        node._dynamo_source = like._dynamo_source  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


def concrete(size: Any) -> int:
    """Return a size as a number; for a symbolic size, the number it had when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, because the model is only planned and not run."""
    return isinstance(tensor, FakeTensor)


def on_values(function: _F) -> _F:
    """Decorate ``function`` so that its tensors have values (such as ranks) even while a model is only planned."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and devices, but no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def inductor_joint_passes(joint: fx.GraphModule) -> fx.GraphModule:
    """Run Inductor's passes over a joint graph before it is partitioned: constant folding, pattern replacement."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")])
    with V.set_fake_mode(mode):  # passes that replace random number operators need it
        return joint_graph_passes(joint)


def backend_failed() -> type[Exception]:
    """Return the class that Dynamo raises if a backend fails; :func:`inner_exception` returns the original error."""
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def inner_exception(failed: Exception) -> Exception:
    """Return what a backend raised, from the exception that Dynamo raised for it."""
    return failed.inner_exception  # type: ignore[attr-defined]


def not_traceable() -> type[Exception]:
    """Return a base class of the exceptions that Dynamo raises if ``fullgraph=True`` is not possible."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def where_not_traceable(error: Exception) -> Sequence[traceback.FrameSummary]:
    """Return the calls that led to the line at which Dynamo gave up; empty if unknown."""
    return getattr(error, "real_stack", None) or ()


def trace_with_aot(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decomposed: bool,
) -> Callable[..., Any]:
    """Run AOTAutograd for graphs that are inspected and not compiled. The result can be called.

    Args:
        gm: Graph module from Dynamo.
        inputs: Example inputs of the graph.
        partition: Function that partitions the joint graph.
        decomposed: Whether to apply Inductor's decompositions.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import lowering  # noqa: F401 -- the decomposition of max_pool2d uses it without importing it
    from torch._inductor.decomposition import select_decomp_table

    decompositions = select_decomp_table() if decomposed else None
    trace = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, decompositions=decompositions
    )
    return trace(gm, list(inputs))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context that silences torch's warnings through ``logging``, which would be repeated for code that never runs."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def flop_formula(operator: torch._ops.OpOverload) -> Callable[..., int] | None:
    """Return the function that counts an operator's floating-point operations; None if torch registers none.

    It is called as ``formula(*args, **kwargs, out_val=result)``, with tensors.
    """
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(operator.overloadpacket)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of a backward graph is the gradient of an output of the forward."""
    return "tangents" in str(node.target)  # the same test as in torch's partitioner


def is_backward_node(node: fx.Node) -> bool:
    """Whether a node of a joint or backward graph was created by autograd's backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


# -- AOTAutograd and Inductor -----------------------------------------------------------------------------------------

_ORDER_KEEPING: dict[str, Any] = {
    # Would move every all-gather next to its wait to save memory. The order of the FX graph is the schedule.
    "reorder_for_peak_memory": False,
    # Would hoist all gathers of an inference graph to its top, which puts the whole model in memory at once.
    "reorder_for_locality": False,
    "reorder_for_locality_in_training": False,
    "reorder_for_compute_comm_overlap": False,
    # On by default in torch 2.15; reorders around collectives, differently on different ranks (pytorch#189454).
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
}


def is_miscompiled(module: torch.nn.Module, device_type: str) -> bool:
    """Whether this version's Inductor is known to compute wrong gradients for a model, with or without this package.

    This affects router gradients of transformers' GPT-OSS on the CPU, if the auxiliary loss is among the outputs. In
    tests, gradients were correct with torch 2.11 and 2.15 and wrong with 2.13.
    """
    is_named_so = any(kind.__name__.startswith("GptOss") for kind in type(module).__mro__)
    return is_named_so and device_type == "cpu" and (2, 12) <= TORCH_VERSION < (2, 15)


def inductor_config_patches() -> dict[str, Any]:
    """Return the settings that keep Inductor from reordering collectives, without those that this torch lacks."""
    unknown = unknown_inductor_options(_ORDER_KEEPING)
    settings = {name: value for name, value in _ORDER_KEEPING.items() if name not in unknown}
    return settings | {
        "_pre_fusion_custom_pass": _scheduler_pass(_chain_collectives),
        "_post_fusion_custom_pass": _scheduler_pass(_in_order),
    }


@functools.cache
def _scheduler_pass(run: Callable[[list[Any]], list[Any]]) -> Any:
    """Wrap a function for Inductor's config. It takes and returns the scheduler's nodes, in executable order."""
    from torch._inductor import custom_graph_pass

    # Torch 2.11 has no separate class for these passes.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class Pass(base):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return run(nodes)

        def uuid(self) -> str:
            return f"mfsdp_compile {run.__name__} 4"  # change the number when the pass changes

        def __reduce__(self) -> Any:
            return _uuid, (self.uuid(),)

    return Pass()


def _chain_collectives(nodes: list[Any]) -> list[Any]:
    """Before fusion, make starts, waits and nodes without dependencies depend on the previous start or wait.

    Inductor itself keeps only starts in order. Its fusion joins kernels of different layers, for example for an
    auxiliary loss that reads a value of each layer. Everything that either kernel needs is then computed first,
    including waits: gathers would start right before they are awaited, and all reductions would be awaited at the end.
    Fusion can also join a kernel from the beginning with one from the end that needs a constant from there. All other
    nodes without dependencies, such as the padding in gradient buckets, would then run before it. With the added
    dependencies, a fusion that would reorder collectives forms a cycle, which Inductor rejects.
    """
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective, contains_wait

    def follow(node: Any, other: Any) -> None:
        for buffer in other.get_buffer_names():
            node.add_fake_dep(WeakDep(buffer, mutating_buf=next(iter(node.get_buffer_names())), is_fake=True))

    before: Any = None
    computes = {buffer: node for node in nodes for buffer in node.get_buffer_names()}
    for node in nodes:
        is_link = contains_collective(node) or contains_wait(node)
        if before is not None and (is_link or not node.unmet_dependencies):
            follow(node, before)
        if is_link:
            before = node
        for dep in node.unmet_dependencies:
            if (source := computes.get(dep.name)) is not None:
                node.ancestors |= source.get_operation_names() | source.ancestors
    return nodes


def _in_order(nodes: list[Any]) -> list[Any]:
    """After fusion, run kernels in the order of the graph, and fused kernels as soon as they can run.

    Operators without tensors (``mfsdp::begin``) come first. Inductor emits the code of pending CPU kernels after such
    an operator, but at the operator it already frees buffers that only those kernels read.

    Inductor's own order is depth first. A fused kernel that begins early but needs a value computed late would run
    after everything that the value needs. A result that nothing waits for, such as gradients summed over layers, would
    be computed last, and would keep the gathered weights that it reads alive until then.
    """
    computes = {buffer: i for i, node in enumerate(nodes) for buffer in node.get_buffer_names()}
    needs = [{computes[dep.name] for dep in node.unmet_dependencies if dep.name in computes} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, sources in enumerate(needs):
        sources.discard(i)
        for source in sources:
            readers[source].append(i)
    place = [-1 if node.is_extern() and node.get_device() is None else node.min_order for node in nodes]
    ready = [(place[i], i) for i, sources in enumerate(needs) if not sources]
    heapq.heapify(ready)
    found = []
    while ready:
        _, i = heapq.heappop(ready)
        found.append(nodes[i])
        for reader in readers[i]:
            needs[reader].discard(i)
            if not needs[reader]:
                heapq.heappush(ready, (place[reader], reader))
    assert len(found) == len(nodes), "the scheduler's nodes depend on one another in a circle"
    return found


def unknown_inductor_options(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are not settings of ``torch._inductor.config``."""
    import torch._inductor.config as config

    def exists(name: str) -> bool:
        owner: Any = config
        for part in name.split("."):
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True

    return [name for name in names if not exists(name)]


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Run AOTAutograd and Inductor. ``patches`` also apply to the backward, which is compiled later."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]


def compile_with_aot_eager(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    finish: Callable[[fx.GraphModule], None],
) -> Callable[..., Any]:
    """Run AOTAutograd; the resulting graphs run op by op. ``finish`` rewrites forward, backward and inference graphs.

    The graphs take their arguments out of a list, so that tensors saved for backward are freed after their last use.
    """
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        finish(graph_module)
        graph_module.graph.set_codegen(_BoxedCodeGen())
        graph_module.recompile()
        forward = graph_module.forward

        def run(arguments: list[Any]) -> Any:
            return forward(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(gm, list(inputs))


def min_cut_partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    from functorch.compile import min_cut_rematerialization_partition

    return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)


def tracing_fake_mode() -> Any:
    """Return the fake mode of the current compilation."""
    return TracingContext.get().fake_mode


def graph_pass(run: Callable[[fx.Graph], None], uuid: Callable[[], str | None]) -> Any:
    """Create a pass over an FX graph for Inductor's config.

    Args:
        run: The pass.
        uuid: Function that returns the identifier for cache keys; None: no caching. It is called whenever a key is
            made: for AOTAutograd's cache before tracing, for Inductor's own cache before a partitioned graph is
                compiled.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            run(graph)

        def uuid(self) -> str | None:
            return uuid()

        def __reduce__(self) -> Any:
            return _uuid, (uuid(),)

    return Pass()


def partitioner(run: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], uuid: Callable[[], str | None]) -> Any:
    """Create a partitioner for Inductor's config, with a ``uuid`` for its cache keys as in :func:`graph_pass`."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            return run(gm, joint_inputs, **kwargs)

        def uuid(self) -> str | None:
            return uuid()

        def __reduce__(self) -> Any:
            return _uuid, (uuid(),)

    return Partitioner()


def _uuid(uuid: str | None) -> str | None:
    """Stand in for a pass in pickles.

    Cache keys pickle Inductor's config, including passes, which are identified by their uuid.
    """
    return uuid


def graph_break_reasons() -> Sequence[Any]:
    """Return all graph breaks since the last reset, each with ``reason``, ``user_stack`` and ``graph_break``."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def compilation_metrics() -> Sequence[Any]:
    """Return metrics of every frame that Dynamo has compiled.

    Each has ``co_name``, ``co_filename``, ``co_firstlineno`` and ``recompile_reason``.
    """
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def register_lowering(operator: Any, lower: Callable[..., Any]) -> None:
    """Make Inductor turn ``operator`` into its IR with ``lower``, which takes and returns IR nodes."""
    from torch._inductor.lowering import register_lowering as register

    register(operator, type_promotion_kind=None)(lower)


def inductor_collective(operator: Any, *args: Any) -> Any:
    """Lower ``operator`` like Inductor's own out-of-place collectives, which keep buffers alive until the wait."""
    from torch._inductor import ir

    return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(operator, *args))


class InductorBucket:
    """A flat buffer in Inductor's IR whose parts are computed in place.

    It works like ``ConcatKernel``, Inductor's implementation of ``torch.cat``, with two differences: parts have given
    offsets, and a matmul is written directly into its slice even through a view (``t()``, ``reshape``).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int) -> None:
        from torch._inductor import ir

        self._ir = ir
        self._device, self._dtype = device, dtype
        layout = ir.FixedLayout(device=device, dtype=dtype, size=[numel], stride=[1])
        self._kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
        self._storage = ir.StorageBox(self._kernel)
        self._operations: list[str] = []

    @staticmethod
    def numel(part: Any) -> int:
        numel = 1
        for size in part.get_size():
            numel *= int(size)
        return numel

    def store(self, part: Any, offset: int) -> None:
        """Compute ``part`` at ``[offset, offset + numel)``."""
        ir = self._ir
        if part.get_dtype() != self._dtype:
            from torch._inductor.lowering import to_dtype

            part = to_dtype(part, self._dtype)
        size = list(part.get_size())
        slice_layout = ir.FixedLayout(
            device=self._device,
            dtype=self._dtype,
            size=size,
            stride=ir.FlexibleLayout.contiguous_strides(size),
            offset=offset,
        )
        buffer = ir.ConcatKernel.realize_into(part, ir.ReinterpretView(data=self._storage, layout=slice_layout))
        self._kernel.inputs.append(buffer)
        data = part.data if isinstance(part, ir.TensorBox) else part
        if isinstance(data, ir.BaseView):
            data = data.unwrap_view()
        if (
            isinstance(data, ir.StorageBox)
            and data.is_input_buffer()  # otherwise a matmul or a reduction, which a foreach kernel cannot contain
            and ir.is_gpu(self._device.type)
            and not ir.is_dynamic(buffer)
        ):
            self._operations.append(buffer.get_operation_name())

    def fill(self, value: float, start: int, stop: int) -> None:
        """Write a constant to ``[start, stop)``."""
        if start >= stop:
            return
        ir, dtype = self._ir, self._dtype
        self.store(
            ir.Pointwise.create(
                device=self._device,
                dtype=dtype,
                inner_fn=lambda index: ir.ops.constant(value, dtype),
                ranges=[stop - start],
            ),
            start,
        )

    def finish(self) -> Any:
        """Return the buffer in the form that a lowering returns."""
        from torch._inductor.virtualized import V

        self._kernel.name = V.graph.register_buffer(self._kernel)
        self._kernel.inputs = self._ir.ConcatKernel.unwrap_storage(self._kernel.inputs)
        V.graph.register_operation(self._kernel)
        if len(self._operations) > 1:
            V.graph.register_operation_list(self._operations)
        return self._ir.TensorBox(self._storage)


# -- placements -------------------------------------------------------------------------------------------------------


class RowShard(Shard):
    """A placement that equals ``Shard(0)`` but splits rows differently from ``torch.chunk``.

    Code that asks the placement for sizes and offsets gets the right rows, for example the helpers of
    ``torch.distributed.checkpoint.state_dict`` for a state dict that rank 0 broadcasts.

    Args:
        rows: Rows that this rank holds. With two sharded mesh dimensions, the last dimension has the rows and the first
            has :data:`EVERY_ROW`. None: all rows.
    """

    def __init__(self, rows: range | None) -> None:
        super().__init__(0)
        self.rows = rows

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        if self.rows is None:
            return curr_local_size, 0
        return len(self.rows), self.rows.start


EVERY_ROW = RowShard(None)


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of an ordinary DTensor, and the offsets at which it begins."""
    with _disable_current_modes():  # the computation uses tensors
        local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(local), tuple(offset)


def dtensor_of(local: Tensor, spec: DTensorSpec) -> Tensor:
    """Create a DTensor without history. ``DTensor.from_local`` would run checks and record an autograd operation."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def renew_mesh(mesh: DeviceMesh) -> None:
    """Replace a mesh's process groups by new groups of the same ranks. Every rank of each group must call this.

    If the mesh is a slice of another mesh, other slices of that mesh keep the old groups.
    """
    for dim in range(mesh.ndim):
        mesh._dim_group_names[dim] = new_group_like(mesh.get_group(dim).group_name).group_name


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Concatenate the dimensions of two slices of one mesh.

    Raises:
        RuntimeError: The arguments are not slices of one mesh.
    """
    with _disable_current_modes():  # the computation uses tensors
        mesh: DeviceMesh = DeviceMesh._concatenate([first, second])
    return mesh


# -- checkpoints ------------------------------------------------------------------------------------------------------


def keep_from_state_dict_helpers(owner: Any, *methods: Callable[..., Any]) -> None:
    """Make ``torch.distributed.checkpoint.state_dict`` call the class of ``owner`` instead of its replaced ``methods``.

    Torch's own ``_patch_optimizer_state_dict`` works the same way. The methods must not hold a reference to ``owner``,
    because they are unregistered when it is garbage collected.
    """
    _patched_state_dict.update(methods)
    weakref.finalize(owner, _patched_state_dict.difference_update, methods)
