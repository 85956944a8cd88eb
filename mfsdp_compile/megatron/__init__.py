"""Drop-in replacements for Megatron-LM's and Megatron-Bridge's FSDP classes. Megatron need not be installed.

:class:`FullyShardedDataParallel` and :func:`DistributedOptimizer` replace those of Megatron-Core. Configurations are
Megatron's own objects, or the dataclasses of the same names here. :func:`validate` checks and adjusts them as
Megatron-Bridge does. :func:`add_megatron_fsdp_arguments` and :func:`config_from_arguments` support Megatron-LM's
command line. ``docs/megatron.md`` describes all settings.
"""

from __future__ import annotations

from .allocators import allocator_arguments
from .arguments import add_megatron_fsdp_arguments, config_from_arguments
from .distributed_optimizer import DistributedOptimizer, dump_param_to_param_group_map
from .fully_sharded import FullyShardedDataParallel
from .settings import (
    CheckpointConfig,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    GPTModelProvider,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
    TransformerConfig,
)
from .validation import Adjustment, ConfigContainer, validate

__all__ = [
    "Adjustment",
    "CheckpointConfig",
    "ConfigContainer",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "DistributedOptimizer",
    "FullyShardedDataParallel",
    "GPTModelProvider",
    "OptimizerConfig",
    "SchedulerConfig",
    "TrainingConfig",
    "TransformerConfig",
    "add_megatron_fsdp_arguments",
    "allocator_arguments",
    "config_from_arguments",
    "dump_param_to_param_group_map",
    "validate",
]
