"""``mfsdp_compile.megatron`` does what Megatron's documents say of its FSDP.

Each row names the document and its sentence.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import re
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from doc_tables import DOCS, check_table
from parity import AOT_EAGER, EAGER, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import api, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.megatron import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    DistributedOptimizer,
    FullyShardedDataParallel,
    OptimizerConfig,
    TransformerConfig,
    add_megatron_fsdp_arguments,
    config_from_arguments,
    validate,
)
from mfsdp_compile.megatron.settings import Treatment, known, setting_of
from mfsdp_compile.megatron.translation import sharding_arguments
from mfsdp_compile.megatron.validation import SECTIONS
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy

BRIDGE = "Megatron Bridge: Megatron FSDP"
README = "megatron-fsdp: README"
GUIDE = "Megatron-FSDP User Guide"
OVERVIEW = "Megatron Bridge: Megatron FSDP, overview"
CORE = "Megatron Core: Megatron FSDP"
REFERENCE = "Megatron-LM"
"""Names of the documents, or of the source.

They are those of Megatron-Bridge, megatron-fsdp, Megatron-LM's user guide, Megatron-Bridge's newer page and
Megatron-Core.
"""


class Row(NamedTuple):
    document: str
    sentence: str
    given: dict[str, Any]
    """Settings by path, in addition to an enabled configuration."""
    expected: Any


def row(document: str, sentence: str, expected: Any, **given: Any) -> Any:
    paths = {name.replace("__", "."): value for name, value in given.items()}
    return pytest.param(Row(document, sentence, paths, expected), id=f"{document} {' '.join(given) or sentence[:30]}")


def container(given: dict[str, Any] | None = None, **sections: Any) -> ConfigContainer:
    """Return an enabled configuration."""
    on = {
        "dist": DistributedInitConfig(use_megatron_fsdp=True),
        "ddp": DistributedDataParallelConfig(use_megatron_fsdp=True),
    }
    config = ConfigContainer(**on | sections)
    for path, value in (given or {}).items():
        section, name = path.split(".")
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return config


def value_at(config: Any, path: str) -> Any:
    section, name = path.split(".")
    return getattr(getattr(config, section), name)


@pytest.fixture(autouse=True)
def _without_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("RANK", raising=False)


# -- adjustments ------------------------------------------------------------------------------------------------------

ADJUSTED = "When Megatron FSDP is enabled, the following settings are automatically adjusted"
ADJUSTMENTS = [
    row(
        BRIDGE,
        f"{ADJUSTED}: `ddp.average_in_collective` is set to `False`",
        {"ddp.average_in_collective": False},
        ddp__average_in_collective=True,
    ),
    row(
        BRIDGE,
        f"{ADJUSTED}: `model.gradient_accumulation_fusion` is set to `False`",
        {"model.gradient_accumulation_fusion": False},
        model__gradient_accumulation_fusion=True,
    ),
    row(
        BRIDGE,
        f"{ADJUSTED}: `ddp.reuse_grad_buf_for_mxfp8_param_ag` is set to `False`",
        {"ddp.reuse_grad_buf_for_mxfp8_param_ag": False},
        ddp__reuse_grad_buf_for_mxfp8_param_ag=True,
    ),
    row(
        BRIDGE,
        f"{ADJUSTED}: `optimizer.reuse_grad_buf_for_mxfp8_param_ag` is set to `False`",
        {"optimizer.reuse_grad_buf_for_mxfp8_param_ag": False},
        optimizer__reuse_grad_buf_for_mxfp8_param_ag=True,
    ),
    row(
        OVERVIEW,
        "Bridge also adjusts some settings automatically, including disabling average_in_collective and several "
        "buffer-reuse optimizations",
        {
            "ddp.average_in_collective": False,
            "ddp.reuse_grad_buf_for_mxfp8_param_ag": False,
            "optimizer.reuse_grad_buf_for_mxfp8_param_ag": False,
        },
        ddp__average_in_collective=True,
        ddp__reuse_grad_buf_for_mxfp8_param_ag=True,
        optimizer__reuse_grad_buf_for_mxfp8_param_ag=True,
    ),
    row(
        GUIDE,
        "Defaults to `False`. Automatically overridden to `True` when `nccl_ub` is enabled.",
        {"ddp.fsdp_double_buffer": True},
        ddp__nccl_ub=True,
    ),
    row(
        README,
        "having persistent double buffers ... is required to register NCCL user buffers (`nccl_ub=True`)",
        {"ddp.fsdp_double_buffer": True},
        ddp__nccl_ub=True,
    ),
    row(
        README,
        "`fsdp_manual_registration` will manually register the FSDP communication buffers with the NCCL user buffer.",
        {"ddp.fsdp_double_buffer": True},
        ddp__fsdp_manual_registration=True,
        ddp__nccl_ub=True,
    ),
    row(
        CORE,
        "The custom FSDP must be used with a distributed optimizer since it provides distributed checkpointing.",
        {"ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": True},
        ddp__use_distributed_optimizer=False,
        optimizer__use_distributed_optimizer=False,
    ),
    row(
        REFERENCE,
        "max_pool => double_buffer",
        {"ddp.fsdp_double_buffer": True},
        ddp__megatron_fsdp_max_pool_double_buffer=True,
    ),
    row(
        REFERENCE,
        "optim_grads_params: Forces overlap_param_gather=True and overlap_grad_reduce=True.",
        {"ddp.overlap_grad_reduce": True, "ddp.overlap_param_gather": True},
        ddp__overlap_grad_reduce=False,
        ddp__overlap_param_gather=False,
    ),
    row(
        REFERENCE,
        "optim_grads: Forces overlap_grad_reduce=True.",
        {"ddp.overlap_grad_reduce": True},
        ddp__data_parallel_sharding_strategy="optim_grads",
        ddp__overlap_grad_reduce=False,
        ddp__overlap_param_gather=False,
    ),
    row(
        REFERENCE,
        "overlap_grad_reduce: False (no_shard/optim only)",
        {},
        ddp__data_parallel_sharding_strategy="optim",
        ddp__overlap_grad_reduce=False,
        ddp__overlap_param_gather=False,
    ),
    row(
        REFERENCE,
        "decoupled grad on with precision-aware optimizer",
        {"ddp.megatron_fsdp_use_decoupled_grad": True},
        optimizer__use_precision_aware_optimizer=True,
    ),
    row(BRIDGE, "To enable Megatron FSDP, set `use_megatron_fsdp=True` in both", {}),
]


@pytest.mark.parametrize("row", ADJUSTMENTS)
def test_adjustments(row: Row, logged: list[str]) -> None:
    config = container(row.given)
    adjusted = {adjustment.setting: adjustment for adjustment in config.validate()}
    assert {path: adjustment.after for path, adjustment in adjusted.items()} == row.expected
    assert len(logged) == len(row.expected)
    for path, after in row.expected.items():
        assert value_at(config, path) == after
        assert adjusted[path].before == (not after)
        assert f"{path} is set to {after}: {adjusted[path].reason}" in logged
    assert config.validate() == []  # all settings are adjusted by now


IDLE = {
    "ddp.fp8_param_gather": True,
    "dist.nccl_communicator_config_path": "nccl.yaml",
    "dist.high_priority_stream_groups": ["dp_cp", "ep"],
    "dist.use_sharp": True,
    "dist.sharp_enabled_group": "dp",
    "ddp.gradient_reduce_div_fusion": False,
    "ddp.bucket_size": 40_000_000,
    "ddp.fsdp_all_gather_in_start_param_sync": False,
    "ddp.align_param_gather": True,
    "ddp.megatron_fsdp_version": 2,
    "ddp.use_custom_fsdp": True,
}


def test_settings_without_effect_say_so(logged: list[str]) -> None:
    paths = [
        f"{s}.{of.name}" for s, cls in SECTIONS.items() for of in fields(cls) if setting_of(of).kind is Treatment.IDLE
    ]
    assert sorted(IDLE) == sorted(paths)
    adjusted = container(IDLE).validate()
    assert {each.setting: each.after for each in adjusted} == IDLE
    for path, value in IDLE.items():
        assert any(line.startswith(f"{path}={value!r} has no effect: ") for line in logged), path


def test_an_empty_list_is_not_set() -> None:
    """Megatron-LM's default for ``--high-priority-stream-groups`` is an empty list, Megatron-Bridge's is None."""
    assert container({"dist.high_priority_stream_groups": []}).validate() == []


# -- errors -----------------------------------------------------------------------------------------------------------

FORMAT = "Megatron FSDP only supports fsdp_dtensor checkpoint format"
ERRORS = [
    row(
        BRIDGE,
        'Error: "use_tp_pp_dp_mapping is not supported with Megatron FSDP"; Remove `use_tp_pp_dp_mapping=True`; '
        "FSDP requires standard rank initialization order",
        (ValueError, "use_tp_pp_dp_mapping is not supported with Megatron FSDP", "Remove use_tp_pp_dp_mapping=True"),
        dist__use_tp_pp_dp_mapping=True,
    ),
    row(
        OVERVIEW,
        "use_tp_pp_dp_mapping is not supported with Megatron FSDP",
        (ValueError, "use_tp_pp_dp_mapping is not supported with Megatron FSDP", "standard order of ranks"),
        dist__use_tp_pp_dp_mapping=True,
    ),
    row(
        BRIDGE,
        f'Error: "{FORMAT}"; Set `checkpoint.ckpt_format="fsdp_dtensor"`',
        (ValueError, FORMAT, "ckpt_format is 'torch_dist'", "Set checkpoint.ckpt_format='fsdp_dtensor'"),
        checkpoint__save="/path/to/checkpoints",
    ),
    row(
        BRIDGE,
        "Attempting to use other checkpoint formats (`torch_dist`, `zarr`) with Megatron FSDP will result in a "
        "configuration error.",
        (ValueError, FORMAT, "ckpt_format is 'zarr'"),
        checkpoint__ckpt_format="zarr",
        checkpoint__load="/path/to/checkpoints",
    ),
    row(
        OVERVIEW,
        "legacy checkpoint formats such as torch_dist and zarr are not valid for Megatron FSDP save/load",
        (ValueError, FORMAT),
        checkpoint__ckpt_format="torch_dist",
        checkpoint__load="/path/to/checkpoints",
    ),
    row(
        OVERVIEW,
        "Public recipes may expose use_megatron_fsdp while still defaulting to a non-FSDP checkpoint format. The "
        "checkpoint requirement is stable and mandatory",
        (ValueError, FORMAT, "mfsdp convert"),
        checkpoint__save="/path/to/checkpoints",
        checkpoint__load="/path/to/checkpoints",
    ),
    row(
        BRIDGE,
        'Error: "Using use_megatron_fsdp and use_torch_fsdp2 at the same time is not supported"; Choose one '
        "FSDP implementation",
        (ValueError, "Using use_megatron_fsdp and use_torch_fsdp2 at the same time is not supported", "choose one"),
        dist__use_torch_fsdp2=True,
    ),
    row(
        OVERVIEW,
        "use_megatron_fsdp and use_torch_fsdp2 are mutually exclusive",
        (ValueError, "mutually exclusive"),
        dist__use_torch_fsdp2=True,
    ),
    row(
        BRIDGE,
        "Verify FSDP is correctly enabled in both `dist` and `ddp` configs",
        (
            ValueError,
            "dist.use_megatron_fsdp is True and ddp.use_megatron_fsdp is False",
            "set ddp.use_megatron_fsdp = True too",
        ),
        ddp__use_megatron_fsdp=False,
    ),
    row(
        BRIDGE,
        "Enable FSDP in both `dist` and `ddp` configurations",
        (
            ValueError,
            "ddp.use_megatron_fsdp is True and dist.use_megatron_fsdp is False",
            "set dist.use_megatron_fsdp = True too",
        ),
        dist__use_megatron_fsdp=False,
    ),
    row(
        README,
        "only `no_shard` (DP Replication) and `optim` (Optimizer State Hybrid Sharding, requires "
        "`zero_dp_strategy='optim_grads_params`) are supported",
        (
            ValueError,
            "outer_dp_sharding_strategy='optim' with data_parallel_sharding_strategy='optim_grads'",
            "'optim_grads_params'",
        ),
        ddp__data_parallel_sharding_strategy="optim_grads",
        ddp__outer_dp_sharding_strategy="optim",
        ddp__num_distributed_optimizer_instances=2,
    ),
    row(
        README,
        "only `no_shard` (DP Replication) and `optim` ... are supported",
        (ValueError, "outer_dp_sharding_strategy='optim_grads'"),
        ddp__outer_dp_sharding_strategy="optim_grads",
        ddp__num_distributed_optimizer_instances=2,
    ),
    row(
        README,
        '`outer_dp_sharding_strategy` has the same options, except for the (required) "outer" DP group',
        (ValueError, "num_distributed_optimizer_instances is 1", "Set it to the number of parts"),
        ddp__outer_dp_sharding_strategy="optim",
    ),
    row(
        README,
        "`fsdp_manual_registration`: This option is only effective when `nccl_ub` is enabled.",
        (ValueError, "FSDP manual registration is only supported with nccl-ub option"),
        ddp__fsdp_manual_registration=True,
    ),
    *(
        row(
            REFERENCE,
            'cuda_graph_impl in ("none","full_iteration")',
            (NotImplementedError, f"model.{name}=True is not implemented", "cuda_graph_impl='full_iteration'"),
            **{f"model__{name}": True},
        )
        for name in ("enable_cuda_graph", "external_cuda_graph")
    ),
    row(
        REFERENCE,
        "suggested_communication_unit_size (DDP config)",
        (
            NotImplementedError,
            "ddp.suggested_communication_unit_size=5 is not implemented",
            "unit_bytes",
            "Leave it at None",
        ),
        ddp__suggested_communication_unit_size=5,
    ),
    row(
        README,
        "`zero_dp_strategy`: `no_shard`, `optim`, `optim_grads`, `optim_grads_params`",
        (ValueError, "data_parallel_sharding_strategy takes", "'zero3'"),
        ddp__data_parallel_sharding_strategy="zero3",
    ),
]


@pytest.mark.parametrize("row", ERRORS)
def test_errors(row: Row) -> None:
    error, *fragments = row.expected
    config = container(row.given)
    before = copy.deepcopy(config)
    with raises_everywhere(error, *fragments):
        config.validate()
    assert config == before


def test_every_refused_setting_has_a_row() -> None:
    refused = {of.name for cls in SECTIONS.values() for of in fields(cls) if setting_of(of).kind is Treatment.REFUSED}
    assert refused <= {name.split(".")[1] for each in ERRORS for name in each.values[0].given}


def test_fsdp2_alone_is_left_to_torch() -> None:
    """Megatron Bridge: Megatron FSDP: "Does not require `fsdp_dtensor` checkpoint format"."""
    config = ConfigContainer(
        dist=DistributedInitConfig(use_torch_fsdp2=True, use_tp_pp_dp_mapping=True),
        ddp=DistributedDataParallelConfig(average_in_collective=True),
        checkpoint=CheckpointConfig(save="/path/to/checkpoints"),
    )
    assert config.validate() == []
    assert config.ddp.average_in_collective
    config.checkpoint.ckpt_format = "fsdp_dtensor"
    with pytest.raises(ValueError, match="fsdp_dtensor checkpoint format only supports Megatron FSDP"):
        config.validate()


def test_moving_from_ddp() -> None:
    """Megatron Bridge: Megatron FSDP, "Migration from DDP": the steps, one by one. Errors come in their order."""
    config = ConfigContainer(
        dist=DistributedInitConfig(use_tp_pp_dp_mapping=True),
        ddp=DistributedDataParallelConfig(average_in_collective=True, reuse_grad_buf_for_mxfp8_param_ag=True),
        checkpoint=CheckpointConfig(save="/path/to/checkpoints", load="/path/to/checkpoints"),
        optimizer=SimpleNamespace(
            optimizer="adam", lr=3e-4, clip_grad=1.0
        ),  # a foreign configuration, with additional settings
        scheduler=SimpleNamespace(lr_decay_style="cosine"),
        train=SimpleNamespace(micro_batch_size=2),
        model=SimpleNamespace(num_layers=32, gradient_accumulation_fusion=True),
    )
    assert config.validate() == []  # DDP
    config.dist.use_megatron_fsdp = True
    with pytest.raises(ValueError, match="enabled in both"):
        config.validate()
    config.ddp.use_megatron_fsdp = True
    with pytest.raises(ValueError, match="use_tp_pp_dp_mapping"):
        config.validate()
    config.dist.use_tp_pp_dp_mapping = False
    with pytest.raises(ValueError, match="fsdp_dtensor"):
        config.validate()
    config.checkpoint.ckpt_format = "fsdp_dtensor"
    assert {each.setting for each in config.validate()} == {
        "ddp.average_in_collective",
        "ddp.reuse_grad_buf_for_mxfp8_param_ag",
        "model.gradient_accumulation_fusion",
    }
    assert vars(config.optimizer) == {"optimizer": "adam", "lr": 3e-4, "clip_grad": 1.0}  # nothing is added


@pytest.mark.parametrize(("value", "warns"), [("1", True), ("8", False), (None, False)])
def test_one_hardware_queue(value: str | None, warns: bool, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    """Megatron-FSDP User Guide: "To ensure full parallelization of FSDP communication and computation, disable the
    CUDA_DEVICE_MAX_CONNECTIONS environment variable. ... (But it may slow down TP and CP to some extent.)" """
    if value is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    container().validate()
    said = [str(w.message) for w in recwarn if "CUDA_DEVICE_MAX_CONNECTIONS" in str(w.message)]
    assert len(said) == warns
    assert all("Unset it" in each and "may slow down tensor and context parallelism" in each for each in said)


