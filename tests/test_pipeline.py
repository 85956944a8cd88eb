"""Stages of a pipeline, each sharded and compiled, under torch's schedules: against the whole model in one process."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules
from torch.utils.checkpoint import checkpoint
from zoo import Block

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.examples.measuring import collectives
from mfsdp_compile.pipelining import PipelineStage, clip_grad_norm_, held_memory

MICROBATCHES = 4


class Layer(nn.Module):
    """A block, checkpointed or not."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.block = Block(width=13, hidden=11)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


class Chain(nn.Module):
    """A model that can be cut anywhere: names of layers are their numbers in the whole."""

    def __init__(self, layers: int = 4, checkpointed: bool = False) -> None:
        super().__init__()
        self.enter: nn.Module = nn.Linear(8, 13)
        self.layers = nn.ModuleDict({str(i): Layer(checkpointed) for i in range(layers)})
        self.head: nn.Module = nn.Linear(13, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)

    def part(self, stage: int, stages: int) -> Chain:
        """The layers of one stage, with the ends at the ends."""
        part = copy.deepcopy(self)
        each = len(self.layers) // stages
        for name in self.layers:
            if int(name) // each != stage:
                del part.layers[name]
        if stage > 0:
            part.enter = nn.Identity()
        if stage < stages - 1:
            part.head = nn.Identity()
        return part


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).pow(2).mean()


def data(steps: int, replicas: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """``[steps, replicas, rows, ...]``, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(steps, replicas, rows, 8, generator=generator),
        torch.randn(steps, replicas, rows, 5, generator=generator),
    )


def pipeline_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))


def stage_numbers(rank: int, stages: int, kind: type) -> list[int]:
    """Of the stages on a rank of the pipeline, out of two."""
    if kind in (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV):
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, 2))


class Pipeline:
    """This rank's stages, and a schedule for them."""

    def __init__(
        self,
        kind: type,
        mode: str,
        mesh: DeviceMesh,
        chain: Chain,
        *,
        stages: int = 2,
        microbatches: int = MICROBATCHES,
        stage_class: type = PipelineStage,
        stage_options: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **sharding: Any,
    ) -> None:
        group = mesh["pp"].get_group()
        rank = mesh["pp"].get_local_rank()
        sharding = {"device_mesh": mesh["dp"]} | sharding
        self.models, self.stages = [], []
        for number in stage_numbers(rank, stages, kind):
            model = fully_shard_model(chain.part(number, stages), fsdp_unit_modules=[Layer], **sharding)
            call: Any = model
            if mode != EAGER:
                call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode, **(options or {})})
            self.models.append(model)
            self.stages.append(
                stage_class(call, number, stages, torch.device("cpu"), group=group, **(stage_options or {}))
            )
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        self.schedule = kind(self.stages[0] if single else self.stages, microbatches, loss_fn=loss_of)
        self.params = [param for model in self.models for param in model.parameters()]

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return [pair for model in self.models for pair in model.module.named_parameters()]

    def step(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Losses of the microbatches, on the ranks that have the last stage."""
        losses: list[Tensor] = []
        arguments = (x,) if any(stage.is_first for stage in self.stages) else ()
        if any(stage.is_last for stage in self.stages):
            self.schedule.step(*arguments, target=y, losses=losses)
        else:
            self.schedule.step(*arguments)
        return losses

    def check_gradients(self, alone: Chain) -> None:
        """Against one process: sums in another order, of tensors of at most 200 terms; 1e-5 of the largest element."""
        expected = dict(alone.named_parameters())
        largest = max(p.grad.abs().max().item() for p in expected.values())  # type: ignore[union-attr]
        for name, param in self.named():
            mine, its = param.grad.full_tensor(), expected[name].grad  # type: ignore[union-attr]
            difference = (mine - its).abs().max().item()
            assert difference <= 1e-5 * max(its.abs().max().item(), 1e-2 * largest), f"{name}: {difference}"


def backward_alone(alone: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean over replicas; returns the loss of each."""
    losses = [loss_of(alone(a), b) for a, b in zip(x, y, strict=True)]
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
    return torch.stack(losses).detach()


def train(kind: type, mode: str, *, steps: int = 3, checkpointed: bool = False, **arguments: Any) -> None:
    mesh = arguments.pop("mesh", None) or pipeline_mesh()
    chain = parity.build(lambda: Chain(checkpointed=checkpointed))
    assert isinstance(chain, Chain)
    pipeline = Pipeline(kind, mode, mesh, chain, **arguments)
    optimizer = fully_shard_optimizer(parity.sgd(pipeline.params))
    alone, sgd = chain, parity.sgd(chain.parameters())
    replica, replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for x, y in zip(*data(steps, replicas), strict=True):
        losses = pipeline.step(x[replica], y[replica])
        expected = backward_alone(alone, x, y)
        if losses:
            assert abs(torch.stack(losses).mean() - expected[replica]) <= 1e-5 * expected[replica]
        pipeline.check_gradients(alone)
        norm = clip_grad_norm_(pipeline.models, 0.5, mesh["pp"].get_group())
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.5), rtol=1e-5, atol=0)
        for each in (optimizer, sgd):
            each.step()
            each.zero_grad()
    expected_params = dict(alone.named_parameters())
    for name, param in pipeline.named():
        torch.testing.assert_close(param.full_tensor(), expected_params[name], rtol=1e-5, atol=1e-6)


# -- numbers ----------------------------------------------------------------------------------------------------------

INTERLEAVED = {"stages": 4}


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@on_ranks(4)
def test_one_stage_per_rank(kind: type, mode: str, checkpointed: bool) -> None:
    train(kind, mode, checkpointed=checkpointed)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, schedules.ScheduleLoopedBFS])
@on_ranks(4)
def test_several_stages_per_rank(kind: type, mode: str) -> None:
    train(kind, mode, stages=4, steps=2)
