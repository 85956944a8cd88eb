"""Gradients of what is computed from parameters outside of forward: means over ranks, like gradients of the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import compat
from ..geometry.rows import RowSplit
from ..geometry.topology import Group, Topology
from ..ranks.agreement import announce
from .redistribute import as_real


@dataclass(frozen=True)
class Averaging:
    """How a gradient of which each rank has its own becomes one that is the same on every rank.

    Args:
        groups: Groups whose ranks to average over, one group after the other.
        parameter: Name of the parameter that the gradient is one of.
        in_order: Whether values are added in the order of ranks.
    """

    groups: Sequence[Group]
    parameter: str
    in_order: bool

    @staticmethod
    def over(topology: Topology, split: RowSplit) -> Averaging:
        """Return the mean over all ranks that compute with a parameter."""
        groups = tuple(group for group in (topology.every, *split.groups) if group.size > 1)
        return Averaging(groups, split.name, topology.in_order)

    def mean(self, gradient: Tensor) -> Tensor:
        """Return the mean of ranks' gradients, ordinary tensors of one shape. A collective."""
        is_complex, value = gradient.is_complex(), as_real(gradient)
        for group in self.groups:
            announce(f"a gradient of what was computed from {self.parameter!r}", group.name, self.parameter)
            # Of parameters in host memory, the gradient is there, and the group may have no backend for it.
            sent = compat.to_backend(value, group.name)
            value = group.all_reduce(sent, "sum", self.in_order).to(value.device) / group.size
        return torch.view_as_complex(value) if is_complex else value
