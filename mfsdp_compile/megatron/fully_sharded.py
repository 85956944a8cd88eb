"""A replacement for Megatron-Core's ``FullyShardedDataParallel``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_compile.api import fully_shard_model
from mfsdp_compile.megatron_fsdp import MegatronFSDP
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.init.meta import has_meta
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.ranks.agreement import telling_others

from .process_groups import mesh_arguments
from .translation import sharding_arguments
from .validation import Adjustment, log_adjustment, validate

_FUSED = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")
"""Attributes of modules that write gradients to ``parameter.main_grad``. Transformer Engine's may."""


class FullyShardedDataParallel(MegatronFSDP):
    """A model sharded according to Megatron's settings. Collective: every rank that shares the model creates it.

    This is a :class:`~mfsdp_compile.MegatronFSDP`, with all of its methods: it trains eagerly or through
    ``torch.compile(model, backend="mfsdp")``. ``module`` is the model that was passed in (in Megatron, it is another
    wrapper around it). Gradient reductions are deferred to the end of a step where possible. They run in ``step`` of an
    optimizer that :func:`~.distributed_optimizer.DistributedOptimizer` or ``fully_shard_optimizer`` has extended, or in
    ``finish_grad_sync()``.

    Args:
        config: The model's configuration: Megatron's ``TransformerConfig``, or that of :mod:`mfsdp_compile.megatron`.
        ddp_config: Megatron's ``DistributedDataParallelConfig``, or that of :mod:`mfsdp_compile.megatron`. A copy is
            checked and adjusted by :func:`~.validation.validate`.
        module: The model. The argument order ``(config, module, ddp_config)`` of older versions also works.
        fsdp_unit_modules: Classes whose instances are units. None: the model's repeated blocks.
        disable_bucketing: Has no effect: parameters outside of units are one bucket.
        device: Device that holds the shards.
        pg_collection: Megatron's process groups; see :func:`~.process_groups.mesh_arguments`. None: ranks are in
            Megatron's standard order, with the sizes of ``config``.
        sharding: Other arguments of :func:`~mfsdp_compile.fully_shard_model`, such as ``bucket_bytes``, ``init_fn`` or
            ``device_mesh``.

    Raises:
        ValueError: If settings contradict each other or do not suit the ranks, if FSDP is not enabled in
            ``ddp_config``, or if a module writes gradients without autograd.
        TypeError: If arguments are in another order, or a setting determines an argument that is also passed.
        NotImplementedError: If a setting is not implemented here.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: Any = None,
        **sharding: Any,
    ) -> None:
        with telling_others():
            if isinstance(ddp_config, nn.Module) and not isinstance(module, nn.Module):
                ddp_config, module = module, ddp_config
            _check_kinds(config, ddp_config, module)
            model_settings, ddp_settings = _validated(config, ddp_config)
            _refuse_fusion(module)
            decided = sharding_arguments(model_settings, ddp_settings)
            if twice := sorted(sharding.keys() & decided.keys()):
                raise TypeError(
                    f"FullyShardedDataParallel got {', '.join(twice)}, which config and ddp_config decide. Set them "
                    "there, or use fully_shard_model."
                )
            if has_meta(module) and not decided["init_model_with_meta_device"]:
                decided["init_model_with_meta_device"] = True
                reason = "the model has parameters on the meta device"
                log_adjustment(Adjustment("model.init_model_with_meta_device", False, True, reason))
            ranks = _ranks(model_settings, ddp_settings, pg_collection, sharding)
            _look_for_parts(module, model_settings)
            units = fsdp_unit_modules if fsdp_unit_modules is not None else "auto"
            sharded = fully_shard_model(module, fsdp_unit_modules=units, device=device, **decided, **ranks, **sharding)
        self._hold(sharded.module, sharded.sharded, sharded.dist_index, ddp_config)
        self.config = config

    # -- called by Megatron's schedules and training loops ------------------------------------------------------------

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """See :meth:`MegatronFSDP.start_param_sync`. Ignores the parameters that Megatron's schedules pass."""
        super().start_param_sync(force_sync=force_sync, force_dispatch=force_dispatch)

    def start_grad_sync(self, *unused: Any) -> None:
        """See :meth:`MegatronFSDP.start_grad_sync`. Ignores the parameters that Megatron's schedules pass."""
        super().start_grad_sync()

    def stop_communication(self) -> None:
        """Wait for all communication that has been started."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()

    def set_is_first_microbatch(self) -> None:
        """Tell modules that a step begins, by setting their attribute ``is_first_microbatch``.

        For modules that keep state between microbatches, such as Transformer Engine's fp8 weights.
        """
        for part in self.module.modules():
            if hasattr(part, "is_first_microbatch"):
                part.is_first_microbatch = True  # type: ignore[assignment]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return ``state_dict()``, for ``torch.distributed.checkpoint`` (``fsdp_dtensor``). Communicates nothing.

        As in Megatron's checkpoints of this format, the ``_extra_state`` of Transformer Engine's layers is left out, so
        delayed scaling starts over after a load. ``state_dict()`` and :mod:`mfsdp_compile.checkpoint` keep it.

        Args:
            prefix: Prefix of all names.
            sharded_offsets: Must be empty. Megatron's ``torch_dist`` format uses them.
            metadata: Ignored: there is only one format.

        Raises:
            ValueError: If ``sharded_offsets`` is not empty.
        """
        if sharded_offsets:
            raise ValueError(
                "sharded_offsets are for the torch_dist format, but Megatron FSDP only supports the fsdp_dtensor "
                "checkpoint format. Omit them; mfsdp convert makes one format of the other."
            )
        return self._without_te_state(self.state_dict(prefix=prefix), prefix)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the same as :meth:`sharded_state_dict`."""
        return self._without_te_state(self.state_dict(prefix=prefix, keep_vars=keep_vars), prefix)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict. With ``strict``, it may still lack what :meth:`sharded_state_dict` leaves out."""
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        left_out = {*self._te_states()}
        missing = [name for name in found.missing_keys if name not in left_out]
        if strict and (missing or found.unexpected_keys):
            return super().load_state_dict(state_dict, strict=True, assign=assign)  # raises, with torch's message
        return type(found)(missing, found.unexpected_keys)

    def _without_te_state(self, state: dict[str, Any], prefix: str) -> dict[str, Any]:
        for name in self._te_states():
            state.pop(prefix + name, None)
        return state

    def _te_states(self) -> list[str]:
        """Return the names of what Transformer Engine's modules return from ``get_extra_state``."""
        engine = compat.transformer_engine
        return [
            f"{name}._extra_state"
            for name, part in self.named_modules()
            if engine.is_layer(type(part)) or engine.is_operation(type(part))
        ]


