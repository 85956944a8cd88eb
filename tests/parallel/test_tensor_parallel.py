"""Models that are divided over tensor-parallel ranks have the losses and gradients of one process."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
import zoo
from failing import PATIENCE, Failing
from parity import AOT_EAGER, EAGER, INDUCTOR, raises_everywhere
from pool import Pools, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_optimizer_state_dict, full_state_dict
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig, parallelize
from mfsdp_compile.runtime.geometry.partition import Partition
from mfsdp_compile.runtime.plan.partition import Partitioner

CONFIG = LlamaConfig(vocabulary=50, width=32, layers=2, heads=4, kv_heads=2, hidden=44)
BOUND = 1e-5
"""Largest difference relative to the largest element: float32 sums in another order, through two layers."""


class Recomputing(Block):
    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        return checkpoint(super().forward, x, rotation, use_reentrant=False)


def build(recompute: bool = False, config: LlamaConfig = CONFIG) -> Llama:
    torch.manual_seed(0)
    model = Llama(config)
    for layer in model.layers:
        layer.__class__ = Recomputing if recompute else Block
    return model


def batches(step: int, ranks: int) -> Tensor:
    """Return tokens and targets of shape ``[ranks, 2 (tokens, targets), 3, 8]``."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, CONFIG.vocabulary, (ranks, 2, 3, 8), generator=generator)


