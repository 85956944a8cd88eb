"""Every private torch symbol that mfsdp-compile touches, in one place.

Supported: torch 2.11 to 2.15. What is imported here at the top is tested for when the package is imported: a torch
that lacks one of these symbols fails there, by name, and not in the middle of a training step. What belongs to the
compiler is imported inside the functions that use it, because importing Inductor takes seconds that eager users need
not pay. Each function has a test in ``tests/test_compat.py``. Nothing in torch is monkeypatched.
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
"""Where torch's own source lies."""

DTENSOR_SUBCLASSES_DISPATCH = TORCH_VERSION >= (2, 13)
"""Whether a DTensor subclass's own ``__torch_dispatch__`` is called. Older torch sends it to DTensor's."""

PIPELINES_HOLD_MESSAGES = importlib.util.find_spec("torch.distributed.pipelining._recv_buffers") is None
"""Whether a stage of torch's pipelines has a buffer for each message of a step, and keeps what it has sent until the backward.
Newer torch (2.15) receives into memory that is there for one message, and lets go of outputs when they are sent; gradients of
inputs stay to the end of the step."""

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
    """Whether this thread is inside ``backward()``: true in hooks, and while activation checkpointing recomputes."""
    return _current_graph_task_id() != -1


def backward_id() -> int:
    """A number that is the same throughout one backward pass, and -1 outside of any."""
    return _current_graph_task_id()


class Wanted(Enum):
    """What a running backward does with the gradient of a leaf."""

    NOT = "nothing"
    ADDED = "adds it to .grad"
    RETURNED = "returns it"  # torch.autograd.grad


def wanted(leaf: Any) -> Wanted:
    """In backward: what it does with the gradient of a leaf, given by its node. ``torch.autograd.grad`` and
    ``backward(inputs=...)`` are asked for some gradients only."""
    try:
        return Wanted.ADDED if _will_engine_execute_node(leaf) else Wanted.NOT
    except RuntimeError:  # what torch says of a leaf whose gradient torch.autograd.grad returns
        return Wanted.RETURNED


def counts_tensors(hook: Callable[..., Any]) -> bool:
    """Whether a tensor hook is one that ``torch.autograd.graph.register_multi_grad_hook`` has made."""
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook")


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost running backward has finished. Not run if it raises."""
    _execution_engine.queue_callback(callback)


def saved_tensor_hooks_active() -> bool:
    """Whether somebody (checkpointing, offloading) has default hooks on saved tensors on this thread."""
    return _top_saved_tensors_default_hooks(False) is not None


def saved_tensor_hooks_allowed() -> bool:
    """Whether default hooks on saved tensors can be installed: not inside ``torch.func.grad`` and its like."""
    return _saved_tensors_hooks_is_enabled()


def refuses_saved_tensor_hooks(error: BaseException) -> bool:
    """Whether a transform of ``torch.func`` has raised this because there are default hooks on saved tensors."""
    return "torch.func" in str(error) and "saved tensor hooks" in str(error)


def below_function_transforms() -> contextlib.AbstractContextManager[Any]:
    """Inside, operators are not seen by the transforms of ``torch.func`` that are under way: to them, what is computed is a
    constant."""
    if _peek_functorch_interpreter() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype are equal, NaN to NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


@contextlib.contextmanager
def without_hook(pack: Callable[..., Any]) -> Iterator[None]:
    """Take default hooks on saved tensors off this thread for a moment, as long as the topmost is ``pack``'s."""
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
    """Of the tensors that a group, or the default one, communicates; GPUs first. It may have a backend for each
    (``init_process_group()`` makes such a group where there are GPUs). Gloo also takes some collectives of CUDA tensors, not
    those that are needed here: where nothing but gloo is there for them, they do not count."""
    group = group or _get_default_group()
    types = {device.type for device in group._device_types}
    if "cuda" in types and (not torch.cuda.is_available() or "gloo" in group._get_backend(torch.device("cuda")).name()):
        types -= {"cuda"}
    return sorted(types & {"cpu", "cuda"}, reverse=True)


