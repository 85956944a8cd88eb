"""Code that runs only where there are GPUs, with stand-ins for what torch has no build for here."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfsdp_compile import fully_shard, fully_shard_model
from mfsdp_compile.checkpoint import full_optimizer_state_dict, full_state_dict, host_copies, saving
from mfsdp_compile.planning import calibration
from mfsdp_compile.runtime.capture.devices import CudaGraphs


@on_ranks(2)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_runs_on_another_thread(compiled: bool) -> None:
    """Autograd has a thread per GPU, which runs the backward of what was computed there."""

    def gradients(on_another_thread: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = fully_shard_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), fsdp_unit_modules=[nn.Linear])
        call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"}) if compiled else model
        for _ in range(2):
            loss = call(torch.arange(8.0)[None]).square().mean()
            if on_another_thread:
                failed: list[BaseException] = []

                def backward(loss: torch.Tensor = loss, failed: list[BaseException] = failed) -> None:
                    try:
                        loss.backward()
                    except BaseException as error:
                        failed.append(error)

                thread = threading.Thread(target=backward)
                thread.start()
                thread.join(60)
                assert not thread.is_alive()
                assert not failed, failed
            else:
                loss.backward()
        return [param.grad.to_local() for param in model.parameters()]

    assert all(itertools.starmap(torch.equal, zip(gradients(True), gradients(False), strict=True)))


class _Calls:
    """Records calls of stand-ins, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.names.append(name)


def test_staging_waits_for_the_gpu_once() -> None:
    calls = _Calls()
    gpu = torch.device("cuda:0")
    tensors = [mock.Mock(spec=torch.Tensor, device=gpu) for _ in range(3)]
    hosts: list[Any] = []

    def pinned(tensor: Any, device: str, pin_memory: bool) -> Any:
        assert device == "cpu"
        assert pin_memory
        host = mock.Mock()
        host.copy_.side_effect = lambda source, non_blocking: (calls.copy(source), hosts.append(host), host)[-1]
        return host

    stream = mock.Mock()
    stream.synchronize.side_effect = calls.synchronize
    with (
        mock.patch("torch.empty_like", pinned),
        mock.patch("torch.cuda.current_stream", return_value=stream),
        saving._host_copies() as copied,
    ):
        copies = [copied(tensor) for tensor in tensors]
        assert copies == hosts
        on_host = torch.arange(4.0)
        copy = copied(on_host)
        assert torch.equal(copy, on_host)
        assert copy.data_ptr() != on_host.data_ptr()
    assert calls.names == ["copy"] * 3 + ["synchronize"]


def test_graphs_are_captured_on_one_stream_in_one_pool() -> None:
    """The calls of a capture, in order; torch's own classes would take them."""
    log: list[Any] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append((self.name, "waits for", other.name))

    class Context:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.what = args, kwargs

        def __enter__(self) -> None:
            log.append(self.what)

        def __exit__(self, *_: Any) -> None:
            log.append("end")

    class CapturingContext(Context):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            inspect.signature(torch.cuda.graph.__init__).bind(None, *args, **kwargs)
            super().__init__(*args, **kwargs)

    gpu = torch.device("cuda:0")
    side, current, graph = Stream("side"), Stream("current"), object()
    with (
        mock.patch("torch.cuda.Stream", lambda device: side if device == gpu else None),
        mock.patch("torch.cuda.current_stream", return_value=current),
        mock.patch("torch.cuda.stream", Context),
        mock.patch("torch.cuda.graph_pool_handle", return_value="pool"),
        mock.patch("torch.cuda.CUDAGraph", return_value=graph),
        mock.patch("torch.cuda.graph", CapturingContext),
    ):
        graphs = CudaGraphs(gpu)
        with graphs.warm_up():
            log.append("warm-up")
        for _ in range(2):
            with graphs.capture() as captured:
                assert captured is graph
                log.append("step")
    capture = (graph,), {"pool": "pool", "stream": side, "capture_error_mode": "thread_local"}
    assert log == [
        *(("side", "waits for", "current"), ((side,), {}), "warm-up", "end", ("current", "waits for", "side")),
        *(capture, "step", "end"),
        *(capture, "step", "end"),
    ]
    for method in ("replay", "reset"):
        assert callable(getattr(torch.cuda.CUDAGraph, method))
    with pytest.raises(ValueError, match="parameters are on cpu"):
        CudaGraphs(torch.device("cpu"))


