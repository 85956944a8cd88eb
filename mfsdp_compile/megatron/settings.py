"""Megatron's settings for sharded data parallelism, under Megatron's names, and what each of them does here.

Programs with Megatron's own configuration objects pass those; they are read by attribute. The classes here are for
programs without Megatron, and define which attributes are read. Every field says what it does here
(``docs/megatron.md`` is generated from that), and has a :class:`Treatment`. Defaults are Megatron's, except for settings
that Megatron-FSDP always overrides: those default to the value that it sets.

Megatron's classes have hundreds of other settings, about the model and the training loop. The classes here take those
too and keep them as attributes, for the program: see :attr:`Section.others`.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

import torch

from mfsdp_compile.runtime.nearest import did_you_mean

__all__ = [
    "CheckpointConfig",
    "DistributedDataParallelConfig",
    "DistributedInitConfig",
    "Flag",
    "GPTModelProvider",
    "OptimizerConfig",
    "SchedulerConfig",
    "Section",
    "Setting",
    "TrainingConfig",
    "TransformerConfig",
    "Treatment",
    "known",
    "setting_of",
]


class Treatment(Enum):
    """How a setting is treated."""

    USED = "used"
    IDLE = "accepted, and has no effect: there is nothing here that it would change; said once if it is set"
    REFUSED = "raises if it is set"


@dataclass(frozen=True)
class Flag:
    """A flag of Megatron-LM's command line.

    Args:
        name: Name of the flag.
        dest: Attribute of the parsed arguments.
        type: Type of its value. None for switches.
        choices: Allowed values.
        nargs: Number of values, as for ``argparse``. None: one.
        opposite: Whether the setting is the negation of the parsed value.
        absent: Value of the setting without the flag. None: the field's default.
    """

    name: str
    dest: str
    type: type | None = None
    choices: tuple[str, ...] | None = None
    nargs: str | None = None
    opposite: bool = False
    absent: Any = None


@dataclass(frozen=True)
class Setting:
    """What a field means.

    Args:
        here: What it does here.
        kind: How it is treated.
        flag: The flag that sets it.
    """

    here: str
    kind: Treatment = Treatment.USED
    flag: Flag | None = None


def setting_of(of: Field[Any]) -> Setting:
    """Return the setting of a field of the classes here."""
    setting: Setting = of.metadata["setting"]
    return setting


def known(section: type) -> dict[str, Field[Any]]:
    """Return the settings of one of the classes here, by name."""
    return {of.name: of for of in fields(section)}


def _said(
    here: str, flag: str | None = None, *, kind: Treatment = Treatment.USED, dest: str | None = None, **how: Any
) -> dict[str, Setting]:
    of_flag = None
    if flag is not None:
        of_flag = Flag(flag, dest or flag.removeprefix("--").replace("-", "_"), **how)
    return {"setting": Setting(here, kind, of_flag)}


_OPTIONS_OF_GROUPS = (
    "no group is created from it here. Groups that Megatron has created with it (pg_collection) keep their options; for others, give "
    "fully_shard_model's communication"
)
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_DTYPES = ("fp32", "bf16", "fp16", "auto")


class Section:
    """Base class of the configurations here.

    Args:
        given: Settings by name. All but the class's own fields are settings of the program, if the class takes such.

    Raises:
        TypeError: If there is no such setting, or the name of a program's setting is almost that of a field here.
    """

    takes_others: ClassVar[bool] = True
    """Whether there may be settings that only the program reads."""

    def __init__(self, **given: Any) -> None:
        own = {of.name: of for of in fields(self)}  # type: ignore[arg-type]
        for name in given.keys() - own.keys():
            meant = did_you_mean(name, own, cutoff=0.9)
            if meant or not self.takes_others:
                hint = meant or " docs/megatron.md has a table of all of them."
                raise TypeError(f"{type(self).__name__} has no setting {name!r}.{hint}")
        for name, of in own.items():
            setattr(self, name, given.pop(name, of.default))
        vars(self).update(given)

    @property
    def others(self) -> dict[str, Any]:
        """Settings that only the program reads, by name."""
        own = {of.name for of in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in vars(self).items() if name not in own}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


_as_section = dataclass(init=False, eq=False, repr=False)


@_as_section
class DistributedInitConfig(Section):
    """``dist``: the kind of data parallelism, and the order of ranks."""

    takes_others = False

    use_megatron_fsdp: bool = field(
        default=False,
        metadata=_said("shard with this engine; the other of dist and ddp must say the same", "--use-megatron-fsdp"),
    )
    use_torch_fsdp2: bool = field(
        default=False,
        metadata=_said(
            "refused beside use_megatron_fsdp; alone, it asks for torch's fully_shard, and nothing here concerns it",
            "--use-torch-fsdp2",
        ),
    )
    use_tp_pp_dp_mapping: bool = field(
        default=False,
        metadata=_said("refused: ranks are numbered in the order tp, cp, ep, dp, pp", "--use-tp-pp-dp-mapping"),
    )
    nccl_communicator_config_path: str | None = field(
        default=None,
        metadata=_said(_OPTIONS_OF_GROUPS, "--nccl-communicator-config-path", type=str, kind=Treatment.IDLE),
    )
    high_priority_stream_groups: list[str] | None = field(
        default=None,
        metadata=_said(_OPTIONS_OF_GROUPS, "--high-priority-stream-groups", type=str, nargs="*", kind=Treatment.IDLE),
    )
    use_sharp: bool = field(default=False, metadata=_said(_OPTIONS_OF_GROUPS, "--use-sharp", kind=Treatment.IDLE))
    sharp_enabled_group: str | None = field(
        default=None,
        metadata=_said(
            _OPTIONS_OF_GROUPS,
            "--sharp-enabled-group",
            type=str,
            choices=("dp", "dp_replica"),
            kind=Treatment.IDLE,
        ),
    )


@_as_section
class TransformerConfig(Section):
    """``model``: Megatron's model configuration.

    Fields concern sharding. Sizes (``num_layers``, ``hidden_size``, ...) are for the function that builds the model.
    """

    calculate_per_token_loss: bool = field(
        default=False,
        metadata=_said(
            "gradients are sums over ranks; divide them with model.scale_gradients(1 / tokens)",
            "--calculate-per-token-loss",
        ),
    )
    init_model_with_meta_device: bool = field(
        default=False,
        metadata=_said(
            "parameters on the meta device get values as they are sharded, a module at a time; on by itself for a model that has such",
            "--init-model-with-meta-device",
        ),
    )
    gradient_accumulation_fusion: bool = field(
        default=False,
        metadata=_said(
            "set to False; nothing is lost, as compiled matmuls write gradients straight into the buffer that is reduced. A model "
            "whose modules were built with it is refused",
            "--no-gradient-accumulation-fusion",
            dest="gradient_accumulation_fusion",
        ),
    )
    cuda_graph_impl: str = field(
        default="none",
        metadata=_said(
            "full_iteration sets ddp.megatron_fsdp_cuda_graph_mode, for capture_step; refused: local and transformer_engine, "
            "whose graphs of single layers hold no collectives",
            "--cuda-graph-impl",
            type=str,
            choices=("none", "local", "transformer_engine", "full_iteration"),
        ),
    )
    cuda_graph_scope: str | list[str] | None = field(
        default=None,
        metadata=_said(
            "full_iteration, with cuda_graph_impl=local, is the older name of cuda_graph_impl=full_iteration",
            "--cuda-graph-scope",
            type=str,
        ),
    )
    enable_cuda_graph: bool = field(
        default=False,
        metadata=_said(
            "it captures single layers; set cuda_graph_impl='full_iteration'",
            "--enable-cuda-graph",
            kind=Treatment.REFUSED,
        ),
    )
    external_cuda_graph: bool = field(
        default=False,
        metadata=_said(
            "it captures single layers; set cuda_graph_impl='full_iteration'",
            "--external-cuda-graph",
            kind=Treatment.REFUSED,
        ),
    )
    tensor_model_parallel_size: int = field(
        default=1,
        metadata=_said(
            "ranks that divide parameters as Megatron marks them: neighbors, unless pg_collection or device_mesh says"
        ),
    )
    pipeline_model_parallel_size: int = field(
        default=1,
        metadata=_said(
            "number of stages, one model each; stages are the outermost dimension of ranks, unless pg_collection or device_mesh says"
        ),
    )
    context_parallel_size: int = field(
        default=1,
        metadata=_said(
            "ranks that divide sequences; they are data-parallel ranks to this engine, and shard parameters too"
        ),
    )
    expert_model_parallel_size: int = field(
        default=1,
        metadata=_said(
            "ranks that divide experts, data-parallel and tensor-parallel ones: neighbors, unless pg_collection or "
            "expt_device_mesh says; with tensor_model_parallel_size above 1, expert_tensor_parallel_size must be 1"
        ),
    )
    expert_tensor_parallel_size: int | None = field(
        default=None,
        metadata=_said(
            "refused above 1 beside expert_model_parallel_size above 1; None stands for tensor_model_parallel_size"
        ),
    )


@_as_section
class GPTModelProvider(TransformerConfig):
    """``model``: Megatron-Bridge's configuration of a GPT. The program builds the model."""


