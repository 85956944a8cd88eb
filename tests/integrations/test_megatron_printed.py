"""Examples of Megatron's documents run as they are printed (``printed/``). Only their imports name this package.

``bridge_*``: Megatron Bridge, "Megatron FSDP". ``core_*``: Megatron Core, "Megatron FSDP".
``readme_*``: megatron-fsdp's README. ``user_guide_*``: "Megatron-FSDP User Guide".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from pool import on_ranks, shared_folder
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.megatron import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    DistributedOptimizer,
    FullyShardedDataParallel,
    GPTModelProvider,
    OptimizerConfig,
    TrainingConfig,
    TransformerConfig,
    add_megatron_fsdp_arguments,
    config_from_arguments,
)

PRINTED = Path(__file__).parent / "printed"


def run(name: str, **given: Any) -> SimpleNamespace:
    """Run a printed example, with the names that it takes for granted, and return its names."""
    text = (PRINTED / name).read_text(encoding="utf-8")
    exec(compile(text.replace('"cuda"', '"cpu"'), name, "exec"), given)
    return SimpleNamespace(**given)


# -- Megatron Bridge ----------------------------------------------------------------------------------------------


def test_enable_megatron_fsdp(logged: list[str]) -> None:
    config = run("bridge_enable.py").config
    assert config.validate() == []
    assert not logged
    assert config.dist.use_megatron_fsdp
    assert config.ddp.use_megatron_fsdp
    loading = ConfigContainer(
        dist=config.dist, ddp=config.ddp, checkpoint=run("bridge_checkpoint.py").checkpoint_config
    )
    assert loading.validate() == []


def test_complete_configuration(logged: list[str]) -> None:
    """What only the program reads is kept for it, and said in one line."""
    config = run("bridge_complete.py").config
    assert config.validate() == []
    assert (config.model.num_layers, config.optimizer.lr, config.scheduler.lr_decay_style) == (32, 3e-4, "cosine")
    assert config.train.global_batch_size // config.train.micro_batch_size == 16
    (line,) = logged
    assert line.startswith("for the program, and not read by mfsdp_compile: model.num_layers, ")
    assert all(f" {name}" in line for name in ("optimizer.clip_grad", "scheduler.lr_warmup_iters", "train.train_iters"))
    assert "tensor_model_parallel_size" not in line


def test_migration_from_ddp() -> None:
    config = ConfigContainer(checkpoint=CheckpointConfig(save="/path/to/checkpoints"))
    assert config.validate() == []
    run("bridge_migration.py", dist_config=config.dist, ddp_config=config.ddp, checkpoint_config=config.checkpoint)
    assert config.validate() == []
    assert config.dist.use_megatron_fsdp
    alone = ConfigContainer(dist=run("bridge_torch_fsdp2.py").dist_config)
    assert alone.validate() == []
    config.dist.use_torch_fsdp2 = True
    with pytest.raises(
        ValueError, match="Using use_megatron_fsdp and use_torch_fsdp2 at the same time is not supported"
    ):
        config.validate()


def test_sections_of_bridge(logged: list[str]) -> None:
    on = {
        "dist": DistributedInitConfig(use_megatron_fsdp=True),
        "ddp": DistributedDataParallelConfig(use_megatron_fsdp=True),
    }
    config = ConfigContainer(**on, dataset=object(), tokenizer=object(), logger=None)
    assert config.validate() == []
    assert config.unread == ["dataset", "tokenizer"]
    assert logged == ["for the program, and not read by mfsdp_compile: dataset, tokenizer"]
    for name in ("mixed_precision", "comm_overlap"):
        with pytest.raises(NotImplementedError, match=f"The section {name} of Megatron-Bridge changes other sections"):
            ConfigContainer(**on, **{name: "bf16_mixed"}).validate()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DistributedDataParallelConfig(use_megatron_fsdb=True), "Did you mean 'use_megatron_fsdp'"),
        (lambda: DistributedInitConfig(lazy_init=True), "has no setting 'lazy_init'. docs/megatron.md"),
        (lambda: TransformerConfig(calculate_per_token_los=True), "Did you mean 'calculate_per_token_loss'"),
        (lambda: CheckpointConfig(ckpt_formt="zarr"), "Did you mean 'ckpt_format'"),
        (lambda: OptimizerConfig(use_distributed_optimiser=True), "Did you mean 'use_distributed_optimizer'"),
    ],
)
def test_settings_that_are_misspelled(make: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make()
    assert TrainingConfig(train_iters=1) != TrainingConfig(train_iters=2)
    assert repr(TrainingConfig(train_iters=1)) == "TrainingConfig(train_iters=1)"


def test_formats_are_checked_without_checkpoints() -> None:
    on = {
        "dist": DistributedInitConfig(use_megatron_fsdp=True),
        "ddp": DistributedDataParallelConfig(use_megatron_fsdp=True),
    }
    for found in ("zarr", "torch_dist"):
        with pytest.raises(ValueError, match="Megatron FSDP only supports fsdp_dtensor checkpoint format"):
            ConfigContainer(**on, checkpoint=CheckpointConfig(ckpt_format=found)).validate()
    with pytest.raises(ValueError, match="fsdp_dtensor checkpoint format only supports Megatron FSDP"):
        ConfigContainer(checkpoint=CheckpointConfig(ckpt_format="fsdp_dtensor")).validate()

    class Theirs:
        ckpt_format, save, load = "torch_dist", None, None

    assert ConfigContainer(**on, checkpoint=Theirs()).validate() == []  # their default says nothing


class ColumnAndRow(nn.Module):
    """Two layers of which a tensor-parallel rank holds columns and rows, with Megatron's marks."""

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        size, rank = config.tensor_model_parallel_size, group.rank()
        self.name = group.group_name
        self.up = nn.Parameter(torch.randn(12, 6).chunk(size)[rank].clone())
        self.down = nn.Parameter(torch.randn(6, 12).chunk(size, dim=1)[rank].clone())
        for param, dim in ((self.up, 0), (self.down, 1)):
            param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.up).relu()
        return functional.all_reduce(nn.functional.linear(hidden, self.down), "sum", self.name).pow(2).mean()


