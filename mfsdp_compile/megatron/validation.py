"""Validation of Megatron's settings before anything is built, with Megatron's errors and adjustments."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.program_lines import warn

from .settings import (
    CheckpointConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    OptimizerConfig,
    SchedulerConfig,
    Section,
    TrainingConfig,
    TransformerConfig,
    Treatment,
    Values,
    known,
    setting_of,
)

_log = logging.getLogger("mfsdp_compile.megatron")

SECTIONS: dict[str, type] = {
    "model": TransformerConfig,
    "dist": DistributedInitConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
    "checkpoint": CheckpointConfig,
}
"""Attributes of a :class:`ConfigContainer`, and the settings that are read from each."""


@dataclass(frozen=True)
class Adjustment:
    """A setting that was changed, or that has no effect (``after`` then equals ``before``).

    Args:
        setting: Name with its section: ``"ddp.average_in_collective"``.
    """

    setting: str
    before: Any
    after: Any
    reason: str

    def __str__(self) -> str:
        if self.after == self.before:
            return f"{self.setting}={self.before!r} has no effect: {self.reason}"
        return f"{self.setting} is set to {self.after!r}: {self.reason}"


_APPLIED_BY_BRIDGE = {
    "mixed_precision": "ddp.grad_reduce_in_fp32 and the dtypes of ddp, and build the model in the dtype that it "
    "computes in",
    "comm_overlap": "ddp.overlap_grad_reduce and ddp.overlap_param_gather",
}
"""Sections of Megatron-Bridge that change others, and what to set in their place."""


class ConfigContainer(Values):
    """All settings, as in Megatron-Bridge.

    Args:
        model, dist, ddp, optimizer, checkpoint: Objects of the classes in :mod:`.settings`, Megatron's, or others with
            the same attributes.
        scheduler, train: For the program.
        others: Megatron-Bridge's other sections (``dataset``, ``tokenizer``, ``logger``, ...), for the program. Those
            that Megatron-Bridge applies to the sections above are refused by :meth:`validate`.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        dist: Any = None,
        ddp: Any = None,
        optimizer: Any = None,
        checkpoint: Any = None,
        scheduler: Any = None,
        train: Any = None,
        **others: Any,
    ) -> None:
        self.model = model if model is not None else TransformerConfig()
        self.dist = dist if dist is not None else DistributedInitConfig()
        self.ddp = ddp if ddp is not None else DistributedDataParallelConfig()
        self.optimizer = optimizer if optimizer is not None else OptimizerConfig()
        self.checkpoint = checkpoint if checkpoint is not None else CheckpointConfig()
        self.scheduler = scheduler if scheduler is not None else SchedulerConfig()
        self.train = train if train is not None else TrainingConfig()
        vars(self).update(others)

    @property
    def unread(self) -> list[str]:
        """Settings for the program, which nothing in this package reads: ``"optimizer.lr"``, or a section's name."""
        found = []
        for name, section in vars(self).items():
            if isinstance(section, Section):
                found += [f"{name}.{other}" for other in section.others]
            elif name not in SECTIONS and section is not None:
                found.append(name)
        return found

    def validate(self) -> list[Adjustment]:
        """See :func:`validate`. The first rank also logs :attr:`unread`, in one line.

        Raises:
            NotImplementedError: Also if there is a section that Megatron-Bridge applies to others.
        """
        for name, instead in _APPLIED_BY_BRIDGE.items():
            if getattr(self, name, None) is not None:
                raise NotImplementedError(
                    f"The section {name} of Megatron-Bridge changes other sections, and nothing here applies it. Leave "
                    f"it out, and set {instead}."
                )
        adjustments = validate(self)
        if self.unread and _is_first_rank():
            _log.warning("for the program, and not read by mfsdp_compile: %s", ", ".join(self.unread))
        return adjustments


def validate(config: Any) -> list[Adjustment]:
    """Check settings and adjust them in place, before the model is built.

    If ``use_megatron_fsdp`` is off, only the settings that enable it are checked.

    Args:
        config: A :class:`ConfigContainer`, Megatron-Bridge's, or any object with some of its attributes. Attributes
            that are missing or None count as defaults, and are not adjusted.

    Returns:
        What was adjusted, and what has no effect. The first rank also logs each (``mfsdp_compile.megatron``).

    Raises:
        ValueError: If settings contradict each other, or Megatron FSDP does not support them.
        NotImplementedError: If a setting is not implemented here.

    Warns:
        If ``CUDA_DEVICE_MAX_CONNECTIONS`` is 1.
    """
    settings = _Settings(config)
    if not _is_enabled(settings):
        return []
    _check(settings)
    _refuse(settings)
    _adjust(settings)
    for adjustment in settings.adjustments:
        log_adjustment(adjustment)
    return settings.adjustments


