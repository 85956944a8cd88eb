"""Pickles of sharded tensors: ``torch.save(model.state_dict())`` on each rank, and ``torch.load`` of the same file
there.

A pickle holds this rank's rows, and which rows of which parameter they are. It is read where a model has the same
parameter with the same rows: in the same place of a bucket of the same layout, which depends on the number of ranks.
The process groups are those of that model. Reading it calls nothing but :func:`rows_of_one_rank`, so
``weights_only=True`` allows it. A process that has not imported this package gets torch's error, which has the name of
that function.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..program_lines import warn
from .bucket import Bucket, all_buckets
from .tensor import RowShardedTensor

WHOLE = (
    "For whole weights, call mfsdp_compile.checkpoint.full_state_dict(model) on every rank, and save what rank 0 gets; "
    "Checkpoints.save and torch.distributed.checkpoint write files that any number of ranks can read."
)
"""What to save instead."""


def _where(bucket: Bucket, index: int) -> tuple[Any, ...]:
    split = bucket.splits[index]
    return _key(split, bucket.topology.shard)


def _key(split: Any, shard: int) -> tuple[Any, ...]:
    return split.layout.fingerprint, split.index, shard, split.offsets, split.number


def _reduce(tensor: RowShardedTensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    split, local = tensor.row_split, tensor._local_tensor
    if local.untyped_storage().nbytes() > split.layout.shard_numel * local.itemsize:
        local = local.clone()  # a part of a gathered bucket, which would be written whole
    key = _key(replace(split, inner=None), tensor.topology.shard)
    is_param = isinstance(tensor, nn.Parameter)
    if split.layout.world_size > 1:
        warn(
            "A sharded tensor is pickled, by torch.save for example. The file gets the rows of this rank alone (shard "
            f"{tensor.topology.shard} of {split.layout.world_size}), which only the same rank of a model that is "
            f"sharded alike can read. {WHOLE}",
            by=None,
        )
    return rows_of_one_rank, (local, split.name, split.layout.world_size, key, tensor.requires_grad, is_param)


copyreg.pickle(RowShardedTensor, _reduce)


def rows_of_one_rank(
    local: Tensor, name: str, shards: int, key: tuple[Any, ...], requires_grad: bool, is_param: bool
) -> RowShardedTensor:
    """Return the tensor that was pickled.

    Args:
        local: The rows.
        name: Name of the parameter.
        shards: Number of ranks that it was sharded over.
        key: Which rows they are.

    Raises:
        RuntimeError: No model in this process has a parameter with these rows.
    """
    named = []
    for bucket in all_buckets:
        for index, split in enumerate(bucket.splits):
            if _where(bucket, index) == key:
                split = split.with_local(local.shape, bucket.topology.shard)
                rows = RowShardedTensor.wrap(local, split, bucket.topology, requires_grad and not is_param)
                if not is_param:
                    return rows
                param: Any = nn.Parameter(rows, requires_grad=requires_grad)
                return param
            if split.name == name:
                named.append((bucket, split))
    if not named:
        why = "no model that is sharded in this process has a parameter of this name. Shard the model before reading"
    else:
        bucket, split = named[0]
        here, mine = split.layout.world_size, bucket.topology.shard
        if here != shards:
            why = f"here it is sharded over {here}"
        elif mine != key[2]:
            why = f"this rank holds shard {mine}: each rank reads its own file"
        else:
            why = "here it is sharded differently (other parameters in its unit, shapes or settings)"
    raise RuntimeError(
        f"{name!r} was pickled as shard {key[2]} of {shards} ranks, but {why}. The file has the rows of one rank. "
        f"{WHOLE}"
    )


rebuild = rows_of_one_rank  # the name in files of earlier versions
torch.serialization.add_safe_globals([rows_of_one_rank, (rows_of_one_rank, f"{__name__}.rebuild")])
