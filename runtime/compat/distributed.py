"""Process groups and functional collectives."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import DispatchKey, Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable.replicate import DDP as ReplicatedModule
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.distributed_c10d import (
    _new_process_group_helper,
    _resolve_process_group,
    _world,
)
from torch.utils._python_dispatch import _disable_current_modes

from .frames import frames_of, no_collections
from .version import TORCH_FOLDER, TORCH_VERSION

__all__ = [
    "FSDP2_REDUCES_IN_OWN_DTYPE",
    "PIPELINES_HOLD_MESSAGES",
    "ReplicatedModule",
    "all_gather",
    "all_gather_out",
    "all_reduce",
    "all_to_all",
    "all_to_all_autograd",
    "before_destruction",
    "collectives_started",
    "configured_options",
    "count_again",
    "device_type",
    "device_types",
    "fake_process_group",
    "finishing_first",
    "is_own",
    "is_real_group",
    "is_simulated",
    "known_groups",
    "nccl_options",
    "new_group",
    "new_group_like",
    "process_group",
    "reduce_scatter",
    "refuse_other_sharding",
    "register_fully_sharded",
    "stand_around_collectives",
    "timeout_of",
    "to_backend",
    "wait_tensor",
    "wait_tensor_when_dropped",
    "waits_in",
]

FSDP2_REDUCES_IN_OWN_DTYPE = TORCH_VERSION >= (2, 15)
"""Whether ``reduce_dtype=None`` of FSDP2's policy means the dtype of the shards; before, it was ``param_dtype``."""


all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
all_gather_out = torch.ops._c10d_functional.all_gather_into_tensor_out.default
reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
all_reduce = torch.ops._c10d_functional.all_reduce.default
all_to_all = torch.ops._c10d_functional.all_to_all_single.default
wait_tensor = torch.ops._c10d_functional.wait_tensor.default
PIPELINES_HOLD_MESSAGES = importlib.util.find_spec("torch.distributed.pipelining._recv_buffers") is None
"""Whether a stage of torch's pipelines holds all messages of a step in memory.

Older torch has a buffer for each message, and keeps sent outputs until the backward. Newer torch (2.15) receives into
memory for a single message, and releases outputs once they are sent. Gradients of inputs stay until the end of the
step.
"""


def register_fully_sharded(module: nn.Module) -> None:
    """Let torch's ``replicate`` leave a module out, as one that ``fully_shard`` was called on."""
    refuse_other_sharding(module)
    vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = None  # torch looks for the key


def refuse_other_sharding(module: nn.Module) -> None:
    """Let torch's ``fully_shard`` and ``replicate`` raise an error for a module."""
    vars(module)[STATE_KEY] = _OfSharded(vars(module).get(STATE_KEY, {}))


class _OfSharded(dict[Any, Any]):
    """What torch's composable functions keep in a module. They ask it whether others were applied to the module."""

    def __contains__(self, key: object) -> bool:
        if getattr(key, "__name__", "") in ("fully_shard", "replicate"):
            raise ValueError(
                "torch's fully_shard or replicate got a module that this package has sharded: its parameters would be "
                "divided, and its gradients reduced, twice. Use the sharded model itself; FSDP2's fully_shard for it "
                "is mfsdp_compile.fsdp2.fully_shard."
            )
        return super().__contains__(key)


