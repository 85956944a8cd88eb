from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# One thread per rank, also for libraries that read the environment when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MFSDP_VERIFY", "each")  # in the processes of tests too: they get this environment

import torch
import torch.distributed as dist
from pool import Pools

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.load_profile("default")


@pytest.fixture(scope="session")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(tmp_path_factory.mktemp("inductor"))
    pools = Pools({"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"})
    yield pools
    pools.close()


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as one rank of many that do not exist: collectives return at once, with undefined content."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = getattr(request, "param", 4)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield world_size
    dist.destroy_process_group()
    torch._dynamo.reset()