class _Gpu:
    """Stands for a GPU: copies to pinned memory are done when an event behind them is awaited."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tensor(self, values: torch.Tensor, device: str = "cuda:0") -> Any:
        return mock.Mock(spec=torch.Tensor, device=torch.device(device), nbytes=values.nbytes, values=values)

    def pinned(self, tensor: Any, device: str, pin_memory: bool) -> Any:
        assert device == "cpu"
        assert pin_memory
        host, memory = mock.Mock(), torch.full_like(tensor.values, -77)  # not arrived

        def copy(source: Any, non_blocking: bool) -> Any:
            assert non_blocking
            self.log.append("copy")
            self._queued.append((memory, source.values))
            return host

        host.copy_.side_effect = copy
        host.clone.side_effect = memory.clone
        return host

    def event(self) -> Any:
        queued: list[tuple[torch.Tensor, torch.Tensor]] = []

        def record(stream: str) -> None:
            self.log.append(f"record {stream}")
            queued.extend(self._queued)
            self._queued.clear()

        def synchronize() -> None:
            self.log.append("wait")
            for memory, values in queued:
                memory.copy_(values)

        return mock.Mock(record=record, synchronize=synchronize)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with (
            mock.patch("torch.empty_like", self.pinned),
            mock.patch("torch.cuda.Event", self.event),
            mock.patch("torch.cuda.current_stream", str),
        ):
            yield


def test_copies_to_the_host_wait_for_the_gpu_once_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads a batch when it is complete, while the GPU copies the next one."""
    monkeypatch.setattr(host_copies, "BATCH_BYTES", 32)
    gpu, copies = _Gpu(), host_copies.HostCopies[int]()
    given = [torch.full((4,), float(i)) for i in range(5)]
    with gpu.used():
        found = [copies.add(i, gpu.tensor(values)) for i, values in enumerate(given)]
        assert [[i for i, _ in done] for done in found] == [[], [], [], [0, 1], []]
        on_host = torch.arange(3.0)
        ((key, copy),) = copies.add(9, on_host)
        assert key == 9
        assert torch.equal(copy, on_host)
        assert copy.data_ptr() != on_host.data_ptr()
        found.append(copies.rest())
        assert copies.rest() == []
    for expected, (i, copy) in enumerate(copy for done in found for copy in done):
        assert i == expected
        assert torch.equal(copy, given[i])
    batch = ["copy", "copy", "record cuda:0"]
    assert gpu.log == [*batch, *batch, "wait", "copy", "record cuda:0", "wait", "wait"]


def test_a_batch_of_copies_is_of_one_gpu() -> None:
    gpu, copies = _Gpu(), host_copies.HostCopies[str]()
    with gpu.used():
        for device in ("cuda:0", "cuda:1"):
            copies.add(device, gpu.tensor(torch.ones(2), device))
        assert all(torch.equal(copy, torch.ones(2)) for _, copy in copies.rest())
    assert gpu.log == ["copy", "record cuda:0", "copy", "record cuda:1", "wait", "wait"]


def test_full_state_dicts_wait_for_the_gpu_once_per_batch() -> None:
    """All tensors that one rank gets go through :class:`.HostCopies`, and arrive under their names."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    gpu = _Gpu()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        optimizer = torch.optim.AdamW(model.parameters())
        sharded, optimizer = fully_shard(model, optimizer, device="cpu")
        sharded(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        expected = full_state_dict(sharded), full_optimizer_state_dict(optimizer)
        add = host_copies.HostCopies.add

        def on_gpu(self: Any, key: Any, tensor: torch.Tensor) -> Any:
            return add(self, key, gpu.tensor(tensor.detach().clone()))

        with gpu.used(), mock.patch.object(host_copies.HostCopies, "add", on_gpu):
            found = full_state_dict(sharded), full_optimizer_state_dict(optimizer)
    finally:
        dist.destroy_process_group()
    # Fake collectives leave gradients undefined, so values may be NaN.
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[1]["state"], expected[1]["state"], rtol=0, atol=0, equal_nan=True)
    assert gpu.log.count("wait") == 3  # parameters, buffers, and the optimizer's state
    assert gpu.log.count("copy") == 4 + 3 + 4 * 3


def test_calibration_does_not_time_what_was_queued_before() -> None:
    calls = _Calls()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            calls.record()

        def synchronize(self) -> None:
            calls.wait()

        def elapsed_time(self, end: Any) -> float:
            return 5.0

    timer = calibration._OperationTimer(torch.device("cuda"), mock.Mock())
    with mock.patch("torch.cuda.Event", Event), mock.patch("torch.cuda.synchronize", calls.synchronize):
        assert timer.once(calls.run, 2) == 5e-3
    assert calls.names == ["synchronize", "record", "run", "run", "record", "wait"]


def test_ranks_of_a_machine_do_not_share_the_default_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    monkeypatch.setenv("LOCAL_RANK", "1")
    counted = mock.patch("torch.cuda.device_count", return_value=4)
    current = mock.patch("torch.cuda.current_device", return_value=0)
    try:
        with mock.patch("torch.cuda.is_available", return_value=True), counted as count, current as index:
            with pytest.raises(ValueError, match=r"rank 1 is cuda:0.*LOCAL_RANK is 1.*torch\.cuda\.set_device"):
                fully_shard_model(nn.Linear(4, 4, device="meta"), device="cuda", init_model_with_meta_device=True)
            reached = mock.patch("mfsdp_compile.api.shard_model", side_effect=InterruptedError)

            def passes(device: str) -> None:
                with reached, pytest.raises(InterruptedError):
                    fully_shard_model(nn.Linear(4, 4, device="meta"), device=device, init_model_with_meta_device=True)

            passes("cuda:0")
            index.return_value = 1
            passes("cuda")
            index.return_value, count.return_value = 0, 1  # a launcher that shows each rank one GPU
            passes("cuda")
            count.return_value = 4
            monkeypatch.setenv("LOCAL_RANK", "0")
            passes("cuda")
    finally:
        dist.destroy_process_group()


def test_a_model_that_was_left_on_the_cpu(fake_world: int) -> None:
    """Where the process group has NCCL too, rank 0 says that the model trains on the CPU."""

    def shard(**given: Any) -> None:
        fully_shard_model(nn.Linear(8, 8), fsdp_unit_modules=[nn.Linear], **given)

    with mock.patch("mfsdp_compile.api.compat.device_types", return_value=["cuda", "cpu"]):
        with pytest.warns(UserWarning, match="The model is on the CPU and trains there") as told:
            shard()
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shard(device="cpu")
