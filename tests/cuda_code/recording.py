"""Run generated code on fake tensors, and record what it would launch and in which memory.

A graph runs as Python: code that communicates and calls pieces, and Inductor's for each piece, which allocates,
launches Triton kernels and calls operators. Run on tensors without memory it does all this and computes nothing. What
is recorded is the order in which one stream sees it, with the storage that each launch reads and writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from dispatching import written
from generating import code_of, codes_are_seen, compiled_with, modules_are_seen
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton_text import Kernel, read_kernel

from mfsdp_compile.backend.straight_line import Code
from mfsdp_compile.passes.context import phase_of
from mfsdp_compile.runtime import compat


@dataclass(frozen=True)
class Span:
    """Memory that an event reads or writes: bytes ``[start, stop)`` of a storage, given by its number."""

    storage: int
    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Event:
    """The launch of a kernel or the call of an operator.

    Args:
        name: Name of the kernel, or ``aten.mm.out``.
        reads, writes: Memory that it reads, and that it writes.
        kernel: The Triton kernel, if it is one.
        moves, fills: Whether it copies, casts or fills and computes nothing; whether it only fills.
        bytes: Bytes that it reads and writes: of Triton kernels, and of operators that move.
    """

    name: str
    reads: tuple[Span, ...]
    writes: tuple[Span, ...]
    kernel: Kernel | None = None
    moves: bool = False
    fills: bool = False
    bytes: int = 0

    @property
    def operator(self) -> str:
        """Name of the operator without namespace and overload; empty for a Triton kernel."""
        return "" if self.kernel is not None else self.name.split(".")[1]


@dataclass
class Recording:
    """What one graph's code does.

    Args:
        phase: Name of the graph.
        source: The code.
        inputs, outputs: Storages of the tensors that the code takes and returns, by position; None for other values.
        events: What it launches and calls, in order.
        syncs: Operators that would wait for the device or copy to the host.
        calls: How often it calls a piece that may be a layer, at most.
    """

    phase: str
    source: str
    inputs: list[int | None] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    calls: int = 0


class _Launcher:
    """Stands for a compiled Triton kernel in generated code."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.kernel = name, read_kernel(name, source)

    def run(self, *args: Any, stream: int, **more: Any) -> None:
        assert _Recorder.current is not None, "kernels are only launched while code is recorded"
        _Recorder.current.launch(self.name, self.kernel, args, more)


@contextlib.contextmanager
def kernels_are_recorded() -> Iterator[None]:
    """Context in which loading generated code compiles no kernel."""
    from torch._inductor.async_compile import AsyncCompile

    compiles = AsyncCompile.triton
    AsyncCompile.triton = lambda _, name, source, *__, **___: _Launcher(name, source)  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.triton = compiles  # type: ignore[method-assign]


def record(
    phase: str, source: str, module: ModuleType, call: Callable[[list[Any]], Any], inputs: Sequence[Any]
) -> Recording:
    """Run ``call`` of a module of generated code on fake tensors. A fake mode is active."""
    _without_memory(module)
    return _recorded(phase, source, call, inputs)


def _without_memory(module: ModuleType) -> None:
    """Let a module of generated code run on tensors without memory."""
    module.__dict__.update(
        empty_strided_cuda=_empty,
        reinterpret_tensor=_reinterpret,
        assert_alignment=lambda *_: None,
        copy_if_misaligned=lambda tensor: tensor,
    )


