"""Classes, methods and helpers that programs for Megatron-FSDP use directly."""

from __future__ import annotations

import copy
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from megatron_files import write_torch_dist
from parity import raises_everywhere
from pool import on_ranks, shared_folder
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mfsdp_compile import (
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    cli,
    fully_shard_model,
    fully_shard_optimizer,
    uneven_dtensor,
)
from mfsdp_compile.convert.param_groups import read_map
from mfsdp_compile.megatron import (
    DistributedDataParallelConfig,
    DistributedOptimizer,
    FullyShardedDataParallel,
    TransformerConfig,
    allocator_arguments,
    dump_param_to_param_group_map,
)
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def mesh_of(shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def two_levels(**more: Any) -> FSDPDistributedIndex:
    mesh = mesh_of((2, 2), ("outer", "inner"))
    both = mesh["outer", "inner"]._flatten().get_group()
    return FSDPDistributedIndex(mesh, "inner", "outer", hybrid_fsdp_group=both, **more)


# -- the class ----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_class_used_directly() -> None:
    """The numbers are those of ``fully_shard_model``; reductions wait for the end of the step by default."""
    data = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for strategy in ("optim", "optim_grads_params"):
        ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy)
        index = FSDPDistributedIndex(mesh_of((2,)), "dp")
        model = MegatronFSDP(parity.build(zoo.Plain), index, ddp, fsdp_unit_modules=[zoo.Block])
        own = fully_shard_model(
            parity.build(zoo.Plain),
            fsdp_unit_modules=[zoo.Block],
            zero_dp_strategy=strategy,
            sync_model_each_microbatch=False,
        )
        assert model.model_auto_sync is False
        assert fully_shard_model(nn.Linear(1, 1)).model_auto_sync is True
        for each in (model, own):
            optimizer = fully_shard_optimizer(torch.optim.AdamW(each.parameters()))
            for x in data:
                each(x).backward()
            if each is model:
                model.attach_grad_to_optimizer_state()
                assert all(param.grad.to_local() is not None for param in model.parameters())
                model.attach_grad_to_optimizer_state()  # there is nothing left to do
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(model.parameters(), own.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.usefixtures("fake_world")
def test_what_the_class_decides() -> None:
    def sharded(index: Any, *given: Any, **more: Any) -> MegatronFSDP:
        return MegatronFSDP(parity.build(zoo.Plain), index, *given, fsdp_unit_modules=[zoo.Block], **more)

    model = sharded(two_levels(hsdp_outer_dp_shard=True), mixed_precision_policy=MixedPrecisionPolicy(None, F32, BF16))
    assert str(model.sharded.topology) == "HFSDP, optim_grads_params over 2 x 2 ranks"
    assert model.mp_policy == MixedPrecisionPolicy(None, F32, BF16)
    assert model.ddp_config.outer_dp_sharding_strategy == "optim"
    assert model.get_distributed_index() is model.dist_index
    duplicate = copy.deepcopy(model)
    assert duplicate.dist_index is model.dist_index
    assert duplicate.ddp_config == model.ddp_config

    flags = {
        "fsdp_double_buffer": True,
        "report_nan_in_param_grad": True,
        "enable_fine_grained_param_gather_hook": True,
    }
    ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    model = sharded(FSDPDistributedIndex(mesh_of(), "dp"), ddp, calculate_per_token_loss=True, **flags)
    assert model.ddp_config.fsdp_double_buffer and model.ddp_config.check_for_nan_in_grad
    assert not ddp.fsdp_double_buffer  # a copy was changed
    assert model.sharded.comm_buffer_bytes() > 0
    assert any(unit.is_module for unit in model.sharded.eager.units)
    refused = [
        (TypeError, r"takes the ranks as an FSDPDistributedIndex, got a DeviceMesh", {"index": mesh_of()}),
        (NotImplementedError, "fine_grained_recurse_module_types", {"fine_grained_recurse_module_types": [nn.Linear]}),
        (
            ValueError,
            "Pass the dtypes in only one of them",
            {
                "ddp_config": DistributedDataParallelConfig(preserve_fp32_weights=False),
                "mixed_precision_policy": MixedPrecisionPolicy(grad_comm_dtype=BF16),
            },
        ),
        (
            NotImplementedError,
            "suggested_communication_unit_size",
            {"ddp_config": DistributedDataParallelConfig(suggested_communication_unit_size=1)},
        ),
    ]
    for error, says, more in refused:
        with pytest.raises(error, match=says):
            sharded(**{"index": FSDPDistributedIndex(mesh_of(), "dp"), **more})


@pytest.mark.usefixtures("fake_world")
def test_megatrons_own_classes() -> None:
    """They are read by attribute."""
    mesh = mesh_of((2, 2), ("outer", "inner"))
    group = mesh["outer", "inner"]._flatten().get_group()
    index = SimpleNamespace(
        device_mesh=mesh,
        dp_shard_dim="inner",
        dp_outer_dim="outer",
        tp_dim=None,
        hybrid_fsdp_group=group,
        hybrid_fsdp_expt_group=None,
        hsdp_outer_dp_shard=True,
        expt_device_mesh=mesh,  # theirs says so if there is none
        get_fsdp_group=None,
    )
    policy = SimpleNamespace(main_params_dtype=None, main_grads_dtype=F32, grad_comm_dtype=BF16)
    model = MegatronFSDP(parity.build(zoo.Plain), index, mixed_precision_policy=policy, fsdp_unit_modules=[zoo.Block])
    assert str(model.sharded.topology) == "HFSDP, optim_grads_params over 2 x 2 ranks"
    assert model.mp_policy == MixedPrecisionPolicy(None, F32, BF16)


@pytest.mark.usefixtures("fake_world")
def test_settings_of_a_sharded_model() -> None:
    model = fully_shard_model(
        parity.build(zoo.Plain),
        fsdp_unit_modules=[zoo.Block],
        zero_dp_strategy="optim",
        mixed_precision_policy=MixedPrecisionPolicy(BF16, F32, F16),
        overlap_param_gather=False,
    )
    config = model.ddp_config
    assert (config.data_parallel_sharding_strategy, config.megatron_fsdp_main_params_dtype) == ("optim", BF16)
    assert (config.overlap_grad_reduce, config.overlap_param_gather, config.fsdp_double_buffer) == (True, False, False)
    assert model.raw_param == dict(model.module.named_parameters())
    assert {name: param for param, name in model.param_to_name.items()} == model.raw_param
    with pytest.raises(ValueError, match="was sharded with nccl_ub=True"):
        model.param_and_grad_buffer.manual_buffer_registration()


@pytest.mark.usefixtures("fake_world")
def test_policies_that_change() -> None:
    """Only the dtype of reductions can change; other fields may be left out."""
    model = fully_shard_model(
        parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], mixed_precision_policy=MixedPrecisionPolicy(None, BF16)
    )
    dtype = {bucket.plan.comm_dtype for bucket in model.sharded.buckets}
    with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=F16)):
        assert {bucket.plan.comm_dtype for bucket in model.sharded.buckets} == {F16}
        assert model.mp_policy == MixedPrecisionPolicy(None, BF16, F16)
    assert {bucket.plan.comm_dtype for bucket in model.sharded.buckets} == dtype
    model.reset_mixed_precision_policy(MixedPrecisionPolicy(None, BF16, F16))
    assert {bucket.plan.comm_dtype for bucket in model.sharded.buckets} == {F16}
    with pytest.raises(ValueError, match="can only change grad_comm_dtype"):
        model.reset_mixed_precision_policy(MixedPrecisionPolicy(main_grads_dtype=F16))