def test_settings_that_nobody_here_knows() -> None:
    @dataclass
    class Theirs(DistributedDataParallelConfig):
        delay_wgrad_compute: bool = False

    assert container(ddp=Theirs(use_megatron_fsdp=True)).validate() == []
    with pytest.raises(
        NotImplementedError, match=r"ddp.delay_wgrad_compute=True is not implemented.*Leave it at False"
    ):
        container(ddp=Theirs(use_megatron_fsdp=True, delay_wgrad_compute=True)).validate()


# -- the command line -------------------------------------------------------------------------------------------------


class FlagRow(NamedTuple):
    document: str
    flags: str
    path: str
    value: Any
    arguments: dict[str, Any]
    """Resulting arguments of ``fully_shard_model``."""
    without: dict[str, Any]
    """Arguments without the setting."""


REQUIRED = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion"
REQUIRED += " --use-distributed-optimizer"
BF16, F32 = torch.bfloat16, torch.float32


def policy(main_params: Any = F32, main_grads: Any = F32, grad_comm: Any = F32) -> dict[str, Any]:
    return {"mixed_precision_policy": api.MixedPrecisionPolicy(main_params, main_grads, grad_comm)}


FLAGS = [
    FlagRow(GUIDE, "--use-megatron-fsdp", "dist.use_megatron_fsdp", True, {}, {}),
    FlagRow(CORE, "--use-megatron-fsdp", "ddp.use_megatron_fsdp", True, {}, {}),
    *(
        FlagRow(
            document,
            f"--data-parallel-sharding-strategy {name}",
            "ddp.data_parallel_sharding_strategy",
            name,
            of,
            without,
        )
        for document, name in (
            (GUIDE, "optim_grads_params"),
            (README, "optim_grads"),
            (README, "optim"),
            (README, "no_shard"),
        )
        for of, without in [({"zero_dp_strategy": name}, {"zero_dp_strategy": "optim_grads_params"})]
    ),
    FlagRow(GUIDE, "--no-gradient-accumulation-fusion", "model.gradient_accumulation_fusion", False, {}, {}),
    FlagRow(GUIDE, "--use-distributed-optimizer", "ddp.use_distributed_optimizer", True, {}, {}),
    FlagRow(CORE, "--use-distributed-optimizer", "optimizer.use_distributed_optimizer", True, {}, {}),
    FlagRow(GUIDE, "--ckpt-format fsdp_dtensor", "checkpoint.ckpt_format", "fsdp_dtensor", {}, {}),
    FlagRow(BRIDGE, "--save somewhere --ckpt-format fsdp_dtensor", "checkpoint.save", "somewhere", {}, {}),
    FlagRow(BRIDGE, "--load somewhere --ckpt-format fsdp_dtensor", "checkpoint.load", "somewhere", {}, {}),
    FlagRow(BRIDGE, "--save-interval 1000", "checkpoint.save_interval", 1000, {}, {}),
    FlagRow(
        GUIDE,
        "--calculate-per-token-loss",
        "model.calculate_per_token_loss",
        True,
        {"calculate_per_token_loss": True},
        {"calculate_per_token_loss": False},
    ),
    FlagRow(
        GUIDE,
        "--init-model-with-meta-device",
        "model.init_model_with_meta_device",
        True,
        {"init_model_with_meta_device": True},
        {"init_model_with_meta_device": False},
    ),
    FlagRow(GUIDE, "--grad-reduce-in-bf16", "ddp.grad_reduce_in_fp32", False, policy(F32, None, None), policy()),
    FlagRow(
        GUIDE,
        "--fsdp-double-buffer",
        "ddp.fsdp_double_buffer",
        True,
        {"fsdp_double_buffer": True, "nccl_ub": False},
        {"fsdp_double_buffer": False},
    ),
    FlagRow(
        GUIDE, "--use-nccl-ub", "ddp.nccl_ub", True, {"nccl_ub": True, "fsdp_double_buffer": True}, {"nccl_ub": False}
    ),
    FlagRow(
        README,
        "--disable-symmetric-registration",
        "ddp.disable_symmetric_registration",
        True,
        {"disable_symmetric_registration": True},
        {"disable_symmetric_registration": False},
    ),
    FlagRow(
        README,
        "--keep-fp8-transpose-cache",
        "ddp.keep_fp8_transpose_cache",
        True,
        {"keep_fp8_transpose_cache": True},
        {"keep_fp8_transpose_cache": False},
    ),
    FlagRow(
        README,
        "--num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        "ddp.outer_dp_sharding_strategy",
        "optim",
        {"outer_dp_sharding_strategy": "optim"},
        {"outer_dp_sharding_strategy": "no_shard"},
    ),
    FlagRow(REFERENCE, "--num-distributed-optimizer-instances 2", "ddp.num_distributed_optimizer_instances", 2, {}, {}),
    FlagRow(
        README,
        "--data-parallel-sharding-strategy optim --overlap-grad-reduce",
        "ddp.overlap_grad_reduce",
        True,
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"overlap_grad_reduce": True},
    ),
    FlagRow(REFERENCE, "--overlap-param-gather", "ddp.overlap_param_gather", True, {"overlap_param_gather": True}, {}),
    FlagRow(
        REFERENCE,
        "--no-check-for-nan-in-loss-and-grad",
        "ddp.check_for_nan_in_grad",
        False,
        {"report_nan_in_param_grad": False},
        {"report_nan_in_param_grad": True},
    ),
    FlagRow(
        REFERENCE,
        "--megatron-fsdp-main-params-dtype bf16",
        "ddp.megatron_fsdp_main_params_dtype",
        "bf16",
        policy(BF16),
        policy(),
    ),
    FlagRow(
        REFERENCE,
        "--megatron-fsdp-main-params-dtype auto",
        "ddp.megatron_fsdp_main_params_dtype",
        "auto",
        policy(None),
        policy(),
    ),
    FlagRow(
        REFERENCE,
        "--megatron-fsdp-main-grads-dtype bf16",
        "ddp.megatron_fsdp_main_grads_dtype",
        "bf16",
        policy(F32, BF16, None),
        policy(),
    ),
    FlagRow(
        REFERENCE,
        "--megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype fp32",
        "ddp.megatron_fsdp_grad_comm_dtype",
        "bf16",
        policy(F32, F32, BF16),
        policy(),
    ),
    FlagRow(
        REFERENCE,
        "--megatron-fsdp-grad-comm-dtype bf16 --ddp-reduce-scatter-with-fp32-accumulation",
        "ddp.reduce_scatter_with_fp32_accumulation",
        True,
        {"mixed_precision_policy": api.MixedPrecisionPolicy(F32, None, BF16, grad_sum_dtype=F32)},
        policy(),
    ),
    FlagRow(
        REFERENCE,
        "--use-precision-aware-optimizer",
        "optimizer.use_precision_aware_optimizer",
        True,
        {"use_decoupled_grad": True},
        {"use_decoupled_grad": False},
    ),
    FlagRow(
        REFERENCE,
        "--megatron-fsdp-max-pool-double-buffer",
        "ddp.megatron_fsdp_max_pool_double_buffer",
        True,
        {"maxpool_double_buffer": True, "fsdp_double_buffer": True},
        {"maxpool_double_buffer": False},
    ),
    FlagRow(
        REFERENCE,
        "--fsdp-db-use-persist-buf-on-alloc-fail",
        "ddp.fsdp_db_use_persist_buf_on_alloc_fail",
        True,
        {"fsdp_db_use_persist_buf_on_alloc_fail": True},
        {"fsdp_db_use_persist_buf_on_alloc_fail": False},
    ),
    FlagRow(
        README,
        "--megatron-fsdp-enable-fine-grained-param-gather",
        "ddp.megatron_fsdp_enable_fine_grained_param_gather",
        True,
        {"enable_fine_grained_param_gather": True},
        {"enable_fine_grained_param_gather": False},
    ),
    FlagRow(
        BRIDGE,
        "--ddp-average-in-collective",
        "ddp.average_in_collective",
        False,
        {"average_in_collective": False},
        {"average_in_collective": False},
    ),
    FlagRow(
        REFERENCE,
        "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
        "ddp.megatron_fsdp_cuda_graph_mode",
        True,
        {"cuda_graph_mode": True},
        {"cuda_graph_mode": False},
    ),
    FlagRow(
        REFERENCE,
        "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad",
        "ddp.megatron_fsdp_cuda_graph_mode",
        True,
        {"cuda_graph_mode": True},
        {"cuda_graph_mode": False},
    ),
    FlagRow(BRIDGE, "--reuse-grad-buf-for-mxfp8-param-ag", "ddp.reuse_grad_buf_for_mxfp8_param_ag", False, {}, {}),
    FlagRow(REFERENCE, "--ddp-bucket-size 40000000", "ddp.bucket_size", 40_000_000, {}, {}),
    FlagRow(REFERENCE, "--no-gradient-reduce-div-fusion", "ddp.gradient_reduce_div_fusion", False, {}, {}),
    FlagRow(
        REFERENCE, "--nccl-communicator-config-path x.yaml", "dist.nccl_communicator_config_path", "x.yaml", {}, {}
    ),
    FlagRow(
        REFERENCE, "--high-priority-stream-groups dp_cp ep", "dist.high_priority_stream_groups", ["dp_cp", "ep"], {}, {}
    ),
    FlagRow(REFERENCE, "--use-sharp", "dist.use_sharp", True, {}, {}),
    FlagRow(REFERENCE, "--sharp-enabled-group dp_replica", "dist.sharp_enabled_group", "dp_replica", {}, {}),
    FlagRow(REFERENCE, "--megatron-fsdp-version 2", "ddp.megatron_fsdp_version", 2, {}, {}),
    FlagRow(
        GUIDE,
        "--dump-param-to-param-group-map /path/to/param_to_param_group_map",
        "checkpoint.dump_param_to_param_group_map",
        "/path/to/param_to_param_group_map",
        {},
        {},
    ),
]


