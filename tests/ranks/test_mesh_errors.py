"""Meshes, groups, dimensions and strategies that do not fit together raise errors on all ranks, and nothing hangs.

The combinations are those that Megatron-FSDP's documentation (seeds 000 to 003) and our notes on its code (reference,
with the section) call invalid. Other combinations are tested with their features:

===========================================================  =======================================================
strategies that do not exist (seed 001, 1.1)                 ``test_errors.py::test_wrong_arguments``
``fsdp_group_ag`` of other ranks (1.1)                       ``test_strategies.py``
a context-parallel dimension that is left out (001, 1.1)     ``test_context_parallel.py::test_mistakes_are_explained``
a pipeline's dimension as a data-parallel one (1.1)          ``test_pipeline.py::test_mistakes_are_explained``
marks and DTensors of tensor parallelism (1.1, 3.7)          ``test_tensor_parallel.py::test_mistakes_with_meshes``
arguments for experts, and what is one (seed 001, 1.1, 3.7)  ``test_expert_parallel.py``, "errors"
ranks that hold different models (3.7)                       ``test_errors.py::test_ranks_with_different_models``
===========================================================  =======================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import raises_everywhere
from pool import on_ranks
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.doctor import expected_gradients, wrong_gradients
from mfsdp_compile.runtime.ranks import agreement, rendezvous

SOON = timedelta(seconds=0.3)
"""Replaces :data:`rendezvous.LOOK`."""
BOUND = 30.0
"""Seconds within which all ranks must have the error of one of them. Without an error they would wait ten minutes."""

# -- the same mistake on all ranks ------------------------------------------------------------------------------------


def meshes() -> dict[str, Any]:
    """Return meshes and groups of four ranks. Collective."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    mesh["outer", "inner"]._flatten("both")
    split = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    return {
        "mesh": mesh,
        "no names": DeviceMesh("cpu", [[0, 1], [2, 3]]),
        "dp tp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "hybrid": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard")),
        "crossed": DeviceMesh("cpu", [[3, 0], [1, 2]], mesh_dim_names=("outer", "inner")),
        "crossed tp": DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("dp", "tp")),
        "not mine": split[dist.get_rank() == 0],
        "half": split[dist.get_rank() != 0],
    }


