from __future__ import annotations

import atexit
import gc
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# One thread per rank, also for libraries that read the environment when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# torch's stores resolve the names of addresses whenever a process connects. If a name server loses the query, this
# takes ten seconds, during which the store answers nobody.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A separate cache of compiled code for this run. A killed run may leave half-written code, which another run would load
# and crash. Inductor sets this variable when it is first asked, so set it before that.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="mfsdp-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
# Each run draws different random models and verifier mutants. A failure prints its seed, which reproduces it.
os.environ.setdefault("MFSDP_SEED", str(secrets.randbits(32)))
os.environ.setdefault("MFSDP_PROGRESS", "0")  # tests read what programs print
os.environ.setdefault("MFSDP_VERIFY", "each")  # test processes inherit this environment

import torch
import torch.distributed as dist
from pool import FOLDERS, Pools, cpu_seconds

sys.path += [folder for folder in FOLDERS if folder not in sys.path]  # tests import from those of other folders
torch.set_num_threads(1)
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_long(items, is_whole=not any("::" in given for given in config.args))
    files = {item.path for item in items if _alone(item) and item.get_closest_marker("slow")}
    for item in items:
        # With --dist loadgroup, what the tests of a file share (traced models, fixtures) is created once.
        if _alone(item) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _turn(item, files))


def _mark_long(items: list[pytest.Item], is_whole: bool) -> None:
    """Mark combinations of parameters as ``long``, where tests are marked ``long_if`` or ``long_unless``.

    These marks have patterns of a test's id, as in brackets. A pattern that matches nothing is an error.
    """
    unmatched = dict[tuple[str, str], bool]()
    for item in items:
        for mark in (mark for name in ("long_if", "long_unless") for mark in item.iter_markers(name)):
            matches = {pattern: fnmatchcase(item.callspec.id, pattern) for pattern in mark.args}  # type: ignore[attr-defined]
            if any(matches.values()) == (mark.name == "long_if"):
                item.add_marker(pytest.mark.long)
            for pattern, is_match in matches.items():
                key = (item.nodeid.partition("[")[0], pattern)
                unmatched[key] = unmatched.get(key, True) and not is_match
    if is_whole and (stale := [f"{test}: {pattern}" for (test, pattern), left in unmatched.items() if left]):
        raise pytest.UsageError(f"patterns of long_if and long_unless that match no parameters: {stale}")


def _alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("processes") is None


def _turn(item: pytest.Item, slow: set[Path]) -> tuple[int, int]:
    """Sort key: longest first.

    Whole files come first, those that compile in front. Tests on ranks follow one by one, which balances the workers.
    """
    if _alone(item):
        return (0 if item.path in slow else 1), 0
    callspec = getattr(item, "callspec", None)
    return 2, -callspec.params.get("world_size", 2) if callspec is not None else 0


_POOLS = Pools()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    yield _POOLS
    _POOLS.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        # xdist 3.8 appends a test's group where pytest 9.2 does not look for it. Without this, no group would stay
        # together.
        if (named := getattr(item, "_nodeid", item.nodeid)) != item.nodeid:
            item._id = type(item._id).parse(named)  # type: ignore[attr-defined]
    _keep()


def _keep() -> None:
    """Exempt modules, tests and caches from garbage collection, so that it does not scan them each time."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", type=int, default=None, help="show so many tests that took most CPU seconds; 0: all")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Measure the CPU time of a test: here, on its ranks, and in programs that it started and waited for."""
    item.stash[_BEFORE] = _used()
    found = yield
    if nextitem is None or nextitem.path != item.path:
        _keep()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "teardown":
        report.user_properties.append(("cpu", _used() - item.stash[_BEFORE]))
    return report


_BEFORE = pytest.StashKey[float]()


def _used() -> float:
    return cpu_seconds() + _POOLS.cpu_seconds


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if (most := config.getoption("--cpu")) is None:
        return
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    seconds = {
        report.nodeid: dict(report.user_properties)["cpu"]
        for report in reports
        if getattr(report, "when", None) == "teardown" and "cpu" in dict(report.user_properties)
    }
    terminalreporter.section(f"{sum(seconds.values()):.0f} CPU seconds in {len(seconds)} tests")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[: most or None]:
        terminalreporter.line(f"{seconds[name]:8.2f}s {name}")


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """Make this process one rank of many fake ones: collectives return at once, with undefined content."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = getattr(request, "param", 4)
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    yield world_size
    dist.destroy_process_group()
    torch._dynamo.reset()
