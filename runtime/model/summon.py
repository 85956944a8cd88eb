"""Temporary restoration of the unsharded module of a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ..eager.modules import as_written
from ..geometry.partition import local_part
from ..memory.bucket import Bucket


@contextlib.contextmanager
def whole_parameters(buckets: Sequence[Bucket], module: nn.Module, writeback: bool) -> Iterator[None]:
    """Put whole parameters into the modules, in the dtype of the shards, and disable windows and parameter properties.

    Args:
        buckets: Buckets of a sharded model.
        module: The module that it shards.
        writeback: Whether to copy this rank's rows of the parameters back at the end.

    Raises:
        ValueError: At the end: a parameter was replaced by one of another shape. The shards keep their previous values.
    """
    wholes = {bucket: _wholes(bucket) for bucket in buckets}
    for bucket, params in wholes.items():
        for index, holder, attribute in bucket.holders():
            holder._parameters[attribute] = params[index]
    try:
        with as_written(module):
            yield
        changed = [(bucket, _now(bucket, params)) for bucket, params in wholes.items()] if writeback else []
    finally:
        for bucket in wholes:
            for index, holder, attribute in bucket.holders():
                holder._parameters[attribute] = bucket.params[index]
    for bucket, values in changed:
        bucket.take_rows_of(values)


@torch.no_grad()
def _wholes(bucket: Bucket) -> list[nn.Parameter]:
    found = []
    for param, split, part in zip(bucket.params, bucket.splits, bucket.gather_shards(), strict=True):
        partition = split.partition
        whole = part if partition is None or partition.bare else partition.of_part(part)
        found.append(nn.Parameter(whole, requires_grad=param.requires_grad))
    return found


def _now(bucket: Bucket, before: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the parameters that the modules have now, as the parts that the bucket holds.

    Args:
        before: The parameters that they had. Those of modules that no longer exist are the same.
    """
    found = []
    for split, locations, given in zip(bucket.splits, bucket.locations, before, strict=True):
        holder = locations[0].holder()
        param = given if holder is None else holder._parameters.get(locations[0].attribute)
        if param is None or local_part(param).shape != split.part_shape:
            shape = "nothing" if param is None else f"a tensor of shape {tuple(param.shape)}"
            raise ValueError(
                f"Parameter {locations[0].name!r} was changed to {shape} in summon_full_params, but it is part of a "
                f"bucket and must keep its shape {split.shape}. Copy values into it in place."
            )
        found.append(local_part(param))
    return found
