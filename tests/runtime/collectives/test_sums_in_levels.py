"""``grad_sum_within``: neighbors sum first, and their peers in other groups sum what they have."""

from __future__ import annotations

from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from test_sums_in_rank_order import BF16, F32, ONCE, _gradients, batches, in_order

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime import compat


def make(strategy: str, mode: str, within: Any = 2, sent: torch.dtype = BF16, **policy: Any) -> Any:
    precision = MixedPrecisionPolicy(grad_comm_dtype=sent, grad_sum_dtype=F32, grad_sum_within=within, **policy)
    model = fully_shard_model(
        parity.build(zoo.Uneven),
        fsdp_unit_modules=[zoo.Block],
        mixed_precision_policy=precision,
        **mesh_arguments(strategy),
    )
    if mode == EAGER:
        return model, model
    return model, torch.compile(model, backend="mfsdp", options={"inner": mode})


def run(model: Any, call: Any, data: torch.Tensor) -> None:
    for number, micro in enumerate(data):
        model.is_last_microbatch = number == len(data) - 1
        call(micro[dist.get_rank()]).backward()


def expected(strategy: str, data: torch.Tensor, within: int, dtype: torch.dtype = BF16) -> list[torch.Tensor]:
    alone, ranks = parity.build(zoo.Uneven), data.shape[1]
    of = [[_gradients(alone, micro[rank]) for rank in range(ranks)] for micro in data]
    found = []
    for index in range(len(of[0][0])):
        sent = [[of_rank[index] for of_rank in micro] for micro in of]
        if strategy in ONCE:
            sent = [[in_order([part.to(dtype) for part in each]).to(dtype) for each in zip(*sent, strict=True)]]
        total = torch.zeros_like(of[0][0][index])
        outer = []
        for parts in sent:
            parts = [in_order([p.to(dtype) for p in parts[i : i + within]]) for i in range(0, ranks, within)]
            if strategy.startswith("H"):  # two levels of inner ranks, and outer ranks once per step
                half = len(parts) // 2
                outer.append([in_order(parts[:half]), in_order(parts[half:])])
            else:
                total += in_order(parts) * (1 / ranks)
        if outer:
            total = in_order([in_order(list(each)) for each in zip(*outer, strict=True)]) * (1 / ranks)
        found.append(total)
    return found


@pytest.mark.long_unless("*-optim_grads_params-eager", "*-optim-aot_eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
@on_ranks(4)
def test_equals_one_process(strategy: str, mode: str) -> None:
    for sent in (BF16, F32):
        model, call = make(strategy, mode, sent=sent)
        data = batches(2)
        run(model, call, data)
        for param, right in zip(model.parameters(), expected(strategy, data, 2, sent), strict=True):
            assert torch.equal(param.grad.full_tensor(), right)


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["HSDP optim_grads_params", "HFSDP"])
@on_ranks(8)
def test_of_inner_ranks(strategy: str, mode: str) -> None:
    model, call = make(strategy, mode)
    data = batches(2)
    run(model, call, data)
    for param, right in zip(model.parameters(), expected(strategy, data, 2), strict=True):
        assert torch.equal(param.grad.full_tensor(), right)


@pytest.mark.slow
@pytest.mark.long
@on_ranks(4, timeout=300)
def test_inductor() -> None:
    model, call = make("optim_grads_params", INDUCTOR)
    data = batches(1)
    run(model, call, data)
    for param, right in zip(model.parameters(), expected("optim_grads_params", data, 2), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), right, rtol=1e-2, atol=1e-3)  # as in one level


@on_ranks(4)
def test_half_of_the_bytes_leave_the_group() -> None:
    """Neighbors exchange everything; each sends its peers the sums of its slices, in float32 or rounded."""
    for outer, size in ((None, 4), (BF16, 2)):
        model, _ = make("optim_grads_params", EAGER, grad_outer_comm_dtype=outer)
        with mock.patch.object(compat, "all_to_all", wraps=compat.all_to_all) as exchanged:
            run(model, model, batches(1))
        numels = [bucket.plan.layout.numel for bucket in model.sharded.buckets if bucket.plan.requires_grad]
        by_group: dict[str, list[int]] = {}
        for call in exchanged.call_args_list:
            by_group.setdefault(call.args[3], []).append(call.args[0].nbytes)
        neighbors, peers = model.sharded.topology.levels[2]
        assert sorted(by_group.pop(neighbors.name)) == sorted(numel * 2 for numel in numels)
        assert sorted(by_group.pop(peers.name)) == sorted(numel // 2 * size for numel in numels)
        assert not by_group


@on_ranks(4)
def test_both_levels_wait_until_a_reduction_is_due() -> None:
    model, _ = make("optim", EAGER)
    with mock.patch.object(compat, "all_to_all", wraps=compat.all_to_all) as exchanged:
        model.is_last_microbatch = False
        model(batches(1)[0, dist.get_rank()]).backward()
        assert not exchanged.called
        model.is_last_microbatch = True
        model(batches(1)[0, dist.get_rank()]).backward()
    trained = sum(bucket.plan.requires_grad for bucket in model.sharded.buckets)
    assert exchanged.call_count == 2 * trained


@on_ranks(4)
def test_the_node_says_how_many() -> None:
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "2"}):
        model, _ = make("optim_grads_params", EAGER, "node")
        assert [*model.sharded.topology.levels] == [2]
        assert "sums" not in str(model.sharded.topology)
        assert not make("no_shard", EAGER, "node")[0].sharded.topology.levels
    with mock.patch.dict("os.environ", {"LOCAL_WORLD_SIZE": "4"}):
        assert not make("optim_grads_params", EAGER, "node")[0].sharded.topology.levels


@on_ranks(4)
def test_refused() -> None:
    with parity.raises_everywhere(ValueError, "these are 4. Give a divisor"):
        make("optim_grads_params", EAGER, 3)
    with parity.raises_everywhere(ValueError, "no gradient is"):
        make("no_shard", EAGER, 2)
    with mock.patch.dict("os.environ"):
        __import__("os").environ.pop("LOCAL_WORLD_SIZE", None)
        with parity.raises_everywhere(ValueError, "needs the number of ranks per node"):
            make("optim_grads_params", EAGER, "node")
    with pytest.raises(ValueError, match="takes a number of ranks"):
        MixedPrecisionPolicy(grad_sum_dtype=F32, grad_sum_within=0)
