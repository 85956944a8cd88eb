from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Deterministic products need it, and cuBLAS reads it when it is first used.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("MFSDP_VERIFY", "each")

import torch
import torch.distributed as dist


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="needs a GPU; make gpu runs them on fake ones"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Run this process alone, on NCCL."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    """Make this process rank 0 of eight. The others are fake: collectives return at once with undefined content."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.cuda.set_device(0)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield 8
    dist.destroy_process_group()
    torch._dynamo.reset()
