"""How a bucket is gathered and how its gradients are reduced, as plain data that graphs carry and passes read."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import quantize, wire


class Buffers(NamedTuple):
    """The communication buffers of one bucket for one use.

    Args:
        capacity: Elements of each buffer, at least those of the bucket. 0: the bucket gets fresh memory.
        number: Number of buffers that it takes turns with.
    """

    capacity: int = 0
    number: int = 0


NO_BUFFERS = Buffers()


def stride_of(ranks: Sequence[int]) -> int:
    """Distance between neighbors in evenly spaced ``ranks``, in global ranks."""
    return max(1, (max(ranks) - min(ranks)) // max(1, len(ranks) - 1))


class Overlap(NamedTuple):
    """Kinds of collectives that may overlap with computation."""

    gathers: bool = True
    reductions: bool = True


class When(str, Enum):
    """Whether a stage of a reduction runs in every backward."""

    ALWAYS = "always"
    IF_DUE = "if due"  # decides for its bucket: gradients accumulate in front of it until a reduction is due
    FOLLOWS = "follows"  # runs if the stage that decides has run


EXCHANGE_OF_SLICES = "all_to_all"
"""A collective of a reduction. Behind a slash, the number of pieces that a slice consists of (:func:`.wire.slices_of`),
if it is not one; behind a colon, the format of what is sent (:mod:`..formats.wire`), if any."""


def exchanges_slices(collective: str) -> bool:
    return kind_of(collective) == EXCHANGE_OF_SLICES


def format_of(collective: str) -> str:
    """Return the format in which slices are sent. "": they are sent in the dtype that they have."""
    return collective.partition(":")[2]


def pieces_of(collective: str) -> int:
    """Return the number of pieces that a slice consists of."""
    return int(collective.partition(":")[0].partition("/")[2] or 1)


def exchange_of(format: str, pieces: int = 1) -> str:
    """Return the exchange of slices of so many pieces, in a format; "": in the dtype of what is sent."""
    return EXCHANGE_OF_SLICES + (f"/{pieces}" if pieces > 1 else "") + (f":{format}" if format else "")


def kind_of(collective: str) -> str:
    """Return a collective without pieces and format."""
    return collective.partition(":")[0].partition("/")[0]


def split_sizes(sizes: Sequence[int], ndims: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes that were concatenated to ``sizes``."""
    lengths = iter(sizes)
    return [tuple(itertools.islice(lengths, ndim)) for ndim in ndims]


class _Fields(NamedTuple):
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
    buffers: Sequence[int] = (0, 0, 0, 0)
    scaling: str = ""
    form: str = quantize.DEQUANTIZED
    offload: str = ""
    pins: bool = False
    keeps_copy: bool = False