def device_type(group: dist.ProcessGroup | None = None, preferred: str | None = None) -> str:
    """Of the tensors to communicate with a group, or the default one: ``preferred`` if it can, else CUDA if it can."""
    types = device_types(group)
    return preferred if preferred in types else next(iter(types), "cpu")


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """After which a collective of the group fails, whatever backend runs it."""
    timeouts = []
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):  # a backend without options
            timeouts.append(group._get_backend(device).options._timeout)
    return max(timeouts, default=dist.default_pg_timeout)


def process_group(name: str) -> dist.ProcessGroup:
    """By the name that functional collectives take."""
    return _resolve_process_group(name)


def known_groups() -> dict[str, list[int]]:
    """Ranks of every process group that this rank is in, by name."""
    groups = [group for group in _world.pg_map if dist.get_rank(group) >= 0]
    return {group.group_name: dist.get_process_group_ranks(group) for group in groups}


def collectives_started(group: dist.ProcessGroup) -> int:
    """On a process group, by this rank, since it was made; 0 for backends that do not count."""
    try:
        return group._get_sequence_number_for_group()
    except RuntimeError:  # it has several backends, or one that does not count
        pass
    counts: dict[Any, int] = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            counts[backend] = backend._get_sequence_number_for_group()
    return sum(counts.values())


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks of a process group do not exist."""
    return {backend.rpartition(":")[2] for backend in dist.get_backend(group).split(",")} == {"fake"}


def is_real_group(name: str) -> bool:
    """Whether the ranks of a process group exist."""
    return not is_simulated(_resolve_process_group(name))


@contextlib.contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """This process as the first of ``ranks`` that do not exist; collectives return at once, with undefined content."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_group_like(name: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A process group of the same backend and time-out. Its ranks must all call this, others need not.

    Args:
        name: of the group that it is to be like.
        ranks: of the job, this one among them; None: those of that group.
    """
    old = _resolve_process_group(name)
    ranks = ranks if ranks is not None else dist.get_process_group_ranks(old)
    return new_group(ranks, timeout=timeout_of(old), backend=dist.get_backend(old))


def new_group(
    ranks: Sequence[int], *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """A process group of these ranks, which must all call this; others need not.

    Torch names such a group by the number of groups that a rank has made, and ranks find each other by that name: those that
    have made different numbers, as ranks of different pipeline stages have, would wait for each other until they time out.
    This one is named by the number of groups that were made here of the same ranks.
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
"""Seconds in which the process that has a store answers."""


def another_connection(store: dist.Store) -> dist.Store:
    """A connection of one's own to the same store: a thread that waits in a store locks it for others.

    Raises:
        OSError: nobody listens there any more. torch would try for five minutes.
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
    """The address of this machine that processes reach which reach the store; None: it is not reached over a network."""
    if (server := _tcp_store(store)) is None:
        return None
    family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def serve_store(host: str, patience: timedelta) -> dist.TCPStore:
    """A store that this process keeps, at a port that is free."""
    return dist.TCPStore(host_name=host, port=0, is_master=True, wait_for_workers=False, timeout=patience)


def connect_to_store(host: str, port: int, patience: timedelta) -> dist.TCPStore:
    """One that another process keeps.

    Raises:
        OSError: nobody listens there any more. torch would try for five minutes.
    """
    socket.create_connection((host, port), timeout=CONNECT_TIMEOUT).close()
    return dist.TCPStore(host_name=host, port=port, is_master=False, wait_for_workers=False, timeout=patience)


def break_connections(group: dist.ProcessGroup) -> None:
    """Have everything that waits for other ranks in this process group fail, here and there, at once. It cannot be used any more.

    Gloo cannot abort what it waits for (its ``abort()`` does nothing), but notices when a connection is closed. Which of the
    process's connections are the group's is known from where its ranks told each other to connect to: in its store.
    """
    store = _world.pg_map[group][1]
    for device in group._device_types:
        backend = group._get_backend(device)
        if backend.name() == "gloo":
            _close_connections(another_connection(store), f"{device.type}/", dist.get_rank(group), group.size())
        else:
            backend.abort()


def _close_connections(store: dist.Store, prefix: str, rank: int, size: int) -> None:
    listening: list[bytes] = []  # what each rank has told, of which the addresses that it listens at are a part
    number = 0
    while store.check([f"{prefix}/{number}/{rank}"]):
        listening += [store.get(f"{prefix}/{number}/{other}") for other in range(size)]
        number += 1
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                _shut_down(os.dup(int(name)), listening)


def _shut_down(descriptor: int, listening: Sequence[bytes]) -> None:
    """The connection, if one of its ends is among what ranks have told."""
    with socket.socket(fileno=descriptor) as connection:
        for end in (connection.getsockname(), connection.getpeername()):
            address = _as_gloo_tells(connection.family, end)
            if address is not None and any(address in told for told in listening):
                connection.shutdown(socket.SHUT_RDWR)
                return


def _as_gloo_tells(family: int, address: Any) -> bytes | None:
    """The beginning of the system's structure for an address."""
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + socket.inet_pton(family, address[0])
    if family == socket.AF_INET6:
        flow = struct.pack("!I", address[2])
        return struct.pack("=H", family) + struct.pack("!H", address[1]) + flow + socket.inet_pton(family, address[0])
    return None


