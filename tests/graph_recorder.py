"""Stands in for CUDA graphs on the CPU: records the operators of a step, and runs them again without its Python.

Like a capture, recording leaves no trace in memory: what operators have written to memory from outside is restored, and
what they have made is filled with NaN. Like a replay, running them again writes to the same memory, in the same order.

It is stricter than CUDA: values that are read where no operator sees it (``tolist``, ``numpy``) are refused, and so is
a collective that is read before it was awaited, or not awaited at all. Inductor's kernels are no operators: they are
recorded if they were compiled in :func:`recordable_kernels`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from dispatching import is_view, kernel_in_python, written
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from mfsdp_compile.runtime import compat

_WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class _View:
    """A tensor without a reference to its memory: the pool of communication buffers counts references."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Recorded:
    func: Any
    args: Any
    kwargs: Any
    outputs: Any
    writes_outputs: bool


class Recording(TorchDispatchMode):
    """Operators of one capture, and the memory that they use."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[_Recorded] = []
        self.replays = 0
        self.made: dict[int, torch.UntypedStorage] = {0: torch.UntypedStorage()}
        self._outside: dict[int, Callable[[], torch.UntypedStorage]] = {}
        self._saved: dict[int, Tensor] = {}
        self._running: set[int] = set()
        self._ended = False

    # -- recording ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor for kind in types):
            return NotImplemented
        if (kernel := kernel_in_python(func)) is not None:
            with self:  # a replay runs no Python
                return kernel(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            assert _key(args[0]) not in self.made, "a value is read on the host"
            return func(*args, **kwargs)  # the number of a deferred gradient, which is on the host for good
        ins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is not _WAIT and not is_view(func):
            for tensor in ins:
                assert _key(tensor) not in self._running, f"{func} uses a collective's memory before it was awaited"
        for tensor in ins:
            self._see(tensor)
        targets = list(written(func, args, kwargs))
        for tensor in targets:
            self._save(tensor)
        frozen = self._frozen((args, kwargs))
        outputs = func(*args, **kwargs)
        outs = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        known = {_key(tensor) for tensor in ins}
        fresh = [tensor for tensor in outs if _key(tensor) not in known]
        for tensor in fresh:
            self.made.setdefault(_key(tensor), tensor.untyped_storage())
        if func is _WAIT:
            self._running.discard(_key(ins[0]))
        elif func.namespace == "_c10d_functional":
            self._running.update(map(_key, outs))
        if targets or fresh or func is _WAIT:
            self.operators.append(_Recorded(func, *frozen, self._frozen(outputs), bool(fresh)))
        return outputs

    def run_kernel(self, kernel: Callable[..., Any], is_written: Sequence[bool], args: tuple[Any, ...]) -> None:
        """Run and record a kernel that Inductor has compiled."""
        for value, is_target in zip(args, is_written, strict=True):
            if isinstance(value, Tensor):
                assert _key(value) not in self._running, "a kernel uses a collective's memory before it was awaited"
                self._see(value)
                if is_target:
                    self._save(value)
        self.operators.append(_Recorded(kernel, self._frozen(args), {}, None, False))
        kernel(*args)

    def _see(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key not in self.made and key not in self._outside:
            # The tensor itself, not its storage: a buffer must not get another reference. Its first use is by the pool.
            self._outside[key] = tensor.untyped_storage

    def _save(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key not in self.made and key not in self._saved:
            whole = _bytes(tensor.untyped_storage())
            self._saved[key] = whole.clone()

    def _frozen(self, tree: Any) -> Any:
        return tree_map_only(Tensor, _view_of, tree)

    def end(self) -> None:
        """Undo what was done."""
        assert not self._running, "a collective was not awaited in the capture that started it"
        for key, saved in self._saved.items():
            _bytes(self._outside[key]()).copy_(saved)
        self._saved.clear()
        for storage in self.made.values():
            _bytes(storage).fill_(0xFF)  # NaN in every floating-point dtype
        self._ended = True

    # -- replay -------------------------------------------------------------------------------------------------------

    def replay(self) -> None:
        assert self._ended
        assert self.operators, "a graph that was freed is replayed"
        self.replays += 1
        with torch.no_grad():
            for recorded in self.operators:
                args, kwargs = self._thawed((recorded.args, recorded.kwargs))
                if recorded.func is _WAIT:
                    continue  # awaited where it was started
                outputs = recorded.func(*args, **kwargs)
                if getattr(recorded.func, "namespace", "") == "_c10d_functional":
                    outputs = tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, outputs)
                if recorded.writes_outputs:
                    for memory, value in zip(
                        tree_leaves(self._thawed(recorded.outputs)), tree_leaves(outputs), strict=True
                    ):
                        if isinstance(value, Tensor) and memory.data_ptr() != value.data_ptr():
                            memory.copy_(value)

    def _thawed(self, tree: Any) -> Any:
        return tree_map_only(_View, self._tensor, tree)

    def _tensor(self, view: _View) -> Tensor:
        storage = self.made[view.storage] if view.storage in self.made else self._outside[view.storage]()
        return torch.empty(0, dtype=view.dtype).set_(storage, view.offset, view.size, view.stride)

    def reset(self) -> None:
        self.operators.clear()
        self.made.clear()
        self._outside.clear()


@contextlib.contextmanager
def recordable_kernels() -> Iterator[None]:
    """Context in which Inductor compiles kernels for the CPU that a recording notices."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    compile_kernel = AsyncCompile.cpp_pybinding

    def recordable(self: Any, argtypes: Sequence[str], source_code: str) -> Any:
        found = compile_kernel(self, argtypes, source_code)
        is_written = ["*" in kind and "const" not in kind for kind in argtypes]

        def noticed(kernel: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> None:
                modes = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recording)]
                if modes:
                    modes[0].run_kernel(kernel, is_written, args)
                else:
                    kernel(*args)

            return run

        return LambdaFuture(lambda: noticed(found.result())) if hasattr(found, "result") else noticed(found)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", recordable):
        yield


class Recorder:
    """Records on the CPU what :class:`.CudaGraphs` captures on a GPU."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.recordings: list[Recording] = []

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def capture(self) -> Iterator[Recording]:
        recording = Recording()
        random = torch.get_rng_state()
        with _without_unseen_reads(), recording:
            yield recording
        torch.set_rng_state(random)
        gc.collect()
        recording.end()
        self.recordings.append(recording)


@contextlib.contextmanager
def _without_unseen_reads() -> Iterator[None]:
    def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    with mock.patch.object(Tensor, "tolist", refuse), mock.patch.object(Tensor, "numpy", refuse):
        yield


def _key(tensor: Tensor) -> int:
    return (compat.storage_address(tensor) or 0) if tensor.numel() else 0


def _view_of(tensor: Tensor) -> _View:
    offset = tensor.storage_offset() if tensor.numel() else 0
    return _View(_key(tensor), tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