def mesh_of(shape: str) -> tuple[DeviceMesh, dict[str, Any]]:
    """Return a mesh such as ``"dp2 tp2"``, and the arguments of ``fully_shard_model`` that describe it."""
    names, sizes = zip(*((part[:-1], int(part[-1])) for part in shape.split()), strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    arguments: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp"}
    if "outer" in names:
        arguments |= {
            "dp_outer_dim": "outer",
            "hybrid_fsdp_group": mesh["outer", "dp"]._flatten().get_group(),
        }
    return mesh, arguments


def data_rank(mesh: DeviceMesh) -> tuple[int, int]:
    """Return this rank's number among the ranks with their own data, and the number of these."""
    rank, size = mesh.get_local_rank("dp"), mesh["dp"].size()
    if "outer" in mesh.mesh_dim_names:
        return mesh.get_local_rank("outer") * size + rank, size * mesh["outer"].size()
    return rank, size


def make(
    shape: str,
    mode: str,
    sequence: bool = False,
    recompute: bool = False,
    config: LlamaConfig = CONFIG,
    **arguments: Any,
) -> tuple[Any, Callable[..., Tensor], DeviceMesh]:
    mesh, described = mesh_of(shape)
    model = parallelize(build(recompute, config), mesh["tp"], sequence)
    sharded = fully_shard_model(model, fsdp_unit_modules=[Block], **described, **arguments)
    if mode == EAGER:
        return sharded, sharded, mesh
    return sharded, torch.compile(sharded, backend="mfsdp", fullgraph=True, options={"inner": mode}), mesh


def train(
    model: Any, call: Callable[..., Tensor], mesh: DeviceMesh, steps: range = range(3)
) -> list[dict[str, Tensor]]:
    """Return whole gradients of each step, clipped norms and mean losses, and the parameters at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # see test_strategies: signs of tiny gradients
    rank, ranks = data_rank(mesh)
    found = []
    for step in steps:
        tokens, targets = batches(step, ranks)[rank]
        loss = call(tokens, targets)
        loss.backward()
        all_losses = loss.detach().clone()
        dist.all_reduce(all_losses, group=model.sharded.group)
        gradients = {name: param.grad.full_tensor() for name, param in model.module.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append({**gradients, "loss": all_losses / ranks, "norm": norm})
        optimizer.step()
        optimizer.zero_grad()
    found.append({name: param.full_tensor().detach() for name, param in model.module.named_parameters()})
    return found


def train_alone(
    ranks: int, recompute: bool = False, config: LlamaConfig = CONFIG, steps: range = range(3)
) -> list[dict[str, Tensor]]:
    model = build(recompute, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    found = []
    for step in steps:
        loss = torch.stack([model(tokens, targets) for tokens, targets in batches(step, ranks)]).mean()
        loss.backward()
        gradients = {name: param.grad.clone() for name, param in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append({**gradients, "loss": loss.detach(), "norm": norm})
        optimizer.step()
        optimizer.zero_grad()
    found.append({name: param.detach() for name, param in model.named_parameters()})
    return found


def assert_close(mine: list[dict[str, Tensor]], its: list[dict[str, Tensor]]) -> None:
    for step, (a, b) in enumerate(zip(mine, its, strict=True)):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].shape == b[name].shape
            error = (a[name] - b[name]).abs().max() / b[name].abs().max()
            assert error <= BOUND, f"{name}, step {step}: {error:.1e}"


ROWS = [
    (EAGER, False, False),
    (EAGER, True, True),
    (AOT_EAGER, False, True),
    (AOT_EAGER, True, False),
    (INDUCTOR, True, False),
    (INDUCTOR, True, True),
]


COUNTS = {"whole between layers": ((0, 0, 7), (1, 0, 2)), "divided by positions": ((4, 4, 2), (3, 2, 1))}
"""All-gathers, reduce-scatters and all-reduces of a step over tensor-parallel ranks: of a layer, and of the rest."""


@pytest.mark.long_unless("eager-*")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
def test_communication_of_a_step(mode: str, name: str, layers: int) -> None:
    mesh, arguments = mesh_of("dp2 tp2")
    module = parallelize(Llama(replace(CONFIG, layers=layers)), mesh["tp"], sequence=name != "whole between layers")
    model = fully_shard_model(module, fsdp_unit_modules=[Block], tp_dim="tp", **arguments)
    call: Any = model
    if mode != EAGER:
        call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
    tokens = batches(0, 1)[0]
    for _ in range(2):  # the order of units is known afterwards
        call(*tokens).backward()
        model.zero_grad()
    counts = collectives(lambda: call(*tokens).backward())
    layer, ends = COUNTS[name]
    gathers, reductions, sums = (layers * a + b for a, b in zip(layer, ends, strict=True))
    buckets = layers + 2
    # The last unit's bucket is kept for the backward. The embedding's is not needed there.
    again = buckets - 2
    assert counts["all_gather_into_tensor"] == gathers + buckets + again, counts
    assert counts["reduce_scatter_tensor"] == reductions + buckets, counts
    assert counts["all_reduce"] == sums + (mode == EAGER), counts  # eager ranks find out which parameters were used


@pytest.mark.long_unless("*-eager-True-*")
@pytest.mark.parametrize(("mode", "sequence", "recompute"), ROWS)
@on_ranks(4)
def test_equals_one_process(mode: str, sequence: bool, recompute: bool) -> None:
    config = CONFIG if mode == EAGER else replace(CONFIG, layers=1)  # layers take long to compile
    model, call, mesh = make("dp2 tp2", mode, sequence, recompute, config)
    assert_close(train(model, call, mesh), train_alone(2, recompute, config))


@pytest.mark.long
@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(4)
def test_compiled_equals_eager_bitwise(sequence: bool) -> None:
    runs = [train(*make("dp2 tp2", mode, sequence)) for mode in (EAGER, AOT_EAGER)]
    for a, b in zip(*runs, strict=True):
        for name in a:
            assert torch.equal(a[name], b[name]), name


@pytest.mark.long
@pytest.mark.parametrize("strategy", [0, 1, 2])
@on_ranks(4)
def test_strategies(strategy: int) -> None:
    for mode in (EAGER, AOT_EAGER):
        assert_close(train(*make("dp2 tp2", mode, True, zero_dp_strategy=strategy)), train_alone(2))


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [(EAGER, {"outer_dp_sharding_strategy": 1}), (AOT_EAGER, {}), (AOT_EAGER, {"outer_dp_sharding_strategy": 1})],
)
@on_ranks(8)
def test_two_data_parallel_dimensions(mode: str, arguments: dict[str, Any]) -> None:
    """HSDP and HFSDP combine with tensor parallelism."""
    model, call, mesh = make("outer2 dp2 tp2", mode, True, **arguments)
    assert_close(train(model, call, mesh), train_alone(4))


@pytest.mark.long
@on_ranks(2)
def test_one_data_parallel_rank() -> None:
    """A model works with one data-parallel rank, with nothing left to shard."""
    for mode in (EAGER, AOT_EAGER):
        assert_close(train(*make("dp1 tp2", mode)), train_alone(1))


# -- Megatron's way: ordinary tensors that hold parts -----------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Entry of a tensor-parallel region: identity in forward, sum over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return functional.all_reduce(gradient, "sum", ctx.group), None


class _Sum(torch.autograd.Function):
    """Exit of a tensor-parallel region: sum over ranks in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return functional.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class MegatronMlp(nn.Module):
    """A residual MLP whose layers hold this rank's columns and rows."""

    def __init__(self, whole: zoo.Block, mesh: DeviceMesh) -> None:
        super().__init__()
        rank, size, self.group = mesh.get_local_rank(), mesh.size(), mesh.get_group().group_name
        self.norm = whole.norm
        self.up = nn.Parameter(whole.up.weight.detach().chunk(size)[rank].clone())
        self.up_bias = nn.Parameter(whole.up.bias.detach().chunk(size)[rank].clone())
        self.down = nn.Parameter(whole.down.weight.detach().chunk(size, dim=1)[rank].clone())
        self.down_bias = nn.Parameter(whole.down.bias.detach().clone())
        for param, dim in ((self.up, 0), (self.up_bias, 0), (self.down, 1)):
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(_Copy.apply(self.norm(x), self.group), self.up, self.up_bias))
        return x + _Sum.apply(F.linear(hidden, self.down), self.group) + self.down_bias