def device_types(group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the device types that a group, or the default one, communicates tensors of; GPUs first.

    A group may have a backend for each of several device types (``init_process_group()`` creates such a group if there
    are GPUs). Gloo also supports some collectives on CUDA tensors, but not those needed here. CUDA therefore does not
    count if gloo is its only backend.
    """
    group = group or dist.group.WORLD
    assert group is not None
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


def is_own(group: dist.ProcessGroup) -> bool:
    """Whether :func:`new_group` has made a group."""
    return group.group_desc == _OWN


def known_groups() -> dict[str, list[int]]:
    """Return the ranks of every process group that this rank is in, by name."""
    groups = [group for group in _world.pg_map if dist.get_rank(group) >= 0]
    return {group.group_name: dist.get_process_group_ranks(group) for group in groups}


def collectives_started(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has started on a group; 0 if the backend does not count them.

    NCCL counts for a group that also has another backend. Its flight recorder, and gloo's, use the same numbers.
    """
    if group not in _counted_by_backend:
        try:
            return group._get_sequence_number_for_group()
        except RuntimeError:  # the group has several backends, or one that does not count
            _counted_by_backend[group] = _counting_backends(group)
    return sum(backend._get_sequence_number_for_group() for backend in _counted_by_backend[group])


_counted_by_backend: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()
"""The backends that count their collectives, for groups that do not. Asking the others raises, which takes long."""


def count_again(group: dist.ProcessGroup) -> None:
    """Count the collectives of a group from now on by the backends that it has now."""
    _counted_by_backend.pop(group, None)


def _counting_backends(group: dist.ProcessGroup) -> list[Any]:
    found: dict[Any, None] = {}
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device)
            backend._get_sequence_number_for_group()
            found[backend] = None
    return list(found)


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


def new_group_like(name: str, ranks: Sequence[int] | None = None, options: Any = None) -> dist.ProcessGroup:
    """Create a process group with the backend, timeout and NCCL options of another one. A collective of its ranks.

    Args:
        name: Name of the other group.
        ranks: Global ranks, including this one. None: those of the other group.
        options: NCCL options instead of the other group's.
    """
    old = _resolve_process_group(name)
    ranks = ranks if ranks is not None else dist.get_process_group_ranks(old)
    options = options if options is not None else nccl_options(old)
    return new_group(ranks, timeout=timeout_of(old), backend=dist.get_backend(old), options=options)


def nccl_class() -> Any:
    """Return torch's ``ProcessGroupNCCL``; None in builds of torch for the CPU, which do not have it."""
    return getattr(distributed_c10d, "ProcessGroupNCCL", None)


def nccl_options(group: dist.ProcessGroup) -> Any:
    """Return a copy of a group's ``ProcessGroupNCCL.Options`` for another group; None if NCCL does not run it.

    The copy has the priority of the stream, and NCCL's own configuration: thread blocks, copy engines, trees.
    """
    kind = nccl_class()
    for device in group._device_types if kind is not None else ():
        backend: Any = group._get_backend(device)
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(options, kind.Options):
            copied = kind.Options(is_high_priority_stream=options.is_high_priority_stream)
            copied.config = options.config
            return copied
    return None


def configured_options(
    group: dist.ProcessGroup, high_priority: bool | None, config: Mapping[str, int], zero_cta: bool
) -> Any:
    """Return a copy of the options of a group that NCCL runs, with other settings.

    Args:
        high_priority: Whether the stream has high priority. None: as for the group.
        config: Values for ``ProcessGroupNCCL.Options.config``, by name.
        zero_cta: Whether to use copy engines where NCCL can.

    Raises:
        NotImplementedError: This build of torch, or its NCCL, does not have a setting.
    """
    kind, options = nccl_class(), nccl_options(group)
    if high_priority is not None:
        options.is_high_priority_stream = high_priority
    if zero_cta:
        policy = getattr(kind, "NCCL_CTA_POLICY_ZERO", None)
        if policy is None or (version := torch.cuda.nccl.version()) < (2, 28):
            found = "was built with an older one" if policy is None else f"has {'.'.join(map(str, version))}"
            raise NotImplementedError(f"communication: zero_cta needs NCCL 2.28; torch {torch.__version__} {found}.")
        config = {**config, "cta_policy": int(policy)}
    for name, value in config.items():
        if not hasattr(options.config, name):
            raise NotImplementedError(
                f"communication: torch {torch.__version__} has no ProcessGroupNCCL.Options.config.{name}, which needs "
                f"a build with NCCL {_CONFIG_SINCE[name]}."
            )
        setattr(options.config, name, value)
    return options


