"""A checker of stream order: what the package's code for CUDA leaves to chance, found without a GPU.

It runs over fake GPUs (``tests/gpu/fake``), which say what comes after what (``timeline.py``). Every operator is an
access to bytes of memory: a read or a write, by a task. Two accesses to the same bytes, at least one of them a write,
must be ordered; that they did not meet this time says nothing. What is found is listed in :attr:`Checker.violations`,
with both operators, both tasks, and the lines of the package that launched them.

Memory
    Host memory is what ``pin_memory=True`` made, what ``torch.tensor`` made (until a collective uses it), and what was
    computed from host memory alone. Everything else is the GPU's. Operators on host memory run on the host, all others
    on the current stream. One that takes memory of both is a copy, or has been preceded by one (``to(device)`` does
    nothing here); the host waits for it unless it is a ``non_blocking`` copy and the host memory is pinned. It also
    waits where it reads values (``item``, ``tolist``).

Allocator
    What is freed may be given to every later allocation on the same stream that fits, until that stream comes after all
    uses. The new tensor then begins with the uses of the freed one: a first use that is not ordered behind them is
    reported as a missing ``record_stream``. ``record_stream(s)`` orders allocations behind what ``s`` had been given
    when the memory was freed. Freed pinned memory waits for its copies, as torch's allocator does.

Collectives
    They run on a stream of their group, after the current stream, on a copy of their input. The result is NaN, and
    input and result are in use and referred to, until the collective is awaited, for which the current stream waits and
    the host does not. A gather leaves the part of its result alone that it sends. NCCL's rules are checked on what all
    ranks have started (``nccl_rules.py``). Memory of a pool is registered once with each communicator, before it is
    used there, and freed after that ends; all ranks use the same buffer of it.

Captures
    During a capture the host waits for nothing, streams of the capture wait for none outside, and all are joined at its
    end.

Not covered: order between threads of the host, which count as one; kernels of Inductor, which no mode sees (compiled
code is that of ``aot_eager``); streams that autograd chooses for a backward (here the current one); memory of other
processes; copies between two GPUs; timing; what NCCL itself does. Reads through a pointer (``data_ptr``) are not seen.
A race inside one operator, between an offset and its neighbour, is seen only if their ranges overlap, which are those
from the first to the last byte of a tensor.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import fake_gpu
import timeline
import torch
import torch.distributed as dist
from dispatching import is_view, kernel_in_python, written
from late_collectives import poison, same_bytes
from nccl_rules import Call
from timeline import HOST, Stream, Task, current_stream, stream_of, where
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mfsdp_compile.runtime import compat

aten = torch.ops.aten
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_EMPTY = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_COPIES = {aten.copy_.default, aten._to_copy.default, aten._foreach_copy_.default}


@dataclass(frozen=True)
class Access:
    """One use of a range of bytes of a memory."""

    what: str
    where: str
    task: str
    number: int
    """Which operation of its task it is."""
    writes: bool
    start: int
    end: int
    freed: str = ""
    """What the memory was, if it has been freed since."""

    def __str__(self) -> str:
        kind = "writes" if self.writes else "reads"
        return f"{self.what} on {self.task} {kind} it ({self.where})"

    def comes_before(self, clock: dict[str, int]) -> bool:
        return clock[self.task] >= self.number


@dataclass(eq=False)
class Memory:
    """One storage."""

    reference: StorageWeakRef
    what: str
    nbytes: int
    stream: Stream
    """Where it was allocated."""
    is_host: bool = False
    is_pinned: bool = False
    accesses: list[Access] = field(default_factory=list)
    recorded: list[Stream] = field(default_factory=list)
    safe: Task | None = None
    """What an allocation comes after, of memory that was freed."""
    pool: Any = None
    number: int = 0
    """The ``torch.cuda.MemPool`` that it is in, and its place there."""


@dataclass(eq=False)
class _UnderWay:
    what: str
    where: str
    group: str
    clock: dict[str, int]
    result: Tensor
    arrived: Tensor
    given: Tensor | None
    sent: Tensor


class Checker(TorchDispatchMode):
    """What sees accesses to memory. Made by :func:`checked`."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let Dynamo compile inside."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.violations: list[str] = []
        self.calls: list[Call] = []
        self.groups: list[tuple[str, tuple[int, ...]]] = []
        """The groups that have communicated, in the order of their first collectives, which create communicators."""
        self.counts: dict[str, int] = defaultdict(int)
        self._memories: dict[int, Memory] = {}
        self._freed: dict[Stream, list[Memory]] = defaultdict(list)
        self._under_way: dict[int, list[_UnderWay]] = defaultdict(list)
        self._starts: list[tuple[str, int]] = []
        self._registered: list[tuple[str, Any]] = []
        """Groups, and the pools whose memory is registered with them."""

    def _finish(self) -> None:
        for started in self._under_way.values():
            for each in started:
                self._report(f"{each.what} of group {each.group} was never awaited ({each.where})")
        self._under_way.clear()
        for error in timeline.capture.errors:
            self._report(error)

    def _report(self, what: str) -> None:
        if what not in self.violations:
            self.violations.append(what)

    # -- what the fake GPUs ask ---------------------------------------------------------------------------------------

    def is_on_host(self, tensor: Tensor) -> bool:
        found = self._known(_local(tensor))
        return found is not None and found.is_host

    def is_pinned(self, tensor: Tensor) -> bool:
        found = self._known(_local(tensor))
        return found is not None and found.is_pinned

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self.counts["record_stream"] += 1
        self._memory(tensor).recorded.append(stream)

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor for kind in types):
            return NotImplemented
        if (kernel := kernel_in_python(func)) is not None:
            with self:
                return kernel(*args, **kwargs)
        self.counts["operators"] += 1
        if func is _WAIT:
            return self._wait(args[0])
        if func.namespace == "_c10d_functional":
            return self._start(func, args, kwargs)
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in ins) or kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._call(func, args, kwargs, ins)
        pinned = bool(kwargs.get("pin_memory"))
        if pinned:
            kwargs = {**kwargs, "pin_memory": False}
        outputs = func(*args, **kwargs)
        if func is aten.lift_fresh.default and self._known(outputs) is None:  # torch.tensor
            self._allocate(outputs, "tensor", True, False)
        if func._opname == "set_" or is_view(func):
            return outputs
        known = {_key(tensor) for tensor in ins}
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and _key(leaf) not in known]
        with_elements = [tensor for tensor in ins if tensor.numel()]
        on_host = [self._memory(tensor).is_host for tensor in with_elements or ins]
        is_host = pinned or (bool(on_host) and all(on_host))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        for tensor in made:
            self._allocate(tensor, name, is_host, pinned)
        if func in _EMPTY:
            return outputs
        task: Task = HOST if is_host else current_stream()
        self._use(name, task, list(_reads(func, args, kwargs)), [*written(func, args, kwargs), *made])
        if task is not HOST and (
            _reads_values(func) or (any(on_host) and not self._is_asynchronous(func, args, kwargs))
        ):
            current_stream().synchronize()
        return outputs

    def _is_asynchronous(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the host does not wait for an operator that takes memory of both."""
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        host = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self.is_on_host(leaf)]
        return all(not leaf.dim() for leaf in host) or (
            func in _COPIES and given.get("non_blocking", False) and all(self.is_pinned(leaf) for leaf in host)
        )

    def _use(self, what: str, task: Task, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        if task is not HOST:
            task.follow(HOST.clock)
        number, line = task.tick(), where()
        for tensors, writes_to in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    start, end = _range(tensor)
                    self._access(
                        self._memory(tensor), Access(what, line, task.name, number, writes_to, start, end), task
                    )

    def _access(self, memory: Memory, new: Access, task: Task) -> None:
        kept = []
        for old in memory.accesses:
            ordered = old.comes_before(task.clock)
            overlaps = old.start < new.end and new.start < old.end
            if overlaps and not ordered and (old.writes or new.writes or old.freed):
                cause = (
                    f"missing record_stream: memory of {old.freed} was freed and is used again"
                    if old.freed
                    else "not ordered"
                )
                self._report(f"{cause}: memory of {memory.what}: {old}, and {new}")
                continue
            inside = new.start <= old.start and old.end <= new.end
            if not (inside and ordered and (new.writes or (old.task == new.task and not old.writes))):
                kept.append(old)
        memory.accesses = [*kept, new]

    # -- the allocator ------------------------------------------------------------------------------------------------

    def _known(self, tensor: Tensor) -> Memory | None:
        return self._memories.get(_key(tensor))

    def _memory(self, tensor: Tensor) -> Memory:
        found = self._known(tensor)
        return (
            found if found is not None else self._allocate(tensor, "something from before", False, False, fresh=False)
        )

    def _allocate(self, tensor: Tensor, what: str, is_host: bool, pinned: bool, fresh: bool = True) -> Memory:
        reference = StorageWeakRef(tensor.untyped_storage())
        stream = current_stream()
        memory = Memory(
            reference,
            f"{what} {tuple(tensor.shape)} ({where()})",
            tensor.untyped_storage().nbytes(),
            stream,
            is_host,
            pinned,
        )
        self._memories[_key(tensor)] = memory
        if fresh and not is_host and (pool := fake_gpu.cuda.pool) is not None:
            memory.pool, memory.number = pool, len(pool.allocated)
            pool.allocated.append(memory)
        if fresh and not is_host:
            self._find_freed()
            before = Task("")
            before.follow(HOST.clock)
            before.follow(stream.clock)
            left = []
            for freed in self._freed[stream]:
                assert freed.safe is not None
                pending = [
                    access
                    for access in freed.accesses
                    if not access.comes_before(before.clock) and not access.comes_before(freed.safe.clock)
                ]
                if pending:
                    left.append(freed)
                if memory.nbytes <= _rounded(freed.nbytes):
                    memory.accesses += [
                        replace(access, start=0, end=memory.nbytes, freed=freed.what) for access in pending
                    ]
            self._freed[stream] = left
        return memory

    def _find_freed(self) -> None:
        for key, memory in list(self._memories.items()):
            if memory.reference.expired():
                del self._memories[key]
                if memory.pool is not None and any(pool is memory.pool for _, pool in self._registered):
                    self._report(f"memory of {memory.what} was freed while it is registered")
                memory.accesses = [access for access in memory.accesses if not access.freed]
                if not memory.is_host and memory.accesses:
                    memory.safe = Task("")
                    for stream in memory.recorded:
                        memory.safe.follow(stream.clock)
                    self._freed[memory.stream].append(memory)

    # -- collectives --------------------------------------------------------------------------------------------------

    def _record(self, group: str, what: str, start: Task) -> None:
        ranks = tuple(dist.get_process_group_ranks(compat.process_group(group)))
        if (group, ranks) not in self.groups:
            self.groups.append((group, ranks))
        beside = tuple(
            place
            for place, (task, number) in enumerate(self._starts)
            if task != start.name and start.clock[task] < number
        )
        self.calls.append(Call(group, ranks, what, beside, where()))
        self._starts.append((start.name, start.clock[start.name]))

    def _start(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, group = func._opname, args[-1] if isinstance(args[-1], str) else kwargs["group_name"]
        ins = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
        assert len(ins) == 1, f"{func} of several tensors"
        given: Tensor = ins[0]
        if self.is_on_host(given) and where().endswith("(all_reduce)"):  # by a backend for the CPU
            result = func(*args, **kwargs)
            self._allocate(result, name, True, False)
            self._use(name, HOST, [given], [result])
            return result
        stream = stream_of(group)
        timeline.stream_of(group).wait_stream(current_stream())
        sent = given.detach().clone()
        out = kwargs.get("out")
        arrived = func(
            sent.clone(), *args[1:], **({**kwargs, "out": torch.empty_like(out)} if out is not None else kwargs)
        )
        in_place = name.endswith("_") and not name.endswith("_out")
        result = out if out is not None else given if in_place else torch.empty_like(arrived)
        label = f"{name} of {tuple(given.shape)} {given.dtype} {args[1:-1]}{self._places(group, (given, result))}"
        for tensor in (given, result):
            if (known := self._known(tensor)) is not None and known.is_host:
                known.is_host = False
        if out is None and not in_place:
            self._allocate(result, name, False, False)
        parts = _apart(result, given)
        self._use(name, stream, [given], parts)
        self._record(group, label, stream)
        self.counts["collectives"] += 1
        self._under_way[_key(result)].append(
            _UnderWay(
                name,
                where(),
                group,
                dict(stream.clock),
                result.detach(),
                arrived,
                None if in_place else given.detach(),
                sent,
            )
        )
        for part in parts:
            poison(part)
        return result

    def _places(self, group: str, tensors: Sequence[Tensor]) -> str:
        """Return the registered buffers that tensors are in: symmetric memory must be the same on all ranks."""
        found = ""
        for tensor in tensors:
            memory = self._known(tensor)
            if memory is not None and memory.pool is not None:
                if not any(name == group and pool is memory.pool for name, pool in self._registered):
                    self._report(
                        f"memory of {memory.what} is used before it is registered with group {group} ({where()})"
                    )
                found += f", buffer {memory.number}"
        return found

    def nccl_backend(self, group: str, device: Any) -> Nccl:
        return Nccl(self, group)

    def register(self, group: str, pool: Any, symmetric: bool) -> None:
        timeline.capture.refuse("memory is registered")
        if any(name == group and known is pool for name, known in self._registered):
            self._report(f"a pool is registered twice with group {group} ({where()})")
        self._registered.append((group, pool))
        self._record(group, f"register {[memory.nbytes for memory in pool.allocated]} {symmetric}", HOST)

    def deregister(self, group: str, pool: Any) -> None:
        self._registered = [each for each in self._registered if each[0] != group or each[1] is not pool]

    def _wait(self, tensor: Tensor) -> Tensor:
        started = self._under_way.pop(_key(tensor), None)
        if started is None:
            return torch.ops._c10d_functional.wait_tensor(tensor)
        for each in started:
            arrived = torch.ops._c10d_functional.wait_tensor(each.arrived)
            if each.given is not None and not same_bytes(each.given, each.sent):
                self._report(f"what {each.what} sends was overwritten before it was awaited ({each.where}, {where()})")
            for part, values in zip(
                _apart(each.result, each.given), _apart(arrived, each.given, each.result), strict=True
            ):
                part.copy_(values)
            stream, before = current_stream(), Task("")
            before.follow(each.clock)
            if timeline.capture.streams and timeline.stream_of(each.group) not in timeline.capture.streams:
                timeline.capture.refuse(f"a wait for {each.what}, which was started outside,")
            stream.follow(before.clock)
        return tensor

    def _call(self, func: Any, args: Any, kwargs: Any, ins: Sequence[Tensor]) -> Any:
        """A collective of ``torch.distributed``: the current stream waits for it at once."""
        outputs = func(*args, **kwargs)
        group = next(
            dist.ProcessGroup.unbox(leaf).group_name
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
        )
        if any(not self.is_on_host(tensor) for tensor in ins):
            stream = stream_of(group)
            stream.wait_stream(current_stream())
            self._use(func._opname, stream, ins, ins)
            sizes = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in ins]
            self._record(group, f"{func._opname} of {sizes}", stream)
            current_stream().wait_stream(stream)
        return outputs

    # -- reads of the host --------------------------------------------------------------------------------------------

    def reading(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) is Tensor and not compat.is_fake(tensor) and tensor.numel():
                is_host = self.is_on_host(tensor)
                self._use(name, HOST if is_host else current_stream(), [tensor], [])
                if not is_host:
                    current_stream().synchronize()
            return plain(tensor, *args, **kwargs)

        return read


@contextlib.contextmanager
def checked() -> Iterator[Checker]:
    """Context in which accesses to memory are checked, to its end, when all collectives have been awaited."""
    checker = Checker()
    timeline.LINES = (*fake_gpu.READ, f"{fake_gpu.ROOT}/")
    timeline.capture.errors.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fake_gpu, "memory", checker))
        for name in ("tolist", "numpy"):
            reading = checker.reading(getattr(Tensor, name), name)
            stack.enter_context(mock.patch.object(Tensor, name, reading))
        with checker:
            yield checker
    checker._finish()


class Nccl:
    """Stands for ``ProcessGroupNCCL``: what registers memory with one communicator."""

    mem_allocator = None

    def __init__(self, checker: Checker, group: str) -> None:
        self._checker, self._group = checker, group

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        self._checker.register(self._group, pool, symm)

    def deregister_mem_pool(self, pool: Any) -> None:
        self._checker.deregister(self._group, pool)


def _reads_values(func: Any) -> bool:
    return (
        func is aten.equal.default
        or torch.Tag.data_dependent_output in func.tags
        or torch.Tag.dynamic_output_shape in func.tags
    )


def _reads(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    overwrites = func in _COPIES or func in _FILLS
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if not (is_written and (overwrites or argument.is_out)):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


_FILLS = {aten.zero_.default, aten.fill_.Scalar, aten._foreach_zero_.default}


def _local(tensor: Any) -> Tensor:
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _range(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * abs(stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _apart(result: Tensor, given: Tensor | None, like: Tensor | None = None) -> list[Tensor]:
    """Return the parts of a collective's result that it writes: not those that it sends from there.

    Args:
        like: The tensor whose parts are asked for, if it is not ``result`` itself.
    """
    like = result if like is None else like
    if given is None or _key(like) != _key(given) or like.numel() == given.numel():
        return [result]
    start = given.storage_offset() - like.storage_offset()
    flat = result.detach().view(-1)
    return [part for part in (flat[:start], flat[start + given.numel() :]) if part.numel()]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // 512) * 512