@on_ranks(2)
def test_tensor_parallel_ranks_without_a_mesh() -> None:
    """``tensor_model_parallel_size=2``: parameters are halves of larger ones, on neighboring ranks."""
    config = run("bridge_complete.py").config
    config.validate()
    group = dist.new_group([0, 1])
    model = FullyShardedDataParallel(config.model, config.ddp, ColumnAndRow(config.model, group), fsdp_unit_modules=[])
    shapes = {name: tuple(param.shape) for name, param in model.module.named_parameters()}
    assert shapes == {"up": (12, 6), "down": (6, 12)}
    torch.manual_seed(0)
    assert torch.equal(model.module.up.full_tensor(), torch.randn(12, 6))
    assert torch.equal(model.module.down.full_tensor(), torch.randn(6, 12))
    model(torch.ones(2, 6)).backward()
    model.finish_grad_sync()
    assert model.dist_index.get_submesh("tp").size() == 2


@pytest.mark.parametrize(
    ("fake_world", "config", "instances", "said", "experts"),
    [
        (16, {"tensor_model_parallel_size": 2}, 1, "optim_grads_params over 8 ranks", None),
        (16, {"context_parallel_size": 2}, 2, "HSDP, optim_grads_params over 2 x 8 ranks", None),
        (
            16,
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
            2,
            "HSDP, optim_grads_params over 2 x 2 ranks",
            None,
        ),
        (16, {"expert_model_parallel_size": 2}, 2, "HSDP, optim_grads_params over 2 x 8 ranks", 8),
        (
            16,
            {"expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
            1,
            "optim_grads_params over 8 ranks",
            2,
        ),
    ],
    indirect=["fake_world"],
)
@pytest.mark.filterwarnings("ignore:tensor_model_parallel_size is 2, but no parameter")
def test_megatrons_order_of_ranks(
    fake_world: int, config: dict[str, int], instances: int, said: str, experts: int | None
) -> None:
    module = parity.build(zoo.Plain)
    if experts is not None:
        for param in module.blocks.parameters():
            param.allreduce = False
    ddp = DistributedDataParallelConfig(use_megatron_fsdp=True, num_distributed_optimizer_instances=instances)
    model = FullyShardedDataParallel(GPTModelProvider(num_layers=3, **config), ddp, module, check_values=False)
    topology, index = model.sharded.topology, model.get_distributed_index()
    assert str(topology) == said
    tensor, stages = config.get("tensor_model_parallel_size", 1), config.get("pipeline_model_parallel_size", 1)
    first = list(range(0, 16 // stages, tensor))  # of this rank's stage
    assert dist.get_process_group_ranks(index.get_dp_group()) == first
    assert dist.get_process_group_ranks(index.get_fsdp_group()) == first[: len(first) // instances]
    if tensor > 1:
        assert dist.get_process_group_ranks(index.get_submesh("tp").get_group()) == [0, 1]
    if experts is not None:
        size = config["expert_model_parallel_size"]
        assert dist.get_process_group_ranks(index.get_dp_group(is_expert_parallel=True)) == first[::size]


# -- Megatron Core ------------------------------------------------------------------------------------------------


class Classifier(zoo.Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.enter(x))))


def names(**given: Any) -> dict[str, Any]:
    """Return what Megatron Core's examples take for granted."""
    return {
        "torch": torch,
        "transformer_config": TransformerConfig(num_layers=2, hidden_size=16),
        "config": TransformerConfig(num_layers=2, hidden_size=16),
        "ddp_config": DistributedDataParallelConfig(use_megatron_fsdp=True),
        "GPTModel": lambda config: parity.build(lambda: Classifier(layers=config.num_layers)),
        "FullyShardedDataParallel": FullyShardedDataParallel,
        "DistributedOptimizer": DistributedOptimizer,
        "TransformerLayer": zoo.Block,
        "LanguageModelEmbedding": nn.LayerNorm,
        "lr": 1e-2,
        "loss_fn": nn.functional.cross_entropy,
        **given,
    }


@on_ranks(2)
def test_the_interface_of_megatron_core() -> None:
    """It trains with the numbers of ``fully_shard_model``, and loads what it has saved."""
    example = run("core_interface.py", **names())
    own = fully_shard_model(parity.build(lambda: Classifier(layers=2)), fsdp_unit_modules=[zoo.Block, nn.LayerNorm])
    own_optimizer = fully_shard_optimizer(torch.optim.AdamW(own.parameters(), lr=1e-2))
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs, labels = torch.randn(3, 4, 8, generator=generator), torch.randint(0, 5, (3, 4), generator=generator)
    example.train_step(inputs, labels)
    for x, y in zip(inputs, labels, strict=True):
        nn.functional.cross_entropy(own(x), y).backward()
    own_optimizer.step()
    for param, its in zip(example.model.parameters(), own.parameters(), strict=True):
        assert torch.equal(param.to_local(), its.to_local())
    folder = shared_folder()
    torch.distributed.checkpoint.save(example.model_and_optimizer_state_dict(), checkpoint_id=folder)
    saved = [param.to_local().clone() for param in example.model.parameters()]
    example.train_step(inputs, labels)
    state = example.model_and_optimizer_state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=folder)
    example.load_model_and_optimizer_state_dict(state)
    for param, before in zip(example.model.parameters(), saved, strict=True):
        assert torch.equal(param.to_local(), before)


@pytest.mark.usefixtures("fake_world")
def test_models_on_the_meta_device() -> None:
    def build(config: TransformerConfig) -> nn.Module:
        return Classifier(layers=config.num_layers)

    model = run("core_meta.py", **names(GPTModel=build)).model
    assert all(not param.is_meta for param in model.parameters())


# -- the user guide -----------------------------------------------------------------------------------------------


def test_flags_of_the_user_guide(logged: list[str]) -> None:
    required, recommended = (
        (PRINTED / f"user_guide_{name}.txt").read_text(encoding="utf-8").split() for name in ("required", "recommended")
    )
    parser = add_megatron_fsdp_arguments(argparse.ArgumentParser())
    for flags in (required, required + recommended):
        config = config_from_arguments(parser.parse_args(flags))
        assert config.ddp.use_megatron_fsdp
    assert config.ddp.nccl_ub
    assert config.model.calculate_per_token_loss
    assert not config.ddp.grad_reduce_in_fp32
    assert not logged


# -- megatron-fsdp's README ---------------------------------------------------------------------------------------


@on_ranks(4)
def test_the_walkthrough_of_the_readme() -> None:
    """Mesh, model, optimizer, and a checkpoint. The model's call lacks a comma where it is printed."""
    rank = dist.get_rank()
    experts = [dist.new_group([0, 1, 2, 3]), [dist.new_group([r]) for r in range(4)][rank]]
    mesh = run(
        "readme_mesh.py",
        torch=torch,
        dp_outer_size=2,
        dp_shard_size=2,
        cp_size=1,
        tp_size=1,
        expt_dp_group=experts[0],
        expt_tp_group=experts[1],
        expt_mesh=torch.arange(4).view(4, 1),
    )
    with torch.device("meta"):
        model = Classifier(layers=2)
    text = (PRINTED / "readme_model.py").read_text(encoding="utf-8")
    text = text.replace("device_mesh=device_mesh\n", "device_mesh=device_mesh,\n").replace("[...]", "[Layer]")
    text = text.replace("    expt_device_mesh=expt_device_mesh,\n", "")  # the model has no experts
    given = {
        "fully_shard_model": fully_shard_model,
        "model": model,
        "Layer": zoo.Block,
        "device_mesh": mesh.device_mesh,
        "hsdp_group": mesh.hsdp_group,
    }
    torch.manual_seed(0)
    exec(text, given)
    sharded: Any = given["model"]
    assert str(sharded.sharded.topology) == "HFSDP, optim_grads_params over 2 x 2 ranks"
    assert sharded.module is model
    optimizer = fully_shard_optimizer(torch.optim.Adam(sharded.parameters()), preproc_state_dict_for_dcp_ckpt=True)
    sharded(torch.randn(4, 8)).sum().backward()
    optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)
    optimizer.zero_grad(zero_grad_buffer=True)
    run("readme_checkpoint.py", torch=torch, model=sharded, optimizer=optimizer, CKPT_DIR=shared_folder())
    assert mesh.expt_device_mesh.mesh_dim_names == ("dp_shard_cp", "tp")


@pytest.mark.usefixtures("fake_world")
def test_a_mesh_with_outer_ranks_that_are_not_named() -> None:
    """Outer ranks without a name are ignored if there is only one.

    Several are refused: gradients would not be reduced over them.
    """
    names = ("dp_outer", "dp_shard")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 4), mesh_dim_names=names)
    model = fully_shard_model(
        parity.build(zoo.Plain), mesh, "dp_shard", fsdp_unit_modules=[zoo.Block], check_values=False
    )
    assert str(model.sharded.topology) == "optim_grads_params over 4 ranks"
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    with pytest.raises(
        ValueError, match=r"'dp_outer' of 2 ranks over which parameters are neither.*name it as dp_outer_dim"
    ):
        fully_shard_model(parity.build(zoo.Plain), mesh, "dp_shard", fsdp_unit_modules=[zoo.Block])
