"""Gradients in 8 and 4 bits on the wire, and sums that are sent rounded."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from test_sums_in_rank_order import F32, ONCE, _gradients, batches, in_order, make
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from mfsdp_compile import (
    MixedPrecisionPolicy,
    OptimizerOffloadPolicy,
    compile_step,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_compile.backend.lowerings import register_lowerings
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.sums_in_order import wire

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def rounded(block: Tensor, format: str) -> Tensor:
    """Return what is left of a block that is sent. Written without the package's code."""
    if format in ("bfloat16", "float16"):
        return block.to(getattr(torch, format)).float()
    largest = {"int8": 127.0, "int4": 7.0, "float4_e2m1fn_x2": 6.0}.get(format) or torch.finfo(
        getattr(torch, format)
    ).max
    scale = block.abs().max() / largest if block.any() else torch.tensor(1.0)
    scale = scale.bfloat16().float() if "4_" in format or format == "int4" else scale
    values = block / scale
    if "int" in format:
        return values.round().clamp(-largest, largest) * scale
    if format.startswith("float8"):
        return values.to(getattr(torch, format)).float() * scale
    distances = (values.abs()[:, None] - E2M1).abs()
    ties = distances == distances.amin(1, keepdim=True)
    even = torch.arange(8) % 2 == 0
    nearest = torch.where(ties & even, 2, ties.int()).argmax(1)
    return E2M1[nearest] * values.sign() * scale


