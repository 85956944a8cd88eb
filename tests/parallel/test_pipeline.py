"""Stages of a pipeline, sharded and compiled, under torch's schedules, compared with the whole model in one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B, schedules
from torch.utils.checkpoint import checkpoint
from zoo import Block

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.backend.bucket_infos import bucket_info
from mfsdp_compile.checkpoint import Checkpoints, load
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.diagnostics.measure import allocated, collectives
from mfsdp_compile.parallel.pipeline_parallel import PipelineStage, clip_grad_norm_, held_memory, state_of
from mfsdp_compile.passes.guests.solver.simulate import Category, OptimizerCost, resting_memory
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import quantize

MICROBATCHES = 4


class Layer(nn.Module):
    """A block, with or without activation checkpointing."""

    def __init__(self, checkpointed: bool, width: int) -> None:
        super().__init__()
        self.block = Block(width=width, hidden=11)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


class Chain(nn.Module):
    """A model that can be cut anywhere. Names of layers are their numbers in the whole model."""

    def __init__(self, layers: int = 4, checkpointed: bool = False, width: int = 13) -> None:
        super().__init__()
        self.enter: nn.Module = nn.Linear(8, width)
        self.layers = nn.ModuleDict({str(i): Layer(checkpointed, width) for i in range(layers)})
        self.head: nn.Module = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)

    def part(self, stage: int, stages: int) -> Chain:
        """Return the layers of one stage. The first and last stage include the ends of the model."""
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
    """Return data of shape ``[steps, replicas, rows, ...]``, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(steps, replicas, rows, 8, generator=generator),
        torch.randn(steps, replicas, rows, 5, generator=generator),
    )


def pipeline_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "dp"))


def stage_numbers(rank: int, stages: int, kind: type) -> list[int]:
    """Return the numbers of the stages on a rank of a pipeline with two ranks."""
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
        """Run a step. Returns the losses of the microbatches, on ranks that have the last stage."""
        losses: list[Tensor] = []
        arguments = (x,) if any(stage.is_first for stage in self.stages) else ()
        if any(stage.is_last for stage in self.stages):
            self.schedule.step(*arguments, target=y, losses=losses)
        else:
            self.schedule.step(*arguments)
        return losses

    def check_gradients(self, alone: Chain) -> None:
        """Compare gradients with one process, up to 1e-5 of the largest element.

        The sums, of at most 200 terms, are in another order.
        """
        expected = dict(alone.named_parameters())
        largest = max(p.grad.abs().max().item() for p in expected.values())  # type: ignore[union-attr]
        for name, param in self.named():
            mine, its = param.grad.full_tensor(), expected[name].grad  # type: ignore[union-attr]
            difference = (mine - its).abs().max().item()
            assert difference <= 1e-5 * max(its.abs().max().item(), 1e-2 * largest), f"{name}: {difference}"


