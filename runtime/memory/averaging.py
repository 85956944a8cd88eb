"""Gradients of what is computed from parameters outside of forward: means over ranks, like gradients of the forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import compat
from ..geometry.groups import Group
from ..geometry.rows import RowSplit
from ..geometry.topology import Topology
from ..observers import operation_begins
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

    def mean(self, values: Tensor, what: str = "", order: float = 1.0) -> Tensor:
        """Return the mean over ranks, in the sense of a norm: of ``values**order``; inf: the maximum. A collective.

        Args:
            values: Ordinary tensor of one shape on all ranks. Complex ones have means only.
            what: What is averaged, for messages; "": a gradient.
            order: Of the norm; 1 for sums.
        """
        is_complex, value = values.is_complex(), as_real(values)
        what = what or f"a gradient of what was computed from {self.parameter!r}"
        is_maximum = order == math.inf
        value = value if is_maximum or order == 1 else value**order
        for group in self.groups:
            operation_begins(what, group.name, self.parameter)
            # Of parameters in host memory, the gradient is there, and the group may have no backend for it.
            sent = compat.to_backend(value, group.name)
            value = group.all_reduce(sent, "max" if is_maximum else "sum", self.in_order).to(value.device)
            value = value if is_maximum else value / group.size
        value = value if is_maximum or order == 1 else value ** (1 / order)
        return torch.view_as_complex(value) if is_complex else value


@dataclass(frozen=True)
class Reduction:
    """What a number was computed by from a sharded tensor.

    Args:
        order: Of the norm; 1 for sums, inf for maxima.
        averaging: The ranks.
    """

    order: float
    averaging: Averaging

    def of_own(self, values: Tensor) -> Tensor:
        """Return the same number for tensors that are not sharded, of which each rank has computed ``values``.

        Torch's DTensors, whose norms are partial until they are used, count such a tensor on each rank as a part of
        ``1 / ranks``. So this is the mean over ranks, and the same on every rank. A collective.
        """
        what = f"{values.numel()} norms or sums of tensors that are not sharded, beside those of sharded ones"
        return self.averaging.mean(values, what, self.order)
