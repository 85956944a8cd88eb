"""What captures and replays work of a device: CUDA graphs, or what stands in for them in tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Run the work again, on the current stream."""

    def reset(self) -> None:
        """Free the graph. It cannot be replayed any more."""


class GraphDevice(Protocol):
    """Captures what one program queues on a device."""

    def warm_up(self) -> contextlib.AbstractContextManager[None]:
        """Context in which work runs as usual, on the stream that captures use."""

    def capture(self) -> contextlib.AbstractContextManager[Graph]:
        """Context in which work is recorded and does not run. Tensors made inside keep their memory for replays."""


class CudaGraphs:
    """CUDA graphs that share one memory pool.

    Args:
        device: The GPU.

    Raises:
        ValueError: The device is not a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"capture_step records CUDA graphs, and the model's parameters are on {device}. Shard the model on "
                "GPUs, or call the step itself."
            )
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    @contextlib.contextmanager
    def capture(self) -> Iterator[Graph]:
        graph = torch.cuda.CUDAGraph()
        # "thread_local", because NCCL's watchdog queries events from its own thread at any time.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            yield graph