def backward_alone(alone: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Run the backward of the mean over replicas. Returns the loss of each replica."""
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


@pytest.mark.long_unless("*-Schedule1F1B-eager-")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
@on_ranks(4)
def test_one_stage_per_rank(kind: type, mode: str, checkpointed: bool) -> None:
    train(kind, mode, checkpointed=checkpointed)


@pytest.mark.long_unless("*-ScheduleInterleaved1F1B-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, schedules.ScheduleLoopedBFS])
@on_ranks(4)
def test_several_stages_per_rank(kind: type, mode: str) -> None:
    train(kind, mode, stages=4, steps=2)


@pytest.mark.long_if("*-ScheduleZBVZeroBubble")
@pytest.mark.parametrize(
    "kind",
    [
        schedules.ScheduleInterleavedZeroBubble,
        pytest.param(
            schedules.ScheduleZBVZeroBubble,
            marks=pytest.mark.skipif(
                compat.TORCH_VERSION < (2, 13), reason="torch's ranks send to themselves, over gloo"
            ),
        ),
    ],
)
@on_ranks(4)
def test_backwards_in_two_parts_run_in_one(kind: type) -> None:
    with parity.first_rank_warns(RuntimeWarning, "splits the backward into two"):
        train(kind, EAGER, stages=4, steps=2)


@pytest.mark.long
@pytest.mark.slow
@on_ranks(4)
def test_inductor() -> None:
    train(Schedule1F1B, INDUCTOR, steps=2, checkpointed=True, stage_options={"keep_gathered": True})


STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
HELD: list[dict[str, Any]] = [{}, {"keep_gathered": True}, {"reduce_each": True}]


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_what_is_held_changes_no_number(strategy: str, mode: str) -> None:
    for held in HELD:
        train(Schedule1F1B, mode, steps=2, zero_dp_strategy=strategy, stage_options=held)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["rowwise", "nvfp4"])
@on_ranks(4)
def test_quantized_gathers(scaling: Any) -> None:
    """Stages quantize their weights once per step, and their code gathers what the eager path gathers."""
    mesh, found = pipeline_mesh(), []
    for mode in (EAGER, AOT_EAGER):
        policy = MixedPrecisionPolicy(param_comm_dtype=quantize.dtype_of(scaling), param_comm_scaling=scaling)
        chain = parity.build(functools.partial(Chain, width=16))  # rows of 16, which share a scale with nvfp4
        pipeline = Pipeline(Schedule1F1B, mode, mesh, chain, mixed_precision_policy=policy)
        optimizer = fully_shard_optimizer(parity.sgd(pipeline.params))
        results: list[Tensor] = []
        replica = mesh["dp"].get_local_rank()
        for x, y in zip(*data(3, mesh["dp"].size()), strict=True):
            with mock.patch.object(compat, "all_reduce", side_effect=compat.all_reduce) as reduces:
                results += pipeline.step(x[replica], y[replica])
            assert [call.args[1] for call in reduces.call_args_list] == ["max"]  # of scales, for all microbatches
            optimizer.step()
            optimizer.zero_grad()
        found.append([*results, *(param.to_local().detach() for param in pipeline.params)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
@pytest.mark.long
def test_param_dtype(mode: str) -> None:
    """Stages of a float32 model send and compute in ``param_dtype``, as a bfloat16 model of the same weights."""
    mesh, found = pipeline_mesh(), []
    replica = mesh["dp"].get_local_rank()
    for dtype, policy in ((torch.bfloat16, {}), (torch.float32, {"param_dtype": torch.bfloat16})):
        chain = parity.build(Chain).bfloat16().to(dtype)
        pipeline = Pipeline(Schedule1F1B, mode, mesh, chain, mixed_precision_policy=MixedPrecisionPolicy(**policy))
        optimizer = fully_shard_optimizer(parity.sgd(pipeline.params))
        results: list[Tensor] = []
        for x, y in zip(*data(2, mesh["dp"].size()), strict=True):
            results += pipeline.step(x[replica].bfloat16().to(dtype), y[replica].bfloat16())
            optimizer.step()
            optimizer.zero_grad()
        found.append([*results, *(param.to_local().detach() for param in pipeline.params)])
    for a, b in zip(*found, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@on_ranks(4)
def test_bfloat16_sums_are_float32_and_whole() -> None:
    """Gradients of microbatches are rounded once each and their sum is not: it equals float32 sums in one process."""
    mesh = pipeline_mesh()
    chain = parity.build(Chain).to(torch.bfloat16)
    assert isinstance(chain, Chain)
    pipeline = Pipeline(Schedule1F1B, EAGER, mesh, chain)
    (x,), (y,) = data(1, mesh["dp"].size())
    replica = mesh["dp"].get_local_rank()
    pipeline.step(x[replica].bfloat16(), y[replica].bfloat16())
    total = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in chain.named_parameters()}
    for inputs, targets in zip(x.bfloat16().flatten(0, 1).split(2), y.bfloat16().flatten(0, 1).split(2), strict=True):
        chain.zero_grad()
        loss_of(chain(inputs), targets).backward()
        for name, param in chain.named_parameters():
            total[name] += param.grad.float()  # type: ignore[union-attr]
    for name, param in pipeline.named():
        expected = total[name] / (MICROBATCHES * mesh["dp"].size())
        # Sums are sent between ranks in bfloat16, as without a pipeline. Each of two is rounded once, by 2**-8.
        difference = (param.grad.full_tensor() - expected).abs().max()  # type: ignore[union-attr]
        assert difference <= 2**-7 * expected.abs().max()


# -- a step, and another one ------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_steps_of_the_schedule_add_up(mode: str) -> None:
    """Gradients of several schedule steps add up.

    After each step, torch divides the whole gradient of a parameter by the number of microbatches. This package keeps
    what was there before.
    """
    mesh = pipeline_mesh()
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)
    pipeline = Pipeline(Schedule1F1B, mode, mesh, chain)
    replica = mesh["dp"].get_local_rank()
    for x, y in zip(*data(3, mesh["dp"].size()), strict=True):
        pipeline.step(x[replica], y[replica])
        backward_alone(chain, x, y)
        pipeline.check_gradients(chain)


@pytest.mark.long
@pytest.mark.parametrize("held", [{}, {"keep_gathered": True}], ids=["", "keep_gathered"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_evaluation_and_other_numbers_of_microbatches(mode: str, held: dict[str, Any]) -> None:
    mesh = pipeline_mesh()
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)
    pipeline = Pipeline(Schedule1F1B, mode, mesh, chain, stage_options=held)
    (stage,), (model,) = pipeline.stages, pipeline.models
    replica = mesh["dp"].get_local_rank()
    for microbatches, x, y in zip((4, 2, 8), *data(3, mesh["dp"].size(), rows=32), strict=True):
        # A stage of torch 2.11 accepts microbatches of one size only.
        rows = 16 if compat.TORCH_VERSION >= (2, 13) else 4 * microbatches
        x, y = x[:, :rows], y[:, :rows]
        pipeline.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)

        def evaluate(x: Tensor, y: Tensor) -> None:
            arguments = (x,) if stage.is_first else ()
            output = pipeline.schedule.eval(*arguments, target=y if stage.is_last else None)
            assert all(bucket.resident is None for bucket in model.sharded.buckets)
            assert all(param.grad is None for param in pipeline.params)
            if stage.is_last:
                torch.testing.assert_close(output, chain(x).detach(), rtol=1e-5, atol=1e-6)

        if compat.TORCH_VERSION >= (2, 13):  # otherwise torch's schedule has no gradients of activations afterwards
            evaluate(x[replica], y[replica])
        pipeline.step(x[replica], y[replica])
        backward_alone(chain, x, y)
        pipeline.check_gradients(chain)
        model.zero_grad()
        chain.zero_grad()
        evaluate(x[replica], y[replica])


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_torchs_own_stage_works_too(mode: str) -> None:
    """torch's own stage class also works. It reduces the gradients of each microbatch."""
    train(Schedule1F1B, mode, steps=2, stage_class=torch.distributed.pipelining.PipelineStage)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_turns_of_several_stages_are_known(mode: str) -> None:
    """After a step, the turns of several stages are known, and ranks agree on nothing through the store."""
    mesh = pipeline_mesh()
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)
    pipeline = Pipeline(ScheduleInterleaved1F1B, mode, mesh, chain, stages=4)
    asked: list[Sequence[str]] = []
    (x,), (y,) = data(1, mesh["dp"].size())
    for _ in range(3):
        asked.clear()
        for model in pipeline.models:
            model.sharded.coordinator.agree = lambda topic, lines, patience=1.5, epoch=0: asked.append(lines)
        pipeline.step(x[0], y[0])
    assert not asked


