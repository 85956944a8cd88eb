"""DeepSpeed's configuration files as arguments of this package and objects of torch. DeepSpeed is not needed.

    plan = arguments("ds_config.json")
    model = fully_shard_model(model.to(plan.model_dtype), fsdp_unit_modules="auto", **plan.sharding)
    optimizer = fully_shard_optimizer(plan.make_optimizer(model.parameters()))
    schedule = plan.make_schedule(optimizer)  # schedule.step() after each optimizer.step()

Keys, defaults and formulas are those of DeepSpeed's ``runtime/config.py``, ``runtime/zero/config.py``,
``runtime/engine.py`` and ``runtime/lr_schedules.py`` in 2026.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile.runtime.guests.offload.policy import OptimizerOffloadPolicy
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy
from mfsdp_compile.runtime.untrusted_files import read_json

__all__ = ["KEYS", "ZERO_KEYS", "DeepSpeedArguments", "arguments"]

AUTO = "auto"
"""A value that transformers' Trainer fills in from its own arguments."""


class Key(NamedTuple):
    """What happens to a key.

    Args:
        kind: ``"returned"``: it is in the result. ``"ignored"``: it does not change numbers here. ``"refused"``: it
            would, so only values that switch it off are accepted.
        why: Why it is ignored or refused, and what to do.
    """

    kind: str
    why: str


def _keys(table: str) -> dict[str, Key]:
    rows = [row.split(" | ") for row in table.strip().replace("\n    ", " ").splitlines()]
    return {name: Key(kind, why) for kind, why, names in rows for name in names.split()}


ZERO_KEYS = _keys("""
returned | in the result | stage overlap_comm offload_param offload_optimizer cpu_offload_param
    cpu_offload_use_pin_memory cpu_offload zero_hpz_partition_size
ignored | this package always does that | contiguous_gradients reduce_scatter allgather_partitions
    load_from_fp32_weights enable_sanity_checks save_muon_momentum_buffer_in_memory
ignored | a unit is a bucket: bucket_bytes splits larger ones, unit_bytes joins smaller ones | reduce_bucket_size
    allgather_bucket_size
ignored | one collective reduces a bucket for all ranks | use_multi_rank_bucket_allreduce
ignored | checkpoints load on any number of ranks | elastic_checkpoint
ignored | an optimizer steps over everything at once | sub_group_size
ignored | the options prefetch and memory_budget decide when parameters are gathered and released |
    stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance
ignored | small parameters are in the bucket of their unit | stage3_param_persistence_threshold
    stage3_model_persistence_threshold
ignored | whole weights are saved by mfsdp_compile.save_pretrained and full_state_dict |
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
ignored | unit_bytes joins small units | stage3_module_granularity_threshold
ignored | gathered parameters are read in place | stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
ignored | parameters that no rank used have no gradient, and a warning names them | ignore_unused_parameters
ignored | another implementation of stage 1 | legacy_stage1
ignored | every rank copies the gradient of its own shard | round_robin_gradients
ignored | changes memory only: for HSDP, pass device_mesh, dp_shard_dim and dp_outer_dim | mics_shard_size
ignored | of MiCS | mics_hierarchical_params_gather
ignored | no gathered weight is saved for backward | memory_efficient_linear
ignored | each rank reads its rows | pipeline_loading_checkpoint
ignored | model.apply changes shards | override_module_apply
ignored | there is no trace of fetches | log_trace_cache_warnings
ignored | experts that no token reaches on any rank have no gradient | leaf_module
refused | updates weights later than the step | zenflow
refused | gathers int8, which does not exist here: param_comm_dtype=torch.float8_e4m3fn gathers float8, with other
    numbers | zero_quantized_weights zero_quantized_nontrainable_weights
refused | reduces int4 in blocks of another size: grad_comm_dtype=torch.int4, grad_sum_dtype=torch.float32,
    grad_sum_within="node" and grad_outer_comm_dtype=torch.int4 do it in the same order, with other numbers |
    zero_quantized_gradients
refused | corrects quantized gradients, which do not exist here | zeropp_loco_param
""")
"""Keys of ``zero_optimization``: kind, reason, names."""

