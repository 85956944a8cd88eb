"""Which rows of a parameter a rank holds, as plain data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .. import compat
from .layout import BucketLayout

if TYPE_CHECKING:
    from .partition import Partition
    from .topology import Group


@dataclass(frozen=True)
class RowSplit:
    """How the rows of one parameter are spread over ranks: parameter ``index`` of a bucket's layout.

    Args:
        layout: Layout of the bucket.
        index: Index of the parameter.
        partition: How the parameter was already divided, if the bucket holds only a part of it. None: the bucket holds
            all of it.
        inner: Shape of a row of a result that has as many rows as the parameter, and in the same places (sums of rows,
            a column); None: the shape of the parameter's rows.
    """

    layout: BucketLayout
    index: int
    partition: Partition | None = None
    inner: tuple[int, ...] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSplit:
        return self

    @property
    def name(self) -> str:
        return self.layout.slots[self.index].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.part_shape if self.partition is None or self.inner is not None else self.partition.shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part that the bucket holds."""
        return (*self.leading, *self.row_shape)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row of the part that the bucket holds. A scalar is one row."""
        return self._own_row_shape if self.inner is None else self.inner

    @property
    def _own_row_shape(self) -> tuple[int, ...]:
        return self.layout.slots[self.index].param_shape[self.row_dims :]

    @property
    def holds_whole_rows(self) -> bool:
        """Whether the bucket holds all of the parameter."""
        return self.part_shape == self.shape

    def with_inner(self, inner: tuple[int, ...]) -> RowSplit:
        """Return the split of a tensor with the same rows, whose rows have the shape ``inner``."""
        if inner == self.row_shape:
            return self
        return replace(self, inner=None if inner == self._own_row_shape else inner)

    def with_local(self, shape: Sequence[int], rank: int) -> RowSplit:
        """Return the split of a tensor with the same rows, of which ``rank`` holds ``shape``; see
        :meth:`local_shape`."""
        return self.with_inner(tuple(shape[len(self.local_shape(rank)) - len(self.row_shape) :]))

    @property
    def as_pairs(self) -> RowSplit:
        """The split of ``torch.view_as_real`` of a complex tensor."""
        return self.with_inner((*self.row_shape, 2))

    def has_rows_of(self, other: RowSplit) -> bool:
        """Whether each rank holds the same rows, whatever their shape."""
        mine, its = (self.index, self.partition), (other.index, other.partition)
        return mine == its and (self.layout is other.layout or self.layout == other.layout)

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the dimensions whose indices are rows."""
        return self.layout.slots[self.index].param_shape[: self.row_dims]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this part begins in the whole parameter, by dimension."""
        return (0,) * len(self.shape) if self.partition is None or self.inner is not None else self.partition.offsets

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of ranks, other than the data-parallel ones, that hold other parts."""
        return () if self.partition is None else self.partition.groups

    @property
    def count(self) -> int:
        """Number of parameters that reductions cover, including an expert's counterparts on other ranks."""
        return 1 if self.partition is None else self.partition.count

    @property
    def number(self) -> int:
        """This rank's number among these parameters."""
        return 0 if self.partition is None else self.partition.number

    def part_of(self, value: Tensor) -> Tensor:
        """Reduce what broadcasts with the whole parameter to what broadcasts with the bucket's part of it; a view."""
        return value if self.partition is None or self.inner is not None else self.partition.take(value)

    def assemble(self, part: Tensor) -> Tensor:
        """Return the whole parameter from the parts of all ranks. A collective over :attr:`groups`."""
        return part if self.partition is None else self.partition.assemble(part)

    @property
    def row_dims(self) -> int:
        """Number of leading dimensions whose indices, taken together, are rows; 0 for a scalar."""
        slot = self.layout.slots[self.index]
        return min(slot.row_dims, len(slot.param_shape))

    def rows(self, rank: int) -> range:
        """Return the rows of ``rank``, counted in the part that the bucket holds."""
        return self.layout.rows(self.index, rank)

    def elements(self, rank: int) -> range:
        """Return the elements of ``rank``, counted in the part that the bucket holds."""
        rows, row_numel = self.rows(rank), math.prod(self.row_shape)
        return range(rows.start * row_numel, rows.stop * row_numel)

    def placement(self, rank: int) -> compat.RowShard:
        """Return the placement of the rows of ``rank``, counted in the whole parameter if they are indices of
        dimension 0."""
        rows, first = self.rows(rank), self.offsets[0] if self.shape and self.row_dims == 1 else 0
        return compat.RowShard(range(rows.start + first, rows.stop + first), self.row_dims, self.name)

    def boxes(self, rank: int) -> list[RowBox]:
        """Return the boxes of the whole parameter that the rows of ``rank`` are, in order.

        One if rows are indices of dimension 0, and at most three for rows of matrices: the end of a matrix, whole
        matrices, and the start of a matrix. None if there are no rows.
        """
        rows = self.rows(rank)
        found, at = [], 0
        for starts, sizes in _boxes_of_rows(rows.start, rows.stop, self.leading):
            offsets = (*starts, *([0] * len(self.row_shape)))
            its = tuple(o + first for o, first in zip(offsets, self.offsets, strict=True))
            found.append(RowBox(its, (*sizes, *self.row_shape), range(at, at := at + math.prod(sizes))))
        return found

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what ``rank`` holds. A scalar's owner holds a scalar, other ranks an empty vector."""
        count = len(self.rows(rank))
        return (*(() if count and not self.row_dims else (count,)), *self.row_shape)


class RowBox(NamedTuple):
    """A box of a parameter, all of which one rank holds."""

    offsets: tuple[int, ...]
    """Where it begins in the whole parameter, by dimension."""
    shape: tuple[int, ...]
    rows: range
    """Which of the rank's rows it is, counted from its first one."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the whole parameter, one per dimension."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))

    def of(self, local: Tensor) -> Tensor:
        """Return the box as a view of the rank's rows, ``[n, *row_shape]``."""
        return local if local.shape == self.shape else local[self.rows.start : self.rows.stop].view(self.shape)


def _boxes_of_rows(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut ``range(start, stop)`` of the indices of ``shape`` into boxes; yield where each begins, and its sizes."""
    if not shape and start < stop:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        index, first = divmod(start, inner)
        if first or stop - start < inner:  # a part of one index
            end = min(stop, (index + 1) * inner)
            for offsets, sizes in _boxes_of_rows(first, end - index * inner, shape[1:]):
                yield (index, *offsets), (1, *sizes)
        else:
            count = (stop - start) // inner
            end = start + count * inner
            yield (index, *([0] * (len(shape) - 1))), (count, *shape[1:])
        start = end


@functools.lru_cache(maxsize=4096)  # of shapes of parameters, at every step
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    return tuple(strides)
