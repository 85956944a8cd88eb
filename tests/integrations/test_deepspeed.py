"""DeepSpeed's configuration files.

The numbers are those of its documented defaults and formulas; it is not installed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.integrations.deepspeed import KEYS, ZERO_KEYS, DeepSpeedArguments, arguments

CONFIG: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "communication_data_type": "fp32",
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.5},
        "zero_hpz_partition_size": 2,
        "stage3_prefetch_bucket_size": 5e7,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "bias_correction": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}},
    "steps_per_print": 10,
}


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    found = arguments(tmp_path / "ds_config.json", ranks=4)
    assert found == arguments(CONFIG, ranks=4)
    assert found.sharding == {
        "zero_dp_strategy": 3,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "reshard_after_forward": 2,
        "offload_policy": OptimizerOffloadPolicy(pin_memory=True),
        "mixed_precision_policy": MixedPrecisionPolicy(grad_comm_dtype=torch.float32),
    }
    assert found.model_dtype == torch.bfloat16
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (4, 2)
    assert found.gradient_clipping == 1.0
    # Adam is AdamW unless the file says otherwise, and its weight decay is 0 by default, other than torch's.
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    assert found.optimizer == (torch.optim.AdamW, settings)
    assert found.ignored.keys() == {
        "steps_per_print",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.offload_optimizer.ratio",
    }
    assert not found.left_to_caller
    assert arguments({}) == DeepSpeedArguments({"zero_dp_strategy": 0})


def test_parts_of_files() -> None:
    offloaded = arguments({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "cpu_offload": True}})
    assert offloaded.sharding["offload_policy"] == CPUOffloadPolicy(pin_memory=False)
    assert arguments({"zero_optimization": True}).sharding == {"zero_dp_strategy": 1}
    half = arguments({"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 2}})
    assert (half.model_dtype, half.loss_scale) == (torch.float16, {"init_scale": 256.0, "growth_interval": 1000})
    assert "fp16.hysteresis" in half.ignored
    of = {
        name: arguments({"optimizer": {"type": name, "params": params}}).optimizer
        for name, params in {
            "AdamW": {"torch_adam": True},
            "adam": {"adam_w_mode": False},
            "SGD": {"lr": 0.1, "momentum": 0.9},
            "Adagrad": {"lr": 0.1},
        }.items()
    }
    assert of["AdamW"] == (torch.optim.AdamW, {})
    assert of["adam"] == (torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
    assert of["SGD"] == (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
    assert of["Adagrad"] == (torch.optim.Adagrad, {"lr": 0.1})
    assert arguments({"train_micro_batch_size_per_gpu": 3}, ranks=4).train_batch_size == 12


def rates(kind: str, steps: int, **settings: Any) -> list[float]:
    """Return the learning rates of the first steps of an optimizer."""
    plan = arguments({"scheduler": {"type": kind, "params": settings}})
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule, found = plan.make_schedule(optimizer), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_learning_rates() -> None:
    """DeepSpeed's schedules count steps from their first ``step()``, so the lowest rate comes twice."""
    linear = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates("WarmupLR", 7, **linear) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    logs = [math.log(number + 1) / math.log(4) for number in range(4)]
    assert rates("WarmupLR", 7, warmup_max_lr=1.0, warmup_num_steps=4) == pytest.approx([0, *logs, 1, 1])
    decay = rates("WarmupDecayLR", 11, total_num_steps=8, **linear)
    assert decay == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    cosine = rates("WarmupCosineLR", 8, total_num_steps=4, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.2)
    assert cosine == pytest.approx([0, 0, 0.25, 0.3, 0.1, 0.1, 0.1, 0.1])