KEYS = _keys("""
returned | in the result | train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    optimizer scheduler zero_optimization bf16 bfloat16 fp16 communication_data_type data_types
ignored | float16 gradients are scaled before they are summed, others after | prescale_gradients
    gradient_predivide_factor
ignored | of sequence parallelism | seq_parallel_communication_data_type
ignored | of an earlier version | disable_allgather
ignored | gradients are dense, with the same values | sparse_gradients
ignored | apply torch.utils.checkpoint in the model | activation_checkpointing
ignored | any optimizer is allowed | zero_allow_untested_optimizer
ignored | the optimizer is torch's | zero_force_ds_cpu_optimizer
ignored | prints or records; see mfsdp_compile.explain and reports | steps_per_print wall_clock_breakdown
    memory_breakdown dump_state flops_profiler comms_logger tensorboard wandb comet csv_monitor timers
ignored | mfsdp plan forecasts runs; memory_budget decides schedules | autotuning
ignored | of disks, to which nothing is offloaded | aio
ignored | see mfsdp_compile.checkpoint | checkpoint nebula
ignored | the data loader is yours: pass drop_last to it | dataloader_drop_last
ignored | the model is yours | vocabulary_size
ignored | of generation: see MegatronFSDP.gathered | hybrid_engine
ignored | see mfsdp_compile.capture_step | graph_harvesting
ignored | see torch.compile(model, backend="mfsdp") | compile
refused | gradients are averaged: calculate_per_token_loss=True sums them | gradient_allreduce_op
refused | apex changes dtypes operator by operator: wrap the forward in torch.autocast | amp
refused | changes dtypes operator by operator: wrap the forward in torch.autocast | torch_autocast
refused | chooses the batch size by the number of ranks | elasticity
refused | changes what is trained: do it in your loop | curriculum_learning data_efficiency progressive_layer_drop
    eigenvalue compression_training quantize_training weight_quantization sparse_attention
refused | another kind of parallelism: apply it to the model before it is sharded | pipeline tensor_parallel
    expert_parallel
""")
"""Keys of the file."""

_FP16_KEYS = _keys("""
ignored | GradScaler halves its scale at each overflow | hysteresis consecutive_hysteresis
ignored | GradScaler has no lower bound | min_loss_scale
ignored | inputs are cast to the dtype that the model computes in | auto_cast
ignored | of an earlier version | fused_mode
""")
"""Keys of ``fp16`` that have no effect."""

_SECTIONS = ("zero_optimization", "optimizer", "scheduler", "bf16", "bfloat16", "fp16", "data_types")

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""Defaults of DeepSpeed's FusedAdam and CPUAdam. AdamW of torch has another weight decay."""

