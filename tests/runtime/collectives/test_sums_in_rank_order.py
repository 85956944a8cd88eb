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
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import wire

BF16, F32 = torch.bfloat16, torch.float32
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
@on_ranks(4)
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
        ({"grad_sum_dtype": torch.float32, "grad_comm_dtype": torch.float64}, "would round gradients"),
    ],
)
def test_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MixedPrecisionPolicy(**given)


@pytest.mark.usefixtures("fake_world")
def test_gradients_in_float64_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"gradients of .* sent in torch.float64"):
        fully_shard_model(
            zoo.Plain().double(),
            fsdp_unit_modules=[zoo.Block],
            mixed_precision_policy=MixedPrecisionPolicy(None, grad_sum_dtype=torch.float32),
        )


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


@pytest.mark.parametrize(
    "strategy", ["optim_grads_params", pytest.param("HSDP optim_grads_params", marks=pytest.mark.long)]
)
@on_ranks(4)
def test_a_mean_fits_where_the_sum_would_overflow(strategy: str) -> None:
    """In float16. With two microbatches, HSDP keeps sums of inner ranks in between."""
    policy = MixedPrecisionPolicy(None, grad_sum_dtype=F32)
    model = fully_shard_model(Scale().half(), mixed_precision_policy=policy, **mesh_arguments(strategy))
    for micro in range(2):
        model.is_last_microbatch = micro == 1
        model(torch.full((7,), 2e4, dtype=torch.float16)).backward()
    assert torch.equal(model.module.weight.grad.full_tensor(), torch.full((7,), 4e4, dtype=torch.float16))


@on_ranks(2)
def test_the_dtype_that_is_sent_changes() -> None:
    model, _ = make("optim_grads_params", EAGER)
    data = batches(1)
    with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=F32)):
        model(data[0, dist.get_rank()]).backward()
    for param, right in zip(model.parameters(), expected("optim_grads_params", data, F32), strict=True):
        assert torch.equal(param.grad.full_tensor(), right)
    sent_in_64 = MixedPrecisionPolicy(grad_comm_dtype=torch.float64)
    with parity.raises_everywhere(ValueError, "would round gradients"), model.mixed_precision_context(sent_in_64):
        pass


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


# -- 8 bits on the wire ------------------------------------------------------------------------------------------------