def is_generated(file: str) -> bool:
    """Whether it is code that Inductor has written."""
    cache = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    return cache is not None and file.startswith(cache.cache_dir())


def waits_in(frame: FrameType | None) -> str | None:
    """Name of the process group of the collective of ``torch.distributed`` that a thread is in, from its innermost frame; None:
    it is in none."""
    while frame is not None and frame.f_code.co_filename.startswith(TORCH_FOLDER):
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "group" in frame.f_locals:
            group = frame.f_locals["group"] or _get_default_group()
            return group.group_name if isinstance(group, dist.ProcessGroup) else None
        frame = frame.f_back
    return None


def stand_around_collectives(
    names: Iterable[str], around: Callable[[str], contextlib.AbstractContextManager[Any]]
) -> torch.library.Library:
    """Have every start of a functional collective of these names run inside ``around(name)``, compiled or not: at a dispatch
    key that every call passes. Until ``_destroy()`` is called on what is returned."""
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
    """Torch's own way for this operator ends in an operation that gloo calls ``ALLGATHER_COALESCED``. When one is over, the
    two threads of a gloo process group write that name to one string, with no lock between them; it is too long for the
    string's own memory, so two that end at a time free the same block twice, and some allocation later the process dies
    ("malloc(): unaligned tcache chunk detected", a segmentation fault). Torch 2.11 to 2.15: a loop of functional gathers,
    eight in flight, dies within seconds. Given the memory for the result, the operation is called ``ALLGATHER``.
    """
    full = shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]))
    return all_gather_out.redispatch(_ON_CPU, shard, group_size, group_name, out=full)


def all_reduce_on_host(tensor: Tensor, op: str, group: str) -> Tensor:
    """The all-reduce of a tensor that is on the CPU, without waiting for the device where the group has a backend for the
    CPU."""
    devices = {device.type for device in _resolve_process_group(group)._device_types}
    if "cpu" not in devices and devices:
        tensor = tensor.to(next(iter(devices)))
    return wait_tensor(all_reduce(tensor, op, group)).cpu()


def on_failed_waits(explain: Callable[[RuntimeError], None]) -> None:
    """When a wait for a collective on the CPU has failed, in compiled code or outside of it, call ``explain`` with torch's error. It
    may raise another one in its place. Once per process."""

    @torch.library.impl(_gloo, "wait_tensor", "CPU")
    def wait(tensor: Tensor) -> Tensor:
        try:
            return wait_tensor.redispatch(_WAITS_ON_CPU, tensor)
        except RuntimeError as error:
            explain(error)
            raise


