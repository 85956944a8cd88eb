"""Conversion of checkpoints: Megatron's torch_dist and Hugging Face's safetensors to fsdp_dtensor, and back."""