def log_adjustment(adjustment: Adjustment) -> None:
    """Log an adjustment on the first rank."""
    if _is_first_rank():
        _log.warning("%s", adjustment)


def _is_first_rank() -> bool:
    return dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"


class _Settings:
    """Access to settings by section and name, whatever the classes of the sections."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.adjustments: list[Adjustment] = []

    def section(self, name: str) -> Any:
        return getattr(self._config, name, None)

    def __getitem__(self, path: str) -> Any:
        section, _, name = path.partition(".")
        return getattr(self.section(section), name, known(SECTIONS[section])[name].default)

    def adjust(self, path: str, after: Any, reason: str) -> None:
        """Change a setting if it exists and has another value."""
        section, _, name = path.partition(".")
        held = self.section(section)
        before = getattr(held, name, after)
        if before != after:
            setattr(held, name, after)
            self.adjustments.append(Adjustment(path, before, after, reason))

    def of_kind(self, kind: Treatment) -> Iterator[tuple[str, Any, Any, str]]:
        """Yield path, value, default and meaning of the settings of a kind that differ from their defaults.

        Empty lists count as None.
        """
        for section, cls in SECTIONS.items():
            for name, each in known(cls).items():
                value = self[f"{section}.{name}"]
                if setting_of(each).kind is kind and value not in (each.default, []):
                    yield f"{section}.{name}", value, each.default, setting_of(each).meaning


def _is_enabled(settings: _Settings) -> bool:
    enabled = {
        name: settings[f"{name}.use_megatron_fsdp"] for name in ("dist", "ddp") if settings.section(name) is not None
    }
    if any(enabled.values()) and settings["dist.use_torch_fsdp2"]:
        raise ValueError(
            "Using use_megatron_fsdp and use_torch_fsdp2 at the same time is not supported. They are mutually "
            "exclusive: choose one FSDP implementation, and set the other to False."
        )
    if len(set(enabled.values())) > 1:
        on, off = sorted(enabled, key=lambda name: not enabled[name])
        raise ValueError(
            f"{on}.use_megatron_fsdp is True and {off}.use_megatron_fsdp is False. Megatron FSDP is enabled in both: "
            f"set {off}.use_megatron_fsdp = True too."
        )
    if any(enabled.values()):
        return True
    if settings["checkpoint.ckpt_format"] == "fsdp_dtensor":
        raise ValueError(
            "fsdp_dtensor checkpoint format only supports Megatron FSDP, which is not enabled. Set use_megatron_fsdp = "
            "True in dist and ddp, or another ckpt_format."
        )
    return False


def _has_wrong_format(settings: _Settings) -> bool:
    """Whether checkpoints have another format than Megatron FSDP's, or are said to have one where none is used.

    A default of another class says nothing about checkpoints that are neither saved nor loaded.
    """
    found, section = settings["checkpoint.ckpt_format"], settings.section("checkpoint")
    if found == "fsdp_dtensor":
        return False
    if settings["checkpoint.save"] is not None or settings["checkpoint.load"] is not None:
        return True
    return found is not None and found != getattr(type(section), "ckpt_format", None)


def _check(settings: _Settings) -> None:
    if settings["dist.use_tp_pp_dp_mapping"]:
        raise ValueError(
            "use_tp_pp_dp_mapping is not supported with Megatron FSDP, which requires the standard order of ranks. "
            "Remove use_tp_pp_dp_mapping=True from the configuration."
        )
    if _has_wrong_format(settings):
        found = settings["checkpoint.ckpt_format"] or "torch_dist"
        raise ValueError(
            f"Megatron FSDP only supports fsdp_dtensor checkpoint format, and checkpoint.ckpt_format is {found!r}. Set "
            "checkpoint.ckpt_format='fsdp_dtensor' (--ckpt-format fsdp_dtensor); mfsdp convert makes such checkpoints "
            "of torch_dist ones."
        )
    strategy = ShardingStrategy.of(settings["ddp.data_parallel_sharding_strategy"], "data_parallel_sharding_strategy")
    outer = ShardingStrategy.of(settings["ddp.outer_dp_sharding_strategy"], "outer_dp_sharding_strategy")
    instances = settings["ddp.num_distributed_optimizer_instances"]
    if outer is not ShardingStrategy.NO_SHARD:
        if instances == 1:
            raise ValueError(
                f"outer_dp_sharding_strategy={outer.name.lower()!r} says what is sharded between optimizer instances, "
                "but num_distributed_optimizer_instances is 1. Set it to the number of parts, or "
                "outer_dp_sharding_strategy='no_shard'."
            )
        if outer is not ShardingStrategy.OPTIM or strategy is not ShardingStrategy.OPTIM_GRADS_PARAMS:
            raise ValueError(
                f"outer_dp_sharding_strategy={outer.name.lower()!r} with data_parallel_sharding_strategy="
                f"{strategy.name.lower()!r}: 'optim' with 'optim_grads_params' is supported, and 'no_shard' with all."
            )
    if settings["ddp.fsdp_manual_registration"] and not settings["ddp.nccl_ub"]:
        raise ValueError(
            "FSDP manual registration is only supported with nccl-ub option. Set nccl_ub too, or "
            "fsdp_manual_registration=False."
        )
    if (graphs := settings["model.cuda_graph_impl"]) not in ("none", "full_iteration") and not _captures(settings):
        raise ValueError(
            f"model.cuda_graph_impl={graphs!r} captures single layers, without the collectives between them. Megatron "
            "FSDP supports 'none' and 'full_iteration'."
        )
    if _captures(settings) and settings["ddp.check_for_nan_in_grad"]:
        raise ValueError(
            "ddp.check_for_nan_in_grad reads values on the host in each backward, which a CUDA graph cannot do. Set it "
            "to False (--no-check-for-nan-in-loss-and-grad), or model.cuda_graph_impl='none'."
        )
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warn(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1: communication and computation of FSDP share one hardware queue and "
            "block each other. Unset it (which may slow down tensor and context parallelism to some extent).",
            RuntimeWarning,
        )


def _captures(settings: _Settings) -> bool:
    """Whether whole iterations are captured in CUDA graphs."""
    scope = settings["model.cuda_graph_scope"] or ()
    scopes = [scope] if isinstance(scope, str) else [getattr(each, "name", each) for each in scope]
    impl = settings["model.cuda_graph_impl"]
    return impl == "full_iteration" or (impl == "local" and "full_iteration" in scopes)


def _refuse(settings: _Settings) -> None:
    for path, value, default, meaning in settings.of_kind(Treatment.REFUSED):
        raise NotImplementedError(f"{path}={value!r} is not implemented: {meaning}. Leave it at {default!r}.")
    ddp = settings.section("ddp")
    if not dataclasses.is_dataclass(ddp):
        return
    for each in dataclasses.fields(ddp):
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        if each.name in known(DistributedDataParallelConfig) or default is dataclasses.MISSING:
            continue
        if (value := getattr(ddp, each.name)) != default:
            raise NotImplementedError(
                f"ddp.{each.name}={value!r} is not implemented: this setting is unknown to mfsdp-compile. Leave it at "
                f"{default!r}."
            )


def _adjust(settings: _Settings) -> None:
    strategy = ShardingStrategy.of(settings["ddp.data_parallel_sharding_strategy"], "data_parallel_sharding_strategy")
    unsupported = "it is not supported with Megatron FSDP"
    settings.adjust(
        "ddp.average_in_collective", False, f"{unsupported}, which sums gradients and scales the sum: the same numbers"
    )
    settings.adjust(
        "model.gradient_accumulation_fusion",
        False,
        f"{unsupported}; compiled matmuls write gradients straight into the buffer that is reduced without it",
    )
    for section in ("ddp", "optimizer"):
        settings.adjust(f"{section}.reuse_grad_buf_for_mxfp8_param_ag", False, unsupported)
        settings.adjust(
            f"{section}.use_distributed_optimizer",
            True,
            "Megatron FSDP always shards optimizer state as parameters are",
        )
    if _captures(settings):
        settings.adjust("ddp.megatron_fsdp_cuda_graph_mode", True, "graphs of whole iterations need it")
    for name in ("nccl_ub", "megatron_fsdp_cuda_graph_mode", "megatron_fsdp_max_pool_double_buffer"):
        if settings[f"ddp.{name}"]:
            settings.adjust("ddp.fsdp_double_buffer", True, f"{name} needs it")
    if settings["optimizer.use_precision_aware_optimizer"]:
        settings.adjust(
            "ddp.megatron_fsdp_use_decoupled_grad", True, "a precision-aware optimizer reads parameter.decoupled_grad"
        )
    if strategy >= ShardingStrategy.OPTIM_GRADS:
        settings.adjust("ddp.overlap_grad_reduce", True, f"{strategy.name.lower()} reduces gradients within backward")
    if strategy is ShardingStrategy.OPTIM_GRADS_PARAMS:
        settings.adjust("ddp.overlap_param_gather", True, f"{strategy.name.lower()} gathers parameters within forward")
    for path, value, _, meaning in settings.of_kind(Treatment.IDLE):
        settings.adjustments.append(Adjustment(path, value, value, meaning))
