"""Many functional gathers in flight on gloo. With torch's own kernel, a process crashes within seconds."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from mfsdp_compile.runtime import compat


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_many_gathers_in_flight() -> None:
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    shards = [torch.full((8,), float(dist.get_rank() + i)) for i in range(8)]
    expected = [torch.cat([torch.full((8,), float(rank + i)) for rank in range(2)]) for i in range(8)]
    for _ in range(1000):
        started = [compat.all_gather(shard, 2, name) for shard in shards]
        for whole, wanted in zip(started, expected, strict=True):
            assert torch.equal(compat.wait_tensor(whole), wanted)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        compat.wait_tensor(compat.all_gather(shards[0], 2, name))
    names = {event.name for event in profiled.events()}
    assert "gloo:all_gather" in names, names
    assert not any("coalesced" in name for name in names), names