# -- communication and memory -----------------------------------------------------------------------------------------

COUNTS: dict[str, tuple[dict[str, Any], Callable[[int], tuple[int, int, int]]]] = {
    "as it is": ({}, lambda m: (2 * m, 0, 1)),
    "keep_gathered=True": ({"keep_gathered": True}, lambda m: (0, 1, 1)),
    "reduce_each=True": ({"reduce_each": True}, lambda m: (2 * m, 0, m)),
}
"""Collectives per bucket and step of m microbatches: gathers at each use, gathers of what stays, reduce-scatters."""


@pytest.mark.long
@pytest.mark.parametrize("held", COUNTS)
@on_ranks(4)
def test_collectives(held: str) -> None:
    """Compiled 1F1B runs exactly the expected collectives.

    The first stage's backward does not need the first bucket.
    """
    options, count = COUNTS[held]
    mesh = pipeline_mesh()
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)
    pipeline = Pipeline(Schedule1F1B, AOT_EAGER, mesh, chain, stage_options=options)
    (x,), (y,) = data(1, mesh["dp"].size())
    optimizer = fully_shard_optimizer(parity.sgd(pipeline.params))

    def step() -> None:
        pipeline.step(x[0], y[0])
        optimizer.step()
        optimizer.zero_grad()

    step()
    counts = collectives(step)
    buckets, is_last = len(pipeline.models[0].sharded.buckets), pipeline.stages[0].is_last
    gathers, kept, reductions = count(MICROBATCHES)
    unneeded = 0 if is_last or not gathers else MICROBATCHES
    assert counts["all_gather_into_tensor"] == gathers * buckets - unneeded, counts
    assert counts["all_gather_into_tensor_out"] == kept * buckets, counts
    assert counts["reduce_scatter_tensor"] == reductions * buckets, counts
    assert counts["all_reduce"] == 0, counts