_CONFIG_SINCE = {
    "min_ctas": "2.17",
    "max_ctas": "2.17",
    "cga_cluster_size": "2.17",
    "collnet_enable": "2.27",
    "cta_policy": "2.27",
    "nvls_ctas": "2.27",
}
"""Version of NCCL that torch must have been built with for a setting."""


def new_group(
    ranks: Sequence[int], *, timeout: timedelta | None = None, backend: str | None = None, options: Any = None
) -> dist.ProcessGroup:
    """Create a process group. All of its ranks must call this; other ranks need not.

    Torch names such a group by the number of groups that a rank has created, and ranks find each other by that name.
    Ranks that have created different numbers of groups, such as ranks of different pipeline stages, would wait for each
    other until they time out. This group is named by the number of groups that were created here with the same ranks.

    Args:
        ranks: Global ranks, including this one.
        timeout: None: that of the backend.
        backend: None: that of the default group.
        options: Options of the backend, such as :func:`nccl_options`.
    """
    ranks, default = tuple(sorted(ranks)), dist.group.WORLD
    assert default is not None
    default_backend, store = _world.pg_map[default]
    backend = dist.Backend(backend or default_backend)
    _groups_made[ranks] += 1
    name = hashlib.sha1(repr((ranks, _groups_made[ranks])).encode(), usedforsecurity=False).hexdigest()
    timeout = timeout or _default_timeout(backend)
    if options is not None:
        options._timeout = timeout  # torch warns if the two differ
    device = default.bound_device_id
    # With a device, torch would split the default group's NCCL communicator, which is a collective of all its ranks.
    default.bound_device_id = None
    try:
        made, _ = _new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            backend,
            store,
            f"mfsdp_{name}",
            backend_options=options,
            timeout=timeout,
            device_id=device,
            group_desc=_OWN,
        )
    finally:
        default.bound_device_id = device
    _world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


@contextlib.contextmanager
def finishing_first(finish: Callable[[], Any]) -> Iterator[None]:
    """Context in which ``destroy_process_group()`` calls ``finish`` before it destroys all groups."""
    last = before_destruction(finish)
    try:
        yield
    finally:
        if not last.is_finalized:  # else torch iterates over the list, and clears it
            _world.comms.remove(last)


def before_destruction(call: Callable[[], Any]) -> _Last:
    """Have ``destroy_process_group()`` call a function before it destroys all groups."""
    last = _Last(call)
    _world.comms.append(last)
    return last


class _Last:
    """What torch takes for a communicator, which it finalizes before it shuts process groups down."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.is_finalized = False
        self._finish = finish

    def finalize(self) -> None:
        self.is_finalized = True
        self._finish()


def _default_timeout(backend: str) -> timedelta:
    of_nccl: timedelta | None = distributed_c10d.default_pg_nccl_timeout  # None in builds for the CPU
    return of_nccl if backend.startswith("nccl") and of_nccl is not None else dist.default_pg_timeout


_OWN = "mfsdp"
_groups_made: Counter[tuple[int, ...]] = Counter()


def waits_in(thread: int) -> str | None:
    """Return the group name of the ``torch.distributed`` collective that a thread is in; None if it is in none."""
    with no_collections():
        for frame in frames_of(thread):
            if not frame.f_code.co_filename.startswith(TORCH_FOLDER):
                break
            if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "group" in frame.f_locals:
                group = frame.f_locals["group"] or dist.group.WORLD
                return group.group_name if isinstance(group, dist.ProcessGroup) else None
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

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel replaces another
        for name in names:
            watch(name)
    return library


def to_backend(tensor: Tensor, group: str) -> Tensor:
    """Return a tensor on a device that the group can communicate: its own one, if the group has a backend for it."""
    devices = {device.type for device in _resolve_process_group(group)._device_types}
    return tensor if tensor.device.type in devices or not devices else tensor.to(next(iter(devices)))


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
