"""Megatron's settings for sharded data parallelism, under Megatron's names, and what each of them does here.

Programs with Megatron's own configuration objects pass those; they are read by attribute. The classes here are for
programs without Megatron, and define which attributes are read. Every field says what it does here
(``docs/megatron.md`` is generated from that), and has a :class:`Treatment`. Defaults are Megatron's, except for
settings that Megatron-FSDP always overrides: those default to the value that it sets.

Megatron's classes have hundreds of other settings, about the model and the training loop. The classes here take those
too and keep them as attributes, for the program: see :attr:`Section.others`.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar

import torch

from mfsdp_compile.runtime.nearest import did_you_mean


class Treatment(Enum):
    """How a setting is treated."""

    USED = "used"
    IDLE = "accepted, and has no effect: there is nothing here that it would change; said once if it is set"
    REFUSED = "raises if it is set"


USED, IDLE, REFUSED = Treatment


@dataclass(frozen=True)
class Setting:
    """What a field means, and the flag of Megatron-LM's command line that sets it.

    Args:
        meaning: What it does here.
        kind: How it is treated.
        flag: Name of its flag. None: it has none. Empty: that of the field, with hyphens.
        dest: Attribute of the parsed arguments. Empty: as ``argparse`` makes it from ``flag`` without ``--no-``.
        choices: Allowed values of the flag.
        opposite: Whether the setting is the negation of the parsed value.
        absent: Value of the setting without the flag. None: the field's default.
        type: Type of the flag's value. None for switches.
        nargs: Number of values, as for ``argparse``. None: one.
    """

    meaning: str
    kind: Treatment = USED
    flag: str | None = ""
    dest: str = ""
    choices: tuple[str, ...] | None = None
    opposite: bool = False
    absent: Any = None
    type: type | None = None
    nargs: str | None = None


def setting(default: Any, meaning: str, **how: Any) -> Any:
    """Return the field of a :class:`Setting`, which :func:`setting_of` completes by the field's name and type."""
    return field(default=default, metadata={"setting": Setting(meaning, **how)})


def setting_of(each: Field[Any]) -> Setting:
    """Return the setting of a field of the classes here."""
    given: Setting = each.metadata["setting"]
    if given.flag is None:
        return given
    flag, annotation = given.flag or "--" + each.name.replace("_", "-"), str(each.type)
    return replace(
        given,
        flag=flag,
        dest=given.dest or flag.removeprefix("--").removeprefix("no-").replace("-", "_"),
        type=None if annotation == "bool" else int if annotation.startswith("int") else str,
        nargs="*" if annotation.startswith("list") else None,
    )


def known(section: type) -> dict[str, Field[Any]]:
    """Return the settings of one of the classes here, by name."""
    return {each.name: each for each in fields(section)}


_OPTIONS_OF_GROUPS = (
    "no group is created from it here. Groups that Megatron has created with it (pg_collection) keep their options; "
    "for others, give fully_shard_model's communication"
)
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_DTYPES = ("fp32", "bf16", "fp16", "auto")


