"""Optimizers over sharded parameters."""