class Exchange(_Fields):
    """The arguments of ``gather`` after its tensors: how a bucket is gathered, and how its gradients are reduced.

    Attributes:
        sizes, ndims: Shapes of the parameters, concatenated, and the number of dimensions of each.
        offsets: Offsets of the parameters in the bucket, in elements.
        numel: Elements of the bucket.
        dtype: Dtype of the gathered parameters (the compute dtype). Shards are cast to it before they are sent.
        gather_size, gather_group: Number and process group of the ranks to gather over at each use; 1 and "" for none.
        comm_dtype: Dtype in which gradients are reduced.
        reduce_op: ``"sum"`` or ``"avg"``.
        scale: Factor applied to the reduced gradient.
        collectives: One per stage of the reduction: ``"reduce_scatter"``, ``"all_reduce"``; ``"all_to_all"`` of slices
            that each rank sums in float32, in the order of ranks (``"all_to_all/8:int8"``: of slices of 8 pieces, in
            this format); or ``"all_gather"`` of such sums.
        when: A :class:`When` for each stage.
        group_sizes, groups: Size and process group of each stage.
        inspected: Whether gradients are inspected before the first stage.
        buffers: Communication buffers to gather into (capacity in elements, and their number), and to pack gradients
            into. Capacity 0: fresh memory.
        scaling: One of ``quantize.SCALINGS`` if the bucket is gathered in float8 or float4; see :mod:`.quantize`. "":
            it is not.
        form: Form in which modules get what is gathered in float8; see :mod:`.forms`.
        offload: Type of the device that shards are fetched to from host memory, and from which reduced gradients are
            copied there; see :mod:`.memory.host`. "": shards are on the device.
        pins: Whether that host memory is pinned.
        keeps_copy: Whether the device keeps a copy of the shard in the dtype that is sent, from which it gathers.
    """

    @functools.cached_property
    def is_quantized(self) -> bool:
        """Whether the bucket is gathered in float8."""
        return bool(self.scaling)

    @functools.cached_property
    def stays_quantized(self) -> bool:
        """Whether modules get the gathered bytes themselves: then the bucket is never dequantized."""
        return self.is_quantized and self.form not in quantize.DEQUANTIZING

    @functools.cached_property
    def dequantizes(self) -> bool:
        """Whether the bucket is dequantized when its gather is awaited."""
        return self.is_quantized and self.form in quantize.DEQUANTIZING

    @functools.cached_property
    def takes_quantized(self) -> bool:
        """Whether graphs gather the bucket from its quantized shard. Otherwise it is already gathered."""
        return self.is_quantized and bool(self.gather_group)

    @functools.cached_property
    def takes_sent(self) -> bool:
        """Whether graphs take what this rank sends beside the shard: the quantized shard, or the copy on the device."""
        return self.takes_quantized or self.keeps_copy

    @functools.cached_property
    def sent_dtype(self) -> torch.dtype:
        """Dtype of the all-gather's tensors."""
        return quantize.SENT_DTYPE if self.is_quantized else self.dtype

    @functools.cached_property
    def sent_numel(self) -> int:
        """Elements of the all-gather's result."""
        return quantize.sent_numel(self.numel, self.scaling)

    @functools.cached_property
    def held_dtype(self) -> torch.dtype:
        """Dtype of the gathered bucket in memory."""
        return quantize.SENT_DTYPE if self.stays_quantized else self.dtype

    @property
    def quantization(self) -> tuple[list[int], list[int], list[int], torch.dtype, str]:
        """The arguments of ``wait_quantized`` after its tensors."""
        return self.sizes, self.ndims, self.offsets, self.dtype, self.scaling

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters."""
        return split_sizes(self.sizes, self.ndims)

    @property
    def scale_count(self) -> int:
        """Number of scales of the bucket's parameters; 0 if it is not quantized."""
        return sum(quantize.scale_count(shape, self.scaling) for shape in self.shapes) if self.is_quantized else 0

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
        if not self.gather_group:
            gathers = NO_BUFFERS
        if self.needs_token or not self.groups:
            gradients = NO_BUFFERS
        return self._replace(buffers=(*gathers, *gradients))

    @functools.cached_property
    def needs_token(self) -> bool:
        return self.inspected or any(self.may_wait(stage) for stage in range(len(self.when)))

    def may_wait(self, stage: int) -> bool:
        """Whether the stage is skipped while a reduction is not due. False if there is no such stage."""
        return stage < len(self.when) and self.when[stage] != When.ALWAYS.value

    @functools.cached_property
    def scales_first(self) -> bool:
        """Whether gradients are scaled before they are summed. In float16 the sum might overflow."""
        return self.comm_dtype == torch.float16 and self.scale != 1 and not self.sums_exactly

    @functools.cached_property
    def sums_exactly(self) -> bool:
        """Whether ranks sum slices in float32, in the order of ranks. [Note: Sums in the order of ranks]

        A reduce-scatter of the backend sums in the dtype that it sends, in an order that depends on the number of
        ranks, NCCL's algorithm and the network. Ranks that exchange slices send as many bytes, and add in float32. The
        sum of one stage stays in float32: the next sends that.
        """
        return any(map(exchanges_slices, self.collectives))

    def stage_dtype(self, stage: int) -> torch.dtype:
        """Dtype that a stage of the reduction sends; after the last stage, that of the reduced gradient."""
        dtype = self.comm_dtype
        for collective in self.collectives[:stage]:
            if exchanges_slices(collective):
                dtype = torch.float32 if format_of(collective) else wire.sum_dtype(dtype)
        return dtype

    def stage_numel(self, stage: int) -> int:
        """Elements of the whole tensor of a stage of the reduction: what is reduced, or gathered."""
        before = range(stage - (self.collectives[stage] == "all_gather"))  # a gather undoes the stage before it
        kinds = zip(before, self.collectives, self.group_sizes, strict=False)
        return self.numel // math.prod(n for _, kind, n in kinds if kind == "reduce_scatter" or exchanges_slices(kind))

    def is_copied(self, stage: int) -> bool:
        """Whether a stage sends a copy of that tensor, in a format or another order."""
        collective = self.collectives[stage]
        return bool(format_of(collective)) or pieces_of(collective) > 1

    def stage_bytes(self, stage: int) -> int:
        """Bytes of that tensor as it is sent."""
        numel = self.stage_numel(stage)
        if format := format_of(self.collectives[stage]):
            sent = wire.sent_numel(numel, self.group_sizes[stage], format)
            return sent * wire.FORMATS[format].sent_dtype.itemsize
        return numel * self.stage_dtype(stage).itemsize

    def sum_arguments(self, stage: int) -> tuple[int, str, int]:
        """The arguments of ``wait_summed`` after its tensor."""
        ranks, format = self.group_sizes[stage], format_of(self.collectives[stage])
        return ranks, format, math.ceil(self.stage_numel(stage) / ranks)

    def cast_and_scale(self, reduced: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast and scale a reduced gradient."""
        if self.collectives[-1:] == ["all_gather"]:  # the slices may have been padded
            reduced = reduced[: self.numel // math.prod(self.group_sizes[:-2])]
        if self.sums_exactly:  # the mean may fit where the sum would overflow, and is rounded once
            return (reduced if self.scale == 1 else reduced * self.scale).to(dtype)
        gradient = reduced.to(dtype)
        return gradient if self.scale == 1 or self.scales_first else gradient * self.scale


def buffer_bytes(exchanges: Iterable[Exchange]) -> int:
    """Return the bytes of the communication buffers of a model's buckets, once all of them have been used."""
    sizes: dict[tuple[str, int, torch.dtype], int] = {}
    for exchange in exchanges:
        gathers, gradients = exchange.gather_buffers, exchange.gradient_buffers
        sizes["gather", gathers.capacity, exchange.sent_dtype] = gathers.number
        sizes["gradients", gradients.capacity, exchange.comm_dtype] = gradients.number
    return sum(capacity * dtype.itemsize * count for (_, capacity, dtype), count in sizes.items())
