"""How a bucket is gathered and how its gradients are reduced, as plain data that graphs carry and passes read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ..formats import quantize
from ..lanes.lane import Lane, lane_at
from ..lanes.stage import Spec


class Buffers(NamedTuple):
    """The communication buffers of one bucket for one use.

    Args:
        capacity: Elements of each buffer, at least those of the bucket. 0: the bucket gets fresh memory.
        number: Number of buffers that it takes turns with.
    """

    capacity: int = 0
    number: int = 0


NO_BUFFERS = Buffers()


class Overlap(NamedTuple):
    """Kinds of collectives that may overlap with computation."""

    gathers: bool = True
    reductions: bool = True


def split_sizes(sizes: Sequence[int], ndims: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes that were concatenated to ``sizes``."""
    lengths = iter(sizes)
    return [tuple(itertools.islice(lengths, ndim)) for ndim in ndims]


class _Fields(NamedTuple):
    sizes: list[int]
    ndims: list[int]
    offsets: list[int]
    lane_key: str
    buffers: Sequence[int] = (0, 0, 0, 0)
    scaling: str = ""
    form: str = quantize.DEQUANTIZED


class Exchange(_Fields):
    """The arguments of ``gather`` after its tensors: how a bucket is gathered, and how its gradients are reduced.

    Attributes:
        sizes, ndims: Shapes of the parameters, concatenated, and the number of dimensions of each.
        offsets: Offsets of the parameters in the bucket, in elements.
        lane_key: Key of its :class:`~..lanes.lane.Lane`.
        buffers: Communication buffers to gather into (capacity in elements, and their number), and to pack gradients
            into. Capacity 0: fresh memory.
        scaling: One of ``quantize.SCALINGS`` if modules get what is gathered in float8; see :mod:`.quantize`. "": they
            get the compute dtype.
        form: Form in which modules get it; see :mod:`.forms`.
    """

    @property
    def lane(self) -> Lane:
        """How the bucket travels. What keeps an exchange, such as a graph of torch, does not keep the lane."""
        return lane_at(self.lane_key)

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the bucket."""
        return self.lane.whole.numel

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the gathered parameters: the compute dtype."""
        return self.lane.whole.dtype

    @functools.cached_property
    def comm_dtype(self) -> torch.dtype:
        """Dtype in which gradients are packed."""
        return self.lane.packed.dtype

    @functools.cached_property
    def gather_size(self) -> int:
        """Number of ranks to gather over at each use; 1 for none."""
        return self.lane.use[self.lane.gather].ranks if self.lane.gather is not None else 1

    @functools.cached_property
    def gather_group(self) -> str:
        """Process group to gather over at each use; "" for none."""
        group = self.lane.use[self.lane.gather].group if self.lane.gather is not None else None
        return group.name if group is not None else ""

    @functools.cached_property
    def stays_quantized(self) -> bool:
        """Whether modules get the gathered bytes themselves: then the bucket is never dequantized."""
        return bool(self.scaling)

    @functools.cached_property
    def takes_scales(self) -> bool:
        """Whether graphs take the scales of the bucket."""
        return self.lane.takes_scales or self.stays_quantized

    @functools.cached_property
    def held_dtype(self) -> torch.dtype:
        """Dtype of the gathered bucket in memory."""
        return quantize.SENT_DTYPE if self.stays_quantized else self.dtype

    @functools.cached_property
    def sent(self) -> Spec:
        """What the all-gather returns; the bucket, if there is none."""
        lane = self.lane
        return lane.flight_spec("use", lane.gather) if lane.gather is not None else Spec(self.numel, self.held_dtype)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters."""
        return split_sizes(self.sizes, self.ndims)

    @functools.cached_property
    def gather_buffers(self) -> Buffers:
        return Buffers(*self.buffers[:2])

    @functools.cached_property
    def gradient_buffers(self) -> Buffers:
        return Buffers(*self.buffers[2:])

    def with_buffers(self, gathers: Buffers, gradients: Buffers) -> Exchange:
        """Return the exchange with communication buffers where it can use them.

        What is gathered from the bucket's own memory needs none. Gradients that may wait for a reduction, or have none,
        stay where they are packed, so they cannot be in a buffer.
        """
        if not self.gather_group or "use" not in self.lane.own_parts:
            gathers = NO_BUFFERS
        if self.lane.needs_token or not self.lane.reduction:
            gradients = NO_BUFFERS
        return self._replace(buffers=(*gathers, *gradients))


def buffer_bytes(exchanges: Iterable[Exchange]) -> int:
    """Return the bytes of the communication buffers of a model's buckets, once all of them have been used."""
    sizes: dict[tuple[str, int, torch.dtype], int] = {}
    for exchange in exchanges:
        gathers, gradients = exchange.gather_buffers, exchange.gradient_buffers
        sizes["gather", gathers.capacity, exchange.sent.dtype] = gathers.number
        sizes["gradients", gradients.capacity, exchange.comm_dtype] = gradients.number
    return sum(capacity * dtype.itemsize * count for (_, capacity, dtype), count in sizes.items())