class Values:
    """Base class of objects that are equal if their attributes are, and that show all of them."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Section(Values):
    """Base class of the configurations here.

    Args:
        given: Settings by name. All but the class's own fields are settings of the program, if the class takes such.

    Raises:
        TypeError: If there is no such setting, or the name of a program's setting is almost that of a field here.
    """

    takes_others: ClassVar[bool] = True
    """Whether there may be settings that only the program reads."""

    def __init__(self, **given: Any) -> None:
        own = {each.name: each for each in fields(self)}  # type: ignore[arg-type]
        for name in given.keys() - own.keys():
            meant = did_you_mean(name, own, cutoff=0.9)
            if meant or not self.takes_others:
                hint = meant or " docs/megatron.md has a table of all of them."
                raise TypeError(f"{type(self).__name__} has no setting {name!r}.{hint}")
        for name, each in own.items():
            setattr(self, name, given.pop(name, each.default))
        vars(self).update(given)

    @property
    def others(self) -> dict[str, Any]:
        """Settings that only the program reads, by name."""
        own = {each.name for each in fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in vars(self).items() if name not in own}


_as_section = dataclass(init=False, eq=False, repr=False)


@_as_section
class DistributedInitConfig(Section):
    """``dist``: the kind of data parallelism, and the order of ranks."""

    takes_others = False

    use_megatron_fsdp: bool = setting(False, "shard with this engine; the other of dist and ddp must say the same")
    use_torch_fsdp2: bool = setting(
        False, "refused beside use_megatron_fsdp; alone, it asks for torch's fully_shard, and nothing here concerns it"
    )
    use_tp_pp_dp_mapping: bool = setting(False, "refused: ranks are numbered in the order tp, cp, ep, dp, pp")
    nccl_communicator_config_path: str | None = setting(None, _OPTIONS_OF_GROUPS, kind=IDLE)
    high_priority_stream_groups: list[str] | None = setting(None, _OPTIONS_OF_GROUPS, kind=IDLE)
    use_sharp: bool = setting(False, _OPTIONS_OF_GROUPS, kind=IDLE)
    sharp_enabled_group: str | None = setting(None, _OPTIONS_OF_GROUPS, kind=IDLE, choices=("dp", "dp_replica"))


@_as_section
class TransformerConfig(Section):
    """``model``: Megatron's model configuration.

    Fields concern sharding. Sizes (``num_layers``, ``hidden_size``, ...) are for the function that builds the model.
    """

    calculate_per_token_loss: bool = setting(
        False, "gradients are sums over ranks; divide them with model.scale_gradients(1 / tokens)"
    )
    init_model_with_meta_device: bool = setting(
        False,
        "parameters on the meta device get values as they are sharded, a module at a time; on by itself for a model "
        "that has such",
    )
    gradient_accumulation_fusion: bool = setting(
        False,
        "set to False; nothing is lost, as compiled matmuls write gradients straight into the buffer that is reduced."
        " A model whose modules were built with it is refused",
        flag="--no-gradient-accumulation-fusion",
    )
    cuda_graph_impl: str = setting(
        "none",
        "full_iteration sets ddp.megatron_fsdp_cuda_graph_mode, for capture_step; refused: local and "
        "transformer_engine, whose graphs of single layers hold no collectives",
        choices=("none", "local", "transformer_engine", "full_iteration"),
    )
    cuda_graph_scope: str | list[str] | None = setting(
        None, "full_iteration, with cuda_graph_impl=local, is the older name of cuda_graph_impl=full_iteration"
    )
    enable_cuda_graph: bool = setting(
        False, "it captures single layers; set cuda_graph_impl='full_iteration'", kind=REFUSED
    )
    external_cuda_graph: bool = setting(
        False, "it captures single layers; set cuda_graph_impl='full_iteration'", kind=REFUSED
    )
    tensor_model_parallel_size: int = setting(
        1,
        "ranks that divide parameters as Megatron marks them: neighbors, unless pg_collection or device_mesh says",
        flag=None,
    )
    pipeline_model_parallel_size: int = setting(
        1,
        "number of stages, one model each; stages are the outermost dimension of ranks, unless pg_collection or "
        "device_mesh says",
        flag=None,
    )
    context_parallel_size: int = setting(
        1,
        "ranks that divide sequences; they are data-parallel ranks to this engine, and shard parameters too",
        flag=None,
    )
    expert_model_parallel_size: int = setting(
        1,
        "ranks that divide experts, data-parallel and tensor-parallel ones: neighbors, unless pg_collection or "
        "expt_device_mesh says; with tensor_model_parallel_size above 1, expert_tensor_parallel_size must be 1",
        flag=None,
    )
    expert_tensor_parallel_size: int | None = setting(
        None,
        "refused above 1 beside expert_model_parallel_size above 1; None stands for tensor_model_parallel_size",
        flag=None,
    )


@_as_section
class GPTModelProvider(TransformerConfig):
    """``model``: Megatron-Bridge's configuration of a GPT. The program builds the model."""


