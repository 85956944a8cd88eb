"""Steps of optimizers in other ways than their own: over flat shards, in backward, in one kernel, whole."""