def _recorded(phase: str, source: str, call: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> Recording:
    recorder = _Recorder(Recording(phase, source))
    with recorder:
        recorder.recording.inputs = [recorder.storage_of(value) for value in inputs]
        outputs = call(list(inputs))
        recorder.recording.outputs = [recorder.storage_of(value) for value in outputs]
    return recorder.recording


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


_MOVING = {
    "pack_gradients",
    "portion",
    "clone",
    "copy_",
    "_to_copy",
    "cat",
    "fill_",
    "zero_",
    "zeros",
    "full",
    "new_zeros",
    "zeros_like",
}
_ALLOCATING = {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided", "gradient_buffer"}
_WAITING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"}


class _Recorder(TorchDispatchMode):
    current: _Recorder | None = None

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no storage has the address of an earlier one

    def __enter__(self) -> _Recorder:
        _Recorder.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _Recorder.current = None

    def storage_of(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        self._kept.append(value)
        return self._numbers.setdefault(value.untyped_storage()._cdata, len(self._numbers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        operator = name.split(".")[1]
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if operator in _WAITING:
            self.recording.syncs.append(name)
        if name.startswith("mfsdp.begin"):
            return None
        if func is torch.ops.aten._scaled_mm.out:  # has no fake kernel
            result = kwargs["out"]
        elif operator == "wait_tensor":  # its fake kernel returns other memory
            result = args[0]
        else:
            result = func(*args, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if len({tensor.device.type for tensor in (*given, *made)}) > 1 and any(t.device.type == "cpu" for t in made):
            self.recording.syncs.append(f"{name} from the device to the host")
        targets = list(written(func, args, kwargs))
        taken = {self.storage_of(tensor) for tensor in given}
        new = [tensor for tensor in made if self.storage_of(tensor) not in taken]
        if operator in _ALLOCATING or not (new or targets or operator == "wait_tensor"):
            return result  # memory, or a view
        read = [tensor for tensor in given if not any(tensor is other for other in targets)]
        if operator == "gather_into_buffer":
            self._gather_into_buffer(name, given[0], made[0])
            return result
        moves = operator in _MOVING
        self.recording.events.append(
            Event(
                name,
                tuple(map(self._span, read)),
                tuple(map(self._span, (*targets, *new))),
                moves=moves,
                fills=moves and not read,
                bytes=_moved(read, [*targets, *new]) if moves else 0,
            )
        )
        return result

    def _gather_into_buffer(self, name: str, shard: Tensor, whole: Tensor) -> None:
        """Record what the operator does: copy or cast the shard into its place, and gather from there."""
        mine = whole[: shard.numel()]
        sent = (self._span(mine),)
        copy = Event("mfsdp.copy_", (self._span(shard),), sent, moves=True, bytes=_moved([shard], [mine]))
        self.recording.events += [copy, Event(name, sent, (self._span(whole),))]

    def launch(self, name: str, kernel: Kernel, args: Sequence[Any], more: dict[str, Any]) -> None:
        bound = dict(zip(kernel.parameters, args, strict=False)) | more
        moved = 0
        for accesses in (kernel.loads, kernel.stores):
            for pointer, elements in accesses.items():
                tensor = bound[pointer]
                moved += min(tensor.numel(), elements) * tensor.element_size()
        self.recording.events.append(
            Event(
                name,
                tuple(self._span(bound[pointer]) for pointer in kernel.loads),
                tuple(self._span(bound[pointer]) for pointer in kernel.stores),
                kernel,
                kernel.moves,
                kernel.fills,
                moved,
            )
        )

    def _span(self, tensor: Tensor) -> Span:
        number = self.storage_of(tensor)
        assert number is not None
        begin = tensor.storage_offset()
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        extent = extent if tensor.numel() else 0
        return Span(number, begin * tensor.element_size(), (begin + extent) * tensor.element_size())


def _moved(read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Return the bytes that an operator moves, which need not read all that it is given."""
    elements = sum(tensor.numel() for tensor in written)
    reading = sum(min(tensor.numel(), elements) * tensor.element_size() for tensor in read)
    return reading + sum(tensor.numel() * tensor.element_size() for tensor in written)


LAYER = 20
"""Least number of operators of a layer. Pieces that only cast or scale have fewer."""


def recordings_of(model: Any, inputs: list[Any], compile_graph: Any, trains: bool) -> list[Recording]:
    """Return the recordings of a model's graphs: of the code that calls pieces, or of Inductor's for whole graphs."""
    lowered: list[tuple[GraphLowering, ModuleType, Any]] = []
    cut: list[tuple[fx.Graph, Code, Any]] = []
    grad = contextlib.nullcontext() if trains else torch.no_grad()
    with (
        kernels_are_recorded(),
        modules_are_seen(lambda graph, module: lowered.append((graph, module, graph.fake_mode))),
        codes_are_seen(lambda graph, code: cut.append((graph, code, compat.fake_mode_of(graph)))),
        grad,
    ):
        compiled_with(compile_graph, model, inputs)
    for _, module, _ in lowered:
        _without_memory(module)
    recordings = []
    for graph, code, mode in cut:
        with mode:
            recordings.append(_recorded(phase_of(graph).value, code.source, code.function(), _inputs(graph)))
        layers = [name for name, piece in code.callees.items() if piece.operators >= LAYER]
        recordings[-1].calls = max((code.source.count(f" = {name}(") for name in layers), default=0)
    if cut:
        recordings[0].source += "".join(code_of(module) for _, module, _ in lowered)
        return recordings
    for whole, module, mode in lowered:
        phase = "backward" if whole.is_backward else "inference" if whole.is_inference else "forward"
        with mode:
            recordings.append(_recorded(phase, code_of(module), module.call, _inputs(whole.orig_gm.graph)))
    return recordings


def _inputs(graph: fx.Graph) -> list[Any]:
    return [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
