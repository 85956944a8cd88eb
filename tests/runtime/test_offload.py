"""Shards, gradients and optimizer state in host memory. On CPU both arenas are there, and copies between them are counted."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, assert_bitwise, assert_close, batches, build, shard, train_sharded
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from mfsdp_compile import MixedPrecisionPolicy, fsdp2, fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory import host

OFFLOADED = {"offload_policy": CPUOffloadPolicy()}
BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)


@dataclass
class Copies:
    """Copies between the arenas, and gathers, in the order in which they started."""

    order: list[str] = field(default_factory=list)
    bytes: dict[str, int] = field(default_factory=lambda: {"fetch": 0, "offload": 0})


@contextlib.contextmanager
def copies() -> Iterator[Copies]:
    """Record the copies that start inside, each of which must be to memory of its own."""
    found = Copies()
    kinds = {"fetch": host.fetch, "offload": host.offload}

    def counting(kind: str) -> Callable[..., Tensor]:
        def copied(source: Tensor, *args: Any) -> Tensor:
            target = kinds[kind](source, *args)
            assert target.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
            assert torch.equal(target, source)
            found.order.append(kind)
            found.bytes[kind] += source.numel() * source.element_size()
            return target

        return copied

    plain = compat.all_gather

    def gather(*args: Any) -> Tensor:
        found.order.append("gather")
        return plain(*args)

    with (
        mock.patch.object(host, "fetch", counting("fetch")),
        mock.patch.object(host, "offload", counting("offload")),
        mock.patch.object(compat, "all_gather", gather),
    ):
        yield found


MODELS = [zoo.Plain, zoo.Uneven, zoo.Tied, zoo.FrozenParameters, zoo.Unused, zoo.Checkpointed]


@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_same_numbers(model: type[nn.Module]) -> None:
    """Bitwise as without offload, eager and compiled."""
    data = batches(3)
    plain = train_sharded(model, EAGER, data)
    offloaded = [train_sharded(model, mode, data, sharding=OFFLOADED) for mode in (EAGER, AOT_EAGER)]
    for run in offloaded:
        assert_bitwise(plain, run)
    torch.compiler.reset()


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_accumulation_in_lower_precision(sync: bool) -> None:
    """Microbatches are summed on the host; what is gathered is cast on the device."""
    data = batches(2)
    options = {"precision": BF16, "microbatches": 2}

    def model() -> nn.Module:
        return zoo.Plain().bfloat16()

    plain, *offloaded = (
        train_sharded(model, mode, data.bfloat16(), **options, sharding=sharding | {"sync_model_each_microbatch": sync})
        for mode, sharding in ((EAGER, {}), (EAGER, OFFLOADED), (AOT_EAGER, OFFLOADED))
    )
    for run in offloaded:
        assert_bitwise(plain, run)
    torch.compiler.reset()


@on_ranks(2)
def test_inductor() -> None:
    """Inductor rounds as for the model without offload."""
    data = batches(2)
    plain, offloaded = (train_sharded(zoo.Plain, INDUCTOR, data, sharding=each) for each in ({}, OFFLOADED))
    assert_bitwise(plain, offloaded)
    torch.compiler.reset()


@on_ranks(2)
def test_same_as_fsdp2() -> None:
    """Bitwise as torch's own ``CPUOffloadPolicy``, for one unit of the model and for all."""
    data = batches(3)

    def trained(api: Any, chosen: Callable[[nn.Module], bool]) -> list[Tensor]:
        model: Any = build(zoo.Plain)
        for module in (*model.blocks, model):
            policy = CPUOffloadPolicy(pin_memory=False) if chosen(module) else OffloadPolicy()
            api.fully_shard(module, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for batch in data:
            model(batch[dist.get_rank()]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [*(param.full_tensor() for param in model.parameters()), getattr(norm, "full_tensor", lambda: norm)()]

    for chosen in (lambda _: True, lambda module: isinstance(module, zoo.Block)):
        *theirs, their_norm = trained(fsdp, chosen)
        *mine, norm = trained(fsdp2, chosen)
        torch.testing.assert_close(norm, their_norm)  # terms are summed in another order
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b)