@on_ranks(2)
def test_parameters_that_are_gathered_ahead() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    alone, block = parity.build(zoo.Plain), model.module.blocks[1]
    model.all_gather_and_wait_parameters_ready(block.parameters())
    assert type(block.up.weight) is not DTensor
    assert torch.equal(block.up.weight, alone.blocks[1].up.weight)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    assert torch.equal(model(x), alone(x))
    assert isinstance(block.up.weight, DTensor)
    with raises_everywhere(ValueError, "1 of the parameters are not sharded parameters of this model"):
        model.all_gather_and_wait_parameters_ready([nn.Parameter(torch.ones(1))])
    with raises_everywhere(ValueError, "backward gathers what it needs"):
        model.all_gather_and_wait_parameters_ready(model.parameters(), bwd=True)


@pytest.mark.usefixtures("fake_world")
def test_signatures_of_extended_optimizers() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = fully_shard_optimizer(kind(model.parameters(), lr=0.1))
        step, zero_grad = inspect.signature(optimizer.step), inspect.signature(optimizer.zero_grad)
        assert {"closure", "sync_grad_before_optimizer_step", "install_optimized_model_weights"} == {*step.parameters}
        assert {"set_to_none", "zero_grad_buffer"} == {*zero_grad.parameters}
        assert all(each.default is True for name, each in step.parameters.items() if name != "closure")
        torch.optim.lr_scheduler.ConstantLR(optimizer)  # wraps step
        assert step.parameters.keys() <= inspect.signature(optimizer.step).parameters.keys()


