"""Step metrics: numbers against ones computed by hand, over ranks, without waiting for the device."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fully_shard_model, metrics
from mfsdp_compile.metrics import (
    StepMetrics,
    StepRecord,
    TensorBoard,
    WandB,
    device_peak_flops,
    model_flops,
    to_terminal,
)

# -- numbers ----------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only the test moves."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def batches(self, *seconds: float) -> Any:
        for each in seconds:
            self.now += each
            yield each


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(metrics, "time", found)
    return found


def test_numbers_by_hand(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Microbatches that are loaded inside a step count once, and what is between steps does not."""
    records: list[StepRecord] = []
    measured = StepMetrics(interval=3, writers=[records.append, to_terminal], flops_per_token=6e9, peak_flops=1e12)
    for number, batch in enumerate(measured.data(clock.batches(1.0, 0.5, 0.5)), start=1):
        with measured.step(tokens=100 * batch) as step:
            clock.now += 3.0
            assert list(measured.data(clock.batches(0.25, 0.25))) == [0.25, 0.25]
            step.loss = torch.tensor(1.0) if number == 2 else float(number)
        clock.now += 1000.0  # an evaluation
    assert records[0] == StepRecord(1, 1, 1, 100, 4.5, 1.5, 1.0, 6e9, 1e12)
    assert records[1] == StepRecord(3, 2, 1, 100, 4.0, 1.0, 2.0, 6e9, 1e12)
    assert records[1].scalars() == pytest.approx(
        {
            "loss_metrics/global_avg_loss": 2.0,
            "throughput(tps)": 12.5,
            "tflops": 0.075,
            "mfu(%)": 7.5,
            "time_metrics/end_to_end(s)": 4.0,
            "time_metrics/data_loading(s)": 1.0,
            "time_metrics/data_loading(%)": 25.0,
        }
    )
    line = "step    3  loss 2.0000  12 tokens/s  4.000 s  75.00 GFLOP/s per rank  mfu 7.5%  data 25.0%\n"
    assert capsys.readouterr().out.endswith(line)


def test_what_is_unknown_is_left_out(clock: Clock) -> None:
    records: list[StepRecord] = []
    measured = StepMetrics(interval=10, writers=[records.append], flops_per_token=6e9, step=25)
    assert measured.record() is None
    with pytest.raises(KeyError), measured.step(tokens=8):
        raise KeyError
    for _ in range(5):
        with measured.step(tokens=0):
            clock.now += 2.0
    assert [(record.step, record.steps) for record in records] == [(26, 1), (30, 4)]  # the one that raised is none
    times = ("time_metrics/end_to_end(s)", "time_metrics/data_loading(s)", "time_metrics/data_loading(%)")
    assert set(records[1].scalars()) == set(times)
    assert str(records[1]) == "step   30  2.000 s  data 0.0%"
    with pytest.raises(ValueError, match="at least 1 step"):
        StepMetrics(interval=0)


@on_ranks(2)
def test_ranks_that_differ() -> None:
    """Tokens are summed, the longest wait for data counts, and the loss is the mean of those that ranks gave."""
    rank = dist.get_rank()
    metrics.time, clock = Clock(), metrics.time  # type: ignore[assignment]
    try:
        records: list[StepRecord] = []
        measured = StepMetrics(interval=2, writers=[records.append], flops_per_token=1e6, device=torch.device("cpu"))
        mine = metrics.time
        for _ in measured.data(mine.batches(*[0.5 + rank] * 4)):  # type: ignore[attr-defined]
            with measured.step(tokens=10 + 90 * rank) as step:
                mine.now += 2.5 - rank  # type: ignore[attr-defined]
                if rank == 1 or measured.steps_taken == 3:
                    step.loss = torch.tensor(float(rank))
        last = measured.record()
    finally:
        metrics.time = clock
    assert last is None
    assert [record.step for record in records] == ([] if rank else [1, 2, 4])
    if rank == 0:
        assert records[2] == StepRecord(4, 2, 2, 220, 3.0, 1.5, 2 / 3, 1e6)
        assert records[2].tokens_per_second == pytest.approx(110 / 3.0)
        assert records[2].scalars()["throughput(tps)"] == pytest.approx(55 / 3.0)
        assert records[1].loss == 1.0


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_step_neither_waits_nor_communicates() -> None:
    """A record is one collective. Between records nothing reads the loss: on the meta device, it has no value."""
    measured = StepMetrics(interval=4, writers=[], device=torch.device("cpu"))
    counts = []
    for _ in range(8):
        with Operators() as seen, measured.step(tokens=1) as step:
            step.loss = torch.tensor(1.0)
        counts.append(len([name for name in seen.names if name.startswith("c10d")]))
    assert counts == [1, 0, 0, 1, 0, 0, 0, 1]
    for _ in range(3):
        with measured.step(tokens=1) as step:
            step.loss = torch.empty((), device="meta")


