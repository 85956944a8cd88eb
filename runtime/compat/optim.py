"""Functions of torch's optimizers."""

from __future__ import annotations

import sys

import torch
from torch.optim._muon import _adjust_lr as muon_learning_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize

__all__ = ["is_running", "muon_learning_rate", "orthogonalize"]


def is_running(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this thread is inside a method of ``optimizer``."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