NAMES = {"up.weight": "up", "up.bias": "up_bias", "down.weight": "down", "down.bias": "down_bias"}


def test_parts_over_a_mesh_that_is_gone(fake_world: int) -> None:
    """Partitions over equal meshes are not equal, because their process groups differ."""
    old, new = (DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp")) for _ in range(2))
    assert old == new
    assert Partition(old, (Shard(0),), (4,)) == Partition(old, (Shard(0),), (4,))
    assert Partition(old, (Shard(0),), (4,)) != Partition(new, (Shard(0),), (4,))


def test_dimensions_that_marks_name(fake_world: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    partitioner = Partitioner(mesh["dp"], mesh["tp"])
    param = nn.Parameter(torch.ones(3, 5))
    param.tensor_model_parallel = True  # type: ignore[attr-defined]
    for dim, shape in {0: (6, 5), 1: (3, 10), -1: (3, 10), -2: (6, 5)}.items():
        param.partition_dim = dim  # type: ignore[attr-defined]
        partition = partitioner.of("weight", param)
        assert partition is not None
        assert (partition.placements, partition.shape) == ((Shard(dim % 2),), shape)
    for wrong in (2, -3, None, 0.0):
        param.partition_dim = wrong  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=f"partition_dim={wrong}: the parameter has 2 dimensions"):
            partitioner.of("weight", param)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_marks_of_megatron(mode: str) -> None:
    mesh, described = mesh_of("dp2 tp2")
    torch.manual_seed(0)
    whole = nn.Sequential(zoo.Block(), zoo.Block())
    blocks = nn.Sequential(*(MegatronMlp(copy.deepcopy(block), mesh["tp"]) for block in whole))
    model = fully_shard_model(blocks, fsdp_unit_modules=[MegatronMlp], tp_dim="tp", **described)
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
    data = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    call(data[mesh.get_local_rank("dp")]).pow(2).mean().backward()
    whole(data).pow(2).mean().backward()
    params = dict(model.module.named_parameters())
    for name, wanted in whole.named_parameters():
        number, inner = name.split(".", 1)
        param = params[f"{number}.{NAMES.get(inner, inner)}"]
        assert param.device_mesh.mesh_dim_names == ("dp", "tp")
        assert param.shape == wanted.shape
        assert torch.equal(param.full_tensor(), wanted)
        error = (param.grad.full_tensor() - wanted.grad).abs().max() / wanted.grad.abs().max()
        assert error <= BOUND, f"{name}: {error:.1e}"


# -- at rest ----------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_parameters_at_rest() -> None:
    """Operations of optimizers and users on parameters between steps agree with whole tensors."""
    model, _, _ = make("dp2 tp2", EAGER)
    alone = dict(build().named_parameters())
    other = torch.randn(CONFIG.width, generator=torch.Generator().manual_seed(3))
    for name, param in model.module.named_parameters():
        whole = alone[name].detach()
        assert torch.equal(param.full_tensor(), whole), name
        torch.testing.assert_close(param.sum().full_tensor(), whole.sum())
        torch.testing.assert_close(param.mean().full_tensor(), whole.mean())
        torch.testing.assert_close(param.max().full_tensor(), whole.max())
        torch.testing.assert_close(torch.linalg.vector_norm(param, 3).full_tensor(), torch.linalg.vector_norm(whole, 3))
        assert torch.equal(param * 2 + whole, whole * 2 + whole), name
        if whole.shape[-1] == CONFIG.width:
            assert torch.equal(param * other, whole * other), name
        torch.manual_seed(5)
        drawn = torch.randn_like(param)
        torch.manual_seed(5)
        assert torch.equal(drawn.full_tensor(), torch.randn_like(whole)), name
        assert torch.equal(copy.deepcopy(param).full_tensor(), whole)
        with torch.no_grad():
            param.copy_(whole + 1)
        assert torch.equal(param.full_tensor(), whole + 1)
    norms = torch.nn.utils.get_total_norm(list(model.parameters()))
    wanted = torch.nn.utils.get_total_norm([whole.detach() + 1 for whole in alone.values()])
    torch.testing.assert_close(norms.full_tensor(), wanted)
    named = dict(model.full_parameters())
    assert all(torch.equal(named[name], whole + 1) for name, whole in alone.items())
    model.module.load_state_dict({name: whole.detach() for name, whole in alone.items()})
    assert all(torch.equal(param.full_tensor(), alone[name]) for name, param in model.module.named_parameters())


# -- checkpoints ------------------------------------------------------------------------------------------------------


def train_and_save(shape: str, root: str) -> list[dict[str, Tensor]]:
    model, call, mesh = make(shape, EAGER)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        _step(model, call, mesh, optimizer, step)
    Checkpoints(root).save(2, model, optimizer)
    return _whole(model, optimizer)


def load_and_compare(shape: str, root: str) -> list[dict[str, Tensor]]:
    model, _, _ = make(shape, EAGER) if shape else (fully_shard_model(build(), fsdp_unit_modules=[Block]), None, None)
    for param in model.parameters():
        with torch.no_grad():
            param.zero_()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    restored = Checkpoints(root).load(model, optimizer)
    assert restored is not None
    assert restored.step == 2
    return _whole(model, optimizer)


def _step(model: Any, call: Any, mesh: DeviceMesh, optimizer: Any, step: int) -> None:
    rank, ranks = data_rank(mesh)
    call(*batches(step, ranks)[rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: Any, optimizer: Any) -> list[dict[str, Tensor]]:
    state = full_optimizer_state_dict(optimizer, rank=None)["state"]
    moments = {f"{name}.{key}": held[key] for name, held in state.items() for key in ("exp_avg", "exp_avg_sq", "step")}
    return [full_state_dict(model, rank=None), moments]


@pytest.mark.long
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("dp2 tp2", ("dp4 tp1", "dp1 tp4", "dp2 tp1", "")),
        ("outer2 dp2 tp2", ("dp2 tp2",)),
    ],
)
@pytest.mark.processes
def test_checkpoints_load_at_other_sizes(saved: str, loaded: tuple[str, ...], pools: Pools, tmp_path: Path) -> None:
    """Parameters and optimizer state load bit for bit at other sizes.

    ``""`` means two ranks without tensor parallelism.
    """

    def ranks(shape: str) -> int:
        return math.prod(int(part[-1]) for part in shape.split()) if shape else 2

    wanted = pools.of(ranks(saved)).run(train_and_save, shape=saved, root=str(tmp_path))[0]
    for shape in loaded:
        for mine in pools.of(ranks(shape)).run(load_and_compare, shape=shape, root=str(tmp_path)):
            for a, b in zip(wanted, mine, strict=True):
                assert a.keys() == b.keys()
                assert all(torch.equal(a[key], b[key]) for key in a), shape


