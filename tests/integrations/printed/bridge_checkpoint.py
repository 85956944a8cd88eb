from mfsdp_compile.megatron import CheckpointConfig

checkpoint_config = CheckpointConfig(
    ckpt_format="fsdp_dtensor",  # Required for Megatron FSDP
    save="/path/to/checkpoints",
    load="/path/to/checkpoints",  # Optional: resume from checkpoint
)