def all_to_all_autograd(tensor: Tensor, incoming: Sequence[int], outgoing: Sequence[int], group: str) -> Tensor:
    """Rows of ``tensor`` for each rank of a group, and those that come from each; its backward takes the way back.

    Args:
        tensor: ``[sum(outgoing), ...]``.
        incoming, outgoing: rows from, and for, each rank. While Dynamo traces they may be sizes that are known only at run
            time.
        group: name of the process group.

    Returns:
        ``[sum(incoming), ...]``.
    """
    received = all_to_all_single_autograd(tensor, list(incoming), list(outgoing), group)
    return wait_tensor(received)


with _disable_current_modes():
    pass  # imports what it needs when it is first used: now, and not in a finalizer, which may run in the middle of an import


def wait_tensor_when_dropped(tensor: Tensor) -> None:
    """``wait_tensor`` for finalizers, which may run in the middle of a trace."""
    with _disable_current_modes(), torch.no_grad():
        wait_tensor(tensor)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Operators inside are seen by no dispatch mode, and functions by no function mode."""
    with _disable_current_modes(), DisableTorchFunction():
        yield


def outside_selective_checkpoint() -> contextlib.AbstractContextManager[None]:
    """Inside, operators are not seen by selective activation checkpointing, which counts them, saves the results of some, and
    takes these for those of as many operators when it computes again."""
    if _len_torch_dispatch_stack() and any(
        isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode))
        for mode in _get_current_dispatch_mode_stack()
    ):
        outside: contextlib.AbstractContextManager[None] = _disable_current_modes()
        return outside
    return contextlib.nullcontext()


def storage_address(tensor: Tensor) -> int | None:
    """Where the storage of a tensor begins in memory; None for one that has none, or wraps others.

    Computed, and not asked of ``untyped_storage()``, which makes a Python object for every storage that is looked at.
    """
    try:
        return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


_MODULE_FILE = torch.nn.Module._call_impl.__code__.co_filename


def in_call_of(modules: Collection[torch.nn.Module]) -> bool:
    """Whether this thread is inside the call of one of ``modules``.

    For code that runs eagerly in the middle of compiled code, whose forwards were traced and do not run. A call of a
    module leaves a frame of ``nn.Module._call_impl`` on the stack, also when Dynamo has rewritten it. Other methods of
    ``nn.Module`` (``apply``, ``__repr__``, ``state_dict``) are no calls.
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
    """Whether the property that calls this is being read by Dynamo's guards (``hasattr(self, "weight")`` in a forward
    makes one), and not by the code of a module."""
    reader = sys._getframe(2).f_code.co_filename
    return reader == _MODULE_FILE or reader.startswith(_DYNAMO_FOLDER)


def graph_break(message: str) -> Exception:
    """What to raise for Dynamo to leave the code at hand to Python; an error with ``message`` under fullgraph."""
    from torch._dynamo.exc import Unsupported

    return Unsupported(message, "mfsdp_compile: a sharded parameter")


def dynamo_traces() -> bool:
    """Whether this thread is in the middle of a compilation."""
    return TracingContext.try_get() is not None


def python_only(function: Any) -> Any:
    """Keep Dynamo from compiling ``function``, and what it calls, when eager code calls it between two graphs. It may
    still be inlined in code that is compiled. A decorator."""
    _eval_frame.set_code_exec_strategy(function.__code__, _run_as_is)
    return function