_AS_TORCHS_ADAM = {"bias_correction": True, "fp32_optimizer_states": True, "amsgrad": False, "set_grad_none": True}
"""Arguments of DeepSpeed's Adam that ask for what torch's does."""
_DEEPSPEEDS_OWN = ["muon", "lamb", "lion", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd"]
"""Optimizers of its own."""


@dataclass(frozen=True)
class DeepSpeedArguments:
    """A translated configuration. What the file leaves out, or leaves to Trainer (``"auto"``), is None or absent.

    Attributes:
        sharding: Arguments of ``fully_shard_model``.
        model_dtype: Dtype to convert the model to before it is sharded. None: the one that it has.
        loss_scale: Arguments of ``torch.amp.GradScaler``. None: losses are not scaled.
        train_micro_batch_size_per_gpu: Samples per rank and microbatch.
        gradient_accumulation_steps: Microbatches per optimizer step. Divide losses by it.
        train_batch_size: Samples per optimizer step on all ranks.
        gradient_clipping: Norm for ``torch.nn.utils.clip_grad_norm_``. None: gradients are not clipped.
        optimizer: Class of the optimizer in ``torch.optim``, and its arguments. None: the file has none.
        schedule: Type of the learning rate schedule, and its parameters. None: the file has none.
        ignored: Keys that have no effect here, and why.
        left_to_caller: Keys whose value is ``"auto"``.
    """

    sharding: dict[str, Any] = field(default_factory=dict)
    model_dtype: torch.dtype | None = None
    loss_scale: dict[str, Any] | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    train_batch_size: int | None = None
    gradient_clipping: float | None = None
    optimizer: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None
    schedule: tuple[str, dict[str, Any]] | None = None
    ignored: dict[str, str] = field(default_factory=dict)
    left_to_caller: tuple[str, ...] = ()

    def make_optimizer(self, params: Iterable[Any], **others: Any) -> torch.optim.Optimizer:
        """Build the optimizer.

        Args:
            params: Parameters or groups of them.
            **others: More arguments, for those that the file leaves to the caller, or ``fused=True``.

        Raises:
            ValueError: If the file has no optimizer, or leaves an argument to the caller that is missing.
        """
        if self.optimizer is None:
            raise ValueError("The configuration has no optimizer: build one, and pass it to fully_shard_optimizer.")
        kind, settings = self.optimizer
        self._check_auto("optimizer.params.", "make_optimizer", others)
        return kind(params, **(settings | others))

    def make_schedule(self, optimizer: torch.optim.Optimizer, **others: Any) -> torch.optim.lr_scheduler.LRScheduler:
        """Build the learning rate schedule. Call its ``step()`` after each step of the optimizer.

        Args:
            optimizer: The optimizer.
            **others: More parameters, for those that the file leaves to the caller.

        Raises:
            ValueError: If the file has no schedule, or a parameter is missing.
        """
        if self.schedule is None:
            raise ValueError("The configuration has no scheduler: build one of torch.optim.lr_scheduler.")
        kind, settings = self.schedule
        self._check_auto("scheduler.params.", "make_schedule", others)
        return _Warmup(optimizer, kind, **(settings | others))

    def _check_auto(self, path: str, method: str, given: Mapping[str, Any]) -> None:
        names = [name.removeprefix(path) for name in self.left_to_caller if name.startswith(path)]
        if missing := [name for name in names if name not in given]:
            raise ValueError(
                f'The configuration leaves {", ".join(missing)} to the caller ("auto"): pass it to {method}.'
            )


def arguments(config: str | os.PathLike[str] | Mapping[str, Any], ranks: int | None = None) -> DeepSpeedArguments:
    """Translate a DeepSpeed configuration.

    Args:
        config: The file (``ds_config.json``), or what it contains.
        ranks: Number of data-parallel ranks, to compute sizes of batches that the file leaves out. None: all ranks of
            the default process group, if there is one.

    Raises:
        ValueError: If the file has keys that are unknown, or would change numbers and cannot be honored here. The
            message lists all of them.
    """
    if not isinstance(config, Mapping):
        config = read_json(Path(config))
        if not isinstance(config, Mapping):
            raise ValueError(f"A DeepSpeed configuration is an object, got a {type(config).__name__}.")
    if ranks is None and dist.is_initialized():
        ranks = dist.get_world_size()
    return _Translation(config, ranks).result()


class _Translation:
    """A translation in progress: everything that cannot be honored is collected, and raised together."""

    def __init__(self, config: Mapping[str, Any], ranks: int | None) -> None:
        self._ranks = ranks
        self._auto: list[str] = []
        self._refused: list[str] = []
        self._ignored: dict[str, str] = {}
        self._config = self._without_auto(config)

    def _without_auto(self, config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in config.items():
            if value == AUTO:
                self._auto.append(path + key)
            else:
                kept[key] = self._without_auto(value, f"{path}{key}.") if isinstance(value, Mapping) else value
        return kept

    def result(self) -> DeepSpeedArguments:
        config = self._config
        if isinstance(zero := config.get("zero_optimization"), bool):  # the form of early versions
            config["zero_optimization"] = {"stage": int(zero)}
        for name in _SECTIONS:
            if not isinstance(config.setdefault(name, {}), Mapping):
                self._refused.append(f"{name}={config[name]!r}: it must be an object")
                config[name] = {}
        zero = config["zero_optimization"]
        self._sort(config, KEYS, "")
        self._sort(zero, ZERO_KEYS, "zero_optimization.")
        dtype, loss_scale = self._precision(config)
        result = DeepSpeedArguments(
            self._sharding(zero, config),
            dtype,
            loss_scale,
            *self._batches(config),
            config.get("gradient_clipping") or None,
            self._optimizer(config["optimizer"]),
            self._schedule(config["scheduler"]),
            self._ignored,
            tuple(self._auto),
        )
        if self._refused:
            raise ValueError(
                "This DeepSpeed configuration cannot be honored:\n" + "\n".join(f"  {line}" for line in self._refused)
            )
        return result

    def _sort(self, given: Mapping[str, Any], known: Mapping[str, Key], path: str) -> None:
        for name, value in given.items():
            key = known.get(name)
            if key is None:
                self._refused.append(f"{path}{name}={value!r}: this key is not known")
            elif key.kind == "ignored":
                self._ignored[path + name] = key.why
            elif key.kind == "refused" and not _is_off(value):
                self._refused.append(f"{path}{name}={value!r}: {key.why}")

    def _precision(self, config: Mapping[str, Any]) -> tuple[torch.dtype | None, dict[str, Any] | None]:
        if any(config[name].get("enabled") for name in ("bf16", "bfloat16")):
            return torch.bfloat16, None
        fp16 = config["fp16"]
        if not fp16.get("enabled"):
            return None, None
        if fp16.get("loss_scale"):
            self._refused.append(
                f"fp16.loss_scale={fp16['loss_scale']!r}: GradScaler changes its scale: multiply the loss by it, and "
                "divide gradients by it before they are clipped"
            )
        if fp16.get("fp16_master_weights_and_grads"):
            self._refused.append(
                "fp16.fp16_master_weights_and_grads=True: weights would be rounded to float16: pass "
                "mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None)"
            )
        self._ignored |= {f"fp16.{name}": key.why for name, key in _FP16_KEYS.items() if name in fp16}
        scale = {
            "init_scale": 2.0 ** fp16.get("initial_scale_power", 16),
            "growth_interval": fp16.get("loss_scale_window", 1000),
        }
        return torch.float16, scale

    def _sharding(self, zero: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
        stage = int(zero.get("stage", 0))
        given: dict[str, Any] = {"zero_dp_strategy": stage}
        if zero.get("overlap_comm") is not None:
            given["overlap_grad_reduce"] = given["overlap_param_gather"] = bool(zero["overlap_comm"])
        if stage == 3 and (ranks := zero.get("zero_hpz_partition_size", 1)) > 1:
            given["reshard_after_forward"] = int(ranks)
        if (policy := self._offload(zero, stage)) is not None:
            given["offload_policy"] = policy
        dtypes = {
            "main_grads_dtype": config["data_types"].get("grad_accum_dtype"),
            "grad_comm_dtype": config.get("communication_data_type"),
        }
        for value in dtypes.values():
            if value is not None and value not in _DTYPES:
                self._refused.append(f"{value!r} is none of the dtypes {', '.join(_DTYPES)}")
        chosen = {name: _DTYPES[value] for name, value in dtypes.items() if value in _DTYPES}
        if chosen:
            given["mixed_precision_policy"] = MixedPrecisionPolicy(**chosen)
        return given

    def _offload(self, zero: Mapping[str, Any], stage: int) -> CPUOffloadPolicy | OptimizerOffloadPolicy | None:
        pins = bool(zero.get("cpu_offload_use_pin_memory", False))
        found = {}
        for name, old in (("offload_param", "cpu_offload_param"), ("offload_optimizer", "cpu_offload")):
            settings = zero.get(name) or ({"device": "cpu"} if zero.get(old) else {})
            device = settings.get("device", "none") or "none"
            if device == "cpu":
                found[name] = bool(settings.get("pin_memory", pins))
            elif device != "none":
                self._refused.append(
                    f"zero_optimization.{name}.device={device!r}: nothing is offloaded to disks, only to 'cpu'"
                )
            for key in settings.keys() - {"device", "pin_memory"}:
                self._ignored[f"zero_optimization.{name}.{key}"] = "of copies, which are planned here"
        if "offload_param" in found and stage != 3:
            self._refused.append(f"zero_optimization.offload_param: needs stage 3, and the stage is {stage}")
        if "offload_param" in found:
            return CPUOffloadPolicy(pin_memory=found["offload_param"])
        return OptimizerOffloadPolicy(pin_memory=found["offload_optimizer"]) if found else None

    def _batches(self, config: Mapping[str, Any]) -> tuple[int | None, int | None, int | None]:
        """Return the sizes of microbatches, their number, and the size of a batch, as DeepSpeed completes them."""
        names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        given = {name: config.get(name) for name in names}
        for name, value in given.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                self._refused.append(f"{name}={value!r}: it must be a positive integer")
                return None, None, None
        micro, steps, total = given.values()
        if self._ranks is None or not set(names).isdisjoint(self._auto):
            return micro, steps, total
        if total is not None and micro is None:
            steps = steps or 1
            micro = total // self._ranks // steps
        elif total is not None and micro is not None:
            steps = steps or total // self._ranks // micro
        elif micro is not None:
            steps = steps or 1
            total = micro * steps * self._ranks
        if total is not None and micro is not None and steps is not None and micro * steps * self._ranks != total:
            self._refused.append(
                f"train_batch_size={total}: it is not train_micro_batch_size_per_gpu ({micro}) times "
                f"gradient_accumulation_steps ({steps}) times the number of ranks ({self._ranks})"
            )
        return micro, steps, total

    def _optimizer(self, given: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
        if given.get("type") is None:
            return None
        name, params = str(given["type"]), dict(given.get("params") or {})
        if "betas" in params:
            params["betas"] = tuple(params["betas"])
        if name.lower() in ("adam", "adamw"):
            decouples = (
                params.pop("adam_w_mode", True) or name.lower() == "adamw"
            )  # "Adam" is AdamW unless the file says no
            kind: Any = torch.optim.AdamW if decouples else torch.optim.Adam
            if not params.pop("torch_adam", False):
                params = _ADAM | {
                    key: value for key, value in params.items() if (key, value) not in _AS_TORCHS_ADAM.items()
                }
                params = {key: value for key, value in params.items() if f"optimizer.params.{key}" not in self._auto}
        elif name.lower() == "adagrad":
            kind = torch.optim.Adagrad
        elif name.lower() in _DEEPSPEEDS_OWN:
            kind = None
        else:
            kind = getattr(torch.optim, name, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            self._refused.append(
                f"optimizer.type={name!r}: DeepSpeed's own optimizer, or an unknown one: build it from "
                "model.parameters()"
            )
            return None
        for key in params.keys() - inspect.signature(kind).parameters.keys():
            self._refused.append(
                f"optimizer.params.{key}={params[key]!r}: torch.optim.{kind.__name__} has no such argument"
            )
        return kind, params

    def _schedule(self, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
        if given.get("type") is None:
            return None
        name, params = str(given["type"]), dict(given.get("params") or {})
        if name not in _SCHEDULES:
            self._refused.append(
                f"scheduler.type={name!r}: build a schedule of torch.optim.lr_scheduler; {', '.join(_SCHEDULES)} are "
                "translated"
            )
            return None
        if params.pop("last_batch_iteration", -1) != -1:
            self._refused.append("scheduler.params.last_batch_iteration: load the schedule's state_dict instead")
        for key in params.keys() - _SCHEDULES[name].keys():
            self._refused.append(f"scheduler.params.{key}={params[key]!r}: {name} has no such parameter")
        if name == "WarmupLR" and "warmup_max_lr" not in params and "scheduler.params.warmup_max_lr" not in self._auto:
            self._refused.append(
                "scheduler.params.warmup_max_lr is missing: its default is 0.001 in some versions of DeepSpeed, and "
                "the optimizer's learning rate in others. Name it"
            )
        return name, params


def _is_off(value: Any) -> bool:
    """Whether a value switches off what its key is about."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False or value.get("autotp_size") in (0, 1)
    return not value or value in (-1, "avg", "mean")


# -- learning rates ---------------------------------------------------------------------------------------------------

_NEEDED = object()

_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": _NEEDED, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": _NEEDED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": _NEEDED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
}
"""Parameters of DeepSpeed's schedules, and their defaults."""


class _Warmup(torch.optim.lr_scheduler.LRScheduler):
    """DeepSpeed's schedules with a warm-up, as a schedule of torch.

    DeepSpeed's first ``step()`` is number 0, so the second step of the optimizer has the learning rate of the first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, **settings: Any) -> None:
        self.kind, self.settings = kind, _SCHEDULES[kind] | settings
        if missing := [name for name, value in self.settings.items() if value is _NEEDED]:
            raise ValueError(f"{kind} needs {', '.join(missing)}: pass it to make_schedule.")
        if unknown := settings.keys() - _SCHEDULES[kind].keys():
            raise ValueError(f"{kind} has no parameter {', '.join(sorted(unknown))}.")
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        number, held = self.last_epoch - 1, self.settings
        warmup = max(2, held["warmup_num_steps"])
        if self.kind == "WarmupCosineLR":
            return [base * self._ratio(number, warmup) for base in self.base_lrs]
        groups = len(self.base_lrs)
        low, high = (_per_group(held[name], groups) for name in ("warmup_min_lr", "warmup_max_lr"))
        if number < 0:
            return low
        part = self._rise(number, warmup)
        if part is None:
            total = held.get("total_num_steps")
            part = 1.0 if total is None else max(0.0, (total - number) / max(1.0, total - warmup))
        return [least + (most - least) * part for least, most in zip(low, high, strict=True)]

    def _ratio(self, number: int, warmup: int) -> float:
        least, floor, total = (self.settings[name] for name in ("warmup_min_ratio", "cos_min_ratio", "total_num_steps"))
        if number < 0:
            return 0.0
        if (part := self._rise(number, warmup)) is not None:
            return float(least + part * (1.0 - least))
        progress = min(1.0, (number - warmup + 1) / max(1, total - warmup))
        return float(max(0.0, floor + (1.0 - floor) * (1 + math.cos(math.pi * progress)) / 2))

    def _rise(self, number: int, warmup: int) -> float | None:
        """Return the part of the way up; None after the warm-up."""
        if number >= warmup:
            return None
        return number / warmup if self.settings["warmup_type"] == "linear" else math.log(number + 1) / math.log(warmup)


def _per_group(value: Any, groups: int) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value] * groups
