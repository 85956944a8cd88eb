"""Tensors of torch_dist as they were before Megatron stacked and flattened them, read one layer at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.errors import CheckpointError

from . import keys
from .keys import Name, TensorPart

RESHAPED = "nd_reformulated_orig_global_shape"
"""Key in ``mcore_data`` for the shape of a tensor before it was flattened."""


def unflatten_blocks(flat: Tensor, shape: Sequence[int], grid: Sequence[int]) -> Tensor:
    """Return a tensor of ``shape`` from its flattened blocks. ``flat`` is [*grid, elements of a block].

    Example: a [2, 4] tensor in two blocks of [2, 2], like a row-parallel weight on two ranks ::

        >>> unflatten_blocks(torch.tensor([[[0, 1, 4, 5], [2, 3, 6, 7]]]), (2, 4), (1, 2))
        tensor([[0, 1, 2, 3],
                [4, 5, 6, 7]])
    """
    dims = len(shape)
    blocks = flat.reshape(*grid, *(n // g for n, g in zip(shape, grid, strict=True)))
    order = itertools.chain.from_iterable((i, dims + i) for i in range(dims))
    return blocks.permute(*order).reshape(*shape)


def flatten_blocks(tensor: Tensor, grid: Sequence[int]) -> Tensor:
    """Flatten the blocks of a tensor to [*grid, elements of a block]. The inverse of :func:`unflatten_blocks`."""
    dims = tensor.dim()
    cut = tensor.reshape(*itertools.chain.from_iterable((g, n // g) for n, g in zip(tensor.shape, grid, strict=True)))
    return cut.permute(*range(0, 2 * dims, 2), *range(1, 2 * dims, 2)).reshape(*grid, -1)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a torch_dist checkpoint.

    Args:
        key: Key in the checkpoint.
        name: The parameter, possibly stacked, and the state.
        shape: Shape before it was flattened, with layers and experts first.
        dtype: Dtype of the tensor.
        grid: Number of blocks along each dimension, if it was flattened.
    """

    key: str
    name: Name
    shape: tuple[int, ...]
    dtype: torch.dtype
    grid: tuple[int, ...] | None

    @classmethod
    def of(cls, reader: CheckpointReader, key: str) -> StoredTensor:
        """Describe a tensor of a checkpoint.

        Raises:
            CheckpointError: If the shapes before and after flattening contradict each other.
        """
        shape = original = tuple(reader.shape(key))
        grid = None
        if RESHAPED in reader.mcore_data(key):
            try:
                original = tuple(int(n) for n in reader.mcore_data(key)[RESHAPED])
                grid = keys.grid_of(original, shape)
            except (ValueError, TypeError) as error:
                raise CheckpointError(f"{reader.directory}: {key}: {error}") from error
        return cls(key, keys.parse_torch_dist(key), original, reader.dtype(key), grid)

    def read(self, reader: CheckpointReader, part: TensorPart) -> Tensor:
        """Read a part of the tensor, in the shape of its parameter."""
        depth = len(part.index)
        if self.grid is None:
            tensor = reader.tensor(self.key, part.index)
        elif self.grid[:depth] == self.shape[:depth]:  # layers and experts are stored separately
            tensor = reader.tensor(self.key, part.index)
            tensor = unflatten_blocks(tensor, self.shape[depth:], self.grid[depth:])
        else:
            tensor = unflatten_blocks(reader.tensor(self.key), self.shape, self.grid)[part.index]
        if part.half is None:
            return tensor
        rows = math.ceil(tensor.shape[0] / 2)
        return tensor[part.half * rows : (part.half + 1) * rows]
