"""``grad_sum_dtype=torch.float32``: bfloat16 on the wire, sums in float32 in the order of ranks, to the bit."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.runtime import compat

BF16, F32 = torch.bfloat16, torch.float32
build = parity.build
ONCE = ("no_shard", "optim", "HSDP no_shard", "HSDP optim", "HFSDP optim")
"""Strategies that add up whole gradients before they are sent."""


def make(strategy: str, mode: str, sent: torch.dtype = BF16, **arguments: Any) -> Any:
    policy = MixedPrecisionPolicy(grad_comm_dtype=sent, grad_sum_dtype=F32)
    model = fully_shard_model(
        parity.build(zoo.Uneven),
        fsdp_unit_modules=[zoo.Block],
        **({"mixed_precision_policy": policy} | mesh_arguments(strategy) | arguments),
    )
    if mode == EAGER:
        return model, model
    return model, torch.compile(model, backend="mfsdp", options={"inner": mode})


def batches(microbatches: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(microbatches, dist.get_world_size(), 3, 8, generator=generator)


def in_order(parts: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, [part.float() for part in parts])


def expected(strategy: str, data: Tensor, dtype: torch.dtype = BF16) -> list[Tensor]:
    """Compute on one process what ranks send, and add it up in the order of ranks."""
    alone, ranks = parity.build(zoo.Uneven), data.shape[1]
    of = [[_gradients(alone, data[micro, rank]) for rank in range(ranks)] for micro in range(len(data))]
    found = []
    for index in range(len(of[0][0])):
        sent = [[of[micro][rank][index] for rank in range(ranks)] for micro in range(len(data))]
        if strategy in ONCE:  # each rank adds up its microbatches, rounded before and after
            sent = [[in_order([part.to(dtype) for part in each]).to(dtype) for each in zip(*sent, strict=True)]]
        total = torch.zeros_like(of[0][0][index])
        for parts in sent:
            parts = [part.to(dtype) for part in parts]
            if strategy.startswith("H") and strategy != "HSDP no_shard":
                inner = ranks // 2
                parts = [in_order(parts[first : first + inner]) for first in range(0, ranks, inner)]
            total += in_order(parts) * (1 / ranks)
        found.append(total)
    return found


def _gradients(model: torch.nn.Module, batch: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(batch), list(model.parameters())))


def check(strategy: str, mode: str, microbatches: int, sent: torch.dtype = BF16, **arguments: Any) -> None:
    model, call = make(strategy, mode, sent, **arguments)
    data = batches(microbatches)
    for number, micro in enumerate(data):
        model.is_last_microbatch = number == microbatches - 1
        call(micro[dist.get_rank()]).backward()
    names = [name for name, _ in model.named_parameters()]
    for name, param, right in zip(names, model.parameters(), expected(strategy, data, sent), strict=True):
        found = param.grad.full_tensor()
        assert found.dtype == F32
        if mode == INDUCTOR:  # computes gradients in other orders: one rounding to bfloat16 of one rank's
            torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-3)
        else:
            assert torch.equal(found, right), f"{name}: {(found - right).abs().max()}"


SHORT = {("optim_grads_params", EAGER), ("HSDP optim_grads_params", AOT_EAGER)}
ROWS = [
    pytest.param(strategy, mode, marks=[] if (strategy, mode) in SHORT else [pytest.mark.long])
    for strategy in STRATEGIES
    for mode in (EAGER, AOT_EAGER)
]


@pytest.mark.parametrize(("strategy", "mode"), ROWS)
@on_ranks(4)
def test_equals_one_process(strategy: str, mode: str) -> None:
    check(strategy, mode, 1)
    check(strategy, mode, 3)


@pytest.mark.long_unless("*-optim_grads_params-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@on_ranks(3)
def test_slices_that_are_padded(strategy: str, mode: str) -> None:
    """Three ranks do not divide a bucket that none of them shards."""
    check(strategy, mode, 1)


@on_ranks(4)
def test_the_order_is_that_of_ranks() -> None:
    """Sums of a few 16-bit numbers are exact in float32. Those of numbers in float32 depend on the order."""
    for strategy in ("optim_grads_params", "HSDP optim_grads_params"):
        check(strategy, EAGER, 1, sent=F32)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim_grads_params", "HSDP optim_grads_params"])
@on_ranks(4, timeout=300)
def test_inductor(strategy: str) -> None:
    check(strategy, INDUCTOR, 2)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_communication_buffers_change_no_bit(mode: str) -> None:
    check("optim_grads_params", mode, 1, fsdp_double_buffer=True)


@on_ranks(2)
def test_bytes_are_those_of_a_reduce_scatter() -> None:
    model, _ = make("optim_grads_params", EAGER)
    batch = batches(1)[0, dist.get_rank()]
    sent = [bucket.plan.layout.numel * 2 for bucket in model.sharded.buckets if bucket.plan.requires_grad]
    with mock.patch.object(compat, "all_to_all", wraps=compat.all_to_all) as exchanged:
        seen = collectives(lambda: model(batch).backward())
    assert not seen["reduce_scatter_tensor"]
    assert sorted(call.args[0].nbytes for call in exchanged.call_args_list) == sorted(sent)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grad_sum_dtype": torch.bfloat16}, "grad_sum_dtype takes torch.float32 or None, got torch.bfloat16"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MixedPrecisionPolicy(**given)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_gradients_in_float64_are_added_in_float64(mode: str) -> None:
    policy = MixedPrecisionPolicy(None, grad_sum_dtype=F32)
    with mock.patch.object(parity, "build", lambda kind: build(kind).double()):
        model, call = make("HSDP optim_grads_params", mode, mixed_precision_policy=policy)
        alone = parity.build(zoo.Uneven)
    data = batches(2).double()
    for number, micro in enumerate(data):
        model.is_last_microbatch = number == 1
        call(micro[dist.get_rank()]).backward()
    of = [[_gradients(alone, micro[rank]) for rank in range(4)] for micro in data]
    for index, param in enumerate(model.parameters()):
        inner = [[of[micro][first][index] + of[micro][first + 1][index] for micro in (0, 1)] for first in (0, 2)]
        right = ((inner[0][0] + inner[0][1]) + (inner[1][0] + inner[1][1])) * 0.25
        assert torch.equal(param.grad.full_tensor(), right)


@on_ranks(2)
def test_averages_and_other_sums() -> None:
    """An average in the collective is a sum that is scaled; a sum is not scaled."""
    for arguments, factor in (({"average_in_collective": True}, 1), ({"calculate_per_token_loss": True}, 2)):
        model, call = make("optim_grads_params", EAGER, **arguments)
        data = batches(1)
        call(data[0, dist.get_rank()]).backward()
        for param, right in zip(model.parameters(), expected("optim_grads_params", data), strict=True):
            assert torch.equal(param.grad.full_tensor(), right * factor)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "HSDP optim_grads_params"])
@on_ranks(4)
def test_a_mean_fits_where_the_sum_would_overflow(strategy: str) -> None:
    """In float16. With two microbatches, HSDP keeps sums of inner ranks in between."""
    policy = MixedPrecisionPolicy(None, grad_sum_dtype=F32)
    model = fully_shard_model(Scale().half(), mixed_precision_policy=policy, **mesh_arguments(strategy))
    for micro in range(2):
        model.is_last_microbatch = micro == 1
        model(torch.full((7,), 2e4, dtype=torch.float16)).backward()
    assert torch.equal(model.module.weight.grad.full_tensor(), torch.full((7,), 4e4, dtype=torch.float16))


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_microbatches_are_added_in_the_dtype_of_gradients(mode: str) -> None:
    """256 + 1 is 256 in bfloat16, which is sent."""
    policy = MixedPrecisionPolicy(grad_comm_dtype=BF16)
    model = fully_shard_model(Scale(), mixed_precision_policy=policy, zero_dp_strategy="no_shard")
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    for micro, value in enumerate((256.0, 1.0, 1.0)):
        model.is_last_microbatch = micro == 2
        call(torch.full((7,), value)).backward()
    assert torch.equal(model.module.weight.grad.full_tensor(), torch.full((7,), 258.0))


@on_ranks(2)
def test_the_dtype_that_is_sent_changes() -> None:
    model, _ = make("optim_grads_params", EAGER)
    data = batches(1)
    with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=F32)):
        model(data[0, dist.get_rank()]).backward()
    for param, right in zip(model.parameters(), expected("optim_grads_params", data, F32), strict=True):
        assert torch.equal(param.grad.full_tensor(), right)


@on_ranks(2)
def test_two_models_in_one_graph() -> None:
    """Under a profiler, which gets the names of collectives: buckets of both models have the same names."""
    policy = MixedPrecisionPolicy(grad_comm_dtype=BF16, grad_sum_dtype=F32)
    both = [
        fully_shard_model(nn.Linear(4, 4), zero_dp_strategy="no_shard", check_values=False, **given)
        for given in ({"mixed_precision_policy": policy}, {})
    ]
    call = torch.compile(lambda x: sum(m(x).sum() for m in both), backend="mfsdp", options={"inner": "aot_eager"})
    with torch.profiler.profile():
        call(torch.ones(2, 4)).backward()
    assert all(torch.equal(m.module.weight.grad.full_tensor(), torch.full((4, 4), 2.0)) for m in both)


@on_ranks(2)
def test_autograd_grad() -> None:
    model, _ = make("optim_grads_params", EAGER)
    data = batches(1)
    params = list(model.parameters())
    found = torch.autograd.grad(model(data[0, dist.get_rank()]), params)
    for mine, right in zip(found, expected("optim_grads_params", data), strict=True):
        assert torch.equal(mine.full_tensor(), right)


@pytest.mark.long
@on_ranks(2)
def test_regions_and_blocks_that_are_compiled_alone() -> None:
    data = batches(1)
    right = expected("optim_grads_params", data)
    for alone in (False, True):
        model, _ = make("optim_grads_params", EAGER)
        settings: dict[str, Any] = {"backend": "mfsdp", "options": {"inner": "aot_eager", "regions": True}}
        if alone:
            for block in model.module.blocks:
                block.compile(**settings)
        call = model if alone else torch.compile(model, **settings)
        call(data[0, dist.get_rank()]).backward()
        for param, gradient in zip(model.parameters(), right, strict=True):
            assert torch.equal(param.grad.full_tensor(), gradient)
        torch._dynamo.reset()
