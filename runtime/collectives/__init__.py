"""Collectives as operators of torch, and differentiable ones for activations."""
