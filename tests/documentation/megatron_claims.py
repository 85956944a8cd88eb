"""What Megatron's documents say of its FSDP, and what holds here: the source of the table in docs/megatron.md.

The documents are the pages "Megatron FSDP" of Megatron Bridge (an older one, with examples, and a newer overview), the
README of megatron-fsdp, the "Megatron-FSDP User Guide" of Megatron-LM, and the page "Megatron FSDP" of Megatron Core.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ABSENT", "CLAIMS", "DOCUMENTS", "OTHER", "REFUSED", "VERDICTS", "WRITTEN", "Claim"]

BRIDGE, OVERVIEW = "Megatron Bridge", "Megatron Bridge, overview"
README, GUIDE, CORE = "megatron-fsdp README", "User Guide", "Megatron Core"
DOCUMENTS = (BRIDGE, README, GUIDE, OVERVIEW, CORE)

WRITTEN, OTHER, REFUSED, ABSENT = "works as written", "works, other name or form", "refused by name", "absent"
VERDICTS = (WRITTEN, OTHER, REFUSED, ABSENT)


class Claim(NamedTuple):
    """A row of the table.

    Args:
        document: One of :data:`DOCUMENTS`.
        words: The document's words, shortened.
        verdict: One of :data:`VERDICTS`.
        here: What holds here; required unless the verdict is :data:`WRITTEN`. With :data:`ABSENT`, why it cannot be.
        tests: Tests that show it, ``file::function``, separated by spaces. Empty with :data:`ABSENT`.
        names: What the row says exists, separated by commas: ``package.name``, ``package.function(argument)``,
            ``--flag``, or ``mfsdp command``.
    """

    document: str
    words: str
    verdict: str
    here: str
    tests: str
    names: str = ""


M = "mfsdp_compile.megatron"
F = "mfsdp_compile.fully_shard_model"
C = "mfsdp_compile.MegatronFSDP"

_T = "integrations/test_megatron.py::"
_P = "integrations/test_megatron_printed.py::"
_A = "integrations/test_megatron_face.py::"
_S = "runtime/test_strategies.py::"
_B = "programs/test_comm_buffers.py::"
_O = "runtime/test_optimizer.py::"
_K = "checkpoint/test_checkpoint.py::"
_V = "checkpoint/test_convert.py::"
_R = "checkpoint/test_megatron_core.py::"

_BRIDGE = [
    (
        "Sharding model parameters across data parallel ranks instead of replicating them",
        WRITTEN,
        "",
        f"{_A}test_the_class_used_directly",
        "",
    ),
    ("Sharding optimizer states across data parallel ranks", WRITTEN, "", f"{_S}test_table", ""),
    ("Sharding gradients across data parallel ranks", WRITTEN, "", f"{_S}test_table", ""),
    (
        "Gathering parameters on-demand during forward and backward passes",
        WRITTEN,
        "",
        f"{_S}test_communication_of_a_step",
        "",
    ),
    (
        "DDP: gradients all-reduced, parameters replicated",
        OTHER,
        "`no_shard`",
        f"{_S}test_communication_of_a_step",
        f"{F}(zero_dp_strategy)",
    ),
    (
        "Distributed Optimizer: reduce-scatter, all-gather after update",
        OTHER,
        "`optim`",
        f"{_S}test_communication_of_a_step",
        f"{F}(zero_dp_strategy)",
    ),
    (
        "`DistributedInitConfig(use_megatron_fsdp=True)`",
        WRITTEN,
        "",
        f"{_P}test_enable_megatron_fsdp",
        f"{M}.DistributedInitConfig",
    ),
    (
        "`DistributedDataParallelConfig(use_megatron_fsdp=True)`",
        WRITTEN,
        "",
        f"{_P}test_enable_megatron_fsdp",
        f"{M}.DistributedDataParallelConfig",
    ),
    ("set `use_megatron_fsdp=True` in both", WRITTEN, "one without the other is refused", f"{_T}test_errors", ""),
    (
        '`CheckpointConfig(ckpt_format="fsdp_dtensor", save=...)`',
        WRITTEN,
        "",
        f"{_P}test_enable_megatron_fsdp",
        f"{M}.CheckpointConfig",
    ),
    (
        "`CheckpointConfig(load=...)`: Optional: resume from checkpoint",
        WRITTEN,
        "the program loads, with `torch.distributed.checkpoint` or `mfsdp_compile.checkpoint`",
        f"{_P}test_enable_megatron_fsdp {_T}test_the_example_of_megatron_core",
        "mfsdp_compile.checkpoint.Checkpoints",
    ),
    (
        "`ConfigContainer(dist=..., ddp=..., checkpoint=...)`",
        WRITTEN,
        "",
        f"{_P}test_enable_megatron_fsdp",
        f"{M}.ConfigContainer(dist), {M}.ConfigContainer(ddp), {M}.ConfigContainer(checkpoint)",
    ),
    (
        "`# ... other config parameters`",
        WRITTEN,
        "other sections are the program's; `mixed_precision` and `comm_overlap`, which change sections above, are "
        "refused",
        f"{_P}test_sections_of_bridge",
        f"{M}.ConfigContainer.unread",
    ),
    (
        "`from megatron.bridge.training.config import ...`",
        OTHER,
        "`from mfsdp_compile.megatron import ...`; Megatron's own objects are taken too",
        f"{_P}test_enable_megatron_fsdp {_T}test_validation_takes_others_containers",
        f"{M}.validate",
    ),
    (
        "Megatron FSDP requires the `fsdp_dtensor` checkpoint format",
        WRITTEN,
        "also where nothing is saved or loaded, if another format is named",
        f"{_P}test_formats_are_checked_without_checkpoints",
        "",
    ),
    (
        "other checkpoint formats (`torch_dist`, `zarr`) will result in a configuration error",
        WRITTEN,
        "",
        f"{_T}test_errors {_P}test_formats_are_checked_without_checkpoints",
        "",
    ),
    (
        "Compatible with Tensor Parallelism",
        WRITTEN,
        "",
        "parallel/test_tensor_parallel.py::test_equals_one_process",
        "",
    ),
    ("Compatible with Pipeline Parallelism", WRITTEN, "", "parallel/test_pipeline.py::test_one_stage_per_rank", ""),
    (
        "Compatible with Context Parallelism",
        WRITTEN,
        "",
        "parallel/test_context_parallel.py::test_data_and_context",
        "",
    ),
    (
        "Compatible with Expert Parallelism",
        WRITTEN,
        "",
        "parallel/test_expert_parallel.py::test_gradients_of_one_process",
        "",
    ),
    (
        "Mixed Precision: Supports BF16 and FP16 training",
        WRITTEN,
        "",
        "runtime/test_precision.py::test_bfloat16_training_matches_one_process "
        "runtime/test_precision.py::test_float16_sums_do_not_overflow",
        "mfsdp_compile.MixedPrecisionPolicy",
    ),
    ("Distributed Checkpointing: Uses `fsdp_dtensor` format", WRITTEN, "", f"{_K}test_dcp_by_itself", ""),
    (
        "Not compatible with `use_tp_pp_dp_mapping`",
        WRITTEN,
        "refused",
        f"{_T}test_errors",
        f"{M}.DistributedInitConfig.use_tp_pp_dp_mapping",
    ),
    (
        "Not compatible with `reuse_grad_buf_for_mxfp8_param_ag`",
        WRITTEN,
        "set to False",
        f"{_T}test_adjustments",
        f"{M}.DistributedDataParallelConfig.reuse_grad_buf_for_mxfp8_param_ag",
    ),
    (
        "Legacy checkpoint formats: Must use `fsdp_dtensor` format",
        WRITTEN,
        "`mfsdp convert` makes it of `torch_dist`; not of optimizer states by buckets (`dp_reshardable`)",
        f"{_T}test_errors {_V}test_torch_dist_there_and_back {_R}test_a_round_trip"
        f" {_R}test_states_by_buckets {_R}test_what_conversion_makes_is_loaded_by_two_ranks",
        "mfsdp convert IN OUT",
    ),
    (
        "`ddp.average_in_collective` is set to `False`",
        WRITTEN,
        "",
        f"{_T}test_adjustments",
        f"{M}.DistributedDataParallelConfig.average_in_collective",
    ),
    (
        "`model.gradient_accumulation_fusion` is set to `False`",
        WRITTEN,
        "",
        f"{_T}test_adjustments",
        f"{M}.TransformerConfig.gradient_accumulation_fusion",
    ),
    ("`ddp.reuse_grad_buf_for_mxfp8_param_ag` is set to `False`", WRITTEN, "", f"{_T}test_adjustments", ""),
    (
        "`optimizer.reuse_grad_buf_for_mxfp8_param_ag` is set to `False`",
        WRITTEN,
        "",
        f"{_T}test_adjustments",
        f"{M}.OptimizerConfig.reuse_grad_buf_for_mxfp8_param_ag",
    ),
    ("Complete Configuration Example", WRITTEN, "", f"{_P}test_complete_configuration", ""),
    (
        "`GPTModelProvider(num_layers=32, hidden_size=4096, num_attention_heads=32, seq_length=2048)`",
        WRITTEN,
        "kept for the program that builds the model, and said in one line",
        f"{_P}test_complete_configuration",
        f"{M}.GPTModelProvider",
    ),
    (
        "`tensor_model_parallel_size=2`  # Optional: combine with TP",
        WRITTEN,
        "without a mesh: neighbors, in Megatron's order",
        f"{_P}test_tensor_parallel_ranks_without_a_mesh {_P}test_megatrons_order_of_ranks",
        f"{M}.TransformerConfig.tensor_model_parallel_size",
    ),
    (
        '`OptimizerConfig(optimizer="adam", lr=3e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, '
        "clip_grad=1.0)`",
        WRITTEN,
        "kept for the program that builds the optimizer, and said in one line",
        f"{_P}test_complete_configuration",
        f"{M}.OptimizerConfig",
    ),
    (
        '`SchedulerConfig(lr_decay_style="cosine", lr_warmup_iters=1000)`',
        WRITTEN,
        "kept for the program, and said in one line",
        f"{_P}test_complete_configuration",
        f"{M}.SchedulerConfig",
    ),
    (
        "`TrainingConfig(micro_batch_size=2, global_batch_size=32, train_iters=10000)`",
        WRITTEN,
        "kept for the program, and said in one line",
        f"{_P}test_complete_configuration",
        f"{M}.TrainingConfig",
    ),
    (
        "`CheckpointConfig(save_interval=1000)`",
        WRITTEN,
        "for the program",
        f"{_P}test_complete_configuration {_T}test_flags",
        f"{M}.CheckpointConfig.save_interval, --save-interval",
    ),
    (
        "Migration: `dist_config.use_megatron_fsdp = True`, `ddp_config.use_megatron_fsdp = True`",
        WRITTEN,
        "",
        f"{_P}test_migration_from_ddp",
        "",
    ),
    ('Migration: `checkpoint_config.ckpt_format = "fsdp_dtensor"`', WRITTEN, "", f"{_P}test_migration_from_ddp", ""),
    (
        "Migration: Remove `use_tp_pp_dp_mapping=True`, `reuse_grad_buf_for_mxfp8_param_ag=True` if set",
        WRITTEN,
        "the second one need not be removed",
        f"{_T}test_moving_from_ddp",
        "",
    ),
    (
        "automatic configuration adjustments will be applied",
        WRITTEN,
        "`validate()` returns and logs them",
        f"{_T}test_adjustments",
        f"{M}.Adjustment",
    ),
    (
        "Checkpoints saved with DDP cannot be directly loaded with FSDP; convert checkpoints using the appropriate "
        "conversion tools",
        WRITTEN,
        "plain DDP checkpoints can be loaded; `torch_dist` ones are converted",
        f"{_K}test_from_and_to_fsdp2_and_ddp {_V}test_torch_dist_there_and_back",
        "mfsdp convert IN OUT",
    ),
    (
        "`DistributedInitConfig(use_torch_fsdp2=True)`",
        OTHER,
        "left to torch; for FSDP2's interface on this engine, `mfsdp_compile.fsdp2.fully_shard`",
        f"{_P}test_migration_from_ddp {_T}test_fsdp2_alone_is_left_to_torch",
        "mfsdp_compile.fsdp2.fully_shard",
    ),
    ("`use_megatron_fsdp` and `use_torch_fsdp2` are mutually exclusive", WRITTEN, "", f"{_T}test_errors", ""),
    (
        "Torch FSDP2: Not currently compatible with Pipeline Parallelism; experimental",
        OTHER,
        "torch's; nothing here concerns it",
        f"{_T}test_fsdp2_alone_is_left_to_torch",
        "",
    ),
    (
        "Torch FSDP2: Does not require `fsdp_dtensor` checkpoint format",
        WRITTEN,
        "and `fsdp_dtensor` without Megatron FSDP is refused",
        f"{_T}test_fsdp2_alone_is_left_to_torch",
        "",
    ),
    (
        "Parameters, optimizer states, gradients: Reduced by factor of data parallel size",
        WRITTEN,
        "but for padding, which `explain` reports",
        "runtime/test_precision.py::test_memory_is_what_layouts_predict",
        "mfsdp_compile.explain",
    ),
    (
        "Activations: Not affected by FSDP (use activation checkpointing separately)",
        WRITTEN,
        "",
        "programs/test_models.py::test_checkpointed_blocks_gather_once_for_recompute_and_gradient",
        "",
    ),
    (
        "Additional communication during forward and backward passes",
        WRITTEN,
        "",
        f"{_S}test_communication_of_a_step",
        "",
    ),
    (
        "Performance depends on inter-GPU bandwidth",
        WRITTEN,
        "`mfsdp plan` predicts it",
        "planning/test_plan.py::test_portions_pay_where_nodes_are_slow_to_reach",
        "mfsdp plan --help",
    ),
    (
        "Enable Mixed Precision: Reduces communication volume",
        WRITTEN,
        "",
        "runtime/test_precision.py::test_policies",
        "",
    ),
    ('Error: "use_tp_pp_dp_mapping is not supported with Megatron FSDP"', WRITTEN, "", f"{_T}test_errors", ""),
    ('Error: "Megatron FSDP only supports fsdp_dtensor checkpoint format"', WRITTEN, "", f"{_T}test_errors", ""),
    (
        'Error: "Using use_megatron_fsdp and use_torch_fsdp2 at the same time is not supported"',
        WRITTEN,
        "",
        f"{_T}test_errors {_P}test_migration_from_ddp",
        "",
    ),
    (
        "Profile with `nsys` or PyTorch profiler",
        WRITTEN,
        "collectives carry names of units",
        "ranks/test_tracing.py::test_collectives_have_names",
        "",
    ),
    (
        "Verify FSDP is correctly enabled in both `dist` and `ddp` configs",
        WRITTEN,
        "a contradiction is refused",
        f"{_T}test_errors",
        "",
    ),
    (
        "Enable activation checkpointing for additional memory savings",
        WRITTEN,
        "",
        "programs/test_families.py::test_checkpointed_training_is_that_of_one_process",
        "",
    ),
]

_README = [
    (
        "up to 25% speed up and 23% memory savings compared to FSDP2",
        ABSENT,
        "no settings are given, so the figure cannot be repeated; what was measured here is in docs/performance.md",
        "",
        "",
    ),
    (
        "Compatibility: PyTorch DTensor",
        WRITTEN,
        "parameters, gradients and states are DTensors",
        "runtime/test_tensor.py::test_parameters_are_sharded_dtensors",
        "",
    ),
    (
        "Compatibility: Megatron Core",
        OTHER,
        "its configurations, process groups and marks are taken; its own checkpoints are converted",
        f"{_T}test_process_groups_of_megatron {_V}test_torch_dist_there_and_back",
        f"{M}.FullyShardedDataParallel",
    ),
    ("Compatibility: TransformerEngine", WRITTEN, "", "te/test_transformer_engine.py::test_sharded_equals_alone", ""),
    (
        "Works seamlessly with Huggingface Transformers",
        WRITTEN,
        "",
        "integrations/test_trainers.py::test_trainer_is_the_plain_loop",
        "mfsdp_compile.integrations.transformers.MfsdpTrainer",
    ),
    (
        "Supports single-node multi-GPU and multi-node distributed training",
        WRITTEN,
        "any process group of torch; tests run on one machine with gloo",
        f"{_S}test_strategies_agree_bitwise",
        "",
    ),
    (
        "Data-type aware bucketing system",
        WRITTEN,
        "",
        "runtime/test_precision.py::test_memory_is_what_layouts_predict",
        "",
    ),
    (
        "Zero copy communication ... with `ParamAndGradBuffer` class",
        OTHER,
        "flat buckets of this package; `model.param_and_grad_buffer` owns them",
        f"{_A}test_settings_of_a_sharded_model cuda_code/test_cuda_code.py::test_matrix_gradients_are_written_in_place",
        f"{C}.param_and_grad_buffer",
    ),
    (
        "Communication Overlapping",
        WRITTEN,
        "",
        "programs/test_served.py::test_collectives_overlap passes/test_passes.py::test_prefetch_distance",
        "",
    ),
    (
        "FP8 Mixed Precision with Transformer Engine",
        WRITTEN,
        "",
        "te/test_primary_weights.py::test_sharded_equals_alone",
        "",
    ),
    (
        "Gradient accumulate fusion support with Transformer Engine",
        WRITTEN,
        "layers with `fuse_wgrad_accumulation` write into the bucket",
        "te/test_transformer_engine.py::test_gradients_written_into_the_bucket",
        "",
    ),
    (
        "SHARP, In-Switch Processing, Hierarchical Collectives",
        OTHER,
        "NCCL's; `communication` asks for it by group. No switch has run it here",
        "runtime/test_communicators.py::test_each_communicator_gets_its_settings",
        f"{F}(communication)",
    ),
    (
        "Symmetric Optimizations for MNNVL (NCCL v2.27)",
        WRITTEN,
        "with `nccl_ub`; shown with a stand-in for NCCL",
        f"{_B}test_symmetric_memory",
        f"{F}(nccl_ub)",
    ),
    (
        "`pip install megatron-fsdp`",
        OTHER,
        "`pip install mfsdp-compile`",
        "package/test_installation.py::test_an_installation_runs_outside_of_a_checkout",
        "",
    ),
    (
        "`from megatron_fsdp import fully_shard_model, fully_shard_optimizer`",
        OTHER,
        "`from mfsdp_compile import ...`",
        f"{_P}test_the_walkthrough_of_the_readme",
        f"{F}, mfsdp_compile.fully_shard_optimizer",
    ),
    (
        '`fsdp_unit_modules=[YourModelLayerClass, "import.path.to.model.class.YourModelLayerClass"]`',
        WRITTEN,
        "",
        "runtime/test_units.py::test_every_way_of_naming_units",
        f"{F}(fsdp_unit_modules)",
    ),
    (
        "`fully_shard_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        "mfsdp_compile.fully_shard_optimizer(optimizer)",
    ),
    (
        "No need to call `fully_shard` on all the sub-modules",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        "",
    ),
    (
        "`fully_shard` is a one-line change for previously-initialized models and optimizers",
        WRITTEN,
        "groups and state are kept",
        f"{_O}test_fully_shard_keeps_groups_and_state",
        "mfsdp_compile.fully_shard(module), mfsdp_compile.fully_shard(optimizer)",
    ),
    (
        "compatible with `torch.compile`, but this feature is still experimental",
        WRITTEN,
        '`backend="mfsdp"`: one graph, the same numbers',
        f"{_S}test_compiled_equals_eager_bitwise",
        "mfsdp_compile.backend.compile.mfsdp",
    ),
    (
        "`init_device_mesh` with `dp_outer`, `dp_shard`, `cp`, `tp`, and `_flatten`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        f"{F}(device_mesh)",
    ),
    (
        "`DeviceMesh.from_group([expt_dp_group, expt_tp_group], ...)`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        f"{F}(expt_device_mesh)",
    ),
    (
        "`fully_shard_model(...)` with all arguments of the walkthrough",
        WRITTEN,
        "as printed, it lacks a comma",
        f"{_P}test_the_walkthrough_of_the_readme",
        "",
    ),
    (
        "`dp_shard_dim`: Always required for FSDP or HSDP",
        WRITTEN,
        "not needed if the mesh has one dimension",
        f"{_P}test_the_walkthrough_of_the_readme",
        f"{F}(dp_shard_dim)",
    ),
    (
        "`dp_outer_dim`: to use HSDP instead of FSDP. Otherwise, set this to None",
        WRITTEN,
        "a mesh with outer ranks that are left unnamed is refused, unless there is one",
        f"{_P}test_a_mesh_with_outer_ranks_that_are_not_named",
        f"{F}(dp_outer_dim)",
    ),
    (
        "`tp_dim`: Only required for TP-sensitive models or DTensor-based TP",
        WRITTEN,
        "not needed for DTensors",
        "parallel/test_tensor_parallel.py::test_marks_of_megatron",
        f"{F}(tp_dim)",
    ),
    (
        "`hybrid_fsdp_group`: Only required when using HSDP",
        WRITTEN,
        "",
        f"{_S}test_hybrid_group_must_fit_the_mesh",
        f"{F}(hybrid_fsdp_group)",
    ),
    (
        "`expt_device_mesh`: Only required for FSDP + EP",
        WRITTEN,
        "",
        "parallel/test_expert_parallel.py::test_gradients_of_one_process",
        f"{F}(expt_device_mesh)",
    ),
    (
        "expert `tp_dim` (ETP), `(FSDP, ETP)`-strided sharding",
        REFUSED,
        "experts are divided over expert-parallel ranks only; `expert_tensor_parallel_size=1`",
        f"{_T}test_process_groups_of_megatron",
        "",
    ),
    ("`zero_dp_strategy`: 0 to 3, or their names; default 3", WRITTEN, "", f"{_S}test_table", f"{F}(zero_dp_strategy)"),
    (
        "`outer_dp_sharding_strategy`: `no_shard` and `optim`; requires `optim_grads_params`",
        WRITTEN,
        "",
        f"{_S}test_table {_T}test_errors",
        f"{F}(outer_dp_sharding_strategy)",
    ),
    (
        "`init_model_with_meta_device`: shard and initialize layer-by-layer with `module.reset_parameters`",
        WRITTEN,
        "",
        "runtime/test_meta.py::test_values_are_those_of_one_process "
        "runtime/test_meta.py::test_one_module_is_whole_at_a_time",
        f"{F}(init_model_with_meta_device)",
    ),
    (
        "the `device` argument will be deactivated when `init_model_with_meta_device=True`",
        OTHER,
        "it still says where shards are",
        "runtime/test_meta.py::test_values_are_those_of_one_process",
        f"{F}(device)",
    ),
    (
        "`grad_reduce_in_fp32` will reduce gradients in FP32; defaults to `False`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme runtime/test_precision.py::test_policies",
        f"{F}(grad_reduce_in_fp32)",
    ),
    (
        "`preserve_fp32_weights` will preserve a FP32 version of model parameters; defaults to `True`",
        WRITTEN,
        "",
        f"{_T}test_fp32_weights",
        f"{F}(preserve_fp32_weights)",
    ),
    (
        "`torch.distributed.fsdp.MixedPrecisionPolicy` will be supported in the near future",
        WRITTEN,
        "`mixed_precision_policy` takes it",
        "runtime/test_param_dtype.py::test_the_context_of_several_policies",
        f"{F}(mixed_precision_policy)",
    ),
    (
        "`overlap_grad_reduce` and `overlap_param_gather`; both default to `True`",
        WRITTEN,
        "",
        f"{_T}test_flags",
        f"{F}(overlap_grad_reduce), {F}(overlap_param_gather)",
    ),
    (
        "`sync_model_each_microbatch` ... after every forward-backward pass",
        WRITTEN,
        "accumulation is right with every strategy",
        f"{_S}test_table",
        f"{F}(sync_model_each_microbatch)",
    ),
    (
        "`sync_model_each_microbatch`: `True` for `fully_shard`, `False` when using the `MegatronFSDP` class directly",
        WRITTEN,
        "",
        f"{_A}test_the_class_used_directly",
        f"{C}(sync_model_each_microbatch)",
    ),
    ("`finish_grad_sync()`", WRITTEN, "", f"{_S}test_gradients_that_wait_say_so", f"{C}.finish_grad_sync"),
    (
        "`is_last_microbatch` / `microbatch_count`",
        WRITTEN,
        "",
        f"{_S}test_table",
        f"{C}.is_last_microbatch, {C}.microbatch_count",
    ),
    (
        "`preproc_state_dict_for_dcp_ckpt`; defaults to `True`",
        WRITTEN,
        "for the optimizer; DTensors here need no preparation",
        f"{_K}test_dcp_by_itself {_K}test_optimizer_state_by_name",
        f"{F}(preproc_state_dict_for_dcp_ckpt), mfsdp_compile.fully_shard_optimizer(preproc_state_dict_for_dcp_ckpt)",
    ),
    (
        "adds `__create_write_items__` and `__create_chunk_list__` methods to Tensors",
        WRITTEN,
        "parameters have them; `uneven_dtensor` adds them to others",
        f"{_A}test_uneven_dtensors_of_programs",
        "mfsdp_compile.uneven_dtensor.preprocess_state_dict_for_uneven_dtensor",
    ),
    (
        "The original `torch.nn.Module` can be accessed at `MegatronFSDP.module`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        "",
    ),
    (
        "Initialize your optimizer on the distributed `Parameter`(s); or `optimizer.param_groups.clear()`, "
        "`add_param_group`",
        WRITTEN,
        "",
        f"{_O}test_optimizer_state_dict_round_trip",
        "",
    ),
    (
        "`optimizer.step(sync_grad_before_optimizer_step=True, install_optimized_model_weights=True)`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme {_A}test_signatures_of_extended_optimizers",
        "",
    ),
    (
        "`optimizer.zero_grad(zero_grad_buffer=True)`",
        WRITTEN,
        "",
        f"{_O}test_extended_step_and_zero_grad {_A}test_signatures_of_extended_optimizers",
        "",
    ),
    (
        '`torch.distributed.checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, ...)`',
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        "",
    ),
    (
        "`torch.distributed.checkpoint.load(...)`, `model.load_state_dict(..., strict=False)`, "
        "`optimizer.load_state_dict(...)`",
        WRITTEN,
        "",
        f"{_P}test_the_walkthrough_of_the_readme",
        "",
    ),
    (
        "does not support TE FP8 extra state checkpointing with DCP",
        OTHER,
        "`state_dict()` has it, so that delayed scaling goes on where it stopped; `sharded_state_dict()` leaves it out",
        "te/test_transformer_engine.py::test_checkpoints te/test_transformer_engine.py::test_checkpoints_of_megatron",
        "",
    ),
    (
        "load non-distributed checkpoints before fully-sharding your model",
        WRITTEN,
        "",
        f"{_K}test_from_and_to_fsdp2_and_ddp",
        "",
    ),
    (
        "`fsdp_unit_modules` defaults to `None`, in which case Megatron-FSDP will replicate the parameters similar to "
        "DDP",
        OTHER,
        "the whole model is one unit: sharded at rest, whole during a step; a warning says so. To replicate: "
        "`no_shard`",
        f"{_A}test_models_without_units",
        f"{F}(fsdp_unit_modules)",
    ),
    (
        "`device_mesh`: If not provided, will build an FSDP DeviceMesh for you automatically",
        WRITTEN,
        "",
        f"{_A}test_the_class_used_directly",
        "",
    ),
    (
        "gradients across DP and CP ranks are reduced simultaneously, normalized by the DP-CP world size",
        WRITTEN,
        "",
        "parallel/test_context_parallel.py::test_data_and_context",
        "",
    ),
    (
        "`enable_fine_grained_param_gather`: all-gather parameters with per-Module granularity; defaults to `False`",
        WRITTEN,
        "",
        "runtime/test_fine_grained.py::test_collectives",
        f"{F}(enable_fine_grained_param_gather)",
    ),
    (
        "`keep_fp8_transpose_cache`; defaults to `False`",
        WRITTEN,
        "",
        "te/test_primary_weights.py::test_transposed_planes",
        f"{F}(keep_fp8_transpose_cache)",
    ),
    (
        "`nccl_ub`: allocate and register the NCCL userbuffer; requires `fsdp_double_buffer`",
        WRITTEN,
        "shown with a stand-in for NCCL",
        f"{_B}test_registered_buffers",
        f"{F}(nccl_ub)",
    ),
    (
        "`nccl_ub`: Only effective when using with Megatron-Core",
        OTHER,
        "works without it",
        f"{_B}test_registered_buffers",
        "",
    ),
    (
        "NCCL window (symmetric) registration if it is available. If not it falls back to local registration",
        WRITTEN,
        "",
        f"{_B}test_symmetric_memory",
        "",
    ),
    (
        "`fsdp_manual_registration`: call `ParamAndGradBuffer.manual_buffer_registration()` after the first iteration",
        WRITTEN,
        "",
        f"{_B}test_registered_buffers {_A}test_settings_of_a_sharded_model",
        f"{F}(fsdp_manual_registration), {C}.manual_buffer_registration, "
        "mfsdp_compile.runtime.model.ShardedModel.manual_buffer_registration",
    ),
    (
        "`fsdp_manual_registration`: only effective when `nccl_ub` is enabled",
        WRITTEN,
        "refused without it in `ddp`",
        f"{_T}test_errors",
        "",
    ),
    (
        "`disable_symmetric_registration`; defaults to `False`",
        WRITTEN,
        "",
        f"{_B}test_symmetric_memory",
        f"{F}(disable_symmetric_registration)",
    ),
    (
        "`fsdp_double_buffer`: persistently allocated double buffers; defaults to `False`, overridden to `True` with "
        "`nccl_ub`",
        WRITTEN,
        "",
        f"{_B}test_which_buckets_have_buffers {_T}test_adjustments",
        f"{F}(fsdp_double_buffer)",
    ),
    (
        "`fsdp_double_buffer`: only supported for simple repetitive model structures such as GPT",
        WRITTEN,
        "other buckets get memory as without it, or buffers of their own",
        f"{_B}test_which_buckets_have_buffers",
        f"{F}(maxpool_double_buffer), {F}(fsdp_db_use_persist_buf_on_alloc_fail)",
    ),
    (
        "`transformer_engine.pytorch.autocast`: activations are converted based on the recipe",
        WRITTEN,
        "",
        "te/test_transformer_engine.py::test_sharded_equals_alone",
        "",
    ),
    (
        "`quantized_model_init(recipe, preserve_high_precision_init_val=True)`",
        WRITTEN,
        "",
        "te/test_primary_weights.py::test_sharded_equals_alone",
        "",
    ),
    (
        "Only FSDP / ZeRO-3 supports FP8 parameters",
        OTHER,
        "other strategies keep them gathered in bfloat16, and layers quantize them at each use",
        "te/test_primary_weights.py::test_strategies",
        "",
    ),
    (
        "`preserve_fp32_weights=True`: Needed for FP8 parameters",
        WRITTEN,
        "",
        "te/test_primary_weights.py::test_sharded_equals_alone",
        "",
    ),
]

_GUIDE = [
    ("`--use-megatron-fsdp`", WRITTEN, "", f"{_P}test_flags_of_the_user_guide {_T}test_flags", "--use-megatron-fsdp"),
    (
        "`--data-parallel-sharding-strategy optim_grads_params`",
        WRITTEN,
        "",
        f"{_T}test_flags",
        "--data-parallel-sharding-strategy",
    ),
    ("`--no-gradient-accumulation-fusion`", WRITTEN, "", f"{_T}test_flags", "--no-gradient-accumulation-fusion"),
    ("`--use-distributed-optimizer`", WRITTEN, "", f"{_T}test_flags", "--use-distributed-optimizer"),
    ("`--ckpt-format fsdp_dtensor`", WRITTEN, "", f"{_T}test_flags", "--ckpt-format"),
    ("`unset CUDA_DEVICE_MAX_CONNECTIONS`", WRITTEN, "a warning if it is 1", f"{_T}test_one_hardware_queue", ""),
    (
        "`--calculate-per-token-loss`",
        WRITTEN,
        "",
        f"{_T}test_megatrons_training_loop",
        f"--calculate-per-token-loss, {F}(calculate_per_token_loss)",
    ),
    (
        "`--init-model-with-meta-device`",
        WRITTEN,
        "",
        f"{_T}test_models_on_the_meta_device",
        "--init-model-with-meta-device",
    ),
    ("`--grad-reduce-in-bf16`", WRITTEN, "", f"{_T}test_flags", "--grad-reduce-in-bf16"),
    ("`--fsdp-double-buffer`", WRITTEN, "", f"{_T}test_flags", "--fsdp-double-buffer"),
    ("`--use-nccl-ub`", WRITTEN, "", f"{_T}test_flags", "--use-nccl-ub"),
    (
        "`--calculate-per-token-loss` improves performance by reducing the frequency of gradient scaling",
        WRITTEN,
        "gradients are not scaled; `scale_gradients` does it once",
        f"{_T}test_megatrons_training_loop",
        f"{C}.scale_gradients",
    ),
    (
        "Enables gradient reduction in BF16 precision instead of FP32, reducing communication volume",
        WRITTEN,
        "",
        "runtime/test_precision.py::test_policies",
        "",
    ),
    (
        "`fsdp_double_buffer`: Only effective when using Megatron-LM",
        OTHER,
        "effective everywhere",
        f"{_B}test_which_buckets_have_buffers",
        "",
    ),
    ("Automatically overridden to `True` when `nccl_ub` is enabled", WRITTEN, "", f"{_T}test_adjustments", ""),
    (
        "example launch script `sbatch_mfsdp_deepseek_v3.sh`",
        ABSENT,
        "it starts Megatron-LM's program with its data and its container; here a program is started with torchrun, by "
        "any scheduler",
        "",
        "",
    ),
    (
        "Step 1: `--dump-param-to-param-group-map /path/to/param_to_param_group_map`",
        WRITTEN,
        "`DistributedOptimizer(..., dump_param_to_param_group_map=config.checkpoint.dump_param_to_param_group_map)` "
        "writes it",
        f"{_A}test_the_map_of_optimizer_groups {_T}test_flags",
        f"--dump-param-to-param-group-map, {M}.dump_param_to_param_group_map, "
        f"{M}.DistributedOptimizer(dump_param_to_param_group_map)",
    ),
    (
        "Step 2: `checkpoint_inspector.py print-torch-dcp-in-json DIR`",
        OTHER,
        "`mfsdp print-torch-dcp-in-json DIR`",
        f"{_A}test_the_map_of_optimizer_groups {_V}test_map_that_megatron_dumped",
        "mfsdp print-torch-dcp-in-json DIR",
    ),
    (
        "creates a `param_to_param_group_map.json` file in the directory",
        WRITTEN,
        "",
        f"{_A}test_the_map_of_optimizer_groups",
        "",
    ),
    (
        "Step 3: `torchrun ... checkpoint_inspector.py convert-torch-dist-to-fsdp-dtensor --swiglu IN OUT "
        "--param-to-param-group-map-json FILE`",
        OTHER,
        "`mfsdp convert-torch-dist-to-fsdp-dtensor ...`, in one process, without GPUs",
        f"{_A}test_conversion_under_megatrons_name {_V}test_convert_on_the_command_line",
        "mfsdp convert-torch-dist-to-fsdp-dtensor --swiglu IN OUT --param-to-param-group-map-json FILE",
    ),
    (
        "multi-node conversion: `sbatch_checkpoint_convert.sh`",
        OTHER,
        "one process converts, tensor by tensor, in bounded memory",
        f"{_V}test_memory_is_bounded_by_a_few_tensors",
        "mfsdp convert IN OUT",
    ),
    (
        "Step 4: Start your job using the converted `fsdp_dtensor` checkpoint",
        WRITTEN,
        "",
        f"{_V}test_torch_loads_the_converted_checkpoint",
        "",
    ),
]

_OVERVIEW = [
    (
        "shards parameters, gradients, and optimizer state across data parallel ranks",
        WRITTEN,
        "",
        f"{_S}test_table",
        "",
    ),
    (
        "exposed in Bridge through `use_megatron_fsdp`",
        WRITTEN,
        "",
        f"{_P}test_enable_megatron_fsdp",
        f"{M}.DistributedDataParallelConfig.use_megatron_fsdp",
    ),
    (
        "Bridge requires: `use_megatron_fsdp` enabled, checkpoint format `fsdp_dtensor`, standard rank initialization "
        "order",
        WRITTEN,
        "",
        f"{_T}test_errors {_P}test_megatrons_order_of_ranks",
        "",
    ),
    ("uses PyTorch DTensor and `torch.distributed.checkpoint` (DCP)", WRITTEN, "", f"{_K}test_dcp_by_itself", ""),
    (
        "not interchangeable with `torch_dist` or `zarr`: you cannot load an `fsdp_dtensor` checkpoint into a "
        "non-FSDP run or vice versa",
        WRITTEN,
        "`mfsdp convert` converts `torch_dist` both ways; `zarr` is refused",
        f"{_V}test_torch_dist_there_and_back {_T}test_errors {_R}test_a_round_trip",
        "mfsdp convert IN OUT --to torch_dist",
    ),
    (
        "compatible with 5D parallelism (TP + PP + DP + CP + EP)",
        WRITTEN,
        "",
        "parallel/test_tensor_parallel.py::test_a_mesh_of_four_dimensions "
        "parallel/test_context_parallel.py::test_pipeline_data_and_context "
        "parallel/test_expert_parallel.py::test_checkpoints_fit_other_expert_parallel_sizes",
        "",
    ),
    (
        "checkpoints saved under one parallelism layout can be loaded under a different layout",
        WRITTEN,
        "",
        "parallel/test_tensor_parallel.py::test_checkpoints_load_at_other_sizes "
        "parallel/test_pipeline.py::test_checkpoints",
        "",
    ),
    ("`use_tp_pp_dp_mapping=True` is unsupported", WRITTEN, "refused", f"{_T}test_errors", ""),
    ("`use_megatron_fsdp` and `use_torch_fsdp2` are mutually exclusive", WRITTEN, "", f"{_T}test_errors", ""),
    ("`torch_dist` and `zarr` are not valid for Megatron FSDP save/load", WRITTEN, "", f"{_T}test_errors", ""),
    (
        "Bridge also adjusts some settings automatically, including disabling `average_in_collective` and several "
        "buffer-reuse optimizations",
        WRITTEN,
        "",
        f"{_T}test_adjustments",
        "",
    ),
    (
        "intended to work with: tensor, pipeline, context, expert parallelism",
        WRITTEN,
        "",
        "parallel/test_tensor_parallel.py::test_equals_one_process parallel/test_pipeline.py::test_one_stage_per_rank "
        "parallel/test_context_parallel.py::test_data_and_context "
        "parallel/test_expert_parallel.py::test_gradients_of_one_process",
        "",
    ),
    (
        "intended to work with: BF16 or FP16 mixed precision",
        WRITTEN,
        "",
        "runtime/test_precision.py::test_bfloat16_training_matches_one_process",
        "",
    ),
    (
        "Public recipes may expose `use_megatron_fsdp` while still defaulting to a non-FSDP checkpoint format",
        WRITTEN,
        "refused where checkpoints are saved or loaded, with what to set",
        f"{_T}test_errors",
        "",
    ),
    (
        "reduces model-state memory, not activation memory; context parallelism, activation recomputation, or CPU "
        "offloading may still be needed",
        WRITTEN,
        "all three are supported",
        "parallel/test_context_parallel.py::test_data_and_context "
        "te/test_transformer_engine.py::test_checkpointed_blocks runtime/test_offload.py::test_meta_device",
        f"{F}(offload_policy)",
    ),
    (
        "`use_torch_fsdp2` should still be treated as experimental",
        OTHER,
        "torch's; nothing here concerns it",
        f"{_T}test_fsdp2_alone_is_left_to_torch",
        "",
    ),
    (
        "do not treat FSDP2 as interchangeable with Megatron FSDP",
        OTHER,
        "checkpoints of FSDP2 and DDP can be loaded",
        f"{_K}test_from_and_to_fsdp2_and_ddp",
        "",
    ),
]

_CORE = [
    (
        "`--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion "
        "--use-distributed-optimizer`",
        WRITTEN,
        "",
        f"{_T}test_the_guides_command_lines",
        "",
    ),
    ("Shards optimizer states, gradients, and parameters", WRITTEN, "", f"{_S}test_table", ""),
    (
        "Overlaps communication with computation where possible",
        WRITTEN,
        "",
        "programs/test_served.py::test_collectives_overlap passes/test_passes.py::test_prefetch_distance",
        "",
    ),
    (
        "Compatible with BF16 O1/O2/O3 recipes, FP8 compute with FP32 parameters and FP8 parameter training",
        WRITTEN,
        "",
        "runtime/test_precision.py::test_policies te/test_transformer_engine.py::test_sharded_equals_alone "
        "te/test_primary_weights.py::test_sharded_equals_alone",
        "",
    ),
    (
        "Compatible with TP, EP, and CP configurations",
        WRITTEN,
        "",
        "parallel/test_tensor_parallel.py::test_equals_one_process "
        "parallel/test_expert_parallel.py::test_gradients_of_one_process "
        "parallel/test_context_parallel.py::test_data_and_context",
        "",
    ),
    (
        "meta device, then layer-by-layer initialization through `Module.reset_parameters`",
        WRITTEN,
        "",
        f"{_P}test_models_on_the_meta_device",
        "",
    ),
    ("`unset CUDA_DEVICE_MAX_CONNECTIONS`", WRITTEN, "a warning if it is 1", f"{_T}test_one_hardware_queue", ""),
    (
        "Add `--calculate-per-token-loss`",
        WRITTEN,
        "",
        f"{_T}test_megatrons_training_loop",
        "--calculate-per-token-loss",
    ),
    (
        "An FSDP instance can correspond to multiple FSDP parameter groups, by DP communication group and data type",
        OTHER,
        "buckets of a unit",
        "runtime/test_param_dtype.py::test_the_context_of_several_policies",
        "",
    ),
    (
        "forward: all_gather, forward computation, discard; backward: all_gather, backward, reduce_scatter, discard",
        WRITTEN,
        "",
        f"{_S}test_communication_of_a_step",
        "",
    ),
    (
        "`FullyShardedDataParallel(transformer_config, model, ddp_config, fsdp_unit_modules=[...])`",
        WRITTEN,
        "",
        f"{_P}test_the_interface_of_megatron_core {_T}test_orders_of_arguments",
        f"{M}.FullyShardedDataParallel(fsdp_unit_modules)",
    ),
    (
        '`ddp_config.use_megatron_fsdp = True`, `ddp_config.data_parallel_sharding_strategy = "optim_grads_params"`',
        WRITTEN,
        "",
        f"{_P}test_the_interface_of_megatron_core",
        "",
    ),
    (
        "`DistributedOptimizer(optimizer, [model], [model.param_and_grad_buffer])`",
        WRITTEN,
        "",
        f"{_P}test_the_interface_of_megatron_core",
        f"{M}.DistributedOptimizer(per_model_buffers)",
    ),
    (
        "the training loop: `optimizer.zero_grad()`, `loss.backward()`, `optimizer.step()`",
        WRITTEN,
        "",
        f"{_P}test_the_interface_of_megatron_core",
        "",
    ),
    (
        "`model.sharded_state_dict()`, `optimizer.sharded_state_dict()`",
        WRITTEN,
        "",
        f"{_P}test_the_interface_of_megatron_core",
        f"{M}.FullyShardedDataParallel.sharded_state_dict",
    ),
    (
        "`model.load_state_dict(...)`, `optimizer.load_state_dict(...)`",
        WRITTEN,
        "",
        f"{_P}test_the_interface_of_megatron_core",
        "",
    ),
    (
        "`fsdp_unit_modules`: This configuration is mandatory",
        OTHER,
        "may be left out: repeated blocks are units",
        f"{_T}test_units",
        "",
    ),
    (
        "must be used with a distributed optimizer since it provides distributed checkpointing",
        WRITTEN,
        "`use_distributed_optimizer` is set to True; plain torch optimizers work too",
        f"{_T}test_adjustments {_O}test_elementwise_optimizers",
        "",
    ),
    (
        "configures groups as either DP or EDP based on parameter markings",
        WRITTEN,
        "",
        "parallel/test_expert_parallel.py::test_marked_parameters_are_experts_wherever_they_are",
        f"{F}(is_expert)",
    ),
    ('`with torch.device("meta"): model = GPTModel(config)`', WRITTEN, "", f"{_P}test_models_on_the_meta_device", ""),
    (
        "Custom Modules: ensure they implement the `reset_parameters` API",
        WRITTEN,
        "or pass `init_fn`; modules without are named",
        f"{_T}test_models_on_the_meta_device runtime/test_meta.py::test_a_function_of_ones_own",
        f"{F}(init_fn)",
    ),
    (
        "Tensors created without a specified device default to the meta device",
        WRITTEN,
        "buffers are initialized too",
        "runtime/test_meta.py::test_values_are_those_of_one_process",
        "",
    ),
    (
        "Module pre-forward hook: unshards model weights",
        WRITTEN,
        "in eager code; compiled, it is a node of the graph",
        f"{_S}test_communication_of_a_step",
        "",
    ),
    (
        "`RegisterFSDPBackwardFunction`: reshard model weights and reduce gradients after module backward",
        OTHER,
        "an autograd function of this package in eager code; compiled, nodes of the graph",
        f"{_S}test_communication_of_a_step",
        "",
    ),
    (
        "Module post-forward hook: reshard model weights",
        WRITTEN,
        "in eager code; compiled, the gathered value is let go after its last use",
        f"{_S}test_communication_of_a_step",
        "",
    ),
    (
        "Root module pre-backward hook: checks that all model parameters are resharded",
        OTHER,
        "units are released after their last use; nothing is left to check",
        "te/test_transformer_engine.py::test_no_weight_outlives_its_unit",
        "",
    ),
    (
        "Root module post-backward hook: all gradients are properly handled",
        WRITTEN,
        "",
        f"{_O}test_gradients_exist_on_every_rank_also_for_empty_shards",
        "",
    ),
    (
        "assumes that gradients are always generated in a certain order (reverse of `module.parameters()`)",
        OTHER,
        "any order",
        "passes/test_passes.py::test_reductions_start_in_the_order_of_gradients",
        "",
    ),
    (
        "Activation recompute: unshard once and reshard once",
        WRITTEN,
        "",
        "programs/test_models.py::test_checkpointed_blocks_gather_once_for_recompute_and_gradient",
        "",
    ),
    (
        "`training_state`: FORWARD, PRE_BACKWARD, POST_BACKWARD, IDLE",
        ABSENT,
        "the engine's state is per unit and private, and a compiled graph has none: its order is in the schedule that "
        "`explain` prints",
        "",
        "mfsdp_compile.explain",
    ),
    (
        "`tensor._typed_storage()._resize_(0)` deallocates storage immediately",
        WRITTEN,
        "in eager code, gathered buckets are released by it",
        f"{_A}test_allocators_by_name",
        "",
    ),
    (
        "hooks in `AllGatherPipeline` and `GradReducePipeline` to swap the temporary buffer allocator",
        OTHER,
        "`buffer_allocator`, one for both",
        f"{_B}test_a_users_allocator",
        f"{F}(buffer_allocator)",
    ),
    (
        "`StorageResizeBasedBucketAllocator`",
        OTHER,
        '`allocator_arguments("StorageResizeBasedBucketAllocator")`: the default',
        f"{_A}test_allocators_by_name",
        f"{M}.allocator_arguments(name)",
    ),
    (
        "`RotaryBucketAllocator`",
        OTHER,
        '`allocator_arguments("RotaryBucketAllocator")`: `fsdp_double_buffer`',
        f"{_A}test_allocators_by_name",
        f"{M}.allocator_arguments(name)",
    ),
]

CLAIMS = [
    Claim(document, *row)
    for document, rows in zip(DOCUMENTS, (_BRIDGE, _README, _GUIDE, _OVERVIEW, _CORE), strict=True)
    for row in rows
]