@_as_section
class DistributedDataParallelConfig(Section):
    """``ddp``: how parameters, gradients and optimizer state are sharded, communicated and stored."""

    takes_others = False

    use_megatron_fsdp: bool = setting(False, "shard with this engine; the other of dist and ddp must say the same")
    data_parallel_sharding_strategy: str = setting(
        "optim_grads_params",
        "zero_dp_strategy. Megatron's default is no_shard, with which nothing is sharded",
        choices=_STRATEGIES,
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        "more than 1: hybrid sharding, over data-parallel ranks divided by this; each part of the ranks holds "
        "everything",
    )
    outer_dp_sharding_strategy: str = setting(
        "no_shard",
        "optim: these parts of the ranks divide the optimizer's state among them (HFSDP); needs optim_grads_params, "
        "and num_distributed_optimizer_instances above 1",
        choices=_STRATEGIES[:2],
    )
    use_distributed_optimizer: bool = setting(True, "set to True: optimizer state is sharded as the strategy says")
    grad_reduce_in_fp32: bool = setting(
        False,
        "gradients are summed and reduced in float32; on the command line, unless the flag is given",
        flag="--grad-reduce-in-bf16",
        opposite=True,
        absent=True,
    )
    preserve_fp32_weights: bool = setting(
        True, "False: no float32 copy, parameters are stored as the model computes with them", flag=None
    )
    megatron_fsdp_main_params_dtype: torch.dtype | str | None = setting(
        torch.float32, "main_params_dtype; None or auto: the model's", choices=_DTYPES
    )
    megatron_fsdp_main_grads_dtype: torch.dtype | str | None = setting(
        None, "main_grads_dtype; None or auto: that of main parameters", choices=_DTYPES
    )
    megatron_fsdp_grad_comm_dtype: torch.dtype | str | None = setting(
        None, "grad_comm_dtype; None or auto: main_grads_dtype if given, else the model's", choices=_DTYPES
    )
    reduce_scatter_with_fp32_accumulation: bool = setting(
        False,
        "grad_sum_dtype=torch.float32: gradients are sent in grad_comm_dtype, and summed in float32, in the order of "
        "ranks",
        flag="--ddp-reduce-scatter-with-fp32-accumulation",
    )
    megatron_fsdp_use_decoupled_grad: bool = setting(
        False, "gradients are in parameter.decoupled_grad, for Transformer Engine's FusedAdam", flag=None
    )
    overlap_grad_reduce: bool = setting(
        True, "reductions run while backward computes; set to True for optim_grads and optim_grads_params"
    )
    overlap_param_gather: bool = setting(
        True, "gathers run while the unit before computes; set to True for optim_grads_params"
    )
    average_in_collective: bool = setting(
        False, "set to False: gradients are summed, and the sum is scaled", flag="--ddp-average-in-collective"
    )
    gradient_reduce_div_fusion: bool = setting(
        True,
        "gradients are scaled after the reduction, in the graph where the model is compiled",
        flag="--no-gradient-reduce-div-fusion",
        kind=IDLE,
    )
    check_for_nan_in_grad: bool = setting(
        False,
        "look for NaN in gradients before they are reduced, and raise on all ranks, naming rank, unit and parameter; "
        "on the command line, unless the flag is given",
        flag="--no-check-for-nan-in-loss-and-grad",
        absent=True,
    )
    bucket_size: int | None = setting(
        None,
        "parameters of a unit are one bucket, and so are those outside of units, which it divides in Megatron-FSDP; "
        "bucket_bytes parts large ones",
        flag="--ddp-bucket-size",
        kind=IDLE,
    )
    suggested_communication_unit_size: int | None = setting(
        None,
        "give fully_shard_model's unit_bytes or bucket_bytes for the size of messages, and the compile option "
        "prefetch_bytes for how much is gathered ahead",
        kind=REFUSED,
    )
    fsdp_double_buffer: bool = setting(
        False, "fully_shard_model's argument; set to True if nccl_ub or megatron_fsdp_max_pool_double_buffer is"
    )
    megatron_fsdp_max_pool_double_buffer: bool = setting(
        False, "fully_shard_model's argument maxpool_double_buffer; sets fsdp_double_buffer"
    )
    fsdp_db_use_persist_buf_on_alloc_fail: bool = setting(False, "fully_shard_model's argument")
    nccl_ub: bool = setting(
        False, "fully_shard_model's argument; sets fsdp_double_buffer", flag="--use-nccl-ub", dest="nccl_ub"
    )
    disable_symmetric_registration: bool = setting(False, "fully_shard_model's argument")
    fsdp_manual_registration: bool = setting(
        False, "fully_shard_model's argument; call model.manual_buffer_registration()"
    )
    keep_fp8_transpose_cache: bool = setting(False, "fully_shard_model's argument; it warns if no weights are in fp8")
    fp8_param_gather: bool = setting(
        False,
        "weights that Transformer Engine has quantized (quantized_model_init) are gathered in fp8 wherever its layers"
        " can use what was gathered, and in no other case",
        kind=IDLE,
    )
    reuse_grad_buf_for_mxfp8_param_ag: bool = setting(
        False, "set to False: no buffer of gradients is there to gather parameters into"
    )
    megatron_fsdp_cuda_graph_mode: bool = setting(False, "fully_shard_model's argument cuda_graph_mode", flag=None)
    megatron_fsdp_enable_fine_grained_param_gather: bool = setting(
        False, "fully_shard_model's argument enable_fine_grained_param_gather"
    )
    fsdp_all_gather_in_start_param_sync: bool = setting(
        True, "start_param_sync gathers what the strategy keeps gathered, and nothing else", flag=None, kind=IDLE
    )
    align_param_gather: bool = setting(False, "each pipeline stage gathers when it needs to", flag=None, kind=IDLE)
    megatron_fsdp_version: int = setting(1, "there is one engine here", kind=IDLE)
    use_custom_fsdp: bool = setting(
        False, "the older name of use_megatron_fsdp, which is what is read", flag=None, kind=IDLE
    )