OVER_INNER = {"device_mesh": "mesh", "dp_shard_dim": "inner"}
HSDP = {**OVER_INNER, "dp_outer_dim": "outer", "hybrid_fsdp_group": "WORLD"}
WRONG: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "1.1 device_mesh: no mesh": (
        {"device_mesh": "WORLD"},
        TypeError,
        ("device_mesh takes a torch.distributed.device_mesh.DeviceMesh, got a ProcessGroup", "from_group"),
    ),
    "1.1 device_mesh: of another type than the device": (
        {**OVER_INNER, "dp_shard_dim": "both", "device": "cuda"},
        ValueError,
        ("device='cuda'", "of type 'cpu'"),
    ),
    "seed 001, 1.1 device_mesh: none, with dp_outer_dim": (
        {"dp_outer_dim": "outer", "hybrid_fsdp_group": "WORLD"},
        ValueError,
        ("dp_outer_dim needs a device_mesh",),
    ),
    "1.1 device_mesh: none, with hybrid_fsdp_group": (
        {"hybrid_fsdp_group": "WORLD"},
        ValueError,
        ("dp_outer_dim and hybrid_fsdp_group belong together",),
    ),
    "1.1 device_mesh: none, with an outer strategy": (
        {"outer_dp_sharding_strategy": "optim"},
        ValueError,
        ("needs dp_outer_dim",),
    ),
    "1.1 device_mesh: none, with tp_dim": ({"tp_dim": "tp"}, ValueError, ("tp_dim='tp' needs a device_mesh",)),
    "seed 001, 1.1 dp_shard_dim: missing": (
        {"device_mesh": "mesh"},
        ValueError,
        ("device_mesh has 2 dimensions, ('outer', 'inner')", "dp_shard_dim"),
    ),
    "seed 001 dp_shard_dim: missing, with dp_outer_dim": (
        {k: v for k, v in HSDP.items() if k != "dp_shard_dim"},
        ValueError,
        ("device_mesh has 2 dimensions, ('outer', 'inner')", "dp_shard_dim"),
    ),
    "1.1 dp_shard_dim: unknown": (
        {**OVER_INNER, "dp_shard_dim": "dp"},
        ValueError,
        ("dp_shard_dim='dp' is not a dimension of device_mesh, which has ('outer', 'inner')", "_flatten('dp')"),
    ),
    "1.1 dp_shard_dim: of a mesh without names": (
        {"device_mesh": "no names", "dp_shard_dim": "dp"},
        ValueError,
        ("dp_shard_dim='dp'", "whose dimensions have no names", "mesh_dim_names"),
    ),
    "1.1 dp_shard_dim: several, not flattened": (
        {**OVER_INNER, "dp_shard_dim": ("outer", "inner")},
        TypeError,
        ("dp_shard_dim takes the name of one dimension", "('outer', 'inner')", "_flatten"),
    ),
    "seed 001 dp_shard_dim: HSDP without saying so": (
        {"device_mesh": "hybrid", "dp_shard_dim": "dp_shard"},
        ValueError,
        ("dimension 'dp_outer' of 2 ranks", "gradients would not be reduced over it", "dp_outer_dim"),
    ),
    "1.1 dp_shard_dim: the tensor-parallel one": (
        {"device_mesh": "dp tp", "dp_shard_dim": "tp"},
        ValueError,
        ("dimension 'dp' of 2 ranks", "gradients would not be reduced over it"),
    ),
    "seed 001, 1.1 dp_outer_dim: without hybrid_fsdp_group": (
        {**OVER_INNER, "dp_outer_dim": "outer"},
        ValueError,
        ("dp_outer_dim and hybrid_fsdp_group belong together", "device_mesh['outer', 'inner']._flatten().get_group()"),
    ),
    "seed 001, 1.1 hybrid_fsdp_group: without dp_outer_dim": (
        {**OVER_INNER, "hybrid_fsdp_group": "WORLD"},
        ValueError,
        ("dp_outer_dim and hybrid_fsdp_group belong together",),
    ),
    "1.1 dp_outer_dim: unknown": (
        {**HSDP, "dp_outer_dim": "replicate"},
        ValueError,
        ("dp_outer_dim='replicate' is not a dimension of device_mesh",),
    ),
    "1.1 dp_outer_dim: no name": (
        {**HSDP, "dp_outer_dim": 0},
        TypeError,
        ("dp_outer_dim takes the name of one dimension of device_mesh, got 0",),
    ),
    "1.1 dp_outer_dim: dp_shard_dim again": (
        {**HSDP, "dp_outer_dim": "inner"},
        ValueError,
        ("dp_outer_dim and dp_shard_dim are both 'inner'",),
    ),
    "1.1 dp_outer_dim: a part of dp_shard_dim": (
        {**HSDP, "dp_shard_dim": "both"},
        ValueError,
        ("dp_outer_dim='outer' and dp_shard_dim='both'", "no rank but this one in common"),
    ),
    "3.4 dp_outer_dim: inside of dp_shard_dim": (
        {**HSDP, "dp_shard_dim": "outer", "dp_outer_dim": "inner"},
        ValueError,
        ("dp_outer_dim='inner' and dp_shard_dim='outer'", "must come first", "mesh_dim_names=('inner', 'outer')"),
    ),
    "seed 001, 1.1 hybrid_fsdp_group: of other ranks": (
        {**HSDP, "hybrid_fsdp_group": "half"},
        ValueError,
        ("hybrid_fsdp_group has the ranks", "'outer' and 'inner' have [0, 1, 2, 3]"),
    ),
    "3.4 dp_outer_dim: ranks of the inner dimension in several orders": (
        {**HSDP, "device_mesh": "crossed"},
        ValueError,
        ("device_mesh has the ranks [[3, 0], [1, 2]]", "their order along 'inner'", "increase along 'inner'"),
    ),
    "3.4 tp_dim: ranks of the data-parallel dimension in several orders": (
        {"device_mesh": "crossed tp", "dp_shard_dim": "dp", "tp_dim": "tp"},
        ValueError,
        ("device_mesh has the ranks [[0, 3], [2, 1]]", "their order along 'dp'"),
    ),
    "1.1 hybrid_fsdp_group: no group": (
        {**HSDP, "hybrid_fsdp_group": "mesh"},
        TypeError,
        ("hybrid_fsdp_group takes a torch.distributed.ProcessGroup, got a DeviceMesh", "get_group()"),
    ),
    "1.1 hybrid_fsdp_group: another rank's": (
        {**HSDP, "hybrid_fsdp_group": "not mine"},
        ValueError,
        ("hybrid_fsdp_group is a process group that rank", "is not part of"),
    ),
    "1.1 fsdp_group_ag: no group": (
        {"fsdp_group_ag": "mesh"},
        TypeError,
        ("fsdp_group_ag takes a torch.distributed.ProcessGroup, got a DeviceMesh",),
    ),
    "1.1 fsdp_group_ag: another rank's": (
        {"fsdp_group_ag": "not mine"},
        ValueError,
        ("fsdp_group_ag is a process group that rank", "is not part of"),
    ),
    "1.1 tp_dim: unknown": (
        {"device_mesh": "dp tp", "dp_shard_dim": "dp", "tp_dim": "model"},
        ValueError,
        ("tp_dim='model' is not a dimension of device_mesh, which has ('dp', 'tp')",),
    ),
    "1.1 tp_dim: no name": (
        {"device_mesh": "dp tp", "dp_shard_dim": "dp", "tp_dim": 1},
        TypeError,
        ("tp_dim takes the name of one dimension of device_mesh, got 1",),
    ),
    "1.1 tp_dim: dp_outer_dim again": (
        {**HSDP, "tp_dim": "outer"},
        ValueError,
        ("tp_dim and dp_outer_dim are both 'outer'",),
    ),
    "1.1 tp_dim: a part of dp_shard_dim": (
        {**OVER_INNER, "dp_shard_dim": "both", "tp_dim": "inner"},
        ValueError,
        ("tp_dim='inner' has the ranks", "cannot share both parameters and data", "Flatten into 'both'"),
    ),
    "seed 001, 1.1 expt_device_mesh: no mesh": (
        {"expt_device_mesh": "WORLD"},
        TypeError,
        ("expt_device_mesh takes a torch.distributed.device_mesh.DeviceMesh, got a ProcessGroup",),
    ),
    "1.1 hybrid_fsdp_expt_group: no group": (
        {**HSDP, "expt_device_mesh": "mesh", "hybrid_fsdp_expt_group": "mesh"},
        TypeError,
        ("hybrid_fsdp_expt_group takes a torch.distributed.ProcessGroup, got a DeviceMesh",),
    ),
    "1.1 expt_fsdp_group_ag: another rank's": (
        {**OVER_INNER, "dp_shard_dim": "both", "expt_device_mesh": "mesh", "expt_fsdp_group_ag": "not mine"},
        ValueError,
        ("expt_fsdp_group_ag is a process group that rank", "is not part of"),
    ),
    "seed 001, 1.1 HFSDP: with zero_dp_strategy=0": (
        {**HSDP, "zero_dp_strategy": 0, "outer_dp_sharding_strategy": 1},
        ValueError,
        ("outer_dp_sharding_strategy='optim' divides further", "zero_dp_strategy='no_shard' they divide nothing"),
    ),
    **{
        f"seed 001, 1.1 HSDP: outer_dp_sharding_strategy={outer}": (
            {**HSDP, "outer_dp_sharding_strategy": outer},
            ValueError,
            ("outer_dp_sharding_strategy='optim_grads", "(1, 'optim') or nothing (0, 'no_shard')"),
        )
        for outer in (2, "optim_grads_params")
    },
}