@on_ranks(8)
def test_a_mesh_of_four_dimensions() -> None:
    """A model can be sharded over dp_shard x cp, flattened, on the mesh in Megatron-FSDP's README (seeds/001)."""
    names = ("dp_outer", "dp_shard", "cp", "tp")
    mesh = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=names)
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    hybrid = mesh["dp_outer", "dp_shard", "cp"]._flatten("hsdp").get_group()
    for strategy in (0, 1):
        model = fully_shard_model(
            parallelize(build(), mesh["tp"]),
            mesh,
            dp_shard_dim="dp_shard_cp",
            dp_outer_dim="dp_outer",
            tp_dim="tp",
            hybrid_fsdp_group=hybrid,
            outer_dp_sharding_strategy=strategy,
            fsdp_unit_modules=[Block],
        )
        param = next(model.parameters())
        assert param.device_mesh.mesh_dim_names == ("dp_outer", "dp_shard_cp", "tp")
        assert torch.equal(param.full_tensor(), build().embedding.weight)
        ranks = 4  # dp_outer x dp_shard x cp, each with its own data
        number = 2 * mesh.get_local_rank("dp_outer") + mesh.get_local_rank("cp")
        model(*batches(0, ranks)[number]).backward()
        wanted = train_alone(ranks, steps=range(1))[0]["embedding.weight"]
        error = (param.grad.full_tensor() - wanted).abs().max() / wanted.abs().max()
        assert error <= BOUND


