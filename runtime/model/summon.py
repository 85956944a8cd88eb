"""Temporary restoration of the unsharded module of a sharded model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat
from ..digests import value_digest
from ..eager.modules import as_written
from ..formats.packed import PACKED, PackedWeight
from ..geometry.partition import local_part
from ..memory.bucket import Bucket
from ..ranks import compared
from ..ranks.agreement import agree

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
        ValueError: At the end: a parameter was replaced by one of another shape, or names that share one have
            different ones now, or a packed weight was replaced. The shards keep their previous values.
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
            (bucket, compared.line(f"values of {split.name}", f"{value_digest(part)} {part.requires_grad}"))
            for bucket, parts in changed
            for split, part in zip(bucket.splits, parts, strict=True)
        ]

    try:
        try:
            with as_written(module), _packed(module):
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
        for param, value in zip(bucket.params, values, strict=True):
            if param.requires_grad != value.requires_grad:
                param.requires_grad_(value.requires_grad)


@contextlib.contextmanager
def _packed(module: nn.Module) -> Iterator[None]:
    """Context in which modules have the packed weights of their libraries in place of the parts that are sharded.

    Raises:
        ValueError: At the end: one was replaced, or has got other memory.
    """
    holders = {each: vars(each)[PACKED] for each in module.modules() if PACKED in vars(each)}
    before = {each: (dict(each._parameters), dict(each._buffers)) for each in holders}
    for each, weights in holders.items():
        for attribute, packed in weights.items():
            held = packed.tensors(each, _parts(packed, before[each][0]))
            for name in (*(part.attribute for part in packed.parts), *packed.constants):
                (each._buffers if name in each._buffers else each._parameters).pop(name)
            each._parameters[attribute] = packed.weight.wrap(held)
    try:
        yield
        for each, weights in holders.items():
            for attribute, packed in weights.items():
                held = [part.of(of) for part, of in zip(packed.parts, _parts(packed, before[each][0]), strict=True)]
                if not packed.lies_in(held, each._parameters.get(attribute)):
                    prefix = next(name for name, other in module.named_modules() if other is each)
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    raise ValueError(
                        f"Parameter {name!r}, a weight of 4 bits, was replaced in summon_full_params, but "
                        "its parts are in buckets. Write to its memory in place, or replace it before "
                        "fully_shard_model. Nothing was written back."
                    )
    finally:
        for each, (params, buffers) in before.items():
            for current, earlier in ((each._parameters, params), (each._buffers, buffers)):
                came = {name: tensor for name, tensor in current.items() if name not in earlier}
                current.clear()
                current.update(earlier | came)


def _parts(packed: PackedWeight, params: Mapping[str, Tensor | None]) -> list[Tensor]:
    return [params[part.attribute] for part in packed.parts]  # type: ignore[misc]


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
        held: list[tuple[str, Tensor]] = []
        for location in locations:
            if (holder := location.holder()) is None:
                continue
            param = holder._parameters.get(location.attribute)
            if param is None or local_part(param).shape != split.part_shape:
                shape = "nothing" if param is None else f"a tensor of shape {tuple(param.shape)}"
                raise ValueError(
                    f"Parameter {location.name!r} was changed to {shape} in summon_full_params, but it is part of a "
                    f"bucket and must keep its shape {split.shape}. Copy values into it in place."
                )
            if not held or param is not held[0][1]:
                held.append((location.name, param))
        for name, param in held[1:]:
            if value_digest(local_part(param)) != value_digest(local_part(held[0][1])):
                raise ValueError(
                    f"Parameters {held[0][0]!r} and {name!r} are one, and were given different values in "
                    "summon_full_params. Give them the same, or shard the model after they have become two parameters. "
                    "Nothing was written back."
                )
        param = held[0][1] if held else given
        found.append(local_part(param).detach().requires_grad_(param.requires_grad))
    return found
