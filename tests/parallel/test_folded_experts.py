"""Experts that dense tensor-parallel ranks divide too: data-parallel times tensor-parallel ranks hold all of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER, INDUCTOR, raises_everywhere
from pool import on_ranks, shared_folder
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mfsdp_compile import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.cli import main
from mfsdp_compile.diagnostics.measure import allocated
from mfsdp_compile.models.moe import Experts, MoeBlock, MoeConfig, MoeLlama, divide_experts, parallelize
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.passes.guests.solver.simulate import resting_memory
from mfsdp_compile.planning import Candidate, Job
from mfsdp_compile.planning.planner import planned
from mfsdp_compile.planning.trace_model import trace
from mfsdp_compile.planning.workloads import Degrees, Workload, _tokens, divided_moe
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy

CONFIG = MoeConfig(32, 16, 2, 2, 2, 24, experts=8, chosen=2, shared=1, dispatch="all_gather")
RELATIVE = 1e-5
"""Relative to the largest element of all gradients: float32 sums (eps 6e-8) of some hundred terms in another order."""

SHAPES = {"ep 2": (2, 2), "ep 4": (1, 4), "ep 1": (4, 1), "ep 2, etp 2": (1, 2, 2)}
"""Expert data parallel, expert parallel and expert tensor-parallel ranks. Everything else is over 2 x 2 ranks."""


def make(
    shape: str, config: MoeConfig = CONFIG, are_dtensors: bool = False, change: Any = None, **more: Any
) -> MegatronFSDP:
    sizes = SHAPES[shape]
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    experts = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "ep", "etp")[: len(sizes)])
    model = build(config, experts)
    if are_dtensors or len(sizes) > 2:
        divide_experts(model, experts[experts.mesh_dim_names[1:]])
    parallelize(model, dense["tp"])
    if change is not None:
        change(model)
    given = {"device_mesh": dense, "expt_device_mesh": experts} | more
    return fully_shard_model(model, fsdp_unit_modules=[MoeBlock], dp_shard_dim="fsdp", **given)


def build(config: MoeConfig = CONFIG, experts: DeviceMesh | None = None) -> MoeLlama:
    torch.manual_seed(0)
    groups = [experts[name].get_group() for name in experts.mesh_dim_names[1:]] if experts is not None else []
    return MoeLlama(config, *groups)


def call_of(model: MegatronFSDP, mode: str) -> Callable[..., Tensor]:
    if mode == EAGER:
        return model
    torch._dynamo.config.capture_scalar_outputs = True
    return torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})


def batch(step: int, rank: int) -> Tensor:
    """Return tokens and targets, ``[2, batch, length]``, of a data-parallel rank."""
    return torch.randint(0, CONFIG.vocabulary, (2, 2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def as_one_process(name: str, whole: Tensor, parts: int) -> Tensor:
    """Return an expert's ``up`` with the columns of one process, which has one half after the other."""
    if not name.endswith("experts.up") or parts == 1:
        return whole
    return whole.unflatten(2, (parts, 2, -1)).transpose(2, 3).flatten(2)


