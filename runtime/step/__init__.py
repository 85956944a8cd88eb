"""The running step: when gradients are reduced, which graph runs, and checks before the optimizer."""