@contextlib.contextmanager
def lone_stage(mode: str, **held: Any) -> Any:
    """Yield a pipeline of one stage, in one process of a fake world, so that all allocations are its own."""
    model = fully_shard_model(nn.Sequential(*(zoo.Wide() for _ in range(6))), fsdp_unit_modules=[zoo.Wide])
    call: Any = model
    if mode != EAGER:
        call = torch.compile(model, backend="mfsdp", options={"inner": mode})
    stage = PipelineStage(call, 0, 1, torch.device("cpu"), group=dist.new_group([0]), **held)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_of)
    x = torch.randn(MICROBATCHES, zoo.Wide.WIDTH)
    for _ in range(2):
        schedule.step(x, target=x)
        model.zero_grad_buffer()
    yield model, lambda: schedule.step(x, target=x)


@pytest.mark.long_unless("eager-*")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("held", HELD, ids=str)
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
def test_memory(mode: str, held: dict[str, Any]) -> None:
    """With all forwards before the first backward (GPipe), gathered parameters are in memory once for all of them."""
    with lone_stage(mode, **held) as (model, step):
        predicted = held_memory(model)
        bucket = model.sharded.buckets[0].plan.gathered_bytes
        shards = sum(b.plan.shard_bytes for b in model.sharded.buckets)
        assert predicted.gathered == (6 if "keep_gathered" in held else 2) * bucket
        at_rest = resting_memory([bucket_info(b.plan, b.topology) for b in model.sharded.buckets], OptimizerCost())
        assert at_rest[Category.SHARDS] == shards
        assert at_rest[Category.GATHERED] == (6 * bucket if "keep_gathered" in held else 0)
        assert predicted.gradients == (shards if "reduce_each" in held else 6 * bucket)
        peak, stays = allocated(step)
    # In addition: gradients of a unit (single, packed, in reduction), results of reductions, activations.
    others = 3 * bucket + shards + (256 << 10)
    assert peak <= predicted.gathered + predicted.gradients + others, (peak, predicted)
    assert peak >= predicted.gathered + predicted.gradients - bucket
    assert stays <= shards + (16 << 10)  # for the gradients


