"""Hugging Face's ``Trainer`` over sharded, compiled models.

``MfsdpTrainer`` is ``transformers.Trainer`` with its data handling, schedule, callbacks and logs. This module
implements what Trainer leaves to the distribution of models: when the model is sharded, its dtypes, and what is saved
and loaded.

    self.model          the Hugging Face model; its parameters are shards once training or evaluation has begun
    self.sharded        what ``fully_shard_model`` returned for it
    self.model_wrapped  the compiled form of that, which is called

A checkpoint is the folder ``checkpoint-100`` that Trainer creates. It contains weights for ``from_pretrained``, and a
subfolder ``mfsdp`` with full-precision weights, optimizer, learning-rate schedule and random state as shards, for any
number of ranks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.training_args import ParallelMode

from mfsdp_compile.api import fully_shard, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.backend.options import INNER_COMPILERS
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, full_state_dict, load
from mfsdp_compile.checkpoint.extra_state import get_generators, set_generators
from mfsdp_compile.distributed_index import hybrid_arguments
from mfsdp_compile.metrics import StepMetrics, StepRecord
from mfsdp_compile.runtime.formats.packed import is_packed
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.guests.offload.policy import AnyOffloadPolicy, OptimizerOffloadPolicy
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy
from mfsdp_compile.runtime.ranks.agreement import errors_for_all
from mfsdp_compile.sharded_module import ShardedModule

from .accelerate import FOLDER, MfsdpAccelerator
from .huggingface_save import WRITING, can_stream, save_weights

__all__ = ["MfsdpSeq2SeqTrainer", "MfsdpTrainer", "MfsdpTrainerMixin", "ShardingArguments", "StepMetricsCallback"]

if int(transformers.__version__.partition(".")[0]) < 5:
    raise ImportError(f"mfsdp_compile.integrations.transformers needs transformers 5, found {transformers.__version__}")

_log = logging.getLogger("mfsdp_compile")

_OFFLOAD: dict[str | None, AnyOffloadPolicy | None] = {
    None: None,
    "all": CPUOffloadPolicy(),
    "optimizer": OptimizerOffloadPolicy(),
}


@dataclass
class ShardingArguments:
    """How to shard and compile. Complements ``TrainingArguments``, and works with ``HfArgumentParser``.

    Args:
        units: Names or import paths of the classes whose instances are units. None: the classes that the model names in
            ``_no_split_modules``, or its repeated blocks if it names none.
        zero_dp_strategy: ``"optim_grads_params"``, ``"optim_grads"``, ``"optim"`` or ``"no_shard"``.
        replicas: Number of groups of ranks that each hold all shards (HSDP).
        outer_dp_sharding_strategy: What to shard over replicas: ``"no_shard"``, or ``"optim"``, the optimizer state.
        main_params_dtype: Dtype of shards and optimizer state. ``"model"``: the model's.
        main_grads_dtype: Dtype in which gradients are summed. None: that of the shards.
        grad_comm_dtype: Dtype in which gradients are reduced. None: the dtype that the model computes in.
        flat_optimizer: Step over flat tensors; see ``fully_shard_optimizer``.
        offload: What is kept in host memory: ``"all"``, shards, gradients and optimizer state, as with accelerate's
            ``fsdp_offload_params``; or ``"optimizer"``, the same except for what is gathered, as with DeepSpeed's
            ``offload_optimizer``. None: nothing.
        compile: Run through ``torch.compile(backend="mfsdp")``. If False, run with eager hooks, with the same numbers.
        compile_options: Options of that backend, as a dictionary or JSON.
        sharding_options: More arguments of ``fully_shard_model`` (such as ``unit_bytes``), as a dictionary or JSON.
    """

    units: list[str] | None = field(default=None, metadata={"help": "Classes that are gathered as one."})
    zero_dp_strategy: str = field(default="optim_grads_params", metadata={"help": "What is sharded."})
    replicas: int = field(default=1, metadata={"help": "Groups of ranks that have all shards each."})
    outer_dp_sharding_strategy: str = field(default="no_shard", metadata={"help": "What replicas divide."})
    main_params_dtype: str = field(default="float32", metadata={"help": "Of shards; 'model': as the model."})
    main_grads_dtype: str | None = field(default=None, metadata={"help": "That gradients are summed in."})
    grad_comm_dtype: str | None = field(default=None, metadata={"help": "That gradients are reduced in."})
    flat_optimizer: bool = field(default=False, metadata={"help": "Step over flat tensors."})
    offload: str | None = field(default=None, metadata={"help": "To host memory: 'all' or 'optimizer'."})
    compile: bool = field(default=True, metadata={"help": "Compile with the mfsdp backend."})
    compile_options: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of the mfsdp backend."})
    sharding_options: dict[str, Any] | str | None = field(default=None, metadata={"help": "Of fully_shard_model."})

    def __post_init__(self) -> None:
        for name in ("compile_options", "sharding_options"):
            given = getattr(self, name)
            setattr(self, name, json.loads(given) if isinstance(given, str) else dict(given or {}))

    def arguments(self, model: nn.Module, device_type: str) -> dict[str, Any]:
        """Return the arguments of ``fully_shard_model`` for ``model``.

        Collective if there are replicas, because it creates process groups.

        Raises:
            ValueError: If a dtype or what is offloaded is unknown, or the number of replicas does not divide the number
                of ranks.
        """
        if self.offload not in _OFFLOAD:
            raise ValueError(f"offload={self.offload!r} is none of 'all', 'optimizer' and None.")
        main_params = None if self.main_params_dtype == "model" else _dtype(self.main_params_dtype, "main_params_dtype")
        policy = MixedPrecisionPolicy(
            main_params,
            _dtype(self.main_grads_dtype, "main_grads_dtype"),
            _dtype(self.grad_comm_dtype, "grad_comm_dtype"),
        )
        return {
            "fsdp_unit_modules": self.units or _units(model),
            "zero_dp_strategy": self.zero_dp_strategy,
            "outer_dp_sharding_strategy": self.outer_dp_sharding_strategy,
            "mixed_precision_policy": policy,
            "offload_policy": _OFFLOAD[self.offload],
            **self._mesh(device_type),
            **self.sharding_options,  # type: ignore[dict-item]
        }

    def _mesh(self, device_type: str) -> dict[str, Any]:
        if self.replicas == 1:
            return {}
        world_size = dist.get_world_size()
        if self.replicas < 1 or world_size % self.replicas:
            raise ValueError(f"replicas={self.replicas} does not divide the {world_size} ranks.")
        shape = (self.replicas, world_size // self.replicas)
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))
        return hybrid_arguments(mesh, "shard", "replica")


class StepMetricsCallback(TrainerCallback):
    """Adds :class:`.StepMetrics` to the logs of :class:`MfsdpTrainer`, for whatever ``report_to`` names.

    ::

        flops = model_flops(model, **batch) / batch["input_ids"].numel()
        trainer = MfsdpTrainer(model, args, callbacks=[StepMetricsCallback(flops_per_token=flops)], ...)

    Logs get the keys of :meth:`.StepRecord.scalars` but the loss, which they have. Tokens are the elements of
    ``input_ids``, padding included. Evaluation, saving and the first step are not counted.

    Args:
        options: Arguments of :class:`.StepMetrics`, except ``interval`` and ``step``: Trainer says when it logs.
            ``writers`` is empty by default.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.tokens: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        options = {"writers": (), "device": args.device, **self.options, "interval": None, "step": state.global_step}
        self.metrics = StepMetrics(**options)
        self.latest: StepRecord | None = None
        self._step = contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.tokens is None:
            raise TypeError("StepMetricsCallback gets batches from MfsdpTrainer: pass it to that, or to its mixin.")
        self._step.enter_context(self.metrics.step(self.tokens))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.close()
        is_first = self.latest is None
        if is_first or control.should_log:  # before Trainer waits for the device, to log the loss
            self.latest = self.metrics.record()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_log:
            self.latest = self.metrics.record() or self.latest

    def scalars(self, step: int) -> dict[str, float]:
        """Return what is known of the steps up to ``step``."""
        return self.latest.scalars() if self.latest is not None and self.latest.step == step else {}


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class MfsdpTrainerMixin(_Base):
    """Adds sharding to a subclass of ``transformers.Trainer``: ``class MyTrainer(MfsdpTrainerMixin, SFTTrainer)``.

    The model is sharded when training or evaluation begins, together with the optimizer if one was passed, and so is
    the reference model of TRL's trainers, which every rank must run as often as the others. ``bf16`` and
    ``fp16`` set the dtype that the model is gathered and computes in. Shards keep their values without rounding, as
    with accelerate and FSDP2; there is no autocast. ``torch_compile_backend`` selects the inner compiler:
    ``"inductor"`` or ``"aot_eager"``.

    Args:
        sharding: How to shard and compile.

    Raises:
        ValueError: If arguments of the trainer cannot be honored. The message lists all of them.
    """

    sharded: ShardedModule | None = None

    def __init__(self, *args: Any, sharding: ShardingArguments | None = None, **kwargs: Any) -> None:
        self.sharding = sharding or ShardingArguments()
        self._generators: Mapping[str, Tensor] | None = None
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self.args, self.model, self.sharding)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                f"accelerate is configured for {self.accelerator.distributed_type.value}, but the model is sharded by "
                "mfsdp_compile. Start the program with torchrun, or choose plain multi-GPU training in accelerate's "
                "configuration."
            )
        # Trainer creates the accelerator by name. This class differs only in its methods.
        self.accelerator.__class__ = MfsdpAccelerator
        self.accelerator.shard_for_evaluation = self._shard_for_evaluation

    # -- the model ----------------------------------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: sharding moves the model, so that no device ever holds all of it."""

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """Dtype to compute in. None: the model's own."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    def _shard_for_evaluation(self, model: nn.Module) -> nn.Module:
        """Shard a model that is only evaluated, such as TRL's reference model. Unsuitable ones stay whole."""
        if any(_unsuitable(model)):
            return model
        with _computing_in(model, self._compute_dtype):
            return fully_shard_model(model, **self.sharding.arguments(model, self.args.device.type)).eval()

    def _shard(self) -> ShardedModule:
        """Shard the model and, if one was passed, its optimizer, unless that is already done."""
        if self.sharded is not None and self.sharded.module is self.model:
            return self.sharded
        params = self.model.named_parameters(remove_duplicate=False)
        self._saved_dtypes = {name: param.dtype for name, param in params if not is_packed(param)}
        arguments = self.sharding.arguments(self.model, self.args.device.type)
        with _computing_in(self.model, self._compute_dtype):
            if self.optimizer is None:
                self.sharded = fully_shard_model(self.model, **arguments)
            else:
                flat = self.sharding.flat_optimizer
                self.sharded, _ = fully_shard(self.model, self.optimizer, flat_optimizer=flat, **arguments)
        if hasattr(self.model, "generate"):
            self.model.generate = _synced(self.model.generate, self.sharded.sharded.topology)
        self.model_wrapped = self.sharded
        if self.sharding.compile:
            inner = self.args.torch_compile_backend or INNER_COMPILERS[0]
            options = {"inner": inner, **self.sharding.compile_options}  # type: ignore[dict-item]
            self.model_wrapped = torch.compile(self.sharded, backend="mfsdp", options=options)
        return self.sharded

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the optimizer of the shards, with Trainer's parameter groups."""
        self._shard()
        is_given = self.optimizer is not None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if not is_given:
            fully_shard_optimizer(optimizer, flat=self.sharding.flat_optimizer)
        return optimizer

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the wrapped model. If it is not Trainer's own model, Trainer prepares only the optimizer."""
        self._shard()
        return self.model_wrapped

    def _prepare_input(self, data: Any) -> Any:
        prepared = super()._prepare_input(data)
        if isinstance(prepared, Tensor) and prepared.is_floating_point() and self._compute_dtype is not None:
            return prepared.to(self._compute_dtype)
        return prepared

    # -- metrics ------------------------------------------------------------------------------------------------------

    @property
    def _step_metrics(self) -> list[StepMetricsCallback]:
        return [each for each in self.callback_handler.callbacks if isinstance(each, StepMetricsCallback)]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        for each in self._step_metrics:
            epoch_iterator = each.metrics.data(epoch_iterator)
        samples, items = super().get_batch_samples(epoch_iterator, *args, **kwargs)
        for each in self._step_metrics:
            each.tokens = sum(batch["input_ids"].numel() for batch in samples if "input_ids" in batch)
        return samples, items

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            for each in self._step_metrics:
                logs = logs | each.scalars(self.state.global_step)
        super().log(logs, *args, **kwargs)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Save weights in the model's original dtypes, and the other files that ``from_pretrained`` needs. Collective.

        Raises:
            RuntimeError, OSError: On every rank, if the first one could not write.
        """
        if self.sharded is None or self.sharded.module is not self.model or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        if isinstance(self.model, PreTrainedModel) and can_stream(self.model):
            save_weights(self.sharded, folder, self._saved_dtypes, beside=lambda: self._save_beside_weights(folder))
            return
        whole = full_state_dict(self.sharded)
        with errors_for_all(self.sharded.sharded.everyone, *WRITING):
            super()._save(str(folder), {k: v.to(self._saved_dtypes.get(k, v.dtype)) for k, v in whole.items()})

    def _save_beside_weights(self, folder: Path) -> None:
        super()._save(str(folder), {})
        self.model.config.dtype = next(dtype for dtype in self._saved_dtypes.values() if dtype.is_floating_point)
        self.model.config.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save everything that is needed to continue training. Collective."""
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        checkpoints = Checkpoints(Path(output_dir) / FOLDER, keep=1)
        checkpoints.save(self.state.global_step, self._shard(), self.optimizer.optimizer, extra=extra)

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: random state is saved with the shards."""

    # -- loading ------------------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint without optimizer state.

        Other checkpoints are loaded together with their optimizer state, once the optimizer exists.
        """
        self._shard()
        folder = Path(resume_from_checkpoint)
        if Checkpoints(folder / FOLDER).latest() is not None:
            return
        if not (folder / "trainer_state.json").is_file():  # the last file that Trainer writes
            raise CheckpointError(f"{folder} is not complete: a save was interrupted. Resume from an earlier one.")
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        restored = Checkpoints(Path(checkpoint) / FOLDER).load(self._shard(), self.optimizer.optimizer)
        if restored is not None:
            self.lr_scheduler.load_state_dict(restored.extra["scheduler"])
            self._generators = get_generators() if restored.generators else None

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the random state of the checkpoint. Trainer calls this after it has skipped earlier batches."""
        if self._generators is not None:
            set_generators(self._generators)

    def _load_best_model(self) -> None:
        best = Checkpoints(Path(self.state.best_model_checkpoint) / FOLDER).latest()
        if best is None:  # saved with save_only_model
            super()._load_best_model()
        else:
            load(best, self._shard(), generators=False)


class MfsdpTrainer(MfsdpTrainerMixin, Trainer):
    """``transformers.Trainer`` over a sharded model; see :class:`MfsdpTrainerMixin`.

    ::

        trainer = MfsdpTrainer(model, TrainingArguments("out", bf16=True), train_dataset=data,
        sharding=ShardingArguments())
        trainer.train()
    """


class MfsdpSeq2SeqTrainer(MfsdpTrainerMixin, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` over a sharded model; see :class:`MfsdpTrainerMixin`."""