@pytest.mark.usefixtures("fake_world")
def test_models_without_units() -> None:
    """The whole model is one unit: sharded at rest, and whole on each rank during a step, as with DDP."""
    with pytest.warns(UserWarning, match=r"each rank holds them all, as with DDP\. Candidates.*: Block") as said:
        model = fully_shard_model(parity.build(zoo.Plain), check_values=False)
    assert len(said) == 1
    assert [unit.name for unit in model.sharded.eager.units if not unit.is_root] == []
    assert sum(param.to_local().numel() for param in model.parameters()) < sum(
        param.numel() for param in model.parameters()
    )


@pytest.mark.usefixtures("fake_world")
def test_tensor_parallel_ranks_that_divide_nothing() -> None:
    ddp, config = DistributedDataParallelConfig(use_megatron_fsdp=True), TransformerConfig(tensor_model_parallel_size=2)
    with pytest.warns(UserWarning, match="no parameter is marked as a part.*must get the same data"):
        FullyShardedDataParallel(config, ddp, parity.build(zoo.Plain), check_values=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FullyShardedDataParallel(TransformerConfig(), ddp, parity.build(zoo.Plain), check_values=False)


# -- ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
def test_the_index_of_ranks() -> None:
    index = two_levels(hsdp_outer_dp_shard=True)
    assert index.use_hybrid_fsdp
    assert index.get_root_mesh() is index.device_mesh
    assert [index.get_dp_group().size(), index.get_fsdp_group().size(), index.get_outer_fsdp_group().size()] == [
        4,
        2,
        2,
    ]
    assert index.get_submesh(("outer", "inner")).shape == (2, 2)
    assert index.get_fsdp_group(independent_all_gather=True) is None
    assert index.get_dp_group(is_expert_parallel=True).size() == 4  # experts are like all others
    assert index.get_logical_hybrid_fsdp_rank() == 0
    with pytest.raises(ValueError, match=r"has no dimensions \('cp',\), it has \('outer', 'inner'\)"):
        index.get_submesh("cp")
    plain = FSDPDistributedIndex(mesh_of())
    assert plain.get_outer_fsdp_group() is None
    assert plain.get_fsdp_group() is plain.get_dp_group()
    with pytest.raises(ValueError, match="outer ranks hold the same shards here"):
        plain.get_logical_hybrid_fsdp_rank()
    with pytest.raises(ValueError, match="name the dimension to shard over"):
        FSDPDistributedIndex(mesh_of((2, 2), ("a", "b")))
    with pytest.raises(ValueError, match="dp_outer_dim and hybrid_fsdp_group belong together"):
        FSDPDistributedIndex(mesh_of((2, 2), ("a", "b")), "b", "a")


@on_ranks(4)
def test_numbers_of_shards_with_outer_ranks() -> None:
    index = two_levels(hsdp_outer_dp_shard=True)
    model = MegatronFSDP(parity.build(zoo.Plain), index, fsdp_unit_modules=[zoo.Block])
    assert index.get_logical_hybrid_fsdp_rank() == model.sharded.topology.shard
    assert model.sharded.topology.strategy is ShardingStrategy.OPTIM_GRADS_PARAMS


# -- uneven DTensors ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_uneven_dtensors_of_this_package() -> None:
    """They know their rows: nothing is communicated, and nothing set."""
    model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block])
    alone = dict(parity.build(zoo.Uneven).named_parameters())
    state = uneven_dtensor.preprocess_state_dict_for_uneven_dtensor({"model": model.state_dict()})
    for name, param in model.module.named_parameters():
        assert state["model"][f"module.{name}"].to_local().data_ptr() == param.to_local().data_ptr()
        chunk = uneven_dtensor.gather_and_compute_chunk_metadata(param)
        assert tuple(chunk.sizes) == tuple(param.to_local().shape)
        rows = alone[name].detach()[chunk.offsets[0] : chunk.offsets[0] + chunk.sizes[0]]
        assert torch.equal(param.to_local(), rows)
        uneven_dtensor.validate_uneven_dtensor(param)
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(param), alone[name])
        first, *rest = list(uneven_dtensor.split_dtensor(param, [1, param.shape[0] - 1], 0, True))
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(first), alone[name][:1])
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(rest[0]), alone[name][1:])


