"""What is wrong with a model's options, whichever function they were given to. Words are ``fully_shard_model``'s."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.model.shard import ShardingOptions
from mfsdp_compile.runtime.plan.precision import Scaling

from .plugins import ModelPlugin


def check_types(units: Any, ignored: Any, groups: Sequence[tuple[str, Any, type]], plugins: Any) -> None:
    """Raise TypeError for values of the wrong type, which could fail halfway, and ValueError for a plug-in given twice.

    Args:
        groups: Names of arguments that group numbers, their values, and their types.
    """
    for name, value, kind in groups:
        if not isinstance(value, kind):
            raise TypeError(f"{name} takes a {kind.__name__} (mfsdp_compile.plugins), got {reprlib.repr(value)}")
    if not isinstance(ignored, Collection) or not all(isinstance(param, nn.Parameter) for param in ignored):
        raise TypeError(f"ignored_params takes a collection of parameters, got {reprlib.repr(ignored)}")
    if not isinstance(plugins, Sequence) or not all(isinstance(p, ModelPlugin) or callable(p) for p in plugins):
        raise TypeError(
            "plugins takes a list of plug-ins for models (mfsdp_compile.plugins) and of functions (lane, ranks) -> "
            f"lane (docs/write_a_stage.md), got {reprlib.repr(plugins)}."
        )
    seen: set[type] = set()
    for plugin in plugins:
        if isinstance(plugin, type):
            raise TypeError(f"plugins has the class {plugin.__name__}. Pass an instance: {plugin.__name__}(...).")
        if isinstance(plugin, ModelPlugin) and type(plugin) in seen:
            raise ValueError(f"plugins has two {type(plugin).__name__}, of which only the last would count. Pass one.")
        seen.add(type(plugin))
    if units is not None and (isinstance(units, nn.Module) or not isinstance(units, (str, type, Iterable))):
        raise TypeError(
            "fsdp_unit_modules takes a list of nn.Module classes, their import paths, or modules; 'auto'; or None; "
            f"got a {type(units).__name__}"
        )


def check_together(options: ShardingOptions) -> None:
    """Raise ValueError for options that contradict each other.

    For ``shard``, docs/shard.md says what has these names.
    """
    registers, layout = options.registers != "never", options.layout_policy or LayoutPolicy()
    symmetric = registers and options.symmetric
    has_buffers = options.buffer_policy.double or options.buffer_policy.largest
    if symmetric and options.gradient_policy.scaling is Scaling.AVERAGE_IN_COLLECTIVE:
        raise ValueError(
            "average_in_collective: NCCL only sums in symmetric memory, which nccl_ub registers. Leave "
            "average_in_collective out, or pass disable_symmetric_registration=True."
        )
    if registers and "expandable_segments:true" in compat.allocator_settings().replace(" ", "").lower():
        raise ValueError(
            f"nccl_ub: PYTORCH_ALLOC_CONF has {compat.allocator_settings()!r}, and NCCL cannot register memory of "
            "expandable segments. Leave expandable_segments out, or train without nccl_ub."
        )
    if options.allocate is not None and registers:
        raise ValueError("buffer_allocator: NCCL allocates the buffers of nccl_ub. Pass only one of them.")
    if registers and not has_buffers:
        raise ValueError("CommBuffers registers buffers, and this model has none: pass BufferPolicy(double=True).")
    if options.allocate is not None and not has_buffers:
        raise ValueError(
            "buffer_allocator allocates communication buffers, and this model has none: pass "
            "fsdp_double_buffer=True or maxpool_double_buffer=True."
        )
    if options.communication.zero_cta and not symmetric:
        raise ValueError(
            "communication: zero_cta gathers from and into symmetric memory. Pass nccl_ub=True, and leave "
            "disable_symmetric_registration out."
        )
    if options.by_module and layout.unit_bytes is not None:
        raise ValueError(
            "enable_fine_grained_param_gather divides units into modules, and unit_bytes joins units: pass only "
            "one of them."
        )
    if layout.by_parameter and layout.bucket_bytes is not None:
        raise ValueError(
            "disable_bucketing gives each parameter a bucket of its own, so there is nothing that bucket_bytes "
            "could split: pass only one of them."
        )
