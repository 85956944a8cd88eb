from mfsdp_compile.megatron import GPTModelProvider
from mfsdp_compile.megatron import (
    ConfigContainer,
    DistributedInitConfig,
    DistributedDataParallelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrainingConfig,
    CheckpointConfig,
)

# Model configuration with tensor parallelism
model_config = GPTModelProvider(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=2048,
    tensor_model_parallel_size=2,  # Optional: combine with TP
    # ... other model parameters
)

# Enable Megatron FSDP
dist_config = DistributedInitConfig(
    use_megatron_fsdp=True,
)

ddp_config = DistributedDataParallelConfig(
    use_megatron_fsdp=True,
)

# Optimizer configuration
optimizer_config = OptimizerConfig(
    optimizer="adam",
    lr=3e-4,
    weight_decay=0.1,
    adam_beta1=0.9,
    adam_beta2=0.95,
    clip_grad=1.0,
)

# Scheduler configuration
scheduler_config = SchedulerConfig(
    lr_decay_style="cosine",
    lr_warmup_iters=1000,
)

# Training configuration
train_config = TrainingConfig(
    micro_batch_size=2,
    global_batch_size=32,
    train_iters=10000,
)

# Checkpoint configuration with required format
checkpoint_config = CheckpointConfig(
    save="/path/to/checkpoints",
    save_interval=1000,
    ckpt_format="fsdp_dtensor",  # Required for FSDP
)

# Create complete configuration
config = ConfigContainer(
    model=model_config,
    dist=dist_config,
    ddp=ddp_config,
    optimizer=optimizer_config,
    scheduler=scheduler_config,
    train=train_config,
    checkpoint=checkpoint_config,
    # ... other config parameters
)