def uneven(whole: torch.Tensor, sizes: list[int], dim: int, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor of which rank i has ``sizes[i]`` rows or columns, as a program builds one."""
    mine = whole.split(sizes, dim)[mesh.get_local_rank()].clone()
    return DTensor.from_local(mine, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())


@on_ranks(2)
def test_uneven_dtensors_of_programs() -> None:
    mesh, whole = mesh_of((2,)), torch.arange(70.0).view(7, 10)
    for sizes, dim in (([2, 5], 0), ([7, 0], 0), ([9, 1], 1)):
        tensor = uneven(whole, sizes, dim, mesh)
        chunk = uneven_dtensor.gather_and_compute_chunk_metadata(tensor)
        assert chunk.offsets[dim] == (0, sizes[0])[dist.get_rank()]
        uneven_dtensor.validate_uneven_dtensor(tensor)
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(tensor), whole)
        for replicated in (
            uneven_dtensor.redistribute_uneven_dtensor_to_replicated(tensor),
            uneven_dtensor.gather_uneven_dtensor_to_full_tensor(tensor),
        ):
            assert replicated.placements == (Replicate(),) and torch.equal(replicated.to_local(), whole)
        folder = shared_folder()
        dcp.save(uneven_dtensor.preprocess_state_dict_for_uneven_dtensor({"x": tensor}), checkpoint_id=folder)
        other = {"x": uneven(torch.zeros_like(whole), sizes[::-1], dim, mesh)}
        dcp.load(uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(other), checkpoint_id=folder)
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(other["x"]), whole)
        for pieces in (3, [1, 4, whole.shape[dim] - 5]):
            split = list(uneven_dtensor.split_dtensor(tensor, pieces, dim, update_uneven_dtensor_chunk_meta=True))
            for piece, wanted in zip(split, whole.split(pieces, dim), strict=True):
                assert piece.shape == wanted.shape
                assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(piece), wanted)
    short = DTensor.from_local(
        torch.ones(2, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
    )
    with raises_everywhere(AssertionError, "parts of the DTensor end at (4, 3)"):
        uneven_dtensor.validate_uneven_dtensor(short)
    long = DTensor.from_local(
        torch.ones(2, 3), mesh, [Replicate()], run_check=False, shape=torch.Size((1, 3)), stride=(3, 1)
    )
    with raises_everywhere(AssertionError, "lies outside of it"):
        uneven_dtensor.validate_uneven_dtensor(long)
    with raises_everywhere(TypeError, "Expected a DTensor, got a Tensor"):
        uneven_dtensor.uneven_dtensor_to_full_tensor(whole)
    with raises_everywhere(ValueError, "sections [1, 2] add up to 3"):
        list(uneven_dtensor.split_dtensor(uneven(whole, [2, 5], 0, mesh), [1, 2]))


@on_ranks(4)
def test_dtensors_over_two_dimensions() -> None:
    mesh, whole = mesh_of((2, 2), ("a", "b")), torch.arange(56.0).view(7, 8)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Replicate()]):
        tensor = distribute_tensor(whole, mesh, placements)
        assert torch.equal(uneven_dtensor.uneven_dtensor_to_full_tensor(tensor), whole), placements
        uneven_dtensor.validate_uneven_dtensor(tensor)


def test_paths_of_nested_dictionaries() -> None:
    state = {"a": {"b": 1, "c": {"d": 2.0}}, "e": 3.0}
    found = uneven_dtensor.filter_unflattened_state_dict(state, visit_condition=lambda value: isinstance(value, float))
    assert found == [["a", "c", "d"], ["e"]]
    assert uneven_dtensor.get_unflattened_state_dict(state, ["a", "c", "d"]) == 2.0
    with pytest.raises(KeyError, match=r"no entry a\.x"):
        uneven_dtensor.get_unflattened_state_dict(state, ["a", "x"])


# -- optimizer groups ---------------------------------------------------------------------------------------------


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.named_parameters())
    return [
        {"params": [param for name, param in params if name.endswith("weight")]},
        {"params": [param for name, param in params if not name.endswith("weight")], "weight_decay": 0.0},
    ]


@pytest.mark.usefixtures("fake_world")
def test_the_map_of_optimizer_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Steps 1 and 2 of the user guide's conversion."""
    model = FullyShardedDataParallel(
        TransformerConfig(), DistributedDataParallelConfig(use_megatron_fsdp=True), parity.build(zoo.Plain), [zoo.Block]
    )
    optimizer = torch.optim.AdamW(groups_of(model))
    DistributedOptimizer(optimizer, [model], dump_param_to_param_group_map=tmp_path / "map")
    assert cli.main(["print-torch-dcp-in-json", str(tmp_path / "map")]) == 0
    assert "in 2 groups" in capsys.readouterr().out
    mapped = read_map(tmp_path / "map" / "param_to_param_group_map.json")
    assert mapped == {
        f"model.module.{name}": int(not name.endswith("weight")) for name, _ in model.module.named_parameters()
    }
    dump_param_to_param_group_map(tmp_path / "again", model, optimizer)
    assert cli.main(["checkpoint", "param-groups", str(tmp_path / "again")]) == 0
    assert read_map(tmp_path / "again" / "param_to_param_group_map.json") == mapped
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="2 models may have parameters of the same names"):
        DistributedOptimizer(other, [model, model], dump_param_to_param_group_map=tmp_path / "none")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["print-torch-dcp-in-json", str(tmp_path / "not there")]) == 0  # torchrun's first process does it


