"""Shards, their gradients and the optimizer's state in host memory."""