# -- mistakes ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_mistakes_with_meshes() -> None:
    mesh, described = mesh_of("dp2 tp2")
    with pytest.raises(ValueError, match=r"tp_dim='tp' needs a device_mesh"):
        fully_shard_model(build(), tp_dim="tp")
    with pytest.raises(ValueError, match=r"tp_dim and dp_shard_dim are both 'dp'"):
        fully_shard_model(build(), tp_dim="dp", **described)
    with pytest.raises(ValueError, match=r"tp_dim='model' is not a dimension of device_mesh, which has \('dp', 'tp'\)"):
        fully_shard_model(build(), tp_dim="model", **described)
    with raises_everywhere(ValueError, "a DTensor over the mesh dimension 'dp'", "sharded twice"):
        fully_shard_model(parallelize(build(), mesh["dp"]), fsdp_unit_modules=[Block], **described)
    all_ranks = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    with raises_everywhere(ValueError, "('all',) (4,)", "both must be dimensions of one DeviceMesh"):
        fully_shard_model(parallelize(build(), all_ranks), fsdp_unit_modules=[Block], **described)
    marked = build()
    marked.head.weight.tensor_model_parallel = True
    with raises_everywhere(ValueError, "'head.weight' is marked tensor_model_parallel", "tp_dim"):
        fully_shard_model(marked, fsdp_unit_modules=[Block], **described)
    with raises_everywhere(ValueError, "partition_dim=None"):
        fully_shard_model(marked, fsdp_unit_modules=[Block], tp_dim="tp", **described)
    marked.head.weight.partition_dim, marked.head.weight.partition_stride = 0, 2
    with raises_everywhere(NotImplementedError, "partition_stride=2"):
        fully_shard_model(marked, fsdp_unit_modules=[Block], tp_dim="tp", **described)
    partial = parallelize(build(), mesh["tp"])
    partial.norm.weight = nn.Parameter(DTensor.from_local(torch.ones(32), mesh["tp"], [Partial()]))
    with raises_everywhere(ValueError, "'norm.weight' is a DTensor with placements", "Partial"):
        fully_shard_model(partial, fsdp_unit_modules=[Block], **described)
    fully_shard_model(parallelize(build(), mesh["tp"]), fsdp_unit_modules=[Block], tp_dim="tp", **described)