def _check_kinds(config: Any, ddp_config: Any, module: Any) -> None:
    if isinstance(module, nn.Module) and not isinstance(ddp_config, nn.Module) and not isinstance(config, nn.Module):
        return
    got = ", ".join(type(each).__name__ for each in (config, ddp_config, module))
    raise TypeError(
        "FullyShardedDataParallel takes (config, ddp_config, module), or (config, module, ddp_config), with two "
        f"configurations and an nn.Module; got ({got})."
    )


def _validated(config: Any, ddp_config: Any) -> tuple[Any, Any]:
    """Return adjusted copies of the settings."""
    model, ddp = copy.copy(config), copy.copy(ddp_config)
    if not getattr(ddp, "use_megatron_fsdp", True):
        raise ValueError(
            "ddp_config.use_megatron_fsdp is False, and FullyShardedDataParallel is Megatron FSDP. Set "
            "ddp_config.use_megatron_fsdp = True."
        )
    ddp.use_megatron_fsdp = True
    validate(SimpleNamespace(model=model, ddp=ddp))
    return model, ddp


def _ranks(config: Any, ddp_config: Any, pg_collection: Any, sharding: Mapping[str, Any]) -> dict[str, Any]:
    """Return which ranks to shard over, unless ``sharding`` says so."""
    instances = getattr(ddp_config, "num_distributed_optimizer_instances", 1)
    if not {"device_mesh", "expt_device_mesh"} & sharding.keys():
        return mesh_arguments(config, instances, pg_collection)
    if pg_collection is not None:
        raise TypeError("FullyShardedDataParallel got both pg_collection and a device mesh: pass only one of them.")
    mesh, outer = sharding.get("device_mesh"), sharding.get("dp_outer_dim")
    parts = mesh[outer].size() if mesh is not None and outer is not None else 1
    if parts != instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={instances}, and device_mesh with dp_outer_dim={outer!r} has "
            f"{parts}. Set it to the size of that dimension."
        )
    return {}


def _look_for_parts(module: nn.Module, config: Any) -> None:
    """Warn if a model for tensor-parallel ranks has no parameter that is divided over them."""
    size = getattr(config, "tensor_model_parallel_size", 1) or 1
    if size > 1 and not any(
        isinstance(param, DTensor) or getattr(param, "tensor_model_parallel", False) for param in module.parameters()
    ):
        warn(
            f"tensor_model_parallel_size is {size}, but no parameter is marked as a part (tensor_model_parallel=True) "
            f"or is a DTensor: each of the {size} tensor-parallel ranks holds all parameters, and must get the same "
            "data. Build the model of tensor-parallel layers, or set it to 1.",
        )


def _refuse_fusion(module: nn.Module) -> None:
    for name, part in module.named_modules():
        for attribute in _FUSED:
            if getattr(part, attribute, False) is True and not compat.transformer_engine.is_layer(type(part)):
                raise ValueError(
                    f"Module {name!r}, a {type(part).__name__}, was built with {attribute}=True: it writes weight "
                    "gradients to main_grad, bypassing autograd. Set config.gradient_accumulation_fusion=False "
                    "(--no-gradient-accumulation-fusion) before the model is built."
                )