# -- details ----------------------------------------------------------------------------------------------------------


def _synced(generate: Callable[..., Any], topology: Topology) -> Callable[..., Any]:
    """Make ``generate`` keep running forwards on ranks whose sequences have ended, if forwards gather."""

    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        return generate(*args, **{**kwargs, "synced_gpus": topology.gather_group is not None})

    return run


_REFUSED = {
    "deepspeed": "DeepSpeed shards the model too",
    "fsdp": "torch's FSDP shards the model too; say how in ShardingArguments (offload='all' for 'offload')",
    "parallelism_config": "tensor, context and sequence parallelism are not supported here",
    "auto_find_batch_size": "one rank out of memory leaves the others in a collective",
    "fp16_full_eval": "shards cannot change their dtype; evaluation computes as training does",
    "bf16_full_eval": "shards cannot change their dtype; evaluation computes as training does",
    "save_on_each_node": "whole weights are gathered on the first rank alone",
    "torch_compile_mode": "give compile_options={'inductor': {...}} in ShardingArguments",
}
"""Settings that cannot be honored where they are set, and why."""


def _refuse(args: Any, model: nn.Module | None, sharding: ShardingArguments) -> None:
    """Raise ValueError for all arguments that cannot be honored."""
    backend = args.torch_compile_backend
    optim = getattr(args.optim, "value", args.optim)
    refused = {name: why for name, why in _REFUSED.items() if getattr(args, name)}
    if "underflow_overflow" in [getattr(d, "value", d) for d in args.debug]:
        refused["debug"] = "its hooks read whole weights"
    if backend not in (None, *INNER_COMPILERS):
        inner = ", ".join(INNER_COMPILERS)
        refused["torch_compile_backend"] = (
            f"the compiler behind backend='mfsdp' is one of {inner}; leave it out for the default"
        )
    if args.torch_compile and not sharding.compile:
        refused["torch_compile"] = "ShardingArguments(compile=False) says otherwise"
    if optim.startswith(_OPTIMIZERS):
        refused["optim"] = f"{optim} works on whole matrices or in backward"
    if args.ddp_broadcast_buffers and (model is None or any(_saved_buffers(model))):
        refused["ddp_broadcast_buffers"] = (
            "each rank keeps its own buffers; use torch.nn.SyncBatchNorm, or broadcast them"
        )
    complaints = [f"  TrainingArguments({name}={getattr(args, name)!r}): {why}" for name, why in refused.items()]
    if args.parallel_mode != ParallelMode.DISTRIBUTED:
        complaints.append("  There is no process group: start the program with torchrun --nproc-per-node=N, 1 will do")
    if model is not None:
        complaints += [f"  The model {what}" for what in _unsuitable(model)]
    if complaints:
        raise ValueError("MfsdpTrainer cannot train with these:\n" + "\n".join(complaints))
    for name, why in _WITHOUT_EFFECT.items():
        if (value := getattr(args, name)) is not None:
            _log.info("TrainingArguments(%s=%r) has no effect: %s.", name, value, why)