def parsed(flags: str) -> argparse.Namespace:
    return add_megatron_fsdp_arguments(argparse.ArgumentParser()).parse_args(flags.split())


def arguments_of(config: ConfigContainer) -> dict[str, Any]:
    return sharding_arguments(config.model, config.ddp)


@pytest.mark.parametrize("row", [pytest.param(each, id=f"{each.document} {each.flags}") for each in FLAGS])
def test_flags(row: FlagRow) -> None:
    first = row.flags.split()[0]
    others = " ".join(part for part in re.split(r" (?=--)", REQUIRED) if part.split()[0] != first)
    config = config_from_arguments(parsed(f"{others} {row.flags}"))
    assert value_at(config, row.path) == row.value
    found = arguments_of(config)
    assert {name: found[name] for name in row.arguments} == row.arguments
    plain = arguments_of(config_from_arguments(parsed("--use-megatron-fsdp")))
    assert {name: plain[name] for name in row.without} == row.without
    accepted = inspect.unwrap(fully_shard_model).__code__
    assert found.keys() <= set(accepted.co_varnames[: accepted.co_argcount + accepted.co_kwonlyargcount])


def test_every_flag_has_a_row() -> None:
    flags = {setting_of(of).flag for cls in SECTIONS.values() for of in fields(cls) if setting_of(of).flag}
    elsewhere = {  # rejected, see test_refused_flags
        "--use-torch-fsdp2",
        "--use-tp-pp-dp-mapping",
        "--suggested-communication-unit-size",
        "--fsdp-manual-registration",
        "--fp8-param-gather",
        "--enable-cuda-graph",
        "--external-cuda-graph",
    }
    assert flags == {word for each in FLAGS for word in each.flags.split() if word.startswith("--")} | elsewhere


