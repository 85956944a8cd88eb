from mfsdp_compile.megatron import DistributedInitConfig

dist_config = DistributedInitConfig(
    use_torch_fsdp2=True,  # Use PyTorch FSDP2 instead
)
