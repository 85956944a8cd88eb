dist_config.use_megatron_fsdp = True
ddp_config.use_megatron_fsdp = True

checkpoint_config.ckpt_format = "fsdp_dtensor"
