"""``compile_step(..., cuda_graphs=True)``: captured steps do what ordinary ones do, to the bit."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from graph_recorder import Recorder, Recording, recordable_kernels
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from test_cuda_graphs import adamw, capturable, sgd
from torch import Tensor

from mfsdp_compile import compile_step, cuda_graphs, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments

STEPS = 6


class Trained:
    """A model with its train step, and what has recorded it.

    Args:
        captures: Whether steps are captured.
        sharding: Arguments of ``fully_shard_model``.
        module: Makes the model.
        arguments: Arguments of ``compile_step``.
    """

    def __init__(
        self,
        mode: str,
        optimizer: Any,
        captures: bool,
        sharding: dict[str, Any] | None = None,
        module: Any = zoo.Plain,
        **arguments: Any,
    ) -> None:
        self.model = fully_shard_model(
            parity.build(module),
            fsdp_unit_modules=[zoo.Block],
            cuda_graph_mode=True,
            **(sharding or mesh_arguments("optim_grads_params", "cpu")),
        )
        self.between_microbatches: Any = lambda: None
        self.optimizer = optimizer(self.model.parameters())
        self.recorder, self.accumulation = Recorder(), arguments.get("accumulation", 1)
        how = {"backend": None} if mode == EAGER else {"options": {"inner": mode}}
        with mock.patch.object(cuda_graphs, "CudaGraphs", return_value=self.recorder):
            self.step = compile_step(self.model, self.optimizer, cuda_graphs=captures, **how, **arguments)

    def __call__(self, batch: Tensor) -> Tensor:
        *others, last = batch.chunk(self.accumulation)
        for micro in others:
            self.step.accumulate(micro)
            self.between_microbatches()
        return self.step(last)

    def run(self) -> list[Tensor]:
        """Return losses, shards and optimizer state."""
        found: list[Tensor] = []
        for batch in parity.batches(steps=STEPS)[:, dist.get_rank()]:
            found.append(self(batch).clone())
            if self.step.grad_norm is not None:
                found.append(self.step.grad_norm.clone())
        return [*found, *self.values()]

    def values(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [*self.model.parameters(), *(value for value in states if isinstance(value, Tensor))]
        return [(v.to_local() if hasattr(v, "to_local") else v).detach().clone() for v in found]

    @property
    def kept(self) -> int:
        """Bytes of gradients that last from step to step."""
        buckets = self.model.sharded.buckets
        return sum(kept.nbytes for bucket in buckets for kept in bucket.kept_memory())


def compare(mode: str, optimizer: Any, **arguments: Any) -> Trained:
    """Compare captured steps with ordinary ones; return the captured ones."""
    with capturable():
        mine = Trained(mode, optimizer, True, **arguments)
        found, its = mine.run(), Trained(mode, optimizer, False, **arguments).run()
    assert len(found) == len(its)
    for number, (a, b) in enumerate(zip(found, its, strict=True)):
        assert torch.equal(a, b), number
    replays = [recording.replays for recording in mine.recorder.recordings]
    assert replays[-1] >= 2
    assert mine.model.sharded.coordinator.steps == STEPS
    assert len(replays) == min(mine.accumulation, 3), replays
    return mine


@pytest.mark.long_unless("2-eager-adamw-None")
@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=120)
def test_captured_steps_equal_ordinary_ones(mode: str, optimizer: Any, max_norm: float | None) -> None:
    mine = compare(mode, optimizer, max_norm=max_norm)
    assert (mine.kept == 0) is (max_norm is None)  # gradients do not last, unless the norm needs all of them
    assert mine.step.explain().startswith("all buckets" if max_norm is not None else "5 of 5")


@pytest.mark.long_unless("2-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=120)
def test_microbatches(mode: str) -> None:
    assert compare(mode, adamw, accumulation=3).kept


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4, timeout=240)
def test_strategies(strategy: str) -> None:
    for mode in (EAGER, AOT_EAGER):
        compare(mode, adamw, sharding=mesh_arguments(strategy, "cpu"), accumulation=2)


@pytest.mark.slow
@pytest.mark.long_unless("2-None")
@pytest.mark.parametrize("max_norm", [None, 0.05])
@on_ranks(2, timeout=200)
def test_kernels(max_norm: float | None) -> None:
    """A kernel that computes its numbers on the device is captured."""
    with recordable_kernels():
        mine = compare(EAGER, adamw, max_norm=max_norm, compile_optimizer=True)
        assert mine.step.explain().endswith("the optimizer's step is compiled, as 1 kernel")
        kernels = [recorded.func for recorded in mine.recorder.recordings[-1].operators if _is_kernel(recorded.func)]
        assert len(kernels) == len(mine.model.sharded.buckets)


@pytest.mark.long
@on_ranks(2, timeout=200)
def test_kernels_follow_a_schedule() -> None:
    with recordable_kernels(), capturable():
        for max_norm in (None, 0.05):
            follow_a_schedule(compile_optimizer=True, max_norm=max_norm)


@pytest.mark.long
@on_ranks(2, timeout=200)
def test_inductor() -> None:
    with recordable_kernels():
        mine = compare(INDUCTOR, adamw)
    assert mine.step.explain().endswith("as 1 kernel")


def _is_kernel(func: Any) -> bool:
    return not isinstance(func, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))


def follow_a_schedule(**arguments: Any) -> None:
    runs = []
    for captures in (True, False):
        trained = Trained(EAGER, adamw, captures, **arguments)
        schedule = torch.optim.lr_scheduler.LinearLR(trained.optimizer, total_iters=STEPS)
        for batch in parity.batches(steps=STEPS)[:, dist.get_rank()]:
            trained(batch)
            schedule.step()
        runs.append(trained.values())
        (group,) = trained.optimizer.param_groups
        assert isinstance(group["initial_lr"], Tensor)
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


@on_ranks(2, timeout=120)
def test_a_learning_rate_that_is_a_number() -> None:
    """The optimizer steps by itself then. A change is refused, since the graph has the old number."""

    def number(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, capturable=True)

    with capturable(), recordable_kernels():
        mine = compare(EAGER, number, compile_optimizer=True)
        explained = mine.step.explain()
        assert "not compiled; a CUDA graph would repeat the numbers that Python computes" in explained
        (batch,) = parity.batches(steps=1)[:, dist.get_rank()]
        before = mine.values()
        mine.optimizer.param_groups[0]["lr"] = 1e-3
        with pytest.raises(RuntimeError, match=r"AdamW's hyperparameter.*'lr' is not that of the capture"):
            mine(batch)
        for one, other in zip(before, mine.values(), strict=True):
            assert torch.equal(one, other)
        mine.step.reset()
        for _ in range(4):
            mine(batch)
        assert len(mine.recorder.recordings) == 2


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_evaluation_and_checkpoints_between_replays() -> None:
    def trained(captures: bool) -> list[Tensor]:
        with capturable():
            mine = Trained(AOT_EAGER, adamw, captures)
            found: list[Tensor] = []
            batches = parity.batches(steps=12)[:, dist.get_rank()]
            for number, batch in enumerate(batches):
                found.append(mine(batch).clone())
                if number in (4, 8):
                    with torch.no_grad():
                        found.append(mine.model(batch).clone())
                if number == 5:
                    saved = copy.deepcopy((mine.model.state_dict(), mine.optimizer.state_dict()))
                if number == 8:
                    mine.model.load_state_dict(saved[0])
                    mine.optimizer.load_state_dict(saved[1])
                    if captures:
                        with pytest.raises(
                            RuntimeError, match=r"AdamW's hyperparameter.*'lr'.*it was replaced.*call reset\(\)"
                        ):
                            mine(batch)
                        mine.step.reset()
                if number == 9:  # a step that is written out, between captured ones
                    mine.model(batch).backward()
                    mine.optimizer.step()
                    mine.optimizer.zero_grad()
            return [*found, *mine.values()]

    for one, other in zip(trained(True), trained(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("where", ["loss", "backward"])
@on_ranks(2, timeout=120)
def test_a_step_that_cannot_be_captured(where: str) -> None:
    """It has done nothing, and the next one is tried again: in backward, some buckets would have been stepped."""
    reads = False

    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = model(x)
        if reads and where == "loss":
            loss.item()
        return loss

    with capturable():
        mine, other = (Trained(EAGER, adamw, captures, loss_fn=loss_of) for captures in (True, False))

        def hook(module: Any, inputs: Any, outputs: Any) -> None:
            if reads and where == "backward":
                inputs[0].sum().item()

        mine.model.module.blocks[1].register_full_backward_hook(hook)
        for number, batch in enumerate(parity.batches(steps=STEPS)[:, dist.get_rank()]):
            if number == 3:  # the first step, and two of the others, run as usual
                reads = True
                before = mine.values()
                with pytest.raises(RuntimeError, match=r"The step compile_step cannot be captured.*reads values"):
                    mine(batch)
                for one, its in zip(before, mine.values(), strict=True):
                    assert torch.equal(one, its)
                reads = False
            assert torch.equal(mine(batch), other(batch))
        for one, its in zip(mine.values(), other.values(), strict=True):
            assert torch.equal(one, its)
    assert isinstance(mine.recorder.recordings[-1], Recording)
    assert mine.recorder.recordings[-1].replays >= 2


@on_ranks(2, timeout=60)
def test_what_cannot_be_captured_is_refused() -> None:
    def shard(**arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
        model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], **arguments)
        return model, fully_shard_optimizer(sgd(model.parameters()), flat=True)

    model, optimizer = shard()
    with pytest.raises(ValueError, match=r"compile_step captures steps of models.*cuda_graph_mode=True"):
        compile_step(model, optimizer, cuda_graphs=True)
    model, optimizer = shard(cuda_graph_mode=True)
    with pytest.raises(ValueError, match="the model's parameters are on cpu"):
        compile_step(model, optimizer, cuda_graphs=True)
    with pytest.raises(ValueError, match="a scaler, which reads on the host"):
        compile_step(model, optimizer, cuda_graphs=True, scaler=torch.amp.GradScaler("cpu"))
    both = [shard(cuda_graph_mode=True)[0] for _ in range(2)]
    of_two = torch.optim.SGD([param for each in both for param in each.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"captures steps of one model.*the optimizer steps 2"):
        compile_step(both[0], of_two, cuda_graphs=True)
    compile_step(model, optimizer).reset()  # nothing to free
