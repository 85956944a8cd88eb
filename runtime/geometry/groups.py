"""Ranks that communicate with one another."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compat


def stride_of(ranks: Sequence[int]) -> int:
    """Distance between neighbors in evenly spaced ``ranks``, in global ranks."""
    return max(1, (max(ranks) - min(ranks)) // max(1, len(ranks) - 1))


@dataclass
class Group:
    """Ranks that communicate with one another.

    Args:
        name: Name of the process group for functional collectives. It changes when the group has to be created again.
        size: Number of ranks.
        rank: Rank of this process in the group.
        stride: Distance between neighboring ranks of the group, in global ranks.
    """

    name: str
    size: int
    rank: int = field(repr=False)  # the other fields are the same on all ranks of the group
    stride: int = 1

    def __hash__(self) -> int:
        return hash((self.size, self.rank))

    def probe(self, device_type: str) -> None:
        """Raise RuntimeError if a collective over the group fails."""
        one = torch.ones(1, device=device_type)
        found = compat.wait_tensor(compat.all_reduce(one, "sum", self.name))
        if found.item() != self.size:
            raise RuntimeError(f"Ones on {self.size} ranks sum to {found.item()}.")

    def all_reduce(self, value: Tensor, op: str, in_order: bool) -> Tensor:
        """Reduce values over the ranks. The result is the same on each of them.

        Args:
            in_order: Whether sums are added in the order of ranks; see [Note: Sums in the order of ranks].
        """
        if not (in_order and op == "sum" and value.is_floating_point()):
            return compat.wait_tensor(compat.all_reduce(value, op, self.name))
        every = compat.wait_tensor(compat.all_gather(value.reshape(-1), self.size, self.name)).view(self.size, -1)
        return functools.reduce(torch.add, every).view(value.shape)

    @staticmethod
    def of(group: dist.ProcessGroup) -> Group:
        ranks = dist.get_process_group_ranks(group)
        return Group(group.group_name, len(ranks), dist.get_rank(group), stride_of(ranks))
