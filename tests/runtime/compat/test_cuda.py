"""Code that runs only where there are GPUs, with stand-ins for what torch has no build for here."""

from __future__ import annotations

import itertools
import threading
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfsdp_compile import fully_shard_model
from mfsdp_compile.checkpoint import host_copies
from mfsdp_compile.planning import measuring
from mfsdp_compile.runtime.guests.capture.devices import CudaGraphs


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


def test_graphs_are_of_gpus() -> None:
    with pytest.raises(ValueError, match="parameters are on cpu"):
        CudaGraphs(torch.device("cpu"))
    for method in ("replay", "reset"):
        assert callable(getattr(torch.cuda.CUDAGraph, method))


def test_a_batch_of_copies_is_of_one_gpu() -> None:
    """An event is on the stream of one GPU. Everything else about these copies: ``tests/cuda_code/test_streams.py``."""
    calls, copies = _Calls(), host_copies.HostCopies[str]()
    with (
        mock.patch("torch.empty_like", return_value=mock.Mock()),
        mock.patch("torch.cuda.Event", return_value=mock.Mock(record=lambda stream: getattr(calls, stream)())),
        mock.patch("torch.cuda.current_stream", str),
    ):
        for device in ("cuda:0", "cuda:1"):
            copies.add(device, mock.Mock(spec=torch.Tensor, device=torch.device(device), nbytes=8))
        assert [device for device, _ in copies.rest()] == ["cuda:0", "cuda:1"]
    assert calls.names == ["cuda:0", "cuda:1"]


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

    timer = measuring._OperationTimer(torch.device("cuda"), mock.Mock())
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
            reached = mock.patch("mfsdp_compile.sharding.shard_model", side_effect=InterruptedError)

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

    with mock.patch("mfsdp_compile.sharding.compat.device_types", return_value=["cuda", "cpu"]):
        with pytest.warns(UserWarning, match="The model is on the CPU and trains there") as told:
            shard()
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shard(device="cpu")