def test_conversion_under_megatrons_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 3 of the user guide: the same as ``mfsdp convert``."""
    write_torch_dist(tmp_path / "in")
    assert (
        cli.main(["convert-torch-dist-to-fsdp-dtensor", "--swiglu", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    )
    assert cli.main(["convert", "--swiglu", str(tmp_path / "in"), str(tmp_path / "other")]) == 0
    assert cli.main(["checkpoint", "compare", str(tmp_path / "out"), str(tmp_path / "other")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "the same"


@pytest.mark.parametrize(
    ("name", "buffers"),
    [
        ("TemporaryBucketAllocator", 0),
        ("StorageResizeBasedBucketAllocator", 0),
        ("RotaryBucketAllocator", 3),
        ("FixedPoolAllocator", 3),
        ("MaxPoolAllocator", 5),
    ],
)
@pytest.mark.usefixtures("fake_world")
def test_allocators_by_name(name: str, buffers: int) -> None:
    """Buckets that get buffers which stay: none, those of the three blocks, or all."""
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], **allocator_arguments(name))
    assert sum(bucket.exchange.gather_buffers.number > 0 for bucket in model.sharded.buckets) == buffers
    with pytest.raises(
        ValueError, match=r"got 'Slab'\. For an allocator of your own, pass fully_shard_model's buffer_allocator"
    ):
        allocator_arguments("Slab")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
