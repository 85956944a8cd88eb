"""Decides how a model is sharded: units, buckets, and parameters that are already divided."""