@_as_section
class DistributedDataParallelConfig(Section):
    """``ddp``: how parameters, gradients and optimizer state are sharded, communicated and stored."""

    takes_others = False

    use_megatron_fsdp: bool = field(
        default=False,
        metadata=_said("shard with this engine; the other of dist and ddp must say the same", "--use-megatron-fsdp"),
    )
    data_parallel_sharding_strategy: str = field(
        default="optim_grads_params",
        metadata=_said(
            "zero_dp_strategy. Megatron's default is no_shard, with which nothing is sharded",
            "--data-parallel-sharding-strategy",
            type=str,
            choices=_STRATEGIES,
        ),
    )
    num_distributed_optimizer_instances: int = field(
        default=1,
        metadata=_said(
            "more than 1: hybrid sharding, over data-parallel ranks divided by this; each part of the ranks holds everything",
            "--num-distributed-optimizer-instances",
            type=int,
        ),
    )
    outer_dp_sharding_strategy: str = field(
        default="no_shard",
        metadata=_said(
            "optim: these parts of the ranks divide the optimizer's state among them (HFSDP); needs optim_grads_params, and "
            "num_distributed_optimizer_instances above 1",
            "--outer-dp-sharding-strategy",
            type=str,
            choices=_STRATEGIES[:2],
        ),
    )
    use_distributed_optimizer: bool = field(
        default=True,
        metadata=_said("set to True: optimizer state is sharded as the strategy says", "--use-distributed-optimizer"),
    )
    grad_reduce_in_fp32: bool = field(
        default=False,
        metadata=_said(
            "gradients are summed and reduced in float32; on the command line, unless the flag is given",
            "--grad-reduce-in-bf16",
            opposite=True,
            absent=True,
        ),
    )
    preserve_fp32_weights: bool = field(
        default=True, metadata=_said("False: no float32 copy, parameters are stored as the model computes with them")
    )
    megatron_fsdp_main_params_dtype: torch.dtype | str | None = field(
        default=torch.float32,
        metadata=_said(
            "main_params_dtype; None or auto: the model's",
            "--megatron-fsdp-main-params-dtype",
            type=str,
            choices=_DTYPES,
        ),
    )
    megatron_fsdp_main_grads_dtype: torch.dtype | str | None = field(
        default=None,
        metadata=_said(
            "main_grads_dtype; None or auto: that of main parameters",
            "--megatron-fsdp-main-grads-dtype",
            type=str,
            choices=_DTYPES,
        ),
    )
    megatron_fsdp_grad_comm_dtype: torch.dtype | str | None = field(
        default=None,
        metadata=_said(
            "grad_comm_dtype; None or auto: main_grads_dtype if given, else the model's",
            "--megatron-fsdp-grad-comm-dtype",
            type=str,
            choices=_DTYPES,
        ),
    )
    megatron_fsdp_use_decoupled_grad: bool = field(
        default=False, metadata=_said("gradients are in parameter.decoupled_grad, for Transformer Engine's FusedAdam")
    )
    overlap_grad_reduce: bool = field(
        default=True,
        metadata=_said(
            "reductions run while backward computes; set to True for optim_grads and optim_grads_params",
            "--overlap-grad-reduce",
        ),
    )
    overlap_param_gather: bool = field(
        default=True,
        metadata=_said(
            "gathers run while the unit before computes; set to True for optim_grads_params", "--overlap-param-gather"
        ),
    )
    average_in_collective: bool = field(
        default=False,
        metadata=_said("set to False: gradients are summed, and the sum is scaled", "--ddp-average-in-collective"),
    )
    gradient_reduce_div_fusion: bool = field(
        default=True,
        metadata=_said(
            "gradients are scaled after the reduction, in the graph where the model is compiled",
            "--no-gradient-reduce-div-fusion",
            dest="gradient_reduce_div_fusion",
            kind=Treatment.IDLE,
        ),
    )
    check_for_nan_in_grad: bool = field(
        default=False,
        metadata=_said(
            "look for NaN in gradients before they are reduced, and raise on all ranks, naming rank, unit and parameter; on the "
            "command line, unless the flag is given",
            "--no-check-for-nan-in-loss-and-grad",
            dest="check_for_nan_in_loss_and_grad",
            absent=True,
        ),
    )
    bucket_size: int | None = field(
        default=None,
        metadata=_said(
            "parameters of a unit are one bucket, and so are those outside of units, which it divides in Megatron-FSDP; bucket_bytes "
            "parts large ones",
            "--ddp-bucket-size",
            type=int,
            kind=Treatment.IDLE,
        ),
    )
    suggested_communication_unit_size: int | None = field(
        default=None,
        metadata=_said(
            "give fully_shard_model's unit_bytes or bucket_bytes for the size of messages, and the compile option prefetch_bytes for "
            "how much is gathered ahead",
            "--suggested-communication-unit-size",
            type=int,
            kind=Treatment.REFUSED,
        ),
    )
    fsdp_double_buffer: bool = field(
        default=False,
        metadata=_said(
            "fully_shard_model's argument; set to True if nccl_ub or megatron_fsdp_max_pool_double_buffer is",
            "--fsdp-double-buffer",
        ),
    )
    megatron_fsdp_max_pool_double_buffer: bool = field(
        default=False,
        metadata=_said(
            "fully_shard_model's argument maxpool_double_buffer; sets fsdp_double_buffer",
            "--megatron-fsdp-max-pool-double-buffer",
        ),
    )
    fsdp_db_use_persist_buf_on_alloc_fail: bool = field(
        default=False, metadata=_said("fully_shard_model's argument", "--fsdp-db-use-persist-buf-on-alloc-fail")
    )
    nccl_ub: bool = field(
        default=False,
        metadata=_said("fully_shard_model's argument; sets fsdp_double_buffer", "--use-nccl-ub", dest="nccl_ub"),
    )
    disable_symmetric_registration: bool = field(
        default=False, metadata=_said("fully_shard_model's argument", "--disable-symmetric-registration")
    )
    fsdp_manual_registration: bool = field(
        default=False,
        metadata=_said(
            "fully_shard_model's argument; call model.manual_buffer_registration()", "--fsdp-manual-registration"
        ),
    )
    keep_fp8_transpose_cache: bool = field(
        default=False,
        metadata=_said("fully_shard_model's argument; it warns if no weights are in fp8", "--keep-fp8-transpose-cache"),
    )
    fp8_param_gather: bool = field(
        default=False,
        metadata=_said(
            "weights that Transformer Engine has quantized (quantized_model_init) are gathered in fp8 wherever its layers "
            "can use what was gathered, and in no other case",
            "--fp8-param-gather",
            kind=Treatment.IDLE,
        ),
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = field(
        default=False,
        metadata=_said(
            "set to False: no buffer of gradients is there to gather parameters into",
            "--reuse-grad-buf-for-mxfp8-param-ag",
        ),
    )
    megatron_fsdp_cuda_graph_mode: bool = field(
        default=False, metadata=_said("fully_shard_model's argument cuda_graph_mode")
    )
    megatron_fsdp_enable_fine_grained_param_gather: bool = field(
        default=False,
        metadata=_said(
            "fully_shard_model's argument enable_fine_grained_param_gather",
            "--megatron-fsdp-enable-fine-grained-param-gather",
        ),
    )
    fsdp_all_gather_in_start_param_sync: bool = field(
        default=True,
        metadata=_said(
            "start_param_sync gathers what the strategy keeps gathered, and nothing else", kind=Treatment.IDLE
        ),
    )
    align_param_gather: bool = field(
        default=False, metadata=_said("each pipeline stage gathers when it needs to", kind=Treatment.IDLE)
    )
    megatron_fsdp_version: int = field(
        default=1, metadata=_said("there is one engine here", "--megatron-fsdp-version", type=int, kind=Treatment.IDLE)
    )
    use_custom_fsdp: bool = field(
        default=False, metadata=_said("the older name of use_megatron_fsdp, which is what is read", kind=Treatment.IDLE)
    )


@_as_section
class OptimizerConfig(Section):
    """``optimizer``: Megatron's optimizer configuration.

    Fields concern sharding. The rest (``lr``, ``weight_decay``, ``clip_grad``, ...) is for the function that builds the
    optimizer, and for the training loop.
    """

    use_distributed_optimizer: bool = field(
        default=True, metadata=_said("set to True, as in ddp", "--use-distributed-optimizer")
    )
    use_precision_aware_optimizer: bool = field(
        default=False, metadata=_said("sets ddp.megatron_fsdp_use_decoupled_grad", "--use-precision-aware-optimizer")
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = field(
        default=False,
        metadata=_said(
            "set to False: no buffer of gradients is there to gather parameters into",
            "--reuse-grad-buf-for-mxfp8-param-ag",
        ),
    )


@_as_section
class CheckpointConfig(Section):
    """``checkpoint``: location and format of checkpoints. It is checked here, and used by the program."""

    save: str | None = field(default=None, metadata=_said("checkpoints are saved there", "--save", type=str))
    load: str | None = field(default=None, metadata=_said("a checkpoint is loaded from there", "--load", type=str))
    save_interval: int | None = field(
        default=None,
        metadata=_said("how often: for the program, nothing here looks at it", "--save-interval", type=int),
    )
    ckpt_format: str | None = field(
        default=None,
        metadata=_said(
            "must be fsdp_dtensor: what torch.distributed.checkpoint makes of sharded state dicts; may be left out where nothing is "
            "saved or loaded. None stands for Megatron's default, torch_dist",
            "--ckpt-format",
            type=str,
        ),
    )
    dump_param_to_param_group_map: str | None = field(
        default=None,
        metadata=_said(
            "folder for the map from parameters to the optimizer's groups, which conversion takes: DistributedOptimizer's argument",
            "--dump-param-to-param-group-map",
            type=str,
        ),
    )


@_as_section
class SchedulerConfig(Section):
    """``scheduler``: learning rates over the training run (``lr_decay_style``, ``lr_warmup_iters``, ...), for the program."""


@_as_section
class TrainingConfig(Section):
    """``train``: batches and iterations (``micro_batch_size``, ``global_batch_size``, ...), for the program."""
