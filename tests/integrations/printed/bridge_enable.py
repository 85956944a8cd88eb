from mfsdp_compile.megatron import (
    ConfigContainer,
    DistributedInitConfig,
    DistributedDataParallelConfig,
    CheckpointConfig,
)

# Enable Megatron FSDP
dist_config = DistributedInitConfig(
    use_megatron_fsdp=True,
)

ddp_config = DistributedDataParallelConfig(
    use_megatron_fsdp=True,
)

# Required checkpoint format
checkpoint_config = CheckpointConfig(
    ckpt_format="fsdp_dtensor",
    save="/path/to/checkpoints",
)

config = ConfigContainer(
    dist=dist_config,
    ddp=ddp_config,
    checkpoint=checkpoint_config,
    # ... other config parameters
)
