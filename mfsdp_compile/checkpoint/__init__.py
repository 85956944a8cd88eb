"""Checkpoint directories of torch.distributed.checkpoint."""
