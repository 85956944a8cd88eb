"""Whole steps as CUDA graphs: what the host must do around a replay, and what cannot be captured."""
