"""Every collective of a step has a name in a trace of torch's profiler."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch.profiler import ProfilerActivity, profile

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime.ranks import profiling


@pytest.mark.long_unless("*-eager-optim")
@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        (mode, strategy)
        for mode in (EAGER, AOT_EAGER, "inductor")
        for strategy in ("optim_grads_params", "optim", "HSDP optim_grads_params")
    ],
)
@on_ranks(4)
def test_collectives_have_names(mode: str, strategy: str) -> None:
    data = parity.batches(3)[:, dist.get_rank() % 2]
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], **mesh_arguments(strategy))
    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step(batch: torch.Tensor) -> None:
        call(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(data[0])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step(data[1])
        # Gloo's threads must have released the profiler's state when it stops. This is so without this package too.
        model.start_param_sync(force_sync=True)
    names = [event.name for event in profiled.events() if event.name.startswith("mfsdp ")]
    collectives = [
        event.name
        for event in profiled.events()
        if event.name in ("_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter_tensor")
        or event.name.startswith("_c10d_functional::all_gather_into_tensor")
    ]
    assert names
    assert len(names) == len(collectives), (names, Counter(collectives))
    assert {name.split(",")[0] for name in names} <= {"mfsdp step 1", "mfsdp step 2"}  # residents are gathered after it
    assert len(set(names)) == len(names)
    for bucket in model.sharded.buckets:
        assert any(re.search(rf"reduce {re.escape(bucket.plan.name)}\b", name) for name in names), names
    step(data[2])
    assert profiling.interception.library is None  # torch's operators are unchanged when no profiler runs
