"""Which parameters compiled backwards have used on any rank.

Ranks may run different graphs with the same collectives: one drops a condition, and uses an embedding in its place. A
parameter that only other ranks have used has a gradient here too, and one that no rank has used has None.

    rank 0   uses w, v       begin                    reduce   w.grad, v.grad
    rank 1   uses w          begin, writes "not v"    reduce   reads: rank 0 has written nothing, so it has used v

A rank that uses every parameter of a bucket neither writes nor asks: all of them have a gradient. A rank that leaves
one out writes so before its graph starts a collective, and asks once the bucket is reduced. Every rank has contributed
to the reduction, so it has written by then what it leaves out, if anything. If all ranks leave out the same, which
their count says, nothing else is read.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import torch
import torch.distributed as dist

from .. import compat
from ..digests import digest
from ..memory import gradients
from ..memory.bucket import Bucket
from ..ranks.agreement import has_others
from ..ranks.coordinator import Coordinator


class GraphUse:
    """What the graphs of one model's backwards leave out, on this rank and, if asked, on the others.

    Args:
        coordinator: Knows the model's name, and the epoch in which ranks count the same.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._epoch = 0
        self._begun: dict[Bucket, int] = {}
        """Number of graphs of this epoch that have reduced each bucket."""
        self._open: dict[Bucket, list[tuple[str, str]]] = {}
        """What was written since each bucket was settled: the place in the store, and the digest of what it says."""
        self._read: dict[Bucket, list[tuple[str, str]]] = {}
        """The same of before: the other ranks have read it when the bucket has been reduced once more."""

    def begin(self, bucket: Bucket, used: Collection[int]) -> None:
        """Record that a graph is about to compute gradients of the parameters ``used``, by index, of a bucket."""
        group = bucket.topology.every
        if not has_others(compat.process_group(group.name)):
            return
        if self._epoch != (epoch := self._coordinator.order.epoch):
            self._epoch, self._begun = epoch, {}
        number = self._begun[bucket] = self._begun.get(bucket, 0) + 1
        left_out = sorted(set(range(len(bucket.params))) - set(used))
        if not left_out:
            return
        store, place = compat.default_store(), f"mfsdp/use/{group.name}/{self._coordinator.name}/{bucket.plan.name}"
        place, text = f"{place}/{epoch}/{number}", json.dumps(left_out)
        store.set(f"{place}/of/{dist.get_rank()}", text)
        store.add(f"{place}/{digest([text])}", 1)
        self._open.setdefault(bucket, []).append((place, digest([text])))

    def levels(self, bucket: Bucket) -> list[int] | None:
        """Return the largest :func:`~..memory.gradients.levels_of_use` of any rank, for a bucket that was reduced.

        None: this rank knows without asking.
        """
        opened = self._open.pop(bucket, [])
        levels = gradients.levels_of_use(bucket)
        if not opened or all(level == 2 for level in levels):
            self._read.setdefault(bucket, []).extend(opened)
            return None
        if bucket.device.type == "cuda":
            torch.cuda.current_stream(bucket.device).synchronize()  # until the reduction is complete
        store, ranks = (
            compat.default_store(),
            dist.get_process_group_ranks(compat.process_group(bucket.topology.every.name)),
        )
        for place, mine in opened:
            if store.add(f"{place}/{mine}", 0) == len(ranks):
                continue
            for rank in ranks:
                key = f"{place}/of/{rank}"
                left_out = json.loads(store.get(key)) if store.check([key]) else ()
                levels = [level if index in left_out else 2 for index, level in enumerate(levels)]
        for place, mine in self._read.get(bucket, ()):
            store.delete_key(f"{place}/of/{dist.get_rank()}")
            store.delete_key(f"{place}/{mine}")
        self._read[bucket] = opened
        return levels

    def forget(self) -> None:
        """Forget all backwards, as gradients are dropped."""
        self._open.clear()
        self._read.clear()