@_as_section
class OptimizerConfig(Section):
    """``optimizer``: Megatron's optimizer configuration.

    Fields concern sharding. The rest (``lr``, ``weight_decay``, ``clip_grad``, ...) is for the function that builds the
    optimizer, and for the training loop.
    """

    use_distributed_optimizer: bool = setting(True, "set to True, as in ddp")
    use_precision_aware_optimizer: bool = setting(False, "sets ddp.megatron_fsdp_use_decoupled_grad")
    reuse_grad_buf_for_mxfp8_param_ag: bool = setting(
        False, "set to False: no buffer of gradients is there to gather parameters into"
    )


@_as_section
class CheckpointConfig(Section):
    """``checkpoint``: location and format of checkpoints. It is checked here, and used by the program."""

    save: str | None = setting(None, "checkpoints are saved there")
    load: str | None = setting(None, "a checkpoint is loaded from there")
    save_interval: int | None = setting(None, "how often: for the program, nothing here looks at it")
    ckpt_format: str | None = setting(
        None,
        "must be fsdp_dtensor: what torch.distributed.checkpoint makes of sharded state dicts; may be left out where "
        "nothing is saved or loaded. None stands for Megatron's default, torch_dist",
    )
    dump_param_to_param_group_map: str | None = setting(
        None,
        "folder for the map from parameters to the optimizer's groups, which conversion takes: DistributedOptimizer's"
        " argument",
    )


@_as_section
class SchedulerConfig(Section):
    """``scheduler``: learning rates over the run (``lr_decay_style``, ``lr_warmup_iters``, ...), for the program."""


@_as_section
class TrainingConfig(Section):
    """``train``: batches and iterations (``micro_batch_size``, ``global_batch_size``, ...), for the program."""