def as_sent(packed: list[Tensor], format: str, pieces: int = 1) -> list[Tensor]:
    """Return what one process computes of the packed gradients of all ranks: for each rank, the sum of its slices."""
    ranks, numel = len(packed), -(-packed[0].numel() // len(packed))
    size = 32 if "4_" in format or format == "int4" else 128
    sums = []
    for owner in range(ranks):
        total = torch.zeros(numel)
        for of_rank in packed:
            cut = torch.nn.functional.pad(of_rank.float(), (0, ranks * numel - of_rank.numel()))
            mine = cut.view(pieces, ranks, -1)[:, owner].reshape(-1)
            padded = torch.nn.functional.pad(mine, (0, -numel % size))
            total += torch.cat([rounded(block, format) for block in padded.split(size)])[:numel] if format else mine
        sums.append(total)
    return sums


FORMATS = ["float8_e4m3fn", "float8_e5m2", "int8", "int4", "float4_e2m1fn_x2"]
SHORT = (
    "*-optim_grads_params-eager-float8_e5m2",
    "*-HSDP*params-aot_eager-int8",
    "*-no_shard-eager-int8",
    "*-optim_grads_params-aot_eager-int4",
    "*-HFSDP-eager-float4_e2m1fn_x2",
)
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params", "HSDP optim_grads_params", "HFSDP"]


def check(
    model: Any, call: Any, strategy: str, format: str, outer_format: str = "", within: int = 0, microbatches: int = 2
) -> None:
    """Compare with what one process computes from the ranks' gradients, packed as buckets are. To the bit."""
    data = batches(microbatches)
    for number, micro in enumerate(data):
        model.is_last_microbatch = number == microbatches - 1
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
        if strategy.startswith("H"):  # outer ranks exchange the sums of inner ranks once per step
            inner = ranks // 2
            groups = [
                [torch.cat(as_sent(parts[i : i + inner], format)) for i in range(0, ranks, inner)] for parts in sent
            ]
            sums = [in_order(list(each)) for each in zip(*groups, strict=True)]
            shards = zip(*(one.chunk(inner) for one in sums), strict=True)
            summed = [torch.cat([torch.cat(as_sent(list(shard), outer_format)) for shard in shards])]
        elif within:
            summed = [in_levels(parts, format, outer_format, within) for parts in sent]
        else:
            summed = [torch.cat(as_sent(parts, format)) for parts in sent]
        total = in_order([each * (1 / ranks) for each in summed])
        for slot in slots:
            right = total[slot.offset : slot.offset + slot.numel].view(params[slot.name].shape)
            found = params[slot.name].grad.full_tensor()
            assert torch.equal(found, right), f"{slot.name}: {(found - right).abs().max()}"


def in_levels(parts: list[Tensor], format: str, outer_format: str, within: int) -> Tensor:
    nodes = len(parts) // within
    inner = [as_sent(parts[i : i + within], format, pieces=nodes) for i in range(0, len(parts), within)]
    of_place = [as_sent([of_node[place] for of_node in inner], outer_format) for place in range(within)]
    return torch.cat([of_place[place][node] for node, place in itertools.product(range(nodes), range(within))])


@pytest.mark.long_unless(*SHORT)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_equals_one_process(strategy: str, mode: str, format: str) -> None:
    model, call = make(strategy, mode, getattr(torch, format), fsdp_double_buffer=format == "float8_e5m2")
    check(model, call, strategy, format)


ROUNDED = [("int8", "int8"), ("int4", "int8"), ("int4", "int4"), ("float8_e4m3fn", "bfloat16")]
"""Formats of gradients and of sums. The third is ZeRO++'s order: quantized inside the node, and again across."""


@pytest.mark.long_unless("*-optim_grads_params-eager-*int4-int4", "*-HFSDP-aot_eager-*bfloat16", "*-HSDP*-eager-int8-*")
@pytest.mark.parametrize(("format", "outer_format"), ROUNDED)
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params", "HSDP optim_grads_params", "HFSDP"])
@on_ranks(4)
def test_sums_that_are_rounded(strategy: str, mode: str, format: str, outer_format: str) -> None:
    """The sums are those of neighbors, or of HSDP's and HFSDP's inner ranks."""
    within = 0 if strategy.startswith("H") else 2
    policy = MixedPrecisionPolicy(
        grad_comm_dtype=getattr(torch, format),
        grad_sum_dtype=F32,
        grad_outer_comm_dtype=getattr(torch, outer_format),
        grad_sum_within=within or None,
    )
    model, call = make(strategy, mode, mixed_precision_policy=policy)
    check(model, call, strategy, format, outer_format, within)


@pytest.mark.long_unless("*-optim_grads_params-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_in_host_memory(strategy: str, mode: str) -> None:
    kind = OptimizerOffloadPolicy if strategy == "optim" else CPUOffloadPolicy
    model, call = make(strategy, mode, torch.int8, offload_policy=kind(pin_memory=False))
    check(model, call, strategy, "int8")


@pytest.mark.long
@on_ranks(4)
def test_steps_in_backward() -> None:
    """Buckets are stepped with the same gradients."""

    def stepped(in_backward: bool) -> list[Tensor]:
        policy = MixedPrecisionPolicy(grad_comm_dtype=torch.int4, grad_sum_dtype=F32, grad_sum_within=2)
        model, call = make("optim_grads_params", AOT_EAGER, mixed_precision_policy=policy)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        batch = batches(1)[0, dist.get_rank()]
        if in_backward:
            step = compile_step(model, optimizer, lambda model, batch: model(batch), options={"inner": AOT_EAGER})
            for _ in range(2):
                step(batch)
        for _ in range(0 if in_backward else 2):
            call(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.full_tensor() for param in model.parameters()]

    for one, other in zip(stepped(True), stepped(False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_stochastic_rounding_is_the_same_everywhere(mode: str) -> None:
    """In compiled code, and in another process: random numbers come from the values."""
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.int4, grad_sum_dtype=F32, grad_comm_rounding="stochastic")
    model, call = make("optim_grads_params", mode, mixed_precision_policy=policy)

    def drawn(block: Tensor, format: str) -> Tensor:
        raise AssertionError

    def sums(packed: list[Tensor], format: str, pieces: int = 1) -> list[Tensor]:
        assert (format, pieces) == ("int4", 1)
        name, ranks = "stochastic int4", len(packed)
        numel = packed[0].numel() // ranks
        sent = [wire.encode(each, ranks, name).view(ranks, -1) for each in packed]
        return [wire.sum_decoded(torch.cat([each[r] for each in sent]), ranks, numel, name) for r in range(ranks)]

    with mock.patch.dict(globals(), {"as_sent": sums, "rounded": drawn}):
        check(model, call, "optim_grads_params", "int4")


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_has_no_bias(format: str) -> None:
    """Each result is one of the two neighbors, and the mean error of many is within four standard errors of none."""
    values = torch.cat([torch.randn(4096, 127) * 0.3 + 0.1, torch.ones(4096, 1)], 1).view(-1)

    def sent(name: str) -> Tensor:
        return wire.sum_decoded(wire.encode(values, 1, name), 1, values.numel(), name)

    found, nearest = sent(f"stochastic {format}"), sent(format)
    errors = found - values
    assert errors.mean().abs() < 4 * errors.std() / errors.numel() ** 0.5
    assert torch.equal(found, sent(f"stochastic {format}"))
    assert not torch.equal(found, nearest)
    zeros = torch.ones(256)
    zeros[::2] = 0.0
    name = f"stochastic {format}"
    assert not wire.sum_decoded(wire.encode(zeros, 1, name), 1, 256, name)[::2].any()


def test_random_numbers_are_a_hash_of_bits_and_place() -> None:
    """Uniform, and no value's number says anything about its neighbor's. Bounds: four standard errors."""
    numbers = wire._random(torch.randn(1000, 32))
    assert abs(numbers.mean() - 0.5) < 4 * 12**-0.5 / 32_000**0.5
    for other in (numbers[:, :-1], numbers[:-1]):
        mine = numbers[:, 1:] if other.shape[1] < 32 else numbers[1:]
        assert torch.corrcoef(torch.stack([mine.flatten(), other.flatten()]))[0, 1].abs() < 4 / mine.numel() ** 0.5


def test_random_numbers_are_uniform() -> None:
    """The chi-squared statistic of 256 classes and their mean, for 3e7 numbers. Bounds: four standard deviations."""
    counts, total, count = torch.zeros(256), 0.0, 0
    for seed in range(15):
        blocks = torch.randn(1 << 14, 128, generator=torch.Generator().manual_seed(seed))
        numbers = wire._random(blocks)
        counts += torch.histc(numbers, 256, 0, 1)
        total, count = total + numbers.double().sum().item(), count + numbers.numel()
    expected = count / 256
    assert ((counts - expected).square() / expected).sum() < 255 + 4 * (2 * 255) ** 0.5
    assert abs(total / count - 0.5) < 4 * 12**-0.5 / count**0.5


@pytest.mark.parametrize("name", [*wire.FORMATS])
def test_slices_are_encoded_in_parts(name: str) -> None:
    values = torch.randn(3 * 700).bfloat16()
    for pieces in (1, 4):
        sent = wire.encode(values, 3, name, pieces)
        found = wire.sum_decoded(sent, 3, 700, name)
        with mock.patch.object(wire, "_AT_A_TIME", 256):
            assert torch.equal(wire.encode_each(values, 3, name, pieces), sent)
            assert torch.equal(wire.sum_each(sent, 3, 700, name), found)


def test_values_that_a_rounded_scale_cuts_off() -> None:
    """A scale in bfloat16 may be rounded down, and the largest value is then beyond the largest number."""
    for largest in torch.linspace(1, 2, 200):
        values = torch.zeros(32)
        values[0], values[1] = largest, -largest
        for format in ("int4", "float4_e2m1fn_x2", "stochastic int4", "stochastic float4_e2m1fn_x2"):
            found = wire.sum_decoded(wire.encode(values, 1, format), 1, 32, format)
            assert found[0] > largest * 0.6  # not another number's code
            assert found[1] < -largest * 0.6


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_are_rounded_to_their_neighbors(format: str) -> None:
    chosen = wire.FORMATS[format]
    grid = {"int8": torch.arange(-127.0, 128), "int4": torch.arange(-7.0, 8), "float4_e2m1fn_x2": E2M1}.get(format)
    if grid is None:
        grid = torch.arange(256).to(torch.uint8).view(chosen.dtype).float()
    grid = torch.cat([grid, -grid]).unique()
    grid = grid[grid.isfinite()]
    values = (torch.randn(10_000) * chosen.largest / 3).clamp(-chosen.largest, chosen.largest)
    values = torch.cat([values, values * 1e-3])
    found = wire._rounded(values, chosen, torch.rand(20_000))
    above = torch.bucketize(values, grid)
    assert ((found == grid[above]) | (found == grid[above - 1])).all()


@pytest.mark.parametrize("format", ["float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_that_of_torch(format: str) -> None:
    """The general way to round, which other formats and random numbers need, against torch's casts."""
    chosen = wire.FORMATS[format]
    for size in (100.0, 1e-3, 1e-6):
        values = (torch.randn(100_000) * size).clamp(-chosen.largest, chosen.largest)
        assert torch.equal(wire._rounded(values, chosen, None), values.to(chosen.dtype).float())


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


def test_bytes_of_four_bits() -> None:
    """A byte per pair of values, and two per 32 of them."""
    for format in ("int4", "float4_e2m1fn_x2"):
        assert wire.sent_numel(2 * 100, 2, format) == 2 * 4 * (16 + 2)
        assert wire.encode(torch.randn(200), 2, format).numel() == 2 * 4 * 18


def test_values_that_are_not_finite_stay_visible() -> None:
    for format in FORMATS:
        for value in (torch.inf, torch.nan):
            values = torch.ones(512)
            values[200] = value
            total = wire.sum_decoded(wire.encode(values, 1, format), 1, 512, format)
            assert not total[200].isfinite()
            others = torch.cat([total[:128], total[256:]])
            assert torch.allclose(others, torch.ones(384), rtol=2**-8, atol=0)


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
    for format in FORMATS:
        for largest in (0.0, 1e-45, 2.9e-43, 1e-38):
            values = torch.full((128,), largest)
            assert not wire.sum_decoded(wire.encode(values, 1, format), 1, 128, format).any()
        negative = -torch.full((128,), 1e-38)
        with mock.patch.object(wire, "_random", lambda blocks, first: torch.zeros_like(blocks)):
            for name in (format, f"stochastic {format}"):
                assert not wire.sum_decoded(wire.encode(negative, 1, name), 1, 128, name).any()
        small = torch.full((128,), 1e-30)
        assert torch.allclose(
            wire.sum_decoded(wire.encode(small, 1, format), 1, 128, format), small, rtol=2**-8, atol=0
        )


@contextlib.contextmanager
def without_operators() -> Iterator[None]:
    """Context in which no operator encodes or adds."""
    never = AssertionError("an operator")
    with (
        mock.patch.object(wire, "encode_each", side_effect=never),
        mock.patch.object(wire, "sum_each", side_effect=never),
    ):
        yield


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("format", [*FORMATS, "stochastic int4", "stochastic float8_e4m3fn"])
@on_ranks(2, timeout=300)
def test_inductor(format: str) -> None:
    """Code that it generates encodes, decodes and adds, and not the operators."""
    name = format.removeprefix("stochastic ")
    policy = MixedPrecisionPolicy(
        grad_comm_dtype=getattr(torch, name),
        grad_sum_dtype=F32,
        grad_comm_rounding="nearest" if name == format else "stochastic",
    )
    _, eager = make("optim_grads_params", EAGER, mixed_precision_policy=policy)
    buffers = {"fsdp_double_buffer": format == "float8_e5m2"}
    model, call = make("optim_grads_params", INDUCTOR, mixed_precision_policy=policy, **buffers)
    batch = batches(1)[0, dist.get_rank()]
    eager(batch).backward()
    with without_operators():
        call(batch).backward()
    for one, other in zip(eager.parameters(), model.parameters(), strict=True):
        largest = one.grad.full_tensor().abs().max()
        # Gradients that Inductor rounds otherwise may be rounded to the other neighbor.
        bound = largest * (0.5 if "4_" in format or "int4" in format else 0.15)
        assert (one.grad.full_tensor() - other.grad.full_tensor()).abs().max() <= bound


@pytest.mark.long
@pytest.mark.parametrize("format", wire.FORMATS)
def test_generated_code_has_the_same_bits(format: str) -> None:
    values = torch.randn(3 * 70)
    sent = wire.encode_each(values, 3, format)
    total = wire.sum_each(sent, 3, 70, format)
    register_lowerings()
    torch._dynamo.reset()  # which compiles eight of the formats at most
    encode = torch.compile(lambda values: torch.ops.mfsdp.encode_slices(values, 3, format))
    add = torch.compile(lambda sent: torch.ops.mfsdp.sum_slices(sent, 3, format, 70))
    with without_operators():
        assert torch.equal(encode(values), sent)
        assert torch.equal(add(sent), total)


@on_ranks(2)
def test_settings_without_sums_in_order_are_refused() -> None:
    """When a model is sharded: a context changes what gradients are sent in for a model that has such sums."""
    for given, words in (
        ({"grad_comm_dtype": torch.int8}, "add grad_sum_dtype=torch.float32"),
        ({"grad_comm_dtype": torch.float8_e5m2}, "add grad_sum_dtype=torch.float32"),
        ({"grad_outer_comm_dtype": torch.bfloat16}, "add grad_sum_dtype"),
        ({"grad_sum_within": 2}, "add grad_sum_dtype"),
        ({"grad_sum_dtype": F32, "grad_comm_rounding": "stochastic"}, "is for gradients in 8 and 4 bits"),
    ):
        with parity.raises_everywhere(ValueError, words):
            fully_shard_model(parity.build(zoo.Plain), mixed_precision_policy=MixedPrecisionPolicy(**given))
    in_eight_bits = MixedPrecisionPolicy(grad_comm_dtype=torch.int8)
    plain = fully_shard_model(parity.build(zoo.Plain))
    with parity.raises_everywhere(ValueError, "add grad_sum_dtype"), plain.mixed_precision_context(in_eight_bits):
        pass
    model, call = make("optim_grads_params", EAGER)
    with model.mixed_precision_context(in_eight_bits):
        check(model, call, "optim_grads_params", "int8")


def test_policies_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gradients can be sent in torch\.float8_e4m3fn"):
        MixedPrecisionPolicy(grad_comm_dtype=torch.float8_e8m0fnu, grad_sum_dtype=F32)
    with pytest.raises(ValueError, match="floating-point"):
        MixedPrecisionPolicy(grad_comm_dtype=torch.int16, grad_sum_dtype=F32)
    with pytest.raises(ValueError, match="grad_outer_comm_dtype takes"):
        MixedPrecisionPolicy(grad_sum_dtype=F32, grad_outer_comm_dtype=F32)
    with pytest.raises(ValueError, match="'nearest' or 'stochastic'"):
        MixedPrecisionPolicy(grad_sum_dtype=F32, grad_comm_rounding="up")  # type: ignore[arg-type]
