"""Ranks agree on what their compiled graphs do before any collective runs. Harmless differences are allowed."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import short_mesh, values
from parity import AOT_EAGER, raises_everywhere
from pool import on_ranks
from test_order import Branches, count_agreements
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model

PATIENCE = 30.0
"""Seconds until the last rank must have its error."""


def build(factory: Any = Branches, mesh: Any = None, **arguments: Any) -> Any:
    """Shard a model, by default over the default group, whose timeout covers compilation on one rank."""
    return fully_shard_model(parity.build(factory), mesh, fsdp_unit_modules=[zoo.Block], **arguments)


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER, **options})


@contextlib.contextmanager
def refused(*fragments: str) -> Any:
    begun = time.monotonic()
    with raises_everywhere(RuntimeError, *fragments):
        yield
    assert time.monotonic() - begun < PATIENCE


@pytest.mark.long
@on_ranks(2, 4, timeout=90)
def test_options_of_its_own_on_one_rank() -> None:
    model = build()
    before = values(model)
    last = dist.get_world_size() - 1
    call = compiled(model, prefetch=0) if dist.get_rank() == last else compiled(model)
    with refused(f"rank {last} of {last + 1} differs from rank 0", "[options inner='aot_eager']", "prefetch=0"):
        call(torch.randn(2, 8)).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    model.reset()
    torch._dynamo.reset()
    compiled(model)(torch.randn(2, 8)).backward()


@pytest.mark.long
@on_ranks(2, timeout=90)
def test_another_order_under_the_same_options() -> None:
    """If one rank compiles without a block, all ranks raise."""
    model = build(mesh=short_mesh())
    call = compiled(model)
    x = torch.randn(2, 8)
    with refused("First difference: rank 0 has [bucket blocks.1]", "rank 1 has [bucket blocks.2]"):
        call(x, without=(1,) if dist.get_rank() == 1 else ()).backward()
    model.reset()
    call(x).backward()


@pytest.mark.long
@on_ranks(2, timeout=90)
def test_a_backward_of_its_own() -> None:
    """If forwards are equal and one rank's backward reduces less, all ranks raise and use no gradient."""
    model = build(mesh=short_mesh())
    call = compiled(model)
    with refused("All ranks must go through the model in the same way"):
        call(torch.randn(2, 8), stop=1 if dist.get_rank() == 1 else -1).backward()
    assert all(param.grad is None for param in model.parameters())
    model.reset()
    call(torch.randn(2, 8)).backward()


@pytest.mark.long
@on_ranks(2, timeout=90)
def test_batches_of_other_lengths() -> None:
    """Ranks may compile for different lengths, and at different times, because the collectives are the same."""
    model = build()
    call = compiled(model)
    lengths = [(2, 2), (2, 3), (2, 7), (5, 2), (1, 2), (2, 2)]
    alone = parity.build(Branches)
    for step, each in enumerate(lengths):
        asked = count_agreements(model) if step == 2 else []
        data = [torch.randn(length, 8, generator=torch.Generator().manual_seed(step)) for length in each]
        call(data[dist.get_rank()]).backward()
        sum(alone(x) / 2 for x in data).backward()  # type: ignore[union-attr]
    assert not asked, "lengths are no reason to ask"
    for param, expected in zip(model.parameters(), alone.parameters(), strict=True):
        # Sums of six steps over two ranks are in another order.
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)


class Masked(nn.Module):
    """Recompiles when a flag changes, with the same collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.block = zoo.Block(8)

    def forward(self, x: Tensor, scale: str = "one") -> Tensor:
        x = self.block(x)
        return (x * 2 if scale == "two" else x).pow(2).mean()


@on_ranks(2, timeout=90)
def test_one_rank_compiles_again() -> None:
    model = build(Masked)
    call = compiled(model)
    x = torch.randn(2, 8)
    call(x, "one").backward()
    call(x, "one").backward()
    asked = count_agreements(model)
    call(x, "two" if dist.get_rank() == 1 else "one").backward()
    assert len(model.sharded.compiled_graphs) == 1 + dist.get_rank()
    call(x, "one").backward()
    assert not asked


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_one_rank_finds_its_code_in_the_cache(tmp_path: Path) -> None:
    """One rank may find its code in the cache while the other compiles, because cached code contains the schedule."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    def run() -> dict[str, int]:
        from torch._dynamo.utils import counters

        torch._dynamo.reset()
        counters.clear()
        model = build(Masked)
        asked = count_agreements(model)
        torch.compile(model, backend="mfsdp")(torch.randn(2, 8)).backward()
        assert any("gather" in line for line in asked)
        assert any("reduce" in line for line in asked)
        return dict(counters["aot_autograd"])

    rank = dist.get_rank()
    with functorch_config.patch(enable_autograd_cache=True), inductor_config.patch(fx_graph_cache=True):
        for attempt in range(2):
            folder = tmp_path / f"rank{rank}" / str(attempt if rank == 1 else 0)
            before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
            try:
                counts = run()
            finally:
                if before is None:
                    del os.environ["TORCHINDUCTOR_CACHE_DIR"]
                else:
                    os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
            hit = attempt == 1 and rank == 0
            assert counts.get("autograd_cache_hit", 0) == hit


@on_ranks(2, 4, timeout=60)
def test_another_version_of_torch() -> None:
    version = torch.__version__
    if dist.get_rank() == 1:
        torch.__version__ = "2.99.0"
    try:
        with refused(f"rank 1 of {dist.get_world_size()} differs from rank 0", f"[torch {version}]", "[torch 2.99.0]"):
            build()
    finally:
        torch.__version__ = version
    build()(torch.randn(2, 8)).backward()