@pytest.mark.parametrize(
    ("document", "flags", "says"),
    [
        (BRIDGE, "--use-torch-fsdp2", "use_megatron_fsdp and use_torch_fsdp2 at the same time is not supported"),
        (BRIDGE, "--use-tp-pp-dp-mapping", "use_tp_pp_dp_mapping is not supported with Megatron FSDP"),
        (GUIDE, "--save x --ckpt-format torch_dist", "only supports fsdp_dtensor checkpoint format"),
        (GUIDE, "--save x", "only supports fsdp_dtensor checkpoint format"),
        (README, "--fsdp-manual-registration", "only supported with nccl-ub"),
        (REFERENCE, "--suggested-communication-unit-size 5", "ddp.suggested_communication_unit_size=5"),
        (REFERENCE, "--enable-cuda-graph", "model.enable_cuda_graph=True"),
        (REFERENCE, "--external-cuda-graph", "model.external_cuda_graph=True"),
        (REFERENCE, "--cuda-graph-impl local", "captures single layers"),
    ],
)
def test_refused_flags(document: str, flags: str, says: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=says):
        config_from_arguments(parsed(f"{REQUIRED} {flags}"))


def test_the_guides_command_lines(logged: list[str]) -> None:
    """Megatron-FSDP User Guide, "Required Configurations" and "Recommended Configurations"; Megatron Core: Megatron
    FSDP, "Add these flags to enable MCore custom FSDP": the command lines work unchanged, and nothing is adjusted."""
    recommended = (
        "--calculate-per-token-loss --init-model-with-meta-device --grad-reduce-in-bf16 --fsdp-double-buffer "
        "--use-nccl-ub"
    )
    for flags in (REQUIRED, f"{REQUIRED} --ckpt-format fsdp_dtensor", f"{REQUIRED} {recommended}"):
        config_from_arguments(parsed(flags))
    assert not logged