def train(shape: str, mode: str, steps: int = 2, **more: Any) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Return whole gradients, losses and clipped norms of each step, then weights; and all local tensors."""
    model = make(shape, **more)
    call, parts = call_of(model, mode), (*SHAPES[shape], 1)[2]
    optimizer = fully_shard_optimizer(parity.sgd(model.parameters()))
    found, local = [], []
    for step in range(steps):
        loss = call(*batch(step, dist.get_rank() // 2))
        loss.backward()
        params = dict(model.module.named_parameters())
        here = {name: as_one_process(name, param.grad.full_tensor(), parts) for name, param in params.items()}
        local += [loss.detach(), *(param.grad.to_local().clone() for param in params.values())]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        here |= {"loss": loss.detach(), "norm": norm.full_tensor() if isinstance(norm, DTensor) else norm}
        found.append(here)
        optimizer.step()
        optimizer.zero_grad()
    found.append({n: as_one_process(n, p.full_tensor().detach(), parts) for n, p in model.module.named_parameters()})
    return found, local


def train_alone(config: MoeConfig, steps: int = 2) -> list[dict[str, Tensor]]:
    model, found = build(config), []
    optimizer = parity.sgd(model.parameters())
    for step in range(steps):
        losses = [model(*batch(step, rank)) for rank in range(2)]
        (sum(losses) / 2).backward()
        here = {name: param.grad.clone() for name, param in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(here | {"loss": losses[dist.get_rank() // 2].detach(), "norm": norm})
        optimizer.step()
        optimizer.zero_grad()
    found.append({name: param.detach() for name, param in model.named_parameters()})
    return found


def assert_close(mine: list[dict[str, Tensor]], its: list[dict[str, Tensor]]) -> None:
    for step, (a, b) in enumerate(zip(mine, its, strict=True)):
        assert a.keys() == b.keys()
        largest = max(value.abs().max() for value in b.values() if value.ndim)
        for name, wanted in b.items():
            assert a[name].shape == wanted.shape, name
            scale = largest if wanted.ndim else wanted.abs()
            assert (a[name] - wanted).abs().max() <= RELATIVE * scale, (name, step)


@pytest.mark.long_unless("*-ep 2, etp 2")
@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_training_of_one_process(shape: str) -> None:
    config = replace(CONFIG, dispatch="all_gather" if "etp" in shape else "all_to_all", layers=2)
    assert_close(train(shape, EAGER, config=config)[0], train_alone(config))


@pytest.mark.long_unless("*-{'zero_dp_strategy': 2}")
@pytest.mark.parametrize(
    "given",
    [{"zero_dp_strategy": 0}, {"zero_dp_strategy": 1}, {"zero_dp_strategy": 2}, {"average_in_collective": True}],
    ids=str,
)
@on_ranks(4)
def test_strategies_and_averages(given: dict[str, Any]) -> None:
    config = replace(CONFIG, dispatch="all_to_all", layers=1)
    assert_close(train("ep 2", EAGER, config=config, **given)[0], train_alone(config))


@pytest.mark.long
@pytest.mark.parametrize("outer_strategy", [0, 1])
@on_ranks(8)
def test_hybrid_sharding(outer_strategy: int) -> None:
    """Outer ranks replicate or shard what 2 x 2 ranks hold, experts included."""
    config = replace(CONFIG, dispatch="all_to_all", layers=1)
    dense = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "fsdp", "tp"))
    experts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("outer", "fsdp", "ep"))
    model, alone = parallelize(build(config, experts["fsdp", "ep"]), dense["tp"]), build(config)
    both = ("outer", "fsdp")
    model = fully_shard_model(
        model,
        dense,
        fsdp_unit_modules=[MoeBlock],
        dp_shard_dim="fsdp",
        dp_outer_dim="outer",
        hybrid_fsdp_group=dense[both]._flatten().get_group(),
        outer_dp_sharding_strategy=outer_strategy,
        expt_device_mesh=experts,
        hybrid_fsdp_expt_group=experts[both]._flatten().get_group(),
    )
    assert model.sharded.members.folds_experts
    model(*batch(0, dist.get_rank() // 2)).backward()
    (sum(alone(*batch(0, rank)) for rank in range(4)) / 4).backward()
    mine = {name: param.grad.full_tensor() for name, param in model.module.named_parameters()}
    assert_close([mine], [{name: param.grad for name, param in alone.named_parameters()}])


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@on_ranks(4)
def test_compiled_equals_eager_bitwise(shape: str) -> None:
    config = replace(CONFIG, layers=1, dispatch="all_to_all" if shape == "ep 4" else "all_gather")
    (_, eager), (_, compiled) = (train(shape, mode, config=config) for mode in (EAGER, AOT_EAGER))
    assert all(map(torch.equal, eager, compiled))


@pytest.mark.long
@on_ranks(4, timeout=300)
def test_inductor() -> None:
    config = replace(CONFIG, layers=1)
    assert_close(train("ep 2", INDUCTOR, config=config)[0], train_alone(config))


# -- at rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.long_if("*-ep 2")
@pytest.mark.parametrize("shape", ["ep 2", "ep 4"])
@on_ranks(4)
def test_parameters_at_rest(shape: str) -> None:
    """Bare stacks and DTensors are the same parameters at rest: of all experts."""
    alone = dict(build().named_parameters())
    for are_dtensors in (False, True):
        model = make(shape, are_dtensors=are_dtensors)
        whole = dict(model.full_parameters())
        for name, param in model.module.named_parameters():
            assert torch.equal(param.full_tensor(), alone[name]), name
            assert torch.equal(whole[name], alone[name]), name
            torch.testing.assert_close(param.norm().detach().full_tensor(), alone[name].norm().detach())


@pytest.mark.long
@on_ranks(4)
def test_checkpoints_fit_other_divisions() -> None:
    """Weights and optimizer state are the same, bit for bit, with other numbers of expert-parallel ranks."""
    checkpoints = Checkpoints(shared_folder())

    def trained(shape: str, steps: int, **more: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
        model = make(shape, **more)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for step in range(steps):
            model(*batch(step, dist.get_rank() // 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def wholes(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        held = [optimizer.state[param][key] for param in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
        return [each.full_tensor() for each in (*model.parameters(), *held)]

    model, optimizer = trained("ep 2", 1)
    checkpoints.save(1, model, optimizer)
    expected = wholes(model, optimizer)
    for shape, are_dtensors in (("ep 4", False), ("ep 1", False), ("ep 2", True)):
        other, its = trained(shape, 0, are_dtensors=are_dtensors)
        checkpoints.load(other, its)
        assert all(map(torch.equal, wholes(other, its), expected)), shape


@pytest.mark.long
@on_ranks(4, timeout=120)
def test_training_goes_on_after_a_reset() -> None:
    model = make("ep 2")
    tokens = batch(0, dist.get_rank() // 2)
    found = []
    for again in range(3):
        if again == 2:
            model = copy.deepcopy(model)
        model(*tokens).backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()
        model.reset()
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0], found[2]))


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(error: type[Exception], *fragments: str, **given: Any) -> None:
    with raises_everywhere(error, *fragments):
        make(**given)


@on_ranks(4, timeout=60)
def test_ranks_that_differ() -> None:
    """Ranks with the same experts must agree, wherever they are in the tensor-parallel mesh."""
    rank = dist.get_rank()
    differs = "fully_shard_model, experts"

    def change(model: MoeLlama) -> None:
        if rank % 2:
            next(m for m in model.modules() if isinstance(m, Experts)).up.data[0, 0, 0] += 1

    refused(RuntimeError, "mixture.experts.up", differs, shape="ep 1", change=change)
    refused(RuntimeError, "optim_grads", differs, shape="ep 1", zero_dp_strategy=2 + rank % 2)


@on_ranks(4, timeout=60)
def test_holders_in_other_orders() -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=("fsdp", "ep"))
    refused(ValueError, "not always in increasing order", shape="ep 2", expt_device_mesh=mesh)


@on_ranks(4)
def test_tensor_parallel_ranks_with_the_same_experts() -> None:
    """A mesh with the tensor-parallel dimension, by name, or without it, has data-parallel ranks divide the experts."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("fsdp", "ep", "tp"))
    whole = dict(build().named_parameters())
    for experts in (mesh, mesh["fsdp", "ep"]):
        model = parallelize(build(CONFIG, mesh["fsdp", "ep"]), dense["tp"])
        given = {"device_mesh": dense, "dp_shard_dim": "fsdp", "expt_device_mesh": experts}
        sharded = fully_shard_model(model, fsdp_unit_modules=[MoeBlock], **given)
        assert not sharded.sharded.members.folds_experts
        assert all(torch.equal(param.full_tensor(), whole[name]) for name, param in sharded.module.named_parameters())


