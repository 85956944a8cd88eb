"""Find the fastest schedule that fits in memory: a cost model, a simulator and a search."""
