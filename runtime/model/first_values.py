"""Values of parameters before the first forward: the same on all ranks, and not missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..geometry.partition import local_part
from ..memory.bucket import Bucket
from ..memory.tensor import NOTED_VALUE, RowShardedTensor
from ..ranks import compared
from ..ranks.digests import value_digest


def note(params: Iterable[nn.Parameter]) -> None:
    """Note digests of whole parameters, so that ranks can compare them when they hold only rows.

    What is overwritten as a whole loses its note.
    """
    for param in params:
        if not param.is_meta and not isinstance(param, RowShardedTensor):
            vars(param)[NOTED_VALUE] = value_digest(local_part(param))


def noted(buckets: Sequence[Bucket]) -> list[str]:
    """Return what was noted, one line per parameter, for ranks to compare."""
    return [
        compared.line(f"values of {name}", digest)
        for bucket in buckets
        for name, digest in sorted(bucket.params[0].backing.noted.items())
    ]


def refuse_missing(buckets: Sequence[Bucket]) -> list[str]:
    """Return nothing. Raise RuntimeError if parameters are as they came from the meta device."""
    shards = [
        (split.name, param.detach().to_local())
        for bucket in buckets
        for split, param in zip(bucket.splits, bucket.params, strict=True)
    ]
    missing = [name for name, shard in shards if shard.numel() and shard.to(torch.float32).isnan().all()]
    if missing:
        names = ", ".join(map(repr, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise RuntimeError(
            f"{len(missing)} parameters from the meta device have no values yet: {names}. Give them values before the "
            "first forward: with load_state_dict, a checkpoint, or reset_parameters() of each module."
        )
    return []