def with_meshes(arguments: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    made = made | {"WORLD": dist.group.WORLD}
    kinds = ("mesh", "group", "group_ag")
    return {k: made[v] if k.endswith(kinds) and isinstance(v, str) else v for k, v in arguments.items()}


@on_ranks(4)
def test_mistakes_that_all_ranks_make() -> None:
    made, model = meshes(), parity.build(zoo.Plain)
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    for case, (arguments, error, fragments) in WRONG.items():
        try:
            with raises_everywhere(error, *fragments):
                fully_shard_model(model, fsdp_unit_modules=[zoo.Block], **with_meshes(arguments, made))
        except BaseException as failure:
            raise AssertionError(case) from failure
    for name, param in model.named_parameters():
        assert param is before[name][0], name
        assert torch.equal(param, before[name][1]), name
    fully_shard_model(model, fsdp_unit_modules=[zoo.Block], **with_meshes(HSDP, made))(torch.ones(2, 8)).backward()


@on_ranks(2)
def test_models_that_torch_shards_already() -> None:
    """Seeds 000 and 003: models that torch's FSDP already shards are rejected."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))

    def whole() -> nn.Module:
        return fully_shard(parity.build(zoo.Plain), mesh=mesh)

    def inside() -> nn.Module:
        model = parity.build(zoo.Plain)
        fully_shard(model.blocks[1], mesh=mesh)
        return model

    def replicated() -> nn.Module:
        model = parity.build(zoo.Plain)
        replicate(model.blocks[0])
        return model

    made: dict[str, Callable[[], nn.Module]] = {
        "The model is a FSDPPlain": whole,
        "Module 'blocks.1' is a FSDPBlock": inside,
        "Module 'blocks.0' is a DDPBlock": replicated,
        "The model is a DistributedDataParallel": lambda: DistributedDataParallel(parity.build(zoo.Plain)),
        "The model is a FullyShardedDataParallel": lambda: FullyShardedDataParallel(
            parity.build(zoo.Plain), device_id=torch.device("cpu")
        ),
    }
    for message, make in made.items():
        with raises_everywhere(ValueError, message, "reduced twice", "Use one of the two"):
            fully_shard_model(make(), fsdp_unit_modules=[zoo.Block])


# -- a mistake of one rank --------------------------------------------------------------------------------------------


ONE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "strategy": ({}, {"zero_dp_strategy": 9}, "zero_dp_strategy takes 0 or 'no_shard'"),
    "mesh": ({}, {"device_mesh": "no names", "dp_shard_dim": "dp"}, "whose dimensions have no names"),
    "dp_shard_dim": (HSDP, {"dp_shard_dim": "dp"}, "dp_shard_dim='dp' is not a dimension"),
    "hybrid group": (HSDP, {"hybrid_fsdp_group": None}, "dp_outer_dim and hybrid_fsdp_group belong together"),
    "HFSDP": (HSDP, {"outer_dp_sharding_strategy": 3}, "outer_dp_sharding_strategy='optim_grads_params'"),
    "tp_dim": (
        {"device_mesh": "dp tp", "dp_shard_dim": "dp", "tp_dim": "tp"},
        {"tp_dim": "model"},
        "tp_dim='model' is not a dimension",
    ),
    "no tp_dim": ({"device_mesh": "dp tp", "dp_shard_dim": "dp", "tp_dim": "tp"}, {"tp_dim": None}, "no tp_dim"),
    "experts": (
        {**OVER_INNER, "dp_shard_dim": "both"},
        {"hybrid_fsdp_expt_group": "WORLD"},
        "hybrid_fsdp_expt_group needs expt_device_mesh",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("culprit", [0, 3])
@on_ranks(4)
def test_a_mistake_of_one_rank_is_an_error_on_all(culprit: int) -> None:
    """A mistake of one rank is an error on all ranks of the mesh, including other data-parallel groups.

    All can try again.
    """
    made = meshes()
    for case, (right, wrong, message) in ONE.items():
        arguments = with_meshes(right | wrong if dist.get_rank() == culprit else right, made)
        model, begun = parity.build(zoo.Plain), time.monotonic()
        with mock.patch.object(rendezvous, "LOOK", SOON):
            try:
                fully_shard_model(model, fsdp_unit_modules=[zoo.Block], **arguments)
            except (RuntimeError, ValueError) as error:
                assert message in str(error), f"{case}: {error}"
                alone = dist.get_rank() == culprit and case != "no tp_dim"
                assert isinstance(error, ValueError if alone else RuntimeError), f"{case}: {error}"
            else:
                raise AssertionError(f"{case}: no error on rank {dist.get_rank()}")
        assert time.monotonic() - begun < BOUND, case
        dist.barrier()  # the others would have waited for a rank that retried correctly at once
        again = fully_shard_model(model, fsdp_unit_modules=[zoo.Block], **with_meshes(right, made))
        again(torch.ones(2, 8)).backward()


@on_ranks(2, timeout=60)
def test_a_rank_that_was_refused_may_come_again() -> None:
    """A rank that was refused may arrive again, before or after the others conclude that it will not."""
    group, lines = dist.group.WORLD, ["something"]

    def refused() -> None:
        with raises_everywhere(ValueError, "no"), agreement.telling_others():
            raise ValueError("no")

    with mock.patch.object(rendezvous, "LOOK", timedelta(seconds=1)):
        if dist.get_rank() == 0:
            refused()
            time.sleep(0.3)
        with agreement.telling_others():
            agreement.agree(group, "a test", lambda: lines, heeds_refusals=True)
    for _ in range(2):
        with mock.patch.object(rendezvous, "LOOK", SOON):
            if dist.get_rank() == 0:
                refused()
                dist.barrier()
            else:
                with raises_everywhere(RuntimeError, "a test: rank 0 failed with ValueError: no"):
                    agreement.agree(group, "a test", lambda: lines, heeds_refusals=True)
                dist.barrier()
        with agreement.telling_others():
            agreement.agree(group, "a test", lambda: lines, heeds_refusals=True)
    with raises_everywhere(RuntimeError, "rank 1 of 2 differs"):
        agreement.agree(group, "a test", lambda: [str(dist.get_rank())], heeds_refusals=True)


# -- tensor parallelism -----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.experts(x)).sum()


@on_ranks(4, timeout=60)
def test_replicas_that_differ_in_one_place() -> None:
    """3.7. If ranks 0 and 1 differ, ranks 2 and 3, which have other experts and do not differ, raise too.

    Otherwise they would train, and wait, without them.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    arguments: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}
    arguments["expt_device_mesh"] = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))
    arguments["fsdp_unit_modules"] = [nn.Linear]

    def build(rank: int) -> Mixed:
        model = parity.build(Mixed)
        with torch.no_grad():
            model.experts.weight.add_(rank)
        return model

    rank = dist.get_rank()
    message = "values of experts.weight"  # ranks 2 and 3 learn it from 0 and 1
    with mock.patch.object(rendezvous, "LOOK", SOON), raises_everywhere(RuntimeError, "fully_shard_model", message):
        fully_shard_model(build(min(rank, 2)), **arguments)
    dist.barrier()
    fully_shard_model(build(rank // 2), **arguments)(torch.ones(2, 8)).backward()


@on_ranks(4, timeout=60)
def test_experts_and_tensor_parallelism() -> None:
    """1.1, 3.7: marks of tensor parallelism inside experts are rejected, and experts over ranks of other data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    over_all = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    sharded: dict[str, Any] = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}
    sharded["fsdp_unit_modules"] = [nn.Linear]

    marked = parity.build(Mixed)
    marked.experts.weight.tensor_model_parallel, marked.experts.weight.partition_dim = True, 0
    with raises_everywhere(
        NotImplementedError, "'experts.weight' is an expert, and marked tensor_model_parallel", "expt_device_mesh"
    ):
        fully_shard_model(marked, expt_device_mesh=mesh, **sharded)
    without = {name: value for name, value in sharded.items() if name != "tp_dim"}
    with raises_everywhere(ValueError, "expt_device_mesh shards experts over the ranks [0, 1, 2, 3]", "must divide"):
        fully_shard_model(parity.build(Mixed), expt_device_mesh=over_all, **without)
    fully_shard_model(parity.build(Mixed), expt_device_mesh=over_all, **sharded)(torch.ones(2, 8)).backward()
    divided = parity.build(Mixed)
    with torch.no_grad():
        divided.experts.weight.add_(mesh.get_local_rank("tp"))
    with raises_everywhere(RuntimeError, "replicated over the mesh dimension 'tp'", "values of experts.weight"):
        fully_shard_model(divided, expt_device_mesh=mesh, **sharded)
    fully_shard_model(parity.build(Mixed), expt_device_mesh=mesh, **sharded)(torch.ones(2, 8)).backward()
    # The mesh of the documentation, in which experts are not tensor-parallel.
    alone = fully_shard_model(
        parity.build(Mixed), fsdp_unit_modules=[nn.Linear], dp_shard_dim="dp", expt_device_mesh=over_all
    )
    alone(torch.ones(2, 8)).backward()


# -- unusual meshes that work -----------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(4)
def test_ranks_may_lie_in_any_order() -> None:
    """Ranks may be in any order in a mesh.

    Seeds 000 and 003 accept only the standard order (``use_tp_pp_dp_mapping``).
    """
    data = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    world = dist.group.WORLD
    hybrid = {"dp_shard_dim": "inner", "dp_outer_dim": "outer", "hybrid_fsdp_group": world}
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    tensor_first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    everybody = [0, 1, 2, 3]
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"device_mesh": DeviceMesh("cpu", [3, 1, 2, 0], mesh_dim_names=("dp",))}, everybody),
        ({"device_mesh": stages["dp"]}, [dist.get_rank() % 2, dist.get_rank() % 2 + 2]),
        ({"device_mesh": tensor_first, "dp_shard_dim": "dp", "tp_dim": "tp"}, [0, 1]),
    ]
    for ranks in ([[0, 2], [1, 3]], [[3, 2], [1, 0]]):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "inner"))
        for outer in (0, 1):
            cases.append(({"device_mesh": mesh, **hybrid, "outer_dp_sharding_strategy": outer}, everybody))
    for number, (arguments, ranks) in enumerate(cases):
        rank = dist.get_rank()
        if arguments.get("tp_dim"):  # tensor-parallel ranks have the same data
            rank, ranks = rank % 2, [0, 1]
        model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block], **arguments)
        model(data[rank]).backward()
        expected = expected_gradients(parity.build(zoo.Uneven), data[None, ranks], "mean")
        assert not wrong_gradients(model, expected), number
        alone = dict(parity.build(zoo.Uneven).named_parameters())
        for name, param in model.module.named_parameters():
            assert torch.equal(param.full_tensor(), alone[name]), (number, name)