def test_a_parser_that_has_flags_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", default="mine")
    parser.add_argument("--lr", type=float)
    given = add_megatron_fsdp_arguments(parser).parse_args(f"{REQUIRED} --ckpt-format fsdp_dtensor --lr 0.1".split())
    assert config_from_arguments(given).checkpoint.save == "mine"
    # Megatron-LM's own parser has other defaults, and flags that are False.
    theirs = argparse.Namespace(
        use_megatron_fsdp=True,
        use_torch_fsdp2=False,
        gradient_accumulation_fusion=True,
        data_parallel_sharding_strategy="optim_grads",
        overlap_grad_reduce=False,
        grad_reduce_in_bf16=False,
        check_for_nan_in_loss_and_grad=True,
        tensor_model_parallel_size=2,
        hidden_size=4096,
    )
    config = config_from_arguments(theirs)
    assert config.model == TransformerConfig(tensor_model_parallel_size=2)
    assert config.ddp == DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads",
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=True,
    )


def test_help_can_be_printed() -> None:
    text = add_megatron_fsdp_arguments(argparse.ArgumentParser(prog="train")).format_help()
    assert "--use-nccl-ub" in text
    assert "{no_shard,optim,optim_grads,optim_grads_params}" in text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"preserve_fp32_weights": False, "megatron_fsdp_main_params_dtype": BF16},
            "preserve_fp32_weights=False means",
        ),
        (
            {"grad_reduce_in_fp32": True, "megatron_fsdp_main_grads_dtype": BF16},
            "megatron_fsdp_main_grads_dtype=torch.float32",
        ),
        (
            {"grad_reduce_in_fp32": True, "megatron_fsdp_grad_comm_dtype": "bf16"},
            "megatron_fsdp_grad_comm_dtype=torch.float32",
        ),
        ({"megatron_fsdp_grad_comm_dtype": "int8"}, "takes 'fp32', 'bf16', 'fp16', 'auto'"),
    ],
)
def test_dtypes_that_contradict(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sharding_arguments(TransformerConfig(), DistributedDataParallelConfig(**settings))


def test_fp32_weights() -> None:
    """megatron-fsdp: README: "`preserve_fp32_weights` will preserve a `FP32` precision version of model parameters
    utilized for optimization. Defaults to `True`"."""
    for preserved, dtype in ((True, F32), (False, None)):
        ddp = DistributedDataParallelConfig(preserve_fp32_weights=preserved)
        assert sharding_arguments(TransformerConfig(), ddp)["mixed_precision_policy"].main_params_dtype is dtype


def test_table_of_settings() -> None:
    """docs/megatron.md has every setting, and its description equals that of the code."""
    rows = []
    for section, cls in SECTIONS.items():
        for name, of in known(cls).items():
            setting, default = setting_of(of), of.default
            here = {Treatment.REFUSED: "raises NotImplementedError: ", Treatment.IDLE: "no effect: "}.get(
                setting.kind, ""
            ) + setting.meaning
            flag = f"`{setting.flag}`" if setting.flag is not None else ""
            rows.append((f"`{section}.{name}`", flag, f"`{default!r}`", here))
    check_table(DOCS / "megatron.md", "settings", ("setting", "flag", "default", "here"), rows)


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn", "full_iteration"]},
    ],
)
def test_graphs_of_whole_iterations(settings: dict[str, Any]) -> None:
    """Megatron-LM: ``cuda_graph_impl in ("none", "full_iteration")`` with Megatron FSDP."""
    config = ConfigContainer(
        model=TransformerConfig(**settings), ddp=DistributedDataParallelConfig(use_megatron_fsdp=True)
    )
    config.dist.use_megatron_fsdp = True
    adjusted = {adjustment.setting for adjustment in config.validate()}
    assert {"ddp.megatron_fsdp_cuda_graph_mode", "ddp.fsdp_double_buffer"} <= adjusted
    assert sharding_arguments(config.model, config.ddp)["cuda_graph_mode"] is True
    config.ddp.check_for_nan_in_grad = True
    with pytest.raises(ValueError, match=r"check_for_nan_in_grad reads values on the host"):
        config.validate()