# -- failures ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_mistakes_are_explained() -> None:
    mesh = pipeline_mesh()
    group, rank, device = mesh["pp"].get_group(), mesh["pp"].get_local_rank(), torch.device("cpu")
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)
    with parity.raises_everywhere(TypeError, "PipelineStage takes the model that fully_shard_model returned"):
        PipelineStage(chain.part(rank, 2), rank, 2, device, group=group)
    everywhere = fully_shard_model(parity.build(Chain), fsdp_unit_modules=[Layer])
    with parity.raises_everywhere(ValueError, "cannot hold the same stage and different ones", "mesh['dp']"):
        PipelineStage(everywhere, rank, 2, device, group=group)
    with parity.raises_everywhere(ValueError, "has 2 dimensions, ('pp', 'dp')", "dp_shard_dim"):
        fully_shard_model(chain.part(rank, 2), mesh, fsdp_unit_modules=[Layer])

    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    same_names = [
        fully_shard_model(nn.Sequential(nn.Linear(4, 4)), mesh["dp"], fsdp_unit_modules=[nn.Linear]) for _ in "ab"
    ]
    with parity.raises_everywhere(ValueError, "Two stages of this rank have a 'module.0.weight'"):
        state_of(same_names)
    divided = fully_shard_model(
        parity.build(Chain),
        outer,
        dp_shard_dim="inner",
        dp_outer_dim="outer",
        hybrid_fsdp_group=outer["outer", "inner"]._flatten().get_group(),
        outer_dp_sharding_strategy="optim",
        fsdp_unit_modules=[Layer],
    )
    with parity.raises_everywhere(ValueError, "keep_gathered=True is not supported", "HFSDP"):
        divided.set_accumulation(keep_gathered=True)

    model = fully_shard_model(chain.part(rank, 2), mesh["dp"], fsdp_unit_modules=[Layer])
    x = torch.randn(2, 8 if rank == 0 else 13)
    PipelineStage(model, rank, 2, device, group=group)
    options = {"inner": AOT_EAGER, "reshard_after_forward": False}
    with parity.raises_everywhere(torch._dynamo.exc.BackendCompilerFailed, "is a stage of a pipeline", "keep_gathered"):
        torch.compile(model, backend="mfsdp", options=options)(x)
    model.set_accumulation(whole_gradients=True)
    with model.no_sync():
        model(x).sum().backward()
    with parity.raises_everywhere(RuntimeError, "during a step"):
        model.set_accumulation()


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params", "HSDP optim_grads_params", "HFSDP"])
@on_ranks(4)
def test_accumulation_without_a_pipeline(strategy: str, mode: str) -> None:
    """With accumulation, each bucket is reduced and gathered once per step. The setting may change between steps."""
    model = fully_shard_model(parity.build(Chain), fsdp_unit_modules=[Layer], **mesh_arguments(strategy))
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    alone = parity.build(Chain)
    optimizers = [fully_shard_optimizer(parity.sgd(model.parameters())), parity.sgd(alone.parameters())]
    x, y = data(3, dist.get_world_size(), rows=6)
    buckets = len(model.sharded.buckets)

    def step(inputs: Tensor, targets: Tensor) -> None:
        rank = dist.get_rank()
        for i, (a, b) in enumerate(zip(inputs[rank].chunk(3), targets[rank].chunk(3), strict=True)):
            with model.sync() if i == 2 else model.no_sync():
                (loss_of(call(a), b) / 3).backward()

    for keeps, inputs, targets in zip((True, False, True), x, y, strict=True):
        model.set_accumulation(whole_gradients=keeps, keep_gathered=keeps and strategy != "HFSDP")
        counts = collectives(functools.partial(step, inputs, targets))
        if keeps and strategy == "optim_grads_params":
            assert counts["all_gather_into_tensor"] == 0, counts
            assert counts["all_gather_into_tensor_out"] == buckets, counts
        if keeps:
            assert counts["reduce_scatter_tensor"] == (2 if strategy == "HFSDP" else 1) * buckets, counts
        backward_alone(alone, inputs, targets)
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad, rtol=1e-5, atol=1e-6)
        for each in optimizers:
            each.step()
            each.zero_grad()


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_gradients_of_inputs_alone_add_nothing(strategy: str) -> None:
    """``torch.autograd.grad`` of inputs adds nothing to deferred gradients, although compiled code computes them.

    torch's stages learn the shapes of gradients that way.
    """
    model = fully_shard_model(parity.build(Chain), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    model.set_accumulation(whole_gradients=True)
    call = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER})
    alone = parity.build(Chain)
    (x,), _ = data(1, 2, rows=3)
    for turn in range(2):  # before there is a sum, and after
        inputs = x[dist.get_rank()].clone().requires_grad_()
        torch.autograd.grad(call(inputs).sum(), inputs)
        with model.sync() if turn else model.no_sync():
            call(inputs).pow(2).sum().backward()
        for each in x:
            (alone(each).pow(2).sum() / 2).backward()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        parity.close(f"gradient of {tuple(its.shape)}", mine.grad.full_tensor(), its.grad)


SECONDS = 5.0
"""Timeout of process groups of the next test. Ranks may need longer on a machine that does other work."""


def short_mesh() -> DeviceMesh:
    """Return a mesh like ``pipeline_mesh``, with a timeout that a test can wait for."""
    ranks, mine = torch.arange(4).view(2, 2), dist.get_rank()
    groups = []
    for sets in (ranks.t().tolist(), ranks.tolist()):
        made = [dist.new_group(each, timeout=timedelta(seconds=SECONDS)) for each in sets]
        groups.append(next(group for group, each in zip(made, sets, strict=True) if mine in each))
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("pp", "dp"))


