from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# One thread per rank, also for libraries that read the environment when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Compiled code of this run alone: what a run that was killed has half written, another would load, and crash anywhere.
# Inductor sets this itself when it is first asked, so before that.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="mfsdp-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("MFSDP_VERIFY", "each")  # in the processes of tests too: they get this environment

import torch
import torch.distributed as dist
from pool import Pools

torch.set_num_threads(1)
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.load_profile("default")


LONG = Path(__file__).with_name("long.txt")
"""Tests that ``make long`` runs and ``make test`` does not, besides those that are marked: minutes in all, of which shorter tests
show the same on fewer strategies, models or ranks. Whole functions, or with parameters."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long = set(LONG.read_text(encoding="utf-8").splitlines())
    found: set[str] = set()
    for item in items:
        name = item.nodeid.rpartition("tests/")[2]
        names = {name, name.partition("[")[0]} & long
        if names:
            item.add_marker(pytest.mark.long)
            found |= names
    if len(items) > _SOME and (stale := long - found):
        raise pytest.UsageError(f"{LONG} has {sorted(stale)}, which are no tests")


_SOME = 1000
"""Tests that are collected at least where all of them are."""


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools({name: os.environ[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "OMP_NUM_THREADS")})
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
