"""How a bucket becomes whole and how its gradients are reduced: plain data, what graphs carry and passes read."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .layout import BucketLayout

if TYPE_CHECKING:
    from .topology import Topology

__all__ = ["Exchange", "When", "stride_of"]


def stride_of(ranks: Sequence[int]) -> int:
    """The distance between two of some ranks that lie evenly, by their numbers in the job."""
    return max(1, (max(ranks) - min(ranks)) // max(1, len(ranks) - 1))


class When(str, Enum):
    """Whether a stage of a reduction runs in every backward."""

    ALWAYS = "always"
    IF_DUE = "if due"  # decides for its bucket: the sum over microbatches waits in front of it until a reduction is due
    FOLLOWS = "follows"  # if the stage that decides has run


class Exchange(NamedTuple):
    """What ``gather`` takes after its tensors: how a bucket becomes whole, and how its gradients are reduced.

    Args:
        sizes, ndims: shapes of the parameters, one after the other.
        offsets: of the parameters in the bucket, in elements.
        numel: elements of the bucket.
        dtype: of the gathered parameters (the compute dtype); shards are cast to it before they are sent.
        gather_size, gather_group: ranks to gather over at each use; 1 and "" for none.
        comm_dtype: that gradients are reduced in.
        reduce_op: ``"sum"`` or ``"avg"``.
        scale: of what was reduced.
        collectives: ``"reduce_scatter"`` or ``"all_reduce"``, one per stage of the reduction.
        when: a :class:`When` for each.
        group_sizes, groups: of each.
        inspected: whether gradients are looked at before the first stage.
    """

    sizes: list[int]
    ndims: list[int]
    offsets: list[int]
    numel: int
    dtype: torch.dtype
    gather_size: int
    gather_group: str
    comm_dtype: torch.dtype
    reduce_op: str
    scale: float
    collectives: list[str]
    when: list[str]
    group_sizes: list[int]
    groups: list[str]
    inspected: bool

    @staticmethod
    def of(
        layout: BucketLayout,
        topology: Topology,
        dtype: torch.dtype,
        comm_dtype: torch.dtype,
        reduce_op: str,
        scale: float,
        inspected: bool = False,
    ) -> Exchange:
        gather, stages = topology.gather_group, topology.stages
        return Exchange(
            [size for slot in layout.slots for size in slot.shape],
            [len(slot.shape) for slot in layout.slots],
            [slot.offset for slot in layout.slots],
            layout.numel,
            dtype,
            gather.size if gather else 1,
            gather.name if gather else "",
            comm_dtype,
            reduce_op,
            scale,
            ["reduce_scatter" if stage.scatters else "all_reduce" for stage in stages],
            [stage.when.value for stage in stages],
            [stage.group.size for stage in stages],
            [stage.group.name for stage in stages],
            inspected,
        )

    @property
    def needs_token(self) -> bool:
        return self.inspected or any(self.may_wait(stage) for stage in range(len(self.when)))

    def may_wait(self, stage: int) -> bool:
        """Whether a stage is left out while gradients wait."""
        return self.when[stage] != When.ALWAYS.value

    @property
    def scales_first(self) -> bool:
        """float16 gradients are scaled before they are summed: the sum might overflow."""
        return self.comm_dtype == torch.float16 and self.scale != 1

    def finish(self, reduced: Tensor, dtype: torch.dtype) -> Tensor:
        """What to do with a reduced gradient: cast and scale."""
        gradient = reduced.to(dtype)
        return gradient if self.scale == 1 or self.scales_first else gradient * self.scale