def is_dynamo_disabled(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` was applied to a function."""
    return bool(getattr(function, "_torchdynamo_disable", False))


# -- torch.distributed ------------------------------------------------------------------------------------------------


def shard_write_item(name: str, chunk: ChunkStorageMetadata, local: Tensor, shape: torch.Size) -> WriteItem:
    """What torch.distributed.checkpoint writes for this rank's part of a tensor."""
    data = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(local), size=shape)
    return WriteItem(index=MetadataIndex(name, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)


# Files of torch.distributed.checkpoint: ``StorageInfo(path, offset, length)`` says where an entry lies. It is pickled into
# ``.metadata``, which is how torch's own reader finds it.


def storage_info(path: str, offset: int, length: int, transforms: Sequence[str] | None) -> StorageInfo:
    """Where an entry of a checkpoint lies: ``length`` bytes at ``offset`` of the file ``path`` in its directory."""
    return StorageInfo(path, offset, length, transforms)


def default_store() -> dist.Store:
    """The key-value store that the default process group met through."""
    return _get_default_store()


# -- Dynamo -----------------------------------------------------------------------------------------------------------


def graph_argument(placeholder: fx.Node) -> Any:
    """The real object that a placeholder of a Dynamo graph stands for; None for symbolic sizes."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def _storage_of(value: Tensor) -> int:
    """A number for a storage; 0 for a value that has none, inside a transform of ``torch.func``."""
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return 0


def written(gm: fx.GraphModule, marks: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """The nodes of a Dynamo graph, and of the regions in it, that ``marks`` picks and whose value something writes to: in place,
    through a view, or through ``.data``."""
    found: list[fx.Node] = []
    values = {node: node.meta.get("example_value") for node in gm.graph.nodes}
    storages: dict[int, fx.Node] = {}
    for node, value in values.items():
        if isinstance(value, Tensor) and marks(node):
            storages[_storage_of(value)] = node
    changed = [value for value in values.values() if isinstance(value, Tensor) and value._version]
    for node in gm.graph.nodes if storages else ():
        # Operators on lists do not raise the versions of tensors without values.
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
    """Whether the tensor that a placeholder of a Dynamo graph stands for requires a gradient; one that is made up does."""
    argument = graph_argument(placeholder)
    return argument is None or bool(argument.requires_grad)


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that passes may rewrite: Dynamo keeps reading its own graph after the backend has returned.

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
    """A placeholder that AOTAutograd treats as a parameter: static address, no guards.

    ``like`` is the placeholder whose source it takes over: AOTAutograd and Inductor look sources up in messages. None
    for one that stands for nothing in the user's program.
    """
    node = graph.placeholder(name)
    if like is None:
        node._dynamo_source = None  # type: ignore[attr-defined]
    elif hasattr(like, "_dynamo_source"):
        node._dynamo_source = like._dynamo_source  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


def concrete(size: Any) -> int:
    """A number for a size: itself, or what a symbolic one was when the graph was traced."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if hint is not None else 1


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, because a model is planned and not run."""
    return isinstance(tensor, FakeTensor)


def on_values(function: _F) -> _F:
    """Its tensors have values, also where others have none because a model is planned and not run: they are numbers of ranks."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and devices, and no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def inductor_joint_passes(joint: fx.GraphModule) -> fx.GraphModule:
    """What Inductor does to a joint graph before it is parted: constants folded, patterns replaced."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")])
    with V.set_fake_mode(mode):  # which passes about random numbers ask for
        return joint_graph_passes(joint)


def backend_failed() -> type[Exception]:
    """What Dynamo raises where a backend does; that is its ``inner_exception``."""
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def inner_exception(failed: Exception) -> Exception:
    """What a backend raised, from what Dynamo raised then."""
    return failed.inner_exception  # type: ignore[attr-defined]


def not_traceable() -> type[Exception]:
    """What Dynamo raises under ``fullgraph=True`` where it would have to make several graphs; among else."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def where_not_traceable(error: Exception) -> Sequence[traceback.FrameSummary]:
    """The calls that led to the line at which Dynamo gave up; empty if it does not say."""
    return getattr(error, "real_stack", None) or ()


def trace_with_aot(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decomposed: bool,
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's decompositions, if wanted, for graphs that are looked at and not compiled. What is
    returned can be called."""
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
    """Without torch's warnings through ``logging``, which it repeats for code that nobody runs."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def flop_formula(operator: torch._ops.OpOverload) -> Callable[..., int] | None:
    """What counts the floating-point operations of an operator, ``formula(*args, **kwargs, out_val=result)`` with tensors;
    None if it has none that count."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(operator.overloadpacket)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of a backward graph is the gradient of an output of the forward."""
    return "tangents" in str(node.target)  # as torch's partitioner asks


def is_backward_node(node: fx.Node) -> bool:
    """Whether a node of a joint or backward graph comes from autograd's backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


# -- AOTAutograd and Inductor -----------------------------------------------------------------------------------------

_ORDER_KEEPING: dict[str, Any] = {
    # Would move every all-gather next to its wait to save memory: the order of the FX graph is the schedule.
    "reorder_for_peak_memory": False,
    # Would hoist all gathers of an inference graph to its top: the whole model in memory at once.
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
    """Whether this torch's Inductor is known to compute wrong gradients for a model, with this package and without it: those of
    the routers of transformers' GPT-OSS, on the CPU, where the auxiliary loss is part of the outputs. Tried: 2.11 and 2.15 are right, 2.13 is wrong."""
    is_named_so = any(kind.__name__.startswith("GptOss") for kind in type(module).__mro__)
    return is_named_so and device_type == "cpu" and (2, 12) <= TORCH_VERSION < (2, 15)


def inductor_config_patches() -> dict[str, Any]:
    """The settings that keep Inductor from reordering collectives, as far as this torch has them."""
    unknown = unknown_inductor_options(_ORDER_KEEPING)
    settings = {name: value for name, value in _ORDER_KEEPING.items() if name not in unknown}
    return settings | {
        "_pre_fusion_custom_pass": _scheduler_pass(_chain_collectives),
        "_post_fusion_custom_pass": _scheduler_pass(_in_order),
    }


@functools.cache
def _scheduler_pass(run: Callable[[list[Any]], list[Any]]) -> Any:
    """For Inductor's config: what is done with the nodes of its scheduler, which come in an order that can be run."""
    from torch._inductor import custom_graph_pass

    # Torch 2.11 has no class of its own for these.
    base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class Pass(base):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return run(nodes)

        def uuid(self) -> str:
            return f"mfsdp_compile {run.__name__} 4"  # another one when it changes

        def __reduce__(self) -> Any:
            return _uuid, (self.uuid(),)

    return Pass()


def _chain_collectives(nodes: list[Any]) -> list[Any]:
    """Before fusion: each start and wait depends on the one before, and so does what else depends on nothing.

    Inductor by itself keeps only starts in order. Its fusion joins kernels of different layers (an auxiliary loss reads
    something of each), and what both need is then computed first, waits included: gathers would start right before they are
    awaited, and reductions be awaited all at the end. A kernel of the beginning can also be joined with one of the end that
    needs a constant from there: everything else that depends on nothing (the padding in buckets of gradients, say) would come
    before it. Fusions that would have collectives change places are cycles now, which it refuses.
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
    """After fusion: kernels run where the graph has them, fused ones as soon as they can; operators without tensors (the graph's
    beginning) first, as their code comes before that of kernels for the CPU, which Inductor collects, and frees what only
    those read.

    Inductor goes through them depth first: a fused kernel that begins early and needs what is computed late has all of that
    before it, and what nobody waits for (gradients that are added up over layers, say) comes last, with the gathered weights
    that it reads.
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
    """Which of ``names`` are no settings of ``torch._inductor.config``."""
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
    """AOTAutograd and Inductor. ``patches`` are also in force for the backward, which is compiled later."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]


def compile_with_aot_eager(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    finish: Callable[[fx.GraphModule], None],
) -> Callable[..., Any]:
    """AOTAutograd, after which the graphs run op by op; ``finish`` rewrites forward, backward and inference graphs.

    They take their arguments out of a list, so that what was saved for backward goes when it was last used."""
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
    """The fake mode of the compilation under way."""
    return TracingContext.get().fake_mode


def graph_pass(run: Callable[[fx.Graph], None], uuid: Callable[[], str | None]) -> Any:
    """A pass over an FX graph for Inductor's config, with the ``uuid`` that enters its cache keys; None: no caching.

    It is asked for whenever a key is made: for AOTAutograd's cache before anything is traced, for Inductor's own when a
    graph that was parted is about to be compiled."""
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
    """A partitioner for Inductor's config, with the ``uuid`` that enters its cache keys, as in :func:`graph_pass`."""
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
    """What a pass pickles as. Cache keys pickle Inductor's config, passes included: their identity is their uuid."""
    return uuid


def graph_break_reasons() -> Sequence[Any]:
    """Of all graph breaks since torch.compile was last reset: each has ``reason``, ``user_stack`` and ``graph_break``."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


def compilation_metrics() -> Sequence[Any]:
    """Of every frame that Dynamo has compiled: each has ``co_name``, ``co_filename``, ``co_firstlineno`` and
    ``recompile_reason``."""
    from torch._dynamo.utils import get_compilation_metrics

    return get_compilation_metrics()


def register_lowering(operator: Any, lower: Callable[..., Any]) -> None:
    """Make Inductor turn ``operator`` into its IR with ``lower``, which gets and returns IR nodes."""
    from torch._inductor.lowering import register_lowering as register

    register(operator, type_promotion_kind=None)(lower)


def inductor_collective(operator: Any, *args: Any) -> Any:
    """Lower ``operator`` as Inductor lowers its own out-of-place collectives: buffers are kept until the wait."""
    from torch._inductor import ir

    return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(operator, *args))


class InductorBucket:
    """A flat buffer in Inductor's IR whose parts are computed in place.

    It is the way Inductor makes ``torch.cat``, ``ConcatKernel``, with two differences: parts lie at given offsets, and
    a matmul is written into its slice also when a view (``t()``, ``reshape``) stands between.
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
            and data.is_input_buffer()  # else it is a matmul or a reduction, which no foreach kernel may hold
            and ir.is_gpu(self._device.type)
            and not ir.is_dynamic(buffer)
        ):
            self._operations.append(buffer.get_operation_name())

    def fill(self, value: float, start: int, stop: int) -> None:
        """A constant at ``[start, stop)``."""
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
        """The buffer, as what a lowering returns."""
        from torch._inductor.virtualized import V

        self._kernel.name = V.graph.register_buffer(self._kernel)
        self._kernel.inputs = self._ir.ConcatKernel.unwrap_storage(self._kernel.inputs)
        V.graph.register_operation(self._kernel)
        if len(self._operations) > 1:
            V.graph.register_operation_list(self._operations)
        return self._ir.TensorBox(self._storage)


# -- placements -------------------------------------------------------------------------------------------------------


class RowShard(Shard):
    """``Shard(0)``, equal to it, of rows that are not where ``torch.chunk`` would put them. Whatever asks the placement (as the
    helpers of ``torch.distributed.checkpoint.state_dict`` do for a state dict that rank 0 broadcasts) gets the right ones.

    Args:
        rows: that this rank holds. With two sharded mesh dimensions the last one says; :data:`EVERY_ROW` is for the first.
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
    """Of this rank's part of an ordinary DTensor: its shape, and where it begins."""
    with _disable_current_modes():  # it computes with tensors
        local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(local), tuple(offset)


def dtensor_of(local: Tensor, spec: DTensorSpec) -> Tensor:
    """A DTensor without history. ``DTensor.from_local`` would check, and record for autograd."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def renew_mesh(mesh: DeviceMesh) -> None:
    """Process groups of the same ranks in the place of a mesh's. Every rank of each must. Other slices of the mesh that it
    was taken from keep the old ones."""
    for dim in range(mesh.ndim):
        mesh._dim_group_names[dim] = new_group_like(mesh.get_group(dim).group_name).group_name


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The dimensions of both, which are slices of one mesh.

    Raises:
        RuntimeError: they are not.
    """
    with _disable_current_modes():  # it computes with tensors
        mesh: DeviceMesh = DeviceMesh._concatenate([first, second])
    return mesh


# -- checkpoints ------------------------------------------------------------------------------------------------------


def keep_from_state_dict_helpers(owner: Any, *methods: Callable[..., Any]) -> None:
    """``torch.distributed.checkpoint.state_dict`` asks the owner's class, and not these functions that replace its methods:
    what its own ``_patch_optimizer_state_dict`` does. They must not refer to ``owner``, with which they are forgotten."""
    _patched_state_dict.update(methods)
    weakref.finalize(owner, _patched_state_dict.difference_update, methods)
