"""What is wrong with a model's options, whichever function they were given to. Words are ``fully_shard_model``'s."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import nn

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy
from mfsdp_compile.runtime.init.meta import Initializer, has_meta
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.model.shard import ShardingOptions
from mfsdp_compile.runtime.plan.communicators import Communication
from mfsdp_compile.runtime.plan.precision import GradientPolicy, Policies, Scaling

from .flags import check_group
from .plugins import ModelPlugin


def check_types(units: Any, ignored: Any, groups: Sequence[tuple[str, Any, type]], plugins: Any) -> None:
    """Raise TypeError for values of the wrong type, which could fail halfway, and ValueError for a plug-in given twice.

    Args:
        groups: Names of arguments that group numbers, their values, and their types.
    """
    for name, value, kind in groups:
        check_group(name, value, kind)
    if not isinstance(ignored, Collection) or not all(isinstance(param, nn.Parameter) for param in ignored):
        raise TypeError(f"ignored_params takes a collection of parameters, got {reprlib.repr(ignored)}")
    if not isinstance(plugins, Sequence) or not all(isinstance(p, ModelPlugin) or callable(p) for p in plugins):
        raise TypeError(
            "plugins takes a list of plug-ins for models (mfsdp_compile.plugins) and of functions (lane, ranks) -> "
            f"lane (docs/write_a_stage.md), got {reprlib.repr(plugins)}."
        )
    for plugin in plugins:
        if isinstance(plugin, type):
            raise TypeError(f"plugins has the class {plugin.__name__}. Pass an instance: {plugin.__name__}(...).")
        if isinstance(plugin, Initializer):
            raise TypeError(f"plugins has a {type(plugin).__name__}, which is for init_fn.")
    for kind in ModelPlugin.__subclasses__():
        if kind.__module__ == ModelPlugin.__module__ and sum(isinstance(plugin, kind) for plugin in plugins) > 1:
            raise ValueError(f"plugins has two {kind.__name__}, of which only the last would count. Pass one.")
    if units is not None and (isinstance(units, nn.Module) or not isinstance(units, (str, type, Iterable))):
        raise TypeError(
            "fsdp_unit_modules takes a list of nn.Module classes, their import paths, or modules; 'auto'; or None; "
            f"got a {type(units).__name__}"
        )


def check_initializer(init_fn: Any, module: nn.Module) -> None:
    """Raise TypeError for what is no initializer, and ValueError if there is nothing to initialize."""
    if isinstance(init_fn, type):
        raise TypeError(f"init_fn is the class {init_fn.__name__}. Pass an instance: {init_fn.__name__}().")
    if init_fn is None:
        return
    if not callable(init_fn):
        raise TypeError(f"init_fn takes a function of a module, or an initializer, got {reprlib.repr(init_fn)}")
    if not has_meta(module):
        raise ValueError("init_fn initializes parameters on the meta device, and this model already has values.")


def check_options(options: Any, plugin: str, module: nn.Module) -> None:
    """Raise TypeError or ValueError for options that a plug-in should not have returned.

    Args:
        plugin: Name of its class.
    """
    if not isinstance(options, ShardingOptions):
        raise TypeError(f"{plugin}.configure must return ShardingOptions, and returned a {type(options).__name__}.")
    for name, kind in _KINDS.items():
        if not isinstance(value := getattr(options, name), kind):
            kinds = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise TypeError(f"{plugin}.configure: {name} is a {kinds}, got {reprlib.repr(value)}")
    for name in ("reshard_after_forward", "rest"):
        if not callable(value := getattr(options, name)):
            raise TypeError(f"{plugin}.configure: {name} is a function of a unit, got {reprlib.repr(value)}")
    if any(isinstance(each, ModelPlugin) or not callable(each) for each in options.plugins):
        raise TypeError(f"{plugin}.configure: plugins are functions (lane, ranks) -> lane, got {options.plugins!r}")
    if unknown := set(options.whole) - {name for name, _ in module.named_parameters()}:
        raise ValueError(f"{plugin}.configure: whole has {sorted(unknown)}, which are no names of parameters.")


_KINDS: dict[str, Any] = {
    "precision": Policies,
    "gradient_policy": GradientPolicy,
    "overlap": Overlap,
    "layout_policy": LayoutPolicy,
    "buffer_policy": BufferPolicy,
    "communication": Communication,
    "from_meta": (Initializer, type(None)),
    "whole": (list, tuple, set, frozenset),
    "ignored": frozenset,
    "plugins": tuple,
    "by_module": bool,
    "keeps_transposes": bool,
    "symmetric": bool,
    "check_values": bool,
}
"""Types of fields of :class:`.ShardingOptions`."""


def check_together(options: ShardingOptions) -> None:
    """Raise ValueError for options that contradict each other.

    For ``shard``, docs/shard.md says what has these names.
    """
    registers, layout = options.registers != "never", options.layout_policy
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
    if options.gradient_policy.keeps_memory and not has_buffers:
        raise ValueError("GradientPolicy(keeps_memory=True) is for CUDA graphs, which need buffers: add CommBuffers().")
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