@pytest.mark.parametrize("settings", [{"cuda_graph_impl": "local"}, {"cuda_graph_impl": "transformer_engine"}])
def test_graphs_of_layers_are_refused(settings: dict[str, Any]) -> None:
    config = ConfigContainer(
        model=TransformerConfig(**settings), ddp=DistributedDataParallelConfig(use_megatron_fsdp=True)
    )
    config.dist.use_megatron_fsdp = True
    with pytest.raises(ValueError, match=r"captures single layers.*'full_iteration'"):
        config.validate()


# -- the wrapper ------------------------------------------------------------------------------------------------------

CONFIG = TransformerConfig()


def settings(**given: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(use_megatron_fsdp=True, **given)


def wrapped(model: nn.Module | None = None, **given: Any) -> FullyShardedDataParallel:
    model = model if model is not None else parity.build(zoo.Plain)
    return FullyShardedDataParallel(CONFIG, settings(**given), model, fsdp_unit_modules=[zoo.Block])


@pytest.mark.usefixtures("fake_world")
def test_orders_of_arguments() -> None:
    """Megatron Core: Megatron FSDP: ``FullyShardedDataParallel(transformer_config, model, ddp_config,
    fsdp_unit_modules=...)``; Megatron-LM: ``(config, ddp_config, module, ...)``."""
    model, ddp = parity.build(zoo.Plain), settings()
    for arguments in ((CONFIG, ddp, copy.deepcopy(model)), (CONFIG, copy.deepcopy(model), ddp)):
        sharded = FullyShardedDataParallel(*arguments, fsdp_unit_modules=[zoo.Block])
        assert sharded.ddp_config is ddp
        assert sharded.config is CONFIG
        assert [unit.name for unit in sharded.sharded.eager.units if not unit.is_root] == [
            f"blocks.{i}" for i in range(3)
        ]
        duplicate = copy.deepcopy(sharded)
        assert type(duplicate) is FullyShardedDataParallel
    for wrong in ((ddp, CONFIG, ddp), (model, CONFIG, ddp), (CONFIG, model, model)):
        with pytest.raises(
            TypeError, match=r"takes \(config, ddp_config, module\).*or \(config, module, ddp_config\).*; got \("
        ):
            FullyShardedDataParallel(*wrong)


@pytest.mark.usefixtures("fake_world")
def test_units() -> None:
    """Megatron Core: Megatron FSDP: "You can configure which modules should be treated as FSDP units through the
    fsdp_unit_modules argument. This configuration is mandatory." Here the layers of a transformer are found."""
    sharded = FullyShardedDataParallel(CONFIG, settings(), parity.build(zoo.Plain), disable_bucketing=True)
    assert [unit.name for unit in sharded.sharded.eager.units if not unit.is_root] == [f"blocks.{i}" for i in range(3)]
    with pytest.raises(ValueError, match="Name the classes to shard by"):
        FullyShardedDataParallel(CONFIG, settings(), nn.Linear(3, 3))


class Fused(nn.Linear):
    fuse_wgrad_accumulation = True


@pytest.mark.usefixtures("fake_world")
def test_wrapping_that_is_refused() -> None:
    def refused(error: type[Exception], says: str, config: Any = CONFIG, ddp: Any = None, **more: Any) -> None:
        model = more.pop("model", None) or parity.build(zoo.Plain)
        before = list(model.parameters())
        with pytest.raises(error, match=says):
            FullyShardedDataParallel(config, ddp if ddp is not None else settings(), model, **more)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    refused(ValueError, "use_megatron_fsdp is False", ddp=DistributedDataParallelConfig())
    refused(ValueError, "Module '0', a Fused, was built with fuse_wgrad", model=nn.Sequential(Fused(2, 2)))
    refused(TypeError, "got zero_dp_strategy, which config and ddp_config decide", zero_dp_strategy=2)
    refused(
        NotImplementedError,
        "ddp.suggested_communication_unit_size=5",
        ddp=settings(suggested_communication_unit_size=5),
    )
    refused(
        ValueError,
        "num_distributed_optimizer_instances=3 must divide",
        ddp=settings(num_distributed_optimizer_instances=3),
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    refused(
        ValueError,
        "device_mesh with dp_outer_dim=None has 1",
        ddp=settings(num_distributed_optimizer_instances=2),
        device_mesh=mesh,
    )
    refused(TypeError, "pg_collection and a device mesh", device_mesh=mesh, pg_collection=SimpleNamespace())
    refused(ValueError, "pg_collection.dp_cp is None", pg_collection=SimpleNamespace())
    refused(
        ValueError, "4 ranks cannot be divided by tensor_model", config=TransformerConfig(tensor_model_parallel_size=3)
    )
    refused(ValueError, "4 ranks cannot be divided by.*context", config=TransformerConfig(context_parallel_size=8))
    refused(ValueError, "expert_model_parallel_size=3 must", config=TransformerConfig(expert_model_parallel_size=3))
    both = TransformerConfig(expert_model_parallel_size=2, tensor_model_parallel_size=2)
    refused(NotImplementedError, "2 ranks divide each expert.*Set expert_tensor_parallel_size=1", config=both)
    many = TransformerConfig(expert_model_parallel_size=3, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    refused(ValueError, "expert_model_parallel_size=3 must divide the 4 data-parallel and", config=many)
    experts = parity.build(zoo.Plain)
    experts.head.weight.allreduce = False
    # Megatron Core: Megatron FSDP: "Custom FSDP configures these groups as either DP (data-parallel) or EDP (expert
    # data-parallel) based on parameter markings."
    refused(ValueError, "'head.weight' has allreduce=False.*expt_device_mesh", model=experts)
    duck = SimpleNamespace(data_parallel_sharding_strategy="optim")  # no other attributes, and none is added
    model = FullyShardedDataParallel(SimpleNamespace(), duck, parity.build(zoo.Plain))
    assert model.sharded.topology.strategy is ShardingStrategy.OPTIM
    assert vars(duck) == {"data_parallel_sharding_strategy": "optim"}


@pytest.mark.usefixtures("fake_world")
def test_adjustments_are_made_to_copies() -> None:
    ddp = settings(average_in_collective=True, num_distributed_optimizer_instances=2)
    model = FullyShardedDataParallel(CONFIG, ddp, parity.build(zoo.Plain), check_values=False)
    assert ddp.average_in_collective
    assert {bucket.plan.reduce_op for bucket in model.sharded.buckets} == {"sum"}
    assert str(model.sharded.topology) == "HSDP, optim_grads_params over 2 x 2 ranks"


@pytest.mark.usefixtures("fake_world")
def test_optimizers_that_are_refused() -> None:
    model, other = wrapped(), wrapped()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer first, got a OptimizerConfig"):
        DistributedOptimizer(OptimizerConfig(), [model])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a list of models: DistributedOptimizer\(optimizer, \[model\]\)"):
        DistributedOptimizer(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the model that fully_shard_model returned"):
        DistributedOptimizer(optimizer, [nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="must be the buffers of model_chunks"):
        DistributedOptimizer(optimizer, [model], [other.param_and_grad_buffer])
    with pytest.raises(ValueError, match="belongs to none of the 1 models in model_chunks"):
        DistributedOptimizer(optimizer, [other])
    assert not hasattr(optimizer, "sharded_state_dict")
    with pytest.raises(ValueError, match="that is not sharded"):
        DistributedOptimizer(torch.optim.AdamW(nn.Linear(1, 1).parameters()), [model])
    DistributedOptimizer(optimizer, [torch.compile(model, backend="mfsdp")], [model.param_and_grad_buffer])
    with pytest.raises(ValueError, match="sharded_offsets are for the torch_dist format"):
        model.sharded_state_dict(sharded_offsets=((0, 0, 1),))
    assert list(model.sharded_state_dict("prefix.")) == [f"prefix.{name}" for name in model.state_dict()]


@pytest.mark.usefixtures("fake_world")
def test_first_microbatches() -> None:
    model = parity.build(zoo.Plain)
    model.head.is_first_microbatch = False
    sharded = wrapped(model)
    sharded.set_is_first_microbatch()
    assert model.head.is_first_microbatch is True
    assert not hasattr(model.enter, "is_first_microbatch")


# -- training ---------------------------------------------------------------------------------------------------------


def shared_folder() -> str:
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    return str(made[0])


def compiled(model: nn.Module, mode: str) -> Any:
    return model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})


class Classifier(zoo.Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.enter(x))))


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels)