class Failing(nn.Module):
    """Runs in front of a stage, and raises in the third forward after it is armed."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        self.left = -1

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise ValueError("a bad batch")
        return self.chain(x)


@on_ranks(4, timeout=120)
def test_a_stage_that_raises() -> None:
    """If a stage raises on one rank, the others raise after their timeout, and training continues after a reset."""
    mesh = short_mesh()
    rank, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)
    failing = Failing(chain.part(rank, 2))
    model = fully_shard_model(failing, mesh["dp"], fsdp_unit_modules=[Layer])
    steps = list(zip(*data(2, 2), strict=True))

    def step(mesh: DeviceMesh, x: Tensor, y: Tensor) -> None:
        stage = PipelineStage(model, rank, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
        schedule.step(x[replica]) if stage.is_first else schedule.step(target=y[replica])

    step(mesh, *steps[0])
    model.zero_grad_buffer()
    before = [param.to_local().clone() for param in model.parameters()]
    failing.left = 4 if (rank, replica) == (1, 0) else -1  # one forward infers the shapes
    begun = time.monotonic()
    with contextlib.suppress(RuntimeError):
        step(mesh, *steps[1])
        raise AssertionError("nothing was raised")
    # The ranks of the pipeline may learn of it one after the other.
    assert time.monotonic() - begun < 4 * SECONDS + 20
    failing.left = -1
    dist.barrier()
    model.reset()
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    step(short_mesh(), *steps[1])
    backward_alone(chain, *steps[1])
    expected = dict(chain.named_parameters())
    for name, param in model.module.named_parameters():
        its = expected[name.removeprefix("chain.")].grad
        torch.testing.assert_close(param.grad.full_tensor(), its, rtol=1e-5, atol=1e-6)


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(4)
def test_checkpoints() -> None:
    """All stages in one folder load into one stage on all ranks, and back; a folder per stage works too."""
    folder: list[Any] = [Path(tempfile.mkdtemp()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    root = folder[0]
    mesh = pipeline_mesh()
    replica = mesh["dp"].get_local_rank()
    chain = parity.build(Chain)
    assert isinstance(chain, Chain)

    def train(pipeline: Pipeline, optimizer: Any, x: Tensor, y: Tensor) -> None:
        pipeline.step(x[replica], y[replica])
        optimizer.step()
        optimizer.zero_grad()

    def fresh() -> tuple[Pipeline, Any]:
        torch.manual_seed(9)
        pipeline = Pipeline(ScheduleInterleaved1F1B, EAGER, mesh, Chain(), stages=4)
        return pipeline, fully_shard_optimizer(torch.optim.AdamW(pipeline.params, lr=1e-2))

    first, second = zip(*data(2, 2), strict=True)
    pipeline = Pipeline(ScheduleInterleaved1F1B, EAGER, mesh, chain, stages=4)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(pipeline.params, lr=1e-2))
    train(pipeline, optimizer, *first)
    dcp.save(state_of(pipeline.models, optimizer), checkpoint_id=root / "all")
    for number, model in zip((stage.stage_index for stage in pipeline.stages), pipeline.models, strict=True):
        Checkpoints(root / f"stage-{number}").save(1, model)
    train(pipeline, optimizer, *second)

    again, its_optimizer = fresh()
    for model in again.models:
        load(root / "all", model, its_optimizer, allow_unexpected="*")
    train(again, its_optimizer, *second)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(pipeline.params, again.params, strict=True))

    whole = fully_shard_model(Chain(), fsdp_unit_modules=[Layer])
    load(root / "all", whole, fully_shard_optimizer(torch.optim.AdamW(whole.parameters())))
    each, _ = fresh()
    for number, model in zip((stage.stage_index for stage in each.stages), each.models, strict=True):
        Checkpoints(root / f"stage-{number}").load(model)
    expected = {name: param.full_tensor() for name, param in whole.module.named_parameters()}
    for name, param in each.named():
        assert torch.equal(param.full_tensor(), expected[name]), name