REFUSED: dict[str, Any] = {
    "zero_optimization.zero_quantized_weights=True: .*float8": {"zero_optimization": {"zero_quantized_weights": True}},
    "zero_optimization.offload_param.device='nvme': .*disks": {
        "zero_optimization": {"offload_param": {"device": "nvme"}}
    },
    "zero_optimization.offload_param: needs stage 3": {"zero_optimization": {"stage": 2, "cpu_offload_param": True}},
    "zero_optimization.stag=3: this key is not known": {"zero_optimization": {"stag": 3}},
    "gradient_clip=1: this key is not known": {"gradient_clip": 1},
    "curriculum_learning=": {"curriculum_learning": {"enabled": True}},
    "amp=.*autocast": {"amp": {"enabled": True}},
    "gradient_allreduce_op='sum'": {"gradient_allreduce_op": "sum"},
    "tensor_parallel=": {"tensor_parallel": {"autotp_size": 4}},
    "fp16.loss_scale=128: GradScaler": {"fp16": {"enabled": True, "loss_scale": 128}},
    "fp16.fp16_master_weights_and_grads": {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
    "bf16=True: it must be an object": {"bf16": True},
    "'int8' is none of the dtypes fp32": {"communication_data_type": "int8"},
    "train_batch_size=30: it is not": {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4},
    "train_micro_batch_size_per_gpu=0: it must be": {"train_micro_batch_size_per_gpu": 0},
    "optimizer.type='OneBitAdam'": {"optimizer": {"type": "OneBitAdam"}},
    "optimizer.params.bias_correction=False": {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
    "scheduler.type='OneCycle'": {"scheduler": {"type": "OneCycle"}},
    "scheduler.params.warmup_max_lr is missing": {"scheduler": {"type": "WarmupLR"}},
    "scheduler.params.warmup=3: WarmupDecayLR has no": {
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup": 3}}
    },
}


def test_what_would_change_numbers_is_refused_by_name() -> None:
    for what, config in REFUSED.items():
        with pytest.raises(ValueError, match=rf"(?s)cannot be honored:.*{what}"):
            arguments(config, ranks=2)
    everything: dict[str, Any] = {}
    for config in ({"gradient_clip": 1}, {"curriculum_learning": {"enabled": True}}):
        everything |= config
    with pytest.raises(ValueError, match=r"(?s)gradient_clip=.*curriculum_learning="):
        arguments(everything)
    off = {name: {"enabled": False} for name, key in KEYS.items() if key.kind == "refused"}
    none = {name: False for name, key in ZERO_KEYS.items() if key.kind == "refused"}
    assert arguments(off | {"zero_optimization": none}) == DeepSpeedArguments({"zero_dp_strategy": 0})
    with pytest.raises(ValueError, match="no optimizer: build one"):
        arguments({}).make_optimizer([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="no scheduler: build one"):
        arguments({}).make_schedule(torch.optim.SGD([nn.Parameter(torch.ones(1))]))


def test_values_that_transformers_fills_in() -> None:
    found = arguments(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}},
        },
        ranks=2,
    )
    assert found.left_to_caller == (
        "train_batch_size",
        "gradient_clipping",
        "bf16.enabled",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
    )
    assert found.gradient_clipping is found.train_batch_size is found.model_dtype is None
    params = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match=r'leaves lr to the caller \("auto"\): pass it to make_optimizer'):
        found.make_optimizer(params)
    optimizer = found.make_optimizer(params, lr=0.2)
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.2, 0.1)
    with pytest.raises(ValueError, match="leaves total_num_steps to the caller"):
        found.make_schedule(optimizer)
    found.make_schedule(optimizer, total_num_steps=10)
    with pytest.raises(ValueError, match="WarmupDecayLR has no parameter warmup"):
        found.make_schedule(optimizer, total_num_steps=10, warmup=3)
    with pytest.raises(ValueError, match="WarmupDecayLR needs total_num_steps"):
        arguments({"scheduler": {"type": "WarmupDecayLR"}}).make_schedule(optimizer)


@on_ranks(2)
def test_training_by_a_file() -> None:
    """A training step by a file has the numbers of one process."""
    plan = arguments(
        {key: value for key, value in CONFIG.items() if key not in ("bf16", "communication_data_type")}
        | {"zero_optimization": {"stage": 2, "overlap_comm": False}, "train_batch_size": 8}
    )
    assert (plan.gradient_accumulation_steps, plan.model_dtype) == (1, None)
    run = {}
    for name in ("sharded", "alone"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
        if name == "sharded":
            model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], **plan.sharding)
        optimizer = plan.make_optimizer(model.parameters())
        if name == "sharded":
            optimizer = fully_shard_optimizer(optimizer)
        schedule = plan.make_schedule(optimizer)
        for batch in parity.batches(4, shape=(4, 8)):
            mine = batch[torch.distributed.get_rank()] if name == "sharded" else batch.flatten(0, 1)
            model(mine).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        run[name] = [param.full_tensor() if name == "sharded" else param.detach() for param in model.parameters()]
    for found, expected in zip(run["sharded"], run["alone"], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