# -- operations of a model --------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 4)
        self.dropout = nn.Dropout(0.5)
        self.how = how

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.first(x)
        if self.how == "reads":
            assert y.sum().item() != 3.0
        if self.how in ("reentrant", "recomputed"):
            y = checkpoint(self.rest, y, use_reentrant=self.how == "reentrant")
        else:
            y = self.rest(y)
        return {"loss": y.sum(), "steps": 1}

    def rest(self, x: Tensor) -> Tensor:
        return self.third(self.dropout(torch.relu(self.second(x))))


BY_HAND = 3 * 2 * 3 * (8 * 16 + 16 * 16 + 16 * 4) - 2 * 3 * 8 * 16
"""Three rows: twice the elements of each weight in forward, and twice that in backward; the input needs no gradient."""


@pytest.mark.parametrize("how", ["", "recomputed", "reentrant"])
def test_operations_of_a_model(how: str) -> None:
    model, state = Small(how), torch.get_rng_state()
    assert model_flops(model, torch.ones(3, 8, dtype=torch.bfloat16)) == BY_HAND
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.grad is None and param.device.type == "cpu" for param in model.parameters())


def test_attention_counts_without_a_mask() -> None:
    class Attention(nn.Module):
        def forward(self, query: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)

    query = torch.ones(2, 4, 32, 16, requires_grad=True)
    assert model_flops(Attention(), query) == 3 * 2 * 2 * (2 * 4 * 32 * 32 * 16)


def test_tensors_that_a_forward_creates() -> None:
    """Positions and masks, on the model's device."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place, self.head = nn.Embedding(10, 8), nn.Embedding(16, 8), nn.Linear(8, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            held = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
            return self.head(torch.ones(tokens.shape[1], tokens.shape[1]).tril() @ held).sum()

    mixing, head = 2 * 2 * 4 * 4 * 8, 2 * 8 * 8 * 10
    assert model_flops(Positions(), torch.zeros(2, 4, dtype=torch.long)) == 2 * mixing + 3 * head


def test_a_model_that_reads_values_cannot_be_counted() -> None:
    with pytest.raises(ValueError, match=r"operations of Small cannot be counted, .* flops_per_token another way"):
        model_flops(Small("reads"), torch.ones(3, 8))


@on_ranks(2)
def test_operations_of_a_sharded_model() -> None:
    model = fully_shard_model(Small(), fsdp_unit_modules=[nn.Linear])
    inputs = torch.ones(3, 8)
    for call in (model, torch.compile(model, backend="mfsdp")):
        with Operators() as seen:
            assert model_flops(call, inputs) == BY_HAND
        assert not [name for name in seen.names if "c10d" in name]
    assert all(param.grad is None for param in model.parameters())
    model(inputs)["loss"].backward()  # as before
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA GH200 480GB", 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_come_from_the_table_of_hardware(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_flops(torch.device("cuda", 0)) == peak
    assert device_peak_flops(torch.device("cpu")) is None


# -- writers ----------------------------------------------------------------------------------------------------------

RECORD = StepRecord(3, 2, 1, 100, 4.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("make", "extra"), [(lambda: TensorBoard("runs"), "tensorboard"), (lambda: WandB(project="x"), "wandb")]
)
def test_a_missing_extra_is_named_at_once(make: Any, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'mfsdp-compile\[{extra}\]'"):
        make()


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            said.append(folder)

        def add_scalar(self, *scalar: Any) -> None:
            said.append(scalar)

        def flush(self) -> None:
            said.append("flush")

    stub(monkeypatch, "tensorboard")
    stub(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    writer = TensorBoard(str(tmp_path))
    assert said == []  # other ranks make no files
    writer(RECORD)
    writer(RECORD)
    scalars = [(name, value, 3) for name, value in RECORD.scalars().items()]
    assert said == [str(tmp_path), *scalars, "flush", *scalars, "flush"]


def test_weights_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    run = types.SimpleNamespace(log=lambda scalars, step: said.append((scalars, step)))
    stub(monkeypatch, "wandb", run=None, init=lambda **options: said.append(options) or run)
    WandB(project="x")(RECORD)
    stub(monkeypatch, "wandb", run=run)
    WandB()(RECORD)
    assert said == [{"project": "x"}, (RECORD.scalars(), 3), (RECORD.scalars(), 3)]