_WITHOUT_EFFECT = {
    "ddp_find_unused_parameters": "parameters that no rank used have no gradient, whether or not they are looked for",
    "ddp_bucket_cap_mb": "a unit is a bucket; unit_bytes and bucket_bytes in sharding_options join and split units",
    "ddp_broadcast_buffers": "the model has no buffers that are saved, or each rank is to keep its own",
    "ddp_static_graph": "a changing graph is as fast, and reentrant checkpointing needs nothing",
}
"""Settings of DistributedDataParallel that leave the numbers as they are, and why."""

_OPTIMIZERS = ("lomo", "adalomo", "galore", "apollo")


def _saved_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers that state dicts have, as those of BatchNorm, which training changes."""
    for module in model.modules():
        yield from (name for name in module._buffers if name not in module._non_persistent_buffers_set)


def _unsuitable(model: nn.Module) -> Iterator[str]:
    if isinstance(model, ShardedModule) or hasattr(model, "_orig_mod"):
        yield f"is a {type(model).__name__}: pass the Hugging Face model; MfsdpTrainer shards and compiles it"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        yield "was loaded with a device_map over several devices: load it without"
    if getattr(model, "is_distributed_loading_by_transformers", False):
        yield "was sharded by from_pretrained(distributed_config=...): load it without"
    if getattr(model, "is_quantized", False) and not any(map(is_packed, model.parameters())):
        yield "is quantized, but not in 4 bits by bitsandbytes: other quantized parameters are not sharded"


def _units(model: nn.Module) -> list[str] | str:
    named = set(getattr(model, "_no_split_modules", None) or ())
    return sorted(named & {type(module).__name__ for module in model.modules()}) or "auto"


def _dtype(name: str | None, argument: str) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{argument} takes the name of a dtype, such as 'float32', got {name!r}")
    return dtype


@contextlib.contextmanager
def _computing_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Give parameters the dtype ``dtype`` while the model is sharded, except those that the model keeps in float32.

    Shards get the original values, unrounded.
    """
    lists = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == torch.float16 else [])]
    kept = [module for attribute in lists for module in getattr(model, attribute, None) or ()]
    before: dict[str, Tensor] = {}
    for name, param in model.named_parameters() if dtype is not None else ():
        is_kept = any(re.search(rf"(?:^|\.){module}(?:\.|$)", name) for module in kept)
        if param.is_floating_point() and param.dtype != dtype and not (is_kept or is_packed(param)):
            before[name] = param.data
            param.data = param.data.to(dtype)
    try:
        yield
    except BaseException:
        for name, param in model.named_parameters():
            if name in before:
                param.data = before[name]
        raise
    shards = dict(model.named_parameters())
    with torch.no_grad():
        for name in list(before):
            values = before.pop(name)
            if not values.is_meta:
                shards[name].copy_(values)
