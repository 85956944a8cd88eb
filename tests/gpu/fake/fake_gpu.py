"""Fake GPUs: the package's, the tests' and the benchmarks' code for CUDA and NCCL runs on the CPU and gloo.

Source files are read with these words replaced, line by line. Torch itself is unchanged: it never sees a
GPU, and everything computed is computed on the CPU.

    "cuda", "nccl"              -> "cpu", "gloo"
    torch.device(...)           -> _fake_gpu.device(...), which forgets the index
    torch.cuda                  -> _fake_gpu.cuda, the class of that name below
    .cuda(), .pin_memory()      -> .cpu(), .clone()
    pin_memory=...              -> pin_memory=_fake_gpu.pins(...)
    x.record_stream(...)        -> _fake_gpu.record_stream(x, ...)
    x.device == device          -> _fake_gpu.is_on(x, device)
    x.device.type == "cuda"     -> _fake_gpu.is_on_gpu(x), and the opposite for "cpu", where x may be in either memory
    x.is_pinned()               -> _fake_gpu.is_pinned(x)

Streams and events order what they would (``timeline.py``). Which memory is the host's is known only while something
follows it (``memory``): without that, everything is in the GPU's.

``MFSDP_FAKE_GPUS`` says how many GPUs there are. A program that is started as a file is not read this way, but what it
imports is.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import os
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import timeline

ROOT = Path(__file__).resolve().parents[3]
READ = tuple(f"{ROOT / folder}{os.sep}" for folder in ("mfsdp_compile", "passes", "runtime", "benchmarks", "tests/gpu"))
PLAIN = {
    ROOT / "runtime" / "compat" / "distributed.py",  # tells backends from each other by their devices
    ROOT / "passes" / "float32_gradients.py",  # its operator has no kernel for CPUs
    ROOT / "tests" / "gpu" / "facts.py",  # says what is really there
    Path(__file__).resolve(),
}
"""Files that are read as they are."""

WORDS = (
    (re.compile(r"\b([a-z]\w*)\.device\.type (==|!=) ([\"'])cuda\3"), r"(_fake_gpu.is_on_gpu(\1) \2 True)"),
    (
        re.compile(r"\b(memory|value|state\.full)\.device\.type (==|!=) ([\"'])cpu\3"),
        r"(_fake_gpu.is_on_gpu(\1) \2 False)",
    ),
    (re.compile(r"\b(\w+)\.device == device\b"), r"_fake_gpu.is_on(\1, device)"),
    (re.compile(r"\b(\w[\w.]*)\.is_pinned\(\)"), r"_fake_gpu.is_pinned(\1)"),
    (re.compile(r"([\"'])cuda\1"), '"cpu"'),
    (re.compile(r"([\"'])nccl\1"), '"gloo"'),
    (re.compile(r"\btorch\.device\("), "_fake_gpu.device("),
    (re.compile(r"\btorch\.cuda\b"), "_fake_gpu.cuda"),
    (re.compile(r"\btorch\._C\._cuda_clearCublasWorkspaces\b"), "_fake_gpu.cuda.synchronize"),
    (re.compile(r"\.cuda\(\)"), ".cpu()"),
    (re.compile(r"\.pin_memory\(\)"), ".clone()"),
    (
        re.compile(r"\bpin_memory=(True|pins(?! and)|pins and device\.type == \"cpu\")"),
        r"pin_memory=_fake_gpu.pins(\1)",
    ),
    (re.compile(r"(\w+)\.record_stream\("), r"_fake_gpu.record_stream(\1, "),
)


def install() -> None:
    """Read sources as described above, from the next import on."""
    builtins._fake_gpu = sys.modules[__name__]  # type: ignore[attr-defined]
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def words(source: str) -> str:
    for word, other in WORDS:
        source = word.sub(other, source)
    return source


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        origin = spec.origin if spec is not None else None
        if spec is None or origin is None or not origin.endswith(".py"):
            return None
        if not origin.startswith(READ) or Path(origin) in PLAIN:
            return None
        spec.loader = Loader(name, origin)
        return spec


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the source, never cached: the cache belongs to the file as it is."""
        path = self.get_filename(fullname)
        return compile(words(self.get_data(path).decode()), path, "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        super().exec_module(module)
        if module.__name__ == "mfsdp_compile.planning.measuring":
            module.ON_CUDA = _little(module)


def _little(measuring: Any) -> Any:
    """Return what calibration measures here: everything, once and small."""
    return measuring.Effort(
        matmul=((64, 64, 64), (128, 64, 64), (128, 128, 128)),
        matmul_seconds=0.1,
        attention=(1, 2, 64, 16),
        memory_bytes=2**22,
        collective_bytes=(2**10, 2**16, 2**22),
        round_seconds=0.01,
        rounds=2,
    )


def device(kind: Any = None, index: Any = None) -> Any:
    """Return what ``torch.device`` would, with the CPU instead of any GPU."""
    import torch

    if isinstance(kind, str) and kind.partition(":")[0] in ("cpu", "cuda"):
        return torch.device("cpu")
    return torch.device(kind) if index is None else torch.device(kind, index)


memory: Any = None
"""What knows which memory is the host's, and which of it is pinned (``tests/cuda_code/streams.py``)."""


def pins(value: bool) -> bool:
    """Return whether host memory is to be allocated pinned. ``memory`` sees the argument, which torch would refuse."""
    return value and memory is not None


def is_on_gpu(held: Any) -> bool:
    """Whether a tensor is in the GPU's memory, or something else belongs to a GPU."""
    import torch

    return not isinstance(held, torch.Tensor) or memory is None or not memory.is_on_host(held)


def is_on(tensor: Any, device: Any) -> bool:
    return is_on_gpu(tensor)


def is_pinned(tensor: Any) -> bool:
    return memory is not None and memory.is_pinned(tensor)


def record_stream(tensor: Any, stream: timeline.Stream) -> None:
    assert isinstance(stream, timeline.Stream)
    if memory is not None:
        memory.record_stream(tensor, stream)


class _Nothing:
    """A context that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        pass


class _Properties:
    name = "FAKE GPU"
    total_memory = 8 << 30


class _CudaGraph:
    """Records operators on the CPU, as tests of captured steps do."""

    recording: Any = None

    def replay(self) -> None:
        self.recording.replay()

    def reset(self) -> None:
        if self.recording is not None:
            self.recording.reset()


@contextlib.contextmanager
def _capture(graph: _CudaGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Any:
    import torch
    from graph_recorder import Recorder

    given = {"pool": pool, "stream": stream, "capture_error_mode": capture_error_mode}
    inspect.signature(torch.cuda.graph.__init__).bind(None, graph, **given)
    assert given == {"pool": cuda.graph_pool_handle(), "stream": stream, "capture_error_mode": "thread_local"}
    timeline.synchronize()
    with timeline.as_current(stream), timeline.capture.of(stream), Recorder().capture() as graph.recording:
        yield


class _MemPool:
    """Memory that is allocated while the pool is in use."""

    def __init__(self, allocator: Any = None) -> None:
        self.allocated: list[Any] = []


@contextlib.contextmanager
def _use_mem_pool(pool: _MemPool) -> Any:
    cuda.pool = pool
    try:
        yield
    finally:
        cuda.pool = None


class cuda:
    """What stands for ``torch.cuda``. A function that is not here is one that no test has used so far."""

    Event, Stream, stream, device = timeline.Event, timeline.Stream, timeline.as_current, _Nothing
    current_stream, synchronize = staticmethod(timeline.current_stream), staticmethod(timeline.synchronize)
    CUDAGraph, graph = _CudaGraph, staticmethod(_capture)
    MemPool, use_mem_pool = _MemPool, staticmethod(_use_mem_pool)
    pool: _MemPool | None = None
    _current = 0

    class nccl:
        @staticmethod
        def version() -> tuple[int, int, int]:
            return 2, 28, 9

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_current_stream_capturing() -> bool:
        return timeline.current_stream() in timeline.capture.streams

    @staticmethod
    def graph_pool_handle() -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def device_count() -> int:
        return int(os.environ.get("MFSDP_FAKE_GPUS", "1"))

    @staticmethod
    def current_device() -> int:
        return cuda._current

    @staticmethod
    def set_device(device: Any) -> None:
        """Devices have lost their indices here: take it that a rank names its own."""
        cuda._current = device if isinstance(device, int) else int(os.environ.get("LOCAL_RANK", "0"))

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return _Properties.name

    @staticmethod
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return 9, 0

    @staticmethod
    def get_device_properties(device: Any = None) -> type[_Properties]:
        return _Properties

    @staticmethod
    def get_rng_state(device: Any = None) -> Any:
        import torch

        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: Any, device: Any = None) -> None:
        import torch

        torch.set_rng_state(state)

    @staticmethod
    def empty_cache() -> None:
        pass

    @staticmethod
    def set_sync_debug_mode(mode: str) -> None:
        pass

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        pass

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        return {}

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return 0
