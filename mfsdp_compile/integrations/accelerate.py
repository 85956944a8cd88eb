"""accelerate: an ``Accelerator`` for models that :func:`~mfsdp_compile.fully_shard_model` has sharded.

accelerate's own Accelerator can prepare everything except the model: ``accumulate``, ``backward``, ``clip_grad_norm_``
and the optimizer's wrapper work. This one adds what is missing: the original would wrap the model in
DistributedDataParallel, and save the first rank's rows as if they were the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, full_state_dict
from mfsdp_compile.checkpoint.extra_state import check_extra
from mfsdp_compile.sharded_module import ShardedModule

__all__ = ["FOLDER", "MfsdpAccelerator", "sharded_model"]

FOLDER = "mfsdp"
"""Subfolder, in the folder that a trainer saves to, for the shards of the model and its optimizer."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


_REFUSED: dict[str, tuple[Any, str]] = {
    "fsdp_version": (2, "only 2 is supported"),
    "ignored_modules": (None, "pass fully_shard_model ignored_params"),
    "activation_checkpointing": (False, "checkpoint activations in the model, before it is sharded"),
    "cpu_ram_efficient_loading": (False, "shard a model on the meta device (init_model_with_meta_device)"),
    "min_num_params": (0, "pass fully_shard_model unit_bytes"),
}
"""Settings of accelerate's plugin that have no counterpart: the value that is accepted, and what to do instead."""