@on_ranks(4)
def test_replicas_that_differ_are_refused() -> None:
    """Norms that differ between tensor-parallel ranks are an error. Training would diverge silently."""
    mesh, described = mesh_of("dp2 tp2")
    model = parallelize(build(), mesh["tp"], sequence=True)
    with torch.no_grad():
        model.layers[1].attention_norm.weight.to_local().add_(mesh.get_local_rank("tp"))
    with raises_everywhere(
        RuntimeError, "replicated over the mesh dimension 'tp'", "values of layers.1.attention_norm.weight"
    ):
        fully_shard_model(model, fsdp_unit_modules=[Block], **described)


class FailingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block(8, 12) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(torch.ops.mfsdp_tests.may_fail(x, number))
        return x.pow(2).mean()


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4, timeout=120)
def test_a_rank_that_fails_and_a_reset(mode: str) -> None:
    """If one rank's forward raises, its data-parallel and tensor-parallel neighbors learn of it within the timeout.

    After a reset, training continues as if nothing had happened.
    """
    rank, seconds = dist.get_rank(), 3.0
    ranks = torch.arange(4).view(2, 2)
    groups = [
        dist.new_subgroups_by_enumeration(each.tolist(), timeout=timedelta(seconds=seconds))[0]
        for each in (ranks.T, ranks)
    ]
    mesh = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("dp", "tp"))
    Failing.where = -1
    net = parity.build(FailingNet)
    tp = mesh["tp"]
    for block in net.blocks:
        parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = fully_shard_model(net, mesh, dp_shard_dim="dp", fsdp_unit_modules=[zoo.Block])
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    data = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(2))[:, mesh.get_local_rank("dp")]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        call(data[number]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    Failing.where = 1 if rank == 3 else -1
    begun = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        step(1)
    assert isinstance(caught.value, ValueError) == (rank == 3)
    assert time.monotonic() - begun < PATIENCE
    Failing.where = -1
    model.reset()
    step(2)

    alone = parity.build(FailingNet)
    everything = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(2))
    for number in (0, 2):
        torch.stack([alone(batch) for batch in everything[number]]).mean().backward()
        with torch.no_grad():
            for param in alone.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    for param, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        error = (param.full_tensor() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
        assert error <= BOUND


# -- quantized gathers ------------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(4)
def test_quantized_gathers() -> None:
    mesh, arguments = mesh_of("dp2 tp2")
    policy = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
    inputs, _ = batches(0, 1)[0]
    _, plain, _ = make("dp2 tp2", EAGER)
    expected, outputs = plain(inputs), []
    for mode in (EAGER, AOT_EAGER):
        model, call, _ = make("dp2 tp2", mode, mixed_precision_policy=policy)
        assert any(bucket.made is not None for bucket in model.sharded.buckets)
        outputs.append(call(inputs))
        outputs[-1].sum().backward()
    assert torch.equal(*outputs)
    assert 0 < (outputs[0] - expected).abs().max() < 0.1 * expected.abs().max()
    fp4 = MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")
    others = replace(policy, param_comm_scaling="blockwise"), replace(policy, param_comm_scaling="mxfp8"), fp4
    for other in others:
        _, call, _ = make("dp2 tp2", EAGER, mixed_precision_policy=other)
        assert 0 < (call(inputs) - expected).abs().max() < (0.4 if other is fp4 else 0.1) * expected.abs().max()
    tensorwise = replace(policy, param_comm_scaling="tensorwise")
    model = parallelize(build(), mesh["tp"], False)
    with raises_everywhere(NotImplementedError, "'tensorwise' takes one scale per matrix, but 'layers.0", "rowwise"):
        fully_shard_model(model, fsdp_unit_modules=[Block], mixed_precision_policy=tensorwise, **arguments)