def test_no_other_mesh_for_dtensors() -> None:
    """Parameters at rest are over dimensions of the mesh that was given, with which others can be concatenated."""
    with compat.fake_process_group(16):  # two stages of a pipeline, so that the meshes are parts of larger ones
        dense = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("pp", "fsdp", "tp"))["fsdp", "tp"]
        names = ("fsdp", "ep", "etp")
        mesh = init_device_mesh("cpu", (2, 2, 2, 2), mesh_dim_names=("pp", *names))[names]
        module = divide_experts(parallelize(build(replace(CONFIG, layers=1), mesh), dense["tp"]), mesh["ep", "etp"])
        given = {"device_mesh": dense, "dp_shard_dim": "fsdp", "expt_device_mesh": mesh}
        model = fully_shard_model(module, fsdp_unit_modules=[MoeBlock], **given)
        assert model.sharded.members.folds_experts
        for param in (module.layers[0].mixture.experts.up, module.layers[0].mixture.experts.down):
            assert param.device_mesh.mesh_dim_names == ("fsdp", "ep", "etp")


@on_ranks(4, timeout=120)
def test_ranks_that_diverge() -> None:
    """Tensor-parallel ranks that share experts agree on the order of collectives, as data-parallel ranks do."""
    model, rank = make("ep 1"), dist.get_rank()
    tokens = batch(0, rank // 2)
    with raises_everywhere(RuntimeError, "Order of collectives"):
        if rank % 2:
            model(*tokens)
        else:
            model.module.embedding(tokens[0])


# -- plans ------------------------------------------------------------------------------------------------------------

PLANNED = MoeConfig(256, 128, 4, 4, 2, 192, experts=8, chosen=2, shared=1)


@pytest.mark.long
def test_plans(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ["plan", "--model", "mixtral-8x7b", "--world", "64", "--hardware", "h100-ib"]
    assert main([*shared, "--seq", "128", "--checkpoint", "full", "--tp", "2", "--ep", "8", "--etp", "2"]) == 0
    out = capsys.readouterr().out
    assert "46.70 billion parameters" in out
    assert "ZeRO-3, EP 8, ETP 2, TP 2" in out
    for arguments, complaint in (
        (["--tp", "3"], "TP 3 do not divide [64] ranks"),
        (["--tp", "16"], "8 heads of keys and values cannot be divided by 16 tensor-parallel ranks"),
        (["--tp", "2", "--seq", "129"], "sequences of 129 tokens cannot be divided over 2 tensor-parallel ranks"),
        (["--cp", "2"], "cannot be planned with 2 context-parallel ranks"),
    ):
        assert main([*shared, *arguments]) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(tensor=2),
        Degrees(expert=2, tensor=2),
        Degrees(expert=4, tensor=2),
        Degrees(expert=2, tensor=2, expert_tensor=2),
        Degrees(expert=2, expert_tensor=2),
    ],
    ids=str,
)
def test_planned_memory_is_what_a_step_takes(degrees: Degrees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned memory is within 3 % of the measurement: kernels have workspaces, and segments are coarse.

    The other ranks are fake, and nothing but the step allocates. Fake collectives do not keep their inputs, which real
    ones do until they are awaited.
    """
    without_inputs = functools.partial(CostModel, holds_inputs=False)
    monkeypatch.setattr("mfsdp_compile.planning.on_ranks.CostModel", without_inputs)
    work = Workload(
        "moe",
        lambda: MoeLlama(PLANNED),
        [MoeBlock],
        _tokens(PLANNED.vocabulary),
        batch=4,
        length=64,
        dtype=torch.float32,
        divided=divided_moe(PLANNED),
    )
    job = Job(work, hardware("cpu"), solved=False, fused=False)
    traced = trace(work, job.hardware, job.fused, degrees=degrees)
    row = planned(job, traced, Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, 4 // degrees.tensor, degrees=degrees))
    assert traced.parameters == sum(param.numel() for param in MoeLlama(PLANNED).parameters())
    with compat.fake_process_group(4):
        dense = init_device_mesh("cpu", (4 // degrees.tensor, degrees.tensor), mesh_dim_names=("fsdp", "tp"))
        sizes = (4 // degrees.experts_apart, degrees.expert, degrees.expert_tensor)
        experts = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "ep", "etp"))
        module = MoeLlama(PLANNED, *(experts[name].get_group() for name in ("ep", "etp")))
        if degrees.tensor > 1:
            parallelize(module, dense["tp"])
        if degrees.expert_tensor > 1:
            divide_experts(module, experts["ep", "etp"])
        model = fully_shard_model(
            module, dense, fsdp_unit_modules=[MoeBlock], dp_shard_dim="fsdp", expt_device_mesh=experts
        )
        call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager", "report": True, "regions": False})
        tokens = torch.randint(0, PLANNED.vocabulary, (2, 4, 64))

        def step() -> None:
            call(*tokens).backward()

        for _ in range(2):
            step()
            model.zero_grad()
        context = model.sharded.compiled_graphs[-1].context
        resting = sum(resting_memory(context.buckets, job.optimizer, context.other_bytes).values())
        measured = allocated(step)[0] + resting
    torch.compiler.reset()
    assert abs(row.needed / measured - 1) <= 0.03, (row.needed, measured)