class MfsdpAccelerator(accelerate.Accelerator):
    """``accelerate.Accelerator`` for one sharded model and its optimizer, and anything else that a program prepares.

    ::

        accelerator = MfsdpAccelerator(gradient_accumulation_steps=2)
        model = fully_shard_model(model, fsdp_unit_modules="auto")
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        model = torch.compile(model, backend="mfsdp")
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    Shard, offload (``offload_policy``) and compile before ``prepare``, which leaves the model unchanged. If accelerate
    is configured for FSDP2 (``fsdp_plugin``), pass :meth:`sharding_arguments` to ``fully_shard_model``.
    ``mixed_precision`` must be a dtype that the sharded model computes in; there is no autocast. ``save_state`` writes
    shards to :data:`FOLDER`, which can be loaded on any number of ranks. ``get_state_dict`` and ``save_model`` return
    and write the whole model, on the first rank.
    """

    _models: list[nn.Module]
    _optimizers: list[Any]
    shard_for_evaluation: Callable[[nn.Module], nn.Module] | None = None
    """Shards models that are prepared with ``evaluation_mode``. None: they stay whole."""

    def __init__(self, *args: Any, fsdp_plugin: FullyShardedDataParallelPlugin | None = None, **kwargs: Any) -> None:
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **kwargs)
        self._fsdp = fsdp_plugin
        if self.distributed_type == DistributedType.FSDP:  # the model is sharded here, not by torch's FSDP
            self._fsdp = self.state.fsdp_plugin
            self.state.distributed_type = DistributedType.MULTI_GPU

    def sharding_arguments(self) -> dict[str, Any]:
        """Return arguments of ``fully_shard_model`` that do what accelerate's configuration of FSDP2 asks for.

        Empty if accelerate is not configured for FSDP.

        Raises:
            ValueError: If the configuration asks for what is not supported here. The message lists all of it.
        """
        plugin = self._fsdp
        if plugin is None:
            return {}
        complaints = [
            f"{name}={getattr(plugin, name)!r}: {instead}"
            for name, (default, instead) in _REFUSED.items()
            if getattr(plugin, name) not in (default, None)
        ]
        if complaints:
            raise ValueError(
                "mfsdp_compile cannot do what accelerate's fsdp_plugin asks for:\n"
                + "\n".join(f"  {complaint}" for complaint in complaints)
            )
        arguments: dict[str, Any] = {
            "fsdp_unit_modules": plugin.transformer_cls_names_to_wrap or "auto",
            "reshard_after_forward": plugin.reshard_after_forward,
            "offload_policy": plugin.cpu_offload,
        }
        if plugin.mixed_precision_policy is not None:
            arguments["mixed_precision_policy"] = plugin.mixed_precision_policy
        return arguments

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Register a sharded model, and leave it unchanged. Prepares other models as accelerate does.

        Raises:
            ValueError: If accelerate is configured to do something to the model that is impossible after sharding.
        """
        sharded = sharded_model(model)
        if sharded is None:
            if evaluation_mode and self.shard_for_evaluation is not None:
                return self.shard_for_evaluation(model)
            prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
            return prepared
        if self.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                f"accelerate is configured to compile with {self.state.dynamo_plugin.backend.value!r}, but a sharded "
                "model is compiled by torch.compile(model, backend='mfsdp'), before prepare. Remove dynamo_backend "
                "from the Accelerator (or of accelerate's configuration, or ACCELERATE_DYNAMO_BACKEND out of the "
                "environment)."
            )
        offloaded = {bucket.lane.shard.in_host_memory for bucket in sharded.sharded.buckets}
        if self._fsdp is not None and offloaded != {isinstance(self._fsdp.cpu_offload, CPUOffloadPolicy)}:
            raise ValueError(
                f"accelerate's fsdp_plugin has cpu_offload={self._fsdp.cpu_offload!r}, but the model was sharded "
                "otherwise. Shard it with fully_shard_model(model, **accelerator.sharding_arguments())."
            )
        dtypes = {bucket.plan.compute_dtype for bucket in sharded.sharded.buckets}
        if self.mixed_precision != "no" and _DTYPES.get(self.mixed_precision) not in dtypes:
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r}, but the model was sharded to compute in "
                f"{', '.join(sorted(map(str, dtypes)))}, and there is no autocast. Pass fully_shard_model a "
                "mixed_precision_policy=MixedPrecisionPolicy(param_dtype=...), or leave mixed_precision out."
            )
        if not any(known is model for known in self._models):
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the module that was sharded. For other models, returns what accelerate does."""
        sharded = sharded_model(model)
        unwrapped: nn.Module = super().unwrap_model(sharded.module if sharded else model, *args, **kwargs)
        return unwrapped

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a sharded model's full tensors in CPU memory on the first rank, and nothing on others. Collective."""
        sharded = sharded_model(model)
        if sharded is not None:
            return full_state_dict(sharded)
        state: dict[str, Any] = super().get_state_dict(model, unwrap)
        return state

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as accelerate does, with shards for the sharded model and its optimizer. Collective.

        Shards are written by :class:`~mfsdp_compile.checkpoint.Checkpoints`.

        Raises:
            TypeError: If a registered object has state in DTensors. Nothing is written.
        """
        for each in self._custom_objects:
            check_extra(each.state_dict(), f"state_dict() of the registered {type(each).__name__}")
        with self._put_aside() as held:
            folder = super().save_state(output_dir, *args, **kwargs)
        if held is not None:
            model, optimizer = held
            Checkpoints(Path(folder) / FOLDER, keep=1).save(model.sharded.coordinator.steps, model, optimizer)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` has written, on any number of ranks. Collective.

        Raises:
            CheckpointError: If there are no shards in the folder, or they do not match.
        """
        folders: list[Path] = []  # accelerate may choose the folder
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(Path(folder)))
        try:
            with self._put_aside() as held:
                super().load_state(input_dir, *args, **kwargs)
        finally:
            hook.remove()
        if held is None:
            return
        model, optimizer = held
        if Checkpoints(folders[0] / FOLDER).load(model, optimizer) is None:
            raise CheckpointError(
                f"{folders[0]} has no complete checkpoint in its subfolder {FOLDER!r}, where save_state of an "
                "MfsdpAccelerator writes the shards of a model."
            )

    @contextlib.contextmanager
    def _put_aside(self) -> Iterator[tuple[ShardedModule, torch.optim.Optimizer | None] | None]:
        """Hide the sharded model and its optimizer, of which accelerate would save one rank's part.

        Raises:
            ValueError: If there are several.
        """
        models, optimizers = self._models, self._optimizers
        ours = [model for model in map(sharded_model, models) if model is not None]
        parameters = {id(param) for model in ours for param in model.parameters()}
        theirs = [opt for opt in optimizers if id(opt.param_groups[0]["params"][0]) in parameters]
        if len(ours) > 1 or len(theirs) > 1:
            raise ValueError(
                f"{len(ours)} sharded models and {len(theirs)} optimizers are prepared, but MfsdpAccelerator saves "
                "and loads only one of each. Use mfsdp_compile.checkpoint.Checkpoints for them."
            )
        self._models = [model for model in models if sharded_model(model) is None]
        self._optimizers = [optimizer for optimizer in optimizers if optimizer not in theirs]
        try:
            yield (ours[0], theirs[0].optimizer if theirs else None) if ours else None
        finally:
            self._models, self._optimizers = models, optimizers


def sharded_model(model: Any) -> ShardedModule | None:
    """Return the model that ``fully_shard_model`` returned, compiled or not, or None for any other object."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, ShardedModule) else None
