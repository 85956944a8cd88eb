"""Flat buckets, sharded parameters and their gradients."""
