"""Context and pipeline parallelism over sharded models."""