def batches_of(step: int) -> tuple[Tensor, Tensor]:
    """Return three microbatches."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(3, 4, 8, generator=generator), torch.randint(0, 5, (3, 4), generator=generator)


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_the_example_of_megatron_core(mode: str) -> None:
    """Megatron Core: Megatron FSDP, "The Custom FSDP Interface": the example runs, with other class names.

    Its numbers are those of fully_shard_model, before and after a checkpoint.
    """
    transformer_config, lr = TransformerConfig(), 1e-2

    def build(seed: int) -> tuple[Any, Any, Any]:
        ddp_config = DistributedDataParallelConfig()
        ddp_config.use_megatron_fsdp = True
        ddp_config.data_parallel_sharding_strategy = "optim_grads_params"
        model = parity.build(lambda: Classifier(layers=2), seed)
        model = FullyShardedDataParallel(
            transformer_config,
            model,
            ddp_config,
            fsdp_unit_modules=[zoo.Block, nn.LayerNorm],
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        optimizer = DistributedOptimizer(optimizer, [model], [model.param_and_grad_buffer])
        return model, optimizer, compiled(model, mode)

    def train_step(call: Any, optimizer: Any, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        losses = []
        optimizer.zero_grad()
        for mbs_input, mbs_label in zip(inputs, labels, strict=True):
            outputs = call(mbs_input)
            loss = loss_fn(outputs, mbs_label)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        return losses

    def model_and_optimizer_state_dict(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": model.sharded_state_dict(), "optimizer": optimizer.sharded_state_dict()}

    def load_model_and_optimizer_state_dict(model: Any, optimizer: Any, state_dict: dict[str, Any]) -> None:
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optimizer"])

    own = fully_shard_model(parity.build(lambda: Classifier(layers=2)), fsdp_unit_modules=[zoo.Block, nn.LayerNorm])
    own_optimizer = fully_shard_optimizer(torch.optim.AdamW(own.parameters(), lr=lr))
    own_call = compiled(own, mode)
    model, optimizer, call = build(0)
    for step in range(2):
        assert torch.equal(
            torch.stack(train_step(call, optimizer, *batches_of(step))),
            torch.stack(train_step(own_call, own_optimizer, *batches_of(step))),
        )
    folder = shared_folder()
    dcp.save(model_and_optimizer_state_dict(model, optimizer), checkpoint_id=folder)
    again, its_optimizer, its_call = build(7)  # as in another process, before any step
    state_dict = model_and_optimizer_state_dict(again, its_optimizer)
    dcp.load(state_dict, checkpoint_id=folder)
    load_model_and_optimizer_state_dict(again, its_optimizer, state_dict)
    for step in range(2, 4):
        wanted = torch.stack(train_step(own_call, own_optimizer, *batches_of(step)))
        assert torch.equal(torch.stack(train_step(its_call, its_optimizer, *batches_of(step))), wanted)
    for (name, param), its in zip(again.module.named_parameters(), own.parameters(), strict=True):
        assert torch.equal(param.to_local(), its.to_local()), name
    assert its_optimizer.sharded_state_dict()["state"].keys() == {name for name, _ in own.named_parameters()}


@on_ranks(2)
def test_models_on_the_meta_device() -> None:
    """Megatron Core: Megatron FSDP, "Initializing Models on the Meta Device", and "ensure they implement the
    reset_parameters API"."""
    with torch.device("meta"):
        model = zoo.Plain()
    torch.manual_seed(3)
    sharded = FullyShardedDataParallel(CONFIG, model, settings(), fsdp_unit_modules=[zoo.Block])
    with torch.device("meta"):
        alone = zoo.Plain()
    alone.to_empty(device="cpu")
    torch.manual_seed(3)
    for part in alone.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for (name, param), whole in zip(sharded.module.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), whole), name
    sharded(torch.randn(4, 8)).backward()
    with torch.device("meta"):
        custom = zoo.Scalars()
    config = TransformerConfig(init_model_with_meta_device=True)
    with raises_everywhere(ValueError, "no reset_parameters or _reset_parameters method"):
        FullyShardedDataParallel(config, settings(), custom, fsdp_unit_modules=[zoo.Block])


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_megatrons_training_loop(strategy: str) -> None:
    """Megatron-FSDP User Guide, "Add `--calculate-per-token-loss`", and what Megatron's schedule does with the model.

    Losses are sums over tokens. Reduced gradients are divided by the number of tokens of all ranks and microbatches.
    """
    config, ddp = TransformerConfig(calculate_per_token_loss=True), settings(data_parallel_sharding_strategy=strategy)
    model = FullyShardedDataParallel(config, ddp, parity.build(Classifier), fsdp_unit_modules=[zoo.Block])
    assert not model.model_auto_sync
    alone = parity.build(Classifier)
    rank, every = dist.get_rank(), torch.randn(2, 3, 7, 8, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([[7, 2, 5], [1, 6, 3]])  # tokens that count, by rank and microbatch

    def loss_of(call: Any, r: int, micro: int) -> Tensor:
        return call(every[r, micro])[: counts[r, micro]].pow(2).sum()

    model.zero_grad_buffer()
    model.set_is_first_microbatch()
    with model.no_sync():
        for micro in range(2):
            loss_of(model, rank, micro).backward()
    loss_of(model, rank, 2).backward()
    model.start_grad_sync(model.parameters())
    model.finish_grad_sync()
    tokens = counts[rank].sum()
    dist.all_reduce(tokens)
    model.scale_gradients(1 / tokens)
    sum(loss_of(alone, r, micro) for r in range(2) for micro in range(3)).div(counts.sum()).backward()
    for name, param in model.module.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), alone.get_parameter(name).grad)
    model.start_param_sync(model.parameters(), force_sync=True)
    model.stop_communication()
    loss_of(model, rank, 0).backward()


