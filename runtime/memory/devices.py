"""This rank's device of a type: graphs, which are the same on all ranks, name only the type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

settlers: list[Callable[[torch.device], None]] = []
"""Wait for copies between a device and host memory, after a failure."""


def device_of(kind: str) -> torch.device:
    """Return this rank's device of a type."""
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def on_device(value: Tensor, kind: str) -> Tensor:
    """Return a tensor on this rank's device of a type, which collectives work on: what rests elsewhere is copied."""
    return value if value.device.type == kind else value.to(device_of(kind))
