"""Agreement in large jobs, where each part of the ranks has its own store. Here parts have two of four ranks."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import raises_everywhere
from pool import on_ranks

from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks import agreement, rendezvous, store_tree
from mfsdp_compile.runtime.ranks.store_tree import Branch, branch_of

SOON = timedelta(seconds=20)

tests = itertools.count()


def in_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test with parts of two ranks.

    The ranks have met through one store before, and will again. The counts there and here are separate.
    """

    @functools.wraps(function)
    def test(**params: Any) -> None:
        root = dist.PrefixStore(f"in parts {next(tests)}", compat.default_store())
        with (
            mock.patch.object(compat, "default_store", return_value=root),
            mock.patch.object(store_tree, "PART", 2),
            mock.patch.object(store_tree, "_branches", {}),
            mock.patch.object(rendezvous, "SOON", timedelta(seconds=0.3)),
        ):
            function(**params)
            dist.barrier()

    return test


def agree(topic: str, lines: Sequence[str], timeout: timedelta = SOON, **more: Any) -> None:
    agreement.agree(dist.group.WORLD, topic, lambda: lines, timeout=timeout, **more)


@on_ranks(4, timeout=90)
@in_parts
def test_what_ranks_agree_on() -> None:
    rank = dist.get_rank()
    for _ in range(3):
        agree("something", ["same"])
    branch = branch_of(dist.group.WORLD.group_name, range(4))
    assert (branch.is_tree, branch.parts, branch.number, branch.keeper) == (True, 2, rank // 2, rank // 2 * 2)
    for other in (1, 2, 3):
        with raises_everywhere(RuntimeError, f"rank {other} of 4 differs from rank 0", "[mine]", "[yours]"):
            agree("another thing", ["yours" if rank == other else "mine"])
    with raises_everywhere(RuntimeError, "rank 2, 3 of 4 differs from rank 0"):  # a part in which all ranks agree
        agree("another thing", ["yours" if rank // 2 else "mine"])
    with raises_everywhere(RuntimeError, "rank 3 of 4 differs from rank 2"):
        both = [rank // 2 * 2, rank // 2 * 2 + 1]
        agree("a part", ["same"], within=lambda: (both, ["odd" if rank == 3 else "even"]))
    agree("another thing", ["same"])
    assert agreement.conclude(dist.group.WORLD, "an order", ["same"], rank, lambda offers: offers, SOON) == [0, 1, 2, 3]
    assert agreement.conclude(dist.group.WORLD, "an order", ["same"], -rank, sum, SOON) == -6

    def combine(offers: Sequence[int]) -> int:
        raise ValueError(f"nothing to be made of {offers}")

    with raises_everywhere(RuntimeError, "failed with ValueError: nothing to be made of [0, 1, 2, 3]"):
        agreement.conclude(dist.group.WORLD, "an order", ["same"], rank, combine, SOON)


@pytest.mark.long_if("*-3")
@pytest.mark.parametrize("culprit", [0, 3])
@on_ranks(4, timeout=60)
@in_parts
def test_a_rank_that_fails_or_does_not_come(culprit: int) -> None:
    rank = dist.get_rank()
    agree("something", ["same"])

    def describe() -> list[str]:
        if rank == culprit:
            raise ValueError("not here")
        return ["same"]

    begun = time.monotonic()
    with raises_everywhere(
        ValueError if rank == culprit else RuntimeError,
        *([] if rank == culprit else [f"rank {culprit} failed with ValueError"]),
    ):
        agreement.agree(dist.group.WORLD, "an error", describe, timeout=SOON)
    assert time.monotonic() - begun < 10
    dist.barrier()
    if rank == culprit:
        time.sleep(3)
    with raises_everywhere(RuntimeError, f"rank {culprit} did not arrive within 0:00:01"):
        agree("a rank", ["same"], timeout=timedelta(seconds=1))
    agree("a rank", ["same"])


@on_ranks(4, timeout=60)
@in_parts
def test_an_error_reaches_ranks_that_wait_for_one_of_their_part() -> None:
    rank = dist.get_rank()
    agree("something", ["same"])

    def describe() -> list[str]:
        if rank == 3:
            raise ValueError("not here")
        return ["same"]

    if rank == 0:
        time.sleep(5)
    begun = time.monotonic()
    with raises_everywhere(ValueError if rank == 3 else RuntimeError, "not here"):
        agreement.agree(dist.group.WORLD, "an error", describe, timeout=SOON)
    assert time.monotonic() - begun < 4  # also rank 1, which is alone in its part


@on_ranks(4, timeout=90)
@in_parts
def test_a_model_is_sharded_and_trained() -> None:
    """A model is sharded and trained, and ranks in different parts that diverge get an error."""
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    alone, data = parity.build(zoo.Plain), parity.batches(1)[0]
    model(data[dist.get_rank()]).backward()
    sum(alone(x) / 4 for x in data).backward()
    for name, param in alone.named_parameters():
        torch.testing.assert_close(
            model.module.get_parameter(name).grad.full_tensor(), param.grad, rtol=1e-4, atol=1e-6
        )
    with raises_everywhere(RuntimeError, "Other ranks are elsewhere"):
        if dist.get_rank() == 3:
            model.eval()
            with torch.no_grad():
                model(data[0])
        model(data[0]).backward()
        dist.barrier()
    model.reset()


@on_ranks(4, timeout=60)
@in_parts
def test_a_rank_that_was_refused_before_it_kept_a_store() -> None:
    """If a rank is refused before it serves its part's store, ranks that wait for the store learn of its mistake."""
    rank = dist.get_rank()
    wrong: dict[str, Any] = {"zero_dp_strategy": "everything"} if rank == 2 else {}
    with (
        mock.patch.object(rendezvous, "LOOK", timedelta(seconds=0.5)),
        pytest.raises((RuntimeError, ValueError)) as caught,
    ):
        fully_shard_model(parity.build(zoo.Plain), **wrong)
    assert "everything" in str(caught.value)


@on_ranks(4, timeout=60)
@in_parts
def test_a_store_that_has_gone() -> None:
    """If the process that serves a part's store has ended, its ranks raise.

    The others learn that these will not arrive.
    """
    agree("something", ["same"])
    branch = branch_of(dist.group.WORLD.group_name, range(4))

    class Gone:
        def add(self, *_: Any) -> int:
            raise dist.DistNetworkError("connection reset")

    if branch.number == 1:
        branch.part = Gone()  # type: ignore[assignment]
    timeout = timedelta(seconds=2)
    with raises_everywhere(
        RuntimeError, *(["rank 2 failed with the end of its process"] if branch.number else ["did not arrive"])
    ):
        agree("another thing", ["same"], timeout=timeout)
    # Not a collective: the watchdog would see ranks in different ones while the slower part still waits in vain.
    store = compat.default_store()
    store.set(f"{dist.get_rank()} has failed", "")
    store.wait([f"{rank} has failed" for rank in range(4)], SOON)


def cut(count: int, world: int) -> Iterator[Branch]:
    for rank in (0, 63, 64, count - 1):
        with (
            mock.patch.object(dist, "get_rank", return_value=rank),
            mock.patch.object(dist, "get_world_size", return_value=world),
            mock.patch.object(store_tree, "_branches", {}),
        ):
            yield branch_of("group", range(count))


def test_parts_of_large_groups(fake_world: int) -> None:
    with mock.patch.object(store_tree.compat, "address_towards", return_value="127.0.0.1"):
        for count in (65, 128, 1000, 4096, 65536):
            for branch in cut(count, count):
                assert branch.part is None
                assert branch.members()[0] == branch.keeper
                assert sorted(rank for number in range(branch.parts) for rank in branch.members(number)) == list(
                    range(count)
                )
                assert max(branch.parts, branch.size) <= max(64, 2 * count**0.5)
        for branch in cut(65, 64):
            assert not branch.is_tree