@on_ranks(2)
def test_broadcast_of_parameters() -> None:
    for strategy in ("no_shard", "optim_grads_params"):
        model = wrapped(data_parallel_sharding_strategy=strategy)
        before = [param.to_local().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters():
                param.add_(dist.get_rank())
        model.broadcast_params()
        added = 0 if strategy == "no_shard" else dist.get_rank()  # sharded, each rank has its own values
        for param, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(param.to_local(), old + added)
        model(torch.randn(4, 8)).backward()


# -- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(4)
def test_process_groups_of_megatron() -> None:
    """Groups of tensor-parallel neighbors, and of two halves of the data-parallel ranks, become the right meshes.

    These are the meshes that ``fully_shard_model`` is tested with.
    """
    rank = dist.get_rank()

    def group(*lists: list[int]) -> Any:
        made = [dist.new_group(ranks) for ranks in lists]
        return next(each for each, ranks in zip(made, lists, strict=True) if rank in ranks)

    world, pairs, odd_even = group([0, 1, 2, 3]), group([0, 1], [2, 3]), group([0, 2], [1, 3])
    alone = group([0], [1], [2], [3])
    data = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    whole = parity.build(zoo.Plain)
    (sum(whole(part) for part in data) / 4).backward()

    def check(model: FullyShardedDataParallel, what: str) -> None:
        assert str(model.sharded.topology) == what
        model(data[rank]).backward()
        model.finish_grad_sync()
        for name, param in model.module.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6)

    def sharded(collection: Any, **given: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            CONFIG, settings(**given), parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], pg_collection=collection
        )

    check(sharded(SimpleNamespace(dp_cp=world, tp=alone, ep=alone)), "optim_grads_params over 4 ranks")
    halves = SimpleNamespace(dp_cp=world, intra_dp_cp=pairs, inter_dist_opt=odd_even, tp=alone)
    check(sharded(halves, num_distributed_optimizer_instances=2), "HSDP, optim_grads_params over 2 x 2 ranks")
    check(
        sharded(halves, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim"),
        "HFSDP, optim_grads_params over 2 x 2 ranks",
    )
    tensor_parallel = sharded(SimpleNamespace(dp_cp=odd_even, tp=pairs))
    assert str(tensor_parallel.sharded.topology) == "optim_grads_params over 2 ranks"
    assert tensor_parallel.sharded.topology.mesh.mesh.tolist() == [rank % 2, rank % 2 + 2]

    def with_experts() -> zoo.Plain:
        made = parity.build(zoo.Plain)
        for param in made.blocks.parameters():
            param.allreduce = False
        with torch.no_grad():
            made.blocks[0].up.weight.add_(rank % 2)  # ranks 0 and 2 share these experts, 1 and 3 others
        return made

    experts = FullyShardedDataParallel(
        SimpleNamespace(expert_model_parallel_size=2),
        settings(),
        with_experts(),
        fsdp_unit_modules=[zoo.Block],
        pg_collection=SimpleNamespace(dp_cp=world, ep=pairs, expt_dp=odd_even, expt_tp=alone),
    )
    assert experts.sharded.members.experts is not None
    assert experts.sharded.members.experts.topology.inner.size == 2

    # Tensor-parallel ranks 0 and 1, and 2 and 3, hold different experts: by Megatron's groups, or by sizes.
    collection = SimpleNamespace(dp_cp=odd_even, tp=pairs, ep=pairs, expt_dp=odd_even, expt_tp=alone)
    config = SimpleNamespace(expert_model_parallel_size=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    for given in (collection, None):
        experts = FullyShardedDataParallel(
            config, settings(), with_experts(), fsdp_unit_modules=[zoo.Block], pg_collection=given
        )
        assert experts.sharded.members.folds_experts
        one = whole.blocks[0].up.weight
        assert torch.equal(experts.module.blocks[0].up.weight.full_tensor(), torch.cat([one, one + 1]))
    with raises_everywhere(NotImplementedError, "pg_collection.expt_tp has 2 ranks"):
        sharded(SimpleNamespace(dp_cp=world, ep=pairs, expt_dp=odd_even, expt_tp=pairs))


def test_validation_takes_others_containers() -> None:
    """Validation accepts Megatron-Bridge's own containers, or parts of one.

    Their sections have a hundred other settings.
    """
    theirs = SimpleNamespace(
        dist=SimpleNamespace(use_megatron_fsdp=True, use_torch_fsdp2=False, lazy_init=True),
        ddp=SimpleNamespace(use_megatron_fsdp=True, average_in_collective=True, num_buckets=None),
        model=SimpleNamespace(hidden_size=1, gradient_accumulation_fusion=True),
        optimizer=None,
        logger=object(),
    )
    assert [str(each).partition(":")[0] for each in validate(theirs)] == [
        "ddp.average_in_collective is set to False",
        "model.gradient_accumulation_fusion is set to False",
    ]
    assert validate(SimpleNamespace(ddp=SimpleNamespace(use_megatron_fsdp=False))) == []
    assert Path(DOCS / "megatron.md").is_file()
