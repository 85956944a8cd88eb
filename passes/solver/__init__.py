"""Finds the fastest schedule that fits in memory: costs, a simulator, and a search."""
