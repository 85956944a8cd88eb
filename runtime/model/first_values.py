"""Values of parameters before the first forward: the same on all ranks, and not missing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import compat
from ..digests import value_digest
from ..geometry.partition import local_part
from ..geometry.topology import Topology
from ..memory.bucket import Bucket
from ..memory.tensor import NOTED_VALUE, RowShardedTensor
from ..ranks import compared
from ..ranks.agreement import TIMEOUT, agree, conclude, has_others

TOPIC = "fully_shard"


def note(params: Iterable[nn.Parameter]) -> None:
    """Note digests of whole parameters, so that ranks can compare them when they hold only rows.

    What is overwritten as a whole loses its note.
    """
    for param in params:
        if not param.is_meta and not isinstance(param, RowShardedTensor):
            vars(param)[NOTED_VALUE] = value_digest(local_part(param))


def compare(group: dist.ProcessGroup, topology: Topology, buckets: Sequence[Bucket]) -> None:
    """Raise RuntimeError on every rank of ``group`` if parameters differ between ranks.

    Ranks that share parameters compare what was noted on all of them: one rank alone may load what it has already, as
    under torchft. Replicas (HSDP) may have been given values one from another since, in ways that no note shows. So
    they compare the rows that they hold now, and not what was noted.
    """
    if not has_others(group):
        return
    inner = dist.get_process_group_ranks(compat.process_group(topology.inner.name))
    counted = _noted_everywhere(group, inner, buckets)
    if topology.outer is None:
        agree(group, TOPIC, lambda: _noted(buckets, counted))
        return
    outer = dist.get_process_group_ranks(compat.process_group(topology.outer.name))
    agree(group, TOPIC, list, within=lambda: (inner, _noted(buckets, counted)))
    agree(group, TOPIC, list, within=lambda: (outer, _held(buckets)))


def _noted_everywhere(group: dist.ProcessGroup, inner: Sequence[int], buckets: Sequence[Bucket]) -> Collection[str]:
    """Return the names of the parameters of which all ranks of ``inner`` have a note. A collective over ``group``."""
    names = sorted(split.name for bucket in buckets for split in bucket.splits)
    noted = {name for bucket in buckets for name in bucket.params[0].backing.noted}
    mine = hex(sum(1 << i for i, name in enumerate(names) if name in noted))

    def combine(offers: Sequence[Any]) -> dict[str, str]:
        common: dict[str, int] = {}
        for party, mask in offers:
            common[party] = common.get(party, -1) & int(mask, 16)
        return {party: hex(mask) for party, mask in common.items()}

    party = str(min(inner))
    found = int(conclude(group, TOPIC, [], [party, mine], combine, TIMEOUT)[party], 16)
    return {name for i, name in enumerate(names) if found >> i & 1}


def _noted(buckets: Sequence[Bucket], names: Collection[str]) -> list[str]:
    """Return what was noted, one line for each of the parameters of these names."""
    noted = {name: digest for bucket in buckets for name, digest in bucket.params[0].backing.noted.items()}
    return [_line(name, noted[name]) for name in sorted(names)]


@torch.no_grad()
def _held(buckets: Sequence[Bucket]) -> list[str]:
    """Describe the rows that this rank holds, one line per parameter."""
    return [_line(name, value_digest(rows)) for name, rows in _shards(buckets)]


def _line(name: str, digest: str) -> str:
    return compared.line(f"values of {name}", digest)


def _shards(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names of parameters, with this rank's rows."""
    for bucket in buckets:
        for split, param in zip(bucket.splits, bucket.params, strict=True):
            yield split.name, local_part(param)


@torch.no_grad()
def refuse_missing(buckets: Sequence[Bucket]) -> list[str]:
    """Return nothing. Raise RuntimeError if parameters are as they came from the meta device."""
    missing = [name for name, rows in _shards(buckets) if rows.numel() and rows.to(torch.float32).isnan().all()]
    if missing:
        names = ", ".join(map(repr, missing[:3])) + (", ..." if len(missing) > 3 else "")
        raise RuntimeError(
            f"{len(missing)} parameters from the meta device have no values yet: {names}. Give them values before the "
            "first forward: with load_state_dict, a checkpoint, or reset_parameters() of each module."
        )
    return []
