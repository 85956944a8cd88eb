"""Temporary restoration of the unsharded module of a sharded model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat
from ..eager.modules import as_written
from ..geometry.partition import local_part
from ..memory.bucket import Bucket
from ..ranks import compared
from ..ranks.agreement import agree
from ..ranks.digests import value_digest

Line = tuple[Bucket, str]
"""What a message shows of a bucket's parameter, with a digest of its values; see :func:`.compared.line`."""


@contextlib.contextmanager
def whole_parameters(buckets: Sequence[Bucket], module: nn.Module, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Put whole parameters into the modules, in the dtype of the shards, and disable windows and parameter properties.

    Args:
        buckets: Buckets of a sharded model.
        module: The module that it shards.
        group: All ranks, which compare the values at the end; then each copies its rows of them back. None: what was
            written is lost.

    Raises:
        ValueError: At the end: a parameter was replaced by one of another shape. The shards keep their previous values.
        RuntimeError: At the end: values are not the same on all ranks. The shards keep their previous values.
    """
    wholes = {bucket: _wholes(bucket) for bucket in buckets}
    for bucket, params in wholes.items():
        for index, holder, attribute in bucket.holders():
            holder._parameters[attribute] = params[index]
    changed: list[tuple[Bucket, list[Tensor]]] = []

    def written() -> list[Line]:
        changed.extend((bucket, _now(bucket, params)) for bucket, params in wholes.items())
        return [
            (bucket, compared.line(f"values of {split.name}", value_digest(part)))
            for bucket, parts in changed
            for split, part in zip(bucket.splits, parts, strict=True)
        ]

    try:
        try:
            with as_written(module):
                yield
        except Exception as error:  # other ranks must not keep what they have written
            if group is not None:
                _compare(group, functools.partial(_fail, error))
            raise
        if group is not None:
            _compare(group, written)
    finally:
        for bucket in wholes:
            for index, holder, attribute in bucket.holders():
                holder._parameters[attribute] = bucket.params[index]
    for bucket, values in changed:
        bucket.take_rows_of(values)


def _compare(group: dist.ProcessGroup, describe: Callable[[], Sequence[Line]]) -> None:
    """Raise on every rank unless each bucket's lines are the same on all ranks that share it, or if one rank fails."""
    lines: list[Line] = []

    def of_all() -> list[str]:
        lines.extend(describe())
        return [line for bucket, line in lines if not bucket.plan.is_expert]

    def of_experts() -> tuple[Sequence[int], Sequence[str]]:
        found = [(bucket, line) for bucket, line in lines if bucket.plan.is_expert]
        if not found:
            return (), ()
        holders = compat.process_group(found[0][0].topology.every.name)
        return dist.get_process_group_ranks(holders), [line for _, line in found]

    agree(group, "summon_full_params", of_all, within=of_experts)


def _fail(error: Exception) -> Sequence[Line]:
    raise error


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
