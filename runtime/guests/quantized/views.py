"""Data and scales of parameters in a bucket that stays quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ...formats import quantize

if TYPE_CHECKING:
    from ...memory.bucket import Bucket


class Views:
    """What modules get of gathered bytes."""

    def plane(self, bucket: Bucket, full: Tensor, columns: bool) -> Tensor:
        """Return a plane of what is gathered: data ``[numel]``, then scales ``[numel / 32]``."""
        return full if full.numel() == bucket.plan.held_numel else full.chunk(2)[columns]

    def view(self, bucket: Bucket, full: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return data and scales of a parameter in the gathered bucket, or in a plane of it."""
        return bucket.whole_view(full, index).view(quantize.DTYPE), self.scale_of(bucket, full, index)

    def scale_of(self, bucket: Bucket, full: Tensor, index: int) -> Tensor:
        """Return the scales of a parameter."""
        assert bucket.scales is not None
        shapes = [slot.shape for slot in bucket.plan.layout.slots]
        return quantize.split_scales(bucket.scales, shapes, bucket.plan.scaling)[index]