def as_sent(packed: list[Tensor], format: str) -> Tensor:
    """Return what one process computes of the packed gradients of all ranks: each encoded, decoded and added in order.

    Written without the package's code: a block is 128 values of a rank's slice.
    """
    dtype = getattr(torch, format)
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    ranks, numel = len(packed), -(-packed[0].numel() // len(packed))
    sums = []
    for owner in range(ranks):
        total = torch.zeros(numel)
        for of_rank in packed:
            mine = torch.zeros(numel)
            part = of_rank[owner * numel : (owner + 1) * numel].float()
            mine[: part.numel()] = part
            found = []
            for block in mine.split(128):
                scale = block.abs().max() / largest if block.any() else torch.tensor(1.0)
                values = block / scale
                values = values.round() if dtype is torch.int8 else values
                found.append(values.to(dtype).float() * scale)
            total += torch.cat(found)
        sums.append(total)
    return torch.cat(sums)


@pytest.mark.long_unless(
    "*-optim_grads_params-eager-float8_e5m2", "*-HSDP*params-aot_eager-int8", "*-no_shard-eager-int8"
)
@pytest.mark.parametrize("format", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize(
    "strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params", "HSDP optim_grads_params", "HFSDP"]
)
@on_ranks(4)
def test_eight_bits_on_the_wire(strategy: str, mode: str, format: str) -> None:
    """To the bit what one process computes from the ranks' gradients, packed as buckets are."""
    model, call = make(strategy, mode, getattr(torch, format), fsdp_double_buffer=format == "float8_e5m2")
    data = batches(2)
    for number, micro in enumerate(data):
        model.is_last_microbatch = number == 1
        call(micro[dist.get_rank()]).backward()
    alone, ranks = parity.build(zoo.Uneven), dist.get_world_size()
    names = [name for name, _ in alone.named_parameters()]
    of = [[dict(zip(names, _gradients(alone, micro[rank]), strict=True)) for rank in range(ranks)] for micro in data]
    params = dict(zip(names, model.parameters(), strict=True))
    for bucket in model.sharded.buckets:
        slots = bucket.plan.layout.slots

        def packed(gradients: dict[str, Tensor], slots: Any = slots, bucket: Any = bucket) -> Tensor:
            flat = torch.zeros(bucket.plan.layout.numel)
            for slot in slots:
                flat[slot.offset : slot.offset + slot.numel] = gradients[slot.name].flatten()
            return flat

        sent = [[packed(gradients) for gradients in by_rank] for by_rank in of]
        if strategy in ONCE:
            sent = [[in_order(list(each)) for each in zip(*sent, strict=True)]]
        if strategy.startswith("H"):  # inner ranks' sums are in float32; outer ranks exchange them once per step
            inner = ranks // 2
            groups = [[as_sent(parts[i : i + inner], format) for i in range(0, ranks, inner)] for parts in sent]
            summed = [in_order([in_order(list(each)) for each in zip(*groups, strict=True)])]
        else:
            summed = [as_sent(parts, format) for parts in sent]
        total = in_order([each * (1 / ranks) for each in summed])
        for slot in slots:
            right = total[slot.offset : slot.offset + slot.numel].view(params[slot.name].shape)
            found = params[slot.name].grad.full_tensor()
            assert torch.equal(found, right), f"{slot.name}: {(found - right).abs().max()}"


@on_ranks(2)
def test_bytes_of_eight_bits() -> None:
    """A byte per value, and four per 128 of them."""
    model, _ = make("optim_grads_params", EAGER, torch.float8_e5m2)
    sizes = [bucket.plan.layout.numel for bucket in model.sharded.buckets if bucket.plan.requires_grad]
    with mock.patch.object(compat, "all_to_all", wraps=compat.all_to_all) as exchanged:
        model(batches(1)[0, dist.get_rank()]).backward()
    sent = sorted(call.args[0].nbytes for call in exchanged.call_args_list)
    assert sent == sorted(2 * (-(-numel // 256)) * 132 for numel in sizes)
    assert {call.args[0].dtype for call in exchanged.call_args_list} == {torch.uint8}


def test_values_that_are_not_finite_stay_visible() -> None:
    for format in ("float8_e4m3fn", "float8_e5m2", "int8"):
        for value in (torch.inf, torch.nan):
            values = torch.ones(512)
            values[200] = value
            total = wire.sum_decoded(wire.encode(values, 1, format), 1, 512, format)
            assert not total[200].isfinite()
            assert total[:128].eq(1).all()
            assert total[256:].eq(1).all()


@pytest.mark.parametrize("arguments", [{"report_nan_in_param_grad": True}, {"zero_dp_strategy": "optim"}])
@on_ranks(2)
def test_the_first_stage_of_several_ranks_is_in_eight_bits(arguments: dict[str, Any]) -> None:
    """Stages of one rank only wait, or look at gradients."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    both = mesh["outer", "inner"]._flatten("both").get_group()
    dims = {"dp_outer_dim": "outer", "dp_shard_dim": "inner", "hybrid_fsdp_group": both}
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.int8, grad_sum_dtype=F32)
    model = fully_shard_model(
        parity.build(zoo.Uneven),
        fsdp_unit_modules=[zoo.Block],
        device_mesh=mesh,
        mixed_precision_policy=policy,
        **dims,
        **arguments,
    )
    with mock.patch.object(compat, "all_to_all", wraps=compat.all_to_all) as exchanged:
        model(batches(1)[0, dist.get_rank()]).backward()
    assert {call.args[0].dtype for call in exchanged.call_args_list} == {torch.uint8}
    alone = parity.build(zoo.Uneven)
    exact = [sum(each) / 2 for each in zip(*(_gradients(alone, one) for one in batches(1)[0]), strict=True)]
    for param, right in zip(model.parameters(), exact, strict=True):
        largest = right.abs().max()
        torch.testing.assert_close(param.grad.full_tensor(), right, rtol=0, atol=float(largest) / 40)


def test_tiny_values_count_as_zeros() -> None:
    """Their scale would have few digits, or none."""
    for format in ("float8_e4m3fn", "float8_e5m2", "int8"):
        for largest in (0.0, 1e-45, 2.9e-43, 1e-38):
            values = torch.full((128,), largest)
            assert not wire.sum_decoded(wire.encode(values, 1, format), 1, 128, format).any()
        small = torch.full((128,), 1e-30)
        assert torch.allclose(wire.sum_decoded(wire.encode(small, 1, format), 1, 128, format), small, rtol=1e-3, atol=0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("format", ["float8_e5m2", "int8"])
@on_ranks(2)
def test_inductor_in_eight_bits(format: str) -> None:
    _, eager = make("optim_grads_params", EAGER, getattr(torch, format))
    model, call = make("optim_grads_params", INDUCTOR, getattr(torch, format))
    batch = batches(1)[0, dist.get_rank()]
    for each in (eager, call):
        each(batch).backward()
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad.full_tensor(), rtol=0.3, atol=1e-3)


def test_eight_bits_that_are_refused() -> None:
    for dtype in (torch.float8_e5m2, torch.int8):
        with pytest.raises(ValueError, match=r"add grad_sum_dtype=torch\.float32"):
            MixedPrecisionPolicy(grad_comm_dtype=dtype)
    with pytest.raises(ValueError, match=r"gradients can be sent in torch\.float8_e4m3fn"):
        MixedPrecisionPolicy(grad_comm_dtype=torch.float8_e8m0fnu, grad_sum_dtype=F32)
    with pytest.raises(ValueError, match="floating-point"):
        MixedPrecisionPolicy(grad_comm_dtype=torch.int16, grad_sum_dtype=F32)
